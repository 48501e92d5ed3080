"""Wakes an event loop once a step: the engine's threads hand over all news for its tasks together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def in_pieces(items: Iterable[T], size_of: Callable[[T], int], most: int) -> AsyncIterator[list[T]]:
    """Lists of items whose sizes reach `most`. The event loop has its turn before the items behind a list are made."""
    piece: list[T] = []
    size = 0
    for item in items:
        piece.append(item)
        size += size_of(item)
        if size >= most:
            yield piece
            piece, size = [], 0
            await asyncio.sleep(0)
    if piece:
        yield piece


class Wakeups:
    """Wakes tasks of one event loop from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, is_handing_out: Callable[[], bool]) -> None:
        """For one loop.

        Args:
            is_handing_out: Whether more is about to come, and `flush` behind it.
        """
        self._loop = loop
        self._is_handing_out = is_handing_out
        self._news: deque[asyncio.Event] = deque()
        self._is_scheduled = False
        self.num_wakeups = 0

    def wake(self, news: asyncio.Event) -> None:
        """Sets it, soon. From any thread; waits for nothing."""
        self._news.append(news)
        if not self._is_handing_out():
            self.flush()

    def flush(self) -> None:
        """Wakes all that is to be woken. From any thread; waits for nothing."""
        if self._news and not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._wake_all)
            except RuntimeError:  # the loop was closed, and its tasks with it
                self._news.clear()

    def _wake_all(self) -> None:
        self._is_scheduled = False  # before the look: what comes behind it schedules the next
        self.num_wakeups += 1
        while self._news:
            self._news.popleft().set()
