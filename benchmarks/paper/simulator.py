"""`run`: a workload through one system, on the real scheduler and tables; what the figures are made of."""

from __future__ import annotations

import random
import statistics
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from simulation import Job, Simulation, Work
from workload import Request

from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence
from paper.costs import Setup
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
    num_prompt: int = 0
    is_marked: bool = True

    @property
    def normalized(self) -> float:
        """The paper's measure: seconds from arrival to end, for each token of the output."""
        return (self.end - self.arrival) / self.num_output


@dataclass(slots=True)
class PaperJob(Job):
    """A request in the system, or those branches of it that run together.

    Attributes:
        is_marked: See `Settings.marked_every`.
        rest: Branches that are to come after these, and
        prompt: theirs.
        first: When the first token of earlier branches was there.
        last_token_at: When its newest one was.
    """

    is_marked: bool = True
    rest: int = 0
    prompt: list[int] = field(default_factory=list)
    first: float = 0.0
    last_token_at: float = 0.0


class PaperSimulation(Simulation):
    """Requests through one of the paper's systems. Its clock is a cost model's."""

    def __init__(self, requests: list[Request], system: System, setup: Setup, settings: Settings) -> None:
        size, costs = settings.block_size, setup.costs
        num_blocks = setup.num_slots // size
        prefers = {"recompute": lambda group: False, "swap": lambda group: True, "auto": costs.prefers_swap}
        num_swap_blocks = 0 if settings.preemption == "recompute" else num_blocks
        manager = BlockManager(num_blocks, size, settings.caches_prefixes and system.shares, num_swap_blocks)
        self.policy = system.policy(manager, self.lengths, setup.context)
        # A static batch is computed as a whole, prompts too.
        chunk = max(settings.chunk, setup.num_slots) if system.is_static else settings.chunk
        scheduler = Scheduler(manager, chunk, settings.max_num_seqs, prefers[settings.preemption], self.policy)
        super().__init__(requests, manager, scheduler, 1, settings.seed, settings.sample_every, settings.check_every)
        self.system, self.settings, self.costs = system, settings, costs
        self.outcomes: list[Outcome] = []
        self.gaps = array("d")  # seconds from a request's token to its next
        self.num_submitted = 0
        self.prefix = list(random.Random("prefix").randbytes(settings.prefix))
        self.beams = random.Random(f"beams {settings.seed}")
        self.prompts: dict[int, int] = {}  # sequence -> tokens of its prompt
        self.done: dict[int, Sequence] = {}  # of a static batch
        self.padded = 0  # tokens of each row of it

    def lengths(self, seq_id: int) -> tuple[int, int]:
        """Prompt and output of a live sequence."""
        prompt = self.prompts[seq_id]
        return prompt, self.ends[seq_id] - prompt

    # Requests

    def submit(self, request: Request) -> None:
        is_marked = self.num_submitted % self.settings.marked_every == 0
        self.num_submitted += 1
        self.branch(request, self.token_ids(request), self.settings.width if is_marked else 1, is_marked)

    def branch(self, request: Request, ids: list[int], width: int, is_marked: bool, first: float = 0.0) -> None:
        """Queues a request, or what is left of it: so many branches as may run together."""
        count = min(width, self.system.most_branches or width)
        priority = int(self.settings.favours_marked and not is_marked)
        group = self.scheduler.new_group(priority)
        job = PaperJob(request, 0, is_marked=is_marked, rest=width - count, first=first)
        job.prompt = ids.copy() if job.rest else []
        if self.system.shares:
            self.add(self.scheduler.new_sequence(group), request, ids)
            job.to_fork = count - 1
        else:
            for index in range(count):
                sequence = self.scheduler.new_sequence(group)
                self.add(sequence, request, ids.copy())
                sequence.extra_key = (index,)  # whatever is equal in them, nothing is shared
        self.jobs[group.arrival] = job
        self.scheduler.queues.wake(group)

    def add(self, sequence: Sequence, request: Request, token_ids: list[int]) -> None:
        super().add(sequence, request, token_ids)
        self.prompts[sequence.seq_id] = request.num_prompt

    def token_ids(self, request: Request) -> list[int]:
        return self.prefix + list(self.rng.randbytes(request.num_prompt - len(self.prefix)))

    # Costs

    def seconds(self, batch: Batch) -> float:
        work = Work.of(batch, self.block_size)
        if self.system.is_static:
            work = self._padded(work)
        elif self.settings.width > 1 and not self.system.shares:
            work = self._copied(work, batch)
        moved = len(batch.swap_outs) + len(batch.swap_ins)
        return self.costs.seconds(work) + self.settings.transfers * moved * self.costs.transfer

    def _padded(self, work: Work) -> Work:
        """All rows of the batch, those that are done among them, as long as the longest."""
        assert isinstance(self.policy, Static)
        rows = len(self.policy.batch)
        if work.prompt:
            longest = max(s.num_tokens for group in self.policy.batch for s in group.sequences)
            self.padded = longest
            return Work(prompt=rows * longest, kv=rows * longest, pairs=rows * longest * (longest + 1) // 2)
        self.padded += 1
        return Work(decodes=rows, kv=rows * self.padded)

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
        group = sequence.group
        job = self.jobs.get(group.arrival)
        if job is None:  # ended with its siblings
            return
        is_prompt = sequence.num_tokens == job.request.num_prompt
        if self.settings.is_beams:
            if any(s.num_uncomputed_tokens for s in group.sequences):
                return  # beams go on together
            if is_prompt:
                job.first_token_at = self.now
                for _ in range(job.to_fork):
                    self._fork(sequence)
            elif self.system.shares:
                self._reorder(group.sequences)
            for one in list(group.sequences):
                self.grow(one)
        elif self.system.shares:
            super().advance(sequence)
            for one in group.sequences:
                self.prompts.setdefault(one.seq_id, job.request.num_prompt)
        else:
            job.first_token_at = job.first_token_at or self.now
            self.grow(sequence)

    def grow(self, sequence: Sequence) -> None:
        job = self.jobs[sequence.group.arrival]
        assert isinstance(job, PaperJob)
        if job.last_token_at and self.now > job.last_token_at:
            self.gaps.append(self.now - job.last_token_at)
        job.last_token_at = self.now
        super().grow(sequence)

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
        if not self.system.is_static:
            del self.prompts[sequence.seq_id]
            super().end(sequence)
            return
        self.done[sequence.seq_id] = sequence
        assert isinstance(self.policy, Static)
        if len(self.done) == sum(len(group.sequences) for group in self.policy.batch):
            done, self.done = self.done, {}
            for one in done.values():
                del self.prompts[one.seq_id]
                super().end(one)

    def finished(self, job: Job) -> None:
        assert isinstance(job, PaperJob)
        request = job.request
        first = job.first or (self.now if self.system.is_static else job.first_token_at)
        if job.rest:
            self.branch(request, job.prompt, job.rest, job.is_marked, first)
            return
        self.outcomes.append(
            Outcome(request.arrival, first, self.now, request.num_output, request.num_prompt, job.is_marked)
        )

    # What is seen

    def look(self, batch: Batch) -> None:
        manager, running = self.manager, self.running()
        slots = self.capacity
        stored = manager.num_stored_tokens
        columns: dict[str, float] = {"stored": stored}
        if isinstance(self.policy, Reserved):
            ends = {s.seq_id: self.ends[s.seq_id] for s in running}
            reserved = {s: len(run) * self.block_size for s, run in self.policy.runs.items() if s in ends}
            columns["future"] = sum(end for s, end in ends.items() if s in reserved) - stored
            columns["internal"] = sum(reserved.values()) - columns["future"] - stored
            columns["external"] = slots - sum(reserved.values())
        else:
            columns["future"] = 0
            columns["internal"] = manager.num_allocated_slots - stored
            columns["external"] = slots - manager.num_allocated_slots
        held = sum(len(manager.blocks(s.seq_id)) for s in running)
        self.samples.add(
            time=self.now,
            seconds=self.unseen,
            batch=len({id(s.group) for s in running}),
            sequences=len(running),
            saved=1 - manager.pool.num_in_use / held if held else 0.0,
            held=held,
            in_use=manager.pool.num_in_use,
            waiting=self.scheduler.queues.num_waiting,
            **columns,
        )


@dataclass
class Summary:
    """How a run went."""

    figures: dict[str, Any]
    outcomes: list[Outcome] = field(repr=False)


def run(requests: list[Request], system: System, setup: Setup, settings: Settings = Settings()) -> Summary:
    """Serves the requests and sums up.

    Args:
        requests: In order of arrival.
        system: Who serves them.
        setup: On what.
        settings: How.
    """
    simulation = PaperSimulation(requests, system, setup, settings)
    simulation.serve()
    outcomes, samples = simulation.outcomes, simulation.samples
    columns = samples.columns
    # Memory is looked at while something waits for it, as in the paper's figure 2.
    full = [i for i, waiting in enumerate(columns["waiting"]) if waiting > 0]
    weight = sum(columns["seconds"][i] for i in full) or 1.0
    slots = simulation.capacity
    parts = {
        name: round(sum(columns["seconds"][i] * columns[name][i] for i in full) / weight / slots, 4)
        for name in ("stored", "future", "internal", "external")
    }
    held = sum(w * v for w, v in zip(columns["seconds"], columns["held"]))
    in_use = sum(w * v for w, v in zip(columns["seconds"], columns["in_use"]))
    preemption = simulation.scheduler.preemption
    return Summary(
        {
            "served": len(outcomes),
            "refused": simulation.num_refused,
            "failed": simulation.num_failed,
            "seconds": rounded(simulation.now),
            "requests_per_second": rounded(len(outcomes) / simulation.now),
            "steps": simulation.num_steps,
            "batch": rounded(samples.mean("batch")),
            "sequences": rounded(samples.mean("sequences")),
            "saved": rounded(1 - in_use / held),
            "memory": parts if full else None,
            "preempted": preemption.num_preemptions,
            "swapped": preemption.num_swapped_out,
            # A static batch hands out its tokens when all of it is done.
            "inter_token": None if system.is_static else spread(simulation.gaps),
            **latencies(outcomes),
            **(
                {name: latencies([o for o in outcomes if o.is_marked == value]) for name, value in CLASSES.items()}
                if settings.marked_every > 1
                else {}
            ),
        },
        outcomes,
    )


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
    return {"mean": rounded(statistics.fmean(ordered))} | {f"p{p}": rounded(quantile(ordered, p)) for p in (50, 99)}


def quantile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def rounded(value: float) -> float:
    """Five digits: what is saved, and compared."""
    return float(f"{value:.5g}")
