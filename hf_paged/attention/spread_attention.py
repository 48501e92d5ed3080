"""Attention of a model whose layers run on several devices: each over its own device's share of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.memory.spread_cache import SpreadKVCache


class SpreadAttention(PoolAttention):
    """Holds a `PoolAttention` for each device."""

    def __init__(self, kv_cache: SpreadKVCache, name: str) -> None:
        self.kv_cache = self._spread = kv_cache
        self._parts = [PoolAttention(part, name) for part in kv_cache.parts]
        self.backends = [backend for part in self._parts for backend in part.backends]

    def step(self, metadata: Sequence[AttentionMetadata]) -> PagedStep:
        return SpreadStep(self._parts, self._spread.part_of, metadata)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for part in self._parts:
            with current(part.kv_cache.device):
                part.copy_blocks(copies)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        for part in self._parts:
            part.zero_blocks(blocks)

    def warm_up(self) -> None:
        for part in self._parts:
            with current(part.kv_cache.device):
                part.warm_up()


class SpreadStep:
    """Hands each layer's keys, values and queries to the step of its device, made at the first of its layers."""

    def __init__(
        self, parts: Sequence[PoolAttention], part_of: Sequence[int], metadata: Sequence[AttentionMetadata]
    ) -> None:
        """Serves one forward; `part_of` says of each layer which of `parts` it is in, `metadata` is of each group of
        layers.
        """
        self._parts, self._part_of, self._metadata = parts, part_of, metadata
        self._steps: dict[int, PagedStep] = {}

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        with current(key.device):
            self._step(layer).write(key, value, layer)

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        with current(query.device):
            return self._step(params.layer).attend(query, params)

    def _step(self, layer: int) -> PagedStep:
        if not 0 <= layer < len(self._part_of):
            raise ValueError(f"the pool has {len(self._part_of)} layers, and none of number {layer}")
        number = self._part_of[layer]
        if number not in self._steps:
            part = self._parts[number]
            self._steps[number] = part.step([own.on(part.kv_cache.device) for own in self._metadata])
        return self._steps[number]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within it, kernels are launched on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
