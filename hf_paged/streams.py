"""The CUDA stream that steps run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def steps_stream(device: torch.device) -> Iterator[None]:
    """Within it this thread's work is queued where the steps' is: on the device's default stream.

    What the caller queued before comes first, and what it queues afterwards waits: tensors go both ways. Nothing to do
    for callers that use no stream of their own, nor on CPU.
    """
    if device.type != "cuda":
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if current == default:
        yield
        return
    default.wait_stream(current)
    try:
        with torch.cuda.stream(default):
            yield
    finally:
        current.wait_stream(default)
