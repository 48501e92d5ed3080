"""`StepWorker`: which thread runs the steps: the worker's own, or that of a caller who is alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from hf_paged.core.interrupts import check_interrupt, wait_interruptibly
from hf_paged.core.process import EXIT_SECONDS, PROCESS
from hf_paged.core.sequence import Sequence
from hf_paged.engine.executor import StepExecutor
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.openmp import rest_threads
from hf_paged.engine.pause import REST_SECONDS, Pause
from hf_paged.engine.run import Run
from hf_paged.engine.step_loop import StepLoop, without_modes

IDLE_SECONDS = 2.0  # a worker without work ends after this; the next call starts another


class StepWorker:
    """Finds a thread for the steps.

    A caller whose work is all there is leads: it runs the steps on its own thread, without a hand-over between
    threads for each, until its work is done or other work arrives. In all other cases the worker's thread runs them,
    for all callers that wait. On the main thread, callers hold Ctrl-C back (`interrupts.py`).
    """

    def __init__(self, pool: KVPool, executor: StepExecutor) -> None:
        self._pool = pool
        self.executor = executor
        self.loop = StepLoop(pool, executor)
        self.pause = Pause(pool, self.loop, self.wake)
        self._thread: threading.Thread | None = None
        self._leader: int | None = None  # the caller's thread that runs the steps, or is about to
        self._last_leader: weakref.ref[threading.Thread] | None = None
        self._is_stopping = False

    def add(self, consumer: Run, sequences: Iterable[tuple[int, Sequence]]) -> None:
        """Queues sequences with uncomputed tokens. The pool's lock is held."""
        self.loop.add(consumer, sequences)
        self.wake()

    def wake(self, hands_over: bool = False) -> None:
        """Wakes the thread that runs the steps, or starts the worker's if there is none. The pool's lock is held.

        Args:
            hands_over: Also if that is this thread: it has added work that it will not run.
        """
        if self._leader == threading.get_ident() and not hands_over:
            return
        self._leader = None  # no longer alone: it goes on as one of those who wait
        is_alive = self._thread is not None and self._thread.is_alive()
        if not is_alive and not PROCESS.is_ending and self.loop.has_work:
            self._is_stopping = False
            # The thread holds the worker only while there is work: an engine that is dropped ends it.
            arguments = (weakref.ref(self), self.loop.woken)
            self._thread = threading.Thread(target=_serve, args=arguments, name="hf_paged", daemon=True)
            self._thread.start()
        self.loop.wake()

    # A lone caller

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Surrounds work that a thread adds and waits for: within it the thread runs the steps itself, if it is alone.

        Left with work that is not done, the worker's thread goes on with it.
        """
        own = threading.get_ident()
        with self._pool.lock:
            is_new = self._leader is None and self._is_alone(own)
            if is_new:
                self._leader, self._last_leader = own, weakref.ref(threading.current_thread())
        try:
            yield
        finally:
            if is_new:
                with self._pool.lock:
                    if self._leader == own:
                        self._leader = None
                        if self.loop.has_work:
                            self.wake()

    def _is_alone(self, thread_id: int) -> bool:
        """Whether all work will be what this thread, the calling one, is about to add. The pool's lock is held."""
        return (
            self.loop.is_free
            and not self.loop.has_work
            and not self.loop.num_exclusive
            and not self.pause.is_on
            and self.loop.decoding_loops.are_all_on(thread_id)
            and (self._pool.kv_device.type != "cuda" or self._led_before())
            and not torch._C._len_torch_dispatch_stack()  # can't be left for a step, as other modes can
        )

    def _led_before(self) -> bool:
        """Whether no other caller's thread that lives has led: cuBLAS keeps scratch for each (see `StepMemory`)."""
        last = None if self._last_leader is None else self._last_leader()
        return last is None or last is threading.current_thread() or not last.is_alive()

    def run_alone(self, done: threading.Event, between: Callable[[], bool] | None = None) -> None:
        """Runs steps as long as this thread leads, at most until `done` is set.

        Args:
            between: A caller's code, called after each step; whether to leave the steps to the worker's thread from
                here on.
        """
        own, loop = threading.get_ident(), self.loop
        if self._leader != own or loop.is_mine:
            return
        with ExitStack() as around:
            if between is None:  # no code of a caller's in between that could tell
                around.enter_context(without_modes())
                around.enter_context(self._prepared())
            while self._leader == own and not done.is_set():
                if loop.num_exclusive:
                    break
                with nullcontext() if between is None else without_modes():
                    is_paused = not loop.turn(self.pause.allows)
                check_interrupt()
                if is_paused or (between is not None and between()):
                    break
        if done.is_set():
            with loop.holding():
                pass  # a step that overlaps with the last one is over then, too
        else:
            with self._pool.lock:
                self.wake(hands_over=True)

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """See `BoundModel.prepared`. The worker's thread may run steps as soon as this one doesn't lead any more."""
        with ExitStack() as scope:
            with self.loop.holding(keeps_in_flight=True):
                scope.enter_context(self.executor.model.prepared())
            try:
                yield
            finally:  # a step of another thread may have undone it by then
                self.loop.do_while(lambda: self.executor.model.is_prepared, scope.close)

    def wait(self, done: threading.Event, timeout: float | None = None) -> bool:
        """Blocks until `done` is set. The thread that has the step lock runs the steps meanwhile.

        Args:
            done: Set by the end of what is waited for.
            timeout: Seconds; `None`: without end. A thread that runs the steps doesn't look at the time.

        Returns:
            Whether it is over.
        """
        if not self.loop.is_mine:
            self.run_alone(done)
            if not done.is_set():
                self.loop.check_orphaned()
                self.pause.warn()
                rest_threads()
            return wait_interruptibly(done.wait, timeout)
        step = self.loop.step
        while not done.is_set():
            if not step() and not done.is_set() and not step(forced=True) and not done.is_set():
                raise RuntimeError("no sequence can run, and the forward that this thread waits for has not run")
        self.loop.settle()
        return True

    # The worker's thread

    def serve(self, is_woken: bool) -> bool:
        """Runs steps until there is nothing to run.

        Args:
            is_woken: Not if nothing happened for a while: then the thread ends, if there really is nothing to do.

        Returns:
            Whether the thread is to go on.
        """
        loop = self.loop
        while True:
            with self._pool.lock:
                if self._thread is not threading.current_thread():
                    return False
                if self._is_stopping or not (is_woken or loop.has_work):
                    self._thread = None
                    return False
                if loop.num_exclusive or self._leader is not None or not loop.has_work:
                    return True
                if self.pause.is_on and not loop.is_posted:
                    return True
                loop.decoding_loops.gather()
            loop.turn(self.pause.allows)

    def stop(self) -> None:
        """Ends the thread after its step, and waits for that."""
        with self._pool.lock:
            thread, self._thread = self._thread, None
            self._is_stopping = True
            self.loop.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=10)
        with self.loop.holding():
            pass

    def freeze(self) -> None:
        """At the interpreter's end: the step that runs is the last one.

        Daemon threads that wait for another step go on waiting, and end there with the process: in the midst of torch's
        code they would abort it.
        """
        with self._pool.lock:
            self.loop.num_exclusive += 1
        self.loop.keep()
        with self.loop.condition:
            loops = self.loop.decoding_loops
            self.loop.condition.wait_for(lambda: not loops.is_any_between_forwards, EXIT_SECONDS)


def _serve(reference: weakref.ref[StepWorker], woken: threading.Event) -> None:
    while True:
        is_woken = woken.wait(REST_SECONDS)
        if not is_woken:
            with PROCESS.at_work():
                rest_threads()
            is_woken = woken.wait(IDLE_SECONDS)
        woken.clear()
        with PROCESS.at_work():
            worker = reference()
            goes_on = worker is not None and worker.serve(is_woken)
            del worker  # which may free the engine
        if not goes_on:
            return
