"""`Engine`: owns the pool of a patched model and serves everybody who generates with it, `model.paged`."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput, logging

from hf_paged.attention.cache import PagedCache
from hf_paged.attention.metadata import padded_tables
from hf_paged.core.batch import Chunk, group_tables
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.block_table import GONE
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.core.config import PagedConfig
from hf_paged.core.errors import OutOfBlocksError, UnsupportedCallError
from hf_paged.core.event_log import StepRows
from hf_paged.core.interrupts import check_interrupt, deferred_interrupt, wait_interruptibly
from hf_paged.core.metrics import EngineStats
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence, SequenceGroup
from hf_paged.engine.executor import StepExecutor, autocast_state
from hf_paged.engine.forward_item import ForwardItem
from hf_paged.engine.kv_pool import KV_DTYPES, KVPool
from hf_paged.engine.openmp import rest_threads
from hf_paged.engine.pool_size import find_size
from hf_paged.engine.request import Request, RequestOutput
from hf_paged.engine.sample_run import SampleCall, SampleRun
from hf_paged.engine.snapshot import Snapshot
from hf_paged.engine.submission import Capture, Submissions
from hf_paged.engine.warm_up import WarmUp, warm_up
from hf_paged.engine.worker import CACHE_SALT, REST_SECONDS, ROOM_SECONDS, CallCancelledError, Caller, StepWorker
from hf_paged.kernels import reference
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.kv_cache import KVCache
from hf_paged.memory.streams import among_steps, hand_out, let_caller_first, let_steps_first, on_steps_stream
from hf_paged.model.flat_forward import FlatForward, plain_padding, sees_padding
from hf_paged.model.forward_call import ForwardCall, map_batch, spread_rows
from hf_paged.model.fused_layers import FusedLayers
from hf_paged.model.model_state import ModelState
from hf_paged.model.packed_linears import PackedLinears
from hf_paged.model.runner import ModelRunner, ModelTraits, is_stochastic
from hf_paged.sampling.stop_strings import StopStringTables

logger = logging.get_logger(__name__)


class Engine:
    """The paged side of one patched model: `model.paged`.

    One worker thread runs the steps, in which rows of all callers meet: those the engine samples itself (`submit`, most
    `generate()` calls), and forwards that transformers' own loops make on their callers' threads. Processors, criteria
    and streamers of the caller's own never run on the worker.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PagedConfig,
        forward: Callable[..., Any],
        traits: ModelTraits,
    ) -> None:
        """Binds to a model.

        Args:
            model: The model; held weakly.
            config: The settings.
            forward: The forward function of the model's class before patching, unbound.
            traits: What `is_supported` found out about its architecture.
        """
        self.config = config
        self.traits = traits
        self._linears = PackedLinears(model, config.memory_fraction)
        self._fused = FusedLayers(model)
        self._model_state = state = ModelState(model, self._linears, self._fused)
        # What a user's own code sees is its to keep, and must be ordinary tensors.
        self._runner = ModelRunner(
            model,
            forward,
            model._supports_logits_to_keep(),
            self._layers,
            traits,
            is_plain=lambda: state.is_plain,
            num_moves=lambda: state.num_moves,
            config=config,
        )
        runner = self._runner
        groups = CacheGroups.of(traits.layers)
        self._pool = KVPool(
            config,
            groups,
            partial(traits.geometry, groups),
            lambda: runner.placement,
            lambda: find_size(config, traits, groups, runner),
        )
        self._abandoned: deque[Sequence] = deque()  # filled by finalizers, without the lock
        self._executor = StepExecutor(self._pool, self._runner)
        self._worker = StepWorker(self._pool, self._executor, self._collect_abandoned)
        self._submissions = Submissions(self)
        self.stop_strings = StopStringTables()
        self._reserved: dict[Caller, int] = {}  # blocks, in order of arrival; under the pool's lock
        self._num_generated_tokens = 0
        self._runs: set[SampleRun] = set()
        _ENGINES.add(self)

    # The pool

    @property
    def model(self) -> PreTrainedModel:
        """The patched model. Raises `RuntimeError` when it no longer exists."""
        return self._runner.model

    @property
    def capture(self) -> Capture | None:
        """Where `generate()` on this thread is to leave its prepared call instead of running it, if it is to."""
        return self._submissions.capture

    @property
    def is_background(self) -> bool:
        """Whether this thread is the engine's own, running the loop of a submitted request."""
        return self._submissions.current_caller is not None

    @property
    def lock(self) -> Any:
        """The pool's."""
        return self._pool.lock

    @property
    def num_running(self) -> int:
        """Sequences with keys and values in the pool."""
        with self._pool.lock:
            return self.scheduler.num_running if self._pool.is_made else 0

    @property
    def num_layers(self) -> int:
        """Layers that store keys and values."""
        return self.traits.num_layers

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys and values of `block_size` tokens in all layers."""
        return self._pool.bytes_per_block

    @property
    def manager(self) -> BlockManager:
        """The block tables, made at first use with the pool's size."""
        return self._pool.manager

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler over `manager`."""
        return self._pool.scheduler

    @property
    def kv_cache(self) -> KVCache:
        """The pool tensor, allocated at first use and again when the model has moved to another device or dtype."""
        return self._pool.kv_cache

    def check_fits(self, num_tokens: int, prompt_tokens: int, new_tokens: int) -> None:
        """Raises `ValueError` for a sequence that could never fit the empty pool; see `KVPool.check_fits`."""
        self._pool.check_fits(num_tokens, prompt_tokens, new_tokens)

    @deferred_interrupt()
    def reset_prefix_cache(self) -> int:
        """Forgets contents kept for prefix hits, and what was made from the model; returns how many blocks that were.

        Needed after changes that leave no trace: weights written through `.data`, and others that `ModelState` names.
        """
        with self.transaction():
            self._model_state.forget()
            return self.scheduler.reset_prefix_cache() if self._pool.is_made else 0

    @deferred_interrupt()
    def release(self) -> None:
        """Gives the pool's memory back until the next use. Live caches are computed again when they are next used.

        Raises:
            ValueError: A live `PagedCache` holds tokens that can't be computed again (of hidden states, odd masks).
        """
        with self._worker.exclusive(), self.transaction():
            self._collect_abandoned()
            self._pool.release()
            self._model_state.forget()
            self._runner.forget_graphs()

    @deferred_interrupt()
    def close(self) -> None:
        """Ends everything that runs, and the worker's thread. What comes later starts anew."""
        self._submissions.cancel_all()
        with self._worker.exclusive(), self.transaction():
            self._worker.fail_all(RuntimeError("the model was unpatched while this call was running"))
            self._worker.resume()
        self._worker.stop()

    def freeze(self) -> None:
        """At the interpreter's end: no step runs any more."""
        self._worker.freeze()
        self._submissions.freeze()

    @deferred_interrupt()
    def stats(self) -> EngineStats:
        """A snapshot of the gauges and counters."""
        with self.transaction():
            self._collect_abandoned()
            if not self._pool.is_made:
                num_blocks = self.config.num_blocks or 0
                return EngineStats(num_blocks=num_blocks, num_free_blocks=num_blocks)
            manager, pool, scheduler = self.manager, self.manager.pool, self.scheduler
            self._pool.record_peak()
            return EngineStats(
                num_blocks=pool.num_blocks,
                num_free_blocks=pool.num_free,
                num_running=scheduler.num_running,
                num_waiting=self.num_waiting,
                num_swapped=scheduler.num_swapped,
                num_preemptions=scheduler.num_preemptions,
                num_swapped_out=scheduler.num_swapped_out,
                num_admission_stalls=scheduler.num_admission_stalls,
                num_cow_copies=manager.num_cow_copies,
                prefix_cache_hit_tokens=manager.prefix_hit_tokens,
                prefix_cache_query_tokens=manager.prefix_query_tokens,
                peak_blocks_in_use=pool.peak_in_use,
                kv_tokens_stored=manager.num_stored_tokens,
                kv_slots_allocated=manager.num_allocated_slots,
                peak_kv_tokens_stored=self._pool.peak[1],
                peak_kv_slots_allocated=self._pool.peak[2],
                num_steps=self._executor.num_steps,
                num_prefill_tokens=self._executor.num_prefill_tokens,
                num_generated_tokens=self._num_generated_tokens + sum(run.num_tokens for run in self._runs),
            )

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: not started yet, or preempted."""
        with self._pool.lock:
            waiting = self.scheduler.num_waiting if self._pool.is_made else 0
            return waiting + self._submissions.num_queued

    @deferred_interrupt()
    def snapshot(self, since: int = 0) -> dict[str, Any]:
        """A picture of pool, block tables and queues, and what happened lately: plain lists and numbers (JSON-able).

        Args:
            since: Only events with an id above this one: whoever looks again and again gives the last id it has seen.

        Returns:
            `num_blocks` (0 before the pool's first use), `block_size`, `bytes_per_block` (keys and values of the layers
            of a group: all layers, where none has a window; 0 when the model is gone), `num_swap_blocks`;
            `is_paused`, `num_steps`; `blocks`: ref count of each one, -1 for a free one that is cached; `hashes`: the
            first 8 hex digits of each one's content hash, or "".

            `groups`: of each live sequence group its `id`, `request_id` (`None`: a plain `generate()` call, or a kept
            `PagedCache`), `status` ("waiting", "running", "swapped"), `is_idle`, `priority`, and its `sequences` with
            `id`, `num_tokens`, `num_computed_tokens`, `num_prompt_tokens`, `num_cached_tokens` (of the prompt's, those
            found in the prefix cache when it was last admitted; where steps overlap, one more may be computed than
            `num_tokens`, whose id is still on its way), `tail` (the last token ids, -1 of a token given as an embedding
            or at a position of its own, [] if unknown) and
            `block_table` (indices of CPU blocks while swapped). A model some of whose layers see a window only has
            several tables a sequence, one for each group of layers: `block_tables`, the first of which is
            `block_table`; -1 in them is a block behind the window, which was given back. `waiting`, `running` and
            `swapped`: ids of groups.

            `events`, oldest first, of the last 2,048: each has an `id` (rising by one), `time` (of `time.time()`),
            `step` (number of the step it belongs to), `kind`, and where it applies `group`, `sequence`, `request_id`:

            - "step": `num_seqs`, `num_tokens`, of them `num_decode` (one new token of a sequence) and
              `num_prefill_tokens`, `seconds`, `chunks` (`[group, sequence, start, num_tokens]`; in the end forgotten
              before the event is), `is_stalled` (the first waiting group did not fit); and after it `num_waiting`
              (groups), `num_swapped` (sequences that wait to come back), `num_free_blocks`. It is the last event of its
              step, but for what callers' own code (a beam search) then does with the result; where steps overlap
              (`use_async_batching`), the next one has begun before it.
            - "admitted": `num_sequences`, `num_tokens` (of the longest). "finished": the group's last sequence has
              ended; `reason` as a request's `finish_reason`, or `None` if its caller knows.
            - "allocated": `blocks`. "shared": `blocks`, `parent` (the sequence they are shared with). "prefix_hit":
              `blocks`, `num_tokens`. "copied": `source`, `destination`, because the sequence wrote to a shared block.
              "freed": `blocks` that it doesn't hold any more. "evicted": `blocks` whose cached content was dropped.
            - "preempted": `how` ("swap" or "recompute"), `num_sequences`. "swapped_out", "swapped_in": `num_blocks`
              that were copied, `blocks` of all its sequences, a shared one as often as they hold it.
            - "undone": a step that raised was taken back (`num_sequences`); what it allocated is freed next.

            Ref counts are the sum of all events so far: plus one for each block in "allocated", "shared", "prefix_hit",
            "swapped_in" and a copy's `destination`; minus one in "freed", "swapped_out" and a copy's `source`.
        """
        with self.transaction():
            self._collect_abandoned()
            worker = self._worker
            picture = Snapshot.take(self._pool, since, is_paused=worker.is_paused, num_steps=self._executor.num_steps)
        return picture.as_dict()

    @deferred_interrupt()
    def warm_up(self) -> WarmUp:
        """Compiles all kernels that serving launches and records the CUDA graphs, before the first request needs them.

        Takes the pool's memory. Requests that run wait meanwhile; pool, statistics, generators and prefix cache stay as
        they are, and calling it again does only what is missing. While a graph is recorded, `torch.cuda.synchronize()`
        on another thread raises, and on torch 2.11 so does a draw from the default generator: a program that does
        either beside its first requests is to call this before. What is only seen under autocast, or of adapters and
        weights that come later, is compiled when it comes.

        Returns:
            What was done, or why there are no graphs.

        Raises:
            RuntimeError: This thread is inside a step (in a hook of the model).
            UnsupportedModelError: The weights have been shared out between processes since `patch`.
            ValueError: `cuda_graphs=True`, and there can be none here.
        """
        with self.transaction():
            self._model_state.key()  # weights and code as they are now: what is recorded of others is recorded again
        return warm_up(self._pool, self._runner, self._worker, self.traits.runs_flat and self.is_batched())

    # Step by step

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the steps."""
        return self._worker.is_paused

    @deferred_interrupt()
    def pause(self) -> None:
        """Stops the steps; returns when none is running. Calling it again changes nothing.

        Until `resume` no step runs but those asked for by `step`. Everything else goes on: requests can be submitted
        and queue, `cancel()` frees their blocks, `stats` and `snapshot` look. `generate()` waits for its tokens, also
        on the thread that called `pause` (which logs a warning then); Ctrl-C ends it as always.

        Inside a step (in a hook of the model) it returns at once, and holds from the next step on. The pause also ends
        with `unpatch`, in a forked child, and with the main thread, so that the interpreter can.
        """
        self._worker.pause()

    @deferred_interrupt()
    def resume(self) -> None:
        """Lets the steps run again. Without a pause, nothing happens."""
        self._worker.resume()

    @deferred_interrupt()
    def step(self) -> dict[str, Any] | None:
        """Runs one step while the engine is paused, and waits for its end. From several threads: one after another.

        Callers whose own code runs between two forwards (a beam search) are waited for: some milliseconds as always,
        and up to a second if there is nothing else to run.

        Returns:
            Its "step" event, as in `snapshot`; `None` if there was nothing to run. A step that raises is none: it is
            taken back, the request to blame gets the error, and what the others' rows then run is the step.

        Raises:
            RuntimeError: The engine is not paused, or this thread is inside a step (in a hook of the model).
        """
        return self._worker.step_paused(lambda: self._submissions.is_starting)

    def count_generated(self, num_tokens: int) -> None:
        """Books tokens that a `generate()` call handed out."""
        with self.transaction():
            self._num_generated_tokens += num_tokens

    @deferred_interrupt()
    def check_invariants(self) -> None:
        """Asserts the pool's and the tables' invariants. Raises `AssertionError`."""
        with self.transaction():
            self._collect_abandoned()
            if self._pool.is_made:
                self.manager.check_invariants()

    @contextmanager
    def _layers(self) -> Iterator[None]:
        """Within it, forwards of the model on this thread compute its layers in the engine's way."""
        with self._linears.scope(), self._fused.scope():
            yield

    # What a PagedCache asks for (cache.SequenceStore)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """The pool's lock, with Ctrl-C held back to its end: nothing inside is left half done. Re-entrant."""
        with self._pool.lock, deferred_interrupt():
            yield

    def new_sequence(self) -> Sequence:
        """An empty sequence with an empty block table, in a group of its own."""
        caller = self._submissions.current_caller
        with self.transaction():
            group = self.scheduler.new_group(caller.priority, request_id=caller.request_id) if caller else None
            return self.scheduler.new_sequence(group)

    def fork_sequence(self, sequence: Sequence, apart: bool = False) -> Sequence:
        """A sequence equal to this one that shares all its blocks.

        Args:
            sequence: The parent.
            apart: Scheduled and preempted by itself, not together with its parent.
        """
        with self.transaction():
            is_apart = apart and sequence.group.status != "swapped"
            return self.scheduler.fork(sequence, self.scheduler.new_group() if is_apart else None)

    def free_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences and releases their blocks."""
        with self.transaction():
            for sequence in sequences:
                self._worker.remove(sequence)
                self.scheduler.free(sequence)

    def hold(self, sequences: Iterable[Sequence], is_idle: bool) -> None:
        """Notes whether a call is generating with these sequences, or only a `PagedCache` holds them.

        A call that begins over sequences that were idle comes after all others.
        """
        with self.transaction():
            for group in {sequence.group.arrival: sequence.group for sequence in sequences}.values():
                if group.is_idle and not is_idle:
                    self.scheduler.renew(group)
                group.is_idle = is_idle

    def abandon_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Called by the garbage collector, on any thread at any moment: only enqueues, takes no lock."""
        self._abandoned.extend(sequences)

    def crop_sequences(self, cuts: SequenceOf[tuple[Sequence, int]]) -> None:
        """Cuts sequences to so many of their first tokens, all or none.

        Raises:
            RuntimeError: What is behind the windows of so few tokens has been given back.
        """
        with self.transaction():
            for sequence, num_tokens in cuts:
                if sequence.num_computed_tokens > num_tokens and not self.manager.can_crop(sequence.seq_id, num_tokens):
                    raise RuntimeError(
                        f"the cache can't be cropped to {num_tokens} tokens: layers with a sliding window have given "
                        "back what lies behind it; call activate_past_recording() before the forwards to be undone"
                    )
            for sequence, num_tokens in cuts:
                self.scheduler.crop(sequence, num_tokens)

    def keep_past(self, sequences: Iterable[Sequence]) -> None:
        """From now on layers with a window keep what lies behind it, until the next crop."""
        with self.transaction():
            for sequence in sequences:
                self.scheduler.keep_past(sequence)

    def windows(self) -> list[int | None]:
        """Of each layer, the last tokens that it keeps and a query sees, itself included; `None`: all."""
        return [layer.window for layer in self.traits.layers]

    @deferred_interrupt()
    def grow_opaque(self, sequences: list[Sequence], num_tokens: int) -> None:
        """Gives each sequence slots for tokens whose ids nobody told us.

        Raises:
            OutOfBlocksError: The pool can't hold them.
        """
        caller = self._submissions.current_caller
        if caller is not None and caller.is_cancelled:
            raise CallCancelledError  # the model was unpatched, whose forward comes here now
        with self._resident(sequences), self.transaction():
            self._append(sequences, [num_tokens] * len(sequences))
            for sequence in sequences:
                sequence.token_ids = None
                self.scheduler.extend_computed(sequence, num_tokens)
                sequence.num_prompt_tokens = sequence.num_prompt_tokens or sequence.num_tokens
            self._pool.record_peak()

    def _append(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Gives each sequence slots for so many tokens more; all are in the pool. The pool's lock is held.

        Raises:
            OutOfBlocksError: The pool can't hold them.
        """
        self._pool.log.step = self._executor.num_steps + 1
        manager, scheduler = self.manager, self.scheduler
        requests = [(s.seq_id, count) for s, count in zip(sequences, counts, strict=True) if count]
        for sequence in sequences:
            scheduler.slide(sequence)
        groups = [sequence.group for sequence in sequences]
        self._pool.execute_swap_outs(scheduler.make_room(manager.append_need(requests), groups))
        try:
            moves = scheduler.append(sequences, counts)
        except OutOfBlocksError as error:
            blocks = {block for sequence in sequences for block in manager.held_blocks(sequence.seq_id)}
            if len(blocks) + error.needed > manager.pool.num_blocks:  # also with the pool to itself
                error.needed += len(blocks)
            raise self._pool.out_of_blocks(error) from None
        self._pool.execute_moves(moves)

    @deferred_interrupt()
    def write_tokens(self, layer: int, sequences: list[Sequence], key: Tensor, value: Tensor, start: list[int]) -> None:
        """Stores `[B, num_kv_heads, q, head_dim]` keys and values of one layer, from token `start[i]` on."""
        with among_steps(key.device), self.transaction():
            length = key.shape[2]
            group, index = self.kv_cache.groups.places[layer]
            slots = np.stack(
                [
                    self._slots(sequence, group, np.arange(first, first + length))
                    for sequence, first in zip(sequences, start, strict=True)
                ]
            )
            kv_cache = self.kv_cache.tensor
            reference.reshape_and_cache(
                key.detach().transpose(1, 2).flatten(0, 1),
                value.detach().transpose(1, 2).flatten(0, 1),
                kv_cache,
                index,
                to_device(slots.reshape(-1), kv_cache.device),
            )

    @deferred_interrupt()
    def read_tokens(
        self, layer: int, sequences: list[Sequence | None], padding: list[int], width: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as `[B, num_kv_heads, width, head_dim]`.

        Zeros in the padding, for `None`, and where a layer with a window has given tokens back.
        """
        held = [sequence for sequence in sequences if sequence is not None]
        with among_steps(self._pool.kv_device), self._resident(held), self.transaction():
            group, index = self.kv_cache.groups.places[layer]
            slots = np.full((len(sequences), width), self.kv_cache.null_block * self.config.block_size, dtype=np.int64)
            for row, (sequence, pad) in enumerate(zip(sequences, padding, strict=True)):
                if sequence is not None:
                    slots[row, pad:] = self._slots(sequence, group, np.arange(width - pad))
            kv_cache = self.kv_cache.tensor
            self._pool.flush_copies()
            key, value = reference.gather_slots(kv_cache, index, to_device(slots, kv_cache.device))
            if kv_cache.dtype in KV_DTYPES.values():
                dtype = self.model.dtype
                key, value = key.to(dtype), value.to(dtype)
        hand_out((key, value))
        return key, value

    def _slots(self, sequence: Sequence, group: int, token_index: np.ndarray) -> np.ndarray:
        table = np.array(self.manager.blocks(sequence.seq_id, group), dtype=np.int64)
        table[table == GONE] = self.kv_cache.null_block
        block_size = self.config.block_size
        return table[token_index // block_size] * block_size + token_index % block_size

    @contextmanager
    def _resident(self, sequences: list[Sequence], has_forward: bool = False) -> Iterator[None]:
        """Within it these sequences are in the pool, all of them beside each other, and no step runs.

        Args:
            sequences: The sequences.
            has_forward: The model is run within: while the engine is paused, that waits, or is a step.

        Raises:
            ValueError: The model's weights, adapters or hooks are not those that one of them was computed with.
            OutOfBlocksError: They don't fit beside each other.
        """
        groups = {sequence.group.arrival: sequence.group for sequence in sequences}

        def needs_step() -> bool:
            return has_forward or any(sequence.num_pending_tokens for sequence in sequences)

        with self._worker.forwarding(needs_step, self._submissions.current_caller):
            pinned: list[SequenceGroup] = []
            try:  # around the pinning too, behind which Ctrl-C may come
                with self.transaction():
                    for group in groups.values():
                        group.num_pins += 1
                        pinned.append(group)
                self._bring_back(sequences)
                yield
            finally:
                with self.transaction():
                    for group in pinned:
                        group.num_pins -= 1

    def _bring_back(self, sequences: list[Sequence]) -> None:
        """Computes preempted sequences again, or swaps them in. The step lock is held."""
        with self.transaction():
            lost = [s for s in sequences if s.num_pending_tokens > 0 or s.group.status == "swapped"]
            if not lost:
                return
            state = self._model_state.key()
            for sequence in lost:
                if sequence.num_pending_tokens:
                    sequence.check_state(state)
            swapped = {s.group.arrival: s.group for s in lost if s.group.status == "swapped"}
            for group in swapped.values():
                try:
                    self._pool.execute_moves(self.scheduler.swap_in_now(group))
                except OutOfBlocksError as error:
                    self._pool.execute_swap_outs(error.swap_outs)
                    raise self._pool.out_of_blocks(error) from None
            lost = [sequence for sequence in lost if sequence.num_pending_tokens > 0]
            if not lost:
                return
            for sequence in lost:
                sequence.group.batch_key = self._batch_key()
        item: ForwardItem | None = None
        try:
            with self.transaction():
                item = ForwardItem(self._pool, self._worker, lost, np.empty((len(lost), 0), dtype=np.int64))
            item.wait()
        except BaseException:
            if item is not None:
                item.cancel()
            raise

    def _batch_key(self) -> Hashable:
        return autocast_state(self._runner.placement[1])

    # Forwards

    @deferred_interrupt()
    @torch.no_grad()
    def forward(self, cache: PagedCache, call: ForwardCall) -> ModelOutput:
        """Runs one forward of the patched model over a cache of its pool, beside whatever else runs.

        Args:
            cache: Grows by the call's columns.
            call: The arguments.

        Returns:
            What the model's own forward would, in the caller's shape. The logits of finished (retired) rows are zeros.

        Raises:
            ValueError: The cache belongs to another model, the batch size changed, or the tokens could never fit.
            OutOfBlocksError: The pool is held by sequences that can't be preempted.
            UnsupportedCallError: See `check_hooks`.
        """
        caller = cache.caller
        if caller is not None and caller.is_cancelled:
            raise CallCancelledError
        with self.transaction():
            self._collect_abandoned()
            if cache.store is not self:
                raise ValueError("this PagedCache belongs to another model (or to this one before it was unpatched)")
            self.check_hooks()
            _ = self.kv_cache  # follows the model to another device or dtype now, while preempted rows still can return
            batch, length = call.tokens.shape[:2]
            if length == 0:
                raise ValueError("the input is empty: give at least one token")
            if cache.fan_out > 1 and not call.repeats_rows(cache.fan_out):
                cache.split_fan_out()
            fan_out = cache.fan_out
            if not cache.sequences:
                cache.open_rows(batch // fan_out)
            if cache.batch_size != batch:
                raise ValueError(f"got {batch} rows for a PagedCache of {cache.batch_size} rows")
            call = call.select(slice(None, None, fan_out)) if fan_out > 1 else call
            active = [row for row, sequence in enumerate(cache.sequences) if sequence is not None]
            is_partial = len(active) < len(cache.sequences)
            call = call.select(active) if is_partial else call
            width = cache.get_seq_length()
            live = [sequence for sequence in cache.sequences if sequence is not None]
            before = [_Mark.of(sequence) for sequence in live]
            for sequence in live:
                if not sequence.is_reproducible:  # kept so far, should a forward fail; from here on it goes back to now
                    self.scheduler.slide(sequence)
            takes_positions = self._runner.takes_positions
            padding = plain_padding(cache, call, active, takes_positions) if self._is_own() else None
            self.hold(live, is_idle=False)
        try:
            if padding is None:
                output = self._forward_gathered(cache, call, active if is_partial else None)
            elif not self.is_batched() or sees_padding(call, padding, width):
                output = self._forward_called(cache, call, active, padding)
            else:
                output = self._forward_flat(cache, call, active, padding)
        except BaseException:
            with self.transaction():
                for mark in before:
                    mark.restore(self)
                if width == 0:
                    self.free_sequences(sequence for sequence in cache.sequences if sequence is not None)
                cache.rewind(width)
            raise
        finally:
            if caller is None and not cache.owned_by_call:
                self.hold([sequence for sequence in cache.sequences if sequence is not None], is_idle=True)
        output = spread_rows(output, active, len(cache.sequences)) if is_partial else output
        if fan_out > 1:
            output = map_batch(output, len(cache.sequences), lambda x: x.repeat_interleave(fan_out, dim=0))
        output["past_key_values"] = cache
        return output

    def is_batched(self) -> bool:
        """Whether forwards of the model as it is now can share steps with others."""
        return self.traits.is_batched and self._is_own() and not self._model_state.needs_rows

    def _is_own(self) -> bool:
        """Whether what the model stores of a token follows from the row's tokens and positions, at least at first."""
        # A model that assists itself by early exit has fewer layers for the moment: what it stores is not for sharing.
        model = self._runner.model
        config = model.config.get_text_config(decoder=True)
        # Dropout in training mode is the model's own attention's business.
        is_own = config.num_hidden_layers == self.traits.num_layers and not (model.training and is_stochastic(model))
        return is_own and (self.traits.is_batched or self.traits.regime_length is not None)

    def look_at_hooks(self) -> None:
        """At the beginning of a call: finds the hooks of modules that were put into the model since."""
        self._model_state.look_at_hooks()

    def check_hooks(self) -> bool:
        """Whether hooks on inner modules have to be shown whole, padded batches. Warns where they cost the flat batch.

        Raises:
            UnsupportedCallError: The same under `strict=True`.
        """
        if not self._model_state.needs_rows:
            return False
        if self.traits.runs_flat:
            reason = "forward hooks on the model's inner modules may address rows or columns"
            if self.config.strict:
                raise UnsupportedCallError(
                    f"{reason}: calls can only run padded, and strict=True forbids it; hf_paged.packed_hook marks "
                    "hooks that treat all tokens alike"
                )
            logger.warning_once(
                f"hf_paged: {reason}: calls run padded, one after another, as long as they are there; "
                "hf_paged.packed_hook marks hooks that treat all tokens alike"
            )
        return True

    def _forward_called(
        self, cache: PagedCache, call: ForwardCall, active: list[int], padding: list[int]
    ) -> ModelOutput:
        """A forward by itself in the caller's shape, whose padding is seen; what is stored is that of any forward."""
        sequences = [sequence for row in active if (sequence := cache.sequences[row]) is not None]
        width = cache.get_seq_length()
        cache.set_padding(padding, active)
        flat = FlatForward.make(call, sequences, padding, width, self._runner.takes_positions)
        device = self._pool.kv_device
        with self._resident(sequences, has_forward=True), among_steps(device):
            started, lengths = time.perf_counter(), [sequence.num_tokens for sequence in sequences]
            with self.transaction():
                self._extend(cache, flat, width)
                new = [sequence.num_tokens - length for sequence, length in zip(sequences, lengths, strict=True)]
                self._append(sequences, new)
                kv_cache = self.kv_cache
                tables = padded_tables(
                    group_tables(self.manager.tables([sequence.seq_id for sequence in sequences])),
                    kv_cache.groups.windows,
                    kv_cache.null_block,
                    np.int64,
                )
            output: ModelOutput = self._runner.run_called(
                tables,
                np.array(new),
                np.array([sequence.num_tokens for sequence in sequences]),
                kv_cache,
                (width + flat.length, flat.length),
                call.arguments(),
            )
            with self.transaction():
                limit = self.traits.regime_length
                if limit is not None and flat.longest >= limit:  # from here on, frequencies are those of the moment
                    for sequence in sequences:
                        sequence.is_stale = True
                offers = self.scheduler.book_computed(sequences)
                sums = kv_cache.block_sums([offer.block_id for offer in offers]).wait() if offers else torch.empty(0)
                self.scheduler.settle(offers, sums.isfinite().tolist())
                self._book_forward(sequences, lengths, started)
        cache.advance(flat.length)
        hand_out([value for name, value in output.items() if name != "past_key_values"])
        return output

    def _book_forward(self, sequences: list[Sequence], lengths: list[int], started: float) -> None:
        """Counts a forward that was a step of its own; `lengths` are those before it. The pool's lock is held."""
        chunks: list[Chunk] = [(s, start, s.num_tokens - start) for s, start in zip(sequences, lengths, strict=True)]
        number = self._executor.count_step(len(chunks), sum(n for _, _, n in chunks))
        self._executor.note_step(number, StepRows.of(chunks), time.perf_counter() - started)

    def _forward_gathered(self, cache: PagedCache, call: ForwardCall, active: list[int] | None) -> ModelOutput:
        """The model's own padded forward, by itself; `cache.update` stores and gathers."""
        sequences = [sequence for sequence in cache.sequences if sequence is not None]
        with self._resident(sequences, has_forward=True), among_steps(self._pool.kv_device):
            started, lengths = time.perf_counter(), [sequence.num_tokens for sequence in sequences]
            cache.select_active(active)
            output: ModelOutput = self._runner.run_unpatched(
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **call.arguments(),
            )
            cache.select_active(None)
            with self.transaction():
                self._book_forward(sequences, lengths, started)
        hand_out([value for name, value in output.items() if name != "past_key_values"])
        return output

    def _forward_flat(
        self, cache: PagedCache, call: ForwardCall, active: list[int], padding: list[int]
    ) -> CausalLMOutputWithPast:
        """The call's real tokens, in the next steps' flat batches."""
        sequences = [sequence for row in active if (sequence := cache.sequences[row]) is not None]
        width = cache.get_seq_length()
        cache.set_padding(padding, active)
        flat = FlatForward.make(call, sequences, padding, width, self._runner.takes_positions)
        item: ForwardItem | None = None
        try:
            with self._worker.leading():
                item = self._enqueue(cache, flat, width)
                logits = item.wait()
        except BaseException:
            if item is not None:
                item.cancel()
            let_steps_first(self._pool.kv_device)  # they may read what the caller gave
            raise
        cache.advance(flat.length)
        return CausalLMOutputWithPast(logits=logits)

    def _enqueue(self, cache: PagedCache, flat: FlatForward, width: int) -> ForwardItem:
        item: ForwardItem | None = None
        try:
            with self.transaction():
                caller = cache.caller
                self._extend(cache, flat, width)
                longest = max(sequence.num_tokens for sequence in flat.sequences)
                self.check_fits(longest, longest, 0)
                item = ForwardItem(self._pool, self._worker, flat.sequences, flat.wanted_logits(), caller)
            return item
        except BaseException:
            if item is not None:
                item.cancel()  # Ctrl-C, held back until the end of the transaction
            raise

    def _extend(self, cache: PagedCache, flat: FlatForward, width: int) -> None:
        """Adds a call's tokens to its sequences. The pool's lock is held."""
        salt = () if (salt := CACHE_SALT.get()) is None else (salt,)
        device = self._pool.kv_device
        let_caller_first(device)
        with on_steps_stream(device):  # in their memory: they may read it when the caller is gone
            # Inside one generate() call the weights stand still, so its decode steps don't ask again.
            flat.extend_sequences(None if cache.owned_by_call and width > 0 else self._model_state, salt)
        batch_key = self._batch_key()
        for sequence in flat.sequences:
            sequence.group.batch_key = batch_key

    # Calls

    @contextmanager
    def calling(self, cache: PagedCache, num_blocks: int = 0) -> Iterator[None]:
        """The length of one of transformers' decoding loops over a cache, on the caller's thread.

        Args:
            cache: The cache.
            num_blocks: What its rows need in the pool beside each other and can't give back before the end. The loop
                begins when earlier ones leave so many.
        """
        caller = self._submissions.current_caller
        if caller is None:
            self._wait_for_room()  # a request has waited already, and others wait for its thread
            caller = Caller()
        outer, cache.caller = cache.caller, caller
        caller.cache, caller.thread_id = cache, threading.get_ident()
        kept = [sequence for sequence in cache.sequences if sequence is not None]
        self.hold(kept, is_idle=False)
        for sequence in kept:
            sequence.num_prompt_tokens, sequence.group.request_id = 0, caller.request_id
        try:
            with self._reserving(caller, num_blocks), self._worker.calling(caller):
                yield
        finally:
            cache.caller, caller.cache = outer, None
            if not cache.owned_by_call:
                kept = [sequence for sequence in cache.sequences if sequence is not None]
                self.hold(kept, is_idle=True)
                for sequence in kept:
                    sequence.group.request_id = None

    @contextmanager
    def _reserving(self, caller: Caller, num_blocks: int) -> Iterator[None]:
        """Waits until so many blocks (at most the whole pool) fit beside those reserved before, and reserves them.

        Not inside a step or another such call of this thread, and no longer than some seconds without any step: others
        may be waiting for this one.
        """
        condition, own = self._worker.condition, threading.get_ident()
        if not num_blocks or self._worker.is_mine or any(other.thread_id == own for other in list(self._reserved)):
            yield
            return
        try:
            with condition:
                self._reserved[caller] = min(num_blocks, self.manager.pool.num_blocks)
                num_steps, since = self._executor.num_steps, time.monotonic()
                while not self._is_served(caller) and time.monotonic() - since < ROOM_SECONDS:
                    check_interrupt()
                    if caller.is_cancelled:
                        raise CallCancelledError
                    condition.wait(REST_SECONDS)
                    if self._executor.num_steps != num_steps or self.is_paused:
                        num_steps, since = self._executor.num_steps, time.monotonic()
            yield
        finally:
            with condition:
                self._reserved.pop(caller, None)
                condition.notify_all()

    def _is_served(self, caller: Caller) -> bool:
        """Whether what it has reserved fits beside what was reserved before it."""
        total = 0
        for other, num_blocks in self._reserved.items():
            total += num_blocks
            if other is caller:
                break
        return total <= self.manager.pool.num_blocks

    @deferred_interrupt()
    def run(
        self,
        call: SampleCall,
        on_token: Callable[[int], None] | None = None,
        waits: bool = True,
        on_end: Callable[[SampleRun], None] | None = None,
    ) -> SampleRun:
        """Starts a call whose rows the engine samples.

        Args:
            call: What to generate.
            on_token: Called with every token of row 0, on the worker: it must only hand it on.
            waits: The caller waits: while the queue is full, and then for the result.
            on_end: Called when the run is over, on the worker.
        """
        if waits:
            self._wait_for_room()
            self._worker.warn_of_pause()
        run: SampleRun | None = None
        let_caller_first(self._pool.kv_device)

        def end() -> None:
            assert run is not None
            self._runs.discard(run)
            self._num_generated_tokens += run.num_tokens
            if on_end is not None:
                on_end(run)

        try:
            with self.transaction(), on_steps_stream(self._pool.kv_device):
                _ = self.kv_cache
                state_key, batch_key = self._model_state.key(), self._batch_key()
                run = SampleRun(call, self._pool, self._worker, state_key, batch_key, on_token, end)
                self._runs.add(run)
            if not waits:
                self._worker.resign()
                if not self._worker.is_mine:
                    rest_threads()
            return run
        except BaseException:
            if run is not None:
                self.cancel_run(run)  # Ctrl-C, held back until the end of the transaction
            raise

    def _wait_for_room(self) -> None:
        """Blocks while the queue is full. Not inside a step or a request, which others in the queue may wait for."""
        may_wait = not self._worker.is_mine and not self._submissions.is_request_thread
        if self.config.max_waiting is not None and may_wait:
            with self._worker.condition:
                while not self.has_room_to_wait():
                    wait_interruptibly(self._worker.condition.wait)

    def has_room_to_wait(self) -> bool:
        """Whether the queue is shorter than `max_waiting`."""
        return self.config.max_waiting is None or self.num_waiting < self.config.max_waiting

    def cancel_run(self, run: SampleRun) -> None:
        """Ends a run before the next step. Takes no lock."""
        self._worker.order(run.cancel)

    def leading(self) -> AbstractContextManager[None]:
        """Around a run that is waited for: see `StepWorker.leading`."""
        return self._worker.leading()

    @property
    def is_stepping(self) -> bool:
        """Whether this thread is inside a step (in a hook)."""
        return self._worker.is_mine

    def wake(self) -> None:
        """Has the worker look at what there is to do."""
        with self._pool.lock:
            self._worker.notify()

    # Requests

    @deferred_interrupt()
    def submit(
        self,
        input_ids: SequenceOf[int] | Tensor,
        generation_config: Any = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | int | bytes | None = None,
        **generate_kwargs: Any,
    ) -> Request:
        """Queues one prompt and returns at once.

        Args:
            input_ids: Token ids: a list, or a 1-D tensor or array, or one of `[1, L]`.
            generation_config: As in `generate()`.
            request_id: Any name not in use by an unfinished request; `None`: one is made.
            priority: The lower, the earlier; first come, first served within a priority.
            cache_salt: A string, integer or bytes: requests share cached prefixes only with requests of the same salt,
                in an assistant model's pool as well. `None`: none, or inside another request (a processor that
                submits) that one's.
            **generate_kwargs: Everything else that `generate()` takes, but `streamer` (iterate the request instead),
                `inputs_embeds`, and per-step outputs.

        Sampling draws as `generate()` would from the state of torch's global generator at this moment; after a
        sampling request the global generator is reseeded from itself, so that the next one draws other numbers.

        Raises:
            ValueError: What `generate()` would raise for these arguments; a batch; a prompt that could never fit.
            QueueFullError: `max_waiting` requests are waiting.
        """
        return self._submissions.submit(input_ids, generation_config, request_id, priority, cache_salt, generate_kwargs)

    @deferred_interrupt()
    def generate(
        self,
        prompts: Iterable[SequenceOf[int] | Tensor],
        generation_config: Any = None,
        *,
        progress_bar: bool = False,
        **generate_kwargs: Any,
    ) -> list[RequestOutput]:
        """Generates for many prompts of any lengths, in one continuous batch.

        Args:
            prompts: As `input_ids` of `submit`, any number of them.
            generation_config: For all of them.
            progress_bar: Show a tqdm bar.
            **generate_kwargs: As in `submit`, for all of them.

        Returns:
            One result a prompt, in the order of the prompts.

        Raises:
            Exception: What the first failing request raised; the others are cancelled.
        """
        self._worker.warn_of_pause()
        return self._submissions.generate(prompts, generation_config, progress_bar, generate_kwargs)

    def _collect_abandoned(self) -> None:
        while self._abandoned:
            self.free_sequences([self._abandoned.popleft()])

    def reset_after_fork(self) -> None:
        """In a forked child: what ran in the parent has no threads here, and fails."""
        self.stop_strings = StopStringTables()
        self._submissions.reset_after_fork()
        self._reserved.clear()
        self._worker.reset_after_fork()


# Engines of this process, for the two moments that no object can wait for by itself: a fork and the interpreter's end.
_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


class _Fork(threading.local):
    engines: tuple[Engine, ...] = ()


_FORK = _Fork()


def _before_fork() -> None:
    # With their locks: the child must not find tables that another thread had half written.
    _FORK.engines = tuple(sorted(_ENGINES, key=id))
    for engine in _FORK.engines:
        engine.lock.acquire()


def _after_fork_in_parent() -> None:
    for engine in _FORK.engines:
        engine.lock.release()
    _FORK.engines = ()


def _after_fork_in_child() -> None:
    for engine in _FORK.engines:
        engine.reset_after_fork()
    _FORK.engines = ()


def _at_exit() -> None:
    for engine in list(_ENGINES):
        engine.freeze()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_at_exit)


@dataclass(slots=True)
class _Mark:
    """A sequence's state before a forward, to go back to if the forward fails."""

    sequence: Sequence
    num_tokens: int

    @classmethod
    def of(cls, sequence: Sequence) -> _Mark:
        return cls(sequence, sequence.num_tokens)

    def restore(self, engine: Engine) -> None:
        # Tokens that became unknown in the failed forward stay unknown: only hashing and recomputing are lost.
        with engine.transaction():
            engine.scheduler.crop(self.sequence, min(self.num_tokens, self.sequence.num_tokens))
