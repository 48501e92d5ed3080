"""Paged attention of sequences with several new tokens: prompts, chunks of prompts behind what the pool holds, drafts.

A program takes one (item of `decode_work.py`, kv head): some KV tiles for one query tile, which is consecutive new
tokens of one sequence times all query heads of the kv head, as the rows of one matrix tile. New token `t` of a sequence
with `c` tokens before this step sits at position `c + t` and sees the positions up to its own, in the pool like all
others. Where a query tile has several items (few tokens behind long contexts), each leaves a part for each of its rows,
combined as in `paged_decode.py`.

Of the KV tiles a program visits, those that all of its tokens see wholly need no mask: they are the middle of three
loops.

Exact, a token's result has the same bits in any tile: all tiles have one shape and are masked, also those of a single
new token, keys are cut into items at multiples of a number of tokens, and parts are combined one by one. Tiles and
parts that a row sees nothing of leave its sums as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.launch import FORMATS, Device, LayerAttention, Tiling, device_of, next_power_of_two
from hf_paged.kernels.online_softmax import attend_tiles, start_rows
from hf_paged.kernels.paged_decode import COMBINED_AT_ONCE, PROGRAMS_A_PROCESSOR, STATS, combine
from hf_paged.kernels.scaled_rows import head_dim_of
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
    items,  # [I, 8] int32: part, sequence, first tile, tiles, new token, items of these; a sequence below 0: nothing
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
    BIAS: tl.constexpr,  # distances of the bias; 0: none
    EXACT: tl.constexpr,
):
    item = items + tl.program_id(0) * 8
    sequence = tl.load(item + 1)
    if sequence < 0:
        return
    first_tile = tl.load(item + 2)
    last_tile = first_tile + tl.load(item + 3)
    first_query = tl.load(item + 4)
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
    # Of these tiles, [first_full, last_full) are seen wholly by all rows.
    first_full = first_tile
    if HAS_WINDOW:
        all_see = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE)
        first_full = tl.minimum(tl.maximum(all_see, first_tile), last_tile)
    last_full = first_tile if EXACT else tl.maximum(tl.minimum((first_position + 1) // TILE, last_tile), first_full)

    token_rows = (start + queries).to(tl.int64)
    query_rows = token_rows * stride_query_token + heads.to(tl.int64) * stride_query_head
    q = tl.load(query + query_rows[:, None] + columns[None, :], mask=stored, other=0.0)
    acc, row_max, row_sum = start_rows(heads, sinks, sinks is not None, M, D)
    score_scale = scale / softcap if HAS_SOFTCAP else scale * LOG2_E

    positions = context + queries
    if sinks is not None:  # counted once, with the first tile that the row sees
        first_seen = tl.maximum(positions - window + 1, 0) // TILE if HAS_WINDOW else tl.zeros([M], tl.int32)
        row_max = tl.where((first_seen >= first_tile) & (first_seen < last_tile), row_max, float("-inf"))
    key_base = kv_cache + tl.cast(layer, tl.int64) * stride_layer + kv_head * tl.cast(stride_head, tl.int64)
    table = block_tables + sequence.to(tl.int64) * stride_table
    for stretch in tl.static_range(2 if EXACT else 0 if HAS_WINDOW else 1, 3):
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
            stretch != 1,
        )

    num_parts = tl.load(item + 5)
    if num_parts == 1:
        acc = acc / row_sum[:, None]  # every row has seen its own token
        output_rows = (token_rows * NUM_HEADS + heads) * HEAD_DIM
        tl.store(output + output_rows[:, None] + columns[None, :], acc.to(output.dtype.element_ty), mask=stored)
    else:
        parts = tl.load(item).to(tl.int64) + (queries - first_query).to(tl.int64) * num_parts
        partial_rows = (parts * NUM_HEADS + heads) * (HEAD_DIM + STATS)
        tl.store(partials + partial_rows[:, None] + columns[None, :], acc, mask=stored)
        tl.store(partials + partial_rows + HEAD_DIM, row_max, mask=is_real)
        tl.store(partials + partial_rows + HEAD_DIM + 1, row_sum, mask=is_real)


def tiling(
    itemsize: int,
    padded_dim: int,
    group: int,
    longest_query: int,
    device: Device,
    is_code: bool,
    has_bias: bool = False,
    has_softcap: bool = False,
) -> Tiling:
    """Shape of a program's tile: as many rows as the longest query fills, up to what the registers hold.

    Args:
        itemsize: Bytes of a query element.
        padded_dim: Head dim, up to the next power of two.
        group: Query heads of a kv head.
        longest_query: New tokens of the sequence that has most.
        device: Where matrix instructions take no factors from shared memory, a tile has to be smaller.
        is_code: Whether the pool holds codes of 8 bits, whose tiles are summed apart: a second sum in registers.
        has_bias: Whether a bias is added to scores: one for each score of a tile in registers, and fetched ahead in
            shared memory.
        has_softcap: Whether scores are bounded, which takes registers that 128 rows of wide heads don't leave.
    """
    rows = longest_query * group
    if itemsize == 4:  # no tensor cores multiply float32 exactly: the product lives in registers, the tile is small
        if rows <= 16:
            return Tiling(rows=16, tokens=16, num_warps=4, num_stages=2)
        return Tiling(rows=32, tokens=32 if padded_dim <= 64 else 16, num_warps=8, num_stages=2)
    tokens = max(32, min(128, 8192 // padded_dim))
    if rows <= 16:
        return Tiling(rows=16, tokens=tokens, num_warps=4, num_stages=3)
    if has_bias:
        tokens = 32
    elif not device.reads_shared_factors:
        tokens = max(32, tokens // 2)
    if is_code:
        tokens = min(tokens, 64)
        if not device.reads_shared_factors:  # they are decoded in registers
            return Tiling(rows=64 if padded_dim <= 128 else 32, tokens=tokens, num_warps=8, num_stages=3)
    if rows <= 64 or (padded_dim > 128 and (is_code or has_softcap or not device.reads_shared_factors)):
        return Tiling(rows=64, tokens=tokens, num_warps=8 if padded_dim > 128 else 4, num_stages=3)
    return Tiling(rows=128, tokens=tokens, num_warps=8, num_stages=3)


def query_tiling(group: int, rows: int) -> tuple[int, int, int]:
    """A tile's rows as new tokens, query heads of a kv head, and programs needed for all of these."""
    group_tile = min(group, rows)
    return rows // group_tile, group_tile, -(-group // group_tile)


class Plan(NamedTuple):
    """How new tokens are attended for.

    Attributes:
        rows: Of a query tile, for the kernel.
        queries: How many new tokens of a sequence these are.
        tokens: Of a KV tile.
        slots: Items that the device works on at once.
    """

    rows: int
    queries: int
    tokens: int
    slots: int


def plan(
    query: Tensor, kv_cache: Tensor, max_query_len: int, has_bias: bool = False, has_softcap: bool = False
) -> Plan:
    """How new tokens with these queries `[T, num_heads, head_dim]` are attended for.

    Args:
        max_query_len: New tokens of the sequence that has most.
        has_bias: Whether a bias is added to scores.
        has_softcap: Whether scores are bounded.
    """
    num_kv_heads, padded_dim = kv_cache.shape[3], next_power_of_two(max(16, head_dim_of(kv_cache)))
    group, device, is_code = query.shape[1] // num_kv_heads, device_of(query.device), kv_cache.dtype in FORMATS
    itemsize = query.element_size()
    shape = tiling(itemsize, padded_dim, group, max_query_len, device, is_code, has_bias, has_softcap)
    tokens = shape.fit(padded_dim, itemsize, kv_cache.element_size(), device).tokens
    queries, _, num_group_tiles = query_tiling(group, shape.rows)
    slots = -(-PROGRAMS_A_PROCESSOR * device.num_processors // (num_kv_heads * num_group_tiles))
    return Plan(shape.rows, queries, tokens, slots)


def paged_prefill(call: LayerAttention, items: Tensor, split: Tensor, rows: int, exact: bool = False) -> None:
    """Attends for the new tokens that `items` lists.

    Args:
        call: Where everything is.
        items: `[I, 8]` int32, of `decode_work.share_out_queries`, in tiles of `plan`'s shape.
        split: `[N, 4]` int32, of the same; where it is empty, no second kernel is launched.
        rows: Rows of a query tile: `plan`'s.
        exact: See above.
    """
    query_tile, group_tile, num_group_tiles = query_tiling(call.group, rows)
    kind = call.device, bool(call.pool_format), call.bias is not None, call.softcap > 0
    shape = call.fit(tiling(call.query.element_size(), call.padded_dim, 1, rows, *kind))
    if shape.rows < rows:
        raise ValueError(f"a tile has {shape.rows} rows at most for these tensors, got {rows}")
    _prefill_kernel[(items.shape[0], call.num_kv_heads * num_group_tiles)](
        call.output,
        call.partials,
        call.query,
        call.pool,
        call.block_tables,
        call.seq_lens,
        call.query_start_loc,
        items,
        call.sinks,
        call.bias,
        call.layer,
        call.scale,
        call.softcap,
        call.window,
        *call.strides,
        GROUP_TILE=group_tile,
        QUERY_TILE=query_tile,
        M=max(16, next_power_of_two(rows)),
        HAS_WINDOW=call.window > 0,
        EXACT=exact,
        **call.constants(shape),
    )
    combine(call, split, call.padded_dim, at_once=1 if exact else COMBINED_AT_ONCE)
