"""`DecodingLoop`: one of transformers' loops on its caller's thread, and `DecodingLoops`, for which steps wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_paged.engine.executor import StepExecutor

ARRIVAL_GAP = 0.005  # seconds without any loop coming back after which a step starts without the missing ones
MAX_BACKOFF = 6  # a loop that was waited for in vain is not waited for again for up to 2^6 steps


class DecodingLoop:
    """A decoding loop on a thread of its own, whose forwards come one after another.

    Attributes:
        max_tokens: Tokens that each of its rows may come to, padding included; 0: not known.
        num_rows: Rows of its last forward.
        is_between_forwards: Processors, criteria and streamers run.
        is_cancelled: Its next forward raises `CallCancelledError`.
        cache: What it runs over; `None` before it has begun.
    """

    def __init__(self, priority: int = 0, request_id: str | None = None) -> None:
        self.priority = priority
        self.request_id = request_id
        self.max_tokens = 0
        self.cache: Any = None
        self.thread_id: int | None = None
        self.num_rows = 0
        self.is_between_forwards = False
        self.is_waiting = False
        self.is_cancelled = False
        self.on_cancel: Callable[[], None] | None = None  # stops the forward it waits for
        self.retry_at = 0
        self.num_misses = 0

    def cancel(self) -> None:
        """Ends it at its next forward. Takes no lock."""
        self.is_cancelled = True
        on_cancel = self.on_cancel
        if on_cancel is not None:
            on_cancel()

    def check_cancelled(self) -> None:
        if self.is_cancelled:
            raise CallCancelledError


class CallCancelledError(BaseException):
    """Unwinds the decoding loop of a cancelled request. Not an `Exception`, so that user code doesn't swallow it."""


class DecodingLoops:
    """The loops that run over one pool. Changed with the pool's lock held, which is the condition's."""

    def __init__(self, condition: threading.Condition, executor: StepExecutor) -> None:
        self._condition = condition
        self._executor = executor
        self._loops: set[DecodingLoop] = set()

    @contextmanager
    def running(self, loop: DecodingLoop) -> Iterator[None]:
        """Registers a loop for its length: steps wait a moment for its next forward. Takes the lock."""
        with self._condition:
            self._loops.add(loop)
        try:
            yield
        finally:
            with self._condition:
                self._loops.discard(loop)
                self._condition.notify_all()

    def arrive(self, loop: DecodingLoop | None, num_rows: int) -> None:
        """Notes that a caller's next forward has arrived."""
        if loop is not None:
            if loop.is_between_forwards and loop.retry_at <= self._executor.num_steps:
                loop.num_misses = 0
            loop.is_between_forwards, loop.is_waiting, loop.num_rows = False, True, num_rows

    def leave(self, loop: DecodingLoop | None) -> None:
        """Notes that a caller's forward is done, and that the caller now chooses tokens."""
        if loop is not None:
            loop.is_between_forwards, loop.is_waiting = True, False

    @property
    def is_any_between_forwards(self) -> bool:
        return any(loop.is_between_forwards for loop in self._loops)

    def is_any_away(self, but: int | None = None) -> bool:
        """Whether one of them, on another thread than `but`, does not wait for a step."""
        return any(not loop.is_waiting and loop.thread_id != but for loop in self._loops)

    def are_all_on(self, thread_id: int) -> bool:
        """Whether none of them runs on another thread."""
        return all(loop.thread_id == thread_id for loop in self._loops)

    def gather(self) -> None:
        """Waits a moment for loops between two forwards, so that they don't fall apart into ever smaller steps.

        Not for those whose own code takes long, and not where they are few beside the rows at hand.
        """
        while True:
            num_steps = self._executor.num_steps
            away = [loop for loop in self._loops if loop.is_between_forwards and loop.retry_at <= num_steps]
            if 4 * sum(loop.num_rows for loop in away) <= len(self._executor.consumers):
                return
            if not self._condition.wait(ARRIVAL_GAP):
                for loop in away:
                    loop.num_misses = min(loop.num_misses + 1, MAX_BACKOFF)
                    loop.retry_at = num_steps + 2**loop.num_misses
                return
