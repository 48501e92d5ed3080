"""How decoding is shared out: the promises of `decode_work.py`, for any lengths, by loops over items and sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.attention.decode_work import LEAST_TILES, WorkKind, share_out

LENGTHS = st.integers(0, 300) | st.integers(0, 20_000) | st.sampled_from([0, 1, 63, 64, 65, 1_000_000])
KINDS = st.builds(
    WorkKind,
    tile=st.sampled_from([16, 32, 64, 128]),
    slots=st.integers(1, 300),
    window=st.sampled_from([0, 0, 1, 100, 1024, 4096]),
    num_splits=st.sampled_from([0, 0, 1, 2, 5]),
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
    for place, (group, row, first, count) in enumerate(items.tolist()):
        assert group == 0
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
    # What a launch that serves any lengths is made for.
    assert len(items) <= kind.max_items(len(lens))
    assert len(split) <= kind.max_split(len(lens)) and parts <= kind.max_parts(len(lens))
    return {row: len(of) for row, of in places.items()}


def check_share(lens: list[int], kind: WorkKind, counts: dict[int, int]) -> None:
    """No item has much more than its fair share, and only what is longer is split."""
    tiles = [len(tiles_of(length, kind)) for length in lens]
    share = max(LEAST_TILES, math.ceil(sum(tiles) / kind.slots))
    for row, count in counts.items():
        assert math.ceil(tiles[row] / count) <= 1.5 * share + 1
        assert count == 1 or tiles[row] >= 1.5 * share
        assert count == 1 or tiles[row] / count > 0.7 * share, "parts smaller than they need be"


@settings(max_examples=300, deadline=None)
@given(lens=st.lists(LENGTHS, min_size=1, max_size=40), kind=KINDS)
def test_any_lengths(lens: list[int], kind: WorkKind) -> None:
    counts = check(lens, kind)
    if kind.num_splits:
        assert counts == {
            row: max(1, min(kind.num_splits, len(tiles_of(length, kind)))) for row, length in enumerate(lens)
        }
    else:
        check_share(lens, kind, counts)


@settings(max_examples=50, deadline=None)
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
        ([16384], {0: 32}),
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
