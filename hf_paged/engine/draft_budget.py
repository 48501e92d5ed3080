"""How many drafts a row gets: as many as are likely enough to be right to be worth their share of a step."""

from __future__ import annotations

from dataclasses import dataclass

OLD = 0.9  # what an earlier draft counts beside the next
PAUSE = 32  # tokens; rows try again at multiples of it, and so together: any drafts slow a step down
FIXED_COST = {"cpu": 16, "cuda": 256}  # what a step costs whatever is in it, in times of what a token costs


@dataclass(slots=True)
class RowBudget:
    """How many drafts one row gets.

    Attributes:
        limit: The most drafts.
        fixed_cost: Of a step, in tokens.
        num_right: The drafts that were right, and
        num_wrong: those that ended what was right; older ones count less.
        resume_at: Tokens of the row from which on it has drafts.
    """

    limit: int
    fixed_cost: int = FIXED_COST["cpu"]
    num_right: float = 0.7
    num_wrong: float = 0.7
    resume_at: int = 0

    def most(self, num_tokens: int, num_rows: int) -> int:
        """How many a row of so many tokens gets beside the others of a step of so many rows."""
        return max(1, self._num_worth(num_rows)) if num_tokens >= self.resume_at else 0

    def note(self, num_drafts: int, num_right: int, num_tokens: int, num_rows: int) -> None:
        """Books that so many of its drafts were right, or that none were found; it now has so many tokens."""
        if num_drafts:
            self.num_right = OLD * self.num_right + num_right
            self.num_wrong = OLD * self.num_wrong + (num_right < num_drafts)
        if not self._num_worth(num_rows):
            self.resume_at = (num_tokens // PAUSE + 1) * PAUSE

    def _num_worth(self, num_rows: int) -> int:
        right = self.num_right / (self.num_right + self.num_wrong)
        cost = num_rows / (num_rows + self.fixed_cost)  # of a draft in each row, in steps
        return sum(right**count > cost for count in range(1, self.limit + 1))
