"""`PagedSourceCache`: the `PagedCache` of a model with an encoder, as code that knows `EncoderDecoderCache` sees it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_paged.attention.cache import PagedCache


class PagedSourceCache(PagedCache, EncoderDecoderCache):
    """Keys and values of a batch, and of what an encoder has read for each row, in the block pool of a patched model.

    A source is there once, whatever attends to it. Of positions that an encoder's mask hides nothing is stored.

    Attributes:
        self_attention_cache: What layers keep of the rows' own tokens.
        cross_attention_cache: What layers keep of the sources; reading `layers[i].keys` gathers from the pool.
    """

    @property
    def self_attention_cache(self) -> _Own:  # type: ignore[override]
        return _Own(self)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def cross_attention_cache(self) -> _Sources:  # type: ignore[override]
        return _Sources(self)

    @property
    def is_updated(self) -> dict[int, bool]:  # type: ignore[override]
        """Of each layer whether its sources are there."""
        return dict.fromkeys(range(len(self.layers)), self.is_initialized)

    def read_source(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values that one layer has of the sources, `[batch, num_kv_heads, longest, head_dim]`.

        Zeros behind the end of a shorter one, and of finished rows.
        """
        place = self.store.num_stored - self.store.num_cross + layer_idx
        lens = [0 if row is None or row.source is None else row.source.num_tokens for row in self.sequences]
        longest = max(lens, default=0)
        pairs = (self.store.read_tokens(place, [row], [0], n) for row, n in zip(self.sequences, lens, strict=True))
        rows = [[pad(part, (0, 0, 0, longest - part.shape[2])) for part in pair] for pair in pairs]
        keys, values = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return keys.repeat_interleave(self.fan_out, dim=0), values.repeat_interleave(self.fan_out, dim=0)


class _Own(Cache):
    """The cache as one of a decoder alone."""

    def __init__(self, cache: PagedSourceCache) -> None:
        super().__init__(layers=cache.layers)
        self._cache = cache  # which its layers hold weakly


class _Sources(Cache):
    def __init__(self, cache: PagedSourceCache) -> None:
        layers: list[Any] = [_SourceLayer(cache, index) for index in range(len(cache.layers))]
        super().__init__(layers=layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The length of the longest source."""
        keys = self.layers[layer_idx].keys
        return 0 if keys is None else keys.shape[2]


class _SourceLayer:
    def __init__(self, cache: PagedSourceCache, layer_idx: int) -> None:
        self._cache: Any = weakref.proxy(cache)
        self._layer_idx = layer_idx

    @property
    def keys(self) -> Tensor | None:
        """`[batch, num_kv_heads, length, head_dim]`, a copy; `None` before the first forward."""
        return self._cache.read_source(self._layer_idx)[0] if self._cache.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """Like `keys`."""
        return self._cache.read_source(self._layer_idx)[1] if self._cache.is_initialized else None
