"""Plain torch, on any device."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hf_paged.attention.backends.registry import Backend, PagedStep, PoolDescription, block_pairs, register
from hf_paged.attention.latent_step import LatentAttention
from hf_paged.attention.lazy import lazy
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import reference


@register("torch", device_types=None, preference=0)
class TorchBackend(Backend):
    @classmethod
    def supports(cls, pool: PoolDescription) -> str | None:
        return None

    def step(self, metadata: AttentionMetadata) -> PagedStep:
        return TorchStep(self._kv_cache, metadata)

    def copy_blocks(self, pool: Tensor, copies: list[tuple[int, int]]) -> None:
        reference.copy_blocks(pool, *block_pairs(copies, pool.device))


class TorchStep:
    def __init__(self, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        self._kv_cache = kv_cache
        self._metadata = metadata

    @lazy
    def _slot_rows(self) -> Tensor:
        return reference.slot_rows(self._kv_cache, self._metadata.slot_mapping)

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        reference.write_rows(key, value, self._kv_cache, layer, self._slot_rows)

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        if params.maps is not None:
            return self._latents.attend(query, params)
        return self._attend(query, params, None)

    @lazy
    def _latents(self) -> LatentAttention:
        return LatentAttention(self._kv_cache, self._metadata, self._attend_rows)

    def _attend_rows(self, query: Tensor, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
        assert params.maps is not None
        return reference.paged_attention(
            query,
            self._kv_cache,
            params.layer,
            metadata.groups,
            params.scale,
            params.sliding_window,
            params.softcap,
            params.sinks,
            read=partial(reference.read_latents, latent_dim=params.maps.latent_dim),
        )

    def _attend(self, query: Tensor, params: AttentionParams, begun: Tensor | None) -> Tensor:
        """Attention of all sequences; or of those behind the first `num_decodes`, whose results `begun` has."""
        metadata = self._metadata
        return reference.paged_attention(
            query,
            self._kv_cache,
            params.layer,
            metadata.groups if begun is None else metadata.prefill_groups,
            params.scale,
            params.sliding_window,
            params.softcap,
            params.sinks,
            output=begun,
            bias=params.bias,
        )
