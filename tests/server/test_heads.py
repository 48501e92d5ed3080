"""Connections that don't come to a request: heads that are too large, too slow, or never end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import product
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from helpers.serving import serving
from helpers.waiting import PATIENCE, eventually, join
from hf_paged.server.heads import limited_protocol
from hf_paged.server.settings import ServerSettings

LIMIT, DEADLINE = 2000, 1.0
KINDS = ["httptools-uvloop", "httptools-asyncio", "h11-asyncio"]
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads all of a body, and says how long it was; of `/early` nothing; `/slow` waits for a disconnect."""
    if scope["type"] != "http":
        return
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more = message["more_body"]
    if scope["path"] == "/slow":
        await asyncio.sleep(2 * DEADLINE)
    content = b"%d bytes" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


class Listening:
    """A server of `app`, on a thread."""

    def __init__(self, kind: Any, loop: str, seconds: float = PATIENCE, **more: Any) -> None:
        http = limited_protocol(ServerSettings(max_head_bytes=LIMIT, head_timeout=seconds), kind, **more)
        config = uvicorn.Config(
            app, port=0, http=http, loop=loop, ws="none", lifespan="off", log_config=None, log_level="error",
            h11_max_incomplete_event_size=LIMIT,
        )  # fmt: skip
        self.counts = kind is HttpToolsProtocol
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        eventually(lambda: self.server.started, "the server does not start")

    def connect(self) -> socket.socket:
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)

    def end(self) -> None:
        self.server.should_exit = True
        join(self.thread)


def listen(kind: str, *seconds: float) -> Iterator[Listening]:
    parser, loop = kind.split("-")
    running = Listening({"httptools": HttpToolsProtocol, "h11": H11Protocol}[parser], loop, *seconds)
    yield running
    running.end()


@pytest.fixture(params=KINDS, scope="module")
def listening(request: pytest.FixtureRequest) -> Iterator[Listening]:
    yield from listen(request.param)


@pytest.fixture(params=KINDS, scope="module")
def hasty(request: pytest.FixtureRequest) -> Iterator[Listening]:
    """Its deadline comes while one waits."""
    yield from listen(request.param, DEADLINE)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the other side ends."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def reply(connection: socket.socket) -> bytes:
    """One answer of `app`."""
    data = b""
    while not data.endswith(b" bytes"):
        part = connection.recv(1 << 16)
        assert part, data
        data += part
    return data


def test_requests_go_on(listening: Listening) -> None:
    """One by one, in pieces, in a pipeline, and with bodies; would break: limits for what is no head."""
    chunks = b"%x\r\n%b\r\n" % (5 * LIMIT, b"x" * 5 * LIMIT) * 3
    large = b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (9 * LIMIT)
    with listening.connect() as connection:
        for _ in range(3):
            connection.sendall(GET + b"X: " + b"x" * (LIMIT - 200) + b"\r\n\r\n")
            assert b"200 OK" in reply(connection)
        connection.sendall(POST + b"\r\n" + chunks + b"0\r\n\r\n")
        assert reply(connection).endswith(b"\r\n%d bytes" % (15 * LIMIT))
        connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n" + large)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"x" * 9 * LIMIT + (GET + b"\r\n") * 2)
        for size in (9 * LIMIT, 0, 0) if listening.counts else ():
            connection.setblocking(True)
            assert b"\r\n%d bytes" % size in until(connection, b"%d bytes" % size)


def until(connection: socket.socket, end: bytes) -> bytes:
    """What comes up to some bytes, and nothing behind them."""
    data = b""
    while not data.endswith(end):
        part = connection.recv(1)
        assert part, data
        data += part
    return data


@pytest.mark.parametrize("size", [LIMIT + 1, 10 * LIMIT, 600 * LIMIT])
@pytest.mark.parametrize("begin", [GET + b"X: ", GET + b"X: 1\r\n" * 50, b"GET /", b"\r\n", b"G"], ids=str)
def test_a_head_without_end(listening: Listening, begin: bytes, size: int) -> None:
    """Would break: megabytes of a head, read before any key is looked at."""
    filler = begin[-6:] if begin.endswith(b"1\r\n") else b"\r\n" if begin == b"\r\n" else b"x"
    with listening.connect() as connection:
        try:
            connection.sendall((begin + filler * size)[:size])
        except (BrokenPipeError, ConnectionResetError):
            assert size > 10 * LIMIT
        answer = rest(connection)
    if size == LIMIT + 1:  # read as a whole, so that the end is no reset
        assert answer.split()[1] in (b"431", b"400", b"408"), answer
    if listening.counts and answer and begin.startswith(b"GET"):
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert answer.startswith(b"HTTP/1.1 431 ") and str(LIMIT) in error["message"]


def test_the_second_head(listening: Listening) -> None:
    with listening.connect() as connection:
        connection.sendall(GET + b"\r\n")
        reply(connection)
        connection.sendall(GET + b"X: " + b"x" * LIMIT)
        assert rest(connection).split()[1] in (b"431", b"400")


def drip(connection: socket.socket, piece: bytes) -> bytes:
    """What is answered to a piece every now and then, until the other side ends."""
    answer = b""
    connection.settimeout(DEADLINE / 20)
    for _ in range(10_000):
        try:
            connection.sendall(piece)
            part = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return answer
        if not part:
            return answer
        answer += part
    raise AssertionError("it goes on for ever")


def test_heads_that_do_not_come(hasty: Listening) -> None:
    """A byte at a time, or no more at all; would break: connections that stay for ever."""
    with ExitStack() as stack:
        begun = []
        for is_first, begin in [*product((True, False), (b"G", GET, GET + b"X: x")), (True, b"")]:
            connection = stack.enter_context(hasty.connect())
            if not is_first:
                connection.sendall(GET + b"\r\n")
                reply(connection)
            connection.sendall(begin)
            begun.append((begin, connection))
        slow = stack.enter_context(hasty.connect())
        slow.sendall(GET)
        assert drip(slow, b"x").startswith(b"HTTP/1.1 408 ")
        for begin, connection in begun:
            assert rest(connection)[:13] == (b"HTTP/1.1 408 " if begin else b"")


@pytest.mark.parametrize("what", ["extension", "trailers", "trailer"])
def test_between_the_pieces_of_a_body(listening: Listening, what: str) -> None:
    """Would break: as much as one likes in a place where no one counts."""
    filler = b"X: x\r\n" if what == "trailers" else b"x"
    begin = {"extension": b"1;", "trailers": b"0\r\n", "trailer": b"0\r\nX: "}[what]
    with listening.connect() as connection:
        connection.sendall(POST + b"\r\n1\r\nx\r\n" + begin)
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(filler * 2 * LIMIT)
        assert b"200 OK" not in rest(connection)


def test_the_rest_of_a_body_that_nobody_reads(hasty: Listening) -> None:
    """Would break: a connection that stays for as long as it goes on about a request that is over."""
    with hasty.connect() as connection:
        connection.sendall(POST.replace(b"/", b"/early", 1) + b"\r\n1\r\nx\r\n")
        assert b"200 OK" in reply(connection)
        drip(connection, b"1\r\nx\r\n")


def test_a_request_that_runs_is_left_alone(hasty: Listening) -> None:
    """Longer than the deadline for heads, with the beginning of another one behind it."""
    with hasty.connect() as connection:
        connection.sendall(GET.replace(b"/", b"/slow", 1) + b"\r\n" + b"GET /")
        assert b"200 OK" in reply(connection)


def test_many_without_a_request() -> None:
    """Would break: connections that leave none for others."""
    running = Listening(HttpToolsProtocol, "asyncio", most=5)
    with running.connect() as first, running.connect() as second:
        first.sendall(GET + b"\r\n")
        reply(first)
        second.sendall(GET)
        others = [running.connect() for _ in range(5)]
        assert second.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        first.sendall(GET + b"\r\n")
        assert b"200 OK" in reply(first)
        with running.connect() as last:
            last.sendall(GET + b"\r\n")
            assert b"200 OK" in reply(last)
        for other in others:
            other.close()
    running.end()


def test_the_server_has_the_limits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hf_paged.server.requests")
    with serving(ServerSettings(max_head_bytes=LIMIT, head_timeout=DEADLINE)) as served:
        host, port = served.url.removeprefix("http://").split(":")
        for content, status in ((GET + b"X: " + b"x" * LIMIT, 431), (GET, 408)):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(content)
                assert rest(connection).split()[1] == b"%d" % status
            line = json.loads(caplog.records[-1].getMessage())
            assert (line["status"], line["path"], line["client"]) == (status, None, host)
