"""How likely tokens were, beside stock's own logits and scores."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

import hf_paged
from helpers.models import random_ids
from helpers.pairs import MakePair, Pair
from helpers.requests import ENDLESS, SAMPLE, prompt, settle
from helpers.state_models import STATE_MODELS, build_state_model
from helpers.user_code import NextToken
from helpers.waiting import PATIENCE
from helpers.wrappers import asking, build_wrapper
from hf_paged.kernels import cpu_linear

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": SAMPLE | {"num_return_sequences": 2, "top_k": 20, "temperature": 0.7},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "own_processor": {"logits_processor": [NextToken()]},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


def check(said: list[hf_paged.TokenLogprobs], tokens: list[int], expected: torch.Tensor, num_top: int) -> None:
    """`expected` is `[tokens, vocab_size]`."""
    assert [each.token_id for each in said] == tokens
    for each, row in zip(said, expected, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
        top = row.topk(num_top)
        assert [token for token, _ in each.top] == top.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("num_top", [0, 4])
@pytest.mark.parametrize("mode", MODES)
def test_raw(pair: Pair, monkeypatch: pytest.MonkeyPatch, mode: str, num_top: int) -> None:
    """Would break: log-probabilities of another token, of another beam's path, behind processors, or of a slice."""
    monkeypatch.setattr(hf_paged.engine.scoring, "SLICE", 4)
    given = {"max_new_tokens": 9} | ENDLESS | MODES[mode]
    torch.manual_seed(3)
    expected = pair.stock.generate(prompt(5), **given)[:, prompt(5).shape[1] :].tolist()
    torch.manual_seed(3)
    output = pair.engine.submit(prompt(5), **given, logprobs=num_top).result(PATIENCE)
    assert output.sequences == expected and output.logprobs is not None
    for tokens, said in zip(output.sequences, output.logprobs, strict=True):
        ids = torch.cat([prompt(5), torch.tensor([tokens])], dim=1)
        logits = pair.stock(ids).logits.detach()[0, prompt(5).shape[1] - 1 : -1]
        check(said, tokens, logits.log_softmax(-1), num_top)
    settle(pair)


def test_processed(pair: Pair) -> None:
    """Would break: probabilities that the draw was not made from."""
    given = {"max_new_tokens": 9, "repetition_penalty": 1.3} | ENDLESS | MODES["samples"]
    torch.manual_seed(3)
    stock = pair.stock.generate(prompt(5), **given, output_scores=True, return_dict_in_generate=True)
    torch.manual_seed(3)
    output = pair.engine.submit(prompt(5), **given, logprobs=3, logprobs_mode="processed").result(PATIENCE)
    assert output.logprobs is not None
    for row, (tokens, said) in enumerate(zip(output.sequences, output.logprobs, strict=True)):
        check(said, tokens, torch.stack([scores[row] for scores in stock.scores]).log_softmax(-1), 3)


def test_beside_others(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=24)
    pair.engine.pause()  # they begin together
    requests = [
        pair.engine.submit(prompt(seed), max_new_tokens=20, **ENDLESS, logprobs=(None, 0, 2, 5)[seed % 4])
        for seed in range(12)
    ]
    pair.engine.resume()
    for seed, request in enumerate(requests):
        output, num_top = request.result(PATIENCE), (None, 0, 2, 5)[seed % 4]
        logits = pair.stock(torch.cat([prompt(seed), torch.tensor([output.token_ids])], dim=1)).logits.detach()[0]
        if num_top is None:
            assert output.logprobs is None
        else:
            assert output.logprobs is not None
            expected = logits[prompt(seed).shape[1] - 1 : -1].log_softmax(-1)
            check(output.logprobs[0], output.token_ids, expected, num_top)
    assert pair.engine.stats().num_preemptions > 0
    settle(pair)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logprobs": -1}, "logprobs must be a number of likeliest tokens from 0 to 97"),
        ({"logprobs": 98}, "got 98"),
        ({"logprobs": True}, "got True"),
        ({"logprobs": 1, "logprobs_mode": "cooked"}, "logprobs_mode must be one of 'raw', 'processed', got 'cooked'"),
        ({"logprobs": 1, "logprobs_mode": "processed", "num_beams": 2}, "beams, assisted decoding and processors"),
        ({"logprobs": 1, "num_beams": 2, "attention_mask": [[0, 0, 1, 1, 1]]}, "tokens that are hidden"),
        ({"logprobs": 1, "attention_mask": [[1, 1, 0, 1, 1]]}, "tokens that are hidden"),
        ({"prompt_logprobs": 0}, r"prompt_logprobs: model\.paged\.score\(prompts\) says"),
    ],
)
def test_refused(pair: Pair, arguments: dict[str, Any], message: str) -> None:
    if "attention_mask" in arguments:
        arguments = arguments | {"attention_mask": torch.tensor(arguments["attention_mask"])}
    with pytest.raises(ValueError, match=message):
        pair.engine.submit(prompt(1, 5), **({"max_new_tokens": 3} | arguments))
    settle(pair)


@pytest.mark.parametrize("how", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {}], ids=str)
def test_behind_pictures(make_pair: MakePair, how: dict[str, Any]) -> None:
    """Would break: the likelihoods of tokens behind marks of pictures that are read as text."""
    pair, call = make_pair(build_wrapper("llava"), num_blocks=256), asking("llava")
    ids, given = call.pop("input_ids"), {"max_new_tokens": 5, "eos_token_id": None, "logprobs": 0} | how
    if how:
        with pytest.raises(ValueError, match="behind pictures"):
            pair.engine.submit(ids, **call, **given)
        assert len(pair.engine.submit(random_ids(1, 5), **given).result(PATIENCE).logprobs[0]) == 5
        return
    found = pair.engine.submit(ids, **call, **given).result(PATIENCE)
    whole = torch.cat([ids, torch.tensor([found.token_ids])], dim=1)
    logits = pair.stock(whole, pixel_values=call["pixel_values"]).logits.detach()[0, ids.shape[1] - 1 : -1]
    expected = logits.log_softmax(dim=-1).gather(1, torch.tensor([found.token_ids]).T)[:, 0]
    assert torch.allclose(torch.tensor([each.logprob for each in found.logprobs[0]]), expected, atol=1e-4)


@pytest.mark.parametrize("model", ["llama", "gemma2", "falcon_alibi", "lfm2", "mamba2"])
def test_score(make_pair: MakePair, model: str) -> None:
    """Would break: tokens moved by one, a prefix hit or a chunk that skips some."""
    pair = make_pair(build_state_model(model) if model in STATE_MODELS else model, max_num_batched_tokens=8)
    ids = prompt(5, 21)
    expected = pair.stock(ids).logits.detach()[0, :-1].log_softmax(-1)
    for _ in range(2):  # the second time the prompt is in the prefix cache
        (said,) = pair.engine.score([ids], top=3)
        check(said, ids[0, 1:].tolist(), expected, 3)
        for each, row in zip(said, expected, strict=True):
            assert each.rank is not None
            assert abs(each.rank - 1 - int((row > row[each.token_id]).sum())) <= int(
                ((row - row[each.token_id]).abs() < 1e-4).sum() - 1
            ), "tokens as likely as this one but for rounding may be before or behind it"
    settle(pair)


@pytest.mark.parametrize("model", ["mamba2", "mamba", "falcon_mamba", "jamba", "zamba2", "qwen3_5", "kimi_linear"])
def test_score_goes_on_from_states(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Would break: a slice that is scored as if nothing came before it, since the model's cache has another name."""
    monkeypatch.setattr(hf_paged.engine.scoring, "SLICE", 8)
    stock = build_state_model(model).to(torch.float64 if model == "mamba" else torch.float32)  # it amplifies rounding
    pair = make_pair(stock, max_num_batched_tokens=12)
    texts = [prompt(5, 29), prompt(6, 21)]
    for first in (1, 2, 13):
        for ids, said in zip(texts, pair.engine.score(texts, top=3, first=first), strict=True):
            logits = pair.stock(ids).logits.detach()[0, first - 1 : -1]
            check(said, ids[0, first:].tolist(), logits.log_softmax(-1), 3)
    settle(pair)


@pytest.mark.skipif(isinstance(cpu_linear.load(torch.float32), str), reason="there is no kernel here")
@pytest.mark.parametrize("model", ["mamba2", "bamba", "falcon_h1", "lfm2"])
def test_score_has_the_bits_of_what_was_sampled(make_pair: MakePair, model: str) -> None:
    """Would break: a state that depends on how many tokens a step computes."""
    pair = make_pair(build_state_model(model))
    for ids in (prompt(5, 33), prompt(6, 9)):
        output = pair.engine.submit(ids, max_new_tokens=20, **SAMPLE, **ENDLESS, logprobs=3).result(PATIENCE)
        text = output.prompt_token_ids + output.token_ids
        (said,) = pair.engine.score([text], top=3, first=ids.shape[1])
        assert output.logprobs == [[replace(each, rank=None) for each in said]]
    settle(pair)


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams", "own_processor"])
def test_scored_and_continued(pair: Pair, mode: str) -> None:
    """Would break: a text that is computed twice, tokens that are less likely now than when they were chosen."""
    given = {"max_new_tokens": 5} | ENDLESS | MODES[mode]
    ids = prompt(5, 33)
    torch.manual_seed(3)
    rows = pair.stock.generate(ids, **given)[:, ids.shape[1] :].tolist()
    pair.engine.score([ids])
    before = pair.engine.stats().prefix_cache_hit_tokens
    torch.manual_seed(3)
    output = pair.engine.submit(ids, **given, logprobs=2).result(PATIENCE)
    assert output.sequences == rows and output.prompt_logprobs is None
    assert pair.engine.stats().prefix_cache_hit_tokens - before >= 28
    said = pair.engine.score([ids[0].tolist() + row for row in rows], top=2, first=33)
    for scored, chosen in zip(said, output.logprobs or [], strict=True):
        assert [each.token_id for each in scored] == [each.token_id for each in chosen]
        assert [each.logprob for each in scored] == pytest.approx([each.logprob for each in chosen], abs=1e-4)
    settle(pair)


def test_score_of_ends(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: `[T, V]` logits at once, tokens that were not asked for, a context computed again and again."""
    pair = make_pair(num_blocks=64)
    monkeypatch.setattr(hf_paged.engine.scoring, "SLICE", 8)
    widest = []
    pair.paged.lm_head.register_forward_hook(hf_paged.packed_hook(lambda *args: widest.append(args[2].shape[-2])))
    context = prompt(1, 40)[0].tolist()
    ends = [prompt(seed, 9)[0].tolist() for seed in range(2, 8)]
    pair.engine.score([context])
    assert max(widest) <= 8
    before = pair.engine.stats()
    for end, said in zip(ends, pair.engine.score([context + end for end in ends], top=1, first=40), strict=True):
        logits = pair.stock(torch.tensor([context + end])).logits.detach()[0, 39:-1]
        check(said, end, logits.log_softmax(-1), 1)
    hits = pair.engine.stats().prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
    assert hits >= 36 * len(ends)
    assert pair.engine.score([[5], [5, 6]], top=2, first=2) == [[], []]
    settle(pair)


def test_score_of_what_just_fits(make_pair: MakePair) -> None:
    """Would break: room for the keys of the last token, which nothing reads."""
    pair = make_pair(num_blocks=2, block_size=16)
    assert len(pair.engine.score([[5] * 33])[0]) == 32
    with pytest.raises(ValueError, match="needs 3 KV blocks"):
        pair.engine.score([[5] * 34])


@pytest.mark.parametrize(
    ("tokens", "arguments", "message"),
    [
        ([5] * 510, {}, r"needs \d+ KV blocks"),
        ([5, 6], {"top": 98}, "top must be a number of likeliest tokens from 0 to 97"),
        ([5, 6], {"first": 0}, "first must be the index of a token after the text's first one, got 0"),
        ([5, 6], {"cache_salt": 1.5}, "cache_salt must be"),
        ([5, 6], {"priority": "low"}, "priority must be"),
        ([[5, 6]], {}, "a prompt is a list of integer token ids"),
        ([], {}, "the prompt is empty"),
    ],
)
def test_score_refused(make_pair: MakePair, tokens: Any, arguments: dict[str, Any], message: str) -> None:
    pair = make_pair(num_blocks=64)
    for score in (
        lambda: pair.engine.score([tokens], **arguments),
        lambda: pair.engine.submit_score(tokens, **arguments),
    ):
        with pytest.raises(ValueError, match=message):
            score()
    settle(pair)


def test_score_handles(make_pair: MakePair) -> None:
    """Would break: texts of others, requests beside them, those that are cancelled, names that are still taken."""
    pair = make_pair(num_blocks=40, max_num_seqs=4)
    requests = [pair.engine.submit(prompt(seed, 12 + seed), max_new_tokens=6, **ENDLESS) for seed in range(4)]
    scores = [
        pair.engine.submit_score(prompt(seed, 12 + seed), request_id=f"text {seed}", top=seed % 3, priority=-seed)
        for seed in range(12)
    ]
    for handle in scores[9:]:
        handle.cancel()
    again: list[hf_paged.Request] = []
    scores[0].on_done(lambda: again.append(pair.engine.submit_score([1, 2], request_id="text 0")))
    for seed, handle in enumerate(scores[:9]):
        output, ids = handle.result(PATIENCE), prompt(seed, 12 + seed)
        assert (output.sequences, output.finish_reason, output.request_id) == ([[]], "length", f"text {seed}")
        assert output.prompt_logprobs is not None
        expected = pair.stock(ids).logits.detach()[0, :-1].log_softmax(-1)
        check(output.prompt_logprobs, ids[0, 1:].tolist(), expected, seed % 3)
    for handle in scores[9:]:
        assert handle.result(PATIENCE).finish_reason in ("cancelled", "length")
    for seed, request in enumerate(requests):
        ids = prompt(seed, 12 + seed)
        expected = pair.stock.generate(ids, max_new_tokens=6, **ENDLESS)[:, ids.shape[1] :]
        assert request.result(PATIENCE).sequences == expected.tolist()
    assert len(again[0].result(PATIENCE).prompt_logprobs or []) == 1
    settle(pair)


def test_score_is_awaited_and_salted(pair: Pair) -> None:
    async def scored(salt: str) -> hf_paged.RequestOutput:
        return await pair.engine.submit_score(prompt(5, 33), first=32, cache_salt=salt)

    hits = []
    for salt in ("one", "two", "one"):
        before = pair.engine.stats().prefix_cache_hit_tokens
        assert len(asyncio.run(scored(salt)).prompt_logprobs or []) == 1
        hits.append(pair.engine.stats().prefix_cache_hit_tokens - before)
    assert hits[:2] == [0, 0] and hits[2] >= 28
    settle(pair)


@pytest.mark.parametrize("what", ["score", "own_processor"])
def test_autocast_reaches_requests_with_threads_of_their_own(pair: Pair, what: str) -> None:
    """They run on a thread that has no autocast of its own."""
    ids, seen = prompt(5), []
    pair.paged.lm_head.register_forward_hook(hf_paged.packed_hook(lambda *args: seen.append(args[2].dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if what == "score":
            handle = pair.engine.submit_score(ids)
        else:
            handle = pair.engine.submit(ids, max_new_tokens=2, **MODES[what])
    handle.result(PATIENCE)
    assert set(seen) == {torch.bfloat16}
    settle(pair)
