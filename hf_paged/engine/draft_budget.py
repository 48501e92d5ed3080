"""How many drafts pay: from what steps have cost, by their number of tokens, and how often drafts were right."""

from __future__ import annotations

from dataclasses import dataclass

OLD = 0.9  # what an earlier draft counts beside the next
OLDER = 0.998  # what an earlier step counts beside the next, for what a token costs beside others
DRIFT = 0.4  # what a step counts for how fast the machine is now
OUTLIER = 2.0  # times that a step may take more, or less, than expected, and count for it
SHARE = 0.3  # of a step is taken to be its tokens', the rest what any costs, as far as
VARIED = 0.05  # steps' numbers of tokens vary less than this, beside their mean, squared
MARGIN = 1.1  # times as fast that a step with drafts has to be: what they cost the host is not measured
LEAST = 0.05  # of the mean, that any step costs
LEAST_PAUSE, MOST_PAUSE = 8, 64  # tokens of a row without drafts, after which one is tried again


class StepCosts:
    """What steps cost, by their number of tokens: a straight line through those that were measured.

    What else runs on the machine makes all of them slower for a while, with many tokens or few. So they are measured
    in a unit that becomes slower or faster with them.

    Attributes:
        num_rows: The rows of the last such step.
    """

    def __init__(self) -> None:
        """Begins without measurements: more tokens are taken to cost nothing."""
        self.num_rows = 1
        self._unit = 1.0  # seconds
        self._weight = self._tokens = self._units = 0.0  # of all steps; their mean
        self._spread = self._together = 0.0  # sums of squared distances from the mean, and of their products
        self._slope = 0.0

    def note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Books a step all of whose tokens' logits were wanted."""
        self.num_rows = num_rows
        if not self._weight:
            self._unit, self._units = seconds, 1.0
        expected = self.seconds(num_tokens)
        ratio = min(max(seconds / expected, 1 / OUTLIER), OUTLIER)
        units = ratio * expected / self._unit
        self._unit *= ratio**DRIFT
        self._weight = OLDER * self._weight + 1
        tokens_off, units_off = num_tokens - self._tokens, units - self._units
        self._tokens += tokens_off / self._weight
        self._units += units_off / self._weight
        self._spread = OLDER * self._spread + tokens_off * (num_tokens - self._tokens)
        self._together = OLDER * self._together + tokens_off * (units - self._units)
        known = VARIED * self._tokens**2
        slope = (self._together + known * SHARE * self._units / self._tokens) / (self._spread + known)
        self._slope = max(0.0, slope)

    def seconds(self, num_tokens: float) -> float:
        """The seconds that a step of so many tokens would take."""
        if not self._weight:
            return self._unit
        return self._unit * max(self._units + self._slope * (num_tokens - self._tokens), LEAST * self._units)


@dataclass(slots=True)
class RowBudget:
    """How many drafts one row gets.

    Attributes:
        limit: The most drafts.
        num_right: The drafts that were right, and
        num_wrong: those that ended what was right; older ones count less.
        pause: Tokens to come before drafts are tried again, where they don't pay.
        next_pause: How many after that, should that try be wrong, too.
        is_due: Whether drafts are to be tried again.
    """

    limit: int
    num_right: float = 0.7
    num_wrong: float = 0.7
    pause: int = 0
    next_pause: int = LEAST_PAUSE
    is_due: bool = False

    def most(self, costs: StepCosts, draft_seconds: float = 0.0) -> int:
        """How many drafts promise most tokens a second, were all rows of the step to have so many."""
        if self.pause:
            return 0
        right = self.num_right / (self.num_right + self.num_wrong)
        rows = costs.num_rows
        best, best_rate, expected, likely = 0, MARGIN / costs.seconds(rows), 1.0, 1.0
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

    def align(self, num_tokens: int) -> None:
        """Has the next try of a row of so many tokens come with those of other rows: any drafts slow a step down."""
        self.pause += -(num_tokens + self.pause) % LEAST_PAUSE

    def note(self, num_drafts: int, num_right: int, num_new: int) -> None:
        """Books that so many of its drafts were right, and that it has so many tokens more."""
        if num_drafts:
            self.is_due = False
            self.num_right = OLD * self.num_right + num_right
            self.num_wrong = OLD * self.num_wrong + (num_right < num_drafts)
            if num_right:
                self.next_pause = LEAST_PAUSE
        elif self.pause:
            self.pause = max(self.pause - num_new, 0)
            self.is_due = self.pause == 0
