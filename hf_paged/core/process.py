"""`PROCESS`: the state that a process has once, and the objects that react to a fork or the interpreter's end."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

EXIT_SECONDS = 1.0  # at the interpreter's end, for our threads to come to a rest


class Lasting:
    """An object that reacts to a fork and to the interpreter's end; by default it does nothing."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held by the thread that forks."""
        return nullcontext()

    def start_anew(self) -> None:
        """In a forked child, which has no thread of the parent's but the one that forked."""

    def freeze(self) -> None:
        """At the interpreter's end: no step runs from here on."""

    def part(self) -> None:
        """At the interpreter's end, when all are frozen."""


LastingT = TypeVar("LastingT", bound=Lasting)


class Process:
    """The state of this process.

    Attributes:
        lock: Guards what all engines share, for a moment: with it held, no thread waits for anything.
        recording: Held while a CUDA graph is recorded.
        kept: What must not be freed before the process ends.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.recording = threading.Lock()
        self.kept: list[object] = []
        self._living: weakref.WeakSet[Lasting] = weakref.WeakSet()
        self._locked = ExitStack()
        self._at_work: dict[int, Callable[[], bool]] = {}
        self._ending: int | None = None  # the thread that ends the interpreter

    def watch(self, lasting: Lasting) -> None:
        """Calls the object's hooks, as long as it lives."""
        with self.lock:
            self._living.add(lasting)

    def living(self, kind: type[LastingT]) -> list[LastingT]:
        with self.lock:
            return [each for each in self._living if isinstance(each, kind)]

    # A fork

    def before_fork(self) -> None:
        # The thread that forks may have some of them: in the midst of a call, which in the child ends with an error.
        locked = ExitStack()
        for each in sorted(self.living(Lasting), key=id):
            locked.enter_context(each.lock)
        locked.enter_context(self.lock)
        self._locked = locked

    def after_fork(self) -> None:
        self._locked.pop_all().close()

    def after_fork_in_child(self) -> None:
        self.after_fork()
        self.recording = threading.Lock()
        self._at_work.clear()  # they are the parent's
        for each in self.living(Lasting):
            each.start_anew()

    # The interpreter's end

    @property
    def is_ending(self) -> bool:
        return self._ending is not None

    def check_running(self) -> None:
        """Raises `RuntimeError` on the thread that ends the interpreter; all others stop here until the process ends.

        They are daemons: in the midst of torch's code they would abort it.
        """
        if self._ending == threading.get_ident():
            raise RuntimeError(
                "the interpreter is ending, and hf_paged runs no steps any more: generate before, or in an atexit "
                "handler that is registered after hf_paged was imported"
            )
        if self._ending is not None:
            threading.Event().wait()

    @contextmanager
    def at_work(self, is_safe: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Surrounds torch's code on a thread of the package, down to the freeing of its tensors: the interpreter's end
        waits for it.

        Args:
            is_safe: Whether the thread may be stopped here: it waits, and not for torch.
        """
        own = threading.get_ident()
        self._at_work[own] = is_safe
        try:
            if self.is_ending:
                del self._at_work[own]
                self.check_running()
            yield
        finally:
            self._at_work.pop(own, None)

    def at_exit(self) -> None:
        self._ending = threading.get_ident()
        for each in self.living(Lasting):
            each.freeze()
        for each in self.living(Lasting):
            each.part()
        deadline = time.monotonic() + EXIT_SECONDS
        while not all(is_safe() for is_safe in list(self._at_work.values())) and time.monotonic() < deadline:
            time.sleep(0.001)


PROCESS = Process()
atexit.register(PROCESS.at_exit)


@cache
def watch_forks() -> None:
    """Tells `PROCESS` of forks: called at first use, for in a child the hooks of other modules are to run first."""
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(
            before=PROCESS.before_fork,
            after_in_parent=PROCESS.after_fork,
            after_in_child=PROCESS.after_fork_in_child,
        )
