"""Formats that texts are to follow, as grammars."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from hf_paged.sampling.grammar import Grammar, GrammarCompiler
from hf_paged.server.errors import bad_field
from hf_paged.server.grammar_trial import STACK_BYTES, GrammarTrial
from hf_paged.server.schemas import ChatRequest, SamplingBody
from hf_paged.server.tools import grammar_of

ANY_OBJECT = {"type": "object"}


class Formats:
    """Compiles what requests ask for, one grammar at a time; the compiler is made when the first one does."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int], max_bytes: int, timeout: float
    ) -> None:
        """See `GrammarCompiler`.

        Args:
            tokenizer: Of the model.
            vocab_size: Of the model.
            eos_token_ids: Of the model.
            max_bytes: Of a grammar.
            timeout: Seconds that compiling one may take.
        """
        self._arguments = tokenizer, vocab_size, eos_token_ids
        self._max_bytes = max_bytes
        self._trial = GrammarTrial(timeout)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        executor = ThreadPoolExecutor(1, thread_name_prefix="hf_paged_grammars")
        before = threading.stack_size(STACK_BYTES)
        try:
            executor.submit(int).result()  # starts the thread
        finally:
            threading.stack_size(before)
        return executor

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(*self._arguments, check=self._check)

    def _check(self, setup: dict[str, Any], text: str) -> None:
        if len(text) > self._max_bytes:
            raise ValueError(f"its {len(text)} characters are more than the limit of {self._max_bytes}")
        self._trial.check(setup, text)

    async def of(self, body: SamplingBody) -> Grammar | None:
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
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, body)
        except ValueError as error:
            raise bad_field(field, str(error)) from error

    def close(self) -> None:
        """Ends the thread and its process."""
        if "_thread" in self.__dict__:
            self._thread.submit(self._trial.close)
            self._thread.shutdown(wait=False)

    def _compiled(self, body: SamplingBody) -> Grammar:
        own, wanted, compiler = body.response_format, body.structured_outputs, self._compiler
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
