"""`StepLoop`: from sequences with pending tokens to the logits somebody wants, step by step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hf_paged.errors import OutOfBlocksError
from hf_paged.flat_forward import lay_out_known
from hf_paged.kv_pool import KVPool
from hf_paged.model_state import ModelState
from hf_paged.runner import ModelRunner, TokenInputs
from hf_paged.scheduler import SchedulerOutput
from hf_paged.sequence import Sequence


class StepLoop:
    """Schedules and runs steps over one pool. The caller holds the pool's lock.

    Attributes:
        num_steps: Model steps run.
        num_prefill_tokens: Tokens computed beyond one a sequence and step.
    """

    def __init__(self, pool: KVPool, runner: ModelRunner, model_state: ModelState) -> None:
        self._pool = pool
        self._runner = runner
        self._model_state = model_state
        self.num_steps = 0
        self.num_prefill_tokens = 0

    def run(
        self,
        sequences: list[Sequence],
        make_inputs: Callable[[], tuple[TokenInputs, list[int]]],
        wanted: np.ndarray,
        keep: frozenset[int] = frozenset(),
    ) -> Tensor | None:
        """Schedules and runs steps until no sequence has pending tokens.

        Args:
            sequences: What to compute, in order of arrival.
            make_inputs: Lays out their tokens as they stand: the tokens, and the index of each sequence's token 0 in
                them.
            wanted: `[rows, K]`, tokens of each sequence whose logits are wanted.
            keep: Ids of sequences that must not be preempted for these.

        Returns:
            `[rows, K, vocab_size]`, or `None` if K is 0.
        """
        row_of = {sequence.seq_id: row for row, sequence in enumerate(sequences)}
        num_wanted = wanted.shape[1]
        # Tokens before the first wanted one may come from the prefix cache.
        cacheable = wanted.min(axis=1).tolist() if num_wanted else [s.num_tokens - 1 for s in sequences]
        output: Tensor | None = None
        tokens, bases = make_inputs()
        # A row that is done here may be preempted for the ones still pending; that is the next forward's business.
        pending = [(s, cacheable[row_of[s.seq_id]]) for s in sequences if s.num_pending_tokens > 0]
        while pending:
            preempted_before = self._pool.scheduler.num_preemptions
            step = self._schedule(pending, keep)
            try:
                if self._pool.scheduler.num_preemptions > preempted_before:
                    tokens, bases = make_inputs()  # a pending row may have to start over
                chunk_rows = [row_of[chunk.sequence.seq_id] for chunk in step.chunks]
                first = [bases[row] + chunk.start for row, chunk in zip(chunk_rows, step.chunks, strict=True)]
                logit_rows, targets = _find_wanted(step, chunk_rows, wanted)
                # A model that can choose rows still computes at least one.
                asked = logit_rows if logit_rows.size else np.zeros(1, dtype=np.int64)
                with self._pool.scheduler.protecting(row_of):
                    logits = self._runner.run(step, self._pool.manager, self._pool.kv_cache, tokens, first, asked)
            except BaseException:
                self._pool.scheduler.undo(step)
                raise
            self._pool.scheduler.update(step)
            self.num_steps += 1
            self.num_prefill_tokens += sum(chunk.num_tokens - 1 for chunk in step.chunks)
            self._pool.record_peak()
            pending = [(s, limit) for s, limit in pending if s.num_pending_tokens > 0]
            if targets.size == 0:
                continue
            if output is None and targets.size == wanted.size and bool((targets == np.arange(targets.size)).all()):
                output = logits.view(*wanted.shape, -1)  # the usual step: everything at once, in order
                continue
            if output is None:
                output = logits.new_zeros(*wanted.shape, logits.shape[-1])
            output.view(-1, logits.shape[-1])[torch.from_numpy(targets).to(logits.device)] = logits
        return output

    def recompute(self, sequences: list[Sequence]) -> None:
        """Brings the preempted ones among these back into the pool, all of them beside each other.

        Raises:
            ValueError: The model's weights, adapters or hooks are not those that one of them was computed with.
            OutOfBlocksError: They don't fit beside each other.
        """
        lost = [sequence for sequence in sequences if sequence.num_pending_tokens > 0]
        if not lost:
            return
        state = self._model_state.key()
        for sequence in lost:
            sequence.check_state(state)
        device = self._runner.model.device
        keep = frozenset(sequence.seq_id for sequence in sequences)
        self.run(lost, lambda: lay_out_known(lost, device), np.empty((len(lost), 0), dtype=np.int64), keep)

    def _schedule(self, pending: list[tuple[Sequence, int]], keep: frozenset[int]) -> SchedulerOutput:
        """The next step, its blocks copied and cleared."""
        try:
            step = self._pool.scheduler.schedule(pending, keep)
        except OutOfBlocksError as error:
            raise self._pool.out_of_blocks(error) from None
        self._pool.kv_cache.copy_blocks(step.block_copies)
        self._pool.kv_cache.zero_blocks(step.new_blocks)
        return step


def _find_wanted(step: SchedulerOutput, chunk_rows: list[int], wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where this step computes wanted logits.

    Args:
        step: The step.
        chunk_rows: Row of `wanted` that each chunk belongs to.
        wanted: `[rows, K]`, indices of tokens in their sequences.

    Returns:
        Rows of the flat batch, and for each its flat index in `wanted`.
    """
    logit_rows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    flat_start = 0
    for row, chunk in zip(chunk_rows, step.chunks, strict=True):
        offset = wanted[row] - chunk.start
        inside = np.nonzero((offset >= 0) & (offset < chunk.num_tokens))[0]
        logit_rows.append(flat_start + offset[inside])
        targets.append(row * wanted.shape[1] + inside)
        flat_start += chunk.num_tokens
    return np.concatenate(logit_rows), np.concatenate(targets)
