"""The tab of plots over time, and of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gradio as gr
import pandas as pd

from ..history import Sample
from ..hub import Hub, Picture
from ..replays import Replay
from .replay import replay_panel
from .viewer import Viewer

SHOWN_SECONDS = 90
NOTHING = Sample(0.0, 0.0, 0, 0, 0, 0.0, 0.0, 0.0)
COLORS = {"running": "#0072b2", "waiting": "#e69f00", "swapped": "#cc79a7"}


def plots_page(hub: Hub, tab: str) -> Viewer:
    """Builds the tab of this name."""
    empty = plot_data([NOTHING])  # a plot learns its colours from what it shows first
    with gr.Row():
        plots = [
            _plot(empty[0], "tokens/s", "Tokens a second", elem_id="plot-speed"),
            _plot(empty[1], "sequences", "Sequences", color="queue", color_map=COLORS, elem_id="plot-queues"),
        ]
    with gr.Row():
        plots += [
            _plot(empty[2], "% of the pool", "Blocks held, % of the pool", y_lim=[0, 100], elem_id="plot-pool"),
            _plot(empty[3], "% of tokens", "Prompt tokens from the cache, %", y_lim=[0, 100], elem_id="plot-hits"),
        ]
    plots.append(_plot(empty[4], "blocks/token", "New blocks for each new token", elem_id="plot-sharing"))
    alone = 1 / hub.settings["block_size"]
    gr.Markdown(
        f"New blocks for each new token say how well sharing works: a lone reply takes {alone:.3f} and the blocks of "
        "its prompt; samples, beams and prompts that share blocks take less."
    )

    replay_panel(Replay())

    def values(_: Picture) -> list[Any]:
        return plot_data(list(hub.history.samples))

    return Viewer(tab, plots, values, every=4)


def _plot(value: pd.DataFrame, y: str, title: str, **kwargs: Any) -> gr.LinePlot:
    return gr.LinePlot(
        value,
        x="seconds ago",
        y=y,
        title=title,
        x_title="seconds from now",
        color_title=" ",
        height=240,
        x_lim=[-SHOWN_SECONDS, 0],
        min_width=300,
        buttons=[],
        **kwargs,
    )


def plot_data(samples: Iterable[Sample]) -> list[pd.DataFrame]:
    """What the five plots show: each sample's age in seconds, below 0, and its numbers."""
    samples = list(samples)
    now = samples[-1].time if samples else 0.0
    samples = [sample for sample in samples if now - sample.time <= SHOWN_SECONDS]
    ages = [round(sample.time - now, 2) for sample in samples]
    queues = [
        (age, name, float(getattr(sample, name))) for name in COLORS for age, sample in zip(ages, samples, strict=True)
    ]
    hits, sharing = (
        [
            (age, factor * value)
            for age, sample in zip(ages, samples, strict=True)
            if (value := getattr(sample, name)) is not None
        ]
        for name, factor in (("hit_rate", 100), ("blocks_per_token", 1))
    )
    return [
        _frame({"tokens/s": [sample.tokens_per_second for sample in samples]}, ages),
        _frame(
            {"queue": [name for _, name, _ in queues], "sequences": [n for *_, n in queues]},
            [age for age, *_ in queues],
        ),
        _frame({"% of the pool": [100 * sample.pool_use for sample in samples]}, ages),
        _frame({"% of tokens": [rate for _, rate in hits]}, [age for age, _ in hits]),
        _frame({"blocks/token": [ratio for _, ratio in sharing]}, [age for age, _ in sharing]),
    ]


def _frame(columns: dict[str, list[Any]], ages: list[float]) -> pd.DataFrame:
    types = {name: "str" if name == "queue" else "float64" for name in columns}
    return pd.DataFrame({"seconds ago": ages} | columns).astype({"seconds ago": "float64"} | types)
