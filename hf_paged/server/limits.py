"""Limits on requests: keys, and the size and duration of bodies."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from hf_paged.server.errors import ApiError, bad_field, invalid_body, too_deep
from hf_paged.server.schemas import Body
from hf_paged.server.settings import ServerSettings

B = TypeVar("B", bound=Body)
T = TypeVar("T")
NUM_DISCARDED = 64 << 20  # bytes of a body that is too large which are still read: its sender hears the answer then
SMALL = 1 << 12  # bytes of a body that is read at once
REST = 3.0  # times as long as a piece of work took, the event loop is left to others
DISCARD_SECONDS = 0.005  # between two parts of a body that is thrown away
MAX_DEPTH = 64  # lists and objects inside each other: what reads or writes them may recurse
PER_OBJECT, PER_FIELD = 16, 4  # plain values, as which they count: what they cost validation
QUOTE, BACKSLASH = b'"', b"\\"
TEXT = bytes(set(range(256)) - set(b'"{}[],:'))  # all that is no structure
STEPS, WEIGHTS = np.zeros(256, np.int8), np.zeros(256, np.int64)
STEPS[list(b"{[")], STEPS[list(b"}]")] = 1, -1
WEIGHTS[list(b",[{:")] = 1, 1, 1 + PER_OBJECT, PER_FIELD


class JsonSize:
    """Counts what a JSON text holds while it arrives, at a fraction of a millisecond for 64 KiB, before it is parsed.

    Attributes:
        num_values: Items of lists and values of objects; an object counts as 16 more, and each of its fields as 4.
        depth: Lists and objects inside each other.
    """

    def __init__(self) -> None:
        self.num_values = self.depth = 0
        self._level = 0
        self._in_string = False
        self._cut = b""  # a backslash whose character is yet to come

    def feed(self, part: bytes) -> None:
        if BACKSLASH in part or self._cut:
            part = (self._cut + part).replace(BACKSLASH * 2, b"").replace(BACKSLASH + QUOTE, b"")
            self._cut = BACKSLASH if part.endswith(BACKSLASH) else b""
        marks = np.frombuffer(part.translate(None, TEXT), np.uint8)
        is_quote = marks == ord(QUOTE)
        is_inside = np.logical_xor(np.bitwise_xor.accumulate(is_quote), self._in_string)
        outside = marks[~is_inside & ~is_quote]
        levels = self._level + np.cumsum(STEPS[outside], dtype=np.int64)
        self._in_string ^= bool(is_quote.sum() & 1)
        self._level = int(levels[-1]) if len(levels) else self._level
        self.depth = max(self.depth, int(levels.max(initial=0)))
        self.num_values += int(WEIGHTS[outside].sum())


def _too_large(why: str) -> ApiError:
    return ApiError(413, f"the body is too large: {why}", code="body_too_large")


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Raises `ApiError` (401) unless the request brings one of the keys, or there are none."""
    if not keys:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_known = [secrets.compare_digest(given.strip().encode(), key.encode()) for key in keys]  # all: in equal time
    if scheme.lower() != "bearer" or not any(is_known):
        message = "this server wants an API key: Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class Pace:
    """Has long pieces of the event loop's work follow each other at a distance, in which it serves everything else."""

    def __init__(self) -> None:
        self._next = 0.0  # of `time.monotonic`

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work` once its turn has come, and returns its result."""
        while (left := self._next - time.monotonic()) > 0:
            await asyncio.sleep(left)
        start = time.monotonic()
        try:
            return work(*arguments)
        finally:
            end = time.monotonic()
            self._next = end + REST * (end - start)


async def read_body(request: Request, kind: type[B], settings: ServerSettings, pace: Pace) -> B:
    """A request's body; large ones at a pace.

    Raises:
        ApiError: It is too large or holds too much (413), too slow (408), or not what it should be (400).
    """
    try:
        async with asyncio.timeout(settings.body_timeout):
            data = await _read(request, settings, pace)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {settings.body_timeout} s") from None
    if len(data) <= SMALL:
        return _parsed(kind, data)
    return await pace.run(_parsed, kind, data)


async def read_form(request: Request, kind: type[B], settings: ServerSettings, _pace: Pace) -> B:
    """A request's body that is a form with a file in it, which the body takes.

    Raises:
        ApiError: As `read_body`, and for no such form.
    """
    form = await _form(request, settings)
    given: dict[str, Any] = {}
    for name, value in form.multi_items():
        field, is_list = name.removesuffix("[]"), name.endswith("[]")
        if field in given and not is_list:
            raise bad_field(field[:200], "it is there more than once")
        if isinstance(value, UploadFile) != (field == "file"):
            raise bad_field(field[:200], "only `file` is a file, with a filename")
        said = value.filename if isinstance(value, UploadFile) else value
        given[field] = [*given.get(field, []), said] if is_list else said
    body = _parsed(kind, json.dumps(given).encode())
    body.take(form["file"])  # type: ignore[attr-defined]
    return body


async def _form(request: Request, settings: ServerSettings) -> FormData:
    if not request.headers.get("Content-Type", "").lower().startswith("multipart/form-data"):
        raise ApiError(400, "the body must be multipart/form-data, with the sound as `file`", code="invalid_form")
    parser = MultiPartParser(request.headers, _counted(request, settings.max_audio_bytes), max_files=1, max_fields=32)
    try:
        async with asyncio.timeout(settings.body_timeout):
            return await parser.parse()
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {settings.body_timeout} s") from None
    except MultiPartException as error:
        raise ApiError(400, f"the body is no form: {error.message}", code="invalid_form") from None


async def _counted(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    """A body's parts; what is too much is read on, and thrown away."""
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most + NUM_DISCARDED:
            break
        if size > most:
            await asyncio.sleep(DISCARD_SECONDS)  # its sender waits, too
        else:
            yield part
    if size > most:
        raise _too_large(f"{most} bytes are the limit")


def _parsed(kind: type[B], data: bytes) -> B:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise invalid_body(error, data) from None


async def _read(request: Request, settings: ServerSettings, pace: Pace) -> bytes:
    """All of a body, which is counted as it comes; what is too much is read on, and thrown away."""
    most, error = settings.max_body_bytes, None
    parts: list[bytes] = []
    count, size = JsonSize(), 0
    async for part in request.stream():
        size += len(part)
        if size > NUM_DISCARDED:
            break
        if error is not None:
            await asyncio.sleep(DISCARD_SECONDS)  # its sender waits, too
            continue
        if size > most:
            error = _too_large(f"{most} bytes are the limit")
        else:
            if size <= SMALL:
                count.feed(part)
            else:
                await pace.run(count.feed, part)
            parts.append(part)
            if count.num_values > settings.max_body_values:
                error = _too_large(
                    f"it holds more than {settings.max_body_values} values, of which an object is {PER_OBJECT} and a "
                    f"field {PER_FIELD}"
                )
            elif count.depth > MAX_DEPTH:
                error = await pace.run(too_deep, b"".join(parts), MAX_DEPTH)
    if error is not None:
        raise error
    return b"".join(parts)
