"""The kernels in C for new keys, decoding and prompts; plain torch for what they don't take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.backends.registry import PagedStep, PoolDescription, register
from hf_paged.attention.backends.torch import TorchBackend, TorchStep
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import cpu
from hf_paged.kernels.cpu_stack import AttentionCalls
from hf_paged.kernels.layers import InputError, plainly
from hf_paged.kernels.scaled_rows import head_dim_of


@register("cpu", device_types=("cpu",), preference=1)
class CPUBackend(TorchBackend):
    def __init__(self, kv_cache: Tensor, latent_dim: int | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(kv_cache, latent_dim, dtype)
        kernels = cpu.load(dtype or kv_cache.dtype, head_dim_of(kv_cache), latent_dim, kv_cache.dtype)
        assert isinstance(kernels, cpu.CPUKernels), kernels
        self._kernels = kernels
        self._takes_prompts = _takes_prompts(kernels.dtype)

    @classmethod
    def supports(cls, pool: PoolDescription) -> str | None:
        if pool.device.type != "cpu":
            return f"needs a model on CPU, this one is on {pool.device}"
        if pool.has_two_widths:
            return "takes keys and values of one width, this pool's differ"
        kernels = cpu.load(pool.compute_dtype, pool.head_dim, pool.latent_dim, pool.dtype)
        return kernels if isinstance(kernels, str) else None

    def step(self, metadata: AttentionMetadata) -> PagedStep:
        return CPUStep(self._kv_cache, metadata, self._kernels, self._takes_prompts)


def _takes_prompts(dtype: torch.dtype) -> bool:
    """Whether prompts, too, are attended to in C, not where AMX multiplies half precision."""
    return dtype is not torch.bfloat16 or not torch.cpu._is_amx_tile_supported()


class CPUStep(TorchStep):
    """A step by the kernels in C; what they don't take (autocast makes states of another dtype) goes to plain torch."""

    def __init__(
        self, kv_cache: Tensor, metadata: AttentionMetadata, kernels: cpu.CPUKernels, takes_prompts: bool
    ) -> None:
        super().__init__(kv_cache, metadata)
        self._kernels, self._takes_prompts = kernels, takes_prompts
        self._calls = cpu.StepCalls(kernels, kv_cache)
        self._rows: dict[tuple[AttentionMetadata, int], list[cpu.Rows]] = {}

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        try:
            with plainly():
                self._calls.write(key, value, layer, self._metadata.slot_mapping)
        except InputError:
            super().write(key, value, layer)

    def takes_together(self, params: AttentionParams, other: AttentionParams) -> bool:
        """Whether `calls` takes a layer with these settings, and another one with those."""
        settings = [(own.scale, own.sliding_window, own.softcap) for own in (params, other)]
        others = [own for each in (params, other) for own in (each.sinks, each.maps, each.bias)]
        return settings[0] == settings[1] and all(own is None for own in others)

    def calls(
        self, params: Sequence[AttentionParams], query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> AttentionCalls:
        """What `write` and `attend` do for several layers that it `takes_together`, all over the same tensors.

        Raises:
            InputError: Tensors that the kernels don't take, or rows.
        """
        first, layers = params[0], [own.layer for own in params]
        if torch.is_autocast_enabled("cpu") or not (self._takes_prompts or self._metadata.num_decodes == len(query)):
            raise InputError("layers", "rows that all are the kernels'", query=query)
        own = first.scale, first.sliding_window, first.softcap
        with plainly():
            attends = [
                self._calls.attends(query, output, layers, each, *own)
                for each in self._taken(self._metadata, query.shape[1])
            ]
            return [self._calls.writes(key, value, layers, self._metadata.slot_mapping), *attends]

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        if params.maps is not None:
            return super().attend(query, params)
        num_taken = query.shape[0] if self._takes_prompts else self._metadata.num_decodes
        output = self._attend_by_kernels(query, self._metadata, params) if num_taken else None
        return self._attend(query, params, output) if output is None or num_taken < query.shape[0] else output

    def _attend_rows(self, query: Tensor, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
        output = self._attend_by_kernels(query, metadata, params)
        return super()._attend_rows(query, metadata, params) if output is None else output

    def _attend_by_kernels(self, query: Tensor, metadata: AttentionMetadata, params: AttentionParams) -> Tensor | None:
        """`[T, num_heads, head_dim]` with the tokens filled in that the kernels attend to; `None`: none."""
        if torch.is_autocast_enabled("cpu"):
            return None
        width = query.shape[2] if params.maps is None else params.maps.latent_dim
        output = query.new_empty(*query.shape[:2], width)
        try:
            rows = self._taken(metadata, query.shape[1])
            own = params.scale, params.sliding_window, params.softcap, params.sinks, params.bias
            with plainly():
                for each in rows:
                    self._calls.attend(query, output, params.layer, each, *own)
        except InputError:
            return None
        return output

    def _taken(self, metadata: AttentionMetadata, num_heads: int) -> list[cpu.Rows]:
        """For layers of so many query heads: sequences that share blocks, if there are any, and all others."""
        key = metadata, num_heads
        if (made := self._rows.get(key)) is not None:
            return made
        num_decodes, heads_per_kv = metadata.num_decodes, num_heads // self._kv_cache.shape[3]
        numbers = metadata.num_queries, int(metadata.host_seq_lens.max())
        given = metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, *numbers
        least, most = self._kernels.together(heads_per_kv)
        shared = metadata.shared_prefixes if most > 1 and num_decodes >= least else None
        items = None if shared is None else shared.items(least, most)
        rows, first = [], 0
        if shared is not None and items is not None:
            order = torch.from_numpy(shared.order.astype(np.int32))
            rows, first = [self._calls.rows(*given, cpu.Together(order, torch.from_numpy(items), most))], num_decodes
        end = len(metadata.host_seq_lens) if self._takes_prompts else num_decodes
        if first < end:
            tiles = metadata.query_tiles(self._kernels.tokens_at_once(heads_per_kv), first, end)
            rows.append(self._calls.rows(*given, tiles))
        self._rows[key] = rows
        return rows
