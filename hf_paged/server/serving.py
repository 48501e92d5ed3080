"""`Serving`: one model behind an app, and the parts that all routes need."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from hf_paged import Engine
from hf_paged import Request as EngineRequest
from hf_paged.server.errors import ApiError, bad_field, queue_full, too_long
from hf_paged.server.formats import Formats
from hf_paged.server.generation import Generation, submit_arguments
from hf_paged.server.limits import B, Pace, check_key, read_body
from hf_paged.server.logprobs import TokenNames
from hf_paged.server.metrics import Metrics
from hf_paged.server.prompts import Prompt, Prompts
from hf_paged.server.replies import ClientGoneError, event_stream, json_answer, unless_gone
from hf_paged.server.requests import RequestTable
from hf_paged.server.schemas import SamplingBody
from hf_paged.server.settings import ServerSettings, name_of
from hf_paged.server.sizes import most_tokens
from hf_paged.server.sounds import ears_of
from hf_paged.server.wakeups import Wakeups

T = TypeVar("T")
Handler = Callable[["Serving", Request], Awaitable[Any]]
# What a model's generation config may say of sampling, and a request doesn't.
NEUTRAL = {
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_return_sequences": 1,
}
OPENAPI, DOCS = "/openapi.json", "/docs"
WITHOUT_KEY = ("/health", "/ready", DOCS, OPENAPI)
QUICK = 1 << 14  # characters of a request that are made token ids of in some milliseconds
ERROR_SECONDS = 0.01  # before an error is told: a client that makes nothing else makes fewer of them
CHARACTERS_PER_TOKEN = 32  # more than any text has on average


class Answer(Protocol):
    def whole(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[bytes]: ...


class Serving:
    """One model behind an app.

    Attributes:
        model_name: What requests call it.
        created: When this was made, in seconds since 1970.
        is_draining: It takes no requests any more, and ends those that it has.
        sounds: Seconds of each that a request has sent, those whose texts are there included. One thread's.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: ServerSettings, processor: Any = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.engine: Engine = model.paged
        self.settings = settings
        self.model_name = (
            settings.model_name or name_of(getattr(model.config, "name_or_path", "")) or type(model).__name__
        )
        self.created = int(time.time())
        self.vocab_size = self.engine.vocab_size
        self.prompts = Prompts(tokenizer, self.vocab_size, settings, processor, model, self._max_characters)
        self.ears = ears_of(model, processor)
        self.names = TokenNames(tokenizer)
        self.engine.check_adapters(settings.adapters)
        self._adapters = dict.fromkeys(settings.adapters)  # replaced, never changed
        self.metrics = Metrics(self.engine, self.model_name)
        self.requests = RequestTable()
        self.is_draining = False
        self.sounds: WeakKeyDictionary[EngineRequest, float] = WeakKeyDictionary()
        self._wakeups: dict[asyncio.AbstractEventLoop, Wakeups] = {}  # replaced, never changed: see `_flush`
        self._lock = threading.Lock()
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="hf_paged_server")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="hf_paged_server_slow")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="hf_paged_server_loading")
        self._num_starting = 0
        self._pace = Pace()
        self._end_listening = self.engine.on_step(self._flush)
        eos = getattr(model.generation_config, "eos_token_id", None)
        self._eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        pad = getattr(tokenizer, "pad_token_id", None)
        limits = settings.max_grammar_bytes, settings.grammar_timeout
        self._formats = Formats(tokenizer, self.vocab_size, self._eos, *limits)
        self._pad = pad if pad is not None else self._eos[0] if self._eos else 0

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its text may have together."""
        return self._room()

    def _room(self, num_source_tokens: int = 0) -> int:
        config = self.model.config.get_text_config()
        names = "max_position_embeddings", "max_target_positions"  # the latter of models that hear
        positions = next((own for name in names if (own := getattr(config, name, None))), None)
        return self.engine.most_tokens(positions or 1 << 30, num_source_tokens)

    async def body(self, request: Request, kind: type[B], read: Callable[..., Awaitable[B]] = read_body) -> B:
        if self.is_draining:
            raise ApiError(503, "the server ends", code="draining", headers={"Retry-After": "5"})
        body = request.state.body = await read(request, kind, self.settings, self._pace)
        model = getattr(body, "model", None)
        if model is not None and not self.has(model):
            names, more = self.model_names[:8], ", ..." if self.model_names[8:] else ""
            message = f"there is no model {model!r:.200}: this server has {', '.join(map(repr, names))}{more}"
            raise ApiError(404, message, "model", "model_not_found")
        return body

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may ask for: the model's, and its adapters'."""
        return (self.model_name, *self._adapters)

    def has(self, name: str) -> bool:
        """Whether there is such a model."""
        return name == self.model_name or name in self._adapters

    def note_adapters(self, names: Iterable[str]) -> None:
        """Takes note of which adapters there are now."""
        self._adapters = dict.fromkeys(names)

    async def in_turn(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work`, which loads or unloads an adapter: one at a time, beside everything else."""
        return await asyncio.get_running_loop().run_in_executor(self._loading, work, *arguments)

    def _max_characters(self) -> int:
        """The most that a prompt may have: a longer one has too many tokens, and isn't tokenized to say so."""
        return CHARACTERS_PER_TOKEN * min(self.max_model_len, self.settings.max_prompt_tokens or 1 << 30)

    async def in_thread(self, work: Callable[..., T], *arguments: Any, size: int = 0) -> T:
        """Runs `work` on another thread than the event loop's, and returns its result.

        Args:
            work: Takes a while.
            size: Its characters or tokens; long pieces of work wait for each other, and for nothing else.
        """
        threads = self._quick if size <= QUICK else self._slow
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    async def start(self, request: Request, body: SamplingBody, prompts: Callable[[], list[Prompt]]) -> Generation:
        """Queues what a request asks for.

        Args:
            request: Who asks.
            prompts: Makes its prompts; called on another thread.

        Raises:
            ApiError: It can't be served, or the queue is full.
            ClientGoneError: The client went away.
        """
        if self.ears is not None:
            raise ApiError(400, f"{self.model_name} hears, and reads no text: use /v1/audio/transcriptions", "model")
        if body.priority and not self.settings.allow_priority:
            raise bad_field("priority", "this server takes none; it would with --allow-priority (`allow_priority`)")
        branches, limit = max(body.num_beams, body.num_samples), self.engine.config.max_branches
        if limit is not None and branches > limit:
            raise bad_field(
                body.branches_field, f"{branches} is above the limit of {limit} for a prompt (max_branches)"
            )
        most, number = self.settings.max_waiting, body.num_prompts
        if number > most:
            raise bad_field("prompt", f"{number} are more than the {most} that may wait")
        async with self.starting(number):
            return await unless_gone(request.receive, self._start(request, body, prompts))

    @asynccontextmanager
    async def starting(self, number: int = 1) -> AsyncIterator[None]:
        """Within it so many requests are queued, and count as waiting meanwhile.

        Raises:
            ApiError: They are too many, or it takes too long.
        """
        most = self.settings.max_waiting
        if self.engine.num_waiting + self._num_starting + number > most:
            raise queue_full(f"{most} requests may wait, and so many do: ask again later")
        self._num_starting += number
        try:
            async with self.in_time():
                yield
        finally:
            self._num_starting -= number

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Within it a piece of work may take as long as a request. Raises `ApiError` if it takes longer."""
        try:
            async with asyncio.timeout(self.settings.request_timeout):
                yield
        except TimeoutError:
            raise too_long(self.settings.request_timeout) from None

    async def _start(self, request: Request, body: SamplingBody, prompts: Callable[[], list[Prompt]]) -> Generation:
        arrival_time = time.monotonic()
        found = await self.in_thread(prompts, size=body.num_characters)
        longest = max(len(prompt.token_ids) for prompt in found)
        if longest > (self.settings.max_prompt_tokens or longest):
            message = f"the prompt has {longest} tokens, and this server takes {self.settings.max_prompt_tokens}"
            raise ApiError(400, message, code="context_length_exceeded")
        most = most_tokens(body, found, self.settings.max_answer_bytes)
        grammar = await self._formats.of(body)
        generation = Generation(
            self.engine,
            self.tokenizer,
            found,
            body,
            lambda length: self._arguments(body, length, most) | {"grammar": grammar},
            self._wakeups_here(),
            self.settings.request_timeout,
            self._adapter_of(body),
        )
        generation.arrival_time = arrival_time
        request.state.generation = generation
        self.requests.add(request.scope["route"].path, body.model or self.model_name, body.stream, generation)
        try:
            await self._queue(body, generation)
        except BaseException:
            generation.close()
            raise
        return generation

    def _wakeups_here(self) -> Wakeups:
        """The wakeups of the event loop that this runs in."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._wakeups:
                live = {known: wakeups for known, wakeups in self._wakeups.items() if not known.is_closed()}
                self._wakeups = live | {loop: Wakeups(loop, lambda: self.engine.is_handing_out)}
            return self._wakeups[loop]

    async def _queue(self, body: SamplingBody, generation: Generation) -> None:
        if body.wanted_of_prompt is not None:  # first, and then its prompts are found in the prefix cache
            await self.in_thread(generation.score)
            await generation.scored()
        await self.in_thread(generation.submit)

    def _adapter_of(self, body: SamplingBody) -> str | None:
        """The adapter that a request asks for, by `submit`'s name for it."""
        if not (self._adapters or self.settings.adapter_dir):
            return None
        return "__base__" if body.model in (None, self.model_name) else body.model  # also if it is gone by now

    def _arguments(self, body: SamplingBody, num_prompt_tokens: int, most: int) -> dict[str, Any]:
        source = 0
        if self.model.config.is_encoder_decoder:  # what it reads is no part of the text
            if num_prompt_tokens > self.max_model_len:
                message = f"the prompt has {num_prompt_tokens} tokens, and the model reads {self.max_model_len}"
                raise ApiError(400, message, code="context_length_exceeded")
            source, num_prompt_tokens = num_prompt_tokens, 1
        room = min(self._room(source), num_prompt_tokens + most)
        arguments = submit_arguments(body, num_prompt_tokens, room, self._eos, self._pad, self.vocab_size)
        own = self.model.generation_config
        neutral = {name: value for name, value in NEUTRAL.items() if getattr(own, name, None) not in (None, value)}
        return neutral | arguments

    async def reply(self, request: Request, body: SamplingBody, generation: Generation, answer: Answer) -> Any:
        """An answer as a stream that begins now, or all of it once its texts have ended.

        Raises:
            ClientGoneError: The client went away; what it asked for is ended.
            ApiError: It failed, or took too long.
        """
        if body.stream:
            return event_stream(answer.events(), generation.close)
        try:
            await unless_gone(request.receive, generation.finish())
        finally:
            generation.close()
        self.note_end(body, generation)
        return answer.whole()

    def note_end(self, body: SamplingBody, generation: Generation) -> None:
        """Books a generation whose texts have ended."""
        self.metrics.note_end(generation, time.monotonic(), body.model or self.model_name)

    async def answer(self, path: str, request: Request, handle: Handler) -> Response:
        """The answer of a route's function, counted; a client that went away is no error."""
        status = 499
        try:
            if path not in WITHOUT_KEY:
                check_key(request, self.settings.api_keys)
            result = await handle(self, request)
            response = result if isinstance(result, Response) else await json_answer(result)
            status = response.status_code
        except (ClientGoneError, ClientDisconnect):  # waiting for the answer, or in the midst of the body
            response = Response(status_code=499)
        except ApiError as error:
            await asyncio.sleep(ERROR_SECONDS)
            response = error.response()
            status = response.status_code
        finally:
            self.metrics.note_answer(path, status)
        return response

    def close(self) -> None:
        self.is_draining = True
        self._end_listening()
        self._formats.close()
        for threads in (self._quick, self._slow, self._loading):
            threads.shutdown(wait=False, cancel_futures=True)

    def _flush(self) -> None:
        """On the engine's thread."""
        for wakeups in self._wakeups.values():
            wakeups.flush()
