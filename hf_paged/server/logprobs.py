"""How likely tokens were, in the two shapes that OpenAI's interface has for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hf_paged.sampling.logprobs import TokenLogprobs

LEAST = -9999.0  # what JSON has in place of minus infinity


class TokenNames:
    """The text of single tokens, and their bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """Its text; U+FFFD for bytes that are part of a character."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def chat(self, said: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of `/v1/chat/completions`."""
        return {
            "content": [
                self._named(each.token_id, each.logprob)
                | {"top_logprobs": [self._named(token_id, logprob) for token_id, logprob in each.top]}
                for each in said
            ],
            "refusal": None,
        }

    def completion(self, said: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """Of `/v1/completions`, for tokens whose text begins at a character of it."""
        tokens = [self.text(each.token_id) for each in said]
        return {
            "tokens": tokens,
            "token_logprobs": [max(each.logprob, LEAST) for each in said],
            "top_logprobs": [self._top(each) for each in said],
            "text_offset": list(accumulate(map(len, tokens), initial=offset))[:-1],
        }

    def echoed(self, token_ids: Sequence[int], said: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The same of a prompt that is shown without its special tokens: nothing is said of its first token."""
        tokens = [self.text(token_id) for token_id in token_ids]
        hidden = set(getattr(self._tokenizer, "all_special_ids", ()))
        lengths = [0 if token_id in hidden else len(token) for token_id, token in zip(token_ids, tokens, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": [None if each is None else max(each.logprob, LEAST) for each in said],
            "top_logprobs": [None if each is None else self._top(each) for each in said],
            "text_offset": list(accumulate(lengths, initial=0))[:-1],
        }

    def _top(self, said: TokenLogprobs) -> dict[str, float]:
        found = [*said.top, (said.token_id, said.logprob)]
        return {self.text(token_id): max(logprob, LEAST) for token_id, logprob in found}

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.text(token_id)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode())}
