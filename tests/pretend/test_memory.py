"""What a pool sized from free memory leaves to the steps, beside what they take."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pretend_cuda
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

import hf_paged
from helpers.models import build, random_ids
from hf_paged.model.step_memory import StepMemory, graph_bytes, input_bytes, sampler_bytes, workspace_bytes
from hf_paged.sampling.processors import processor_kinds
from hf_paged.sampling.random import SamplingNoise
from hf_paged.sampling.sampler import RowSampler, SamplingBatch, sample_tokens

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _nothing_else() -> None:
    """What earlier tests left is not to be freed while memory is counted."""
    gc.collect()


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model like Llama-3.1-8B, 256 rows in bfloat16: 1.5 GB to choose tokens."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert sampler_bytes(256, 128_256, 2) == 256 * 128_256 * 46 == 1_510_342_656
    # Of 2048 tokens, such a model has 0.3 GB at a time; the logits of 256 rows and of 512 drafts.
    graphs = graph_bytes(3 * 10**8, 768, 128_256, 2) + input_bytes(2048, 256, 8192)
    assert graphs == 375_000_000 + 197_001_216 + 573_440 + 16_777_216 < 2**31
    assert workspace_bytes(CUDA, 3) == 3 * 32 * 2**20
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert workspace_bytes(CUDA, 1) == 8_519_680
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert workspace_bytes(CUDA, 2) == 2 * 16 * 8 * 1024


@pytest.mark.parametrize(
    ("processor", "least"), [(TypicalLogitsWarper(0.9), 0.9), (TopPLogitsWarper(0.9), 0.5), (TopKLogitsWarper(9), 0.3)]
)
def test_the_sampler(processor: object, least: float) -> None:
    """It takes what is reserved, at most and nearly."""
    rows, vocab_size = 16, 4096
    logits = torch.randn(rows, vocab_size, device=CUDA)
    noise = SamplingNoise(torch.Generator(CUDA).manual_seed(0), rows)
    sampler = RowSampler([processor], noise, processor_kinds([processor]))
    order = list(range(rows))[::-1]  # not as the logits are: they are copied
    before = torch.cuda.memory_allocated() - logits.nbytes
    torch.cuda.reset_peak_memory_stats()
    sample_tokens([SamplingBatch(sampler, list(range(rows)), [0] * rows, order, 0)], logits)
    taken = torch.cuda.max_memory_allocated() - before
    assert least <= taken / sampler_bytes(rows, vocab_size, 4) <= 1.01


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "opt", "mixtral", "gemma4", "deepseek_v3"])
def test_an_estimate_where_nothing_may_run(name: str) -> None:
    """It is no less than what the model's own code takes, and not far more; and none of it runs."""
    model = hf_paged.patch(build(name).to(CUDA), num_blocks=8, max_num_seqs=4)
    memory, estimates = StepMemory(model.paged.core.bound, model.paged.config), []
    measured = [memory.activation_bytes(num_tokens) for num_tokens in (16, 64)]
    ran: list[bool] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *_: ran.append(True))
    estimates = [memory.activation_bytes(num_tokens) for num_tokens in (16, 64)]
    assert memory.reserved_bytes(64, 4) > estimates[1] and not ran
    handle.remove()
    assert all(1 <= estimate / own < 4 for own, estimate in zip(measured, estimates, strict=True))


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).base_model.model


def _hooked(model: Any) -> Any:
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(("change", "fraction"), [(_lora, None), (_hooked, None), (lambda model: model, 0.3)])
def test_a_pools_share(change: Any, fraction: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is free less what steps take, whatever the model is made of; most of it where it is there to serve."""
    monkeypatch.setattr(pretend_cuda.memory, "free", 2**24)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    sizes = []
    for is_serving in (False, True):
        model = change(copy.deepcopy(build("llama"))).to(CUDA).eval()
        hf_paged.patch(model, memory_fraction=fraction, block_size=4, max_num_batched_tokens=64, cuda_graphs=False)
        model.generation_config.eos_token_id = 1
        core = model.paged.core
        free = 2**24 - StepMemory(core.bound, core.config).reserved_bytes(64, 4) - model.paged.bytes_per_block
        assert free < 2**24 - 2**18
        if is_serving:
            model.generate_batch([[3, 4, 5]], max_new_tokens=2)
        else:
            model.generate(random_ids(1, 5).to(CUDA), max_new_tokens=2)
        sizes.append(model.paged.stats().num_blocks * model.paged.bytes_per_block / free)
    assert sizes == pytest.approx([fraction or 0.5, fraction or 0.9], abs=1e-3)


@pytest.mark.parametrize("cuda_graphs", [None, False])
def test_the_steps(cuda_graphs: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take no more than what a pool of all of the rest leaves them, and that is not much more."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")  # there is none here
    model = build("llama")
    model.resize_token_embeddings(2048)  # as in other models, choosing tokens takes most
    monkeypatch.setattr(pretend_cuda.memory, "free", 2**20)
    settings = {"memory_fraction": 1.0, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    model = hf_paged.patch(model.to(CUDA), cuda_graphs=cuda_graphs, **settings)
    pool = model.paged.core.kv_cache.tensor.nbytes
    core = model.paged.core
    reserved = StepMemory(core.bound, core.config).reserved_bytes(64, 4)
    assert 0 <= 2**20 - reserved - pool < model.paged.bytes_per_block
    if cuda_graphs is None:  # whose memory is not used twice on this device
        memory = StepMemory(core.bound, replace(core.config, cuda_graphs=False))
        own = graph_bytes(memory.activation_bytes(64), 4, 2048, 4) + input_bytes(64, 4, -(-core.bound.max_context // 4))
        assert reserved - memory.reserved_bytes(64, 4) == own > 0
        return
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prompts = [random_ids(1, 20 + number, seed=number)[0].tolist() for number in range(4)]
    model.paged.generate(prompts, do_sample=True, typical_p=0.9, top_k=0, max_new_tokens=3)
    assert 0.4 * reserved < torch.cuda.max_memory_allocated() - before <= reserved
