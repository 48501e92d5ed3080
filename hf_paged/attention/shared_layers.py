"""Attention modules that several layers share: the cache knows which layer such a module computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.cache import StepCache
from hf_paged.attention.params import AttentionParams


class LayerNotingCache(StepCache):
    """A `StepCache` that remembers the layer whose keys it was given last.

    Attributes:
        layer: Its number.
    """

    layer = -1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        return key_states, value_states


class SharedLayersStep:
    """A step whose layers are those that its cache was told of, whatever their modules' numbers are."""

    def __init__(self, step: PagedStep, cache: LayerNotingCache) -> None:
        self._step = step
        self._cache = cache

    @property
    def layer(self) -> int:
        return self._cache.layer

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        self._step.write(key, value, layer)

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        return self._step.attend(query, params)
