"""Mixers: modules that keep a state of all of a sequence's tokens, and how they see a packed batch.

A mixer (linear attention, a Mamba block, a short convolution) knows no block tables: it takes rows of one length, reads
their states from the cache that it is given, and changes them. Where its convolutions and scans run as our kernels on a
GPU, it is called once for all rows of a step, and these kernels find the states in the pool. Elsewhere it is called for
the rows of one length after the other, over states that are read from the pool before and written back behind it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from hf_paged.attention.cache import StepCache
from hf_paged.attention.context import is_sentinel
from hf_paged.attention.metadata import AttentionMetadata, RecordedMetadata
from hf_paged.attention.padded import PaddedCache
from hf_paged.core.batch import Batch
from hf_paged.kernels.paged_state import StateRows
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.kv_cache import KVCache
from hf_paged.memory.spec import UNIT, StateSpec
from hf_paged.memory.state_cache import LayerStates, StateCache
from hf_paged.model.adapters import Adapters
from hf_paged.model.exact_operations import ExactOperations
from hf_paged.model.module_overrides import ModuleOverride, has_hooks, overriding
from hf_paged.model.scans import PackedScans, find_packed_scans, find_scans, has_chunked_kernels
from hf_paged.model.sharding import ranks_of
from hf_paged.model.traits import ModelTraits

# New tokens of a row that are scanned one by one where a package's kernels would take many together. A guess from their
# latencies (about 1 µs a token and layer beside some 300 µs a launch), which no GPU has timed.
MOST_SCANNED = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step with equally many tokens, side by side; `tokens` says where they are in the packed batch.

    Attributes:
        first_row: Which of the step is the first of them.
        pages: `[rows, pages]` int64 on the device: of their states.
        is_fresh: Whether they have none yet.
    """

    tokens: slice
    num_rows: int
    first_row: int
    pages: Tensor
    is_fresh: bool


class StateStep:
    def __init__(
        self, kv_cache: KVCache, traits: ModelTraits, rows: StateRows | None, lay_out: Callable[[], list[_Part]]
    ) -> None:
        """Runs mixers for all rows, or for one part after the other, which are in the order of the packed batch.

        Args:
            rows: All of the step; `None`: mixers run part by part.
            lay_out: Gives the parts.
        """
        assert kv_cache.states is not None
        self._cache = kv_cache.states
        self._specs = traits.states
        self._rows = rows
        self._lay_out = lay_out
        self._parts: list[_Part] = []
        self._layer = -1  # that of the last mixer, and what it made of the rows' states, by their first row
        self._held: dict[int, tuple[LinearAttentionLayer, LayerStates]] = {}

    @classmethod
    def of(
        cls,
        batch: Batch,
        traits: ModelTraits,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rows: np.ndarray | None = None,
    ) -> Self | None:
        """The states of a batch's rows, or of these rows of it, whose lengths metadata says; `None`: it keeps none."""
        if not traits.states:
            return None
        pages = np.frombuffer(batch.state_blocks, np.int32).reshape(batch.num_seqs, -1).astype(np.int64)
        numbers = batch.starts, batch.query_lens, batch.nums_at_once
        starts, query_lens, nums_at_once = (np.frombuffer(a, np.int64) for a in numbers)
        if rows is not None:
            pages, starts, query_lens, nums_at_once = (a[rows] for a in (pages, starts, query_lens, nums_at_once))
        own = to_device(pages, kv_cache.device)

        def lay_out() -> list[_Part]:
            return _parts_of(traits, own, starts, query_lens, nums_at_once)

        return cls(kv_cache, traits, _all_rows(own, nums_at_once, metadata), lay_out)

    @classmethod
    def in_null_block(cls, traits: ModelTraits, kv_cache: KVCache, metadata: AttentionMetadata) -> Self | None:
        """The states of rows that have no sequence, which are written to the null block."""
        if kv_cache.states is None:
            return None
        lens, query_lens = metadata.host_seq_lens, metadata.host_query_lens
        pages = to_device(np.full((len(lens), kv_cache.states.num_pages), kv_cache.null_block), kv_cache.device)

        def lay_out() -> list[_Part]:
            return _parts_of(traits, pages, lens - query_lens, query_lens, lens)

        return cls(kv_cache, traits, _all_rows(pages, lens, metadata), lay_out)

    @classmethod
    def at(
        cls,
        traits: ModelTraits,
        kv_cache: KVCache,
        pages: Tensor,
        nums_at_once: Tensor,
        metadata: RecordedMetadata,
    ) -> Self | None:
        """The states of rows whose pages and lengths tensors on the device say, also for later steps."""
        if kv_cache.states is None:
            return None

        def lay_out() -> list[_Part]:
            num_rows = len(pages)
            assert metadata.max_query_len == 1, "only rows of one length each can be recorded part by part"
            return [_Part(slice(0, num_rows), num_rows, 0, pages, False)]

        return cls(kv_cache, traits, _all_rows(pages, nums_at_once, metadata), lay_out)

    def run(self, mixer: _Mixer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a mixer returns for the packed batch.

        Args:
            mixer: Computes all rows, or one part after the other.
            args: As it was called with, the cache of a step and tensors `[1, T, ...]` among them.
        """
        layer = mixer.module.layer_idx
        if self._rows is not None and (scans := mixer.packed_scans(self._specs[layer], self._cache, self._rows)):
            self._layer = -1  # other mixers of the layer read their states anew
            own, given = _told_no_mask(args), {name: _told_no_mask(value) for name, value in kwargs.items()}
            return scans.run(mixer.module, self._cache.in_place(layer, self._rows), *own, **given)
        self._parts = self._parts or self._lay_out()
        num_tokens = self._parts[-1].tokens.stop
        if layer != self._layer:
            self._layer = layer
            self._held.clear()
        outputs = [self._run_part(part, mixer, num_tokens, args, kwargs) for part in self._parts]
        if not isinstance(outputs[0], tuple):
            return _joined(outputs)
        return tuple(_joined(list(values)) for values in zip(*outputs, strict=True))

    def _run_part(self, part: _Part, mixer: Any, num_tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a mixer for some rows, with `[1, tokens, ...]` of them."""
        own, states = self._states(part)
        cache = Cache(layers=[own] * (self._layer + 1))
        num_rows, length = part.num_rows, (part.tokens.stop - part.tokens.start) // part.num_rows

        def of_part(value: Any) -> Any:
            if isinstance(value, Tensor):
                if is_sentinel(value):
                    return None
                if value.shape[:2] == (1, num_tokens):
                    return value[0, part.tokens].unflatten(0, (num_rows, -1))
            elif isinstance(value, StepCache | PaddedCache):
                return cache
            elif type(value) is tuple:
                return tuple(of_part(item) for item in value)
            return value

        with mixer.adapters.running_some(part.tokens):
            output = mixer.compute_rows(*map(of_part, args), **{n: of_part(value) for n, value in kwargs.items()})
        store(own, states)
        self._cache.write(self._layer, part.pages, states)
        shape = num_rows, length
        return _mapped(output, lambda value: value.flatten(0, 1)[None] if value.shape[:2] == shape else value)

    def _states(self, part: _Part) -> tuple[LinearAttentionLayer, LayerStates]:
        """The states of a part's rows in the layer that is computed, as the mixers of this step have left them."""
        held = self._held.get(part.first_row)
        if held is None:
            if part.is_fresh and self._rows is None:
                states = self._cache.empty(self._layer, part.num_rows)
            else:  # also that of other mixers of the layer, who may have run for all rows
                states = self._cache.read(self._layer, part.pages)
            held = layer_with(self._specs[self._layer], None if part.is_fresh else states), states
            self._held[part.first_row] = held
        return held


def _all_rows(pages: Tensor, nums_at_once: np.ndarray | Tensor, metadata: AttentionMetadata) -> StateRows | None:
    """All rows of a step at once, on a GPU; `None`: part by part."""
    if not takes_all_rows(pages.device):
        return None
    if isinstance(nums_at_once, np.ndarray):
        nums_at_once = to_device(nums_at_once.astype(np.int32), pages.device)
    longest = metadata.max_query_len
    has_padding = metadata.is_recorded and longest > 1
    lens = metadata.seq_lens, metadata.query_start_loc, nums_at_once
    is_long = longest > MOST_SCANNED and not metadata.is_recorded
    return StateRows(pages, *lens, longest == 1, is_long, has_padding)


def takes_all_rows(device: torch.device) -> bool:
    """Whether there may be kernels that find states in a pool there."""
    return device.type == "cuda"


def _told_no_mask(value: Any) -> Any:
    """The value with the sentinel, a mask by which a mixer would zero padding, replaced by `None`; also in a tuple."""
    if type(value) is tuple:
        return tuple(map(_told_no_mask, value))
    return None if isinstance(value, Tensor) and is_sentinel(value) else value


def _parts_of(
    traits: ModelTraits, pages: Tensor, starts: np.ndarray, query_lens: np.ndarray, nums_at_once: np.ndarray
) -> list[_Part]:
    """Lays out a step.

    Args:
        pages: `[S, pages]` int64 on the device, of each row.
        starts: `[S]` int64, tokens of each row before the step; without any it has no state.
        query_lens: `[S]` int64, its tokens in the step.
        nums_at_once: `[S]` int64, index behind the last of its tokens that came together with others.
    """
    # Of each row how many tokens are computed at once; the rest one by one.
    at_once = query_lens.copy()
    if query_lens.max() > 1:
        if traits.forms_differ:  # tokens that came one by one are so computed again
            at_once = np.clip(nums_at_once - starts, np.where(starts > 0, 0, 1), query_lens)
        if not traits.carries_state:
            at_once[starts > 0] = 0
    at_once[query_lens == 1] = 1
    first_tokens = np.concatenate(([0], np.cumsum(query_lens)))
    kinds = np.stack([at_once, query_lens, starts > 0])
    edges = np.nonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0))[0] + 1
    parts: list[_Part] = []
    for rows in np.split(np.arange(len(starts)), edges):
        first, last = int(rows[0]), int(rows[-1]) + 1
        if at_once[first] == query_lens[first]:
            tokens = slice(int(first_tokens[first]), int(first_tokens[last]))
            parts.append(_Part(tokens, last - first, first, pages[first:last], bool(starts[first] == 0)))
            continue
        for row in rows:
            token, end = int(first_tokens[row]), int(first_tokens[row + 1])
            length = int(at_once[row])
            is_fresh = bool(starts[row] == 0)
            while token < end:
                length = max(length, 1)
                parts.append(_Part(slice(token, token + length), 1, int(row), pages[row : row + 1], is_fresh))
                token, length, is_fresh = token + length, 1, False
    return parts


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes a tensor, or all of them in a tuple; leaves anything else as it is."""
    if isinstance(value, Tensor):
        return change(value)
    return tuple(_mapped(item, change) for item in value) if type(value) is tuple else value


def _joined(values: list[Any]) -> Any:
    return torch.cat(values, dim=1) if len(values) > 1 and isinstance(values[0], Tensor) else values[0]


def _run_padded(cache: PaddedCache, mixer: _Mixer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a mixer for padded rows: computes them packed, with zeros at padding."""
    given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    shape, real = given.shape[:2], cache.real

    def packed(value: Tensor) -> Tensor:
        if value.shape[:2] != shape:
            return value
        flat = value.flatten(0, 1)
        return (flat if real is None else flat.index_select(0, real))[None]

    def padded(value: Tensor) -> Tensor:
        if real is None:
            return value[0].unflatten(0, shape)
        return value.new_zeros(shape.numel(), *value.shape[2:]).index_copy(0, real, value[0]).unflatten(0, shape)

    own = {name: _mapped(value, packed) for name, value in kwargs.items()}
    with mixer.adapters.running_some(slice(None) if real is None else real.numpy(force=True)):
        output = cache.states.run(mixer, _mapped(args, packed), own)
    return _mapped(output, padded)


class PaddedStates:
    """The states of a caller's rows in one padded forward, as the layers of its cache.

    Attributes:
        layers: Of the cache, by number; what keeps no state is empty.
    """

    def __init__(
        self, cache: StateCache, specs: dict[int, StateSpec], pages: Tensor, is_fresh: np.ndarray, num_layers: int
    ) -> None:
        """Reads the states of the rows.

        Args:
            pages: `[B, pages]` int64 on the device, of each row.
            is_fresh: `[B]`, whether a row has none yet. Beside others that have one, it begins with zeros.
        """
        self._cache, self._pages = cache, pages
        self._held: dict[int, tuple[LinearAttentionLayer, LayerStates]] = {}
        fresh = None if is_fresh.all() or not is_fresh.any() else to_device(np.nonzero(is_fresh)[0], pages.device)
        for layer, spec in specs.items():
            states = cache.empty(layer, len(pages)) if is_fresh.all() else cache.read(layer, pages)
            if fresh is not None:
                states.buffer.index_fill_(0, fresh, 0)
            self._held[layer] = layer_with(spec, None if is_fresh.all() else states), states
        self.layers: list[Any] = [
            self._held[index][0] if index in self._held else DynamicLayer() for index in range(num_layers)
        ]

    def write_back(self) -> None:
        """Writes what the forward made of them to the pool."""
        for layer, (own, states) in self._held.items():
            store(own, states)
            self._cache.write(layer, self._pages, states)


def layer_with(spec: StateSpec, states: LayerStates | None) -> LinearAttentionLayer:
    """A layer of a cache that holds some states, which it changes in place; `None`: none yet."""
    layer = LinearAttentionLayer(number_of_states=spec.number_of_states)
    if states is None:
        return layer
    for tensor, state in states.tensors:
        if tensor.kind == "conv":
            layer.conv_states[tensor.index] = state
            layer.is_conv_states_initialized[tensor.index] = True
            layer.conv_kernel_size[tensor.index] = state.shape[-1]
            layer.dtype, layer.device = state.dtype, state.device
        else:
            layer.recurrent_states[tensor.index] = state
            layer.is_recurrent_states_initialized[tensor.index] = True
    layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
    return layer


def store(layer: LinearAttentionLayer, states: LayerStates) -> None:
    """Takes over what a layer holds now."""
    for tensor, state in states.tensors:
        held = (layer.conv_states if tensor.kind == "conv" else layer.recurrent_states)[tensor.index]
        if held is not None and held is not state:  # of another mixer of the layer, which is still to come
            state.copy_(held)


class _Scans:
    """What there is for the mixers of one class.

    Attributes:
        why_by_part: Why they run part by part where others run for all rows; empty: they don't.
    """

    def __init__(self, mixer: nn.Module, is_split: bool) -> None:
        """Looks at one of them. `is_split`: the model is shared out between ranks, who would have to agree."""
        is_here = next((p.is_cpu for p in mixer.parameters()), False)
        self.changed = find_scans(mixer) if is_here else None
        self._is_split = is_split
        self._packed: dict[tuple[torch.dtype, int], PackedScans | None] = {}
        self.why_by_part = "weights are split between processes" if is_split and not is_here else ""

    def packed(self, mixer: nn.Module, spec: StateSpec, cache: StateCache) -> PackedScans | None:
        """For all rows of steps over these pages; looked for when it is first asked for."""
        if self._is_split:
            return None
        key = next(mixer.parameters()).dtype, cache.layout.page_units
        if key not in self._packed:
            found = find_packed_scans(mixer, spec, cache.layout.page_units * UNIT)
            if found is None:
                return None
            self.why_by_part = found if isinstance(found, str) else ""
            self._packed[key] = None if isinstance(found, str) else found
        return self._packed[key]

    def look_up(self) -> None:
        """Takes what else is used from the classes' files as they are now."""
        for own in (self.changed, *self._packed.values()):
            if own is not None:
                own.look_up()


class _Mixer(ModuleOverride):
    is_needed = True

    __slots__ = ("adapters", "scans")

    def __init__(self, module: Any, scans: _Scans, adapters: Adapters) -> None:
        """`scans`: forwards of its class to run in place of its own one."""
        super().__init__(module)
        self.scans, self.adapters = scans, adapters

    def packed_scans(self, spec: StateSpec, cache: StateCache, rows: StateRows) -> PackedScans | None:
        """What runs it for all rows of a step over these pages, as it is now; `None`: it runs part by part."""
        if not self.is_own or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
            return None
        scans = self.scans.packed(self.module, spec, cache)
        is_slower = scans is not None and rows.is_long and scans.package and has_chunked_kernels(scans.package)
        return None if is_slower else scans

    @property
    def is_own(self) -> bool:
        module = self.module
        return "forward" not in module.__dict__ and type(module).forward is self.own and not has_hooks(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((c for c in (*args, *kwargs.values()) if isinstance(c, StepCache | PaddedCache)), None)
        if cache is None or cache.states is None:
            return self.compute_rows(*args, **kwargs)
        if isinstance(cache, PaddedCache):
            return _run_padded(cache, self, args, kwargs)
        return cache.states.run(self, args, kwargs)

    def compute_rows(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for rows of one length."""
        module, changed = self.module, self.scans.changed
        if changed is None or not self.is_own or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return module._call_impl(*args, **kwargs)
        with ExactOperations():
            return changed.run(module, *args, **kwargs)


class Mixers:
    def __init__(self, model: nn.Module, kinds: tuple[type[nn.Module], ...], adapters: Adapters) -> None:
        """Finds the mixers, which are of these classes, at the first `scope`. The model is held weakly."""
        self._adapters = adapters
        self._model = weakref.ref(model)
        self._kinds = kinds
        self._found: list[_Mixer] | None = None
        self._scans: dict[type[nn.Module], _Scans] = {}

    def scope(self) -> AbstractContextManager[object]:
        """Within it, forwards of a step call them as `StateStep` does."""
        if self._found is None:
            model = self._model()
            modules: Iterator[nn.Module] = iter(()) if model is None or not self._kinds else model.modules()
            mixers = [module for module in modules if type(module) in self._kinds]
            is_split = model is not None and ranks_of(model) is not None
            self._scans = {kind: _Scans(mixer, is_split) for kind, mixer in {type(m): m for m in mixers}.items()}
            self._found = [_Mixer(mixer, self._scans[type(mixer)], self._adapters) for mixer in mixers]
        for scans in self._scans.values():
            scans.look_up()
        return overriding(self._found)

    @property
    def by_part(self) -> dict[str, str]:
        """Classes of those that run part by part where others run for all rows, and why."""
        return {kind.__name__: scans.why_by_part for kind, scans in self._scans.items() if scans.why_by_part}

    def run_all_rows(self, specs: dict[int, StateSpec], cache: StateCache) -> bool:
        """Whether all of them run once a step, for all rows over these pages. Call it after the first `scope`."""
        return self._found is not None and all(
            mixer.is_own and mixer.scans.packed(mixer.module, specs[mixer.module.layer_idx], cache) is not None
            for mixer in self._found
        )
