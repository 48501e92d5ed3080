"""The plain-torch kernels against loops over sequences, tokens and heads in float64, written from the formulas.

The pool is poisoned: NaN wherever the engine has not handed a block to a sequence. `torch.empty_like` is, too, so a row
that is not written shows as NaN.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.kernel_cases import LAYOUTS, describe, pairwise, random_tensor, same_bits, step_metadata, strided
from helpers.kernel_pools import check_written, nan_pool
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.kernels import reference

CPU = torch.device("cpu")
NUM_LAYERS = 2
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}  # RMS of the error over RMS of the truth


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def nan_like(tensor: Tensor, **kwargs: Any) -> Tensor:
        return torch.full_like(tensor, float("nan"), **kwargs)

    monkeypatch.setattr(torch, "empty_like", nan_like)


def rms_ratio(found: Tensor, expected: np.ndarray) -> float:
    error = found.detach().double().numpy() - expected
    return math.sqrt(np.square(error).mean() / max(np.square(expected).mean(), 1e-300))


# reshape_and_cache


check_write = partial(check_written, reference.reshape_and_cache)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_reshape_and_cache_takes_any_strides(layout: str, block_size: int) -> None:
    slots = random.Random(block_size).sample(range(6 * block_size), 5)
    for layer, num_heads in itertools.product(range(NUM_LAYERS), (1, 3)):
        key = strided(layout, 5, num_heads, 4, torch.float32, seed=1)
        value = strided(layout, 5, num_heads, 4, torch.float32, seed=2)
        check_write(key, value, slots, layer, block_size, torch.float32, CPU)
        other = strided("contiguous", 5, num_heads, 4, torch.float32, 3)
        check_write(key, other, slots, layer, block_size, torch.float32, CPU)


@pytest.mark.parametrize("slots", [[-1, 7, -1, 0, 11], [-1, -1], [-5, 3], [2, -1], []])
def test_reshape_and_cache_skips_padding(slots: list[int]) -> None:
    key, value = (random_tensor(len(slots), 2, 4, seed=seed) for seed in (1, 2))
    check_write(key, value, slots, 1, 3, torch.float64, CPU)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float64),
    ],
)
def test_reshape_and_cache_casts_to_the_pool(given: torch.dtype, stored: torch.dtype) -> None:
    key, value = (random_tensor(4, 2, 8, dtype=given, seed=seed) for seed in (1, 2))
    check_write(key, value, [9, 2, -1, 4], 0, 4, stored, CPU)


# gather_rows, gather_slots, copy_blocks


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("table", [[[0]], [[4, 1, 1], [0, 5, 2]], [[3], [3], [3]]])
def test_gather_rows(block_size: int, table: list[list[int]]) -> None:
    pool = random_tensor(6, NUM_LAYERS, 2, 3, block_size, 4)
    rows = reference.block_rows(pool, torch.tensor(table))
    for layer in range(NUM_LAYERS):
        found = reference.gather_rows(pool, layer, rows, len(table))
        for part, states in enumerate(found):
            assert states.shape == (len(table), 3, len(table[0]) * block_size, 4) and states.is_contiguous()
            for row, head in itertools.product(range(len(table)), range(3)):
                for index in range(len(table[0]) * block_size):
                    block = table[row][index // block_size]
                    assert torch.equal(states[row, head, index], pool[block, layer, part, head, index % block_size])


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_gather_slots(block_size: int) -> None:
    pool = random_tensor(6, NUM_LAYERS, 2, 3, block_size, 4)
    slots = torch.randint(0, 6 * block_size, (2, 7), generator=torch.Generator().manual_seed(0))
    for layer in range(NUM_LAYERS):
        found = reference.gather_slots(pool, layer, slots)
        for part, states in enumerate(found):
            assert states.shape == (2, 3, 7, 4)
            for row, head, index in itertools.product(range(2), range(3), range(7)):
                slot = int(slots[row, index])
                expected = pool[slot // block_size, layer, part, head, slot % block_size]
                assert torch.equal(states[row, head, index], expected)


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 5)],
        [(1, 4), (1, 0), (3, 5)],  # one source, several destinations
        [(0, 1), (2, 0)],  # a destination that another copy reads: what it held before
        [(2, 0), (0, 1)],
        [(3, 3)],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_blocks(copies: list[tuple[int, int]], dtype: torch.dtype) -> None:
    pool = random_tensor(6, NUM_LAYERS, 2, 2, 3, 4, dtype=dtype)
    pool[5, 0, 0, 0, 0, 0] = float("nan")
    before, expected = pool.clone(), pool.clone()
    for source, destination in copies:
        expected[destination] = before[source]
    sources, destinations = torch.tensor(copies).unbind(1)
    reference.copy_blocks(pool, sources, destinations)
    assert same_bits(pool, expected)


# paged_attention

Shape = tuple[int, int]  # new tokens, tokens including them


@dataclass
class Case:
    dtype: torch.dtype
    head_dim: int
    block_size: int
    queries_per_kv: int
    num_kv_heads: int
    window: int | None
    softcap: float | None
    has_sinks: bool
    mix: str


AXES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float64, torch.float32, torch.bfloat16),
    "head_dim": (16, 40, 64),
    "block_size": (1, 3, 16),
    "queries_per_kv": (1, 4, 7),
    "num_kv_heads": (1, 2),
    "window": (None, 1, 5, 33),
    "softcap": (None, 50.0),
    "has_sinks": (False, True),
    "mix": (
        "mixed",
        "decode",
        "many first tokens",
        "prefill",
        "chunks that start mid-block",
        "block edges",
        "equal rows",
        "one padded group",
        "shared prefix",
        "one token",
    ),
}


def shapes_of(mix: str, block_size: int) -> list[Shape]:
    size = block_size
    return {
        "mixed": [(1, 132), (5, 18), (129, 163)],
        "decode": [(1, length) for length in (1, 2, 17, 31, 32, 33, 34, 70, 5, 16)],
        "many first tokens": [(1, 1)] * 40,
        "prefill": [(17, 17), (1, 1), (50, 50), (33, 33), (2, 2)],
        "chunks that start mid-block": [(size + 1, 3 * size + 2), (2 * size + 2, 4 * size + 3), (3, size // 2 + 3)],
        "block edges": [(q, n) for n in (size, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size) for q in (1, n)],
        "equal rows": [(4, 9), (4, 9), (4, 9)],
        "one padded group": [(3, 11), (4, 9), (3, 12)],
        "shared prefix": [(3, 4 * size + 3), (5, 4 * size + 6), (1, 4 * size + 1)],
        "one token": [(1, 1)],
    }[mix]


class Batch:
    """Sequences with keys and values of their own, laid out in a poisoned pool by loops."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.case = case
        self.shapes = [shape for shape in shapes_of(case.mix, case.block_size) if shape[0] <= shape[1]]
        size, heads, dim = case.block_size, case.num_kv_heads, case.head_dim
        needed = [-(-length // size) for _, length in self.shapes]
        self.null_block = sum(needed) + 7
        free = list(range(self.null_block))
        rng.shuffle(free)
        self.tables = [[free.pop() for _ in range(n)] for n in needed]
        self.states = [
            random_tensor(2, n, heads, dim, dtype=case.dtype, seed=i) for i, (_, n) in enumerate(self.shapes)
        ]
        if case.mix == "shared prefix":
            for table, states in zip(self.tables[1:], self.states[1:]):
                table[:3] = self.tables[0][:3]
                states[:, : 3 * size] = self.states[0][:, : 3 * size]
        self.layer = 1
        self.pool = nan_pool((self.null_block + 1, NUM_LAYERS, 2, heads, size, dim), case.dtype)
        self.pool[self.null_block] = 0
        for table in self.tables:
            self.pool[table] = 1e4  # behind a sequence's end lies anything finite: tokens that were cropped
        for table, states in zip(self.tables, self.states):
            for index in range(states.shape[1]):
                for part in (0, 1):
                    self.pool[table[index // size], self.layer, part, :, index % size] = states[part, index]
        num_tokens = sum(q for q, _ in self.shapes)
        num_heads = heads * case.queries_per_kv
        # As the model hands it over: [1, heads, T, head_dim], transposed.
        self.query = random_tensor(num_heads, num_tokens, dim, dtype=case.dtype, seed=99).transpose(0, 1)
        self.scale = 0.7 / math.sqrt(dim)
        self.sinks = random_tensor(num_heads, dtype=case.dtype, seed=5) * 2 if case.has_sinks else None

    def metadata(self) -> AttentionMetadata:
        query_lens, seq_lens = [q for q, _ in self.shapes], [n for _, n in self.shapes]
        return step_metadata(self.tables, query_lens, seq_lens, self.case.block_size, self.null_block, CPU)

    def attend(self, metadata: AttentionMetadata | None = None) -> Tensor:
        case = self.case
        return reference.paged_attention(
            self.query,
            self.pool,
            self.layer,
            (self.metadata() if metadata is None else metadata).groups,
            self.scale,
            sliding_window=case.window,
            softcap=case.softcap,
            sinks=self.sinks,
        )

    def expected(self) -> np.ndarray:
        """Token by token and head by head, in float64."""
        case = self.case
        query = self.query.double().numpy()
        output = np.full(query.shape, np.nan)
        row = 0
        for (query_len, seq_len), states in zip(self.shapes, self.states):
            keys, values = states.double().numpy()
            for position in range(seq_len - query_len, seq_len):
                first = 0 if case.window is None else max(0, position - case.window + 1)
                for head in range(query.shape[1]):
                    kv_head = head // case.queries_per_kv
                    scores = keys[first : position + 1, kv_head] @ query[row, head] * self.scale
                    if case.softcap is not None:
                        scores = case.softcap * np.tanh(scores / case.softcap)
                    top = scores.max()
                    weights = np.exp(scores - top)
                    total = weights.sum()
                    if self.sinks is not None:
                        total += math.exp(float(self.sinks[head]) - top)
                    output[row, head] = weights @ values[first : position + 1, kv_head] / total
                row += 1
        return output


PAIRWISE = pairwise(AXES)
_rng = random.Random(1)
ANY = [{name: _rng.choice(values) for name, values in AXES.items()} for _ in range(50)]


@pytest.mark.parametrize("choice", PAIRWISE + ANY, ids=describe)
def test_paged_attention(choice: dict[str, Any]) -> None:
    batch = Batch(Case(**choice))
    pool = batch.pool.clone()
    found = batch.attend()
    assert found.shape == batch.query.shape and found.dtype == batch.case.dtype
    assert not found.isnan().any(), "a NaN leaked, or a row was not written"
    assert rms_ratio(found, batch.expected()) < TOLERANCE[batch.case.dtype]
    assert same_bits(batch.pool, pool), "attention wrote into the pool"


def plain_case(**changes: Any) -> Case:
    settings: dict[str, Any] = {
        "dtype": torch.float64,
        "head_dim": 16,
        "block_size": 3,
        "queries_per_kv": 2,
        "num_kv_heads": 2,
        "window": None,
        "softcap": None,
        "has_sinks": False,
        "mix": "mixed",
    }
    return Case(**(settings | changes))


EXTRAS = [{}, {"softcap": 5.0}, {"has_sinks": True}, {"window": 5}, {"window": 5, "softcap": 5.0}]


@pytest.mark.parametrize("extra", EXTRAS[3:], ids=str)
@pytest.mark.parametrize("mix", ["mixed", "decode", "chunks that start mid-block"])
def test_blocks_wholly_behind_the_window_are_not_read(extra: dict[str, Any], mix: str) -> None:
    """A sliding layer frees them: whatever another sequence writes there, NaN included, is no concern of ours."""
    batch = Batch(plain_case(mix=mix, **extra))
    window = batch.case.window
    assert window is not None
    num_behind = 0
    for table, (query_len, seq_len) in zip(batch.tables, batch.shapes):
        behind = max(0, seq_len - query_len - (window - 1)) // batch.case.block_size
        batch.pool[table[:behind]] = float("nan")
        num_behind += behind
    assert num_behind > 0
    assert rms_ratio(batch.attend(), batch.expected()) < 1e-12


@pytest.mark.parametrize("mix", ["mixed", "equal rows", "one padded group"])
def test_one_metadata_serves_layers_of_different_kinds(mix: str) -> None:
    """Gemma: full and sliding layers in turn, all over one step's metadata."""
    metadata = Batch(plain_case(mix=mix)).metadata()
    for window, softcap in ((None, None), (5, None), (33, 7.0), (None, 7.0), (5, None)):
        for layer in (1, 0):
            batch = Batch(plain_case(mix=mix, window=window, softcap=softcap))
            batch.pool = batch.pool.roll(layer - batch.layer, dims=1)
            batch.layer = layer
            assert rms_ratio(batch.attend(metadata), batch.expected()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_a_pool_of_another_dtype_than_the_query(dtype: torch.dtype, extra: dict[str, Any]) -> None:
    """The pool's values are taken as they are; the arithmetic is the query's."""
    batch = Batch(plain_case(dtype=dtype, **extra))
    batch.query = batch.query.double()
    found = batch.attend()
    assert found.dtype == torch.float64
    assert rms_ratio(found, batch.expected()) < 1e-6


def test_a_long_context_in_half_precision_does_not_overflow() -> None:
    batch = Batch(plain_case(dtype=torch.float16))
    batch.query = batch.query * 60  # scores of hundreds
    assert bool(batch.attend().isfinite().all())
