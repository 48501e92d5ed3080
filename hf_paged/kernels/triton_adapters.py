"""Adapters behind a linear layer on a GPU, each row its own, in two launches: to ranks, and from there back.

A program stands for a token, and works for it and for those of its 16 neighbours that have the same adapter, if it is
the first of them; else it ends at once. So a launch depends on no list of rows, only on the slots of the tokens: it can
be recorded. Sums are made in an order that follows from the shapes: a row's bits don't depend on other rows' adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels import slot_tables
from hf_paged.kernels.launch import FUSION, device_context, device_of
from hf_paged.kernels.layers import InputError
from hf_paged.kernels.slot_tables import SlotTables
from hf_paged.kernels.tile_ops import dot_add, hash_now

FIELDS = tl.constexpr(slot_tables.FIELDS)
RANK, IS_HALF, SCALE = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)  # fields of an entry behind the addresses
TOKENS, RANKS = 16, 16
WIDTH, COLUMNS = 64, 64  # of a tile
REGISTERS = {
    "maxnreg": 128
}  # without a limit, NVIDIA's assembler gives a thread fewer registers than it needs, and spills
PROGRAMS = 512  # that do something, about: enough for any GPU


@triton.constexpr_function
def _half(kind):
    """The dtype of adapters that are not in float32, beside states of this one."""
    return tl.bfloat16 if kind == tl.float32 else kind


@triton.jit
def _own_work(slots, table, num_tokens, layer, num_layers, TOKENS: tl.constexpr):
    """This program's entry and its rank (0: the program has nothing to do), the tokens around, and which are its."""
    place = tl.program_id(0)
    tokens = place // TOKENS * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + place)
    mine = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1) == slot
    first = tl.min(tl.where(mine, tokens, num_tokens), 0)
    entry = table + (slot.to(tl.int64) * num_layers + layer) * FIELDS
    rank = tl.load(entry + RANK, mask=(slot >= 0) & (first == place), other=0).to(tl.int32)
    return entry, rank, tokens.to(tl.int64), mine


@triton.jit
def _part(entry, place: tl.constexpr, KIND: tl.constexpr):
    """The address of a part of an entry; as far as it is read, it is one of 16 bytes."""
    return tl.multiple_of(tl.load(entry + place).to(tl.pointer_type(KIND)), 16)


@triton.jit
def _to_ranks(
    states, entry, scratch, tokens, mine, rank, start, end, width, room,
    KIND: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    a = _part(entry, 0, KIND)
    for first in range(0, rank, RANKS):
        ranks = first + tl.arange(0, RANKS)
        total = tl.zeros([tokens.shape[0], RANKS], tl.float32)
        for column in range(start, end, WIDTH):
            columns = column + tl.arange(0, WIDTH)
            present = columns < width
            x = tl.load(states + tokens[:, None] * width + columns, mask=mine[:, None] & present, other=0.0)
            w = tl.load(
                a + ranks[None, :].to(tl.int64) * width + columns[:, None],
                mask=(ranks < rank)[None, :] & present[:, None],
                other=0.0,
            )
            if states.dtype.element_ty == KIND:
                total = dot_add(x, w, total)
            else:
                total = dot_add(x.to(tl.float32), w.to(tl.float32), total)
        tl.store(scratch + tokens[:, None] * room + ranks, total, mask=mine[:, None] & (ranks < rank))


@triton.jit(do_not_specialize=["num_tokens", "span", "layer", "num_layers", "room"])
def _shrink_kernel(
    states,  # [T, width], contiguous
    slots,  # [T] int32; below 0: nothing is added
    table,  # [num_slots, num_layers, FIELDS] int64
    scratch,  # [parts, T, room] float32
    num_tokens,
    width,
    span,  # columns of a part, a multiple of WIDTH
    layer,
    num_layers,
    room,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    entry, rank, tokens, mine = _own_work(slots, table, num_tokens, layer, num_layers, TOKENS)
    if rank > 0:
        start = tl.multiple_of(tl.program_id(1) * span, WIDTH)
        end = tl.minimum(start + span, width)
        own = scratch + tl.program_id(1).to(tl.int64) * num_tokens * room
        HALF: tl.constexpr = _half(states.dtype.element_ty)
        if tl.load(entry + IS_HALF) != 0:
            _to_ranks(states, entry, own, tokens, mine, rank, start, end, width, room, HALF, RANKS, WIDTH)
        else:
            _to_ranks(states, entry, own, tokens, mine, rank, start, end, width, room, tl.float32, RANKS, WIDTH)


@triton.jit
def _from_ranks(
    entry, scratch, tokens, mine, columns, present, rank, num_tokens, num_parts, room,
    KIND: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """`b @ (a @ x) + bias` of some columns, float32."""
    b = _part(entry, 1, KIND)
    total = tl.zeros([tokens.shape[0], columns.shape[0]], tl.float32)
    for first in range(0, rank, RANKS):
        ranks = first + tl.arange(0, RANKS)
        there = mine[:, None] & (ranks < rank)
        inner = tl.zeros([tokens.shape[0], RANKS], tl.float32)
        for part in range(num_parts):
            own = scratch + (part * num_tokens + tokens[:, None]) * room
            inner += tl.load(own + ranks, mask=there, other=0.0)
        w = tl.load(
            b + columns[None, :].to(tl.int64) * rank + ranks[:, None],
            mask=present[None, :] & (ranks < rank)[:, None],
            other=0.0,
        )
        total = dot_add(inner, w.to(tl.float32), total)
    if tl.load(entry + 2) != 0:
        total += tl.load(_part(entry, 2, KIND) + columns, mask=present, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["num_tokens", "span", "layer", "num_layers", "room", "num_parts"])
def _expand_kernel(
    scratch,  # [num_parts, T, room] float32
    slots,  # [T] int32
    table,
    base_bias,  # [width]; None: zero
    output,  # [T, width], contiguous
    num_tokens,
    width,
    span,  # columns of a program, a multiple of COLUMNS
    layer,
    num_layers,
    room,
    num_parts,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    entry, rank, tokens, mine = _own_work(slots, table, num_tokens, layer, num_layers, TOKENS)
    if rank > 0:
        start = tl.multiple_of(tl.program_id(1) * span, COLUMNS)
        scale = tl.load(entry + SCALE).to(tl.int32).to(tl.float32, bitcast=True)
        is_half = tl.load(entry + IS_HALF) != 0
        HALF: tl.constexpr = _half(output.dtype.element_ty)
        output_scale = tl.load(entry + 3)
        for column in range(start, tl.minimum(start + span, width), COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            present = columns < width
            if is_half:
                more = _from_ranks(
                    entry, scratch, tokens, mine, columns, present, rank, num_tokens, num_parts, room, HALF, RANKS
                )
            else:
                more = _from_ranks(
                    entry, scratch, tokens, mine, columns, present, rank, num_tokens, num_parts, room, tl.float32,
                    RANKS,
                )  # fmt: skip
            places = output + tokens[:, None] * width + columns
            result = tl.load(places, mask=mine[:, None] & present, other=0.0).to(tl.float32)
            more *= scale
            if output_scale != 0:
                factor = tl.load(_part(entry, 3, tl.float32) + columns, mask=present, other=1.0)[None, :]
                if base_bias is not None:
                    base = tl.load(base_bias + columns, mask=present, other=0.0).to(tl.float32)[None, :]
                    result = factor * (result - base + more) + base
                else:
                    result = factor * (result + more)
            else:
                result += more
            tl.store(places, result.to(output.dtype.element_ty), mask=mine[:, None] & present)


hash_now(_own_work, _part, _to_ranks, _from_ranks)


def add(
    states: Tensor, output: Tensor, slots: Tensor, tables: SlotTables, layer: int, base_bias: Tensor | None = None
) -> None:
    """`low_rank.add_low_rank`, summed in float32 and rounded once.

    Args:
        states: `[..., width]`.
        output: `[..., columns]`, contiguous; changed in place.
        slots: `[T]` int32; below 0: no adapter.
        tables: As of their last `send`. Entries of this layer are of these widths.
        layer: Its place there.
        base_bias: `[columns]`, contiguous.

    Raises:
        InputError: Tensors of other shapes, dtypes, strides or devices.
    """
    given = [states, output] + ([] if base_bias is None else [base_bias])
    if not (
        states.shape[:-1] == output.shape[:-1]
        and states.shape[:-1].numel() == len(slots)
        and output.is_contiguous()
        and slots.dtype is torch.int32
        and (base_bias is None or (base_bias.shape == output.shape[-1:] and base_bias.is_contiguous()))
        and all(own.dtype is tables.dtype and own.device == tables.device for own in given)
    ):
        expected = f"[..., width] and [..., columns] of {tables.dtype} and a slot a row, int32, on {tables.device}"
        raise InputError("adapters", expected, states=states, output=output, slots=slots)
    num_tokens, width, columns = len(slots), states.shape[-1], output.shape[-1]
    if not num_tokens:
        return
    states = states.contiguous()
    if states.data_ptr() % 16:  # else it would be another kernel
        states = states.clone()
    num_tiles = -(-num_tokens // TOKENS)
    num_parts = max(1, min(16, PROGRAMS // num_tiles, width // 256))
    span = -(-width // (num_parts * WIDTH)) * WIDTH
    num_parts = -(-width // span)
    scratch = torch.empty(num_parts, num_tokens, tables.rank, dtype=torch.float32, device=states.device)
    place = layer, tables.num_layers, tables.rank
    shape = {"TOKENS": TOKENS, "RANKS": RANKS, "num_warps": 4} | FUSION
    with device_context(states):
        _shrink_kernel[(num_tokens, num_parts)](
            states, slots, tables.tensor, scratch, num_tokens, width, span, *place, WIDTH=WIDTH, **shape
        )
        num_pieces = -(-columns // COLUMNS)
        own = -(-num_pieces // max(1, min(num_pieces, PROGRAMS // num_tiles)))  # pieces of a program
        _expand_kernel[(num_tokens, -(-num_pieces // own))](
            scratch, slots, tables.tensor, base_bias, output, num_tokens, columns, own * COLUMNS, *place, num_parts,
            COLUMNS=COLUMNS, **shape, **REGISTERS if device_of(states.device).is_nvidia else {},
        )  # fmt: skip
