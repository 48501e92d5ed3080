"""Another policy than the usual one: each sequence's blocks are neighbours, reserved when it is let in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from helpers.scheduler_world import WatchedScheduler, World, random_call
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.policy import FCFS
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import SequenceGroup

CALLS = ("step", "submit", "forward", "cancel", "lay_aside", "crop", "give_up", "make_room", "release")


class Contiguous(FCFS):
    """A sequence has a run of blocks of its own for the longest that any may get; without one it waits."""

    def __init__(self, manager: BlockManager, longest: int) -> None:
        self.manager, self.length = manager, -(-longest // manager.block_size)
        self.runs: dict[int, range] = {}
        self.num_refused = 0

    def spare(self, group: SequenceGroup, num_blocks: int, is_alone: bool, is_forced: bool) -> int | None:
        if len(self._free_runs()) >= len(group.sequences):
            return 0
        self.num_refused += 1
        return None

    def blocks(self, requests: Sequence[tuple[int, int]]) -> list[int] | None:
        free, chosen = self._free_runs(), []
        for seq_id, num_tokens in requests:
            own = self.runs.setdefault(seq_id, free[0] if free else range(0))
            free = [run for run in free if run != own]
            held = len(self.manager.blocks(seq_id))
            chosen += own[held : held + self.manager.blocks_needed(seq_id, num_tokens)]
        return chosen

    def _free_runs(self) -> list[range]:
        self.runs = {s: run for s, run in self.runs.items() if s in self.manager and self.manager.blocks(s)}
        taken, found, start = set(self.runs.values()), [], 0
        while start + self.length <= self.manager.pool.num_blocks:
            found.append(range(start, start := start + self.length))
        return [run for run in found if run not in taken]


@pytest.mark.parametrize("seed", range(8))
def test_a_contiguous_allocator(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a decision is made past the policy: a block from elsewhere, a group let in without a reservation."""
    rng = random.Random(seed)
    policies: list[Contiguous] = []

    def scheduler(manager: BlockManager, *args: Any, **options: Any) -> WatchedScheduler:
        policies.append(Contiguous(manager, 28))
        return WatchedScheduler(manager, *args, **options, policy=policies[0])

    world = World(rng, rng.choice((10, 25)), 3, rng.randint(2, 7), 4, caching=False, scheduler=scheduler)
    submit = world.submit

    def submit_alone(kind: str, *args: Any, **facts: Any) -> Any:
        alone = {"num_rows": 1, "has_no_ids": False}
        return submit("cache" if kind == "cache" else "samples", *args, **facts | alone)

    monkeypatch.setattr(world, "submit", submit_alone)
    monkeypatch.setattr(world, "_meanwhile", lambda step: None)  # forks, which share blocks
    for _ in range(600):
        random_call(world, rng, {call: {"step": 30, "submit": 15}.get(call, 2) for call in CALLS})
        world.check()
        for row in world.rows.values():
            table = world._table(row)
            assert table == list(range(table[0], table[0] + len(table))) if table else True
            assert not table or table[0] % policies[0].length == 0
    world.drain()
    assert policies[0].num_refused > 10, "some had to wait for a run"


def priority_last(group: SequenceGroup) -> tuple[int, ...]:
    return -group.priority, group.arrival


def prompt(scheduler: Scheduler, priority: int = 0) -> Any:
    """A sequence of three tokens that is waited for."""
    sequence = scheduler.new_sequence(scheduler.new_group(priority))
    sequence.token_ids, sequence.num_tokens, sequence.is_wanted = [1, 2, 3], 3, True
    scheduler.queues.wake(sequence.group)
    return sequence


@pytest.mark.parametrize(("order", "expected"), [(None, [2, 1]), (priority_last, [1, 2])])
def test_the_order_is_the_policys(
    order: Callable[[SequenceGroup], tuple[int, ...]] | None, expected: list[int]
) -> None:
    manager = BlockManager(16, 2)
    policy = FCFS()
    if order is not None:
        policy.order = order  # type: ignore[method-assign]
    scheduler = Scheduler(manager, 100, 1, policy=policy)
    for priority in (1, 0):
        prompt(scheduler, priority)
    ran = []
    for _ in range(2):
        step = scheduler.schedule()
        ran += step.seq_ids
        scheduler.update(step)
    assert ran == expected


def test_a_policy_that_says_not_now_is_asked_in_every_step() -> None:
    """What a policy waits for need not show in the number of free blocks."""
    asked = 0

    class Later(FCFS):
        def spare(self, group: SequenceGroup, num_blocks: int, is_alone: bool, is_forced: bool) -> int | None:
            nonlocal asked
            asked += not is_alone
            return 0 if is_alone or asked == 3 else None

    manager = BlockManager(16, 2)
    scheduler = Scheduler(manager, 100, 8, policy=Later())
    first, _ = prompt(scheduler), prompt(scheduler)
    rows = []
    for _ in range(3):
        step = scheduler.schedule()
        rows.append(step.num_seqs)
        assert step.is_stalled == (step.num_seqs < 2)
        scheduler.update(step)
        first.token_ids.append(4)
        first.num_tokens += 1
        scheduler.queues.wake(first.group)
    assert rows == [1, 1, 2]
