"""One wake-up of an event loop a step: what the engine's threads have for its tasks is handed over all at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Wakeups:
    """Wakes tasks of one event loop from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, is_handing_out: Callable[[], bool]) -> None:
        """For one loop.

        Args:
            loop: Its tasks are woken.
            is_handing_out: Whether more is about to come, and `flush` behind it.
        """
        self._loop = loop
        self._is_handing_out = is_handing_out
        self._events: deque[asyncio.Event] = deque()
        self._is_scheduled = False
        self.num_wakeups = 0

    def wake(self, event: asyncio.Event) -> None:
        """Sets an event, soon. From any thread; waits for nothing."""
        self._events.append(event)
        if not self._is_handing_out():
            self.flush()

    def flush(self) -> None:
        """Wakes all that is to be woken. From any thread; waits for nothing."""
        if self._events and not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._wake_all)
            except RuntimeError:  # the loop was closed, and its tasks with it
                self._events.clear()

    def _wake_all(self) -> None:
        self._is_scheduled = False  # before the look: what comes behind it schedules the next
        self.num_wakeups += 1
        while self._events:
            self._events.popleft().set()
