"""`Queues`: the groups of sequences, by what they wait for."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Hashable, Iterable
from typing import Any

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.policy import FCFS, Policy
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus

logger = logging.getLogger(__name__)


class Line:
    """Groups that wait for one thing, in the policy's order.

    Attributes:
        groups: They, by arrival.
    """

    def __init__(self) -> None:
        self.groups: dict[int, SequenceGroup] = {}
        self._heap: list[tuple[tuple[int, ...], int]] = []  # orders and arrivals; what isn't in `groups` is skipped

    def file(self, group: SequenceGroup, belongs: bool) -> None:
        """Puts a group in, or takes it out."""
        if not belongs:
            self.groups.pop(group.arrival, None)
        elif group.arrival not in self.groups:
            self.groups[group.arrival] = group
            heapq.heappush(self._heap, (group.order, group.arrival))

    @property
    def head(self) -> SequenceGroup | None:
        """The first one that has work."""
        while self._heap:
            order, arrival = self._heap[0]
            group = self.groups.get(arrival)
            if group is not None and group.order == order:
                if group.has_work:
                    return group
                del self.groups[arrival]  # the caller that waited for it has given up
            heapq.heappop(self._heap)
        return None


class Queues:
    """Groups by what they wait for. A step costs time for those that run in it, not for those that wait.

    Attributes:
        policy: In which order.
        live: All, by arrival.
        resident: Those with blocks in the pool.
        ready: Resident, with uncomputed tokens when last looked at.
        waiting: With work, and without blocks.
        swapped: With work, and swapped out.
        in_flight: Arrivals of those in a running step.
        on_change: See `PagedConfig.on_weight_change`.
        stale: Sequences whose keys and values an earlier state of the model has computed, if they are to be computed
            again.
    """

    def __init__(self, manager: BlockManager, policy: Policy | None = None) -> None:
        """Queues sequences of the tables of `manager`; `policy`: `FCFS` by default."""
        self._manager = manager
        self.policy: Policy = policy if policy is not None else FCFS()
        self._num_arrivals = 0
        self.live: dict[int, SequenceGroup] = {}
        self.resident: dict[int, SequenceGroup] = {}
        self.ready: dict[int, SequenceGroup] = {}
        self._ready_is_sorted = True
        self.waiting = Line()
        self.swapped = Line()
        self.in_flight: set[int] = set()
        self.on_change = "continue"
        self.stale: list[Sequence] = []

    @property
    def groups(self) -> Iterable[SequenceGroup]:
        """All live groups, in order of creation."""
        return self.live.values()

    @property
    def num_running(self) -> int:
        """Sequences with keys and values in the pool that a call generates with: not those of a cache at rest."""
        return sum(len(group.sequences) for group in self.resident.values() if not group.is_idle)

    @property
    def num_swapped(self) -> int:
        """Sequences with keys and values in CPU memory."""
        return (
            sum(len(group.sequences) for group in self.live.values() if group.status is SequenceStatus.SWAPPED)
            if self._manager.swap.num_in_use
            else 0
        )

    @property
    def num_waiting(self) -> int:
        """Groups with work that hold no blocks."""
        return len(self.waiting.groups)

    @property
    def num_to_swap_in(self) -> int:
        """Sequences in CPU memory that are waited for. Costs nothing for groups that wait elsewhere."""
        return sum([len(group.sequences) for group in self.swapped.groups.values()])

    @property
    def has_work(self) -> bool:
        """Whether any group has uncomputed tokens and isn't in a running step."""
        if self.waiting.head or self.swapped.head:
            return True
        return any(arrival not in self.in_flight and group.has_work for arrival, group in self.ready.items())

    @property
    def is_any_outside(self) -> bool:
        """Whether a group with work has no blocks in the pool."""
        return bool(self.waiting.groups or self.swapped.groups)

    def is_in_flight(self, group: SequenceGroup) -> bool:
        """Whether a step with this group is running."""
        return group.arrival in self.in_flight

    def enter(self, group: SequenceGroup) -> SequenceGroup:
        """Makes a group the newest.

        Raises:
            ValueError: The policy's key is no tuple of integers.
            Exception: What the policy raises.
        """
        self._num_arrivals += 1
        group.arrival = self._num_arrivals
        order: Any = self.policy.order(group)
        if not (isinstance(order, tuple) and all(isinstance(each, int) for each in order)):
            raise ValueError(f"order() of a policy must return a tuple of integers, got {order!r:.80}")
        group.order = order
        return group

    def in_order(self) -> Iterable[tuple[int, SequenceGroup]]:
        """Those that are ready, in the policy's order; some may leave meanwhile."""
        if not self._ready_is_sorted:
            self.ready = dict(sorted(self.ready.items(), key=lambda item: item[1].order))
            self._ready_is_sorted = True
        return list(self.ready.items())

    def wake(self, group: SequenceGroup) -> None:
        """Queues a group whose sequences have got uncomputed tokens."""
        if group.status is SequenceStatus.RUNNING:
            if group.arrival not in self.ready:
                if self._ready_is_sorted and self.ready:
                    last = next(reversed(self.ready.values()))
                    self._ready_is_sorted = last.order < group.order
                self.ready[group.arrival] = group
        else:
            self.file(group)

    def renew(self, group: SequenceGroup) -> None:
        """Makes an old group the newest: another call begins over a cache that was kept."""
        before = group.arrival, group.order
        try:
            self.enter(group)
        except Exception:
            group.arrival, group.order = before
            logger.exception("hf_paged: the policy failed, and rows of a PagedCache keep their place in the queues")
            return
        for groups in (self.live, self.resident, self.ready, self.waiting.groups, self.swapped.groups):
            groups.pop(before[0], None)
        self.live[group.arrival] = group
        self.file(group)

    def note_state(self, state: tuple[Hashable, ...] | None) -> int:
        """The model is in another state from here on. What was computed in an earlier one stays, and is not shared.

        Nor is it computed again: it would come out otherwise. What is still to be computed, all of it, is of the new
        state; rows that a `PagedCache` holds and no call is generating with stay of the old one.

        Args:
            state: What keys of sequences begin with; `None`: as before, but nothing comes out as it did.

        Returns:
            How many sequences begin again in the new state that had generated tokens in an old one.
        """
        num_renewed = 0
        for group in self.live.values():
            for sequence in group.sequences:
                if state is not None and sequence.is_of(state):
                    continue
                if not sequence.num_tokens or not sequence.is_recomputable:
                    continue
                if sequence.num_computed_tokens or group.arrival in self.in_flight:
                    sequence.is_recomputable = False
                    if self.on_change == "recompute" and not group.is_idle:
                        self.stale.append(sequence)
                elif state is not None and sequence.extra_key and not group.is_idle:
                    has_generated = sequence.num_prompt_tokens < sequence.num_tokens - sequence.num_drafts
                    if self.on_change != "error" or not has_generated:
                        sequence.renew(state)
                    num_renewed += has_generated and self.on_change == "continue"
        return num_renewed

    def file(self, group: SequenceGroup) -> None:
        """Puts a group into the queues it belongs to."""
        arrival = group.arrival
        if arrival not in self.in_flight and not any(s.num_computed_tokens for s in group.sequences):
            group.status = SequenceStatus.WAITING
        status, has_work = group.status, group.has_work
        if not group.sequences:
            status, has_work = SequenceStatus.WAITING, False
        if status is SequenceStatus.RUNNING:
            self.resident[arrival] = group
            if has_work:
                self.wake(group)
        else:
            self.resident.pop(arrival, None)
            self.ready.pop(arrival, None)
        self.waiting.file(group, has_work and status is SequenceStatus.WAITING)
        self.swapped.file(group, has_work and status is SequenceStatus.SWAPPED)
