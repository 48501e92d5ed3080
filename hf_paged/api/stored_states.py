"""What a model's layers keep of all tokens together, and which modules do: noted where these hand it to their cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_paged.api.stored_layers import NotingCache
from hf_paged.memory.spec import StateSpec, StateTensor


@dataclass(slots=True)
class StateNotes:
    """States that a model was seen to store.

    Attributes:
        tensors: Of each layer, by kind and number: shape of one row's, and element type.
        mixers: The classes of the modules that stored them.
        running: The modules whose forwards are running now, outermost first.
    """

    tensors: dict[int, dict[tuple[str, int], tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=dict)
    mixers: set[type[nn.Module]] = field(default_factory=set)
    running: list[nn.Module] = field(default_factory=list)

    def note(self, kind: str, layer: int, index: int, state: Tensor) -> None:
        """A state `[B, ...]` that the innermost running module stored."""
        self.tensors.setdefault(layer, {})[kind, index] = tuple(state.shape[1:]), state.dtype
        if self.running:
            self.mixers.add(type(self.running[-1]))

    def specs(self, dtype: torch.dtype) -> dict[int, StateSpec]:
        """What was noted in a model of this dtype, by layer."""
        return {
            layer: StateSpec(
                tuple(
                    StateTensor(kind, index, shape, None if own is dtype else own)
                    for (kind, index), (shape, own) in sorted(tensors.items())
                )
            )
            for layer, tensors in sorted(self.tensors.items())
        }

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Within it, forwards of a model of ours say which of its modules are running."""

        def begin(module: nn.Module, args: Any) -> None:
            self.running.append(module)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()

        handles = [module.register_forward_pre_hook(begin) for module in model.modules()]
        handles += [module.register_forward_hook(end, always_call=True) for module in model.modules()]
        try:
            yield
        finally:
            self.running.clear()
            for handle in handles:
                handle.remove()


class StateNotingCache(NotingCache):
    """A stock cache that notes the states it is given, too.

    Attributes:
        is_shared: Whether keys were stored under another number than that of the module that stored them.
    """

    def __init__(self, config: PreTrainedConfig, notes: StateNotes) -> None:
        super().__init__(config)
        self._notes = notes
        self.is_shared = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.is_shared |= getattr(self._notes.running[-1], "layer_idx", None) != layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        full: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        self._notes.note("conv", layer_idx, state_idx, self.layers[layer_idx].conv_states[state_idx])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        state: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        self._notes.note("recurrent", layer_idx, state_idx, self.layers[layer_idx].recurrent_states[state_idx])
        return state
