"""`/v1/chat/completions`: messages of an assistant."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import Request

from hf_paged.server.chat_schemas import ChatRequest
from hf_paged.server.generation import Delta, Generation, Text
from hf_paged.server.replies import DONE, TextEvents, event, joined
from hf_paged.server.serving import Serving
from hf_paged.server.tools import Parser, has_schema, message_of, parser_of, read

PATH = "/v1/chat/completions"


async def create(serving: Serving, request: Request) -> Any:
    """The assistant's next message."""
    body = await serving.body(request, ChatRequest)
    generation = await start(serving, request, body)
    return await serving.reply(request, body, generation, _Answer(serving, body, generation))


async def start(serving: Serving, request: Request, body: ChatRequest) -> Generation:
    """Queues a chat; see `Serving.start`."""
    if body.offered_tools and not body.is_forced and has_schema(serving.tokenizer):
        body.skip_special_tokens = False  # they are what calls are recognised by
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.offered_tools]
    given = body.messages, body.add_generation_prompt, tools or None, body.template_variables
    return await serving.start(request, body, lambda: [serving.prompts.of_chat(*given)])


def _reason(has_calls: bool, parser: Parser, reason: str) -> str:
    """Why a message ended: with calls, unless they were cut."""
    return "tool_calls" if has_calls and reason == "stop" and not parser.is_cut else reason


class _Answer:
    def __init__(self, serving: Serving, body: ChatRequest, generation: Generation) -> None:
        self._serving = serving
        self._body = body
        self._generation = generation
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or serving.model_name,
        }
        self._with_calls: set[int] = set()  # indexes of streamed texts
        self._plain = TextEvents(lambda index, text: self._data(index, {"content": text}, None, None))

    def whole(self) -> dict[str, Any]:
        choices = (self._choice(text) for text in self._generation.texts)
        whole: dict[str, Any] = self._head | {"choices": choices, "usage": self._generation.usage}
        wanted = self._body.prompt_logprobs
        if wanted is not None:
            whole["prompt_logprobs"] = self._serving.names.prompt(self._generation.prompt_logprobs(0), wanted)
        return whole

    def _choice(self, text: Text) -> dict[str, Any]:
        parser = self._parser()
        message = message_of(read(parser, text.text))
        assert text.finish_reason is not None
        return {
            "index": text.index,
            "message": message,
            "logprobs": self._said(text.logprobs),
            "finish_reason": _reason("tool_calls" in message, parser, text.finish_reason),
        }

    async def events(self) -> AsyncIterator[bytes]:
        body, generation = self._body, self._generation
        parsers = [self._parser() for _ in generation.texts]
        first = {"role": "assistant", "content": ""}
        async for piece in joined(self._event(text.index, first, None, None) for text in generation.texts):
            yield piece
        async for deltas in generation.updates():
            async for piece in joined(chunk for delta in deltas for chunk in self._chunks(delta, parsers[delta.index])):
                yield piece
        self._serving.note_end(body, generation)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(self._head | {"choices": [], "usage": generation.usage})
        yield DONE

    def _chunks(self, delta: Delta, parser: Parser) -> Iterator[bytes]:
        is_over, said = delta.finish_reason is not None, self._said(delta.logprobs)
        pieces = parser.feed(delta.text) + (parser.end() if is_over else [])
        if any("tool_calls" in piece for piece in pieces):
            self._with_calls.add(delta.index)
        reason = None
        if delta.finish_reason is not None:
            reason = _reason(delta.index in self._with_calls, parser, delta.finish_reason)
        if not pieces and (said is not None or is_over):
            pieces = [{}]
        for number, piece in enumerate(pieces, 1):
            is_last = number == len(pieces)
            yield self._event(delta.index, piece, said if number == 1 else None, reason if is_last else None)

    def _parser(self) -> Parser:
        return parser_of(self._body, self._serving.tokenizer)

    def _event(self, index: int, delta: dict[str, Any], said: Any, reason: str | None) -> bytes:
        if said is None and reason is None and not self._body.counts_on and delta.keys() == {"content"}:
            return self._plain.event(index, delta["content"])
        usage = {"usage": self._generation.usage} if self._body.counts_on else {}
        return event(self._data(index, delta, said, reason) | usage)

    def _data(self, index: int, delta: dict[str, Any], said: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": said, "finish_reason": reason}
        return self._head | {"choices": [choice]}

    def _said(self, logprobs: Any) -> dict[str, Any] | None:
        return self._serving.names.chat(logprobs) if self._body.logprobs and logprobs else None
