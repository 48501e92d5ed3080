"""Replays thousands of mixed requests, cancels and faults against one small pool: nothing is lost, nothing leaks.

    python benchmarks/soak.py                                                # 20,000 requests, built-in lengths
    python benchmarks/soak.py --num-requests 3000 --seed 7 --out benchmarks/results

A random model of two layers, a pool of a few dozen blocks, and clients on threads, which do at random what a caller can
do: `submit` and `generate`, greedy, sampling, several samples, beams, processors of their own, streamers, `await`,
`PagedCache` conversations, own loops over forwards; they cancel, drop handles, time out, raise in processors, criteria
and streamers, and send prompts that make the forward raise. Beside them a monitor checks the invariants, takes
snapshots, empties the prefix cache, releases the pool, and changes the model's weights. Requests come in bursts; half
of them begin with one of a few shared prefixes.

Checked, and each a violation (exit code 1) if not so:

- every request has exactly one outcome, and one that its kind allows: a fault fails the request that caused it alone;
- invariants of pool and tables, while it runs and at each quiescent point; then, only live conversations hold blocks;
- at the end all blocks of both pools are free, no queue or table holds anything, no thread and no object is left
  behind, and memory has not grown by more than `--max-growth`;
- of every `--verify-every`-th request the tokens, compared with stock `generate()` under the weights of the moment
  (of a cancelled greedy request: that they are a prefix), a difference counting unless certified as a near tie.
"""

from __future__ import annotations

import asyncio
import copy
import faulthandler
import gc
import itertools
import json
import os
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import command
import psutil
import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from workload import draw_lengths

import hf_paged
from hf_paged import OutOfBlocksError, PagedCache, QueueFullError
from hf_paged.testing import compare_generations

VOCAB, PAD, BOS, EOS = 98, 0, 1, 2
MARKER = VOCAB - 1  # a forward over it raises; never generated
MAX_PROMPT, MAX_NEW = 72, 32
PATIENCE = 30.0  # seconds after which a request counts as stuck
OOM_RATE = 0.001  # chance of a step to run out of memory
SETTLE_SECONDS = 30.0  # that dropped requests have to end, once all others have
# In every hundred requests, roughly.
MIX = {
    "greedy": 18,
    "sampling": 10,
    "samples": 6,
    "beams": 5,
    "processor": 4,
    "lookup": 2,
    "generate": 9,
    "async": 6,
    "conversation": 5,
    "forwards": 2,
    "cancel": 12,
    "drop": 4,
    "timeout": 3,
    "raising_processor": 3,
    "raising_criterion": 1,
    "raising_streamer": 2,
    "failing_forward": 2,
}


COUNTED = (
    *("num_blocks", "num_steps", "num_prefill_tokens", "num_generated_tokens", "num_preemptions", "num_swapped_out"),
    *("num_admission_stalls", "num_cow_copies", "prefix_cache_hit_tokens", "prefix_cache_query_tokens"),
)


class HookError(Exception):
    """What the soak's own hooks raise."""


class Nudge(LogitsProcessor):
    """A user's own processor: favours other tokens at each length; may raise, or be slow.

    Args:
        raise_at: Call, counted from 0, that raises; -1: none.
        seconds: Sleep of each call.
    """

    def __init__(self, raise_at: int = -1, seconds: float = 0.0) -> None:
        self.raise_at, self.seconds, self.calls = raise_at, seconds, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.raise_at + 1:
            raise HookError("processor")
        if self.seconds:
            time.sleep(self.seconds)
        bias = torch.arange(scores.shape[-1], dtype=scores.dtype).add(input_ids.shape[1]).mul(0.7).sin()
        return scores + bias


class RaisingCriterion(StoppingCriteria):
    """A user's own criterion, which raises at its `raise_at`-th call."""

    def __init__(self, raise_at: int) -> None:
        self.left = raise_at

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise HookError("criterion")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TokenList(BaseStreamer):
    """Collects what is streamed; may raise at a token."""

    def __init__(self, raise_at: int = -1) -> None:
        self.tokens: list[int] = []
        self.raise_at, self.has_prompt, self.has_end = raise_at, False, False

    def put(self, value: Tensor) -> None:
        if len(self.tokens) == self.raise_at and self.has_prompt:
            raise HookError("streamer")
        self.tokens += value.reshape(-1).tolist() if self.has_prompt else []
        self.has_prompt = True

    def end(self) -> None:
        self.has_end = True


def tiny_model(seed: int) -> LlamaForCausalLM:
    """Random weights, wide enough that the text depends on the prompt."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.25 * noise) if parameter.ndim > 1 else parameter.add_(0.1 * noise)
    model.lm_head.register_forward_hook(hf_paged.packed_hook(_never_special))
    return model


def _never_special(module: Any, args: Any, output: Tensor) -> Tensor:
    """Padding inside a text would be taken for holes in its mask."""
    return output.index_fill(-1, torch.tensor([PAD, MARKER]), -1e4)


@dataclass
class Faults:
    """A hook on the patched model's embedding: raises on the marker, and sometimes as if memory had run out."""

    rng: random.Random
    num_ooms: int = 0
    num_failures: int = 0
    is_on: bool = True

    def __call__(self, module: Any, args: Any) -> None:
        if not self.is_on:
            return
        if bool((args[0] == MARKER).any()):
            self.num_failures += 1
            raise HookError("forward")
        if self.rng.random() < OOM_RATE:
            self.num_ooms += 1
            raise torch.OutOfMemoryError("injected")


# ------------------------------------------------------------------------------------------------------------- requests


@dataclass
class Spec:
    """One request to come."""

    index: int
    kind: str
    prompt: list[int]
    new_tokens: int
    seed: int
    verify: bool

    @property
    def rng(self) -> random.Random:
        return random.Random(self.seed)


@dataclass
class Check:
    """Tokens to be compared with stock `generate()` once nothing runs.

    Attributes:
        found: A list for each sequence, without padding.
        is_prefix: The request ended early: `found` is the beginning of what stock generates.
        version: Of the weights.
        mask: Of a left-padded batch.
    """

    spec: Spec
    ids: Tensor
    kwargs: dict[str, Any]
    found: list[list[int]]
    version: int
    is_prefix: bool = False
    mask: Tensor | None = None


class Workload:
    """Draws the requests: kinds by `MIX`, lengths of a trace scaled down, shared prefixes, gaps of a bursty arrival."""

    def __init__(self, lengths: list[tuple[int, int]], num_requests: int, seed: int, verify_every: int) -> None:
        self.rng = random.Random(f"workload {seed}")
        prompt = sorted(p for p, _ in lengths)[len(lengths) // 2]
        output = sorted(o for _, o in lengths)[len(lengths) // 2]
        # Medians of 24 and 8 tokens, the shape of the distribution kept up to the caps.
        self.lengths = [
            (min(MAX_PROMPT, max(1, round(24 * p / prompt))), min(MAX_NEW, max(1, round(8 * o / output))))
            for p, o in lengths
        ]
        self.num_requests, self.verify_every = num_requests, verify_every
        self.prefixes = [self._tokens(length) for length in (12, 20, 28, 36)]

    def _tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(3, MARKER) for _ in range(n)]

    def __iter__(self) -> Iterator[Spec]:
        kinds, weights = list(MIX), list(MIX.values())
        for index in range(self.num_requests):
            length, new = self.lengths[index % len(self.lengths)]
            prefix = self.rng.choice(self.prefixes) if self.rng.random() < 0.5 else []
            prompt = (prefix + self._tokens(length))[: max(length, 1)]
            (kind,) = self.rng.choices(kinds, weights)
            yield Spec(index, kind, prompt, new, self.rng.randrange(2**31), index % self.verify_every == 0)

    def gap(self) -> float:
        """Seconds to the next arrival: bursts, and a pause now and then."""
        return self.rng.expovariate(300) if self.rng.random() < 0.05 else 0.0


@dataclass
class Conversation:
    """A user's chat over a kept cache."""

    cache: Any
    ids: list[int] = field(default_factory=list)
    version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


# ----------------------------------------------------------------------------------------------------------------- soak


class Soak:
    """One patched model, its clients and its monitor.

    Args:
        settings: Of `hf_paged.patch`.
        num_clients: Threads that make requests.
        seed: Of everything random.
        weight_changes: Whether the monitor changes weights while requests run.
    """

    def __init__(self, settings: dict[str, Any], num_clients: int, seed: int, weight_changes: bool) -> None:
        self.stock = tiny_model(seed)
        self.model = hf_paged.patch(copy.deepcopy(self.stock), **settings)
        self.engine = self.model.paged
        self.faults = Faults(random.Random(f"faults {seed}"))
        self.model.model.embed_tokens.register_forward_pre_hook(hf_paged.packed_hook(self.faults))
        self.version = 0  # of the weights; odd while they change
        self.weights = {0: self._weights()}
        self.weight_changes = weight_changes
        self.conversations = [Conversation(PagedCache(self.model)) for _ in range(4)]
        self.rng = random.Random(f"soak {seed}")
        self.num_clients = num_clients
        self.specs: queue.Queue[Spec | None] = queue.Queue(maxsize=4 * num_clients)
        self.lock = threading.Lock()
        self.outcomes: dict[int, list[str]] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[str] = Counter()
        self.checks: list[Check] = []
        self.violations: list[str] = []
        self.verified: Counter[str] = Counter()
        self.monitored: Counter[str] = Counter()
        self.num_tokens_verified = self.num_near_ties = 0
        self.num_stale = 0
        self.changed_at = -10.0
        self.last_outcome = time.monotonic()
        self.loop = asyncio.new_event_loop()

    # Outcomes

    def violation(self, text: str) -> None:
        with self.lock:
            if len(self.violations) < 100:
                self.violations.append(text)
                tqdm.write(f"VIOLATION: {text}")

    def book(self, spec: Spec, outcome: str) -> None:
        """Notes how a request ended."""
        with self.lock:
            self.outcomes.setdefault(spec.index, []).append(outcome)
            self.counts[spec.kind, outcome] += 1
            self.last_outcome = time.monotonic()

    def serve(self) -> None:
        """A client: takes requests from the queue."""
        while (spec := self.specs.get()) is not None:
            before = (self.version, self.num_stale)
            try:
                self.book(spec, self.run(spec))
            except BaseException as error:
                self.book(spec, f"failed: {type(error).__name__}")
                with self.lock:
                    self.errors[f"{type(error).__name__}: {error}"[:100]] += 1
                if not self._may_fail(spec, error, before):
                    self.violation(f"request {spec.index} ({spec.kind}) raised {type(error).__name__}: {error}")
            finally:
                self.specs.task_done()
        self.specs.task_done()

    def _may_fail(self, spec: Spec, error: BaseException, before: tuple[int, int]) -> bool:
        """Whether a request of this kind, begun at `before`, may raise this."""
        if isinstance(error, torch.OutOfMemoryError):
            return True  # the smallest of the step's groups, whichever that is
        if isinstance(error, OutOfBlocksError) or (spec.kind == "forwards" and "can't be computed again" in str(error)):
            # Keys and values of two models can't make room.
            return before != (self.version, self.num_stale) or time.monotonic() < self.changed_at + 10
        return isinstance(error, HookError) and spec.kind in (f"raising_{error}", f"failing_{error}")

    def run(self, spec: Spec) -> str:
        """Makes a request as its kind says; returns its outcome."""
        method: Callable[[Spec, random.Random], str] = getattr(self, f"_{spec.kind}")
        return method(spec, spec.rng)

    # What requests are made of

    def _mode(self, rng: random.Random, kind: str | None = None) -> dict[str, Any]:
        """Arguments of `generate()` for a way to choose tokens."""
        kind = kind or rng.choice(["greedy", "greedy", "sampling", "samples", "beams", "processor"])
        if kind == "greedy":
            return rng.choice([{}, {}, {"repetition_penalty": 1.2}, {"min_new_tokens": 3}])
        if kind == "sampling":
            own = {"temperature": rng.choice([0.7, 1.0, 1.3]), "top_k": rng.choice([0, 20])}
            return {"do_sample": True, "top_p": rng.choice([0.9, 1.0]), "seed": rng.randrange(2**31)} | own
        if kind == "samples":
            return self._mode(rng, "sampling") | {"num_return_sequences": rng.randint(2, 4)}
        if kind == "beams":
            beams = rng.randint(2, 4)
            return {"num_beams": beams, "num_return_sequences": rng.randint(1, beams), "length_penalty": 0.8}
        if kind == "lookup":
            return {"prompt_lookup_num_tokens": 3}
        return {"logits_processor": [Nudge(seconds=rng.choice([0, 0, 0.002]))]}

    def submit(self, spec: Spec, prompt: list[int] | None = None, **kwargs: Any) -> Any:
        """`engine.submit`, again while the queue is full."""
        rng = random.Random(spec.seed + 1)
        kwargs = {"max_new_tokens": spec.new_tokens, "priority": rng.choice([0] * 28 + [-1, 1])} | kwargs
        if rng.random() < 0.2:
            kwargs["cache_salt"] = rng.choice(["a", "b"])
        if rng.random() < 0.2:
            kwargs["request_id"] = f"mine-{spec.index}"
        while True:
            try:
                return self.engine.submit(spec.prompt if prompt is None else prompt, **kwargs)
            except QueueFullError:
                with self.lock:
                    self.monitored["queue was full"] += 1
                time.sleep(0.002 + 0.01 * rng.random())

    def result(self, request: Any) -> Any:
        """Its result; a request that takes for ever is a violation."""
        try:
            return request.result(timeout=PATIENCE)
        except TimeoutError:
            self.violation(f"{request} is stuck: {self.engine.stats()}")
            faulthandler.dump_traceback(all_threads=True)
            raise

    def check(self, spec: Spec, before: int, mode: dict[str, Any], found: list[list[int]], **more: Any) -> None:
        """Has a result compared with stock later on, unless the weights changed while it was made."""
        if spec.verify and before == self.version and before % 2 == 0:
            ids = more.pop("ids", None)
            ids = torch.tensor([spec.prompt]) if ids is None else ids
            kwargs = {"max_new_tokens": spec.new_tokens} | mode
            with self.lock:
                self.checks.append(Check(spec, ids, kwargs, found, before, **more))

    def _finish(self, spec: Spec, mode: dict[str, Any]) -> str:
        """Submits, waits, has the result checked."""
        before = self.version
        output = self.result(self.submit(spec, **mode))
        count = mode.get("num_return_sequences", 1)
        if len(output.sequences) != count or not all(output.sequences) or output.prompt_token_ids != spec.prompt:
            self.violation(f"request {spec.index} ({spec.kind}): {output}")
        self.check(spec, before, mode, output.sequences)
        return output.finish_reason

    # The kinds

    def _greedy(self, spec: Spec, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return self._finish(spec, self._mode(rng, "greedy"))
        before = self.version
        request = self.submit(spec)
        tokens = list(request)
        output = self.result(request)
        if tokens != output.token_ids:
            self.violation(f"request {spec.index}: streamed {tokens}, result {output.token_ids}")
        self.check(spec, before, {}, [tokens])
        return output.finish_reason

    def _sampling(self, spec: Spec, rng: random.Random) -> str:
        return self._finish(spec, self._mode(rng, spec.kind))

    _samples = _beams = _processor = _lookup = _sampling

    def _generate(self, spec: Spec, rng: random.Random) -> str:
        """`generate()` on this thread, with a streamer or with a ragged batch."""
        mode = self._mode(rng, rng.choice(["greedy", "sampling", "processor", "beams"]))
        is_drawn = mode.pop("seed", None) is not None  # by the generator that all threads share
        # Ragged: the rows are the prompt and its beginnings.
        lengths = sorted(
            {max(1, len(spec.prompt) // (row + 1)) for row in range(rng.choice([1, 1, 2, 3]))}, reverse=True
        )
        width = lengths[0]
        ids = torch.tensor([[PAD] * (width - n) + spec.prompt[:n] for n in lengths])
        mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
        streamer = TokenList() if len(lengths) == 1 and "num_beams" not in mode else None
        before = self.version
        output = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=spec.new_tokens, streamer=streamer, **mode
        )[:, width:].tolist()
        if streamer is not None and (streamer.tokens != output[0] or not streamer.has_end):
            self.violation(f"request {spec.index}: streamed {streamer.tokens}, result {output[0]}")
        if not is_drawn:
            self.check(spec, before, mode, output, ids=ids, mask=mask)
        return "finished"

    def _async(self, spec: Spec, rng: random.Random) -> str:
        return asyncio.run_coroutine_threadsafe(self._run_async(spec, rng), self.loop).result(PATIENCE + 5)

    async def _run_async(self, spec: Spec, rng: random.Random) -> str:
        before = self.version
        how = rng.choice(["await", "for", "break", "cancel"])
        # Not on the loop's thread: preparing takes milliseconds.
        request = await self.loop.run_in_executor(None, lambda: self.submit(spec))
        if how == "for":
            tokens = [token async for token in request]
            if tokens != request.result(0).token_ids:
                self.violation(f"request {spec.index}: other tokens by async for than in its result")
            self.check(spec, before, {}, [tokens])
            return request.finish_reason
        if how == "break":
            async for _ in request:
                if rng.random() < 0.3:
                    break
            del request
            return "dropped"

        async def wait() -> Any:
            return await request

        task = self.loop.create_task(wait())
        if how == "cancel":
            await asyncio.sleep(0.02 * rng.random())
            task.cancel()
        try:
            output = await task
        except asyncio.CancelledError:
            output = await asyncio.wait_for(wait(), PATIENCE)
            self.check(spec, before, {}, output.sequences, is_prefix=True)
            return output.finish_reason
        self.check(spec, before, {}, output.sequences)
        return output.finish_reason

    def _conversation(self, spec: Spec, rng: random.Random) -> str:
        """One more turn of a chat whose cache the user keeps, or copies."""
        chat = rng.choice(self.conversations)
        with chat.lock:
            if len(chat.ids) + len(spec.prompt) + spec.new_tokens > 120 or rng.random() < 0.1:
                if rng.random() < 0.5:
                    chat.cache.reset()
                else:
                    chat.cache = PagedCache(self.model)
                chat.ids = []
            is_stale = bool(chat.ids) and chat.version != self.version
            if not chat.ids:
                chat.version = self.version
            before, cache, ids = self.version, chat.cache, chat.ids + spec.prompt
            is_copy = bool(chat.ids) and rng.random() < 0.2
            if is_copy:
                cache = copy.deepcopy(cache)
            mode: dict[str, Any] = {}
            if is_copy and rng.random() < 0.3:
                mode = {"num_beams": 2}
                cache.batch_repeat_interleave(2)
            self.num_stale += is_stale
            try:
                output = self.model.generate(
                    torch.tensor([ids]), past_key_values=cache, max_new_tokens=spec.new_tokens, **mode
                )
            except BaseException as error:
                chat.cache.reset()
                chat.ids = []
                if isinstance(error, ValueError) and "can't be computed again" in str(error):
                    if chat.version == self.version:
                        self.violation(f"request {spec.index}: refused as stale, but the weights are the same: {error}")
                    return "refused as stale"
                raise
            finally:
                self.num_stale += is_stale
            tokens = output[0, len(ids) :].tolist()
            if chat.version == before:
                self.check(spec, before, mode, [tokens], ids=torch.tensor([ids]))
            if is_stale or chat.version != self.version:
                # Keys and values of two models, which can't be computed again: not to be kept.
                chat.cache.reset()
                chat.ids = []
            elif not is_copy:
                chat.ids = ids + tokens
            return "finished"

    def _forwards(self, spec: Spec, rng: random.Random) -> str:
        """A user's own greedy loop over forwards."""
        before, cache, ids = self.version, PagedCache(self.model), torch.tensor([spec.prompt])
        tokens: list[int] = []
        for _ in range(min(spec.new_tokens, 6)):
            with torch.no_grad():
                logits = self.model(ids, past_key_values=cache).logits[0, -1]
            tokens.append(int(logits.argmax()))
            ids = torch.tensor([tokens[-1:]])
            if tokens[-1] == EOS:
                break
        self.check(spec, before, {"max_new_tokens": min(spec.new_tokens, 6)}, [tokens])
        return "finished"

    def _cancel(self, spec: Spec, rng: random.Random) -> str:
        """Cancelled after a while, or after some tokens, in whatever state it is then."""
        before, mode = self.version, self._mode(rng)
        spec.new_tokens = max(spec.new_tokens, 12)
        request = self.submit(spec, **mode)
        if "num_beams" not in mode and "num_return_sequences" not in mode and rng.random() < 0.4:
            for _ in itertools.islice(request, rng.randint(1, 8)):
                pass
        elif rng.random() < 0.8:
            time.sleep(0.03 * rng.random())
        for _ in range(rng.choice([1, 1, 2])):
            request.cancel()
        output = self.result(request)
        if mode == {}:
            self.check(spec, before, {}, output.sequences, is_prefix=True)
        return output.finish_reason

    def _drop(self, spec: Spec, rng: random.Random) -> str:
        """Submitted, and the handle dropped."""
        mode = self._mode(rng)
        request = self.submit(spec, **mode, max_new_tokens=max(spec.new_tokens, 12))
        if "num_beams" not in mode and "num_return_sequences" not in mode and rng.random() < 0.5:
            next(iter(request))
        else:
            time.sleep(0.02 * rng.random())
        del request
        return "dropped"

    def _timeout(self, spec: Spec, rng: random.Random) -> str:
        """`result(timeout)` in vain, then with patience."""
        before = self.version
        request = self.submit(spec)
        with suppress(TimeoutError):
            request.result(timeout=0.1 * rng.random() ** 2)
        output = self.result(request)
        self.check(spec, before, {}, output.sequences)
        return output.finish_reason

    def _raising_processor(self, spec: Spec, rng: random.Random) -> str:
        mode = self._mode(rng, rng.choice(["greedy", "beams", "sampling"]))
        mode["logits_processor"] = [Nudge(raise_at=rng.randrange(4))]
        return self._either(spec, rng, spec.prompt, mode)

    def _either(self, spec: Spec, rng: random.Random, prompt: list[int], mode: dict[str, Any]) -> str:
        """By `submit`, or by `generate()`."""
        if rng.random() < 0.5:
            return self.result(self.submit(spec, prompt, **mode)).finish_reason
        mode.pop("seed", None)
        self.model.generate(torch.tensor([prompt]), max_new_tokens=spec.new_tokens, **mode)
        return "finished"

    def _raising_criterion(self, spec: Spec, rng: random.Random) -> str:
        request = self.submit(spec, stopping_criteria=[RaisingCriterion(rng.randrange(4))])
        return self.result(request).finish_reason

    def _raising_streamer(self, spec: Spec, rng: random.Random) -> str:
        mode = self._mode(rng, rng.choice(["greedy", "processor"]))
        streamer = TokenList(raise_at=rng.randrange(6))
        self.model.generate(torch.tensor([spec.prompt]), max_new_tokens=spec.new_tokens, streamer=streamer, **mode)
        return "finished"

    def _failing_forward(self, spec: Spec, rng: random.Random) -> str:
        """A prompt that makes the model raise, in one of its chunks."""
        prompt = list(spec.prompt)
        prompt[rng.randrange(len(prompt))] = MARKER
        outcome = self._either(spec, rng, prompt, self._mode(rng, rng.choice(["greedy", "beams", "samples"])))
        self.violation(f"request {spec.index}: a failing forward did not fail it: {outcome}")
        return outcome

    # The monitor

    def monitor(self, stop: threading.Event) -> None:
        """Looks at the engine while it works, and disturbs it."""
        while not stop.wait(0.02 + 0.06 * self.rng.random()):
            try:
                what = self.rng.choices(
                    ["invariants", "snapshot", "reset_prefix_cache", "release", "weights"],
                    [60, 20, 3, 2, 1 if self.weight_changes else 0],
                )[0]
                self.monitored[what] += 1
                if what == "invariants":
                    self.engine.check_invariants()
                elif what == "snapshot":
                    json.dumps(self.engine.snapshot())
                elif what == "reset_prefix_cache":
                    self.engine.reset_prefix_cache()
                    self.changed_at = time.monotonic()  # for all that the engine knows
                elif what == "release":
                    with suppress(ValueError):  # keys and values of two models
                        self.engine.release()
                        self.monitored["released"] += 1
                else:
                    self.change_weights()
            except BaseException as error:
                self.violation(f"monitor, {what}: {type(error).__name__}: {error}")
            if time.monotonic() - self.last_outcome > PATIENCE + 60:
                faulthandler.dump_traceback(all_threads=True)
                os._exit(2)

    def change_weights(self) -> None:
        """An optimizer step, as it were."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        self.weights[self.version + 1] = self._weights()
        self.changed_at = time.monotonic()
        self.version += 1

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    # Quiescent points

    def settle(self, where: str) -> None:
        """Nothing runs: checks what must be so then, and compares results with stock."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            self.engine.check_invariants()
            live = {s.seq_id for chat in self.conversations for s in chat.cache.sequences if s is not None}
            held = {s["id"] for group in self.engine.snapshot()["groups"] for s in group["sequences"]}
            assert not held - live, f"{len(held - live)} sequences that are not held"
            assert not running, f"work that nobody waits for: {running}"
        except AssertionError as error:
            self.violation(f"{where}: {error}")
        self.verify()

    def _running(self) -> list[dict[str, Any]]:
        """Groups that are not those of kept caches, and not garbage, as a dropped handle's are for a moment."""
        live = {s.seq_id for chat in self.conversations for s in chat.cache.sequences if s is not None}
        groups = self.engine.snapshot()["groups"]
        return [group for group in groups if not {s["id"] for s in group["sequences"]} <= live]

    def verify(self) -> None:
        """Compares what was found with stock, under the weights of the moment."""
        checks, self.checks = self.checks, []
        for check in sorted(checks, key=lambda check: check.version):
            self.stock.load_state_dict(self.weights[check.version])
            kwargs = check.kwargs | {"attention_mask": torch.ones_like(check.ids) if check.mask is None else check.mask}
            if (seed := kwargs.pop("seed", None)) is not None:
                torch.manual_seed(seed)
            expected = self.stock.generate(check.ids, **kwargs)
            new = expected[:, check.ids.shape[1] :]
            width = max(new.shape[1], *(len(row) for row in check.found))
            self.verified[check.spec.kind] += 1
            self.num_tokens_verified += sum(len(row) for row in check.found)
            if check.is_prefix:
                if new[0, : len(check.found[0])].tolist() == check.found[0]:
                    continue
                # Judged as if it had been asked for no more than it made.
                kwargs["max_new_tokens"] = len(check.found[0])
                expected = expected[:, : check.ids.shape[1] + len(check.found[0])]
                width = len(check.found[0])
            found = torch.tensor([row + [PAD] * (width - len(row)) for row in check.found])
            actual = torch.cat([check.ids.repeat_interleave(len(found) // len(check.ids), dim=0), found], dim=1)
            if torch.equal(actual, expected):
                continue
            report = compare_generations(self.stock, check.ids, expected, actual, seed=seed, **kwargs)
            if report.identical:
                continue  # what stands behind the end of a row aside
            if report:
                self.num_near_ties += 1
            else:
                self.violation(f"request {check.spec.index} ({check.spec.kind}), {check.kwargs}: {report}")
        for version in [version for version in self.weights if version < self.version]:
            del self.weights[version]

    # A whole run

    def replay(self, workload: Workload, check_every: int) -> None:
        """Makes all requests; stops at every `check_every`-th until nothing runs."""
        clients = [threading.Thread(target=self.serve, name=f"client-{n}") for n in range(self.num_clients)]
        looper = threading.Thread(target=self.loop.run_forever, name="asyncio")
        for thread in (*clients, looper):
            thread.start()
        specs, pause = iter(workload), threading.Event()
        while some := list(itertools.islice(specs, check_every)):
            stop = threading.Event()
            monitor = threading.Thread(target=self.monitor, args=(stop,), name="monitor")
            monitor.start()
            for spec in some:
                self.specs.put(spec)
                if self.specs.empty():
                    pause.wait(workload.gap())

            self.specs.join()
            stop.set()
            monitor.join()
            self.settle(f"after {some[-1].index + 1} requests")
            if self.weight_changes and self.rng.random() < 0.3:
                self.change_weights()
        for _ in clients:
            self.specs.put(None)
        for thread in clients:
            thread.join()
        asyncio.run_coroutine_threadsafe(self.loop.shutdown_default_executor(), self.loop).result(PATIENCE)
        self.loop.call_soon_threadsafe(self.loop.stop)
        looper.join()
        self.loop.close()

    def finish(self, num_requests: int, threads_before: set[threading.Thread]) -> dict[str, Any]:
        """The last checks: nothing lost, nothing leaked; returns the report."""
        lost = [index for index in range(num_requests) if len(self.outcomes.get(index, [])) != 1]
        if lost:
            self.violation(f"{len(lost)} requests without exactly one outcome, such as {lost[:5]}")
        self.conversations.clear()
        gc.collect()
        stats = self.engine.stats()
        if stats.num_free_blocks != stats.num_blocks:
            self.violation(f"blocks leaked: {stats.num_blocks - stats.num_free_blocks}")
        if groups := self.engine.snapshot()["groups"]:
            self.violation(f"groups leaked: {groups}")
        hf_paged.unpatch(self.model)
        # A loop that was between two forwards starts it once more, to be told; without work it ends by itself.
        deadline = time.monotonic() + 10
        while (more := self._more_threads(threads_before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if more:
            self.violation(f"threads that outlived unpatch(): {more}")
        kinds: dict[str, dict[str, int]] = {}
        for (kind, outcome), n in sorted(self.counts.items()):
            kinds.setdefault(kind, {})[outcome] = n
        return {
            "stats": {name: getattr(stats, name) for name in COUNTED},
            "outcomes": kinds,
            "errors": dict(self.errors.most_common()),
            "monitored": dict(self.monitored.most_common()),
            "injected": {"failing_forwards": self.faults.num_failures, "out_of_memory": self.faults.num_ooms},
            "weight_versions": self.version // 2,
            "verified": dict(self.verified.most_common()),
            "num_verified": sum(self.verified.values()),
            "num_tokens_verified": self.num_tokens_verified,
            "num_near_ties": self.num_near_ties,
            "violations": self.violations,
        }

    def _more_threads(self, before: set[threading.Thread]) -> list[str]:
        return [t.name for t in threading.enumerate() if t not in before and t.name != "tqdm_monitor"]


def live_objects() -> Counter[str]:
    """How many objects of the engine's short-lived kinds are alive."""
    gc.collect()
    gc.collect()  # what the finalizers of the first one's garbage led to
    kinds = {
        *("Request", "RequestState", "SampledRun", "CallRows", "ForwardRun", "Sequence", "SequenceGroup"),
        *("PagedCache", "DecodingLoop", "Engine", "StepWorker", "KVPool", "BlockManager"),
    }
    names = (type(o).__name__ for o in gc.get_objects() if str(type(o).__module__).startswith("hf_paged"))
    return Counter(name for name in names if name in kinds)


def soak(
    num_requests: int,
    lengths: list[tuple[int, int]],
    *,
    preemption: str = "swap",
    num_blocks: int = 48,
    num_clients: int = 24,
    check_every: int = 500,
    verify_every: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Runs one engine through `num_requests` requests; returns the report of `Soak.finish`."""
    threads_before, objects_before = set(threading.enumerate()), live_objects()
    block_size = 4
    # Of the tiny model: two layers, keys and values, two heads of eight floats.
    swap_bytes = 0 if preemption == "recompute" else num_blocks // 2 * block_size * 2 * 2 * 2 * 8 * 4
    settings = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "preemption": preemption,
        "swap_space_gib": swap_bytes / 2**30,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
        "max_waiting": 10,
    }
    run = Soak(settings, num_clients, seed, weight_changes=True)
    started = time.perf_counter()
    run.replay(Workload(lengths, num_requests, seed, verify_every), check_every)
    report = run.finish(num_requests, threads_before)
    report = {"settings": settings | {"num_requests": num_requests}, "seconds": time.perf_counter() - started} | report
    del run
    left = live_objects() - objects_before
    if left:
        report["violations"].append(f"objects leaked: {dict(left)}")
    return report


def read_lengths(table: str, seed: int) -> list[tuple[int, int]]:
    """`(prompt, output)` lengths in tokens, of public traces' quantiles."""
    return list(itertools.islice(draw_lengths(f"table {table}", seed), 5000))


def print_report(results: dict[str, dict[str, Any]]) -> None:
    """The counts of all runs as tables."""
    table = Table("", *results, title="soak")
    table.add_row("requests", *(f"{result['settings']['num_requests']:,}" for result in results.values()))
    for name in COUNTED:
        table.add_row(name, *(f"{result['stats'][name]:,}" for result in results.values()))
    for name in ("weight_versions", "num_verified", "num_tokens_verified", "num_near_ties"):
        table.add_row(name, *(f"{result[name]:,}" for result in results.values()))
    kinds = Table("kind", *results)
    for kind in sorted({kind for result in results.values() for kind in result["outcomes"]}):
        each = (result["outcomes"].get(kind, {}) for result in results.values())
        kinds.add_row(kind, *(", ".join(f"{outcome} {n:,}" for outcome, n in own.items()) for own in each))
    command.show(table, kinds)


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--num-requests", type=int, default=20_000, help="shared equally by the preemption modes")
    parser.add_argument("--lengths", default="azure", help="table of length_quantiles.json")
    parser.add_argument("--preemption", default="swap,recompute,auto", help="modes, each with an engine of its own")
    parser.add_argument("--num-blocks", type=int, default=48)
    parser.add_argument("--clients", type=int, default=24, help="threads that make requests")
    parser.add_argument("--check-every", type=int, default=500, help="requests from one quiescent point to the next")
    parser.add_argument("--verify-every", type=int, default=5, help="every so manieth request is compared with stock")
    parser.add_argument("--max-growth", type=float, default=64.0, help="MiB that the process may grow by")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    command.quiet()
    faulthandler.enable()
    lengths = read_lengths(args.lengths, args.seed)
    modes, process = args.preemption.split(","), psutil.Process()
    # What the first requests bring in once and for all: code, kernels, arenas of the threads.
    soak(min(300, args.num_requests), lengths, num_clients=args.clients, seed=args.seed + 100)
    sizes = [process.memory_info().rss / 2**20]
    results: dict[str, dict[str, Any]] = {}
    for number, mode in enumerate(tqdm(modes)):
        share = args.num_requests // len(modes) + (number < args.num_requests % len(modes))
        results[mode] = soak(
            share,
            lengths[number * share % len(lengths) :] + lengths,
            preemption=mode,
            num_blocks=args.num_blocks,
            num_clients=args.clients,
            check_every=args.check_every,
            verify_every=args.verify_every,
            seed=args.seed + number,
        )
        sizes.append(process.memory_info().rss / 2**20)
    violations = [text for result in results.values() for text in result["violations"]]
    if sizes[-1] - sizes[0] > args.max_growth:
        violations.append(f"the process grew: {[round(size) for size in sizes]} MiB")
    print_report(results)
    print(f"resident memory after each run: {', '.join(f'{size:.0f}' for size in sizes)} MiB")
    print("\n".join(f"VIOLATION: {text}" for text in violations) or "nothing lost, nothing leaked, no violation")
    about = {
        "what": "mixed requests against a small pool; counts by kind and outcome; violations must be empty",
        "num_requests": args.num_requests,
        "lengths": args.lengths,
        "resident_mib": [round(size, 1) for size in sizes],
        "violations": violations,
    }
    command.save(args.out / "soak.json", about, results)
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
