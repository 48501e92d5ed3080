"""`BeamRun`: a beam search whose prompts the engine drives, beside all others'."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_paged.core.batch import Batch
from hf_paged.core.sequence import Sequence
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.run import Row, Run
from hf_paged.engine.sampled_run import CallRows, new_sequences
from hf_paged.engine.worker import StepWorker
from hf_paged.kernels.transfers import to_device
from hf_paged.model.weights_version import WeightsKey
from hf_paged.sampling.beams import BeamBatch, BeamSearch, Selection
from hf_paged.sampling.processors import needs_ids
from hf_paged.sampling.random import SamplingNoise
from hf_paged.sampling.sampler import Outcome


@dataclass(slots=True)
class _Prompt:
    """A prompt's search, as far as the host knows it.

    Attributes:
        beams: Their sequences, best first; all the same until they differ.
        tokens: `[num_beams, n]`, what they generated.
        hypotheses: The best that have ended, best first; an empty one where there are fewer.
        may_improve: Whether a better one may come.
        all_end: Whether all its candidates ended in the last step.
        is_decided: Nothing can change any more: its beams are gone.
    """

    beams: list[Sequence]
    tokens: np.ndarray
    hypotheses: list[np.ndarray]
    may_improve: bool = True
    is_full: bool = False
    all_end: bool = False
    is_decided: bool = False


class BeamRun(Run):
    """Beams that are scheduled, scored, forked and finished by the engine.

    The prompts of a call keep in step with each other, as in transformers' loop, whose end depends on all of them;
    of different calls they don't. Which beams go on is known on the host only after the step: it forks and frees
    sequences, which copies no keys. Its rows are there when it is done.
    """

    def __init__(
        self,
        call: CallRows,
        pool: KVPool,
        worker: StepWorker,
        weights_key: WeightsKey,
        batch_key: Hashable,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Queues the prompts. The pool's lock is held. See `SampledRun`."""
        super().__init__(pool, worker, on_end)
        assert call.beams is not None
        self._call = call
        self._settings = call.beams
        self._num_new = 0
        num_rows = len(call.input_ids)
        num_beams = call.num_samples
        num_prompts = num_rows // num_beams
        noise = None if call.generator is None else SamplingNoise(call.generator, num_prompts)
        table = worker.executor.token_table(call.device) if needs_ids(call.processors) else None
        self._table, self._table_rows = table, [] if table is None else table.add(call.input_ids)
        self._search = BeamSearch(
            call.beams, num_prompts, call.processors, call.kinds, noise, call.device, table, self._table_rows
        )
        sequences = new_sequences(call, pool, self, weights_key, batch_key)
        nothing = np.zeros((num_beams, 0), dtype=np.int64)
        self._prompts = [
            _Prompt([sequence] * num_beams, nothing, [nothing[0]] * num_beams) for _, sequence in sequences
        ]
        self._num_missing = 0  # sequences whose logits are waited for
        self._kept: Tensor | None = None  # `[rows, vocab_size]`, those of earlier steps, where one had no room for all
        self._wait_for(sequences)

    def result(self) -> Tensor:
        """`[prompts * num_return_sequences, width + longest]`, as transformers' loop returns it."""
        call, settings = self._call, self._settings
        ids = call.input_ids.unflatten(0, (-1, call.num_samples))
        ids = ids[:, : settings.num_return_sequences].flatten(0, 1)
        return self._filled(ids, settings.fill, call.device)

    def cancel(self) -> None:
        if not self.is_done:
            self.rows = [Row(finish_reason="cancelled")]
            self._end("cancelled")

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            self.error = error
            self._end("error")

    @torch.no_grad()
    def take(self, batch: Batch, rows: list[int], places: list[int], logits: Tensor) -> list[BeamBatch]:
        starts = [int(batch.logit_starts[place]) for place in places]
        for row in rows:
            # Preempted from here on, it is computed again with its next token, not for these logits.
            self._worker.loop.remove(self._sequence(row))
        self._num_missing -= len(rows)
        is_whole = self._kept is None and self._num_missing == 0
        if rows and not is_whole:  # a step had no room for all of them
            if self._kept is None:
                self._kept = logits.new_zeros(len(self._call.input_ids), logits.shape[-1])
            self._kept[to_device(rows, logits.device)] = logits[to_device(starts, logits.device)]
        if self._num_missing or not rows:
            return []
        number_of = self._open_rows()
        self._num_new += 1
        open_prompts = [number for number, prompt in enumerate(self._prompts) if not prompt.is_decided]
        if is_whole:
            start_of = dict(zip(rows, starts, strict=True))
            return [BeamBatch(self._search, open_prompts, self._num_new, [start_of[row] for row in number_of])]
        kept, self._kept = self._kept, None
        assert kept is not None
        return [BeamBatch(self._search, open_prompts, self._num_new, logits=kept[to_device(number_of, kept.device)])]

    def take_tokens(self, rows: list[int], outcome: Outcome) -> None:
        """Receives what was selected for prompts; `rows` are their numbers. See `Run`."""
        if self.is_done:
            return
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Selection)
        for place, number in enumerate(rows):
            self._note(self._prompts[number], outcome, place)
        if self._is_over():
            self._return()
            return
        waiting: list[tuple[int, Sequence]] = []
        for place, number in enumerate(rows):
            prompt = self._prompts[number]
            if self._is_decided(prompt):
                self._drop(prompt, self._reason(prompt.hypotheses[0]))
                continue
            running = outcome.running[place]
            self._fork(prompt, [outcome.parents[place][candidate] for candidate in running])
            for beam, (sequence, candidate) in enumerate(zip(prompt.beams, running, strict=True)):
                self._pool.scheduler.add_placeholder(sequence, -1)  # it is known right away
                self._pool.scheduler.resolve_token(sequence, outcome.tokens[place][candidate])
                waiting.append((number * self._settings.num_beams + beam, sequence))
        self._wait_for(waiting)

    def _wait_for(self, sequences: list[tuple[int, Sequence]]) -> None:
        self._num_missing = len(sequences)
        self._worker.add(self, sequences)

    def _sequence(self, row: int) -> Sequence:
        prompt, beam = divmod(row, self._settings.num_beams)
        return self._prompts[prompt].beams[beam]

    def _open_rows(self) -> list[int]:
        """The rows whose logits the beams of all open prompts have: at first those of a prompt are one sequence."""
        num_beams = self._settings.num_beams
        return [
            number * num_beams + (beam if self._num_new else 0)
            for number, prompt in enumerate(self._prompts)
            if not prompt.is_decided
            for beam in range(num_beams)
        ]

    def _note(self, prompt: _Prompt, outcome: Selection, place: int) -> None:
        """Updates the beams and hypotheses of a prompt; its sequences follow."""
        parents, tokens = outcome.parents[place], outcome.tokens[place]
        num_beams = self._settings.num_beams
        prompt.hypotheses = [
            prompt.hypotheses[index]
            if index < num_beams
            else np.append(prompt.tokens[parents[index - num_beams]], tokens[index - num_beams])
            for index in outcome.finished[place]
        ]
        running = outcome.running[place]
        prompt.tokens = np.concatenate(
            [prompt.tokens[[parents[index] for index in running]], [[tokens[index]] for index in running]], axis=1
        )
        prompt.may_improve = outcome.may_improve[place]
        prompt.is_full = outcome.is_full[place]
        prompt.all_end = outcome.all_end[place]

    def _is_decided(self, prompt: _Prompt) -> bool:
        """Whether later candidates of a prompt are all masked.

        Where tokens are drawn they are drawn for all prompts: those of such a one go on.
        """
        is_closed = not prompt.may_improve or (prompt.is_full and self._settings.early_stopping is True)
        return is_closed and self._call.generator is None

    def _is_over(self) -> bool:
        prompts = self._prompts
        if self._call.generator is None:
            return all(prompt.all_end or prompt.is_decided or self._is_decided(prompt) for prompt in prompts)
        return (
            not any(prompt.may_improve for prompt in prompts)
            or (all(prompt.is_full for prompt in prompts) and self._settings.early_stopping is True)
            or all(prompt.all_end for prompt in prompts)
        )

    def _fork(self, prompt: _Prompt, parents: list[int]) -> None:
        """Has beams go on from others: what a beam leaves is taken over, copied for each further one, or freed."""
        scheduler = self._pool.scheduler
        old, taken = prompt.beams, set()
        prompt.beams = []
        for parent in parents:
            sequence = old[parent]
            prompt.beams.append(scheduler.fork(sequence) if sequence.seq_id in taken else sequence)
            taken.add(sequence.seq_id)
        for sequence in old:
            if sequence.seq_id not in taken:
                taken.add(sequence.seq_id)
                scheduler.free(sequence)

    def _drop(self, prompt: _Prompt, reason: str) -> None:
        prompt.is_decided = True
        for sequence in {sequence.seq_id: sequence for sequence in prompt.beams}.values():
            self._worker.loop.remove(sequence)
            self._pool.scheduler.free(sequence, reason)
        prompt.beams = []

    def _return(self) -> None:
        num_returned = self._settings.num_return_sequences
        # A host read, once a call.
        self.scores = self._search.state.finished[:, :num_returned].flatten().tolist()
        for prompt in self._prompts:
            for hypothesis in prompt.hypotheses[:num_returned]:
                self.rows.append(Row(tokens=hypothesis.tolist(), finish_reason=self._reason(hypothesis)))
        self._end()

    def _reason(self, hypothesis: np.ndarray) -> str:
        if len(hypothesis) and int(hypothesis[-1]) in self._settings.eos:
            return "eos"
        return "length" if len(hypothesis) >= self._settings.max_length - self._settings.prompt_length else "stop"

    def _end(self, reason: str | None = None) -> None:
        for prompt in self._prompts:
            if not prompt.is_decided:
                self._drop(prompt, reason or self._reason(prompt.hypotheses[0]))
        if self._table is not None:
            self._table.remove(self._table_rows)
        self._kept = None
        self._finish()
