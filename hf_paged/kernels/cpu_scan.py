"""The kernels of `cpu_scan.c`: short convolutions and scans over states, a token's result in one formula."""

from __future__ import annotations

from ctypes import CDLL, c_void_p
from functools import lru_cache
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from hf_paged.kernels.c_compiler import CompileError, library
from hf_paged.kernels.layers import InputError

DTYPES = (torch.float32, torch.bfloat16)
DELTA, SUM, SELECTIVE = range(3)  # kinds of scans
MAX_WIDTH, MAX_KEYS = 8, 512  # beyond those of any model: a shrunken copy does not reach them
_SOURCE = Path(__file__).with_suffix(".c")
_FUNCTIONS = ("hf_paged_convolve", "hf_paged_scan")
_pack_convolution, _pack_scan = Struct("13q").pack, Struct("36qf").pack  # as the structs


@lru_cache
def load(dtype: torch.dtype) -> CDLL | str:
    """The kernels for states of this type, or why there are none. Compiles where no earlier process has."""
    if dtype not in DTYPES:
        return f"take {' and '.join(str(d) for d in DTYPES)}, the states are in {dtype}"
    try:
        compiled = library(_SOURCE, _FUNCTIONS, IS_BFLOAT16=int(dtype is torch.bfloat16))
    except CompileError as error:
        return str(error)
    for name in _FUNCTIONS:
        function = getattr(compiled, name)
        function.argtypes, function.restype = [c_void_p], None
    return compiled


def convolve(states: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool) -> Tensor:
    """Each channel's weighted sums of a token and those before it, through SiLU if asked for.

    Args:
        states: `[B, channels, T]`, of any strides.
        weight: `[channels, width]`, up to `MAX_WIDTH`; the last column is for the token itself.
        bias: `[channels]`.
        is_silu: Whether they go through SiLU, before they are rounded.

    Returns:
        `[B, channels, T]`, the transpose of a contiguous tensor.

    Raises:
        InputError: Tensors of other shapes, dtypes or devices; or there is no kernel here.
    """
    batch, channels, length = states.shape
    kernels, width = load(states.dtype), weight.shape[-1]
    is_fit = weight.shape == (channels, width) and width <= MAX_WIDTH and (bias is None or bias.shape == (channels,))
    if isinstance(kernels, str) or not is_fit or not _are_here(states.dtype, states, weight, bias):
        raise InputError("convolve", f"[B, channels, T], [channels, up to {MAX_WIDTH}]", states=states, weight=weight)
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    output = states.new_empty(batch, length, channels)
    sizes = batch, channels, length, width, *states.stride(), torch.get_num_threads(), is_silu
    kernels.hf_paged_convolve(_pack_convolution(*map(_address, (states, weight, bias, output)), *sizes))
    return output.transpose(1, 2)


def scan(
    kind: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    state: Tensor,
    *,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    is_normed: bool = False,
) -> Tensor:
    """`state = state * decay + key ⊗ added`, token by token, of which the result is `query · state + skip * value`.

    Args:
        kind: What is `added`, and the decay: of `DELTA` `step * (value - key · decayed state)`; of `SUM` and
            `SELECTIVE` `step * value`, whose decay in `SELECTIVE` is `exp(step * decay)`, of numbers up to 0.
        query: `[B, T, key heads, K]`, up to `MAX_KEYS`; each head serves as many of the values as there are more.
        key: Like `query`.
        value: `[B, T, heads, V]`, of their dtype.
        decay: `[B, T, heads, 1 or K]`, float32; of `SELECTIVE` `[heads, V, K]`.
        step: `[B, T, heads, 1 or V]`, float32.
        state: `[B, heads, K, V]`, float32, of any strides; changed in place.
        skip: `[heads, V]`, float32; `None`: zero.
        gate: Like `value`; the result is multiplied by its SiLU.
        is_normed: Whether queries and keys are divided by their norms, and queries by the root of K.

    Returns:
        `[B, T, heads, V]`, contiguous, of the values' dtype.

    Raises:
        InputError: Tensors of other shapes, dtypes or devices; or there is no kernel here.
    """
    (batch, tokens, key_heads, keys), (heads, values) = key.shape, value.shape[2:]
    kernels, rows = load(value.dtype), (batch, tokens, heads)
    if (
        isinstance(kernels, str)
        or query.shape != key.shape
        or keys > MAX_KEYS
        or heads % key_heads
        or value.shape[:2] != (batch, tokens)
        or decay.shape not in (((heads, values, keys),) if kind == SELECTIVE else ((*rows, 1), (*rows, keys)))
        or step.shape not in ((*rows, 1), (*rows, values))
        or state.shape != (batch, heads, keys, values)
        or (skip is not None and skip.shape != (heads, values))
        or (gate is not None and gate.shape != value.shape)
        or not _are_here(value.dtype, query, key, value, gate)
        or not _are_here(torch.float32, decay, step, state, skip)
    ):
        raise InputError("scan", "[B, T, heads, dim] and states", query=query, value=value, decay=decay, state=state)
    rowed = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, gate)]
    operands = [n for x in rowed for n in ((0,) * 4 if x is None else (x.data_ptr(), *x.stride()[:3]))]
    decay, step, skip = decay.contiguous(), step.contiguous(), None if skip is None else skip.contiguous()
    output = value.new_empty(value.shape)
    sizes = batch, tokens, heads, key_heads, keys, values, decay.shape[-1], step.shape[-1], *state.stride()
    others = *map(_address, (decay, step, skip, state, output)), *sizes, kind, is_normed, torch.get_num_threads()
    kernels.hf_paged_scan(_pack_scan(*operands, *others, keys**-0.5 if is_normed else 1.0))
    return output


def _are_here(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    return all(x is None or (x.is_cpu and x.dtype is dtype and x.layout is torch.strided) for x in tensors)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
