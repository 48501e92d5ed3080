"""Who carries out a step's paged operations: plain torch (`reference.py`), C on CPU (`cpu.py`) or Triton (`ops.py`)."""

from __future__ import annotations

import importlib.util
import logging
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from hf_paged.kernels import cpu, cpu_layers, reference
from hf_paged.kernels.attention_metadata import AttentionMetadata
from hf_paged.kernels.layers import InputError, LayerKernels
from hf_paged.kernels.transfers import to_device

if TYPE_CHECKING:  # Triton need not be installed for the other backend
    from hf_paged.kernels.ops import Partials

logger = logging.getLogger(__name__)

HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


class PagedStep(Protocol):
    """One step's flat batch over one pool: what every attention layer of a forward calls."""

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Stores the new tokens' `[T, num_kv_heads, head_dim]` keys and values of one layer."""

    def attend(
        self,
        query: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`[T, num_heads, head_dim]` of the new tokens' queries; arguments as in `reference.paged_attention`."""


class Backend(Protocol):
    """The operations over one KV tensor.

    Attributes:
        name: "torch", "cpu" or "triton".
        reads_empty_slots: Whether it reads slots of a block that hold no token (and multiplies them by zero).
    """

    name: str
    reads_empty_slots: bool

    def step(self, metadata: AttentionMetadata) -> PagedStep:
        """The operations of one step."""

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole blocks, pairs `(source, destination)`; all sources are read before anything is written."""

    def warm_up(self, block: int) -> None:
        """Launches the kernels that no forward does, on a block that stays as it is."""


class TorchBackend:
    """Plain torch, on any device."""

    name = "torch"
    reads_empty_slots = True

    def __init__(self, kv_cache: Tensor) -> None:
        self._kv_cache = kv_cache

    def step(self, metadata: AttentionMetadata) -> PagedStep:
        return TorchStep(self._kv_cache, metadata)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, destinations = _to_device(copies, self._kv_cache.device)
        reference.copy_blocks(self._kv_cache, sources, destinations)

    def warm_up(self, block: int) -> None:
        pass


class TorchStep:
    """A step by `reference.py`."""

    def __init__(self, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        self._kv_cache = kv_cache
        self._metadata = metadata

    @cached_property
    def _slot_rows(self) -> Tensor:
        """The same for all layers."""
        return reference.slot_rows(self._kv_cache, self._metadata.slot_mapping)

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        reference.write_rows(key, value, self._kv_cache, layer, self._slot_rows)

    def attend(
        self,
        query: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return reference.paged_attention(
            query, self._kv_cache, layer, self._metadata, scale, sliding_window, softcap, sinks
        )


class CPUBackend(TorchBackend):
    """The kernels in C for new keys and for decoding; plain torch, whose matrix products are good, for prompts."""

    name = "cpu"

    def __init__(self, kv_cache: Tensor, kernels: cpu.CPUKernels) -> None:
        super().__init__(kv_cache)
        self._kernels = kernels

    def step(self, metadata: AttentionMetadata) -> PagedStep:
        return CPUStep(self._kv_cache, metadata, self._kernels)


class CPUStep(TorchStep):
    """A step by `cpu.py`; of what that does not take (autocast makes states of another dtype) by `reference.py`."""

    def __init__(self, kv_cache: Tensor, metadata: AttentionMetadata, kernels: cpu.CPUKernels) -> None:
        super().__init__(kv_cache, metadata)
        self._kernels = kernels

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        try:
            return self._kernels.reshape_and_cache(key, value, self._kv_cache, layer, self._metadata.slot_mapping)
        except InputError:
            pass
        super().write(key, value, layer)

    def attend(
        self,
        query: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        metadata = self._metadata
        begun: Tensor | None = None  # with the decode rows filled in
        if metadata.num_decodes and not torch.is_autocast_enabled("cpu"):
            output = query.new_empty(query.shape)
            try:
                self._kernels.paged_decode(
                    query, output, self._kv_cache, layer, metadata, scale, sliding_window, softcap, sinks
                )
                if metadata.num_decodes == len(query):
                    return output
                begun = output
            except InputError:
                pass
        return reference.paged_attention(
            query, self._kv_cache, layer, metadata, scale, sliding_window, softcap, sinks, output=begun
        )


class TritonBackend:
    """The Triton kernels: on a GPU, or in Triton's interpreter on CPU."""

    name = "triton"
    reads_empty_slots = False

    def __init__(self, kv_cache: Tensor) -> None:
        from hf_paged.kernels import ops

        self._copy_blocks = ops.copy_blocks
        self._kv_cache = kv_cache
        self._partials = ops.Partials()
        self._recorded_partials = ops.Partials()  # not replaced when steps of other shapes need more
        # fp8 numbers as they are; a model with outliers would want others.
        layers, _, heads = kv_cache.shape[1:4]
        is_fp8 = kv_cache.dtype in reference.FP8
        self._scales = torch.ones(layers, 2, heads, dtype=torch.float32, device=kv_cache.device) if is_fp8 else None

    def step(self, metadata: AttentionMetadata) -> PagedStep:
        partials = self._recorded_partials if metadata.is_recorded else self._partials
        return TritonStep(self._kv_cache, metadata, partials, self._scales)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, destinations = _to_device(copies, self._kv_cache.device)
        if {source for source, _ in copies}.isdisjoint(destination for _, destination in copies):
            self._copy_blocks(self._kv_cache, sources, destinations)
        else:  # a block that is copied from and then reused as the copy of another one: order matters
            reference.copy_blocks(self._kv_cache, sources, destinations)

    def warm_up(self, block: int) -> None:
        self._copy_blocks(self._kv_cache, *_to_device([(block, block)], self._kv_cache.device))


class TritonStep:
    """A step by `ops.py`."""

    def __init__(
        self, kv_cache: Tensor, metadata: AttentionMetadata, partials: Partials, scales: Tensor | None
    ) -> None:
        from hf_paged.kernels import ops

        self._write = ops.reshape_and_cache
        self._attend = ops.paged_attention
        self._kv_cache = kv_cache
        self._metadata = metadata
        self._partials = partials
        self._scales = scales

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        self._write(key, value, self._kv_cache, layer, self._metadata.slot_mapping, self._scales)

    def attend(
        self,
        query: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # as the model's own attention would
            query = query.to(torch.get_autocast_dtype(kind))
        return self._attend(
            query,
            self._kv_cache,
            layer,
            self._metadata,
            scale,
            sliding_window,
            softcap,
            sinks,
            kv_scales=self._scales,
            partials=self._partials,
        )


def choose(name: str, kv_cache: Tensor, dtype: torch.dtype) -> Backend:
    """The backend for a pool.

    Args:
        name: "torch", "triton", "cpu", or "auto": Triton where the device is a GPU that it can serve, the kernels in C
            on CPU where they can be compiled, else torch.
        kv_cache: The KV tensor.
        dtype: The model's.

    Raises:
        ValueError: `name` is "triton" or "cpu" and those kernels can't run here; the message says why.
    """
    if name == "cpu" or (name == "auto" and kv_cache.device.type == "cpu"):
        kernels = _cpu_kernels(kv_cache, dtype)
        if not isinstance(kernels, str):
            return CPUBackend(kv_cache, kernels)
        if name == "cpu":
            raise ValueError(f'attention_backend="cpu" {kernels}; use "torch" or "auto"')
        logger.info("hf_paged: plain torch attends on CPU, since the kernels in C %s", kernels)
        return TorchBackend(kv_cache)
    # On CPU only who asks for Triton gets it: its interpreter is there to test with.
    wants_triton = name == "triton" or (name == "auto" and kv_cache.device.type == "cuda")
    reason = _no_triton(kv_cache, dtype) if wants_triton else None
    if name == "triton" and reason:
        raise ValueError(f'attention_backend="triton" {reason}; use "torch" or "auto"')
    if reason:
        logger.info("hf_paged: plain torch attends on %s, since Triton %s", kv_cache.device, reason)
    return TritonBackend(kv_cache) if wants_triton and not reason else TorchBackend(kv_cache)


def layer_kernels(dtype: torch.dtype, device: torch.device) -> LayerKernels | str:
    """The kernels for what lies between a model's matrix products, or why there are none.

    Args:
        dtype: Of the model.
        device: Of the model.
    """
    if device.type == "cpu":
        return cpu_layers.load(dtype)
    if device.type != "cuda":
        return f"need a CPU, a CUDA or a ROCm device, the model is on {device}"
    if dtype not in HALF_OR_SINGLE:
        return f"compute in float32 and half precision, the model is in {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "need the triton package (pip install hf-paged[gpu]), which is not installed"
    reason = _launch_failure(device)
    if reason:
        return reason
    from hf_paged.kernels.triton_layers import TritonLayers

    return TritonLayers(dtype)


def _cpu_kernels(kv_cache: Tensor, dtype: torch.dtype) -> cpu.CPUKernels | str:
    """The kernels in C for this pool, or why they can't serve it."""
    if kv_cache.device.type != "cpu":
        return f"needs a model on CPU, this one is on {kv_cache.device}"
    if kv_cache.dtype != dtype:
        return f"needs a pool in the model's own dtype, this one is in {kv_cache.dtype}"
    return cpu.load(dtype, kv_cache.shape[5])


def _no_triton(kv_cache: Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernels can't serve this pool; `None` if they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs the triton package (pip install hf-paged[gpu]), which is not installed"
    device, head_dim = kv_cache.device, kv_cache.shape[5]
    if device.type == "cuda":
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return f"needs a GPU of compute capability 8.0 or above, {torch.cuda.get_device_name(device)} has less"
    else:
        from hf_paged.kernels import launch

        if device.type != "cpu" or not launch.is_interpreting():
            return f"needs a CUDA or ROCm device, the model is on {device}"
    if dtype not in HALF_OR_SINGLE:
        return f"computes in float32 and half precision, the model is in {dtype}"
    if head_dim > 256:
        return f"takes head dims up to 256, the model has {head_dim}"
    return _launch_failure(device) if device.type == "cuda" else None


@lru_cache
def _launch_failure(device: torch.device) -> str | None:
    """Why not even a small kernel runs there: Triton needs a C compiler and Python's headers to launch any."""
    try:
        from hf_paged.kernels import ops

        with torch.inference_mode(False):
            blocks = torch.arange(2.0, device=device)[:, None].expand(2, 16).reshape(2, 1, 1, 1, 1, 16).clone()
            ops.copy_blocks(blocks, *_to_device([(1, 0)], device))
            return None if bool((blocks == 1).all()) else "copies wrongly on this device"
    except torch.OutOfMemoryError:  # says nothing about Triton, and must not be remembered as if it did
        raise
    except Exception as error:
        # Once a process: a GPU without the kernels works and is slow, which nobody would look for here.
        reason = f"can't compile or launch kernels here ({type(error).__name__}: {error})"
        logger.warning("hf_paged: the Triton backend %s", reason)
        return reason


def _to_device(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    both = to_device(np.array(pairs, dtype=np.int64).T, device)
    return both[0], both[1]
