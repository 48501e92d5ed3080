"""`PreemptionCost`: whether computing a sequence again or swapping it is faster here, from what both have taken."""

from __future__ import annotations

_NEWEST = 0.2  # weight of the newest measurement in the running averages


class PreemptionCost:
    """Measured costs of recomputation and of swapping.

    Recomputing costs time in proportion to the tokens, swapping to the blocks (both ways) beside a fixed part for its
    launches and bookkeeping. Where the two lines meet depends on the model and on the machine: both slopes are running
    averages of what this process measured. Until it has measured any swap, the first long enough group is the probe.

    Attributes:
        seconds_per_token: Of prefill; `None` before the first one.
        seconds_per_block: Of a copy one way; `None` before the first one.
    """

    FIXED_SECONDS = 2e-4  # assumed, for launches, index tensors and bookkeeping: only short sequences notice it
    PROBE_TOKENS = 64  # where the first swap is tried, for the sake of its measurement

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None
        self.seconds_per_block: float | None = None

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Books a step that was mostly prefill."""
        self.seconds_per_token = _average(self.seconds_per_token, seconds / num_tokens)

    def note_swap(self, num_blocks: int, seconds: float) -> None:
        self.seconds_per_block = _average(
            self.seconds_per_block, max(seconds - self.FIXED_SECONDS / 2, seconds / 10) / num_blocks
        )

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether so many tokens in so many blocks are cheaper to swap out and in than to compute again."""
        if self.seconds_per_token is None:
            return False
        if self.seconds_per_block is None:
            return num_tokens >= self.PROBE_TOKENS
        return self.FIXED_SECONDS + 2 * num_blocks * self.seconds_per_block < num_tokens * self.seconds_per_token


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - _NEWEST) * old + _NEWEST * new
