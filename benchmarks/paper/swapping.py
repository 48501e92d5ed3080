"""What it takes to bring a preempted sequence back on the machine that is here: figure 19, by ../preemption.py."""

from __future__ import annotations

from typing import Any

import preemption
from simulation import Work

import hf_paged
from paper.costs import Costs

LENGTH = 256  # tokens of the sequence, as in the paper
REPEATS = 15


def bring_back(model: Any, sizes: tuple[int, ...], repeats: int = REPEATS) -> dict[str, Any]:
    """By block size: bytes that move out and in again, and milliseconds until the next token's logits, either way."""
    found: dict[str, Any] = {}
    for size in sizes:
        rows: list[dict[str, Any]] = []
        preemption.measure(model, size, [LENGTH], repeats, rows, lambda: True)
        with hf_paged.patched(model, block_size=size, num_blocks=8):
            num_bytes = -(-LENGTH // size) * model.paged.bytes_per_block
        found[str(size)] = {"bytes": num_bytes, "swap_ms": rows[0]["swap_ms"], "recompute_ms": rows[0]["recompute_ms"]}
    return found


def seconds_per_token(row: dict[str, Any], costs: Costs) -> float:
    """Of a copy one way: what of a row is not the step of the next token."""
    step = costs.seconds(Work(decodes=1, kv=LENGTH + 1))
    return max(row["swap_ms"] / 1e3 - step, 0.0) / (2 * LENGTH)
