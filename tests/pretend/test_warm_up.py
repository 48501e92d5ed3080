"""`warm_up()`: nothing is compiled while requests wait, no decode step recorded, and nothing else has changed."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pretend_cuda
import pytest
import torch

import hf_paged
from helpers.models import MODELS, build, random_ids
from helpers.state_models import STATE_MODELS, build_state_model
from hf_paged.attention import shared_prefix
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.kernels import shared_decode

from .conftest import watched

CUDA = torch.device("cuda", 0)
SETTINGS = {"block_size": 4, "num_blocks": 10, "max_num_seqs": 3, "max_num_batched_tokens": 16}
ESSENTIAL = ("gpt_oss", "deepseek_v3", "mamba2")  # sinks, latents, states


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretend_cuda, "_compiled", set())


def serve(model: Any) -> None:
    """Some of everything that runs over the pool."""
    ids, config = random_ids(2, 9).to(CUDA), {"max_new_tokens": 3, "eos_token_id": None}
    model.generate(ids, do_sample=True, top_k=5, top_p=0.9, **config)
    model.generate(ids[:1], num_beams=3, do_sample=False, **config)
    model.generate(random_ids(1, 30).to(CUDA), do_sample=False, **config)  # in chunks
    model.generate(random_ids(1, 31).to(CUDA), do_sample=False, **config)  # behind a prefix
    prompts = [random_ids(1, 7 + number, seed=number)[0].tolist() for number in range(3)]
    model.paged.generate(prompts, do_sample=False, eos_token_id=None, max_new_tokens=9)


@pytest.mark.parametrize(
    ("name", "layers", "settings"),
    [
        ("llama", 1, {}),
        ("llama", 1, {"cuda_graphs": False}),
        pytest.param("gemma2", 2, {"num_blocks": 16}, marks=pytest.mark.slow),  # with windows and without
    ],
)
def test_nothing_is_compiled_afterwards(
    name: str, layers: int, settings: dict[str, Any], nothing_compiled: None
) -> None:
    model = hf_paged.patch(
        build(name, layers=layers).to(CUDA), preemption="swap", swap_space_gib=0.01, **SETTINGS | settings
    )
    with pretend_cuda.watch() as seen:
        done = model.paged.warm_up()
    assert done.backend == "triton"
    # That of a small copy, by which it is found out whether there are kernels here, is not counted.
    assert 0 < done.num_kernels <= len(seen.of("compile")) <= done.num_kernels + 1
    if "cuda_graphs" in settings:
        assert (done.num_graphs, done.graph_bytes, done.no_graphs) == (0, 0, "cuda_graphs=False")
    else:
        assert done.num_graphs == 3 == len(seen.of("capture")) and done.graph_bytes > 0 and done.no_graphs is None
    with pretend_cuda.watch() as seen:
        serve(model)
    assert model.paged.stats().num_swapped_out or name != "llama", "its pool is too small for all"
    assert model.paged.stats().prefix_cache_hit_tokens
    assert not seen.where("compile")
    assert bool(seen.of("replay")) == ("cuda_graphs" not in settings) == bool(seen.of("capture"))
    model.paged.check_invariants()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ESSENTIAL else pytest.mark.slow)
        for name in (*MODELS, *STATE_MODELS)
        if name != "llama"
    ],
)
def test_nothing_is_compiled_afterwards_of_any_family(name: str, nothing_compiled: None) -> None:
    build_one = build_state_model if name in STATE_MODELS else build
    model = hf_paged.patch(build_one(name).to(CUDA), **SETTINGS | {"num_blocks": 60})
    done = model.paged.warm_up()
    if not model.paged.core.traits.runs_packed or done.backend == "torch":
        assert done.num_kernels == 0 and name not in ESSENTIAL, "these steps are not known beforehand"
        return
    assert done.num_kernels > 0
    with pretend_cuda.watch() as seen:
        serve(model)
    assert not seen.where("compile")
    model.paged.check_invariants()


def test_reading_together_is_compiled_beforehand(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that share a prompt, in steps that are not recorded: stock's tokens, and no step waits."""
    monkeypatch.setattr(shared_prefix, "LEAST_TOKENS", 4)
    monkeypatch.setattr(AttentionMetadata, "least_saved", -math.inf)
    stock = build("llama", layers=1).to(CUDA)
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS | {"num_blocks": 40, "cuda_graphs": False})
    model.paged.warm_up()
    arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 3, "eos_token_id": None}
    ids = random_ids(1, 37).to(CUDA)
    torch.manual_seed(0)
    expected = stock.generate(ids, **arguments)
    torch.manual_seed(0)
    with watched() as own, mock.patch.object(shared_decode, "shared_decode", wraps=shared_decode.shared_decode) as spy:
        assert torch.equal(model.generate(ids, **arguments), expected)
    assert spy.call_count >= 2 and not own.seen.where("compile")
    own.assert_clean(entries=1)


def test_what_stays_as_it_was() -> None:
    """Beside a kept cache and cached prefixes; called twice, and beside a request that runs."""
    stock = build("llama", layers=1).to(CUDA)
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS)
    ids = random_ids(1, 17).to(CUDA)
    greedy = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    expected = stock.generate(ids, **greedy)
    assert torch.equal(model.generate(ids, **greedy), expected)
    cache = hf_paged.PagedCache(model)
    model(ids[:, :9], past_key_values=cache)
    pool = model.paged.core.kv_cache.tensor
    before = pool.clone(), model.paged.stats(), torch.cuda.get_rng_state(), torch.get_rng_state()
    picture = model.paged.snapshot()
    request = model.paged.submit(ids[0].tolist(), **greedy)
    first = model.paged.warm_up()
    assert request.result(60).token_ids == expected[0, 17:].tolist()
    second = model.paged.warm_up()
    assert second.num_graphs >= first.num_graphs >= 3 and second.graph_bytes >= first.graph_bytes
    assert model.paged.core.runner.graphs.held.sizes == [1, 2, 3]
    assert torch.equal(torch.cuda.get_rng_state(), before[2]) and torch.equal(torch.get_rng_state(), before[3])
    assert not pool[-1].any()
    table = model.paged.core.manager.block_table(cache.sequences[0].seq_id)
    assert torch.equal(pool[table], before[0][table])
    logits = model(ids[:, 9:], past_key_values=cache).logits
    torch.testing.assert_close(logits, stock(ids).logits[:, 9:].detach(), rtol=1e-4, atol=1e-5)
    del picture


def test_alone_it_changes_no_number() -> None:
    model = hf_paged.patch(build("llama", layers=1).to(CUDA), **SETTINGS)
    model.generate(random_ids(2, 9).to(CUDA), max_new_tokens=4, eos_token_id=None)
    stats, picture = model.paged.stats(), model.paged.snapshot()
    assert model.paged.warm_up().num_graphs == 3
    assert model.paged.stats() == stats and model.paged.snapshot() == picture


def test_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    """In `patch()`; a model whose steps can't be recorded is warmed up all the same."""
    model = hf_paged.patch(build("mixtral", layers=1).to(CUDA), warm_up=True, **SETTINGS)
    with pretend_cuda.watch() as seen:
        model.generate(random_ids(1, 5).to(CUDA), max_new_tokens=3, eos_token_id=None)
    assert not seen.where("compile", "capture")
    done = model.paged.warm_up()
    assert done.num_graphs == 0 and done.no_graphs is not None and "waits for the device" in done.no_graphs


def test_of_weights_that_have_moved() -> None:
    """What it records is what the next request replays, also if the weights lay elsewhere at the last one."""
    model = hf_paged.patch(build("llama", layers=1).to(CUDA), **SETTINGS | {"max_num_seqs": 1})
    ids, config = random_ids(1, 5).to(CUDA), {"max_new_tokens": 2, "eos_token_id": None}
    model.generate(ids, **config)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    with pretend_cuda.watch() as seen:
        assert model.paged.warm_up().num_graphs == len(seen.of("capture")) == 1
    with pretend_cuda.watch() as seen:
        model.generate(ids, **config)
    assert seen.of("replay") and len(seen.of("capture")) <= 1, "that of a prompt"


def test_in_any_mode() -> None:
    """What it makes is for calls of all threads, whatever mode this one is in."""
    model = hf_paged.patch(build("llama", layers=1).to(CUDA), **SETTINGS | {"max_num_seqs": 1})
    with torch.inference_mode(), torch.device(CUDA), torch.autocast("cuda", dtype=torch.bfloat16):
        done = model.paged.warm_up()
    assert done.num_graphs == 1
    tensors = [model.paged.core.kv_cache.tensor, model.paged.core.runner.graphs.held._logits[0]]
    assert not any(tensor.is_inference() for tensor in tensors) and tensors[1].dtype == torch.float32
    with pretend_cuda.watch() as seen:
        model.generate(random_ids(1, 5).to(CUDA), max_new_tokens=2, eos_token_id=None)
    assert seen.of("replay") and not seen.of("compile")
