"""What depends on the block size: figure 18 (latency at one rate) and figure 19 (swapping against computing again).

Kernels are taken to be as fast at any size: what is seen here are the ends of last blocks, and what a transfer to CPU
memory costs beside its bytes. The paper's layout moves a block's keys and its values apart in each layer, which makes
many small copies of a small block; here a block is one piece across all layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paper import policies
from paper.costs import A100, OPT_13B, PAPER, Roofline
from paper.requests import requests
from paper.simulator import Settings, rounded, run

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOADS = {"sharegpt": (3.2, 200.0), "alpaca": (70.0, 20.0)}  # requests a second and for how many
LENGTH = 256  # tokens of the sequence that is brought back
LAYOUTS = {"swap, a block in one piece": 1, "swap, layer by layer": 2 * OPT_13B.layers}


def figure_18(times: float, trace: Path | None, seed: int) -> dict[str, Any]:
    """By lengths and block size: normalized latency, and what of the pool is held and empty."""
    found: dict[str, Any] = {}
    for name, (rate, seconds) in LOADS.items():
        drawn = requests(name, rate, seconds * times, seed=seed, trace=trace)
        for size in SIZES:
            settings = Settings(block_size=size, preemption="recompute")
            figures = run(drawn, policies.PAGED, PAPER, settings).figures
            kept = ("normalized_latency", "batch", "memory", "preempted")
            found.setdefault(name, {})[str(size)] = {key: figures[key] for key in kept}
    return found


def figure_19(times: float, trace: Path | None, seed: int) -> dict[str, Any]:
    """Milliseconds to bring a sequence back, by arithmetic, and normalized latency at a rate that preempts."""
    costs = Roofline(OPT_13B, A100)
    alone: dict[str, dict[str, float]] = {}
    whole: dict[str, dict[str, float]] = {}
    drawn = requests("sharegpt", 3.4, 150 * times, seed=seed, trace=trace)
    for size in SIZES:
        blocks = -(-LENGTH // size)
        alone.setdefault("recompute", {})[str(size)] = rounded(1e3 * costs.recompute(LENGTH))
        for name, transfers in LAYOUTS.items():
            seconds = 2 * costs.swap(blocks * size, blocks * transfers)
            alone.setdefault(name, {})[str(size)] = rounded(1e3 * seconds)
    for size in SIZES[3:]:
        kinds = {name: Settings(size, preemption="swap", transfers=n) for name, n in LAYOUTS.items()}
        for name, settings in ({"recompute": Settings(size, preemption="recompute")} | kinds).items():
            figures = run(drawn, policies.PAGED, PAPER, settings).figures
            whole.setdefault(name, {})[str(size)] = figures["normalized_latency"]
    return {"milliseconds": alone, "normalized_latency": whole}
