"""Log-probabilities of chosen tokens and of the likeliest ones beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hf_paged.kernels.transfers import ToHost

MODES = ("raw", "processed")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token.

    Attributes:
        token_id: The token.
        logprob: Its log-probability.
        top: The likeliest tokens in its place and theirs, likeliest first.
        rank: 1 for the likeliest of all tokens; of a prompt's tokens only.
        support: The ids that truncation left to choose from, if that was asked for; `None`: all.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    rank: int | None = None
    support: list[int] | None = None


@dataclass(frozen=True, slots=True)
class LogprobsWanted:
    """A request for log-probabilities of generated tokens.

    Attributes:
        is_processed: Of what sampling drew from, not of the model's own logits.
        has_support: Name the tokens that there were to draw from.
    """

    num_top: int
    is_processed: bool = False
    has_support: bool = False

    @property
    def needs_scores(self) -> bool:
        """Whether it needs the scores that processors make of logits."""
        return self.is_processed or self.has_support

    @classmethod
    def of(cls, logprobs: Any, mode: Any, vocab_size: int, has_support: bool = False) -> LogprobsWanted | None:
        """From the arguments of a request.

        Raises:
            ValueError: No number of the vocabulary's tokens, or no mode.
        """
        if mode not in MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(map(repr, MODES))}, got {mode!r:.80}")
        if not isinstance(has_support, bool):
            raise ValueError(f"return_support must be True or False, got {has_support!r:.80}")
        if logprobs is None and not has_support:
            return None
        logprobs = 0 if logprobs is None else logprobs
        _check_number("logprobs", logprobs, vocab_size)
        return cls(logprobs, mode == "processed", has_support)


@dataclass(frozen=True, slots=True)
class ScoresWanted:
    """A request for log-probabilities of a given text's tokens, by the model's own logits.

    Attributes:
        first: Index of the first token that is asked about.
    """

    num_top: int
    first: int

    @classmethod
    def of(cls, top: Any, first: Any, vocab_size: int) -> ScoresWanted:
        """From the arguments of `score`.

        Raises:
            ValueError: No number of the vocabulary's tokens, or no index of a token that follows others.
        """
        if isinstance(first, bool) or not isinstance(first, int) or first < 1:
            raise ValueError(f"first must be the index of a token after the text's first one, got {first!r:.80}")
        _check_number("top", top, vocab_size)
        return cls(top, first)


def _check_number(name: str, value: Any, vocab_size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= vocab_size:
        raise ValueError(
            f"{name} must be a number of likeliest tokens from 0 to {vocab_size} (0: of the chosen one only), "
            f"got {value!r:.80}"
        )


def log_probs(logits: Tensor, temperature: float = 1.0, support: Tensor | None = None) -> Tensor:
    """The one formula of log-probabilities: of tokens that are sampled, scored, and trained on.

    Args:
        logits: `[..., vocab_size]`, or scores that processors made of them.
        temperature: They are divided by it, in float32.
        support: `[..., vocab_size]` bool, the tokens that there were to choose from; `None`: all.

    Returns:
        `[..., vocab_size]` float32.
    """
    scores = logits.float()
    if temperature != 1.0:
        scores = scores / temperature
    if support is not None:
        scores = scores.masked_fill(~support, float("-inf"))
    return scores.log_softmax(dim=-1)


def token_log_probs(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, support: Tensor | None = None
) -> Tensor:
    """The log-probabilities of tokens, by the formula of sampled tokens: equal logits, equal bits.

    `submit(logprobs=0, logprobs_mode="processed")` gives the same, with no processors but temperature and truncation.

    Args:
        logits: `[..., vocab_size]`, of the model.
        tokens: `[...]` int64, in the places that the logits are of.
        temperature: As it was when they were sampled.
        support: `[..., vocab_size]` bool, the tokens that truncation left to choose from (`RequestOutput.support`).

    Returns:
        `[...]` float32.

    Raises:
        ValueError: A temperature of 0, which has none.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature!r:.80}")
    return log_probs(logits, temperature, support).gather(-1, tokens[..., None])[..., 0]


class Logprobs:
    """Log-probabilities of some rows' tokens, on the device and on their way to the host."""

    def __init__(
        self, scores: Tensor, tokens: Tensor, num_top: int, is_ranked: bool = False, drawn_from: Tensor | None = None
    ) -> None:
        """Queues the transfer; waits for nothing.

        Args:
            scores: `[rows, vocab_size]` float32, of any scale: `log_softmax` is of these.
            tokens: `[rows]` int64, what was chosen; below 0 where nothing was.
            is_ranked: Count what is likelier than the tokens.
            drawn_from: `[rows, vocab_size]` scores, -inf of tokens that there were not to choose from, if these are to
                be told.
        """
        found = log_probs(scores)
        top, ids = found.topk(num_top, dim=-1)
        own = found.gather(1, tokens.clamp(min=0)[:, None])
        self._own, self._tokens, self._top, self._ids = ToHost(own[:, 0]), ToHost(tokens), ToHost(top), ToHost(ids)
        self._ranks = ToHost((found > own).sum(dim=-1) + 1) if is_ranked else None
        self._support = None if drawn_from is None else ToHost(drawn_from > float("-inf"))

    def read(self) -> list[TokenLogprobs]:
        """Returns one a row. Waits for the device."""
        own, tokens, top, ids = (each.wait().tolist() for each in (self._own, self._tokens, self._top, self._ids))
        ranks = [None] * len(own) if self._ranks is None else self._ranks.wait().tolist()
        kept = [None] * len(own) if self._support is None else self._support.wait()
        support = [None if row is None or bool(row.all()) else row.nonzero()[:, 0].tolist() for row in kept]
        return [
            TokenLogprobs(token, logprob, list(zip(top_ids, values, strict=True)), rank, left)
            for token, logprob, top_ids, values, rank, left in zip(tokens, own, ids, top, ranks, support, strict=True)
        ]
