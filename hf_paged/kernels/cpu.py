"""The kernels of `cpu.c`: compiled once a machine with its C compiler, checked, and called without torch in between."""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from hf_paged.kernels import reference
from hf_paged.kernels.c_compiler import CompileError, library
from hf_paged.kernels.layers import InputError
from hf_paged.kernels.padded_groups import PaddedGroup

DTYPES = (torch.float32, torch.bfloat16)
MAX_HEAD_DIM = 512
MAX_LATENT_ROW = 2048  # elements of a latent and a rotary key
MAX_GROUP_ELEMENTS = 32768  # of all query heads that share a key head: they lie on a thread's stack, twice, in float32
FUNCTIONS = ("hf_paged_write", "hf_paged_decode")
_SOURCE = Path(__file__).with_suffix(".c")


class _Write(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("key", "value", "pool", "slots")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_kv_heads", "block_size", "block_stride")),
        *((name, ctypes.c_int64) for name in ("key_token", "key_head", "value_token", "value_head")),
        ("num_threads", ctypes.c_int64),
    ]


class _Decode(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "output", "pool", "tables", "seq_lens", "sinks")),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head", "num_seqs", "num_kv_heads", "heads_per_kv")),
        *((name, ctypes.c_int64) for name in ("block_size", "table_width", "block_stride", "window", "num_threads")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class CPUKernels:
    """The compiled kernels for one element type and head dim, or of rows of latents one width of these."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, head_dim: int, latent_dim: int | None = None) -> None:
        self._dtype, self._head_dim = dtype, head_dim
        self._value_dim = head_dim if latent_dim is None else latent_dim
        self._num_parts = 2 if latent_dim is None else 1
        self._stored = (head_dim, head_dim) if latent_dim is None else (latent_dim, head_dim - latent_dim)
        self._write = library.hf_paged_write
        self._decode = library.hf_paged_decode
        for function, kind in ((self._write, _Write), (self._decode, _Decode)):
            function.argtypes, function.restype = [ctypes.POINTER(kind)], None  # which takes the structure itself

    def reshape_and_cache(self, key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
        """Writes the new keys and values of one layer into their slots.

        Args:
            key: `[T, num_kv_heads, head_dim]` in the pool's dtype, the last dimension contiguous; of latents, them.
            value: Like `key`; of latents, the rotary keys.
            kv_cache: The KV tensor, changed in place.
            layer: Layer index.
            slot_mapping: `[T]` int64; tokens with a slot below 0 are skipped. None is beyond the pool: that the block
                manager sees to.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices, or a layer that the pool does not have.
        """
        _, num_layers, _, num_kv_heads, _, _ = kv_cache.shape
        key_dim, value_dim = self._stored
        if not (
            key.shape == (*slot_mapping.shape, num_kv_heads, key_dim)
            and value.shape == (*slot_mapping.shape, num_kv_heads, value_dim)
            and key.ndim == 3
            and (key_stride := key.stride())[2] == (value_stride := value.stride())[2] == 1
            and 0 <= layer < num_layers
            and self._is_own(kv_cache)
            and key.dtype is value.dtype is self._dtype
            and slot_mapping.dtype is torch.int64
            and key.is_cpu
            and value.is_cpu
            and slot_mapping.is_cpu
            and slot_mapping.is_contiguous()
        ):
            expected = f"twice [T, heads, dim], [T] and the pool they go to, in layer {layer}"
            raise InputError("write", expected, key=key, value=value, slot_mapping=slot_mapping, kv_cache=kv_cache)
        block_stride, layer_stride, _, _, _, _ = kv_cache.stride()
        arguments = _Write(
            key.data_ptr(),
            value.data_ptr(),
            kv_cache.data_ptr() + layer * layer_stride * self._dtype.itemsize,
            slot_mapping.data_ptr(),
            key.shape[0],
            num_kv_heads,
            kv_cache.shape[4],
            block_stride,
            *key_stride[:2],
            *value_stride[:2],
            torch.get_num_threads(),
        )
        self._write(arguments)

    def paged_decode(
        self,
        query: Tensor,
        output: Tensor,
        kv_cache: Tensor,
        layer: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        num_seqs: int,
        longest: int,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attention of the sequences with one new token each that the batch begins with.

        Args:
            query: `[T, num_heads, head_dim]` in the pool's dtype, the last dimension contiguous; the first
                `num_seqs` tokens are read.
            output: `[T, num_heads, head_dim]`, contiguous; those tokens are written. Of latents as wide as these.
            kv_cache: The KV tensor.
            layer: Layer index.
            block_tables: `[S, N]` int32, contiguous, with the blocks of the first `num_seqs` sequences.
            seq_lens: `[S]` int32, contiguous, tokens of each including the new one.
            num_seqs: How many sequences.
            longest: Tokens of the longest of them.
            scale: Factor on the scores.
            sliding_window: Tokens a query sees, itself included; `None`: all before it.
            softcap: Bound of the scores; `None`: none.
            sinks: `[num_heads]` logits.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices, a layer that the pool does not have, tables
                of too few blocks, or too many query heads a key head.
        """
        _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
        if not (
            query.ndim == 3
            and output.shape == (*query.shape[:2], self._value_dim)
            and query.shape[2] == head_dim
            and (query_stride := query.stride())[2] == 1
            and output.is_contiguous()
            and (num_heads := query.shape[1]) % num_kv_heads == 0
            and (num_heads * head_dim <= num_kv_heads * MAX_GROUP_ELEMENTS or self._num_parts == 1)
            and query.shape[0] >= num_seqs <= block_tables.shape[0]
            and num_seqs <= seq_lens.shape[0]
            and longest <= block_tables.shape[1] * block_size
            and 0 <= layer < num_layers
            and self._is_own(kv_cache)
            and query.dtype is output.dtype is self._dtype
            and block_tables.dtype is seq_lens.dtype is torch.int32
            and block_tables.is_contiguous()
            and seq_lens.is_contiguous()
            and query.is_cpu
            and output.is_cpu
            and block_tables.is_cpu
            and (sinks is None or (sinks.shape == (num_heads,) and sinks.is_cpu))
        ):
            expected = f"twice [T, heads, dim], {num_seqs} tables and lengths, and their pool (layer {layer})"
            given = {"query": query, "output": output, "block_tables": block_tables, "seq_lens": seq_lens}
            raise InputError("decode", expected, **given, kv_cache=kv_cache)
        block_stride, layer_stride, _, _, _, _ = kv_cache.stride()
        arguments = _Decode(
            query.data_ptr(),
            output.data_ptr(),
            kv_cache.data_ptr() + layer * layer_stride * self._dtype.itemsize,
            block_tables.data_ptr(),
            seq_lens.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            *query_stride[:2],
            num_seqs,
            num_kv_heads,
            num_heads // num_kv_heads,
            block_size,
            block_tables.shape[1],
            block_stride,
            sliding_window or 0,
            torch.get_num_threads(),
            scale,
            softcap or 0.0,
        )
        self._decode(arguments)

    def _is_own(self, kv_cache: Tensor) -> bool:
        """Whether the kernels are made for this pool, whose blocks they take to be contiguous."""
        return (
            kv_cache.dtype is self._dtype
            and kv_cache.shape[5] == self._head_dim
            and kv_cache.shape[2] == self._num_parts
            and (kv_cache.is_contiguous() or kv_cache[0].is_contiguous())
            and kv_cache.is_cpu
        )


def constants(dtype: torch.dtype, head_dim: int, latent_dim: int | None = None) -> dict[str, int]:
    """What the source is compiled with; arguments as of `load`."""
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": latent_dim or head_dim,
        "IS_LATENT": int(latent_dim is not None),
        "IS_BFLOAT16": int(dtype is torch.bfloat16),
    }


@lru_cache
def load(dtype: torch.dtype, head_dim: int, latent_dim: int | None = None) -> CPUKernels | str:
    """The kernels for pools of this type and head dim, or why there are none. Compiles where no earlier process has.

    Args:
        dtype: Of pool and model.
        head_dim: Elements of one head; of a latent and a rotary key.
        latent_dim: Elements of a latent; `None`: the pool holds keys and values.
    """
    try:
        if dtype not in DTYPES:
            return f"takes {' and '.join(str(d) for d in DTYPES)}, the model is in {dtype}"
        most = MAX_HEAD_DIM if latent_dim is None else MAX_LATENT_ROW
        if head_dim > most:
            return f"takes head dims up to {most}, the model has {head_dim}"
        compiled = library(_SOURCE, FUNCTIONS, (), **constants(dtype, head_dim, latent_dim))
        kernels = CPUKernels(compiled, dtype, head_dim, latent_dim)
        error = _error(kernels, dtype, head_dim, latent_dim)
        # Of a rounding more or less; what is wrong is wrong by half.
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        return kernels if error < tolerance else f"gives wrong results on this machine (error {error:.1e})"
    except CompileError as error:
        return str(error)


def _error(kernels: CPUKernels, dtype: torch.dtype, head_dim: int, latent_dim: int | None) -> float:
    """How far the kernels are from plain torch, on two small sequences: size of the error over size of the truth."""
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator("cpu").manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)

        heads, widths = (2, (head_dim, head_dim)) if latent_dim is None else (1, (latent_dim, head_dim - latent_dim))
        pool = random(5, 1, 2 if latent_dim is None else 1, heads, 16, head_dim)
        tables, lens = torch.tensor([[3, 0], [2, 4]], device="cpu"), torch.tensor([21, 7], device="cpu")
        slots = tables.gather(1, (lens[:, None] - 1) // 16)[:, 0] * 16 + (lens - 1) % 16
        rows = torch.arange(2, device="cpu")[:, None]
        both = PaddedGroup(rows, None, tables, lens[:, None] - 1, lens, 21, False, block_size=16, null_block=4)
        key, value, query = random(2, heads, widths[0]), random(2, heads, widths[1]), random(2, 4, head_dim)
        truth = pool.double()
        reference.reshape_and_cache(key.double(), value.double(), truth, 0, slots)
        kernels.reshape_and_cache(key, value, pool, 0, slots)
        if not torch.equal(pool.double(), truth):
            return float("inf")
        read = None if latent_dim is None else partial(reference.read_latents, latent_dim=latent_dim)
        expected = reference.paged_attention(query.double(), truth, 0, [both], head_dim**-0.5, read=read)
        result = query.new_empty(*query.shape[:2], expected.shape[-1])
        kernels.paged_decode(query, result, pool, 0, tables.int(), lens.int(), 2, 21, head_dim**-0.5)
        return float((result.double() - expected).norm() / expected.norm())
