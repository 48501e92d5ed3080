"""Random operations on BlockManager and BlockPool beside a model that knows what every slot must hold.

`World` drives the manager and keeps, next to it: the tokens of every sequence, a physical memory `slots[block][offset]`
that is written as a runner would write it (returned copies first, then the new tokens at their slots), and its own idea
of what the prefix cache holds. What is written for a token is not the token but a fingerprint of all that its K/V
depends on: everything before it, the extra key and the weights (the era between two resets). So a missed copy, a block
freed too early or a stale hit shows as a sequence that does not read back its own content.

Two drivers share it: hypothesis, which shrinks what it finds, and a seeded random walk, which goes far.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_paged.block_manager import BlockManager
from hf_paged.errors import OutOfBlocksError

MAX_SEQUENCES = 8
NUM_KEYS = 2
NUM_RANDOM_OPERATIONS = 110_000
OPERATIONS_PER_EPISODE = 250

Content = tuple[int, tuple[int, ...]]  # extra key and all tokens up to the end of a block


@dataclass
class Model:
    """What a sequence must look like."""

    key: int
    tokens: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)  # the K/V of each token, as a fingerprint
    num_hashed: int = 0  # leading blocks that were committed or matched
    stale: bool = False  # holds K/V of an earlier era


class World:
    """A manager, its model, and operations whose arguments are any small integers."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.pool = self.manager.pool
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.models: dict[int, Model] = {}
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.cached: dict[Content, int] = {}
        self.content: dict[int, Content] = {}  # the inverse of `cached`
        self.lru: list[int] = []  # cached blocks that nobody holds, the next to be evicted first
        self.history = [Model(key=0)]  # what was freed lately: prompts worth asking for again
        self.era = 0
        self.next_id = 100
        self.num_operations = 0
        self.query_tokens = self.hit_tokens = 0
        self.events: Counter[str] = Counter()

    # Operations. Each is complete: whatever the arguments, it does something that the manager must answer rightly.

    def add(self, key: int) -> int:
        self.num_operations += 1
        return self._add(key)

    def append(self, wanted: list[tuple[int, list[int]]], commit: bool) -> None:
        """One step of a batch: sequences picked by number, with the tokens that each gets."""
        self.num_operations += 1
        additions = {self._pick(pick): tokens for pick, tokens in wanted}
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
            model, table = self.models[seq_id], self.manager.block_table(seq_id)
            if not model.tokens:
                model.stale = False
            for token in tokens:
                block_id, offset = table[len(model.tokens) // self.block_size], len(model.tokens) % self.block_size
                assert self.pool.ref_count(block_id) == 1, "a shared block is written"
                self._overwritten(block_id, in_use)
                model.values.append(self._value(model.values, token, model.key))
                model.tokens.append(token)
                self.slots[block_id][offset] = model.values[-1]
        num_evicted = len(lru) - len(self.lru)
        assert self.lru == lru[num_evicted:], "evicted in the wrong order"
        assert num_evicted == 0 or not self.pool.num_free - self.pool.num_cached_free, "evicted without need"
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
            parent.key, parent.tokens.copy(), parent.values.copy(), parent.num_hashed, parent.stale
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
        table = self.manager.block_table(seq_id).copy()
        self.manager.crop(seq_id, num_tokens)
        self._released(table)
        del model.tokens[num_tokens:], model.values[num_tokens:]
        model.num_hashed = min(model.num_hashed, num_tokens // self.block_size)

    def commit(self, pick: int, behind: int) -> None:
        """Commits all tokens but the last `behind`."""
        self.num_operations += 1
        self._commit(self._pick(pick), behind)

    def _commit(self, seq_id: int, behind: int) -> None:
        model = self.models[seq_id]
        num_tokens = max(0, len(model.tokens) - behind)
        expected = 0
        if self.caching and not model.stale:
            for position in range(model.num_hashed, num_tokens // self.block_size):
                content = (model.key, tuple(model.tokens[: (position + 1) * self.block_size]))
                block_id = self.manager.block_table(seq_id)[position]
                if content not in self.cached:
                    self.cached[content] = block_id
                    self.content[block_id] = content
                expected += self.cached[content] == block_id
                self.events["duplicate content"] += self.cached[content] != block_id
                model.num_hashed = position + 1
        self.events["commit of a stale sequence"] += model.stale
        assert self.manager.commit(seq_id, model.tokens[:num_tokens], (model.key,)) == expected

    def match(self, remembered: int, other_key: bool, cut: int, suffix: list[int], max_tokens: int | None) -> None:
        """A new sequence whose prompt is a beginning of another one's, live or gone, and some tokens of its own."""
        self.num_operations += 1
        known = [*self.history, *self.models.values()]
        source = known[remembered % len(known)]
        key = (source.key + other_key) % NUM_KEYS
        prompt = source.tokens[: max(0, len(source.tokens) - cut)] + suffix
        empty = [seq_id for seq_id, model in self.models.items() if not model.tokens and model.key == key]
        seq_id = empty[0] if empty else self._add(key)
        model = self.models[seq_id]

        limit = len(prompt) - 1 if max_tokens is None else min(len(prompt) - 1, max_tokens)
        blocks: list[int] = []
        while (end := (len(blocks) + 1) * self.block_size) <= limit and (key, tuple(prompt[:end])) in self.cached:
            blocks.append(self.cached[key, tuple(prompt[:end])])
        revived = set(blocks) & set(self.lru)
        self.lru = [block_id for block_id in self.lru if block_id not in revived]
        num_matched = self.manager.match_prefix(seq_id, prompt, (key,), max_tokens)

        assert self.manager.block_table(seq_id) == blocks
        assert num_matched == len(blocks) * self.block_size
        for token in prompt[:num_matched]:
            model.values.append(self._value(model.values, token, key))
        model.tokens = prompt[:num_matched]
        model.num_hashed = len(blocks)
        model.stale = False
        self.query_tokens += len(prompt) * self.caching
        self.hit_tokens += num_matched
        self.events["prefix hit"] += num_matched > 0
        self.events["cached free block revived"] += bool(revived)

    def reset(self) -> None:
        self.num_operations += 1
        self.events["reset of a filled cache"] += bool(self.cached)
        assert self.manager.reset_prefix_cache() == len(self.cached)
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
            lambda: manager.commit(seq_id, [0] * (num_tokens + 1)),
            lambda: manager.match_prefix(seq_id, [0], max_tokens=-1),
            lambda: self.pool.allocate(-1),
            lambda: self.pool.decref(self.pool.num_blocks),
        ]
        with self._nothing_changes(), pytest.raises(ValueError):
            calls[kind % len(calls)]()

    # What must hold between operations

    def check(self) -> None:
        manager, size = self.manager, self.block_size
        manager.check_invariants()
        assert manager.sequences() == list(self.models)
        stored: set[tuple[int, int]] = set()
        for seq_id, model in self.models.items():
            table = manager.block_table(seq_id)
            assert seq_id in manager and manager.num_tokens(seq_id) == len(model.tokens)
            places = [(table[i // size], i % size) for i in range(len(model.tokens))]
            assert [self.slots[block_id][offset] for block_id, offset in places] == model.values, f"sequence {seq_id}"
            stored.update(places)
        assert manager.num_stored_tokens == len(stored)
        in_use = {block_id for block_id, _ in stored}
        assert manager.num_allocated_slots == len(in_use) * size
        assert self.pool.num_in_use == len(in_use)
        hashed = {block_id for block_id in range(self.pool.num_blocks) if self.pool.block_hash(block_id) is not None}
        assert hashed == set(self.content), "the prefix cache holds other blocks than it should"
        assert self.pool.num_cached_free == len(self.lru) and set(self.lru) == hashed - in_use
        assert self.pool.num_evictions == self.events["eviction"]
        assert manager.num_cow_copies == self.events["copy-on-write"]
        assert (manager.prefix_query_tokens, manager.prefix_hit_tokens) == (self.query_tokens, self.hit_tokens)

    def drain(self) -> None:
        """Ends every sequence: nothing may stay in use, and every block can be had."""
        for seq_id in list(self.models):
            self._free(seq_id)
        self.check()
        assert self.pool.num_in_use == 0
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
        self.models[seq_id] = Model(key)
        return seq_id

    def _make_room(self, spare: int | None = None) -> None:
        if len(self.models) >= MAX_SEQUENCES:
            self._free(next(seq_id for seq_id in self.models if seq_id != spare))

    def _free(self, seq_id: int) -> None:
        table = self.manager.block_table(seq_id)
        self.manager.free(seq_id)
        self.history = [*self.history[-5:], self.models.pop(seq_id)]
        self._released(table)

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

    def _in_use(self) -> set[int]:
        return {block_id for seq_id in self.models for block_id in self.manager.block_table(seq_id)}

    def _released(self, table: list[int]) -> None:
        """What became free of a table is evicted from its tail on, after all that was free before."""
        in_use = self._in_use()
        self.lru += [block_id for block_id in reversed(table) if block_id in self.content and block_id not in in_use]

    def _expected_need(self, requests: list[tuple[int, int]]) -> int:
        """Counted from the tables, without ref counts: new blocks, and a copy for each writer but a last holder."""
        tables = {seq_id: self.manager.block_table(seq_id) for seq_id in self.models}
        size = self.block_size
        needed = 0
        writers: Counter[int] = Counter()
        for seq_id, n in requests:
            num_tokens = len(self.models[seq_id].tokens)
            needed += len({position // size for position in range(num_tokens + n)}) - len(tables[seq_id])
            if num_tokens % size:
                writers[tables[seq_id][-1]] += 1
        for block_id, k in writers.items():
            r = sum(block_id in table for table in tables.values())
            needed += k if k < r else k - 1
        return needed

    def _nothing_changes(self) -> _Unchanged:
        return _Unchanged(self.manager)


class _Unchanged:
    """Asserts that manager and pool (tables, links, ref counts, index, counters) are the same after as before."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager

    def _picture(self) -> tuple[str, str]:
        return repr(vars(self.manager)), repr(vars(self.manager.pool))

    def __enter__(self) -> None:
        self.before = self._picture()

    def __exit__(self, *_: object) -> None:
        assert self._picture() == self.before


# Driver 1: hypothesis

small = st.integers(0, 7)
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 24), block_size=st.integers(1, 4), caching=st.sampled_from([True] * 7 + [False])
    )
    def begin(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.world = World(num_blocks, block_size, caching)

    @rule(key=st.integers(0, NUM_KEYS - 1))
    def add(self, key: int) -> None:
        self.world.add(key)

    @rule(wanted=st.lists(st.tuples(small, token_lists), min_size=1, max_size=4), commit=st.booleans())
    def append(self, wanted: list[tuple[int, list[int]]], commit: bool) -> None:
        self.world.append(wanted, commit)

    @rule(pick=small)
    def fork(self, pick: int) -> None:
        self.world.fork(pick)

    @rule(pick=small)
    def free(self, pick: int) -> None:
        self.world.free(pick)

    @rule(pick=small, cut=st.integers(0, 12))
    def crop(self, pick: int, cut: int) -> None:
        self.world.crop(pick, cut)

    @rule(pick=small, behind=st.integers(0, 4))
    def commit(self, pick: int, behind: int) -> None:
        self.world.commit(pick, behind)

    @rule(
        remembered=st.integers(0, 15),
        other_key=st.sampled_from([False, False, False, True]),
        cut=st.integers(0, 6),
        suffix=token_lists,
        max_tokens=st.none() | st.integers(0, 12),
    )
    def match(self, remembered: int, other_key: bool, cut: int, suffix: list[int], max_tokens: int | None) -> None:
        self.world.match(remembered, other_key, cut, suffix, max_tokens)

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @rule(pick=small, kind=st.integers(0, 12))
    def misuse(self, pick: int, kind: int) -> None:
        self.world.misuse(pick, kind)

    @invariant()
    def check(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# Driver 2: a long seeded walk

WEIGHTS = {
    "append": 38,
    "commit": 14,
    "match": 14,
    "crop": 12,
    "free": 12,
    "fork": 6,
    "add": 2,
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
        case "add":
            world.add(rng.randrange(NUM_KEYS))
        case "misuse":
            world.misuse(pick, rng.randrange(13))
        case "reset":
            world.reset()


def test_long_random_walk() -> None:
    num_operations, events, episode = 0, Counter[str](), 0
    while num_operations < NUM_RANDOM_OPERATIONS:
        rng = random.Random(episode)
        world = World(rng.randint(4, 24), rng.randint(1, 4), enable_prefix_caching=episode % 10 != 9)
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
    assert num_operations >= 100_000
    for event in (
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
    ):
        assert events[event] >= 100, f"{event} happened only {events[event]} times: {dict(events)}"
    print(num_operations, dict(events))
