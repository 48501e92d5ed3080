"""Linear layers of the engine's forwards on CPU, multiplied by our kernel where their weights lie."""

from __future__ import annotations

import logging
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_paged.kernels import cpu_linear
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.kernels.layers import InputError, plainly
from hf_paged.model.module_overrides import ModuleOverride, Survey, is_untouched

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

    def __init__(self, module: Any, kernel: CPULinear, runs: Runs) -> None:
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
        with plainly():
            weights = [(layer.weight, layer.bias) for layer in (self, *self.others)]
            result, *others = self.kernel.multiply_all(states, weights)
        for layer, other in zip(self.others, others, strict=True):
            layer.found = states, _version(states), other
        return result


class Runs:
    """Which layers a forward calls one after another with the very same input, unchanged in between."""

    def __init__(self) -> None:
        self._runs: list[list[Linear]] | None = []  # `None`: they are known
        self._noted: set[Linear] = set()
        self._states: Tensor | None = None
        self._copy: Tensor | None = None
        self._first: list[Linear] = []  # of runs

    def note(self, layer: Linear, states: Tensor) -> None:
        """Notes a call, in the first forward: until one layer is called again."""
        if self._runs is None:
            return
        if layer in self._noted:
            self._join()
        elif states is self._states and self._copy is not None and torch.equal(states, self._copy):
            self._runs[-1].append(layer)
        else:
            self._runs.append([layer])
            self._states, self._copy = states, states.clone()
        self._noted.add(layer)

    def _join(self) -> None:
        """Lets the first layer of each run compute the results of all."""
        for first, *others in self._runs or ():
            first.others = others
            self._first.append(first)
        self._runs = self._states = self._copy = None

    def end(self) -> None:
        """Behind a forward: where results were computed that no layer took, each computes its own from now on."""
        if self._runs:
            self._join()
        for first in self._first:
            if any(other.found is not None for other in first.others):
                for other in first.others:
                    other.found = None
                first.others = []


def find_linear(module: Any, survey: Survey) -> Linear | None:
    """For a linear layer with an ordinary weight on CPU (not a quantised one) in a type that our kernel takes."""
    if type(module) not in (nn.Linear, Conv1D) or not is_untouched(module):
        return None
    weight, bias = map(module._parameters.get, ("weight", "bias"))
    if type(weight) is not nn.Parameter or not weight.is_cpu or type(bias) not in (nn.Parameter, NoneType):
        return None
    kernel = cpu_linear.load(weight.dtype)
    if isinstance(kernel, str):
        if survey.known.setdefault(kernel, module) is module:
            logger.info("hf_paged: linear layers are left to torch: the kernel %s", kernel)
        return None
    layer = Linear(module, kernel, survey.shared(Runs))
    return layer if kernel.takes(layer.weight) else None


def _version(states: Tensor) -> int:
    """How often it was written to; under inference mode no tensor knows."""
    return 0 if states.is_inference() else states._version
