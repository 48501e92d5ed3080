"""Rows of calls that have one each, of which only the next token matters: a step serves them all at once.

It is what `SampledRun` does for the rows of one call, column by column: a busy server has hundreds of such rows, and a
call of a function for each of them would take longer than a small model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_paged.core.scheduler import Scheduler
from hf_paged.engine.run import NO_PROBABILITIES
from hf_paged.sampling.sampler import choose_one_each


@dataclass(slots=True)
class LoneRows:
    """Some of them, in a step that has logits for each.

    Attributes:
        runs: Whose they are, `SampledRun`s.
        sources: Their rows of the logits.
    """

    runs: list[Any] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def choose(self, logits: Tensor) -> Tensor:
        """`[rows]` int64, their next tokens; see `sample_tokens`."""
        indices = [run.lone.num_chosen for run in self.runs]
        return choose_one_each([run.sampler for run in self.runs], indices, self.sources, logits)

    def add_placeholders(self, scheduler: Scheduler) -> None:
        """See `Run.add_placeholders`; their tokens are the first ones that the step chooses."""
        sequences, places = [], []
        for place, run in enumerate(self.runs):
            row, sequence = run.lone, run.lone.sequence
            if sequence is None:
                continue
            row.num_chosen += 1
            if row.num_chosen >= run.limit or sequence.num_tokens >= run.max_context:
                sequence.is_wanted = False  # preempted now, it is not to be computed again
            else:
                sequences.append(sequence)
                places.append(place)
        scheduler.add_placeholders(sequences, places)

    def fail(self, error: Exception) -> None:
        """Ends the runs that still wait for the step's tokens."""
        for run in self.runs:
            run.fail(error)

    def take_tokens(self, tokens: list[int], scheduler: Scheduler) -> None:
        """See `Run.take_tokens`."""
        sequences, known = [], []
        for run, token in zip(self.runs, tokens, strict=True):
            row, sequence = run.lone, run.lone.sequence
            if sequence is None:
                continue  # it has ended since: that step began before its last token was known
            if token < 0:
                run.fail(RuntimeError(NO_PROBABILITIES))
                continue
            row.tokens.append(token)
            try:
                if run.on_token is not None:
                    run.on_token(0, token, None, True)
            except Exception as error:
                run.fail(error)
                continue
            if token in run.eos:
                run.end_row(row, "eos")
            elif len(row.tokens) >= run.limit:
                run.end_row(row, "length")
            elif len(sequence.token_ids) == sequence.num_tokens:  # no further than the model's context before
                sequence.is_wanted = True
                scheduler.add_placeholders([sequence], [-1])
                scheduler.resolve_tokens([sequence], [token])
            else:
                sequences.append(sequence)
                known.append(token)
        scheduler.resolve_tokens(sequences, known)
