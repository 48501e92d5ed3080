"""Swap or recompute: seconds to bring a preempted sequence back, by its length and the block size.

    python benchmarks/preemption.py --out benchmarks/results [--shape 8b --device cuda --dtype bfloat16]

Each row is saved as it is measured, and not measured again unless the code or the settings have changed.

A sequence of each length is put into the pool and preempted, once by dropping its blocks and once by moving them to CPU
memory; timed is everything until its next token's logits are there again (for swap, the way out as well). The prefix
cache is off: a recomputed sequence finds nothing. Medians. `preemption="auto"` makes the same comparison while it runs,
from running averages of its own prefills and copies (`hf_paged/engine/preemption.py`): its choice is shown beside.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import command
import torch
from common import Report, device_facts, versions
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged

SHAPES = {
    "125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
    | {"intermediate_size": 2048, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"intermediate_size": 14336, "vocab_size": 128256},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    | {"intermediate_size": 32, "vocab_size": 100},
}


def build(args: argparse.Namespace) -> Any:
    """A random Llama of the given shape."""
    config = LlamaConfig(**SHAPES[args.shape], max_position_embeddings=max(args.lengths) + 64)
    torch.manual_seed(0)
    with torch.device(args.device):
        return LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()


def bring_back(model: Any, length: int, swaps: bool) -> float:
    """Seconds from a preemption to the next token's logits."""
    engine = model.paged
    cache = hf_paged.PagedCache(model)
    ids = torch.randint(1, model.config.vocab_size, (1, length + 1), device=model.device)
    model(ids[:, :length], past_key_values=cache, logits_to_keep=1)
    [sequence] = cache.sequences
    synchronize(model.device)
    started = time.perf_counter()
    with engine.core.transaction():
        pairs = engine.core.scheduler.preemption.preempt(sequence.group, allow_swap=swaps)
        assert bool(pairs) == swaps
        engine.core.pool.execute_swap_outs(pairs)
    model(ids[:, length:], past_key_values=cache, logits_to_keep=1)
    synchronize(model.device)
    seconds = time.perf_counter() - started
    cache.reset()
    return seconds


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    model: Any, block_size: int, lengths: list[int], repeats: int, rows: list[dict[str, Any]], save: Callable[[], bool]
) -> bool:
    """Appends a row a length, of those that have none yet.

    Args:
        model: Not patched.
        block_size: Of its pool.
        lengths: Tokens of the sequences.
        repeats: Measurements that a median is of.
        rows: Of the lengths that are done.
        save: Called after each; whether there is time for another one.

    Returns:
        Whether all are done.
    """
    todo = [length for length in lengths if length not in {row["length"] for row in rows}]
    if not todo:
        return True
    with hf_paged.patched(
        model,
        block_size=block_size,
        num_blocks=2 * max(lengths) // block_size + 8,
        preemption="swap",
        enable_prefix_caching=False,
        max_num_batched_tokens=8192,
    ):
        pool = model.paged.core.pool
        bring_back(model, lengths[0], swaps=True)  # allocates the swap space
        for length in todo:
            seconds: dict[str, list[float]] = {"recompute": [], "swap": []}
            for _ in range(repeats):
                for name, times in seconds.items():
                    times.append(bring_back(model, length, swaps=name == "swap"))
            recompute, swap = (statistics.median(times) for times in seconds.values())
            auto = "swap" if pool.cost.prefers_swap(length, -(-length // block_size)) else "recompute"
            row = {"length": length, "recompute_ms": recompute * 1e3, "swap_ms": swap * 1e3, "auto": auto}
            if model.device.type == "cuda":
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            rows.append(row)
            times_text = f"recompute {row['recompute_ms']:8.2f} ms, swap {row['swap_ms']:8.2f} ms"
            print(f"block {block_size:3}  {length:6} tokens: {times_text}, auto: {auto}", flush=True)
            if not save() and length != todo[-1]:
                return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or `children.UNFINISHED` if the time was up."""
    started = time.monotonic()
    parser = command.parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shape", default="125m", choices=SHAPES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds; another run does the rest")
    parser.add_argument("--again", action="store_true", help="what is there already as well")
    args = parser.parse_args(argv)

    folder = Path(__file__).parent
    about_run = ("out", "time_limit", "again", "lengths", "block_sizes")
    settings = {name: value for name, value in vars(args).items() if name not in about_run}
    code = children.code_hash([folder.parent / "hf_paged", folder / "preemption.py"])
    empty = {
        "what": "milliseconds to bring a preempted sequence back, until its next logits; medians",
        "code": f"{code} {sorted(settings.items())}",
        "settings": settings,
        "device": device_facts(torch.device(args.device)),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "results": {},
    }
    path = args.out / f"preemption-{args.device}.json"
    report = Report(path, empty) if args.again else Report.resume(path, empty)

    def save() -> bool:
        report.save()
        return time.monotonic() - started < args.time_limit

    model = build(args)
    for block_size in args.block_sizes:
        rows = report.data["results"].setdefault(str(block_size), [])
        if not (save() and measure(model, block_size, args.lengths, args.repeats, rows, save)):
            return children.UNFINISHED
        faster = [row["length"] for row in rows if row["swap_ms"] < row["recompute_ms"]]
        print(f"block {block_size}: swapping is faster from {min(faster)} tokens on" if faster else "never faster")
    return 0


if __name__ == "__main__":
    sys.exit(main())
