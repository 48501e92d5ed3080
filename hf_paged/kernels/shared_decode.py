"""Tokens that several decoding sequences share, read once for some of these sequences: a pass before `paged_decode`.

A program takes one (item of `decode_work.py`, kv head): some KV tiles, and sequences whose tables begin with the blocks
of these. The rows of its tile are (sequence, query head of the kv head), as many as the matrix units have room for:

    row r        sequence  first_member + r // GROUP        head  kv_head * GROUP + r % GROUP

Each row sees all tokens of all tiles, so nothing is masked. What comes out of a row, `(acc, m, l)` of
`online_softmax.py`, is one of its sequence's partial results, beside those of the tiles that it reads alone: the same
kernel combines them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels import paged_decode
from hf_paged.kernels.launch import Device, LayerAttention, Tiling, device_of, next_power_of_two
from hf_paged.kernels.online_softmax import attend_tiles, start_rows
from hf_paged.kernels.paged_decode import PROGRAMS_A_PROCESSOR, STATS
from hf_paged.kernels.tile_ops import LOG2_E

ROWS = 64  # of a tile in half precision: more hold their sums in registers that the tiles in flight need


@triton.jit(do_not_specialize=["layer", "stride_table"])
def _shared_decode_kernel(
    partials,  # [parts, H, HEAD_DIM + STATS] float32: acc, m, l
    query,  # [T, H, HEAD_DIM]
    kv_cache,  # [blocks, layers, 2, kv_heads, BLOCK_SIZE, HEAD_DIM]
    block_tables,  # [S, N] int32
    seq_lens,  # [S] int32; None without a bias, which alone asks for them
    items,  # [J, 4] int32: first member, members, first tile, tiles
    members,  # [S, 4] int32: sequence, its part that item 0 would make, 0, 0
    sinks,  # [H] or None
    bias,  # [H, BIAS] float32 or None
    layer,
    scale,
    softcap,
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
    M: tl.constexpr,  # rows of the tile, a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,  # distances of the bias; 0: none
):
    item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    first_member = tl.load(items + item * 4)
    num_members = tl.load(items + item * 4 + 1)
    first_tile = tl.load(items + item * 4 + 2)
    last_tile = first_tile + tl.load(items + item * 4 + 3)

    rows = tl.arange(0, M)
    is_real = rows // GROUP < num_members
    member = members + (first_member + tl.where(is_real, rows // GROUP, 0)) * 4
    sequences = tl.load(member)
    heads = kv_head * GROUP + rows % GROUP
    columns = tl.arange(0, D)
    stored = is_real[:, None] & (columns[None, :] < HEAD_DIM)

    query_rows = sequences.to(tl.int64) * stride_query_token + heads.to(tl.int64) * stride_query_head
    q = tl.load(query + query_rows[:, None] + columns[None, :], mask=stored, other=0.0)
    acc, row_max, row_sum = start_rows(heads, sinks, sinks is not None, M, D)
    if sinks is not None:  # counted once
        row_max = tl.where(first_tile == 0, row_max, float("-inf"))
    # Wherever the rows are, all of them see these tiles: only a bias asks.
    positions = rows if seq_lens is None else tl.load(seq_lens + sequences) - 1
    score_scale = scale / softcap if HAS_SOFTCAP else scale * LOG2_E

    key_base = kv_cache + tl.cast(layer, tl.int64) * stride_layer + kv_head * tl.cast(stride_head, tl.int64)
    acc, row_max, row_sum = attend_tiles(
        acc,
        row_max,
        row_sum,
        q,
        positions,
        key_base,
        key_base + stride_kv,
        block_tables + tl.load(members + first_member * 4).to(tl.int64) * stride_table,
        stride_block,
        first_tile,
        last_tile,
        last_tile * TILE - 1,
        score_scale,
        softcap * LOG2_E,
        0,
        bias,
        heads,
        BLOCK_SIZE,
        TILE,
        HEAD_DIM,
        D,
        FORMAT,
        NATIVE,
        False,
        HAS_SOFTCAP,
        BIAS,
        False,
    )

    part = tl.load(member + 1) + item
    partial_rows = (part.to(tl.int64) * NUM_HEADS + heads) * (HEAD_DIM + STATS)
    tl.store(partials + partial_rows[:, None] + columns[None, :], acc, mask=stored)
    tl.store(partials + partial_rows + HEAD_DIM, row_max, mask=is_real)
    tl.store(partials + partial_rows + HEAD_DIM + 1, row_sum, mask=is_real)


def tiling(head_dim: int, itemsize: int, pool_itemsize: int, device: Device) -> Tiling:
    """Shape of a program's tile as this device can have it: that of a decoding kv head with many query heads.

    Args:
        head_dim: Elements of a head.
        itemsize: Bytes of a query element.
        pool_itemsize: Bytes of an element of the pool.
        device: Where the kernels run.
    """
    padded_dim = next_power_of_two(max(16, head_dim))
    return paged_decode.tiling(itemsize, padded_dim, ROWS).fit(padded_dim, itemsize, pool_itemsize, device)


def plan(query: Tensor, kv_cache: Tensor) -> tuple[int, int, int, int, int] | None:
    """How sequences with these queries `[T, num_heads, head_dim]` read together what they share.

    Returns:
        Tokens of a KV tile, items that the device works on at once, sequences that an item has room for; bytes of a
        token's keys and values, and of a sequence's partial result. `None` where a kv head has too many query heads
        for two sequences in a tile.
    """
    (_, num_heads, head_dim), num_kv_heads, itemsize = query.shape, kv_cache.shape[3], kv_cache.element_size()
    device = device_of(query.device)
    shape = tiling(head_dim, query.element_size(), itemsize, device)
    most = shape.rows // (num_heads // num_kv_heads)
    slots = -(-PROGRAMS_A_PROCESSOR * device.num_processors // num_kv_heads)
    part_bytes = 4 * paged_decode.partials_size(1, num_heads, head_dim)
    return (shape.tokens, slots, most, 2 * num_kv_heads * head_dim * itemsize, part_bytes) if most > 1 else None


def shared_decode(call: LayerAttention, items: Tensor, members: Tensor) -> None:
    """Attends to the tiles that `items` lists for sequences with one new token each; only `call.partials` is written.

    Args:
        call: Where everything is; without a window.
        items: `[J, 4]` int32, of `decode_work.read_together`, in tiles of `plan`'s.
        members: `[S, 4]` int32, of the same.
    """
    shape = tiling(call.head_dim, call.query.element_size(), call.kv_cache.element_size(), call.device)
    if call.bias is not None:  # whose numbers are fetched ahead as well, into shared memory
        shape = shape._replace(num_stages=2)
    _shared_decode_kernel[(items.shape[0] * call.num_kv_heads,)](
        call.partials,
        call.query,
        call.pool,
        call.block_tables,
        None if call.bias is None else call.seq_lens,
        items,
        members,
        call.sinks,
        call.bias,
        call.layer,
        call.scale,
        call.softcap,
        *call.strides,
        M=shape.rows,
        **call.constants(shape),
    )
