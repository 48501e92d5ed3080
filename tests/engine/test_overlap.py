"""Steps that overlap: the next one is launched before the host knows the tokens of the one before.

On CPU nothing runs meanwhile, but everything else is what happens on a GPU: sequences scheduled with a token that only
the device knows, rows that ran one step too many, block hashes that follow later. `-m gpu` runs the same there, and
looks whether anything in a step waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MaxTimeCriteria,
    NoRepeatNGramLogitsProcessor,
)

import hf_paged
from helpers.models import EOS, MODELS, VOCAB, build, random_ids
from helpers.waiting import PATIENCE
from hf_paged.engine.executor import StepExecutor
from hf_paged.engine.kv_pool import KVPool
from hf_paged.model import runner, step_inputs, token_inputs
from hf_paged.sampling import sampler
from hf_paged.sampling.random import default_generator
from hf_paged.sampling.sampler import SampledTokens

GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
SAMPLING = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None}
ENDS = {"eos_token_id": [EOS, *range(40, 80)], "pad_token_id": 0}  # rows end all the time
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCHED = [name for name, row in MODELS.items() if row.is_batched]


def patch(name: str = "llama", device: str = "cpu", **settings: Any) -> Any:
    settings = {"num_blocks": 128, "block_size": 4, "use_async_batching": True} | settings
    return hf_paged.patch(build(name).to(device), **settings)


def check_idle(model: Any) -> None:
    engine = model.paged
    engine.check_invariants()
    with engine.core.worker.loop.exclusive():
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks and stats.num_running == 0
        assert not engine.core.executor.in_flight and not engine.core.executor.consumers
        assert all(table.num_rows == 0 for table in engine.core.executor._tables.values())


@contextmanager
def watched(model: Any) -> Iterator[list[str]]:
    """What the engine does, in order: "launch" and "collect"."""
    events: list[str] = []
    own = model.paged.core.executor
    launch, collect = own.launch, own.collect

    def launched(step: Any) -> None:
        launch(step)
        events.append("launch")

    def collected() -> None:
        events.append("collect")
        collect()

    own.launch, own.collect = launched, collected
    try:
        yield events
    finally:
        del own.launch, own.collect


def test_the_next_step_is_launched_before_the_last_ones_tokens_are_read() -> None:
    model = patch()
    with watched(model) as events:
        model.generate(random_ids(2, 5), **GREEDY | {"max_new_tokens": 6})
    assert events == ["launch", *["launch", "collect"] * 5, "collect"]
    assert model.paged.stats().num_steps == 6, "no step too many where the length is known"
    check_idle(model)


def test_one_step_too_many_where_the_end_is_not_known() -> None:
    model, ids = patch(), random_ids(1, 5)
    tokens = build("llama").generate(ids, **GREEDY)[0, 5:].tolist()
    end = tokens[4]
    expected = tokens[: tokens.index(end) + 1]
    with watched(model) as events:
        found = model.generate(ids, **GREEDY | {"eos_token_id": end})[0, 5:].tolist()
        check_idle(model)
    assert found == expected
    assert events.count("launch") == len(expected) + 1 == events.count("collect")


@pytest.mark.parametrize(
    ("setting", "device_type", "expected"),
    [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True), (False, "cuda", False)],
)
def test_where_steps_overlap(
    setting: bool | None, device_type: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patch(use_async_batching=setting)

    monkeypatch.setattr(KVPool, "kv_device", torch.device(device_type))
    assert model.paged.core.executor.overlaps is expected


def test_not_where_a_users_code_runs_in_the_model() -> None:
    """Would break: a hook that is shown a token of a row that has ended."""
    model, ids = patch(), random_ids(1, 6)
    given = GREEDY | {"max_new_tokens": 40}
    shown: list[int] = []
    with watched(model) as events:
        first = model.paged.submit(ids, **given)
        hook = hf_paged.packed_hook(lambda module, args, output: shown.append(args[0].shape[1]))
        handle = model.model.layers[0].register_forward_hook(hook)
        assert not model.paged.core.executor.overlaps
        tokens = first.result(PATIENCE).token_ids
        shown.clear()
        assert len(model.paged.submit(ids, **given).result(PATIENCE).token_ids) == len(shown) == 40
        handle.remove()
    assert tokens == build("llama").generate(ids, **given)[0, 6:].tolist()
    assert events.count("launch") == events.count("collect")
    check_idle(model)


def test_adapters_change_nothing_but_their_own_layers() -> None:
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0]}

    def tuned() -> Any:
        model = peft.get_peft_model(build("llama"), peft.LoraConfig(**settings), adapter_name="one")
        model.add_adapter("two", peft.LoraConfig(**settings))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator)
        return model.eval()

    stock, model, ids = tuned(), tuned(), random_ids(2, 6)
    inner = hf_paged.patch(model, num_blocks=128, block_size=4, use_async_batching=True).get_base_model()
    texts = []
    for name in ("one", "two", "one"):
        for one in (stock, model):
            one.set_adapter(name)
        with watched(inner) as events:
            texts.append(model.generate(input_ids=ids, **GREEDY))
        assert torch.equal(texts[-1], stock.generate(input_ids=ids, **GREEDY))
        assert events[:3] == ["launch", "launch", "collect"]
    assert not torch.equal(texts[0], texts[1])
    core, (tuned_layer, plain_layer) = inner.paged.core, inner.model.layers
    found = {override.module for override in core.layers.found}
    assert tuned_layer.mlp in found and tuned_layer.self_attn.k_proj in found
    assert {tuned_layer, plain_layer} <= found, "they are not computed in C"
    assert core.bound.runs_known_code and core.bound.may_infer, "PEFT's layers, which may keep tensors, are not called"
    check_idle(inner)


def test_a_caller_that_needs_the_pool_finds_no_step_in_flight() -> None:
    model = patch()
    request = model.paged.submit(random_ids(1, 5), **GREEDY | {"max_new_tokens": 100})
    for _ in range(20):
        with model.paged.core.worker.loop.exclusive():
            assert not model.paged.core.executor.in_flight
            assert not any(group.has_placeholders for group in model.paged.core.scheduler.queues.groups)
    model.paged.pause()
    assert not model.paged.core.executor.in_flight
    assert model.paged.step() is not None
    assert not model.paged.core.executor.in_flight
    model.paged.resume()
    assert len(request.result(PATIENCE).token_ids) == 100
    check_idle(model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BATCHED)
def test_every_model(name: str, device: str) -> None:
    model, stock = patch(name, device), build(name).to(device)
    ids = random_ids(3, 7).to(device)
    for arguments in (GREEDY, SAMPLING | ENDS):
        torch.manual_seed(1)
        expected, state = stock.generate(ids, **arguments), default_generator(ids.device).get_state()
        torch.manual_seed(1)
        assert torch.equal(model.generate(ids, **arguments), expected)
        assert torch.equal(default_generator(ids.device).get_state(), state)
    check_idle(model)


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_picture_between_launch_and_collect(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as the tail has: a reader that stitches tails together would else lose one, or see one twice."""
    model, ids = patch(use_async_batching=overlaps), random_ids(2, 5)
    own = model.paged.core.executor
    launch, seen = own.launch, []

    def launched(step: Any) -> None:
        launch(step)
        for group in model.paged.snapshot()["groups"]:
            for sequence in group["sequences"]:
                seen.append((sequence["num_tokens"], sequence["tail"]))
                assert sequence["num_computed_tokens"] <= sequence["num_tokens"] + 1

    monkeypatch.setattr(own, "launch", launched)
    results = model.generate(ids, **GREEDY).tolist()
    assert len(seen) > 12
    for num_tokens, tail in seen:
        assert any(row[:num_tokens][-len(tail) :] == tail for row in results)


@pytest.mark.parametrize("device", DEVICES)
def test_graph_shaped_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are put into the fixed inputs on the device; on CPU a recording is the function, run again."""
    if device == "cpu":
        from helpers.graphs import Recorder

        monkeypatch.setattr("hf_paged.model.cuda_graph.recorder", lambda attention: Recorder())
    model = patch(device=device, cuda_graphs=True, max_num_seqs=6)
    stock = build("llama").to(device)
    given: list[bool] = []
    fill = step_inputs.StepInputs.fill

    def watched_fill(self: Any, step: step_inputs.HostStep) -> None:
        given.append(step.tokens.chosen is not None)
        fill(self, step)

    monkeypatch.setattr(step_inputs.StepInputs, "fill", watched_fill)
    prompts = [random_ids(1, 3 + 5 * i % 11, seed=i).to(device) for i in range(8)]
    requests = [model.paged.submit(ids, **GREEDY | {"max_new_tokens": 5 + i}) for i, ids in enumerate(prompts)]
    for i, (ids, request) in enumerate(zip(prompts, requests, strict=True)):
        expected = stock.generate(ids, **GREEDY | {"max_new_tokens": 5 + i})[0, ids.shape[1] :]
        assert request.result(PATIENCE).token_ids == expected.tolist()
    assert sum(given) > 10, "ids known to the device only never met a recording"
    check_idle(model)


def test_a_row_that_expects_its_last_token_has_no_work() -> None:
    """Preempted in that moment, it is not computed again: no row would take what comes of it."""
    model = patch()
    own, loop = model.paged.core.executor, model.paged.core.worker.loop
    with loop.exclusive():
        request = model.paged.submit([5, 6, 7], **GREEDY | {"max_new_tokens": 1})
        scheduler = model.paged.core.scheduler
        own.launch(scheduler.schedule())
        assert len(own.in_flight) == 1 and not scheduler.queues.has_work
        (group,) = scheduler.queues.groups
        scheduler.preemption.preempt(group, allow_swap=False)
        assert not scheduler.queues.has_work
        own.collect()
    assert (
        request.result(PATIENCE).token_ids
        == build("llama").generate(torch.tensor([[5, 6, 7]]), **GREEDY | {"max_new_tokens": 1})[0, 3:].tolist()
    )
    check_idle(model)


BAD = 5  # a token whose embedding is NaN


def test_a_row_without_probabilities_fails_alone() -> None:
    """It is in the next step by the time that is known: with some token, not with a number that is none."""
    stock = build("llama")
    with torch.no_grad():
        stock.model.embed_tokens.weight[BAD] = float("nan")
        stock.lm_head.weight[BAD] = -stock.lm_head.weight.abs().max()
    model = hf_paged.patch(copy.deepcopy(stock), num_blocks=64, block_size=4, use_async_batching=True)
    seen: list[int] = []
    original = token_inputs.fill_in

    def fill_in(*args: Tensor) -> Tensor:
        ids = original(*args)
        seen.append(int(ids.min()))
        return ids

    good_ids = torch.tensor([[7, 8, 9, 11]])
    arguments = SAMPLING | {"suppress_tokens": [BAD], "repetition_penalty": 1.3}
    torch.manual_seed(0)
    expected = stock.generate(good_ids, **arguments)[0, 4:].tolist()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(token_inputs, "fill_in", fill_in)
        with model.paged.core.worker.loop.exclusive():
            bad = model.paged.submit([7, 8, BAD], **arguments)
            torch.manual_seed(0)
            good = model.paged.submit(good_ids, **arguments)
        with pytest.raises(RuntimeError, match="probability tensor"):
            bad.result(PATIENCE)
        assert good.result(PATIENCE).token_ids == expected
    assert len(seen) > 5 and min(seen) >= 0
    check_idle(model)


def test_a_processor_that_raises_on_the_way() -> None:
    """At the fifth token, with a step in flight: its rows end, the others' tokens are what they are."""
    model, stock = patch(), build("llama")
    ids = random_ids(1, 6)
    with pytest.MonkeyPatch.context() as patches:
        from transformers import TopPLogitsWarper

        original = TopPLogitsWarper.__call__
        calls: list[int] = []

        def call(self: Any, input_ids: Any, scores: Tensor) -> Tensor:
            calls.append(len(scores))
            if len(calls) == 5:
                raise ArithmeticError("no more")
            return original(self, input_ids, scores)

        patches.setattr(TopPLogitsWarper, "__call__", call)
        with model.paged.core.worker.loop.exclusive():
            bad = model.paged.submit(ids, **SAMPLING | {"top_p": 0.9, "num_return_sequences": 2})
            good = model.paged.submit(ids, **GREEDY)
        with pytest.raises(ArithmeticError, match="no more"):
            bad.result(PATIENCE)
        assert good.result(PATIENCE).token_ids == stock.generate(ids, **GREEDY)[0, 6:].tolist()
    check_idle(model)


@pytest.mark.parametrize("at", [1, 4])
def test_a_forward_that_raises_with_a_step_in_flight(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before it is handed out, the failing one taken back, and only its owner fails."""
    model, stock = patch(), build("llama")
    prompts = [random_ids(1, 6, seed=seed) for seed in range(3)]
    with model.paged.core.worker.loop.exclusive():
        requests = [model.paged.submit(ids, **GREEDY) for ids in prompts]
    own = model.paged.core.runner
    run, victim = own.run, requests[1].request_id

    def failing(step: Any, *args: Any) -> Any:
        for sequence, start, _ in model.paged.core.scheduler.chunks(step):
            if sequence.group.request_id == victim and start >= 5 + at:
                raise FloatingPointError("burnt")
        return run(step, *args)

    monkeypatch.setattr(own, "run", failing)
    with pytest.raises(FloatingPointError, match="burnt"):
        requests[1].result(PATIENCE)
    for index in (0, 2):
        expected = stock.generate(prompts[index], **GREEDY)[0, 6:].tolist()
        assert requests[index].result(PATIENCE).token_ids == expected
    check_idle(model)


def test_unpatched_released_and_reset_with_steps_in_flight() -> None:
    model, ids = patch(), random_ids(1, 6)
    expected = build("llama").generate(ids, **GREEDY | {"max_new_tokens": 60})[0, 6:].tolist()
    model.paged.release()  # never used: nothing to do
    request = model.paged.submit(ids, **GREEDY | {"max_new_tokens": 60})
    for _ in range(5):
        model.paged.release()
    model.paged.reset_prefix_cache()  # what the request has computed is kept from here on: release() would refuse
    assert request.result(PATIENCE).token_ids == expected
    request = model.paged.submit(ids, **GREEDY | {"max_new_tokens": 100})
    next(iter(request))
    hf_paged.unpatch(model)
    output = request.result(PATIENCE)
    assert output.finish_reason == "cancelled" and 0 < len(output.token_ids) < 100
    assert not hasattr(model, "paged")


def test_out_of_memory_with_a_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    model, stock = patch(), build("llama")
    prompts = [random_ids(1, 6, seed=seed) for seed in range(4)]
    own = model.paged.core.runner
    run, count = own.run, 0

    def failing(step: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(step, *args)

    monkeypatch.setattr(own, "run", failing)
    with model.paged.core.worker.loop.exclusive():
        requests = [model.paged.submit(ids, **GREEDY) for ids in prompts]
    for ids, request in zip(prompts, requests, strict=True):
        assert request.result(PATIENCE).token_ids == stock.generate(ids, **GREEDY)[0, 6:].tolist()
    check_idle(model)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_criteria_beside_calls_that_have_none(overlaps: bool, is_first: bool) -> None:
    """The same processors in both, so that their rows become one batch: only one call's tokens are looked at."""
    model, stock = patch(use_async_batching=overlaps), build("llama")
    ids = random_ids(1, 6)
    length, failures = 9, []
    choose = sampler._choose

    def watched_choose(*args: Any) -> Tensor:
        try:
            return choose(*args)
        except Exception as error:
            failures.append(error)
            raise

    arguments = SAMPLING | {"temperature": 0.7, "eos_token_id": VOCAB - 1, "max_new_tokens": 30}
    seeds = (3, 4)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(MaxTimeCriteria, "__call__", lambda self, ids, scores, **_: has_last(ids, length))
        patches.setattr(sampler, "_choose", watched_choose)
        expected = []
        for seed, own in zip(seeds, ({"max_time": 1000.0}, {}), strict=True):
            torch.manual_seed(seed)
            expected.append(stock.generate(ids, **arguments | own)[0, 6:].tolist())
        assert len(expected[0]) < 30 == len(expected[1])
        both = list(zip(seeds, ({"max_time": 1000.0}, {}), strict=True))
        requests = {}
        with model.paged.core.worker.loop.exclusive():
            for seed, own in both if is_first else both[::-1]:
                torch.manual_seed(seed)
                requests[seed] = model.paged.submit(ids, **arguments | own)
        assert [requests[seed].result(PATIENCE).token_ids for seed in seeds] == expected
    assert not failures, "what fails together is tried again one by one, at every step"
    check_idle(model)


def has_last(ids: Tensor, length: int) -> Tensor:
    return (ids[:, -1] % 4 == 1) & (ids.shape[1] > length)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_sampling_that_fails_with_a_step_in_flight(at: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator is taken back to where the call failed, whatever has been drawn since."""
    model, ids = patch(), random_ids(rows, 6)
    read, count = SampledTokens.read, 0

    def failing(self: SampledTokens) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise RuntimeError("an illegal memory access was encountered")
        return read(self)

    with monkeypatch.context() as patches:
        patches.setattr(SampledTokens, "read", failing)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            model.generate(ids, **SAMPLING)
    torch.manual_seed(0)
    expected = build("llama").generate(ids, **SAMPLING)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, **SAMPLING), expected)
    check_idle(model)


def test_criteria_that_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = patch(), random_ids(2, 6)

    def failing(self: Any, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if ids.shape[1] > 9:
            raise ArithmeticError("no more")
        return torch.zeros(len(ids), dtype=torch.bool)

    monkeypatch.setattr(MaxTimeCriteria, "__call__", failing)
    for mode in (GREEDY, SAMPLING):
        good = model.paged.submit(ids[:1], **mode)
        with pytest.raises(ArithmeticError, match="no more"):
            model.generate(ids, **mode | {"max_time": 1000.0})
        assert len(good.result(PATIENCE).token_ids) == 12
    check_idle(model)


def test_a_processor_that_only_the_step_too_many_would_make_raise() -> None:
    """The row has ended by then, and no other row ever asks."""
    ids = random_ids(1, 6)
    stock = build("llama")
    tokens = stock.generate(ids, **GREEDY)[0, 6:].tolist()
    streams: list[list[int]] = []
    for overlaps in (False, True):
        model = patch(use_async_batching=overlaps)
        arguments = GREEDY | {"exponential_decay_length_penalty": (2, 1e200), "eos_token_id": tokens[3]}
        expected = stock.generate(ids, **arguments)[0, 6:].tolist()
        assert model.paged.submit(ids, **arguments).result(PATIENCE).token_ids == expected
        streams.append([])
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(NoRepeatNGramLogitsProcessor, "__call__", raise_at_10)
            with pytest.raises(ArithmeticError, match="no more"):
                for token in model.paged.submit(ids, **GREEDY | {"no_repeat_ngram_size": 2}):
                    streams[-1].append(token)
        check_idle(model)
    assert streams == [tokens[:4]] * 2


def raise_at_10(self: Any, ids: Tensor, scores: Tensor) -> Tensor:
    if ids.shape[1] == 10:
        raise ArithmeticError("no more")
    return scores


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_step_beyond_the_models_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position that the model does not have is not tried in vain: on a GPU that would end the process."""
    model, stock = patch(name, num_blocks=512), build(name)
    context = model.config.max_position_embeddings
    ids = random_ids(1, context - 3)
    end = stock.generate(ids, **GREEDY | {"max_new_tokens": 4})[0, -1].item()
    longest: list[int] = []
    run = runner.ModelRunner.run

    def watched_run(self: Any, step: Any, *args: Any) -> Any:
        longest.extend(start + num_tokens for _, start, num_tokens in step.chunks)
        return run(self, step, *args)

    monkeypatch.setattr(runner.ModelRunner, "run", watched_run)
    arguments = GREEDY | {"max_new_tokens": 50, "eos_token_id": end}
    assert torch.equal(model.generate(ids, **arguments), stock.generate(ids, **arguments))
    assert max(longest) <= context
    check_idle(model)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_nothing_in_a_step_waits_for_the_device(cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises at every synchronizing call between the beginning of a launch and its end."""
    model = patch(device="cuda", cuda_graphs=cuda_graphs, num_blocks=512)
    ids = random_ids(4, 9).cuda()
    modes = [GREEDY, SAMPLING | {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}]
    for arguments in modes:
        model.generate(ids, **arguments)  # kernels are compiled, graphs recorded, buffers pinned
    launch = StepExecutor.launch

    def watched_launch(self: StepExecutor, step: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch(self, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(StepExecutor, "launch", watched_launch)
    for arguments in modes:
        model.generate(ids, **arguments)
    requests = [
        model.paged.submit(ids[i % 4], **SAMPLING | {"temperature": 0.5 + i / 9, "repetition_penalty": 1 + i / 20})
        for i in range(9)
    ]
    for request in requests:
        assert len(request.result(PATIENCE).token_ids) == 12


@pytest.mark.gpu
def test_calls_with_parameters_of_their_own_on_a_gpu() -> None:
    """Bit for bit what each call's own processors compute there, where a number divides by its reciprocal."""
    model, stock = patch(device="cuda", num_blocks=512), build("llama").cuda()
    settings = [
        {"temperature": 0.3 + i / 7, "top_k": 3 + i, "top_p": 0.5 + i / 40}
        | {"min_p": i / 90, "repetition_penalty": 1 + i / 9}
        for i in range(16)
    ]
    prompts = [random_ids(1, 3 + i, seed=i).cuda() for i in range(16)]
    expected, requests = [], []
    for seed, (ids, own) in enumerate(zip(prompts, settings, strict=True)):
        torch.manual_seed(seed)
        expected.append(stock.generate(ids, **SAMPLING | own)[0, ids.shape[1] :].tolist())
    with model.paged.core.worker.loop.exclusive():
        for seed, (ids, own) in enumerate(zip(prompts, settings, strict=True)):
            torch.manual_seed(seed)
            requests.append(model.paged.submit(ids, **SAMPLING | own))
    assert [request.result(PATIENCE).token_ids for request in requests] == expected
