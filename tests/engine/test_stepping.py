"""`engine.pause()`, `resume()` and `step()`: nothing runs unasked, nothing hangs, and the tokens stay what they are.

What ends whole processes runs in children of one subprocess: this file run as a script.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import hf_paged
from helpers.models import build, name_of, random_ids
from helpers.pairs import MakePair, Pair
from helpers.processes import ends_of_processes, in_child, run_processes
from helpers.requests import ENDLESS, SAMPLE, Brake, Gate, settle, stock_rows
from helpers.user_code import NextToken, Sleeper
from helpers.waiting import PATIENCE, at_once, eventually, in_background
from hf_paged import PagedCache
from hf_paged.engine import pause, step_loop

BEAMS = {"num_beams": 3}
OWN_CODE = {"logits_processor": [NextToken()]}  # the loop runs on a thread of its own
MODES: list[dict[str, Any]] = [{}, SAMPLE, SAMPLE | {"num_return_sequences": 3}, BEAMS, OWN_CODE]

pytestmark = pytest.mark.usefixtures("ctrl_c")


def interrupted(call: Callable[[], Any]) -> None:
    """A call that waits for ever, until Ctrl-C."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    call()


def num_steps(pair: Pair) -> int:
    return pair.engine.stats().num_steps


def is_still(pair: Pair, seconds: float = 0.15) -> bool:
    """Whether no step is run in this time."""
    before = num_steps(pair)
    time.sleep(seconds)
    return num_steps(pair) == before


def step_all(pair: Pair) -> list[dict[str, Any]]:
    return list(iter(pair.engine.step, None))


@pytest.mark.parametrize("model", ["llama", "falcon_rotary"])
@pytest.mark.parametrize("mode", MODES, ids=name_of)
def test_step_by_step_gives_the_same_tokens(make_pair: MakePair, mode: dict[str, Any], model: str) -> None:
    pair = make_pair(model, num_blocks=64, block_size=4)
    arguments = {"max_new_tokens": 8} | ENDLESS | mode
    torch.manual_seed(5)
    expected = stock_rows(pair.stock, random_ids(1, 9), **arguments)
    pair.engine.pause()
    torch.manual_seed(5)
    request = pair.engine.submit(random_ids(1, 9), **arguments)
    events = step_all(pair)
    assert request.is_done, "there was something left to run"
    assert request.result().sequences == expected
    assert [event["step"] for event in events] == list(range(1, len(events) + 1)) and len(events) == 8
    settle(pair)


def test_many_at_once_step_by_step(make_pair: MakePair) -> None:
    """Requests and threads, preempted and brought back. Would break: a step that leaves a caller out, or for ever."""
    pair = make_pair(num_blocks=24, block_size=4)
    pair.engine.pause()
    given = {"max_new_tokens": 16} | ENDLESS
    requests = [(n, pair.engine.submit(random_ids(1, 9, seed=n), **given, **BEAMS)) for n in range(2)]
    requests += [(n, pair.engine.submit(random_ids(1, 9, seed=n), **given)) for n in range(2, 6)]
    future = in_background(pair.paged.generate, random_ids(1, 9, seed=6), **given)
    eventually(lambda: len(pair.engine.snapshot()["groups"]) >= 7, "a caller is not there")
    step_all(pair)
    assert pair.engine.stats().num_preemptions > 0
    for n, request in requests:
        mode = BEAMS if n < 2 else {}
        assert request.is_done and request.result().sequences == stock_rows(
            pair.stock, random_ids(1, 9, seed=n), **given, **mode
        )
    assert torch.equal(future.result(PATIENCE), pair.stock.generate(random_ids(1, 9, seed=6), **given))
    settle(pair)


def test_nothing_runs_in_a_pause(pair: Pair) -> None:
    """Would break: a picture that moves while it is explained; or two tabs press "pause", and one "resume" won't do."""
    with pytest.raises(RuntimeError, match=r"pause\(\)"):
        pair.engine.step()
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=120, **ENDLESS)
    eventually(lambda: num_steps(pair) > 3, "nothing runs")
    for _ in range(2):
        pair.engine.pause()
    assert pair.engine.is_paused and pair.engine.snapshot()["is_paused"]
    assert is_still(pair) and not request.is_done
    later = pair.engine.submit(random_ids(1, 5), max_new_tokens=3)
    assert is_still(pair) and pair.engine.stats().num_waiting == 1
    for _ in range(2):
        pair.engine.resume()
        assert not pair.engine.is_paused
    assert request.result(PATIENCE).sequences == stock_rows(pair.stock, random_ids(1, 9), max_new_tokens=120, **ENDLESS)
    assert later.result(PATIENCE).sequences == stock_rows(pair.stock, random_ids(1, 5), max_new_tokens=3)
    settle(pair)


def test_pause_waits_for_the_running_step(pair: Pair) -> None:
    """Would break: "paused" while a forward still writes into the pool."""
    brake = Brake(pair)
    with brake.at(step=2) as reached:
        request = pair.engine.submit(random_ids(1, 9), max_new_tokens=60, **ENDLESS)
        reached()
        future = in_background(pair.engine.pause)
        time.sleep(0.1)
        assert not future.done(), "it came back in the midst of a step"
        before = num_steps(pair)
        brake.release()
    assert future.result(PATIENCE) is None and num_steps(pair) == before + 1 and is_still(pair)
    pair.engine.resume()
    request.result(PATIENCE)
    settle(pair)


@pytest.mark.parametrize("was_paused", [False, True])
def test_ctrl_c_in_pause(pair: Pair, was_paused: bool) -> None:
    """Would break: a pause that no caller knows of, because the call that began it never came back."""
    brake = Brake(pair)
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=60, **ENDLESS)
    with brake.at(step=2) as reached:
        reached()
        if was_paused:
            pair.engine.core.worker.pause._is_on = True
        with pytest.raises(KeyboardInterrupt):
            interrupted(pair.engine.pause)
        assert pair.engine.is_paused == was_paused
    pair.engine.resume()
    request.result(PATIENCE)
    settle(pair)


def test_an_idle_engine_stays_paused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a pause that the end of the worker's thread forgets."""
    monkeypatch.setattr("hf_paged.engine.worker.IDLE_SECONDS", 0.01)
    monkeypatch.setattr("hf_paged.engine.worker.REST_SECONDS", 0.01)
    pair.engine.submit(random_ids(1, 9), max_new_tokens=3).result(PATIENCE)
    pair.engine.pause()
    eventually(lambda: pair.engine.core.worker._thread is None, "the thread doesn't end")
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=3, **ENDLESS)
    assert is_still(pair)
    assert len(step_all(pair)) == 3 and request.result(PATIENCE)
    settle(pair)


@pytest.mark.parametrize("model", ["llama", "falcon_rotary"])
@pytest.mark.parametrize("mode", [{}, BEAMS, OWN_CODE], ids=name_of)
@pytest.mark.parametrize("when", ["before its first step", "later", "dropped"])
def test_cancelling_frees_the_blocks_in_a_pause(
    make_pair: MakePair, mode: dict[str, Any], model: str, when: str
) -> None:
    """Would break: a stop button, or a closed tab, without effect as long as the engine stands still."""
    pair = make_pair(model, num_blocks=64, block_size=4)
    pair.engine.pause()
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=20, **ENDLESS, **mode)
    if when != "before its first step":
        for _ in range(3):
            assert pair.engine.step() is not None
        assert pair.engine.stats().num_free_blocks < 64
        # A forward of its own waits as one in the queue does.
        eventually(
            lambda: (
                pair.engine.stats().num_waiting + pair.engine.core.worker.pause._num_held == 1
                or pair.engine.core.scheduler.queues.has_work
            ),
            "its next forward is not there",
        )
    if when == "dropped":
        del request
        gc.collect()
    else:
        request.cancel()
        assert request.result(PATIENCE).finish_reason == "cancelled"
    eventually(lambda: pair.engine.stats().num_free_blocks == pair.engine.stats().num_blocks, "blocks are held")
    assert pair.engine.is_paused and pair.engine.step() is None
    settle(pair)


@pytest.mark.parametrize("model", ["llama", "falcon_rotary"])
@pytest.mark.parametrize("mode", [{}, BEAMS], ids=name_of)
def test_ctrl_c_ends_a_call_that_waits_in_a_pause(make_pair: MakePair, mode: dict[str, Any], model: str) -> None:
    pair = make_pair(model)
    pair.engine.pause()
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: pair.paged.generate(random_ids(1, 9), max_new_tokens=20, **ENDLESS, **mode))
    assert pair.engine.is_paused and pair.engine.stats().num_running == 0
    assert pair.engine.step() is None
    settle(pair)


@pytest.mark.parametrize("mode", [{}, BEAMS], ids=name_of)
def test_the_pausing_thread_is_warned_when_it_waits(
    pair: Pair, caplog: pytest.LogCaptureFixture, mode: dict[str, Any]
) -> None:
    """Would break: pause() and generate() in one cell stand still without a word."""
    given = {"max_new_tokens": 5} | ENDLESS | mode
    threading.Timer(0.3, pair.engine.resume).start()
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        pair.engine.pause()
        other = in_background(pair.paged.generate, random_ids(1, 5), max_new_tokens=2)
        found = pair.paged.generate(random_ids(1, 9), **given)
        other.result(PATIENCE)
    assert torch.equal(found, pair.stock.generate(random_ids(1, 9), **given))
    assert [record.getMessage().count("resume()") for record in caplog.records] == [1], caplog.text
    settle(pair)


def test_a_cache_can_be_read_in_a_pause(pair: Pair) -> None:
    """Would break: looking at keys, which needs no step, hangs."""
    cache = PagedCache(pair.paged)
    with torch.no_grad():
        pair.paged(random_ids(1, 9), past_key_values=cache)
    pair.engine.pause()
    keys = cache.layers[0].keys
    assert keys is not None and keys.shape[2] == 9
    cache.crop(-4)
    assert cache.get_seq_length() == 5
    pair.engine.resume()
    del cache, keys
    gc.collect()
    settle(pair)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_preempted_cache_comes_back_by_a_step(make_pair: MakePair, preemption: str) -> None:
    """Would break: keys that have to be computed again are, in spite of the pause; or they never are."""
    pair = make_pair(num_blocks=8, block_size=4, preemption=preemption, enable_prefix_caching=False)
    cache = PagedCache(pair.paged)
    with torch.no_grad():
        pair.paged(random_ids(1, 17), past_key_values=cache)
    before = cache.layers[0].keys.clone()
    pair.engine.submit(random_ids(1, 20, seed=3), max_new_tokens=8, **ENDLESS).result(PATIENCE)
    assert pair.engine.stats().num_preemptions == 1
    pair.engine.pause()
    future = in_background(lambda: cache.layers[0].keys)
    if preemption == "recompute":
        assert is_still(pair) and not future.done()
        event = pair.engine.step()
        assert event is not None and event["num_tokens"] == 17
    torch.testing.assert_close(future.result(PATIENCE), before)
    del future
    pair.engine.resume()
    cache.reset()
    settle(pair)


def test_a_step_is_one_step_and_says_which(pair: Pair) -> None:
    """Would break: "advance one step" that runs two, or tells of another one."""
    pair.engine.pause()
    requests = [pair.engine.submit(random_ids(1, 9, seed=n), max_new_tokens=4, **ENDLESS) for n in range(2)]
    for n in range(4):
        event = pair.engine.step()
        assert event is not None
        picture = pair.engine.snapshot()
        assert [e for e in picture["events"] if e["kind"] == "step"][-1] == event
        assert event["step"] == picture["num_steps"] == n + 1 and is_still(pair, 0.02)
        assert [chunk[2:] for chunk in event["chunks"]] == [[0, 9] if n == 0 else [8 + n, 1]] * 2
    assert pair.engine.step() is None and all(request.is_done for request in requests)
    settle(pair)


@pytest.mark.parametrize("model", ["llama", "falcon_rotary"])
def test_steps_from_many_threads_come_one_after_another(make_pair: MakePair, model: str) -> None:
    """Would break: two tabs press "step" at once and get one step, or the same one."""
    pair = make_pair(model, num_blocks=64, block_size=4)
    pair.engine.pause()
    modes: list[dict[str, Any]] = [{}, OWN_CODE, BEAMS]
    given = {"max_new_tokens": 25} | ENDLESS
    requests = [pair.engine.submit(random_ids(1, 9), **given, **mode) for mode in modes]
    events = at_once(lambda _: [pair.engine.step() for _ in range(3)], range(6))
    steps = sorted(event["step"] for own in events for event in own if event is not None)
    assert steps == list(range(1, 19)) and num_steps(pair) == 18 and is_still(pair)
    pair.engine.resume()
    for request, mode in zip(requests, modes):
        assert request.result(PATIENCE).sequences == stock_rows(pair.stock, random_ids(1, 9), **given, **mode)
    settle(pair)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3])
def test_a_step_waits_for_callers_between_two_forwards(pair: Pair, seconds: float) -> None:
    """Would break: "nothing to do" while a beam search chooses its beams."""
    pair.engine.pause()
    request = pair.engine.submit(
        random_ids(1, 9), max_new_tokens=5, logits_processor=[Sleeper(seconds)], **BEAMS, **ENDLESS
    )
    assert len(step_all(pair)) == 5 and request.result(PATIENCE)
    settle(pair)


def test_a_step_does_not_wait_for_ever(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: "step" hangs as long as a caller's own code does."""
    monkeypatch.setattr(pause, "STEP_SECONDS", 1000.0)
    pair.engine.pause()
    with Gate(1) as gate:
        request = pair.engine.submit(random_ids(1, 9), max_new_tokens=5, **ENDLESS, **gate.arguments)
        assert pair.engine.step() is not None and pair.engine.step() is not None
        assert gate.reached.wait(PATIENCE)
        monkeypatch.setattr(pause, "STEP_SECONDS", 0.1)
        assert pair.engine.step() is None
        # With something else to run there is no reason to wait for it.
        monkeypatch.setattr(pause, "STEP_SECONDS", 1000.0)
        other = pair.engine.submit(random_ids(1, 5), max_new_tokens=20, **ENDLESS)
        assert all(pair.engine.step() is not None for _ in range(10))
        other.cancel()
    assert len(step_all(pair)) == 3 and request.result(PATIENCE)
    settle(pair)


def test_stepping_fails_nobody_for_lack_of_room(make_pair: MakePair) -> None:
    """Would break: who waits for blocks that another caller holds is refused, because another caller read for long."""
    pair = make_pair(num_blocks=9, block_size=4)
    pair.engine.pause()
    with Gate(2) as gate:
        holder = pair.engine.submit(random_ids(1, 17), max_new_tokens=6, **ENDLESS, **gate.arguments)
        for _ in range(3):
            pair.engine.step()
        assert gate.reached.wait(PATIENCE)
        other = pair.engine.submit(random_ids(1, 17, seed=2), max_new_tokens=4, **ENDLESS)
        step_all(pair)
    step_all(pair)
    assert {request.result(PATIENCE).finish_reason for request in (holder, other)} == {"length"}
    settle(pair)


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_pause_is_no_time_without_room(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, is_stepped: bool
) -> None:
    """Would break: who finds no room is refused right after a long pause, as if no caller had ever come back."""
    monkeypatch.setattr("hf_paged.engine.step_loop.ROOM_SECONDS", 1.0)
    pair = make_pair(num_blocks=12, block_size=4, preemption="recompute", swap_space_gib=0.0)
    mask = torch.ones(1, 17, dtype=torch.long)
    mask[0, 3] = 0  # a hole: what it holds can't be computed again
    prompt = random_ids(1, 17, seed=1)
    given = {"max_new_tokens": 4} | ENDLESS
    with Gate(1) as gate:
        holder = in_background(pair.paged.generate, prompt, attention_mask=mask, **given, **gate.arguments)
        assert gate.reached.wait(PATIENCE)
        other = pair.engine.submit(random_ids(1, 33, seed=2), **given)
        eventually(lambda: pair.engine.core.worker.loop._stuck[1] > 0, "there is room")
        pair.engine.pause()
        time.sleep(1.1)
        if is_stepped:
            future = in_background(pair.engine.step)
            time.sleep(0.2)
            assert not future.done() and not other.is_done
            gate.open()
            assert future.result(PATIENCE) is not None
        pair.engine.resume()
        time.sleep(0.2)
        assert is_stepped or not other.is_done
        gate.open()
    holder.result(PATIENCE)
    assert other.result(PATIENCE).finish_reason == "length"
    settle(pair)


def test_a_step_that_raises_fails_its_request(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: the error comes to the user who pressed the button, or the button hangs."""
    pair.engine.submit(random_ids(1, 9), max_new_tokens=1).result(PATIENCE)
    pair.engine.pause()
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=5)
    with monkeypatch.context() as patched:
        patched.setattr(pair.engine.core.runner, "run", Mock(side_effect=FloatingPointError("burnt")))
        assert pair.engine.step() is None
    assert request.is_done
    with pytest.raises(FloatingPointError):
        request.result()
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=5, **ENDLESS)
    assert len(step_all(pair)) == 5 and request.result(PATIENCE)
    settle(pair)


def test_resume_during_a_step(pair: Pair) -> None:
    """Would break: "resume" pressed while a step runs loses the step, or hangs the thread that asked for it."""
    brake = Brake(pair)
    pair.engine.pause()
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=5, **ENDLESS)
    with brake.at() as reached:
        future = in_background(pair.engine.step)
        reached()
        pair.engine.resume()
    assert future.result(PATIENCE)["step"] == 1
    request.result(PATIENCE)
    settle(pair)


def test_resume_before_a_step_has_begun(pair: Pair) -> None:
    """Would break: one step after the other passes the thread that asked for one, which waits until all is over."""
    brake = Brake(pair)
    # Longer than what is between two steps, or the thread might come between them by chance.
    pair.paged.model.layers[1].register_forward_pre_hook(hf_paged.packed_hook(lambda *_: time.sleep(0.01)))
    pair.engine.pause()
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=60, **ENDLESS)
    with brake.at(step=50):
        with pair.engine.exclusive():
            future = in_background(pair.engine.step)
            eventually(pair.engine.core.worker.pause._stepper.locked, "it doesn't ask for a step")
            pair.engine.resume()
        assert future.result(PATIENCE) is not None and not request.is_done
        request.cancel()
    settle(pair)


def is_waited_for(pair: Pair) -> bool:
    """Whether another thread waits for the step lock, which this one has."""
    lock = pair.engine.core.worker.loop._next
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def test_no_thread_takes_the_pool_past_those_who_wait(pair: Pair) -> None:
    """Would break: who runs step after step, or has the pool again and again, keeps others from it."""
    turns: list[str] = []

    def other() -> None:
        with pair.engine.exclusive():
            turns.append("other")

    for _ in range(20):
        with pair.engine.exclusive():
            future = in_background(other)
            eventually(partial(is_waited_for, pair), "it doesn't wait")
        for _ in range(3):
            with pair.engine.exclusive():
                turns.append("own")
        future.result(PATIENCE)
    assert turns == ["other", "own", "own", "own"] * 20


def test_a_signal_handler_that_pauses_while_its_thread_waits(pair: Pair) -> None:
    """Would break: a handler that waits behind the very wait that it interrupts."""
    has_it, goes = threading.Event(), threading.Event()

    def other() -> None:
        with pair.engine.exclusive():
            has_it.set()
            assert goes.wait(PATIENCE)

    def handler(*_: Any) -> None:
        threading.Timer(0.2, goes.set).start()
        pair.engine.pause()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        future = in_background(other)
        assert has_it.wait(PATIENCE)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pair.engine.exclusive():
            assert pair.engine.is_paused and goes.is_set()
        future.result(PATIENCE)
    finally:
        signal.signal(signal.SIGALRM, before)
    settle(pair)


def test_ctrl_c_in_a_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a permission for a step that is not waited for any more, and that the next request uses."""
    pair.engine.pause()
    with Gate() as gate:
        request = pair.engine.submit(random_ids(1, 9), max_new_tokens=3, **ENDLESS, **gate.arguments)
        assert pair.engine.step() is not None
        assert gate.reached.wait(PATIENCE)
        monkeypatch.setattr(pause, "STEP_SECONDS", 1000.0)
        with pytest.raises(KeyboardInterrupt):
            interrupted(pair.engine.step)
    assert is_still(pair)
    assert len(step_all(pair)) == 2 and request.result(PATIENCE)
    settle(pair)


def test_pause_in_a_hook(pair: Pair) -> None:
    """Would break: a hook that pauses waits for its own step."""
    calls: list[Any] = []

    def hook(*_: Any) -> None:
        while calls:
            calls.pop()()

    pair.paged.model.layers[1].register_forward_pre_hook(hf_paged.packed_hook(hook))
    pair.engine.submit(random_ids(1, 5), max_new_tokens=1).result(PATIENCE)
    calls += [pair.engine.pause]
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=5, **ENDLESS)
    eventually(lambda: pair.engine.is_paused and num_steps(pair) == 2, "the hook did not pause")
    assert is_still(pair)
    assert pair.engine.step() is not None
    pair.engine.resume()
    request.result(PATIENCE)
    settle(pair)


@pytest.mark.parametrize("mode", [{}, BEAMS, OWN_CODE], ids=name_of)
def test_unpatching_in_a_pause(pair: Pair, mode: dict[str, Any]) -> None:
    pair.engine.pause()
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=20, **ENDLESS, **mode)
    future = in_background(pair.paged.generate, random_ids(1, 9), max_new_tokens=20, **ENDLESS, **mode)
    eventually(lambda: pair.engine.stats().num_waiting == 2, "a caller is not there")
    engine = pair.engine
    hf_paged.unpatch(pair.paged)
    with pytest.raises(RuntimeError, match="unpatched"):
        future.result(PATIENCE)
    assert request.result(PATIENCE).finish_reason == "cancelled"
    assert not engine.is_paused
    with hf_paged.patched(pair.paged, block_size=4, num_blocks=64):
        expected = pair.stock.generate(random_ids(1, 9), max_new_tokens=4)
        assert torch.equal(pair.paged.generate(random_ids(1, 9), max_new_tokens=4), expected)


def test_releasing_the_memory_in_a_pause(pair: Pair) -> None:
    expected = stock_rows(pair.stock, random_ids(1, 9), max_new_tokens=8, **ENDLESS)
    pair.engine.pause()
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=8, **ENDLESS)
    for _ in range(3):
        pair.engine.step()
    pair.engine.release()
    assert pair.engine.is_paused
    event = pair.engine.step()
    assert event is not None and event["num_prefill_tokens"] == 9 + 3, "computed again"
    pair.engine.resume()
    assert request.result(PATIENCE).sequences == expected
    settle(pair)


def test_a_dropped_engine_in_a_pause() -> None:
    """Would break: a thread that holds a model that is not used any more, because it was paused."""
    model = hf_paged.patch(build("llama"), block_size=4, num_blocks=64)
    model.paged.pause()
    request = model.paged.submit(random_ids(1, 9), max_new_tokens=8)
    thread = model.paged.core.worker._thread
    assert thread is not None
    del model, request
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


_KEPT: list[Any] = []


def _patched() -> tuple[Any, Any]:
    stock = build("llama")
    return stock, hf_paged.patch(build("llama"), block_size=4, num_blocks=64)


def exit_with_threads_that_wait() -> None:
    """Threads that are no daemons are waited for by the interpreter: no thread is left that would end the pause."""
    stock, model = _patched()
    given = {"max_new_tokens": 8} | ENDLESS
    expected = stock.generate(random_ids(1, 9), **given)
    results: list[Tensor] = []

    def call(**mode: Any) -> None:
        results.append(model.generate(random_ids(1, 9), **given, **mode))
        if len(results) == 2:
            print("right" if any(torch.equal(result, expected) for result in results) else "wrong")

    model.paged.pause()
    for mode in ({}, BEAMS):
        threading.Thread(target=call, kwargs=mode).start()
    eventually(lambda: model.paged.stats().num_waiting == 2, "a caller is not there")


def exit_of_a_paused_engine() -> None:
    _, model = _patched()
    model.paged.pause()
    kept = _KEPT[:] = [model.paged.submit(random_ids(1, 9), max_new_tokens=8, **mode) for mode in ({}, BEAMS, OWN_CODE)]
    in_background(model.generate, random_ids(1, 9), max_new_tokens=8)
    # A daemon thread that is still busy with torch at the interpreter's end aborts it, with or without an engine.
    eventually(lambda: model.paged.stats().num_waiting == 4, "a caller is not there")
    model.paged.step()
    print("right" if len(kept) == 3 and model.paged.is_paused else "wrong")


def fork_in_a_pause() -> None:
    """Beside threads that wait for a step, and for what a step gives."""
    stock, model = _patched()
    given = {"max_new_tokens": 8} | ENDLESS
    expected = stock.generate(random_ids(1, 9), **given)
    model.paged.pause()
    slow = model.paged.submit(random_ids(1, 9), logits_processor=[Sleeper(0.5)], **given)
    call = in_background(model.generate, random_ids(1, 9), **given)
    model.paged.step()
    steps = [in_background(model.paged.step) for _ in range(3)]

    def check() -> None:
        assert not model.paged.is_paused
        found = model.generate(random_ids(1, 9), **given)
        model.paged.pause()
        request = model.paged.submit(random_ids(1, 9), **given)
        while model.paged.step():
            pass
        assert torch.equal(found, expected) and request.result(PATIENCE).token_ids == expected[0, 9:].tolist()

    in_child(check)
    for step in steps:
        step.result(PATIENCE)
    is_right = model.paged.is_paused and not slow.is_done
    model.paged.resume()
    rows = [call.result(PATIENCE)[0].tolist(), slow.prompt_token_ids + slow.result(PATIENCE).token_ids]
    print("right" if is_right and rows == expected.tolist() * 2 else "wrong")


PROCESSES = (exit_with_threads_that_wait, exit_of_a_paused_engine, fork_in_a_pause)


@pytest.fixture(scope="module")
def processes() -> dict[str, Any]:
    return ends_of_processes(__file__)


@pytest.mark.parametrize("name", [process.__name__ for process in PROCESSES])
def test_processes(processes: dict[str, Any], name: str) -> None:
    """Would break: a script that never ends, or a child that waits for threads it doesn't have."""
    found = processes[name]
    assert found["code"] == 0 and found["text"].split() == ["right"], found


def test_prompts_are_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a row that runs, until they fill a step or their time is over; alone they run at once."""
    model = hf_paged.patch(
        build("llama"), num_blocks=64, block_size=4, max_num_batched_tokens=16, max_prompt_delay=60.0
    )
    engine, later = model.paged, 0.0
    monkeypatch.setattr(step_loop, "time", SimpleNamespace(monotonic=lambda: later))
    engine.pause()
    prompts = random_ids(5, 6).tolist()
    requests = [engine.submit(prompts[0], max_new_tokens=40, eos_token_id=None)]
    engine.step()
    assert engine.stats().num_waiting == 0, "nothing runs that it could disturb"
    for count in (1, 2):
        requests.append(engine.submit(prompts[count], max_new_tokens=40, eos_token_id=None))
        engine.step()
        assert engine.stats().num_waiting == count
    later = 59.0
    engine.step()
    assert engine.stats().num_waiting == 2
    later = 61.0
    engine.step()
    assert engine.stats().num_waiting == 0, "they have waited long enough"
    requests.append(engine.submit(prompts[3], max_new_tokens=40, eos_token_id=None))
    engine.step()
    assert engine.stats().num_waiting == 1
    requests.append(engine.submit(random_ids(1, 12, seed=1)[0].tolist(), max_new_tokens=1, eos_token_id=None))
    engine.step()
    assert engine.stats().num_waiting == 0, "together they fill a step"
    monkeypatch.undo()
    engine.resume()
    stock = build("llama")
    for request, prompt in zip(requests[:4], prompts, strict=False):
        expected = stock.generate(torch.tensor([prompt]), max_new_tokens=40, eos_token_id=None)
        assert request.result(60).token_ids == expected[0, 6:].tolist()
    engine.check_invariants()


def test_prompts_come_in_chunks_that_a_step_has_time_for() -> None:
    """By what tokens were measured to cost, beside rows that decode."""
    model = hf_paged.patch(build("llama"), num_blocks=256, max_step_seconds=2.0)
    engine = model.paged
    engine.pause()
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (70, 500)]
    sizes = []

    def step(seconds_per_token: float | None) -> None:
        engine.core.pool.cost.seconds_per_token = seconds_per_token
        before = engine.stats().num_prefill_tokens
        engine.step()
        sizes.append(engine.stats().num_prefill_tokens - before + 1)  # the prompt's first one isn't counted

    requests = [engine.submit(prompts[0], max_new_tokens=8, eos_token_id=None)]
    step(None)
    requests.append(engine.submit(prompts[1], max_new_tokens=4, eos_token_id=None))
    for seconds in (0.02, 1.0, 1e-6):
        step(seconds)
    assert sizes == [70, 100, 64, 336]
    engine.resume()
    stock = build("llama")
    for request, prompt in zip(requests, prompts, strict=True):
        tokens = request.result(60).token_ids
        expected = stock.generate(torch.tensor([prompt]), max_new_tokens=len(tokens), eos_token_id=None)
        assert tokens == expected[0, len(prompt) :].tolist()
    engine.check_invariants()


if __name__ == "__main__":
    run_processes(PROCESSES)
