"""How a prepared `generate()` call runs: rows by the engine, or one of transformers' loops over a `PagedCache`."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteriaList

from hf_paged.api.given_call import check_continuation
from hf_paged.api.loop_call import LoopCall
from hf_paged.api.routing import fall_back
from hf_paged.attention.cache import PagedCache
from hf_paged.core.interrupts import allowed_interrupt, deferred_interrupt
from hf_paged.engine.beam_search import BeamSearchLoop
from hf_paged.engine.engine import Engine
from hf_paged.engine.prepared_call import LoopResult, PreparedCall
from hf_paged.engine.run import Run
from hf_paged.engine.sampled_request import SampleCall, SampledRequest
from hf_paged.kernels.transfers import to_device, to_host
from hf_paged.memory.streams import Handover
from hf_paged.model.host_call import HostCall
from hf_paged.sampling.logprobs import TokenLogprobs
from hf_paged.sampling.random import DRAWS, GeneratorStates

SLOW_STREAMER = 0.002  # seconds between two steps, from which on steps don't wait for a streamer


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


def run_rows(
    engine: Engine, call: SampleCall, generation_config: GenerationConfig, streamer: Any, is_submitted: bool
) -> Tensor | PreparedCall:
    """Has the engine generate a call's rows, and waits on the caller's thread, where its streamer runs.

    Returns:
        The result, or the call itself if it `is_submitted`.
    """
    if is_submitted:
        is_streamable = call.input_ids.shape[0] == 1
        return PreparedCall(call, call.input_ids, generation_config, is_streamable, DRAWS.entry)
    calls, stream = engine.calls, None if streamer is None else _Stream(streamer, call.has_drafts)
    with deferred_interrupt(), calls.leading():
        run = calls.start(call, None if stream is None else stream.put, on_end=None if stream is None else stream.close)
        try:
            if stream is not None and isinstance(run, SampledRequest):
                run.run_alone(stream.hand_out)
                stream.follow()
            run.wait()
            if stream is not None:
                stream.follow()
            if run.error is not None:
                raise run.error
        except BaseException:
            if not run.is_done:
                calls.cancel(run)
                calls.wake()
                run.wait(timeout=60)  # no longer than the step it is in
            raise
    if streamer is not None:
        streamer.end()
    if call.generator is not None:
        DRAWS.write({torch.device(call.generator.device): call.generator.get_state()})
    return run.result()


class _Stream:
    """A call's tokens on their way to its streamer, which runs on the caller's thread."""

    def __init__(self, streamer: Any, has_drafts: bool) -> None:
        self._streamer = streamer
        self._has_drafts = has_drafts  # tokens of a step come together, and as a row
        self._tokens: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._new: list[int] = []
        self._is_over = False

    def put(self, row: int, token: int, said: TokenLogprobs | None, is_last: bool) -> None:
        self._new.append(token)
        if is_last:
            self._tokens.put(self._new)
            self._new = []

    def close(self, run: Run) -> None:
        self._tokens.put(None)

    def hand_out(self) -> bool:
        """Gives the streamer what has come, between two steps; returns whether it is too slow for steps to wait."""
        started = time.perf_counter()
        while not self._tokens.empty():
            self._hand_out_one()
        return time.perf_counter() - started > SLOW_STREAMER

    def follow(self) -> None:
        while not self._is_over:
            self._hand_out_one()

    @allowed_interrupt()
    def _hand_out_one(self) -> None:
        tokens = self._tokens.get()
        if tokens is None:
            self._is_over = True
        else:
            self._streamer.put(torch.tensor([tokens] if self._has_drafts else tokens, device="cpu"))


def run_loop(
    model: Any,
    preparation: tuple[bool, HostCall | None],
    loop: Callable[..., Any],
    call: LoopCall,
    spare_tokens: int = 0,
    watch: BeamSearchLoop | None = None,
) -> Any:
    """Runs one of transformers' decoding loops over a `PagedCache`, and returns the blocks when they are not needed.

    Args:
        spare_tokens: Slots a sequence needs at times beyond those of its longest result.
        watch: What stands in for the model in a beam search.

    Returns:
        What the loop does, or the call itself if it was submitted.
    """
    is_submitted, host = preparation
    engine: Engine = model.paged
    input_ids, generation_config = call.input_ids, call.generation_config
    if call.cache is not None and call.others.get("synced_gpus"):
        fall_back(engine.config, "synced_gpus=True")
        call.others[engine.core.bound.cache_argument] = DynamicCache(config=model.config.get_text_config(decoder=True))
    states, cache = DRAWS.entry, call.cache
    num_blocks = 0
    if cache is not None:
        longest = check_prompt(engine, call, spare_tokens)
        per_step = generation_config.output_hidden_states and generation_config.return_dict_in_generate
        if not engine.forwards.is_batched() or cache.is_padded or per_step:
            num_blocks = input_ids.shape[0] * engine.core.manager.most_blocks(longest, longest)

    def run(**more: Any) -> Any:
        # By name but for the ids, as transformers does it: a model may have a loop of its own.
        prompt, named = input_ids, call.named | more
        if host is not None:  # from here on on the device
            prompt, named = to_device(prompt, host.device), host.place(named)
            named["generation_config"] = host.place_config(generation_config)
            host.place_items(call.processors, call.criteria)
        if cache is None:
            with _private_draws(engine, states, call) if is_submitted else nullcontext():
                return loop(prompt, **named)
        with deferred_interrupt(), engine.calls.decoding(cache, num_blocks):
            # The blocks go back while the call still counts as one that will return some: a call that waits for room
            # would otherwise find, for a moment, neither room nor a call to wait for.
            try:
                draws = _private_draws(engine, states, call)
                with draws, allowed_interrupt():
                    result = loop(prompt, **named)
            except BaseException:
                if cache.owned_by_call:
                    cache.reset()
                raise
            if cache.owned_by_call and isinstance(result, Tensor):
                cache.reset()
            sequences = result if isinstance(result, Tensor) else result.sequences
            num_generated = _num_generated(sequences, input_ids, generation_config)
            engine.core.post(partial(engine.core.count_generated, num_generated))
            cache.owned_by_call = False  # if it is returned to the caller, it is now theirs
        return result

    if not is_submitted:
        return run()

    # A tensor that the caller had on a stream of its own, weights just loaded.
    queued = Handover(engine.core.bound.placement[1])

    def run_later(streamer: Any) -> LoopResult:
        queued.follow()
        result = run(**({} if streamer is None else {"streamer": streamer}))
        scores = None
        if watch is not None and watch.beam_scores is not None:
            scores = watch.beam_scores[:, : generation_config.num_return_sequences].reshape(-1)
        return LoopResult(result if isinstance(result, Tensor) else result.sequences, scores)

    is_streamable = input_ids.shape[0] == 1 and watch is None and (generation_config.num_beams or 1) == 1
    return PreparedCall(run_later, input_ids, generation_config, is_streamable, states)


def _private_draws(engine: Engine, states: GeneratorStates, call: LoopCall) -> AbstractContextManager[None]:
    """Draws of the loop begin where the global generators stood at the call's entry, whatever other threads draw."""
    may_draw = call.generation_config.do_sample or not call.is_row_wise
    # Where a submitted request ends in the background, its caller is in the midst of something else.
    return DRAWS.private(states, writes_back=engine.core.current_loop is None) if may_draw else nullcontext()


def check_prompt(engine: Engine, call: LoopCall, spare_tokens: int) -> int:
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
    mask: Tensor | None = call.others.get("attention_mask")
    # The mask is as long as the whole sequence where only the tokens that a kept cache lacks were given.
    mask_length = getattr(generation_config, "_mask_length", prompt) if mask is None else mask.shape[-1]
    # Where transformers leaves the cached columns out (5.17 doesn't in chunks); drafts need not be right.
    leaves_out = engine.core.bound.cache_argument == "past_key_values" and not call.is_assisted
    leaves_out &= generation_config.prefill_chunk_size is None
    is_whole = embeds is not None or mask_length == prompt
    if cache.get_seq_length() and leaves_out and is_whole and not generation_config.is_assistant:
        check_continuation(cache, input_ids if embeds is None else embeds, mask)
    longest = prompt = max(prompt, mask_length)
    if (
        mask is not None
        and mask.ndim == 2
        and mask.shape[1] == prompt
        and engine.forwards.is_batched()
        and not cache.is_padded
    ):
        longest = int(mask.sum(dim=1).max())  # once a call
    new_tokens = max(generation_config.max_length - input_ids.shape[1], 0)
    growth = max(new_tokens - 1, 0) + spare_tokens  # the last token's keys are never needed
    engine.core.pool.check_fits(longest + growth, longest, new_tokens)
    return prompt + growth


def _num_generated(sequences: Tensor, input_ids: Tensor, generation_config: GenerationConfig) -> int:
    """Counts the tokens in the result behind the prompts, up to each row's first end-of-sequence token."""
    new = sequences[:, input_ids.shape[1] :]
    eos = getattr(generation_config, "_eos_token_tensor", None)
    if eos is None:
        return new.numel()
    new, eos = to_host([new, eos])
    is_eos = torch.isin(new, eos)
    return int((is_eos.cumsum(dim=1) - is_eos.long() == 0).sum())
