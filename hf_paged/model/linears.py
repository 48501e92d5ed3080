"""`Linears`: linear layers of the engine's forwards on CPU, multiplied by our kernel where their weights lie."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_paged.kernels import cpu_linear
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.kernels.layers import InputError
from hf_paged.model.module_overrides import ModuleOverride, is_untouched, not_overriding, overriding
from hf_paged.model.sharding import ranks_of

logger = logging.getLogger(__name__)


class Linear(ModuleOverride):
    """A linear layer, `nn.Linear` or `Conv1D`. Its weight is read anew in each call, and nothing of it is kept.

    Attributes:
        kernel: What multiplies.
        runs: Notes its calls in the first forward.
        others: Layers that are called behind it with the same input: one pass multiplies by all their weights.
        found: What such a pass has computed for this layer: its input, the input's version, its result.
    """

    __slots__ = ("found", "kernel", "others", "runs")

    def __init__(self, module: Any, kernel: CPULinear, runs: _Runs) -> None:
        super().__init__(module)
        self.kernel = kernel
        self.runs = runs
        self.others: list[Linear] = []
        self.found: tuple[Tensor, int, Tensor] | None = None

    @property
    def weight(self) -> Tensor:
        """`[out, in]`, where it lies now: a view, which holds its memory.

        Raises:
            InputError: Something else has taken the parameter's place.
        """
        weight = self.module._parameters.get("weight")
        if type(weight) is not nn.Parameter or "bias" not in self.module._parameters:
            raise InputError("linear", "a weight and a bias that are parameters")
        return weight.detach() if type(self.module) is nn.Linear else weight.t()

    @property
    def bias(self) -> Tensor | None:
        bias = self.module._parameters["bias"]
        return None if bias is None else bias.detach()

    def compute(self, states: Tensor) -> Tensor:
        found, self.found = self.found, None
        if found is not None and found[0] is states and found[1] == _version(states):
            return found[2]
        self.runs.note(self, states)
        result, *others = self.kernel.multiply_all(
            states, [(layer.weight, layer.bias) for layer in (self, *self.others)]
        )
        for layer, other in zip(self.others, others, strict=True):
            layer.found = states, _version(states), other
        return result


class _Runs:
    """Which layers a forward calls one after another with the very same input, unchanged in between."""

    def __init__(self) -> None:
        self._runs: list[list[Linear]] | None = []
        self._noted: set[Linear] = set()
        self._states: Tensor | None = None
        self._copy: Tensor | None = None

    def note(self, layer: Linear, states: Tensor) -> None:
        """Notes a call, in the first forward: until one layer is called again."""
        if self._runs is None:
            return
        if layer in self._noted:
            self.end()
            return
        self._noted.add(layer)
        if states is self._states and self._copy is not None and torch.equal(states, self._copy):
            self._runs[-1].append(layer)
        else:
            self._runs.append([layer])
            self._states, self._copy = states, states.clone()

    def end(self) -> None:
        """Lets the first layer of each run compute the results of all."""
        for first, *others in self._runs or ():
            first.others = others
        self._noted.clear()
        self._runs = self._states = self._copy = None


class Linears:
    """Linear layers with plain weights on CPU, in a type that our kernel takes. Nothing is copied, nothing is tried.

    Only the thread inside `scope` sees any of it: training, scoring and other threads go through the layers as
    they are.
    """

    def __init__(self, model: nn.Module) -> None:
        """Does nothing before the first `scope`. The model is held weakly."""
        self._model = weakref.ref(model)
        self._layers: list[Linear] | None = None
        self._runs = _Runs()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within it, forwards on this thread take the kernel. Autocast and autograd take the layers' own way."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            with not_overriding(self._layers or ()):
                yield
            return
        layers = self._layers  # which another thread may drop meanwhile
        if layers is None:
            model = self._model()
            self._runs = _Runs()
            layers = self._layers = [] if model is None else _find(model, self._runs)
        runs = self._runs
        try:
            with overriding(layers):
                yield
        finally:
            runs.end()
            for layer in layers:
                if any(other.found is not None for other in layer.others):  # for nothing: the code goes another way
                    layer.others = []
                layer.found = None

    @property
    def layers(self) -> list[Linear] | None:
        """Those that are taken: the same list as long as nothing has changed; `None`: not yet known."""
        return self._layers

    def forget(self) -> None:
        """Lets the next `scope` find the layers anew. In one that is open, they compute as they are from now on."""
        layers, self._layers = self._layers or (), None
        for layer in layers:
            layer.thread_id = None


def _find(model: nn.Module, runs: _Runs) -> list[Linear]:
    if ranks_of(model) is not None:
        return []
    layers: list[Linear] = []
    reasons: set[str] = set()
    for module in model.modules():
        if not is_plain_linear(module) or not is_untouched(module):
            continue
        kernel = cpu_linear.load(module.weight.dtype)
        if isinstance(kernel, str):
            reasons.add(kernel)
        elif kernel.takes((layer := Linear(module, kernel, runs)).weight):
            layers.append(layer)
    for reason in reasons:
        logger.info("hf_paged: linear layers stay torch's: the kernel %s", reason)
    logger.info("hf_paged: %d linear layers are multiplied by the kernel", len(layers))
    return layers


def is_plain_linear(module: Any) -> bool:
    """Whether it is a linear layer with an ordinary weight on CPU: not a quantised one, not a share of one."""
    if type(module) not in (nn.Linear, Conv1D) or not {"weight", "bias"} <= module._parameters.keys():
        return False
    return (
        type(module.weight) is nn.Parameter and module.weight.is_cpu and type(module.bias) in (nn.Parameter, NoneType)
    )


def _version(states: Tensor) -> int:
    """How often it was written to; under inference mode no tensor knows."""
    return 0 if states.is_inference() else states._version
