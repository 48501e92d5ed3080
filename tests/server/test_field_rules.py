"""What becomes of each field of OpenAI's clients: the tables of `fields`, the schemas, and the server agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import CompletionCreateParams, chat, responses, shared_params
from openai.types.chat import chat_completion_content_part_image_param as chat_image
from openai.types.responses import response_input_item_param as item

from helpers.serving import Served, shared_server
from hf_paged.server import chat_schemas, fields, schemas
from hf_paged.server import responses as own
from hf_paged.server.fields import HONOURED, REFUSED, TABLES, Rule
from hf_paged.server.schemas import Body

ROOT = Path(__file__).parents[2]
TYPES: list[tuple[type[Body], tuple[Any, ...]]] = [  # ours, and OpenAI's
    (schemas.CompletionRequest, get_args(CompletionCreateParams)),
    (chat_schemas.ChatRequest, get_args(chat.CompletionCreateParams)),
    (own.ResponsesRequest, get_args(responses.ResponseCreateParams)),
    (schemas.StreamOptions, (chat.ChatCompletionStreamOptionsParam,)),
    (chat_schemas.Message, (chat.ChatCompletionAssistantMessageParam, chat.ChatCompletionUserMessageParam,
                            chat.ChatCompletionToolMessageParam)),
    (chat_schemas.ContentPart, (chat.ChatCompletionContentPartTextParam, chat.ChatCompletionContentPartImageParam,
                                responses.ResponseInputTextParam, responses.ResponseInputImageParam,
                                responses.ResponseOutputTextParam)),
    (chat_schemas.ImageUrl, (chat_image.ImageURL,)),
    (chat_schemas.ToolCall, (chat.ChatCompletionMessageFunctionToolCallParam,)),
    (chat_schemas.Tool, (chat.ChatCompletionFunctionToolParam,)),
    (chat_schemas.Function, (shared_params.FunctionDefinition,)),
    (schemas.JsonSchema, (shared_params.response_format_json_schema.JSONSchema,)),
    (own.TextOptions, (responses.ResponseTextConfigParam,)),
    (own.TextFormat, (responses.ResponseFormatTextJSONSchemaConfigParam,)),
    (own.Reasoning, (shared_params.Reasoning,)),
    (own.ResponseFunction, (responses.FunctionToolParam,)),
    (own.ChosenFunction, (responses.ToolChoiceFunctionParam,)),
    (own.InputMessage, (item.Message, responses.EasyInputMessageParam, responses.ResponseOutputMessageParam)),
    (own.InputCall, (responses.ResponseFunctionToolCallParam,)),
    (own.InputOutput, (item.FunctionCallOutput,)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "theirs"), TYPES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_of_openai_has_a_rule(kind: type[Body], theirs: tuple[Any, ...]) -> None:
    """Would break: a field that a newer client sends, and that has no rule."""
    named = {name for each in theirs for name in get_type_hints(each)}
    assert named <= {*kind.rules, *kind.names()}


def test_the_tables_are_those_of_the_schemas() -> None:
    for kind, _ in [*TYPES, (chat_schemas.TokenizeRequest, ()), (schemas.DetokenizeRequest, ())]:
        honoured = {name for name, rule in kind.rules.items() if rule.fate == HONOURED}
        assert honoured <= set(kind.names()) and not (set(kind.rules) - honoured) & set(kind.names())
        if kind.rules in [table for name, table in TABLES.items() if name.startswith("/")]:
            assert honoured == set(kind.names())


def test_the_page_is_that_of_the_tables() -> None:
    assert (ROOT / "docs/server_fields.md").read_text(encoding="utf-8") == fields.page(), "run `make server-fields`"


HI: Any = {"role": "user", "content": "Hi"}
FUNCTION: Any = {"name": "now", "parameters": {"type": "object", "properties": {}}}
CALL: Any = {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"}
CALLED: Any = {"name": "now", "arguments": "{}"}
SAID: Any = {"type": "output_text", "text": "Hi"}
WHOLE: dict[str, tuple[str, dict[str, Any], str]] = {  # where the fields of a table are: path, body, place
    "/v1/chat/completions": ("/v1/chat/completions", {"messages": [HI]}, ""),
    "/v1/completions": ("/v1/completions", {"prompt": "Hi"}, ""),
    "/v1/responses": ("/v1/responses", {"input": "Hi"}, ""),
    "`stream_options`": ("/v1/chat/completions", {"messages": [HI], "stream": True, "stream_options": {}},
                         "stream_options"),
    "`text` (`/v1/responses`)": ("/v1/responses", {"input": "Hi", "text": {}}, "text"),
    "`reasoning` (`/v1/responses`)": ("/v1/responses", {"input": "Hi", "reasoning": {}}, "reasoning"),
    "Messages of a chat": ("/v1/chat/completions", {"messages": [HI]}, "messages.0"),
    "Parts of a message's content": ("/v1/responses", {"input": [{"role": "assistant", "content": [SAID]}]},
                                     "input.0.content.0"),
    "Calls in a message's `tool_calls`": (
        "/v1/chat/completions",
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"id": "a", "function": CALLED}]}]},
        "messages.1.tool_calls.0.function",
    ),
    "Functions in `tools`": ("/v1/responses", {"input": "Hi", "tools": [FUNCTION | {"type": "function"}]}, "tools.0"),
    "Messages in `input` (`/v1/responses`)": ("/v1/responses", {"input": [HI]}, "input.0"),
    "Calls in `input` (`/v1/responses`)": ("/v1/responses", {"input": [HI, CALL]}, "input.1"),
    "Outputs of calls in `input` (`/v1/responses`)": (
        "/v1/responses", {"input": [CALL, {"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input.1"
    ),
}  # fmt: skip
OTHERS = [
    (name, field, rule)
    for name, table in TABLES.items()
    if not name.startswith("/v1/audio/")  # in test_audio.py, as forms
    for field, rule in table.items()
    if rule.fate != HONOURED or rule.values is not None
]

served = shared_server()


def _with(value: Any, place: list[str], field: str, given: Any) -> Any:
    """A body that has the field in that place."""
    if not place:
        return value | {field: given}
    key: Any = int(place[0]) if isinstance(value, list) else place[0]
    new = _with(value[key], place[1:], field, given)
    return value | {key: new} if isinstance(value, dict) else [*value[:key], new, *value[key + 1 :]]


@pytest.mark.parametrize(("name", "field", "rule"), OTHERS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_is_taken_or_not_supported(served: Served, name: str, field: str, rule: Rule) -> None:
    """Would break: a field without effect that is a 400, or that has one; one that is refused, and taken in silence."""
    path, body, place = WHOLE[name]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body |= {"temperature": 0, limit: 4}
    usage = served.post(path, body | {"stream": False, "stream_options": None}).json()["usage"]

    def ask(value: Any) -> Any:
        return served.post(path, _with(body, place.split(".") if place else [], field, value))

    for value in rule.values or () if rule.fate != HONOURED else ():
        assert ask(value).json()["usage"] == usage
    if rule.fate in (HONOURED, REFUSED):
        reply, where = ask("something"), f"{place}.{field}".lstrip(".")
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == where, error
        assert error["message"].startswith(f"{where}: not supported") and error["code"] == "not_supported"
    else:
        for value in ("something", True, ["a"], {"a": {"b": 5}}):
            reply = ask(value)
            assert reply.status_code == 200 and (body.get("stream") or reply.json()["usage"] == usage), reply.text
