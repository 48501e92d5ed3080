"""Linear layers of one input in one pass: found by watching a forward, bit for bit what each layer computes alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from test_packed_linears import CHANGES, GREEDY, IDS, _Always, assert_clean, compare, logits, make, patch
from torch import Tensor, nn

import hf_paged
from helpers.models import random_ids
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.model import decoder_layers, linear_ways, packed_linears, shared_inputs


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All layers are taken for faster by our kernel; each of its calls adds the number of its weights to the list."""
    weights: list[int] = []
    original = CPULinear.multiply_all

    def counting(self: CPULinear, states: Tensor, parts: Any) -> list[Tensor]:
        weights.append(len(parts))
        return original(self, states, parts)

    monkeypatch.setattr(CPULinear, "multiply_all", counting)
    monkeypatch.setattr(linear_ways, "WITH_COPY", (linear_ways.panels,))
    monkeypatch.setattr(packed_linears, "TRIALS", _Always(True))
    monkeypatch.setattr(decoder_layers, "_find", lambda *_: [])  # which call it from C
    return weights


def of_a_step(model: Any, calls: list[int]) -> list[int]:
    """How many weights each product of a step has, in the order of the step."""
    model.paged.reset_prefix_cache()
    model.generate(IDS[:, :1], max_new_tokens=1, do_sample=False)  # is watched
    calls.clear()
    model.generate(IDS[:, :1], max_new_tokens=1, do_sample=False)
    return list(calls)


LLAMA, GPT2 = [3, 1, 2, 1] * 2 + [1], [1] * 9


@pytest.mark.parametrize(("name", "expected"), [("llama", LLAMA), ("gpt2", GPT2)])
def test_products_of_a_step(name: str, expected: list[int], calls: list[int]) -> None:
    """Queries, keys and values; the output; gate and up; down; and the head."""
    model = patch(make(name))
    compare(make(name), model)
    assert of_a_step(model, calls) == expected
    assert_clean(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """What layers compute alone, with biases of their own."""
    model = make().to(dtype)
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.up_proj):
            part.bias = nn.Parameter(torch.randn(part.out_features).to(dtype))
    patch(model)
    logits(model)
    calls.clear()
    joined = [logits(model, random_ids(2, length)) for length in (1, 5, 40)]
    assert 3 in calls
    monkeypatch.setattr(shared_inputs.SharedInputs, "__init__", lambda self, layers: setattr(self, "end", lambda: None))
    model.paged.release()
    calls.clear()
    alone = [logits(model, random_ids(2, length)) for length in (1, 5, 40)]
    assert set(calls) == {1}
    for found, expected in zip(joined, alone, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_change(name: str, calls: list[int]) -> None:
    stock, model = make(), patch(make())
    compare(stock, model)
    for one in (stock, model):
        CHANGES[name](one)
    compare(stock, model)
    assert 3 in of_a_step(model, calls)


def test_layers_that_only_other_forwards_multiply_this_way(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """Would break: a prompt is watched, and a decode step's layers are taken for never called."""
    monkeypatch.setattr(packed_linears, "TRIALS", _Always(True, False))  # few rows, not many
    model = patch(make())
    compare(make(), model)
    assert of_a_step(model, calls) == LLAMA


def test_a_hook_on_one_of_them(calls: list[int]) -> None:
    """It is called by itself, with what its hook makes of the input; the others stay joined or go alone."""
    stock, model = make(), patch(make())
    compare(stock, model)
    handles = []
    for one in (stock, model):
        layer = one.model.layers[0].self_attn.k_proj
        handles.append(layer.register_forward_pre_hook(hf_paged.packed_hook(lambda _, args: (args[0] * 2,))))
    model.paged.reset_prefix_cache()
    compare(stock, model)
    assert of_a_step(model, calls)[0] < 3
    for handle in handles:
        handle.remove()
    model.paged.reset_prefix_cache()
    compare(stock, model)
    assert of_a_step(model, calls) == LLAMA


class Layers(nn.Module):
    """Three layers, called in ways that models' code might."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor, way: str) -> list[Tensor]:
        if way == "one input":
            return [self.a(x), self.b(x), self.c(x)]
        if way == "in between":
            first = self.a(x)
            y = torch.empty_like(x).copy_(x)
            return [first, self.b(x), self.c(y)]
        if way == "written":
            first = self.a(x)
            x.mul_(2)
            return [first, self.b(x), self.c(x)]
        if way == "first only":
            return [self.a(x)]
        if way == "last alone":
            return [self.c(x), self.b(x)]
        if way == "twice":
            return [self.a(x), self.a(x), self.b(x), self.c(x), self.b(x)]
        raise KeyError(way)


WAYS = ("one input", "in between", "written", "first only", "last alone", "twice")
JOINED = {"one input": 3, "in between": 2, "written": 2, "first only": 1, "last alone": 2, "twice": 1}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("first", WAYS)
def test_code_that_calls_them_otherwise(first: str, mode: Any, calls: list[int]) -> None:
    """Would break: the result of another input, of an input that was written to, of another layer."""
    model = Layers()
    linears = packed_linears.PackedLinears(model, 0.5)
    torch.manual_seed(0)
    with mode():
        for way in (first, first, *WAYS, first):
            if way == "written" and mode is torch.inference_mode and first != "written":
                continue  # there no tensor knows: code that writes is seen where it is watched
            x = torch.randn(5, 256)
            expected = model(x.clone(), way)
            calls.clear()
            with linears.scope():
                found = model(x.clone(), way)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            if way == first and calls:
                largest = max(calls)
    assert largest <= JOINED[first]


@pytest.mark.parametrize("way", WAYS)
def test_how_many_are_joined(way: str, calls: list[int]) -> None:
    model = Layers()
    linears = packed_linears.PackedLinears(model, 0.5)
    with torch.no_grad():
        for _ in range(3):
            calls.clear()
            with linears.scope():
                model(torch.randn(5, 256), way)
    assert max(calls) == JOINED[way]


def test_results_that_are_not_taken(calls: list[int]) -> None:
    """Computed for nothing once, and held by nothing behind the forward."""
    model = Layers()
    linears = packed_linears.PackedLinears(model, 0.5)
    with torch.no_grad():
        for way in ("one input", "first only", "one input"):
            calls.clear()
            x = torch.randn(5, 256)
            with linears.scope():
                model(x, way)
            alive = weakref.ref(x)
            del x
            assert alive() is None
    assert calls == [1, 1, 1]


def test_copies_go_when_they_are_let_go() -> None:
    """Without the garbage collector: they are as large as the model."""

    def copies() -> list[linear_ways.Panels]:
        return [part for part in gc.get_objects() if isinstance(part, linear_ways.Panels)]

    gc.collect()
    others = {id(part) for part in copies()}
    model = patch(make())
    model.generate(IDS, **GREEDY)
    panels = [weakref.ref(part) for part in copies() if id(part) not in others]
    assert len(panels) >= 15
    gc.disable()
    try:
        model.paged.release()
        assert not any(ref() is not None for ref in panels)
    finally:
        gc.enable()
