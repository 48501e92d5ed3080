"""Another way to compute the same, tried before it is used: does it agree with the module's own, and is it faster?"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_paged.model.kept_gains import KeptGains

MIN_GAIN = 1.05  # less is noise
NUM_PROBED = 4  # pairs of a kind
NUM_ROUNDS = 5  # over them


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """What a function makes of these arguments; `None` if it is not one for them."""
    try:
        return function(*args)
    except Exception:  # as a norm says that also takes a gate
        return None


def agrees(result: Tensor, truth: Tensor, tolerance: float, dim: int | None = None) -> bool:
    """Whether two tensors are of one dtype and shape, and differ by no more than a share of the truth's size.

    Args:
        result: What was computed another way.
        truth: What it should be.
        tolerance: The share.
        dim: Along it sizes are taken, where rows differ in theirs; `None`: of the whole.
    """
    if result.dtype is not truth.dtype or result.shape != truth.shape:
        return False
    truth = truth.float()
    return bool(((result.float() - truth).norm(dim=dim) <= tolerance * truth.norm(dim=dim)).all())


class Pair(NamedTuple):
    """Two ways of one computation.

    Attributes:
        kind: All that their speed depends on.
        own: The module's own.
        other: The other.
    """

    kind: Hashable
    own: Callable[[], Tensor]
    other: Callable[[], Tensor]


class Trials:
    """How much kinds of computations gain by another way: measured once, then known.

    Attributes:
        kept: By earlier processes.
    """

    def __init__(self, kept: KeptGains | None = None) -> None:
        self._gains: dict[Hashable, float] = {}
        self.kept = kept

    def gains(self, pairs: Sequence[Pair], tolerances: dict[torch.dtype, float]) -> list[float]:
        """For each of these pairs, its own time over that of the other way; 1, where it is less than `MIN_GAIN`.

        Some pairs of each kind are run in the given order, the model's: a weight that was just used is in the
        processor's cache, and in a model it is not. The two ways take turns: what else the machine does for a moment
        slows both. What earlier processes kept is not measured again, but the two still have to agree.

        Raises:
            RuntimeError: The two disagree.
        """
        unknown: dict[Hashable, list[Pair]] = defaultdict(list)
        for pair in pairs:
            if pair.kind not in self._gains and len(unknown[pair.kind]) < NUM_PROBED:
                unknown[pair.kind].append(pair)
        probed = [pair for pair in pairs if pair in unknown.get(pair.kind, ())]
        ratios = {kind: gain for kind in unknown if self.kept and (gain := self.kept.get(kind)) is not None}
        timed = [pair for pair in probed if pair.kind not in ratios]
        own, other = _seconds(
            [(pair.kind, pair.own) for pair in timed],
            [(pair.kind, pair.other) for pair in timed],
        )
        for pair in probed:
            truth = pair.own()
            if not agrees(pair.other(), truth, tolerances[truth.dtype]):
                raise RuntimeError(f"it computes {pair.kind} wrongly, or the weights are no numbers")
        measured = {kind: own[kind] / other[kind] for kind in own}
        ratios |= self.kept.add(measured) if self.kept and measured else measured
        self._gains |= {kind: ratio if ratio >= MIN_GAIN else 1.0 for kind, ratio in ratios.items()}
        return [self._gains[pair.kind] for pair in pairs]


# One for the process: a kind is the same for all layers of a shape, and for the next model.
TRIALS = Trials(KeptGains())


def _seconds(*series: list[tuple[Hashable, Callable[[], Tensor]]]) -> list[dict[Hashable, float]]:
    """Seconds of the calls of each kind, made in this order; for each series the least of some rounds."""
    rounds: list[list[dict[Hashable, float]]] = [[] for _ in series]
    for _ in range(NUM_ROUNDS):
        for calls, times in zip(series, rounds, strict=True):
            times.append(defaultdict(float))
            for kind, call in calls:
                started = time.perf_counter()
                call()
                times[-1][kind] += time.perf_counter() - started
    return [{kind: min(each[kind] for each in times) for kind in times[0]} for times in rounds]
