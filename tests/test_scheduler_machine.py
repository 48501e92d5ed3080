"""Random calls on Scheduler and BlockManager, with a memory and a "model" that notice every token gone wrong.

`World` plays the engine: `_forward` is `StepLoop.run` (schedule, copy, zero, write, update, until nothing is pending),
and around it are the things a `PagedCache` does between forwards. The model that computes a token's K/V is a hash of
the token, of its position and of what the *memory* holds for the token before it, read through the block table. So a
missed copy, a block given away too early, a stale prefix hit or a chunk that does not continue where the last one ended
shows as a sequence that does not read back what it should hold.

Two drivers share it: hypothesis, which shrinks what it finds, and a seeded random walk, which goes far.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_paged.block_manager import BlockManager
from hf_paged.errors import OutOfBlocksError
from hf_paged.scheduler import Scheduler, SchedulerOutput
from hf_paged.sequence import Sequence

MAX_SEQUENCES = 8
NUM_RANDOM_STEPS = 50_000
CALLS_PER_EPISODE = 60

Slot = int | None
Pending = list[tuple[Sequence, int]]


@dataclass
class Row:
    """A sequence and what must become of it: its inputs (an unknown one is a number no token has) and its K/V."""

    sequence: Sequence
    inputs: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)


@dataclass
class Before:
    """The pool as `schedule` found it."""

    tables: dict[int, list[int]]
    computed: dict[int, int]
    num_preemptions: int


class World:
    """Scheduler, manager and memory, and operations whose arguments are any small integers."""

    def __init__(self, num_blocks: int, block_size: int, budget: int, max_num_seqs: int, caching: bool = True) -> None:
        self.manager = BlockManager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(self.manager, budget, max_num_seqs)
        self.pool = self.manager.pool
        self.block_size = block_size
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.rows: dict[int, Row] = {}
        self.slots: list[list[Slot]] = [[None] * block_size for _ in range(num_blocks)]
        self.history: list[list[int]] = [[]]  # what was freed lately: prompts worth asking for again
        self.next_id = 100
        self.next_unknown = 1_000_000
        self.num_steps = 0
        self.events: Counter[str] = Counter()

    # Operations. Each is complete: whatever the arguments, it does something that must be answered rightly.

    def prompts(
        self, prompts: list[tuple[int, int, list[int]]], key: int, unknown: int, kept: int, failing: int
    ) -> None:
        """A forward over a new cache.

        Args:
            prompts: Of each row, the earlier sequence to begin like, how many of its last tokens to leave out, and the
                tokens to add.
            key: What else the K/V depends on.
            unknown: Bits; of row `i`: the prompt came as embeddings, or its positions are irregular.
            kept: How many last columns the caller wants logits of.
            failing: The step that fails (a device fault), if it gets there.
        """
        known = [*self.history, *(row.inputs for row in self.rows.values())]
        rows = []
        for index, (source, cut, added) in enumerate(prompts):
            beginning = known[source % len(known)]
            inputs = [token for token in beginning[: max(0, len(beginning) - cut)] if token < 1000] + added
            self._make_room(spare=rows)
            row = self._new_row(key)
            rows.append(row)
            self._extend(row, inputs[: self._max_length()], unknown=bool(unknown >> index & 1))
        if self._forward(rows, [0] * len(rows), kept, failing) == "failed":
            for row in rows:
                self._free(row)

    def decode(self, picks: list[int], added: list[int], unknown: bool, kept: int, failing: int) -> None:
        """A forward that continues some sequences with the same number of tokens, as rows of one cache do."""
        rows = self._pick(picks)
        if unknown and any(row.sequence.num_pending_tokens for row in rows):
            return  # the engine has to bring them back first
        before = [len(row.inputs) for row in rows]
        if any(length + len(added) > self._max_length() for length in before):
            return  # the engine refuses what could never fit
        for row in rows:
            self._extend(row, added, unknown)
        if self._forward(rows, before, kept, failing) == "failed":
            for row, length in zip(rows, before):
                self._crop(row, length)

    def read(self, picks: list[int], beside_each_other: bool) -> None:
        """Somebody needs the keys: what was preempted is computed again, and of these rows nothing is preempted."""
        rows = self._pick(picks)
        keep = frozenset(row.sequence.seq_id for row in rows) if beside_each_other else frozenset()
        if self._forward(rows, None, 1, failing=0, keep=keep) == "done" and keep:
            assert not any(row.sequence.num_pending_tokens for row in rows)
            self.events["rows brought back beside each other"] += len(rows) > 1

    def grow_opaque(self, picks: list[int], num_tokens: int) -> None:
        """`Engine.grow_opaque`: keys and values come from a forward that the engine doesn't drive."""
        rows = [row for row in self._pick(picks) if not row.sequence.num_pending_tokens]
        if not rows or any(len(row.inputs) + num_tokens > self._max_length() for row in rows):
            return
        requests = [(row.sequence.seq_id, num_tokens) for row in rows]
        before, protected = self._before(), {seq_id for seq_id, _ in requests}
        copies: list[tuple[int, int]] | None = None
        while copies is None:
            try:
                copies = self.manager.append(requests)
            except OutOfBlocksError:
                preemptible = self._preemptible(protected)
                assert self.scheduler.preempt_newest(protected) == bool(preemptible)
                if not preemptible:
                    return
                self.events["room made for an opaque forward"] += 1
        self._check_preempted(before, protected)
        self._copy(copies)
        for row in rows:
            start = len(row.inputs)
            row.sequence.token_ids = None
            self._extend(row, [0] * num_tokens, unknown=True)
            self._write(row, start, num_tokens)
            row.sequence.num_computed_tokens += num_tokens
            self.scheduler.remember(row.sequence)

    def fork(self, pick: int) -> None:
        """`Engine.fork_sequence`."""
        for parent in self._pick([pick]):
            self._make_room(spare=[parent])
            old, self.next_id = parent.sequence, self.next_id + 1
            self.manager.fork(old.seq_id, self.next_id)
            child = Sequence(
                self.next_id,
                None if old.token_ids is None else old.token_ids.copy(),
                old.num_tokens,
                old.num_computed_tokens,
                old.position_offset,
                old.extra_key,
            )
            if child.num_computed_tokens:
                self.scheduler.remember(child)
            self.rows[self.next_id] = Row(child, parent.inputs.copy(), parent.values.copy())
            self.events["fork"] += 1

    def crop(self, pick: int, cut: int) -> None:
        for row in self._pick([pick]):
            self._crop(row, max(0, len(row.inputs) - cut))

    def free(self, pick: int) -> None:
        for row in self._pick([pick]):
            self._free(row)

    def reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()

    def release(self) -> None:
        """`KVPool.release`: the memory is given back, unless something in it can't be computed again."""
        held = {row.sequence.seq_id for row in self.rows.values() if row.sequence.num_computed_tokens}
        lost = sum(not self.rows[seq_id].sequence.is_reproducible for seq_id in held)
        assert self.scheduler.preempt_all() == lost
        if not lost:
            assert self.pool.num_in_use == 0
            self.manager.reset_prefix_cache()
            self.slots = [[None] * self.block_size for _ in self.slots]
            self.events["release of a filled pool"] += bool(held)

    # StepLoop.run

    def _forward(
        self, rows: list[Row], before: list[int] | None, kept: int, failing: int, keep: frozenset[int] = frozenset()
    ) -> str:
        """Runs what is pending of these rows; "done" or "failed"."""
        # Logits are wanted of the last `kept` new tokens; `None`: of none, this is a recomputation.
        pending: Pending = []
        for index, row in enumerate(rows):
            first = 0 if before is None else max(before[index], len(row.inputs) - kept)
            cacheable = len(row.inputs) - 1 if before is None else first
            if row.sequence.num_pending_tokens:
                pending.append((row.sequence, cacheable))
        # Each row in turn, from its first token on: what a pool that holds one row at a time would take.
        one_by_one = sum(-(-sequence.num_tokens // self.budget) for sequence, _ in pending)
        num_steps = 0
        while pending:
            first, was_pending = pending[0][0], pending[0][0].num_pending_tokens
            state = self._before()
            try:
                step = self.scheduler.schedule(pending, keep)
            except OutOfBlocksError as error:
                self._check_out_of_blocks(error, state, pending, keep)
                return "failed"
            self._check_step(step, pending, state, keep)
            self._execute(step)
            num_steps += 1
            self.num_steps += 1
            if num_steps == failing:
                self._abandon(step)
                return "failed"
            self.scheduler.update(step)
            self.check()
            self.events["the first one waits"] += first.num_pending_tokens >= was_pending
            self.events["chunked"] += any(chunk.sequence.num_pending_tokens for chunk in step.chunks)
            pending = [(sequence, limit) for sequence, limit in pending if sequence.num_pending_tokens]
            assert num_steps <= one_by_one + len(rows), f"{num_steps} steps, {one_by_one} for one row after another"
        return "done"

    def _execute(self, step: SchedulerOutput) -> None:
        """What the runner does, and what the attention would read."""
        self._copy(step.block_copies)
        for block_id in step.new_blocks:
            self.slots[block_id] = [0] * self.block_size
        for chunk in step.chunks:
            row = self.rows[chunk.sequence.seq_id]
            assert self._stored(row, chunk.start) == row.values[: chunk.start], "the context of a chunk is wrong"
            self._write(row, chunk.start, chunk.num_tokens)
        for chunk in step.chunks:
            row = self.rows[chunk.sequence.seq_id]
            end = chunk.start + chunk.num_tokens
            assert self._stored(row, end) == row.values[:end], "a chunk was overwritten in its own step"

    def _abandon(self, step: SchedulerOutput) -> None:
        """The step failed after its copies, and perhaps after its writes."""
        self.events["a step failed"] += 1
        self.scheduler.undo(step)
        self.check()

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        sources, destinations = {source for source, _ in copies}, [destination for _, destination in copies]
        assert len(set(destinations)) == len(destinations)
        self.events["copy of a block that is overwritten"] += bool(sources & set(destinations))
        self.events["copy-on-write"] += len(copies)
        content = {source: self.slots[source].copy() for source in sources}
        for source, destination in copies:
            self.slots[destination] = content[source].copy()

    def _write(self, row: Row, start: int, num_tokens: int) -> None:
        table = self.manager.block_table(row.sequence.seq_id)
        for index in range(start, start + num_tokens):
            block_id = table[index // self.block_size]
            assert self.pool.ref_count(block_id) == 1, "a shared block is written"
            known = row.sequence.token_ids
            token = row.inputs[index] if known is None else known[index]
            before = self._stored(row, index)[-1] if index else None
            self.slots[block_id][index % self.block_size] = self._value(before, token, index, row)

    # What must hold

    def check(self) -> None:
        """Between steps."""
        self.manager.check_invariants()
        num_resident = 0
        for seq_id, row in self.rows.items():
            sequence = row.sequence
            assert sequence.num_tokens == len(row.inputs)
            assert sequence.token_ids is None or sequence.token_ids == row.inputs
            assert self.manager.num_tokens(seq_id) == sequence.num_computed_tokens <= sequence.num_tokens
            stored = self._stored(row, sequence.num_computed_tokens)
            assert stored == row.values[: sequence.num_computed_tokens], f"sequence {seq_id} lost its content"
            num_resident += sequence.num_computed_tokens > 0
        assert self.scheduler.num_resident == num_resident, "the scheduler knows other sequences than hold tokens"
        assert self.scheduler.num_preemptions >= self.events["preemption"]

    def _check_step(self, step: SchedulerOutput, pending: Pending, before: Before, keep: frozenset[int]) -> None:
        assert 0 < len(step.chunks) <= self.max_num_seqs
        assert sum(chunk.num_tokens for chunk in step.chunks) <= self.budget
        order = [sequence.seq_id for sequence, _ in pending]
        chosen = [order.index(chunk.sequence.seq_id) for chunk in step.chunks]
        assert chosen == sorted(set(chosen)), "not in order of arrival"
        budget, cacheable = self.budget, dict(zip(order, (limit for _, limit in pending)))
        copies, new_blocks = [], []
        for chunk in step.chunks:
            sequence, table = chunk.sequence, self.manager.block_table(chunk.sequence.seq_id)
            assert chunk.start == sequence.num_computed_tokens, "a chunk does not continue what is computed"
            assert chunk.num_tokens == min(sequence.num_pending_tokens, budget) > 0
            assert self.manager.num_tokens(sequence.seq_id) == chunk.start + chunk.num_tokens
            budget -= chunk.num_tokens
            fresh = -(-chunk.start // self.block_size)
            new_blocks += table[fresh:]
            held = before.tables[sequence.seq_id]
            if chunk.start % self.block_size and held[fresh - 1] != table[fresh - 1]:
                copies.append((held[fresh - 1], table[fresh - 1]))
            if chunk.start != before.computed[sequence.seq_id]:  # only a prefix hit moves it
                assert chunk.start % self.block_size == 0 and chunk.start <= cacheable[sequence.seq_id]
                self.events["prefix hit"] += 1
        assert step.new_blocks == new_blocks
        assert step.block_copies == copies
        preempted = self._check_preempted(before, set(order), keep)
        left_out = [sequence for sequence, _ in pending[chosen[-1] + 1 :]]
        if order[0] != step.chunks[0].sequence.seq_id:  # it may only wait for those that fit where it does not
            assert not self._preemptible(keep | set(order)), "the first one waits although another could be preempted"
        if budget and len(step.chunks) < self.max_num_seqs and not preempted & set(order):
            for sequence in left_out:
                n = min(sequence.num_pending_tokens, budget)
                assert self.manager.blocks_needed(sequence.seq_id, n) > self.pool.num_free, "left out without need"
                assert not self._preemptible(keep | set(order)), "left out although another could be preempted"

    def _check_preempted(self, before: Before, protected: set[int], keep: frozenset[int] = frozenset()) -> set[int]:
        """Who lost their blocks: nobody that can't be computed again or is kept; those that are waited for last."""
        preempted = set()
        for seq_id, held in before.tables.items():
            table, row = self.manager.block_table(seq_id), self.rows[seq_id]
            if held and not row.sequence.is_reproducible:
                kept = before.computed[seq_id] // self.block_size
                assert table[:kept] == held[:kept] and len(table) >= len(held), "an opaque sequence was preempted"
            elif held and (not table or row.sequence.num_computed_tokens < before.computed[seq_id]):
                preempted.add(seq_id)
        assert not preempted & keep, "a sequence to keep was preempted"
        if preempted & protected:
            assert not self._preemptible(keep | protected), "a waiting sequence was preempted before an idle one"
        self.events["preemption"] += len(preempted)
        self.events["preemption of a waiting sequence"] += len(preempted & protected)
        assert self.scheduler.num_preemptions - before.num_preemptions >= len(preempted)
        return preempted

    def _check_out_of_blocks(
        self, error: OutOfBlocksError, before: Before, pending: Pending, keep: frozenset[int]
    ) -> None:
        self.events["out of blocks"] += 1
        first = pending[0][0]
        self._check_preempted(before, {sequence.seq_id for sequence, _ in pending}, keep)
        assert not self._preemptible(keep | {first.seq_id}), "something could have been preempted"
        needed = self.manager.blocks_needed(first.seq_id, min(first.num_pending_tokens, self.budget))
        assert (error.needed, error.free) == (needed, self.pool.num_free)
        assert error.needed > error.free
        self.check()

    def _preemptible(self, protected: Set[int]) -> list[int]:
        return [
            seq_id
            for seq_id, row in self.rows.items()
            if seq_id not in protected and row.sequence.is_reproducible and self.manager.block_table(seq_id)
        ]

    def drain(self) -> None:
        """Ends every sequence: nothing may stay in use."""
        for row in list(self.rows.values()):
            self._free(row)
        self.check()
        assert self.pool.num_in_use == 0

    # Helpers

    def _before(self) -> Before:
        return Before(
            {seq_id: self.manager.block_table(seq_id).copy() for seq_id in self.rows},
            {seq_id: row.sequence.num_computed_tokens for seq_id, row in self.rows.items()},
            self.scheduler.num_preemptions,
        )

    def _max_length(self) -> int:
        return self.pool.num_blocks * self.block_size

    def _pick(self, picks: list[int]) -> list[Row]:
        live = list(self.rows.values())
        return [live[i] for i in dict.fromkeys(pick % len(live) for pick in picks)] if live else []

    def _new_row(self, key: int) -> Row:
        self.next_id += 1
        self.manager.add(self.next_id)
        row = self.rows[self.next_id] = Row(Sequence(self.next_id, extra_key=(key,)))
        return row

    def _extend(self, row: Row, tokens: list[int], unknown: bool) -> None:
        """New tokens of a sequence; unknown ones are either without an id or at positions of their own."""
        sequence = row.sequence
        if unknown and tokens[-1] % 2:
            self.next_unknown += 1
            tokens = [self.next_unknown] * len(tokens)
            sequence.token_ids = None
        elif unknown:
            sequence.position_offset = None
        if sequence.token_ids is not None:
            sequence.token_ids += tokens
        sequence.num_tokens += len(tokens)
        for token in tokens:
            before = row.values[-1] if row.values else None
            row.values.append(self._value(before, token, len(row.inputs), row))
            row.inputs.append(token)

    def _crop(self, row: Row, num_tokens: int) -> None:
        """`Engine.crop_sequence`."""
        sequence = row.sequence
        if sequence.token_ids is not None:
            del sequence.token_ids[num_tokens:]
        sequence.num_tokens = num_tokens
        if sequence.num_computed_tokens > num_tokens:
            sequence.num_computed_tokens = num_tokens
            self.manager.crop(sequence.seq_id, num_tokens)
            if not num_tokens:
                self.scheduler.forget(sequence)
        del row.inputs[num_tokens:], row.values[num_tokens:]

    def _free(self, row: Row) -> None:
        self.scheduler.forget(row.sequence)
        self.manager.free(row.sequence.seq_id)
        del self.rows[row.sequence.seq_id]
        self.history = [*self.history[-4:], row.inputs]

    def _make_room(self, spare: list[Row]) -> None:
        """Keeps the number of sequences bounded."""
        if len(self.rows) >= MAX_SEQUENCES:
            kept = {row.sequence.seq_id for row in spare}
            self._free(next(row for seq_id, row in self.rows.items() if seq_id not in kept))

    def _value(self, before: Slot, token: int, index: int, row: Row) -> int:
        return hash((before, token, index, row.sequence.extra_key))

    def _stored(self, row: Row, num_tokens: int) -> list[Slot]:
        table, size = self.manager.block_table(row.sequence.seq_id), self.block_size
        content: list[Slot] = []
        for block_id in table[: -(-num_tokens // size)]:
            content += self.slots[block_id]
        return content[:num_tokens]


# Driver 1: hypothesis

small = st.integers(0, 7)
picks = st.lists(small, min_size=1, max_size=5)
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=6)
rarely = st.sampled_from([False, False, False, True])
failing = st.sampled_from([0, 0, 0, 0, 1, 2])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 7),
        max_num_seqs=st.integers(1, 5),
        caching=st.sampled_from([True] * 5 + [False]),
    )
    def begin(self, num_blocks: int, block_size: int, budget: int, max_num_seqs: int, caching: bool) -> None:
        self.world = World(num_blocks, block_size, budget, max_num_seqs, caching)

    @rule(
        prompts=st.lists(st.tuples(small, small, token_lists), min_size=1, max_size=4),
        key=st.integers(0, 1),
        unknown=st.sampled_from([0, 0, 0, 1, 2, 5]),
        kept=st.integers(1, 3),
        failing=failing,
    )
    def prompts(
        self, prompts: list[tuple[int, int, list[int]]], key: int, unknown: int, kept: int, failing: int
    ) -> None:
        self.world.prompts(prompts, key, unknown, kept, failing)

    @rule(picks=picks, added=token_lists, unknown=rarely, kept=st.integers(1, 3), failing=failing)
    def decode(self, picks: list[int], added: list[int], unknown: bool, kept: int, failing: int) -> None:
        self.world.decode(picks, added, unknown, kept, failing)

    @rule(picks=picks, beside_each_other=st.booleans())
    def read(self, picks: list[int], beside_each_other: bool) -> None:
        self.world.read(picks, beside_each_other)

    @rule(picks=picks, num_tokens=st.integers(1, 4))
    def grow_opaque(self, picks: list[int], num_tokens: int) -> None:
        self.world.grow_opaque(picks, num_tokens)

    @rule(pick=small)
    def fork(self, pick: int) -> None:
        self.world.fork(pick)

    @rule(pick=small, cut=st.integers(0, 8))
    def crop(self, pick: int, cut: int) -> None:
        self.world.crop(pick, cut)

    @rule(pick=small)
    def free(self, pick: int) -> None:
        self.world.free(pick)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.world.reset_prefix_cache()

    @rule()
    def release(self) -> None:
        self.world.release()

    @invariant()
    def check(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# Driver 2: a long seeded walk

WEIGHTS = {
    "decode": 50,
    "prompts": 15,
    "read": 6,
    "free": 10,
    "crop": 6,
    "fork": 9,
    "grow_opaque": 5,
    "reset_prefix_cache": 0.5,
    "release": 2,
}


def random_call(world: World, rng: random.Random) -> None:
    def tokens() -> list[int]:
        return [rng.randrange(2) for _ in range(rng.choice((1, 1, 1, 1, 2, 4, 9)))]

    def several() -> list[int]:
        return [rng.randrange(MAX_SEQUENCES) for _ in range(rng.choice((1, 2, 3, 5)))]

    pick = rng.randrange(MAX_SEQUENCES)
    failing = rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 2, 3))
    match rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
        case "prompts":
            prompts = [(rng.randrange(12), rng.randrange(6), tokens()) for _ in range(rng.choice((1, 2, 4)))]
            unknown = rng.choice((0, 0, 0, 0, 1, 2))
            world.prompts(prompts, rng.randrange(2), unknown, rng.choice((1, 1, 2, 100)), failing)
        case "decode":
            world.decode(several(), tokens(), rng.random() < 0.05, rng.choice((1, 1, 2, 100)), failing)
        case "read":
            world.read(several(), rng.random() < 0.7)
        case "grow_opaque":
            world.grow_opaque(several(), rng.randint(1, 4))
        case "fork":
            world.fork(pick)
        case "crop":
            world.crop(pick, rng.choice((0, 1, 1, 2, 3, 6, 100)))
        case "free":
            world.free(pick)
        case "reset_prefix_cache":
            world.reset_prefix_cache()
        case "release":
            world.release()


def test_long_random_walk() -> None:
    num_steps, events, episode = 0, Counter[str](), 0
    while num_steps < NUM_RANDOM_STEPS:
        rng = random.Random(episode)
        caching = episode % 10 != 9
        world = World(rng.randint(1, 20), rng.randint(1, 4), rng.randint(1, 7), rng.randint(1, 6), caching)
        for call in range(CALLS_PER_EPISODE):
            try:
                random_call(world, rng)
                world.check()
            except Exception as error:
                error.add_note(f"episode {episode}, call {call}")
                raise
        world.drain()
        num_steps += world.num_steps
        events += world.events
        episode += 1
    for event in (
        "preemption",
        "preemption of a waiting sequence",
        "prefix hit",
        "chunked",
        "copy-on-write",
        "out of blocks",
        "the first one waits",
        "room made for an opaque forward",
        "release of a filled pool",
        "rows brought back beside each other",
        "a step failed",
        "fork",
    ):
        assert events[event] >= 100, f"{event} happened only {events[event]} times: {dict(events)}"
    print(num_steps, dict(events))
