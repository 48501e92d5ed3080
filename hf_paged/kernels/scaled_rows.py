"""Pools of int8: a head's key or value is codes and a scale of its own, of which it depends on nothing else.

Where other pools have `[block_size, head_dim]` numbers of a head in a block, these have `block_size * (head_dim + 4)`
bytes: the codes of all its tokens, `[block_size, head_dim]`, then their scales, `[block_size]` float32. So the KV
tensor has `head_dim + 4` in its last place, and blocks are copied, swapped and cleared as any others.

    scale = largest |x| / 127        code = x / scale, rounded to the nearest, ties to even        x ~ code * scale

A row with NaN or infinity is NaN: its codes are zeros, and its scale is not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST_CODE = 127
SMALLEST = 1e-30  # what is smaller is 0: 127 / x must be finite


def is_scaled(kv_cache: Tensor) -> bool:
    """Whether the pool holds codes and scales."""
    return kv_cache.dtype is torch.int8


def head_dim_of(kv_cache: Tensor) -> int:
    """Numbers of a head in one row of the pool."""
    return kv_cache.shape[5] - SCALE_BYTES * is_scaled(kv_cache)


def parts(states: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Codes `[..., block_size, head_dim]` and scales `[..., block_size]` of int8 `[..., block_size * (head_dim + 4)]`,
    as views.
    """
    end = states.shape[-1] - block_size * SCALE_BYTES
    return states[..., :end].unflatten(-1, (block_size, -1)), states[..., end:].view(torch.float32)


def quantized_rows(states: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[..., head_dim]` int8 and scales `[...]` float32, a scale for each row of any floating dtype."""
    states = states.float()
    largest = states.abs().amax(-1, keepdim=True)
    is_usual = (largest >= SMALLEST) & largest.isfinite()
    factor = torch.where(
        is_usual, torch.full_like(largest, LARGEST_CODE) / largest, 0
    )  # `127 / x` would be `1 / x * 127`
    codes = torch.where(is_usual, states * factor, 0).round().to(torch.int8)
    scales = torch.where(largest < SMALLEST, 0, largest * torch.tensor(1 / LARGEST_CODE, dtype=torch.float32))
    return codes, scales[..., 0]
