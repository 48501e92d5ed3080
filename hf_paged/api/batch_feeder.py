"""`BatchFeeder`: hands requests of transformers' batch API to the engine, and what comes of them to their results."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from queue import Full
from typing import Any

import torch
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from hf_paged.api.batch_request import BatchRequest
from hf_paged.api.batch_results import BatchResults, request_of
from hf_paged.core.errors import QueueFullError
from hf_paged.engine.request import Request

logger = logging.get_logger(__name__)

_QUEUE_SECONDS = 10.0  # for which a request waits while the queue is full, as transformers' own does
_RETRY_SECONDS = 0.01


class BatchFeeder:
    """Holds requests from when they are added until they end."""

    def __init__(self, model: Any, results: BatchResults) -> None:
        self._model = model
        self._results = results
        self.status = BackgroundThreadStatus()
        self._news = threading.Condition()  # guards all below; nothing of the engine's is called with it held
        self._pending: deque[BatchRequest] = deque()
        self._live: dict[str, BatchRequest] = {}  # by id, those pending too
        self._num_running = 0  # in the engine, or on their way to it
        self._numbers = itertools.count()

    def new_id(self) -> str:
        """Makes an id that no request has, nor an output that waits to be taken."""
        names = (f"req_{number}" for number in self._numbers)
        return next(name for name in names if name not in self._live and not self._results.holds(name))

    def is_live(self, request_id: str) -> bool:
        """Whether a request has not ended; the id may be that of one of its sequences."""
        return request_id in self._live or request_of(request_id) in self._live

    def add(self, request: BatchRequest) -> bool:
        """Queues a request; returns whether it did: not once no more are taken.

        Raises:
            ValueError: Its id is in use.
            queue.Full: The queue was full for 10 seconds.
        """
        limit = request.batching.max_queue_size

        def is_closed() -> bool:
            return self.status.can_accept_new_requests() is not None

        with self._news:
            if limit and not self._news.wait_for(lambda: len(self._pending) < limit or is_closed(), _QUEUE_SECONDS):
                raise Full
            if is_closed():
                return False
            before = self._live.get(request.request_id)
            if before is not None and not before.is_over:
                raise ValueError(f"request_id {request.request_id!r} is running already")
            self._live[request.request_id] = request
            self._pending.append(request)
            self._news.notify_all()
            return True

    def cancel(self, request_id: str) -> None:
        """Ends a request within a step. It has no output: those that nothing has taken are dropped."""
        with self._news:
            request, handle = self._live.pop(request_id, None), None
            if request is not None:
                request.is_dropped = True
                if request in self._pending:
                    self._pending.remove(request)
                handle = request.handle
                self._news.notify_all()
        self._results.forget(request_id)
        self._results.wake()
        if handle is not None:
            handle.cancel()

    def stop(self, status: int) -> None:
        """Makes `run` return, once the requests that are there have ended or at once."""
        self.status.request_stop(status, 0)
        with self._news:
            self._news.notify_all()

    def run(self, seed: int | None) -> None:
        """Hands requests to the engine, not far ahead of what can run, until it is stopped."""
        if seed is not None:
            torch.manual_seed(seed)
        try:
            while (request := self._next()) is not None:
                self._submit(request)
            self._end_all("the manager was stopped before the request had ended")
        except Exception as error:
            logger.error(f"the batch manager has failed: {error}", exc_info=True)
            self.status.record_fatal_error(error)
            self._end_all(str(error))
        finally:
            self.status.mark_as_stopped()
            self._results.wake()

    def _next(self) -> BatchRequest | None:
        """Waits for a request that may start; `None` when `run` is to end."""
        ahead = 2 * self._model.paged.config.max_num_seqs
        with self._news:
            while True:
                status = self.status.local_status
                if status == BackgroundThreadStatus.HARD_STOP:
                    return None
                if self._pending and self._num_running < ahead:
                    self._num_running += 1
                    request = self._pending.popleft()
                    self._news.notify_all()
                    return request
                if status == BackgroundThreadStatus.FLUSH_AND_STOP and not self._pending and not self._num_running:
                    return None
                self._news.wait()

    def _submit(self, request: BatchRequest) -> None:
        request.start_time = time.perf_counter()
        try:
            engine = self._model.paged
            vocab_size = self._model.get_input_embeddings().num_embeddings
            arguments = request.generate_arguments(engine.core.pool.max_context, vocab_size)
            if request.batching.return_logprobs:
                arguments |= {"logprobs": 0, "logprobs_mode": "processed"}
            if not request.batching.allow_block_sharing:
                arguments["cache_salt"] = f"batch {id(request)} {request.start_time}"
            while True:
                try:
                    handle = engine.submit(request.prompt, **arguments)
                    break
                except QueueFullError:
                    time.sleep(_RETRY_SECONDS)
        except Exception as error:
            self._finish(request, error)
            return
        with self._news:
            request.handle = handle
            is_dropped = request.is_dropped
        if is_dropped:
            handle.cancel()
        handle.listen(lambda: self._look(request, handle))

    def _look(self, request: BatchRequest, handle: Request) -> None:
        """Only hands on: it runs on whatever thread has news of a request."""
        if not request.is_dropped:
            for output in request.take(handle.events_since(request.num_events)):
                self._results.deliver(output, lambda: not request.is_dropped)
        if handle.is_done:
            self._finish(request, None)

    def _finish(self, request: BatchRequest, error: BaseException | None) -> None:
        handle, request.handle = request.handle, None
        with self._news:
            is_wanted = self._live.get(request.request_id) is request and not request.is_over
            request.is_over = True
        if is_wanted:
            for output in self._outputs(request, handle, error):
                self._results.deliver(output, lambda: not request.is_dropped)
        with self._news:  # not before its outputs are there: until then they are waited for
            if self._live.get(request.request_id) is request:
                del self._live[request.request_id]
            self._num_running -= 1
            self._news.notify_all()
        self._results.wake()

    def _outputs(
        self, request: BatchRequest, handle: Request | None, error: BaseException | None
    ) -> list[GenerationOutput]:
        if handle is None:
            return request.failures(str(error))
        try:
            output = handle.result()
        except Exception as failure:
            return request.failures(str(failure))
        if output.finish_reason == "cancelled":
            return request.failures("the request was cancelled")
        return request.outputs(output)

    def _end_all(self, error: str) -> None:
        """Fails what has not ended; returns when none of it is in the engine any more."""
        with self._news:
            left = [request for request in self._live.values() if not request.is_over]
            for request in left:
                request.is_over = True
            self._pending.clear()
            self._news.notify_all()
        for request in left:
            handle = request.handle
            for output in request.failures(error):
                self._results.deliver(output, lambda own=request: not own.is_dropped)  # type: ignore[misc]
            if handle is not None:
                handle.cancel()
        with self._news:
            self._news.wait_for(lambda: not self._num_running)
            for request in left:
                if self._live.get(request.request_id) is request:
                    del self._live[request.request_id]
