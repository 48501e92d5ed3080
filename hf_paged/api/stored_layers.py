"""Notes what each layer of a model gives to its cache, of each token and of all tokens together."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_paged.api.shrinking import stated
from hf_paged.memory.spec import AttentionSpec, StateSpec, StateTensor
from hf_paged.model.cache_argument import cache_argument
from hf_paged.model.wrapper import inner_path

Layers = tuple[AttentionSpec | None, ...]
Noted = dict[int, tuple[int, int, int, int]]


class NotingCache(DynamicCache):
    """A stock cache that notes what it is given, within `noting`.

    Attributes:
        noted: Of each layer that stored keys: their heads and width, then the values' heads and width.
        indexed: Of each layer whose indexer stored something: one head, the width of its keys, one head, nothing.
        states: Of each layer that stored states, by kind and number: shape of one row's, and element type.
        is_asked: Whether a layer has asked how much is cached.
        is_shared: Whether keys were stored under another number than that of the module that stored them.
    """

    def __init__(self, config: PreTrainedConfig, is_cross: bool = False) -> None:
        super().__init__(config=None if is_cross else config)
        self.config = config.get_text_config(decoder=True)
        self.noted: Noted = {}
        self.indexed: Noted = {}
        self.states: dict[int, dict[tuple[str, int], tuple[tuple[int, ...], torch.dtype]]] = {}
        self.mixers: set[type[nn.Module]] = set()
        self.is_asked = self.is_shared = False
        self.running: list[nn.Module] = []  # the modules whose forwards are running now, outermost first

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.noted[layer_idx] = (*key_states.shape[1::2], *value_states.shape[1::2])
        self.is_shared |= getattr(self.running[-1], "layer_idx", layer_idx) != layer_idx
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

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        full: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        self._note_state("conv", layer_idx, state_idx, self.layers[layer_idx].conv_states[state_idx])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        state: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        self._note_state("recurrent", layer_idx, state_idx, self.layers[layer_idx].recurrent_states[state_idx])
        return state

    def _note_state(self, kind: str, layer: int, index: int, state: Tensor) -> None:
        self.states.setdefault(layer, {})[kind, index] = tuple(state.shape[1:]), state.dtype
        self.mixers.add(type(self.running[-1]))


@contextmanager
def noting(model: PreTrainedModel, is_cross: bool = False) -> Iterator[NotingCache]:
    """An empty cache for forwards of this model, and within it, hooks that tell the cache which modules are running.

    Args:
        is_cross: It is for what an encoder has read, which layers see all of.
    """
    cache = NotingCache(model.config, is_cross)

    def begin(module: nn.Module, _: Any) -> None:
        cache.running.append(module)

    def end(*_: Any) -> None:
        cache.running.pop()

    handles = [module.register_forward_pre_hook(begin) for module in model.modules()]
    handles += [module.register_forward_hook(end, always_call=True) for module in model.modules()]
    try:
        yield cache
    finally:
        cache.running.clear()
        for handle in handles:
            handle.remove()


def keeps_states(config: PreTrainedConfig) -> bool:
    return any(hasattr(layer, "recurrent_states") for layer in DynamicCache(config=config).layers)


def on_meta(base: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Makes the whole model on the meta device, where it has no numbers."""
    with torch.device("meta"):  # in the dtype that grouped matrix products take
        return base._from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()


class Zeros(TorchDispatchMode):
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
def noted_on_meta(model: PreTrainedModel) -> NotingCache:
    """Runs two tokens through a model without numbers; returns the cache, which has noted what layers stored.

    Raises:
        Exception: Whatever its forward raises.
    """
    inputs = {"input_ids": torch.zeros(1, 2, dtype=torch.int64, device="meta")}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = inputs["input_ids"]
    for looking in (nullcontext(), Zeros()):  # some look at numbers, some check those that they make
        try:
            with noting(model) as cache, torch.device("meta"), looking:
                past: Any = {cache_argument(type(model).forward): cache}
                model(**inputs, **past, use_cache=True)
            return cache
        except Exception as error:
            failure = error
    raise failure


@dataclass(frozen=True, slots=True)
class Stored:
    """The specs of a model's caching layers.

    Attributes:
        layers: For each layer, of the cache of single tokens; `None`: the layer has none.
        indexers: The same of the layers' indexers; empty if no layer has one.
        states: Of the states that layers keep of all tokens together, by the layer's number.
    """

    layers: Layers
    indexers: Layers
    states: dict[int, StateSpec]

    @classmethod
    def of(cls, cache: NotingCache, dtype: torch.dtype) -> Stored | str:
        """The specs of noted layers in a model of this dtype, or why they can't be in the pool."""
        if not cache.noted and not cache.states:
            return "its layers store no keys and values"
        for index, (heads, _, value_heads, _) in cache.noted.items():
            if heads != value_heads:
                return f"layer {index} stores {heads} heads of keys and {value_heads} of values"
        num_layers = max(stated(cache.config, "num_hidden_layers") or 0, 1 + max(cache.noted, default=0))
        states = {
            layer: StateSpec(
                tuple(
                    StateTensor(kind, index, shape, None if own is dtype else own)
                    for (kind, index), (shape, own) in sorted(tensors.items())
                )
            )
            for layer, tensors in sorted(cache.states.items())
        }
        indexers = listed(cache.indexed, num_layers) if cache.indexed else ()
        return cls(listed(cache.noted, num_layers), indexers, states)


def listed(noted: Noted, num_layers: int) -> Layers:
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
    """Takes from the layers those windows that their modules contradict."""
    found = list(layers)
    for module in model.get_submodule(inner_path(model) or "").modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(found):
            continue
        layer = found[index]
        if layer is not None and getattr(module, "sliding_window", layer.window) != layer.window:
            found[index] = replace(layer, window=None, chunk=None)
    return tuple(found)
