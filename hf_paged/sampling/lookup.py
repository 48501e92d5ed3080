"""Prompt lookup: what a row may go on with, guessed from what followed its last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_paged.sampling.processors import needs_ids


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """How drafts are looked up; transformers' generation config says what each means.

    Attributes:
        num_tokens: Drafts at most.
        max_ngram: Last tokens that are looked for, at most.
        max_length: Columns of the result at most.
        vocab_size: Of the logits.
        eos: Tokens that end a row: no draft is one.
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
        """Of the processors of one call, whose scores are on `device`."""
        self._settings = settings
        self._processors = processors
        self._device = device
        # Of most, what is forbidden is the same for all tokens so far.
        self._fixed = None if needs_ids(processors) else self._forbidden(np.zeros((1, 1), dtype=np.int64)).cpu().numpy()

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
    """One row's tokens, and what followed their last ones before.

    The same drafts as `PromptLookupCandidateGenerator`, found by comparing arrays.
    """

    def __init__(self, settings: LookupSettings, token_ids: Sequence[int], rules: LookupRules | None = None) -> None:
        """Of a row of the call's input, padding included.

        Args:
            settings: How to look.
            token_ids: The row.
            rules: What is left out; `None`: nothing.
        """
        self._settings = settings
        self._rules = rules
        self._eos = np.array(settings.eos, dtype=np.int64)
        self._length = len(token_ids)
        self._ids = np.empty(self._length + 256, dtype=np.int64)
        self._ids[: self._length] = token_ids

    def append(self, token_ids: Sequence[int]) -> None:
        """The row has got more tokens."""
        end = self._length + len(token_ids)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(end, dtype=np.int64)])
        self._ids[self._length : end] = token_ids
        self._length = end

    def drafts(self) -> list[int]:
        """What followed the first place at which the longest run of last tokens stood; maybe nothing."""
        settings, length = self._settings, self._length
        if settings.max_length == length + 1:
            return []
        ids = self._ids[:length]
        for size in range(min(settings.max_ngram, length - 1), 0, -1):
            # Where the run's last token stands before its end, then those of them with the others before it.
            ends = np.flatnonzero(ids[size - 1 : -1] == ids[-1]) + size
            for back in range(2, size + 1):
                ends = ends[ids[ends - back] == ids[-back]]
            for start in ends.tolist():
                found = ids[start : min(start + settings.num_tokens, length, settings.max_length)]
                if self._rules is not None:
                    found = found[: self._rules.num_allowed(ids, found)]
                if len(found):
                    ends_at = np.flatnonzero(np.isin(found, self._eos))
                    return found[: ends_at[0] if len(ends_at) else None].tolist()
        return []
