"""Adapters of any rows on the pretended device: by two kernels, in recorded steps that a change of adapters leaves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pretend_cuda
import pytest
import torch

import hf_paged
from helpers.models import build, random_ids
from helpers.state_models import build_state_model
from hf_paged.kernels import slot_tables

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
    "states": (
        "lfm2",
        {n: {"target_modules": ["in_proj", "q_proj", "w1"], "r": 4} for n in ("one", "two")},
    ),
    "ends": ("llama", {"one": {"target_modules": ["embed_tokens", "q_proj"], "r": 2}}),
    "small": ("llama", {n: {"target_modules": ["q_proj", "o_proj"], "r": r} for n, r in (("one", 4), ("two", 8))}),
}


def stock_of(kind: str) -> Any:
    family, adapters = KINDS[kind]
    model: Any = build_state_model(family) if kind == "states" else build(family, layers=1)
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
    truth = [expected(stock, name, seed) for seed, name in enumerate(names)]
    before = engine.stats()
    engine.pause()
    requests = [engine.submit(prompt(seed)[0], adapter=name, **GREEDY) for seed, name in enumerate(names)]
    engine.resume()
    for name, request, own in zip(names, requests, truth, strict=True):
        assert request.result(300).sequences == own, name
    after = engine.stats()
    return after.num_steps - before.num_steps, after.num_replayed_steps - before.num_replayed_steps


def train(model: Any, name: str, factor: float) -> None:
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if f".{name}." in own:
                parameter.mul_(factor)


def test_rows_are_replayed() -> None:
    """Mixed in one step, of all kinds and ranks; what is recorded once is right for any rows, and behind training."""
    stock = stock_of("mixed")
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS)
    engine = model.get_base_model().paged
    names = ["one", "two", BASE, "three", "two", "one"]
    serve(engine, stock, names)
    with watched() as own:
        model.set_adapter("three")
        steps, replays = serve(engine, stock, names[2:] + names[:2])
    assert replays >= 0.95 * steps and len(own.seen.of("capture")) <= 1, "a shape of another step"
    own.assert_clean()
    for each in (stock, model):
        train(each, "two", -1.5)
    with pretend_cuda.watch() as seen:
        steps, replays = serve(engine, stock, names)
    assert replays == steps and not seen.of("capture", "compile")


def test_layers_that_keep_a_state() -> None:
    """They are called with some of a step's tokens; decode steps are recorded."""
    stock = stock_of("states")
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS)
    _, replays = serve(model.get_base_model().paged, stock, ["one", BASE, "two"])
    assert replays >= 4


def test_layers_that_torch_adapts() -> None:
    """PEFT's, around an embedding: steps are recorded with what the model is set to, and others run without."""
    stock = stock_of("ends")
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS)
    engine = model.get_base_model().paged
    steps, replays = serve(engine, stock, ["one", "one"])
    assert steps - replays <= 1
    serve(engine, stock, [BASE, "one"])
    assert any("other adapters than the model is set to" in str(each) for each in engine.explain())


def test_more_of_them_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: tables that were recorded where they are no longer; ranks beyond the scratch."""
    monkeypatch.setattr(slot_tables, "FIRST_SLOTS", 1)
    monkeypatch.setattr(slot_tables, "FIRST_RANK", 2)
    stock = stock_of("small")
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS)
    engine = model.get_base_model().paged
    for names in (["one"], ["one", "two"], [BASE, "two"]):
        serve(engine, stock, names)
    assert engine.core.adapters._tables.rank == 8


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretend_cuda, "_compiled", set())


@pytest.mark.usefixtures("nothing_compiled")
def test_loaded_ones(tmp_path: Path) -> None:
    """Into a model that was warmed up before it had any: nothing is compiled, and other steps stay recorded.

    One that torch adds leaves recorded steps to the others.
    """
    stock = stock_of("mixed")
    stock.save_pretrained(tmp_path)
    ends = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    other = peft.get_peft_model(build("qwen2", layers=1), ends, adapter_name="ends").eval()
    other.save_pretrained(tmp_path)
    other.to(CUDA)
    model = hf_paged.patch(build("qwen2", layers=1).to(CUDA), **SETTINGS)
    engine = model.paged
    engine.warm_up()
    with pretend_cuda.watch() as seen:
        for name in KINDS["mixed"][1]:
            engine.load_adapter(name, tmp_path / name)
        serve(engine, stock, ["two", "one", BASE, "three"])
    assert not seen.where("compile")
    engine.unload_adapter("one")
    engine.load_adapter("more", tmp_path / "two")
    engine.load_adapter("ends", tmp_path / "ends")
    with pretend_cuda.watch() as seen:
        steps, replays = serve(engine, stock, ["two", BASE])
        requests = [engine.submit(prompt(seed)[0], adapter=n, **GREEDY) for seed, n in ((0, "more"), (3, "ends"))]
        found = [request.result(300).sequences for request in requests]
    assert found == [expected(stock, "two", 0), expected(other, "ends", 3)]
    assert replays == steps and any("as of embeddings" in str(each) for each in engine.explain())
