"""Decoder layers of the usual kind on a GPU, in ten launches: sums with norms, rotation with writing, four products."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.context import ForwardContext
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels.cpu_layers import CPULayers
from hf_paged.kernels.layers import InputError
from hf_paged.model.decoder_layers import TRIED, DecoderLayer, Parts, parts_of
from hf_paged.model.fused_layers import Norm, NormAhead, agrees_where_finite
from hf_paged.model.fused_rotary import NAME
from hf_paged.model.joined_linears import ATTENTION, are_plain, multiply
from hf_paged.model.module_overrides import ModuleOverride, Survey

# Joined products sum up in another order, and may round elsewhere: an error of a thousandth is none of the formula.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def find_gpu_layer(module: Any, survey: Survey) -> GPULayer | None:
    """For what `find_decoder_layer` takes on CPU: its own forward in a step has to give the same but for rounding."""
    if survey.kernels is None or isinstance(survey.kernels, CPULayers):
        return None
    parts = parts_of(module, survey.found)
    return None if parts is None else GPULayer(module, parts, survey)


class GPULayer(DecoderLayer):
    """Computed by Triton's kernels, and torch's products.

    Attributes:
        next: The norm behind it, once a forward has come there.
        may_norm_ahead: Whether the result reaches that norm as it is.
    """

    __slots__ = ("_ahead", "_kernels", "may_norm_ahead", "next")

    def __init__(self, module: Any, parts: Parts, survey: Survey) -> None:
        super().__init__(module, parts, survey)
        self._kernels: Any = parts.mlp.kernels
        self._ahead = survey.shared(NormAhead)
        self.next: Norm | None = None
        self.may_norm_ahead = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not are_plain(self.parts.outer):  # rows have adapters, which look at all tokens
            return self.module._call_impl(*args, **kwargs)
        result = super().forward(*args, **kwargs)
        if self.may_norm_ahead and self._ahead.source is not self and isinstance(result, Tensor):
            self._ahead.leave(self, result)  # by its own forward: the norm behind it gets to know
        return result

    def compute_layer(
        self,
        context: ForwardContext,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
        params: AttentionParams,
    ) -> Tensor:
        step, heads = context.step, self._heads(states)
        query = self._write_at_once(step, heads, angles, params.layer)
        if query is None:
            query, key, value = self._rotated(heads, angles)
            step.write(key, value, params.layer)
        return self._behind(states, step.attend(query, params), self.next if self.may_norm_ahead else None)

    def compute_parts(self, states: Tensor, angles: tuple[Tensor, Tensor], attended: Tensor | None) -> Sequence[Tensor]:
        states, cos, sin = (each[:, :TRIED] for each in (states, *angles))
        found = self._rotated(self._heads(states), (cos, sin))
        return found if attended is None else (*found, self._behind(states, attended[:TRIED], None))

    def agrees(self, one: Tensor, other: Tensor) -> bool:
        other = other.reshape(-1, other.shape[-1])
        own = one.reshape(-1, one.shape[-1])[: len(other)]
        return agrees_where_finite(other, own, _TOLERANCE)

    def _heads(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[tokens, heads, head_dim]` queries, keys and values, before their norms."""
        attention, normed = self.parts.attention.module, self.parts.norms[0].compute(states)
        products = multiply([getattr(attention, name) for name in ATTENTION], normed)
        query, key, value = (product[0].unflatten(-1, (-1, attention.head_dim)) for product in products)
        return query, key, value

    def _write_at_once(
        self, step: PagedStep, heads: tuple[Tensor, Tensor, Tensor], angles: tuple[Tensor, Tensor], layer: int
    ) -> Tensor | None:
        """Queries, behind one launch that rotates and writes; `None`: that takes another kind of pool, or of norms."""
        place = find(layer) if (find := getattr(step, "place_of", None)) is not None else None
        if place is None:
            return None
        rotary = self.parts.attention.changed.changes[NAME]
        norms = [norm.settings for norm in self.parts.norms[2:]]
        kinds = rotary.interleaved, rotary.rounds
        try:
            query: Tensor = self._kernels.rotary_write(
                heads, angles, kinds, (norms[0], norms[1]) if norms else None, place
            )
        except InputError:
            return None
        return query

    def _rotated(
        self, heads: tuple[Tensor, Tensor, Tensor], angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, behind their norms and rotated."""
        query, key, value = heads
        if len(self.parts.norms) > 2:
            query, key = self.parts.norms[2].compute(query), self.parts.norms[3].compute(key)
        rotary = self.parts.attention.changed.changes[NAME]
        kinds = rotary.interleaved, rotary.rounds
        query, key = (each.transpose(0, 1)[None] for each in (query, key))
        query, key = self._kernels.rotary(query, key, *(each.contiguous() for each in angles), *kinds)
        return query[0].transpose(0, 1), key[0].transpose(0, 1), value

    def _behind(self, states: Tensor, attended: Tensor, following: Norm | None) -> Tensor:
        """The layer's result, which is left to the norm behind it, normed if that is given."""
        parts = self.parts
        projected = parts.attention.module.o_proj(attended.flatten(1)[None])
        middle, normed = self._kernels.add_norm(states.contiguous(), projected, parts.norms[1].settings)
        product = parts.mlp.compute(normed)
        if following is not None:
            try:
                result, normed = self._kernels.add_norm(middle, product, following.settings)
            except InputError:
                pass
            else:
                self._ahead.leave(self, result, normed)
                return result  # type: ignore[no-any-return]
        return middle + product  # type: ignore[no-any-return]


def note_stacks(modules: Iterable[nn.Module], found: dict[int, ModuleOverride]) -> None:
    """Lets layers hand over that a module has in a list and calls in a row, whose code writes into no tensor."""
    for module in modules:
        for layers in module.children():
            listed = layers.children() if isinstance(layers, nn.ModuleList) else ()
            own = [layer for one in listed if isinstance(layer := found.get(id(one)), GPULayer)]
            may_norm_ahead = bool(own) and not _writes_in_place(type(module))
            for layer in own:
                layer.may_norm_ahead = may_norm_ahead


def _writes_in_place(kind: Any) -> bool:
    """Whether a module's forward, or a method of its class that this names, may change a tensor that it was given."""
    forward = inspect.unwrap(kind.forward)
    named = [getattr(kind, name, None) for name in forward.__code__.co_names if not hasattr(nn.Module, name)]
    functions = [forward, *(inspect.unwrap(own) for own in named if isinstance(own, FunctionType))]
    for function in functions:
        if any(name.endswith("_") and not name.startswith("_") for name in function.__code__.co_names):
            return True  # as `add_`
        before = None
        for one in dis.get_instructions(function):
            is_of_dict = before is not None and before.opname == "LOAD_CONST" and isinstance(before.argval, str)
            if (one.opname == "STORE_SUBSCR" and not is_of_dict) or (one.opname == "BINARY_OP" and "=" in one.argrepr):
                return True
            before = one
    return False
