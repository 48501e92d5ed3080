"""Structured output: every text that ends by itself is what was asked for."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.serving import Served, shared_server

jsonschema: Any
try:
    import jsonschema
except ImportError:
    jsonschema = None  # it looks at the texts, too, where it is installed

PATH = "/v1/chat/completions"
HUGE = "(" * 10 + "a" + "{99})" * 10

served = shared_server()


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema, of every kind that is common."""
    kinds = ["integer", "open", "steps", "number", "boolean", "null", "enum", "const", "string", "pattern", "format"]
    kind = rng.choice(
        kinds + ["object", "array", "tuple", "anyOf"] * (2 if depth < 2 else 0) + ["ref", "tree"] * 2 * (depth == 0)
    )
    low = rng.randint(-50, 50)
    words = rng.sample(["red", "king", "\u00e9t\u00e9", 'a"b', "7", "x\\y"], 3)
    if kind == "object":
        names = rng.sample(["name", "age", "tags", "is king", "ünit", "$id"], rng.randint(1, 4))
        required = [name for name in names if rng.random() < 0.7]
        properties = {name: schema_of(rng, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.choice([1, 9, 1000])},
        "open": {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.choice([2, 30])},
        "steps": {"type": "integer", "multipleOf": rng.randint(2, 9), "minimum": 0, "maximum": 90},
        "number": {"type": "number", "minimum": low, "maximum": low + 10},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": [*words, low, None]},
        "const": {"const": rng.choice([low, words[0], [1, "a"], {"a": None}])},
        "string": {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)},
        "pattern": {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^[0-9]{3}-[0-9]{2}$", "^(a|bb)c?$"])},
        "format": {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])},
        "array": lambda: {"type": "array", "items": schema_of(rng, depth + 1), "minItems": 1, "maxItems": 3},
        "tuple": lambda: {"type": "array", "prefixItems": [schema_of(rng, depth + 1), schema_of(rng, 2)],
                          "minItems": 2, "maxItems": 2},
        "tree": {"$defs": {"one": {"anyOf": [{"type": "null"}, {
            "type": "object", "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 9},
                                             "next": {"$ref": "#/$defs/one"}},
            "required": ["value", "next"], "additionalProperties": False}]}}, "$ref": "#/$defs/one"},
        "anyOf": lambda: {"anyOf": [schema_of(rng, depth + 1), schema_of(rng, depth + 1)]},
        "ref": lambda: {"$defs": {"one": schema_of(rng, 2)}, "type": "array", "items": {"$ref": "#/$defs/one"},
                        "maxItems": 2, "minItems": 2},
    }[kind]  # fmt: skip


FORMAT_PATTERNS = {
    "date": r"\d{4}-\d{2}-\d{2}",
    "time": r"\d{2}:\d{2}:\d{2}(\.\d+)?(Z|z|[+-]\d{2}:\d{2})",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"(\d{1,3}\.){3}\d{1,3}",
}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether JSON is valid by a schema of the keywords that are used here."""
    if "$ref" in schema:
        return is_valid(value, root_of(root, "one"), root)
    if "anyOf" in schema:
        return any(is_valid(value, each, root) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = schema["type"]
    if kind in ("integer", "number"):
        is_number = isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        high = schema.get("maximum", schema.get("exclusiveMaximum", 1) - 1)
        return is_number and low <= value <= high and value % schema.get("multipleOf", value or 1) == 0
    if kind == "string":
        pattern = schema.get("pattern") or FORMAT_PATTERNS.get(schema.get("format", ""), "(?s).*")
        length = len(value) if isinstance(value, str) else -1
        return schema.get("minLength", 0) <= length <= schema.get("maxLength", length) and bool(
            re.fullmatch(pattern, value)
        )
    if kind == "array":
        items = value if isinstance(value, list) else []
        own = schema if "$defs" in schema else root
        if "prefixItems" in schema:
            return len(items) == 2 and all(map(is_valid, items, schema["prefixItems"], [root] * 2))
        return schema["minItems"] <= len(items) <= schema["maxItems"] and all(
            is_valid(item, schema["items"], own) for item in items
        )
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(is_valid(item, schema["properties"][name], root) for name, item in value.items())
        )
    return value is None if kind == "null" else isinstance(value, bool)


def root_of(schema: Any, name: str) -> dict[str, Any]:
    """The definition of a name, wherever it is."""
    if isinstance(schema, dict):
        if name in schema.get("$defs", {}):
            return schema["$defs"][name]
        schema = list(schema.values())
    return next((found for each in schema if isinstance(each, dict | list) and (found := root_of(each, name))), {})


def check_schemas(served: Served, count: int) -> None:
    def ask(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        schema = resolve(schema_of(random.Random(number)))
        body = {
            "messages": [{"role": "user", "content": f"Number {number}"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            "max_tokens": 200,
            "seed": number,
            "n": 1 + number % 2,
        }
        reply = served.post(PATH, body, timeout=200)
        assert reply.status_code == 200, (schema, reply.text)
        return schema, reply.json()

    num_ended = 0
    with ThreadPoolExecutor(16) as pool:
        for schema, reply in pool.map(ask, range(count)):
            for choice in reply["choices"]:
                if choice["finish_reason"] == "stop":
                    num_ended += 1
                    value = json.loads(choice["message"]["content"])
                    assert is_valid(value, schema, schema), (value, schema)
                    assert jsonschema is None or jsonschema.Draft202012Validator(schema).is_valid(value), (
                        value,
                        schema,
                    )
    assert num_ended > 0.8 * count


def resolve(schema: Any) -> Any:
    """What was left to be made when its kind was drawn."""
    if callable(schema):
        return resolve(schema())
    if isinstance(schema, dict):
        return {name: resolve(value) for name, value in schema.items()}
    return [resolve(value) for value in schema] if isinstance(schema, list) else schema


def test_schemas(served: Served) -> None:
    check_schemas(served, 32)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_schemas(served: Served) -> None:
    check_schemas(served, 1000)


FORMATS: dict[str, tuple[dict[str, Any], str]] = {  # what is asked for, and what the text then is
    "regex": ({"structured_outputs": {"regex": "[a-z]{2}[0-9]{3}"}}, "[a-z]{2}[0-9]{3}"),
    "choice": ({"structured_outputs": {"choice": ["yes, sir", 'a "no"']}}, 'yes, sir|a "no"'),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/ "b"'}}, "a[0-9]b"),
    "json": ({"structured_outputs": {"json": {"enum": ["x", 1]}}}, '"x"|1'),
}


@pytest.mark.parametrize("name", FORMATS)
def test_other_formats(served: Served, name: str) -> None:
    asked, pattern = FORMATS[name]
    reply = served.complete(max_tokens=30, n=3, seed=1, **asked)
    for choice in reply["choices"]:
        assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"]), choice


def test_a_json_object(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "JSON"}]
    asked: Any = {"seed": 1, "n": 8, "max_tokens": 60, "temperature": 0.3, "response_format": {"type": "json_object"}}
    for choice in served.client.chat.completions.create(model="tiny", messages=messages, **asked).choices:
        content = choice.message.content
        assert content is not None and content.lstrip().startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(content), dict)
    reply = served.client.chat.completions.create(
        model="tiny", messages=messages, seed=1, response_format={"type": "text"}, max_tokens=5
    )
    assert reply.usage is not None and reply.usage.completion_tokens <= 5


KING: Any = {"type": "object", "properties": {"a": {"type": "king"}}}
TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in "abc"]
TOOLS[1]["function"]["parameters"] = KING


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "king"}}}},
            "response_format.json_schema.schema: Invalid type: king",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: "),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json: it allows no text at all"),
        ({"structured_outputs": {"choice": ["a"] * 3000}}, "structured_outputs.choice: "),  # as soon as it begins
        ({"tools": TOOLS, "tool_choice": "required"}, "tools.1.function.parameters: "),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tools.1.function.param"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start"}}, "structured_outputs.grammar: "),
        ({"structured_outputs": {"regex": "a"}, "num_beams": 2}, "num_beams"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": HUGE}}, "lexer error"),
    ],
    ids=str,
)
def test_refused(served: Served, fields: dict[str, Any], name: str) -> None:
    reply = served.post(PATH, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9} | fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and name in error["message"] and len(error["message"]) < 1100, reply.text
    assert error["message"].startswith(f"{error['param']}: ")
