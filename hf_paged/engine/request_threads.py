"""`RequestThreads`: threads for requests whose tokens one of transformers' loops chooses."""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hf_paged.core.process import PROCESS
from hf_paged.engine.decoding_loop import DecodingLoop


class _RequestThread(threading.Thread):
    """A thread that runs requests: whose it is, and how many requests, of any engine, it waits for itself."""

    def __init__(self, owner: RequestThreads) -> None:
        super().__init__(name="hf_paged_request", daemon=True)
        self.owner = owner
        self.num_waits = 0

    def run(self) -> None:
        self.owner.serve()


def is_request_thread() -> bool:
    return isinstance(threading.current_thread(), _RequestThread)


@contextmanager
def waiting() -> Iterator[None]:
    """What a wait for a request is to be done in: a thread that runs one itself is not counted meanwhile."""
    thread = threading.current_thread()
    if not isinstance(thread, _RequestThread):
        yield
        return
    thread.owner.count_thread(thread, -1)
    try:
        yield
    finally:
        # A coroutine may be ended by the garbage collector, wherever that runs.
        if threading.current_thread() is thread:
            thread.owner.count_thread(thread, 1)


@dataclass(slots=True, order=True)
class LoopJob:
    """A request to run; those of a lower `priority` come first, then those with a lower `number`.

    Attributes:
        run: Runs it, to its end, on one of the threads. Raises nothing.
    """

    priority: int
    number: int
    loop: DecodingLoop = field(compare=False)
    run: Callable[[], None] = field(compare=False)


def _is_waiting(loop: weakref.ref[DecodingLoop]) -> bool:
    living = loop()
    return living is not None and living.is_waiting


class RequestThreads:
    """At most so many threads at a time. Not counted: those that wait for a request themselves (in a processor), which
    may be in need of a thread.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._lock = threading.RLock()  # a wait may be ended by the garbage collector
        self._jobs: list[LoopJob] = []  # a heap
        self._numbers = itertools.count()
        self.num_threads = 0

    @property
    def num_queued(self) -> int:
        return len(self._jobs)

    def add(self, loop: DecodingLoop, run: Callable[[], None]) -> LoopJob:
        with self._lock:
            job = LoopJob(loop.priority, next(self._numbers), loop, run)
            heapq.heappush(self._jobs, job)
            self._start_thread()
            return job

    def remove(self, job: LoopJob) -> bool:
        """Takes a request out of the queue; returns whether it was there."""
        with self._lock:
            is_queued = job in self._jobs
            if is_queued:
                self._jobs.remove(job)
                heapq.heapify(self._jobs)
            return is_queued

    def count_thread(self, thread: _RequestThread, change: int) -> None:
        """The calling thread counts no more, from the first of its waits on; or again, from the end of the last."""
        num_waits = thread.num_waits
        thread.num_waits = num_waits - change
        if 0 in (num_waits, thread.num_waits):
            with self._lock:
                self.num_threads += change
                self._start_thread()

    def _start_thread(self) -> None:
        """Starts a thread for what is queued, if there may be one more. The lock is held."""
        if self._jobs and self.num_threads < self._max_threads:
            self.num_threads += 1
            _RequestThread(self).start()

    def serve(self) -> None:
        while True:
            with self._lock:
                if not self._jobs or self.num_threads > self._max_threads:
                    self.num_threads -= 1
                    return
                job = heapq.heappop(self._jobs)
            # At the interpreter's end loops come to a forward, where they wait for good, or to their own end.
            with PROCESS.at_work(functools.partial(_is_waiting, weakref.ref(job.loop))):
                job.run()
                del job  # and with it the caches of its loop
