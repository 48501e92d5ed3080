"""Blocks that hold a state of all of a sequence's tokens together: beside a memory that is read as a runner would."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from helpers.block_walk import BlockWalk
from hf_paged.core.batch import Batch
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence
from hf_paged.core.state_blocks import StateBlockManager


class World(BlockWalk):
    """Sequences with states; a block of memory holds all tokens that went into it, and which of its blocks it is."""

    def __init__(
        self, seed: int, state_blocks: int, windows: tuple[int | None, ...], swaps: bool, caching: bool
    ) -> None:
        rng = random.Random(seed)
        num_blocks = 2 * (state_blocks + 6 * len(windows)) + rng.randrange(12)
        self.manager = StateBlockManager(
            num_blocks, 3, caching, num_blocks if swaps else 0, windows=windows, state_blocks=state_blocks
        )
        super().__init__(rng, self.manager, num_blocks, most_seqs=4)
        self.num_state_blocks = state_blocks
        self.cropped: list[Sequence] = []
        self.prompts = [[1, 2, 3, 4, 5, 6, 7, 8]]

    def submit(self) -> None:
        """A prompt that begins like an earlier one."""
        source = self.rng.choice(self.prompts)
        prompt = source[: self.rng.randint(0, 10)] + [self.rng.randrange(9) for _ in range(self.rng.randint(1, 4))]
        self.prompts = [*self.prompts[-5:], prompt]
        sequence = self.scheduler.new_sequence()
        self.extend(sequence, prompt)
        self.live.append(sequence)

    def crop(self) -> None:
        """Back to fewer tokens: to be computed again, since a state knows no way back."""
        sequence = self.rng.choice(self.live)
        computed, num_tokens = sequence.num_computed_tokens, self.rng.randint(1, sequence.num_tokens)
        self.scheduler.crop(sequence, num_tokens)
        self.cropped.append(sequence)  # maybe between two chunks of what came together
        sequence.logits_from = num_tokens - 1
        assert sequence.num_computed_tokens == (computed if num_tokens >= computed else 0)

    def run(self, batch: Batch) -> None:
        """A step, which may fail when some states are written already."""
        fails = self.rng.random() < 0.1
        rows = list(zip(self.scheduler.chunks(batch), self._pages(batch), strict=True))
        for (sequence, start, num_tokens), pages in rows:
            assert sequence.token_ids is not None
            if start:  # else it must not be read
                found = [self.memory[page] for page in pages]
                expected = [(tuple(sequence.token_ids[:start]), index) for index in range(self.num_state_blocks)]
                assert found == expected, f"sequence {sequence.seq_id} reads another state"
            for page in pages:
                assert self.manager.pool.ref_count(page) == 1, "a shared state is written"
            if not fails or self.rng.random() < 0.5:
                for index, page in enumerate(pages):
                    self.memory[page] = tuple(sequence.token_ids[: start + num_tokens]), index
            together = min(start + num_tokens, sequence.num_at_once) - start
            is_alone = together == 1 and sequence.num_at_once > 1 and sequence not in self.cropped
            assert not is_alone, "a token by itself that came together with others"
        if fails:
            self.undo(batch)
        else:
            self.commit(batch)

    def check(self) -> None:
        super().check()
        self.events["hits"] = self.manager.prefix.hit_tokens

    def extend(self, sequence: Sequence, tokens: list[int]) -> None:
        if len(tokens) > 1:
            sequence.num_at_once = sequence.num_tokens + len(tokens)
        super().extend(sequence, tokens)

    def _pages(self, batch: Batch) -> list[list[int]]:
        blocks, size = batch.state_blocks.tolist(), self.num_state_blocks
        assert len(blocks) == size * batch.num_seqs
        return [blocks[start : start + size] for start in range(0, len(blocks), size)]


@pytest.mark.parametrize("windows", [(None,), (), (None, 4)], ids=["attention", "states alone", "windows"])
@pytest.mark.parametrize("state_blocks", [1, 3])
def test_random_walks(windows: tuple[int | None, ...], state_blocks: int) -> None:
    """Would break: a state shared by writers, lost by a swap, found for another prompt, kept by a failed step."""
    events: Counter[str] = Counter()
    for seed in range(40):
        world = World(seed, state_blocks, windows, swaps=seed % 3 > 0, caching=seed % 4 > 0)
        events += world.walk()
        assert world.manager.num_states == 0
    assert all(events[name] > 5 for name in ("fork", "failed step", "preempted", "swapped", "hits")), events


def manager(num_blocks: int = 12, state_blocks: int = 2) -> StateBlockManager:
    """A manager of blocks of two tokens."""
    return StateBlockManager(num_blocks, 2, state_blocks=state_blocks)


def test_a_kept_state_is_left_alone_while_there_is_room() -> None:
    """Would break: prefix hits that end with the first one, and a pool that is full of what is kept."""
    blocks, prompt = manager(num_blocks=9), [1, 2, 3, 4, 5]
    blocks.add(1)
    blocks.append([(1, 4)])
    blocks.prefix.commit(1, prompt[:4])
    blocks.snapshot(1, 4)
    kept = blocks.states([1]).tolist()
    copies = blocks.append([(1, 1)])
    assert [source for source, _ in copies] == kept
    blocks.free(1)
    blocks.add(2)
    assert blocks.prefix.match(2, prompt) == 4 and blocks.states([2]).tolist() == kept
    blocks.add(3)
    blocks.append([(3, 2)])  # of nine blocks two are left: too few for a copy and a block
    assert blocks.append([(2, 1)]) == [] and blocks.states([2]).tolist() == kept
    blocks.check_invariants()


def test_no_way_back() -> None:
    """Would break: a state taken for that of fewer tokens."""
    blocks = manager()
    blocks.add(1)
    blocks.append([(1, 3)])
    assert not blocks.can_crop(1, 2) and blocks.can_crop(1, 3) and not blocks.can_share(1, 2)
    with pytest.raises(ValueError, match="cannot crop"):
        blocks.crop(1, 2)
    with pytest.raises(ValueError, match="can't change"):
        blocks.resize_states(3)
    with pytest.raises(ValueError, match="at least 1"):
        manager(state_blocks=0)


def test_a_budget_with_one_token_left() -> None:
    """Would break: a prompt of which nothing runs in a step, taken for one that is in it, for ever."""
    manager = StateBlockManager(64, 4, state_blocks=1)
    scheduler = Scheduler(manager, 4, 8)

    def extend(sequence: Sequence, count: int) -> None:
        assert sequence.token_ids is not None
        sequence.token_ids += range(3, 3 + count)
        sequence.num_tokens += count
        sequence.logits_from = sequence.num_tokens - 1
        scheduler.queues.wake(sequence.group)

    def step() -> list[int]:
        batch = scheduler.schedule()
        scheduler.update(batch)
        return list(batch.query_lens)

    def begin(count: int) -> Sequence:
        sequence = scheduler.new_sequence()
        sequence.token_ids, sequence.num_at_once = [], count
        sequence.is_wanted = True
        extend(sequence, count)
        return sequence

    decoding = [begin(4) for _ in range(3)]
    while step():
        pass
    prompt = begin(12)
    assert step() == [4]
    for sequence in decoding:
        extend(sequence, 1)
    assert step() == [1, 1, 1]
    while step():
        pass
    assert prompt.num_computed_tokens == 12
