"""`Calls`: how a call begins: as rows that the engine samples, or as one of transformers' loops over a cache."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hf_paged.attention.cache import PagedCache
from hf_paged.core.interrupts import allowed_interrupt, deferred_interrupt
from hf_paged.core.process import PROCESS
from hf_paged.engine.beam_run import BeamRun
from hf_paged.engine.core import EngineCore
from hf_paged.engine.decoding_loop import DecodingLoop
from hf_paged.engine.openmp import rest_threads
from hf_paged.engine.room import Room
from hf_paged.engine.row_store import RowStore
from hf_paged.engine.run import Run
from hf_paged.engine.sampled_run import CallRows, SampledRun, TokenCallback
from hf_paged.memory.streams import let_caller_first, on_steps_stream
from hf_paged.model.weights_version import WeightsKey
from hf_paged.sampling.logprobs import TokenLogprobs

SLOW_STREAMER = 0.002  # seconds between two steps, from which on steps don't wait for a streamer


class TokenStream:
    """A call's tokens on their way to its streamer, which runs on the caller's thread."""

    def __init__(self, streamer: Any, has_drafts: bool) -> None:
        self._streamer = streamer
        self._has_drafts = has_drafts  # tokens of a step come together, and as a row
        self._tokens: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._new: list[int] = []
        self._is_over = False

    def put(self, row: int, token: int, said: TokenLogprobs | None, is_last: bool) -> None:
        self._new.append(token)
        if is_last:
            self._tokens.put(self._new)
            self._new = []

    def close(self, run: Run) -> None:
        self._tokens.put(None)

    def hand_out(self) -> bool:
        """Gives the streamer its tokens between two steps; returns whether it is too slow for the steps to wait for."""
        started = time.perf_counter()
        while not self._tokens.empty():
            self._hand_out_one()
        return time.perf_counter() - started > SLOW_STREAMER

    def follow(self) -> None:
        while not self._is_over:
            self._hand_out_one()

    @allowed_interrupt()
    def _hand_out_one(self) -> None:
        tokens = self._tokens.get()
        if tokens is None:
            self._is_over = True
        else:
            self._streamer.put(torch.tensor([tokens] if self._has_drafts else tokens, device="cpu"))


class Calls:
    """Starts `generate()` calls and requests, on their callers' threads."""

    def __init__(self, core: EngineCore, store: RowStore, room: Room) -> None:
        self._core = core
        self._store = store
        self._room = room

    @contextmanager
    def decoding(self, cache: PagedCache, num_blocks: int = 0, max_tokens: int = 0) -> Iterator[None]:
        """Surrounds one of transformers' decoding loops over a cache, on the caller's thread.

        Args:
            num_blocks: What its rows need in the pool beside each other and can't give back before the end. The loop
                begins when earlier ones leave so many.
            max_tokens: Tokens that each row may come to; 0: not known.
        """
        loop = self._core.current_loop
        if loop is None:
            self._room.wait()  # a request has waited already, and others wait for its thread
            loop = DecodingLoop()
        outer, cache.loop = cache.loop, loop
        loop.thread_id, loop.max_tokens = threading.get_ident(), max_tokens
        try:
            with (
                self._store.held(cache, loop),
                self._room.reserving(loop, num_blocks),
                self._core.worker.loop.decoding_loops.running(loop),
            ):
                loop.cache = cache  # not before it is known to run: until then it is starting
                yield
        finally:
            cache.loop, loop.cache = outer, None

    @deferred_interrupt()
    def start(
        self,
        call: CallRows,
        on_token: TokenCallback | None = None,
        waits: bool = True,
        on_end: Callable[[Run], None] | None = None,
        weights_key: WeightsKey | None = None,
    ) -> Run:
        """Starts a call whose rows the engine samples.

        Args:
            on_token: Called with every token, by the loop: it must only hand it on.
            waits: The caller waits: while the queue is full, and then for the result.
            on_end: Called when the run is over, by the loop.
            weights_key: The state of the model's weights, if it is known; else it is looked at.
        """
        core = self._core
        if waits:
            self._room.wait()
            core.worker.pause.warn()
        run: Run | None = None
        let_caller_first(core.pool.kv_device)

        def end() -> None:
            assert run is not None
            core.runs.discard(run)
            core.num_generated_tokens += run.num_tokens
            core.num_drafts = core.num_drafts[0] + run.num_drafts, core.num_drafts[1] + run.num_accepted
            if on_end is not None:
                on_end(run)

        try:
            with core.transaction(), on_steps_stream(core.pool.kv_device):
                _ = core.kv_cache
                if weights_key is None or weights_key[:-1] != core.weights_version.state:
                    weights_key = core.weights_key()
                batch_key = core.batch_key()
                call.adapters = core.adapters_for(len(call.input_ids) // call.num_samples)
                if call.beams is not None:
                    run = BeamRun(call, core.pool, core.worker, weights_key, batch_key, end)
                else:
                    run = SampledRun(call, core.pool, core.worker, weights_key, batch_key, on_token, end)
                with PROCESS.lock:  # models that wait for each other's steps would do so for ever
                    if call.draft_model is not None:
                        call.draft_model.check()
                    core.runs.add(run)
                run.version = core.weight_version
            if not waits:
                with core.pool.lock:
                    core.worker.wake(hands_over=True)
                if not core.worker.loop.is_mine:
                    rest_threads()
            return run
        except BaseException:
            if run is not None:
                self.cancel(run)  # Ctrl-C, held back until the end of the transaction
            raise

    def run(self, call: CallRows, stream: TokenStream | None = None) -> Run:
        """Starts a call and waits for its end, on this thread, which runs the steps if it is alone.

        Args:
            stream: Is given its tokens on the caller's thread.

        Raises:
            Exception: What the call raised.
        """
        worker, loop = self._core.worker, self._core.current_loop
        with deferred_interrupt(), worker.leading():
            on_token, on_end = (None, None) if stream is None else (stream.put, stream.close)
            if loop is not None:
                call.priority, call.request_id = loop.priority, loop.request_id
            run = self.start(call, on_token, on_end=on_end)
            try:
                if loop is not None:  # a request, which may be cancelled
                    loop.on_cancel = partial(self.cancel, run)
                    if loop.is_cancelled:
                        loop.on_cancel()
                if stream is not None:
                    if isinstance(run, SampledRun):
                        worker.run_alone(run.done, stream.hand_out)
                    stream.follow()
                worker.wait(run.done)
                if run.error is not None:
                    raise run.error
                if loop is not None:
                    loop.check_cancelled()
            except BaseException:
                if not run.is_done:
                    self.cancel(run)
                    self.wake()
                    worker.wait(run.done, timeout=60)  # no longer than the step it is in
                raise
            finally:
                if loop is not None:
                    loop.on_cancel = None
        return run

    def cancel(self, run: Run, row: int | None = None) -> None:
        """Ends a run, or one of its rows, before the next step. Takes no lock."""
        if row is not None and isinstance(run, SampledRun):  # of beams none ends by itself
            self._core.post(partial(run.cancel_row, row), between_steps=True)
        else:
            self._core.post(run.cancel, between_steps=True)

    def wake(self) -> None:
        with self._core.pool.lock:
            self._core.worker.wake()
