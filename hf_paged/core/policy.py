"""`Policy`: the four decisions that a scheduler leaves open; `FCFS`, which makes them by default; `ShortestFirst`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from hf_paged.core.sequence import SequenceGroup

WATERMARK = 0.01  # share of the pool that stays free when a group is admitted, so that what runs can grow
TOKENS_PER_PLACE = 256  # by so many tokens a group must be shorter to overtake the one that came just before it


@runtime_checkable
class Policy(Protocol):
    """Order, admission, choice of blocks, victim.

    The scheduler asks with its lock held: a method must be quick, and must not call the engine. What `order` raises
    reaches the caller; what the other three raise, in a step, fails all requests.
    """

    def order(self, group: SequenceGroup) -> tuple[int, ...]:
        """Sort key of a new group in all queues, by its `priority`, `arrival` (a number) and `max_tokens`.

        Asked once for each group, and again when a call goes on with a `PagedCache` that was kept. All keys have one
        length, and no two are equal.
        """

    def spare(self, group: SequenceGroup, num_blocks: int, is_alone: bool, is_forced: bool) -> int | None:
        """Whether a group may be let in now.

        Args:
            group: The first in line; without blocks, or swapped.
            num_blocks: The size of the pool.
            is_alone: The pool holds no other group.
            is_forced: Nothing will run otherwise.

        Returns:
            Blocks to be left free beside those that it takes for its tokens so far, or `None` for "not now", which is
            no answer for a group that is alone.
        """

    def blocks(self, requests: Sequence[tuple[int, int]]) -> list[int] | None:
        """Which free blocks growing sequences get.

        Args:
            requests: Sequences, and by how many tokens.

        Returns:
            The blocks in the order of the requests, each sequence's by position, group of layers by group of layers, or
            `None` to take them as the pool has them.
        """

    def victim(self, groups: Sequence[SequenceGroup]) -> SequenceGroup | None:
        """Which of these groups makes room; `None` if there are none."""


class FCFS:
    """First come, first served within a priority, and let in when its tokens so far fit; the newest makes room.

    Optimistic: nothing is reserved for tokens not yet generated but a share of the pool for all of what runs.
    """

    def order(self, group: SequenceGroup) -> tuple[int, ...]:
        return group.priority, group.arrival

    def spare(self, group: SequenceGroup, num_blocks: int, is_alone: bool, is_forced: bool) -> int | None:
        return 0 if is_alone or is_forced else max(1, int(num_blocks * WATERMARK))

    def blocks(self, requests: Sequence[tuple[int, int]]) -> list[int] | None:
        return None

    def victim(self, groups: Sequence[SequenceGroup]) -> SequenceGroup | None:
        """Idle ones first, the newest first of each."""
        return max(groups, key=lambda group: (group.is_idle, group.order), default=None)


class ShortestFirst(FCFS):
    """Within a priority short requests overtake long ones, by a bounded distance; the last in this order makes room.

    The key of a group is its place in the order of arrival plus its length in units of `TOKENS_PER_PLACE`. So a request
    waits for at most as many later ones as its length has units, and nothing has to grow old to be served.
    """

    def order(self, group: SequenceGroup) -> tuple[int, ...]:
        return group.priority, group.arrival * TOKENS_PER_PLACE + group.max_tokens, group.arrival


POLICIES: Mapping[str, type[FCFS]] = {"fcfs": FCFS, "shortest-first": ShortestFirst}


def policy_of(setting: object) -> Policy:
    """The policy that the setting `policy` names, or is.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(setting, str) and setting in POLICIES:
        return POLICIES[setting]()
    if isinstance(setting, type) or not isinstance(setting, Policy):
        raise ValueError(
            f"policy must be one of {', '.join(POLICIES)}, or an object with the methods of hf_paged.Policy (order, "
            f"spare, blocks, victim), got {setting!r:.80}"
        )
    return setting
