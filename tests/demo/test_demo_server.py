"""The demo beside OpenAI's interface, in one process over one model."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from typer.testing import CliRunner

from demo import serving
from demo.__main__ import command
from demo.hub import Hub
from demo.pages.requests import requests_value
from demo.serving import address, listen
from helpers.demo_parts import both

__all__ = ["both"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")  # what Gradio uses of pandas


def test_both_are_there(both: Any) -> None:
    """Would break: a page in place of the interface's answers; requests on another engine than the demo's."""
    before = both.hub.stats().num_generated_tokens
    body = {"prompt": "The door", "max_tokens": 7, "temperature": 0}
    reply = httpx.post(f"{both.url}/v1/completions", json=body, timeout=60)
    assert reply.json()["usage"]["completion_tokens"] == 7
    assert both.hub.stats().num_generated_tokens >= before + 7
    assert httpx.get(both.url, timeout=60).headers["content-type"].startswith("text/html")
    assert httpx.get(f"{both.url}/v1/models").json()["data"][0]["id"] == "tiny_lm"
    assert httpx.post(f"{both.url}/v1/completions", json={"prompt": 5}).status_code == 400
    (row,) = requests_value(both.requests.rows()[:1], "")["rows"]
    assert row[1:4] == [both.requests.rows()[0].label, "completions", "done"] and row[5:7] == ["3", "7"]


def test_the_pool_stays(both: Any) -> None:
    """Would break: a server whose engine a visitor of the page replaces."""
    engine = both.hub.engine
    client = Client(both.url, verbose=False, analytics_enabled=False)
    with pytest.raises(AppError, match="a server is on it"):
        client.predict(32, "auto", True, api_name="/set_pool")
    assert "already had 64 blocks" in client.predict(64, "auto", api_name="/set_pool")
    assert both.hub.engine is engine and both.hub.stats().num_blocks == 64


def test_a_port() -> None:
    with listen("127.0.0.1", [0]) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", [port])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    with listen("127.0.0.1", range(number, number + 3)) as found:
        assert address(found) == f"http://127.0.0.1:{number}"


def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: an option that serves the page alone."""
    served: list[Any] = []

    def make(hub: Hub, *given: Any) -> Any:
        served.append((hub.is_fixed, *given))
        return SimpleNamespace(run=lambda sockets: sockets[0].close()), listen("127.0.0.1", [0])

    monkeypatch.setattr(serving, "make_server", make)
    result = CliRunner().invoke(command, ["--server", "--num-blocks", "32", "--port", "7999", "--no-welcome"])
    assert result.exit_code == 0 and served == [(True, "127.0.0.1", 7999, False)]
    result = CliRunner().invoke(command, ["--server", "--share"])
    assert result.exit_code == 2 and len(served) == 1
