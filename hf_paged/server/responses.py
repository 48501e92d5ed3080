"""`/v1/responses`: texts in the newer of OpenAI's shapes. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BeforeValidator, Field, model_validator

from hf_paged.server.errors import ApiError
from hf_paged.server.generation import Generation
from hf_paged.server.replies import event
from hf_paged.server.schemas import MAX_MESSAGES, Body, ChatRequest, ContentPart, Many, Some, Temperature, not_many
from hf_paged.server.serving import Serving

PATH = "/v1/responses"
# What a chat's fields are called here.
OWN_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}


class InputMessage(Body):
    """One message of the input."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Some[ContentPart]


class TextFormat(Body):
    """What the text is to be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool = True

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError("schema: with type json_schema, and only there")
        return self

    def as_given(self) -> dict[str, Any]:
        """As an answer repeats it: `strict` is of a schema."""
        exclude = set() if self.type == "json_schema" else {"strict"}
        return self.model_dump(exclude_none=True, by_alias=True, exclude=exclude)


class TextOptions(Body):
    """What the text is to look like."""

    format: TextFormat = TextFormat.model_validate({})


class ResponsesRequest(Body):
    """The body of `/v1/responses`."""

    model: str | None = None
    input: str | Annotated[Many[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    stream: bool = False
    text: TextOptions = TextOptions()
    metadata: Annotated[dict[str, str], BeforeValidator(not_many), Field(max_length=16)] = Field(default_factory=dict)
    user: str | None = Field(None, max_length=512)
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"

    def as_chat(self) -> ChatRequest:
        """The same as a chat."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [each.model_dump(exclude_none=True, exclude={"type"}) for each in self.input]
        wanted = self.text.format
        own: dict[str, Any] = {"type": wanted.type}
        if wanted.type == "json_schema":
            own["json_schema"] = {"name": wanted.name or "text", "schema": wanted.schema_}
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "stream": self.stream,
                "user": self.user,
                "response_format": own,
            }
        )


async def create(serving: Serving, request: Request) -> Any:
    body = await serving.body(request, ResponsesRequest)
    chat = body.as_chat()
    try:
        generation = await serving.start(request, chat, lambda: [serving.prompts.of_chat(chat.messages)])
        return await serving.reply(request, chat, generation, _Answer(serving, body, chat, generation))
    except ApiError as error:
        raise _in_own_names(error, body) from None


def _in_own_names(error: ApiError, body: ResponsesRequest) -> ApiError:
    """What is said of a field of the chat, said of the body's."""
    if error.param is None:
        return error
    first, *rest = error.param.split(".")
    if first == "messages" and rest:  # a picture's place, behind the instructions
        rest = [str(int(rest[0]) - (body.instructions is not None)), *rest[1:]]
    if first not in OWN_NAMES:
        return error
    rest = [each for each in rest if each != "json_schema"]
    param = ".".join([OWN_NAMES[first], *rest])
    return ApiError(error.status, error.message.replace(error.param, param, 1), param, error.code)


class _Answer:
    def __init__(self, serving: Serving, body: ResponsesRequest, chat: ChatRequest, generation: Generation) -> None:
        self._serving = serving
        self._body = body
        self._chat = chat
        self._generation = generation
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._number = -1

    def whole(self) -> dict[str, Any]:
        is_cut = self._generation.texts[0].finish_reason == "length"
        usage = self._generation.usage
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item("incomplete" if is_cut else "completed")],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": body.model or self._serving.model_name,
            "output": [],
            "parallel_tool_calls": False,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.text.format.as_given()},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
        }

    def _item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self._generation.texts[0].text)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    async def events(self) -> AsyncIterator[bytes]:
        started = self._response("in_progress")
        yield self._event("response.created", response=started) + self._event("response.in_progress", response=started)
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
        place = {"output_index": 0, "content_index": 0, "item_id": self._item_id}
        yield self._event("response.content_part.added", **place, part=self._part(""))
        try:
            async for deltas in self._generation.updates():
                for delta in deltas:
                    if delta.text:
                        yield self._event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
        except ApiError as error:
            raise _in_own_names(error, self._body) from None
        whole, text = self.whole(), self._generation.texts[0].text
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=self._part(text))
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        self._serving.note_end(self._chat, self._generation)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **data}, kind)
