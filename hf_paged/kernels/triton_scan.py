"""Short convolutions and scans over states that stay in a pool's pages, for packed rows of any lengths in one launch.

As `cpu_scan.py`: one formula for all tokens, one after the other, so where a prompt was cut leaves no trace. A row's
state is read where the row begins to be computed and written where it ends, at the addresses that its pages give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.cpu_scan import DELTA, MAX_KEYS, MAX_WIDTH, SELECTIVE
from hf_paged.kernels.launch import FUSION, device_context, next_power_of_two
from hf_paged.kernels.layers import InputError
from hf_paged.kernels.paged_state import PagedState, StateRows

TILE = 1024  # numbers of a state that a program holds
CHANNELS = 128  # of a convolution that a program computes


@triton.jit
def _places(pool, pages, numbers, mask, page, PAGE: tl.constexpr, IN_ONE: tl.constexpr):
    """Addresses of some numbers of a row's pages; `IN_ONE`: all of them are in one, which is `page`."""
    if IN_ONE:
        return pool + tl.load(pages + page) * PAGE + (numbers - page * PAGE)
    return pool + tl.load(pages + numbers // PAGE, mask=mask, other=0) * PAGE + numbers % PAGE


@triton.jit
def _tokens_of(row, seq_lens, start_loc):
    """A row's first token, the one behind its last, how many are before it, and whether its state is to be read."""
    first, end = tl.load(start_loc + row), tl.load(start_loc + row + 1)
    before = tl.load(seq_lens + row) - (end - first)
    return first, end, before, (before > 0) & (end > first)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["offset", "page", "stride_token"])
def _convolve_kernel(
    states,  # [T, channels], any strides
    weight,  # [channels, WIDTH], contiguous
    bias,  # [channels]
    output,  # [T, channels], contiguous
    pool,
    pages,  # [S, pages]
    seq_lens,  # [S]
    start_loc,  # [S + 1]
    channels,
    offset,
    page,  # that has the state, if one has all of it
    stride_token,
    stride_channel,
    stride_pages,
    PAGE: tl.constexpr,
    IN_ONE: tl.constexpr,
    STATE: tl.constexpr,  # tokens of a state
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens and
    CHANNELS: tl.constexpr,  # channels of a tile
):
    row = tl.program_id(0)
    first, end, _, is_begun = _tokens_of(row, seq_lens, start_loc)
    pages += row.to(tl.int64) * stride_pages
    own = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    present = own < channels
    for start in tl.range(first, end, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        inside = (tokens < end)[:, None] & present[None, :]
        total = tl.zeros([TOKENS, CHANNELS], dtype=tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + own, mask=present, other=0.0).to(tl.float32)[None, :]
        for k in tl.static_range(WIDTH):
            source = tokens - (WIDTH - 1) + k
            is_new = inside & (source >= first)[:, None]
            new = states + source.to(tl.int64)[:, None] * stride_token + own[None, :] * stride_channel
            x = tl.load(new, mask=is_new, other=0.0).to(tl.float32)
            column = STATE + source - first
            is_old = inside & is_begun & ((source < first) & (column >= 0))[:, None]
            numbers = offset + own[None, :] * STATE + column[:, None]
            x += tl.load(_places(pool, pages, numbers, is_old, page, PAGE, IN_ONE), mask=is_old, other=0.0).to(
                tl.float32
            )
            total += x * tl.load(weight + own * WIDTH + k, mask=present, other=0.0).to(tl.float32)[None, :]
        if SILU:
            total = _silu(total)
        to = output + tokens.to(tl.int64)[:, None] * channels + own[None, :]
        tl.store(to, total.to(output.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # other threads of this program may still read the state
    if first < end:
        for column in tl.static_range(STATE):  # each is read before it is written, by the same thread
            source = end - STATE + column
            is_new = present & (source >= first)
            new = states + tl.cast(source, tl.int64) * stride_token + own * stride_channel
            is_old = present & (source < first) & is_begun
            numbers = offset + own * STATE
            before = numbers + (STATE + source - first)
            value = tl.load(new, mask=is_new, other=0.0).to(pool.dtype.element_ty)
            old = tl.load(_places(pool, pages, before, is_old, page, PAGE, IN_ONE), mask=is_old, other=0.0)
            value = tl.where(is_new, value, old)
            tl.store(_places(pool, pages, numbers + column, present, page, PAGE, IN_ONE), value, mask=present)


@triton.jit
def _load_row(x, stride_token, stride_head, token, head, columns, mask):
    return tl.load(x + token * stride_token + head * stride_head + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["offset", "page", "stride_query_token", "stride_key_token", "stride_value_token",
                               "stride_gate_token"])  # fmt: skip
def _scan_kernel(
    query,  # [T, key heads, KEYS], the last dimension contiguous
    key,
    value,  # [T, HEADS, VALUES]
    gate,  # like value; anything unless GATED
    decay,  # float32; DELTA: [T, HEADS, DECAYS]; SUM: [HEADS]; SELECTIVE: [HEADS, VALUES, KEYS]
    step,  # [T, HEADS, STEPS] float32
    skip,  # [HEADS, VALUES] float32; anything unless SKIP
    output,  # [T, HEADS, VALUES], contiguous
    pool,
    pages,  # [S, pages]
    seq_lens,  # [S]
    start_loc,  # [S + 1]
    nums_at_once,  # [S]
    scale,
    low,
    high,
    offset,
    page,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_gate_token,
    stride_gate_head,
    stride_pages,
    PAGE: tl.constexpr,
    IN_ONE: tl.constexpr,
    KIND: tl.constexpr,
    DELTA: tl.constexpr,
    SELECTIVE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a key head
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    STATE_HEAD: tl.constexpr,  # strides of a state
    STATE_KEY: tl.constexpr,
    STATE_VALUE: tl.constexpr,
    DECAYS: tl.constexpr,
    STEPS: tl.constexpr,
    LIMITED: tl.constexpr,  # whether steps of tokens that came together are between low and high
    NORMED: tl.constexpr,
    SKIP: tl.constexpr,
    GATED: tl.constexpr,
    K: tl.constexpr,  # KEYS, up to the next power of two
    V: tl.constexpr,  # values of a program
):
    row, head = tl.program_id(0), tl.program_id(1)
    first, end, before, is_begun = _tokens_of(row, seq_lens, start_loc)
    keys = tl.arange(0, K)
    values = tl.program_id(2) * V + tl.arange(0, V)
    has_key, has_value = keys < KEYS, values < VALUES
    present = has_key[:, None] & has_value[None, :]
    numbers = offset + head * STATE_HEAD + keys[:, None] * STATE_KEY + values[None, :] * STATE_VALUE
    places = _places(pool, pages + row.to(tl.int64) * stride_pages, numbers, present, page, PAGE, IN_ONE)
    state = tl.load(places, mask=present & is_begun, other=0.0)
    if KIND == SELECTIVE:
        rates = tl.load(decay + (head * VALUES + values[None, :]) * KEYS + keys[:, None], mask=present, other=0.0)
    if SKIP:
        factor = tl.load(skip + head * VALUES + values, mask=has_value, other=0.0)
    at_once = tl.maximum(tl.load(nums_at_once + row), 1)  # transformers' form for a prompt, also of one token
    for number in tl.range(first, end):
        token = tl.cast(number, tl.int64)
        place = token * HEADS + head
        q = _load_row(query, stride_query_token, stride_query_head, token, head // GROUP, keys, has_key)
        k = _load_row(key, stride_key_token, stride_key_head, token, head // GROUP, keys, has_key)
        v = _load_row(value, stride_value_token, stride_value_head, token, head, values, has_value)
        if NORMED:
            q *= scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
            k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        if STEPS > 1:
            size = tl.load(step + place * STEPS + values, mask=has_value, other=0.0)
        else:
            size = tl.load(step + place)
        if LIMITED:
            is_limited = before + number - first < at_once
            size = tl.where(is_limited, tl.minimum(tl.maximum(size, low), high), size)
        if KIND == SELECTIVE:
            state *= tl.exp(size[None, :] * rates)
        elif KIND != DELTA:
            state *= tl.exp(size * tl.load(decay + head))
        elif DECAYS > 1:
            state *= tl.load(decay + place * DECAYS + keys, mask=has_key, other=0.0)[:, None]
        else:
            state *= tl.load(decay + place)
        added = v
        if KIND == DELTA:
            added -= tl.sum(state * k[:, None], 0)
        added *= size
        state += k[:, None] * added[None, :]
        total = tl.sum(state * q[:, None], 0)
        if SKIP:
            total += v * factor
        if GATED:
            total *= _silu(_load_row(gate, stride_gate_token, stride_gate_head, token, head, values, has_value))
        tl.store(output + place * VALUES + values, total.to(output.dtype.element_ty), mask=has_value)
    if first < end:  # addresses anew, which would take twice the state's registers over the loop
        places = _places(pool, pages + row.to(tl.int64) * stride_pages, numbers, present, page, PAGE, IN_ONE)
        tl.store(places, state, mask=present)


def convolve(states: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool, state: PagedState) -> Tensor:
    """As `cpu_scan.convolve` of each row behind the tokens that its state holds, which become the last ones.

    Args:
        states: `[1, channels, T]`, of any strides.
        weight: `[channels, width]`, up to `MAX_WIDTH`; the last column is for the token itself.
        bias: `[channels]`.
        is_silu: Whether they go through SiLU, before they are rounded.
        state: `[S, channels, tokens]`, of at least `width - 1` tokens.

    Returns:
        `[1, channels, T]`, the transpose of a contiguous tensor.

    Raises:
        InputError: Tensors of other shapes, dtypes or devices.
    """
    _, channels, length = states.shape
    width, held = weight.shape[-1], state.shape[-1]
    if (
        len(states) != 1
        or weight.shape != (channels, width)
        or width > MAX_WIDTH
        or state.shape[1:] != (channels, held)
        or not width - 1 <= held <= MAX_WIDTH
        or (bias is not None and bias.shape != (channels,))
        or not _are_there(states.dtype, state, states, weight, bias)
        or not state.pool.is_floating_point()
    ):
        raise InputError("convolve", f"[1, channels, T], [channels, up to {MAX_WIDTH}]", states=states, weight=weight)
    rows, weight = state.rows, weight.contiguous()
    output = _output(rows, states, (1, length, channels))
    tokens, own = 1 if rows.is_decode else 8, min(CHANNELS, next_power_of_two(channels))
    with device_context(states):
        _convolve_kernel[(len(rows.seq_lens), -(-channels // own))](
            states,
            weight,
            weight if bias is None else bias.contiguous(),
            output,
            state.pool,
            rows.pages,
            rows.seq_lens,
            rows.start_loc,
            channels,
            state.offset,
            state.offset // state.pool.shape[1],
            states.stride(2),
            states.stride(1),
            rows.pages.stride(0),
            PAGE=state.pool.shape[1],
            IN_ONE=state.is_in_one_page,
            STATE=held,
            WIDTH=width,
            HAS_BIAS=bias is not None,
            SILU=is_silu,
            TOKENS=tokens,
            CHANNELS=own,
            num_warps=4,
            **FUSION,
        )
    return output.transpose(1, 2)


def scan(
    kind: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    state: PagedState,
    *,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    is_normed: bool = False,
    limits: tuple[float, float] | None = None,
) -> Tensor:
    """As `cpu_scan.scan` of the rows of a step, which are packed: tensors are `[1, T, ...]`.

    Args:
        decay: Of `SUM` `[heads]`: the decay is `exp(step * decay)`.
        limits: Of steps of tokens that came together with others: mixers limit those alone, if any.
        state: `[S, heads, K, V]` float32.

    Raises:
        InputError: Tensors of other shapes, dtypes or devices.
    """
    (_, tokens, key_heads, keys), (heads, values) = key.shape, value.shape[2:]
    packed = 1, tokens, heads
    decays = {DELTA: ((*packed, 1), (*packed, keys)), SELECTIVE: ((heads, values, keys),)}.get(kind, ((heads,),))
    if (
        query.shape != key.shape
        or keys > MAX_KEYS
        or heads % key_heads
        or value.shape != (*packed, values)
        or decay.shape not in decays
        or step.shape not in ((*packed, 1), (*packed, values))
        or state.shape[1:] != (heads, keys, values)
        or (skip is not None and skip.shape != (heads, values))
        or (gate is not None and gate.shape != value.shape)
        or not _are_there(value.dtype, state, query, key, value, gate)
        or not _are_there(torch.float32, state, decay, step, skip, state.pool)
    ):
        raise InputError("scan", "[1, T, heads, dim] and states", query=query, value=value, decay=decay)
    rows, decay, step = state.rows, decay.contiguous(), step.contiguous()
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    gate = gate if gate is None or gate.stride(-1) == 1 else gate.contiguous()
    output = _output(rows, value, (*packed, values))
    padded = next_power_of_two(keys)
    own = max(1, min(64, TILE // padded, next_power_of_two(values)))
    with device_context(value):
        _scan_kernel[(len(rows.seq_lens), heads, -(-values // own))](
            query,
            key,
            value,
            value if gate is None else gate,
            decay,
            step,
            step if skip is None else skip.contiguous(),
            output,
            state.pool,
            rows.pages,
            rows.seq_lens,
            rows.start_loc,
            rows.nums_at_once,
            keys**-0.5 if is_normed else 1.0,
            *(limits or (0.0, 0.0)),
            state.offset,
            state.offset // state.pool.shape[1],
            *query.stride()[1:3],
            *key.stride()[1:3],
            *value.stride()[1:3],
            *(value if gate is None else gate).stride()[1:3],
            rows.pages.stride(0),
            PAGE=state.pool.shape[1],
            IN_ONE=state.is_in_one_page,
            KIND=kind,
            DELTA=DELTA,
            SELECTIVE=SELECTIVE,
            HEADS=heads,
            GROUP=heads // key_heads,
            KEYS=keys,
            VALUES=values,
            STATE_HEAD=state.strides[0],
            STATE_KEY=state.strides[1],
            STATE_VALUE=state.strides[2],
            DECAYS=decay.shape[-1] if kind == DELTA else 1,
            STEPS=step.shape[-1],
            LIMITED=limits is not None,
            NORMED=is_normed,
            SKIP=skip is not None,
            GATED=gate is not None,
            K=padded,
            V=own,
            num_warps=1,
            **FUSION,
        )
    return output


def _output(rows: StateRows, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_zeros(shape) if rows.has_padding else like.new_empty(shape)


def _are_there(dtype: torch.dtype, state: PagedState, *tensors: Tensor | None) -> bool:
    return all(x is None or (x.dtype is dtype and x.device == state.pool.device) for x in tensors)
