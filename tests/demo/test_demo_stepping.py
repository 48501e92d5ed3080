"""What the demo says of a step: of events made up, and of every step of a real run."""

from __future__ import annotations

from typing import Any

import pytest

from demo.generation import Sampling
from demo.hub import Hub, names_of
from demo.limits import Limits
from demo.loading import load
from demo.stepping import explain, quote


def step(number: int, chunks: list[list[int]], **fields: Any) -> dict[str, Any]:
    num_tokens = sum(chunk[3] for chunk in chunks)
    num_decode = sum(chunk[3] == 1 for chunk in chunks)
    return {
        "id": 99, "time": 0.0, "step": number, "kind": "step", "chunks": chunks, "num_seqs": len(chunks),
        "num_tokens": num_tokens, "num_decode": num_decode, "num_prefill_tokens": num_tokens - num_decode,
        "seconds": 0.0051, "num_waiting": 0, "num_swapped": 0, "num_free_blocks": 3, "is_stalled": False,
    } | fields  # fmt: skip


def event(kind: str, group: int | None, step: int = 7, **fields: Any) -> dict[str, Any]:
    return {
        "id": 1,
        "time": 0.0,
        "step": step,
        "kind": kind,
        "group": group,
        "sequence": fields.pop("sequence", group),
    } | (fields)


def group(number: int, *sequences: tuple[int, int, list[int]], status: str = "running") -> dict[str, Any]:
    """A group whose sequences have so many tokens, so many of them prompt, and this tail."""
    return {
        "id": number,
        "status": status,
        "request_id": f"chat-{number}",
        "sequences": [
            {"id": number + place, "num_tokens": tokens, "num_prompt_tokens": prompt, "tail": tail, "block_table": []}
            for place, (tokens, prompt, tail) in enumerate(sequences)
        ],
    }


def told_of(step_event: dict[str, Any], groups: list[Any], events: list[Any], **queues: list[int]) -> list[str]:
    snapshot = {"groups": groups, "events": [*events, step_event], "waiting": [], "swapped": []} | queues
    explanation = explain(step_event, snapshot, names_of(snapshot), lambda tokens: f" t{tokens[0]}\n")
    return [explanation.headline, *explanation.details]


def test_a_prompt_is_admitted() -> None:
    groups = [group(1, (42, 41, [5]))]
    events = [
        event("admitted", 1, num_sequences=1, num_tokens=41, request_id="chat-1"),
        event("prefix_hit", 1, blocks=[3, 4], num_tokens=32, request_id="chat-1"),
        event("allocated", 1, blocks=[9], request_id="chat-1"),
    ]
    assert told_of(step(7, [[1, 1, 32, 9]]), groups, events) == [
        "Step 7: one forward of 9 tokens for 1 sequence (9 tokens of prompts) in 5.1 ms.",
        "chat-1 was admitted, found 32 tokens of its prompt in the cache (blocks 3 to 4), computed 9 tokens of its "
        "prompt, took block 9 for them and chose “ t5⏎”.",
    ]


def test_a_shared_block_is_copied() -> None:
    groups = [group(2, (31, 20, [8]), (31, 20, [9]))]
    events = [event("copied", 2, source=4, destination=9, request_id="chat-2")]
    assert told_of(step(7, [[2, 2, 29, 1], [2, 3, 29, 1]]), groups, events)[1:] == [
        "chat-2 wrote into a block that others share, so block 4 was copied to block 9 and chose “ t8⏎”, “ t9⏎”."
    ]


@pytest.mark.parametrize(
    ("how", "events", "expected"),
    [
        ("swap", [event("swapped_out", 3, num_blocks=5, blocks=[1])], "its 5 blocks moved to CPU memory"),
        ("recompute", [event("freed", 3, blocks=[4, 5])], "it gave back blocks 4 to 5, to be computed again"),
    ],
)
def test_one_is_preempted_and_one_waits(how: str, events: list[Any], expected: str) -> None:
    groups = [
        group(2, (31, 20, [8])),
        group(3, (40, 20, [1]), status="waiting"),
        group(4, (9, 9, []), status="waiting"),
    ]
    preempted = event("preempted", 3, how=how, num_sequences=1, request_id="chat-3")
    sentences = told_of(step(7, [[2, 2, 30, 1]], is_stalled=True), groups, [preempted, *events], waiting=[3, 4])
    assert sentences[2] == f"chat-3 was preempted to make room: {expected}."
    assert sentences[3] == "chat-3 waits, and 1 request behind it: it does not fit into the 3 free blocks."


def test_one_comes_back_and_one_ends() -> None:
    groups = [group(3, (40, 20, [1]))]
    events = [
        event("swapped_in", 3, num_blocks=3, blocks=[1, 2, 3], request_id="chat-3"),
        event("freed", 5, blocks=[8], request_id="chat-5"),
        event("finished", 5, reason="eos", request_id="chat-5"),
        event("evicted", None, blocks=[6]),
    ]
    assert told_of(step(7, [[3, 3, 38, 1], [5, 5, 10, 1]]), groups, events)[1:] == [
        "chat-3 came back from CPU memory with 3 blocks and chose “ t1⏎”.",
        "chat-5 chose its last token, is finished and gave back block 8.",
        "Block 6 was cached and held by none: the content was dropped for new use.",
    ]


def test_a_search_chooses_elsewhere_and_crowds_are_counted() -> None:
    groups = [group(number, (30, 20, [1])) for number in range(10, 30)]
    sentences = told_of(step(7, [[number, number, 29, 1] for number in range(10, 30)]), groups, [])
    assert sentences[1] == "chat-10 handed its logits to the loop that chooses its tokens."
    assert sentences[-1] == "And 12 other requests took part."


def test_every_step_of_a_real_run_is_explained() -> None:
    loaded = load()
    hub = Hub(loaded, {"num_blocks": 12, "block_size": 4, "preemption": "swap"}, Limits(prompt_tokens=40))
    try:
        hub.pacer.pause()
        sampling = Sampling(max_new_tokens=16, temperature=0.0)
        prompts = [loaded.tokenizer(text).input_ids for text in ("The old man", "The old man", "She said that the")]
        tickets = [hub.submit("chat", "me", prompt, **sampling.arguments(loaded)) for prompt in prompts]
        explanations = []
        while (explanation := hub.step()) is not None:
            explanations.append(explanation)
        texts = [explanation.text for explanation in explanations]
        chosen: dict[str, str] = {ticket.label: "" for ticket in tickets}
        for text in texts:
            for label in chosen:
                if f"{label} " in text and "chose “" in text.split(f"{label} ", 1)[1].split(". ")[0]:
                    chosen[label] += text.split(f"{label} ", 1)[1].split("chose “", 1)[1].split("”", 1)[0]
        for ticket in tickets:
            reply = loaded.tokenizer.decode(ticket.request.result(5).token_ids[:-1], skip_special_tokens=True)
            assert chosen[ticket.label].replace("⏎", "\n") == reply
        assert any("preempted to make room" in text for text in texts)
        assert any("came back from CPU memory" in text for text in texts)
        assert any("had filled its last block" in text for text in texts)
        assert [each.step for each in explanations] == list(range(explanations[0].step, explanations[-1].step + 1))
    finally:
        hub.close()


def test_a_token_is_quoted_as_text() -> None:
    assert quote("\n\ta") == "“⏎⇥a”"
