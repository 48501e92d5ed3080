"""`GraphRunner`: makes, records, replays and forgets CUDA graphs of steps, where a model can have them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.metadata import AttentionMetadata, RecordedMetadata
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.core.batch import Batch
from hf_paged.core.config import PagedConfig
from hf_paged.model import cuda_graph
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.cuda_graph import Recording, StepGraphs
from hf_paged.model.mixers import StateStep
from hf_paged.model.packed_runner import PackedRunner
from hf_paged.model.sharding import lowest_of_ranks, ranks_of
from hf_paged.model.step_inputs import HostStep
from hf_paged.model.step_memory import StepMemory
from hf_paged.model.token_inputs import TokenInputs


class GraphRunner:
    """Owns the graphs of steps: those over one pool, and of the weights as they are.

    Attributes:
        num_moves: How often the weights have moved in memory; on ranks, what all of them go by.
        held: The graphs, once a step has asked for them.
        num_replays: Steps that were replayed.
        left_out: Steps that were not though there are graphs, by the reason.
    """

    def __init__(
        self,
        model: BoundModel,
        packed: PackedRunner,
        num_moves: Callable[[], int],
        config: PagedConfig,
        memory: StepMemory,
    ) -> None:
        """`num_moves` says how often the weights have moved in memory, `memory` what graphs may take."""
        self._model = model
        self._packed = packed
        self.num_moves = num_moves
        self._config = config
        self._moves_before = 0  # when the graphs were made
        self._memory = memory
        self.held: StepGraphs | None = None
        self.num_replays = 0
        self.left_out = Counter[str]()

    def replay(self, batch: Batch, step: HostStep, attention: PoolAttention) -> Tensor | None:
        """Replays a step; `None`: there is no graph for it. Arguments as in `ModelRunner.run`."""
        adapters = self._model.adapters
        adapters.send()  # by which recorded steps may become others
        graphs = self._graphs(attention)
        if isinstance(graphs, str):
            return None
        found: Tensor | str
        if batch.embedded:
            found = "tokens given as embeddings"
        elif (reason := adapters.why_unrecorded(batch)) is not None:
            found = reason
        elif batch.axes is not None or batch.spans:
            found = "positions or masks of a prompt's own, as of images"
        elif torch.is_autocast_enabled(attention.kv_cache.device.type):
            found = "autocast"
        else:
            found = graphs.run(step)
        if isinstance(found, str):
            self.left_out[found] += 1
            return None
        self.num_replays += 1
        return found

    def record(self, attention: PoolAttention) -> StepGraphs | str:
        """Records now what the first decode step would, over rows in the null block; or why there are no graphs.

        Raises:
            ValueError: `cuda_graphs=True` or `compile_decode=True`, and there can be none here.
        """
        kv_cache = attention.kv_cache
        graphs = self._graphs(attention)
        if isinstance(graphs, str):
            return graphs
        if not self._model.runs_known_code:
            return "code of a user's own runs in the model"
        if not graphs.sizes and graphs.reason is None:
            # Rows that write to one slot must write the same: they are equal, context and all.
            max_context = self._model.max_context
            num_blocks = max(1, min(8, graphs.max_blocks, max_context // kv_cache.block_size))
            lens = num_blocks * kv_cache.block_size - np.arange(graphs.max_rows) % kv_cache.block_size
            lens = np.minimum(lens, max_context)
            if kv_cache.states is not None:  # nor may one read the state that another writes
                lens = np.ones_like(lens)
            tables = [np.full((graphs.max_rows, num_blocks), kv_cache.null_block)] * max(
                1, len(kv_cache.groups.windows)
            )
            metadata = AttentionMetadata.of_groups(
                tables, np.ones_like(lens), lens, kv_cache.block_size, kv_cache.null_block, kv_cache.device
            )
            tokens = TokenInputs(torch.from_numpy(lens % self._model.vocab_size), torch.from_numpy(lens - 1))
            num_pages = 0 if kv_cache.states is None else kv_cache.states.num_pages
            pages = np.full((graphs.max_rows, num_pages), kv_cache.null_block)
            graphs.record(HostStep(tokens, metadata, np.arange(graphs.max_rows), pages))
        return graphs if graphs.reason is None else graphs.reason

    def forget(self) -> None:
        """Gives their memory back; they are recorded again when they are next needed."""
        self.held = None
        self._model.forget_compiled()

    def _graphs(self, attention: PoolAttention) -> StepGraphs | str:
        """The graphs over this pool and the weights as they are, or why there can be none."""
        if self._config.cuda_graphs is False:
            return "cuda_graphs=False"
        if self.held is None or not self.held.is_of(attention.kv_cache) or self._moves_before != self.num_moves():
            self.held = None  # before the next ones are recorded: two sets need not fit
            record = self._model.why_unrecorded or cuda_graph.recorder(attention)
            if isinstance(record, str):
                if self._config.cuda_graphs:
                    raise ValueError(f"cuda_graphs=True: CUDA graphs {record}; use None or False")
                if self._config.compile_decode:
                    raise ValueError(f"compile_decode=True: CUDA graphs {record}; use False")
                return f"CUDA graphs {record}"
            self._model.find_layers()  # which may move weights
            self.held, self._moves_before = self._make(attention, record), self.num_moves()
        return self.held

    def _make(self, attention: PoolAttention, record: Callable[[Callable[[], Tensor]], Recording]) -> StepGraphs:
        kv_cache, config = attention.kv_cache, self._config
        max_blocks = min(kv_cache.num_blocks, -(-self._model.max_context // kv_cache.block_size))
        max_num_seqs = min(config.max_num_seqs, kv_cache.num_blocks)
        max_tokens = min(config.max_num_batched_tokens, max_num_seqs * self._model.max_context)
        max_tokens = self._model.most_recorded(max_tokens)
        model, packed, pool = self._model, self._packed, weakref.ref(attention)

        def forward(
            ids: Tensor,
            positions: Tensor,
            metadata: Sequence[RecordedMetadata],
            wanted: Tensor | None,
            pages: Tensor,
            nums_at_once: Tensor,
            slots: Tensor,
        ) -> Tensor:
            own = pool()
            assert own is not None
            states = StateStep.at(model.traits, own.kv_cache, pages, nums_at_once, metadata[0])
            is_compiled = config.compile_decode and wanted is None
            # As many as all tokens: they are picked behind the model, whose modules tell one from the other by number.
            rows = None if wanted is None or len(wanted) == len(ids) else wanted
            recorded = model.adapters.recorded(slots, *([] if rows is None else [slots[rows]]))
            with model.mode(), recorded:
                logits = packed.run(TokenInputs(ids, positions), metadata, own, rows, states, is_compiled)
                if rows is not wanted:
                    logits = logits[wanted]
                if own.kv_cache.states is not None:  # padding rows have written to it
                    own.kv_cache.states.clear(own.kv_cache.null_block)
            return logits

        why_no_others = model.why_only_decodes(kv_cache.states)
        for backend in attention.backends:
            if why_no_others is None and not backend.can_record_all:
                why_no_others = f"only decode steps of the backend {backend.name!r} can be recorded"
        limits = max_num_seqs, max_tokens, max_blocks
        graphs = StepGraphs(forward, kv_cache, *limits, record, why_no_others, self._memory.for_graphs)
        if ranks_of(model.model) is not None:
            device = kv_cache.device
            graphs.agree = lambda value: lowest_of_ranks(model.model, device, value)  # it holds the model weakly
        return graphs
