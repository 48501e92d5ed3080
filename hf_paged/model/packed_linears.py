"""`PackedLinears`: linear layers of the engine's forwards on CPU, through oneDNN where that is measured faster."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_paged.model.module_overrides import ModuleOverride, is_untouched, not_overriding, overriding
from hf_paged.model.sharding import ranks_of
from hf_paged.model.trial import TRIALS, Pair

logger = logging.getLogger(__name__)

MIN_ELEMENTS = 2**17  # of a weight; below, a call costs more than the product
PROBED_ROWS = (1, 32)  # tokens in a step: of one user, and of many
MANY_ROWS = 4  # from here on a step is one of many: oneDNN is at its best, where it is good at all
_INTEGERS = {4: torch.int32, 2: torch.int16}
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class _Layer(ModuleOverride):
    """A linear layer with another way to compute it.

    Attributes:
        module: The layer, `nn.Linear` or `Conv1D`, whose weight is `[in, out]`.
        weight: `[out, in]`, packed by oneDNN or as it is.
        width: `in`.
        gains: Whether it is faster than the module's own way, for few rows and for many.
        dtype: Of the weight, and of inputs that it multiplies.
        source: Of the module's own weight, what tells another tensor from it, where `weight` is a copy.
        sample_index: Elements of it to look at, and
        sample: what they were.
    """

    __slots__ = ("dtype", "gains", "sample", "sample_index", "source", "weight", "width")

    def __init__(self, module: Any, weight: Tensor) -> None:
        super().__init__(module)
        self.weight = weight
        self.dtype: torch.dtype = module.weight.dtype
        self.width: int = _out_in(module).shape[1]
        self.gains = (False, False)
        self.source: tuple[object, ...] | None = None
        self.sample_index: Tensor | None = None
        self.sample: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What its speed depends on."""
        return type(self.module), *self.module.weight.shape, self.dtype, self.module.bias is None

    def compute(self, states: Tensor) -> Tensor:
        if states.dtype is self.dtype and self.gains[states.numel() >= MANY_ROWS * self.width]:
            return _multiply(states, self.weight, self.module.bias)
        return _own(self, states)


class PackedLinears:
    """Linear layers with weights in the layout that oneDNN multiplies fastest, as long as the weights stay as they are.

    In float32 torch multiplies by another library, which is slow on AMD; in half precision it packs the weight anew
    in every call. What is used here instead is what torch's own compiler emits: a private op, so only where it is there
    and agrees with the layer. Where there is no room for a second copy of a weight, it is multiplied as it is.

    Only the thread inside `scope` sees any of it: training, scoring and other threads go through the layers as
    they are.
    """

    def __init__(self, model: nn.Module, memory_fraction: float) -> None:
        """Does nothing before the first `scope`.

        Args:
            model: Held weakly. Its layers of exactly the types `nn.Linear` and `Conv1D` are taken.
            memory_fraction: Share of the free memory that copies of weights may take.
        """
        self._model = weakref.ref(model)
        self._memory_fraction = memory_fraction
        self._layers: list[_Layer] | None = None

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within it, forwards on this thread take the faster way. Autocast and autograd take the layers' own."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            with not_overriding(self._layers or ()):
                yield
            return
        if self._layers is None:
            self._layers = self._make()
        with overriding(self._layers):
            yield

    def is_outdated(self) -> bool:
        """Whether a weight was written behind its copy's back (through `.data`), as far as samples tell.

        They hold an element of every row and of every column.
        """
        return any(
            layer.sample is not None
            and not (
                _source(layer.module.weight) == layer.source
                and torch.equal(_take(layer.module.weight, layer.sample_index), layer.sample)
            )
            for layer in self._layers or ()
        )

    def forget(self) -> None:
        """Drops the copies; the next `scope` makes new ones."""
        self._layers = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make(self) -> list[_Layer]:
        model = self._model()
        if model is None or not torch.backends.mkldnn.is_available():
            return []
        if ranks_of(model) is not None:  # of all ranks one or the other, but each measures for itself
            return []
        modules: list[Any] = [module for module in model.modules() if _can_take(module)]
        size = sum(module.weight.numel() * module.weight.element_size() for module in modules)
        hold = _pack if size <= self._memory_fraction * psutil.virtual_memory().available else _as_it_is
        try:
            layers = [_Layer(module, hold(_out_in(module))) for module in modules]
            gains = _compare(layers, hold)
        except (RuntimeError, AttributeError, NotImplementedError) as error:  # not in this build, not on this machine
            logger.info("hf_paged: linear layers can't run through oneDNN: %s", error)
            return []
        for layer, own_gains in zip(layers, gains, strict=True):
            layer.gains = own_gains
        layers = [layer for layer in layers if any(layer.gains)]
        for layer in layers:
            if hold is _pack:
                layer.source = _source(layer.module.weight)
                layer.sample_index = _sample_index(*layer.module.weight.shape)
                layer.sample = _take(layer.module.weight, layer.sample_index)
        logger.info("hf_paged: %d of %d linear layers run through oneDNN", len(layers), len(modules))
        return layers


def _can_take(module: Any) -> bool:
    if type(module) not in (nn.Linear, Conv1D):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter  # not a quantised one
        and weight.device.type == "cpu"
        and weight.dtype in _TOLERANCE
        and weight.is_contiguous()
        and weight.numel() >= MIN_ELEMENTS
        and is_untouched(module)
    )


def _out_in(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach()
    return weight if isinstance(module, nn.Linear) else weight.t()


def _multiply(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(states, weight, bias, "none", [], "")


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), PROBED_ROWS[-1])


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


def _compare(layers: list[_Layer], hold: Callable[[Tensor], Tensor]) -> list[tuple[bool, bool]]:
    """For each layer, whether it gains by oneDNN with few rows and with many."""
    generator = torch.Generator("cpu").manual_seed(0)
    threads = torch.get_num_threads()

    def gains(rows: int) -> list[bool]:
        inputs = {
            (width, dtype): torch.randn(1, rows, width, generator=generator, device="cpu").to(dtype)
            for width, dtype in dict.fromkeys((layer.width, layer.dtype) for layer in layers)
        }
        pairs = []
        for layer in layers:
            states = inputs[layer.width, layer.dtype]
            kind = (layer.kind, rows, hold, threads)
            pairs.append(Pair(kind, partial(_own, layer, states), partial(_other, layer, states)))
        return TRIALS.faster(pairs, _TOLERANCE)

    few, many = (gains(rows) for rows in PROBED_ROWS)
    return list(zip(few, many, strict=True))


def _own(layer: _Layer, states: Tensor) -> Tensor:
    """Without the module's hooks."""
    return type(layer.module).forward(layer.module, states)  # type: ignore[arg-type]


def _other(layer: _Layer, states: Tensor) -> Tensor:
    return _multiply(states, layer.weight, layer.module.bias)


def _source(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device


def _sample_index(rows: int, columns: int) -> Tensor:
    diagonal = torch.arange(max(rows, columns), device="cpu")
    return diagonal % rows * columns + diagonal % columns


def _take(weight: Tensor, index: Tensor | None) -> Tensor:
    """Some of a weight's elements, as bits."""
    assert index is not None
    return weight.detach().view(-1).view(_INTEGERS[weight.element_size()])[index]
