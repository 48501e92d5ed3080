"""`PrefixCache`: finds full blocks by their content, while a sequence holds them and afterwards."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from hf_paged.core.block_table import GONE, NO_EPOCH, PREFIX_CACHE, BlockTable, ExtraKey, Offer, group_key
from hf_paged.core.block_tables import BlockTables
from hf_paged.core.sequence import GivenToken, Token


class PrefixCache:
    """Blocks of one pool by their content.

    Args:
        tables: of the pool.
        is_enabled: when False, `commit` and `match` do nothing and return 0.

    Attributes:
        is_enabled: as given.
        query_tokens, hit_tokens: tokens given to `match`, and found by it.
    """

    def __init__(self, tables: BlockTables, is_enabled: bool) -> None:
        self._tables = tables
        self.is_enabled = is_enabled
        self.query_tokens = 0
        self.hit_tokens = 0

    def commit(
        self, seq_id: int, token_ids: Sequence[Token], extra_key: ExtraKey = (), num_tokens: int | None = None
    ) -> int:
        """Makes the sequence's full blocks findable by their content, as far as their K/V is written.

        Costs time for the blocks that became full since the last call, however long the sequence is. A sequence that
        holds K/V from before a `reset_prefix_cache` is never cached.

        Args:
            token_ids: the sequence's tokens from its first on.
            num_tokens: of these, those whose K/V is written; all if not given.
            extra_key: what the K/V depends on beside the tokens (adapter, cache salt, weights epoch, position offset):
                values whose `repr` tells them apart. Fixed as long as the sequence has tokens.

        Returns:
            How many blocks were registered; a block whose content is cached in another block is not.

        Raises:
            ValueError: more tokens than the sequence has, or another `extra_key` than before.
        """
        return self.publish(self.offer(seq_id, token_ids, extra_key, num_tokens))

    def offer(
        self, seq_id: int, token_ids: Sequence[Token], extra_key: ExtraKey = (), num_tokens: int | None = None
    ) -> list[Offer]:
        """The first half of `commit`: returns blocks for `publish`, once their content is known to be right."""
        table = self._tables.get(seq_id)
        num_tokens = len(token_ids) if num_tokens is None else num_tokens
        if num_tokens > table.num_tokens:
            raise ValueError(f"cannot commit {num_tokens} tokens of sequence {seq_id}, it has {table.num_tokens}")
        if not self.is_enabled:
            return []
        self._set_extra_key(seq_id, table, extra_key)
        if table.cache_epoch != self._tables.pool.cache_epoch:
            return []
        num_full = num_tokens // self._tables.block_size
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
        """The second half: registers offered blocks that are still in place. Then tables that waited for that slide.

        Returns:
            How many blocks were registered.
        """
        registered = 0
        settled: dict[int, BlockTable] = {}
        for offer in offers:
            table = self._tables.by_id.get(offer.seq_id)
            if table is None:
                continue
            blocks = table.groups[offer.group]
            if (
                not table.is_swapped
                and table.cache_epoch == self._tables.pool.cache_epoch
                and table.carries(offer)
                and offer.position < len(blocks)
                and blocks[offer.position] == offer.block_id
            ):
                registered += self._tables.pool.set_hash(offer.block_id, group_key(offer.block_hash, offer.group))
            if table.num_settled <= offer.position:
                table.num_settled = min(offer.position + 1, table.num_committed)
                settled[offer.seq_id] = table
        if self._tables.sliding:
            for seq_id, table in settled.items():
                if not table.is_swapped:
                    self._tables.slide_table(seq_id, table)
        return registered

    def withdraw(self, offers: Sequence[Offer]) -> None:
        """Instead of `publish`: the blocks don't hold what they should. A sequence that has them is never cached.

        O(tables), for what hardly ever happens.
        """
        for table in self._tables.by_id.values():  # sequences forked since have them, too
            if any(table.carries(offer) for offer in offers):
                table.cache_epoch = NO_EPOCH
                table.num_settled = table.num_committed

    def prompt_hashes(
        self, seq_id: int, token_ids: Sequence[Token], extra_key: ExtraKey, start: int, end: int
    ) -> list[bytes]:
        """Hashes of the full blocks that tokens `[start, end)` of a sequence complete. Empty without prefix caching."""
        table = self._tables.get(seq_id)
        if not self.is_enabled:
            return []
        self._set_extra_key(seq_id, table, extra_key)
        num_full = min(end, len(token_ids)) // self._tables.block_size
        self._extend_hashes(table, token_ids, num_full)
        return table.block_hashes[start // self._tables.block_size : num_full]

    def match(
        self, seq_id: int, token_ids: Sequence[Token], extra_key: ExtraKey = (), max_tokens: int | None = None
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
        table = self._tables.get(seq_id)
        if table.num_tokens > 0:
            raise ValueError(f"sequence {seq_id} has {table.num_tokens} tokens; only an empty one can match a prefix")
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens must not be negative, got {max_tokens}")
        if not self.is_enabled:
            return 0
        self._set_extra_key(seq_id, table, extra_key)
        limit = len(token_ids) - 1 if max_tokens is None else min(max_tokens, len(token_ids) - 1)
        self._extend_hashes(table, token_ids, limit // self._tables.block_size)
        num_blocks = self._longest_match(table.block_hashes[: limit // self._tables.block_size])
        for group, window in enumerate(self._tables.windows):
            num_gone = 0 if window is None else self._tables.num_behind(window, num_blocks * self._tables.block_size)
            blocks = table.groups[group]
            blocks.extend([GONE] * num_gone)
            for block_hash in table.block_hashes[num_gone:num_blocks]:
                block_id = self._find(block_hash, group)
                assert block_id is not None
                self._tables.pool.incref(block_id)
                blocks.append(block_id)
            table.num_gone[group] = num_gone
        table.num_committed = table.num_settled = num_blocks
        table.num_tokens = table.num_read = num_blocks * self._tables.block_size
        table.cache_epoch = self._tables.pool.cache_epoch
        table.matched = (len(token_ids), table.num_tokens)
        table.borrowed_from = PREFIX_CACHE
        self.query_tokens += len(token_ids)
        self.hit_tokens += table.num_tokens
        return table.num_tokens

    def _longest_match(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest cached prefix: in each group all that the query behind it reads."""
        num_blocks = len(hashes)
        for group in self._tables.full:
            found = (n for n in range(num_blocks) if self._find(hashes[n], group) is None)
            num_blocks = next(found, num_blocks)
        while num_blocks:
            missing = -1
            for group, window in self._tables.sliding:
                first = self._tables.num_behind(window, num_blocks * self._tables.block_size)
                # The last one that is missing: no prefix that reaches beyond it, and not a window, will do.
                lacking = (n for n in range(num_blocks - 1, first - 1, -1) if self._find(hashes[n], group) is None)
                missing = max(missing, next(lacking, -1))
            if missing < 0:
                break
            num_blocks = missing
        return num_blocks

    def reset(self) -> int:
        """Forgets all cached content, for when K/V of the same tokens would come out different from now on.

        Live sequences keep their blocks and run on, but nothing of theirs is cached any more.

        Returns:
            How many blocks were findable.
        """
        return self._tables.pool.reset_prefix_cache()

    # Helpers

    def _extend_hashes(self, table: BlockTable, token_ids: Sequence[Token], num_blocks: int) -> None:
        assert table.extra_key is not None
        while len(table.block_hashes) < num_blocks:
            table.block_hashes.append(self._next_hash(table.block_hashes, token_ids, table.extra_key))

    def _set_extra_key(self, seq_id: int, table: BlockTable, extra_key: ExtraKey) -> None:
        if table.extra_key == extra_key:
            return
        if table.num_tokens and table.extra_key is not None:
            raise ValueError(f"sequence {seq_id} has the extra key {table.extra_key!r}, not {extra_key!r}")
        table.extra_key = extra_key
        table.block_hashes.clear()

    def _find(self, block_hash: bytes, group: int) -> int | None:
        return self._tables.pool.lookup(group_key(block_hash, group))

    def _next_hash(self, chain: Sequence[bytes], token_ids: Sequence[Token], extra_key: ExtraKey) -> bytes:
        """Hash of the block behind `chain`: of its parent's hash (the root's: of the extra key) and its tokens.

        It stands for the whole prefix, so it decides alone on a hit: hence a cryptographic hash.
        """
        block_size = self._tables.block_size
        start = len(chain) * block_size
        parent = chain[-1] if chain else hashlib.sha256(repr(extra_key).encode()).digest()
        tokens: Any = token_ids[start : start + block_size]
        try:
            content = array("q", tokens).tobytes()
        except TypeError:
            content = repr([token.digest if isinstance(token, GivenToken) else token for token in tokens]).encode()
        return hashlib.sha256(parent + content).digest()
