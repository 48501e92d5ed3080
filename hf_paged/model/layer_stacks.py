"""`LayerStacks`: which decoder layers follow one another, so that few rows go through all of them in one call."""

from __future__ import annotations

import operator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hf_paged.kernels.cpu_stack import MOST, CPUDecoderStack
from hf_paged.kernels.layers import InputError

if TYPE_CHECKING:
    from hf_paged.model.decoder_layers import CPULayer


class Ahead(NamedTuple):
    """What was computed for a layer, and what it has to be called with for that.

    Attributes:
        step: As `states` and `angles`, the very object.
        version: How often the states had been written to.
    """

    step: Any
    states: Tensor
    version: int
    angles: tuple[Tensor, Tensor]
    result: Tensor


class LayerStacks:
    """Computes layers ahead: those behind the first one of a stack, with it.

    What lies between two layers is the model's own code. So a forward is watched first; and each layer takes what was
    computed for it only where it is called with the very input that this was computed of.
    """

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[list[CPULayer], CPUDecoderStack]] | None = None  # by the first layer's id
        self._num_moves = 0  # of weights, when that was found
        self._noted: list[list[CPULayer]] = []
        self._last: tuple[Any, tuple[Tensor, Tensor], Tensor] | None = None  # step, angles and result of what was noted

    @property
    def buffers(self) -> list[Tensor]:
        """What is held for queries, keys and values of few rows."""
        return [buffer for _, kernels in (self._stacks or {}).values() for buffer in kernels.buffers]

    def forget(self) -> None:
        """Lets the next forward be watched."""
        self._drop()
        self._stacks, self._noted, self._last = None, [], None

    def take(self, layer: CPULayer, step: Any, states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor | None:
        """The layer's result; `None`: it is to be computed by itself, and told to `note`."""
        ahead, layer.ahead = layer.ahead, None
        if (
            ahead is not None
            and ahead.step is step
            and ahead.states is states
            and ahead.version == states._version
            and all(map(operator.is_, ahead.angles, angles))
        ):
            return ahead.result
        if ahead is not None:
            self.forget()
        if states.shape[1] > MOST or not hasattr(step, "calls"):
            return None
        if layer.weights.num_moves != self._num_moves:
            self.forget()
            self._num_moves = layer.weights.num_moves
        if self._stacks is None and self._noted and any(layer in run for run in self._noted):
            self._build()
            return None  # what is built holds from the next look at the weights on
        found = (self._stacks or {}).get(id(layer))
        if found is None:
            return None
        layers, kernels = found
        if any(one.ahead is not None for one in layers):  # left by a forward that went another way
            self.forget()
            return None
        params = [one.params for one in layers]
        try:
            results = kernels.compute(states, *angles, partial(step.calls, params))
        except InputError:  # of this step's rows
            return None
        for one, before, own in zip(layers[1:], results, results[1:], strict=False):
            one.ahead = Ahead(step, before, before._version, angles, own)
        return results[0]

    def note(self, layer: CPULayer, step: Any, states: Tensor, angles: tuple[Tensor, Tensor], result: Tensor) -> None:
        """Takes down a call that `take` had nothing for."""
        if self._stacks is not None or states.shape[1] > MOST or not hasattr(step, "calls"):
            return
        follows = False
        if self._last is not None and layer.params is not None:
            last_step, last_angles, last_result = self._last
            before = self._noted[-1][-1].params
            follows = last_step is step and last_result is states and all(map(operator.is_, last_angles, angles))
            follows = follows and before is not None and step.takes_together(before, layer.params)
        if follows:
            self._noted[-1].append(layer)
        else:
            self._noted.append([layer])
        self._last = step, angles, result

    def _build(self) -> None:
        self._stacks = {}
        for layers in self._noted:
            if len(layers) > 1:
                with suppress(InputError):  # they differ in shape
                    self._stacks[id(layers[0])] = layers, layers[0].stack(layers)
        self._noted, self._last = [], None

    def end(self) -> None:
        """Behind a forward: drops what no layer took."""
        self._last = None
        if self._drop():
            self.forget()

    def _drop(self) -> bool:
        found = False
        for layers, _ in (self._stacks or {}).values():
            for layer in layers:
                found |= layer.ahead is not None
                layer.ahead = None
        return found
