"""`Simulation`: requests through the real scheduler and block tables, on a virtual clock that a cost model moves."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm import tqdm
from workload import TRACE_BLOCK, Request

from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus


@dataclass(slots=True)
class Work:
    """What a step does, in the units that cost models charge.

    Attributes:
        decodes: Rows of one token.
        prompt: Tokens of the other rows.
        kv: Tokens whose keys and values are read, once for each row.
        pairs: Tokens that prompt tokens attend to, themselves included.
        swapped: Tokens in blocks that move to CPU memory or back.
        copied: Tokens in blocks that are copied.
    """

    decodes: int = 0
    prompt: int = 0
    kv: int = 0
    pairs: int = 0
    swapped: int = 0
    copied: int = 0

    @classmethod
    def of(cls, batch: Batch, block_size: int) -> Work:
        num_decodes, pairs = batch.num_seqs, 0
        if batch.num_tokens > batch.num_seqs:
            for start, n in zip(batch.starts, batch.query_lens):
                if n > 1:
                    num_decodes -= 1
                    pairs += n * start + n * (n + 1) // 2
        return cls(
            decodes=num_decodes,
            prompt=batch.num_tokens - num_decodes,
            kv=sum(batch.starts) + batch.num_tokens,
            pairs=pairs,
            swapped=block_size * (len(batch.swap_outs) + len(batch.swap_ins)),
            copied=block_size * len(batch.block_copies),
        )


@dataclass(slots=True)
class Job:
    """A request in the system."""

    request: Request
    to_fork: int  # samples that are still to branch off the prompt
    first_token_at: float = 0.0


@dataclass
class Samples:
    """What was seen at some of the steps: one list a column, all of one length."""

    columns: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)

    def mean(self, name: str) -> float:
        """Mean over the time in which something ran."""
        weights = self.columns["seconds"]
        return sum(w * v for w, v in zip(weights, self.columns[name])) / max(sum(weights), 1e-12)

    def thinned(self, num_points: int) -> dict[str, list[float]]:
        """Means over equal spans of time, so many points at most."""
        times, weights = self.columns["time"], self.columns["seconds"]
        bins: dict[int, list[int]] = {}
        for i, t in enumerate(times):
            bins.setdefault(int(num_points * t / (times[-1] + 1e-9)), []).append(i)
        return {
            name: [
                float(f"{sum(weights[i] * v[i] for i in rows) / sum(weights[i] for i in rows):.5g}")
                for rows in bins.values()
            ]
            for name, v in self.columns.items()
            if name != "seconds"
        }


class Simulation:
    """Serves requests; a subclass says what a step costs (`seconds`) and looks at what it wants to know.

    Args:
        requests: In order of arrival; those that could never fit the pool are refused at once, as the engine does.
        manager: The tables.
        scheduler: Over them.
        num_samples: Sequences that each prompt branches into.
        seed: Of token ids, which are bytes: a block of sixteen has 128 random bits.
        sample_every: Steps from one look to the next.
        check_every: Steps from one check of all invariants to the next; 0: none but at the end.
    """

    def __init__(
        self,
        requests: list[Request],
        manager: BlockManager,
        scheduler: Scheduler,
        num_samples: int = 1,
        seed: int = 0,
        sample_every: int = 32,
        check_every: int = 0,
    ) -> None:
        self.manager, self.scheduler = manager, scheduler
        self.block_size, self.num_samples = manager.block_size, num_samples
        self.sample_every, self.check_every = sample_every, check_every
        self.capacity = manager.pool.num_blocks * manager.block_size
        self.requests = [request for request in requests if request.num_total <= self.capacity]
        self.num_refused = len(requests) - len(self.requests)
        self.rng = random.Random(f"tokens {seed}")
        self.next_token: Iterator[int] = itertools.cycle(self.rng.randbytes((1 << 20) + 7))
        self.trace_blocks: dict[int, bytes] = {}
        self.jobs: dict[int, Job] = {}  # by the group's arrival
        self.ends: dict[int, int] = {}  # sequence -> its tokens when it is done
        self.samples = Samples()
        self.now = self.unseen = self.scheduler_seconds = self.wall_seconds = 0.0
        self.num_steps = self.num_outputs = self.num_failed = self.num_done = self.num_batched = 0

    # What a subclass says

    def seconds(self, batch: Batch) -> float:
        """How long the step takes."""
        raise NotImplementedError

    def look(self, batch: Batch) -> None:
        """Called every `sample_every` steps, with `unseen` seconds since the last time."""

    def sample_output(self, job: Job) -> int:
        """Tokens that a further sample of a request generates."""
        return job.request.num_output

    def note_chunk(self, sequence: Sequence, first: int) -> None:
        """Called for each chunk that ran."""

    def finished(self, job: Job) -> None:
        """Called when all sequences of a request are done."""

    # The loop

    def serve(self, progress: bool = False) -> None:
        """Serves all requests."""
        requests = self.requests
        started = time.perf_counter()
        next_request = 0
        with tqdm(total=len(requests), unit="requests", disable=not progress, mininterval=1.0) as bar:
            while next_request < len(requests) or self.jobs:
                while next_request < len(requests) and requests[next_request].arrival <= self.now:
                    self.submit(requests[next_request])
                    next_request += 1
                batch = self._schedule()
                if batch is None:
                    if next_request < len(requests):  # nothing to do until one comes
                        self.now = max(self.now, requests[next_request].arrival)
                    continue
                seconds = self.seconds(batch)
                self.unseen += seconds
                if self.num_steps % self.sample_every == 0:
                    self.look(batch)
                    self.unseen = 0.0
                self.now += seconds
                self._finish_step(batch)
                bar.update(self.num_done + self.num_failed - bar.n)
        self.wall_seconds = time.perf_counter() - started
        self.manager.check_invariants()

    def submit(self, request: Request) -> None:
        """A request comes in: a prompt, which branches when its first token is there."""
        self.add(self.scheduler.new_sequence(), request, self.token_ids(request))
        self.start(request, self.num_samples - 1)

    def add(self, sequence: Sequence, request: Request, token_ids: list[int]) -> None:
        """Gives a new sequence its prompt."""
        sequence.token_ids = token_ids
        sequence.num_tokens = request.num_prompt
        sequence.logits_from = request.num_prompt - 1
        sequence.is_wanted = True
        self.ends[sequence.seq_id] = request.num_total
        self._newest = sequence.group

    def start(self, request: Request, to_fork: int) -> None:
        """Queues the group of the sequences added last."""
        self.jobs[self._newest.arrival] = Job(request, to_fork)
        self.scheduler.queues.wake(self._newest)

    def token_ids(self, request: Request) -> list[int]:
        """Its prompt."""
        if request.hash_ids is None:
            return list(self.rng.randbytes(request.num_prompt))
        blocks = self.trace_blocks
        for hash_id in request.hash_ids:
            if hash_id not in blocks:
                blocks[hash_id] = random.Random(hash_id).randbytes(TRACE_BLOCK)
        return list(b"".join([blocks[hash_id] for hash_id in request.hash_ids])[: request.num_prompt])

    def running(self) -> list[Sequence]:
        """Sequences with blocks in the pool."""
        groups: list[SequenceGroup] = [g for g in self.scheduler.queues.groups if g.status is SequenceStatus.RUNNING]
        return [sequence for group in groups for sequence in group.sequences]

    def _schedule(self) -> Batch | None:
        """The next step; `None` if there is nothing to do, or if the first group in line had to be given up."""
        scheduler = self.scheduler
        start = time.perf_counter()
        try:
            batch = scheduler.schedule()
            if not batch.num_seqs and scheduler.queues.has_work:
                batch = scheduler.schedule(forced=True)
            self.scheduler_seconds += time.perf_counter() - start
            return batch if batch.num_seqs else None
        except OutOfBlocksError as error:
            group = error.group
            assert group is not None
            for sequence in list(group.sequences):
                del self.ends[sequence.seq_id]
                scheduler.free(sequence)
            del self.jobs[group.arrival]
            self.num_failed += 1
            return None

    def _finish_step(self, batch: Batch) -> None:
        """Books the step; every sequence without uncomputed tokens gets its next one, or has had its last."""
        scheduler = self.scheduler
        chunks = scheduler.chunks(batch)
        start = time.perf_counter()
        scheduler.update(batch)
        self.scheduler_seconds += time.perf_counter() - start
        self.num_steps += 1
        self.num_batched += batch.num_seqs
        if self.check_every and self.num_steps % self.check_every == 0:
            self.manager.check_invariants()
        for sequence, first, num_tokens in chunks:
            self.note_chunk(sequence, first)
            if first + num_tokens == sequence.num_tokens:
                self.advance(sequence)

    def advance(self, sequence: Sequence) -> None:
        """The logits of a sequence's last token are there."""
        job = self.jobs[sequence.group.arrival]
        if sequence.num_tokens != job.request.num_prompt:
            self.grow(sequence)
            return
        job.first_token_at = self.now
        for _ in range(job.to_fork):
            output = self.sample_output(job)
            child = self.scheduler.fork(sequence)
            self.ends[child.seq_id] = min(job.request.num_prompt + output, self.capacity)
        for one in list(sequence.group.sequences):
            self.grow(one)

    def grow(self, sequence: Sequence) -> None:
        """Gives a sequence its next token, or ends it."""
        self.num_outputs += 1
        if sequence.num_tokens + 1 >= self.ends[sequence.seq_id]:
            self.end(sequence)  # its last token is never written to the cache
            return
        assert sequence.token_ids is not None
        sequence.token_ids.append(next(self.next_token))
        sequence.logits_from = sequence.num_tokens
        sequence.num_tokens += 1
        self.scheduler.queues.wake(sequence.group)

    def end(self, sequence: Sequence) -> None:
        """A sequence is done."""
        group = sequence.group
        self.scheduler.free(sequence)
        del self.ends[sequence.seq_id]
        if not group.sequences:
            self.num_done += 1
            self.finished(self.jobs.pop(group.arrival))
