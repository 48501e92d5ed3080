"""Each field that requests may have changes what comes of them; a field without a row here fails."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from helpers.models import tiny_tokenizer
from helpers.serving import Served, shared_server
from hf_paged.server import adapters, transcriptions
from hf_paged.server.schemas import Body, SamplingBody

# Shows all that a template is given.
TEMPLATE = """{% for message in messages %}{{ message | tojson }}{% endfor %}{{ tools | tojson }}
{{- thinks or '' }}{{ reasoning_effort or '' }}
{%- if add_generation_prompt %}assistant:{% endif %}"""
EOS = 2
HI: Any = [{"role": "user", "content": "Hi"}]
PICTURE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
NOW: Any = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
LATER: Any = {"name": "later"}
TOOLS: Any = [{"type": "function", "function": NOW}, {"type": "function", "function": LATER}]
OWN_TOOLS: Any = [{"type": "function"} | function for function in (NOW, LATER)]  # of /v1/responses
CALL: Any = {"id": "call7", "type": "function", "function": {"name": "now", "arguments": '{"when": 7}'}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {  # what is asked beside a field
    "CompletionRequest": ("/v1/completions", {"prompt": "The door", "max_tokens": 8, "seed": 5}),
    "ChatRequest": ("/v1/chat/completions", {"messages": HI, "max_tokens": 8, "seed": 5}),
    "ResponsesRequest": ("/v1/responses", {"input": "Hi", "max_output_tokens": 8, "temperature": 0}),
    "TokenizeRequest": ("/tokenize", {"messages": HI}),
    "DetokenizeRequest": ("/detokenize", {"tokens": [5, 6]}),
}


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        body: Its JSON; of a stream, the list of its events.
        status: Of HTTP.
        submitted: What the engine was asked for: prompts and arguments.
        logged: The line about it.
    """

    body: Any
    status: int = 200
    submitted: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    logged: dict[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> str:
        """The field that it was refused for."""
        error = self.body.get("error", {})
        return f"{error.get('param')} {error.get('message')}"

    @property
    def texts(self) -> list[str]:
        if "output" in self.body:
            return [item["content"][0]["text"] for item in self.body["output"] if item["type"] == "message"]
        return [c["text"] if "text" in c else c["message"]["content"] for c in self.body["choices"]]

    @property
    def choice(self) -> dict[str, Any]:
        return self.body["choices"][0]

    @property
    def num_tokens(self) -> int:
        return self.body["usage"]["completion_tokens"]

    @property
    def prompt(self) -> str:
        """As the engine got it."""
        return tiny_tokenizer().decode(self.submitted[0][0])

    def submits(self, **arguments: Any) -> bool:
        return arguments.items() <= self.submitted[0][1].items()


@dataclass
class Case:
    """One field.

    Attributes:
        given: The field, and where it lies.
        check: Whether it did what it should: of the answer with it, and of the one without.
        beside: What both requests have.
        path: The body that it is tried in.
    """

    given: dict[str, Any]
    check: Callable[[Answer, Answer], bool]
    beside: dict[str, Any] = field(default_factory=dict)
    path: str = "ChatRequest"


def refused(name: str) -> Callable[[Answer, Answer], bool]:
    return lambda a, b: name in a.refused


def said(text: str) -> Callable[[Answer, Answer], bool]:
    """The model is told of it."""
    return lambda a, b: text in a.prompt and text not in b.prompt


def other(a: Answer, b: Answer) -> bool:
    return a.texts != b.texts


def same(a: Answer, b: Answer) -> bool:
    return a.texts == b.texts


GREEDY = {"temperature": 0}
ENDING = {"logit_bias": {str(EOS): 100}}  # the first token is the end of text
CALLS = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 40}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "user", "content": "Lo"} | fields]}


def part(**fields: Any) -> dict[str, Any]:
    return message(content=[fields])


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": NOW | fields}]}


def schema(**fields: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["abc"]}} | fields}
    }


def form(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["abc"]}} | fields}}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def own_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function"} | NOW | fields]}


def called(**fields: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "call7", "name": "now", "arguments": "{}"}
    return {"input": [*HI, call | fields]}


def returned(**fields: Any) -> dict[str, Any]:
    output = {"type": "function_call_output", "call_id": "call7", "output": "rain"}
    return {"input": [*called()["input"], output | fields]}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL | fields]}]}


SAMPLING: dict[str, Case] = {  # in completions and in chats
    "model": Case({"model": "other"}, refused("model")),
    "stream": Case({"stream": True}, lambda a, b: "".join(
        c["text"] if "text" in c else c["delta"].get("content", "") for event in a.body for c in event["choices"]
    ) == b.texts[0]),
    "stream_options": Case({"stream_options": {"include_usage": True}},
                           lambda a, b: a.body[-1]["usage"]["completion_tokens"] == 8, {"stream": True}),
    "temperature": Case(GREEDY, lambda a, b: other(a, b) and a.submits(do_sample=False)),
    "top_p": Case({"top_p": 1e-6}, lambda a, b: other(a, b)),
    "n": Case({"n": 3}, lambda a, b: len(set(a.texts)) == 3),
    "seed": Case({"seed": 6}, other),
    "stop": Case({"stop": ["e", "a", "o", "i"]}, lambda a, b: b.texts[0].startswith(a.texts[0]) and other(a, b)),
    "presence_penalty": Case({"presence_penalty": 2.0}, other, GREEDY | {"max_tokens": 40}),
    "frequency_penalty": Case({"frequency_penalty": 2.0}, other, GREEDY | {"max_tokens": 40}),
    "logit_bias": Case(ENDING, lambda a, b: a.texts == [""] and a.choice["finish_reason"] == "stop"),
    "user": Case({"user": "me"}, lambda a, b: a.logged["user"] == "me" and b.logged["user"] is None),
    "response_format": Case({"response_format": {"type": "json_object"}}, lambda a, b: a.texts[0].lstrip()[0] == "{"),
    "top_k": Case({"top_k": 1}, other),
    "min_p": Case({"min_p": 1.0}, other),
    "repetition_penalty": Case({"repetition_penalty": 5.0}, other, GREEDY | {"max_tokens": 40}),
    "min_tokens": Case({"min_tokens": 5}, lambda a, b: a.num_tokens >= 5 > b.num_tokens, ENDING),
    "ignore_eos": Case({"ignore_eos": True}, lambda a, b: a.num_tokens == 8 > b.num_tokens, ENDING),
    "stop_token_ids": Case({"stop_token_ids": [261]}, lambda a, b: a.num_tokens == 1 and b.num_tokens == 8,
                           {"logit_bias": {"261": 100}}),
    "num_beams": Case({"num_beams": 3}, lambda a, b: a.submits(num_beams=3) and other(a, b)),
    "length_penalty": Case({"length_penalty": -2.0}, lambda a, b: a.submits(length_penalty=-2.0), {"num_beams": 2}),
    "priority": Case({"priority": 3}, lambda a, b: a.submits(priority=3) and b.submits(priority=0)),
    "cache_salt": Case({"cache_salt": "a"}, lambda a, b: a.submits(cache_salt="a") and b.submits(cache_salt=None)),
    "skip_special_tokens": Case({"skip_special_tokens": False}, lambda a, b: "</s>" in a.texts[0] and b.texts == [""],
                                ENDING | {"ignore_eos": True}),
    "structured_outputs": Case(structured(choice=["yes"]), lambda a, b: a.texts == ["yes"]),
    "prompt_logprobs": Case({"prompt_logprobs": 1}, lambda a, b: "prompt_logprobs" in str(a.body)
                            and "prompt_logprobs" not in str(b.body)),
}  # fmt: skip

CASES: dict[str, Case] = {
    **{f"{name}.{each}": Case(case.given, case.check, case.beside, name)
       for name in ("CompletionRequest", "ChatRequest") for each, case in SAMPLING.items()},
    "CompletionRequest.prompt": Case({"prompt": "The sea"}, said("The sea")),
    "CompletionRequest.max_tokens": Case({"max_tokens": 3}, lambda a, b: a.num_tokens == 3),
    "CompletionRequest.best_of": Case({"best_of": 4}, lambda a, b: a.num_tokens == 32 and len(a.texts) == 1),
    "CompletionRequest.echo": Case({"echo": True}, lambda a, b: a.texts[0] == "The door" + b.texts[0]),
    "CompletionRequest.logprobs": Case({"logprobs": 1}, lambda a, b: len(a.choice["logprobs"]["tokens"]) == 8),
    "ChatRequest.messages": Case(message(), said("Lo")),
    "ChatRequest.max_tokens": Case({"max_tokens": 3}, lambda a, b: a.num_tokens == 3),
    "ChatRequest.max_completion_tokens": Case({"max_completion_tokens": 3}, lambda a, b: a.num_tokens == 3,
                                              {"max_tokens": None}),
    "ChatRequest.logprobs": Case({"logprobs": True}, lambda a, b: len(a.choice["logprobs"]["content"]) == 8),
    "ChatRequest.top_logprobs": Case({"top_logprobs": 2}, lambda a, b:
                                     len(a.choice["logprobs"]["content"][0]["top_logprobs"]) == 2, {"logprobs": True}),
    "ChatRequest.add_generation_prompt": Case({"add_generation_prompt": False}, lambda a, b:
                                              a.prompt + "assistant:" == b.prompt),
    "ChatRequest.tools": Case({"tools": TOOLS}, said("later")),
    "ChatRequest.tool_choice": Case({"tool_choice": "none"}, lambda a, b: said("later")(b, a), {"tools": TOOLS}),
    "ChatRequest.parallel_tool_calls": Case(
        {"parallel_tool_calls": False}, lambda a, b: len(a.choice["message"]["tool_calls"]) == 1
        < len(b.choice["message"]["tool_calls"]), CALLS | {"tools": TOOLS[:1], "max_tokens": 90}),
    "ChatRequest.chat_template_kwargs": Case({"chat_template_kwargs": {"thinks": "bees"}}, said("bees")),
    "ChatRequest.reasoning_effort": Case({"reasoning_effort": "high"}, said("high")),
    "StreamOptions.include_usage": Case({"stream_options": {"include_usage": False}}, lambda a, b:
                                        "usage" not in a.body[-1], {"stream": True}),
    "StreamOptions.continuous_usage_stats": Case({"stream_options": {"continuous_usage_stats": True}}, lambda a, b:
                                                 "usage" in a.body[1] and "usage" not in b.body[1], {"stream": True}),
    "ResponseFormat.type": Case({"response_format": {"type": "text"}}, same),
    "ResponseFormat.json_schema": Case(schema(), lambda a, b: a.texts == ['"abc"']),
    "JsonSchema.name": Case(schema(name="a" * 65), refused("json_schema.name")),
    "JsonSchema.schema_": Case(schema(schema={"const": 7}), lambda a, b: a.texts == ["7"]),
    "JsonSchema.description": Case(schema(description="A text"), same, schema()),
    "JsonSchema.strict": Case(schema(strict=False), same, schema()),
    "StructuredOutputs.json_": Case(structured(json={"const": 7}), lambda a, b: a.texts == ["7"]),
    "StructuredOutputs.regex": Case(structured(regex="7{3}"), lambda a, b: a.texts == ["777"]),
    "StructuredOutputs.grammar": Case(structured(grammar='start: "no"'), lambda a, b: a.texts == ["no"]),
    "StructuredOutputs.choice": Case(structured(choice=["yes"]), lambda a, b: a.texts == ["yes"]),
    "Message.role": Case(message(role="system"), said("system")),
    "Message.content": Case(message(content="bees"), said("bees")),
    "Message.name": Case(message(name="Ann"), said("Ann")),
    "Message.tool_calls": Case(assistant(), said("when")),
    "Message.tool_call_id": Case(message(role="tool", tool_call_id="call7"), said("call7")),
    "ContentPart.type": Case(part(type="sound", text="Lo"), refused("messages.1.content")),
    "ContentPart.text": Case(part(type="text", text="bees"), said("bees")),
    "ContentPart.image_url": Case(message(content=[PICTURE]), refused("messages.1.content.0.image_url")),
    "ContentPart.detail": Case(part(type="text", text="a", detail="auto"), refused("detail")),
    "ImageUrl.url": Case(part(type="image_url", image_url={"url": 5}), refused("image_url")),
    "ImageUrl.detail": Case(part(type="image_url", image_url={"url": "a", "detail": "low"}), refused("detail")),
    "ToolCall.id": Case(assistant(id="call8"), said("call8")),
    "ToolCall.type": Case(assistant(type="code"), refused("messages.1.tool_calls.0.type")),
    "ToolCall.function": Case(assistant(function={"name": "now", "arguments": "7"}),
                              lambda a, b: said("when")(b, a), assistant()),
    "FunctionCall.name": Case(assistant(function={"name": "soon", "arguments": "{}"}), said("soon")),
    "FunctionCall.arguments": Case(assistant(function={"name": "now", "arguments": '{"y": 77}'}), said("77")),
    "Tool.type": Case({"tools": [{"type": "code", "function": NOW}]}, refused("tools.0.type")),
    "Tool.function": Case(tool(), said("now")),
    "Function.name": Case(tool(name="soon"), said("soon")),
    "Function.description": Case(tool(description="bees"), said("bees")),
    "Function.parameters": Case(tool(parameters={"type": "object", "title": "bees"}), said("bees")),
    "Function.strict": Case(tool(strict=True), same, tool()),
    "ToolChoice.type": Case({"tool_choice": {"type": "code", "function": LATER}}, refused("tool_choice"), CALLS),
    "ToolChoice.function": Case({"tool_choice": {"type": "function", "function": {"name": "now"}}}, lambda a, b:
                                all(c["function"]["name"] == "now" for c in a.choice["message"]["tool_calls"]), CALLS),
    "FunctionName.name": Case({"tool_choice": {"type": "function", "function": {"name": "soon"}}},
                              refused("tool_choice"), CALLS),
}  # fmt: skip

OF_RESPONSES: dict[str, Case] = {
    "ResponsesRequest.model": Case({"model": "other"}, refused("model")),
    "ResponsesRequest.input": Case({"input": "Lo"}, said("Lo")),
    "ResponsesRequest.instructions": Case({"instructions": "Be brief"}, said("Be brief")),
    "ResponsesRequest.max_output_tokens": Case(
        {"max_output_tokens": 3}, lambda a, b: a.body["usage"]["output_tokens"] == 3
    ),
    "ResponsesRequest.temperature": Case({"temperature": 2.0}, lambda a, b: a.submits(do_sample=True)),
    "ResponsesRequest.top_p": Case({"top_p": 0.5}, lambda a, b: a.submits(top_p=0.5), {"temperature": 1.0}),
    "ResponsesRequest.stream": Case(
        {"stream": True}, lambda a, b: "".join(e.get("delta", "") for e in a.body) == b.texts[0]
    ),
    "ResponsesRequest.text": Case(form(), lambda a, b: a.texts == ['"abc"']),
    "ResponsesRequest.metadata": Case({"metadata": {"a": "b"}}, lambda a, b: a.body["metadata"] == {"a": "b"}),
    "ResponsesRequest.ignore_eos": Case(
        {"ignore_eos": True}, lambda a, b: a.submits(eos_token_id=[2048]) and b.submits(eos_token_id=[EOS])
    ),
    "ResponsesRequest.user": Case({"user": "me"}, lambda a, b: a.logged["user"] == a.body["user"] == "me"),
    "ResponsesRequest.truncation": Case({"truncation": "auto"}, lambda a, b: a.body["truncation"] == "auto"),
    "ResponsesRequest.tools": Case({"tools": OWN_TOOLS}, said("later")),
    "ResponsesRequest.tool_choice": Case(
        {"tool_choice": "none"}, lambda a, b: said("later")(b, a), {"tools": OWN_TOOLS}
    ),
    "ResponsesRequest.parallel_tool_calls": Case(
        {"parallel_tool_calls": False}, lambda a, b: len(a.body["output"]) == 1 < len(b.body["output"]),
        {"tools": OWN_TOOLS[:1], "tool_choice": "required", "max_output_tokens": 90},
    ),
    "ResponsesRequest.reasoning": Case({"reasoning": {"effort": "high"}}, said("high")),
    "Reasoning.effort": Case({"reasoning": {"effort": "low"}}, said("low")),
    "ResponsesRequest.chat_template_kwargs": Case({"chat_template_kwargs": {"thinks": "bees"}}, said("bees")),
    "ResponseFunction.type": Case(own_tool(type="web_search"), refused("tools.0.type: not supported")),
    "ResponseFunction.name": Case(own_tool(name="soon"), said("soon")),
    "ResponseFunction.description": Case(own_tool(description="bees"), said("bees")),
    "ResponseFunction.parameters": Case(own_tool(parameters={"type": "object", "title": "bees"}), said("bees")),
    "ResponseFunction.strict": Case(own_tool(strict=True), lambda a, b: a.body["tools"][0]["strict"]),
    "ChosenFunction.type": Case({"tool_choice": {"type": "mcp"}}, refused("tool_choice.type: not supported")),
    "ChosenFunction.name": Case(
        {"tool_choice": {"type": "function", "name": "now"}}, lambda a, b: a.body["output"][0]["name"] == "now",
        {"tools": OWN_TOOLS, "max_output_tokens": 40},
    ),
    "InputCall.type": Case({"input": [{"type": "mcp_call"}]}, refused("input.0.type: not supported")),
    "InputCall.call_id": Case(called(), said("call7")),
    "InputCall.name": Case(called(name="soon"), said("soon")),
    "InputCall.arguments": Case(called(arguments='{"y": 77}'), said("77")),
    "InputOutput.type": Case({"input": [{"type": "computer_call_output"}]}, refused("input.0.type: not supported")),
    "InputOutput.call_id": Case(returned(call_id="call8"), said("call8")),
    "InputOutput.output": Case(returned(output=[{"type": "input_text", "text": "bees"}]), said("bees")),
    "InputMessage.type": Case({"input": [{"type": "call"} | HI[0]]}, refused("input.0.type: not supported")),
    "InputMessage.role": Case({"input": [{"role": "system", "content": "Hi"}]}, said("system")),
    "InputMessage.content": Case({"input": [{"role": "user", "content": "bees"}]}, said("bees")),
    "TextOptions.format": Case(form(), lambda a, b: a.texts == ['"abc"']),
    "TextFormat.type": Case({"text": {"format": {"type": "json_object"}}}, lambda a, b: a.texts[0].lstrip()[0] == "{"),
    "TextFormat.name": Case(form(name="b"), lambda a, b: a.body["text"]["format"]["name"] == "b"),
    "TextFormat.schema_": Case(form(schema={"const": 7}), lambda a, b: a.texts == ["7"]),
    "TextFormat.description": Case(form(description="A"), lambda a, b: a.body["text"]["format"]["description"] == "A"),
    "TextFormat.strict": Case(form(strict=False), same, form()),
}  # fmt: skip
OF_TOKENS: dict[str, Case] = {
    "TokenizeRequest.model": Case({"model": "other"}, refused("model")),
    "TokenizeRequest.prompt": Case(
        {"prompt": "Hi", "messages": None}, lambda a, b: a.body["tokens"] == tiny_tokenizer()("Hi")["input_ids"]
    ),
    "TokenizeRequest.messages": Case(message(), lambda a, b: a.body["count"] > b.body["count"]),
    "TokenizeRequest.add_special_tokens": Case(
        {"add_special_tokens": False}, lambda a, b: [1, *a.body["tokens"]] == b.body["tokens"],
        {"prompt": "Hi", "messages": None},
    ),
    "TokenizeRequest.add_generation_prompt": Case(
        {"add_generation_prompt": False}, lambda a, b: a.body["count"] < b.body["count"]
    ),
    "DetokenizeRequest.model": Case({"model": "other"}, refused("model")),
    "DetokenizeRequest.tokens": Case(
        {"tokens": [363, 1056]}, lambda a, b: a.body["prompt"] == tiny_tokenizer().decode([363, 1056])
    ),
}  # fmt: skip
EVERY = CASES | OF_RESPONSES | OF_TOKENS


def bodies(kind: type[Body]) -> Iterator[type[Body]]:
    """All that a request or a part of one may be."""
    for each in kind.__subclasses__():
        if each is not SamplingBody:
            yield each
        yield from bodies(each)


def test_every_field_is_here() -> None:
    """Would break: a field that is added to a body, and to no test. Adapters and sounds have files of their own."""
    others = adapters.__name__, transcriptions.__name__
    kinds = [kind for kind in bodies(Body) if kind.__module__ not in others]
    assert {f"{kind.__name__}.{name}" for kind in kinds for name in kind.model_fields} == set(EVERY)


served = shared_server(chat_template=TEMPLATE, allow_priority=True)


class Asking:
    """Asks a server, and looks at what it does."""

    def __init__(self, served: Served, patch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture) -> None:
        self._served, self._logged = served, logged
        self._submitted: list[tuple[list[int], dict[str, Any]]] = []
        logged.set_level(logging.INFO, "hf_paged.server.requests")
        submit = served.engine.submit

        def note(token_ids: Any, *given: Any, **arguments: Any) -> Any:
            self._submitted.append((token_ids, arguments))
            return submit(token_ids, *given, **arguments)

        patch.setattr(served.engine, "submit", note)

    def __call__(self, path: str, body: dict[str, Any]) -> Answer:
        self._submitted.clear()
        self._logged.clear()
        reply = self._served.post(path, body)
        assert reply.status_code < 500, reply.text
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
        is_stream = reply.headers["content-type"].startswith("text/event-stream")
        found = [json.loads(line) for line in lines] if is_stream else reply.json()
        logged = [json.loads(record.getMessage()) for record in self._logged.records if "requests" in record.name]
        return Answer(found, reply.status_code, list(self._submitted), logged[-1] if logged else {})


@pytest.mark.parametrize("name", EVERY)
def test_a_field_is_honoured(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would break: a field that is taken and does nothing, or that does what another one should."""
    case = EVERY[name]
    kind = name.split(".")[0]
    if kind not in BODIES:
        kind = "ResponsesRequest" if name in OF_RESPONSES else "ChatRequest"
    path, body = BODIES[kind]
    ask = Asking(served, monkeypatch, caplog)
    without = ask(path, body | case.beside)
    assert without.status == 200, without.body
    with_it = ask(path, body | case.beside | case.given)
    assert case.check(with_it, without), (with_it, without)
