"""The replay on the tab of plots: two systems over the same arrivals, until one of them saturates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr
import pandas as pd

from ..replays import OURS, Replay
from ..told import told
from .viewer import quietly

FRAMES, FRAME_SECONDS = 24, 0.4
AFTER = 1.25  # the replay goes on for a quarter of the time that it took the other to saturate
OTHER = "the one chosen above"  # a plot learns the names from what it shows first
COLORS = ("#009e73", "#d55e00")  # ours, the other's
PLOTS = {
    "running": "requests in the batch",
    "waiting": "requests waiting",
    "tokens": "share of the pool with tokens",
}


def replay_panel(replay: Replay) -> None:
    """Builds it."""
    with gr.Accordion("Replay: the same arrivals, two ways to give out memory", open=True, elem_id="replay"):
        with gr.Row():
            other = gr.Radio(
                replay.others, value=replay.others[-2], label="Beside hf_paged", elem_id="replay-other", scale=3
            )
            play = gr.Button("Replay", variant="primary", elem_id="replay-play", scale=0, min_width=120)
        story = gr.Markdown(
            f"Requests come faster and faster. Recorded, not run here: {replay.what}.", elem_id="replay-story"
        )
        with gr.Row():
            plots = [_plot(replay, name, title) for name, title in PLOTS.items()]

        @told
        async def on_play(name: str) -> AsyncIterator[list[Any]]:
            last = last_point(replay, name)
            for frame in range(1, FRAMES + 1):
                point = round(frame * last / FRAMES)
                yield [replay.describe(name, point), *(frames(replay, name, point))]
                await asyncio.sleep(FRAME_SECONDS)

        # From the start when another is chosen or the button is pressed again, whatever was playing.
        shown = [story, *plots]
        playing = play.click(on_play, other, shown, **quietly(concurrency_limit=None, trigger_mode="multiple"))
        other.input(lambda: None, None, None, cancels=[playing], **quietly(queue=False))


def last_point(replay: Replay, other: str) -> int:
    """Where the replay ends: some time after the other has saturated, or with the record."""
    full = replay.saturated_from(other)
    end = len(replay.times) - 1
    return end if full is None else min(end, round(AFTER * full))


def frames(replay: Replay, other: str, point: int) -> list[pd.DataFrame]:
    """What the plots show up to a point."""
    made = []
    for name in PLOTS:
        factor = 100 if name == "tokens" else 1
        made.append(
            pd.DataFrame(
                [
                    (at, system if system == OURS else OTHER, factor * value)
                    for system in (OURS, other)
                    for at, value in zip(replay.times[: point + 1], replay.series(system, name))
                ],
                columns=["seconds", "system", PLOTS[name]],
            ).astype({"seconds": "float64", "system": "str", PLOTS[name]: "float64"})
        )
    return made


def _plot(replay: Replay, name: str, title: str) -> gr.LinePlot:
    empty = frames(replay, replay.others[0], 0)[list(PLOTS).index(name)]
    return gr.LinePlot(
        empty,
        x="seconds",
        y=title,
        color="system",
        color_map=dict(zip((OURS, OTHER), COLORS)),
        title=title.capitalize(),
        y_title="% of its tokens" if name == "tokens" else "requests",
        color_title=" ",
        height=240,
        x_lim=[0, replay.times[-1]],
        min_width=240,
        buttons=[],
        elem_id=f"replay-{name}",
    )
