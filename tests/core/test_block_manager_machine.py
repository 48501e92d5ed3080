"""Random operations on BlockManager and BlockPool beside a model that knows what every slot must hold.

`World` drives the manager and keeps, next to it: the tokens of every sequence, a physical memory `slots[block][offset]`
that is written as a runner would write it (returned copies first, then the new tokens at their slots), the same for the
CPU pool that sequences are swapped to, and its own idea of what the prefix cache holds. What is written for a token is
not the token but a fingerprint of all that its K/V depends on: everything before it, the extra key and the weights (the
era between two resets). So a missed copy, a block freed too early, a swap to the wrong place or a stale hit shows as a
sequence that does not read back its own content. With several groups of layers every token has a slot in each; those
behind the windows may be gone.

Two drivers share it: hypothesis, which shrinks what it finds, and a seeded random walk, which goes far.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.event_ledger import Ledger
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import OutOfBlocksError

MAX_SEQUENCES = 8
NUM_KEYS = 2
NUM_RANDOM_OPERATIONS = 10_000
OPERATIONS_PER_EPISODE = 250

Content = tuple[int, int, tuple[int, ...]]  # group, extra key and all tokens up to the end of a block
Slot = tuple[int, int] | None  # group and fingerprint
WINDOWS: list[tuple[int | None, ...]] = [(None,), (None,), (None,), (3,), (None, 4), (None, 1), (5, 2), (None, None, 6)]


@dataclass
class Model:
    """What a sequence must look like."""

    key: int
    tokens: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)  # the K/V of each token, as a fingerprint
    num_hashed: int = 0  # leading blocks that were committed or matched
    stale: bool = False  # holds K/V of an earlier era
    swapped: bool = False
    gone: list[int] = field(default_factory=list)  # of each group, the blocks behind its window that were given back
    num_read: int = 0  # no query before this token's will come
    keeps_from: int | None = None  # nor before this one's, until a crop


class World:
    """A manager, its model, and operations whose arguments are any small integers."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching, num_swap_blocks, windows=windows)
        self.windows = windows
        self.swap_pool = self.manager.swap_pool
        self.cpu_slots: list[list[Slot]] = [[None] * block_size for _ in range(num_swap_blocks)]
        self.pool = self.manager.pool
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.models: dict[int, Model] = {}
        self.slots: list[list[Slot]] = [[None] * block_size for _ in range(num_blocks)]
        self.cached: dict[Content, int] = {}
        self.content: dict[int, Content] = {}  # the inverse of `cached`
        self.lru: list[int] = []  # cached blocks that no sequence holds, the next to be evicted first
        self.history = [self._model(0)]  # what was freed lately: prompts worth asking for again
        self.era = 0
        self.next_id = 100
        self.num_operations = 0
        self.query_tokens = self.hit_tokens = 0
        self.last_query = (0, 0)
        self.ledger = Ledger()
        self._old_tables: dict[int, list[int]] = {}  # of sequences that a swap-out is still to release, as they were
        self.events: Counter[str] = Counter()

    # Operations. Each is complete: whatever the arguments, it does something that the manager must answer rightly.

    def add(self, key: int) -> int:
        self.num_operations += 1
        return self._add(key)

    def append(self, wanted: list[tuple[int, list[int]]], commit: bool) -> None:
        """One step of a batch: sequences picked by number, with the tokens that each gets."""
        self.num_operations += 1
        additions = {self._pick(pick): tokens for pick, tokens in wanted}
        additions = {seq_id: tokens for seq_id, tokens in additions.items() if not self.models[seq_id].swapped}
        requests = [(seq_id, len(tokens)) for seq_id, tokens in additions.items()]
        needed = self._expected_need(requests)
        num_free = self.pool.num_free
        if needed > num_free:
            self.events["out of blocks"] += 1
            with self._nothing_changes(), pytest.raises(OutOfBlocksError) as caught:
                self.manager.append(requests)
            assert (caught.value.needed, caught.value.free) == (needed, num_free)
            return
        if len(requests) == 1:
            assert self.manager.blocks_needed(*requests[0]) == needed
            # Token by token never takes more, and a window only counts once.
            assert self.manager.blocks_needed(*requests[0], chunk=1) <= needed
        assert self.manager.append_need(requests) == needed
        in_use, lru = self._in_use(), self.lru.copy()
        copies = self.manager.append(requests)
        assert self.pool.num_free == num_free - needed

        sources, destinations = {source for source, _ in copies}, [destination for _, destination in copies]
        assert len(set(destinations)) == len(destinations) and not sources & set(destinations)
        assert sources <= in_use and not in_use & set(destinations)
        for source, destination in copies:
            self.events["copy-on-write"] += 1
            self.events["last holder keeps the block"] += self.pool.ref_count(source) == 1 < len(requests)
            self._overwritten(destination, in_use)
            self.slots[destination] = self.slots[source].copy()
        for seq_id, tokens in additions.items():
            model = self.models[seq_id]
            if not model.tokens:
                model.stale = False
            for token in tokens:
                self._write(seq_id, token, in_use)
        self._check_evictions(lru)
        for seq_id in additions if commit else ():
            self._commit(seq_id, behind=0)

    def fork(self, pick: int) -> None:
        self.num_operations += 1
        parent_id = self._pick(pick)
        self._make_room(spare=parent_id)
        parent, child_id = self.models[parent_id], self._new_id()
        num_free = self.pool.num_free
        self.manager.fork(parent_id, child_id)
        assert self.pool.num_free == num_free
        self.events["fork"] += 1
        self.models[child_id] = Model(
            parent.key,
            parent.tokens.copy(),
            parent.values.copy(),
            parent.num_hashed,
            parent.stale,
            parent.swapped,
            parent.gone.copy(),
            parent.num_read,
            parent.keeps_from,
        )

    def free(self, pick: int) -> None:
        self.num_operations += 1
        self._free(self._pick(pick))

    def crop(self, pick: int, cut: int) -> None:
        """Cuts off the last `cut` tokens."""
        self.num_operations += 1
        seq_id = self._pick(pick)
        model = self.models[seq_id]
        num_tokens = max(0, len(model.tokens) - cut)
        can_crop = all(gone <= behind for gone, behind in zip(model.gone, self._behind(num_tokens), strict=True))
        assert self.manager.can_crop(seq_id, num_tokens) == can_crop
        if not can_crop:
            self.events["crop beyond a window"] += 1
            with self._nothing_changes(), pytest.raises(ValueError, match="windows"):
                self.manager.crop(seq_id, num_tokens)
            return
        self.events["crop behind a window"] += any(model.gone)
        held, swapped = self._held(seq_id), model.swapped
        del model.tokens[num_tokens:], model.values[num_tokens:]
        model.num_hashed = min(model.num_hashed, num_tokens // self.block_size)
        model.num_read = min(model.num_read, num_tokens)
        if model.keeps_from is not None:
            model.keeps_from = num_tokens
        self.manager.crop(seq_id, num_tokens)
        kept = -(-num_tokens // self.block_size) * len(self.windows) - sum(model.gone)
        model.swapped &= num_tokens > 0
        if not swapped:
            self._released(held[kept:], model)
            if model.keeps_from is not None:
                self._slid(seq_id, held[:kept])

    def slide(self, pick: int) -> None:
        """All queries of the sequence's tokens are on their way."""
        self.num_operations += 1
        seq_id = self._pick(pick)
        model, held = self.models[seq_id], self._held(seq_id)
        self.manager.slide(seq_id, len(model.tokens))
        if not model.swapped:
            model.num_read = len(model.tokens)
            self._slid(seq_id, held)

    def keep_past(self, pick: int) -> None:
        self.num_operations += 1
        seq_id = self._pick(pick)
        model, held = self.models[seq_id], self._held(seq_id)
        self.manager.keep_past(seq_id)
        model.keeps_from = len(model.tokens)
        if not model.swapped:
            self._slid(seq_id, held)

    def _slid(self, seq_id: int, held: list[int]) -> None:
        model = self.models[seq_id]
        query = model.num_read if model.keeps_from is None else min(model.num_read, model.keeps_from)
        old, model.gone = model.gone, [*map(max, model.gone, self._behind(query))]
        size, num_groups = self.block_size, len(self.windows)
        columns: dict[int, list[int]] = {}  # of each position, the blocks held there
        blocks = iter(held)
        for position in range(-(-len(model.tokens) // size)):
            columns[position] = [next(blocks) if position >= old[g] else -1 for g in range(num_groups)]
        released = [columns[position][g] for g in range(num_groups) for position in range(old[g], model.gone[g])]
        self.events["slide"] += bool(released)
        self.events["slide over shared blocks"] += any(self.pool.ref_count(block) for block in released)
        self._released(released, model)

    def _behind(self, query: int) -> list[int]:
        """The blocks of each group that a query does not see."""
        size = self.block_size  # the last token behind the window is the `window`-th before the query
        return [0 if window is None else max(0, query - window + 1) // size for window in self.windows]

    def commit(self, pick: int, behind: int) -> None:
        """Commits all tokens but the last `behind`."""
        self.num_operations += 1
        seq_id = self._pick(pick)
        if not self.models[seq_id].swapped:
            self._commit(seq_id, behind)

    def _commit(self, seq_id: int, behind: int) -> None:
        model = self.models[seq_id]
        num_tokens = max(0, len(model.tokens) - behind)
        expected = 0
        if self.caching and not model.stale:
            for position in range(model.num_hashed, num_tokens // self.block_size):
                for group, gone in enumerate(model.gone):
                    if position < gone:
                        continue
                    content = (group, model.key, tuple(model.tokens[: (position + 1) * self.block_size]))
                    block_id = self.manager.block_table(seq_id, group)[position]
                    if content not in self.cached:
                        self.cached[content] = block_id
                        self.content[block_id] = content
                    expected += self.cached[content] == block_id
                    self.events["duplicate content"] += self.cached[content] != block_id
                model.num_hashed = position + 1
        self.events["commit of a stale sequence"] += model.stale
        if behind % 2:
            assert self.manager.prefix.commit(seq_id, model.tokens, (model.key,), num_tokens) == expected
        else:
            assert self.manager.prefix.commit(seq_id, model.tokens[:num_tokens], (model.key,)) == expected
        hashes = self.manager.prefix.prompt_hashes(seq_id, model.tokens, (model.key,), 0, num_tokens)
        assert len(hashes) == (num_tokens // self.block_size if self.caching else 0)
        if not model.stale and self.caching:
            sizes = range(self.block_size, len(hashes) * self.block_size + 1, self.block_size)
            contents = [(0, model.key, tuple(model.tokens[:size])) for size in sizes]
            assert [self.pool.lookup(block_hash) for block_hash in hashes] == [self.cached.get(c) for c in contents]

    def append_token(self, pick: int, token: int) -> None:
        """The short way to append one token, or a refusal that changes nothing."""
        self.num_operations += 1
        seq_id = self._pick(pick)
        model, tables = self.models[seq_id], self.manager.block_tables(seq_id)
        is_partial = len(model.tokens) % self.block_size > 0
        last = {table[-1] for table in tables if is_partial}
        is_shared = any(last & {*self._held(other)} for other in self._resident() if other != seq_id)
        num_free, in_use, lru = self.pool.num_free, self._in_use(), self.lru.copy()
        needed = 0 if is_partial else len(tables)
        if model.swapped or not model.tokens or is_shared or last & {*self.content} or needed > num_free:
            with self._nothing_changes():
                assert self.manager.append_token(seq_id) is None
            return
        new = self.manager.append_token(seq_id)
        if new is None:  # what was shared or found may be its own again: `append` looks
            return
        assert self.pool.num_free == num_free - needed
        assert [*new] == [table[-1] for table in self.manager.block_tables(seq_id)][:needed]
        self.events["append to a block of its own" if is_partial else "append of a block"] += 1
        self._write(seq_id, token, in_use)
        self._check_evictions(lru)

    def append_within(self, picks: list[int], token: int) -> None:
        """A token each of some sequences, if all write to blocks of their own."""
        self.num_operations += 1
        seq_ids = list(dict.fromkeys(map(self._pick, picks)))
        num_free, in_use = self.pool.num_free, self._in_use()
        counts = [len(self.models[seq_id].tokens) for seq_id in seq_ids]
        done = self.manager.append_within(seq_ids)
        assert [self.manager.num_tokens(seq_id) for seq_id in seq_ids] == [count + done for count in counts]
        assert self.pool.num_free == num_free
        if not done:
            return
        for seq_id in seq_ids:
            model, last = self.models[seq_id], {table[-1] for table in self.manager.block_tables(seq_id)}
            assert len(model.tokens) % self.block_size > 0 and not model.swapped and not last & {*self.content}
            self._write(seq_id, token, in_use)
        self.events["append of several to blocks of their own"] += len(seq_ids) > 1

    def _check_evictions(self, lru: list[int]) -> None:
        num_evicted = len(lru) - len(self.lru)
        assert self.lru == lru[num_evicted:], "evicted in the wrong order"
        assert num_evicted == 0 or not self.pool.num_free - self.pool.num_cached_free, "evicted without need"

    def evict(self, pick: int, comes_back: bool) -> None:
        """A sequence loses its blocks but not its tokens, of which it may find some again."""
        self.num_operations += 1
        seq_id = self._pick(pick)
        model, table = self.models[seq_id], self._held(seq_id)
        tokens = model.tokens
        self.manager.evict(seq_id)
        self._released(table, model, ends=seq_id)
        assert self.manager.block_table(seq_id) == [] and self.manager.num_tokens(seq_id) == 0
        self.models[seq_id] = self._model(model.key, model.keeps_from)
        self.events["eviction of a sequence"] += bool(table)
        if comes_back and tokens:
            self._match(seq_id, tokens, None)
        else:
            self.manager.forget_hashes(seq_id, 0)  # its tokens are others from the first on: so are those it keeps
            self.models[seq_id].keeps_from = None if model.keeps_from is None else 0

    # Swap

    def swap_out(self, picks: list[int]) -> None:
        self.num_operations += 1
        seq_ids = [s for s in dict.fromkeys(self._pick(pick) for pick in picks) if not self.models[s].swapped]
        blocks = {block for seq_id in seq_ids for block in self._held(seq_id)}
        if self.swap_pool is None:
            assert not self.manager.swap.has_room(seq_ids)
            with self._nothing_changes(), pytest.raises(ValueError):
                self.manager.swap.move_out(seq_ids)
            return
        fits = len(blocks) <= self.swap_pool.num_free
        assert self.manager.swap.has_room(seq_ids) == fits
        if not fits:
            self.events["out of CPU blocks"] += 1
            with self._nothing_changes(), pytest.raises(OutOfBlocksError):
                self.manager.swap.move_out(seq_ids)
            return
        tables = [self._held(seq_id) for seq_id in seq_ids]
        num_swapped = self.swap_pool.num_in_use
        pairs = self.manager.swap.move_out(seq_ids)
        assert {source for source, _ in pairs} == blocks and len(pairs) == len(blocks), "sharing is lost"
        assert self.swap_pool.num_in_use == self.manager.swap.num_in_use == num_swapped + len(blocks)
        for source, destination in pairs:
            self.cpu_slots[destination] = self.slots[source].copy()
        self._old_tables = dict(zip(seq_ids, tables))
        for seq_id, table in zip(seq_ids, tables):
            assert self._held(seq_id) == [dict(pairs)[block] for block in table]
            self._released(table, self.models[seq_id], ends=seq_id)
            self.models[seq_id].swapped = bool(table)
        self._old_tables = {}
        self.events["swap-out"] += bool(pairs)
        self.events["swap-out of shared blocks"] += sum(map(len, tables)) > len(blocks)

    def swap_in(self, picks: list[int]) -> None:
        self.num_operations += 1
        wanted = dict.fromkeys(self._pick(pick) for pick in picks)
        seq_ids = [s for s in wanted if self.models[s].swapped or not self.models[s].tokens]
        tables = {seq_id: self._held(seq_id) for seq_id in seq_ids}
        blocks = {block for table in tables.values() for block in table}
        if self.swap_pool is None or not blocks:
            return
        assert self.manager.swap.need(seq_ids) == len(blocks)
        if len(blocks) > self.pool.num_free:
            self.events["out of blocks for a swap-in"] += 1
            with self._nothing_changes(), pytest.raises(OutOfBlocksError):
                self.manager.swap.move_in(seq_ids)
            return
        contents: dict[int, Content] = {}
        for seq_id in tables:
            model = self.models[seq_id]
            for group, table in enumerate(self.manager.block_tables(seq_id)):
                for position in range(model.gone[group], 0 if model.stale else model.num_hashed):
                    tokens = tuple(model.tokens[: (position + 1) * self.block_size])
                    contents[table[position]] = (group, model.key, tokens)
        found = {block: self.cached[content] for block, content in contents.items() if content in self.cached}
        in_use, shared = self._in_use(), Counter(block for block in blocks for t in tables.values() if block in t)
        self.lru = [block_id for block_id in self.lru if block_id not in found.values()]
        copies = self.manager.swap.move_in(seq_ids)
        assert {source for source, _ in copies} == blocks - set(found), "what is cached need not be copied"
        for source, destination in copies:
            self._overwritten(destination, in_use)
            self.slots[destination] = self.cpu_slots[source].copy()
        for source, destination in copies:
            if source in contents and contents[source] not in self.cached:
                self.cached[contents[source]] = destination
                self.content[destination] = contents[source]
        places = dict(copies) | found
        for seq_id, table in tables.items():
            assert self._held(seq_id) == [places[block] for block in table]
            self.models[seq_id].swapped = False
        self.events["swap-in"] += 1
        self.events["swap-in of shared blocks"] += max(shared.values()) > 1
        self.events["swap-in to cached blocks"] += bool(found)

    def match(self, remembered: int, other_key: bool, cut: int, suffix: list[int], max_tokens: int | None) -> None:
        """A new sequence whose prompt is a beginning of another one's, live or gone, and some tokens of its own."""
        self.num_operations += 1
        known = [*self.history, *self.models.values()]
        source = known[remembered % len(known)]
        key = (source.key + other_key) % NUM_KEYS
        prompt = source.tokens[: max(0, len(source.tokens) - cut)] + suffix
        empty = [seq_id for seq_id, model in self.models.items() if not model.tokens and model.key == key]
        seq_id = empty[0] if empty else self._add(key)
        self._match(seq_id, prompt, max_tokens)
        if cut % 3 == 2:
            self._unmatch(seq_id)

    def _unmatch(self, seq_id: int) -> None:
        """The sequence was not let in after all."""
        model, table = self.models[seq_id], self._held(seq_id)
        self.manager.unmatch(seq_id)
        self.manager.forget_hashes(seq_id, 0)
        self._released(table, model, ends=seq_id)
        self.models[seq_id] = self._model(model.key, model.keeps_from)
        self.query_tokens -= self.last_query[0]
        self.hit_tokens -= self.last_query[1]
        self.events["match taken back"] += bool(table)
        with self._nothing_changes():
            self.manager.unmatch(seq_id)  # there is nothing more to take back

    def _match(self, seq_id: int, prompt: list[int], max_tokens: int | None) -> None:
        model, key = self.models[seq_id], self.models[seq_id].key
        limit = len(prompt) - 1 if max_tokens is None else min(len(prompt) - 1, max_tokens)
        num_blocks, groups = self._longest_match(key, prompt, limit)
        blocks = [block for group in groups for block in group if block >= 0]
        revived = set(blocks) & set(self.lru)
        self.lru = [block_id for block_id in self.lru if block_id not in revived]
        num_matched = self.manager.prefix.match(seq_id, prompt, (key,), max_tokens)
        self.manager.forget_hashes(seq_id, num_matched)  # other tokens than the prompt's may follow

        assert self.manager.block_tables(seq_id) == groups
        assert num_matched == num_blocks * self.block_size
        for token in prompt[:num_matched]:
            model.values.append(self._value(model.values, token, key))
        model.tokens = prompt[:num_matched]
        model.num_hashed = num_blocks
        model.gone, model.num_read = self._behind(num_matched), num_matched
        self.events["prefix hit behind a window"] += any(model.gone)
        model.stale = False
        self.last_query = (len(prompt) * self.caching, num_matched)
        self.query_tokens += self.last_query[0]
        self.hit_tokens += self.last_query[1]
        self.events["prefix hit"] += num_matched > 0
        self.events["cached free block revived"] += bool(revived)

    def _longest_match(self, key: int, prompt: list[int], limit: int) -> tuple[int, list[list[int]]]:
        """Blocks of the longest prefix of which each group's cached blocks are all that the next query sees."""
        for num_blocks in range(max(limit, 0) // self.block_size, 0, -1):
            ends = range(self.block_size, num_blocks * self.block_size + 1, self.block_size)
            contents = [[(group, key, tuple(prompt[:end])) for end in ends] for group in range(len(self.windows))]
            behind = self._behind(num_blocks * self.block_size)
            if all(content in self.cached for own, gone in zip(contents, behind) for content in own[gone:]):
                return num_blocks, [
                    [-1] * gone + [self.cached[content] for content in own[gone:]]
                    for own, gone in zip(contents, behind, strict=True)
                ]
        return 0, [[] for _ in self.windows]

    def reset(self) -> None:
        self.num_operations += 1
        self.events["reset of a filled cache"] += bool(self.cached)
        assert self.manager.prefix.reset() == len(self.cached)
        self.cached.clear()
        self.content.clear()
        self.lru.clear()
        self.era += 1
        for model in self.models.values():
            model.stale = bool(model.tokens)

    def misuse(self, pick: int, kind: int) -> None:
        self.num_operations += 1
        seq_id = self._pick(pick)
        num_tokens, manager = len(self.models[seq_id].tokens), self.manager
        calls = [
            lambda: manager.append([(seq_id, 1), (seq_id, 1)]),
            lambda: manager.append([(seq_id, 1), (1, 1)]),
            lambda: manager.append([(seq_id, 0)]),
            lambda: manager.add(seq_id),
            lambda: manager.fork(seq_id, seq_id),
            lambda: manager.fork(1, 2),
            lambda: manager.free(1),
            lambda: manager.crop(seq_id, num_tokens + 1),
            lambda: manager.crop(seq_id, -1),
            lambda: manager.prefix.commit(seq_id, [0] * (num_tokens + 1)),
            lambda: manager.prefix.match(seq_id, [0], max_tokens=-1),
            lambda: manager.swap.move_out([seq_id, 1]),
            lambda: manager.append([(seq_id, 1)] if self.models[seq_id].swapped else [(1, 1)]),
            lambda: manager.swap.move_out([seq_id] if self.models[seq_id].swapped else [1]),
            lambda: manager.swap.move_in([seq_id] if num_tokens and not self.models[seq_id].swapped else [1]),
            lambda: self.pool.allocate(-1),
            lambda: self.pool.decref(self.pool.num_blocks),
        ]
        with self._nothing_changes(), pytest.raises(ValueError):
            calls[kind % len(calls)]()

    # What must hold between operations

    def check(self) -> None:
        manager, size = self.manager, self.block_size
        manager.check_invariants()
        self.ledger.follow(manager)
        assert list(manager.by_id) == list(self.models)
        stored: set[tuple[int, int]] = set()
        swapped: set[int] = set()
        for seq_id, model in self.models.items():
            assert seq_id in manager and manager.num_tokens(seq_id) == len(model.tokens)
            slots = self.cpu_slots if model.swapped else self.slots
            for group, table in enumerate(manager.block_tables(seq_id)):
                first = model.gone[group] * size
                assert table[: model.gone[group]] == [-1] * model.gone[group]
                places = [(table[i // size], i % size) for i in range(first, len(model.tokens))]
                expected = [(group, value) for value in model.values[first:]]
                assert [slots[block_id][offset] for block_id, offset in places] == expected, f"sequence {seq_id}"
                if model.swapped:
                    swapped.update(table[model.gone[group] :])
                else:
                    stored.update(places)
        assert manager.swap.num_in_use == len(swapped)
        assert manager.num_stored_tokens == len(stored)
        in_use = {block_id for block_id, _ in stored}
        assert manager.num_allocated_slots == len(in_use) * size
        assert self.pool.num_in_use == len(in_use)
        hashed = {block_id for block_id in range(self.pool.num_blocks) if self.pool.block_hash(block_id) is not None}
        assert hashed == set(self.content), "the prefix cache holds other blocks than it should"
        assert self.pool.num_cached_free == len(self.lru) and set(self.lru) == hashed - in_use
        assert self.pool.num_evictions == self.events["eviction"]
        assert manager.num_cow_copies == self.events["copy-on-write"]
        assert (manager.prefix.query_tokens, manager.prefix.hit_tokens) == (self.query_tokens, self.hit_tokens)

    def drain(self) -> None:
        """Ends every sequence: nothing may stay in use, and every block can be had."""
        for seq_id in list(self.models):
            self._free(seq_id)
        self.check()
        assert self.pool.num_in_use == self.manager.swap.num_in_use == 0
        assert sorted(self.pool.allocate(self.pool.num_blocks)) == list(range(self.pool.num_blocks))

    # Helpers

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def _pick(self, pick: int) -> int:
        if not self.models:
            return self._add(pick % NUM_KEYS)
        return list(self.models)[pick % len(self.models)]

    def _add(self, key: int) -> int:
        self._make_room()
        seq_id = self._new_id()
        self.manager.add(seq_id)
        self.models[seq_id] = self._model(key)
        return seq_id

    def _model(self, key: int, keeps_from: int | None = None) -> Model:
        """The model of a sequence without tokens."""
        return Model(key, gone=[0] * len(self.windows), keeps_from=keeps_from)

    def _held(self, seq_id: int) -> list[int]:
        return self.manager.held_blocks(seq_id)

    def _write(self, seq_id: int, token: int, in_use: set[int]) -> None:
        """The next token's keys and values, in all groups."""
        model = self.models[seq_id]
        position, offset = divmod(len(model.tokens), self.block_size)
        model.values.append(self._value(model.values, token, model.key))
        model.tokens.append(token)
        for group, table in enumerate(self.manager.block_tables(seq_id)):
            assert self.pool.ref_count(table[position]) == 1, "a shared block is written"
            self._overwritten(table[position], in_use)
            self.slots[table[position]][offset] = group, model.values[-1]

    def _make_room(self, spare: int | None = None) -> None:
        if len(self.models) >= MAX_SEQUENCES:
            self._free(next(seq_id for seq_id in self.models if seq_id != spare))

    def _free(self, seq_id: int) -> None:
        table = self._held(seq_id)
        self.manager.free(seq_id)
        model = self.models.pop(seq_id)
        self.history = [*self.history[-5:], model]
        self._released(table, model)

    def _value(self, before: list[int], token: int, key: int) -> int:
        return hash((before[-1] if before else None, len(before), token, key, self.era))

    def _overwritten(self, block_id: int, in_use: set[int]) -> None:
        """Cached content can be found until its block is written, and no longer."""
        content = self.content.pop(block_id, None)
        if content is not None:
            del self.cached[content]
            self.events["un-hash on write" if block_id in in_use else "eviction"] += 1
            if block_id not in in_use:
                self.lru.remove(block_id)

    def _resident(self) -> list[int]:
        return [seq_id for seq_id, model in self.models.items() if not model.swapped]

    def _in_use(self) -> set[int]:
        return {block_id for seq_id in self._resident() for block_id in self._held(seq_id)}

    def _released(self, table: list[int], model: Model, ends: int | None = None) -> None:
        """What became free of a table is evicted from its tail on, after all that was free before.

        `ends`: the sequence holds nothing in the pool any more (that others of a swap are still to go is allowed for).
        """
        if model.swapped:
            return
        in_use = self._in_use_but(ends)
        self.lru += [block_id for block_id in reversed(table) if block_id in self.content and block_id not in in_use]

    def _in_use_but(self, ends: int | None) -> set[int]:
        return {
            block_id
            for seq_id in self._resident()
            if seq_id != ends
            for block_id in self._old_tables.get(seq_id, self._held(seq_id))
        }

    def _expected_need(self, requests: list[tuple[int, int]]) -> int:
        """Counted from the tables, without ref counts: new blocks, and a copy for each writer but a last holder."""
        tables = {seq_id: self.manager.block_tables(seq_id) for seq_id in self._resident()}
        size = self.block_size
        needed = 0
        writers: Counter[int] = Counter()
        for seq_id, n in requests:
            num_tokens = len(self.models[seq_id].tokens)
            for table in tables[seq_id]:
                needed += len({position // size for position in range(num_tokens + n)}) - len(table)
                if num_tokens % size:
                    writers[table[-1]] += 1
        for block_id, k in writers.items():
            r = sum(block_id in table for own in tables.values() for table in own)
            needed += k if k < r else k - 1
        return needed

    def _nothing_changes(self) -> _Unchanged:
        return _Unchanged(self.manager)


class _Unchanged:
    """Asserts that manager and pool (tables, links, ref counts, index, counters) are the same after as before."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager

    def _picture(self) -> tuple[str, ...]:
        pools = (self.manager.pool, self.manager.swap_pool)
        return repr(vars(self.manager)), *(repr(vars(pool)) for pool in pools if pool is not None)

    def __enter__(self) -> None:
        self.before = self._picture()

    def __exit__(self, *_: object) -> None:
        assert self._picture() == self.before


WEIGHTS = {
    "append": 38,
    "commit": 14,
    "match": 14,
    "crop": 12,
    "free": 12,
    "fork": 6,
    "add": 2,
    "append_token": 8,
    "append_within": 4,
    "evict": 2,
    "slide": 12,
    "keep_past": 1,
    "swap_out": 4,
    "swap_in": 8,
    "misuse": 1.5,
    "reset": 0.5,
}


def random_operation(world: World, rng: random.Random) -> None:
    def tokens() -> list[int]:
        return [rng.randrange(2) for _ in range(rng.choice((1, 1, 1, 2, 3, 6)))]

    pick = rng.randrange(MAX_SEQUENCES)
    match rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
        case "append":
            size = rng.choice((1, 1, 2, 3, 6))
            world.append([(rng.randrange(MAX_SEQUENCES), tokens()) for _ in range(size)], rng.random() < 0.5)
        case "commit":
            world.commit(pick, rng.choice((0, 0, 0, 1, 3)))
        case "match":
            limit = rng.choice((None, None, None, rng.randrange(12)))
            world.match(rng.randrange(16), rng.random() < 0.2, rng.randrange(5), tokens(), limit)
        case "fork":
            world.fork(pick)
        case "crop":
            world.crop(pick, rng.choice((0, 1, 1, 2, 3, 6, 100)))
        case "free":
            world.free(pick)
        case "slide":
            world.slide(pick)
        case "keep_past":
            world.keep_past(pick)
        case "add":
            world.add(rng.randrange(NUM_KEYS))
        case "misuse":
            world.misuse(pick, rng.randrange(17))
        case "append_token":
            world.append_token(pick, rng.randrange(2))
        case "append_within":
            world.append_within([rng.randrange(MAX_SEQUENCES) for _ in range(rng.choice((1, 2, 2)))], rng.randrange(2))
        case "evict":
            world.evict(pick, rng.random() < 0.5)
        case "swap_out":
            world.swap_out([rng.randrange(MAX_SEQUENCES) for _ in range(rng.choice((1, 1, 4, 8)))])
        case "swap_in":
            world.swap_in([rng.randrange(MAX_SEQUENCES) for _ in range(rng.choice((1, 2, 12, 12)))])
        case "reset":
            world.reset()


EVENTS = {
    "copy-on-write",
    "last holder keeps the block",
    "out of blocks",
    "prefix hit",
    "cached free block revived",
    "eviction",
    "un-hash on write",
    "duplicate content",
    "commit of a stale sequence",
    "reset of a filled cache",
    "fork",
    "append to a block of its own",
    "append of a block",
    "append of several to blocks of their own",
    "eviction of a sequence",
    "match taken back",
    "swap-out",
    "swap-out of shared blocks",
    "out of CPU blocks",
    "swap-in",
    "swap-in of shared blocks",
    "swap-in to cached blocks",
    "out of blocks for a swap-in",
    "slide",
    "slide over shared blocks",
    "crop behind a window",
    "crop beyond a window",
    "prefix hit behind a window",
}


def random_world(rng: random.Random, windows: tuple[int | None, ...]) -> World:
    num_blocks, num_swap_blocks = rng.randint(4, 24) + 8 * (len(windows) - 1), rng.choice((0, 4, 16, 16))
    return World(num_blocks, rng.randint(1, 4), rng.random() < 0.9, num_swap_blocks, windows)


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.sampled_from(WINDOWS))
def test_short_random_walks(rng: random.Random, windows: tuple[int | None, ...]) -> None:
    """As the long one; hypothesis makes one that fails as short as it can be."""
    world = random_world(rng, windows)
    for _ in range(rng.randint(1, 40)):
        random_operation(world, rng)
        world.check()
    world.drain()


def test_long_random_walk() -> None:
    num_operations, events, episode = 0, Counter[str](), 0
    while num_operations < NUM_RANDOM_OPERATIONS or (
        EVENTS - set(+events) and num_operations < 10 * NUM_RANDOM_OPERATIONS
    ):
        rng = random.Random(episode)
        world = random_world(rng, WINDOWS[episode % len(WINDOWS)])
        for step in range(OPERATIONS_PER_EPISODE):
            try:
                random_operation(world, rng)
                world.check()
            except Exception as error:
                error.add_note(f"episode {episode}, step {step}")
                raise
        world.drain()
        num_operations += world.num_operations
        events += world.events
        episode += 1
    assert not EVENTS - set(+events), f"did not happen in {num_operations} operations"
