"""`Swapping`: sequences whose blocks move to CPU memory and back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hf_paged.core.block_pool import BlockPool
from hf_paged.core.block_table import GONE, group_key
from hf_paged.core.block_tables import BlockTables
from hf_paged.core.errors import OutOfBlocksError


class Swapping:
    """Moves sequences of one pool.

    Args:
        tables: of the pool.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables

    @property
    def num_in_use(self) -> int:
        """Blocks of the CPU pool in use."""
        return self._tables.swap_pool.num_in_use if self._tables.swap_pool is not None else 0

    def has_room(self, seq_ids: Sequence[int]) -> bool:
        """Whether the CPU pool has room for these sequences' blocks."""
        pool = self._tables.swap_pool
        return pool is not None and len(self._distinct_blocks(seq_ids)) <= pool.num_free

    def move_out(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Moves sequences to the CPU pool; blocks they share with each other stay shared.

        Returns:
            Block pairs `(device, CPU)` to copy before the device blocks are written.

        Raises:
            ValueError: there is no swap space, or one is swapped out already.
            OutOfBlocksError: the CPU pool has too few free blocks; nothing has changed.
        """
        if self._tables.swap_pool is None:
            raise ValueError("there is no swap space")
        blocks = self._distinct_blocks(seq_ids)
        pairs = dict(zip(blocks, self._tables.swap_pool.allocate(len(blocks)), strict=True))
        for seq_id in seq_ids:
            self._tables.note_beginning(seq_id, self._tables.by_id[seq_id])
        self._note_swap("swapped_out", seq_ids, len(pairs))
        self._move(seq_ids, self._tables.pool, self._tables.swap_pool, pairs)
        return list(pairs.items())

    def need(self, seq_ids: Sequence[int]) -> int:
        """Free blocks that `swap_in` takes at most."""
        return len({block for seq_id in seq_ids for block in self._tables.get(seq_id).everything()})

    def move_in(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Brings swapped sequences back; a block whose content is still cached is shared instead of copied.

        Returns:
            Block pairs `(CPU, device)` to copy before anything is read.

        Raises:
            ValueError: one of them is not swapped out.
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
        """
        swap_pool = self._tables.swap_pool
        tables = [self._tables.get(seq_id) for seq_id in seq_ids]
        if swap_pool is None or not all(table.is_swapped or not table.everything() for table in tables):
            raise ValueError(f"not all of the sequences {list(seq_ids)} are swapped out")
        hashes: dict[int, bytes] = {}
        for table in tables:
            if table.cache_epoch == self._tables.pool.cache_epoch:
                for group, blocks in enumerate(table.groups):
                    known = table.block_hashes[table.num_gone[group] : table.num_committed]
                    hashes |= zip(blocks[table.num_gone[group] :], [group_key(each, group) for each in known])
                hashes |= self._tables.state_hashes(table)
        held = list(dict.fromkeys(block for table in tables for block in table.everything()))
        cached = {b: found for b in held if b in hashes and (found := self._tables.pool.lookup(hashes[b])) is not None}
        if len(held) > self._tables.pool.num_free:  # those found may be free ones themselves
            raise OutOfBlocksError(len(held), self._tables.pool.num_free)
        for found in cached.values():
            self._tables.pool.incref(found)
        missing = [block for block in held if block not in cached]
        copies = dict(zip(missing, self._tables.allocate(len(missing)), strict=True))
        self._move(seq_ids, swap_pool, self._tables.pool, copies | cached)
        self._note_swap("swapped_in", seq_ids, len(copies))
        for source, destination in copies.items():
            if source in hashes:
                self._tables.pool.set_hash(destination, hashes[source])
        return list(copies.items())

    def _distinct_blocks(self, seq_ids: Sequence[int]) -> list[int]:
        tables = [self._tables.get(seq_id) for seq_id in seq_ids]
        if any(table.is_swapped for table in tables):
            raise ValueError(f"one of the sequences {list(seq_ids)} is swapped out already")
        return list(dict.fromkeys(block for table in tables for block in table.everything()))

    def _move(self, seq_ids: Sequence[int], source: BlockPool, destination: BlockPool, pairs: dict[int, int]) -> None:
        """Rewrites tables from one pool to the other. The new blocks come with one reference each."""
        taken: set[int] = set()
        for seq_id in seq_ids:
            table = self._tables.by_id[seq_id]
            old = table.everything()
            for block in old:
                if block in taken:
                    destination.incref(pairs[block])
                taken.add(block)
            for blocks in (*table.groups, table.state):
                blocks[:] = array("i", [pairs.get(block, GONE) for block in blocks])
            source.free(old)
            table.own_end = 0
            table.is_swapped = destination is self._tables.swap_pool and bool(old)  # without blocks it is nowhere

    def _note_swap(self, kind: str, seq_ids: Sequence[int], num_copies: int) -> None:
        blocks = [block for seq_id in seq_ids for block in self._tables.by_id[seq_id].everything()]
        if blocks:
            self._tables.log.add_for_group(kind, self._tables.log.group_of(seq_ids[0]), num_copies, blocks)
