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
    from hf_paged.sampling.sampler import SamplingBatch

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
    """What the kernel is told of each row of a call.

    Attributes:
        settings: The bytes of one `ROW`; what changes from step to step is still to be filled in. `first` is the
            number of the call's rows.
        bias: Tokens, and what is added to their logits; `None`: nothing.
    """

    settings: bytes
    bias: tuple[np.ndarray, np.ndarray] | None


def told_row(processors: Sequence[Any], noise: Any) -> ToldRow | None:
    """What the kernel is told of a call's rows; `None`: it can't do what is asked for.

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


def choose(batches: Sequence[SamplingBatch], logits: Tensor) -> Tensor:
    """`[rows]` int64, the tokens of the batches' rows, all of which have a `ToldRow`; they are in their table, too."""
    from hf_paged.kernels.row_sampling import sample_rows

    rows = _rows_of([batch.sampler.told.settings for batch in batches if batch.sampler.told], batches, logits.shape[1])
    samplers = [batch.sampler for batch in batches]
    rows["source"] = [source for batch in batches for source in batch.sources]
    masks, ids, biases = None, None, None
    masked = [batch for batch in batches if batch.sampler.matchers is not None]
    if masked:
        matchers = [matcher for batch in masked for matcher in batch.matchers]
        has_mask = np.repeat([s.matchers is not None for s in samplers], [len(b.rows) for b in batches])
        rows["mask"][has_mask] = np.arange(len(matchers))
        masks = to_device(token_masks(matchers, logits.shape[1]), logits.device)
    noted = [batch for batch in batches if batch.sampler.table is not None]
    if noted:
        table = noted[0].sampler.table
        assert table is not None
        has_table = np.repeat([s.table is not None for s in samplers], [len(b.rows) for b in batches])
        rows["table"][has_table] = [row for batch in noted for row in batch.table_rows]
        rows["length"][has_table] = lengths = [length for batch in noted for length in batch.lengths]
        ids = table.with_room(max(lengths))
    biased = [(s.told.bias, len(b.rows)) for s, b in zip(samplers, batches, strict=True) if s.told and s.told.bias]
    if biased:
        starts = np.cumsum([0, *(len(bias[0]) for bias, _ in biased)])
        has_bias = rows["biases"] > 0
        rows["bias"][has_bias] = np.repeat(starts[:-1], [count for _, count in biased])
        biases = (np.concatenate([bias[0] for bias, _ in biased]), np.concatenate([bias[1] for bias, _ in biased]))
    return sample_rows(rows, logits, masks, ids, biases)


def draw(batches: Sequence[SamplingBatch], probs: Tensor) -> Tensor | None:
    """The noise of the batches' rows in one kernel, like `probs` `[rows, vocab_size]`; `None`: not of all it can be."""
    told = [
        drawn_row(noise).tobytes()
        for batch in batches
        if isinstance(noise := batch.sampler.noise, SamplingNoise) and noise.grid is not None
    ]
    if len(told) < len(batches):
        return None
    from hf_paged.kernels.row_sampling import draw_noise

    return draw_noise(_rows_of(told, batches, probs.shape[1]), probs.shape[1], probs.device)


def _rows_of(told: list[bytes], batches: Sequence[SamplingBatch], vocab_size: int) -> np.ndarray:
    """`[rows]` of `ROW`, of what each batch's rows are told, with what is drawn for them now."""
    assert vocab_size <= MOST_TOKENS, "more is drawn in parts"
    rows = np.repeat(np.frombuffer(b"".join(told), ROW), [len(batch.rows) for batch in batches])
    indices = np.array([index for batch in batches for index in batch.token_indices], np.uint64)
    grid = DrawGrid(BLOCK)  # of nothing
    for batch in batches:
        noise = batch.sampler.noise
        if isinstance(noise, SamplingNoise) and noise.grid is not None:
            noise.vocab_size, grid = vocab_size, noise.grid
    numbers = np.maximum(rows["first"], 1).astype(np.int64) * vocab_size
    rows["threads"] = grid.num_threads(numbers)
    rows["round"] += indices * grid.num_rounds(numbers).astype(np.uint64)
    rows["first"] = np.array([row for batch in batches for row in batch.rows]) * vocab_size
    return rows


def rehearse(logits: Tensor) -> None:
    """Has the kernels compiled that choose tokens from such logits."""
    from hf_paged.kernels.row_sampling import draw_noise, sample_rows

    sample_rows(plain_rows(1), logits)
    draw_noise(plain_rows(1), 1, logits.device)
