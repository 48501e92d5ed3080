"""The kernel of `cpu_adapters.c`: what adapters add behind a linear layer, each row its own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from hf_paged.kernels.c_compiler import CompileError, library
from hf_paged.kernels.layers import InputError
from hf_paged.kernels.low_rank import LowRank

DTYPES = (torch.float32, torch.bfloat16)
MAX_RANK = 512
_SOURCE = Path(__file__).with_suffix(".c")
_FUNCTIONS = ("hf_paged_adapters", "hf_paged_has_slots")
_pack = Struct("10q").pack  # as `Adapters`


class Adapter(ctypes.Structure):
    """`struct adapter`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "bias", "output_scale")),
        *((name, ctypes.c_int64) for name in ("rank", "a_row", "b_row", "is_bfloat16")),
        ("scale", ctypes.c_float),
    ]


class Adapters(ctypes.Structure):
    """`struct adapters`. As long as `slots` is null nothing is added."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "output", "base_bias", "slots", "table")),
        *((name, ctypes.c_int64) for name in ("num_slots", "rows", "width", "columns", "num_threads")),
    ]


class Table:
    """Where the adapters' parts for one linear layer lie, by slot. It holds them.

    Attributes:
        shape: Width and columns of the layer; `None` as long as every slot is empty.
        address: What `Adapters.table` is to be; the same as long as the table lives.
    """

    def __init__(self, num_slots: int) -> None:
        self._adapters = (Adapter * num_slots)()
        self._held: list[LowRank | None] = [None] * num_slots
        self.shape: tuple[int, int] | None = None
        self.address = ctypes.addressof(self._adapters)

    def __len__(self) -> int:
        return len(self._held)

    def has(self, slot: int) -> bool:
        """Whether something is added for a slot."""
        return slot < len(self._held) and self._held[slot] is not None

    def grown(self, num_slots: int) -> Table:
        """A table of more slots with the same entries; this one stays as it is, for calls that are under way."""
        table = Table(num_slots)
        ctypes.memmove(table.address, self.address, ctypes.sizeof(self._adapters))
        table._held[: len(self)], table.shape = self._held, self.shape
        return table

    def put(self, slot: int, entry: LowRank | None) -> None:
        """Sets what an adapter adds; no call may be under way that has rows with this slot.

        Args:
            slot: Its place.
            entry: `None`: nothing.

        Raises:
            InputError: Tensors of other shapes, dtypes, strides or devices than the kernel or this table takes.
        """
        adapter = Adapter()
        if entry is not None:
            shape = _checked(entry)
            if self.shape not in (None, shape):
                raise InputError("an adapter's table", f"(width, columns) {self.shape}", a=entry.a, b=entry.b)
            self.shape = shape
            adapter.a, adapter.b, adapter.bias = entry.a.data_ptr(), entry.b.data_ptr(), _address(entry.bias)
            adapter.output_scale, adapter.scale = _address(entry.output_scale), entry.scale
            adapter.rank, adapter.a_row, adapter.b_row = entry.a.shape[0], entry.a.stride(0), entry.b.stride(0)
            adapter.is_bfloat16 = entry.a.dtype is torch.bfloat16
        self._adapters[slot], self._held[slot] = adapter, entry


class CPUAdapters:
    """The compiled kernel for states of one element type; adapters may be of either.

    A row's result depends, bit for bit, on its own states, output and adapter alone: not on other rows, their number or
    order, the adapter's slot or the threads.

    Attributes:
        dtype: Of states and outputs.
        function: The kernel, which takes the address of an `Adapters`.
    """

    def __init__(self, compiled: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.function = compiled.hf_paged_adapters
        self._has_slots = compiled.hf_paged_has_slots
        self.function.argtypes, self.function.restype = [ctypes.c_void_p], None
        self._has_slots.argtypes, self._has_slots.restype = [ctypes.c_void_p], ctypes.c_int64

    def table(self, entries: Sequence[LowRank | None]) -> Table:
        """Adapters of one linear layer, as `add` takes them.

        Args:
            entries: By slot; `None`: nothing is added.

        Raises:
            InputError: As in `Table.put`.
        """
        table = Table(len(entries))
        for slot, entry in enumerate(entries):
            table.put(slot, entry)
        return table

    def add(self, states: Tensor, output: Tensor, slots: Tensor, table: Table, base_bias: Tensor | None = None) -> None:
        """`low_rank.add_low_rank`, summed in float32 and rounded once.

        Args:
            states: `[..., width]`, of any strides.
            output: `[..., columns]`, contiguous; changed in place.
            slots: `[rows]`, int32, contiguous; below 0: no adapter.
            table: The layer's.
            base_bias: `[columns]`, of the states' dtype, contiguous.

        Raises:
            InputError: Tensors of other shapes, dtypes, strides or devices, or slots beyond the table.
        """
        if table.shape is None:
            return
        width, columns = table.shape
        rows = slots.shape[0] if slots.ndim == 1 else -1
        if not (
            states.dtype is self.dtype
            and states.is_cpu
            and states.shape == (*output.shape[:-1], width)
            and output.numel() == rows * columns
            and _is_of(output, (*output.shape[:-1], columns), self.dtype)
            and _is_of(slots, (rows,), torch.int32)
            and (base_bias is None or _is_of(base_bias, (columns,), self.dtype))
        ):
            expected = f"[..., {width}] and [..., {columns}] of {self.dtype} and a slot a row, int32, on CPU"
            raise InputError("adapters", expected, states=states, output=output, slots=slots)
        states = states.contiguous()
        addresses = states.data_ptr(), output.data_ptr(), _address(base_bias), slots.data_ptr(), table.address
        call = _pack(*addresses, len(table), rows, width, columns, torch.get_num_threads())
        if not self._has_slots(call):
            raise InputError("adapters", f"slots below {len(table)}", slots=slots)
        self.function(call)

    def call(self, width: int, columns: int, states: int, output: int, base_bias: Tensor | None = None) -> Adapters:
        """The arguments of `function` behind a layer's product, but for slots, table, rows and threads.

        It holds no tensors, nor does anything check what it is set to: slots have to lie in the table, a table that is
        not empty has to have this shape, and the bias is of the states' dtype.

        Args:
            width: Of the layer's input, and
            columns: of its output.
            states: Address of `[rows, width]`, contiguous.
            output: Address of `[rows, columns]`, contiguous.
            base_bias: As in `add`.
        """
        return Adapters(input=states, output=output, base_bias=_address(base_bias), width=width, columns=columns)


def _checked(entry: LowRank) -> tuple[int, int]:
    """Width and columns of an entry that the kernel takes.

    Raises:
        InputError: It takes none like that.
    """
    a, b, bias, output_scale = entry.a, entry.b, entry.bias, entry.output_scale
    columns = b.shape[0] if b.ndim == 2 else -1
    if not (
        a.dtype in DTYPES
        and _has_rows(a, a.dtype)
        and _has_rows(b, a.dtype)
        and 1 <= a.shape[0] == b.shape[1] <= MAX_RANK
        and a.shape[1]
        and (bias is None or _is_of(bias, (columns,), a.dtype))
        and (output_scale is None or _is_of(output_scale, (columns,), torch.float32))
    ):
        expected = (
            f"[rank, in] and [out, rank] of {' or '.join(map(str, DTYPES))}, rank 1 to {MAX_RANK}, rows contiguous"
        )
        vectors = {"bias": bias, "output_scale": output_scale}
        raise InputError(
            "an adapter's table", expected, a=a, b=b, **{k: v for k, v in vectors.items() if v is not None}
        )
    return a.shape[1], columns


def _has_rows(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is a matrix of which a row's elements lie side by side."""
    return (
        tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.ndim == 2
        and (tensor.stride(1) == 1 or tensor.shape[1] == 1)
    )


def _is_of(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return (
        tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.shape == shape
        and tensor.is_contiguous()
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@lru_cache
def load(dtype: torch.dtype, instructions: str | None = None) -> CPUAdapters | str:
    """The kernel for states of this type, or why there is none. Compiles where no earlier process has.

    Args:
        dtype: The type.
        instructions: Those of `c_compiler.INSTRUCTIONS` to compile for; `None`: the machine's.
    """
    if dtype not in DTYPES:
        return f"takes {' and '.join(map(str, DTYPES))}, the states are in {dtype}"
    try:
        compiled = library(_SOURCE, _FUNCTIONS, (), instructions, IS_BFLOAT16=int(dtype is torch.bfloat16))
    except CompileError as error:
        return str(error)
    return CPUAdapters(compiled, dtype)
