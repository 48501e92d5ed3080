"""Latent attention in packed steps: where its maps come from, and that they follow the model's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import hf_paged
from helpers.models import MODELS, build, ragged_batch, random_ids
from hf_paged.api.support import is_architecture_supported

GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
FAMILIES = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "longcat_flash", "youtu"]


class Halved(nn.Linear):
    """A layer whose weight is not what it multiplies by, as a quantised one's is not."""

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight * 0.5)


class Apart(nn.Module):
    """Two layers, one of which makes keys, in the place of one."""

    def __init__(self, own: nn.Linear, heads: int, plain: int) -> None:
        super().__init__()
        by_head = own.weight.detach().unflatten(0, (heads, -1))
        self.heads = heads
        self.made = nn.ModuleList(nn.Linear(own.in_features, 1, bias=False) for _ in range(2))
        for layer, part in zip(self.made, (by_head[:, :plain], by_head[:, plain:]), strict=True):
            layer.weight = nn.Parameter(part.flatten(0, 1).clone())

    def forward(self, states: Tensor) -> Tensor:
        parts = [layer(states).unflatten(-1, (self.heads, -1)) for layer in self.made]
        return torch.cat(parts, dim=-1).flatten(-2)


def with_halved(model: Any) -> Any:
    for layer in model.model.layers:
        own = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = halved = Halved(own.in_features, own.out_features, bias=False)
        halved.weight = nn.Parameter(own.weight.detach() * 2)
    return model


def with_apart(model: Any) -> Any:
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.kv_b_proj = Apart(attention.kv_b_proj, attention.num_heads, attention.qk_nope_head_dim)
    return model


def as_it_is(model: Any) -> Any:
    return model


def latents_of(model: Any) -> Any:
    return model.paged.core.bound.latents


def assert_same_tokens(paged: Any, stock: Any) -> None:
    batch = ragged_batch()
    assert torch.equal(paged.generate(**batch, **GREEDY), stock.generate(**batch, **GREEDY))


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_parts_of_weights(name: str) -> None:
    """Would break: a copy of a weight for each layer."""
    model = hf_paged.patch(build(name), num_blocks=64)
    assert hf_paged.is_supported(build(name)).layout == "packed"
    model.generate(random_ids(1, 4), **GREEDY)
    latents, own = latents_of(model), {each.untyped_storage().data_ptr() for each in model.parameters()}
    found = [latents.get(layer) for layer in range(len(model.paged.traits.layers))]
    assert len(found) > 1 and not latents.has_copies
    for maps in found:
        assert {maps.key.untyped_storage().data_ptr(), maps.value.untyped_storage().data_ptr()} <= own


@pytest.mark.parametrize(("change", "is_copied"), [(as_it_is, False), (with_apart, False), (with_halved, True)])
def test_weights_that_change(change: Callable[[Any], Any], is_copied: bool) -> None:
    """Would break: maps of weights as they once were."""
    stock = change(build("deepseek_v3"))
    paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=64, enable_prefix_caching=False)
    assert paged.paged.traits.runs_packed
    assert_same_tokens(paged, stock)
    assert latents_of(paged).has_copies is is_copied
    other = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in stock.state_dict().items()}
    for model in (stock, paged):
        model.load_state_dict(other)
    assert_same_tokens(paged, stock)
    for model in (stock, paged):
        for layer in model.model.layers:
            for weight in layer.self_attn.kv_b_proj.parameters():
                weight.data = weight.data.flip(0)
    assert_same_tokens(paged, stock)


def test_a_weight_written_behind_autograds_back() -> None:
    """Would break: copies, which nothing tells of such a write, where the weight itself could be read."""
    stock = build("deepseek_v3")
    paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=64, enable_prefix_caching=False)
    assert_same_tokens(paged, stock)
    for model in (stock, paged):
        model.model.layers[0].self_attn.kv_b_proj.weight.data.mul_(-1.5)
    assert_same_tokens(paged, stock)


@pytest.mark.usefixtures("own_trial")
def test_what_is_no_linear_map_stays_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: absorbing what can't be, or a family known by its name."""
    expand = DeepseekV3Attention.expand_kv

    def bent(self: Any, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        key, value = expand(self, latent, rotary)
        return key, torch.tanh(value)

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", bent)
    report = hf_paged.is_supported(build("deepseek_v3"))
    assert report.layout == "padded" and "linearly" in report.why_padded
    assert_same_tokens(hf_paged.patch(build("deepseek_v3"), num_blocks=64), build("deepseek_v3"))


def test_bytes_of_a_token() -> None:
    """At DeepSeek-V3's shape at most a twenty-fifth of its keys and values."""
    config = DeepseekV3Config()
    report = is_architecture_supported(DeepseekV3ForCausalLM, config)
    widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    expanded = 2 * config.num_hidden_layers * config.num_attention_heads * widths
    assert report.layout == "packed" and not report.why_padded
    assert report.bytes_per_token(torch.bfloat16) == 2 * config.num_hidden_layers * (512 + 64) <= 0.04 * expanded


def test_why_models_run_padded() -> None:
    reasons = {name: hf_paged.is_supported(build(name)).why_padded for name in ("llama", "deepseek_v32", "bloom")}
    assert reasons["llama"] == ""
    assert "indexer" in reasons["deepseek_v32"] and "position_ids" in reasons["bloom"]
    assert not MODELS["deepseek_v32"].runs_packed and not MODELS["bloom"].runs_packed
