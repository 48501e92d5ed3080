"""Requests that wait for requests: in a processor, deeper, and where a wait could never end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged
from helpers.models import build, random_ids
from helpers.pairs import MakePair
from helpers.requests import ENDLESS, settle, stock_rows
from helpers.user_code import Asker
from helpers.waiting import PATIENCE

INNER = random_ids(1, 6, seed=3)[0].tolist()
PLAIN: dict[str, Any] = {"max_new_tokens": 3} | ENDLESS
BEAMS: dict[str, Any] = PLAIN | {"num_beams": 2}


def submit(engine: hf_paged.Engine, **given: Any) -> list[int]:
    return engine.submit(INNER, **given).result(PATIENCE).token_ids


def asking(depth: int, ask: Callable[[], Any]) -> Callable[[hf_paged.Engine], list[int]]:
    """A request whose processor submits another one, and so on; the last one asks."""

    def call(engine: hf_paged.Engine) -> list[int]:
        inner = (lambda _: asking(depth - 1, ask)(engine)) if depth else (lambda _: ask())
        return submit(engine, **PLAIN, logits_processor=[Asker(inner)])

    return call


async def awaited(engine: hf_paged.Engine) -> list[int]:
    both = await asyncio.gather(*[engine.submit(INNER, **BEAMS) for _ in range(2)])
    return both[0].token_ids


WAITS: dict[str, Callable[[hf_paged.Engine], Any]] = {
    "plain": lambda engine: submit(engine, **PLAIN),
    "beams": lambda engine: submit(engine, **BEAMS),
    "iterated": lambda engine: list(engine.submit(INNER, **PLAIN, logits_processor=[Asker(id)])),
    "awaited": lambda engine: asyncio.run(awaited(engine)),
    "many": lambda engine: engine.generate([INNER] * 3, **BEAMS)[2].token_ids,
    "generate": lambda engine: engine.model.generate(torch.tensor([INNER]), **BEAMS)[0, 6:].tolist(),
    "deep": asking(3, lambda: None),
}


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 1}, {"max_num_seqs": 1, "max_waiting": 2}, {"num_blocks": 5, "max_num_seqs": 2}],
    ids=str,
)
@pytest.mark.parametrize("name", WAITS)
def test_a_request_that_waits_for_another(make_pair: MakePair, name: str, settings: dict[str, Any]) -> None:
    """Would break: threads that all wait for requests which none is left to run."""
    pair, ids, found = make_pair(**settings), random_ids(1, 5), []
    expected = stock_rows(pair.stock, INNER, **(BEAMS if name in ("beams", "awaited", "many", "generate") else PLAIN))

    asker = Asker(lambda _: found.append(WAITS[name](pair.engine)))
    outer = pair.engine.submit(ids, **PLAIN, logits_processor=[asker])
    assert outer.result(PATIENCE).sequences == stock_rows(pair.stock, ids, **PLAIN)
    assert found == expected
    threads = pair.engine._threads
    settle(pair)
    assert threads.num_queued == 0 and 0 <= threads.num_threads <= max(1, settings.get("max_num_seqs", 9))


def test_engines_that_wait_for_each_other() -> None:
    models = [hf_paged.patch(build("llama"), num_blocks=64, max_num_seqs=1) for _ in range(2)]
    engines = [model.paged for model in models]

    def back(_: Any) -> None:
        submit(engines[0], **BEAMS)

    def there(_: Any) -> None:
        submit(engines[1], **PLAIN, logits_processor=[Asker(back)])

    assert len(submit(engines[0], **PLAIN, logits_processor=[Asker(there)])) == 3


def test_a_full_queue_behind_a_request_that_generates(make_pair: MakePair) -> None:
    """Would break: a call inside a request that waits for the queue, which waits for the request."""
    pair, others = make_pair(max_num_seqs=1, max_waiting=1), []

    def ask(_: Any) -> None:
        others.append(pair.engine.submit(INNER, **BEAMS))  # stays in the queue, which is full now
        for given in (PLAIN, BEAMS):
            others.append(pair.paged.generate(torch.tensor([INNER]), **given))

    submit(pair.engine, **PLAIN, logits_processor=[Asker(ask)])
    assert others[0].result(PATIENCE).sequences == stock_rows(pair.stock, INNER, **BEAMS)
    assert others[1][:, 6:].tolist() == stock_rows(pair.stock, INNER, **PLAIN)
    settle(pair)


class Drawing(LogitsProcessor):
    """Has the model draw, by one of transformers' loops, and notes what."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.drawn: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        given = {"max_new_tokens": 2, "do_sample": True, "return_dict_in_generate": True}
        self.drawn.append(self._model.generate(input_ids[:1], **given).sequences[0, -2:].tolist())
        return scores


def test_what_a_requests_processor_draws_moves_its_draws_on(make_pair: MakePair) -> None:
    """As in `generate()`. Would break: the same numbers in every call of a loop inside a request."""
    pair = make_pair()
    stock, own = Drawing(pair.stock), Drawing(pair.paged)
    sampling: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True}
    torch.manual_seed(3)
    expected = pair.stock.generate(torch.tensor([INNER]), logits_processor=LogitsProcessorList([stock]), **sampling)
    found = pair.engine.submit(INNER, logits_processor=LogitsProcessorList([own]), seed=3, **sampling).result(PATIENCE)
    assert own.drawn == stock.drawn and found.token_ids == expected[0, len(INNER) :].tolist()
