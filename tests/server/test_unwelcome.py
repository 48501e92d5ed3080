"""What is refused, by which name; clients that go away; queues, deadlines, keys."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM

import hf_paged
from helpers.models import build, tiny_lm, tiny_tokenizer
from helpers.serving import Served, serving, shared_server
from helpers.state_models import STATE_MODELS
from helpers.waiting import PATIENCE, eventually, join
from hf_paged.server import replies
from hf_paged.server.logs import JsonLines
from hf_paged.server.settings import ServerSettings
from hf_paged.server.wakeups import Wakeups

COMPLETION, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
SEEN = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
LOOKED_AT = {"type": "image_url", "image_url": {"url": SEEN["image_url"]}}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "The door"},
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": "Hello"},
}

served = shared_server(max_body_bytes=1 << 20)
small = shared_server(max_answer_bytes=1 << 20)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETION, {"suffix": "end"}, "suffix"),
    (COMPLETION, {"nonsense": 1}, "nonsense"),
    (COMPLETION, {"prompt": 5}, "prompt"),
    (COMPLETION, {"prompt": []}, "prompt"),
    (COMPLETION, {"prompt": [[]]}, "prompt.0"),
    (COMPLETION, {"prompt": [10**9]}, "prompt"),
    (COMPLETION, {"prompt": [-1]}, "prompt.0"),
    (COMPLETION, {"max_tokens": 0}, "max_tokens"),
    (COMPLETION, {"max_tokens": "5"}, "max_tokens"),
    (COMPLETION, {"max_tokens": 10**6}, "max_tokens"),
    (CHAT, {"max_tokens": 10**6}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens"),
    (RESPONSES, {"max_output_tokens": 10**6}, "max_output_tokens"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "king"}}}}, "text.format.schema"),
    (RESPONSES, {"input": [{"role": "user", "content": [SEEN]}], "instructions": "a"}, "input.0.content.0.image_url"),
    (COMPLETION, {"temperature": -1}, "temperature"),
    (COMPLETION, {"temperature": 2.5}, "temperature"),
    (COMPLETION, {"top_p": 0}, "top_p"),
    (COMPLETION, {"top_k": -2}, "top_k"),
    (COMPLETION, {"min_p": 1.5}, "min_p"),
    (COMPLETION, {"n": 0}, "n"),
    (COMPLETION, {"n": 1000}, "n"),
    (COMPLETION, {"n": 3, "best_of": 2}, "best_of"),
    (COMPLETION, {"best_of": 2, "stream": True}, "best_of"),
    (COMPLETION, {"seed": 2**63}, "seed"),
    (COMPLETION, {"stop": ""}, "stop"),
    (COMPLETION, {"stop": ["a"] * 17}, "stop"),
    (COMPLETION, {"stop": ["a", "a" * 257]}, "stop.1"),
    (COMPLETION, {"stop_token_ids": [10**6]}, "stop_token_ids"),
    (COMPLETION, {"min_tokens": 50}, "min_tokens"),
    (COMPLETION, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETION, {"logit_bias": {"99999": 1}}, "logit_bias"),
    *[(COMPLETION, {"logit_bias": {key: 1}}, "logit_bias") for key in ("٣", "１", "1_0", " 1", "01", "-1", "9" * 5000)],
    (COMPLETION, {"stop_token_ids": ["1"]}, "stop_token_ids.0"),
    (COMPLETION, {"logit_bias": {"1": 101}}, "logit_bias.1"),
    (COMPLETION, {"presence_penalty": 3}, "presence_penalty"),
    (COMPLETION, {"frequency_penalty": -3}, "frequency_penalty"),
    (COMPLETION, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETION, {"repetition_penalty": 1e-40}, "repetition_penalty"),
    (COMPLETION, {"temperature": 1e-40}, "temperature"),
    (COMPLETION, {"num_beams": 2, "length_penalty": 1e308}, "length_penalty"),
    (COMPLETION, {"structured_outputs": {"json": True}}, "structured_outputs.json"),
    (COMPLETION, {"logprobs": 21}, "logprobs"),
    (COMPLETION, {"max_tokens": 0, "echo": True}, "max_tokens"),
    (COMPLETION, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETION, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETION, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": True}, "prompt_logprobs"),
    (COMPLETION, {"num_beams": 2, "stream": True}, "stream"),
    (COMPLETION, {"num_beams": 2, "n": 3}, "n"),
    (COMPLETION, {"length_penalty": 1.0}, "length_penalty"),
    (COMPLETION, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETION, {"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
    (COMPLETION, {"priority": 1.5}, "priority"),
    (COMPLETION, {"priority": -1}, "priority: this server takes none"),
    (COMPLETION, {"user": 7}, "user"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "audio": {}}]}, "messages.0.audio"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": [{"role": "user", "content": [LOOKED_AT]}]}, "messages.0.content.0.image_url"),
]


@pytest.mark.parametrize(("path", "fields", "name"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_field_is_refused_by_name(served: Served, path: str, fields: dict[str, Any], name: str) -> None:
    reply = served.post(path, BODIES[path] | fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error", reply.text
    assert error["param"] == name.partition(":")[0] and error["message"].startswith(name), error
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "fields", "name", "what"),
    [
        (COMPLETION, {"n": 128, "logprobs": 20}, "max_tokens", "n=128, logprobs=20 are an answer of about 4.6 MiB"),
        (COMPLETION, {"n": 128, "logprobs": 20, "stream": True}, "max_tokens", "at most 1 tokens would do"),
        (COMPLETION, {"prompt": ["a"] * 9, "n": 64}, "n", "576 choices of 16 tokens"),
        (COMPLETION, {"best_of": 64, "prompt": ["a"] * 9}, "best_of", "fewer prompts"),
        (COMPLETION, {"prompt": ["a"] * 600}, "prompt", "fewer prompts"),
        (COMPLETION, {"prompt": "The door" * 99, "echo": True, "n": 5, "logprobs": 20}, "n", "limit is 1.0 MiB"),
        (COMPLETION, {"prompt": "The door" * 99, "n": 5, "prompt_logprobs": 20}, "n", "prompt_logprobs=20"),
        (COMPLETION, {"prompt": "a " * 999, "echo": True, "n": 128, "max_tokens": 1}, "n", "echo=True"),
        (CHAT, {"n": 20, "logprobs": True, "top_logprobs": 20, "max_completion_tokens": 200}, "max_completion_tokens",
         "20 choices of 200 tokens with n=20, logprobs=True, top_logprobs=20"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 900}], "prompt_logprobs": 20}, "prompt_logprobs", ""),
    ],
)  # fmt: skip
def test_an_answer_that_is_too_large(path: str, fields: dict[str, Any], name: str, what: str, small: Served) -> None:
    error = small.post(path, BODIES[path] | fields).json()["error"]
    assert error["param"] == name and error["message"].startswith(name) and what in error["message"], error
    assert error["code"] == "answer_too_large"
    assert small.is_free()


def test_an_answer_as_large_as_it_may_be(small: Served) -> None:
    """Would break: a limit for those who don't say how much they want, below or above that of others."""
    asked: dict[str, Any] = {"messages": HELLO, "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "n": 5}
    reply = small.post(CHAT, asked).json()
    most = reply["usage"]["completion_tokens"] // 5
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 5
    assert len(json.dumps(reply)) < 2 << 20
    assert small.post(CHAT, asked | {"max_tokens": most, "stream": True}).status_code == 200
    error = small.post(CHAT, asked | {"max_tokens": most + 1}).json()["error"]
    assert f"at most {most} tokens would do" in error["message"]


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"Nonsense": 1}, "Nonsense"),
    ({"str": 1}, "str"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"tool_choice": "other"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"logit_bias": {"X": 500}}, "logit_bias.X"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
]


@pytest.mark.parametrize(("fields", "place"), PLACES, ids=str)
def test_where_in_the_body_it_is(served: Served, fields: dict[str, Any], place: str) -> None:
    """Would break: names of the types that were tried in it, or a field's name taken for one."""
    error = served.post(CHAT, {"messages": HELLO} | fields).json()["error"]
    assert error["param"] == place and error["message"].startswith(f"{place}: ")


@pytest.mark.parametrize(
    ("path", "fields", "what"),
    [
        (COMPLETION, {"prompt": 5}, "Input should be a valid string, or a valid array"),
        (RESPONSES, {"input": 5}, "Input should be a valid string, or a valid array"),
        (CHAT, {"tool_choice": "other"}, "Input should be 'none', 'auto' or 'required', or an object"),
        (COMPLETION, {"prompt": [5, -1]}, "Input should be greater than or equal to 0"),
        (COMPLETION, {"stop": ["a"] * 17}, "List should have at most 16 items after validation, not 17"),
    ],
    ids=str,
)
def test_what_would_do(served: Served, path: str, fields: dict[str, Any], what: str) -> None:
    """Would break: one of several types named as if it were the only one, or another one than was given."""
    message = served.post(path, BODIES[path] | fields).json()["error"]["message"]
    assert message.partition(": ")[2] == what


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'"\xff"', b'{"prompt": "\\ud800"}', b"[" * 100_000, b"1" * 9999],
    ids=lambda content: str(content[:20]),
)
def test_what_is_no_json(served: Served, content: bytes) -> None:
    assert served.http.post(COMPLETION, content=content).status_code == 400


def calling(arguments: str) -> str:
    """A chat in which a function was called."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "a", "content": "x"}
    return json.dumps({"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}, answer]})


HALF, DEEP = r'"a \ud83d b"', "[" * 5000
NESTED = '{"properties": {"a": ' * 5000
ARGUMENTS = "messages.1.tool_calls.0.function.arguments"
BROKEN: list[tuple[str, str, str]] = [
    *[(CHAT, calling(start * 5000), ARGUMENTS) for start in ("[", '{"a":')],
    (CHAT, calling("[" * 300 + "]" * 300), ARGUMENTS),
    (CHAT, '{"tools": [{"type": "function", "function": {"parameters": ' + NESTED, "tools.0.function.parameters"),
    (CHAT, '{"response_format": {"json_schema": {"schema": ' + NESTED, "response_format.json_schema.schema"),
    (RESPONSES, '{"text": {"format": {"schema": ' + NESTED, "text.format.schema"),
    (RESPONSES, '{"input": "a", "metadata": ' + NESTED, "metadata"),
    (COMPLETION, '{"stop": "a",\n "structured_outputs": {"json": {"enum": ' + DEEP, "structured_outputs.json.enum"),
    (COMPLETION, f'{{"prompt": {DEEP}', "prompt"),
    (RESPONSES, '{"metadata": {"a": ' + "[" * 99 + "]" * 99 + '}, "input": ["a"]}', "metadata.a.0"),
    (COMPLETION, f'{{"prompt": ["a", {HALF}]}}', "prompt.1"),
    (COMPLETION, f'{{"prompt": "a\\\\", "user":\n{HALF}}}', "user"),
    (COMPLETION, f'{{"prompt": "a", "logit_bias": {{{HALF}: 1}}}}', "logit_bias"),
    (COMPLETION, r'{"prompt": "a", "stop": ["b", "\udc00\ud800"]}', "stop.1"),
    (CHAT, f'{{"messages": [{{"role": "user", "content": [{{"text": {HALF}}}]}}]}}', "messages.0.content.0.text"),
    (RESPONSES, f'{{"input": "a", "metadata": {{"b": {HALF}}}}}', "metadata.b"),
    ("/tokenize", f'{{"prompt": {HALF}}}', "prompt"),
    ("/detokenize", f'{{"tokens": [1], "model": {HALF}}}', "model"),
]


@pytest.mark.parametrize(("path", "content", "place"), BROKEN, ids=lambda value: str(value)[:60])
def test_what_json_can_not_hold(served: Served, path: str, content: str, place: str) -> None:
    """Lists in lists, half characters; would break: a 500, or an answer that leaves one to look for it."""
    reply = served.http.post(path, content=content)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"].startswith(place), reply.text
    assert error["message"].startswith(f"{error['param']}: ") and len(error["message"]) < 300


def test_other_answers(served: Served) -> None:
    """Would break: an answer that isn't in OpenAI's shape."""
    replies = {
        404: served.http.get("/v1/nothing"),
        405: served.http.get(COMPLETION),
        413: served.http.post(COMPLETION, content=b"x" * (10 << 20)),
    }
    for status, reply in replies.items():
        assert reply.status_code == status and "message" in reply.json()["error"]
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        served.client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other/one")


def test_a_client_that_goes_away_in_its_body(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Would break: an error of the server's for what is none."""
    count = re.compile(rf'_total{{.*path="{CHAT}",status="499".*}} 1\.0')
    host, port = served.url.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{{".encode())
    eventually(lambda: count.search(served.http.get("/metrics").text), "it is not counted")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_event_loops_that_end() -> None:
    """Would break: each loop that an app ever ran in is kept, and looked at in every step."""
    model = hf_paged.patch(tiny_lm())
    app = hf_paged.server.create_app(model, tiny_tokenizer(), model_name="tiny")
    client = TestClient(app)  # not entered: a loop a request
    for _ in range(5):
        assert client.post(COMPLETION, json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert len(app.state.serving._wakeups) == 1
    hf_paged.unpatch(model)


def test_a_client_that_goes_away_frees_its_blocks(served: Served) -> None:
    """Streamed and not; would break: rows that go on for no one's request."""
    endless = {"prompt": "The door", "max_tokens": 1900, "ignore_eos": True}
    before = served.engine.stats().num_generated_tokens
    with served.http.stream("POST", COMPLETION, json=endless | {"stream": True, "n": 2}) as reply:
        lines = reply.iter_lines()  # kept: httpx closes the connection when this is freed
        next(lines)
        assert served.engine.num_running == 2
    eventually(served.is_free, "a stream goes on")
    with pytest.raises(httpx.ReadTimeout):
        served.post(COMPLETION, endless, timeout=0.3)
    eventually(served.is_free, "a request goes on")
    assert served.engine.stats().num_generated_tokens - before < 3 * 1900
    eventually(lambda: 'status="499"' in served.http.get("/metrics").text, "it is not counted")


@pytest.mark.parametrize("given", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1, "stream": True}])
def test_a_client_that_goes_away_while_its_prompt_is_scored(served: Served, given: dict[str, Any]) -> None:
    """Would break: what nobody waits for is scored, and then continued."""

    def gone() -> list[str]:
        return re.findall(r'status="499".*', served.http.get("/metrics").text)

    before, gone_before = served.engine.stats().num_generated_tokens, gone()
    served.engine.pause()
    try:
        with pytest.raises(httpx.ReadTimeout):
            served.post(COMPLETION, {"prompt": ["The door", "A door"], "max_tokens": 9} | given, timeout=0.3)
        eventually(lambda: gone() != gone_before, "it is not counted")
    finally:
        served.engine.resume()
    eventually(served.is_free, "a prompt is scored")
    assert served.engine.stats().num_generated_tokens == before


def test_a_reader_that_reads_nothing(served: Served) -> None:
    """Would break: a stream that holds blocks until it is read."""
    body = json.dumps({"prompt": "The door", "max_tokens": 300, "stream": True, "n": 8}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        eventually(lambda: served.engine.num_running > 0, "it does not begin")
        eventually(served.is_free, "it holds blocks")
    assert served.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_one_wakeup_a_step(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a wake-up of the event loop for each token of each stream."""
    wakeups: list[int] = []
    wake = Wakeups.wake

    def note(self: Wakeups, event: Any) -> None:
        wake(self, event)
        wakeups.append(self.num_wakeups)

    monkeypatch.setattr(Wakeups, "wake", note)
    steps = served.engine.stats().num_steps
    given = {"max_tokens": 30, "ignore_eos": True, "n": 8}
    threads = [threading.Thread(target=served.complete, kwargs=given) for _ in range(4)]
    served.engine.pause()  # a token that comes before its reply listens is read without a word
    for thread in threads:
        thread.start()
    eventually(lambda: len(wakeups) >= 4, "not all replies listen")
    served.engine.resume()
    join(*threads)
    steps = served.engine.stats().num_steps - steps
    assert len(wakeups) >= 4 * 8 * 30 and wakeups[-1] - wakeups[0] <= steps + 20


def test_keys() -> None:
    settings = ServerSettings(api_keys=["secret", "other"])
    app = hf_paged.server.create_app(tiny_lm(), tiny_tokenizer(), settings, model_name="tiny")
    client = TestClient(app)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        for method, path in (("POST", COMPLETION), ("POST", "/tokenize"), ("GET", "/metrics"), ("GET", "/v1/models")):
            reply = client.request(method, path, headers=headers, json={} if method == "POST" else None)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
    public = TestClient(hf_paged.server.create_app(app.state.serving.engine.model, tiny_tokenizer(), public_docs=True,
                                                   api_keys=["secret"], model_name="tiny"))  # fmt: skip
    for path in ("/docs", "/openapi.json"):
        assert client.get(path, headers={"Authorization": "Bearer other"}).status_code == 404
        assert COMPLETION in public.get(path).text
    for header in (b"Bearer schl\xc3\xbcssel", b"Bearer \xff\xfe", b"\xff", b""):
        assert client.get("/v1/models", headers=[(b"Authorization", header)]).status_code == 401
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    for key in settings.api_keys:
        reply = client.post("/tokenize", json={"prompt": "a"}, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200
    assert "access-control-allow-origin" not in client.get("/health", headers={"Origin": "http://a"}).headers
    hf_paged.unpatch(app.state.serving.engine.model)


def test_the_description(served: Served) -> None:
    """Would break: a body without its schema, a reference to none, a page that loads something or lacks a field."""
    found = served.http.get("/openapi.json").json()
    schemas = found["components"]["schemas"]
    page = served.http.get("/docs")
    posts = {path: routes["post"] for path, routes in found["paths"].items() if "post" in routes}
    assert set(posts) == {COMPLETION, CHAT, RESPONSES, "/tokenize", "/detokenize"}
    for post in posts.values():
        own = schemas[post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
        assert own["additionalProperties"] is False and all(
            f"<code>{name}</code>" in page.text for name in own["properties"]
        )
    references = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(found))
    links = re.findall(r'href="#([^"]+)"', page.text)
    assert set(references) <= set(schemas) and all(f'id="{link}"' in page.text for link in links)
    described = schemas["ChatRequest"]["properties"]
    assert described["store"]["description"].startswith("without effect") and "audio" not in described
    assert described["modalities"]["enum"] == [["text"]] and described["n"]["maximum"] == 128
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.findall(r"<(?:script|link|img|iframe)", page.text)
    assert served.http.get("/redoc").status_code == 404


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (COMPLETION, {"n": 5}, "n"),
        (COMPLETION, {"n": 2, "best_of": 5}, "best_of"),
        (COMPLETION, {"n": 2, "num_beams": 5}, "num_beams"),
        (CHAT, {"n": 5, "stream": True}, "n"),
    ],
)
def test_too_many_branches(path: str, fields: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a request that is prepared, and refused by the engine in its own words."""
    app = hf_paged.server.create_app(hf_paged.patch(tiny_lm(), max_branches=4), tiny_tokenizer(), model_name="tiny")
    served, serving = TestClient(app), app.state.serving
    assert served.post(path, json=BODIES[path] | {"max_tokens": 2} | fields | {name: 4}).status_code == 200
    monkeypatch.setattr(serving, "in_thread", None)  # what prepares a request
    reply = served.post(path, json=BODIES[path] | fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == name and "max_branches" in error["message"], error
    hf_paged.unpatch(serving.engine.model)


def test_queue_deadline_and_drain(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hf_paged.server")
    with serving(ServerSettings(max_waiting=1), max_num_seqs=1) as served:
        behind = served.server.config.app.state.serving
        short = {"prompt": "A secret prompt", "max_tokens": 3}
        endless = short | {"max_tokens": 1900, "ignore_eos": True}
        replies: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: replies.append(served.post(COMPLETION, short))) for _ in range(2)]
        served.engine.pause()
        for thread in threads:
            thread.start()
            eventually(lambda: served.engine.num_waiting + served.engine.num_running > 0, "it is not queued")
        full = served.post(COMPLETION, short)
        assert full.status_code == 429 and full.headers["Retry-After"] == "1"
        served.engine.resume()
        join(*threads)
        assert {reply.status_code for reply in replies} <= {200, 429} and 200 in {r.status_code for r in replies}
        served.settle()
        own, behind.settings = behind.settings, replace(behind.settings, request_timeout=0.2)
        assert served.post(COMPLETION, endless).status_code == 504
        with served.http.stream("POST", COMPLETION, json=endless | {"stream": True}) as reply:
            assert "longer than 0.2 s" in reply.read().decode()
        behind.settings = own
        served.complete(max_tokens=3, user="me")
        line = json.loads(caplog.records[-1].getMessage())
        assert line["user"] == "me" and line["completion_tokens"] == 3 and "secret" not in caplog.text
        assert f"serving {behind.settings.model_name} on {served.url}" in caplog.messages
        served.settle()
        served.server.handle_exit(2, None)
        assert behind.is_draining


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_room_in_a_pool_of_windows_or_states(name: str) -> None:
    """Would break: a chat without a limit that the engine refuses, for which other blocks leave less room."""
    config = build("gemma3").config if name == "gemma3" else STATE_MODELS[name]()
    config.vocab_size = len(tiny_tokenizer())
    model = AutoModelForCausalLM.from_config(config).eval()
    with serving(ServerSettings(model_name="tiny"), model, num_blocks=24, block_size=4) as served:
        reply = served.post(CHAT, BODIES[CHAT])
        assert reply.status_code == 200, reply.text
        body = {"prompt": [5, 6, 7], "ignore_eos": True}
        most = served.http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert served.complete(**body, max_tokens=most - 3)["usage"]["completion_tokens"] == most - 3 > 16
        assert served.post(COMPLETION, body | {"max_tokens": most - 2}).json()["error"]["param"] == "max_tokens"


def test_a_reader_that_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: an answer that is kept, with what it holds, for as long as a client leaves its connection open."""
    monkeypatch.setattr(replies, "STALLED", 0.01)
    closed: list[str] = []

    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"

    async def stall(*message: Any) -> Any:
        if not message or message[0]["type"] == "http.response.body":
            await asyncio.Event().wait()

    answer = replies.Streamed(pieces(), replies.JSON, lambda: closed.append("closed"))
    asyncio.run(asyncio.wait_for(answer({"type": "http"}, stall, stall), PATIENCE))
    assert closed == ["closed"]


def test_streams_are_drained() -> None:
    """Would break: an end of the server that cuts what runs."""
    body = {"prompt": "a", "max_tokens": 200, "stream": True}
    with serving() as served, served.http.stream("POST", COMPLETION, json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        served.server.handle_exit(2, None)
        assert list(lines)[-2] == "data: [DONE]"


def test_mounted_in_another_app() -> None:
    app = FastAPI()
    model = tiny_lm()
    app.mount("/llm", hf_paged.server.create_app(model, tiny_tokenizer(), model_name="tiny"))
    for _ in range(2):  # event loops of their own
        reply = TestClient(app).post("/llm/v1/completions", json={"prompt": "The door", "max_tokens": 3})
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 3
    assert 'href="/llm/openapi.json"' in TestClient(app).get("/llm/docs").text
    assert TestClient(app).get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    hf_paged.unpatch(model)


@pytest.mark.parametrize(
    "arguments",
    [
        *[{"api_keys": keys} for keys in ("a", [""], ["schlüssel"], [" a"], ["a\n"])],
        {"max_waiting": 0},
        {"head_timeout": 0},
        {"max_head_bytes": -1},
        {"max_answer_bytes": 0},
        {"max_pixels_at_work": 5},
        {"max_audio_seconds_at_work": 5},
        {"max_waiting": None},
        {"max_waiting": "10"},
        {"cors_origins": "https://a.example"},
    ],
    ids=str,
)
def test_settings(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ServerSettings(**arguments)


def test_each_request_is_a_line_of_json(caplog: pytest.LogCaptureFixture) -> None:
    """Refused, late, left, or failed; would break: a line that a client writes, a request without one, two of one."""
    caplog.set_level("INFO", "hf_paged.server.requests")
    with serving(ServerSettings(model_name="tiny", max_waiting=1)) as served:
        behind = served.server.config.app.state.serving  # type: ignore[union-attr]

        def lines() -> list[dict[str, Any]]:
            records = [record for record in caplog.records if record.name == "hf_paged.server.requests"]
            found = [JsonLines().format(record) for record in records]
            assert not any("secret" in line or "\n" in line for line in found)
            return [json.loads(line) for line in found]

        user = 'me"}\n{"status": 500}\u2028'
        endless = {"prompt": "secret", "max_tokens": 1900, "ignore_eos": True, "user": user}
        asked: list[tuple[str, dict[str, Any] | None, int]] = [
            (COMPLETION, {"prompt": "secret", "max_tokens": 2, "user": user}, 200),
            (COMPLETION, {"prompt": "secret", "stream": True, "max_tokens": 2, "user": user}, 200),
            (COMPLETION, endless | {"logit_bias": {"99999": 1}}, 400),
            (COMPLETION, endless | {"model": "a" * 9999}, 404),
            (COMPLETION, endless | {"prompt": ["secret"] * 2}, 400),
            (COMPLETION, endless, 504),
            (COMPLETION, endless | {"stream": True}, 504),
            (COMPLETION, {"secret": "secret"}, 400),
            ("/v1/no%0A%22thing", None, 404),
            ("/health", None, 200),
        ]
        for number, (path, body, status) in enumerate(asked, 1):
            reply = served.http.get(path) if body is None else served.post(path, body)
            assert reply.status_code in (status, 200)
            assert len(lines()) == number, "it is written before the answer ends"
            line = lines()[-1]
            assert line["status"] == status and line["client"] == "127.0.0.1" and line["seconds"] >= 0
            assert line["path"] == path.replace("%0A%22", '\n"')
            datetime.fromisoformat(line["time"])
            if body is not None and "user" in body and status != 404:
                assert (line["model"], line["user"]) == ("tiny", user)
            assert ("completion_tokens" in line) or status not in (200, 504) or body is None
            if number == 5:
                behind.settings = replace(behind.settings, request_timeout=0.2)
        behind.settings = replace(behind.settings, request_timeout=60.0)
        with served.http.stream("POST", COMPLETION, json=endless | {"stream": True}) as reply:
            begun = reply.iter_lines()  # kept: httpx closes the connection when this is freed
            next(begun)
        eventually(lambda: lines()[-1]["status"] == 499, "the one that was left has no line")
        behind.metrics.text = lambda: 1 / 0
        assert served.http.get("/metrics").status_code == 500 and lines()[-1]["status"] == 500
        assert len(lines()) == len(asked) + 2


def test_other_lines_of_the_log_are_json() -> None:
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        record = logging.LogRecord("uvicorn", logging.ERROR, "", 0, "a %s\nb", ("x",), sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line
    read = json.loads(line)
    assert read["message"] == "a x\nb" and "ZeroDivisionError" in read["exception"] and read["level"] == "ERROR"
