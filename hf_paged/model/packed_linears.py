"""`PackedLinears`: linear layers of the engine's forwards on CPU, multiplied by whatever is measured fastest."""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_paged.kernels import cpu_linear
from hf_paged.model import linear_ways, packed_parameter
from hf_paged.model.linear_ways import Multiply, Panels, Way
from hf_paged.model.module_overrides import ModuleOverride, is_untouched, not_overriding, overriding
from hf_paged.model.packed_parameter import PackedParameter, Replacements
from hf_paged.model.sharding import ranks_of
from hf_paged.model.shared_inputs import SharedInputs
from hf_paged.model.trial import NUM_PROBED, TRIALS, Pair

logger = logging.getLogger(__name__)

MIN_ELEMENTS = 2**15  # of a weight; below, a call costs more than the product
PROBED_ROWS = (1, 32)  # tokens in a step: of one user, and of many
ALWAYS = (math.inf, math.inf)  # gains of a layer whose weight is nowhere else
MANY_ROWS = 4  # from here on a step is one of many
_INTEGERS = {4: torch.int32, 2: torch.int16}
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class Layer(ModuleOverride):
    """A linear layer with another way to compute it.

    Attributes:
        module: The layer, `nn.Linear` or `Conv1D`, whose weight is `[in, out]`.
        multiply: By its weight.
        panels: By itself, where it is by our kernel; else `None`.
        width: `in`.
        gains: How many times faster it is than the module's own way, for few rows and for many.
        dtype: Of the weight, and of inputs that it multiplies.
        source: Of the module's own weight, what tells another tensor from it, where a copy is multiplied.
        sample_index: Elements of it to look at, and
        sample: what they were.
    """

    __slots__ = ("dtype", "gains", "multiply", "panels", "sample", "sample_index", "source", "width")

    def __init__(self, module: Any, multiply: Multiply, gains: tuple[float, ...] = (1.0, 1.0)) -> None:
        super().__init__(module)
        self.multiply = multiply
        self.panels = multiply if isinstance(multiply, Panels) else None
        self.dtype: torch.dtype = module.weight.dtype
        self.width: int = out_in(module).shape[1]
        self.gains = gains
        self.source: tuple[object, ...] | None = None
        self.sample_index: Tensor | None = None
        self.sample: Tensor | None = None

    def compute(self, states: Tensor) -> Tensor:
        if states.dtype is self.dtype and self.gains[states.numel() >= MANY_ROWS * self.width] > 1:
            return self.multiply(states, self.module.bias)
        return _own(self.module, states)


class PackedLinears:
    """Linear layers with weights in the layout that is multiplied fastest, as long as the weights stay as they are.

    What is tried for a kind of layer: `linear_ways`. A way is used only where it is there, agrees with the layer and
    is faster; layers of one input are then multiplied in one pass (`shared_inputs`). Where there is no room for a
    second copy of a weight, it is multiplied as it is.

    Only the thread inside `scope` sees any of it: training, scoring and other threads go through the layers as
    they are.

    Attributes:
        on_forget: Called when copies are dropped.
    """

    def __init__(self, model: nn.Module, memory_fraction: float, replaces: bool = False) -> None:
        """Does nothing before the first `scope`.

        Args:
            model: Held weakly. Its layers of exactly the types `nn.Linear` and `Conv1D` are taken.
            memory_fraction: Share of the free memory that copies of weights may take.
            replaces: Whether a copy takes the weight's place in memory, in our kernel's layout, until something else
                than the engine asks for the weight (`packed_parameter`): then, and where another module has the same
                weight, there are both.
        """
        self._model = weakref.ref(model)
        self._memory_fraction = memory_fraction
        self._layers: list[Layer] | None = None
        self._small: list[Layer] = []
        self.on_forget: Callable[[], None] = lambda: None
        self._shared_inputs = SharedInputs(())
        self._replaces = replaces
        self.replacements = Replacements()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within it, forwards on this thread take the faster way. Autocast and autograd take the layers' own."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            with not_overriding(self._layers or ()):
                yield
            return
        layers = self._layers  # which another thread may drop meanwhile
        if layers is None:
            layers = self._layers = self._make()
            self._shared_inputs = SharedInputs(layers)
        shared_inputs = self._shared_inputs
        try:
            with overriding(layers):
                yield
        finally:
            shared_inputs.end()

    @property
    def layers(self) -> list[Layer] | None:
        """Those multiplied another way: the same list as long as nothing has changed; `None`: not yet known."""
        return self._layers

    @torch.inference_mode(False)
    @torch.no_grad()
    def small(self, module: Any) -> Layer | None:
        """A layer that is not worth a call, for kernels that multiply by it without one; `None`: can't be taken."""
        multiply = linear_ways.panels(out_in(module)) if can_take(module, 1) else None
        if multiply is None:
            return None
        layer = Layer(module, multiply, ALWAYS)
        self._watch(layer)
        self._small.append(layer)
        return layer

    def is_outdated(self) -> bool:
        """Whether a weight was written behind its copy's back (through `.data`), as far as samples tell.

        They hold an element of every row and of every column.
        """
        return any(
            layer.sample is not None
            and not isinstance(layer.module.weight, PackedParameter)
            and not (
                self._source(layer.module.weight) == layer.source
                and torch.equal(_take(layer.module.weight, layer.sample_index), layer.sample)
            )
            for layer in (*(self._layers or ()), *self._small)
        )

    def forget(self) -> None:
        """Drops the copies, and gives weights that they replaced their memory; the next `scope` makes new ones.

        In a `scope` that is open, layers compute as they are from now on.
        """
        layers, self._layers = self._layers or (), None
        for layer in layers:
            layer.thread_id = None
            packed_parameter.restore(layer.module.weight)
        self._small = []
        self._shared_inputs.stop()
        self.on_forget()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make(self) -> list[Layer]:
        model = self._model()
        if model is None:
            return []
        if ranks_of(model) is not None:  # of all ranks one or the other, but each measures for itself
            return []
        modules: list[Any] = [module for module in model.modules() if can_take(module)]
        layers = self._choose(model, modules)
        logger.info("hf_paged: %d of %d linear layers are multiplied another way", len(layers), len(modules))
        return layers

    def _choose(self, model: nn.Module, modules: list[Any]) -> list[Layer]:
        """Those of `modules` that another way is for."""
        size = sum(module.weight.numel() * module.weight.element_size() for module in modules)
        has_room = self._replaces or size <= self._memory_fraction * psutil.virtual_memory().available
        if self._replaces:
            best = _best_ways(modules, (linear_ways.panels,), min_gain=0.0)
        else:
            best = _best_ways(modules, linear_ways.WITH_COPY if has_room else linear_ways.WITHOUT_COPY)
        own = (p for module in model.modules() for p in module._parameters.values() if type(p) is nn.Parameter)
        num_owners = Counter(parameter.data_ptr() for parameter in own)
        layers = []
        for module in modules:
            way, gains = best.get(_kind(module), (None, ()))
            is_replaced = self._replaces and num_owners[module.weight.data_ptr()] == 1 and not _is_kept(module.weight)
            if not is_replaced and math.prod(gains) <= 1:
                continue
            try:
                multiply = way and way(out_in(module))
            except RuntimeError as error:  # no memory for a copy after all
                logger.info("hf_paged: the other linear layers stay as they are: %s", error)
                break
            if multiply is not None:
                layer = Layer(module, multiply, gains)
                layers.append(layer)
                if has_room:
                    self._watch(layer)
                if is_replaced and isinstance(multiply, Panels):
                    layer.gains = ALWAYS
                    self.replacements.replace(module.weight, partial(_unpacked, type(module), multiply))
        return layers

    def _watch(self, layer: Layer) -> None:
        """Notes what the layer's weight is, of which there is a copy."""
        weight = layer.module.weight
        layer.source, layer.sample_index = self._source(weight), _sample_index(*weight.shape)
        layer.sample = _take(weight, layer.sample_index)

    def _source(self, weight: Tensor) -> tuple[object, ...]:
        return *self.replacements.state(weight)[1:], weight.dtype, weight.device


def why_not_replaced(model: nn.Module) -> str | None:
    """Why packed copies can't take the place of this model's weights, if they can't."""
    if ranks_of(model) is not None:
        return "its weights are shared out between processes"
    dtypes = {module.weight.dtype for module in model.modules() if can_take(module)}
    if not dtypes:
        return "none of its linear layers has a large plain weight on CPU, in float32 or bfloat16"
    return next((f"the kernel {why}" for why in map(cpu_linear.load, dtypes) if isinstance(why, str)), None)


def _is_kept(weight: Tensor) -> bool:
    """Whether others than its modules hold it: a backward pass that is yet to come reads its elements."""
    return weight._use_count() > 1  # type: ignore[attr-defined]


def _unpacked(kind: type, multiply: Panels) -> Tensor:
    weight = multiply.kernel.unpack(multiply.weight)
    return weight if kind is nn.Linear else weight.t().contiguous()


def can_take(module: Any, min_elements: int | None = None) -> bool:
    """Whether it is a linear layer whose products are for other ways to try; of a weight of any size, if told."""
    if type(module) not in (nn.Linear, Conv1D):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter  # not a quantised one
        and weight.device.type == "cpu"
        and weight.dtype in _TOLERANCE
        and weight.is_contiguous()
        and weight.numel() >= (MIN_ELEMENTS if min_elements is None else min_elements)
        and is_untouched(module)
    )


def out_in(module: Any) -> Tensor:
    """Its weight, `[out, in]`."""
    weight: Tensor = module.weight.detach()
    return weight if isinstance(module, nn.Linear) else weight.t()


def _kind(module: Any) -> tuple[object, ...]:
    """What its speed depends on."""
    return type(module), *module.weight.shape, module.weight.dtype, module.bias is None


def _best_ways(
    modules: list[Any], ways: tuple[Way, ...], min_gain: float = 1.0
) -> dict[tuple[object, ...], tuple[Way, tuple[float, ...]]]:
    """For each kind of layer that gains, the way that it gains most by and how much, with few rows and with many."""
    num_of_kind: Counter[tuple[object, ...]] = Counter()
    probed = []
    for module in modules:
        num_of_kind[_kind(module)] += 1
        if num_of_kind[_kind(module)] <= NUM_PROBED:
            probed.append(module)
    best: dict[tuple[object, ...], tuple[Way, tuple[float, ...]]] = {}
    for way in ways:
        try:
            found = _gains(probed, way)
        except (RuntimeError, AttributeError, NotImplementedError) as error:  # not in this build, not on this machine
            logger.info("hf_paged: linear layers can't run another way (%s): %s", way.__name__, error)
            continue
        for kind, gains in found.items():
            if math.prod(gains) > (math.prod(best[kind][1]) if kind in best else min_gain):
                best[kind] = way, gains
    return best


def _gains(modules: list[Any], way: Way) -> dict[tuple[object, ...], tuple[float, ...]]:
    """For each kind of layer that the way takes, what it gains with few rows and with many."""
    multiplies = [(module, way(out_in(module))) for module in modules]
    layers = [(module, multiply) for module, multiply in multiplies if multiply is not None]
    generator, threads = torch.Generator("cpu").manual_seed(0), torch.get_num_threads()
    by_rows = []
    for rows in PROBED_ROWS:
        pairs = []
        for module, multiply in layers:
            width = out_in(module).shape[1]
            states = torch.randn(1, rows, width, generator=generator, device="cpu").to(module.weight.dtype)
            kind = (*_kind(module), rows, way.__name__, threads)
            pairs.append(Pair(kind, partial(_own, module, states), partial(multiply, states, module.bias)))
        gains = TRIALS.gains(pairs, _TOLERANCE)
        by_rows.append({_kind(module): gain for (module, _), gain in zip(layers, gains, strict=True)})
    return {kind: tuple(gains[kind] for gains in by_rows) for kind in by_rows[0]}


def _own(module: Any, states: Tensor) -> Tensor:
    """Without the module's hooks."""
    return type(module).forward(module, states)  # type: ignore[no-any-return]


def _sample_index(rows: int, columns: int) -> Tensor:
    diagonal = torch.arange(max(rows, columns), device="cpu")
    return diagonal % rows * columns + diagonal % columns


def _take(weight: Tensor, index: Tensor | None) -> Tensor:
    """Some of a weight's elements, as bits."""
    assert index is not None
    return weight.detach().view(-1).view(_INTEGERS[weight.element_size()])[index]
