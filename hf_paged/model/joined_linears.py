"""Linear layers of one input as one matrix product: their weights lie side by side, each parameter a view of its part.

Nothing but the memory knows: parameters are the objects that they were, and what puts one elsewhere (`.to()`,
`load_state_dict(assign=True)`) only takes it out again. Where weights lie says, in each call, whether they are joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_paged.memory.streams import let_steps_first
from hf_paged.model.module_overrides import has_hooks, is_untouched

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # of modules that join them


def multiply(layers: Sequence[nn.Module], states: Tensor) -> Sequence[Tensor]:
    """What each of some layers makes of these states; parts of one product, where they are joined."""
    if not are_plain(layers) or (weight := _as_one(layers, "weight")) is None:
        return [layer(states) for layer in layers]
    bias = None
    if layers[0]._parameters["bias"] is not None and (bias := _as_one(layers, "bias")) is None:
        return [layer(states) for layer in layers]
    sizes = [len(layer._parameters["weight"]) for layer in layers]  # type: ignore[arg-type]
    return functional.linear(states, weight, bias).split(sizes, dim=-1)


def are_plain(layers: Iterable[nn.Module]) -> bool:
    """Whether these compute nothing but what `nn.Linear` does, and nothing looks on."""
    return all(type(layer) is nn.Linear and is_untouched(layer) and not has_hooks(layer) for layer in layers)


def _as_one(layers: Sequence[nn.Module], name: str) -> Tensor | None:
    """Their parameters of a name as one: a view, if each begins where the one before ends, in the same memory."""
    tables = [layer._parameters for layer in layers]
    first = tables[0].get(name)
    if first is None:
        return None
    end = first.data_ptr()
    memory, num_rows = first.untyped_storage().data_ptr(), 0
    for table in tables:
        own = table.get(name)
        if own is None or own.data_ptr() != end or own.dtype is not first.dtype or own.shape[1:] != first.shape[1:]:
            return None
        if not own.is_contiguous() or own.untyped_storage().data_ptr() != memory:
            return None
        end, num_rows = end + own.nbytes, num_rows + len(own)
    return first.detach().as_strided((num_rows, *first.shape[1:]), first.stride())


def are_joined(layers: Sequence[nn.Module]) -> bool:
    return _as_one(layers, "weight") is not None and (
        layers[0]._parameters["bias"] is None or _as_one(layers, "bias") is not None
    )


def join(model: nn.Module, groups: Iterable[Sequence[nn.Module]]) -> Counter[str]:
    """Puts the weights of each group side by side, group by group: beside them all there is room for one group's.

    Other threads may compute with them meanwhile, but not write to them.

    Returns:
        How many groups are left as they are, by the reason.
    """
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    left: Counter[str] = Counter()
    for layers in groups:
        if (reason := _why_apart(layers, uses)) is not None:
            left[reason] += 1
        elif not are_joined(layers):
            try:
                for name in ("weight", "bias"):
                    _move([layer._parameters[name] for layer in layers], is_whole=True)
            except torch.OutOfMemoryError:
                left["there is no memory to put their weights side by side"] += 1
    return left


def part(model: nn.Module) -> None:
    """Gives each weight that `join` has moved memory of its own again, as far as there is some."""
    for module in model.modules():
        for names in (ATTENTION, MLP):
            layers = [getattr(module, name, None) for name in names]
            if are_plain(layers) and are_joined(layers):  # type: ignore[arg-type]
                with suppress(torch.OutOfMemoryError):
                    for name in ("weight", "bias"):
                        _move([layer._parameters[name] for layer in layers], is_whole=False)  # type: ignore[union-attr]


@torch.inference_mode(False)
@torch.no_grad()
def _move(parameters: Sequence[Any], is_whole: bool) -> None:
    """Moves parameters, side by side or each by itself; does nothing if there are none."""
    first = parameters[0]
    if first is None:
        return
    with torch.cuda.stream(torch.cuda.default_stream(first.device)):  # where weights are made: not the steps' memory
        let_steps_first(first.device)
        if is_whole:
            memory = first.new_empty((sum(map(len, parameters)), *first.shape[1:]))
            parts = memory.split(list(map(len, parameters)))
            for own, parameter in zip(parts, parameters, strict=True):
                own.copy_(parameter)
        else:
            parts = [parameter.detach().clone() for parameter in parameters]
        # Contents arrive before others read them, and the last step has read what it reads where they were.
        torch.cuda.current_stream(first.device).synchronize()
    for own, parameter in zip(parts, parameters, strict=True):
        parameter.data = own
    torch.cuda.empty_cache()  # what is free now need not be as large as the next group


def _why_apart(layers: Sequence[Any], uses: Counter[int]) -> str | None:
    """Why layers have to stay as they are; `None`: their weights may be moved."""
    if not are_plain(layers):
        kinds = sorted({f"{type(one).__module__.partition('.')[0]}.{type(one).__name__}" for one in layers})
        return f"they are {', '.join(kinds)}, or have hooks or a forward of their own"
    weights, biases = ([layer._parameters.get(name) for layer in layers] for name in ("weight", "bias"))
    first = weights[0]
    if not all(type(own) is nn.Parameter and own.is_contiguous() and not own.is_inference() for own in weights):
        return "their weights are no plain parameters"
    if {type(own) for own in biases} not in ({nn.Parameter}, {NoneType}):
        return "only some of them have a bias"
    parameters = weights + [own for own in biases if own is not None]
    if any((own.dtype, own.device) != (first.dtype, first.device) for own in parameters):
        return "their weights differ in dtype or device"
    if any(own.shape[1:] != first.shape[1:] for own in weights):
        return "their inputs differ in width"
    if any(uses[id(own)] > 1 for own in parameters):
        return "their weights are tied to others"
    members = Counter(own.untyped_storage().data_ptr() for own in parameters)
    for own in parameters:
        memory = own.untyped_storage()
        # Tensors over this memory, and this name for it: others would not see later writes any more.
        if torch._C._storage_Use_Count(memory._cdata) > members[memory.data_ptr()] + 1:
            return "other tensors share their memory"
    return None
