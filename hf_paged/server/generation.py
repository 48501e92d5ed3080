"""`Generation`: what one HTTP request has the engine generate, and its texts as they come."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from hf_paged import Engine, QueueFullError, Request, RequestOutput, TokenEvent, TokenLogprobs
from hf_paged.server.errors import ApiError, bad_argument, bad_field, logger, queue_full, server_ends, too_long
from hf_paged.server.formats import bad_grammar
from hf_paged.server.prompts import Prompt
from hf_paged.server.schemas import SamplingBody
from hf_paged.server.text import Detokenizer, StopStrings
from hf_paged.server.wakeups import Wakeups, in_pieces

PIECE = 256  # tokens that are read without a turn of the event loop in between
TOKEN_ID = re.compile("0|[1-9][0-9]{0,17}")  # in these digits only, of all that Python knows
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(slots=True)
class Delta:
    """The news of one text; log-probabilities of the new tokens only if they were asked for."""

    index: int
    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: str | None


@dataclass(slots=True)
class Text:
    """One text that is generated.

    Attributes:
        stops: Its stop strings; `None`: it has none.
        min_tokens: Tokens in whose text they are not looked for.
    """

    index: int
    detokenizer: Detokenizer
    stops: StopStrings | None
    min_tokens: int = 0
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sum_logprobs: float = 0.0
    num_tokens: int = 0
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / max(len(self.logprobs), 1)

    def feed(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> Delta | None:
        """Takes new tokens, and their log-probabilities or none."""
        if self.finish_reason is not None:
            return None
        if self.stops is None:
            new, num_taken = self.detokenizer.feed(token_ids), len(token_ids)
        else:
            new, num_taken = "", 0
            for token_id in token_ids:  # one by one: where it ends doesn't depend on how they came
                num_taken += 1
                piece, is_stop = self.detokenizer.feed([token_id]), False
                if self.num_tokens + num_taken > self.min_tokens:
                    piece, is_stop = self.stops.feed(piece)
                new += piece
                if is_stop:
                    self.finish_reason = "stop"
                    break
        self.num_tokens += num_taken
        return self._delta(new, logprobs[:num_taken])

    def end(self, reason: str) -> Delta | None:
        if self.finish_reason is not None:
            return None
        rest, self.finish_reason = self.detokenizer.flush(), FINISH_REASONS[reason]
        if self.stops is not None:
            rest, is_stop = self.stops.feed(rest)
            if is_stop:
                self.finish_reason = "stop"
            else:
                rest += self.stops.flush()
        return self._delta(rest, [])

    def _delta(self, new: str, logprobs: list[TokenLogprobs]) -> Delta | None:
        if new:
            self.parts.append(new)
        self.logprobs += logprobs
        self.sum_logprobs += sum(each.logprob for each in logprobs)
        if not new and not logprobs and self.finish_reason is None:
            return None
        return Delta(self.index, new, logprobs, self.finish_reason)


@dataclass(slots=True, eq=False)
class _Part:
    """One prompt: its request, the texts of each of its sequences, how many go on, whether it is said how likely their
    tokens are, and how many tokens were read.
    """

    request: Request
    texts: list[list[Text]]
    num_open: int
    has_logprobs: bool
    num_read: int = 0
    is_over: bool = False


class Generation:
    """The texts that the engine generates for one HTTP request.

    Attributes:
        texts: In order of prompts, and of a prompt's samples.
        num_tokens: Tokens of all texts.
        arrival_time: Of `time.monotonic`.
        label: What it is called in the engine; with several prompts, beside each one's number.
        on_close: Called when it is closed for the first time.
        is_closed: Nothing more will come of it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        prompts: list[Prompt],
        body: SamplingBody,
        arguments: Callable[[int], dict[str, Any]],
        wakeups: Wakeups,
        timeout: float | None,
        adapter: str | None = None,
    ) -> None:
        """Does nothing yet.

        Args:
            arguments: Of `submit`, for a prompt of so many tokens.
            wakeups: Of the event loop that this runs in.
            timeout: Seconds that it may take from `arrival_time` on.
            adapter: Of `submit`.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._body = body
        self._arguments = arguments
        self._wakeups = wakeups
        self._timeout = timeout
        self._adapter = adapter
        self._may_stop = bool(body.stops)  # before the engine's end
        self._news = asyncio.Event()
        self._fresh: deque[_Part] = deque()  # those with news
        self._num_running = 0
        self._parts: list[_Part] = []
        self._scores: list[Request] = []  # of each prompt, where its tokens are asked about
        self._unlisten: list[Callable[[], None]] = []
        self.is_closed = False
        self.label: str | None = None
        self.on_close: Callable[[Generation], None] | None = None
        self._is_late = False
        self.prompts = prompts
        self.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.num_tokens = 0
        self.texts: list[Text] = []
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None

    def prompt_logprobs(self, number: int) -> list[TokenLogprobs | None]:
        """The log-probabilities of one prompt's tokens, as they were asked for; its first has none."""
        return [None, *(self._scores[number].result(0).prompt_logprobs or ())]

    @property
    def usage(self) -> dict[str, int]:
        prompt, new = self.num_prompt_tokens, self.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def score(self) -> None:
        """Queues the scoring of the prompts' tokens. As `submit`, which is to wait until `scored`."""
        self._queue_all(self._score)

    def submit(self) -> None:
        """Queues all prompts. Takes milliseconds: not for the event loop's thread.

        Raises:
            ApiError: A prompt or an argument can't be served, or the queue is full.
        """
        self._queue_all(self._submit)

    def _queue_all(self, queue: Callable[[Prompt], None]) -> None:
        try:
            for prompt in self.prompts:
                queue(prompt)
        except QueueFullError as error:
            raise queue_full(str(error)) from None
        except (ValueError, TypeError) as error:
            raise bad_argument(str(error), type(self._body).model_fields) from error
        finally:
            if self.is_closed:  # meanwhile
                self.close()

    async def scored(self) -> None:
        """Waits for the scores of the prompts' tokens; raises `ApiError` if scoring failed."""
        for request in self._scores:
            with self._engine_errors():
                output = await request
            if output.finish_reason == "cancelled":
                raise server_ends()

    def _score(self, prompt: Prompt) -> None:
        if prompt.inputs:
            raise bad_field("prompt_logprobs", "of a prompt of token ids; not with pictures")
        self._arguments(len(prompt.token_ids))  # what they refuse need not be computed
        body = self._body
        request = self._engine.submit_score(
            prompt.token_ids,
            request_id=self._name(len(self._scores)),
            top=body.wanted_of_prompt or 0,
            priority=body.priority,
            cache_salt=body.cache_salt,
            adapter=self._adapter,
        )
        self._scores.append(request)

    def _submit(self, prompt: Prompt) -> None:
        body, number = self._body, len(self._parts)
        # All of it is text, also where an end of text among its tokens is what the tokenizer pads with.
        mask = {"attention_mask": torch.ones(1, len(prompt.token_ids), dtype=torch.int64)}
        arguments = mask | self._arguments(len(prompt.token_ids)) | prompt.inputs
        seed = secrets.randbits(62) if body.seed is None else body.seed
        if body.limit == 0:  # all that is asked for is known
            request = self._scores[number]
        else:
            request = self._engine.submit(
                prompt.token_ids,
                **arguments,
                request_id=self._name(number),
                seed=seed,
                priority=body.priority,
                cache_salt=body.cache_salt,
                adapter=self._adapter,
            )
        # The likeliest token has no variants: what isn't drawn is computed once, and returned as often as asked for.
        num_sequences = arguments.get("num_return_sequences", 1)
        texts: list[list[Text]] = [[] for _ in range(num_sequences)]
        before = () if prompt.is_source else prompt.token_ids
        for number in range(body.num_samples):
            detokenizer = Detokenizer(self._tokenizer, before, body.skip_special_tokens)
            stops = StopStrings(body.stops) if body.stops else None
            text = Text(len(self.texts), detokenizer, stops, body.min_tokens)
            self.texts.append(text)
            texts[number % num_sequences].append(text)
        prompt.inputs.clear()  # the model has seen its pictures
        self._parts.append(_Part(request, texts, body.num_samples, "logprobs" in arguments))

    def _name(self, number: int) -> str | None:
        return f"{self.label}.{number}" if self.label is not None and number else self.label

    async def updates(self) -> AsyncIterator[list[Delta]]:
        """The news of all texts as they come, until all have ended. Once.

        Raises:
            ApiError: It takes too long, or a request failed.
        """
        for part in self._parts:
            self._unlisten.append(part.request.listen(partial(self._tell, part)))
        if self._timeout is not None:
            left = self.arrival_time + self._timeout - time.monotonic()
            self._unlisten.append(asyncio.get_running_loop().call_later(max(left, 0), self._expire).cancel)
        try:
            self._num_running = len(self._parts)
            while self._num_running:
                await self._news.wait()
                self._news.clear()  # before the look at what there is
                async for piece in in_pieces(self._read_fresh(), itemgetter(0), PIECE):
                    if self._is_late:
                        raise too_long(self._timeout)
                    deltas = [delta for _, delta in piece if delta is not None]
                    if deltas:
                        if self.first_token_time is None:
                            self.first_token_time = time.monotonic()
                            self._release_pixels()
                        yield deltas
        finally:
            self.close()

    def _release_pixels(self) -> None:
        for prompt in self.prompts:
            prompt.pixels.count = 0

    def _tell(self, part: _Part) -> None:
        self._fresh.append(part)  # before the wake-up
        self._wakeups.wake(self._news)

    def _expire(self) -> None:
        self._is_late = True
        self._news.set()

    async def finish(self) -> None:
        async for _ in self.updates():
            pass

    def close(self) -> None:
        """Ends what still runs. Calling it again changes nothing."""
        is_first, self.is_closed = not self.is_closed, True
        self._release_pixels()
        if is_first and self.on_close is not None:
            self.on_close(self)
        for unlisten in self._unlisten:
            unlisten()
        self._unlisten.clear()
        for request in [*self._scores, *(part.request for part in list(self._parts))]:
            request.cancel()

    def _read_fresh(self) -> Iterator[tuple[int, Delta | None]]:
        """For each text with new tokens, or an end: how much there was to read, and what is new."""
        if self._is_late:
            raise too_long(self._timeout)
        fresh = dict.fromkeys(self._fresh.popleft() for _ in range(len(self._fresh)))
        for part in fresh:
            if not part.is_over:
                yield from self._read(part)
                self._num_running -= part.is_over

    def _read(self, part: _Part) -> Iterator[tuple[int, Delta | None]]:
        request = part.request
        is_done = request.is_done  # before the look at what has come
        new = request.events_since(part.num_read)
        if part.has_logprobs and new and new[0].logprobs is None:
            new = []  # of transformers' own loop: how likely its tokens were is known at its end
        part.num_read += len(new)
        output = None
        if is_done:
            with self._engine_errors():
                output = request.result(0)
        events = iter(new) if output is None or part.num_read else _events_of(output)
        while chunk := list(itertools.islice(events, PIECE)):
            by_sequence: dict[int, tuple[list[int], list[TokenLogprobs]]] = {}
            for sequence, token_id, said in chunk:
                token_ids, logprobs = by_sequence.setdefault(sequence, ([], []))
                token_ids.append(token_id)
                if said is not None:
                    logprobs.append(said)
            for sequence, (token_ids, logprobs) in by_sequence.items():
                for text in part.texts[sequence]:
                    yield len(token_ids), self._fed(part, text, token_ids, logprobs)
                if self._may_stop and output is None and all(text.finish_reason for text in part.texts[sequence]):
                    request.cancel(sequence)
        if output is not None:
            for texts, reason in zip(part.texts, output.finish_reasons, strict=True):
                for text in texts:
                    if text.finish_reason is None and reason not in FINISH_REASONS:
                        raise server_ends()
                    yield 1, text.end(reason)
        part.is_over = output is not None or not part.num_open

    def _fed(self, part: _Part, text: Text, token_ids: list[int], logprobs: list[TokenLogprobs]) -> Delta | None:
        before = text.num_tokens
        delta = text.feed(token_ids, logprobs)
        self.num_tokens += text.num_tokens - before
        part.num_open -= delta is not None and delta.finish_reason is not None
        return delta

    @contextmanager
    def _engine_errors(self) -> Iterator[None]:
        """Errors of a request's result, as a client is told."""
        try:
            yield
        except ValueError as error:  # a grammar that its matcher gives up
            raise bad_grammar(self._body, str(error)) from error
        except Exception as error:
            logger.exception("a request failed in the engine")
            raise ApiError(500, f"the engine failed: {type(error).__name__}", code="engine_error") from error


def _events_of(output: RequestOutput) -> Iterator[TokenEvent]:
    """The texts of beams, which come at the end."""
    for sequence, token_ids in enumerate(output.sequences):
        said = itertools.repeat(None) if output.logprobs is None else output.logprobs[sequence]
        for token_id, each in zip(token_ids, said, strict=False):
            yield TokenEvent(sequence, token_id, each)


def submit_arguments(
    body: SamplingBody, num_prompt_tokens: int, room: int, eos_token_ids: list[int], pad_token_id: int, vocab_size: int
) -> dict[str, Any]:
    """Arguments of `submit` for a request's body.

    Args:
        room: Tokens that prompt and text may have together.
        eos_token_ids: The model's ends of text.

    Raises:
        ApiError: Something in the body can't be.
    """
    left = room - num_prompt_tokens
    if left < (body.limit != 0):
        raise ApiError(
            400, f"the prompt has {num_prompt_tokens} tokens, and {room} is all that there is room for with the text",
            code="context_length_exceeded",
        )  # fmt: skip
    if body.limit is not None and body.limit > left:
        raise ApiError(
            400, f"{body.limit_field}: {body.limit}, and {num_prompt_tokens} tokens of the prompt, are above the limit "
            f"of {room} tokens", body.limit_field, "context_length_exceeded",
        )  # fmt: skip
    limit = left if body.limit is None else body.limit
    if body.min_tokens > limit:
        raise bad_field("min_tokens", f"{body.min_tokens} are above the limit of {limit} tokens")
    if limit == 0:
        return {"max_new_tokens": 0}
    for token_id in body.stop_token_ids:
        if token_id >= vocab_size:
            raise bad_field("stop_token_ids", f"{token_id} is no token id below {vocab_size}")
    ends = [*([] if body.ignore_eos else eos_token_ids), *body.stop_token_ids]
    arguments: dict[str, Any] = {
        "max_new_tokens": limit,
        # Where nothing ends a text, an id that no token has.
        "eos_token_id": ends or [vocab_size],
        "pad_token_id": pad_token_id,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": _bias(body),
        "do_sample": False,
        "num_beams": body.num_beams,
    }
    if body.min_tokens:
        arguments["min_new_tokens"] = body.min_tokens
    is_drawn = body.temperature > 0
    if body.num_beams > 1:
        is_drawn = is_drawn and "temperature" in body.model_fields_set
        arguments["num_return_sequences"] = body.num_samples
        arguments["length_penalty"] = 1.0 if body.length_penalty is None else body.length_penalty
    elif is_drawn:
        arguments["num_return_sequences"] = body.num_samples
    if is_drawn:
        arguments |= {
            "do_sample": True,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": max(body.top_k, 0),
        }
        if body.min_p:
            arguments["min_p"] = body.min_p
    if body.wanted_logprobs is not None or (is_drawn and body.num_samples > body.n):
        arguments["logprobs"] = body.wanted_logprobs or 0
    return arguments


def _bias(body: SamplingBody) -> dict[int, float] | None:
    for name in body.logit_bias or ():
        if not TOKEN_ID.fullmatch(name):
            raise bad_field("logit_bias", f"its keys are token ids, such as '17', and not {name!r:.200}")
    return None if body.logit_bias is None else {int(name): value for name, value in body.logit_bias.items()}
