"""`Room`: when a call may begin, by the length of the queue and the blocks that other calls have reserved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from hf_paged.core.interrupts import check_interrupt, wait_interruptibly
from hf_paged.engine.core import EngineCore
from hf_paged.engine.decoding_loop import DecodingLoop
from hf_paged.engine.pause import REST_SECONDS
from hf_paged.engine.request_threads import RequestThreads, is_request_thread
from hf_paged.engine.step_loop import ROOM_SECONDS


class Room:
    """Makes calls wait until they may begin."""

    def __init__(self, core: EngineCore, threads: RequestThreads) -> None:
        """Serves one engine, whose requests with loops of their own wait for `threads`."""
        self._core = core
        self._threads = threads
        self._condition = core.worker.loop.condition
        self._reserved: dict[DecodingLoop, int] = {}  # blocks, in order of arrival; under the pool's lock

    @property
    def num_waiting(self) -> int:
        """The requests that hold no blocks: not started yet, or preempted."""
        with self._core.pool.lock:
            waiting = self._core.scheduler.queues.num_waiting if self._core.pool.is_made else 0
            return waiting + self._threads.num_queued

    @property
    def is_free(self) -> bool:
        """Whether the queue is shorter than `max_waiting`."""
        limit = self._core.config.max_waiting
        return limit is None or self.num_waiting < limit

    @property
    def may_wait(self) -> bool:
        """Not inside a request, which others in the queue may wait for."""
        return not self._core.worker.loop.is_mine and not is_request_thread()

    def wait(self, is_free: Callable[[], bool] | None = None, timeout: float | None = None) -> bool:
        """Blocks while the queue is full, if this thread may wait; `is_free` says instead of `max_waiting` when it is
        not. Returns whether it is free now.
        """
        if (is_free is None and self._core.config.max_waiting is None) or not self.may_wait:
            return True
        with self._condition:
            return wait_interruptibly(partial(self._condition.wait_for, is_free or (lambda: self.is_free)), timeout)

    @contextmanager
    def reserving(self, loop: DecodingLoop, num_blocks: int) -> Iterator[None]:
        """Waits until so many blocks (at most the whole pool) fit beside those reserved before, and reserves them.

        Not in another such call of this thread, and no longer than some seconds without any step: others may be waiting
        for this one.
        """
        core, own = self._core, threading.get_ident()
        is_inner = core.worker.loop.is_mine or any(other.thread_id == own for other in list(self._reserved))
        if not num_blocks or is_inner:
            yield
            return
        try:
            with self._condition:
                self._reserved[loop] = min(num_blocks, core.manager.pool.num_blocks)
                num_steps, since = core.executor.num_steps, time.monotonic()
                while not self._is_served(loop) and time.monotonic() - since < ROOM_SECONDS:
                    check_interrupt()
                    loop.check_cancelled()
                    self._condition.wait(REST_SECONDS)
                    if core.executor.num_steps != num_steps or core.worker.pause.is_on:
                        num_steps, since = core.executor.num_steps, time.monotonic()
            yield
        finally:
            with self._condition:
                self._reserved.pop(loop, None)
                self._condition.notify_all()

    def _is_served(self, loop: DecodingLoop) -> bool:
        """Whether what it has reserved fits beside what was reserved before it."""
        total = 0
        for other, num_blocks in self._reserved.items():
            total += num_blocks
            if other is loop:
                break
        return total <= self._core.manager.pool.num_blocks
