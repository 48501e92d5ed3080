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
        self.make: Callable[[Callable[[], Tensor]], Any] = Again
        self.recordings: list[weakref.ref[Any]] = []
        self.running: int | None = None  # the size that is being replayed

    def __call__(self, function: Callable[[], Tensor]) -> Any:
        made = self.make(function)
        size = len(made.output)
        self.sizes.append(size)
        replay = made.replay

        def counted() -> None:
            self.replays.append(size)
            self.running = size
            replay()
            self.running = None

        made.replay = counted
        self.recordings.append(weakref.ref(made))
        return made

    @property
    def steps(self) -> list[int]:
        """Replays that were steps: each size is replayed once when it is recorded."""
        return self.replays[len(self.sizes) :]
