"""`weight_dtype="int8"`: products in integers, in the engine's forwards only, each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_packed_linears import CHANGES, GREEDY, IDS, assert_clean, gradients, logits, make, patch
from torch import Tensor, nn

from hf_paged.model.int8_linears import Int8, Int8Linears, why_not_int8


def dequantised(weight: Tensor) -> Tensor:
    """Rounded by hand: 127 steps to each row's largest."""
    scale = weight.double().abs().amax(1, keepdim=True) / 127
    return torch.where(scale > 0, (weight.double() / scale).round() * scale, 0.0)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17, 40])
def test_product(rows: int, dtype: torch.dtype) -> None:
    """Both sides rounded, the sum exact; and near what is not rounded."""
    generator = torch.Generator().manual_seed(rows)
    weight, states = torch.randn(50, 70, generator=generator), torch.randn(1, rows, 70, generator=generator)
    weight[7], bias = 0, torch.randn(50, generator=generator).to(dtype)
    weight, states = weight.to(dtype), states.to(dtype)
    expected = dequantised(states[0]) @ dequantised(weight).t() + bias.double()
    found = Int8(weight)(states, bias)
    assert found.shape == (1, rows, 50) and found.dtype is dtype and found.is_contiguous()
    assert relative(found[0], expected) < (1e-6 if dtype is torch.float32 else 4e-3)
    assert relative(found[0], states[0].double() @ weight.double().t() + bias.double()) < 2e-2


def test_a_row_is_the_same_beside_any_others() -> None:
    """Also beside one that is no number, whose results are none."""
    multiply, states = Int8(torch.randn(50, 64)), torch.randn(9, 64)
    whole = multiply(states, None)
    states[4, 3], states[6, 1] = torch.nan, torch.inf
    found = multiply(states, None)
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(found[others], whole[others]) and found[[4, 6]].isnan().all()
    assert torch.equal(multiply(states[2:3], None), whole[2:3])
    assert multiply(torch.zeros(2, 64), None).eq(0).all() and multiply(states[:0], None).shape == (0, 50)


def rounded(name: str) -> Any:
    """The stock model with the weights that the engine multiplies by."""
    model = make(name)
    linears = Int8Linears(model, 0.5)
    with torch.no_grad(), linears.scope():
        taken = [layer.module for layer in linears._layers or () if isinstance(layer.multiply, Int8)]
        for module in taken:
            weight = module.weight
            is_linear = isinstance(module, nn.Linear)
            weight.copy_(dequantised(weight) if is_linear else dequantised(weight.t()).t())
    assert model.lm_head not in taken
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model(name: str) -> None:
    """Near the model with rounded weights, and not the model itself; forwards that are not the engine's are."""
    stock, near, model = make(name), rounded(name), patch(make(name), weight_dtype="int8")
    plain = logits(stock)
    found = logits(model)
    assert relative(found, logits(near)) < 0.1 and 1e-3 < relative(found, plain) < 0.1
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain)
    for one, other in zip(gradients(model), gradients(stock), strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))
    assert_clean(model)


def test_tokens_do_not_depend_on_others() -> None:
    """A prompt alone, and beside another."""
    model = patch(make(), weight_dtype="int8", enable_prefix_caching=False)
    together = model.generate(IDS, **GREEDY)
    for row in range(len(IDS)):
        assert torch.equal(model.generate(IDS[row : row + 1], **GREEDY)[0], together[row])


@pytest.mark.parametrize("name", ["SGD", "a_row_of_data", "a_new_parameter", "in_place"])
def test_weights_that_change(name: str) -> None:
    model, changed = patch(make(), weight_dtype="int8"), make()
    before = logits(model)
    for one in (model, changed):
        CHANGES[name](one)
    found = logits(model)
    assert not torch.equal(before, found)
    torch.testing.assert_close(found, logits(patch(changed, weight_dtype="int8")), rtol=1e-4, atol=1e-4)


def test_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match='weight_dtype="int8" is not for this LlamaForCausalLM: none of its linear'):
        patch(make().double(), weight_dtype="int8")
    with pytest.raises(ValueError, match='packed_weights="replace" was given'):
        patch(make(), weight_dtype="int8", packed_weights="replace")
    monkeypatch.delattr(torch, "_int_mm")
    assert "no product of integers" in str(why_not_int8(make()))


def test_a_product_that_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's is on processors without VNNI."""
    own = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda values, weight: own(values, weight).clamp(max=2**15))
    with pytest.raises(ValueError, match="not exact on this processor"):
        patch(make(), weight_dtype="int8")
