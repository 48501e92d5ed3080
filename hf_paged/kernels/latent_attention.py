"""Paged attention over latents: rows of `[latent, rotary key]` are the keys of one head, their latents its values.

All query heads read the same rows, so a tile of them is what one matrix product takes. The heads of a token are the
rows of a program's tile, and each new token is read for by itself: a chunk of a prompt that is absorbed is a row a
token, with the tokens before it. Work is shared out and combined as in `paged_decode.py`; a tile of latents is read
once and multiplied twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.launch import (
    FP8_FORMATS,
    FUSION,
    Device,
    LayerAttention,
    Tiling,
    codes,
    device_of,
    next_power_of_two,
)
from hf_paged.kernels.online_softmax import start_rows
from hf_paged.kernels.paged_decode import PROGRAMS_A_PROCESSOR, STATS, combine
from hf_paged.kernels.tile_ops import LOG2_E, dot, dot_add, encode_fp8, load_states, tanh


@triton.jit(do_not_specialize=["layer", "window", "stride_table"])
def _latent_decode_kernel(
    output,  # [T, H, LATENT], contiguous
    partials,  # [parts, H, LATENT + STATS] float32: acc, m, l
    query,  # [T, H, LATENT + ROTARY], contiguous
    kv_cache,  # [blocks, layers, 1, 1, BLOCK_SIZE, LATENT + ROTARY]
    block_tables,  # [T, N] int32
    seq_lens,  # [T] int32; 0: padding
    items,  # [I, 4] int32: part, sequence, first tile, tiles; a sequence below 0: nothing to do
    sinks,  # [H] or None
    layer,
    scale,
    softcap,
    window,
    stride_table,
    stride_block,
    stride_layer,
    NUM_HEADS: tl.constexpr,
    M: tl.constexpr,  # heads of one program, a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LATENT: tl.constexpr,
    L: tl.constexpr,  # up to the next power of two
    ROTARY: tl.constexpr,
    R: tl.constexpr,  # up to the next power of two
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    num_programs: tl.constexpr = (NUM_HEADS + M - 1) // M  # of an item, next to each other: they read the same rows
    ROW: tl.constexpr = LATENT + ROTARY
    item = tl.program_id(0) // num_programs
    sequence = tl.load(items + item * 4 + 1)
    if sequence < 0:
        return
    rows = tl.program_id(0) % num_programs * M + tl.arange(0, M)
    is_real = rows < NUM_HEADS
    heads = tl.where(is_real, rows, 0)
    latents = tl.arange(0, L)[None, :]
    rotaries = tl.arange(0, R)[None, :]

    seq_len = tl.load(seq_lens + sequence)
    first_tile = tl.load(items + item * 4 + 2)
    last_tile = first_tile + tl.load(items + item * 4 + 3)
    is_first = first_tile == (tl.maximum(seq_len - window, 0) // TILE if HAS_WINDOW else 0)
    is_whole = is_first & (last_tile * TILE >= seq_len)
    last_position = tl.maximum(seq_len - 1, 0)

    queries = query + ((sequence.to(tl.int64) * NUM_HEADS + heads) * ROW)[:, None]
    q_latent = tl.load(queries + latents, mask=is_real[:, None] & (latents < LATENT), other=0.0)
    q_rotary = tl.load(queries + LATENT + rotaries, mask=is_real[:, None] & (rotaries < ROTARY), other=0.0)
    acc, row_max, row_sum = start_rows(heads, sinks, sinks is not None, M, L)
    if sinks is not None:  # counted once
        row_max = tl.where(is_first, row_max, float("-inf"))
    score_scale = scale / softcap if HAS_SOFTCAP else scale * LOG2_E

    base = kv_cache + tl.cast(layer, tl.int64) * stride_layer
    table = block_tables + sequence.to(tl.int64) * stride_table
    present = tl.minimum(first_tile * TILE + tl.arange(0, TILE), last_position)
    blocks = tl.load(table + present // BLOCK_SIZE)
    # As in `attend_tiles`: nothing is hoisted.
    for tile in tl.range(first_tile, last_tile, disable_licm=True):
        tokens = tile * TILE + tl.arange(0, TILE)
        present = tl.minimum(tokens, last_position)
        next_blocks = tl.load(table + tl.minimum(tokens + TILE, last_position) // BLOCK_SIZE)
        first = base + (blocks.to(tl.int64) * stride_block + (present % BLOCK_SIZE) * ROW)[:, None]
        latent = load_states(first + latents, latents < LATENT, FORMAT, NATIVE, query.dtype.element_ty, LATENT != L)
        rotary = load_states(
            first + LATENT + rotaries, rotaries < ROTARY, FORMAT, NATIVE, query.dtype.element_ty, ROTARY != R
        )
        scores = dot_add(q_rotary, tl.trans(rotary), dot(q_latent, tl.trans(latent)))  # [M, TILE]
        if HAS_SOFTCAP:
            scores = tanh(scores * score_scale) * (softcap * LOG2_E)
        else:
            scores = scores * score_scale
        visible = tokens < seq_len
        if HAS_WINDOW:
            visible = visible & (tokens >= seq_len - window)
        scores = tl.where(visible[None, :], scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
        acc = dot_add(weights.to(query.dtype.element_ty), latent, acc * decay[:, None])
        blocks = next_blocks

    stored = is_real[:, None] & (latents < LATENT)
    if is_whole:
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        output_rows = (sequence.to(tl.int64) * NUM_HEADS + heads) * LATENT
        tl.store(output + output_rows[:, None] + latents, acc.to(output.dtype.element_ty), mask=stored)
    else:
        part = tl.load(items + item * 4)
        partial_rows = (part.to(tl.int64) * NUM_HEADS + heads) * (LATENT + STATS)
        tl.store(partials + partial_rows[:, None] + latents, acc, mask=stored)
        tl.store(partials + partial_rows + LATENT, row_max, mask=is_real)
        tl.store(partials + partial_rows + LATENT + 1, row_sum, mask=is_real)


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def _write_latents_kernel(
    latent,  # [T, 1, LATENT], any strides
    rotary,  # [T, 1, ROTARY], any strides
    kv_cache,  # [blocks, layers, 1, 1, BLOCK_SIZE, LATENT + ROTARY]
    slot_mapping,  # [T] int64; below 0: padding
    layer,
    num_tokens,
    stride_latent_token,
    stride_latent_dim,
    stride_rotary_token,
    stride_rotary_dim,
    stride_block,
    stride_layer,
    BLOCK_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    L: tl.constexpr,
    ROTARY: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
    is_real = (slots >= 0)[:, None]
    first = (slots // BLOCK_SIZE) * stride_block + (slots % BLOCK_SIZE) * (LATENT + ROTARY)
    to = kv_cache + tl.cast(layer, tl.int64) * stride_layer + first[:, None]
    columns = tl.arange(0, L)[None, :]
    mask = is_real & (columns < LATENT)
    states = tl.load(latent + (tokens * stride_latent_token)[:, None] + columns * stride_latent_dim, mask=mask)
    if FORMAT != "":
        states = encode_fp8(states.to(tl.float32), FORMAT)
    tl.store(to + columns, states.to(kv_cache.dtype.element_ty), mask=mask)
    columns = tl.arange(0, R)[None, :]
    mask = is_real & (columns < ROTARY)
    states = tl.load(rotary + (tokens * stride_rotary_token)[:, None] + columns * stride_rotary_dim, mask=mask)
    if FORMAT != "":
        states = encode_fp8(states.to(tl.float32), FORMAT)
    tl.store(to + LATENT + columns, states.to(kv_cache.dtype.element_ty), mask=mask)


def write_latents(latent: Tensor, rotary: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Writes the new latents and rotary keys of one layer into their slots.

    Args:
        latent: `[T, 1, latent_dim]`, any strides and any floating dtype.
        rotary: `[T, 1, rotary_dim]`, like it.
        kv_cache: `[blocks, layers, 1, 1, block_size, latent_dim + rotary_dim]`, changed in place.
        layer: Layer index.
        slot_mapping: `[T]` int64; below 0: not written.
    """
    num_tokens, latent_dim, rotary_dim = latent.shape[0], latent.shape[2], rotary.shape[2]
    if num_tokens == 0:
        return
    padded = next_power_of_two(latent_dim)
    rows = max(1, min(16, 4096 // padded))
    _write_latents_kernel[(-(-num_tokens // rows),)](
        latent,
        rotary,
        codes(kv_cache),
        slot_mapping,
        layer,
        num_tokens,
        latent.stride(0),
        latent.stride(2),
        rotary.stride(0),
        rotary.stride(2),
        *kv_cache.stride()[:2],
        BLOCK_SIZE=kv_cache.shape[4],
        LATENT=latent_dim,
        L=padded,
        ROTARY=rotary_dim,
        R=next_power_of_two(rotary_dim),
        ROWS=rows,
        FORMAT=FP8_FORMATS.get(kv_cache.dtype, ""),
        num_warps=4,
        **FUSION,
    )


@dataclass(frozen=True, slots=True)
class LatentWidths:
    """What a tile's shape depends on.

    Attributes:
        num_heads: Query heads.
        latent_dim: Elements of a latent.
        row_dim: Elements of a latent and a rotary key.
        itemsize: Bytes of a query element.
        pool_itemsize: Bytes of an element of the pool.
    """

    num_heads: int
    latent_dim: int
    row_dim: int
    itemsize: int
    pool_itemsize: int

    @classmethod
    def of(cls, query: Tensor, kv_cache: Tensor, latent_dim: int) -> LatentWidths:
        """From queries `[T, num_heads, row_dim]` and a pool."""
        return cls(query.shape[1], latent_dim, query.shape[2], query.element_size(), kv_cache.element_size())

    @property
    def padded(self) -> tuple[int, int]:
        """Latent and rotary key, up to the powers of two that matrix products take."""
        return (
            next_power_of_two(max(16, self.latent_dim)),
            next_power_of_two(max(16, self.row_dim - self.latent_dim)),
        )


def tiling(widths: LatentWidths, device: Device) -> Tiling:
    """Shape of a program's tile: as many heads as there are, up to what the registers hold a sum of.

    The sum is as wide as a latent: 16 rows of 512 numbers are 64 registers of each thread of four warps.

    Args:
        widths: See the class.
        device: Where the kernels run.
    """
    padded = sum(widths.padded)
    if widths.itemsize == 4:  # no tensor cores multiply float32 exactly: the product lives in registers
        return Tiling(rows=16, tokens=16, num_warps=8, num_stages=2)
    is_light = device.reads_shared_factors and widths.pool_itemsize > 1  # else factors take registers, too
    is_decoded = widths.pool_itemsize == 1 and not device.has_native_fp8  # codes, by shifts in registers
    most = 64 if is_light or widths.padded[0] <= 256 else 16 if is_decoded else 32
    rows = max(16, min(most, next_power_of_two(widths.num_heads)))
    tokens, stages = (64, 3) if padded <= 320 else (32, 2 if rows > 32 else 3)
    if is_decoded and device.shared_memory <= 65_536:  # AMD's, where they take more of them
        tokens = 16
    is_wide = rows > 16 or widths.pool_itemsize == 1  # what fp8 codes become takes registers
    shape = Tiling(rows, tokens, num_warps=8 if is_wide else 4, num_stages=stages)
    return shape.fit(padded, widths.itemsize, widths.pool_itemsize, device, num_parts=1)


def plan(query: Tensor, kv_cache: Tensor, latent_dim: int) -> tuple[int, int]:
    """Tokens of a program's tile with absorbed queries `[T, num_heads, latent_dim + rotary_dim]`, and the items that a
    device works on at once.
    """
    device = device_of(query.device)
    shape = tiling(LatentWidths.of(query, kv_cache, latent_dim), device)
    programs = -(-query.shape[1] // shape.rows)
    return shape.tokens, -(-PROGRAMS_A_PROCESSOR * device.num_processors // programs)


def latent_decode(call: LayerAttention, items: Tensor, split: Tensor) -> None:
    """Attends for the sequences that `items` lists, which have one new token each.

    Args:
        call: Where everything is: the output is as wide as a latent, the contiguous query as a row of the pool.
        items: `[I, 4]` int32, of `decode_work.share_out`, in tiles of `plan`'s shape.
        split: `[S, 4]` int32, of the same; where it is empty, no second kernel is launched.
    """
    widths = LatentWidths.of(call.query, call.kv_cache, call.output.shape[2])
    shape, (padded_latent, padded_rotary) = tiling(widths, call.device), widths.padded
    _latent_decode_kernel[(items.shape[0] * -(-widths.num_heads // shape.rows),)](
        call.output,
        call.partials,
        call.query,
        call.pool,
        call.block_tables,
        call.seq_lens,
        items,
        call.sinks,
        call.layer,
        call.scale,
        call.softcap,
        call.window,
        call.block_tables.stride(0),
        *call.kv_cache.stride()[:2],
        NUM_HEADS=widths.num_heads,
        M=shape.rows,
        BLOCK_SIZE=call.block_size,
        TILE=shape.tokens,
        LATENT=widths.latent_dim,
        L=padded_latent,
        ROTARY=widths.row_dim - widths.latent_dim,
        R=padded_rotary,
        FORMAT=call.pool_format,
        NATIVE=call.device.has_native_fp8,
        HAS_WINDOW=call.window > 0,
        HAS_SOFTCAP=call.softcap > 0,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **FUSION,
    )
    combine(call, split, padded_latent)
