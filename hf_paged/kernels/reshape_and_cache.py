"""Writes the new keys and values of one layer into their slots, one launch for both.

A program takes some (token, kv head) pairs; each is one row of `head_dim` numbers, contiguous in the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.launch import FORMATS, codes, next_power_of_two
from hf_paged.kernels.tile_ops import encode_fp8, encode_int8, scale_pointers


@triton.jit(do_not_specialize=["layer", "num_rows"])
def _reshape_and_cache_kernel(
    key,  # [T, kv_heads, HEAD_DIM], any strides
    value,
    kv_cache,  # [blocks, layers, 2, kv_heads, BLOCK_SIZE, HEAD_DIM]
    slot_mapping,  # [T] int64; below 0: padding
    layer,
    num_rows,  # T * kv_heads
    stride_key_token,
    stride_key_head,
    stride_key_dim,
    stride_value_token,
    stride_value_head,
    stride_value_dim,
    stride_block,
    stride_layer,
    stride_kv,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)[None, :]
    tokens = rows // NUM_KV_HEADS
    heads = rows % NUM_KV_HEADS
    slots = tl.load(slot_mapping + tokens, mask=rows < num_rows, other=-1)
    mask = (slots >= 0)[:, None] & (columns < HEAD_DIM)

    first = (slots // BLOCK_SIZE) * stride_block + (slots % BLOCK_SIZE) * HEAD_DIM + heads * stride_head
    to = kv_cache + tl.cast(layer, tl.int64) * stride_layer + first[:, None] + columns
    keys = tl.load(
        key + (tokens * stride_key_token + heads * stride_key_head)[:, None] + columns * stride_key_dim,
        mask=mask,
        other=0.0,
    )
    values = tl.load(
        value + (tokens * stride_value_token + heads * stride_value_head)[:, None] + columns * stride_value_dim,
        mask=mask,
        other=0.0,
    )
    if FORMAT == "int8":
        keys, key_scales = encode_int8(keys.to(tl.float32))
        values, value_scales = encode_int8(values.to(tl.float32))
        rows_of_keys = kv_cache + tl.cast(layer, tl.int64) * stride_layer + first
        scales = scale_pointers(rows_of_keys, slots % BLOCK_SIZE, BLOCK_SIZE, HEAD_DIM)
        tl.store(scales, key_scales, mask=slots >= 0)
        scales = scale_pointers(rows_of_keys + stride_kv, slots % BLOCK_SIZE, BLOCK_SIZE, HEAD_DIM)
        tl.store(scales, value_scales, mask=slots >= 0)
    elif FORMAT != "":
        keys = encode_fp8(keys.to(tl.float32), FORMAT)
        values = encode_fp8(values.to(tl.float32), FORMAT)
    tl.store(to, keys.to(kv_cache.dtype.element_ty), mask=mask)
    tl.store(to + stride_kv, values.to(kv_cache.dtype.element_ty), mask=mask)


def reshape_and_cache(key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Launches the kernel.

    Args:
        key: `[T, num_kv_heads, head_dim]`, any strides and any floating dtype.
        value: Like `key`.
        kv_cache: The KV tensor, changed in place.
        layer: Layer index.
        slot_mapping: `[T]` int64; below 0: not written.
    """
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    padded_dim = next_power_of_two(head_dim)
    rows = max(1, min(16, 4096 // padded_dim))
    _reshape_and_cache_kernel[(-(-num_tokens * num_heads // rows),)](
        key,
        value,
        codes(kv_cache),
        slot_mapping,
        layer,
        num_tokens * num_heads,
        *key.stride(),
        *value.stride(),
        *kv_cache.stride()[:4],
        NUM_KV_HEADS=num_heads,
        BLOCK_SIZE=kv_cache.shape[4],
        HEAD_DIM=head_dim,
        D=padded_dim,
        ROWS=rows,
        FORMAT=FORMATS.get(kv_cache.dtype, ""),
        num_warps=4,
        enable_fp_fusion=kv_cache.dtype is not torch.int8,  # there codes are those of separate operations
    )
