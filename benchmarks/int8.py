"""How far `weight_dtype="int8"` is from the model itself: perplexity, and where greedy tokens first differ.

    python benchmarks/int8.py --out benchmarks/results
    python benchmarks/int8.py --models 125m --reps 5        # and how fast it is, on a machine that is idle

Perplexity of texts under stock transformers, under the engine with integers (all layers but the head), and with the
head's weight rounded as well. The embedded model reads its prompts; a random model of 125M parameters reads
what stock sampled from it. Rounding hurts trained and random weights differently: of a model of your own, run
`python benchmarks/int8.py --models PATH`.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from command import ASSETS, parser, quiet, save, show
from generate import llama_125m, tiny_model
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged import PagedCache

MIN_TOKENS, MAX_TOKENS = 16, 256  # of a text
NUM_TEXTS, NUM_NEW_TOKENS, NUM_PROMPT_TOKENS = 24, 64, 16
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NUM_NEW_TOKENS}


def texts_of(path: str) -> list[Tensor]:
    """The prompts that are part of the package, by this model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [json.loads(line)["prompt"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    ids = [tokenizer(prompt, return_tensors="pt")["input_ids"][:, :MAX_TOKENS] for prompt in prompts]
    return [each for each in ids if each.shape[1] >= MIN_TOKENS][:NUM_TEXTS]


def sampled_texts(model: Any) -> list[Tensor]:
    """What a model without a language says."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    prompts = torch.randint(3, model.config.vocab_size, (NUM_TEXTS, 1), generator=generator)
    length = MAX_TOKENS // 4
    return list(model.generate(prompts, do_sample=True, top_k=0, min_length=length, max_length=length).split(1))


def load(name: str) -> tuple[Any, list[Tensor]]:
    """A model and its texts."""
    if name == "125m":
        model = llama_125m(torch.float32)
        return model, sampled_texts(model)
    if name == "embedded":
        return tiny_model(torch.float32), texts_of(str(ASSETS / "tiny_lm"))
    return AutoModelForCausalLM.from_pretrained(name).float().eval(), texts_of(name)


@torch.no_grad()
def logits_of(model: Any, text: Tensor) -> Tensor:
    """`[tokens, vocabulary]`; of a patched model, from the engine."""
    cache = {"past_key_values": PagedCache(model)} if hasattr(model, "paged") else {}
    found: Tensor = model(text, **cache).logits[0]
    return found.double()


def compare(stock: Any, model: Any, texts: list[Tensor]) -> dict[str, Any]:
    """Figures of one model beside another."""
    losses: list[tuple[float, float, float, float]] = []
    for text in tqdm(texts, unit="text", leave=False, disable=None):
        expected, found = logits_of(stock, text)[:-1], logits_of(model, text)[:-1]
        own, other = (float(cross_entropy(each, text[0, 1:], reduction="sum")) for each in (expected, found))
        divergence = kl_div(found.log_softmax(-1), expected.log_softmax(-1), reduction="sum", log_target=True)
        is_same = float((expected.argmax(-1) == found.argmax(-1)).sum())
        losses.append((own, other, float(divergence), is_same))
    num_tokens = sum(text.shape[1] - 1 for text in texts)
    own, other, divergence, same = (sum(column) / num_tokens for column in zip(*losses, strict=True))
    prompts = torch.cat([text[:, :NUM_PROMPT_TOKENS] for text in texts])
    differing = stock.generate(prompts, **GREEDY) != model.generate(prompts, **GREEDY)
    firsts = [int(row.nonzero()[0]) if row.any() else NUM_NEW_TOKENS for row in differing[:, NUM_PROMPT_TOKENS:]]
    return {
        "tokens": num_tokens,
        "perplexity_stock": round(math.exp(own), 4),
        "perplexity": round(math.exp(other), 4),
        "perplexity_ratio": round(math.exp(other - own), 5),
        "kl_divergence": float(f"{divergence:.3g}"),
        "same_greedy_token": round(same, 4),
        "first_divergence": {
            "of_tokens": NUM_NEW_TOKENS,
            "median": statistics.median(firsts),
            "least": min(firsts),
            "texts_without": sum(first == NUM_NEW_TOKENS for first in firsts),
            "texts": len(firsts),
        },
    }


@torch.no_grad()
def round_head(model: Any) -> Any:
    """The head's weight in 127 steps to each row's largest, in place; untied from the embeddings."""
    head = model.get_output_embeddings()
    weight = head.weight.detach().clone()
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    head.weight = torch.nn.Parameter((weight / scale).round() * scale)
    return model


def speed(models: list[Any], reps: int) -> dict[str, float]:
    """Of the second model over the first's, by numbers of rows: the median of alternating runs."""
    found = {}
    for rows in (1, 8, 32):
        prompt = torch.randint(3, 1000, (rows, NUM_PROMPT_TOKENS), generator=torch.Generator().manual_seed(rows))
        ratios = []
        for rep in range(reps + 1):
            seconds = {}
            for index in (0, 1) if rep % 2 else (1, 0):
                started = time.perf_counter()
                models[index].generate(prompt, **GREEDY)
                seconds[index] = time.perf_counter() - started
            ratios.append(seconds[0] / seconds[1])
        found[str(rows)] = round(statistics.median(ratios[1:]), 3)
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=["embedded", "125m"], help="embedded, 125m, or a path")
    arguments.add_argument("--reps", type=int, default=0, help="alternating runs beside the engine without integers")
    given = arguments.parse_args()
    quiet()
    table = Table("model", "head", "perplexity", "ratio", "KL", "same token", "first divergence (median, least)")
    results = []
    for name in given.models:
        stock, texts = load(name)
        model = hf_paged.patch(copy.deepcopy(stock), weight_dtype="int8", num_blocks=2048)
        for head in ("as it is", "rounded"):
            if head == "rounded":
                round_head(model)
            row = {"model": Path(name).name, "head": head} | compare(stock, model, texts)
            results.append(row)
            first = row["first_divergence"]
            table.add_row(
                *(row["model"], head, f"{row['perplexity_stock']} -> {row['perplexity']}"),
                *(str(row[each]) for each in ("perplexity_ratio", "kl_divergence", "same_greedy_token")),
                f"{first['median']}, {first['least']} of {first['of_tokens']}; {first['texts_without']} without",
            )
        if given.reps:
            results[-2]["speed_by_rows"] = speed([hf_paged.patch(stock, num_blocks=2048), model], given.reps)
            print(name, "speed by rows:", results[-2]["speed_by_rows"])
    save(given.out / "int8.json", {"benchmark": "int8"}, results)
    show(table)


if __name__ == "__main__":
    main()
