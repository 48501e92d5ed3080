"""Numbers that are none, in one request's keys and values: no other request is ever given them.

Attention multiplies the values that a token may not see by zero, and 0 x NaN is NaN: in a prompt, a bad token spoils
those *before* it, whose blocks other prompts begin with as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_paged
from helpers.models import MODELS, VOCAB, build, decoder_layers, random_ids
from helpers.pairs import OverlappingExecutor
from hf_paged.engine.executor import StepExecutor
from hf_paged.kernels.reference import FP8
from hf_paged.memory.kv_cache import KVCache, KVGeometry

PATIENCE = 60
BAD = VOCAB - 2
BLOCK = 4
BATCHED = [name for name, row in MODELS.items() if row.is_batched]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2, "eos_token_id": None}
EXECUTORS = (StepExecutor, OverlappingExecutor)


def spoiled(name: str, kind: str) -> PreTrainedModel:
    """A model with a token whose forward yields no numbers."""
    is_overflow = kind == "overflow"  # of the first layer, for the second to spread and the third to store
    layers = 3 if is_overflow and MODELS[name].config().num_hidden_layers < 3 else None
    model = build(name, layers=layers, dtype=torch.float16 if is_overflow else None)
    with torch.no_grad():
        row = model.get_input_embeddings().weight[BAD]
        if is_overflow:  # at the edge of float16, with a first layer that adds enough to fall over it
            row.copy_(row.sign() * torch.finfo(torch.float16).max)
            for parameter in decoder_layers(model)[0].parameters():
                parameter *= 4
        else:
            row.fill_(float(kind))
    return model


def prompts() -> tuple[list[int], list[list[int]]]:
    """A prompt with the bad token in it, and others that begin as it does."""
    ids = [min(token, BAD - 1) for token in random_ids(1, 24)[0].tolist()]
    return [*ids[:14], BAD, *ids[15:20]], [[*ids[:size], *reversed(ids[20:])] for size in (14, 9, 6, 12)]


def answers(engine: hf_paged.Engine, ids: list[list[int]]) -> list[list[int]]:
    return [engine.submit(own, **GREEDY).result(PATIENCE).token_ids for own in ids]


def check(name: str, kind: str, num_good: int = 4, executors: Any = EXECUTORS, **settings: Any) -> None:
    bad, good = prompts()
    good = good[:num_good]
    model = spoiled(name, kind)
    with torch.no_grad():
        assert not model(torch.tensor([bad])).logits[0, -1].isfinite().all()
    stock = [model.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in good]
    engine = hf_paged.patch(model, block_size=BLOCK, num_blocks=64, **settings).paged
    expected = answers(engine, good)
    if kind != "overflow":  # half precision has near ties
        assert expected == stock
    for executor in executors:
        engine.core.executor.__class__ = executor
        engine.reset_prefix_cache()
        spoils = answers(engine, [bad])
        hits = engine.stats().prefix_cache_hit_tokens
        assert answers(engine, good) == expected, "after it"
        engine.pause()
        engine.reset_prefix_cache()
        beside = [engine.submit(ids, **GREEDY) for ids in (bad, *good)]
        engine.resume()
        assert [request.result(PATIENCE).token_ids for request in beside] == [*spoils, *expected], "beside it"
        assert engine.stats().prefix_cache_hit_tokens >= hits + 16, "what is sound is shared"
        engine.check_invariants()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for number, name in enumerate(BATCHED)
        for kind in ("nan", ("inf", "overflow")[number % 2])
        if (name, kind) != ("bloom", "overflow")  # it norms its embeddings
    ],
)
def test_who_begins_alike_is_not_poisoned(name: str, kind: str) -> None:
    check(name, kind)


@pytest.mark.parametrize("settings", [{"attention_backend": "torch"}, {"max_num_batched_tokens": 10}])
def test_other_ways_to_compute_a_prompt(settings: dict[str, Any]) -> None:
    check("llama", "nan", **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled then")
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_interpreted_kernels() -> None:
    check("llama", "nan", num_good=2, executors=EXECUTORS[1:], attention_backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *FP8])
def test_what_is_finite(dtype: torch.dtype) -> None:
    kv_cache = KVCache(KVGeometry.uniform(2, 2, 16, dtype), 6, BLOCK, torch.device("cpu"), torch.float32)
    for value, block in ((float("nan"), 1), (float("inf"), 3), (torch.finfo(dtype).max, 4)):
        kv_cache.tensor[block, -1, 1, 1, 2, 3] = value
    is_finite = kv_cache.block_sums([5, 4, 3, 2, 1]).wait().isfinite().tolist()
    assert is_finite == [True, True, dtype is torch.float8_e4m3fn, True, False]  # e4m3 has no infinity
