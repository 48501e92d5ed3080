"""BlockManager: growth, copy-on-write, crop, fork and the prefix cache, one behaviour a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.event_log import as_dicts
from hf_paged.core.prefix_cache import PrefixCache


def manager_of(num_blocks: int = 16, block_size: int = 4, **kwargs: int) -> BlockManager:
    return BlockManager(num_blocks, block_size, **kwargs)


def grown(manager: BlockManager, seq_id: int, n: int) -> list[int]:
    """Adds a sequence of n tokens and returns its table."""
    manager.add(seq_id)
    if n:
        assert manager.append([(seq_id, n)]) == []
    return manager.block_table(seq_id)


def written(manager: BlockManager, seq_id: int, token_ids: list[int], extra_key: tuple[object, ...] = ()) -> list[int]:
    """As `grown`, with its full blocks committed."""
    table = grown(manager, seq_id, len(token_ids))
    manager.prefix.commit(seq_id, token_ids, extra_key)
    return table


def matched(manager: BlockManager, seq_id: int, token_ids: list[int], **kwargs: object) -> int:
    manager.add(seq_id)
    return manager.prefix.match(seq_id, token_ids, **kwargs)  # type: ignore[arg-type]


def test_bad_arguments() -> None:
    manager = manager_of()
    grown(manager, 3, 2)
    for call in (manager.num_tokens, manager.block_table):
        with pytest.raises(ValueError, match="unknown sequence 8"):
            call(8)
    with pytest.raises(ValueError, match="append -1 tokens"):
        manager.blocks_needed(3, -1)
    with pytest.raises(ValueError, match="sequence 3 has 2 tokens"):
        manager.prefix.match(3, [1, 2, 3])
    with pytest.raises(ValueError, match="got 0"):
        BlockManager(4, 0)
    with pytest.raises(ValueError, match="got 0"):
        BlockManager(0, 4)
    manager.check_invariants()


# Worked examples


def test_the_8th_token_fills_the_second_block_of_4_and_the_9th_takes_a_third() -> None:
    manager = manager_of()
    first_two = grown(manager, 0, 7)
    assert len(first_two) == 2
    manager.append([(0, 1)])
    assert manager.block_table(0) == first_two
    manager.append([(0, 1)])
    assert manager.block_table(0)[:2] == first_two and len(manager.block_table(0)) == 3
    manager.check_invariants()


def test_the_first_of_two_samples_to_write_copies_the_shared_block_and_the_other_writes_in_place() -> None:
    manager = manager_of()
    full, shared = grown(manager, 0, 7)
    manager.fork(0, 1)
    [(source, copy)] = manager.append([(1, 1)])
    assert source == shared and manager.block_table(1) == [full, copy]
    assert manager.append([(0, 1)]) == []
    assert manager.block_table(0) == [full, shared]
    assert [manager.pool.ref_count(block) for block in (full, shared, copy)] == [2, 1, 1]
    manager.check_invariants()


def test_beams_that_drop_out_give_back_their_last_blocks_and_children_share_their_parents() -> None:
    manager = manager_of()
    a, b, c, d = range(4)
    common = grown(manager, a, 8)
    for beam in (b, c, d):
        manager.fork(a, beam)
    manager.append([(beam, 2) for beam in (a, b, c, d)])
    tables = {beam: manager.block_table(beam) for beam in (a, b, c, d)}
    assert all(table[:2] == common for table in tables.values())
    assert len({table[2] for table in tables.values()}) == 4 and manager.pool.num_in_use == 6

    for parent, child in ((a, 4), (a, 5), (b, 6), (b, 7)):  # the four best candidates are children of A and of B
        manager.fork(parent, child)
    for beam in (a, b, c, d):
        manager.free(beam)
    assert manager.pool.num_in_use == 4
    assert [manager.pool.ref_count(tables[beam][2]) for beam in (a, b, c, d)] == [2, 2, 0, 0]
    assert [manager.block_table(child) for child in (4, 5, 6, 7)] == [tables[a]] * 2 + [tables[b]] * 2
    assert [manager.pool.ref_count(block) for block in common] == [4, 4]
    manager.check_invariants()


def test_25_common_tokens_share_the_16_of_the_full_block() -> None:
    manager = manager_of(block_size=16)
    common = list(range(25))
    table = written(manager, 0, [*common, 100, 101, 102, 103, 104, 105, 106, 107])
    assert matched(manager, 1, [*common, 200, 201, 202, 203, 204, 205, 206, 207]) == 16
    assert manager.block_table(1) == table[:1]
    manager.check_invariants()


# Prefix cache


def test_extra_keys_keep_prefixes_apart_and_are_fixed_while_there_are_tokens() -> None:
    manager = manager_of()
    tokens = list(range(9))
    written(manager, 0, tokens, ("adapter", 1))
    assert matched(manager, 1, tokens) == 0
    assert matched(manager, 2, tokens, extra_key=("adapter", "1")) == 0
    assert matched(manager, 3, tokens, extra_key=("adapter", 1)) == 8
    with pytest.raises(ValueError, match=r"\('adapter', 1\), not \(\)"):
        manager.prefix.commit(0, tokens)
    manager.fork(0, 4)
    with pytest.raises(ValueError, match="sequence 4 has the extra key"):
        manager.prefix.commit(4, tokens, ("other",))
    with pytest.raises(ValueError, match="only an empty one"):
        manager.prefix.match(3, tokens, ("other",))
    # One that has none begins again under another key, with that key's blocks.
    assert manager.prefix.match(1, tokens, ("adapter", 1)) == 8
    manager.evict(1)
    assert manager.prefix.match(1, tokens, ("other",)) == 0
    assert manager.prefix.match(1, tokens, ("adapter", 1)) == 8
    manager.check_invariants()


def test_commit_is_incremental(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(num_blocks=64)
    hashed: list[int] = []
    original = PrefixCache._next_hash

    def counting(self, chain, token_ids, extra_key):  # type: ignore[no-untyped-def]
        hashed.append(len(chain))
        return original(self, chain, token_ids, extra_key)

    monkeypatch.setattr(PrefixCache, "_next_hash", counting)
    tokens = list(range(100))
    grown(manager, 0, 100)
    registered = [manager.prefix.commit(0, tokens[:n]) for n in range(101)]
    assert sum(registered) == 25 and set(registered) == {0, 1}
    assert hashed == list(range(25))


def test_what_is_offered_is_found_when_it_is_published() -> None:
    manager = manager_of()
    grown(manager, 0, 9)
    tokens = list(range(9))
    offers = manager.prefix.offer(0, tokens)
    assert [offer.block_id for offer in offers] == manager.block_table(0)[:2]
    assert manager.prefix.offer(0, tokens) == [] and matched(manager, 1, tokens) == 0
    assert manager.prefix.publish(offers) == 2
    assert matched(manager, 2, tokens) == 8
    manager.check_invariants()


def cut_and_grow(manager: BlockManager) -> None:
    manager.crop(0, 6)
    manager.append([(0, 3)])
    manager.prefix.offer(0, list(range(9)))  # the same tokens, computed again: that offer is another


def hand_over(manager: BlockManager) -> None:
    manager.free(0)
    grown(manager, 3, 16 * 4)


def evict(manager: BlockManager) -> None:
    manager.evict(0)
    manager.append([(0, 9)])
    manager.evict(0)


def swap(manager: BlockManager) -> None:
    manager.swap.move_out([0])


@pytest.mark.parametrize(("happens", "expected"), [(cut_and_grow, 4), (hand_over, 0), (evict, 0), (swap, 0)])
def test_what_has_changed_since_it_was_offered_is_not_published(
    happens: Callable[[BlockManager], None], expected: int
) -> None:
    manager = manager_of(num_swap_blocks=16)
    grown(manager, 0, 9)
    offers = manager.prefix.offer(0, list(range(9)))
    happens(manager)
    manager.prefix.publish(offers)
    assert matched(manager, 4, list(range(9))) == expected
    manager.check_invariants()


def test_what_is_withdrawn_is_never_found() -> None:
    """Neither by way of forks, of a swap, or of tokens that follow; by who computes it anew, it is."""
    manager = manager_of(32, num_swap_blocks=16)
    tokens = list(range(9))
    grown(manager, 0, 9)
    offers = manager.prefix.offer(0, tokens)
    manager.fork(0, 1)
    manager.swap.move_out([0, 1])
    manager.fork(0, 2)
    manager.prefix.withdraw(offers)
    manager.swap.move_in([0, 1, 2])
    for seq_id in range(3):
        manager.append([(seq_id, 3)])
        assert manager.prefix.commit(seq_id, list(range(12))) == 0
    assert matched(manager, 3, tokens) == 0
    manager.append([(3, 9)])
    assert manager.prefix.commit(3, tokens) == 2
    manager.evict(0)
    assert manager.prefix.match(0, tokens) == 8
    manager.append([(0, 4)])
    assert manager.prefix.commit(0, list(range(12))) == 1
    manager.check_invariants()


def test_hashes_follow_the_tokens_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of()
    manager.add(0)
    prompt = list(range(12))
    hashes = manager.prefix.prompt_hashes(0, prompt, (), 0, 12)
    assert len(set(hashes)) == 3 and manager.prefix.prompt_hashes(0, prompt, (), 4, 11) == hashes[1:2]
    assert manager.prefix.match(0, prompt) == 0
    manager.append([(0, 12)])
    manager.forget_hashes(0, 6)  # from here on it became another sequence
    changed = [*prompt[:6], *range(60, 66)]
    assert manager.prefix.commit(0, changed) == 3
    assert manager.prefix.prompt_hashes(0, changed, (), 0, 12)[:1] == hashes[:1]
    assert matched(manager, 1, [*prompt, 0]) == 4
    assert matched(manager, 2, [*changed, 0]) == 12
    manager.crop(0, 9)
    monkeypatch.setattr(PrefixCache, "_next_hash", lambda *_: pytest.fail("hashed again"))
    assert len(manager.prefix.prompt_hashes(0, changed, (), 0, 11)) == 2


def test_an_evicted_sequence_begins_anew_without_hashing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of()
    tokens = list(range(10))
    table = list(written(manager, 0, tokens))
    manager.evict(0)
    assert (manager.block_table(0), manager.num_tokens(0), manager.pool.num_in_use) == ([], 0, 0)
    monkeypatch.setattr(PrefixCache, "_next_hash", lambda *_: pytest.fail("hashed again"))
    assert manager.prefix.match(0, tokens) == 8
    assert manager.block_table(0) == table[:2]
    manager.check_invariants()


# Swap


def test_bad_swaps() -> None:
    manager = manager_of(num_swap_blocks=4)
    grown(manager, 0, 5)
    grown(manager, 1, 5)
    with pytest.raises(ValueError, match=r"not all of the sequences \[0\] are swapped out"):
        manager.swap.move_in([0])
    manager.swap.move_out([0])
    with pytest.raises(ValueError, match="swapped out already"):
        manager.swap.move_out([1, 0])
    with pytest.raises(ValueError, match="sequence 0 is swapped out"):
        manager.append([(1, 1), (0, 1)])
    assert manager.num_tokens(1) == 5
    without = manager_of()
    grown(without, 0, 5)
    assert not without.swap.has_room([0]) and without.swap.num_in_use == 0
    with pytest.raises(ValueError, match="no swap space"):
        without.swap.move_out([0])
    manager.check_invariants()


# Numbers and checks


def test_check_invariants_notices() -> None:
    def corrupted(change) -> BlockManager:  # type: ignore[no-untyped-def]
        manager = manager_of(num_swap_blocks=4)
        written(manager, 0, list(range(8)))
        manager.fork(0, 1)
        manager.check_invariants()
        change(manager)
        return manager

    for change in (
        lambda m: m.blocks(0).pop(),
        lambda m: m.blocks(0).reverse(),
        lambda m: m.blocks(0).__setitem__(1, m.blocks(0)[0]),
        lambda m: m.pool.incref(0),
        lambda m: m.by_id[1].block_hashes.reverse(),
        lambda m: m.by_id[1].__setattr__("num_committed", 3),
        lambda m: m.pool.__setattr__("num_free", 3),
        lambda m: m.by_id[0].__setattr__("is_swapped", True),
        lambda m: m.swap_pool.allocate(1),
        lambda m: m.swap_pool.__setattr__("num_free", 3),
    ):
        with pytest.raises(AssertionError) as caught:
            corrupted(change).check_invariants()
        assert str(caught.value)


# The log


def told(manager: BlockManager) -> list[tuple[object, ...]]:
    """Kind, sequence and values of all events."""
    common = {"id", "time", "step", "kind", "sequence"}
    return [
        (event["kind"], event.get("sequence"), *(value for name, value in event.items() if name not in common))
        for event in as_dicts(*manager.log.newer())
    ]


def test_the_log_says_who_takes_and_gives_which_blocks() -> None:
    manager = manager_of(num_swap_blocks=8)
    grown(manager, 1, 6)
    manager.append([(1, 1)])
    manager.fork(1, 2)
    manager.append([(2, 6)])
    manager.crop(2, 4)
    manager.swap.move_out([2])
    manager.free(2)
    manager.evict(1)
    manager.append([(1, 1)])
    manager.free(1)
    assert told(manager) == [
        ("allocated", 1, [0, 1]),
        ("shared", 2, [0, 1], 1),
        ("copied", 2, 1, 2),
        ("allocated", 2, [3, 4]),
        ("freed", 2, [2, 3, 4]),
        ("swapped_out", None, 1, [0]),
        ("freed", 1, [0, 1]),
        ("allocated", 1, [0]),
        ("freed", 1, [0]),
    ]


def test_the_log_says_what_comes_back_by_a_swap() -> None:
    manager = manager_of(num_swap_blocks=8)
    written(manager, 1, list(range(8)))
    manager.fork(1, 2)
    manager.append([(2, 1)])
    manager.swap.move_out([1, 2])
    grown(manager, 3, 1)
    manager.swap.move_in([1, 2])
    blocks = manager.block_table(1) + manager.block_table(2)
    assert told(manager)[-3:] == [
        ("swapped_out", None, 3, [0, 1, 0, 1, 2]),
        ("allocated", 3, [2]),
        ("swapped_in", None, 1, blocks),  # two of its blocks are still cached
    ]


def test_the_log_names_the_content_that_is_dropped() -> None:
    manager = manager_of(num_blocks=4)
    written(manager, 1, list(range(8)))
    manager.free(1)
    grown(manager, 2, 12)
    assert told(manager)[-2:] == [("evicted", None, [1]), ("allocated", 2, [2, 3, 1])]


def test_a_beginning_that_is_taken_back_is_no_event() -> None:
    manager = manager_of()
    tokens = list(range(9))
    written(manager, 1, tokens)
    before = told(manager)
    assert matched(manager, 2, tokens) == 8
    manager.unmatch(2)
    manager.share_prefix(2, 1, 6)
    manager.check_invariants()
    manager.unmatch(2)
    manager.check_invariants()
    assert told(manager) == before and manager.pool.num_in_use == 3
    manager.prefix.match(2, tokens)
    manager.append([(2, 1)])
    manager.add(3)
    manager.share_prefix(3, 2, 6)
    manager.append([(3, 1)])
    assert told(manager)[len(before) :] == [
        ("prefix_hit", 2, [0, 1], 8),
        ("allocated", 2, [3]),
        ("shared", 3, [0, 1], 2),
        ("copied", 3, 1, 4),
    ]


def test_a_beginning_that_is_built_upon_is_an_event() -> None:
    for use in (
        lambda m: m.fork(2, 3),
        lambda m: m.crop(2, 4),
        lambda m: m.free(2),
        lambda m: m.evict(2),
        lambda m: m.swap.move_out([2]),
        lambda m: (m.add(3), m.share_prefix(3, 2, 4), m.append([(3, 1)])),
    ):
        manager = manager_of(num_swap_blocks=8)
        written(manager, 1, list(range(9)))
        matched(manager, 2, list(range(9)))
        use(manager)
        assert told(manager)[1] == ("prefix_hit", 2, [0, 1], 8)


def test_sharing_a_prefix() -> None:
    manager = manager_of(num_swap_blocks=8)
    written(manager, 1, list(range(9)))
    manager.add(2)
    manager.share_prefix(2, 1, 6)
    assert manager.block_table(2) == [0, 1] and manager.num_tokens(2) == 6
    assert [manager.pool.ref_count(block) for block in range(3)] == [2, 2, 1]
    assert manager.append([(2, 1)]) == [(1, 3)]
    manager.check_invariants()
    for sibling, num_tokens in ((1, 10), (1, -1), (9, 1)):
        manager.add(5)
        with pytest.raises(ValueError):
            manager.share_prefix(5, sibling, num_tokens)
        manager.free(5)
    with pytest.raises(ValueError, match="only an empty one"):
        manager.share_prefix(2, 1, 4)
    manager.swap.move_out([1])
    manager.add(5)
    with pytest.raises(ValueError, match="in the pool"):
        manager.share_prefix(5, 1, 4)
    manager.check_invariants()
