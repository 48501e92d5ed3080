"""`short_top_p`: what transformers' `TopPLogitsWarper` makes of scores on CPU, without sorting all of them."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

LIKELY = 1024  # tokens among which the border is looked for
LANES = 8 if "AVX" in torch.backends.cpu.get_cpu_capability() else 4  # of torch's vectors of float32
WIDTH = 64  # a multiple of all of them


def short_top_p(processor: Any, scores: Tensor) -> Tensor:
    """Scores `[rows, vocab_size]` behind a `TopPLogitsWarper`, whose `top_p` may be a column `[rows, 1]`: its bits.

    The warper sorts a whole row. Enough are those that are not -inf, if they are few, or else the likeliest.
    """
    vocab_size = scores.shape[-1]
    if processor.filter_value != -math.inf or scores.dtype is not torch.float32:
        return processor(None, scores)  # type: ignore[no-any-return]
    most = max(int((scores != -math.inf).sum(dim=-1).max()), 1)
    width = WIDTH + most + (vocab_size - most) % WIDTH
    if width <= vocab_size // 8:
        return _of_few(processor, scores, width)
    return _of_many(processor, scores) if vocab_size >= 8 * LIKELY else processor(None, scores)


def _of_few(processor: Any, scores: Tensor, width: int) -> Tensor:
    """By the processor, given only as many scores as are not -inf, and some more.

    They stand at the same places of a vector as among all, sorted: sums have the same bits. Of equal scores, it depends
    on all of a row which is sorted first: rows where some of them stay, and some don't, are computed as they are.
    """
    places = scores.topk(width, sorted=False).indices
    few = scores.gather(1, places)
    left = processor(None, few)
    last = left.masked_fill(left == -math.inf, math.inf).amin(dim=-1, keepdim=True)
    result = scores.scatter(1, places, left)
    return _as_is(processor, scores, ((few == last) & (left != last)).any(dim=-1), result)


def _of_many(processor: Any, scores: Tensor) -> Tensor:
    """By the likeliest tokens, summed up in float64.

    The processor's softmax sums up all tokens in float32, the least likely first, in `LANES`: each addition adds an
    error of `2**-24` of the sum so far, at most, which is half of the last one on average. (Its cumulative sums are in
    float64.) Rows in which a token is so near to the border that this error decides are computed as they are, as are
    those with equal scores at the border, or with a border beyond these tokens.
    """
    best = scores.topk(LIKELY).values
    top, weights = best[:, :1], (best.double() - best[:, :1]).exp()
    shares = weights / (scores - top).exp().sum(dim=-1, keepdim=True)
    ahead = shares.cumsum(dim=-1) - shares  # of each, what the likelier ones are together
    others = 1 - shares.sum(dim=-1, keepdim=True)
    error = 2.0**-24 * (others * scores.shape[-1] / 2 + LIKELY) / LANES  # of the processor's sum, as a share of it
    near = ((1 - processor.top_p) * error + 2e-6) / (1 - error)  # and of the exponentials and our sum, in float32
    counts = (ahead < processor.top_p).sum(dim=-1, keepdim=True).clamp(min=processor.min_tokens_to_keep)
    last = best.gather(1, counts.clamp(max=LIKELY) - 1)
    is_sure = (counts < LIKELY) & (best.gather(1, counts.clamp(max=LIKELY - 1)) < last)
    is_sure &= ((ahead - processor.top_p).abs() > near).all(dim=-1, keepdim=True)
    return _as_is(processor, scores, ~is_sure[:, 0], scores.masked_fill(scores < last, -math.inf))


def _as_is(processor: Any, scores: Tensor, which: Tensor, result: Tensor) -> Tensor:
    """`result`, with the rows in `which` computed by the processor itself."""
    rows = which.nonzero()[:, 0]
    if len(rows) == len(scores):
        return processor(None, scores)  # type: ignore[no-any-return]
    if len(rows):
        own = copy.copy(processor)
        if isinstance(processor.top_p, Tensor):
            own.top_p = processor.top_p[rows]
        result[rows] = own(None, scores[rows])
    return result
