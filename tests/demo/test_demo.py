"""The demo as programs see it: one app on the embedded model, driven through `gradio_client`."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from demo.app import build_app, launch
from demo.hub import Hub
from demo.limits import Limits
from demo.loading import load

pytestmark = pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")  # what Gradio uses of pandas

BLOCKS = 256
OPENING = "It was late in the evening when the old man came to the door of the house, and"
ENDPOINTS = (
    "/chat /samples /beams /burst /memory_maps /cancel /stats /snapshot /set_pool /set_speed /pause /resume /step "
    "/queue_three"
)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    loaded = load()
    limits = Limits(prompt_tokens=700, new_tokens=192, requests=40, positions=loaded.positions)
    hub = Hub(loaded, {"num_blocks": BLOCKS, "block_size": 16, "preemption": "auto"}, limits)
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def url(hub: Hub) -> Iterator[str]:
    app = build_app(hub, welcome=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield launch(app, "127.0.0.1", port, wait=False)
    app.close(verbose=False)


@pytest.fixture(scope="module")
def client(url: str) -> Client:
    return connect(url)


@pytest.fixture(autouse=True)
def _left_in_order(hub: Hub) -> Iterator[None]:
    """After each test: full speed, the pool as it was, and no request holds a block."""
    yield
    hub.pacer.resume()
    hub.pacer.set_speed(0.0)
    wait_until(lambda: not hub.tickets, "requests are left")
    hub.resize(BLOCKS, "auto")
    wait_until(lambda: hub.stats().num_free_blocks == BLOCKS, "blocks are held")
    hub.engine.check_invariants()


def connect(url: str) -> Client:
    return Client(url, verbose=False, analytics_enabled=False)


def wait_until(is_true: Callable[[], Any], otherwise: str, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def chat(client: Client, message: str = OPENING, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return client.predict(message=message, **({"history": []} | arguments), api_name="/chat")


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The sentence of a refusal."""
    with pytest.raises(AppError) as error:
        call(*args, **kwargs)
    sentence = str(error.value)
    assert sentence.endswith(".") and "Traceback" not in sentence, sentence
    return sentence


# --------------------------------------------------------------------------------------------------------------- chat


def test_endpoints_are_named(client: Client) -> None:
    named = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(named) == set(ENDPOINTS.split())
    parameters = [parameter["parameter_name"] for parameter in named["/chat"]["parameters"]]
    assert parameters[:4] == ["message", "history", "max_new_tokens", "temperature"]


def test_chat_streams(client: Client, hub: Hub) -> None:
    client.predict(60.0, api_name="/set_speed")
    job = client.submit(message=OPENING, history=[], max_new_tokens=48, temperature=0.0, api_name="/chat")
    states = list(job)
    texts = [text for text, _ in states]
    assert len(texts) > 5
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert all(figures["finish_reason"] is None for _, figures in states[:-1])
    figures = states[-1][1]
    assert figures["finish_reason"] == "length" and figures["new_tokens"] == 48
    assert figures["prompt_tokens"] == len(hub.loaded.tokenizer(OPENING).input_ids)
    assert figures["cached_tokens"] in (0, 16)
    assert figures["seconds_to_first_token"] > 0 and figures["tokens_per_second"] > 0


def test_chat_says_what_the_model_says(client: Client, hub: Hub) -> None:
    text, _ = chat(client, max_new_tokens=24, temperature=0.0, repetition_penalty=1.0)
    inputs = hub.loaded.tokenizer(OPENING, return_tensors="pt")
    expected = hub.loaded.twin.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    assert OPENING + text == hub.loaded.tokenizer.decode(expected, skip_special_tokens=True)


def test_history_is_found_in_the_cache(client: Client) -> None:
    text, first = chat(client, max_new_tokens=64, temperature=1.0)
    history = [{"role": "user", "content": OPENING}, {"role": "assistant", "content": text}]
    _, second = chat(client, '"Who is there?" asked the girl.', history=history, max_new_tokens=8)
    before = first["prompt_tokens"] + first["new_tokens"]
    assert second["prompt_tokens"] > before
    # All but the last token, which had no keys and values yet, in full blocks.
    assert second["cached_tokens"] == (before - 1) // 16 * 16, second


# ----------------------------------------------------------------------------------------------------------- cancelling


def test_cancelling_a_job_frees_its_blocks(client: Client, hub: Hub) -> None:
    client.predict(20.0, api_name="/set_speed")
    job = client.submit(message=OPENING, history=[], max_new_tokens=192, api_name="/chat")
    wait_until(lambda: hub.stats().num_free_blocks < BLOCKS, "the chat holds no blocks")
    job.cancel()
    wait_until(lambda: not hub.tickets and hub.stats().num_free_blocks == BLOCKS, "its blocks are still held", 5)


def test_cancelling_a_session_ends_its_replies(url: str, hub: Hub) -> None:
    mine, other = connect(url), connect(url)
    mine.predict(20.0, api_name="/set_speed")
    jobs = [each.submit(message=OPENING, history=[], max_new_tokens=100, api_name="/chat") for each in (mine, other)]
    wait_until(lambda: hub.stats().num_running == 2, "the chats don't run")
    assert mine.predict(api_name="/cancel") == 1
    text, figures = jobs[0].result(timeout=10)
    assert figures["finish_reason"] == "cancelled" and figures["new_tokens"] < 100 and text
    mine.predict(0.0, api_name="/set_speed")
    assert jobs[1].result(timeout=20)[1]["finish_reason"] in ("length", "eos")


def test_a_client_that_goes_away_is_cancelled(url: str, hub: Hub) -> None:
    """Without a goodbye: the connection just ends, while the engine is paused and no token comes."""
    client = connect(url)
    client.predict(api_name="/pause")
    body: dict[str, Any] = {"data": [OPENING, [], 100, 0.8, 0.95, 0, 1.1, None], "session_hash": "gone"}
    with httpx.Client(base_url=url, timeout=20) as http:
        dependencies = http.get("config").json()["dependencies"]
        body["fn_index"] = next(each["id"] for each in dependencies if each["api_name"] == "chat")
        http.post("gradio_api/queue/join", json=body).raise_for_status()
        with http.stream("GET", "gradio_api/queue/data", params={"session_hash": "gone"}) as stream:
            lines = stream.iter_lines()
            while not hub.tickets:
                next(lines)
    wait_until(lambda: not hub.tickets, "the request of a client that is gone still waits", 15)


# --------------------------------------------------------------------------------------------------------------- limits


def test_what_is_beyond_a_limit_is_refused_with_a_sentence(client: Client) -> None:
    assert "700" in refused(chat, client, "word " * 1000)
    assert "22,400" not in refused(chat, client, "x" * 100_000)
    assert "1 to 192" in refused(chat, client, max_new_tokens=193)
    assert "1 to 192" in refused(chat, client, max_new_tokens=0)
    assert "no text" in refused(chat, client, "  \n")
    assert "0 to 2" in refused(chat, client, temperature=-1)
    assert "0.05 to 1" in refused(chat, client, top_p="<b>1</b>")
    assert "role" in refused(chat, client, history=[{"role": "system", "content": "x"}])
    assert "files" in refused(chat, client, history=[{"role": "user", "content": [{"path": "/etc/passwd"}]}])
    assert "1 to 8" in refused(client.predict, prompt=OPENING, count=9, api_name="/samples")
    assert "at least 2" in refused(client.predict, prompt=OPENING, count=1, api_name="/beams")
    assert "40 requests" in refused(client.predict, count=41, api_name="/burst")
    assert "2 to 4,096" in refused(client.predict, num_blocks=1, api_name="/set_pool")
    assert "auto, swap, recompute" in refused(client.predict, num_blocks=64, preemption="no", api_name="/set_pool")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("chat", ["a \ud800 b", [], 8, 0.8, 0.95, 0, 1.1, None]),
        (
            "chat",
            ["a", [{"role": "user", "content": "\udfff"}, {"role": "assistant", "content": "b"}], 8, 0, 1, 0, 1, 1],
        ),
        ("samples", ["a \ud800 b", 4, 8, 0.9, None]),
        ("beams", ["\ud83d\ud83d", 4, 8]),
    ],
)
def test_half_a_character_is_refused_with_a_sentence(url: str, name: str, data: list[Any]) -> None:
    """As a page's script may send it; would break: an error of the tokenizer's, or of JSON."""
    with httpx.Client(base_url=url, timeout=20) as http:
        body, headers = json.dumps({"data": data}), {"Content-Type": "application/json"}
        event = http.post(f"gradio_api/call/{name}", content=body, headers=headers).json()["event_id"]
        answer = http.get(f"gradio_api/call/{name}/{event}").text
    assert answer.startswith("event: error") and "half of a character" in answer, answer


def test_too_many_requests_are_refused(client: Client, hub: Hub) -> None:
    client.predict(api_name="/pause")
    burst = client.submit(count=40, max_new_tokens=8, longest_prompt=20, api_name="/burst")
    wait_until(lambda: len(hub.tickets) == 40, "the burst was not submitted")
    assert "40 requests at once" in refused(chat, client)
    client.predict(api_name="/resume")
    assert burst.result(timeout=30)[0].startswith("40 of 40 completed")


def test_what_can_never_fit_the_pool_is_refused(client: Client) -> None:
    client.predict(num_blocks=8, api_name="/set_pool")
    assert "128 tokens in all" in refused(chat, client, max_new_tokens=192)
    assert "no room for a prompt" in refused(client.predict, max_new_tokens=128, api_name="/burst")
    assert chat(client, max_new_tokens=32)[0]


# ---------------------------------------------------------------------------------------------------- samples, beams


def test_the_beam_tree_is_the_search(client: Client, hub: Hub) -> None:
    branches, nodes, sharing, figures = client.predict(prompt=OPENING, count=4, max_new_tokens=12, api_name="/beams")
    by_id = {node["id"]: node for node in nodes}
    returned = sorted((node for node in nodes if node["rank"]), key=lambda node: node["rank"])
    assert [node["rank"] for node in returned] == [1, 2, 3, 4]
    assert len(nodes) > 4 * 12 - 4, "beams that were given up are missing"
    for node, branch in zip(returned, branches):
        tokens, score = [], node["score"]
        while node is not None:
            tokens.insert(0, node["token"])
            parent = by_id.get(node["parent"])
            assert node["step"] == (parent["step"] if parent else 0) + 1
            assert node["score"] <= (parent["score"] if parent else 0.0)
            node = parent
        assert "".join(tokens).strip() == branch["text"].strip()
        # transformers divides a beam's score by its length
        assert f"score {score / len(tokens):.3f}" in branch["note"]
    inputs = hub.loaded.tokenizer(OPENING, return_tensors="pt")
    stock = hub.loaded.twin.generate(**inputs, max_new_tokens=12, num_beams=4, num_return_sequences=4, do_sample=False)
    length = inputs["input_ids"].shape[1]
    expected = [hub.loaded.tokenizer.decode(row[length:], skip_special_tokens=True) for row in stock]
    assert [branch["text"].strip() for branch in branches] == [text.strip() for text in expected]
    assert figures["blocks_saved"] > 0 and sharing


# ------------------------------------------------------------------------------------------------- pressure and memory


def test_the_pool_is_not_taken_from_those_who_use_it(client: Client, hub: Hub) -> None:
    client.predict(20.0, api_name="/set_speed")
    job = client.submit(message=OPENING, history=[], max_new_tokens=192, api_name="/chat")
    wait_until(lambda: hub.stats().num_running == 1, "the chat doesn't run")
    assert "1 request is running" in refused(client.predict, num_blocks=32, api_name="/set_pool")
    assert "32 blocks" in client.predict(num_blocks=32, cancel_running=True, api_name="/set_pool")
    assert job.result(timeout=10)[1]["finish_reason"] == "cancelled"
    assert hub.stats().num_blocks == 32


# ------------------------------------------------------------------------------------------------------------ step mode


def test_a_paused_engine_steps_and_explains(client: Client, hub: Hub) -> None:
    assert "pause it first" in refused(client.predict, api_name="/step")
    client.predict(api_name="/pause")
    assert "nothing to do" in refused(client.predict, api_name="/step")
    job = client.submit(message=OPENING, history=[], max_new_tokens=30, temperature=0.0, api_name="/chat")
    wait_until(lambda: hub.tickets, "the chat was not submitted")
    label = next(iter(hub.tickets))
    (first,) = client.predict(api_name="/step")
    assert re.search(rf"{label} was admitted.* computed \d+ tokens of its prompt.* took blocks? .* chose “", first), (
        first
    )
    second, third = client.predict(2, api_name="/step")
    assert f"{label} chose “" in second and "1 sequence decoding" in second
    assert [int(re.search(r"Step (\d+)", text).group(1)) for text in (second, third)] == [
        int(re.search(r"Step (\d+)", first).group(1)) + more for more in (1, 2)
    ]
    steps = client.predict(20, api_name="/step")
    assert any(f"{label} had filled its last block, so it got block" in text for text in steps), steps
    assert not job.done()
    client.predict(api_name="/resume")
    text, figures = job.result(timeout=10)
    assert figures["new_tokens"] == 30
    chosen = "".join(re.findall(r"chose “(.*?)”", " ".join([first, second, third, *steps]))).replace("⏎", "\n")
    assert len(chosen) > 20 and text.startswith(chosen)


def test_requests_wait_while_it_is_paused_and_can_be_cancelled(client: Client, hub: Hub) -> None:
    client.predict(api_name="/pause")
    labels = client.predict(api_name="/queue_three")
    assert set(labels) == set(hub.tickets)
    assert client.predict(api_name="/snapshot")["is_paused"]
    assert client.predict(api_name="/stats")["num_waiting"] == 3
    assert client.predict(api_name="/cancel") == 3
    wait_until(lambda: not hub.tickets, "a paused engine keeps what is cancelled", 5)


def test_slow_motion_is_not_a_pause(client: Client, hub: Hub) -> None:
    client.predict(50.0, api_name="/set_speed")
    started = time.monotonic()
    _, figures = chat(client, max_new_tokens=25)
    assert time.monotonic() - started > 0.8 * figures["new_tokens"] / 50
    assert figures["tokens_per_second"] < 60
    assert client.predict(api_name="/snapshot")["is_paused"] is False


# ------------------------------------------------------------------------------------------------------------ pictures


def test_the_page_has_nothing_from_elsewhere(url: str) -> None:
    config = httpx.get(f"{url}config", timeout=20).text
    for place in ("fonts.googleapis", "fonts.gstatic", "cdn.jsdelivr", "cdnjs"):
        assert place not in config
    assert threading.active_count() < 100
