"""Choosing the next tokens of many calls' rows at once, on the device that their logits are on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_paged.kernels.transfers import ToHost, to_device
from hf_paged.sampling import kernel_rows
from hf_paged.sampling.beams import Selection
from hf_paged.sampling.grammar import GrammarMatcher, mask_tokens
from hf_paged.sampling.logprobs import Logprobs, LogprobsWanted, TokenLogprobs
from hf_paged.sampling.processors import process
from hf_paged.sampling.random import NoiseAhead, SamplingNoise, StepNoise
from hf_paged.sampling.token_table import TokenTable


class RowSampler:
    """How the rows of one call choose their tokens.

    Attributes:
        kind: Rows of one kind are processed together, whatever their calls and steps; `None`: only those of this call
            that are at one step.
        noise: Where draws come from; `None`: the likeliest token is taken.
        criteria: transformers' own, row-wise, that a row's tokens may meet; `None`: there are none.
        table: The tokens of the call's rows, where processors or criteria look at them: one for all calls on a device.
        table_rows: The rows of `table` that are the call's.
        width: Tokens of each row before the first that is generated.
        device: Where scores are processed, as in transformers' loop: the prompt's; `None`: where they are.
        logprobs: What is to be said of each token; `None`: nothing.
        matchers: Of each row, the grammar that it follows; `None`: there are none.
        is_plain: The largest logit decides.
        told: What a kernel is told that chooses the tokens; `None`: there is none, or it can't do what is asked for.
    """

    def __init__(
        self,
        processors: Sequence[Any],
        noise: SamplingNoise | NoiseAhead | StepNoise | None,
        kinds: list[Hashable],
        criteria: Callable[[Tensor, Any], Tensor] | None = None,
        table: TokenTable | None = None,
        table_rows: Sequence[int] = (),
        width: int = 0,
        device: torch.device | None = None,
        logprobs: LogprobsWanted | None = None,
        matchers: Sequence[GrammarMatcher] | None = None,
        has_kernel: bool = False,
    ) -> None:
        """Takes `kinds` from `processor_kinds(processors)`. Criteria and `needs_ids(processors)` need a `table`.

        `has_kernel`: there is one where the logits are, and scores are processed there.
        """
        self.processors = list(processors)
        self.noise = noise
        self.criteria = criteria
        self.table = table
        self.table_rows = table_rows
        self.width = width
        self.device = device
        self.logprobs = logprobs
        self.matchers = matchers
        self.kind: Hashable = None if None in kinds else (noise is None, device, logprobs, matchers is None, *kinds)
        self.is_plain = noise is None and not self.processors and matchers is None
        self.told: kernel_rows.ToldRow | None = None
        if has_kernel and not (logprobs is not None and logprobs.needs_scores):
            self.told = kernel_rows.told_row(self.processors, noise)
        if self.told is not None:
            self.kind = ("kernel", logprobs)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Rows of one call that are to choose a token; a row with drafts is there once more for each of them.

    Attributes:
        token_indices: How many tokens each has generated before that one, drafts included; all the same, if the call's
            processors are not batched.
        sources: Their rows of the logits.
        oldest_index: No row of the call will come to an earlier one any more.
    """

    sampler: RowSampler
    rows: list[int]
    token_indices: list[int]
    sources: list[int]
    oldest_index: int

    @property
    def table_rows(self) -> list[int]:
        return [self.sampler.table_rows[row] for row in self.rows]

    @property
    def matchers(self) -> list[GrammarMatcher]:
        return [] if self.sampler.matchers is None else [self.sampler.matchers[row] for row in self.rows]

    @property
    def lengths(self) -> list[int]:
        """Tokens that its rows have, padding included."""
        return [self.sampler.width + index for index in self.token_indices]

    def noise(self, like: Tensor) -> Tensor:
        """`[len(rows), vocab_size]`, of the dtype and on the device of `like`."""
        assert self.sampler.noise is not None
        return self.sampler.noise.at(self.token_indices, self.rows, like, self.oldest_index)


class Chosen(NamedTuple):
    """Tokens of a batch's rows, whether they meet criteria, and how likely they were, if that was asked for."""

    tokens: list[int]
    stops: list[bool]
    logprobs: list[TokenLogprobs] | None


Outcome = Chosen | Selection | Exception


class SampledTokens:
    """Tokens that were chosen, on the device, and on their way to the host.

    Attributes:
        tokens: `[N]` int64, -1 for a row whose probabilities are none (NaN); first those that were chosen before.
        first: Those, on the host, once `read` has been called.
        places: For each batch, where in `tokens` its rows' begin; or what its processors or criteria raised.
    """

    def __init__(
        self,
        tokens: Tensor,
        places: list[int | Exception],
        lengths: list[int],
        stops: dict[int, Tensor],
        logprobs: list[tuple[int, Logprobs]],
        num_first: int = 0,
    ) -> None:
        """Queues the transfer to the host.

        Args:
            stops: By number of the batch, `[rows]` bool: which of them meet the call's criteria.
            logprobs: Of tokens from a place in `tokens` on.
            num_first: How many were chosen before, of no batch.
        """
        self.tokens = tokens
        self.places = places
        self.first: list[int] = []
        self._num_first = num_first
        self._lengths = lengths
        self._stops = list(stops)
        self._logprobs = logprobs
        flags = [own.to(tokens.device, tokens.dtype) for own in stops.values()]
        self._to_host = ToHost(torch.cat([tokens, *flags]) if flags else tokens)

    def read(self) -> list[Chosen | Exception]:
        """Returns the outcome of each batch. Waits until the step that computes them is over."""
        # The one host read of a step: streams, ends of sequences and block hashes are the host's.
        found = self._to_host.wait().tolist()
        self.first = found[: self._num_first]
        stops: dict[int, list[bool]] = {}
        start = len(self.tokens)
        for number in self._stops:
            stops[number] = [bool(stop) for stop in found[start : start + self._lengths[number]]]
            start += self._lengths[number]
        said: dict[int, TokenLogprobs] = {}
        for first, logprobs in self._logprobs:
            said.update(enumerate(logprobs.read(), first))
        return [
            place
            if isinstance(place, Exception)
            else Chosen(
                found[place : place + length],
                stops.get(number, [False] * length),
                [said[token] for token in range(place, place + length)] if place in said else None,
            )
            for number, (place, length) in enumerate(zip(self.places, self._lengths, strict=True))
        ]


@torch.inference_mode()
def sample_tokens(batches: Sequence[SamplingBatch], logits: Tensor, first: Tensor | None = None) -> SampledTokens:
    """The next token of every row: exactly those that transformers' own loop chooses. Waits for nothing.

    Args:
        batches: Rows that are to get a token. Tables of tokens are written to.
        logits: `[K, vocab_size]`.
        first: Tokens that are chosen already (`choose_one_each`).
    """
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for number, batch in enumerate(batches):
        kind = batch.sampler.kind
        kinds[(id(batch.sampler), batch.token_indices[0]) if kind is None else kind].append(number)
    places: list[int | Exception] = [0] * len(batches)
    stops: dict[int, Tensor] = {}
    chosen: list[Tensor] = [] if first is None else [first]
    logprobs: list[tuple[int, Logprobs]] = []
    num_first = num_tokens = 0 if first is None else len(first)

    def choose(members: list[int]) -> None:
        nonlocal num_tokens
        tokens, said = _choose([batches[number] for number in members], logits)
        if said is not None:
            logprobs.append((num_tokens, said))
        chosen.append(tokens if tokens.device == logits.device else tokens.to(logits.device))
        for number in members:
            places[number] = num_tokens
            num_tokens += len(batches[number].rows)

    for members in kinds.values():
        try:
            choose(members)
        except Exception as error:  # of one row's scores: whose?
            if len(members) == 1:
                places[members[0]] = error
                continue
            for number in members:
                try:
                    choose([number])
                except Exception as own_error:
                    places[number] = own_error
    for number, batch in enumerate(batches):
        sampler = batch.sampler
        if sampler.criteria is not None and sampler.table is not None and not isinstance(places[number], Exception):
            try:
                stops[number] = _stops(sampler.criteria, sampler.table, batch)
            except Exception as error:
                places[number] = error
    # The usual step chooses once.
    tokens = chosen[0] if len(chosen) == 1 else torch.cat(chosen or [logits.new_empty(0, dtype=torch.int64)])
    return SampledTokens(tokens, places, [len(batch.rows) for batch in batches], stops, logprobs, num_first)


@torch.inference_mode()
def choose_one_each(samplers: list[RowSampler], indices: list[int], sources: list[int], logits: Tensor) -> Tensor:
    """`[rows]` int64, the tokens of calls of one row each, all of which are plain, or told to a kernel.

    Args:
        samplers: Of each call.
        indices: How many tokens its row has generated before.
        sources: Its row of the logits.
        logits: `[K, vocab_size]`.
    """
    if False in [sampler.is_plain for sampler in samplers]:
        return kernel_rows.choose(kernel_rows.Columns(samplers, [0] * len(samplers), indices, sources), logits)
    return _at(sources, logits).to(torch.float32).argmax(dim=-1)


def _stops(criteria: Callable[[Tensor, Any], Tensor], table: TokenTable, batch: SamplingBatch) -> Tensor:
    """`[rows]`: which rows meet a criterion with their new token.

    Criteria see rows of one length, as in transformers' loop: they look at the ends of rows.
    """
    lengths = np.array(batch.lengths)
    places, found = [], []
    for length in np.unique(lengths).tolist():
        own = np.flatnonzero(lengths == length).tolist()
        places += own
        found.append(criteria(table.read([batch.table_rows[row] for row in own], [length + 1] * len(own)), None))
    if len(found) == 1:
        return found[0]
    return torch.cat(found)[to_device(np.argsort(places), found[0].device)]


def _choose(batches: list[SamplingBatch], logits: Tensor) -> tuple[Tensor, Logprobs | None]:
    """`[rows]` tokens of batches of one kind, and how likely they were, if they ask for it."""
    samplers = [batch.sampler for batch in batches]
    first = samplers[0]
    if first.told is not None and not all(sampler.is_plain for sampler in samplers):
        tokens = kernel_rows.choose(kernel_rows.Columns.of(batches), logits)
        wanted = first.logprobs
        return tokens, None if wanted is None else Logprobs(_own(batches, logits).float(), tokens, wanted.num_top)
    logits = _own(batches, logits)
    scores = raw = logits.to(first.device or logits.device, torch.float32)
    lengths = [len(batch.rows) for batch in batches]
    if first.matchers is not None:
        scores = mask_tokens(scores, [matcher for batch in batches for matcher in batch.matchers])

    def read(marks_ends: bool) -> Tensor:
        assert first.table is not None  # then all of them have their tokens in it
        return first.table.read(*_table_rows(batches), marks_ends)

    scores = process([sampler.processors for sampler in samplers], lengths, scores, read, lambda: _num_tokens(batches))
    if first.noise is None:
        tokens = scores.argmax(dim=-1)
    else:
        probs = scores.softmax(dim=-1)
        noise = kernel_rows.draw(batches, probs) if len(batches) > 1 else batches[0].noise(probs)
        if noise is None:
            noise = torch.cat([batch.noise(probs) for batch in batches])
        tokens = (probs / noise).argmax(dim=-1)
        # A row with a NaN anywhere is all NaN behind the softmax.
        is_number = probs.gather(1, tokens[:, None])[:, 0] >= 0
        tokens = torch.where(is_number, tokens, -1)
    parts = zip(batches, tokens.split(lengths), strict=True)
    noted = [(batch, part) for batch, part in parts if batch.sampler.table is not None]
    if noted:
        table = noted[0][0].sampler.table
        assert table is not None
        table.write(*_table_rows([batch for batch, _ in noted]), torch.cat([part for _, part in noted]).clamp(min=0))
    wanted = first.logprobs
    if wanted is None:
        return tokens, None
    own = scores if wanted.is_processed else raw
    return tokens, Logprobs(own, tokens, wanted.num_top, drawn_from=scores if wanted.has_support else None)


def _own(batches: list[SamplingBatch], logits: Tensor) -> Tensor:
    """`[rows, vocab_size]`, those of the logits that are the batches'."""
    return _at([source for batch in batches for source in batch.sources], logits)


def _at(sources: list[int], logits: Tensor) -> Tensor:
    return logits if sources == list(range(logits.shape[0])) else logits[to_device(sources, logits.device)]


def _table_rows(batches: list[SamplingBatch]) -> tuple[list[int], list[int]]:
    """The places of all their rows' tokens, and how many each row has."""
    rows = [row for batch in batches for row in batch.table_rows]
    return rows, _num_tokens(batches)


def _num_tokens(batches: list[SamplingBatch]) -> list[int]:
    return [length for batch in batches for length in batch.lengths]
