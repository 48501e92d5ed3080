"""Which tokens run in the next step, within the token budget and the pool, and who makes room for them."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace

from hf_paged.core.batch import Batch, BlockMoves, Chunk, lay_out
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.block_table import Offer
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus

WATERMARK = 0.01  # share of the pool that stays free when a group is admitted, so that what runs can grow
RETRY_STEPS = 16  # a waiting group that did not fit is tried again after so many steps, or when more blocks are free


@dataclass(slots=True)
class _Step:
    """A step in the making."""

    budget: int
    num_seqs: int
    only: object
    forced: bool
    batch_key: Hashable = None
    has_key: bool = False
    skipped_key: tuple[Hashable] | None = None
    is_short: bool = False  # a running group found no room: nobody is admitted
    needs_tokens: bool = False  # whose victim's tokens are not known yet: nobody newer runs, so that they will be
    hashes: set[bytes] = field(default_factory=set)  # of the prompt blocks that this step computes
    chunks: list[Chunk] = field(default_factory=list)
    moves: BlockMoves = field(default_factory=BlockMoves)

    @property
    def is_open(self) -> bool:
        """Whether decodes of its batch key may join, whoever's they are."""
        return self.has_key and self.only is None and not self.needs_tokens

    @property
    def is_full(self) -> bool:
        return self.budget == 0 or self.num_seqs == 0

    def admits(self, group: SequenceGroup) -> bool:
        """Whether the group may share this step."""
        if self.only is not None and group.owner is not self.only:
            return False
        if self.has_key and group.batch_key != self.batch_key:
            self.skipped_key = self.skipped_key or (group.batch_key,)
            return False
        return True


class Scheduler:
    """First come, first served, a token budget a step for decode and chunked prefill together.

    Running groups come first (decodes before prefill chunks), then swapped ones, then waiting ones. Admission is
    optimistic: a group is let in when its tokens so far fit, nothing is reserved for tokens not yet generated. When
    blocks run out nobody is admitted any more; then idle groups and after them the newest group are preempted, whole:
    swapped to CPU memory or dropped to be computed again. A group that finds no newer one to preempt waits.

    A step costs time for the groups that run in it, not for those that wait.

    Args:
        manager: The block tables; the scheduler is their only writer between `schedule` and `update`.
        max_num_batched_tokens: Tokens a step.
        max_num_seqs: Sequences a step.
        prefers_swap: Whether a group that could be computed again is to be swapped, if there is CPU memory for it.

    Attributes:
        num_preemptions: Sequences preempted.
        num_swapped_out: Those of them that were swapped.
        num_admission_stalls: Steps in which the first waiting group did not fit.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        prefers_swap: Callable[[SequenceGroup], bool] = lambda group: False,
    ) -> None:
        self._manager = manager
        self._log = manager.log
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._prefers_swap = prefers_swap
        self._watermark = max(1, int(manager.pool.num_blocks * WATERMARK))
        self._num_arrivals = 0
        self._num_sequences = 0
        self._groups: dict[int, SequenceGroup] = {}  # all live ones
        self._resident: dict[int, SequenceGroup] = {}  # those with blocks in the pool
        self._ready: dict[int, SequenceGroup] = {}  # resident, with pending tokens when last looked at
        self._ready_is_sorted = True
        # Heaps of (priority, arrival); what is no longer in the matching dictionary is skipped.
        self._waiting: dict[int, SequenceGroup] = {}
        self._waiting_heap: list[tuple[int, int]] = []
        self._swapped: dict[int, SequenceGroup] = {}
        self._swapped_heap: list[tuple[int, int]] = []
        self._in_flight: set[int] = set()
        self._steps: dict[int, list[Chunk]] = {}  # that are in flight, by number
        self._num_steps = 0
        self._offered: set[bytes] = set()  # hashes of blocks that are computed and not checked yet
        self._next_key: tuple[Hashable] | None = None
        self._refused: tuple[int, int] | None = None  # the first waiting group, and the blocks free when it didn't fit
        self._num_refusals = 0
        self.num_preemptions = 0
        self.num_swapped_out = 0
        self.num_admission_stalls = 0

    # Gauges

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
            if self._manager.num_swapped_blocks
            else 0
        )

    @property
    def num_to_swap_in(self) -> int:
        """Those of them that somebody waits for. Costs nothing for groups that wait elsewhere."""
        return sum(len(group.sequences) for group in self._swapped.values())

    @property
    def has_work(self) -> bool:
        """Whether any group has pending tokens and isn't in a running step."""
        if self._head(self._waiting, self._waiting_heap) or self._head(self._swapped, self._swapped_heap):
            return True
        return any(arrival not in self._in_flight and group.has_work for arrival, group in self._ready.items())

    def chunks(self, batch: Batch) -> list[Chunk]:
        """What runs in a step that is in flight."""
        return self._steps[batch.number]

    def is_in_flight(self, group: SequenceGroup) -> bool:
        """Whether a step with this group is running."""
        return group.arrival in self._in_flight

    # A sequence's life

    def new_group(
        self, priority: int = 0, batch_key: Hashable = None, owner: object = None, request_id: str | None = None
    ) -> SequenceGroup:
        """An empty group, the newest."""
        self._num_arrivals += 1
        return SequenceGroup(self._num_arrivals, priority, batch_key=batch_key, owner=owner, request_id=request_id)

    def new_sequence(self, group: SequenceGroup | None = None) -> Sequence:
        """An empty sequence, in a group of its own if none is given."""
        group = group or self.new_group()
        self._num_sequences += 1
        self._manager.add(self._num_sequences)
        self._log.enter(self._num_sequences, group)
        sequence = Sequence(self._num_sequences, group)
        group.sequences.append(sequence)
        self._groups[group.arrival] = group
        return sequence

    def fork(self, parent: Sequence, group: SequenceGroup | None = None) -> Sequence:
        """A sequence equal to its parent that shares all its blocks.

        Args:
            parent: Any live sequence that isn't in a running step.
            group: Where the child belongs; `None`: to its parent's group. Another group must not be swapped apart.
        """
        group = group or parent.group
        self._num_sequences += 1
        self._log.enter(self._num_sequences, group)
        self._manager.fork(parent.seq_id, self._num_sequences)
        token_ids = None if parent.token_ids is None else parent.token_ids.copy()
        child = replace(parent, seq_id=self._num_sequences, group=group, token_ids=token_ids)
        group.sequences.append(child)
        if group is not parent.group:
            group.status, group.is_idle = parent.group.status, parent.group.is_idle
        self._groups[group.arrival] = group
        self._file(group)
        return child

    def free(self, sequence: Sequence, reason: str | None = None) -> None:
        """Ends a sequence and releases its blocks. It must not be in a running step.

        Args:
            sequence: The sequence.
            reason: Why it ends, for the log, should it be the last of its group.
        """
        self._manager.free(sequence.seq_id)
        self._log.leave(sequence.seq_id)
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            self._groups.pop(group.arrival, None)
            self._log.add_for_group("finished", group, reason)
        self._file(group)

    def crop(self, sequence: Sequence, num_tokens: int) -> None:
        """Cuts a sequence to its first `num_tokens` tokens.

        What lies behind the windows of so few tokens may be gone: then all of it is to be computed again.

        Raises:
            ValueError: That can't be; nothing has changed.
        """
        if not self.can_crop(sequence, num_tokens):
            raise ValueError(f"what sequence {sequence.seq_id} needs behind {num_tokens} tokens was given back")
        if sequence.token_ids is not None:
            del sequence.token_ids[num_tokens:]
        sequence.num_tokens = num_tokens
        sequence.given_end = min(sequence.given_end, num_tokens)
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_tokens)
        if num_tokens:
            if num_tokens <= self._manager.num_tokens(sequence.seq_id):
                if self._manager.can_crop(sequence.seq_id, num_tokens):
                    self._manager.crop(sequence.seq_id, num_tokens)
                else:
                    self._drop(sequence)
            self._manager.forget_hashes(sequence.seq_id, num_tokens)
        else:
            self._manager.restart(sequence.seq_id)
        self._file(sequence.group)

    def can_crop(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether what the sequence needs behind its first `num_tokens` tokens is there, or can be computed again."""
        return (
            sequence.is_reproducible
            or num_tokens == 0
            or num_tokens >= self._manager.num_tokens(sequence.seq_id)
            or self._manager.can_crop(sequence.seq_id, num_tokens)
        )

    def slide(self, sequence: Sequence) -> None:
        """Gives back what lies behind the windows of all tokens that are not computed yet.

        Steps do so by themselves, but for a sequence that can't be computed again: should a forward of its caller's
        fail, it goes back to what it was before.
        """
        self._manager.slide(sequence.seq_id, sequence.num_computed_tokens)

    def keep_past(self, sequence: Sequence) -> None:
        """From now on nothing of the sequence is given back, but by a `crop`."""
        self._manager.keep_past(sequence.seq_id)

    def append(self, sequences: list[Sequence], counts: list[int]) -> BlockMoves:
        """Gives each sequence slots for so many tokens, outside of any step; see `extend_computed`, `book_computed`.

        Returns:
            Copies and new blocks, to execute.

        Raises:
            OutOfBlocksError: The pool can't hold them; nothing has changed.
        """
        manager = self._manager
        held = [len(manager.blocks(sequence.seq_id)) for sequence in sequences]
        copies = manager.append([(s.seq_id, count) for s, count in zip(sequences, counts, strict=True) if count])
        new_blocks = [
            block
            for sequence, count in zip(sequences, held, strict=True)
            for block in manager.held_blocks(sequence.seq_id, count)
        ]
        return BlockMoves(block_copies=copies, new_blocks=new_blocks)

    def reset_prefix_cache(self) -> int:
        """See `BlockManager`."""
        return self._manager.reset_prefix_cache()

    def extend_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Books tokens that somebody else stored in slots appended to the sequence's table."""
        sequence.num_tokens += num_tokens
        sequence.num_computed_tokens += num_tokens
        sequence.group.status = SequenceStatus.RUNNING
        self._file(sequence.group)

    def book_computed(self, sequences: list[Sequence]) -> list[Offer]:
        """Books that all tokens of sequences are computed, in slots appended outside of any step.

        Returns:
            What is to be checked, for `settle`.
        """
        offers: list[Offer] = []
        for sequence in sequences:
            start, end = sequence.num_computed_tokens, sequence.num_tokens
            sequence.num_computed_tokens = end
            sequence.group.status = SequenceStatus.RUNNING
            self._file(sequence.group)
            if end // self._manager.block_size > start // self._manager.block_size and sequence.is_reproducible:
                assert sequence.token_ids is not None
                offers += self._manager.offer(sequence.seq_id, sequence.token_ids, sequence.extra_key, end)
            if sequence.is_reproducible:
                self.slide(sequence)
        self._offered.update(offer.block_hash for offer in offers)
        return offers

    def wake(self, group: SequenceGroup) -> None:
        """Queues a group whose sequences have got pending tokens."""
        if group.status is SequenceStatus.RUNNING:
            if group.arrival not in self._ready:
                if self._ready_is_sorted and self._ready:
                    last = next(reversed(self._ready.values()))
                    self._ready_is_sorted = last.order < group.order
                self._ready[group.arrival] = group
        else:
            self._file(group)

    def expect_token(self, sequence: Sequence, placeholder: int) -> None:
        """Books a token that is being chosen: it can be scheduled, though nobody here knows which one it is.

        Args:
            sequence: Whose it is.
            placeholder: Its place among the tokens that the last step chooses.
        """
        sequence.num_tokens += 1
        sequence.placeholder = placeholder
        sequence.logits_from = sequence.num_tokens - 1
        self.wake(sequence.group)

    def reveal_token(self, sequence: Sequence, token_id: int) -> None:
        """Which one the first of the expected tokens is. Its keys may be computed already."""
        assert sequence.token_ids is not None
        sequence.token_ids.append(token_id)
        num_known = len(sequence.token_ids)
        is_full = num_known <= sequence.num_computed_tokens and num_known % self._manager.block_size == 0
        if is_full and sequence.is_reproducible:
            self._manager.commit(sequence.seq_id, sequence.token_ids, sequence.extra_key, num_known)

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
                    heapq.heappush(heap, group.order)
            else:
                queue.pop(arrival, None)

    # A step

    def schedule(self, *, forced: bool = False, only: object = None, max_tokens: int | None = None) -> Batch:
        """Chooses the next step and allocates its blocks. Its sequences are in flight until `update` or `undo`.

        Args:
            forced: Nothing is running or will come back by itself: the first group in line may preempt any other.
            only: Groups of this owner only.
            max_tokens: A smaller token budget than usual.

        Returns:
            The step; without rows if there is nothing to do, or nothing that fits and `forced` is off.

        Raises:
            OutOfBlocksError: `forced`, and the first group in line does not fit with everything else preempted; its
                `group` says which. Nothing is in flight, but its `swap_outs` are to be executed.
        """
        budget = min(self._max_num_batched_tokens, max_tokens or self._max_num_batched_tokens)
        step = _Step(budget, self._max_num_seqs, only, forced)
        num_preemptions, num_stalls = self.num_preemptions, self.num_admission_stalls
        if self._next_key is not None and not forced:
            step.batch_key, step.has_key = self._next_key[0], True
        if forced:
            self._force(step)
            step.forced = False  # whoever else finds room may not take it from an older one
        self._run_queues(step)
        if not step.chunks and step.has_key:
            step.has_key = False
            self._run_queues(step)
        self._next_key = step.skipped_key
        num_preempted = self.num_preemptions - num_preemptions
        is_stalled = self.num_admission_stalls > num_stalls
        if not step.chunks:
            return Batch(swap_outs=step.moves.swap_outs, num_preempted=num_preempted, is_stalled=is_stalled)
        self._num_steps += 1
        self._steps[self._num_steps] = step.chunks
        tables = self._manager.tables([sequence.seq_id for sequence, _, _ in step.chunks])
        return lay_out(
            step.chunks,
            tables,
            step.moves,
            number=self._num_steps,
            batch_key=step.batch_key,
            num_preempted=num_preempted,
            is_stalled=is_stalled,
        )

    def _run_queues(self, step: _Step) -> None:
        self._schedule_running(step)
        if not step.is_short and not step.is_full:
            self._swap_in(step)
            if not self._head(self._swapped, self._swapped_heap):
                self._admit(step)

    def _schedule_running(self, step: _Step) -> None:
        if not self._ready_is_sorted:
            self._ready = dict(sorted(self._ready.items(), key=lambda item: item[1].order))
            self._ready_is_sorted = True
        prefills: list[SequenceGroup] = []
        parked: list[int] = []
        in_flight, append_in_place, is_open = self._in_flight, self._manager.append_in_place, step.is_open
        for arrival, group in list(self._ready.items()):
            if arrival in in_flight or arrival not in self._ready:  # not there: preempted for an older one
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
                    and group.batch_key == step.batch_key
                    and not group.is_split
                    and append_in_place(sequence.seq_id)
                ):
                    # The usual decode, by the shortest way: one token more in a block that has room.
                    step.chunks.append((sequence, computed, 1))
                    step.budget -= 1
                    step.num_seqs -= 1
                    in_flight.add(arrival)
                    continue
            else:
                longest = max(
                    [s.num_tokens - s.num_computed_tokens if s.is_wanted else 0 for s in sequences], default=0
                )
            if longest == 0:
                parked.append(arrival)
            elif not step.admits(group):
                continue
            elif longest > 1:
                prefills.append(group)
            elif step.budget == 0 or step.num_seqs == 0 or step.needs_tokens:
                break
            else:
                self._run_group(step, group)
                is_open = step.is_open
        for arrival in parked:
            self._ready.pop(arrival, None)  # an idle one may have been preempted meanwhile
        for group in prefills:
            if step.is_full or step.needs_tokens:
                break
            # Asked again, because only what ran before it may have given the step its key.
            if group.arrival in self._ready and step.admits(group):
                self._run_group(step, group)

    def _swap_in(self, step: _Step) -> None:
        while not step.is_full and (group := self._head(self._swapped, self._swapped_heap)):
            if not step.admits(group):
                return
            if not self._bring_back(step, group, self._spare()):
                return

    def _bring_back(self, step: _Step, group: SequenceGroup, spare: int) -> bool:
        """Swaps a group in and runs it, if it fits with what it is about to add."""
        seq_ids = [sequence.seq_id for sequence in group.sequences]
        # No less than it may take: nobody can be swapped out any more in the step that swaps it in.
        need = self._manager.swap_in_need(seq_ids) + self._growth(step, group)
        if not self._has_room(step, need + spare):
            return False
        step.moves.swap_ins.extend(self._manager.swap_in(seq_ids))
        group.status = SequenceStatus.RUNNING
        self._file(group)
        return self._run_group(step, group)

    def _growth(self, step: _Step, group: SequenceGroup) -> int:
        """Blocks that the next tokens of a group take at most."""
        return self._manager.append_need(
            [
                (s.seq_id, min(s.num_wanted_tokens, step.budget) if s.num_computed_tokens else s.num_wanted_tokens)
                for s in group.sequences
                if s.num_wanted_tokens
            ]
        )

    def _admit(self, step: _Step) -> None:
        while not step.is_full and (group := self._head(self._waiting, self._waiting_heap)):
            if not step.admits(group):
                return
            if self._was_refused(group):
                self.num_admission_stalls += 1
                return
            if not self._start(step, group, self._spare()):
                if not step.hashes and not self._offered:
                    self.num_admission_stalls += 1
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

    def _has_room(self, step: _Step, num_blocks: int) -> bool:
        """Whether so many blocks are free, or become free by preempting idle groups."""
        while num_blocks > self._manager.pool.num_free:
            victim = None if step.moves.swap_ins else self._victim(lambda group: group.is_idle)
            if victim is None:
                return False
            step.moves.swap_outs.extend(self.preempt(victim))
        return True

    def _spare(self) -> int:
        """Blocks to leave free for what runs."""
        return self._watermark if self._resident else 0

    def _start(self, step: _Step, group: SequenceGroup, spare: int) -> bool:
        """Lets a waiting group in and runs its first tokens, if all its tokens so far fit."""
        first = next(sequence for sequence in group.sequences if sequence.num_wanted_tokens)
        self._begin(first)
        if not step.forced and self._is_being_computed(step, first):
            self._forget_progress(group)
            return False
        if not self._has_room(step, self._start_need(group, first) + spare):
            self._forget_progress(group)
            return False
        group.status = SequenceStatus.RUNNING
        self._resident[group.arrival] = group
        self.wake(group)
        if self._run_group(step, group, first):
            self._waiting.pop(group.arrival, None)
            self._note_admission(group)
            return True
        self._forget_progress(group)
        return False

    def _start_need(self, group: SequenceGroup, first: Sequence) -> int:
        """Blocks that a waiting group takes: what `first` needs, and of the others what they don't share with it."""
        manager, chunk = self._manager, self._max_num_batched_tokens
        return manager.blocks_needed(first.seq_id, first.num_wanted_tokens, chunk) + sum(
            manager.most_blocks(s.num_tokens, chunk, min(_common_prefix(s, first), s.logits_from, s.num_tokens - 1))
            for s in group.sequences
            if s is not first and s.num_wanted_tokens
        )

    def _forget_progress(self, group: SequenceGroup) -> None:
        """Takes back an admission: prefix hits are released."""
        for sequence in group.sequences:
            self._manager.unmatch(sequence.seq_id)
            sequence.num_computed_tokens = sequence.num_cached_tokens = 0
        group.status = SequenceStatus.WAITING
        self._file(group)

    def _force(self, step: _Step) -> None:
        """Runs the first group in line, whoever has to make room for it."""
        candidates = [
            group
            for group in (
                *(g for g in self._ready.values() if g.arrival not in self._in_flight and g.has_work),
                self._head(self._swapped, self._swapped_heap),
                self._head(self._waiting, self._waiting_heap),
            )
            if group is not None and step.admits(group)
        ]
        if step.only is not None:
            candidates += [
                g for g in (*self._waiting.values(), *self._swapped.values()) if g.owner is step.only and g.has_work
            ]
        if not candidates:
            return
        first = min(candidates, key=lambda group: group.order)
        try:
            self._force_group(step, first)
        except OutOfBlocksError:
            # What stands in its way may be others that can't be preempted: then those go on, at its expense.
            fixed = [g for g in candidates if g is not first and g.arrival in self._ready and not g.is_reproducible]
            if not fixed:
                raise
            self._force_group(step, min(fixed, key=lambda group: group.order))

    def _force_group(self, step: _Step, first: SequenceGroup) -> None:
        while True:
            if first.status is SequenceStatus.SWAPPED:
                done = self._bring_back(step, first, 0)
            elif first.status is SequenceStatus.WAITING:
                done = self._start(step, first, 0)
            else:
                done = self._run_group(step, first)
            if done:
                return
            step.is_short = True
            if not self._preempt_for(first, step):
                if first.status is SequenceStatus.SWAPPED and first.is_reproducible:
                    # It does not fit as a whole: rather a part of it than nothing.
                    self.preempt(first, allow_swap=False)
                    continue
                if self._run_part(step, first):
                    return
                if first.status is SequenceStatus.WAITING:
                    needed = self._start_need(first, next(s for s in first.sequences if s.num_wanted_tokens))
                else:
                    needed = self._growth(step, first)
                    if first.status is SequenceStatus.SWAPPED:
                        needed += self._manager.swap_in_need([s.seq_id for s in first.sequences])
                error = OutOfBlocksError(needed, self._manager.pool.num_free)
                error.group = first
                error.swap_outs = step.moves.swap_outs
                raise error

    def _run_group(self, step: _Step, group: SequenceGroup, first: Sequence | None = None) -> bool:
        """Adds the group's next tokens to the step: for all its sequences that have any, or (without room) none.

        `first` was given what the prefix cache has of it already.
        """
        if group.is_split and group.is_reproducible:
            while not self._run_part(step, group):
                if step.moves.swap_ins or not self._preempt_for(group, step):
                    return False
            return True
        manager = self._manager
        sequences = group.sequences
        requests: list[tuple[Sequence, int]] = []
        begun: list[Sequence] = []
        budget, num_seqs = step.budget, step.num_seqs
        is_prefilling = False
        for sequence in sequences:
            if budget == 0 or num_seqs == 0:
                break
            if sequence.num_wanted_tokens == 0:
                continue
            if sequence.num_computed_tokens == 0:
                if is_prefilling:
                    continue  # it will share what its sibling computes now
                if sequence is not first:
                    self._begin(sequence)
                    begun.append(sequence)
            is_prefilling |= sequence.num_wanted_tokens > 1
            num_tokens = min(sequence.num_wanted_tokens, budget)
            requests.append((sequence, num_tokens))
            budget -= num_tokens
            num_seqs -= 1
        appends = [(sequence.seq_id, num_tokens) for sequence, num_tokens in requests]
        while manager.append_need(appends) > manager.pool.num_free:
            step.is_short = True
            if step.moves.swap_ins or not self._preempt_for(group, step):
                for sequence in begun:
                    manager.unmatch(sequence.seq_id)
                    sequence.num_computed_tokens = 0
                return False
        held = [len(manager.blocks(seq_id)) for seq_id, _ in appends]
        step.moves.block_copies.extend(manager.append(appends))
        for (sequence, num_tokens), count in zip(requests, held):
            step.moves.new_blocks.extend(manager.held_blocks(sequence.seq_id, count))
            step.chunks.append((sequence, sequence.num_computed_tokens, num_tokens))
            if num_tokens > 1 and sequence.is_reproducible and (self._waiting or self._swapped):
                assert sequence.token_ids is not None
                step.hashes.update(
                    manager.prompt_hashes(
                        sequence.seq_id,
                        sequence.token_ids,
                        sequence.extra_key,
                        sequence.num_computed_tokens,
                        sequence.num_computed_tokens + num_tokens,
                    )
                )
        self._note(step, group, step.budget - budget, len(requests))
        return bool(requests)

    def _run_part(self, step: _Step, group: SequenceGroup) -> bool:
        """Runs what fits of a group that does not fit the empty pool as a whole: its first sequences.

        Those that have blocks of their own come before those that have none (any more). One that grows takes the room
        of the last one behind it, so that the first ones reach their end instead of all of them taking turns. One that
        begins takes no other's, unless nothing else runs, and leaves the others a block each to grow into.
        """
        if group.status is SequenceStatus.SWAPPED or not group.is_reproducible:
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
            if budget == 0 or len(requests) == step.num_seqs:
                break
            is_new = sequence.num_computed_tokens == 0
            if is_new:
                self._begin(sequence)
            num_tokens = min(sequence.num_wanted_tokens, budget)
            own = manager.append_need([(sequence.seq_id, num_tokens)])
            spare = len(requests) if is_new else 0
            while need + own + spare > manager.pool.num_free and not (is_new and requests):
                if not self._drop_behind(step, sequence, victims, is_all=not requests):
                    break
                own = manager.append_need([(sequence.seq_id, num_tokens)])
            # It would share more of what a sibling computes in this step.
            is_early = is_new and any(
                n > 1 and _common_prefix(sequence, other) > max(sequence.num_computed_tokens, other.num_computed_tokens)
                for other, n in requests
            )
            if is_early or need + own + spare > manager.pool.num_free:
                if is_new:
                    manager.unmatch(sequence.seq_id)
                    sequence.num_computed_tokens = 0
                break
            requests.append((sequence, num_tokens))
            budget -= num_tokens
            need += own
        if len(requests) < len(wanted):
            step.is_short = True
        if not requests:
            return False
        appends = [(sequence.seq_id, num_tokens) for sequence, num_tokens in requests]
        held = [len(manager.blocks(seq_id)) for seq_id, _ in appends]
        step.moves.block_copies.extend(manager.append(appends))
        for (sequence, num_tokens), count in zip(requests, held):
            step.moves.new_blocks.extend(manager.held_blocks(sequence.seq_id, count))
            step.chunks.append((sequence, sequence.num_computed_tokens, num_tokens))
        self._note(step, group, step.budget - budget, len(requests))
        if group.status is SequenceStatus.WAITING:
            self._note_admission(group)
        group.status, group.is_split = SequenceStatus.RUNNING, True
        self._file(group)
        return True

    def _drop_behind(self, step: _Step, sequence: Sequence, victims: list[Sequence], is_all: bool) -> bool:
        """Drops the last of `victims` with blocks that are not shared, if it comes behind `sequence`.

        Args:
            step: The step.
            sequence: Who needs room.
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
            held = self._manager.held_blocks(victim.seq_id)
            if not is_all and all(pool.ref_count(block) > 1 for block in held):
                continue
            if victim.expects_tokens:
                step.needs_tokens = True
                return False
            del victims[index]
            self._log.add("preempted", victim.seq_id, "recompute", 1)
            self._drop(victim)
            self.num_preemptions += 1
            return True
        return False

    def _note(self, step: _Step, group: SequenceGroup, num_tokens: int, num_seqs: int) -> None:
        step.budget -= num_tokens
        step.num_seqs -= num_seqs
        if not step.has_key:
            step.batch_key, step.has_key = group.batch_key, True
        self._in_flight.add(group.arrival)

    def _note_admission(self, group: SequenceGroup) -> None:
        num_tokens = max(sequence.num_tokens for sequence in group.sequences)
        self._log.add_for_group("admitted", group, len(group.sequences), num_tokens)

    def _begin(self, sequence: Sequence) -> None:
        """Gives a sequence without computed tokens what a sibling or the prefix cache already holds of it."""
        if sequence.num_computed_tokens:
            return
        sequence.num_cached_tokens = 0
        if not sequence.is_reproducible:
            return
        assert sequence.token_ids is not None
        limit = min(sequence.logits_from, sequence.num_tokens - 1)
        if limit <= 0:
            return
        manager = self._manager
        best, shared = None, 0
        for sibling in sequence.group.sequences:
            if sibling.num_computed_tokens > shared:
                common = min(_common_prefix(sequence, sibling), limit, sibling.num_computed_tokens)
                if common > shared and manager.can_share(sibling.seq_id, common):
                    best, shared = sibling, common
        if best is not None:
            manager.share_prefix(sequence.seq_id, best.seq_id, shared)
            sequence.num_computed_tokens = shared
            sequence.num_cached_tokens = min(best.num_cached_tokens, shared)
            return
        sequence.num_computed_tokens = sequence.num_cached_tokens = manager.match_prefix(
            sequence.seq_id, sequence.token_ids, sequence.extra_key, max_tokens=limit
        )

    def _is_being_computed(self, step: _Step, sequence: Sequence) -> bool:
        """Whether the very block that the sequence would begin with is computed: by this step, or by one in flight."""
        start = sequence.num_computed_tokens
        end = start + self._manager.block_size
        computed = step.hashes | self._offered if self._offered else step.hashes
        if not computed or not sequence.is_reproducible or end > min(sequence.logits_from, sequence.num_tokens - 1):
            return False
        assert sequence.token_ids is not None
        hashes = self._manager.prompt_hashes(sequence.seq_id, sequence.token_ids, sequence.extra_key, start, end)
        return any(block_hash in computed for block_hash in hashes)

    def _head(self, queue: dict[int, SequenceGroup], heap: list[tuple[int, int]]) -> SequenceGroup | None:
        while heap:
            group = queue.get(heap[0][1])
            if group is not None and group.order == heap[0]:
                if group.has_work:
                    return group
                del queue[group.arrival]  # whoever waited for it has given up
            heapq.heappop(heap)
        return None

    # After a step

    def update(self, batch: Batch, is_checked: bool = True) -> list[Offer]:
        """Books an executed step: its tokens are computed, and full blocks of them may be shared from now on.

        Args:
            batch: The step.
            is_checked: All that it computed is finite. If not known, blocks that chunks of several tokens filled are
                shared only from `settle` on: attention lets a later token's NaN through to earlier ones of its chunk,
                which the hash of an earlier token's block says nothing about.

        Returns:
            What is to be checked, for `settle`.
        """
        block_size, in_flight = self._manager.block_size, self._in_flight
        slides_at = self._manager.slides_at
        offers: list[Offer] = []
        chunks = self._take(batch)
        for sequence, start, num_tokens in chunks:
            sequence.num_computed_tokens = end = start + num_tokens
            in_flight.discard(sequence.group.arrival)
            # A block whose last token is still expected follows when that is known.
            if end % block_size < num_tokens and not sequence.expects_tokens and sequence.is_reproducible:
                assert sequence.token_ids is not None
                own = self._manager.offer(sequence.seq_id, sequence.token_ids, sequence.extra_key, end)
                if is_checked or num_tokens == 1:
                    self._manager.publish(own)
                else:
                    offers += own
        if slides_at:
            for sequence, start, num_tokens in chunks:
                end = start + num_tokens
                if (num_tokens > 1 or end % block_size in slides_at) and sequence.is_reproducible:
                    self._manager.slide(sequence.seq_id, end)
        self._offered.update(offer.block_hash for offer in offers)
        return offers

    def settle(self, offers: list[Offer], is_finite: list[bool]) -> None:
        """Shares blocks of a step, now that they are checked; no block of a sequence one of whose is not finite."""
        spoiled = {offer.seq_id for offer, is_sound in zip(offers, is_finite, strict=True) if not is_sound}
        self._offered.difference_update(offer.block_hash for offer in offers)
        self._manager.publish(offer for offer in offers if offer.seq_id not in spoiled)
        if spoiled:
            self._manager.withdraw([offer for offer in offers if offer.seq_id in spoiled])

    def undo(self, batch: Batch) -> None:
        """Takes back the slots of a step that failed. Its copies must have been executed."""
        chunks = self._take(batch)
        self._log.add_for_group("undone", None, len(chunks))
        for sequence, start, _ in chunks:
            self._manager.crop(sequence.seq_id, start)
            self._in_flight.discard(sequence.group.arrival)
        for group in {sequence.group.arrival: sequence.group for sequence, _, _ in chunks}.values():
            self._file(group)

    def _take(self, batch: Batch) -> list[Chunk]:
        """What ran in a step that is over."""
        return self._steps.pop(batch.number) if batch.num_seqs else []

    # Preemption

    def make_room(self, num_blocks: int, protected: Iterable[SequenceGroup]) -> list[tuple[int, int]]:
        """Preempts groups until so many blocks are free, or nobody is left; returns swaps to execute."""
        keep = {group.arrival for group in protected}
        swap_outs: list[tuple[int, int]] = []
        while self._manager.pool.num_free < num_blocks:
            victim = self._victim(lambda group: group.arrival not in keep and not group.expects_tokens)
            if victim is None:
                break
            swap_outs += self.preempt(victim)
        return swap_outs

    def swap_in_now(self, group: SequenceGroup) -> BlockMoves:
        """Brings a swapped group back outside of any step, whoever has to make room for it.

        Returns:
            Swaps to execute.

        Raises:
            OutOfBlocksError: It doesn't fit with everything else preempted.
        """
        seq_ids = [sequence.seq_id for sequence in group.sequences]
        swap_outs = self.make_room(self._manager.swap_in_need(seq_ids), [group])
        try:
            swap_ins = self._manager.swap_in(seq_ids)
        except OutOfBlocksError as error:
            error.group, error.swap_outs = group, swap_outs
            raise
        group.status = SequenceStatus.RUNNING
        self._file(group)
        return BlockMoves(swap_outs=swap_outs, swap_ins=swap_ins)

    def preempt_all(self) -> int:
        """Drops every group's blocks, swapped ones included, if all can be computed again and none is needed now.

        Returns:
            How many sequences can't be dropped; then nothing has changed.
        """
        holders = [group for group in self._groups.values() if group.status is not SequenceStatus.WAITING]
        fixed = sum(
            len(group.sequences)
            for group in holders
            if group.num_pins or group.arrival in self._in_flight or not group.is_reproducible or group.expects_tokens
        )
        if not fixed:
            for group in holders:
                self.preempt(group, allow_swap=False)
        return fixed

    def _preempt_for(self, group: SequenceGroup, step: _Step) -> bool:
        """Preempts one group so that another can run: an idle one, else the newest that is newer (if forced: any)."""
        victim = self._victim(
            lambda other: other is not group and (step.forced or other.is_idle or other.order > group.order)
        )
        if victim is None:
            return False
        if victim.expects_tokens:  # it can't be computed again before they are known
            step.needs_tokens = True
            return False
        step.moves.swap_outs.extend(self.preempt(victim))
        return True

    def _victim(self, may_go: Callable[[SequenceGroup], bool]) -> SequenceGroup | None:
        """Idle ones first, then those without work at the moment, the newest first of each."""
        candidates = [
            group
            for group in self._resident.values()
            if not group.num_pins
            and group.arrival not in self._in_flight
            and may_go(group)
            and (group.is_reproducible or self._can_swap(group))
        ]
        return max(candidates, key=lambda group: (group.is_idle, group.order), default=None)

    def _can_swap(self, group: SequenceGroup) -> bool:
        return self._manager.can_swap_out([sequence.seq_id for sequence in group.sequences])

    def preempt(self, group: SequenceGroup, allow_swap: bool = True) -> list[tuple[int, int]]:
        """Takes a group's blocks, all of them: to CPU memory, or dropped so that its tokens become pending again.

        Returns:
            Block pairs `(device, CPU)` to copy before the device blocks are written.
        """
        self.num_preemptions += len(group.sequences)
        group.is_split = False
        wants_swap = not group.is_reproducible or self._prefers_swap(group)
        if allow_swap and wants_swap and self._can_swap(group):
            self.num_swapped_out += len(group.sequences)
            group.status = SequenceStatus.SWAPPED
            self._log.add_for_group("preempted", group, "swap", len(group.sequences))
            swap_outs = self._manager.swap_out([sequence.seq_id for sequence in group.sequences])
            self._file(group)
            return swap_outs
        self._log.add_for_group("preempted", group, "recompute", len(group.sequences))
        for sequence in group.sequences:
            self._drop(sequence)
        group.status = SequenceStatus.WAITING
        self._file(group)
        return []

    def _drop(self, sequence: Sequence) -> None:
        self._manager.evict(sequence.seq_id)
        sequence.num_computed_tokens = 0


def _common_prefix(one: Sequence, other: Sequence) -> int:
    """Tokens that two sequences begin with alike (0 if unknown)."""
    if one.token_ids is None or other.token_ids is None or one.extra_key != other.extra_key:
        return 0
    a, b = one.token_ids, other.token_ids
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    # The first length at which the prefixes differ, by bisection over slices compared in C.
    return bisect_left(range(length), True, key=lambda n: a[: n + 1] != b[: n + 1])
