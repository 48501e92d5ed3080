"""Which tokens run in the next step, within the token budget and the pool, and which groups make room for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from hf_paged.core.admission import Admission
from hf_paged.core.batch import Batch, BlockMoves, Chunk, lay_out
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.block_table import Offer
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.group_rows import GroupRows
from hf_paged.core.policy import Policy
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus
from hf_paged.core.sequences import Sequences
from hf_paged.core.step import Step


class Scheduler(Sequences):
    """A token budget a step for decode and chunked prefill together; the policy's order, first come, first served.

    Running groups come first (decodes before prefill chunks), then swapped ones, then waiting ones. Admission is
    optimistic: a group is let in when its tokens so far fit, nothing is reserved for tokens not yet generated. When
    blocks run out no group is admitted any more; then idle groups and after them the newest group are preempted, whole:
    swapped to CPU memory or dropped to be computed again. A group that finds no newer one to preempt waits.

    A step costs time for the groups that run in it, not for those that wait.

    Args:
        manager: The block tables; the scheduler is their only writer between `schedule` and `update`.
        max_num_batched_tokens: Tokens a step.
        max_num_seqs: Sequences a step.
        prefers_swap: Whether a group that could be computed again is to be swapped, if there is CPU memory for it.
        policy: Order, admission, choice of blocks, victim; `FCFS` by default.

    Attributes:
        admission: Who is let in.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        prefers_swap: Callable[[SequenceGroup], bool] = lambda group: False,
        policy: Policy | None = None,
    ) -> None:
        super().__init__(manager, prefers_swap, policy)
        max_num_batched_tokens = max(max_num_batched_tokens, manager.least_chunk)  # or prompts would never begin
        self._rows = GroupRows(manager, self.queues, self.preemption)
        self.admission = Admission(manager, self.queues, self.preemption, self._rows, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._steps: dict[int, list[Chunk]] = {}  # that are in flight, by number
        self._num_steps = 0
        self._next_key: tuple[Hashable] | None = None

    # A step

    def schedule(
        self,
        *,
        forced: bool = False,
        only: object = None,
        max_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
        holds: bool = False,
    ) -> Batch:
        """Chooses the next step and allocates its blocks. Its sequences are in flight until `update` or `undo`.

        Args:
            forced: Nothing is running or will come back by itself: the first group in line may preempt any other.
            only: Groups of this owner only.
            max_tokens: A smaller token budget than usual.
            max_prompt_tokens: Of these, how many may be of prompts; `least_chunk` at least.
            holds: Lets no group in beside those that run.

        Returns:
            The step; without rows if there is nothing to do, or nothing that fits and `forced` is off.

        Raises:
            OutOfBlocksError: `forced`, and the first group in line does not fit with everything else preempted; its
                `group` says which. Nothing is in flight, but its `swap_outs` are to be executed.
        """
        budget = min(self._max_num_batched_tokens, max_tokens or self._max_num_batched_tokens)
        of_prompts = None if max_prompt_tokens is None else max(max_prompt_tokens, self._manager.least_chunk)
        step = Step(budget, self._max_num_seqs, only, forced, holds, of_prompts)
        num_preemptions, num_stalls = self.preemption.num_preemptions, self.admission.num_stalls
        if self._next_key is not None and not forced:
            step.batch_key, step.has_key = self._next_key[0], True
        if forced:
            self.admission.force(step)
            step.forced = False  # a group that finds room may not take it from an older one
        self._run_queues(step)
        if not step.chunks and step.has_key:
            step.has_key = False
            self._run_queues(step)
        self._next_key = step.skipped_key
        num_preempted = self.preemption.num_preemptions - num_preemptions
        is_stalled = self.admission.num_stalls > num_stalls
        if not step.chunks:
            return Batch(swap_outs=step.moves.swap_outs, num_preempted=num_preempted, is_stalled=is_stalled)
        return self._lay_out(step.chunks, step.moves, step.batch_key, num_preempted, is_stalled)

    def schedule_together(self, sequences: list[Sequence]) -> Batch:
        """A step of all uncomputed tokens of these sequences and of nothing else, whichever group has to make room.

        However many tokens they are. What lies behind windows of theirs is given back.

        Args:
            sequences: Each with uncomputed tokens; none in a running step, nor swapped.

        Raises:
            OutOfBlocksError: They don't fit with everything else preempted. Nothing is in flight, but its `swap_outs`
                are to be executed.
        """
        num_preemptions, groups = self.preemption.num_preemptions, [sequence.group for sequence in sequences]
        for sequence in sequences:
            self.slide(sequence)
        requests = [(sequence, sequence.num_uncomputed_tokens) for sequence in sequences]
        need = self._manager.append_need([(sequence.seq_id, num_tokens) for sequence, num_tokens in requests])
        moves = BlockMoves(swap_outs=self.preemption.make_room(need, groups))
        try:
            self._rows.append(requests, moves)
        except OutOfBlocksError as error:
            error.swap_outs = moves.swap_outs
            raise
        for group in groups:
            self.queues.in_flight.add(group.arrival)
            group.status = SequenceStatus.RUNNING
            self.queues.file(group)
        chunks = [(sequence, sequence.num_computed_tokens, num_tokens) for sequence, num_tokens in requests]
        num_preempted = self.preemption.num_preemptions - num_preemptions
        return self._lay_out(chunks, moves, groups[0].batch_key, num_preempted, False)

    def _lay_out(
        self, chunks: list[Chunk], moves: BlockMoves, batch_key: Hashable, num_preempted: int, is_stalled: bool
    ) -> Batch:
        self._num_steps += 1
        self._steps[self._num_steps] = chunks
        seq_ids = [sequence.seq_id for sequence, _, _ in chunks]
        sources = self._manager.sources(seq_ids)
        batch = lay_out(
            chunks,
            self._manager.tables(seq_ids),
            moves,
            states=self._manager.states(seq_ids),
            number=self._num_steps,
            batch_key=batch_key,
            num_preempted=num_preempted,
            is_stalled=is_stalled,
        )
        return batch if sources is None else replace(batch, sources=sources)

    def _run_queues(self, step: Step) -> None:
        self._run_resident(step)
        if not (step.holds and step.chunks):
            self.admission.run(step)

    def _run_resident(self, step: Step) -> None:
        """Fills a step from groups in the pool, in the policy's order: decodes first, then chunks of prompts."""
        prefills: list[SequenceGroup] = []
        parked: list[int] = []
        queues = self.queues
        in_flight, append_token, is_open = queues.in_flight, self._manager.append_token, step.is_open
        for arrival, group in queues.in_order():
            if arrival in in_flight or arrival not in queues.ready:  # not there: preempted for an older one
                continue
            sequences = group.sequences
            if len(sequences) == 1:
                sequence = sequences[0]
                computed = sequence.num_computed_tokens
                longest = sequence.num_tokens - computed if sequence.is_wanted else 0
                if (
                    longest == 1
                    and is_open
                    and step.budget > 0 < step.num_seqs
                    and (group.batch_key == step.batch_key or not step.has_key)
                    and not group.is_split
                    and (new_blocks := append_token(sequence.seq_id)) is not None
                ):
                    # The usual decode, by the shortest way.
                    if new_blocks:
                        step.moves.new_blocks.extend(new_blocks)
                    step.batch_key, step.has_key = group.batch_key, True
                    step.chunks.append((sequence, computed, 1))
                    step.budget -= 1
                    step.num_seqs -= 1
                    in_flight.add(arrival)
                    continue
            else:
                counts = [s.num_tokens - s.num_computed_tokens if s.is_wanted else 0 for s in sequences]
                longest = max(counts, default=0)
                if longest == 1 and is_open and self._decodes_within(step, group, counts):
                    continue
            if longest == 0:
                parked.append(arrival)
            elif not step.admits(group):
                continue
            elif longest > 1:
                prefills.append(group)
            elif step.budget == 0 or step.num_seqs == 0 or step.needs_tokens:
                break
            else:
                self._rows.run(step, group)
                is_open = step.is_open
        for arrival in parked:
            queues.ready.pop(arrival, None)  # an idle one may have been preempted meanwhile
        step.end_decodes()
        for group in prefills:
            if step.is_full or step.needs_tokens:
                break
            # Asked again, because only what ran before it may have given the step its key.
            if group.arrival in queues.ready and step.admits(group):
                self._rows.run(step, group)

    def _decodes_within(self, step: Step, group: SequenceGroup, counts: list[int]) -> bool:
        """Adds the next token of all sequences that have one, if the step has room, and they in blocks of their own."""
        rows = [sequence for sequence, count in zip(group.sequences, counts, strict=True) if count]
        is_other = step.has_key and group.batch_key != step.batch_key
        if is_other or group.is_split or len(rows) > min(step.budget, step.num_seqs):
            return False
        if not self._manager.append_within([sequence.seq_id for sequence in rows]):
            return False
        step.chunks += [(sequence, sequence.num_computed_tokens, 1) for sequence in rows]
        step.batch_key, step.has_key = group.batch_key, True
        step.budget -= len(rows)
        step.num_seqs -= len(rows)
        self.queues.in_flight.add(group.arrival)
        return True

    # After a step

    def chunks(self, batch: Batch) -> list[Chunk]:
        """What runs in a step that is in flight."""
        return self._steps[batch.number]

    def update(self, batch: Batch, is_checked: bool = True) -> list[Offer]:
        """Books an executed step: its tokens are computed, and full blocks of them may be shared from now on.

        Args:
            is_checked: All that it computed is finite. If not known, blocks that chunks of several tokens filled are
                shared only from `settle` on: attention lets a later token's NaN through to earlier ones of its chunk,
                which the hash of an earlier token's block says nothing about.

        Returns:
            What is to be checked, for `settle`.
        """
        block_size, in_flight = self._manager.block_size, self.queues.in_flight
        slides_at = self._manager.slides_at
        offers: list[Offer] = []
        chunks = self._take(batch)
        for sequence, start, num_tokens in chunks:
            sequence.num_computed_tokens = end = start + num_tokens
            in_flight.discard(sequence.group.arrival)
            # A block whose last token is still expected follows when that is known.
            if end % block_size < num_tokens and not sequence.has_placeholders and sequence.is_recomputable:
                own = self._manager.prefix.offer(sequence.seq_id, sequence.token_ids, sequence.extra_key, end)
                if num_tokens > 1:
                    self._manager.snapshot(sequence.seq_id, end)
                if is_checked or num_tokens == 1:
                    self._manager.prefix.publish(own)
                else:
                    offers += own
        if slides_at:
            for sequence, start, num_tokens in chunks:
                end = start + num_tokens
                if (num_tokens > 1 or end % block_size in slides_at) and sequence.is_recomputable:
                    # Behind drafts that are taken back it goes on from the token before them.
                    self._manager.slide(sequence.seq_id, min(end, sequence.num_tokens - sequence.num_drafts))
        if offers:
            self.admission.offered.update([offer.block_hash for offer in offers])
        return offers

    def settle(self, offers: list[Offer], is_finite: list[bool]) -> None:
        """Shares blocks of a step, now that they are checked; no block of a sequence one of whose is not finite."""
        spoiled = {offer.seq_id for offer, is_sound in zip(offers, is_finite, strict=True) if not is_sound}
        self.admission.offered.difference_update(offer.block_hash for offer in offers)
        self._manager.prefix.publish(offer for offer in offers if offer.seq_id not in spoiled)
        if spoiled:
            self._manager.prefix.withdraw([offer for offer in offers if offer.seq_id in spoiled])

    def undo(self, batch: Batch) -> None:
        """Takes back the slots of a step that failed. Its copies must have been executed.

        What can't go back (a state that layers may have written to) is dropped, to be computed again.
        """
        chunks = self._take(batch)
        self._log.add_for_group("undone", None, len(chunks))
        has_fresh = batch.sources is not None and len(batch.sources.fresh) > 0
        if batch.sources is not None:
            self._manager.forget_sources([batch.seq_ids[row] for row in batch.sources.fresh])
        for sequence, start, _ in chunks:
            is_unread = has_fresh and sequence.is_recomputable and start > 0  # its source may be one that is not there
            if not is_unread and self._manager.can_crop(sequence.seq_id, start):
                self._manager.crop(sequence.seq_id, start)
            else:
                self.preemption.drop(sequence)
            self.queues.in_flight.discard(sequence.group.arrival)
        for group in {sequence.group.arrival: sequence.group for sequence, _, _ in chunks}.values():
            self.queues.file(group)

    def _take(self, batch: Batch) -> list[Chunk]:
        """What ran in a step that is over."""
        return self._steps.pop(batch.number) if batch.number else []
