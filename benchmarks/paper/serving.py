"""`serve`: requests at their arrivals on the wall clock, through the real engine with one of the paper's policies."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import command
from simulation import Work
from workload import Request

import hf_paged
from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.policy import FCFS
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence, SequenceGroup
from hf_paged.tools.cli import read_prompts
from paper.apart import ScheduledApart
from paper.policies import Reserved, System
from paper.requests import lengths
from paper.simulator import Outcome, Settings

SCALE = 8  # by which lengths, context and pool are smaller than the paper's
SLOTS, CONTEXT, BLOCK_SIZE = 15_700 // SCALE, 2048 // SCALE, 4
ROWS = SLOTS // CONTEXT  # of a static batch: whole contexts that the pool has room for
SETTINGS = Settings(block_size=BLOCK_SIZE, preemption="recompute")


@dataclass
class Measured:
    """A run.

    Attributes:
        outcomes: What its requests waited for.
        steps: With their seconds.
        gaps: Seconds from a request's token to its next.
        held: Blocks of all rows, times seconds, and
        distinct: those without what several rows share.
        preempted: Sequences, and
        swapped: those of them that went to CPU memory.
    """

    outcomes: list[Outcome]
    steps: list[tuple[Work, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    held: float = 0.0
    distinct: float = 0.0
    preempted: int = 0
    swapped: int = 0

    def add(self, batch: Batch, block_size: int, seconds: float) -> None:
        """A step."""
        self.steps.append((Work.of(batch, block_size), seconds))
        blocks = batch.tables[0].blocks
        self.held += seconds * len(blocks)
        self.distinct += seconds * len(set(blocks))

    @property
    def seconds(self) -> float:
        return max(outcome.end for outcome in self.outcomes)


def draw(num_requests: int, seed: int, prefix: int = 0, workload: str = "sharegpt") -> list[Request]:
    """A workload's lengths, scaled, behind a prefix of so many tokens."""
    source = lengths(workload, seed)
    made: list[Request] = []
    while len(made) < num_requests:
        prompt, output = (max(1, round(length / SCALE)) for length in next(source))
        prompt += prefix
        if prompt + 2 <= CONTEXT:
            made.append(Request(0.0, prompt, max(2, min(output, CONTEXT - prompt))))
    return made


def prompts(requests: list[Request], settings: Settings, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Token ids, the prefix's the same in all of them."""
    rng = random.Random(seed)
    prefix = [rng.randrange(3, vocabulary) for _ in range(settings.prefix)]
    return [prefix + [rng.randrange(3, vocabulary) for _ in range(r.num_prompt - len(prefix))] for r in requests]


def texts(requests: list[Request], tokenizer: Any, seed: int = 0) -> list[list[int]]:
    """Token ids of English text instead: beams part as often as a model lets them that knows what it reads."""
    rng = random.Random(seed)
    known = tokenizer(read_prompts(command.ASSETS / "prompts.jsonl"), add_special_tokens=False)["input_ids"]
    made: list[list[int]] = []
    for request in requests:
        ids: list[int] = []
        while len(ids) < request.num_prompt:
            ids += rng.choice(known)
        made.append(ids[: request.num_prompt])
    return made


def static_batch(requests: list[Request], waiting: deque[int]) -> tuple[list[int], int, int]:
    """Takes the next batch of a static system from those that wait, in their order.

    Returns:
        Which these are, and the longest prompt and output among them, which together fit the context.
    """
    batch: list[int] = []
    width = longest = 0
    while waiting and len(batch) < ROWS:
        request = requests[waiting[0]]
        wider, longer = max(width, request.num_prompt), max(longest, request.num_output)
        if wider + longer > CONTEXT:
            break
        width, longest = wider, longer
        batch.append(waiting.popleft())
    return batch, width, longest


def decoding(settings: Settings, index: int) -> dict[str, Any]:
    """How a request's tokens are chosen."""
    if settings.is_beams:
        return {"do_sample": False, "num_beams": settings.width}
    if settings.width > 1:
        return {"do_sample": True, "num_return_sequences": settings.width, "top_k": 0, "seed": index}
    return {"do_sample": False}


class Watched(Scheduler):
    """Remembers the step that it has scheduled last, and the request of each of its rows.

    Attributes:
        last: The step.
        rows: The requests, by their place.
        request_of: Those of sequences that began as prompts.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.last = Batch()
        self.rows: list[int] = []
        self.request_of: dict[int, int] = {}

    def new_sequence(self, group: SequenceGroup | None = None) -> Sequence:
        sequence = super().new_sequence(group)
        for one in sequence.group.sequences:
            self.request_of[one.seq_id] = int(sequence.group.request_id or "")
        return sequence

    def schedule(self, **options: Any) -> Batch:
        self.last = super().schedule(**options)
        if self.last.num_seqs:
            self.rows = [int(sequence.group.request_id or "") for sequence, _, _ in self.chunks(self.last)]
        return self.last


class WatchedApart(Watched, ScheduledApart):
    """The same of sequences that share nothing."""


def serve(
    model: Any,
    requests: list[Request],
    system: System,
    settings: Settings = SETTINGS,
    given: list[list[int]] | None = None,
) -> Measured:
    """Serves requests at their arrivals, on the engine with a system's policy; `given`: their prompts."""
    with hf_paged.patched(
        model,
        block_size=settings.block_size,
        num_blocks=SLOTS // settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.chunk,
        enable_prefix_caching=settings.caches_prefixes and system.shares,
        preemption=settings.preemption,
    ):
        given = given or prompts(requests, settings, model.config.vocab_size)
        run = _Run(model.paged, requests, given, system, settings)
        model.paged.core.pool._make_scheduler = run.make_scheduler
        return run.serve()


class _Run:
    """One run on a patched model."""

    def __init__(
        self, engine: Any, requests: list[Request], given: list[list[int]], system: System, settings: Settings
    ) -> None:
        self.engine, self.requests, self.prompts, self.system, self.settings = engine, requests, given, system, settings
        self.handles: dict[int, Any] = {}
        self.running: set[int] = set()
        self.begun: set[int] = set()  # those of them that have been in a step: a burst's others need not be looked at
        self.batch: list[int] = []  # of a static system: what was let in together

    def make_scheduler(self, manager: BlockManager) -> Scheduler:
        def find(seq_id: int) -> tuple[int, int]:
            request = self.requests[scheduler.request_of[seq_id]]
            return request.num_prompt, request.num_output

        policy: FCFS = self.system.policy(manager, find, CONTEXT)
        budget = self.settings.chunk, self.settings.max_num_seqs
        scheduler: Watched
        if isinstance(policy, Reserved):
            scheduler = WatchedApart(manager, *budget, policy, self.settings.width)
        else:
            scheduler = Watched(manager, *budget, self.engine.core.pool._prefers_swap, policy)
        return scheduler

    def serve(self) -> Measured:
        engine, requests, measured = self.engine, self.requests, Measured([])
        waiting: deque[int] = deque()
        last: dict[int, float] = {}  # request -> when its newest token was there
        arrived = sum(request.arrival == 0 for request in requests)
        engine.pause()
        waiting.extend(range(arrived))
        self.let_in(waiting)  # those that are there at once are queued before the clock starts
        self.started = time.monotonic()
        while len(measured.outcomes) < len(requests):
            now = time.monotonic() - self.started
            while arrived < len(requests) and requests[arrived].arrival <= now:
                waiting.append(arrived)
                arrived += 1
            self.let_in(waiting)
            if not self.running:
                time.sleep(max(0.0, requests[arrived].arrival - now))
                continue
            began = time.perf_counter()
            if engine.step() is None:
                measured.outcomes += self.collect()
                continue
            ended = time.perf_counter()
            batch, rows = engine.core.scheduler.last, engine.core.scheduler.rows
            measured.add(batch, self.settings.block_size, ended - began)
            if not self.system.is_static:
                starts = batch.logit_starts
                for index in {index for row, index in enumerate(rows) if starts[row + 1] > starts[row]}:
                    if index in last:
                        measured.gaps.append(ended - last[index])
                    last[index] = ended
            self.begun.update(rows)
            measured.outcomes += self.collect()
        preemption = engine.core.scheduler.preemption
        measured.preempted, measured.swapped = preemption.num_preemptions, preemption.num_swapped_out
        engine.resume()
        return measured

    def let_in(self, waiting: deque[int]) -> None:
        """Hands the engine what has arrived; of a static system a batch, padded, when the one before is done."""
        if not self.system.is_static:
            while waiting:
                index = waiting.popleft()
                self.submit(index, self.prompts[index], self.requests[index].num_output)
        elif not self.running and waiting:
            self.batch, width, longest = static_batch(self.requests, waiting)
            for index in self.batch:
                prompt = self.prompts[index]
                self.submit(index, [3] * (width - len(prompt)) + prompt, longest)

    def submit(self, index: int, prompt: list[int], num_output: int) -> None:
        is_marked = index % self.settings.marked_every == 0
        self.handles[index] = self.engine.submit(
            prompt,
            request_id=str(index),
            priority=int(self.settings.favours_marked and not is_marked),
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            **decoding(self.settings, index),
        )
        self.running.add(index)

    def collect(self) -> list[Outcome]:
        """What became of the requests that are done; a static batch is done when all of it is."""
        done = [index for index in self.begun if self.handles[index].is_done]
        self.running.difference_update(done)
        self.begun.difference_update(done)
        if self.system.is_static:
            if self.running:
                return []
            done = self.batch
        outputs = {index: self.handles.pop(index).result(timeout=60) for index in done}
        last = max((output.metrics.finish_time for output in outputs.values()), default=0.0)
        outcomes: list[Outcome] = []
        for index, output in outputs.items():
            request, times = self.requests[index], output.metrics
            end = last if self.system.is_static else times.finish_time
            first = end if self.system.is_static else times.first_token_time or end
            if not self.system.is_static:
                assert len(output.token_ids) == request.num_output
            outcomes.append(
                Outcome(
                    request.arrival,
                    first - self.started,
                    end - self.started,
                    request.num_output,
                    request.num_prompt,
                    index % self.settings.marked_every == 0,
                )
            )
        return outcomes
