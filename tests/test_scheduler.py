"""`Scheduler`: what runs in a step, and who gives up blocks for it."""

from __future__ import annotations

import random

import pytest

from hf_paged.block_manager import BlockManager
from hf_paged.errors import OutOfBlocksError
from hf_paged.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from hf_paged.sequence import Sequence

Pending = list[tuple[Sequence, int]]


class Setup:
    """A scheduler, its manager, and the part of the engine that feeds them."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 2,
        budget: int = 100,
        max_num_seqs: int = 100,
        caching: bool = True,
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(self.manager, budget, max_num_seqs)
        self.pool = self.manager.pool
        self.next_id = 0

    def add(self, tokens: int | list[int], known: bool = True, extra_key: tuple[int, ...] = ()) -> Sequence:
        """A sequence of these tokens (a number: that many of its own), none computed."""
        self.next_id += 1
        if isinstance(tokens, int):
            tokens = [1000 * self.next_id + i for i in range(tokens)]
        self.manager.add(self.next_id)
        return Sequence(self.next_id, list(tokens) if known else None, len(tokens), extra_key=extra_key)

    def run(self, *sequences: Sequence) -> list[SchedulerOutput]:
        """Steps until these sequences are computed; no token may come from the prefix cache."""
        pending = [(sequence, 0) for sequence in sequences if sequence.num_pending_tokens]
        steps = []
        while pending:
            steps.append(self.scheduler.schedule(pending))
            self.scheduler.update(steps[-1])
            self.manager.check_invariants()
            pending = [(sequence, limit) for sequence, limit in pending if sequence.num_pending_tokens]
        return steps

    def computed(self, tokens: int | list[int], known: bool = True) -> Sequence:
        sequence = self.add(tokens, known)
        self.run(sequence)
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        self.next_id += 1
        self.manager.fork(parent.seq_id, self.next_id)
        tokens = None if parent.token_ids is None else parent.token_ids.copy()
        child = Sequence(self.next_id, tokens, parent.num_tokens, parent.num_computed_tokens)
        self.scheduler.remember(child)
        return child

    def table(self, sequence: Sequence) -> list[int]:
        return self.manager.block_table(sequence.seq_id).copy()


def extend(sequence: Sequence, num_tokens: int = 1) -> Sequence:
    if sequence.token_ids is not None:
        sequence.token_ids += [500 + i for i in range(num_tokens)]
    sequence.num_tokens += num_tokens
    return sequence


def chunks(step: SchedulerOutput) -> list[tuple[int, int, int]]:
    return [(chunk.sequence.seq_id, chunk.start, chunk.num_tokens) for chunk in step.chunks]


# Budget and order


def test_a_step_holds_everything_that_fits() -> None:
    setup = Setup()
    a, b, c = setup.add(3), setup.add(1), setup.add(4)
    step = setup.scheduler.schedule([(a, 0), (b, 0), (c, 0)])
    assert chunks(step) == [(1, 0, 3), (2, 0, 1), (3, 0, 4)]
    assert step.block_copies == []
    assert step.new_blocks == setup.table(a) + setup.table(b) + setup.table(c)
    assert a.num_computed_tokens == 0, "nothing is computed before update()"
    setup.scheduler.update(step)
    assert [s.num_pending_tokens for s in (a, b, c)] == [0, 0, 0]
    assert setup.scheduler.num_resident == 3


def test_prompts_are_chunked_to_the_token_budget() -> None:
    setup = Setup(block_size=4, budget=5)
    a, b = setup.add(7), setup.add(6)
    steps = setup.run(a, b)
    assert [chunks(step) for step in steps] == [[(1, 0, 5)], [(1, 5, 2), (2, 0, 3)], [(2, 3, 3)]]
    # Blocks are new in the step whose tokens first need them.
    assert [len(step.new_blocks) for step in steps] == [2, 1, 1]


def test_the_budget_is_spent_exactly() -> None:
    for budget in range(1, 8):
        setup = Setup(num_blocks=64, budget=budget)
        steps = setup.run(*[setup.add(n) for n in (3, 1, 5, 2, 7)])
        sizes = [sum(chunk.num_tokens for chunk in step.chunks) for step in steps]
        assert sizes[:-1] == [budget] * (len(steps) - 1) and 0 < sizes[-1] <= budget and sum(sizes) == 18


def test_max_num_seqs_bounds_the_rows_of_a_step() -> None:
    setup = Setup(max_num_seqs=2)
    steps = setup.run(*[setup.add(1) for _ in range(5)])
    assert [len(step.chunks) for step in steps] == [2, 2, 1]


def test_order_of_arrival_is_kept() -> None:
    setup = Setup(budget=2)
    a, b, c = setup.add(1), setup.add(1), setup.add(1)
    assert [chunks(step) for step in setup.run(c, a, b)] == [[(3, 0, 1), (1, 0, 1)], [(2, 0, 1)]]


def test_chunk_is_a_value() -> None:
    sequence = Sequence(1)
    assert ScheduledChunk(sequence, 0, 1) == ScheduledChunk(sequence, 0, 1) != ScheduledChunk(sequence, 0, 2)


# Prefix cache


def test_full_blocks_are_shared_once_computed() -> None:
    setup = Setup()
    first = setup.computed([1, 2, 3, 4, 5])
    second = setup.add([1, 2, 3, 4, 5, 6, 7])
    step = setup.scheduler.schedule([(second, 6)])
    assert chunks(step) == [(2, 4, 3)]
    assert setup.table(second)[:2] == setup.table(first)[:2]
    assert step.new_blocks == setup.table(second)[2:]
    assert setup.manager.prefix_hit_tokens == 4


@pytest.mark.parametrize(("cacheable", "start"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (6, 4)])
def test_tokens_whose_logits_are_wanted_are_computed(cacheable: int, start: int) -> None:
    setup = Setup()
    setup.computed([1, 2, 3, 4, 5, 6])
    second = setup.add([1, 2, 3, 4, 5, 6])
    assert chunks(setup.scheduler.schedule([(second, cacheable)])) == [(2, start, 6 - start)]


def test_another_extra_key_is_no_hit() -> None:
    setup = Setup()
    setup.computed([1, 2, 3, 4])
    second = setup.add([1, 2, 3, 4], extra_key=(7,))
    assert chunks(setup.scheduler.schedule([(second, 3)])) == [(2, 0, 4)]


def test_a_hit_costs_no_budget() -> None:
    setup = Setup(budget=3)
    setup.computed(list(range(8)))
    second = setup.add(list(range(11)))
    assert chunks(setup.scheduler.schedule([(second, 10)])) == [(2, 8, 3)]


def test_a_block_filled_by_small_steps_is_shared() -> None:
    setup = Setup(block_size=4, budget=3)
    setup.computed([1, 2, 3, 4, 5, 6, 7, 8])  # in steps of 3, 3 and 2
    second = setup.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert chunks(setup.scheduler.schedule([(second, 8)])) == [(2, 8, 1)]


def test_the_extra_key_is_part_of_what_is_shared() -> None:
    setup = Setup()
    setup.run(setup.add([1, 2, 3, 4], extra_key=(7,)))
    same, other = setup.add([1, 2, 3, 4], extra_key=(7,)), setup.add([1, 2, 3, 4])
    assert chunks(setup.scheduler.schedule([(same, 3), (other, 3)])) == [(2, 2, 2), (3, 0, 4)]


def test_unknown_tokens_and_irregular_positions_are_neither_shared_nor_found() -> None:
    setup = Setup()
    unknown, irregular = setup.add(4, known=False), setup.add([1, 2, 3, 4])
    irregular.position_offset = None
    setup.run(unknown, irregular)
    assert all(setup.pool.block_hash(block_id) is None for block_id in range(16))
    setup.computed([1, 2, 3, 4])
    again = setup.add([1, 2, 3, 4])
    again.position_offset = None
    assert chunks(setup.scheduler.schedule([(again, 3)])) == [(again.seq_id, 0, 4)]


def test_only_what_is_computed_is_shared() -> None:
    setup = Setup(budget=3)
    first = setup.add([1, 2, 3, 4, 5, 6])
    step = setup.scheduler.schedule([(first, 0)])
    second = setup.add([1, 2, 3, 4, 5, 6])
    assert setup.pool.num_cached_free == 0 and setup.manager.prefix_hit_tokens == 0
    setup.scheduler.update(step)  # three tokens: one full block
    assert chunks(setup.scheduler.schedule([(second, 5)])) == [(2, 2, 3)]


# Sharing and copies


def test_a_fork_copies_the_block_it_writes() -> None:
    setup = Setup()
    parent = setup.computed([1, 2, 3])
    child = setup.fork(parent)
    shared = setup.table(parent)
    step = setup.scheduler.schedule([(extend(parent), 3), (extend(child), 3)])
    # The first of the two writes into a copy, the last holder keeps the block.
    assert step.block_copies == [(shared[1], setup.table(parent)[1])]
    assert setup.table(child) == shared
    assert step.new_blocks == [], "the destination of a copy is not to be zeroed"


def test_copies_of_one_step_may_chain() -> None:
    """A's copy is what makes the block free that B's copy goes to: all sources have to be read first."""
    setup = Setup(num_blocks=3)
    p, q = setup.computed(1), setup.computed(1, known=False)
    a, b = setup.fork(p), setup.fork(q)
    (x,), (z,) = setup.table(a), setup.table(b)
    step = setup.scheduler.schedule([(extend(a), 1), (extend(b), 1)])
    (y,) = setup.table(a)
    assert setup.table(p) == [] and setup.table(b) == [x]
    assert step.block_copies == [(x, y), (z, x)]


# Preemption


def test_the_idle_sequence_used_last_gives_up_its_blocks() -> None:
    setup = Setup(num_blocks=4)
    a, b, c, d = (setup.computed(2) for _ in range(4))
    setup.computed(1)
    assert setup.table(d) == [] and d.num_computed_tokens == 0, "d was used last"
    assert [len(setup.table(s)) for s in (a, b, c)] == [1, 1, 1]
    assert setup.scheduler.num_preemptions == 1


def test_running_makes_a_sequence_the_one_used_last() -> None:
    setup = Setup(num_blocks=3)
    a, b = setup.computed(1), setup.computed(1)
    setup.run(extend(a))
    setup.computed(4)
    assert setup.table(a) == [] and setup.table(b) != []


def test_no_more_is_preempted_than_needed() -> None:
    setup = Setup(num_blocks=6)
    idle = [setup.computed(4) for _ in range(3)]
    setup.computed(3)
    assert [len(setup.table(s)) for s in idle] == [2, 2, 0]


def test_a_preempted_sequence_comes_back_to_what_is_still_cached() -> None:
    setup = Setup(num_blocks=4)
    a = setup.computed([1, 2, 3, 4, 5])
    blocks = setup.table(a)
    setup.scheduler.preempt(a)
    assert (a.num_computed_tokens, a.num_pending_tokens, setup.scheduler.num_resident) == (0, 5, 0)
    setup.computed(2)  # takes the plain free block, not a cached one
    step = setup.scheduler.schedule([(extend(a), 5)])
    assert chunks(step) == [(1, 4, 2)]
    assert setup.table(a)[:2] == blocks[:2]


def test_a_sequence_that_cannot_be_computed_again_is_never_preempted() -> None:
    setup = Setup(num_blocks=3)
    unknown, irregular = setup.computed(2, known=False), setup.add(2)
    irregular.position_offset = None
    setup.run(irregular)
    newcomer = setup.add(4)
    with pytest.raises(OutOfBlocksError) as caught:
        setup.scheduler.schedule([(newcomer, 0)])
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert len(setup.table(unknown)) == len(setup.table(irregular)) == 1
    assert setup.scheduler.num_preemptions == 0


def test_idle_sequences_give_way_before_those_that_wait() -> None:
    setup = Setup(num_blocks=4)
    a, b, idle, c = (setup.computed(2) for _ in range(4))
    step = setup.scheduler.schedule([(extend(s), 2) for s in (a, b, c)])
    assert chunks(step) == [(1, 2, 1)]
    assert [len(setup.table(s)) for s in (a, b, idle, c)] == [2, 1, 0, 1]


def test_when_nobody_fits_the_newest_gives_way_and_sits_the_step_out() -> None:
    setup = Setup(num_blocks=3)
    a, b, c = (setup.computed([i, i]) for i in range(3))
    step = setup.scheduler.schedule([(extend(s), 2) for s in (a, b, c)])
    assert chunks(step) == [(1, 2, 1)]
    assert [len(setup.table(s)) for s in (a, b, c)] == [2, 1, 0]
    setup.scheduler.update(step)
    # a is done: the next to give way is a, not b.
    step = setup.scheduler.schedule([(b, 2), (c, 2)])
    assert chunks(step) == [(2, 2, 1)] and setup.table(a) == []


def test_one_that_does_not_fit_holds_up_nobody_who_does() -> None:
    setup = Setup(num_blocks=2)
    a, b = setup.computed([1, 2]), setup.computed([3])
    assert [chunks(step) for step in setup.run(extend(a), extend(b))] == [[(2, 1, 1)], [(1, 2, 1)]]


def test_the_first_sequence_gets_the_whole_pool_if_need_be() -> None:
    setup = Setup(num_blocks=8, budget=3)
    rows = [setup.computed(2) for _ in range(8)]
    setup.run(*[extend(row, 14) for row in rows])
    assert all(row.num_tokens == 16 for row in rows)


def test_one_without_blocks_has_none_to_give() -> None:
    setup = Setup(num_blocks=2)
    a, newcomer = setup.computed([1, 2, 3, 4]), setup.add(1)
    b = setup.add(3)
    with pytest.raises(OutOfBlocksError):
        setup.scheduler.schedule([(extend(a), 4), (b, 0), (newcomer, 0)])
    assert setup.scheduler.num_preemptions == 0


def test_what_is_to_be_kept_is_kept() -> None:
    setup = Setup(num_blocks=3)
    a, b, newcomer = setup.computed(2), setup.computed(2), setup.add(4)
    step = setup.scheduler.schedule([(newcomer, 0)], keep=frozenset({b.seq_id}))
    assert setup.table(a) == [] and setup.table(b) != [], "b was used last, but is to be kept"
    setup.scheduler.update(step)
    with pytest.raises(OutOfBlocksError):
        setup.scheduler.schedule([(a, 0)], keep=frozenset({a.seq_id, b.seq_id, newcomer.seq_id}))
    assert setup.table(b) != [] and setup.table(newcomer) != []


def test_waiting_sequences_are_kept_too() -> None:
    setup = Setup(num_blocks=3)
    a, b, c = (setup.computed([i, i]) for i in range(3))
    with pytest.raises(OutOfBlocksError):
        setup.scheduler.schedule([(extend(s), 2) for s in (a, b, c)], keep=frozenset({1, 2, 3}))
    assert setup.scheduler.num_preemptions == 0


def test_out_of_blocks_names_what_the_first_sequence_needs() -> None:
    setup = Setup(num_blocks=4, budget=6)
    setup.computed(4, known=False)
    a, b = setup.add(9), setup.add(7)
    with pytest.raises(OutOfBlocksError) as caught:
        setup.scheduler.schedule([(a, 0), (b, 0)])
    assert (caught.value.needed, caught.value.free) == (3, 2)
    setup.manager.check_invariants()


def test_a_newer_sequence_that_fits_runs_before_out_of_blocks() -> None:
    setup = Setup(num_blocks=4)
    setup.computed(4, known=False)
    a, b = setup.add(6), setup.add(3)
    assert chunks(setup.scheduler.schedule([(a, 0), (b, 0)])) == [(b.seq_id, 0, 3)]


def test_a_waiting_sequence_that_cannot_be_computed_again_keeps_its_blocks() -> None:
    setup = Setup(num_blocks=3)
    a, b, c = setup.computed(2), setup.computed(2, known=False), setup.computed(2)
    step = setup.scheduler.schedule([(extend(a), 2), (extend(c), 2), (extend(b), 2)])
    assert chunks(step) == [(1, 2, 1)]
    assert len(setup.table(b)) == 1 and setup.table(c) == []


def test_a_match_that_did_not_run_can_be_preempted() -> None:
    """Its blocks are in the pool like anybody's, whatever became of the step."""
    setup = Setup(num_blocks=6)
    a = setup.computed(list(range(8)))
    setup.scheduler.preempt(a)
    setup.computed(6, known=False)
    with pytest.raises(OutOfBlocksError):
        setup.scheduler.schedule([(a, 7)])
    assert a.num_computed_tokens == 6, "its cached head was found"
    assert setup.scheduler.preempt_newest(set())
    assert a.num_computed_tokens == 0 and setup.table(a) == []


def test_a_fork_that_gives_way_makes_the_copy_needless() -> None:
    setup = Setup(num_blocks=1, block_size=4)
    a = setup.computed(2)
    b = setup.fork(a)
    (block,) = setup.table(a)
    step = setup.scheduler.schedule([(extend(a), 2)])
    assert step.block_copies == [] and setup.table(a) == [block] and setup.table(b) == []


def test_a_copy_that_became_needless_costs_nobody_else_a_block() -> None:
    setup = Setup(num_blocks=2, block_size=4)
    idle, a = setup.computed(2), setup.computed(2)
    b = setup.fork(a)
    setup.run(extend(a))
    assert setup.table(b) == [] and setup.table(idle) != []


def test_blocks_that_others_share_are_not_freed_by_preemption() -> None:
    setup = Setup(num_blocks=4)
    a = setup.computed([1, 2, 3, 4])
    b = setup.fork(a)
    other = setup.computed(2)
    setup.scheduler.remember(b)
    setup.scheduler.remember(a)
    setup.computed(4)  # a gives nothing, a and b give two
    assert [len(setup.table(s)) for s in (a, b, other)] == [0, 0, 1]
    assert setup.scheduler.num_preemptions == 2


# preempt_newest, preempt_all, undo, forget


def test_preempt_newest() -> None:
    setup = Setup(num_blocks=4)
    a, b, c = setup.computed(2), setup.computed(2), setup.computed(2, known=False)
    assert setup.scheduler.preempt_newest(set())
    assert [len(setup.table(s)) for s in (a, b, c)] == [1, 0, 1], "c can't be computed again"
    assert not setup.scheduler.preempt_newest({a.seq_id})
    assert setup.scheduler.preempt_newest({b.seq_id}) and setup.table(a) == []
    assert not setup.scheduler.preempt_newest(set())


def test_a_sequence_made_opaque_later_is_safe() -> None:
    setup = Setup(num_blocks=1)
    a = setup.computed(2)
    a.token_ids = None
    assert not setup.scheduler.preempt_newest(set())


def test_undo_takes_back_the_slots_of_a_step() -> None:
    setup = Setup()
    a, b, c = setup.computed(3), setup.computed(list(range(4))), setup.add(list(range(7)))
    child = setup.fork(a)
    shared = setup.table(a)
    step = setup.scheduler.schedule([(extend(a, 2), 3), (extend(b), 4), (c, 6)])
    setup.scheduler.undo(step)
    setup.manager.check_invariants()
    assert [setup.manager.num_tokens(s.seq_id) for s in (a, b, c, child)] == [3, 4, 4, 3]
    assert [s.num_computed_tokens for s in (a, b, c, child)] == [3, 4, 4, 3]
    # The copy was made, so the sequence keeps it.
    assert setup.table(child) == shared and setup.table(a) == [shared[0], step.block_copies[0][1]]
    again = setup.scheduler.schedule([(a, 3), (b, 4), (c, 6)])
    assert chunks(again) == chunks(step) and again.block_copies == []
    setup.scheduler.update(again)
    setup.manager.check_invariants()


def test_preempt_all_is_all_or_nothing() -> None:
    setup = Setup()
    a, b, unknown = setup.computed(2), setup.computed(2), setup.computed(2, known=False)
    assert setup.scheduler.preempt_all() == 1
    assert setup.scheduler.num_preemptions == 0 and len(setup.table(a)) == len(setup.table(b)) == 1
    setup.scheduler.forget(unknown)
    setup.manager.free(unknown.seq_id)
    assert setup.scheduler.preempt_all() == 0
    assert setup.scheduler.num_preemptions == 2 and setup.pool.num_in_use == setup.scheduler.num_resident == 0


def test_a_forgotten_sequence_is_no_victim() -> None:
    setup = Setup(num_blocks=2)
    a, b = setup.computed(2), setup.computed(2)
    setup.scheduler.forget(b)
    setup.scheduler.forget(b)
    assert setup.scheduler.preempt_newest(set())
    assert setup.table(a) == [] and setup.table(b) != []
    assert not setup.scheduler.preempt_newest(set())


# The same content again


def test_a_batch_larger_than_the_pool_decodes_row_by_row() -> None:
    """The memory of a pool of six blocks serves eight rows that need four each."""
    setup = Setup(num_blocks=6, budget=7)
    slots: dict[tuple[int, int], int] = {}

    def step(pending: Pending) -> None:
        output = setup.scheduler.schedule(pending)
        slots.update({(d, i): slots[s, i] for s, d in output.block_copies for i in range(2) if (s, i) in slots})
        for chunk in output.chunks:
            table, known = setup.table(chunk.sequence), chunk.sequence.token_ids
            assert known is not None
            assert [slots[table[i // 2], i % 2] for i in range(chunk.start)] == known[: chunk.start]
            for i in range(chunk.start, chunk.start + chunk.num_tokens):
                slots[table[i // 2], i % 2] = known[i]
        setup.scheduler.update(output)

    rng = random.Random(0)
    rows = [setup.add([rng.randrange(9) for _ in range(3)]) for _ in range(8)]
    for _ in range(6):
        pending: Pending = [(row, row.num_tokens - 1) for row in rows]
        while pending:
            step(pending)
            setup.manager.check_invariants()
            pending = [(row, limit) for row, limit in pending if row.num_pending_tokens]
        for row in rows:
            assert row.token_ids is not None
            row.token_ids.append(rng.randrange(9))
            row.num_tokens += 1
    assert setup.scheduler.num_preemptions > 8
    assert setup.manager.prefix_hit_tokens > 0
