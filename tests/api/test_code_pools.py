"""Pools of 8 bits: the oracle is stock `generate()` over a cache that rounds what it stores."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import hf_paged
from helpers.models import build, random_ids, tiny_lm, tiny_tokenizer
from helpers.state_models import build_state_model
from hf_paged import is_supported
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.testing import check_exact

DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
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
        return super().update(*(rounded(states, self.dtype) for states in (key, value)), *args, **kwargs)


def rounded(states: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.int8:
        steps = states.float().abs().amax(-1, keepdim=True) / 127
        return ((states / steps).round() * steps).nan_to_num().to(states.dtype)  # of zeros: zeros
    largest = torch.finfo(dtype).max
    return states.clamp(-largest, largest).to(dtype).to(states.dtype)


def expected(stock: Any, kind: str, ids: Tensor, **given: Any) -> Tensor:
    torch.manual_seed(0)
    return stock.generate(ids, past_key_values=RoundingCache(DTYPES[kind]), **given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon_alibi", "gpt_oss"])
def test_same_tokens_as_a_cache_that_rounds(name: str, kind: str, mode: str) -> None:
    """Would break: rounding twice or not at all, or numbers read as codes; also where keys are gathered (Falcon), or
    windows give blocks back.
    """
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


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_and_prefix_hits(preemption: str, kind: str) -> None:
    """Would break: blocks of codes that are swapped, copied or found again as something else."""
    stock = build("llama")
    model = hf_paged.patch(
        copy.deepcopy(stock), kv_cache_dtype=kind, block_size=4, num_blocks=24, preemption=preemption
    )
    prompts = [random_ids(1, 9, seed=seed) for seed in range(6)]
    reference = [expected(stock, kind, ids, max_new_tokens=40)[0, 9:].tolist() for ids in prompts]
    # The last call finds blocks, whatever order others ended in.
    for some in (prompts, prompts, prompts[:1], prompts[:1]):
        outputs = model.paged.generate([ids[0].tolist() for ids in some], max_new_tokens=40)
        assert [output.token_ids for output in outputs] == reference[: len(some)]
    stats = model.paged.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hit_tokens > 0
    assert (stats.num_swapped_out > 0) == (preemption == "swap")


def test_a_pool_of_half_the_size() -> None:
    sizes = {}
    for kind in ("auto", "fp8", "int8"):
        model = hf_paged.patch(build("llama").bfloat16(), kv_cache_dtype=kind, num_blocks=8)
        model.generate(random_ids(1, 5), max_new_tokens=2)
        sizes[kind] = (model.paged.bytes_per_block, model.paged.core.kv_cache.tensor.nbytes)
    assert sizes["auto"] == tuple(2 * size for size in sizes["fp8"])
    assert sizes["auto"] == tuple(2 * size * 16 // (16 + 4) for size in sizes["int8"]), "heads of 16 and a scale"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_of_real_heads(head_dim: int) -> None:
    """Scales included, and also where layers differ in their windows; as many more blocks fit into the same memory."""
    config = hf.Gemma2Config(
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        hidden_size=32,
        vocab_size=64,
    )
    sizes = []
    for kind in ("bfloat16", "int8"):
        traits = is_supported(AutoModelForCausalLM.from_config(config)).traits
        dtype = getattr(torch, kind)
        groups = CacheGroups.of(traits.stored_in(dtype))
        sizes.append(len(groups.sizes) * traits.geometry(groups, dtype, 16).bytes_per_block(16))
    assert sizes[1] / sizes[0] == (head_dim + 4) / (2 * head_dim) <= 0.54


REFUSED = {
    "deepseek_v3": "layers cache latents",
    "mimo_v2_flash": "keys and values differ in width",
    "narrow": "head dim is 6, no multiple of 4",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_int8_does_not_take(name: str) -> None:
    """Refused by `patch`, which leaves the model as it was."""
    narrow = hf.LlamaConfig(
        hidden_size=24, intermediate_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64
    )
    model = build(name) if name != "narrow" else AutoModelForCausalLM.from_config(narrow)
    with pytest.raises(ValueError, match=f'^kv_cache_dtype="int8" .*{REFUSED[name]}.*; use "fp8" or "auto"$'):
        hf_paged.patch(model, kv_cache_dtype="int8")
    assert not hasattr(model, "paged") and type(model).__module__.startswith("transformers.")
    hf_paged.patch(model, kv_cache_dtype="fp8")


def test_hybrids_keep_their_states_as_they_are() -> None:
    """Would break: states that are laid out over pages of another width, or rounded."""
    stock = build_state_model("qwen3_next")
    model = hf_paged.patch(copy.deepcopy(stock), kv_cache_dtype="int8", num_blocks=64)
    ids = random_ids(2, 13)
    layout = model.paged.core.pool.state_layout
    assert layout is not None and layout.num_bytes >= sum(
        spec.num_bytes(torch.float32) for spec in model.paged.traits.states.values()
    )
    cache = DynamicCache(config=stock.config)
    update = cache.update

    def rounding(key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return update(rounded(key, torch.int8), rounded(value, torch.int8), *args, **kwargs)

    cache.update = rounding
    reference = stock.generate(ids, past_key_values=cache, max_new_tokens=12)
    assert torch.equal(model.generate(ids, max_new_tokens=12), reference)
    model.paged.check_invariants()


def test_the_keys_of_a_cache_that_is_read() -> None:
    """In the model's dtype, for callers that read a cache; of the first layer, whose keys follow from none rounded."""
    found = []
    for kind in ("int8", "auto"):
        model = hf_paged.patch(build("llama").bfloat16(), kv_cache_dtype=kind, num_blocks=16)
        cache = hf_paged.PagedCache(model)
        with torch.no_grad():
            model(random_ids(1, 9), past_key_values=cache)
        found.append((cache.layers[0].keys, cache.layers[0].values))
    for own, exact in zip(*found):
        assert own.dtype is torch.bfloat16 and not torch.equal(own, exact)
        steps = exact.float().abs().amax(-1, keepdim=True) / 127
        assert bool(((own.float() - exact.float()).abs() <= 0.501 * steps + exact.float().abs() / 256).all())


def test_perplexity_of_the_embedded_model() -> None:
    """Of texts that it wrote; what a scale for more than one token and head would cost shows here."""
    stock = tiny_lm()
    prompts = [
        tiny_tokenizer()(text)["input_ids"] for text in ("The", "She", "It was", "At length", "In the morning", "My")
    ]
    per_token: dict[str, float] = {}
    for kind in ("auto", "int8", "fp8_e4m3"):
        with hf_paged.patched(stock, kv_cache_dtype=kind, num_blocks=256):
            if kind == "auto":
                torch.manual_seed(0)
                given = {"do_sample": True, "top_k": 0, "max_new_tokens": 150, "eos_token_id": None}
                texts = [each.prompt_token_ids + each.token_ids for each in stock.paged.generate(prompts, **given)]
            scores = stock.paged.score(texts, first=1)
        per_token[kind] = -sum(token.logprob for text in scores for token in text) / sum(map(len, scores))
    worse = {kind: math.exp(own - per_token["auto"]) - 1 for kind, own in per_token.items()}
    assert 0 < abs(worse["int8"]) < 0.001 and abs(worse["int8"]) < abs(worse["fp8_e4m3"]) < 0.004


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_are_exact(kind: str) -> None:
    """A row's bits depend on that row alone: each token and head is rounded by itself."""
    report = check_exact(build("llama"), [list(range(3, 40)), [5, 6, 7]], progress=False, kv_cache_dtype=kind)
    assert report, report


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", DTYPES)
def test_kernels_agree_with_plain_torch(kind: str, device: str) -> None:
    results = []
    for backend in ("triton", "torch", *(["cpu"] if device == "cpu" else [])):
        settings = {"kv_cache_dtype": kind, "attention_backend": backend, "block_size": 4, "num_blocks": 64}
        model = hf_paged.patch(build("llama").to(device), **settings)
        results.append(model.generate(random_ids(2, 9).to(device), max_new_tokens=5))
        assert model.paged.core.pool.attention.backend.name == backend
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_model_that_the_kernels_cannot_serve() -> None:
    """Would break: the message, or the blocks and the lock of a pool that could not be made."""
    model = hf_paged.patch(build("llama").double(), attention_backend="triton", num_blocks=8)
    for _ in range(2):
        with pytest.raises(ValueError, match=r'attention_backend="triton" .*float64'):
            model.generate(random_ids(1, 5), max_new_tokens=2)
    model.float()
    assert model.generate(random_ids(1, 5), max_new_tokens=2).shape == (1, 7)
    assert model.paged.stats().num_free_blocks == 8
