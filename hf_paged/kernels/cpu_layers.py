"""The kernels of `cpu_layers.c`: RMSNorm, gates and rotary embeddings, each one pass over memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hf_paged.kernels.c_compiler import CompileError, library

DTYPES = (torch.float32, torch.bfloat16)
_SOURCE = Path(__file__).with_suffix(".c")


class _RMSNorm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "weight", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "num_threads", "rounds_first")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    ]


class _Gate(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate", "up", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "gate_row", "up_row", "num_threads")),
        *((name, ctypes.c_float) for name in ("linear", "cubic")),
    ]


class _Rotary(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "cos", "sin", "output")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "dim", "rotary_dim", "input_token", "input_head")),
        *((name, ctypes.c_int64) for name in ("num_threads", "interleaved", "rounds")),
    ]


class CPULayers:
    """The compiled kernels for one element type."""

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._rms_norm = compiled.hf_paged_rms_norm
        self._gate = compiled.hf_paged_gate
        self._rotary = compiled.hf_paged_rotary
        for function in (self._rms_norm, self._gate, self._rotary):
            function.argtypes, function.restype = [ctypes.c_void_p], None

    def rms_norm(self, states: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        """`states / sqrt(mean(states²) + eps) * (weight + offset)` over the last dimension, computed in float32.

        Args:
            states: `[..., dim]`, contiguous.
            weight: `[dim]`, contiguous, of the same dtype.
            eps: Added to the mean.
            offset: Added to the weight.
            rounds_first: Whether the normed states are rounded to their dtype before they are multiplied.
        """
        output = torch.empty_like(states)
        arguments = _RMSNorm(
            states.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            states.numel() // states.shape[-1],
            states.shape[-1],
            torch.get_num_threads(),
            rounds_first,
            eps,
            offset,
        )
        self._rms_norm(ctypes.addressof(arguments))
        return output

    def gate(self, gate: Tensor, up: Tensor, linear: float, cubic: float) -> Tensor:
        """`gate * sigmoid(linear * gate + cubic * gate³) * up`: SiLU and GELU's approximations, gated.

        Args:
            gate: `[..., dim]`, the last dimension contiguous and the others as if they were one.
            up: Like `gate`, of the same dtype.
            linear: 1 for SiLU.
            cubic: 0 for SiLU.

        Returns:
            `[..., dim]`, contiguous; rounded to the dtype between activation and product, as two operations would.
        """
        output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dim = gate.shape[-1]
        arguments = _Gate(
            gate.data_ptr(),
            up.data_ptr(),
            output.data_ptr(),
            gate.numel() // dim,
            dim,
            gate.stride(-2),
            up.stride(-2),
            torch.get_num_threads(),
            linear,
            cubic,
        )
        self._gate(ctypes.addressof(arguments))
        return output

    def rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounds: bool
    ) -> tuple[Tensor, Tensor]:
        """Rotates pairs of the first `rotary_dim` elements of each head: `x * cos - y * sin`, `y * cos + x * sin`.

        Args:
            query: `[tokens, heads, dim]`, the last dimension contiguous.
            key: Like `query`, of any number of heads.
            cos: `[tokens, rotary_dim]` of the same dtype, contiguous.
            sin: Like `cos`.
            interleaved: Whether pairs are neighbours, or half a `rotary_dim` apart.
            rounds: Whether both products are rounded to the dtype before they are added.

        Returns:
            Rotated query and key, contiguous.
        """
        return self._rotate(query, cos, sin, interleaved, rounds), self._rotate(key, cos, sin, interleaved, rounds)

    def _rotate(self, states: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounds: bool) -> Tensor:
        tokens, heads, dim = states.shape
        output = torch.empty(states.shape, dtype=states.dtype, device=states.device)
        arguments = _Rotary(
            states.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            output.data_ptr(),
            tokens,
            heads,
            dim,
            cos.shape[-1],
            *states.stride()[:2],
            torch.get_num_threads(),
            interleaved,
            rounds,
        )
        self._rotary(ctypes.addressof(arguments))
        return output


@lru_cache
def load(dtype: torch.dtype) -> CPULayers | str:
    """The kernels for layers of this type, or why there are none. Compiles where no earlier process has."""
    if dtype not in DTYPES:
        return f"take {' and '.join(str(d) for d in DTYPES)}, the model is in {dtype}"
    try:
        return CPULayers(library(_SOURCE, IS_BFLOAT16=int(dtype is torch.bfloat16)))
    except CompileError as error:
        return str(error)
