"""`StepWorker`: runs the steps in which the rows of all callers meet, on a thread of its own or a lone caller's."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily

from hf_paged.core.batch import Batch
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.event_log import as_dicts
from hf_paged.core.interrupts import check_interrupt, wait_interruptibly
from hf_paged.core.sequence import Sequence, SequenceGroup
from hf_paged.engine.executor import LogitsSink, StepExecutor
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.openmp import rest_threads
from hf_paged.engine.pause import Pause, Ticket
from hf_paged.sampling.token_table import TokenTable

REST_SECONDS = 0.05  # without work, after which a worker's helping threads end
IDLE_SECONDS = 2.0  # a worker without work ends after this; the next call starts another
EXIT_SECONDS = 1.0  # at the interpreter's end, for loops to reach their next forward and stay there
ARRIVAL_GAP = 0.005  # seconds without any caller coming back after which a step starts without the missing ones
ROOM_SECONDS = 5.0  # without any step, after which who finds no room beside what callers hold is refused
STEP_SECONDS = 1.0  # that `step_paused` waits for callers who are busy between two forwards, if nobody else has work
MAX_BACKOFF = 6  # a caller that was waited for in vain is not waited for again for up to 2^6 steps

# Of the request whose loop this thread runs: part of the prefix-cache key of all that is generated within it, by models
# of whatever engine (an assistant, one that a processor asks).
CACHE_SALT: ContextVar[Hashable] = ContextVar("hf_paged_cache_salt", default=None)


class Caller:
    """A decoding loop on a thread of its own, whose forwards come one after another.

    Attributes:
        num_rows: Rows of its last forward.
        is_thinking: Between two forwards: processors, criteria and streamers run.
        is_waiting: Its forward is in the queue.
        is_cancelled: Its next forward raises `CallCancelledError`.
        cache: What it runs over.
        thread_id: Where it runs.
        priority: Of its sequences.
        request_id: The request whose loop it is.
    """

    def __init__(self, priority: int = 0, request_id: str | None = None) -> None:
        self.priority = priority
        self.request_id = request_id
        self.cache: Any = None
        self.thread_id: int | None = None
        self.num_rows = 0
        self.is_thinking = False
        self.is_waiting = False
        self.is_cancelled = False
        self.on_cancel: Callable[[], None] | None = None  # stops the forward it waits for
        self.retry_at = 0
        self.num_misses = 0


class CallCancelledError(BaseException):
    """Unwinds the decoding loop of a cancelled request. Not an `Exception`, so that user code doesn't swallow it."""


class StepWorker:
    """Schedules and runs steps over one pool, for everybody.

    The loop is a role. A caller whose work is all there is leads: it runs the steps on its own thread, without a
    hand-over between threads for each, until its work is done or other work arrives. In all other cases the worker's
    thread runs them, for everybody who waits.

    Two locks. The pool's lock guards tables and queues, and is held for bookkeeping only. The step lock belongs to
    the thread that runs steps: the worker's, or that of a caller that leads or needs the pool to itself (`exclusive`).
    Who holds the pool's lock never waits for the step lock. On the main thread, callers hold Ctrl-C back
    (`interrupts.py`).

    On a GPU a step is launched before the tokens of the one before are known here: the device has the next step's work
    while the host hands out tokens, ends rows and schedules. A row that ends has then run one step too many. Whoever
    takes the step lock finds no step in flight.

    Attributes:
        condition: Over the pool's lock; notified when work arrives and after every step.
    """

    def __init__(self, pool: KVPool, executor: StepExecutor, collect: Callable[[], None]) -> None:
        """Makes a worker; its thread is started by the first piece of work.

        Args:
            pool: Tables and tensor.
            executor: Runs steps.
            collect: Frees what finalizers left behind; called before every step, with the pool's lock held.
        """
        self._pool = pool
        self._executor = executor
        self._collect_abandoned = collect
        self.condition = threading.Condition(pool.lock)
        self._step_lock = threading.RLock()
        self._step_owner: int | None = None
        self._num_exclusive = 0
        self._sinks = executor.sinks
        self._callers: set[Caller] = set()
        self._num_ready_rows = 0  # rows of forwards that wait; rows that the engine samples are not counted
        self._orders: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._leader: int | None = None  # the caller's thread that runs the steps, or is about to
        self._woken = threading.Event()
        self._is_stopping = False
        self._is_frozen = False
        self._token_limit: int | None = None
        self._running = executor.running
        self._stuck = (-1, 0.0)  # how many steps had been run when somebody found no room, and since when
        self._pause = Pause(pool)

    # Work arrives

    def add(self, sink: LogitsSink, sequences: Iterable[tuple[int, Sequence]]) -> None:
        """Queues sequences with pending tokens. The pool's lock is held."""
        for row, sequence in sequences:
            self._sinks[sequence.seq_id] = (sink, row)
            sequence.is_wanted = True
            sequence.group.owner = sink
            self._pool.scheduler.wake(sequence.group)
        self.notify()

    def remove(self, sequence: Sequence) -> None:
        """Nobody waits for this sequence's tokens any more. The pool's lock is held."""
        self._sinks.pop(sequence.seq_id, None)
        sequence.is_wanted = False

    def order(self, action: Callable[[], None]) -> None:
        """Has something done before the next step (a cancellation). Takes no lock: a finalizer may call it."""
        self._orders.append(action)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Around work that is added and waited for: within it this thread runs the steps itself, if it is alone.

        Left with work that is not done, the worker's thread goes on with it.
        """
        own = threading.get_ident()
        with self._pool.lock:
            is_new = self._leader is None and self._is_alone(own)
            if is_new:
                self._leader = own
        try:
            yield
        finally:
            if is_new:
                with self._pool.lock:
                    if self._leader == own:
                        self._leader = None
                        if self._has_work():
                            self.notify()

    def _is_alone(self, thread_id: int) -> bool:
        """Whether all work will be what this thread, the calling one, is about to add. The pool's lock is held."""
        return not (
            self._has_work()
            or self._running
            or self._num_exclusive
            or self._is_frozen
            or self._pause.is_on
            or any(caller.thread_id != thread_id for caller in self._callers)
            or torch._C._len_torch_dispatch_stack()  # can't be left for a step, as other modes can
        )

    def resign(self) -> None:
        """This thread has added work that it will not run: if it leads, the worker's thread goes on."""
        with self._pool.lock:
            if self._leader == threading.get_ident():
                self._leader = None
                self.notify()

    def notify(self) -> None:
        """Wakes the thread that runs the steps, or starts the worker's if there is none. The pool's lock is held."""
        if self._leader == threading.get_ident():
            return
        self._leader = None  # no longer alone: it goes on as one of those who wait
        is_alive = self._thread is not None and self._thread.is_alive()
        if not is_alive and not self._is_frozen and self._has_work():
            self._is_stopping = False
            # The thread holds the worker only while there is work: an engine that is dropped ends it.
            arguments = (weakref.ref(self), self._woken)
            self._thread = threading.Thread(target=_serve, args=arguments, name="hf_paged", daemon=True)
            self._thread.start()
        self._woken.set()
        self.condition.notify_all()

    @contextmanager
    def calling(self, caller: Caller) -> Iterator[None]:
        """Registers a decoding loop for its length: steps wait a moment for its next forward."""
        with self._pool.lock:
            self._callers.add(caller)
        try:
            yield
        finally:
            with self._pool.lock:
                self._callers.discard(caller)
                self.condition.notify_all()

    def arrive(self, caller: Caller | None, num_rows: int) -> None:
        """A caller's next forward is here. The pool's lock is held."""
        self._num_ready_rows += num_rows
        if caller is not None:
            if caller.is_thinking and caller.retry_at <= self._executor.num_steps:
                caller.num_misses = 0
            caller.is_thinking, caller.is_waiting, caller.num_rows = False, True, num_rows

    def leave(self, caller: Caller | None, num_rows: int) -> None:
        """A caller's forward is done, and it goes on to choose tokens. The pool's lock is held."""
        self._num_ready_rows -= num_rows
        if caller is not None:
            caller.is_thinking, caller.is_waiting = True, False

    def token_table(self, device: torch.device) -> TokenTable:
        """See `StepExecutor.token_table`."""
        return self._executor.token_table(device)

    # Who runs steps

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within it no step runs but those of this thread. Re-entrant. The pool's lock must not be held."""
        is_counted = False
        try:  # around the counting too: Ctrl-C right behind it would stop the worker for good
            with self._pool.lock:
                self._num_exclusive += 1
                is_counted = True
            with self._stepping():
                yield
        finally:
            with self._pool.lock:
                self._num_exclusive -= is_counted
                self._woken.set()
                self.condition.notify_all()

    @contextmanager
    def forwarding(self, needs_step: Callable[[], bool], caller: Caller | None = None) -> Iterator[None]:
        """`exclusive`, for who may have to run the model in it. While paused, that waits for `resume` or is a step.

        Args:
            needs_step: Whether it has to; asked when no step runs.
            caller: Who; waits no longer when it is cancelled.
        """
        pause, is_held, is_inner = self._pause, False, self.is_mine
        try:
            while True:
                with self.exclusive(), pause.step(is_inner or not needs_step()) as may_run:
                    if may_run:
                        if is_held:
                            with self._pool.lock:
                                pause.num_held, is_held = pause.num_held - 1, False
                        yield
                        return
                pause.warn()
                with self.condition:
                    if not is_held:
                        pause.num_held, is_held = pause.num_held + 1, True
                        self.condition.notify_all()
                    while pause.holds:
                        check_interrupt()
                        if caller is not None and caller.is_cancelled:
                            raise CallCancelledError
                        self.condition.wait(REST_SECONDS)  # a dropped handle and the main thread's end notify nobody
        finally:
            if is_held:
                with self._pool.lock:
                    pause.num_held -= 1

    @contextmanager
    def _stepping(self, keeps_in_flight: bool = False) -> Iterator[None]:
        wait_interruptibly(self._acquire_step_lock)
        outer = self._step_owner
        self._step_owner = threading.get_ident()
        try:
            if not keeps_in_flight:
                self._settle()
            yield
        finally:
            self._step_owner = outer
            self._step_lock.release()

    def _acquire_step_lock(self, timeout: float | None) -> bool:
        return self._step_lock.acquire(timeout=-1 if timeout is None else timeout)

    @property
    def is_mine(self) -> bool:
        """Whether this thread is the one that runs steps: inside a step (a hook), or inside `exclusive`."""
        return self._step_owner == threading.get_ident()

    def wait(self, sink: LogitsSink, done: threading.Event, timeout: float | None = None) -> bool:
        """Blocks until `done` is set. The thread that runs steps runs them meanwhile.

        Args:
            sink: What is waited for.
            done: Set by its end.
            timeout: Seconds; `None`: without end. A thread that runs the steps doesn't look at the time.

        Returns:
            Whether it is over.
        """
        if not self.is_mine:
            self.run_alone(done)
            if not done.is_set():
                self._pause.warn()
                rest_threads()
            return wait_interruptibly(done.wait, timeout)
        # At the interpreter's end only its own: a daemon thread that got logits would go on into torch's code.
        only = sink if self._is_frozen else None
        while not done.is_set():
            if not self.step(only) and not done.is_set() and not self.step(only, forced=True) and not done.is_set():
                raise RuntimeError("nothing can run, and the forward that is waited for has not")
        self._settle()
        return True

    def run_alone(self, done: threading.Event, between: Callable[[], bool] | None = None) -> None:
        """Runs steps as long as this thread leads, at most until `done` is set.

        Args:
            done: See `wait`.
            between: A caller's code, called after each step; whether to leave the steps to the worker's thread from
                here on.
        """
        own = threading.get_ident()
        if self._leader != own or self.is_mine:
            return
        with ExitStack() as around:
            if between is None:  # no code of a caller's in between that could tell
                around.enter_context(without_modes())
                around.enter_context(self._executor.prepared())
            while self._leader == own and not done.is_set():
                if self._num_exclusive or self._pause.is_on:
                    break
                with nullcontext() if between is None else without_modes():
                    self._turn()
                check_interrupt()
                if between is not None and between():
                    break
        if done.is_set():
            with self._stepping():
                pass  # a step that overlaps with the last one is over then, too
        else:
            self.resign()

    # A pause

    @property
    def is_paused(self) -> bool:
        """Whether no step runs but those of `step_paused`."""
        return self._pause.is_on

    def pause(self) -> None:
        """From the step on that runs now, and is waited for, no other does. See `Engine.pause`."""
        with self._pool.lock:
            is_new = self._pause.begin()
        if self.is_mine:
            return  # in a hook inside a step, which can't be waited for
        try:
            with self._stepping():
                pass
        except BaseException:  # Ctrl-C
            if is_new:
                self.resume()
            raise

    def resume(self) -> None:
        """Steps run again."""
        with self._pool.lock:
            self._pause.end()
            self._stuck = (-1, 0.0)  # the time of the pause doesn't count
            self.notify()

    def warn_of_pause(self) -> None:
        """To be called before waiting for what only steps can bring."""
        self._pause.warn()

    def step_paused(self, is_expected: Callable[[], bool]) -> dict[str, Any] | None:
        """Has one step run, and waits for it.

        Args:
            is_expected: Whether somebody is about to bring work.

        Returns:
            The step's event; `None` if there is nothing to run.
        """
        if self.is_mine:
            raise RuntimeError("this thread is inside a step: it can't wait for another one")
        ticket, waiting_since = Ticket(), time.monotonic()
        try:
            with self.condition:
                if not self.is_paused:
                    raise RuntimeError("the engine is not paused: call pause() before step()")
                self._stuck = (-1, 0.0)
                self._pause.ask(ticket)
                self.notify()
                while ticket.event is None:
                    check_interrupt()
                    if self._has_work() or self._pause.num_held or self._running:
                        waiting_since = time.monotonic()
                    else:
                        is_coming = any(not caller.is_waiting for caller in self._callers) or is_expected()
                        if not is_coming or time.monotonic() - waiting_since > STEP_SECONDS:
                            break
                    self.condition.wait(ARRIVAL_GAP)
        finally:
            if ticket.event is None:
                with self._stepping(), self._pool.lock:  # a step that uses it is over then
                    self._pause.withdraw(ticket)
        return None if ticket.event is None else as_dicts(ticket.event[0], ticket.event[1:])[0]

    def stop(self) -> None:
        """Ends the thread after its step, and waits for that."""
        with self._pool.lock:
            thread, self._thread = self._thread, None
            self._is_stopping = True
            self._woken.set()
            self.condition.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=10)
        with self._stepping():
            pass

    def freeze(self) -> None:
        """At the interpreter's end: the step that runs is the last one.

        Daemon threads that wait for another step go on waiting, and end there with the process: in the midst of torch's
        code they would abort it.
        """
        self._is_frozen = True
        with self._pool.lock:
            self._num_exclusive += 1
        if self._step_lock.acquire(timeout=10):
            self._step_owner = threading.get_ident()  # an exit handler that generates runs its own steps
            self._settle()
        with self.condition:
            self.condition.wait_for(lambda: not any(caller.is_thinking for caller in self._callers), EXIT_SECONDS)

    def fail_all(self, error: BaseException) -> None:
        """Carries out what was ordered; everybody else who waits for a step gets the error. Both locks are held."""
        self._housekeep()
        for sink in {id(sink): sink for sink, _ in self._sinks.values()}.values():
            sink.fail(error)

    def reset_after_fork(self) -> None:
        """In a forked child: there is no thread, and locks may be held by threads that don't exist."""
        self._pool.lock = threading.RLock()
        self.condition = threading.Condition(self._pool.lock)
        self._woken = threading.Event()
        self._step_lock = threading.RLock()
        self._step_owner, self._thread, self._leader, self._num_exclusive = None, None, None, 0
        self._pause.reset_after_fork()
        while self._running:
            self._pool.scheduler.undo(self._running.pop())
        self._executor.forget_in_flight()
        for sink, _ in self._sinks.values():
            sink.renew_locks()
        self.fail_all(RuntimeError("this process was forked while the request was running in the parent"))
        for caller in list(self._callers):
            if caller.thread_id != threading.get_ident():  # its thread is not there to give the blocks back
                self._callers.discard(caller)
                if caller.cache is not None and caller.cache.owned_by_call:
                    caller.cache.reset()
        self._num_ready_rows = 0

    # The loop

    def serve(self, is_woken: bool) -> bool:
        """Runs steps until there is nothing to run.

        Args:
            is_woken: Not if nothing happened for a while: then the thread ends, if there really is nothing to do.

        Returns:
            Whether the thread is to go on.
        """
        while True:
            with self._pool.lock:
                if self._thread is not threading.current_thread():
                    return False
                if self._is_stopping or not (is_woken or self._has_work()):
                    self._thread = None
                    return False
                if self._num_exclusive or self._leader is not None or not self._has_work():
                    return True
                if self._pause.holds and not self._orders:
                    return True
                self._gather()
            self._turn()

    def _turn(self) -> None:
        """One turn of the loop."""
        with self._stepping(keeps_in_flight=True):
            try:
                self._advance_if_allowed()
            except BaseException as error:
                with self._pool.lock:
                    self.fail_all(error)  # whatever went wrong, no request waits for ever

    def _advance_if_allowed(self) -> None:
        """Runs a step; while paused, only if somebody asks for one. What was ordered is done in any case."""
        if self._pause.is_idle:
            self._advance()
            return
        with self._pool.lock:
            self._housekeep()
            was_paused = self.is_paused
        with self._pause.step() as may_run:
            if may_run:
                self._advance()
            if was_paused:  # who asked for the step is told of it when it is over
                self._settle()
        if self.is_paused:
            with self.condition:
                self.condition.notify_all()  # who asked for it

    def _advance(self) -> None:
        """Runs a step, of whatever can run."""
        if self.step():
            return
        with self.condition:
            if not self._has_work() or self._num_exclusive:
                return
            # Nothing fits beside what callers hold who are between two forwards: a moment to come back.
            if any(caller.is_thinking for caller in self._callers):
                self.condition.wait(ARRIVAL_GAP)
        if not self.step() and not self.step(forced=True):
            with self.condition:  # only what a step of another thread is busy with
                self.condition.wait(ARRIVAL_GAP)

    def _has_work(self) -> bool:
        return (
            bool(self._orders and not self._running)
            or (self._executor.num_in_flight > 0 and not self._running)
            or (self._pool.is_made and self._pool.scheduler.has_work)
        )

    def _gather(self) -> None:
        """Waits a moment for callers between two forwards, so that they don't fall apart into ever smaller steps.

        Not for those whose own code takes long, and not where they are few beside the rows at hand.
        """
        while True:
            num_steps = self._executor.num_steps
            thinking = [c for c in self._callers if c.is_thinking and c.retry_at <= num_steps]
            num_engine_rows = len(self._sinks) - self._num_ready_rows
            if 4 * sum(c.num_rows for c in thinking) <= self._num_ready_rows + num_engine_rows:
                return
            if not self.condition.wait(ARRIVAL_GAP):
                for caller in thinking:
                    caller.num_misses = min(caller.num_misses + 1, MAX_BACKOFF)
                    caller.retry_at = num_steps + 2**caller.num_misses
                return

    # A step

    def step(self, only: LogitsSink | None = None, *, forced: bool = False) -> bool:
        """Runs one step, of everybody's rows or of one owner's; False if nothing could run. The step lock is held.

        Where steps overlap, the tokens of this one are handed out by the next call.
        """
        overlaps = self._executor.overlaps
        if forced or not overlaps:
            self._settle()
        with self._pool.lock:
            self._housekeep()
            has_work = self._pool.is_made and self._pool.scheduler.has_work
            step = Batch()
            if has_work and (found := self._schedule(only=only, forced=forced, max_tokens=self._token_limit)):
                step = found
            elif has_work:
                return True
        if not step.num_seqs:
            return self._settle()
        try:
            self._run(step, keeps_in_flight=overlaps)
        except BaseException as error:  # a hook that calls sys.exit() ends its request, not everybody's worker
            owners = [self._sinks[seq_id][0] for seq_id in step.seq_ids]  # before rows end
            self._settle()
            self._isolate(step, owners, error)
        return True

    def _run(self, step: Batch, keeps_in_flight: bool = False) -> None:
        """Launches a step, and hands out tokens: its own, or (`keeps_in_flight`) those of the one before."""
        num_before = self._executor.num_in_flight
        self._executor.launch(step)
        self._token_limit = None
        # Inside another step (a hook's) what was launched before that one stays.
        self._collect(num_before if self._running else int(keeps_in_flight))
        with self.condition:
            self.condition.notify_all()

    def _settle(self) -> bool:
        """Hands out all tokens that are on their way; returns whether there were any. Nothing to do inside a step."""
        if self._running or not self._executor.num_in_flight:
            return False
        self._collect(0)
        with self.condition:
            self.condition.notify_all()
        return True

    def _collect(self, num_kept: int) -> None:
        while self._executor.num_in_flight > num_kept:
            self._executor.collect()

    def _housekeep(self) -> None:
        self._collect_abandoned()
        # Not inside another step (a hook's): what is to be cancelled may be in it.
        while self._orders and not self._running:
            self._orders.popleft()()

    def _schedule(self, **options: Any) -> Batch | None:
        """The next step; `None` if somebody finds no room, at the moment or (then it was failed) for good.

        The pool's lock is held.
        """
        self._pool.log.step = self._executor.num_steps + 1
        try:
            # Inside another step earlier tokens stay in flight; later ones of the same rows must not overtake them.
            step = self._pool.scheduler.schedule(known_only=bool(self._running), **options)
        except OutOfBlocksError as error:
            self._pool.execute_swap_outs(error.swap_outs)
            if self._may_find_room():
                self.condition.wait(ARRIVAL_GAP)
                return None
            group: SequenceGroup = error.group
            sink: Any = group.owner
            sink.fail(self._pool.out_of_blocks(error))
            return None
        if not step.num_seqs:
            self._pool.execute_swap_outs(step.swap_outs)
        return step

    def _may_find_room(self) -> bool:
        """Whether a caller who is busy elsewhere may yet give back blocks that can't be taken from it.

        Only for so long: it may itself be waiting for whoever finds no room (a `generate()` inside a processor).
        """
        if (
            threading.current_thread() is not self._thread
            or self._running
            or all(caller.is_waiting for caller in self._callers)
        ):
            return False
        now = time.monotonic()
        if self._stuck[0] != self._executor.num_steps:
            self._stuck = (self._executor.num_steps, now)
        if now - self._stuck[1] < ROOM_SECONDS:
            return True
        self._stuck = (-1, 0.0)
        return False

    def _isolate(self, step: Batch, owners_of_rows: list[LogitsSink], error: BaseException) -> None:
        """After a step that raised: finds out whose rows were to blame by running each owner's by themselves."""
        owners = {id(owner): owner for owner in owners_of_rows}
        if isinstance(error, torch.OutOfMemoryError):
            is_first = self._token_limit is None
            self._token_limit = max(1, step.num_tokens // 2)  # the next step is smaller
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if is_first and step.num_tokens > 1:
                return
            smallest = min(zip(step.query_lens, owners_of_rows, strict=True), key=lambda row: row[0])[1]
            owners = {id(smallest): smallest}
        if len(owners) == 1:
            with self._pool.lock:
                next(iter(owners.values())).fail(error)
            return
        for owner in owners.values():
            with self._pool.lock:
                # Forced, since its rows may be back in the queue behind others.
                again = self._schedule(only=owner, forced=True)
            if again is None or not again.num_seqs:
                continue
            try:
                self._run(again)
            except BaseException as own_error:
                with self._pool.lock:
                    owner.fail(own_error)


@contextmanager
def without_modes() -> Iterator[None]:
    """As on a thread of the worker's own: what a step makes is not the caller's alone, whatever mode it calls in."""
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield


def _serve(reference: weakref.ref[StepWorker], woken: threading.Event) -> None:
    while True:
        is_woken = woken.wait(REST_SECONDS)
        if not is_woken:
            rest_threads()
            is_woken = woken.wait(IDLE_SECONDS)
        woken.clear()
        worker = reference()
        if worker is None or not worker.serve(is_woken):
            return
        del worker
