"""The kernels in C for new keys, decoding and prompts; plain torch for what they don't take."""

from __future__ import annotations

import numpy as np
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
    most_one_by_one = 16  # drafts, the end of a prompt: gathering what they see costs more than reading it again

    def __init__(self, kv_cache: Tensor, latent_dim: int | None = None) -> None:
        super().__init__(kv_cache, latent_dim)
        kernels = cpu.load(kv_cache.dtype, kv_cache.shape[5], latent_dim)
        assert isinstance(kernels, cpu.CPUKernels), kernels
        self._kernels = kernels
        self._takes_prompts = _takes_prompts(kv_cache.dtype)

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
        return CPUStep(self._kv_cache, metadata, self._kernels, self._takes_prompts)


def _takes_prompts(dtype: torch.dtype) -> bool:
    """Whether prompts, too, are faster in C: not without wide vectors, nor where AMX multiplies half precision."""
    if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return False
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class CPUStep(TorchStep):
    """A step by the kernels in C; what they don't take (autocast makes states of another dtype) goes to plain torch."""

    def __init__(
        self, kv_cache: Tensor, metadata: AttentionMetadata, kernels: cpu.CPUKernels, takes_prompts: bool
    ) -> None:
        super().__init__(kv_cache, metadata)
        self._kernels, self._takes_prompts = kernels, takes_prompts
        self._calls = cpu.StepCalls(kernels, kv_cache)
        self._rows: dict[tuple[AttentionMetadata, int, bool], cpu.Rows] = {}

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        try:
            self._calls.write(key, value, layer, self._metadata.slot_mapping)
        except InputError:
            super().write(key, value, layer)

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        if params.maps is not None:
            return super().attend(query, params)
        metadata = self._metadata
        output: Tensor | None = None
        if metadata.num_decodes:
            output = self._attend_by_kernels(query, None, metadata, params)
            if output is not None and metadata.num_decodes == query.shape[0]:
                return output
            if output is None:
                return self._attend(query, params, None)
        found = None
        if self._takes_prompts and self._kernels.tokens_at_once(query.shape[1], self._kv_cache.shape[3]):
            found = self._attend_by_kernels(query, output, metadata, params, are_prompts=True)
        return self._attend(query, params, output) if found is None else found

    def _attend_rows(self, query: Tensor, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
        output = self._attend_by_kernels(query, None, metadata, params)
        return super()._attend_rows(query, metadata, params) if output is None else output

    def _attend_by_kernels(
        self,
        query: Tensor,
        begun: Tensor | None,
        metadata: AttentionMetadata,
        params: AttentionParams,
        are_prompts: bool = False,
    ) -> Tensor | None:
        """`[T, num_heads, head_dim]` with the decode rows filled in, or all others, in `begun` if there are any.

        `None`: the kernels don't take these.
        """
        if torch.is_autocast_enabled("cpu"):
            return None
        width = query.shape[2] if params.maps is None else params.maps.latent_dim
        output = query.new_empty(*query.shape[:2], width) if begun is None else begun
        try:
            key = metadata, query.shape[1], are_prompts
            rows = self._rows.get(key)
            if rows is None:
                rows = self._rows[key] = self._make_rows(metadata, query.shape[1], are_prompts)
            own = params.scale, params.sliding_window, params.softcap, params.sinks
            self._calls.attend(query, output, params.layer, rows, *own)
        except InputError:
            return None
        return output

    def _make_rows(self, metadata: AttentionMetadata, num_heads: int, are_prompts: bool) -> cpu.Rows:
        """For layers of so many query heads."""
        tables, num_kv_heads = (metadata.block_tables, metadata.seq_lens), self._kv_cache.shape[3]
        if are_prompts:
            tiles = metadata.query_tiles(self._kernels.tokens_at_once(num_heads, num_kv_heads))
            return self._calls.prompts(*tables, metadata.query_start_loc, tiles)
        together = None
        least, most = self._kernels.together(num_heads, num_kv_heads)
        shared = metadata.shared_prefixes if most > 1 and metadata.num_decodes >= least else None
        items = None if shared is None else shared.items(least, most)
        if shared is not None and items is not None:
            order = torch.from_numpy(shared.order.astype(np.int32))
            together = cpu.Together(order, torch.from_numpy(items), most)
        return self._calls.decodes(*tables, metadata.num_decodes, metadata.max_decode_len, together)
