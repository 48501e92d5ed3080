"""Two moments that no engine can wait for by itself: a fork, and the interpreter's end."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Hashable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol


class Lasting(Hashable, Protocol):
    """What is told of them."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...
    def freeze(self) -> None: ...
    def start_anew(self) -> None: ...


_ENGINES: weakref.WeakSet[Lasting] = weakref.WeakSet()  # of this process


def watch(engine: Lasting) -> None:
    """Tells an engine of both."""
    _ENGINES.add(engine)
    _watch_forks()


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
    for engine in list(_ENGINES):
        engine.start_anew()


def at_exit() -> None:
    """No step runs any more."""
    for engine in list(_ENGINES):
        engine.freeze()


@functools.cache
def _watch_forks() -> None:
    # Once, and when all modules are imported: what else a fork does in the child is done first.
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(
            before=_before_fork, after_in_parent=lambda: _FORK.locks.close(), after_in_child=_after_fork_in_child
        )


atexit.register(at_exit)
