"""The `generate()` of a patched model: it prepares a `PagedCache`, over which the engine or transformers' loops run.

The decoding loops stay transformers' own, so processors, criteria, streamers, beams, draws and outputs are theirs to
the letter. Ours are the memory and the forward: a prompt is computed once for all its samples or beams, padding is
never computed, and rows that are finished leave the batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode

from hf_paged.api.batch_methods import PagedBatchMixin
from hf_paged.api.encodings import decodes_again, encoded, encoding
from hf_paged.api.engine_of import engine_of
from hf_paged.api.given_call import why_not_embedded
from hf_paged.api.loops import prepare, run_call
from hf_paged.api.rank_calls import run_on_ranks
from hf_paged.api.routing import fall_back, why_not_stateful, why_stock
from hf_paged.attention.cache import PagedCache
from hf_paged.core.interrupts import allowed_interrupt, deferred_interrupt
from hf_paged.engine.call_context import call_context, within
from hf_paged.engine.engine import Engine
from hf_paged.engine.prepared_call import PreparedCall
from hf_paged.kernels.transfers import to_device
from hf_paged.model.host_call import HostCall
from hf_paged.sampling.random import DRAWS

_CPU = torch.device("cpu")


def _decoding(loop: str) -> Callable[..., Any]:
    """Replaces one of transformers' decoding loops, at the end of its `generate()`."""

    @functools.wraps(getattr(GenerationMixin, loop))
    def decode(
        self: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        engine, context = engine_of(self), call_context()
        host, context.host = context.host, None
        # GenerationMixin.generate(model) goes past the patched class's own, which notes them.
        states = context.states or DRAWS.states(engine.core.generator_devices)
        call = PreparedCall(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            kwargs,
            loop,
            host,
            context.is_submitted,
            states,
        )
        if call.is_submitted:  # which is shared between ranks as a request
            return prepare(self, call)
        if engine.ranks is not None:
            return run_on_ranks(engine, loop, call, call.device, lambda: run_call(engine, prepare(self, call)))
        result = run_call(engine, prepare(self, call))
        if engine.traits.cross:  # Whisper's generate() runs loop after loop, whose draws follow each other
            context.states = DRAWS.states(context.states)
        return result

    return decode


def _encoding(name: str) -> Callable[..., Any]:
    """Replaces what runs the encoder for a call: it skips padding, and doesn't run again for what it has just read."""

    def prepare(
        self: Any,
        inputs_tensor: Tensor,
        model_kwargs: dict[str, Any],
        model_input_name: str | None,
        generation_config: Any,
    ) -> Any:
        run = functools.partial(
            getattr(super(PagedGenerationMixin, self), name),
            inputs_tensor,
            model_kwargs,
            model_input_name,
            generation_config,
        )
        if generation_config.output_attentions or generation_config.output_hidden_states:
            return run()
        if not decodes_again(self):
            with encoding(self, inputs_tensor, model_kwargs.get("attention_mask")):
                found, context = run(), call_context()
            context.states = DRAWS.states(context.states)  # some encoders draw, before the call itself does
            return found
        model_kwargs["encoder_outputs"] = encoded(self, inputs_tensor, lambda: run()["encoder_outputs"])
        return model_kwargs

    return prepare


class PagedGenerationMixin(PagedBatchMixin):
    """Methods put in front of a model's own class by `patch()`; `patched_class` builds the combination.

    Only `patch()` and copies of a patched model make instances of it. What the class itself makes
    (`type(model)(config)`, `from_pretrained`) is of the model's own class.
    """

    @property
    def paged(self) -> Engine:
        """The engine behind this model."""
        return engine_of(self)

    def _prepare_generation_config(
        self: Any, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """As transformers does it, with numbers of rows that there can be."""
        prepared, others = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        for name in ("num_beams", "num_return_sequences"):
            value = getattr(prepared, name)
            if value is not None and (not isinstance(value, Integral) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
            most = engine_of(self).config.max_branches
            if value is not None and most is not None and int(value) > most:
                raise ValueError(f"{name}={value} is above max_branches, which is {most} here: ask for fewer")
        return prepared, others

    def _prepare_cache_for_generation(
        self: Any,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Makes the call's cache a `PagedCache`, unless the call needs another kind."""
        verifies_drafts = generation_mode is GenerationMode.ASSISTED_GENERATION and batch_size == 1
        result = None
        if not self._makes_cache(generation_config, model_kwargs, verifies_drafts):
            stock = super()._prepare_cache_for_generation  # type: ignore[misc]
            result = stock(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        call = call_context()  # what comes next is a look at whether model and inputs are on the same device
        call.hides_device = call.host is not None
        return result

    def _makes_cache(
        self: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], verifies_drafts: bool
    ) -> bool:
        """Whether it has made a `PagedCache`, for transformers has nothing to do then."""
        engine = engine_of(self)
        engine.forwards.look_at_hooks()
        name = engine.core.bound.cache_argument
        given = model_kwargs.get(name)
        if isinstance(given, PagedCache):
            if given.store is not engine.store:
                raise ValueError("this PagedCache belongs to another model (or to this one before it was unpatched)")
            if generation_config.cache_implementation is not None:
                raise ValueError("give either cache_implementation or a PagedCache as past_key_values, not both")
            reason = None if generation_config.use_cache else "use_cache=False"
            length = getattr(generation_config, "_mask_length", None)
            if name != "past_key_values" and length is not None and given.sequences:
                # transformers has dropped a mask of ones, by which `ForwardCall.behind` knows what was given again.
                model_kwargs["attention_mask"] = torch.ones(len(given.sequences), length, dtype=torch.int64)
        else:
            reason = why_stock(self, generation_config, given, verifies_drafts)
            reason = reason or why_not_stateful(engine, model_kwargs)
            reason = reason or why_not_embedded(self, model_kwargs.get("inputs_embeds"))
        if reason is not None:
            fall_back(engine, reason)
        fan_out = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        twin = call_context().twin
        state = {} if twin is None else twin.state()
        if (reason is None or isinstance(given, PagedCache)) and engine.forwards.check_hooks():
            fan_out = 1  # they are shown every row
        if isinstance(given, PagedCache):
            given.state = state
            given.expect_fan_out(fan_out)
        elif reason is None:
            model_kwargs[name] = cache = PagedCache.for_call(engine.store, fan_out)
            cache.state = state
            if generation_config.is_assistant:  # as stock: its drafts are taken back
                cache.activate_past_recording()
            return True
        return False

    def _get_logits_processor(self: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        call_context().hides_device = False
        return super()._get_logits_processor(*args, **kwargs)  # type: ignore[misc]

    def _get_stopping_criteria(
        self: Any,
        generation_config: GenerationConfig,
        stopping_criteria: StoppingCriteriaList | None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> StoppingCriteriaList:
        """As transformers makes them, with tables for stop strings that an earlier call had made."""
        stock, own = super()._get_stopping_criteria, None  # type: ignore[misc]
        if generation_config.stop_strings is not None and not any(
            type(item) is StopStringCriteria for item in stopping_criteria or ()
        ):
            core = engine_of(self).core
            device = _CPU if call_context().hides_device else core.bound.placement[1]
            own = core.stop_strings.criterion(tokenizer, generation_config.stop_strings, device)
        if own is None:
            return stock(generation_config, stopping_criteria, tokenizer, **kwargs)
        generation_config = copy.copy(generation_config)
        generation_config.stop_strings = None
        criteria = stock(generation_config, stopping_criteria, tokenizer, **kwargs)
        # Where transformers puts it.
        place = sum(type(item) in (MaxLengthCriteria, MaxTimeCriteria) for item in criteria[:2])
        criteria.insert(place, own)
        return criteria

    @property
    def device(self: Any) -> torch.device:
        """As of the model's own class; on the CPU where that is asked for a call whose tensors are there for now."""
        return _CPU if call_context().hides_device else super().device  # type: ignore[misc]

    @functools.wraps(GenerationMixin.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = args[1] if len(args) > 1 else kwargs.get("generation_config")
        if not isinstance(config, GenerationConfig | None):
            raise ValueError(
                f"generation_config must be a GenerationConfig or None, got {config!r:.80}; give single settings by "
                "name, as max_new_tokens=20"
            )
        core, is_submitted = engine_of(self).core, call_context().is_submitted  # its prompt is on the CPU
        if not is_submitted:
            core.check_outside()
        device, wrapper = core.bound.placement[1], core.bound.wrapper
        # The gate for Ctrl-C is put up once a call, and opened and closed in each step.
        with deferred_interrupt(), allowed_interrupt():
            states = DRAWS.states(core.generator_devices)
            call_context().states = {}  # of a call that this one prepares, which draws behind it
            host = None
            if device.type == "cuda" and not self.config.is_encoder_decoder:  # whose encoder is run before the loop
                host = HostCall.of(self, device, args, kwargs, is_submitted)
            if host is not None:
                args, kwargs = (), host.arguments
            elif is_submitted:
                args = tuple(to_device(value, device) if isinstance(value, Tensor) else value for value in args)
            given = kwargs.get("past_key_values")
            kept = call_context().encodings
            draws: AbstractContextManager[None] = nullcontext()
            if kept is None and decodes_again(self):  # loop after loop, each of which draws on
                kept, draws = {}, DRAWS.private(states)
            if wrapper is None or not isinstance(given, PagedCache | None):
                with within(states=states, host=host, hides_device=False, twin=None, encodings=kept), draws:
                    return super().generate(*args, **kwargs)  # type: ignore[misc]
            twin = wrapper.twin(self, {} if given is None else given.state)
            with within(states=states, host=host, hides_device=False, twin=twin, encodings=kept):
                result = super(PagedGenerationMixin, twin.model).generate(*args, **kwargs)  # type: ignore[misc]
            if not isinstance(getattr(result, "past_key_values", None), PagedCache | None):
                twin.write_back(self, wrapper.path)  # of stock, which looks at the model when it is continued
            return result

    _prepare_encoder_decoder_kwargs_for_generation = _encoding("_prepare_encoder_decoder_kwargs_for_generation")
    _prepare_text_encoder_decoder_kwargs_for_generation = _encoding(  # as it is called in later versions
        "_prepare_text_encoder_decoder_kwargs_for_generation"
    )
    _sample = _decoding("_sample")
    _beam_search = _decoding("_beam_search")
    _assisted_decoding = _decoding("_assisted_decoding")
