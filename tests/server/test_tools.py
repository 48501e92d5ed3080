"""Calls of functions, and `/v1/responses`."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
from openai.types.responses import Response

from helpers.models import tiny_tokenizer
from helpers.serving import Served, shared_server
from hf_paged import GrammarCompiler
from hf_paged.server.chat_schemas import ChatRequest
from hf_paged.server.responses import _Items
from hf_paged.server.text import StopStrings
from hf_paged.server.tools import _ForcedCalls, grammar_of, message_of, parser_of, read

MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {
    "name": "weather",
    "description": "Of a town",
    "parameters": {
        "type": "object",
        "properties": {
            "town": {"enum": ["Rome", 'a "}" {\\']},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["town", "days"],  # and no others, though additionalProperties isn't there
    },
}
EMPTY = {"name": "now"}
TOOLS: Any = [{"type": "function", "function": WEATHER}, {"type": "function", "function": EMPTY}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


DEEP, HALF = "[" * 5000, r'{"name": "a", "arguments": {"b": "\ud800"}}'  # what Python's own parser fails on, or takes

served = shared_server()


def is_whole(calls: list[Any]) -> bool:
    """Whether the last one's arguments were not cut."""
    try:
        return isinstance(json.loads(calls[-1].function.arguments), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("limit", [{"max_tokens": 25}, {"max_tokens": 90, "stop": ["days"]}], ids=["limit", "stop"])
def test_a_call_that_was_cut_is_no_call(served: Served, limit: dict[str, Any]) -> None:
    """Would break: a client that is told of calls reads half of one."""
    given: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS[:1], "tool_choice": NAMED, "seed": 2} | limit
    choice = served.client.chat.completions.create(**given).choices[0]
    chunks = list(served.client.chat.completions.create(**given, stream=True))
    assert not is_whole(choice.message.tool_calls or []), "it is whole"
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == ("stop" if "stop" in limit else "length")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_forced_calls(served: Served, choice: Any, is_parallel: bool) -> None:
    """Would break: arguments that aren't what the schema wants; pieces that aren't the whole."""
    given: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 2, "n": 3,
                  "parallel_tool_calls": is_parallel, "max_tokens": 90}  # fmt: skip
    reply = served.client.chat.completions.create(**given)
    arguments: dict[int, list[str]] = {}
    for chunk in served.client.chat.completions.create(**given, stream=True):
        for piece in chunk.choices:
            for call in piece.delta.tool_calls or ():
                own = arguments.setdefault(piece.index, [])
                own += [""] * (call.index + 1 - len(own))
                assert call.function is not None
                own[call.index] += call.function.arguments or ""
    num_ended = 0
    for each in reply.choices:
        calls = each.message.tool_calls or []
        assert each.message.content is None
        assert each.finish_reason == "length" or (each.finish_reason == "tool_calls" and is_whole(calls))
        assert arguments[each.index] == [call.function.arguments for call in calls if call.type == "function"]
        assert len(calls) == 1 or is_parallel
        for call in calls if is_whole(calls) else calls[:-1]:
            assert call.type == "function" and call.function.name in ("weather", "now")[: 1 if choice is NAMED else 2]
            found = json.loads(call.function.arguments)
            num_ended += 1
            if call.function.name == "weather":
                assert set(found) == {"town", "days"} and 1 <= found["days"] <= 9
            else:
                assert found == {}
    assert num_ended and (is_parallel or any(each.finish_reason == "tool_calls" for each in reply.choices))
    assert choice == "required" or all(len(each.message.tool_calls or []) == 1 for each in reply.choices)


def test_a_chat_that_goes_on_behind_calls(served: Served) -> None:
    given: Any = {"model": "tiny", "tools": TOOLS, "seed": 2, "max_tokens": 60}
    first = served.client.chat.completions.create(**given, messages=MESSAGES, tool_choice=NAMED).choices[0].message
    assert first.tool_calls
    answers: Any = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in first.tool_calls]
    again = served.client.chat.completions.create(**given, messages=[*MESSAGES, first, *answers])
    assert again.choices[0].message.content and again.choices[0].finish_reason in ("stop", "length")
    none = served.client.chat.completions.create(**given, messages=MESSAGES, tool_choice="none")
    assert none.choices[0].message.content


DEEP_CALL = {"type": "function_call", "call_id": "a", "name": "b", "arguments": "[" * 300 + "]" * 300}
BAD = {"type": "object", "required": 5}
SEEN = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
AUTO: Any = {"messages": MESSAGES, "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("No call, 1 < 2 <tool", "No call, 1 < 2 <tool", []),
        (f"Let me see. {CALL}\n{CALL}", "Let me see. ", ["weather", "weather"]),
        ("<tool_call>no JSON</tool_call>", "no JSON", []),
        (f"{CALL} and {CALL}", " and ", ["weather", "weather"]),
        ('<tool_call>{"name": "cut', '{"name": "cut', []),
        (f'{CALL}<tool_call>{{"name": "cut', '<tool_call>{"name": "cut', ["weather"]),
        (f"<tool_call>{DEEP}</tool_call>", DEEP, []),
        (f"<tool_call>{HALF}</tool_call>", HALF, []),
    ],
)
def test_tagged_calls(text: str, content: str, names: list[str], size: int, is_parallel: bool) -> None:
    """Would break: a part of a tag in the content; calls that depend on how the text came, or that are too many."""
    parser = parser_of(ChatRequest.model_validate(AUTO | {"parallel_tool_calls": is_parallel}), None)
    pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])] + parser.end()
    message = message_of(pieces)
    assert (message["content"] or "") == content
    calls = message.get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == (names if is_parallel else names[:1])
    assert all(json.loads(call["function"]["arguments"]) == {"town": "Rome"} for call in calls)
    assert parser.is_cut == (bool(calls) and text.endswith("cut")), "what a finish_reason depends on"


SAYING, NOT = CALL.replace('"Rome"', '"Rome", "days": 3'), CALL.replace('"Rome"', '"Oslo", "days": 3')
STRICT: Any = [{"type": "function", "function": WEATHER | {"strict": True}}, TOOLS[1]]
LOOSE = '<tool_call>{"name": "now", "arguments": {"any": [1]}}</tool_call>'
JSON: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"a": 1}}}}
ALLOWED: list[tuple[str, dict[str, Any], bool]] = [  # a text, beside what, and whether it may be generated
    ("Hm, 1 < 2 <tool", {}, True),
    ('{"a": 1}', {}, True),
    (f"Let me see. {SAYING}\n{LOOSE} so", {}, True),
    (f"Let me see. {NOT}", {}, False),
    ("<tool_call>\nno call", {}, False),
    ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', {}, False),
    (f"So: {SAYING}", {"parallel_tool_calls": False}, True),
    (f"{SAYING}\n{LOOSE}", {"parallel_tool_calls": False}, False),
    ('{"a": 1}', {"response_format": JSON}, True),
    (f"{SAYING}\n{LOOSE}", {"response_format": JSON}, True),
    ("Hm", {"response_format": JSON}, False),
    (f'{{"a": 1}}{SAYING}', {"response_format": JSON}, False),
    (f"{SAYING}\n{LOOSE}", {"response_format": JSON, "parallel_tool_calls": False}, False),
    (NOT, {"response_format": JSON, "tools": TOOLS}, True),
]


@cache
def grammars(has_tags: bool) -> tuple[Any, GrammarCompiler]:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    if has_tags:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer, GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


@pytest.mark.parametrize("has_tags", [False, True], ids=["", "tags_are_tokens"])
@pytest.mark.parametrize(("text", "beside", "is_allowed"), ALLOWED)
def test_what_the_grammar_of_strict_calls_allows(
    text: str, beside: dict[str, Any], is_allowed: bool, has_tags: bool
) -> None:
    """Would break: arguments that a schema forbids; a format that keeps a model from calling what it was given."""
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": STRICT} | beside)
    tokenizer, compiler = grammars(has_tags)
    (matcher,) = compiler.lark(grammar_of(body, tokenizer)).matchers(1)
    try:
        for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
            matcher.accept(token)
    except ValueError:
        assert not is_allowed
    else:
        assert is_allowed
    assert body.is_structured


def test_a_call_beside_a_format(served: Served) -> None:
    """Would break: a format that is enforced, and functions that are offered and can't be called."""
    first = tiny_tokenizer()("<tool_call>", add_special_tokens=False)["input_ids"][0]
    given: Any = {"model": "tiny", "messages": MESSAGES, "tools": STRICT[:1], "parallel_tool_calls": False,
                  "response_format": JSON, "temperature": 0, "max_tokens": 60}  # fmt: skip
    said = served.client.chat.completions.create(**given, logit_bias={str(first): -100}).choices[0]
    assert json.loads(said.message.content or "") == {"a": 1} and said.finish_reason == "stop"
    called = served.client.chat.completions.create(**given, logit_bias={str(first): 100}).choices[0]
    assert called.finish_reason == "tool_calls" and called.message.tool_calls
    (call,) = called.message.tool_calls
    assert call.type == "function" and set(json.loads(call.function.arguments)) == {"town", "days"}


@pytest.mark.parametrize("more", [{"required": ["a", "b"]}, {"allOf": [{"required": ["b"]}]}], ids=str)
def test_forced_calls_with_properties_that_are_said_elsewhere(served: Served, more: dict[str, Any]) -> None:
    """Would break: a valid function that is refused, since nothing but its `properties` is allowed."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}} | more
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 4}
    assert served.post("/v1/chat/completions", asked).status_code == 200


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_forced_calls_in_pieces(size: int) -> None:
    wanted = [("a", '{"x": "}]\\"{", "y": [1, {"z": {}}]}'), ("b", "{}"), ("c", '{ "u" : "\\\\" }')]
    text = "[" + ",".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in wanted) + "]"
    parser = _ForcedCalls()
    message = message_of([piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])])
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == wanted


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
         "tools.0.function.parameters"),
        *[({"tools": [{"type": "function", "function": {"name": "a", "parameters": BAD | more}}],
            "tool_choice": "required"}, "tools.0.function.parameters")
          for more in ({"properties": {}}, {"properties": [], "required": []}, {"properties": {}, "required": [[]]})],
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [TOOLS[1], {"type": "function", "function": WEATHER | {"parameters": BAD, "strict": True}}]},
         "tools.1.function.parameters"),
        ({"tools": [{"type": "function", "function": EMPTY | {"strict": True}}], "num_beams": 2}, "num_beams"),
        ({"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}},
         "response_format.json_schema.schema"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": "required", "num_beams": 2}, "num_beams"),
    ],
    ids=str,
)  # fmt: skip
def test_refused(served: Served, fields: dict[str, Any], name: str) -> None:
    reply = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5} | fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == name, reply.text
    if "tools" not in fields:
        assert "there are no tools" in reply.json()["error"]["message"]


def test_responses(served: Served) -> None:
    given: Any = {"model": "tiny", "input": "The king", "instructions": "Be brief.", "temperature": 0,
                  "max_output_tokens": 12, "metadata": {"a": "b"}}  # fmt: skip
    chat: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The king"}]
    expected = served.client.chat.completions.create(model="tiny", messages=chat, temperature=0, max_tokens=12)
    reply = served.client.responses.create(**given)
    Response.model_validate(reply.model_dump(), strict=True)
    assert reply.output_text == expected.choices[0].message.content and reply.status == "incomplete"
    assert reply.usage is not None and reply.usage.output_tokens == 12 and reply.metadata == {"a": "b"}
    assert reply.text is not None and reply.text.to_dict() == {"format": {"type": "text"}}
    events = list(served.client.responses.create(**given, stream=True))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == reply.output_text and len(deltas) > 3
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == reply.output_text
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "The king"}]}]
    assert served.client.responses.create(**given | {"input": parts}).output_text == reply.output_text
    schema = {"type": "json_schema", "name": "a", "schema": {"enum": ["x", "y"]}}
    formed = served.client.responses.create(model="tiny", input="a", text={"format": schema})  # type: ignore[arg-type]
    assert json.loads(formed.output_text) in ("x", "y") and formed.status == "completed"
    assert formed.text is not None and formed.text.to_dict() == {"format": schema | {"strict": True}}
    long: Any = {"format": schema | {"name": "a" * 65}}
    for field in ({"previous_response_id": "a"}, {"tools": TOOLS}, {"input": []}, {"text": long}):
        refused = served.post("/v1/responses", {"input": "a"} | field)
        assert refused.status_code == 400 and next(iter(field)) in refused.json()["error"]["message"]
    stored = served.client.responses.create(model="tiny", input="a", max_output_tokens=2, store=True)
    assert stored.model_extra == {"store": False}, "it says that it is stored"


OWN_TOOLS: Any = [{"type": "function", "strict": True} | function for function in (WEATHER, EMPTY)]
WANTED: dict[str, Any] = {
    "required": "required",
    "named": {"type": "function", "name": "now"},
    "one": {"tool_choice": "required", "parallel_tool_calls": False},
}


@pytest.mark.parametrize("name", WANTED)
def test_calls_in_responses(served: Served, name: str) -> None:
    """Whole, and as the client puts the events of a stream together; then with what the functions have returned."""
    choice: Any = WANTED[name] if name == "one" else {"tool_choice": WANTED[name]}
    given: Any = {"model": "tiny", "tools": OWN_TOOLS, "temperature": 0, "max_output_tokens": 120} | choice
    reply = served.client.responses.create(input="The weather?", **given)
    Response.model_validate(reply.model_dump(exclude={"store"}), strict=True)
    with served.client.responses.stream(input="The weather?", **given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if name != "required" else None
    calls = [item for item in reply.output if item.type == "function_call"]
    assert calls == reply.output and reply.output_text == ""
    assert (
        kinds.count("response.output_item.done") == kinds.count("response.function_call_arguments.done") == len(calls)
    )
    assert [tool.to_dict() for tool in reply.tools] == [
        OWN_TOOLS[0],
        OWN_TOOLS[1] | {"description": None, "parameters": None},
    ]
    if final is None:  # this model calls until it is cut, in the midst of a call or behind one
        assert len(calls) > 1 and reply.status == "incomplete" and kinds[-1] == "response.incomplete"
        assert {call.status for call in calls[:-1]} == {"completed"} and calls[-1].status == "incomplete"
        return
    assert len(calls) == 1 and reply.status == final.status == calls[0].status == "completed"
    (again,) = final.output
    assert again.type == "function_call" and (again.name, again.arguments) == (calls[0].name, calls[0].arguments)
    assert json.loads(again.arguments) == {} or name == "one"
    returned = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"}
    items: Any = [{"role": "user", "content": "The weather?"}, *reply.output, returned]
    more = served.client.responses.create(model="tiny", input=items, tools=OWN_TOOLS, max_output_tokens=9)
    assert (
        more.output_text
        and served.client.responses.create(
            model="tiny", input=[*items, *more.output, {"role": "user", "content": "And?"}], max_output_tokens=9
        ).output_text
    )


def test_tagged_calls_in_responses(served: Served) -> None:
    """Would break: text and calls that are not items of their own, in their order."""
    items = _Items()
    parser = parser_of(ChatRequest.model_validate(AUTO), None)
    pieces = [*read(parser, f"Let me see. {CALL}\n{CALL} and {CALL} so")]
    events = [event for piece in pieces for event in items.feed(piece)] + [*items.end(True, parser.is_cut)]
    assert [item["type"] for item in items.done] == [
        "message", "function_call", "function_call", "message", "function_call", "message"
    ]  # fmt: skip
    assert [item["status"] for item in items.done] == ["completed"] * 5 + ["incomplete"]
    places = [data["output_index"] for kind, data in events if kind == "output_item.done"]
    assert places == list(range(6)) and len({data["item"]["id"] for kind, data in events if "item" in data}) == 6


@pytest.mark.parametrize(
    ("fields", "place", "what"),
    [
        ({"tools": [{"type": "web_search", "search_context_size": "low", "user_location": {}, "filters": {}}]},
         "tools.0.type", "not supported"),
        ({"tools": [{"type": "mcp", "server_label": "a", "server_url": "b", "require_approval": "never"}]},
         "tools.0.type", "not supported"),
        ({"tools": OWN_TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice.type", "not supported"),
        ({"tools": OWN_TOOLS * 2}, "tools", "two of them have one name"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": OWN_TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "no such tool"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "object", "required": 5}}],
          "tool_choice": "required"}, "tools.0.parameters", ""),
        ({"input": [{"role": "user", "content": "a"}, DEEP_CALL]}, "input.1.arguments", "recursion"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": [SEEN]}]}, "input.0.output.0.image_url",
         "no processor"),
        ({"input": [{"type": "computer_call", "call_id": "a"}]}, "input.0.type", "not supported"),
        ({"input": "The king. " * 1000, "truncation": "auto"}, "truncation", "not supported"),
        ({"input": "The king. " * 9999, "truncation": "auto"}, "truncation", "not supported"),
        ({"max_output_tokens": 9999, "truncation": "auto"}, "max_output_tokens", "above the limit"),
        ({"input": "The king. " * 1000}, None, "is all that there is room for"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking", "does not read it"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_refused_in_responses(served: Served, fields: dict[str, Any], place: str | None, what: str) -> None:
    reply = served.post("/v1/responses", {"input": "a", "max_output_tokens": 5} | fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == place and what in error["message"], error


@pytest.mark.parametrize("text", ["<tool_call>" + "a" * 20_000, "<" * 20_000, (CALL + " ") * 300], ids=len)
def test_tags_are_found_in_linear_time(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Would break: a message that is searched from its beginning, or copied, with each character."""
    sizes: list[int] = []
    feed = StopStrings.feed

    def note(self: StopStrings, new: str) -> tuple[str, bool]:
        found = feed(self, new)
        sizes.append(len(new) + len(found[0]) + len(self._held))
        return found

    monkeypatch.setattr(StopStrings, "feed", note)
    body = ChatRequest.model_validate(AUTO)
    parser = parser_of(body, None)
    streamed = message_of([piece for character in text for piece in parser.feed(character)] + parser.end())
    assert sum(sizes) < 30 * len(text)
    whole = message_of(read(parser_of(body, None), text))
    assert (whole["content"] or "").strip() == (streamed["content"] or "").strip()
    assert len(whole.get("tool_calls", ())) == len(streamed.get("tool_calls", ())) == text.count(CALL)
