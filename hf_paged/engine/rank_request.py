"""A request that every rank of a split model submits: rank 0 runs it, and tells the others how it ended."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

from torch import Tensor

from hf_paged.engine.leader import Leader, sendable
from hf_paged.engine.request import RequestState
from hf_paged.parallel.call_key import call_key
from hf_paged.parallel.channel import RankError


def request_key(prompt: Tensor | None, generation_config: Any = None, *wanted: object) -> tuple[bytes, str]:
    """What `Leader.begin` tells the other ranks of a request."""
    digest = call_key("submit", {"prompt": prompt, "wanted": repr(wanted)}, generation_config)
    return digest, f"submit() of a prompt of {0 if prompt is None else prompt.shape[1]} tokens"


def tell_end(leader: Leader, number: int, state: RequestState) -> None:
    """Tells the other ranks how a request ended, when it has."""
    if state.is_done:
        error = None if state.error is None else sendable(state.error)
        with suppress(RankError):  # which all others hear, too
            leader.end(number, (error, state.events, state.output))


def hear_end(state: RequestState, outcome: bytes | RankError) -> None:
    """On any rank but 0, ends the request as `tell_end` said, or with an error."""
    if isinstance(outcome, RankError):
        state.fail(outcome)
        return
    error, events, output = pickle.loads(outcome)
    if error is not None:
        state.fail(error)
        return
    for event in events:
        state.push(*event)
    state.finish(output.sequences, output.finish_reasons, output.scores, output.logprobs, output.prompt_logprobs)
