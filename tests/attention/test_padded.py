"""The padded layout against loops over rows and columns, and its cache against the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.kernel_cases import step_metadata
from hf_paged.attention.backends.torch import TorchBackend
from hf_paged.attention.padded import PaddedCache, PaddedLayout
from hf_paged.core.cache_groups import CacheGroups

CPU = torch.device("cpu")
SIZE, NULL = 2, 9
SHAPES = {  # new tokens and tokens of each row
    "decode": [(1, 5), (1, 1), (1, 8)],
    "prompts": [(3, 3), (1, 1), (4, 4)],
    "chunks": [(2, 7), (4, 5), (3, 3), (1, 6)],
    "one row": [(2, 5)],
    "a cached beginning beside a fresh prompt": [(4, 4), (3, 4)],
    "alike": [(2, 4), (2, 4)],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_rows_end_in_the_last_column(name: str, dtype: torch.dtype) -> None:
    """Would break: a key in another row's column, padding that is seen or stored, or a new token stored twice."""
    shapes = SHAPES[name]
    blocks = iter(np.random.default_rng(0).permutation(64))
    tables = [[int(next(blocks)) for _ in range(-(-total // SIZE))] for _, total in shapes]
    tables = [[NULL + 1 + block for block in table] for table in tables]
    new, totals = ([shape[i] for shape in shapes] for i in range(2))
    metadata = step_metadata(tables, new, totals, SIZE, NULL, CPU)
    first = np.arange(len(shapes)) * 100  # where each row begins in a packed batch that has others between them
    layout = PaddedLayout(metadata, first, CPU)
    width, query_width = max(totals), max(new)
    pool = torch.randn(80, 2, 2, 3, SIZE, 4)
    pool[NULL] = 0
    pool = pool.to(dtype)
    before = pool.clone()
    own: Any = SimpleNamespace(device=CPU, groups=CacheGroups.single(2), at=lambda layer: (pool, layer, 4))
    cache = PaddedCache([layout], TorchBackend(pool).step(metadata), own)
    assert cache.get_seq_length() == width - query_width and cache.get_mask_sizes(query_width, 1) == (width, 0)
    key, value = (torch.randn(len(shapes), 3, query_width, 4) for _ in range(2))
    keys, values = cache.update(key, value, 1)
    assert keys.shape == values.shape == (len(shapes), 3, width, 4) and keys.dtype is torch.float32
    assert cache.get_seq_length(1) == width and cache.get_seq_length(0) == width - query_width
    for row, (query_len, total) in enumerate(shapes):
        for column in range(width):
            index = column - (width - total)
            assert bool(layout.attention_mask[row, column]) == (index >= 0)
            if column >= width - query_width:
                place = index - (total - query_len)
                expected = first[row] + place if place >= 0 else -1
                assert layout.token_index[row, column - (width - query_width)] == expected
            if index < 0:
                continue
            slot = tables[row][index // SIZE], index % SIZE
            is_new = index >= total - query_len
            for part, given, found in ((0, key, keys), (1, value, values)):
                stored = given[row, :, column - (width - query_width)].to(dtype) if is_new else None
                stored = before[slot[0], 1, part, :, slot[1]] if stored is None else stored
                assert torch.equal(pool[slot[0], 1, part, :, slot[1]].float(), stored.float())
                assert torch.equal(found[row, :, column], stored.float())
                before[slot[0], 1, part, :, slot[1]] = stored
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8)), "something else was written"
