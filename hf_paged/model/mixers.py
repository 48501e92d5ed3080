"""Mixers: modules that keep a state of all of a sequence's tokens, and how they see a packed batch.

A mixer (linear attention, a Mamba block, a short convolution) knows no block tables: it takes rows of one length, reads
their states from the cache that it is given, and changes them. So within a step each is called for the rows of one
length after the other, over states that are read from the pool before and written back behind it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from hf_paged.attention.cache import StepCache
from hf_paged.attention.context import is_sentinel
from hf_paged.core.batch import Batch
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.spec import StateSpec
from hf_paged.memory.state_cache import LayerStates, StateCache
from hf_paged.model.module_overrides import ModuleOverride, overriding


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step with equally many tokens, side by side.

    Attributes:
        tokens: Where they are in the packed batch.
        num_rows: How many rows.
        pages: `[rows, pages]` int64 on the device: of their states.
        is_fresh: They have none yet.
    """

    tokens: slice
    num_rows: int
    pages: Tensor
    is_fresh: bool


class StateStep:
    """The states of one step's rows.

    Attributes:
        specs: Of each layer that has one.
    """

    def __init__(
        self,
        cache: StateCache,
        specs: dict[int, StateSpec],
        pages: np.ndarray,
        starts: np.ndarray,
        query_lens: np.ndarray,
        device: torch.device,
        carries: bool,
    ) -> None:
        """Lays out a step.

        Args:
            cache: Where states are.
            specs: Of each layer that has one.
            pages: `[S, pages]` int64, of each row.
            starts: `[S]` int64, tokens of each row before the step; without any it has no state.
            query_lens: `[S]` int64, its tokens in the step.
            device: Where the model runs.
            carries: Whether mixers take a state along into several tokens; if not, only into single ones.
        """
        self._cache = cache
        self.specs = specs
        self._parts: list[_Part] = []
        kinds = np.stack([query_lens, starts > 0])
        edges = np.nonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0))[0] + 1
        first_tokens = np.concatenate(([0], np.cumsum(query_lens)))
        own = to_device(pages, device)
        for rows in np.split(np.arange(len(starts)), edges):
            first, last = int(rows[0]), int(rows[-1]) + 1
            is_fresh, length = starts[first] == 0, int(query_lens[first])
            if is_fresh or length == 1 or carries:
                tokens = slice(int(first_tokens[first]), int(first_tokens[last]))
                self._parts.append(_Part(tokens, last - first, own[first:last], bool(is_fresh)))
                continue
            for token in range(int(first_tokens[first]), int(first_tokens[last])):
                row = first + (token - int(first_tokens[first])) // length
                self._parts.append(_Part(slice(token, token + 1), 1, own[row : row + 1], False))

    @classmethod
    def of(
        cls, batch: Batch, cache: StateCache, specs: dict[int, StateSpec], device: torch.device, carries: bool
    ) -> StateStep:
        """The states of a batch's rows."""
        pages = np.frombuffer(batch.state_blocks, np.int32).reshape(batch.num_seqs, -1).astype(np.int64)
        starts, query_lens = (np.frombuffer(a, np.int64) for a in (batch.starts, batch.query_lens))
        return cls(cache, specs, pages, starts, query_lens, device, carries)

    def run(self, mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a mixer returns for the packed batch.

        Args:
            mixer: Called once for each part.
            args: As it was called with, a `StepCache` and tensors `[1, T, ...]` among them.
            kwargs: The same by name.
        """
        layer, num_tokens = mixer.layer_idx, self._parts[-1].tokens.stop
        outputs = [self._run_part(part, mixer, layer, num_tokens, args, kwargs) for part in self._parts]
        if isinstance(outputs[0], tuple):
            return torch.cat([output[0] for output in outputs], dim=1), *outputs[0][1:]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _run_part(
        self, part: _Part, mixer: Any, layer: int, num_tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        spec = self.specs[layer]
        states = self._cache.empty(layer, part.num_rows) if part.is_fresh else self._cache.read(layer, part.pages)
        own = layer_with(spec, None if part.is_fresh else states)
        cache = Cache(layers=[own] * (layer + 1))

        def of_part(value: Any) -> Any:
            if isinstance(value, Tensor):
                if is_sentinel(value):
                    return None
                if value.shape[:2] == (1, num_tokens):
                    return value[0, part.tokens].unflatten(0, (part.num_rows, -1))
            elif isinstance(value, StepCache):
                return cache
            elif type(value) is tuple:
                return tuple(of_part(item) for item in value)
            return value

        output = mixer._call_impl(*map(of_part, args), **{name: of_part(value) for name, value in kwargs.items()})
        store(own, states)
        self._cache.write(layer, part.pages, states)
        if isinstance(output, tuple):
            return output[0].flatten(0, 1)[None], *output[1:]
        return output.flatten(0, 1)[None]


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
        if held is not state:
            state.copy_(held)


class _Mixer(ModuleOverride):
    """A mixer that is called with the cache of a step."""

    is_needed = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = next((c.states for c in (*args, *kwargs.values()) if isinstance(c, StepCache)), None)
        if step is None:
            return self.module._call_impl(*args, **kwargs)
        return step.run(self.module, args, kwargs)


class Mixers:
    """The mixers of a model."""

    def __init__(self, model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
        """Finds them.

        Args:
            model: Held weakly.
            kinds: Their classes.
        """
        self._model = weakref.ref(model)
        self._kinds = kinds
        self._found: list[_Mixer] | None = None

    def scope(self) -> AbstractContextManager[None]:
        """Within it, forwards of a step call them as `StateStep` does."""
        if self._found is None:
            model = self._model()
            modules: Iterator[nn.Module] = iter(()) if model is None or not self._kinds else model.modules()
            self._found = [_Mixer(module) for module in modules if type(module) in self._kinds]
        return overriding(self._found)
