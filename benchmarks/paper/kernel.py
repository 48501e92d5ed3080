"""Figure 18a: decoding attention over blocks of 1 to 256 tokens, and over contiguous keys: `python -m paper.kernel`.

The C kernel with one torch thread, tables in random order, beside the same kernel over one block a sequence, which is
contiguous, and torch's `scaled_dot_product_attention` over a tensor `[S, heads, tokens, dim]`. The cases of a row
alternate; a figure is the smallest of the rounds' medians. A minute, on a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command
import torch
from common import device_facts
from torch import Tensor

from hf_paged.kernels import cpu
from paper import page, plots

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHAPES = ((8, 256), (8, 1024), (32, 1024))  # sequences and tokens of each
HEADS, KV_HEADS, HEAD_DIM = 12, 4, 64


def paged(
    keys: Tensor, values: Tensor, block_size: int, query: Tensor, seed: int = 0
) -> tuple[Callable[[], None], Tensor]:
    """A call of the kernel over the same keys in blocks, and what it writes to.

    Args:
        keys: `[S, kv_heads, tokens, dim]`; the tokens a multiple of
        block_size: tokens.
        values: Like them.
        query: `[S, heads, dim]`.
        seed: Of the blocks' order in the pool.
    """
    num_seqs, kv_heads, tokens, head_dim = keys.shape
    count = tokens // block_size
    order = torch.randperm(num_seqs * count, generator=torch.Generator().manual_seed(seed))
    pool = torch.empty(num_seqs * count, 1, 2, kv_heads, block_size, head_dim)
    for part, states in enumerate((keys, values)):
        blocks = states.unflatten(2, (count, block_size)).transpose(1, 2).flatten(0, 1)
        pool[order, 0, part] = blocks
    tables = order.view(num_seqs, count).to(torch.int32)
    lengths, output = torch.full((num_seqs,), tokens, dtype=torch.int32), torch.empty_like(query)
    kernels = cpu.load(torch.float32, head_dim)
    if isinstance(kernels, str):
        raise RuntimeError(kernels)

    def call() -> None:
        kernels.paged_decode(query, output, pool, 0, tables, lengths, num_seqs, tokens, head_dim**-0.5)

    return call, output


def cases(num_seqs: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """All ways to compute one layer's attention; they agree."""
    made = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(num_seqs, KV_HEADS, tokens, HEAD_DIM, generator=made) for _ in range(2))
    query = torch.randn(num_seqs, HEADS, HEAD_DIM, generator=made)

    def sdpa() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)

    calls: dict[str, Callable[[], Any]] = {"sdpa": sdpa, "contiguous": paged(keys, values, tokens, query)[0]}
    expected = sdpa()[:, :, 0]
    for size in SIZES:
        calls[str(size)], output = paged(keys, values, size, query)
        calls[str(size)]()
        torch.testing.assert_close(output, expected)
    return calls


def measure(calls: dict[str, Callable[[], Any]], num_rounds: int, num_calls: int) -> dict[str, float]:
    """Microseconds of each call."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            call()
            took = []
            for _ in range(num_calls):
                began = time.perf_counter()
                call()
                took.append(1e6 * (time.perf_counter() - began))
            medians[name].append(statistics.median(took))
    return {name: float(f"{min(found):.4g}") for name, found in medians.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=60, help="of each case in a round")
    parser.add_argument("--out", type=Path, default=page.FOLDER)
    args = parser.parse_args(argv)
    command.quiet()
    results: dict[str, Any] = {}
    for num_seqs, tokens in SHAPES:
        found = measure(cases(num_seqs, tokens), args.rounds, args.calls)
        contiguous = found["contiguous"]
        name = f"{num_seqs} sequences of {tokens} tokens"
        results[name] = {
            "microseconds": found,
            "times_contiguous": {str(size): round(found[str(size)] / contiguous, 3) for size in SIZES},
        }
        print(name, results[name], flush=True)
    about = {"what": "decoding attention, float32, one thread, C kernel", "heads": [HEADS, KV_HEADS, HEAD_DIM]}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "figure_18a.json"
    command.save(path, about | {"machine": device_facts(torch.device("cpu"))}, results)
    plots.figure_18a(results, path.with_suffix(".png"))
    page.publish("figure 18a", page.kernel_section(results), args.out)


if __name__ == "__main__":
    main()
