"""Sampling settings that HTTP interfaces have and `generate()` has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_paged.sampling.grammar import Grammar
from hf_paged.sampling.logprobs import LogprobsWanted

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class SamplingControls:
    """The settings of one request's sampling besides `generate()`'s own.

    Attributes:
        seed: Its draws are those of a generator that starts with it; `None`: where the global one stands.
        presence_penalty: Is subtracted from the logit of each token that has been generated.
        frequency_penalty: Is subtracted as often as the token has been generated.
    """

    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    logprobs: LogprobsWanted | None = None

    @classmethod
    def of(
        cls,
        vocab_size: int,
        seed: Any,
        presence_penalty: Any,
        frequency_penalty: Any,
        logit_bias: Any,
        grammar: Any = None,
        logprobs: LogprobsWanted | None = None,
    ) -> SamplingControls:
        """Checks the arguments of a request.

        Raises:
            ValueError: One of them isn't what it should be.
        """
        if seed is not None and (not _is_whole(seed) or not -(2**63) <= seed < 2**64):
            raise ValueError(f"seed must be an integer of 64 bits, got {seed!r:.80}")
        for name, value in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
            if not _is_number(value):
                raise ValueError(f"{name} must be a finite number in float32, got {value!r:.80}")
        bias = {} if logit_bias is None else logit_bias
        if not isinstance(bias, Mapping) or not all(_is_number(value) for value in bias.values()):
            raise ValueError(f"logit_bias must give finite numbers in float32 by token id, got {logit_bias!r:.80}")
        bad = next((token for token in bias if not _is_whole(token) or not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ValueError(f"logit_bias has {bad!r:.80}, which is no token id from 0 to {vocab_size - 1}")
        if grammar is not None and not isinstance(grammar, Grammar):
            raise ValueError(f"grammar must come from a GrammarCompiler, got {grammar!r:.80}")
        return cls(seed, float(presence_penalty), float(frequency_penalty), dict(bias), grammar, logprobs)

    def check_alone(self) -> None:
        """Raises `ValueError` if more than a seed is asked for."""
        if self != SamplingControls(seed=self.seed):
            raise ValueError(
                "a model whose generate() runs several loops (Whisper) takes a seed beside generate()'s own arguments, "
                "and no penalties, logit_bias, grammar or logprobs"
            )

    def processors(self) -> list[LogitsProcessor]:
        """The processors that change logits; those that look at tokens must yet be told where the prompt ends."""
        found: list[LogitsProcessor] = []
        if self.presence_penalty or self.frequency_penalty:
            found.append(GeneratedTokenPenalties(self.presence_penalty, self.frequency_penalty, 0))
        if self.logit_bias:
            found.append(TokenBias(self.logit_bias))
        return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether it is a number that scores in float32 have: a larger one makes NaN of them."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


class GeneratedTokenPenalties(LogitsProcessor):
    """`logit - count * frequency_penalty - (count > 0) * presence_penalty`, count: of the token among those generated.

    Attributes:
        settings: Presence penalty, frequency penalty, and how many tokens are before the first generated one: numbers,
            or `[rows, 1]` of each.
    """

    def __init__(self, presence_penalty: float, frequency_penalty: float, prompt_length: int) -> None:
        self.settings: tuple[Any, Any, Any] = (presence_penalty, frequency_penalty, prompt_length)

    def begin_at(self, prompt_length: int) -> None:
        self.settings = (*self.settings[:2], prompt_length)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` of rows with these tokens; -1 stands behind the end of a shorter row."""
        presence, frequency, start = self.settings
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        is_generated = ((place >= start) & (input_ids >= 0)).to(scores.dtype)
        counts = torch.zeros_like(scores).scatter_add(1, input_ids.clamp(min=0), is_generated)
        return scores - counts * frequency - (counts > 0) * presence


class TokenBias(LogitsProcessor):
    """Adds a number to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.bias = DenseBias(bias)

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        return scores + self.bias.like(scores)


class DenseBias:
    """A number for each token of the vocabulary, brought to a device once."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.arrays = np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)  # tokens, numbers
        self._made: Tensor | None = None

    def like(self, scores: Tensor) -> Tensor:
        """`[vocab_size]`, where and as long as scores are."""
        if self._made is None or self._made.device != scores.device:
            dense = torch.zeros(scores.shape[-1], dtype=scores.dtype)
            tokens, numbers = map(torch.from_numpy, self.arrays)
            dense[tokens.long()] = numbers.to(scores.dtype)
            self._made = dense.to(scores.device)
        return self._made
