"""`Submissions`: `submit()` and `engine.generate()`, from one prompt to a `Request` and to its result."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from hf_paged.core.errors import QueueFullError
from hf_paged.core.interrupts import allowed_interrupt
from hf_paged.engine.call_context import call_context, within
from hf_paged.engine.calls import Calls
from hf_paged.engine.core import EngineCore
from hf_paged.engine.decoding_loop import DecodingLoop
from hf_paged.engine.follower import Follower
from hf_paged.engine.leader import sendable
from hf_paged.engine.loop_request import run_later, run_prepared, run_whole, score
from hf_paged.engine.prepared_call import PreparedCall
from hf_paged.engine.prompts import check_arguments, one_prompt, one_source
from hf_paged.engine.rank_request import hear_end, request_key, tell_end
from hf_paged.engine.request import Request, RequestOutput, RequestState
from hf_paged.engine.request_threads import LoopJob, RequestThreads, waiting
from hf_paged.engine.room import Room
from hf_paged.engine.run import Run
from hf_paged.engine.sampled_run import CallRows
from hf_paged.engine.scoring import LogitRows
from hf_paged.kernels.transfers import to_device
from hf_paged.model.weights_version import WeightsKey
from hf_paged.parallel.channel import RankError
from hf_paged.sampling.controls import GeneratedTokenPenalties, SamplingControls
from hf_paged.sampling.logprobs import ScoresWanted
from hf_paged.sampling.random import own_states


@dataclass(slots=True, eq=False)
class _Active:
    """A request from its admission to its end; its handle ends it by this object.

    The handle's finalizer holds it as long as the handle lives. So it forgets a request that has ended: an error's
    traceback leads to the caller of `result()`, and so to the handle.
    """

    owner: Submissions
    name: str
    state: RequestState | None = None  # not before it is prepared
    run: Run | None = None  # the engine drives it,
    loop: DecodingLoop | None = None  # or a thread does,
    job: LoopJob | None = None  # which it may have to wait for

    def abandon(self) -> None:
        """Ends it at the next step. Takes no lock."""
        run, loop = self.run, self.loop
        if run is not None:
            self.owner._calls.cancel(run)
        if loop is not None:
            loop.cancel()

    def cancel(self, index: int | None) -> None:
        """Ends it, or one of its sequences where the engine drives it."""
        run, loop, job, state = self.run, self.loop, self.job, self.state
        if run is not None:
            self.owner._calls.cancel(run, index)
        if loop is not None:
            loop.cancel()
        if job is not None and state is not None and self.owner._threads.remove(job):
            self.end()
            state.finish([[]], ["cancelled"])
        self.owner._calls.wake()

    def end(self) -> None:
        """Gives its name back."""
        if self.owner._active.get(self.name) is self:
            del self.owner._active[self.name]
        self.state = self.run = self.loop = self.job = None


_Begin = Callable[[_Active, RequestState], None]


def list_of_prompts(prompts: Iterable[Any]) -> list[Any]:
    """Raises `ValueError` if they are none."""
    if isinstance(prompts, str | Tensor) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of prompts, each of token ids, got a {type(prompts).__name__}")
    return list(prompts)


def _reads_more(model: Any, others: dict[str, Any]) -> bool:
    """Whether a call's loop reads more than its ids, or not all of them."""
    mask = others.get("attention_mask")
    if model.config.is_encoder_decoder or (isinstance(mask, Tensor) and not bool(mask.all())):
        return True
    given = [own for name, own in others.items() if name not in ("attention_mask", "position_ids")]
    seen = any(isinstance(own, Tensor) and own.is_floating_point() for own in given)
    return seen or bool(others.get("mm_encoder_outputs"))


class Submissions:
    """Turns prompts into requests.

    `model.generate()` prepares and validates every request on the submitting thread. Greedy and sampling requests go on
    as rows that the engine drives; all others (a caller's own processors, an assistant model) run transformers'
    own loop on a thread of the engine's, at most `max_num_seqs` at a time.
    """

    def __init__(self, core: EngineCore, calls: Calls, room: Room, threads: RequestThreads) -> None:
        """Serves one engine."""
        self._core = core
        self._calls = calls
        self._room = room
        self._threads = threads
        self._logit_rows = LogitRows()
        self._lock = threading.Lock()
        self._active: dict[str, _Active] = {}  # by request id
        self._numbers = itertools.count()

    @property
    def is_starting(self) -> bool:
        """Whether the loop of a request is about to reach its first forward."""
        return any(active.loop is not None and active.loop.cache is None for active in list(self._active.values()))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """The context in which a thread waits for a request.

        Raises:
            RuntimeError: This thread is inside a step.
        """
        self._core.check_outside()
        with waiting():
            yield

    def submit(
        self,
        input_ids: Any,
        generation_config: Any,
        request_id: Any,
        priority: Any,
        cache_salt: Any,
        arguments: dict[str, Any],
        controls: SamplingControls,
        weights_key: WeightsKey | None = None,
    ) -> Request:
        """See `Engine.submit`; `weights_key`: see `Calls.start`."""
        model, logprobs = self._core.model, controls.logprobs
        check_arguments(arguments, priority, cache_salt)
        if not model.config.is_encoder_decoder:
            prompt: Tensor | None = one_prompt(input_ids, model)
        else:
            device, source = self._core.bound.placement[1], one_source(input_ids, arguments, model)
            prompt = source if source is None else to_device(source, device)
            arguments = {  # which the encoder is run with here
                name: to_device(value, device) if isinstance(value, Tensor) else value
                for name, value in arguments.items()
            }
        with self._admitted(request_id) as name, within(encodings={}):
            call = self._prepare(prompt, generation_config, arguments, controls)
            begin: _Begin
            if call is None:
                state = RequestState(name, [], is_streaming=False, has_events=False)
                states = own_states(self._core.generator_devices, controls.seed)
                whole = partial(model.generate, prompt, generation_config, **arguments)
                begin = partial(self._start_loop, partial(run_whole, whole, states), priority)
                return self._start(state, request_key(prompt), cache_salt, begin)
            state = RequestState(name, call.input_ids[0].tolist(), call.is_streamable, call.has_events)
            if call.rows is not None:
                call.rows.priority, call.rows.request_id = priority, name
                begin = partial(self._start_rows, call.rows, weights_key)
            else:
                work = partial(run_prepared, self._core.model, call, logprobs, self._logit_rows)
                begin = partial(self._start_loop, work, priority)
            key = request_key(call.input_ids if prompt is None else prompt, call.generation_config, logprobs)
            return self._start(state, key, cache_salt, begin)

    def score(self, input_ids: Any, request_id: Any, priority: Any, cache_salt: Any, wanted: ScoresWanted) -> Request:
        """See `Engine.submit_score`."""
        if self._core.model.config.is_encoder_decoder:
            raise ValueError(
                "a model with an encoder has no score() of a text by itself: how likely generated tokens are say "
                "logprobs= of submit(), of given ones model(..., labels=...)"
            )
        prompt = one_prompt(input_ids, self._core.model)
        check_arguments({}, priority, cache_salt)
        self._core.pool.check_fits(prompt.shape[1] - 1, prompt.shape[1], 0)
        with self._admitted(request_id) as name:
            state = RequestState(name, prompt[0].tolist(), is_streaming=False, has_events=False)
            begin = partial(self._start_loop, partial(score, self._core.model, wanted, self._logit_rows), priority)
            return self._start(state, request_key(prompt, None, wanted), cache_salt, begin)

    @contextmanager
    def _admitted(self, request_id: Any) -> Iterator[str]:
        """Takes a request's name, or makes one; given back where the request doesn't begin."""
        if not self._room.is_free:
            raise QueueFullError(
                f"{self._room.num_waiting} requests are waiting and max_waiting is {self._core.config.max_waiting}: "
                "submit later, or patch with a larger max_waiting"
            )
        with self._lock:
            if request_id is None:
                request_id = next(name for n in self._numbers if (name := f"request-{n}") not in self._active)
            elif not isinstance(request_id, str) or request_id in self._active:
                problem = "is running already" if isinstance(request_id, str) else "is no string"
                raise ValueError(f"request_id {request_id!r} {problem}")
            self._active[request_id] = _Active(self, request_id)
        try:
            yield request_id
        except BaseException:
            self._active.pop(request_id, None)
            raise

    def _start(self, state: RequestState, key: tuple[bytes, str], cache_salt: Any, begin: _Begin) -> Request:
        """Begins a prepared request, and returns its handle; `key`: see `Leader.begin`."""
        active = self._active[state.request_id]
        active.state = state
        ranks, outer, number = self._core.ranks, call_context(), None
        if isinstance(ranks, Follower):
            return self._follow(ranks, state, *key)
        if ranks is not None and not outer.is_known_to_ranks:
            number = ranks.begin(*key)
        try:
            salt = outer.cache_salt if cache_salt is None else cache_salt
            with within(cache_salt=salt, is_known_to_ranks=ranks is not None):
                begin(active, state)
            if self._active.get(state.request_id) is not active:  # it has ended, and learned more since
                active.end()
        except BaseException as error:
            if number is not None and ranks is not None:
                ranks.end(number, (sendable(error), None))
            raise
        if number is not None and ranks is not None:
            state.listen(partial(tell_end, ranks, number, state))
        return Request(state, active.cancel, active.abandon, self._waiting)

    def _prepare(
        self, prompt: Tensor | None, generation_config: Any, arguments: dict[str, Any], controls: SamplingControls
    ) -> PreparedCall | None:
        """Lets `model.generate()` prepare everything, up to its first decoding loop; `None`: it has several, and makes
        something of what they return.
        """
        model, processors = self._core.model, controls.processors()
        own = {"logits_processor": [*(arguments.get("logits_processor") or ()), *processors]} if processors else {}
        call = None
        with within(is_submitted=True, wants_logprobs=controls.logprobs is not None):
            try:
                call = model.generate(prompt, generation_config, **arguments | own)
            except (AttributeError, TypeError) as error:
                if PreparedCall.__name__ not in str(error):
                    raise
        if not isinstance(call, PreparedCall):
            has_loops = model.config.is_encoder_decoder and hasattr(model, "generate_with_fallback")
            if not has_loops or arguments.get("custom_generate") is not None:
                raise ValueError(
                    "submit() needs a call that ends in a decoding loop of transformers' own: not custom_generate, and "
                    "no model whose generate() has its own loop or changes what the loop returns (but Whisper)"
                )
            controls.check_alone()
            return None
        if controls.logprobs is not None and call.rows is None and _reads_more(model, call.others):
            raise ValueError(
                "logprobs of a model with an encoder, or behind pictures, sounds, embeddings or tokens that are hidden "
                "are those of rows that the engine samples: not of beams, assisted decoding and your own processors, "
                "for which generate() returns scores"
            )
        for processor in processors:
            if isinstance(processor, GeneratedTokenPenalties):
                processor.begin_at(call.input_ids.shape[1])
        call.control(controls)
        return call

    def _start_rows(self, rows: CallRows, weights_key: WeightsKey | None, active: _Active, state: RequestState) -> None:
        def end(run: Run) -> None:
            active.end()
            if run.error is not None:
                state.fail(run.error)
            else:
                reasons = [row.finish_reason or "" for row in run.rows]
                said = None if rows.logprobs is None else [row.logprobs for row in run.rows]
                versions = None if run.scores is not None else run.weight_versions()
                state.finish([row.tokens for row in run.rows], reasons, run.scores, said, weight_versions=versions)

        active.run = self._calls.start(rows, state.push, waits=False, on_end=end, weights_key=weights_key)

    def _start_loop(
        self,
        work: Callable[[RequestState], dict[str, Any]],
        priority: int,
        active: _Active,
        state: RequestState,
    ) -> None:
        def end() -> None:
            active.end()
            self._calls.wake()

        active.loop = loop = DecodingLoop(priority, state.request_id)
        active.job = self._threads.add(loop, run_later(self._core, state, loop, work, end))

    def _follow(self, follower: Follower, state: RequestState, digest: bytes, text: str) -> Request:
        """On ranks above 0: the request ends as it ends on rank 0."""
        call = follower.make(digest, text)

        def done(outcome: bytes | RankError) -> None:
            self._active.pop(state.request_id, None)
            hear_end(state, outcome)

        follower.on_outcome(call, done)
        return Request(state, lambda index: None, lambda: None, self._waiting)  # it is cancelled on rank 0

    def generate(
        self,
        prompts: Sequence[tuple[Any, Callable[[], AbstractContextManager[None]]]],
        generation_config: Any,
        progress_bar: bool,
        arguments: dict[str, Any],
        controls: SamplingControls,
    ) -> list[RequestOutput]:
        """See `Engine.generate`; each prompt with the context that it is submitted in."""
        with self._core.transaction():  # one look at the model for all of them
            weights_key = self._core.weights_key()

        def submit(prompt: Any) -> Request:
            ids, context = prompt
            with context():
                return self.submit(ids, generation_config, None, 0, None, dict(arguments), controls, weights_key)

        return self.run_all(prompts, submit, progress_bar)

    def run_all(
        self, prompts: Iterable[Any], submit: Callable[[Any], Request], progress_bar: bool
    ) -> list[RequestOutput]:
        """Submits all prompts, in order and a little ahead of what can run, and waits for them."""
        prompts, config = list_of_prompts(prompts), self._core.config
        ahead = 2 * config.max_num_seqs  # memory for requests in flight, not for all of them
        if config.max_waiting is not None:
            ahead = min(ahead, config.max_waiting)
        results: dict[int, RequestOutput] = {}
        running: dict[int, Request] = {}
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        remaining = deque(enumerate(prompts))

        def finished(seconds: float) -> Iterator[int]:
            with suppress(queue.Empty):
                with self._waiting(), allowed_interrupt():
                    first = done.get(timeout=seconds) if seconds else done.get_nowait()
                yield first
                while True:
                    yield done.get_nowait()

        with tqdm(total=len(prompts), disable=not progress_bar, unit="prompt", desc="generate") as bar:
            try:
                while remaining or running:
                    seconds = 1.0 if running else 0.01
                    if remaining and len(running) < ahead and self._room.is_free:
                        with suppress(QueueFullError):  # another caller was faster
                            index, prompt = remaining[0]
                            running[index] = submit(prompt)
                            remaining.popleft()
                            running[index].on_done(partial(done.put, index))
                            seconds = 0.0
                    for index in finished(seconds):
                        results[index] = running.pop(index).result()
                        bar.set_postfix(running=self._core.num_running, refresh=False)
                        bar.update()
            except BaseException:
                for request in running.values():
                    request.cancel()
                raise
        return [results[index] for index in range(len(prompts))]

    def cancel_all(self) -> None:
        """Cancels every unfinished request."""
        for active in list(self._active.values()):
            active.abandon()

    def orphan(self, error: BaseException) -> None:
        """In a forked child, which has no threads to finish them: unfinished requests fail."""
        for active in self._active.values():
            if active.state is not None:
                active.state.condition = threading.Condition()
                active.state.fail(error)
