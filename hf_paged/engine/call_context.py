"""`CallContext`: what a call on this thread passes on to the code below it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hf_paged.model.adapter import Adapter
from hf_paged.model.host_call import HostCall
from hf_paged.model.wrapper import Twin
from hf_paged.sampling.random import GeneratorStates

if TYPE_CHECKING:
    from hf_paged.engine.core import EngineCore
    from hf_paged.engine.decoding_loop import DecodingLoop


@dataclass(slots=True)
class CallContext:
    """The attributes of the innermost call on this thread; others come from the calls around it.

    Attributes:
        cache_salt: Part of the prefix-cache key of all that is generated, by models of whatever engine (an assistant,
            one that a processor asks).
        is_known_to_ranks: The other ranks know the call: what it calls in turn is none of theirs.
        loop: The request whose loop this thread runs,
        core: and the engine that it was submitted to.
        is_submitted: The innermost `generate()` returns the `PreparedCall` instead of running it.
        wants_logprobs: The likelihoods of its tokens are wanted: those of beams are computed behind transformers' loop.
        states: Of the generators that this thread drew from when it was entered.
        host: Its host copies; `None` when it is prepared over the caller's tensors themselves, and in its loop.
        hides_device: Whether the model is to say that it is on the CPU, as the call's tensors are.
        adapters: An engine, and what is added to its model for each prompt; `None`, and for others: what it is set to.
        runs_stock: Enters what the call needs around stock's forwards, because of `adapters`; once, if called again.
        twin: Of a wrapper, the model with the call's state, which `generate()` runs on.
        encodings: What its encoder has made of the last rows, where `generate()` may ask for the same again.
    """

    cache_salt: Hashable = None
    is_known_to_ranks: bool = False
    loop: DecodingLoop | None = None
    core: EngineCore | None = None
    is_submitted: bool = False
    wants_logprobs: bool = False
    states: GeneratorStates = field(default_factory=dict)
    host: HostCall | None = None
    hides_device: bool = False
    adapters: tuple[EngineCore, tuple[Adapter | None, ...]] | None = None
    runs_stock: Callable[[], None] | None = None
    twin: Twin | None = None
    encodings: dict[Hashable, Any] | None = None


_CONTEXT: ContextVar[CallContext | None] = ContextVar("hf_paged_call", default=None)


def call_context() -> CallContext:
    return _CONTEXT.get() or CallContext()


@contextmanager
def within(outer: CallContext | None = None, **changes: Any) -> Iterator[None]:
    """Within it, this thread and what copies its context are in a call with these attributes; the others are those of
    `outer`, or else of the call that it is in.
    """
    token = _CONTEXT.set(replace(outer or call_context(), **changes))
    try:
        yield
    finally:
        _CONTEXT.reset(token)
