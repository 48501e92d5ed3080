"""`Adapters`: which adapters a model has, which of them a call's rows take, and the step's rows while it runs."""

from __future__ import annotations

import copy
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_paged.core.batch import Batch
from hf_paged.kernels.availability import layer_kernels
from hf_paged.kernels.cpu_layers import CPULayers
from hf_paged.kernels.low_rank import LowRank
from hf_paged.kernels.slot_tables import LayerTable, SlotTables
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.streams import let_caller_first, on_steps_stream
from hf_paged.model import peft_layers
from hf_paged.model.adapted_layers import AdaptedLayer, Slots, TokenSlots, adapting
from hf_paged.model.adapter import Adapter, Weights
from hf_paged.model.adapter_files import AdapterWeights, of_base
from hf_paged.model.adapter_store import Adapter as Pinned
from hf_paged.model.adapter_store import AdapterStore
from hf_paged.model.hooks import all_modules
from hf_paged.model.peft_layers import BASE
from hf_paged.model.wrapper import in_steps

MOST_KEPT = 64  # sets of PEFT's adapters that are looked up quickly

Choice = tuple[tuple[str, ...], ...]
"""Of each of PEFT's layers, the names of the adapters that are taken there."""


class Adapters:
    """Of one model. What changes them is called with the pool's lock held.

    Attributes:
        base: The version of the model's own weights, as of the last look.
        why_own_code: Why PEFT's own forwards have to run, with the same adapters for all rows, as of the last look;
            `None`: each row may have its own.
    """

    def __init__(self, is_whole: bool = True, is_compiled: bool = False) -> None:
        """`is_whole`: the model is not split between processes; `is_compiled`: recorded steps are, with PEFT's code."""
        self._is_whole, self._is_compiled = is_whole, is_compiled
        self.why_own_code: str | None = None
        self._layers: list[AdaptedLayer] = []
        self._tuners: list[Any] = []
        self._stepped: set[int] | None = None
        self._sets: OrderedDict[Hashable, Adapter] = OrderedDict()
        self._live: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self._loaded: weakref.WeakValueDictionary[int, Adapter] = weakref.WeakValueDictionary()
        self._named: dict[str, AdaptedLayer] = {}  # layers that loaded adapters name, PEFT's among them
        self._free: list[int] = []
        self._gone: list[tuple[int, Pinned | None]] = []  # of adapters that nothing refers to any more
        self._num_slots = 0
        self._is_as_set = self._has_new = self._has_odd = False
        self._num_moves = 0
        self.base: Hashable = None
        self._odd: set[int] = set()  # slots of which no kernel adds all
        self._tables: SlotTables | None = None
        self._num_tables = 0
        self.store: AdapterStore | None = None
        self._rows: TokenSlots | None = None

    # Which a call takes

    def look(self, model: nn.Module) -> list[nn.Module]:
        """Finds PEFT's layers anew; returns the modules that all rows share, or all, where PEFT's own code runs."""
        self._clear_gone()
        modules = peft_layers.shared_modules(model)
        tuners = peft_layers.tuners_among(modules)
        is_replaced = self._find_named(model, modules)
        if is_replaced or len(tuners) != len(self._tuners) or any(map(operator.is_not, tuners, self._tuners)):
            self._tuners = tuners
            self._stepped = in_steps(model) if tuners else None
            self._sets.clear()
            self._set_layers(model)
        self.why_own_code = peft_layers.why_shared(model, modules, self._is_whole, self._stepped)
        return modules if self.is_by_row else all_modules(model)

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The same modules, as of the last look: any thread may ask."""
        return peft_layers.shared_modules(model) if self.is_by_row else all_modules(model)

    @property
    def is_by_row(self) -> bool:
        """Whether each row may have its own."""
        return self.why_own_code is None

    def replaces(self, module: nn.Module) -> bool:
        """Whether a module's own forward is not called in steps."""
        return self.is_by_row and peft_layers.is_tuner(module)

    def active(self) -> Adapter | None:
        """What PEFT's layers would add now, as `set_adapter` and the like have left them; `None`: nothing.

        Nor where PEFT's own code runs.
        """
        if not self.is_by_row:
            return None
        return self._of(tuple([peft_layers.active_names(layer) for layer in self._tuners]))

    def check(self, names: Sequence[str]) -> None:
        """Raises `ValueError` if there are no adapters of such names."""
        unknown = sorted({str(name) for name in names if not self.knows(name)})
        if unknown:
            raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")

    def knows(self, name: str) -> bool:
        """Whether there is an adapter of this name, of PEFT's or loaded, or it says that there is to be none."""
        return name == BASE or self.is_loaded(name) or any(name in _names(layer) for layer in self._tuners)

    def is_loaded(self, name: str) -> bool:
        """Whether it was loaded by `load`."""
        return self.store is not None and name in self.store

    def named(self, names: Sequence[str], pinned: dict[str, Pinned], model: nn.Module) -> list[Adapter | None]:
        """Those of these names; `"__base__"`: none.

        Args:
            pinned: Those of the store. What is taken out of it is unpinned when nothing refers to it any more.
            model: Whose they are.

        Raises:
            ValueError: There are none of such names, or they can't be chosen by row now.
        """
        self.check([name for name in names if name not in pinned])
        if any(map(peft_layers.is_merged, self._tuners)):
            raise ValueError(
                "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
            )
        found = {
            name: self._of(tuple([peft_layers.own_names(layer, (name,)) for layer in self._tuners]))
            for name in dict.fromkeys(names)
            if name != BASE and name not in pinned
        }
        found |= {name: self._of_store(name, pinned, model) for name in list(pinned)}
        return [found.get(name) for name in names]

    def _of(self, choice: Choice) -> Adapter | None:
        if not any(choice):
            return None
        key = self._key(choice)
        adapter = self._sets.get(key)
        if adapter is not None:
            self._take_over([adapter])
        if adapter is None or adapter.is_gone:
            name = " and ".join(dict.fromkeys(name for names in choice for name in names))
            tuners = self._tuners
            read, find = partial(_read, tuners, choice), partial(_tensors, tuners, choice)
            adapter = self._sets[key] = self._make(name, read, find)
            if len(self._sets) > MOST_KEPT:
                self._sets.popitem(last=False)
        self._sets.move_to_end(key)
        return adapter

    def _key(self, choice: Choice) -> Hashable:
        return choice, tuple([peft_layers.scales(*own) for own in zip(self._tuners, choice, strict=True)])

    def _of_store(self, name: str, pinned: dict[str, Pinned], model: nn.Module) -> Adapter:
        """Takes what is pinned over, but for what has been already: once is enough."""
        own = pinned[name]
        adapter = self._loaded.get(own.uid)
        if adapter is None:
            weights = own.weights
            assert weights is not None
            self._know(model, weights)
            adapter = self._make(own.name, lambda: self._placed(weights), list, ("loaded", own.uid), own)
            adapter.follows_base = bool(weights.magnitudes)
            self._loaded[own.uid] = adapter
            del pinned[name]
        return adapter

    def _make(
        self,
        name: str,
        read: Callable[[], Weights],
        find: Callable[[], list[Tensor]],
        uid: Hashable = None,
        pinned: Pinned | None = None,
    ) -> Adapter:
        self._clear_gone()
        adapter = Adapter(name, read, find, uid)
        adapter.slot = slot = self._free.pop() if self._free else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        weakref.finalize(adapter, self._gone.append, (slot, pinned))
        self._live.add(adapter)
        self._put(adapter)
        return adapter

    def _put(self, adapter: Adapter) -> None:
        added, whole, _ = adapter.weights
        for layer in self._layers:
            place = id(layer.base)
            layer.put(adapter.slot, added.get(place), whole.get(place))
        self._odd.discard(adapter.slot)
        if not all(layer.adds_by_kernel(adapter.slot) for layer in self._layers):
            self._odd.add(adapter.slot)
        if self._tables is not None:
            let_caller_first(self._tables.device)  # some of it may be computed here and now

    def _clear_gone(self) -> None:
        """Frees the slots of adapters that nothing refers to any more."""
        while self._gone:
            slot, pinned = self._gone.pop()
            if pinned is not None and self.store is not None:
                self.store.unpin(pinned)
            for layer in self._layers:
                layer.put(slot, None, None)
            self._free.append(slot)

    def _set_layers(self, model: nn.Module) -> None:
        """Makes a list anew, and not the one that a step is in the middle of."""
        self._num_moves, self._tables = self.num_moves, None
        bases = [peft_layers.inner(each) for each in self._tuners]
        layers = [self._layer(model, *pair) for pair in zip(self._tuners, bases, strict=True)]
        known = {id(layer.base): layer for layer in layers}
        for name, own in self._named.items():
            if (layer := known.get(id(own.base))) is None:
                known[id(own.base)] = layer = self._layer(model, own.base, own.base)
                layers.append(layer)
            self._named[name] = layer
        self._layers = layers
        for adapter in list(self._live):
            self._put(adapter)
        self._note_layers()

    def _layer(self, model: nn.Module, module: nn.Module, base: nn.Module) -> AdaptedLayer:
        """A layer, with its place in the tables, if it is on the GPU that they are for."""
        table: LayerTable | None = None
        weight = next(base.parameters(), None)
        if weight is not None and not isinstance(base, nn.Embedding):
            dtype = getattr(model, "dtype", weight.dtype)
            if self._tables is None and _has_gpu_kernels(dtype, weight.device):
                leaves = sum(not list(own.children()) for own in peft_layers.shared_modules(model))
                with on_steps_stream(weight.device):  # where its memory goes back to, when steps have read it
                    self._tables, self._num_tables = SlotTables(weight.device, dtype, leaves), 0
            tables = self._tables
            if tables is not None and tables.device == weight.device and self._num_tables < tables.num_layers:
                table = LayerTable(tables, self._num_tables)
                self._num_tables += 1
        return AdaptedLayer(module, base, self._current, table)

    def _note_layers(self) -> None:
        """Behind a change of the layers: what was recorded calls others."""
        self._has_odd = any(not isinstance(layer.table, LayerTable) for layer in self._layers[: len(self._tuners)])
        self._num_moves += 1

    # Loaded ones

    def _know(self, model: nn.Module, weights: AdapterWeights) -> None:
        """Prepares the layers that a loaded adapter names, if none has before. A step may be running."""
        known = {id(layer.base): layer for layer in self._layers}
        for name in map(peft_layers.bare_name, (*weights.linears, *weights.embeddings, *weights.saved)):
            if name not in self._named:
                module = peft_layers.find(model, name)
                if (layer := known.get(id(module))) is None:
                    known[id(module)] = layer = self._layer(model, module, module)
                    self._layers = [*self._layers, layer]
                    self._note_layers()
                self._named[name] = layer

    def _find_named(self, model: nn.Module, modules: list[nn.Module]) -> bool:
        """Finds layers that loaded adapters name anew, if they have been replaced; whether any have."""
        if not self._named:
            return False
        known, replaced = set(map(id, modules)), False
        for name in [name for name, layer in self._named.items() if id(layer.base) not in known]:
            with suppress(AttributeError):  # it is gone, and what follows is not called with it
                module = peft_layers.find(model, name)
                self._named[name] = AdaptedLayer(module, module, self._current)
                replaced = True
        for adapter in list(self._loaded.values()) if replaced else []:
            adapter.read_again()
        return replaced

    def _placed(self, weights: AdapterWeights) -> Weights:
        """By the ids of the model's modules, on their devices."""
        added: dict[int, LowRank] = {}
        whole: dict[int, nn.Module] = {}
        for name, own in (*weights.linears.items(), *weights.embeddings.items()):
            module = self._named[peft_layers.bare_name(name)].base
            magnitude = weights.magnitudes.get(name)
            if magnitude is not None and weights.base != self.base:
                own = of_base(own, magnitude, module)
            added[id(module)] = own.to(next(module.parameters()).device)
        for name, tensors in weights.saved.items():
            module = self._named[peft_layers.bare_name(name)].base
            whole[id(module)] = copied = copy.deepcopy(module)
            copied.load_state_dict(tensors)
        return Weights(added, whole, [])

    # While they change

    def note_base(self, version: Hashable) -> None:
        """The model's own weights are of this version: what loaded adapters have computed of them is computed anew."""
        if version == self.base:
            return
        self.base = version
        for adapter in list(self._loaded.values()):
            if adapter.follows_base:
                adapter.read_again()
                self._put(adapter)
                self._has_new = True

    def note_step(self, parameters: list[Tensor]) -> None:
        """An optimizer has stepped that holds these."""
        own = set(map(id, parameters))
        for adapter in list(self._live):
            adapter.is_stepped |= any(id(tensor) in own for tensor in adapter.weights.tensors)

    @property
    def may_move(self) -> bool:
        """Whether there are any whose weights are not ours alone."""
        return bool(self._tuners)

    def have_moved(self, used: Iterable[Adapter]) -> bool:
        """Whether one of these was written to since it was last looked at."""
        return self._has_new or any(map(Adapter.has_moved, used))

    def refresh(self, used: Iterable[Adapter]) -> bool:
        """Takes over what changed of these; whether any adapter has changed since this was last asked."""
        self._take_over(used)
        had_new, self._has_new = self._has_new, False
        return had_new

    def _take_over(self, adapters: Iterable[Adapter]) -> None:
        for adapter in adapters:
            places = adapter.places
            if adapter.refresh():
                self._put(adapter)
                self._has_new = True
                self._num_moves += not self.records_rows and adapter.places != places

    # In a step

    @property
    def records_rows(self) -> bool:
        """Whether recorded steps have the adapters of any rows, which are among their inputs.

        On a GPU, where kernels add what PEFT's layers do; else they have what the model is set to.
        """
        return self._tables is not None and self.is_by_row and not (self._has_odd or self._is_compiled)

    @property
    def num_moves(self) -> int:
        """How often recorded steps became others: layers, or where they find what is added."""
        return self._num_moves + (0 if self._tables is None else self._tables.num_moves)

    def send(self) -> None:
        """Lets what is queued from here on, on the device, find adapters as they are now."""
        if self._tables is not None:
            self._tables.send()

    @torch.inference_mode(False)
    def rehearse(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Launches the kernels as behind each of a model's linear layers, for rows without adapters: what is loaded
        later finds them compiled. Does nothing where there are none.
        """
        if not _has_gpu_kernels(dtype, device):
            return
        from hf_paged.kernels import triton_adapters

        kinds: dict[tuple[bool, ...], tuple[int, int, bool]] = {}  # to Triton sizes are multiples of 16 or not
        for module in peft_layers.shared_modules(model):
            for names in (("in_features", "out_features"), ("nx", "nf")):
                width, columns = (getattr(module, name, None) for name in names)
                if isinstance(width, int) and isinstance(columns, int):
                    has_bias = getattr(module, "bias", None) is not None
                    kinds[width % 16 == 0, columns % 16 == 0, has_bias] = width, columns, has_bias
        tables, slots = SlotTables(device, dtype, 1), to_device(np.full(1, -1, np.int32), device)
        for width, columns, has_bias in kinds.values():
            states, output = (torch.zeros(1, size, dtype=dtype, device=device) for size in (width, columns))
            triton_adapters.add(states, output, slots, tables, 0, output[0].clone() if has_bias else None)

    def why_unrecorded(self, batch: Batch) -> str | None:
        """Why a recorded step doesn't add what a batch's rows have; `None`: it does."""
        if not self.records_rows:
            return None if self._are_set(batch) else "rows with other adapters than the model is set to"
        return None if self._odd.isdisjoint(batch.adapters) else "rows with adapters that torch adds, as of embeddings"

    def _are_set(self, batch: Batch) -> bool:
        """Whether what a batch's rows have is what the model is set to: then PEFT's own forwards are right."""
        slot = -1
        if self._tuners and self.is_by_row:
            choice = tuple([peft_layers.active_names(layer) for layer in self._tuners])
            if any(choice):
                if (active := self._sets.get(self._key(choice))) is None:  # no row has had it yet
                    return False
                slot = active.slot
        return all(own == slot for own in batch.adapters or (-1,))

    @contextmanager
    def recorded(self, *slots: Tensor) -> Iterator[None]:
        """Within it, forwards have the adapters of any slots that will lie there, on the device, at each replay.

        Or, where they can't, what the model is set to, by PEFT's own code.
        """
        if self.records_rows:
            with self.running(slots):
                yield
            return
        self._is_as_set = True
        try:
            yield
        finally:
            self._is_as_set = False

    @contextmanager
    def running(self, slots: Sequence[Slots]) -> Iterator[None]:
        """Within it, the model's modules are called with tokens of these slots; see `TokenSlots`."""
        outer, self._rows = self._rows, TokenSlots(slots)
        if outer is None and not self._rows.are_recorded:
            self.send()
        try:
            yield
        finally:
            self._rows = outer

    def running_some(self, tokens: slice | np.ndarray, *others: np.ndarray) -> AbstractContextManager[None]:
        """Within it, they are called with some of the step's tokens: these, or these others."""
        if self._rows is None:
            return nullcontext()
        return self.running([self._rows.tokens[own] for own in (tokens, *others)])

    def running_padded(self, first_tokens: np.ndarray, *columns: int) -> AbstractContextManager[None]:
        """Within it, they are called with `[rows, columns]`, so many columns or so many.

        Args:
            first_tokens: `[rows]`, one of the tokens of each row.
        """
        return self.running_some(*[np.repeat(first_tokens, number) for number in columns])

    def _current(self) -> TokenSlots | None:
        return self._rows

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within it, this thread's forwards add to each row what is its own."""
        if not self._layers or not self.is_by_row or self._is_as_set:
            if self._rows is not None:
                raise RuntimeError(f"rows have adapters of their own, but now {self.why_own_code}")
            yield
            return
        if self._rows is None and not self._tuners:  # nothing is added, and nothing of PEFT's would be
            yield
            return
        with adapting(self._layers, threading.get_ident()):
            yield


def _has_gpu_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    return not isinstance(layer_kernels(dtype, device), str | CPULayers)


def _names(layer: Any) -> list[str]:
    if peft_layers.is_wrapper(layer):
        return list(layer.modules_to_save)
    return [*layer.lora_A, *layer.lora_embedding_A]


def _read(layers: list[Any], choice: Choice) -> Weights:
    added: dict[int, LowRank] = {}
    whole: dict[int, nn.Module] = {}
    for layer, names in zip(layers, choice, strict=True):
        if not names:
            continue
        place = id(peft_layers.inner(layer))
        if peft_layers.is_wrapper(layer):
            whole[place] = layer.modules_to_save[names[0]]
        else:
            added[place] = peft_layers.added(layer, names)
    return Weights(added, whole, _tensors(layers, choice))


def _tensors(layers: list[Any], choice: Choice) -> list[Tensor]:
    chosen = zip(layers, choice, strict=True)
    return [tensor for layer, names in chosen if names for tensor in peft_layers.tensors_of(layer, names)]
