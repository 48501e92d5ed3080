"""Tensor parallel on gloo: every rank's calls give what stock's give under the same configuration."""

from __future__ import annotations

from typing import Any

import pytest

MODES = [
    *("greedy", "sampling", "samples", "beams", "penalty", "own_processor", "prompt_lookup", "streamer"),
    *("streamer_own_processor", "streamer_prompt_lookup", "detailed", "kept_cache", "own_loop", "plain_forward"),
    *("without_cache", "static_cache", "guidance", "hidden_states"),
]
ROOM = {"num_blocks": 64, "rank_timeout": 60}
TIGHT = {"num_blocks": 8, "block_size": 4, "rank_timeout": 60}


pytestmark = pytest.mark.timeout(400)


def _slow(*models: str) -> list[Any]:
    return [pytest.param(model, marks=pytest.mark.slow) for model in models]


@pytest.mark.parametrize("model", ["llama", "gemma2", *_slow("qwen3", "mixtral", "gpt_oss", "phi3")])
def test_all_modes_on_every_rank(two_ranks: Any, model: str) -> None:
    for answer in two_ranks.run("modes", model=model, modes=MODES, settings=ROOM):
        assert not answer["differences"]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_pool_that_preempts(two_ranks: Any, preemption: str) -> None:
    modes = ["greedy", "sampling", "beams", "own_processor"]
    settings = TIGHT | {"preemption": preemption, "num_blocks": 9}
    answers = two_ranks.run("modes", model="llama", modes=modes, settings=settings)
    assert [answer["differences"] for answer in answers] == [{}, {}]


def test_threads_in_another_order_on_each_rank(two_ranks: Any) -> None:
    settings = TIGHT | {"num_blocks": 24}
    answers = two_ranks.run("threads", model="llama", numbers=list(range(60)), num_threads=60, settings=settings)
    assert [(answer["differences"], answer["hung"]) for answer in answers] == [({}, 0)] * 2
    assert answers[0]["preemptions"] > 0


def test_requests(two_ranks: Any) -> None:
    for answer in two_ranks.run("submit", model="llama", settings=ROOM):
        assert answer == {"same": [True] * 4, "logprobs": 6}


def test_what_goes_wrong_is_raised_on_every_rank(two_ranks: Any) -> None:
    first, second = two_ranks.run("errors", model="llama", settings=ROOM | {"rank_timeout": 3})
    for answer in (first["raised"], second["raised"]):
        assert answer["processor"] == "LookupError: a processor's own error"
        assert answer["too_long"].startswith("ValueError") and "num_blocks" in answer["too_long"]
        for name in ("hidden_states", "runs_model", "update"):
            assert answer[name].startswith("UnsupportedCallError"), answer
    assert first["raised"]["other"] == "" and "made here alone" in second["raised"]["other"]
    assert first["raised"]["stats"] == "" and "rank 0" in second["raised"]["stats"]
    assert "this is rank 0" in first["raised"]["follow"]
    assert first["is_well"] and second["is_well"]


def test_another_rank_ends_a_request(two_ranks: Any) -> None:
    for answer in two_ranks.run("cancels", model="llama", settings=ROOM):
        assert answer["reason"] == "cancelled" and answer["length"] < 200 and answer["is_well"]


def test_the_others_follow_an_app(two_ranks: Any) -> None:
    first, _ = two_ranks.run("app", model="llama", settings=ROOM)
    assert first == {"is_same": True, "request": 3}


def test_each_rank_holds_its_share(two_ranks: Any) -> None:
    one, other = two_ranks.run("bytes_a_block", model="llama", settings=ROOM)
    assert one == other and one["bytes"] == 16 * 2 * 2 * 1 * 16 * 4, "tokens, K and V, layers, heads, width, bytes"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama/4", "qwen3/4", "gemma2/4", "mixtral/4", "gpt_oss"])
def test_four_ranks(four_ranks: Any, model: str) -> None:
    for answer in four_ranks.run("modes", model=model, modes=MODES, settings=ROOM):
        assert not answer["differences"]


@pytest.mark.slow
def test_more_ranks_than_key_value_heads(four_ranks: Any) -> None:
    for answer in four_ranks.run("supported", model="llama"):
        assert not answer["supported"] and "can't be shared out evenly between 4 processes" in answer["reasons"][0]


@pytest.mark.slow
def test_threads_on_four_ranks(four_ranks: Any) -> None:
    settings = TIGHT | {"num_blocks": 24}
    answers = four_ranks.run("threads", model="llama/4", numbers=list(range(60)), num_threads=60, settings=settings)
    assert [(answer["differences"], answer["hung"]) for answer in answers] == [({}, 0)] * 4


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_all_calls(dying_ranks: Any, victim: int) -> None:
    answers = dying_ranks.run("dies", model="llama", victim=victim, settings=ROOM)
    survivor = answers[1 - victim]
    assert survivor["seconds"] < 15
    assert len(survivor["ends"]) == 3 and all("can't go on" in end or "gone" in end for end in survivor["ends"])
