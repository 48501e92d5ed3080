"""Whisper's own `generate()`: short and long form, fallbacks, prompts, languages, on a tiny model of every special."""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutomaticSpeechRecognitionPipeline

import hf_paged
from helpers import speech
from helpers.pairs import MakePair, Pair, assert_same

SHORT: dict[str, dict[str, Any]] = {
    "detected": {},
    "language": {"language": "fr"},
    "languages": {"language": ["fr", "de", "en"], "task": "translate"},
    "timestamps": {"return_timestamps": True, "language": "en"},
    "timestamps_detected": {"return_timestamps": True},
    "beams": {"num_beams": 3, "language": "en", "return_timestamps": True},
    "beams_returned": {"num_beams": 4, "num_return_sequences": 2, "language": "en", "max_new_tokens": 9},
    "samples": {"do_sample": True, "temperature": 0.9, "language": "en", "return_timestamps": True},
    "several": {"do_sample": True, "temperature": 0.9, "num_return_sequences": 3, "language": "en"},
    "prompt": {"prompt_ids": torch.tensor([speech.PREVIOUS, 70, 71, 72]), "language": "de", "max_new_tokens": 12},
    "segments": {"return_timestamps": True, "return_segments": True, "language": "en"},
    "fallback": {
        "temperature": (0.0, 0.4, 0.8),
        "compression_ratio_threshold": 0.2,
        "language": "en",
        "return_timestamps": True,
    },
    "dict": {"return_dict_in_generate": True, "output_scores": True, "language": "en", "max_new_tokens": 8},
    "dict_timestamps": {"return_dict_in_generate": True, "return_timestamps": True, "language": "en"},
    "stop": {"language": "en", "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 20},
}
LONG: dict[str, dict[str, Any]] = {
    "plain": {"return_timestamps": True, "language": "en"},
    "detected": {},
    "segments": {"return_segments": True, "language": "en"},
    "conditioned": {"condition_on_prev_tokens": True, "language": "en"},
    "prompt_first": {"prompt_ids": torch.tensor([speech.PREVIOUS, 70, 71, 72]), "language": "en"},
    "prompt_all": {
        "prompt_ids": torch.tensor([speech.PREVIOUS, 70, 71]),
        "prompt_condition_type": "all-segments",
        "condition_on_prev_tokens": True,
        "language": "en",
    },
    "beams": {"num_beams": 3, "language": "en"},
    "samples": {"do_sample": True, "temperature": 0.7, "language": "en"},
    "fallback": {
        "temperature": (0.0, 0.4, 0.8),
        "compression_ratio_threshold": 0.4,
        "logprob_threshold": -1.0,
        "condition_on_prev_tokens": True,
        "language": "en",
    },
    "everything": {
        "temperature": (0.0, 0.2, 0.6),
        "compression_ratio_threshold": 1.35,
        "logprob_threshold": -0.8,
        "no_speech_threshold": 0.001,
        "condition_on_prev_tokens": True,
        "return_segments": True,
    },
    "beams_fall_back": {"num_beams": 2, "temperature": (0.0, 0.5), "logprob_threshold": -0.5, "language": "en"},
    "dict": {"return_dict_in_generate": True, "return_segments": True, "language": "en", "output_scores": True},
}


@pytest.fixture
def whisper(make_pair: MakePair) -> Pair:
    return make_pair(speech.tiny_whisper())


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", list(SHORT))
def test_short_form(whisper: Pair, name: str, rows: int) -> None:
    arguments = dict(SHORT[name])
    if isinstance(arguments.get("language"), list):
        arguments["language"] = arguments["language"][:rows]
    whisper.generate(input_features=speech.features(rows), **arguments)
    assert whisper.delta["num_steps"] > 0


@pytest.mark.parametrize("lengths", [pytest.param([230], marks=pytest.mark.slow), [150, 90, 130]], ids=["one", "three"])
@pytest.mark.parametrize("name", list(LONG))
def test_long_form(whisper: Pair, name: str, lengths: list[int]) -> None:
    given = {
        "input_features": speech.features(len(lengths), max(lengths)),
        "attention_mask": speech.frames_mask(lengths),
    }
    whisper.generate(**given, **LONG[name])
    assert whisper.delta["num_steps"] > 0


def note_encoder_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows by what each run of a model's encoder is given. Not by a hook, which would be shown all."""
    encoder, runs = model.get_encoder(), []
    stock = encoder.forward

    def forward(input_features: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(input_features.tolist())
        return stock(input_features, *args, **kwargs)

    monkeypatch.setattr(encoder, "forward", forward)
    return runs


FALL_BACK = {
    "temperature": (0.0, 0.4, 0.8),
    "logprob_threshold": 0.0,
    "no_speech_threshold": 1.0,
    "return_timestamps": True,
    "max_new_tokens": 12,
}


def test_equal_audio_is_encoded_once_in_a_call(whisper: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, paged = (note_encoder_runs(model, monkeypatch) for model in (whisper.stock, whisper.paged))
    whisper.generate(input_features=speech.features(2), **FALL_BACK)
    segments = [segment for segment, _ in itertools.groupby(stock)]
    assert paged == segments and len(stock) == 1 + 6 * len(segments), "language; three times no speech, and the text"
    whisper.generate(input_features=speech.features(2), **FALL_BACK)
    assert paged == 2 * segments, "a call of its own has nothing of the one before"


@pytest.mark.parametrize("why", ["hook", "train"])
def test_an_encoder_that_is_watched_or_random_runs_again(
    whisper: Pair, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    seen: list[int] = []
    for model in (whisper.stock, whisper.paged):
        if why == "hook":
            model.get_encoder().register_forward_hook(hf_paged.packed_hook(lambda *_: seen.append(1)))
        else:
            model.get_encoder().layers[0].train()
    stock, paged = (note_encoder_runs(model, monkeypatch) for model in (whisper.stock, whisper.paged))
    whisper.generate(input_features=speech.features(1), **FALL_BACK)
    assert len(paged) == len(stock) > 3 and (why == "train" or len(seen) == 2 * len(paged))


@pytest.mark.parametrize(
    "asked",
    [
        {"generate_kwargs": {"language": "en"}},
        {"return_timestamps": True, "generate_kwargs": {"language": "en"}},
        {"return_timestamps": "word", "generate_kwargs": {"language": "en"}},
    ],
    ids=["text", "timestamps", "words"],
)
def test_pipeline(whisper: Pair, asked: dict[str, Any]) -> None:
    sounds = [speech.sound(seconds, seed) for seed, seconds in enumerate((0.6, 2.3))]

    def transcribe(model: Any) -> Any:
        parts = {"feature_extractor": speech.feature_extractor(), "tokenizer": speech.tokenizer()}
        pipe = AutomaticSpeechRecognitionPipeline(model=model, **parts)
        return [pipe(sound.copy(), **copy.deepcopy(asked)) for sound in sounds]

    whisper.both(transcribe, falls_back=asked.get("return_timestamps") == "word")
    assert whisper.delta["num_steps"] > 0 or asked.get("return_timestamps") == "word"


def test_token_timestamps_are_stocks(whisper: Pair) -> None:
    """They need attention weights, which no pool gives; transformers leaves the model with eager attention for good."""
    asked = {"language": "en", "max_new_tokens": 12}
    whisper.generate(
        input_features=speech.features(2), attention_mask=speech.frames_mask([100, 80]), return_token_timestamps=True,
        falls_back=True, **asked,
    )  # fmt: skip
    whisper.generate(input_features=speech.features(2), **asked)
    assert whisper.delta["num_steps"] > 0


def test_callers_on_threads_get_what_they_get_alone(whisper: Pair) -> None:
    """Their segments meet in steps; none draws another's numbers."""
    calls = [SHORT["timestamps"], SHORT["beams"], LONG["conditioned"], SHORT["language"], LONG["prompt_first"]]
    given = [speech.features(1, 100 if calls[p] in SHORT.values() else 150, seed=p) for p in range(len(calls))]
    expected = [whisper.stock.generate(each, **call) for each, call in zip(given, calls, strict=True)]
    with ThreadPoolExecutor(len(calls)) as threads:
        running = [
            threads.submit(whisper.paged.generate, each, **call) for each, call in zip(given, calls, strict=True)
        ]
        found = [each.result() for each in running]
    assert_same(expected, found)


def test_what_other_threads_draw_changes_no_later_segment(whisper: Pair) -> None:
    """Would break: a segment whose draws begin where another thread left the global generator."""
    asked = {"temperature": (0.0, 0.8), "logprob_threshold": 0.0, "language": "en", "return_timestamps": True}
    features, segments = speech.features(1, 190), []
    torch.manual_seed(3)
    expected = whisper.stock.generate(features, **asked)

    def meddle(progress: Any) -> None:
        segments.append(progress)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(torch.manual_seed, 99).result()

    torch.manual_seed(3)
    assert_same(expected, whisper.paged.generate(features, **asked, monitor_progress=meddle))
    assert len(segments) > 1
