"""Every field of a completion and of a chat, beside stock `generate()`."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from helpers.models import tiny_lm, tiny_tokenizer
from helpers.serving import Served, serving, shared_server
from hf_paged.server.prompts import PLAIN_TEMPLATE
from hf_paged.server.settings import ServerSettings

PROMPT = "The door"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The king"}]
NEW = 12

served = shared_server(allow_priority=True)


def stock(prompt: str | list[int] = PROMPT, seed: int | None = None, **arguments: Any) -> list[str]:
    """The texts of stock `generate()`."""
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt])
    if seed is not None:
        torch.manual_seed(seed)
        arguments = {"do_sample": True, "top_k": 0} | arguments
    found = tiny_lm().generate(ids, **{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | arguments)
    whole = [tokenizer.decode(row, skip_special_tokens=True) for row in found.tolist()]
    return [text[len(tokenizer.decode(ids[0], skip_special_tokens=True)) :] for text in whole]


def chat_ids() -> list[int]:
    tokenizer = tiny_tokenizer()
    text = tokenizer.apply_chat_template(CHAT, chat_template=PLAIN_TEMPLATE, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def texts(reply: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in reply["choices"]]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what is asked for, and the same of generate()
    "temperature_0": ({"temperature": 0}, {}),
    "seed": ({"seed": 5}, {"seed": 5}),
    "temperature": ({"seed": 5, "temperature": 0.6}, {"seed": 5, "temperature": 0.6}),
    "top_p": ({"seed": 5, "top_p": 0.5}, {"seed": 5, "top_p": 0.5}),
    "top_k": ({"seed": 5, "top_k": 3}, {"seed": 5, "top_k": 3}),
    "top_k_off": ({"seed": 5, "top_k": -1}, {"seed": 5}),
    "min_p": ({"seed": 5, "min_p": 0.2}, {"seed": 5, "min_p": 0.2}),
    "n": ({"seed": 5, "n": 3}, {"seed": 5, "num_return_sequences": 3}),
    "repetition_penalty": ({"temperature": 0, "repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "min_tokens": ({"temperature": 0, "min_tokens": 9}, {"min_new_tokens": 9}),
    "num_beams": ({"num_beams": 3, "n": 2}, {"num_beams": 3, "num_return_sequences": 2}),
    "length_penalty": ({"num_beams": 3, "length_penalty": -2.0}, {"num_beams": 3, "length_penalty": -2.0}),
    "beam_sample": ({"num_beams": 2, "temperature": 1.0, "seed": 5}, {"num_beams": 2, "seed": 5}),
    "stop_token_ids": ({"temperature": 0, "stop_token_ids": [13]}, {"eos_token_id": [2, 13]}),
    "ignore_eos": ({"temperature": 0, "ignore_eos": True}, {"eos_token_id": 2047}),
    "user": ({"temperature": 0, "user": "me", "priority": 3, "cache_salt": "a", "stream_options": None}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_field_is_that_of_generate(served: Served, name: str) -> None:
    asked, arguments = CASES[name]
    reply = served.complete(max_tokens=NEW, **asked)
    assert texts(reply) == stock(**arguments)
    Completion.model_validate(reply, strict=True)
    if not asked.get("num_beams"):
        assert streamed(served, max_tokens=NEW, **asked)[0] == texts(reply)


def streamed(served: Served, path: str = "/v1/completions", **body: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The texts of a stream, and its events."""
    body = ({"messages": CHAT} if "chat" in path else {"prompt": PROMPT}) | body
    events = []
    with served.http.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line:
                assert line.startswith("data: ")
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    found = [json.loads(event) for event in events]
    parts: dict[int, str] = {}
    for event in found:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            parts[choice["index"]] = parts.get(choice["index"], "") + text
    return [parts[index] for index in sorted(parts)], found


def test_the_models_own_settings_are_not_a_requests() -> None:
    """Would break: fields whose default is another model's than OpenAI's, and that can't be set to it."""
    model = tiny_lm()
    own = {"do_sample": True, "min_p": 0.99, "min_new_tokens": 9, "typical_p": 0.2, "num_return_sequences": 2}
    model.generation_config.update(**own)
    given = {"max_tokens": NEW, "seed": 5}
    with serving(ServerSettings(model_name="tiny"), model) as running:
        assert texts(running.complete(**given)) == texts(running.complete(**given, min_p=0)) == stock(seed=5)
        assert texts(running.complete(max_tokens=NEW, temperature=0)) == stock()
        third = tiny_tokenizer()(PROMPT + stock()[0])["input_ids"][len(tiny_tokenizer()(PROMPT)["input_ids"]) + 2]
        reply = running.complete(max_tokens=NEW, temperature=0, stop_token_ids=[third])
        assert reply["usage"]["completion_tokens"] <= 3


def test_stop_strings_behind_the_least_tokens(served: Served) -> None:
    given = {"max_tokens": NEW, "temperature": 0, "stop": [" "]}
    assert served.complete(**given)["usage"]["completion_tokens"] < 8
    reply = served.complete(**given, min_tokens=8)
    text, whole = texts(reply)[0], stock()[0]
    assert reply["usage"]["completion_tokens"] >= 8 and whole.startswith(text) and " " in text
    assert streamed(served, **given, min_tokens=8)[0] == [text]


@pytest.mark.parametrize("kind", ["texts", "ids", "one_of_ids"])
def test_prompts(served: Served, kind: str) -> None:
    """Would break: a list of prompts in another order, token ids taken for texts."""
    prompts = [PROMPT, "The sea is"]
    ids = [tiny_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    prompt: Any = {"texts": prompts, "ids": ids, "one_of_ids": ids[0]}[kind]
    reply = served.complete(prompt=prompt, max_tokens=NEW, temperature=0, n=2, echo=True)
    asked = prompts[:1] if kind == "one_of_ids" else prompts
    assert texts(reply) == [prompt + text for prompt in asked for text in stock(prompt) * 2]
    assert streamed(served, prompt=prompt, max_tokens=NEW, temperature=0, n=2, echo=True)[0] == texts(reply)


def test_best_of(served: Served) -> None:
    """Would break: the first samples instead of the likeliest."""
    given = {"max_tokens": 6, "seed": 5, "logprobs": 0}
    every = served.complete(**given, n=6)["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]) / 6)
    best = served.complete(max_tokens=6, seed=5, n=2, best_of=6)
    assert texts(best) == [choice["text"] for choice in ranked[:2]]
    assert best["usage"]["completion_tokens"] == 36 and best["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stop", ["e", [" of", "ing", "\n"], ["the king of "]], ids=str)
def test_stop_strings(served: Served, stop: Any) -> None:
    """Would break: a part of a stop string in a delta; a text that goes on behind one."""
    given = {"max_tokens": 60, "seed": 3, "n": 4}
    stops = [stop] if isinstance(stop, str) else stop
    whole = stock(seed=3, num_return_sequences=4, max_new_tokens=60)
    places = [[(at + len(own), at) for own in stops if (at := text.find(own)) >= 0] for text in whole]
    expected = [text[: min(found)[1]] if found else text for text, found in zip(whole, places)]
    reply = served.complete(stop=stop, **given)
    assert texts(reply) == expected
    reasons = [choice["finish_reason"] for choice in reply["choices"]]
    assert reasons == ["stop" if found else "length" for found in places]
    deltas, events = streamed(served, stop=stop, **given)
    assert deltas == expected
    said = {c["index"]: c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]}
    assert [said[index] for index in range(4)] == reasons
    served.settle()


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_logprobs(served: Served, is_chat: bool) -> None:
    """Those of stock's logits, streamed or not."""
    ids = chat_ids() if is_chat else tiny_tokenizer()(PROMPT)["input_ids"]
    asked: dict[str, Any] = {"max_tokens": NEW, "temperature": 0}
    if is_chat:
        path, asked = "/v1/chat/completions", asked | {"logprobs": True, "top_logprobs": 3}
    else:
        path, asked = "/v1/completions", asked | {"logprobs": 3}
    body = {"messages": CHAT} if is_chat else {"prompt": PROMPT}
    reply = served.post(path, body | asked).json()
    pieces = [event["choices"][0]["logprobs"] for event in streamed(served, path, **asked)[1] if event["choices"]]
    model = tiny_lm()
    whole = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    expected = model(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1).detach()
    tokens = whole[0, len(ids) :].tolist()
    chosen = [float(row[token]) for row, token in zip(expected, tokens)]
    said = reply["choices"][0]["logprobs"]
    if is_chat:
        said = said["content"]
        assert [each["logprob"] for each in said] == pytest.approx(chosen, abs=1e-3)
        again = [each for piece in pieces if piece for each in piece["content"]]
        assert [each["token"] for each in again] == [each["token"] for each in said]
        assert [each["logprob"] for each in again] == pytest.approx(chosen, abs=1e-3)
        for each, row in zip(said, expected):
            best = [tiny_tokenizer().decode([token]) for token in row.topk(3).indices.tolist()]
            assert [other["token"] for other in each["top_logprobs"]] == best
            assert bytes(each["bytes"]).decode() == each["token"]
    else:
        assert said["token_logprobs"] == pytest.approx(chosen, abs=1e-3)
        assert "".join(said["tokens"]) == reply["choices"][0]["text"]
        assert said["text_offset"][1] == len(said["tokens"][0])
        for name in ("tokens", "text_offset", "token_logprobs"):
            again = [each for piece in pieces for each in piece[name]]
            assert again == (said[name] if name != "token_logprobs" else pytest.approx(said[name], abs=1e-3))


def test_logprobs_of_transformers_own_loop() -> None:
    """Would break: tokens that are read as they come, before it is known how likely they were."""
    model = tiny_lm()
    model.register_forward_hook(lambda *_: time.sleep(0.01))  # a model that takes its time
    with serving(model=model) as served:
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1}
        reply, (_, events) = served.complete(**asked), streamed(served, **asked)
        assert served.engine.stats().detours, "the engine chose the tokens"
    said = reply["choices"][0]["logprobs"]
    assert len(said["token_logprobs"]) == 6 and "".join(said["tokens"]) == reply["choices"][0]["text"]
    pieces = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [token for piece in pieces for token in piece["tokens"]] == said["tokens"]


@pytest.mark.parametrize("given", [{}, {"n": 2, "seed": 5}, {"max_tokens": 0}, {"num_beams": 2}], ids=str)
def test_logprobs_of_an_echoed_prompt(served: Served, given: dict[str, Any]) -> None:
    """Would break: the logits of the wrong place, another prompt's, offsets that are those of the text alone."""
    tokenizer, model, prompts = tiny_tokenizer(), tiny_lm(), [PROMPT, "The sea is blue"]
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": NEW, "temperature": 0, "echo": True, "logprobs": 2}
    asked |= given
    reply = served.complete(**asked)
    if "num_beams" not in given:
        assert streamed(served, **asked)[0] == texts(reply)
    for number, choice in enumerate(reply["choices"]):
        prompt, said = prompts[number // asked.get("n", 1)], choice["logprobs"]
        ids = tokenizer(prompt)["input_ids"]
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
        chosen = [float(row[token]) for row, token in zip(rows, ids[1:])]
        assert said["token_logprobs"][0] is None is said["top_logprobs"][0]
        assert said["token_logprobs"][1 : len(ids)] == pytest.approx(chosen, abs=1e-3)
        assert len(said["tokens"]) == len(ids) + asked["max_tokens"]
        for row, top in zip(rows, said["top_logprobs"][1 : len(ids)]):
            assert {tokenizer.decode([token]) for token in row.topk(2).indices.tolist()} <= set(top)
        assert choice["text"].startswith(prompt) and (choice["text"] == prompt) == (asked["max_tokens"] == 0)
        for token, offset in list(zip(said["tokens"], said["text_offset"]))[len(ids) - 1 :]:
            assert choice["text"][offset:].startswith(token)
    if "num_beams" not in given:
        pieces: dict[int, list[Any]] = {}
        for event in streamed(served, **asked)[1]:
            for choice in event["choices"]:
                pieces.setdefault(choice["index"], []).extend(choice["logprobs"]["text_offset"])
        assert [pieces[i] for i in sorted(pieces)] == [each["logprobs"]["text_offset"] for each in reply["choices"]]


@pytest.mark.parametrize("ignores", [False, True])
def test_ends_of_text_in_a_prompt_are_no_padding(ignores: bool) -> None:
    """Would break: tokens of a prompt that are hidden, since the tokenizer pads with them."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.pad_token = tokenizer.eos_token
    ids = [*tokenizer("The sea")["input_ids"], tokenizer.eos_token_id, *tokenizer("The king")["input_ids"]]
    with serving(tokenizer=tokenizer) as served:
        reply = served.complete(prompt=ids, max_tokens=NEW, temperature=0, ignore_eos=ignores)
        assert not served.engine.stats().detours, "transformers' own loop"
    ends = {"eos_token_id": None} if ignores else {}
    row = tiny_lm().generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=NEW, do_sample=False, **ends
    )
    assert texts(reply) == [tokenizer.decode(row[0, len(ids) :], skip_special_tokens=True)]


@pytest.mark.parametrize("hides", [False, True])
def test_offsets_behind_special_tokens(served: Served, hides: bool) -> None:
    """Would break: special tokens that count although they are left out, or that don't although they are shown."""
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.bos_token_id, *tokenizer("The sea")["input_ids"], tokenizer.eos_token_id]
    asked = {"logit_bias": {str(tokenizer.eos_token_id): 100}, "ignore_eos": True, "skip_special_tokens": hides}
    choice = served.complete(prompt=ids, echo=True, logprobs=0, max_tokens=3, **asked)["choices"][0]
    shown = ["" if hides and token in tokenizer.all_special_tokens else token for token in choice["logprobs"]["tokens"]]
    assert "".join(shown) == choice["text"]
    assert choice["logprobs"]["text_offset"] == [len("".join(shown[:place])) for place in range(len(shown))]


@pytest.mark.parametrize(
    "given",
    [{}, {"n": 2, "seed": 5, "temperature": 1}, {"max_tokens": 0}, {"num_beams": 2}, {"echo": True, "logprobs": 1},
     {"prompt_logprobs": 0}, {"messages": CHAT}],
    ids=str,
)  # fmt: skip
def test_prompt_logprobs(served: Served, given: dict[str, Any]) -> None:
    """Would break: another prompt's, a rank of the likeliest alone, numbers that echo's logprobs ask for."""
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "prompt_logprobs": 3} | given
    if "messages" in given:
        reply = served.post("/v1/chat/completions", asked).json()
        prompts = [(chat_ids(), reply["prompt_logprobs"])]
        ChatCompletion.model_validate(reply)
        assert all("logprobs" in choice and choice["logprobs"] is None for choice in reply["choices"])
    else:
        texts = [PROMPT, "The sea is blue"]
        reply = served.complete(prompt=texts, **asked)
        ids = [tiny_tokenizer()(text)["input_ids"] for text in texts]
        n = asked.get("n", 1)
        prompts = [(ids[choice["index"] // n], choice["prompt_logprobs"]) for choice in reply["choices"]]
        assert len(prompts) == 2 * n
        for choice in reply["choices"]:
            top = (choice["logprobs"] or {"top_logprobs": [None]})["top_logprobs"]
            assert all(len(each) <= 2 for each in top[1:]), "echo's logprobs are as many as were asked for"
    model, tokenizer = tiny_lm(), tiny_tokenizer()
    for tokens, said in prompts:
        assert said[0] is None and len(said) == len(tokens)
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1).detach()
        for row, token, each in zip(rows[:-1], tokens[1:], said[1:], strict=True):
            likeliest = row.argsort(descending=True).tolist()
            wanted = [token, *(other for other in likeliest[: asked["prompt_logprobs"]] if other != token)]
            assert list(each) == [str(other) for other in wanted]
            for other in wanted:
                found = each[str(other)]
                assert found["logprob"] == pytest.approx(float(row[other]), abs=1e-3)
                assert found["rank"] == likeliest.index(other) + 1
                assert found["decoded_token"] == tokenizer.decode([other])


def test_a_chat(served: Served) -> None:
    ids = chat_ids()
    given: dict[str, Any] = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_completion_tokens": NEW}
    reply = served.client.chat.completions.create(**given)
    assert reply.choices[0].message.content == stock(ids)[0]
    assert reply.usage is not None and reply.usage.prompt_tokens == len(ids)
    ChatCompletion.model_validate(reply.model_dump(), strict=True)
    chunks = list(served.client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == stock(ids)[0]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == reply.usage and [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    parts = [{"type": "text", "text": CHAT[1]["content"]}]
    again = served.client.chat.completions.create(**given | {"messages": [CHAT[0], {"role": "user", "content": parts}]})
    assert again.choices[0].message.content == reply.choices[0].message.content


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_that_is_counted_on(served: Served, path: str) -> None:
    """As vLLM's clients ask for it."""
    given = {"max_tokens": NEW, "ignore_eos": True, "n": 2}
    events = streamed(served, path, stream_options={"include_usage": True, "continuous_usage_stats": True}, **given)[1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 2 * NEW and len(set(counts)) > 2
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    assert not any("usage" in event for event in streamed(served, path, **given)[1])


def test_tokens_and_models(served: Served) -> None:
    ids = tiny_tokenizer()(PROMPT)["input_ids"]
    assert served.post("/tokenize", {"prompt": PROMPT}).json()["tokens"] == ids
    assert served.post("/tokenize", {"messages": CHAT}).json()["tokens"] == chat_ids()
    assert served.post("/detokenize", {"tokens": ids}).json()["prompt"] == tiny_tokenizer().decode(ids)
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").id == "tiny"
    assert [served.http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_metrics(served: Served) -> None:
    served.complete(max_tokens=4)
    lines = served.http.get("/metrics").text.splitlines()
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if not line.startswith("#")}
    label = '{model_name="tiny"}'
    assert values[f"vllm:num_requests_running{label}"] == values[f"vllm:num_requests_waiting{label}"] == 0
    assert values[f"vllm:kv_cache_usage_perc{label}"] == 0
    for name in ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count",
                 "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
                 "prefix_cache_queries_total"):  # fmt: skip
        assert values[f"vllm:{name}{label}"] > 0, name
    assert values[f"hf_paged:blocks_allocated_total{label}"] > 0
    assert values['vllm:request_success_total{finished_reason="length",model_name="tiny"}'] > 0
