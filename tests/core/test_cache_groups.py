"""`CacheGroups`: layers of one kind together, pages of one size, little of them empty."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.core.cache_groups import MAX_PADDING, CacheGroups


@dataclass(frozen=True)
class Kind:
    window: int | None
    width: int = 64


FULL, NEAR, FAR = Kind(None), Kind(512), Kind(4096)


@pytest.mark.parametrize(
    ("layers", "layers_per_page", "windows"),
    [
        ([FULL] * 32, 32, (None,)),
        ([FAR] * 32, 32, (4096,)),  # Mistral
        ([NEAR, FULL] * 13, 13, (None, 512)),  # Gemma 2
        (([NEAR] * 5 + [FULL]) * 4 + [NEAR] * 2, 4, (None, *[512] * 6)),  # Gemma 3 1B
        (([NEAR] * 5 + [FULL]) * 8, 8, (None, *[512] * 5)),
        ([FULL] * 21 + [FAR] * 7, 7, (None, None, None, 4096)),  # Qwen2 with max_window_layers
        ([FULL] * 11 + [FAR] * 10, 11, (None, 4096)),  # one layer is empty
        ([FULL], 1, (None,)),
        ([NEAR, FAR, FULL], 1, (None, 512, 4096)),
    ],
)
def test_known_models(layers: list[Kind], layers_per_page: int, windows: tuple[int | None, ...]) -> None:
    groups = CacheGroups.of(layers)
    assert (groups.layers_per_page, groups.windows) == (layers_per_page, windows)


def test_one_group_keeps_the_order_of_the_layers() -> None:
    assert CacheGroups.of([NEAR] * 5).places == tuple((0, index) for index in range(5))


@given(st.lists(st.sampled_from([FULL, NEAR, FAR, Kind(None, 32), Kind(512, 32)]), min_size=1, max_size=60))
def test_any_list_of_layers(layers: list[Kind]) -> None:
    groups = CacheGroups.of(layers)
    size, num_groups = groups.layers_per_page, len(groups.windows)
    assert len(set(groups.places)) == len(groups.places) == len(layers)
    kinds: dict[int, set[Kind]] = {}
    for kind, (group, index) in zip(layers, groups.places, strict=True):
        assert 0 <= index < size and groups.windows[group] == kind.window
        kinds.setdefault(group, set()).add(kind)
    assert sorted(kinds) == list(range(num_groups)) and all(len(own) == 1 for own in kinds.values())
    counts = Counter(layers).values()
    assert all(-count % size <= MAX_PADDING * count for count in counts)
    assert all((group, size - 1) in groups.places for group in range(num_groups)), "the last layer holds something"
    assert list(groups.windows) == sorted(groups.windows, key=lambda window: window is not None)
    for other in range(1, len(layers) + 1):
        num_others = sum(-(-count // other) for count in counts)
        assert num_others >= num_groups or any(-count % other > MAX_PADDING * count for count in counts)


def test_no_layers() -> None:
    with pytest.raises(ValueError, match="without layers"):
        CacheGroups.of([])
