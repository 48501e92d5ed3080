"""`BlockTables`: the block tables of all sequences over one pool, and the ways blocks come into them and go.

Only the standard library: tables hold block ids and token counts. Token `i` of a sequence lies, for the layers of a
group, in block `table[i // block_size]` of that group's table, at offset `i % block_size`.

A group whose layers see a window gives back blocks that no later query reads (`slide`). Their places in the table stay.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from hf_paged.core.block_pool import BlockPool
from hf_paged.core.block_table import PREFIX_CACHE, BlockTable
from hf_paged.core.event_log import EventLog


class BlockTables:
    """Block tables of sequences that are known by ids of the caller's choice.

    Every method that takes a `seq_id` raises `ValueError` for one that it doesn't know. Not thread-safe: one owner.

    Args:
        num_blocks: size of the pool, in blocks.
        block_size: slots (tokens) a block.
        num_swap_blocks: size of the CPU pool that swapped sequences go to.
        log: is told of every block that is taken, shared or given back; by default one of its own.
        windows: of each group of layers, the tokens that a query sees, itself included; None: all before it.

    Attributes:
        state_blocks: blocks of a state, which sequences of models with recurrent layers have; 0: there is none.
        windows: as given.
        sliding: the groups that have one, and it.
        full: the groups that have none.
        slides_at: where a window's edge comes to a block's: numbers of tokens, modulo the block size, at which a
            sequence that grows by single tokens is to `slide`. Empty without windows.
        pool: the `BlockPool`, with its counters.
        swap_pool: the blocks in CPU memory; `None` without swap space.
        log: the `EventLog`.
        choose: `Policy.blocks`, if a policy has a choice of its own; it is asked where sequences grow.
        by_id: the tables, oldest first.

    Raises:
        ValueError: `num_blocks` or `block_size` is below 1.
    """

    state_blocks = 0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_swap_blocks: int = 0,
        log: EventLog | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.windows = tuple(windows)
        self.sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
        self.full = [group for group, window in enumerate(windows) if window is None]
        self.slides_at = frozenset((window - 1) % block_size for _, window in self.sliding)
        self.pool = BlockPool(num_blocks)
        self.swap_pool = BlockPool(num_swap_blocks) if num_swap_blocks else None
        self.block_size = block_size
        self.log = log if log is not None else EventLog()
        self.choose: Callable[[Sequence[tuple[int, int]]], list[int] | None] | None = None
        self.by_id: dict[int, BlockTable] = {}

    # Reading

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self.by_id

    def num_tokens(self, seq_id: int) -> int:
        """Tokens that the sequence has slots for."""
        return self.get(seq_id).num_tokens

    def block_table(self, seq_id: int, group: int = 0) -> list[int]:
        """The sequence's block ids in a group of layers, as they are now; -1 for those given back."""
        return self.blocks(seq_id, group).tolist()

    def block_tables(self, seq_id: int) -> list[list[int]]:
        """The same of all groups."""
        return [blocks.tolist() for blocks in self.get(seq_id).groups]

    def blocks(self, seq_id: int, group: int = 0) -> array[int]:
        """The same as int32 numbers, and live: read them at once, keep no view (a table that is viewed can't grow)."""
        table = self.get(seq_id)
        return table.groups[group] if group else table.blocks

    def held_blocks(self, seq_id: int, start: int = 0) -> list[int]:
        """The blocks that the sequence holds in all groups, from position `start` of its tables on."""
        return self.get(seq_id).held(start)

    def all_blocks(self, seq_id: int) -> list[int]:
        """All blocks that the sequence holds, those of its state among them."""
        return self.get(seq_id).everything()

    def states(self, seq_ids: Sequence[int]) -> array[int]:
        """Blocks of the states of these sequences, one after another: int32, a copy."""
        return array("i")

    @property
    def num_states(self) -> int:
        """States in the pool, a shared one counted once."""
        return 0

    def state_size(self, table: BlockTable) -> int:
        """Blocks that the state of a sequence with tokens takes, or its source."""
        return self.state_blocks

    def state_hashes(self, table: BlockTable) -> Iterable[tuple[int, bytes]]:
        """What the blocks of its state hold for good, each with the hash that it is found by."""
        return ()

    def tables(self, seq_ids: Sequence[int]) -> list[list[array[int]]]:
        """`blocks` of these sequences, for each group of layers."""
        tables = self.by_id
        if not self.windows:
            return []
        others = range(1, len(self.windows))
        first = [tables[seq_id].blocks for seq_id in seq_ids]
        return [first, *[[tables[seq_id].groups[group] for seq_id in seq_ids] for group in others]]

    @property
    def num_stored_tokens(self) -> int:
        """Distinct slots that hold a token of a live sequence, a shared block counted once. O(tables)."""
        fill: dict[int, int] = {}  # of the blocks that are the last of a table
        holders: Counter[int] = Counter()
        for table in self.by_id.values():
            if table.num_tokens and not table.is_swapped:
                filled = (table.num_tokens - 1) % self.block_size + 1
                for blocks in table.groups:
                    fill[blocks[-1]] = max(fill.get(blocks[-1], 0), filled)
                    holders[blocks[-1]] += 1
        empty = 0
        for block_id, filled in fill.items():
            # A sequence that holds it and goes on behind it has filled it.
            if filled < self.block_size and holders[block_id] == self.pool.ref_count(block_id):
                empty += self.block_size - filled
        return self.num_allocated_slots - empty

    @property
    def num_allocated_slots(self) -> int:
        """Slots of all blocks that live sequences hold."""
        return self.pool.num_in_use * self.block_size

    def get(self, seq_id: int) -> BlockTable:
        table = self.by_id.get(seq_id)
        if table is None:
            raise ValueError(f"unknown sequence {seq_id}")
        return table

    def pool_of(self, table: BlockTable) -> BlockPool:
        if not table.is_swapped:
            return self.pool
        assert self.swap_pool is not None
        return self.swap_pool

    # Windows

    def slide(self, seq_id: int, num_tokens: int) -> None:
        """Gives back blocks that no query from token `num_tokens` on reads. What `offer` returned waits for `publish`.

        To be called when all queries before are on their way, which is often enough after a chunk of several tokens
        and at the numbers of `slides_at`.
        """
        table = self.get(seq_id)
        if not table.is_swapped:
            table.num_read = num_tokens
            self.slide_table(seq_id, table)

    def slide_table(self, seq_id: int, table: BlockTable) -> None:
        query = table.num_read if table.keeps_from is None else min(table.num_read, table.keeps_from)
        end = table.num_settled if table.num_settled < table.num_committed else len(table.blocks)
        released: list[int] = []
        for group, window in self.sliding:
            behind = min(end, self.num_behind(window, query))
            if behind > table.num_gone[group]:
                self.note_beginning(seq_id, table)
                released += table.give_up(group, behind)
        if released:
            self.release(seq_id, table, released)

    def num_behind(self, window: int, query: int) -> int:
        """Blocks that lie wholly behind the window of the query of token `query`."""
        return max(0, query - window + 1) // self.block_size

    def reads(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether all blocks are there that the query behind `num_tokens` tokens reads."""
        return all(table.num_gone[g] <= self.num_behind(window, num_tokens) for g, window in self.sliding)

    def widest(self, window: int, chunk: int) -> int:
        """Blocks that a step of `chunk` tokens reads and writes at most."""
        return -(-(window - 1 + chunk) // self.block_size) + 1

    # Blocks come and go

    def allocate(self, n: int, requests: Sequence[tuple[int, int]] = ()) -> list[int]:
        chosen = self.choose(requests) if n and requests and self.choose is not None else None
        if chosen is not None:
            evicted = [block for block in chosen if self.pool.block_hash(block) is not None]
            self.pool.take(chosen)
            blocks = chosen
        else:
            num_evictions = self.pool.num_evictions
            blocks = self.pool.allocate(n)
            num_evicted = self.pool.num_evictions - num_evictions
            evicted = blocks[-num_evicted:] if num_evicted else []  # cached blocks are the last that it hands out
        if evicted:
            self.log.add_for_group("evicted", None, evicted)
        return blocks

    def release(self, seq_id: int, table: BlockTable, blocks: list[int]) -> None:
        """Gives blocks of a table back. The log keeps the list, so callers must not change it."""
        self.note_beginning(seq_id, table)
        self.pool_of(table).free(blocks)
        if blocks and not table.is_swapped:
            self.log.add("freed", seq_id, blocks)

    def note_beginning(self, seq_id: int, table: BlockTable) -> None:
        """Logs where a sequence's first blocks came from: from here on they are its own."""
        source, table.borrowed_from = table.borrowed_from, None
        if source is None or not (held := table.everything()):
            return
        if source == PREFIX_CACHE:
            self.log.add("prefix_hit", seq_id, held, table.num_tokens)
        else:
            self.log.add("shared", seq_id, held, source)
