"""The table of a server's requests: what it says of each, and that none stays in it as running."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient

import hf_paged
from helpers.models import tiny_lm, tiny_tokenizer
from helpers.serving import Served, serving
from helpers.waiting import eventually, join
from hf_paged.server import RequestTable, ServerSettings, create_app, requests

COMPLETION = "/v1/completions"


def table_of(served: Served) -> RequestTable:
    table = served.server.config.app.state.requests  # type: ignore[union-attr]
    assert isinstance(table, RequestTable)
    return table


def test_a_request_from_its_arrival_to_its_end() -> None:
    """Would break: figures of another request, a state that stays behind, a prompt or a text in a row."""
    with serving(ServerSettings(model_name="tiny")) as served:
        table = table_of(served)
        served.engine.pause()
        given = {"prompt": ["The sea is", "The door"], "n": 2, "max_tokens": 6, "temperature": 1.0}
        thread = threading.Thread(target=served.complete, kwargs=given)
        thread.start()
        eventually(lambda: served.engine.num_waiting == 2, "it is not queued")
        eventually(lambda: table.rows()[0].num_texts == 4, "its texts are not in the table")
        (row,) = table.rows()
        names = {group["request_id"] for group in served.engine.snapshot()["groups"]}
        assert names == {row.label, f"{row.label}.1"}, "the engine calls them as the table does"
        assert (row.state, row.path, row.model, row.is_streamed) == ("waiting", COMPLETION, "tiny", False)
        assert (row.num_prompts, row.num_texts, row.num_tokens, row.first_token_seconds) == (2, 4, 0, None)
        while table.rows()[0].state == "waiting":
            assert served.engine.step() is not None
            eventually(lambda: table.rows()[0].num_tokens > 0, "its tokens are not counted")
        assert (table.rows()[0].state, table.rows()[0].finish_reasons) == ("running", (None,) * 4)
        served.engine.resume()
        join(thread)
        (row,) = table.rows()
        assert row.state == "done" and row.num_tokens == 24 and row.finish_reasons == ("length",) * 4
        assert row.first_token_seconds is not None and 0 < row.first_token_seconds <= row.seconds
        assert "sea" not in repr(row)
        assert table.rows() == [row], "its seconds go on"
        served.post("/v1/responses", {"input": "A", "max_output_tokens": 2, "stream": True})
        assert [(each.path, each.is_streamed) for each in table.rows()] == [
            ("/v1/responses", True),
            (COMPLETION, False),
        ]


GONE: dict[str, dict[str, Any]] = {
    "refused": {"prompt": "a", "logit_bias": {"99999": 1}},
    "late": {"prompt": "a", "max_tokens": 1900, "ignore_eos": True},
    "left": {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True},
}


@pytest.mark.parametrize("how", GONE)
def test_what_comes_to_nothing_is_given_up(how: str) -> None:
    """Would break: requests that run for ever in the table, and keep what they hold."""
    with serving(ServerSettings(model_name="tiny", request_timeout=0.5 if how == "late" else 60)) as served:
        table = table_of(served)
        if how == "left":
            with served.http.stream("POST", COMPLETION, json=GONE[how]) as reply:
                lines = reply.iter_lines()  # kept: httpx closes the connection when this is freed
                next(lines)
                assert table.rows()[0].state == "running"
        else:
            assert served.post(COMPLETION, GONE[how]).status_code == {"refused": 400, "late": 504}[how]
        eventually(lambda: table.rows()[0].state == "given up", "it goes on")
        served.settle()


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: memory that grows with each request; names that two apps over one engine give twice."""
    monkeypatch.setattr(requests, "NUM_KEPT", 3)
    model = tiny_lm()
    apps = [create_app(model, tiny_tokenizer(), model_name="tiny") for _ in range(2)]
    for app in apps:
        client = TestClient(app)
        for number in range(5):
            client.post(COMPLETION, json={"prompt": "a", "max_tokens": number + 1})
        assert [row.num_tokens for row in app.state.requests.rows()] == [5, 4, 3]
    assert len({row.label for app in apps for row in app.state.requests.rows()}) == 6
    hf_paged.unpatch(model)
