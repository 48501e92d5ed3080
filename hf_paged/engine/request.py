"""`Request`: the handle of one submitted prompt, and `RequestOutput`: its result."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from hf_paged.core.interrupts import deferred_interrupt, wait_interruptibly
from hf_paged.sampling.logprobs import TokenLogprobs

T = TypeVar("T")
logger = logging.getLogger(__name__)


def call_all(listeners: list[Callable[[], None]]) -> None:
    """Calls each; what one raises is logged, since nothing whose step this is has to do with it."""
    for listener in listeners.copy():
        try:
            listener()
        except Exception:
            logger.exception("a listener raised, which must only hand on that something is new")


class TokenEvent(NamedTuple):
    """A token that has come.

    Attributes:
        sequence: Index of its sequence.
        token_id: The token.
        logprobs: How likely it was, if `submit(logprobs=...)` asked for it and the engine samples the request.
    """

    sequence: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request, in seconds of `time.monotonic`.

    Attributes:
        arrival_time: When it was submitted.
        first_token_time: When its first token was chosen; `None` before, and where tokens are not streamed (beams).
        finish_time: When it ended.
    """

    arrival_time: float
    first_token_time: float | None
    finish_time: float

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from submission to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def duration(self) -> float:
        """Seconds from submission to the end."""
        return self.finish_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request generated.

    Attributes:
        request_id: Its id.
        prompt_token_ids: The prompt; of a model with an encoder the decoder's, as its source is no part of the text.
        sequences: Generated ids, prompt not included, without padding: of each sample, or of each returned beam, best
            first.
        finish_reason: `"eos"`, `"stop"` (a stop string, a time limit, a criterion of the caller's), `"length"` or
            `"cancelled"`; of the first sequence.
        finish_reasons: Of each sequence.
        scores: Beam search only: the score of each sequence, as transformers' `sequences_scores`.
        metrics: Times.
        logprobs: Of each sequence how likely its tokens were, if `submit(logprobs=...)` asked for it.
        prompt_logprobs: Of a request of `submit_score`: how likely each token of the prompt was, from `first` on.
        weight_versions: Of each sequence, the version of the model's weights that each token was chosen with, as
            `model.paged.weight_version` counts them; `None` of beams, and where processors of the caller's own ran.
        returned: What `generate()` returned, if the model's own runs several loops (Whisper's; the segments are in it).
            The reason of its end is `"stop"`, whatever ended the last of them.
    """

    request_id: str
    prompt_token_ids: list[int]
    sequences: list[list[int]]
    finish_reason: str
    finish_reasons: list[str] = field(default_factory=list)
    scores: list[float] | None = None
    metrics: RequestMetrics | None = None
    logprobs: list[list[TokenLogprobs]] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    weight_versions: list[list[int]] | None = None
    returned: Any = None

    @property
    def token_ids(self) -> list[int]:
        """The first (best) sequence."""
        return self.sequences[0] if self.sequences else []

    @property
    def support(self) -> list[list[list[int] | None]]:
        """Of each token of each sequence what it was chosen from, `None`: all, with `submit(return_support=True)`."""
        return [[token.support for token in own] for own in self.logprobs or ()]


class RequestState:
    """What the engine's side of a request writes and its handle reads. Never waits for anything but its own lock."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], is_streaming: bool, has_events: bool) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.is_streaming = is_streaming  # it has one sequence
        self.has_events = has_events  # tokens come one by one
        self.condition = threading.Condition()
        self.events: list[TokenEvent] = []
        self.output: RequestOutput | None = None
        self.error: BaseException | None = None
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        return self.output is not None or self.error is not None

    def push(self, index: int, token: int, logprobs: TokenLogprobs | None = None, is_last: bool = True) -> None:
        """One more token of a sequence; unless it `is_last`, another one comes at the same moment."""
        with self.condition:
            if self.first_token_time is None:
                self.first_token_time = time.monotonic()
            self.events.append(TokenEvent(index, token, logprobs))
            if is_last:
                self.announce()

    def finish(
        self,
        sequences: list[list[int]],
        reasons: list[str],
        scores: list[float] | None = None,
        logprobs: list[list[TokenLogprobs]] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        weight_versions: list[list[int]] | None = None,
        returned: Any = None,
    ) -> None:
        with self.condition:
            if self.is_done:
                return
            metrics = RequestMetrics(self.arrival_time, self.first_token_time, time.monotonic())
            reason = reasons[0] if reasons else "cancelled"
            self.output = RequestOutput(
                self.request_id,
                self.prompt_token_ids,
                sequences,
                reason,
                reasons,
                scores,
                metrics,
                logprobs,
                prompt_logprobs,
                weight_versions,
                returned,
            )
            self.announce()

    def fail(self, error: BaseException) -> None:
        with self.condition:
            if not self.is_done:
                self.error = error
                self.announce()

    @deferred_interrupt()
    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called now, and on any thread whenever something new is there."""
        with self.condition:
            listener()  # one that raises is not kept
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Ends `listen`. Takes no lock: the garbage collector may call it."""
        self._listeners.remove(listener)

    def announce(self) -> None:
        """Tells all listeners to look. The condition is held."""
        self.condition.notify_all()
        if self._listeners:
            call_all(self._listeners)


class Request:
    """A submitted prompt. Iterate it for tokens as they come, or ask for its `result()`; both also with `await`.

    `events()` does the same for several samples.

    Dropping the handle of a request that isn't finished cancels it.
    """

    def __init__(
        self,
        state: RequestState,
        cancel: Callable[[int | None], None],
        abandon: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Makes the handle of a request's state.

        Args:
            state: What the engine writes.
            cancel: Ends it, or one of its sequences.
            abandon: Ends it, at the next step; takes no lock.
            waiting: Within it, threads wait for the state.
        """
        self._state = state
        self._waiting = waiting
        self._cancel = cancel
        self._abandon = abandon
        weakref.finalize(self, abandon).atexit = False

    def __repr__(self) -> str:
        status = "done" if self.is_done else "running"
        return f"Request({self.request_id!r}, {len(self._state.prompt_token_ids)} prompt tokens, {status})"

    @property
    def request_id(self) -> str:
        """The id it was given, or one made for it."""
        return self._state.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self._state.prompt_token_ids

    @property
    def is_done(self) -> bool:
        """Whether `result()` returns (or raises) at once."""
        return self._state.is_done

    @property
    def finish_reason(self) -> str | None:
        """As in `RequestOutput`; `None` while it runs, `"error"` if it failed."""
        if self._state.error is not None:
            return "error"
        return None if self._state.output is None else self._state.output.finish_reason

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the end.

        Args:
            timeout: Seconds to wait at most; `None`: as long as it takes.

        Raises:
            TimeoutError: It isn't finished by then; it goes on running, and `result` can be called again.
            RuntimeError: It isn't finished, and this thread is inside a step (in a hook of an inner module).
            Exception: What the request raised.
        """
        state, condition = self._state, self._state.condition
        with deferred_interrupt(), nullcontext() if self.is_done else self._waiting(), condition:
            if not wait_interruptibly(lambda seconds: condition.wait_for(lambda: state.is_done, seconds), timeout):
                raise TimeoutError(f"request {self.request_id!r} is not finished after {timeout} s; it goes on running")
        return self._outcome()

    @deferred_interrupt()
    def cancel(self, index: int | None = None) -> None:
        """Ends it, within a step; `result()` then has the tokens so far. No effect on a finished one.

        Args:
            index: Only this one of its sequences, which has tokens already; `None`: all of it.

        Raises:
            ValueError: No token of that sequence has come.
        """
        if index is not None and not any(event.sequence == index for event in self._state.events):
            raise ValueError(f"no token of sequence {index!r} of request {self.request_id!r} has come yet")
        if not self.is_done:
            self._cancel(index)

    def __iter__(self) -> Iterator[int]:
        """Tokens of its one sequence as they are chosen, from the first on.

        Raises:
            ValueError: It has several sequences, or beams.
            Exception: What the request raised, after the tokens before it.
        """
        self._check_streaming()
        return (event.token_id for event in self._events())

    def events(self) -> Events:
        """`(index, token_id)` of its sequences as they are chosen, for `for` and `async for`, from the first on.

        Raises:
            ValueError: It has beams, or samples of a loop of transformers' own: these come at the end.
            Exception: What the request raised, after the tokens before it; in the iteration.
        """
        if not self._state.has_events:
            raise ValueError(
                f"request {self.request_id!r} has beams, or processors of its caller's own: its sequences are known at "
                "their end; use result()"
            )
        return Events(self)

    def events_since(self, position: int = 0) -> list[TokenEvent]:
        """All tokens so far but the first `position`, without waiting: for a program that was told by `listen`."""
        return self._state.events[position:]

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called now, and on any thread whenever tokens have come or it is finished; it must only hand
        that on. Returns what ends that.
        """
        state = self._state
        state.listen(listener)
        return lambda: state.unlisten(listener)

    def on_done(self, listener: Callable[[], None]) -> None:
        """`listener` is called once, on any thread, when it is finished (now if it is); it must only hand that on."""
        state = self._state
        state.listen(lambda: listener() if state.is_done else None)

    def _events(self) -> Iterator[TokenEvent]:
        state, position = self._state, 0
        while True:
            has_news = state.is_done or len(state.events) > position
            with deferred_interrupt(), nullcontext() if has_news else self._waiting(), state.condition:
                while not state.is_done and len(state.events) <= position:
                    wait_interruptibly(state.condition.wait)
                new, is_done = state.events[position:], state.is_done
            yield from new
            position += len(new)
            if is_done and position == len(state.events):
                self._outcome()
                return

    def __aiter__(self) -> AsyncIterator[int]:
        """Like `__iter__`, without blocking the event loop. A task cancelled while it waits cancels the request."""
        self._check_streaming()
        return _AsyncEvents(self, lambda event: event.token_id)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """`await request`: its `result()`, without blocking the event loop. A cancelled task cancels the request."""
        yield from self._wait(lambda: self.is_done).__await__()
        return self._outcome()

    async def _wait(self, is_over: Callable[[], bool]) -> None:
        """Until something is so, looked at whenever something is new. Given up meanwhile, it ends the request."""
        if is_over():
            return
        loop, event, abandon = asyncio.get_running_loop(), asyncio.Event(), self._abandon

        def listener() -> None:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the loop was closed: what waits in it never goes on
                abandon()

        self._state.listen(listener)
        try:
            with self._waiting():
                while not is_over():
                    await event.wait()
                    event.clear()
        except asyncio.CancelledError:
            self.cancel()
            raise
        except GeneratorExit:  # dropped, maybe by the garbage collector, which must take no lock
            self._abandon()
            raise
        finally:
            self._state.unlisten(listener)

    def _check_streaming(self) -> None:
        if not self._state.is_streaming:
            raise ValueError(
                f"request {self.request_id!r} has several sequences or beams: only one sequence can be streamed; "
                "use result()"
            )

    def _outcome(self) -> RequestOutput:
        if self._state.error is not None:
            raise self._state.error
        assert self._state.output is not None
        return self._state.output


class Events:
    """A request's tokens as they come, each with the index of its sequence."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (event[:2] for event in self._request._events())

    def __aiter__(self) -> AsyncIterator[tuple[int, int]]:
        return _AsyncEvents(self._request, lambda event: event[:2])


class _AsyncEvents(Generic[T]):
    """An asynchronous iterator over a request's tokens. No generator: those can't be closed while they wait."""

    def __init__(self, request: Request, read: Callable[[TokenEvent], T]) -> None:
        self._request = request
        self._read = read
        self._position = 0
        self._is_closed = False

    def __aiter__(self) -> _AsyncEvents[T]:
        return self

    async def __anext__(self) -> T:
        request, state = self._request, self._request._state
        await request._wait(lambda: self._is_closed or state.is_done or self._position < len(state.events))
        with deferred_interrupt(), state.condition:  # done and without a next token, not one after the other
            is_over = self._is_closed or self._position == len(state.events)
        if not is_over:
            self._position += 1
            return self._read(state.events[self._position - 1])
        if not self._is_closed:
            self._is_closed = True
            request._outcome()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the iteration, also where a token is waited for; the request goes on."""
        self._is_closed = True
        with deferred_interrupt(), self._request._state.condition:
            self._request._state.announce()
