"""Whatever clients do: nothing leaks, nothing is stuck, no answer is a 500."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from helpers.serving import Served, serving
from helpers.waiting import join
from hf_paged.engine.request import Request
from hf_paged.server import generation, logprobs, replies
from hf_paged.server.generation import Delta, Text
from hf_paged.server.settings import ServerSettings

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/nothing"]
KEY = "secret"
VALUES: list[Any] = [None, -1, 0, 1, 2, 10**30, 1e308, "", "a", "é\ud83d", [], [1], ["a"], {}, {"a": 1}, True, [[5]]]
NAMES = ["temperature", "n", "max_tokens", "stop", "seed", "logprobs", "stream", "model", "prompt", "messages", "input",
         "tokens", "tools", "tool_choice", "response_format", "structured_outputs", "logit_bias", "best_of",
         "num_beams", "priority", "cache_salt", "unknown", "min_tokens", "top_k", "stop_token_ids",
         "echo", "user"]  # fmt: skip


def body_of(rng: random.Random, path: str) -> dict[str, Any]:
    """A request that would be served, most of the time."""
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": rng.choice(["The door", ["a", "b"], [5, 6, 7]]), "n": rng.choice([1, 2, 4])},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "The king " * rng.randint(1, 30)}]},
        "/v1/responses": {"input": "The sea", "max_output_tokens": 20},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5, 6]},
    }.get(path, {})
    if path.startswith("/v1") and path != "/v1/responses":
        body |= {"max_tokens": rng.randint(1, 60), "stream": rng.random() < 0.5, "stop": rng.choice([None, "e"])}
    for _ in range(rng.choice([0, 0, 1, 2])):
        body[rng.choice(NAMES)] = rng.choice(VALUES)
    return body


class User:
    """A client that behaves badly, again and again."""

    def __init__(self, url: str, seed: int, count: int) -> None:
        self.url, self.rng, self.count = url, random.Random(seed), count
        self.statuses: Counter[int | str] = Counter()
        self.wrong: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=120, headers={"Authorization": f"Bearer {KEY}"}) as client:
            for _ in range(self.count):
                path = self.rng.choice(PATHS[:2] + PATHS)
                how = self.rng.choice([self.ask] * 6 + [self.garble, self.flood, self.without_key, self.hang_up])
                how(client, path)

    def note(self, reply: httpx.Response, what: Any) -> None:
        self.statuses[reply.status_code] += 1
        if reply.status_code >= 500 and reply.status_code != 504:
            self.wrong.append(f"{reply.status_code} {reply.text[:300]} for {what!r:.300}")

    def ask(self, client: httpx.Client, path: str) -> None:
        body = body_of(self.rng, path)
        content = json.dumps(body).encode()
        leaves_after = self.rng.choice([None, None, 0, 3])
        with client.stream("POST", path, content=content) as reply:
            for number, line in enumerate(reply.iter_lines()):
                if '"code": "engine_error"' in line or '"server_error"' in line:
                    self.wrong.append(f"{line} for {body}")
                if number == leaves_after and reply.headers["content-type"].startswith("text/event"):
                    self.statuses["left"] += 1
                    break
            else:
                self.statuses[reply.status_code] += 1
            if reply.status_code >= 500 and reply.status_code != 504:
                self.wrong.append(f"{reply.status_code} for {body}")

    def garble(self, client: httpx.Client, path: str) -> None:
        content = bytearray(json.dumps(body_of(self.rng, path)).encode() * self.rng.choice([1, 1, 2]))
        for _ in range(self.rng.randint(1, 4)):
            content[self.rng.randrange(len(content))] = self.rng.randrange(256)
        self.note(client.post(path, content=bytes(content)), bytes(content))

    def flood(self, client: httpx.Client, path: str) -> None:
        prompt = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
        reply = client.post(path, content=prompt)
        self.note(reply, "a flood")
        if reply.status_code not in (404, 413):
            self.wrong.append(f"{reply.status_code} for 10 MB")

    def without_key(self, client: httpx.Client, path: str) -> None:
        reply = client.post(path, json={}, headers={"Authorization": "Bearer other"})
        self.note(reply, "no key")
        if reply.status_code not in (401, 404):
            self.wrong.append(f"{reply.status_code} without a key")

    def hang_up(self, client: httpx.Client, path: str) -> None:
        """In the midst of its body, or without ever reading."""
        host, port = self.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "The door", "max_tokens": 400, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body[: self.rng.choice([5, len(body)])])
            if self.rng.random() < 0.5:
                connection.settimeout(0.05)
                with suppress(TimeoutError):
                    connection.recv(10)
        self.statuses["hung up"] += 1


class Turns:
    """Counts what is done between two turns of a server's event loop."""

    def __init__(self, served: Served) -> None:
        """Begins at once."""
        self.most, self._count, self._is_over = 0, 0, False
        (loop,) = served.server.config.app.state.serving._wakeups  # type: ignore[union-attr]
        loop.call_soon_threadsafe(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._count = 0
        if not self._is_over:
            loop.call_soon(self._turn, loop)

    def note(self, count: int = 1) -> None:
        self._count += count
        self.most = max(self.most, self._count)

    def end(self) -> int:
        self._is_over = True
        return self.most


@pytest.fixture(scope="module")
def roomy() -> Iterator[Served]:
    with serving(ServerSettings(model_name="tiny"), num_blocks=2048, max_num_seqs=512) as running:
        running.complete(max_tokens=1)
        yield running
        running.settle()


MANY = {"prompt": ["The door", "The sea", "The king"], "n": 128, "max_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize("given", [{}, {"stream": True}, {"temperature": 0}, {"num_beams": 8, "n": 8}], ids=str)
def test_texts_are_read_in_pieces(roomy: Served, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """Would break: an event loop that others wait for until all texts of a step are read."""
    turns, feed, end = Turns(roomy), Text.feed, Text.end
    texts: Counter[int] = Counter()

    def note_feed(text: Text, token_ids: list[int], logprobs: list[Any]) -> Delta | None:
        turns.note(len(token_ids))
        texts[text.index] += len(token_ids)
        return feed(text, token_ids, logprobs)

    def note_end(text: Text, reason: str) -> Delta | None:
        turns.note()
        return end(text, reason)

    monkeypatch.setattr(Text, "feed", note_feed)
    monkeypatch.setattr(Text, "end", note_end)
    assert roomy.post("/v1/completions", MANY | given).status_code == 200
    assert turns.end() < 2 * generation.PIECE
    assert set(texts.values()) == {6}, "a text has had a token twice"


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_log_probabilities_are_written_in_pieces(
    roomy: Served, monkeypatch: pytest.MonkeyPatch, path: str, is_streamed: bool
) -> None:
    """Would break: an event loop that others wait for until an answer of megabytes is written."""
    turns, shown = Turns(roomy), logprobs._shown

    def note(logprob: float) -> float:
        turns.note()
        return shown(logprob)

    monkeypatch.setattr(logprobs, "_shown", note)
    body: dict[str, Any] = {"max_tokens": 20, "stream": is_streamed, "n": 16}
    if path == PATHS[0]:
        body |= {"prompt": "The door " * 100, "logprobs": 20, "echo": True}
    else:
        body |= {"messages": [{"role": "user", "content": "The door"}], "logprobs": True, "top_logprobs": 20}
    reply = roomy.post(path, body)
    assert reply.status_code == 200 and len(reply.content) > 4 * replies.PIECE
    assert turns.end() < replies.PIECE // 10  # two pieces of the shortest there are
    assert is_streamed or len(reply.json()["choices"]) == 16
    assert "content-length" not in reply.headers
    assert "content-length" in roomy.post(PATHS[0], {"prompt": "a", "max_tokens": 2}).headers


def test_a_prompt_is_read_when_it_has_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a look at each prompt of a request for each token of any."""
    looks: Counter[str] = Counter()
    look = Request.events_since

    def note(request: Request, position: int = 0) -> list[Any]:
        looks[request.request_id] += 1
        return look(request, position)

    with serving(ServerSettings(model_name="tiny"), max_num_seqs=1) as served:
        monkeypatch.setattr(Request, "events_since", note)
        served.complete(prompt=[f"The door {number}" for number in range(30)], max_tokens=4, ignore_eos=True)
    assert len(looks) == 30 and max(looks.values()) <= 4 + 4


def test_who_leaves_in_a_large_answer(roomy: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: an answer that is made to its end for no one."""
    named: list[float] = []
    shown = logprobs._shown
    monkeypatch.setattr(logprobs, "_shown", lambda logprob: named.append(logprob) or shown(logprob))
    body = {"prompt": "The door " * 400, "logprobs": 20, "echo": True, "n": 64, "max_tokens": 1}
    with roomy.http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_raw())
    roomy.settle()
    count = -1
    while count != len(named):  # the rest of a piece
        count = len(named)
        roomy.complete(max_tokens=1)
    assert len(named) < 64 * 800 * 21 // 2


def hard_use(num_users: int, count: int) -> None:
    settings = ServerSettings(
        model_name="tiny",
        api_keys=[KEY],
        max_body_bytes=1 << 20,
        max_waiting=24,
        request_timeout=60,
        allow_priority=True,
    )
    with serving(settings, num_blocks=24) as served:
        users = [User(served.url, seed, count) for seed in range(num_users)]
        threads = [threading.Thread(target=user.run, daemon=True) for user in users]
        for thread in threads:
            thread.start()
        join(*threads, seconds=7000)
        statuses: Counter[int | str] = sum((user.statuses for user in users), Counter())
        assert not [wrong for user in users for wrong in user.wrong], statuses
        assert statuses[200] and statuses[400] and statuses[401] and statuses[413] and statuses["hung up"]
        assert sum(statuses.values()) == num_users * count
        served.settle()
        assert served.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


def test_some_users() -> None:
    hard_use(8, 12)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("num_users", "count"), [(20, 100), (32, 625)], ids=["2000", "20000"])
def test_many_users(num_users: int, count: int) -> None:
    hard_use(num_users, count)
