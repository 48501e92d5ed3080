"""`PaddedRunner`: a step in the padded layout, for a model's own attention over keys gathered from the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from hf_paged.attention.metadata import AttentionMetadata, padded_tables
from hf_paged.attention.padded import PaddedCache, PaddedLayout
from hf_paged.attention.padded_sources import PaddedPairCache, PaddedSourceCache, PaddedSources
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.core.batch import Batch
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.kv_cache import KVCache
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.mixers import PaddedStates, StateStep
from hf_paged.model.token_inputs import TokenInputs
from hf_paged.model.weights_version import is_batch_dependent
from hf_paged.model.wrapper import Twin


@dataclass(frozen=True, slots=True)
class CalledForward:
    """A caller's forward in its own shape: rows end in the last column, what is left of their tokens is padding.

    Attributes:
        rows: Which of the caller's rows the batch's are; all others are padding alone.
        width: The columns in all.
        query_width: The new columns.
    """

    arguments: dict[str, Any]
    twin: Twin | None
    rows: list[int]
    num_rows: int
    width: int
    query_width: int

    def spread(self, values: np.ndarray, fill: int) -> np.ndarray:
        """`[num_rows, ...]` of `[S, ...]` values of the batch's rows."""
        spread = np.full((self.num_rows, *values.shape[1:]), fill, dtype=values.dtype)
        spread[self.rows] = values
        return spread


class PaddedRunner:
    def __init__(self, model: BoundModel) -> None:
        self._model = model

    def run(
        self,
        tokens: TokenInputs,
        metadata: list[AttentionMetadata],
        attention: PoolAttention,
        logit_rows: np.ndarray,
        spans: Sequence[tuple[int, ...]] = (),
        batch: Batch | None = None,
        sources: PaddedSources | None = None,
    ) -> Tensor:
        """A step by forwards of the model's own attention, each of rows that padding costs little.

        Args:
            tokens: `[T]`, on the device.
            metadata: Of each group of layers; those of cross-attention, the last, are of the step as a whole.
            logit_rows: `[K]` int64, the tokens whose logits are wanted.
            batch: The step; of a model with states, its rows' are read and written.
            sources: What encoders have read for its rows; `None`: the model has no encoder.

        Returns:
            `[K, vocab_size]`.
        """
        kv_cache, start, traits = attention.kv_cache, metadata[0].host_start_loc, self._model.traits
        if traits.one_by_one and metadata[0].max_query_len > 1:
            return self._run_one_by_one(tokens, metadata, attention, logit_rows, sources)
        sequence = np.searchsorted(start, logit_rows, side="right") - 1  # of each wanted row
        writer = attention.step(metadata) if sources is not None and sources.fresh is not None else None
        metadata = metadata[: len(kv_cache.groups.own_windows) or 1]
        groups = metadata[0].alike(np.arange(len(metadata[0].host_seq_lens)), exactly=traits.needs_alike)
        parts: list[Tensor] = []
        order: list[np.ndarray] = []
        with _kept_frequencies(self._model):
            for rows in groups:
                mine = np.nonzero(np.isin(sequence, rows))[0]
                from_end = start[sequence[mine] + 1] - logit_rows[mine]  # rows end in the last column
                wanted = np.searchsorted(rows, sequence[mine]), from_end
                own = metadata if len(groups) == 1 else [each.of(rows) for each in metadata]
                layouts = [PaddedLayout(each, start[rows], kv_cache.device) for each in own]
                states = None if batch is None else StateStep.of(batch, traits, kv_cache, own[0], rows)
                cache = PaddedCache(layouts, attention.step(own), kv_cache, states)
                masks, source, fresh = self._masks(layouts[0], rows, spans), None, None
                if sources is not None:
                    source = PaddedSourceCache(sources, rows, len(traits.cross), kv_cache, writer)
                    fresh = None if writer is None else sources.fresh_in_rows(len(rows))
                    writer = None  # the first rows' forward writes them for all
                parts.append(self._run_rows(tokens, layouts[0], cache, wanted, masks, source, fresh))
                order.append(mine)
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.concatenate(order), kind="stable")
        return torch.cat(parts)[to_device(back, parts[0].device)]

    def _run_one_by_one(
        self,
        tokens: TokenInputs,
        metadata: list[AttentionMetadata],
        attention: PoolAttention,
        logit_rows: np.ndarray,
        sources: PaddedSources | None,
    ) -> Tensor:
        """A step as several, each of a token a row: only prompts that are given, or computed again, come to this."""
        lens, device = metadata[0].host_query_lens, attention.kv_cache.device
        num_own = len(attention.kv_cache.groups.own_windows)
        parts: list[Tensor] = []
        order: list[np.ndarray] = []
        for number in range(int(lens.max())):
            rows = np.nonzero(lens > number)[0]
            places = metadata[0].host_start_loc[rows] + number
            wanted = np.nonzero(np.isin(logit_rows, places))[0]
            own_rows = np.searchsorted(places, logit_rows[wanted]) if len(wanted) else np.zeros(1, dtype=np.int64)
            own = [*(each.of_tokens(places) for each in metadata[:num_own]), *metadata[num_own:]]
            with self._model.adapters.running_some(places, places[own_rows]):
                read = None if sources is None else sources.of(rows, is_first=number == 0)
                found = self.run(tokens.select(to_device(places, device)), own, attention, own_rows, sources=read)
            if len(wanted):
                parts.append(found)
                order.append(wanted)
        return torch.cat(parts)[to_device(np.argsort(np.concatenate(order)), device)]

    def _masks(self, layout: PaddedLayout, rows: np.ndarray, spans: Sequence[tuple[int, ...]]) -> Any:
        """Masks of a padded forward of these rows: of padding, and of tokens that see others behind them."""
        if not spans:
            return layout.attention_mask
        wrapper = self._model.wrapper
        assert wrapper is not None
        renamed = {row: number for number, row in enumerate(rows.tolist())}
        shifts = layout.width - layout.seq_lens  # a token's column exceeds its index by as much
        own = [
            (renamed[row], start + int(shifts[renamed[row]]), stop + int(shifts[renamed[row]]))
            for row, start, stop in spans
            if row in renamed
        ]
        return wrapper.masks(layout.attention_mask, layout.query_width, own, self._model.placement[0])

    def _run_rows(
        self,
        tokens: TokenInputs,
        layout: PaddedLayout,
        cache: PaddedCache,
        wanted: tuple[np.ndarray, np.ndarray],
        masks: Any,
        source: PaddedSourceCache | None = None,
        fresh: Tensor | None = None,
    ) -> Tensor:
        """One forward.

        Args:
            wanted: `[K]` rows, and `[K]` columns counted from the end (1: the last), whose logits are wanted.
            source: What its rows' encoders have read.
            fresh: See `PaddedSources.fresh_in_rows`.

        Returns:
            `[K, vocab_size]`.
        """
        rows, from_end = wanted
        device = layout.attention_mask.device
        own = tokens.select(to_device(np.maximum(layout.token_index, 0), device))
        keep = int(from_end.max(initial=1))
        both: Cache = cache
        if source is not None:
            both = PaddedPairCache(cache, source, own.position_ids if self._model.traits.tells_all else None)
        with self._model.adapters.running_padded(layout.token_index[:, -1], layout.query_width, keep):
            logits = self._model.logits(
                own, masks, both, keep, sources=fresh, source_mask=None if source is None else source.mask
            )
        num_rows, num_columns = logits.shape[:2]
        if num_columns == 1 and len(rows) == num_rows:
            return logits[:, 0]
        places = rows * num_columns + num_columns - from_end
        return logits.flatten(0, 1)[to_device(places, device)]

    def run_called(self, batch: Batch, attention: PoolAttention, called: CalledForward) -> Any:
        """A step that is one forward of a caller's, in its shape.

        Returns:
            What the model's forward does.
        """
        kv_cache, model = attention.kv_cache, self._model
        device, null_block = kv_cache.device, kv_cache.null_block
        starts, new = (called.spread(np.frombuffer(a, np.int64), 0) for a in (batch.starts, batch.query_lens))
        lengths = starts + new
        padded = padded_tables(batch.tables, kv_cache.groups.windows, null_block, np.int64)
        if not padded:  # no layer looks at them
            padded = [np.full((batch.num_seqs, -(-int(lengths.max()) // kv_cache.block_size)), null_block)]
        tables = [called.spread(table, null_block) for table in padded]
        metadata = AttentionMetadata.of_groups(tables, new, lengths, kv_cache.block_size, null_block, device)
        shape = called.width, called.query_width
        layouts = [PaddedLayout(own, metadata[0].host_start_loc[:-1], device, shape) for own in metadata]
        cache = PaddedCache(layouts, attention.step(metadata), kv_cache)
        arguments = called.arguments | {model.cache_argument: cache, "use_cache": True, "return_dict": True}
        if not batch.adapters:
            return self._run_called(batch, kv_cache, called, cache, arguments, starts)
        slots = called.spread(np.frombuffer(batch.adapters, np.int64).astype(np.int32), -1)
        keep = called.arguments.get("logits_to_keep")
        columns = {called.query_width, keep if isinstance(keep, int) and keep else called.query_width}
        with model.adapters.running([np.repeat(slots, number) for number in columns]):
            return self._run_called(batch, kv_cache, called, cache, arguments, starts)

    def _run_called(
        self,
        batch: Batch,
        kv_cache: KVCache,
        called: CalledForward,
        cache: PaddedCache,
        arguments: dict[str, Any],
        starts: np.ndarray,
    ) -> Any:
        """The forward, over states of its rows if the model has some."""
        model, null_block = self._model, kv_cache.null_block
        if kv_cache.states is None:
            return model.run_unpatched(twin=called.twin, **arguments)
        pages = np.frombuffer(batch.state_blocks, np.int32).reshape(batch.num_seqs, -1).astype(np.int64)
        traits, states = model.traits, to_device(called.spread(pages, null_block), kv_cache.device)
        held = PaddedStates(kv_cache.states, traits.states, states, starts == 0, traits.num_layers)
        cache.layers = held.layers
        output = model.run_unpatched(twin=called.twin, **arguments)
        held.write_back()
        return output


@contextmanager
def _kept_frequencies(model: BoundModel) -> Iterator[None]:
    """Around tokens that are computed again: dynamic rotary embeddings remember the longest batch they have seen."""
    kept = [
        (
            module,
            module._buffers.copy(),
            {name: value for name, value in vars(module).items() if name.endswith("cached")},
        )
        for module in (model.model.modules() if model.traits.regime_length is not None else ())
        if is_batch_dependent(getattr(module, "rope_type", None))
    ]
    try:
        yield
    finally:
        for module, buffers, lengths in kept:
            module._buffers.update(buffers)
            vars(module).update(lengths)
