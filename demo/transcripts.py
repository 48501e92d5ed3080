"""`Transcripts`: which tokens the model really chose for a text, so that the next turn finds them in the cache.

A conversation comes back as text. Tokenized anew, what the model wrote may fall into other tokens than those it chose,
and from the first that differs on, nothing of it would be found in the prefix cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

MOST_KEPT = 256


class Transcripts:
    """The last conversations: their whole text, and its tokens. Found by the text alone, from any visitor."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        """Keeps so many of them."""
        self._most = most
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, list[int]] = OrderedDict()

    def remember(self, text: str, ids: Sequence[int]) -> None:
        """That a text was made of these tokens."""
        with self._lock:
            self._ids[text] = list(ids)
            self._ids.move_to_end(text)
            while len(self._ids) > self._most:
                self._ids.popitem(last=False)

    def encode(self, tokenizer: Any, text: str, adds_special_tokens: bool) -> list[int]:
        """A text as tokens: those of the longest beginning that is known, and the rest tokenized.

        Args:
            tokenizer: The model's.
            text: The text.
            adds_special_tokens: Whether the tokenizer is to put its own in front; not if the text has them.
        """
        plain = list(tokenizer(text, add_special_tokens=adds_special_tokens)["input_ids"])
        with self._lock:
            known = max((each for each in self._ids if text.startswith(each)), key=len, default="")
            ids = self._ids.get(known)
        if ids is None:
            return plain
        joined = ids + list(tokenizer(text[len(known) :], add_special_tokens=False)["input_ids"])
        # Some tokenizers change a text's beginning (a space in front): then the pieces don't make up the whole.
        return joined if tokenizer.decode(joined) == tokenizer.decode(plain) else plain
