"""`StepLoop`: turns of the loop in which the rows of all callers meet, and which thread may run one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily

from hf_paged.core.batch import Batch
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.interrupts import wait_interruptibly
from hf_paged.core.sequence import Sequence, SequenceGroup
from hf_paged.engine.decoding_loop import ARRIVAL_GAP, DecodingLoops
from hf_paged.engine.executor import StepExecutor
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.run import Run

SLICE_SECONDS = 0.005  # after which a thread that waits for the step lock looks whether it still needs it
FAULT_SECONDS = 5.0  # that a step may take to fail by itself, when another rank is gone
LEAST_CHUNK = 64  # tokens of prompts in a step, however slow they are: smaller ones cost more each
ROOM_SECONDS = 5.0  # without any step, after which a group that finds no room beside what callers hold is refused


def _acquire(lock: Any) -> None:
    if not lock.acquire(blocking=False):
        wait_interruptibly(lambda timeout: lock.acquire(timeout=-1 if timeout is None else timeout))


class StepLoop:
    """Schedules and runs steps over one pool. The loop is a role: the thread that holds the step lock has it.

    Two locks. The pool's lock guards tables and queues, and is held for bookkeeping only. The step lock belongs to
    the thread that runs steps: the worker's, a lone caller's, or that of a caller that needs the pool to itself
    (`exclusive`). A thread with the pool's lock never waits for the step lock.

    On a GPU a step is launched before the tokens of the one before are known here: the device has the next step's work
    while the host hands out tokens, ends rows and schedules. A row that ends has then run one step too many. A thread
    that takes the step lock finds no step in flight.

    Attributes:
        condition: Over the pool's lock; notified when work arrives and after every step.
        decoding_loops: Callers' own, which steps wait for.
        woken: Set when there may be something to do.
        num_exclusive: Threads that have, or wait for, the pool to themselves.
    """

    def __init__(self, pool: KVPool, executor: StepExecutor) -> None:
        self._pool = pool
        self._executor = executor
        self.condition = threading.Condition(pool.lock)
        self.decoding_loops = DecodingLoops(self.condition, executor)
        self.woken = threading.Event()
        self.num_exclusive = 0
        self._lock: Any = threading.RLock()
        # Held by the thread that gets the step lock next: one that runs step after step can't take it past that one.
        # Re-entrant, for handlers of signals that arrive while it waits.
        self._next = threading.RLock()
        self._holder: int | None = None
        self._is_turn = False
        self._orphaned_by: BaseException | None = None
        self._posted: deque[Callable[[], None]] = deque()
        self._posted_between: deque[Callable[[], None]] = deque()
        self._token_limit: int | None = None
        self._held_since: float | None = None  # the first of the prompts that are held back
        self._last_released = -1  # arrival of the last one that is not held any more
        self._stuck = (-1, 0.0)  # how many steps had been run when a group found no room, and since when

    # Work arrives

    def add(self, consumer: Run, sequences: Iterable[tuple[int, Sequence]]) -> None:
        """Queues sequences with uncomputed tokens. The pool's lock is held."""
        for row, sequence in sequences:
            self._executor.consumers[sequence.seq_id] = (consumer, row)
            sequence.is_wanted = True
            sequence.group.owner = consumer
            self._pool.scheduler.queues.wake(sequence.group)

    def remove(self, sequence: Sequence) -> None:
        """Drops a sequence whose tokens are not waited for any more. The pool's lock is held."""
        self._executor.consumers.pop(sequence.seq_id, None)
        sequence.is_wanted = False

    def post(self, change: Callable[[], None], between_steps: bool = False) -> None:
        """Has a change of queues, tables or rows made before the next step. Takes no lock: a finalizer may call it.

        Args:
            change: Called with the pool's lock held. Raises nothing.
            between_steps: It is of sequences that a step may be running (a cancellation), and waits for its end. Others
                are made before anything reads what they change, perhaps beside a step.
        """
        (self._posted_between if between_steps else self._posted).append(change)

    def carry_out(self) -> None:
        """Makes the changes that need not wait for a step, in their order. The pool's lock is held."""
        while self._posted:
            self._posted.popleft()()

    def wake(self) -> None:
        """Has the worker's thread and all waiting threads look for work again. The pool's lock is held."""
        self.woken.set()
        self.condition.notify_all()

    @property
    def is_posted(self) -> bool:
        """Whether a posted change waits that the loop makes even while steps may not run."""
        return bool(self._posted_between)

    @property
    def has_work(self) -> bool:
        return bool(self._posted_between or self._executor.in_flight) or (
            self._pool.is_made and self._pool.scheduler.queues.has_work
        )

    # Who has the role

    @contextmanager
    def holding(self, keeps_in_flight: bool = False) -> Iterator[None]:
        """Within it this thread has the step lock. Re-entrant."""
        outer = self._take()
        try:
            if not keeps_in_flight:
                self.settle()
            yield
        finally:
            self._holder = outer
            self._lock.release()

    def _take(self) -> int | None:
        """Takes the step lock; returns which thread had it before: this one, or none."""
        self.check_orphaned()
        if self._lock._is_owned():  # also where `do_while` has it
            self._lock.acquire()
        else:
            _acquire(self._next)
            try:
                _acquire(self._lock)
            finally:
                self._next.release()
        outer, self._holder = self._holder, threading.get_ident()
        return outer

    def do_while(self, is_needed: Callable[[], bool], action: Callable[[], None]) -> None:
        """Calls `action` with the step lock, unless it is no longer needed once the lock is taken."""
        while is_needed():
            if self._lock.acquire(timeout=SLICE_SECONDS):
                try:
                    action()
                finally:
                    self._lock.release()
                return

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within it no step runs but those of this thread. Re-entrant. The pool's lock must not be held.

        Raises:
            RuntimeError: This thread is inside a step.
        """
        self._executor.model.check_outside()
        is_counted = False
        try:  # around the counting too: Ctrl-C right behind it would stop the loop for good
            with self._pool.lock:
                self.num_exclusive += 1
                is_counted = True
            with self.holding():
                yield
        finally:
            with self._pool.lock:
                self.num_exclusive -= is_counted
                self.wake()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the step lock: within `exclusive`, in a turn, or inside a step."""
        return self._holder == threading.get_ident()

    @property
    def is_free(self) -> bool:
        return self._holder is None

    def keep(self) -> None:
        """At the interpreter's end: takes the step lock for good, as soon as the step that runs is over."""
        if self._lock.acquire(timeout=10):
            self._holder = threading.get_ident()
            self.settle()

    def orphan(self, error: BaseException) -> None:
        """In a forked child, which lacks the threads that ran this loop: later uses raise the error."""
        self._orphaned_by = error

    def check_orphaned(self) -> None:
        """Raises the error of `orphan`."""
        if self._orphaned_by is not None:
            raise self._orphaned_by

    # A turn

    def turn(self, may_step: Callable[[], bool]) -> bool:
        """Makes the changes that were posted and, if it `may_step`, runs a step of whatever can run.

        Returns:
            Whether it might.
        """
        outer, is_allowed = self._take(), True
        self._is_turn = True
        try:
            is_allowed = may_step()
            if is_allowed:
                if not self.step():
                    self._find_work()
            else:
                with self._pool.lock:
                    self._housekeep()
        except BaseException as error:
            with self._pool.lock:
                self.fail_all(error)  # whatever went wrong, no request waits for ever
        finally:
            self._is_turn = False
            self._holder = outer
            self._lock.release()
        return is_allowed

    def fail_all(self, error: BaseException) -> None:
        """Makes the changes that were posted; all others that wait for a step get the error. Both locks are held."""
        self._housekeep()
        for consumer in {id(consumer): consumer for consumer, _ in self._executor.consumers.values()}.values():
            consumer.fail(error)

    def fail_soon(self, error: BaseException) -> None:
        """Fails all that wait, on any thread: behind the step that runs, or (if that hangs) beside it."""

        def fail() -> None:
            is_mine = self._lock.acquire(timeout=FAULT_SECONDS)
            try:
                with self.condition:
                    self.fail_all(error)
                    self.wake()
            finally:
                if is_mine:
                    self._lock.release()

        threading.Thread(target=fail, name="hf_paged_fault", daemon=True).start()

    def forget_refusals(self) -> None:
        """Makes groups that found no room wait for it anew."""
        self._stuck = (-1, 0.0)

    def _find_work(self) -> None:
        """Waits a moment, or has a group run whatever has to make room for it."""
        with self.condition:
            if not self.has_work or self.num_exclusive:
                return
            # Nothing fits beside what callers hold who are between two forwards: a moment to come back.
            if self.decoding_loops.is_any_between_forwards:
                self.condition.wait(ARRIVAL_GAP)
        if not self.step() and not self.step(forced=True):
            with self.condition:  # only what a step of another thread is busy with
                self.condition.wait(ARRIVAL_GAP)

    def step(self, only: Run | None = None, *, forced: bool = False) -> bool:
        """Runs one step, of all rows or of one owner's; False if nothing could run. The step lock is held.

        Where steps overlap, the tokens of this one are handed out by the next call.
        """
        overlaps = self._executor.overlaps
        if (forced or not overlaps) and self._executor.in_flight:
            self._collect(num_kept=0)
        with self._pool.lock:
            self._housekeep()
            if not self._pool.is_made:
                return False
            holds = only is None and not forced and self._holds_prompts()
            limits = {"max_tokens": self._token_limit, "max_prompt_tokens": self._affordable()}
            step = self._schedule(only=only, forced=forced, holds=holds, **limits)
            if step is None:
                return True
        if not step.seq_ids:
            return self.settle()
        try:
            self._executor.launch(step)
            self._token_limit = None
            self._collect(num_kept=int(overlaps))
        except BaseException as error:  # a hook that calls sys.exit() ends its request, not the loop of all
            found = [self._executor.consumers.get(seq_id) for seq_id in step.seq_ids]  # some may have ended
            owners = [None if consumer is None else consumer[0] for consumer in found]
            self.settle()
            self._isolate(step, owners, error)
        return True

    def settle(self) -> bool:
        """Hands out all tokens that are on their way; returns whether there were any. The step lock is held."""
        if not self._executor.in_flight:
            return False
        self._collect(num_kept=0)
        return True

    def _collect(self, num_kept: int) -> None:
        """Hands out the tokens of all steps but the newest `num_kept`."""
        while len(self._executor.in_flight) > num_kept:
            self._executor.collect()
        with self.condition:
            self.condition.notify_all()

    def _housekeep(self) -> None:
        self.carry_out()
        while self._posted_between:
            self._posted_between.popleft()()

    def _affordable(self) -> int | None:
        """Tokens of prompts that a step has time for; `None`: any number, or it is not known what they cost."""
        limit, cost = self._pool.config.max_step_seconds, self._pool.cost.seconds_per_token
        return None if limit is None or cost is None else max(LEAST_CHUNK, int(limit / cost))

    def _holds_prompts(self) -> bool:
        """Whether prompts are held back beside the rows that run, so that a later step takes more of them at once."""
        config, queues = self._pool.config, self._pool.scheduler.queues
        waiting = queues.waiting.groups
        if not config.max_prompt_delay or not waiting:
            self._held_since = None
            return False
        if min(waiting) <= self._last_released:
            return False
        now = time.monotonic()
        if self._held_since is None:
            self._held_since = now
        sizes = [s.num_uncomputed_tokens for group in waiting.values() for s in group.sequences]
        is_full = (
            sum(sizes) + len(queues.ready) >= config.max_num_batched_tokens
            or len(sizes) + len(queues.ready) >= config.max_num_seqs
        )
        if is_full or now - self._held_since >= config.max_prompt_delay:
            self._held_since, self._last_released = None, max(waiting)
            return False
        return True

    def _schedule(self, **options: Any) -> Batch | None:
        """The next step; `None` if a group finds no room, at the moment or (then it was failed) for good.

        The pool's lock is held.
        """
        self._pool.log.step = self._executor.num_steps + 1
        self._executor.look_at_weights(is_before_step=True)
        try:
            step = self._pool.scheduler.schedule(**options)
        except OutOfBlocksError as error:
            self._pool.execute([("swap_outs", error.swap_outs)])
            if self._may_find_room():
                self.condition.wait(ARRIVAL_GAP)
                return None
            group: SequenceGroup = error.group
            consumer: Any = group.owner
            consumer.fail(self._pool.out_of_blocks(error))
            return None
        if not step.seq_ids:
            self._pool.log.step = self._executor.num_steps
            self._pool.execute([("swap_outs", step.swap_outs)])
        return step

    def _may_find_room(self) -> bool:
        """Whether a caller who is busy elsewhere may yet give back blocks that can't be taken from it.

        Only for so long: it may itself be waiting for the group that finds no room (a `generate()` in a processor).
        """
        if not self._is_turn or not self.decoding_loops.is_any_away(but=threading.get_ident()):
            return False
        now = time.monotonic()
        if self._stuck[0] != self._executor.num_steps:
            self._stuck = (self._executor.num_steps, now)
        if now - self._stuck[1] < ROOM_SECONDS:
            return True
        self.forget_refusals()
        return False

    def _isolate(self, step: Batch, owners_of_rows: list[Run | None], error: BaseException) -> None:
        """After a step that raised: runs each owner's rows by themselves, and fails those that raise again."""
        owners = {id(owner): owner for owner in owners_of_rows if owner is not None}
        if not owners:
            return
        if isinstance(error, torch.OutOfMemoryError):
            is_first = self._token_limit is None
            self._token_limit = max(self._pool.manager.least_chunk, step.num_tokens // 2)  # the next step is smaller
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if is_first and step.num_tokens > 1:
                return
            rows = zip(step.query_lens, owners_of_rows, strict=True)
            smallest = min(((length, owner) for length, owner in rows if owner is not None), key=lambda row: row[0])[1]
            owners = {id(smallest): smallest}
        if len(owners) == 1:
            with self._pool.lock:
                next(iter(owners.values())).fail(error)
            return
        for owner in owners.values():
            with self._pool.lock:
                # Forced, since its rows may be back in the queue behind others.
                again = self._schedule(only=owner, forced=True)
            if again is None or not again.seq_ids:
                continue
            try:
                self._executor.launch(again)
                self._collect(num_kept=0)
            except BaseException as own_error:
                with self._pool.lock:
                    owner.fail(own_error)


@contextmanager
def without_modes() -> Iterator[None]:
    """Leaves the caller's torch modes, as on the worker's thread: a step's tensors belong to all callers."""
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield
