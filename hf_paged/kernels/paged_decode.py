"""Paged attention of sequences with one new token each: split-KV, with a kv head's query heads packed into one tile.

Decoding reads every key and value once and computes little, so what counts is that all processors read at once. A
program takes one (sequence, kv head, split): all query heads of that kv head share its reads, as the rows of one matrix
tile, and where sequences and heads are fewer than processors, a sequence's tokens are split between several programs.
Each then leaves `(acc, m, l)` of `online_softmax.py`, and a second kernel combines them:

    m = max_s m_s        o = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from hf_paged.kernels.launch import LayerAttention, Tiling, next_power_of_two
from hf_paged.kernels.online_softmax import attend_tiles, start_rows
from hf_paged.kernels.tile_ops import LOG2_E

MAX_SPLITS = 128
MAX_SPLIT_PROGRAMS = 8192  # bounds the partial results, and so what is kept for them


@triton.jit(do_not_specialize=["layer", "window", "stride_table"])
def _decode_kernel(
    output,  # [T, H, HEAD_DIM], contiguous
    partials,  # [S, H, splits, HEAD_DIM] float32, then [S, H, splits, 2]: m and l
    query,  # [T, H, HEAD_DIM]
    kv_cache,  # [blocks, layers, 2, kv_heads, BLOCK_SIZE, HEAD_DIM]
    block_tables,  # [S, N] int32
    seq_lens,  # [S] int32; 0: padding
    sinks,  # [H] or None
    slopes,  # [H] or None
    kv_scales,  # [layers, 2, kv_heads] float32 or None
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
    IS_SPLIT: tl.constexpr,
):
    sequence = tl.program_id(0)
    num_group_tiles: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = tl.program_id(1) // num_group_tiles
    group_tile = tl.program_id(1) % num_group_tiles
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)

    rows = tl.arange(0, M)
    in_group = (rows < GROUP_TILE) & (group_tile * GROUP_TILE + rows < GROUP)
    heads = kv_head * GROUP + tl.where(in_group, group_tile * GROUP_TILE + rows, 0)
    columns = tl.arange(0, D)
    stored = in_group[:, None] & (columns[None, :] < HEAD_DIM)

    seq_len = tl.load(seq_lens + sequence)
    first_token = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
    first_tile = first_token // TILE
    last_tile = tl.cdiv(seq_len, TILE)
    if IS_SPLIT:
        per_split = tl.cdiv(last_tile - first_tile, num_splits)
        first_tile = first_tile + split * per_split
        last_tile = tl.minimum(first_tile + per_split, last_tile)

    query_rows = sequence.to(tl.int64) * stride_query_token + heads.to(tl.int64) * stride_query_head
    q = tl.load(query + query_rows[:, None] + columns[None, :], mask=stored, other=0.0)
    acc, row_max, row_sum = start_rows(heads, sinks, sinks is not None, M, D)
    if sinks is not None:  # counted once
        row_max = tl.where(split == 0, row_max, float("-inf"))
        row_sum = tl.where(split == 0, row_sum, 0.0)
    row_slopes = tl.zeros([M], tl.float32)
    if slopes is not None:
        row_slopes = tl.load(slopes + heads).to(tl.float32) * LOG2_E
    key_scale = 1.0
    value_scale = 1.0
    if kv_scales is not None:
        key_scale = tl.load(kv_scales + (layer * 2) * NUM_KV_HEADS + kv_head)
        value_scale = tl.load(kv_scales + (layer * 2 + 1) * NUM_KV_HEADS + kv_head)
    score_scale = scale * key_scale / softcap if HAS_SOFTCAP else scale * key_scale * LOG2_E

    key_base = kv_cache + tl.cast(layer, tl.int64) * stride_layer + kv_head * tl.cast(stride_head, tl.int64)
    acc, row_max, row_sum = attend_tiles(
        acc,
        row_max,
        row_sum,
        q,
        tl.zeros([M], tl.int32) + (seq_len - 1),
        row_slopes,
        key_base,
        key_base + stride_kv,
        block_tables + sequence.to(tl.int64) * stride_table,
        stride_block,
        first_tile,
        last_tile,
        tl.maximum(seq_len - 1, 0),
        score_scale,
        value_scale,
        softcap * LOG2_E,
        window,
        BLOCK_SIZE,
        TILE,
        HEAD_DIM,
        D,
        FORMAT,
        NATIVE,
        HAS_WINDOW,
        HAS_SOFTCAP,
        slopes is not None,
        True,
    )

    if IS_SPLIT:
        num_rows = tl.num_programs(0) * NUM_HEADS * num_splits
        partial_rows = (sequence * NUM_HEADS + heads) * num_splits + split
        stats = partials + num_rows * HEAD_DIM + partial_rows * 2
        tl.store(stats, row_max, mask=in_group)
        tl.store(stats + 1, row_sum, mask=in_group)
        if (first_tile < last_tile) | (split == 0):  # of other splits that are empty no acc is read
            pointers = partials + partial_rows[:, None] * HEAD_DIM + columns[None, :]
            tl.store(pointers, acc, mask=stored)
    else:
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        output_rows = (sequence.to(tl.int64) * NUM_HEADS + heads) * HEAD_DIM
        tl.store(output + output_rows[:, None] + columns[None, :], acc.to(output.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    output,  # [T, H, HEAD_DIM], contiguous
    partials,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits up to the next power of two
    CHUNK: tl.constexpr,  # splits added at once
):
    row = tl.program_id(0) * NUM_HEADS + tl.program_id(1)
    first = row * num_splits
    stats = partials + tl.num_programs(0) * NUM_HEADS * num_splits * HEAD_DIM + first * 2
    splits = tl.arange(0, SPLITS)
    split_max = tl.load(stats + splits * 2, mask=splits < num_splits, other=float("-inf"))
    split_sum = tl.load(stats + splits * 2 + 1, mask=splits < num_splits, other=0.0)
    top = tl.max(split_max, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(split_max - top) * split_sum, 0)

    columns = tl.arange(0, D)
    acc = tl.zeros([D], tl.float32)
    for start in tl.range(0, num_splits, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        present = chunk < num_splits
        weight = tl.exp2(tl.load(stats + chunk * 2, mask=present, other=float("-inf")) - top)
        length = tl.load(stats + chunk * 2 + 1, mask=present, other=0.0)
        pointers = partials + (first + chunk)[:, None] * HEAD_DIM + columns[None, :]
        mask = (present & ((length > 0.0) | (chunk == 0)))[:, None] & (columns[None, :] < HEAD_DIM)
        acc += tl.sum(tl.load(pointers, mask=mask, other=0.0) * weight[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    pointers = output + row.to(tl.int64) * HEAD_DIM + columns
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
    return Tiling(rows, tokens, num_warps=8 if rows > 32 else 4, num_stages=3)


@lru_cache(maxsize=4096)
def choose_num_splits(num_programs: int, num_tiles: int, num_processors: int) -> int:
    """Programs to split each sequence between.

    None where the programs nearly fill the processors already or there is little to split; else, of the counts that
    leave each split fewer tiles than one split less would, the smallest that keeps processors within 85 % as busy as
    the best of them (FlashAttention's rule).

    Args:
        num_programs: Without splitting; sequences much shorter than the longest count as fractions.
        num_tiles: KV tiles of the longest sequence.
        num_processors: Of the device.
    """
    if num_programs >= 0.8 * num_processors or num_tiles <= 4:
        return 1
    most = max(1, min(num_tiles, MAX_SPLITS, 4 * num_processors // num_programs))

    def efficiency(num_splits: int) -> float:
        waves = num_programs * num_splits / num_processors
        return waves / -(-num_programs * num_splits // num_processors)

    counts = [n for n in range(1, most + 1) if n == 1 or -(-num_tiles // n) < -(-num_tiles // (n - 1))]
    best = max(efficiency(num_splits) for num_splits in counts)
    return next(n for n in counts if efficiency(n) >= 0.85 * best)


def paged_decode(call: LayerAttention, num_sequences: int, num_splits: int) -> None:
    """Attends for the first `num_sequences` sequences, which have one new token each.

    Args:
        call: Where everything is.
        num_sequences: Also those with `seq_lens` 0, whose output is 0.
        num_splits: Programs a sequence is split between; 1: no second kernel is launched.
    """
    shape = call.fit(tiling(call.query.element_size(), call.padded_dim, call.group))
    group_tile = min(call.group, shape.rows)
    num_group_tiles = -(-call.group // group_tile)
    _decode_kernel[(num_sequences, call.num_kv_heads * num_group_tiles, num_splits)](
        call.output,
        call.partials if num_splits > 1 else None,
        call.query,
        call.pool,
        call.block_tables,
        call.seq_lens,
        call.sinks,
        call.alibi_slopes,
        call.kv_scales,
        call.layer,
        call.scale,
        call.softcap,
        call.window,
        *call.strides,
        NUM_HEADS=call.num_heads,
        NUM_KV_HEADS=call.num_kv_heads,
        GROUP=call.group,
        GROUP_TILE=group_tile,
        M=shape.rows,
        BLOCK_SIZE=call.block_size,
        TILE=shape.tokens,
        HEAD_DIM=call.head_dim,
        D=call.padded_dim,
        FORMAT=call.fp8_format,
        NATIVE=call.device.has_native_fp8,
        HAS_WINDOW=call.window > 0,
        HAS_SOFTCAP=call.softcap > 0,
        IS_SPLIT=num_splits > 1,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if num_splits > 1:
        _combine_kernel[(num_sequences, call.num_heads)](
            call.output,
            call.partials,
            num_splits,
            NUM_HEADS=call.num_heads,
            HEAD_DIM=call.head_dim,
            D=call.padded_dim,
            SPLITS=next_power_of_two(num_splits),
            CHUNK=min(16, next_power_of_two(num_splits)),
            num_warps=4,
        )


def partials_size(num_sequences: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Float32 numbers that the partial results of a launch take."""
    return num_sequences * num_heads * num_splits * (head_dim + 2) if num_splits > 1 else 0
