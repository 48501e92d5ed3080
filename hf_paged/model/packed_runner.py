"""`PackedRunner`: a step in the packed layout, real tokens side by side, attention straight over the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.cache import LayerNotingCache, StepCache
from hf_paged.attention.context import WantedTokens, forward_context
from hf_paged.attention.lazy import lazy
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.attention.shared_prefix import SharedPrefixes, one_run
from hf_paged.attention.source_step import SourceCache, SourceStepCache, source_metadata
from hf_paged.kernels.transfers import to_device
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.latents import LatentStepCache
from hf_paged.model.mixers import StateStep
from hf_paged.model.token_inputs import TokenInputs


def rows_of(rows: np.ndarray, attention: PoolAttention) -> Tensor:
    """`[K]` int64, the tokens whose logits are wanted, where hidden states can be indexed by it.

    Where layers are on several devices, the last one need not be where the inputs are: an index on the host is taken
    everywhere.
    """
    kv_cache = attention.kv_cache
    return torch.from_numpy(rows) if kv_cache.layer_devices is not None else to_device(rows, kv_cache.device)


class _Rehearsal(AttentionMetadata):
    """A step all of whose sequences read the null block, and together if any sequences could."""

    least_saved = -math.inf

    @lazy
    def shared_prefixes(self) -> SharedPrefixes | None:
        return one_run(self.host_seq_lens[: self.num_decodes]) if self.num_decodes else None


class PackedRunner:
    def __init__(self, model: BoundModel) -> None:
        self._model = model
        self._latents = model.latents if model.traits.has_latents else None

    def run(
        self,
        tokens: TokenInputs,
        metadata: Sequence[AttentionMetadata],
        attention: PoolAttention,
        rows: Tensor | None,
        states: StateStep | None = None,
        is_compiled: bool = False,
        sources: Tensor | None = None,
    ) -> Tensor:
        """One forward.

        Args:
            tokens: `[T]`, on the device.
            rows: `[K]`, the tokens whose logits are wanted; `None`: all.
            sources: `[E, hidden_size]`, what encoders have made that is new to the step, one after another.

        Returns:
            `[K, vocab_size]`.
        """
        model, traits = self._model, self._model.traits
        assert states is not None or not traits.states, "mixers would go on without their states"
        step = attention.step(metadata)
        if rows is None and None in traits.layers:
            # Told by a number (none: 0), some cut off tokens, and the mask, before layers that attend to others' keys.
            rows = torch.arange(len(tokens.input_ids), device=tokens.input_ids.device)
        cache: StepCache | SourceStepCache
        source: SourceCache | None = None
        noting: LayerNotingCache | None = None
        if self._latents is not None:
            positions = tokens.position_ids if traits.tells_positions else None
            cache = step = LatentStepCache(step, self._latents, states, positions)
        elif traits.shares_attention:
            cache = noting = LayerNotingCache(states)
        else:
            positions = tokens.position_ids if traits.tells_positions else None
            cache = StepCache(states, positions, traits.tells_all)
        if traits.cross:
            source = SourceCache(len(traits.cross), len(traits.stored) - len(traits.cross), tokens.input_ids.device)
            cache = SourceStepCache(cache, source, is_fresh=sources is not None)
        is_moved = attention.kv_cache.layer_devices is not None or source is not None
        is_whole = rows is None or states is not None or source is not None
        wanted = None if is_whole or rows is None else self._wanted(rows, metadata, attention)
        with forward_context(step, tokens.input_ids.device, is_moved, wanted, noting, model.is_plain) as sentinel:
            if source is not None:
                source.sentinel = sentinel
            fresh = None if sources is None else sources[None]
            logits = model.logits(tokens.as_row(), sentinel, cache, rows, is_compiled, fresh)[0]
        return logits if model.chooses_logits or rows is None else logits[rows]

    def _wanted(
        self, rows: Tensor, metadata: Sequence[AttentionMetadata], attention: PoolAttention
    ) -> WantedTokens | None:
        """The tokens that the last layer's result is wanted of; `None`: all, where few are left or code may look on.

        What comes behind the last layer looks at each token by itself: else the model would not run packed.
        """
        model, layers = self._model, self._model.traits.layers
        is_few = 2 * len(rows) <= len(metadata[0].slot_mapping)
        stores = layers[-1] is not None  # else it attends to another layer's keys
        if not (is_few and stores and rows.is_cpu and model.is_plain) or metadata[0].is_recorded:
            return None
        places = rows.numpy()
        return WantedTokens(rows, len(layers) - 1, lambda: attention.step([own.of_tokens(places) for own in metadata]))

    def rehearse(self, attention: PoolAttention, lens: list[tuple[int, int]]) -> Tensor:
        """A step of no sequence's: all tokens are in the null block, which is written to. Returns its logits.

        Args:
            lens: Of each sequence, its new tokens and its tokens in all; those with one new token first.
        """
        kv_cache, device = attention.kv_cache, attention.kv_cache.device
        query_lens, seq_lens = np.array(lens, dtype=np.int64).T
        tables = np.full((len(lens), -(-seq_lens.max() // kv_cache.block_size)), kv_cache.null_block)
        metadata = _Rehearsal(tables, query_lens, seq_lens, kv_cache.block_size, kv_cache.null_block, device)
        positions = np.concatenate([np.arange(length - new, length) for new, length in lens])
        tokens = TokenInputs(to_device(positions % self._model.vocab_size, device), to_device(positions, device))
        rows = rows_of(np.cumsum(query_lens) - 1, attention)
        groups = [metadata, *(metadata.with_tables(tables) for _ in kv_cache.groups.own_windows[1:])]
        groups += source_metadata([tables] * kv_cache.groups.num_cross, query_lens, seq_lens, np.arange(0), metadata)
        states = StateStep.in_null_block(self._model.traits, kv_cache, metadata)
        with self._model.mode():
            return self.run(tokens, groups, attention, rows, states)
