"""The kernels in C for new keys and for decoding; plain torch, whose matrix products are good, for prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_paged.attention.backends.registry import PagedStep, PoolDescription, register
from hf_paged.attention.backends.torch import TorchBackend, TorchStep
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import cpu
from hf_paged.kernels.layers import InputError


@register("cpu", device_types=("cpu",), preference=1)
class CPUBackend(TorchBackend):
    """The operations of `kernels/cpu.py`, and of `kernels/reference.py` for the rest."""

    most_one_by_one = 16  # drafts, the end of a prompt: gathering what they see costs more than reading it again

    def __init__(self, kv_cache: Tensor, latent_dim: int | None = None) -> None:
        super().__init__(kv_cache, latent_dim)
        kernels = cpu.load(kv_cache.dtype, kv_cache.shape[5], latent_dim)
        assert isinstance(kernels, cpu.CPUKernels), kernels
        self._kernels = kernels

    @classmethod
    def supports(cls, pool: PoolDescription) -> str | None:
        if pool.device.type != "cpu":
            return f"needs a model on CPU, this one is on {pool.device}"
        if pool.dtype != pool.compute_dtype:
            return f"needs a pool in the model's own dtype, this one is in {pool.dtype}"
        if pool.has_two_widths:
            return "takes keys and values of one width, this pool's differ"
        kernels = cpu.load(pool.dtype, pool.head_dim, pool.latent_dim)
        return kernels if isinstance(kernels, str) else None

    def step(self, metadata: AttentionMetadata) -> PagedStep:
        return CPUStep(self._kv_cache, metadata, self._kernels)


class CPUStep(TorchStep):
    """A step by the kernels in C; what they don't take (autocast makes states of another dtype) goes to plain torch."""

    def __init__(self, kv_cache: Tensor, metadata: AttentionMetadata, kernels: cpu.CPUKernels) -> None:
        super().__init__(kv_cache, metadata)
        self._kernels = kernels

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        try:
            return self._kernels.reshape_and_cache(key, value, self._kv_cache, layer, self._metadata.slot_mapping)
        except InputError:
            pass
        super().write(key, value, layer)

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        if params.maps is not None:
            return super().attend(query, params)
        metadata = self._metadata
        output: Tensor | None = None
        if metadata.num_decodes:
            output = self._decode(query, query.shape[2], metadata, params)
            if output is not None and metadata.num_decodes == query.shape[0]:
                return output
        return self._attend(query, params, output)

    def _attend_rows(self, query: Tensor, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
        assert params.maps is not None
        output = self._decode(query, params.maps.latent_dim, metadata, params)
        return super()._attend_rows(query, metadata, params) if output is None else output

    def _decode(self, query: Tensor, width: int, metadata: AttentionMetadata, params: AttentionParams) -> Tensor | None:
        """`[T, num_heads, width]` with the decode rows filled in; `None`: the kernels don't take these."""
        if torch.is_autocast_enabled("cpu"):
            return None
        output = query.new_empty(*query.shape[:2], width)
        try:
            self._kernels.paged_decode(
                query,
                output,
                self._kv_cache,
                params.layer,
                metadata.block_tables,
                metadata.seq_lens,
                metadata.num_decodes,
                metadata.max_decode_len,
                params.scale,
                params.sliding_window,
                params.softcap,
                params.sinks,
            )
        except InputError:
            return None
        return output
