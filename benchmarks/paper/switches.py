"""One thing of ours switched off and on at a time, and the one number that it is there for, against the rate.

*Priorities*: every fifth request is urgent. *Chunked prefill*: from whole prompts, however long a step gets, to small
chunks. *Prefix cache*: a prefix of 341 tokens. *A cap on branches*: every tenth request asks for sixteen samples, and
what is looked at are the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from paper import policies
from paper.costs import LLAMA_PAPER, PAPER, Setup
from paper.policies import System
from paper.requests import requests
from paper.simulator import Settings, rounded, run

URGENT = Settings(marked_every=5)
WIDE = Settings(marked_every=10, width=16)
LONG = Settings(prefix=341)


@dataclass(frozen=True)
class Line:
    """One way to serve.

    Attributes:
        name: In the legend.
        settings: With or without what the panel is about.
        value: Where its number is among the figures of a run.
        system: Who serves.
    """

    name: str
    settings: Settings
    value: tuple[str, ...]
    system: System = policies.PAGED


@dataclass(frozen=True)
class Panel:
    """One thing that is switched.

    Attributes:
        title: Above it.
        unit: Of its numbers.
        workload: See `requests.lengths`.
        rates: Requests a second.
        seconds: Of arrivals.
        lines: One with, one without, and what lies between.
        setup: Model, card, pool.
    """

    title: str
    unit: str
    workload: str
    rates: tuple[float, ...]
    seconds: float
    lines: tuple[Line, ...]
    setup: Setup = PAPER


RATES = (1.0, 2.0, 2.5, 3.0, 3.25, 3.5, 3.75, 4.0)
PANELS = (
    Panel(
        "Priorities",
        "s to the first token, p99",
        "sharegpt",
        RATES,
        100,
        (
            Line("urgent, with priorities", replace(URGENT, favours_marked=True), ("marked", "ttft", "p99")),
            Line("urgent, without", URGENT, ("marked", "ttft", "p99")),
            Line("the others, with priorities", replace(URGENT, favours_marked=True), ("others", "ttft", "p99")),
        ),
    ),
    Panel(
        "Chunked prefill",
        "s from token to token, p99",
        "chat",
        (0.5, 0.75, 1.0, 1.25, 1.5),
        100,
        tuple(
            Line(name, Settings(chunk=chunk), ("inter_token", "p99"))
            for name, chunk in (
                ("256 tokens a step", 256),
                ("512", 512),
                ("2,048", 2048),
                ("off: whole prompts", 65536),
            )
        ),
    ),
    Panel(
        "Prefix cache",
        "normalized latency, s/token",
        "translation",
        (4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0),
        20,
        (
            Line("on", replace(LONG, caches_prefixes=True), ("normalized_latency",)),
            Line("off", LONG, ("normalized_latency",)),
        ),
        LLAMA_PAPER,
    ),
    Panel(
        "A cap on branches: requests of one sample",
        "s to the first token, p99",
        "sharegpt",
        (0.5, 0.75, 1.0, 1.25, 1.5, 1.75),
        120,
        (
            Line("no cap", WIDE, ("others", "ttft", "p99")),
            *(Line(one.name.split(", ")[1], WIDE, ("others", "ttft", "p99"), one) for one in policies.CAPPED),
        ),
    ),
)


def more_switches(times: float, trace: Path | None, seed: int) -> dict[str, Any]:
    """By panel and line: its number by rate, and the rest of the run's latencies."""
    return {
        panel.title: {
            "unit": panel.unit,
            "curves": {
                line.name: [_point(panel, line, rate, times, trace, seed) for rate in panel.rates]
                for line in panel.lines
            },
        }
        for panel in PANELS
    }


def _point(panel: Panel, line: Line, rate: float, times: float, trace: Path | None, seed: int) -> dict[str, Any]:
    settings = replace(line.settings, seed=seed)
    trace = trace if panel.workload == "sharegpt" else None
    drawn = requests(panel.workload, rate, panel.seconds * times, seed=seed, prefix=settings.prefix, trace=trace)
    figures = run(drawn, line.system, panel.setup, settings).figures
    kept = ("normalized_latency", "ttft", "inter_token", "requests_per_second", "preempted", "marked", "others")
    value = reduce(lambda found, key: found[key], line.value, figures)
    return {"rate": rounded(rate), "value": value} | {name: figures[name] for name in kept if name in figures}
