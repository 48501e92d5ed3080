"""What each layer of a model caches: noted where the model hands it to its cache, in a forward without numbers."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_paged.api.shrinking import stated
from hf_paged.memory.spec import AttentionSpec
from hf_paged.model.cache_argument import cache_argument
from hf_paged.model.wrapper import inner_path

Layers = tuple[AttentionSpec | None, ...]
Noted = dict[int, tuple[int, int, int, int]]


class NotingCache(DynamicCache):
    """A stock cache that notes the shapes of what it is given.

    Attributes:
        noted: Of each layer that stored something: heads and width of its keys, heads and width of its values.
        is_asked: Whether a layer has asked how much is cached.
        indexed: Of each layer whose indexer stored something: one head, the width of its keys, one head, nothing.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.config = config.get_text_config(decoder=True)
        self.noted: Noted = {}
        self.indexed: Noted = {}
        self.is_asked = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.noted[layer_idx] = (*key_states.shape[1::2], *value_states.shape[1::2])
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        self.is_asked |= layer_idx is not None
        length: int = super().get_seq_length(layer_idx or 0)
        return length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx)  # not for a layer, but for its mask

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        if indexer_key_states.ndim != 3:
            raise ValueError(f"an indexer's keys are of {indexer_key_states.ndim} dimensions, not 3")
        self.indexed[layer_idx] = (1, indexer_key_states.shape[-1], 1, 0)
        states: Tensor = super().update_indexer(indexer_key_states, layer_idx)
        return states


def on_meta(base: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The whole model, without numbers."""
    with torch.device("meta"):  # in the dtype that grouped matrix products take
        return base._from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()


NotesT = TypeVar("NotesT", bound=NotingCache)


class _Zeros(TorchDispatchMode):
    """Within it what looks at a number of a tensor on the meta device finds a zero, or that it is true."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype is torch.bool else torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        if func is aten.nonzero.default and args[0].is_meta:
            return torch.empty(0, args[0].ndim, dtype=torch.int64, device="meta")
        if func is aten._to_copy.default and args[0].is_meta and (kwargs or {}).get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def noted_on_meta(model: PreTrainedModel, make_cache: Callable[[PreTrainedConfig], NotesT]) -> NotesT:
    """What a model without numbers stores of two tokens, in a cache that notes it.

    Raises:
        Exception: Whatever its forward raises.
    """
    inputs = {"input_ids": torch.zeros(1, 2, dtype=torch.int64, device="meta")}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = inputs["input_ids"]
    for looking in (nullcontext(), _Zeros()):  # some look at numbers, some check those that they make
        cache: Any = make_cache(model.config)
        try:
            with torch.device("meta"), looking:
                model(**inputs, **{cache_argument(type(model).forward): cache}, use_cache=True)
            return cache  # type: ignore[no-any-return]
        except Exception as error:
            failure = error
    raise failure


def specs(cache: NotingCache) -> tuple[Layers, Layers] | str:
    """What was noted as one spec a layer (`None`: it stores nothing), and one for its indexer; or why that can't be."""
    num_layers = max(stated(cache.config, "num_hidden_layers") or 0, 1 + max(cache.noted, default=0))
    if not cache.noted:
        return "its layers store no keys and values"
    for index, (heads, _, value_heads, _) in cache.noted.items():
        if heads != value_heads:
            return f"layer {index} stores {heads} heads of keys and {value_heads} of values"
    return _listed(cache.noted, num_layers), _listed(cache.indexed, num_layers) if cache.indexed else ()


def _listed(noted: Noted, num_layers: int) -> Layers:
    found = {index: AttentionSpec(heads, key_dim, value_dim) for index, (heads, key_dim, _, value_dim) in noted.items()}
    return tuple(found.get(index) for index in range(num_layers))


def with_windows(layers: Layers, config: PreTrainedConfig) -> Layers:
    """The layers with the windows and chunks that the config states."""
    context = stated(config, "max_position_embeddings") or math.inf
    window, chunk = (stated(config, name) or math.inf for name in ("sliding_window", "attention_chunk_size"))
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers))
    found = list(layers)
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        if layer is not None and kind == "sliding_attention" and window < context:
            found[index] = replace(layer, window=int(window))
        if layer is not None and kind == "chunked_attention" and chunk < context:
            found[index] = replace(layer, window=int(chunk), chunk=int(chunk))
    return tuple(found)


def with_latents(layers: Layers) -> Layers:
    """The layers, those of one head as ones that cache latents: whether they do shows when that is tried."""
    return tuple(
        replace(layer, is_latent=True) if layer is not None and layer.kv_heads == 1 else layer for layer in layers
    )


def as_their_modules_say(layers: Layers, model: PreTrainedModel) -> Layers:
    """The layers without those windows that their modules gainsay."""
    found = list(layers)
    for module in model.get_submodule(inner_path(model) or "").modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(found):
            continue
        layer = found[index]
        if layer is not None and getattr(module, "sliding_window", layer.window) != layer.window:
            found[index] = replace(layer, window=None, chunk=None)
    return tuple(found)
