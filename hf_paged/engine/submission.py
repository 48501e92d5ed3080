"""`Submissions`: `submit()` and `engine.generate()`, from one prompt to a `Request` and to its result."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from hf_paged.core.errors import QueueFullError
from hf_paged.core.interrupts import allowed_interrupt
from hf_paged.engine.request import Request, RequestOutput, RequestState
from hf_paged.engine.sample_run import SampleCall, SampleRun
from hf_paged.engine.worker import CACHE_SALT, EXIT_SECONDS, CallCancelledError, Caller
from hf_paged.kernels.transfers import to_host
from hf_paged.sampling.random import GeneratorStates, default_generator

if TYPE_CHECKING:
    from hf_paged.engine.engine import Engine

_NOT_TAKEN = {
    "streamer": "iterate the request instead",
    "inputs_embeds": "submit() takes token ids",
    "inputs": "give the prompt as input_ids",
    "synced_gpus": "it is for models that several processes run in lock-step",
    "output_scores": "a RequestOutput has no per-step outputs; call generate()",
    "output_logits": "a RequestOutput has no per-step outputs; call generate()",
    "output_attentions": "a RequestOutput has no per-step outputs; call generate()",
    "output_hidden_states": "a RequestOutput has no per-step outputs; call generate()",
}


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
class Capture:
    """What `model.generate()` prepared, taken away right before its decoding loop would run.

    Attributes:
        call: Rows for the engine to sample.
        loop: Or else transformers' loop, to be run on a thread; takes a streamer or `None`.
        prompt: The prompt as prepared, `[rows, width]`, on the CPU if the preparation was there.
        generation_config: The prepared config, with its tensors where the prompt is.
        is_streamable: It has one row, and isn't a beam search.
    """

    call: SampleCall | None = None
    loop: Callable[[Any], LoopResult] | None = None
    prompt: Tensor | None = None
    generation_config: Any = None
    is_streamable: bool = True
    states: GeneratorStates = field(default_factory=dict)


class _ThreadState(threading.local):
    capture: Capture | None = None
    caller: Caller | None = None


class _RequestThread(threading.local):
    """Of an engine's thread that runs requests: whose it is, and how many requests it waits for itself."""

    owner: Submissions | None = None
    num_waits = 0


_THREAD = _RequestThread()  # one for all engines, which may wait for each other


@dataclass(slots=True, order=True)
class _LoopJob:
    """A request whose tokens one of transformers' loops chooses, on a thread of its own."""

    priority: int
    number: int
    state: RequestState = field(compare=False)
    capture: Capture = field(compare=False)
    caller: Caller = field(compare=False)
    cache_salt: Hashable = field(compare=False)


@dataclass(slots=True, eq=False)
class _Active:
    """An unfinished request."""

    state: RequestState | None = None  # not before it is prepared
    abandon: Callable[[], None] = lambda: None
    caller: Caller | None = None


class Submissions:
    """Turns prompts into requests.

    `model.generate()` prepares and validates every request on the submitting thread. Greedy and sampling requests go on
    as rows that the engine drives; all others (beams, a caller's own processors, assisted decoding) run transformers'
    own loop on a thread of the engine's, at most `max_num_seqs` at a time: those not counted that wait for a request
    themselves (in a processor), which may be in need of a thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()  # a wait may be ended by the garbage collector
        self._active: dict[str, _Active] = {}  # by request id
        self._jobs: list[_LoopJob] = []  # a heap
        self._num_threads = 0
        self._running: set[Caller] = set()  # whose loops run on those threads
        self._is_frozen = False
        self._numbers = itertools.count()
        self._thread_state = _ThreadState()

    @property
    def capture(self) -> Capture | None:
        """Where `generate()` on this thread is to leave its decoding loop, if it is to."""
        return self._thread_state.capture

    @property
    def current_caller(self) -> Caller | None:
        """The request whose loop this thread runs."""
        return self._thread_state.caller

    @property
    def is_request_thread(self) -> bool:
        """Whether this thread runs a request, of whatever engine."""
        return _THREAD.owner is not None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What a wait for a request is to be done in: a thread that runs one itself is not counted meanwhile.

        Raises:
            RuntimeError: This thread is inside a step: what it would wait for needs the next one.
        """
        if self._engine.is_stepping:
            raise RuntimeError(
                "this thread is inside a step (in a hook of the model) and can't wait for a request, which needs the "
                "next one: call generate() there, or wait for the request somewhere else"
            )
        owner = _THREAD.owner
        if owner is None:
            yield
            return
        thread_id = threading.get_ident()
        owner._count_thread(-1)
        try:
            yield
        finally:
            # A coroutine may be ended by the garbage collector, wherever that runs.
            if threading.get_ident() == thread_id:
                owner._count_thread(1)

    def _count_thread(self, change: int) -> None:
        """This thread counts no more, from the first of its waits on; or again, from the end of the last."""
        num_waits = _THREAD.num_waits
        _THREAD.num_waits = num_waits - change
        if 0 in (num_waits, _THREAD.num_waits):
            with self._lock:
                self._num_threads += change
                self._start_thread()

    def _start_thread(self) -> None:
        """Starts one for what is queued, if there may be one more. The lock is held."""
        if self._jobs and self._num_threads < self._engine.config.max_num_seqs:
            self._num_threads += 1
            threading.Thread(target=self._serve, name="hf_paged_request", daemon=True).start()

    @property
    def num_queued(self) -> int:
        """Requests that wait for a thread."""
        return len(self._jobs)

    @property
    def is_starting(self) -> bool:
        """Whether the loop of a request is about to reach its first forward."""
        return any(active.caller is not None and active.caller.cache is None for active in list(self._active.values()))

    def submit(
        self,
        input_ids: Any,
        generation_config: Any,
        request_id: Any,
        priority: Any,
        cache_salt: Any,
        arguments: dict[str, Any],
    ) -> Request:
        """See `Engine.submit`."""
        engine = self._engine
        prompt = _one_prompt(input_ids, engine.model)
        for name, reason in _NOT_TAKEN.items():
            if arguments.get(name) is not None and arguments[name] is not False:
                raise ValueError(f"submit() does not take {name}: {reason}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if cache_salt is not None and not isinstance(cache_salt, str | int | bytes):
            raise ValueError(f"cache_salt must be a string, an integer or bytes, got {cache_salt!r:.80}")
        if not engine.has_room_to_wait():
            raise QueueFullError(
                f"{engine.num_waiting} requests are waiting and max_waiting is {engine.config.max_waiting}: "
                "submit later, or patch with a larger max_waiting"
            )
        with self._lock:
            if request_id is None:
                request_id = next(name for n in self._numbers if (name := f"request-{n}") not in self._active)
            elif not isinstance(request_id, str) or request_id in self._active:
                problem = "is running already" if isinstance(request_id, str) else "is no string"
                raise ValueError(f"request_id {request_id!r} {problem}")
            self._active[request_id] = _Active()
        try:
            capture = self._prepare(prompt, generation_config, arguments)
            _split_generators(capture)
            state = RequestState(request_id, prompt[0].tolist(), capture.is_streamable)
            with _salted(CACHE_SALT.get() if cache_salt is None else cache_salt):
                if capture.call is not None:
                    capture.call.priority, capture.call.request_id = priority, request_id
                    cancel = self._start_run(state, capture)
                else:
                    cancel = self._start_loop(state, capture, Caller(priority, request_id))
        except BaseException:
            self._active.pop(request_id, None)
            raise
        abandon, wake = cancel

        def cancel_now() -> None:
            abandon()
            wake()

        return Request(state, cancel_now, abandon, self.waiting)

    def _prepare(self, prompt: Tensor, generation_config: Any, arguments: dict[str, Any]) -> Capture:
        """Lets `model.generate()` prepare everything, up to its decoding loop."""
        local = self._thread_state
        outer, local.capture = local.capture, Capture()
        try:
            self._engine.model.generate(prompt, generation_config, **arguments)
            if local.capture.call is None and local.capture.loop is None:
                raise ValueError("submit() does not take custom_generate: it has a decoding loop of its own")
            return local.capture
        finally:
            local.capture = outer

    def _start_run(self, state: RequestState, capture: Capture) -> tuple[Callable[[], None], Callable[[], None]]:
        call = capture.call
        assert call is not None
        engine = self._engine

        runs: list[SampleRun] = []

        def end(run: SampleRun) -> None:
            runs.clear()
            self._active.pop(state.request_id, None)
            if run.error is not None:
                state.fail(run.error)
            else:
                state.finish([row.tokens for row in run.rows], [row.finish_reason or "" for row in run.rows])

        # The handle's finalizer holds this as long as the handle lives. It must not lead to an ended run, whose error's
        # traceback leads to whoever called `result()`, and so to the handle.
        def abandon() -> None:
            for run in list(runs):
                engine.cancel_run(run)

        # Before the run, whose end may come at once.
        self._active[state.request_id] = _Active(state, abandon)
        runs.append(engine.run(call, state.push if capture.is_streamable else None, waits=False, on_end=end))
        if state.is_done:
            runs.clear()
        return abandon, engine.wake

    def _start_loop(
        self, state: RequestState, capture: Capture, caller: Caller
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        job = _LoopJob(caller.priority, next(self._numbers), state, capture, caller, CACHE_SALT.get())

        def abandon() -> None:
            caller.is_cancelled = True
            on_cancel = caller.on_cancel
            if on_cancel is not None:
                on_cancel()

        def wake() -> None:
            with self._lock:
                is_queued = job in self._jobs
                if is_queued:
                    self._jobs.remove(job)
                    heapq.heapify(self._jobs)
            if is_queued:
                self._active.pop(state.request_id, None)
                state.finish([[]], ["cancelled"])
            self._engine.wake()

        self._active[state.request_id] = _Active(state, abandon, caller)
        with self._lock:
            heapq.heappush(self._jobs, job)
            self._start_thread()
        return abandon, wake

    def _serve(self) -> None:
        _THREAD.owner = self
        while True:
            with self._lock:
                if not self._jobs or self._num_threads > self._engine.config.max_num_seqs or self._is_frozen:
                    self._num_threads -= 1
                    return
                job = heapq.heappop(self._jobs)
                self._running.add(job.caller)
            try:
                self._run(job)
            finally:
                self._running.discard(job.caller)

    def freeze(self) -> None:
        """At the interpreter's end: loops come to a forward, where they wait for good, or to their own end.

        Nothing that is queued begins. A thread that were in the midst of torch's code then would abort the process.
        """
        self._is_frozen = True
        deadline = time.monotonic() + EXIT_SECONDS
        while any(not caller.is_waiting for caller in list(self._running)) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _run(self, job: _LoopJob) -> None:
        state, capture = job.state, job.capture
        assert capture.loop is not None and capture.prompt is not None
        self._thread_state.caller = job.caller
        try:
            if job.caller.is_cancelled:
                raise CallCancelledError
            streamer = _TokenStreamer(state) if capture.is_streamable else None
            with torch.no_grad(), _salted(job.cache_salt):
                result = capture.loop(streamer)
        except CallCancelledError:
            state.finish([list(state.tokens)], ["cancelled"])
        except BaseException as error:
            state.fail(error)
        else:
            width = capture.prompt.shape[1]
            limit = capture.generation_config.max_length - width
            rows = [_read_row(row, capture.generation_config, limit) for row in result.sequences[:, width:].tolist()]
            scores = None if result.scores is None else result.scores.tolist()
            state.finish([tokens for tokens, _ in rows], [reason for _, reason in rows], scores)
        finally:
            self._thread_state.caller = None
            self._active.pop(state.request_id, None)
            self._engine.wake()

    def generate(
        self,
        prompts: Iterable[Sequence[int] | Tensor],
        generation_config: Any,
        progress_bar: bool,
        arguments: dict[str, Any],
    ) -> list[RequestOutput]:
        """See `Engine.generate`."""
        if isinstance(prompts, str | Tensor):
            raise ValueError(f"prompts must be a list of prompts, each of token ids, got a {type(prompts).__name__}")
        engine = self._engine
        prompts = list(prompts)
        # Submitted a little ahead of what can run, in order: memory for requests in flight, not for all of them.
        ahead = 2 * engine.config.max_num_seqs
        if engine.config.max_waiting is not None:
            ahead = min(ahead, engine.config.max_waiting)
        results: dict[int, RequestOutput] = {}
        running: dict[int, Request] = {}
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        remaining = deque(enumerate(prompts))
        with tqdm(total=len(prompts), disable=not progress_bar, unit="prompt", desc="generate") as bar:
            try:
                while remaining or running:
                    while remaining and len(running) < ahead and engine.has_room_to_wait():
                        index, prompt = remaining[0]
                        try:
                            request = self.submit(prompt, generation_config, None, 0, None, dict(arguments))
                        except QueueFullError:
                            break  # somebody else was faster
                        remaining.popleft()
                        running[index] = request
                        request.on_done(partial(done.put, index))
                    with suppress(queue.Empty):
                        with self.waiting(), allowed_interrupt():
                            index = done.get(timeout=1.0 if running else 0.01)
                        results[index] = running.pop(index).result()
                        bar.update()
                        bar.set_postfix(running=engine.num_running, refresh=False)
            except BaseException:
                for request in running.values():
                    request.cancel()
                raise
        return [results[index] for index in range(len(prompts))]

    def cancel_all(self) -> None:
        """Cancels every unfinished request."""
        for active in list(self._active.values()):
            active.abandon()

    def reset_after_fork(self) -> None:
        """In a forked child there are no threads that would run what is queued."""
        self._lock = threading.RLock()
        error = RuntimeError("this process was forked while the request was running in the parent")
        for active in self._active.values():
            if active.state is not None:
                active.state.condition = threading.Condition()
                active.state.fail(error)
        self._jobs.clear()
        self._active.clear()
        self._running.clear()
        self._num_threads = 0


@contextmanager
def _salted(cache_salt: Hashable) -> Iterator[None]:
    """Within it, what this thread generates shares cached prefixes only with what has the same salt."""
    token = CACHE_SALT.set(cache_salt)
    try:
        yield
    finally:
        CACHE_SALT.reset(token)


class _TokenStreamer(BaseStreamer):
    """Hands the tokens of transformers' loop to a request."""

    def __init__(self, state: RequestState) -> None:
        self._state = state

    def put(self, value: Tensor) -> None:
        for token in value.reshape(-1).tolist():
            self._state.push(token)

    def end(self) -> None:
        """Nothing to do: the loop's result ends the request."""


_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


def _one_prompt(input_ids: Any, model: Any) -> Tensor:
    """A prompt in any of the accepted forms as `[1, L]`, on the CPU. Waits for one that lies on a GPU."""
    if isinstance(input_ids, np.ndarray) and input_ids.dtype.kind in "biuf":
        input_ids = torch.from_numpy(input_ids.copy(order="C"))
    if isinstance(input_ids, Tensor):
        is_dense = input_ids.layout is torch.strided and not input_ids.is_nested and not input_ids.is_meta
        if input_ids.dtype not in _ID_DTYPES or not is_dense:
            kind = f"{input_ids.dtype}, {input_ids.layout}, on {input_ids.device}"
            raise ValueError(f"a prompt is a list or a dense tensor of integer token ids, got a tensor of {kind}")
        shape = tuple(input_ids.shape)
        if input_ids.ndim == 2 and shape[0] == 1:
            input_ids = input_ids[0]
        elif input_ids.ndim != 1:
            raise ValueError(
                f"submit() takes one prompt, a 1-D tensor or [1, L], got shape {shape}; submit each row by itself, or "
                "use engine.generate(list of prompts)"
            )
        prompt: list[int] = to_host([input_ids])[0].tolist()
    else:
        is_list = isinstance(input_ids, Sequence) and not isinstance(input_ids, str | bytes | bytearray | memoryview)
        if not is_list or any(isinstance(i, bool) or not isinstance(i, int | np.integer) for i in input_ids):
            raise ValueError(
                f"a prompt is a list of integer token ids or a tensor, got {input_ids!r:.80}; a batch or text goes "
                "through a tokenizer and engine.generate(list of prompts)"
            )
        prompt = list(input_ids)
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: give at least one token")
    vocab_size, low, high = model.get_input_embeddings().num_embeddings, min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"token id {bad} is outside the model's vocabulary of {vocab_size}")
    return torch.as_tensor(prompt, dtype=torch.int64, device="cpu")[None]


def _read_row(tokens: list[int], generation_config: Any, max_tokens: int) -> tuple[list[int], str]:
    """A generated row up to its end, and why it ended there."""
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


def _split_generators(capture: Capture) -> None:
    """After a sampling request was submitted, reseeds the global generators from themselves.

    Its draws begin at the state found; the next request's must not be the same numbers.
    """
    if capture.generation_config is None or not capture.generation_config.do_sample:
        return
    for device in capture.states:
        generator = default_generator(device)
        # Not drawn from it: a number on a GPU would have to be waited for.
        state = hashlib.blake2b(bytes(generator.get_state().numpy()), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(state, "little") >> 2)
