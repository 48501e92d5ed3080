"""Answers to clients that may go away: a stream of server-sent events, or one result."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hf_paged.server.errors import ApiError, logger

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
TEXT = f"text-{secrets.token_hex(16)}"  # in the place of a text that is yet to come
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ClientGoneError(Exception):
    """The result is not waited for any more."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled when the client goes away.

    Raises:
        ClientGoneError: The client went away.
    """
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    both: list[asyncio.Future[Any]] = [task, gone]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _end(both)


async def _end(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def event(data: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_to_json(data)}\n\n".encode()


class TextEvents:
    """Server-sent events that differ, those of one index, in a text only: the rest of them is written once."""

    def __init__(self, data_of: Callable[[int, str], Any]) -> None:
        """Takes what makes the data of an index and a text; the text is in one place of it."""
        self._data_of = data_of
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        """The one with this text."""
        around = self._around.get(index)
        if around is None:
            before, after = event(self._data_of(index, TEXT)).split(f'"{TEXT}"'.encode())
            around = self._around[index] = before, after
        return around[0] + _to_json(text).encode() + around[1]


class EventStream(Response):
    """Server-sent events as they are made. Ends when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        """An answer.

        Args:
            events: What is sent. An `ApiError` it raises is the last event.
            close: Called at the end, whatever that is.
        """
        self._events = events
        self._close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGoneError, OSError):
                await unless_gone(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
        except OSError:
            raise
        except Exception:
            logger.exception("a stream failed")
            failed = event(ApiError(500, "the request failed: see the server's log").body)
            await send({"type": "http.response.body", "body": failed, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
