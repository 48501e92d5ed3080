"""The tab of memory maps: contiguous and paged, of the run just made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr

from hf_paged.tools.report import format_bytes

from ..compare import MemoryMap, memory_maps
from ..generation import Sampling
from ..hub import Hub
from ..limits import RefusedError
from ..panels import Notes, Table, notes_value, table_value
from ..pressure import burst
from ..run_record import RunRecord
from ..told import told
from ..views import MemoryMaps, memory_maps_value
from .viewer import owner_of, quietly

COLUMNS = ("Way", "KV memory", "holds tokens", "empty", "Waste")
NUMBERS = (1, 2, 3, 4)
NOTHING = (table_value(), memory_maps_value([]))  # in place of what was measured before
EMPTY = "Run some prompts and see what each way to keep their keys and values would have held."


def memory_page(hub: Hub, last_run: gr.State) -> None:
    """Builds the tab.

    Args:
        hub: The engine.
        last_run: The run that this browser made last, on whatever tab.
    """
    with gr.Row():
        count = gr.Slider(2, min(32, hub.limits.requests), 12, step=1, label="Requests", min_width=160)
        new_tokens = gr.Slider(
            8, hub.limits.new_tokens, min(96, hub.limits.new_tokens), step=1, label="New tokens", min_width=160
        )
        longest = gr.Slider(8, 1000, 400, step=1, label="Longest prompt", min_width=160)
    with gr.Row():
        run = gr.Button("Run prompts and compare", variant="primary", elem_id="memory-run")
        compare = gr.Button("Compare my last burst or samples", elem_id="memory-compare")
    summary = Notes(elem_id="memory-summary", value=notes_value([], EMPTY))
    table = Table(elem_id="memory-table")
    maps = MemoryMaps(elem_id="memory-maps")

    @told
    async def on_run(request: gr.Request, count: float, new_tokens: float, longest: float) -> AsyncIterator[list[Any]]:
        sampling = Sampling.checked(hub.limits, new_tokens, 0.8, 0.95)
        record = None
        async with aclosing(burst(hub, owner_of(request), int(count), sampling, int(longest))) as states:
            async for state in states:
                record = state.record
                yield [_note(f"Running: {state.describe()}"), *NOTHING, gr.skip()]
        if record is None:
            raise RefusedError("The run was stopped: there is nothing to compare.")
        async for update in _compare(hub, record):
            yield [*update, record]

    @told
    async def on_compare(record: RunRecord | None) -> AsyncIterator[list[Any]]:
        if record is None:
            raise RefusedError(
                "There is no run yet in this browser tab: fire a burst, draw samples, or run prompts here."
            )
        async for update in _compare(hub, record):
            yield update

    event = quietly(trigger_mode="once", concurrency_id="memory-page", concurrency_limit=4)
    run.click(on_run, [count, new_tokens, longest], [summary, table, maps, last_run], **event)
    compare.click(on_compare, last_run, [summary, table, maps], **event)


async def _compare(hub: Hub, record: RunRecord) -> AsyncIterator[list[Any]]:
    yield [
        _note(f"{record.title}: stock transformers runs the same prompts now, to be measured."),
        *NOTHING,
    ]
    found = await asyncio.to_thread(memory_maps, hub.loaded, record)
    rows = [[each.name, each.name, *_figures(each)] for each in found]
    yield [
        _note(f"{record.title}: {summarize(found)}"),
        table_value(COLUMNS, rows, NUMBERS),
        memory_maps_value([each.as_json() for each in found]),
    ]


def summarize(maps: list[MemoryMap]) -> str:
    """The least, and how many times that the others hold."""
    *others, paged = maps
    sizes = [
        f"{each.name.lower()} {each.reserved / paged.reserved:.1f} times that" for each in others if paged.reserved
    ]
    return f"paged held {format_bytes(paged.reserved * paged.bytes_per_token)}, {', '.join(sizes)}."


def _figures(each: MemoryMap) -> list[str]:
    size = each.bytes_per_token
    empty = (each.reserved - each.used) * size
    return [
        format_bytes(each.reserved * size),
        format_bytes(each.used * size),
        format_bytes(empty),
        f"{each.waste:.1%}",
    ]


def _note(sentence: str) -> dict[str, Any]:
    return notes_value([(sentence, sentence, [])])
