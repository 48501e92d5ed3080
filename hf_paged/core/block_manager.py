"""Block tables: which blocks of the pool hold a sequence's K/V, how they are shared, and when they are copied.

Only the standard library: tables hold block ids and token counts; block copies are returned as data for
`kv_cache.py` to execute. Token `i` of a sequence lies, for the layers of a group, in block `table[i // block_size]` of
that group's table, at offset `i % block_size`.

Blocks are shared by `fork` and by `match_prefix`. A shared block sits at the same position in all its tables and is
only ever read: `append` is the one place where a block that already holds tokens gets ready to be written, so it is
the one place that copies a block others still hold, or takes back the hash of one that was full and has been cropped.

A group whose layers see a window gives back blocks that no later query reads (`slide`). Their places in the table stay.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from hf_paged.core.block_pool import BlockPool
from hf_paged.core.block_table import GONE, NO_EPOCH, PREFIX_CACHE, BlockTable, ExtraKey, Offer
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.event_log import EventLog


class BlockManager:
    """Block tables of all sequences over one pool. Sequences are known by ids of the caller's choice.

    Every method that takes a `seq_id` raises `ValueError` for one that it doesn't know. Not thread-safe: one owner.

    Args:
        num_blocks: size of the pool, in blocks.
        block_size: slots (tokens) a block.
        enable_prefix_caching: when False, `commit` and `match_prefix` do nothing and return 0.
        num_swap_blocks: size of the CPU pool that swapped sequences go to.
        log: is told of every block that is taken, shared or given back; by default one of the manager's own.
        windows: of each group of layers, the tokens that a query sees, itself included; None: all before it.

    Attributes:
        least_chunk: tokens of a prompt that a step is to compute at least, if there are so many.
        takes_snapshots: whether a prefix is only found where `snapshot` was called.
        windows: as given.
        slides_at: where a window's edge comes to a block's: numbers of tokens, modulo the block size, at which a
            sequence that grows by single tokens is to `slide`. Empty without windows.
        pool: the `BlockPool`, with its counters.
        swap_pool: the blocks in CPU memory; `None` without swap space.
        log: the `EventLog`.
        choose: `Policy.blocks`, if a policy has a choice of its own; `append` asks it, when it takes any.
        num_cow_copies: block copies that `append` has asked for.
        prefix_query_tokens, prefix_hit_tokens: tokens given to `match_prefix`, and found by it.

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
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.windows = tuple(windows)
        self._has_several = len(windows) > 1
        self._sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._full = [group for group, window in enumerate(windows) if window is None]
        self.slides_at = frozenset((window - 1) % block_size for _, window in self._sliding)
        self.pool = BlockPool(num_blocks)
        self.swap_pool = BlockPool(num_swap_blocks) if num_swap_blocks else None
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.log = log if log is not None else EventLog()
        self.choose: Callable[[Sequence[tuple[int, int]]], list[int] | None] | None = None
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

    def block_table(self, seq_id: int, group: int = 0) -> list[int]:
        """The sequence's block ids in a group of layers, as they are now; -1 for those given back."""
        return self.blocks(seq_id, group).tolist()

    def block_tables(self, seq_id: int) -> list[list[int]]:
        """The same of all groups."""
        return [blocks.tolist() for blocks in self._table(seq_id).groups]

    def blocks(self, seq_id: int, group: int = 0) -> array[int]:
        """The same as int32 numbers, and live: read them at once, keep no view (a table that is viewed can't grow)."""
        table = self._table(seq_id)
        return table.groups[group] if group else table.blocks

    def held_blocks(self, seq_id: int, start: int = 0) -> list[int]:
        """The blocks that the sequence holds in all groups, from position `start` of its tables on."""
        return self._table(seq_id).held(start)

    def all_blocks(self, seq_id: int) -> list[int]:
        """All blocks that the sequence holds, those of its state among them."""
        return self._table(seq_id).everything()

    def most_blocks(self, num_tokens: int, chunk: int, shared: int = 0) -> int:
        """Blocks that a sequence holds at most while it grows to `num_tokens` tokens by at most `chunk` a step.

        Args:
            num_tokens: of the sequence.
            chunk: tokens a step.
            shared: leading tokens whose full blocks are others' anyway: those are not counted.
        """
        positions = -(-num_tokens // self.block_size) - shared // self.block_size
        in_windows = sum([min(positions, self._widest(window, chunk)) for _, window in self._sliding])
        return positions * len(self._full) + in_windows

    def _widest(self, window: int, chunk: int) -> int:
        """Blocks that a step of `chunk` tokens reads and writes at most."""
        return -(-(window - 1 + chunk) // self.block_size) + 1

    def tables(self, seq_ids: Sequence[int]) -> list[list[array[int]]]:
        """`blocks` of these sequences, for each group of layers."""
        tables = self._tables
        if not self.windows:
            return []
        others = range(1, len(self.windows))
        first = [tables[seq_id].blocks for seq_id in seq_ids]
        return [first, *([tables[seq_id].groups[group] for seq_id in seq_ids] for group in others)]

    def states(self, seq_ids: Sequence[int]) -> array[int]:
        """Blocks of the states of these sequences, one after another: int32, a copy."""
        return array("i")

    @property
    def num_stored_tokens(self) -> int:
        """Distinct slots that hold a token of a live sequence, a shared block counted once. O(tables)."""
        fill: dict[int, int] = {}  # of the blocks that are the last of a table
        holders: Counter[int] = Counter()
        for table in self._tables.values():
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

    # A sequence's life

    def add(self, seq_id: int) -> None:
        """Begins a sequence with an empty table. Raises `ValueError` if the id is taken."""
        self._check_new(seq_id)
        self._tables[seq_id] = BlockTable.empty(len(self.windows))

    def fork(self, parent_id: int, child_id: int) -> None:
        """Begins a sequence that shares all of the parent's blocks. Takes no block and copies no data.

        Raises:
            ValueError: the parent is unknown, or the child's id is taken.
        """
        parent = self._table(parent_id)
        self._check_new(child_id)
        self._note_beginning(parent_id, parent)
        pool = self._pool_of(parent)
        held = parent.everything()
        for block_id in held:
            pool.incref(block_id)
        self._tables[child_id] = parent.copy()
        if held and not parent.is_swapped:
            self.log.add("shared", child_id, held, parent_id)

    def share_prefix(self, seq_id: int, sibling_id: int, num_tokens: int) -> None:
        """Gives an empty sequence the blocks of another one's first `num_tokens` tokens. `unmatch` takes that back.

        Raises:
            ValueError: the sequence is not empty, or the other one has not (or, behind its windows, not any more) so
                many tokens in the pool; see `can_share`.
        """
        table, sibling = self._table(seq_id), self._table(sibling_id)
        if table.num_tokens > 0:
            raise ValueError(f"sequence {seq_id} has {table.num_tokens} tokens; only an empty one can share a prefix")
        if not self.can_share(sibling_id, num_tokens):
            raise ValueError(f"sequence {sibling_id} has no {num_tokens} tokens in the pool to share")
        self._note_beginning(sibling_id, sibling)
        self._tables[seq_id] = shared = sibling.copy()
        shared.cut(-(-num_tokens // self.block_size))
        self.forget_hashes(seq_id, num_tokens)
        for block_id in shared.everything():
            self.pool.incref(block_id)
        shared.num_tokens = shared.num_read = num_tokens
        shared.keeps_from, shared.borrowed_from = table.keeps_from, sibling_id

    def can_share(self, sibling_id: int, num_tokens: int) -> bool:
        """Whether a sequence may go on behind the first `num_tokens` tokens of another one, with its blocks."""
        sibling = self._table(sibling_id)
        return not sibling.is_swapped and 0 <= num_tokens <= sibling.num_tokens and self._reads(sibling, num_tokens)

    def free(self, seq_id: int) -> None:
        """Ends a sequence. Its hashed blocks stay findable until the pool needs them."""
        table = self._table(seq_id)
        del self._tables[seq_id]
        self._release(seq_id, table, table.everything())

    def restart(self, seq_id: int) -> None:
        """Ends a sequence and begins another one under its id."""
        keeps = self._table(seq_id).keeps_from is not None
        self.free(seq_id)
        self.add(seq_id)
        if keeps:
            self.keep_past(seq_id)

    def evict(self, seq_id: int) -> None:
        """Releases all blocks of a sequence whose tokens stay what they are: it begins anew, its hashes are kept."""
        table = self._table(seq_id)
        self._release(seq_id, table, table.everything())
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
        table = self._table(seq_id)
        if not 0 <= num_tokens <= table.num_tokens:
            raise ValueError(f"cannot crop sequence {seq_id} of {table.num_tokens} tokens to {num_tokens}")
        if not self._reads(table, num_tokens):
            raise ValueError(f"cannot crop sequence {seq_id} to {num_tokens} tokens: its windows are past them")
        self._note_beginning(seq_id, table)
        released = table.cut(-(-num_tokens // self.block_size))
        # A last block that is now partial keeps its own hash: its content stays valid until append() writes into it.
        self.forget_hashes(seq_id, num_tokens)
        table.num_tokens = num_tokens
        table.num_read = min(table.num_read, num_tokens)
        self._release(seq_id, table, released)
        table.is_swapped &= num_tokens > 0
        if table.keeps_from is not None:
            table.keeps_from = num_tokens
            self.slide(seq_id, table.num_read)

    def can_crop(self, seq_id: int, num_tokens: int) -> bool:
        """Whether the blocks are still there that a query behind `num_tokens` tokens reads."""
        return self._reads(self._table(seq_id), num_tokens)

    # Windows

    def slide(self, seq_id: int, num_tokens: int) -> None:
        """Gives back blocks that no query from token `num_tokens` on reads. What `offer` returned waits for `publish`.

        To be called when all queries before are on their way, which is often enough after a chunk of several tokens
        and at the numbers of `slides_at`.
        """
        table = self._table(seq_id)
        if not table.is_swapped:
            table.num_read = num_tokens
            self._slide(seq_id, table)

    def _slide(self, seq_id: int, table: BlockTable) -> None:
        query = table.num_read if table.keeps_from is None else min(table.num_read, table.keeps_from)
        end = table.num_settled if table.num_settled < table.num_committed else len(table.blocks)
        released: list[int] = []
        for group, window in self._sliding:
            behind = min(end, self._num_behind(window, query))
            if behind > table.num_gone[group]:
                self._note_beginning(seq_id, table)
                released += table.give_up(group, behind)
        if released:
            self._release(seq_id, table, released)

    def keep_past(self, seq_id: int) -> None:
        """From now on nothing is given back that a query of now or later reads, until a `crop`, and so on after it."""
        table = self._table(seq_id)
        table.keeps_from = table.num_tokens

    def _num_behind(self, window: int, query: int) -> int:
        """Blocks that lie wholly behind the window of the query of token `query`."""
        return max(0, query - window + 1) // self.block_size

    def _reads(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether all blocks are there that the query behind `num_tokens` tokens reads."""
        return all(table.num_gone[g] <= self._num_behind(window, num_tokens) for g, window in self._sliding)

    def forget_hashes(self, seq_id: int, num_tokens: int) -> None:
        """To be told when the tokens of a sequence change from token `num_tokens` on."""
        table = self._table(seq_id)
        del table.block_hashes[num_tokens // self.block_size :]
        table.num_committed = min(table.num_committed, len(table.block_hashes))
        table.num_settled = min(table.num_settled, table.num_committed)

    # Growing

    def blocks_needed(self, seq_id: int, n: int, chunk: int | None = None) -> int:
        """Blocks that appending `n` tokens to this sequence alone would take, a copy of its last block included.

        Args:
            seq_id: the sequence.
            n: tokens.
            chunk: they come by at most so many a step, between which it slides; None: all at once.

        Raises:
            ValueError: `n` is negative.
        """
        table = self._table(seq_id)
        if n < 0:
            raise ValueError(f"cannot append {n} tokens to sequence {seq_id}")
        if n == 0:
            return 0
        num_copies = 0
        if self._has_partial_block(table):
            num_copies = sum([self.pool.ref_count(blocks[-1]) > 1 for blocks in table.groups])
        num_new = self._new_blocks(table, n)
        if chunk is None or not self._sliding:
            return num_new * len(table.groups) + num_copies
        needed = num_new * len(self._full) + num_copies
        for group, window in self._sliding:
            held = len(table.groups[group]) - table.num_gone[group]
            needed += max(0, min(held + num_new, self._widest(window, chunk)) - held)
        return needed

    def append_in_place(self, seq_id: int) -> bool:
        """Grows a sequence by one token if its last block has room and is its own: the short way of most decode steps.

        Returns:
            Whether it did.
        """
        table = self._tables[seq_id]
        if table.num_tokens % self.block_size == 0 or not self.pool.is_plain(table.blocks[-1]):
            return False
        if self._has_several and not all(self.pool.is_plain(blocks[-1]) for blocks in table.groups):
            return False
        table.num_tokens += 1
        return True

    def append_need(self, requests: Sequence[tuple[int, int]]) -> int:
        """Blocks that `append` would take for these requests; for swapped sequences: once they are back."""
        needed = 0
        writers: dict[tuple[bool, int], int] = {}  # partial block -> how many of its holders will write into it
        for seq_id, n in requests:
            table = self._table(seq_id)
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
        fresh = iter(self._allocate(needed, requests))
        copies: list[tuple[int, int]] = []
        for seq_id, n in requests:
            table = self._tables[seq_id]
            if table.borrowed_from is not None:
                self._note_beginning(seq_id, table)
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
        self.num_cow_copies += len(copies)
        return copies

    def _check_append(self, requests: Sequence[tuple[int, int]]) -> None:
        listed: set[int] = set()
        for seq_id, n in requests:
            if n < 1:
                raise ValueError(f"cannot append {n} tokens to sequence {seq_id}")
            if seq_id in listed:
                raise ValueError(f"sequence {seq_id} is listed twice in one append")
            if self._table(seq_id).is_swapped:
                raise ValueError(f"sequence {seq_id} is swapped out")
            listed.add(seq_id)

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
            Offer(seq_id, position, blocks[position], table.block_hashes[position], group)
            for position in range(table.num_committed, num_full)
            for group, blocks in enumerate(table.groups)
            if blocks[position] != GONE
        ]
        if not offers and table.num_settled == table.num_committed:  # nothing of these blocks is there any more
            table.num_settled = max(table.num_settled, num_full)
        table.num_committed = max(table.num_committed, num_full)
        return offers

    def publish(self, offers: Iterable[Offer]) -> int:
        """The second half: registers what was offered, and is still where it was. Then what waited for it slides.

        Returns:
            How many blocks were registered.
        """
        registered = 0
        settled: dict[int, BlockTable] = {}
        for offer in offers:
            table = self._tables.get(offer.seq_id)
            if table is None:
                continue
            blocks = table.groups[offer.group]
            if (
                not table.is_swapped
                and table.cache_epoch == self.pool.cache_epoch
                and table.carries(offer)
                and offer.position < len(blocks)
                and blocks[offer.position] == offer.block_id
            ):
                registered += self.pool.set_hash(offer.block_id, self._key(offer.block_hash, offer.group))
            if table.num_settled <= offer.position:
                table.num_settled = min(offer.position + 1, table.num_committed)
                settled[offer.seq_id] = table
        if self._sliding:
            for seq_id, table in settled.items():
                if not table.is_swapped:
                    self._slide(seq_id, table)
        return registered

    def withdraw(self, offers: Sequence[Offer]) -> None:
        """Instead of `publish`: the blocks don't hold what they should. A sequence that has them is never cached.

        O(tables), for what hardly ever happens.
        """
        for table in self._tables.values():  # sequences forked since have them, too
            if any(table.carries(offer) for offer in offers):
                table.cache_epoch = NO_EPOCH
                table.num_settled = table.num_committed

    def snapshot(self, seq_id: int, num_tokens: int) -> None:
        """Told that all that the sequence's layers keep is that of its first `num_tokens` tokens, which it stays for.

        To be called behind `offer`. Says nothing where all layers keep their tokens apart.
        """

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
        num_blocks = self._longest_match(table.block_hashes[: limit // self.block_size])
        for group, window in enumerate(self.windows):
            num_gone = 0 if window is None else self._num_behind(window, num_blocks * self.block_size)
            blocks = table.groups[group]
            blocks.extend([GONE] * num_gone)
            for block_hash in table.block_hashes[num_gone:num_blocks]:
                block_id = self._find(block_hash, group)
                assert block_id is not None
                self.pool.incref(block_id)
                blocks.append(block_id)
            table.num_gone[group] = num_gone
        table.num_committed = table.num_settled = num_blocks
        table.num_tokens = table.num_read = num_blocks * self.block_size
        table.cache_epoch = self.pool.cache_epoch
        table.matched = (len(token_ids), table.num_tokens)
        table.borrowed_from = PREFIX_CACHE
        self.prefix_query_tokens += len(token_ids)
        self.prefix_hit_tokens += table.num_tokens
        return table.num_tokens

    def _longest_match(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest cached prefix: in each group all that the query behind it reads."""
        num_blocks = len(hashes)
        for group in self._full:
            found = (n for n in range(num_blocks) if self._find(hashes[n], group) is None)
            num_blocks = next(found, num_blocks)
        while num_blocks:
            missing = -1
            for group, window in self._sliding:
                first = self._num_behind(window, num_blocks * self.block_size)
                # The last one that is missing: no prefix that reaches beyond it, and not a window, will do.
                lacking = (n for n in range(num_blocks - 1, first - 1, -1) if self._find(hashes[n], group) is None)
                missing = max(missing, next(lacking, -1))
            if missing < 0:
                break
            num_blocks = missing
        return num_blocks

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
            self.pool.free(table.cut(0))
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
        positions: dict[tuple[bool, int], tuple[int, int]] = {}
        for seq_id, table in self._tables.items():
            self._check_table(f"sequence {seq_id}", table)
            holders[table.is_swapped].update(table.everything())
            for group, blocks in enumerate(table.groups):
                for place in enumerate(blocks[table.num_gone[group] :], table.num_gone[group]):
                    known = positions.setdefault((table.is_swapped, place[1]), (group, place[0]))
                    assert known == (group, place[0]), (
                        f"sequence {seq_id}: block {place[1]} is at group and position {(group, place[0])}, "
                        f"elsewhere at {known}"
                    )
        for swapped, pool in ((False, self.pool), (True, self.swap_pool)):
            for block_id in range(pool.num_blocks if pool is not None else 0):
                assert pool is not None
                count, held = pool.ref_count(block_id), holders[swapped][block_id]
                assert count == held, f"block {block_id}: ref count {count}, held by {held} tables"
        assert self.num_stored_tokens <= self.num_allocated_slots, "more tokens stored than slots allocated"

    def _check_table(self, where: str, table: BlockTable) -> None:
        held = table.everything()
        assert len(set(held)) == len(held), f"{where}: holds a block twice: {held}"
        assert (
            table.num_settled
            <= table.num_committed
            <= min(len(table.block_hashes), table.num_tokens // self.block_size)
        ), f"{where}: hash of a partial block"
        assert table.num_read <= table.num_tokens, f"{where}: reads on at {table.num_read} of {table.num_tokens}"
        for group, blocks in enumerate(table.groups):
            num_gone = table.num_gone[group]
            assert len(blocks) == -(-table.num_tokens // self.block_size), (
                f"{where}: {len(blocks)} blocks of {self.block_size} for {table.num_tokens} tokens"
            )
            assert [n for n, block in enumerate(blocks) if block == GONE] == list(range(num_gone)), (
                f"{where}: {num_gone} blocks are gone of {blocks}"
            )
            window = self.windows[group]
            behind = 0 if window is None else self._num_behind(window, table.num_read)
            assert num_gone <= behind, f"{where}: {num_gone} blocks are gone, {behind} lie behind the window"
            if not table.is_swapped:
                for block_id, block_hash in zip(blocks, table.block_hashes[: table.num_committed], strict=False):
                    found = None if block_id == GONE else self.pool.block_hash(block_id)
                    expected = (None, self._key(block_hash, group))
                    assert found in expected, f"{where}: block {block_id}: foreign hash"

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
        return len({block for seq_id in seq_ids for block in self._table(seq_id).everything()})

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
        if swap_pool is None or not all(table.is_swapped or not table.everything() for table in tables):
            raise ValueError(f"not all of the sequences {list(seq_ids)} are swapped out")
        hashes: dict[int, bytes] = {}
        for table in tables:
            if table.cache_epoch == self.pool.cache_epoch:
                for group, blocks in enumerate(table.groups):
                    known = table.block_hashes[table.num_gone[group] : table.num_committed]
                    hashes |= zip(blocks[table.num_gone[group] :], [self._key(each, group) for each in known])
        held = list(dict.fromkeys(block for table in tables for block in table.everything()))
        cached = {b: found for b in held if b in hashes and (found := self.pool.lookup(hashes[b])) is not None}
        if len(held) > self.pool.num_free:  # those found may be free ones themselves
            raise OutOfBlocksError(len(held), self.pool.num_free)
        for found in cached.values():
            self.pool.incref(found)
        missing = [block for block in held if block not in cached]
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
        return list(dict.fromkeys(block for table in tables for block in table.everything()))

    def _move(self, seq_ids: Sequence[int], source: BlockPool, destination: BlockPool, pairs: dict[int, int]) -> None:
        """Rewrites tables from one pool to the other. The new blocks come with one reference each."""
        taken: set[int] = set()
        for seq_id in seq_ids:
            table = self._tables[seq_id]
            old = table.everything()
            for block in old:
                if block in taken:
                    destination.incref(pairs[block])
                taken.add(block)
            for blocks in (*table.groups, table.state):
                blocks[:] = array("i", [pairs.get(block, GONE) for block in blocks])
            source.free(old)
            table.is_swapped = destination is self.swap_pool and bool(old)  # without blocks it is nowhere

    # The log. Blocks in CPU memory are not its business.

    def _note_beginning(self, seq_id: int, table: BlockTable) -> None:
        """What an empty sequence was given is its own from here on."""
        source, table.borrowed_from = table.borrowed_from, None
        if source is None or not (held := table.everything()):
            return
        if source == PREFIX_CACHE:
            self.log.add("prefix_hit", seq_id, held, table.num_tokens)
        else:
            self.log.add("shared", seq_id, held, source)

    def _note_swap(self, kind: str, seq_ids: Sequence[int], num_copies: int) -> None:
        blocks = [block for seq_id in seq_ids for block in self._tables[seq_id].everything()]
        if blocks:
            self.log.add_for_group(kind, self.log.group_of(seq_ids[0]), num_copies, blocks)

    def _allocate(self, n: int, requests: Sequence[tuple[int, int]] = ()) -> list[int]:
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
        """Blocks to add to each group's table so that `n` more tokens fit."""
        return -(-(table.num_tokens + n) // self.block_size) - len(table.blocks)

    def _set_extra_key(self, seq_id: int, table: BlockTable, extra_key: ExtraKey) -> None:
        if table.extra_key is None:
            table.extra_key = extra_key
        elif table.extra_key != extra_key:
            raise ValueError(f"sequence {seq_id} has the extra key {table.extra_key!r}, not {extra_key!r}")

    def _find(self, block_hash: bytes, group: int) -> int | None:
        return self.pool.lookup(self._key(block_hash, group))

    def _key(self, block_hash: bytes, group: int) -> bytes:
        """What a group's block of this content is found by."""
        return block_hash if group == 0 else block_hash + group.to_bytes(2)

    def _next_hash(self, chain: Sequence[bytes], token_ids: Sequence[int], extra_key: ExtraKey) -> bytes:
        """Hash of the block behind `chain`: of its parent's hash (the root's: of the extra key) and its tokens.

        It stands for the whole prefix, so it decides alone on a hit: hence a cryptographic hash.
        """
        start = len(chain) * self.block_size
        parent = chain[-1] if chain else hashlib.sha256(repr(extra_key).encode()).digest()
        return hashlib.sha256(parent + array("q", token_ids[start : start + self.block_size]).tobytes()).digest()
