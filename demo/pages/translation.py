"""The panel of a source that several beams read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr

from ..hub import Hub
from ..panels import Cards, Notes, cards_value, notes_value
from ..tiny_translator import ENGLISH, EXAMPLE
from ..told import told
from ..translation import BLOCK_SIZE, translate
from ..views import SourceView, source_value
from .viewer import quietly

EMPTY = (
    "Translate: an encoder reads the sentence once, its blocks are written once, and all beams read them. The model "
    f"has a pool of its own, with blocks of {BLOCK_SIZE} tokens."
)


def translation_panel(hub: Hub) -> None:
    """Builds the panel: an encoder-decoder with a pool of its own, beside the model of the page."""
    with gr.Accordion("Encoder-decoders: one source, many beams", open=False, elem_id="translation"):
        english = gr.Textbox(
            EXAMPLE,
            label="English",
            info=f"A tiny T5, trained on the spot, knows these words: {', '.join(ENGLISH)}.",
            elem_id="translation-english",
        )
        with gr.Row(equal_height=True):
            count = gr.Slider(2, hub.limits.sequences, min(5, hub.limits.sequences), step=1, label="Beams")
            run = gr.Button("Translate", variant="primary", elem_id="translation-run", scale=0, min_width=160)
        notes = Notes(elem_id="translation-notes", value=notes_value([], EMPTY))
        picture = SourceView(elem_id="translation-view", value=source_value())
        cards = Cards(elem_id="translation-cards")

    @told
    async def on_run(english: str, count: float) -> AsyncIterator[list[Any]]:
        async with aclosing(translate(hub.limits, english, int(count))) as readings:
            async for reading in readings:
                yield [
                    notes_value([(reading.note, reading.note, [])]),
                    source_value(reading.source, reading.beams),
                    cards_value((f"beam {rank}", text, "") for rank, text in enumerate(reading.found, start=1)),
                    gr.Button(interactive=False),
                ]

    run.click(
        on_run,
        [english, count],
        [notes, picture, cards, run],
        **quietly(trigger_mode="once", concurrency_limit=hub.limits.requests, concurrency_id="translation"),
    ).then(lambda: gr.Button(interactive=True), None, run, **quietly(queue=False))
