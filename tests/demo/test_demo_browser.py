"""The whole demo in a real browser: every tab of it, several people at once, dark, on a phone, and under attack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from demo.app import build_app, launch
from demo.hub import Hub
from demo.limits import Limits
from demo.loading import load
from demo.pacing import FULL_SPEED
from helpers.browsing import OpenTab, browser, fits, open_tab, picture, wait_for_colours, wait_until
from helpers.demo_parts import EVIL, both

__all__ = ["both", "browser", "open_tab"]  # fixtures

pytestmark = pytest.mark.browser

SLOW = 5.0  # steps a second: slow enough that no reply ends before a slow browser has shown it
TABS = ("Chat", "Samples & beams", "Pool", "Pressure", "Memory", "Plots", "Step")
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    """The app on the embedded model, and its hub."""
    hub = Hub(load(), {"num_blocks": 128, "block_size": 16, "preemption": "auto"}, Limits())
    blocks = build_app(hub, welcome=False)
    url = launch(blocks, "127.0.0.1", None, wait=False)
    yield SimpleNamespace(hub=hub, url=url)
    blocks.close()
    hub.close()


@pytest.fixture
def hub(app: Any) -> Iterator[Hub]:
    """The hub as every test finds it: idle, at full speed, with its first pool."""
    hub: Hub = app.hub
    yield hub
    hub.pacer.resume()
    hub.pacer.set_speed(FULL_SPEED)
    hub.cancel()
    hub.resize(128, "auto", cancel_running=True)


def open_page_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def say(page: Page, text: str) -> None:
    box = page.locator("#chat-message textarea")
    box.fill(text)
    box.press("Enter")


def set_slider(page: Page, label: str, value: int) -> None:
    """By its number field, as with the keyboard."""
    box = page.get_by_label(f"number input for {label}", exact=True).locator("visible=true")
    box.fill(str(value))
    box.press("Tab")


def pool_canvas(page: Page) -> Locator:
    return page.locator("#pool .kv-grid canvas").first


def held_blocks(hub: Hub) -> int:
    return sum(refs > 0 for refs in hub.engine.snapshot()["blocks"])


def test_two_people_chat_at_once(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    hub.pacer.set_speed(SLOW)
    one, other = open_tab(app.url), open_tab(app.url)
    say(one, "It was late in the evening when the old man came to the door of the house, and")
    say(other, "Nobody had seen the letter before,")
    wait_until(lambda: hub.engine.stats().num_running == 2, "both run in one batch", one)
    before = picture(pool_canvas(one))
    wait_until(lambda: picture(pool_canvas(one)) != before, "the pool of the one shows what happens", one)
    for page in (one, other):
        expect(page.locator("#chat .bot").first).not_to_be_empty()
    hub.pacer.pause()  # however slow the browsers are, neither reply ends before both have been seen
    for page in (one, other):  # each sees both
        expect(page.locator("#pool .kv-owners button")).to_have_count(2)
    hub.pacer.resume()

    one.locator("#chat-stop").click()
    wait_until(lambda: hub.engine.stats().num_running == 1, "the one's reply was stopped", one)
    expect(one.locator("#chat")).to_contain_text("stopped")
    expect(one.locator("#chat-send")).to_be_enabled()
    hub.pacer.set_speed(FULL_SPEED)
    expect(other.locator("#chat")).to_contain_text("ended by")
    expect(other.locator("#chat")).to_contain_text("tokens/s")
    wait_until(lambda: held_blocks(hub) == 0, "all blocks are free again", other)

    say(other, "Then the door opened.")
    expect(other.locator("#chat")).to_contain_text(re.compile(r"[1-9]\d* of \d+ prompt tokens from the cache"))
    expect(other.locator("#chat .user")).to_have_count(2)


def test_what_is_typed_while_a_reply_streams_stays(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    """Would break: an update of the reply, or its end, that empties the box; a box that keeps what was sent."""
    hub.pacer.set_speed(SLOW)
    page = open_tab(app.url)
    box, bot, send = page.locator("#chat-message textarea"), page.locator("#chat .bot"), page.locator("#chat-send")

    def streams(text: str) -> None:
        """After the next pieces of the reply the box has this text, and the keyboard."""
        for _ in range(2):
            before = bot.all_inner_texts()
            wait_until(lambda: bot.all_inner_texts() != before, "the reply grows", page)  # noqa: B023
        expect(box).to_have_value(text)
        expect(box).to_be_focused()

    box.press_sequentially("Nobody had seen the letter")
    box.press("Enter")
    expect(box).to_have_value("")
    box.press_sequentially("And then")
    streams("And then")
    box.press("Enter")  # one reply at a time: it is not sent, and not lost
    streams("And then")
    page.locator("#chat-stop").click()
    expect(send).to_be_enabled()
    expect(box).to_have_value("And then")
    page.get_by_role("button", name="Retry").click()  # what is typed is not the question
    expect(send).to_be_disabled()
    page.locator("#chat-stop").click()
    expect(send).to_be_enabled()
    expect(box).to_have_value("And then")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#chat .user")).to_have_count(0)
    expect(box).to_have_value("And then")
    for count in (1, 2):  # the same text twice
        say(page, "And then")
        expect(page.locator("#chat .user")).to_have_count(count)
        expect(box).to_have_value("")
        page.locator("#chat-stop").click()
        expect(send).to_be_enabled()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#chat .user")).to_have_count(1)
    expect(box).to_have_value("And then")


def test_a_view_that_was_scrolled_up_stays_there(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    """Would break: each piece of a reply takes the reader back to the end."""
    page = open_tab(app.url, viewport={"width": 700, "height": 600})
    log, bot = page.locator("#chat [role=log]"), page.locator("#chat .bot")

    def gap() -> float:
        return log.evaluate("log => log.scrollHeight - log.scrollTop - log.clientHeight")

    def grow() -> None:
        before = log.evaluate("log => log.scrollHeight")
        wait_until(lambda: log.evaluate("log => log.scrollHeight") > before, "the reply grows by a line", page)

    say(page, "Nobody had seen the letter before,")
    expect(bot.last).to_contain_text("ended by")
    wait_until(lambda: gap() < 2, "the view has followed a reply to its end", page)
    hub.pacer.set_speed(SLOW)
    say(page, "Nobody had seen the letter before,")
    grow()
    wait_until(lambda: gap() < 2, "the view follows the next reply", page)
    log.hover()
    page.mouse.wheel(0, -200)
    wait_until(lambda: gap() > 150, "the view is scrolled up", page)
    top = log.evaluate("log => log.scrollTop")
    grow()
    page.wait_for_timeout(400)  # Gradio's own scrolling comes that late
    assert log.evaluate("log => log.scrollTop") == top
    page.mouse.wheel(0, 9999)
    grow()
    wait_until(lambda: gap() < 2, "at the end it follows again", page)


def test_a_burst_with_preemption(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    page = open_tab(app.url)
    open_page_tab(page, "Pressure")
    set_slider(page, "Blocks in the pool", 24)
    hub.pacer.set_speed(60.0)
    page.locator("#pressure-fire").click()
    expect(page.locator("#pool")).to_contain_text("24 blocks of 16 tokens")
    seen: set[str] = set()

    def has_preempted() -> bool:
        seen.add(picture(pool_canvas(page)))
        return hub.engine.stats().num_preemptions > 0 and len(seen) > 3

    wait_until(has_preempted, "a request loses its blocks, and the pool shows what happens", page)
    hub.pacer.set_speed(FULL_SPEED)
    expect(page.locator("#pressure-summary")).to_contain_text("24 of 24 completed")
    expect(page.locator("#pressure-summary")).to_contain_text(re.compile(r"[1-9]\d* preemption"))
    expect(page.locator("#pressure-fire")).to_be_enabled()
    open_page_tab(page, "Pool")
    expect(page.locator("#events, #event-log").locator("li[data-kind=preempted]").first).to_contain_text(
        "was preempted"
    )
    assert held_blocks(hub) == 0


def test_beams_read_one_source(app: Any, open_tab: OpenTab) -> None:
    """Would break: a source a beam, or blocks of the source among those of the beams."""
    page = open_tab(app.url)
    open_page_tab(page, "Samples & beams")
    page.locator("#translation").get_by_text("Encoder-decoders").click()
    page.locator("#translation-run").click()
    view = page.locator("#translation-view")
    expect(view).to_contain_text("read by 5 beams", timeout=120_000)  # it is trained first
    expect(page.locator("#translation-cards article")).to_have_count(5)
    expect(view.locator(".kv-source li span")).to_have_text(
        ["the old man paints", "the red house by", "the sea today ·"]
    )
    source = set(view.locator(".kv-source li i").all_inner_texts())
    expect(view.locator(".kv-readers > li")).to_have_count(5)
    assert source.isdisjoint(view.locator(".kv-readers li i").all_inner_texts())
    expect(page.locator("#translation-cards")).to_contain_text("heute malt der alte Mann das rote Haus am Meer")
    expect(page.locator("#translation-run")).to_be_enabled()
    assert fits(page)
    wait_for_colours(page)
    found = Axe().run(page, context="#translation", options={"resultTypes": ["violations"]}).response["violations"]
    assert not [each["id"] for each in found if each["impact"] in ("serious", "critical")]
    page.locator("#translation-english textarea").fill("the old man paints the spaceship")
    page.locator("#translation-run").click()
    expect(page.get_by_text("has never seen 'spaceship'")).to_be_visible()


def test_samples_beams_and_their_memory(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    page = open_tab(app.url)
    open_page_tab(page, "Samples & beams")
    page.locator("#samples-run").click()
    expect(page.locator("#samples-sharing")).to_contain_text("is done")
    expect(page.locator("#samples-cards article")).to_have_count(4)
    page.locator("#samples-kind").get_by_text("Beams").click()
    page.locator("#samples-run").click()
    tree = page.locator("#beam-tree")
    expect(tree.locator(".kv-rank").first).to_be_visible()
    expect(tree).to_contain_text(re.compile(r"[1-9]\d* tokens explored, [1-9] beams? returned"))
    expect(page.locator("#samples-run")).to_be_enabled()
    tree.locator(".kv-tree").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(tree.locator(".kv-told")).to_contain_text("Sum of log-probabilities")

    page.locator("#samples-kind").get_by_text("Adapters").click()
    page.locator("#samples-prompt textarea").fill("The old man")
    page.get_by_label("number input for Temperature").fill("0.05")
    page.locator("#samples-run").click()
    expect(page.locator("#samples-sharing")).to_contain_text("3 requests in the same")
    expect(page.locator("#samples-run")).to_be_enabled()
    texts = page.locator("#samples-cards .kv-card-text")
    expect(texts).to_have_count(3)
    words = re.compile("ship|sea|rope|stars|sailor"), re.compile("soup|bread|dish|table|cook")
    for number, own in enumerate(words, start=1):
        expect(texts.nth(number)).to_contain_text(own)
        expect(texts.nth(0)).not_to_contain_text(own)
    expect(tree).to_be_hidden()

    open_page_tab(page, "Memory")
    page.locator("#memory-compare").click()
    expect(page.locator("#memory-summary")).to_contain_text("times that")
    expect(page.locator("#memory-maps .kv-panel")).to_have_count(3)


def test_the_memory_of_ragged_prompts(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    page = open_tab(app.url)
    open_page_tab(page, "Memory")
    page.locator("#memory-run").click()
    panels = page.locator("#memory-maps .kv-panel")
    expect(panels).to_have_count(3)
    wastes = [float(text.split()[0]) for text in panels.locator(".kv-waste").all_inner_texts()]
    assert wastes[-1] < 15 < min(wastes[:-1])
    hub.pacer.set_speed(SLOW)
    page.locator("#memory-run").click()  # what was measured before leaves
    expect(page.locator("#memory-summary")).to_contain_text("Running")
    expect(panels.or_(page.locator("#memory-table td"))).to_have_count(0)


def test_step_by_step(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    page = open_tab(app.url)
    open_page_tab(page, "Step")
    page.locator("#step-pause").click()
    expect(page.locator("#paused")).to_be_visible()
    expect(page.locator("#pool .kv-paused")).to_be_visible()
    page.locator("#step-queue").click()
    expect(page.locator("#step-notes")).to_contain_text("are queued")
    page.locator("#step-one").click()
    expect(page.locator("#step-notes .kv-note-head").first).to_contain_text(re.compile(r"\d"))
    expect(page.locator("#pool .kv-owners button").first).to_be_visible()
    before = hub.engine.snapshot()["num_steps"]
    page.locator("#step-ten").click()
    wait_until(lambda: hub.engine.snapshot()["num_steps"] >= before + 5, "ten steps", page)
    page.locator("#step-resume").click()
    expect(page.locator("#paused")).to_be_hidden()
    wait_until(lambda: not hub.tickets, "what was queued comes to its end", page)


def test_plots_follow_the_engine(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    page = open_tab(app.url)
    say(page, "Nobody had seen the letter before,")
    open_page_tab(page, "Plots")
    expect(page.locator("#tabs canvas:visible, #tabs svg.marks:visible").first).to_be_visible()


def test_a_replay_until_the_other_saturates(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    """The story and the plots move on, another system begins anew, and at the end one of the two is saturated."""
    page = open_tab(app.url)
    open_page_tab(page, "Plots")
    story, waiting = (
        page.locator("#replay-story"),
        page.locator("#replay-waiting canvas, #replay-waiting svg.marks").first,
    )
    expect(waiting).to_be_visible()
    expect(story).to_contain_text("Recorded, not run here")
    page.get_by_label("Orca (Oracle)").check()
    page.locator("#replay-play").click()
    expect(story).to_contain_text(re.compile(r"Orca \(Oracle\): \d+ in the batch"))
    page.get_by_label("Orca (Max)").check()
    page.locator("#replay-play").click()
    expect(story).to_contain_text(re.compile(r"Orca \(Max\): .* done, saturated at \d\.\d requests/s"), timeout=60_000)
    expect(story).not_to_contain_text("Oracle")
    assert not re.search(r"hf_paged: [^;]*saturated", story.inner_text())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_tab_in_both_themes_on_a_phone(app: Any, hub: Hub, open_tab: OpenTab, theme: str) -> None:
    page = open_tab(f"{app.url}?__theme={theme}", viewport=PHONE, has_touch=True)
    expect(page.locator("#pool .kv-legend")).to_be_visible()
    assert page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    for name in TABS:
        open_page_tab(page, name)
        page.wait_for_timeout(300)
        assert fits(page), f"{name} is wider than the screen"
        assert box_of(page.locator("#pool .kv-grid"))["y"] < 400, f"on {name} the pool is not before one's eyes"


def box_of(locator: Locator) -> Any:
    return locator.first.bounding_box()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(app: Any, hub: Hub, open_tab: OpenTab, theme: str) -> None:
    """On every tab, with something on it."""
    page = open_tab(f"{app.url}?__theme={theme}")
    for step, seen in enumerate(("#chat .bot", "#samples-cards article", "#pressure-table td", "#step-notes li"), 1):
        page.locator(f"#guide-{step}").click()
        expect(page.locator(seen).first).to_be_visible()
        hub.cancel(kind="chat")  # a reply as long as it is
        if step < 4:
            wait_until(lambda: not hub.tickets, "the guide's requests come to their end", page)
    page.keyboard.press("Escape")
    for name in TABS:
        open_page_tab(page, name)
        page.mouse.move(0, 0)
        wait_for_colours(page)
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert not serious, (name, [(each["id"], each["nodes"][0]["html"]) for each in serious])


def test_the_guide_and_the_last_steps(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    """Would break: a button that does nothing, and a step that can't be gone back to."""
    hub.pacer.set_speed(60.0)
    page = open_tab(app.url)
    page.locator("#guide-1").click()
    expect(page.locator("#guide-look")).to_contain_text("Two requests run in one batch")
    expect(page.locator("#pool .kv-owners button")).to_contain_text(["guest", "chat"])
    wait_until(lambda: not hub.tickets, "both come to their end", page)
    owners = page.locator("#pool .kv-owners button")
    expect(owners).to_have_count(0)
    page.locator("#pool .kv-scrubber").focus()
    seen = set()
    for _ in range(40):
        page.keyboard.press("ArrowLeft")
        seen.add(page.locator("#pool .kv-timeline-row .kv-number").inner_text())
    assert len(seen) == 40, "in slow motion each step is kept"
    expect(owners.first).to_be_visible()
    expect(page.locator("#pool .kv-happened li").first).to_be_visible()
    page.locator("#pool .kv-live").click()
    expect(owners).to_have_count(0)
    expect(page.locator("#pool .kv-live")).to_be_disabled()

    page.locator("#guide-2").click()
    expect(page.locator("#samples-sharing")).to_contain_text("is done")
    page.locator("#guide-3").click()
    expect(page.locator("#pressure-summary")).to_contain_text(re.compile(r"[1-9]\d* preemption"))
    hub.cancel()
    page.locator("#guide-4").click()
    expect(page.locator("#paused")).to_be_visible()
    expect(page.locator("#step-notes .kv-note-head").first).to_contain_text("one forward")


def test_text_stays_text(app: Any, hub: Hub, open_tab: OpenTab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user writes, and what the model writes, never becomes markup."""
    decode = hub.loaded.tokenizer.decode

    def decode_evil(tokens: Any, **options: Any) -> str:
        return str(decode(tokens, **options)).replace("e", EVIL)

    monkeypatch.setattr(hub.loaded.tokenizer, "decode", decode_evil)
    page = open_tab(app.url)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    say(page, f"{EVIL} said the Mouse, and")
    expect(page.locator("#chat .user").first).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.locator("#chat")).to_contain_text("ended by")
    expect(page.locator("#chat .bot").first).to_contain_text("<script>alert(2)</script>")
    open_page_tab(page, "Samples & beams")
    page.locator("#samples-prompt textarea").fill(f"{EVIL} Once there was")
    page.locator("#samples-kind").get_by_text("Beams").click()
    page.locator("#samples-run").click()
    expect(page.locator("#beam-tree .kv-rank").first).to_be_visible()
    expect(page.locator("#samples-cards")).to_contain_text("<script>alert(2)</script>")
    assert page.locator("img[src=x], #tabs script").count() == 0
    assert dialogs == []


def test_the_requests_of_a_server(both: Any, open_tab: OpenTab) -> None:
    """Would break: a request that isn't shown, or whose row stays as it was."""
    both.hub.pacer.set_speed(SLOW)
    page = open_tab(both.url)
    open_page_tab(page, "Requests")
    expect(page.locator("#tab-requests")).to_contain_text(f"{both.url}/v1")
    rows = page.locator("#requests-table tbody tr")
    expect(rows).to_have_count(0)
    expect(page.locator("#requests-table .kv-command")).to_contain_text(f"curl -N {both.url}/v1/completions")
    body = {"prompt": "The old king of", "max_tokens": 100, "ignore_eos": True, "n": 2}
    with httpx.stream("POST", f"{both.url}/v1/completions", json=body | {"stream": True}, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        expect(rows.first).to_contain_text("running")
        expect(rows.first).to_contain_text("completions, streamed")
        expect(page.locator("#pool .kv-owners button")).to_contain_text("api-")
        both.hub.pacer.set_speed(FULL_SPEED)
        assert list(lines)[-2] == "data: [DONE]"
    expect(rows.first).to_contain_text("done")
    expect(rows.first).to_contain_text("200")
    expect(rows.first).to_contain_text("length")
    assert fits(page)
    open_page_tab(page, "Pressure")
    expect(page.locator("#pressure-resize")).to_have_count(0)
    page.locator("#pressure-fire").click()
    # The pool is the server's, and stays: the burst is larger than that.
    expect(page.locator("#pressure-summary")).to_contain_text(re.compile(r"[1-9]\d* preemption"))
    expect(page.locator("#pressure-summary")).to_contain_text("the pool holds 1,024")
    page.locator("#pressure-stop").click()
    expect(page.locator("#pressure-fire")).to_be_enabled()


def test_refusals_are_sentences(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    page = open_tab(app.url)
    say(page, "word " * 6000)
    expect(page.locator(".toast-body")).to_contain_text("this demo takes")
    expect(page.locator("#chat-send")).to_be_enabled()
    expect(page.locator("#chat-send")).to_have_text("Send")


def test_a_closed_tab_frees_its_blocks(app: Any, hub: Hub, open_tab: OpenTab) -> None:
    hub.pacer.set_speed(SLOW)
    page, other = open_tab(app.url), open_tab(app.url)
    say(page, "Nobody had seen the letter before,")
    wait_until(lambda: hub.tickets, "the request runs", page)
    page.close()
    wait_until(lambda: not hub.tickets and held_blocks(hub) == 0, "its blocks are free", other)
