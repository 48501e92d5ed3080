"""Paged attention of sequences with one new token each: split-KV, with a kv head's query heads packed into one tile.

Decoding reads every key and value once and computes little, so what counts is that all processors read at once. A
program takes one (item of `decode_work.py`, kv head): some tiles of one sequence, whose reads all query heads of that
kv head share, as the rows of one matrix tile. Where the item is all that the sequence has, its output is written; else
each of the sequence's items leaves a part, `(acc, m, l)` of `online_softmax.py`, and a second kernel combines them:

    m = max_i m_i        o = sum_i 2^(m_i - m) acc_i / sum_i 2^(m_i - m) l_i

Nothing is compiled for a batch size, a length or a number of items.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.launch import FUSION, LayerAttention, Tiling, device_of, next_power_of_two
from hf_paged.kernels.online_softmax import attend_tiles, start_rows
from hf_paged.kernels.scaled_rows import head_dim_of
from hf_paged.kernels.tile_ops import LOG2_E

PROGRAMS_A_PROCESSOR = 2  # that run at once: two or three, as registers and shared memory allow
STATS = tl.constexpr(4)  # float32 numbers behind a partial result: m, l, and two that keep the next one aligned
COMBINED_AT_ONCE = 16  # parts


@triton.jit(do_not_specialize=["layer", "window", "stride_table"])
def _decode_kernel(
    output,  # [T, H, HEAD_DIM], contiguous
    partials,  # [parts, H, HEAD_DIM + STATS] float32: acc, m, l
    query,  # [T, H, HEAD_DIM]
    kv_cache,  # [blocks, layers, 2, kv_heads, BLOCK_SIZE, HEAD_DIM]
    block_tables,  # [S, N] int32
    seq_lens,  # [S] int32; 0: padding
    items,  # [I, 4] int32: part, sequence, first tile, tiles; a sequence below 0: nothing to do
    sinks,  # [H] or None
    bias,  # [H, BIAS] float32 or None
    layer,
    scale,
    softcap,
    window,
    stride_query_token,
    stride_query_head,
    stride_table,
    stride_block,
    stride_layer,
    stride_kv,
    stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    GROUP_TILE: tl.constexpr,  # of them, those of one program
    M: tl.constexpr,  # rows of the tile, a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,  # distances of the bias; 0: none
):
    num_group_tiles: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    # An item's programs are next to each other: they read the same blocks.
    item = tl.program_id(0) // (NUM_KV_HEADS * num_group_tiles)
    sequence = tl.load(items + item * 4 + 1)
    if sequence < 0:
        return
    kv_head = tl.program_id(0) // num_group_tiles % NUM_KV_HEADS
    group_tile = tl.program_id(0) % num_group_tiles

    rows = tl.arange(0, M)
    in_group = (rows < GROUP_TILE) & (group_tile * GROUP_TILE + rows < GROUP)
    heads = kv_head * GROUP + tl.where(in_group, group_tile * GROUP_TILE + rows, 0)
    columns = tl.arange(0, D)
    stored = in_group[:, None] & (columns[None, :] < HEAD_DIM)

    seq_len = tl.load(seq_lens + sequence)
    first_tile = tl.load(items + item * 4 + 2)
    last_tile = first_tile + tl.load(items + item * 4 + 3)
    # From the first tile that is seen to the last one: all of the sequence.
    is_first = first_tile == (tl.maximum(seq_len - window, 0) // TILE if HAS_WINDOW else 0)
    is_whole = is_first & (last_tile * TILE >= seq_len)

    query_rows = sequence.to(tl.int64) * stride_query_token + heads.to(tl.int64) * stride_query_head
    q = tl.load(query + query_rows[:, None] + columns[None, :], mask=stored, other=0.0)
    acc, row_max, row_sum = start_rows(heads, sinks, sinks is not None, M, D)
    if sinks is not None:  # counted once: what has maximum -inf is worth nothing beside the first tile
        row_max = tl.where(is_first, row_max, float("-inf"))
    score_scale = scale / softcap if HAS_SOFTCAP else scale * LOG2_E

    key_base = kv_cache + tl.cast(layer, tl.int64) * stride_layer + kv_head * tl.cast(stride_head, tl.int64)
    acc, row_max, row_sum = attend_tiles(
        acc,
        row_max,
        row_sum,
        q,
        tl.zeros([M], tl.int32) + (seq_len - 1),
        key_base,
        key_base + stride_kv,
        block_tables + sequence.to(tl.int64) * stride_table,
        stride_block,
        first_tile,
        last_tile,
        tl.maximum(seq_len - 1, 0),
        score_scale,
        softcap * LOG2_E,
        window,
        bias,
        heads,
        BLOCK_SIZE,
        TILE,
        HEAD_DIM,
        D,
        FORMAT,
        NATIVE,
        HAS_WINDOW,
        HAS_SOFTCAP,
        BIAS,
        True,
    )

    if is_whole:
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        output_rows = (sequence.to(tl.int64) * NUM_HEADS + heads) * HEAD_DIM
        tl.store(output + output_rows[:, None] + columns[None, :], acc.to(output.dtype.element_ty), mask=stored)
    else:
        part = tl.load(items + item * 4)
        partial_rows = (part.to(tl.int64) * NUM_HEADS + heads) * (HEAD_DIM + STATS)
        tl.store(partials + partial_rows[:, None] + columns[None, :], acc, mask=stored)
        tl.store(partials + partial_rows + HEAD_DIM, row_max, mask=in_group)
        tl.store(partials + partial_rows + HEAD_DIM + 1, row_sum, mask=in_group)


@triton.jit
def _combine_kernel(
    output,  # [T, H, HEAD_DIM], contiguous
    partials,  # [parts, H, HEAD_DIM + STATS] float32
    split,  # [S, 4] int32: 0, sequence, its first part, parts; 0 parts: nothing to do
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,  # parts added at once
):
    num_parts = tl.load(split + tl.program_id(0) * 4 + 3)
    if num_parts == 0:
        return
    sequence = tl.load(split + tl.program_id(0) * 4 + 1).to(tl.int64)
    first = tl.load(split + tl.program_id(0) * 4 + 2)
    head, num_heads = tl.program_id(1), tl.num_programs(1)

    columns = tl.arange(0, D)
    acc = tl.zeros([D], tl.float32)
    top = float("-inf")
    total = 0.0
    for start in tl.range(0, num_parts, CHUNK):
        part = start + tl.arange(0, CHUNK)
        present = part < num_parts
        rows = ((first + part).to(tl.int64) * num_heads + head) * (HEAD_DIM + STATS)
        part_max = tl.load(partials + rows + HEAD_DIM, mask=present, other=float("-inf"))
        part_sum = tl.load(partials + rows + HEAD_DIM + 1, mask=present, other=0.0)
        mask = present[:, None] & (columns[None, :] < HEAD_DIM)
        part_acc = tl.load(partials + rows[:, None] + columns[None, :], mask=mask, other=0.0)

        new_top = tl.maximum(top, tl.max(part_max, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part_max - shift)
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weight * part_sum, 0)
        acc = acc * decay + tl.sum(part_acc * weight[:, None], 0)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)
    pointers = output + (sequence * num_heads + head) * HEAD_DIM + columns
    tl.store(pointers, acc.to(output.dtype.element_ty), mask=columns < HEAD_DIM)


def tiling(itemsize: int, padded_dim: int, group: int) -> Tiling:
    """Shape of a program's tile.

    A stage holds a tile of keys and one of values, 32 KiB in half precision: two in flight on each of two or three
    programs a processor cover the latency of the memory.

    Args:
        itemsize: Bytes of a query element.
        padded_dim: Head dim, up to the next power of two.
        group: Query heads of a kv head; programs beyond one for these read the KV from the L2 cache again.
    """
    if itemsize == 4:  # no tensor cores multiply float32 exactly: the product lives in registers, the tile is small
        return Tiling(rows=16, tokens=16, num_warps=4, num_stages=2)
    rows = max(16, next_power_of_two(min(group, 64)))
    tokens = max(16, min(128 if rows < 64 else 64, 8192 // padded_dim))
    return Tiling(rows, tokens, num_warps=8 if rows > 32 and padded_dim > 64 else 4, num_stages=3)


def plan(query: Tensor, kv_cache: Tensor) -> tuple[Tiling, int]:
    """Shape of a program's tile for queries `[T, num_heads, head_dim]`, and the items that a device runs at once."""
    num_kv_heads, padded_dim = kv_cache.shape[3], next_power_of_two(max(16, head_dim_of(kv_cache)))
    group, itemsize, device = query.shape[1] // num_kv_heads, query.element_size(), device_of(query.device)
    shape = tiling(itemsize, padded_dim, group).fit(padded_dim, itemsize, kv_cache.element_size(), device)
    programs = num_kv_heads * -(-group // min(group, shape.rows))
    return shape, -(-PROGRAMS_A_PROCESSOR * device.num_processors // programs)


def paged_decode(call: LayerAttention, items: Tensor, split: Tensor) -> None:
    """Attends for the sequences that `items` lists, which have one new token each.

    Args:
        call: Where everything is.
        items: `[I, 4]` int32, of `decode_work.WorkList`, in tiles of `plan`'s shape.
        split: `[S, 4]` int32, of the same; where it is empty, no second kernel is launched.
    """
    shape, _ = plan(call.query, call.kv_cache)
    group_tile = min(call.group, shape.rows)
    num_group_tiles = -(-call.group // group_tile)
    _decode_kernel[(items.shape[0] * call.num_kv_heads * num_group_tiles,)](
        call.output,
        call.partials,
        call.query,
        call.pool,
        call.block_tables,
        call.seq_lens,
        items,
        call.sinks,
        call.bias,
        call.layer,
        call.scale,
        call.softcap,
        call.window,
        *call.strides,
        GROUP_TILE=group_tile,
        M=shape.rows,
        HAS_WINDOW=call.window > 0,
        **call.constants(shape),
    )
    combine(call, split, call.padded_dim)


def combine(call: LayerAttention, split: Tensor, padded_dim: int, at_once: int = COMBINED_AT_ONCE) -> None:
    """Combines the partial results of the rows that `split` lists; `padded_dim`: an output's width, padded."""
    if split.shape[0]:
        _combine_kernel[(split.shape[0], call.num_heads)](
            call.output,
            call.partials,
            split,
            HEAD_DIM=call.output.shape[2],
            D=padded_dim,
            CHUNK=at_once,
            num_warps=4,
            **FUSION,
        )


def partials_size(num_parts: int, num_heads: int, head_dim: int) -> int:
    """Float32 numbers that so many partial results take.

    Where lengths decide, there are `4/3` of `plan`'s items at most, whatever the batch: with `p` programs at once on
    the device, of `g` query heads each, some `4/3 * p * g * (head_dim + 4) * 4` bytes. That is 0.7 MB for 264 programs,
    4 heads each and a head dim of 128.
    """
    return num_parts * num_heads * (head_dim + STATS.value)
