"""`/v1/completions`: texts that go on."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import Any

from fastapi import Request

from hf_paged import TokenLogprobs
from hf_paged.server.generation import Delta, Generation, Text
from hf_paged.server.replies import DONE, TextEvents, event, event_pieces, joined
from hf_paged.server.schemas import CompletionRequest
from hf_paged.server.serving import Serving

PATH = "/v1/completions"


async def create(serving: Serving, request: Request) -> Any:
    """Texts that go on where prompts end."""
    body = await serving.body(request, CompletionRequest)
    generation = await serving.start(request, body, lambda: serving.prompts.of_completion(body))
    return await serving.reply(request, body, generation, _Answer(serving, body, generation))


class _Answer:
    def __init__(self, serving: Serving, body: CompletionRequest, generation: Generation) -> None:
        self._serving = serving
        self._body = body
        self._generation = generation
        self._prompts = list(body.prompts.values())
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or serving.model_name,
        }
        self._plain = TextEvents(lambda index, text: self._data(index, text, None, None))

    def whole(self) -> dict[str, Any]:
        choices = (self._whole_choice(index, text) for index, text in enumerate(self._best()))
        return self._head | {"choices": choices, "usage": self._generation.usage}

    def _whole_choice(self, index: int, text: Text) -> dict[str, Any]:
        echo, said = self._echo(index), self._said_of_prompt(index)
        own = self._said(text.logprobs, len(echo))
        if said is not None and own is not None:
            own = {name: chain(said[name], own[name]) for name in own}
        return self._choice(index, echo + text.text, own, text.finish_reason) | self._prompt_logprobs(index)

    async def events(self) -> AsyncIterator[bytes]:
        body, generation = self._body, self._generation
        lengths: dict[int, int] = {}  # of each text that has begun
        async for deltas in generation.updates():
            async for piece in joined(chunk for delta in deltas for chunk in self._chunks(delta, lengths)):
                yield piece
        self._serving.note_end(body, generation)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(self._head | {"choices": [], "usage": generation.usage})
        yield DONE

    def _chunks(self, delta: Delta, lengths: dict[int, int]) -> Iterator[bytes]:
        index = delta.index
        if index not in lengths:
            echo = self._echo(index)
            lengths[index] = len(echo)
            if self._body.echo:
                yield from event_pieces(self._data(index, echo, self._said_of_prompt(index), None) | self._usage())
        said = self._said(delta.logprobs, lengths[index])
        lengths[index] += len(delta.text)
        if said is None and delta.finish_reason is None and not self._body.counts_on:
            yield self._plain.event(index, delta.text)
        else:
            yield event(self._data(index, delta.text, said, delta.finish_reason) | self._usage())

    def _usage(self) -> dict[str, Any]:
        return {"usage": self._generation.usage} if self._body.counts_on else {}

    def _data(self, index: int, text: str, said: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return self._head | {"choices": [self._choice(index, text, said, reason)]}

    def _choice(self, index: int, text: str, said: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": said, "finish_reason": reason}

    def _said(self, logprobs: list[TokenLogprobs], offset: int) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        return self._serving.names.completion(logprobs, offset, self._body.skip_special_tokens)

    def _said_of_prompt(self, index: int) -> dict[str, Any] | None:
        wanted = self._body.logprobs
        if wanted is None or not self._body.scores_echo:
            return None
        number, generation = index // self._body.n, self._generation
        said = generation.prompt_logprobs(number)
        hides_special = self._body.skip_special_tokens or isinstance(self._prompts[number], str)
        return self._serving.names.echoed(generation.prompts[number].token_ids, said, wanted, hides_special)

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        wanted = self._body.prompt_logprobs
        if wanted is None:
            return {}
        said = self._generation.prompt_logprobs(index // self._body.n)
        return {"prompt_logprobs": self._serving.names.prompt(said, wanted)}

    def _best(self) -> list[Text]:
        """The texts that are returned: all, or the likeliest of each prompt's."""
        texts, num_samples, n = self._generation.texts, self._body.num_samples, self._body.n
        if n == num_samples:
            return texts
        found: list[Text] = []
        for start in range(0, len(texts), num_samples):
            found += sorted(texts[start : start + num_samples], key=lambda text: -text.mean_logprob)[:n]
        return found

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        given = self._prompts[index // self._body.n]
        return given if isinstance(given, str) else self._serving.prompts.text_of(given, self._body.skip_special_tokens)
