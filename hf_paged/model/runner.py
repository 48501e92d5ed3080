"""`ModelRunner`: one step of the scheduler through the model, from block tables to logits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.attention.cache import StepCache
from hf_paged.attention.context import forward_context
from hf_paged.attention.metadata import AttentionMetadata, DecodeMetadata
from hf_paged.attention.paged_attention import attention_configs, paged_attention_scope
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.config import PagedConfig
from hf_paged.core.scheduler import SchedulerOutput
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.kv_cache import KVCache, KVGeometry
from hf_paged.model import cuda_graph
from hf_paged.model.cuda_graph import DecodeBatch, DecodeGraphs, Recording, fill_in
from hf_paged.model.placement import Placement
from hf_paged.model.step_memory import graph_bytes, sampler_bytes, workspace_bytes

DEFAULT_CONTEXT = 8192  # tokens of the longest sequence, of a model that doesn't say


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the engine has to know about a model's architecture.

    Attributes:
        num_layers: Layers that store keys and values.
        num_kv_heads: Key/value heads of each layer.
        head_dim: Elements of one head, keys and values alike.
        runs_flat: Whether its attention runs over the flat batch of real tokens, straight from the pool. If not, the
            model keeps its own attention and is given gathered keys and values.
        rows_independent: Whether a row's result never depends on the rows beside it.
        allows_inference_mode: Whether its forward keeps no tensor that it computes: in a later training step a tensor
            made in inference mode would be refused.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    runs_flat: bool
    rows_independent: bool
    allows_inference_mode: bool = False

    def geometry(self, dtype: torch.dtype) -> KVGeometry:
        """Shape of one token's keys and values in a model of this dtype."""
        return KVGeometry(self.num_layers, self.num_kv_heads, self.head_dim, dtype)


def is_stochastic(model: nn.Module) -> bool:
    """Whether forwards in training mode draw (dropout) or drop the cache (gradient checkpointing)."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return True
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config: PreTrainedConfig = model.config  # type: ignore[assignment]
    rates = (getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop", "layerdrop", "dropout"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


@dataclass(slots=True)
class TokenInputs:
    """Tokens of a flat batch, side by side.

    Attributes:
        input_ids: `[N]` int64, or `None` when the prompt came as embeddings.
        inputs_embeds: `[N, hidden_size]`, or `None`.
        position_ids: `[N]` int64.
        chosen: Of ids that only the device knows: `[M]` tokens there, and for each of the N its place in them, or -1
            (`input_ids` knows it).
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    position_ids: Tensor
    chosen: tuple[Tensor, np.ndarray] | None = None

    @classmethod
    def cat(cls, parts: list[TokenInputs]) -> TokenInputs:
        """One after another; all are ids, or all embeddings. Ids that only the device knows are filled in (`to`)."""
        assert all(part.chosen is None for part in parts)
        ids = [part.input_ids for part in parts if part.input_ids is not None]
        embeds = [part.inputs_embeds for part in parts if part.inputs_embeds is not None]
        positions = torch.cat([part.position_ids for part in parts])
        return cls(torch.cat(ids) if ids else None, torch.cat(embeds) if embeds else None, positions)

    def to(self, device: torch.device) -> TokenInputs:
        """The same on a device, where all ids are known."""
        ids = None if self.input_ids is None else to_device(self.input_ids, device)
        if self.chosen is not None:
            assert ids is not None
            ids = fill_in(ids, self.chosen[0], to_device(self.chosen[1], device))
        embeds = None if self.inputs_embeds is None else to_device(self.inputs_embeds, device)
        return TokenInputs(ids, embeds, to_device(self.position_ids, device))

    def part(self, start: int, length: int) -> TokenInputs:
        """`length` tokens from `start` on."""
        stop = start + length
        return TokenInputs(
            None if self.input_ids is None else self.input_ids[start:stop],
            None if self.inputs_embeds is None else self.inputs_embeds[start:stop],
            self.position_ids[start:stop],
        )


class ModelRunner:
    """Runs flat batches `[1, T]` of real tokens. Holds the model weakly: the model owns the engine, not the reverse."""

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        supports_logits_to_keep: bool,
        layers: Callable[[], AbstractContextManager[None]],
        allows_inference_mode: bool,
        is_plain: Callable[[], bool],
        num_moves: Callable[[], int],
        config: PagedConfig,
    ) -> None:
        """Binds to a model.

        Args:
            model: The patched model.
            forward: The forward function of its class before patching, unbound.
            supports_logits_to_keep: Whether that forward can compute the logits of chosen rows only.
            layers: Within it, layers of the model are computed in the engine's way.
            allows_inference_mode: Of the model's traits.
            is_plain: Whether nothing but known code runs in forwards now.
            num_moves: How often the weights have moved in memory.
            config: The settings.
        """
        self._model = weakref.ref(model)
        self._placement = Placement(model)
        self._forward = forward
        self._supports_logits_to_keep = supports_logits_to_keep
        self._layers = layers
        self._allows_inference_mode = allows_inference_mode
        self._is_plain = is_plain
        self._num_moves = num_moves
        self._config = config
        self._prepared_for: int | None = None  # the thread whose forwards find the model as they need it
        self._inside: int | None = None  # the thread that is in a step's forward
        self._compiled: Callable[..., Any] | None = None
        self._graphs: tuple[int, DecodeGraphs] | None = None  # and where the weights were
        self.configs = attention_configs(model)

    @property
    def model(self) -> PreTrainedModel:
        """The patched model.

        Raises:
            RuntimeError: It was deleted while something still uses its engine.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("the patched model no longer exists; keep a reference to it while you use its engine")
        return model

    @property
    def living_model(self) -> PreTrainedModel | None:
        """The patched model, `None` if it no longer exists."""
        return self._model()

    @property
    def placement(self) -> tuple[torch.dtype, torch.device]:
        """The model's dtype and device."""
        return self._placement() or (self.model.dtype, self.model.device)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but torch's and transformers' own code runs in forwards now."""
        return self._is_plain()

    def check_outside(self) -> None:
        """Refuses what takes another step: this thread is in one.

        Raises:
            RuntimeError: It is, in a hook of an inner module, say.
        """
        if self.is_inside:
            raise RuntimeError(
                "this thread is inside a step (in a hook of one of the model's modules), which can't wait for another "
                "step: call the model in a logits processor, a streamer or a hook of the patched model itself, or on "
                "another thread"
            )

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in a step's forward of this model."""
        return self._inside == threading.get_ident()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._inside = threading.get_ident()
        try:
            yield
        finally:
            self._inside = None

    def _may_infer(self) -> bool:
        """Whether forwards may run in inference mode now."""
        return self._allows_inference_mode and self._is_plain()

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence that the model is made for."""
        config = self.model.config.get_text_config(decoder=True)
        return getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT

    @property
    def _vocab_size(self) -> int:
        size: int = self.model.config.get_text_config(decoder=True).vocab_size
        return size

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Around steps of this thread with no other code between them: what each does to the model is done once."""
        if self._config.compile_decode:  # whose steps want the layers as they are
            yield
            return
        with self._scopes():
            self._prepared_for = threading.get_ident()
            try:
                yield
            finally:
                self._prepared_for = None

    @contextmanager
    def _scopes(self) -> Iterator[None]:
        """What a forward of a step does to the model."""
        if self._prepared_for == threading.get_ident():
            yield
            return
        with paged_attention_scope(self.configs), self._layers():
            yield

    @torch.no_grad()
    def run(
        self,
        step: SchedulerOutput,
        manager: BlockManager,
        kv_cache: KVCache,
        tokens: TokenInputs,
        logit_rows: np.ndarray,
    ) -> Tensor:
        """Runs a step through the model: cache writes, attention, logits.

        In inference mode where that can do no harm, which saves a tenth of a small model's step: the result may be a
        tensor that must not get into a caller's hands, and that the next step writes over.

        Args:
            step: What the scheduler chose; its block copies are done.
            manager: Holds the block tables.
            kv_cache: The pool.
            tokens: The chunks' tokens, on the CPU where the host knows all of them, else on the device.
            logit_rows: `[K]` int64, rows of the flat batch whose logits are wanted.

        Returns:
            `[K, vocab_size]`.
        """
        device = kv_cache.tensor.device
        may_infer = self._may_infer()
        if may_infer and len(logit_rows) == len(step.chunks):
            logits = self._replay(step, manager, kv_cache, tokens)
            if logits is not None:
                return logits
        tokens = tokens.to(device)
        metadata = AttentionMetadata.build(
            block_tables=[manager.block_table(chunk.sequence.seq_id) for chunk in step.chunks],
            query_lens=[chunk.num_tokens for chunk in step.chunks],
            seq_lens=[chunk.start + chunk.num_tokens for chunk in step.chunks],
            block_size=manager.block_size,
            null_block=kv_cache.null_block,
            device=device,
        )
        rows = to_device(logit_rows, device)
        return self._run_model(tokens, metadata, kv_cache, rows, may_infer)

    def _run_model(
        self,
        tokens: TokenInputs,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        rows: Tensor | None,
        may_infer: bool,
        is_compiled: bool = False,
    ) -> Tensor:
        """The model's forward; logits of `rows` of the flat batch, or of all."""
        inputs: dict[str, Any] = {}
        if tokens.input_ids is not None:
            inputs["input_ids"] = tokens.input_ids[None]
        else:
            assert tokens.inputs_embeds is not None
            inputs["inputs_embeds"] = tokens.inputs_embeds[None]
        if self._supports_logits_to_keep and rows is not None:
            inputs["logits_to_keep"] = rows
        # Not inference_mode(False), which would turn gradients on.
        mode = torch.inference_mode() if may_infer else nullcontext()
        forward, scopes = self._compile() if is_compiled else (self._forward, self._scopes())
        step = kv_cache.backend.step(metadata)
        with mode, scopes, self._stepping(), forward_context(step, kv_cache.tensor.device) as sentinel:
            output = forward(
                self.model,
                position_ids=tokens.position_ids[None],
                attention_mask=sentinel,
                past_key_values=StepCache(),
                use_cache=True,
                return_dict=True,
                **inputs,
            )
        logits = output.logits[0]
        return logits if self._supports_logits_to_keep or rows is None else logits[rows]

    def _compile(self) -> tuple[Callable[..., Any], AbstractContextManager[Any]]:
        """The forward, compiled in the pieces that attention leaves (the same few for all layers); where to call it."""
        if self._compiled is None:
            self._compiled = torch.compile(self._forward, dynamic=True)
        scopes = ExitStack()
        scopes.enter_context(paged_attention_scope(self.configs))
        # Else each layer's number would make it another program.
        scopes.enter_context(torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True))
        return self._compiled, scopes

    def _replay(
        self, step: SchedulerOutput, manager: BlockManager, kv_cache: KVCache, tokens: TokenInputs
    ) -> Tensor | None:
        """A decode step by a CUDA graph, where there is one for it.

        Args:
            step: As in `run`, with the logits of each chunk's last token wanted.
            manager: As in `run`.
            kv_cache: As in `run`.
            tokens: As in `run`.
        """
        if self._config.cuda_graphs is False or tokens.input_ids is None or tokens.input_ids.device.type != "cpu":
            return None
        if tokens.input_ids.shape[0] != len(step.chunks) or torch.is_autocast_enabled(kv_cache.tensor.device.type):
            return None
        graphs = self.graphs(manager, kv_cache)
        if isinstance(graphs, str):
            return None
        return graphs.run(step.chunks, manager, tokens.input_ids.numpy(), tokens.position_ids.numpy(), tokens.chosen)

    def graphs(self, manager: BlockManager, kv_cache: KVCache) -> DecodeGraphs | str:
        """The graphs of decode steps over this pool and the weights as they are, or why there can be none.

        Raises:
            ValueError: `cuda_graphs=True` or `compile_decode=True`, and there can be none here.
        """
        if self._config.cuda_graphs is False:
            return "cuda_graphs=False"
        num_moves = self._num_moves()
        if self._graphs is None or not self._graphs[1].is_of(kv_cache) or self._graphs[0] != num_moves:
            self._graphs = None  # before the next ones are recorded: two sets need not fit
            record = cuda_graph.recorder(kv_cache)
            if isinstance(record, str):
                if self._config.cuda_graphs:
                    raise ValueError(f"cuda_graphs=True: CUDA graphs {record}; use None or False")
                if self._config.compile_decode:
                    raise ValueError(f"compile_decode=True: CUDA graphs {record}; use False")
                return f"CUDA graphs {record}"
            self._graphs = num_moves, self._make_graphs(kv_cache, manager, record)
        return self._graphs[1]

    def record_graphs(self, manager: BlockManager, kv_cache: KVCache) -> DecodeGraphs | str:
        """Records now what the first decode step would, over rows in the null block; or why there are no graphs.

        Raises:
            ValueError: As `graphs`.
        """
        if not self._may_infer():
            return "code of a user's own runs in the model"
        graphs = self.graphs(manager, kv_cache)
        if isinstance(graphs, str):
            return graphs
        if not graphs.sizes and graphs.reason is None:
            # Rows that write to one slot must write the same: they are equal, context and all.
            num_blocks = max(1, min(8, graphs.max_blocks, self.max_context // kv_cache.block_size))
            lens = num_blocks * kv_cache.block_size - np.arange(graphs.max_rows) % kv_cache.block_size
            lens = np.minimum(lens, self.max_context)
            tables = np.full((graphs.max_rows, num_blocks), kv_cache.null_block, dtype=np.int32)
            with torch.no_grad():
                graphs.record(DecodeBatch(lens % self._vocab_size, lens - 1, lens, tables))
        return graphs if graphs.reason is None else graphs.reason

    @torch.no_grad()
    def rehearse(self, kv_cache: KVCache, lens: list[tuple[int, int]]) -> None:
        """A step of no sequence's: all tokens are in the null block, which is written to.

        Args:
            kv_cache: The pool.
            lens: Of each sequence, its new tokens and its tokens in all; those with one new token first.
        """
        device = kv_cache.tensor.device
        query_lens, seq_lens = [new for new, _ in lens], [length for _, length in lens]
        metadata = AttentionMetadata.build(
            [[kv_cache.null_block] * -(-length // kv_cache.block_size) for length in seq_lens],
            query_lens,
            seq_lens,
            kv_cache.block_size,
            kv_cache.null_block,
            device,
        )
        positions = np.concatenate([np.arange(length - new, length) for new, length in lens])
        tokens = TokenInputs(to_device(positions % self._vocab_size, device), None, to_device(positions, device))
        rows = to_device(np.cumsum(query_lens) - 1, device)
        self._run_model(tokens, metadata, kv_cache, rows, self._may_infer())

    def _make_graphs(
        self, kv_cache: KVCache, manager: BlockManager, record: Callable[[Callable[[], Tensor]], Recording]
    ) -> DecodeGraphs:
        max_blocks = min(manager.pool.num_blocks, -(-self.max_context // manager.block_size))
        runner, pool = weakref.ref(self), weakref.ref(kv_cache)

        def forward(ids: Tensor, positions: Tensor, metadata: DecodeMetadata) -> Tensor:
            own, kv_cache = runner(), pool()
            assert own is not None and kv_cache is not None
            tokens = TokenInputs(ids, None, positions)
            return own._run_model(tokens, metadata, kv_cache, None, True, own._config.compile_decode)

        max_num_seqs = min(self._config.max_num_seqs, manager.pool.num_blocks)
        return DecodeGraphs(forward, kv_cache, max_num_seqs, max_blocks, record)

    def reserved_bytes(self, num_tokens: int, block_size: int) -> int:
        """Bytes that steps hold at most beside weights and pool, on a GPU; 0 on CPU (see `activation_bytes`).

        Of `step_memory.py` the sum: memory that a forward gives back is in pieces, which the sampler's tensors, the
        largest there are, need not fit in.

        Args:
            num_tokens: Of the largest step.
            block_size: Tokens in a block.
        """
        model = self.model
        device = model.device
        if device.type != "cuda" or not self._may_infer():
            return 0
        rows = self._config.max_num_seqs
        logits = self._vocab_size, model.dtype.itemsize
        num_bytes = self.activation_bytes(num_tokens) + sampler_bytes(min(rows, num_tokens), *logits)
        uses_graphs = self._config.cuda_graphs is not False
        if uses_graphs:
            max_blocks = -(-self.max_context // block_size)
            num_bytes += graph_bytes(self.activation_bytes(min(rows, num_tokens)), rows, *logits, max_blocks)
        # Steps run on the worker's thread and on a lone caller's; the graphs are recorded on a stream of their own.
        return num_bytes + workspace_bytes(device, 2 + uses_graphs)

    @torch.no_grad()
    def activation_bytes(self, num_tokens: int) -> int:
        """Most bytes that the forward of a step of so many tokens holds: measured, on a GPU, by running one.

        0 on CPU, where memory is taken page by page when it is used, and where code of a user's own would see that run.
        Starts torch's peak memory statistics anew.
        """
        model = self.model
        device = model.device
        if device.type != "cuda" or not self._may_infer():
            return 0
        inputs: dict[str, Any] = {"input_ids": torch.zeros(1, num_tokens, dtype=torch.int64, device=device)}
        if self._supports_logits_to_keep:
            inputs["logits_to_keep"] = min(self._config.max_num_seqs, num_tokens)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self._forward(model, use_cache=False, **inputs)
        return torch.cuda.max_memory_allocated(device) - before

    def forget_graphs(self) -> None:
        """Gives their memory back; they are recorded again when they are next needed."""
        self._graphs = self._compiled = None

    def run_unpatched(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the unpatched class."""
        with self._layers(), self._stepping():
            return self._forward(self.model, *args, **kwargs)
