"""Two moments that no engine can wait for by itself: a fork, and the interpreter's end."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

EXIT_SECONDS = 1.0  # at the interpreter's end, for our threads to come to a rest


class Lasting(Hashable, Protocol):
    @property
    def lock(self) -> AbstractContextManager[Any]: ...
    def freeze(self) -> None: ...
    def start_anew(self) -> None: ...


_ENGINES: weakref.WeakSet[Lasting] = weakref.WeakSet()  # of this process


def watch(engine: Lasting) -> None:
    """Tells an engine of a fork and of the interpreter's end."""
    _ENGINES.add(engine)
    _watch_forks()


# What is done at the interpreter's end when no step runs any more, engines that are dropped before it or not.
_FAREWELLS: list[Callable[[], None]] = []


def at_end(farewell: Callable[[], None]) -> None:
    """Has something done at the interpreter's end, when no step runs any more."""
    _FAREWELLS.append(farewell)


def never_mind(farewell: Callable[[], None]) -> None:
    if farewell in _FAREWELLS:
        _FAREWELLS.remove(farewell)


class _Threads:
    """Our own threads, which are daemons: the interpreter's end stops each where it next runs Python code.

    In the midst of torch's code that aborts the process.

    Attributes:
        at_work: By thread, whether it may be stopped nevertheless.
    """

    def __init__(self) -> None:
        self.at_work: dict[int, Callable[[], bool]] = {}
        self.is_over = False

    def rest(self) -> None:
        """None begins anything any more, and those at work come to an end, in `EXIT_SECONDS` at most."""
        self.is_over = True
        deadline = time.monotonic() + EXIT_SECONDS
        while not all(is_safe() for is_safe in list(self.at_work.values())) and time.monotonic() < deadline:
            time.sleep(0.001)


_THREADS = _Threads()


@contextmanager
def at_work(is_safe: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Around all that may run torch's code on a thread of ours, to the freeing of what it held. Never left at the end.

    Args:
        is_safe: Whether the thread may be stopped here: it waits, and not for torch.
    """
    own = threading.get_ident()
    _THREADS.at_work[own] = is_safe
    try:
        if _THREADS.is_over:
            del _THREADS.at_work[own]
            threading.Event().wait()  # until the process ends
        yield
    finally:
        _THREADS.at_work.pop(own, None)


class _Fork(threading.local):
    def __init__(self) -> None:
        self.locks = ExitStack()


_FORK = _Fork()


def _before_fork() -> None:
    # The thread that forks may be in the midst of a call, which ends in the child with an error: it takes them again.
    for engine in sorted(_ENGINES, key=id):
        _FORK.locks.enter_context(engine.lock)


def _after_fork_in_child() -> None:
    _FORK.locks.close()
    _THREADS.at_work.clear()  # they are the parent's
    _FAREWELLS.clear()
    for engine in list(_ENGINES):
        engine.start_anew()


def at_exit() -> None:
    """From here on no step runs any more."""
    for engine in list(_ENGINES):
        engine.freeze()
    for farewell in list(_FAREWELLS):
        farewell()
    _THREADS.rest()


@functools.cache
def _watch_forks() -> None:
    # Once, and when all modules are imported: what else a fork does in the child is done first.
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(
            before=_before_fork, after_in_parent=lambda: _FORK.locks.close(), after_in_child=_after_fork_in_child
        )


atexit.register(at_exit)
