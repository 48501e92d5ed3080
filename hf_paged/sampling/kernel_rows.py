"""Rows whose tokens one kernel chooses: what it is told of them, packed once a call, and where their noise lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from transformers.generation import logits_process

from hf_paged.kernels.philox import BLOCK, MOST_TOKENS, DrawGrid
from hf_paged.kernels.sampling_rows import ROW, plain_rows
from hf_paged.kernels.transfers import to_device
from hf_paged.sampling.controls import GeneratedTokenPenalties, TokenBias
from hf_paged.sampling.grammar import token_masks
from hf_paged.sampling.random import SamplingNoise

if TYPE_CHECKING:
    from hf_paged.sampling.sampler import RowSampler, SamplingBatch

# What the kernel does, in its order; the last four are transformers' order, too.
_ORDER: list[type] = [
    logits_process.RepetitionPenaltyLogitsProcessor,
    GeneratedTokenPenalties,
    TokenBias,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
]
_USUAL = {"filter_value": -float("inf"), "min_tokens_to_keep": 1, "prompt_ignore_length": None}


@dataclass(frozen=True, slots=True)
class ToldRow:
    """The kernel's arguments for each row of a call.

    Attributes:
        settings: The bytes of one `ROW`; what changes from step to step is still to be filled in. `first` is the
            number of the call's rows.
        bias: Tokens, and what is added to their logits; `None`: nothing.
    """

    settings: bytes
    bias: tuple[np.ndarray, np.ndarray] | None


def told_row(processors: Sequence[Any], noise: Any) -> ToldRow | None:
    """The kernel's arguments for a call's rows; `None`: it can't do what is asked for.

    Args:
        processors: Of the call.
        noise: The same; `None`: there is none.
    """
    if noise is not None and (not isinstance(noise, SamplingNoise) or noise.grid is None):
        return None
    places = [_ORDER.index(type(own)) if type(own) in _ORDER else -1 for own in processors]
    if -1 in places or sorted(set(places)) != places:
        return None
    if any(getattr(own, name, usual) != usual for own in processors for name, usual in _USUAL.items()):
        return None
    rows, bias = plain_rows(1) if noise is None else drawn_row(noise), None
    for own in processors:
        bias = _tell(rows, own) or bias
    return ToldRow(rows.tobytes(), bias)


def drawn_row(noise: SamplingNoise) -> np.ndarray:
    """`[1]` of `ROW`, which draws from what the model says; `first` is the number of the call's rows."""
    rows = plain_rows(1)
    rows["is_drawn"] = 1
    rows["seed"], rows["round"], rows["first"] = noise.seed, noise.offset // 4, noise.num_rows
    return rows


def _tell(rows: np.ndarray, own: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Writes down what a processor does; returns biases by token."""
    # A GPU multiplies by a number's reciprocal where torch divides by it: see `processors._Divisor`.
    if isinstance(own, logits_process.TemperatureLogitsWarper):
        rows["scale"] = np.float32(1) / np.float32(own.temperature)
    elif isinstance(own, logits_process.RepetitionPenaltyLogitsProcessor):
        rows["penalty"], rows["inverse"] = own.penalty, np.float32(1) / np.float32(own.penalty)
    elif isinstance(own, GeneratedTokenPenalties):
        rows["presence"], rows["frequency"], rows["start"] = own.settings
    elif isinstance(own, TokenBias):
        rows["biases"] = len(own.bias.arrays[0])
        return own.bias.arrays
    elif isinstance(own, logits_process.TopKLogitsWarper):
        rows["top_k"] = min(own.top_k, 2**31 - 1)
    elif isinstance(own, logits_process.TopPLogitsWarper):
        rows["cut"] = 1 - own.top_p
    elif isinstance(own, logits_process.MinPLogitsWarper):
        rows["min_p"] = own.min_p
    return None


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows that are to choose a token, of any calls.

    Attributes:
        samplers: Of each row, its call's.
        rows: Its number among the call's rows.
        indices: Tokens that it has generated before that one.
        sources: Its row of the logits.
    """

    samplers: list[RowSampler]
    rows: list[int]
    indices: list[int]
    sources: list[int]

    @classmethod
    def of(cls, batches: Sequence[SamplingBatch]) -> Columns:
        return cls(
            [batch.sampler for batch in batches for _ in batch.rows],
            [row for batch in batches for row in batch.rows],
            [index for batch in batches for index in batch.token_indices],
            [source for batch in batches for source in batch.sources],
        )


def choose(columns: Columns, logits: Tensor) -> Tensor:
    """`[rows]` int64, the tokens of rows all of which have a `ToldRow`; they are in their table, too."""
    from hf_paged.kernels.row_sampling import sample_rows

    samplers = columns.samplers
    told = [sampler.told for sampler in samplers if sampler.told]
    rows = _rows_of(b"".join([own.settings for own in told]), columns, logits.shape[1])
    rows["source"] = columns.sources
    masks, ids, biases = None, None, None
    masked = [place for place, sampler in enumerate(samplers) if sampler.matchers]
    if masked:
        matchers = [(samplers[place].matchers or ())[columns.rows[place]] for place in masked]
        rows["mask"][masked] = range(len(masked))
        masks = to_device(token_masks(matchers, logits.shape[1]), logits.device)
    noted = [place for place, sampler in enumerate(samplers) if sampler.table]
    if noted:
        rows["table"][noted] = [samplers[place].table_rows[columns.rows[place]] for place in noted]
        rows["length"][noted] = lengths = [samplers[place].width + columns.indices[place] for place in noted]
        if table := samplers[noted[0]].table:
            ids = table.with_room(max(lengths))
    given = [own.bias for own in told if own.bias]
    if given:
        rows["bias"][rows["biases"] > 0] = np.cumsum([0, *(len(tokens) for tokens, _ in given)])[:-1]
        biases = np.concatenate([tokens for tokens, _ in given]), np.concatenate([numbers for _, numbers in given])
    return sample_rows(rows, logits, masks, ids, biases)


def draw(batches: Sequence[SamplingBatch], probs: Tensor) -> Tensor | None:
    """The noise of the batches' rows in one kernel, like `probs` `[rows, vocab_size]`; `None`: not of all it can be."""
    columns = Columns.of(batches)
    noise = [sampler.noise for sampler in columns.samplers]
    known = [own for own in noise if isinstance(own, SamplingNoise) and own.grid is not None]
    if len(known) < len(noise):
        return None
    from hf_paged.kernels.row_sampling import draw_noise

    told = b"".join([drawn_row(own).tobytes() for own in known])
    return draw_noise(_rows_of(told, columns, probs.shape[1]), probs.shape[1], probs.device)


def _rows_of(told: bytes, columns: Columns, vocab_size: int) -> np.ndarray:
    """`[rows]` of `ROW`, of what each is told, with what is drawn for them now."""
    assert vocab_size <= MOST_TOKENS, "more is drawn in parts"
    rows = np.frombuffer(told, ROW).copy()
    grid = DrawGrid(BLOCK)  # of nothing
    for sampler in columns.samplers:
        noise = sampler.noise
        if noise.__class__ is SamplingNoise and noise.grid is not None:
            noise.vocab_size, grid = vocab_size, noise.grid
    numbers = np.maximum(rows["first"], 1).astype(np.int64) * vocab_size
    rows["threads"] = grid.num_threads(numbers)
    rows["round"] += np.array(columns.indices, np.uint64) * grid.num_rounds(numbers).astype(np.uint64)
    rows["first"] = np.array(columns.rows) * vocab_size
    return rows


def rehearse(logits: Tensor) -> None:
    """Has the kernels compiled that choose tokens from such logits."""
    from hf_paged.kernels.row_sampling import draw_noise, sample_rows

    sample_rows(plain_rows(1), logits)
    draw_noise(plain_rows(1), 1, logits.device)
