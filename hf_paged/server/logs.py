"""The log: a line of JSON for each request and for each other message."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_paged.server.generation import Generation

MAX_LENGTH = 200  # characters of what a client says
requests_log = logging.getLogger("hf_paged.server.requests")


class JsonLines(logging.Formatter):
    """Each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """As it is, if it is about a request."""
        message = record.getMessage()
        if record.name == requests_log.name:
            return message
        line = {"time": _time(record.created), "level": record.levelname, "logger": record.name, "message": message}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_request(client: str | None, path: str | None, status: int, seconds: float, **more: Any) -> None:
    """Writes the line about a request; `path` is `None` if it wasn't read that far."""
    line = {"time": _time(time.time()), "client": client, "path": path, "status": status, "seconds": round(seconds, 4)}
    requests_log.info("%s", json.dumps(line | more))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class RequestLog:
    """An app whose requests are logged when their answers end, whatever they are: no prompts, no texts.

    What is known of a request is in its `state`: its `body`, its `generation`, and the `status` that a stream ended
    with.
    """

    def __init__(self, app: ASGIApp, model_name: str) -> None:
        """Around another one; `model_name` is of the model that is meant where a body names none."""
        self._app = app
        self._model_name = model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, is_over = time.monotonic(), 500, False

        async def note(message: Message) -> None:
            nonlocal status, is_over
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body") and not is_over:
                is_over = True
                self._log(Request(scope), status, started)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if not is_over:  # an answer that began and was cut: its client went away
                self._log(Request(scope), 499 if status < 400 else status, started)

    def _log(self, request: Request, status: int, started: float) -> None:
        state = request.state
        status, body = getattr(state, "status", status), getattr(state, "body", None)
        said: dict[str, Any] = {"model": None, "user": None}
        if body is not None:
            said = {
                "model": (getattr(body, "model", None) or self._model_name)[:MAX_LENGTH],
                "user": getattr(body, "user", None),
            }
        client = None if request.client is None else request.client.host
        work = _work(getattr(state, "generation", None))
        log_request(client, request.scope["path"][:MAX_LENGTH], status, time.monotonic() - started, **said, **work)


def _work(generation: Generation | None) -> dict[str, Any]:
    if generation is None:
        return {}
    first, reasons = generation.first_token_time, [text.finish_reason for text in list(generation.texts)]
    return {
        "num_prompts": len(generation.prompts),
        **generation.usage,
        "finish_reasons": reasons,
        "seconds_to_first_token": None if first is None else round(first - generation.arrival_time, 4),
    }
