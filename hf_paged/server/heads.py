"""Limits on the heads of requests: uvicorn's protocols, with limits before any request is known."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hf_paged.server.errors import ApiError
from hf_paged.server.logs import log_request
from hf_paged.server.settings import ServerSettings

REFUSAL_SECONDS = 0.05  # before a head that is too large is refused: its sender waits, too
MAX_WITHOUT_REQUEST = 256  # connections that have yet to send a head


def limited_protocol(settings: ServerSettings, kind: Any = AutoHTTPProtocol, most: int = MAX_WITHOUT_REQUEST) -> Any:
    """What uvicorn takes as `http`: a protocol of its own, whose connections end unless they come to a request.

    A connection on which no request runs has `head_timeout` seconds for the next one's head, from its first byte, and a
    new one from its beginning; the rest of a body that is not read any more has to arrive within them, too. The limit
    of bytes is also that of what is between two pieces of a body: chunk extensions, trailers. Not for WebSockets.

    Args:
        kind: uvicorn's own, for httptools or h11. The latter counts bytes itself: `h11_max_incomplete_event_size`.
        most: Connections without a request; beyond them the oldest ends.
    """
    max_head_bytes, head_timeout = settings.max_head_bytes, settings.head_timeout
    counts_bytes = hasattr(kind, "on_body")
    waiting: dict[Any, asyncio.TimerHandle] = {}  # connections without a request, the oldest first

    class Limited(kind):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            self._num_bytes = 0  # since there was a head or a piece of a body
            self._has_data = False
            super().connection_made(transport)
            self._wait()
            if len(waiting) > most:
                next(iter(waiting))._refuse(503, f"more than {most} connections are without a request")

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._has_data = True
            while data and not self.transport.is_closing():
                room = max_head_bytes - self._num_bytes if counts_bytes else len(data)
                self._num_bytes += min(room, len(data))
                super().data_received(data[:room])
                data = data[room:]
                if counts_bytes and self._num_bytes >= max_head_bytes:
                    message = f"the request's head is larger than the limit of {max_head_bytes} bytes"
                    self.transport.pause_reading()
                    self.loop.call_later(REFUSAL_SECONDS, self._refuse, 431, message)
                    return
            if self._runs:
                self._end_waiting()
            elif self not in waiting and not self.transport.is_closing():
                self._wait()

        def on_headers_complete(self) -> None:
            self._num_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._num_bytes = 0
            super().on_body(body)

        @property
        def _runs(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait(self) -> None:
            self._since = time.monotonic()
            message = f"the request's head did not come within {head_timeout} s"
            waiting[self] = self.loop.call_later(head_timeout, self._refuse, 408, message)

        def _end_waiting(self) -> None:
            if (timer := waiting.pop(self, None)) is not None:
                timer.cancel()

        def _refuse(self, status: int, message: str) -> None:
            self._end_waiting()
            if self.transport.is_closing():  # what was written is not read
                self.transport.abort()
                return
            if self._has_data and not self._runs:  # else it waits for nothing, or another answer is under way
                body = ApiError(status, message).response().body
                head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
                head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                self.transport.write(head.encode() + bytes(body))
                client = None if self.client is None else self.client[0]
                log_request(client, None, status, time.monotonic() - self._since)
            self.transport.close()

    return Limited
