"""A step of reinforcement learning on CPU: 16 prompts x 8 samples of 128 tokens, then one update of all weights.

    python benchmarks/rollouts.py --out benchmarks/results
    python benchmarks/rollouts.py --models embedded --reps 1 --samples 2 --new-tokens 16 --out /tmp/results

Stock: `generate()` of a padded batch, its log-probabilities by the forward that is trained. hf_paged: `generate()` of
the patched model, and the forward within `exact_training`. Both start from the same weights, in turn, repetition by
repetition, after one that does not count. Seconds of the rollout, of the forward and backward, and of the whole step
with AdamW's; `ratio`: ours by stock's, medians. Texts have 16 to 64 tokens; all samples are as long as they may be.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from command import parser, quiet, save, show
from common import device_facts
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))

from generate import llama_125m, tiny_model

import hf_paged

MODELS: dict[str, Any] = {"embedded": tiny_model, "125m": llama_125m}
PARTS = ("rollout", "forward and backward", "step")
TEMPERATURE, PAD = 0.9, 0


class Trainer:
    """A copy of a model with an optimizer of its own."""

    def __init__(self, model: Any, is_ours: bool) -> None:
        self.model: Any = copy.deepcopy(model)
        self.scopes = ExitStack()
        if is_ours:
            hf_paged.patch(self.model)
            self.scopes.enter_context(hf_paged.exact_training(self.model))  # once: it tries a shrunken copy
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def step(self, ids: Tensor, mask: Tensor, given: Any) -> dict[str, float]:
        """Seconds of each part; prompts `[prompts, width]` are padded on the left."""
        start = time.perf_counter()
        texts = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            num_return_sequences=given.samples,
            max_new_tokens=given.new_tokens,
            pad_token_id=PAD,
            eos_token_id=None,
        )
        sampled = time.perf_counter()
        shown = torch.cat(
            [mask.repeat_interleave(given.samples, dim=0), texts.new_ones(len(texts), given.new_tokens)], 1
        )
        self._train(texts, shown, given)
        trained = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        whole = time.perf_counter()
        return dict(zip(PARTS, (sampled - start, trained - sampled, whole - start), strict=True))

    def _train(self, texts: Tensor, shown: Tensor, given: Any) -> None:
        """Forward and backward in parts of `given.rows` rows, as trainers accumulate gradients."""
        generated = texts[:, -given.new_tokens :]
        for rows in torch.arange(len(texts)).split(given.rows):
            logits = self.model(
                input_ids=texts[rows],
                attention_mask=shown[rows],
                position_ids=(shown[rows].cumsum(1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=given.new_tokens + 1,
            ).logits[:, :-1]
            found = hf_paged.token_log_probs(logits, generated[rows], temperature=TEMPERATURE)
            (-found.mean() * len(rows) / len(texts)).backward()


def measure(name: str, given: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = MODELS[name](torch.float32)
    trainers = [Trainer(model, is_ours) for is_ours in (False, True)]
    seconds: list[list[dict[str, float]]] = [[], []]
    draw = torch.Generator().manual_seed(0)
    for number in tqdm(range(given.reps + 1), desc=name):
        lengths = torch.randint(16, 65, (given.prompts,), generator=draw)
        mask = (torch.arange(int(lengths.max())) >= lengths.max() - lengths[:, None]).long()
        ids = torch.randint(3, model.config.vocab_size, tuple(mask.shape), generator=draw) * mask
        for place in (0, 1) if number % 2 else (1, 0):
            torch.manual_seed(number)
            found = trainers[place].step(ids, mask, given)
            if number:
                seconds[place].append(found)
    for trainer in trainers:
        trainer.scopes.close()
    rows = []
    for part in PARTS:
        stock, ours = (statistics.median(each[part] for each in own) for own in seconds)
        rows.append(
            {"model": name, "part": part, "reps": given.reps, "stock": stock, "hf_paged": ours, "ratio": ours / stock}
        )
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument("--prompts", type=int, default=16)
    arguments.add_argument("--samples", type=int, default=8)
    arguments.add_argument("--new-tokens", type=int, default=128)
    arguments.add_argument("--rows", type=int, default=16, help="of a forward that is differentiated")
    arguments.add_argument("--reps", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=2)
    given = arguments.parse_args()
    quiet()
    torch.set_num_threads(given.threads)
    about = {"device": device_facts(torch.device("cpu")) | {"threads": given.threads}, "rows": given.rows}
    about |= {"prompts": given.prompts, "samples": given.samples, "new_tokens": given.new_tokens}
    results: list[dict[str, Any]] = []
    for name in given.models:
        results += measure(name, given)
        save(given.out / "rollouts.json", about, results)
    table = Table("model", "part", "stock s", "hf_paged s", "ratio")
    for row in results:
        table.add_row(row["model"], row["part"], *[f"{row[column]:.3g}" for column in ("stock", "hf_paged", "ratio")])
    show(table)


if __name__ == "__main__":
    main()
