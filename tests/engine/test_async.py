"""Requests that are awaited by who goes away: at a time-out, with its event loop, or with the last reference to it."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.models import random_ids
from helpers.pairs import Pair
from helpers.requests import ENDLESS, Brake, blocks_in_use, settle, stock_rows
from helpers.waiting import PATIENCE, eventually
from hf_paged import Request


@pytest.fixture(autouse=True)
def reports(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[list[Any]]:
    """Whatever Python and asyncio report that can not be caught; there must be nothing."""
    asyncio.set_event_loop(None)  # one that other tests' libraries left open is not this one's
    gc.collect()
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    with caplog.at_level(logging.ERROR, "asyncio"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield found
        gc.collect()
    found += [record.getMessage() for record in caplog.records if "destroyed but it is pending" not in record.message]
    assert not found


async def awaiting(request: Request) -> None:
    await request


async def iterating(request: Request) -> None:
    async for _ in request:
        pass


async def awaiting_next(request: Request) -> None:
    tokens = aiter(request)
    while True:
        await anext(tokens)


WAYS = [awaiting, iterating, awaiting_next]


async def close(task: Any) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def time_out(task: Any) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(task, 0.01)


@pytest.mark.parametrize("end", [close, time_out], ids=lambda end: end.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_cancelled_while_it_waits(pair: Pair, way: Callable[[Request], Any], end: Callable[[Any], Any]) -> None:
    brake = Brake(pair)

    async def main() -> None:
        request = pair.engine.submit(random_ids(1, 5), max_new_tokens=200, **ENDLESS)
        with brake.at(step=4) as reached:
            task = asyncio.ensure_future(way(request))
            await asyncio.to_thread(reached)
            await asyncio.sleep(0.01)
            await end(task)
        assert request.result(PATIENCE).finish_reason == "cancelled"

    asyncio.run(main())
    assert pair.engine.stats().num_steps < 20
    settle(pair)


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "not_held"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_left_in_a_loop_that_is_closed(pair: Pair, way: Callable[[Request], Any], is_held: bool) -> None:
    brake, kept = Brake(pair), []
    request = pair.engine.submit(random_ids(1, 5), max_new_tokens=200, **ENDLESS)
    if is_held:
        kept.append(request)
    loop = asyncio.new_event_loop()
    with brake.at(step=4) as reached:
        task = loop.create_task(way(request))
        loop.run_until_complete(asyncio.sleep(0.01))
        reached()
        loop.close()
        del task, request
    del loop
    eventually(lambda: blocks_in_use(pair) == 0, "the blocks of a wait that never ends are held")
    gc.collect()
    assert pair.engine.stats().num_steps < 20
    assert all(request.result(PATIENCE).finish_reason == "cancelled" for request in kept)
    settle(pair)


def test_a_task_without_a_holder_goes_on(pair: Pair) -> None:
    """The loop holds tasks weakly: what keeps one that waits for a request is the request."""
    done: list[int] = []

    async def consume() -> None:
        done.extend([token async for token in pair.engine.submit(random_ids(1, 5), max_new_tokens=30, **ENDLESS)])

    async def main() -> None:
        asyncio.ensure_future(consume())  # noqa: RUF006
        while not done:
            gc.collect()
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert len(done) == 30
    settle(pair)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_closed_by_hand(pair: Pair, way: Callable[[Request], Any]) -> None:
    """A coroutine without any task, thrown away where it waits and before it began."""
    brake = Brake(pair)

    async def main() -> None:
        request = pair.engine.submit(random_ids(1, 5), max_new_tokens=200, **ENDLESS)
        with brake.at(step=4) as reached:
            coroutine = way(request)
            future = coroutine.send(None)
            while future.done():  # tokens that were there
                future = coroutine.send(None)
            await asyncio.to_thread(reached)
            coroutine.close()
        assert request.result(PATIENCE).finish_reason == "cancelled"
        never = pair.engine.submit([5, 6], max_new_tokens=2, **ENDLESS)
        never.__await__()
        aiter(never)
        assert len(never.result(PATIENCE).token_ids) == 2

    asyncio.run(main())
    settle(pair)


def test_one_ends_the_iteration_that_another_is_in(pair: Pair) -> None:
    """`aclose()` beside a task that waits for the next token: that one sees the end, and the request goes on."""
    brake = Brake(pair)

    async def main() -> None:
        request = pair.engine.submit(random_ids(1, 5), max_new_tokens=12, **ENDLESS)
        tokens: Any = aiter(request)
        with brake.at(step=4) as reached:
            task = asyncio.ensure_future(_collect(tokens))
            await asyncio.to_thread(reached)
            await asyncio.sleep(0.01)
            await tokens.aclose()
            seen = await asyncio.wait_for(task, PATIENCE)
        assert 0 < len(seen) < 12 and [token async for token in tokens] == []
        await tokens.aclose()
        result = await request
        assert len(result.token_ids) == 12 and result.token_ids[: len(seen)] == seen
        assert [token async for token in request] == result.token_ids

    asyncio.run(main())
    settle(pair)


async def _collect(tokens: Any) -> list[int]:
    return [token async for token in tokens]


def test_who_leaves_between_two_tokens_leaves_the_request(pair: Pair) -> None:
    """As with `for token in request: break`."""

    async def main() -> Request:
        request = pair.engine.submit(random_ids(1, 5), max_new_tokens=12, **ENDLESS)
        async for _ in request:
            break
        return request

    request = asyncio.run(main())
    assert request.result(PATIENCE).finish_reason == "length"
    settle(pair)


def test_two_tasks_at_one_request(pair: Pair) -> None:
    """Each reader of its own gets all tokens; two that share an iterator share them out."""
    ids = random_ids(1, 5)
    expected = stock_rows(pair.stock, ids, max_new_tokens=12, **ENDLESS)[0]

    async def main() -> None:
        request = pair.engine.submit(ids, max_new_tokens=12, **ENDLESS)
        readers = [_collect(request), _collect(request), request]
        one, other, result = await asyncio.gather(*readers)
        assert one == other == result.token_ids == expected
        request = pair.engine.submit(ids, max_new_tokens=12, **ENDLESS)
        tokens = aiter(request)
        one, other = await asyncio.gather(_collect(tokens), _collect(tokens))
        assert sorted(one + other) == sorted(expected)

    asyncio.run(main())
    settle(pair)
