"""Whisper's own `generate()`: short and long form, fallbacks, prompts, languages, on a tiny model of every special."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutomaticSpeechRecognitionPipeline

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


@pytest.mark.parametrize("lengths", [[330], [250, 90, 160]], ids=["one", "three"])
@pytest.mark.parametrize("name", list(LONG))
def test_long_form(whisper: Pair, name: str, lengths: list[int]) -> None:
    given = {"input_features": speech.features(len(lengths), max(lengths)), "attention_mask": speech.frames_mask(lengths)}
    whisper.generate(**given, **LONG[name])
    assert whisper.delta["num_steps"] > 0
