"""A forward with gradients whose values are the engine's: each layer's gradient is the stock layer's at the same input.

As in checkpointing, a layer keeps its input alone, and is computed again, by its own code, when its gradient is wanted.
What lies between layers and no kernel of ours computes runs as it is: see `exactness` for what may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_paged.attention.context import is_sentinel, with_step
from hf_paged.attention.paged_attention import paged_attention_scope
from hf_paged.attention.training_step import TrainingStep
from hf_paged.model.decoder_layers import DecoderLayer
from hf_paged.model.module_overrides import CALL, ModuleOverride, has_hooks


class _Call:
    """One call of a module: what it takes to make it again.

    Attributes:
        values: What the engine computed of it.
        inputs: The tensors among its arguments that a gradient goes to.
    """

    def __init__(self, module: Any, args: Any, kwargs: Any, values: Any, step: TrainingStep) -> None:
        self._module = module
        self.values, self._spec = tree_flatten(values)
        self._leaves, self._given = tree_flatten((args, kwargs))
        self._at = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.inputs = [self._leaves[place] for place in self._at]
        self._mask = next((leaf for leaf in self._leaves if is_sentinel(leaf)), None)
        for place in self._at:  # autograd keeps them, and sees whether they are written to
            self._leaves[place] = None
        self._step = step
        self._unread = _unread(module)

    def again(self, inputs: list[Tensor]) -> list[Any]:
        """Its results by the module's own code."""
        leaves = list(self._leaves)
        for place, own in zip(self._at, inputs, strict=True):
            leaves[place] = own
        args, kwargs = tree_unflatten(leaves, self._given)
        with ExitStack() as scopes:
            if self._mask is not None:
                scopes.enter_context(with_step(self._mask, self._step))
            if self._unread is not None and not self._unread.is_seen:
                scopes.enter_context(self._unread)
            return tree_flatten(self._module._call_impl(*args, **kwargs))[0]

    def result(self, values: Any) -> Any:
        return tree_unflatten(list(values), self._spec)


class _Unread(TorchFunctionMode):
    """Within it, the product by one weight is zeros, with its gradients: nothing but a sum reads it."""

    def __init__(self, linear: nn.Linear, around: list[nn.Module]) -> None:
        """Takes the linear layer, and the modules whose results are its own, or sums with it."""
        super().__init__()
        self._linear, self._around = linear, around

    @property
    def is_seen(self) -> bool:
        """Whether hooks look at the product, or at what is made of it."""
        return any(map(has_hooks, (self._linear, *self._around)))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear and not kwargs and len(args) == 3 and args[1] is self._linear.weight:
            states, weight, bias = args
            return Product.apply([states.new_zeros(()).expand(*states.shape[:-1], len(weight))], states, weight, bias)
        return function(*args, **(kwargs or {}))


def _unread(module: nn.Module) -> _Unread | None:
    """For the last product of a decoder layer of the usual kind, which is added to what came in; not an adapter's."""
    own = getattr(module.__dict__.get(CALL), "before", None)
    if not isinstance(own, DecoderLayer) or not own.is_same:
        return None
    last = own.parts.outer[-1]
    return _Unread(last, [own.parts.mlp.module, module]) if type(last) is nn.Linear else None


class _Given(torch.autograd.Function):
    """Values as they are given; gradients of the module that they stand for, computed again."""

    @staticmethod
    def forward(ctx: Any, call: _Call, scope: Callable[[], Any], num_inputs: int, *tensors: Tensor) -> Any:
        ctx.call, ctx.scope, ctx.num_inputs = call, scope, num_inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        values, call.values = tuple(call.values), []
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        parameters = saved[ctx.num_inputs :]
        with torch.enable_grad(), ctx.scope():
            inputs = [each.detach().requires_grad_() for each in saved[: ctx.num_inputs]]
            found = ctx.call.again(inputs)
            pairs = [
                (own, grad) for own, grad in zip(found, grads, strict=True) if grad is not None and own.requires_grad
            ]
            if not pairs:
                return (None,) * (3 + len(saved))
            outputs, given = zip(*pairs, strict=True)
            wanted = torch.autograd.grad(outputs, [*inputs, *parameters], given, allow_unused=True)
        return (None, None, None, *wanted)


class Product(torch.autograd.Function):
    """A linear layer's value as it is given, in a list, and its gradients, for which nothing is computed again."""

    @staticmethod
    def forward(ctx: Any, value: list[Tensor], states: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return value.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        states, weight = ctx.saved_tensors
        rows, (_, for_states, for_weight, for_bias) = grad.flatten(0, -2), ctx.needs_input_grad
        return (
            None,
            (grad @ weight).to(states.dtype) if for_states else None,
            rows.t() @ states.flatten(0, -2).to(weight.dtype) if for_weight else None,
            rows.sum(dim=0) if for_bias else None,
        )


class _Differentiable(ModuleOverride):
    """A module whose value is what stands in for it, or for its parts, in the engine's forwards.

    Attributes:
        before: What stood in for it; `None`: it is called, and others stand in for its parts.
    """

    is_needed = True

    __slots__ = ("before", "scope", "step")

    def __init__(self, module: Any, scope: Callable[[], Any], step: TrainingStep) -> None:
        super().__init__(module)
        self.before: Any = module.__dict__.get(CALL)
        self.scope, self.step = scope, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.before or self.module._call_impl
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with torch.no_grad():
            own, named = tree_map_only(
                Tensor, lambda each: each.detach() if each.requires_grad else each, (args, kwargs)
            )
            values = call(*own, **named)
        if type(self.module) is nn.Linear and len(args) == 1 and not kwargs:
            return Product.apply([values], args[0], self.module.weight, self.module.bias)
        made = _Call(self.module, args, kwargs, values, self.step)
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        if not parameters and (not made.inputs or self._ends_gradients(made)):
            return values
        return made.result(_Given.apply(made, self.scope, len(made.inputs), *made.inputs, *parameters))

    def _ends_gradients(self, call: _Call) -> bool:
        """Whether the module's own results, as a rotary embedding's, have no gradient."""
        thread_id, self.thread_id = self.thread_id, None
        before, self.module.__dict__[CALL] = self.module.__dict__[CALL], None
        try:
            with self.scope():
                return not any(isinstance(each, Tensor) and each.requires_grad for each in call.again(call.inputs))
        finally:
            self.thread_id, self.module.__dict__[CALL] = thread_id, before


@contextmanager
def differentiable(model: nn.Module, step: TrainingStep, configs: list[Any]) -> Iterator[None]:
    """Within it, what this thread's forwards compute our way can be differentiated. Entered behind the overrides.

    Args:
        model: In the engine's scopes.
        step: Attention of its packed batch.
        configs: Those that its attention modules read their implementation from.
    """
    thread_id, scope = threading.get_ident(), partial(paged_attention_scope, configs)
    taken = [_Differentiable(module, scope, step) for module in _units(model)]
    try:
        for own in taken:
            own.thread_id = thread_id
            own.module.__dict__[CALL] = own
        yield
    finally:
        for own in taken:
            own.thread_id = None
            if own.before is None:
                own.module.__dict__.pop(CALL, None)
            else:
                own.module.__dict__[CALL] = own.before


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """The layers, and outside of them the outermost modules that something stands in for."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer) or CALL in child.__dict__:
            yield child
        else:
            yield from _units(child)
