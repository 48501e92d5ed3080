"""What a patched model's class adds to its own: `generate()` prepares a `PagedCache`, and forwards over one go to the
engine.

The decoding loops stay transformers' own, so processors, criteria, streamers, beams, draws and outputs are theirs to
the letter. Ours are the memory and the forward: a prompt is computed once for all its samples or beams, padding is
never computed, and rows that are finished leave the batch.
"""

from __future__ import annotations

import copy
import functools
import inspect
import queue
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.utils import logging

from hf_paged.attention.cache import PagedCache
from hf_paged.core.config import PagedConfig
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.core.interrupts import allowed_interrupt, deferred_interrupt
from hf_paged.engine.beam_search import BeamSearchLoop
from hf_paged.engine.engine import Engine
from hf_paged.engine.sample_run import SampleCall, SampleRun
from hf_paged.engine.submission import LoopResult
from hf_paged.kernels.transfers import to_device, to_host
from hf_paged.memory.streams import Handover, on_steps_stream
from hf_paged.model.forward_call import ForwardCall
from hf_paged.model.host_call import HOST_CALLS, HostCall
from hf_paged.model.runner import ModelTraits, is_stochastic
from hf_paged.sampling.processors import are_row_wise, ends_together, pads_finished, take_any_rows
from hf_paged.sampling.random import DRAWS, GeneratorStates

logger = logging.get_logger(__name__)

_CPU = torch.device("cpu")
_ENGINE = "_hf_paged_engine"
_SETTINGS = "_hf_paged_settings"
SLOW_STREAMER = 0.002  # seconds between two steps, from which on steps don't wait for a streamer

# What `generate()` needs for stop strings and hands on to every forward, where no model looks at it.
_IGNORED_BY_FORWARD = {"tokenizer"}


class RetiringCriteria(StoppingCriteriaList):
    """The call's stopping criteria, which also tell the cache which rows are finished."""

    def __init__(self, criteria: Iterable[Any], cache: PagedCache) -> None:
        super().__init__(criteria)
        self._cache = cache

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        is_done: Tensor = super().__call__(input_ids, scores, **kwargs)
        # The loop reads the same tensor on the host right after this.
        finished = [row for row, is_over in enumerate(to_host([is_done])[0].tolist()) if is_over]
        if len(finished) < len(is_done):
            self._cache.retire(finished)
        return is_done


class PagedGenerationMixin:
    """Methods put in front of a model's own class by `patch()`; `patched_class` builds the combination.

    Only `patch()` and copies of a patched model make instances of it. What the class itself makes
    (`type(model)(config)`, `from_pretrained`) is of the model's own class.
    """

    @property
    def paged(self) -> Engine:
        """The engine behind this model."""
        engine: Engine = self.__dict__[_ENGINE]
        return engine

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickling and `copy.deepcopy`: the copy is patched with the same settings and gets a pool of its own."""
        engine = self.paged
        settings = (engine.config, engine.traits)
        state = {name: value for name, value in self.__getstate__().items() if name != _ENGINE}
        return _rebuild, (base_class(self), settings), state

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        settings = self.__dict__.pop(_SETTINGS)
        super().__setstate__(state)  # type: ignore[misc]
        attach(self, *settings)

    def _prepare_cache_for_generation(
        self: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Makes the call's cache a `PagedCache`, unless the call needs another kind."""
        result = self._choose_cache(generation_config, model_kwargs, *args, **kwargs)
        # What comes next is a look at whether model and inputs are on the same device.
        HOST_CALLS.hides_device = HOST_CALLS.call is not None
        return result

    def _choose_cache(
        self: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        engine: Engine = self.paged
        given = model_kwargs.get("past_key_values")
        if isinstance(given, PagedCache):
            if given.store is not engine:
                raise ValueError("this PagedCache belongs to another model (or to this one before it was unpatched)")
            if generation_config.cache_implementation is not None:
                raise ValueError("give either cache_implementation or a PagedCache as past_key_values, not both")
            reason = None if generation_config.use_cache else "use_cache=False"
        else:
            reason = _why_stock(self, generation_config, given)
        if reason is not None:
            _fall_back(engine.config, reason)
        fan_out = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        engine.look_at_hooks()
        if (reason is None or isinstance(given, PagedCache)) and engine.check_hooks():
            fan_out = 1  # they are shown every row
        if isinstance(given, PagedCache):
            given.expect_fan_out(fan_out)
        elif reason is None:
            model_kwargs["past_key_values"] = PagedCache.for_call(engine, fan_out)
            return None
        stock = super()._prepare_cache_for_generation  # type: ignore[misc]
        return stock(generation_config, model_kwargs, *args, **kwargs)

    def _get_logits_processor(self: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        HOST_CALLS.hides_device = False
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
            own = self.paged.stop_strings.criterion(tokenizer, generation_config.stop_strings, self.device)
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
        return _CPU if HOST_CALLS.hides_device else super().device  # type: ignore[misc]

    @functools.wraps(GenerationMixin.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = self.device
        devices = {torch.device("cpu"), device}
        entering = DRAWS.entering(device for device in devices if device.type in ("cpu", "cuda"))
        # The gate for Ctrl-C is put up once a call, and opened and closed in each step.
        with deferred_interrupt(), entering, allowed_interrupt():
            if device.type == "cpu":
                return super().generate(*args, **kwargs)  # type: ignore[misc]
            is_submitted = self.paged.capture is not None  # whose prompt is on the CPU
            call = HostCall.of(self, device, args, kwargs, is_submitted) if device.type == "cuda" else None
            if call is not None:
                args, kwargs = (), call.arguments
            elif is_submitted:
                args = tuple(to_device(value, device) if isinstance(value, Tensor) else value for value in args)
            outer, HOST_CALLS.call = HOST_CALLS.call, call
            try:
                return super().generate(*args, **kwargs)  # type: ignore[misc]
            finally:
                HOST_CALLS.call, HOST_CALLS.hides_device = outer, False

    @functools.wraps(GenerationMixin._sample)
    def _sample(
        self: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        cache = kwargs.get("past_key_values")
        host = HOST_CALLS.take()
        if isinstance(cache, PagedCache):
            device = input_ids.device if host is None else host.device
            arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
            call = engine_call(self, cache, device, *arguments, kwargs)
            if call is not None:
                _check_prompt(self.paged, cache, input_ids, generation_config, kwargs, 0)
                if host is not None:
                    with on_steps_stream(device):  # whose memory they take: steps may outlast the call
                        host.place_items(call.processors, call.ends.others or ())
                return _run_rows(self.paged, call, generation_config, kwargs.get("streamer"))
            if pads_finished(stopping_criteria) and _rows_may_leave(
                self.paged, cache, logits_processor, stopping_criteria, generation_config
            ):
                stopping_criteria = RetiringCriteria(stopping_criteria, cache)
        loop = super()._sample  # type: ignore[misc]
        return _run_loop(self, host, loop, input_ids, logits_processor, stopping_criteria, generation_config, kwargs)

    @functools.wraps(GenerationMixin._beam_search)
    def _beam_search(
        self: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        loop, host = super()._beam_search, HOST_CALLS.take()  # type: ignore[misc]
        cache = kwargs.get("past_key_values")
        watch = None
        if isinstance(cache, PagedCache) and not kwargs.get("synced_gpus"):
            retires = _rows_may_leave(self.paged, cache, logits_processor, stopping_criteria, generation_config)
            watch = BeamSearchLoop(self, cache, retires)
            loop = functools.partial(base_class(self)._beam_search, watch)
        return _run_loop(
            self, host, loop, input_ids, logits_processor, stopping_criteria, generation_config, kwargs, watch=watch
        )

    @functools.wraps(GenerationMixin._assisted_decoding)
    def _assisted_decoding(
        self: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        loop, host = super()._assisted_decoding, HOST_CALLS.take()  # type: ignore[misc]
        # A forward over candidates stores them all, one beyond the longest result included, before the wrong ones go.
        return _run_loop(
            self, host, loop, input_ids, logits_processor, stopping_criteria, generation_config, kwargs, spare_tokens=2
        )


def paged_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a patched class: over a `PagedCache` the engine runs it, everything else is the original's."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        given = dict(bound.arguments)
        cache = given.get("past_key_values")
        if not isinstance(cache, PagedCache) or given.get("use_cache") is False:
            return original(self, *args, **kwargs)
        # What compiles the model compiles its forward, not the engine: locks, queues, steps of everybody's rows.
        run = _uncompiled_paged if torch.compiler.is_compiling() else _forward_paged
        return run(self, cache, signature, given)

    return forward


def _forward_paged(self: Any, cache: PagedCache, signature: inspect.Signature, given: dict[str, Any]) -> Any:
    """A forward over a `PagedCache`, by the engine; `given`: the arguments as bound to the original's signature."""
    del given[next(iter(given))]  # self
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    return_dict = given.pop("return_dict", None)
    call = ForwardCall(
        input_ids=given.pop("input_ids", None),
        inputs_embeds=given.pop("inputs_embeds", None),
        attention_mask=given.pop("attention_mask", None),
        position_ids=given.pop("position_ids", None),
        logits_to_keep=given.pop("logits_to_keep", 0),
    )
    for name in ("past_key_values", "use_cache", *_IGNORED_BY_FORWARD):
        given.pop(name, None)
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if given.get(name) is None and getattr(self.config, name, False):
            given[name] = True  # asked for by the config
    # Arguments at their neutral value ask for nothing; the rest needs the model's own forward.
    call.others = {name: value for name, value in given.items() if value is not None and value is not False}
    call.on_host()  # before anything is locked
    output = self.paged.forward(cache, call)
    wants_tuple = return_dict is False or (return_dict is None and not self.config.return_dict)
    return output.to_tuple() if wants_tuple else output


_uncompiled_paged = torch.compiler.disable(
    _forward_paged,
    reason="a forward over a PagedCache is no part of a graph: compile the model without fullgraph=True",
)


def patched_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass of `base` under the same name, so that what reads the name (`save_pretrained`) sees the original."""

    @functools.wraps(base.__init__)
    def become_unpatched(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = base
        self.__init__(*args, **kwargs)

    return type(
        base.__name__,
        (PagedGenerationMixin, base),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__init__": become_unpatched,
            "forward": paged_forward(base.forward),
        },
    )


@deferred_interrupt()
def attach(model: Any, config: PagedConfig, traits: ModelTraits) -> None:
    """Makes a model paged, in place: gives it an engine, and its class the methods above.

    Args:
        model: A supported model; patched already only while it is being unpickled.
        config: The settings.
        traits: What `is_supported` found out about its architecture.
    """
    base = base_class(model)
    # Past nn.Module.__setattr__: the engine is no part of the model's state.
    model.__dict__[_ENGINE] = Engine(model, config, base.forward, traits)
    model.__class__ = patched_class(base)


@deferred_interrupt()
def detach(model: Any) -> None:
    """Undoes `attach`. Live `PagedCache` objects keep the engine's pool until they are dropped."""
    model.__class__ = base_class(model)
    engine = model.__dict__.pop(_ENGINE, None)
    if engine is not None:
        engine.close()


def base_class(model: nn.Module) -> type[PreTrainedModel]:
    """The model's class without ours."""
    cls: Any = type(model)
    if not issubclass(cls, PagedGenerationMixin):
        return cls
    kinds = cls.__mro__
    return kinds[kinds.index(PagedGenerationMixin) + 1]


def _rebuild(base: type[PreTrainedModel], settings: tuple[PagedConfig, ModelTraits]) -> Any:
    model: Any = object.__new__(patched_class(base))
    model.__dict__[_SETTINGS] = settings
    return model


def engine_call(
    model: Any,
    cache: PagedCache,
    device: torch.device,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    kwargs: dict[str, Any],
) -> SampleCall | None:
    """The call as rows for the engine to sample, if nobody could tell that from transformers' own loop; else `None`.

    `device` is where the caller has its tensors.

    Nobody can when all of the caller's code in it is transformers' own and row-wise, when no per-step outputs are asked
    for, and when nothing hooks or overrides the forward and its preparation.
    """
    engine: Engine = model.paged
    if not (
        engine.is_batched()
        and _rows_may_leave(engine, cache, processors, criteria, generation_config)
        and (pads_finished(criteria) or ends_together(criteria))
        and not cache.sequences
        and input_ids.shape[1] > 0
        and _is_plain(model)
        and take_any_rows(processors)
    ):
        return None
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "streamer"}
    known |= _IGNORED_BY_FORWARD
    if any(value is not None and value is not False for name, value in kwargs.items() if name not in known):
        return None
    rows, width = input_ids.shape
    if kwargs.get("streamer") is not None and rows > 1:
        return None  # a streamer is given the tokens of all rows step by step
    padding = [0] * rows
    mask: Tensor | None = kwargs.get("attention_mask")
    positions: Tensor | None = kwargs.get("position_ids")
    if positions is not None and (positions.shape != input_ids.shape or positions.is_floating_point()):
        return None
    if mask is not None and mask.shape != input_ids.shape:
        return None
    if input_ids.device.type == "cuda":
        found = {name: value for name, value in (("mask", mask), ("positions", positions)) if value is not None}
        input_ids, *copies = to_host([input_ids, *found.values()])
        copy_of = dict(zip(found, copies, strict=True))
        mask, positions = copy_of.get("mask"), copy_of.get("positions")
    if mask is not None:
        padding = (mask == 0).sum(dim=1).tolist()
        if (mask == 0).long().cumprod(dim=1).sum(dim=1).tolist() != padding or max(padding) == width:
            return None
    if positions is not None:
        # On the host by name: the caller may have set another default device.
        expected = torch.arange(width, device="cpu") - torch.tensor(padding, device="cpu")[:, None]
        if not bool(((positions.cpu() == expected) | (expected < 0)).all()):
            return None
    generator = None
    if generation_config.do_sample:
        generator = torch.Generator(device)
        generator.set_state(DRAWS.entry[torch.device(generator.device)])
    pad = generation_config._pad_token_tensor
    return SampleCall(
        input_ids=input_ids,
        padding=padding,
        num_samples=generation_config.num_return_sequences or 1,
        processors=processors,
        criteria=criteria,
        device=device,
        do_sample=bool(generation_config.do_sample),
        pad_token_id=0 if pad is None else int(pad),
        generator=generator,
    )


def _is_plain(model: Any) -> bool:
    """Whether each step of transformers' loop would do nothing but call the model's forward with the next token."""
    own = vars(model)
    names = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "_sample")
    methods = (getattr(base_class(model), name, None) for name in names)
    return (
        not model._forward_hooks
        and not model._forward_pre_hooks
        and "forward" not in own
        and not any(name in own for name in names)
        and all(method is None or method.__module__.startswith("transformers.") for method in methods)
    )


def _run_rows(engine: Engine, call: SampleCall, generation_config: GenerationConfig, streamer: Any) -> Tensor:
    """Has the engine generate a call's rows, and waits on the caller's thread, where its streamer runs."""
    if engine.capture is not None:
        capture = engine.capture
        capture.call, capture.prompt, capture.generation_config = call, call.input_ids, generation_config
        capture.is_streamable = call.input_ids.shape[0] == 1
        capture.states = DRAWS.entry
        return call.input_ids
    stream = None if streamer is None else _Stream(streamer)
    with deferred_interrupt(), engine.leading():
        run = engine.run(call, None if stream is None else stream.put, on_end=None if stream is None else stream.close)
        try:
            if stream is not None and not engine.is_stepping:
                run.run_alone(stream.hand_out)
                stream.follow()
            run.wait()
            if stream is not None:
                stream.follow()
            if run.error is not None:
                raise run.error
        except BaseException:
            if not run.is_done:
                engine.cancel_run(run)
                engine.wake()
                run.wait(timeout=60)  # no longer than the step it is in
            raise
    if streamer is not None:
        streamer.end()
    if call.generator is not None:
        DRAWS.write({torch.device(call.generator.device): call.generator.get_state()})
    return run.result()


class _Stream:
    """A call's tokens on their way to its streamer, which runs on the caller's thread."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._is_over = False
        self.put: Callable[[int], None] = self._tokens.put

    def close(self, run: SampleRun) -> None:
        """No more tokens come."""
        self._tokens.put(None)

    def hand_out(self) -> bool:
        """Gives the streamer what has come, between two steps; returns whether it is too slow for steps to wait."""
        started = time.perf_counter()
        while not self._tokens.empty():
            self._hand_out_one()
        return time.perf_counter() - started > SLOW_STREAMER

    def follow(self) -> None:
        """Gives the streamer all tokens, until there are no more."""
        while not self._is_over:
            self._hand_out_one()

    @allowed_interrupt()
    def _hand_out_one(self) -> None:
        token = self._tokens.get()
        if token is None:
            self._is_over = True
        else:
            self._streamer.put(torch.tensor([token], device="cpu"))


def _run_loop(
    model: Any,
    host: HostCall | None,
    loop: Callable[..., Any],
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    kwargs: dict[str, Any],
    spare_tokens: int = 0,
    watch: BeamSearchLoop | None = None,
) -> Any:
    """Runs one of transformers' decoding loops over a `PagedCache`, and returns the blocks when nobody needs them.

    Args:
        model: The patched model.
        host: The call, if what follows has been prepared on the host.
        loop: The unpatched class's loop.
        input_ids: The loop's arguments, from here on.
        processors: Logits processors.
        criteria: Stopping criteria.
        generation_config: The call's prepared config.
        kwargs: The loop's other arguments, `past_key_values` among them.
        spare_tokens: Slots a sequence needs at times beyond those of its longest result.
        watch: What stands in for the model in a beam search.
    """
    cache = kwargs.get("past_key_values")
    engine: Engine = model.paged
    if isinstance(cache, PagedCache) and kwargs.get("synced_gpus"):
        _fall_back(engine.config, "synced_gpus=True")
        cache = kwargs["past_key_values"] = DynamicCache(config=model.config.get_text_config(decoder=True))
    states = DRAWS.entry
    num_blocks = 0
    if isinstance(cache, PagedCache):
        longest = _check_prompt(engine, cache, input_ids, generation_config, kwargs, spare_tokens)
        per_step = generation_config.output_hidden_states and generation_config.return_dict_in_generate
        if not engine.is_batched() or cache.is_opaque or per_step:
            num_blocks = input_ids.shape[0] * engine.manager.most_blocks(longest, longest)

    def run(**more: Any) -> Any:
        # By name but for the ids, as transformers does it: a model may have a loop of its own.
        prompt, named = input_ids, kwargs | more
        named |= {"logits_processor": processors, "stopping_criteria": criteria, "generation_config": generation_config}
        if host is not None:  # from here on on the device
            prompt, named = to_device(prompt, host.device), host.place(named)
            named["generation_config"] = host.place_config(generation_config)
            host.place_items(processors, criteria)
        if not isinstance(cache, PagedCache):
            return loop(prompt, **named)
        with deferred_interrupt(), engine.calling(cache, num_blocks):
            # The blocks go back while the call still counts as one that will return some: who waits for room would
            # otherwise find, for a moment, no room and nobody to wait for.
            try:
                draws = _private_draws(engine, states, processors, criteria, generation_config)
                with draws, allowed_interrupt():
                    result = loop(prompt, **named)
            except BaseException:
                if cache.owned_by_call:
                    cache.reset()
                raise
            if cache.owned_by_call and isinstance(result, Tensor):
                cache.reset()
            sequences = result if isinstance(result, Tensor) else result.sequences
            engine.count_generated(_num_generated(sequences, input_ids, generation_config))
            cache.owned_by_call = False  # if it is returned to the caller, it is now theirs
        return result

    if engine.capture is None:
        return run()

    queued = Handover(model.device)  # a tensor that the caller had on a stream of its own, weights just loaded

    def run_later(streamer: Any) -> LoopResult:
        queued.follow()
        result = run(**({} if streamer is None else {"streamer": streamer}))
        scores = None
        if watch is not None and watch.beam_scores is not None:
            scores = watch.beam_scores[:, : generation_config.num_return_sequences].reshape(-1)
        return LoopResult(result if isinstance(result, Tensor) else result.sequences, scores)

    capture = engine.capture
    capture.loop, capture.prompt, capture.generation_config = run_later, input_ids, generation_config
    capture.is_streamable = input_ids.shape[0] == 1 and watch is None and (generation_config.num_beams or 1) == 1
    capture.states = states
    return input_ids


def _private_draws(
    engine: Engine,
    states: GeneratorStates,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
) -> AbstractContextManager[None]:
    """Draws of the loop begin where the global generators stood at the call's entry, whatever other threads draw."""
    may_draw = generation_config.do_sample or not are_row_wise((*processors, *criteria))
    # Where a submitted request ends in the background, its caller is in the midst of something else.
    return DRAWS.private(states, writes_back=not engine.is_background) if may_draw else nullcontext()


def _check_prompt(
    engine: Engine,
    cache: PagedCache,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    kwargs: dict[str, Any],
    spare_tokens: int,
) -> int:
    """Refuses an empty prompt, and one that could outgrow the whole pool, before anything is allocated.

    Returns:
        Tokens of a row at its longest, padding included.
    """
    embeds: Tensor | None = kwargs.get("inputs_embeds")
    prompt = input_ids.shape[1] + (embeds.shape[1] if embeds is not None and input_ids.shape[1] == 0 else 0)
    if prompt == 0:
        raise ValueError("the prompt is empty: generate() needs at least one token")
    mask: Tensor | None = kwargs.get("attention_mask")
    # The mask is as long as the whole sequence where only the tokens that a kept cache lacks were given.
    mask_length = getattr(generation_config, "_mask_length", prompt) if mask is None else mask.shape[-1]
    longest = prompt = max(prompt, mask_length)
    if mask is not None and mask.ndim == 2 and mask.shape[1] == prompt and engine.is_batched() and not cache.is_opaque:
        longest = int(mask.sum(dim=1).max())  # once a call
    new_tokens = max(generation_config.max_length - input_ids.shape[1], 0)
    growth = max(new_tokens - 1, 0) + spare_tokens  # the last token's keys are never needed
    engine.check_fits(longest + growth, longest, new_tokens)
    return prompt + growth


def _num_generated(sequences: Tensor, input_ids: Tensor, generation_config: GenerationConfig) -> int:
    """Tokens in the result behind the prompts, up to each row's first end-of-sequence token."""
    new = sequences[:, input_ids.shape[1] :]
    eos = getattr(generation_config, "_eos_token_tensor", None)
    if eos is None:
        return new.numel()
    new, eos = to_host([new, eos])
    is_eos = torch.isin(new, eos)
    return int((is_eos.cumsum(dim=1) - is_eos.long() == 0).sum())


def _rows_may_leave(
    engine: Engine,
    cache: PagedCache,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
) -> bool:
    """Whether finished rows can be left out of the remaining forwards without anybody noticing.

    Not if the cache outlives the call, per-step outputs were asked for, or somebody's own code looks at the whole
    batch.
    """
    return (
        cache.owned_by_call
        and not engine.check_hooks()
        and engine.traits.rows_independent
        and not generation_config.return_dict_in_generate
        and are_row_wise((*processors, *criteria))
    )


def _why_stock(model: Any, generation_config: GenerationConfig, cache: Any) -> str | None:
    """Why a call must run stock `generate()` with its own cache, or `None`."""
    if cache is not None:
        return f"past_key_values is a {type(cache).__name__}"
    if generation_config.use_cache is False:
        return "use_cache=False"
    if generation_config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation={generation_config.cache_implementation!r}"
    if generation_config.output_attentions and generation_config.return_dict_in_generate:
        return "output_attentions=True"
    if _peft_type(model) in ("PREFIX_TUNING", "CARTRIDGE"):
        return "its PEFT adapter brings learned keys and values in a cache of its own"
    if model.training and is_stochastic(model):
        return "the model is in training mode with dropout or gradient checkpointing (call model.eval())"
    return None


def _peft_type(model: nn.Module) -> str | None:
    """Type of the PEFT wrapper whose `generate()` is running: it puts a method of its own on the model for the time."""
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    kind = getattr(getattr(wrapper, "active_peft_config", None), "peft_type", None)
    return None if kind is None else str(getattr(kind, "value", kind))


def _fall_back(config: PagedConfig, reason: str) -> None:
    if config.strict:
        raise UnsupportedCallError(f"{reason}: only stock generate() can run this call, and strict=True forbids it")
    logger.warning_once(f"hf_paged: this call runs stock generate() without the paged cache: {reason}")
