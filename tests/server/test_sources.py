"""Models that read one text and write another, over HTTP: the prompt is what they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers.models import tiny_tokenizer
from helpers.serving import Served, serving
from helpers.sources import tiny_bart
from hf_paged.server import ServerSettings

POSITIONS = 40


def tiny_translator() -> Any:
    return tiny_bart(2048, POSITIONS, pad_token_id=0, bos_token_id=1)


@pytest.fixture(scope="module")
def translating() -> Iterator[Served]:
    with serving(ServerSettings(model_name="tiny"), tiny_translator()) as running:
        yield running
        running.settle()


def expected(text: str, **arguments: Any) -> list[str]:
    tokenizer = tiny_tokenizer()
    found = tiny_translator().generate(
        torch.tensor([tokenizer(text)["input_ids"]]), **{"max_new_tokens": 9, "do_sample": False} | arguments
    )
    return tokenizer.batch_decode(found[:, 1:], skip_special_tokens=True)


@pytest.mark.parametrize("asked", [{}, {"num_beams": 3, "n": 2}, {"stream": True}], ids=["plain", "beams", "stream"])
def test_a_completion_is_what_the_model_makes_of_the_prompt(translating: Served, asked: dict[str, Any]) -> None:
    text = "The door was open"
    body = {"prompt": text, "max_tokens": 9, "temperature": 0} | asked
    if asked.get("stream"):
        pieces = translating.client.completions.create(model="tiny", **body)
        assert "".join(piece.choices[0].text for piece in pieces) == expected(text)[0]
        return
    said = translating.complete(**body)
    beams = {"num_beams": 3, "num_return_sequences": 2} if asked else {}
    assert [choice["text"] for choice in said["choices"]] == expected(text, **beams)
    assert said["usage"]["prompt_tokens"] == len(tiny_tokenizer()(text)["input_ids"])


def test_several_prompts_and_likelihoods(translating: Served) -> None:
    texts = ["The door", "The sea is far", "Bees"]
    said = translating.complete(prompt=texts, max_tokens=9, temperature=0, logprobs=1)
    assert [choice["text"] for choice in said["choices"]] == [expected(text)[0] for text in texts]
    assert all(len(choice["logprobs"]["tokens"]) == 9 for choice in said["choices"])


def test_prompt_and_text_each_have_all_the_room(translating: Served) -> None:
    long = [5] * POSITIONS
    said = translating.complete(prompt=long, max_tokens=POSITIONS - 1, temperature=0, ignore_eos=True)
    assert said["usage"]["completion_tokens"] == POSITIONS - 1
    for body, code in (
        ({"prompt": [*long, 5], "max_tokens": 2}, "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": POSITIONS}, "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": 2, "prompt_logprobs": 1}, None),
        ({"prompt": "a", "max_tokens": 2, "num_beams": 2, "logprobs": 1}, None),
    ):
        reply = translating.post("/v1/completions", body)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == code, reply.text


@pytest.mark.parametrize(("path", "field"), [("chat/completions", "messages"), ("responses", "input")])
def test_chats_need_a_template(translating: Served, path: str, field: str) -> None:
    body = {field: [{"role": "user", "content": "Hi"}]}
    error = translating.post(f"/v1/{path}", body).json()["error"]
    assert "/v1/completions" in error["message"] and error["type"] == "invalid_request_error"
    with serving(ServerSettings(chat_template="{{ messages[0]['content'] }}"), tiny_translator()) as served:
        assert served.post(f"/v1/{path}", body).status_code == 200
