"""What a decoder's layers see as their cache in a packed step: keys of cross-attention say that they are such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_paged.attention.cache import StepCache
from hf_paged.attention.context import ForwardContext, current_context
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams

MARK = "hf_paged_source"  # the attribute of keys that says whose source they are of


class _Layer:
    """Keys and values that are in the pool; what stands for them has no content."""

    def __init__(self, stand_in: Tensor) -> None:
        self.keys = self.values = stand_in


class SourceCache(Cache):
    """The cross-attention cache of a step.

    Attributes:
        first_place: The place of its first layer among all that is stored.
        sentinel: The mask of the forward that it is for.
    """

    def __init__(self, num_layers: int, first_place: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.first_place = first_place
        self.sentinel: Tensor | None = None
        stand_in = torch.zeros(1, 1, 1, 1, device=device)
        setattr(stand_in, MARK, (self, False))
        self.layers = [_Layer(stand_in)] * num_layers  # type: ignore[list-item]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        setattr(key_states, MARK, (self, True))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """A layer's cross-attention over the pool; `[1, T, heads, head_dim]`. Sources that are fresh are written."""
        assert self.sentinel is not None
        context: ForwardContext = current_context(self.sentinel)
        layer: Any = module.layer_idx
        layer += self.first_place
        if getattr(key, MARK)[1]:
            context.step.write(key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1), layer)
        params = AttentionParams(layer, scale, softcap=softcap)
        return context.step.attend(query.squeeze(0).transpose(0, 1), params).unsqueeze(0)


class SourceStepCache(EncoderDecoderCache):
    """A step's cache of a model with an encoder.

    Args:
        own: What its self-attention sees.
        source: What its cross-attention sees.
        is_fresh: Whether the step is handed encoder outputs, of which keys and values are to be made.
    """

    def __init__(self, own: StepCache, source: SourceCache, is_fresh: bool) -> None:
        self.self_attention_cache = own
        self.cross_attention_cache = source
        self.is_updated = dict.fromkeys(range(len(source.layers)), not is_fresh)

    def get_seq_length(self, layer_idx: int | None = 0) -> Any:
        return self.self_attention_cache.get_seq_length(layer_idx)


def source_metadata(
    tables: Sequence[np.ndarray], query_lens: np.ndarray, lens: np.ndarray, fresh: np.ndarray, like: AttentionMetadata
) -> list[AttentionMetadata]:
    """A step's metadata for each group of cross-attention layers: every token is a row that sees all of its source.

    The slots are those that the fresh sources are written to, one source after another.

    Args:
        tables: Of each group, `[S, N]` block tables of the sequences' sources.
        query_lens: `[S]` int64, new tokens of each sequence.
        lens: `[S]` int64, tokens of its source.
        fresh: int64, the sequences whose source is to be written.
        like: The metadata of another group of the same step.
    """
    rows, size = np.repeat(np.arange(len(query_lens)), query_lens), like.block_size
    found: list[AttentionMetadata] = []
    for table in tables:
        if found:
            own = found[0].with_tables(table[rows])
        else:
            lengths = np.ones_like(rows), lens[rows]
            own = AttentionMetadata(table[rows], *lengths, size, like.null_block, like.device)
        places = [np.arange(lens[row]) for row in fresh]
        slots = [table[row][place // size] * size + place % size for row, place in zip(fresh, places, strict=True)]
        own.host_slots = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        found.append(own)
    return found
