"""Adapters of any rows on the pretended device: by two kernels, in recorded steps that a change of adapters leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretend_cuda
import pytest
import torch

import hf_paged
from helpers.models import build, random_ids

from .conftest import watched

peft = pytest.importorskip("peft")

CUDA = torch.device("cuda", 0)
SETTINGS = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
GREEDY = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
BASE = "__base__"
KINDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "mixed": (
        "qwen2",  # has biases
        {
            "one": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 64},
            "two": {"r": 17, "target_modules": "all-linear", "use_dora": True},
            "three": {"r": 2, "target_modules": ["down_proj", "lm_head"], "lora_bias": True},
        },
    ),
    "experts": ("qwen3_moe", {n: {"target_modules": ["q_proj", "o_proj"], "r": r} for n, r in (("one", 4), ("two", 8))}),
}


def stock_of(kind: str) -> Any:
    family, adapters = KINDS[kind]
    model: Any = build(family, layers=1)
    torch.manual_seed(0)
    for name, settings in adapters.items():
        config = peft.LoraConfig(**settings)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn(parameter.shape) * (0.1 if "magnitude" in name else 0.3)
    return model.eval().to(CUDA)


def prompt(seed: int) -> torch.Tensor:
    return random_ids(1, 5 + seed, seed=seed).to(CUDA)


def expected(stock: Any, name: str, seed: int) -> list[list[int]]:
    if name == BASE:
        with stock.disable_adapter():
            found = stock.generate(input_ids=prompt(seed), **GREEDY)
    else:
        stock.set_adapter(name)
        found = stock.generate(input_ids=prompt(seed), **GREEDY)
    return found[:, prompt(seed).shape[1] :].tolist()


def serve(engine: Any, stock: Any, names: list[str]) -> tuple[int, int]:
    """Requests of these adapters, each with stock's tokens: steps, and how many of them were replays."""
    before = engine.stats()
    engine.pause()
    requests = [engine.submit(prompt(seed)[0], adapter=name, **GREEDY) for seed, name in enumerate(names)]
    engine.resume()
    for (seed, name), request in zip(enumerate(names), requests, strict=True):
        assert request.result(300).sequences == expected(stock, name, seed), (name, seed)
    after = engine.stats()
    return after.num_steps - before.num_steps, after.num_replayed_steps - before.num_replayed_steps


def test_rows_are_replayed() -> None:
    """Mixed in one step, of kinds and ranks; what is recorded once is right for any, and whatever is trained."""
    stock = stock_of("mixed")
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS)
    engine = model.get_base_model().paged
    names = ["one", "two", BASE, "three", "two", "one"]
    serve(engine, stock, names)
    with watched() as own:
        for turn in range(3):
            steps, replays = serve(engine, stock, names[turn:] + names[:turn])
            assert replays >= 0.95 * steps, engine.explain()
    assert len(own.seen.of("capture")) <= 2, "shapes of other steps"
    for each in (stock, model):
        each.set_adapter("three")
        for name, parameter in each.named_parameters():
            if ".two." in name:
                parameter.data.mul_(-1.5)
    with pretend_cuda.watch() as seen:
        steps, replays = serve(engine, stock, names)
    assert replays == steps and not seen.of("capture", "compile")
