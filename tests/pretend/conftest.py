"""This process has a pretended CUDA device from here on; what ran on it is looked at after each call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pretend_cuda
import pytest
from pretend_cuda import Event, Seen

from helpers.kernel_cases import repaired_interpreter
from hf_paged.engine.executor import StepExecutor

pretend_cuda.install()


@pytest.fixture(autouse=True, scope="session")
def _interpreter() -> Iterator[None]:
    from hf_paged.kernels import triton_scan

    # The interpreter takes as long for few channels as for many.
    with repaired_interpreter(), mock.patch.object(triton_scan, "CHANNELS", 1024):
        yield


class Watched:
    """What was seen, and what of it inside the launch of a step.

    Attributes:
        seen: Everything.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.in_launch: list[Event] = []

    def assert_clean(self, entries: int | None = None) -> None:
        """Asserts that nothing waited inside a launch, and that no pinned memory was written too early.

        Args:
            entries: Calls of `generate()` and `submit()` that were made: each may wait once.
        """
        assert not self.in_launch, "\n".join(f"{event.kind} {event.detail} at {event.site}" for event in self.in_launch)
        assert not self.seen.of("race")
        if entries is not None:
            waits = [event for event in self.seen.waits if not _is_expected(event)]
            assert len(waits) <= entries, "\n".join(self.seen.where("sync", "pageable"))


def _is_expected(event: Event) -> bool:
    """In float32, transformers' code multiplies expert by expert, and reads on the host how many rows each has. And a
    step that is recorded is compared with its replay, once."""
    return event.site.startswith(("transformers/integrations/moe.py", "hf_paged/model/cuda_graph.py"))


@contextmanager
def watched() -> Iterator[Watched]:
    """Within it, the device and all steps are watched."""
    launch = StepExecutor.launch
    launching = threading.local()

    def marked(self: StepExecutor, step: Any) -> None:
        launching.on = True
        try:
            launch(self, step)
        finally:
            launching.on = False

    with pretend_cuda.watch() as seen:
        own = Watched(seen)

        def note(event: Event) -> None:
            if event.kind in pretend_cuda.BLOCKING and getattr(launching, "on", False) and not _is_expected(event):
                own.in_launch.append(event)

        seen.notify = note
        with mock.patch.object(StepExecutor, "launch", marked):
            yield own
