"""Errors in the shape that OpenAI's clients read."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.exceptions import HTTPException

logger = logging.getLogger("hf_paged.server")

TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
OWN_FIELD = re.compile(r"^Value error, (\w+): ")  # how a check of several fields begins: the one that it is about
BROKEN_INSIDE = re.compile("(?:recursion|surrogate|escape|unicode|control).* at line (\\d+) column (\\d+)")
MAX_NAMED = 8  # parts of a path to where JSON broke
WRONG_TYPES = ("_type", "literal_error")


class ApiError(Exception):
    """The answer to a request that has no result."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """An answer.

        Args:
            message: What was given, and what would work.
            param: The field it is about.
            code: A name for it.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers or {}))


def bad_field(name: str, message: str) -> ApiError:
    return ApiError(400, f"{name}: {message}", param=name)


def bad_argument(message: str, fields: Container[str]) -> ApiError:
    """The error of an argument that the engine refuses: about one of these fields, if the message begins with it."""
    name = message.partition(" ")[0].strip("`:")
    return ApiError(400, message, name if name in fields else None)


def queue_full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})


def server_ends() -> ApiError:
    return ApiError(503, "the request was cancelled: the server ends", code="cancelled")


def too_long(timeout: float | None) -> ApiError:
    return ApiError(504, f"the request took longer than {timeout} s", code="timeout")


def invalid_body(error: ValidationError, body: bytes) -> ApiError:
    """Pydantic's error about a body: the first of the innermost faults, and its place."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    # Of what may be one of several, the one that was meant is the one that it got furthest in.
    unsupported = [each for each in found if each["type"] == "not_supported"]
    first = max(unsupported or found, key=lambda each: len(each["loc"]))
    if first["type"] == "json_invalid":
        where = _where_it_broke(body, first["msg"])
        head = f"{where}: " if where else ""
        return ApiError(400, f"{head}the body is not JSON: {first['msg']}", where or None, "invalid_json")
    given = from_json(body)
    where = _where(first, given)
    if first["type"] in ("extra_forbidden", "unknown_field"):
        return ApiError(400, f"{where:.200}: this server does not know that field", where[:200], "unknown_field")
    if unsupported:
        return ApiError(400, f"{where}: {first['msg'].partition(': ')[2]}", where, "not_supported")
    # Types that were tried there; one whose limits it doesn't keep was the right one.
    tried = [each for each in found if len(each["loc"]) == len(first["loc"]) and _where(each, given) == where]
    right = [each for each in tried if not each["type"].endswith(WRONG_TYPES)]
    message = _alternatives([each["msg"] for each in right[:1] or tried])
    return ApiError(400, f"{where}: {message}" if where else message, where or None, "invalid_value")


def _where(error: ErrorDetails, body: Any) -> str:
    """The path to what an error is about."""
    path: tuple[int | str, ...] = error["loc"]
    last: tuple[int | str, ...] = ()
    if error["type"] == "missing":
        path, last = path[:-1], path[-1:]
    elif error["type"] in ("unknown_field", "not_supported"):
        last = (error["msg"].partition(":")[0],)
    elif match := OWN_FIELD.match(error["msg"]):
        last = match.groups()
    return ".".join(map(str, (*_in_body(path, body), *last)))


def _where_it_broke(body: bytes, message: str) -> str:
    """The path to a string that none is, or to lists in lists in lists."""
    match = BROKEN_INSIDE.search(message)
    if match is None:
        return ""
    lines = body.split(b"\n", int(match[1]))
    end = sum(len(line) + 1 for line in lines[: int(match[1]) - 1]) + int(match[2]) - 1
    for cut in (end, body.rfind(b"\\", 0, end)):
        try:
            value = from_json(body[: max(cut, 0)], allow_partial="trailing-strings")
        except ValueError:
            continue
        path: list[Any] = []
        while isinstance(value, dict | list) and value and len(path) < MAX_NAMED:
            path.append(next(reversed(value)) if isinstance(value, dict) else len(value) - 1)
            value = value[path[-1]]
        return ".".join(map(str, path))
    return ""


def too_deep(body: bytes, most: int) -> ApiError:
    """A body, or the beginning of one, whose lists and objects are nested deeper than so many."""
    where = ""
    try:
        level: list[tuple[str, Any]] = [("", from_json(body, allow_partial=True))]
        for depth in range(most):
            level = [
                (f"{where}.{key}" if depth < MAX_NAMED else where, inner)
                for where, value in level
                for key, inner in (value.items() if isinstance(value, dict) else enumerate(value))
                if isinstance(inner, dict | list)
            ]
        where = level[0][0].removeprefix(".")
    except (ValueError, LookupError, TypeError) as error:
        where = _where_it_broke(body, str(error))
    head = f"{where}: " if where else ""
    message = f"{head}the body's lists and objects are nested deeper than {most}"
    return ApiError(400, message, where or None, code="invalid_json")


def _alternatives(messages: list[str]) -> str:
    """One sentence about one value."""
    first, *others = dict.fromkeys(OWN_FIELD.sub("", message).removeprefix("Value error, ") for message in messages)
    return ", or ".join([first, *(other.removeprefix("Input should be ") for other in others)])


def _in_body(path: tuple[int | str, ...], body: Any) -> Iterator[int | str]:
    """The parts of a path that lead through the body; others say which of several types was tried."""
    for part in path:
        is_there = isinstance(part, int) if isinstance(body, list) else isinstance(body, dict) and part in body
        if is_there:
            yield part
            body = body[part]


def add_handlers(app: FastAPI) -> None:
    """Has an app answer in this shape."""

    @app.exception_handler(HTTPException)
    async def _of_starlette(_request: Request, error: HTTPException) -> JSONResponse:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    @app.exception_handler(Exception)
    async def _unexpected(_request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"{type(error).__name__}: see the server's log").response()
