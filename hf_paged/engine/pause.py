"""`Pause`: the gate that holds the steps back, and single steps while it does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from hf_paged.core.event_log import Event, as_dicts
from hf_paged.core.interrupts import check_interrupt, wait_interruptibly
from hf_paged.engine.decoding_loop import ARRIVAL_GAP, DecodingLoop
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.openmp import rest_threads
from hf_paged.engine.step_loop import StepLoop, without_modes

logger = logging.getLogger(__name__)

REST_SECONDS = 0.05  # without work, after which a worker's helping threads end
STEP_SECONDS = 1.0  # that `step` waits for callers who are busy between two forwards, if there is no other work


class Pause:
    """A switch. While it is on, a step runs only if it is asked for, on the thread that asks."""

    def __init__(self, pool: KVPool, loop: StepLoop, wake: Callable[[], None]) -> None:
        self._pool = pool
        self._loop = loop
        self._wake = wake
        self._is_on = False
        self._thread_id: int | None = None  # that paused and has not been warned
        self._stepper = threading.Lock()  # of the thread that asks for a step
        # Threads that it keeps from running the model themselves, and whether one of them may go.
        self._num_held, self._is_ajar = 0, False

    @property
    def is_on(self) -> bool:
        """Whether steps only run when they are asked for.

        A pause ends with the main thread: else the interpreter would wait for ever for threads that wait for a step.
        """
        return not self.allows()

    def allows(self) -> bool:
        """Whether a turn of the loop may run a step."""
        return not (self._is_on and threading.main_thread().is_alive())

    def begin(self) -> None:
        """Waits for the step that runs now, and lets none run after it. See `Engine.pause`."""
        with self._pool.lock:
            was_off, self._is_on = not self._is_on, True
            self._thread_id = threading.get_ident()
        if self._loop.is_mine:
            return  # in a hook inside a step, which can't be waited for
        try:
            with self._loop.holding():
                pass
        except BaseException:  # Ctrl-C
            if was_off:
                self.end()
            raise

    def end(self) -> None:
        with self._pool.lock:
            self._is_on = False
            self._loop.forget_refusals()  # the time of the pause doesn't count
            self._wake()

    def warn(self) -> None:
        """Says so, once a pause, if it is the pausing thread itself that is about to wait for a step."""
        if self.is_on and self._thread_id == threading.get_ident():
            self._thread_id = None
            logger.warning(
                "hf_paged: this thread called pause() and now waits for a step: it goes on when another thread calls "
                "resume() or step() (Ctrl-C ends the call)"
            )

    def step(self, is_expected: Callable[[], bool]) -> dict[str, Any] | None:
        """Runs one turn of the loop, or lets one of those run who are held; waits a moment for what is about to come.

        Args:
            is_expected: Whether a caller is about to bring work.

        Returns:
            The step's event; `None` if there is nothing to run.
        """
        if not self.is_on:
            raise RuntimeError("the engine is not paused: call pause() before step()")
        wait_interruptibly(lambda timeout: self._stepper.acquire(timeout=-1 if timeout is None else timeout))
        try:
            with self._loop.holding():
                before = self._pool.log.last_step
                self._loop.forget_refusals()
            waiting_since = time.monotonic()
            while (event := self._turn(before)) is None:
                check_interrupt()
                with self._loop.condition:
                    has_work, is_ajar = self._loop.has_work, self._let_one_go()
                    if has_work or is_ajar:
                        waiting_since = time.monotonic()
                    elif time.monotonic() - waiting_since > STEP_SECONDS or not (
                        self._loop.decoding_loops.is_any_away() or is_expected()
                    ):
                        return None
                    if is_ajar or not has_work:
                        self._loop.condition.wait(ARRIVAL_GAP)
            return as_dicts(event[0], event[1:])[0]
        finally:
            with self._pool.lock:
                self._is_ajar = False
            self._stepper.release()
            rest_threads()

    def _turn(self, before: tuple[int, Event] | None) -> tuple[int, Event] | None:
        """Runs a turn unless there was a step since; returns that step's event, if there was one."""
        loop, log = self._loop, self._pool.log
        with loop.condition:
            if loop.has_work:
                loop.decoding_loops.gather()
        with _disable_current_modes(), without_modes(), loop.holding():
            if log.last_step is before:
                loop.turn(lambda: True)
                loop.settle()
            if log.last_step is before:
                return None
            self._is_ajar = False  # before a thread that is held can look
            return log.last_step

    # Threads that run the model themselves

    def _let_one_go(self) -> bool:
        """Lets one of those who are held run its forward, if there are any. The pool's lock is held."""
        self._is_ajar = self._num_held > 0
        if self._is_ajar:
            self._loop.condition.notify_all()
        return self._is_ajar

    @property
    def _holds(self) -> bool:
        return self.is_on and not self._is_ajar

    @contextmanager
    def forwarding(self, needs_step: Callable[[], bool], decoding_loop: DecodingLoop | None = None) -> Iterator[None]:
        """`StepLoop.exclusive`, for a caller who may have to run the model in it: that waits for `end`, or is a step.

        Args:
            needs_step: Whether it has to; asked when no step runs.
            decoding_loop: Waits no longer when it is cancelled.
        """
        is_held = False
        try:
            while True:
                with self._loop.exclusive():
                    if not self._holds or not needs_step():
                        with self._pool.lock:
                            self._num_held -= is_held
                            is_held = self._is_ajar = False
                        yield
                        return
                self.warn()
                with self._loop.condition:
                    if not is_held:
                        self._num_held, is_held = self._num_held + 1, True
                        self._loop.condition.notify_all()
                    while self._holds:
                        check_interrupt()
                        if decoding_loop is not None:
                            decoding_loop.check_cancelled()
                        # A dropped handle and the main thread's end notify no waiting thread.
                        self._loop.condition.wait(REST_SECONDS)
        finally:
            if is_held:
                with self._pool.lock:
                    self._num_held -= 1
