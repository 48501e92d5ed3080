"""Ctrl-C between steps instead of inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_is_deferred = False  # by the main thread; whoever is further in, or another thread, has nothing to do


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds back SIGINT until the block ends, at most one forward later, so that it can't tear block tables apart.

    Python delivers signals to the main thread only; on others, and where no Python handler is installed, nothing is
    done.
    """
    global _is_deferred
    if _is_deferred or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    received: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *args: received.append(args))
    _is_deferred = True
    try:
        yield
    finally:
        _is_deferred = False
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])
