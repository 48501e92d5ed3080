"""Shared code of the launchers: where a layer's attention finds its data, and what the device can do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hf_paged.kernels.scaled_rows import head_dim_of

FP8_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FORMATS = FP8_FORMATS | {torch.int8: "int8"}  # of pools that hold codes; of int8 with scales, see `scaled_rows.py`
MAX_HEAD_DIM = 256
# With each launch of a kernel: products that are added are one instruction, whatever a release of Triton takes for the
# default (3.10: not). `NO_FUSION` is for results whose bits must be those of separate operations: with fusion, the
# compiler multiplies in bfloat16 and merges that with the addition, so that the product is never rounded.
FUSION, NO_FUSION = {"enable_fp_fusion": True}, {"enable_fp_fusion": False}


class Tiling(NamedTuple):
    """Shape of a kernel's tile and how it is compiled.

    Attributes:
        rows: Query rows.
        tokens: Tokens of a KV tile.
        num_warps: Warps of a program.
        num_stages: Tiles in flight.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int

    def fit(self, padded_dim: int, itemsize: int, pool_itemsize: int, device: Device, num_parts: int = 2) -> Tiling:
        """The same tile with fewer stages, then with fewer tokens, until the device has the shared memory for it.

        Of warps it has as many as are 256 threads at most, which leaves each thread the registers that tiles count on.

        Args:
            padded_dim: Head dim, up to the next power of two.
            itemsize: Bytes of a query element.
            pool_itemsize: Bytes of an element of the pool.
            device: Where it runs.
            num_parts: How many of a token's rows in the pool are read: a key and a value, or one of a latent.
        """
        tokens, num_stages = self.tokens, self.num_stages
        limit = device.shared_memory - 8192  # for the scores, and for what changes its layout on the way
        query_bytes = self.rows * padded_dim * itemsize
        token_bytes = num_parts * padded_dim * pool_itemsize
        while query_bytes + (num_stages - 1) * tokens * token_bytes > limit and (num_stages > 2 or tokens > 16):
            num_stages, tokens = (num_stages - 1, tokens) if num_stages > 2 else (num_stages, tokens // 2)
        num_warps = min(self.num_warps, 256 // device.lanes)
        return self._replace(tokens=tokens, num_warps=num_warps, num_stages=num_stages)


@dataclass(frozen=True, slots=True)
class Device:
    """The facts about a device that launchers need.

    Attributes:
        num_processors: Streaming multiprocessors (compute units).
        has_native_fp8: Whether it converts e4m3 by itself.
        shared_memory: Bytes of it that a program can have.
        reads_shared_factors: Whether matrix instructions take factors from shared memory (`wgmma`, `tcgen05`);
            elsewhere all of them pass through registers.
        is_nvidia: Whether kernels may have its assembler's instructions in them.
        lanes: Threads of a warp.
    """

    num_processors: int
    has_native_fp8: bool
    shared_memory: int
    reads_shared_factors: bool
    is_nvidia: bool = False
    lanes: int = 32

    @staticmethod
    @lru_cache
    def of(device: torch.device) -> Device:
        """The device's; the interpreter's where there is none."""
        if device.type != "cuda":
            return Device(num_processors=16, has_native_fp8=False, shared_memory=1 << 20, reads_shared_factors=True)
        properties = torch.cuda.get_device_properties(device)
        is_nvidia = torch.version.hip is None
        return Device(
            properties.multi_processor_count,
            has_native_fp8=is_nvidia and (properties.major, properties.minor) >= (8, 9),
            shared_memory=getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block,
            reads_shared_factors=is_nvidia and properties.major >= 9 and properties.major < 12,
            is_nvidia=is_nvidia,
            lanes=properties.warp_size,
        )


@torch.compiler.assume_constant_result  # a device doesn't change, and its properties are not for a graph
def device_of(device: torch.device) -> Device:
    """`Device.of`, also where `torch.compile` traces the caller."""
    return Device.of(device)


@dataclass(slots=True)
class LayerAttention:
    """One layer's paged attention over a packed batch.

    Attributes:
        output: `[T, num_heads, head_dim]`, contiguous, written; of latents as wide as these.
        query: `[T, num_heads, head_dim]`, the last dimension contiguous.
        kv_cache: The KV tensor.
        layer: Layer index.
        block_tables: `[S, N]` int32.
        seq_lens: `[S]` int32.
        query_start_loc: `[S + 1]` int32; `None`: one new token a sequence.
        scale: Factor on the scores.
        window: Tokens a query sees, itself included; 0: all before it.
        softcap: Bound of the scores; 0: none.
        sinks: `[num_heads]` scores or `None`.
        partials: Float32 scratch for split sequences.
        bias: `[num_heads, distances]` float32, contiguous, or `None`: what is added to scores by distance.
    """

    output: Tensor
    query: Tensor
    kv_cache: Tensor
    layer: int
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None
    partials: Tensor
    bias: Tensor | None = None

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_cache.shape[3]

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_size(self) -> int:
        return self.kv_cache.shape[4]

    @property
    def head_dim(self) -> int:
        return head_dim_of(self.kv_cache)

    @property
    def padded_dim(self) -> int:
        return next_power_of_two(max(16, self.head_dim))

    @property
    def pool_format(self) -> str:
        return FORMATS.get(self.kv_cache.dtype, "")

    @property
    def device(self) -> Device:
        return device_of(self.kv_cache.device)

    def fit(self, tiling: Tiling) -> Tiling:
        """The same tile as this device can have it."""
        return tiling.fit(self.padded_dim, self.query.element_size(), self.kv_cache.element_size(), self.device)

    @property
    def pool(self) -> Tensor:
        """The KV tensor as the kernels read it."""
        return codes(self.kv_cache)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of query token and head, block table row, block, layer, key to value, kv head."""
        return (*self.query.stride()[:2], self.block_tables.stride(0), *self.kv_cache.stride()[:4])

    def constants(self, shape: Tiling) -> dict[str, Any]:
        """The constants of all kernels over keys and values, for tiles of this shape."""
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "BLOCK_SIZE": self.block_size,
            "TILE": shape.tokens,
            "HEAD_DIM": self.head_dim,
            "D": self.padded_dim,
            "FORMAT": self.pool_format,
            "NATIVE": self.device.has_native_fp8,
            "HAS_SOFTCAP": self.softcap > 0,
            "BIAS": 0 if self.bias is None else self.bias.shape[1],
            "num_warps": shape.num_warps,
            "num_stages": shape.num_stages,
        } | FUSION


def codes(kv_cache: Tensor) -> Tensor:
    """A pool of fp8 numbers as the uint8 codes of them; any other as it is."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype in FP8_FORMATS else kv_cache


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def check_kv_cache(kv_cache: Tensor) -> None:
    """Refuses what the kernels can't address.

    Raises:
        ValueError: Wrong shape, a token's numbers not side by side, or a head dim above 256.
    """
    if kv_cache.dim() != 6:
        raise ValueError(
            "kv_cache must be [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], "
            f"got {list(kv_cache.shape)}"
        )
    if kv_cache.stride()[4:] != (kv_cache.shape[5], 1):
        raise ValueError(f"a block's tokens must be contiguous, got strides {kv_cache.stride()}")
    head_dim = head_dim_of(kv_cache)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"the Triton kernels take head dims up to {MAX_HEAD_DIM}, got {head_dim}")


@contextmanager
def loaded_kernels() -> Iterator[list[str]]:
    """Within it, names of the kernels that this thread has Triton load: compiled now, or from its cache."""
    names: list[str] = []
    own = threading.get_ident()

    def note(_module: object, _function: object, name: str, *_: object) -> None:
        if threading.get_ident() == own:
            names.append(name)

    hooks = triton.knobs.runtime.kernel_load_end_hook
    hooks.add(note)
    try:
        yield names
    finally:
        hooks.remove(note)


def device_context(tensor: Tensor) -> torch.cuda.device:
    """Triton launches on the thread's current device, which need not be the tensor's; no device on CPU."""
    return torch.cuda.device(tensor.device if tensor.device.type == "cuda" else -1)


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (`TRITON_INTERPRET=1` at import)."""
    return bool(triton.knobs.runtime.interpret)
