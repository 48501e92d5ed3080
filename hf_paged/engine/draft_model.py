"""`DraftModel`: drafts of another patched model, for many rows in batched steps of its engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from hf_paged.sampling.random import NoiseAhead


@dataclass(slots=True)
class DraftModel:
    """Calls of a draft model. What it has computed of a row it finds in its prefix cache.

    Attributes:
        generate: Runs a call of left-padded ids, padding, processors, criteria, and where draws come from (`None`: it
            takes the likeliest tokens) on the draft model's engine, to its end.
        has_room: Whether the draft model's pool and context have room for a row of so many tokens.
        check: Raises `UnsupportedCallError` if that model waits for another's drafts itself.
        processors: Of the call that it guesses for: those that take rows of any lengths together.
        adapts: Whether there may be fewer drafts, where more don't pay.
    """

    generate: Callable[
        [Tensor, list[int], LogitsProcessorList, StoppingCriteriaList, NoiseAhead | None], list[list[int]]
    ]
    has_room: Callable[[int], bool]
    check: Callable[[], None]
    processors: LogitsProcessorList
    pad_token_id: int
    num_tokens: int
    adapts: bool

    def drafts(self, rows: list[list[int]], most: list[int], noise: NoiseAhead | None) -> list[list[int]]:
        """Returns drafts for each of these rows of ids, up to so many tokens. Waits for them."""
        width, longest = max(map(len, rows)), max(most)
        padding = [width - len(row) for row in rows]
        ids = torch.full((len(rows), width), self.pad_token_id, dtype=torch.int64, device="cpu")
        for index, row in enumerate(rows):
            ids[index, padding[index] :] = torch.tensor(row, device="cpu")
        criteria = StoppingCriteriaList([MaxLengthCriteria(width + longest)])
        found = self.generate(ids, padding, self.processors, criteria, noise)
        return [own[:count] for own, count in zip(found, most, strict=True)]
