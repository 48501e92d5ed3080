"""The tab of the step mode: the engine stands still, and each step is explained."""

from __future__ import annotations

import asyncio
from typing import Any

import gradio as gr

from ..generation import Sampling
from ..hub import Hub
from ..limits import RefusedError
from ..panels import Notes, notes_value
from ..prompts import encode, openings
from ..stepping import Explanation
from ..told import told
from .viewer import owner_of, quietly

MOST_SHOWN = 40
EMPTY = "Pause the engine, queue some requests (here, or on any tab), and let it make one step at a time."


def step_page(hub: Hub) -> None:
    """Builds the tab."""
    explanations = gr.State([])
    gr.Markdown(
        "**One step** is one forward of the model over the next tokens of all requests. The engine is shared: "
        "paused, it stands still for all visitors."
    )
    with gr.Row():
        pause = gr.Button("Pause", elem_id="step-pause", min_width=90)
        queue = gr.Button("Queue 3 requests", elem_id="step-queue", min_width=160)
        one = gr.Button("One step", variant="primary", elem_id="step-one", min_width=90)
        ten = gr.Button("Ten steps", elem_id="step-ten", min_width=90)
        resume = gr.Button("Resume", elem_id="step-resume", min_width=90)
    notes = Notes(elem_id="step-notes", value=notes_value([], EMPTY))

    @told
    async def on_pause() -> dict[str, Any]:
        await asyncio.to_thread(hub.pacer.pause)
        return notes_value([], "The engine is paused. Queue requests, or make a step.")

    @told
    async def on_resume() -> None:
        await asyncio.to_thread(hub.pacer.resume)

    @told
    async def on_queue(request: gr.Request) -> dict[str, Any]:
        labels = await asyncio.to_thread(queue_requests, hub, owner_of(request))
        sentence = f"{', '.join(labels[:-1])} and {labels[-1]} are queued."
        return notes_value([(sentence, sentence, ["Nothing is computed before the next step."] * hub.pacer.is_paused)])

    def make_steps(count: int) -> Any:
        @told
        async def on_step(before: list[Explanation]) -> list[Any]:
            new = await asyncio.to_thread(take_steps, hub, count)
            shown = [*reversed(new), *before][:MOST_SHOWN]
            return [shown, notes_value([(each.step, each.headline, each.details) for each in shown])]

        return on_step

    event = quietly(trigger_mode="once")
    pause.click(on_pause, None, notes, **event)
    resume.click(on_resume, None, None, **event)
    queue.click(on_queue, None, notes, **event)
    one.click(make_steps(1), explanations, [explanations, notes], **event)
    ten.click(make_steps(10), explanations, [explanations, notes], **event)


def queue_requests(hub: Hub, owner: str) -> list[str]:
    """Submits three short requests, two of them with the same beginning, and returns their labels."""
    sampling = Sampling.checked(hub.limits, min(40, hub.limits.new_tokens), 0.8, 0.95)
    first, second, *_ = openings(hub.loaded)
    labels = []
    for text in (first, second, first + " he"):
        ticket = hub.submit("step", owner, encode(hub.loaded, text), **sampling.arguments(hub.loaded))
        labels.append(ticket.label)
    return labels


def take_steps(hub: Hub, count: int) -> list[Explanation]:
    """Makes up to so many steps of the paused engine and explains each.

    Raises:
        RefusedError: It isn't paused, or there is nothing to do.
    """
    if not hub.pacer.is_paused:
        raise RefusedError("The engine is running: pause it first.")
    explanations: list[Explanation] = []
    for _ in range(count):
        explanation = hub.step()
        if explanation is None:
            break
        explanations.append(explanation)
    if not explanations:
        raise RefusedError("There is nothing to do: queue some requests, or send something on the chat tab.")
    return explanations
