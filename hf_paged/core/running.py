"""`Running`: adds the next tokens of groups in the pool to a step."""

from __future__ import annotations

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.group_rows import GroupRows
from hf_paged.core.queues import Queues
from hf_paged.core.sequence import SequenceGroup
from hf_paged.core.step import Step


class Running:
    """Groups in the pool, in the policy's order."""

    def __init__(self, manager: BlockManager, queues: Queues, rows: GroupRows) -> None:
        """Runs groups of `queues`, by their `rows`."""
        self._manager = manager
        self._queues = queues
        self._rows = rows

    def run(self, step: Step) -> None:
        """Fills a step from groups in the pool: decodes first, then chunks of prompts."""
        prefills: list[SequenceGroup] = []
        parked: list[int] = []
        queues = self._queues
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
                self._rows.run(step, group)
                is_open = step.is_open
        for arrival in parked:
            queues.ready.pop(arrival, None)  # an idle one may have been preempted meanwhile
        for group in prefills:
            if step.is_full or step.needs_tokens:
                break
            # Asked again, because only what ran before it may have given the step its key.
            if group.arrival in queues.ready and step.admits(group):
                self._rows.run(step, group)
