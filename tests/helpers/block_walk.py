"""Sequences that come, fork, grow and go at random, beside a memory that is written and read as a runner would."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from helpers.event_ledger import Ledger
from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence


class BlockWalk(ABC):
    """A scheduler, its sequences, and the memory behind it.

    Attributes:
        memory: What each block of the pool holds; `None`: nothing.
        cpu: The same of the swap space.
        live: The sequences that are there.
        events: What has happened, and how often.
    """

    def __init__(self, rng: random.Random, manager: BlockManager, num_blocks: int, most_seqs: int) -> None:
        self.rng, self.blocks = rng, manager
        self.scheduler = Scheduler(manager, 7, most_seqs, prefers_swap=lambda group: rng.random() < 0.7)
        self.memory: list[Any] = [None] * num_blocks
        self.cpu: list[Any] = [None] * num_blocks
        self.live: list[Sequence] = []
        self.ledger = Ledger()
        self.events: Counter[str] = Counter()

    @abstractmethod
    def submit(self) -> None:
        """A sequence comes."""

    @abstractmethod
    def crop(self) -> None:
        """A sequence goes back to fewer tokens."""

    @abstractmethod
    def run(self, batch: Batch) -> None:
        """Reads and writes the memory for a batch that has rows, which may fail."""

    def fork(self) -> None:
        parent = self.rng.choice(self.live)
        if len(parent.group.sequences) < 3:
            self.live.append(self.scheduler.fork(parent))
            self.events["fork"] += 1

    def free(self) -> None:
        self.scheduler.free(self.live.pop(self.rng.randrange(len(self.live))))

    def grow(self) -> None:
        """Tokens to come, of all that wait for nothing."""
        for sequence in self.live:
            if not sequence.num_uncomputed_tokens and sequence.num_tokens < 15 and self.rng.random() < 0.8:
                self.extend(sequence, [self.rng.randrange(9) for _ in range(self.rng.choice([1, 1, 1, 3]))])

    def extend(self, sequence: Sequence, tokens: list[int]) -> None:
        assert sequence.token_ids is not None
        sequence.token_ids += tokens
        sequence.num_tokens += len(tokens)
        sequence.logits_from = sequence.num_tokens - 1
        sequence.is_wanted = True
        self.scheduler.queues.wake(sequence.group)

    def step(self) -> None:
        """A step; a request for which there is no room leaves."""
        try:
            batch = self.scheduler.schedule(forced=self.rng.random() < 0.5)
        except OutOfBlocksError as error:
            self._copy_out(error.swap_outs)
            assert error.group is not None
            for sequence in [s for s in self.live if s.group is error.group]:
                self.live.remove(sequence)
                self.scheduler.free(sequence)
            return
        self._copy_out(batch.swap_outs)
        for source, destination in batch.swap_ins:
            self.memory[destination] = self.cpu[source]
        copied = [self.memory[source] for source, _ in batch.block_copies]
        for (_, destination), content in zip(batch.block_copies, copied, strict=True):
            self.memory[destination] = content
        for block in batch.new_blocks:
            self.memory[block] = None
        if batch.num_seqs:
            self.run(batch)

    def commit(self, batch: Batch) -> None:
        self.scheduler.settle(offers := self.scheduler.update(batch, is_checked=False), [True] * len(offers))

    def undo(self, batch: Batch) -> None:
        self.events["failed step"] += 1
        self.scheduler.undo(batch)

    def check(self) -> None:
        self.blocks.check_invariants()
        self.ledger.follow(self.blocks)
        self.events["preempted"] = self.scheduler.preemption.num_preemptions
        self.events["swapped"] = self.scheduler.preemption.num_swapped_out

    def walk(self) -> Counter[str]:
        """Sixty steps and what comes between them; then all leave, and everything is free."""
        for _ in range(60):
            actions = [self.submit] * (len(self.live) < 6)
            actions += [self.fork, self.free, self.crop] if self.live and self.rng.random() < 0.4 else []
            if actions:
                self.rng.choice(actions)()
            self.grow()
            self.step()
            self.check()
        while self.live:
            self.free()
        self.check()
        assert self.blocks.pool.num_in_use == self.blocks.swap.num_in_use == 0
        return self.events

    def _copy_out(self, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.cpu[destination] = self.memory[source]
