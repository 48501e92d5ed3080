"""How likely tokens were, in the two shapes that OpenAI's interface has for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_paged.sampling.logprobs import TokenLogprobs
from hf_paged.server.text import UNKNOWN

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of tokenizers that fall back to bytes
LEAST = -9999.0  # what JSON has in place of minus infinity


class TokenNames:
    """The text of single tokens, and their bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = {character: value for value, character in bytes_to_unicode().items()}

    def text(self, token_id: int) -> str:
        """Its text; U+FFFD for bytes that are part of a character."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def bytes_of(self, token_id: int) -> list[int]:
        """Those that it stands for, also where they are part of a character."""
        text = self.text(token_id)
        if UNKNOWN in text:
            token = str(self._tokenizer.convert_ids_to_tokens(token_id))
            if (byte := BYTE.fullmatch(token)) is not None:
                return [int(byte[1], 16)]
            if all(character in self._byte_of for character in token):
                return [self._byte_of[character] for character in token]
        return list(text.encode())

    def chat(self, said: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """As `/v1/chat/completions` gives them."""
        return {
            "content": [
                self._named(each.token_id, each.logprob)
                | {"top_logprobs": [self._named(token_id, logprob) for token_id, logprob in each.top]}
                for each in said
            ],
            "refusal": None,
        }

    def completion(self, said: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """As `/v1/completions` gives them, for tokens whose text begins at a character of it."""
        tokens = [self.text(each.token_id) for each in said]
        return {
            "tokens": tokens,
            "token_logprobs": [max(each.logprob, LEAST) for each in said],
            "top_logprobs": [self._top(each) for each in said],
            "text_offset": list(accumulate(map(len, tokens), initial=offset))[:-1],
        }

    def prompt(self, said: Sequence[TokenLogprobs | None], num_top: int) -> list[dict[str, Any] | None]:
        """As vLLM gives them for a prompt: for each token a table by token ids, its own first."""
        return [None if each is None else self._ranked(each, num_top) for each in said]

    def _ranked(self, said: TokenLogprobs, num_top: int) -> dict[str, Any]:
        found = [(said.token_id, said.logprob, said.rank)]
        found += [(*each, rank) for rank, each in enumerate(said.top[:num_top], 1) if each[0] != said.token_id]
        return {
            str(token_id): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": self.text(token_id)}
            for token_id, logprob, rank in found
        }

    def echoed(self, token_ids: Sequence[int], said: Sequence[TokenLogprobs | None], num_top: int) -> dict[str, Any]:
        """As of a completion, of a prompt that is shown without its special tokens: nothing is said of the first."""
        tokens = [self.text(token_id) for token_id in token_ids]
        hidden = set(getattr(self._tokenizer, "all_special_ids", ()))
        lengths = [0 if token_id in hidden else len(token) for token_id, token in zip(token_ids, tokens, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else max(each.logprob, LEAST) for each in said],
            "top_logprobs": [None if each is None else self._top(each, num_top) for each in said],
            "text_offset": list(accumulate(lengths, initial=0))[:-1],
        }

    def _top(self, said: TokenLogprobs, num_top: int | None = None) -> dict[str, float]:
        found = [*said.top[:num_top], (said.token_id, said.logprob)]
        return {self.text(token_id): max(logprob, LEAST) for token_id, logprob in found}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": max(logprob, LEAST), "bytes": self.bytes_of(token_id)}
