"""The guided start: four things to do, one button each, and what is to be seen then."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ..generation import Sampling
from ..hub import Hub
from ..prompts import encode, openings
from ..told import told
from .step import queue_requests
from .viewer import owner_of, quietly

INTRODUCTION = "Four buttons, some five minutes. Each does something on the page below, and says here what to look at."


@dataclass(frozen=True)
class Stop:
    """One of the four.

    Attributes:
        title: On its button.
        press: What it then presses on the page, one after the other: a tab, and a button on it.
        look: What is to be seen.
    """

    title: str
    press: tuple[str, ...]
    look: str


STOPS = (
    Stop(
        "1 · Two chats",
        ("#tab-chat-button", "#chat-send"),
        "**Two requests run in one batch**: yours on the Chat tab, and a guest's. In the pool each has a colour "
        "and a tag (c and g). A request takes a block when its tokens have filled the one before; nothing is reserved. "
        "At its end the blocks become dotted: free, with their content cached for a prompt that begins alike. Write on "
        "in the chat: the line below the reply says how many prompt tokens were found there.",
    ),
    Stop(
        "2 · Sample and share",
        ("#tab-samples-button", "#samples-run"),
        "**Four samples of one prompt.** Hatched blocks are shared: four block tables hold them, and the number is the "
        "ref count. A sample that is about to write into a shared block gets a copy of that block first. Was that too "
        "quick? The slider below the pool goes back over the last 200 steps. *Beams* shows a beam search and its tree.",
    ),
    Stop(
        "3 · Press the pool",
        ("#tab-pressure-button", "#pressure-fire"),
        "**More prompts than the pool has room for.** Some wait. When a running request needs a block and none is "
        "free, the newest one is preempted: its blocks move to CPU memory, below the pool, or are dropped and computed "
        "again later. All are answered, with the tokens that they would have had alone.",
    ),
    Stop(
        "4 · Step by step",
        ("#tab-step-button", "#step-one"),
        "**The engine stands still now**, with three requests in its queue. *One step* is one forward of the model; "
        "the notes say what that computed, which blocks were taken, and why. *Resume* lets the engine run again.",
    ),
)
# Each is waited for: a tab is built when it is opened for the first time.
PRESS = """() => {
  const press = ([selector, ...others], tries = 50) => {
    const button = document.querySelector(selector)
    if (button?.offsetParent && !button.disabled) button.click()
    else if (tries) return setTimeout(press, 100, [selector, ...others], tries - 1)
    if (others.length) press(others)
  }
  press(%s)
}"""


def guide_panel() -> tuple[list[gr.Button], gr.Markdown]:
    """Builds the panel: its buttons, and what they say. `guide_events` makes them work."""
    with gr.Accordion("Start here: four steps", open=True, elem_id="guide"):
        with gr.Row():
            buttons = [
                gr.Button(
                    stop.title,
                    variant="secondary" if number else "primary",
                    elem_id=f"guide-{number + 1}",
                    min_width=140,
                    size="md",
                )
                for number, stop in enumerate(STOPS)
            ]
        look = gr.Markdown(INTRODUCTION, elem_id="guide-look")
    return buttons, look


def guide_events(hub: Hub, panel: tuple[list[gr.Button], gr.Markdown], message: gr.Textbox) -> None:
    """What happens at a click.

    Args:
        hub: The engine.
        panel: Of `guide_panel`.
        message: The box of the chat, whose first message is written by the guide.
    """
    buttons, look = panel
    for number, (button, stop) in enumerate(zip(buttons, STOPS, strict=True)):
        button.click(_start(hub, number), None, [message, look, *buttons], **quietly(trigger_mode="once")).success(
            None, js=PRESS % json.dumps(stop.press), **quietly(queue=False)
        )


def _start(hub: Hub, number: int) -> Any:
    @told
    async def on_click(request: gr.Request) -> list[Any]:
        owner = owner_of(request)
        written: Any = gr.skip()
        if number == 3:
            await asyncio.to_thread(hub.pacer.pause)
            await asyncio.to_thread(queue_requests, hub, owner)
        else:
            await asyncio.to_thread(hub.pacer.resume)
        if number == 0:
            written, guests, *_ = openings(hub.loaded)
            sampling = Sampling(max_new_tokens=min(128, hub.limits.new_tokens))
            prompt = encode(hub.loaded, guests)
            await asyncio.to_thread(hub.submit, "guest", owner, prompt, **sampling.arguments(hub.loaded))
        variants = ["primary" if each == number + 1 else "secondary" for each in range(len(STOPS))]
        return [written, STOPS[number].look, *(gr.Button(variant=variant) for variant in variants)]

    return on_click
