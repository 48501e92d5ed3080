"""Beams that the engine searches: tokens, scores and draws of stock `generate()`, whatever shares their steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.models import PAD, VOCAB, ragged_batch, random_ids
from helpers.pairs import MakePair, Pair
from helpers.requests import ENDLESS, POOLS, settle
from helpers.waiting import PATIENCE, eventually, in_background
from hf_paged.engine import executor
from hf_paged.engine.beam_run import BeamRun
from hf_paged.sampling import beams

FEW_EOS = [2, 3]
SOME_EOS = list(range(2, 14))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[BeamRun]:
    """The calls whose beams the engine has searched."""
    found: list[BeamRun] = []
    original = BeamRun.__init__

    def noting(self: BeamRun, *args: Any) -> None:
        original(self, *args)
        found.append(self)

    monkeypatch.setattr(BeamRun, "__init__", noting)
    return found


@pytest.mark.parametrize("do_sample", [False, True], ids=["best", "drawn"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_all_settings(pair: Pair, searched: list[BeamRun], early_stopping: bool | str, do_sample: bool) -> None:
    """Would break: any rule of transformers' search, the quirk included that a pad token of 0 fills with eos."""
    num_calls = 0
    for num_beams, penalty, eos, pad, returned in itertools.product(
        (2, 5), (1.0, -0.5), (FEW_EOS, SOME_EOS, None), (0, PAD), (1, 2)
    ):
        given = {"early_stopping": early_stopping, "do_sample": do_sample, "num_beams": num_beams}
        given |= {"length_penalty": penalty, "eos_token_id": eos, "pad_token_id": pad}
        given |= {"num_return_sequences": returned, "max_new_tokens": 9}
        pair.generate(**ragged_batch(), **given)
        num_calls += 1
    assert len(searched) == num_calls
    settle(pair)


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "renormalized": {"renormalize_logits": True, "temperature": 0.6, "do_sample": True, "top_k": 12},
    # Fewer tokens are left than candidates: the others tie at minus infinity.
    "few_left": {"suppress_tokens": list(range(4, VOCAB))},
    "one_left": {"suppress_tokens": list(range(1, VOCAB))},
    "must_be_long": {"min_new_tokens": 6},
    "forced": {"forced_eos_token_id": 5, "forced_bos_token_id": 4},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints(pair: Pair, searched: list[BeamRun], name: str) -> None:
    """Would break: ties among what is left, and processors that read the tokens of a beam that came from another."""
    given = {"num_beams": 4, "eos_token_id": SOME_EOS, "max_new_tokens": 8, "num_return_sequences": 2}
    given |= CONSTRAINTS[name]
    pair.generate(input_ids=random_ids(1, 7), pad_token_id=PAD, **given)
    assert len(searched) == 1
    settle(pair)


@pytest.mark.parametrize("num_levels", [1, 3])
def test_ties(make_pair: MakePair, num_levels: int) -> None:
    """Would break: another candidate than stock's among equal ones: a top-k over padding, or over another width."""
    pair = make_pair()
    for model in (pair.stock, pair.paged):
        with torch.no_grad():  # all logits are equal, or of few values
            head = model.get_output_embeddings().weight
            head.copy_((head * 0).add_((torch.arange(len(head)) % num_levels)[:, None] * 1e-3))
    for num_beams, do_sample in itertools.product((2, 7), (False, True)):
        given = {"num_beams": num_beams, "do_sample": do_sample, "eos_token_id": FEW_EOS, "max_new_tokens": 6}
        pair.generate(**ragged_batch(), **given, pad_token_id=PAD)


@pytest.mark.parametrize("pool", POOLS)
def test_beside_each_other(make_pair: MakePair, searched: list[BeamRun], pool: str) -> None:
    """Would break: candidates of one call taken for another's, beams preempted between their logits and their token."""
    pair = make_pair(**POOLS[pool])
    jobs: list[dict[str, Any]] = []
    for index in range(10):
        prompts = ragged_batch((3 + 2 * (index % 5), 4, 7)[: 1 + index % 3], seed=index)
        given = prompts | {"max_new_tokens": 4 + index}
        given |= {"eos_token_id": [FEW_EOS, SOME_EOS, None][index % 3], "pad_token_id": PAD}
        if index % 4 != 3:
            given |= {"num_beams": 2 + index % 3, "early_stopping": [True, False, "never"][index % 3]}
            given |= {"length_penalty": [1.0, -0.5][index % 2], "num_return_sequences": 1 + index % 2}
            given |= {} if index % 3 else {"repetition_penalty": 1.3}  # of one prompt, without padding
        jobs.append(given)
    expected = [pair.stock.generate(**given) for given in jobs]
    pair.engine.pause()  # they begin together
    futures = [in_background(pair.paged.generate, **given) for given in jobs]
    num_prompts = sum(len(given["input_ids"]) for given in jobs)
    eventually(lambda: pair.engine.num_waiting == num_prompts, "they don't queue")
    pair.engine.resume()
    assert all(torch.equal(future.result(PATIENCE), best) for future, best in zip(futures, expected, strict=True))
    assert len(searched) == sum("num_beams" in given for given in jobs)
    if pool in ("recompute", "swap"):
        assert pair.engine.stats().num_preemptions > 0, "the test is too easy"
    settle(pair)


def test_calls_are_selected_together(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a selection a call, whose time grows with the callers."""
    pair, sizes = make_pair(), []
    original = executor.select_beams
    monkeypatch.setattr(executor, "select_beams", lambda own, logits: sizes.append(len(own)) or original(own, logits))
    pair.engine.pause()
    prompts = [random_ids(1, 4 + index) for index in range(5)]
    requests = [pair.engine.submit(ids, num_beams=3, max_new_tokens=6, **ENDLESS) for ids in prompts]
    pair.engine.resume()
    outputs = [request.result(PATIENCE) for request in requests]
    assert max(sizes) == 5
    for ids, output in zip(prompts, outputs, strict=True):
        details = {"output_scores": True, "return_dict_in_generate": True}
        stock = pair.stock.generate(ids, num_beams=3, max_new_tokens=6, **ENDLESS, **details)
        assert output.sequences == stock.sequences[:, ids.shape[1] :].tolist()
        assert output.scores == pytest.approx(stock.sequences_scores.tolist(), abs=1e-5)
        assert output.finish_reasons == ["length"]


def test_one_calls_failure_is_its_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a processor that raises for one call ends the others, or leaves blocks behind."""
    bad_ids, good_ids = random_ids(1, 5), random_ids(1, 6)
    original = beams.process

    def failing(processors: Any, *args: Any) -> Tensor:
        if any(getattr(own, "penalty", None) == 1.7 for call in processors for own in call):
            raise FloatingPointError("burnt")
        return original(processors, *args)

    monkeypatch.setattr(beams, "process", failing)
    pair.engine.pause()
    given = {"num_beams": 3, "max_new_tokens": 6} | ENDLESS
    bad = pair.engine.submit(bad_ids, repetition_penalty=1.7, **given)
    good = pair.engine.submit(good_ids, repetition_penalty=1.2, **given)
    pair.engine.resume()
    with pytest.raises(FloatingPointError):
        bad.result(PATIENCE)
    expected = pair.stock.generate(good_ids, repetition_penalty=1.2, **given)[:, good_ids.shape[1] :].tolist()
    assert good.result(PATIENCE).sequences == expected
    settle(pair)


def test_tokens_are_counted_when_it_is_known_which_they_are(pair: Pair) -> None:
    """Would break: a counter that falls, when a search is cancelled or its best beam is not the longest."""
    engine, counts = pair.engine, [0]
    engine.pause()
    whole, cut = (
        engine.submit(random_ids(1, 9)[0], num_beams=3, max_new_tokens=9, eos_token_id=SOME_EOS) for _ in "ab"
    )
    for step in range(30):
        if step == 4:
            cut.cancel()
        if engine.step() is None and step > 4:
            break
        counts.append(engine.stats().num_generated_tokens)
    engine.resume()
    num_tokens = len(whole.result(PATIENCE).token_ids)
    assert counts == sorted(counts) and cut.result(PATIENCE).finish_reason == "cancelled"
    assert engine.stats().num_generated_tokens == num_tokens > 0


def test_beams_copy_no_keys(make_pair: MakePair) -> None:
    """Would break: a search whose beams don't share the blocks that they have in common."""
    pair = make_pair(block_size=4, enable_prefix_caching=False)
    pair.paged.generate(random_ids(1, 40), num_beams=8, max_new_tokens=2, **ENDLESS)
    stats = pair.engine.stats()
    assert stats.peak_blocks_in_use <= 10 + 2 * 8
    assert stats.num_cow_copies == 0, "the prompt ends with a block"


def test_the_engine_takes_what_it_should(pair: Pair, searched: list[BeamRun]) -> None:
    """Would break: a call whose scores, criteria or processors are its caller's is searched by the engine."""
    ids = random_ids(1, 5)
    given = {"num_beams": 2, "max_new_tokens": 3} | ENDLESS
    for more in (
        {"output_scores": True, "return_dict_in_generate": True},
        {"logits_processor": [lambda ids, scores: scores]},
        {"max_time": 1000.0},
    ):
        pair.paged.generate(ids, **given, **more)
    assert not searched
    pair.paged.generate(ids, **given)
    assert len(searched) == 1 and searched[0].is_done
