"""`StateBlockManager`: block tables of sequences that also have a state, which is that of all their tokens together.

What recurrent and convolution layers keep of a sequence has one size, however long it is, and is written over in each
step. It lies in blocks of its own, out of the same pool, taken with the first token and given back with the last. So it
is shared by a fork, copied before one of its holders changes it, swapped, evicted and counted as any block is.

A state can't go back to fewer tokens. A prefix is found only where a state was kept (`snapshot`): under the hash of the
block that ends there. Keeping it costs nothing at that moment, for a findable state is copied by who goes on behind it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.block_table import BlockTable, ExtraKey
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.prefix_cache import PrefixCache
from hf_paged.core.sequence import Token


class StateBlockManager(BlockManager):
    """Block tables as `BlockManager`'s, each with the blocks of a state.

    Args:
        num_blocks: As the others, see `BlockManager`.
        state_blocks: Blocks of a state, at least 1.
        takes_snapshots: Whether states are kept for prefix hits; without any there are none.
    """

    # A single token is computed by another formula, which transformers keeps for generated ones, and which differs from
    # the one for several where a model bounds its time steps.
    least_chunk = 2

    def __init__(
        self, num_blocks: int, *args: Any, state_blocks: int, takes_snapshots: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(num_blocks, *args, **kwargs)
        if state_blocks < 1:
            raise ValueError(f"state_blocks must be at least 1, got {state_blocks}")
        self.state_blocks = state_blocks
        self.takes_snapshots = self.prefix.is_enabled and takes_snapshots
        self.prefix = StatePrefixCache(self, self.takes_snapshots)

    # Reading

    def resize_states(self, state_blocks: int) -> None:
        """A state takes another number of blocks from now on.

        Raises:
            ValueError: A sequence has one.
        """
        if any(table.state for table in self.by_id.values()) and state_blocks != self.state_blocks:
            raise ValueError("states that are there can't change their size")
        self.state_blocks = state_blocks

    def states(self, seq_ids: Sequence[int]) -> array[int]:
        """The state's blocks of these sequences, one after another: int32, a copy."""
        tables = self.by_id
        blocks = array("i")
        blocks.frombytes(b"".join([tables[seq_id].state for seq_id in seq_ids]))
        return blocks

    @property
    def num_states(self) -> int:
        """States in the pool, a shared one counted once. O(tables)."""
        return len({table.state[0] for table in self.by_id.values() if table.state and not table.is_swapped})

    @property
    def num_allocated_slots(self) -> int:
        """Slots of all blocks that live sequences hold for their tokens. O(tables)."""
        return (self.pool.num_in_use - self.num_states * self.state_blocks) * self.block_size

    def most_blocks(self, num_tokens: int, chunk: int, shared: int = 0) -> int:
        return super().most_blocks(num_tokens, chunk, shared) + self.state_blocks

    # Going back

    def keeps_windows(self, query: int, num_tokens: int) -> bool:
        return num_tokens == 0 or num_tokens >= query  # within a recorded past a sequence is computed again

    def reads(self, table: BlockTable, num_tokens: int) -> bool:
        return num_tokens == table.num_tokens and super().reads(table, num_tokens)

    # Growing

    def blocks_needed(self, seq_id: int, n: int, chunk: int | None = None) -> int:
        return super().blocks_needed(seq_id, n, chunk) + (self._states_needed([seq_id], True) if n else 0)

    def append_need(self, requests: Sequence[tuple[int, int]]) -> int:
        need = super().append_need(requests)
        seq_ids = [seq_id for seq_id, _ in requests]
        return need + self._states_needed(seq_ids, self._keeps_snapshots(need, seq_ids))

    def append(self, requests: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        self._check_append(requests)
        need, seq_ids = super().append_need(requests), [seq_id for seq_id, _ in requests]
        keeps = self._keeps_snapshots(need, seq_ids)
        own = self._states_needed(seq_ids, keeps)
        if need + own > self.pool.num_free:
            raise OutOfBlocksError(need + own, self.pool.num_free)
        copies = self._take_states(seq_ids, own, keeps)
        return copies + super().append(requests)

    def _keeps_snapshots(self, need: int, seq_ids: Sequence[int]) -> bool:
        """Whether there is room to copy states that are kept; if not, their holders go on with them as they are."""
        return need + self._states_needed(seq_ids, True) <= self.pool.num_free

    def _states_needed(self, seq_ids: Sequence[int], keeps_snapshots: bool) -> int:
        """Blocks that states of these sequences take before they change."""
        num_states = 0
        writers: Counter[tuple[bool, int]] = Counter()
        for seq_id in seq_ids:
            table = self.get(seq_id)
            if table.state:
                writers[table.is_swapped, table.state[0]] += 1
            else:
                num_states += 1
        for (is_swapped, block_id), num_writers in writers.items():
            pool = self.swap_pool if is_swapped else self.pool
            assert pool is not None
            # When all holders write, the last of them keeps the state itself, unless it is kept.
            is_kept = keeps_snapshots and pool.block_hash(block_id) is not None
            num_states += num_writers if is_kept else min(num_writers, pool.ref_count(block_id) - 1)
        return num_states * self.state_blocks

    def _take_states(self, seq_ids: Sequence[int], need: int, keeps_snapshots: bool) -> list[tuple[int, int]]:
        """Makes each sequence's state its own to change; returns block copies `(source, destination)`."""
        fresh = iter(self.allocate(need))
        copies: list[tuple[int, int]] = []
        for seq_id in seq_ids:
            table = self.by_id[seq_id]
            if table.borrowed_from is not None:
                self.note_beginning(seq_id, table)
            if not table.state:
                table.state = array("i", [next(fresh) for _ in range(self.state_blocks)])
                self.log.add("allocated", seq_id, table.state.tolist())
                continue
            is_kept = keeps_snapshots and self.pool.block_hash(table.state[0]) is not None
            if is_kept or self.pool.ref_count(table.state[0]) > 1:
                for index, source in enumerate(table.state):
                    table.state[index] = destination = next(fresh)
                    copies.append((source, destination))
                    self.log.add("copied", seq_id, source, destination)
                self.pool.free([source for source, _ in copies[-self.state_blocks :]])
            else:
                for block_id in table.state:
                    self.pool.drop_hash(block_id)
        self.num_cow_copies += len(copies)
        return copies

    # Prefix cache

    def snapshot(self, seq_id: int, num_tokens: int) -> None:
        table = self.get(seq_id)
        position = num_tokens // self.block_size - 1
        if (
            not self.takes_snapshots
            or num_tokens % self.block_size
            or num_tokens != table.num_tokens
            or position >= len(table.block_hashes)
            or table.cache_epoch != self.pool.cache_epoch
            or table.is_swapped
            or not table.state
        ):
            return
        if self.kept_state(table.block_hashes[position]) is None:
            table.own_end = 0
            for index, block_id in enumerate(table.state):
                key = _key(table.block_hashes[position], index)
                left_over = self.pool.lookup(key)  # of one that has lost blocks
                if left_over is not None:
                    self.pool.drop_hash(left_over)
                self.pool.set_hash(block_id, key)

    def kept_state(self, block_hash: bytes) -> list[int] | None:
        """Blocks of the state behind the block of this hash, all of them or none."""
        state: list[int] = []
        for index in range(self.state_blocks):
            block_id = self.pool.lookup(_key(block_hash, index))
            if block_id is None:
                return None
            state.append(block_id)
        return state


class StatePrefixCache(PrefixCache):
    """A `PrefixCache` that finds only what a state is kept behind."""

    def __init__(self, manager: StateBlockManager, is_enabled: bool) -> None:
        super().__init__(manager, is_enabled)
        self._manager = manager

    def match(
        self, seq_id: int, token_ids: Sequence[Token], extra_key: ExtraKey = (), max_tokens: int | None = None
    ) -> int:
        num_tokens = super().match(seq_id, token_ids, extra_key, max_tokens)
        if num_tokens:
            table = self._manager.by_id[seq_id]
            state = self._manager.kept_state(table.block_hashes[num_tokens // self._manager.block_size - 1])
            assert state is not None
            for block_id in state:
                self._manager.pool.incref(block_id)
            table.state = array("i", state)
        return num_tokens

    def _longest_match(self, hashes: Sequence[bytes]) -> int:
        num_blocks = len(hashes)
        while num_blocks:
            kept = (n for n in range(num_blocks, 0, -1) if self._manager.kept_state(hashes[n - 1]) is not None)
            wanted = next(kept, 0)
            num_blocks = super()._longest_match(hashes[:wanted])
            if num_blocks == wanted:
                break
        return num_blocks


def _key(block_hash: bytes, index: int) -> bytes:
    """What a block of the state behind the block of this hash is found by; no block of tokens has such a key."""
    return block_hash + b"state" + index.to_bytes(4)
