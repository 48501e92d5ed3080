"""Log-probabilities of tokens, in the two shapes that OpenAI's interface has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_paged import TokenLogprobs
from hf_paged.server.text import UNKNOWN, decoder_of

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of tokenizers that fall back to bytes
NUM_KEPT = 1 << 16  # tokens whose texts are kept
LEAST = -9999.0  # what JSON has in place of minus infinity


class TokenNames:
    """The text of single tokens, and their bytes. What is said of many tokens comes as iterators.

    Attributes:
        text: The text of a token; U+FFFD for bytes that are part of a character.
        bytes_of: Those that a token stands for, also where they are part of a character.
    """

    def __init__(self, tokenizer: Any) -> None:
        decode = decoder_of(tokenizer, skip_special_tokens=False)
        self._tokenizer = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self.text: Callable[[int], str] = lru_cache(NUM_KEPT)(lambda token_id: decode([token_id]))
        self.bytes_of: Callable[[int], list[int]] = lru_cache(NUM_KEPT)(self._bytes_of)
        self._byte_of = {character: value for value, character in bytes_to_unicode().items()}

    def _bytes_of(self, token_id: int) -> list[int]:
        text = self.text(token_id)
        if UNKNOWN in text:
            token = str(self._tokenizer.convert_ids_to_tokens(token_id))
            if (byte := BYTE.fullmatch(token)) is not None:
                return [int(byte[1], 16)]
            if all(character in self._byte_of for character in token):
                return [self._byte_of[character] for character in token]
        return list(text.encode())

    def chat(self, said: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The shape of `/v1/chat/completions`."""
        return {
            "content": (
                self._named(each.token_id, each.logprob)
                | {"top_logprobs": [self._named(token_id, logprob) for token_id, logprob in each.top]}
                for each in said
            ),
            "refusal": None,
        }

    def completion(self, said: Sequence[TokenLogprobs], offset: int, hides_special: bool) -> dict[str, Any]:
        """The shape of `/v1/completions`, for tokens whose text begins at a character of it.

        Args:
            hides_special: Whether the text is without its special tokens.
        """
        return {
            "tokens": (self.text(each.token_id) for each in said),
            "token_logprobs": (_shown(each.logprob) for each in said),
            "top_logprobs": (self._top(each) for each in said),
            "text_offset": self._offsets([each.token_id for each in said], offset, hides_special),
        }

    def prompt(self, said: Sequence[TokenLogprobs | None], num_top: int) -> Iterator[dict[str, Any] | None]:
        """The shape of vLLM's `prompt_logprobs`: for each token a table by token ids, its own first."""
        return (None if each is None else self._ranked(each, num_top) for each in said)

    def _ranked(self, said: TokenLogprobs, num_top: int) -> dict[str, Any]:
        found = [(said.token_id, said.logprob, said.rank)]
        found += [(*each, rank) for rank, each in enumerate(said.top[:num_top], 1) if each[0] != said.token_id]
        return {
            str(token_id): {"logprob": _shown(logprob), "rank": rank, "decoded_token": self.text(token_id)}
            for token_id, logprob, rank in found
        }

    def echoed(
        self, token_ids: Sequence[int], said: Sequence[TokenLogprobs | None], num_top: int, hides_special: bool
    ) -> dict[str, Any]:
        """The shape of `completion`, for a prompt that is shown: its first token has none."""
        return {
            "tokens": map(self.text, token_ids),
            "token_logprobs": (None if each is None else _shown(each.logprob) for each in said),
            "top_logprobs": (None if each is None else self._top(each, num_top) for each in said),
            "text_offset": self._offsets(token_ids, 0, hides_special),
        }

    def _offsets(self, token_ids: Sequence[int], first: int, hides_special: bool) -> Iterator[int]:
        hidden = self._special if hides_special else ()
        lengths = (0 if token_id in hidden else len(self.text(token_id)) for token_id in token_ids)
        return islice(accumulate(lengths, initial=first), len(token_ids))

    def _top(self, said: TokenLogprobs, num_top: int | None = None) -> dict[str, float]:
        found = [*said.top[:num_top], (said.token_id, said.logprob)]
        return {self.text(token_id): _shown(logprob) for token_id, logprob in found}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": _shown(logprob), "bytes": self.bytes_of(token_id)}


def _shown(logprob: float) -> float:
    """A number that JSON can hold."""
    return max(LEAST, logprob)  # in this order: also of what is no number
