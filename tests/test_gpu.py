"""The differential suite's essentials on a CUDA device (`make gpu`)."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from models import build, random_ids

import hf_paged

pytestmark = pytest.mark.gpu

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.fixture(autouse=True)
def _exact_float32() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2", "falcon_alibi"])
def test_same_tokens_on_cuda(name: str, mode: str) -> None:
    """Breaks if a tensor of the step is made on the host's device, or a draw comes from another generator."""
    stock = build(name).to("cuda")
    paged = hf_paged.patch(copy.deepcopy(stock), block_size=4, num_blocks=256)
    ids = random_ids(3, 11).to("cuda")
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, :9] = 0
    results = []
    for model in (stock, paged):
        torch.manual_seed(0)
        results.append(model.generate(ids, attention_mask=mask, max_new_tokens=12, **MODES[mode]))
    assert results[1].device.type == "cuda"
    assert torch.equal(results[0], results[1])
    assert paged.paged.kv_cache.tensor.device.type == "cuda"
    paged.paged.check_invariants()
    assert paged.paged.stats().num_free_blocks == 256


def test_pool_follows_the_model() -> None:
    """Breaks if the pool stays on the device the model was on when it was patched."""
    model = hf_paged.patch(build("llama"), num_blocks=32)
    ids = random_ids(1, 5)
    on_cpu = model.generate(ids, max_new_tokens=5)
    model.to("cuda")
    on_gpu = model.generate(ids.to("cuda"), max_new_tokens=5)
    assert torch.equal(on_cpu, on_gpu.cpu())
    assert model.paged.kv_cache.tensor.device.type == "cuda"


def test_pool_is_sized_from_free_memory() -> None:
    """Breaks if `num_blocks=None` ignores `memory_fraction` of the device."""
    model = hf_paged.patch(build("llama").to("cuda"), memory_fraction=0.0001)
    free = torch.cuda.mem_get_info()[0]
    model.generate(random_ids(1, 5).to("cuda"), max_new_tokens=5)
    stats = model.paged.stats()
    assert 0 < stats.num_blocks * model.paged.bytes_per_block <= 0.00011 * free


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_requests_under_pressure(preemption: str) -> None:
    """Breaks if blocks swapped through pinned memory, or rows of many requests, come back as others."""
    stock = build("llama").to("cuda")
    paged = hf_paged.patch(copy.deepcopy(stock), block_size=4, num_blocks=40, preemption=preemption)
    prompts = [random_ids(1, 5 + number, seed=number)[0].tolist() for number in range(16)]
    expected = [
        stock.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=24)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    outputs = paged.paged.generate(prompts, max_new_tokens=24)
    assert [output.token_ids for output in outputs] == expected
    stats = paged.paged.stats()
    assert stats.num_preemptions > 0 and stats.num_free_blocks == 40
    assert (stats.num_swapped_out > 0) == (preemption == "swap")


def test_threads_share_steps() -> None:
    """Breaks if a caller's stream or device is not the worker's."""
    stock = build("llama").to("cuda")
    paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=256)
    ids = [random_ids(1, 9, seed=number).to("cuda") for number in range(8)]
    results: dict[int, torch.Tensor] = {}
    arguments: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"logits_processor": [lambda ids, scores: scores]}]

    def call(number: int) -> None:
        results[number] = paged.generate(ids[number], max_new_tokens=16, **arguments[number % 3])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        assert torch.equal(results[number], stock.generate(ids[number], max_new_tokens=16, **arguments[number % 3]))
    assert paged.paged.stats().num_steps < 8 * 16
