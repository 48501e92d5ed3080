"""The engine API: `submit`, its handles, `engine.generate`, async, queues, statistics. Tokens are those of stock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessorList, TextStreamer

import hf_paged
from helpers.models import EOS, PAD, VOCAB, build, name_of, random_ids, tiny_tokenizer
from helpers.pairs import MakePair, Pair
from helpers.requests import ENDLESS, SAMPLE, Brake, Gate, blocks_in_use, settle, stock_rows
from helpers.user_code import USER_CODE, Asker, Boom, NextToken, StopAll
from helpers.waiting import PATIENCE, eventually, in_background
from hf_paged import PagedCache, Request, RequestOutput
from hf_paged.engine import submission
from hf_paged.engine.sampled_run import SampledRun
from hf_paged.engine.submission import Submissions
from hf_paged.model.weights_version import WeightsVersion

CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "sample": lambda: SAMPLE,
    "samples": lambda: SAMPLE | {"num_return_sequences": 4, "top_k": 0},
    "samples_eos_often": lambda: SAMPLE | {"num_return_sequences": 3, "eos_token_id": list(range(2, 30))},
    "beams": lambda: {"num_beams": 3, "num_return_sequences": 2},
    "beams_eos_often": lambda: {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": list(range(2, 14))},
    "beam_sample": lambda: SAMPLE | {"num_beams": 2},
    "lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "assisted": lambda: {"assistant_model": build("llama", layers=1, seed=9)},
    "penalties": lambda: {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "processor": lambda: {"logits_processor": LogitsProcessorList([NextToken()])},
    "processor_sample": lambda: SAMPLE | {"logits_processor": LogitsProcessorList([NextToken()])},
    "criterion": lambda: {"stopping_criteria": [StopAll()]},
    "guidance": lambda: {"guidance_scale": 1.5},
    "processor_eos": lambda: {"logits_processor": [NextToken()], "eos_token_id": list(range(2, 30))},
    "stop_strings": lambda: {"tokenizer": tiny_tokenizer(), "stop_strings": ["?", "Dm"]},
    "stop_strings_sample": lambda: SAMPLE | {"tokenizer": tiny_tokenizer(), "stop_strings": ["'"]},
    "stop_strings_beams": lambda: {"tokenizer": tiny_tokenizer(), "stop_strings": ["qf"], "num_beams": 2},
    "max_time": lambda: {"max_time": 1e6},
    "no_time": lambda: {"max_time": 0.0},
    "no_time_processor": lambda: {"max_time": 0.0, "logits_processor": [NextToken()]},
    "no_time_beams": lambda: {"max_time": 0.0, "num_beams": 2},
    "no_cache": lambda: {"use_cache": False},
    "config": lambda: {"generation_config": GenerationConfig(do_sample=True, top_k=5, num_return_sequences=2)},
}


def test_pad_tokens_in_a_prompt_are_hidden_as_generate_hides_them(pair: Pair) -> None:
    """Would break: a list that is read otherwise than the same ids as a tensor, a mask that doesn't count."""
    for place in (0, 4):
        ids = random_ids(1, 9)
        ids[0, place] = PAD
        mask, expected = torch.ones_like(ids), stock_rows(pair.stock, ids, max_new_tokens=8)
        assert expected != (shown := stock_rows(pair.stock, ids, max_new_tokens=8, attention_mask=mask))
        for prompt in (ids, ids[0], ids[0].tolist()):
            assert pair.engine.submit(prompt, max_new_tokens=8).result(PATIENCE).sequences == expected
        assert pair.engine.generate([ids[0].tolist()], max_new_tokens=8)[0].sequences == expected
        assert pair.engine.submit(prompt, max_new_tokens=8, attention_mask=mask).result(PATIENCE).sequences == shown


@pytest.mark.parametrize("name", CALLS)
def test_a_request_has_the_tokens_of_generate(pair: Pair, name: str) -> None:
    """Would break: any mode whose submitted form is prepared, drawn or cut in another way than `generate()`'s.

    A client is also told an answer that was cut off from one that has ended, or was stopped.
    """
    ids = random_ids(1, 5).repeat(1, 2)
    torch.manual_seed(3)
    expected = stock_rows(pair.stock, ids, max_new_tokens=12, **CALLS[name]())
    torch.manual_seed(3)
    output = pair.engine.submit(ids, max_new_tokens=12, **CALLS[name]()).result(PATIENCE)
    assert output.sequences == expected
    eos = CALLS[name]().get("eos_token_id", [EOS])
    reasons = ["eos" if row[-1] in eos else "length" if len(row) == 12 else "stop" for row in expected]
    assert output.finish_reasons == reasons and output.finish_reason == reasons[0]
    assert reasons[0] == "stop" or not name.startswith(("stop", "criterion", "no_time")), "the test is too easy"
    if "num_beams" in CALLS[name]():
        torch.manual_seed(3)
        details = pair.stock.generate(
            ids, max_new_tokens=12, return_dict_in_generate=True, output_scores=True, **CALLS[name]()
        )
        assert output.scores == pytest.approx(details.sequences_scores.tolist(), rel=1e-4)
    settle(pair)


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "empty_tensor": (torch.zeros(1, 0, dtype=torch.long), "empty"),
    "batch": (torch.ones(2, 3, dtype=torch.long), r"one prompt.*\(2, 3\)"),
    "scalar": (torch.tensor(3), r"one prompt.*\(\)"),
    "cube": (torch.ones(1, 1, 3, dtype=torch.long), "one prompt"),
    "floats": ([1.0, 2.0], r"integer token ids.*1\.0"),
    "float_tensor": (torch.ones(3), "integer token ids.*float32"),
    "complex_tensor": (torch.ones(3, dtype=torch.complex128), "integer token ids.*complex128"),
    "text": ("a text", "got 'a text'; tokenize it first"),
    "encoding": (tiny_tokenizer()("hello"), "give its input_ids"),
    "bools": ([True, False], "integer token ids.*True"),
    "bool_tensor": (torch.ones(3, dtype=torch.bool), "integer token ids.*bool"),
    "beyond": ([5, VOCAB], f"{VOCAB} is outside the model's vocabulary of {VOCAB}"),
    "negative": ([5, -1], "-1 is outside"),
    "huge": ([10**30], f"{10**30} is outside"),
    "huge_negative": ([5, -(10**30)], "outside"),
    "uint64_tensor": (torch.ones(3, dtype=torch.uint64), "integer token ids.*uint64"),
    "sparse_tensor": (torch.ones(1, 3, dtype=torch.int64).to_sparse(), "dense tensor.*sparse_coo"),
    "meta_tensor": (torch.ones(1, 3, dtype=torch.int64, device="meta"), "dense tensor.*on meta"),
    "nested_tensor": (partial(torch.nested.nested_tensor, [[5, 6]]), "dense tensor"),
    "jagged_tensor": (partial(torch.nested.nested_tensor, [[5, 6]], layout=torch.jagged), "dense tensor.*jagged"),
    "quantized_tensor": (partial(torch.quantize_per_tensor, torch.ones(3), 1.0, 0, torch.quint8), "ids.*quint8"),
    "with_gradient": (torch.ones(3, requires_grad=True), "integer token ids.*float32"),
    "float_array": (np.ones(3), "integer token ids.*float64"),
    "bool_array": (np.ones(3, dtype=bool), "integer token ids.*bool"),
    "string_array": (np.array(["a"]), "integer token ids"),
    "object_array": (np.array([5, "a"], dtype=object), "integer token ids"),
    "array_of_a_batch": (np.ones((2, 3), dtype=np.int64), r"one prompt.*\(2, 3\)"),
    "numpy_bools": ([np.True_], "integer token ids"),
    "nans": ([float("nan")], "integer token ids.*nan"),
    "bytearray": (bytearray(b"hello"), "integer token ids"),
    "set": ({5, 6}, "integer token ids"),
    "string": ("hello", "integer token ids.*hello"),
    "bytes": (b"hello", "integer token ids"),
    "nested": ([[1, 2]], r"integer token ids.*\[\[1, 2\]\]"),
    "nothing": (None, "integer token ids.*None"),
    "number": (5, "integer token ids"),
    "dict": ({"input_ids": [1, 2]}, "integer token ids"),
}
BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "streamer": ({"streamer": TextStreamer(tiny_tokenizer())}, "streamer: iterate the request"),
    "embeds": ({"inputs_embeds": torch.zeros(1, 3, 64)}, "inputs_embeds"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "hidden_states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "unknown": ({"max_new_token": 3}, "max_new_token"),
    "priority": ({"priority": "high"}, "priority must be an integer, got 'high'"),
    "salt": ({"cache_salt": ["a"]}, "cache_salt must be a string, an integer or bytes"),
    "id_type": ({"request_id": 7}, "request_id 7"),
    "beams": ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
    "samples": ({"num_return_sequences": 2}, "Greedy"),
    "temperature": ({"do_sample": True, "temperature": -1.0}, "temperature"),
    "streamed_beams": ({"num_beams": 2, "streamer": TextStreamer(tiny_tokenizer())}, "streamer"),
    "stop_without_tokenizer": ({"stop_strings": ["x"]}, "tokenizer"),
    "own_loop": ({"custom_generate": lambda model, input_ids, **_: input_ids}, "custom_generate"),
}


def refuses(pair: Pair, message: str, prompt: Any, **arguments: Any) -> None:
    """Asserts a `ValueError` at the call, before anything is allocated or runs."""
    before = pair.engine.stats()
    with pytest.raises(ValueError, match=message):
        pair.engine.submit(prompt, **{"max_new_tokens": 4} | arguments)
    after = pair.engine.stats()
    assert (after.num_steps, after.peak_blocks_in_use) == (before.num_steps, before.peak_blocks_in_use)
    assert after.num_waiting == after.num_running == 0


class WorksOnTheResult(LlamaForCausalLM):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs, return_dict_in_generate=True).sequences


def test_a_generate_that_works_on_the_result(pair: Pair) -> None:
    """Would break: a request without what the model makes of its tokens, or an error that says nothing of why."""
    model = hf_paged.patch(WorksOnTheResult(pair.paged.config).eval(), num_blocks=64)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)
    with pytest.raises(ValueError, match="changes what the loop returns"):
        model.paged.submit([5, 6], max_new_tokens=2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompt(pair: Pair, name: str) -> None:
    """Would break: an `IndexError` in a step of all requests, or a prompt that is silently read as another one."""
    prompt, message = BAD_PROMPTS[name]
    refuses(pair, message, prompt() if callable(prompt) else prompt)
    settle(pair)


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([5, 6, 7]),
        np.array([[5, 6, 7]], dtype=np.uint16),
        np.array([7, 6, 5], dtype=np.int32)[::-1],
        [np.int64(5), np.uint8(6), 7],
        [5, 6, 7],
        torch.tensor([5, 6, 7]),
        torch.tensor([[5, 6, 7]]),
        (5, 6, 7),
        range(5, 8),
        torch.tensor([5, 6, 7], dtype=torch.uint32),
        torch.tensor([[5, 6, 7]], dtype=torch.int8),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_every_form_of_a_prompt(pair: Pair, prompt: Any) -> None:
    request = pair.engine.submit(prompt, max_new_tokens=3)
    output = request.result(PATIENCE)
    assert output.sequences == stock_rows(pair.stock, torch.tensor([[5, 6, 7]]), max_new_tokens=3)
    assert output.token_ids == output.sequences[0]
    assert output.prompt_token_ids == request.prompt_token_ids == [5, 6, 7]
    assert output.request_id == request.request_id and output.scores is None
    assert request.is_done and request.result() is output


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_argument(pair: Pair, name: str) -> None:
    arguments, message = BAD_ARGUMENTS[name]
    refuses(pair, message, random_ids(1, 5), **arguments)
    settle(pair)


def test_what_could_outgrow_the_pool_is_refused_alone(make_pair: MakePair) -> None:
    pair = make_pair(num_blocks=16)
    ids = random_ids(1, 8)
    with Gate(2) as gate:
        others = [pair.engine.submit(ids, max_new_tokens=20, **ENDLESS)]
        others.append(pair.engine.submit(ids, max_new_tokens=20, **ENDLESS, **gate.arguments))
        assert gate.reached.wait(PATIENCE)
        for more in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, SAMPLE | {"num_return_sequences": 3}):
            with pytest.raises(
                ValueError, match=r"30 tokens and up to 40 new ones needs 1[89] KV blocks of 4 .* has 16"
            ):
                pair.engine.submit(random_ids(1, 30), max_new_tokens=40, **more)
    expected = stock_rows(pair.stock, ids, max_new_tokens=20, **ENDLESS)
    assert [other.result(PATIENCE).sequences for other in others] == [expected] * 2
    settle(pair)


def test_a_name_in_use(pair: Pair) -> None:
    """Would break: two requests of one name that get each other's tokens; or a name that is never free again."""
    with Gate() as gate:
        first = pair.engine.submit([5, 6], max_new_tokens=3, request_id="me", **gate.arguments)
        with pytest.raises(ValueError, match="'me' is running already"):
            pair.engine.submit([5, 6], max_new_tokens=3, request_id="me")
        for name in ("request-0", None, None):
            assert pair.engine.submit([5, 6], max_new_tokens=3, request_id=name).result(PATIENCE)
    assert first.result(PATIENCE).request_id == "me"
    for more in ({}, {"num_beams": 2}, {"max_new_tokens": -1}, {}):
        try:
            again = pair.engine.submit([5, 6], **{"max_new_tokens": 1} | more, request_id="me")
        except ValueError:
            continue  # refused for another reason: the name stays free
        assert again.result(PATIENCE).request_id == "me"
    settle(pair)


@pytest.mark.parametrize("arguments", [{}, {"prompt_lookup_num_tokens": 2}], ids=name_of)
def test_tokens_come_one_by_one(pair: Pair, arguments: dict[str, Any]) -> None:
    ids = random_ids(1, 9)
    expected = stock_rows(pair.stock, ids, max_new_tokens=12, **arguments)[0]
    with Gate(4) as gate:
        request = pair.engine.submit(ids, max_new_tokens=12, **arguments, **gate.arguments)
        tokens = iter(request)
        early = [next(tokens), next(tokens)]
        assert not request.is_done and request.finish_reason is None
        gate.open()
        assert early + list(tokens) == expected
    assert list(request) == expected, "a second look begins at the first token again"


def test_rows_of_the_engine_stream_too(pair: Pair) -> None:
    brake = Brake(pair)
    ids = random_ids(1, 9)
    with brake.at(step=3) as reached:
        request = pair.engine.submit(ids, max_new_tokens=12)
        reached()
        tokens = iter(request)
        early = [next(tokens) for _ in range(3)]
        assert not request.is_done
    expected = stock_rows(pair.stock, ids, max_new_tokens=12)[0]
    assert early + list(tokens) == expected
    metrics = request.result().metrics
    assert metrics is not None and 0 <= metrics.time_to_first_token <= metrics.duration


@pytest.mark.parametrize("arguments", [SAMPLE | {"num_return_sequences": 2}, {"num_beams": 2}], ids=name_of)
def test_only_one_sequence_can_be_streamed(pair: Pair, arguments: dict[str, Any]) -> None:
    request = pair.engine.submit([5, 6, 7], max_new_tokens=3, **arguments)
    with pytest.raises(ValueError, match="several sequences or beams"):
        iter(request)
    with pytest.raises(ValueError, match="several sequences or beams"):
        aiter(request)
    assert len(request.result(PATIENCE).sequences) >= 1


def test_a_timeout_ends_the_waiting_not_the_request(pair: Pair) -> None:
    brake = Brake(pair)
    with brake.at(step=2) as reached:
        request = pair.engine.submit(random_ids(1, 5), max_new_tokens=8)
        reached()
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError, match=r"request-0.*goes on"):
                request.result(timeout)
    assert request.result(PATIENCE).sequences == stock_rows(pair.stock, random_ids(1, 5), max_new_tokens=8)


def test_cancel_while_decoding(pair: Pair) -> None:
    """Would break: blocks that stay with a cancelled request for longer than the step it is in."""
    brake = Brake(pair)
    ids = random_ids(1, 6)
    with brake.at(step=5) as reached:
        request = pair.engine.submit(ids, max_new_tokens=100, **ENDLESS)
        other = pair.engine.submit(random_ids(1, 7), max_new_tokens=20, **ENDLESS)
        reached()
        request.cancel()
    tokens = request.result(PATIENCE).token_ids
    assert len(tokens) <= 7
    assert tokens == stock_rows(pair.stock, ids, max_new_tokens=100, **ENDLESS)[0][: len(tokens)]
    request.cancel()
    assert request.finish_reason == request.result().finish_reason == "cancelled"
    assert other.result(PATIENCE).sequences == stock_rows(pair.stock, random_ids(1, 7), max_new_tokens=20, **ENDLESS)
    other.cancel()
    assert other.result().finish_reason == other.finish_reason == "length"
    settle(pair)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=name_of)
def test_cancel_a_loop(pair: Pair, arguments: dict[str, Any]) -> None:
    with Gate(5) as gate:
        request = pair.engine.submit(random_ids(1, 6), max_new_tokens=100, **ENDLESS, **arguments, **gate.arguments)
        assert gate.reached.wait(PATIENCE)
        request.cancel()
    assert request.result(PATIENCE).finish_reason == "cancelled"
    assert len(request.result().token_ids) < 100
    settle(pair)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}, SAMPLE | {"num_return_sequences": 3}], ids=name_of)
def test_a_dropped_handle_cancels(pair: Pair, arguments: dict[str, Any]) -> None:
    brake = Brake(pair)
    with brake.at(step=2) as reached:
        request = pair.engine.submit(random_ids(1, 6), max_new_tokens=150, **ENDLESS, **arguments)
        reached()
        del request
        gc.collect()
    eventually(lambda: blocks_in_use(pair) == 0, "the blocks of a dropped request are held")
    assert pair.engine.stats().num_steps < 20
    settle(pair)


def test_iterating_keeps_the_handle(pair: Pair) -> None:
    expected = stock_rows(pair.stock, [5, 6, 7], max_new_tokens=12)[0]
    assert list(pair.engine.submit([5, 6, 7], max_new_tokens=12)) == expected
    assert [token for token in pair.engine.submit([5, 6, 7], max_new_tokens=12) if gc.collect(0) >= 0] == expected


def test_finished_requests_leave_nothing(pair: Pair) -> None:

    def count() -> int:
        gc.collect()
        kinds = (SampledRun, Request, hf_paged.PagedCache)
        return sum(isinstance(item, kinds) for item in gc.get_objects())

    before = count()
    for more in ({}, {"num_beams": 2}, {"logits_processor": [NextToken()]}, USER_CODE["processor"](Boom, 1)):
        requests = [pair.engine.submit([5, 6], max_new_tokens=3, **more) for _ in range(8)]
        requests.append(pair.engine.submit([5, 6], max_new_tokens=100, **ENDLESS))
        requests[-1].cancel()
        for request in requests:
            with contextlib.suppress(Boom):
                request.result(PATIENCE)
        del requests, request
    eventually(lambda: count() == before, "something is kept")


@pytest.mark.parametrize("arguments", [{}, {"logits_processor": [NextToken()]}], ids=["rows", "loops"])
def test_priorities(make_pair: MakePair, arguments: dict[str, Any]) -> None:
    pair = make_pair(max_num_seqs=1)
    brake = Brake(pair)
    ended: list[str] = []
    with brake.at() as reached:
        requests = [pair.engine.submit([5, 6], max_new_tokens=3, request_id="first", **arguments)]
        reached()
        for name, priority in (("a", 1), ("b", 0), ("c", 1), ("urgent", -5), ("d", 0)):
            requests.append(
                pair.engine.submit([5, 6], max_new_tokens=3, priority=priority, request_id=name, **arguments)
            )
        for request in requests:
            request.on_done(lambda request=request: ended.append(request.request_id))
    for request in requests:
        request.result(PATIENCE)
    assert ended == ["first", "urgent", "b", "d", "a", "c"]


class NewestFirst(hf_paged.FCFS):
    def order(self, group: Any) -> tuple[int, ...]:
        return (-group.arrival,)


# A prompt of 560 tokens is overtaken by those of two places behind it, and by no more.
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["first", "long", "a", "b", "c", "d"]),
        ("shortest-first", ["first", "a", "b", "long", "c", "d"]),
        (NewestFirst(), ["first", "d", "c", "b", "a", "long"]),
    ],
    ids=["fcfs", "shortest-first", "own"],
)
def test_policies(make_pair: MakePair, policy: str | hf_paged.Policy, expected: list[str]) -> None:
    pair = make_pair(max_num_seqs=1, policy=policy)
    brake = Brake(pair)
    prompts = {"first": [5, 6], "long": random_ids(1, 56)[0].tolist() * 10} | {name: [7, 8] for name in "abcd"}
    ended: list[str] = []
    with brake.at() as reached:
        requests = []
        for name, prompt in prompts.items():
            requests.append(pair.engine.submit(prompt, max_new_tokens=2, request_id=name))
            requests[-1].on_done(lambda name=name: ended.append(name))
            if name == "first":
                reached()
    for request, prompt in zip(requests, prompts.values()):
        stock = pair.stock.generate(torch.tensor([prompt]), max_new_tokens=2)
        assert request.result(PATIENCE).token_ids == stock[0, len(prompt) :].tolist()
    assert ended == expected


@pytest.mark.parametrize("method", ["order", "spare"])
def test_a_policy_that_raises(make_pair: MakePair, method: str) -> None:
    """Its key is asked for at the call, which fails alone; what it decides in a step concerns all."""
    policy = NewestFirst()
    pair = make_pair(policy=policy)
    brake = Brake(pair)
    with brake.at() as reached:
        running = pair.engine.submit([5, 6], max_new_tokens=4)
        reached()
        setattr(policy, method, Mock(side_effect=Boom))
        if method == "order":
            with pytest.raises(Boom):
                pair.engine.submit([7, 8], max_new_tokens=4)
            waiting = []
        else:
            waiting = [pair.engine.submit([7, 8], max_new_tokens=4), running]
    for request in waiting:
        with pytest.raises(Boom):
            request.result(PATIENCE)
    delattr(policy, method)
    if not waiting:
        assert len(running.result(PATIENCE).token_ids) == 4
    assert len(pair.engine.submit([7, 8], max_new_tokens=4).result(PATIENCE).token_ids) == 4
    pair.engine.check_invariants()


def test_a_policy_that_raises_over_a_kept_cache(make_pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    """Would break: rows that are in no queue any more, and blocks that are lost with them."""
    policy = NewestFirst()
    pair = make_pair(policy=policy)
    cache = hf_paged.PagedCache(pair.paged)
    ids = pair.paged.generate(random_ids(1, 6), max_new_tokens=3, past_key_values=cache)
    with patch.object(policy, "order", Mock(side_effect=Boom)):
        again = pair.paged.generate(ids, max_new_tokens=3, past_key_values=cache)
    assert torch.equal(again, pair.stock.generate(ids, max_new_tokens=3)) and "keep their place" in caplog.text
    with patch.object(policy, "order", Mock(return_value=None)), pytest.raises(ValueError, match="tuple of integers"):
        pair.engine.submit([5, 6], max_new_tokens=2)
    del cache
    pair.assert_all_free()


def test_a_limit_of_branches(make_pair: MakePair) -> None:
    pair = make_pair(max_branches=3)
    for arguments in ({"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}):
        name, value = list(arguments.items())[-1]
        with pytest.raises(ValueError, match=f"{name}={value} is above max_branches, which is 3 here"):
            pair.engine.submit([5, 6], max_new_tokens=2, **arguments)
        with pytest.raises(ValueError, match="max_branches"):
            pair.paged.generate(random_ids(1, 6), max_new_tokens=2, **arguments)
    pair.generate(input_ids=random_ids(1, 6), max_new_tokens=2, num_beams=3)


def test_a_full_queue(make_pair: MakePair) -> None:
    """Would break: a queue that grows for ever, or a `generate()` that fails where it only had to wait."""
    pair = make_pair(max_num_seqs=1, max_waiting=2)
    brake = Brake(pair)
    calls: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"logits_processor": [NextToken()]}]
    with brake.at() as reached:
        running = pair.engine.submit([5, 6], max_new_tokens=4)
        reached()
        waiting = [pair.engine.submit([5, 6], max_new_tokens=4) for _ in range(2)]
        for more in calls:
            with pytest.raises(hf_paged.QueueFullError, match="2 requests are waiting and max_waiting is 2"):
                pair.engine.submit([5, 6], max_new_tokens=4, **more)
        futures = [in_background(pair.paged.generate, random_ids(1, 6), max_new_tokens=3, **more) for more in calls]
        time.sleep(0.05)
        assert not any(future.done() for future in futures) and pair.engine.stats().num_waiting == 2
    for future, more in zip(futures, calls):
        expected = pair.stock.generate(random_ids(1, 6), max_new_tokens=3, **more)
        assert torch.equal(future.result(PATIENCE), expected)
    for request in (running, *waiting):
        assert request.result(PATIENCE).sequences == stock_rows(pair.stock, [5, 6], max_new_tokens=4)
    settle(pair)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}, {"logits_processor": [NextToken()]}], ids=name_of)
@pytest.mark.parametrize("max_waiting", [None, 1])
def test_many_ragged_prompts(make_pair: MakePair, arguments: dict[str, Any], max_waiting: int | None) -> None:
    """Would break: results in the order of their ends, lost prompts, or a queue that is found full."""
    pair = make_pair(max_num_seqs=3, num_blocks=64, max_waiting=max_waiting)
    prompts = [random_ids(1, 1 + 5 * seed % 17, seed=seed) for seed in range(10)]
    given = {"max_new_tokens": 6, "eos_token_id": list(range(2, 20))} | arguments
    outputs = pair.engine.generate([ids[0].tolist() for ids in prompts], **given)
    assert [output.sequences for output in outputs] == [stock_rows(pair.stock, ids, **given) for ids in prompts]
    assert all(isinstance(output, RequestOutput) for output in outputs)
    settle(pair)


def test_progress_bar(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    """Would break: hours without a sign of life, or noise that was not asked for."""
    prompts = [[5, 6], torch.tensor([7]), random_ids(1, 4)]
    assert len(pair.engine.generate(prompts, max_new_tokens=3)) == 3
    assert not capfd.readouterr().err
    assert len(pair.engine.generate(prompts, progress_bar=True, max_new_tokens=3)) == 3
    assert "3/3" in capfd.readouterr().err
    assert pair.engine.generate([], progress_bar=True) == []


def test_results_are_counted_while_prompts_are_submitted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a bar that stands still until the last prompt is queued; a look at all weights for each prompt."""
    order: list[str] = []
    requests: list[Request] = []
    submit, key = Submissions.submit, WeightsVersion.key

    class Bar(tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            order.append("result")
            return super().update(n)

    def slowly(self: Submissions, *args: Any, **kwargs: Any) -> Any:
        if requests:
            requests.pop().result(PATIENCE)
        order.append("prompt")
        requests.append(submit(self, *args, **kwargs))
        return requests[-1]

    monkeypatch.setattr(submission, "tqdm", Bar)
    monkeypatch.setattr(Submissions, "submit", slowly)
    monkeypatch.setattr(WeightsVersion, "key", lambda self: order.append("weights") or key(self))
    prompts = [random_ids(1, 3 + seed, seed=seed)[0].tolist() for seed in range(20)]
    assert len(pair.engine.generate(prompts, max_new_tokens=2, **ENDLESS)) == 20
    assert order.count("result") == order.count("prompt") == 20 and order.count("weights") < 20
    last_prompt = len(order) - order[::-1].index("prompt")
    assert order[:last_prompt].count("result") >= 5


def test_one_bad_prompt_of_many(pair: Pair) -> None:
    for bad, message in (([5, VOCAB], "outside"), ([], "empty"), ([5] * 2000, "2000 tokens")):
        with pytest.raises(ValueError, match=message):
            pair.engine.generate([[5, 6], [7, 8], bad, [9]], max_new_tokens=50, **ENDLESS)
        settle(pair)
    for prompts in ("text", torch.ones(2, 3, dtype=torch.long), 5, None):
        with pytest.raises(ValueError, match="list of prompts"):
            pair.engine.generate(prompts)


def test_await_and_async_for(pair: Pair) -> None:
    """Would break: an event loop that stands still while it waits, or tokens out of order among many requests."""
    prompts = [random_ids(1, 3 + seed, seed=seed) for seed in range(12)]
    expected = [stock_rows(pair.stock, ids, max_new_tokens=10)[0] for ids in prompts]
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            num_ticks += 1
            await asyncio.sleep(0)

    async def stream(ids: Tensor) -> list[int]:
        return [token async for token in pair.engine.submit(ids, max_new_tokens=10)]

    async def whole(ids: Tensor) -> list[int]:
        return (await pair.engine.submit(ids, max_new_tokens=10)).token_ids

    async def main() -> list[list[int]]:
        ticking = asyncio.create_task(tick())
        calls = [stream(ids) if i % 2 else whole(ids) for i, ids in enumerate(prompts)]
        try:
            return await asyncio.gather(*calls)
        finally:
            ticking.cancel()

    assert asyncio.run(main()) == expected
    assert num_ticks > 12
    settle(pair)


def test_async_errors(pair: Pair) -> None:

    async def main() -> None:
        with pytest.raises(Boom):
            await pair.engine.submit([5, 6], max_new_tokens=4, **USER_CODE["processor"](Boom, 0))
        request = pair.engine.submit([5, 6], max_new_tokens=4, **USER_CODE["processor"](Boom, 0))
        with pytest.raises(Boom):
            async for _ in request:
                pass
        assert request.finish_reason == "error"
        with pytest.raises(Boom):
            request.result()

    asyncio.run(main())
    settle(pair)


def test_stats_and_snapshot_of_running_requests(make_pair: MakePair) -> None:
    """Would break: a picture that contradicts the numbers beside it; a counter that falls."""
    pair = make_pair(num_blocks=40, block_size=4)
    assert pair.engine.stats().num_blocks == pair.engine.stats().num_free_blocks == 40
    brake = Brake(pair)
    before = asdict(pair.engine.stats())
    gauges = {"num_free_blocks", "num_running", "num_waiting", "num_swapped", "kv_tokens_stored", "kv_slots_allocated"}
    with Gate(3) as gate:
        held = pair.engine.submit(random_ids(1, 10), max_new_tokens=8, **ENDLESS, **gate.arguments)
        assert gate.reached.wait(PATIENCE)
        with brake.at(step=4) as reached:
            samples = pair.engine.submit(
                random_ids(1, 9, 1), max_new_tokens=30, num_return_sequences=3, **SAMPLE, **ENDLESS
            )
            reached()
            waiting = pair.engine.submit([5, 6], max_new_tokens=2)
            stats, picture = pair.engine.stats(), pair.engine.snapshot()
        blocks = Counter(block for g in picture["groups"] for s in g["sequences"] for block in s["block_table"])
        assert picture["num_blocks"] == 40 and picture["block_size"] == 4
        assert [max(count, 0) for count in picture["blocks"]] == [blocks[block] for block in range(40)]
        assert len(blocks) == stats.num_blocks - stats.num_free_blocks == stats.kv_slots_allocated // 4
        assert stats.num_running == 4 and stats.num_waiting == 1
        assert len(picture["running"]) == 2 and len(picture["waiting"]) == 1 and not picture["swapped"]
        assert 0 < stats.kv_tokens_stored <= stats.kv_slots_allocated
        assert stats.peak_blocks_in_use >= len(blocks)
        last = [event for event in picture["events"] if event["kind"] == "step"][-1]
        assert last["step"] == picture["num_steps"] == stats.num_steps and last["num_seqs"] == len(last["chunks"])
    for request in (held, samples, waiting):
        after = asdict(pair.engine.stats())
        assert all(after[name] >= before[name] for name in after if name not in gauges)
        before = after
        request.result(PATIENCE)
    assert pair.engine.stats().num_generated_tokens == 8 + 3 * 30 + 2
    assert pair.engine.snapshot()["groups"] == []
    settle(pair)


@pytest.mark.parametrize("arguments", [{}, {"logits_processor": [NextToken()]}, {"num_beams": 2}], ids=name_of)
def test_a_cache_salt_keeps_prefixes_apart(pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: users who can find out by the clock what others have asked."""
    ids = random_ids(1, 33)

    def hits(salt: Any) -> int:
        before = pair.engine.stats().prefix_cache_hit_tokens
        output = pair.engine.submit(ids, max_new_tokens=2, cache_salt=salt, **arguments).result(PATIENCE)
        assert output.sequences == stock_rows(pair.stock, ids, max_new_tokens=2, **arguments)
        return pair.engine.stats().prefix_cache_hit_tokens - before

    assert [hits("a"), hits("b"), hits(None)] == [0, 0, 0]
    assert all(hits(salt) >= 32 for salt in ("a", "b", None))
    assert hits("c") == 0
    assert pair.engine.reset_prefix_cache() >= 4 * 8
    assert hits("a") == 0


ASKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "assistant": lambda other: {"assistant_model": other},
    "generate": lambda other: {"logits_processor": [Asker(lambda ids: other.generate(ids, max_new_tokens=2))]},
    "beams": lambda other: {
        "logits_processor": [Asker(lambda ids: other.generate(ids, max_new_tokens=2, num_beams=2))]
    },
    "submit": lambda other: {
        "logits_processor": [Asker(lambda ids: other.paged.submit(ids, max_new_tokens=2).result(PATIENCE))]
    },
    "forward": lambda other: {
        "logits_processor": [Asker(lambda ids: other(ids, past_key_values=PagedCache(other), logits_to_keep=1))]
    },
}


@pytest.mark.parametrize("kind", ASKS)
def test_a_cache_salt_reaches_the_models_that_a_request_asks(pair: Pair, kind: str) -> None:
    ids, other = random_ids(1, 33), hf_paged.patch(build("llama", layers=1, seed=9), block_size=4, num_blocks=64)

    def hits(salt: Any) -> int:
        before = other.paged.stats().prefix_cache_hit_tokens
        pair.engine.submit(ids, max_new_tokens=3, cache_salt=salt, **ASKS[kind](other)).result(PATIENCE)
        return other.paged.stats().prefix_cache_hit_tokens - before

    assert [hits("a"), hits("b"), hits(None)] == [0, 0, 0]
    assert all(hits(salt) >= 32 for salt in ("a", "b", None))


def test_the_engine_of_an_unpatched_model(pair: Pair) -> None:
    """Would break: a whole stock generation, on the caller's thread, before anything is said; or another engine's."""
    engine = pair.engine
    calls: list[Callable[[], Any]] = [
        *(lambda: engine.submit([1, 2, 3], max_new_tokens=3), lambda: engine.generate([[1, 2, 3]], max_new_tokens=3)),
        *(engine.warm_up, engine.pause, engine.step),
    ]
    hf_paged.unpatch(pair.paged)
    for again in (False, True):
        if again:
            hf_paged.patch(pair.paged)
        for call in calls:
            with pytest.raises(RuntimeError, match="the model of this engine was unpatched"):
                call()
    assert engine.stats().num_steps == 0 and not engine.snapshot()["groups"]


def test_unpatch_while_requests_run(make_pair: MakePair) -> None:
    pair = make_pair(max_num_seqs=2)
    brake = Brake(pair)
    calls: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"logits_processor": [NextToken()]}]
    ids = random_ids(1, 6)
    given = {"max_new_tokens": 60} | ENDLESS
    engine, forward = pair.engine, type(pair.paged).forward  # as a loop has looked it up
    cache = hf_paged.PagedCache(pair.paged)
    with Gate(2) as gate, brake.at(step=8) as reached:
        requests = [engine.submit(ids, **given, **more) for more in (*calls, *calls, gate.arguments)]
        futures = [in_background(pair.paged.generate, ids, **given, **more) for more in calls]
        reached()
        unpatching = in_background(hf_paged.unpatch, pair.paged)
    unpatching.result(PATIENCE)
    for request in requests:
        assert request.result(PATIENCE).finish_reason == "cancelled"
    for future, more in zip(futures, calls):
        # Caught between two forwards, transformers' loop goes on without the engine.
        if (error := future.exception(PATIENCE)) is not None:
            assert isinstance(error, RuntimeError) and "unpatched" in str(error)
        else:
            assert torch.equal(future.result(), pair.stock.generate(ids, **given, **more))
    assert type(pair.paged) is type(pair.stock)
    with pytest.raises(RuntimeError, match="unpatched while"):
        forward(pair.paged, ids, past_key_values=cache)
    del cache
    assert torch.equal(pair.paged.generate(ids, max_new_tokens=9), pair.stock.generate(ids, max_new_tokens=9))
    gc.collect()
    engine.check_invariants()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize(
    "arguments",
    [{}, {"num_return_sequences": 3}, {"num_beams": 2}, {"logits_processor": [NextToken()]}],
    ids=name_of,
)
def test_draws_depend_on_the_state_at_entry_alone(pair: Pair, arguments: dict[str, Any]) -> None:
    ids = random_ids(1, 7)
    given = {"max_new_tokens": 15, "top_k": 0} | SAMPLE | ENDLESS | arguments
    expected = []
    for seed in range(6):
        torch.manual_seed(seed)
        expected.append(stock_rows(pair.stock, ids, **given))
    requests = []
    for seed in range(6):
        torch.manual_seed(seed)
        requests.append(pair.engine.submit(ids, **given))
    torch.manual_seed(1)
    unseeded = [pair.engine.submit(ids, **given) for _ in range(2)]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert [request.result(PATIENCE).sequences for request in requests] == expected
    first, second = (request.result(PATIENCE).sequences for request in unseeded)
    assert first == expected[1] and second not in expected, "the next request drew the same numbers"
    assert torch.equal(torch.get_rng_state(), state), "requests that ended in the background moved the generator"
