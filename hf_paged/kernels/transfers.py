"""Transfers between the host and a device, where neither waits for the other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | list[int] | Tensor, device: torch.device) -> Tensor:
    """The values as a tensor on a device.

    On a GPU through pinned memory: a copy from ordinary memory waits until everything that is queued there has run.

    Args:
        values: An array, a tensor, or integers (they become int64).
        device: Where they go.
    """
    if isinstance(values, Tensor):
        tensor = values
    else:
        tensor = torch.from_numpy(np.ascontiguousarray(values, np.int64 if isinstance(values, list) else None))
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor if tensor.device == device else tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors on the CPU; those that are there are returned as they are.

    On a GPU the host waits once, for what the current stream has been given so far: what is queued later, or on other
    streams, is not waited for.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    copies = [_pinned_copy(tensor) if tensor.device in devices else tensor.to("cpu") for tensor in tensors]
    for device in devices:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
    return copies


def _pinned_copy(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, that arrives there when the device gets to it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


class ToHost:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        """Queues the copy behind what computes the tensor; doesn't wait for it."""
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = _pinned_copy(tensor)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The tensor on the CPU, as soon as it is there. On another device than a GPU the copy is made here."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor if self._tensor.device.type == "cpu" else self._tensor.to("cpu")


class DeviceTimer:
    """How long a device is busy with what is queued from here to `stop`; waits for nothing until asked."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._times = [time.perf_counter()]
        self._device = device
        self._mark()

    def stop(self) -> None:
        self._times.append(time.perf_counter())
        self._mark()

    def seconds(self) -> float:
        """Between the two. On a GPU it waits until the device is there, and the time is the device's."""
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._times[1] - self._times[0]

    def _mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
