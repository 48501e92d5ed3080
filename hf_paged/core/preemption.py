"""`Preemption`: which group makes room for another, and what happens to its blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from hf_paged.core.batch import BlockMoves
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.queues import Queues
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus
from hf_paged.core.step import Step


class Preemption:
    """Groups that give their blocks up, whole: swapped to CPU memory, or dropped to be computed again.

    Attributes:
        num_preemptions: Sequences preempted.
        num_swapped_out: Those of them that were swapped.
    """

    def __init__(self, manager: BlockManager, queues: Queues, prefers_swap: Callable[[SequenceGroup], bool]) -> None:
        """Takes blocks from groups in `queues`.

        Args:
            queues: The groups, and the policy that says who makes room.
            prefers_swap: Whether a group that could be computed again is to be swapped, if there is CPU memory for it.
        """
        self._manager = manager
        self._queues = queues
        self._log = manager.log
        self._prefers_swap = prefers_swap
        self.num_preemptions = 0
        self.num_swapped_out = 0

    def make_room(self, num_blocks: int, protected: Iterable[SequenceGroup]) -> list[tuple[int, int]]:
        """Preempts groups until so many blocks are free, or no group is left; returns swaps to execute."""
        keep = {group.arrival for group in protected}
        swap_outs: list[tuple[int, int]] = []
        while self._manager.pool.num_free < num_blocks:
            victim = self._victim(lambda group: group.arrival not in keep and not group.has_placeholders)
            if victim is None:
                break
            swap_outs += self.preempt(victim)
        return swap_outs

    def swap_in_now(self, group: SequenceGroup) -> BlockMoves:
        """Brings a swapped group back outside of any step, whichever group has to make room for it.

        Returns:
            Swaps to execute.

        Raises:
            OutOfBlocksError: It doesn't fit with everything else preempted.
        """
        seq_ids = [sequence.seq_id for sequence in group.sequences]
        swap_outs = self.make_room(self._manager.swap.need(seq_ids), [group])
        try:
            swap_ins = self._manager.swap.move_in(seq_ids)
        except OutOfBlocksError as error:
            error.group, error.swap_outs = group, swap_outs
            raise
        group.status = SequenceStatus.RUNNING
        self._queues.file(group)
        return BlockMoves(swap_outs=swap_outs, swap_ins=swap_ins)

    def preempt_all(self) -> int:
        """Drops every group's blocks, swapped ones included, if all can be computed again and none is needed now.

        Returns:
            How many sequences can't be dropped; then nothing has changed.
        """
        holders = [group for group in self._queues.groups if group.status is not SequenceStatus.WAITING]
        fixed = sum(
            len(group.sequences)
            for group in holders
            if group.num_pins or self._queues.is_in_flight(group) or not group.is_recomputable or group.has_placeholders
        )
        if not fixed:
            for group in holders:
                self.preempt(group, allow_swap=False)
        return fixed

    def preempt_for(self, group: SequenceGroup, step: Step) -> bool:
        """Preempts one group so that another can run: an idle one, else the last behind it (if forced: any)."""
        victim = self._victim(
            lambda other: other is not group and (step.forced or other.is_idle or other.order > group.order)
        )
        if victim is None:
            return False
        if victim.has_placeholders:  # it can't be computed again before they are known
            step.needs_tokens = True
            return False
        step.moves.swap_outs.extend(self.preempt(victim))
        return True

    def renew(self, state: tuple[Hashable, ...]) -> None:
        """Drops what an earlier state of the model has computed of `Queues.stale`, to be computed again. No step runs.

        Of groups that are needed in the pool, later.
        """
        stale = {id(sequence): sequence for sequence in self._queues.stale}
        groups = {sequence.group.arrival: sequence.group for sequence in stale.values()}
        self._queues.stale = []
        for arrival, group in groups.items():
            own = [sequence for sequence in group.sequences if id(sequence) in stale]
            if not own or self._queues.live.get(arrival) is not group:  # ended since
                continue
            if group.num_pins:
                self._queues.stale += own
                continue
            for sequence in own:
                sequence.is_recomputable = True
            if group.is_recomputable:
                self.preempt(group, allow_swap=False)
                for sequence in own:
                    sequence.renew(state)
            else:  # a sibling has keys that can't be
                for sequence in own:
                    sequence.is_recomputable = False

    def has_room(self, step: Step, num_blocks: int) -> bool:
        """Whether so many blocks are free, or become free by preempting idle groups."""
        while num_blocks > self._manager.pool.num_free:
            victim = None if step.moves.swap_ins else self._victim(lambda group: group.is_idle)
            if victim is None:
                return False
            step.moves.swap_outs.extend(self.preempt(victim))
        return True

    def _victim(self, may_go: Callable[[SequenceGroup], bool]) -> SequenceGroup | None:
        """Which of the groups that can give up their blocks, and `may_go`, does."""
        candidates = [
            group
            for group in self._queues.resident.values()
            if not group.num_pins
            and group.arrival not in self._queues.in_flight
            and may_go(group)
            and (group.is_recomputable or self._can_swap(group))
        ]
        return self._queues.policy.victim(candidates)

    def _can_swap(self, group: SequenceGroup) -> bool:
        return self._manager.swap.has_room([sequence.seq_id for sequence in group.sequences])

    def preempt(self, group: SequenceGroup, allow_swap: bool = True) -> list[tuple[int, int]]:
        """Takes a group's blocks, all of them: to CPU memory, or dropped so that its tokens have to be computed again.

        Returns:
            Block pairs `(device, CPU)` to copy before the device blocks are written.
        """
        self.num_preemptions += len(group.sequences)
        group.is_split = False
        wants_swap = not group.is_recomputable or self._prefers_swap(group)
        if allow_swap and wants_swap and self._can_swap(group):
            self.num_swapped_out += len(group.sequences)
            group.status = SequenceStatus.SWAPPED
            self._log.add_for_group("preempted", group, "swap", len(group.sequences))
            swap_outs = self._manager.swap.move_out([sequence.seq_id for sequence in group.sequences])
            self._queues.file(group)
            return swap_outs
        self._log.add_for_group("preempted", group, "recompute", len(group.sequences))
        for sequence in group.sequences:
            self.drop(sequence)
        group.status = SequenceStatus.WAITING
        self._queues.file(group)
        return []

    def drop(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks; its tokens will be computed again."""
        self._manager.evict(sequence.seq_id)
        sequence.num_computed_tokens = 0
