"""`Limits`: what one request, and all of them together, may ask for; each refusal is a sentence for a person."""

from __future__ import annotations

from dataclasses import dataclass

CHARACTERS_PER_TOKEN = 32  # a text longer than this many characters a token is refused before it is tokenized


class RefusedError(ValueError):
    """What was asked for is not done. The message is a sentence that says why, and what would be."""


@dataclass(frozen=True)
class Limits:
    """Limits of one app.

    Attributes:
        prompt_tokens: Tokens of a prompt, the conversation so far included.
        new_tokens: Tokens to generate for one prompt.
        requests: Requests running or waiting at once, of all visitors together.
        sequences: Samples or beams of one prompt.
        positions: Tokens that the model can see, prompt and reply together; `None`: the model sets no limit.
    """

    prompt_tokens: int = 1024
    new_tokens: int = 256
    requests: int = 64
    sequences: int = 8
    positions: int | None = None

    def check_text(self, text: object) -> None:
        """Refuses what is no text, none at all, or none that UTF-8 has, and one whose length alone is too much."""
        if not isinstance(text, str) or not text.strip():
            raise RefusedError("There is no text: write a few words for the model to go on from.")
        if len(text) > CHARACTERS_PER_TOKEN * self.prompt_tokens:
            raise RefusedError(
                f"The text has {len(text):,} characters; this demo takes prompts of up to {self.prompt_tokens:,} "
                "tokens, some four characters each."
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RefusedError("The text has half of a character in it (a lone surrogate): write it anew.")

    def check_tokens(self, prompt_tokens: int, new_tokens: int, pool_tokens: int) -> None:
        """Refuses what this demo, the model or the pool has no room for.

        Args:
            prompt_tokens: Tokens of the prompt.
            new_tokens: Tokens to be generated, at most.
            pool_tokens: Tokens that the whole pool can hold.
        """
        check_whole_number("The number of new tokens", new_tokens, 1, self.new_tokens)
        if prompt_tokens > self.prompt_tokens:
            raise RefusedError(
                f"The prompt has {prompt_tokens:,} tokens, what was said before included; this demo takes up to "
                f"{self.prompt_tokens:,}. Shorten it, or start anew."
            )
        total = prompt_tokens + new_tokens
        if self.positions is not None and total > self.positions:
            raise RefusedError(
                f"{prompt_tokens:,} prompt tokens and {new_tokens:,} new ones are {total:,}; the model can see "
                f"{self.positions:,}. Ask for at most {max(0, self.positions - prompt_tokens):,} new tokens, or start "
                "anew."
            )
        if total > pool_tokens:
            raise RefusedError(
                f"{prompt_tokens:,} prompt tokens and {new_tokens:,} new ones can never fit into the pool, which holds "
                f"{pool_tokens:,} tokens in all. Make the pool larger (Pressure), or ask for less."
            )

    def check_requests(self, running: int, wanted: int = 1) -> None:
        """Refuses requests beyond the limit, of which `running` are there already."""
        if running + wanted > self.requests:
            beside = f"{running} of them are running or waiting already" if running else "none is running now"
            raise RefusedError(
                f"This demo takes {self.requests} requests at once and {beside}: {wanted} more would be too many. "
                + ("Try again in a moment." if wanted <= self.requests else "Ask for fewer.")
            )

    def check_sequences(self, count: int) -> None:
        """Refuses more samples or beams than allowed."""
        check_whole_number("The number of samples or beams", count, 1, self.sequences)


def check_whole_number(what: str, value: object, least: int, most: int) -> int:
    """`value` as an integer, refused unless it is a whole number from `least` to `most`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value
        or value not in range(least, most + 1)
    ):
        raise RefusedError(f"{what} must be a whole number from {least:,} to {most:,}, not {value!r:.40}.")
    return int(value)


def check_number(what: str, value: object, least: float, most: float) -> float:
    """`value` as a float, refused unless it is a number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RefusedError(f"{what} must be a number from {least:g} to {most:g}, not {value!r:.40}.")
    return float(value)
