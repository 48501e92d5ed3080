"""`SourceBlockManager`: block tables of sequences that also hold what an encoder has read for them.

What cross-attention makes of an encoder's output is as long as the input, is written in the sequence's first step, and
never again. It lies in blocks of its own, out of the same pool, taken with the first token and given back with the
last. So it is shared by forks, swapped, evicted and counted as any block is. Blocks of equal content are found by what
they were made of: however many sequences attend to a source, it is there once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from hf_paged.core.batch import GroupTables, SourceTables
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.block_table import BlockTable
from hf_paged.core.errors import OutOfBlocksError


class SourceBlockManager(BlockManager):
    """Block tables as `BlockManager`'s, each with the blocks of a source.

    Args:
        num_blocks: As the others, see `BlockManager`.
        num_cross: Groups of layers that attend to sources.
    """

    def __init__(self, num_blocks: int, *args: Any, num_cross: int, **kwargs: Any) -> None:
        super().__init__(num_blocks, *args, **kwargs)
        self._num_cross = num_cross
        self._unwritten: set[int] = set()  # sequences whose source the next step writes
        self._new: list[int] = []
        self._num_fresh = 0

    # Reading

    def source_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self._num_cross

    def state_size(self, table: BlockTable) -> int:
        return 0 if table.source is None else self.source_blocks(table.source[0])

    def state_hashes(self, table: BlockTable) -> Iterable[tuple[int, bytes]]:
        if table.source is None:
            return ()
        return [(block, _key(table.source[1], index)) for index, block in enumerate(table.state)]

    @property
    def num_allocated_slots(self) -> int:
        """Slots of all blocks that live sequences hold, those of sources among them."""
        return self.pool.num_in_use * self.block_size

    @property
    def num_stored_tokens(self) -> int:
        """Distinct slots that hold a token of a live sequence or of a source. O(tables)."""
        filled = {t.state[0]: t.source[0] for t in self.by_id.values() if t.source and t.state and not t.is_swapped}
        empty = sum(self.source_blocks(n) * self.block_size - n * self._num_cross for n in filled.values())
        return super().num_stored_tokens - empty

    def fresh_tokens(self, seq_ids: Sequence[int]) -> int:
        return sum(num_tokens for num_tokens, found in self._wanted(seq_ids).values() if found is None)

    def sources(self, seq_ids: Sequence[int]) -> SourceTables | None:
        tables = [self.by_id[seq_id] for seq_id in seq_ids]
        fresh = array("q", [row for row, seq_id in enumerate(seq_ids) if seq_id in self._unwritten])
        self._unwritten.difference_update(seq_ids)
        counts = array("q", [len(table.state) // self._num_cross for table in tables])
        groups = []
        for group in range(self._num_cross):
            own = [table.state[group * n : (group + 1) * n] for table, n in zip(tables, counts, strict=True)]
            groups.append(GroupTables(array("i", b"".join(own)), counts))
        lens = array("q", [0 if table.source is None else table.source[0] for table in tables])
        return SourceTables(tuple(groups), lens, fresh)

    # A sequence's life

    def set_source(self, seq_id: int, num_tokens: int, key: bytes) -> None:
        self.get(seq_id).source = num_tokens, key

    def restart(self, seq_id: int) -> None:
        source = self.get(seq_id).source
        super().restart(seq_id)
        self.get(seq_id).source = source

    def free(self, seq_id: int) -> None:
        self._forget_if_unwritten(seq_id)
        super().free(seq_id)

    def evict(self, seq_id: int) -> None:
        self._forget_if_unwritten(seq_id)
        super().evict(seq_id)

    def _forget_if_unwritten(self, seq_id: int) -> None:
        if seq_id in self._unwritten:
            self._unwritten.discard(seq_id)
            self.forget_sources([seq_id])

    def forget_sources(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            for block in self.get(seq_id).state:
                self.pool.drop_hash(block)

    # Growing

    def blocks_needed(self, seq_id: int, n: int, chunk: int | None = None) -> int:
        return super().blocks_needed(seq_id, n, chunk) + (self._source_need([seq_id]) if n else 0)

    def append_need(self, requests: Sequence[tuple[int, int]]) -> int:
        return super().append_need(requests) + self._source_need([seq_id for seq_id, _ in requests])

    def append(self, requests: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        self._check_append(requests)
        seq_ids = [seq_id for seq_id, _ in requests]
        own = self._source_need(seq_ids)
        if own:
            need = own + super().append_need(requests)
            if need > self.pool.num_free:
                raise OutOfBlocksError(need, self.pool.num_free)
        # Those that are there first: what the others take may else be their blocks.
        wanted = self._wanted(seq_ids)
        for seq_id in sorted(seq_ids, key=lambda seq_id: self._is_fresh(seq_id, wanted)):
            self._take_source(seq_id)
        return super().append(requests)

    def take_fresh(self) -> int:
        number, self._num_fresh = self._num_fresh, 0
        return number

    def new_source_blocks(self) -> list[int]:
        blocks, self._new = self._new, []
        return blocks

    def _wanted(self, seq_ids: Sequence[int]) -> dict[bytes, tuple[int, list[int] | None]]:
        """Sources that these sequences are still to take: by key their tokens, and blocks that hold them already."""
        wanted: dict[bytes, tuple[int, list[int] | None]] = {}
        for seq_id in seq_ids:
            table = self.by_id[seq_id]
            if table.source is not None and not table.state and table.source[1] not in wanted:
                wanted[table.source[1]] = table.source[0], self._found(*table.source)
        return wanted

    def _is_fresh(self, seq_id: int, wanted: dict[bytes, tuple[int, list[int] | None]]) -> bool:
        source = self.by_id[seq_id].source
        return source is not None and wanted.get(source[1], (0, []))[1] is None

    def _source_need(self, seq_ids: Sequence[int]) -> int:
        """Free blocks that sources of these sequences take: new ones, and those that wait to be found."""
        need = 0
        for num_tokens, found in self._wanted(seq_ids).values():
            is_new = found is None
            need += self.source_blocks(num_tokens) if is_new else sum(self.pool.ref_count(b) == 0 for b in found or ())
        return need

    def _found(self, num_tokens: int, key: bytes) -> list[int] | None:
        """The blocks of the source of this key, all of them or none."""
        found = [self.pool.lookup(_key(key, index)) for index in range(self.source_blocks(num_tokens))]
        return None if None in found else [block for block in found if block is not None]

    def _take_source(self, seq_id: int) -> None:
        table = self.by_id[seq_id]
        if table.state or table.source is None:
            return
        if table.borrowed_from is not None:
            self.note_beginning(seq_id, table)
        num_tokens, key = table.source
        found = self._found(num_tokens, key)
        if found is not None:
            for block in found:
                self.pool.incref(block)
            table.state = array("i", found)
            self.log.add("prefix_hit", seq_id, found, num_tokens)
            return
        blocks = self.allocate(self.source_blocks(num_tokens))
        table.state = array("i", blocks)
        self.log.add("allocated", seq_id, blocks)
        for block, block_hash in self.state_hashes(table):
            left_over = self.pool.lookup(block_hash)  # of one that has lost blocks
            if left_over is not None:
                self.pool.drop_hash(left_over)
            self.pool.set_hash(block, block_hash)
        self._unwritten.add(seq_id)
        self._new += blocks
        self._num_fresh += num_tokens


def _key(key: bytes, index: int) -> bytes:
    """What a block of the source of this key is found by; no block of tokens has such a key."""
    return key + b"source" + index.to_bytes(4)
