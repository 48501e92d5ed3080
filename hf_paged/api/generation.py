"""What a patched model's class adds to its own: `generate()` prepares a `PagedCache`, and its loops run over it.

The decoding loops stay transformers' own, so processors, criteria, streamers, beams, draws and outputs are theirs to
the letter. Ours are the memory and the forward: a prompt is computed once for all its samples or beams, padding is
never computed, and rows that are finished leave the batch.
"""

from __future__ import annotations

import copy
import functools
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
from hf_paged.api.drafting import can_do_without_drafts
from hf_paged.api.given_call import check_tokens
from hf_paged.api.loop_call import LoopCall
from hf_paged.api.loops import RetiringCriteria, check_prompt, run_loop, run_rows
from hf_paged.api.routing import (
    ENGINE,
    engine_call,
    fall_back,
    rows_may_leave,
    why_not_stateful,
    why_stock,
)
from hf_paged.api.shared_calls import share_loop
from hf_paged.attention.cache import PagedCache
from hf_paged.core.interrupts import allowed_interrupt, deferred_interrupt
from hf_paged.engine.beam_search import BeamSearchLoop
from hf_paged.engine.call_context import call_context, within
from hf_paged.engine.engine import Engine
from hf_paged.engine.prepared_call import PreparedCall
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.streams import on_steps_stream
from hf_paged.model.base_class import base_class
from hf_paged.model.host_call import HostCall
from hf_paged.sampling.processors import pads_finished
from hf_paged.sampling.random import DRAWS

_CPU = torch.device("cpu")


def _end_of_preparation() -> tuple[bool, HostCall | None]:
    """What its loop is told of a call, once: whether it was submitted, and its host copies."""
    call = call_context()
    host, call.host = call.host, None
    return call.is_submitted, host


class PagedGenerationMixin(PagedBatchMixin):
    """Methods put in front of a model's own class by `patch()`; `patched_class` builds the combination.

    Only `patch()` and copies of a patched model make instances of it. What the class itself makes
    (`type(model)(config)`, `from_pretrained`) is of the model's own class.
    """

    @property
    def paged(self) -> Engine:
        """The engine behind this model."""
        engine: Engine = self.__dict__[ENGINE]
        return engine

    def _prepare_generation_config(
        self: Any, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """As transformers does it, with numbers of rows that there can be."""
        prepared, others = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        for name in ("num_beams", "num_return_sequences"):
            value = getattr(prepared, name)
            if value is not None and (not isinstance(value, Integral) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
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
        result = self._choose_cache(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        call = call_context()  # what comes next is a look at whether model and inputs are on the same device
        call.hides_device = call.host is not None
        return result

    def _choose_cache(
        self: Any,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        engine: Engine = self.paged
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
            verifies_drafts = generation_mode is GenerationMode.ASSISTED_GENERATION and batch_size == 1
            reason = why_stock(self, generation_config, given, verifies_drafts)
            reason = reason or why_not_stateful(engine, model_kwargs)
        if reason is not None:
            fall_back(engine.config, reason)
        fan_out = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        twin = call_context().twin
        state = {} if twin is None else twin.state()
        engine.forwards.look_at_hooks()
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
            return None
        stock = super()._prepare_cache_for_generation  # type: ignore[misc]
        return stock(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)

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
            device = _CPU if call_context().hides_device else self.paged.core.bound.placement[1]
            own = self.paged.core.stop_strings.criterion(tokenizer, generation_config.stop_strings, device)
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
        try:
            return PagedGenerationMixin._generate(self, *args, **kwargs)
        except (AttributeError, TypeError) as error:
            if isinstance(self, PagedGenerationMixin):
                raise
            raise RuntimeError("the model was unpatched while this call was running") from error

    def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = args[1] if len(args) > 1 else kwargs.get("generation_config")
        if not isinstance(config, GenerationConfig | None):
            raise ValueError(
                f"generation_config must be a GenerationConfig or None, got {config!r:.80}; give single settings by "
                "name, as max_new_tokens=20"
            )
        is_submitted = call_context().is_submitted  # its prompt is on the CPU
        if not is_submitted:
            self.paged.core.check_outside()
        device = self.paged.core.bound.placement[1]
        devices = {torch.device("cpu")} | self.paged.core.bound.devices
        entering = DRAWS.entering(device for device in devices if device.type in ("cpu", "cuda"))
        # The gate for Ctrl-C is put up once a call, and opened and closed in each step.
        with deferred_interrupt(), entering, allowed_interrupt():
            host = None
            if device.type == "cuda":
                host = HostCall.of(self, device, args, kwargs, is_submitted)
            if host is not None:
                args, kwargs = (), host.arguments
            elif is_submitted:
                args = tuple(to_device(value, device) if isinstance(value, Tensor) else value for value in args)
            given, wrapper = kwargs.get("past_key_values"), self.paged.core.bound.wrapper
            if wrapper is None or not isinstance(given, PagedCache | None):
                with within(host=host, hides_device=False, twin=None):
                    return super().generate(*args, **kwargs)  # type: ignore[misc]
            twin = wrapper.twin(self, {} if given is None else given.state)
            with within(host=host, hides_device=False, twin=twin):
                result = super(PagedGenerationMixin, twin.model).generate(*args, **kwargs)  # type: ignore[misc]
            if not isinstance(getattr(result, "past_key_values", None), PagedCache | None):
                twin.write_back(self, wrapper.path)  # of stock, which looks at the model when it is continued
            return result

    def _run_rows(self: Any, call: LoopCall, is_submitted: bool, host: HostCall | None) -> Tensor | PreparedCall | None:
        """The result of a call whose rows or beams the engine can drive; `None`: transformers' loop has to."""
        if call.cache is None:
            return None
        check_tokens(call.input_ids)
        check_tokens(call.others.get("inputs_embeds"))
        rows = engine_call(self, call, call.input_ids.device if host is None else host.device)
        if rows is None:
            return None
        check_prompt(self.paged, call, 0)
        if host is not None:
            with on_steps_stream(host.device):  # whose memory they take: steps may outlast the call
                host.place_items(rows.processors, rows.ends.others or ())
        return run_rows(self.paged, rows, call.generation_config, call.others.get("streamer"), is_submitted)

    @functools.wraps(GenerationMixin._sample)
    def _sample(
        self: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        preparation = _end_of_preparation()
        call = LoopCall(input_ids, logits_processor, stopping_criteria, generation_config, kwargs)
        run = functools.partial(self._run_sample, call, preparation, super()._sample)  # type: ignore[misc]
        return self._share("_sample", call, preparation, run)

    def _run_sample(self: Any, call: LoopCall, preparation: Any, loop: Any) -> Any:
        result = self._run_rows(call, *preparation)
        if result is not None:
            return result
        if call.cache is not None and pads_finished(call.criteria) and rows_may_leave(self.paged, call):
            call.criteria = RetiringCriteria(call.criteria, call.cache)
        return run_loop(self, preparation, loop, call)

    def _share(self: Any, method: str, call: LoopCall, preparation: Any, run: Any) -> Any:
        """Runs a prepared call here, or where the model is shared out between ranks, on the first of them."""
        is_submitted, host = preparation
        if is_submitted:  # which is shared as a request
            return run()
        device = call.input_ids.device if host is None else host.device
        return share_loop(self.paged, method, call, device, run)

    @functools.wraps(GenerationMixin._beam_search)
    def _beam_search(
        self: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        loop, preparation = super()._beam_search, _end_of_preparation()  # type: ignore[misc]
        call = LoopCall(input_ids, logits_processor, stopping_criteria, generation_config, kwargs)
        return self._share(
            "_beam_search", call, preparation, functools.partial(self._run_beams, call, preparation, loop)
        )

    def _run_beams(self: Any, call: LoopCall, preparation: Any, loop: Any) -> Any:
        result = self._run_rows(call, *preparation)
        if result is not None:
            return result
        watch = None
        if call.cache is not None and not call.others.get("synced_gpus"):
            watch = BeamSearchLoop(self, call.cache, rows_may_leave(self.paged, call))
            loop = functools.partial(base_class(self)._beam_search, watch)
        return run_loop(self, preparation, loop, call, watch=watch)

    @functools.wraps(GenerationMixin._assisted_decoding)
    def _assisted_decoding(
        self: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        call = LoopCall(input_ids, logits_processor, stopping_criteria, generation_config, kwargs, is_assisted=True)
        loop, preparation = super()._assisted_decoding, _end_of_preparation()  # type: ignore[misc]
        run = functools.partial(self._run_assisted, call, preparation, loop)
        return self._share("_assisted_decoding", call, preparation, run)

    def _run_assisted(self: Any, call: LoopCall, preparation: Any, loop: Any) -> Any:
        result = self._run_rows(call, *preparation)
        if result is not None:
            return result
        if len(call.input_ids) > 1 and can_do_without_drafts(call):
            return self._run_sample(call, preparation, super()._sample)  # type: ignore[misc]
        # A forward over candidates stores them all, one beyond the longest result included, before the wrong ones go.
        return run_loop(self, preparation, loop, call, spare_tokens=2)
