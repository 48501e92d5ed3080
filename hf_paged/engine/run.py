"""`Run`: a call inside the engine, for which steps work and its caller waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hf_paged.core.batch import Batch
from hf_paged.core.sequence import Sequence
from hf_paged.engine.kv_pool import KVPool
from hf_paged.kernels.transfers import to_device
from hf_paged.sampling.beams import BeamBatch
from hf_paged.sampling.logprobs import TokenLogprobs
from hf_paged.sampling.sampler import Outcome, SamplingBatch

if TYPE_CHECKING:
    from hf_paged.engine.worker import StepWorker


# torch.multinomial's words, which transformers' loop would have raised
NO_PROBABILITIES = "probability tensor contains either `inf`, `nan` or element < 0"


@dataclass(slots=True)
class Row:
    """One row of a result.

    Attributes:
        sequence: Its keys and values; `None` before its prompt is computed, after its end, and of beams.
        tokens: Generated so far.
        logprobs: How likely they were, if that was asked for.
        num_chosen: How many tokens are chosen, those included that the host doesn't know yet.
        finish_reason: Why it ended.
        drafts: Guesses behind its last token, which the next step verifies.
        chosen: What was chosen behind that token and each draft, as far as it is known; whether it meets a criterion,
            and how likely it was.
        plain_until: With fewer tokens than this it goes on with the token that is chosen, whichever that is. With as
            many it waits until the token is known, and is verified.
    """

    sequence: Sequence | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_chosen: int = 0
    finish_reason: str | None = None
    drafts: list[int] = field(default_factory=list)
    chosen: list[tuple[int, bool, TokenLogprobs | None]] = field(default_factory=list)
    plain_until: float = float("inf")


class Run:
    """Waits for the uncomputed tokens of sequences: a caller's forward, or rows that the engine generates.

    Attributes:
        done: Set at its end; its caller waits for that by `StepWorker.wait`.
        error: Why it failed.
        rows: The rows of the result; a forward has none.
        scores: Of beams only: those of the rows.
        num_drafts: The drafts that were verified.
        num_accepted: Those of them that were right.
        version: Of the model's weights, those of the last step.
        is_assisted: Whether another model guesses its tokens.
        lone: Its row, if it has only one of which only the next token matters: see `LoneRows`.
        chooses_by_tokens: Whether the host must know all tokens of a row before it chooses the next one.
    """

    is_assisted = False
    chooses_by_tokens = False
    lone: Row | None = None

    def __init__(self, pool: KVPool, worker: StepWorker, on_end: Callable[[], None] | None = None) -> None:
        """Begins without rows; `on_end` is called when it is over, with the pool's lock held."""
        self._pool = pool
        self._worker = worker
        self._on_end = on_end
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.rows: list[Row] = []
        self.scores: list[float] | None = None
        self.num_drafts = self.num_accepted = 0
        self.version = 0
        self._versions: list[tuple[int, list[int]]] = []  # earlier ones, and tokens of each row that were chosen then

    @property
    def is_done(self) -> bool:
        """Whether it is over, or has failed."""
        return self.done.is_set()

    @property
    def num_tokens(self) -> int:
        """Tokens generated; of beams none before the end, where it is known which they are."""
        return sum(len(row.tokens) for row in self.rows)

    def note_version(self, version: int, has_in_flight: bool) -> None:
        """What is chosen from here on is of other weights. `has_in_flight`: a step of before is still running."""
        if version != self.version:
            counts = [max(len(row.tokens), row.num_chosen if has_in_flight else 0) for row in self.rows]
            self._versions.append((self.version, counts))
            self.version = version

    def weight_versions(self) -> list[list[int]]:
        """Of each row, those of its tokens."""
        found = []
        for index, row in enumerate(self.rows):
            own: list[int] = []
            for version, counts in self._versions:
                own += [version] * (counts[index] - len(own) if index < len(counts) else 0)  # beams had no rows then
            found.append((own + [self.version] * len(row.tokens))[: len(row.tokens)])
        return found

    def cancel(self) -> None:
        """Ends it as `"cancelled"`. The pool's lock is held, and no step runs."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Ends it with an error. The pool's lock is held."""
        raise NotImplementedError

    def result(self) -> Tensor:
        """What transformers' loop returns."""
        raise NotImplementedError

    # Of each step, with the pool's lock held

    def take(
        self, batch: Batch, rows: list[int], places: list[int], logits: Tensor
    ) -> SequenceOf[SamplingBatch | BeamBatch]:
        """Receives the logits that it asked for.

        Args:
            rows: Its rows of which the step has logits; without any, a chunk was computed that it wants none of.
            places: The rows of the batch that they are.
            logits: `[K, vocab_size]`, in the order of `batch.logit_rows`.

        Returns:
            What is to be chosen from them for rows that the engine samples, or selected for prompts with beams; then
            `add_placeholders` is called for each batch of rows, and `take_tokens` for all when the host knows the
            tokens.
        """
        raise NotImplementedError

    def add_placeholders(self, rows: list[int], place: int) -> None:
        """Notes that tokens are being chosen for rows: those that go on can be scheduled again.

        Args:
            place: Of the first one's among all tokens that the step chooses; the others' follow.
        """
        raise NotImplementedError

    def take_tokens(self, rows: list[int], outcome: Outcome) -> None:
        """Receives tokens chosen for rows (-1: its probabilities are none), or beams selected for prompts.

        Raises:
            Exception: What the outcome is, if any of the rows still waits for it.
        """
        raise NotImplementedError

    # For those below

    def _filled(self, ids: Tensor, fill: int, device: torch.device) -> Tensor:
        """These prompts, each with its row's tokens behind it, on a device."""
        longest = max(len(row.tokens) for row in self.rows)
        new = np.full((len(self.rows), longest), fill, dtype=np.int64)
        for index, row in enumerate(self.rows):
            new[index, : len(row.tokens)] = row.tokens
        return to_device(torch.cat([ids.to(torch.int64), torch.from_numpy(new)], dim=1), device)

    def _finish(self) -> None:
        on_end, self._on_end = self._on_end, None  # it knows this, too
        self.done.set()
        if on_end is not None:
            on_end()
