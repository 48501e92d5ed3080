"""Requests that are held, and what an engine is like when none is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_paged
from helpers.models import EOS, random_ids
from helpers.pairs import Pair
from helpers.waiting import PATIENCE, eventually

SAMPLE = {"do_sample": True}
ENDLESS = {"eos_token_id": None}
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "recompute": {"num_blocks": 26, "block_size": 4, "preemption": "recompute", "enable_prefix_caching": False},
    "swap": {"num_blocks": 26, "block_size": 4, "preemption": "swap", "swap_space_gib": 0.01},
    "few_rows": {"max_num_seqs": 3},
    "few_tokens": {"max_num_batched_tokens": 5, "use_async_batching": True},
    "blocks_of_1": {"block_size": 1, "num_blocks": 600},
}
"""Settings of pools in which rows are preempted, wait, or are computed in parts."""


class Gate(LogitsProcessor):
    """Holds its call at one of its steps until it is opened. User code: its call's loop runs on a thread of its own."""

    def __init__(self, step: int = 0) -> None:
        self._steps_left = step
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._steps_left == 0:
            self.reached.set()
            assert self._opened.wait(PATIENCE)
        self._steps_left -= 1
        return scores

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.set()

    def open(self) -> None:
        """Lets the call go on."""
        self._opened.set()

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate()`."""
        return {"logits_processor": LogitsProcessorList([self])}


class Brake:
    """Stops the worker inside a forward, so that whatever is submitted meanwhile waits."""

    def __init__(self, pair: Pair) -> None:
        self._step: int | None = None
        self._reached = threading.Event()
        self._released = threading.Event()
        self._released.set()
        # Here to stay: hooks that come and go are changes of the model.
        pair.paged.model.layers[1].register_forward_pre_hook(hf_paged.packed_hook(self._hook))

    def _hook(self, *_: Any) -> None:
        if self._step is None:
            return
        self._step -= 1
        if self._step < 0:
            self._step = None
            self._reached.set()
            assert self._released.wait(PATIENCE)

    @contextmanager
    def at(self, step: int = 0) -> Iterator[Callable[[], None]]:
        """The worker stops in its forward after `step` others; gives a function that waits until it is there."""
        self._reached.clear()
        self._released.clear()
        self._step = step
        try:
            yield lambda: None if self._reached.wait(PATIENCE) else pytest.fail("no step was run")
        finally:
            self._step = None
            self._released.set()

    def release(self) -> None:
        """Lets it go on."""
        self._released.set()


def stock_rows(model: Any, input_ids: Any, **arguments: Any) -> list[list[int]]:
    """Generated ids of stock `generate()` for one prompt, each row up to its end."""
    ids = torch.as_tensor(input_ids).reshape(1, -1)
    result = model.generate(ids, **arguments)
    sequences = result if isinstance(result, Tensor) else result.sequences
    eos = arguments.get("eos_token_id", EOS)
    ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    rows = []
    for row in sequences[:, ids.shape[1] :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:end])
    return rows


def settle(pair: Pair) -> None:
    """Ends a pause, and asserts that all is as it should be when no call runs, and that the next request is served."""
    pair.engine.resume()

    def is_free() -> bool:
        stats = pair.engine.stats()
        return stats.num_free_blocks == stats.num_blocks and stats.num_waiting == stats.num_swapped == 0

    eventually(is_free, f"something is still held: {pair.engine.stats()}")
    pair.engine.check_invariants()
    ids = random_ids(1, 6, seed=77)
    found = pair.engine.submit(ids, max_new_tokens=5).result(PATIENCE).sequences
    assert found == stock_rows(pair.stock, ids, max_new_tokens=5)
    pair.assert_all_free()


def blocks_in_use(pair: Pair) -> int:
    stats = pair.engine.stats()
    return stats.num_blocks - stats.num_free_blocks


MARKER = 96  # a token that only the victim's prompt has


def prompt(seed: int, length: int = 8, marker: bool = False) -> Tensor:
    """A random prompt without `MARKER`, or with it."""
    ids = random_ids(1, length, seed=seed) % (MARKER - 3) + 3
    if marker:
        ids[0, length // 2] = MARKER
    return ids


@contextmanager
def held_step(
    model: Any, monkeypatch: pytest.MonkeyPatch, block: type[nn.Module] = LlamaRMSNorm
) -> Iterator[threading.Thread]:
    """Within it a request of the model is in the midst of a forward, on the engine's thread."""
    is_inside, may_go_on = threading.Event(), threading.Event()
    original = block.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "hf_paged":
            is_inside.set()
            may_go_on.wait(PATIENCE)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(block, "forward", forward)
        request = model.paged.submit(random_ids(1, 9), max_new_tokens=12, **ENDLESS)
        try:
            assert is_inside.wait(PATIENCE)
            yield threading.current_thread()
        finally:
            may_go_on.set()
            request.result(PATIENCE)
