"""Streams: a request's tokens in batches, and tokens as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from hf_paged import Request

ResultT = TypeVar("ResultT")

MAX_BYTES = 4  # of one character in UTF-8, and so of tokens that are each a piece of it
CONTEXT = 8  # tokens before the first new one that are decoded with it: some tokenizers drop the space of a first word


async def in_batches(request: Request, seconds: Callable[[], float], patience: float = 1.0) -> AsyncIterator[list[int]]:
    """A request's new tokens, at most every `seconds()`, so that fast requests do not drown browser and server.

    Where nothing new comes for `patience` seconds (it waits in the queue, or the engine is paused) an empty batch does:
    the sender of the batches then notices that the listener is gone.

    Raises:
        Exception: What the request raised.
    """
    new: list[int] = []
    news = asyncio.Event()

    async def collect() -> None:
        async for token in request:
            new.append(token)
            news.set()

    collector = asyncio.create_task(collect())
    collector.add_done_callback(lambda _: news.set())
    try:
        while not (collector.done() and not new):
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), patience)
            batch, new[:] = list(new), []
            is_last = collector.done()
            news.clear()
            if batch or not is_last:
                yield batch
            await asyncio.wait([collector], timeout=seconds())
        collector.result()
    finally:
        if not collector.done():
            collector.cancel()
            with suppress(asyncio.CancelledError):
                await collector


async def in_thread(call: Callable[[], ResultT], undo: Callable[[ResultT], object]) -> ResultT:
    """`call()` on a thread. Who is cancelled meanwhile has no result to clean up: then `undo` is given it."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else undo(done.result()))
        raise


class TextStream:
    """Turns tokens into text as they come, without breaking a character that several tokens make up."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = (), skips_special_tokens: bool = True) -> None:
        """Begins behind a prompt, which is not part of the text."""
        self._tokenizer = tokenizer
        self._skips = skips_special_tokens
        self._ids = list(prompt_ids[-CONTEXT:])
        self._start, self._read = 0, len(self._ids)

    def push(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """The text that these tokens add; what could be the beginning of a character is kept back."""
        self._ids += tokens
        before = self._decode(self._ids[self._start : self._read])
        whole = self._decode(self._ids[self._start :])
        is_cut = whole.endswith("\ufffd") and len(self._ids) - self._read < MAX_BYTES
        if len(whole) <= len(before) or (is_cut and not is_last):
            return ""
        self._start, self._read = max(0, self._read - CONTEXT), len(self._ids)
        return whole[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False))


def decode_reply(
    tokenizer: Any, prompt_ids: Sequence[int], tokens: Sequence[int], skips_special_tokens: bool = True
) -> str:
    """A finished reply as text."""
    return TextStream(tokenizer, prompt_ids, skips_special_tokens).push(tokens, is_last=True)
