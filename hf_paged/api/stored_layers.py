"""What each layer of a model caches: noted where the model hands it to its cache, in a forward without numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_paged.memory.spec import AttentionSpec


class NotingCache(DynamicCache):
    """A stock cache that notes the shapes of what it is given.

    Attributes:
        noted: Of each layer that stored something: heads and width of its keys, heads and width of its values.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.noted: dict[int, tuple[int, int, int, int]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.noted[layer_idx] = (*key_states.shape[1::2], *value_states.shape[1::2])
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states


def on_meta(base: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The whole model, without numbers."""
    with torch.device("meta"):  # in the dtype that grouped matrix products take
        return base._from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()


class _Zeros(TorchDispatchMode):
    """Within it what looks at a number of a tensor on the meta device finds a zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        if func is aten.nonzero.default and args[0].is_meta:
            return torch.empty(0, args[0].ndim, dtype=torch.int64, device="meta")
        if func is aten.equal.default and args[0].is_meta:
            return args[0].shape == args[1].shape
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def noted_on_meta(model: PreTrainedModel) -> Mapping[int, tuple[int, int, int, int]]:
    """What a model without numbers stores of two tokens; see `NotingCache.noted`.

    Raises:
        Exception: Whatever its forward raises.
    """
    cache = NotingCache(model.config)
    with torch.device("meta"), _Zeros():
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), past_key_values=cache, use_cache=True)
    return cache.noted


def specs(noted: Mapping[int, tuple[int, int, int, int]]) -> tuple[AttentionSpec, ...] | str:
    """What was noted as one spec a layer, or why that can't be."""
    if sorted(noted) != list(range(len(noted))) or not noted:
        return f"its layers {sorted(noted)} store keys and values, not all from the first on"
    layers = []
    for index in range(len(noted)):
        heads, key_dim, value_heads, value_dim = noted[index]
        if heads != value_heads:
            return f"layer {index} stores {heads} heads of keys and {value_heads} of values"
        layers.append(AttentionSpec(heads, key_dim, value_dim))
    return tuple(layers)


def stated_windows(config: PreTrainedConfig, num_layers: int) -> list[int | None]:
    """The window that a config states for each of its first layers."""
    window = getattr(config, "sliding_window", None)
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers)
    if not isinstance(window, int) or window < 1 or len(kinds) < num_layers:
        return [None] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds[:num_layers]]


def with_windows(layers: tuple[AttentionSpec, ...], model: PreTrainedModel) -> tuple[AttentionSpec, ...]:
    """The layers with the windows that the config states and their modules don't gainsay."""
    windows = stated_windows(model.config, len(layers))
    context = getattr(model.config, "max_position_embeddings", None) or math.inf
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and 0 <= index < len(windows):
            own = getattr(module, "sliding_window", windows[index])
            windows[index] = own if own == windows[index] else None
    return tuple(
        replace(layer, window=window if window is not None and window < context else None)
        for layer, window in zip(layers, windows, strict=True)
    )
