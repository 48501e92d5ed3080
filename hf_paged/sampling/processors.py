"""A table of transformers' logits processors and criteria: how rows of several calls may share them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import logits_process

from hf_paged.kernels.transfers import to_device
from hf_paged.sampling.controls import GeneratedTokenPenalties, TokenBias
from hf_paged.sampling.top_p import short_top_p

Process = Callable[[Any, Tensor], Tensor]  # scores from the tokens so far and scores, both of some rows
_ToColumn = Callable[[Sequence[Any], type[np.generic]], Tensor]  # `[rows, 1]` from each processor's value


@dataclass(frozen=True, slots=True)
class Treatment:
    """The ways in which the rows of a processor may be treated.

    Attributes:
        is_batched: It doesn't matter how long a row is: rows of different calls and steps meet in one call of the
            processor, if all of its settings but `column` are equal.
        reads_ids: It looks at the tokens so far; if batched, at which they are, not where.
        column: A setting of which each row may have its own value.
        merge: Makes one processor for all rows of one of them, the column's name and each one's value; also given what
            makes a column of such values, and the vocabulary's size.
        counts_ids: It looks at how often tokens are there: behind the end of a shorter row it is to be given -1.
        least: Settings whose sum is a number of tokens: rows with fewer are processed, all others left as they are,
            and nothing else of the tokens matters. Each row may have its own.
        shortcut: Gives what the processor, merged or not, makes of scores on CPU, with less work.
    """

    is_batched: bool = False
    reads_ids: bool = True
    column: str | None = None
    merge: Callable[[Any, str, list[Any], _ToColumn, int], Process] | None = None
    counts_ids: bool = False
    least: tuple[str, ...] = ()
    shortcut: Callable[[Any, Tensor], Tensor] | None = None


class _Divisor:
    """Divides scores and multiplies them, as a Python number does: a GPU multiplies by a number's reciprocal.

    (`div_true_kernel_cuda` in ATen/native/cuda/BinaryDivTrueKernel.cu; float32.)
    """

    def __init__(self, column: Tensor) -> None:
        self._column = column

    def __rtruediv__(self, scores: Tensor) -> Tensor:
        return scores * self._column.reciprocal() if scores.device.type == "cuda" else scores / self._column

    def __rmul__(self, scores: Tensor) -> Tensor:
        return scores * self._column


def _with(processor: Any, name: str, value: Any) -> Process:
    other: Process = copy.copy(processor)
    setattr(other, name, value)
    return other


def _numbers(processor: Any, name: str, values: list[Any], to_column: _ToColumn, _vocab_size: int) -> Process:
    return _with(processor, name, to_column(values, np.float32))


def _divisors(processor: Any, name: str, values: list[Any], to_column: _ToColumn, _vocab_size: int) -> Process:
    return _with(processor, name, _Divisor(to_column(values, np.float32)))


def _top_p(processor: Any, name: str, values: list[Any], to_column: _ToColumn, _vocab_size: int) -> Process:
    # transformers compares float32 with `1 - top_p`, rounded to float32.
    return _with(processor, name, to_column([1 - float(np.float32(1 - value)) for value in values], np.float64))


def _top_k(processor: Any, _name: str, values: list[Any], to_column: _ToColumn, vocab_size: int) -> Process:
    counts = [min(value, vocab_size) for value in values]
    column = to_column(counts, np.int64)

    def process(_input_ids: Any, scores: Tensor) -> Tensor:
        best = torch.topk(scores, max(counts), dim=-1)[0]
        return scores.masked_fill(scores < best.gather(1, column - 1), processor.filter_value)

    return process


def _penalties(processor: Any, name: str, values: list[Any], to_column: _ToColumn, _vocab_size: int) -> Process:
    presence, frequency, start = zip(*values, strict=True)
    columns = to_column(presence, np.float32), to_column(frequency, np.float32), to_column(start, np.int64)
    return _with(processor, name, columns)


def _biases(_processor: Any, _name: str, values: list[Any], to_column: _ToColumn, _vocab_size: int) -> Process:
    which = to_column(list(range(len(values))), np.int64)[:, 0]

    def process(_input_ids: Any, scores: Tensor) -> Tensor:
        return scores + torch.stack([value.like(scores) for value in values])[which]

    return process


_ALONE = Treatment()
_BATCHED = Treatment(is_batched=True, reads_ids=False)


def _column(name: str, merge: Callable[..., Process], reads_ids: bool = False) -> Treatment:
    return Treatment(True, reads_ids, name, merge)


def _until(*names: str) -> Treatment:
    return Treatment(is_batched=True, reads_ids=False, least=names)


# Processors that look at each row by itself and remember nothing: a row that has left the batch cannot change what they
# do to the others. Whatever is not listed, a user's own first of all, sees every row. By name, for no version of
# transformers has all of them.
_TREATMENTS = {
    "EpsilonLogitsWarper": _BATCHED,
    "EtaLogitsWarper": _BATCHED,
    "ExponentialDecayLengthPenalty": _ALONE,
    "ForcedBOSTokenLogitsProcessor": _ALONE,
    "ForcedEOSTokenLogitsProcessor": _ALONE,
    "InfNanRemoveLogitsProcessor": _BATCHED,
    "LogitNormalization": _BATCHED,
    "MinLengthLogitsProcessor": _until("min_length"),
    "MinNewTokensLengthLogitsProcessor": _until("prompt_length_to_skip", "min_new_tokens"),
    "MinPLogitsWarper": _column("min_p", _numbers),
    "NoBadWordsLogitsProcessor": _ALONE,
    "NoRepeatNGramLogitsProcessor": _ALONE,
    "RepetitionPenaltyLogitsProcessor": _column("penalty", _divisors, reads_ids=True),
    "SequenceBiasLogitsProcessor": _ALONE,
    "SuppressTokensAtBeginLogitsProcessor": _ALONE,
    "SuppressTokensLogitsProcessor": _BATCHED,
    "TemperatureLogitsWarper": _column("temperature", _divisors),
    "TopHLogitsWarper": _ALONE,
    "TopKLogitsWarper": _column("top_k", _top_k),
    "TopPLogitsWarper": Treatment(True, False, "top_p", _top_p, shortcut=short_top_p),
    "TypicalLogitsWarper": _BATCHED,
    "WhisperTimeStampLogitsProcessor": _ALONE,
}
PROCESSORS: dict[type, Treatment] = {
    kind: treatment
    for name, treatment in _TREATMENTS.items()
    if (kind := getattr(logits_process, name, None)) is not None
} | {
    GeneratedTokenPenalties: Treatment(True, counts_ids=True, column="settings", merge=_penalties),
    TokenBias: _column("bias", _biases),
}
# The same of stopping criteria. The first two are the host's, which knows a row's tokens and their number.
CRITERIA: set[type] = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}


def are_row_wise(items: Iterable[Any]) -> bool:
    """Whether each of these processors and criteria looks at each row by itself, and remembers nothing."""
    return all(type(item) in PROCESSORS or type(item) in CRITERIA for item in items)


def take_any_rows(processors: Iterable[Any]) -> bool:
    """Whether row-wise processors can be given some of the call's rows without the others."""
    # One number a row, given for the whole batch.
    return not any(isinstance(getattr(item, "prompt_ignore_length", None), Tensor) for item in processors)


def needs_ids(processors: Iterable[Any]) -> bool:
    return any(PROCESSORS.get(type(processor), _ALONE).reads_ids for processor in processors)


def change_as_rows_grow(processors: Iterable[Any]) -> bool:
    """Whether what these processors do depends on the tokens so far: on which they are, or how many."""
    processors = list(processors)
    return needs_ids(processors) or any(PROCESSORS[type(processor)].least for processor in processors)


def processor_kinds(processors: Iterable[Any]) -> list[Hashable]:
    """What each must have in common with those of other calls to become one with them; `None` if it can't."""
    return [_kind(processor) for processor in processors]


def _kind(processor: Any) -> Hashable:
    treatment = PROCESSORS.get(type(processor), _ALONE)
    if not treatment.is_batched:
        return None
    if getattr(processor, "prompt_ignore_length", None) is not None:  # looks where tokens are
        return None
    own = {treatment.column, *treatment.least}  # of which each row may have its own value
    settings = ((key, _plain(value)) for key, value in sorted(vars(processor).items()) if key not in own)
    return type(processor), tuple(settings)


def _plain(value: Any) -> Hashable:
    if isinstance(value, Tensor) and value.device.type == "cuda":  # a caller's own, not worth waiting for
        return id(value)
    return tuple(value.reshape(-1).tolist()) if isinstance(value, Tensor) else repr(value)


def merged_processor(processors: Sequence[Any], lengths: list[int], scores: Tensor) -> Process:
    """One processor of one kind for the rows of all: `lengths` says how many rows of `scores` `[rows, vocab_size]` each
    has.
    """
    first: Process = processors[0]
    treatment = PROCESSORS.get(type(first), _ALONE)
    if treatment.column is None or treatment.merge is None:
        return first
    values = [getattr(processor, treatment.column) for processor in processors]
    if values.count(values[0]) == len(values):
        return first

    def to_column(values: Sequence[Any], dtype: type[np.generic]) -> Tensor:
        return to_device(np.repeat(np.array(values, dtype=dtype), lengths)[:, None], scores.device)

    return treatment.merge(first, treatment.column, values, to_column, scores.shape[-1])


def process_short(
    processors: Sequence[Any], least: tuple[str, ...], lengths: list[int], scores: Tensor, num_tokens: list[int]
) -> Tensor:
    """Scores of rows, behind processors that leave rows of enough tokens as they are.

    Args:
        lengths: How many rows of `scores` belong to each, in this order.
        scores: `[rows, vocab_size]`.
    """
    enough = [sum(getattr(processor, name) for name in least) for processor in processors]
    is_short = np.array(num_tokens) < np.repeat(enough, lengths)
    if not is_short.any():
        return scores
    strictest: Process = processors[enough.index(max(enough))]
    processed = strictest(scores.new_empty(len(scores), 0, dtype=torch.int64), scores)  # rows of no token
    return processed if is_short.all() else torch.where(to_device(is_short[:, None], scores.device), processed, scores)


def process(
    processors: Sequence[Sequence[Any]],
    lengths: list[int],
    scores: Tensor,
    read: Callable[[bool], Tensor],
    num_tokens: Callable[[], list[int]],
) -> Tensor:
    """Scores of the rows of several calls behind their processors.

    Args:
        processors: Of each call; all of one kind, place by place.
        lengths: How many rows of `scores` belong to each, in this order.
        scores: `[rows, vocab_size]`.
        read: Gives the rows' tokens so far; whether -1 stands behind the end of shorter ones. Called if a processor
            looks at them.
        num_tokens: Gives how many that are, padding included. Called if a processor's effect depends on it alone.
    """
    ids: Tensor | None = None
    for own in zip(*processors, strict=True):
        treatment = PROCESSORS.get(type(own[0]), _ALONE)
        if treatment.least:
            scores = process_short(own, treatment.least, lengths, scores, num_tokens())
            continue
        given: Tensor | None = None
        if treatment.counts_ids:
            given = read(True)
        elif treatment.reads_ids:
            given = ids = read(False) if ids is None else ids
        merged = merged_processor(own, lengths, scores)
        shortcut = treatment.shortcut if scores.is_cpu else None
        scores = merged(given, scores) if shortcut is None else shortcut(merged, scores)
    return scores


@dataclass(frozen=True, slots=True)
class RowEnds:
    """The ends of a call's rows.

    Attributes:
        eos: The tokens that end a row.
        max_length: Columns of the result at most.
        others: Criteria that look at the tokens, on their device; `None` if there are none.
    """

    eos: frozenset[int]
    max_length: int | None
    others: StoppingCriteriaList | None

    @classmethod
    def of(cls, criteria: Iterable[Any]) -> RowEnds:
        eos: set[int] = set()
        max_lengths: list[int] = []
        others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                eos |= set(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria and not _warns(criterion):
                max_lengths.append(criterion.max_length)
            else:
                others.append(criterion)
        return cls(frozenset(eos), min(max_lengths, default=None), others or None)


def pads_finished(criteria: Iterable[Any]) -> bool:
    """Whether finished rows are padded: without an end-of-sequence criterion stock goes on generating for them."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


def ends_together(criteria: Iterable[Any]) -> bool:
    """Whether nothing but its length ends a row."""
    return all(type(criterion) is MaxLengthCriteria for criterion in criteria)


def _warns(criterion: Any) -> bool:
    """Whether the criterion may warn that a row outgrows the model's context."""
    context = getattr(criterion, "max_position_embeddings", None)
    return context is not None and criterion.max_length > context
