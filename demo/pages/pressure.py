"""The tab of pressure: a small pool, a burst of prompts, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr

from ..generation import Sampling
from ..hub import PREEMPTIONS, Hub
from ..panels import Notes, Table, notes_value, table_value
from ..pressure import Burst, burst
from ..told import told
from .viewer import owner_of, quietly

COLUMNS = ("Request", "State", "Prompt tokens", "New tokens", "Swapped", "Recomputed", "Reply")
NUMBERS = (2, 3, 4, 5)
EMPTY = "Fire more than the pool has room for: requests wait, lose blocks to others, come back, and all are answered."


def pressure_page(hub: Hub, last_run: gr.State) -> None:
    """Builds the tab.

    Args:
        hub: The engine.
        last_run: Gets the finished burst, for the memory maps.
    """
    settings = hub.settings  # as it was at the start
    with gr.Row():
        blocks = gr.Slider(
            8,
            max(512, settings["num_blocks"]),
            settings["num_blocks"] if hub.is_fixed else 40,
            step=1,
            label="Blocks in the pool",
            info=f"of {settings['block_size']} tokens; "
            + ("the server's, which stays" if hub.is_fixed else "the pool of all visitors changes"),
            interactive=not hub.is_fixed,
            elem_id="pressure-blocks",
            min_width=220,
        )
        preemption = gr.Radio(
            list(PREEMPTIONS),
            value=settings["preemption"],
            label="Preemption",
            info="move blocks to CPU memory, or compute them again",
            interactive=not hub.is_fixed,
            elem_id="pressure-preemption",
            min_width=220,
        )
    with gr.Row():
        # Where the pool can't be made small, the burst is made large.
        most, most_new = hub.limits.requests, hub.limits.new_tokens
        count = gr.Slider(1, most, most if hub.is_fixed else min(24, most), step=1, label="Requests", min_width=160)
        new_tokens = gr.Slider(
            8, most_new, min(128 if hub.is_fixed else 64, most_new), step=1, label="New tokens", min_width=160
        )
        longest = gr.Slider(8, 1000, 1000 if hub.is_fixed else 120, step=1, label="Longest prompt", min_width=160)
    with gr.Row():
        paragraph = gr.Checkbox(not hub.is_fixed, label="Replies end with their paragraph", min_width=220)
        cancel = gr.Checkbox(
            False,
            label="Cancel what runs, if the pool has to change",
            elem_id="pressure-cancel",
            min_width=220,
            visible=not hub.is_fixed,
        )
    with gr.Row():
        fire = gr.Button("Fire the burst", variant="primary", elem_id="pressure-fire", scale=2, min_width=170)
        resize = gr.Button("Resize only", elem_id="pressure-resize", min_width=110, visible=not hub.is_fixed)
        restore = gr.Button(
            f"Back to {settings['num_blocks']}", elem_id="pressure-restore", min_width=110, visible=not hub.is_fixed
        )
        stop = gr.Button("Stop", variant="stop", elem_id="pressure-stop", interactive=False, min_width=90)
    summary = Notes(elem_id="pressure-summary", value=notes_value([], EMPTY))
    table = Table(elem_id="pressure-table")

    @told
    async def on_fire(
        request: gr.Request,
        blocks: float,
        preemption: str,
        cancel: bool,
        count: float,
        new_tokens: float,
        longest: float,
        paragraph: bool,
    ) -> AsyncIterator[list[Any]]:
        sampling = Sampling.checked(hub.limits, new_tokens, 0.8, 0.95)
        yield [gr.skip(), table_value(), *[gr.skip()] * 5]  # the burst before
        await asyncio.to_thread(hub.resize, blocks, preemption, cancel)
        async with aclosing(burst(hub, owner_of(request), int(count), sampling, int(longest), paragraph)) as states:
            async for state in states:
                room = sum(row.prompt_tokens + sampling.max_new_tokens for row in state.rows)
                needs = f"Prompts and longest replies are {room:,} tokens; the pool holds {hub.pool_tokens:,}."
                yield [*_shown(state, needs), state.record or gr.skip(), *_buttons(True)]

    @told
    async def on_resize(blocks: float, preemption: str, cancel: bool) -> dict[str, Any]:
        sentence = await asyncio.to_thread(hub.resize, blocks, preemption, cancel)
        return notes_value([(sentence, sentence, [])])

    @told
    async def on_restore(cancel: bool) -> list[Any]:
        blocks, preemption = settings["num_blocks"], settings["preemption"]
        sentence = await asyncio.to_thread(hub.resize, blocks, preemption, cancel)
        return [notes_value([(sentence, sentence, [])]), blocks, preemption]

    def on_stop(request: gr.Request) -> None:
        hub.cancel(owner_of(request), "burst")

    fire.click(
        on_fire,
        [blocks, preemption, cancel, count, new_tokens, longest, paragraph],
        [summary, table, last_run, fire, resize, restore, stop],
        **quietly(trigger_mode="once", concurrency_limit=hub.limits.requests, concurrency_id="pressure-page"),
    ).then(lambda: _buttons(False), None, [fire, resize, restore, stop], **quietly(queue=False))
    resize.click(on_resize, [blocks, preemption, cancel], summary, **quietly(trigger_mode="once"))
    restore.click(on_restore, cancel, [summary, blocks, preemption], **quietly(trigger_mode="once"))
    stop.click(on_stop, **quietly(queue=False))


def _shown(state: Burst, needs: str) -> list[dict[str, Any]]:
    sentence = state.describe()
    rows = [
        [
            row.label,
            row.label,
            row.state,
            row.prompt_tokens,
            row.new_tokens,
            row.swapped,
            row.recomputed,
            row.reply.strip(),
        ]
        for row in state.rows
    ]
    return [notes_value([(sentence, sentence, [needs])]), table_value(COLUMNS, rows, NUMBERS)]


def _buttons(is_running: bool) -> list[Any]:
    """Those that begin something, and the one that stops it."""
    return [*(gr.Button(interactive=not is_running) for _ in range(3)), gr.Button(interactive=is_running)]
