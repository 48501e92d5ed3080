"""A server over the embedded model, behind uvicorn on a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai import OpenAI

import hf_paged
from helpers.models import tiny_lm, tiny_tokenizer
from helpers.waiting import PATIENCE, eventually, join
from hf_paged.server.run import DrainingServer, make_server
from hf_paged.server.settings import ServerSettings


@dataclass
class Served:
    """A running server.

    Attributes:
        server: Of uvicorn.
        engine: Behind it.
        url: Where it is.
        client: OpenAI's.
        http: A plain client.
    """

    server: DrainingServer
    engine: hf_paged.Engine
    url: str
    client: OpenAI
    http: httpx.Client

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """Sends JSON."""
        return self.http.post(path, json=body, **more)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion, which must succeed."""
        reply = self.post("/v1/completions", {"prompt": "The door", **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def settle(self) -> None:
        """Asserts that nothing is held any more."""
        eventually(self.is_free, f"something is still held: {self.engine.stats()}")
        self.engine.check_invariants()

    def is_free(self) -> bool:
        stats = self.engine.stats()
        return stats.num_free_blocks == stats.num_blocks and stats.num_running == stats.num_waiting == 0


@contextmanager
def serving(
    settings: ServerSettings | None = None,
    model: Any = None,
    tokenizer: Any = None,
    processor: Any = None,
    **patched: Any,
) -> Iterator[Served]:
    """Runs a server meanwhile."""
    model = hf_paged.patch(tiny_lm() if model is None else model, **{"num_blocks": 512, **patched})
    settings = settings or ServerSettings()
    server = make_server(model, tokenizer or tiny_tokenizer(), settings, "127.0.0.1", 0, 60, processor)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started, "the server does not start")
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    key = next(iter(server.config.app.state.serving.settings.api_keys), "none")
    with (
        OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE) as client,
        httpx.Client(base_url=url, timeout=PATIENCE, headers={"Authorization": f"Bearer {key}"}) as http,
    ):
        yield Served(server, model.paged, url, client, http)
    server.should_exit = True
    join(thread)


def shared_server(**settings: Any) -> Any:
    """A fixture: one server for a file of tests, which holds nothing at their end."""

    @pytest.fixture(scope="module")
    def served() -> Iterator[Served]:
        with serving(ServerSettings(**{"model_name": "tiny"} | settings)) as running:
            yield running
            running.settle()

    return served
