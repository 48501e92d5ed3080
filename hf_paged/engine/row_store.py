"""`RowStore`: makes, forks, crops, frees, writes and reads the rows of a `PagedCache`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import numpy as np
from torch import Tensor

from hf_paged.attention.cache import PagedCache
from hf_paged.core.block_table import GONE
from hf_paged.core.interrupts import deferred_interrupt
from hf_paged.core.sequence import Sequence
from hf_paged.engine.core import EngineCore
from hf_paged.engine.decoding_loop import DecodingLoop
from hf_paged.engine.kv_pool import KV_DTYPES
from hf_paged.engine.remote_rows import ModelLayers, unsupported_on_ranks
from hf_paged.engine.residency import Residency
from hf_paged.kernels import reference
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.streams import among_steps, hand_out


class RowStore(ModelLayers):
    """Rows in one engine's pool, for `PagedCache` (`cache.SequenceStore`)."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core.traits)
        self._core = core
        self._pool = core.pool
        self.residency = Residency(core)

    def transaction(self) -> AbstractContextManager[None]:
        return self._core.transaction()

    def post(self, change: Callable[[], None]) -> None:
        self._core.post(change)

    # Rows

    def new_sequence(self) -> Sequence:
        """An empty sequence in a group of its own. The pool's lock is held, as in the next two."""
        loop, scheduler = self._core.current_loop, self._core.scheduler
        if loop is None:
            return scheduler.new_sequence()
        group = scheduler.new_group(loop.priority, request_id=loop.request_id, max_tokens=loop.max_tokens)
        return scheduler.new_sequence(group)

    def fork_sequence(self, sequence: Sequence, apart: bool = False) -> Sequence:
        """Makes a sequence equal to this one that shares all its blocks; `apart`: it is scheduled and preempted by
        itself.
        """
        scheduler, group = self._core.scheduler, sequence.group
        is_apart = apart and group.status != "swapped"
        return scheduler.fork(sequence, scheduler.new_group(max_tokens=group.max_tokens) if is_apart else None)

    def free_sequences(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._core.worker.loop.remove(sequence)
            self._core.scheduler.free(sequence)

    def abandon_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Called by the garbage collector, on any thread at any moment: only enqueues, takes no lock."""
        self._core.post(partial(self.free_sequences, sequences))

    def can_crop(self, start: int, end: int) -> bool:
        """Whether a sequence of `start` tokens surely has what lies behind its first `end` ones. Takes no lock."""
        return self._core.manager.keeps_windows(start, end)

    def crop_sequence(self, sequence: Sequence, num_tokens: int) -> None:
        """Cuts a sequence to so many of its first tokens. The pool's lock is held, as in the next.

        Raises:
            RuntimeError: It began with what the prefix cache had of it, the rest was given back, and it can't be
                computed again.
        """
        if not self._core.scheduler.can_crop(sequence, num_tokens):
            raise RuntimeError(
                f"a row can't be cropped to {num_tokens} tokens: layers with a sliding window never held what it would "
                "need, and it can't be computed again; reset() the cache"
            )
        self._core.scheduler.crop(sequence, num_tokens)

    def keep_past(self, sequence: Sequence) -> None:
        """Has layers with a window keep the tokens before it, until the next crop."""
        self._core.manager.keep_past(sequence.seq_id)

    @contextmanager
    def held(self, cache: PagedCache, loop: DecodingLoop | None = None) -> Iterator[None]:
        """Lasts as long as a call over a cache: a single forward, or a `loop`, with which prompts begin anew.

        The rows of a cache that is kept are idle afterwards; if they were idle before, they come last.
        """
        if any(s.group.is_idle and s.num_uncomputed_tokens for s in _live(cache)):
            with self._core.transaction():  # what was dropped is still of the model that it was computed with
                self._core.weights_key()
        self._core.post(partial(self._begin, _live(cache), loop))
        try:
            yield
        finally:
            if not cache.owned_by_call:
                self._core.post(partial(self._end, _live(cache)))

    def _begin(self, sequences: list[Sequence], loop: DecodingLoop | None) -> None:
        for group in {sequence.group.arrival: sequence.group for sequence in sequences}.values():
            if group.is_idle:
                group.max_tokens = 0 if loop is None else loop.max_tokens
                self._core.scheduler.queues.renew(group)
            group.is_idle = False
            group.request_id = None if loop is None else loop.request_id
        if loop is not None:
            for sequence in sequences:
                sequence.num_prompt_tokens = 0

    def _end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.group.is_idle, sequence.group.request_id = True, None

    @deferred_interrupt()
    def read_tokens(
        self, layer: int, sequences: list[Sequence | None], padding: list[int], width: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as `[B, num_kv_heads, width, head_dim]`.

        Zeros in the padding, for `None`, and where a layer with a window has given tokens back.
        """
        if self._core.ranks is not None:
            raise unsupported_on_ranks("reading the keys and values of a PagedCache")
        held = [sequence for sequence in sequences if sequence is not None]
        with among_steps(self._pool.kv_device), self.residency.holding(held), self.transaction():
            group = self._group(layer)
            null_slot = self._pool.kv_cache.null_block * self._core.config.block_size
            slots = np.full((len(sequences), width), null_slot, dtype=np.int64)
            for row, (sequence, pad) in enumerate(zip(sequences, padding, strict=True)):
                if sequence is not None:
                    slots[row, pad:] = self._slots(sequence, group, np.arange(width - pad))
            kv_cache, index, key_dim = self._pool.flush_copies().kv_cache.at(layer)
            key, value = reference.gather_slots(kv_cache, index, to_device(slots, kv_cache.device), key_dim)
            if kv_cache.dtype in KV_DTYPES.values():
                dtype = self._core.model.dtype
                key, value = key.to(dtype), value.to(dtype)
        hand_out((key, value))
        return key, value

    def _group(self, layer: int) -> int:
        if not self.stores(layer):
            raise ValueError(f"layer {layer} stores no keys and values of its own")
        return self._pool.kv_cache.groups.places[layer][0]

    def _slots(self, sequence: Sequence, group: int, token_index: np.ndarray) -> np.ndarray:
        groups = self._pool.kv_cache.groups
        number = group - len(groups.own_windows)
        if number < 0:
            table = np.array(self._core.manager.blocks(sequence.seq_id, group), dtype=np.int64)
        else:  # of what an encoder has read
            table = np.array(self._core.manager.get(sequence.seq_id).state, dtype=np.int64)
            table = table.reshape(groups.num_cross, -1)[number]
        table[table == GONE] = self._pool.kv_cache.null_block
        block_size = self._core.config.block_size
        return table[token_index // block_size] * block_size + token_index % block_size


def _live(cache: PagedCache) -> list[Sequence]:
    return [sequence for sequence in cache.sequences if sequence is not None]
