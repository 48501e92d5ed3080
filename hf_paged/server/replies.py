"""Answers to clients that may go away: a stream of server-sent events, or one result. Both are made in pieces."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from hf_paged.server.errors import ApiError, logger
from hf_paged.server.wakeups import in_pieces

T = TypeVar("T")
JSON = "application/json"
DONE = b"data: [DONE]\n\n"
TEXT = f"text-{secrets.token_hex(16)}"  # in the place of a text, or of an array, that is yet to come
PIECE = 1 << 16  # bytes that are made and sent at once
STALLED = 60.0  # seconds that a client may take to read a piece: a slower one counts as gone
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=list).encode


class ClientGoneError(Exception):
    """The result is not waited for any more."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits `work`, which is cancelled when the client goes away.

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
        for each in both:
            each.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        del task, both  # an error holds this frame: what the work held would be freed by the garbage collector alone


def json_pieces(data: Any) -> Iterator[bytes]:
    """JSON. An iterator in the data is an array; each item is taken when the JSON before it has been."""
    later: list[Iterator[Any]] = []

    def hold(items: Iterable[Any]) -> str:
        later.append(iter(items))
        return TEXT

    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=hold).encode

    def pieces(data: Any) -> Iterator[bytes]:
        text = encode(data)
        if not later:
            yield text.encode()
            return
        arrays = later.copy()
        later.clear()
        before, *behind = text.split(f'"{TEXT}"')
        yield before.encode()
        for items, after in zip(arrays, behind, strict=True):
            yield b"["
            for number, item in enumerate(items):
                if number:
                    yield b","
                yield from pieces(item)
            yield f"]{after}".encode()

    return pieces(data)


async def joined(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in fewer pieces, between which the event loop has its turn."""
    async for piece in in_pieces(chunks, len, PIECE):
        yield b"".join(piece)


async def json_answer(data: Any) -> Response:
    """An answer of one result; see `json_pieces`."""
    pieces = joined(json_pieces(data))
    first = await anext(pieces)
    second = await anext(pieces, None)
    if second is None:
        return Response(first, media_type=JSON)

    async def whole() -> AsyncIterator[bytes]:
        yield first
        yield second
        async for piece in pieces:
            yield piece

    return Streamed(whole(), JSON)


def event(data: Any, name: str | None = None) -> bytes:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_to_json(data)}\n\n".encode()


def event_pieces(data: Any) -> Iterator[bytes]:
    """A server-sent event that may be large; see `json_pieces`."""
    yield b"data: "
    yield from json_pieces(data)
    yield b"\n\n"


class TextEvents:
    """Server-sent events that differ, those of one index, in a text only: the rest of them is written once."""

    def __init__(self, data_of: Callable[[int, str], Any]) -> None:
        """Takes what makes the data of an index and a text; the text is in one place of it."""
        self._data_of = data_of
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        around = self._around.get(index)
        if around is None:
            before, after = event(self._data_of(index, TEXT)).split(f'"{TEXT}"'.encode())
            around = self._around[index] = before, after
        return around[0] + _to_json(text).encode() + around[1]


class Streamed(StreamingResponse):
    """An answer that is sent as it is made. Ends when the client goes away, or reads no more."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        media_type: str,
        close: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`close` is called at the end, whatever that is."""
        super().__init__(pieces, 200, headers, media_type)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGoneError, OSError):
                await unless_gone(receive, self._send(send, scope.setdefault("state", {})))
        finally:
            self._close()

    async def _send(self, send: Send, state: dict[str, Any]) -> None:
        send = partial(_in_time, send)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for piece in self.body_iterator:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ApiError as error:  # its last piece has said so
            state["status"] = error.status
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _in_time(send: Send, message: Message) -> None:
    """Sends a part of an answer. Raises `TimeoutError` if the client takes none of those before."""
    async with asyncio.timeout(STALLED):
        await send(message)


def event_stream(events: AsyncIterator[bytes], close: Callable[[], None]) -> Streamed:
    """Server-sent events as they are made; an error is the last one. `close` is called at the end."""
    return Streamed(
        _with_error(events), "text/event-stream", close, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )


async def _with_error(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for each in events:
            yield each
    except ApiError as error:
        yield event(error.body)
        raise
    except Exception:
        logger.exception("a stream failed")
        failed = ApiError(500, "the request failed: see the server's log")
        yield event(failed.body)
        raise failed from None
