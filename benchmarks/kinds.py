"""Kinds of models that are no plain decoder, beside stock `generate()`: hybrids, pictures, latents.

    python benchmarks/kinds.py --out benchmarks/results
    python benchmarks/kinds.py --kinds mamba2 --reps 3

Random models of some 50 million parameters, float32, greedy, with the requests of `generate.py`'s workload A
(16 prompts of 16 to 256 tokens that want 16 to 128 more; a picture of 256 tokens before each, all different, where the
model takes pictures). Ours twice: one padded call of `model.generate()` for all prompts, and requests that each want
their own number of tokens (`submit`; with pictures a thread each that calls `generate()`). Stock: one padded call for
all, padded batches of 8 sorted by length, and one prompt after the other. Ways alternate, repetition by repetition,
behind a warm-up; stock one by one runs once. Useful tokens a second are those that the requests wanted. All tokens are
compared. Beside seconds the processor time of the process is written down, which other work on the machine changes
less.

A result that is there is gone on with, kind by kind, unless `--again`.
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))

from command import parser, quiet, save, show
from generate import GREEDY, Request, workload_a

import hf_paged
from hf_paged.tools.report import first_divergence

VOCAB = 16000
BATCH = 8  # rows of stock's sorted batches
PICTURE, START = VOCAB - 1, VOCAB - 2  # ids
SIDE, PATCH, MERGE = 448, 14, 2  # of a picture: (448 / 14 / 2)^2 = 256 tokens
NUM_PICTURE_TOKENS = (SIDE // PATCH // MERGE) ** 2
WAYS = ("generate()", "requests", "stock, padded", "stock, sorted", "stock, one by one")
TIMES = ("times_padded_stock", "times_stock_one_by_one")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}


def gated_delta() -> hf.PreTrainedConfig:
    """Three layers of the gated delta rule to one with attention, as in Qwen3-Next and Qwen3.5; without experts."""
    own = {"head_dim": 64, "mlp_only_layers": list(range(12)), "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    widths = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    return hf.Qwen3NextConfig(**_COMMON, **own, **widths)


def mamba2() -> hf.PreTrainedConfig:
    """Mamba-2 mixers and three layers with attention."""
    own = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2}
    return hf.BambaConfig(**_COMMON, **own, attn_layer_indices=[3, 7, 11])


def pictures() -> hf.PreTrainedConfig:
    """A tower of six layers before a text model with positions of three axes."""
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}}
    tower = {"depth": 6, "num_heads": 8, "hidden_size": 256, "intermediate_size": 768, "out_hidden_size": 512}
    tower |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "window_size": 112}
    ids = {"image_token_id": PICTURE, "vision_start_token_id": START, "video_token_id": VOCAB - 3}
    return hf.Qwen2_5_VLConfig(
        text_config=_COMMON | rotary,
        vision_config=tower | {"fullatt_block_indexes": [2, 5]},
        **ids,
        vision_end_token_id=VOCAB - 4,
        tie_word_embeddings=True,
    )


def latents() -> hf.PreTrainedConfig:
    """Multi-head latent attention, as in DeepSeek-V3; without experts."""
    own = {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
    heads = {"num_key_value_heads": 8, "first_k_dense_replace": 12, "n_routed_experts": 4, "n_group": 1}
    return hf.DeepseekV3Config(**(_COMMON | heads), **own, topk_group=1, num_experts_per_tok=2)


KINDS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "gated delta": gated_delta,
    "mamba2": mamba2,
    "pictures": pictures,
    "latents": latents,
}


def random_model(config: hf.PreTrainedConfig) -> PreTrainedModel:
    """In float32, with weights that keep its text from repeating itself; no token ends a sequence."""
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.copy_(torch.randn(parameter.shape) * parameter[0].numel() ** -0.5)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model


@dataclass(frozen=True)
class Asked:
    """Requests to one model.

    Attributes:
        requests: Prompts, and how many tokens each wants.
        has_pictures: Whether a picture stands before each prompt.
    """

    requests: list[Request]
    has_pictures: bool

    @classmethod
    def of(cls, config: hf.PreTrainedConfig, limit: int) -> Asked:
        """Workload A's, as many as `limit`."""
        has_pictures = hasattr(config, "vision_config")
        before = [START, *[PICTURE] * NUM_PICTURE_TOKENS] if has_pictures else []
        drawn = workload_a(torch.float32).requests[:limit]
        words = [([token % (VOCAB - 8) + 3 for token in prompt], number) for prompt, number in drawn]
        return cls([(before + prompt, number) for prompt, number in words], has_pictures)

    def call(self, indices: list[int]) -> dict[str, Tensor]:
        """Arguments of a left-padded `generate()` call for some of them."""
        width = max(len(self.requests[index][0]) for index in indices)
        rows = [[0] * (width - len(self.requests[i][0])) + self.requests[i][0] for i in indices]
        mask = [[int(width - column <= len(self.requests[i][0])) for column in range(width)] for i in indices]
        given = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
        if self.has_pictures:
            side = SIDE // PATCH
            made = [torch.Generator().manual_seed(index) for index in indices]
            pixels = [torch.randn(side * side, 3 * 2 * PATCH * PATCH, generator=each) for each in made]
            given |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor([[1, side, side]] * len(made))}
            given["mm_token_type_ids"] = (given["input_ids"] == PICTURE).long()
        return given

    def batches(self, size: int) -> list[list[int]]:
        """Requests sorted by what they want and what they are, in batches."""
        order = sorted(
            range(len(self.requests)), key=lambda index: (self.requests[index][1], len(self.requests[index][0]))
        )
        return [order[start : start + size] for start in range(0, len(order), size)]


def in_batches(model: Any, asked: Asked, batches: list[list[int]]) -> list[list[int]]:
    """Padded calls, each as long as its longest request; cut to what each wanted."""
    results: list[list[int]] = [[]] * len(asked.requests)
    for batch in batches:
        given = asked.call(batch)
        longest = max(asked.requests[index][1] for index in batch)
        rows = model.generate(**given, max_new_tokens=longest, **GREEDY)[:, given["input_ids"].shape[1] :].tolist()
        for index, row in zip(batch, rows, strict=True):
            results[index] = row[: asked.requests[index][1]]
    return results


def as_requests(model: Any, asked: Asked) -> list[list[int]]:
    """Each by itself and all at once: handed to the engine; with a picture by a thread that calls `generate()`."""
    if not asked.has_pictures:
        handles = [model.paged.submit(ids, max_new_tokens=number, **GREEDY) for ids, number in asked.requests]
        return [handle.result().token_ids for handle in handles]
    results: list[list[int]] = [[]] * len(asked.requests)

    def ask(index: int) -> None:
        results[index] = in_batches(model, asked, [[index]])[index]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def speed(make: Callable[[], hf.PreTrainedConfig], reps: int, limit: int) -> dict[str, Any]:
    """Seconds of all ways, their ratios, and what the model is."""
    config = make()
    stock, asked = random_model(config), Asked.of(config, limit)
    paged: Any = hf_paged.patch(copy.deepcopy(stock), enable_prefix_caching=False)
    every = list(range(len(asked.requests)))
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "generate()": partial(in_batches, paged, asked, [every]),
        "requests": partial(as_requests, paged, asked),
        "stock, padded": partial(in_batches, stock, asked, [every]),
        "stock, sorted": partial(in_batches, stock, asked, asked.batches(BATCH)),
        "stock, one by one": partial(in_batches, stock, asked, [[index] for index in every]),
    }
    few = Asked(asked.requests[:2], asked.has_pictures)
    in_batches(stock, few, [[0, 1]])
    in_batches(paged, few, [[0, 1]])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, list[list[int]]] = {}
    for repetition in range(reps):
        for name, way in ways.items():
            if repetition and name == "stock, one by one":
                continue
            started, busy = time.perf_counter(), time.process_time()
            tokens[name] = way()
            seconds[name].append(round(time.perf_counter() - started, 3))
            cpu_seconds[name].append(round(time.process_time() - busy, 3))
    reference = tokens["stock, one by one"]
    found = {name: statistics.median(each) for name, each in seconds.items()}
    padded = min(found["stock, padded"], found["stock, sorted"])
    useful = sum(number for _, number in asked.requests)
    return {
        "parameters": sum(parameter.numel() for parameter in stock.parameters()),
        "layout": hf_paged.is_supported(stock).layout,
        "useful_tokens": useful,
        "prompt_tokens": sum(len(ids) for ids, _ in asked.requests),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": {name: round(useful / each, 1) for name, each in found.items()},
        "times_padded_stock": {name: round(padded / found[name], 2) for name in WAYS[:2]},
        "times_stock_one_by_one": {name: round(found[WAYS[-1]] / found[name], 2) for name in WAYS[:2]},
        "tokens_identical": {name: first_divergence(tokens[name], reference) is None for name in WAYS[:-1]},
    }


def main() -> None:
    """Measures what the result doesn't have yet, prints and saves."""
    arguments = parser(__doc__)
    arguments.add_argument("--kinds", nargs="*", choices=list(KINDS), help="for speed; all if not given")
    arguments.add_argument("--reps", type=int, default=1, help="repetitions")
    arguments.add_argument("--limit", type=int, default=16, help="requests of workload A, of 32")
    arguments.add_argument("--threads", type=int, default=1, help="of torch")
    arguments.add_argument("--again", action="store_true", help="measure what the folder's result has, too")
    given = arguments.parse_args()
    quiet()
    torch.set_num_threads(given.threads)
    path: Path = given.out / "kinds.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {"speed": {}}

    def keep() -> None:
        save(path, {"benchmark": "kinds", "requests": given.limit, "threads": given.threads}, results)

    for name in tqdm(given.kinds or list(KINDS), unit="kind"):
        if given.again or name not in results["speed"]:
            results["speed"][name] = speed(KINDS[name], given.reps, given.limit)
            gc.collect()
            keep()
    show(speed_table(results["speed"]))


def speed_table(results: dict[str, Any]) -> Table:
    """Useful tokens a second of all ways, and how many times those of stock ours are."""
    table = Table("", *WAYS, "times padded stock", "times one by one", "identical", title="useful tokens/s")
    for name, found in results.items():
        each = [f"{found['tokens_per_second'][way]:.1f}" for way in WAYS]
        times = (" / ".join(f"{found[key][way]:.2f}" for way in WAYS[:2]) for key in TIMES)
        table.add_row(name, *each, *times, "yes" if all(found["tokens_identical"].values()) else "NO")
    return table


if __name__ == "__main__":
    main()
