"""`Fitted`: a cost model of a machine that is here, fitted to steps that were measured on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from simulation import Work

from hf_paged.core.sequence import SequenceGroup

FITTED = "step", "decode", "prompt", "kv", "pair"
REWEIGHTED = 10  # times; the first time errors are relative to what was measured


@dataclass(frozen=True)
class Fitted:
    """Seconds of a step, and what is added for each of what is in it.

    Attributes:
        transfer: Of a copy to CPU memory beside its bytes; in
        swap: a token's copy there or back, which is not fitted, since nothing is swapped in the steps that are; 0: it
            is not known.
    """

    step: float
    decode: float
    prompt: float
    kv: float
    pair: float
    transfer: float = 0.0
    swap: float = 0.0

    @classmethod
    def to(cls, steps: list[tuple[Work, float]]) -> Fitted:
        """By least squares of the error relative to the prediction; none below zero.

        Relative, so that short steps count as much as long ones. Relative to what was measured, a step would count
        the less the longer it was held up, and sums would come out too low.
        """
        rows = np.array([_row(work) for work, _ in steps], dtype=float)
        seconds = np.array([took for _, took in steps])
        predicted = seconds
        for _ in range(REWEIGHTED):
            kept = list(range(rows.shape[1]))
            while True:
                found = np.linalg.lstsq(rows[:, kept] / predicted[:, None], seconds / predicted, rcond=None)[0]
                if (found >= 0).all():
                    break
                del kept[int(found.argmin())]
            predicted = rows[:, kept] @ found
        values = dict(zip(kept, found.tolist()))
        return cls(*(values.get(i, 0.0) for i in range(rows.shape[1])))

    def seconds(self, work: Work) -> float:
        values = self.step, self.decode, self.prompt, self.kv, self.pair
        return sum(value * amount for value, amount in zip(values, _row(work))) + self.swap * work.swapped

    def prefers_swap(self, group: SequenceGroup) -> bool:
        return 0 < 2 * self.swap < self.prompt

    def row(self) -> dict[str, Any]:
        """In microseconds."""
        return {name: float(f"{1e6 * value:.4g}") for name, value in asdict(self).items() if name in FITTED}


def _row(work: Work) -> tuple[int, int, int, int, int]:
    return 1, work.decodes, work.prompt, work.kv, work.pairs
