"""Requests of models with an encoder: what `submit()` is given is what `generate()` is given."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helpers import speech
from helpers.pairs import MakePair, Pair
from helpers.sources import tiny_bart, tiny_captioner

SOURCE = [5, 17, 40, 8, 33, 61, 12]


@pytest.fixture
def bart(make_pair: MakePair) -> Pair:
    return make_pair(tiny_bart())


GREEDY = {"max_new_tokens": 9, "do_sample": False}
MODES: list[dict[str, Any]] = [
    GREEDY,
    {"max_new_tokens": 9, "do_sample": True, "num_return_sequences": 2},
    {"max_new_tokens": 9, "do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    GREEDY | {"forced_bos_token_id": 20, "encoder_no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("mode", MODES, ids=["greedy", "samples", "beams", "loop"])
@pytest.mark.parametrize("prompt", [None, [2, 30, 31]], ids=["start", "prompt"])
def test_source_and_prompt_are_those_of_generate(bart: Pair, mode: dict[str, Any], prompt: list[int] | None) -> None:
    given = {} if prompt is None else {"decoder_input_ids": torch.tensor([prompt])}
    torch.manual_seed(3)
    expected = bart.stock.generate(torch.tensor([SOURCE]), **mode, **given)
    width = 1 if prompt is None else len(prompt)
    given = {} if prompt is None else {"decoder_input_ids": prompt}
    torch.manual_seed(3)
    found = bart.engine.submit(SOURCE, **mode, **given).result()
    assert found.prompt_token_ids == expected[0, :width].tolist()
    assert [tokens + [1] * (expected.shape[1] - width - len(tokens)) for tokens in found.sequences] == expected[
        :, width:
    ].tolist()


def test_pictures_stream_as_their_tokens_come(make_pair: MakePair) -> None:
    pair = make_pair(tiny_captioner())
    picture = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = pair.stock.generate(pixel_values=picture, **GREEDY)
    assert list(pair.engine.submit(pixel_values=picture, **GREEDY)) == expected[0, 1:].tolist()
    outputs = pair.engine.generate([picture, picture], **GREEDY)
    assert [output.token_ids for output in outputs] == 2 * [expected[0, 1:].tolist()]


def test_batch_api_takes_sources(bart: Pair) -> None:
    sources = [SOURCE, SOURCE[:3], [9, 8, 7, 6]]
    results = bart.paged.generate_batch(sources, max_new_tokens=6, do_sample=False)
    found = [output.generated_tokens for output in results.values()]
    for source, tokens in zip(sources, found, strict=True):
        assert tokens == bart.stock.generate(torch.tensor([source]), **GREEDY | {"max_new_tokens": 6})[0, 1:].tolist()


def test_penalties_begin_behind_the_prompt(bart: Pair) -> None:
    """The prompt is the decoder's, however long the source is."""
    prompt = bart.engine.submit(SOURCE, **GREEDY).result().token_ids
    plain = bart.engine.submit(SOURCE, **GREEDY, decoder_input_ids=[2, *prompt]).result()
    kept = bart.engine.submit(SOURCE, **GREEDY, decoder_input_ids=[2, *prompt], presence_penalty=2.0).result()
    assert kept.token_ids[0] == plain.token_ids[0], "what is in the prompt is not penalised"
    strong = bart.engine.submit(SOURCE, **GREEDY, presence_penalty=1000.0).result().token_ids
    assert len(set(strong)) == len(strong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "token ids"),
        ({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, "one prompt"),
        ({"input_ids": [97]}, "vocabulary"),
        ({"input_ids": SOURCE, "decoder_input_ids": [97]}, "vocabulary"),
        ({"input_ids": SOURCE, "max_new_tokens": 3000}, "pool"),
        ({"input_ids": SOURCE, "num_beams": 2, "logprobs": 1}, "logprobs"),
    ],
)
def test_errors_at_the_call(bart: Pair, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bart.engine.submit(**given)
    with pytest.raises(ValueError, match="encoder"):
        bart.engine.score([SOURCE])


def test_features_of_another_model(make_pair: MakePair) -> None:
    pair, features = make_pair(speech.tiny_whisper()), speech.features(1, speech.FRAMES)
    bins = features.shape[1]
    with pytest.raises(ValueError, match=rf"{bins} mel bins, got features \[1, {bins + 1}, "):
        pair.engine.submit(input_features=torch.cat([features, features[:, :1]], dim=1))
    assert pair.engine.submit(input_features=features, language="en").result().token_ids


WHISPERS: list[dict[str, Any]] = [
    {"language": "en"},
    {"return_segments": True, "temperature": (0.0, 0.8), "logprob_threshold": 0.0},
    {"num_beams": 2, "return_timestamps": True, "language": "fr"},
    {"do_sample": True, "temperature": 0.9, "num_return_sequences": 2, "language": "en"},
]


@pytest.mark.parametrize("arguments", WHISPERS, ids=["plain", "fallback", "beams", "samples"])
@pytest.mark.parametrize("frames", [speech.FRAMES, 130], ids=["short", "long"])
def test_whispers_whole_generate_runs_as_a_request(make_pair: MakePair, arguments: dict[str, Any], frames: int) -> None:
    pair, features = make_pair(speech.tiny_whisper()), speech.features(1, frames)
    torch.manual_seed(3)
    expected = pair.stock.generate(features, **arguments)
    tokens = expected if isinstance(expected, torch.Tensor) else expected["sequences"]
    before = torch.get_rng_state()
    requests = [pair.engine.submit(input_features=features, seed=3, **arguments) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    for request in requests:
        output = request.result()
        assert output.sequences == tokens.tolist() and output.finish_reason == "stop"
        assert type(output.returned) is type(expected)
    torch.manual_seed(3)
    first, second = (pair.engine.submit(input_features=features, **arguments) for _ in range(2))
    assert first.result().sequences == tokens.tolist()
    if arguments.get("do_sample"):
        assert second.result().sequences != first.result().sequences
    second.result()
    pair.assert_all_free()


@pytest.mark.parametrize("given", [{"language": "en"}, {"num_beams": 2}, {"return_dict_in_generate": True}])
def test_cancelled_whisper_ends_within_a_step(make_pair: MakePair, given: dict[str, Any]) -> None:
    pair = make_pair(speech.tiny_whisper())
    request = pair.engine.submit(input_features=speech.features(1, 40 * speech.FRAMES), **given)
    while not pair.engine.stats().num_steps:
        pass
    request.cancel()
    assert request.result(timeout=30).finish_reason == "cancelled"
    steps = pair.engine.stats().num_steps
    assert pair.engine.submit(input_features=speech.features(1), language="en").result().token_ids
    assert steps < 40 * 4, "it went on"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "input_features"),
        ({"input_ids": [1, 2]}, "input_features"),
        ({"input_features": speech.features(2)}, "one request"),
        ({"input_features": torch.tensor(1.0)}, "one request"),
        ({"input_features": speech.features(1, 40)}, "length 100"),
        ({"input_features": speech.features(), "language": "tlh"}, "Unsupported language"),
        ({"input_features": speech.features(1, 200), "return_timestamps": False}, "return_timestamps"),
        ({"input_features": speech.features(), "logprobs": 1}, "logprobs"),
        ({"input_features": speech.features(), "presence_penalty": 1.0}, "penalties"),
    ],
)
def test_whispers_errors_at_the_call(make_pair: MakePair, given: dict[str, Any], message: str) -> None:
    pair = make_pair(speech.tiny_whisper())
    with pytest.raises(ValueError, match=message):
        pair.engine.submit(**given)


@pytest.mark.parametrize("kind", ["bart", "whisper"])
def test_encoders_take_turns(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Would break: on CPU the encoders of as many callers as there are share its cores."""
    model = tiny_bart() if kind == "bart" else speech.tiny_whisper()
    given = torch.tensor([SOURCE]) if kind == "bart" else speech.features(1, speech.FRAMES)
    pair, most, lock = make_pair(model), [0, 0], threading.Lock()
    own = type(pair.paged.get_encoder()).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with lock:
            most[0] += 1
            most[1] = max(most)
        time.sleep(0.01)
        try:
            return own(*args, **kwargs)
        finally:
            most[0] -= 1

    expected = pair.stock.generate(given, **GREEDY)
    monkeypatch.setattr(type(pair.paged.get_encoder()), "forward", forward)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(pair.paged.generate, given, **GREEDY) for _ in range(4)]
        assert all(torch.equal(call.result(), expected) for call in calls)
    assert most == [0, 1]
