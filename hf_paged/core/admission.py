"""`Admission`: which groups without blocks in the pool may begin, and what runs when nothing else can."""

from __future__ import annotations

from operator import attrgetter

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.group_rows import GroupRows, common_prefix
from hf_paged.core.preemption import Preemption
from hf_paged.core.queues import Queues
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus
from hf_paged.core.step import Step

RETRY_STEPS = 16  # a waiting group that did not fit is tried again after so many steps, or when more blocks are free


class Admission:
    """Swapped groups come back before waiting ones begin, the first in line of each first.

    Attributes:
        offered: Hashes of blocks that are computed and not checked yet.
        num_stalls: Steps in which the first waiting group did not fit.
    """

    def __init__(
        self,
        manager: BlockManager,
        queues: Queues,
        preemption: Preemption,
        rows: GroupRows,
        max_num_batched_tokens: int,
    ) -> None:
        """Admits groups of `queues`."""
        self._manager = manager
        self._queues = queues
        self._preemption = preemption
        self._rows = rows
        self._max_num_batched_tokens = max_num_batched_tokens
        self._refused: tuple[int, int] | None = None  # the first waiting group, and the blocks free when it didn't fit
        self._num_refusals = 0
        self.offered: set[bytes] = set()
        self.num_stalls = 0

    def run(self, step: Step) -> None:
        """Fills a step with groups that have no blocks in the pool."""
        waiting, swapped = self._queues.waiting, self._queues.swapped
        if (waiting.groups or swapped.groups) and not step.is_short and not step.is_full:
            if swapped.groups:
                self._swap_in(step)
            if not swapped.groups or not swapped.head:
                self._admit(step)

    def _swap_in(self, step: Step) -> None:
        while not step.is_full and (group := self._queues.swapped.head):
            if not step.admits(group):
                return
            if not self._let_in(step, group):
                return

    def _let_in(self, step: Step, group: SequenceGroup) -> bool:
        """Runs a group that has no blocks in the pool, if the policy lets it and it fits."""
        spare = self._spare(step, group)
        if spare is None:
            return False
        if group.status is SequenceStatus.SWAPPED:
            return self._bring_back(step, group, spare)
        return self._start(step, group, spare)

    def _spare(self, step: Step, group: SequenceGroup) -> int | None:
        return self._queues.policy.spare(group, self._manager.pool.num_blocks, not self._queues.resident, step.forced)

    def _bring_back(self, step: Step, group: SequenceGroup, spare: int) -> bool:
        """Swaps a group in and runs it, if it fits with what it is about to add."""
        seq_ids = [sequence.seq_id for sequence in group.sequences]
        if any(self._manager.pool.ref_count(source) == 0 for source, _ in step.moves.block_copies):
            return False  # it might be given a block that is yet to be copied, which happens behind the swaps
        # No less than it may take: no group can be swapped out any more in the step that swaps it in.
        need = self._manager.swap.need(seq_ids) + self._growth(step, group)
        if not self._preemption.has_room(step, need + spare):
            return False
        step.moves.swap_ins.extend(self._manager.swap.move_in(seq_ids))
        group.status = SequenceStatus.RUNNING
        self._queues.file(group)
        return self._rows.run(step, group)

    def _growth(self, step: Step, group: SequenceGroup) -> int:
        """Blocks that the next tokens of a group take at most."""
        return self._manager.append_need(
            [
                (s.seq_id, s.chunk(step.budget) if s.num_computed_tokens else s.num_wanted_tokens)
                for s in group.sequences
                if s.num_wanted_tokens
            ]
        )

    def _admit(self, step: Step) -> None:
        while not step.is_full and (group := self._queues.waiting.head):
            if not step.admits(group):
                return
            if not self._may_write_source(step, group):
                return
            if self._was_refused(group):
                self.num_stalls += 1
                return
            spare = self._spare(step, group)
            if spare is None:  # asked again in the next step, since that costs no prefix match
                self.num_stalls += 1
                return
            if not self._start(step, group, spare):
                if not step.hashes and not self.offered:
                    self.num_stalls += 1
                    self._refused = (group.arrival, self._manager.pool.num_free)
                    self._num_refusals = 0
                return

    def _was_refused(self, group: SequenceGroup) -> bool:
        """Whether it was refused lately when as much was free: asking again costs a prefix match of its whole prompt.

        Asked again now and then all the same: blocks may be cached or groups idle by now.
        """
        self._num_refusals += 1
        if self._refused is None or self._num_refusals % RETRY_STEPS == 0:
            return False
        return self._refused[0] == group.arrival and self._manager.pool.num_free <= self._refused[1]

    def _may_write_source(self, step: Step, group: SequenceGroup) -> bool:
        """Whether the step has tokens left for what the group's encoder has read; for a first source it always has."""
        sequence = group.sequences[0]
        if sequence.source is None or not step.writes_sources:
            return True
        self._rows.tell_source(sequence)
        num_fresh = self._manager.fresh_tokens([sequence.seq_id])
        return not num_fresh or num_fresh + sequence.num_wanted_tokens <= step.budget

    def _start(self, step: Step, group: SequenceGroup, spare: int) -> bool:
        """Lets a waiting group in and runs its first tokens, if all its tokens so far fit."""
        first = next(sequence for sequence in group.sequences if sequence.num_wanted_tokens)
        self._rows.begin(first)
        if not step.forced and self._is_being_computed(step, first):
            self._forget_progress(group)
            return False
        if not self._preemption.has_room(step, self._start_need(group, first) + spare):
            self._forget_progress(group)
            return False
        group.status = SequenceStatus.RUNNING
        self._queues.resident[group.arrival] = group
        self._queues.wake(group)
        if self._rows.run(step, group, first):
            self._queues.waiting.groups.pop(group.arrival, None)
            self._rows.note_admission(group)
            return True
        self._forget_progress(group)
        return False

    def _start_need(self, group: SequenceGroup, first: Sequence) -> int:
        """Blocks that a waiting group takes: what `first` needs, and of the others what they don't share with it."""
        manager, chunk = self._manager, self._max_num_batched_tokens
        return manager.blocks_needed(first.seq_id, first.num_wanted_tokens, chunk) + sum(
            manager.most_blocks(s.num_tokens, chunk, min(common_prefix(s, first), s.logits_from, s.num_tokens - 1))
            for s in group.sequences
            if s is not first and s.num_wanted_tokens
        )

    def _forget_progress(self, group: SequenceGroup) -> None:
        """Takes back an admission: prefix hits are released."""
        for sequence in group.sequences:
            self._manager.unmatch(sequence.seq_id)
            sequence.num_computed_tokens = sequence.num_cached_tokens = 0
        group.status = SequenceStatus.WAITING
        self._queues.file(group)

    def _is_being_computed(self, step: Step, sequence: Sequence) -> bool:
        """Whether this step, or one in flight, computes the block that the sequence would begin with."""
        start = sequence.num_computed_tokens
        end = start + self._manager.block_size
        computed = step.hashes | self.offered if self.offered else step.hashes
        if not computed or not sequence.is_recomputable or end > min(sequence.logits_from, sequence.num_tokens - 1):
            return False
        hashes = self._manager.prefix.prompt_hashes(sequence.seq_id, sequence.token_ids, sequence.extra_key, start, end)
        return any(block_hash in computed for block_hash in hashes)

    def force(self, step: Step) -> None:
        """Runs the first group in line; any other group may have to make room for it."""
        queues = self._queues
        candidates = [
            group
            for group in (
                *(g for g in queues.ready.values() if g.arrival not in queues.in_flight and g.has_work),
                queues.swapped.head,
                queues.waiting.head,
            )
            if group is not None and step.admits(group)
        ]
        if step.only is not None:
            outside = *queues.waiting.groups.values(), *queues.swapped.groups.values()
            candidates += [group for group in outside if group.owner is step.only and group.has_work]
        if not candidates:
            return
        first = min(candidates, key=attrgetter("order"))
        try:
            self._force_group(step, first)
        except OutOfBlocksError:
            # What stands in its way may be others that can't be preempted: then those go on, at its expense.
            fixed = [g for g in candidates if g is not first and g.arrival in queues.ready and not g.is_recomputable]
            if not fixed:
                raise
            self._force_group(step, min(fixed, key=attrgetter("order")))

    def _force_group(self, step: Step, first: SequenceGroup) -> None:
        while True:
            is_resident = first.status is SequenceStatus.RUNNING
            if self._rows.run(step, first) if is_resident else self._let_in(step, first):
                return
            step.is_short = True
            if not self._preemption.preempt_for(first, step):
                if first.status is SequenceStatus.SWAPPED and first.is_recomputable:
                    # It does not fit as a whole: rather a part of it than nothing.
                    self._preemption.preempt(first, allow_swap=False)
                    continue
                if self._rows.run_part(step, first):
                    return
                if first.status is SequenceStatus.WAITING:
                    needed = self._start_need(first, next(s for s in first.sequences if s.num_wanted_tokens))
                else:
                    needed = self._growth(step, first)
                    if first.status is SequenceStatus.SWAPPED:
                        needed += self._manager.swap.need([s.seq_id for s in first.sequences])
                error = OutOfBlocksError(needed, self._manager.pool.num_free)
                error.group = first
                error.swap_outs = step.moves.swap_outs
                raise error
