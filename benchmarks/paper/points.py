"""What `measured.py` measures: the twelve points, those of `more`, and whose throughputs are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paper import policies
from paper.policies import System
from paper.serving import SCALE, SETTINGS
from paper.simulator import Settings

SHARES = 0.5, 0.75  # of the rate at which a system saturates in the simulator


@dataclass(frozen=True)
class Point:
    """What is measured.

    Attributes:
        name: Of its file.
        system: Who serves.
        share: Of the rate at which the system saturates; `None`: all requests are there at once.
        settings: How.
        rate_of: The settings with which it is said to saturate, if not these.
        workload: Whose lengths, see `requests.lengths`.
        lasts: So many times the seconds of arrivals.
        repeats: Runs.
    """

    name: str
    system: System
    share: float | None
    settings: Settings = SETTINGS
    rate_of: Settings | None = None
    workload: str = "sharegpt"
    lasts: float = 1.0
    repeats: int = 1


def _points(system: System, name: str) -> tuple[Point, ...]:
    below = tuple(Point(f"{name}-{share}", system, share, repeats=3) for share in SHARES)
    return *below, Point(f"{name}-burst", system, None)


def _switch(name: str, share: float, off: Settings, on: Settings) -> tuple[Point, ...]:
    return tuple(Point(f"{name}-{k}", policies.PAGED, share, s, off) for k, s in (("off", off), ("on", on)))


def _against_oracle(name: str, settings: Settings, workload: str = "sharegpt") -> tuple[Point, ...]:
    systems = ("hf_paged", policies.PAGED), ("oracle", policies.ORACLE)
    settings = replace(settings, preemption="auto")  # as the package has it, where nothing else is said
    return tuple(
        Point(f"{name}-{key}", system, None, settings, workload=workload, lasts=0.6) for key, system in systems
    )


def _prefixed(tokens: int) -> Settings:
    return replace(SETTINGS, prefix=round(tokens / SCALE), caches_prefixes=True)


POINTS = (
    *_points(policies.PAGED, "hf_paged"),
    *_points(policies.ORACLE, "oracle"),
    *_points(policies.MAX, "max"),
    *_points(policies.STATIC, "fastertransformer"),
)
URGENT, PREFIX = replace(SETTINGS, marked_every=5), replace(SETTINGS, prefix=64)
SWITCHES = (
    *_switch("priorities", 1.25, URGENT, replace(URGENT, favours_marked=True)),
    *_switch("chunks_of_16", 0.75, SETTINGS, replace(SETTINGS, chunk=16)),
    *_switch("prefix_cache", 0.75, PREFIX, replace(PREFIX, caches_prefixes=True)),
)
BLOCKS = tuple(  # figure 18b; 4 is hf_paged-0.75
    Point(f"blocks_of_{size}", policies.PAGED, 0.75, replace(SETTINGS, block_size=size), SETTINGS)
    for size in (1, 16, 64, 256)
)
WIDTHS = 2, 4, 6
FIGURES = (
    *(point for n in WIDTHS for point in _against_oracle(f"samples_{n}", replace(SETTINGS, width=n))),
    *(point for n in WIDTHS for point in _against_oracle(f"beams_{n}", replace(SETTINGS, width=n, is_beams=True))),
    *_against_oracle("prefix_80", _prefixed(80), "translation"),
    *_against_oracle("prefix_341", _prefixed(341), "translation"),
    *_against_oracle("chat", SETTINGS, "chat"),
)
SWAP_SIZES = 1, 4, 16
SWAPS = tuple(  # figure 19, all on the same requests
    Point(
        f"{way}-blocks_of_{size}",
        policies.PAGED,
        None,
        replace(SETTINGS, block_size=size, preemption=way),
        SETTINGS,
        lasts=0.6,
    )
    for size in SWAP_SIZES
    for way in ("recompute", "swap")
)
MORE = (*_points(policies.POW2, "pow2"), *SWITCHES, *BLOCKS, *FIGURES, *SWAPS)
PEERS = ("generate", "generate_batch", "vllm")  # on the arrivals of the first two of POINTS


@dataclass(frozen=True)
class Comparison:
    """How many times another system's throughput ours is.

    Attributes:
        what: In the table.
        ours: A point.
        other: The other system's.
        figure: Where the rates are that both sustain on an A100, simulated: the file's name, and
        panel: its panel.
        bar: What was asked for of them.
    """

    what: str
    ours: str
    other: str
    figure: str
    panel: str
    bar: float | None = None

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.ours}-over-{self.other}"


def _basic(what: str, other: str, bar: float | None) -> Comparison:
    return Comparison(what, "hf_paged-burst", f"{other}-burst", "figure_12", "ShareGPT lengths", bar)


def _shared(what: str, name: str, figure: str, panel: str, bar: float | None = None) -> Comparison:
    return Comparison(f"{what}, Orca (Oracle)", f"{name}-hf_paged", f"{name}-oracle", figure, panel, bar)


COMPARISONS = (
    _basic("Orca (Oracle)", "oracle", 1.7),
    _basic("Orca (Pow2)", "pow2", None),
    _basic("Orca (Max)", "max", 2.7),
    _basic("FasterTransformer", "fastertransformer", 8.0),
    *(
        _shared(f"{n} {kind}", f"{kind}_{n}", "figure_14", f"{n} {kind}")
        for kind in ("samples", "beams")
        for n in WIDTHS
    ),
    _shared("prefix of 80 tokens", "prefix_80", "figure_16", "one shot, prefix of 80 tokens", 1.67),
    _shared("prefix of 341 tokens", "prefix_341", "figure_16", "five shots, prefix of 341 tokens", 3.58),
    _shared("chat", "chat", "figure_17", "Chat, history cut at 1,024 tokens"),
)
