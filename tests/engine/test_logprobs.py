"""How likely tokens were, beside stock's own logits and scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from helpers.models import build
from helpers.pairs import Pair
from helpers.requests import ENDLESS, SAMPLE, prompt, settle
from helpers.state_models import STATE_MODELS, build_state_model
from helpers.user_code import NextToken
from helpers.waiting import PATIENCE

MakePair = Callable[..., Pair]

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
def test_raw(pair: Pair, mode: str, num_top: int) -> None:
    """Would break: log-probabilities of another token, of another beam's path, or behind processors."""
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
    """Would break: requests that ask for different things and meet in a step, or are preempted."""
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


def test_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: an edge between slices of logits."""
    monkeypatch.setattr(hf_paged.engine.scoring, "SLICE", 4)
    stock = build("llama")
    model = hf_paged.patch(build("llama"), block_size=4, num_blocks=64)
    ids = prompt(7, 30)
    expected = stock(ids).logits.detach()[0].log_softmax(-1)
    for num_prompt, num_tokens in ((1, 1), (1, 4), (5, 9), (12, 18)):
        tokens = ids[0, num_prompt : num_prompt + num_tokens].tolist()
        said = hf_paged.engine.scoring.token_logprobs(model, ids[0, : num_prompt + num_tokens].tolist(), num_prompt, 2)
        check(said, tokens, expected[num_prompt - 1 : num_prompt + num_tokens - 1], 2)
    assert model.paged.stats().num_free_blocks == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logprobs": -1}, "logprobs must be a number of likeliest tokens from 0 to 97"),
        ({"logprobs": 98}, "got 98"),
        ({"logprobs": True}, "got True"),
        ({"logprobs": 1, "logprobs_mode": "cooked"}, "logprobs_mode must be one of 'raw', 'processed', got 'cooked'"),
        ({"logprobs": 1, "logprobs_mode": "processed", "num_beams": 2}, "beams, assisted decoding and processors"),
        ({"prompt_logprobs": 98}, "prompt_logprobs must be a number of likeliest tokens from 0 to 97"),
        ({"prompt_logprobs": 1, "prompt_logprobs_from": 0}, "index of a token behind the first, got 0"),
        ({"prompt_logprobs": 1, "max_new_tokens": 0, "do_sample": True}, "no use for do_sample"),
        ({"prompt_logprobs": 1, "max_new_tokens": -1}, "max_new_tokens"),
    ],
)
def test_refused(pair: Pair, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair.engine.submit(prompt(5), **({"max_new_tokens": 3} | arguments))
    settle(pair)


# Of prompts


@pytest.mark.parametrize("model", ["llama", "gemma2", "falcon_alibi", "lfm2", "mamba2"])
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams", "own_processor"])
def test_prompt(make_pair: MakePair, model: str, mode: str) -> None:
    """Would break: tokens moved by one, a prefix hit or a chunk that skips some, other new tokens."""
    pair = make_pair(build_state_model(model) if model in STATE_MODELS else model, max_num_batched_tokens=8)
    given = {"max_new_tokens": 5} | ENDLESS | MODES[mode]
    ids = prompt(5, 21)
    expected = pair.stock(ids).logits.detach()[0, :-1].log_softmax(-1)
    for _ in range(2):  # the second time the prompt is in the prefix cache
        torch.manual_seed(3)
        rows = pair.stock.generate(ids, **given)[:, ids.shape[1] :].tolist()
        torch.manual_seed(3)
        request = pair.engine.submit(ids, **given, prompt_logprobs=3)
        if mode in ("greedy", "own_processor"):
            assert list(request) == rows[0]
        output = request.result(PATIENCE)
        assert output.sequences == rows and output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None and output.logprobs is None
        check(output.prompt_logprobs[1:], ids[0, 1:].tolist(), expected, 3)
        for said, row in zip(output.prompt_logprobs[1:], expected, strict=True):
            assert said is not None and said.rank is not None
            assert abs(said.rank - 1 - int((row > row[said.token_id]).sum())) <= int(
                ((row - row[said.token_id]).abs() < 1e-4).sum() - 1
            ), "tokens as likely as this one but for rounding may be before or behind it"
    settle(pair)


def test_prompt_only(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: `[T, V]` logits at once, tokens that were not asked for, a context computed again and again."""
    pair = make_pair(num_blocks=64)
    monkeypatch.setattr(hf_paged.engine.scoring, "SLICE", 8)
    widest = []
    pair.paged.lm_head.register_forward_hook(hf_paged.packed_hook(lambda *args: widest.append(args[2].shape[-2])))
    context = prompt(1, 40)[0].tolist()
    ends = [prompt(seed, 9)[0].tolist() for seed in range(2, 8)]
    pair.engine.submit(context, prompt_logprobs=0, max_new_tokens=0).result(PATIENCE)
    assert max(widest) <= 8
    before = pair.engine.stats()
    outputs = pair.engine.generate(
        [context + end for end in ends], prompt_logprobs=1, prompt_logprobs_from=40, max_new_tokens=0
    )
    for end, output in zip(ends, outputs, strict=True):
        assert output.sequences == [[]] and output.prompt_logprobs is not None
        assert output.prompt_logprobs[:40] == [None] * 40
        logits = pair.stock(torch.tensor([context + end])).logits.detach()[0, 39:-1]
        check(output.prompt_logprobs[40:], end, logits.log_softmax(-1), 1)
    hits = pair.engine.stats().prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
    assert hits >= 36 * len(ends)
    one = pair.engine.submit([5], prompt_logprobs=2, max_new_tokens=0).result(PATIENCE)
    assert one.prompt_logprobs == [None] and one.finish_reason == "length"
    with pytest.raises(ValueError, match=r"needs \d+ KV blocks"):
        pair.engine.submit([5] * 255 + [6] * 255, prompt_logprobs=2, max_new_tokens=0)
    settle(pair)


def test_prompts_of_many(make_pair: MakePair) -> None:
    """Would break: prompts of others, requests that fail or are cancelled while theirs is looked at."""
    pair = make_pair(num_blocks=40, max_num_seqs=4)
    requests = [
        pair.engine.submit(prompt(seed, 12 + seed), max_new_tokens=6, **ENDLESS, prompt_logprobs=seed % 3 or None)
        for seed in range(12)
    ]
    for request in requests[9:]:
        request.cancel()
    for seed, request in enumerate(requests[:9]):
        output, ids = request.result(PATIENCE), prompt(seed, 12 + seed)
        assert output.sequences == pair.stock.generate(ids, max_new_tokens=6, **ENDLESS)[:, ids.shape[1] :].tolist()
        if not seed % 3:
            assert output.prompt_logprobs is None
        else:
            expected = pair.stock(ids).logits.detach()[0, :-1].log_softmax(-1)
            check(output.prompt_logprobs[1:], ids[0, 1:].tolist(), expected, seed % 3)
    for request in requests[9:]:
        assert request.result(PATIENCE).finish_reason in ("cancelled", "length")
    settle(pair)
