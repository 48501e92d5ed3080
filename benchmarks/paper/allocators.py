"""Allocators of contiguous runs of blocks, for the policies that reserve: a buddy system, and first fit."""

from __future__ import annotations

from bisect import insort
from typing import Protocol


class Allocator(Protocol):
    """Runs of blocks out of one pool."""

    def allocate(self, size: int) -> range | None:
        """A run of at least `size` blocks; `None`: there is no such hole."""

    def free(self, run: range) -> None:
        """Gives a run back, as it was handed out."""

    def holes(self) -> list[range]:
        """What is free, in order; for tests and figures."""


class Buddy:
    """Runs of powers of two, aligned to their size; a run that is free merges with its free buddy.

    A pool that is no power of two begins as the pieces of its binary number, the largest first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: list[list[int]] = [[] for _ in range(num_blocks.bit_length())]  # starts, by order, sorted
        start = 0
        for order in reversed(range(len(self._free))):
            if num_blocks >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def allocate(self, size: int) -> range | None:
        order = (size - 1).bit_length()
        found = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if found is None:
            return None
        start = self._free[found].pop(0)
        for o in range(found - 1, order - 1, -1):  # the upper half of each split stays free
            insort(self._free[o], start + (1 << o))
        return range(start, start + (1 << order))

    def free(self, run: range) -> None:
        start, order = run.start, len(run).bit_length() - 1
        while order + 1 < len(self._free):
            buddy = start ^ 1 << order
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            start &= ~(1 << order)
            order += 1
        insort(self._free[order], start)

    def holes(self) -> list[range]:
        return sorted(
            (range(start, start + (1 << order)) for order, starts in enumerate(self._free) for start in starts),
            key=lambda run: run.start,
        )


class FirstFit:
    """Runs of just the size that is asked for, from the lowest hole that has it."""

    def __init__(self, num_blocks: int) -> None:
        self._holes = [(0, num_blocks)]  # start and end, in order, never two that touch

    def allocate(self, size: int) -> range | None:
        for index, (start, end) in enumerate(self._holes):
            if end - start >= size:
                if end - start == size:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + size, end)
                return range(start, start + size)
        return None

    def free(self, run: range) -> None:
        insort(self._holes, (run.start, run.stop))
        merged: list[tuple[int, int]] = []
        for start, end in self._holes:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._holes = merged

    def holes(self) -> list[range]:
        return [range(start, end) for start, end in self._holes]
