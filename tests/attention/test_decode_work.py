"""How decoding is shared out: the promises of `decode_work.py`, for any lengths, by loops over items and sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_paged.attention.decode_work import (
    LEAST_SAVED_TILES,
    LEAST_TILES,
    Together,
    WorkKind,
    read_together,
    share_out,
    share_out_queries,
)
from hf_paged.attention.shared_prefix import SharedPrefixes

LENGTHS = st.integers(0, 300) | st.integers(0, 20_000) | st.sampled_from([0, 1, 63, 64, 65, 1_000_000])
KINDS = st.builds(
    WorkKind,
    tile=st.sampled_from([16, 32, 64, 128]),
    slots=st.integers(1, 300),
    window=st.sampled_from([0, 0, 1, 100, 1024, 4096]),
    queries=st.just(1),
    part=st.just(0),
)


def tiles_of(length: int, kind: WorkKind) -> range:
    """Those with a token that the last one sees."""
    first = max(length - kind.window, 0) if kind.window else 0
    return range(first // kind.tile, math.ceil(length / kind.tile))


def check(lens: list[int], kind: WorkKind) -> dict[int, int]:
    """All that any list promises; items of each sequence."""
    items, split = share_out(np.array(lens), kind)
    assert items.dtype == split.dtype == np.int32 and items.shape[1:] == split.shape[1:] == (4,)
    covered: dict[int, list[range]] = {}
    places: dict[int, list[int]] = {}
    for place, (_, row, first, count) in enumerate(items.tolist()):
        covered.setdefault(row, []).append(range(first, first + count))
        places.setdefault(row, []).append(place)
    assert sorted(covered) == list(range(len(lens)))
    for row, pieces in covered.items():
        expected = tiles_of(lens[row], kind)
        assert [tile for piece in pieces for tile in piece] == list(expected), "not each tile once and in order"
        assert all(pieces) or len(expected) == 0, "an item of nothing"
        assert places[row] == list(range(places[row][0], places[row][0] + len(pieces))), "not next to each other"
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    expected_split = [[0, row, of[0], len(of)] for row, of in places.items() if len(of) > 1]
    assert split.tolist() == expected_split
    parts = sum(len(of) for of in places.values() if len(of) > 1)
    assert all(len(places[row]) > 1 for row in items[:parts, 1].tolist()), "split sequences don't come first"
    assert items[:parts, 0].tolist() == list(range(parts))
    # What a launch that serves any lengths is made for.
    assert len(items) <= kind.max_items(len(lens))
    assert len(split) <= kind.max_split(len(lens)) and parts <= kind.max_parts
    return {row: len(of) for row, of in places.items()}


def check_share(lens: list[int], kind: WorkKind, counts: dict[int, int]) -> None:
    """No item has much more than its fair share, and only what is longer is split."""
    tiles = [len(tiles_of(length, kind)) for length in lens]
    share = max(LEAST_TILES, sum(tiles) / kind.slots)
    for row, count in counts.items():
        assert math.ceil(tiles[row] / count) <= 1.5 * share + 1
        assert count == 1 or tiles[row] >= 1.5 * share
        assert count == 1 or tiles[row] / count > 0.7 * share, "parts smaller than they need be"


@settings(max_examples=300)
@given(lens=st.lists(LENGTHS, min_size=1, max_size=40), kind=KINDS)
def test_any_lengths(lens: list[int], kind: WorkKind) -> None:
    check_share(lens, kind, check(lens, kind))


@settings(max_examples=50)
@given(
    num_short=st.integers(0, 255),
    short=st.integers(1, 500),
    long=st.integers(4000, 32_000),
    slots=st.integers(8, 300),
    data=st.data(),
)
def test_one_long_sequence_among_short_ones(num_short: int, short: int, long: int, slots: int, data: Any) -> None:
    """It is split however many there are, as soon as its work is more than a fair share; no short one is."""
    lens = [short] * num_short
    lens.insert(data.draw(st.integers(0, num_short)), long)
    kind = WorkKind(64, slots)
    counts = check(lens, kind)
    check_share(lens, kind, counts)
    tiles = [math.ceil(length / 64) for length in lens]
    if max(tiles) > 2 * sum(tiles) / slots + 2:
        assert counts[lens.index(long)] > 1
    if short < LEAST_TILES * 64:
        assert sum(counts.values()) - counts[lens.index(long)] == num_short


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        ([16384], {0: 33}),
        ([16384] * 8, dict.fromkeys(range(8), 4)),
        ([16384] * 14, dict.fromkeys(range(14), 2)),
        ([16384] * 32, dict.fromkeys(range(32), 1)),
        ([128], {0: 1}),
        ([437] * 255 + [16384], dict.fromkeys(range(255), 1) | {255: 4}),
        ([0, 1, 0], {0: 1, 1: 1, 2: 1}),
    ],
)
def test_by_hand(lens: list[int], expected: dict[int, int]) -> None:
    """Eight kv heads on 132 processors."""
    assert check(lens, WorkKind(tile=64, slots=33)) == expected


def test_a_window_is_shared_out_by_what_it_sees() -> None:
    """Where one sequence is far longer, a layer without a window cuts up that one, a layer with one cuts up all."""
    lens = [1_000_000] + [8192] * 7
    full, sliding = WorkKind(64, 33), WorkKind(64, 33, window=4096)
    assert check(lens, full) == {0: 31} | dict.fromkeys(range(1, 8), 1)
    assert check(lens, sliding) == dict.fromkeys(range(8), 4)


QUERY_KINDS = st.builds(
    WorkKind,
    tile=st.sampled_from([16, 64]),
    slots=st.integers(1, 300),
    window=st.sampled_from([0, 0, 1, 100, 4096]),
    queries=st.sampled_from([1, 2, 5, 16, 32]),
    part=st.sampled_from([0, 0, 64, 256]),
)


@settings(max_examples=300)
@given(shapes=st.lists(st.tuples(st.integers(1, 100), LENGTHS), min_size=1, max_size=12), kind=QUERY_KINDS)
def test_query_tiles_of_any_lengths(shapes: list[tuple[int, int]], kind: WorkKind) -> None:
    """Each new token's tiles once and in order, its parts side by side in places of their own; all in bounds."""
    query_lens, contexts = map(np.array, zip(*shapes))
    starts, rows = np.cumsum(query_lens) - query_lens + 7, np.arange(len(shapes)) + 3
    items, split = share_out_queries(query_lens, contexts + query_lens, starts, rows, kind)
    assert items.dtype == split.dtype == np.int32 and items.shape[1:] == (8,) and split.shape[1:] == (4,)
    runs: dict[tuple[int, int], list[list[int]]] = {}
    for part, sequence, first, tiles, query, count, *_ in items.tolist():
        runs.setdefault((sequence, query), []).append([part, first, tiles, count])
    parts: dict[int, list[int]] = {}  # of each token of the batch
    for (sequence, query), own in runs.items():
        row = sequence - 3
        assert query % kind.queries == 0
        position = contexts[row] + query
        num_tokens = min(kind.queries, query_lens[row] - query)
        seen = tiles_of(position + num_tokens, kind._replace(window=kind.window and kind.window + num_tokens - 1))
        assert [tile for _, first, tiles, _ in own for tile in range(first, first + tiles)] == list(seen)
        assert all(count == len(own) for *_, count in own) and [part - own[0][0] for part, *_ in own] == [
            *range(len(own))
        ]
        if kind.part:
            assert {first * kind.tile % kind.part for _, first, *_ in own[1:]} <= {0}
            assert all(
                (first * kind.tile) // kind.part == ((first + n) * kind.tile - 1) // kind.part for _, first, n, _ in own
            )
        for token in range(num_tokens if len(own) > 1 else 0):
            parts[starts[row] + query + token] = [part + token * len(own) for part, *_ in own]
    assert sorted(runs) == [
        (row + 3, q) for row, n in enumerate(query_lens.tolist()) for q in range(0, n, kind.queries)
    ]
    assert {token: [*range(first, first + count)] for zero, token, first, count in split.tolist() if not zero} == parts
    assert sorted(part for of in parts.values() for part in of) == [*range(split[:, 3].sum())]
    if not kind.part:
        assert len(items) <= kind.max_items(len(runs))
        assert len(split) <= kind.max_split(len(runs)) and split[:, 3].sum() <= kind.max_parts


@settings(max_examples=200)
@given(
    num_queries=st.integers(2, 64),
    context=st.integers(8192, 200_000),
    group=st.integers(1, 16),
    kv_heads=st.sampled_from([1, 2, 4, 8, 16]),
    tile=st.sampled_from([32, 64, 128]),
    rows=st.sampled_from([64, 128]),
)
@example(num_queries=60, context=188_313, group=16, kv_heads=16, tile=32, rows=64)  # 15 runs for 17 slots
def test_few_queries_behind_a_long_context_fill_the_device(
    num_queries: int, context: int, group: int, kv_heads: int, tile: int, rows: int
) -> None:
    """Two programs for each of 132 processors, or one for each KV tile."""
    slots = -(-264 // kv_heads)
    lens = np.array([num_queries]), np.array([context + num_queries])
    zero = np.zeros(1, dtype=np.int64)
    items, _ = share_out_queries(*lens, zero, zero, WorkKind(tile, slots, queries=rows // group))
    ends = [min(start + rows // group, num_queries) for start in range(0, num_queries, rows // group)]
    tiles = [math.ceil((context + end) / tile) for end in ends]
    if (max(tiles) - LEAST_SAVED_TILES) * slots < sum(tiles):  # cutting saves the longest too little
        assert items[:, 3].tolist() == tiles[::-1]
    else:
        assert kv_heads * len(items) >= min(264, kv_heads * (context // tile))
    assert len(items) <= max(len(tiles), 4 * slots / 3) and max(items[:, 3]) <= 2 * min(items[:, 3]) + 1


@pytest.mark.parametrize("shape", [(512, 512), (2048, 2048), (2048, 100_000), (5, 500)])
def test_query_tiles_that_fill_the_device_or_end_soon_are_whole(shape: tuple[int, int]) -> None:
    lens, zero = np.array([shape]).T, np.zeros(1, dtype=np.int64)
    items, split = share_out_queries(*lens, zero, zero, WorkKind(64, 33, queries=32))
    assert len(items) == -(-shape[0] // 32) and not len(split)


TOGETHERS = st.builds(
    Together,
    tile=st.sampled_from([16, 64]),
    slots=st.integers(1, 60),
    most=st.integers(2, 16),
    token_bytes=st.just(4096),
    part_bytes=st.just(16_896),
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[SharedPrefixes, list[int]]:
    """Runs of sequences in any order, and the tokens of each: what its run shares, and some of its own."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3000)), min_size=1, max_size=6))
    tokens = np.array([shared if count > 1 else 0 for count, shared in sizes])
    counts = np.array([count for count, _ in sizes])
    own = draw(st.lists(st.integers(0, 300), min_size=int(counts.sum()), max_size=int(counts.sum())))
    order = np.array(draw(st.permutations(range(len(own)))))
    lens = np.empty(len(own), dtype=np.int64)
    lens[order] = np.repeat(tokens, counts) + own
    return SharedPrefixes(order, np.cumsum(counts) - counts, counts, tokens), lens.tolist()


@settings(max_examples=300)
@given(given_runs=runs(), kind=KINDS, together=TOGETHERS)
def test_shared_tiles_are_read_for_all_that_share_them(
    given_runs: tuple[SharedPrefixes, list[int]], kind: WorkKind, together: Together
) -> None:
    """Each sequence's tiles once and in order, and each of its parts in a place of its own, side by side."""
    prefixes, lens = given_runs
    kind = kind._replace(window=0)
    shared = read_together(prefixes, kind, together, -math.inf)
    unit = max(kind.tile, together.tile)
    if shared is None:
        assert max(prefixes.tokens) < unit
        return
    items, split = share_out(np.array(lens), kind, shared)
    members = shared.members(split)
    assert shared.items.dtype == members.dtype == items.dtype == split.dtype == np.int32
    run_of = dict(zip(prefixes.order.tolist(), np.repeat(np.arange(len(prefixes.counts)), prefixes.counts).tolist()))
    covered: dict[int, list[int]] = {row: [] for row in range(len(lens))}
    parts: dict[int, list[int]] = {row: [] for row in range(len(lens))}
    for number, (first, count, tile, tiles) in enumerate(shared.items.tolist()):
        assert 2 <= count <= together.most and tiles > 0
        rows = members[first : first + count, 0].tolist()
        assert len({run_of[row] for row in rows}) == 1 and len(set(rows)) == count
        for row, base in members[first : first + count, :2].tolist():
            covered[row] += range(tile * together.tile, (tile + tiles) * together.tile)
            parts[row].append(base + number)
    share = max(LEAST_TILES, math.ceil(int(shared.items[:, 3].sum()) / together.slots))
    assert max(shared.items[:, 3]) <= 1.5 * share + 1
    for row, tokens in covered.items():
        assert len(tokens) % unit == 0 and len(tokens) <= prefixes.tokens[run_of[row]]
    for part, row, tile, tiles in items.tolist():
        covered[row] += range(tile * kind.tile, (tile + tiles) * kind.tile)
        parts[row].append(part)
    of_split = {row: list(range(first, first + count)) for _, row, first, count in split.tolist()}
    for row, tokens in covered.items():
        assert tokens == list(range(math.ceil(lens[row] / kind.tile) * kind.tile))
        assert parts[row] == of_split[row] if row in of_split else len(parts[row]) == 1
    assert sorted(part for of in of_split.values() for part in of) == list(range(split[:, 3].sum()))


@pytest.mark.parametrize(
    ("samples", "tokens", "expected"),
    [(16, 1024, [16]), (17, 1024, [9, 8]), (2, 1024, None), (2, 32_768, [2]), (16, 60, None), (100, 64, None)],
)
def test_reading_together_has_to_pay(samples: int, tokens: int, expected: list[int] | None) -> None:
    """Eight kv heads of 128 in half precision, four query heads each: 4 KiB a token, 16.5 KiB a part."""
    prefixes = SharedPrefixes(np.arange(samples), np.array([0]), np.array([samples]), np.array([tokens]))
    found = read_together(prefixes, WorkKind(64, 33), Together(64, 33, 16, 4096, 16_896))
    counts = None if found is None else [count for _, count, first, _ in found.items.tolist() if first == 0]
    assert counts == expected
