"""`Scheduler`: what runs in a step, who is let in, and who gives up blocks for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest

from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus

WAITING, RUNNING, SWAPPED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED


class Setup:
    """A scheduler, its manager, and the part of the engine that feeds them."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 2,
        budget: int = 100,
        max_num_seqs: int = 100,
        caching: bool = True,
        num_swap_blocks: int = 0,
        prefers_swap: bool = False,
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, caching, num_swap_blocks)
        self.scheduler = Scheduler(self.manager, budget, max_num_seqs, lambda group: prefers_swap)
        self.pool = self.manager.pool
        self.next_token = 1000

    def add(
        self,
        tokens: int | list[int],
        group: SequenceGroup | None = None,
        priority: int = 0,
        batch_key: Hashable = None,
        owner: object = None,
        is_recomputable: bool = True,
        is_wanted: bool = True,
        logits_from: int | None = None,
    ) -> Sequence:
        """A sequence of these tokens (a number: that many of its own) that a caller waits for."""
        group = group or self.scheduler.new_group(priority, batch_key, owner)
        sequence = self.scheduler.new_sequence(group)
        if isinstance(tokens, int):
            self.next_token += 1000
            tokens = [self.next_token + i for i in range(tokens)]
        sequence.token_ids, sequence.is_recomputable = list(tokens), is_recomputable
        sequence.num_tokens = len(tokens)
        sequence.logits_from = len(tokens) - 1 if logits_from is None else logits_from
        sequence.is_wanted = is_wanted
        self.scheduler.queues.wake(group)
        return sequence

    def extend(self, *sequences: Sequence, num_tokens: int = 1) -> None:
        for sequence in sequences:
            sequence.token_ids += [500 + i for i in range(num_tokens)]
            sequence.num_tokens += num_tokens
            sequence.logits_from = sequence.num_tokens - 1
            sequence.is_wanted = True
            self.scheduler.queues.wake(sequence.group)

    def step(self, **options: Any) -> Batch:
        step = self.scheduler.schedule(**options)
        self.scheduler.update(step)
        self.manager.check_invariants()
        return step

    def run(self) -> list[Batch]:
        """Steps until nothing is left to do."""
        steps = []
        while self.scheduler.queues.has_work:
            step = self.step()
            steps.append(step if step.chunks else self.step(forced=True))
        return steps

    def computed(self, tokens: int | list[int], **options: Any) -> Sequence:
        """A sequence whose tokens were computed, and for which no caller waits at the moment."""
        sequence = self.add(tokens, **options)
        self.run()
        assert sequence.num_uncomputed_tokens == 0
        sequence.is_wanted = False
        return sequence

    def beams(self, tokens: int | list[int], num_rows: int, **options: Any) -> list[Sequence]:
        """A group of so many rows after one computed prompt."""
        first = self.computed(tokens, **options)
        return [first, *(self.scheduler.fork(first) for _ in range(num_rows - 1))]

    def table(self, sequence: Sequence) -> list[int]:
        return self.manager.block_table(sequence.seq_id).copy()


def ids(*sequences: Sequence) -> list[int]:
    return [sequence.seq_id for sequence in sequences]


def status(*sequences: Sequence) -> list[SequenceStatus]:
    return [sequence.group.status for sequence in sequences]


# Budget and order


def test_prompts_are_chunked_to_the_token_budget() -> None:
    setup = Setup(block_size=4, budget=5)
    setup.add(7), setup.add(6)
    steps = setup.run()
    assert [step.chunks for step in steps] == [[(1, 0, 5)], [(1, 5, 2), (2, 0, 3)], [(2, 3, 3)]]
    # Blocks are new in the step whose tokens first need them.
    assert [len(step.new_blocks) for step in steps] == [2, 1, 1]


@pytest.mark.parametrize("budget", range(1, 8))
def test_the_budget_is_spent_exactly(budget: int) -> None:
    setup = Setup(num_blocks=64, budget=budget)
    for n in (3, 1, 5, 2, 7):
        setup.add(n)
    sizes = [step.num_tokens for step in setup.run()]
    assert sizes[:-1] == [budget] * (len(sizes) - 1) and 0 < sizes[-1] <= budget and sum(sizes) == 18


def test_decodes_go_before_prefill_chunks_and_these_before_new_prompts() -> None:
    setup = Setup(num_blocks=64, budget=4)
    long = setup.add(7)
    setup.step()
    short = setup.computed(1)
    setup.extend(short)
    long_2 = setup.add(6)
    setup.step()
    assert long.num_uncomputed_tokens == 0
    setup.extend(short, long)
    third = setup.add(9)
    step = setup.step()
    assert step.chunks[:2] == [(long.seq_id, 7, 1), (short.seq_id, 2, 1)], "decodes, in order of arrival"
    assert step.chunks[2][0] == long_2.seq_id, "what has begun goes on"
    assert third.num_computed_tokens == 0
    assert sum(n for _, _, n in step.chunks) == 4


def test_prompts_have_a_budget_of_their_own_behind_decodes() -> None:
    setup = Setup(num_blocks=64, budget=12)
    decodes = [setup.computed(1) for _ in range(5)]
    setup.extend(*decodes)
    first, second = setup.add(4), setup.add(4)
    step = setup.step(max_prompt_tokens=6)
    assert step.chunks == [*((s.seq_id, 1, 1) for s in decodes), (first.seq_id, 0, 4), (second.seq_id, 0, 2)]
    setup.extend(*decodes)
    setup.add(8)
    assert setup.step(max_prompt_tokens=2).num_tokens == 5 + 2, "chunks that go on count, too"
    assert setup.step(max_prompt_tokens=20).num_tokens == 8, "never more than the whole budget"


def test_first_come_first_served_within_a_priority() -> None:
    setup = Setup(max_num_seqs=1)
    setup.add(1, priority=1), setup.add(1), setup.add(1, priority=-1), setup.add(1), setup.add(1, priority=-1)
    assert [step.chunks[0][0] for step in setup.run()] == [3, 5, 2, 4, 1]


def test_an_unwanted_sequence_stays_pending() -> None:
    setup = Setup()
    a, b = setup.add(2, is_wanted=False), setup.add(3)
    assert [step.chunks for step in setup.run()] == [[(2, 0, 3)]]
    assert not setup.scheduler.queues.has_work and a.num_uncomputed_tokens == 2 and a.num_wanted_tokens == 0
    a.is_wanted = True
    setup.scheduler.queues.wake(a.group)
    assert setup.scheduler.queues.has_work and [step.chunks for step in setup.run()] == [[(1, 0, 2)]]
    assert b.num_uncomputed_tokens == 0


@pytest.mark.parametrize("where", ["waiting", "swapped"])
def test_who_gave_up_waiting_is_passed_over(where: str) -> None:
    setup = Setup(num_blocks=4, num_swap_blocks=4, prefers_swap=True)
    a = setup.add(4) if where == "waiting" else setup.computed(4)
    if where == "swapped":
        setup.scheduler.preemption.preempt(a.group)
        setup.extend(a)
    assert setup.scheduler.queues.has_work
    a.is_wanted = False  # the scheduler is not told
    assert not setup.scheduler.queues.has_work
    b = setup.add(2)
    assert setup.step().chunks[0][0] == b.seq_id
    a.is_wanted = True
    setup.scheduler.queues.wake(a.group)
    setup.run()
    assert a.num_uncomputed_tokens == 0


# Batch keys and owners


def test_groups_of_different_batch_keys_alternate() -> None:
    setup = Setup(num_blocks=64)
    rows = [setup.add(2, batch_key=key) for key in ("a", "b", "a", "b")]
    seen = []
    for _ in range(6):
        step = setup.step()
        seen.append(str(step.batch_key) * step.num_seqs)
        setup.extend(*(row for row in rows if row.seq_id in step.seq_ids))
    # The second "a" waits behind the first "b": order of arrival goes before full steps.
    assert seen[:2] == ["a", "b"] and set(seen[2:]) == {"aa", "bb"} and seen[2:] == [seen[2], seen[3]] * 2
    assert all(row.num_computed_tokens > 2 for row in rows)


def test_a_key_without_work_costs_no_step() -> None:
    setup = Setup()
    setup.add(1, batch_key="a")
    b = setup.add(1, batch_key="b")
    setup.step()
    setup.scheduler.free(b)  # was to be next
    c = setup.add(1, batch_key="a")
    assert setup.step().chunks == [(c.seq_id, 0, 1)]


def test_only_one_owner() -> None:
    setup = Setup(num_blocks=64)
    mine, other = object(), object()
    a, b = setup.computed(3, owner=other), setup.computed(3, owner=mine)
    setup.extend(a, b)
    c, d = setup.add(2, owner=mine), setup.add(2, owner=other)
    assert setup.step(only=mine).chunks == [(b.seq_id, 3, 1), (c.seq_id, 0, 2)]
    assert setup.step(only=mine).chunks == [] and setup.scheduler.queues.has_work
    assert setup.step(only=other).chunks == [(a.seq_id, 3, 1), (d.seq_id, 0, 2)]


def test_only_one_owner_forced_past_older_ones() -> None:
    setup = Setup(num_blocks=4)
    mine = object()
    older = setup.computed(6)
    waiting, own = setup.add(4), setup.add(4, owner=mine)
    assert setup.step(only=mine).chunks == []
    assert setup.step(only=mine, forced=True).chunks == [(own.seq_id, 0, 4)]
    assert status(older, waiting, own) == [WAITING, WAITING, RUNNING]


# Admission


def test_a_prompt_is_admitted_only_as_a_whole() -> None:
    setup = Setup(num_blocks=8, budget=4)
    a = setup.computed(8)
    setup.extend(a)
    b = setup.add(8)
    assert setup.step().chunks == [(a.seq_id, 8, 1)], "4 blocks were free, 3 are, and it needs 4 for its tokens so far"
    assert setup.scheduler.admission.num_stalls == 1 and status(b) == [WAITING] and setup.table(b) == []


def test_a_watermark_is_kept_for_what_runs() -> None:
    setup = Setup(num_blocks=300)
    a = setup.computed(2)
    setup.extend(a)
    b = setup.add(2 * 297)
    assert setup.step().chunks == [(a.seq_id, 2, 1)]
    assert setup.pool.num_free == 298, "297 + a watermark of 3 would have to fit"
    setup.scheduler.free(a)
    assert setup.step().chunks[0][0] == b.seq_id
    alone = Setup(num_blocks=300)
    alone.add(600)
    assert len(alone.step().chunks) == 1, "an empty pool needs no watermark"


def test_admission_takes_nothing_from_running_groups() -> None:
    setup = Setup(num_blocks=6)
    a, b = setup.computed(4), setup.computed(4)
    setup.extend(a, b)
    first = setup.add(1, priority=-1)
    step = setup.step()
    assert list(step.seq_ids) == ids(a, b), "not even for a higher priority"
    assert status(first) == [WAITING] and setup.scheduler.preemption.num_preemptions == 0


def test_when_blocks_run_out_nobody_is_admitted() -> None:
    setup = Setup(num_blocks=4)
    a, b = setup.computed(4), setup.computed(4)
    setup.extend(a, b)
    c = setup.add(1)
    assert setup.step().chunks == [(a.seq_id, 4, 1)]
    assert status(a, b, c) == [RUNNING, WAITING, WAITING]
    assert setup.pool.num_free == 1, "c would have fitted"


def test_rows_of_one_prompt_compute_it_once() -> None:
    setup = Setup(num_blocks=8)
    group = setup.scheduler.new_group()
    rows = [setup.add([1, 2, 3, 4, 5], group=group) for _ in range(3)]
    assert [step.chunks for step in setup.run()] == [[(1, 0, 5)], [(2, 4, 1), (3, 4, 1)]]
    assert len({setup.table(row)[1] for row in rows}) == 1 and setup.pool.num_in_use == 5


# Prefix cache and deferral


@pytest.mark.parametrize(("logits_from", "start"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (5, 4)])
def test_tokens_whose_logits_are_wanted_are_computed(logits_from: int, start: int) -> None:
    setup = Setup()
    setup.computed([1, 2, 3, 4, 5, 6])
    second = setup.add([1, 2, 3, 4, 5, 6], logits_from=logits_from)
    assert setup.step().chunks == [(second.seq_id, start, 6 - start)]


def test_full_blocks_are_shared_once_computed_and_cost_no_budget() -> None:
    setup = Setup(budget=3)
    first = setup.computed([1, 2, 3, 4, 5])  # in steps of 3 and 2
    second = setup.add([1, 2, 3, 4, 5, 6, 7])
    step = setup.step()
    assert step.chunks == [(2, 4, 3)]
    assert setup.table(second)[:2] == setup.table(first)[:2] and step.new_blocks == setup.table(second)[2:]
    assert (setup.manager.prefix.hit_tokens, setup.manager.prefix.query_tokens) == (4, 12)


def test_a_prompt_waits_for_the_first_block_that_this_step_computes() -> None:
    setup = Setup()
    a, b, c = setup.add([1, 2, 3, 4]), setup.add([1, 2, 5, 6]), setup.add([7, 8, 9])
    assert [step.chunks for step in setup.run()] == [[(1, 0, 4)], [(2, 2, 2), (3, 0, 3)]]
    assert setup.table(b)[0] == setup.table(a)[0] and c.num_uncomputed_tokens == 0
    assert setup.scheduler.admission.num_stalls == 0
    assert (setup.manager.prefix.hit_tokens, setup.manager.prefix.query_tokens) == (2, 11), "each prompt counts once"


def test_a_prompt_does_not_wait_for_what_it_could_not_share() -> None:
    setup = Setup(block_size=4)
    setup.add([1, 2, 3, 4, 5])
    setup.add([1, 2, 3, 4])  # the last token is computed anyway
    setup.add([1, 2, 3, 4, 5], logits_from=0)
    setup.add([9, 2, 3, 4, 5])
    assert len(setup.step().chunks) == 4


def test_a_stalled_prompt_counts_one_query() -> None:
    setup = Setup(num_blocks=8)
    first = setup.computed([1, 2, 3, 4])
    setup.computed(9)
    big = setup.add([1, 2, 3, 4, *range(10, 18)])
    for _ in range(3):
        assert setup.step().chunks == []
    setup.scheduler.free(first)
    assert (setup.manager.prefix.query_tokens, setup.manager.prefix.hit_tokens) == (13, 0)
    assert setup.table(big) == [] and big.num_computed_tokens == 0


# Preemption


def test_the_newest_runs_only_if_it_needs_nobody_elses_blocks() -> None:
    setup = Setup(num_blocks=4)
    old, new = setup.computed(4), setup.computed(4)
    setup.extend(new)
    assert setup.step().chunks == [], "older ones are not preempted for it"
    assert status(old, new) == [RUNNING, RUNNING]
    assert list(setup.step(forced=True).seq_ids) == ids(new), "unless nothing else could ever run"
    assert status(old, new) == [WAITING, RUNNING]


def test_an_idle_group_makes_room_for_a_waiting_one() -> None:
    setup = Setup(num_blocks=4)
    idle = setup.computed(4)
    idle.group.is_idle = True
    setup.add(6)
    assert len(setup.step().chunks) == 1 and status(idle) == [WAITING]


def test_an_idle_group_that_just_ran_may_be_preempted_in_the_next_step() -> None:
    setup = Setup(num_blocks=3)
    a = setup.computed(4)
    idle = setup.add(2, priority=-1)
    setup.step(forced=True)
    idle.group.is_idle = True
    setup.extend(a)
    assert list(setup.step().seq_ids) == ids(a)
    assert status(idle, a) == [WAITING, RUNNING]


def test_no_more_is_preempted_than_needed() -> None:
    setup = Setup(num_blocks=8)
    rows = [setup.computed(4) for _ in range(4)]
    setup.extend(rows[0], num_tokens=4)
    setup.step()
    assert status(*rows) == [RUNNING, RUNNING, RUNNING, WAITING]


def test_a_preempted_sequence_comes_back_to_what_is_still_cached() -> None:
    setup = Setup(num_blocks=4)
    a = setup.computed([1, 2, 3, 4, 5])
    blocks = setup.table(a)
    setup.scheduler.preemption.preempt(a.group)
    assert (a.num_computed_tokens, a.num_uncomputed_tokens, setup.scheduler.queues.num_running) == (0, 5, 0)
    setup.scheduler.free(setup.computed(2))  # takes the plain free block, not a cached one
    setup.extend(a)
    assert setup.step().chunks == [(1, 4, 2)]
    assert setup.table(a)[:2] == blocks[:2]


# Swap


def test_without_room_in_cpu_memory_a_group_is_dropped_if_it_can_be() -> None:
    setup = Setup(num_blocks=6, num_swap_blocks=1, prefers_swap=True)
    a, kept, known = setup.computed(4), setup.computed(4, is_recomputable=False), setup.computed(4)
    setup.extend(a)
    assert setup.step().swap_outs == [] and status(a, kept, known) == [RUNNING, RUNNING, WAITING]


def test_a_step_that_swaps_in_does_not_swap_out_any_more() -> None:
    """Its swap-outs come first, and would go to the CPU blocks that the swap-ins read."""
    setup = Setup(num_blocks=8, num_swap_blocks=8, prefers_swap=True)
    a, b = setup.computed(4, is_recomputable=False), setup.computed(4, is_recomputable=False)
    for sequence in (a, b):
        setup.scheduler.preemption.preempt(sequence.group)
    idle = setup.computed(8, is_recomputable=False)
    idle.group.is_idle = True
    setup.extend(a, b)
    step = setup.step()
    assert list(step.seq_ids) == ids(a) and len(step.swap_ins) == 2 and step.swap_outs == []
    step = setup.step()
    assert list(step.seq_ids) == ids(b) and len(step.swap_outs) == 4


def test_a_swapped_group_comes_back_only_with_room_for_its_copies() -> None:
    """Two rows that write into one shared partial block take a copy and perhaps a block behind it."""
    setup = Setup(num_blocks=8, block_size=4, num_swap_blocks=8, prefers_swap=True, caching=False)
    rows = setup.beams(3, 2)
    setup.scheduler.preemption.preempt(rows[0].group)
    blocker = setup.computed(16, is_recomputable=False)
    setup.extend(*rows, num_tokens=2)
    step = setup.step()  # one to swap in, one to copy, two to grow: exactly what is free, but for the watermark
    assert step.chunks == step.swap_ins == [] and status(rows[0], blocker) == [SWAPPED, RUNNING]
    step = setup.step(forced=True)
    assert len(step.chunks) == 2 and len(step.swap_ins) == 1 and len(step.block_copies) == 1
    assert setup.pool.num_free == 0 and status(blocker) == [RUNNING]


def test_a_swapped_group_that_outgrows_the_pool_is_computed_again_row_by_row() -> None:
    setup = Setup(num_blocks=5, num_swap_blocks=5, prefers_swap=True)
    rows = setup.beams(6, 2)
    setup.extend(*rows)
    setup.run()  # three blocks shared, one each
    setup.scheduler.preemption.preempt(rows[0].group)
    for row in rows:
        row.is_wanted = False
    setup.extend(*rows, num_tokens=2)
    assert setup.step().chunks == []
    for _ in range(8):
        ran = setup.step(forced=True).seq_ids
        for row in rows:
            row.is_wanted &= row.seq_id not in ran or row.num_uncomputed_tokens > 0
        if not setup.scheduler.queues.has_work:
            break
    assert not setup.scheduler.queues.has_work, "both rows had their turn"


# Forced steps


def test_forced_is_for_the_first_one_only() -> None:
    setup = Setup(num_blocks=6)
    idle_older = setup.computed(4)  # no caller waits for it, but it is not idle either
    a, b = setup.computed(4), setup.computed(4)
    setup.extend(a, b)
    step = setup.step(forced=True)
    assert list(step.seq_ids) == ids(a), "b may not take from an older group"
    assert status(idle_older, a, b) == [RUNNING, RUNNING, WAITING]


def test_a_group_that_does_not_fit_as_a_whole_runs_row_by_row() -> None:
    setup = Setup(num_blocks=4)
    rows = setup.beams(6, 3)
    setup.extend(*rows, num_tokens=2)
    done = []
    for _ in range(9):
        step = setup.step()
        step = step if step.chunks else setup.step(forced=True)
        for row in rows:
            if row.seq_id in step.seq_ids and row.num_uncomputed_tokens == 0:
                done.append(row)
                row.is_wanted = False  # its logits are out
        if not setup.scheduler.queues.has_work:
            break
    assert done == rows


# Idle time, crop, undo, nested steps


def test_a_renewed_group_is_the_newest() -> None:
    setup = Setup(num_blocks=6)
    a, b, c = setup.computed(4), setup.computed(4), setup.computed(4)
    setup.scheduler.queues.renew(a.group)
    assert [g.order for g in setup.scheduler.queues.groups] == sorted(g.order for g in setup.scheduler.queues.groups)
    setup.extend(a, b)
    assert list(setup.step().seq_ids) == ids(b)
    assert status(a, b, c) == [WAITING, RUNNING, RUNNING]


def test_a_step_inside_a_step_takes_nothing_from_it() -> None:
    setup = Setup(num_blocks=6)
    a, b, other = setup.computed(4), setup.computed(2), setup.computed(4)
    setup.extend(a, b)
    setup.scheduler.preemption.preempt(other.group)
    outer = setup.scheduler.schedule()
    tables = [setup.table(s) for s in (a, b)]
    inner = setup.add(2, priority=-1)
    assert setup.step(forced=True).chunks == [(inner.seq_id, 0, 2)]
    setup.add(8, priority=-1)
    with pytest.raises(OutOfBlocksError):
        setup.scheduler.schedule(forced=True)
    assert [setup.table(s) for s in (a, b)] == tables and setup.scheduler.queues.is_in_flight(a.group)
    assert [s.num_uncomputed_tokens for s in (a, b)] == [1, 1]
    setup.scheduler.update(outer)
    assert [s.num_uncomputed_tokens for s in (a, b)] == [0, 0] and not setup.scheduler.queues.is_in_flight(b.group)


# Cost


class CountingManager(BlockManager):
    """Counts calls of all methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: Counter[str] = Counter()
        super().__init__(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_") and name != "calls":
            self.calls[name] += 1
        return found


class CountedGroups(dict[int, SequenceGroup]):
    """A queue that must not be walked through."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("all waiting groups were looked at")

    keys = values = items = __iter__  # type: ignore[assignment]


def test_a_step_costs_what_runs_not_what_waits() -> None:
    costs = []
    for num_waiting in (10, 100_000):
        setup = Setup(num_blocks=40, num_swap_blocks=40)
        setup.manager.__class__ = CountingManager
        setup.manager.calls = Counter()  # type: ignore[attr-defined]
        running = [setup.computed(4) for _ in range(4)]
        for sequence in running:
            sequence.is_wanted = True
        for _ in range(num_waiting):
            setup.add([9] * 72)
        waiting = setup.scheduler.queues.waiting
        waiting.groups = CountedGroups(waiting.groups)
        calls = setup.manager.calls  # type: ignore[attr-defined]
        before = calls.total()
        for _ in range(12):
            setup.extend(*running)
            assert setup.scheduler.queues.has_work
            step = setup.scheduler.schedule()
            assert len(step.chunks) == 4
            setup.scheduler.update(step)
        costs.append(calls.total() - before)
    assert costs[0] == costs[1] < 12 * 60


@pytest.mark.parametrize("windows", [(None,), (None, 5), (3,)])
def test_drafts_that_are_taken_back(windows: tuple[int | None, ...]) -> None:
    """Would break: windows given back that a sequence reads again behind its drafts, logits of too few of them."""
    rng = random.Random(2)
    manager = BlockManager(200, 4, windows=windows)
    scheduler = Scheduler(manager, 64, 8)
    sequence = scheduler.new_sequence()
    known = list(range(10))
    sequence.token_ids, sequence.num_tokens, sequence.is_wanted = known.copy(), 10, True
    for _ in range(60):
        drafts = [rng.randrange(50) for _ in range(rng.randrange(7))]
        start = sequence.num_computed_tokens
        scheduler.add_drafts(sequence, drafts)
        batch = scheduler.schedule()
        assert batch.chunks == [(sequence.seq_id, start, len(known) + len(drafts) - start)]
        assert len(batch.logit_rows) == 1 + len(drafts)
        scheduler.update(batch)
        kept = rng.randint(0, len(drafts))
        scheduler.settle_drafts(sequence, kept)
        known += drafts[:kept]
        assert sequence.token_ids == known and sequence.num_computed_tokens == len(known), "computed again"
        manager.check_invariants()
        for table, window in zip(manager.block_tables(sequence.seq_id), windows, strict=True):
            assert window is None or sum(block >= 0 for block in table) <= -(-window // 4) + 1
        known.append(rng.randrange(50))
        scheduler.add_placeholder(sequence, -1)
        scheduler.resolve_token(sequence, known[-1])
