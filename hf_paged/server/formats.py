"""Formats that texts are to follow, as grammars."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hf_paged.sampling.grammar import Grammar, GrammarCompiler
from hf_paged.server.errors import bad_field
from hf_paged.server.schemas import ChatRequest, SamplingBody
from hf_paged.server.tools import grammar_of

ANY_OBJECT = {"type": "object"}


class Formats:
    """Compiles what requests ask for; the compiler is made when the first one does."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """See `GrammarCompiler`."""
        self._arguments = tokenizer, vocab_size, eos_token_ids
        self._made: GrammarCompiler | None = None
        self._lock = threading.Lock()

    @property
    def compiler(self) -> GrammarCompiler:
        """For the model's tokenizer."""
        with self._lock:
            if self._made is None:
                self._made = GrammarCompiler(*self._arguments)
            return self._made

    def of(self, body: SamplingBody) -> Grammar | None:
        """What a request's texts are to follow.

        Raises:
            ApiError: It can't be enforced.
        """
        if not body.is_structured:
            return None
        is_forced = isinstance(body, ChatRequest) and body.is_forced
        field = (
            "tools" if is_forced else "structured_outputs" if body.structured_outputs is not None else "response_format"
        )
        try:
            return self._compiled(body)
        except ValueError as error:
            raise bad_field(field, str(error)) from error

    def _compiled(self, body: SamplingBody) -> Grammar:
        own, wanted, compiler = body.response_format, body.structured_outputs, self.compiler
        if isinstance(body, ChatRequest) and body.is_forced:
            return compiler.lark(grammar_of(body))
        if own is not None:
            return compiler.json_schema(ANY_OBJECT if own.json_schema is None else own.json_schema.schema_)
        assert wanted is not None
        if wanted.regex is not None:
            return compiler.regex(wanted.regex)
        if wanted.grammar is not None:
            return compiler.lark(wanted.grammar)
        if wanted.choice is not None:
            return compiler.choice(wanted.choice)
        return compiler.json_schema(wanted.json_)
