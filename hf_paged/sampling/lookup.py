"""Prompt lookup: drafts for a row, copied from what followed its last tokens where they occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_paged.sampling.processors import change_as_rows_grow

WIDTH = array("i").itemsize  # bytes of a token


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """How drafts are looked up; transformers' generation config says what each means.

    Attributes:
        max_length: Columns of the result at most.
        adapts: There may be fewer, down to none, where more don't pay.

    Raises:
        ValueError: transformers', if one of the first two is below 1.
    """

    num_tokens: int
    max_ngram: int
    max_length: int
    vocab_size: int
    eos: tuple[int, ...]
    adapts: bool = False

    def __post_init__(self) -> None:
        PromptLookupCandidateGenerator(num_output_tokens=self.num_tokens, max_matching_ngram_size=self.max_ngram)


class LookupRules:
    """Which drafts of a sampling call are left out: those that its processors forbid, as far as transformers sees it.

    It asks them about a vocabulary of equal scores.
    """

    def __init__(self, settings: LookupSettings, processors: Sequence[Any], device: torch.device) -> None:
        """Takes the processors of one call, whose scores are on `device`."""
        self._settings = settings
        self._processors = processors
        self._device = device
        # Of most, what is forbidden is the same for all tokens so far.
        nothing = np.zeros((1, 1), dtype=np.int64)
        self._fixed = None if change_as_rows_grow(processors) else self._forbidden(nothing).cpu().numpy()

    def num_allowed(self, ids: np.ndarray, drafts: np.ndarray) -> int:
        """How many of these drafts, from the first on, may stand behind these tokens."""
        if self._fixed is not None:
            found = np.flatnonzero(self._fixed[drafts])
            return int(found[0]) if len(found) else len(drafts)
        for place, draft in enumerate(drafts):
            if self._forbidden(np.concatenate([ids, drafts[:place]])[None])[draft]:
                return place
        return len(drafts)

    def _forbidden(self, ids: np.ndarray) -> Tensor:
        """`[vocab_size]` bool."""
        scores = torch.ones(1, self._settings.vocab_size, device=self._device)
        given = torch.from_numpy(ids).to(self._device)
        for processor in self._processors:
            scores = processor(given, scores)
        return scores[0] <= torch.finfo(scores.dtype).min


class PromptLookup:
    """One row's tokens, and drafts from what followed their last ones earlier.

    The same drafts as `PromptLookupCandidateGenerator`, found by searching bytes.
    """

    def __init__(self, settings: LookupSettings, token_ids: Sequence[int], rules: LookupRules | None = None) -> None:
        """Begins with a row of the call's input, padding included."""
        self._settings = settings
        self._rules = rules
        self._width = self._length = len(token_ids)
        self._bytes = bytearray(_to_bytes(token_ids))
        self._others: list[bytearray] = []

    def learn(self, text: Sequence[int]) -> None:
        """Takes a text that this one may go on like: drafts come from it where there are none of its own."""
        self._others.append(bytearray(_to_bytes(text)))

    def drafts(self, generated: Sequence[int]) -> list[int]:
        """What followed the first place at which the longest run of last tokens stood; maybe nothing.

        Args:
            generated: All tokens of the row behind its input. Those that were there the last time are the same.
        """
        self._bytes += _to_bytes(generated[self._length - self._width :])
        settings, length = self._settings, self._width + len(generated)
        self._length = length
        if settings.max_length == length + 1:
            return []
        places = (
            (text, start)
            for text in (self._bytes, *self._others)
            for size in range(min(settings.max_ngram, length - 1), 0, -1)
            for start in self._ends(text, size)
        )
        for text, start in places:
            end = min(start + settings.num_tokens, len(text) // WIDTH, settings.max_length)
            found = _tokens(text, start, end)
            if self._rules is not None:
                known = np.array(_tokens(self._bytes, 0, length), dtype=np.int64)
                found = found[: self._rules.num_allowed(known, np.array(found, dtype=np.int64))]
            if found:
                return list(takewhile(lambda token: token not in settings.eos, found))
        return []

    def _ends(self, text: bytearray, size: int) -> Iterator[int]:
        """Behind which tokens of a text the row's last `size` ones stand, with others behind them."""
        last = self._bytes[-size * WIDTH :]
        end = len(text) - WIDTH
        place = text.find(last, 0, end)
        while place >= 0:
            if place % WIDTH == 0:  # not across two tokens
                yield place // WIDTH + size
            place = text.find(last, place + 1, end)


def _tokens(text: bytearray, start: int, end: int) -> list[int]:
    return np.frombuffer(bytes(text[start * WIDTH : end * WIDTH]), dtype=np.int32).tolist()


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
