"""`GroupRows`: a group's next tokens join a step, its rows all together or, where they don't fit, in part."""

from __future__ import annotations

import hashlib
from bisect import bisect_left

from hf_paged.core.batch import BlockMoves
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.preemption import Preemption
from hf_paged.core.queues import Queues
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus
from hf_paged.core.step import Step


class GroupRows:
    """Puts the next tokens of a group into a step."""

    def __init__(self, manager: BlockManager, queues: Queues, preemption: Preemption) -> None:
        """Over the tables of `manager`; `preemption` makes room."""
        self._manager = manager
        self._queues = queues
        self._preemption = preemption
        self._log = manager.log

    def run(self, step: Step, group: SequenceGroup, first: Sequence | None = None) -> bool:
        """Adds the group's next tokens to the step: for all its sequences that have any, or (without room) none.

        `first` was given what the prefix cache has of it already.
        """
        if group.is_split and group.is_recomputable:
            least, wanted = self._manager.least_chunk, [s.num_wanted_tokens for s in group.sequences]
            if not any(0 < min(number, least) <= step.budget for number in wanted):
                return False  # which takes no blocks from others
            while not self.run_part(step, group):
                if step.moves.swap_ins or not self._preemption.preempt_for(group, step):
                    return False
            return True
        manager = self._manager
        sequences = group.sequences
        requests: list[tuple[Sequence, int]] = []
        begun: list[Sequence] = []
        least = manager.least_chunk
        budget, num_seqs = step.budget, step.num_seqs
        is_prefilling = False
        for sequence in sequences:
            if budget == 0 or num_seqs == 0:
                break
            if sequence.num_wanted_tokens == 0 or budget < min(sequence.num_wanted_tokens, least):
                continue
            if sequence.num_computed_tokens == 0:
                if is_prefilling:
                    continue  # it will share what its sibling computes now
                if sequence is not first:
                    self.begin(sequence)
                    begun.append(sequence)
            is_prefilling |= sequence.num_wanted_tokens > 1
            num_tokens = self._chunk(sequence, budget)
            requests.append((sequence, num_tokens))
            budget = max(budget - num_tokens, 0)
            num_seqs -= 1
        if not requests:
            return False
        appends = [(sequence.seq_id, num_tokens) for sequence, num_tokens in requests]
        while manager.append_need(appends) > manager.pool.num_free:
            step.is_short = True
            if step.moves.swap_ins or not self._preemption.preempt_for(group, step):
                for sequence in begun:
                    manager.unmatch(sequence.seq_id)
                    sequence.num_computed_tokens = 0
                return False
        self.append(requests, step.moves)
        for sequence, num_tokens in requests:
            step.chunks.append((sequence, sequence.num_computed_tokens, num_tokens))
            if num_tokens > 1 and sequence.is_recomputable and self._queues.is_any_outside:
                step.hashes.update(
                    manager.prefix.prompt_hashes(
                        sequence.seq_id,
                        sequence.token_ids,
                        sequence.extra_key,
                        sequence.num_computed_tokens,
                        sequence.num_computed_tokens + num_tokens,
                    )
                )
        self._note(step, group, step.budget - budget, len(requests))
        return True

    def run_part(self, step: Step, group: SequenceGroup) -> bool:
        """Runs what fits of a group that does not fit the empty pool as a whole: its first sequences.

        Those that have blocks of their own come before those that have none (any more). One that grows takes the room
        of the last one behind it, so that the first ones reach their end instead of all of them taking turns. One that
        begins takes no other's, unless nothing else runs, and leaves the others a block each to grow into.
        """
        if group.status is SequenceStatus.SWAPPED or not group.is_recomputable:
            return False
        manager = self._manager
        wanted = [sequence for sequence in group.sequences if sequence.num_wanted_tokens]
        wanted.sort(key=lambda sequence: sequence.num_computed_tokens == 0)
        # The last one goes first; before all of them those whose logits are out.
        victims = [s for s in wanted if s.num_computed_tokens]
        victims += [s for s in group.sequences if s.num_computed_tokens and not s.num_wanted_tokens]
        requests: list[tuple[Sequence, int]] = []
        budget, need = step.budget, 0
        for sequence in wanted:
            if len(requests) == step.num_seqs:
                break
            if budget < min(sequence.num_wanted_tokens, manager.least_chunk):
                continue
            is_new = sequence.num_computed_tokens == 0
            if is_new:
                self.begin(sequence)
            num_tokens = self._chunk(sequence, budget)
            own = manager.append_need([(sequence.seq_id, num_tokens)])
            spare = len(requests) if is_new else 0
            while need + own + spare > manager.pool.num_free and not (is_new and requests):
                if not self._drop_behind(step, sequence, victims, is_all=not requests):
                    break
                own = manager.append_need([(sequence.seq_id, num_tokens)])
            # It would share more of what a sibling computes in this step.
            is_early = is_new and any(
                n > 1 and common_prefix(sequence, other) > max(sequence.num_computed_tokens, other.num_computed_tokens)
                for other, n in requests
            )
            if is_early or need + own + spare > manager.pool.num_free:
                if is_new:
                    manager.unmatch(sequence.seq_id)
                    sequence.num_computed_tokens = 0
                break
            requests.append((sequence, num_tokens))
            budget = max(budget - num_tokens, 0)
            need += own
        if len(requests) < len(wanted):
            step.is_short = True
        if not requests:
            return False
        self.append(requests, step.moves)
        step.chunks += [(sequence, sequence.num_computed_tokens, num_tokens) for sequence, num_tokens in requests]
        self._note(step, group, step.budget - budget, len(requests))
        if group.status is SequenceStatus.WAITING:
            self.note_admission(group)
        group.status, group.is_split = SequenceStatus.RUNNING, True
        self._queues.file(group)
        return True

    def append(self, requests: list[tuple[Sequence, int]], moves: BlockMoves) -> None:
        """Gives each sequence slots for so many tokens. If it raises `OutOfBlocksError`, it has changed nothing."""
        manager = self._manager
        held = [len(manager.blocks(sequence.seq_id)) for sequence, _ in requests]
        moves.block_copies.extend(manager.append([(sequence.seq_id, n) for sequence, n in requests]))
        moves.new_blocks.extend(manager.new_source_blocks())
        for (sequence, _), count in zip(requests, held, strict=True):
            moves.new_blocks.extend(manager.held_blocks(sequence.seq_id, count))

    def _drop_behind(self, step: Step, sequence: Sequence, victims: list[Sequence], is_all: bool) -> bool:
        """Drops the last of `victims` with blocks that are not shared, if it comes behind `sequence`.

        Args:
            victims: Its siblings, in order, itself among them; those that were looked at are taken out.
            is_all: Any of them, before it or not, shared or not: nothing would run otherwise.
        """
        if sequence.group.num_pins:
            return False
        pool = self._manager.pool
        for index in range(len(victims) - 1, -1, -1):
            victim = victims[index]
            if victim is sequence:
                if not is_all:
                    return False
                continue
            held = self._manager.all_blocks(victim.seq_id)
            if not is_all and all(pool.ref_count(block) > 1 for block in held):
                continue
            if victim.has_placeholders:
                step.needs_tokens = True
                return False
            del victims[index]
            self._log.add("preempted", victim.seq_id, "recompute", 1)
            self._preemption.drop(victim)
            self._preemption.num_preemptions += 1
            return True
        return False

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How many of a sequence's next tokens run in a step.

        Where a prefix is only found at places that were kept, a prompt's chunks end at such: on block boundaries, the
        last one that another prompt may share among them.
        """
        least, size = self._manager.least_chunk, self._manager.block_size
        num_tokens = sequence.chunk(budget)
        if least == 1 or sequence.spans:
            return num_tokens
        start = sequence.num_computed_tokens
        end = self._whole(sequence, start + num_tokens)
        if start < sequence.num_at_once and end - start < least:
            end = sequence.num_at_once  # a few more than there is room for
        if self._manager.takes_snapshots and sequence.is_recomputable and end - start >= 2 * least:
            kept = min(end, sequence.logits_from, sequence.num_tokens - least) // size * size
            kept = self._whole(sequence, kept) // size * size
            if kept - start >= least:
                end = kept
        return end - start

    def _whole(self, sequence: Sequence, num_tokens: int) -> int:
        """So many tokens of a sequence, or fewer, that leave none or several of those that came together.

        A single one of them would be computed as those that came one by one are.
        """
        least = self._manager.least_chunk
        return sequence.num_at_once - least if 0 < sequence.num_at_once - num_tokens < least else num_tokens

    def _note(self, step: Step, group: SequenceGroup, num_tokens: int, num_seqs: int) -> None:
        num_fresh = self._manager.take_fresh()
        step.writes_sources |= num_fresh > 0
        step.budget = max(step.budget - num_tokens - num_fresh, 0)
        step.num_seqs -= num_seqs
        if not step.has_key:
            step.batch_key, step.has_key = group.batch_key, True
        self._queues.in_flight.add(group.arrival)

    def note_admission(self, group: SequenceGroup) -> None:
        """Logs that a group was admitted."""
        num_tokens = max(sequence.num_tokens for sequence in group.sequences)
        self._log.add_for_group("admitted", group, len(group.sequences), num_tokens)

    def begin(self, sequence: Sequence) -> None:
        """Gives a sequence without computed tokens what a sibling or the prefix cache already holds of it."""
        if sequence.num_computed_tokens:
            return
        self.tell_source(sequence)
        sequence.num_cached_tokens = 0
        if not sequence.is_recomputable:
            return
        manager = self._manager
        limit = min(sequence.logits_from, sequence.num_tokens - manager.least_chunk)
        if limit <= 0:
            return
        best, shared = None, 0
        for sibling in sequence.group.sequences:
            if sibling.num_computed_tokens > shared and sibling.is_recomputable:
                common = self._cut(sequence, min(common_prefix(sequence, sibling), limit, sibling.num_computed_tokens))
                if common > shared and manager.can_share(sibling.seq_id, common):
                    best, shared = sibling, common
        if best is not None:
            manager.share_prefix(sequence.seq_id, best.seq_id, shared)
            sequence.num_computed_tokens = shared
            sequence.num_cached_tokens = min(best.num_cached_tokens, shared)
            return
        known = sequence.seq_id, sequence.token_ids, sequence.extra_key
        found = manager.prefix.match(*known, max_tokens=limit)
        if (start := self._cut(sequence, found)) < found:
            manager.unmatch(sequence.seq_id)
            found = manager.prefix.match(*known, max_tokens=start) if start else 0
        sequence.num_computed_tokens = sequence.num_cached_tokens = found

    def tell_source(self, sequence: Sequence) -> None:
        """Tells the tables what a sequence's encoder has read, as of the state of the model that it is to run in."""
        source = sequence.source
        if source is not None:
            scope = () if self._manager.prefix.is_enabled else (sequence.group.arrival,)
            key = hashlib.sha256(repr((sequence.extra_key, source.digest, *scope)).encode()).digest()
            self._manager.set_source(sequence.seq_id, source.num_tokens, key)

    def _cut(self, sequence: Sequence, num_tokens: int) -> int:
        """So many tokens that a sequence begins with, or fewer, behind which the rest of it can be computed.

        The rest of a run sees all of it, also what a layer's window gives back.
        """
        num_tokens = max(self._whole(sequence, num_tokens), 0)
        has_windows = any(window is not None for window in self._manager.windows)
        return sequence.span_start(num_tokens) if has_windows else num_tokens


def common_prefix(one: Sequence, other: Sequence) -> int:
    """How many tokens two sequences have in common at their beginning."""
    if one.extra_key != other.extra_key:
        return 0
    a, b = one.token_ids, other.token_ids
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    # The first length at which the prefixes differ, by bisection over slices compared in C.
    return bisect_left(range(length), True, key=lambda n: a[: n + 1] != b[: n + 1])
