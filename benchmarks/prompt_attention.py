"""Attention of prompts on CPU: in C over the pool, by torch over keys gathered from it, by torch over contiguous keys.

    python benchmarks/prompt_attention.py --out benchmarks/results
    python benchmarks/prompt_attention.py --new 256 --context 0 2048 --dtypes float32

A chunk of one sequence behind some context (0: a whole prompt). The third way is what a prompt would cost if its keys
lay side by side, which they don't. The ways take turns; the figure is the best round's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from command import parser, save, show
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from hf_paged.attention.backends.cpu import CPUBackend
from hf_paged.attention.backends.torch import TorchBackend
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams

BLOCK = 16
HEADS = {"12 of 64": (12, 12, 64), "8 of 128 over 2": (8, 2, 128)}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def ways_of(dtype: torch.dtype, heads: tuple[int, int, int], new: int, context: int) -> dict[str, Callable[[], Tensor]]:
    """Each way's `[new, heads, dim]`.

    Args:
        dtype: Of the pool and the queries.
        heads: Query heads, key heads, elements of a head.
        new: Tokens of the chunk.
        context: Tokens before it.
    """
    num_heads, num_kv_heads, dim = heads
    num_blocks = -(-(new + context) // BLOCK)
    table = np.random.default_rng(0).permutation(num_blocks)[None]
    lens = np.array([new]), np.array([new + context])
    pool = torch.randn(num_blocks + 1, 1, 2, num_kv_heads, BLOCK, dim).to(dtype)
    query, params = torch.randn(new, num_heads, dim).to(dtype), AttentionParams(0, dim**-0.5)
    metadata = AttentionMetadata(table, *lens, BLOCK, num_blocks, pool.device)
    pooled = pool[torch.from_numpy(table[0]), 0].permute(1, 2, 0, 3, 4)  # [2, kv_heads, blocks, size, dim]
    key, value = pooled.reshape(2, 1, num_kv_heads, -1, dim)[..., : new + context, :].contiguous()
    mask = None if context == 0 else torch.ones(new, new + context, dtype=torch.bool).tril(context)
    side_by_side = query.transpose(0, 1)[None]
    is_grouped = num_heads != num_kv_heads

    def contiguous() -> Tensor:
        found = scaled_dot_product_attention(
            side_by_side, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
        )
        return found[0].transpose(0, 1)

    in_c, gathered = CPUBackend(pool).step(metadata), TorchBackend(pool).step(metadata)
    return {
        "c": lambda: in_c.attend(query, params),
        "gathered": lambda: gathered.attend(query, params),
        "contiguous": contiguous,
    }


def measure(ways: dict[str, Callable[[], Tensor]], tolerance: float, reps: int) -> dict[str, float]:
    """Milliseconds of each way."""
    best = dict.fromkeys(ways, float("inf"))
    results: dict[str, Tensor] = {}
    for _ in range(reps):
        for name, way in ways.items():
            started = time.perf_counter()
            results[name] = way()
            best[name] = min(best[name], time.perf_counter() - started)
    truth = results["contiguous"].double()
    for name, result in results.items():
        if float((result.double() - truth).norm() / truth.norm()) > tolerance:
            raise ArithmeticError(f"{name} computes something else")
    return {name: round(seconds * 1e3, 3) for name, seconds in best.items()}


@torch.inference_mode()
def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--new", type=int, nargs="+", default=[64, 128, 256, 512], help="tokens of a chunk")
    arguments.add_argument("--context", type=int, nargs="+", default=[0, 512, 2048, 4096], help="tokens before it")
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch threads")
    arguments.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    arguments.add_argument("--reps", type=int, default=10, help="rounds")
    given = arguments.parse_args()
    cases = [
        (dtype, threads, name, new, context)
        for dtype in given.dtypes
        for threads in given.threads
        for name in HEADS
        for new in given.new
        for context in given.context
    ]
    results: list[dict[str, Any]] = []
    table = Table("dtype", "threads", "heads", "new", "context", "in C, ms", "gathered, ms", "contiguous, ms")
    for dtype, threads, name, new, context in tqdm(cases, unit="case"):
        torch.set_num_threads(threads)
        kind = getattr(torch, dtype)
        found = measure(ways_of(kind, HEADS[name], new, context), TOLERANCE[kind], given.reps)
        case = {"dtype": dtype, "threads": threads, "heads": name, "new": new, "context": context}
        results.append(case | {"ms": found})
        table.add_row(*map(str, case.values()), *(f"{ms:.2f}" for ms in found.values()))
    save(given.out / "prompt_attention.json", {"benchmark": "prompt_attention"}, results)
    show(table)


if __name__ == "__main__":
    main()
