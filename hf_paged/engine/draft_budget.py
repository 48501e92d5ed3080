"""How many drafts pay: from what steps have cost, by their number of tokens, and how often drafts were right."""

from __future__ import annotations

from dataclasses import dataclass

OLD = 0.9  # what an earlier step or draft counts beside the next
OUTLIER = 4.0  # times what steps of a size took before: no more than that is believed of one
LEAST_PAUSE, MOST_PAUSE = 8, 64  # tokens of a row without drafts, after which one is tried again


class StepCosts:
    """Seconds of steps by their number of tokens, measured as they run: means of sizes that double.

    Attributes:
        num_rows: Of the last such step.
    """

    def __init__(self) -> None:
        """Nothing is known: more tokens are taken to cost nothing."""
        self.num_rows = 1
        self._sizes: dict[int, tuple[float, float]] = {}  # by exponent, mean tokens and mean seconds

    def note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step has run all of whose tokens' logits were wanted."""
        self.num_rows = num_rows
        size = num_tokens.bit_length()
        known = self._sizes.get(size)
        if known is None:
            self._sizes[size] = (num_tokens, seconds)
        else:
            seconds = min(seconds, OUTLIER * known[1])
            self._sizes[size] = (
                OLD * known[0] + (1 - OLD) * num_tokens,
                OLD * known[1] + (1 - OLD) * seconds,
            )

    def seconds(self, num_tokens: float) -> float:
        """What a step of so many tokens would take; between sizes that were measured, what lies between."""
        below: tuple[float, float] | None = None
        for size in sorted(self._sizes):
            tokens, seconds = self._sizes[size]
            if below is not None and seconds < below[1]:
                seconds = below[1]  # more tokens never take less
            if tokens >= num_tokens:
                if below is None:  # to be tried
                    return seconds * num_tokens / tokens
                share = (num_tokens - below[0]) / (tokens - below[0])
                return below[1] + share * (seconds - below[1])
            below = tokens, seconds
        return 1.0 if below is None else below[1]


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
    num_right: float = 1.0
    num_wrong: float = 0.5
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
