"""Whisper's own `generate()`: short and long form, fallbacks, prompts, languages, on a tiny model of every special."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import AutomaticSpeechRecognitionPipeline

import hf_paged
from helpers import speech
from helpers.pairs import MakePair, Pair

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
# Which seeds' texts have no two candidates within rounding of each other.
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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", list(SHORT))
def test_short_form(whisper: Pair, name: str, rows: int) -> None:
    arguments = dict(SHORT[name])
    if isinstance(arguments.get("language"), list):
        arguments["language"] = arguments["language"][:rows]
    whisper.generate(input_features=speech.features(rows), **arguments)
    assert whisper.delta["num_steps"] > 0


@pytest.mark.parametrize("lengths", [[230], [190, 90, 130]], ids=["one", "three"])
@pytest.mark.parametrize("name", list(LONG))
def test_long_form(whisper: Pair, name: str, lengths: list[int]) -> None:
    given = {"input_features": speech.features(len(lengths), max(lengths)), "attention_mask": speech.frames_mask(lengths)}
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
