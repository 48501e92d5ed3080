"""The kernel of `cpu_linear.c`: products of a few rows with a weight that lies as the kernel reads it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_paged.kernels.c_compiler import CompileError, library
from hf_paged.kernels.layers import InputError

DEPTHS = {torch.float32: 1, torch.bfloat16: 2}  # elements of the width that lie side by side
_SOURCE = Path(__file__).with_suffix(".c")
_HAS_BFLOAT16 = (
    torch.backends.cpu.get_cpu_capability() == "AVX512" and getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
)
_BFLOAT16 = ("-mavx512bf16",) if _HAS_BFLOAT16 else ()  # products of pairs; a compiler may be too old for it


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "weight", "bias", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "columns", "num_threads")),
    ]


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight, copied into the kernel's layout.

    Attributes:
        panels: `[panels, width / depth, columns of a panel, depth]`, contiguous; columns beyond the last are zeros.
        width: Elements of a row that it multiplies.
        columns: Elements of a result.
    """

    panels: Tensor
    width: int
    columns: int


class CPULinear:
    """The compiled kernel for one element type."""

    def __init__(self, compiled: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype, self._depth = dtype, DEPTHS[dtype]
        compiled.hf_paged_panel.restype = ctypes.c_int64
        self._panel: int = compiled.hf_paged_panel()
        self._function = compiled.hf_paged_linear
        self._function.argtypes, self._function.restype = [ctypes.POINTER(_Linear)], None

    def pack(self, weight: Tensor) -> PanelWeight:
        """Copies a weight.

        Args:
            weight: `[columns, width]`, of any strides; the width is even in half precision.

        Raises:
            InputError: A weight of another type, or of an odd width.
        """
        if weight.dtype is not self._dtype or not weight.is_cpu or weight.ndim != 2 or weight.shape[1] % self._depth:
            raise InputError("pack", f"[columns, width] of {self._dtype} on CPU, an even width", weight=weight)
        columns, width = weight.shape
        whole = pad(weight, (0, 0, 0, -columns % self._panel))
        panels = whole.view(-1, self._panel, width // self._depth, self._depth).transpose(1, 2).contiguous()
        return PanelWeight(panels, width, columns)

    def multiply(self, states: Tensor, weight: PanelWeight, bias: Tensor | None) -> Tensor:
        """`states @ weight.T + bias`, summed in float32.

        Args:
            states: `[..., width]`, of any strides.
            weight: From `pack`.
            bias: `[columns]`, contiguous; `None`: none.

        Returns:
            `[..., columns]`, contiguous.

        Raises:
            InputError: Tensors of other shapes, dtypes or devices.
        """
        dtype, columns = self._dtype, weight.columns
        if not (
            states.dtype is dtype
            and states.is_cpu
            and states.ndim
            and states.shape[-1] == weight.width
            and (
                bias is None
                or (bias.dtype is dtype and bias.is_cpu and bias.shape == (columns,) and bias.is_contiguous())
            )
        ):
            given = {"states": states} if bias is None else {"states": states, "bias": bias}
            raise InputError("multiply", f"[..., {weight.width}] and [{columns}] of {dtype} on CPU", **given)
        states = states.contiguous()
        output = states.new_empty((*states.shape[:-1], columns))
        arguments = _Linear(
            states.data_ptr(),
            weight.panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            states.numel() // weight.width if weight.width else 0,
            weight.width,
            columns,
            torch.get_num_threads(),
        )
        self._function(arguments)
        return output


@lru_cache
def load(dtype: torch.dtype) -> CPULinear | str:
    """The kernel for weights of this type, or why there is none. Compiles where no earlier process has."""
    if dtype not in DEPTHS:
        return f"takes {' and '.join(str(d) for d in DEPTHS)}, the weight is in {dtype}"
    is_bfloat16 = dtype is torch.bfloat16
    functions = ("hf_paged_panel", "hf_paged_linear")
    try:
        compiled = library(_SOURCE, functions, _BFLOAT16 if is_bfloat16 else (), IS_BFLOAT16=int(is_bfloat16))
    except CompileError as error:
        return str(error)
    return CPULinear(compiled, dtype)
