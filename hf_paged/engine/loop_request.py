"""Requests that have a thread of their own: for one of transformers' loops, or for a look at a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_paged.engine.call_context import CallContext, call_context, within
from hf_paged.engine.core import EngineCore
from hf_paged.engine.decoding_loop import CallCancelledError, DecodingLoop
from hf_paged.engine.executor import autocasting
from hf_paged.engine.prepared_call import PreparedCall
from hf_paged.engine.request import RequestState
from hf_paged.engine.scoring import LogitRows, token_logprobs
from hf_paged.sampling.logprobs import LogprobsWanted, ScoresWanted
from hf_paged.sampling.processors import RowEnds
from hf_paged.sampling.random import DRAWS, GeneratorStates


def run_later(
    core: EngineCore,
    state: RequestState,
    loop: DecodingLoop,
    work: Callable[[RequestState], dict[str, Any]],
    on_end: Callable[[], None],
) -> Callable[[], None]:
    """What runs `work` on a thread of its own, in the context that this one is in, and ends the request with the
    arguments of `state.finish` that it returns. `on_end` is called before the result is there.
    """
    outer, autocast = call_context(), core.batch_key()
    context = CallContext(
        outer.cache_salt, outer.is_known_to_ranks, loop, core, adapters=outer.adapters, encodings=outer.encodings
    )

    def run() -> None:
        try:
            with within(context), torch.no_grad(), autocasting(autocast):
                loop.check_cancelled()
                outcome = work(state)
        except CallCancelledError:
            on_end()
            state.finish([[event.token_id for event in state.events]], ["cancelled"])
        except BaseException as error:
            on_end()
            state.fail(error)
        else:
            on_end()
            state.finish(**outcome)

    return run


def run_prepared(
    model: Any, call: PreparedCall, logprobs: LogprobsWanted | None, logit_rows: LogitRows, state: RequestState
) -> dict[str, Any]:
    """One of transformers' loops; `logprobs` are of the model's own logits."""
    assert call.run is not None
    result = call.run(call, _TokenStreamer(state) if call.is_streamable else None)
    sequences, scores, config = result if isinstance(result, Tensor) else result.sequences, None, call.generation_config
    if call.watch is not None and call.watch.beam_scores is not None:
        scores = call.watch.beam_scores[:, : config.num_return_sequences].reshape(-1).tolist()
    width = call.input_ids.shape[1]
    # Of one row nothing is padding, nor of several that only an end of text or their length ends.
    may_pad = len(sequences) > 1 and RowEnds.of(call.criteria).others is not None
    pad = getattr(config, "_pad_token_tensor", None) if may_pad else None
    rows = [_read_row(row, config, pad, config.max_length - width) for row in sequences[:, width:].tolist()]
    said = None
    if logprobs is not None:
        # Afterwards: which of a beam search's forwards led to a token is known at its end, and beams share prompts.
        prompt, num_top = state.prompt_token_ids, logprobs.num_top
        said = [token_logprobs(model, prompt + tokens, len(prompt), num_top, logit_rows) for tokens, _ in rows]
    return {
        "sequences": [tokens for tokens, _ in rows],
        "reasons": [reason for _, reason in rows],
        "scores": scores,
        "logprobs": said,
    }


def run_whole(call: Callable[[], Any], states: GeneratorStates, _state: RequestState) -> dict[str, Any]:
    """A `generate()` that runs loops of its own and makes something of what they return, as Whisper's.

    Args:
        states: Where its draws begin.
    """
    with DRAWS.private(states, writes_back=False):
        result = call()
    sequences = result if isinstance(result, Tensor) else result["sequences"]
    return {"sequences": sequences.tolist(), "reasons": ["stop"] * len(sequences), "returned": result}


def score(model: Any, wanted: ScoresWanted, logit_rows: LogitRows, state: RequestState) -> dict[str, Any]:
    """How likely the prompt is."""
    said = token_logprobs(model, state.prompt_token_ids, wanted.first, wanted.num_top, logit_rows)
    return {"sequences": [[]], "reasons": ["length"], "prompt_logprobs": said}


class _TokenStreamer(BaseStreamer):
    def __init__(self, state: RequestState) -> None:
        self._state = state

    def put(self, value: Tensor) -> None:
        for token in value.reshape(-1).tolist():
            self._state.push(0, token)

    def end(self) -> None:
        """Nothing to do: the loop's result ends the request."""


def _read_row(tokens: list[int], generation_config: Any, pad: Tensor | None, max_tokens: int) -> tuple[list[int], str]:
    """Returns a generated row up to its end, and why it ended there."""
    eos = getattr(generation_config, "_eos_token_tensor", None)
    eos_ids = set() if eos is None else set(eos.reshape(-1).tolist())
    for position, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: position + 1], "eos"
    if pad is not None:
        pad_id = int(pad)
        end = len(tokens)
        while end > 1 and tokens[end - 1] == pad_id:
            end -= 1
        if end < len(tokens):
            return tokens[:end], "stop"
    return tokens, "length" if len(tokens) >= max_tokens else "stop"
