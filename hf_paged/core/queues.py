"""`Queues`: the groups of sequences, and which of them wait where."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.policy import FCFS, Policy
from hf_paged.core.sequence import SequenceGroup, SequenceStatus

Heap = list[tuple[tuple[int, ...], int]]
"""The policy's order of groups, and their arrival. What is no longer in the matching dictionary is skipped."""


class Queues:
    """Groups by what they wait for. A step costs time for those that run in it, not for those that wait.

    Args:
        manager: The block tables.
        policy: In which order; `FCFS` by default.
    """

    def __init__(self, manager: BlockManager, policy: Policy | None = None) -> None:
        self._manager = manager
        self._log = manager.log
        self._policy: Policy = policy if policy is not None else FCFS(manager.pool.num_blocks)
        self._num_arrivals = 0
        self._groups: dict[int, SequenceGroup] = {}  # all live ones
        self._resident: dict[int, SequenceGroup] = {}  # those with blocks in the pool
        self._ready: dict[int, SequenceGroup] = {}  # resident, with uncomputed tokens when last looked at
        self._ready_is_sorted = True
        self._waiting: dict[int, SequenceGroup] = {}
        self._waiting_heap: Heap = []
        self._swapped: dict[int, SequenceGroup] = {}
        self._swapped_heap: Heap = []
        self._in_flight: set[int] = set()

    @property
    def groups(self) -> Iterable[SequenceGroup]:
        """All live groups, in order of creation."""
        return self._groups.values()

    @property
    def num_waiting(self) -> int:
        """Groups with work that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with keys and values in the pool."""
        return sum(len(group.sequences) for group in self._resident.values())

    @property
    def num_swapped(self) -> int:
        """Sequences with keys and values in CPU memory."""
        return (
            sum(len(group.sequences) for group in self._groups.values() if group.status is SequenceStatus.SWAPPED)
            if self._manager.swap.num_in_use
            else 0
        )

    @property
    def num_to_swap_in(self) -> int:
        """Those of them that are waited for. Costs nothing for groups that wait elsewhere."""
        return sum(len(group.sequences) for group in self._swapped.values())

    @property
    def has_work(self) -> bool:
        """Whether any group has uncomputed tokens and isn't in a running step."""
        if self._head(self._waiting, self._waiting_heap) or self._head(self._swapped, self._swapped_heap):
            return True
        return any(arrival not in self._in_flight and group.has_work for arrival, group in self._ready.items())

    def is_in_flight(self, group: SequenceGroup) -> bool:
        """Whether a step with this group is running."""
        return group.arrival in self._in_flight

    def wake(self, group: SequenceGroup) -> None:
        """Queues a group whose sequences have got uncomputed tokens."""
        if group.status is SequenceStatus.RUNNING:
            if group.arrival not in self._ready:
                if self._ready_is_sorted and self._ready:
                    last = next(reversed(self._ready.values()))
                    self._ready_is_sorted = self._policy.order(last) < self._policy.order(group)
                self._ready[group.arrival] = group
        else:
            self._file(group)

    def renew(self, group: SequenceGroup) -> None:
        """Makes an old group the newest: another call begins over a cache that was kept."""
        for groups in (self._groups, self._resident, self._ready, self._waiting, self._swapped):
            groups.pop(group.arrival, None)
        self._num_arrivals += 1
        group.arrival = self._num_arrivals
        self._groups[group.arrival] = group
        self._file(group)

    def _file(self, group: SequenceGroup) -> None:
        """Puts a group into the queues it belongs to."""
        arrival = group.arrival
        if arrival not in self._in_flight and not any(s.num_computed_tokens for s in group.sequences):
            group.status = SequenceStatus.WAITING
        status, has_work = group.status, group.has_work
        if not group.sequences:
            status, has_work = SequenceStatus.WAITING, False
        if status is SequenceStatus.RUNNING:
            self._resident[arrival] = group
            if has_work:
                self.wake(group)
        else:
            self._resident.pop(arrival, None)
            self._ready.pop(arrival, None)
        for queue, heap, own in (
            (self._waiting, self._waiting_heap, SequenceStatus.WAITING),
            (self._swapped, self._swapped_heap, SequenceStatus.SWAPPED),
        ):
            if status is own and has_work:
                if arrival not in queue:
                    queue[arrival] = group
                    heapq.heappush(heap, (self._policy.order(group), arrival))
            else:
                queue.pop(arrival, None)

    def _head(self, queue: dict[int, SequenceGroup], heap: Heap) -> SequenceGroup | None:
        while heap:
            group = queue.get(heap[0][1])
            if group is not None and self._policy.order(group) == heap[0][0]:
                if group.has_work:
                    return group
                del queue[group.arrival]  # the caller that waited for it has given up
            heapq.heappop(heap)
        return None
