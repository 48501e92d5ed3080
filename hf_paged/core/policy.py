"""`Policy`: the four decisions that a scheduler leaves open, and `FCFS`, which makes them by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hf_paged.core.sequence import SequenceGroup

WATERMARK = 0.01  # share of the pool that stays free when a group is admitted, so that what runs can grow


class Policy(Protocol):
    """Order, admission, choice of blocks, victim."""

    def order(self, group: SequenceGroup) -> tuple[int, ...]:
        """Sort key of a group in all queues; it must not change while the group is in one."""

    def spare(self, group: SequenceGroup, is_alone: bool, is_forced: bool) -> int | None:
        """Whether a group may be let in now.

        Args:
            group: The first in line; without blocks, or swapped.
            is_alone: The pool holds no other group.
            is_forced: Nothing will run otherwise.

        Returns:
            Blocks to be left free beside those that it takes for its tokens so far; `None`: not now, which is no
            answer for one that is alone.
        """

    def blocks(self, requests: Sequence[tuple[int, int]]) -> list[int] | None:
        """Which free blocks sequences get that grow.

        Args:
            requests: Sequences, and by how many tokens.

        Returns:
            The blocks in the order of the requests, each sequence's by position, group of layers by group of layers;
            `None`: as the pool has them.
        """

    def victim(self, groups: Sequence[SequenceGroup]) -> SequenceGroup | None:
        """Which of these groups makes room; `None` if there are none."""


class FCFS:
    """First come, first served within a priority, and let in when its tokens so far fit; the newest makes room.

    Optimistic: nothing is reserved for tokens not yet generated but a share of the pool for all of what runs.
    """

    def __init__(self, num_blocks: int) -> None:
        """For a pool of so many blocks."""
        self._watermark = max(1, int(num_blocks * WATERMARK))

    def order(self, group: SequenceGroup) -> tuple[int, ...]:
        return group.order

    def spare(self, group: SequenceGroup, is_alone: bool, is_forced: bool) -> int | None:
        return 0 if is_alone or is_forced else self._watermark

    def blocks(self, requests: Sequence[tuple[int, int]]) -> list[int] | None:
        return None

    def victim(self, groups: Sequence[SequenceGroup]) -> SequenceGroup | None:
        """Idle ones first, the newest first of each."""
        return max(groups, key=lambda group: (group.is_idle, self.order(group)), default=None)
