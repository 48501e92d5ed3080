"""`ModelRunner`: one step of the scheduler through the model, from block tables to logits."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from hf_paged.attention.cache import StepCache
from hf_paged.attention.context import forward_context
from hf_paged.attention.groups import paged_step
from hf_paged.attention.metadata import AttentionMetadata, DecodeMetadata, padded_tables
from hf_paged.attention.padded import PaddedCache, PaddedLayout
from hf_paged.attention.paged_attention import attention_configs, paged_attention_scope
from hf_paged.attention.shared_layers import LayerNotingCache, SharedLayersStep
from hf_paged.core.batch import Batch
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.core.config import PagedConfig
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.kv_cache import KVCache, KVGeometry, PageShape
from hf_paged.memory.spec import AttentionSpec, StateSpec
from hf_paged.model import cuda_graph
from hf_paged.model.cache_argument import cache_argument
from hf_paged.model.cuda_graph import DecodeBatch, DecodeGraphs, Recording, fill_in
from hf_paged.model.mixers import Mixers, MixerWay, PaddedStates, StateStep
from hf_paged.model.placement import Placement
from hf_paged.model.step_memory import graph_bytes, sampler_bytes, workspace_bytes
from hf_paged.model.weights_version import is_batch_dependent
from hf_paged.model.wrapper import InnerCall, Twin, Wrapper

DEFAULT_CONTEXT = 8192  # tokens of the longest sequence, of a model that doesn't say


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the engine has to know about a model's architecture.

    Attributes:
        layers: What each of its layers caches; `None`: nothing of its own.
        tells_positions: Whether its layers reckon with how much is cached before each token.
        indexers: Beside that: the keys of what chooses the tokens that a layer attends to. Empty if there is no such.
        runs_packed: Whether its attention runs over the packed batch of real tokens, straight from the pool. If not,
            the model keeps its own attention and is given gathered keys and values.
        runs_padded: If not: whether its forwards may be of any rows beside each other, padded to one width.
        states: What its layers with a state (recurrent, of a convolution) keep, by the layer's number.
        mixers: The classes of the modules that compute them.
        forms_differ: Whether these compute several tokens by another formula than single ones, with another result.
        shares_attention: Whether layers share attention modules, which tell their cache the layer they compute.
        carries_state: Whether these take a state along into several tokens; if not, only into single ones.
        regime_length: Where rows depend on each other: of sequences shorter than this, they don't.
        rows_independent: Whether a row's result never depends on the rows beside it.
        allows_inference_mode: Whether its forward keeps no tensor that it computes: in a later training step a tensor
            made in inference mode would be refused.
    """

    layers: tuple[AttentionSpec | None, ...]
    runs_packed: bool
    rows_independent: bool
    allows_inference_mode: bool = False
    runs_padded: bool = False
    regime_length: int | None = None
    states: dict[int, StateSpec] = field(default_factory=dict)
    mixers: tuple[type[nn.Module], ...] = ()
    carries_state: bool = True
    forms_differ: bool = False
    shares_attention: bool = False
    indexers: tuple[AttentionSpec | None, ...] = ()
    tells_positions: bool = False

    @property
    def stored(self) -> tuple[AttentionSpec | None, ...]:
        """All that is cached of a token: of each layer, then of each layer's indexer."""
        return (*self.layers, *self.indexers)

    @property
    def is_batched(self) -> bool:
        """Whether rows of all callers may share a forward, in either layout."""
        return self.runs_packed or self.runs_padded

    @property
    def num_layers(self) -> int:
        """Its layers, those that store nothing included."""
        return len(self.layers)

    def geometry(self, groups: CacheGroups, dtype: torch.dtype, block_size: int) -> KVGeometry:
        """What the pages of these groups hold, in a pool of this dtype."""
        if not groups.sizes:  # a block for a whole state
            width, size = 64, sum(spec.num_bytes(torch.float32) for spec in self.states.values())
            return KVGeometry.uniform(-(-size // (2 * width * block_size * dtype.itemsize)), 1, width, dtype)
        kinds = {
            group: layer for (group, _), layer in zip(groups.places, self.stored, strict=True) if layer is not None
        }
        pages = [
            PageShape(size, kinds[group].kv_heads, kinds[group].key_dim, kinds[group].value_dim)
            for group, size in enumerate(groups.sizes)
        ]
        return KVGeometry(tuple(pages), groups.elements, dtype)


def _output_type(forward: Callable[..., Any]) -> type[ModelOutput]:
    """What a forward says that it returns."""
    stated = inspect.signature(forward).return_annotation
    for kind in get_args(stated) or (stated,):
        if (
            isinstance(kind, type)
            and issubclass(kind, ModelOutput)
            and "logits" in getattr(kind, "__dataclass_fields__", ())
        ):
            return kind
    return CausalLMOutputWithPast


def is_stochastic(model: nn.Module) -> bool:
    """Whether forwards in training mode draw (dropout) or drop the cache (gradient checkpointing)."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return True
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config: PreTrainedConfig = model.config  # type: ignore[assignment]
    rates = (getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop", "layerdrop", "dropout"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


@contextmanager
def _kept_frequencies(model: nn.Module) -> Iterator[None]:
    """Around tokens that are computed again: dynamic rotary embeddings remember the longest batch they have seen."""
    kept = [
        (
            module,
            module._buffers.copy(),
            {name: value for name, value in vars(module).items() if name.endswith("cached")},
        )
        for module in model.modules()
        if is_batch_dependent(getattr(module, "rope_type", None))
    ]
    try:
        yield
    finally:
        for module, buffers, lengths in kept:
            module._buffers.update(buffers)
            vars(module).update(lengths)


@dataclass(slots=True)
class TokenInputs:
    """Tokens of a packed batch, side by side.

    Attributes:
        input_ids: `[N]` int64; any number for a token that was given as an embedding.
        position_ids: `[N]` int64, or `[axes, N]` where they differ from axis to axis.
        chosen: Of ids that only the device knows: `[M]` tokens there, and for each of the N its place in them, or -1
            (`input_ids` knows it).
        embedded: Of tokens given as embeddings: `[E]` their places among the N, and what was given: `[E, hidden_size]`,
            or wider, with what else belongs to them (see `Wrapper`).
        inputs_embeds: `[N, hidden_size]`, once some were given so: the ids' embeddings, too.
        extras: `[N, width]`, what else belongs to tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    chosen: tuple[Tensor, np.ndarray] | None = None
    embedded: tuple[np.ndarray, Tensor] | None = None
    inputs_embeds: Tensor | None = None
    extras: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, embeddings: Tensor | None, chosen: Tensor | None) -> TokenInputs:
        """The tokens of a step, on the CPU.

        Args:
            batch: The step.
            embeddings: What its tokens of `embedded` were given as.
            chosen: The tokens that the step before has chosen.
        """
        ids, positions = (torch.from_numpy(np.frombuffer(a, np.int64)) for a in (batch.token_ids, batch.positions))
        if batch.axes is not None:
            positions = torch.from_numpy(np.frombuffer(batch.axes, np.int64)).view(len(ids), -1).T
        known = cls(ids, positions)
        if batch.placeholders is not None:
            assert chosen is not None
            known.chosen = chosen, np.frombuffer(batch.placeholders, np.int64)
        if embeddings is not None:
            known.embedded = np.frombuffer(batch.embedded, np.int64), embeddings
        return known

    def select(self, places: Tensor) -> TokenInputs:
        """Some of the tokens, which are on their device."""
        return TokenInputs(
            self.input_ids[places],
            self.position_ids[..., places],
            inputs_embeds=None if self.inputs_embeds is None else self.inputs_embeds[places],
            extras=None if self.extras is None else self.extras[places],
        )

    def to(self, device: torch.device, embed: Callable[[Tensor], Tensor]) -> TokenInputs:
        """The same on a device, where all ids are known, and their embeddings if any are given.

        Args:
            device: Where the model is.
            embed: Its embedding of ids.
        """
        ids = to_device(self.input_ids, device)
        if self.chosen is not None:
            ids = fill_in(ids, self.chosen[0], to_device(self.chosen[1], device))
        embeds = extras = None
        if self.embedded is not None:
            embeds = embed(ids)
            places, given = to_device(self.embedded[0], device), self.embedded[1].to(device, embeds.dtype)
            width = given.shape[-1] - embeds.shape[-1]
            if width:
                extras = embeds.new_zeros(len(ids), width).index_copy(0, places, given[:, -width:])
            embeds = embeds.index_copy(0, places, given[:, : embeds.shape[-1]])
        return TokenInputs(ids, to_device(self.position_ids, device), inputs_embeds=embeds, extras=extras)


class ModelRunner:
    """Runs packed batches `[1, T]` of real tokens. Holds the model weakly: the model owns the engine, not the
    reverse.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        supports_logits_to_keep: bool,
        layers: Callable[[], AbstractContextManager[None]],
        traits: ModelTraits,
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
            traits: What was found out about its architecture.
            is_plain: Whether nothing but known code runs in forwards now.
            num_moves: How often the weights have moved in memory.
            config: The settings.
        """
        self._model = weakref.ref(model)
        self._placement = Placement(model)
        self._forward = forward
        self._supports_logits_to_keep = supports_logits_to_keep
        self._layers = layers
        self._traits = traits
        self.takes_positions = "position_ids" in inspect.signature(forward).parameters
        self.output_type = _output_type(forward)
        self.cache_argument = cache_argument(forward)
        self._mixers = Mixers(model, traits.mixers)
        self._is_plain = is_plain
        self._num_moves = num_moves
        self._config = config
        self._prepared_for: int | None = None  # the thread whose forwards find the model as they need it
        self._inside: int | None = None  # the thread that is in a step's forward
        self._compiled: Callable[..., Any] | None = None
        self._graphs: tuple[int, DecodeGraphs] | None = None  # and where the weights were
        self.configs = attention_configs(model)
        self.wrapper = Wrapper.of(model)

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
        return self._traits.allows_inference_mode and self._is_plain()

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
        scope = paged_attention_scope(self.configs) if self._traits.runs_packed else nullcontext()
        with scope, self._layers(), self._mixers.scope():
            yield

    @torch.no_grad()
    def run(
        self, batch: Batch, kv_cache: KVCache, embeddings: Tensor | None = None, chosen: Tensor | None = None
    ) -> Tensor:
        """Runs a step through the model: cache writes, attention, logits.

        In inference mode where that can do no harm, which saves a tenth of a small model's step: the result may be a
        tensor that must not get into a caller's hands, and that the next step writes over.

        Args:
            batch: The step; what it does to blocks is done.
            kv_cache: The pool.
            embeddings: `[E, hidden_size]`, what the tokens of `batch.embedded` were given as.
            chosen: The tokens that the step before has chosen, on the device, for the batch's placeholders.

        Returns:
            `[K, vocab_size]`, of the rows that the batch wants; of its first token if it wants none.
        """
        device = kv_cache.tensor.device
        may_infer = self._may_infer()
        if self._traits.runs_packed and may_infer and batch.is_decode:
            logits = self._replay(batch, kv_cache, chosen)
            if logits is not None:
                return logits
        tokens = TokenInputs.of(batch, embeddings, chosen).to(device, self._embed)
        starts, query_lens = (np.frombuffer(a, np.int64) for a in (batch.starts, batch.query_lens))
        tables = padded_tables(batch.tables, kv_cache.groups.windows, kv_cache.null_block, np.int64)
        metadata = AttentionMetadata.of_groups(
            tables, query_lens, starts + query_lens, kv_cache.block_size, kv_cache.null_block, device
        )
        for group, chunk in enumerate(kv_cache.groups.chunks):
            if chunk is not None:
                plain = metadata[group]
                metadata[group] = plain.in_chunks(tables[group], chunk)
        # A model that can choose rows still computes at least one.
        logit_rows = np.asarray(batch.logit_rows or [0], dtype=np.int64)
        if not self._traits.runs_packed:
            with _kept_frequencies(self.model) if self._traits.regime_length is not None else nullcontext():
                return self._run_padded(tokens, metadata, kv_cache, logit_rows, may_infer, batch=batch)
        if batch.spans:
            return self._run_apart(batch.spans, tokens, metadata, kv_cache, logit_rows, may_infer)
        rows = to_device(logit_rows, device)
        states = self._states_of(batch, kv_cache)
        return self._run_model(tokens, metadata, kv_cache, rows, may_infer, states=states)

    def _states_of(self, batch: Batch, kv_cache: KVCache, rows: np.ndarray | None = None) -> StateStep | None:
        """The states of a batch's rows, or of these rows of it; `None`: the model keeps none."""
        if not self._traits.states:
            return None
        assert kv_cache.states is not None
        way = MixerWay(self._traits.states, self._traits.carries_state, self._traits.forms_differ)
        return StateStep.of(batch, kv_cache.states, way, kv_cache.tensor.device, rows)

    def _run_apart(
        self,
        spans: tuple[tuple[int, int, int], ...],
        tokens: TokenInputs,
        metadata: list[AttentionMetadata],
        kv_cache: KVCache,
        logit_rows: np.ndarray,
        may_infer: bool,
    ) -> Tensor:
        """A step some of whose tokens see others behind them: their rows by the model's own attention, under masks."""
        device, lens = kv_cache.tensor.device, metadata[0].host_query_lens
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
            if chosen:
                renamed = {row: number for number, row in enumerate(rows.tolist())}
                own_spans = [(renamed[row], *span) for row, *span in spans]
                found = self._run_padded(own_tokens, own_metadata, kv_cache, own_rows, may_infer, own_spans)
            else:
                found = self._run_model(own_tokens, own_metadata, kv_cache, to_device(own_rows, device), may_infer)
            if len(wanted):
                logits.append((wanted, found))
        if len(logits) == 1:
            return logits[0][1]
        back = np.argsort(np.concatenate([wanted for wanted, _ in logits]))
        return torch.cat([found for _, found in logits])[to_device(back, device)]

    def _model_for(self, extras: Tensor | None) -> Any:
        """What runs a forward: the model, or one that hands its language model `extras` (`[B, q, width]`), too."""
        if extras is None:
            return self.model
        assert self.wrapper is not None
        return self.wrapper.handing(self.model, extras)

    def _embed(self, ids: Tensor) -> Tensor:
        embedding: nn.Module = self.model.get_input_embeddings()
        states: Tensor = embedding(ids)
        return states

    def _run_padded(
        self,
        tokens: TokenInputs,
        metadata: list[AttentionMetadata],
        kv_cache: KVCache,
        logit_rows: np.ndarray,
        may_infer: bool,
        spans: Sequence[tuple[int, ...]] = (),
        batch: Batch | None = None,
    ) -> Tensor:
        """The step by forwards of the model's own attention, each of rows that padding costs little.

        With `spans` (see `Batch`), masks say which tokens see others behind them; with `batch`, of a model with states,
        rows have those of its rows.
        """
        start = metadata[0].host_start_loc
        sequence = np.searchsorted(start, logit_rows, side="right") - 1  # of each wanted row
        groups = metadata[0].alike()
        parts: list[Tensor] = []
        order: list[np.ndarray] = []
        for rows in groups:
            mine = np.nonzero(np.isin(sequence, rows))[0]
            from_end = start[sequence[mine] + 1] - logit_rows[mine]  # rows end in the last column
            wanted = np.searchsorted(rows, sequence[mine]), from_end
            own = metadata if len(groups) == 1 else [each.of(rows) for each in metadata]
            layouts = [PaddedLayout(each, start[rows], kv_cache.tensor.device) for each in own]
            states = None if batch is None else self._states_of(batch, kv_cache, rows)
            cache = PaddedCache(layouts, paged_step(kv_cache.backends, own, kv_cache.groups), kv_cache, states)
            parts.append(
                self._run_rows(tokens, layouts[0], cache, wanted, may_infer, self._masks(layouts[0], rows, spans))
            )
            order.append(mine)
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.concatenate(order), kind="stable")
        return torch.cat(parts)[to_device(back, parts[0].device)]

    def _masks(self, layout: PaddedLayout, rows: np.ndarray, spans: Sequence[tuple[int, ...]]) -> Any:
        """Masks of a padded forward of these rows; `None`: all of its tokens see what is before them."""
        if not spans:
            return None
        assert self.wrapper is not None
        renamed = {row: number for number, row in enumerate(rows.tolist())}
        shifts = layout.width - layout.seq_lens  # a token's column exceeds its index by as much
        own = [
            (renamed[row], start + int(shifts[renamed[row]]), stop + int(shifts[renamed[row]]))
            for row, start, stop in spans
            if row in renamed
        ]
        return self.wrapper.masks(layout.attention_mask, layout.query_width, own, self.placement[0])

    def _run_rows(
        self,
        tokens: TokenInputs,
        layout: PaddedLayout,
        cache: PaddedCache,
        wanted: tuple[np.ndarray, np.ndarray],
        may_infer: bool,
        masks: Any = None,
    ) -> Tensor:
        """One padded forward.

        Args:
            tokens: Of the whole step.
            layout: Of the rows.
            cache: Of the rows.
            wanted: `[K]` rows, and `[K]` columns counted from the end (1: the last), whose logits are wanted.
            may_infer: Whether it may run in inference mode.
            masks: In place of a mask of padding alone.

        Returns:
            `[K, vocab_size]`.
        """
        rows, from_end = wanted
        device = layout.attention_mask.device
        index = to_device(np.maximum(layout.token_index, 0), device)
        inputs: dict[str, Any] = {}
        if tokens.inputs_embeds is None:
            inputs["input_ids"] = tokens.input_ids[index]
        else:
            inputs["inputs_embeds"] = tokens.inputs_embeds[index]
        if self.takes_positions:
            inputs["position_ids"] = tokens.position_ids[..., index]
        model = self._model_for(None if tokens.extras is None else tokens.extras[index])
        num_kept = int(from_end.max(initial=1))
        if self._supports_logits_to_keep:
            inputs["logits_to_keep"] = num_kept
        mode = torch.inference_mode() if may_infer else nullcontext()
        inputs[self.cache_argument] = cache
        with mode, self._scopes(), self._stepping():
            output = self._forward(
                model,
                attention_mask=layout.attention_mask if masks is None else masks,
                use_cache=True,
                return_dict=True,
                **inputs,
            )
        logits: Tensor = output.logits
        num_rows, num_columns = logits.shape[:2]
        places = rows * num_columns + num_columns - from_end
        if num_columns == 1 and len(rows) == num_rows:
            return logits[:, 0]
        return logits.flatten(0, 1)[to_device(places, device)]

    def _run_model(
        self,
        tokens: TokenInputs,
        metadata: Sequence[AttentionMetadata],
        kv_cache: KVCache,
        rows: Tensor | None,
        may_infer: bool,
        is_compiled: bool = False,
        states: StateStep | None = None,
    ) -> Tensor:
        """The model's forward; logits of `rows` of the packed batch, or of all."""
        inputs: dict[str, Any] = {}
        if tokens.inputs_embeds is None:
            inputs["input_ids"] = tokens.input_ids[None]
        else:
            inputs["inputs_embeds"] = tokens.inputs_embeds[None]
        if self.takes_positions:
            inputs["position_ids"] = tokens.position_ids[..., None, :]
        if self._supports_logits_to_keep and rows is not None:
            inputs["logits_to_keep"] = rows
        cache = (
            LayerNotingCache(states)
            if self._traits.shares_attention
            else StepCache(states, tokens.position_ids if self._traits.tells_positions else None)
        )
        inputs[self.cache_argument] = cache
        # Not inference_mode(False), which would turn gradients on.
        mode = torch.inference_mode() if may_infer else nullcontext()
        forward, scopes = self._compile() if is_compiled else (self._forward, self._scopes())
        step = paged_step(kv_cache.backends, metadata, kv_cache.groups)
        if isinstance(cache, LayerNotingCache):
            step = SharedLayersStep(step, cache)
        with mode, scopes, self._stepping(), forward_context(step, kv_cache.tensor.device) as sentinel:
            output = forward(
                self._model_for(None if tokens.extras is None else tokens.extras[None]),
                attention_mask=sentinel,
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

    def _replay(self, batch: Batch, kv_cache: KVCache, chosen: Tensor | None) -> Tensor | None:
        """A decode step by a CUDA graph, where there is one for it; arguments as in `run`."""
        if self._config.cuda_graphs is False or batch.embedded or batch.axes is not None:
            return None
        if torch.is_autocast_enabled(kv_cache.tensor.device.type):
            return None
        graphs = self.graphs(kv_cache)
        if isinstance(graphs, str):
            return None
        return graphs.run(batch, chosen)

    def graphs(self, kv_cache: KVCache) -> DecodeGraphs | str:
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
            self._graphs = num_moves, self._make_graphs(kv_cache, record)
        return self._graphs[1]

    def record_graphs(self, kv_cache: KVCache) -> DecodeGraphs | str:
        """Records now what the first decode step would, over rows in the null block; or why there are no graphs.

        Raises:
            ValueError: As `graphs`.
        """
        if not self._may_infer():
            return "code of a user's own runs in the model"
        graphs = self.graphs(kv_cache)
        if isinstance(graphs, str):
            return graphs
        if not graphs.sizes and graphs.reason is None:
            # Rows that write to one slot must write the same: they are equal, context and all.
            num_blocks = max(1, min(8, graphs.max_blocks, self.max_context // kv_cache.block_size))
            lens = num_blocks * kv_cache.block_size - np.arange(graphs.max_rows) % kv_cache.block_size
            lens = np.minimum(lens, self.max_context)
            shape = (len(kv_cache.groups.windows), graphs.max_rows, num_blocks)
            tables = np.full(shape, kv_cache.null_block, dtype=np.int32)
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
        query_lens, seq_lens = np.array(lens, dtype=np.int64).T
        num_blocks = -(-seq_lens // kv_cache.block_size)
        blocks = np.full(num_blocks.sum(), kv_cache.null_block)
        metadata = AttentionMetadata.build(
            blocks, num_blocks, query_lens, seq_lens, kv_cache.block_size, kv_cache.null_block, device
        )
        positions = np.concatenate([np.arange(length - new, length) for new, length in lens])
        tokens = TokenInputs(to_device(positions % self._vocab_size, device), to_device(positions, device))
        rows = to_device(np.cumsum(query_lens) - 1, device)
        others = (metadata.with_tables(metadata.host_tables) for _ in kv_cache.groups.windows[1:])
        self._run_model(tokens, [metadata, *others], kv_cache, rows, self._may_infer())

    def _make_graphs(self, kv_cache: KVCache, record: Callable[[Callable[[], Tensor]], Recording]) -> DecodeGraphs:
        max_blocks = min(kv_cache.num_blocks, -(-self.max_context // kv_cache.block_size))
        runner, pool = weakref.ref(self), weakref.ref(kv_cache)

        def forward(ids: Tensor, positions: Tensor, metadata: Sequence[DecodeMetadata]) -> Tensor:
            own, kv_cache = runner(), pool()
            assert own is not None and kv_cache is not None
            tokens = TokenInputs(ids, positions)
            return own._run_model(tokens, metadata, kv_cache, None, True, own._config.compile_decode)

        max_num_seqs = min(self._config.max_num_seqs, kv_cache.num_blocks)
        return DecodeGraphs(forward, kv_cache, max_num_seqs, max_blocks, record)

    def reserved_bytes(self, num_tokens: int, block_size: int, num_groups: int = 1) -> int:
        """Bytes that steps hold at most beside weights and pool, on a GPU; 0 on CPU (see `activation_bytes`).

        Of `step_memory.py` the sum: memory that a forward gives back is in pieces, which the sampler's tensors, the
        largest there are, need not fit in.

        Args:
            num_tokens: Of the largest step.
            block_size: Tokens in a block.
            num_groups: Groups of layers.
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
            activations = self.activation_bytes(min(rows, num_tokens))
            num_bytes += graph_bytes(activations, rows, *logits, max_blocks, num_groups)
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

    def run_called(
        self,
        tables: Sequence[np.ndarray],
        new: np.ndarray,
        lengths: np.ndarray,
        kv_cache: KVCache,
        shape: tuple[int, int],
        arguments: dict[str, Any],
        twin: Twin | None = None,
        states: np.ndarray | None = None,
    ) -> Any:
        """A caller's forward in its own shape: rows end in the last column, what is left of their tokens is padding.

        Args:
            tables: Of each group of layers the rows' block tables, `[B, N]` int64; see `padded_tables`.
            new: `[B]` int64, new tokens of each row; some may have none.
            lengths: `[B]` int64, its tokens with the new ones.
            kv_cache: The pool.
            shape: Columns in all, and new ones.
            arguments: What the caller gave.
            twin: See `run_unpatched`.
            states: `[B, pages]` int64, of each row's state, of a model that has any.
        """
        device = kv_cache.tensor.device
        if not tables:  # no layer looks at them
            width = -(-int(lengths.max()) // kv_cache.block_size)
            tables = [np.full((len(lengths), width), kv_cache.null_block)]
        metadata = AttentionMetadata.of_groups(tables, new, lengths, kv_cache.block_size, kv_cache.null_block, device)
        layouts = [PaddedLayout(own, metadata[0].host_start_loc[:-1], device, shape) for own in metadata]
        cache = PaddedCache(layouts, paged_step(kv_cache.backends, metadata, kv_cache.groups), kv_cache)
        arguments[self.cache_argument] = cache
        if states is None or kv_cache.states is None:
            return self.run_unpatched(use_cache=True, return_dict=True, twin=twin, **arguments)
        is_fresh, specs = shape[0] == shape[1], self._traits.states
        held = PaddedStates(kv_cache.states, specs, to_device(states, device), is_fresh, self._traits.num_layers)
        cache.layers = held.layers
        output = self.run_unpatched(use_cache=True, return_dict=True, twin=twin, **arguments)
        held.write_back()
        return output

    def run_unpatched(self, *args: Any, twin: Twin | None = None, **kwargs: Any) -> Any:
        """The forward of the unpatched class; of a wrapper, on the twin that holds the call's state."""
        with self._layers(), self._stepping():
            if twin is None and self.wrapper is not None:  # nothing that is left on the model is this call's
                twin = self.wrapper.twin(self.model, {})
            return self._forward(self.model if twin is None else twin.model, *args, **kwargs)

    def reach(self, twin: Twin, arguments: dict[str, Any]) -> InnerCall:
        """What the wrapper that this model is hands to its language model; see `Wrapper.reach`."""
        assert self.wrapper is not None
        return self.wrapper.reach(twin, self._forward, arguments)
