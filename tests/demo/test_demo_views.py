"""What the demo's views are sent: right, compact, and never escaped (the browser puts it into the page as text)."""

from __future__ import annotations

import base64
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import hf_paged
from demo import sentences, views
from helpers.demo_parts import EVIL, make_snapshot

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"


def decode_blocks(text: str) -> list[int]:
    """As the browser does."""
    blocks: list[int] = []
    for run in text.split():
        first, _, more = run.partition("+")
        blocks += range(int(first), int(first) + int(more or 0) + 1)
    return blocks


def size_of(value: dict[str, Any]) -> int:
    return len(json.dumps(value, separators=(",", ":")).encode())


@pytest.fixture(scope="module")
def engine() -> Any:
    """A small pool with four samples of one prompt in it, paused in the middle of their generation."""
    model = hf_paged.patch(
        AutoModelForCausalLM.from_pretrained(TINY_MODEL), block_size=8, num_blocks=64, preemption="swap"
    )
    engine = model.paged
    engine.pause()
    request = engine.submit(  # dropped, it would be cancelled
        list(range(5, 30)),
        max_new_tokens=64,
        min_new_tokens=64,
        do_sample=True,
        num_return_sequences=4,
        request_id="samples-1",
    )
    deadline = time.monotonic() + 60
    num_steps = 0
    while num_steps < 5:
        assert time.monotonic() < deadline, "the engine made no five steps within a minute"
        num_steps += engine.step() is not None
    yield engine
    request.cancel()
    engine.resume()
    hf_paged.unpatch(model)


# Blocks as text


@pytest.mark.parametrize(
    ("blocks", "text"),
    [([], ""), ([3], "3"), ([17, 18, 19, 20, 5], "17+3 5"), ([2, 1, 0], "2 1 0"), ([0, 1, 1, 2], "0+1 1+1")],
)
def test_blocks_are_runs(blocks: list[int], text: str) -> None:
    assert views.encode_blocks(blocks) == text
    assert decode_blocks(text) == blocks


# The pool


def test_ref_counts_are_one_character_each() -> None:
    snapshot = make_snapshot(8, 1) | {"blocks": [0, -1, 1, 2, 10, 35, 36, 400], "hashes": [""] * 8}
    assert views.pool_value(snapshot, {})["refs"] == ".,12az++"


def test_hashes_are_four_bytes_each() -> None:
    snapshot = make_snapshot(3, 1) | {"blocks": [0, -1, 1], "hashes": ["", "0a1b2c3d", "ffffffff"]}
    hashes = base64.b64decode(views.pool_value(snapshot, {})["hashes"])
    assert hashes == bytes.fromhex("000000000a1b2c3dffffffff")


def test_a_pool_of_5000_blocks_is_small() -> None:
    snapshot = make_snapshot()
    names = {group["id"]: f"chat-{group['id']}" for group in snapshot["groups"]}
    sizes = [size_of(make(snapshot, names)) for make in (views.pool_value, views.tables_value, views.events_value)]
    assert sizes[0] < 100_000
    assert sum(sizes) < 160_000


def test_a_pool_that_is_not_made_yet() -> None:
    lists = ("blocks", "hashes", "groups", "waiting", "running", "swapped", "events")
    snapshot: dict[str, Any] = {name: [] for name in lists}
    snapshot |= {"num_blocks": 0, "block_size": 16, "num_swap_blocks": 0, "bytes_per_block": 0}
    snapshot |= {"is_paused": False, "num_steps": 0}
    assert views.pool_value(snapshot, {})["refs"] == ""
    assert views.tables_value(snapshot, {})["groups"] == "[]"
    assert views.events_value(snapshot, {}) == {"events": "[]"}


def test_who_owns_what(engine: hf_paged.Engine) -> None:
    snapshot = engine.snapshot()
    value = views.pool_value(snapshot, {})
    [group] = json.loads(value["groups"])
    tables = {sequence[0]: decode_blocks(sequence[3]) for sequence in group["sequences"]}
    assert tables == {each["id"]: each["block_table"] for each in snapshot["groups"][0]["sequences"]}
    assert len(tables) == 4
    held = [block for table in tables.values() for block in table]
    for block, character in enumerate(value["refs"]):
        assert held.count(block) == (int(character, 36) if character not in ".," else 0)
    assert "4" in value["refs"]  # the prompt's blocks, which all four share
    assert len(base64.b64decode(value["hashes"])) == 4 * 64
    assert group["label"] == "samples-1"


def test_tables_say_what_is_shared(engine: hf_paged.Engine) -> None:
    snapshot = engine.snapshot()
    value = views.tables_value(snapshot, {snapshot["groups"][0]["id"]: "four samples"})
    [group] = json.loads(value["groups"])
    assert group["label"] == "four samples"
    assert value["running"] == [group["id"]]
    assert (value["waiting"], value["swapped"]) == ([], [])
    assert decode_blocks(value["shared"]) == [block for block, refs in enumerate(snapshot["blocks"]) if refs > 1]
    for number, tokens, computed, prompt, cached, blocks in group["sequences"]:
        assert number in {each["id"] for each in snapshot["groups"][0]["sequences"]}
        assert (prompt, cached) == (25, 0)
        assert computed <= tokens
        assert len(decode_blocks(blocks)) == math.ceil(computed / 8)


def test_names_are_the_apps_else_the_requests_else_numbers() -> None:
    snapshot = make_snapshot(30, 3)
    snapshot["groups"][1]["request_id"] = "their own"
    value = views.pool_value(snapshot, {500: "chat-1"})
    assert [group["label"] for group in json.loads(value["groups"])] == ["chat-1", "their own", "request 502"]


# Events


def test_events_of_an_engine_become_sentences(engine: hf_paged.Engine) -> None:
    events = json.loads(views.events_value(engine.snapshot(), {})["events"])
    kinds = {kind for _, kind, *_ in events}
    assert {"admitted", "allocated", "shared", "copied", "step"} <= kinds
    assert [event[0] for event in events] == sorted(event[0] for event in events)
    for _, kind, group, step, when, sentence in events:
        assert "None" not in sentence
        assert isinstance(step, int) and when > 0
        if kind not in ("step", "evicted"):
            assert group is not None and sentence.startswith("samples-1")


def test_steps_leave_room_for_other_events() -> None:
    snapshot = make_snapshot(30, 3)
    step = {"kind": "step", "num_decode": 3, "num_prefill_tokens": 0, "seconds": 0.01, "time": 1.0, "step": 1}
    snapshot["events"] += [{"id": 2000 + each} | step for each in range(1000)]
    events = json.loads(views.events_value(snapshot, {})["events"])
    assert len(events) == views.MAX_EVENTS
    assert sum(kind == "step" for _, kind, *_ in events) == views.MAX_STEPS
    assert events[-1][0] == 2999


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({"kind": "admitted", "num_sequences": 1, "num_tokens": 40}, "chat-2 was admitted with 40 tokens"),
        ({"kind": "allocated", "blocks": [17]}, "chat-2 took block 17"),
        ({"kind": "allocated", "blocks": [40, 17, 18, 19]}, "chat-2 took blocks 17 to 19, 40"),
        ({"kind": "shared", "blocks": [1, 2], "parent": 44}, "chat-2, sequence 45, shares 2 blocks with sequence 44"),
        (
            {"kind": "prefix_hit", "blocks": [3, 4], "num_tokens": 32},
            "chat-2 found 32 tokens of its prompt in the cache: ",
        ),
        ({"kind": "copied", "source": 17, "destination": 31}, "chat-2 copied on write: block 17 → 31"),
        ({"kind": "freed", "blocks": [1]}, "chat-2 let go of block 1"),
        ({"kind": "evicted", "blocks": [1]}, "cached content dropped for new use: block 1"),
        ({"kind": "preempted", "how": "swap", "num_sequences": 1}, "chat-2 was preempted (swap) to make room"),
        ({"kind": "swapped_out", "num_blocks": 8, "blocks": []}, "chat-2 went to CPU memory with 8 blocks"),
        ({"kind": "swapped_in", "num_blocks": 1, "blocks": []}, "chat-2 came back from CPU memory with 1 block"),
        ({"kind": "finished", "reason": "length"}, "chat-2 finished (length)"),
        ({"kind": "finished", "reason": None}, "chat-2 finished"),
        ({"kind": "undone", "num_sequences": 2}, "a step failed and was undone for 2 sequences"),
        ({"kind": "of_another_version"}, "chat-2: of another version"),
    ],
)
def test_sentences(event: dict[str, Any], sentence: str) -> None:
    assert sentences.describe_event(event | {"sequence": 45}, "chat-2").startswith(sentence)


def test_a_step_in_words() -> None:
    event = {"kind": "step", "num_decode": 4, "num_prefill_tokens": 66, "seconds": 0.0062, "num_waiting": 3}
    assert (
        sentences.describe_event(event, "") == "4 sequences decoded and 66 prompt tokens computed in 6.2 ms; 3 waiting"
    )


def test_one_of_several_sequences_is_named() -> None:
    event = {"kind": "allocated", "blocks": [3], "sequence": 45}
    assert sentences.describe_event(event, "samples-1", has_siblings=True) == "samples-1, sequence 45, took block 3"


def test_many_blocks_are_not_all_named() -> None:
    assert sentences.name_blocks(range(0, 40, 2)) == "blocks 0, 2, 4, 6, 8, 10, … (20 in all)"


# Beams


def test_beam_tree() -> None:
    nodes = [
        {"id": 0, "parent": None, "token": " the", "score": -1.5, "step": 0, "rank": None},
        {"id": 1, "parent": 0, "token": EVIL, "score": -math.inf, "step": 1, "rank": 1},
    ]
    assert views.beam_tree_value(nodes) == {"nodes": [[0, None, " the", -1.5, 0, None], [1, 0, EVIL, None, 1, 1]]}


@pytest.mark.parametrize("broken", [{"parent": 7}, {"id": 0}])
def test_a_broken_beam_tree_is_refused(broken: dict[str, Any]) -> None:
    node = {"id": 0, "parent": None, "token": "a", "score": -1.0, "step": 0, "rank": None}
    with pytest.raises(ValueError, match="beam tree"):
        views.beam_tree_value([node, node | {"id": 1, "parent": 0} | broken])


# Memory maps


def test_memory_maps() -> None:
    rows = [{"label": "a", "reserved": 64, "used": 10}, {"label": "b", "reserved": 64, "used": 64}]
    memory = {"name": "Reserved", "note": "n", "bytes_per_token": 2304, "rows": rows, "waste": 0.42}
    [value] = views.memory_maps_value([memory])["maps"]
    assert (value["reserved"], value["used"], value["waste"]) == (128, 74, 0.42)
    assert value["rows"] == [["a", 64, 10], ["b", 64, 64]]


@pytest.mark.parametrize(
    "broken", [{"rows": [{"label": "a", "reserved": 4, "used": 5}]}, {"waste": 1.2}, {"waste": math.nan}]
)
def test_impossible_memory_maps_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="stock"):
        views.memory_maps_value(
            [{"name": "stock", "note": "", "bytes_per_token": 1, "rows": [], "waste": 0.1} | broken]
        )


# Text


def test_nothing_is_escaped_here() -> None:
    snapshot = make_snapshot(30, 1)
    assert json.loads(views.pool_value(snapshot, {500: EVIL})["groups"])[0]["label"] == EVIL
    assert json.loads(views.events_value(snapshot, {500: EVIL})["events"])[0][5] == f"{EVIL} took block 7"


def test_text_fits_into_json() -> None:
    assert views.clean_text("a\ud800b").encode() == b"a?b"
    assert views.clean_text("x" * 200) == "x" * 59 + "…"


def test_components_are_data_and_fixed_markup() -> None:
    """Markup that does not depend on the value keeps Gradio from building it anew, and text from being markup."""
    for make in (views.PoolView, views.BlockTables, views.EventLog, views.BeamTree, views.MemoryMaps):
        component = make(elem_id="here", render=False)
        assert "${" not in component.html_template and "{{" not in component.html_template
        for special in ("${", "{{", "`", "\\"):  # the style is a template too
            assert special not in component.css_template
        for markup in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
            assert markup not in component.js_on_load
