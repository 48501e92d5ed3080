"""`warm_up()` where there is no GPU; the rest is in tests/pretend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import psutil
import pytest
import torch

import hf_paged
from helpers.models import MODELS, build, random_ids
from helpers.state_models import build_state_model
from hf_paged.engine.warm_up import rehearsals
from hf_paged.kernels import cpu_noise

SMALL = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 4}


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_on_cpu(backend: str) -> None:
    cpu_noise.load.cache_clear()
    model = hf_paged.patch(build("llama"), attention_backend=backend, warm_up=True, **SMALL)
    before = model.paged.stats()
    done = model.paged.warm_up()
    assert (done.backend, done.num_graphs, done.graph_bytes) == (backend, 0, 0)
    assert done.no_graphs == "CUDA graphs need a CUDA device, the model is on cpu"
    assert done.seconds > 0 and cpu_noise.load.cache_info().currsize == 1
    assert model.paged.stats() == before
    assert not model.paged.core.kv_cache.tensor.any(), "the null block is zeros again"
    ids = random_ids(2, 9)
    assert torch.equal(model.generate(ids, max_new_tokens=5), build("llama").generate(ids, max_new_tokens=5))


def test_memory_that_is_touched() -> None:
    """On CPU a pool costs what was written of it, unless asked for."""
    model = hf_paged.patch(build("llama"), num_blocks=2**15)
    cache = hf_paged.PagedCache(model)
    ids = random_ids(1, 9)
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=3)
    size = model.paged.bytes_per_block * 2**15
    assert size >= 64 << 20
    sizes = [psutil.Process().memory_info().rss]
    for touch in (False, True):
        model.paged.warm_up(touch)
        sizes.append(psutil.Process().memory_info().rss)
    assert sizes[1] - sizes[0] < size / 2 < 0.9 * size < sizes[2] - sizes[1]
    again = model.generate(expected, past_key_values=cache, max_new_tokens=3)
    assert torch.equal(again, build("llama").generate(expected, max_new_tokens=3))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_all_models(name: str) -> None:
    """Positions that a model has, in numbers that it takes; in one with attention of its own, nothing to do."""
    model = hf_paged.patch(build(name), **SMALL)
    done = model.paged.warm_up()
    assert ("own attention" in str(done.no_graphs)) == (not model.paged.traits.runs_packed)
    assert not model.paged.core.kv_cache.tensor.any()


@pytest.mark.parametrize("name", ["mamba", "mamba2", "lfm2", "zamba", "kimi_linear", "inkling"])
def test_models_with_states(name: str) -> None:
    """What rehearsals make of states is no request's."""
    stock = build_state_model(name)
    model = hf_paged.patch(copy.deepcopy(stock), warm_up=True, **SMALL)
    done = model.paged.warm_up()
    assert ("own attention" if name == "inkling" else "a CUDA device") in str(done.no_graphs)
    assert not model.paged.core.kv_cache.tensor.view(torch.uint8).any()
    ids = random_ids(2, 9)
    expected = stock.generate(ids, max_new_tokens=5)
    assert torch.equal(model.generate(ids, max_new_tokens=5), expected)
    model.paged.release()
    model.paged.warm_up()
    assert torch.equal(model.generate(ids, max_new_tokens=5), expected)


def test_a_model_that_raises() -> None:
    """`patch()` leaves it as it was."""
    model = build("llama")
    forward = model.forward

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not today")

    model.model.norm.forward = refuse
    with pytest.raises(RuntimeError, match="not today"):
        hf_paged.patch(model, warm_up=True, **SMALL)
    assert not hasattr(model, "paged") and model.forward == forward


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: build("llama"), "need a CUDA device, the model is on cpu"),
        (lambda: build("bloom"), "need attention over the pool, this model's own"),
    ],
)
def test_graphs_that_there_cannot_be(model: Callable[[], Any], reason: str) -> None:
    """In `patch()`, or else at the first decode step."""
    with pytest.raises(ValueError, match=f"cuda_graphs=True: CUDA graphs {reason}"):
        hf_paged.patch(model(), cuda_graphs=True, warm_up=True, **SMALL)
    patched = hf_paged.patch(model(), cuda_graphs=True, **SMALL)
    with pytest.raises(ValueError, match=f"cuda_graphs=True: CUDA graphs {reason}"):
        patched.generate(random_ids(1, 5), max_new_tokens=3, eos_token_id=None)
    with pytest.raises(ValueError, match=f"cuda_graphs=True: CUDA graphs {reason}"):
        patched.paged.warm_up()


@pytest.mark.parametrize(
    ("longest", "max_tokens", "max_rows"), [(1, 1, 1), (7, 3, 9), (4096, 2048, 256), (100, 999, 2)]
)
def test_rehearsals(longest: int, max_tokens: int, max_rows: int) -> None:
    steps = rehearsals(longest, max_tokens, max_rows)
    for lens in steps:
        news = [new for new, _ in lens]
        assert all(1 <= new <= length <= longest for new, length in lens)
        assert news == sorted(news), "decoding sequences come first"
        assert len(lens) <= max_rows or lens == steps[-1]
    decoded = [lens[0][1] for lens in steps if [new for new, _ in lens] == [1]]
    assert {1, longest} <= set(decoded) and all(b <= 2 * a for a, b in pairwise(decoded))
    prompts = [lens[0][0] for lens in steps if lens[0][0] > 1]
    assert not prompts or max(prompts) == min(longest, max_tokens)
