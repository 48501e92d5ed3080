"""Copies whole blocks, all layers, keys and values, in one launch: what copy-on-write needs.

A block is one contiguous piece of memory, so the kernel moves words and knows nothing of their meaning. A program takes
a part of one (source, destination) pair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.launch import FUSION

PART = 4096  # words of a program


# The destinations lie behind the sources in one tensor: whether they are aligned depends on how many pairs there are.
@triton.jit(do_not_specialize_on_alignment=["sources", "destinations"])
def _copy_blocks_kernel(
    blocks,  # [num_blocks, words]
    sources,  # [P] int64
    destinations,  # [P] int64
    num_words,  # a multiple of 16 for nearly all models, which lets four words move at once
    stride_block,
    PART: tl.constexpr,
):
    pair = tl.program_id(0)
    source = tl.load(sources + pair)
    destination = tl.load(destinations + pair)
    words = tl.program_id(1) * PART + tl.arange(0, PART)
    mask = words < num_words
    content = tl.load(blocks + source * stride_block + words, mask=mask)
    tl.store(blocks + destination * stride_block + words, content, mask=mask)


def copy_blocks(kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Launches the kernel.

    Args:
        kv_cache: The KV tensor, changed in place; a block must be contiguous.
        sources: `[P]` int64.
        destinations: `[P]` int64, each block once, and none of them a source: pairs are copied in no order.

    Raises:
        ValueError: A block is not one contiguous piece.
    """
    if not kv_cache[0].is_contiguous():
        raise ValueError(f"blocks must be contiguous to be copied whole, got strides {kv_cache.stride()}")
    if sources.numel() == 0:
        return
    num_bytes = kv_cache[0].numel() * kv_cache.element_size()
    word = next(dtype for dtype in (torch.int32, torch.int16, torch.uint8) if num_bytes % dtype.itemsize == 0)
    # The same bytes as one row a block, whatever lies between two blocks.
    stride = kv_cache.stride(0) * kv_cache.element_size() // word.itemsize
    words = kv_cache.flatten(1).view(word)
    num_words = num_bytes // word.itemsize
    _copy_blocks_kernel[(sources.numel(), -(-num_words // PART))](
        words, sources, destinations, num_words, stride, PART=PART, num_warps=8, **FUSION
    )
