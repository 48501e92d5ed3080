"""The pool of physical KV blocks: which are free, which are shared, and which block holds which content.

Only the standard library: the pool knows block *ids*; the tensor they index lives in `kv_cache.py`.

A block is in use (`ref_count` >= 1) or free (`ref_count` 0, linked into the free list). A block that carries a hash
is findable by its content, in use or free; a free one that is (a *cached free* block) keeps its K/V until it is
allocated again, which evicts the hash. The free list is kept in order of reuse::

    front [ plain free blocks, last freed first | cached free blocks, least recently freed first ] back
            ^ allocate() pops here
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_paged.core.errors import OutOfBlocksError

_UNLINKED = -1  # prev / next of a block in use


@dataclass(slots=True)
class Block:
    """One physical block. `prev` and `next` are block ids: the links of the free list, -1 while in use."""

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    prev: int = _UNLINKED
    next: int = _UNLINKED


class BlockPool:
    """Ref counts, an LRU free list and a hash index over `num_blocks` blocks, ids 0 to `num_blocks - 1`.

    Every operation costs O(1) a block it touches. Not thread-safe: one owner.

    Attributes:
        num_blocks: size of the pool.
        num_cached_free: free blocks that still hold hashed content.
        peak_in_use: the most blocks that were ever in use at once.
        num_allocated: blocks that were taken off the free list, whatever they carried; not those found by their hash.
        num_evictions: hashes lost because their block was allocated for something else.
        cache_epoch: how often the prefix cache was reset. What was computed in an earlier epoch must not be hashed.

    Raises:
        ValueError: `num_blocks` is below 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_cached_free = 0
        self.peak_in_use = 0
        self.num_evictions = 0
        self.num_allocated = 0
        self.cache_epoch = 0
        self.num_free = 0
        self._index: dict[bytes, int] = {}
        # The last entry is a sentinel that closes the free list into a ring, so that linking has no special cases.
        self._sentinel = Block(num_blocks, prev=num_blocks, next=num_blocks)
        self._blocks = [Block(block_id) for block_id in range(num_blocks)] + [self._sentinel]
        for block in self._blocks[:num_blocks]:
            self._link_before(block, self._sentinel)

    # Counters

    @property
    def num_in_use(self) -> int:
        """Blocks with a ref count of at least 1."""
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        """Holders of the block. Raises `ValueError` for an id outside the pool, as all methods do."""
        return self._block(block_id).ref_count

    def block_hash(self, block_id: int) -> bytes | None:
        """The hash under which the block can be looked up, or None."""
        return self._block(block_id).block_hash

    def cells(self) -> list[tuple[int, bytes | None]]:
        """Holders and hash of every block."""
        return [(block.ref_count, block.block_hash) for block in self._blocks[: self.num_blocks]]

    def is_plain(self, block_id: int) -> bool:
        """Whether its holder may write to it at once: the block is not shared and has no hash."""
        block = self._blocks[block_id]
        return block.ref_count == 1 and block.block_hash is None

    # Ref counts

    def allocate(self, n: int) -> list[int]:
        """Takes `n` blocks off the free list, each with ref count 1, evicting the hashes they carried.

        Raises:
            ValueError: `n` is negative.
            OutOfBlocksError: fewer than `n` blocks are free; nothing has changed.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.num_free:
            raise OutOfBlocksError(n, self.num_free)
        block_ids = []
        for _ in range(n):
            block = self._blocks[self._sentinel.next]
            self._take(block)
            block_ids.append(block.block_id)
        self.peak_in_use = max(self.peak_in_use, self.num_in_use)
        return block_ids

    def take(self, block_ids: Sequence[int]) -> None:
        """Allocates these blocks, as `allocate` does.

        Raises:
            ValueError: one of them is in use, or listed twice; those before it have been taken.
        """
        for block_id in block_ids:
            block = self._block(block_id)
            if block.ref_count:
                raise ValueError(f"block {block_id} is in use: it cannot be taken")
            self._take(block)
        self.peak_in_use = max(self.peak_in_use, self.num_in_use)

    def _take(self, block: Block) -> None:
        self._unlink(block)
        if block.block_hash is not None:
            self._forget(block)
            self.num_evictions += 1
        block.ref_count = 1
        self.num_allocated += 1

    def incref(self, block_id: int) -> None:
        """One more holder; takes a cached free block back out of the free list, content intact.

        Raises:
            ValueError: the block is free and not cached, so that its content belongs to no sequence.
        """
        block = self._block(block_id)
        if block.ref_count == 0:
            if block.block_hash is None:
                raise ValueError(f"block {block_id} is free and not cached: it cannot be shared")
            self._unlink(block)
            self.peak_in_use = max(self.peak_in_use, self.num_in_use)
        block.ref_count += 1

    def decref(self, block_id: int) -> None:
        """One holder fewer; the block is free when the last one is gone.

        Raises:
            ValueError: the block is already free.
        """
        block = self._block(block_id)
        if block.ref_count == 0:
            raise ValueError(f"block {block_id} is already free")
        block.ref_count -= 1
        if block.ref_count == 0:
            self._link_free(block)

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each block of a table, given in the table's order.

        The tail goes first: a cached prefix is of use only from its head on, so its tail is to be evicted before it.

        Raises:
            ValueError: one of the blocks is already free; the blocks behind it have been released.
        """
        for block_id in reversed(block_ids):
            self.decref(block_id)

    # Prefix cache

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds the content of this hash, in use or cached free, or None."""
        return self._index.get(block_hash)

    def set_hash(self, block_id: int, block_hash: bytes) -> bool:
        """Makes the block findable by `block_hash`. The first block registered for a hash wins.

        Returns:
            Whether the block is the one registered; False if another block has this content already.

        Raises:
            ValueError: the block is free, or carries another hash.
        """
        block = self._block(block_id)
        if block.ref_count == 0:
            raise ValueError(f"block {block_id} is free: only a block in use can be hashed")
        if block.block_hash is not None and block.block_hash != block_hash:
            raise ValueError(f"block {block_id} carries the hash {block.block_hash.hex()}, not {block_hash.hex()}")
        owner = self._index.setdefault(block_hash, block_id)
        if owner != block_id:
            return False
        block.block_hash = block_hash
        return True

    def drop_hash(self, block_id: int) -> None:
        """Makes the block unfindable, because its content is to change. No effect on a block without a hash."""
        block = self._block(block_id)
        if block.block_hash is None:
            return
        if block.ref_count > 0:
            self._forget(block)
            return
        self._unlink(block)
        self._forget(block)
        self._link_free(block)

    def reset_prefix_cache(self) -> int:
        """Drops every hash, those of blocks in use included, and begins a new `cache_epoch`.

        Returns:
            How many hashes were dropped.
        """
        block_ids = list(self._index.values())
        for block_id in block_ids:
            self.drop_hash(block_id)
        self.cache_epoch += 1
        return len(block_ids)

    # Invariants

    def check(self) -> None:
        """Asserts that free list, ref counts, hash index and counters agree. O(num_blocks).

        Raises:
            AssertionError: they do not; the message says where.
        """
        linked: list[int] = []
        previous = self._sentinel
        while previous.next != self._sentinel.block_id:
            block = self._blocks[previous.next]
            assert block.prev == previous.block_id, (
                f"free list: block {block.block_id} has prev {block.prev} but follows block {previous.block_id}"
            )
            linked.append(block.block_id)
            assert len(linked) <= self.num_blocks, "free list: does not come back to its sentinel"
            previous = block
        assert self._sentinel.prev == previous.block_id, f"free list: ends at block {previous.block_id}"

        blocks = self._blocks[: self.num_blocks]
        unreferenced = [block.block_id for block in blocks if block.ref_count == 0]
        assert all(block.ref_count >= 0 for block in blocks), "a ref count is negative"
        assert sorted(linked) == unreferenced, f"free list {sorted(linked)} is not the unreferenced {unreferenced}"
        assert len(linked) == self.num_free, f"{len(linked)} blocks are free, {self.num_free} were counted"
        assert self.num_free + sum(block.ref_count > 0 for block in blocks) == self.num_blocks, "free + used != all"
        for block in blocks:
            assert block.ref_count == 0 or block.prev == block.next == _UNLINKED, f"{block} is in use but linked"

        cached = [self._blocks[block_id].block_hash is not None for block_id in linked]
        assert cached == sorted(cached), "free list: a plain free block is behind a cached one"
        assert sum(cached) == self.num_cached_free, f"{sum(cached)} cached free, {self.num_cached_free} were counted"
        hashed = {block.block_hash: block.block_id for block in blocks if block.block_hash is not None}
        assert hashed == self._index, "hash index: does not map exactly the hashed blocks"
        assert self.num_in_use <= self.peak_in_use, f"{self.num_in_use} in use is above the peak {self.peak_in_use}"

    # Free list

    def _block(self, block_id: int) -> Block:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block id {block_id} is outside the pool of {self.num_blocks} blocks")
        return self._blocks[block_id]

    def _forget(self, block: Block) -> None:
        """Takes the hash from a block that is not linked."""
        assert block.block_hash is not None
        del self._index[block.block_hash]
        block.block_hash = None

    def _link_free(self, block: Block) -> None:
        """Hashed blocks to the back (reused last, oldest first), the others to the front (reused first)."""
        front = self._blocks[self._sentinel.next]
        self._link_before(block, front if block.block_hash is None else self._sentinel)

    def _link_before(self, block: Block, successor: Block) -> None:
        block.prev, block.next = successor.prev, successor.block_id
        self._blocks[successor.prev].next = block.block_id
        successor.prev = block.block_id
        self.num_free += 1
        self.num_cached_free += block.block_hash is not None

    def _unlink(self, block: Block) -> None:
        self._blocks[block.prev].next = block.next
        self._blocks[block.next].prev = block.prev
        block.prev = block.next = _UNLINKED
        self.num_free -= 1
        self.num_cached_free -= block.block_hash is not None
