"""Pools of 8-bit floats: the oracle is stock `generate()` over a cache that rounds what it stores."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hf_paged
from helpers.models import build, random_ids

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
}


class RoundingCache(DynamicCache):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        largest = torch.finfo(self.dtype).max
        rounded = [states.clamp(-largest, largest).to(self.dtype).to(states.dtype) for states in (key, value)]
        return super().update(*rounded, *args, **kwargs)


def expected(stock: Any, kind: str, ids: Tensor, **given: Any) -> Tensor:
    torch.manual_seed(0)
    return stock.generate(ids, past_key_values=RoundingCache(DTYPES[kind]), **given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon_alibi"])
def test_same_tokens_as_a_cache_that_rounds(name: str, kind: str, mode: str) -> None:
    """Would break: rounding twice or not at all, or numbers read as codes; also where keys are gathered (Falcon)."""
    stock = build(name)
    model = hf_paged.patch(copy.deepcopy(stock), kv_cache_dtype=kind, block_size=4, num_blocks=128)
    ids = random_ids(2, 13)
    given = {"max_new_tokens": 12} | MODES[mode]
    reference = expected(stock, kind, ids, **given)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, **given), reference)
    model.paged.check_invariants()


@pytest.mark.parametrize("kind", DTYPES)
def test_rounding_matters(kind: str) -> None:
    """Would break: nothing but the tests above, which would compare the same unrounded numbers."""
    stock, ids = build("llama"), random_ids(8, 13)
    assert not torch.equal(stock.generate(ids, max_new_tokens=12), expected(stock, kind, ids, max_new_tokens=12))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_and_prefix_hits(preemption: str) -> None:
    """Would break: blocks of codes that are swapped, copied or found again as something else."""
    stock = build("llama")
    model = hf_paged.patch(
        copy.deepcopy(stock), kv_cache_dtype="fp8_e4m3", block_size=4, num_blocks=24, preemption=preemption
    )
    prompts = [random_ids(1, 9, seed=seed) for seed in range(6)]
    reference = [expected(stock, "fp8_e4m3", ids, max_new_tokens=40)[0, 9:].tolist() for ids in prompts]
    for _ in range(2):
        outputs = model.paged.generate([ids[0].tolist() for ids in prompts], max_new_tokens=40)
        assert [output.token_ids for output in outputs] == reference
    stats = model.paged.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hit_tokens > 0
    assert (stats.num_swapped_out > 0) == (preemption == "swap")


def test_a_pool_of_half_the_size() -> None:
    sizes = {}
    for kind in ("auto", "fp8"):
        model = hf_paged.patch(build("llama").bfloat16(), kv_cache_dtype=kind, num_blocks=8)
        model.generate(random_ids(1, 5), max_new_tokens=2)
        sizes[kind] = (model.paged.bytes_per_block, model.paged.core.kv_cache.tensor.nbytes)
    assert sizes["auto"] == tuple(2 * size for size in sizes["fp8"])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", DTYPES)
def test_kernels_agree_with_plain_torch(kind: str, device: str) -> None:
    results = []
    for backend in ("triton", "torch"):
        settings = {"kv_cache_dtype": kind, "attention_backend": backend, "block_size": 4, "num_blocks": 64}
        model = hf_paged.patch(build("llama").to(device), **settings)
        results.append(model.generate(random_ids(2, 9).to(device), max_new_tokens=5))
        assert model.paged.core.pool.attention.backend.name == backend
    assert torch.equal(*results)


def test_a_model_that_the_kernels_cannot_serve() -> None:
    """Would break: the message, or the blocks and the lock of a pool that could not be made."""
    model = hf_paged.patch(build("llama").double(), attention_backend="triton", num_blocks=8)
    for _ in range(2):
        with pytest.raises(ValueError, match=r'attention_backend="triton" .*float64'):
            model.generate(random_ids(1, 5), max_new_tokens=2)
    model.float()
    assert model.generate(random_ids(1, 5), max_new_tokens=2).shape == (1, 7)
    assert model.paged.stats().num_free_blocks == 8
