"""Calls of functions in an assistant's message: grammars that make them, and parsers that read them from the text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from hf_paged import GrammarCompiler
from hf_paged.server.chat_schemas import ChatRequest, Function
from hf_paged.server.schemas import ANY_OBJECT
from hf_paged.server.text import StopStrings

Piece = dict[str, Any]  # what a delta of a message has: content, or tool_calls

PIECE = 4096  # characters
OPEN, CLOSE = "<tool_call>", "</tool_call>"
COMBINED = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties"}  # what may bring further properties
HEAD = re.compile(r'\s*\}?\s*[\[,]?\s*\{"name": "([^"]*)", "arguments":\s*')


def grammar_of(body: ChatRequest, tokenizer: Any) -> str:
    """A grammar in Lark's syntax: a list of calls where they are forced; else a text, and calls between tags.

    The text follows a format if there is one, and arguments the schemas of functions that are forced or strict.
    """
    rules, names = [], []
    for number, tool in enumerate(body.callable_tools):
        follows = body.is_forced or tool.function.strict
        schema = _json(_arguments(tool.function) if follows else ANY_OBJECT)
        head = json.dumps('{"name": ' + json.dumps(tool.function.name) + ', "arguments": ')
        rules += [f'call{number}: {head} args{number} "}}"', f"args{number}: {schema}"]
        names.append(f"call{number}")
    call = " | ".join(names)
    if body.is_forced:
        more = ' ("," call)*' if body.may_call_more else ""
        return "\n".join([f'start: "[" call{more} "]"', f"call: {call}", *rules])
    added = tokenizer.get_added_vocab()  # a token of its own is no text to a grammar
    first, last = (tag if tag in added else json.dumps(tag) for tag in (OPEN, CLOSE))
    if body.json_format is not None:
        start = f"text | ({first} call GAP){'+' if body.may_call_more else ''}"
        texts = [f"text: {_json(body.json_format)}"]
    else:
        before = f"TEXT? {first}" if OPEN in added else "before"
        start = f"({before} call){'*' if body.may_call_more else '?'} TEXT?"
        texts = [rf"before[lazy]: /(.|\n)*{OPEN}/", rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{OPEN}(.|\n)*/"]
    return "\n".join([f"start: {start}", f"call: GAP ({call}) GAP {last}", *rules, r"GAP: /[ \n]?/", *texts])


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": GrammarCompiler.COMPACT})


def _arguments(function: Function) -> dict[str, Any]:
    """The schema of a call's arguments: the function takes no others, unless its own schema speaks of others.

    Clients leave `additionalProperties` out, and a small model then adds properties until its limit cuts the call.
    """
    parameters = function.parameters or {"type": "object", "properties": {}}
    says_all = "properties" in parameters and not COMBINED & parameters.keys()
    says_all = says_all and set(parameters.get("required", ())) <= parameters["properties"].keys()
    return ({"additionalProperties": False} if says_all else {}) | parameters


class Parser:
    """Reads an assistant's message as it comes. This one takes all of it as content."""

    def feed(self, text: str) -> list[Piece]:
        return [{"content": text}] if text else []

    def end(self) -> list[Piece]:
        return []

    @property
    def is_cut(self) -> bool:
        """Whether it is in the midst of a call."""
        return False


def parser_of(body: ChatRequest, tokenizer: Any) -> Parser:
    """The parser of a request's messages."""
    if body.is_forced:
        return _ForcedCalls()
    if not body.offered_tools:
        return Parser()
    parser = _ByTokenizer(tokenizer) if has_schema(tokenizer) else _TaggedCalls()
    return parser if body.parallel_tool_calls else _FirstCall(parser)


def has_schema(tokenizer: Any) -> bool:
    """Whether the tokenizer says itself how its model's messages are read."""
    return getattr(tokenizer, "response_schema", None) is not None


def _call(index: int, name: str, arguments: str) -> Piece:
    function = {"name": name, "arguments": arguments}
    return {
        "tool_calls": [{"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}]
    }


def read(parser: Parser, text: str) -> Iterator[Piece]:
    """The parts of a whole message. Parsers copy what is left of a text behind each thing that they find in it."""
    for start in range(0, len(text), PIECE):
        yield from parser.feed(text[start : start + PIECE])
    yield from parser.end()


class _ForcedCalls(Parser):
    """The text of `grammar_of`, whose arguments come as they are generated."""

    def __init__(self) -> None:
        self._text = ""
        self._index = -1
        self._depth = 0  # of braces and brackets in the arguments; 0: outside of them
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._text:
            if self._depth == 0:
                head = HEAD.match(self._text)
                if head is None or head.end() == len(self._text):
                    break
                self._text = self._text[head.end() :]
                self._index += 1
                pieces.append(_call(self._index, head[1], ""))
            end = self._end_of_arguments()
            fragment, self._text = self._text[:end], self._text[end:]
            pieces.append({"tool_calls": [{"index": self._index, "function": {"arguments": fragment}}]})
        return pieces

    @property
    def is_cut(self) -> bool:
        return self._depth > 0 or not self._text.endswith("]")

    def _end_of_arguments(self) -> int:
        """How much of the text belongs to the arguments, an object."""
        for place, character in enumerate(self._text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return len(self._text)


class _TaggedCalls(Parser):
    """Content, and calls as JSON between `<tool_call>` tags: what most templates ask for. A cut one is content."""

    def __init__(self) -> None:
        self._tag = StopStrings([OPEN])
        self._inner: list[str] | None = None  # what is there of it; None: before the first one
        self._index = -1

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        new, is_there = self._tag.feed(text)
        if self._inner is None:
            if new:
                pieces.append({"content": new})
            if not is_there:
                return pieces
            self._inner = []
            new, is_there = self._next_tag()
        while is_there:
            pieces += self._finished("".join([*self._inner, new]))
            self._inner = []
            new, is_there = self._next_tag()
        self._inner.append(new)
        return _joined(pieces)

    def _next_tag(self) -> tuple[str, bool]:
        """The text up to the end of a call, and whether that is there: behind a tag."""
        rest = self._tag.flush()
        self._tag = StopStrings([CLOSE])
        return self._tag.feed(rest)

    @property
    def is_cut(self) -> bool:
        return self._index >= 0 and OPEN in "".join(self._inner or ())

    def end(self) -> list[Piece]:
        rest = self._tag.flush()
        if self._inner is not None:  # it was cut: it is shown as it is
            rest = "".join([*self._inner, rest]).strip()
        return [{"content": rest}] if rest else []

    def _finished(self, inner: str) -> list[Piece]:
        pieces: list[Piece] = []
        between, is_behind_another, call = inner.partition(OPEN)
        if is_behind_another:
            inner = call
            if between.strip():
                pieces.append({"content": between})
        inner = inner.strip()
        try:
            call = from_json(inner)
            name, arguments = call["name"], json.dumps(call["arguments"], ensure_ascii=False)
        except (ValueError, TypeError, KeyError):
            return [*pieces, {"content": inner}]
        self._index += 1
        return [*pieces, _call(self._index, str(name), arguments)]


class _FirstCall(Parser):
    """The pieces of another parser, without the calls behind the first."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Piece]:
        return self._without_others(self._parser.feed(text))

    def end(self) -> list[Piece]:
        return self._without_others(self._parser.end())

    @property
    def is_cut(self) -> bool:
        return self._parser.is_cut

    def _without_others(self, pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if all(call["index"] == 0 for call in piece.get("tool_calls", ()))]


class _ByTokenizer(Parser):
    """Reads a message by the tokenizer's own schema: at the end."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._parts: list[str] = []

    def feed(self, text: str) -> list[Piece]:
        self._parts.append(text)
        return []

    def end(self) -> list[Piece]:
        text = "".join(self._parts)
        try:
            message = self._tokenizer.parse_response(text)
            json.dumps(message, ensure_ascii=False).encode()  # what JSON may say, and UTF-8 can't
            calls = [each["function"] for each in message.get("tool_calls") or ()]
            found = [
                _call(number, each["name"], json.dumps(each["arguments"], ensure_ascii=False))
                for number, each in enumerate(calls)
            ]
        except Exception:  # a text that isn't what the schema expects
            return [{"content": text}]
        content = message.get("content")
        return ([{"content": content}] if content else []) + found


def _joined(pieces: list[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        if "content" in piece and joined and "content" in joined[-1]:
            joined[-1] = {"content": joined[-1]["content"] + piece["content"]}
        else:
            joined.append(piece)
    return joined


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    parts: list[str] = []
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []  # of each call
    for piece in pieces:
        parts.append(piece.get("content", ""))
        for call in piece.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                arguments.append([])
            arguments[call["index"]].append(call["function"]["arguments"])
    for call, own in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(own)
    content = "".join(parts)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    return message | {"content": content or None, "tool_calls": calls} if calls else message
