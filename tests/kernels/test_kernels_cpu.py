"""The kernels in C against the plain-torch truth in float64, and what happens where they can't be had.

The pool is poisoned: NaN and infinities wherever no token of a sequence of the step lies.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hf_paged
from helpers.kernel_cases import (
    INSTRUCTIONS_HERE,
    LAYOUTS,
    describe,
    pairwise,
    random_tensor,
    same_bits,
    step_metadata,
    strided,
)
from helpers.kernel_pools import check_written
from helpers.models import build, random_ids
from helpers.pairs import logged_messages
from hf_paged.attention.backends.cpu import CPUBackend
from hf_paged.attention.backends.registry import choose
from hf_paged.attention.backends.torch import TorchBackend
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import c_compiler, cpu, cpu_layers, cpu_linear, reference

CPU = torch.device("cpu")
NUM_LAYERS = 2
F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 1e-6, BF16: 4e-3}  # norm of the error over norm of the truth; bfloat16 rounds its results
NAN, INF = float("nan"), float("inf")


def kernels_for(dtype: torch.dtype, head_dim: int) -> cpu.CPUKernels:
    loaded = cpu.load(dtype, head_dim)
    assert isinstance(loaded, cpu.CPUKernels), loaded
    return loaded


def decode(
    query: Tensor,
    output: Tensor,
    pool: Tensor,
    layer: int,
    metadata: AttentionMetadata,
    *settings: Any,
    together: cpu.Together | None = None,
    **more: Any,
) -> None:
    """Attends to the sequences that the batch begins with."""
    kernels = kernels_for(query.dtype, query.shape[2])
    step, num_tokens = cpu.StepCalls(kernels, pool), len(metadata.slot_mapping)
    given = metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, num_tokens, metadata.max_decode_len
    tiles = metadata.query_tiles(kernels.tokens_at_once(query.shape[1] // pool.shape[3]), 0, metadata.num_decodes)
    step.attend(query, output, layer, step.rows(*given, together or tiles), *settings, **more)


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-300))


# Writing


def check_write(key: Tensor, value: Tensor, slots: list[int], block_size: int, layer: int = 1) -> None:
    def write(key: Tensor, value: Tensor, pool: Tensor, layer: int, mapping: Tensor) -> None:
        cpu.StepCalls(kernels_for(key.dtype, key.shape[2]), pool).write(key, value, layer, mapping)

    check_written(write, key, value, slots, layer, block_size, key.dtype, CPU)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("every other", "dims swapped")])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_write_takes_any_strides_of_tokens_and_heads(layout: str, dtype: torch.dtype, block_size: int) -> None:
    for num_heads, head_dim in ((1, 16), (3, 80)):
        slots = random.Random(block_size).sample(range(6 * block_size), min(5, 6 * block_size))
        key = strided(layout, len(slots), num_heads, head_dim, dtype, seed=1)
        value = strided(layout, len(slots), num_heads, head_dim, dtype, seed=2)
        for layer in range(NUM_LAYERS):
            check_write(key, value, slots, block_size, layer)
        check_write(strided("contiguous", len(slots), num_heads, head_dim, dtype, seed=3), value, slots, block_size)


@pytest.mark.parametrize("slots", [[-1, 7, -1, 0, 11], [-1, -1], [-5, 3], [-(2**40), -1, 2], [2, -1], []], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_write_skips_slots_below_zero(slots: list[int], dtype: torch.dtype) -> None:
    key, value = (random_tensor(len(slots), 2, 16, dtype=dtype, seed=seed) for seed in (1, 2))
    check_write(key, value, slots, 3)


def test_write_moves_bits() -> None:
    """NaN with its payload, infinities, negative zeros and denormals."""
    bits = torch.tensor([0x7FC0, 0x7F81, -1, 0x7F80, -32768, 1, -32767, 0x3F80], dtype=torch.int16)
    key = bits.view(BF16).repeat(2)[None, None, :]
    check_write(key, -key, [5], 3)
    check_write(key.float(), -key.float(), [5], 3)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_write_of_a_long_prompt(num_threads: int) -> None:
    """Which is shared between threads."""
    slots = [slot if slot % 11 else -1 for slot in random.Random(0).sample(range(600), 500)]
    key, value = (strided("transposed", 500, 2, 16, F32, seed=seed) for seed in (1, 2))
    with threads(num_threads):
        check_write(key, value, slots, 16)


class threads:
    """Within it torch, and with it the kernels, uses so many."""

    def __init__(self, number: int) -> None:
        self._number, self._outer = number, torch.get_num_threads()

    def __enter__(self) -> None:
        torch.set_num_threads(self._number)

    def __exit__(self, *_: Any) -> None:
        torch.set_num_threads(self._outer)


# Decoding

AXES: dict[str, tuple[Any, ...]] = {
    "dtype": (F32, BF16),
    "head_dim": (16, 5, 72, 80, 100, 256),
    "block_size": (1, 3, 16, 32),
    "queries_per_kv": (1, 2, 7, 12),
    "num_kv_heads": (1, 3, 4),
    "window": (None, 1, 5, 33),
    "softcap": (None, 50.0, 0.5),
    "sinks": (None, "float32", "the model's"),
    "bias": (None, 1, 20),  # distances
    "layout": ("contiguous", "transposed", "part of qkv"),
    "mix": (
        "lengths",
        "edges",
        "mixed",
        "late one-token chunks",
        "many first tokens",
        "one token",
        "shared prefix",
        "samples",
    ),
}
PAIRWISE = pairwise(AXES)
_rng = random.Random(2)
ANY = [{name: _rng.choice(values) for name, values in AXES.items()} for _ in range(20)]


def shapes_of(mix: str, size: int) -> list[tuple[int, int]]:
    """New tokens, and tokens including them."""
    return {
        "lengths": [(1, n) for n in (1, 2, 15, 16, 17, 31, 32, 33, 34, 70, 5, 133)],
        "edges": [(1, n) for n in (size, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size) if n],
        "mixed": [(1, 40), (1, 1), (5, 18), (33, 47), (4, 4)],
        "late one-token chunks": [(1, 9), (3, 7), (1, 12), (1, 1), (2, 2)],
        "many first tokens": [(1, 1)] * 40,
        "one token": [(1, 1)],
        "shared prefix": [(1, 4 * size + 3), (1, 4 * size + 6), (1, 4 * size + 1)],
        "prompts": [(1, 21), (33, 47), (4, 4), (17, 90), (70, 70), (3, 40)],
        "samples": [(1, 4 * size + n) for n in (3, 1, 40, 2, 2, 6, 17, 9, 1, 5, 33, 2, 2, 3, 1, 1, 7, 4, 2)],
    }[mix]


class Batch:
    """Sequences in a poisoned pool, and the same pool with zeros for poison, which the truth can read."""

    def __init__(self, **choice: Any) -> None:
        settings: dict[str, Any] = {name: values[0] for name, values in AXES.items()} | {"num_kv_heads": 2} | choice
        self.dtype, self.size, self.window = settings["dtype"], settings["block_size"], settings["window"]
        self.softcap, dim, kv_heads = settings["softcap"], settings["head_dim"], settings["num_kv_heads"]
        self.shapes = shapes_of(settings["mix"], self.size)
        needed = [-(-length // self.size) for _, length in self.shapes]
        self.null_block = sum(needed) + 3
        free = random.Random(0).sample(range(self.null_block), self.null_block)
        self.tables = [[free.pop() for _ in range(n)] for n in needed]
        if settings["mix"] in ("shared prefix", "samples"):
            for table in self.tables[1:]:
                table[:4] = self.tables[0][:4]
        shape = (self.null_block + 1, NUM_LAYERS, 2, kv_heads, self.size, dim)
        values = random_tensor(*shape, dtype=self.dtype, seed=1)
        is_own = torch.zeros(self.null_block + 1, self.size, dtype=torch.bool)
        for table, (_, length) in zip(self.tables, self.shapes):
            for index in range(length):
                is_own[table[index // self.size], index % self.size] = True
        self.is_own = is_own[:, None, None, None, :, None]
        self.layer = 1
        self.clean = torch.where(self.is_own, values, torch.zeros((), dtype=self.dtype))
        num_tokens, num_heads = sum(q for q, _ in self.shapes), kv_heads * settings["queries_per_kv"]
        self.query = strided(settings["layout"], num_tokens, num_heads, dim, self.dtype, seed=9)
        self.scale = 1.3 * dim**-0.5
        kind = settings["sinks"]
        self.sinks = None if kind is None else random_tensor(num_heads, dtype=F32 if kind == "float32" else self.dtype)
        distances = settings["bias"]
        self.bias = None if distances is None else random_tensor(num_heads, distances, dtype=F32, seed=6)
        self.dim = dim

    @property
    def num_decodes(self) -> int:
        return next((i for i, (q, _) in enumerate(self.shapes) if q > 1), len(self.shapes))

    def metadata(self, only_decodes: bool = False) -> AttentionMetadata:
        shapes = self.shapes[: self.num_decodes] if only_decodes else self.shapes
        tables = self.tables[: len(shapes)]
        return step_metadata(tables, [q for q, _ in shapes], [n for _, n in shapes], self.size, self.null_block, CPU)

    def params(self, layer: int) -> AttentionParams:
        return AttentionParams(layer, self.scale, self.window, self.softcap, self.sinks, bias=self.bias)

    def expected(self, metadata: AttentionMetadata | None = None) -> Tensor:
        """In float64."""
        return reference.paged_attention(
            self.query.double()[: len((metadata or self.metadata()).slot_mapping)],
            self.clean.double(),
            self.layer,
            (metadata or self.metadata()).groups,
            self.scale,
            self.window,
            self.softcap,
            None if self.sinks is None else self.sinks.double(),
            bias=self.bias,
        )

    def together(self, most: int) -> cpu.Together:
        """The decode rows whose first four blocks are the same, all but one of them; then the others."""
        num = len(self.shapes) if self.shapes == shapes_of("samples", self.size) else 0
        items = [(first, min(most, num - 1 - first), 4 * self.size - 1) for first in range(0, num - 1, most)]
        items += [(first, 1, 0) for first in range(max(num - 1, 0), self.num_decodes)]
        order = torch.tensor(random.Random(4).sample(range(self.num_decodes), self.num_decodes), dtype=torch.int32)
        return cpu.Together(order, torch.tensor(items, dtype=torch.int32).view(-1, 3), most)

    def decode(
        self, pool: Tensor, metadata: AttentionMetadata | None = None, together: cpu.Together | None = None
    ) -> Tensor:
        """Outputs of all tokens, a sentinel where nothing was written."""
        output = torch.full(self.query.shape, 77.0, dtype=self.dtype)
        settings = self.scale, self.window, self.softcap, self.sinks, self.bias
        decode(self.query, output, pool, self.layer, metadata or self.metadata(), *settings, together=together)
        return output


@pytest.mark.parametrize("choice", PAIRWISE + ANY, ids=describe)
def test_decode(choice: dict[str, Any]) -> None:
    batch = Batch(**choice)
    poison = torch.where(torch.arange(batch.clean.numel()) % 3 == 0, INF, NAN).view(batch.clean.shape).to(batch.dtype)
    pool = torch.where(batch.is_own, batch.clean, poison)
    before = pool.clone()
    found = batch.decode(pool)
    num = batch.num_decodes
    assert bool((found[num:] == 77.0).all()), "rows that are not its own were written"
    assert bool(found[:num].isfinite().all()), "what no sequence owns has leaked, or a row was not written"
    if num:
        assert error_of(found[:num], batch.expected(batch.metadata(only_decodes=True))) < TOLERANCE[batch.dtype]
    assert same_bits(pool, before), "attention wrote into the pool"


@pytest.mark.parametrize("choice", PAIRWISE + ANY, ids=describe)
def test_decode_together(choice: dict[str, Any]) -> None:
    """Sequences that share their first tokens, which end within a block: any number of them at once."""
    batch = Batch(**{**choice, "mix": "samples"})
    poison = torch.full_like(batch.clean, NAN)
    pool = torch.where(batch.is_own, batch.clean, poison)
    _, most = kernels_for(batch.dtype, batch.dim).together(batch.query.shape[1] // pool.shape[3])
    expected, alone = batch.expected(), batch.decode(pool)
    numbers = {2, 5, most} & set(range(2, most + 1))
    if not numbers:
        pytest.skip(f"a tile has as many rows as {most} sequences have query heads: none is computed with another")
    for number in numbers:
        found = batch.decode(pool, together=batch.together(number))
        assert error_of(found, expected) < TOLERANCE[batch.dtype]
        for row in range(len(found)):
            assert error_of(found[row], expected[row]) < TOLERANCE[batch.dtype] * 4, (number, row)
        assert same_bits(found, alone), "bits depend on what a row was read together with"


@pytest.mark.parametrize("choice", PAIRWISE + ANY, ids=describe)
def test_prompt(choice: dict[str, Any]) -> None:
    """Whole prompts and chunks, token by token; what is no prompt's stays as it is."""
    batch = Batch(**{**choice, "mix": "prompts"})
    pool = torch.where(batch.is_own, batch.clean, torch.full_like(batch.clean, NAN))
    kernels, metadata, expected = kernels_for(batch.dtype, batch.dim), batch.metadata(), batch.expected()
    at_once = kernels.tokens_at_once(batch.query.shape[1] // pool.shape[3])
    found = torch.full(batch.query.shape, 77.0, dtype=batch.dtype)
    numbers = len(batch.query), max(length for _, length in batch.shapes)
    given = (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, *numbers)
    settings = (batch.scale, batch.window, batch.softcap, batch.sinks, batch.bias)
    step = cpu.StepCalls(kernels, pool)
    given = batch.layer, step.rows(*given, metadata.query_tiles(at_once)), *settings
    step.attend(batch.query, found, *given)
    with threads(16):
        step.attend(batch.query, with_many := found.clone(), *given)
    assert same_bits(found, with_many), "bits depend on how many tiles read the same keys"
    assert bool((found[:1] == 77.0).all())
    assert error_of(found[1:], expected[1:]) < TOLERANCE[batch.dtype]
    for token in range(1, len(found)):
        assert error_of(found[token], expected[token]) < TOLERANCE[batch.dtype] * 4, token
    tokens = metadata.of_tokens(np.arange(len(found)))
    one_by_one = torch.full(batch.query.shape, 77.0, dtype=batch.dtype)
    decode(batch.query, one_by_one, pool, batch.layer, tokens, *settings)
    assert same_bits(found[1:], one_by_one[1:]), "bits depend on what a row was computed beside"


@pytest.mark.parametrize("instructions", INSTRUCTIONS_HERE)
def test_all_instructions(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, rows read together and prompts, of bfloat16: with products of pairs, and without."""
    monkeypatch.setenv("CC", "gcc -O1")  # compiles in less time
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # that is one of these
    monkeypatch.setattr(cpu, "load", cache(cpu.load.__wrapped__))
    choice = {"dtype": BF16, "head_dim": 72, "queries_per_kv": 2, "sinks": "the model's", "block_size": 16}
    for test in (test_decode, test_decode_together, test_prompt):
        test(choice)


@pytest.mark.parametrize("mix", ["mixed", "late one-token chunks", "lengths", "one token"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    "extra", [{}, {"window": 5}, {"softcap": 0.5, "bias": 20}, {"sinks": "the model's", "window": 33}], ids=str
)
def test_a_step_of_both_backends(mix: str, dtype: torch.dtype, extra: dict[str, Any]) -> None:
    """Writes, then attention of decodes and prompts in one; the queries as models give them."""
    batch = Batch(mix=mix, dtype=dtype, block_size=3, queries_per_kv=2, layout="transposed", **extra)
    metadata = batch.metadata()
    num_tokens = len(batch.query)
    key, value = (strided("transposed", num_tokens, 2, batch.dim, dtype, seed=seed) for seed in (4, 5))
    pools, results = [], []
    for make in (TorchBackend, CPUBackend):
        pool = batch.clean.clone()
        step = make(pool).step(batch.metadata())
        step.write(key, value, 1)
        results.append(step.attend(batch.query, batch.params(1)))
        pools.append(pool)
    assert same_bits(*pools)
    batch.clean = pools[0]
    expected = batch.expected(metadata)
    assert results[1].dtype == dtype and results[1].shape == batch.query.shape
    assert error_of(results[1], expected) < TOLERANCE[dtype] * 2
    # Row by row, so that a short one can't hide behind the others.
    for row in range(num_tokens):
        assert error_of(results[1][row], expected[row]) < TOLERANCE[dtype] * 4, row
    assert results[1].isfinite().all()


def test_the_output_argument_of_the_reference() -> None:
    """Breaks if rows of decodes are computed again, or those of prompts are not."""
    for mix in ("mixed", "late one-token chunks"):
        batch = Batch(mix=mix, block_size=3)
        output = torch.full(batch.query.shape, 77.0)
        metadata = batch.metadata()
        found = reference.paged_attention(
            batch.query, batch.clean, 1, metadata.prefill_groups, batch.scale, output=output
        )
        num = metadata.num_decodes
        assert found is output and num > 0
        assert bool((output[:num] == 77.0).all())
        assert error_of(output[num:], batch.expected()[num:]) < 1e-6


@pytest.mark.parametrize(("size", "others"), [(16, {}), (1, {"window": 33}), (64, {"head_dim": 80})])
@pytest.mark.parametrize("num_kv_heads", [3, 4])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_threads_change_nothing(dtype: torch.dtype, num_kv_heads: int, size: int, others: dict[str, Any]) -> None:
    """Nor do the heads that one of them reads at once: with AVX2 two of an even number, if threads are few."""
    batch = Batch(mix="lengths", dtype=dtype, num_kv_heads=num_kv_heads, queries_per_kv=7, block_size=size, **others)
    with threads(1):
        alone = batch.decode(batch.clean)
    for number in (2, 2, 2, 2, 2, 16):
        with threads(number):
            assert same_bits(batch.decode(batch.clean), alone)


def test_sequences_do_not_depend_on_their_neighbours() -> None:
    batch = Batch(mix="lengths", block_size=3)
    together = batch.decode(batch.clean)
    for row, (table, (_, length)) in enumerate(zip(batch.tables, batch.shapes)):
        metadata = step_metadata([table], [1], [length], 3, batch.null_block, CPU)
        output = torch.empty(1, *batch.query.shape[1:])
        query = batch.query[row : row + 1]
        decode(query, output, batch.clean, 1, metadata, batch.scale)
        assert same_bits(output[0], together[row])


# Numbers out of the ordinary


def decode_pairs(scores: Tensor, **arguments: Any) -> Tensor:
    """Outputs for rows of scores `[S, n]`, where the values are unit vectors: the weights, `[S, n]`."""
    num_seqs, length = scores.shape
    pool = torch.zeros(num_seqs + 1, 1, 2, 1, length, 16, dtype=F32)
    pool[:-1, 0, 0, 0, :, 0] = scores
    pool[:-1, 0, 1, 0] = torch.eye(length, 16)
    query = torch.zeros(num_seqs, 1, 16)
    query[:, 0, 0] = 1
    metadata = step_metadata([[i] for i in range(num_seqs)], [1] * num_seqs, [length] * num_seqs, length, num_seqs, CPU)
    output = torch.full_like(query, 77.0)
    decode(query, output, pool, 0, metadata, 1.0, **arguments)
    return output[:, 0, :length]


def test_the_exponential() -> None:
    """To the rounding of float32, down to where a weight no longer matters."""
    low = torch.cat([-torch.linspace(0, 87, 5000), -torch.logspace(-9, 0, 200)])
    found = decode_pairs(torch.stack([torch.zeros_like(low), low], dim=1)).double()
    expected = torch.stack([torch.zeros_like(low), low], dim=1).double().softmax(dim=1)
    error = (found - expected).abs() / expected
    near = low > -20
    assert float(error[near].max()) < 5e-7
    assert float(error[~near].max()) < 1e-5


def test_rounding_to_bfloat16() -> None:
    """To the nearest, ties to even, as torch does: means of neighbours are all ties."""
    bits = torch.arange(0x3F80 - 40, 0x3F80 + 40, dtype=torch.int16)
    first = torch.cat([bits, bits - 0x8000, torch.tensor([0, 1, 0x7E00, 0x7E7E], dtype=torch.int16)])
    one, other = first.view(BF16), (first + 1).view(BF16)
    pool = torch.zeros(len(first) + 1, 1, 2, 1, 2, 16, dtype=BF16)
    pool[:-1, 0, 1, 0] = torch.stack([one, other], dim=1)[..., None]
    num = len(first)
    metadata = step_metadata([[i] for i in range(num)], [1] * num, [2] * num, 2, num, CPU)
    output = torch.empty(num, 1, 16, dtype=BF16)
    decode(torch.ones_like(output), output, pool, 0, metadata, 1.0)
    expected = ((one.double() + other.double()) / 2).float().bfloat16()
    is_normal = expected.abs() > 1e-37
    assert torch.equal(output[is_normal, 0, 0], expected[is_normal])


@pytest.mark.parametrize("size", [50.0, 90.0, 1e4, 1e15, 1e30, 3e38])
def test_huge_scores(size: float) -> None:
    base = torch.tensor([[1, 0, -1], [-1, 0, 1], [0, 1, -1], [-1, -1, -1], [1, 1, -1], [0, -1, 0.5]])
    found = decode_pairs(base * size)
    torch.testing.assert_close(found, (base * size).softmax(dim=1), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("at", ["first", "middle", "last"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_that_grow_and_shrink_over_tiles(block_size: int, at: str, sign: float) -> None:
    """The running maximum jumps by more than an exponential can say."""
    batch = Batch(mix="lengths", block_size=block_size)
    where = {"first": 0, "middle": 0.5, "last": 1}[at]
    for table, (_, length) in zip(batch.tables, batch.shapes):
        index = int(where * (length - 1))
        batch.clean[table[index // block_size], 1, 0, :, index % block_size] *= sign * 500
    # Scores of a thousand are rounded to a ten thousandth by float32.
    assert error_of(batch.decode(batch.clean), batch.expected()) < 1e-4


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_score_of_minus_infinity_is_no_weight(block_size: int) -> None:
    """As in plain torch, wherever the token lies: the first ones too."""
    length = 40
    for masked in ([0], [20], [39], list(range(16)), list(range(39))):
        pool = random_tensor(length, 1, 2, 1, block_size, 16, dtype=F32)
        query = torch.ones(1, 1, 16)
        for index in masked:
            pool[index // block_size, 0, 0, 0, index % block_size] = -3e38  # finite; the sum of sixteen is not
        metadata = step_metadata([list(range(length))], [1], [length], block_size, 0, CPU)
        results = []
        for step in (TorchBackend(pool).step(metadata), CPUBackend(pool).step(metadata)):
            results.append(step.attend(query, AttentionParams(0, 1.0)))
        assert results[0].isfinite().all()
        assert not results[1].isnan().any(), f"masked {masked}"
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", ["key", "value", "query", "infinite key"])
@pytest.mark.parametrize("extra", [{}, {"softcap": 5.0}, {"sinks": "float32"}, {"window": 5}], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_nan_stays_in_its_sequence_and_shows(kind: str, extra: dict[str, Any], dtype: torch.dtype) -> None:
    for block_size in (1, 3, 32):
        batch = Batch(mix="lengths", block_size=block_size, dtype=dtype, **extra)
        clean = batch.decode(batch.clean)
        for row, offset in ((5, 0), (9, 2), (11, 4)):  # lengths 31, 70 and 133
            pool, query = batch.clean.clone(), batch.query.clone()
            table, index = batch.tables[row], batch.shapes[row][1] - 1 - offset
            if kind == "query":
                query[row, 0, 3] = NAN
            else:
                number = NAN if kind != "infinite key" else INF * float(batch.query[row, 0, 2].sign())
                pool[table[index // block_size], 1, int(kind == "value"), 0, index % block_size, 2] = number
            own = batch.query
            batch.query = query
            found = batch.decode(pool)
            batch.query = own
            if kind == "infinite key" and "softcap" in extra:
                assert found[row, 0].isfinite().all()
            elif kind == "value":
                assert found[row, 0, 2].isnan() and not found[row, 0, 3].isnan()
            else:
                assert found[row, 0].isnan().all()
            others = torch.ones(len(found), found.shape[1], dtype=torch.bool)
            others[row, 0] = False  # the second key/value head of the row is another matter
            assert same_bits(found[others], clean[others])


def test_sinks() -> None:
    scores = torch.zeros(1, 2)
    for sink, total in ((-1e4, 2.0), (0.0, 3.0), (-INF, 2.0), (float(torch.tensor(2.0).log()), 4.0)):
        found = decode_pairs(scores, sinks=torch.tensor([sink]))
        torch.testing.assert_close(found, torch.full((1, 2), 1 / total))
    assert float(decode_pairs(scores, sinks=torch.tensor([1e4])).abs().max()) < 1e-30
    strided_sinks = torch.tensor([0.0, 9.0])[::2].requires_grad_()
    torch.testing.assert_close(decode_pairs(scores, sinks=strided_sinks), torch.full((1, 2), 1 / 3))


# When plain torch steps in


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were called, and took what they were given."""
    for dtype in (F32, BF16):
        cpu.load(dtype, 16, None, dtype)  # which tries them
    names: list[str] = []

    attend, write = cpu.StepCalls.attend, cpu.StepCalls.write

    def attended(self: cpu.StepCalls, query: Tensor, output: Tensor, layer: int, rows: cpu.Rows, *args: Any) -> None:
        attend(self, query, output, layer, rows, *args)
        names.append("together" if rows.together else "attend")

    def written(self: cpu.StepCalls, *args: Any) -> None:
        write(self, *args)
        names.append("write")

    monkeypatch.setattr(cpu.StepCalls, "attend", attended)
    monkeypatch.setattr(cpu.StepCalls, "write", written)
    return names


def both_steps(batch: Batch) -> list[Any]:
    return [
        made.step(batch.metadata()) for made in (TorchBackend(batch.clean.clone()), CPUBackend(batch.clean.clone()))
    ]


def prompts_alone(**choice: Any) -> Batch:
    batch = Batch(mix="mixed", **choice)
    batch.shapes, batch.tables, batch.query = batch.shapes[2:], batch.tables[2:], batch.query[2:]
    return batch


def test_the_kernels_are_called(calls: list[str]) -> None:
    batch = Batch(mix="mixed")
    _, step = both_steps(batch)
    step.write(batch.query[:, :2], batch.query[:, :2], 0)
    step.attend(batch.query, AttentionParams(1, batch.scale))
    assert calls == ["write", "attend"], "decodes and prompts in one call"


def test_a_step_of_prompts_alone(calls: list[str]) -> None:
    batch = prompts_alone()
    _, step = both_steps(batch)
    assert error_of(step.attend(batch.query, AttentionParams(1, batch.scale)), batch.expected()) < 1e-6
    assert calls == ["attend"]


def test_prompts_that_torch_is_faster_at(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    batch = prompts_alone(dtype=BF16)
    plain, step = both_steps(batch)
    calls.clear()  # of trials, where kernels are loaded for the first time
    assert same_bits(
        step.attend(batch.query, AttentionParams(1, batch.scale)),
        plain.attend(batch.query, AttentionParams(1, batch.scale)),
    )
    assert not calls


@pytest.mark.parametrize("mix", ["lengths", "mixed"])
def test_autocast(mix: str, calls: list[str]) -> None:
    batch = Batch(mix=mix)
    plain, step = both_steps(batch)
    with torch.autocast("cpu", dtype=BF16):
        expected, found = (one.attend(batch.query, AttentionParams(1, batch.scale)) for one in (plain, step))
    assert found.dtype == expected.dtype == BF16 and same_bits(found, expected)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, BF16], ids=str)
def test_states_of_another_dtype(dtype: torch.dtype, calls: list[str]) -> None:
    batch = Batch(mix="lengths")
    plain, step = both_steps(batch)
    query = batch.query.to(dtype)
    for one in (plain, step):
        one.write(query[:, :2], query[:, :2], 1)
    expected, found = (one.attend(query, AttentionParams(1, batch.scale)) for one in (plain, step))
    assert found.dtype == dtype and same_bits(found, expected)
    assert not calls


@pytest.mark.parametrize("layout", ["every other", "dims swapped"])
def test_heads_that_are_not_contiguous(layout: str, calls: list[str]) -> None:
    batch = Batch(mix="mixed")
    plain, step = both_steps(batch)
    query = strided(layout, len(batch.query), 2, 16, F32, seed=3)
    value = strided("contiguous", len(batch.query), 2, 16, F32, seed=4)
    for one in (plain, step):
        one.write(query, value, 1)
        one.write(value, query, 0)
    for layer in (0, 1):
        assert same_bits(*(one.attend(query, AttentionParams(layer, batch.scale)) for one in (plain, step)))
    assert not calls


def test_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.zeros(2, 1, 2, 1, 4, 16)
    for name in ("auto", "cpu"):
        assert choose(name, pool, F32).name == "cpu"
        assert choose(name, pool.bfloat16(), BF16).name == "cpu"
        assert choose(name, pool.to(torch.float8_e4m3fn), BF16).name == "cpu"
    assert choose("torch", pool, F32).name == "torch"
    refused = [
        (pool, BF16, "the model's own dtype or of 8 bits.*float32"),
        (pool.half(), torch.float16, "float16"),
        (pool.double(), torch.float64, "float64"),
        (torch.zeros(2, 1, 2, 1, 4, 513), F32, "head dims up to 512.*513"),
        (pool.to("meta"), F32, "on meta"),
    ]
    for given, dtype, reason in refused:
        with pytest.raises(
            ValueError, match=f'^attention_backend="cpu" .*{reason.replace("the model", "(the )?model")}'
        ):
            choose("cpu", given, dtype)
        assert choose("auto", given, dtype).name == "torch"


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's mistake costs speed, not tokens."""
    attend, write = cpu.StepCalls.attend, cpu.StepCalls.write

    def wrong_decode(self: Any, query: Tensor, output: Tensor, *args: Any) -> None:
        attend(self, query, output, *args)
        output[0, 1] *= -1

    def wrong_write(self: Any, key: Tensor, value: Tensor, layer: int, slots: Tensor) -> None:
        write(self, key + 1, value, layer, slots)

    for dtype in (F32, BF16):
        with monkeypatch.context() as patch:
            patch.setattr(cpu.StepCalls, "attend", wrong_decode)
            assert "wrong results" in str(cpu.load.__wrapped__(dtype, 16))
        with monkeypatch.context() as patch:
            patch.setattr(cpu.StepCalls, "write", wrong_write)
            assert "wrong results" in str(cpu.load.__wrapped__(dtype, 16))


@pytest.mark.parametrize("scope", [torch.inference_mode, torch.no_grad, torch.enable_grad], ids=lambda f: f.__name__)
def test_loading_in_any_mode(scope: Callable[[], Any]) -> None:
    with scope(), torch.autocast("cpu", dtype=BF16), torch.device("meta"):
        assert isinstance(cpu.load.__wrapped__(F32, 16), cpu.CPUKernels)


# Where there is nothing to compile with


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing has been compiled or loaded yet; what is, is compiled in less time than elsewhere."""
    folder = tmp_path / "cache"
    if "CC" not in os.environ:
        monkeypatch.setenv("CC", "gcc -O0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for load in (cpu.load, cpu_layers.load, c_compiler._temporary_directory):
        load.cache_clear()
    yield folder
    for load in (cpu.load, cpu_layers.load, c_compiler._temporary_directory):
        load.cache_clear()


def compiled(dtype: torch.dtype, head_dim: int) -> Path:
    """The library for such a pool, which another process has made: here it is not loaded."""
    results = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=_compile, args=(dtype, head_dim, results))
    process.start()
    process.join(60)
    return Path(results.get())


def _compile(dtype: torch.dtype, head_dim: int, results: Any) -> None:
    try:
        constants = cpu.constants(dtype, head_dim)
        results.put(c_compiler.library(cpu._SOURCE, cpu.FUNCTIONS, **constants)._name)
    except BaseException as error:
        results.put(repr(error))


def compiler(folder: Path, script: bytes) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "my-cc"
    path.write_bytes(b"#!/bin/sh\n" + script)
    path.chmod(0o755)
    return str(path)


BROKEN: dict[str, tuple[bytes | None, str]] = {
    "none": (None, "there is no C compiler '/nonexistent/cc': install gcc or clang, or name one in CC"),
    "errors": (b"echo no such instruction >&2; exit 1\n", "does not compile here: no such instruction"),
    "errors in another encoding": (
        b"printf 'Schl\\344gt fehl' >&2; exit 1\n",
        "does not compile here: .*Schl.*gt fehl",
    ),
    "a crash": (b"kill -9 $$\n", "compile"),
    "silence": (b"exit 0\n", "can't be compiled here"),
    "no library": (
        b'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"\n',
        "can't be compiled here .*(invalid ELF header|too short)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_without_a_compiler(name: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch does the work; who asked for the kernels is told why there are none."""
    script, reason = BROKEN[name]
    monkeypatch.setenv("CC", "/nonexistent/cc" if script is None else compiler(tmp_path / "bin", script))
    pool = torch.zeros(2, 1, 2, 1, 4, 16)
    assert choose("auto", pool, F32).name == "torch"
    with pytest.raises(ValueError, match=f'(?s)^attention_backend="cpu" .*{reason}.*; use "torch".* or "auto"$'):
        choose("cpu", pool, F32)
    left = sorted(path.name for path in empty_cache.rglob("*") if path.is_file() or path.name.startswith("tmp"))
    assert name == "no library" or not left


def test_a_compiler_that_hangs(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path / "bin", b"exec sleep 60\n"))
    monkeypatch.setattr(c_compiler, "COMPILE_SECONDS", 0.2)
    assert "TimeoutExpired" in str(cpu.load(F32, 16))


@pytest.mark.parametrize(
    ("folder", "script", "cc"),
    [
        ("my bin", b'[ "$1" = -DSOMETHING ] && exec gcc "$@"\nexit 1\n', "'{}' -DSOMETHING -O0"),
        ("bin", b'printf "Warnung: \\344\\n" >&2\nexec gcc "$@"\n', "{} -O0"),
    ],
    ids=["arguments, as of ccache, and a path in quotes", "warnings in another encoding"],
)
def test_other_compilers(
    folder: str, script: bytes, cc: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", cc.format(compiler(tmp_path / folder, script)))
    assert isinstance(cpu.load(F32, 16), cpu.CPUKernels)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="its instructions are others")
def test_a_compiler_that_knows_no_products_of_pairs(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would break: one some years old, by which all of bfloat16 would be torch's."""
    caplog.set_level("INFO")
    script = b'for word; do [ "$word" = -mavx512bf16 ] && echo what is $word? >&2 && exit 1; done; exec gcc "$@" -O0\n'
    monkeypatch.setenv("CC", compiler(tmp_path / "bin", script))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert isinstance(cpu.load(BF16, 16), cpu.CPUKernels)
    assert isinstance(cpu_linear.load.__wrapped__(BF16), cpu_linear.CPULinear)
    assert "cpu.c is compiled without products of pairs: what is -mavx512bf16?" in caplog.text
    assert "plain torch runs in place" not in caplog.text


def test_a_cc_that_no_shell_would_take(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", '"gcc')
    assert choose("auto", torch.zeros(2, 1, 2, 1, 4, 16), F32).name == "torch"


def _is_writable(path: Any, mode: int) -> bool:
    return False


@pytest.mark.parametrize("how", ["a file is in the way", "read-only", "no home"])
def test_no_place_for_a_cache(how: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels last as long as the process; nothing fails."""
    if how == "a file is in the way":
        empty_cache.write_text("")
    elif how == "read-only":
        monkeypatch.setattr(c_compiler.os, "access", _is_writable)
    else:  # a container's user without an entry in /etc/passwd
        import pwd

        def getpwuid(uid: int) -> Any:
            raise KeyError(uid)

        monkeypatch.setattr(pwd, "getpwuid", getpwuid)
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
    assert isinstance(cpu.load(F32, 16), cpu.CPUKernels)
    folder = c_compiler._temporary_folder()
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    assert not empty_cache.is_dir() or not list(empty_cache.rglob("*.so"))
    library = next(folder.iterdir())
    written = library.stat().st_mtime_ns
    assert isinstance(cpu.load.__wrapped__(F32, 16), cpu.CPUKernels)
    assert library.stat().st_mtime_ns == written, "compiled again"
    library.unlink()
    folder.rmdir()


def test_compiled_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(cpu.load(F32, 16), cpu.CPUKernels)
    cpu.load.cache_clear()

    def run(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(c_compiler.subprocess, "run", run)
    assert isinstance(cpu.load(F32, 16), cpu.CPUKernels)
    assert [path.suffix for path in (empty_cache / "hf_paged").iterdir()] == [".so"]


def test_what_a_library_depends_on(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor, another compiler, another type: another file."""
    paths = [compiled(F32, 16), compiled(BF16, 16), compiled(F32, 17)]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    paths.append(compiled(F32, 16))
    monkeypatch.setenv("CC", "gcc -O1")
    paths.append(compiled(F32, 16))
    assert len(set(paths)) == len(paths)
    assert all(path.exists() and path.stat().st_mode & 0o077 == 0 for path in paths)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "a byte more": lambda content: content + b"\0",
    "zeros from half on": lambda content: content[: len(content) // 2].ljust(len(content), b"\0"),
    "one bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_made_again(damage: str, empty_cache: Path) -> None:
    """A full disk or a crash left half of it: read where it ends, it would end the process."""
    path = compiled(F32, 16)
    content = path.read_bytes()
    path.write_bytes(DAMAGE[damage](content))
    assert isinstance(cpu.load(F32, 16), cpu.CPUKernels)
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == content


@pytest.mark.parametrize("how", ["group", "owner", "link", "folder of the world"])
def test_what_others_may_write_is_not_loaded(how: str, empty_cache: Path, tmp_path: Path) -> None:
    """It is code: a user who writes it has all that this user has."""
    path = compiled(F32, 16)
    mark = path.stat().st_mtime_ns  # an inode may be used again
    if how == "owner":
        if os.getuid() != 0:
            pytest.skip("needs root")
        os.chown(path, 12345, -1)
    elif how == "link":
        path.rename(tmp_path / "elsewhere.so")
        path.symlink_to(tmp_path / "elsewhere.so")
    else:
        target = path.parent if "folder" in how else path
        target.chmod(target.stat().st_mode | (0o020 if "group" in how else 0o002))
    loaded: Any = cpu.load(F32, 16)
    assert isinstance(loaded, cpu.CPUKernels)
    if "folder" in how:
        assert path.stat().st_mtime_ns == mark
        assert len(list(c_compiler._temporary_folder().iterdir())) == 1
    else:
        assert path.lstat().st_mtime_ns != mark and path.lstat().st_uid == os.getuid() and not path.is_symlink()
        assert path.stat().st_mode & 0o077 == 0


def test_a_library_that_lacks_a_function(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is that the compiler makes: plain torch does the work, and one warning says so."""
    c_compiler._warn_once.cache_clear()
    monkeypatch.setattr(cpu, "FUNCTIONS", ("hf_paged_write", "hf_paged_other"))
    monkeypatch.setattr(cpu_layers, "FUNCTIONS", ("hf_paged_other",))
    ids = random_ids(2, 7)
    arguments = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = build("llama").generate(ids, **arguments)
    with logged_messages() as messages:
        assert hf_paged.is_supported(build("llama"))
        for _ in range(2):
            model = hf_paged.patch(build("llama"), num_blocks=32)
            assert torch.equal(model.generate(ids, **arguments), expected)
    assert model.paged.core.pool.attention.backend.name == "torch"
    assert len(messages) == 1 and "plain torch" in messages[0][1] and "hf_paged_other" in messages[0][1]


def test_a_library_of_an_earlier_version_is_left_alone(empty_cache: Path) -> None:
    """Others may be using it; it is never found."""
    old = empty_cache / "hf_paged" / "cpu-0123456789abcdef0123.so"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    path = compiled(F32, 16)
    assert path != old and old.read_bytes() == b"old" and path.exists()


def test_a_read_only_cache_is_read(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image brings compiled kernels; what it lacks lasts as long as the process."""
    monkeypatch.setenv("CC", "gcc -O0")  # which is found by the function that is replaced
    path = compiled(F32, 16)
    monkeypatch.setattr(c_compiler.os, "access", _is_writable)
    assert isinstance(cpu.load(F32, 16), cpu.CPUKernels)
    assert not list(c_compiler._temporary_folder().iterdir())
    assert isinstance(cpu.load(F32, 17), cpu.CPUKernels)
    assert len(list(c_compiler._temporary_folder().iterdir())) == 1
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("home", ["relative", "/proc/nowhere"])
@pytest.mark.parametrize("xdg", [None, "", "relative"])
def test_homes_that_are_none(
    home: str, xdg: str | None, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to, or loaded from, wherever the process happens to be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg) if xdg is not None else monkeypatch.delenv("XDG_CACHE_HOME")
    assert c_compiler.cache_folder() == c_compiler._temporary_folder()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert c_compiler.cache_folder() == tmp_path / ".cache" / "hf_paged"


def _compile_at_once(barrier: Any, results: Any) -> None:
    barrier.wait(30)
    _compile(F32, 16, results)


def test_processes_that_compile_at_once(empty_cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_compile_at_once, args=(barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    paths = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(30)
    assert len(paths) == 1
    assert [str(path) for path in (empty_cache / "hf_paged").iterdir()] == list(paths)
    assert isinstance(cpu.load(F32, 16), cpu.CPUKernels)
