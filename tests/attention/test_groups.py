"""A step over several groups of layers: each layer's keys to its own group's tables, and no window wider than kept."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from helpers.kernel_cases import random_tensor
from hf_paged.attention.backends.torch import TorchBackend
from hf_paged.attention.groups import GroupedStep, WindowError
from hf_paged.attention.metadata import AttentionMetadata, padded_tables
from hf_paged.attention.params import AttentionParams
from hf_paged.core.batch import GroupTables
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.memory.spec import AttentionSpec

FULL, NEAR = AttentionSpec(2, 8, 8), AttentionSpec(2, 8, 8, window=5)
NULL = 9


def metadata(blocks: list[int]) -> AttentionMetadata:
    """One sequence of 11 tokens, three of them new, in blocks of 4."""
    return AttentionMetadata(np.array([blocks]), np.array([3]), np.array([11]), 4, NULL, torch.device("cpu"))


def test_tables_of_another_group() -> None:
    first = metadata([3, 1, 4])
    assert first.block_tables.tolist() == [[3, 1, 4]] and first.seq_lens.tolist() == [11]
    other, alone = first.with_tables(np.array([[NULL, 5, 0]])), metadata([NULL, 5, 0])
    for name in ("slot_mapping", "block_tables", "seq_lens", "query_start_loc"):
        assert torch.equal(getattr(other, name), getattr(alone, name)), name
    assert torch.equal(other.groups[0].block_table, alone.groups[0].block_table)
    assert other.seq_lens is first.seq_lens and other.query_start_loc is first.query_start_loc, "sent twice"
    assert other.query_tiles(2) is first.query_tiles(2)
    assert first.block_tables.tolist() == [[3, 1, 4]]


def test_blocks_given_back_are_the_null_block() -> None:
    counts = array("q", [3, 1])
    groups = [GroupTables(array("i", [3, 1, 4, 2]), counts), GroupTables(array("i", [-1, 5, 0, 7]), counts)]
    for dtype in (np.int32, np.int64):
        tables = padded_tables(groups, (None, 5), NULL, dtype)
        assert [table.dtype for table in tables] == [dtype] * 2
        assert [table.tolist() for table in tables] == [[[3, 1, 4], [2, NULL, NULL]], [[NULL, 5, 0], [7, NULL, NULL]]]


def test_each_layer_over_its_own_tables() -> None:
    """As each layer would by itself, in a pool of its own."""
    layers = [NEAR, FULL, NEAR, NEAR, FULL, NEAR]
    groups = CacheGroups.of(layers)
    assert groups.windows == (None, 5, 5)
    tables = [[3, 1, 4], [NULL, 5, 0], [NULL, 2, 6]]
    pool = torch.zeros(10, groups.sizes[0], 2, 2, 4, 8, dtype=torch.float64)
    first = metadata(tables[0])
    own = [first, *(first.with_tables(np.array([table])) for table in tables[1:])]
    step = GroupedStep([TorchBackend(pool).step(each) for each in own], groups)
    for layer, kind in enumerate(layers):
        group, index = groups.places[layer]
        past = random_tensor(11, 2, 2, 8, seed=layer)  # token, key or value, head
        for token in range(4 if kind.window else 0, 8):
            pool[tables[group][token // 4], index, :, :, token % 4] = past[token]
        step.write(past[8:, 0], past[8:, 1], layer)
        query = random_tensor(3, 4, 8, seed=100 + layer)
        found = step.attend(query, AttentionParams(layer, 0.3, kind.window))
        keys, values = past.repeat_interleave(2, dim=2).permute(1, 2, 0, 3)
        distance = torch.arange(8, 11)[:, None] - torch.arange(11)
        mask = (distance >= 0) & (distance < (kind.window or 99))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1), keys, values, attn_mask=mask, scale=0.3
        )
        torch.testing.assert_close(found, expected.transpose(0, 1))
    assert not pool[NULL].any()


@pytest.mark.parametrize("asked", [None, 6])
def test_a_window_wider_than_kept(asked: int | None) -> None:
    pool = torch.zeros(10, 2, 2, 2, 4, 8, dtype=torch.float64)
    step = GroupedStep([TorchBackend(pool).step(metadata([3, 1, 4]))], CacheGroups.of([NEAR, NEAR]))
    query = random_tensor(3, 4, 8)
    with pytest.raises(WindowError, match=r"layer 1 attends to .* its cache keeps the last 5") as caught:
        step.attend(query, AttentionParams(1, 0.3, asked))
    assert caught.value.layer == 1
    assert step.attend(query, AttentionParams(1, 0.3, 4)).shape == query.shape
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"the pool has 2 layers, and none of number {layer}"):
            step.write(query, query, layer)
