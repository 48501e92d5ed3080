"""`PackedLinears`: linear layers of the engine's forwards on CPU, through oneDNN where that is measured faster."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks as _GLOBAL_HOOKS
from torch.nn.modules.module import _global_forward_pre_hooks as _GLOBAL_PRE_HOOKS
from transformers.pytorch_utils import Conv1D

logger = logging.getLogger(__name__)

# Where `module.compile()` leaves its result: called instead of the module, never copied nor pickled with it.
_CALL = "_compiled_call_impl"

MIN_ELEMENTS = 2**17  # of a weight; below, a call costs more than the product
PROBED_ROWS = (1, 32)  # tokens in a step: of one user, and of many
NUM_PROBED = 4  # layers of a kind
NUM_ROUNDS = 3  # over them
MIN_GAIN = 1.05  # less is noise
_INTEGERS = {4: torch.int32, 2: torch.int16}
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(slots=True, eq=False)
class _Layer:
    """A linear layer with another way to compute it.

    Attributes:
        module: The layer, `nn.Linear` or `Conv1D`, whose weight is `[in, out]`.
        weight: `[out, in]`, packed by oneDNN or as it is.
        dtype: Of the weight, and of inputs that it multiplies.
        thread_id: Whose forwards go this way at the moment.
        source: Of the module's own weight, what tells another tensor from it, where `weight` is a copy.
        sample_index: Elements of it to look at, and
        sample: what they were.
    """

    module: Any
    weight: Tensor
    dtype: torch.dtype
    thread_id: int | None = None
    source: tuple[object, ...] | None = None
    sample_index: Tensor | None = None
    sample: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What its speed depends on."""
        return type(self.module), *self.module.weight.shape, self.dtype, self.module.bias is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the module's own call."""
        module = self.module
        if (
            threading.get_ident() == self.thread_id
            and len(args) == 1
            and not kwargs
            and args[0].dtype is self.dtype
            and not (module._forward_hooks or module._forward_pre_hooks or _GLOBAL_HOOKS or _GLOBAL_PRE_HOOKS)
        ):
            return _multiply(args[0], self.weight, module.bias)
        return module._call_impl(*args, **kwargs)


class PackedLinears:
    """Linear layers with weights in the layout that oneDNN multiplies fastest, as long as the weights stay as they are.

    In float32 torch multiplies by another library, which is slow on AMD; in half precision it packs the weight anew
    in every call. What is used here instead is what torch's own compiler emits: a private op, so only where it is there
    and agrees with the layer. Where there is no room for a second copy of a weight, it is multiplied as it is.

    Nobody but the thread inside `scope` sees any of it: training, scoring and other threads go through the layers as
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
            yield
            return
        if self._layers is None:
            self._layers = self._make()
        layers = [layer for layer in self._layers if _is_untouched(layer.module)]
        thread_id = threading.get_ident()
        try:
            for layer in layers:
                layer.thread_id = thread_id
                layer.module.__dict__[_CALL] = layer
            yield
        finally:
            for layer in layers:
                layer.module.__dict__.pop(_CALL, None)
                layer.thread_id = None

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
        modules: list[Any] = [module for module in model.modules() if _can_take(module)]
        size = sum(module.weight.numel() * module.weight.element_size() for module in modules)
        hold = _pack if size <= self._memory_fraction * psutil.virtual_memory().available else _as_it_is
        try:
            layers = [_Layer(module, hold(_out_in(module)), module.weight.dtype) for module in modules]
            is_faster = _compare(layers, hold)
        except (RuntimeError, AttributeError, NotImplementedError) as error:  # not in this build, not on this machine
            logger.info("hf_paged: linear layers can't run through oneDNN: %s", error)
            return []
        layers = [layer for layer in layers if is_faster[layer.kind]]
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
        and _is_untouched(module)
    )


def _is_untouched(module: nn.Module) -> bool:
    """Whether nobody gave it a forward of its own (accelerate's hooks), compiled it, or is computing it our way now."""
    return "forward" not in module.__dict__ and _CALL not in module.__dict__


def _out_in(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach()
    return weight if isinstance(module, nn.Linear) else weight.t()


def _multiply(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(states, weight, bias, "none", [], "")


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), PROBED_ROWS[-1])


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


# By all that it depends on: the same for all layers of a shape, and for the next model.
_IS_FASTER: dict[tuple[object, ...], bool] = {}


def _compare(layers: list[_Layer], hold: Callable[[Tensor], Tensor]) -> dict[tuple[object, ...], bool]:
    """For each kind of layer, whether it gains by oneDNN; measured once a process.

    Some layers of each kind are run in the model's order: a weight that was just used is in the processor's cache, and
    in a model it is not.
    """
    threads = torch.get_num_threads()
    unknown: dict[tuple[object, ...], list[_Layer]] = defaultdict(list)
    for layer in layers:
        if (layer.kind, hold, threads) not in _IS_FASTER and len(unknown[layer.kind]) < NUM_PROBED:
            unknown[layer.kind].append(layer)
    probed = [layer for layer in layers if layer in unknown[layer.kind]]
    generator = torch.Generator("cpu").manual_seed(0)
    gains: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for rows in PROBED_ROWS:
        inputs = {
            layer.kind: torch.randn(1, rows, _out_in(layer.module).shape[1], generator=generator, device="cpu").to(
                layer.dtype
            )
            for layer in probed
        }
        own, other = (
            _seconds([(layer.kind, partial(call, layer, inputs[layer.kind])) for layer in probed])
            for call in (_own, _other)
        )
        for layer in probed:
            if not _agree(_other(layer, inputs[layer.kind]), _own(layer, inputs[layer.kind])):
                raise RuntimeError(f"it multiplies {layer.kind} wrongly, or the weights are no numbers")
            gains[layer.kind].append(own[layer.kind] / other[layer.kind])
    for kind, ratios in gains.items():
        _IS_FASTER[(kind, hold, threads)] = sum(ratios) / len(ratios) >= MIN_GAIN
    return {layer.kind: _IS_FASTER[(layer.kind, hold, threads)] for layer in layers}


def _own(layer: _Layer, states: Tensor) -> Tensor:
    """Without the module's hooks."""
    return type(layer.module).forward(layer.module, states)  # type: ignore[arg-type]


def _other(layer: _Layer, states: Tensor) -> Tensor:
    return _multiply(states, layer.weight, layer.module.bias)


def _agree(result: Tensor, truth: Tensor) -> bool:
    error = (result.float() - truth.float()).norm()
    return bool(error <= _TOLERANCE[truth.dtype] * truth.float().norm())


def _seconds(calls: list[tuple[Hashable, Callable[[], Tensor]]]) -> dict[Hashable, float]:
    """Seconds of the calls of each kind, made in this order; the least of some rounds."""
    rounds: list[dict[Hashable, float]] = []
    for _ in range(NUM_ROUNDS):
        times: dict[Hashable, float] = defaultdict(float)
        for kind, call in calls:
            started = time.perf_counter()
            call()
            times[kind] += time.perf_counter() - started
        rounds.append(times)
    return {kind: min(times[kind] for times in rounds) for kind, _ in calls}


def _source(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device


def _sample_index(rows: int, columns: int) -> Tensor:
    diagonal = torch.arange(max(rows, columns), device="cpu")
    return diagonal % rows * columns + diagonal % columns


def _take(weight: Tensor, index: Tensor | None) -> Tensor:
    """Some of a weight's elements, as bits."""
    assert index is not None
    return weight.detach().view(-1).view(_INTEGERS[weight.element_size()])[index]
