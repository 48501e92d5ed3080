"""Sweeps of the request rate, from few to more than is sustained: figures 12, 13, 14, 16, 17, and more than those.

A curve walks up a grid of rates until its normalized latency is above `CEILING`, the top of the paper's axes. The rate
that it sustains at some latency lies between two points of the grid: a straight line between them, latencies on a
logarithmic scale. Longer runs make knees sharper, since beyond saturation latency grows with the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paper import policies
from paper.costs import LLAMA_PAPER, MODERN, PAPER, Setup
from paper.policies import System
from paper.requests import requests
from paper.simulator import Settings, rounded, run

CEILING = 1.0  # seconds a token
LATENCIES = (0.1, 0.2, 0.5, 1.0)  # at which rates are compared


@dataclass(frozen=True)
class Curve:
    """One line of a figure.

    Attributes:
        system: Who serves.
        start: Requests a second at its first point.
        settings: How, where it differs from the sweep's.
        label: In the legend, instead of the system's name.
        color: Instead of the system's.
    """

    system: System
    start: float
    settings: Settings | None = None
    label: str = ""
    color: str = ""

    @property
    def name(self) -> str:
        return self.label or self.system.name


@dataclass(frozen=True)
class Sweep:
    """A panel of a figure.

    Attributes:
        title: Above it.
        workload: See `requests.lengths`.
        curves: Lines.
        seconds: Of arrivals at each point.
        factor: From a rate to the next.
        settings: Of all curves that have none.
        setup: Model, card, pool.
    """

    title: str
    workload: str
    curves: tuple[Curve, ...]
    seconds: float
    factor: float = 1.25
    settings: Settings = field(default_factory=Settings)
    setup: Setup = PAPER

    def run(self, times: float = 1.0, trace: Path | None = None, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        """Points, each with the name of its curve; `times` as many seconds of arrivals."""
        for curve in self.curves:
            rate, latency = curve.start, 0.0
            settings = curve.settings or self.settings
            while latency <= CEILING:
                drawn = requests(
                    self.workload,
                    rate,
                    self.seconds * times,
                    seed=seed,
                    prefix=settings.prefix,
                    context=min(2048, self.setup.context),
                    trace=trace if self.workload == "sharegpt" else None,
                )
                figures = run(drawn, curve.system, self.setup, replace(settings, seed=seed)).figures
                latency = figures["normalized_latency"]
                yield curve.name, {"rate": rounded(rate)} | figures
                rate *= self.factor


def sustained(points: list[dict[str, Any]], latency: float) -> float | None:
    """Requests a second at a normalized latency; `None`: even the lowest rate is slower, or the highest is faster."""
    for low, high in pairwise(points):
        a, b = low["normalized_latency"], high["normalized_latency"]
        if a <= latency < b:
            share = math.log(latency / a) / math.log(b / a)
            return rounded(low["rate"] + share * (high["rate"] - low["rate"]))
    return None


def ratios(curves: dict[str, list[dict[str, Any]]], ours: str) -> dict[str, dict[str, float | None]]:
    """How many times each other curve's sustained rate ours is, by latency."""
    table: dict[str, dict[str, float | None]] = {}
    for latency in LATENCIES:
        rates = {name: sustained(points, latency) for name, points in curves.items()}
        best = rates[ours]
        table[str(latency)] = {
            name: rounded(best / rate) if best and rate else None for name, rate in rates.items() if name != ours
        }
    return table


def _orca(start: float) -> tuple[Curve, ...]:
    """Ours and Orca's; each begins where it is still idle."""
    return (
        Curve(policies.PAGED, start),
        Curve(policies.ORACLE, start),
        Curve(policies.POW2, start / 2),
        Curve(policies.MAX, start / 4),
    )


def _several(width: int, is_beams: bool) -> Sweep:
    kind = "beams" if is_beams else "samples"
    curves = _orca(12.0 / width)
    return Sweep(f"{width} {kind}", "alpaca", curves, 20, 1.5, Settings(width=width, is_beams=is_beams))


def _prefix(tokens: int, shots: str) -> Sweep:
    settings = Settings(prefix=tokens, caches_prefixes=True)
    curves = (Curve(policies.PAGED, 8.0), Curve(policies.ORACLE, 4.0))
    return Sweep(f"{shots}, prefix of {tokens} tokens", "translation", curves, 40, 1.2, settings, LLAMA_PAPER)


OURS = policies.PAGED.name
SWEEPS: dict[str, tuple[Sweep, ...]] = {
    "figure_12": (
        Sweep("ShareGPT lengths", "sharegpt", (*_orca(1.0), Curve(policies.STATIC, 0.05)), 600, 1.25),
        Sweep("Alpaca lengths", "alpaca", (*_orca(16.0), Curve(policies.STATIC, 0.4)), 60, 1.4),
    ),
    "figure_14": tuple(_several(width, is_beams) for is_beams in (False, True) for width in (2, 4, 6)),
    "figure_16": (_prefix(80, "one shot"), _prefix(341, "five shots")),
    "figure_17": (Sweep("Chat, history cut at 1,024 tokens", "chat", _orca(0.3), 300, 1.25),),
    "more_tails": (
        Sweep(
            "ShareGPT lengths",
            "sharegpt",
            (
                Curve(policies.PAGED, 1.0),
                Curve(policies.ORACLE, 1.0),
                Curve(policies.MAX, 0.4),
                Curve(policies.STATIC, 0.1),
            ),
            120,
            1.5,
        ),
    ),
    "more_h100": (
        Sweep(
            "Llama-3.1-8B on an H100, ShareGPT lengths",
            "sharegpt",
            (Curve(policies.PAGED, 20.0), Curve(policies.ORACLE, 20.0), Curve(policies.MAX, 5.0)),
            20,
            1.6,
            Settings(max_num_seqs=1024),
            MODERN,
        ),
    ),
    "more_policies": (
        Sweep(
            "ShareGPT lengths, one thing changed at a time",
            "sharegpt",
            (
                Curve(policies.PAGED, 2.0),
                Curve(policies.SHORTEST, 2.0),
                Curve(policies.PAGED, 2.0, Settings(preemption="recompute"), "recompute only", "#c44e52"),
                Curve(policies.PAGED, 2.0, Settings(max_num_seqs=32), "at most 32 rows", "#e0913a"),
                Curve(policies.FIRST_FIT, 1.5),
            ),
            150,
        ),
    ),
}
