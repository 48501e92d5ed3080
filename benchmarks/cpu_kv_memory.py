"""KV memory of stock `generate()` and of hf_paged on ragged prompts: bytes at each batch's peak, and the share wasted.

    python benchmarks/cpu_kv_memory.py --out benchmarks/results [--prompts FILE ...]

Waste is allocated slots that hold no real token. Every batch of prompts gets a fresh pool, so the figures are sums over
the batches' own peaks. Beside the whole prompt sets, sequences that end near 100 tokens and beyond 500 are
measured apart, since waste is about half a block a sequence whatever its length.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import command
import torch
from tqdm import tqdm

import hf_paged
from hf_paged.tools.cli import read_prompts
from hf_paged.tools.report import KVUsage, format_bytes, generated_lengths, paged_kv_usage, stock_kv_usage


def measure(model: Any, tokenizer: Any, prompts: list[str], new_tokens: int, batch_size: int, block_size: int) -> dict:
    """Sums of the batches' peak KV usage, stock and paged, and whether all tokens agreed."""
    sums = {"stock": KVUsage(), "paged": KVUsage()}
    identical = True
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    for first in tqdm(range(0, len(prompts), batch_size), leave=False):
        inputs = tokenizer(prompts[first : first + batch_size], return_tensors="pt", padding=True)
        inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        stock = model.generate(**inputs, **settings, return_dict_in_generate=True)
        new = stock.sequences[:, inputs["input_ids"].shape[1] :]
        lengths = generated_lengths(new, [model.generation_config.eos_token_id])
        usage = {"stock": stock_kv_usage(stock.past_key_values, inputs["attention_mask"], lengths)}
        with hf_paged.patched(model, block_size=block_size):
            paged = model.generate(**inputs, **settings)
            usage["paged"] = paged_kv_usage(model.paged)
        identical &= torch.equal(paged, stock.sequences)
        for name, one in usage.items():
            total = sums[name]
            sums[name] = KVUsage(total.allocated_bytes + one.allocated_bytes, total.filled_bytes + one.filled_bytes)
    return {
        "prompts": len(prompts),
        "tokens_identical": identical,
        **{f"{name}_bytes": usage.allocated_bytes for name, usage in sums.items()},
        **{f"{name}_waste": round(usage.waste, 4) for name, usage in sums.items()},
    }


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--prompts", type=Path, action="append", default=[], help="more prompt files (txt or jsonl)")
    parser.add_argument("--limit", type=int, default=128, help="prompts of each file at most, drawn at random")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()

    command.quiet()
    tokenizer, model = command.embedded_model(padding_side="left")

    sets: dict[str, list[str]] = {}
    for path in [command.ASSETS / "prompts.jsonl", *args.prompts]:
        prompts = read_prompts(path)
        random.Random(0).shuffle(prompts)
        sets[path.name] = prompts[: args.limit]
        lengths = {prompt: len(tokenizer(prompt)["input_ids"]) + args.new_tokens for prompt in prompts}
        sets[f"{path.name}, ending at 80 to 120 tokens"] = [p for p in prompts if 80 <= lengths[p] <= 120][: args.limit]
        sets[f"{path.name}, ending at 500 tokens or more"] = [p for p in prompts if lengths[p] >= 500][: args.limit]

    results: dict[str, Any] = {}
    for name, prompts in sets.items():
        if prompts:
            results[name] = measure(model, tokenizer, prompts, args.new_tokens, args.batch_size, args.block_size)
            row = results[name]
            print(
                f"{name}: {row['prompts']} prompts,"
                f" stock {format_bytes(row['stock_bytes'])} ({row['stock_waste']:.1%} waste),"
                f" paged {format_bytes(row['paged_bytes'])} ({row['paged_waste']:.1%} waste),"
                f" tokens {'identical' if row['tokens_identical'] else 'DIFFER'}"
            )
    about = {
        "what": "KV memory at each batch's peak, summed over batches; waste = allocated slots without a real token",
        "settings": {name: getattr(args, name) for name in ("new_tokens", "batch_size", "block_size", "limit")},
    }
    command.save(args.out / "cpu_kv_memory.json", about, results)


if __name__ == "__main__":
    main()
