"""`KVPool`: the block tables and the tensor behind them, made and sized at first use."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from hf_paged.attention.lazy import lazy
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.attention.spread_attention import SpreadAttention
from hf_paged.core.batch import BlockMoves, Copy
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.core.config import DEFAULT_SWAP_SPACE_GIB, SWAP_FRACTION, PagedConfig, default_memory_fraction
from hf_paged.core.errors import OutOfBlocksError, UnsupportedModelError
from hf_paged.core.event_log import EventLog
from hf_paged.core.policy import policy_of
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import SequenceGroup
from hf_paged.core.source_blocks import SourceBlockManager
from hf_paged.core.state_blocks import StateBlockManager
from hf_paged.engine.openmp import warn_of_quota
from hf_paged.engine.preemption import PreemptionCost
from hf_paged.memory.kv_cache import KVCache, KVGeometry, check_size, free_memory, num_blocks_for_memory
from hf_paged.memory.spread_cache import SpreadKVCache, shares
from hf_paged.memory.state_cache import StateLayout
from hf_paged.memory.streams import among_steps, on_steps_stream
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.placement import why_not_on
from hf_paged.model.step_memory import StepMemory

COPIES = [field.name for field in fields(BlockMoves)]
KV_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class KVPool:
    """Everything that holds keys and values for one model, behind one lock.

    Attributes:
        lock: Re-entrant; held by any code that changes tables or the tensor.
        is_made: Whether there are tables.
        is_serving: Whether the process is there to serve its model: then a pool that is not sized yet, and whose
            config leaves its share open, takes most of the free memory of a GPU.
        peak: Blocks in use when they were most, and the tokens stored and slots allocated at that moment.
    """

    def __init__(self, config: PagedConfig, model: BoundModel, memory: StepMemory) -> None:
        """Makes an empty pool; no memory is taken yet. The tensor follows the model's dtype and device."""
        self.config = config
        self._memory = memory
        self._model = model
        self.groups = CacheGroups.of(model.traits.stored_in(KV_DTYPES.get(config.kv_cache_dtype)))
        self.lock = threading.RLock()
        self.peak = (0, 0, 0)
        self.cost = PreemptionCost()
        self.log = EventLog(now=time.time)
        self._pending: deque[Copy] = deque()
        self.tell: Callable[[list[Copy]], None] | None = None  # told of copies before they are made
        self._num_blocks: int | None = None
        self._num_swap_blocks: int | None = None
        self.is_made = self.is_serving = False
        self._made: tuple[BlockManager, Scheduler] | None = None
        self._attention: PoolAttention | None = None

    @property
    def num_blocks(self) -> int:
        with self.lock:
            if self._num_blocks is None:
                self._num_blocks = self._find_size()
            return self._num_blocks

    def _find_size(self) -> int:
        """As it was set, or from the memory that is free now; runs a trial step where that takes memory (on a GPU).

        Raises:
            ValueError: The blocks asked for are more than there is memory.
        """
        config, model, layout, num_groups = self.config, self._model, self.state_layout, len(self.groups.windows)
        device, block_size, num_blocks = model.placement[1], config.block_size, config.num_blocks
        parts = shares(self.geometry, self.groups, model.layer_devices, device)
        if num_blocks is None:
            share = config.memory_fraction or default_memory_fraction(device.type, self.is_serving)
            with among_steps(device):  # a trial step, whose memory is then theirs
                num_tokens = min(config.max_num_batched_tokens, model.max_context)
                reserved = self._memory.reserved_bytes(num_tokens, block_size, num_groups)
                # Of states one that a sequence goes on with, and one that is kept.
                state_tokens = 0 if layout is None else 2 * layout.num_pages * block_size
                most = config.max_num_seqs * (model.max_context * num_groups + state_tokens)
                num_blocks = min(
                    num_blocks_for_memory(
                        part.geometry,
                        block_size,
                        share,
                        most,
                        part.device,
                        part.geometry.bytes_per_block(block_size) + reserved,
                    )
                    for part in parts
                )
        for part in parts:
            check_size(part.geometry, num_blocks, block_size, part.device)
        return num_blocks

    def limit(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Limits its size, before its first use, to so many blocks, and gives its swap space so many."""
        self._num_blocks, self._num_swap_blocks = min(num_blocks, self.num_blocks), num_swap_blocks

    @property
    def kv_device(self) -> torch.device:
        """Where its tensor is, or (before the first use) will be; asked for in every step."""
        return self._model.placement[1] if self._attention is None else self._attention.kv_cache.device

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys and values of `block_size` tokens in the layers of a group."""
        return self.geometry.bytes_per_block(self.config.block_size)

    @property
    def geometry(self) -> KVGeometry:
        dtype = KV_DTYPES.get(self.config.kv_cache_dtype, self._model.placement[0])
        return self._model.traits.geometry(self.groups, dtype, self.config.block_size)

    @lazy
    def manager(self) -> BlockManager:
        return self._make()[0]

    @lazy
    def scheduler(self) -> Scheduler:
        return self._make()[1]

    def _make(self) -> tuple[BlockManager, Scheduler]:
        with self.lock:
            if self._made is None:
                config, num_blocks = self.config, self.num_blocks
                swap_blocks, layout = self.num_swap_blocks(num_blocks), self.state_layout
                manager: BlockManager
                size: tuple[Any, ...] = num_blocks, config.block_size, config.enable_prefix_caching, swap_blocks
                size = *size, self.log, self.groups.own_windows
                if self.groups.num_cross:
                    manager = SourceBlockManager(*size, num_cross=self.groups.num_cross)
                elif layout is None:
                    manager = BlockManager(*size)
                else:
                    manager = StateBlockManager(
                        *size,
                        state_blocks=layout.num_pages,
                        takes_snapshots=self._model.traits.carries_state,
                    )
                limits = config.max_num_batched_tokens, config.max_num_seqs
                scheduler = Scheduler(manager, *limits, self._prefers_swap, policy_of(config.policy))
                scheduler.queues.on_change = config.on_weight_change
                self._made = manager, scheduler
                self.is_made = True  # last: other threads look without the lock
            return self._made

    @property
    def state_layout(self) -> StateLayout | None:
        """Where the layers' states are in a sequence's blocks; `None`: they have none."""
        states = self._model.traits.states
        return StateLayout.of(states, self.bytes_per_block, self._model.placement[0]) if states else None

    def num_swap_blocks(self, num_blocks: int) -> int:
        """Blocks of the swap space beside a pool of so many, by what memory is free."""
        if self._num_swap_blocks is not None:
            return self._num_swap_blocks
        space = self.config.swap_space_gib
        if space is None:
            free = SWAP_FRACTION * free_memory(torch.device("cpu")) / 2**30
            space = 0.0 if self.config.preemption == "recompute" else min(DEFAULT_SWAP_SPACE_GIB, free)
        return min(num_blocks, int(space * 2**30) // self.bytes_per_block)

    def _prefers_swap(self, group: SequenceGroup) -> bool:
        if self.config.preemption != "auto":
            return self.config.preemption == "swap"
        num_tokens = max((sequence.num_computed_tokens for sequence in group.sequences), default=0)
        num_blocks = self.manager.swap.need([sequence.seq_id for sequence in group.sequences])
        return self.cost.prefers_swap(num_tokens, num_blocks)

    def execute_moves(
        self,
        moves: BlockMoves,
        attention: PoolAttention | None = None,
        tell: Callable[[list[Copy]], None] | None = None,
    ) -> None:
        """Swaps, copies and clears blocks before a step.

        Args:
            attention: What it is to run over, if that is known.
            tell: Told of it before, in place of the pool's own `tell`; also where there is nothing to be done.
        """
        attention = attention or self.attention
        self._pending += [(name, blocks) for name in COPIES if (blocks := getattr(moves, name))]
        if self._pending or tell is not None:
            self.flush_copies(attention, tell)
        for num_blocks, seconds in attention.kv_cache.finished_swaps():
            self.cost.note_swap(num_blocks, seconds)

    def execute(self, copies: list[Copy]) -> PoolAttention:
        """Makes these copies behind those that wait; returns what a step is to run over."""
        self._pending += [copy for copy in copies if copy[1]]
        return self.flush_copies()

    def flush_copies(
        self, attention: PoolAttention | None = None, tell: Callable[[list[Copy]], None] | None = None
    ) -> PoolAttention:
        """Carries out what the block tables say has been copied, before anything reads it. The step lock is held.

        What raises (out of memory, say) stays to be done: the tables name the new places already.
        """
        attention = attention or self.attention
        if tell is not None:
            tell(list(self._pending))
        elif self.tell is not None and self._pending:
            self.tell(list(self._pending))
        if self._pending:
            with on_steps_stream(attention.kv_cache.device):
                while self._pending:
                    self._copy(attention, *self._pending[0])
                    self._pending.popleft()
        return attention

    def _copy(self, attention: PoolAttention, name: str, blocks: Any) -> None:
        if name == "swap_outs":
            assert self.manager.swap_pool is not None
            attention.kv_cache.swap_out(blocks, self.manager.swap_pool.num_blocks)
        elif name == "swap_ins":
            attention.kv_cache.swap_in(blocks)
        elif name == "block_copies":
            attention.copy_blocks(blocks)
        else:
            attention.zero_blocks(blocks)

    @property
    def kv_cache(self) -> KVCache:
        return self.attention.kv_cache

    @property
    def attention(self) -> PoolAttention:
        """The pool tensor and its backends: made at first use, and again when the model has moved to another device or
        dtype.
        """
        dtype, device = self._model.placement
        layers = self._model.layer_devices
        held = self._attention
        if (
            held is not None
            and held.kv_cache.compute_dtype is dtype
            and held.kv_cache.device == device
            and held.kv_cache.layer_devices == layers
        ):
            return held
        with self.lock:
            if self._attention is not held:
                return self.attention  # another thread was faster
            for each in self._model.devices:
                if (reason := why_not_on(each)) is not None:
                    raise UnsupportedModelError(type(self._model.model).__name__, (reason,))
            if device.type == "cpu":
                warn_of_quota(torch.get_num_threads())
            self.release()
            geometry, layout = self.geometry, self.state_layout
            manager = self.manager
            num_blocks = manager.pool.num_blocks
            if isinstance(manager, StateBlockManager) and layout is not None:
                manager.resize_states(layout.num_pages)
            with on_steps_stream(device):
                size, backend = (num_blocks, self.config.block_size), self.config.attention_backend
                if layers is None:
                    kv_cache = KVCache(geometry, *size, device, dtype, self.groups, layout)
                    self._attention = PoolAttention(kv_cache, backend)
                else:
                    spread = SpreadKVCache(geometry, *size, device, dtype, self.groups, layers)
                    self._attention = SpreadAttention(spread, backend)
            return self._attention

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence alone holds at most while it grows to so many tokens."""
        return self.manager.most_blocks(num_tokens, self.config.max_num_batched_tokens)

    def most_tokens(self, most: int, source_tokens: int = 0) -> int:
        """Tokens, up to `most`, of the longest sequence that fits the empty pool; `most` while its size is unknown."""
        if not self.is_made and self.config.num_blocks is None:
            return most
        left = self.manager.pool.num_blocks - self.manager.source_blocks(source_tokens)
        return bisect_right(range(1, most + 1), left, key=self.blocks_for)

    def check_fits(self, num_tokens: int, prompt_tokens: int, new_tokens: int, source_tokens: int = 0) -> None:
        """Refuses a sequence that could never fit the empty pool.

        Args:
            num_tokens: Tokens whose keys and values it would hold at its longest.
            source_tokens: Those of what an encoder has read for it.

        Raises:
            ValueError: With both sizes, and the setting that would help.
        """
        manager, needed = self.manager, self.blocks_for(num_tokens) + self.manager.source_blocks(source_tokens)
        if needed > manager.pool.num_blocks:
            source = f" behind a source of {source_tokens}" if source_tokens else ""
            raise ValueError(
                f"a prompt of {prompt_tokens} tokens{source} and up to {new_tokens} new ones needs "
                f"{needed} KV blocks of {manager.block_size} tokens, the pool has {manager.pool.num_blocks}: "
                f"patch with num_blocks={needed} or more, or lower max_new_tokens"
            )

    def release(self) -> None:
        """Gives the pool's memory back until the next use. Live caches are computed again when they are next used.

        Raises:
            ValueError: A live `PagedCache` holds tokens that can't be computed again (of hidden states, odd masks).
        """
        with self.lock:
            if not self.is_made or self._attention is None:
                return
            lost = self.scheduler.preemption.preempt_all()
            if lost:
                raise ValueError(
                    f"{lost} sequence(s) of running requests or live PagedCache objects can't be computed again from "
                    "token ids: wait for the requests, and reset() or drop the caches first"
                )
            self.manager.prefix.reset()
            self.drop()

    def drop(self) -> None:
        """Gives the tensor back, without regard for what is in it."""
        with self.lock:
            self._pending.clear()
            self._attention = None

    def record_peak(self) -> None:
        manager = self.manager
        num_in_use = manager.pool.num_blocks - manager.pool.num_free
        # Tables are only walked when a step took more blocks than any before.
        if num_in_use > self.peak[0]:
            self.peak = (num_in_use, manager.num_stored_tokens, manager.num_allocated_slots)

    def out_of_blocks(self, error: OutOfBlocksError) -> OutOfBlocksError:
        """Returns the same error with what the caller can do about it."""
        num_blocks = self.manager.pool.num_blocks
        needed, free = error.needed, error.free
        if needed > num_blocks:
            message = (
                f"{needed} KV blocks are needed at once, the pool has {num_blocks}: patch with num_blocks={needed} or "
                "more, or give fewer rows a call (rows that keep their padding, and those of a model with attention "
                "code of its own, are all in the pool together)"
            )
        else:
            message = (
                f"{needed} KV blocks are needed, {free} of {num_blocks} are free and what holds the others can't be "
                "computed again: drop or reset() PagedCache objects you no longer need, or patch with more num_blocks"
            )
        return OutOfBlocksError(needed, free, message)
