"""A tiny Whisper: its audio is a second long, its tokenizer has a token a byte, and everything special Whisper has."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from helpers.sources import sharpened

LANGUAGES = ("en", "fr", "de")
SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
ID = {name: 256 + place for place, name in enumerate(SPECIAL)}
EOS, SOT, PREVIOUS, NO_SPEECH = (
    ID[f"<|{name}|>"] for name in ("endoftext", "startoftranscript", "startofprev", "nospeech")
)
NO_TIMESTAMPS = ID["<|notimestamps|>"]
POSITIONS = 50  # of a second of audio, as Whisper has 1,500 of 30 seconds
VOCAB = NO_TIMESTAMPS + 1 + POSITIONS + 1
MEL, RATE = 8, 16_000
FRAMES = 2 * POSITIONS


def tiny_whisper(seed: int = 0) -> Any:
    config = WhisperConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=POSITIONS,
        max_target_positions=32,
        num_mel_bins=MEL,
        pad_token_id=EOS,
        bos_token_id=EOS,
        eos_token_id=EOS,
        decoder_start_token_id=SOT,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model: Any = sharpened(WhisperForConditionalGeneration(config), seed)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=SOT,
        eos_token_id=EOS,
        pad_token_id=EOS,
        bos_token_id=EOS,
        max_length=32,
        is_multilingual=True,
        lang_to_id={f"<|{name}|>": ID[f"<|{name}|>"] for name in LANGUAGES},
        task_to_id={"transcribe": ID["<|transcribe|>"], "translate": ID["<|translate|>"]},
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        max_initial_timestamp_index=10,
        suppress_tokens=[7, 8, *(ID[f"<|{name}|>"] for name in ("startofprev", "nospeech", "startoftranscript"))],
        begin_suppress_tokens=[32, EOS],
        alignment_heads=[[0, 1], [1, 2]],
    )
    return model


def features(rows: int = 1, frames: int = FRAMES, seed: int = 0) -> Tensor:
    return torch.randn(rows, MEL, frames, generator=torch.Generator().manual_seed(seed))


def frames_mask(lengths: list[int]) -> Tensor:
    return (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()


def tokenizer() -> Any:
    vocab = {character: place for place, character in enumerate(bytes_to_unicode().values())} | ID
    vocab |= {f"<|{place / POSITIONS:.2f}|>": NO_TIMESTAMPS + 1 + place for place in range(POSITIONS + 1)}
    made = WhisperTokenizerFast(vocab=vocab, merges=[], unk_token=SPECIAL[0], bos_token=SPECIAL[0])
    made.add_tokens([name for name in vocab if len(name) > 2 and name not in SPECIAL])
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    made.pad_token = SPECIAL[0]
    return made


def feature_extractor() -> Any:
    return WhisperFeatureExtractor(feature_size=MEL, sampling_rate=RATE, chunk_length=1)


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """A tone that glides, and noise."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(size=len(time))
    return (0.3 * np.sin(2 * np.pi * (200 + 150 * time + 90 * seed) * time) + 0.05 * noise).astype(np.float32)
