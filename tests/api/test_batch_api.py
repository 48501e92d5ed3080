"""transformers' batch API on a patched model: the same tokens as stock's own, and as stock `generate()`."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
from dataclasses import asdict
from queue import Full
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus

import hf_paged
from helpers.models import EOS, PAD
from helpers.pairs import MakePair, Pair, logged_messages
from helpers.waiting import PATIENCE, at_once, in_background

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13] * 10, [14], [5, 6, 7, 8, 9, 10]]


def config(**settings: Any) -> GenerationConfig:
    """A config for stock's own batch API, too."""
    return GenerationConfig(
        **({"max_new_tokens": 9, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD} | settings)
    )


def stock_tokens(model: Any, prompt: list[int], settings: GenerationConfig, seed: int | None = None) -> list[list[int]]:
    """The new tokens of each of stock `generate()`'s rows, without padding."""
    if seed is not None:
        torch.manual_seed(seed)
    rows = model.generate(torch.tensor([prompt]), settings)[:, len(prompt) :].tolist()
    ends = [row.index(EOS) + 1 if EOS in row else len(row) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize(
    "settings", [{}, {"eos_token_id": None}, {"repetition_penalty": 1.4}, {"eos_token_id": [7, 68]}]
)
def test_greedy_as_stocks_own(pair: Pair, settings: dict[str, Any]) -> None:
    """Would break: other tokens, ends or ids than stock's own batch API; results in another order."""
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    if "repetition_penalty" in settings:  # which stock's own silently leaves out
        expected = [stock_tokens(pair.stock, prompt, config(**settings))[0] for prompt in PROMPTS]
    else:
        results = copy.deepcopy(pair.stock).generate_batch(PROMPTS, config(**settings), small)
        expected = [output.generated_tokens for output in results.values()]
    found = pair.paged.generate_batch(PROMPTS, config(**settings))
    assert list(found) == [f"req_{i}" for i in range(len(PROMPTS))]
    assert [output.generated_tokens for output in found.values()] == expected
    for prompt, output in zip(PROMPTS, found.values(), strict=True):
        assert output.prompt_ids == prompt and output.status is RequestStatus.FINISHED and output.error is None
        assert output.created_time <= output.lifespan[0] <= output.lifespan[1] and output.timestamps is None


@pytest.mark.parametrize("settings", [{}, {"eos_token_id": None}])
def test_pads_in_a_prompt_are_text(pair: Pair, settings: dict[str, Any]) -> None:
    prompts, small = [[5, PAD, 6, 7], [PAD, PAD, 9]], ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    results = copy.deepcopy(pair.stock).generate_batch(prompts, config(**settings), small)
    found = pair.paged.generate_batch(prompts, config(**settings), ContinuousBatchingConfig(return_logprobs=True))
    assert [o.generated_tokens for o in found.values()] == [o.generated_tokens for o in results.values()]


def test_rows_share_steps(pair: Pair) -> None:
    before = pair.engine.stats().num_steps
    pair.paged.generate_batch(PROMPTS * 3, config(eos_token_id=None))
    assert pair.engine.stats().num_steps - before < 3 * len(PROMPTS) * 9 / 2


@pytest.mark.parametrize(
    "settings", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}]
)
def test_beams(pair: Pair, settings: dict[str, Any]) -> None:
    found = pair.paged.generate_batch(PROMPTS, config(), **settings)
    num_children = settings.get("num_return_sequences", 1) - 1
    for index, prompt in enumerate(PROMPTS):
        names = [f"req_{index}", *(f"req_{index}__child#{i}" for i in range(num_children))]
        expected = stock_tokens(pair.stock, prompt, config(**settings))
        assert [found[name].generated_tokens for name in names] == expected
    assert len(found) == len(PROMPTS) * (num_children + 1)


@pytest.mark.parametrize("num", [1, 3])
def test_sampling_draws_as_generate_does(pair: Pair, num: int) -> None:
    """Would break: a seed that is not honoured, settings of the model's own config that the given one does not have."""
    settings = config(do_sample=True, temperature=0.8, top_p=0.9, top_k=0, num_return_sequences=num)
    expected = stock_tokens(pair.stock, PROMPTS[0], settings, seed=11)
    pair.paged.generation_config.repetition_penalty = 9.0
    batching = ContinuousBatchingConfig(seed=11, return_logprobs=True)
    torch.manual_seed(5)
    found = pair.paged.generate_batch(PROMPTS[:1], settings, batching)
    names = ["req_0", *(f"req_0__child#{i}" for i in range(num - 1))]
    assert [found[name].generated_tokens for name in names] == expected
    for output in found.values():
        ids = torch.tensor([output.prompt_ids + output.generated_tokens])
        logits = pair.stock(ids).logits.detach()[0, len(output.prompt_ids) - 1 : -1] / 0.8
        for row, token, logprob in zip(logits, output.generated_tokens, output.logprobs, strict=True):
            kept = logprob - float(row.log_softmax(-1)[token])  # what top_p left out has gone to the others
            assert -1e-4 <= kept <= -torch.log(torch.tensor(0.9)) + 1e-4


OWN = {"repetition_penalty": 9.0, "num_beams": 2, "no_repeat_ngram_size": 1, "min_new_tokens": 8, "top_k": 1}
OWN |= {"suppress_tokens": list(range(9, 60)), "max_new_tokens": 3, "stop_strings": ["a"]}


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_models_own_settings_do_not_count_beside_given_ones(pair: Pair, do_sample: bool) -> None:
    """Would break: what `generate()` takes from the model's generation config; more sequences than were asked for."""
    pair.paged.generation_config.update(**OWN, **({"num_return_sequences": 2} if do_sample else {}))
    limit = {"max_new_tokens": None, "max_length": len(PROMPTS[0]) + 9}
    settings = config(do_sample=do_sample, **limit, **({"top_k": 0} if do_sample else {}))
    expected = [stock_tokens(pair.stock, prompt, settings, seed=11)[0] for prompt in PROMPTS[:1]]
    found = pair.paged.generate_batch(PROMPTS[:1], settings, ContinuousBatchingConfig(seed=11))
    assert [output.generated_tokens for output in found.values()] == expected


def test_without_a_limit_the_context_ends_it(make_pair: MakePair) -> None:
    """Would break: 20 tokens, generate()'s default, where the batch API has no limit."""
    pair = make_pair(num_blocks=128)
    found = pair.paged.generate_batch(PROMPTS[:1], config(max_new_tokens=None, eos_token_id=-1))
    assert len(found["req_0"].generated_tokens) == 256 - len(PROMPTS[0])


def test_training_mode_and_timestamps(pair: Pair) -> None:
    """Would break: a model in training mode, which TRL has, running stock; times that are missing."""
    pair.paged.train()
    with logged_messages() as messages:
        found = pair.paged.generate_batch(PROMPTS, config(), record_timestamps=True)
    assert not pair.paged.training and not messages
    for output in found.values():
        assert output.timestamps is not None and len(output.timestamps) == len(output.generated_tokens)
        assert output.timestamps == sorted(output.timestamps)


def test_a_request_fails_alone(pair: Pair) -> None:
    found = pair.paged.generate_batch([PROMPTS[0], [10_000], [], PROMPTS[1]], config())
    outputs = list(found.values())
    assert [output.status for output in outputs] == [3, 4, 4, 3]
    assert "10000" in outputs[1].error and "empty" in outputs[2].error
    assert outputs[3].generated_tokens == stock_tokens(pair.stock, PROMPTS[1], config())[0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"logits_processor": []}, "logits_processor"),
        ({"stop_strings": ["a"]}, "stop_strings"),
        ({"num_beams": 2, "continuous_batching_config": ContinuousBatchingConfig(return_logprobs=True)}, "num_beams=2"),
        ({"num_beams": 2, "record_timestamps": True}, "record_timestamps"),
    ],
)
def test_what_it_cannot_honour(pair: Pair, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pair.paged.generate_batch(PROMPTS, config(), **given)


def test_signatures_are_transformers_own(pair: Pair) -> None:
    for name in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
        own = list(inspect.signature(getattr(type(pair.paged), name)).parameters)
        assert own == list(inspect.signature(getattr(type(pair.stock), name)).parameters)
    manager = pair.paged.init_continuous_batching()
    for name, method in vars(ContinuousBatchingManager).items():
        if callable(method) and not name.startswith("_") and name != "switch_to_cb_friendly_attn":
            own = list(inspect.signature(getattr(type(manager), name)).parameters.values())
            stock = list(inspect.signature(method).parameters.values())
            assert [(p.kind, p.default) for p in own] == [(p.kind, p.default) for p in stock], name
            named = [p.name for p in stock if p.kind is not p.VAR_KEYWORD]
            assert [p.name for p in own if p.kind is not p.VAR_KEYWORD] == named, name


def test_manager(pair: Pair) -> None:
    """Would break: streams that skip or repeat tokens, results of others, settings of one request in another's."""
    expected = [stock_tokens(pair.stock, prompt, config())[0] for prompt in PROMPTS]
    with pair.paged.continuous_batching_context_manager(config()) as manager:
        assert isinstance(manager, ContinuousBatchingManager) and manager.is_running()
        names = manager.add_requests(PROMPTS)
        stream = manager.add_request(PROMPTS[2], request_id="mine", streaming=True)
        short = manager.add_request(PROMPTS[1], max_new_tokens=2)
        penalty = manager.add_request(PROMPTS[3], repetition_penalty=1.5)
        ended = manager.add_request(PROMPTS[0], eos_token_id=expected[0][3])
        seen = list(manager.request_id_iter(stream))
        assert [output.generated_tokens for output in seen[:-1]] == [expected[2][:n] for n in range(1, 10)]
        assert {output.status for output in seen[:-1]} == {RequestStatus.DECODING}
        assert seen[-1].generated_tokens == expected[2] and seen[-1].is_finished()
        assert manager.get_result(short, timeout=PATIENCE).generated_tokens == expected[1][:2]
        (other,) = stock_tokens(pair.stock, PROMPTS[3], config(repetition_penalty=1.5))
        assert other != expected[3] and manager.get_result(penalty).generated_tokens == other
        assert manager.get_result(ended).generated_tokens == expected[0][: expected[0].index(expected[0][3]) + 1]
        found = {}
        for output in manager:
            found[output.request_id] = output.generated_tokens
            if len(found) == len(PROMPTS):
                break
        assert [found[name] for name in names] == expected
        assert manager.get_result(timeout=0.01) is None and manager.get_result("unknown") is None
        for bad in ({"no_setting": 1}, {"stop_strings": ["a"]}, {"streaming": True, "num_beams": 2}):
            with pytest.raises(ValueError, match=list(bad)[-1]):
                manager.add_request(PROMPTS[0], **bad)
    assert not manager.is_running()


def test_streams_of_samples(pair: Pair) -> None:
    """Would break: tokens of one sample in another's stream, times of the first only."""
    settings = config(do_sample=True, num_return_sequences=3, top_k=0)
    manager = pair.paged.init_continuous_batching(settings, ContinuousBatchingConfig(seed=3))
    manager.add_request(PROMPTS[0], streaming=True, record_timestamps=True)
    manager.start()
    manager.stop()
    seen: dict[str, list[Any]] = {}
    while (output := manager.get_result()) is not None:
        seen.setdefault(output.request_id, []).append(output)
    expected = stock_tokens(pair.stock, PROMPTS[0], settings, seed=3)
    for name, tokens in zip(["req_0", "req_0__child#0", "req_0__child#1"], expected, strict=True):
        *parts, last = seen.pop(name)
        assert [part.generated_tokens for part in parts] == [tokens[: n + 1] for n in range(len(tokens))]
        assert last.generated_tokens == tokens and last.status is RequestStatus.FINISHED
        assert len(last.timestamps) == len(tokens)
    assert not seen


def test_cancel(make_pair: MakePair) -> None:
    """Would break: blocks held by a cancelled request, an iteration over it that never ends, a result of it."""
    pair = make_pair(max_num_seqs=1)
    with pair.paged.continuous_batching_context_manager(config(max_new_tokens=200, eos_token_id=-1)) as manager:
        first = manager.add_request(PROMPTS[0], streaming=True)
        second = manager.add_request(PROMPTS[1])
        third = manager.add_request(PROMPTS[2], max_new_tokens=3)
        outputs = manager.request_id_iter(first)
        next(outputs)
        manager.cancel_request(first)
        manager.cancel_request(second)
        manager.cancel_request("unknown")
        list(outputs)
        assert manager.get_result(second) is None
        assert len(manager.get_result(third).generated_tokens) == 3
        with pytest.raises(ValueError, match="running already"):
            for _ in range(2):
                manager.add_request(PROMPTS[0], request_id="twice")
        manager.cancel_request("twice")


def test_nothing_of_a_cancelled_request_is_left(pair: Pair) -> None:
    """Would break: outputs of an old prompt for a new request of its id, and for those of the next session."""
    settings = config(eos_token_id=-1)
    with pair.paged.continuous_batching_context_manager(settings, persistent_manager=True) as manager:
        for ends in (False, True):
            name = manager.add_request(PROMPTS[0], "chat", 200 if not ends else 5, streaming=True)
            assert manager.get_result(name, timeout=PATIENCE) is not None
            while ends and pair.engine.num_running:
                time.sleep(0.001)
            manager.cancel_request(name)
            assert manager.get_result(name, timeout=0.01) is None
            manager.add_request(PROMPTS[1], "chat", 3, streaming=True)
            outputs = list(manager.request_id_iter("chat"))
            assert [len(output.generated_tokens) for output in outputs] == [1, 2, 3, 3]
            assert {tuple(output.prompt_ids) for output in outputs} == {tuple(PROMPTS[1])}
        manager.add_request(PROMPTS[0], "left", 2, streaming=True)
        manager.add_request(PROMPTS[0], "req_1", 2)
    assert list(pair.paged.generate_batch(PROMPTS[:2], settings)) == ["req_0", "req_2"], "ids that wait are not new"


def test_generate_batch_behind_one_that_was_ended(pair: Pair) -> None:
    settings = config(eos_token_id=-1)
    with (
        pytest.raises(KeyboardInterrupt),
        pair.paged.continuous_batching_context_manager(settings, persistent_manager=True) as manager,
    ):
        pair.paged._cached_continuous_batching_manager = manager
        manager.add_requests(PROMPTS, 240)
        raise KeyboardInterrupt
    assert not manager.is_running()
    for _ in range(2):
        found = pair.paged.generate_batch(PROMPTS[:2], settings, persistent_manager=True)
        assert [len(output.generated_tokens) for output in found.values()] == [9, 9]


def test_results_of_further_sequences_are_waited_for(pair: Pair) -> None:
    settings = config(eos_token_id=-1, do_sample=True, num_return_sequences=2, max_new_tokens=60)
    with pair.paged.continuous_batching_context_manager(settings) as manager:
        name = manager.add_request(PROMPTS[0])
        assert len(manager.get_result(f"{name}__child#0", timeout=PATIENCE).generated_tokens) == 60
        name = manager.add_request(PROMPTS[0], streaming=True)
        assert len(list(manager.request_id_iter(f"{name}__child#0"))) == 61


def test_stop_while_requests_wait_for_the_queue(make_pair: MakePair) -> None:
    """Would break: a request that is taken by a manager that has ended, and is lost."""
    pair = make_pair(max_num_seqs=1)
    limit = ContinuousBatchingConfig(max_queue_size=1)
    manager = pair.paged.init_continuous_batching(config(max_new_tokens=240, eos_token_id=-1), limit)
    manager.start()
    futures = [in_background(manager.add_request, PROMPTS[0]) for _ in range(8)]
    while not pair.engine.num_waiting:
        time.sleep(0.001)
    manager.stop(hard_stop=True, timeout=PATIENCE)
    names = [future.result(5) for future in futures]  # and not the ten seconds that a place is waited for
    failed = {output.request_id for output in iter(lambda: manager.get_result(timeout=0.01), None)}
    assert failed == {name for name in names if name is not None} and None in names
    assert not pair.engine.num_running and not pair.engine.num_waiting


def test_stop(make_pair: MakePair) -> None:
    """Would break: requests lost by a stop, tokens generated behind a hard one, requests taken after it."""
    pair = make_pair(max_num_seqs=2)
    manager = pair.paged.init_continuous_batching(config())
    names = manager.add_requests(PROMPTS)  # before it is started
    assert manager.get_result(timeout=0.01) is None and not manager.is_running()
    manager.start()
    manager.stop()
    assert manager.add_request(PROMPTS[0]) is None
    assert {manager.get_result().request_id for _ in PROMPTS} == set(names)
    manager.start()
    endless = manager.add_request(PROMPTS[0], max_new_tokens=200, eos_token_id=-1, streaming=True)
    waiting = manager.add_requests(PROMPTS, max_new_tokens=200)
    manager.get_result(endless)
    manager.stop(hard_stop=True, timeout=PATIENCE)
    assert not manager.is_running()
    ends = {}
    while (output := manager.get_result()) is not None:
        if output.is_finished():
            ends[output.request_id] = output
    assert set(ends) == {endless, *waiting}
    assert ends[endless].status is RequestStatus.FAILED and "stopped" in ends[endless].error
    assert ends[endless].generated_tokens


def test_an_exception_while_a_request_is_added(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a stop that waits for ever, for a request that has never begun."""

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pair.paged.continuous_batching_context_manager(config()) as manager:
        manager.add_request(PROMPTS[0])
        monkeypatch.setattr(pair.engine, "submit", interrupted)
        manager.add_request(PROMPTS[1])
    assert not manager.is_running() and not pair.engine.num_running


def test_pause(pair: Pair) -> None:
    manager = pair.paged.init_continuous_batching(config(eos_token_id=-1))
    with pytest.raises(RuntimeError, match="no generation loop"), manager.pause():
        pass
    manager.start()
    with manager.pause():
        name = manager.add_request(PROMPTS[0])
        assert manager.get_result(name, timeout=0.05) is None
        num_steps = pair.engine.stats().num_steps
        with pytest.raises(RuntimeError, match="pause"):
            manager.stop()
        with torch.no_grad():
            for model in (pair.stock, pair.paged):
                model.lm_head.weight.mul_(-1)
        assert pair.engine.stats().num_steps == num_steps
    (expected,) = stock_tokens(pair.stock, PROMPTS[0], config(eos_token_id=None))
    assert manager.get_result(name, timeout=PATIENCE).generated_tokens == expected[:9]
    manager.stop()


def test_kept_manager(pair: Pair) -> None:
    """Would break: another manager each time, an old config, a copy or an unpatched model with a manager of ours."""
    pair.paged.generate_batch(PROMPTS, config(), persistent_manager=True)
    manager = pair.paged.init_continuous_batching()
    found = pair.paged.generate_batch(PROMPTS[:1], config(max_new_tokens=3), persistent_manager=True)
    assert pair.paged.init_continuous_batching() is manager
    assert [len(output.generated_tokens) for output in found.values()] == [3]
    twin = copy.deepcopy(pair.paged)
    assert twin.init_continuous_batching() is not manager
    hf_paged.unpatch(twin)
    assert not manager.is_running()
    manager.start()
    endless = manager.add_request(PROMPTS[0], max_new_tokens=200, eos_token_id=-1)
    hf_paged.unpatch(pair.paged)
    assert not manager.is_running() and manager.get_result(endless).error
    assert not hasattr(pair.paged, "_cached_continuous_batching_manager")
    assert type(pair.paged).init_continuous_batching is type(pair.stock).init_continuous_batching


def test_calls_at_once_beside_a_kept_manager(pair: Pair) -> None:
    """Would break: calls that take each other's results, or that end each other's manager."""
    pair.paged.generate_batch(PROMPTS[:1], config(), persistent_manager=True)
    expected = pair.paged.generate_batch(PROMPTS * 6, config())
    calls = [in_background(pair.paged.generate_batch, PROMPTS * 6, config(), persistent_manager=True) for _ in "abc"]
    for call in calls:
        found = call.result(PATIENCE)
        assert [o.generated_tokens for o in found.values()] == [o.generated_tokens for o in expected.values()]
    assert pair.paged.init_continuous_batching() is pair.paged.init_continuous_batching()


@pytest.mark.parametrize("prompt", [None, 5, torch.tensor(5)], ids=str)
def test_what_is_no_prompt(pair: Pair, prompt: Any) -> None:
    """Would break: a manager that waits for ever for a request that never began."""
    with pytest.raises(ValueError, match="list of token ids"):
        pair.paged.generate_batch([PROMPTS[0], prompt], config())
    with pair.paged.continuous_batching_context_manager(config()) as manager:
        with pytest.raises(ValueError, match="list of token ids"):
            manager.add_request(prompt)
        name = manager.add_request(PROMPTS[0])
        assert manager.get_result(name, timeout=PATIENCE).generated_tokens


def test_queue_limit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.api.batch_manager._QUEUE_SECONDS", 0.01)
    manager = pair.paged.init_continuous_batching(config(), ContinuousBatchingConfig(max_queue_size=2))
    manager.add_requests(PROMPTS[:2])
    with pytest.raises(Full):
        manager.add_request(PROMPTS[2])
    manager.start()
    manager.stop()


def test_no_block_sharing(pair: Pair) -> None:
    for sharing, hits in ((True, True), (False, False)):
        pair.engine.reset_prefix_cache()
        before = asdict(pair.engine.stats())["prefix_cache_hit_tokens"]
        for _ in range(2):
            pair.paged.generate_batch(PROMPTS[2:3], config(), ContinuousBatchingConfig(allow_block_sharing=sharing))
        assert (asdict(pair.engine.stats())["prefix_cache_hit_tokens"] > before) == hits


def test_handlers_in_an_event_loop(pair: Pair) -> None:
    """Would break: what `transformers serve` does: tokens that came before the handler, calls on another thread."""
    expected = [stock_tokens(pair.stock, prompt, config())[0] for prompt in PROMPTS]
    threads = set()

    async def ask(manager: Any, prompt: list[int], is_streaming: bool) -> list[int]:
        future = asyncio.get_running_loop().create_future()
        lengths = []

        def take(output: Any) -> None:
            threads.add(threading.get_ident())
            lengths.append(len(output.generated_tokens))
            if output.is_finished():
                future.set_result(output.generated_tokens)

        name = manager.add_request(prompt, streaming=is_streaming)
        await asyncio.sleep(0.02)
        manager.register_result_handler(name, take)
        tokens = await asyncio.wait_for(future, PATIENCE)
        assert lengths == ([*range(1, len(tokens) + 1), len(tokens)] if is_streaming else [len(tokens)])
        return tokens

    async def all_of(manager: Any) -> list[list[int]]:
        return await asyncio.gather(*(ask(manager, prompt, i % 2 == 0) for i, prompt in enumerate(PROMPTS)))

    with pair.paged.continuous_batching_context_manager(config()) as manager:
        assert asyncio.run(all_of(manager)) == expected
    assert threads == {threading.get_ident()}


def test_many_threads(make_pair: MakePair) -> None:
    pair = make_pair(max_num_seqs=3, max_waiting=2, num_blocks=32)
    expected = [stock_tokens(pair.stock, prompt, config())[0] for prompt in PROMPTS]
    with pair.paged.continuous_batching_context_manager(config()) as manager:

        def ask(prompt: list[int]) -> list[list[int]]:
            names = (manager.add_request(prompt) for _ in range(4))  # each behind the result before
            return [manager.get_result(name, timeout=PATIENCE).generated_tokens for name in names]

        assert at_once(ask, PROMPTS) == [[tokens] * 4 for tokens in expected]
