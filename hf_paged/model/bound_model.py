"""`BoundModel`: the patched model as the engine's forwards call it."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from hf_paged.attention.paged_attention import attention_configs, paged_attention_scope
from hf_paged.core.config import PagedConfig
from hf_paged.memory.state_cache import StateCache
from hf_paged.model.adapters import Adapters
from hf_paged.model.cache_argument import cache_argument, output_type
from hf_paged.model.latents import Latents
from hf_paged.model.mixers import MOST_SCANNED, Mixers
from hf_paged.model.placement import Placement
from hf_paged.model.scans import PACKAGES, has_chunked_kernels
from hf_paged.model.sharding import ranks_of
from hf_paged.model.sources import SourceTap
from hf_paged.model.token_inputs import TokenInputs
from hf_paged.model.told_past import ToldPast
from hf_paged.model.traits import ModelTraits
from hf_paged.model.weights_version import WeightsVersion
from hf_paged.model.wrapper import InnerCall, Twin, Wrapper, put_in

DEFAULT_CONTEXT = 8192  # tokens of the longest sequence, of a model that doesn't say
# New tokens of a recorded step over latents, whose queries are all absorbed. A guess from counts of products and
# launches, which no GPU has timed: a replay saves more than that costs, unless they are behind thousands of tokens.
MOST_ABSORBED = 256


class BoundModel:
    """The unpatched forward of a model, what a step does to the model around it, and which thread is in one.

    Holds the model weakly: the model owns the engine, not the reverse.

    Attributes:
        cache_argument: The name of its forward's argument for the cache.
        configs: Those that its attention modules read their implementation from.
        wrapper: How it talks to its language model, if it is a multimodal one.
        within: What its forwards run in, behind all that stands in for its modules.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        layers: Callable[[], AbstractContextManager[None]],
        traits: ModelTraits,
        weights: WeightsVersion,
        config: PagedConfig,
        latents: Latents,
        adapters: Adapters,
    ) -> None:
        """Binds to a model.

        Args:
            forward: The forward function of its class before patching, unbound.
            layers: Within it, layers of the model are computed in the engine's way.
            weights: Knows which code runs in forwards now.
            adapters: What is added to its layers for each row.
        """
        self._model = weakref.ref(model)
        self._placement = Placement(model)
        self._forward = forward
        self._layers = layers
        self.traits = traits
        parameters = inspect.signature(forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_decoder_positions = "decoder_position_ids" in parameters
        self.chooses_logits = "logits_to_keep" in parameters
        self.source_tap = SourceTap(model) if traits.cross else None
        self._told_past = ToldPast(model) if traits.tells_positions else None
        self._decoder_config = model.config.get_text_config(decoder=True) if model.config.is_encoder_decoder else None
        self._routes = "output_router_logits" in parameters
        self.output_type = output_type(forward)
        self.cache_argument = cache_argument(forward)
        self._mixers = Mixers(model, traits.mixers, adapters)
        self._weights = weights
        self._config = config
        self._prepared: tuple[int, ExitStack] | None = None  # the thread whose forwards find the model as they need it
        self._inside: int | None = None  # the thread that is in a step's forward
        self._compiled: Callable[..., Any] | None = None
        self.configs = attention_configs(model)
        self.wrapper = Wrapper.of(model)
        self.latents = latents
        self.adapters = adapters
        self.within: Callable[[], AbstractContextManager[Any]] = nullcontext

    # What it is

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
        return self._model()

    @property
    def placement(self) -> tuple[torch.dtype, torch.device]:
        return self._placement() or (self.model.dtype, self.model.device)

    @property
    def devices(self) -> set[torch.device]:
        """The device that takes its inputs, and those that its layers run on."""
        main = self.placement[1]
        return {main} | {device or main for device in self.layer_devices or ()}

    @property
    def is_offloaded(self) -> bool:
        """Whether some weights are there only while their module computes."""
        return self._placement.is_offloaded

    @property
    def layer_devices(self) -> tuple[torch.device | None, ...] | None:
        """See `Placement.layers`; as of when `placement` was last asked for."""
        return self._placement.layers(len(self.traits.layers))

    @property
    def why_unrecorded(self) -> str | None:
        """What CUDA graphs of its steps would need, wherever it runs; `None`: nothing that it lacks."""
        if ranks_of(self.model) is not None and not self._config.cuda_graphs:  # with NCCL they have not run yet
            return "need cuda_graphs=True where weights are split between processes"
        if self.is_offloaded:
            return "need weights that stay where they are, accelerate offloads some of this model's"
        if self.layer_devices is not None:
            return "need one device, this model is spread over several"
        if self.traits.cross:
            return "need a decoder alone, this one attends to what an encoder has read"
        if not self.traits.runs_packed:
            return "need attention over the pool, this model's own attention runs over gathered keys and values"
        return None

    @property
    def mixers_by_part(self) -> dict[str, str]:
        """Classes of modules that run for the rows of one length after the other, on a GPU, and why."""
        return self._mixers.by_part

    def why_only_decodes(self, states: StateCache | None) -> str | None:
        """Why only decode steps can be recorded over these states; `None`: all can. Call it after `find_layers`."""
        if states is None or self._mixers.run_all_rows(self.traits.states, states):
            return None
        return "rows of several tokens go one by one through layers that keep a state"

    @property
    def may_record_all(self) -> bool:
        """Whether more than decode steps may be recorded, as far as is known before there is a pool."""
        return not self.traits.states or ranks_of(self.model) is None

    def most_recorded(self, num_tokens: int) -> int:
        """Tokens of the largest step that is recorded, of steps of so many at most, but for decode steps.

        Over latents a recorded step makes no keys and values: it doesn't know which sequences that is cheaper for.
        Scans in it go on token by token.
        """
        if self.traits.states and any(map(has_chunked_kernels, PACKAGES)):
            num_tokens = min(num_tokens, MOST_SCANNED)
        return min(num_tokens, MOST_ABSORBED) if self.traits.has_latents else num_tokens

    @property
    def is_plain(self) -> bool:
        """Whether nothing but known code runs in forwards now, and no user's."""
        return self._weights.is_plain

    @property
    def may_infer(self) -> bool:
        keeps_nothing = self.traits.allows_inference_mode and self._weights.keeps_nothing
        return keeps_nothing and not self._placement.is_offloaded  # which gives the model tensors to keep

    @property
    def runs_known_code(self) -> bool:
        """Whether a forward that belongs to no call leaves the model as it is."""
        return self.traits.allows_inference_mode and self.is_plain

    def mode(self) -> AbstractContextManager[Any]:
        """What forwards of steps run in: inference mode, where that can do no harm, in any case without gradients."""
        return torch.inference_mode() if self.may_infer else torch.no_grad()

    @property
    def max_context(self) -> int:
        return getattr(self.text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT

    @property
    def vocab_size(self) -> int:
        size: int = self.text_config.vocab_size
        return size

    @property
    def text_config(self) -> Any:
        """The config of its language model, or decoder."""
        return self._decoder_config or self.model.config.get_text_config(decoder=True)

    # Where a thread is

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
        return self._inside == threading.get_ident()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Around steps of this thread with no other code between them: what each does to the model is done once.

        Entered and left with the step lock. A step of another thread, between two of this one's, ends it.
        """
        if self._config.compile_decode:  # whose steps want the layers as they are
            yield
            return
        with ExitStack() as scopes:
            self._take_over()
            scopes.enter_context(self._entering())
            self._prepared = own = threading.get_ident(), scopes
            try:
                yield
            finally:
                if self._prepared is own:
                    self._prepared = None

    @property
    def is_prepared(self) -> bool:
        """Whether this thread has prepared the model, and no step of another one has ended that."""
        prepared = self._prepared
        return prepared is not None and prepared[0] == threading.get_ident()

    def _take_over(self) -> None:
        """Undoes what another thread has prepared. The step lock is held."""
        if self._prepared is not None and not self.is_prepared:
            self._prepared[1].close()
            self._prepared = None  # last: until then that thread waits

    def _scopes(self) -> AbstractContextManager[None]:
        self._take_over()
        return nullcontext() if self.is_prepared else self._entering()

    @contextmanager
    def _entering(self) -> Iterator[None]:
        scope = paged_attention_scope(self.configs) if self.traits.runs_packed else nullcontext()
        told = nullcontext() if self._told_past is None else self._told_past.scope()
        with scope, told, self._mixers.scope(), self._layers():
            yield

    def find_layers(self) -> None:
        """Has its layers found, and their weights where they stay, as the next forward would."""
        if not self._config.compile_decode:
            with self.mode(), self._scopes():
                pass

    # Its forward

    def logits(
        self,
        tokens: TokenInputs,
        attention_mask: Any,
        cache: Cache,
        keep: Tensor | int | None,
        is_compiled: bool = False,
        sources: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """The forward of a step.

        Args:
            tokens: `[B, Q]`, as the layout has them.
            keep: The columns of which logits are wanted, or how many at the end; `None`: all.
            sources: `[B, L, hidden_size]`, what encoders have made that is new to the step, one after another.
            source_mask: See `SourceTap.handing`.
            is_compiled: Whether it runs compiled, in the pieces that attention leaves (the same few for all layers).

        Returns:
            `[B, columns, vocab_size]`; of all columns, where the model can't choose.
        """
        model: Any = self.model
        inputs: dict[str, Any] = {self.cache_argument: cache, "input_ids": tokens.input_ids}
        if tokens.given is not None and tokens.given_at is not None:
            if self.wrapper is not None:
                model = self.wrapper.handing(model, tokens.given, tokens.given_at)
            else:
                with self.adapters.scope():
                    own = model.get_input_embeddings()(inputs.pop("input_ids"))
                inputs["inputs_embeds"] = put_in(own, tokens.given, tokens.given_at)
        if self.takes_positions:
            inputs["position_ids"] = tokens.position_ids
        if self.source_tap is not None:
            positions = None if self.traits.tells_positions else tokens.position_ids
            model = self.source_tap.handing(model, sources, source_mask, attention_mask, positions)
            inputs = {self.cache_argument: cache, "decoder_input_ids": tokens.input_ids}
            inputs["encoder_outputs"] = self.source_tap.stand_in(*self.placement)
            attention_mask = None
        if self._routes:  # its config may ask for a loss, which reckons with a mask in a caller's shape
            inputs["output_router_logits"] = False
        if self.chooses_logits and keep is not None:
            inputs["logits_to_keep"] = keep
        forward = self._forward
        if is_compiled:
            self._compiled = forward = self._compiled or torch.compile(forward, dynamic=True)
        with self._compiling() if is_compiled else self._scopes():
            output = self._run(
                forward, model, attention_mask=attention_mask, use_cache=True, return_dict=True, **inputs
            )
        logits: Tensor = output.logits
        return logits.to(self.placement[1]) if self._placement.is_spread else logits

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._inside = threading.get_ident()
        try:
            with self.adapters.scope(), self.within():
                return forward(*args, **kwargs)
        finally:
            self._inside = None

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        # Else each layer's number would make it another program.
        patch = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)
        with paged_attention_scope(self.configs), patch:
            yield

    def forget_compiled(self) -> None:
        """Makes its forward compile again when a compiled one is next needed."""
        self._compiled = None

    def run_unpatched(self, *args: Any, twin: Twin | None = None, **kwargs: Any) -> Any:
        """The forward of the unpatched class; of a wrapper, on the twin that holds the call's state."""
        self._take_over()
        with self._layers():
            if twin is None and self.wrapper is not None:  # nothing that is left on the model is this call's
                twin = self.wrapper.twin(self.model, {})
            return self._run(self._forward, self.model if twin is None else twin.model, *args, **kwargs)

    def run_bare(self, **inputs: Any) -> Any:
        """Runs the forward of the unpatched class on the model as its user left it; this is no step."""
        return self._forward(self.model, **inputs)

    def reach_decoder(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """What the decoder of this model is handed of a call; see `SourceTap.reach`."""
        assert self.source_tap is not None
        return self.source_tap.reach(self.model, self._forward, arguments)

    def reach(self, twin: Twin, arguments: dict[str, Any]) -> InnerCall:
        """Finds what the wrapper that this model is hands to its language model; see `Wrapper.reach`."""
        assert self.wrapper is not None
        return self.wrapper.reach(twin, self._forward, arguments)
