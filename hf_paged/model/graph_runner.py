"""`GraphRunner`: makes, records, replays and forgets CUDA graphs of decode steps, where a model can have them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.metadata import DecodeMetadata
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.core.batch import Batch
from hf_paged.core.config import PagedConfig
from hf_paged.model import cuda_graph
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.cuda_graph import DecodeBatch, DecodeGraphs, Recording
from hf_paged.model.packed_runner import PackedRunner
from hf_paged.model.token_inputs import TokenInputs


class GraphRunner:
    """Owns the graphs of decode steps: those over one pool, and of the weights as they are.

    Attributes:
        held: The graphs, once a step has asked for them.
    """

    def __init__(
        self, model: BoundModel, packed: PackedRunner, num_moves: Callable[[], int], config: PagedConfig
    ) -> None:
        """`num_moves` says how often the weights have moved in memory."""
        self._model = model
        self._packed = packed
        self._num_moves = num_moves
        self._config = config
        self._moves_before = 0  # when the graphs were made
        self.held: DecodeGraphs | None = None

    def replay(self, batch: Batch, attention: PoolAttention, chosen: Tensor | None) -> Tensor | None:
        """Replays a decode step; `None`: there is no graph for it. Arguments as in `ModelRunner.run`."""
        if self._config.cuda_graphs is False or batch.embedded or batch.axes is not None:
            return None
        if torch.is_autocast_enabled(attention.kv_cache.device.type):
            return None
        graphs = self._graphs(attention)
        return None if isinstance(graphs, str) else graphs.run(batch, chosen)

    def record(self, attention: PoolAttention) -> DecodeGraphs | str:
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
            shape = (len(kv_cache.groups.windows), graphs.max_rows, num_blocks)
            tables = np.full(shape, kv_cache.null_block, dtype=np.int32)
            graphs.record(DecodeBatch(lens % self._model.vocab_size, lens - 1, lens, tables))
        return graphs if graphs.reason is None else graphs.reason

    def forget(self) -> None:
        """Gives their memory back; they are recorded again when they are next needed."""
        self.held = None
        self._model.forget_compiled()

    def _graphs(self, attention: PoolAttention) -> DecodeGraphs | str:
        """The graphs over this pool and the weights as they are, or why there can be none."""
        if self._config.cuda_graphs is False:
            return "cuda_graphs=False"
        if self.held is None or not self.held.is_of(attention.kv_cache) or self._moves_before != self._num_moves():
            self.held = None  # before the next ones are recorded: two sets need not fit
            record = self._model.why_unrecorded or cuda_graph.recorder(attention)
            if isinstance(record, str):
                if self._config.cuda_graphs:
                    raise ValueError(f"cuda_graphs=True: CUDA graphs {record}; use None or False")
                if self._config.compile_decode:
                    raise ValueError(f"compile_decode=True: CUDA graphs {record}; use False")
                return f"CUDA graphs {record}"
            self._model.find_layers()  # which may move weights
            self.held, self._moves_before = self._make(attention, record), self._num_moves()
        return self.held

    def _make(self, attention: PoolAttention, record: Callable[[Callable[[], Tensor]], Recording]) -> DecodeGraphs:
        kv_cache = attention.kv_cache
        max_blocks = min(kv_cache.num_blocks, -(-self._model.max_context // kv_cache.block_size))
        max_num_seqs = min(self._config.max_num_seqs, kv_cache.num_blocks)
        model, packed, pool = self._model, self._packed, weakref.ref(attention)
        is_compiled = self._config.compile_decode

        def forward(ids: Tensor, positions: Tensor, metadata: Sequence[DecodeMetadata]) -> Tensor:
            own = pool()
            assert own is not None
            with model.mode(), model.adapters.as_set():
                return packed.run(TokenInputs(ids, positions), metadata, own, None, is_compiled=is_compiled)

        return DecodeGraphs(forward, kv_cache, max_num_seqs, max_blocks, record)
