"""transformers' own server over a patched model, unmodified: callers are batched, and each gets stock's tokens."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_paged
from helpers.models import TINY_LM
from helpers.waiting import PATIENCE

httpx = pytest.importorskip("httpx")
serve = pytest.importorskip("transformers.cli.serve")
if not serve.is_serve_available():
    pytest.skip("transformers serve needs its own extra, [serving]", allow_module_level=True)
utils = pytest.importorskip("transformers.cli.serving.utils")

from hf_paged.tools.transformers_serve import PagedGenerationState, PagedModelManager, paged_serving  # noqa: E402

PROMPTS = [f"Once upon a time {name}" for name in ("a dog", "the old king", "two friends went", "it was")]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def stock() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_LM)


def stock_text(stock: Any, tokenizer: Any, prompt: str, **settings: Any) -> str:
    ids = tokenizer(prompt, return_tensors="pt")
    rows = stock.generate(**ids, **settings)
    return tokenizer.decode(rows[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(params=[False, True], ids=["plain", "continuous_batching"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with paged_serving():
        running = serve.Serve(
            force_model=str(TINY_LM),
            continuous_batching=request.param,
            device="cpu",
            dtype="float32",
            host="127.0.0.1",
            port=port,
            non_blocking=True,
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            httpx.get(f"{url}/health")
            break
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    yield running, url
    running.kill_server()


def ask(url: str, body: dict[str, Any]) -> str:
    if not body.get("stream"):
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def test_callers_are_batched(server: tuple[Any, str], stock: Any, tokenizer: Any) -> None:
    """Would break: callers one after the other, another caller's sampling parameters, other tokens than stock's."""
    running, url = server
    (loaded,) = running._model_manager.loaded_models.values()
    assert isinstance(loaded.model.paged, hf_paged.Engine)
    penalties = [0.0, 0.6]
    bodies = [
        {
            "model": str(TINY_LM),
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "frequency_penalty": penalty,
            "stream": is_streamed,
        }
        for prompt in PROMPTS
        for penalty in penalties
        for is_streamed in (False, True)
    ]
    before = loaded.model.paged.stats()
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(lambda body: ask(url, body), bodies))
    after = loaded.model.paged.stats()
    for body, text in zip(bodies, found, strict=True):
        settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "temperature": None}
        expected = stock_text(
            stock, tokenizer, body["prompt"], repetition_penalty=1.0 + body["frequency_penalty"], **settings
        )
        assert text == expected
    num_tokens = after.num_generated_tokens - before.num_generated_tokens
    assert after.num_steps - before.num_steps < num_tokens / 2, "callers did not share steps"


def test_transformers_own_batching_manager(stock: Any, tokenizer: Any) -> None:
    """Would break: the manager that `transformers serve --continuous-batching` talks to a model through."""
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_LM).eval())
    settings = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=tokenizer.eos_token_id)

    async def stream(manager: Any, prompt: str, name: str) -> str:
        inputs = tokenizer(prompt)
        queue, streamer = manager.generate_streaming(model, tokenizer, inputs, settings, name)
        text = ""
        while (piece := await asyncio.wait_for(queue.get(), PATIENCE)) is not None:
            assert isinstance(piece, str), piece
            text += piece
        assert streamer.total_tokens > 0
        return text

    async def all_of(manager: Any) -> list[str]:
        manager.init_cb(model, settings)
        whole = (
            manager.generate_non_streaming(model, tokenizer, tokenizer(prompt), settings, f"whole-{prompt}")
            for prompt in PROMPTS
        )
        streams = (stream(manager, prompt, f"stream-{prompt}") for prompt in PROMPTS)
        results = await asyncio.gather(*whole, *streams)
        return [result if isinstance(result, str) else result[0] for result in results]

    manager = utils.CBGenerateManager()
    found = asyncio.run(all_of(manager))
    expected = [stock_text(stock, tokenizer, prompt, generation_config=settings) for prompt in PROMPTS]
    assert found == expected * 2
    assert manager.is_alive()
    assert model.paged.stats().num_steps < 4 * NUM_TOKENS
    manager.stop()
    model.paged.check_invariants()


def test_what_cannot_be_paged_is_served_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a model that is refused and so not served at all."""
    other = torch.nn.Linear(2, 2)
    monkeypatch.setattr(PagedModelManager.__bases__[0], "_load_model", lambda self: other)
    assert PagedModelManager._load_model(object.__new__(PagedModelManager)) is other
    manager = PagedGenerationState().get_manager("other@main")
    manager._share(other)
    assert type(manager._thread) is utils.InferenceThread
