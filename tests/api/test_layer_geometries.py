"""Layers that differ in what they cache: swapped, and from many threads at once. (All modes: test_generate_models.)"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import hf_paged
from helpers.models import build, ragged_batch, random_ids
from helpers.pairs import MakePair
from helpers.waiting import at_once

KINDS = [
    "gemma4",
    "gemma4_sharing",
    "gemma3n",
    "mimo_v2_flash",
    "deepseek_v32",
    "llama4",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "minicpm3",
    "longcat_flash",
    "youtu",
]

every_kind = pytest.mark.parametrize("name", KINDS)


@every_kind
def test_sixteen_threads(make_pair: MakePair, name: str) -> None:
    pair = make_pair(name)
    prompts = [random_ids(1, 3 + index % 7, seed=index) for index in range(16)]
    expected = [pair.stock.generate(ids, max_new_tokens=12, do_sample=False) for ids in prompts]
    found = at_once(lambda ids: pair.paged.generate(ids, max_new_tokens=12, do_sample=False), prompts)
    assert all(torch.equal(own, other) for own, other in zip(expected, found, strict=True))


@every_kind
def test_bytes_are_those_of_a_stock_cache(name: str) -> None:
    """Would break: a count that goes by a config's names, or pages that are wider than what is in them."""
    model = build(name)
    report = hf_paged.is_supported(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(random_ids(1, 4), past_key_values=cache)
    tensors = [
        tensor
        for layer in cache.layers
        for part in ("keys", "values", "indexer_keys")
        if (tensor := getattr(layer, part, None)) is not None
    ]
    assert report.bytes_per_token(torch.float32) == sum(tensor[..., -1:, :].nbytes for tensor in tensors)
    assert ("shared" in report.layouts) == (report.traits.layers[-1] is None)
    assert set(report.layouts) - {"shared"} == {report.layout}
    # Transformers 5.17 stores keys of all heads where later versions store latents: an indexer's are few beside them.
    if max(layer.kv_heads for layer in report.traits.stored if layer is not None) == 1 or name != "deepseek_v32":
        assert report.padding <= 0.25, "more than so few layers make unavoidable"


@pytest.mark.parametrize("name", ["gemma4", "mimo_v2_flash"])
def test_other_backends(make_pair: MakePair, name: str) -> None:
    """Would break: views of pages that kernels take for contiguous ones."""
    make_pair(name, attention_backend="torch").generate(**ragged_batch(), max_new_tokens=12)


def test_a_backend_that_cannot(make_pair: MakePair) -> None:
    pair = make_pair("mimo_v2_flash", attention_backend="cpu")
    with pytest.raises(ValueError, match="takes keys and values of one width"):
        pair.paged.generate(**ragged_batch(), max_new_tokens=2)
