"""Choosing the next tokens of many calls' rows at once."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.logits_process import EpsilonLogitsWarper, EtaLogitsWarper

from hf_paged.draws import StepNoise

# Processors of transformers that look at scores alone, never at the tokens so far. Those with a parameter here take
# rows of different calls, each with its own value; in the others rows meet if all of their settings are equal.
_PARAMETERS: dict[type[LogitsProcessor], str | None] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
    TypicalLogitsWarper: None,
    EpsilonLogitsWarper: None,
    EtaLogitsWarper: None,
    InfNanRemoveLogitsProcessor: None,
    LogitNormalization: None,
    SuppressTokensLogitsProcessor: None,
}


class RowSampler:
    """How the rows of one call choose their tokens, where that depends on their logits alone.

    Attributes:
        kind: Rows of one kind are processed together, whatever their calls.
        processors: transformers' own.
        noise: Where draws come from; `None`: the likeliest token is taken.
    """

    def __init__(self, kind: Hashable, processors: list[Any], noise: StepNoise | None) -> None:
        self.kind = kind
        self.processors = processors
        self.noise = noise

    @classmethod
    def of(cls, processors: Sequence[Any], noise: StepNoise | None) -> RowSampler | None:
        """The sampler of a call; `None` if one of its processors looks at the tokens so far."""
        kinds = [_kind(processor) for processor in processors]
        if any(kind is None for kind in kinds):
            return None
        return cls((noise is None, *kinds), list(processors), noise)


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of one call that are to choose a token.

    Attributes:
        sampler: The call's.
        rows: Rows of the call.
        step: What each has generated so far; the same for all of them.
        sources: Their rows of the logits.
        oldest_step: No row of the call will come to an earlier step any more.
    """

    sampler: RowSampler
    rows: list[int]
    step: int
    sources: list[int]
    oldest_step: int


@torch.inference_mode()
def choose_tokens(choices: Sequence[Choice], logits: Tensor) -> list[list[int] | Exception]:
    """The next token of every row: exactly those that transformers' own loop chooses.

    Args:
        choices: Who chooses.
        logits: `[K, vocab_size]`.

    Returns:
        For each choice, its rows' tokens, -1 for a row whose probabilities are none (NaN), or what its processors
        raised.
    """
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for number, choice in enumerate(choices):
        kinds[choice.sampler.kind].append(number)
    results: list[list[int] | Exception] = [[]] * len(choices)
    chosen: list[tuple[list[int], Tensor]] = []
    for members in kinds.values():
        try:
            chosen.append((members, _choose([choices[number] for number in members], logits)))
        except Exception:  # of one row's scores: whose?
            for number in members:
                try:
                    chosen.append(([number], _choose([choices[number]], logits)))
                except Exception as error:
                    results[number] = error
    if chosen:
        # The one host read of the step: the next step's ids and the end-of-sequence test are the host's.
        tokens = torch.cat([tensor for _, tensor in chosen]).tolist()
        start = 0
        for number in (number for members, _ in chosen for number in members):
            stop = start + len(choices[number].rows)
            results[number] = tokens[start:stop]
            start = stop
    return results


def _choose(choices: list[Choice], logits: Tensor) -> Tensor:
    """`[rows]` of choices of one kind."""
    sources = [source for choice in choices for source in choice.sources]
    if sources != list(range(len(logits))):
        logits = logits[torch.tensor(sources, device=logits.device)]
    scores = logits.float()
    samplers = [choice.sampler for choice in choices]
    lengths = [len(choice.rows) for choice in choices]
    for own in zip(*(sampler.processors for sampler in samplers), strict=True):
        # They never look at the ids.
        scores = _merged(own, lengths, scores)(None, scores)  # type: ignore[arg-type]
    if samplers[0].noise is None:
        return scores.argmax(dim=-1)
    probs = scores.softmax(dim=-1)
    noise = [
        choice.sampler.noise.rows(choice.step, choice.rows, probs, choice.oldest_step)
        for choice in choices
        if choice.sampler.noise is not None
    ]
    tokens = (probs / (noise[0] if len(noise) == 1 else torch.cat(noise))).argmax(dim=-1)
    # A row with a NaN anywhere is all NaN behind the softmax.
    is_number = probs.gather(1, tokens[:, None])[:, 0] >= 0
    return torch.where(is_number, tokens, -1)


def _kind(processor: Any) -> Hashable:
    """What processors of different calls must have in common to become one; `None` if it looks at the ids."""
    if type(processor) not in _PARAMETERS:
        return None
    parameter = _PARAMETERS[type(processor)]
    settings = ((name, _plain(value)) for name, value in sorted(vars(processor).items()) if name != parameter)
    return type(processor), tuple(settings)


def _plain(value: Any) -> Hashable:
    return tuple(value.reshape(-1).tolist()) if isinstance(value, Tensor) else repr(value)


def _merged(processors: Sequence[Any], lengths: list[int], scores: Tensor) -> Any:
    """One processor for the rows of all, of which the first `lengths[0]` belong to the first of `processors`, etc."""
    first = processors[0]
    parameter = _PARAMETERS[type(first)]
    if parameter is None:
        return first
    values = [getattr(processor, parameter) for processor in processors]
    if values.count(values[0]) == len(values):
        return first
    if parameter == "top_k":
        values = [min(value, scores.shape[-1]) for value in values]
    if parameter == "top_p":
        # transformers compares float32 with `1 - top_p`, rounded to float32.
        values = [1 - float(torch.tensor(1 - value, dtype=torch.float32, device="cpu")) for value in values]
    dtype = {"top_k": torch.int64, "top_p": torch.float64}.get(parameter, torch.float32)
    column = torch.tensor(
        [[value] for value, length in zip(values, lengths, strict=True) for _ in range(length)],
        dtype=dtype,
        device=scores.device,
    )
    if parameter == "top_k":
        return _TopKRows(column, first.filter_value)
    merged = copy.copy(first)
    setattr(merged, parameter, column)
    return merged


class _TopKRows(LogitsProcessor):
    """`TopKLogitsWarper` with a number for each row: `[rows, 1]`."""

    def __init__(self, top_k: Tensor, filter_value: float) -> None:
        self._top_k = top_k
        self._filter_value = filter_value

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        largest = torch.topk(scores, int(self._top_k.max()), dim=-1)[0]
        return scores.masked_fill(scores < largest.gather(1, self._top_k - 1), self._filter_value)
