"""Random requests through Scheduler and BlockManager, with memories and a "model" that notice every token gone wrong.

Two drivers share `World`: hypothesis, which shrinks what it finds, and a seeded random walk, which goes far.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.scheduler_world import random_call, random_world

NUM_RANDOM_STEPS = 20_000
CALLS_PER_EPISODE = 400
STEPS_BETWEEN_CHECKS = 24  # of the whole state, in the random walk; what a step touches is checked in every step

EVENTS = {
    "preemption by recomputation",
    "preemption by swap",
    "preemption of an idle group",
    "swap-in",
    "swapped in at once",
    "copy-on-write",
    "prefix hit",
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
    "ended while it ran",
}


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(0, 59))
def test_short_random_walks(rng: random.Random, kind: int) -> None:
    """As the long one; hypothesis makes one that fails as short as it can be."""
    world = random_world(kind, rng)
    for _ in range(rng.randint(1, 40)):
        random_call(world, rng)
        world.check()
    world.drain()


def test_long_random_walk() -> None:
    num_steps, events, episode = 0, Counter[str](), 0
    while num_steps < NUM_RANDOM_STEPS or (EVENTS - set(+events) and num_steps < 10 * NUM_RANDOM_STEPS):
        world = random_world(episode, random.Random(episode))
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
