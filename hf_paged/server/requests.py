"""`RequestTable`: what a server's clients have running, and the last that ended; neither prompts nor texts."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass

from hf_paged.server.generation import Generation

NUM_KEPT = 200  # that have ended


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request.

    Attributes:
        label: What it is called; its prompts in the engine by their number: `label`, `label.1`, `label.2`.
        path: Where it was sent.
        model: The model's name.
        state: "waiting" for its first token, "running", "done", or "given up": its client went away, it failed or took
            too long.
        is_streamed: Its texts are sent as they come.
        num_prompts: Prompts.
        num_texts: Texts, of all prompts.
        num_prompt_tokens: Tokens of all prompts.
        num_tokens: Tokens of all texts, so far.
        first_token_seconds: From its arrival to the first text; `None`: there is none yet.
        seconds: From its arrival to its end, or to now.
        finish_reasons: Of its texts; `None` of one that hasn't ended.
    """

    label: str
    path: str
    model: str
    state: str
    is_streamed: bool
    num_prompts: int
    num_texts: int
    num_prompt_tokens: int
    num_tokens: int
    first_token_seconds: float | None
    seconds: float
    finish_reasons: tuple[str | None, ...]


class RequestTable:
    """The requests of one server. May be read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name = f"api-{secrets.token_hex(3)}"  # an engine may serve several apps
        self._count = 0
        self._running: dict[str | None, tuple[str, str, bool, Generation]] = {}
        self._ended: deque[ServedRequest] = deque(maxlen=NUM_KEPT)

    def add(self, path: str, model: str, is_streamed: bool, generation: Generation) -> None:
        """Names a request that begins, and keeps an eye on it until it is closed."""
        with self._lock:
            self._count += 1
            generation.label = f"{self._name}-{self._count}"
            generation.on_close = self._end
            self._running[generation.label] = path, model, is_streamed, generation

    def rows(self) -> list[ServedRequest]:
        """Running requests, and ended ones; the newest of each come first."""
        with self._lock:
            running, ended = list(self._running.values()), list(self._ended)
        return [*(_row(*found) for found in reversed(running)), *reversed(ended)]

    def _end(self, generation: Generation) -> None:
        with self._lock:
            found = self._running.pop(generation.label, None)
            if found is not None:
                self._ended.append(_row(*found))


def _row(path: str, model: str, is_streamed: bool, generation: Generation) -> ServedRequest:
    reasons = tuple(text.finish_reason for text in list(generation.texts))
    first, started = generation.first_token_time, generation.arrival_time
    if generation.is_closed:
        state = "done" if reasons and None not in reasons else "given up"
    else:
        state = "waiting" if first is None else "running"
    return ServedRequest(
        label=generation.label or "",
        path=path,
        model=model,
        state=state,
        is_streamed=is_streamed,
        num_prompts=len(generation.prompts),
        num_texts=len(reasons),
        num_prompt_tokens=generation.num_prompt_tokens,
        num_tokens=generation.num_tokens,
        first_token_seconds=None if first is None else first - started,
        seconds=time.monotonic() - started,
        finish_reasons=reasons,
    )
