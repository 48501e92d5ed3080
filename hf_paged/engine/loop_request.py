"""`LoopRequest`: a request whose tokens one of transformers' loops chooses, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_paged.engine.call_context import CallContext, within
from hf_paged.engine.core import EngineCore
from hf_paged.engine.decoding_loop import CallCancelledError, DecodingLoop
from hf_paged.engine.prepared_call import LoopResult, PreparedCall
from hf_paged.engine.request import RequestState
from hf_paged.engine.scoring import LogitRows, token_logprobs
from hf_paged.sampling.logprobs import LogprobsWanted, TokenLogprobs


class LoopRequest:
    """Runs a prepared loop, and puts what comes of it into the request's state."""

    def __init__(
        self,
        core: EngineCore,
        state: RequestState,
        call: PreparedCall,
        loop: DecodingLoop,
        context: CallContext,
        on_end: Callable[[], None],
        logprobs: LogprobsWanted | None = None,
        logit_rows: LogitRows | None = None,
    ) -> None:
        """Serves one engine; `logprobs` are of the model's own logits, `loop` is what it counts as."""
        self._core = core
        self._state = state
        self._call = call
        self._loop = loop
        self._context = context
        self._on_end = on_end
        self._logprobs = logprobs
        self._logit_rows = logit_rows

    def run(self) -> None:
        state, call = self._state, self._call
        try:
            with within(self._context), torch.no_grad():
                self._loop.check_cancelled()
                result: LoopResult = call.work(_TokenStreamer(state) if call.is_streamable else None)  # type: ignore[operator]
                width = call.prompt.shape[1]
                limit = call.generation_config.max_length - width
                rows = [_read_row(row, call.generation_config, limit) for row in result.sequences[:, width:].tolist()]
                logprobs = None if self._logprobs is None else self._score([tokens for tokens, _ in rows])
        except CallCancelledError:
            state.finish([[event.token_id for event in state.events]], ["cancelled"])
        except BaseException as error:
            state.fail(error)
        else:
            scores = None if result.scores is None else result.scores.tolist()
            state.finish([tokens for tokens, _ in rows], [reason for _, reason in rows], scores, logprobs)
        finally:
            self._on_end()

    def _score(self, rows: list[list[int]]) -> list[list[TokenLogprobs]]:
        """Afterwards: which of a beam search's forwards led to a token is known at its end, and beams share prompts."""
        assert self._logprobs is not None
        prompt, num_top = self._state.prompt_token_ids, self._logprobs.num_top
        return [
            token_logprobs(self._core.model, prompt + tokens, len(prompt), num_top, self._logit_rows) for tokens in rows
        ]


class _TokenStreamer(BaseStreamer):
    def __init__(self, state: RequestState) -> None:
        self._state = state

    def put(self, value: Tensor) -> None:
        for token in value.reshape(-1).tolist():
            self._state.push(0, token)

    def end(self) -> None:
        """Nothing to do: the loop's result ends the request."""


def _read_row(tokens: list[int], generation_config: Any, max_tokens: int) -> tuple[list[int], str]:
    """Returns a generated row up to its end, and why it ended there."""
    eos = getattr(generation_config, "_eos_token_tensor", None)
    pad = getattr(generation_config, "_pad_token_tensor", None)
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
