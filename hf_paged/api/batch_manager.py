"""`PagedBatchManager`: transformers' `ContinuousBatchingManager`, over the engine of a patched model."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
)
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from hf_paged.api.batch_feeder import BatchFeeder
from hf_paged.api.batch_request import BatchRequest, check_config, with_settings
from hf_paged.api.batch_results import BatchResults

logger = logging.get_logger(__name__)


class PagedBatchManager(ContinuousBatchingManager):
    """Hands requests to the engine in the order in which they came, and their results to those that ask.

    What is inherited iterates over results. Memory, scheduling and steps are the engine's, so that settings of theirs
    in a `ContinuousBatchingConfig` change nothing: `patch()` has its own. Honoured are `return_logprobs`, `seed`,
    `max_queue_size` and `allow_block_sharing`. A request may have any setting of a `GenerationConfig` of its own.

    Attributes:
        model: The patched model.
        generation_config: Of requests to come.
        continuous_batching_config: Of requests to come.
        background_thread_status: Whether it takes requests, in transformers' own words.
        warmed_up: True, so that nothing is compiled for a manager: what is compiled is the engine's, and is kept.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ) -> None:
        """Serves one model. Puts it into evaluation mode, as transformers' own does.

        Args:
            model: A patched one.
            generation_config: Of all requests.
            continuous_batching_config: Of all requests.
            workload_hints: Not needed.
        """
        self.model = model.eval()
        self.batch_processor = None
        self.warmed_up = True
        self._results = BatchResults()
        self._feeder = BatchFeeder(self.model, self._results)
        self.background_thread_status = self._feeder.status
        self._lock = threading.Lock()
        self._pausing: list[int] = []  # threads
        self._generation_thread: threading.Thread | None = None
        self.configure(generation_config, continuous_batching_config)

    def configure(self, generation_config: GenerationConfig, config: ContinuousBatchingConfig) -> None:
        """What holds for requests to come.

        Raises:
            ValueError: A setting that can't be honoured here.
        """
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

    def start(self) -> None:
        """Lets requests reach the engine."""
        if self.is_running():
            logger.warning("Manager thread is already running.")
            return
        self.background_thread_status.clear()
        seed = self.continuous_batching_config.seed
        run = functools.partial(self._feeder.run, seed)
        self._generation_thread = threading.Thread(target=run, name="hf_paged_batch", daemon=True)
        self._generation_thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Takes no more requests, and ends when those there have ended.

        Args:
            block: Wait for that.
            timeout: Seconds to wait at most; `None`: as long as it takes.
            keep_for_next_session: The model's next `init_continuous_batching()` returns this manager.
            hard_stop: Requests that have not ended fail.

        Raises:
            RuntimeError: This thread is inside `pause`.
        """
        if self._generation_thread is None:
            logger.warning("Manager not started.")
            return
        if threading.get_ident() in self._pausing:
            raise RuntimeError("this thread is inside pause(), where nothing can end: leave it before stop()")
        status = BackgroundThreadStatus.HARD_STOP if hard_stop else BackgroundThreadStatus.FLUSH_AND_STOP
        self._feeder.stop(status)
        if block:
            self.join(time.perf_counter(), timeout)
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self

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
        engine, own = self.model.paged, threading.get_ident()
        with self._lock:
            if not self._pausing:
                self._was_paused = engine.is_paused
            self._pausing.append(own)
        try:
            engine.pause()
            yield
        finally:
            with self._lock:
                self._pausing.remove(own)
                resumes = not self._pausing and not self._was_paused
            if resumes:
                engine.resume()

    # Requests

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

        Args:
            input_ids: The prompt.
            request_id: Its id; `None`: one is made.
            max_new_tokens: Tokens at most; `None`: as the generation config says, or until the model's context ends.
            streaming: An output a token.
            record_timestamps: Note when each token came.
            eos_token_id: Tokens that end it; below 0: none; `None`: as the generation config says.
            **settings: Any others of a `GenerationConfig`.

        Returns:
            Its id; `None` if the manager takes no more requests.

        Raises:
            ValueError: A setting that there isn't or that can't be honoured, an id in use.
            queue.Full: `max_queue_size` requests are waiting, and were for 10 seconds.
        """
        refusal = self.background_thread_status.can_accept_new_requests()
        if refusal is not None:
            logger.warning(f"{refusal} A request with {len(input_ids)} tokens is dropped.")
            return None
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        settings |= {name: value for name, value in given.items() if value is not None}
        config = with_settings(self.generation_config, settings, "add_request()")
        check_config(config, self.continuous_batching_config.return_logprobs)
        name = self._feeder.new_id() if request_id is None else request_id
        batching = self.continuous_batching_config
        if self._feeder.add(BatchRequest(name, input_ids, config, batching, streaming, record_timestamps)):
            return name
        logger.warning(f"The manager was stopped meanwhile. A request with {len(input_ids)} tokens is dropped.")
        return None

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

    def cancel_request(self, request_id: str) -> None:
        """Ends a request within a step. It has no output: those that nothing has taken are dropped."""
        self._feeder.cancel(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output: of a request if an id is given, else of any.

        Args:
            request_id: Of which request.
            timeout: Seconds to wait at most; `None`: as long as it takes.

        Returns:
            `None` when that time is over, or nothing can come any more: the manager has ended, or the request.
        """
        return self._results.take(request_id, timeout, lambda: self._may_come(request_id))

    def _may_come(self, request_id: str | None) -> bool:
        is_over = self.background_thread_status.local_status == BackgroundThreadStatus.STOPPED
        return self.is_running() and not is_over and (request_id is None or self._feeder.is_live(request_id))

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:  # type: ignore[override]
        """Outputs of one request as they come, to its last one. None are left of one that was cancelled."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Has each output of a request given to `callback`, in the event loop that runs on this thread."""
        self._results.register(request_id, callback)
