"""`ForwardRun`: a caller's forward while the worker computes it together with all others'."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hf_paged.core.batch import Batch
from hf_paged.core.sequence import Sequence
from hf_paged.engine.decoding_loop import CallCancelledError, DecodingLoop
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.run import Run
from hf_paged.engine.worker import StepWorker
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.streams import Handover, hand_out
from hf_paged.sampling.sampler import SamplingBatch


class ForwardRun(Run):
    """Sequences whose uncomputed tokens a waiting caller wants computed, and the logits it wants of them.

    Attributes:
        output: `[rows, K, vocab_size]` when done, `None` if K is 0.
    """

    def __init__(
        self,
        pool: KVPool,
        worker: StepWorker,
        sequences: list[Sequence],
        wanted: np.ndarray,
        loop: DecodingLoop | None = None,
    ) -> None:
        """Queues the sequences, for the logits of the tokens `wanted`, `[rows, K]`. The pool's lock is held."""
        super().__init__(pool, worker)
        self._sequences = sequences
        self._wanted = wanted
        self._loop = loop
        self._computed: Handover | None = None
        self.output: Tensor | None = None
        has_wanted = wanted.shape[1] > 0
        uncomputed = [(row, s) for row, s in enumerate(sequences) if s.num_uncomputed_tokens > 0]
        for row, sequence in uncomputed:
            # Tokens before the first wanted one may come from the prefix cache.
            sequence.logits_from = int(wanted[row].min()) if has_wanted else sequence.num_tokens
            is_last = wanted.shape[1] == 1 and sequence.logits_from == sequence.num_tokens - 1
            sequence.wanted = None if is_last else wanted[row].tolist()
        worker.loop.decoding_loops.arrive(loop, len(sequences))
        if uncomputed:
            worker.add(self, uncomputed)
        else:
            self._finish()

    def logits(self) -> Tensor | None:
        """Waits until all logits are there. If that is interrupted, the caller is to `withdraw`.

        Raises:
            Exception: Whatever the step raised that only this forward's rows were in.
        """
        loop = self._loop
        if loop is not None:
            loop.on_cancel = lambda: self._worker.loop.post(self.cancel, between_steps=True)
            if loop.is_cancelled:
                loop.on_cancel()
        try:
            self._worker.wait(self.done)
        finally:
            if loop is not None:
                loop.on_cancel = None  # a request's handle leads to its caller: not also to the forwards it made
        if self.error is not None:
            error, self.error = self.error, None  # its traceback leads to the cache, to which no sequence may lead
            raise error
        if self._computed is not None:
            self._computed.follow()  # not what else is queued with the steps by now
            hand_out(self.output)
        return self.output

    def withdraw(self) -> None:
        """Stops waiting for the sequences, as they are; returns when no step with them is running any more."""
        if self.is_done:
            return
        with self._worker.loop.exclusive(), self._pool.lock:
            self.fail(RuntimeError("cancelled"))

    def cancel(self) -> None:
        self.fail(CallCancelledError())

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            self.error = error
            self._finish()

    @torch.no_grad()
    def take(self, batch: Batch, rows: list[int], places: list[int], logits: Tensor) -> list[SamplingBatch]:
        if rows:
            num_columns, vocab_size = self._wanted.shape[1], logits.shape[-1]
            # Which of a row's K they are, in the order in which the sequence asked for them.
            first_index, counts = (np.asarray(a)[places][:, None] for a in (batch.starts, batch.query_lens))
            offset = self._wanted[rows] - first_index
            columns = np.nonzero((offset >= 0) & (offset < counts))
            target = np.asarray(rows)[columns[0]] * num_columns + columns[1]
            source = np.concatenate([np.arange(*batch.logit_starts[place : place + 2]) for place in places])
            first = int(source[0])
            if len(target) == self._wanted.size and (target == source - first).all():
                # The usual step: everything at once, in order, side by side.
                # A copy: the caller may write to it, and the step's logits may be an inference tensor.
                self.output = logits[first : first + len(target)].clone().view(*self._wanted.shape, vocab_size)
            else:
                if self.output is None:
                    self.output = logits.new_zeros(*self._wanted.shape, vocab_size)
                from_rows, to_rows = (to_device(index, logits.device) for index in (source, target))
                self.output.view(-1, vocab_size)[to_rows] = logits[from_rows]
        if logits.device.type == "cuda":  # behind the last chunk too, which reads what the caller gave
            self._computed = Handover(logits.device)
        for sequence in self._sequences:
            # Should it be preempted for the others from here on, that is the next forward's business.
            if sequence.num_uncomputed_tokens == 0:
                self._worker.loop.remove(sequence)
        if not any(sequence.is_wanted for sequence in self._sequences):
            self._finish()
        return []

    def _finish(self) -> None:
        for sequence in self._sequences:
            self._worker.loop.remove(sequence)
        self._worker.loop.decoding_loops.leave(self._loop)
        super()._finish()
