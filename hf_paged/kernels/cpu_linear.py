"""The kernel of `cpu_linear.c`: products with weights where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from hf_paged.kernels.c_compiler import CompileError, instructions_of, library
from hf_paged.kernels.layers import InputError

DTYPES = (torch.float32, torch.bfloat16)
_SOURCE = Path(__file__).with_suffix(".c")
_OPTIONS = ("-ffp-contract=fast",)  # for processors whose fused products `multiply_add` doesn't name


class Part(ctypes.Structure):
    """`struct part`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "output")),
        *((name, ctypes.c_int64) for name in ("columns", "row", "is_transposed")),
    ]


class Linear(ctypes.Structure):
    """`struct linear`; its parts lie behind it."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_parts", "rows", "width", "num_threads")),
    ]


_pack_linear, _pack_part = Struct("5q").pack, Struct("6q").pack  # as in these structs


class CPULinear:
    """The compiled kernel for one element type.

    A row of a result depends, bit for bit, on that row of the states, the weight and the bias alone: not on the number
    of rows, the other weights of the call or the threads.

    Attributes:
        dtype: Of states, weights and biases.
        function: The kernel, which takes the address of a `Linear`.
    """

    def __init__(self, compiled: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.function = compiled.hf_paged_linear
        self.function.argtypes, self.function.restype = [ctypes.c_void_p], None

    def takes(self, weight: Tensor) -> bool:
        """Whether it multiplies by this weight, `[columns, width]` with elements side by side along either of them."""
        return (
            weight.dtype is self.dtype
            and weight.is_cpu
            and weight.layout is torch.strided
            and weight.ndim == 2
            and 1 in weight.stride()
        )

    def call(self, states: int, weights: Sequence[tuple[Tensor, Tensor | None, int]]) -> tuple[Linear, list[Part]]:
        """The arguments of `function`, but for rows and threads. They hold neither weights nor biases.

        Args:
            states: Address of `[rows, width]`, contiguous.
            weights: Each with a bias, as in `multiply`, and the address of `[rows, columns]`.

        Returns:
            The call, and the part in it of each weight.

        Raises:
            InputError: As in `multiply`.
        """
        width = weights[0][0].shape[1]
        packed = _pack_linear(states, len(weights), 0, width, 0)
        packed += b"".join(self._part(weight, width, bias, output) for weight, bias, output in weights)
        memory = ctypes.create_string_buffer(packed, len(packed))
        places = range(ctypes.sizeof(Linear), len(packed), ctypes.sizeof(Part))
        return Linear.from_buffer(memory), [Part.from_buffer(memory, place) for place in places]

    def multiply(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`states @ weight.T + bias`, summed in float32.

        Args:
            states: `[..., width]`, of any strides.
            weight: `[columns, width]`, one that it `takes`.
            bias: `[columns]`, contiguous; `None`: none.

        Returns:
            `[..., columns]`, contiguous.

        Raises:
            InputError: Tensors of other shapes, dtypes, strides or devices.
        """
        *leading, width = states.shape or (0,)
        output = states.new_empty((*leading, *weight.shape[:1]))
        self._run(states, self._part(weight, width, bias, output.data_ptr()), 1)
        return output

    def multiply_all(self, states: Tensor, weights: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """The same by several weights of one width, in one pass.

        Args:
            states: As in `multiply`.
            weights: At least one, each with its bias.

        Returns:
            A result for each.

        Raises:
            InputError: As in `multiply`.
        """
        *leading, width = states.shape or (0,)
        outputs = [states.new_empty((*leading, *weight.shape[:1])) for weight, _ in weights]
        given = zip(weights, outputs, strict=True)
        parts = [self._part(weight, width, bias, output.data_ptr()) for (weight, bias), output in given]
        self._run(states, b"".join(parts), len(parts))
        return outputs

    def _run(self, states: Tensor, parts: bytes, num_parts: int) -> None:
        if not (states.dtype is self.dtype and states.is_cpu and states.ndim):
            raise InputError("multiply", f"[..., width] of {self.dtype} on CPU", states=states)
        states, width = states.contiguous(), states.shape[-1]
        rows = states.numel() // width if width else states.shape[:-1].numel()
        self.function(_pack_linear(states.data_ptr(), num_parts, rows, width, torch.get_num_threads()) + parts)

    def _part(self, weight: Tensor, width: int, bias: Tensor | None, output: int) -> bytes:
        if not self.takes(weight) or weight.shape[1] != width:
            raise InputError("multiply", f"[columns, {width}] of {self.dtype} on CPU, one stride 1", weight=weight)
        columns, (row, step) = weight.shape[0], weight.stride()
        if bias is not None and not (
            bias.dtype is self.dtype and bias.is_cpu and bias.shape == (columns,) and bias.is_contiguous()
        ):
            raise InputError("multiply", f"[{columns}] of {self.dtype} on CPU", bias=bias)
        is_transposed = step != 1 and width > 1
        return _pack_part(
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            output,
            columns,
            step if is_transposed else row,
            is_transposed,
        )


@lru_cache
def load(dtype: torch.dtype, instructions: str | None = None) -> CPULinear | str:
    """The kernel for weights of this type, or why there is none. Compiles where no earlier process has.

    Args:
        dtype: The type.
        instructions: Those of `c_compiler.INSTRUCTIONS` to compile for; `None`: the machine's, and with AMX bfloat16 is
            left to torch, which multiplies by it.
    """
    if dtype not in DTYPES:
        return f"takes {' and '.join(str(d) for d in DTYPES)}, the weight is in {dtype}"
    if instructions is None and dtype is torch.bfloat16:
        if torch.cpu._is_amx_tile_supported():
            return "leaves bfloat16 to torch on a processor with AMX"
        instructions = instructions_of(dtype)
    try:
        is_bfloat16 = int(dtype is torch.bfloat16)
        compiled = library(_SOURCE, ("hf_paged_linear",), _OPTIONS, instructions, IS_BFLOAT16=is_bfloat16)
    except CompileError as error:
        return str(error)
    return CPULinear(compiled, dtype)


def bmm(first: Tensor, second: Tensor) -> Tensor:
    """`torch.bmm`: `[B, rows, width]` times `[B, width, columns]`, by our kernel if it takes these."""
    kernel = load(second.dtype) if second.is_cpu else "is for CPU"
    if isinstance(kernel, str):
        return torch.bmm(first, second)
    return torch.stack([kernel.multiply(rows, own.detach().t(), None) for rows, own in zip(first, second, strict=True)])
