"""A step over several groups of layers, each with block tables of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.params import AttentionParams
from hf_paged.core.cache_groups import NOWHERE, CacheGroups
from hf_paged.kernels.layers import Place


class WindowError(ValueError):
    """A layer asked for tokens that its group has given back."""

    def __init__(self, layer: int, asked: int | None, kept: int) -> None:
        super().__init__(
            f"layer {layer} attends to {'all' if asked is None else f'the last {asked}'} tokens, its cache keeps the "
            f"last {kept}: patch the model again if its windows have changed"
        )
        self.layer = layer


class GroupedStep:
    """Hands each layer's keys, values and queries to the step of its group.

    A layer that stores nothing attends to another one's keys: to those of the layer that it gives again.
    """

    def __init__(self, steps: Sequence[PagedStep], groups: CacheGroups) -> None:
        self._steps = steps
        # A sequence that is cut into chunks comes as several, of which a layer sees all.
        kept = zip(groups.windows, groups.chunks, strict=True)
        self._windows = [window if chunk is None else None for window, chunk in kept]
        self._places = groups.places
        self._shares = NOWHERE in groups.places
        self._given: dict[int, tuple[int, int]] = {}  # where keys at this address are
        self._borrowed: dict[int, tuple[int, int]] = {}

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        place = group, index = self._checked(layer)
        if self._shares:
            if place == NOWHERE:
                if key.data_ptr() not in self._given:
                    raise ValueError(f"layer {layer} stores nothing, and its keys are no other layer's")
                self._borrowed[layer] = self._given[key.data_ptr()]
                return
            self._given[key.data_ptr()] = place
        self._steps[group].write(key, value, index)

    def place_of(self, layer: int) -> Place | None:
        """As `TritonStep.place_of`."""
        group, index = self._checked(layer)
        find = None if self._shares else getattr(self._steps[group], "place_of", None)
        return None if find is None else find(index)

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        place = self._checked(params.layer)
        group, index = self._borrowed[params.layer] if place == NOWHERE else place
        asked, kept = params.sliding_window, self._windows[group]
        if kept is not None and (asked is None or asked > kept):
            raise WindowError(params.layer, asked, kept)
        own = AttentionParams(index, params.scale, asked, params.softcap, params.sinks, params.maps, params.bias)
        return self._steps[group].attend(query, own)

    def _checked(self, layer: int) -> tuple[int, int]:
        if not 0 <= layer < len(self._places):
            raise ValueError(f"the pool has {len(self._places)} layers, and none of number {layer}")
        return self._places[layer]
