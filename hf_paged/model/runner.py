"""`ModelRunner`: a step of the scheduler through the model, from plain data to logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.metadata import AttentionMetadata, padded_tables
from hf_paged.attention.padded_sources import PaddedSources
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.attention.source_step import source_metadata
from hf_paged.core.batch import Batch
from hf_paged.core.config import PagedConfig
from hf_paged.kernels.transfers import to_device
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.graph_runner import GraphRunner
from hf_paged.model.mixers import StateStep
from hf_paged.model.packed_runner import PackedRunner, rows_of
from hf_paged.model.padded_runner import PaddedRunner
from hf_paged.model.step_inputs import HostStep
from hf_paged.model.step_memory import StepMemory
from hf_paged.model.token_inputs import TokenInputs


class ModelRunner:
    """Runs a `Batch` in the layout that its model and its tokens want."""

    def __init__(
        self, model: BoundModel, num_moves: Callable[[], int], config: PagedConfig, memory: StepMemory
    ) -> None:
        """`num_moves` says how often the weights have moved in memory, `memory` what graphs may take."""
        self._model = model
        self.packed = PackedRunner(model)
        self.padded = PaddedRunner(model)
        self.graphs = GraphRunner(model, self.packed, num_moves, config, memory)
        self._num_moves = num_moves
        self._told: tuple[int | None] | None = None

    def moves(self) -> int | None:
        """How often the weights have moved in memory, as of now; `None`: steps may not be replayed."""
        is_known = self._model.runs_known_code and not self._model.is_offloaded
        return self._num_moves() if is_known else None

    def follow(self, moves: int | None) -> None:
        """On all ranks, before each step: what `moves` was on rank 0, by which all of them replay it or none does."""
        self._told = (moves,)
        if moves is not None:
            self.graphs.num_moves = lambda: moves

    def run(
        self,
        batch: Batch,
        attention: PoolAttention,
        embeddings: Tensor | None = None,
        chosen: Tensor | None = None,
        sources: Tensor | None = None,
    ) -> Tensor:
        """Runs a step through the model: cache writes, attention, logits.

        In inference mode where that can do no harm, which saves a tenth of a small model's step: the result may be a
        tensor that must not get into a caller's hands, and that the next step writes over.

        Args:
            batch: The step; what it does to blocks is done.
            embeddings: `[E, hidden_size]` or wider, what the tokens of `batch.embedded` were given as.
            chosen: The tokens that the step before has chosen, on the device, for the batch's placeholders.
            sources: `[E, hidden_size]`, what encoders have made of the batch's fresh sources, one after another.

        Returns:
            `[K, vocab_size]`, of the rows that the batch wants; of its first token if it wants none.
        """
        model = self._model
        step = HostStep.of(batch, attention.kv_cache, embeddings, chosen)
        may_replay = model.runs_known_code and not model.is_offloaded
        if may_replay if self._told is None else self._told[0] is not None:
            logits = self.graphs.replay(batch, step, attention)
            if logits is not None:
                return logits
        with model.mode():
            if (slots := step.adapters) is None:
                return self._run(batch, step, attention, sources)
            with model.adapters.running([slots, slots[step.wanted if len(step.wanted) else [0]]]):
                return self._run(batch, step, attention, sources)

    def _run(self, batch: Batch, step: HostStep, attention: PoolAttention, sources: Tensor | None) -> Tensor:
        kv_cache, tokens = attention.kv_cache, step.tokens.to(attention.kv_cache.device)
        metadata = list(step.metadata)
        for group, chunk in enumerate(kv_cache.groups.chunks):
            if chunk is not None:
                metadata[group] = metadata[group].in_chunks(metadata[group].host_tables, chunk)
        # A model that can choose rows still computes at least one.
        logit_rows = step.wanted if len(step.wanted) else np.zeros(1, dtype=np.int64)
        read: PaddedSources | None = None
        if batch.sources is not None:
            own, all_of_it = batch.sources.tables, [None] * len(batch.sources.tables)
            tables = padded_tables(own, all_of_it, kv_cache.null_block, np.int64)
            lens, fresh = (np.frombuffer(each, np.int64) for each in (batch.sources.lens, batch.sources.fresh))
            metadata += source_metadata(tables, metadata[0].host_query_lens, lens, fresh, metadata[0])
            read = PaddedSources(tables, lens, sources)
        if not self._model.traits.runs_packed:
            return self.padded.run(tokens, metadata, attention, logit_rows, batch=batch, sources=read)
        if batch.spans:
            return self._run_apart(batch.spans, tokens, metadata, attention, logit_rows)
        states = StateStep.of(batch, self._model.traits, kv_cache, step.metadata[0])
        return self.packed.run(tokens, metadata, attention, rows_of(logit_rows, attention), states, sources=sources)

    def _run_apart(
        self,
        spans: tuple[tuple[int, int, int], ...],
        tokens: TokenInputs,
        metadata: list[AttentionMetadata],
        attention: PoolAttention,
        logit_rows: np.ndarray,
    ) -> Tensor:
        """A step some of whose tokens see others behind them: their rows by the model's own attention, under masks."""
        device, lens = attention.kv_cache.device, metadata[0].host_query_lens
        token_rows = np.repeat(np.arange(len(lens)), lens)
        has_spans = np.isin(np.arange(len(lens)), [row for row, _, _ in spans])
        logits: list[tuple[np.ndarray, Tensor]] = []
        for chosen in (False, True):
            rows = np.nonzero(has_spans == chosen)[0]
            if not len(rows):
                continue
            mine = np.isin(token_rows, rows)
            place = np.cumsum(mine) - 1  # of a token among those of these rows
            wanted = np.nonzero(mine[logit_rows])[0]
            own_tokens = tokens.select(to_device(np.nonzero(mine)[0], device))
            own_metadata = [each.of(rows) for each in metadata]
            own_rows = place[logit_rows[wanted]] if len(wanted) else np.zeros(1, dtype=np.int64)
            with self._model.adapters.running_some(np.nonzero(mine)[0], np.nonzero(mine)[0][own_rows]):
                if chosen:
                    renamed = {row: number for number, row in enumerate(rows.tolist())}
                    own_spans = [(renamed[row], *span) for row, *span in spans]
                    found = self.padded.run(own_tokens, own_metadata, attention, own_rows, own_spans)
                else:
                    found = self.packed.run(own_tokens, own_metadata, attention, rows_of(own_rows, attention))
            if len(wanted):
                logits.append((wanted, found))
        if len(logits) == 1:
            return logits[0][1]
        back = np.argsort(np.concatenate([wanted for wanted, _ in logits]))
        return torch.cat([found for _, found in logits])[to_device(back, device)]
