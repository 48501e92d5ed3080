"""`/v1/completions`: texts that go on."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request

from hf_paged.server.generation import Delta, Generation, Text
from hf_paged.server.replies import DONE, EventStream, event
from hf_paged.server.schemas import CompletionRequest
from hf_paged.server.serving import Serving


async def create(serving: Serving, request: Request) -> Any:
    """Answers a request."""
    body = await serving.body(request, CompletionRequest)
    generation = await serving.start(body, lambda: serving.prompts.of_completion(body))
    answer = _Answer(serving, body, generation)
    if body.stream:
        return EventStream(answer.events(), generation.close)
    await serving.finished(request, generation)
    serving.note_end("/v1/completions", body, generation)
    return answer.whole()


class _Answer:
    """What is sent for one generation."""

    def __init__(self, serving: Serving, body: CompletionRequest, generation: Generation) -> None:
        self._serving = serving
        self._body = body
        self._generation = generation
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.model_name,
        }

    def whole(self) -> dict[str, Any]:
        """All at once."""
        choices = [
            self._choice(index, self._echo(index) + text.text, text.logprobs, 0, text.finish_reason)
            for index, text in enumerate(self._best())
        ]
        return self._head | {"choices": choices, "usage": self._generation.usage}

    async def events(self) -> AsyncIterator[bytes]:
        """Piece by piece."""
        body, generation = self._body, self._generation
        lengths = [0] * len(generation.texts)
        for text in generation.texts if body.echo else ():
            yield event(self._head | {"choices": [self._choice(text.index, self._echo(text.index), [], 0, None)]})
        async for deltas in generation.updates():
            yield b"".join(self._chunk(delta, lengths) for delta in deltas)
        self._serving.note_end("/v1/completions", body, generation)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(self._head | {"choices": [], "usage": generation.usage})
        yield DONE

    def _chunk(self, delta: Delta, lengths: list[int]) -> bytes:
        choice = self._choice(delta.index, delta.text, delta.logprobs, lengths[delta.index], delta.finish_reason)
        lengths[delta.index] += len(delta.text)
        return event(self._head | {"choices": [choice]})

    def _choice(self, index: int, text: str, logprobs: Any, offset: int, reason: str | None) -> dict[str, Any]:
        said = None
        if self._body.logprobs is not None:
            said = self._serving.names.completion(logprobs, offset)
        return {"index": index, "text": text, "logprobs": said, "finish_reason": reason}

    def _best(self) -> list[Text]:
        """The texts that are returned: all, or the likeliest of each prompt's."""
        texts, num_samples, n = self._generation.texts, self._body.num_samples, self._body.n
        if n == num_samples:
            return texts
        found: list[Text] = []
        for start in range(0, len(texts), num_samples):
            found += sorted(texts[start : start + num_samples], key=lambda text: -text.mean_logprob)[:n]
        return found

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        given = prompt[index // self._body.n] if not isinstance(prompt[0], int) else prompt
        return given if isinstance(given, str) else self._serving.prompts.text_of(given, self._body.skip_special_tokens)  # type: ignore[arg-type]
