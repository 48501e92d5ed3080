"""RMSNorm, gates and rotary embeddings on a GPU, one launch each; the formulas are those of `layers.py`.

Between the matrix products of a decode step lie dozens of small operations, each of which waits for the one before: in
transformers' code six for a norm, two for a gate, ten for a rotary embedding. Where a whole decoder layer is known, a
sum and the norm behind it are one launch, as are the norms of heads, their rotary embedding, and writing to the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.launch import FP8_FORMATS, FUSION, NO_FUSION, codes, device_context, next_power_of_two
from hf_paged.kernels.layers import InputError, LayerKernels, NormWeight, Place
from hf_paged.kernels.tile_ops import encode_fp8, hash_now

MAX_NORM_DIM = 32768  # a row is one program's


@triton.jit
def _normed(x, factor, weight, mask, kind: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_FIRST: tl.constexpr):
    """Rows `x` times their factors and the weights that lie at `weight`, rounded to `kind`, as float32."""
    normed = x * factor
    if ROUNDS_FIRST:
        normed = normed.to(kind).to(tl.float32)
    w = tl.load(weight, mask=mask, other=0.0).to(tl.float32) + OFFSET
    return (normed * w[None, :]).to(kind).to(tl.float32)


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
    factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    kind: tl.constexpr = output.dtype.element_ty
    normed = _normed(x, factor, weight + columns, columns < DIM, kind, OFFSET, ROUNDS_FIRST)
    tl.store(output + index, normed.to(kind), mask=present)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_kernel(
    first,  # [num_rows, DIM], contiguous
    second,
    weight,  # [DIM]
    total,  # [num_rows, DIM]
    output,
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
    kind: tl.constexpr = output.dtype.element_ty
    x = tl.load(first + index, mask=present, other=0.0).to(tl.float32)
    x = (x + tl.load(second + index, mask=present, other=0.0).to(tl.float32)).to(kind)
    tl.store(total + index, x, mask=present)
    x = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    normed = _normed(x, factor, weight + columns, columns < DIM, kind, OFFSET, ROUNDS_FIRST)
    tl.store(output + index, normed.to(kind), mask=present)


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
def _code(x, output, FORMAT: tl.constexpr):
    """As the numbers, or the fp8 codes, that lie at `output`."""
    if FORMAT != "":
        return encode_fp8(x.to(tl.float32), FORMAT)
    return x.to(output.dtype.element_ty)


@triton.jit
def _rotate(
    states, output, cos, sin, weight, eps, heads, num_heads, stride_head, stride_output, ROTARY: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROUNDS: tl.constexpr, FORMAT: tl.constexpr,
    NORMED: tl.constexpr, OFFSET: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: pairs of the first `ROTARY` elements; what lies behind them is copied.

    If `NORMED`, heads are normed first, whose elements all are pairs.
    """
    kind: tl.constexpr = states.dtype.element_ty
    pairs = tl.arange(0, HALF)
    half = ROTARY // 2
    first = pairs * 2 if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else first + half
    present = (heads < num_heads)[:, None] & (pairs < half)[None, :]
    x = tl.load(states + heads[:, None] * stride_head + first[None, :], mask=present, other=0.0).to(tl.float32)
    y = tl.load(states + heads[:, None] * stride_head + second[None, :], mask=present, other=0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
        x = _normed(x, factor, weight + first, pairs < half, kind, OFFSET, ROUNDS_FIRST)
        y = _normed(y, factor, weight + second, pairs < half, kind, OFFSET, ROUNDS_FIRST)
    cos_first = tl.load(cos + first, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + second, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + first, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + second, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    a = x * cos_first
    b = -y * sin_first
    c = y * cos_second
    d = x * sin_second
    if ROUNDS:
        a = a.to(kind).to(tl.float32)
        b = b.to(kind).to(tl.float32)
        c = c.to(kind).to(tl.float32)
        d = d.to(kind).to(tl.float32)
    to = output + heads[:, None] * stride_output
    tl.store(to + first[None, :], _code((a + b).to(kind), output, FORMAT), mask=present)
    tl.store(to + second[None, :], _code((c + d).to(kind), output, FORMAT), mask=present)
    if ROTARY < DIM:
        rest = ROTARY + tl.arange(0, 2 * HALF)
        for start in tl.range(0, DIM - ROTARY, 2 * HALF):
            columns = start + rest
            mask = (heads < num_heads)[:, None] & (columns < DIM)[None, :]
            tail = tl.load(states + heads[:, None] * stride_head + columns[None, :], mask=mask)
            tl.store(to + columns[None, :], _code(tail, output, FORMAT), mask=mask)


hash_now(_code, _normed, _rotate)


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
            query + token * stride_query_token, query_output + token * QUERY_HEADS * DIM, cos_row, sin_row, cos_row,
            0.0, heads, QUERY_HEADS, stride_query_head, DIM, ROTARY, DIM, HALF, INTERLEAVED, ROUNDS, "", False, 0.0,
            False,
        )  # fmt: skip
    else:
        heads = (tile - query_tiles) * HEADS + tl.arange(0, HEADS)
        _rotate(
            key + token * stride_key_token, key_output + token * KEY_HEADS * DIM, cos_row, sin_row, cos_row, 0.0,
            heads, KEY_HEADS, stride_key_head, DIM, ROTARY, DIM, HALF, INTERLEAVED, ROUNDS, "", False, 0.0, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _rotary_write_kernel(
    query,  # [T, QUERY_HEADS, DIM], the last dimension contiguous
    key,  # [T, KEY_HEADS, DIM]
    value,
    cos,  # [T, ROTARY], contiguous
    sin,
    query_weight,  # [DIM], of the heads' norms; anything unless NORMED
    key_weight,
    query_output,  # contiguous
    kv_cache,  # [blocks, layers, 2, KEY_HEADS, BLOCK_SIZE, DIM]
    slot_mapping,  # [T] int64; below 0: padding
    layer,
    query_eps,
    key_eps,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_layer,
    stride_kv,
    stride_head,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # of ROTARY, up to the next power of two
    D: tl.constexpr,  # DIM, up to the next power of two
    HEADS: tl.constexpr,  # heads of a program
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUNDS: tl.constexpr,
    FORMAT: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    query_tiles: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    cos_row = cos + token * ROTARY
    sin_row = sin + token * ROTARY
    tile = tl.program_id(1)
    if tile < query_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        _rotate(
            query + token * stride_query_token, query_output + token * QUERY_HEADS * DIM, cos_row, sin_row,
            query_weight, query_eps, heads, QUERY_HEADS, stride_query_head, DIM, ROTARY, DIM, HALF, INTERLEAVED,
            ROUNDS, "", NORMED, OFFSET, ROUNDS_FIRST,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            heads = (tile - query_tiles) * HEADS + tl.arange(0, HEADS)
            to = kv_cache + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * DIM
            to += tl.cast(layer, tl.int64) * stride_layer
            _rotate(
                key + token * stride_key_token, to, cos_row, sin_row, key_weight, key_eps, heads, KEY_HEADS,
                stride_key_head, stride_head, ROTARY, DIM, HALF, INTERLEAVED, ROUNDS, FORMAT, NORMED, OFFSET,
                ROUNDS_FIRST,
            )  # fmt: skip
            columns = tl.arange(0, D)[None, :]
            mask = (heads < KEY_HEADS)[:, None] & (columns < DIM)
            states = tl.load(
                value + token * stride_value_token + heads[:, None] * stride_value_head + columns, mask=mask
            )
            tl.store(to + stride_kv + heads[:, None] * stride_head + columns, _code(states, to, FORMAT), mask=mask)


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
        with device_context(states):
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

    def add_norm(self, first: Tensor, second: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """`first + second`, and `rms_norm` of that, bit for bit as two operations; one program for some rows.

        Args:
            first: `[..., dim]`, contiguous.
            second: Like `first`.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices.
        """
        weight = norm.weight
        if not (
            first.shape == second.shape
            and first.shape[-1:] == weight.shape
            and 0 < weight.shape[0] <= MAX_NORM_DIM
            and first.is_contiguous()
            and second.is_contiguous()
            and weight.is_contiguous()
            and self._are_here(first, second, weight)
        ):
            raise InputError("add_norm", "twice [..., dim] and [dim], contiguous", first=first, second=second, w=weight)
        total, output = torch.empty_like(first), torch.empty_like(first)
        dim = weight.numel()
        num_rows = first.numel() // dim
        if not num_rows:
            return total, output
        padded = next_power_of_two(dim)
        rows = max(1, min(16, 2048 // padded))
        with device_context(first):
            _add_norm_kernel[(-(-num_rows // rows),)](
                first,
                second,
                weight,
                total,
                output,
                num_rows,
                norm.eps,
                OFFSET=norm.offset,
                ROUNDS_FIRST=norm.rounds_first,
                DIM=dim,
                D=padded,
                ROWS=rows,
                num_warps=4 if padded <= 2048 else 8 if padded <= 8192 else 16,
                **FUSION,
            )
        return total, output

    def _gate(self, gate: Tensor, up: Tensor, gate_row: int, up_row: int, linear: float, cubic: float) -> Tensor:
        """One program for a piece of a row."""
        output = torch.empty_like(gate, memory_format=torch.contiguous_format)
        dim = gate.shape[-1]
        num_rows = gate.numel() // dim
        if not num_rows:
            return output
        tile = min(1024, next_power_of_two(dim))
        with device_context(gate):
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
        with device_context(query):
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
                **NO_FUSION,
            )
        return rotated

    def rotary_write(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
        kinds: tuple[bool, bool],
        norms: tuple[NormWeight, NormWeight] | None,
        place: Place,
    ) -> Tensor:
        """Heads' norms, if there are any, `rotary`, and keys and values to their slots; one program for some heads.

        Args:
            heads: Queries, keys and values, `[tokens, heads, dim]`, the last dimension contiguous.
            angles: Cos and sin, `[1, tokens, rotary_dim]`, contiguous.
            kinds: `interleaved` and `rounds` of `rotary`.
            norms: Of queries and of keys, alike but for weight and eps; heads are then rotated as a whole.
            place: Where keys and values go; a slot below 0 is not written.

        Returns:
            `[tokens, heads, dim]` queries, contiguous.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices.
        """
        (query, key, value), (cos, sin), (kv_cache, layer, slots) = heads, angles, place
        tokens, query_heads, dim = query.shape
        key_heads, rotary_dim, block_size = key.shape[1], cos.shape[-1], kv_cache.shape[4]
        norm, other = (None, None) if norms is None else norms
        if not (
            key.shape == value.shape == (tokens, kv_cache.shape[3], dim)
            and query.stride(2) == key.stride(2) == value.stride(2) == 1
            and cos.shape == sin.shape == (1, tokens, rotary_dim)
            and rotary_dim <= dim
            and rotary_dim % 2 == 0
            and cos.is_contiguous()
            and sin.is_contiguous()
            and slots.shape == (tokens,)
            and slots.is_contiguous()
            and kv_cache.shape[2] == 2
            and kv_cache.stride()[4:] == (dim, 1)
            and 0 <= layer < kv_cache.shape[1]
            and self._are_here(query, key, value, cos, sin)
            and kv_cache.device == query.device == slots.device
        ):
            expected = "[tokens, heads, dim] queries, keys and values, cos and sin, and a pool and slots for these"
            raise InputError("rotary_write", expected, query=query, key=key, value=value, cos=cos, pool=kv_cache)
        if norm is not None and other is not None:
            weights = norm.weight, other.weight
            alike = norm.offset == other.offset and norm.rounds_first == other.rounds_first and rotary_dim == dim
            fit = all(weight.shape == (dim,) and weight.is_contiguous() for weight in weights)
            if not (alike and fit and self._are_here(query, *weights)):
                expected = "norms of one kind, over heads that are rotated as a whole"
                raise InputError("rotary_write", expected, query=query, first=weights[0], second=weights[1], cos=cos)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if not tokens:
            return output
        half = next_power_of_two(max(1, rotary_dim // 2))
        own = max(1, min(next_power_of_two(max(query_heads, key_heads)), 1024 // half))
        with device_context(query):
            _rotary_write_kernel[(tokens, -(-query_heads // own) + -(-key_heads // own))](
                query,
                key,
                value,
                cos,
                sin,
                cos if norm is None else norm.weight,
                cos if other is None else other.weight,
                output,
                codes(kv_cache),
                slots,
                layer,
                0.0 if norm is None else norm.eps,
                0.0 if other is None else other.eps,
                *query.stride()[:2],
                *key.stride()[:2],
                *value.stride()[:2],
                *kv_cache.stride()[:4],
                QUERY_HEADS=query_heads,
                KEY_HEADS=key_heads,
                ROTARY=rotary_dim,
                DIM=dim,
                HALF=half,
                D=next_power_of_two(dim),
                HEADS=own,
                BLOCK_SIZE=block_size,
                INTERLEAVED=kinds[0],
                ROUNDS=kinds[1],
                FORMAT=FP8_FORMATS.get(kv_cache.dtype, ""),
                NORMED=norm is not None,
                OFFSET=0.0 if norm is None else norm.offset,
                ROUNDS_FIRST=norm is not None and norm.rounds_first,
                num_warps=4,
                **NO_FUSION,
            )
        return output
