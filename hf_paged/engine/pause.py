"""`Pause`: what keeps a worker's steps from running, and the tickets for single ones."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from hf_paged.core.event_log import Event
from hf_paged.engine.kv_pool import KVPool

logger = logging.getLogger(__name__)


class Ticket:
    """Permission for one step. Whoever runs it leaves the step's event, and the event's id."""

    def __init__(self) -> None:
        self.event: tuple[int, Event] | None = None


class Pause:
    """A switch, and a queue of tickets. Changed with the pool's lock held.

    Attributes:
        num_held: Threads that it keeps from running the model themselves.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._is_on = False
        self._thread_id: int | None = None  # that paused and has not been warned
        self._tickets: deque[Ticket] = deque()
        self.num_held = 0

    @property
    def is_on(self) -> bool:
        """Whether steps need a ticket.

        A pause ends with the main thread: else the interpreter would wait for ever for threads that wait for a step.
        """
        return self._is_on and threading.main_thread().is_alive()

    @property
    def is_idle(self) -> bool:
        """Whether steps run as if there were no such thing."""
        return not self._is_on and not self._tickets

    @property
    def holds(self) -> bool:
        """Whether no step may run now."""
        return self.is_on and not self._tickets

    def begin(self) -> bool:
        """Switches it on; returns whether it was off."""
        was_off, self._is_on = not self._is_on, True
        self._thread_id = threading.get_ident()
        return was_off

    def end(self) -> None:
        """Switches it off. The next steps are also those that were asked for."""
        self._is_on = False

    def reset_after_fork(self) -> None:
        """Nobody is there who would end it."""
        self._is_on, self.num_held = False, 0
        self._tickets.clear()

    def ask(self, ticket: Ticket) -> None:
        """Asks for a step."""
        self._tickets.append(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Doesn't want it any more. No step runs."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)

    @contextmanager
    def step(self, is_free: bool = False) -> Iterator[bool]:
        """Around what may run a step: whether it may. The step lock is held, the pool's is not.

        A ticket is used up by a step that got as far as the log; else the next one may use it.

        Args:
            is_free: It needs no ticket.
        """
        log, ticket = self._pool.log, None
        before = log.last_step
        try:
            with self._pool.lock:
                may_run = is_free or not self.holds
                if may_run and not is_free and self._tickets:
                    ticket = self._tickets.popleft()
            yield may_run
        finally:
            if ticket is not None:
                with self._pool.lock:
                    if log.last_step is before:
                        self._tickets.appendleft(ticket)
                    else:
                        ticket.event = log.last_step

    def warn(self) -> None:
        """Says so, once a pause, if it is the pausing thread itself that is about to wait for a step."""
        if self.is_on and self._thread_id == threading.get_ident():
            self._thread_id = None
            logger.warning(
                "hf_paged: this thread called pause() and now waits for a step: it goes on when another thread calls "
                "resume() or step() (Ctrl-C ends the call)"
            )
