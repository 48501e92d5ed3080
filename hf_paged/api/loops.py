"""How a prepared `generate()` call runs: rows by the engine, or one of transformers' loops over a `PagedCache`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig, StoppingCriteriaList

from hf_paged.api.drafting import can_do_without_drafts
from hf_paged.api.engine_of import engine_of
from hf_paged.api.given_call import check_continuation, check_tokens
from hf_paged.api.routing import engine_rows, fall_back, rows_may_leave, why_loop
from hf_paged.attention.cache import PagedCache
from hf_paged.core.interrupts import allowed_interrupt, deferred_interrupt
from hf_paged.engine.beam_search import BeamSearchLoop
from hf_paged.engine.calls import TokenStream
from hf_paged.engine.engine import Engine
from hf_paged.engine.prepared_call import PreparedCall
from hf_paged.engine.prompts import check_ids
from hf_paged.kernels.transfers import to_device, to_host
from hf_paged.memory.streams import Handover, on_steps_stream
from hf_paged.model.base_class import base_class
from hf_paged.sampling.processors import pads_finished
from hf_paged.sampling.random import DRAWS


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


def prepare(model: Any, call: PreparedCall) -> PreparedCall:
    """Decides how a call runs: as rows that the engine drives, or by transformers' loop."""
    engine = engine_of(model)
    if engine.traits.one_by_one and call.cache is not None and call.cache.owned_by_call and call.input_ids.shape[1] > 1:
        _give_stock(engine, call, "its decoder takes a prompt of several tokens otherwise than one after another")
    if call.cache is not None:
        check_tokens(call.input_ids)
        check_tokens(call.others.get("inputs_embeds"))
        is_text = engine.core.bound.wrapper is None  # others may have ids that stand for pictures
        if is_text and not call.is_submitted and call.input_ids.is_cpu and call.input_ids.numel():
            low, high = call.input_ids.aminmax()
            check_ids(int(low), int(high), model)
        call.rows = engine_rows(model, call)
        if call.rows is not None:
            check_prompt(engine, call)
            if call.host is not None:
                with on_steps_stream(call.host.device):  # whose memory they take: steps may outlast the call
                    call.host.place_items(call.rows.processors, call.rows.ends.others or ())
            return call
    if call.is_assisted and len(call.input_ids) > 1 and can_do_without_drafts(call):
        return prepare(model, call)
    if call.cache is not None and call.others.get("synced_gpus"):
        _give_stock(engine, call, "synced_gpus=True")
    cache, config = call.cache, call.generation_config
    if cache is not None:
        engine.core.note_detour(f"transformers' own loop: {why_loop(model, call)}")
        longest = call.max_tokens = check_prompt(engine, call)
        per_step = config.output_hidden_states and config.return_dict_in_generate
        is_kept = any(row is not None and not row.is_recomputable for row in cache.sequences)
        if not engine.forwards.is_batched() or is_kept or per_step:
            call.num_blocks = call.input_ids.shape[0] * engine.core.manager.most_blocks(longest, longest)
        if call.loop == "_beam_search":
            call.watch = BeamSearchLoop(model, cache, rows_may_leave(engine, call))
        elif call.loop == "_sample" and pads_finished(call.criteria) and rows_may_leave(engine, call):
            call.criteria = RetiringCriteria(call.criteria, cache)
    # A tensor that the caller had on a stream of its own, weights just loaded.
    queued = Handover(engine.core.bound.placement[1]) if call.is_submitted else None
    call.run = partial(run_loop, engine, model, queued)
    return call


def _give_stock(engine: Engine, call: PreparedCall, reason: str) -> None:
    """Has a call run stock's loop, over stock's cache."""
    fall_back(engine, reason)
    stock: Cache = DynamicCache(config=engine.core.bound.text_config)
    if engine.traits.cross:
        stock = EncoderDecoderCache(stock, DynamicCache(config=engine.core.bound.text_config))
    call.others[engine.core.bound.cache_argument] = stock


def run_call(engine: Engine, call: PreparedCall) -> Any:
    """Runs a prepared call on its caller's thread, to the end."""
    if call.rows is None:
        assert call.run is not None
        return call.run(call, None)
    streamer = call.others.get("streamer")
    stream = None if streamer is None else TokenStream(streamer, call.rows.has_drafts)
    run = engine.calls.run(call.rows, stream)
    if streamer is not None:
        streamer.end()
    if call.rows.generator is not None:
        DRAWS.write({torch.device(call.rows.generator.device): call.rows.generator.get_state()})
    return run.result()


def run_loop(engine: Engine, model: Any, queued: Handover | None, call: PreparedCall, streamer: Any) -> Any:
    """Runs transformers' loop; the blocks of its `PagedCache`, if it has one, go back when they are not needed.

    Args:
        queued: What the caller's thread had queued on its device when it submitted the call.
        streamer: Of a submitted call.
    """
    if queued is not None:
        queued.follow()
    cache, config, width = call.cache, call.generation_config, call.input_ids.shape[1]
    # By name but for the ids, as transformers does it: a model may have a loop of its own.
    named = call.others | {
        "logits_processor": call.processors,
        "stopping_criteria": call.criteria,
        "generation_config": config,
    }
    if streamer is not None:
        named["streamer"] = streamer
    prompt = call.input_ids
    if call.host is not None:  # from here on on the device
        prompt, named = to_device(prompt, call.host.device), call.host.place(named)
        named["generation_config"] = call.host.place_config(config)
        call.host.place_items(call.processors, call.criteria)
    loop = partial(getattr(base_class(model), call.loop), call.watch or model, prompt, **named)
    draws: AbstractContextManager[None] = nullcontext()
    if (cache is not None or call.is_submitted) and (config.do_sample or not call.is_row_wise):
        # They begin where the global generators stood at the call's entry, whatever other threads draw. Where a
        # submitted request ends in the background, its caller is in the midst of something else; what it calls isn't.
        is_within = engine.core.current_loop is None or DRAWS.generators is not None
        draws = DRAWS.private(call.states, writes_back=is_within)
    if cache is None:
        with draws:
            return loop()
    with deferred_interrupt(), engine.calls.decoding(cache, call.num_blocks, call.max_tokens):
        # The blocks go back while the call still counts as one that will return some: a call that waits for room
        # would otherwise find, for a moment, neither room nor a call to wait for.
        try:
            with draws, allowed_interrupt():
                result = loop()
        except BaseException:
            if cache.owned_by_call:
                cache.reset()
            raise
        if cache.owned_by_call and isinstance(result, Tensor):
            cache.reset()
        sequences = result if isinstance(result, Tensor) else result.sequences
        engine.core.post(partial(engine.core.count_generated, _num_generated(sequences[:, width:], config)))
        cache.owned_by_call = False  # if it is returned to the caller, it is now theirs
    return result


def check_prompt(engine: Engine, call: PreparedCall) -> int:
    """Refuses an empty prompt, one that could outgrow the whole pool, and one that a kept cache doesn't begin.

    Before anything is allocated.

    Returns:
        Tokens of a row at its longest, padding included.
    """
    input_ids, generation_config, cache = call.input_ids, call.generation_config, call.cache
    assert cache is not None
    embeds: Tensor | None = call.others.get("inputs_embeds")
    prompt = input_ids.shape[1] + (embeds.shape[1] if embeds is not None and input_ids.shape[1] == 0 else 0)
    if prompt == 0:
        raise ValueError("the prompt is empty: generate() needs at least one token")
    mask: Tensor | None = call.of_prompt("attention_mask")
    # The mask is as long as the whole sequence where only the tokens that a kept cache lacks were given.
    mask_length = getattr(generation_config, "_mask_length", prompt) if mask is None else mask.shape[-1]
    # Where transformers leaves the cached columns out (5.17 doesn't in chunks); drafts need not be right.
    leaves_out = engine.core.bound.cache_argument == "past_key_values" and not call.is_assisted
    leaves_out &= generation_config.prefill_chunk_size is None
    is_whole = embeds is not None or mask_length == prompt
    if cache.get_seq_length() and leaves_out and is_whole and not generation_config.is_assistant:
        check_continuation(cache, input_ids if embeds is None else embeds, mask)
    longest = prompt = max(prompt, mask_length)
    if mask is not None and mask.ndim == 2 and mask.shape[1] == prompt and engine.forwards.is_batched():
        longest = int(mask.sum(dim=1).max())  # once a call
    new_tokens = max(generation_config.max_length - input_ids.shape[1], 0)
    growth = max(new_tokens - 1, 0)  # the last token's keys are never needed
    if call.is_assisted and call.rows is None:
        growth += (
            2  # a forward over candidates stores them all, one beyond the longest result, before the wrong ones go
        )
    source = max((source.num_tokens for source in call.rows.sources), default=0) if call.rows is not None else 0
    engine.core.pool.check_fits(longest + growth, longest, new_tokens, source)
    return prompt + growth


def _num_generated(new: Tensor, generation_config: GenerationConfig) -> int:
    """Counts tokens behind the prompts, up to each row's first end-of-sequence token."""
    eos = getattr(generation_config, "_eos_token_tensor", None)
    if eos is None:
        return new.numel()
    new, eos = to_host([new, eos])
    is_eos = torch.isin(new, eos)
    return int((is_eos.cumsum(dim=1) - is_eos.long() == 0).sum())
