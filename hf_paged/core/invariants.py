"""What always holds between block tables and their pool."""

from __future__ import annotations

from collections import Counter

from hf_paged.core.block_table import GONE, BlockTable, group_key
from hf_paged.core.block_tables import BlockTables


def check_tables(tables: BlockTables) -> None:
    """Asserts that tables and pool agree. O(num_blocks + blocks in tables).

    Raises:
        AssertionError: they do not; the message says where.
    """
    tables.pool.check()
    if tables.swap_pool is not None:
        tables.swap_pool.check()
    holders: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
    positions: dict[tuple[bool, int], tuple[int, int]] = {}
    for seq_id, table in tables.by_id.items():
        _check_table(f"sequence {seq_id}", table, tables)
        holders[table.is_swapped].update(table.everything())
        for group, blocks in enumerate(table.groups):
            for place in enumerate(blocks[table.num_gone[group] :], table.num_gone[group]):
                known = positions.setdefault((table.is_swapped, place[1]), (group, place[0]))
                assert known == (group, place[0]), (
                    f"sequence {seq_id}: block {place[1]} is at group and position {(group, place[0])}, "
                    f"elsewhere at {known}"
                )
    for swapped, pool in ((False, tables.pool), (True, tables.swap_pool)):
        for block_id in range(pool.num_blocks if pool is not None else 0):
            assert pool is not None
            count, held = pool.ref_count(block_id), holders[swapped][block_id]
            assert count == held, f"block {block_id}: ref count {count}, held by {held} tables"
    assert tables.num_stored_tokens <= tables.num_allocated_slots, "more tokens stored than slots allocated"


def _check_table(where: str, table: BlockTable, tables: BlockTables) -> None:
    held = table.everything()
    assert len(set(held)) == len(held), f"{where}: holds a block twice: {held}"
    assert (
        table.num_settled <= table.num_committed <= min(len(table.block_hashes), table.num_tokens // tables.block_size)
    ), f"{where}: hash of a partial block"
    num_state_blocks = tables.state_size(table) if table.num_tokens else 0
    assert len(table.state) == num_state_blocks, f"{where}: {len(table.state)} blocks of state, not {num_state_blocks}"
    assert table.num_read <= table.num_tokens, f"{where}: reads on at {table.num_read} of {table.num_tokens}"
    if table.num_tokens < table.own_end:
        written = [*(blocks[-1] for blocks in table.groups), *(table.state if table.source is None else ())]
        shared = [block_id for block_id in written if table.is_swapped or not tables.pool.is_plain(block_id)]
        assert not shared, f"{where}: would write blocks {shared}, which are not its own"
    for group, blocks in enumerate(table.groups):
        num_gone = table.num_gone[group]
        assert len(blocks) == -(-table.num_tokens // tables.block_size), (
            f"{where}: {len(blocks)} blocks of {tables.block_size} for {table.num_tokens} tokens"
        )
        assert [n for n, block in enumerate(blocks) if block == GONE] == list(range(num_gone)), (
            f"{where}: {num_gone} blocks are gone of {blocks}"
        )
        window = tables.windows[group]
        behind = 0 if window is None else tables.num_behind(window, table.num_read)
        assert num_gone <= behind, f"{where}: {num_gone} blocks are gone, {behind} lie behind the window"
        if not table.is_swapped:
            for block_id, block_hash in zip(blocks, table.block_hashes[: table.num_committed], strict=False):
                found = None if block_id == GONE else tables.pool.block_hash(block_id)
                expected = (None, group_key(block_hash, group))
                assert found in expected, f"{where}: block {block_id}: foreign hash"
