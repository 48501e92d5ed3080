"""The figures: sweeps of the request rate, single things switched at a time, memory, sharing, block sizes.

A curve of a sweep walks up a grid of rates until its normalized latency is above `CEILING`, the top of the paper's
axes. The rate that it sustains at some latency lies between two points of the grid: a straight line between them,
latencies on a logarithmic scale. Longer runs make knees sharper, since beyond saturation latency grows with the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any

from workload import draw_requests

from paper import policies
from paper.costs import A100, LLAMA_PAPER, MODERN, OPT_13B, PAPER, SMALL, Roofline, Setup
from paper.policies import System
from paper.simulator import Settings, rounded, run

CEILING = 1.0  # seconds a token
LATENCIES = (0.1, 0.2, 0.5, 1.0)  # at which rates are compared
OURS = policies.PAGED.name


@dataclass(frozen=True)
class Curve:
    """One line of a figure.

    Attributes:
        system: Who serves.
        start: Requests a second at its first point.
        settings: How, where it differs from the sweep's.
        label: In the legend, instead of the system's name.
        color: Instead of the system's.
        value: Where its number is among the figures of a run.
    """

    system: System = policies.PAGED
    start: float = 0.0
    settings: Settings | None = None
    label: str = ""
    color: str = ""
    value: tuple[str, ...] = ("normalized_latency",)

    @property
    def name(self) -> str:
        return self.label or self.system.name


@dataclass(frozen=True)
class Sweep:
    """A panel of a figure.

    Attributes:
        title: Above it.
        workload: See `draw_lengths`.
        curves: Lines.
        seconds: Of arrivals at each point.
        factor: From a rate to the next.
        settings: Of all curves that have none.
        setup: Model, card, pool.
        unit: Of what is shown.
        rates: Instead of those from a curve's start, by the factor, to the ceiling.
    """

    title: str
    workload: str
    curves: tuple[Curve, ...]
    seconds: float
    factor: float = 1.25
    settings: Settings = field(default_factory=Settings)
    setup: Setup = PAPER
    unit: str = "normalized latency, s/token"
    rates: tuple[float, ...] = ()

    def point(self, curve: Curve, rate: float, times: float, seed: int) -> dict[str, Any]:
        """One run, of `times` as many seconds of arrivals."""
        settings = replace(curve.settings or self.settings, seed=seed)
        drawn = draw_requests(
            self.workload,
            rate,
            self.seconds * times,
            seed=seed,
            prefix=settings.prefix,
            context=min(2048, self.setup.context),
        )
        return {"rate": rounded(rate)} | run(drawn, curve.system, self.setup, settings)

    def walk(self, curve: Curve, times: float, seed: int) -> Iterator[dict[str, Any]]:
        """Points of a curve, until it is above the ceiling."""
        rate, latency = curve.start, 0.0
        while latency <= CEILING:
            point = self.point(curve, rate, times, seed)
            latency = point["normalized_latency"]
            yield point
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


def sweep(name: str, times: float, seed: int) -> dict[str, Any]:
    """A figure of `SWEEPS`."""
    panels: dict[str, Any] = {}
    for one in SWEEPS[name]:
        curves = {curve.name: list(one.walk(curve, times, seed)) for curve in one.curves}
        panels[one.title] = {"curves": curves, "times_the_rate": ratios(curves, OURS)}
    return panels


def more_switches(times: float, seed: int) -> dict[str, Any]:
    """One thing of ours switched off and on at a time, and the one number that it is there for, against the rate."""
    kept = ("normalized_latency", "ttft", "inter_token", "requests_per_second", "preempted", "marked", "others")

    def shown(one: Sweep, curve: Curve, rate: float) -> dict[str, Any]:
        figures = one.point(curve, rate, times, seed)
        value = reduce(lambda found, key: found[key], curve.value, figures)
        return {"rate": figures["rate"], "value": value} | {key: figures[key] for key in kept if key in figures}

    return {
        one.title: {
            "unit": one.unit,
            "curves": {curve.name: [shown(one, curve, rate) for rate in one.rates] for curve in one.curves},
        }
        for one in SWITCHES
    }


def figure_2(times: float, seed: int) -> dict[str, Any]:
    """Shares of the pool while requests wait: tokens, reserved for tokens to come, never used, and between runs."""
    drawn = draw_requests("sharegpt", 6.0, 120 * times, seed=seed)
    systems = (policies.MAX, policies.POW2, policies.ORACLE, policies.FIRST_FIT, policies.PAGED)
    return {system.name: run(drawn, system, PAPER)["memory"] for system in systems}


def figure_15(times: float, seed: int) -> dict[str, Any]:
    """Shares of the blocks that sharing saves, by lengths, kind and width.

    Below saturation, so that beams live as long as their output.
    """
    saved: dict[str, Any] = {}
    for name, rate, seconds in (("sharegpt", 0.3, 360), ("alpaca", 6.0, 90)):
        drawn = draw_requests(name, rate, seconds * times, seed=seed)
        for is_beams in (False, True):
            saved[f"{name}, {'beams' if is_beams else 'samples'}"] = {
                str(width): run(drawn, policies.PAGED, PAPER, Settings(width=width, is_beams=is_beams))["saved"]
                for width in (2, 4, 6)
            }
    return saved


# What depends on the block size. Kernels are taken to be as fast at any: what is seen here are the ends of last blocks,
# and what a transfer to CPU memory costs beside its bytes. The paper's layout moves a block's keys and its values apart
# in each layer, which makes many small copies of a small block; here a block is one piece across all layers.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTH = 256  # tokens of the sequence that is brought back
LAYOUTS = {"swap, a block in one piece": 1, "swap, layer by layer": 2 * OPT_13B.layers}


def figure_18(times: float, seed: int) -> dict[str, Any]:
    """By lengths and block size, at one rate: normalized latency, and what of the pool is held and empty."""
    found: dict[str, Any] = {}
    for name, rate, seconds in (("sharegpt", 3.2, 200.0), ("alpaca", 70.0, 20.0)):
        drawn = draw_requests(name, rate, seconds * times, seed=seed)
        for size in SIZES:
            figures = run(drawn, policies.PAGED, PAPER, Settings(block_size=size, preemption="recompute"))
            kept = ("normalized_latency", "batch", "memory", "preempted")
            found.setdefault(name, {})[str(size)] = {key: figures[key] for key in kept}
    return found


def figure_19(times: float, seed: int) -> dict[str, Any]:
    """Milliseconds to bring a sequence back, by arithmetic, and normalized latency at a rate that preempts."""
    costs = Roofline(OPT_13B, A100)
    alone: dict[str, dict[str, float]] = {}
    whole: dict[str, dict[str, float]] = {}
    drawn = draw_requests("sharegpt", 3.4, 150 * times, seed=seed)
    for size in SIZES:
        blocks = -(-LENGTH // size)
        alone.setdefault("recompute", {})[str(size)] = rounded(1e3 * costs.recompute(LENGTH))
        for name, transfers in LAYOUTS.items():
            seconds = 2 * costs.swap(blocks * size, blocks * transfers)
            alone.setdefault(name, {})[str(size)] = rounded(1e3 * seconds)
    for size in SIZES[3:]:
        kinds = {name: Settings(size, preemption="swap", transfers=n) for name, n in LAYOUTS.items()}
        for name, settings in ({"recompute": Settings(size, preemption="recompute")} | kinds).items():
            whole.setdefault(name, {})[str(size)] = run(drawn, policies.PAGED, PAPER, settings)["normalized_latency"]
    return {"milliseconds": alone, "normalized_latency": whole}


def _lines(*starts: tuple[System, float]) -> tuple[Curve, ...]:
    """A curve for each system, from a rate on at which it is still idle."""
    return tuple(Curve(system, rate) for system, rate in starts)


def _orca(start: float) -> tuple[Curve, ...]:
    return _lines(*zip(policies.SYSTEMS, (start, start, start / 2, start / 4)))  # not the last, FasterTransformer


def _several(width: int, is_beams: bool) -> Sweep:
    kind = "beams" if is_beams else "samples"
    settings = Settings(width=width, is_beams=is_beams)
    return Sweep(f"{width} {kind}", "alpaca", _orca(12.0 / width), 20, 1.5, settings)


def _prefix(tokens: int, shots: str) -> Sweep:
    settings = Settings(prefix=tokens, caches_prefixes=True)
    curves = _lines((policies.PAGED, 8.0), (policies.ORACLE, 4.0))
    return Sweep(f"{shots}, prefix of {tokens} tokens", "translation", curves, 40, 1.2, settings, LLAMA_PAPER)


def _rivals(title: str, setup: Setup, start: float) -> Sweep:
    continuous = (policies.PAGED, start), (policies.FIRST_FIT, start), (policies.LIMITED, start / 2)
    static = (policies.STATIC, start / 20), (policies.HF, start / 20)
    return Sweep(title, "sharegpt", _lines(*continuous, *static), 300, setup=setup)


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
            _lines((policies.PAGED, 1.0), (policies.ORACLE, 1.0), (policies.MAX, 0.4), (policies.STATIC, 0.1)),
            120,
            1.5,
        ),
    ),
    "more_rivals": (
        _rivals("LLaMA-13B on an A100", LLAMA_PAPER, 1.0),
        _rivals("LLaMA-7B on an A10G", SMALL, 0.8),
    ),
    "more_h100": (
        Sweep(
            "Llama-3.1-8B on an H100, ShareGPT lengths",
            "sharegpt",
            _lines((policies.PAGED, 20.0), (policies.ORACLE, 20.0), (policies.MAX, 5.0)),
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

URGENT, WIDE, LONG = Settings(marked_every=5), Settings(marked_every=10, width=16), Settings(prefix=341)
FAVOURED = replace(URGENT, favours_marked=True)
TO_MARKED, TO_OTHERS = ("marked", "ttft", "p99"), ("others", "ttft", "p99")
CHUNKS = {"256 tokens a step": 256, "512": 512, "2,048": 2048, "off: whole prompts": 65536}
SWITCHES = (
    Sweep(
        "Priorities",
        "sharegpt",
        (
            Curve(label="urgent, with priorities", settings=FAVOURED, value=TO_MARKED),
            Curve(label="urgent, without", settings=URGENT, value=TO_MARKED),
            Curve(label="the others, with priorities", settings=FAVOURED, value=TO_OTHERS),
        ),
        100,
        unit="s to the first token, p99",
        rates=(1.0, 2.0, 2.5, 3.0, 3.25, 3.5, 3.75, 4.0),
    ),
    Sweep(
        "Chunked prefill",
        "chat",
        tuple(Curve(label=k, settings=Settings(chunk=n), value=("inter_token", "p99")) for k, n in CHUNKS.items()),
        100,
        unit="s from token to token, p99",
        rates=(0.5, 0.75, 1.0, 1.25, 1.5),
    ),
    Sweep(
        "Prefix cache",
        "translation",
        (Curve(label="on", settings=replace(LONG, caches_prefixes=True)), Curve(label="off", settings=LONG)),
        20,
        setup=LLAMA_PAPER,
        rates=(4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0),
    ),
    Sweep(
        "A cap on branches: requests of one sample",
        "sharegpt",
        (
            Curve(label="no cap", settings=WIDE, value=TO_OTHERS),
            *(Curve(one, label=one.name.split(", ")[1], settings=WIDE, value=TO_OTHERS) for one in policies.CAPPED),
        ),
        120,
        unit="s to the first token, p99",
        rates=(0.5, 0.75, 1.0, 1.25, 1.5, 1.75),
    ),
)

FIGURES: dict[str, Callable[[float, int], dict[str, Any]]] = {
    "figure_2": figure_2,
    "figure_15": figure_15,
    "figure_18": figure_18,
    "figure_19": figure_19,
    "more_switches": more_switches,
    **{name: partial(sweep, name) for name in SWEEPS},
}
