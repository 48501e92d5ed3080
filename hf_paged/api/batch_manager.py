"""`PagedBatchManager`: transformers' `ContinuousBatchingManager`, over `submit()` of a patched model."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Full
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
)
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from hf_paged.api.batch_request import BatchRequest, check_config, request_of, with_settings
from hf_paged.api.engine_of import ENGINE, engine_of
from hf_paged.core.errors import QueueFullError
from hf_paged.core.interrupts import deferred_interrupt
from hf_paged.engine.request import Request

logger = logging.get_logger(__name__)

_QUEUE_SECONDS = 10.0  # for which a request waits while the queue is full, as transformers' own does


class PagedBatchManager(ContinuousBatchingManager):
    """Submits requests in the order in which they came, and keeps their outputs until they are taken.

    What is inherited iterates over results. Memory, scheduling and steps are the engine's, so that settings of theirs
    in a `ContinuousBatchingConfig` change nothing: `patch()` has its own. Honoured are `return_logprobs`, `seed`,
    `max_queue_size` and `allow_block_sharing`. A request may have any setting of a `GenerationConfig` of its own.

    Attributes:
        model: The patched model.
        generation_config: Of requests to come.
        continuous_batching_config: Of requests to come.
        background_thread_status: Whether it takes requests, in transformers' own words; there is no such thread.
        warmed_up: True, so that nothing is compiled for a manager: what is compiled is the engine's, and is kept.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ) -> None:
        """Serves one model, which it puts into evaluation mode, as transformers' own does."""
        self.model = model.eval()
        model.paged.core.pool.is_serving = True
        self.batch_processor = None
        self.warmed_up = True
        self.background_thread_status = BackgroundThreadStatus()
        self._adding = threading.Lock()  # held by a thread whose request waits for room: the next one comes behind it
        self._condition = threading.Condition()  # guards all below; nothing of the engine's is called with it held
        self._is_started = False
        self._pending: deque[BatchRequest] = deque()  # added before it was started
        self._live: dict[str, BatchRequest] = {}  # by id, those pending too
        self._num_running = 0  # requests in the engine, or on their way to it
        self._outputs: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}
        self._numbers = itertools.count()
        self._pausing: list[int] = []  # threads
        self.configure(generation_config, continuous_batching_config)

    def configure(self, generation_config: GenerationConfig, config: ContinuousBatchingConfig) -> None:
        """Sets what holds for requests to come. Raises `ValueError` for a setting that can't be honoured here."""
        check_config(generation_config, config.return_logprobs)
        if generation_config.eos_token_id is None:
            logger.warning("`eos_token_id` is not set in the GenerationConfig: no token ends a request.")
        self.generation_config = generation_config
        self.continuous_batching_config = config
        self.num_return_sequences = generation_config.num_return_sequences or 1

    # Beginning and end

    def warmup(self) -> None:
        """Compiles and records what steps need before the first request does: `model.paged.warm_up()`."""
        self.model.paged.warm_up()

    def is_running(self) -> bool:
        return self._is_started and (self._refusal is None or self._num_running > 0)

    @property
    def _refusal(self) -> str | None:
        return self.background_thread_status.can_accept_new_requests()

    @deferred_interrupt()
    def start(self) -> None:
        """Lets requests reach the engine."""
        if self.is_running():
            logger.warning("Manager thread is already running.")
            return
        self.background_thread_status.clear()
        if self.continuous_batching_config.seed is not None:
            torch.manual_seed(self.continuous_batching_config.seed)
        with self._adding:
            with self._condition:
                self._is_started = True
                pending, self._pending = self._pending, deque()
            for request in pending:
                with self._condition:
                    self._num_running += 1
                self._submit(request)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Takes no more requests, and ends when those there have ended, which fail at once with `hard_stop`. With
        `keep_for_next_session` the model's next `init_continuous_batching()` returns this manager.

        Raises:
            RuntimeError: This thread is inside `pause`.
        """
        if not self._is_started:
            logger.warning("Manager not started.")
            return
        if threading.get_ident() in self._pausing:
            raise RuntimeError("this thread is inside pause(), where nothing can end: leave it before stop()")
        status = BackgroundThreadStatus.HARD_STOP if hard_stop else BackgroundThreadStatus.FLUSH_AND_STOP
        self.background_thread_status.request_stop(status, 0)
        left: list[BatchRequest] = []
        with self._condition:
            if hard_stop:
                left = list(self._live.values())
                for request in left:
                    self._deliver(request, request.failures("the manager was stopped before the request had ended"))
                    self._forget(request)
            self._condition.notify_all()
        if (engine := vars(self.model).get(ENGINE)) is not None:
            engine.calls.wake()  # those that wait for room
        for request in left:
            if request.handle is not None:
                request.handle.cancel()
        if block:
            self.join(time.perf_counter(), timeout)
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Waits until nothing of it is in the engine."""
        with self._condition:
            if self._condition.wait_for(lambda: not self._num_running, timeout):
                self._is_started = False
                self._condition.notify_all()
            else:
                logger.warning(f"{self._num_running} requests have not ended within {timeout} s.")

    def destroy(self) -> None:
        """Ends it, and what it still runs."""
        if self.is_running():
            self.stop(hard_stop=True)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within it no step of the model runs, so that its weights can be changed; requests go on afterwards.

        Raises:
            RuntimeError: The manager doesn't run.
        """
        if not self.is_running():
            raise RuntimeError("Cannot pause generation while no generation loop is running.")
        engine, own = engine_of(self.model), threading.get_ident()
        with self._condition:
            if not self._pausing:
                self._was_paused = engine.is_paused
            self._pausing.append(own)
        try:
            engine.pause()
            yield
        finally:
            with self._condition:
                self._pausing.remove(own)
                resumes = not self._pausing and not self._was_paused
            if resumes:
                engine.resume()

    # Requests

    @deferred_interrupt()
    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **settings: Any,
    ) -> str | None:
        """Adds a request. What is wrong with its prompt is the `error` of its result.

        `None` is as the generation config says; without any limit it ends with the model's context. An `eos_token_id`
        below 0 is no token. `**settings` are any others of a `GenerationConfig`, and `adapter`: as of `submit()`.

        Returns:
            Its id; `None` if the manager takes no more requests.

        Raises:
            ValueError: A setting or an adapter that there isn't or that can't be honoured, an id in use, a prompt that
                is no list.
            queue.Full: `max_queue_size` requests are waiting, and were for 10 seconds.
        """
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        settings |= {name: value for name, value in given.items() if value is not None}
        batching, adapter = self.continuous_batching_config, settings.pop("adapter", None)
        engine_of(self.model).check_adapters([adapter] if adapter is not None else [])
        config = with_settings(self.generation_config, settings, "add_request()")
        check_config(config, batching.return_logprobs)
        request = BatchRequest(request_id or "", input_ids, config, batching, adapter, streaming, record_timestamps)
        with self._adding:
            limit, room = batching.max_queue_size, engine_of(self.model).room
            if limit and not room.wait(
                lambda: self._refusal is not None or len(self._pending) + room.num_waiting < limit, _QUEUE_SECONDS
            ):
                raise Full
            with self._condition:
                if self._refusal is not None:
                    logger.warning(f"{self._refusal} A request with {len(input_ids)} tokens is dropped.")
                    return None
                if request_id is None:
                    request.request_id = self._new_id()
                elif request_id in self._live:
                    raise ValueError(f"request_id {request_id!r} is running already")
                self._live[request.request_id] = request
                if not self._is_started:
                    self._pending.append(request)
                    return request.request_id
                self._num_running += 1
            self._submit(request)
        return request.request_id

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **settings: Any,
    ) -> list[str]:
        """`add_request` for each; returns their ids."""
        ids = (
            self.add_request(prompt, None, max_new_tokens, streaming, record_timestamps, **settings)
            for prompt in inputs
        )
        return [name for name in ids if name is not None]

    def _new_id(self) -> str:
        """Makes an id that no request has, nor an output that waits to be taken. The condition is held."""
        taken = self._live.keys() | {request_of(output.request_id) for output in self._outputs}
        return next(name for number in self._numbers if (name := f"req_{number}") not in taken)

    def _submit(self, request: BatchRequest) -> None:
        engine = engine_of(self.model)
        try:
            arguments = request.submit_arguments(self.model)
            while True:
                engine.room.wait()
                try:
                    handle = engine.submit(request.prompt, **arguments)
                    break
                except QueueFullError:  # another caller was faster
                    if not engine.room.may_wait:
                        raise
        except BaseException as error:
            with self._condition:
                self._deliver(request, request.failures(str(error)))
                self._end(request)
            if isinstance(error, Exception):
                return
            raise
        with self._condition:
            request.handle = handle
        if request.is_over:
            handle.cancel()
        handle.listen(lambda: self._look(request, handle))

    def _look(self, request: BatchRequest, handle: Request) -> None:
        """Hands on what is new. It runs on whatever thread has news of a request, so it calls none of the user's code
        and doesn't wait.
        """
        outputs = request.take(handle.events_since(request.num_events))
        with self._condition:
            if handle.is_done and request.handle is not None:
                outputs += request.results(handle)
                self._deliver(request, outputs)
                self._end(request)
            elif outputs:
                self._deliver(request, outputs)

    def _deliver(self, request: BatchRequest, outputs: list[GenerationOutput]) -> None:
        """Keeps outputs, or has their handlers called, if they are still wanted. The condition is held."""
        for output in () if request.is_over else outputs:
            if output.request_id in self._handlers:
                self._call(output)
            else:
                self._outputs.append(output)
        self._condition.notify_all()

    def _call(self, output: GenerationOutput) -> None:
        callback, loop = self._handlers[output.request_id]
        with suppress(RuntimeError):  # the loop was closed: its program no longer waits
            loop.call_soon_threadsafe(callback, output)
        if output.is_finished():
            del self._handlers[output.request_id]

    def _forget(self, request: BatchRequest) -> None:
        """Wants no more outputs of a request. The condition is held."""
        request.is_over = True
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]

    def _end(self, request: BatchRequest) -> None:
        """Notes that a request is not in the engine any more. The condition is held."""
        self._forget(request)
        request.handle = None
        self._num_running -= 1
        self._condition.notify_all()

    def cancel_request(self, request_id: str) -> None:
        """Ends a request within a step. It has no output: those that nothing has taken are dropped."""
        with self._condition:
            request = self._live.get(request_id)
            if request is not None:
                self._forget(request)
                if request in self._pending:
                    self._pending.remove(request)
            self._handlers = {name: own for name, own in self._handlers.items() if request_of(name) != request_id}
            self._outputs = deque(output for output in self._outputs if request_of(output.request_id) != request_id)
            self._condition.notify_all()
        if request is not None and (handle := request.handle) is not None:
            handle.cancel()

    # Results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output: of a request if an id is given, else of any. `None` when the time is over, or nothing can
        come any more: the manager has ended, or the request.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while True:
                for output in self._outputs:
                    if request_id is None or output.request_id == request_id:
                        self._outputs.remove(output)
                        return output
                rest = None if deadline is None else deadline - time.monotonic()
                may_come = request_id is None or {request_id, request_of(request_id)} & self._live.keys()
                if (rest is not None and rest <= 0) or not may_come or not self.is_running():
                    return None
                self._condition.wait(rest)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until the manager is stopped."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:  # type: ignore[override]
        """Outputs of one request as they come, to its last one. None are left of one that was cancelled."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Has each output of a request given to `callback`, in the event loop that runs on this thread; also those that
        came before.
        """
        with self._condition:
            self._handlers[request_id] = callback, asyncio.get_running_loop()
            waiting = [output for output in self._outputs if output.request_id == request_id]
            for output in waiting:
                self._outputs.remove(output)
                self._call(output)
