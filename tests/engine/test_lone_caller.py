"""A caller that is alone runs the steps itself; with company the worker's thread does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.generation.streamers import BaseStreamer

from helpers.models import random_ids
from helpers.pairs import Pair
from helpers.requests import ENDLESS, SAMPLE, Gate, settle
from helpers.state_models import build_state_model
from helpers.user_code import USER_CODE, NextToken
from helpers.waiting import PATIENCE, eventually, in_background
from hf_paged.engine import calls
from hf_paged.engine.executor import StepExecutor

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": SAMPLE,
    "samples": SAMPLE | {"num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "processor": {"logits_processor": [NextToken()]},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


@contextmanager
def threads_of_steps(pair: Pair) -> Iterator[list[str]]:
    names: list[str] = []
    launch = StepExecutor.launch

    def note(self: StepExecutor, step: Any) -> None:
        names.append(threading.current_thread().name)
        launch(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepExecutor, "launch", note)
        yield names
    settle(pair)
    loop = pair.engine.core.worker.loop
    eventually(lambda: loop.is_free and not loop.has_work, "the worker's thread is still in a turn")


def here(names: list[str]) -> bool:
    return set(names) == {threading.current_thread().name}


@pytest.mark.parametrize("name", ["lfm2", "llama"])
def test_another_thread_between_two_steps(make_pair: Callable[..., Pair], name: str) -> None:
    """Would break: what one thread's steps have made of the model, undone or left for those of another."""
    pair = make_pair(build_state_model(name) if name == "lfm2" else name, num_blocks=600)
    ids, core = random_ids(2, 9), pair.engine.core
    expected = pair.stock.generate(ids, max_new_tokens=6)
    own = {key: value for key, value in vars(pair.paged.config).items() if "attn" in key}
    with core.worker._prepared():
        assert in_background(pair.paged.generate, ids, max_new_tokens=6).result(PATIENCE).equal(expected)
        assert pair.paged.generate(ids, max_new_tokens=6).equal(expected)
    assert {key: value for key, value in vars(pair.paged.config).items() if "attn" in key} == own
    assert core.bound._prepared is None
    settle(pair)


@pytest.mark.parametrize("mode", MODES)
def test_alone(pair: Pair, mode: str) -> None:
    given = {"max_new_tokens": 6} | MODES[mode] | ENDLESS
    ids = random_ids(1, 9, seed=1)
    torch.manual_seed(3)
    expected = pair.stock.generate(ids, **given)
    with threads_of_steps(pair) as names:
        torch.manual_seed(3)
        assert torch.equal(pair.paged.generate(ids, **given), expected)
    assert here(names), names


class NoProducts(TorchFunctionMode):
    """A caller's own, and not to be done to a step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.nn.functional.linear, "a step is run under the caller's mode"
        return func(*args, **kwargs or {})


MODE_CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool]] = {
    "plain": (nullcontext, True),
    "inference mode": (torch.inference_mode, True),
    "autocast off": (lambda: torch.autocast("cpu", enabled=False), True),
    "a function mode": (NoProducts, True),
    "a dispatch mode": (lambda: FlopCounterMode(display=False), False),
}


@pytest.mark.parametrize("name", MODE_CONTEXTS)
def test_modes_of_the_callers_thread(pair: Pair, name: str) -> None:
    """Would break: what a caller's mode does to its tensors, done to the pool and to what a step keeps."""
    enter, is_here = MODE_CONTEXTS[name]
    ids = random_ids(1, 9, seed=1)
    expected = pair.stock.generate(ids, max_new_tokens=5, **ENDLESS)
    with threads_of_steps(pair) as names, enter():
        assert torch.equal(pair.paged.generate(ids, max_new_tokens=5, **ENDLESS), expected)
    assert here(names) == is_here, names
    # Nothing that is left behind is an inference tensor: it is written to outside of inference mode.
    for given in ({}, {"num_beams": 2}, {"repetition_penalty": 1.5}):
        expected = pair.stock.generate(ids, max_new_tokens=5, **given, **ENDLESS)
        assert torch.equal(pair.paged.generate(ids, max_new_tokens=5, **given, **ENDLESS), expected)


class Streamer(BaseStreamer):
    """Notes when tokens come, and runs something at one of them."""

    def __init__(self, action: Callable[[], Any] = lambda: None, at: int = 3) -> None:
        self.tokens: list[int] = []
        self.is_over = False
        self._action, self._at = action, at

    def put(self, value: Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()
        if value.ndim == 1 and len(self.tokens) == 9 + self._at:
            self._action()

    def end(self) -> None:
        self.is_over = True


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any streamer may take long; here only one that sleeps."""
    monkeypatch.setattr(calls, "SLOW_STREAMER", 0.5)


def stream(pair: Pair, streamer: Streamer, **given: Any) -> None:
    ids = random_ids(1, 9, seed=1)
    given = {"max_new_tokens": 40} | given | ENDLESS
    expected = pair.stock.generate(ids, **given)
    assert torch.equal(pair.paged.generate(ids, streamer=streamer, **given), expected)
    assert streamer.tokens == expected[0].tolist() and streamer.is_over


def test_a_streamer_between_the_steps(pair: Pair) -> None:
    """Would break: tokens that come in one heap when the call is over."""
    steps_then: list[int] = []
    with threads_of_steps(pair) as names:
        stream(pair, Streamer(lambda: steps_then.append(len(names))))
    assert here(names) and steps_then == [3]


def test_a_slow_streamer_holds_up_no_steps(pair: Pair) -> None:
    """Would break: steps that wait for a streamer, which on the worker's thread would have gone on."""
    with threads_of_steps(pair) as names:
        stream(pair, Streamer(lambda: time.sleep(1.0)))
    main = threading.current_thread().name
    assert names[:3] == [main] * 3 and main not in names[3:]


@pytest.mark.parametrize("kind", ["submit", "submitted beams", "generate", "pause", "release"])
def test_a_streamer_that_uses_the_engine(pair: Pair, kind: str) -> None:
    """Would break: a wait, in a lone caller's own code, for steps that only this caller would run."""
    ids = random_ids(1, 7, seed=2)
    expected = pair.stock.generate(ids, max_new_tokens=5, **ENDLESS)[0, 7:].tolist()
    beams = pair.stock.generate(ids, max_new_tokens=5, num_beams=2, **ENDLESS)[0, 7:].tolist()
    found: list[Any] = []

    def pause() -> None:
        pair.engine.pause()
        request = pair.engine.submit(ids, max_new_tokens=5, **ENDLESS)
        assert pair.engine.step() is not None
        pair.engine.resume()
        found.append(request.result(PATIENCE).token_ids)

    def submit(**more: Any) -> None:
        found.append(pair.engine.submit(ids, max_new_tokens=5, **ENDLESS, **more).result(PATIENCE).token_ids)

    actions: dict[str, Callable[[], Any]] = {
        "submit": submit,
        "submitted beams": lambda: submit(num_beams=2),
        "generate": lambda: found.append(pair.paged.generate(ids, max_new_tokens=5, **ENDLESS)[0, 7:].tolist()),
        "pause": pause,
        "release": lambda: (pair.engine.release(), found.append(expected)),
    }
    stream(pair, Streamer(actions[kind]))
    assert found == [beams if kind == "submitted beams" else expected]
    settle(pair)


def test_a_streamer_that_raises(pair: Pair) -> None:
    """Would break: blocks that stay held, and a next call that is not alone."""
    with pytest.raises(OSError, match="burnt"):
        pair.paged.generate(random_ids(1, 9), max_new_tokens=9, **ENDLESS, **USER_CODE["streamer"](OSError, 1))
    with threads_of_steps(pair) as names:
        stream(pair, Streamer())
    assert here(names)


@pytest.mark.parametrize("second", ["generate", "submit", "beams"])
def test_a_second_caller_takes_the_loop_off_the_first(pair: Pair, second: str) -> None:
    """Would break: a first caller that runs other callers' steps, or that never runs its own any more."""
    given = {"max_new_tokens": 60} | ENDLESS
    prompts = [random_ids(1, 9, seed=1), random_ids(1, 8, seed=2)]
    options = {"num_beams": 2} if second == "beams" else {}
    expected = [
        pair.stock.generate(prompts[0], **given),
        pair.stock.generate(prompts[1], **given, **options),
    ]
    other: list[Any] = []

    def come() -> None:
        call = pair.engine.submit if second == "submit" else pair.paged.generate
        other.append(in_background(call, prompts[1], **given, **options))
        eventually(lambda: pair.engine.stats().num_running + pair.engine.stats().num_waiting == 2, "it doesn't come")

    with threads_of_steps(pair) as names:
        assert torch.equal(pair.paged.generate(prompts[0], streamer=Streamer(come), **given), expected[0])
        found = other[0].result(PATIENCE)
        if second == "submit":
            found = torch.cat([prompts[1], torch.tensor(found.result(PATIENCE).sequences)], dim=1)
    assert torch.equal(found, expected[1])
    main = threading.current_thread().name
    assert main in names[:3] and "hf_paged" in names, names
    with threads_of_steps(pair) as names:  # alone again
        pair.paged.generate(prompts[0], **given)
    assert here(names), names


def test_beside_a_caller_that_is_busy_elsewhere(pair: Pair) -> None:
    """Would break: steps without the rows of a caller who is choosing its tokens and about to come back."""
    given = {"max_new_tokens": 4} | ENDLESS
    with Gate(step=1) as gate:
        other = in_background(pair.paged.generate, random_ids(1, 8, seed=2), **given, **gate.arguments)
        assert gate.reached.wait(PATIENCE)
        with threads_of_steps(pair) as names:
            pair.paged.generate(random_ids(1, 9, seed=1), **given)
            gate.open()
            other.result(PATIENCE)
    assert "MainThread" not in names, names
