"""The kernels of `cpu.c`: compiled once a machine with its C compiler, checked, and called without torch in between."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_paged.kernels import reference
from hf_paged.kernels.c_compiler import CompileError, address_of, instructions_of, library
from hf_paged.kernels.layers import InputError
from hf_paged.kernels.padded_groups import PaddedGroup
from hf_paged.kernels.scaled_rows import SCALE_BYTES

DTYPES = (torch.float32, torch.bfloat16)
CODES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}  # by their numbers in cpu_stored.h
MAX_HEAD_DIM = 512
MAX_LATENT_ROW = 2048  # elements of a latent and a rotary key
LEAST_ROWS = (5, 12)  # queries that are faster together: of one query head a key head, and of several
FUNCTIONS = ("hf_paged_write", "hf_paged_attend", "hf_paged_rows")
_SOURCE = Path(__file__).with_suffix(".c")


class _Write(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("key", "value", "pool", "slots")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_kv_heads", "block_size", "block_stride")),
        *((name, ctypes.c_int64) for name in ("key_token", "key_head", "value_token", "value_head")),
        ("num_threads", ctypes.c_int64),
    ]


class _Attend(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "output", "pool", "tables", "seq_lens", "query_starts", "sinks")
        ),
        *((name, ctypes.c_void_p) for name in ("order", "items")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_items", "query_token", "query_head", "num_kv_heads", "heads_per_kv")
        ),
        *((name, ctypes.c_int64) for name in ("block_size", "table_width", "block_stride", "heads", "window")),
        ("num_threads", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("bias_width", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class Together(NamedTuple):
    """How sequences that begin with the same blocks are attended to: these blocks are read once for some of them.

    Attributes:
        order: `[S]` int32, contiguous: each sequence once.
        items: `[I, 3]` int32, contiguous: the first of some sequences in `order`, how many, and how many tokens of the
            first blocks, which are the same in the tables of all of them, none has fewer of; 0 of a single sequence.
            They come one behind the other.
        most: Sequences of an item at most.
    """

    order: Tensor
    items: Tensor
    most: int


class CPUKernels:
    """The compiled kernels for one element type, what the pool holds of it, and head dim, or of rows of latents one
    width of these.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype,
        head_dim: int,
        latent_dim: int | None = None,
        stored: torch.dtype | None = None,
    ) -> None:
        self.dtype, self.stored_dtype, self.head_dim = dtype, stored or dtype, head_dim
        self.value_dim = head_dim if latent_dim is None else latent_dim
        self.row_width = head_dim + SCALE_BYTES * (self.stored_dtype is torch.int8)
        self.num_parts = 2 if latent_dim is None else 1
        self.stored = (head_dim, head_dim) if latent_dim is None else (latent_dim, head_dim - latent_dim)
        self.write, self.attend = library.hf_paged_write, library.hf_paged_attend
        self.write_at, self.attend_at = address_of(self.write), address_of(self.attend)
        library.hf_paged_rows.restype = ctypes.c_int64
        self._rows: int = library.hf_paged_rows()
        for function, kind in ((self.write, _Write), (self.attend, _Attend)):
            function.argtypes, function.restype = [ctypes.POINTER(kind)], None  # which takes the structure itself

    def heads_at_once(self, heads_per_kv: int) -> int:
        """Query heads of a key head that a tile has rows for; of latents, which all heads share, half as many."""
        most = self._rows if self.num_parts == 2 else self._rows // 2
        return min(heads_per_kv, most)

    def together(self, heads_per_kv: int) -> tuple[int, int]:
        """How many sequences are faster together than one by one, and how many an item of `Together` may have."""
        heads = self.heads_at_once(heads_per_kv)
        return -(-LEAST_ROWS[heads > 1] // heads), self._rows // heads

    def tokens_at_once(self, heads_per_kv: int) -> int:
        """New tokens of one sequence that a tile has rows for."""
        return self._rows // self.heads_at_once(heads_per_kv)


@dataclass(slots=True, eq=False)
class Rows:
    """New tokens of a step that are attended to in one call a layer.

    Attributes:
        arguments: What all layers have in common is filled in.
        num_tokens: New tokens that queries must have at least.
        together: See `StepCalls.rows`.
        checked: The geometry of the layer before, which was found right.
    """

    arguments: _Attend
    num_tokens: int
    together: Together | None = None
    checked: tuple[object, ...] = ()


class StepCalls:
    """One step's calls: what layers share is checked once, and a layer's tensors where they differ from the last's."""

    def __init__(self, kernels: CPUKernels, kv_cache: Tensor) -> None:
        """Over a KV tensor, whose blocks are contiguous. Raises `InputError` if the kernels are not made for it."""
        self._kernels = kernels
        if not (
            kv_cache.dtype is kernels.stored_dtype
            and kv_cache.shape[5] == kernels.row_width
            and kv_cache.shape[2] == kernels.num_parts
            and (kv_cache.is_contiguous() or kv_cache[0].is_contiguous())
            and kv_cache.is_cpu
        ):
            raise InputError(
                "step", f"a pool of {kernels.stored_dtype}, head dim {kernels.head_dim}", kv_cache=kv_cache
            )
        _, self._num_layers, _, self._num_kv_heads, self._block_size, _ = kv_cache.shape
        self._block_stride, layer_stride, *_ = kv_cache.stride()
        self._pool, self._layer_bytes = kv_cache.data_ptr(), layer_stride * kv_cache.dtype.itemsize
        self._held = [kv_cache]
        self._writes: tuple[tuple[object, ...], Tensor | None, _Write] = ((), None, _Write())

    def write(self, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> None:
        """Writes the new keys and values of one layer into their slots.

        Args:
            key: `[T, num_kv_heads, head_dim]` in the model's dtype, the last dimension contiguous; of latents, them.
            value: Like `key`; of latents, the rotary keys.
            layer: Layer index.
            slot_mapping: `[T]` int64; tokens with a slot below 0 are skipped. None is beyond the pool: that the block
                manager sees to.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices, or a layer that the pool does not have.
        """
        self._kernels.write(self._writing(key, value, layer, slot_mapping))

    def _writing(self, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> _Write:
        of_key = key.shape, key.stride(), key.dtype, key.device
        geometry = *of_key, value.shape, value.stride(), value.dtype, value.device
        checked, slots, arguments = self._writes
        if not 0 <= layer < self._num_layers or slots is not slot_mapping or checked != geometry:
            arguments = self._new_write(key, value, layer, slot_mapping)
            self._writes = geometry, slot_mapping, arguments
        arguments.key, arguments.value = key.data_ptr(), value.data_ptr()
        arguments.pool = self._pool + layer * self._layer_bytes
        arguments.num_threads = torch.get_num_threads()
        return arguments

    def writes(
        self, key: Tensor, value: Tensor, layers: Sequence[int], slot_mapping: Tensor
    ) -> tuple[int, ctypes.Array[_Write]]:
        """What `write` does for several layers, whose keys and values come one after another into the same memory.

        Returns:
            The kernel's address, and its arguments for each layer.
        """
        made = (_Write * len(layers))(*[self._writing(key, value, layers[0], slot_mapping)] * len(layers))
        self._place(made, layers)
        return self._kernels.write_at, made

    def _place(self, made: Any, layers: Sequence[int]) -> None:
        if not 0 <= min(layers) <= max(layers) < self._num_layers:
            raise InputError("layers", f"some of {self._num_layers}", kv_cache=self._held[0])
        words = np.frombuffer(made, np.int64).reshape(len(layers), -1)
        words[:, type(made[0]).pool.offset // words.itemsize] = self._pool + np.multiply(layers, self._layer_bytes)

    def _new_write(self, key: Tensor, value: Tensor, layer: int, slot_mapping: Tensor) -> _Write:
        key_dim, value_dim = self._kernels.stored
        if not (
            key.shape == (*slot_mapping.shape, self._num_kv_heads, key_dim)
            and value.shape == (*slot_mapping.shape, self._num_kv_heads, value_dim)
            and key.ndim == 3
            and key.stride()[2] == value.stride()[2] == 1
            and 0 <= layer < self._num_layers
            and key.dtype is value.dtype is self._kernels.dtype
            and slot_mapping.dtype is torch.int64
            and key.is_cpu
            and value.is_cpu
            and slot_mapping.is_cpu
            and slot_mapping.is_contiguous()
        ):
            expected = f"twice [T, heads, dim] and [T], for one of {self._num_layers} layers, not {layer}"
            raise InputError("write", expected, key=key, value=value, slot_mapping=slot_mapping, kv_cache=self._held[0])
        return _Write(
            slots=slot_mapping.data_ptr(),
            num_tokens=key.shape[0],
            num_kv_heads=self._num_kv_heads,
            block_size=self._block_size,
            block_stride=self._block_stride,
            key_token=key.stride()[0],
            key_head=key.stride()[1],
            value_token=value.stride()[0],
            value_head=value.stride()[1],
        )

    def rows(
        self,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        num_tokens: int,
        longest: int,
        items: Tensor | Together,
    ) -> Rows:
        """Some of a step's new tokens, each of which sees those before it.

        Args:
            block_tables: `[S, N]` int32, contiguous, with the blocks of the sequences.
            seq_lens: `[S]` int32, contiguous, tokens of each including the new ones.
            query_start_loc: `[S + 1]` int32, contiguous, first new token of each.
            num_tokens: New tokens of all sequences.
            longest: Tokens of the longest of them.
            items: `[tiles, 2]` int32, contiguous: a sequence, and the first of `tokens_at_once` of its new tokens, of
                each sequence the last first; or sequences with one new token each.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices.
        """
        together = items if isinstance(items, Together) else None
        order, items = (None, items) if isinstance(items, Tensor) else (items.order, items.items)
        given = block_tables, seq_lens, query_start_loc, items, *(() if order is None else (order,))
        if not (
            _are_numbers(*given)
            and block_tables.ndim == items.ndim == 2
            and query_start_loc.shape[0] == seq_lens.shape[0] + 1 == block_tables.shape[0] + 1
            and items.shape[1] == (2 if order is None else 3)
            and longest <= block_tables.shape[1] * self._block_size
        ):
            shapes = {"block_tables": block_tables, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
            raise InputError("attend", f"tables and lengths of up to {longest} tokens", **shapes, items=items)
        self._held += given
        arguments = _Attend(
            tables=block_tables.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            query_starts=query_start_loc.data_ptr(),
            order=None if order is None else order.data_ptr(),
            items=items.data_ptr(),
            num_items=len(items),
            num_kv_heads=self._num_kv_heads,
            block_size=self._block_size,
            table_width=block_tables.shape[1],
            block_stride=self._block_stride,
        )
        return Rows(arguments, num_tokens, together)

    def attend(
        self,
        query: Tensor,
        output: Tensor,
        layer: int,
        rows: Rows,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Causal attention of some of a step's sequences.

        Args:
            query: `[T, num_heads, head_dim]` in the model's dtype, the last dimension contiguous.
            output: `[T, num_heads, head_dim]`, contiguous; the tokens of `rows` are written. Of latents as wide as
                these.
            layer: Layer index.
            scale: Factor on the scores.
            sliding_window: Tokens a query sees, itself included; `None`: all before it.
            softcap: Bound of the scores; `None`: none.
            sinks: `[num_heads]` logits.
            bias: `[num_heads, distances]` float32, contiguous; see `reference.paged_attention`.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices, or a layer that the pool does not have.
        """
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()  # by this name, until the kernel is through
        own = scale, sliding_window, softcap, sinks, bias
        self._kernels.attend(self._attending(query, output, layer, rows, *own))

    def attends(
        self,
        query: Tensor,
        output: Tensor,
        layers: Sequence[int],
        rows: Rows,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> tuple[int, ctypes.Array[_Attend]]:
        """What `attend` does for several layers, with the same settings and tensors; see `writes`."""
        arguments = self._attending(query, output, layers[0], rows, scale, sliding_window, softcap, None, None)
        made = (_Attend * len(layers))(*[arguments] * len(layers))
        self._place(made, layers)
        return self._kernels.attend_at, made

    def _attending(
        self,
        query: Tensor,
        output: Tensor,
        layer: int,
        rows: Rows,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        bias: Tensor | None,
    ) -> _Attend:
        both = query.shape, query.stride(), query.dtype, query.device, output.shape, output.stride(), output.dtype
        geometry = *both, output.device, None if sinks is None else (sinks.shape, sinks.device)
        if bias is not None and not (
            bias.dtype is torch.float32 and bias.is_cpu and bias.is_contiguous() and bias.shape[0] == query.shape[1]
        ):
            raise InputError("attend", "a bias [heads, distances] in float32", query=query, bias=bias)
        if not 0 <= layer < self._num_layers or rows.checked != geometry:
            self._check(query, output, layer, rows, sinks)
            heads_per_kv = query.shape[1] // self._num_kv_heads
            rows.arguments.query_token, rows.arguments.query_head, _ = query.stride()
            rows.arguments.heads_per_kv, rows.arguments.heads = heads_per_kv, self._kernels.heads_at_once(heads_per_kv)
            rows.checked = geometry
        arguments = rows.arguments
        arguments.query, arguments.output = query.data_ptr(), output.data_ptr()
        arguments.pool = self._pool + layer * self._layer_bytes
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        arguments.bias, arguments.bias_width = (None, 0) if bias is None else (bias.data_ptr(), bias.shape[1])
        arguments.window, arguments.scale, arguments.softcap = sliding_window or 0, scale, softcap or 0.0
        arguments.num_threads = torch.get_num_threads()
        return arguments

    def _check(self, query: Tensor, output: Tensor, layer: int, rows: Rows, sinks: Tensor | None) -> None:
        kernels, num_kv_heads = self._kernels, self._num_kv_heads
        if not (
            query.ndim == 3
            and output.shape == (*query.shape[:2], kernels.value_dim)
            and query.shape[2] == kernels.head_dim
            and query.stride()[2] == 1
            and output.is_contiguous()
            and (num_heads := query.shape[1]) % num_kv_heads == 0
            and query.shape[0] >= rows.num_tokens
            and 0 <= layer < self._num_layers
            and query.dtype is output.dtype is kernels.dtype
            and query.is_cpu
            and output.is_cpu
            and (sinks is None or (sinks.shape == (num_heads,) and sinks.is_cpu))
            and (rows.together is None or rows.together.most <= kernels.together(num_heads // num_kv_heads)[1])
        ):
            expected = f"twice [T, heads, dim], for one of {self._num_layers} layers, not {layer}"
            raise InputError("attend", expected, query=query, output=output, kv_cache=self._held[0])


def _are_numbers(*tensors: Tensor) -> bool:
    for each in tensors:  # noqa: SIM110 - a generator takes longer than all the checks together
        if each.dtype is not torch.int32 or not each.is_contiguous() or not each.is_cpu:
            return False
    return True


def constants(
    dtype: torch.dtype, head_dim: int, latent_dim: int | None = None, stored: torch.dtype | None = None
) -> dict[str, int]:
    """The constants that the source is compiled with; arguments as of `load`."""
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": latent_dim or head_dim,
        "IS_LATENT": int(latent_dim is not None),
        "IS_BFLOAT16": int(dtype is torch.bfloat16),
        "STORED": CODES.get(stored or dtype, 0),
    }


@lru_cache
def load(
    dtype: torch.dtype, head_dim: int, latent_dim: int | None = None, stored: torch.dtype | None = None
) -> CPUKernels | str:
    """The kernels for pools of this type and head dim, or why there are none. Compiles where no earlier process has.

    Args:
        dtype: Of queries, new keys and values.
        head_dim: Elements of one head; of a latent and a rotary key.
        latent_dim: Elements of a latent; `None`: the pool holds keys and values.
        stored: Of the pool; `None`: the same.
    """
    try:
        if dtype not in DTYPES:
            return f"takes {' and '.join(str(d) for d in DTYPES)}, the model is in {dtype}"
        if stored not in (None, dtype, *CODES):
            return f"needs a pool in the model's own dtype or of 8 bits, this one is in {stored}"
        most = MAX_HEAD_DIM if latent_dim is None else MAX_LATENT_ROW
        if head_dim > most:
            return f"takes head dims up to {most}, the model has {head_dim}"
        compiled = library(
            _SOURCE, FUNCTIONS, (), instructions_of(dtype), **constants(dtype, head_dim, latent_dim, stored)
        )
        kernels = CPUKernels(compiled, dtype, head_dim, latent_dim, stored)
        error = _error(kernels)
        # Of a rounding more or less; what is wrong is wrong by half.
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        return kernels if error < tolerance else f"gives wrong results on this machine (error {error:.1e})"
    except CompileError as error:
        return str(error)


def _error(kernels: CPUKernels) -> float:
    """How far the kernels are from plain torch, on two small sequences: size of the error over size of the truth."""
    dtype, head_dim, stored = kernels.dtype, kernels.head_dim, kernels.stored_dtype
    latent_dim = kernels.value_dim if kernels.num_parts == 1 else None
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator("cpu").manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)

        heads, widths = kernels.num_parts, kernels.stored
        pool = torch.zeros(5, 1, kernels.num_parts, heads, 16, kernels.row_width, dtype=stored, device="cpu")
        everywhere = torch.arange(80, device="cpu")
        reference.reshape_and_cache(random(80, heads, widths[0]), random(80, heads, widths[1]), pool, 0, everywhere)
        tables, lens = torch.tensor([[3, 0], [2, 4]], device="cpu"), torch.tensor([21, 7], device="cpu")
        slots = tables.gather(1, (lens[:, None] - 1) // 16)[:, 0] * 16 + (lens - 1) % 16
        rows = torch.arange(2, device="cpu")[:, None]
        both = PaddedGroup(rows, None, tables, lens[:, None] - 1, lens, 21, False, block_size=16, null_block=4)
        key, value, query = random(2, heads, widths[0]), random(2, heads, widths[1]), random(2, 4, head_dim)
        truth = pool.clone()
        reference.reshape_and_cache(key, value, truth, 0, slots)
        step = StepCalls(kernels, pool)
        step.write(key, value, 0, slots)
        if not torch.equal(reference.elements(pool), reference.elements(truth)):
            return float("inf")
        read = None if latent_dim is None else partial(reference.read_latents, latent_dim=latent_dim)
        expected = reference.paged_attention(query.double(), truth, 0, [both], head_dim**-0.5, read=read)
        result = query.new_empty(*query.shape[:2], expected.shape[-1])
        both_tokens = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32, device="cpu")
        starts = torch.arange(3, dtype=torch.int32, device="cpu")
        step.attend(query, result, 0, step.rows(tables.int(), lens.int(), starts, 2, 21, both_tokens), head_dim**-0.5)
        return float((result.double() - expected).norm() / expected.norm())
