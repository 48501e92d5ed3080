"""`run`: a workload through one system, on the real scheduler and tables; a cost model moves the clock."""

from __future__ import annotations

import itertools
import random
import statistics
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from workload import Request

from hf_paged import OutOfBlocksError
from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence, SequenceStatus
from paper.costs import Setup, Work
from paper.policies import Reserved, Static, System

# How often in a step a beam that is not the best one goes on from another. At width 2 it saves 36.8 % of the blocks at
# Alpaca's lengths, the paper says 37.6; the other widths and lengths follow.
BEAM_TURNOVER = 0.12
CLASSES = {"marked": True, "others": False}


@dataclass(frozen=True)
class Settings:
    """What a run does besides its requests.

    Attributes:
        width: Sequences of a request.
        is_beams: They are beams, which go on from each other, and not samples.
        prefix: Tokens that all prompts begin with.
        marked_every: Every so-many-th request is marked, the first among them: only these have `width` sequences, and
        favours_marked: they go first, by priority.
        preemption: "recompute", "swap", or "auto": what the costs find cheaper.
        caches_prefixes: Whether full blocks are found by their tokens.
        max_num_seqs: Rows a step.
        chunk: Tokens a step; what is longer is computed in chunks.
        transfers: Copies that a block takes to CPU memory, or back.
        sample_every: Steps from one look to the next.
        check_every: Steps from one check of all invariants to the next; 0: none but at the end.
    """

    block_size: int = 16
    width: int = 1
    is_beams: bool = False
    prefix: int = 0
    marked_every: int = 1
    favours_marked: bool = False
    preemption: str = "auto"
    caches_prefixes: bool = False
    max_num_seqs: int = 256
    chunk: int = 2048
    transfers: int = 1
    seed: int = 0
    sample_every: int = 16
    check_every: int = 0


@dataclass(slots=True)
class Outcome:
    """How one request went, in seconds."""

    arrival: float
    first: float
    end: float
    num_output: int
    is_marked: bool = True

    @property
    def normalized(self) -> float:
        """The paper's measure: seconds from arrival to end, for each token of the output."""
        return (self.end - self.arrival) / self.num_output


@dataclass(slots=True)
class Job:
    """A request in the system, or those branches of it that run together.

    Attributes:
        to_fork: Branches that are still to leave the prompt.
        is_marked: See `Settings.marked_every`.
        rest: Branches that are to come after these, and
        prompt: theirs.
        first: When the first token of earlier branches was there.
        first_token_at: When that of these was, and
        last_token_at: their newest one.
    """

    request: Request
    to_fork: int
    is_marked: bool
    rest: int
    prompt: list[int]
    first: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0


class Simulation:
    """Serves requests, in order of arrival; those that could never fit the pool are refused, as the engine does."""

    def __init__(self, requests: list[Request], system: System, setup: Setup, settings: Settings) -> None:
        size, costs = settings.block_size, setup.costs
        num_blocks = setup.num_slots // size
        prefers = {"recompute": lambda group: False, "swap": lambda group: True, "auto": costs.prefers_swap}
        num_swap_blocks = 0 if settings.preemption == "recompute" else num_blocks
        self.manager = BlockManager(num_blocks, size, settings.caches_prefixes and system.shares, num_swap_blocks)
        self.policy = system.policy(self.manager, self.lengths, setup.context)
        # A static batch is computed as a whole, prompts too.
        chunk = max(settings.chunk, setup.num_slots) if system.is_static else settings.chunk
        prefers_swap = prefers[settings.preemption]
        self.scheduler = Scheduler(self.manager, chunk, settings.max_num_seqs, prefers_swap, self.policy)
        self.system, self.settings, self.costs = system, settings, costs
        self.capacity = num_blocks * size
        self.requests = [request for request in requests if request.num_total <= self.capacity]
        self.num_refused = len(requests) - len(self.requests)
        # Token ids are bytes: a block of sixteen has 128 random bits.
        self.rng = random.Random(f"tokens {settings.seed}")
        self.next_token = itertools.cycle(self.rng.randbytes((1 << 20) + 7))
        self.prefix = list(random.Random("prefix").randbytes(settings.prefix))
        self.beams = random.Random(f"beams {settings.seed}")
        self.jobs: dict[int, Job] = {}  # by the group's arrival
        self.ends: dict[int, int] = {}  # sequence -> its tokens when it is done
        self.prompts: dict[int, int] = {}  # sequence -> tokens of its prompt
        self.done: dict[int, Sequence] = {}  # of a static batch
        self.padded = 0  # tokens of each row of it
        self.outcomes: list[Outcome] = []
        self.gaps = array("d")  # seconds from a request's token to its next
        self.columns: dict[str, list[float]] = {}  # what was seen at some of the steps
        self.now = self.unseen = 0.0
        self.num_submitted = self.num_steps = self.num_outputs = self.num_failed = 0

    def lengths(self, seq_id: int) -> tuple[int, int]:
        """Prompt and output of a live sequence."""
        prompt = self.prompts[seq_id]
        return prompt, self.ends[seq_id] - prompt

    def serve(self) -> None:
        """Serves all requests."""
        arriving = 0
        while arriving < len(self.requests) or self.jobs:
            while arriving < len(self.requests) and self.requests[arriving].arrival <= self.now:
                self.submit(self.requests[arriving])
                arriving += 1
            batch = self._schedule()
            if batch is None:
                if arriving < len(self.requests):  # nothing to do until one comes
                    self.now = max(self.now, self.requests[arriving].arrival)
                continue
            seconds = self.seconds(batch)
            self.unseen += seconds
            if self.num_steps % self.settings.sample_every == 0:
                self.look()
                self.unseen = 0.0
            self.now += seconds
            chunks = self.scheduler.chunks(batch)
            self.scheduler.update(batch)
            self.num_steps += 1
            if self.settings.check_every and self.num_steps % self.settings.check_every == 0:
                self.manager.check_invariants()
            for sequence, first, num_tokens in chunks:
                if first + num_tokens == sequence.num_tokens:
                    self.advance(sequence)
        self.manager.check_invariants()

    def _schedule(self) -> Batch | None:
        """The next step; `None` if there is nothing to do, or if the first group in line had to be given up."""
        try:
            batch = self.scheduler.schedule()
            if not batch.num_seqs and self.scheduler.queues.has_work:
                batch = self.scheduler.schedule(forced=True)
            return batch if batch.num_seqs else None
        except OutOfBlocksError as error:
            assert error.group is not None
            for sequence in list(error.group.sequences):
                self._drop(sequence)
            del self.jobs[error.group.arrival]
            self.num_failed += 1
            return None

    # Requests

    def submit(self, request: Request) -> None:
        is_marked = self.num_submitted % self.settings.marked_every == 0
        self.num_submitted += 1
        ids = self.prefix + list(self.rng.randbytes(request.num_prompt - len(self.prefix)))
        self.branch(request, ids, self.settings.width if is_marked else 1, is_marked)

    def branch(self, request: Request, ids: list[int], width: int, is_marked: bool, first: float = 0.0) -> None:
        """Queues a request, or what is left of it: so many branches as may run together."""
        count = min(width, self.system.most_branches or width)
        priority = int(self.settings.favours_marked and not is_marked)
        group = self.scheduler.new_group(priority, max_tokens=request.num_total)
        rest, shares = width - count, self.system.shares
        self.jobs[group.arrival] = Job(request, count - 1, is_marked, rest, ids.copy() if rest else [], first)
        for index in range(1 if shares else count):
            sequence = self.scheduler.new_sequence(group)
            sequence.token_ids = ids if shares else ids.copy()
            sequence.num_tokens = self.prompts[sequence.seq_id] = request.num_prompt
            sequence.logits_from, sequence.is_wanted = request.num_prompt - 1, True
            self.ends[sequence.seq_id] = request.num_total
            if not shares:
                sequence.extra_key = (index,)  # whatever is equal in them, nothing is shared
        self.scheduler.queues.wake(group)

    # Costs

    def seconds(self, batch: Batch) -> float:
        work = Work.of(batch, self.settings.block_size)
        if self.system.is_static:
            work = self._padded(work)
        elif self.settings.width > 1 and not self.system.shares:
            work = self._copied(work, batch)
        moved = len(batch.swap_outs) + len(batch.swap_ins)
        return self.costs.seconds(work) + self.settings.transfers * moved * self.costs.card.transfer

    def _padded(self, work: Work) -> Work:
        """All rows of the batch, those that are done among them, as long as the longest."""
        assert isinstance(self.policy, Static)
        rows = len(self.policy.batch)
        if work.prompt:
            longest = max(s.num_tokens for group in self.policy.batch for s in group.sequences)
            self.padded = longest
            return Work(prompt=rows * longest, kv=rows * longest, pairs=rows * longest * (longest + 1) // 2)
        self.padded += 1
        copied = rows * self.padded if self.system.copies_cache else 0
        return Work(decodes=rows, kv=rows * self.padded, copied=copied)

    def _copied(self, work: Work, batch: Batch) -> Work:
        """Without sharing a prompt is computed once and copied, and so is the output of a beam that another takes."""
        width = self.settings.width
        copied = work.prompt * (width - 1) // width
        if self.settings.is_beams and work.decodes:
            starts = zip(batch.seq_ids, batch.starts, batch.query_lens)
            outputs = sum(start + 1 - self.prompts[seq_id] for seq_id, start, n in starts if n == 1)
            copied += round(outputs * BEAM_TURNOVER * (width - 1) / width)
        return replace(work, prompt=work.prompt // width, pairs=work.pairs // width, copied=work.copied + copied)

    # Tokens

    def advance(self, sequence: Sequence) -> None:
        """The logits of a sequence's last token are there."""
        group = sequence.group
        job = self.jobs.get(group.arrival)
        if job is None:  # ended with its siblings
            return
        if self.settings.is_beams and any(s.num_uncomputed_tokens for s in group.sequences):
            return  # beams go on together
        is_prompt = sequence.num_tokens == job.request.num_prompt
        if is_prompt:
            job.first_token_at = job.first_token_at or self.now
        if is_prompt and self.system.shares:
            for _ in range(job.to_fork):
                self._fork(sequence)
        elif self.settings.is_beams and self.system.shares:
            self._reorder(group.sequences)
        goes_together = self.settings.is_beams or (is_prompt and self.system.shares)
        for one in list(group.sequences) if goes_together else [sequence]:
            self.grow(one)

    def grow(self, sequence: Sequence) -> None:
        """Gives a sequence its next token, or ends it."""
        job = self.jobs[sequence.group.arrival]
        if job.last_token_at and self.now > job.last_token_at:
            self.gaps.append(self.now - job.last_token_at)
        job.last_token_at = self.now
        self.num_outputs += 1
        if sequence.num_tokens + 1 >= self.ends[sequence.seq_id]:
            self.end(sequence)  # its last token is never written to the cache
            return
        assert sequence.token_ids is not None
        sequence.token_ids.append(next(self.next_token))
        sequence.logits_from = sequence.num_tokens
        sequence.num_tokens += 1
        self.scheduler.queues.wake(sequence.group)

    def _fork(self, parent: Sequence) -> None:
        child = self.scheduler.fork(parent)
        self.ends[child.seq_id], self.prompts[child.seq_id] = self.ends[parent.seq_id], self.prompts[parent.seq_id]

    def _reorder(self, beams: list[Sequence]) -> None:
        lost = [beam for beam in beams[1:] if self.beams.random() < BEAM_TURNOVER]
        for beam in lost:
            self._fork(self.beams.choice([other for other in beams if other is not beam and other not in lost]))
        for beam in lost:
            self._drop(beam)

    def _drop(self, sequence: Sequence) -> None:
        self.scheduler.free(sequence)
        del self.ends[sequence.seq_id], self.prompts[sequence.seq_id]

    def end(self, sequence: Sequence) -> None:
        """A sequence is done; those of a static batch are when all of them are."""
        self.done[sequence.seq_id] = sequence
        batch = self.policy.batch if isinstance(self.policy, Static) else []
        if len(self.done) < sum(len(group.sequences) for group in batch):
            return
        done, self.done = self.done, {}
        for one in done.values():
            self._drop(one)
            if not one.group.sequences:
                self.finish(self.jobs.pop(one.group.arrival))

    def finish(self, job: Job) -> None:
        """All sequences of a job are done."""
        request = job.request
        first = job.first or (self.now if self.system.is_static else job.first_token_at)
        if job.rest:
            self.branch(request, job.prompt, job.rest, job.is_marked, first)
        else:
            self.outcomes.append(Outcome(request.arrival, first, self.now, request.num_output, job.is_marked))

    # What is seen

    def running(self) -> list[Sequence]:
        """Sequences with blocks in the pool."""
        groups = [group for group in self.scheduler.queues.groups if group.status is SequenceStatus.RUNNING]
        return [sequence for group in groups for sequence in group.sequences]

    def look(self) -> None:
        manager, running = self.manager, self.running()
        stored = manager.num_stored_tokens
        if isinstance(self.policy, Reserved):
            ends = {s.seq_id: self.ends[s.seq_id] for s in running}
            reserved = {s: len(run) * manager.block_size for s, run in self.policy.runs.items() if s in ends}
            taken, future = sum(reserved.values()), sum(end for s, end in ends.items() if s in reserved) - stored
        else:
            taken, future = manager.num_allocated_slots, 0
        held, in_use = sum(len(manager.blocks(s.seq_id)) for s in running), manager.pool.num_in_use
        seen = {
            "time": self.now,
            "seconds": self.unseen,
            "batch": len({id(s.group) for s in running}),
            "sequences": len(running),
            "saved": 1 - in_use / held if held else 0.0,
            "held": held,
            "in_use": in_use,
            "waiting": self.scheduler.queues.num_waiting,
            "stored": stored,
            "future": future,
            "internal": taken - future - stored,
            "external": self.capacity - taken,
        }
        for name, value in seen.items():
            self.columns.setdefault(name, []).append(value)

    def mean(self, name: str, among: Iterable[int] | None = None) -> float:
        """Mean of a column over the time in which something ran, or over that of some looks."""
        weights, values = self.columns["seconds"], self.columns[name]
        chosen = list(range(len(weights)) if among is None else among)
        return sum(weights[i] * values[i] for i in chosen) / max(sum(weights[i] for i in chosen), 1e-12)


def run(requests: list[Request], system: System, setup: Setup, settings: Settings = Settings()) -> dict[str, Any]:
    """Serves the requests, in order of arrival, and sums up."""
    simulation = Simulation(requests, system, setup, settings)
    simulation.serve()
    outcomes = simulation.outcomes
    # Memory is looked at while something waits for it, as in the paper's figure 2.
    full = [i for i, waiting in enumerate(simulation.columns["waiting"]) if waiting > 0]
    parts = {
        name: round(simulation.mean(name, full) / simulation.capacity, 4)
        for name in ("stored", "future", "internal", "external")
    }
    preemption = simulation.scheduler.preemption
    figures = {
        "served": len(outcomes),
        "refused": simulation.num_refused,
        "failed": simulation.num_failed,
        "seconds": rounded(simulation.now),
        "requests_per_second": rounded(len(outcomes) / simulation.now),
        "steps": simulation.num_steps,
        "batch": rounded(simulation.mean("batch")),
        "sequences": rounded(simulation.mean("sequences")),
        "saved": rounded(1 - simulation.mean("in_use") / simulation.mean("held")),
        "memory": parts if full else None,
        "preempted": preemption.num_preemptions,
        "swapped": preemption.num_swapped_out,
        # A static batch hands out its tokens when all of it is done.
        "inter_token": None if system.is_static else spread(simulation.gaps),
    }
    figures |= latencies(outcomes)
    if settings.marked_every > 1:
        figures |= {name: latencies([o for o in outcomes if o.is_marked == value]) for name, value in CLASSES.items()}
    return figures


def latencies(outcomes: list[Outcome]) -> dict[str, Any]:
    """What the requests waited for: all of their tokens, and the first."""
    return {
        "normalized_latency": rounded(statistics.fmean(o.normalized for o in outcomes)),
        "normalized": spread(o.normalized for o in outcomes),
        "ttft": spread(o.first - o.arrival for o in outcomes),
    }


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles; `None` if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = {f"p{p}": rounded(ordered[min(len(ordered) - 1, len(ordered) * p // 100)]) for p in (50, 99)}
    return {"mean": rounded(statistics.fmean(ordered))} | at


def rounded(value: float) -> float:
    """Five digits: what is saved, and compared."""
    return float(f"{value:.5g}")
