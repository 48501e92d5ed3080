"""Grammars that a text is to follow: a mask over the vocabulary for each row, from llguidance's matchers."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_paged.kernels.transfers import to_device


class GrammarMatcher:
    """Tracks how far one row has come in a grammar."""

    def __init__(self, matcher: Any, executor: Any) -> None:
        """Wraps llguidance's `LLMatcher`; `executor` computes the masks of many."""
        self.matcher = matcher
        self.executor = executor

    def accept(self, token_id: int) -> bool:
        """Takes the row's next token; returns whether the text is complete, and nothing may follow.

        Raises:
            ValueError: The grammar allows no token here, or is too much for its matcher.
        """
        # Its mask is the end of text alone where computing it was given up, and that it takes even then.
        if self.matcher.is_error() or not self.matcher.consume_token(token_id):
            raise ValueError(f"the grammar has no token to go on with: {_reason(self.matcher)}")
        return bool(self.matcher.is_stopped())


def _reason(matcher: Any) -> str:
    """The matcher's error message, without its state."""
    return str(matcher.get_error()).split("\n<state>")[0].strip()


class Grammar:
    """A compiled grammar, for any number of requests at a time."""

    def __init__(self, matcher: Any, executor: Any) -> None:
        self._matcher = matcher
        self._executor = executor

    def matchers(self, count: int) -> list[GrammarMatcher]:
        return [GrammarMatcher(self._matcher.deep_copy(), self._executor) for _ in range(count)]


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps those used last. From any thread.

    What compiles one raises `ValueError` if that can't be done, or a keyword of a schema can't be enforced.
    """

    # JSON as `json.dumps` writes it: else a model that is unsure goes on with white space.
    COMPACT: ClassVar = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_kept: int = 256,
        check: Callable[[dict[str, Any], str], None] | None = None,
    ) -> None:
        """Takes about a second for a large vocabulary.

        Args:
            tokenizer: A fast one of transformers.
            vocab_size: Of the model, which may know more tokens than the tokenizer.
            eos_token_ids: What may stand behind a complete text.
            max_kept: Compiled grammars that are kept.
            check: Called with the arguments of llguidance's tokenizer and limits, and with each new grammar, before it
                is compiled; raises `ValueError`. For grammars of authors who aren't trusted.

        Raises:
            ValueError: The tokenizer is no fast one, or llguidance isn't installed.
        """
        try:
            import llguidance
        except ImportError:
            raise ValueError('grammars need llguidance: pip install "hf-paged[server]"') from None
        self._kinds = llguidance.LLMatcher
        self._executor = llguidance.LLExecutor()
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError(f"grammars need a fast tokenizer, got {type(tokenizer).__name__}")
        own = copy(tokenizer.backend_tokenizer)
        own.no_padding()
        own.no_truncation()
        eos = list(eos_token_ids) or tokenizer.eos_token_id
        # All rows of a step wait for the masks of those that follow a grammar.
        limits = {
            "initial_lexer_fuel": 200_000,
            "step_lexer_fuel": 50_000,
            "step_max_items": 20_000,
            "verbose_errors": False,
        }
        arguments = {"tokenizer": own.to_str(), "n_vocab": vocab_size, "eos_token": eos}
        self._limits = llguidance.LLParserLimits(**limits)
        self._tokenizer = llguidance.LLTokenizer(**arguments)
        self._check = None if check is None else partial(check, arguments | {"limits": limits})
        self._max_kept = max_kept
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def json_schema(self, schema: Any) -> Grammar:
        """JSON that is valid by a schema, on one line."""
        return self._compile(self._kinds.grammar_from_json_schema(json.dumps(schema), defaults=self.COMPACT))

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression matches, from end to end (Rust's syntax)."""
        return self._compile(self._kinds.grammar_from_regex(pattern))

    def lark(self, text: str) -> Grammar:
        """Text by a grammar in Lark's syntax, whose first rule is `start`."""
        return self._compile(self._kinds.grammar_from_lark(text))

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        return self.lark("start: " + " | ".join(json.dumps(text) for text in texts))

    def _compile(self, text: str) -> Grammar:
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
        if self._check is not None:
            self._check(text)
        matcher = self._kinds(self._tokenizer, text, log_level=0, limits=self._limits)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # what is too much already at its beginning is refused here
        if first.is_error():
            raise ValueError(_reason(first))
        grammar = Grammar(matcher, self._executor)
        with self._lock:
            self._kept[text] = grammar
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        return grammar


def token_masks(matchers: Sequence[GrammarMatcher], vocab_size: int) -> np.ndarray:
    """`[rows, words]` int32: bit `i % 32` of word `i // 32` says whether a row's grammar allows token `i`."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    bits = allocate_token_bitmask(len(matchers), vocab_size)
    work = [(each.matcher, row) for row, each in enumerate(matchers)]
    fill_next_token_bitmask_par(matchers[0].executor, work, bits)
    return np.ascontiguousarray(bits)


def mask_tokens(scores: Tensor, matchers: Sequence[GrammarMatcher]) -> Tensor:
    """`[rows, vocab_size]` scores, minus infinity where a row's grammar allows no token."""
    rows, vocab_size = scores.shape
    octets = to_device(token_masks(matchers, vocab_size), scores.device).view(torch.uint8)
    is_allowed = octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1
    return scores.masked_fill(is_allowed.view(rows, -1)[:, :vocab_size] == 0, -float("inf"))
