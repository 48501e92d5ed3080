"""`BlockManager`: which blocks of the pool hold a sequence's K/V, how they are shared, and when they are copied.

Block copies are returned as data for the K/V tensor's owner to execute.

Blocks are shared by `fork` and by prefix hits. A shared block sits at the same position in all its tables and is only
ever read: `append` is the one place where a block that already holds tokens gets ready to be written, so it is the one
place that copies a block others still hold, or takes back the hash of one that was full and has been cropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from hf_paged.core.batch import SourceTables
from hf_paged.core.block_table import BlockTable
from hf_paged.core.block_tables import BlockTables
from hf_paged.core.event_log import EventLog
from hf_paged.core.invariants import check_tables
from hf_paged.core.prefix_cache import PrefixCache
from hf_paged.core.swapping import Swapping


class BlockManager(BlockTables):
    """A sequence's life in the pool: it begins, grows, is forked and cut, and ends.

    Args:
        num_blocks: size of the pool, in blocks.
        block_size: slots (tokens) a block.
        enable_prefix_caching: when False, `prefix` finds and keeps nothing.
        num_swap_blocks: size of the CPU pool that swapped sequences go to.
        log: see `BlockTables`.
        windows: see `BlockTables`.

    Attributes:
        least_chunk: tokens of a prompt that a step is to compute at least, if there are so many.
        takes_snapshots: whether a prefix is only found where `snapshot` was called.
        prefix: blocks found by their content.
        swap: sequences that move to CPU memory and back.
        num_cow_copies: block copies that `append` has asked for.

    Raises:
        ValueError: `num_blocks` or `block_size` is below 1.
    """

    least_chunk = 1
    takes_snapshots = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        log: EventLog | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        super().__init__(num_blocks, block_size, num_swap_blocks, log, windows)
        self.prefix = PrefixCache(self, enable_prefix_caching)
        self.swap = Swapping(self)
        self.num_cow_copies = 0

    # A sequence's life

    def add(self, seq_id: int) -> None:
        """Begins a sequence with an empty table. Raises `ValueError` if the id is taken."""
        self._check_new(seq_id)
        self.by_id[seq_id] = BlockTable.empty(len(self.windows))

    def fork(self, parent_id: int, child_id: int) -> None:
        """Begins a sequence that shares all of the parent's blocks. Takes no block and copies no data.

        Raises:
            ValueError: the parent is unknown, or the child's id is taken.
        """
        parent = self.get(parent_id)
        self._check_new(child_id)
        self.note_beginning(parent_id, parent)
        pool = self.pool_of(parent)
        held = parent.everything()
        parent.own_end = 0
        for block_id in held:
            pool.incref(block_id)
        self.by_id[child_id] = parent.copy()
        if held and not parent.is_swapped:
            self.log.add("shared", child_id, held, parent_id)

    def share_prefix(self, seq_id: int, sibling_id: int, num_tokens: int) -> None:
        """Gives an empty sequence the blocks of another one's first `num_tokens` tokens. `unmatch` takes that back.

        Raises:
            ValueError: the sequence is not empty, or the other one has not (or, behind its windows, not any more) so
                many tokens in the pool; see `can_share`.
        """
        table, sibling = self.get(seq_id), self.get(sibling_id)
        if table.num_tokens > 0:
            raise ValueError(f"sequence {seq_id} has {table.num_tokens} tokens; only an empty one can share a prefix")
        if not self.can_share(sibling_id, num_tokens):
            raise ValueError(f"sequence {sibling_id} has no {num_tokens} tokens in the pool to share")
        self.note_beginning(sibling_id, sibling)
        sibling.own_end = 0
        self.by_id[seq_id] = shared = sibling.copy()
        shared.cut(-(-num_tokens // self.block_size))
        self.forget_hashes(seq_id, num_tokens)
        for block_id in shared.everything():
            self.pool.incref(block_id)
        shared.num_tokens = shared.num_read = num_tokens
        shared.keeps_from, shared.borrowed_from = table.keeps_from, sibling_id

    def can_share(self, sibling_id: int, num_tokens: int) -> bool:
        """Whether a sequence may go on behind the first `num_tokens` tokens of another one, with its blocks."""
        sibling = self.get(sibling_id)
        return not sibling.is_swapped and 0 <= num_tokens <= sibling.num_tokens and self.reads(sibling, num_tokens)

    def free(self, seq_id: int) -> None:
        """Ends a sequence. Its hashed blocks stay findable until the pool needs them."""
        table = self.get(seq_id)
        del self.by_id[seq_id]
        self.release(seq_id, table, table.everything())

    def restart(self, seq_id: int) -> None:
        """Ends a sequence and begins another one under its id."""
        keeps = self.get(seq_id).keeps_from is not None
        self.free(seq_id)
        self.add(seq_id)
        if keeps:
            self.keep_past(seq_id)

    def evict(self, seq_id: int) -> None:
        """Releases all blocks of a sequence that keeps its tokens and their hashes."""
        table = self.get(seq_id)
        self.release(seq_id, table, table.everything())
        table.cut(0)
        table.num_tokens = table.num_read = table.num_committed = table.num_settled = 0
        table.matched = (0, 0)
        table.is_swapped = False

    def crop(self, seq_id: int, num_tokens: int) -> None:
        """Cuts a sequence to its first `num_tokens` tokens and releases the blocks past them. Touches no data.

        Raises:
            ValueError: `num_tokens` is negative, above what the sequence has, or so few that what lay in their windows
                was given back (`can_crop`).
        """
        table = self.get(seq_id)
        if not 0 <= num_tokens <= table.num_tokens:
            raise ValueError(f"cannot crop sequence {seq_id} of {table.num_tokens} tokens to {num_tokens}")
        if not self.reads(table, num_tokens):
            raise ValueError(f"cannot crop sequence {seq_id} to {num_tokens} tokens: its windows are past them")
        self.note_beginning(seq_id, table)
        released = table.cut(-(-num_tokens // self.block_size))
        # A last block that is now partial keeps its own hash: its content stays valid until append() writes into it.
        self.forget_hashes(seq_id, num_tokens)
        table.num_tokens = num_tokens
        table.num_read = min(table.num_read, num_tokens)
        self.release(seq_id, table, released)
        table.is_swapped &= num_tokens > 0
        if table.keeps_from is not None:
            table.keeps_from = num_tokens
            self.slide(seq_id, table.num_read)

    def can_crop(self, seq_id: int, num_tokens: int) -> bool:
        """Whether the pool still has all blocks that a query after `num_tokens` tokens reads."""
        return self.reads(self.get(seq_id), num_tokens)

    def keep_past(self, seq_id: int) -> None:
        """Keeps every block that a query from now on reads, until a `crop`, and then anew from there."""
        table = self.get(seq_id)
        table.keeps_from = table.num_tokens
        if not table.is_swapped:
            self.slide_table(seq_id, table)  # an earlier one kept more

    def keeps_windows(self, query: int, num_tokens: int) -> bool:
        """Whether what was slid to token `query` surely has all that the query behind `num_tokens` tokens reads."""
        return all(self.num_behind(w, query) <= self.num_behind(w, num_tokens) for _, w in self.sliding)

    def forget_hashes(self, seq_id: int, num_tokens: int) -> None:
        """Forgets the hashes of a sequence whose tokens change from token `num_tokens` on."""
        table = self.get(seq_id)
        if table.keeps_from is not None:
            table.keeps_from = min(table.keeps_from, num_tokens)
        del table.block_hashes[num_tokens // self.block_size :]
        table.num_committed = min(table.num_committed, len(table.block_hashes))
        table.num_settled = min(table.num_settled, table.num_committed)

    def unmatch(self, seq_id: int) -> None:
        """Takes back what a sequence that has computed nothing yet began with, and the count of its prefix match.

        If it has not grown since, the log says nothing of either.
        """
        table = self.get(seq_id)
        self.prefix.query_tokens -= table.matched[0]
        self.prefix.hit_tokens -= table.matched[1]
        table.matched = (0, 0)
        if table.borrowed_from is not None:
            table.borrowed_from = None
            self.pool.free(table.cut(0))
        self.evict(seq_id)

    def snapshot(self, seq_id: int, num_tokens: int) -> None:
        """Told that all that the sequence's layers keep is that of its first `num_tokens` tokens, which it stays for.

        To be called behind `PrefixCache.offer`. Says nothing where all layers keep their tokens apart.
        """

    # Sources, of which only a `SourceBlockManager` knows

    def set_source(self, seq_id: int, num_tokens: int, key: bytes) -> None:
        """Says what a sequence's encoder has read: so many tokens, found by this key."""

    def source_blocks(self, num_tokens: int) -> int:
        """Blocks of a source of so many tokens."""
        return 0

    def fresh_tokens(self, seq_ids: Sequence[int]) -> int:
        """Tokens of sources that a step with these sequences would have to write."""
        return 0

    def sources(self, seq_ids: Sequence[int]) -> SourceTables | None:
        """What the rows of a step are to be told of their sources. What is fresh counts as written from here on."""
        return None

    def forget_sources(self, seq_ids: Sequence[int]) -> None:
        """Sources of these sequences were not written after all."""

    def take_fresh(self) -> int:
        """Tokens of sources that `append` has taken blocks for since this was last asked."""
        return 0

    def new_source_blocks(self) -> list[int]:
        """The same of blocks."""
        return []

    # Growing

    def most_blocks(self, num_tokens: int, chunk: int, shared: int = 0) -> int:
        """Blocks that a sequence holds at most while it grows to `num_tokens` tokens by at most `chunk` a step.

        Args:
            num_tokens: of the sequence.
            chunk: tokens a step.
            shared: leading tokens whose full blocks are others' anyway: those are not counted.
        """
        positions = -(-num_tokens // self.block_size) - shared // self.block_size
        in_windows = sum([min(positions, self.widest(window, chunk)) for _, window in self.sliding])
        return positions * len(self.full) + in_windows

    def blocks_needed(self, seq_id: int, n: int, chunk: int | None = None) -> int:
        """Blocks that appending `n` tokens to this sequence alone would take, a copy of its last block included.

        Args:
            seq_id: the sequence.
            n: tokens.
            chunk: they come by at most so many a step, between which it slides; None: all at once.

        Raises:
            ValueError: `n` is negative.
        """
        table = self.get(seq_id)
        if n < 0:
            raise ValueError(f"cannot append {n} tokens to sequence {seq_id}")
        if n == 0:
            return 0
        num_copies = 0
        if self._has_partial_block(table):
            num_copies = sum([self.pool.ref_count(blocks[-1]) > 1 for blocks in table.groups])
        num_new = self._new_blocks(table, n)
        if chunk is None or not self.sliding:
            return num_new * len(table.groups) + num_copies
        needed = num_new * len(self.full) + num_copies
        for group, window in self.sliding:
            held = len(table.groups[group]) - table.num_gone[group]
            needed += max(0, min(held + num_new, self.widest(window, chunk)) - held)
        return needed

    def append_token(self, seq_id: int) -> Sequence[int] | None:
        """Grows a sequence by one token, if no other sequence is affected: the fast path of decode steps.

        Returns:
            Blocks that it took, mostly none; None: nothing has changed, and `append` will say what it takes.
        """
        table = self.by_id[seq_id]
        if table.num_tokens < table.own_end:
            table.num_tokens += 1
            return ()
        if table.own_end == 0 or len(table.groups) > self.pool.num_free:
            return None
        new = self.allocate(len(table.groups), [(seq_id, 1)])
        for blocks, block_id in zip(table.groups, new, strict=True):
            blocks.append(block_id)
        table.num_tokens += 1
        table.own_end += self.block_size
        if new:
            self.log.add("allocated", seq_id, new)
        return new

    def append_within(self, seq_ids: Sequence[int]) -> bool:
        """Grows different sequences by a token each, if all have room in blocks of their own; else nothing changes."""
        tables = [self.by_id[seq_id] for seq_id in seq_ids]
        if any(table.num_tokens >= table.own_end for table in tables):
            return False
        for table in tables:
            table.num_tokens += 1
        return True

    def append_need(self, requests: Sequence[tuple[int, int]]) -> int:
        """Blocks that `append` would take for these requests; for swapped sequences: once they are back."""
        needed = 0
        writers: dict[tuple[bool, int], int] = {}  # partial block -> how many of its holders will write into it
        for seq_id, n in requests:
            table = self.get(seq_id)
            needed += self._new_blocks(table, n) * len(table.groups)
            if self._has_partial_block(table):
                for blocks in table.groups:
                    block = table.is_swapped, blocks[-1]
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
        self._check_append(requests)
        needed = self.append_need(requests)
        fresh = iter(self.allocate(needed, requests))
        copies: list[tuple[int, int]] = []
        for seq_id, n in requests:
            table = self.by_id[seq_id]
            if table.borrowed_from is not None:
                self.note_beginning(seq_id, table)
            if table.num_tokens == 0:
                table.cache_epoch = self.pool.cache_epoch
            elif self._has_partial_block(table):
                for blocks in table.groups:
                    last = blocks[-1]
                    if self.pool.ref_count(last) > 1:
                        blocks[-1] = next(fresh)
                        copies.append((last, blocks[-1]))
                        self.pool.decref(last)
                        self.log.add("copied", seq_id, last, blocks[-1])
                    else:
                        self.pool.drop_hash(last)
            num_new = self._new_blocks(table, n)
            if num_new == 1 and len(table.groups) == 1:  # a decode: no list is made for it
                table.blocks.append(next(fresh))
                self.log.add("allocated", seq_id, table.blocks[-1])
            elif num_new:
                start = len(table.blocks)
                for blocks in table.groups:
                    blocks.extend(islice(fresh, num_new))
                self.log.add("allocated", seq_id, table.held(start))
            table.num_tokens += n
            table.own_end = -(-table.num_tokens // self.block_size) * self.block_size
        self.num_cow_copies += len(copies)
        return copies

    def check_invariants(self) -> None:
        """Asserts that tables and pool agree. O(num_blocks + blocks in tables).

        Raises:
            AssertionError: they do not; the message says where.
        """
        check_tables(self)

    # Helpers

    def _check_append(self, requests: Sequence[tuple[int, int]]) -> None:
        listed: set[int] = set()
        for seq_id, n in requests:
            if n < 1:
                raise ValueError(f"cannot append {n} tokens to sequence {seq_id}")
            if seq_id in listed:
                raise ValueError(f"sequence {seq_id} is listed twice in one append")
            if self.get(seq_id).is_swapped:
                raise ValueError(f"sequence {seq_id} is swapped out")
            listed.add(seq_id)

    def _check_new(self, seq_id: int) -> None:
        if seq_id in self.by_id:
            raise ValueError(f"sequence {seq_id} exists already")

    def _has_partial_block(self, table: BlockTable) -> bool:
        return table.num_tokens % self.block_size != 0

    def _new_blocks(self, table: BlockTable, n: int) -> int:
        """Blocks to add to each group's table so that `n` more tokens fit."""
        return -(-(table.num_tokens + n) // self.block_size) - len(table.blocks)
