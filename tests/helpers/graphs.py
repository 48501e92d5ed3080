"""Graphs without a device that records them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Again:
    """A recording without a device to record: the function, run again; its output stays where it was."""

    num_bytes = 0

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function
        self.output = function()

    def replay(self) -> None:
        with torch.inference_mode():  # the output is a tensor of it
            self.output.copy_(self._function())


class Recorder:
    """What was recorded and replayed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays: list[int] = []
        self.steps: list[int] = []  # of them: each recording is replayed once when it is made
        self.make: Callable[[Callable[[], Tensor]], Any] = Again
        self.recordings: list[weakref.ref[Any]] = []
        self.running: int | None = None  # the size that is being replayed
        self._tried = weakref.WeakSet[Any]()

    def __call__(self, function: Callable[[], Tensor]) -> Any:
        made = self.make(function)
        size = len(made.output)
        self.sizes.append(size)
        replay = made.replay

        def counted() -> None:
            if made in self._tried:
                self.steps.append(size)
            self._tried.add(made)
            self.replays.append(size)
            self.running = size
            replay()
            self.running = None

        made.replay = counted
        self.recordings.append(weakref.ref(made))
        return made
