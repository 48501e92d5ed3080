"""Attention on CPU of rows that begin with the same blocks: these read once a step, or row by row.

    python benchmarks/shared_prefix_attention.py --out benchmarks/results
    python benchmarks/shared_prefix_attention.py --samples 8 64 --prompt 512 --own 32 --threads 2

Samples of one prompt with some tokens of their own each, through the layers of a step: each layer has keys of its own,
so that those of all don't stay in the processor's caches. The two ways take turns; the figure is the best round's.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from command import parser, save, show
from rich.table import Table
from tqdm import tqdm

from hf_paged.attention.backends.cpu import CPUBackend
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams

BLOCK = 16
HEADS = {"12 of 64": (12, 12, 64), "16 of 64 over 2": (16, 2, 64), "8 of 128 over 2": (8, 2, 128)}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Alone(AttentionMetadata):
    """The same step, as if nothing was shared."""

    shared_prefixes = None


def measure(
    dtype: torch.dtype, heads: tuple[int, int, int], samples: int, prompt: int, own: int, layers: int, reps: int
) -> tuple[float, float]:
    """Milliseconds of all layers' attention, shared and row by row.

    Args:
        dtype: Of the pool and the queries.
        heads: Query heads, key heads, elements of a head.
        samples: Rows.
        prompt: Tokens that they share.
        own: Tokens of each besides.
        layers: Of the step.
        reps: Rounds.
    """
    num_heads, num_kv_heads, dim = heads
    common, rest = prompt // BLOCK, -(-own // BLOCK)
    order = np.random.default_rng(0).permutation(common + samples * rest)
    tables = np.concatenate([np.tile(order[:common], (samples, 1)), order[common:].reshape(samples, rest)], axis=1)
    null_block = len(order)
    pool = torch.randn(null_block + 1, layers, 2, num_kv_heads, BLOCK, dim).to(dtype)
    query = torch.randn(samples, num_heads, dim).to(dtype)
    lens = np.full(samples, common * BLOCK + own)
    backend, calls = CPUBackend(pool), [AttentionParams(layer, dim**-0.5) for layer in range(layers)]
    best, results = [float("inf")] * 2, [query, query]
    for _ in range(reps):
        for way, kind in enumerate((AttentionMetadata, Alone)):
            started = time.perf_counter()
            step = backend.step(kind(tables, np.ones_like(lens), lens, BLOCK, null_block, pool.device))
            for params in calls:
                results[way] = step.attend(query, params)
            best[way] = min(best[way], time.perf_counter() - started)
    shared, alone = (result.double() for result in results)
    error = float((shared - alone).norm() / alone.norm())
    if error > TOLERANCE[dtype]:
        raise ArithmeticError(f"the two ways differ by {error:.1e}")
    return best[0] * 1e3, best[1] * 1e3


@torch.inference_mode()
def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, nargs="+", default=[4, 8, 16, 64])
    arguments.add_argument("--prompt", type=int, default=512, help="tokens that all share, a multiple of 16")
    arguments.add_argument("--own", type=int, nargs="+", default=[1, 32, 128], help="tokens of each besides")
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch threads")
    arguments.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--reps", type=int, default=20, help="rounds")
    given = arguments.parse_args()
    if given.prompt % BLOCK:
        arguments.error(f"--prompt: {given.prompt} is no multiple of {BLOCK}")
    results: list[dict[str, Any]] = []
    cases = [
        (dtype, threads, name, samples, own)
        for dtype in given.dtypes
        for threads in given.threads
        for name in HEADS
        for samples in given.samples
        for own in given.own
    ]
    table = Table("dtype", "threads", "heads", "samples", "own tokens", "shared, ms", "alone, ms", "ratio")
    for dtype, threads, name, samples, own in tqdm(cases, unit="case"):
        torch.set_num_threads(threads)
        size = (samples, given.prompt, own, given.layers, given.reps)
        shared, alone = measure(getattr(torch, dtype), HEADS[name], *size)
        case = {"dtype": dtype, "threads": threads, "heads": name, "samples": samples, "own_tokens": own}
        results.append(case | {"shared_ms": round(shared, 3), "alone_ms": round(alone, 3)})
        table.add_row(*map(str, case.values()), f"{shared:.2f}", f"{alone:.2f}", f"{shared / alone:.2f}")
    about = {"benchmark": "shared_prefix_attention", "prompt_tokens": given.prompt, "layers": given.layers}
    save(given.out / "shared_prefix_attention.json", about, results)
    show(table)


if __name__ == "__main__":
    main()
