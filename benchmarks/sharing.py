"""KV memory saved by sharing blocks between the beams, or the samples, of one prompt, on the embedded model.

    python benchmarks/sharing.py --out benchmarks/results                    # built-in prompts and lengths
    python benchmarks/sharing.py --prompts mt_bench_question.jsonl --lengths sharegpt --limit 64

Measured as in the PagedAttention paper: blocks saved by sharing / blocks that would be needed without. The block tables
are read after every step of real `generate()` calls: `num_beams=4`, so the trees are those of a trained model's beam
search, and `num_return_sequences=4`. Without sharing each beam or sample would hold all blocks of its own table.
Figures are averages over time: sums over all steps of all prompts. The prompt part is the blocks that hold at least one
token of the prompt (the last of them may hold generated tokens too, and is then each row's own), the generated part is
all others.

How much is saved depends on the lengths above all. They are drawn, and every call generates exactly its output length
(`min_new_tokens`), as in the paper:

    sharegpt   shape of ShareGPT in length_quantiles.json, scaled to the paper's means: 161 tokens in, 338 out
    alpaca     the paper's means of Alpaca, 19 in and 58 out, geometric: their quantiles are not public with the paper
    own        the prompts as they are, outputs as for sharegpt

For the first two, prompts of the file are put behind each other and cut where the length drawn is reached.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import command
import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessor
from workload import draw_lengths

import hf_paged
from hf_paged.tools.cli import read_prompts

WAYS = 4
MODES: dict[str, dict[str, Any]] = {
    "beam 4": {"do_sample": False, "num_beams": WAYS},
    "n=4 sampling": {"do_sample": True, "num_return_sequences": WAYS},
}
BARS = {"beam 4": 0.44, "n=4 sampling": 0.16}  # what the paper's smallest figures for ShareGPT lengths are


@dataclass
class Blocks:
    """Blocks held, summed over steps.

    Attributes:
        shared: Distinct blocks.
        apart: Blocks if every row had its own.
    """

    shared: int = 0
    apart: int = 0

    def add(self, other: Blocks) -> None:
        self.shared += other.shared
        self.apart += other.apart

    @property
    def saving(self) -> float:
        """Share of the blocks that sharing saves; 0 where there is none."""
        return 1 - self.shared / self.apart if self.apart else 0.0


@dataclass
class Usage:
    """What the calls of one setting held."""

    prompt: Blocks = field(default_factory=Blocks)
    generated: Blocks = field(default_factory=Blocks)
    num_steps: int = 0

    @property
    def both(self) -> Blocks:
        return Blocks(self.prompt.shared + self.generated.shared, self.prompt.apart + self.generated.apart)

    def add(self, other: Usage) -> None:
        self.prompt.add(other.prompt)
        self.generated.add(other.generated)
        self.num_steps += other.num_steps


def count_blocks(tables: list[list[int]], num_prompt_blocks: int, num_rows: int) -> tuple[Blocks, Blocks]:
    """Blocks of the prompt part and of the generated part.

    Args:
        tables: Block table of each sequence.
        num_prompt_blocks: Leading blocks of a table that hold tokens of the prompt.
        num_rows: Beams or samples; while they are all equal, one sequence stands for them.
    """
    rows = tables if len(tables) == num_rows else tables * (num_rows // len(tables))
    parts = ([row[:num_prompt_blocks] for row in rows], [row[num_prompt_blocks:] for row in rows])
    prompt, generated = (
        Blocks(len({block for row in part for block in row}), sum(len(row) for row in part)) for part in parts
    )
    return prompt, generated


class Watch(LogitsProcessor):
    """Changes nothing, and reads the block tables after every step: processors run between two forwards of a call."""

    def __init__(self, engine: Any, num_prompt_tokens: int) -> None:
        self.engine = engine
        self.num_prompt_blocks = math.ceil(num_prompt_tokens / engine.config.block_size)
        self.usage = Usage()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        groups = self.engine.snapshot()["groups"]
        tables = [sequence["block_table"] for group in groups for sequence in group["sequences"]]
        prompt, generated = count_blocks(tables, self.num_prompt_blocks, WAYS)
        self.usage.add(Usage(prompt, generated, 1))
        return scores


def expected_saving(name: str, room: int, block_size: int, seed: int, num_draws: int = 3000) -> float:
    """What samples save over many drawn lengths: all whole blocks of the prompt, and the last one until they differ."""
    shared = unshared = 0
    for length, output in itertools.islice(draw_lengths(name, seed), num_draws):
        prompt = min(length, room // 2)
        whole = prompt // block_size
        for new in range(min(output, room - prompt)):
            blocks = -(-(prompt + new) // block_size)
            unshared += WAYS * blocks
            shared += blocks if new == 0 else whole + WAYS * (blocks - whole)
    return 1 - shared / unshared


def make_prompts(
    tokenizer: Any, texts: list[str], name: str, limit: int, room: int, seed: int
) -> list[tuple[Tensor, int]]:
    """Prompts `[1, length]`, each with how many tokens to generate."""
    rng = random.Random(seed)
    lengths = draw_lengths(name, seed)
    made: list[tuple[Tensor, int]] = []
    texts = rng.sample(texts, len(texts))
    for index in range(limit if name != "own" else min(limit, len(texts))):
        length, output = next(lengths)
        text = texts[index % len(texts)]
        ids: list[int] = tokenizer(text)["input_ids"]
        if name != "own":
            while len(ids) < length:
                ids += tokenizer("\n\n" + rng.choice(texts), add_special_tokens=False)["input_ids"]
            ids = ids[:length]
        ids = ids[: room // 2]
        made.append((torch.tensor([ids]), min(output, room - len(ids))))
    return made


def measure(
    model: Any, prompts: list[tuple[Tensor, int]], mode: str, block_size: int, num_verified: int = 0, bar: Any = None
) -> dict[str, Any]:
    """Runs all prompts through `generate()` and sums up what they held. The model is patched for that long.

    Args:
        model: An unpatched model.
        prompts: `[1, length]` and the length of the output.
        mode: Of `MODES`.
        block_size: Tokens a block.
        num_verified: Of so many prompts the tokens are compared with stock `generate()`.
        bar: Moves by one a prompt.
    """
    settings = MODES[mode]
    longest = max(ids.shape[1] + output for ids, output in prompts)
    num_blocks = WAYS * math.ceil(longest / block_size) + WAYS
    total, savings, identical, num_copies = Usage(), [], True, 0
    for index, (ids, output) in enumerate(prompts):
        given = {**settings, "max_new_tokens": output, "min_new_tokens": output, "attention_mask": torch.ones_like(ids)}
        with hf_paged.patched(model, block_size=block_size, num_blocks=num_blocks):
            watch = Watch(model.paged, ids.shape[1])
            torch.manual_seed(index)
            found = model.generate(ids, logits_processor=[watch], **given)
            num_copies += model.paged.stats().num_cow_copies
        if index < num_verified:
            torch.manual_seed(index)
            identical &= torch.equal(found, model.generate(ids, **given))
        total.add(watch.usage)
        savings.append(watch.usage.both.saving)
        if bar is not None:
            bar.update()
    ordered = sorted(savings)
    return {
        "saving": round(total.both.saving, 4),
        "saving_prompt_part": round(total.prompt.saving, 4),
        "saving_generated_part": round(total.generated.saving, 4),
        "prompt_part_of_blocks": round(total.prompt.apart / total.both.apart, 4),
        "saving_median_prompt": round(statistics.median(ordered), 4),
        "saving_lowest_prompt": round(ordered[0], 4),
        "prompts": len(prompts),
        "steps": total.num_steps,
        "mean_prompt_tokens": round(statistics.fmean(ids.shape[1] for ids, _ in prompts), 1),
        "mean_output_tokens": round(statistics.fmean(output for _, output in prompts), 1),
        "block_copies_per_step": round(num_copies / total.num_steps, 3),
        "verified": {"prompts": min(num_verified, len(prompts)), "tokens_identical": identical},
    }


def print_table(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    table = Table(
        "lengths", "in / out", "", "block", "saved", "prompt part", "generated part", "bar", title="KV sharing"
    )
    for lengths, rows in results.items():
        for row in rows.values():
            is_judged = lengths == "sharegpt" and row["block_size"] == 16
            bar = BARS[row["mode"]]
            table.add_row(
                lengths,
                f"{row['mean_prompt_tokens']:.0f} / {row['mean_output_tokens']:.0f}",
                row["mode"],
                str(row["block_size"]),
                f"{row['saving']:.1%}",
                f"{row['saving_prompt_part']:.1%}",
                f"{row['saving_generated_part']:.1%}",
                f"{bar:.0%} {'met' if row['saving'] >= bar else 'MISSED'}" if is_judged else "",
            )
    command.show(table)


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--prompts", type=Path, default=command.ASSETS / "prompts.jsonl", help="txt or jsonl")
    parser.add_argument("--lengths", default="sharegpt,alpaca,own", help="any of sharegpt, alpaca, own")
    parser.add_argument("--block-sizes", default="16,8,4", help="tokens a block; lengths but the first: only the first")
    parser.add_argument("--limit", type=int, default=32, help="prompts of each setting")
    parser.add_argument("--verify", type=int, default=2, help="prompts of each setting compared with stock generate()")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expected", action="store_true", help="only what samples save on average over many lengths")
    args = parser.parse_args()

    command.quiet()
    tokenizer, model = command.embedded_model()
    texts = read_prompts(args.prompts)
    room = model.config.max_position_embeddings
    if args.expected:
        for name in ("sharegpt", "alpaca"):
            print(f"{name}: {WAYS} samples save {expected_saving(name, room, 16, args.seed):.1%} at block size 16")
        return
    sizes = [int(size) for size in args.block_sizes.split(",")]
    names = args.lengths.split(",")
    made = {name: make_prompts(tokenizer, texts, name, args.limit, room, args.seed) for name in names}
    jobs = [(n, m, s) for n in names for s in (sizes if n == names[0] else sizes[:1]) for m in MODES]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tqdm(total=sum(len(made[name]) for name, _, _ in jobs), unit="prompt") as bar:
        for name, mode, size in jobs:
            bar.set_description(f"{name}, {mode}, block {size}")
            row = measure(model, made[name], mode, size, args.verify, bar)
            results.setdefault(name, {})[f"{mode}, block {size}"] = {"mode": mode, "block_size": size} | row
    print_table(results)
    rows = [row for group in results.values() for row in group.values()]
    if not all(row["verified"]["tokens_identical"] for row in rows):
        print("tokens DIFFER from stock generate()")
    about = {
        "what": "share of KV blocks saved by sharing within a call, over all steps: 1 - distinct blocks / blocks of "
        "all rows; prompt part: blocks with a token of the prompt",
        "prompts": args.prompts.name,
        "bars": {"lengths": "sharegpt", "block_size": 16, **BARS},
        "seed": args.seed,
    }
    command.save(args.out / "sharing.json", about, results)


if __name__ == "__main__":
    main()
