"""Tensor parallel on gloo: every rank's calls give what stock's give under the same configuration."""

from __future__ import annotations

from typing import Any

import pytest

MODES = [
    *("greedy", "sampling", "samples", "beams", "penalty", "own_processor", "prompt_lookup", "streamer"),
    *("streamer_own_processor", "streamer_prompt_lookup", "detailed", "kept_cache", "own_loop", "plain_forward"),
    *("without_cache", "static_cache", "guidance", "hidden_states"),
]
KINDS = ["mixtral+experts", "gpt_oss+experts", "deepseek_v2", "longcat_flash", "qwen3_next", "jamba", "kimi_linear"]
ROOM = {"num_blocks": 64, "rank_timeout": 60}
TIGHT = {"num_blocks": 8, "block_size": 4, "rank_timeout": 60}


def _slow(*rows: Any) -> list[Any]:
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow) for row in rows]


@pytest.mark.parametrize("model", ["llama", "gemma2", *_slow("qwen3", "mixtral", "gpt_oss", "phi3", *KINDS)])
def test_all_modes_on_every_rank(two_ranks: Any, model: str) -> None:
    for answer in two_ranks.run("modes", model=model, modes=MODES, settings=ROOM):
        assert not answer["differences"]


OVERLAPPED = ROOM | {"use_async_batching": True}


def _check_overlapped(answers: list[dict[str, Any]]) -> None:
    """Would break: a rank that embeds other tokens than rank 0 has chosen, or that doesn't get them."""
    assert not any(answer["differences"] for answer in answers)
    assert len({answer["placeholders"] for answer in answers}) == 1 and answers[0]["placeholders"] > 20


@pytest.mark.parametrize("model", ["llama", *_slow("gemma2", "qwen3", "mixtral", "gpt_oss", "phi3", *KINDS)])
def test_steps_overlap(two_ranks: Any, model: str) -> None:
    _check_overlapped(two_ranks.run("modes", model=model, modes=MODES, settings=OVERLAPPED))


@pytest.mark.parametrize("how", ["by_all", "no_memory", "fails"])
@pytest.mark.parametrize("model", ["llama", *_slow("gemma2", "qwen3", "deepseek_v2", "qwen3_next")])
def test_steps_are_recorded(two_ranks: Any, model: str, how: str) -> None:
    """Would break: ranks that replay steps of unlike sizes, or one that replays while another doesn't: they hang."""
    settings = OVERLAPPED | {"max_num_seqs": 4}
    first, second = two_ranks.run("modes", model=model, modes=MODES, settings=settings, recorded=how)
    _check_overlapped([first, second])
    assert first["replays"] == second["replays"] and (first["replays"] > 20) == (how != "fails")
    sizes, reason = first["held"]
    assert second["held"][0] == sizes == {"by_all": [1, 2, 4], "no_memory": [1, 4], "fails": []}[how]
    if how == "fails":
        assert "another rank can't record it" in reason and "this rank can't" in second["held"][1]


@pytest.mark.parametrize("model", ["mixtral+experts", "deepseek_v2", "qwen3_next"])
def test_experts_latents_and_states(two_ranks: Any, model: str) -> None:
    """Would break: heads or states that a plan leaves whole are taken for shared out, or the other way round."""
    modes = ["sampling", "beams", "own_processor", "kept_cache"]
    for answer in two_ranks.run("modes", model=model, modes=modes, settings=ROOM):
        assert not answer["differences"]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(("model", "num_blocks"), [("llama", 9), *_slow(("qwen3_next", 40), ("deepseek_v2", 9))])
def test_a_pool_that_preempts(two_ranks: Any, model: str, num_blocks: int, preemption: str) -> None:
    modes = ["greedy", "sampling", "beams", "own_processor"]
    settings = TIGHT | {"preemption": preemption, "num_blocks": num_blocks, "use_async_batching": True}
    answers = two_ranks.run("modes", model=model, modes=modes, settings=settings)
    assert [answer["differences"] for answer in answers] == [{}, {}] and answers[0]["preemptions"] > 0


def test_requests(two_ranks: Any) -> None:
    for answer in two_ranks.run("submit", model="llama", settings=ROOM):
        assert answer == {"same": [True] * 4, "logprobs": 6, "scored": True}


def test_adapters_of_pefts_plan(two_ranks: Any) -> None:
    """The same for all rows of a step, by PEFT's own code; rows with their own are refused, with the reason."""
    pytest.importorskip("peft")
    answers = two_ranks.run("adapters", model="llama", settings=ROOM)
    for answer in answers:
        assert answer["found"] == answer["stock"] == answers[0]["stock"]
        assert len({str(tokens) for tokens in answer["stock"]}) == 4, "the test is too easy"
        assert all("split between processes (tp_plan)" in text for text in answer["raised"] + answer["notes"])
        assert len(answer["raised"]) == 2 and len(answer["notes"]) == 1


def test_what_goes_wrong_is_raised_on_every_rank(two_ranks: Any) -> None:
    first, second = two_ranks.run("errors", model="llama", settings=ROOM)
    for answer in (first["raised"], second["raised"]):
        assert answer["processor"] == "LookupError: a processor's own error"
        assert answer["too_long"].startswith("ValueError") and "num_blocks" in answer["too_long"]
        for name in ("hidden_states", "runs_model"):
            assert answer[name].startswith("UnsupportedCallError"), answer
        assert answer["update"].startswith("ValueError: only forwards of the patched model"), answer
    assert first["raised"]["stats"] == "" and "rank 0" in second["raised"]["stats"]
    assert "this is rank 0" in first["raised"]["follow"]
    assert first["is_well"] and second["is_well"]


def test_requests_are_cancelled_on_rank_0(two_ranks: Any) -> None:
    for answer in two_ranks.run("cancels", model="llama", settings=ROOM):
        assert answer["reason"] == "cancelled" and answer["length"] < 200 and answer["is_well"]


@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_on_any_rank(two_ranks: Any, victim: int) -> None:
    """Rank 0's ends the call on all; another rank leaves it, and has it behind it as the others do."""
    answers = two_ranks.run("interrupts", model="llama", victim=victim, settings=ROOM)
    assert answers[victim]["raised"].startswith("KeyboardInterrupt")
    said = "RuntimeError: on rank 0 this call ended with KeyboardInterrupt: " if victim == 0 else ""
    assert answers[1 - victim]["raised"] == said
    assert all(answer["is_well"] for answer in answers)


def test_generators_that_stand_elsewhere(two_ranks: Any) -> None:
    first, second = two_ranks.run("unlike_seeds", model="llama", settings=ROOM)
    assert first == second, "rank 0's draws count, on all ranks"


def test_one_message_a_step_and_none_when_idle(two_ranks: Any) -> None:
    first, second = two_ranks.run("messages", model="llama", settings=ROOM)
    assert first["idle"] == second["idle"] == second["sent"] == []
    assert first["sent"] == ["BEGIN", *["STEP"] * first["steps"], "END"] and first["steps"] >= 10


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_others_follow_an_app(two_ranks: Any, overlaps: bool) -> None:
    settings = TIGHT | {"num_blocks": 24, "use_async_batching": overlaps}
    first, _ = two_ranks.run("app", model="llama", num_calls=60, settings=settings)
    assert first["differences"] == {} and first["preemptions"] > 0
    assert "others are in model.paged.follow()" in first["raised"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("another", "RankError: the ranks of this model can't go on: rank 1: its call 1 is generate()"),
        ("one_more", "rank 0's is none within 2 s (rank_timeout)"),
    ],
)
def test_calls_that_differ_end_on_all_ranks(two_ranks: Any, case: str, said: str) -> None:
    """Would break: ranks that wait for each other for ever, or take each other's results."""
    first, second = two_ranks.run("unlike", model="llama", kind=case, settings=ROOM | {"rank_timeout": 2})
    for answer in (first, second):
        ends = [answer["raised"], answer["goes_on"]]
        assert any(said in str(end) and "model.paged.follow()" in str(end) for end in ends), answer
        assert answer["goes_on"] is not False and answer["is_well"]


def test_a_second_thread_is_told_to_follow(two_ranks: Any) -> None:
    first, second = two_ranks.run("unlike", model="llama", kind="thread", settings=ROOM)
    assert first["raised"] == "" and second["raised"].startswith("RuntimeError: another thread of this rank")
    assert "model.paged.follow()" in second["raised"]
    assert all(answer["goes_on"] is True and answer["is_well"] for answer in (first, second))


def test_each_rank_holds_its_share(two_ranks: Any) -> None:
    one, other = two_ranks.run("bytes_a_block", model="llama", settings=ROOM)
    assert one == other and one["bytes"] == 16 * 2 * 2 * 1 * 16 * 4, "tokens, K and V, layers, heads, width, bytes"
    (quantised, _) = two_ranks.run("bytes_a_block", model="llama", settings=ROOM | {"kv_cache_dtype": "int8"})
    assert quantised["bytes"] == 16 * 2 * 2 * 1 * (16 + 4), "a scale a token and head"
    assert "cuda_graphs=True where weights are split between processes" in one["no_graphs"]
    assert "needs CUDA devices" in one["refused"] and "on cpu" in one["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama/4", "qwen3/4", "gemma2/4", "mixtral/4", "gpt_oss"])
def test_four_ranks(four_ranks: Any, model: str) -> None:
    for answer in four_ranks.run("modes", model=model, modes=MODES, settings=ROOM):
        assert not answer["differences"]
    _check_overlapped(four_ranks.run("modes", model=model, modes=MODES, settings=OVERLAPPED))


def test_a_model_that_is_shared_out_is_supported(two_ranks: Any) -> None:
    for model in ("llama", "deepseek_v2", "qwen3_next"):
        assert two_ranks.run("supported", model=model) == [{"supported": True, "reasons": []}] * 2
    for answer in two_ranks.run("supported", model="deepseek_v32"):
        assert not answer["supported"] and "have indexers" in answer["reasons"][0]


@pytest.mark.slow
def test_more_ranks_than_key_value_heads(four_ranks: Any) -> None:
    for answer in four_ranks.run("supported", model="llama"):
        assert not answer["supported"] and "can't be split evenly between 4 processes" in answer["reasons"][0]


@pytest.mark.slow
def test_three_ranks_follow_an_app(four_ranks: Any) -> None:
    first, *_ = four_ranks.run("app", model="llama/4", num_calls=60, settings=TIGHT | {"num_blocks": 24})
    assert first["differences"] == {}


def test_training_with_an_engine_a_rank(two_ranks: Any) -> None:
    pytest.importorskip("trl", reason="of the extra dev")
    answers = two_ranks.run("ddp")
    for answer in answers:
        assert answer["found"] == answer["stock"] and not answer["detours"]
        counts = answer["counts"]
        assert counts["equal"] == counts["all"] >= 80 and counts["trained on"] >= 40
    assert answers[0]["found"] != answers[1]["found"], "both ranks had the same prompts"


@pytest.mark.parametrize("version", [1, 2])
def test_training_with_weights_shared_out(two_ranks: Any, version: int) -> None:
    """FSDP, as TRL's trainers use it: stock's loop, with the reason, and never an exception."""
    for answer in two_ranks.run("fsdp", version=version):
        assert answer["found"] == answer["stock"] and answer["found"][0] != answer["found"][1]
        assert answer["detours"] == {"stock generate(): synced_gpus=True": 2}
        assert "its weights are split between processes" in answer["reason"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_all_calls(dying_ranks: Any, victim: int) -> None:
    """Would break: a rank that waits for one that is gone until its patience ends, beyond the test's own."""
    answers = dying_ranks.run("dies", model="llama", victim=victim, settings=ROOM | {"rank_timeout": 3000})
    survivor = answers[1 - victim]
    assert len(survivor["ends"]) == 3 and all("can't go on" in end or "gone" in end for end in survivor["ends"])
