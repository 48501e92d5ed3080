"""The systems that the paper compares, as policies of this engine's scheduler: only memory and batches differ.

All run on the same scheduler, tables and costs. *Orca* reserves a contiguous run for each sequence when it is let in,
for the model's context (Max), the prompt and the next power of two of the output (Pow2), or just what it will need
(Oracle, which no real system knows). *FasterTransformer* does so too, for the context, and lets requests in a batch at
a time: nothing joins until all of it is done. So does a loop around *transformers*' `generate()`, whose batch is as
large as it fits when padded to its longest prompt and output. *Limited* reserves the prompt and the `max_new_tokens`
that all clients give, as the first continuous batching over contiguous caches did (TGI in 2023).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.policy import FCFS
from hf_paged.core.sequence import SequenceGroup

Lengths = Callable[[int], tuple[int, int]]  # of a sequence: its prompt's, and its output's
Make = Callable[[BlockManager, Lengths, int], FCFS]  # the last is the model's context
LIMIT = 1024  # `max_new_tokens` of every client; the longest answer of ShareGPT's lengths has 792 tokens


class Allocator(Protocol):
    """Runs of blocks out of one pool."""

    def allocate(self, size: int) -> range | None:
        """A run of at least `size` blocks; `None`: there is no such hole."""

    def free(self, run: range) -> None:
        """Gives a run back, as it was handed out."""

    def holes(self) -> list[range]:
        """What is free, in order; for tests and figures."""


class Buddy:
    """Runs of powers of two, aligned to their size; a run that is free merges with its free buddy.

    A pool that is no power of two begins as the pieces of its binary number, the largest first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: list[list[int]] = [[] for _ in range(num_blocks.bit_length())]  # starts, by order, sorted
        start = 0
        for order in reversed(range(len(self._free))):
            if num_blocks >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def allocate(self, size: int) -> range | None:
        order = (size - 1).bit_length()
        found = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if found is None:
            return None
        start = self._free[found].pop(0)
        for o in range(found - 1, order - 1, -1):  # the upper half of each split stays free
            insort(self._free[o], start + (1 << o))
        return range(start, start + (1 << order))

    def free(self, run: range) -> None:
        start, order = run.start, len(run).bit_length() - 1
        while order + 1 < len(self._free):
            buddy = start ^ 1 << order
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            start &= ~(1 << order)
            order += 1
        insort(self._free[order], start)

    def holes(self) -> list[range]:
        return sorted(
            (range(start, start + (1 << order)) for order, starts in enumerate(self._free) for start in starts),
            key=lambda run: run.start,
        )


class FirstFit:
    """Runs of just the size that is asked for, from the lowest hole that has it."""

    def __init__(self, num_blocks: int) -> None:
        self._holes = [(0, num_blocks)]  # start and end, in order, never two that touch

    def allocate(self, size: int) -> range | None:
        for index, (start, end) in enumerate(self._holes):
            if end - start >= size:
                if end - start == size:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + size, end)
                return range(start, start + size)
        return None

    def free(self, run: range) -> None:
        insort(self._holes, (run.start, run.stop))
        merged: list[tuple[int, int]] = []
        for start, end in self._holes:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._holes = merged

    def holes(self) -> list[range]:
        return [range(start, end) for start, end in self._holes]


class Reserved(FCFS):
    """A sequence gets a run of neighbouring blocks when it is let in, and without one for each, its group waits.

    Args:
        manager: The tables.
        allocator: Of runs.
        tokens: How many to reserve for a sequence.
    """

    def __init__(self, manager: BlockManager, allocator: Allocator, tokens: Callable[[int], int]) -> None:
        self._manager, self._allocator, self._tokens = manager, allocator, tokens
        self.runs: dict[int, range] = {}

    def spare(self, group: SequenceGroup, num_blocks: int, is_alone: bool, is_forced: bool) -> int | None:
        self._collect()
        got: list[int] = []
        for sequence in group.sequences:
            if sequence.seq_id in self.runs:
                continue
            run = self._allocator.allocate(-(-self._tokens(sequence.seq_id) // self._manager.block_size))
            if run is None:
                for seq_id in got:
                    self._allocator.free(self.runs.pop(seq_id))
                return None
            self.runs[sequence.seq_id] = run
            got.append(sequence.seq_id)
        return 0

    def blocks(self, requests: Sequence[tuple[int, int]]) -> list[int] | None:
        chosen: list[int] = []
        for seq_id, num_tokens in requests:
            held = len(self._manager.blocks(seq_id))
            chosen += self.runs[seq_id][held : held + self._manager.blocks_needed(seq_id, num_tokens)]
        return chosen

    def _collect(self) -> None:
        """Gives back the runs of sequences that are gone."""
        for seq_id in [seq_id for seq_id in self.runs if seq_id not in self._manager]:
            self._allocator.free(self.runs.pop(seq_id))


class Static(Reserved):
    """Batches at request level: as many as find a run, and then none until all of these are gone.

    Attributes:
        batch: The groups of the batch.
    """

    def __init__(self, manager: BlockManager, allocator: Allocator, tokens: Callable[[int], int]) -> None:
        super().__init__(manager, allocator, tokens)
        self.batch: list[SequenceGroup] = []

    def spare(self, group: SequenceGroup, num_blocks: int, is_alone: bool, is_forced: bool) -> int | None:
        if is_alone:
            self.batch = []
        if any(sequence.num_computed_tokens for member in self.batch for sequence in member.sequences):
            return None
        spare = super().spare(group, num_blocks, is_alone, is_forced)
        if spare is not None:
            self.batch.append(group)
        return spare


class Padded(Static):
    """Batches at request level, as many as fit when all rows are as long as the longest prompt and output together."""

    def __init__(self, manager: BlockManager, allocator: Allocator, lengths: Lengths) -> None:
        super().__init__(manager, allocator, lambda seq_id: sum(lengths(seq_id)))
        self._lengths = lengths

    def spare(self, group: SequenceGroup, num_blocks: int, is_alone: bool, is_forced: bool) -> int | None:
        members = [group] if is_alone else [*self.batch, group]
        rows = [self._lengths(sequence.seq_id) for member in members for sequence in member.sequences]
        longest = max(prompt for prompt, _ in rows) + max(output for _, output in rows)
        if len(rows) > 1 and len(rows) * -(-longest // self._manager.block_size) > num_blocks:
            return None
        return super().spare(group, num_blocks, is_alone, is_forced)


class ShortestFirst(FCFS):
    """The request of the fewest tokens, prompt and output, comes first, were its length known; long ones may starve."""

    def order(self, group: SequenceGroup) -> tuple[int, ...]:
        return group.priority, group.max_tokens, group.arrival


@dataclass(frozen=True)
class System:
    """One of those compared.

    Attributes:
        name: In tables and legends.
        color: In figures.
        policy: Of tables, lengths and the model's context.
        shares: Whether sequences share blocks: forks, copy-on-write, prefixes.
        is_static: Whether batches stay as they are, padded.
        copies_cache: Whether a step copies the cache to one that is a token longer.
        most_branches: Of a request that run together, the others after them; 0: all.
    """

    name: str
    color: str
    policy: Make
    shares: bool = False
    is_static: bool = False
    copies_cache: bool = False
    most_branches: int = 0


def _reserved(
    kind: type[Reserved], tokens: Callable[[int, int, int], int], allocator: Callable[[int], Allocator]
) -> Make:
    def make(manager: BlockManager, lengths: Lengths, context: int) -> FCFS:
        return kind(manager, allocator(manager.pool.num_blocks), lambda seq_id: tokens(*lengths(seq_id), context))

    return make


def whole_context(_prompt: int, _output: int, context: int) -> int:
    return context


def power_of_two(prompt: int, output: int, context: int) -> int:
    return min(prompt + (1 << (output - 1).bit_length()), context)


def exact(prompt: int, output: int, _context: int) -> int:
    return prompt + output


def limited(prompt: int, output: int, context: int) -> int:
    return max(prompt + output, min(prompt + LIMIT, context))


PAGED = System("hf_paged", "#0b6e4f", lambda manager, lengths, context: FCFS(), shares=True)
ORACLE = System("Orca (Oracle)", "#4c78a8", _reserved(Reserved, exact, Buddy))
POW2 = System("Orca (Pow2)", "#e0913a", _reserved(Reserved, power_of_two, Buddy))
MAX = System("Orca (Max)", "#c44e52", _reserved(Reserved, whole_context, Buddy))
STATIC = System("FasterTransformer", "#7b5ea7", _reserved(Static, whole_context, Buddy), is_static=True)
HF = System(
    "transformers",
    "#b07aa1",
    lambda manager, lengths, context: Padded(manager, FirstFit(manager.pool.num_blocks), lengths),
    is_static=True,
    copies_cache=True,
)
LIMITED = System("max_new_tokens reserved", "#9c755f", _reserved(Reserved, limited, FirstFit))
FIRST_FIT = System("Oracle, first fit", "#8aa9c8", _reserved(Reserved, exact, FirstFit))
SHORTEST = System(
    "hf_paged, shortest first",
    "#5fb49c",
    lambda manager, lengths, context: ShortestFirst(),
    shares=True,
)
CAPPED = tuple(
    replace(PAGED, name=f"hf_paged, {n} branch{'es' * (n > 1)} at most", color=color, most_branches=n)
    for n, color in ((4, "#4c78a8"), (1, "#e0913a"))
)
SYSTEMS = (PAGED, ORACLE, POW2, MAX, STATIC)
