"""Who may ask, and how much: keys, and bodies that end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError

from hf_paged.server.errors import ApiError, invalid_body
from hf_paged.server.schemas import Body
from hf_paged.server.settings import ServerSettings

B = TypeVar("B", bound=Body)
NUM_DISCARDED = 64 << 20  # bytes of a body that is too large which are still read: its sender hears the answer then


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Raises `ApiError` (401) unless the request brings one of the keys, or there are none."""
    if not keys:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_known = [secrets.compare_digest(given.strip().encode(), key.encode()) for key in keys]  # all: in equal time
    if scheme.lower() != "bearer" or not any(is_known):
        message = "this server wants an API key: Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def read_body(request: Request, kind: type[B], settings: ServerSettings) -> B:
    """A request's body.

    Raises:
        ApiError: It is too large (413), too slow (408), or not what it should be (400).
    """
    try:
        async with asyncio.timeout(settings.body_timeout):
            data = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {settings.body_timeout} s") from None
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise invalid_body(error, data) from None


async def _read(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
        elif size > NUM_DISCARDED:
            break
    if size > most:
        raise ApiError(413, f"the body is larger than the limit of {most} bytes", code="body_too_large")
    return b"".join(parts)
