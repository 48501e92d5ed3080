"""How many drafts pay: from what steps have cost, by their number of tokens, and how often drafts were right."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from math import log2

OLD = 0.9  # what an earlier draft counts beside the next
FASTER, SLOWER = 0.5, 0.1  # what a step counts that took less, or more, than those before: what else runs only adds
FADES, REACH = 0.9995, 8  # what sizes within reach lose a step: one that seemed slow is tried again
LEAST_PAUSE, MOST_PAUSE = 8, 64  # tokens of a row without drafts, after which one is tried again


class StepCosts:
    """Seconds of steps by their number of tokens, measured as they run, for four sizes an octave.

    Attributes:
        num_rows: Of the last such step.
    """

    def __init__(self) -> None:
        """Nothing is known: more tokens are taken to cost nothing."""
        self.num_rows = 1
        self._sizes: dict[int, tuple[float, float]] = {}  # mean tokens and low seconds
        self._tokens: list[float] = []  # the same in order, where
        self._seconds: list[float] = []  # more tokens never take less

    def note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step has run all of whose tokens' logits were wanted."""
        self.num_rows = num_rows
        size = round(4 * log2(num_tokens))
        tokens, known = self._sizes.get(size, (num_tokens, seconds))
        for other, (mean, low) in self._sizes.items():
            if num_rows <= mean <= REACH * num_rows:
                self._sizes[other] = mean, low * FADES
        weight = FASTER if seconds < known else SLOWER
        self._sizes[size] = tokens + (num_tokens - tokens) / 8, known + weight * (seconds - known)
        self._tokens, measured = map(list, zip(*(self._sizes[size] for size in sorted(self._sizes)), strict=True))
        self._seconds = list(accumulate(reversed(measured), min))[::-1]

    def seconds(self, num_tokens: float) -> float:
        """What a step of so many tokens would take; between sizes that were measured, what lies between."""
        place = bisect_left(self._tokens, num_tokens)
        if place == len(self._tokens):
            return self._seconds[-1] if self._seconds else 1.0
        if place == 0:  # to be tried
            return self._seconds[0] * num_tokens / self._tokens[0]
        first, last = self._tokens[place - 1], self._tokens[place]
        share = (num_tokens - first) / (last - first)
        return self._seconds[place - 1] + share * (self._seconds[place] - self._seconds[place - 1])


@dataclass(slots=True)
class RowBudget:
    """Of one row.

    Attributes:
        limit: Drafts at most.
        num_right: Drafts that were right, and
        num_wrong: ended what was right, older ones counting less.
        pause: Tokens to come before drafts are tried again, where they don't pay.
        next_pause: How many after that, should that try be wrong, too.
        is_due: That try is to come.
    """

    limit: int
    num_right: float = 0.7
    num_wrong: float = 0.7
    pause: int = 0
    next_pause: int = LEAST_PAUSE
    is_due: bool = False

    def most(self, costs: StepCosts, draft_seconds: float = 0.0) -> int:
        """How many drafts promise most tokens a second, were all rows of the step to have so many.

        Args:
            costs: Of steps.
            draft_seconds: That it takes to get one more for all of them.
        """
        if self.pause:
            return 0
        right = self.num_right / (self.num_right + self.num_wrong)
        rows = costs.num_rows
        best, best_rate, expected, likely = 0, 1.0 / costs.seconds(rows), 1.0, 1.0
        for count in range(1, self.limit + 1):
            likely *= right
            expected += likely
            rate = expected / (costs.seconds(rows * (1 + count)) + count * draft_seconds)
            if rate > best_rate:
                best, best_rate = count, rate
        if best == 0 and not self.is_due:
            self.pause = self.next_pause
            self.next_pause = min(2 * self.next_pause, MOST_PAUSE)
        return max(best, int(self.is_due))

    def note(self, num_drafts: int, num_right: int, num_new: int) -> None:
        """So many of its drafts were right, and it has so many tokens more."""
        if num_drafts:
            self.is_due = False
            self.num_right = OLD * self.num_right + num_right
            self.num_wrong = OLD * self.num_wrong + (num_right < num_drafts)
            if num_right:
                self.next_pause = LEAST_PAUSE
        elif self.pause:
            self.pause = max(self.pause - num_new, 0)
            self.is_due = self.pause == 0
