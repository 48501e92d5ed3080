"""BlockPool: order of reuse, ref counts, hash index, and that misuse is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_paged.core.block_pool import BlockPool


def hash_of(n: int) -> bytes:
    return n.to_bytes(32, "big")


def cached_pool(num_blocks: int, hashed: list[int]) -> BlockPool:
    """A pool with all blocks in use, the given ones hashed by their own id."""
    pool = BlockPool(num_blocks)
    pool.allocate(num_blocks)
    for block_id in hashed:
        assert pool.set_hash(block_id, hash_of(block_id))
    return pool


def test_plain_blocks_are_reused_before_cached_ones_and_cached_ones_oldest_first() -> None:
    pool = cached_pool(6, hashed=[1, 3, 4])
    for block_id in (3, 0, 4, 1, 2):
        pool.decref(block_id)
    pool.check()
    assert (pool.num_free, pool.num_cached_free) == (5, 3)
    assert pool.allocate(2) == [2, 0]  # plain, last freed first
    assert pool.num_evictions == 0
    assert pool.allocate(1) == [3]
    assert pool.num_evictions == 1 and pool.lookup(hash_of(3)) is None
    assert pool.allocate(2) == [4, 1]
    assert (pool.num_evictions, pool.num_cached_free) == (3, 0)
    pool.check()


def test_misuse_raises_with_the_value_and_changes_nothing() -> None:
    pool = cached_pool(3, hashed=[0])
    pool.decref(1)
    with pytest.raises(ValueError, match="-1 blocks"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="block 1 is already free"):
        pool.decref(1)
    with pytest.raises(ValueError, match="block 1 is already free"):
        pool.free([1])
    with pytest.raises(ValueError, match="block 1 is free and not cached"):
        pool.incref(1)
    with pytest.raises(ValueError, match="block 1 is free"):
        pool.set_hash(1, hash_of(1))
    with pytest.raises(ValueError, match="block 0 carries the hash"):
        pool.set_hash(0, hash_of(9))
    for block_id in (-1, 3, 1000):
        for method in (pool.incref, pool.decref, pool.ref_count, pool.block_hash, pool.drop_hash):
            with pytest.raises(ValueError, match=f"block id {block_id} "):
                method(block_id)
        with pytest.raises(ValueError, match=f"block id {block_id} "):
            pool.set_hash(block_id, hash_of(5))
    pool.check()
    assert (pool.num_free, pool.lookup(hash_of(9)), pool.lookup(hash_of(1))) == (1, None, None)


CORRUPTIONS: dict[str, Callable[[BlockPool], object]] = {
    "link": lambda pool: setattr(pool._blocks[0], "next", 0),
    "back link": lambda pool: setattr(pool._blocks[1], "prev", 1),
    "ref count": lambda pool: setattr(pool._blocks[0], "ref_count", 1),
    "leaked block": lambda pool: setattr(pool._blocks[3], "ref_count", 0),
    "count": lambda pool: setattr(pool, "num_free", pool.num_free + 1),
    "cached count": lambda pool: setattr(pool, "num_cached_free", pool.num_cached_free + 1),
    "index": lambda pool: pool._index.update({hash_of(7): 1}),
    "hash": lambda pool: setattr(pool._blocks[3], "block_hash", hash_of(3)),
    "peak": lambda pool: setattr(pool, "peak_in_use", 0),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_notices_a_corrupted_pool(name: str) -> None:
    pool = cached_pool(4, hashed=[2])
    pool.free([0, 1])
    pool.check()
    CORRUPTIONS[name](pool)
    with pytest.raises(AssertionError) as caught:
        pool.check()
    assert str(caught.value)


def test_cost_does_not_grow_with_the_pool() -> None:
    """Freeing and reviving in the middle of a long free list: quadratic code would run into the timeout."""
    num_blocks = 50_000
    pool = BlockPool(num_blocks)
    block_ids = pool.allocate(num_blocks)
    for block_id in block_ids:
        pool.set_hash(block_id, hash_of(block_id))
    pool.free(block_ids)
    for block_id in range(0, num_blocks, 2):
        pool.incref(block_id)
    for block_id in range(1, num_blocks, 2):
        pool.drop_hash(block_id)
    assert (pool.num_free, pool.num_cached_free) == (num_blocks // 2, 0)
    pool.check()
