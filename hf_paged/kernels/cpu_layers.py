"""The kernels of `cpu_layers.c`: RMSNorm, gates, activations and rotary embeddings, each one pass over memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hf_paged.kernels.c_compiler import CompileError, library
from hf_paged.kernels.layers import InputError, LayerKernels

DTYPES = (torch.float32, torch.bfloat16)
FUNCTIONS = tuple(f"hf_paged_{name}" for name in ("rms_norm", "gate", "activate", "rotary", "add", "run"))
_SOURCE = Path(__file__).with_suffix(".c")


class RMSNorm(ctypes.Structure):
    """`struct rms_norm`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "weight", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "num_threads", "rounds_first")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    ]


class Gate(ctypes.Structure):
    """`struct gate`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate", "up", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "dim", "gate_row", "up_row", "num_threads")),
        *((name, ctypes.c_float) for name in ("linear", "cubic")),
    ]


class Rotary(ctypes.Structure):
    """`struct rotary`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "cos", "sin", "to_query", "to_key")),
        *((name, ctypes.c_int64) for name in ("tokens", "query_heads", "key_heads", "dim", "rotary_dim")),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, ctypes.c_int64) for name in ("num_threads", "interleaved", "rounds")),
    ]


class Add(ctypes.Structure):
    """`struct add`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("first", "second", "output")),
        *((name, ctypes.c_int64) for name in ("size", "num_threads")),
    ]


class CPULayers(LayerKernels):
    """The compiled kernels.

    Attributes:
        compiled: The library that they are in.
    """

    def __init__(self, compiled: ctypes.CDLL, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.compiled = compiled
        self._norm_function = compiled.hf_paged_rms_norm
        self._gate_function = compiled.hf_paged_gate
        self._activate_function = compiled.hf_paged_activate
        self._rotary_function = compiled.hf_paged_rotary
        kinds = (self._norm_function, RMSNorm), (self._gate_function, Gate), (self._rotary_function, Rotary)
        for function, kind in kinds:
            function.argtypes, function.restype = [ctypes.POINTER(kind)], None  # which takes the structure itself
        self._activate_function.restype = None
        self._activate_function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_float] * 2

    def activate(self, states: Tensor, linear: float, cubic: float, multiplies: bool) -> Tensor:
        """`sigmoid(linear * x + cubic * x³)`, times x if it `multiplies`, of any shape; contiguous.

        An element's bits depend on it alone, not on its place.

        Raises:
            InputError: Another dtype or device.
        """
        if not self._are_here(states):
            raise InputError("activate", f"{self.dtype} on CPU", states=states)
        states = states.contiguous()
        output = torch.empty_like(states)
        pointers, threads = (states.data_ptr(), output.data_ptr()), torch.get_num_threads()
        self._activate_function(*pointers, states.numel(), threads, multiplies, linear, cubic)
        return output

    def _are_here(self, *tensors: Tensor) -> bool:
        dtype = self.dtype
        for tensor in tensors:  # noqa: SIM110 - a generator takes longer than all other checks together
            if tensor.dtype is not dtype or not tensor.is_cpu:
                return False
        return True

    def _rms_norm(self, states: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        output = torch.empty_like(states)
        dim = weight.shape[0]
        arguments = RMSNorm(
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
        self._norm_function(arguments)
        return output

    def _gate(self, gate: Tensor, up: Tensor, gate_row: int, up_row: int, linear: float, cubic: float) -> Tensor:
        output = torch.empty_like(gate, memory_format=torch.contiguous_format)
        dim = gate.shape[-1]
        arguments = Gate(
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
        self._gate_function(arguments)
        return output

    def _rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounds: bool
    ) -> tuple[Tensor, Tensor]:
        _, query_heads, tokens, dim = query.shape
        _, query_head, query_token, _ = query.stride()
        key_heads, (_, key_head, key_token, _) = key.shape[1], key.stride()
        to_query, to_key = _by_token(query), _by_token(key)
        arguments = Rotary(
            query.data_ptr(),
            key.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            to_query.data_ptr(),
            to_key.data_ptr(),
            tokens,
            query_heads,
            key_heads,
            dim,
            cos.shape[2],
            query_token,
            query_head,
            key_token,
            key_head,
            torch.get_num_threads(),
            interleaved,
            rounds,
        )
        self._rotary_function(arguments)
        return to_query, to_key


def _by_token(states: Tensor) -> Tensor:
    """Room for others of its shape `[1, heads, tokens, dim]`, whose heads follow each other token by token."""
    _, heads, tokens, dim = states.shape
    size = (1, heads, tokens, dim)
    return torch.empty_strided(size, (heads * tokens * dim, dim, heads * dim, 1), dtype=states.dtype, device="cpu")


@lru_cache
def load(dtype: torch.dtype) -> CPULayers | str:
    """The kernels for layers of this type, or why there are none. Compiles where no earlier process has."""
    if dtype not in DTYPES:
        return f"take {' and '.join(str(d) for d in DTYPES)}, the model is in {dtype}"
    try:
        return CPULayers(library(_SOURCE, FUNCTIONS, IS_BFLOAT16=int(dtype is torch.bfloat16)), dtype)
    except CompileError as error:
        return str(error)
