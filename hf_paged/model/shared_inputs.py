"""`SharedInputs`: linear layers that a model calls one after another with one input, multiplied in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_paged.model.linear_ways import Multiply, Panels


class Layer(Protocol):
    """What is needed of a layer: its module, for the bias, and what multiplies by its weight."""

    module: Any
    multiply: Multiply


class SharedInputs:
    """Finds such layers (keys' and values' behind queries', a gate's and what it gates) by watching a forward.

    Joined are layers that were called with the very same tensor, unchanged in between. Each weight stays where it is,
    and each result is, bit for bit, what its layer computes alone.
    """

    def __init__(self, layers: Iterable[Layer]) -> None:
        """Watches each layer in the first forward that calls it.

        Args:
            layers: Those that multiply by `Panels` are watched.
        """
        self._watched = {layer: layer.multiply for layer in layers if isinstance(layer.multiply, Panels)}
        self._runs: list[_Run] = []
        self._products: list[_Product] = []
        for layer, panels in self._watched.items():
            layer.multiply = partial(self._watch, layer, panels)

    def end(self) -> None:
        """To be called behind each forward."""
        if self._runs:
            self._join({tuple(run.layers) for run in self._runs})
            self._runs = []
        for product in self._products:
            product.end()

    def stop(self) -> None:
        """Lets all layers go: the last holder of copies of weights frees them."""
        self._watched, self._runs, self._products = {}, [], []

    def _watch(self, layer: Layer, panels: Panels, states: Tensor, bias: Tensor | None) -> Tensor:
        if self._runs and self._runs[-1].is_of(states) and layer not in self._runs[-1].layers:
            self._runs[-1].layers.append(layer)
        else:
            if self._runs:
                self._runs[-1].forget()
            self._runs.append(_Run(layer, states))
        return panels(states, bias)

    def _join(self, found: set[tuple[Layer, ...]]) -> None:
        num_places = Counter(layer for layers in found for layer in layers)
        # Without those that were let go meanwhile, by another thread.
        own = {layer: panels for layer in num_places if (panels := self._watched.pop(layer, None)) is not None}
        for layer, panels in own.items():
            layer.multiply = panels
        for layers in found:
            # A layer that is called in several places has the same neighbours in all of them, or none.
            if len(layers) > 1 and all(num_places[layer] == 1 and layer in own for layer in layers):
                product = _Product([(layer.module, own[layer]) for layer in layers])
                for index, layer in enumerate(layers):
                    layer.multiply = partial(product.multiply, index)
                self._products.append(product)


class _Run:
    """Layers that were called one after another.

    Attributes:
        layers: In the order of their calls.
    """

    def __init__(self, layer: Layer, states: Tensor) -> None:
        self.layers = [layer]
        self._states: Tensor | None = states
        self._copy: Tensor | None = states.clone()

    def is_of(self, states: Tensor) -> bool:
        return states is self._states and self._copy is not None and torch.equal(states, self._copy)

    def forget(self) -> None:
        self._states = self._copy = None


class _Product:
    """One input times several weights: the first layer's call computes all, the others take theirs."""

    def __init__(self, members: Sequence[tuple[Any, Panels]]) -> None:
        """`members`: modules and what multiplies by their weights, in the order of their calls."""
        self._members = members
        self._multiply_all = members[0][1].kernel.multiply_all
        self._is_useful = True
        self._states: Tensor | None = None
        self._version = 0
        self._results: dict[int, Tensor] = {}

    def multiply(self, index: int, states: Tensor, bias: Tensor | None) -> Tensor:
        """In the place of a member's own product."""
        if index == 0 and self._is_useful:
            weights = [(panels.weight, module.bias) for module, panels in self._members]
            result, *others = self._multiply_all(states, weights)
            self._states, self._version, self._results = states, _version(states), dict(enumerate(others, 1))
            return result
        if index in self._results and states is self._states and _version(states) == self._version:
            return self._results.pop(index)
        return self._members[index][1](states, bias)

    def end(self) -> None:
        """Where results were computed that no layer took, each layer computes its own from now on."""
        if self._results:
            self._is_useful = False
            self._results = {}
        self._states = None


def _version(states: Tensor) -> int:
    """How often it was written to; under inference mode no tensor knows."""
    return 0 if states.is_inference() else states._version
