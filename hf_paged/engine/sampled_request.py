"""`SampledRequest`: a greedy or sampling call whose rows the engine drives, each as fast as it gets its logits."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_paged.core.batch import Batch
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import GivenPrompt, Sequence
from hf_paged.engine.call_context import call_context
from hf_paged.engine.draft_model import DraftModel
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.worker import StepWorker
from hf_paged.kernels.transfers import to_device
from hf_paged.model.weights_version import WeightsKey
from hf_paged.sampling.beams import BeamSettings
from hf_paged.sampling.grammar import Grammar
from hf_paged.sampling.logprobs import LogprobsWanted, TokenLogprobs
from hf_paged.sampling.lookup import LookupSettings
from hf_paged.sampling.processors import RowEnds, needs_ids, processor_kinds
from hf_paged.sampling.random import NoiseAhead, SamplingNoise, StepNoise
from hf_paged.sampling.sampler import Chosen, Outcome, RowSampler, SamplingBatch
from hf_paged.sampling.token_table import TokenTable

# Row, token, what is said of it, and whether no other follows at the same moment.
TokenCallback = Callable[[int, int, TokenLogprobs | None, bool], None]


@dataclass(slots=True)
class SampleCall:
    """What transformers prepared for its `_sample` loop, and what the host has to know of it.

    Attributes:
        input_ids: `[rows, width]` on the CPU, left-padded; the rows of a prompt's `num_samples` samples follow each
            other.
        padding: Left padding of each row.
        num_samples: Rows of each prompt, samples or beams.
        processors: Row-wise ones of transformers.
        criteria: Row-wise ones of transformers.
        device: Where the caller had the prompts: there tokens are chosen, and there the result is to be.
        do_sample: Draw, or take the likeliest token.
        pad_token_id: What stands behind the end of a row that finished before others.
        generator: Where draws come from; owned by the run.
        noise: The same, if they are another call's.
        priority: Of its sequences.
        request_id: The request that it is.
        given: Of each prompt, its tokens, if these are not all ids.
        logprobs: What is to be said of each token.
        grammar: What each row is to follow.
        beams: How they are searched, if a prompt's rows are beams.
        lookup: How drafts of its rows are looked up, if that is where they come from.
        draft_model: The same, if they come from another model.
        prompts: The rows' tokens, without padding.
        kinds: Of `processors`, what the sampler has to know.
        ends: What ends a row.
    """

    input_ids: Tensor
    padding: list[int]
    num_samples: int
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    device: torch.device
    do_sample: bool
    pad_token_id: int
    generator: torch.Generator | None = None
    noise: NoiseAhead | None = None
    priority: int = 0
    request_id: str | None = None
    given: list[GivenPrompt] | None = None
    logprobs: LogprobsWanted | None = None
    grammar: Grammar | None = None
    beams: BeamSettings | None = None
    lookup: LookupSettings | None = None
    draft_model: DraftModel | None = None
    prompts: list[list[int]] = field(init=False)
    kinds: list[Hashable] = field(init=False)
    ends: RowEnds = field(init=False)

    @property
    def has_drafts(self) -> bool:
        """Whether its rows' tokens are guessed before they are chosen."""
        return self.lookup is not None or self.draft_model is not None

    def __post_init__(self) -> None:
        self.prompts = [row[pad:] for row, pad in zip(self.input_ids.tolist(), self.padding, strict=True)]
        self.kinds = processor_kinds(self.processors)
        self.ends = RowEnds.of(self.criteria)


def new_sequences(
    call: SampleCall, pool: KVPool, owner: object, weights_key: WeightsKey, batch_key: Hashable
) -> list[tuple[int, Sequence]]:
    """A sequence for each prompt of a call, in a group of its own, and the first of the prompt's rows.

    The pool's lock is held.
    """
    found: list[tuple[int, Sequence]] = []
    salt = () if (salt := call_context().cache_salt) is None else (salt,)
    for row in range(0, len(call.input_ids), call.num_samples):
        group = pool.scheduler.new_group(call.priority, batch_key, owner, call.request_id)
        sequence = pool.scheduler.new_sequence(group)
        if call.given is None:
            sequence.token_ids = call.prompts[row].copy()
        else:
            prompt = call.given[row // call.num_samples]
            sequence.token_ids, sequence.spans = prompt.token_ids.copy(), prompt.spans
            sequence.position_offset, sequence.given_end = prompt.position_offset, len(prompt.token_ids)
        sequence.num_tokens = sequence.num_prompt_tokens = sequence.num_at_once = len(sequence.token_ids)
        sequence.logits_from = sequence.num_tokens - 1
        sequence.extra_key = (*weights_key, sequence.position_offset, *salt)
        found.append((row, sequence))
    return found


@dataclass(slots=True)
class Row:
    """One row of the result.

    Attributes:
        sequence: Its keys and values; `None` before its prompt is computed and after its end.
        tokens: Generated so far.
        logprobs: How likely they were, if that was asked for.
        num_chosen: The same, and those that the device knows already and the host doesn't.
        finish_reason: Why it ended.
    """

    sequence: Sequence | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_chosen: int = 0
    finish_reason: str | None = None


class SampledRequest:
    """Rows that are scheduled, sampled and finished one by one.

    Whatever runs beside it, and whichever of its rows are ahead, the tokens are those of transformers' loop over the
    whole batch: processors and criteria are transformers' own and look at one row at a time, and noise belongs to a
    token and a row.

    Attributes:
        rows: The rows of the result.
        error: Why it failed.
        scores: Of beams only: there are none here.
        num_drafts: Drafts that were verified; none here.
        num_accepted: Those of them that were right.
    """

    num_drafts = 0
    num_accepted = 0

    def __init__(
        self,
        call: SampleCall,
        pool: KVPool,
        worker: StepWorker,
        weights_key: WeightsKey,
        batch_key: Hashable,
        on_token: TokenCallback | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Queues the prompts. The pool's lock is held.

        Args:
            call: What to generate.
            pool: Tables and scheduler.
            worker: Runs the steps.
            weights_key: State of the model's weights, part of the prefix-cache key.
            batch_key: Rows of another key never share a step with these.
            on_token: Called with every token of every row, with the pool's lock held: it must only hand it on.
            on_end: Called when the run is over, with the pool's lock held.
        """
        self._call = call
        self._pool = pool
        self._worker = worker
        self._on_token = on_token
        self._on_end = on_end
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.scores: list[float] | None = None
        num_rows, self._width = call.input_ids.shape
        # Of new tokens, which no row may have more of.
        self._limit = float("inf") if call.ends.max_length is None else call.ends.max_length - self._width
        self.rows = [Row() for _ in range(num_rows)]
        self._num_open = num_rows
        self._max_context = pool.max_context
        self._noise = call.noise if call.generator is None else self._new_noise(call.generator, num_rows)
        self._matchers = None if call.grammar is None else call.grammar.matchers(num_rows)
        self._table: TokenTable | None = None
        self._table_rows: list[int] = []
        if call.ends.others is not None or needs_ids(call.processors):
            # Prompt, padding and generated tokens: what transformers would hand to processors and criteria.
            self._table = worker.token_table(call.device)
            self._table_rows = self._table.add(call.input_ids)
        # The largest logit is the same everywhere: bringing all of them to a prompt on the CPU would hold up the step.
        is_argmax = not call.do_sample and not call.processors and self._table is None
        stays = is_argmax and call.device != pool.kv_device
        self._sampler = RowSampler(
            call.processors,
            self._noise,
            call.kinds,
            criteria=call.ends.others,
            table=self._table,
            table_rows=self._table_rows,
            width=self._width,
            device=None if stays else call.device,
            logprobs=call.logprobs,
            matchers=self._matchers,
        )
        prompts = new_sequences(call, pool, self, weights_key, batch_key)
        for row, sequence in prompts:
            self.rows[row].sequence = sequence
        self._begin()
        worker.add(self, prompts)

    def _new_noise(self, generator: torch.Generator, num_rows: int) -> SamplingNoise | StepNoise:
        return SamplingNoise(generator, num_rows)

    def _begin(self) -> None:
        """What is to be done with the prompts before they are queued."""

    @property
    def is_done(self) -> bool:
        """Whether all rows have ended, or the run has failed."""
        return self._done.is_set()

    @property
    def is_assisted(self) -> bool:
        """Whether another model guesses its tokens."""
        return self._call.draft_model is not None

    @property
    def num_new_columns(self) -> int:
        """New columns of the result: tokens of its longest row."""
        return max(len(row.tokens) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(row.tokens) for row in self.rows)

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is over; False if the timeout (seconds) is over first."""
        return self._worker.wait(self, self._done, timeout)

    def run_alone(self, between: Callable[[], bool]) -> None:
        """Runs the steps here while this thread leads; see `StepWorker.run_alone`."""
        self._worker.run_alone(self._done, between)

    def result(self) -> Tensor:
        """`[rows, width + steps]`, as transformers' loop returns it."""
        ids = self._call.input_ids.to(torch.int64)
        new = np.full((len(self.rows), self.num_new_columns), self._call.pad_token_id, dtype=np.int64)
        for index, row in enumerate(self.rows):
            new[index, : len(row.tokens)] = row.tokens
        return to_device(torch.cat([ids, torch.from_numpy(new)], dim=1), self._call.device)

    def cancel(self) -> None:
        """Ends all open rows as `"cancelled"`. The pool's lock is held, and no step runs."""
        for row in self.rows:
            self._end(row, "cancelled")

    def cancel_row(self, index: int) -> None:
        """Ends one row that has tokens as `"cancelled"`. The pool's lock is held, and no step runs."""
        self._end(self.rows[index], "cancelled")

    # LogitsConsumer

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            self.error = error
            for row in self.rows:
                self._end(row, "error")

    def take(self, batch: Batch, rows: list[int], places: list[int], logits: Tensor) -> list[SamplingBatch]:
        oldest, starts = self._oldest_index(), batch.logit_starts
        return [
            SamplingBatch(self._sampler, samples, token_index, sources, oldest)
            for token_index, samples, sources in self._by_index(rows, [starts[place] for place in places])
        ]

    def add_placeholders(self, rows: list[int], place: int) -> None:
        scheduler = self._pool.scheduler
        for own, index in enumerate(rows, place):
            row = self.rows[index]
            sequence = row.sequence
            if sequence is None:  # another row of the call has just failed
                continue
            row.num_chosen += 1
            # A position that the model may not have is not tried before it is known that the row gets there; and what
            # a grammar allows next is known when the token is.
            waits = sequence.num_tokens >= self._max_context or self._matchers is not None
            if row.num_chosen >= self._limit or waits:
                sequence.is_wanted = False  # preempted now, it is not to be computed again
            else:
                scheduler.add_placeholder(sequence, own)

    def take_tokens(self, rows: list[int], outcome: Outcome) -> None:
        # A row may have ended since: that step began before its last token was known.
        is_open = [self.rows[row].finish_reason is None for row in rows]
        if not any(is_open):
            return
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Chosen)
        tokens, stops, logprobs = outcome
        if logprobs is not None:
            for row, said in compress(zip(rows, logprobs, strict=True), is_open):
                self.rows[row].logprobs.append(said)
        scheduler = self._pool.scheduler
        for row, token, stop in compress(zip(rows, tokens, stops, strict=True), is_open):
            self._append(scheduler, row, token, stop)

    def _by_index(self, rows: list[int], starts: list[int]) -> list[tuple[int, list[int], list[int]]]:
        """Rows whose result has the same length, and where their logits are: usually all rows."""
        by_index: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        is_split = self._call.num_samples > 1
        for row, start in zip(rows, starts, strict=True):
            for sample in range(row, row + self._split(row)) if is_split else (row,):
                samples, sources = by_index[self.rows[sample].num_chosen]
                samples.append(sample)
                sources.append(start)
        return [(token_index, *by_index[token_index]) for token_index in sorted(by_index)]

    def _oldest_index(self) -> int:
        """Tokens of the open row that is furthest behind, as far as the host knows: the run may end there."""
        if len(self.rows) == 1:
            return len(self.rows[0].tokens)
        return min((len(row.tokens) for row in self.rows if row.finish_reason is None), default=0)

    def _split(self, row: int) -> int:
        """Once a prompt is computed each of its samples gets a sequence; returns how many rows these logits are for."""
        first = self.rows[row]
        if first.num_chosen:
            return 1
        assert first.sequence is not None
        for sample in range(row + 1, row + self._call.num_samples):
            self.rows[sample].sequence = child = self._pool.scheduler.fork(first.sequence)
            self._worker.add(self, [(sample, child)])
        return self._call.num_samples

    def _append(self, scheduler: Scheduler, index: int, token: int, stops: bool) -> None:
        row = self.rows[index]
        reason = self._note_token(index, token, stops)
        if self._on_token is not None:
            self._on_token(index, token, row.logprobs[-1] if row.logprobs else None, True)
        if reason is not None:
            self._end(row, reason)
            return
        assert row.sequence is not None
        if not row.sequence.has_placeholders:
            row.sequence.is_wanted = True
            scheduler.add_placeholder(row.sequence, -1)  # it is known right away
        scheduler.resolve_token(row.sequence, token)

    def _note_token(self, index: int, token: int, stops: bool) -> str | None:
        """One more token of a row; returns why the row ends with it, if it does."""
        if token < 0:  # torch.multinomial's words, which transformers' loop would have raised
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        row = self.rows[index]
        row.tokens.append(token)
        is_complete = self._matchers is not None and self._matchers[index].accept(token)
        if token in self._call.ends.eos:
            return "eos"
        if stops or is_complete:
            return "stop"
        return "length" if len(row.tokens) >= self._limit else None

    def _end(self, row: Row, reason: str) -> None:
        if row.finish_reason is not None:
            return
        row.finish_reason = reason
        if row.sequence is not None:
            self._worker.loop.remove(row.sequence)
            self._pool.scheduler.free(row.sequence, reason)
            row.sequence = None
        self._num_open -= 1
        if self._num_open == 0:
            on_end, self._on_end, self._on_token = self._on_end, None, None  # they know it, too
            if self._table is not None:
                self._table.remove(self._table_rows)
            if isinstance(self._noise, SamplingNoise):
                self._noise.rewind(self.num_new_columns)
            self._done.set()
            if on_end is not None:
                on_end()
