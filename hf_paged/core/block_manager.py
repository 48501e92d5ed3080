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
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from hf_paged.core.block_pool import BlockPool
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.event_log import EventLog

ExtraKey = tuple[Hashable, ...]

assert array("i").itemsize == 4, (
    "block tables are int32"
)  # the standard allows another size, no platform of ours has it

PREFIX_CACHE = -1  # as `BlockTable.borrowed_from`
NO_EPOCH = -1  # as `BlockTable.cache_epoch`


class Offer(NamedTuple):
    """A block that a sequence has filled, and the hash of what it should hold."""

    seq_id: int
    position: int
    block_id: int
    block_hash: bytes


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence.

    Attributes:
        blocks: block ids (int32), position order; always just enough of them for `num_tokens`.
        num_tokens: tokens that the sequence has slots for.
        extra_key: what its K/V depends on beside its tokens; None until the first `commit` or `match_prefix`.
        block_hashes: hashes of its leading full blocks, as far as they were asked for.
        num_committed: how many of them its blocks were registered under, or offered to be.
        cache_epoch: the pool's `cache_epoch` when the sequence's first tokens came in; `NO_EPOCH`: its blocks don't
            hold what their hashes say.
        matched: tokens asked for and found by the `match_prefix` it began with.
        is_swapped: the blocks are those of the CPU pool.
        borrowed_from: where an empty sequence got what it begins with: a sequence's id, or `PREFIX_CACHE`; None once
            the log says so. Until it grows the beginning may be taken back, as if nothing had been.
    """

    blocks: array[int] = field(default_factory=lambda: array("i"))
    num_tokens: int = 0
    extra_key: ExtraKey | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    cache_epoch: int = 0
    matched: tuple[int, int] = (0, 0)
    is_swapped: bool = False
    borrowed_from: int | None = None

    def carries(self, offer: Offer) -> bool:
        """Whether it still goes by that very hash: cut and grown again it has another one, equal or not."""
        hashes = self.block_hashes
        return offer.position < len(hashes) and hashes[offer.position] is offer.block_hash

    def copy(self) -> BlockTable:
        """A table over the same blocks, independent from here on."""
        return replace(
            self, blocks=self.blocks[:], block_hashes=self.block_hashes.copy(), matched=(0, 0), borrowed_from=None
        )


class BlockManager:
    """Block tables of all sequences over one pool. Sequences are known by ids of the caller's choice.

    Every method that takes a `seq_id` raises `ValueError` for one that it doesn't know. Not thread-safe: one owner.

    Args:
        num_blocks: size of the pool, in blocks.
        block_size: slots (tokens) a block.
        enable_prefix_caching: when False, `commit` and `match_prefix` do nothing and return 0.
        num_swap_blocks: size of the CPU pool that swapped sequences go to.
        log: is told of every block that is taken, shared or given back; by default one of the manager's own.

    Attributes:
        pool: the `BlockPool`, with its counters.
        swap_pool: the blocks in CPU memory; `None` without swap space.
        log: the `EventLog`.
        num_cow_copies: block copies that `append` has asked for.
        prefix_query_tokens, prefix_hit_tokens: tokens given to `match_prefix`, and found by it.

    Raises:
        ValueError: `num_blocks` or `block_size` is below 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        log: EventLog | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.swap_pool = BlockPool(num_swap_blocks) if num_swap_blocks else None
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.log = log if log is not None else EventLog()
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
        """The sequence's block ids, as they are now."""
        return self._table(seq_id).blocks.tolist()

    def blocks(self, seq_id: int) -> array[int]:
        """The same as int32 numbers, and live: read them at once, keep no view (a table that is viewed can't grow)."""
        return self._table(seq_id).blocks

    def tables(self, seq_ids: Iterable[int]) -> list[array[int]]:
        """`blocks` of several sequences."""
        return [self._tables[seq_id].blocks for seq_id in seq_ids]

    @property
    def num_stored_tokens(self) -> int:
        """Distinct slots that hold a token of a live sequence, a shared block counted once. O(tables)."""
        fill: dict[int, int] = {}  # of the blocks that are somebody's last
        holders: Counter[int] = Counter()
        for table in self._tables.values():
            if table.blocks and not table.is_swapped:
                last = table.blocks[-1]
                fill[last] = max(fill.get(last, 0), table.num_tokens - (len(table.blocks) - 1) * self.block_size)
                holders[last] += 1
        empty = 0
        for block_id, filled in fill.items():
            # Whoever holds it and goes on behind it has filled it.
            if filled < self.block_size and holders[block_id] == self.pool.ref_count(block_id):
                empty += self.block_size - filled
        return self.num_allocated_slots - empty

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
        self._note_beginning(parent_id, parent)
        pool = self._pool_of(parent)
        for block_id in parent.blocks:
            pool.incref(block_id)
        self._tables[child_id] = parent.copy()
        if parent.blocks and not parent.is_swapped:
            self.log.add("shared", child_id, parent.blocks.tolist(), parent_id)

    def share_prefix(self, seq_id: int, sibling_id: int, num_tokens: int) -> None:
        """Gives an empty sequence the blocks of another one's first `num_tokens` tokens. `unmatch` takes that back.

        Raises:
            ValueError: the sequence is not empty, or the other one has no so many tokens in the pool.
        """
        table, sibling = self._table(seq_id), self._table(sibling_id)
        if table.num_tokens > 0:
            raise ValueError(f"sequence {seq_id} has {table.num_tokens} tokens; only an empty one can share a prefix")
        if sibling.is_swapped or not 0 <= num_tokens <= sibling.num_tokens:
            raise ValueError(f"sequence {sibling_id} has no {num_tokens} tokens in the pool to share")
        self._note_beginning(sibling_id, sibling)
        self._tables[seq_id] = shared = sibling.copy()
        del shared.blocks[-(-num_tokens // self.block_size) :]
        self.forget_hashes(seq_id, num_tokens)
        for block_id in shared.blocks:
            self.pool.incref(block_id)
        shared.num_tokens, shared.borrowed_from = num_tokens, sibling_id

    def free(self, seq_id: int) -> None:
        """Ends a sequence. Its hashed blocks stay findable until the pool needs them."""
        table = self._table(seq_id)
        del self._tables[seq_id]
        self._release(seq_id, table, table.blocks.tolist())

    def evict(self, seq_id: int) -> None:
        """Releases all blocks of a sequence whose tokens stay what they are: it begins anew, its hashes are kept."""
        table = self._table(seq_id)
        self._release(seq_id, table, table.blocks.tolist())
        del table.blocks[:]
        table.num_tokens = table.num_committed = 0
        table.matched = (0, 0)
        table.is_swapped = False

    def crop(self, seq_id: int, num_tokens: int) -> None:
        """Cuts a sequence to its first `num_tokens` tokens and releases the blocks past them. Touches no data.

        Raises:
            ValueError: `num_tokens` is negative, or above what the sequence has.
        """
        table = self._table(seq_id)
        if not 0 <= num_tokens <= table.num_tokens:
            raise ValueError(f"cannot crop sequence {seq_id} of {table.num_tokens} tokens to {num_tokens}")
        self._note_beginning(seq_id, table)
        num_blocks = -(-num_tokens // self.block_size)
        released = table.blocks[num_blocks:].tolist()
        del table.blocks[num_blocks:]
        # A last block that is now partial keeps its own hash: its content stays valid until append() writes into it.
        self.forget_hashes(seq_id, num_tokens)
        table.num_tokens = num_tokens
        self._release(seq_id, table, released)
        table.is_swapped &= bool(table.blocks)

    def forget_hashes(self, seq_id: int, num_tokens: int) -> None:
        """To be told when the tokens of a sequence change from token `num_tokens` on."""
        table = self._table(seq_id)
        del table.block_hashes[num_tokens // self.block_size :]
        table.num_committed = min(table.num_committed, len(table.block_hashes))

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

    def append_in_place(self, seq_id: int) -> bool:
        """Grows a sequence by one token if its last block has room and is its own: the short way of most decode steps.

        Returns:
            Whether it did.
        """
        table = self._tables[seq_id]
        if table.num_tokens % self.block_size == 0 or not self.pool.is_plain(table.blocks[-1]):
            return False
        table.num_tokens += 1
        return True

    def append_need(self, requests: Sequence[tuple[int, int]]) -> int:
        """Blocks that `append` would take for these requests; for swapped sequences: once they are back."""
        needed = 0
        writers: dict[tuple[bool, int], int] = {}  # partial block -> how many of its holders will write into it
        for seq_id, n in requests:
            table = self._table(seq_id)
            needed += self._new_blocks(table, n)
            if self._has_partial_block(table):
                block = table.is_swapped, table.blocks[-1]
                writers[block] = writers.get(block, 0) + 1
        for (is_swapped, block_id), num_writers in writers.items():
            pool = self.swap_pool if is_swapped else self.pool
            assert pool is not None
            # Every writer takes a copy, but when all holders write, the last of them keeps the block itself.
            needed += min(num_writers, pool.ref_count(block_id) - 1)
        return needed

    def append(self, requests: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Grows every `(seq_id, n)` by `n` tokens, all of them or none.

        Afterwards the slots of the new tokens belong to their sequence alone and may be written, once the returned
        copies are done.

        Returns:
            Block copies `(source, destination)` to execute before any of the new slots is written. No block is the
            source of one copy and the destination of another.

        Raises:
            ValueError: an `n` is below 1, or a sequence is listed twice or swapped out; nothing has changed.
            OutOfBlocksError: the pool cannot serve the whole list; nothing has changed.
        """
        listed: set[int] = set()
        for seq_id, n in requests:
            if n < 1:
                raise ValueError(f"cannot append {n} tokens to sequence {seq_id}")
            if seq_id in listed:
                raise ValueError(f"sequence {seq_id} is listed twice in one append")
            if self._table(seq_id).is_swapped:
                raise ValueError(f"sequence {seq_id} is swapped out")
            listed.add(seq_id)
        needed = self.append_need(requests)
        fresh = iter(self._allocate(needed))
        copies: list[tuple[int, int]] = []
        for seq_id, n in requests:
            table = self._tables[seq_id]
            if table.borrowed_from is not None:
                self._note_beginning(seq_id, table)
            if table.num_tokens == 0:
                table.cache_epoch = self.pool.cache_epoch
            elif self._has_partial_block(table):
                last = table.blocks[-1]
                if self.pool.ref_count(last) > 1:
                    table.blocks[-1] = next(fresh)
                    copies.append((last, table.blocks[-1]))
                    self.pool.decref(last)
                    self.log.add("copied", seq_id, last, table.blocks[-1])
                else:
                    self.pool.drop_hash(last)
            num_new = self._new_blocks(table, n)
            if num_new == 1:  # a decode: no list is made for it
                table.blocks.append(next(fresh))
                self.log.add("allocated", seq_id, table.blocks[-1])
            elif num_new:
                new = list(islice(fresh, num_new))
                table.blocks.extend(new)
                self.log.add("allocated", seq_id, new)
            table.num_tokens += n
        self.num_cow_copies += len(copies)
        return copies

    # Prefix cache

    def commit(
        self, seq_id: int, token_ids: Sequence[int], extra_key: ExtraKey = (), num_tokens: int | None = None
    ) -> int:
        """Makes the sequence's full blocks findable by their content, as far as their K/V is written.

        Costs time for the blocks that became full since the last call, however long the sequence is. A sequence that
        holds K/V from before a `reset_prefix_cache` is never cached.

        Args:
            token_ids: the sequence's tokens from its first on.
            num_tokens: of these, those whose K/V is written; all if not given.
            extra_key: what the K/V depends on beside the tokens (adapter, cache salt, weights epoch, position offset):
                values whose `repr` tells them apart. Fixed for the sequence's life.

        Returns:
            How many blocks were registered; a block whose content is cached in another block is not.

        Raises:
            ValueError: more tokens than the sequence has, or another `extra_key` than before.
        """
        return self.publish(self.offer(seq_id, token_ids, extra_key, num_tokens))

    def offer(
        self, seq_id: int, token_ids: Sequence[int], extra_key: ExtraKey = (), num_tokens: int | None = None
    ) -> list[Offer]:
        """The first half of `commit`: blocks to `publish` when their content is known to be what it should be."""
        table = self._table(seq_id)
        num_tokens = len(token_ids) if num_tokens is None else num_tokens
        if num_tokens > table.num_tokens:
            raise ValueError(f"cannot commit {num_tokens} tokens of sequence {seq_id}, it has {table.num_tokens}")
        if not self.enable_prefix_caching:
            return []
        self._set_extra_key(seq_id, table, extra_key)
        if table.cache_epoch != self.pool.cache_epoch:
            return []
        num_full = num_tokens // self.block_size
        self._extend_hashes(table, token_ids, num_full)
        offers = [
            Offer(seq_id, position, table.blocks[position], table.block_hashes[position])
            for position in range(table.num_committed, num_full)
        ]
        table.num_committed = max(table.num_committed, num_full)
        return offers

    def publish(self, offers: Iterable[Offer]) -> int:
        """The second half: registers what was offered, and is still where it was.

        Returns:
            How many blocks were registered.
        """
        registered = 0
        for offer in offers:
            table = self._tables.get(offer.seq_id)
            if (
                table is not None
                and not table.is_swapped
                and table.cache_epoch == self.pool.cache_epoch
                and table.carries(offer)
                and table.blocks[offer.position : offer.position + 1].tolist() == [offer.block_id]
            ):
                registered += self.pool.set_hash(offer.block_id, offer.block_hash)
        return registered

    def withdraw(self, offers: Sequence[Offer]) -> None:
        """Instead of `publish`: the blocks don't hold what they should. A sequence that has them is never cached.

        O(tables), for what hardly ever happens.
        """
        for table in self._tables.values():  # sequences forked since have them, too
            if any(table.carries(offer) for offer in offers):
                table.cache_epoch = NO_EPOCH

    def prompt_hashes(
        self, seq_id: int, token_ids: Sequence[int], extra_key: ExtraKey, start: int, end: int
    ) -> list[bytes]:
        """Hashes of the full blocks that tokens `[start, end)` of a sequence complete. Empty without prefix caching."""
        table = self._table(seq_id)
        if not self.enable_prefix_caching:
            return []
        self._set_extra_key(seq_id, table, extra_key)
        num_full = min(end, len(token_ids)) // self.block_size
        self._extend_hashes(table, token_ids, num_full)
        return table.block_hashes[start // self.block_size : num_full]

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
        self._extend_hashes(table, token_ids, limit // self.block_size)
        blocks: list[int] = []
        for block_hash in table.block_hashes[: limit // self.block_size]:
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        for block_id in blocks:
            self.pool.incref(block_id)
        table.blocks.extend(blocks)
        table.num_committed = len(blocks)
        table.num_tokens = len(blocks) * self.block_size
        table.cache_epoch = self.pool.cache_epoch
        table.matched = (len(token_ids), table.num_tokens)
        table.borrowed_from = PREFIX_CACHE
        self.prefix_query_tokens += len(token_ids)
        self.prefix_hit_tokens += table.num_tokens
        return table.num_tokens

    def unmatch(self, seq_id: int) -> None:
        """Takes back what a sequence that has computed nothing yet began with, and the count of its `match_prefix`.

        If it has not grown since, the log says nothing of either.
        """
        table = self._table(seq_id)
        self.prefix_query_tokens -= table.matched[0]
        self.prefix_hit_tokens -= table.matched[1]
        table.matched = (0, 0)
        if table.borrowed_from is not None:
            table.borrowed_from = None
            self.pool.free(table.blocks)
            del table.blocks[:]
        self.evict(seq_id)

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
        if self.swap_pool is not None:
            self.swap_pool.check()
        holders: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        positions: dict[tuple[bool, int], int] = {}
        for seq_id, table in self._tables.items():
            where, swapped = f"sequence {seq_id}", table.is_swapped
            assert len(table.blocks) == -(-table.num_tokens // self.block_size), (
                f"{where}: {len(table.blocks)} blocks of {self.block_size} for {table.num_tokens} tokens"
            )
            assert len(set(table.blocks)) == len(table.blocks), f"{where}: holds a block twice: {table.blocks}"
            assert table.num_committed <= min(len(table.block_hashes), table.num_tokens // self.block_size), (
                f"{where}: hash of a partial block"
            )
            holders[swapped].update(table.blocks)
            for position, block_id in enumerate(table.blocks):
                known = positions.setdefault((swapped, block_id), position)
                assert known == position, f"{where}: block {block_id} is at position {position}, elsewhere at {known}"
            if not swapped:
                for block_id, expected in zip(table.blocks, table.block_hashes[: table.num_committed], strict=False):
                    found = self.pool.block_hash(block_id)
                    assert found in (None, expected), f"{where}: block {block_id}: foreign hash"
        for swapped, pool in ((False, self.pool), (True, self.swap_pool)):
            for block_id in range(pool.num_blocks if pool is not None else 0):
                assert pool is not None
                count, held = pool.ref_count(block_id), holders[swapped][block_id]
                assert count == held, f"block {block_id}: ref count {count}, held by {held} tables"
        assert self.num_stored_tokens <= self.num_allocated_slots, "more tokens stored than slots allocated"

    # Swap

    @property
    def num_swapped_blocks(self) -> int:
        """Blocks of the CPU pool in use."""
        return self.swap_pool.num_in_use if self.swap_pool is not None else 0

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the CPU pool has room for these sequences' blocks."""
        return self.swap_pool is not None and len(self._distinct_blocks(seq_ids)) <= self.swap_pool.num_free

    def swap_out(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Moves sequences to the CPU pool; blocks they share with each other stay shared.

        Returns:
            Block pairs `(device, CPU)` to copy before the device blocks are written.

        Raises:
            ValueError: there is no swap space, or one is swapped out already.
            OutOfBlocksError: the CPU pool has too few free blocks; nothing has changed.
        """
        if self.swap_pool is None:
            raise ValueError("there is no swap space")
        blocks = self._distinct_blocks(seq_ids)
        pairs = dict(zip(blocks, self.swap_pool.allocate(len(blocks)), strict=True))
        for seq_id in seq_ids:
            self._note_beginning(seq_id, self._tables[seq_id])
        self._note_swap("swapped_out", seq_ids, len(pairs))
        self._move(seq_ids, self.pool, self.swap_pool, pairs)
        return list(pairs.items())

    def swap_in_need(self, seq_ids: Sequence[int]) -> int:
        """Free blocks that `swap_in` takes at most."""
        return len({block for seq_id in seq_ids for block in self._table(seq_id).blocks})

    def swap_in(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Brings swapped sequences back; a block whose content is still cached is shared instead of copied.

        Returns:
            Block pairs `(CPU, device)` to copy before anything is read.

        Raises:
            ValueError: one of them is not swapped out.
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
        """
        swap_pool = self.swap_pool
        tables = [self._table(seq_id) for seq_id in seq_ids]
        if swap_pool is None or not all(table.is_swapped or not table.blocks for table in tables):
            raise ValueError(f"not all of the sequences {list(seq_ids)} are swapped out")
        hashes: dict[int, bytes] = {}
        for table in tables:
            if table.cache_epoch == self.pool.cache_epoch:
                hashes |= zip(table.blocks, table.block_hashes[: table.num_committed])
        blocks = list(dict.fromkeys(block for seq_id in seq_ids for block in self._table(seq_id).blocks))
        cached = {b: found for b in blocks if b in hashes and (found := self.pool.lookup(hashes[b])) is not None}
        if len(blocks) > self.pool.num_free:  # those found may be free ones themselves
            raise OutOfBlocksError(len(blocks), self.pool.num_free)
        for found in cached.values():
            self.pool.incref(found)
        missing = [block for block in blocks if block not in cached]
        copies = dict(zip(missing, self._allocate(len(missing)), strict=True))
        self._move(seq_ids, swap_pool, self.pool, copies | cached)
        self._note_swap("swapped_in", seq_ids, len(copies))
        for source, destination in copies.items():
            if source in hashes:
                self.pool.set_hash(destination, hashes[source])
        return list(copies.items())

    def _distinct_blocks(self, seq_ids: Sequence[int]) -> list[int]:
        tables = [self._table(seq_id) for seq_id in seq_ids]
        if any(table.is_swapped for table in tables):
            raise ValueError(f"one of the sequences {list(seq_ids)} is swapped out already")
        return list(dict.fromkeys(block for table in tables for block in table.blocks))

    def _move(self, seq_ids: Sequence[int], source: BlockPool, destination: BlockPool, pairs: dict[int, int]) -> None:
        """Rewrites tables from one pool to the other. The new blocks come with one reference each."""
        taken: set[int] = set()
        for seq_id in seq_ids:
            table = self._tables[seq_id]
            old = table.blocks[:]
            for position, block in enumerate(old):
                if block in taken:
                    destination.incref(pairs[block])
                taken.add(block)
                table.blocks[position] = pairs[block]
            source.free(old)
            table.is_swapped = destination is self.swap_pool and bool(old)  # without blocks it is nowhere

    # The log. Blocks in CPU memory are not its business.

    def _note_beginning(self, seq_id: int, table: BlockTable) -> None:
        """What an empty sequence was given is its own from here on."""
        source, table.borrowed_from = table.borrowed_from, None
        if source is None or not table.blocks:
            return
        if source == PREFIX_CACHE:
            self.log.add("prefix_hit", seq_id, table.blocks.tolist(), table.num_tokens)
        else:
            self.log.add("shared", seq_id, table.blocks.tolist(), source)

    def _note_swap(self, kind: str, seq_ids: Sequence[int], num_copies: int) -> None:
        blocks = [block for seq_id in seq_ids for block in self._tables[seq_id].blocks]
        if blocks:
            self.log.add_for_group(kind, self.log.group_of(seq_ids[0]), num_copies, blocks)

    def _allocate(self, n: int) -> list[int]:
        num_evictions = self.pool.num_evictions
        blocks = self.pool.allocate(n)
        evicted = self.pool.num_evictions - num_evictions
        if evicted:  # cached blocks are the last that the pool hands out
            self.log.add_for_group("evicted", None, blocks[-evicted:])
        return blocks

    def _release(self, seq_id: int, table: BlockTable, blocks: list[int]) -> None:
        """Gives blocks of a table back; the list is the log's from here on."""
        self._note_beginning(seq_id, table)
        self._pool_of(table).free(blocks)
        if blocks and not table.is_swapped:
            self.log.add("freed", seq_id, blocks)

    # Helpers

    def _table(self, seq_id: int) -> BlockTable:
        table = self._tables.get(seq_id)
        if table is None:
            raise ValueError(f"unknown sequence {seq_id}")
        return table

    def _pool_of(self, table: BlockTable) -> BlockPool:
        if not table.is_swapped:
            return self.pool
        assert self.swap_pool is not None
        return self.swap_pool

    def _extend_hashes(self, table: BlockTable, token_ids: Sequence[int], num_blocks: int) -> None:
        assert table.extra_key is not None
        while len(table.block_hashes) < num_blocks:
            table.block_hashes.append(self._next_hash(table.block_hashes, token_ids, table.extra_key))

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
