"""Texts that follow grammars: beside each other, forked, preempted, behind prefix hits."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import hf_paged
from helpers.models import tiny_lm, tiny_tokenizer
from helpers.pairs import MakePair, Pair
from helpers.requests import settle
from helpers.waiting import PATIENCE

PATTERNS = ["[a-z]{3}[0-9]{2}", "(yes|no|maybe)", "[A-Z][a-z]+, [A-Z][a-z]+\\.", "[0-9]{1,20}"]


@cache
def compiler() -> hf_paged.GrammarCompiler:
    return hf_paged.GrammarCompiler(tiny_tokenizer(), 2048, [2])


@pytest.fixture(params=[False, True], ids=["in_turn", "overlapping"])
def lm(request: pytest.FixtureRequest, make_pair: MakePair) -> Pair:
    return make_pair(tiny_lm(), num_blocks=64, block_size=16, use_async_batching=request.param)


class Follows(LogitsProcessor):
    """The oracle, for stock `generate()`: allows what the text so far may go on with, asked of a matcher begun anew."""

    def __init__(self, grammar: Any, width: int) -> None:
        self.grammar, self.width = grammar, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.width :].tolist()):
            (matcher,) = self.grammar.matchers(1)
            matcher.matcher.consume_tokens([token for token in ids if token != 2])
            if 2 in ids or matcher.matcher.is_stopped():
                allowed = [2]
            else:
                mask = matcher.matcher.compute_bitmask()
                allowed = [token for token in range(2048) if mask[token // 8] >> token % 8 & 1]
            keep = torch.full_like(scores[row], -float("inf"))
            keep[allowed] = scores[row, allowed]
            scores[row] = keep
        return scores


def text_of(tokens: list[int]) -> str:
    return tiny_tokenizer().decode([token for token in tokens if token != 2])


@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "num_return_sequences": 3, "top_k": 0}], ids=str)
def test_rows_of_different_grammars(lm: Pair, arguments: dict[str, Any]) -> None:
    """Each is stock's with the grammar as a processor, whatever is beside it; others go on as they would."""
    prompt = torch.tensor([tiny_tokenizer()("The door")["input_ids"]])
    grammars = [compiler().regex(pattern) for pattern in PATTERNS] + [None]
    given = arguments | {"max_new_tokens": 24}
    requests = [lm.engine.submit(prompt, **given, grammar=grammar, seed=4) for grammar in grammars]
    for pattern, grammar, request in zip([*PATTERNS, None], grammars, requests):
        torch.manual_seed(4)
        own = {} if grammar is None else {"logits_processor": [Follows(grammar, prompt.shape[1])]}
        expected = lm.stock.generate(prompt, **given, **own)[:, prompt.shape[1] :].tolist()
        output = request.result(PATIENCE)
        for tokens, reason, row in zip(output.sequences, output.finish_reasons, expected):
            assert tokens == row[: len(tokens)] and set(row[len(tokens) :]) <= {0, 2}
            if pattern is not None and reason != "length":
                assert re.fullmatch(pattern, text_of(tokens)), text_of(tokens)


def test_rows_are_in_every_step(lm: Pair) -> None:
    """Would break: rows that wait for their token to be known, and leave every second step of others to these."""
    grammar = compiler().regex("[0-9]{16}")
    lm.engine.pause()  # they begin together
    requests = [lm.engine.submit([5, 6, 7 + i], max_new_tokens=16, eos_token_id=None) for i in range(2)]
    follows = lm.engine.submit([5, 6, 7], max_new_tokens=16, grammar=grammar, num_return_sequences=2, do_sample=True)
    lm.engine.resume()
    assert all(len(request.result(PATIENCE).token_ids) == 16 for request in requests)
    assert all(re.fullmatch("[0-9]+", text_of(tokens)) for tokens in follows.result(PATIENCE).sequences)
    assert lm.engine.stats().num_steps <= 18
    settle(lm)


@pytest.mark.parametrize("settings", [{"preemption": "recompute"}, {"preemption": "swap"}], ids=str)
def test_preempted(make_pair: MakePair, settings: dict[str, Any]) -> None:
    """Would break: a matcher that takes the tokens of a recomputation for new ones."""
    pair = make_pair(tiny_lm(), num_blocks=10, **settings)
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 4}
    grammar = compiler().json_schema(schema)
    pair.engine.pause()  # they begin together
    requests = [
        pair.engine.submit([5 + i, 6, 7], max_new_tokens=30, do_sample=True, grammar=grammar, seed=i) for i in range(4)
    ]
    pair.engine.resume()
    found = [request.result(PATIENCE) for request in requests]
    assert pair.engine.stats().num_preemptions > 0
    alone = [
        pair.engine.submit([5 + i, 6, 7], max_new_tokens=30, do_sample=True, grammar=grammar, seed=i).result(PATIENCE)
        for i in range(4)
    ]
    assert [output.sequences for output in found] == [output.sequences for output in alone]
    for output in found:
        if output.finish_reason != "length":
            assert len(json.loads(text_of(output.token_ids))) in (3, 4)


def test_raw_logprobs_are_the_models_own(lm: Pair) -> None:
    prompt = torch.tensor([[5, 6, 7]])
    (said,) = (
        lm.engine.submit(prompt, max_new_tokens=5, grammar=compiler().regex("[0-9]+"), logprobs=2).result().logprobs
    )
    first = lm.stock(prompt).logits[0, -1].log_softmax(-1).detach()
    assert said[0].logprob == pytest.approx(float(first[said[0].token_id]), abs=1e-4)
    assert [token for token, _ in said[0].top] == first.topk(2).indices.tolist()


def test_what_cannot_be(pair: Pair) -> None:
    with pytest.raises(ValueError, match="grammar needs rows that the engine samples"):
        pair.engine.submit([5, 6], num_beams=2, max_new_tokens=3, grammar=compiler().regex("a"))
    with pytest.raises(ValueError, match="GrammarCompiler"):
        pair.engine.submit([5, 6], max_new_tokens=3, grammar="[0-9]")
    for call, given in (("regex", "("), ("lark", "start"), ("json_schema", {"type": "king"})):
        with pytest.raises(ValueError):
            getattr(compiler(), call)(given)
    settle(pair)


def test_compiled_grammars_are_kept() -> None:
    assert compiler().regex("[0-9]") is compiler().regex("[0-9]")
