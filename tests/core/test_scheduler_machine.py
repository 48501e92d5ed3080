"""Random requests through Scheduler and BlockManager, with memories and a "model" that notice every token gone wrong.

Two drivers share `World`: hypothesis, which shrinks what it finds, and a seeded random walk, which goes far.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from helpers.scheduler_world import WINDOWS, World, random_call, random_world

NUM_RANDOM_STEPS = 20_000
CALLS_PER_EPISODE = 400
STEPS_BETWEEN_CHECKS = 24  # of the whole state, in the random walk; what a step touches is checked in every step

# Driver 1: hypothesis

small = st.integers(0, 7)
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=9)
rarely = st.sampled_from([False, False, False, True])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 7),
        max_num_seqs=st.integers(1, 5),
        swap_share=st.sampled_from([0, 1, 2]),
        caching=st.sampled_from([True] * 5 + [False]),
        overlaps=st.booleans(),
        windows=st.sampled_from(WINDOWS),
        seed=st.integers(0, 3),
    )
    def begin(self, seed: int, num_blocks: int, swap_share: int, **settings: Any) -> None:
        self.world = World(random.Random(seed), num_blocks, num_swap_blocks=num_blocks * swap_share // 2, **settings)

    @rule(
        kind=st.sampled_from(["samples", "beams", "cache"]),
        source=small,
        cut=small,
        added=token_lists,
        num_rows=st.sampled_from([1, 1, 2, 3]),
        grows=st.integers(1, 9),
        key=st.sampled_from([0, 0, 0, 1]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        batch_key=st.sampled_from([0, 0, 0, 1]),
        has_no_ids=rarely,
        keeps_logits=st.booleans(),
    )
    def submit(self, **request: object) -> None:
        self.world.submit(**request)  # type: ignore[arg-type]

    @rule(failing=rarely, has_company=rarely, max_tokens=st.sampled_from([None, None, None, 1, 3]))
    def step(self, failing: bool, has_company: bool, max_tokens: int | None) -> None:
        self.world.step(failing, has_company, max_tokens)

    @rule(count=st.integers(2, 9))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(pick=small, added=token_lists, has_no_ids=rarely)
    def forward(self, pick: int, added: list[int], has_no_ids: bool) -> None:
        self.world.forward(pick, added, has_no_ids)

    @rule(pick=small, cut=st.integers(0, 12))
    def crop(self, pick: int, cut: int) -> None:
        self.world.crop(pick, cut)

    @rule(pick=small, num_tokens=st.integers(1, 4))
    def add_unknown_tokens(self, pick: int, num_tokens: int) -> None:
        self.world.add_unknown_tokens(pick, num_tokens)

    @rule(call=st.sampled_from(["lay_aside", "keep_past", "fork", "reorder", "pin"]), pick=small)
    def change(self, call: str, pick: int) -> None:
        getattr(self.world, call)(pick)

    @rule(call=st.sampled_from(["cancel", "drop_row", "give_up", "make_room", "swap_in_now"]), pick=small)
    def end_or_move(self, call: str, pick: int) -> None:
        getattr(self.world, call)(pick)

    @rule(call=st.sampled_from(["unpin", "release", "reset_prefix_cache"]))
    def let_go(self, call: str) -> None:
        getattr(self.world, call)()

    @invariant()
    def check(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# Driver 2: a long seeded walk

EVENTS = {
    "preemption by recomputation",
    "preemption by swap",
    "preemption of an idle group",
    "swap-in",
    "swapped in at once",
    "copy-on-write",
    "prefix hit",
    "deferral",
    "chunked prefill",
    "forced",
    "one row of a group",
    "some rows of a group",
    "out of blocks",
    "fork",
    "fork while waiting",
    "fork while running",
    "fork while swapped",
    "crop beyond a window",
    "crop refused",
    "crop while waiting",
    "crop while running",
    "crop while swapped",
    "cancel while waiting",
    "cancel while running",
    "cancel while swapped",
    "cancel while idle",
    "row dropped while waiting",
    "row dropped while running",
    "row dropped while swapped",
    "forward interrupted",
    "renewal",
    "grown from outside",
    "release of a filled pool",
    "undo",
    "step of one owner",
    "callers beside a step",
    "left out until tokens are known",
    "ended while it ran",
}


@pytest.mark.timeout(600)
def test_long_random_walk() -> None:
    num_steps, events, episode = 0, Counter[str](), 0
    while num_steps < NUM_RANDOM_STEPS or (EVENTS - set(+events) and num_steps < 10 * NUM_RANDOM_STEPS):
        world = random_world(episode)
        next_check = 0
        where: object = None
        try:
            for where in range(CALLS_PER_EPISODE):  # noqa: B007
                random_call(world, world.rng)
                if world.num_steps >= next_check:
                    world.check()
                    next_check = world.num_steps + STEPS_BETWEEN_CHECKS
            where = "drain"
            world.drain()
        except Exception as error:
            error.add_note(f"episode {episode}, call {where}")
            raise
        num_steps += world.num_steps
        events += world.events
        episode += 1
    assert not EVENTS - set(+events), f"did not happen in {num_steps} steps"
