"""Paged attention of sequences with several new tokens: prompts, chunks of prompts behind what the pool holds, drafts.

A program takes one (query tile, kv head): consecutive new tokens of one sequence times all query heads of the kv head,
as the rows of one matrix tile. New token `t` of a sequence with `c` tokens before this step sits at position `c + t`
and sees the positions up to its own, in the pool like all others. Tiles come from a table made once a step, the ones
with the most to read first, so that none starts last and runs long.

Of the KV tiles a program visits, those that all of its tokens see wholly need no mask: they are the middle of three
loops.

Exact, a token's result has the same bits in any tile: all tiles have one shape and are masked, also those of a single
new token, and keys are cut into parts at multiples of a number of tokens. A program takes one part, and parts are
combined one by one. Tiles and parts that a row sees nothing of leave its sums as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.launch import FP8_FORMATS, Device, LayerAttention, Tiling, device_of, next_power_of_two
from hf_paged.kernels.online_softmax import attend_tiles, start_rows
from hf_paged.kernels.paged_decode import STATS
from hf_paged.kernels.tile_ops import LOG2_E


@triton.jit(do_not_specialize=["layer", "window", "stride_table"])
def _prefill_kernel(
    output,  # [T, H, HEAD_DIM], contiguous
    partials,  # [parts, H, HEAD_DIM + STATS] float32: acc, m, l
    query,  # [T, H, HEAD_DIM]
    kv_cache,  # [blocks, layers, 2, kv_heads, BLOCK_SIZE, HEAD_DIM]
    block_tables,  # [S, N] int32
    seq_lens,  # [S] int32
    query_start_loc,  # [S + 1] int32
    query_tiles,  # [tiles, 2] int32: sequence, first of its new tokens; a sequence below 0: nothing to do. Exact: 5
    sinks,  # [H] or None
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
    QUERY_TILE: tl.constexpr,  # tokens of one program
    M: tl.constexpr,  # rows of the tile, a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PART: tl.constexpr,  # tokens of a part, exact; 0: all keys are one
):
    item = query_tiles + tl.program_id(0) * (5 if PART else 2)
    sequence = tl.load(item)
    if sequence < 0:
        return
    first_query = tl.load(item + 1)
    num_group_tiles: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = tl.program_id(1) // num_group_tiles
    group_tile = tl.program_id(1) % num_group_tiles

    start = tl.load(query_start_loc + sequence)
    num_queries = tl.load(query_start_loc + sequence + 1) - start
    seq_len = tl.load(seq_lens + sequence)
    context = seq_len - num_queries
    last_query = tl.minimum(first_query + QUERY_TILE, num_queries) - 1

    rows = tl.arange(0, M)
    in_group = (rows % GROUP_TILE) + group_tile * GROUP_TILE < GROUP
    heads = kv_head * GROUP + tl.where(in_group, (rows % GROUP_TILE) + group_tile * GROUP_TILE, 0)
    queries = tl.minimum(first_query + rows // GROUP_TILE, last_query)
    is_real = in_group & (first_query + rows // GROUP_TILE <= last_query)
    columns = tl.arange(0, D)
    stored = is_real[:, None] & (columns[None, :] < HEAD_DIM)

    first_position = context + first_query
    last_position = context + last_query
    last_tile = last_position // TILE + 1
    # Tiles [first_full, last_full) are seen wholly by all rows.
    last_full = (first_position + 1) // TILE
    if HAS_WINDOW:
        first_tile = tl.maximum(first_position - window + 1, 0) // TILE
        first_full = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE), last_tile)
        last_full = tl.maximum(first_full, last_full)
    else:
        first_tile = 0
        first_full = 0
    if PART:
        part = tl.load(item + 2)
        first_tile = tl.maximum(first_tile, part * (PART // TILE))
        last_tile = tl.minimum(last_tile, (part + 1) * (PART // TILE))
        last_full = first_tile

    token_rows = (start + queries).to(tl.int64)
    query_rows = token_rows * stride_query_token + heads.to(tl.int64) * stride_query_head
    q = tl.load(query + query_rows[:, None] + columns[None, :], mask=stored, other=0.0)
    acc, row_max, row_sum = start_rows(heads, sinks, sinks is not None, M, D)
    score_scale = scale / softcap if HAS_SOFTCAP else scale * LOG2_E

    positions = context + queries
    if PART and sinks is not None:  # counted once, in the first part that the row sees
        first_part = tl.maximum(positions - window + 1, 0) // PART if HAS_WINDOW else tl.zeros([M], tl.int32)
        row_max = tl.where(first_part == part, row_max, float("-inf"))
    key_base = kv_cache + tl.cast(layer, tl.int64) * stride_layer + kv_head * tl.cast(stride_head, tl.int64)
    table = block_tables + sequence.to(tl.int64) * stride_table
    for stretch in tl.static_range(2 if PART else 0 if HAS_WINDOW else 1, 3):
        acc, row_max, row_sum = attend_tiles(
            acc,
            row_max,
            row_sum,
            q,
            positions,
            key_base,
            key_base + stride_kv,
            table,
            stride_block,
            first_tile if stretch == 0 else first_full if stretch == 1 else last_full,
            first_full if stretch == 0 else last_full if stretch == 1 else last_tile,
            last_position,
            score_scale,
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
            stretch != 1,
        )

    num_parts = tl.load(item + 4) if PART else 1
    if num_parts == 1:
        acc = acc / row_sum[:, None]  # every row has seen its own token
        output_rows = (token_rows * NUM_HEADS + heads) * HEAD_DIM
        tl.store(output + output_rows[:, None] + columns[None, :], acc.to(output.dtype.element_ty), mask=stored)
    else:
        parts = tl.load(item + 3).to(tl.int64) + (queries - first_query) * num_parts
        partial_rows = (parts * NUM_HEADS + heads) * (HEAD_DIM + STATS)
        tl.store(partials + partial_rows[:, None] + columns[None, :], acc, mask=stored)
        tl.store(partials + partial_rows + HEAD_DIM, row_max, mask=is_real)
        tl.store(partials + partial_rows + HEAD_DIM + 1, row_sum, mask=is_real)


def tiling(itemsize: int, padded_dim: int, group: int, longest_query: int, device: Device, is_fp8: bool) -> Tiling:
    """Shape of a program's tile: as many rows as the longest query fills, up to what the registers hold.

    Args:
        itemsize: Bytes of a query element.
        padded_dim: Head dim, up to the next power of two.
        group: Query heads of a kv head.
        longest_query: New tokens of the sequence that has most.
        device: Where matrix instructions take no factors from shared memory, a tile has to be smaller.
        is_fp8: Whether the pool holds fp8, whose tiles are summed apart: a second sum in registers.
    """
    rows = longest_query * group
    if itemsize == 4:  # no tensor cores multiply float32 exactly: the product lives in registers, the tile is small
        if rows <= 16:
            return Tiling(rows=16, tokens=16, num_warps=4, num_stages=2)
        return Tiling(rows=32, tokens=32 if padded_dim <= 64 else 16, num_warps=8, num_stages=2)
    tokens = max(32, min(128, 8192 // padded_dim))
    if rows <= 16:
        return Tiling(rows=16, tokens=tokens, num_warps=4, num_stages=3)
    if not device.reads_shared_factors:
        tokens = max(32, tokens // 2)
    if rows <= 64 or (padded_dim > 128 and (is_fp8 or not device.reads_shared_factors)):
        return Tiling(rows=64, tokens=tokens, num_warps=8 if padded_dim > 128 else 4, num_stages=3)
    return Tiling(rows=128, tokens=tokens, num_warps=8, num_stages=3)


def query_tiling(group: int, rows: int) -> tuple[int, int, int]:
    """A tile's rows as new tokens, query heads of a kv head, and programs needed for all of these."""
    group_tile = min(group, rows)
    return rows // group_tile, group_tile, -(-group // group_tile)


def plan(query: Tensor, kv_cache: Tensor, max_query_len: int) -> tuple[int, int]:
    """Rows of a query tile of prompts, for the kernel, and how many new tokens of a sequence these are.

    Args:
        query: `[T, num_heads, head_dim]`.
        max_query_len: New tokens of the sequence that has most.
    """
    padded_dim, group = next_power_of_two(max(16, kv_cache.shape[5])), query.shape[1] // kv_cache.shape[3]
    device, is_fp8 = device_of(query.device), kv_cache.dtype in FP8_FORMATS
    rows = tiling(query.element_size(), padded_dim, group, max_query_len, device, is_fp8).rows
    return rows, query_tiling(group, rows)[0]


def paged_prefill(call: LayerAttention, query_tiles: Tensor, rows: int, part: int = 0) -> None:
    """Attends for the sequences whose new tokens are in `query_tiles`.

    Args:
        call: Where everything is.
        query_tiles: `[tiles, 2]` int32: a sequence, and the first of its new tokens in this tile; below 0: no tile.
        rows: Rows of a tile: `query_tiles` was made for `query_tiling(group, rows)[0]` tokens a tile.
        part: Exact, tokens of a part: `query_tiles` are the items of `AttentionMetadata.exact_work`.
    """
    query_tile, group_tile, num_group_tiles = query_tiling(call.group, rows)
    shape = call.fit(tiling(call.query.element_size(), call.padded_dim, 1, rows, call.device, bool(call.fp8_format)))
    if shape.rows < rows:
        raise ValueError(f"a tile has {shape.rows} rows at most for these tensors, got {rows}")
    _prefill_kernel[(query_tiles.shape[0], call.num_kv_heads * num_group_tiles)](
        call.output,
        call.partials,
        call.query,
        call.pool,
        call.block_tables,
        call.seq_lens,
        call.query_start_loc,
        query_tiles,
        call.sinks,
        call.layer,
        call.scale,
        call.softcap,
        call.window,
        *call.strides,
        GROUP_TILE=group_tile,
        QUERY_TILE=query_tile,
        M=max(16, next_power_of_two(rows)),
        HAS_WINDOW=call.window > 0,
        PART=part,
        **call.constants(shape),
    )
