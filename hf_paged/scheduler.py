"""Which tokens run in the next step, within the token budget and the pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field

from hf_paged.block_manager import BlockManager
from hf_paged.errors import OutOfBlocksError
from hf_paged.sequence import Sequence


@dataclass(slots=True, frozen=True)
class ScheduledChunk:
    """`num_tokens` tokens of `sequence`, from its token `start` on, run in this step."""

    sequence: Sequence
    start: int
    num_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step, as the scheduler hands it to the runner.

    Attributes:
        chunks: What runs, in batch order.
        block_copies: Copy-on-write pairs `(source, destination)` to execute before anything is written. A block may be
            the source of one and, freed by it, the destination of another: all sources are read first.
        new_blocks: Blocks newly given to the chunks' sequences.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)


class Scheduler:
    """First come, first served: fills each step up to the token budget, chunking what does not fit.

    A sequence that has no pending tokens keeps its blocks until somebody needs them; then the one used last is
    preempted first (its blocks are freed, its tokens computed again when it next runs), which keeps the rows of a
    batch that is larger than the pool from evicting each other in turn. Sequences that wait for this very step are
    preempted last.
    """

    def __init__(self, manager: BlockManager, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._manager = manager
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._resident: dict[int, Sequence] = {}  # sequences with computed tokens, the one used last at the end
        self._in_flight: set[int] = set()
        self.num_preemptions = 0

    @contextmanager
    def protecting(self, seq_ids: Iterable[int]) -> Iterator[None]:
        """Keeps sequences of a running step from being preempted by a forward inside it (a hook calling the model)."""
        added = set(seq_ids) - self._in_flight
        self._in_flight |= added
        try:
            yield
        finally:
            self._in_flight -= added

    @property
    def num_resident(self) -> int:
        """Sequences that hold computed tokens."""
        return len(self._resident)

    def remember(self, sequence: Sequence) -> None:
        """Notes that a sequence holds computed tokens and was used just now."""
        self._resident.pop(sequence.seq_id, None)
        self._resident[sequence.seq_id] = sequence

    def forget(self, sequence: Sequence) -> None:
        """Drops a sequence whose blocks were freed."""
        self._resident.pop(sequence.seq_id, None)

    def schedule(
        self, pending: SequenceOf[tuple[Sequence, int]], keep: frozenset[int] = frozenset()
    ) -> SchedulerOutput:
        """Chooses the next step and allocates its blocks.

        Args:
            pending: In order of arrival, the sequences with pending tokens, each with the number of leading tokens that
                may come from the prefix cache (those whose logits nobody wants).
            keep: Ids of sequences that must not be preempted for these.

        Raises:
            OutOfBlocksError: The first sequence doesn't fit, with everything preemptible preempted.
        """
        order = list(pending)
        while True:
            output = self._fill_step(order, keep)
            if output.chunks:
                return output
            # Nobody fits: the sequences still to run hold what each of them needs. The newest goes first, and sits this
            # step out, or it would take its cached blocks right back.
            preempted = False
            while len(order) > 1 and not preempted:
                newest = order.pop()[0]
                preempted = newest.seq_id not in keep and self._preempt_if_possible(newest)
            if not preempted:
                first = order[0][0]
                num_tokens = min(first.num_pending_tokens, self._max_num_batched_tokens)
                raise OutOfBlocksError(
                    self._manager.blocks_needed(first.seq_id, num_tokens), self._manager.pool.num_free
                )

    def _fill_step(self, pending: SequenceOf[tuple[Sequence, int]], keep: frozenset[int]) -> SchedulerOutput:
        output = SchedulerOutput()
        budget = self._max_num_batched_tokens
        protected = keep | {sequence.seq_id for sequence, _ in pending}
        for sequence, cacheable in pending:
            if len(output.chunks) == self._max_num_seqs or budget == 0:
                break
            if self._manager.num_tokens(sequence.seq_id) == 0 and sequence.is_reproducible and cacheable > 0:
                assert sequence.token_ids is not None
                sequence.num_computed_tokens = self._manager.match_prefix(
                    sequence.seq_id, sequence.token_ids, sequence.extra_key, max_tokens=cacheable
                )
                if sequence.num_computed_tokens:
                    self.remember(sequence)
            num_tokens = min(sequence.num_pending_tokens, budget)
            if self._make_room(sequence, num_tokens, protected):
                self._append(output, ScheduledChunk(sequence, sequence.num_computed_tokens, num_tokens))
                budget -= num_tokens
        return output

    def _make_room(self, sequence: Sequence, num_tokens: int, protected: Set[int]) -> bool:
        # The need is asked again after each victim: one that shared a block frees none but may make a copy unnecessary.
        while self._manager.blocks_needed(sequence.seq_id, num_tokens) > self._manager.pool.num_free:
            if not self.preempt_newest(protected):
                return False
        return True

    def _preempt_if_possible(self, sequence: Sequence) -> bool:
        if not sequence.is_reproducible or self._manager.num_tokens(sequence.seq_id) == 0:
            return False
        self.preempt(sequence)
        return True

    def update(self, output: SchedulerOutput) -> None:
        """Books an executed step: its tokens are computed, and full blocks of them may be shared from now on."""
        for chunk in output.chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.num_tokens
            self.remember(sequence)
            block_size = self._manager.block_size
            filled_a_block = sequence.num_computed_tokens // block_size > chunk.start // block_size
            if filled_a_block and sequence.is_reproducible:
                assert sequence.token_ids is not None
                self._manager.commit(
                    sequence.seq_id, sequence.token_ids[: sequence.num_computed_tokens], sequence.extra_key
                )

    def undo(self, output: SchedulerOutput) -> None:
        """Takes back the slots of a step that failed. Its block copies must have been executed."""
        for chunk in output.chunks:
            self._manager.crop(chunk.sequence.seq_id, chunk.start)

    def preempt_newest(self, protected: Set[int]) -> bool:
        """Preempts the sequence used last of those that can be and are not `protected`; False if there is none."""
        for sequence in reversed(self._resident.values()):
            is_free = sequence.seq_id not in protected and sequence.seq_id not in self._in_flight
            if is_free and sequence.is_reproducible:
                self.preempt(sequence)
                return True
        return False

    def preempt_all(self) -> int:
        """Preempts every sequence, if all can be; returns how many can't (then none was touched)."""
        lost = sum(not sequence.is_reproducible for sequence in self._resident.values())
        if not lost:
            for sequence in list(self._resident.values()):
                self.preempt(sequence)
        return lost

    def preempt(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks; its tokens become pending again."""
        self._manager.free(sequence.seq_id)
        self._manager.add(sequence.seq_id)
        sequence.num_computed_tokens = 0
        self.forget(sequence)
        self.num_preemptions += 1

    def _append(self, output: SchedulerOutput, chunk: ScheduledChunk) -> None:
        seq_id = chunk.sequence.seq_id
        table = self._manager.block_table(seq_id)
        held = len(table)
        output.block_copies += self._manager.append([(seq_id, chunk.num_tokens)])
        output.new_blocks += self._manager.block_table(seq_id)[held:]
        output.chunks.append(chunk)
