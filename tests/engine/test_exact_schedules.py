"""Requests beside others, in any schedule: their log-probabilities are bit for bit those of the request alone.

Hypothesis draws what is asked for, when it comes and leaves, and a pool that is too small for it. `-m slow` draws
`EXACT_SCHEDULES` for each model (default 200; 2000 are 10,000 in all).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hf_paged
from helpers.models import build, random_ids
from helpers.requests import ENDLESS, SAMPLE
from helpers.waiting import PATIENCE

FAMILIES = ["llama", "gpt2", "mistral", "qwen3", "qwen3_moe"]
NUM_SCHEDULES = int(os.environ.get("EXACT_SCHEDULES", 200))
NUM_NEW, NUM_TOP = 12, 4
CUTS, TAILS = (0, 7, 24, 48), (1, 9, 20)
LONGEST = CUTS[-1] + TAILS[-1] + NUM_NEW

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "lookup": {"prompt_lookup_num_tokens": 5},
    "sample": SAMPLE | {"seed": 5, "temperature": 0.8, "top_p": 0.9, "logprobs_mode": "processed"},
    "samples": SAMPLE | {"seed": 5, "num_return_sequences": 3, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "score": {},
}

Rows = list[list[hf_paged.TokenLogprobs]]
Said = tuple[Rows, list[float] | None]

pytestmark = pytest.mark.usefixtures("full_budget")


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        text: Which text its prompt begins with, and
        cut: how many tokens of it; then come
        tail: so many of its own.
    """

    mode: str
    text: int
    cut: int
    tail: int

    @property
    def prompt(self) -> list[int]:
        text = random_ids(1, 12, seed=self.text)[0].tolist() * 4  # repeats itself: drafts are found
        return text[: self.cut] + random_ids(1, self.tail, seed=90 + self.tail)[0].tolist()

    @property
    def reference(self) -> Ask:
        """What says the same: drafts change nothing, and a text is as likely as when it was chosen."""
        return replace(self, mode="greedy") if self.mode in ("lookup", "score") else self

    def submit(self, engine: hf_paged.Engine, family: str) -> hf_paged.Request:
        if self.mode == "score":
            text = self.prompt + tokens(alone(family, self.reference)[0])[0]
            return engine.submit_score(text, top=NUM_TOP, first=len(self.prompt))
        return engine.submit(self.prompt, max_new_tokens=NUM_NEW, logprobs=NUM_TOP, **ENDLESS, **MODES[self.mode])


def said(output: hf_paged.RequestOutput) -> Said:
    if output.prompt_logprobs is not None:
        return [[replace(each, rank=None) for each in output.prompt_logprobs]], None
    return output.logprobs or [], output.scores


def tokens(rows: Rows) -> list[list[int]]:
    return [[each.token_id for each in row] for row in rows]


@dataclass(frozen=True)
class Schedule:
    """What arrives and when, and where it has to find room.

    Attributes:
        events: A request; a number: of steps; or `("cancel", n)`: one of those that came leaves.
    """

    settings: dict[str, Any]
    events: list[Ask | int | tuple[str, int]]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    size = draw(st.sampled_from([4, 1, 8, 16]))
    given_settings = {
        "block_size": size,
        "num_blocks": -(-LONGEST // size) + draw(st.sampled_from([0, 1, 3, 6, 100])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 2, 13, 33, 256])),
        "max_num_seqs": draw(st.sampled_from([256, 3])),
        "preemption": draw(st.sampled_from(["recompute", "swap"])),
        "enable_prefix_caching": draw(st.booleans()),
        "use_async_batching": draw(st.booleans()),
    }
    fields = (st.sampled_from(list(MODES)), st.integers(0, 1), st.sampled_from(CUTS), st.sampled_from(TAILS))
    asks = st.builds(Ask, *fields)
    leaves = st.tuples(st.just("cancel"), st.integers(0, 7))
    events = draw(st.lists(st.one_of(asks, asks, asks, st.integers(1, 9), leaves), min_size=3, max_size=16))
    return Schedule(given_settings, events)


@cache
def model_of(family: str) -> Any:
    return build(family)


@contextmanager
def engine_of(family: str, **given_settings: Any) -> Iterator[hf_paged.Engine]:
    with hf_paged.patched(model_of(family), **given_settings) as model:
        yield model.paged


@cache
def alone(family: str, ask: Ask) -> Said:
    """What a request gives by itself."""
    with engine_of(family, num_blocks=64, enable_prefix_caching=False) as engine:
        return said(ask.submit(engine, family).result(PATIENCE))


def check(family: str, schedule: Schedule) -> hf_paged.EngineStats:
    """Asserts that each request is as if it were alone."""
    expected = {event: alone(family, event.reference) for event in schedule.events if isinstance(event, Ask)}
    requests: list[tuple[Ask, hf_paged.Request]] = []
    with engine_of(family, **schedule.settings) as engine:
        engine.pause()
        for event in schedule.events:
            if isinstance(event, Ask):
                requests.append((event, event.submit(engine, family)))
            elif isinstance(event, int):
                for _ in range(event):
                    engine.step()
            elif requests:
                requests[event[1] % len(requests)][1].cancel()
        engine.resume()
        outputs = [(ask, request.result(PATIENCE)) for ask, request in requests]
        stats = engine.stats()
        engine.check_invariants()
    assert stats.num_free_blocks == stats.num_blocks
    others = [f"{ask}: {problem}" for ask, output in outputs if (problem := difference(output, *expected[ask]))]
    assert not others, f"{len(others)} of {len(outputs)} are not as alone: {others[:2]}"
    return stats


def difference(output: hf_paged.RequestOutput, expected: Rows, scores: list[float] | None) -> str | None:
    """What is not as expected: bits, or even tokens."""
    found, found_scores = said(output)
    if "cancelled" in output.finish_reasons:
        if output.scores is not None or scores is not None:
            return None  # beams aren't chosen before the end
        expected = [row[: len(own)] for own, row in zip(found, expected)]
    elif scores != found_scores:
        return f"scores {found_scores}, alone {scores}"
    if found == expected:
        return None
    if tokens(found) != tokens(expected):
        return f"tokens {tokens(found)}, alone {tokens(expected)}"
    pairs = [(own, other) for row, others in zip(found, expected) for own, other in zip(row, others) if own != other]
    return f"{len(pairs)} tokens, the first of them {pairs[0]}"


CROWDED: list[Ask | int | tuple[str, int]] = [
    *(Ask(mode, text, 24, 9) for text in (0, 1) for mode in MODES),
    12,
    *(Ask(mode, 1, 48, 1) for mode in MODES),
    3,
    ("cancel", 14),
    *(Ask(mode, 0, 48, 20) for mode in MODES),
]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_at_once(family: str, preemption: str) -> None:
    few = {"block_size": 4, "num_blocks": 30, "max_num_batched_tokens": 24, "preemption": preemption}
    stats = check(family, Schedule(few, CROWDED))
    assert stats.num_preemptions > 0 and (stats.num_swapped_out > 0) == (preemption == "swap")
    assert stats.num_draft_tokens > 0 and stats.num_cow_copies > 0 and stats.prefix_cache_hit_tokens > 0


@pytest.mark.parametrize(
    "count", [8, pytest.param(NUM_SCHEDULES, marks=[pytest.mark.slow, pytest.mark.timeout(3 * NUM_SCHEDULES + 300)])]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_schedule(family: str, count: int) -> None:
    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(schedules())
    def run(schedule: Schedule) -> None:
        check(family, schedule)

    run()
