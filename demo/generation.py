"""`Sampling`: how tokens are chosen, checked and turned into arguments of `generate()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .limits import Limits, check_number, check_whole_number
from .loading import LoadedModel

MAX_SEED = 2**31 - 1


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a reply are chosen.

    Attributes:
        max_new_tokens: Tokens at most.
        temperature: 0 takes the likeliest token each time.
        top_p: Only the likeliest tokens that together have this probability.
        top_k: Only this many of the likeliest tokens; 0: no such limit.
        repetition_penalty: Above 1, tokens that were there before become less likely.
        seed: Of the draws; `None`: others each time.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    repetition_penalty: float = 1.1
    seed: int | None = None

    @classmethod
    def checked(
        cls,
        limits: Limits,
        max_new_tokens: Any,
        temperature: Any,
        top_p: Any = 1.0,
        top_k: Any = 0,
        repetition_penalty: Any = 1.0,
        seed: Any = None,
    ) -> Sampling:
        """From what was typed or sent; a seed of -1 is none.

        Raises:
            RefusedError: A value is none, or out of range.
        """
        return cls(
            check_whole_number("The number of new tokens", max_new_tokens, 1, limits.new_tokens),
            check_number("The temperature", temperature, 0.0, 2.0),
            check_number("Top-p", top_p, 0.05, 1.0),
            check_whole_number("Top-k", top_k, 0, 1000),
            check_number("The repetition penalty", repetition_penalty, 1.0, 2.0),
            None if seed in (None, -1) else check_whole_number("The seed", seed, 0, MAX_SEED),
        )

    def arguments(self, loaded: LoadedModel) -> dict[str, Any]:
        """As arguments of `generate()`, whatever defaults the model's own generation config has."""
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "pad_token_id": loaded.pad_token_id,
            "repetition_penalty": self.repetition_penalty,
            "num_beams": 1,
            "num_return_sequences": 1,
        }
        if not self.temperature:
            return arguments | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return arguments | {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or None,
        }
