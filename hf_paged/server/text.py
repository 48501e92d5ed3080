"""Text from tokens as they come, without half characters and without parts of stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

UNKNOWN = "\ufffd"  # what bytes that aren't UTF-8 (yet) decode to
CONTEXT = 6  # tokens before the first one that decide on a space between
KEPT = 12  # tokens that are decoded again with the next one; the fewer, the oftener is the beginning cut off

MAX_OPEN = 3  # bytes of a character without its last one
MAX_WAITS = 8  # tokens with bytes of one character, and some that have none


def decoder_of(tokenizer: Any, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """The part of a tokenizer that decodes ids, spaces as they are.

    Where `decode` is transformers' own around a tokenizer in Rust, that one by itself: the way around it takes ten
    times as long, and changes nothing.
    """
    own = [(PreTrainedTokenizerBase, "decode"), (PreTrainedTokenizerFast, "_decode")]
    if all(getattr(getattr(tokenizer, name, None), "__func__", None) is getattr(kind, name) for kind, name in own):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of one sequence, piece by piece."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._decode_ids = decoder_of(tokenizer, skip_special_tokens)
        self._ids = list(prompt[-CONTEXT:])
        self._text = self._decode()
        if self._text.endswith(UNKNOWN):
            self._ids, self._text = [], ""
        self._num_certain = len(self._ids)  # the characters of these are whole
        self._num_waits = 0  # for the rest of a character, in a row

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain with these tokens."""
        self._ids += token_ids
        text = self._decode()
        if text.endswith(UNKNOWN):
            self._num_waits += 1
            return self._of_no_character(text) if self._num_waits > MAX_WAITS else ""  # the rest of one may come
        self._num_waits = 0
        new, self._text = text[len(self._text) :], text
        if len(self._ids) > KEPT:
            del self._ids[: self._num_certain]  # what comes next is decoded behind the rest: whole characters
            self._text = self._decode()
        self._num_certain = len(self._ids)
        return new

    def _of_no_character(self, text: str) -> str:
        """The certain part of a text whose last bytes aren't UTF-8, but for those that a character may begin with."""
        num_open = min(len(text) - len(text.rstrip(UNKNOWN)), MAX_OPEN)
        new = text[len(self._text) : len(text) - num_open]
        del self._ids[:-KEPT]
        text = self._decode()
        self._text = text[: max(len(text) - num_open, 0)]
        self._num_certain = 0
        return new

    def flush(self) -> str:
        return self._decode()[len(self._text) :]

    def _decode(self) -> str:
        return self._decode_ids(self._ids)


class StopStrings:
    """Ends a text before a stop string, of which no part is let out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string has come; what is behind it is held."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._held = text[end:]
            return text[:start], True
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that may be the beginning of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
