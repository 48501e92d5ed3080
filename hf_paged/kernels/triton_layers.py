"""RMSNorm, gates and rotary embeddings on a GPU, one launch each; the formulas are those of `layers.py`.

Between the matrix products of a decode step lie dozens of small operations, each of which waits for the one before: in
transformers' code six for a norm, two for a gate, ten for a rotary embedding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.launch import FUSION, next_power_of_two
from hf_paged.kernels.layers import InputError, LayerKernels

MAX_NORM_DIM = 32768  # a row is one program's


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    states,  # [num_rows, DIM], contiguous
    weight,  # [DIM]
    output,  # [num_rows, DIM]
    num_rows,
    eps,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    present = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    index = rows[:, None] * DIM + columns[None, :]
    x = tl.load(states + index, mask=present, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    normed = x * factor[:, None]
    if ROUNDS_FIRST:
        normed = normed.to(output.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < DIM, other=0.0).to(tl.float32) + OFFSET
    tl.store(output + index, (normed * w[None, :]).to(output.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    gate,  # [num_rows, DIM], rows any distance apart
    up,
    output,  # [num_rows, DIM], contiguous
    num_rows,
    stride_gate,
    stride_up,
    LINEAR: tl.constexpr,
    CUBIC: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    present = columns < DIM
    x = tl.load(gate + row * stride_gate + columns, mask=present, other=0.0).to(tl.float32)
    y = tl.load(up + row * stride_up + columns, mask=present, other=0.0).to(tl.float32)
    inner = x * LINEAR
    if CUBIC != 0.0:
        inner += CUBIC * x * x * x
    active = (x * tl.sigmoid(inner)).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * DIM + columns, (active * y).to(output.dtype.element_ty), mask=present)


@triton.jit
def _rotate(
    states, output, cos, sin, heads, num_heads, stride_head, ROTARY, DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: pairs of the first `ROTARY` elements; what lies behind them is copied."""
    pairs = tl.arange(0, HALF)
    half = ROTARY // 2
    first = pairs * 2 if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else first + half
    present = (heads < num_heads)[:, None] & (pairs < half)[None, :]
    x = tl.load(states + heads[:, None] * stride_head + first[None, :], mask=present, other=0.0).to(tl.float32)
    y = tl.load(states + heads[:, None] * stride_head + second[None, :], mask=present, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + first, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + second, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + first, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + second, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    a = x * cos_first
    b = -y * sin_first
    c = y * cos_second
    d = x * sin_second
    kind = output.dtype.element_ty
    if ROUNDS:
        a = a.to(kind).to(tl.float32)
        b = b.to(kind).to(tl.float32)
        c = c.to(kind).to(tl.float32)
        d = d.to(kind).to(tl.float32)
    to = output + heads[:, None] * DIM
    tl.store(to + first[None, :], (a + b).to(kind), mask=present)
    tl.store(to + second[None, :], (c + d).to(kind), mask=present)
    if ROTARY < DIM:
        rest = ROTARY + tl.arange(0, 2 * HALF)
        for start in tl.range(0, DIM - ROTARY, 2 * HALF):
            columns = start + rest
            mask = (heads < num_heads)[:, None] & (columns < DIM)[None, :]
            tail = tl.load(states + heads[:, None] * stride_head + columns[None, :], mask=mask)
            tl.store(to + columns[None, :], tail, mask=mask)


@triton.jit
def _rotary_kernel(
    query,  # [T, QUERY_HEADS, DIM], the last dimension contiguous
    key,  # [T, KEY_HEADS, DIM]
    cos,  # [T, ROTARY], contiguous
    sin,
    query_output,  # contiguous
    key_output,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # of ROTARY, up to the next power of two
    HEADS: tl.constexpr,  # heads of a program
    INTERLEAVED: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    query_tiles: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    cos_row = cos + token * ROTARY
    sin_row = sin + token * ROTARY
    tile = tl.program_id(1)
    if tile < query_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        _rotate(
            query + token * stride_query_token, query_output + token * QUERY_HEADS * DIM, cos_row, sin_row, heads,
            QUERY_HEADS, stride_query_head, ROTARY, DIM, HALF, INTERLEAVED, ROUNDS,
        )  # fmt: skip
    else:
        heads = (tile - query_tiles) * HEADS + tl.arange(0, HEADS)
        _rotate(
            key + token * stride_key_token, key_output + token * KEY_HEADS * DIM, cos_row, sin_row, heads,
            KEY_HEADS, stride_key_head, ROTARY, DIM, HALF, INTERLEAVED, ROUNDS,
        )  # fmt: skip


class TritonLayers(LayerKernels):
    def _are_here(self, *tensors: Tensor) -> bool:
        device = tensors[0].device
        return all(tensor.dtype is self.dtype and tensor.device == device for tensor in tensors)

    def _rms_norm(self, states: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        """One program for some rows."""
        dim = weight.numel()
        if dim > MAX_NORM_DIM:
            raise InputError("rms_norm", f"rows of up to {MAX_NORM_DIM} elements", states=states, weight=weight)
        output = torch.empty_like(states)
        num_rows = states.numel() // dim
        if not num_rows:
            return output
        padded = next_power_of_two(dim)
        rows = max(1, min(16, 2048 // padded))
        with _on(states):
            _rms_norm_kernel[(-(-num_rows // rows),)](
                states,
                weight,
                output,
                num_rows,
                eps,
                OFFSET=offset,
                ROUNDS_FIRST=rounds_first,
                DIM=dim,
                D=padded,
                ROWS=rows,
                num_warps=4 if padded <= 2048 else 8 if padded <= 8192 else 16,
                **FUSION,
            )
        return output

    def _gate(self, gate: Tensor, up: Tensor, gate_row: int, up_row: int, linear: float, cubic: float) -> Tensor:
        """One program for a piece of a row."""
        output = torch.empty_like(gate, memory_format=torch.contiguous_format)
        dim = gate.shape[-1]
        num_rows = gate.numel() // dim
        if not num_rows:
            return output
        tile = min(1024, next_power_of_two(dim))
        with _on(gate):
            _gate_kernel[(num_rows, -(-dim // tile))](
                gate,
                up,
                output,
                num_rows,
                gate_row,
                up_row,
                LINEAR=linear,
                CUBIC=cubic,
                DIM=dim,
                TILE=tile,
                num_warps=4,
                **FUSION,
            )
        return output

    def _rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounds: bool
    ) -> tuple[Tensor, Tensor]:
        """One program for some heads of a token."""
        _, query_heads, tokens, dim = query.shape
        key_heads, rotary_dim = key.shape[1], cos.shape[-1]
        outputs = [
            torch.empty((1, tokens, heads, dim), dtype=query.dtype, device=query.device)
            for heads in (query_heads, key_heads)
        ]
        rotated = outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)
        if not tokens:
            return rotated
        half = next_power_of_two(max(1, rotary_dim // 2))
        heads = max(1, min(next_power_of_two(max(query_heads, key_heads)), 1024 // half))
        with _on(query):
            _rotary_kernel[(tokens, -(-query_heads // heads) + -(-key_heads // heads))](
                query,
                key,
                cos,
                sin,
                *outputs,
                query.stride(2),
                query.stride(1),
                key.stride(2),
                key.stride(1),
                QUERY_HEADS=query_heads,
                KEY_HEADS=key_heads,
                ROTARY=rotary_dim,
                DIM=dim,
                HALF=half,
                HEADS=heads,
                INTERLEAVED=interleaved,
                ROUNDS=rounds,
                num_warps=4,
                **FUSION,
            )
        return rotated


def _on(tensor: Tensor) -> torch.cuda.device:
    """Triton launches on the thread's current device, which need not be the tensor's; no device on CPU."""
    return torch.cuda.device(tensor.device if tensor.device.type == "cuda" else -1)
