"""`model.paged.explain()`: what keeps a model or its calls from the fastest way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor

import hf_paged
from helpers.models import build, random_ids
from hf_paged import PagedCache


class Own(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores


CALLS = {
    "plain": ({}, "", ""),
    "stock": ({"use_cache": False}, "stock generate(): use_cache=False", "leave use_cache out"),
    "processor": ({"logits_processor": [Own()]}, "not transformers' own (Own)", "logit_bias"),
    "outputs": ({"return_dict_in_generate": True}, "return_dict_in_generate=True", "logprobs"),
    "kept": ({"past_key_values": PagedCache}, "past_key_values is a PagedCache", "leave past_key_values out"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_counted_by_its_reason(name: str) -> None:
    arguments, reason, instead = CALLS[name]
    model = hf_paged.patch(build("llama"), num_blocks=64)
    given = {key: value(model) if value is PagedCache else value for key, value in arguments.items()}
    for _ in range(2):
        model.generate(random_ids(1, 7), max_new_tokens=2, do_sample=False, **given)
        if name == "kept":
            given["past_key_values"] = PagedCache(model)
    found = model.paged.explain()
    if not reason:
        assert found == [] and model.paged.stats().detours == {}
        return
    (detour,) = found
    assert reason in detour.why and instead in detour.instead and detour.num_calls == 2
    assert model.paged.stats().detours == {detour.why: 2}
    assert str(detour).endswith(f"(2 calls); instead: {detour.instead}")


class Scaled(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states)


def test_a_model_says_what_is_foreign_in_it() -> None:
    model = build("llama")
    layer = model.model.layers[0].mlp
    layer.up_proj.__class__ = Scaled
    hf_paged.patch(model, num_blocks=64)
    whys = [str(detour) for detour in model.paged.explain()]
    assert any("code of" in why and "Scaled" in why for why in whys)
    assert any("1 of" in why and "are Scaled" in why for why in whys)
    layer.up_proj.__class__ = nn.Linear
    assert model.paged.explain() == []
    handle = layer.register_forward_hook(lambda *_: None)
    assert any("<lambda>" in str(detour) for detour in model.paged.explain())
    handle.remove()
    assert model.paged.explain() == []


def test_a_padded_model_says_why() -> None:
    model = hf_paged.patch(build("bloom"), num_blocks=64)
    assert any("rows are padded" in detour.why for detour in model.paged.explain())
