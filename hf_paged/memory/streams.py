"""The CUDA stream of the steps, and the order of callers' work before and after them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_paged.core.process import PROCESS


def steps_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all steps on a GPU.

    It is no caller's: a thread that waits there for its own work (every `.to("cuda")` does) would wait for steps, too.
    """
    with PROCESS.lock:  # two threads must not make two of them
        return _made(device)


@functools.cache
def _made(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def on_steps_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Within it this thread's work is queued where the steps' is. A caller's own work it may overtake."""
    return torch.cuda.stream(steps_stream(device)) if device.type == "cuda" else nullcontext()


def let_caller_first(device: torch.device) -> None:
    """Steps that are launched from here on wait, on the device, for what this thread has queued there."""
    if device.type == "cuda" and (own := torch.cuda.current_stream(device)) != steps_stream(device):
        steps_stream(device).wait_stream(own)


def let_steps_first(device: torch.device) -> None:
    """From here on, work that this thread queues waits, on the device, for the steps that are queued there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(steps_stream(device))


def among_steps(device: torch.device) -> AbstractContextManager[Any]:
    """Like `on_steps_stream`, behind what this thread has queued before, and before what it queues afterwards.

    Tensors that it takes away need `hand_out`.
    """
    if device.type != "cuda" or torch.cuda.current_stream(device) == steps_stream(device):
        return nullcontext()
    return _among(device)


@contextmanager
def _among(device: torch.device) -> Iterator[None]:
    let_caller_first(device)
    try:
        with torch.cuda.stream(steps_stream(device)):
            yield
    finally:
        let_steps_first(device)


def hand_out(value: Any) -> None:
    """Has the memory of tensors that were made among steps kept until this thread's own stream is done with them.

    Args:
        value: A tensor, or a tuple, list or dict with such at any depth.
    """
    if isinstance(value, Tensor):
        if value.device.type == "cuda":
            value.record_stream(torch.cuda.current_stream(value.device))
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            hand_out(item)


class Handover:
    """The work that a thread has queued so far, for another thread to wait for on the device."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        self._device = device

    def follow(self) -> None:
        """Orders what this thread queues from here on behind it."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
