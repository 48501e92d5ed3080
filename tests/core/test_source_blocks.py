"""Blocks that hold what an encoder has read: beside a memory that is written and read as a runner would."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from helpers.block_walk import BlockWalk
from hf_paged.core.batch import Batch
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.sequence import Sequence, Source
from hf_paged.core.source_blocks import SourceBlockManager

BLOCK = 3
LENGTHS = (1, 3, 4, 8, 11)


class World(BlockWalk):
    """Sequences with sources; a block of memory holds whose it is, and which of its blocks."""

    def __init__(self, seed: int, num_cross: int, swaps: bool, caching: bool) -> None:
        rng = random.Random(seed)
        num_blocks = num_cross * 4 + 8 + rng.randrange(12)
        swap_blocks = num_blocks if swaps else 0
        manager = SourceBlockManager(num_blocks, BLOCK, caching, swap_blocks, num_cross=num_cross)
        super().__init__(rng, manager, num_blocks, most_seqs=5)

    def submit(self) -> None:
        number = self.rng.randrange(len(LENGTHS))
        sequence = self.scheduler.new_sequence()
        sequence.source = Source(None, LENGTHS[number], bytes([number]))
        sequence.extra_key = (sequence.source.digest,)
        self.extend(sequence, [number] * self.rng.randint(1, 9))
        self.live.append(sequence)

    def crop(self) -> None:
        sequence = self.rng.choice(self.live)
        if self.rng.random() < 0.3:
            self.scheduler.crop(sequence, 0)  # it begins again, with the same source
            self.extend(sequence, [sequence.source.digest[0]] * 2)  # type: ignore[union-attr]
        else:
            self.scheduler.crop(sequence, self.rng.randint(1, sequence.num_tokens))
            sequence.logits_from = sequence.num_tokens - 1

    def run(self, batch: Batch) -> None:
        """A step, which may fail before it has written anything."""
        if self.rng.random() < 0.15:
            self.undo(batch)
            return
        sources, chunks = batch.sources, self.scheduler.chunks(batch)
        assert sources is not None and list(sources.lens) == [s.source.num_tokens for s, _, _ in chunks if s.source]
        rows = self._rows(batch)
        num_fresh = sum(sources.lens[row] for row in sources.fresh)
        assert batch.num_tokens + num_fresh <= 7 or len({chunks[row][0].group.arrival for row in sources.fresh}) <= 1
        for row in sources.fresh:
            self.events["written"] += 1
            for index, block in enumerate(rows[row]):
                assert self.memory[block] is None, "a source is written over something"
                self.memory[block] = sources_key(chunks[row][0]), index
        for (sequence, _, _), blocks in zip(chunks, rows, strict=True):
            expected = [(sources_key(sequence), index) for index in range(len(blocks))]
            assert [self.memory[block] for block in blocks] == expected, f"{sequence.seq_id} reads another source"
        self.events["rows"] += len(rows)
        self.commit(batch)

    def _rows(self, batch: Batch) -> list[list[int]]:
        """Of each row the blocks of its source, group after group."""
        assert batch.sources is not None
        rows: list[list[int]] = [[] for _ in range(batch.num_seqs)]
        for table in batch.sources.tables:
            first = 0
            for row, count in enumerate(table.counts):
                assert count == -(-batch.sources.lens[row] // BLOCK)
                rows[row] += table.blocks[first : first + count].tolist()
                first += count
        return rows


def sources_key(sequence: Sequence) -> bytes:
    assert sequence.source is not None
    return sequence.source.digest


@pytest.mark.parametrize("num_cross", [1, 3])
def test_random_walks(num_cross: int) -> None:
    """Would break: a source read before it is written, lost by a swap, left findable by a step that failed."""
    events: Counter[str] = Counter()
    for seed in range(50):
        world = World(seed, num_cross, swaps=seed % 3 > 0, caching=seed % 4 > 0)
        events += world.walk()
    assert all(events[name] > 5 for name in ("fork", "failed step", "preempted", "swapped", "written")), events
    assert events["written"] < events["rows"] / 4, "sources are hardly ever shared"


def manager(num_blocks: int = 12, num_cross: int = 1, caching: bool = True) -> SourceBlockManager:
    """A manager of blocks of two tokens."""
    return SourceBlockManager(num_blocks, 2, caching, num_cross=num_cross)


def begin(blocks: SourceBlockManager, seq_id: int, num_tokens: int, key: bytes) -> None:
    blocks.add(seq_id)
    blocks.set_source(seq_id, num_tokens, key)


def test_one_source_for_all_that_read_it() -> None:
    """Would break: a copy for each beam, or for each caller of the same input."""
    blocks = manager()
    for seq_id in (1, 2):
        begin(blocks, seq_id, 5, b"a")
    assert blocks.fresh_tokens([1, 2]) == 5 and blocks.append_need([(1, 1), (2, 1)]) == 5
    blocks.append([(1, 1), (2, 1)])
    tables = blocks.sources([1, 2])
    assert tables is not None and list(tables.fresh) == [0] and list(tables.lens) == [5, 5]
    assert tables.tables[0].blocks[:3] == tables.tables[0].blocks[3:]
    assert blocks.new_source_blocks() == tables.tables[0].blocks[:3].tolist() and blocks.take_fresh() == 5
    assert blocks.num_stored_tokens == 5 + 2
    blocks.fork(1, 3)
    begin(blocks, 4, 5, b"a")
    assert blocks.fresh_tokens([4]) == 0 and blocks.blocks_needed(4, 1) == 1
    blocks.append([(4, 1)])
    assert list(blocks.sources([3, 4]).fresh) == []  # type: ignore[union-attr]
    for seq_id in (1, 2, 3, 4):
        blocks.free(seq_id)
    begin(blocks, 5, 5, b"a")  # still there, though no sequence holds it
    assert blocks.fresh_tokens([5]) == 0 and blocks.append_need([(5, 1)]) == 1 + 3
    blocks.check_invariants()


def test_what_is_found_is_taken_before_others_need_its_blocks() -> None:
    """Would break: a source that waits to be found, handed out as free blocks to the sequence before it in a step."""
    blocks = manager(num_blocks=9)
    begin(blocks, 1, 6, b"a")
    blocks.append([(1, 1)])
    kept = blocks.sources([1]).tables[0].blocks.tolist()  # type: ignore[union-attr]
    blocks.free(1)
    begin(blocks, 5, 6, b"c")  # kept longer than the first: what has no room takes that one's blocks
    blocks.append([(5, 1)])
    blocks.sources([5])
    blocks.free(5)
    begin(blocks, 2, 8, b"b")
    begin(blocks, 3, 6, b"a")
    assert blocks.append_need([(2, 1), (3, 1)]) == 9
    blocks.append([(2, 1), (3, 1)])
    tables = blocks.sources([2, 3])
    assert tables is not None and tables.tables[0].blocks[4:].tolist() == kept and list(tables.fresh) == [0]
    begin(blocks, 4, 1, b"c")
    with pytest.raises(OutOfBlocksError):
        blocks.append([(4, 1)])
    blocks.check_invariants()


def test_a_source_that_was_not_written_is_not_found() -> None:
    """Would break: garbage for the next sequence with the same input after a failure."""
    blocks = manager()
    begin(blocks, 1, 5, b"a")
    blocks.append([(1, 1)])
    blocks.evict(1)  # before any step had it
    begin(blocks, 2, 5, b"a")
    assert blocks.fresh_tokens([2]) == 5
    blocks.append([(2, 1)])
    blocks.sources([2])
    blocks.forget_sources([2])
    blocks.restart(2)
    assert blocks.fresh_tokens([2]) == 5 and blocks.source_blocks(5) == 3
    blocks.check_invariants()


def test_a_source_that_comes_back_is_shared_again() -> None:
    """Would break: a copy of a source for each sequence that was swapped, though others hold it all the time."""
    blocks = SourceBlockManager(12, 2, num_swap_blocks=12, num_cross=1)
    for seq_id in (1, 2):
        begin(blocks, seq_id, 5, b"a")
    blocks.append([(1, 1), (2, 1)])
    held = blocks.sources([1, 2]).tables[0].blocks[:3].tolist()  # type: ignore[union-attr]
    assert len(blocks.swap.move_out([1])) == 3 + 1
    assert len(blocks.swap.move_in([1])) == 1, "only its own token comes back"
    assert blocks.get(1).state.tolist() == held
    blocks.check_invariants()
