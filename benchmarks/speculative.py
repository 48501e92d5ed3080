"""Prompt lookup on CPU: tokens a second with and without drafts, in batches of 1 and more, beside stock `generate()`.

    python benchmarks/speculative.py --prompts humaneval_prompts.jsonl --prompts mt_bench_question.jsonl

The embedded model, float32, one torch thread, greedy, nothing ends early. The ways alternate, batch by batch; figures
are of all batches together. Stock takes one prompt at a time where there are drafts. `random` is text without anything
to look up but chance. All tokens are compared with those of stock without drafts.

`cost` is what a step with drafts takes in times of one without, and `of ideal` how much of `(accepted + 1) / cost` the
speed-up is.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command import ASSETS, embedded_model, parser, quiet, save, show
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

import hf_paged
from hf_paged.tools.cli import read_prompts

ENDLESS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def batches(tokenizer: Any, texts: list[str], size: int, num_prompts: int, most: int) -> list[dict[str, Tensor]]:
    """The first prompts, so many tokens of each, in batches."""
    texts = (texts * -(-num_prompts // len(texts)))[:num_prompts]
    found = []
    for first in range(0, num_prompts, size):
        ids = tokenizer(texts[first : first + size], truncation=True, max_length=most)["input_ids"]
        padded = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
        found.append({"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]})
    return found


def one_by_one(model: Any, batch: dict[str, Tensor], **given: Any) -> list[list[int]]:
    """What stock makes of a batch's prompts, each without its padding."""
    found = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        own = ids[mask.bool()][None]
        found.append(model.generate(own, **given)[0, own.shape[1] :].tolist())
    return found


def together(model: Any, batch: dict[str, Tensor], **given: Any) -> list[list[int]]:
    """What a call makes of a batch."""
    width = batch["input_ids"].shape[1]
    found: list[list[int]] = model.generate(**batch, **given)[:, width:].tolist()
    return found


def measure(stock: Any, paged: Any, own: list[dict[str, Tensor]], given: dict[str, Any], num: int) -> dict[str, Any]:
    """One row of the table."""
    drafts = {"prompt_lookup_num_tokens": num}
    ways: dict[str, Callable[[dict[str, Tensor]], list[list[int]]]] = {
        "plain": lambda batch: together(paged, batch, **given),
        "lookup": lambda batch: together(paged, batch, **given, **drafts),
        "stock": lambda batch: together(stock, batch, **given),
        "stock_lookup": lambda batch: one_by_one(stock, batch, **given, **drafts),
    }
    seconds, steps = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    before, num_tokens, num_other = paged.paged.stats(), 0, 0
    for batch in own:
        results = {}
        for name, way in ways.items():
            paged.paged.reset_prefix_cache()  # every way computes its prompts
            num_steps, started = paged.paged.stats().num_steps, time.perf_counter()
            results[name] = way(batch)
            seconds[name] += time.perf_counter() - started
            steps[name] += paged.paged.stats().num_steps - num_steps
        num_tokens += sum(map(len, results["plain"]))
        num_other += sum(found != results["stock"] for found in results.values())
    after = paged.paged.stats()
    offered = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    rows = len(own[0]["input_ids"])
    per_step = num_tokens / (num_tokens - accepted)  # of a row that is in the step
    cost = (seconds["lookup"] / steps["lookup"]) / (seconds["plain"] / steps["plain"])
    speedup = seconds["plain"] / seconds["lookup"]
    return {
        "rows": rows,
        "tokens_per_second": {name: round(num_tokens / own_seconds, 1) for name, own_seconds in seconds.items()},
        "drafts_offered": offered,
        "acceptance": round(accepted / max(offered, 1), 3),
        "tokens_per_row_and_step": round(per_step, 3),
        "cost_of_a_step": round(cost, 3),
        "speedup": round(speedup, 3),
        "of_ideal": round(speedup * cost / per_step, 3),
        "batches_with_other_tokens": num_other,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--prompts", type=Path, action="append", default=[], help="data sets, as the CLI takes them")
    arguments.add_argument("--num-prompts", type=int, default=32)
    arguments.add_argument("--prompt-tokens", type=int, default=200, help="at most")
    arguments.add_argument("--new-tokens", type=int, default=96)
    arguments.add_argument("--num-drafts", type=int, default=5)
    arguments.add_argument("--rows", type=int, action="append", help="sizes of batches; default: 1 and 16")
    given = arguments.parse_args()
    quiet()
    tokenizer, stock = embedded_model()
    paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=4096)
    sets = {path.stem: read_prompts(path) for path in [ASSETS / "prompts.jsonl", *given.prompts]}
    columns = ("data set", "rows", "plain", "lookup", "stock", "stock lookup", "acceptance", "tokens/step", "cost")
    table = Table(*columns, "speed-up", "of ideal", "other tokens")
    settings = ENDLESS | {"max_new_tokens": given.new_tokens}
    results = []
    shapes = [(name, rows) for name in [*sets, "random"] for rows in given.rows or (1, 16)]
    for name, rows in tqdm(shapes, unit="row"):
        if name == "random":
            ids = torch.randint(5, 2000, (given.num_prompts, 64), generator=torch.Generator().manual_seed(1))
            own = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(rows)]
        else:
            own = batches(tokenizer, sets[name], rows, given.num_prompts, given.prompt_tokens)
        measure(stock, paged, own[:1], settings | {"max_new_tokens": 8}, given.num_drafts)
        paged.paged.reset_prefix_cache()
        found = {"data_set": name, **measure(stock, paged, own, settings, given.num_drafts)}
        results.append(found)
        speeds = [f"{found['tokens_per_second'][way]:.0f}" for way in ("plain", "lookup", "stock", "stock_lookup")]
        keys = ("acceptance", "tokens_per_row_and_step", "cost_of_a_step", "speedup", "of_ideal")
        others = [f"{found[key]:.2f}" for key in keys]
        table.add_row(name, str(rows), *speeds, *others, str(found["batches_with_other_tokens"]))
    about = {"benchmark": "speculative", "num_drafts": given.num_drafts, "new_tokens": given.new_tokens}
    about |= {"num_prompts": given.num_prompts, "prompt_tokens": given.prompt_tokens}
    save(given.out / "speculative.json", about, results)
    show(table)


if __name__ == "__main__":
    main()
