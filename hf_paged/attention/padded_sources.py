"""What encoders have read for the rows of a padded forward: gathered from the pool, and written to it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.cache import Past
from hf_paged.attention.padded import PaddedCache
from hf_paged.kernels import reference
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PaddedSources:
    """The sources of a step's rows.

    Attributes:
        tables: Of each group of cross-attention layers, `[S, N]` int64 block tables.
        lens: `[S]` int64, tokens of each row's source.
        fresh: `[E, hidden_size]`, what encoders have made that is new to the step, one after another; `None`: nothing.
    """

    tables: Sequence[np.ndarray]
    lens: np.ndarray
    fresh: Tensor | None

    def of(self, rows: np.ndarray, is_first: bool) -> PaddedSources:
        """Those of some of the rows, with all that is fresh in the first forward alone."""
        return PaddedSources([table[rows] for table in self.tables], self.lens[rows], self.fresh if is_first else None)

    def fresh_in_rows(self, num_rows: int) -> Tensor | None:
        """`[num_rows, L, hidden_size]` of all that is fresh, with zeros behind it, whosever it is.

        Keys and values are made of each position by itself: a forward of any rows may make them.
        """
        if self.fresh is None:
            return None
        length = -(-len(self.fresh) // num_rows)
        rows = self.fresh.new_zeros(num_rows * length, self.fresh.shape[1])
        rows[: len(self.fresh)] = self.fresh
        return rows.view(num_rows, length, -1)


class PaddedSourceCache(Cache):
    """The cross-attention cache of a padded forward of `B` rows.

    Attributes:
        mask: `[B, E]` int64, 0 behind the end of a shorter source.
    """

    def __init__(
        self, sources: PaddedSources, rows: np.ndarray, num_layers: int, kv_cache: KVCache, writer: PagedStep | None
    ) -> None:
        """Serves one forward.

        Args:
            rows: `[B]` int64, which of the step's.
            num_layers: Those of cross-attention, the last ones of all that store something.
            writer: What writes the fresh sources of the step; `None`: they are written.
        """
        super().__init__(layers=[])
        size, device = kv_cache.block_size, kv_cache.device
        self._kv_cache, self._writer = kv_cache, writer
        self._first_place = len(kv_cache.groups.places) - num_layers
        self._first_group = len(kv_cache.groups.windows) - kv_cache.groups.num_cross
        lens = sources.lens[rows]
        places = np.arange(lens.max())
        is_real = places < lens[:, None]
        self.mask = to_device(is_real.astype(np.int64), device)
        self._num_fresh = 0 if sources.fresh is None else len(sources.fresh)
        self._slots = [
            to_device(
                np.where(is_real, table[rows][:, places // size], kv_cache.null_block) * size + places % size, device
            )
            for table in sources.tables
        ]
        self.layers = [_SourceLayer(self, index) for index in range(num_layers)]  # type: ignore[misc]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes what was made of `PaddedSources.fresh_in_rows`; returns `[B, num_kv_heads, E, width]` of the rows."""
        assert self._writer is not None
        key, value = (states.transpose(1, 2).flatten(0, 1)[: self._num_fresh] for states in (key_states, value_states))
        self._writer.write(key, value, self._first_place + layer_idx)
        return self.read(layer_idx)

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """`[B, num_kv_heads, E, width]` keys and values of a layer."""
        place = self._first_place + layer_idx
        pool, index, key_dim = self._kv_cache.at(place)
        slots = self._slots[self._kv_cache.groups.places[place][0] - self._first_group].to(pool.device)
        key, value = reference.gather_slots(pool, index, slots, key_dim)
        dtype = self._kv_cache.compute_dtype
        return key.to(dtype), value.to(dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.mask.shape[1] if self._writer is None else 0  # which says that there is something to be written


class _SourceLayer:
    def __init__(self, cache: PaddedSourceCache, layer_idx: int) -> None:
        self._cache, self._layer_idx = cache, layer_idx
        self._values: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        keys, self._values = self._cache.read(self._layer_idx)
        return keys

    @property
    def values(self) -> Tensor:
        """Those gathered with the keys, which are asked for first."""
        values, self._values = self._values, None
        return self._cache.read(self._layer_idx)[1] if values is None else values


class PaddedPairCache(EncoderDecoderCache):
    """The cache of a padded forward of a model with an encoder."""

    def __init__(self, own: PaddedCache, source: PaddedSourceCache, positions: Tensor | None) -> None:
        """Serves one forward.

        Args:
            positions: `[B, Q]`, which the model is told in place of how much is cached; `None`: it is told that.
        """
        super().__init__(own, source)
        self._past = None if positions is None else Past.of(positions)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.get_query_offset(layer_idx) if self._past is None else self._past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """What masks reckon with: columns."""
        return self.self_attention_cache.get_seq_length(layer_idx)
