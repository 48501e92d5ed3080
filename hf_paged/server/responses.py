"""`/v1/responses`: texts and calls of functions in the newer of OpenAI's shapes. Nothing is stored."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from hf_paged.server import chat, fields
from hf_paged.server.chat_schemas import MAX_MESSAGES, ChatRequest, ContentPart, Effort, Function, TemplateKwargs
from hf_paged.server.errors import ApiError, invalid_body
from hf_paged.server.generation import Generation
from hf_paged.server.replies import event
from hf_paged.server.schemas import Body, Many, Some, Temperature, not_many
from hf_paged.server.serving import Serving
from hf_paged.server.tools import Piece, parser_of, read

PATH = "/v1/responses"
# What a chat's fields are called here.
OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}
Event = tuple[str, dict[str, Any]]  # its kind, and its data


class InputMessage(Body):
    """One message of the input."""

    rules = fields.INPUT_MESSAGE
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Some[ContentPart]


class InputCall(Body):
    """A call of a function that the model has made."""

    rules = fields.INPUT_CALL
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputOutput(Body):
    """The result of a function."""

    rules = fields.INPUT_OUTPUT
    type: Literal["function_call_output"]
    call_id: str
    output: str | Some[ContentPart]


def _kind(item: Any) -> str:
    """Which of the three it is; a message says what is wrong with others."""
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if kind in ("function_call", "function_call_output") else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class TextFormat(Body):
    """The format that the text is to have."""

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
    """Settings of the text."""

    rules = fields.TEXT
    format: TextFormat = TextFormat.model_validate({})


class Reasoning(Body):
    """How the model is to reason."""

    rules = fields.REASONING
    effort: Effort | None = None


class ResponseFunction(Function):
    """A function, without the shell that a chat has around it."""

    rules = fields.RESPONSE_FUNCTION
    type: str


class ChosenFunction(Body):
    """The function that is to be called."""

    rules = fields.TOOL
    type: str
    name: str


class ResponsesRequest(Body):
    """The body of `/v1/responses`."""

    rules = fields.RESPONSE
    model: str | None = None
    input: str | Annotated[Many[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    stream: bool = False
    text: TextOptions = TextOptions()
    tools: Many[ResponseFunction] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    metadata: Annotated[dict[str, str], BeforeValidator(not_many), Field(max_length=16)] = Field(default_factory=dict)
    ignore_eos: bool = False
    user: str | None = Field(None, max_length=512)
    truncation: Literal["auto", "disabled"] = "disabled"


class _AsChat:
    """A request as a chat.

    Attributes:
        body: The chat.
    """

    def __init__(self, given: ResponsesRequest) -> None:
        """May raise `ApiError`: fields that don't go together."""
        self._given = given
        self._places = dict(OWN_NAMES)  # in the request, by those in the chat
        self._messages: list[dict[str, Any]] = []
        if given.instructions is not None:
            self._add("instructions", role="system", content=given.instructions)
        if isinstance(given.input, str):
            self._add("input", role="user", content=given.input)
        else:
            for number, item in enumerate(given.input):
                self._add_item(f"input.{number}", item)
        wanted, choice = given.text.format, given.tool_choice
        form: dict[str, Any] = {"type": wanted.type}
        if wanted.type == "json_schema":
            form["json_schema"] = {"name": wanted.name or "text", "schema": wanted.schema_}
        self._places |= {f"tools.{number}.function": f"tools.{number}" for number in range(len(given.tools))}
        as_chat = {
            **{
                name: getattr(given, name) for name in ("model", "temperature", "top_p", "stream", "ignore_eos", "user")
            },
            "messages": self._messages,
            "max_completion_tokens": given.max_output_tokens,
            "response_format": form,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in given.tools
            ],
            "tool_choice": choice
            if isinstance(choice, str)
            else {"type": "function", "function": {"name": choice.name}},
            "parallel_tool_calls": given.parallel_tool_calls,
            "reasoning_effort": given.reasoning.effort,
            "chat_template_kwargs": given.chat_template_kwargs,
        }
        try:
            self.body = ChatRequest.model_validate(as_chat)
        except ValidationError as error:
            raise self.renamed(invalid_body(error, json.dumps(as_chat).encode())) from None

    def renamed(self, error: ApiError) -> ApiError:
        """What is said of a field of the chat, said of the request's."""
        is_too_long = error.code == "context_length_exceeded" and error.param in (None, "messages")
        if is_too_long and self._given.truncation == "auto":
            message = f"truncation: not supported where something would have to be left out: {error.message}"
            return ApiError(error.status, message, "truncation", error.code)
        parts = (error.param or "").split(".")
        for end in range(len(parts), 0, -1):
            own = self._places.get(".".join(parts[:end]))
            if own is not None:
                param = ".".join([own, *parts[end:]])
                return ApiError(error.status, error.message.replace(error.param or "", param, 1), param, error.code)
        return error

    def _add(self, place: str, **message: Any) -> None:
        self._places[f"messages.{len(self._messages)}"] = place
        self._messages.append(message)

    def _add_item(self, place: str, item: InputMessage | InputCall | InputOutput) -> None:
        if isinstance(item, InputMessage):
            self._add(place, **item.model_dump(exclude_none=True, exclude={"type"}))
        elif isinstance(item, InputOutput):
            self._places[f"messages.{len(self._messages)}.content"] = f"{place}.output"
            output = item.model_dump(exclude_none=True)["output"]
            self._add(place, role="tool", tool_call_id=item.call_id, content=output)
        else:
            if not self._messages or self._messages[-1]["role"] != "assistant":
                self._add(place, role="assistant")
            calls = self._messages[-1].setdefault("tool_calls", [])
            self._places[f"messages.{len(self._messages) - 1}.tool_calls.{len(calls)}.function"] = place
            function = {"name": item.name, "arguments": item.arguments}
            calls.append({"id": item.call_id, "type": "function", "function": function})


async def create(serving: Serving, request: Request) -> Any:
    """Texts and calls of functions, as items."""
    given = await serving.body(request, ResponsesRequest)
    asked = _AsChat(given)
    try:
        generation = await chat.start(serving, request, asked.body)
        return await serving.reply(request, asked.body, generation, _Answer(serving, given, asked, generation))
    except ApiError as error:
        raise asked.renamed(error) from None


class _Items:
    """The items of an output, and the events about them, made of the pieces of a message as they come.

    Attributes:
        done: The items; the last one is there when it has ended.
    """

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._parts: list[str] = []  # of the open item's text or arguments

    def feed(self, piece: Piece) -> Iterator[Event]:
        if content := piece.get("content"):
            if self._open is None or self._open["type"] != "message":
                yield from self._begin_message()
            self._parts.append(content)
            yield "output_text.delta", {**self._place, "content_index": 0, "delta": content, "logprobs": []}
        for call in piece.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                item = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                yield from self._begin({"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", **item})
            if function["arguments"]:
                self._parts.append(function["arguments"])
                yield "function_call_arguments.delta", {**self._place, "delta": function["arguments"]}

    def end(self, is_cut: bool, is_cut_in_call: bool) -> Iterator[Event]:
        """The end of the message, which may be where a limit cut it: in its text, or in the midst of a call."""
        if self._open is None:
            yield from self._begin_message()
        is_call = self._open is not None and self._open["type"] == "function_call"
        yield from self._end_item("incomplete" if is_cut and (is_cut_in_call or not is_call) else "completed")

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"output_index": len(self.done), "item_id": self._open["id"]}

    def _begin_message(self) -> Iterator[Event]:
        item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        yield from self._begin(item)
        yield "content_part.added", {**self._place, "content_index": 0, "part": _part("")}

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._end_item("completed")
        self._open = item
        yield "output_item.added", {"output_index": len(self.done), "item": item | {"status": "in_progress"}}

    def _end_item(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item, text, place = self._open, "".join(self._parts), self._place
        if item["type"] == "message":
            part = _part(text)
            yield "output_text.done", {**place, "content_index": 0, "text": text, "logprobs": []}
            yield "content_part.done", {**place, "content_index": 0, "part": part}
            item = item | {"content": [part], "status": status}
        else:
            yield "function_call_arguments.done", {**place, "name": item["name"], "arguments": text}
            item = item | {"arguments": text, "status": status}
        yield "output_item.done", {"output_index": len(self.done), "item": item}
        self.done.append(item)
        self._open = None
        self._parts.clear()


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


class _Answer:
    def __init__(self, serving: Serving, given: ResponsesRequest, asked: _AsChat, generation: Generation) -> None:
        self._serving = serving
        self._given = given
        self._asked = asked
        self._generation = generation
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._number = -1
        self._parser = parser_of(asked.body, serving.tokenizer)
        self._items = _Items()

    def whole(self) -> dict[str, Any]:
        for piece in read(self._parser, self._generation.texts[0].text):
            for _ in self._items.feed(piece):
                pass
        for _ in self._end():
            pass
        return self._result()

    @property
    def _is_cut(self) -> bool:
        return self._generation.texts[0].finish_reason == "length"

    def _end(self) -> Iterator[Event]:
        return self._items.end(self._is_cut, self._parser.is_cut)

    def _result(self) -> dict[str, Any]:
        usage = self._generation.usage
        return self._response("incomplete" if self._is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "output": self._items.done,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        given = self._given
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata,
            "model": given.model or self._serving.model_name,
            "output": [],
            "parallel_tool_calls": given.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": given.reasoning.effort, "summary": None},
            "store": False,
            "temperature": given.temperature,
            "text": {"format": given.text.format.as_given()},
            "tool_choice": given.tool_choice if isinstance(given.tool_choice, str) else given.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in given.tools],
            "top_p": given.top_p,
            "truncation": given.truncation,
            "usage": None,
            "user": given.user,
        }

    async def events(self) -> AsyncIterator[bytes]:
        started = self._response("in_progress")
        yield self._event("created", {"response": started}) + self._event("in_progress", {"response": started})
        try:
            async for deltas in self._generation.updates():
                for delta in deltas:
                    for piece in self._parser.feed(delta.text):
                        for kind, data in self._items.feed(piece):
                            yield self._event(kind, data)
        except ApiError as error:
            raise self._asked.renamed(error) from None
        for piece in self._parser.end():
            for kind, data in self._items.feed(piece):
                yield self._event(kind, data)
        for kind, data in self._end():
            yield self._event(kind, data)
        self._serving.note_end(self._asked.body, self._generation)
        result = self._result()
        yield self._event(result["status"], {"response": result})

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        self._number += 1
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": self._number, **data}, kind)
