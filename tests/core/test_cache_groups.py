"""`CacheGroups`: layers of one kind together, pages of one size, little of them empty."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.core.cache_groups import (
    MANY_GROUPS,
    MAX_PADDING,
    MAX_PADDING_BESIDE_WINDOWS,
    MAX_PADDING_OF_A_KIND,
    NOWHERE,
    CacheGroups,
)


@dataclass(frozen=True)
class Kind:
    window: int | None
    elements_per_token: int = 64
    row_elements: int = 8
    chunk: int | None = None
    is_cross: bool = False


FULL, NEAR, FAR = Kind(None), Kind(512), Kind(4096)


@pytest.mark.parametrize(
    ("layers", "layers_per_page", "windows"),
    [
        ([FULL] * 32, 32, (None,)),
        ([FAR] * 32, 32, (4096,)),  # Mistral
        ([NEAR, FULL] * 13, 13, (None, 512)),  # Gemma 2
        (([NEAR] * 5 + [FULL]) * 4 + [NEAR] * 2, 4, (None, *[512] * 6)),  # Gemma 3 1B
        (([NEAR] * 5 + [FULL]) * 8, 8, (None, *[512] * 5)),
        (([NEAR] * 5 + [FULL]) * 10 + [NEAR] * 2, 5, (None, None, *[512] * 11)),  # Gemma 3 27B
        ([FULL] * 21 + [FAR] * 7, 7, (None, None, None, 4096)),  # Qwen2 with max_window_layers
        ([FULL] * 11 + [FAR] * 10, 11, (None, 4096)),  # one layer is empty
        ([FULL], 1, (None,)),
        ([NEAR, FAR, FULL], 1, (None, 512, 4096)),
    ],
)
def test_known_models(layers: list[Kind], layers_per_page: int, windows: tuple[int | None, ...]) -> None:
    groups = CacheGroups.of(layers)
    assert (set(groups.sizes), groups.windows) == ({layers_per_page}, windows)
    assert groups.elements == layers_per_page * 64 and len(groups.sizes) == len(windows)


def test_one_group_keeps_the_order_of_the_layers() -> None:
    assert CacheGroups.of([NEAR] * 5).places == tuple((0, index) for index in range(5))


WIDE = [Kind(None, 128, 16), Kind(512, 128, 16), Kind(None, 96, 12), Kind(512, 320, 40)]


@given(st.lists(st.sampled_from([FULL, NEAR, FAR, *WIDE, None]), min_size=1, max_size=60).filter(any))
def test_any_list_of_layers(layers: list[Kind | None]) -> None:
    groups = CacheGroups.of(layers)
    num_groups = len(groups.windows)
    assert len(groups.sizes) == num_groups and len(groups.places) == len(layers)
    stored = {place: kind for kind, place in zip(layers, groups.places, strict=True) if kind is not None}
    assert len(stored) == sum(kind is not None for kind in layers)
    assert all((place == NOWHERE) == (kind is None) for kind, place in zip(layers, groups.places, strict=True))
    kinds: dict[int, set[Kind]] = {}
    for (group, index), kind in stored.items():
        assert 0 <= index < groups.sizes[group] and groups.windows[group] == kind.window
        kinds.setdefault(group, set()).add(kind)
    assert sorted(kinds) == list(range(num_groups)) and all(len(own) == 1 for own in kinds.values())
    for group, (kind,) in kinds.items():
        assert groups.sizes[group] == groups.elements // kind.elements_per_token > 0
        assert groups.elements % kind.row_elements == 0, "rows of one block would overlap those of the next"
        assert (group, groups.sizes[group] - 1) in stored, "the last layer holds something"
    assert list(groups.windows) == sorted(groups.windows, key=lambda window: window is not None)
    assert groups.is_single == (
        groups.places == tuple((0, index) for index in range(len(layers))) and groups.windows == (None,)
    )
    filled = sum(kind.elements_per_token for kind in stored.values())
    assert groups.padding(layers) == pytest.approx(num_groups * groups.elements / filled - 1)


@given(st.lists(st.sampled_from([FULL, NEAR, FAR, Kind(None, 64, 32), Kind(512, 64, 32)]), min_size=1, max_size=60))
def test_layers_of_one_size(layers: list[Kind]) -> None:
    """As few groups as there can be with hardly anything left empty."""
    groups = CacheGroups.of(layers)
    counts = Counter(layers)
    (size,) = set(groups.sizes)

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts.values())

    def is_tight(size: int) -> bool:
        empty = [-count % size for count in counts.values()]
        return sum(empty) <= MAX_PADDING * len(layers) and all(
            own <= MAX_PADDING_OF_A_KIND * count for own, count in zip(empty, counts.values(), strict=True)
        )

    def is_cheap(size: int) -> bool:
        """Whether hardly anything is left empty in layers without a window, by not too many groups."""
        own = ((-count % size, count) for kind, count in counts.items() if kind.window is None)
        is_full = all(empty <= MAX_PADDING_BESIDE_WINDOWS * count for empty, count in own)
        return len({kind.window is None for kind in counts}) == 1 or (is_full and num_groups(size) <= MANY_GROUPS)

    assert is_tight(size)
    for other in filter(is_tight, range(1, len(layers) + 1)):
        assert is_cheap(size) or not is_cheap(other)
        assert is_cheap(size) != is_cheap(other) or num_groups(other) >= len(groups.sizes)


LOCAL, GLOBAL = Kind(512, 2 * 16 * 256, 256), Kind(None, 2 * 4 * 512, 512)


@pytest.mark.parametrize(
    ("layers", "sizes", "padding"),
    [
        (([LOCAL] * 5 + [GLOBAL]) * 10, (10, *[5] * 10), 0.0),  # Gemma 4's proportions
        ([Kind(None, 4 * 320, 320)] * 9 + [Kind(128, 8 * 320, 320)] * 39, (10, *[5] * 8), 0.035),  # MiMo's
        ([FULL] * 3 + [None] * 2, (3,), 0.0),
    ],
)
def test_layers_of_two_sizes(layers: list[Kind | None], sizes: tuple[int, ...], padding: float) -> None:
    groups = CacheGroups.of(layers)
    assert groups.padding(layers) <= padding and len(groups.sizes) <= len(sizes)


def test_no_layers() -> None:
    """A model that keeps states only has none."""
    for layers in ([], [None, None]):
        groups = CacheGroups.of(layers)
        assert groups.sizes == groups.windows == () and len(groups.places) == len(layers)
