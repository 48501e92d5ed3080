"""The kernels of `cpu_layers.c`: RMSNorm, gates and rotary embeddings, each one pass over memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hf_paged.kernels.c_compiler import CompileError, library
from hf_paged.kernels.layers import LayerKernels

DTYPES = (torch.float32, torch.bfloat16)
FUNCTIONS = ("hf_paged_rms_norm", "hf_paged_gate", "hf_paged_rotary")
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


class CPULayers(LayerKernels):
    """The compiled kernels."""

    def __init__(self, compiled: ctypes.CDLL, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._norm_function = compiled.hf_paged_rms_norm
        self._gate_function = compiled.hf_paged_gate
        self._rotary_function = compiled.hf_paged_rotary
        for function in (self._norm_function, self._gate_function, self._rotary_function):
            function.argtypes, function.restype = [ctypes.c_void_p], None

    def _are_here(self, *tensors: Tensor) -> bool:
        dtype = self.dtype
        for tensor in tensors:  # noqa: SIM110 - a generator takes longer than all other checks together
            if tensor.dtype is not dtype or not tensor.is_cpu:
                return False
        return True

    def _rms_norm(self, states: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        output = torch.empty_like(states)
        dim = weight.numel()
        arguments = _RMSNorm(
            states.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            states.numel() // dim,
            dim,
            torch.get_num_threads(),
            rounds_first,
            eps,
            offset,
        )
        self._norm_function(ctypes.addressof(arguments))
        return output

    def _gate(self, gate: Tensor, up: Tensor, gate_row: int, up_row: int, linear: float, cubic: float) -> Tensor:
        output = torch.empty_like(gate, memory_format=torch.contiguous_format)
        dim = gate.shape[-1]
        arguments = _Gate(
            gate.data_ptr(),
            up.data_ptr(),
            output.data_ptr(),
            gate.numel() // dim,
            dim,
            gate_row,
            up_row,
            torch.get_num_threads(),
            linear,
            cubic,
        )
        self._gate_function(ctypes.addressof(arguments))
        return output

    def _rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounds: bool
    ) -> tuple[Tensor, Tensor]:
        return self._rotate(query, cos, sin, interleaved, rounds), self._rotate(key, cos, sin, interleaved, rounds)

    def _rotate(self, states: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounds: bool) -> Tensor:
        tokens, heads, dim = states.shape
        output = torch.empty_like(states, memory_format=torch.contiguous_format)
        arguments = _Rotary(
            states.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            output.data_ptr(),
            tokens,
            heads,
            dim,
            cos.shape[1],
            *states.stride()[:2],
            torch.get_num_threads(),
            interleaved,
            rounds,
        )
        self._rotary_function(ctypes.addressof(arguments))
        return output


@lru_cache
def load(dtype: torch.dtype) -> CPULayers | str:
    """The kernels for layers of this type, or why there are none. Compiles where no earlier process has."""
    if dtype not in DTYPES:
        return f"take {' and '.join(str(d) for d in DTYPES)}, the model is in {dtype}"
    try:
        return CPULayers(library(_SOURCE, FUNCTIONS, IS_BFLOAT16=int(dtype is torch.bfloat16)), dtype)
    except CompileError as error:
        return str(error)
