"""A caller waits for the device once, for work of its own, and never for the steps, which are on a stream of their own:
else callers slow each other down, and requests come into the batch one by one."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pretend_cuda
import pytest
import torch
from pretend_cuda import Event
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

import hf_paged
from helpers.models import build, ragged_batch, random_ids, tiny_tokenizer
from helpers.pairs import assert_same, logged_messages
from helpers.waiting import join
from hf_paged.engine.executor import StepExecutor
from hf_paged.memory.streams import Handover, steps_stream
from hf_paged.model.step_memory import StepMemory

CUDA = torch.device("cuda", 0)
SHORT = {"max_new_tokens": 3, "eos_token_id": None, "do_sample": False}


@contextmanager
def waits() -> Iterator[list[Event]]:
    """Where the host waited for the device, but for the loop that waits for a step's tokens."""
    collect, collecting, found = StepExecutor.collect, threading.local(), []

    def marked(self: StepExecutor) -> None:
        collecting.on = True
        try:
            collect(self)
        finally:
            collecting.on = False

    def note(event: Event) -> None:
        if event.kind in (*pretend_cuda.BLOCKING, "wait") and not getattr(collecting, "on", False):
            found.append(event)

    with pretend_cuda.watch() as seen, mock.patch.object(StepExecutor, "collect", marked):
        seen.notify = note
        yield found
    assert not seen.of("race")


def text(events: list[Event]) -> str:
    return "\n".join(f"{event.kind} {event.detail}, stream {event.stream}, at {event.site}" for event in events)


def for_steps(events: list[Event]) -> list[Event]:
    """Those that waited for the stream of the steps, or for everything."""
    return [event for event in events if event.stream in (-1, steps_stream(CUDA).stream_id)]


class Models:
    """A stock model on the device, and its patched copy, whose first steps are behind it."""

    def __init__(self) -> None:
        self.stock = build("llama").to("cuda")
        self.paged = hf_paged.patch(copy.deepcopy(self.stock), block_size=4, num_blocks=300, cuda_graphs=False)
        self.ids = random_ids(2, 9).to("cuda")
        self.ragged = {name: value.to("cuda") for name, value in ragged_batch((9, 6, 2)).items()}
        for sampling in (False, True):
            self.paged.generate(self.ids, max_new_tokens=2, do_sample=sampling)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


class Shift(LogitsProcessor):
    """A user's own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.is_cuda and scores.is_cuda
        return scores.roll(1, dims=-1)


SAMPLING = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3}
PROCESSORS = {
    **{"repetition_penalty": 1.3, "min_new_tokens": 2, "eos_token_id": [3, 5], "pad_token_id": 0},
    **{"suppress_tokens": [7, 8], "begin_suppress_tokens": [9], "forced_eos_token_id": 5},
}
BIAS: dict[str, Any] = {"bad_words_ids": [[7]], "sequence_bias": {(11,): 2.0}}
if hasattr(SequenceBiasLogitsProcessor([[[1], 1.0]]), "multi_token_biases"):  # else made anew in every step (5.17)
    BIAS = {"bad_words_ids": [[7], [8, 9]], "sequence_bias": {(11,): 2.0, (12, 13): 3.0}}
SCORES = {"return_dict_in_generate": True, "output_scores": True}
BEAMS = {"num_beams": 3, "num_return_sequences": 2}

# Of each call: its arguments, and how often each forward of transformers' loop may wait for what hf_paged looks at
# (`None`: there are none, the engine samples).
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], int | None]] = {
    "greedy": (dict, None),
    "padded": (lambda: {"input_ids": None}, None),
    "sampling": (lambda: SAMPLING, None),
    "samples": (lambda: SAMPLING | {"num_return_sequences": 2}, None),
    "processors": (lambda: PROCESSORS, None),
    "bias": (lambda: BIAS | {"eos_token_id": 3}, None),
    "own_items": (lambda: {"logits_processor": [SuppressTokensLogitsProcessor([7], device="cuda")]}, None),
    "stop_strings": (lambda: {"stop_strings": ["a"], "tokenizer": tiny_tokenizer(), "eos_token_id": 3}, None),
    "beams": (lambda: BEAMS, None),
    "beam_scores": (lambda: BEAMS | SCORES, 3),  # ids, decided prompts, beams that go on
    "users_processor": (lambda: {"logits_processor": LogitsProcessorList([Shift()])}, 1),
    "scores": (lambda: SCORES, 1),
    "prompt_lookup": (lambda: {"prompt_lookup_num_tokens": 2}, 2),  # 5.17 also gives what it crops
}


@pytest.mark.parametrize("name", CALLS)
def test_generate(models: Models, name: str) -> None:
    """Would break: a look at ids, masks or special tokens on the device; results, draws or processors elsewhere than
    stock has them; transformers' warning about inputs on another device than the model."""
    make, per_forward = CALLS[name]
    arguments = {"input_ids": models.ids[: 1 if name == "prompt_lookup" else 2]} | SHORT | make()
    if arguments["input_ids"] is None:
        arguments |= models.ragged
    if name == "stop_strings":  # whose table is made once
        models.paged.generate(**arguments)
    results, draws = [], []
    num_steps = models.paged.paged.stats().num_steps
    for model in (models.stock, models.paged):
        torch.manual_seed(0)
        with warnings.catch_warnings(), waits() as found:
            warnings.filterwarnings("error", message="You are calling .generate")
            results.append(model.generate(**arguments))
        draws.append(torch.rand(3, device="cuda"))
    assert_same(*results)
    assert torch.equal(*draws)
    assert not for_steps(found), text(found)
    own = [event for event in found if event.site.startswith("hf_paged/kernels/transfers.py")]
    if per_forward is None:
        assert len(found) <= 1, text(found)
    else:
        num_steps = models.paged.paged.stats().num_steps - num_steps
        assert len(own) <= 1 + per_forward * num_steps, text(own)
        # Behind the redirected draws it is transformers' loop that waits.
        stray = [e for e in found if e.kind != "wait" and e.site.startswith("hf_paged/") and "/random.py" not in e.site]
        assert not stray, text(stray)


REQUESTS = {"greedy": {}, "sampling": SAMPLING, "processors": PROCESSORS, "beams": BEAMS}
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda ids: ids.tolist(),
    "array": lambda ids: ids.numpy(),
    "cpu": lambda ids: ids,
    "cuda": lambda ids: ids.to("cuda"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REQUESTS)
def test_submit(models: Models, name: str, form: str) -> None:
    """Would break: a prompt that is brought to the device before transformers prepares the request, a seed drawn there
    for what comes next."""
    prompt, arguments = FORMS[form](random_ids(1, 9)[0]), SHORT | REQUESTS[name]
    torch.manual_seed(0)
    expected = models.stock.generate(models.ids[:1], **arguments)[:, 9:].tolist()
    torch.manual_seed(0)
    models.paged.paged.pause()
    try:
        with waits() as found:
            request = models.paged.paged.submit(prompt, **arguments)
        own = [event for event in found if event.thread == threading.current_thread().name]
    finally:
        models.paged.paged.resume()
    sequences = request.result(100).sequences
    assert sequences == [row[: len(tokens)] for row, tokens in zip(expected, sequences, strict=True)]
    assert len(own) <= (form == "cuda") and not for_steps(own), text(own)


OTHERS: dict[str, Callable[[Models], dict[str, Any]]] = {
    "embeddings": lambda models: {"inputs_embeds": models.stock.get_input_embeddings()(models.ids)},
    "negative_prompt": lambda models: {"negative_prompt_ids": models.ids[:, :4], "guidance_scale": 1.5},
    "watermark": lambda models: {"watermarking_config": {"greenlist_ratio": 0.3}},
    "no_cache": lambda models: {"use_cache": False},
    "early_eos": lambda models: BEAMS | {"eos_token_id": list(range(3, 60)), "pad_token_id": 0},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_in(models: Models, name: str) -> None:
    """Would break: tensors that are left on the host, or brought there where transformers computes with them."""
    arguments = {"input_ids": models.ids} | SHORT | OTHERS[name](models)
    results = []
    for model in (models.stock, models.paged):
        torch.manual_seed(0)
        results.append(model.generate(**arguments))
    assert_same(*results)


def test_prompts_on_the_host(models: Models) -> None:
    """Would break: logits that a step brings to where the caller has its prompt."""
    ids = random_ids(2, 9)
    with waits() as found:
        result = models.paged.generate(ids, **SHORT)
    assert torch.equal(result, models.stock.generate(ids.to("cuda"), **SHORT).cpu()) and not found, text(found)


def test_many_prompts(models: Models) -> None:
    """Would break: anything that waits once a prompt."""
    engine = models.paged.paged
    prompts = [ids if index % 2 else ids.tolist() for index, ids in enumerate(random_ids(256, 3).to("cuda"))]
    engine.pause()
    try:
        with waits() as found:
            requests = [engine.submit(prompt, max_new_tokens=1) for prompt in prompts]
        for request in requests:
            request.cancel()
    finally:
        engine.resume()
    assert len(found) <= 128 and not for_steps(found), text(found[:10])
    with waits() as found:
        results = engine.generate(prompts[:8], max_new_tokens=2, eos_token_id=None)
    assert [len(result.token_ids) for result in results] == [2] * 8
    assert len(found) <= 4 and not for_steps(found), text(found)


def test_a_request_after_another_draws_anew(models: Models) -> None:
    torch.manual_seed(0)
    requests = [models.paged.paged.submit([1, 2, 3], **SHORT | SAMPLING | {"max_new_tokens": 6}) for _ in range(3)]
    assert len({tuple(request.result(100).token_ids) for request in requests}) == 3


class Prepares(type(build("llama"))):  # type: ignore[misc]
    """A model whose own preparation wants its tensors where the caller has them."""

    def _prepare_attention_mask_for_generation(self, inputs_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert inputs_tensor.is_cuda
        return super()._prepare_attention_mask_for_generation(inputs_tensor, *args, **kwargs)


class Expands(type(build("llama"))):  # type: ignore[misc]
    """The same of what transformers 5.17 has as a static method."""

    def _expand_inputs_for_generation(self, *args: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        assert input_ids.is_cuda
        return super()._expand_inputs_for_generation(*args, input_ids=input_ids, **kwargs)


@pytest.mark.parametrize("kind", [Prepares, Expands])
def test_a_models_own_preparation_sees_the_device(models: Models, kind: type) -> None:
    model = copy.deepcopy(models.stock)
    model.__class__ = kind
    paged = hf_paged.patch(model, block_size=4, num_blocks=32, cuda_graphs=False)
    expected = models.stock.generate(models.ids, **SHORT)
    assert torch.equal(paged.generate(models.ids, **SHORT), expected)
    assert paged.paged.submit([1, 2, 3], **SHORT).result(100).token_ids


class Samples(type(build("llama"))):  # type: ignore[misc]
    """A model with a loop of its own, which takes its arguments as transformers gives them."""

    def _sample(self, input_ids: Tensor, *, generation_config: Any, **kwargs: Any) -> Any:
        assert input_ids.is_cuda and generation_config._pad_token_tensor.is_cuda
        return super()._sample(input_ids, generation_config=generation_config, **kwargs)


def test_a_models_own_loop_sees_the_device(models: Models) -> None:
    model = copy.deepcopy(models.stock)
    model.__class__ = Samples
    expected = model.generate(models.ids, **SHORT, pad_token_id=0)
    paged = hf_paged.patch(model, block_size=4, num_blocks=32, cuda_graphs=False)
    assert torch.equal(paged.generate(models.ids, **SHORT, pad_token_id=0), expected)


class Packed(torch.nn.Linear):
    """As quantized layers keep their weights: not as a matrix."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.weight.view(self.out_features, -1))


def test_a_head_with_packed_weights(models: Models) -> None:
    """Would break: a table of biased tokens that is as long as the head's weights."""
    model = copy.deepcopy(models.stock)
    head = Packed(model.lm_head.in_features, model.lm_head.out_features, bias=False, device="cuda")
    head.weight = torch.nn.Parameter(model.lm_head.weight.detach().reshape(-1, 1))
    model.lm_head = head
    paged = hf_paged.patch(model, block_size=4, num_blocks=32, cuda_graphs=False)
    arguments = SHORT | {"bad_words_ids": [[7], [8, 9]]}
    assert torch.equal(paged.generate(models.ids, **arguments), models.stock.generate(models.ids, **arguments))


def test_patching_draws_nothing(models: Models) -> None:
    """Would break: weights of a probe that are seeded on all devices."""
    model = copy.deepcopy(models.stock)
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    hf_paged.patch(model)
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(torch.cuda.get_rng_state(), before[1])


def test_right_padding_is_warned_of(models: Models) -> None:
    """Would break: a preparation that doesn't look at the mask."""
    given = {name: value.to("cuda") for name, value in ragged_batch((9, 6), side="right").items()}
    said = []
    for model in (models.stock, models.paged):
        with logged_messages() as messages:
            model.generate(**given, **SHORT | {"pad_token_id": 0})
        said.append([message for message in messages if "right-padding" in message[1]])
    assert said[0] and said[0] == said[1]


@pytest.mark.parametrize("way", ["generate", "submit", "forward", "padded"])
def test_order_of_streams(models: Models, way: str) -> None:
    """Would break: a step that overtakes what its caller queued before (the prompt, new weights); a caller that reads
    logits before they are there, or waits for more than those."""
    order: list[str] = []
    steps, side = steps_stream(CUDA), torch.cuda.Stream()
    own_wait, own_event = pretend_cuda.Stream.wait_stream, pretend_cuda.Stream.wait_event
    names = {steps.stream_id: "steps", side.stream_id: "caller"}

    def wait_stream(self: Any, other: Any) -> None:
        order.append(f"{names[self.stream_id]} for {names[other.stream_id]}")
        own_wait(self, other)

    def wait_event(self: Any, event: Any) -> None:
        order.append(f"{names[self.stream_id]} for an event")
        own_event(self, event)

    cache = hf_paged.PagedCache(models.paged)
    ways: dict[str, tuple[Callable[[], Any], list[str]]] = {
        "generate": (lambda: models.paged.generate(models.ids, **SHORT), ["steps for caller"]),
        "submit": (lambda: models.paged.paged.submit([1, 2], **SHORT).result(100), ["steps for caller"]),
        "forward": (
            lambda: models.paged(models.ids, past_key_values=cache),
            ["steps for caller", "caller for an event"],
        ),
        "padded": (
            lambda: models.paged(models.ids, past_key_values=cache, output_hidden_states=True),
            ["steps for caller", "caller for steps"],
        ),
    }
    call, expected = ways[way]
    stream = pretend_cuda.Stream
    with (
        mock.patch.object(stream, "wait_stream", wait_stream),
        mock.patch.object(stream, "wait_event", wait_event),
        torch.cuda.stream(side),
        pretend_cuda.watch() as seen,
    ):
        call()
    assert order and order == expected * (len(order) // len(expected)), order
    assert len(order) == len(expected), order
    if way not in ("generate", "submit"):  # what comes from the steps is used on the caller's stream
        assert side.stream_id in {event.stream for event in seen.of("record_stream")}


def test_the_sizing_step_is_among_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a trial step whose memory, when it is over, only the first caller's stream can use again."""
    streams: list[int] = []
    measure = StepMemory.activation_bytes

    def noting(self: StepMemory, num_tokens: int) -> int:
        streams.append(torch.cuda.current_stream().stream_id)
        return measure(self, num_tokens)

    monkeypatch.setattr(StepMemory, "activation_bytes", noting)
    paged = hf_paged.patch(build("llama").to("cuda"), max_num_seqs=2, max_num_batched_tokens=16, cuda_graphs=False)
    paged.generate(random_ids(1, 5).to("cuda"), max_new_tokens=1)
    assert streams and set(streams) == {steps_stream(CUDA).stream_id}


def test_embeddings_outlive_the_last_chunk(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a caller that goes on behind the chunk with its logits, while a later one reads its embeddings."""
    order: list[str] = []
    launch, follow = StepExecutor.launch, Handover.follow
    handovers: dict[int, int] = {}
    make = Handover.__init__

    def noting_launch(self: StepExecutor, step: Any) -> None:
        launch(self, step)
        order.append("step")

    def noting_make(self: Handover, device: torch.device) -> None:
        make(self, device)
        handovers[id(self)] = len(order)  # steps that it is behind, but for the one that makes it

    def noting_follow(self: Handover) -> None:
        assert handovers[id(self)] + 1 == len(order)
        order.clear()
        follow(self)

    settings = {"block_size": 4, "num_blocks": 32, "max_num_batched_tokens": 4, "cuda_graphs": False}
    paged = hf_paged.patch(copy.deepcopy(models.stock), **settings)
    monkeypatch.setattr(StepExecutor, "launch", noting_launch)
    monkeypatch.setattr(Handover, "__init__", noting_make)
    monkeypatch.setattr(Handover, "follow", noting_follow)
    embeddings = models.stock.get_input_embeddings()(models.ids[:1]).detach()
    first = torch.tensor([0], device="cuda")
    given = {"inputs_embeds": embeddings, "logits_to_keep": first}
    logits = paged(**given, past_key_values=hf_paged.PagedCache(paged)).logits
    assert not order
    torch.testing.assert_close(logits, models.stock(**given).logits)


@pytest.mark.parametrize(
    "arguments", [{"num_beams": 2, "num_beam_groups": 2}, {"penalty_alpha": 0.5, "top_k": 4}, {"dola_layers": "low"}]
)
def test_a_loop_from_elsewhere_sees_the_device(
    models: Models, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(model: Any, inputs: Tensor, **kwargs: Any) -> Tensor:
        return inputs + 1

    monkeypatch.setattr(GenerationMixin, "load_custom_generate", lambda self, *args, **kwargs: loop)
    result = models.paged.generate(models.ids, trust_remote_code=True, max_new_tokens=2, **arguments)
    assert torch.equal(result, models.ids + 1) and result.is_cuda


def test_streamers_are_given_the_hosts_tokens(models: Models) -> None:
    """Would break: a token that is made wherever the caller has its tensors by default."""

    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.devices: list[str] = []

        def put(self, value: Tensor) -> None:
            self.devices.append(value.device.type)

        def end(self) -> None: ...

    streamer = Streamer()
    with torch.device("cuda"):
        models.paged.generate(models.ids[:1], streamer=streamer, **SHORT)
    assert streamer.devices == ["cpu"] * 4


def test_one_callers_thread_leads() -> None:
    """Would break: memory that cuBLAS keeps for each of an app's threads, where that of three is reserved."""
    model = hf_paged.patch(build("llama").to("cuda"), block_size=4, num_blocks=32, cuda_graphs=False)
    ids = random_ids(1, 5).to("cuda")
    expected = model.generate(ids, max_new_tokens=3)
    found, threads = list[Tensor](), list[set[str]]()

    def call() -> None:
        with model.paged.exclusive():  # the last call's steps have ended, also those in vain
            pass
        with pretend_cuda.watch() as seen:
            found.append(model.generate(ids, max_new_tokens=3))
        threads.append({event.thread for event in seen.of("launch")})

    other = threading.Thread(target=call, name="other", daemon=True)
    other.start()
    join(other)
    call()
    assert [threads[0], threads[1]] == [{"hf_paged"}, {"MainThread"}]
    assert all(torch.equal(expected, own) for own in found)
