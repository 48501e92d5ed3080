"""What users give `generate()`: processors, criteria and streamers, also such that fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from helpers.models import VOCAB
from helpers.pairs import Make


class NextToken(LogitsProcessor):
    """Stateless: favours a token that depends on the last one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = (input_ids[:, -1:] * 7 + 3) % VOCAB
        return scores.scatter_add(1, favoured, torch.full_like(scores[:, :1], 2.0))


class Countdown(LogitsProcessor):
    """Stateful: what it favours depends on how often it was called, and on what it was given before."""

    def __init__(self) -> None:
        self.calls = 0
        self.total = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        self.total += int(input_ids.sum())
        scores[:, (self.total + self.calls) % VOCAB] += 3.0  # in place, as users do
        return scores


class RowIndexed(LogitsProcessor):
    """Favours another token in each row of the batch it sees: wrong as soon as a row is missing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(scores.shape[0])
        scores[rows, (30 + 5 * rows + input_ids.shape[1]) % VOCAB] += 3.0
        return scores


class Recorder(LogitsProcessor):
    """Notes all it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.clone(), scores.clone()))
        return scores


class StopRows(StoppingCriteria):
    """Stops row `i` when it has `5 + 2 i` tokens behind a prompt of 11."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        limits = 11 + 5 + 2 * torch.arange(input_ids.shape[0])
        return input_ids.shape[1] >= limits


class StopAll(StoppingCriteria):
    """Stateful: stops everything at its sixth call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.full((input_ids.shape[0],), self.calls >= 6)


class PutRecorder(BaseStreamer):
    """Notes every call."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.clone())

    def end(self) -> None:
        self.seen.append("end")


def processors(*kinds: type[LogitsProcessor]) -> Make:
    """A fresh list of these processors for each model."""
    return lambda model: {"logits_processor": LogitsProcessorList(kind() for kind in kinds)}


def criteria(*kinds: type[StoppingCriteria]) -> Make:
    """A fresh list of these criteria for each model."""
    return lambda model: {"stopping_criteria": StoppingCriteriaList(kind() for kind in kinds)}


class Asker(LogitsProcessor):
    """Asks another model, once, about the prompt."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        self.ask: Callable[[Tensor], Any] | None = ask

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ask, self.ask = self.ask, None
        if ask is not None:
            ask(input_ids)
        return scores


class Boom(Exception):
    """What the user's code raises."""


class Fuse:
    """Raises at its n-th call."""

    def __init__(self, error: type[BaseException], calls: int) -> None:
        self.error = error
        self.calls = calls

    def burn(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise self.error("burnt")


class FusedProcessor(Fuse, LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.burn()
        return scores


class FusedCriterion(Fuse, StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.burn()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FusedStreamer(Fuse, BaseStreamer):
    def put(self, value: Tensor) -> None:
        self.burn()

    def end(self) -> None:
        pass


class FusedGrammar(Fuse):
    def __call__(self, row: int, input_ids: Tensor) -> list[int]:
        self.burn()
        return [5, 6, 7]


USER_CODE: dict[str, Callable[[type[BaseException], int], dict[str, Any]]] = {
    "processor": lambda error, calls: {"logits_processor": LogitsProcessorList([FusedProcessor(error, calls)])},
    "criterion": lambda error, calls: {"stopping_criteria": StoppingCriteriaList([FusedCriterion(error, calls)])},
    "streamer": lambda error, calls: {"streamer": FusedStreamer(error, calls)},
    "grammar": lambda error, calls: {"prefix_allowed_tokens_fn": FusedGrammar(error, calls)},
}


class Sleeper(LogitsProcessor):
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return scores
