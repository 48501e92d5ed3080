"""Rollouts of TRL's GRPOTrainer on CPU, stock beside patched: by `generate()`, and by transformers' batch API.

    python benchmarks/grpo.py --out benchmarks/results

Needs `trl` and `datasets`. The embedded model, float32, one torch thread; prompts of 4 to 64 tokens, several sampled
completions of each, weights that change from step to step. A trainer each way in turn, repetition by repetition;
figures are medians of the seconds that a training step waits for its completions.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from command import embedded_model, parser, quiet, save, show
from datasets import Dataset
from rich.table import Table
from tqdm import tqdm
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import hf_paged

WAYS = {"stock": "generate", "hf_paged": "generate", "hf_paged, batch API": "generate_batch"}


def prompts(tokenizer: Any, count: int) -> list[str]:
    """Texts of 4 to 64 random tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 65, (count,), generator=generator).tolist()
    return [tokenizer.decode(torch.randint(5, 2000, (length,), generator=generator)) for length in lengths]


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function, that notes how long each call takes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(round(time.perf_counter() - started, 4))
        return result

    return call


def train(way: str, model: Any, tokenizer: Any, given: Any, folder: str) -> tuple[list[float], list[list[str]]]:
    """Seconds of each step's rollouts, and their completions."""
    seconds: list[float] = []
    seen: list[list[str]] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen.append(completions)
        return [float(len(set(text))) for text in completions]

    setattr(model, WAYS[way], timed(getattr(model, WAYS[way]), seconds))
    settings = GRPOConfig(
        output_dir=folder,
        use_transformers_continuous_batching=WAYS[way] == "generate_batch",
        per_device_train_batch_size=given.batch,
        num_generations=given.generations,
        max_completion_length=given.tokens,
        max_steps=given.steps,
        learning_rate=1e-5,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        seed=1,
    )
    texts = Dataset.from_dict({"prompt": prompts(tokenizer, 8 * given.batch)})
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=settings, train_dataset=texts, processing_class=tokenizer
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return seconds, seen


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--reps", type=int, default=5, help="repetitions, a trainer each way")
    arguments.add_argument("--steps", type=int, default=3, help="training steps of each")
    arguments.add_argument("--batch", type=int, default=32, help="completions of a step")
    arguments.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    arguments.add_argument("--tokens", type=int, default=128, help="tokens of a completion, at most")
    given = arguments.parse_args()
    quiet()
    tokenizer, stock = embedded_model(padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    seen: dict[str, list[list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in tqdm(range(given.reps), unit="repetition"):
            for way in WAYS:
                model = copy.deepcopy(stock)
                if way != "stock":
                    hf_paged.patch(model, num_blocks=2048)
                own, seen[way] = train(way, model, tokenizer, given, folder)
                seconds[way] += own
    table = Table("rollouts by", "s a step", "of stock's", "completions identical")
    results = []
    theirs = statistics.median(seconds["stock"])
    for way in WAYS:
        ours, is_same = statistics.median(seconds[way]), seen[way] == seen["stock"]
        results.append({"way": way, "seconds": seconds[way], "ratio": round(ours / theirs, 3), "identical": is_same})
        table.add_row(way, f"{ours:.3f}", f"{ours / theirs:.2f}", "yes" if is_same else "no")
    save(given.out / "grpo.json", {"benchmark": "grpo"}, results)
    show(table)


if __name__ == "__main__":
    main()
