"""Formats that texts are to follow, as grammars."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from hf_paged import Grammar, GrammarCompiler
from hf_paged.server.chat_schemas import ChatRequest
from hf_paged.server.errors import ApiError, bad_field
from hf_paged.server.grammar_trial import STACK_BYTES, GrammarTrial
from hf_paged.server.schemas import SamplingBody
from hf_paged.server.tools import grammar_of, has_schema

LINE = re.compile(r"(?:at )?(\d+)\(\d+\): ")
MAX_MESSAGE = 1000  # characters: compilers quote what they were given


def bad_grammar(body: SamplingBody, message: str) -> ApiError:
    """What a compiler or matcher says of the field that a text was to follow."""
    wanted, own = body.structured_outputs, body.response_format
    if wanted is not None:
        field = f"structured_outputs.{next(iter(wanted.model_fields_set)).rstrip('_')}"
    elif isinstance(body, ChatRequest) and (number := _tool(body, message)) is not None:
        field = f"tools.{number}.function.parameters"
    elif body.json_format is None or (isinstance(body, ChatRequest) and body.is_forced):
        field = "tools"
    else:
        field = "response_format" if own is None or own.json_schema is None else "response_format.json_schema.schema"
    if "NoExtensionBias" in message:
        message = "it allows no text at all"
    return bad_field(field, message.removesuffix("<non-verbose/>").strip()[:MAX_MESSAGE])


def _tool(body: ChatRequest, message: str) -> int | None:
    """The number of the tool that a compiler's message is about, if it is about one."""
    line, tools = LINE.match(message), body.callable_tools
    number = (int(line[1]) - 3) // 2 if line else -1  # `grammar_of` has two lines for each, behind two of its own
    return body.tools.index(tools[number]) if 0 <= number < len(tools) else None


class Formats:
    """Compiles what requests ask for, one grammar at a time; the compiler is made when the first one does."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int], max_bytes: int, timeout: float
    ) -> None:
        """See `GrammarCompiler`.

        Args:
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
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, body)
        except ValueError as error:
            raise bad_grammar(body, str(error)) from error

    def close(self) -> None:
        """Ends the thread and its process."""
        if "_thread" in self.__dict__:
            self._thread.submit(self._trial.close)
            self._thread.shutdown(wait=False)

    def _compiled(self, body: SamplingBody) -> Grammar | None:
        wanted, compiler, tokenizer = body.structured_outputs, self._compiler, self._arguments[0]
        chat = body if isinstance(body, ChatRequest) and body.offered_tools and wanted is None else None
        if chat is not None and (chat.is_forced or not has_schema(tokenizer)):  # which alone knows how calls look
            return compiler.lark(grammar_of(chat, tokenizer))
        if body.json_format is not None:
            return compiler.json_schema(body.json_format)
        if wanted is None:
            return None
        if wanted.regex is not None:
            return compiler.regex(wanted.regex)
        if wanted.grammar is not None:
            return compiler.lark(wanted.grammar)
        if wanted.choice is not None:
            return compiler.choice(wanted.choice)
        return compiler.json_schema(wanted.json_)
