"""Several sequences as they come, and what a request may say of its sampling beyond `generate()`."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from helpers.models import PAD, name_of, random_ids
from helpers.pairs import Pair
from helpers.requests import ENDLESS, SAMPLE, Brake, settle, stock_rows
from helpers.waiting import PATIENCE, eventually

SAMPLES = SAMPLE | {"num_return_sequences": 3, "eos_token_id": list(range(2, 20)), "max_new_tokens": 14}


class Formula(LogitsProcessor):
    """OpenAI's, token by token: mu[j] - c[j] * frequency - float(c[j] > 0) * presence, and the bias."""

    def __init__(self, width: int, presence: float, frequency: float, bias: dict[int, float]) -> None:
        self.width, self.presence, self.frequency, self.bias = width, presence, frequency, bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.width :].tolist()):
            for token, count in Counter(ids).items():
                scores[row, token] -= count * self.frequency + float(count > 0) * self.presence
            for token, value in self.bias.items():
                scores[row, token] += value
        return scores


def test_events_of_several_sequences(pair: Pair) -> None:
    ids = random_ids(1, 9)
    request = pair.engine.submit(ids, **SAMPLES, seed=3)
    rows: list[list[int]] = [[], [], []]
    for index, token in request.events():
        rows[index].append(token)
    torch.manual_seed(3)
    assert rows == stock_rows(pair.stock, ids, **SAMPLES) == request.result().sequences

    async def collect() -> list[tuple[int, int]]:
        return [event async for event in request.events()]

    assert asyncio.run(collect()) == list(request.events())
    assert [event[:2] for event in request.events_since(2)] == list(request.events())[2:]
    with pytest.raises(ValueError, match="known at their end"):
        pair.engine.submit(ids, num_beams=2, max_new_tokens=2).events()
    settle(pair)


def test_one_sequence_is_cancelled_alone(pair: Pair) -> None:
    ids, given = random_ids(1, 9), SAMPLES | ENDLESS
    brake = Brake(pair)
    with brake.at(step=4) as reached:
        request = pair.engine.submit(ids, **given, seed=3)
        with pytest.raises(ValueError, match="no token of sequence 7"):
            request.cancel(7)
        reached()
        request.cancel(1)
    result = request.result(PATIENCE)
    torch.manual_seed(3)
    expected = stock_rows(pair.stock, ids, **given)
    assert result.finish_reasons == ["length", "cancelled", "length"]
    assert [result.sequences[0], result.sequences[2]] == [expected[0], expected[2]]
    assert result.sequences[1] == expected[1][: len(result.sequences[1])] and len(result.sequences[1]) < 14
    settle(pair)


@pytest.mark.parametrize(
    "arguments",
    [{"top_k": 20}, {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static"}],
    ids=name_of,
)
def test_a_seed_is_that_of_generate(pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: draws that depend on the global generator, or that move it."""
    ids, given = random_ids(1, 9), SAMPLE | arguments | {"max_new_tokens": 8}
    torch.manual_seed(17)
    expected = stock_rows(pair.stock, ids, **given)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert pair.engine.submit(ids, **given, seed=17).result(PATIENCE).sequences == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "arguments", [{}, SAMPLE | {"temperature": 0.8, "num_return_sequences": 2}, {"num_beams": 2}], ids=str
)
def test_penalties_and_bias(pair: Pair, arguments: dict[str, Any]) -> None:
    """Beside each other, of different lengths and values, each is stock's with the formula as a processor."""
    given = arguments | ENDLESS | {"max_new_tokens": 10}
    controls = [
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 2.0, "logit_bias": {5: 4.0, 9: -100.0}},
        {"logit_bias": {7: 3.0}},
        {"logit_bias": {8: 3.0, 11: 1.0}},
        {},
    ]
    prompts = [random_ids(1, 4 + 3 * number, seed=number) for number in range(len(controls))]
    requests = [
        pair.engine.submit(prompt, **given, **own, seed=number)
        for number, (prompt, own) in enumerate(zip(prompts, controls))
    ]
    for number, (prompt, own, request) in enumerate(zip(prompts, controls, requests)):
        formula = Formula(
            prompt.shape[1], own.get("presence_penalty", 0), own.get("frequency_penalty", 0), own.get("logit_bias", {})
        )
        torch.manual_seed(number)
        expected = stock_rows(pair.stock, prompt, **given, logits_processor=[formula])
        assert request.result(PATIENCE).sequences == expected, own
    settle(pair)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 1.5}, "seed must be an integer"),
        ({"seed": 2**64}, "seed must be an integer"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be a finite number in float32, got nan"),
        ({"presence_penalty": 1e39}, "presence_penalty must be a finite number in float32, got 1e"),
        ({"frequency_penalty": 10**400}, "frequency_penalty must be a finite number in float32, got 1000"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a finite number"),
        ({"logit_bias": [1]}, "logit_bias must give finite numbers"),
        ({"logit_bias": {1: None}}, "logit_bias must give finite numbers"),
        ({"logit_bias": {1: -1e39}}, "logit_bias must give finite numbers"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias has 1000000, which is no token id"),
    ],
)
def test_refused(pair: Pair, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair.engine.submit([5, 6, 7], max_new_tokens=3, **arguments)
    eventually(lambda: pair.engine.num_waiting == 0, "something waits")


class _Pads(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.full(scores.shape[:1], PAD), scores.shape[1]).float()


def test_pads_that_a_request_has_generated(pair: Pair) -> None:
    """Would break: the last tokens of a row alone, taken for padding, which only rows beside others have."""
    request = pair.engine.submit(random_ids(1, 5), max_new_tokens=6, logits_processor=[_Pads()], **ENDLESS)
    assert request.result(PATIENCE).sequences == [[PAD] * 6] == [[event.token_id for event in request.events_since()]]
    assert request.finish_reason == "length"


def test_a_listener_hears_of_tokens_and_the_end(pair: Pair) -> None:
    """Would break: a server that waits for news that came before it listened, or for none."""
    request = pair.engine.submit(random_ids(1, 9), max_new_tokens=6, **ENDLESS)
    seen: list[tuple[int, bool]] = []
    unlisten = request.listen(lambda: seen.append((len(request.events_since()), request.is_done)))
    eventually(lambda: bool(seen) and seen[-1] == (6, True), "the end was not told")
    unlisten()
    assert [count for count, _ in seen] == sorted(count for count, _ in seen)
