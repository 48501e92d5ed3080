"""Block tables: which blocks of the pool hold a sequence's K/V, how they are shared, and when they are copied.

Only the standard library: tables hold block ids and token counts; block copies are returned as data for
`kv_cache.py` to execute. Token `i` of a sequence lies in block `table[i // block_size]` at offset
`i % block_size`.

Blocks are shared by `fork` and by `match_prefix`. A shared block sits at the same position in all its tables and is
only ever read: `append` is the one place where a block that already holds tokens gets ready to be written, so it is
the one place that copies a block others still hold, or takes back the hash of one that was full and has been cropped.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from hf_paged.block_pool import BlockPool

ExtraKey = tuple[Hashable, ...]


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence.

    Attributes:
        blocks: block ids, position order; always just enough of them for `num_tokens`.
        num_tokens: tokens that the sequence has slots for.
        extra_key: what its K/V depends on beside its tokens; None until the first `commit` or `match_prefix`.
        block_hashes: hashes of its leading full blocks, as far as they are committed.
        cache_epoch: the pool's `cache_epoch` when the sequence's first tokens came in.
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    extra_key: ExtraKey | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    cache_epoch: int = 0

    def copy(self) -> BlockTable:
        """A table over the same blocks, independent from here on."""
        return replace(self, blocks=self.blocks.copy(), block_hashes=self.block_hashes.copy())


class BlockManager:
    """Block tables of all sequences over one pool. Sequences are known by ids of the caller's choice.

    Every method that takes a `seq_id` raises `ValueError` for one that it doesn't know. Not thread-safe: one owner.

    Args:
        num_blocks: size of the pool, in blocks.
        block_size: slots (tokens) a block.
        enable_prefix_caching: when False, `commit` and `match_prefix` do nothing and return 0.

    Attributes:
        pool: the `BlockPool`, with its counters.
        num_cow_copies: block copies that `append` has asked for.
        prefix_query_tokens, prefix_hit_tokens: tokens given to `match_prefix`, and found by it.

    Raises:
        ValueError: `num_blocks` or `block_size` is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_cow_copies = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._tables: dict[int, BlockTable] = {}

    # Reading

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def sequences(self) -> list[int]:
        """Ids of the live sequences, oldest first."""
        return list(self._tables)

    def num_tokens(self, seq_id: int) -> int:
        """Tokens that the sequence has slots for."""
        return self._table(seq_id).num_tokens

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's block ids. This is the live list, not a copy: read it, never change it."""
        return self._table(seq_id).blocks

    @property
    def num_stored_tokens(self) -> int:
        """Distinct slots that hold a token of a live sequence, a shared block counted once. O(blocks in tables)."""
        fill: dict[int, int] = {}
        for table in self._tables.values():
            for start, block_id in zip(range(0, table.num_tokens, self.block_size), table.blocks, strict=True):
                fill[block_id] = max(fill.get(block_id, 0), min(self.block_size, table.num_tokens - start))
        return sum(fill.values())

    @property
    def num_allocated_slots(self) -> int:
        """Slots of all blocks that live sequences hold."""
        return self.pool.num_in_use * self.block_size

    # A sequence's life

    def add(self, seq_id: int) -> None:
        """Begins a sequence with an empty table. Raises `ValueError` if the id is taken."""
        self._check_new(seq_id)
        self._tables[seq_id] = BlockTable()

    def fork(self, parent_id: int, child_id: int) -> None:
        """Begins a sequence that shares all of the parent's blocks. Takes no block and copies no data.

        Raises:
            ValueError: the parent is unknown, or the child's id is taken.
        """
        parent = self._table(parent_id)
        self._check_new(child_id)
        for block_id in parent.blocks:
            self.pool.incref(block_id)
        self._tables[child_id] = parent.copy()

    def free(self, seq_id: int) -> None:
        """Ends a sequence. Its hashed blocks stay findable until the pool needs them."""
        table = self._table(seq_id)
        del self._tables[seq_id]
        self.pool.free(table.blocks)

    def crop(self, seq_id: int, num_tokens: int) -> None:
        """Cuts a sequence to its first `num_tokens` tokens and releases the blocks past them. Touches no data.

        Raises:
            ValueError: `num_tokens` is negative, or above what the sequence has.
        """
        table = self._table(seq_id)
        if not 0 <= num_tokens <= table.num_tokens:
            raise ValueError(f"cannot crop sequence {seq_id} of {table.num_tokens} tokens to {num_tokens}")
        num_blocks = -(-num_tokens // self.block_size)
        released = table.blocks[num_blocks:]
        del table.blocks[num_blocks:]
        # A last block that is now partial keeps its own hash: its content stays valid until append() writes into it.
        del table.block_hashes[num_tokens // self.block_size :]
        table.num_tokens = num_tokens
        self.pool.free(released)

    # Growing

    def blocks_needed(self, seq_id: int, n: int) -> int:
        """Blocks that appending `n` tokens to this sequence alone would take, a copy of its last block included.

        Raises:
            ValueError: `n` is negative.
        """
        table = self._table(seq_id)
        if n < 0:
            raise ValueError(f"cannot append {n} tokens to sequence {seq_id}")
        if n == 0:
            return 0
        copies = self._has_partial_block(table) and self.pool.ref_count(table.blocks[-1]) > 1
        return self._new_blocks(table, n) + copies

    def append(self, requests: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Grows every `(seq_id, n)` by `n` tokens, all of them or none.

        Afterwards the slots of the new tokens belong to their sequence alone and may be written, once the returned
        copies are done.

        Returns:
            Block copies `(source, destination)` to execute before any of the new slots is written. No block is the
            source of one copy and the destination of another.

        Raises:
            ValueError: an `n` is below 1, or a sequence is listed twice; nothing has changed.
            OutOfBlocksError: the pool cannot serve the whole list; nothing has changed.
        """
        needed = 0
        listed: set[int] = set()
        writers: Counter[int] = Counter()  # partial block -> how many of its holders are about to write into it
        for seq_id, n in requests:
            table = self._table(seq_id)
            if n < 1:
                raise ValueError(f"cannot append {n} tokens to sequence {seq_id}")
            if seq_id in listed:
                raise ValueError(f"sequence {seq_id} is listed twice in one append")
            listed.add(seq_id)
            needed += self._new_blocks(table, n)
            if self._has_partial_block(table):
                writers[table.blocks[-1]] += 1
        for block_id, num_writers in writers.items():
            # Every writer takes a copy, but when all holders write, the last of them keeps the block itself.
            needed += min(num_writers, self.pool.ref_count(block_id) - 1)

        fresh = iter(self.pool.allocate(needed))
        copies: list[tuple[int, int]] = []
        for seq_id, n in requests:
            table = self._tables[seq_id]
            if table.num_tokens == 0:
                table.cache_epoch = self.pool.cache_epoch
            elif self._has_partial_block(table):
                last = table.blocks[-1]
                if self.pool.ref_count(last) > 1:
                    table.blocks[-1] = next(fresh)
                    copies.append((last, table.blocks[-1]))
                    self.pool.decref(last)
                else:
                    self.pool.drop_hash(last)
            table.blocks.extend(next(fresh) for _ in range(self._new_blocks(table, n)))
            table.num_tokens += n
        self.num_cow_copies += len(copies)
        return copies

    # Prefix cache

    def commit(self, seq_id: int, token_ids: Sequence[int], extra_key: ExtraKey = ()) -> int:
        """Makes the sequence's full blocks findable by their content, as far as their K/V is written.

        Costs time for the blocks that became full since the last call, however long the sequence is. A sequence that
        holds K/V from before a `reset_prefix_cache` is never cached.

        Args:
            token_ids: the sequence's tokens from its first on, up to the last one whose K/V is written.
            extra_key: what the K/V depends on beside the tokens (adapter, cache salt, weights epoch, position offset):
                values whose `repr` tells them apart. Fixed for the sequence's life.

        Returns:
            How many blocks were registered; a block whose content is cached in another block is not.

        Raises:
            ValueError: more tokens than the sequence has, or another `extra_key` than before.
        """
        table = self._table(seq_id)
        if len(token_ids) > table.num_tokens:
            raise ValueError(f"cannot commit {len(token_ids)} tokens of sequence {seq_id}, it has {table.num_tokens}")
        if not self.enable_prefix_caching:
            return 0
        self._set_extra_key(seq_id, table, extra_key)
        if table.cache_epoch != self.pool.cache_epoch:
            return 0
        registered = 0
        for position in range(len(table.block_hashes), len(token_ids) // self.block_size):
            block_hash = self._next_hash(table.block_hashes, token_ids, extra_key)
            registered += self.pool.set_hash(table.blocks[position], block_hash)
            table.block_hashes.append(block_hash)
        return registered

    def match_prefix(
        self, seq_id: int, token_ids: Sequence[int], extra_key: ExtraKey = (), max_tokens: int | None = None
    ) -> int:
        """Gives an empty sequence the longest cached run of full blocks that its prompt begins with.

        The last token is never covered: it has to be computed to yield logits.

        Args:
            token_ids: the prompt.
            extra_key: as in `commit`.
            max_tokens: cover no more tokens than this.

        Returns:
            Tokens matched, a multiple of the block size; the sequence's `num_tokens` afterwards.

        Raises:
            ValueError: the sequence is not empty, `max_tokens` is negative, or another `extra_key` than before.
        """
        table = self._table(seq_id)
        if table.num_tokens > 0:
            raise ValueError(f"sequence {seq_id} has {table.num_tokens} tokens; only an empty one can match a prefix")
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens must not be negative, got {max_tokens}")
        if not self.enable_prefix_caching:
            return 0
        self._set_extra_key(seq_id, table, extra_key)
        limit = len(token_ids) - 1 if max_tokens is None else min(max_tokens, len(token_ids) - 1)
        blocks: list[int] = []
        hashes: list[bytes] = []
        for _ in range(limit // self.block_size):
            block_hash = self._next_hash(hashes, token_ids, extra_key)
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
            hashes.append(block_hash)
        for block_id in blocks:
            self.pool.incref(block_id)
        table.blocks.extend(blocks)
        table.block_hashes.extend(hashes)
        table.num_tokens = len(table.blocks) * self.block_size
        table.cache_epoch = self.pool.cache_epoch
        self.prefix_query_tokens += len(token_ids)
        self.prefix_hit_tokens += table.num_tokens
        return table.num_tokens

    def reset_prefix_cache(self) -> int:
        """Forgets all cached content, for when K/V of the same tokens would come out different from now on.

        Live sequences keep their blocks and run on, but nothing of theirs is cached any more.

        Returns:
            How many blocks were findable.
        """
        return self.pool.reset_prefix_cache()

    # Invariants

    def check_invariants(self) -> None:
        """Asserts that tables and pool agree. O(num_blocks + blocks in tables).

        Raises:
            AssertionError: they do not; the message says where.
        """
        self.pool.check()
        holders: Counter[int] = Counter()
        positions: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            where = f"sequence {seq_id}"
            assert len(table.blocks) == -(-table.num_tokens // self.block_size), (
                f"{where}: {len(table.blocks)} blocks of {self.block_size} for {table.num_tokens} tokens"
            )
            assert len(set(table.blocks)) == len(table.blocks), f"{where}: holds a block twice: {table.blocks}"
            assert len(table.block_hashes) <= table.num_tokens // self.block_size, f"{where}: hash of a partial block"
            holders.update(table.blocks)
            for position, block_id in enumerate(table.blocks):
                assert positions.setdefault(block_id, position) == position, (
                    f"{where}: block {block_id} is at position {position}, elsewhere at {positions[block_id]}"
                )
            for block_id, expected in zip(table.blocks, table.block_hashes, strict=False):
                assert self.pool.block_hash(block_id) in (None, expected), f"{where}: block {block_id}: foreign hash"
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == holders[block_id], (
                f"block {block_id}: ref count {self.pool.ref_count(block_id)}, held by {holders[block_id]} tables"
            )
        assert self.num_stored_tokens <= self.num_allocated_slots, "more tokens stored than slots allocated"

    # Helpers

    def _table(self, seq_id: int) -> BlockTable:
        table = self._tables.get(seq_id)
        if table is None:
            raise ValueError(f"unknown sequence {seq_id}")
        return table

    def _check_new(self, seq_id: int) -> None:
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} exists already")

    def _has_partial_block(self, table: BlockTable) -> bool:
        return table.num_tokens % self.block_size != 0

    def _new_blocks(self, table: BlockTable, n: int) -> int:
        """Blocks to add to the table so that `n` more tokens fit."""
        return -(-(table.num_tokens + n) // self.block_size) - len(table.blocks)

    def _set_extra_key(self, seq_id: int, table: BlockTable, extra_key: ExtraKey) -> None:
        if table.extra_key is None:
            table.extra_key = extra_key
        elif table.extra_key != extra_key:
            raise ValueError(f"sequence {seq_id} has the extra key {table.extra_key!r}, not {extra_key!r}")

    def _next_hash(self, chain: Sequence[bytes], token_ids: Sequence[int], extra_key: ExtraKey) -> bytes:
        """Hash of the block behind `chain`: of its parent's hash (the root's: of the extra key) and its tokens.

        It stands for the whole prefix, so it decides alone on a hit: hence a cryptographic hash.
        """
        start = len(chain) * self.block_size
        parent = chain[-1] if chain else hashlib.sha256(repr(extra_key).encode()).digest()
        return hashlib.sha256(parent + array("q", token_ids[start : start + self.block_size]).tobytes()).digest()
