"""Ctrl-C where nothing is half done.

A calling thread holds it back in all of the engine's code (`deferred_interrupt`), and lets go in two kinds of places:
where a caller's own code runs (`allowed_interrupt`), and where it waits (`wait_interruptibly`). Python delivers signals
to the main thread only: on others, and where SIGINT has no handler in Python, nothing is done.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SLICE = 0.05  # seconds that a wait goes on at most after a Ctrl-C


class _Recorder:
    """In the place of the process's handler for SIGINT: notes what comes.

    Attributes:
        handler: That handler.
        received: What it is yet to be called with.
    """

    def __init__(self) -> None:
        self.handler: Any = None
        self.received: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.received.append(args)

    def install(self, handler: Any) -> None:
        self.received.clear()  # should there be any left, it was delivered by another that came with it
        self.handler = handler
        signal.signal(signal.SIGINT, self)

    def remove(self) -> None:
        current: Any = signal.getsignal(signal.SIGINT)
        if current is self:  # else a caller's code has set another
            signal.signal(signal.SIGINT, self.handler)
        self.deliver()

    def deliver(self) -> None:
        while self.received:
            self.handler(*self.received.pop())


# The process has one handler for SIGINT, and so one that stands in for it.
_RECORDER = _Recorder()


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _is_deferred() -> bool:
    return _is_main() and signal.getsignal(signal.SIGINT) is _RECORDER


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds SIGINT back until the block ends, or lets go of it. Re-entrant. Also a decorator of functions."""
    handler = signal.getsignal(signal.SIGINT) if _is_main() else None
    if handler is _RECORDER or not callable(handler):
        yield
        return
    _RECORDER.install(handler)
    try:
        yield
    finally:
        _RECORDER.remove()


@contextmanager
def allowed_interrupt() -> Iterator[None]:
    """Within a `deferred_interrupt`: a block that SIGINT may break, at any place. Else nothing."""
    if not _is_deferred():
        yield
        return
    try:
        _RECORDER.remove()
        yield
    finally:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler is not _RECORDER:
            _RECORDER.install(handler)


def check_interrupt() -> None:
    """Within a `deferred_interrupt`: lets a SIGINT go that was held back, here."""
    if _RECORDER.received and _is_main():
        _RECORDER.deliver()


def wait_interruptibly(wait: Callable[[float | None], bool], timeout: float | None = None) -> bool:
    """Waits; within a `deferred_interrupt`, a SIGINT that was held back breaks the wait, but not what waits.

    Args:
        wait: Waits for so many seconds, or without end; returns whether what it waits for is there. Such methods of
            `threading` are written in Python and leave their lock held when a signal raises at the wrong place.
        timeout: Seconds; `None`: without end.

    Returns:
        Whether it is there.
    """
    if not _is_deferred():
        return wait(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
        if wait(max(left, 0.0)):
            return True  # a lock, say, which is its caller's to give back before a SIGINT may break anything
        check_interrupt()
        if left < SLICE:
            return False
