"""The tab of samples and beams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr

from ..adapters import can_train, voices
from ..generation import Sampling
from ..hub import Hub
from ..panels import Cards, Notes, cards_value, notes_value
from ..prompts import embedded_prompts
from ..samples import Branches, beams, samples
from ..told import told
from ..views import BeamTree, beam_tree_value
from .chat import at_rest, seed_control
from .translation import translation_panel
from .viewer import owner_of, quietly

SAMPLES, BEAMS, ADAPTERS = "Samples", "Beams", "Adapters"
EMPTY = "Run it: the sequences share the blocks of their prompt, and copy a block only when they write into it."


def samples_page(hub: Hub, last_run: gr.State) -> None:
    """Builds the tab.

    Args:
        hub: The engine.
        last_run: Gets the finished run, for the memory maps.
    """
    prompt = gr.Textbox(long_prompt(), label="Prompt", lines=2, max_lines=8, elem_id="samples-prompt")
    with gr.Row():
        kinds = [SAMPLES, BEAMS, ADAPTERS] if can_train(hub) else [SAMPLES, BEAMS]
        kind = gr.Radio(kinds, value=SAMPLES, label="What", elem_id="samples-kind", min_width=180)
        count = gr.Slider(2, hub.limits.sequences, 4, step=1, label="How many", min_width=160)
        new_tokens = gr.Slider(
            1, hub.limits.new_tokens, min(48, hub.limits.new_tokens), step=1, label="New tokens", min_width=160
        )
    with gr.Row():
        temperature = gr.Slider(
            0.05, 2, 0.9, step=0.05, label="Temperature", info="of samples; beams take the likeliest"
        )
        seed = seed_control()
    with gr.Row():
        run = gr.Button("Run", variant="primary", elem_id="samples-run")
        stop = gr.Button("Stop", variant="stop", elem_id="samples-stop", interactive=False)
    sharing = Notes(elem_id="samples-sharing", value=notes_value([], EMPTY))
    cards = Cards(elem_id="samples-cards")
    tree = BeamTree(elem_id="beam-tree", visible=False)
    translation_panel(hub)

    @told
    async def on_run(
        request: gr.Request,
        prompt: str,
        kind: str,
        count: float,
        new_tokens: float,
        temperature: float,
        seed: float | None,
    ) -> AsyncIterator[list[Any]]:
        sampling = Sampling.checked(hub.limits, new_tokens, temperature, seed=seed)
        if kind == ADAPTERS:
            running = voices(hub, owner_of(request), prompt, sampling)
        else:
            search = samples if kind == SAMPLES else beams
            running = search(hub, owner_of(request), prompt, int(count), sampling)
        async with aclosing(running) as states:
            async for state in states:
                yield [
                    notes_value(_notes(state)),
                    cards_value((branch.title, branch.text, branch.note) for branch in state.branches),
                    gr.update(value=beam_tree_value(state.nodes), visible=kind == BEAMS),
                    gr.Button(interactive=False),
                    gr.Button(interactive=True),
                    state.record if state.record is not None else gr.skip(),
                ]

    def on_stop(request: gr.Request) -> None:
        for kind in ("samples", "beams", "adapter"):
            hub.cancel(owner_of(request), kind)

    run.click(
        on_run,
        [prompt, kind, count, new_tokens, temperature, seed],
        [sharing, cards, tree, run, stop, last_run],
        **quietly(trigger_mode="once", concurrency_limit=hub.limits.requests, concurrency_id="samples-page"),
    ).then(at_rest, None, [run, stop], **quietly(queue=False))
    stop.click(on_stop, **quietly(queue=False))


def long_prompt() -> str:
    """A prompt of several blocks: what is shared of a short one is hard to see."""
    return next(text for text in embedded_prompts() if len(text) > 500)


def _notes(state: Branches) -> list[tuple[str, str, list[str]]]:
    headline = f"{state.label} {'is done' if state.is_done else 'is running'}"
    return [(f"{headline} {state.sharing}", headline, [state.sharing] if state.sharing else [])]
