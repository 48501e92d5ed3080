"""How likely tokens were, in the two shapes that OpenAI's interface has for it."""

from __future__ import annotations

from collections.abc import Sequence
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
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        top = [
            {
                self.text(token_id): max(logprob, LEAST)
                for token_id, logprob in [*each.top, (each.token_id, each.logprob)]
            }
            for each in said
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [max(each.logprob, LEAST) for each in said],
            "top_logprobs": top,
            "text_offset": offsets[:-1],
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.text(token_id)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode())}
