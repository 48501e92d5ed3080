"""`LayerStacks`: which decoder layers follow one another, so that few rows go through all of them in one call."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hf_paged.kernels.cpu_stack import MOST, CPUDecoderStack
from hf_paged.kernels.layers import InputError

if TYPE_CHECKING:
    from hf_paged.attention.context import ForwardContext
    from hf_paged.model.decoder_layers import CPULayer


class Ahead(NamedTuple):
    """What was computed for a layer, and what it has to be called with for that.

    Attributes:
        mask: The sentinel of its forward; as `states` and `angles`, the very object.
        version: How often the states had been written to.
    """

    mask: Tensor
    states: Tensor
    version: int
    angles: tuple[Tensor, Tensor]
    result: Tensor

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a layer that is called with these arguments gives this result."""
        angles = kwargs.get("position_embeddings")
        return (
            len(args) == 1
            and args[0] is self.states
            and self.version == self.states._version
            and kwargs.get("attention_mask") is self.mask
            and isinstance(angles, tuple)
            and len(angles) == len(self.angles)
            and all(map(operator.is_, self.angles, angles))
        )


class LayerStacks:
    """Computes layers ahead: those behind the first one of a stack, with it.

    What lies between two layers is the model's own code. So a forward is watched first; and each layer takes what was
    computed for it only where it is called with the very input that this was computed of.

    Attributes:
        ahead: What layers are to take, each in the forward that it was computed in.
    """

    def __init__(self) -> None:
        self.ahead: dict[CPULayer, Ahead] = {}
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
        self.ahead.clear()
        self._stacks, self._noted, self._last = None, [], None

    def take(
        self, layer: CPULayer, context: ForwardContext, states: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """The layer's result, with those behind it computed ahead; `None`: it is to be computed by itself, and told to
        `note` where all tokens are wanted.
        """
        step: Any = context.step
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
        if context.wanted is not None:  # of some tokens: the last layer is computed by itself
            numbers, last = [one.params and one.params.layer for one in layers], context.wanted.layer
            layers = layers[: numbers.index(last)] if last in numbers else layers
            if not layers:
                return None
        if self.ahead or [one for one in layers[1:] if not one.is_taken]:  # another way, or another activation
            self.forget()
            return None
        try:
            attention = step.calls([one.params for one in layers], *kernels.heads(states.shape[1]))
            results = kernels.compute(states, *angles, attention)
        except InputError:  # of this step's rows
            return None
        for one, before, own in zip(layers[1:], results, results[1:], strict=False):
            self.ahead[one] = Ahead(context.sentinel, before, before._version, angles, own)
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
        """Behind one forward or several: drops what no layer took."""
        self._last = None
        if self.ahead:
            self.forget()
