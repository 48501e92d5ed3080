"""What the demo's views are sent: right, compact, and never escaped (the browser puts it into the page as text)."""

from __future__ import annotations

import base64
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import hf_paged
from demo import sentences, views
from helpers.demo_parts import make_snapshot

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"


def decode_blocks(text: str) -> list[int]:
    """As the browser does."""
    blocks: list[int] = []
    for run in text.split():
        first, _, more = run.partition("+")
        blocks += range(int(first), int(first) + int(more or 0) + 1)
    return blocks


def size_of(value: dict[str, Any]) -> int:
    return len(json.dumps(value, separators=(",", ":")).encode())


@pytest.fixture(scope="module")
def engine() -> Any:
    """A small pool with four samples of one prompt in it, paused in the middle of their generation."""
    model = hf_paged.patch(
        AutoModelForCausalLM.from_pretrained(TINY_MODEL), block_size=8, num_blocks=64, preemption="swap"
    )
    engine = model.paged
    engine.pause()
    request = engine.submit(  # dropped, it would be cancelled
        list(range(5, 30)),
        max_new_tokens=64,
        min_new_tokens=64,
        do_sample=True,
        num_return_sequences=4,
        request_id="samples-1",
    )
    deadline = time.monotonic() + 60
    num_steps = 0
    while num_steps < 5:
        assert time.monotonic() < deadline, "the engine made no five steps within a minute"
        num_steps += engine.step() is not None
    yield engine
    request.cancel()
    engine.resume()
    hf_paged.unpatch(model)


# The pool


def test_a_pool_of_5000_blocks_is_small() -> None:
    snapshot = make_snapshot()
    names = {group["id"]: f"chat-{group['id']}" for group in snapshot["groups"]}
    sizes = [size_of(make(snapshot, names)) for make in (views.pool_value, views.tables_value, views.events_value)]
    assert sizes[0] < 100_000
    assert sum(sizes) < 160_000


def test_a_pool_that_is_not_made_yet() -> None:
    lists = ("blocks", "hashes", "groups", "waiting", "running", "swapped", "events")
    snapshot: dict[str, Any] = {name: [] for name in lists}
    snapshot |= {"num_blocks": 0, "block_size": 16, "num_swap_blocks": 0, "bytes_per_block": 0}
    snapshot |= {"is_paused": False, "num_steps": 0}
    assert views.pool_value(snapshot, {})["refs"] == ""
    assert views.tables_value(snapshot, {})["groups"] == "[]"
    assert views.events_value(snapshot, {}) == {"events": "[]"}


def test_who_owns_what(engine: hf_paged.Engine) -> None:
    snapshot = engine.snapshot()
    value = views.pool_value(snapshot, {})
    [group] = json.loads(value["groups"])
    tables = {sequence[0]: decode_blocks(sequence[3]) for sequence in group["sequences"]}
    assert tables == {each["id"]: each["block_table"] for each in snapshot["groups"][0]["sequences"]}
    assert len(tables) == 4
    held = [block for table in tables.values() for block in table]
    for block, character in enumerate(value["refs"]):
        assert held.count(block) == (int(character, 36) if character not in ".," else 0)
    assert "4" in value["refs"]  # the prompt's blocks, which all four share
    assert len(base64.b64decode(value["hashes"])) == 4 * 64
    assert group["label"] == "samples-1"


def test_tables_say_what_is_shared(engine: hf_paged.Engine) -> None:
    snapshot = engine.snapshot()
    value = views.tables_value(snapshot, {snapshot["groups"][0]["id"]: "four samples"})
    [group] = json.loads(value["groups"])
    assert group["label"] == "four samples"
    assert value["running"] == [group["id"]]
    assert (value["waiting"], value["swapped"]) == ([], [])
    assert decode_blocks(value["shared"]) == [block for block, refs in enumerate(snapshot["blocks"]) if refs > 1]
    for number, tokens, computed, prompt, cached, blocks in group["sequences"]:
        assert number in {each["id"] for each in snapshot["groups"][0]["sequences"]}
        assert (prompt, cached) == (25, 0)
        assert computed <= tokens
        assert len(decode_blocks(blocks)) == math.ceil(computed / 8)


# Events


def test_events_of_an_engine_become_sentences(engine: hf_paged.Engine) -> None:
    events = json.loads(views.events_value(engine.snapshot(), {})["events"])
    kinds = {kind for _, kind, *_ in events}
    assert {"admitted", "allocated", "shared", "copied", "step"} <= kinds
    assert [event[0] for event in events] == sorted(event[0] for event in events)
    for _, kind, group, step, when, sentence in events:
        assert "None" not in sentence
        assert isinstance(step, int) and when > 0
        if kind not in ("step", "evicted"):
            assert group is not None and sentence.startswith("samples-1")


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({"kind": "admitted", "num_sequences": 1, "num_tokens": 40}, "chat-2 was admitted with 40 tokens"),
        ({"kind": "allocated", "blocks": [17]}, "chat-2 took block 17"),
        ({"kind": "allocated", "blocks": [40, 17, 18, 19]}, "chat-2 took blocks 17 to 19, 40"),
        ({"kind": "shared", "blocks": [1, 2], "parent": 44}, "chat-2, sequence 45, shares 2 blocks with sequence 44"),
        (
            {"kind": "prefix_hit", "blocks": [3, 4], "num_tokens": 32},
            "chat-2 found 32 tokens of its prompt in the cache: ",
        ),
        ({"kind": "copied", "source": 17, "destination": 31}, "chat-2 copied on write: block 17 → 31"),
        ({"kind": "freed", "blocks": [1]}, "chat-2 let go of block 1"),
        ({"kind": "evicted", "blocks": [1]}, "cached content dropped for new use: block 1"),
        ({"kind": "preempted", "how": "swap", "num_sequences": 1}, "chat-2 was preempted (swap) to make room"),
        ({"kind": "swapped_out", "num_blocks": 8, "blocks": []}, "chat-2 went to CPU memory with 8 blocks"),
        ({"kind": "swapped_in", "num_blocks": 1, "blocks": []}, "chat-2 came back from CPU memory with 1 block"),
        ({"kind": "finished", "reason": "length"}, "chat-2 finished (length)"),
        ({"kind": "finished", "reason": None}, "chat-2 finished"),
        ({"kind": "undone", "num_sequences": 2}, "a step failed and was undone for 2 sequences"),
        ({"kind": "of_another_version"}, "chat-2: of another version"),
    ],
)
def test_sentences(event: dict[str, Any], sentence: str) -> None:
    assert sentences.describe_event(event | {"sequence": 45}, "chat-2").startswith(sentence)


# Text


def test_components_are_data_and_fixed_markup() -> None:
    """Markup that does not depend on the value keeps Gradio from building it anew, and text from being markup."""
    for make in (
        partial(views.PoolView, lambda step: None),
        views.BlockTables,
        views.EventLog,
        views.BeamTree,
        views.MemoryMaps,
    ):
        component = make(elem_id="here", render=False)
        assert "${" not in component.html_template and "{{" not in component.html_template
        for special in ("${", "{{", "`", "\\"):  # the style is a template too
            assert special not in component.css_template
        for markup in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
            assert markup not in component.js_on_load
