"""A `generate()` call that transformers has prepared, up to its decoding loop."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_paged.engine.sampled_request import SampleCall
from hf_paged.sampling.random import GeneratorStates

# Whether the `generate()` that this thread is about to call is to raise `CallPrepared` instead of running its loop.
PREPARES_ONLY: ContextVar[bool] = ContextVar("hf_paged_prepares_only", default=False)


# Whether the likelihoods of its tokens are wanted: those of beams are computed behind transformers' loop.
WANTS_LOGPROBS: ContextVar[bool] = ContextVar("hf_paged_wants_logprobs", default=False)


@dataclass(slots=True)
class LoopResult:
    """What one of transformers' loops returned.

    Attributes:
        sequences: `[rows, length]`, prompt included.
        scores: `[rows]` of beams, or `None`.
    """

    sequences: Tensor
    scores: Tensor | None = None


@dataclass(slots=True)
class PreparedCall:
    """What `model.generate()` prepared.

    Attributes:
        work: Rows for the engine to sample, or else transformers' loop, to be run on a thread; that takes a streamer
            or `None`.
        prompt: The prompt as prepared, `[rows, width]`, on the CPU if the preparation was there.
        generation_config: The prepared config, with its tensors where the prompt is.
        is_streamable: It has one row, and isn't a beam search.
        states: Of torch's global generators when the call was entered.
    """

    work: SampleCall | Callable[[Any], LoopResult]
    prompt: Tensor
    generation_config: Any
    is_streamable: bool
    states: GeneratorStates = field(default_factory=dict)


class CallPrepared(BaseException):
    """Unwinds `generate()` with what it has prepared. Not an `Exception`, so that user code doesn't swallow it."""

    def __init__(self, call: PreparedCall) -> None:
        super().__init__()
        self.call = call
