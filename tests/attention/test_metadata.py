"""`AttentionMetadata`: the packed batch as index tensors, against loops over sequences and tokens."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.kernel_cases import step_metadata
from hf_paged.attention.decode_work import Together, WorkKind
from hf_paged.attention.metadata import AttentionMetadata, RecordedMetadata, WorkLists
from hf_paged.kernels.padded_groups import GatherView, PaddedGroup

CPU = torch.device("cpu")
INF = float("inf")


@dataclass
class Batch:
    """The arguments of a step, and the metadata made of them."""

    shapes: list[tuple[int, int]]  # new tokens, tokens including them
    block_size: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        needed = [-(-length // self.block_size) for _, length in self.shapes]
        blocks = list(range(sum(needed)))
        random.Random(self.seed).shuffle(blocks)
        self.null_block = len(blocks)
        self.tables = [[blocks.pop() for _ in range(n)] for n in needed]
        self.metadata = step_metadata(
            self.tables,
            [query for query, _ in self.shapes],
            [length for _, length in self.shapes],
            self.block_size,
            self.null_block,
            CPU,
        )

    @property
    def num_tokens(self) -> int:
        return sum(query for query, _ in self.shapes)

    def starts(self) -> list[int]:
        return [sum(query for query, _ in self.shapes[:row]) for row in range(len(self.shapes) + 1)]

    def rows_of(self, group: PaddedGroup) -> list[int]:
        """The sequences of a group, found by their first token."""
        return [self.starts().index(int(tokens[0])) for tokens in group.token_index]

    def view(self, group: PaddedGroup, window: int | None, dtype: torch.dtype = torch.float32) -> GatherView:
        return group.view(window, dtype)

    def check(self) -> None:
        """Everything that does not depend on a layer."""
        metadata, size = self.metadata, self.block_size
        assert (metadata.block_size, metadata.null_block) == (size, self.null_block)
        assert metadata.slot_mapping.dtype == torch.int64 and metadata.slot_mapping.device == CPU
        for tensor in (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc):
            assert tensor.dtype == torch.int32 and tensor.device == CPU
        slots = [
            table[position // size] * size + position % size
            for table, (query, length) in zip(self.tables, self.shapes)
            for position in range(length - query, length)
        ]
        assert metadata.slot_mapping.tolist() == slots
        assert len(set(slots)) == len(slots)
        assert metadata.query_start_loc.tolist() == self.starts()
        assert metadata.seq_lens.tolist() == [length for _, length in self.shapes]
        used = [table[: -(-length // size)] for table, (_, length) in zip(self.tables, self.shapes)]
        width = max(map(len, used))
        padded = [table + [self.null_block] * (width - len(table)) for table in used]
        assert metadata.block_tables.tolist() == padded
        for group in metadata.groups:
            self.check_group(group, used)
        rows = [row for group in metadata.groups for row in self.rows_of(group)]
        assert sorted(rows) == list(range(len(self.shapes))), "not every sequence is in exactly one group"
        tokens = [int(token) for group in metadata.groups for token in real(group)]
        assert sorted(tokens) == list(range(self.num_tokens)), "not every token is in exactly one group"

    def check_group(self, group: PaddedGroup, used: list[list[int]]) -> None:
        rows = self.rows_of(group)
        assert rows == sorted(rows)
        queries = [self.shapes[row][0] for row in rows]
        lengths = [self.shapes[row][1] for row in rows]
        assert group.seq_lens.tolist() == lengths
        longest = max(queries)
        # A short query repeats its last token.
        index = [[min(column, query - 1) for column in range(longest)] for query in queries]
        starts = [self.starts()[row] for row in rows]
        assert group.token_index.tolist() == [[start + i for i in row] for start, row in zip(starts, index)]
        positions = [[n - q + i for i in row] for q, n, row in zip(queries, lengths, index)]
        assert group.query_positions.tolist() == positions
        if min(queries) == longest:
            assert group.is_real is None
        else:
            assert group.is_real is not None
            assert group.is_real.tolist() == [[column < query for column in range(longest)] for query in queries]
        width = max(len(used[row]) for row in rows)
        padded = [used[row] + [self.null_block] * (width - len(used[row])) for row in rows]
        assert group.block_table.tolist() == padded
        assert max(queries) <= 2 * min(queries) and width <= 2 * min(len(used[row]) for row in rows), "too much padding"

    def check_view(self, group: PaddedGroup, window: int | None) -> None:
        """A query token sees exactly the tokens of its own sequence that it should."""
        view, size = self.view(group, window), self.block_size
        rows = self.rows_of(group)
        num_columns = view.block_table.shape[1]
        assert view.mask.shape == (len(rows), 1, group.token_index.shape[1], num_columns * size)
        num_needed = []
        for index, row in enumerate(rows):
            table, (query, length) = self.tables[row], self.shapes[row]
            blocks = view.block_table[index].tolist()
            gathered = [block for block in blocks if block != self.null_block]
            first = max(0, length - query - window + 1) // size if window is not None else 0
            last = -(-length // size)
            assert gathered == table[first:last], "gathers other blocks than its window touches"
            assert blocks == gathered + [self.null_block] * (num_columns - len(gathered))
            num_needed.append(last - first)
            for column in range(group.token_index.shape[1]):
                position = int(group.query_positions[index, column])
                oldest = 0 if window is None else max(0, position - window + 1)
                visible = [
                    first * size + key for key, value in enumerate(view.mask[index, 0, column].tolist()) if value == 0
                ]
                assert visible == list(range(oldest, position + 1))
        assert num_columns == max(num_needed), "the gather is wider than its longest row"
        assert set(view.mask.unique().tolist()) <= {0.0, -INF}


def real(group: PaddedGroup) -> Tensor:
    return group.token_index.flatten() if group.is_real is None else group.token_index[group.is_real]


@settings(max_examples=150)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=8),
    block_size=st.integers(1, 6),
    window=st.none() | st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_any_step(shapes: list[tuple[int, int]], block_size: int, window: int | None, seed: int) -> None:
    batch = Batch([(query, query + before) for query, before in shapes], block_size, seed)
    batch.check()
    for group in batch.metadata.groups:
        batch.check_view(group, window)


@settings(max_examples=150)
@given(
    num_decodes=st.integers(0, 5),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=6),
    tile=st.sampled_from([1, 2, 3, 8, 16, 64]),
    seed=st.integers(0, 100),
)
def test_query_tiles(num_decodes: int, shapes: list[tuple[int, int]], tile: int, seed: int) -> None:
    """Breaks if a new token's attention is computed by two programs or by none, or the longest one starts last."""
    rng = random.Random(seed)
    shapes = [(1, rng.randint(1, 70)) for _ in range(num_decodes)] + [(q, q + before) for q, before in shapes]
    if not shapes:
        shapes = [(1, 1)]
    metadata = Batch(shapes, seed=seed).metadata
    decodes = list(itertools.takewhile(lambda shape: shape[0] == 1, shapes))
    assert metadata.num_decodes == len(decodes)
    assert metadata.max_decode_len == max((length for _, length in decodes), default=0)
    assert metadata.max_query_len == max(query for query, _ in shapes)

    tiles = metadata.query_tiles(tile)
    assert tiles.dtype == torch.int32 and tiles.device == CPU and tiles.is_contiguous() and tiles.shape[1] == 2
    pieces = [(row, range(first, min(first + tile, shapes[row][0]))) for row, first in tiles.tolist()]
    assert all(piece for _, piece in pieces), "a tile of nothing"
    covered = [(row, token) for row, piece in pieces for token in piece]
    assert sorted(covered) == [
        (row, token) for row in range(len(decodes), len(shapes)) for token in range(shapes[row][0])
    ]
    order = [(-shapes[row][1], row, -piece.start) for row, piece in pieces]
    assert order == sorted(order), "a longer sequence comes later, or tiles of one are apart or do not go backwards"
    assert metadata.query_tiles(tile) is tiles, "made once for all layers"
    assert metadata.query_tiles(tile + 1) is not tiles


def test_decode_work() -> None:
    """Work of the sequences that are decoded, made once for all layers of a kind, and only if asked for."""
    metadata = Batch([(1, 4), (1, 60), (3, 90), (1, 7)]).metadata
    full, sliding = WorkKind(tile=4, slots=4), WorkKind(tile=4, slots=4, window=8)
    work = metadata.decode_work(full)
    assert work.items.tolist() == [[0, 1, 0, 4], [1, 1, 4, 4], [2, 1, 8, 4], [3, 1, 12, 3], [4, 0, 0, 1]]
    assert work.split.tolist() == [[0, 1, 0, 4]] and work.max_parts == 4
    assert work.items.dtype == work.split.dtype == torch.int32 and work.items.device == CPU
    assert metadata.decode_work(sliding).items.tolist() == [[0, 1, 13, 2], [1, 0, 0, 1]]
    assert metadata.decode_work(full) is work


def test_query_work() -> None:
    """Work of the other sequences, or of all that are cut at fixed places; made once for all layers of a kind."""
    metadata = Batch([(1, 4), (3, 400), (1, 7)]).metadata
    kind = WorkKind(tile=4, slots=3, queries=3)
    work = metadata.query_work(kind)
    assert work.items[:3].tolist() == [
        [part, 1, 34 * part - (part == 2), 34 - (part > 0), 0, 3, 0, 0] for part in range(3)
    ]
    assert work.items[3:, 1:6].tolist() == [[2, 0, 2, 0, 1]]
    assert work.split.tolist() == [[0, 1 + token, 3 * token, 3] for token in range(3)] and work.max_parts == 9
    assert metadata.query_work(kind) is work
    exact = metadata.query_work(kind._replace(part=256)).items
    assert exact[:, 1:6].tolist() == [[1, 0, 64, 0, 2], [1, 64, 36, 0, 2], [2, 0, 2, 0, 1], [0, 0, 1, 0, 1]]


def test_what_is_read_together_is_each_groups_own() -> None:
    """Groups of layers have tables of their own: where one's sequences share blocks, another's need not."""
    shared, own = np.arange(24).repeat(2).reshape(24, 2).T, np.arange(48).reshape(2, 24)
    lens = np.array([96, 96])
    metadata, other = AttentionMetadata.of_groups([shared, own], np.ones_like(lens), lens, 4, 99, CPU)
    metadata.least_saved = -math.inf
    kind, together = WorkKind(tile=16, slots=4), Together(16, 4, most=2, token_bytes=64, part_bytes=64)
    work = metadata.decode_work(kind, together)
    assert work.shared_items is not None and metadata.decode_work(kind, together) is work
    assert other.shared_prefixes is None and other.decode_work(kind).shared_items is None
    moved = metadata.with_tables(shared + 30).decode_work(kind, together)
    assert moved is not work and moved.shared_items is not None
    metadata.least_saved = math.inf
    assert metadata.with_tables(shared).decode_work(kind, together) is other.decode_work(kind)


def test_lists_of_recorded_steps() -> None:
    """Asked for in a step before, any kind is answered and noted; then only kinds that every step comes with."""
    live = AttentionMetadata(np.zeros((3, 9), np.int64), np.array([1, 1, 5]), np.array([3, 4, 9]), 4, 99, CPU)
    kind, prompts, lists = WorkKind(16, 5), WorkKind(16, 5, queries=4), WorkLists({}, {}, {}, live)
    slots, table = torch.zeros(8, dtype=torch.int64), torch.zeros(4, 9, dtype=torch.int32)
    tensors = slots, table, torch.ones(4, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    by_token = torch.tensor([0, 1, 2, 2, 2, 2, 2, 0]), torch.tensor([3, 4, 5, 6, 7, 8, 9, 1], dtype=torch.int32)
    asked = RecordedMetadata(*tensors, 4, 99, 8, lists)
    asked.each_token = by_token
    assert asked.decode_work(kind).items.tolist() == [[row, row, 0, 1] for row in (0, 1)]
    assert asked.query_work(prompts).items[:, [1, 4]].tolist() == [[2, 0], [2, 4]]
    assert asked.decode_work(kind).max_parts == kind.max_parts, "as much scratch as any step may take"
    assert asked.query_work(prompts).max_parts == prompts.max_parts and asked.kinds == ([kind], [prompts], [])
    tokens = asked.of_all_tokens()
    assert tokens.decode_work(kind).items[:, 0].tolist() == list(range(7)) and asked.kinds[2] == [kind]
    assert (tokens.num_decodes, tokens.seq_lens) == (8, by_token[1]) and tokens.block_tables.shape == (8, 9)
    given = RecordedMetadata(*tensors, 4, 99, 8, WorkLists(lists.work, lists.queries, lists.tokens))
    given.each_token = by_token
    assert given.of_all_tokens().decode_work(kind) is tokens.decode_work(kind)
    assert given.decode_work(kind) is asked.decode_work(kind) and given.query_work(prompts) is asked.query_work(prompts)
    with pytest.raises(RuntimeError, match=r"another way than in the first step: .*window=7"):
        given.decode_work(kind._replace(window=7))
    with pytest.raises(RuntimeError, match="another way than in the first step"):
        given.of_group(slots, table).query_work(kind)


def test_views_are_made_once_for_each_kind_of_layer() -> None:
    batch = Batch([(1, 132), (5, 18), (129, 163)])
    group = batch.metadata.groups[0]
    full, sliding = batch.view(group, None), batch.view(group, 5)
    assert batch.view(group, None) is full and batch.view(group, 5) is sliding is not full
    half = batch.view(group, 5, torch.bfloat16)
    assert half is not sliding and half.mask.dtype == torch.bfloat16
    assert torch.equal(half.mask.float(), sliding.mask) and sliding.mask.dtype == torch.float32


def test_a_window_view_leaves_the_full_one_alone() -> None:
    batch = Batch([(1, n) for n in (1, 4, 5, 8, 9, 33, 64, 65)])
    for group in batch.metadata.groups:
        before = group.block_table.clone()
        batch.view(group, 3)
        assert torch.equal(group.block_table, before)
        batch.check_view(group, None)
        batch.check_view(group, 3)


def test_the_caller_may_go_on_with_its_tables() -> None:
    """The manager's lists are live: what is built must not follow them."""
    table = [3, 1]
    metadata = step_metadata([table], [1], [4], 2, 4, CPU)
    table[:] = [0, 0, 0]
    assert metadata.block_tables.tolist() == metadata.groups[0].block_table.tolist() == [[3, 1]]


def test_decode_rows_of_all_lengths_are_few_groups() -> None:
    """No loop over sequences: groups grow with the logarithm of the lengths."""
    batch = Batch([(1, n) for n in range(1, 257)], block_size=1)
    assert len(batch.metadata.groups) == 9
    padded = sum(group.block_table.numel() for group in batch.metadata.groups)
    assert padded < 2 * sum(n for n in range(1, 257))
