"""Norms and gated MLPs of the engine's forwards, one pass over memory where transformers' code makes two to ten.

A module is taken for what it computes: its own forward and the kernel have to agree on inputs of all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_paged.kernels.cpu_layers import CPULayers
from hf_paged.kernels.layers import InputError, LayerKernels, NormWeight
from hf_paged.model import joined_linears
from hf_paged.model.module_overrides import KNOWN, ModuleOverride, Survey, has_hooks, is_library_code, is_untouched

# The activations x * sigmoid(linear * x + cubic * x³): SiLU, GELU by tanh (tanh(u) is 2 sigmoid(2u) - 1), quick GELU.
ACTIVATIONS = ((1.0, 0.0), (2 * (2 / torch.pi) ** 0.5, 2 * (2 / torch.pi) ** 0.5 * 0.044715), (1.702, 0.0))
# What is added to a norm's weight, and whether its input is rounded before it meets the weight.
NORMS = ((0.0, True), (1.0, False), (0.0, False))
# Relative to the result's size. A formula that rounds elsewhere is off by 1e-3 in bfloat16, by 1e-4 in float16.
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-4, torch.float16: 6e-5}
_MLP_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


class NormAhead:
    """What the decoder layer that ran last leaves to the norm behind it: its result, already normed, if it knew which.

    Attributes:
        source: The layer; `None`: nothing is left.
        states: Its result.
        normed: What the norm makes of it; `None`: not known.
    """

    def __init__(self) -> None:
        self.source: FollowedByNorm | None = None
        self.states: Tensor | None = None
        self.normed: Tensor | None = None

    def leave(self, source: FollowedByNorm | None, states: Tensor | None, normed: Tensor | None = None) -> None:
        self.source, self.states, self.normed = source, states, normed

    def take(self, norm: Norm, states: Tensor) -> Tensor | None:
        """What a norm would make of these states, if that is known; the layer gets to know by which it is followed."""
        source, left, normed = self.source, self.states, self.normed
        self.leave(None, None)
        if source is None or left is not states:
            return None
        if source.next is norm and normed is not None:
            return normed
        source.next = norm
        return None


class FollowedByNorm(Protocol):
    next: Norm | None


class Norm(ModuleOverride):
    __slots__ = ("ahead", "eps", "kernels", "offset", "rounds_first")

    def __init__(
        self,
        module: Any,
        kernels: LayerKernels,
        eps: str,
        offset: float,
        rounds_first: bool,
        ahead: NormAhead | None = None,
    ) -> None:
        """`eps` is the name of the module's attribute."""
        super().__init__(module)
        self.kernels, self.eps, self.offset, self.rounds_first = kernels, eps, offset, rounds_first
        self.ahead = ahead

    @property
    def settings(self) -> NormWeight:
        """What it computes with now."""
        return NormWeight(self.module.weight, getattr(self.module, self.eps), self.offset, self.rounds_first)

    def compute(self, states: Tensor) -> Tensor:
        if self.ahead is not None and (normed := self.ahead.take(self, states)) is not None:
            return normed
        eps = getattr(self.module, self.eps)
        # Heads lie token by token, and the module is given them head by head.
        return self.kernels.rms_norm(states.contiguous(), self.module.weight, eps, self.offset, self.rounds_first)


class GatedMLP(ModuleOverride):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`, the first two maybe in one; its layers are called as they are."""

    __slots__ = ("activation", "coefficients", "has_one_input_layer", "kernels", "name")

    def __init__(self, module: Any, kernels: LayerKernels, name: str, coefficients: tuple[float, float]) -> None:
        """`name` is that of the module's attribute for its activation."""
        super().__init__(module)
        self.kernels, self.name, self.coefficients = kernels, name, coefficients
        self.activation = getattr(module, name)
        self.has_one_input_layer = hasattr(module, "gate_up_proj")

    def compute(self, states: Tensor) -> Tensor:
        module, activation = self.module, self.activation
        if not is_as_tried(module, self.name, activation):
            raise InputError("gate", "the activation that was tried", states=states)
        if self.has_one_input_layer:
            gate, up = module.gate_up_proj(states).chunk(2, dim=-1)
        elif isinstance(self.kernels, CPULayers):
            gate, up = module.gate_proj(states), module.up_proj(states)
        else:
            gate, up = joined_linears.multiply((module.gate_proj, module.up_proj), states)
        try:
            product = self.kernels.gate(gate, up, *self.coefficients)
        except InputError:
            product = activation(gate) * up
        return module.down_proj(product)


def find_norm(module: Any, survey: Survey) -> Norm | None:
    """For a module with one vector of weights that computes one of `NORMS`."""
    if (kernels := kernels_for(module, survey)) is None:
        return None
    dtype, device = survey.dtype, survey.device
    weight = getattr(module, "weight", None)
    eps = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    if (
        type(weight) is not nn.Parameter
        or weight.ndim != 1
        or weight.dtype is not dtype
        or weight.device != device
        or not isinstance(getattr(module, eps, None), float)
        or len(list(module.parameters())) > 1
        or any(True for _ in module.buffers())
        or any(True for _ in module.children())
    ):
        return None
    states = torch.randn(4, len(weight), generator=survey.generator, device="cpu")
    states *= torch.tensor([[1e-3], [0.1], [1.0], [30.0]], device="cpu")  # eps matters in the first
    states = states.to(device, dtype)
    truth = attempt(module, states)
    if not isinstance(truth, Tensor):
        return None
    ahead = None if isinstance(kernels, CPULayers) else survey.shared(NormAhead)
    for offset, rounds_first in NORMS:
        call = Norm(module, kernels, eps, offset, rounds_first, ahead)
        try:
            if agrees(call.compute(states), truth, _TOLERANCE[dtype], dim=-1):
                return call
        except InputError:  # too wide
            return None
    return None


def find_gated_mlp(module: Any, survey: Survey) -> GatedMLP | None:
    """For a module with the usual layers that does nothing else with them; tried once for the same settings."""
    if (kernels := kernels_for(module, survey)) is None:
        return None
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")]
    name = "activation_fn" if getattr(module, "act_fn", None) is None else "act_fn"
    activation = getattr(module, name, None)
    has_layers = layers[3] is not None and ((layers[0] is None) == (layers[1] is None) != (layers[2] is None))
    first = layers[0] if layers[0] is not None else layers[2]
    if not has_layers or activation is None or not all(isinstance(x, nn.Module) for x in layers if x is not None):
        return None
    if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):  # a factor, 1 at first
        return None
    coefficients = next((c for c in ACTIVATIONS if computes(activation, c)), None)
    width = getattr(first, "in_features", None)
    if coefficients is None or not isinstance(width, int):
        return None
    if not is_library_code(module) or not all(is_library_code(p, KNOWN) and not has_hooks(p) for p in module.modules()):
        return None
    call = GatedMLP(module, kernels, name, coefficients)
    settings = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    settings.pop("layer_idx", None)
    kind = (type(module), coefficients, *sorted((name, repr(value)) for name, value in settings.items()))
    if kind not in survey.known:
        states = torch.randn(1, 3, width, generator=survey.generator, device="cpu")
        states *= torch.tensor([[1.0], [30.0], [1e4]], device="cpu")  # bounds matter in the last
        states = states.to(survey.device, survey.dtype)
        truth = attempt(module, states)
        survey.known[kind] = isinstance(truth, Tensor) and agrees_where_finite(call.compute(states), truth)
    return call if survey.known[kind] else None


def kernels_for(module: nn.Module, survey: Survey) -> LayerKernels | None:
    """The kernels, for a module that may be called for a trial."""
    may_try = is_untouched(module) and is_library_code(module) and not has_hooks(module)
    return survey.kernels if may_try else None


def agrees_where_finite(result: Tensor, truth: Tensor, tolerance: Mapping[torch.dtype, float] = _MLP_TOLERANCE) -> bool:
    """Whether rows are the same but for a tolerance, and but for those that are too large for their dtype."""
    rows = truth.isfinite().all(dim=-1)
    is_comparable = result.shape == truth.shape and bool(rows.any())
    return is_comparable and agrees(result[rows], truth[rows], tolerance[truth.dtype], dim=-1)


def is_as_tried(module: nn.Module, name: str, activation: Any) -> bool:
    """Whether a module's attribute of this name still is the activation that was tried, and no hooks look at it."""
    is_hooked = isinstance(activation, nn.Module) and has_hooks(activation)
    return not is_hooked and getattr(module, name, None) is activation


def computes(activation: Any, coefficients: tuple[float, float]) -> bool:
    states = torch.linspace(-9.0, 9.0, 361, device="cpu")
    linear, cubic = coefficients
    result = attempt(activation, states)
    expected = states * torch.sigmoid(linear * states + cubic * states**3)
    return isinstance(result, Tensor) and torch.allclose(result, expected, rtol=1e-5, atol=2e-6)


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """What a function makes of these arguments; `None` if it is not one for them."""
    try:
        return function(*args)
    except Exception:  # as a norm says that also takes a gate
        return None


def agrees(result: Tensor, truth: Tensor, tolerance: float, dim: int | None = None) -> bool:
    """Whether two tensors are of one dtype and shape, and differ by no more than a share of the truth's size.

    Args:
        result: What was computed another way.
        truth: What it should be.
        tolerance: The share.
        dim: Along it sizes are taken, where rows differ in theirs; `None`: of the whole.
    """
    if result.dtype is not truth.dtype or result.shape != truth.shape:
        return False
    truth = truth.float()
    return bool(((result.float() - truth).norm(dim=dim) <= tolerance * truth.norm(dim=dim)).all())
