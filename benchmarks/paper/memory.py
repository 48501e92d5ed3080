"""What the pool holds: figure 2 (where its memory goes) and figure 15 (blocks saved by sharing)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paper import policies
from paper.costs import PAPER
from paper.requests import requests
from paper.simulator import Settings, run

WIDTHS = (2, 4, 6)
# Requests a second at which blocks are counted: below saturation, so that beams live as long as their output.
RATES = {"sharegpt": 0.3, "alpaca": 6.0}


def figure_2(times: float, trace: Path | None, seed: int) -> dict[str, Any]:
    """Shares of the pool while requests wait: tokens, reserved for tokens to come, never used, and between runs."""
    drawn = requests("sharegpt", 6.0, 120 * times, seed=seed, trace=trace)
    systems = (policies.MAX, policies.POW2, policies.ORACLE, policies.FIRST_FIT, policies.PAGED)
    return {system.name: run(drawn, system, PAPER).figures["memory"] for system in systems}


def figure_15(times: float, trace: Path | None, seed: int) -> dict[str, Any]:
    """Shares of the blocks that sharing saves, by lengths, kind and width."""
    saved: dict[str, Any] = {}
    for name, rate in RATES.items():
        drawn = requests(name, rate, 90 * times * (4 if name == "sharegpt" else 1), seed=seed, trace=trace)
        for is_beams in (False, True):
            kind = f"{name}, {'beams' if is_beams else 'samples'}"
            saved[kind] = {
                str(width): run(drawn, policies.PAGED, PAPER, Settings(width=width, is_beams=is_beams)).figures["saved"]
                for width in WIDTHS
            }
    return saved
