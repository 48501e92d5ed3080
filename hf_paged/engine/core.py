"""`EngineCore`: the one owner of a patched model's queues, tables, pool and rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.config import PagedConfig
from hf_paged.core.errors import UnsupportedModelError
from hf_paged.core.interrupts import deferred_interrupt
from hf_paged.core.metrics import EngineStats
from hf_paged.core.process import PROCESS
from hf_paged.core.scheduler import Scheduler
from hf_paged.engine.call_context import call_context
from hf_paged.engine.decoding_loop import DecodingLoop
from hf_paged.engine.executor import StepExecutor, autocast_state
from hf_paged.engine.follower import Follower
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.leader import Leader
from hf_paged.engine.run import Run
from hf_paged.engine.worker import StepWorker
from hf_paged.memory.kv_cache import KVCache
from hf_paged.model.adapter import Adapter
from hf_paged.model.adapter_store import Adapter as Pinned
from hf_paged.model.adapters import Adapters
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.encoders import Encoder
from hf_paged.model.latents import Latents
from hf_paged.model.layers import Layers
from hf_paged.model.runner import ModelRunner
from hf_paged.model.sharding import ranks_of
from hf_paged.model.step_memory import StepMemory
from hf_paged.model.traits import ModelTraits
from hf_paged.model.weights_version import WeightsKey, WeightsVersion
from hf_paged.parallel.channel import Channel
from hf_paged.sampling.stop_strings import StopStringTables

logger = logging.get_logger(__name__)


class EngineCore:
    """The state of the engine, and the worker that runs its steps. Rows, forwards and calls change it from elsewhere.

    Attributes:
        layers: The engine's ways to compute the model's modules.
        bound: The model as forwards call it.
        post: See `StepLoop.post`.
        ranks: This rank's end of what several do together; `None`: the model is whole.
        num_generated_tokens: The tokens of calls that are over.
        num_drafts: The drafts verified in these calls: all, and those that were right.
        weight_version: How often the model was found to have changed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PagedConfig,
        forward: Callable[..., Any],
        traits: ModelTraits,
    ) -> None:
        """Binds to a model, which is held weakly; `forward` is that of its class before patching, unbound.

        Raises:
            ValueError: A setting that this model's layers don't go with.
        """
        chunk = next((layer.chunk for layer in traits.layers if layer and layer.chunk), config.block_size)
        if chunk % config.block_size:
            raise ValueError(
                f"the model attends in chunks of {chunk} tokens, which blocks of {config.block_size} don't divide: "
                "patch with another block_size"
            )
        if config.kv_cache_dtype == "int8" and (reason := traits.why_not_scaled) is not None:
            raise ValueError(f'kv_cache_dtype="int8" does not go with this model: {reason}; use "fp8" or "auto"')
        self.config = config
        self.traits = traits
        # Others' experts, too, may look at all tokens of a forward, padding among them.
        encoder = model.get_encoder() if traits.cross and traits.runs_packed else None
        self.layers = Layers(model, self._moving, encoder=encoder)
        self.encoder = Encoder(model, self.layers.of_encoder) if traits.cross else None
        latents = Latents(model, traits.layers)
        self.adapters = adapters = Adapters(ranks_of(model) is None, config.compile_decode)
        self.weights_version = state = WeightsVersion(model, self.layers, latents, adapters)
        adapters.note_base(state.state[0])
        # What a user's own code sees is its to keep, and must be ordinary tensors.
        self.bound = bound = BoundModel(model, forward, self.layers.scope, traits, state, config, latents, adapters)
        memory = StepMemory(bound, config)
        self.runner = ModelRunner(bound, lambda: state.num_moves + adapters.num_moves, config, memory)
        self.pool = KVPool(config, bound, memory)
        self.executor = StepExecutor(self.pool, bound, self.runner, self.look_at_weights, state.check_rows)
        self.ranks: Leader | Follower | None = None
        self.worker = StepWorker(self.pool, self.executor)
        self.stop_strings = StopStringTables()
        self.post = self.worker.loop.post
        self.runs: set[Run] = set()
        self.num_generated_tokens = 0
        self.num_drafts = (0, 0)
        self.weight_version = self._version_in_steps = 0
        self.detours: Counter[str] = Counter()  # calls, by what kept them from the engine's own loop

    @property
    def model(self) -> PreTrainedModel:
        """The patched model. Raises `RuntimeError` when it no longer exists."""
        return self.bound.model

    @property
    def manager(self) -> BlockManager:
        return self.pool.manager

    @property
    def scheduler(self) -> Scheduler:
        return self.pool.scheduler

    @property
    def kv_cache(self) -> KVCache:
        """The pool tensor, allocated at first use and again when the model has moved to another device or dtype."""
        return self.pool.kv_cache

    def note_detour(self, reason: str) -> None:
        with self.pool.lock:
            self.detours[reason] += 1

    # Where a thread is

    def check_outside(self) -> None:
        """Raises `RuntimeError` if this thread is inside a step, or if the interpreter is ending."""
        PROCESS.check_running()
        self.bound.check_outside()

    @property
    def current_loop(self) -> DecodingLoop | None:
        """The request of this engine whose loop this thread runs."""
        context = call_context()
        return context.loop if context.core is self else None

    @property
    def generator_devices(self) -> list[torch.device]:
        """Where a call may draw."""
        devices = {torch.device("cpu")} | self.bound.devices
        return [device for device in devices if device.type in ("cpu", "cuda")]

    def undisturbed(self) -> AbstractContextManager[None]:
        """Around a forward that no step is: where weights are there only while their module computes, no step runs
        beside it, which may take them away.

        What it is made with (no adapter, for a moment) a step beside it may meet, too.
        """
        if self.pool.is_made and self.scheduler.queues.live:
            with self.pool.lock, suppress(UnsupportedModelError):
                self.look_at_weights()
        _ = self.bound.placement  # as of now
        return self.worker.loop.exclusive() if self.bound.is_offloaded else nullcontext()

    # Tables

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """The pool's lock, with Ctrl-C held back to its end: nothing inside is left half done. Re-entrant.

        It begins with all that was posted.
        """
        with self.pool.lock, deferred_interrupt():
            self.worker.loop.carry_out()
            yield

    def batch_key(self) -> Hashable:
        """The key that all rows of a step have in common: the autocast state of the calling thread."""
        return autocast_state(self.bound.placement[1])

    def weights_key(self) -> WeightsKey:
        """The model's state, part of the prefix-cache key of what begins now. The pool's lock is held."""
        before, key = self.weights_version.state, self.weights_version.key()
        self.adapters.note_base(key[0])
        state, has_new = self.weights_version.state, self.adapters.refresh(self._adapters_in_use())
        is_changed = state != before or has_new
        self.weight_version += is_changed
        if is_changed and self.pool.is_made and self.scheduler.queues.note_state(state):
            logger.warning(
                "hf_paged: the model's weights, adapters or hooks changed while rows of running calls were preempted: "
                "the changed model computes all their tokens again (stock would have kept the old keys and values; "
                'preemption="swap" keeps them, too)'
            )
        return key

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Around what puts weights elsewhere in memory as they are. The step lock is held."""
        with self.pool.lock, self.weights_version.moving():
            yield

    def look_at_weights(self, is_before_step: bool = False) -> None:
        """Around each step: what changed of the model changes for rows that run. The pool's lock is held.

        By default it goes on as stock would: keys and values that are there stay, new tokens are computed as the model
        is now. Tokens of a step belong to the model as it was found before.
        """
        has_moved = self.weights_version.may_have_changed() or self.adapters.have_moved(self._adapters_in_use())
        if self.bound.living_model is not None and has_moved:
            if self.pool.is_made and not self.scheduler.queues.in_flight:
                _ = self.kv_cache  # of a model that has moved: while rows can be computed again
            self.weights_key()
        if is_before_step and self.weight_version != self._version_in_steps:
            self._version_in_steps = self.weight_version
            self._go_on_changed()

    def _go_on_changed(self) -> None:
        """The next step is of a changed model."""
        setting, state, queues = self.config.on_weight_change, self.weights_version.state, self.scheduler.queues
        for run in self.runs:
            run.note_version(self.weight_version, bool(self.executor.in_flight))
        if setting == "recompute":
            self.scheduler.preemption.renew(state)
        if setting == "error":
            begun = [s for group in queues.groups for s in group.sequences if not s.is_of(state) and s.has_begun]
            found = {id(own[0]): own[0] for s in begun if (own := self.executor.consumers.get(s.seq_id)) is not None}
            for run in found.values():
                run.fail(_changed())

    def check_unchanged(self, sequences: Sequence[Any]) -> None:
        """Raises `RuntimeError` if an earlier state of the model began these, and that is to be an error.

        For rows of transformers' own loop, on its caller's thread, which a change may find between two forwards.
        """
        state = self.weights_version.state
        if self.config.on_weight_change == "error" and not all(sequence.is_of(state) for sequence in sequences):
            raise _changed()

    def _adapters_in_use(self) -> set[Adapter]:
        """Of rows that run or wait; none that can't change."""
        if not (self.adapters.may_move and self.pool.is_made):
            return set()
        return {one.adapter for group in self.scheduler.queues.groups for one in group.sequences if one.adapter}

    def adapters_for(self, num_rows: int) -> list[Adapter | None]:
        """What is added to the model for each row of the call that this thread is in. The pool's lock is held.

        Raises:
            ValueError: The call names fewer or more adapters than it has prompts.
        """
        owner, given = call_context().adapters or (None, ())
        if owner is not self:
            return [self.adapters.active()] * num_rows
        if not given or num_rows % len(given):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(given)} and {num_rows} respectively."
            )
        return [adapter for adapter in given for _ in range(num_rows // len(given))]

    def adapters_named(self, names: Sequence[str]) -> tuple[Adapter | None, ...] | None:
        """Those of these names, for rows of their own; `None`: PEFT's own code has to run. Reads files, if need be.

        Raises:
            ValueError: There are none of such names, or they can't be read any more.
        """
        adapters, store = self.adapters, self.adapters.store
        with self.transaction():
            adapters.look(self.model)
            adapters.check(names)
            if not adapters.is_by_row:
                return None
            wanted = [name for name in dict.fromkeys(names) if adapters.is_loaded(name)]
        pinned: dict[str, Pinned] = {}
        try:
            for name in wanted:
                pinned[name] = store.pin(name)  # type: ignore[union-attr]  # beside steps: it may read files
            with self.transaction():
                return tuple(adapters.named(names, pinned, self.model))
        finally:
            for own in pinned.values():
                store.unpin(own)  # type: ignore[union-attr]

    @property
    def num_running(self) -> int:
        with self.transaction():
            return self.scheduler.queues.num_running if self.pool.is_made else 0

    def count_generated(self, num_tokens: int) -> None:
        self.num_generated_tokens += num_tokens

    def stats(self, num_waiting: int) -> EngineStats:
        """Takes a snapshot of the gauges and counters. The pool's lock is held."""
        if not self.pool.is_made:
            num_blocks = self.config.num_blocks or 0
            return EngineStats(num_blocks=num_blocks, num_free_blocks=num_blocks, detours=self.detours.copy())
        manager, blocks, scheduler = self.manager, self.manager.pool, self.scheduler
        self.pool.record_peak()
        return EngineStats(
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free,
            num_running=scheduler.queues.num_running,
            num_waiting=num_waiting,
            num_swapped=scheduler.queues.num_swapped,
            num_preemptions=scheduler.preemption.num_preemptions,
            num_swapped_out=scheduler.preemption.num_swapped_out,
            num_admission_stalls=scheduler.admission.num_stalls,
            num_blocks_allocated=blocks.num_allocated,
            num_cow_copies=manager.num_cow_copies,
            prefix_cache_hit_tokens=manager.prefix.hit_tokens,
            prefix_cache_query_tokens=manager.prefix.query_tokens,
            peak_blocks_in_use=blocks.peak_in_use,
            kv_tokens_stored=manager.num_stored_tokens,
            kv_slots_allocated=manager.num_allocated_slots,
            peak_kv_tokens_stored=self.pool.peak[1],
            peak_kv_slots_allocated=self.pool.peak[2],
            num_states=manager.num_states,
            state_blocks=manager.num_states * manager.state_blocks,
            num_steps=self.executor.num_steps,
            num_replayed_steps=self.runner.graphs.num_replays,
            num_prefill_tokens=self.executor.num_prefill_tokens,
            num_generated_tokens=self.num_generated_tokens + sum(run.num_tokens for run in self.runs),
            num_draft_tokens=self.num_drafts[0] + sum(run.num_drafts for run in self.runs),
            num_accepted_tokens=self.num_drafts[1] + sum(run.num_accepted for run in self.runs),
            detours=self.detours.copy(),
        )

    # Everything at once

    def reset_prefix_cache(self) -> int:
        with self.transaction():
            self.weights_version.forget()
            if not self.pool.is_made:
                return 0
            self.scheduler.queues.note_state(None)
            return self.manager.prefix.reset()

    def release(self) -> None:
        with self.worker.loop.exclusive(), self.transaction():
            self.pool.release()
            if isinstance(self.ranks, Leader):
                self.ranks.release()
            self.weights_version.forget()
            self.runner.graphs.forget()

    def join(self, channel: Channel) -> None:
        """Makes this engine one of several ranks, with pools and swap spaces of equal size."""
        pool = self.pool
        num_blocks = min(channel.gather(pool.num_blocks))
        pool.limit(num_blocks, min(channel.gather(pool.num_swap_blocks(num_blocks))))
        if channel.is_first:
            self.ranks = self.executor.leader = leader = Leader(channel, self.worker.loop.fail_soon)
            self.pool.tell = leader.copies
        else:
            self.ranks = Follower(channel, self.pool, self.bound, self.runner, self.weights_version.key)

    def close(self) -> None:
        """Ends all runs and the worker's thread. A later call starts a new one."""
        loop = self.worker.loop
        with loop.exclusive(), self.transaction():
            loop.fail_all(RuntimeError("the model was unpatched while this call was running"))
            self.worker.pause.end()
        self.worker.stop()


def _changed() -> RuntimeError:
    return RuntimeError(
        "the model's weights, adapters or hooks changed while this request was running, and on_weight_change is "
        '"error": change them between requests, or patch with "continue" or "recompute"'
    )
