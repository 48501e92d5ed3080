"""The kernel of `cpu_linear.c`: products of a few rows with a weight that lies as the kernel reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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


class Part(ctypes.Structure):
    """`struct part`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "output")),
        ("columns", ctypes.c_int64),
    ]


class Linear(ctypes.Structure):
    """`struct linear`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "parts")),
        *((name, ctypes.c_int64) for name in ("num_parts", "rows", "width", "num_threads")),
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
    """The compiled kernel for one element type.

    Attributes:
        function: It, which takes a `Linear`.
    """

    def __init__(self, compiled: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype, self._depth = dtype, DEPTHS[dtype]
        compiled.hf_paged_panel.restype = ctypes.c_int64
        self._panel: int = compiled.hf_paged_panel()
        self.function = compiled.hf_paged_linear
        self.function.argtypes, self.function.restype = [ctypes.POINTER(Linear)], None

    def call(self, states: int, weights: Sequence[tuple[PanelWeight, Tensor | None, int]]) -> tuple[Linear, list[Part]]:
        """What `function` is to be given, but for rows and threads. It holds neither weights nor biases.

        Args:
            states: Address of `[rows, width]`, contiguous.
            weights: From `pack`, each with a bias as in `multiply`, and the address of `[rows, columns]`.

        Returns:
            The call, and the part in it of each weight.
        """
        parts = (Part * len(weights))()
        for part, (weight, bias, output) in zip(parts, weights, strict=True):
            part.weight, part.bias = weight.panels.data_ptr(), None if bias is None else bias.data_ptr()
            part.output, part.columns = output, weight.columns
        call = Linear(input=states, parts=ctypes.addressof(parts), num_parts=len(weights), width=weights[0][0].width)
        call.held = parts
        return call, list(parts)

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

    def unpack(self, weight: PanelWeight) -> Tensor:
        """`[columns, width]`, contiguous: what `pack` was given, bit for bit."""
        panels = weight.panels.transpose(1, 2).reshape(-1, weight.width)
        return panels[: weight.columns].clone(memory_format=torch.contiguous_format)

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
        return self.multiply_all(states, ((weight, bias),))[0]

    def multiply_all(self, states: Tensor, weights: Sequence[tuple[PanelWeight, Tensor | None]]) -> list[Tensor]:
        """The same by several weights of one width, in one pass: bit for bit what each gives by itself.

        Args:
            states: As in `multiply`.
            weights: At least one, each with its bias.

        Returns:
            A result for each.

        Raises:
            InputError: As in `multiply`.
        """
        dtype, width = self._dtype, weights[0][0].width
        if not (states.dtype is dtype and states.is_cpu and states.ndim and states.shape[-1] == width):
            raise InputError("multiply", f"[..., {width}] of {dtype} on CPU", states=states)
        states = states.contiguous()
        leading = states.shape[:-1]
        outputs, parts = [], (Part * len(weights))()
        for part, (weight, bias) in zip(parts, weights, strict=True):
            columns = weight.columns
            if weight.width != width:
                raise InputError("multiply", f"weights of width {width}", panels=weight.panels)
            if bias is not None:
                if not (bias.dtype is dtype and bias.is_cpu and bias.shape == (columns,) and bias.is_contiguous()):
                    raise InputError("multiply", f"[{columns}] of {dtype} on CPU", bias=bias)
                part.bias = bias.data_ptr()
            output = states.new_empty((*leading, columns))
            part.weight, part.output, part.columns = weight.panels.data_ptr(), output.data_ptr(), columns
            outputs.append(output)
        rows = states.numel() // width if width else 0
        self.function(
            Linear(states.data_ptr(), ctypes.addressof(parts), len(outputs), rows, width, torch.get_num_threads())
        )
        return outputs


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
