"""Users on threads, each calling `model.generate(..., streamer=TextIteratorStreamer(...))`: with hf_paged and without.

    python benchmarks/threads.py --out benchmarks/results
    python benchmarks/threads.py --mode beam --threads 1,4,16 --reps 5

The pattern is Hugging Face's own, untouched: a thread a user, and a reader of its streamer. Three ways to serve it:

- `hf_paged`: the patched model, where the calls share one continuous batch;
- `stock, one by one`: the same calls one after another, which is what a lock around stock `generate()` comes to;
- `stock, threads`: stock `generate()` on as many threads.

Modes: `plain` (greedy), `beam` (4 beams; no streamer, which transformers refuses there).
Prompts are ragged and all different, and each run begins with an empty prefix cache. The ways of a row alternate,
repetition by repetition; figures are medians. Tokens per second count what was generated, and `first token` is how long
the median user waits for it from the common start. Every result is compared with stock, token by token (without
`stock, one by one` among `--ways`: with the first repetition).
"""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import command
import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import TextIteratorStreamer

import hf_paged
from hf_paged.tools.cli import read_prompts

MODES = ("plain", "beam")
WAYS = ("hf_paged", "stock, one by one", "stock, threads")


class TimedStreamer(TextIteratorStreamer):
    """Notes when its first token comes: the second thing it is given, after the prompt."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True)
        self.num_puts = 0
        self.first_token_at: float | None = None

    def put(self, value: Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.first_token_at = time.perf_counter()
        super().put(value)


@dataclass
class Run:
    """All users served once.

    Attributes:
        seconds: From the common start until the last one is served.
        outputs: Generated tokens of each user, `[1, length]` with the prompt.
        texts: What each user read from its streamer.
        first_tokens: Seconds from the common start to each user's first token, where there is a streamer.
        num_steps: Steps of the patched model.
    """

    seconds: float = 0.0
    outputs: dict[int, Tensor] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    first_tokens: list[float] = field(default_factory=list)
    num_steps: int = 0


def make_prompts(tokenizer: Any, count: int, shortest: int = 8, longest: int = 48) -> list[Tensor]:
    """So many different prompts `[1, length]`: pieces of the embedded prompts' text."""
    text = "\n\n".join(sorted(read_prompts(command.ASSETS / "prompts.jsonl"), key=len, reverse=True))
    ids = tokenizer(text)["input_ids"]
    prompts, start = [], 0
    for index in range(count):
        length = shortest + (index * 17) % (longest - shortest + 1)
        start = start if start + length <= len(ids) else index  # round again, at another offset
        prompts.append(torch.tensor([ids[start : start + length]]))
        start += length
    return prompts


def arguments(mode: str, new_tokens: int) -> dict[str, Any]:
    """Arguments of `generate()`. All users generate equally many tokens: the end-of-sequence token is forbidden."""
    more = {"num_beams": 4} if mode == "beam" else {}
    return {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False} | more


def serve(model: Any, tokenizer: Any, prompts: list[Tensor], mode: str, new_tokens: int, in_threads: bool) -> Run:
    """Serves all users, on threads or one by one."""
    run = Run()
    streamers = [None if mode == "beam" else TimedStreamer(tokenizer) for _ in prompts]
    engine = getattr(model, "paged", None)
    if engine is not None:
        engine.reset_prefix_cache()
        run.num_steps = -engine.stats().num_steps

    def user(index: int) -> None:
        ids = prompts[index]
        given = arguments(mode, new_tokens) | {"attention_mask": torch.ones_like(ids), "streamer": streamers[index]}
        run.outputs[index] = model.generate(ids, **given)

    started = time.perf_counter()
    if in_threads:
        threads = [threading.Thread(target=user, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
    for index, streamer in enumerate(streamers):
        if not in_threads:
            user(index)
        if streamer is not None and index not in run.texts:
            run.texts[index] = "".join(streamer)
    if in_threads:
        for thread in threads:
            thread.join()
    run.seconds = time.perf_counter() - started
    run.first_tokens = [s.first_token_at - started for s in streamers if s is not None and s.first_token_at is not None]
    if engine is not None:
        run.num_steps += engine.stats().num_steps
    return run


def measure(
    models: dict[str, Any], tokenizer: Any, mode: str, num_threads: int, new_tokens: int, reps: int
) -> dict[str, Any]:
    """One row: the ways of `models`, `reps` times each, alternating; medians."""
    ways = list(models)
    prompts = make_prompts(tokenizer, num_threads)
    runs: dict[str, list[Run]] = defaultdict(list)
    for rep in range(reps):
        # The order moves on, so that no way always follows the same other.
        for way in ways[rep % len(ways) :] + ways[: rep % len(ways)]:
            runs[way].append(serve(models[way], tokenizer, prompts, mode, new_tokens, way != "stock, one by one"))
    expected = runs.get("stock, one by one", runs[ways[0]])[0]
    row: dict[str, Any] = {"mode": mode, "threads": num_threads, "prompt_tokens": sum(p.shape[1] for p in prompts)}
    for way in ways:
        seconds = statistics.median(run.seconds for run in runs[way])
        same = [
            torch.equal(run.outputs[index], expected.outputs[index])
            and run.texts.get(index) == expected.texts.get(index)
            for run in runs[way]
            for index in range(num_threads)
        ]
        first = [statistics.median(run.first_tokens) for run in runs[way] if run.first_tokens]
        row[way] = {
            "seconds": round(seconds, 4),
            "all_seconds": [round(run.seconds, 4) for run in runs[way]],
            "tokens_per_second": round(num_threads * new_tokens / seconds, 4),
            "first_token_seconds": round(statistics.median(first), 4) if first else None,
            "tokens_identical": all(same),
        }
    if "hf_paged" in row:
        row["hf_paged"]["model_steps"] = statistics.median(run.num_steps for run in runs["hf_paged"])
        for way, name in (("stock, one by one", "speedup_over_one_by_one"), ("stock, threads", "speedup_over_threads")):
            if way in row:
                row[name] = round(row[way]["seconds"] / row["hf_paged"]["seconds"], 2)
    return row


def print_table(rows: list[dict[str, Any]], new_tokens: int) -> None:
    table = Table("mode", "users", "way", "seconds", "tokens/s", "first token", "steps", "tokens")
    for row in rows:
        for way in (way for way in WAYS if way in row):
            found, first = row[way], row[way]["first_token_seconds"]
            waited = "" if first is None else f"{first:.3f} s"
            figures = f"{found['seconds']:.2f}", f"{found['tokens_per_second']:,.0f}", waited
            steps = f"{found['model_steps']:.0f}" if "model_steps" in found else ""
            same = "identical" if found["tokens_identical"] else "DIFFER"
            table.add_row(row["mode"], str(row["threads"]), way, *figures, steps, same)
    print(f"{new_tokens} tokens each")
    command.show(table)


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--mode", choices=(*MODES, "all"), default="all")
    parser.add_argument("--threads", default="1,4,16,64", help="numbers of users")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens each user generates")
    parser.add_argument("--reps", type=int, default=3, help="repetitions of each way")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--num-blocks", type=int, default=2048, help="KV blocks of 16 tokens")
    args = parser.parse_args()

    command.quiet()
    tokenizer, stock = command.embedded_model()
    paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=args.num_blocks)
    models = {way: paged if way == "hf_paged" else stock for way in args.ways}
    modes = MODES if args.mode == "all" else (args.mode,)
    counts = [int(count) for count in args.threads.split(",")]
    rows: list[dict[str, Any]] = []
    for mode in modes:
        for model in dict.fromkeys(models.values()):  # what only the first call pays
            serve(model, tokenizer, make_prompts(tokenizer, 2), mode, 4, True)
        for count in tqdm(counts, desc=mode):
            rows.append(measure(models, tokenizer, mode, count, args.new_tokens, args.reps))
    print_table(rows, args.new_tokens)
    about = {
        "what": "N users on threads, each one generate() with a streamer; medians of alternating repetitions",
        "model": "hf_paged/assets/tiny_lm, float32, CPU, one torch thread",
        "settings": {"new_tokens": args.new_tokens, "reps": args.reps, "num_blocks": args.num_blocks},
    }
    command.save(args.out / "threads.json", about, rows)


if __name__ == "__main__":
    main()
