"""Bodies that would hold the server: refused by their size before they are worked on, or worked on apart."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from helpers.models import tiny_tokenizer
from helpers.serving import Served, serving, shared_server
from helpers.waiting import PATIENCE, eventually, join
from hf_paged.server import limits
from hf_paged.server.chat_schemas import ChatRequest
from hf_paged.server.errors import invalid_body
from hf_paged.server.limits import JsonSize
from hf_paged.server.responses import ResponsesRequest
from hf_paged.server.schemas import Body, CompletionRequest
from hf_paged.server.serving import QUICK
from hf_paged.server.settings import ServerSettings

COMPLETION, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MANY = 40_000
SAID = {"role": "user", "content": "a"}
CALLED = {"role": "assistant", "tool_calls": [{}] * 1000}

served = shared_server(max_waiting=64, max_grammar_bytes=1 << 17)


# ------------------------------------------------------------------------------------------------------------ bodies

JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('ab"\\{}[],:\n\u00e9'), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def size_of(value: Any) -> tuple[int, int]:
    """Values, and how deep they are nested, by the parsed body."""
    if not isinstance(value, dict | list):
        return 0, 0
    is_object = isinstance(value, dict)
    inner = [size_of(each) for each in (value.values() if is_object else value)]
    own = max(1, len(value)) + (limits.PER_OBJECT + limits.PER_FIELD * len(value) if is_object else 0)
    return own + sum(number for number, _ in inner), 1 + max((depth for _, depth in inner), default=0)


@given(value=JSON, is_ascii=st.booleans(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_body_is_counted_as_it_comes(value: Any, is_ascii: bool, lengths: list[int]) -> None:
    text, count, start = json.dumps(value, ensure_ascii=is_ascii).encode(), JsonSize(), 0
    while start < len(text):
        length = lengths[start % len(lengths)]
        count.feed(text[start : start + length])
        start += length
    assert (count.num_values, count.depth) == size_of(value)


# What a body of wrong items costs is one error, not one an item.
WRONG: list[tuple[type[Body], dict[str, Any], str]] = [  # the first three with 4 errors at most, the others with 16
    (CompletionRequest, {"prompt": [{}] * 1000}, "prompt.0"),
    (CompletionRequest, {"prompt": [[1, "a"]] * 1000}, "prompt.0.1"),
    (ChatRequest, {"messages": [{"role": "x"}] * 1000}, "messages.0.role"),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}] * 8}, "messages.0.content.0.type"),
    (ChatRequest, {"messages": [CALLED] * 8}, "messages.0.tool_calls.0.id"),
    (ChatRequest, {"messages": [SAID], "tools": [{}] * 8000}, "tools.0.type"),
    (ChatRequest, {"messages": [{**SAID, **{f"u{n}": 1 for n in range(MANY)}}]}, "messages.0.u0"),
    (ChatRequest, {"messages": [SAID] * 4000}, "messages"),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [""] * MANY}}, "structured_outputs.choice.0"),
    (CompletionRequest, {"prompt": "a", **{f"u{n}": 1 for n in range(MANY)}}, "u0"),
    (CompletionRequest, {"prompt": "a", "logit_bias": {str(n): "x" for n in range(MANY)}}, "logit_bias"),
    (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}, "stop.0"),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * 1000}, "stop_token_ids.0"),
    (CompletionRequest, {"prompt": [[1, 2]] * MANY}, "prompt"),
    (CompletionRequest, {"prompt": [""] * MANY}, "prompt"),
    (ResponsesRequest, {"input": [{}] * 2000}, "input.0.role"),
    (ResponsesRequest, {"input": "a", "metadata": {str(n): 1 for n in range(MANY)}}, "metadata"),
]


@pytest.mark.parametrize(("kind", "body", "param"), WRONG, ids=[f"{kind.__name__}-{param}" for kind, _, param in WRONG])
def test_errors_stop_at_the_first_few(kind: type[Body], body: dict[str, Any], param: str) -> None:
    data = json.dumps(body).encode()
    count = JsonSize()
    count.feed(data)
    assert count.num_values <= ServerSettings().max_body_values  # it is not refused by its size
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(data)
    assert error.value.error_count() <= (4 if (kind, body, param) in WRONG[:3] else 16)
    assert invalid_body(error.value, data).param == param


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (COMPLETION, {"prompt": [5] * (1 << 19)}, 413, "body_too_large"),
        (CHAT, {"messages": [SAID] * 20_000}, 413, "body_too_large"),
        (COMPLETION, {"prompt": "a", "structured_outputs": {"json": {"a": [[]] * 300_000}}}, 413, "body_too_large"),
        (CHAT, {"messages": [SAID], "tools": json.loads("[" * 100 + "]" * 100)}, 400, "invalid_json"),
        (COMPLETION, {"prompt": "word, " * 100_000}, 400, "context_length_exceeded"),
        (COMPLETION, {"prompt": ["a"] * 65}, 400, None),
    ],
)
def test_too_much_is_refused(served: Served, path: str, body: dict[str, Any], status: int, code: str | None) -> None:
    reply = served.post(path, body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text


# ----------------------------------------------------------------------------------------------------------- prompts


class WaitingTokenizer:
    """The embedded one, for which long texts take until they are let go."""

    def __init__(self) -> None:
        self._own = tiny_tokenizer()
        self.is_at_work, self.may_go_on = threading.Event(), threading.Event()
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, text: str, **arguments: Any) -> Any:
        self.texts.append(text)
        if len(text) > QUICK:
            self.is_at_work.set()
            assert self.may_go_on.wait(PATIENCE)
        return self._own(text, **arguments)


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    tokenizer = WaitingTokenizer()
    with serving(ServerSettings(model_name="tiny", max_waiting=3), tokenizer=tokenizer) as served:
        replies: list[int] = []

        def ask() -> None:
            replies.append(served.post("/tokenize", {"prompt": "The door " * (QUICK // 8)}).status_code)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert tokenizer.is_at_work.wait(PATIENCE)
        assert served.complete(max_tokens=1)["usage"]["completion_tokens"] == 1
        assert not replies
        tokenizer.may_go_on.set()
        for thread in threads:
            join(thread)
        assert replies == [200] * 4


def test_a_client_that_left_before_its_prompt_was_tokenized() -> None:
    """Would break: a place in the queue that is held for a request that no client waits for."""
    tokenizer = WaitingTokenizer()
    with serving(ServerSettings(model_name="tiny", max_waiting=1), tokenizer=tokenizer) as served:
        with pytest.raises(httpx.ReadTimeout):
            served.post(COMPLETION, {"prompt": "The door " * (QUICK // 8)}, timeout=0.2)
        assert tokenizer.is_at_work.wait(PATIENCE)
        short = {"prompt": "a", "max_tokens": 1}
        eventually(lambda: served.post(COMPLETION, short).status_code == 200, "its place is still held")
        tokenizer.may_go_on.set()


def test_large_tools_are_long_prompts() -> None:
    """Would break: short prompts that wait for descriptions of functions."""
    tool = {"type": "function", "function": {"name": "a", "description": "b " * QUICK}}
    kinds = [{"tools": [tool]}, {"chat_template_kwargs": {"a": "b " * QUICK}}]
    assert all(ChatRequest.model_validate({"messages": [SAID]} | more).num_characters > QUICK for more in kinds)


def test_prompts_beyond_the_queue_are_not_tokenized() -> None:
    tokenizer = WaitingTokenizer()
    with serving(ServerSettings(model_name="tiny", max_waiting=3), tokenizer=tokenizer) as served:
        long = {"prompt": ["The door " * (QUICK // 8), "b"], "max_tokens": 1}
        replies: list[int] = []
        thread = threading.Thread(target=lambda: replies.append(served.post(COMPLETION, long).status_code), daemon=True)
        thread.start()
        assert tokenizer.is_at_work.wait(PATIENCE)
        reply = served.post(COMPLETION, {"prompt": ["c", "d"], "max_tokens": 1})
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
        assert served.post(COMPLETION, {"prompt": "e", "max_tokens": 1}).status_code == 200
        tokenizer.may_go_on.set()
        join(thread)
        assert replies == [400]  # more tokens than the model has positions
        assert not {"c", "d"} & set(tokenizer.texts)


# ---------------------------------------------------------------------------------------------------------- grammars


def chain(length: int) -> str:
    rules = [f'a{number}: "x" a{number + 1} | "y"' for number in range(length)]
    return "\n".join(["start: a0", *rules, f'a{length}: "z"'])


def test_a_grammar_that_overflows_its_compiler_is_refused(served: Served) -> None:
    """Compiled in the server's own process, it would end that."""
    for _ in range(2):
        reply = served.post(COMPLETION, {"prompt": "The door", "structured_outputs": {"grammar": chain(4000)}})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "structured_outputs.grammar", reply.text
        assert "too deep" in reply.json()["error"]["message"]
    assert len(served.complete(structured_outputs={"regex": "[a-z]{3}"})["choices"][0]["text"]) == 3
    assert set(served.complete(structured_outputs={"grammar": chain(100)})["choices"][0]["text"]) <= set("xyz")


def test_a_grammar_has_a_limit_of_size_and_of_time(served: Served) -> None:
    choice = [f"choice {number}" for number in range(20_000)]
    reply = served.post(COMPLETION, {"prompt": "The door", "structured_outputs": {"choice": choice}})
    assert reply.status_code == 400 and "more than the limit of 131072" in reply.text
    with serving(ServerSettings(model_name="tiny", grammar_timeout=1e-6)) as hurried:
        reply = hurried.post(COMPLETION, {"prompt": "The door", "structured_outputs": {"choice": choice[:2000]}})
        assert reply.status_code == 400 and "takes more than 1e-06 s" in reply.text, reply.text
