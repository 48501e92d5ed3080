"""Each view of the demo by itself in a real browser, fed by what a test gives it, and by a real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr
import pytest
from playwright.sync_api import Page, expect

from demo import views
from helpers.browsing import OpenTab, browser, fits, open_tab, picture, wait_until
from helpers.demo_parts import EVIL, make_snapshot

__all__ = ["browser", "open_tab"]  # fixtures

pytestmark = pytest.mark.browser


class Stage:
    """A page with all five views, which shows what a test gives it."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.beams: list[dict[str, Any]] = []
        self.maps: list[dict[str, Any]] = []
        self.take_snapshot: Callable[[], dict[str, Any]] = lambda: make_snapshot(0, 1) | {"groups": [], "events": []}
        with gr.Blocks(analytics_enabled=False) as self.blocks:
            gr.HTML("views")
            shown = [
                views.PoolView(lambda step: None, elem_id="pool"),
                views.BlockTables(elem_id="tables"),
                views.EventLog(elem_id="events"),
                views.BeamTree(elem_id="beams"),
                views.MemoryMaps(elem_id="maps"),
            ]
            gr.Timer(0.2).tick(self._values, outputs=shown, show_progress="hidden", concurrency_limit=None)
        _, self.url, _ = self.blocks.launch(prevent_thread_lock=True, server_name="127.0.0.1", quiet=True)

    def _values(self) -> list[dict[str, Any]]:
        snapshot = self.take_snapshot()
        return [
            views.pool_value(snapshot, self.names),
            views.tables_value(snapshot, self.names),
            views.events_value(snapshot, self.names),
            views.beam_tree_value(self.beams),
            views.memory_maps_value(self.maps),
        ]


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.blocks.close()


def small_snapshot() -> dict[str, Any]:
    """Two requests that share a block, one that is swapped out, one that waits; a block that is cached and free."""

    def group(number: int, status: str, *tables: list[int]) -> dict[str, Any]:
        sequences = [
            {
                "id": 10 * number + index,
                "num_tokens": 16 * len(table) - 3,
                "num_computed_tokens": max(0, 16 * len(table) - 4),
                "num_prompt_tokens": 20,
                "num_cached_tokens": 16,
                "tail": [],
                "block_table": table,
                "block_tables": [table],
            }
            for index, table in enumerate(tables)
        ]
        head = {"id": number, "request_id": None, "status": status, "is_idle": False, "priority": 0}
        return head | {"sequences": sequences}

    events = [
        {"id": 1, "time": 1.7e9, "step": 1, "kind": "allocated", "group": 1, "sequence": 10, "blocks": [5, 6, 7]},
        {"id": 2, "time": 1.7e9, "step": 2, "kind": "preempted", "group": 3, "how": "swap", "num_sequences": 1},
        {"id": 3, "time": 1.7e9, "step": 2, "kind": "step", "num_decode": 2, "num_prefill_tokens": 0, "seconds": 0.01},
    ]
    return {
        "num_blocks": 64,
        "block_size": 16,
        "num_swap_blocks": 32,
        "bytes_per_block": 36864,
        "is_paused": True,
        "num_steps": 2,
        "blocks": [{5: 2, 6: 1, 7: 1, 8: 1, 9: -1}.get(block, 0) for block in range(64)],
        "hashes": ["0a1b2c3d" if block in (5, 6, 9) else "" for block in range(64)],
        "groups": [
            group(1, "running", [5, 6, 7]),
            group(2, "running", [5, 8]),
            group(3, "swapped", [0, 1]),
            group(4, "waiting", []),
        ],
        "waiting": [4],
        "running": [1, 2],
        "swapped": [3],
        "events": events,
    }


NAMES = {1: "chat-1", 2: "chat-2", 3: "burst-3", 4: "burst-4"}


def test_the_pool_by_keyboard_and_mouse(stage: Stage, open_tab: OpenTab) -> None:
    stage.take_snapshot, stage.names = small_snapshot, NAMES
    page = open_tab(stage.url)
    pool = page.locator("#pool")
    expect(pool.get_by_role("list")).to_contain_text("1 shared")
    expect(pool).to_contain_text("64 blocks of 16 tokens, 36.0 KiB each")
    expect(pool).to_contain_text("CPU swap space: 2 of 32 blocks in use")
    expect(pool.locator(".kv-paused")).to_be_visible()

    grid = pool.get_by_role("grid").first
    grid.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")  # as without a mouse
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    spoken = pool.locator("[aria-live]").first
    expect(spoken).to_contain_text("Block 5: 16 of 16 tokens")
    expect(spoken).to_contain_text("ref count 2, hash 0a1b2c3d")
    expect(spoken).to_contain_text("chat-1, sequence 10: block 1 of 3 (tokens 0 to 15)")
    expect(spoken).to_contain_text("chat-2, sequence 20: block 1 of 2")
    expect(grid.get_by_role("gridcell")).to_contain_text("Block 5")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(spoken).to_contain_text("Block 9: free, its content is cached")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(pool.locator("button[aria-pressed=true]")).to_have_text("chat-2")
    page.keyboard.press("Escape")
    expect(pool.locator("button[aria-pressed=true]")).to_have_count(0)

    box = grid.locator("canvas").bounding_box()
    assert box is not None
    grid.locator("canvas").hover(position={"x": box["width"] - 5, "y": 5})
    expect(pool.locator(".kv-tip:visible")).to_contain_text("free")


def test_a_request_is_shown_alone_in_all_views(stage: Stage, open_tab: OpenTab) -> None:
    stage.take_snapshot, stage.names = small_snapshot, NAMES
    page = open_tab(stage.url)
    canvas = page.locator("#pool .kv-grid canvas").first
    row = page.locator("#tables .kv-request", has_text="chat-2")
    expect(row).to_be_visible()
    page.wait_for_timeout(1000)  # until nothing glows any more
    before = picture(canvas)
    page.locator("#tables .kv-queue button", has_text="chat-2").click()
    wait_until(lambda: picture(canvas) != before, "the pool shows chat-2 alone", page)
    assert "kv-picked" in (row.get_attribute("class") or "")
    expect(page.locator("#events li.kv-dim", has_text="chat-1 took")).to_be_visible()
    expect(page.locator("#pool button[aria-pressed=true]")).to_have_text("chat-2")
    page.keyboard.press("Escape")
    wait_until(lambda: picture(canvas) == before, "the pool shows all again", page)


def test_block_tables_and_queues(stage: Stage, open_tab: OpenTab) -> None:
    stage.take_snapshot, stage.names = small_snapshot, NAMES
    page = open_tab(stage.url)
    tables = page.locator("#tables")
    expect(tables.get_by_role("heading")).to_have_text(["2 Running", "1 Waiting", "1 Swapped"])
    first = tables.locator(".kv-request", has_text="chat-1")
    assert first.locator("li").all_inner_texts() == ["0\n5", "1\n6", "2\n7"]
    expect(first.locator("li.kv-shared")).to_have_count(1)
    expect(first).to_contain_text("16 found in the prefix cache")
    expect(tables.locator(".kv-request", has_text="burst-3")).to_contain_text("swapped out")


def id_before_ones_eyes(page: Page) -> str:
    """The event that lies a little below the upper edge of the log."""
    return page.locator("#events ol").evaluate(
        """list => {
          list.scrollIntoView({ block: "center" });
          const box = list.getBoundingClientRect();
          return document.elementFromPoint(box.left + 200, box.top + 60).closest("li").dataset.id }"""
    )


def test_the_event_log_only_grows_by_what_is_new(stage: Stage, open_tab: OpenTab) -> None:
    snapshot = small_snapshot()
    stage.take_snapshot, stage.names = lambda: snapshot, NAMES
    page = open_tab(stage.url)
    rows = page.locator("#events li")
    expect(rows.locator("visible=true")).to_have_count(2)
    expect(rows.nth(1)).to_contain_text("burst-3 was preempted (swap) to make room")
    page.locator("#events button", has_text="step").click()
    expect(rows.locator("visible=true")).to_have_count(3)
    page.locator("#events button", has_text="preempted").click()
    expect(rows.locator("visible=true")).to_have_count(2)

    more = {"time": 1.7e9, "step": 3, "kind": "freed", "group": 1, "sequence": 10, "blocks": [5]}
    snapshot["events"] = snapshot["events"] + [more | {"id": 4 + each} for each in range(600)]
    expect(rows.first).to_have_attribute("data-id", "603")
    assert rows.count() <= 361
    log = page.locator("#events ol")
    log.evaluate("list => { list.scrollTop = 400 }")
    read = id_before_ones_eyes(page)
    snapshot["events"] = snapshot["events"] + [more | {"id": 604 + each} for each in range(20)]
    expect(rows.first).to_have_attribute("data-id", "623")
    assert id_before_ones_eyes(page) == read


def make_beams(width: int = 8, steps: int = 40) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    alive: list[int | None] = [None]
    for step in range(steps):
        parents = [alive[index % max(1, len(alive) - 2)] for index in range(width)]
        alive = []
        for parent in parents:
            score = (nodes[parent]["score"] if parent is not None else 0.0) - 0.1 * (len(nodes) % 7 + 1)
            node = {"id": len(nodes), "parent": parent, "token": f" t{len(nodes)}", "score": score, "step": step}
            alive.append(len(nodes))
            nodes.append(node | {"rank": None})
    for rank, number in enumerate(alive[:3], 1):
        assert number is not None
        nodes[number]["rank"] = rank
    return nodes


def test_the_beam_tree(stage: Stage, open_tab: OpenTab) -> None:
    stage.beams = make_beams()
    page = open_tab(stage.url)
    tree = page.locator("#beams")
    expect(tree).to_contain_text("320 tokens explored, 3 beams returned")
    expect(tree.locator(".kv-rank")).to_contain_text(["#3", "#2", "#1"])
    # Boxes of one lane never lie upon each other.
    overlaps = page.evaluate(
        """() => {
          const boxes = [...document.querySelectorAll('#beams .kv-box, #beams .kv-badge')].map((box) => box.getBBox());
          return boxes.filter((a, i) => boxes.some((b, j) => i < j && Math.abs(a.y - b.y) < 12
            && a.x < b.x + b.width && b.x < a.x + a.width)).length }"""
    )
    assert overlaps == 0
    assert tree.locator("svg").evaluate("svg => svg.getBoundingClientRect().height") < 700
    frame = tree.get_by_role("group")
    frame.focus()
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    expect(tree.locator(".kv-told")).to_contain_text("returned, rank 1")
    path: list[str] = []
    number: int | None = next(node["id"] for node in stage.beams if node["rank"] == 1)
    while number is not None:
        path.insert(0, stage.beams[number]["token"])
        number = stage.beams[number]["parent"]
    expect(tree.locator(".kv-told q")).to_have_text("".join(path))
    assert frame.evaluate("frame => frame.scrollLeft") > 500


def make_maps() -> list[dict[str, Any]]:
    used = [40, 100, 64]
    rows = [{"label": f"chat-{index}", "reserved": 256, "used": tokens} for index, tokens in enumerate(used)]
    blocks = [{"label": f"block {index}", "reserved": 16, "used": 16 if index else 12} for index in range(61)]
    return [
        {"name": "Longest length", "note": "All at once.", "bytes_per_token": 2304, "rows": rows, "waste": 0.734},
        {"name": "hf_paged", "note": "Block by block.", "bytes_per_token": 2304, "rows": blocks, "waste": 0.004},
    ]


def test_memory_maps(stage: Stage, open_tab: OpenTab) -> None:
    stage.maps = make_maps()
    page = open_tab(stage.url)
    maps = page.locator("#maps")
    expect(maps.locator(".kv-waste")).to_have_text(["73.4 % wasted", "0.4 % wasted"])
    expect(maps).to_contain_text("459 KiB used of 1.7 MiB reserved")
    page.locator("#maps .kv-map").first.focus()
    page.keyboard.press("ArrowDown")
    expect(maps.locator("[aria-live]").first).to_have_text("chat-0. 40 of 256 tokens used, 576 KiB. 216 wasted")
    # One scale: all lines are equally high. A line a request; the many blocks lie behind each other, 16 of them a line.
    heights = maps.locator("canvas").evaluate_all("all => all.map((canvas) => canvas.clientHeight)")
    assert 4 * heights[0] == 3 * heights[1]


def test_nothing_is_ever_markup(stage: Stage, open_tab: OpenTab) -> None:
    snapshot = small_snapshot()
    snapshot["events"].append({"id": 9, "time": 1.7e9, "step": 3, "kind": EVIL, "group": 1, "sequence": 10})
    stage.take_snapshot, stage.names = lambda: snapshot, dict.fromkeys(NAMES, EVIL)
    stage.beams = [{"id": 0, "parent": None, "token": EVIL, "score": -1.0, "step": 0, "rank": 1}]
    stage.maps = make_maps()
    stage.maps[0] |= {"name": EVIL, "note": EVIL}
    stage.maps[0]["rows"][0]["label"] = EVIL
    page = open_tab(stage.url)
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    for view in ("pool", "tables", "events", "maps"):
        expect(page.locator(f"#{view}")).to_contain_text("<img src=x onerror=")
    expect(page.locator("#beams")).to_contain_text("1 beam returned")
    page.locator("#beams .kv-node").first.hover()
    expect(page.locator("#beams q")).to_have_text(EVIL)
    page.locator("#pool canvas").nth(5).hover(position={"x": 200, "y": 5})
    page.locator("#maps canvas").first.hover(position={"x": 10, "y": 5})
    expect(page.locator("#maps .kv-tip:visible")).to_contain_text("<script>")
    assert page.locator(".kv-view img, .kv-view script").count() == 0
    assert asked == []


def test_themes_and_widths(stage: Stage, open_tab: OpenTab) -> None:
    stage.take_snapshot, stage.names, stage.beams, stage.maps = small_snapshot, NAMES, make_beams(), make_maps()
    page = open_tab(f"{stage.url}?__theme=light")
    canvas = page.locator("#pool .kv-grid canvas").first
    expect(page.locator("#tables .kv-request")).to_have_count(3)
    page.wait_for_timeout(1000)
    light = picture(canvas)
    page.evaluate("document.body.classList.add('dark')")
    wait_until(lambda: picture(canvas) != light, "the canvas has taken on the dark theme", page)
    page.evaluate("document.body.classList.remove('dark')")
    wait_until(lambda: picture(canvas) == light, "and the light one again", page)
    page.set_viewport_size({"width": 390, "height": 800})
    wait_until(
        lambda: page.locator("#pool .kv-grid canvas").first.evaluate("c => c.clientWidth") < 390, "narrower", page
    )
    assert fits(page)
    expect(page.locator("#maps .kv-panel").nth(1)).to_be_visible()
    tops = page.locator("#maps .kv-panel").evaluate_all("all => all.map((panel) => panel.getBoundingClientRect().top)")
    assert tops[1] > tops[0] + 50  # one below the other


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_what_changes_lights_up_for_a_moment(stage: Stage, open_tab: OpenTab, motion: str) -> None:
    """Not for people who want no motion."""
    snapshot = small_snapshot()
    stage.take_snapshot = lambda: snapshot
    page = open_tab(stage.url, reduced_motion=motion)
    expect(page.locator("#pool")).to_contain_text("Step 2.")
    blocks = snapshot["groups"][0]["sequences"][0]["block_table"] + [40]
    snapshot["groups"][0]["sequences"][0] |= {"block_table": blocks, "block_tables": [blocks]}
    snapshot["num_steps"] = 3
    expect(page.locator("#pool")).to_contain_text("Step 3.")
    canvas = page.locator("#pool .kv-grid canvas").first
    pictures = []
    for _ in range(12):
        pictures.append(picture(canvas))
        page.wait_for_timeout(80)
    assert (len(set(pictures)) > 1) == (motion != "reduce")
