"""Operations of models' own code on CPU whose bits depend on what stands beside a row, computed so that they don't.

torch multiplies matrices in an order of sums that depends on their sizes. It computes a sigmoid, say, by vectors, but
in another way at the end of a tensor or of a thread's share.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_paged.kernels import cpu_layers, cpu_linear
from hf_paged.kernels.cpu_layers import CPULayers
from hf_paged.kernels.layers import InputError
from hf_paged.model.fused_layers import ACTIVATIONS, computes, kernels_for
from hf_paged.model.module_overrides import ModuleOverride, Survey

PRODUCTS = {"linear", "matmul", "@", "bmm"}
FUNCTIONS = {"sigmoid", "silu", "gelu", "softplus", "pow"}
_MOST_TERMS = 32  # of sums that are added up one by one


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    kernel = cpu_linear.load(weight.dtype)
    if isinstance(kernel, str):
        raise InputError("linear", "weights that our kernel takes", weight=weight)
    return kernel.multiply(states, weight.detach(), None if bias is None else bias.detach().contiguous())


def matmul(first: Tensor, second: Tensor) -> Tensor:
    """By a matrix, of a parameter by states, or by as many small ones as there are of the first."""
    if isinstance(first, nn.Parameter) and first.ndim == 2 < second.ndim:
        return linear(second.transpose(-1, -2), first).transpose(-1, -2)
    if second.ndim == 2:
        return linear(first, second.t())
    terms = first.shape[-1]
    if not (first.is_cpu and first.ndim == second.ndim > 2 and second.shape[-2] == terms and 0 < terms <= _MOST_TERMS):
        raise InputError("matmul", "a matrix, or small ones", first=first, second=second)
    one, other = _wide(first), _wide(second)
    result = one[..., :1] * other[..., :1, :]
    for term in range(1, terms):
        result += one[..., term, None] * other[..., term, None, :]
    return result.to(first.dtype)


def activated(states: Tensor, linear: float, cubic: float, multiplies: bool = True, inplace: bool = False) -> Tensor:
    """As `CPULayers.activate`, of either type."""
    kernels = cpu_layers.load(states.dtype)
    if isinstance(kernels, str) or inplace:
        raise InputError("activation", "a type of our kernels, not in place", states=states)
    return kernels.activate(states, linear, cubic, multiplies)


def gelu(states: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return activated(states, *ACTIVATIONS[1])
    wide = _wide(states)
    return (wide * 0.5**0.5).erf_().add_(1).mul_(wide).mul_(0.5).to(states.dtype)


def softplus(states: Tensor) -> Tensor:
    wide = _wide(states)
    return (wide.clamp(min=0) + wide.abs().neg().exp().log1p()).to(states.dtype)


def power(states: Tensor, exponent: Any) -> Tensor:
    if not isinstance(exponent, float) or exponent != -0.5:
        raise InputError("pow", "the exponent -0.5", states=states)
    return states.sqrt().reciprocal()


def _wide(states: Tensor) -> Tensor:
    if states.dtype not in cpu_layers.DTYPES:
        raise InputError("operation", "a type of our kernels", states=states)
    return states.float()


_OPERATIONS: dict[Any, Callable[..., Tensor]] = {
    functional.linear: linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul), matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm), cpu_linear.bmm),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), partial(activated, linear=1.0, cubic=0.0, multiplies=False)),
    functional.silu: partial(activated, linear=1.0, cubic=0.0),
    functional.gelu: gelu,
    functional.softplus: softplus,
    **dict.fromkeys((torch.pow, Tensor.pow), power),
}


class ExactOperations(TorchFunctionMode):
    """Within it, a row of what this thread computes by the operations above depends on that row alone."""

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        exact = _OPERATIONS.get(function)
        if exact is not None:
            try:
                return exact(*args, **(kwargs or {}))
            except (InputError, TypeError):  # other tensors, other arguments
                pass
        return function(*args, **(kwargs or {}))


class Activation(ModuleOverride):
    """`x * sigmoid(linear * x + cubic * x³)` as a module."""

    __slots__ = ("coefficients",)

    def __init__(self, module: Any, coefficients: tuple[float, float]) -> None:
        super().__init__(module)
        self.coefficients = coefficients

    def compute(self, states: Tensor) -> Tensor:
        return activated(states, *self.coefficients)


class ExactModule(ModuleOverride):
    """A module that runs as it is, with `ExactOperations`."""

    __slots__ = ("operations",)

    def __init__(self, module: Any, operations: ExactOperations) -> None:
        super().__init__(module)
        self.operations = operations

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.operations:
            return self.module._call_impl(*args, **kwargs)


def is_leaf(module: nn.Module) -> bool:
    """Whether it has neither parts nor tensors."""
    return not any(True for _ in (*module.children(), *module.parameters(), *module.buffers()))


def find_activation(module: nn.Module, survey: Survey) -> Activation | ExactModule | None:
    """For a module of no parts that uses one of `FUNCTIONS`: as one of `ACTIVATIONS`, if that is what it computes."""
    kind: Any = type(module)
    if not is_leaf(module) or not names_in(kind) & FUNCTIONS or not isinstance(kernels_for(module, survey), CPULayers):
        return None
    coefficients = next((each for each in ACTIVATIONS if computes(module, each)), None)
    if coefficients is None:
        return ExactModule(module, survey.shared(ExactOperations))
    return Activation(module, coefficients)


def find_exact(module: nn.Module, survey: Survey) -> ExactModule | None:
    """For a module of transformers' whose class multiplies by parameters, or uses one of `FUNCTIONS`."""
    operations = operations_for(module, survey)
    return ExactModule(module, operations) if isinstance(operations, ExactOperations) else None


def operations_for(module: nn.Module, survey: Survey) -> AbstractContextManager[Any]:
    """In what a module's own forward is to run: `ExactOperations`, if its class uses some of them."""
    kind: Any = type(module)
    is_own = kind.__module__.startswith("transformers.models.") and not isinstance(module, PreTrainedModel)
    if not is_own or not isinstance(kernels_for(module, survey), CPULayers):
        return nullcontext()
    used = names_in(kind)
    parts: list[tuple[nn.Module, frozenset[str]]] = [(module, used)]
    for child in module.children():  # whose methods may be called, not the module
        child_kind: Any = type(child)
        parts.append((child, names_in(child_kind, used - {"__init__", "forward"})))
    uses_some = any(
        names & FUNCTIONS or (names & PRODUCTS and (part._parameters or "weight" in names)) for part, names in parts
    )
    return survey.shared(ExactOperations) if uses_some else nullcontext()


@lru_cache
def names_in(kind: type[nn.Module], methods: frozenset[str] | None = None) -> frozenset[str]:
    """What a class's methods, or those of these names, use, and `@`; not those of `nn.Module`."""
    found: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, own in vars(base).items():
            method = inspect.unwrap(own) if callable(own) else None
            if isinstance(method, FunctionType) and (methods is None or name in methods):
                found.update(method.__code__.co_names)
                found.update(one.argrepr for one in dis.get_instructions(method) if one.opname == "BINARY_OP")
    return frozenset(found)
