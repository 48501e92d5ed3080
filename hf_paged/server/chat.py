"""`/v1/chat/completions`: messages of an assistant."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request

from hf_paged.server.generation import Delta, Generation, Text
from hf_paged.server.replies import DONE, EventStream, event
from hf_paged.server.schemas import ChatRequest
from hf_paged.server.serving import Serving


async def create(serving: Serving, request: Request) -> Any:
    """Answers a request."""
    body = await serving.body(request, ChatRequest)
    generation = await serving.start(body, lambda: [serving.prompts.of_chat(body.messages, body.add_generation_prompt)])
    answer = _Answer(serving, body, generation)
    if body.stream:
        return EventStream(answer.events(), generation.close)
    await serving.finished(request, generation)
    serving.note_end("/v1/chat/completions", body, generation)
    return answer.whole()


class _Answer:
    """What is sent for one generation."""

    def __init__(self, serving: Serving, body: ChatRequest, generation: Generation) -> None:
        self._serving = serving
        self._body = body
        self._generation = generation
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": serving.model_name,
        }

    def whole(self) -> dict[str, Any]:
        """All at once."""
        choices = [self._choice(text) for text in self._generation.texts]
        return self._head | {"choices": choices, "usage": self._generation.usage}

    def _choice(self, text: Text) -> dict[str, Any]:
        return {
            "index": text.index,
            "message": {"role": "assistant", "content": text.text, "refusal": None},
            "logprobs": self._said(text.logprobs),
            "finish_reason": text.finish_reason,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Piece by piece."""
        body, generation = self._body, self._generation
        for text in generation.texts:
            yield self._event(text.index, {"role": "assistant", "content": ""}, None, None)
        async for deltas in generation.updates():
            yield b"".join(self._chunk(delta) for delta in deltas)
        self._serving.note_end("/v1/chat/completions", body, generation)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(self._head | {"choices": [], "usage": generation.usage})
        yield DONE

    def _chunk(self, delta: Delta) -> bytes:
        content = {"content": delta.text} if delta.text or delta.logprobs else {}
        return self._event(delta.index, content, self._said(delta.logprobs), delta.finish_reason)

    def _event(self, index: int, delta: dict[str, Any], said: Any, reason: str | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": said, "finish_reason": reason}
        return event(self._head | {"choices": [choice]})

    def _said(self, logprobs: Any) -> dict[str, Any] | None:
        return self._serving.names.chat(logprobs) if self._body.logprobs and logprobs else None
