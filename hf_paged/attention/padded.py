"""The padded layout: rows of a step as a model with attention of its own sees them, over gathered keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.cache import as_indexer
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.kernels import reference
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.kv_cache import KVCache


class PaddedLayout:
    """`B` rows of `W` columns: each row ends in the last column, new tokens are among the last `Q`, padding is left.

    Attributes:
        width: `W`, tokens of the longest row.
        query_width: `Q`, new tokens of the row that has most.
        seq_lens: `[B]` int64, tokens of each row.
        token_index: `[B, Q]` int64 on the host: which token of the packed batch is there; -1: none, but padding or one
            whose keys are in the pool already.
        slots: `[B, W]` int64 on the host: where a column's key is in the pool; those of padding in the null block.
        attention_mask: `[B, W]` int64, 0 at padding.
        is_fresh: All tokens of all rows are new.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        first_tokens: np.ndarray,
        device: torch.device,
        shape: tuple[int, int] | None = None,
    ) -> None:
        """Lays out the sequences of some metadata as rows.

        Args:
            metadata: Of these sequences only.
            first_tokens: `[B]` int64, where each one's new tokens begin in the step's packed batch.
            shape: `W` and `Q`; `None`: as narrow as the rows let them be.
        """
        query_lens, seq_lens, size = metadata.host_query_lens, metadata.host_seq_lens, metadata.block_size
        self.seq_lens = seq_lens
        self.width, self.query_width = (int(seq_lens.max()), int(query_lens.max())) if shape is None else shape
        self.is_fresh = self.width == self.query_width and bool((query_lens == seq_lens).all())
        columns = np.arange(self.width)
        index = columns - (self.width - seq_lens)[:, None]  # of a column's token in its sequence
        is_real = index >= 0
        # A row of padding alone may have no block.
        blocks = np.take_along_axis(metadata.host_tables, np.where(is_real, index, 0) // size, axis=1)
        self.slots = np.where(is_real, blocks * size + index % size, metadata.null_block * size)
        self.attention_mask = to_device(is_real.astype(np.int64), device)
        column = np.arange(self.query_width) - (self.query_width - query_lens)[:, None]
        self.token_index = np.where(column >= 0, first_tokens[:, None] + column, -1)


class PaddedCache(Cache):
    """The cache of a padded forward: new keys and values go to the pool, and all of the rows' come back.

    Attributes:
        states: The states of the step's rows, of a model with layers that keep one.
        real: Places in `[B * Q]` that are tokens, not padding, on the device; `None`: all.
    """

    def __init__(self, layouts: Sequence[PaddedLayout], step: PagedStep, kv_cache: KVCache, states: Any = None) -> None:
        """Serves one forward; `layouts`, of each group of layers, differ in their slots alone."""
        layout = layouts[0]
        super().__init__(layers=[])
        self.states = states
        self._layout = layout
        self._step = step
        self._kv_cache, self._places = kv_cache, kv_cache.groups.places
        self._past = layout.width - layout.query_width
        self._lengths = [self._past] * len(self._places)
        places = layout.token_index.reshape(-1)
        device = kv_cache.device
        self.real = None if (places >= 0).all() else to_device(np.nonzero(places >= 0)[0], device)
        self._slots = [to_device(own.slots, device) for own in layouts]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores `[B, num_kv_heads, Q, width]` keys and values; returns `[B, num_kv_heads, W, width]`."""
        if layer_idx >= len(self._places):
            raise ValueError(
                f"layer {layer_idx} stores keys, and the model was patched with {len(self._places)} layers: unpatch "
                "it, and patch it again"
            )
        key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        if self.real is not None:
            real = self.real.to(key.device)
            key, value = key.index_select(0, real), value.index_select(0, real)
        self._step.write(key, value, layer_idx)
        self._lengths[layer_idx] = self._layout.width
        pool, index, key_dim = self._kv_cache.at(layer_idx)
        if self._layout.is_fresh and key_states.dtype is pool.dtype:
            return key_states, value_states
        slots = self._slots[self._places[layer_idx][0]].to(pool.device)
        key, value = reference.gather_slots(pool, index, slots, key_dim)
        return key.to(key_states.dtype), value.to(value_states.dtype)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Stores `[B, Q, width]` keys of a layer's indexer; returns `[B, W, width]`."""
        return as_indexer(self.update, indexer_key_states, layer_idx + len(self._places) // 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._lengths[layer_idx]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._lengths[layer_idx] + query_length, 0

    @property
    def is_initialized(self) -> bool:
        return self._past > 0
