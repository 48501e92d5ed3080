"""The differential suite's essentials on a CUDA device (`make gpu`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from helpers.models import build, ragged_batch, random_ids
from helpers.state_models import build_state_model
from helpers.waiting import at_once
from hf_paged.memory.swap_space import SwapSpace
from hf_paged.model.gpu_layers import GPULayer
from hf_paged.model.step_memory import StepMemory
from hf_paged.testing import compare_generations

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
    batch = {name: value.to("cuda") for name, value in ragged_batch((11, 7, 2)).items()}
    results = []
    for model in (stock, paged):
        torch.manual_seed(0)
        results.append(model.generate(**batch, max_new_tokens=12, **MODES[mode]))
    assert results[1].device.type == "cuda"
    assert torch.equal(results[0], results[1])
    assert paged.paged.core.kv_cache.tensor.device.type == "cuda"
    paged.paged.check_invariants()
    assert paged.paged.stats().num_free_blocks == 256


def test_pool_follows_the_model() -> None:
    model = hf_paged.patch(build("llama"), num_blocks=32)
    ids = random_ids(1, 5)
    on_cpu = model.generate(ids, max_new_tokens=5)
    model.to("cuda")
    on_gpu = model.generate(ids.to("cuda"), max_new_tokens=5)
    assert torch.equal(on_cpu, on_gpu.cpu())
    assert model.paged.core.kv_cache.tensor.device.type == "cuda"


@pytest.mark.own_process
def test_pool_is_sized_from_free_memory() -> None:
    model = hf_paged.patch(build("llama").to("cuda"), memory_fraction=0.0001)
    free = torch.cuda.mem_get_info()[0]
    model.generate(random_ids(1, 5).to("cuda"), max_new_tokens=5)
    stats = model.paged.stats()
    assert 0 < stats.num_blocks * model.paged.bytes_per_block <= 0.00011 * free


@pytest.mark.own_process
def test_pool_leaves_room_for_a_step() -> None:
    model = hf_paged.patch(build("llama").to("cuda"), memory_fraction=1.0, block_size=4)
    measured = StepMemory(model.paged.core.bound, model.paged.config).activation_bytes(2048)
    assert 0 < measured < 2**30
    outputs = model.paged.generate([random_ids(1, 60)[0].tolist()] * 64, max_new_tokens=4)
    assert len(outputs) == 64
    model.paged.release()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_requests_under_pressure(preemption: str) -> None:
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
    stock = build("llama").to("cuda")
    paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=256)
    ids = [random_ids(1, 9, seed=number).to("cuda") for number in range(8)]
    arguments: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"logits_processor": [lambda ids, scores: scores]}]

    def call(number: int) -> torch.Tensor:
        # Half of them on a stream of their own, on which the prompt is made late.
        stream = torch.cuda.Stream() if number % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            prompt = ids[number] * 0
            torch.cuda._sleep(50_000_000)
            prompt += ids[number]
            return paged.generate(prompt, max_new_tokens=16, **arguments[number % 3]).cpu()

    for number, found in enumerate(at_once(call, range(8))):
        expected = stock.generate(ids[number], max_new_tokens=16, **arguments[number % 3])
        assert torch.equal(found, expected.cpu())
    assert paged.paged.stats().num_steps < 8 * 16


def test_swapped_blocks_survive_what_follows_at_once() -> None:
    """Breaks if the copy stream doesn't wait for the writes before it, or the writes after it not for the copies."""
    pool = torch.zeros(64, 1 << 20, device="cuda")  # 4 MiB a block: copies take long enough to be overtaken
    space = SwapSpace(pool, 64)
    for turn in range(3):
        torch.cuda._sleep(10_000_000)
        pool.copy_(torch.arange(64.0, device="cuda")[:, None] + 100 * turn)
        space.swap_out([(block, 63 - block) for block in range(64)])
        pool.fill_(-1)
        space.swap_in([(block, block) for block in range(64)])
        expected = torch.arange(63.0, -1, -1, device="cuda")[:, None] + 100 * turn
        assert bool((pool == expected).all())
    torch.cuda.synchronize()
    assert [blocks for blocks, _ in space.finished()] == [64] * 6
    assert space.finished() == []


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_auto_takes_the_kernels(name: str) -> None:
    model = hf_paged.patch(build(name).to("cuda"), num_blocks=64)
    model.generate(random_ids(1, 5).to("cuda"), max_new_tokens=3)
    assert model.paged.core.pool.attention.backend.name == "triton"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_up_to_near_ties(dtype: torch.dtype) -> None:
    stock = build("llama").to("cuda", dtype)
    paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=256)
    ids = random_ids(3, 40).to("cuda")
    ours, theirs = (model.generate(ids, max_new_tokens=24) for model in (paged, stock))
    comparison = compare_generations(stock, ids, theirs, ours)
    assert comparison, comparison.summary


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).base_model.model.eval()


def _calls(model: Any, **arguments: Any) -> Any:
    """Prompts of many lengths, in chunks, beside rows that decode: most steps are mixed."""
    prompts = [random_ids(1, 3 + 11 * number, seed=number)[0].tolist() for number in range(6)]
    if not hasattr(model, "paged"):
        given = [torch.tensor([prompt], device="cuda") for prompt in prompts]
        return [model.generate(ids, max_new_tokens=12, **arguments)[0, ids.shape[1] :].tolist() for ids in given]
    return [output.token_ids for output in model.paged.generate(prompts, max_new_tokens=12, **arguments)]


def _call(model: Any, **arguments: Any) -> Any:
    torch.manual_seed(0)
    ids = torch.cat([random_ids(1, 6, seed=3)] * 3, dim=1).to("cuda")  # with something to look up
    return [model.generate(ids, max_new_tokens=16, **arguments)[0].tolist()]


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "greedy": (lambda: build("llama"), _call),
    "sampling": (lambda: build("llama"), lambda model: _call(model, do_sample=True, top_k=20, top_p=0.9)),
    "hybrid": (lambda: build_state_model("lfm2"), _call),
    "mixed": (lambda: build("llama"), _calls),
    "lookup": (lambda: build("llama"), lambda model: _call(model, prompt_lookup_num_tokens=3)),
    "lora": (lambda: _lora(build("llama")), _call),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_step(kind: str) -> None:
    """As stock, with graphs of what the rules say can be recorded: a recording that fails is a fault on a GPU."""
    make, call = KINDS[kind]
    stock = make().to("cuda")
    settings = {"block_size": 4, "num_blocks": 256, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    paged = hf_paged.patch(copy.deepcopy(stock), **settings)
    done, core = paged.paged.warm_up(), paged.paged.core
    print(kind, done, *paged.paged.explain(), sep="\n")
    assert (done.no_graphs is None) == (core.bound.why_unrecorded is None), done.no_graphs
    assert call(stock) == call(paged)
    graphs = core.runner.graphs.held
    assert graphs is None or graphs.reason is None
    paged.paged.check_invariants()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_takes_a_detour(dtype: torch.dtype) -> None:
    """Layers, rotary embeddings and draws are those that the kernels compute: else all is right, and slow."""
    model = hf_paged.patch(build("llama").to("cuda", dtype), block_size=4, num_blocks=256, max_num_seqs=4)
    model.generate(random_ids(2, 9).to("cuda"), max_new_tokens=8, do_sample=True, top_k=20)
    core = model.paged.core
    whole = [one for one in core.layers.found if isinstance(one, GPULayer)]
    assert len(whole) == model.config.num_hidden_layers and all(one.is_same for one in whole)
    assert core.runner.graphs.num_replays > 0
    assert [str(one) for one in model.paged.explain() if one.what in ("steps", "layers", "sampling")] == []
