"""`ScheduledApart`: samples and beams that share nothing, on the real engine, as the paper's competitors have them.

A sequence that forks gets a run of its own, reserved when its prompt was let in, and a copy of what its parent has: of
a prompt, all of it; where a beam goes on from another, in the run of the one that it replaces, what they generated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence, SequenceGroup
from paper.policies import Reserved


class ScheduledApart(Scheduler):
    """A group has `width` sequences from the start, so that the policy reserves a run for each: all but one are empty.

    Args:
        manager: The tables.
        max_num_batched_tokens: See `Scheduler`.
        max_num_seqs: See `Scheduler`.
        policy: Who has the runs.
        width: Samples or beams of each request.
    """

    def __init__(
        self, manager: BlockManager, max_num_batched_tokens: int, max_num_seqs: int, policy: Reserved, width: int
    ) -> None:
        super().__init__(manager, max_num_batched_tokens, max_num_seqs, policy=policy)
        self._runs, self._width = policy.runs, width
        self._unused: dict[int, list[Sequence]] = {}  # of a group: empty ones, and those that have ended
        self._forks: list[Sequence] = []  # that have their parents' blocks
        self._copies: list[tuple[int, int]] = []

    def new_sequence(self, group: SequenceGroup | None = None) -> Sequence:
        sequence = super().new_sequence(group)
        self._unused[sequence.group.arrival] = empty = []
        for _ in range(self._width - 1):
            empty.append(super().new_sequence(sequence.group))
        return sequence

    def fork(self, parent: Sequence, group: SequenceGroup | None = None) -> Sequence:
        child = super().fork(parent, group)
        self._forks.append(child)
        return child

    def free(self, sequence: Sequence, reason: str | None = None) -> None:
        super().free(sequence, reason)
        group, unused = sequence.group, self._unused[sequence.group.arrival]
        self._forks = [fork for fork in self._forks if fork is not sequence]
        if sequence.seq_id in self._runs:
            unused.append(sequence)
        if all(other in unused for other in group.sequences):
            for other in list(group.sequences):
                super().free(other, reason)
            del self._unused[group.arrival]

    def schedule(self, **options: Any) -> Batch:
        for child in self._forks:
            self._move(child)
        self._forks = []
        batch = super().schedule(**options)
        if not batch.num_seqs:
            return batch
        copies, self._copies = self._copies, []
        return replace(batch, block_copies=copies + batch.block_copies)

    def _move(self, child: Sequence) -> None:
        """Gives a fork blocks of its own."""
        manager, size = self._manager, self._manager.block_size
        unused = self._unused[child.group.arrival].pop(0)
        num_tokens, shared = manager.num_tokens(child.seq_id), manager.block_table(child.seq_id)
        start = child.num_prompt_tokens // size if unused.num_tokens else 0  # an ended one has the prompt already
        if unused.seq_id in manager:
            super().free(unused)
        self._runs[child.seq_id] = self._runs.pop(unused.seq_id)
        manager.evict(child.seq_id)
        manager.append([(child.seq_id, num_tokens)])
        self._copies += zip(shared[start:], manager.block_table(child.seq_id)[start:])
