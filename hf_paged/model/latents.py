"""Multi-head latent attention in a packed step: the pool holds latents, and attention reads them as they are.

A module hands each token's latent and rotary key to its cache, makes keys and values of what that returns, and calls
attention with these. In a packed step the cache stores both, and what it returns is not used: next to nothing is made.
Only once it returns unit vectors, of which the module makes the very maps from latents to keys and values. So these are
found in what a module computes, whatever its weights are called and however they are stored. Where they are a part of a
weight as it is, that is what is used; else they are copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.cache import StepCache
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels.latent_maps import LatentMaps
from hf_paged.memory.spec import AttentionSpec

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of what is made of a whole latent


class Latents:
    """The maps of a model's layers, each found in the layer's first step.

    Attributes:
        has_copies: Whether some are not the model's own weights, but made of them.
    """

    def __init__(self, model: nn.Module, layers: Sequence[AttentionSpec | None]) -> None:
        """Knows no map yet. The model is held weakly."""
        self._model = weakref.ref(model)
        self._specs = {index: layer for index, layer in enumerate(layers) if layer is not None and layer.is_latent}
        self._maps: dict[int, LatentMaps] = {}
        self.has_copies = False

    def forget(self) -> None:
        """Makes the maps be found anew, since weights have changed."""
        self._maps = {}
        self.has_copies = False

    def takes(self, layer: int) -> bool:
        return layer in self._specs

    def get(self, layer: int) -> LatentMaps | None:
        return self._maps.get(layer)

    @torch.inference_mode(False)
    @torch.no_grad()
    def learn(self, layer: int, probes: Tensor, key: Tensor, value: Tensor) -> LatentMaps:
        """Takes what a module has made of `probes`.

        Args:
            probes: `[N, latent_dim + rotary_dim]`, what `probes` returned.
            key: `[1, num_heads, N, key_dim]`.
            value: `[1, num_heads, N, value_dim]`.

        Raises:
            ValueError: Keys are not a linear map of the latent with the rotary key behind it, or values are not a
                linear map of the latent.
        """
        spec, whole = self._specs[layer], probes.shape[1]
        latent, rotary = spec.key_dim, spec.value_dim
        plain = key.shape[-1] - rotary
        if key.shape[2] != len(probes) or value.shape[1:3] != key.shape[1:3] or plain < 1:
            raise ValueError(
                f"layer {layer} makes keys {list(key.shape)} and values {list(value.shape)} of its latents"
            )
        maps = LatentMaps(
            key[0, :, :latent, :plain].transpose(1, 2).clone(memory_format=torch.contiguous_format),
            value[0, :, :latent].transpose(1, 2).clone(memory_format=torch.contiguous_format),
        )
        expected = maps.expand(probes[None, None].to(maps.key.dtype))
        tolerance = _TOLERANCE.get(key.dtype, 0.0)
        for made, own in zip((key, value), expected, strict=True):
            size = own[..., whole:, :].abs().amax().clamp_min(1.0)
            if not bool(((made - own).abs() <= tolerance * size).all()):
                raise ValueError(f"layer {layer} does not map its latents to keys and values linearly")
        own_key, own_value = (self._in_weight(layer, wanted) for wanted in (maps.key, maps.value))
        if own_key is not None and own_value is not None:
            maps = LatentMaps(own_key, own_value)
        else:
            self.has_copies = True
        self._maps[layer] = maps
        return maps

    def _in_weight(self, layer: int, wanted: Tensor) -> Tensor | None:
        """A part of a weight `[heads * width, latent_dim]` that is this map: first or last rows of each head."""
        heads, rows, latent = wanted.shape
        for weight in self._weights(layer):
            if weight.ndim != 2 or weight.shape[1] != latent or weight.shape[0] % heads or weight.dtype != wanted.dtype:
                continue
            by_head = weight.unflatten(0, (heads, -1))
            for part in (by_head[:, :rows], by_head[:, -rows:]):
                if part.shape == wanted.shape and part.device == wanted.device and torch.equal(part, wanted):
                    return part
        return None

    def _weights(self, layer: int) -> Iterator[Tensor]:
        model = self._model()
        for module in () if model is None else model.modules():
            if getattr(module, "layer_idx", None) == layer:
                for weight in module.parameters():
                    yield getattr(weight, "_local_tensor", weight).detach()


def _probes(latent: Tensor, rotary: Tensor) -> Tensor:
    """What tells a module's maps, `[N, latent_dim + rotary_dim]`: each unit vector, zeros, and a vector of all sizes.

    No token of the step: that may be no number.

    Args:
        latent: `[1, 1, T, latent_dim]`.
        rotary: `[1, 1, T, rotary_dim]`.
    """
    unit = torch.eye(latent.shape[-1] + rotary.shape[-1], dtype=latent.dtype, device=latent.device)
    mixed = torch.arange(len(unit), device=latent.device).remainder(7).sub(3).to(latent.dtype)[None] / 2
    return torch.cat([unit, torch.zeros_like(mixed), mixed])


class LatentStepCache(StepCache):
    """The cache of a packed forward whose layers cache latents: it stores them at once.

    Also its step, which attends to latents where these are what a layer caches.
    """

    def __init__(self, step: PagedStep, latents: Latents, states: Any = None, positions: Tensor | None = None) -> None:
        """Writes to `step`; see `StepCache` for `states` and `positions`."""
        super().__init__(states, positions)
        self._step = step
        self._latents = latents
        self.known: dict[int, LatentMaps] = {}  # of this forward's layers
        self.probes: dict[int, Tensor] = {}  # and what the others were given

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self._latents.takes(layer_idx):
            return key_states, value_states
        store = self._store_uncompiled if torch.compiler.is_compiling() else self._store
        return store(key_states, value_states, layer_idx)

    def _store(self, latent: Tensor, rotary: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Writes `[1, 1, T, width]` to the pool; returns what the module is to make keys and values of."""
        self._step.write(latent.squeeze(0).transpose(0, 1), rotary.squeeze(0).transpose(0, 1), layer)
        maps = self._latents.get(layer)
        if maps is not None:
            self.known[layer] = maps
            return latent[:, :, :1], rotary[:, :, :1]
        self.probes[layer] = _probes(latent, rotary)
        both = self.probes[layer][None, None]
        return both[..., : latent.shape[-1]], both[..., latent.shape[-1] :]

    _store_uncompiled = torch.compiler.disable(_store)

    # What attention calls

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Takes what a layer with latents has made of what it was returned, `[N, num_heads, width]`."""
        if not self._latents.takes(layer):
            return self._step.write(key, value, layer)
        probes = self.probes.pop(layer, None)
        if probes is not None:
            states = (states.transpose(0, 1)[None] for states in (key, value))
            self.known[layer] = self._latents.learn(layer, probes, *states)
        return None

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        maps = self.known.pop(params.layer, None)
        if maps is None and self._latents.takes(params.layer):
            raise ValueError(f"layer {params.layer} attends before it gives its cache anything")
        return self._step.attend(query, params if maps is None else replace(params, maps=maps))
