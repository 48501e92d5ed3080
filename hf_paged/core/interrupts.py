"""Ctrl-C, held back until nothing is half done.

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

from hf_paged.core.process import PROCESS, Lasting, watch_forks

SLICE = 0.05  # seconds that a wait goes on at most after a Ctrl-C


# Without the enums that Python's own wrappers look every handler up in, an exception each.
_set_handler: Any = getattr(signal.signal, "__wrapped__", signal.signal)
_get_handler: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)


class _Gate(Lasting):
    """Replaces the process's handler for SIGINT: holds signals back, or hands them on at once.

    Attributes:
        is_there: Whether it is in that place; the outermost block puts it there, for that is a system call.
        is_closed: Whether it holds back.
        received: What the handler is yet to be called with.
    """

    def __init__(self) -> None:
        self.is_there = self.is_closed = False
        self.received: list[tuple[Any, ...]] = []
        self._handler: Any = None

    def __call__(self, *args: Any) -> None:
        if self.is_closed:
            self.received.append(args)
        else:
            self._handler(*args)

    def install(self) -> bool:
        """Returns whether there was a Python handler to replace."""
        handler = _get_handler(signal.SIGINT)
        if not callable(handler) or handler is self:
            return False
        watch_forks()
        self.received.clear()  # should there be any left, it was delivered by another that came with it
        self._handler, self.is_closed = handler, True
        _set_handler(signal.SIGINT, self)
        self.is_there = True
        return True

    def remove(self) -> None:
        self.is_there = False
        if _get_handler(signal.SIGINT) is self:  # else a caller's code has set another
            _set_handler(signal.SIGINT, self._handler)
        self.open()

    def open(self) -> None:
        self.is_closed = False
        self.deliver()

    def deliver(self) -> None:
        while self.received:
            self._handler(*self.received.pop())

    def start_anew(self) -> None:
        """Removes the gate: the thread that installed it may not exist in the child."""
        if self.is_there:
            self.received.clear()  # the parent's
            self.remove()


# The process has one handler for SIGINT, and so one that stands in for it.
_GATE = _Gate()
PROCESS.watch(_GATE)


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _is_deferred() -> bool:
    return _GATE.is_there and _GATE.is_closed and _is_main()


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds SIGINT back until the block ends, or an `allowed_interrupt` inside. Re-entrant. Also a decorator."""
    if not _is_main() or (_GATE.is_there and _GATE.is_closed):
        yield
    elif _GATE.is_there:
        _GATE.is_closed = True
        try:
            yield
        finally:
            _GATE.open()
    elif _GATE.install():
        try:
            yield
        finally:
            _GATE.remove()
    else:
        yield


@contextmanager
def allowed_interrupt() -> Iterator[None]:
    """Within a `deferred_interrupt`, allows SIGINT to break the block at any place. Elsewhere it does nothing."""
    if not _is_deferred():
        yield
        return
    try:
        _GATE.open()
        yield
    finally:
        _GATE.is_closed = True


def check_interrupt() -> None:
    """Within a `deferred_interrupt`, delivers a SIGINT that was held back."""
    if _GATE.received and _is_main():
        _GATE.deliver()


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
