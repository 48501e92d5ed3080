"""Everything that can go wrong while others generate: it ends one call, and no other call notices.

After each fault the invariants hold, no block is held, the next request is served, and calls beside it have the tokens
of stock. What ends whole processes (forks, interpreter exits) runs in children of one subprocess: this file run as a
script.
"""

from __future__ import annotations

import atexit
import copy
import functools
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

import hf_paged
from helpers.models import VOCAB, build, ragged_batch
from helpers.pairs import MakePair, Pair, logged_messages
from helpers.processes import ends_of_processes, in_child, run_processes
from helpers.requests import ENDLESS, MARKER, SAMPLE, Brake, Gate, blocks_in_use, prompt, settle, stock_rows
from helpers.user_code import USER_CODE, Boom, NextToken, PutRecorder, Sleeper
from helpers.waiting import PATIENCE, at_once, eventually, in_background
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.core.interrupts import deferred_interrupt
from hf_paged.core.process import PROCESS
from hf_paged.engine.beam_run import BeamRun
from hf_paged.engine.sampled_run import SampledRun
from hf_paged.memory.kv_cache import KVCache
from hf_paged.model.packed_forward import PackedForward

pytestmark = pytest.mark.usefixtures("ctrl_c")


KINDS: list[dict[str, Any]] = [{}, {"num_beams": 2}, SAMPLE | {"num_return_sequences": 2}]
# Whom a fault must not disturb: seed, length of the prompt, whether it is held in its midst, and the mode.
NEIGHBOURS: list[tuple[int, int, bool, dict[str, Any]]] = [
    *((seed, 8, False, {"max_new_tokens": 24} | kind) for seed, kind in enumerate(KINDS)),
    (3, 8, True, {"max_new_tokens": 24}),
    (4, 8, True, {"max_new_tokens": 24, "num_beams": 2}),
    # Rows of the engine that run for long, begun when the others are held.
    (5, 12, False, {"max_new_tokens": 60}),
    (6, 12, False, {"max_new_tokens": 60}),
]
UNMARKED: dict[str, Any] = {"bad_words_ids": [[MARKER]]} | ENDLESS


@functools.cache
def undisturbed() -> list[list[list[int]]]:
    stock, found = build("llama"), []
    for seed, length, _, mode in NEIGHBOURS:
        torch.manual_seed(seed)
        found.append(stock_rows(stock, prompt(seed, length), **UNMARKED, **mode))
    return found


@contextmanager
def neighbours(pair: Pair) -> Iterator[None]:
    """Requests of all kinds run beside what is done inside; in the end they have stock's tokens, and all is free.

    Two of them are held in their midst until it is over, so that there is a call to be disturbed.
    """
    expected, requests = undisturbed(), []
    with ExitStack() as gates:
        for seed, length, is_held, mode in NEIGHBOURS:
            torch.manual_seed(seed)
            gate = gates.enter_context(Gate(3)) if is_held else None
            held = gate.arguments if gate is not None else {}
            requests.append(pair.engine.submit(prompt(seed, length), **UNMARKED, **mode, **held))
            if gate is not None:
                assert gate.reached.wait(PATIENCE)
        yield
        assert not requests[3].is_done and not requests[4].is_done
    for request, rows in zip(requests, expected):
        assert request.result(PATIENCE).sequences == rows, f"{request} was disturbed"
    settle(pair)


class Ender(PutRecorder):
    def end(self) -> None:
        raise Boom("burnt")


USERS: dict[str, Callable[[], dict[str, Any]]] = {
    "processor": lambda: USER_CODE["processor"](Boom, 3),
    "processor_at_once": lambda: USER_CODE["processor"](Boom, 0),
    "criterion": lambda: USER_CODE["criterion"](Boom, 3),
    "grammar": lambda: USER_CODE["grammar"](Boom, 3),
    "put": lambda: USER_CODE["streamer"](Boom, 4),
    "put_prompt": lambda: USER_CODE["streamer"](Boom, 0),
    "end": lambda: {"streamer": Ender()},
    "put_and_processor": lambda: USER_CODE["streamer"](Boom, 4) | {"logits_processor": [NextToken()]},
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": SAMPLE | {"num_return_sequences": 2},
    "beams": {"num_beams": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize(
    ("code", "mode"),
    [
        (code, mode)
        for code in USERS
        for mode in MODES
        if mode == "greedy" or ("put" not in code and code in ("processor", "criterion"))
    ],
)
def test_user_code_that_raises(pair: Pair, code: str, mode: str) -> None:
    given = {"max_new_tokens": 12} | ENDLESS | MODES[mode]
    with neighbours(pair):
        held = blocks_in_use(pair)
        with pytest.raises(Boom, match=r"^burnt$"):
            pair.paged.generate(prompt(5), **given, **USERS[code]())
        if "streamer" not in USERS[code]():
            request = pair.engine.submit(prompt(5), **given, **USERS[code]())
            with pytest.raises(Boom, match=r"^burnt$"):
                request.result(PATIENCE)
            assert request.finish_reason == "error" and request.is_done
        assert held > 0


@pytest.mark.parametrize("when", ["token", "end", "cancelled", "step"])
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_a_listener_that_raises(pair: Pair, mode: str, when: str, caplog: pytest.LogCaptureFixture) -> None:
    """Would break: an error of one request's listener that reaches those whose rows share the step."""
    given = {"max_new_tokens": 12 if when != "cancelled" else 60} | UNMARKED | MODES[mode]
    with neighbours(pair):
        request = pair.engine.submit(prompt(5), **given)

        def burn() -> None:
            raise Boom("burnt")

        if when == "step":
            end = pair.engine.on_step(burn)
            request.result(PATIENCE)
            end()
        elif when == "token":
            own = threading.get_ident()  # on which it is called at once, maybe behind a token
            request.listen(lambda: burn() if threading.get_ident() != own else None)
        else:
            request.on_done(burn)
        if when == "cancelled":
            request.cancel()
        assert request.result(PATIENCE).finish_reason == ("cancelled" if when == "cancelled" else "length")
        with pytest.raises(Boom):  # told at the call
            request.listen(burn)
    assert "a listener raised" in caplog.text and "burnt" in caplog.text


def interrupted(call: Callable[[], Any], wait: Callable[[], Any]) -> bool:
    """Calls, with a Ctrl-C when another thread has waited; whether that came before the call's end."""
    is_over = False
    timer = threading.Thread(target=lambda: (wait(), os.kill(os.getpid(), signal.SIGINT)), daemon=True)
    # hypothesis' own: Python drops what a signal raises in one of them.
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    try:
        timer.start()
        call()
        is_over = True
        timer.join(PATIENCE)
        time.sleep(1.0)
        pytest.fail("the signal was lost")
    except KeyboardInterrupt:
        return not is_over
    finally:
        gc.callbacks[:] = callbacks


def many(pair: Pair) -> Any:
    return pair.engine.generate([prompt(seed) for seed in range(40)], max_new_tokens=100, **ENDLESS)


WAITS: dict[str, Callable[[Pair, dict[str, Any]], Any]] = {
    "rows": lambda pair, given: pair.paged.generate(**ragged_batch(), **given),
    "beams": lambda pair, given: pair.paged.generate(**ragged_batch(), **given, num_beams=3),
    "streamed": lambda pair, given: pair.paged.generate(prompt(5), **given, streamer=PutRecorder()),
    "processor": lambda pair, given: pair.paged.generate(prompt(5), **given, logits_processor=[NextToken()]),
    "result": lambda pair, given: pair.engine.submit(prompt(5), **given).result(PATIENCE),
    "iteration": lambda pair, given: list(pair.engine.submit(prompt(5), **given)),
    "many": lambda pair, given: many(pair),
}


@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c(pair: Pair, name: str) -> None:
    given = {"max_new_tokens": 220} | ENDLESS
    with neighbours(pair):
        begun = pair.engine.stats().num_steps + 5
        assert interrupted(
            lambda: WAITS[name](pair, given),
            lambda: eventually(lambda: pair.engine.stats().num_steps > begun, "no step"),
        ), "it was over before: the test is too easy"
        gc.collect()  # a handle in the traceback


def test_ctrl_c_while_the_worker_is_busy(pair: Pair) -> None:
    """Would break: the same when the step that is running takes long."""
    brake, (arrived, arrives) = Brake(pair), os.pipe()
    os.set_blocking(arrives, False)
    before = signal.set_wakeup_fd(arrives)
    with brake.at(step=2) as reached:

        def interrupt() -> None:
            reached()
            os.kill(os.getpid(), signal.SIGINT)
            os.read(arrived, 1)
            brake.release()

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            pair.paged.generate(prompt(5), max_new_tokens=50, **ENDLESS)
        thread.join(PATIENCE)
    signal.set_wakeup_fd(before)
    os.close(arrived), os.close(arrives)
    assert pair.engine.stats().num_steps <= 4
    settle(pair)


@pytest.mark.parametrize(
    ("owner", "method", "given"),
    [
        (BeamRun, "__init__", {"num_beams": 2}),
        (PackedForward, "wanted_logits", {"logits_processor": [NextToken()]}),
        (SampledRun, "__init__", {"prompt_lookup_num_tokens": 2}),
        (SampledRun, "__init__", {}),
    ],
    ids=["beams", "loop", "lookup", "rows"],
)
def test_ctrl_c_while_work_is_handed_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, given: dict[str, Any]
) -> None:
    """Would break: a forward that is not waited for, whose tokens are taken back while the worker computes them."""
    original, transaction = getattr(owner, method), pair.engine.core.transaction
    main, num_calls, is_slow = threading.get_ident(), 0, False

    def interrupt(self: Any, *args: Any) -> Any:
        nonlocal num_calls
        if threading.get_ident() == main:
            num_calls += 1
            if num_calls % 4 == 0:
                signal.raise_signal(signal.SIGINT)  # held back until the tables are whole
        return original(self, *args)

    def late_transaction() -> Any:
        if threading.get_ident() == main and sys.exc_info()[0] is KeyboardInterrupt:
            time.sleep(0.015)  # the worker is faster, and in its forward by now
        return transaction()

    brake = hf_paged.packed_hook(lambda *_: time.sleep(0.02) if is_slow else None)
    pair.paged.model.layers[0].register_forward_pre_hook(brake)
    with neighbours(pair):
        is_slow = True
        monkeypatch.setattr(owner, method, interrupt)
        monkeypatch.setattr(pair.engine.core, "transaction", late_transaction)
        num_interrupts = 0
        for _ in range(8):
            try:
                pair.paged.generate(prompt(5), max_new_tokens=3, **given, **ENDLESS)
            except KeyboardInterrupt:
                num_interrupts += 1
        assert num_interrupts >= 2
        monkeypatch.undo()
        is_slow = False
        gc.collect()


def fail_on_marker(pair: Pair, error: type[BaseException] = Boom, token: int = MARKER, calls: int = 1000) -> None:
    """The model's embedding raises when `token` is in the batch, so many times."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal calls
        if bool((args[0] == token).any()) and calls > 0:
            calls -= 1
            raise error("marked")

    pair.paged.get_input_embeddings().register_forward_pre_hook(hf_paged.packed_hook(hook))


@pytest.mark.parametrize("error", [Boom, SystemExit], ids=lambda error: error.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_model_that_fails_for_one_request(make_pair: MakePair, mode: str, error: type[BaseException]) -> None:
    pair = make_pair(max_num_batched_tokens=64)
    fail_on_marker(pair, error)
    with neighbours(pair):
        victim = pair.engine.submit(prompt(5, marker=True), max_new_tokens=12, **MODES[mode])
        with pytest.raises(error, match="marked"):
            victim.result(PATIENCE)
        with pytest.raises(error, match="marked"):
            pair.paged.generate(prompt(5, marker=True), max_new_tokens=12, **MODES[mode])


def test_model_that_fails_in_the_midst_of_a_request(pair: Pair) -> None:
    """Would break: tokens of others that the failed step had begun: they are computed twice, or not at all."""
    prompts = [prompt(seed) for seed in range(5)]
    given = {"max_new_tokens": 30} | ENDLESS
    rows = [stock_rows(pair.stock, ids, **given)[0] for ids in prompts]
    others = {token for ids, row in zip(prompts[1:], rows[1:]) for token in ids[0].tolist() + row}
    token = next(token for token in rows[0][5:] if token not in others | set(prompts[0][0].tolist() + rows[0][:5]))
    fail_on_marker(pair, token=token, calls=2)  # in the step of all, and when its rows are tried alone
    brake = Brake(pair)
    with brake.at() as reached:
        requests = [pair.engine.submit(prompts[0], max_new_tokens=1)]
        reached()  # all others begin together, in the next step
        requests = [pair.engine.submit(ids, **given) for ids in prompts]
    tokens = []
    with pytest.raises(Boom, match="marked"):
        for one in requests[0]:
            tokens.append(one)
    assert tokens == rows[0][: rows[0].index(token) + 1]
    assert [request.result(PATIENCE).token_ids for request in requests[1:]] == rows[1:]
    assert pair.engine.stats().num_steps < 60
    settle(pair)


@pytest.mark.parametrize("error", [Boom, SystemExit, torch.OutOfMemoryError], ids=lambda error: error.__name__)
def test_model_that_always_fails(pair: Pair, error: type[BaseException]) -> None:
    """Would break: callers that wait for a worker which has died, or that go round in circles."""
    is_broken = True

    def hook(*_: Any) -> None:
        if is_broken:
            raise error("broken")

    pair.paged.model.layers[1].register_forward_hook(hf_paged.packed_hook(hook))
    ids = prompt(5)
    calls: list[Callable[[], Any]] = [
        lambda: pair.paged.generate(ids, max_new_tokens=6),
        lambda: pair.paged.generate(**ragged_batch(), max_new_tokens=6, num_beams=2),
    ]
    for _ in range(2):
        requests = [pair.engine.submit(prompt(seed), max_new_tokens=6, **kind) for seed in (0, 1) for kind in KINDS]
        for call in calls:
            with pytest.raises(error, match="broken"):
                call()
        for request in requests:
            with pytest.raises(error, match="broken"):
                request.result(PATIENCE)
        is_broken = False
        settle(pair)
        is_broken = True
    is_broken = False


class Memory:
    """A device without room for more than `limit` tokens a step: the model's first layer raises."""

    def __init__(self, pair: Pair, limit: int, once: bool = False) -> None:
        self.num_failures = 0
        self.limit: float = limit
        self._once = once
        pair.paged.model.layers[0].register_forward_pre_hook(hf_paged.packed_hook(self._hook), with_kwargs=True)

    def _hook(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        if states.shape[1] > self.limit:
            self.num_failures += 1
            if self._once:
                self.limit = float("inf")
            raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("once", [True, False])
def test_out_of_memory_shrinks_the_step(pair: Pair, once: bool) -> None:
    memory = Memory(pair, 24, once)
    prompts = [prompt(seed, length) for seed, length in ((0, 40), (1, 9), (2, 12))]
    brake = Brake(pair)
    with brake.at() as reached:
        first = pair.engine.submit([5], max_new_tokens=1)
        reached()
        requests = [pair.engine.submit(ids, max_new_tokens=10, **ENDLESS) for ids in prompts]
        memory.limit = 40  # 61 tokens at first: half of that fits
    for request, ids in zip(requests, prompts):
        assert request.result(PATIENCE).sequences == stock_rows(pair.stock, ids, max_new_tokens=10, **ENDLESS)
    assert first.result(PATIENCE)
    assert memory.num_failures == 1
    settle(pair)


def test_out_of_memory_again_fails_the_smallest(pair: Pair) -> None:
    memory = Memory(pair, VOCAB)
    brake = Brake(pair)
    prompts = [prompt(seed, 9) for seed in range(6)]
    with brake.at() as reached:
        first = pair.engine.submit([5], max_new_tokens=1)
        reached()
        small = pair.engine.submit(prompt(9, 3), max_new_tokens=20, **ENDLESS)
        requests = [pair.engine.submit(ids, max_new_tokens=20, **ENDLESS) for ids in prompts]
        memory.limit = 20  # 57 tokens, then 28
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        small.result(PATIENCE)
    for request, ids in zip(requests, prompts):
        assert request.result(PATIENCE).sequences == stock_rows(pair.stock, ids, max_new_tokens=20, **ENDLESS)
    assert first.result(PATIENCE) and memory.num_failures >= 2
    settle(pair)


@pytest.mark.parametrize("kind", ["copy_blocks", "swap_out", "swap_in", "zero_blocks"])
@pytest.mark.parametrize("error", [Boom, torch.OutOfMemoryError], ids=lambda error: error.__name__)
def test_copies_that_fail_are_made_later(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[Exception]
) -> None:
    """Would break: blocks that the tables name and no step has filled, which is other tokens and no error."""
    pair = make_pair(build("llama"), num_blocks=24, block_size=2, preemption="swap", enable_prefix_caching=False)
    owner: Any = KVCache if kind.startswith("swap") else PoolAttention
    copies, calls = getattr(owner, kind), []

    def fails_at_times(cache: Any, items: Any, *more: Any) -> None:
        if items:
            calls.append(len(items))
            if len(calls) in (1, 3):  # each costs one request at most
                raise error("no memory")
        copies(cache, items, *more)

    monkeypatch.setattr(owner, kind, fails_at_times)
    given: dict[str, Any] = {"max_new_tokens": 14, "num_beams": 3} | ENDLESS
    prompts = [prompt(seed, 5) for seed in range(6)]
    requests = [pair.engine.submit(ids, **given) for ids in prompts]
    num_right = 0
    for request, ids in zip(requests, prompts):
        try:
            sequences = request.result(PATIENCE).sequences
        except error:
            continue  # its step failed, and no other
        assert sequences == stock_rows(pair.stock, ids, **given)
        num_right += 1
    assert len(calls) >= 3 and num_right >= 4
    monkeypatch.undo()
    settle(pair)


def test_nan_logits(make_pair: MakePair) -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[MARKER] = float("nan")
    pair = make_pair(model, num_blocks=64)
    bad = prompt(5, marker=True)
    for _ in range(2):
        with neighbours(pair):
            for more in (SAMPLE, SAMPLE | {"num_return_sequences": 3}):
                with pytest.raises(RuntimeError, match=r"inf.*nan") as stock_error:
                    pair.stock.generate(bad, max_new_tokens=5, **more)
                for call in (
                    lambda more=more: pair.engine.submit(bad, max_new_tokens=5, **more).result(PATIENCE),
                    lambda more=more: pair.paged.generate(bad, max_new_tokens=5, **more),
                ):
                    with pytest.raises(RuntimeError, match=r"inf.*nan") as error:
                        call()
                    assert str(error.value) == str(stock_error.value)
            found = pair.engine.submit(bad, max_new_tokens=5).result(PATIENCE).sequences
            assert found == stock_rows(pair.stock, bad, max_new_tokens=5)


class Caller(LogitsProcessor):
    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self._model(input_ids[:, -4:]).logits[:, -1]
        text = self._model.generate(input_ids[:1, -3:], max_new_tokens=2, num_beams=2)
        return scores + 0.3 * logits + 0.01 * text.float().mean()


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_processor_that_calls_the_model(pair: Pair, num_beams: int) -> None:
    """Would break: a deadlock between a loop and the worker that it asks for another forward."""
    given = {"max_new_tokens": 5, "num_beams": num_beams} | ENDLESS
    expected = pair.stock.generate(prompt(5), **given, logits_processor=[Caller(pair.stock)])
    guided = stock_rows(pair.stock, prompt(6), **given, guidance_scale=1.5)
    with neighbours(pair):
        assert torch.equal(pair.paged.generate(prompt(5), **given, logits_processor=[Caller(pair.paged)]), expected)
        own = pair.engine.submit(prompt(5), **given, logits_processor=[Caller(pair.paged)])
        assert own.result(PATIENCE).sequences == [expected[0, 8:].tolist()]
        assert pair.engine.submit(prompt(6), **given, guidance_scale=1.5).result(PATIENCE).sequences == guided


def test_left_padding_is_no_prompt(pair: Pair) -> None:
    batch = ragged_batch((11, 4))
    row = {name: value[1:] for name, value in batch.items()}
    expected = pair.stock.generate(**batch, max_new_tokens=12)[1, 11:].tolist()
    for more in ({}, {"num_beams": 1, "logits_processor": [Gate(-1)]}):
        ids, mask = row["input_ids"], row["attention_mask"]
        found = pair.engine.submit(ids, attention_mask=mask, max_new_tokens=12, **more).result(PATIENCE).token_ids
        assert found == expected[: len(found)] and len(found) > 3
    settle(pair)


def test_a_large_pool_costs_nothing_until_it_is_used(make_pair: MakePair) -> None:
    before = psutil.Process().memory_info().rss
    pair = make_pair(num_blocks=200_000, block_size=16)  # 1.6 GB
    with logged_messages() as messages:
        assert pair.engine.submit([5, 6], max_new_tokens=4).result(PATIENCE).token_ids
    assert not messages
    assert pair.engine.core.kv_cache.tensor.nbytes > 1.5e9
    assert psutil.Process().memory_info().rss - before < 4e8


def _patched(**settings: Any) -> tuple[Any, Any]:
    stock = build("llama")
    return stock, hf_paged.patch(copy.deepcopy(stock), **({"block_size": 4, "num_blocks": 256} | settings))


def _busy(model: Any) -> list[Any]:
    given = {"max_new_tokens": 240} | ENDLESS
    for more in (*KINDS, {"logits_processor": [NextToken()]}, {"streamer": PutRecorder()}):
        in_background(model.generate, prompt(1), **given, **more)
    requests = [model.paged.submit(prompt(seed), **given, **more) for seed, more in enumerate(KINDS)]
    requests.append(model.paged.submit(prompt(5), **given, logits_processor=[NextToken()]))
    eventually(lambda: model.paged.stats().num_steps > 10, "nothing runs")
    return requests


def exit_with_slow_user_code() -> None:
    _, model = _patched()
    for seconds in (0.02, 30):
        in_background(model.generate, prompt(1), max_new_tokens=100, logits_processor=[Sleeper(seconds)], **ENDLESS)
    _KEPT.append((model, _busy(model)))


class _SlowToFree:
    def __init__(self) -> None:
        self.tensors = [torch.ones(64, 64).view(-1) for _ in range(100)]

    def __del__(self) -> None:
        while self.tensors:
            self.tensors.pop().sort()
            time.sleep(0.001)  # another thread's turn


class _Freed:
    """What a worker's thread serves, and is the last to hold."""

    def __init__(self) -> None:
        self.begun, self.dropped, self.held = threading.Event(), threading.Event(), _SlowToFree()

    def serve(self, is_woken: bool) -> bool:
        self.begun.set()
        return not self.dropped.wait(5)


def exit_while_the_engine_is_freed() -> None:
    """By its own thread, which had the last step in its hands when the model was dropped."""
    freed, woken = _Freed(), threading.Event()
    alive, begun, dropped = weakref.ref(freed), freed.begun, freed.dropped
    woken.set()
    in_background(hf_paged.engine.worker._serve, alive, woken)
    begun.wait(5)
    del freed
    print("right" if alive() is not None else "wrong")
    dropped.set()
    eventually(lambda: alive() is None, "the engine is not freed")


def exit_with_other_threads() -> None:
    stock, model = _patched()
    expected = stock.generate(prompt(1), max_new_tokens=30, **ENDLESS)

    def work() -> None:
        print("right" if torch.equal(model.generate(prompt(1), max_new_tokens=30, **ENDLESS), expected) else "wrong")

    for _ in range(3):
        threading.Thread(target=work).start()


def exit_with_handlers_that_generate() -> None:
    """Before the package's own handler they do, and after it (registered before the import) they are refused."""
    stock, model = _patched()
    kinds: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"logits_processor": [NextToken()]}]
    expected = [stock_rows(stock, prompt(1), max_new_tokens=8, **more) for more in kinds]
    cache = hf_paged.PagedCache(model)
    model(prompt(1), past_key_values=cache)

    def before() -> None:
        for more, rows in zip(kinds, expected):
            print("right" if stock_rows(model, prompt(1), max_new_tokens=8, **more) == rows else "wrong")

    def after() -> None:
        for more in kinds:
            refused(model.generate, prompt(1), max_new_tokens=8, **more)
            refused(model.paged.submit, prompt(1), max_new_tokens=8, **more)
        refused(model, prompt(2, 1), past_key_values=cache)
        print("right" if model.paged.stats().num_blocks == 256 else "wrong")

    def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except RuntimeError as error:
            print("right" if "the interpreter is ending" in str(error) else "wrong")
        else:
            print("wrong")

    atexit.unregister(PROCESS.at_exit)
    atexit.register(after)
    atexit.register(PROCESS.at_exit)
    atexit.register(before)
    _KEPT.append((model, _busy(model)))


def exit_by_ctrl_c() -> None:
    _, model = _patched()
    _KEPT.append((model, _busy(model)))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    model.generate(prompt(1), max_new_tokens=240, **ENDLESS)


def fork_when_idle() -> None:
    stock, model = _patched()
    given = {"max_new_tokens": 12}
    expected = [stock_rows(stock, prompt(1), **given, **more) for more in ({}, {"num_beams": 2})]

    def check() -> None:
        for rows, more in zip(expected, ({}, {"num_beams": 2})):
            assert stock_rows(model, prompt(1), **given, **more) == rows
            assert model.paged.submit(prompt(1), **given, **more).result(10).sequences == rows
        model.paged.check_invariants()
        stats = model.paged.stats()
        assert stats.num_free_blocks == stats.num_blocks

    check()
    in_child(check)
    check()
    in_child(lambda: in_child(check))
    check()


def fork_while_ctrl_c_is_held_back() -> None:
    """On another thread: in the child there is none that would let it go."""
    handler, codes = signal.getsignal(signal.SIGINT), list[int]()

    def fork() -> None:
        if (pid := os.fork()) == 0:
            os._exit(0 if signal.getsignal(signal.SIGINT) is handler else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    with deferred_interrupt():
        assert signal.getsignal(signal.SIGINT) is not handler
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert codes == [0] and signal.getsignal(signal.SIGINT) is handler


def fork_with_requests_in_flight() -> None:
    stock, model = _patched(num_blocks=512, max_num_seqs=4)
    given = {"max_new_tokens": 120} | ENDLESS
    kinds: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"logits_processor": [NextToken()]}, {"num_beams": 2}]
    expected = [stock_rows(stock, prompt(seed), **given, **more) for seed, more in enumerate(kinds)]
    futures = [in_background(stock_rows, model, prompt(seed), **given, **more) for seed, more in enumerate(kinds)]
    requests = [model.paged.submit(prompt(seed), **given, **more) for seed, more in enumerate(kinds)]
    queued = [model.paged.submit(prompt(1), **given, num_beams=2) for _ in range(6)]
    eventually(lambda: model.paged.stats().num_steps > 10, "nothing runs")
    assert not all(request.is_done for request in requests)

    def check() -> None:
        for request in (*requests, *queued):
            try:
                request.result(5)
                assert request.finish_reason == "length"  # it was done before
            except RuntimeError as error:
                assert "forked" in str(error)
        model.paged.check_invariants()
        gc.collect()
        stats = model.paged.stats()
        assert stats.num_free_blocks == stats.num_blocks and stats.num_waiting == 0, stats
        for more in ({}, {"num_beams": 2}):
            assert stock_rows(model, prompt(9), max_new_tokens=4, **more) == quick[bool(more)]
        model.paged.check_invariants()

    quick = [stock_rows(stock, prompt(9), max_new_tokens=4, **more) for more in ({}, {"num_beams": 2})]
    for _ in range(3):
        in_child(check)
    assert [future.result(30) for future in futures] == expected
    assert [request.result(30).sequences for request in requests] == expected
    assert all(request.result(30).finish_reason == "length" for request in queued)
    stats = model.paged.stats()
    assert stats.num_free_blocks == stats.num_blocks


def fork_in_the_midst_of_a_step() -> None:
    """While another thread is in a forward of the model; the child trains."""
    stock, model = _patched()
    expected = _gradients(stock)
    is_inside, may_go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        if threading.current_thread().name == "hf_paged":
            is_inside.set()
            may_go_on.wait(PATIENCE)

    model.model.layers[1].register_forward_pre_hook(hf_paged.packed_hook(hold))
    request = model.paged.submit(prompt(1), max_new_tokens=1)
    assert is_inside.wait(PATIENCE)

    def check() -> None:
        may_go_on.set()
        # A thread of the child's may well have the id of the parent's thread that was in the step.
        for gradients in (*at_once(_gradients, [model] * 4), _gradients(model)):
            assert gradients.keys() == expected.keys(), set(expected) - set(gradients)
            assert all(torch.equal(gradients[name], expected[name]) for name in expected)
        assert model.config._attn_implementation == stock.config._attn_implementation
        assert stock_rows(model, prompt(2), max_new_tokens=4) == stock_rows(stock, prompt(2), max_new_tokens=4)

    in_child(check)
    assert not request.is_done
    may_go_on.set()
    assert request.result(PATIENCE).sequences == stock_rows(stock, prompt(1), max_new_tokens=1)
    check()


def _gradients(model: Any) -> dict[str, Tensor]:
    """The gradient of each weight that has one, after a training step from zero."""
    with _ONE_TRAINS:
        model.zero_grad()
        model(prompt(3), labels=prompt(3)).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


_ONE_TRAINS = threading.Lock()
_KEPT: list[Any] = []

# What runs in a process of its own, and how often it says "right".
PROCESSES: dict[Callable[[], None], int] = {
    exit_with_slow_user_code: 0,
    exit_while_the_engine_is_freed: 1,
    exit_with_other_threads: 3,
    exit_with_handlers_that_generate: 11,
    exit_by_ctrl_c: 0,
    fork_when_idle: 0,
    fork_while_ctrl_c_is_held_back: 0,
    fork_with_requests_in_flight: 0,
    fork_in_the_midst_of_a_step: 0,
}


@pytest.fixture(scope="module")
def processes() -> dict[str, Any]:
    return ends_of_processes(__file__)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.__name__)
def test_processes(processes: dict[str, Any], process: Callable[[], None]) -> None:
    """Would break: an interpreter that never ends, that crashes at its end, or a fork that inherits a dead worker."""
    found = processes[process.__name__]
    assert found["code"] == (-signal.SIGINT if process is exit_by_ctrl_c else 0), found
    assert not any(word in found["text"] for word in ("Fatal", "terminate called", "wrong"))
    assert found["text"].count("right") == PROCESSES[process]
    if process.__name__.startswith("exit") and process is not exit_by_ctrl_c:
        assert "Traceback" not in found["text"], found["text"]


if __name__ == "__main__":
    run_processes(PROCESSES)
