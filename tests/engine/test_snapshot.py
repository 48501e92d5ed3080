"""`engine.snapshot()`: the picture agrees with the numbers beside it, and its events tell how it came about."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from helpers.event_ledger import Ledger
from helpers.models import build, name_of, random_ids
from helpers.pairs import MakePair, Pair
from helpers.requests import ENDLESS, SAMPLE, settle, stock_rows
from helpers.waiting import PATIENCE, eventually, in_background
from hf_paged import PagedCache
from hf_paged.core.event_log import NUM_CHUNKS, NUM_EVENTS, EventLog, as_dicts

COMMON = {"id", "time", "step", "kind"}
FIELDS = {
    "step": {"num_seqs", "num_tokens", "num_decode", "num_prefill_tokens", "seconds", "chunks"}
    | {"num_waiting", "num_swapped", "is_stalled", "num_free_blocks"},
    "admitted": {"num_sequences", "num_tokens"},
    "allocated": {"blocks"},
    "shared": {"blocks", "parent"},
    "prefix_hit": {"blocks", "num_tokens"},
    "copied": {"source", "destination"},
    "freed": {"blocks"},
    "evicted": {"blocks"},
    "preempted": {"how", "num_sequences"},
    "swapped_out": {"num_blocks", "blocks"},
    "swapped_in": {"num_blocks", "blocks"},
    "undone": {"num_sequences"},
    "finished": {"reason"},
}


def of_kind(pair: Pair, kind: str, since: int = 0) -> list[dict[str, Any]]:
    return [event for event in pair.engine.snapshot(since)["events"] if event["kind"] == kind]


def test_the_picture_names_everything(make_pair: MakePair) -> None:
    """Would break: a picture that is drawn has lost a field, or can't be sent."""
    pair = make_pair(num_blocks=40, block_size=4)
    empty = pair.engine.snapshot()
    assert empty["num_blocks"] == empty["num_steps"] == 0 and not empty["is_paused"]
    assert empty["bytes_per_block"] == pair.engine.bytes_per_block > 0
    for name in ("blocks", "hashes", "groups", "waiting", "running", "swapped", "events"):
        assert empty[name] == []
    ids = random_ids(1, 9, seed=3)
    pair.paged.generate(ids, max_new_tokens=2)
    pair.engine.pause()
    request = pair.engine.submit(ids, max_new_tokens=6, request_id="me", priority=2, **ENDLESS)
    other = pair.engine.submit(random_ids(1, 5), max_new_tokens=6, **ENDLESS)
    pair.engine.step()
    pair.engine.step()
    picture = pair.engine.snapshot()
    assert json.loads(json.dumps(picture)) == picture
    assert set(picture) == set(empty)
    assert picture["is_paused"] and picture["num_steps"] == pair.engine.stats().num_steps
    group = next(group for group in picture["groups"] if group["request_id"] == "me")
    (sequence,) = group["sequences"]
    assert (group["status"], group["is_idle"], group["priority"]) == ("running", False, 2)
    tokens = ids[0].tolist() + pair.stock.generate(ids, max_new_tokens=2)[0, 9:].tolist()
    assert sequence == {
        "id": sequence["id"],
        "num_tokens": 11,
        "num_computed_tokens": 10,
        "num_prompt_tokens": 9,
        "num_cached_tokens": 8,
        "tail": tokens[-8:],
        "block_table": sequence["block_table"],
        "block_tables": [sequence["block_table"]],
        "source_tokens": 0,
        "source_blocks": [],
    }
    table = sequence["block_table"]
    assert len(table) == 3 and [picture["blocks"][block] for block in table] == [1, 1, 1]
    hashes = [picture["hashes"][block] for block in table]
    assert all(len(h) == 8 and int(h, 16) >= 0 for h in hashes[:2]) and hashes[0] != hashes[1] and hashes[2] == ""
    for count, block_hash in zip(picture["blocks"], picture["hashes"], strict=True):
        assert count != -1 or block_hash, "a free block is cached without a hash"
        assert count != 0 or not block_hash, "a free block has a hash and is not cached"
    pair.engine.resume()
    for waiting in (request, other):
        waiting.result(PATIENCE)
    settle(pair)


def test_a_picture_without_a_request(pair: Pair) -> None:
    """Would break: a plain `generate()` call passes for a request, or a kept cache for the call that filled it."""
    ids = random_ids(1, 9)
    cache = PagedCache(pair.paged)
    request = pair.engine.submit(ids, max_new_tokens=4, past_key_values=cache, request_id="first", **ENDLESS)
    tokens = request.result(PATIENCE).token_ids
    (group,) = pair.engine.snapshot()["groups"]
    assert group["request_id"] is None and group["is_idle"]
    assert group["sequences"][0]["num_prompt_tokens"] == 9
    named = {event.get("request_id") for event in of_kind(pair, "allocated")}
    assert named == {"first"}
    longer = torch.cat([ids, torch.tensor([[*tokens, 5, 6]])], dim=1)
    last = pair.engine.snapshot()["events"][-1]["id"]
    pair.paged.generate(longer, past_key_values=cache, max_new_tokens=9, **ENDLESS)
    (group,) = pair.engine.snapshot()["groups"]
    assert group["sequences"][0]["num_prompt_tokens"] == 9 + 4 + 2, "the second turn's prompt"
    assert all("request_id" not in event for event in pair.engine.snapshot(last)["events"])
    del cache, request
    gc.collect()
    assert of_kind(pair, "finished")[-1]["reason"] is None
    settle(pair)


@pytest.mark.parametrize("given", [{}, {"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}], ids=["plain", "hole"])
def test_tokens_without_ids(pair: Pair, given: dict[str, torch.Tensor]) -> None:
    """Would break: a picture of a cache filled with embeddings raises, or shows tokens that are not known."""
    cache = PagedCache(pair.paged)
    with torch.no_grad():
        pair.paged(inputs_embeds=torch.randn(1, 5, 64), past_key_values=cache, **given)
    (group,) = pair.engine.snapshot()["groups"]
    assert group["sequences"][0]["tail"] == [-1] * 5 and group["sequences"][0]["num_tokens"] == 5
    del cache
    gc.collect()
    settle(pair)


def test_a_picture_outlives_the_model() -> None:
    """Would break: a caller that draws four times a second is met by an error when the model is dropped."""
    model = hf_paged.patch(build("llama"), block_size=4, num_blocks=16)
    model.generate(random_ids(1, 9), max_new_tokens=2)
    engine = model.paged
    del model
    gc.collect()
    picture = engine.snapshot()
    assert picture["num_blocks"] == len(picture["blocks"]) == 16 and picture["bytes_per_block"] == 0


PROMPTS = [random_ids(1, 11, seed=seed) for seed in range(3)]
BUSY: list[tuple[int, dict[str, Any]]] = [
    (0, {"max_new_tokens": 20}),
    (1, {"max_new_tokens": 16, "num_return_sequences": 3} | SAMPLE),
    (2, {"max_new_tokens": 14, "num_beams": 3}),
    (0, {"max_new_tokens": 9}),
    (2, {"max_new_tokens": 12, "num_return_sequences": 2} | SAMPLE),
    (1, {"max_new_tokens": 18}),
]


def busy_run(pair: Pair, look: Callable[[], None]) -> None:
    """Samples, beams and single rows of three prompts, step by step, some of them cancelled; looks after each step."""
    pair.engine.pause()
    requests = [(pair.engine.submit(PROMPTS[n], **ENDLESS, **mode), n, mode) for n, mode in BUSY]
    doomed = [pair.engine.submit(PROMPTS[1], max_new_tokens=30, **ENDLESS, **more) for more in ({}, {"num_beams": 2})]
    num_steps = 0
    while pair.engine.step() is not None:
        num_steps += 1
        look()
        if num_steps in (6, 9):
            doomed.pop().cancel()
            look()
        if num_steps == 15:  # what was there before is a hit now, if it is still cached
            requests.append((pair.engine.submit(PROMPTS[0], max_new_tokens=5, **ENDLESS), 0, {"max_new_tokens": 5}))
    pair.engine.resume()
    for request, n, mode in requests:
        found = request.result(PATIENCE).sequences
        if "do_sample" not in mode:
            assert found == stock_rows(pair.stock, PROMPTS[n], **ENDLESS, **mode)
    eventually(lambda: pair.engine.stats().num_free_blocks == pair.engine.stats().num_blocks, "blocks are held")
    look()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("num_blocks", [16, 24, 256])
def test_events_add_up_to_the_ref_counts(make_pair: MakePair, num_blocks: int, preemption: str) -> None:
    """Would break: a block taken, shared or given back without an event, an event of what never was, or a field."""
    pair = make_pair(num_blocks=num_blocks, block_size=4, preemption=preemption)
    ledger = Ledger()
    busy_run(pair, lambda: ledger.check(pair.engine.snapshot()))
    assert not +ledger.counts
    for event in pair.engine.snapshot()["events"]:
        kind = event["kind"]
        assert set(event) - {"group", "sequence", "request_id"} == COMMON | FIELDS[kind]
        assert "group" in event or kind in ("step", "evicted", "undone")
        assert "sequence" in event or kind not in ("allocated", "shared", "prefix_hit", "copied", "freed")
    expected = {"step", "admitted", "allocated", "shared", "prefix_hit", "copied", "freed", "finished"}
    if num_blocks < 256:
        expected |= {"preempted", preemption} | ({"swapped_out", "swapped_in"} if preemption == "swap" else set())
    if num_blocks == 16:
        expected.add("evicted")
    assert expected <= set(ledger.kinds), f"this never happened: {expected - set(ledger.kinds)}"
    stats = pair.engine.stats()
    assert ledger.kinds["copied"] == stats.num_cow_copies and ledger.kinds["step"] == stats.num_steps
    assert ledger.kinds["finished"] == len(BUSY) + 2 + 1


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_events_add_up_while_all_run(make_pair: MakePair, preemption: str) -> None:
    """Would break: a picture taken in the midst of a step, whose events and ref counts are of two moments."""
    pair = make_pair(num_blocks=24, block_size=4, preemption=preemption)
    ledger, is_over = Ledger(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            ledger.check(pair.engine.snapshot(ledger.last_id))

    watcher = in_background(watch)
    try:
        for _ in range(3):
            requests = [pair.engine.submit(PROMPTS[n], **ENDLESS, **mode) for n, mode in BUSY]
            requests[4].cancel()
            futures = [in_background(pair.paged.generate, PROMPTS[n], **ENDLESS, **mode) for n, mode in BUSY[:3]]
            for waiting in (*requests, *futures):
                waiting.result(PATIENCE)
    finally:
        is_over.set()
    watcher.result(PATIENCE)
    settle(pair)
    ledger.check(pair.engine.snapshot(ledger.last_id))
    assert not +ledger.counts and ledger.kinds["preempted"] > 0


@pytest.mark.parametrize("model", ["falcon_rotary", "llama"])
def test_step_events_add_up_to_the_counters(make_pair: MakePair, model: str) -> None:
    """Would break: tokens per second drawn from events that leave steps out, or count tokens twice."""
    pair = make_pair(model, num_blocks=64, block_size=4, enable_prefix_caching=False)
    ids = random_ids(2, 7)
    before = time.time()
    found = pair.paged.generate(ids, max_new_tokens=6, **ENDLESS)
    beams = pair.paged.generate(ids[:1], max_new_tokens=6, num_beams=2, **ENDLESS)
    assert torch.equal(found, pair.stock.generate(ids, max_new_tokens=6, **ENDLESS))
    assert torch.equal(beams, pair.stock.generate(ids[:1], max_new_tokens=6, num_beams=2, **ENDLESS))
    stats, steps = pair.engine.stats(), of_kind(pair, "step")
    assert [event["step"] for event in steps] == list(range(1, stats.num_steps + 1))
    assert sum(event["num_tokens"] - event["num_seqs"] for event in steps) == stats.num_prefill_tokens
    for event in steps:
        chunks = event["chunks"]
        assert event["num_seqs"] == len(chunks) and event["num_tokens"] == sum(chunk[3] for chunk in chunks)
        assert event["num_tokens"] == event["num_decode"] + event["num_prefill_tokens"]
        assert before <= event["time"] <= time.time() and 0 < event["seconds"] < PATIENCE
    assert [(e["num_decode"], e["num_prefill_tokens"]) for e in steps[:6]] == [(0, 14)] + [(2, 0)] * 5
    # Of each sequence of the first call, the chunks follow each other without a gap.
    positions: Counter[int] = Counter()
    for _, sequence, start, count in (chunk for event in steps[:6] for chunk in event["chunks"]):
        assert start == positions[sequence]
        positions[sequence] += count
    assert sorted(positions.values()) == [12, 12]
    settle(pair)


def test_the_last_token_of_a_cached_prompt_is_no_decode(pair: Pair) -> None:
    """Would break: a prompt computed one token at a time passes for generation."""
    ids = random_ids(1, 9)
    for _ in range(2):
        pair.engine.submit(ids, max_new_tokens=2).result(PATIENCE)
    steps = [(e["num_decode"], e["num_prefill_tokens"]) for e in of_kind(pair, "step")]
    assert steps == [(0, 9), (1, 0), (0, 1), (1, 0)]
    (hit,) = of_kind(pair, "prefix_hit")
    assert hit["num_tokens"] == 8 == 4 * len(hit["blocks"]) and hit["request_id"] == "request-1"


def test_a_refused_prompt_leaves_no_events(make_pair: MakePair) -> None:
    """Would break: a prompt that does not fit "hits" the cache in every step, and crowds everything else out."""
    pair = make_pair(num_blocks=12, block_size=4)
    ids = random_ids(1, 17)
    pair.engine.submit(ids, max_new_tokens=1).result(PATIENCE)
    pair.engine.pause()
    holder = pair.engine.submit(random_ids(1, 20, seed=5), max_new_tokens=20, **ENDLESS)
    pair.engine.step()
    waiting = pair.engine.submit(torch.cat([ids, random_ids(1, 14, seed=6)], dim=1), max_new_tokens=3, **ENDLESS)
    last = pair.engine.snapshot()["events"][-1]["id"]
    steps = [pair.engine.step() for _ in range(4)]
    assert all(step is not None and step["is_stalled"] and step["num_waiting"] == 1 for step in steps)
    assert of_kind(pair, "prefix_hit", last) == of_kind(pair, "freed", last) == []
    picture = pair.engine.snapshot()
    (group,) = (group for group in picture["groups"] if group["status"] == "waiting")
    assert group["sequences"][0]["num_cached_tokens"] == 0 and not group["sequences"][0]["block_table"]
    pair.engine.resume()
    for request in (holder, waiting):
        request.result(PATIENCE)
    settle(pair)


def test_a_step_that_failed_is_undone_in_the_events(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, runner = Ledger(), pair.engine.core.runner
    run = runner.run
    pair.engine.submit(random_ids(1, 3), max_new_tokens=1).result(PATIENCE)
    pair.engine.pause()
    good, bad = (pair.engine.submit(random_ids(1, 9, seed=n), max_new_tokens=3, **ENDLESS) for n in range(2))

    def failing(step: Any, *args: Any) -> Any:
        if any(s.group.request_id == bad.request_id for s, _, _ in pair.engine.core.scheduler.chunks(step)):
            raise FloatingPointError("burnt")
        return run(step, *args)

    monkeypatch.setattr(runner, "run", failing)
    num_steps = pair.engine.stats().num_steps
    event = pair.engine.step()
    assert event is not None and [chunk[3] for chunk in event["chunks"]] == [9]
    assert event["step"] == pair.engine.stats().num_steps == num_steps + 1
    ledger.check(pair.engine.snapshot())
    undone = of_kind(pair, "undone")
    assert [e["num_sequences"] for e in undone] == [2, 1]
    assert of_kind(pair, "finished")[-1]["reason"] == "error"
    with pytest.raises(FloatingPointError):
        bad.result(PATIENCE)
    pair.engine.resume()
    good.result(PATIENCE)
    ledger.check(pair.engine.snapshot())
    assert not +ledger.counts


@pytest.mark.parametrize("mode", [{}, {"num_return_sequences": 2} | SAMPLE, {"num_beams": 2}], ids=name_of)
def test_why_a_request_finished(pair: Pair, mode: dict[str, Any]) -> None:
    done = pair.engine.submit(random_ids(1, 6), max_new_tokens=3, request_id="done", **ENDLESS, **mode)
    done.result(PATIENCE)
    pair.engine.pause()
    gone = pair.engine.submit(random_ids(1, 6), max_new_tokens=30, request_id="gone", **ENDLESS, **mode)
    pair.engine.step()
    gone.cancel()
    assert gone.result(PATIENCE).finish_reason == "cancelled"
    eventually(lambda: len(of_kind(pair, "finished")) == 2, "the end of a request is not noted")
    found = {event["request_id"]: event["reason"] for event in of_kind(pair, "finished")}
    assert found == {"done": "length", "gone": "cancelled"}
    pair.engine.resume()


def test_only_newer_events_on_request(pair: Pair) -> None:
    pair.engine.submit(random_ids(1, 6), max_new_tokens=4, **ENDLESS).result(PATIENCE)
    eventually(lambda: bool(of_kind(pair, "finished")), "the end is not noted")
    events = pair.engine.snapshot()["events"]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert pair.engine.snapshot(since=3)["events"] == events[3:]
    assert pair.engine.snapshot(since=len(events))["events"] == []
    assert pair.engine.snapshot(since=len(events) + 100)["events"] == []
    assert pair.engine.snapshot(since=-5)["events"] == events
    for bad in ("a", 1.5, None, True):
        with pytest.raises(ValueError, match="since must be an event's id"):
            pair.engine.snapshot(since=bad)  # type: ignore[arg-type]


def test_the_log_is_bounded() -> None:
    log = EventLog()
    for n in range(NUM_EVENTS + 500):
        log.add("allocated", 1, [n])
    first, events = log.newer()
    assert (first, len(events)) == (501, NUM_EVENTS) and NUM_EVENTS >= 1000
    step = dict.fromkeys(FIELDS["step"], 0)
    for n in range(100):
        log.add_step(1, **step | {"chunks": [[n] * 1000] * 4})
    found = as_dicts(*log.newer())
    assert len(found) == NUM_EVENTS and found[-1]["id"] == NUM_EVENTS + 600
    held = [len(event["chunks"]) for event in found if event["kind"] == "step"]
    assert sum(held) <= NUM_CHUNKS and held[-1] == 1000 and held[0] == 0
    log.add_step(1, **step | {"chunks": [[0] * (NUM_CHUNKS + 1)] * 4})
    assert len(as_dicts(*log.newer())[-1]["chunks"]) == NUM_CHUNKS + 1, "the newest is there whatever its size"


def test_a_picture_is_its_owners(pair: Pair) -> None:
    pair.engine.submit(random_ids(1, 6), max_new_tokens=4, **ENDLESS).result(PATIENCE)
    eventually(lambda: bool(of_kind(pair, "finished")), "the end is not noted")
    first = pair.engine.snapshot()
    kept = json.loads(json.dumps(first))
    for event in first["events"]:
        for value in event.values():
            if isinstance(value, list):
                value.append(99)
                if isinstance(value[0], list):
                    value[0].clear()
    assert pair.engine.snapshot() == kept
