"""Layers to which each row of a step has its own adapter added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hf_paged.kernels.cpu_adapters import Table, load
from hf_paged.kernels.cpu_decoder import Added
from hf_paged.kernels.layers import InputError
from hf_paged.kernels.low_rank import LowRank
from hf_paged.kernels.slot_tables import LayerTable
from hf_paged.kernels.transfers import to_device
from hf_paged.model.module_overrides import CALL, ModuleOverride, has_hooks
from hf_paged.model.peft_layers import is_merged, tuners_among

_FIRST_SLOTS = 8
_EMPTY = Table(0)


Slots: TypeAlias = np.ndarray | Tensor


class TokenSlots:
    """Whose the tokens of a step are, by slots of adapters.

    Modules are called with all tokens or with those whose logits are wanted: which of them is told by their number.

    Attributes:
        tokens: `[T]` int32, of all tokens; on the device, where
        are_recorded: the step is recorded, for any slots.
    """

    def __init__(self, slots: Sequence[Slots]) -> None:
        """Takes several lists of tokens, `[tokens]` int32 each: their slots, below 0 without an adapter."""
        self._by_count = {len(own): own for own in slots}
        self._tensors: dict[tuple[int, torch.device], Tensor] = {}
        self.tokens = slots[0]
        self.are_recorded = isinstance(self.tokens, Tensor)

    def of(self, num_tokens: int, module: nn.Module) -> Slots:
        """The slots of so many tokens.

        Raises:
            RuntimeError: The module is called with something else.
        """
        slots = self._by_count.get(num_tokens)
        if slots is None:
            raise RuntimeError(
                f"an adapter changes a {type(module).__name__} that was called with {num_tokens} rows, which are not "
                f"the tokens of its step: those are {sorted(self._by_count)}"
            )
        return slots

    def tensor(self, slots: Slots, device: torch.device) -> Tensor:
        """The same on a device as a tensor."""
        if isinstance(slots, Tensor):
            return slots
        key = len(slots), device
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = to_device(np.ascontiguousarray(slots), device)
        return tensor


class AdaptedLayer(ModuleOverride):
    """A layer of PEFT's, or one that a loaded adapter names, in the engine's forwards.

    Attributes:
        base: The layer without adapters, which `added` and `whole` belong to.
        added: By slot, what is added to its result.
        whole: By slot, what is called in its place.
        current: Gives the rows of the step; `None`: no row has an adapter.
        table: By slot, what a kernel adds.
        num_by_torch: How many of `added` that does not take.
    """

    is_needed = True

    __slots__ = ("added", "base", "before", "current", "num_by_torch", "table", "whole")

    def __init__(
        self,
        module: Any,
        base: nn.Module,
        current: Callable[[], TokenSlots | None],
        on_gpu: LayerTable | None = None,
    ) -> None:
        """`on_gpu`: its table, where the kernels run that add there."""
        super().__init__(module)
        self.base, self.current = base, current
        self.added: dict[int, LowRank] = {}
        self.whole: dict[int, nn.Module] = {}
        self.table: Table | LayerTable = on_gpu or Table(_FIRST_SLOTS)
        self.num_by_torch = 0
        self.before: Any = None

    def put(self, slot: int, added: LowRank | None, whole: nn.Module | None) -> None:
        """Sets what an adapter does here, in the place of what it, or another one that had its slot, did before.

        A step that is under way reads either, and holds what it reads.
        """
        table = self.table
        if slot >= len(table) or table.has(slot):
            table = table.grown(max(len(table), 2 * slot))
        try:
            table.put(slot, added)
        except InputError:  # an embedding, or one that torch adds
            table.put(slot, None)
        self.table = table
        self.added.pop(slot, None) if added is None else self.added.update({slot: added})
        self.whole.pop(slot, None) if whole is None else self.whole.update({slot: whole})
        self.num_by_torch = sum(not table.has(each) for each in self.added)

    def adds_by_kernel(self, slot: int) -> bool:
        """Whether a kernel adds all that an adapter does here."""
        return slot not in self.whole and (slot not in self.added or self.table.has(slot))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if has_hooks(self.module):
            raise RuntimeError(f"hooks were put on {type(self.module).__name__}, to which rows have adapters added")
        rows = self.current()
        if rows is None or is_merged(self.module) or not (self.added or self.whole or rows.are_recorded):
            return self._call_base(args, kwargs)
        states: Tensor = args[0] if args else next(iter(kwargs.values()))
        is_embedding = not states.is_floating_point()
        shape = states.shape if is_embedding else states.shape[:-1]
        slots = rows.of(shape.numel(), self.base)
        if isinstance(slots, Tensor):  # those of any step to come, whose rows have nothing but the kernel's
            result = self._call_base(args, kwargs)
            if isinstance(self.table, LayerTable):
                result = result.contiguous()
                self._add_on_gpu(states, result, slots, self.table)
            return result
        mine = set(np.unique(slots).tolist())
        if replaced := sorted(mine & self.whole.keys()):
            return self._call_each(states, slots, replaced, args, kwargs)
        result = self._call_base(args, kwargs)
        own = sorted(mine & self.added.keys())
        if own:
            own = self._add_by_kernel(states, result, rows.tensor(slots, result.device), own)
        if own:
            flat = result.reshape(-1, result.shape[-1])
            inputs = states.reshape(-1) if is_embedding else states.reshape(-1, states.shape[-1])
            for slot in own:
                places = to_device(np.flatnonzero(slots == slot), flat.device)
                flat[places] = _with_added(inputs[places], flat[places], self.added[slot], self.base)
            result = flat.view(result.shape)
        return result

    def _add_by_kernel(self, states: Tensor, result: Tensor, slots: Tensor, own: list[int]) -> list[int]:
        """Adds what a kernel takes; returns the slots that it leaves."""
        table = self.table
        try:
            if isinstance(table, LayerTable):
                self._add_on_gpu(states, result, slots, table)
            elif isinstance(kernel := load(result.dtype), str) or not result.is_cpu:
                return own
            else:
                kernel.add(states, result, slots, table, self._bias)
        except InputError:
            return own
        return [slot for slot in own if not table.has(slot)]

    def _add_on_gpu(self, states: Tensor, result: Tensor, slots: Tensor, table: LayerTable) -> None:
        from hf_paged.kernels import triton_adapters

        triton_adapters.add(states, result, slots, table.tables, table.layer, self._bias)

    @property
    def _bias(self) -> Tensor | None:
        bias = getattr(self.base, "bias", None)
        return None if bias is None else bias.detach()

    def _call_base(self, args: Any, kwargs: Any) -> Any:
        if self.base is not self.module:
            return self.base(*args, **kwargs)
        return (self.before or self.module._call_impl)(*args, **kwargs)

    def _call_each(self, states: Tensor, slots: np.ndarray, replaced: list[int], args: Any, kwargs: Any) -> Tensor:
        """Calls what stands in this layer's place for the rows of each adapter, and itself for all others."""
        flat = states.flatten(0, 1) if states.ndim > 1 else states
        result: Tensor | None = None
        for slot in (None, *replaced):
            places = np.flatnonzero(~np.isin(slots, replaced) if slot is None else slots == slot)
            if not len(places):
                continue
            index = to_device(places, states.device)
            part = flat[index][None]
            found = self._call_base((part,), {}) if slot is None else self.whole[slot](part)
            if result is None:
                result = found.new_empty(len(slots), *found.shape[2:])
            result[index] = found[0]
        assert result is not None
        return result.view(*states.shape[:2], *result.shape[1:]) if states.ndim > 1 else result


def added_to(modules: list[nn.Module], states: Tensor) -> Added | None:
    """What is added in a step behind linear layers with these states, or with what becomes of them.

    Args:
        modules: The layers, in the order of `Added.tables`.
        states: `[1, tokens, width]`.

    Raises:
        InputError: Not by the kernel alone.
    """
    found = [own for module in modules if isinstance(own := module.__dict__.get(CALL), AdaptedLayer)]
    if len(tuners_among(modules)) > sum(layer.base is not layer.module for layer in found):
        raise InputError("decoder layer", "PEFT's layers whose own forward is not needed", states=states)
    layers = [layer for layer in found if not is_merged(layer.module)]
    rows = next((rows for layer in layers if (rows := layer.current()) is not None), None)
    if rows is None:
        return None
    if any(layer.whole or layer.num_by_torch or has_hooks(layer.module) for layer in layers):
        raise InputError("decoder layer", "adapters of the kernel's", states=states)
    tables = {id(layer.module): layer.table for layer in layers if isinstance(layer.table, Table)}
    slots = rows.tensor(rows.of(states.shape[1], modules[0]), states.device)
    return Added(slots, [tables.get(id(module), _EMPTY) for module in modules])


def _with_added(states: Tensor, result: Tensor, own: LowRank, base: Any) -> Tensor:
    """A layer's result for rows of one adapter, by torch. Of an embedding, `states` are ids."""
    if not states.is_floating_point():
        more = (own.a.t()[states] @ own.b.t()) * own.scale
        scale = getattr(base, "embed_scale", None)
        result_and_more = result + (more if scale is None else more * scale.to(more.dtype))
        factor = 1 if own.output_scale is None else own.output_scale
        return (factor * result_and_more).to(result.dtype)
    more = nn.functional.linear(nn.functional.linear(states.to(own.a.dtype), own.a), own.b, own.bias) * own.scale
    if own.output_scale is not None:
        bias = getattr(base, "bias", None)
        plain = result if bias is None else result - bias
        return (result + (own.output_scale - 1) * plain + (own.output_scale - 1) * more + more).to(result.dtype)
    return (result + more).to(result.dtype)


@contextmanager
def adapting(layers: list[AdaptedLayer], thread_id: int) -> Iterator[None]:
    """Within it, this thread's forwards call these layers so, around what stands in for them already."""
    try:
        for layer in layers:
            table = layer.module.__dict__
            layer.before = table.get(CALL)
            layer.thread_id = thread_id
            table[CALL] = layer
        yield
    finally:
        for layer in layers:
            table = layer.module.__dict__
            layer.thread_id = None
            if layer.before is None:
                table.pop(CALL, None)
            else:
                table[CALL] = layer.before
            layer.before = None
