"""The Triton kernels against the plain-torch truth in float64: in Triton's interpreter, and compiled on a GPU.

Without a GPU `conftest.py` has Triton interpret its kernels, on CPU tensors, which is slow: prompts and lengths are cut
to what a test can afford (`affordable`). With one, `-m gpu` runs the same tests compiled, nothing cut. Only what comes
with torch and pytest is imported here, since a machine with a GPU may have no more.

The normal run covers the grid of attention's settings pairwise; `-m slow` takes `HF_PAGED_ATTENTION_CASES` choices of
the full product (default 200), in an order that looks random and is always the same; `NUM_CHOICES` or more are all.

The pool is poisoned: NaN in every slot that holds no token of a sequence, in the outputs and in the scratch before the
kernels write.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.kernel_cases import (
    LAYOUTS,
    describe,
    pairwise,
    random_tensor,
    repaired_interpreter,
    same_bits,
    step_metadata,
    strided,
)
from helpers.kernel_pools import as_given, check_written, nan_pool
from helpers.models import build, ragged_batch
from helpers.pairs import Pair

triton = pytest.importorskip("triton")  # an extra, and not on every platform
import triton.language as tl  # noqa: E402

from hf_paged.attention import decode_work, shared_prefix  # noqa: E402
from hf_paged.attention.backends import triton as triton_backend  # noqa: E402
from hf_paged.attention.backends.registry import choose  # noqa: E402
from hf_paged.attention.backends.torch import TorchBackend  # noqa: E402
from hf_paged.attention.backends.triton import TritonBackend, TritonStep  # noqa: E402
from hf_paged.attention.decode_work import WorkKind, share_out  # noqa: E402
from hf_paged.attention.metadata import AttentionMetadata  # noqa: E402
from hf_paged.attention.params import AttentionParams  # noqa: E402
from hf_paged.kernels import availability, launch, ops, reference, shared_decode  # noqa: E402
from hf_paged.kernels import copy_blocks as copy_kernel  # noqa: E402
from hf_paged.kernels import paged_decode as decode  # noqa: E402
from hf_paged.kernels import paged_prefill as prefill  # noqa: E402
from hf_paged.kernels.tile_ops import decode_fp8  # noqa: E402

CPU = torch.device("cpu")
NAN = float("nan")
NUM_LAYERS = 2
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)
# RMS of a sequence's error over RMS of its truth. fp8 pools have the query's, for the truth reads the same codes.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
MAX_TILE = 128  # tokens of the largest KV tile

OPS = torch.ops.hf_paged

MakePair = Callable[..., Pair]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        if launch.is_interpreting() or not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and TRITON_INTERPRET unset")
    elif not launch.is_interpreting():
        pytest.skip("kernels are compiled here; TRITON_INTERPRET=1 runs them on CPU")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _repaired_interpreter() -> Iterator[None]:
    if launch.is_interpreting():
        with repaired_interpreter():
            yield
    else:
        yield


# paged_attention

Shape = tuple[int, int]  # new tokens, tokens including them


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    block_size: int = 16
    group: int = 2  # query heads of a kv head
    num_kv_heads: int = 2
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    bias: int | None = None  # distances that have one of their own
    num_splits: int | None = None
    mix: str = "small"
    pool_dtype: torch.dtype | None = None  # the query's if not given


AXES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "head_dim": (64, 80, 96, 112, 128, 192, 256),
    "block_size": (8, 16, 24, 32, 64, 128, 256),
    "group": (1, 4, 7, 8, 64),
    "num_kv_heads": (1, 2),
    "window": (None, 1, 33, 64, 533),
    "softcap": (None, 50.0),
    "has_sinks": (False, True),
    "bias": (None, 1, 30),
    "num_splits": (None, 2, 5),
    "mix": (
        "mixed",
        "decode",
        "many first tokens",
        "chunks that start mid-block",
        "block edges",
        "block edges, several new",
        "tile edges",
        "shared blocks",
        "fewer tiles than splits",
        "one token behind others",
    ),
}
NUM_CHOICES = math.prod(len(values) for values in AXES.values())
PAIRWISE = pairwise(AXES)


def choice_of(number: int) -> dict[str, Any]:
    """One choice of the full product; numbers from 0 to `NUM_CHOICES` give all of them, neighbours are unlike."""
    number = number * 7919 % NUM_CHOICES  # a prime that does not divide it: a permutation
    choice = {}
    for name, values in AXES.items():
        number, index = divmod(number, len(values))
        choice[name] = values[index]
    return choice


def shapes_of(mix: str, block_size: int) -> list[Shape]:
    size = block_size
    num_shared = size if size >= 64 else 3 * size  # see `Batch`
    edges = [length for full in (size, 2 * size) for length in (full - 1, full, full + 1)]
    long, short = (-(-length // size) * size for length in (150, 70))  # prompts
    return {
        "small": [(1, 70), (1, 3), (5, 40), (9, 9)],
        "mixed": [(1, 1328), (5, 18), (129, 463)],
        "decode": [(1, 523), (1, 37), (1, 2011)],
        "many first tokens": [(1, 1)] * 40,
        "chunks that start mid-block": [
            (size + 1, 2 * size + size // 2 + 1),
            (size // 2 + 1, size),
            (7, size // 2 + 9),
            (2, 2 * size + 3),
        ],
        "block edges": [(1, length) for length in edges],
        "block edges, several new": [(2 + number % 2, length + 2) for number, length in enumerate(edges)],
        "tile edges": [(1, 16), (1, 17), (1, 128), (1, 129), (2, 64), (2, 66), (3, 128), (3, 130), (16, 31), (33, 65)],
        "shared blocks": [
            (1, num_shared + 1),
            (1, num_shared + size),
            (3, num_shared + 3),
            (5, num_shared + size // 2 + 5),
        ],
        "fewer tiles than splits": [(1, 1), (1, 3), (1, 300), (1, 40)],
        "one token behind others": [(7, 40), (1, 33), (1, 1), (2, 2)],
        "samples": [(1, full + own) for full, own in ((long, 1), (long, size + 3), (long, 9), (short, 2), (short, 40))]
        + [(1, 33), (5, long + 5)],
    }[mix]


def sharing_of(mix: str, shapes: list[Shape], size: int) -> list[tuple[int, int, int]]:
    """Sequences whose first blocks are those of an earlier one: that one, and how many blocks."""
    full = [length // size for _, length in shapes]
    if mix == "shared blocks":
        return [(row, 0, min(3, full[0], full[row])) for row in range(1, len(shapes))]
    if mix == "samples":
        return [(1, 0, full[0]), (2, 0, full[0]), (4, 3, full[3])]
    return []


MOST_VISITS = 55  # tiles of keys and values, each of which costs the interpreter some 3 ms


def num_visits(case: Case, query_len: int, seq_len: int) -> float:
    """What a sequence costs, in KV tiles that are read; about."""
    seen = seq_len if case.window is None else min(seq_len, case.window + query_len)
    is_float32 = case.dtype == torch.float32
    tile = 16 if is_float32 else 8192 // launch.next_power_of_two(case.head_dim)
    if query_len == 1:
        num_programs, num_splits = -(-case.group // (16 if is_float32 else 64)), case.num_splits or 1
        combination = case.group / 3 if num_splits > 1 else 0
    else:
        num_programs, num_splits, combination = -(-query_len * case.group // (32 if is_float32 else 64)), 1, 0
    return case.num_kv_heads * (num_programs * (-(-seen // tile) + num_splits) + combination)


def affordable(case: Case, shapes: list[Shape]) -> list[Shape]:
    """Fewer new tokens, then fewer before them, then fewer sequences, until the interpreter is done in half a second.

    Chunks go on beginning where they did.
    """
    shapes = list(shapes)
    while sum(costs := [num_visits(case, *shape) for shape in shapes]) > MOST_VISITS:
        index = costs.index(max(costs))
        query_len, seq_len = shapes[index]
        if query_len > 3:
            shapes[index] = (query_len // 2 + 1, seq_len - query_len + query_len // 2 + 1)
        elif seq_len > 100:
            shapes[index] = (query_len, seq_len // 2 + 1)
        elif len(shapes) > 2:
            shapes.pop()
        else:
            break
    return shapes


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Within it, the memory of a new output is NaN: a row that is not written shows."""
    new_empty = Tensor.new_empty

    def new_nan(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = new_empty(tensor, *args, **kwargs)
        return made.fill_(NAN) if made.is_floating_point() else made

    with mock.patch.object(Tensor, "new_empty", new_nan):
        yield


def cut_into(num_splits: int | None) -> AbstractContextManager[Any]:
    """Within it, sequences are cut into so many items, where they have the tiles; `None`: as lengths say."""
    if num_splits is None:
        return nullcontext()
    return mock.patch.object(decode_work, "_cuts", lambda tiles, *_: np.clip(tiles, 1, num_splits))


def nan_partials(device: torch.device) -> ops.Partials:
    partials = ops.Partials()
    partials.get(2**20, device).fill_(NAN)
    return partials


def plan_of(batch: Batch) -> tuple[launch.Tiling, int]:
    return decode.plan(batch.query, batch.pool)


class Batch:
    """Sequences with keys and values of their own, in shuffled blocks of a poisoned pool."""

    def __init__(self, case: Case, device: torch.device = CPU, shapes: list[Shape] | None = None) -> None:
        """Makes them.

        Args:
            case: The settings.
            device: Where the kernels run.
            shapes: Replaces the case's mix; these are not cut.
        """
        self.case, self.device = case, device
        if shapes is None:
            shapes = shapes_of(case.mix, case.block_size)
            shapes = affordable(case, shapes) if device == CPU else shapes
        self.shapes = shapes
        size, heads, dim = case.block_size, case.num_kv_heads, case.head_dim
        pool_dtype = case.pool_dtype or case.dtype
        needed = [-(-length // size) for _, length in self.shapes]
        self.null_block = sum(needed) + 3
        free = list(range(self.null_block))
        random.Random(0).shuffle(free)
        self.tables = [[free.pop() for _ in range(n)] for n in needed]
        self.spare_block = free[0]
        states = [random_tensor(n, 2, heads, dim, seed=i) for i, (_, n) in enumerate(self.shapes)]
        for row, other, num_shared in sharing_of(case.mix, self.shapes, size):
            self.tables[row][:num_shared] = self.tables[other][:num_shared]
            states[row][: num_shared * size] = states[other][: num_shared * size]

        self.layer = 1
        shape = (self.null_block + 1, NUM_LAYERS, 2, heads, size, dim)
        pool = nan_pool(shape, pool_dtype)
        self.truth = torch.zeros(shape, dtype=torch.float64)  # what the pool's numbers mean
        self.exact = torch.zeros(shape, dtype=torch.float64)  # what they were before the pool's rounding
        for table, of_sequence in zip(self.tables, states):
            slots = torch.arange(len(of_sequence))
            blocks = torch.tensor(table)[slots // size]
            stored = reference.quantize(of_sequence.float(), pool_dtype)
            for tensor, content in (
                (reference.elements(pool), reference.elements(stored)),
                (self.truth, stored.float().double()),
                (self.exact, of_sequence),
            ):
                tensor[:, self.layer][blocks, :, :, slots % size] = content
        self.pool = pool.to(device)

        num_tokens, num_heads = sum(q for q, _ in self.shapes), heads * case.group
        # As the model hands it over: [1, heads, T, head_dim], transposed. Three times as wide as usual, so that scores
        # differ, and a softcap shows.
        query = 3 * random_tensor(num_heads, num_tokens, dim, seed=99)
        self.query = query.to(case.dtype).to(device).transpose(0, 1)
        self.scale = 0.7 / math.sqrt(dim)
        sinks = 2 * random_tensor(num_heads, dtype=case.dtype, seed=5)
        self.sinks = sinks.to(device) if case.has_sinks else None
        bias = 2 * random_tensor(num_heads, case.bias or 1, dtype=torch.float32, seed=6)
        self.bias = bias.to(device) if case.bias else None

    def metadata(self, device: torch.device | None = None) -> AttentionMetadata:
        query_lens, seq_lens = zip(*self.shapes)
        return step_metadata(
            self.tables, query_lens, seq_lens, self.case.block_size, self.null_block, device or self.device
        )

    def params(self) -> AttentionParams:
        settings = self.case.window, self.case.softcap, self.sinks
        return AttentionParams(self.layer, self.scale, *settings, bias=self.bias)

    def attend(self, query: Tensor | None = None, num_splits: int | None = -1, **changes: Any) -> Tensor:
        """By the kernels, on the CPU."""
        arguments = {"kv_cache": self.pool, "metadata": self.metadata(), "partials": nan_partials(self.device)}
        step = TritonStep(**(arguments | changes))
        num_splits = self.case.num_splits if num_splits == -1 else num_splits
        query = self.query if query is None else query
        with poisoned_outputs(), cut_into(num_splits):
            return step.attend(query, self.params()).cpu()

    def expected(self, truth: Tensor | None = None, **changes: Any) -> Tensor:
        """In float64, on the CPU, of what the pool's numbers mean."""
        case = self.case
        arguments = {
            "sliding_window": case.window,
            "softcap": case.softcap,
            "sinks": None if self.sinks is None else self.sinks.double().cpu(),
            "bias": None if self.bias is None else self.bias.cpu(),
        }
        return reference.paged_attention(
            self.query.double().cpu(),
            self.truth if truth is None else truth,
            self.layer,
            self.metadata(CPU).groups,
            self.scale,
            **(arguments | changes),
        )

    def error(self, found: Tensor, expected: Tensor) -> float:
        """The largest of all sequences: RMS of the error over RMS of the truth."""
        assert found.shape == expected.shape == self.query.shape and found.dtype == self.query.dtype
        assert not found.isnan().any(), "a NaN leaked, or a row was not written"
        query_lens = [query_len for query_len, _ in self.shapes]
        pairs = zip(found.double().split(query_lens), expected.split(query_lens))
        ratios = [(one - other).square().mean() / other.square().mean().clamp_min(1e-300) for one, other in pairs]
        return math.sqrt(max(ratios))


def test_choices_are_unlike() -> None:
    some = [tuple(choice_of(number).values()) for number in range(0, NUM_CHOICES, 97)]
    assert len(set(some)) == len(some) and math.gcd(7919, NUM_CHOICES) == 1


@pytest.mark.parametrize("choice", PAIRWISE, ids=describe)
def test_paged_attention(choice: dict[str, Any], device: torch.device) -> None:
    """Breaks if any two settings don't go together, a slot is read that no token is in, or a row isn't written."""
    batch = Batch(Case(**choice), device)
    before = batch.pool.clone()
    assert batch.error(batch.attend(), batch.expected()) <= TOLERANCE[batch.case.dtype]
    assert same_bits(batch.pool, before), "attention wrote into the pool"


CHOICES_A_TEST = 20
NUM_SLOW_CHOICES = int(os.environ.get("HF_PAGED_ATTENTION_CASES", 200))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, min(NUM_SLOW_CHOICES, NUM_CHOICES), CHOICES_A_TEST))
def test_paged_attention_at_large(first: int, device: torch.device) -> None:
    """The same for a sample of the full product, or all of it."""
    wrong = []
    for number in range(first, min(first + CHOICES_A_TEST, NUM_SLOW_CHOICES, NUM_CHOICES)):
        batch = Batch(Case(**choice_of(number)), device)
        found = batch.attend()
        if found.isnan().any() or batch.error(found, batch.expected()) > TOLERANCE[batch.case.dtype]:
            wrong.append(describe(choice_of(number)))
    assert not wrong


UNCUT = [
    Case(torch.float32, 64, 16, group=4, num_kv_heads=1, mix="mixed"),
    Case(torch.bfloat16, 80, 24, 7, 1, None, 50.0, has_sinks=True, num_splits=5, mix="decode"),
    Case(torch.float16, 128, 8, group=8, num_kv_heads=1, window=533, mix="mixed"),
    Case(torch.float16, 256, 32, group=64, num_kv_heads=1, has_sinks=True, mix="decode"),
]


@pytest.mark.parametrize("case", UNCUT, ids=lambda case: describe(asdict(case)))
def test_long_sequences(case: Case, device: torch.device) -> None:
    """Breaks if an error grows with the context; in the grid the interpreter can't afford these."""
    batch = Batch(case, device, shapes_of(case.mix, case.block_size))
    assert batch.error(batch.attend(), batch.expected()) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 20), (torch.float32, 40), (torch.float16, 71)])
def test_groups_of_several_programs(dtype: torch.dtype, group: int, num_splits: int, device: torch.device) -> None:
    """Breaks if the last program of a kv head, whose tile is not full, takes the next one's query heads as well."""
    batch = Batch(Case(dtype, group=group, num_splits=num_splits, has_sinks=True), device, [(1, 140), (3, 20)])
    assert batch.error(batch.attend(), batch.expected()) <= TOLERANCE[dtype]


EXTRAS: dict[str, dict[str, Any]] = {
    "window": {"window": 33},
    "softcap": {"softcap": 5.0},
    "sinks": {"has_sinks": True},
    "bias": {"bias": 40},
    "all": {"window": 33, "softcap": 5.0, "has_sinks": True, "bias": 40},
}
PLAIN = {"sliding_window": None, "softcap": None, "sinks": None, "bias": None}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_each_feature_matters(extra: str, num_splits: int, device: torch.device) -> None:
    """Breaks if the grid's settings could be ignored and the errors still be small."""
    shapes = [(1, 2 * MAX_TILE + 9), (1, 3), (5, 40), (9, 9)]  # the first has several tiles of any size
    batch = Batch(Case(torch.float16, num_splits=num_splits, **EXTRAS[extra]), device, shapes)
    found = batch.attend()
    assert batch.error(found, batch.expected()) <= TOLERANCE[torch.float16]
    assert batch.error(found, batch.expected(**PLAIN)) > 20 * TOLERANCE[torch.float16]


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tiles_wholly_behind_the_window_are_not_read(dtype: torch.dtype, num_splits: int, device: torch.device) -> None:
    """Breaks if a kernel starts a tile too early: slow, and NaN in tokens that no query sees would spread."""
    window, first_seen = 64, 2 * MAX_TILE  # where a tile begins, whatever its size
    shapes = [(1, first_seen + window), (1, first_seen + window + 9), (5, first_seen + window + 4), (40, 370)]
    batch = Batch(Case(dtype, 64, window=window, num_splits=num_splits), device, shapes)
    elements = reference.elements(batch.pool)
    for table, (query_len, seq_len) in zip(batch.tables, shapes):
        oldest = (seq_len - query_len + 1 - window) // MAX_TILE * MAX_TILE
        assert oldest >= first_seen
        elements[torch.tensor(table[: oldest // batch.case.block_size], device=device)] = NAN
    assert batch.error(batch.attend(), batch.expected()) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("block_size", "window"), [(4, 33), (16, 1), (16, 64), (64, 33)])
def test_blocks_behind_the_window_may_be_gone(block_size: int, window: int, device: torch.device) -> None:
    """Breaks if a tile that begins before the window counts what the null block has there."""
    shapes = [(1, 300), (1, 97), (5, 140), (40, 200)]
    batch = Batch(Case(torch.float16, block_size=block_size, window=window), device, shapes)
    expected = batch.expected()
    reference.elements(batch.pool)[batch.null_block] = 0
    for table, (query_len, seq_len) in zip(batch.tables, shapes):
        behind = max(0, seq_len - query_len - window + 1) // block_size
        table[:behind] = [batch.null_block] * behind
    assert batch.error(batch.attend(), expected) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("window", [None, 33])
def test_tiles_wholly_ahead_are_not_read(window: int | None, device: torch.device) -> None:
    """Breaks if all of a chunk's programs read as far as its last token sees: twice the work of a prompt."""
    batch = Batch(Case(torch.float16, group=64, num_kv_heads=1, window=window), device, [(16, MAX_TILE + 8)])
    expected = batch.expected()
    batch.pool[torch.tensor(batch.tables[0][MAX_TILE // 16 :], device=device)] = NAN
    found = batch.attend()  # by programs of one or two tokens each: 8 of them end where a tile does
    assert found[8:].isnan().any(dim=(1, 2)).all()
    torch.testing.assert_close(found[:8], expected[:8].half(), rtol=2e-3, atol=2e-3)


TINY: list[Shape] = [(1, 20), (5, 12)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_attention_takes_any_query_strides(layout: str, device: torch.device) -> None:
    batch = Batch(Case(), device, TINY)
    query = as_given(strided(layout, *batch.query.shape, torch.float32, seed=3), device)
    expected = batch.attend(query=query.clone(memory_format=torch.contiguous_format))
    found = batch.attend(query=query)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("how", ["every other block", "some of more layers", "heads first", "keys and values apart"])
def test_pools_of_any_strides(how: str, device: torch.device) -> None:
    """Breaks if a kernel computes a stride instead of taking the tensor's; only a block's tokens lie side by side."""
    batch = Batch(Case(num_splits=2), device)
    blocks, layers, parts, heads, size, dim = batch.pool.shape
    if how == "every other block":
        pool = nan_pool((2 * blocks, layers, parts, heads, size, dim), torch.float32).to(device)[1::2]
    elif how == "some of more layers":
        pool = nan_pool((blocks, layers + 3, parts, heads, size, dim), torch.float32).to(device)[:, 2 : 2 + layers]
    elif how == "heads first":
        pool = nan_pool((heads, blocks, layers, parts, size, dim), torch.float32).to(device).permute(1, 2, 3, 0, 4, 5)
    else:
        pool = nan_pool((parts, layers, blocks, heads, size, dim), torch.float32).to(device).permute(2, 1, 0, 3, 4, 5)
    pool.copy_(batch.pool)
    assert torch.equal(batch.attend(kv_cache=pool), batch.attend())
    key, value = (random_tensor(3, heads, dim, dtype=torch.float32, seed=seed).to(device) for seed in (1, 2))
    slots = torch.tensor([5, -1, 2 * size + 1], device=device)
    for tensor in (pool, batch.pool):
        ops.reshape_and_cache(key, value, tensor, 1, slots)
    assert same_bits(pool, batch.pool) and not pool[0, 1, :, :, 5].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_huge_scores(dtype: torch.dtype, num_splits: int, device: torch.device) -> None:
    """Breaks if a maximum is left out of a softmax: scores of thousands overflow without it."""
    case = Case(dtype, group=8, num_kv_heads=1, has_sinks=True, num_splits=num_splits)
    batch = Batch(case, device, [(1, 300), (5, 40)])  # 300: tiles of any size are split
    batch.query = batch.query * 500
    expected = batch.expected()
    assert batch.error(batch.attend(), expected) <= 10 * TOLERANCE[dtype]  # the scores' own rounding is larger, too
    batch.sinks = torch.full_like(batch.sinks, 3e4)
    assert float(batch.attend().abs().max()) == 0


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_padding_rows(num_splits: int, has_sinks: bool, device: torch.device) -> None:
    """A CUDA graph is recorded for more sequences than a step has, and for as many items as there can be.

    Of a sequence of length 0, 0 comes out; where there is no item, nothing is done.
    """
    batch = Batch(Case(torch.float16, num_kv_heads=1, has_sinks=has_sinks), device, [(1, 200), (1, 3), (1, 33)])
    given = attention_arguments(batch)
    rows = torch.tensor([0, 2, 4], device=device)  # of seven

    def spread(tensor: Tensor, fill: float) -> Tensor:
        filled = torch.full((7, *tensor.shape[1:]), fill, dtype=tensor.dtype, device=device)
        filled[rows] = tensor
        return filled

    seq_lens = spread(given["seq_lens"], 0)
    kind = WorkKind(plan_of(batch)[0].tokens, 9)
    with cut_into(num_splits):
        items, split = (torch.from_numpy(array).to(device) for array in share_out(seq_lens.cpu().numpy(), kind))
    assert num_splits == 1 or int(split[:, 3].max()) > 1
    none = torch.tensor([[0, -1, 0, 0]], dtype=torch.int32, device=device)
    max_parts = 7 * num_splits
    size = decode.partials_size(max_parts, batch.query.shape[1], batch.query.shape[2])
    changes = {
        "query": spread(batch.query, 5.0),
        "block_tables": spread(given["block_tables"], batch.null_block),
        "seq_lens": seq_lens,
        "query_start_loc": torch.arange(8, dtype=torch.int32, device=device),
        "decode_items": torch.cat([items, none, none]),
        "split": torch.cat([split, torch.zeros_like(none)]),
        "max_parts": max_parts,
        "partials": torch.full((size,), NAN, device=device),
    }
    with poisoned_outputs():
        found = OPS.paged_attention(*(given | changes).values()).cpu()
    assert batch.error(found[rows.cpu()], batch.expected()) <= TOLERANCE[torch.float16]
    others = [row for row in range(7) if row not in rows.tolist()]
    assert torch.equal(found[others], torch.zeros_like(found[others]))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_query_tiles_of_no_sequence_are_skipped(num_splits: int, device: torch.device) -> None:
    """They pad the lists; the rows of the output that no tile has are left as they were."""
    batch = Batch(Case(torch.float16, num_splits=num_splits), device, [(5, 300), (20, 33)])
    given = attention_arguments(batch)
    assert (len(given["query_split"]) > 0) == (num_splits > 1)
    none = torch.tensor([[0, -1, 0, 0, 0, 0, 0, 0]], dtype=torch.int32, device=device)
    items = torch.cat([none, *(piece for item in given["query_items"] for piece in (item[None], none, none))])
    split = torch.cat([given["query_split"], none[:, 2:6]])
    more = torch.cat([batch.query, torch.ones_like(batch.query[:3])])
    changes = {"query": more, "query_items": items, "query_split": split}
    with poisoned_outputs():
        found = OPS.paged_attention(*(given | changes).values()).cpu()
    assert batch.error(found[:-3], batch.expected()) <= TOLERANCE[torch.float16]
    assert found[-3:].isnan().all()


# Tokens that several sequences share

SHARED_AXES: dict[str, tuple[Any, ...]] = {
    "dtype": AXES["dtype"],
    "head_dim": (64, 80, 128, 256),
    "block_size": (8, 16, 24, 64),
    "group": (1, 4, 7),
    "num_kv_heads": (1, 2),
    "window": (None, None, 33),
    "softcap": (None, 50.0),
    "has_sinks": (False, True),
    "bias": (None, 70),
    "num_splits": (None, 3),
}


@pytest.fixture
def reading_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sequences share, they read together: not only where it pays."""
    monkeypatch.setattr(AttentionMetadata, "least_saved", -math.inf)
    monkeypatch.setattr(shared_prefix, "LEAST_TOKENS", 1)


def samples(device: torch.device, **choice: Any) -> Batch:
    """Two runs that share their prompts, a sequence of its own, a prompt."""
    case = Case(mix="samples", **choice)
    return Batch(case, device, shapes_of(case.mix, case.block_size))


def assert_read_together(batch: Batch) -> None:
    with counted(shared_decode, "_shared_decode_kernel") as launches:
        found = batch.attend()
    rows = 16 if batch.case.dtype == torch.float32 else 64
    assert launches.count == (2 * batch.case.group <= rows and batch.case.window is None)
    assert batch.error(found, batch.expected()) <= TOLERANCE[batch.case.dtype]


# Besides, pools of fp8, and as many heads as fill a tile, which read by themselves.
MORE_SHARED: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16, "pool_dtype": E4M3},
    {"dtype": torch.float16, "pool_dtype": E5M2},
    {"dtype": torch.float16, "group": 33, "num_kv_heads": 1},
]


@pytest.mark.parametrize("choice", [*pairwise(SHARED_AXES), *MORE_SHARED], ids=describe)
@pytest.mark.usefixtures("reading_together")
def test_shared_tokens_are_read_together(choice: dict[str, Any], device: torch.device) -> None:
    """Breaks if a token is left out or counted twice, or a sequence gets another one's part."""
    assert_read_together(samples(device, **choice))


def test_shared_tokens_are_read_one_by_one_where_it_is_cheaper(device: torch.device) -> None:
    batch = samples(device)
    with counted(shared_decode, "_shared_decode_kernel") as launches:
        assert batch.error(batch.attend(), batch.expected()) <= TOLERANCE[torch.float32]
    assert batch.metadata().shared_prefixes is not None and launches.count == 0


@pytest.mark.usefixtures("reading_together")
def test_no_window_is_read_together(device: torch.device) -> None:
    batch = samples(device)
    with mock.patch.object(shared_decode, "_shared_decode_kernel"):
        arguments = attention_arguments(batch)
        with pytest.raises(ValueError, match="without a window, this one's is 7"):
            OPS.paged_attention(*(arguments | {"window": 7}).values())


# How the work is shared out


def shared_out(shapes: list[Shape], device: torch.device, window: int | None = None) -> dict[int, int]:
    """Items of each sequence that a step gives the decode kernel."""
    query_lens, seq_lens = zip(*shapes)
    tables = [[0] * -(-seq_len // 16) for seq_len in seq_lens]
    metadata = step_metadata(tables, query_lens, seq_lens, 16, 1, device)
    query = torch.zeros(sum(query_lens), 1, 16, device=device)
    pool = torch.zeros(2, 1, 2, 1, 16, 16, device=device)
    with mock.patch.object(decode, "paged_decode") as spy, mock.patch.object(prefill, "paged_prefill"):
        params = AttentionParams(0, 0.25, window)
        TritonStep(pool, metadata, ops.Partials()).attend(query, params)
    return Counter(spy.call_args[0][1][:, 1].tolist()) if spy.called else {}


def test_items_follow_from_the_lengths(device: torch.device) -> None:
    """`test_decode_work.py` has the rule; here, that the kernel is given what it says."""
    assert shared_out([(1, 4096)], device)[0] > 4
    assert shared_out([(1, 1)] * 40, device) == dict.fromkeys(range(40), 1)
    assert shared_out([(1, 4096)], device, window=33)[0] <= 2, "a window of three tiles was cut up"
    beside = shared_out([(1, 1)] * 20 + [(1, 4096)] + [(1, 1)] * 20, device)
    assert beside.pop(20) > 4 and set(beside.values()) == {1} and len(beside) == 40


@pytest.mark.parametrize("num_queries", [2, pytest.param(64, marks=pytest.mark.slow)])
def test_few_queries_behind_a_long_context(
    num_queries: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if they are left to a program for each kv head, or a part of what they see gets lost."""
    real = launch.Device.of(device)
    monkeypatch.setattr(launch.Device, "of", staticmethod(lambda _: replace(real, num_processors=132)))
    case = Case(torch.float16, head_dim=128, group=2, num_kv_heads=2, softcap=30.0, has_sinks=True)
    batch = Batch(case, device, [(num_queries, 8192 + num_queries)])
    with counted(prefill, "_prefill_kernel") as launches:
        assert batch.error(batch.attend(), batch.expected()) <= TOLERANCE[torch.float16]
    assert math.prod(launches.grids[0]) >= min(264, 2 * 8192 // 64) and launches.count == 1


# Exact attention

EXACT_AXES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "head_dim": (64, 80),
    "group": (1, 3),
    "window": (None, 33, 200),
    "softcap": (None, 50.0),
    "has_sinks": (False, True),
    "bias": (None, 30),
}
EXACT_LENGTH = 270


def spans(batch: Batch, own: list[tuple[int, int, int]], **settings: Any) -> Tensor:
    """Attention for a step of these: a sequence, and the first and the end of its new tokens."""
    starts = [sum(length for _, length in batch.shapes[:row]) for row in range(len(batch.shapes))]
    rows = torch.cat([torch.arange(starts[row] + first, starts[row] + end) for row, first, end in own])
    lens = [end - first for _, first, end in own], [end for _, _, end in own]
    metadata = step_metadata([batch.tables[row] for row, _, _ in own], *lens, 16, batch.null_block, batch.device)
    return batch.attend(batch.query[rows.to(batch.device)], metadata=metadata, **settings)


EXACT_STEPS: dict[str, list[tuple[int, int, int]]] = {
    "the last token": [(0, 269, 270)],
    "tokens by themselves": [(0, token, token + 1) for token in (0, 127, 128, 255)],
    "a chunk": [(0, 113, 141)],
    "beside others": [(1, 18, 19), (0, 269, 270), (2, 8, 9), (0, 127, 128), (2, 3, 9), (0, 250, 267), (1, 0, 19)],
}


@pytest.mark.parametrize("choice", pairwise(EXACT_AXES), ids=describe)
def test_exact(choice: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a tile, a mask or a cut that follows from what else is in a step."""
    monkeypatch.setattr(triton_backend, "EXACT_PART", 128)
    batch = Batch(Case(num_kv_heads=1, **choice), device, [(length, length) for length in (EXACT_LENGTH, 19, 9)])
    whole = batch.attend(exact=True)
    assert batch.error(whole, batch.expected()) < TOLERANCE[batch.case.dtype]
    for name, step in EXACT_STEPS.items():
        starts = (0, EXACT_LENGTH, EXACT_LENGTH + 19)
        expected = torch.cat([whole[starts[row] + first : starts[row] + end] for row, first, end in step])
        assert same_bits(spans(batch, step, exact=True), expected), name


def test_exact_beyond_sixteen_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: parts that are combined some at once, for a token's first part depends on its query tile."""
    monkeypatch.setattr(triton_backend, "EXACT_PART", 16)
    batch = Batch(Case(head_dim=80, group=1, num_kv_heads=1, window=300, has_sinks=True), device, [(400, 400)])
    tokens = range(350, 382, 5)
    one_by_one = [(0, token, token + 1) for token in tokens]
    for at_once in (1, 16):
        monkeypatch.setattr(prefill, "combine", lambda *given, at_once, number=at_once: decode.combine(*given, number))
        together = spans(batch, [(0, 350, 382)], exact=True)[:: tokens.step]
        assert same_bits(spans(batch, one_by_one, exact=True), together) == (at_once == 1)


def test_usually_not_exact(device: torch.device) -> None:
    """Would break: the test above, which would not see what it looks for."""
    batch = Batch(Case(), device, [(EXACT_LENGTH, EXACT_LENGTH)])
    assert not same_bits(spans(batch, EXACT_STEPS["the last token"]), batch.attend()[-1:])


def test_no_exact_latents(device: torch.device) -> None:
    with pytest.raises(ValueError, match="pool of latents of 32 elements"):
        triton_backend.TritonBackend(torch.zeros(4, 1, 1, 1, 16, 40, device=device), 32, exact=True)


class Launches:
    """Stands in for a kernel and counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.count, self.grids = kernel, 0, []

    def __getitem__(self, grid: Any) -> Any:
        self.count += 1
        self.grids.append(grid)
        return self._kernel[grid]


@contextmanager
def counted(module: Any, name: str) -> Iterator[Launches]:
    with mock.patch.object(module, name, Launches(getattr(module, name))) as launches:
        yield launches


@pytest.mark.parametrize(
    ("shapes", "num_splits", "expected"),
    [
        ([(1, 5), (1, 9), (1, 70)], 1, (1, 0, 0)),
        ([(1, 5), (1, 9), (1, 70)], 2, (1, 1, 0)),
        ([(1, 5), (1, 70), (2, 7), (9, 30), (1, 4)], 2, (1, 1, 1)),
        ([(1, 5), (1, 9), (2, 7)], 2, (1, 0, 1)),  # a tile each
        ([(2, 7), (9, 30)], 2, (0, 0, 1)),
    ],
)
def test_launches_do_not_grow_with_the_batch(
    shapes: list[Shape], num_splits: int, expected: tuple[int, ...], device: torch.device
) -> None:
    batch = Batch(Case(num_splits=num_splits), device, shapes)
    with (
        counted(decode, "_decode_kernel") as decodes,
        counted(decode, "_combine_kernel") as combinations,
        counted(prefill, "_prefill_kernel") as prefills,
    ):
        batch.attend()
    assert (decodes.count, combinations.count, prefills.count) == expected


def test_partials_are_kept_and_grow(device: torch.device) -> None:
    """Breaks if each call allocates, or a CUDA graph's scratch is freed by a smaller call."""
    partials, device = ops.Partials(), torch.empty(0, device=device).device  # with its index, as launches have it
    with torch.inference_mode():
        first = partials.get(100, device)
    assert first.numel() >= 100 and first.dtype == torch.float32 and first.device.type == device.type
    assert not first.is_inference(), "later calls could not write to it"
    assert partials.get(7, device) is first and partials.get(100, device) is first
    assert partials.get(3 * first.numel(), device).numel() >= 3 * first.numel()
    assert partials.get(0, device).numel() > 0


# fp8


@triton.jit
def _decode_kernel(codes, numbers, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    index = tl.arange(0, 256)
    tl.store(numbers + index, decode_fp8(tl.load(codes + index), FORMAT, NATIVE))


def all_codes(dtype: torch.dtype) -> Tensor:
    """The numbers of the codes 0 to 255, in float32."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def decoded(dtype: torch.dtype, native: bool, device: torch.device) -> Tensor:
    """All codes, by the function that the kernels call."""
    if native and not launch.Device.of(device).has_native_fp8:
        pytest.skip("this device has no conversion of its own")
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    numbers = torch.zeros(256, dtype=torch.float16, device=device)
    _decode_kernel[(1,)](codes, numbers, FORMAT=launch.FP8_FORMATS[dtype], NATIVE=native)
    return numbers.cpu()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_codes_are_decoded_exactly(dtype: torch.dtype, native: bool, device: torch.device) -> None:
    """All of them, bit for bit: subnormals, infinities, both zeros."""
    found, expected = decoded(dtype, native, device), all_codes(dtype).half()
    is_number = ~expected.isnan()
    assert int(is_number.sum()) == (254 if dtype == E4M3 else 250)
    assert same_bits(found[is_number], expected[is_number])


@pytest.mark.parametrize(("dtype", "native"), [(E4M3, False), (E4M3, True), (E5M2, False)])
def test_fp8_nan_stays_nan(dtype: torch.dtype, native: bool, device: torch.device) -> None:
    """Breaks if a model that computes NaN reads ordinary numbers from its cache."""
    assert torch.equal(decoded(dtype, native, device).isnan(), all_codes(dtype).isnan())


def fp8_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    numbers = all_codes(dtype)
    largest = torch.finfo(dtype).max
    finite = numbers[numbers.isfinite()].unique()  # sorted
    ties = (finite[1:] + finite[:-1]) / 2  # exact: float32 has bits enough
    tiny = torch.finfo(dtype).smallest_normal
    seeded = torch.Generator().manual_seed(0)
    random_bits = torch.randint(-(2**31), 2**31, (50_000,), generator=seeded).to(torch.int32).view(torch.float32)
    inf = torch.tensor(math.inf)
    return {
        "codes": numbers,
        "ties": torch.cat([ties, torch.tensor([largest * 1.03125, largest * 1.0625, largest * 1.125])]),
        "above ties": torch.nextafter(ties, inf),
        "below ties": torch.nextafter(ties, -inf),
        "normals": random_tensor(20_000, dtype=torch.float32),
        "large": random_tensor(20_000, dtype=torch.float32, seed=1) * largest,
        "subnormals": random_tensor(20_000, dtype=torch.float32, seed=2) * tiny,
        "any bits": random_bits,
        "special": torch.tensor([0.0, -0.0, math.inf, -math.inf, NAN, -NAN, 1e-45, -1e-45, 3.4e38, -3.4e38]),
    }


def encoded(numbers: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[2, len(numbers)]`, as `reshape_and_cache` stores them as keys, and reversed as values."""
    num_tokens = -(-len(numbers) // 256)
    filled = torch.zeros(num_tokens * 256, dtype=numbers.dtype)
    filled[: len(numbers)] = numbers
    states = filled.view(num_tokens, 1, 256).to(device)
    pool = nan_pool((-(-num_tokens // 16), 1, 2, 1, 16, 256), dtype).to(device)
    slots = torch.arange(num_tokens, device=device)
    ops.reshape_and_cache(states, states.flip(0, 2), pool, 0, slots)
    stored = reference.elements(pool)[:, 0].transpose(0, 1).reshape(2, -1, 256)[:, :num_tokens]
    both = torch.stack([stored[0], stored[1].flip(0, 1)])
    return both.reshape(2, -1)[:, : len(numbers)].cpu().view(dtype)


def assert_same_codes(found: Tensor, expected: Tensor) -> None:
    is_nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)
    assert same_bits(found.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])


@pytest.mark.parametrize("kind", list(fp8_inputs(E4M3)))
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_codes_are_the_nearest(dtype: torch.dtype, kind: str, device: torch.device) -> None:
    """As torch rounds: ties to even, subnormals too; beyond the largest finite number that one, as `quantize` does."""
    numbers = fp8_inputs(dtype)[kind]
    expected = reference.quantize(numbers, dtype)
    if kind != "any bits":
        assert_same_codes(expected, numbers.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype))
    for found in encoded(numbers, dtype, device):
        assert_same_codes(found, expected)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_codes_of_half_precision(dtype: torch.dtype, given: torch.dtype, device: torch.device) -> None:
    numbers = torch.cat([10 * random_tensor(4000), torch.tensor([0.0, -0.0, NAN, math.inf, 6e4, -6e4])]).to(given)
    for found in encoded(numbers, dtype, device):
        assert_same_codes(found, reference.quantize(numbers.float(), dtype))


OTHER_POOLS = [
    *(
        replace(case, pool_dtype=stored)
        for stored in FP8
        for case in (
            Case(torch.bfloat16, 64, num_splits=2, group=7, num_kv_heads=1),
            Case(torch.float16, 80, window=33, has_sinks=True),
            Case(torch.float32, 128, softcap=50.0, num_splits=3),
            Case(torch.float16, 256, block_size=24),
        )
    ),
    *(Case(given, pool_dtype=stored, has_sinks=True) for given, stored in itertools.permutations(TOLERANCE, 2)),
]


@pytest.mark.parametrize("case", OTHER_POOLS, ids=lambda case: describe(asdict(case)))
def test_a_pool_of_another_dtype_than_the_query(case: Case, device: torch.device) -> None:
    """What the pool's numbers mean, cast to the query's dtype, is the truth, and that is the result's dtype."""
    batch = Batch(case, device)
    assert batch.error(batch.attend(), batch.expected(batch.truth.to(case.dtype).double())) <= TOLERANCE[case.dtype]


QUANTIZATION = {E4M3: (0.02, 0.06), E5M2: (0.04, 0.12)}


@pytest.mark.parametrize("stored", FP8, ids=str)
def test_what_fp8_costs(stored: torch.dtype, device: torch.device) -> None:
    """From numbers through both kernels, against unrounded ones: the error that a user accepts with such a pool.

    Of standard normal keys and values; the least error is stated too, for a test that writes nothing would pass the
    other bound.
    """
    batch = Batch(Case(torch.float32, pool_dtype=stored), device)
    metadata = batch.metadata()
    pool = nan_pool(batch.pool.shape, stored).to(device)
    for table, (_, seq_len) in zip(batch.tables, batch.shapes):
        whole = step_metadata([table], [seq_len], [seq_len], 16, batch.null_block, CPU).slot_mapping
        states = batch.exact[:, 1].permute(0, 3, 1, 2, 4).flatten(0, 1)[whole].float().to(device)  # [T, 2, heads, dim]
        ops.reshape_and_cache(states[:, 0], states[:, 1], pool, 1, whole.to(device))
    assert torch.equal(reference.elements(pool), reference.elements(batch.pool))
    error = batch.error(batch.attend(kv_cache=pool, metadata=metadata), batch.expected(batch.exact))
    least, most = QUANTIZATION[stored]
    assert least < error < most


# reshape_and_cache


check_write = partial(check_written, ops.reshape_and_cache)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_reshape_and_cache_takes_any_strides(layout: str, block_size: int, device: torch.device) -> None:
    slots = random.Random(block_size).sample(range(6 * block_size), 5)
    for layer, num_heads in ((0, 1), (1, 3)):
        key, value = (strided(layout, 5, num_heads, 16, torch.float32, seed=seed) for seed in (1, 2))
        check_write(key, value, slots, layer, block_size, torch.float32, device)
        other = strided("contiguous", 5, num_heads, 16, torch.float32, 3)
        check_write(key, other, slots, layer, block_size, torch.float32, device)


@pytest.mark.parametrize("slots", [[-1, 7, -1, 0, 11], [-1, -1], [-5, 3], [2, -1], []])
@pytest.mark.parametrize("dtype", [torch.float32, E4M3], ids=str)
def test_reshape_and_cache_skips_padding(slots: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """On every device; no token at all is no error."""
    key, value = (random_tensor(len(slots), 2, 24, dtype=torch.float32, seed=seed) for seed in (1, 2))
    check_write(key, value, slots, 1, 3, dtype, device)


@pytest.mark.parametrize("head_dim", [1, 5, 64, 80, 96, 112, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
def test_reshape_and_cache_of_any_size(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Breaks if columns beyond the head dim, or rows beyond the last token, are written."""
    given = torch.float32 if dtype in FP8 else dtype
    key, value = (random_tensor(7, 3, head_dim, dtype=given, seed=seed) for seed in (1, 2))
    check_write(key, value, [9, 0, -1, 17, 23, 11, 3], 1, 4, dtype, device)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, E4M3),
        (torch.float16, E5M2),
    ],
)
def test_reshape_and_cache_casts_to_the_pool(given: torch.dtype, stored: torch.dtype, device: torch.device) -> None:
    key, value = (random_tensor(5, 2, 16, dtype=given, seed=seed) for seed in (1, 2))
    check_write(key, value, [9, 2, -1, 4, 0], 0, 4, stored, device)


def test_reshape_and_cache_is_one_launch(device: torch.device) -> None:
    from hf_paged.kernels import reshape_and_cache as module

    states = random_tensor(70, 3, 64, dtype=torch.float32)
    with counted(module, "_reshape_and_cache_kernel") as launches:
        check_write(states, states + 1, list(range(70)), 1, 16, torch.float32, device)
        assert launches.count == 1
        check_write(states[:0], states[:0], [], 1, 16, torch.float32, device)
    assert launches.count == 1


# copy_blocks


def random_pool(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A pool of random bytes, so that there are all kinds of NaN in it."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape)


def check_copy(pool: Tensor, copies: list[tuple[int, int]], copy: Callable[[Tensor], None]) -> None:
    """Bit for bit, with every source as it was before any copy."""
    expected = pool.view(torch.uint8).clone()
    for source, destination in copies:
        expected[destination] = pool.view(torch.uint8)[source]
    copy(pool)
    assert same_bits(pool.view(torch.uint8), expected)


COPIES = [
    [],
    [(0, 5)],
    [(1, 4), (1, 0), (3, 5)],  # one source, several destinations
    [(7, 0), (6, 1), (5, 2), (8, 3)],
]


@pytest.mark.parametrize("copies", COPIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, *FP8], ids=str)
@pytest.mark.parametrize(
    "block",
    [
        (2, 2, 2, 3, 4),
        (1, 2, 1, 3, 5),  # 30 bytes in fp8, no multiple of 4
        (2, 2, 3, 16, 96),  # more words than a program has
    ],
    ids=str,
)
def test_copy_blocks(
    block: tuple[int, ...], dtype: torch.dtype, copies: list[tuple[int, int]], device: torch.device
) -> None:
    pool = random_pool((9, *block), dtype).to(device)

    def copy(pool: Tensor) -> None:
        sources, destinations = torch.tensor(copies, dtype=torch.int64, device=device).view(-1, 2).T.contiguous()
        with counted(copy_kernel, "_copy_blocks_kernel") as launches:
            ops.copy_blocks(pool, sources, destinations)
        assert launches.count == bool(copies), "one launch, whatever the pairs"

    check_copy(pool, copies, copy)


def test_copy_blocks_of_an_odd_number_of_bytes(device: torch.device) -> None:
    pool = random_pool((9, 7), torch.uint8).to(device)
    pairs = torch.tensor([[8, 7], [0, 2]], device=device)
    check_copy(pool, pairs.T.tolist(), lambda pool: ops.copy_blocks(pool, *pairs))


def test_copy_blocks_leaves_what_lies_between_blocks(device: torch.device) -> None:
    """A pool that is a part of something: blocks further apart than they are long."""
    whole = random_pool((9, 4, 2, 2, 3, 4), torch.float32).to(device)
    expected = whole.clone()
    expected[5, 1:3] = whole[2, 1:3]
    ops.copy_blocks(whole[:, 1:3], torch.tensor([2], device=device), torch.tensor([5], device=device))
    assert same_bits(whole, expected)


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 1), (2, 0)],  # a destination that another copy reads: what it held before
        [(2, 0), (0, 1)],
        [(0, 1), (1, 2), (2, 3), (3, 4)],
        [(0, 1), (1, 0)],
        [(3, 3)],
        [(0, 4), (1, 5), (0, 6)],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_backends_read_all_sources_first(
    copies: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    for made in (TritonBackend, TorchBackend):
        pool = random_pool((9, 2, 2, 3, 16, 96), dtype).to(device)
        check_copy(pool, copies, lambda pool, made=made: made(pool).copy_blocks(pool, copies))


# Custom ops


def opcheck(op: Any, arguments: dict[str, Any], **options: Any) -> None:
    torch.library.opcheck(op.default, tuple(arguments.values()), **options)


def finite_batch(device: torch.device, **settings: Any) -> Batch:
    """Over a pool without NaN, which no comparison would take for equal."""
    batch = Batch(Case(**settings), device, TINY)
    batch.pool = torch.where(batch.pool.isnan(), 0, batch.pool)
    return batch


def attention_arguments(batch: Batch, **changes: Any) -> dict[str, Any]:
    """Arguments of the op, as `ops.paged_attention` calls it for this batch."""
    with mock.patch.object(OPS, "paged_attention") as spy:
        batch.attend()
    names = [argument.name for argument in OPS.paged_attention.default._schema.arguments]
    return dict(zip(names, spy.call_args[0], strict=True)) | changes


def write_arguments(device: torch.device, **changes: Any) -> dict[str, Any]:
    return {
        "key": random_tensor(3, 2, 64, dtype=torch.float32, seed=1).to(device),
        "value": random_tensor(3, 2, 64, dtype=torch.float32, seed=2).to(device),
        "kv_cache": torch.zeros(4, NUM_LAYERS, 2, 2, 16, 64, device=device),
        "layer": 1,
        "slot_mapping": torch.tensor([5, -1, 40], device=device),
    } | changes


def test_opcheck(device: torch.device) -> None:
    """Breaks if a schema hides what an op writes, or the fake implementation tells the compiler something else."""
    opcheck(OPS.reshape_and_cache, write_arguments(device))
    fp8 = torch.zeros(4, NUM_LAYERS, 2, 2, 16, 64, device=device).to(E4M3)
    # No schema test: it compares tensors, and torch compares no fp8.
    kinds = ("test_autograd_registration", "test_faketensor")
    opcheck(OPS.reshape_and_cache, write_arguments(device, kv_cache=fp8), test_utils=kinds)
    pool = random_tensor(4, NUM_LAYERS, 2, 2, 4, 16, dtype=torch.float32).to(device)
    sources, destinations = torch.tensor([[0, 1], [2, 3]], device=device)
    opcheck(OPS.copy_blocks, {"pool": pool, "sources": sources, "destinations": destinations})
    for dtype, extras in [*((dtype, {}) for dtype in TOLERANCE), (torch.float32, EXTRAS["all"])]:
        arguments = attention_arguments(finite_batch(device, dtype=dtype, num_splits=2, **extras))
        opcheck(OPS.paged_attention, arguments | {"partials": torch.zeros(2**10, device=device)})


def test_compiled_as_one_graph(device: torch.device) -> None:
    """Breaks if the compiler takes the pool for unchanged by a write, or can't see through the wrappers."""
    batch = finite_batch(device, window=33, has_sinks=True)
    metadata, partials = batch.metadata(), nan_partials(device)
    metadata.query_tiles  # noqa: B018
    key, value = (random_tensor(len(batch.query), 2, 64, dtype=torch.float32, seed=seed).to(device) for seed in (1, 2))

    def layer(query: Tensor, key: Tensor, value: Tensor, pool: Tensor) -> Tensor:
        ops.reshape_and_cache(key * 2, value, pool, 1, metadata.slot_mapping)
        step = TritonStep(pool, metadata, partials)
        first = step.attend(query * 0.5, batch.params())
        ops.reshape_and_cache(key, value + 1, pool, 1, metadata.slot_mapping)
        second = step.attend(query, AttentionParams(1, batch.scale))
        return first + second.relu()

    pools = [batch.pool.clone(), batch.pool.clone()]
    expected = layer(batch.query, key, value, pools[0])
    torch.compiler.reset()
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(batch.query, key, value, pools[1])
    assert torch.equal(found, expected) and torch.equal(*pools)
    assert not torch.equal(pools[0], batch.pool)


# Bad input


def test_bad_writes(device: torch.device) -> None:
    """Each names what was given; the kernel would read or write somewhere else in memory."""
    states = torch.zeros(3, 2, 64, device=device)
    for changes, message in (
        ({"kv_cache": states}, r"kv_cache must be \[num_blocks, .*got \[3, 2, 64\]"),
        ({"kv_cache": torch.zeros(4, 2, 2, 2, 16, 257, device=device)}, "head dims up to 256, got 257"),
        ({"kv_cache": torch.zeros(4, 2, 2, 2, 64, 16, device=device).transpose(4, 5)}, r"contiguous, got strides \("),
        ({"layer": NUM_LAYERS}, "one of the pool's 2, got 2"),
        ({"layer": -1}, "one of the pool's 2, got -1"),
        ({"key": states[:2]}, r"= \[3, 2, 64\], got \[2, 2, 64\] and \[3, 2, 64\]"),
        ({"value": states[:, :1]}, r"got \[3, 2, 64\] and \[3, 1, 64\]"),
        ({"value": states[..., :32]}, r"got \[3, 2, 64\] and \[3, 2, 32\]"),
        ({"key": states[0]}, r"got \[2, 64\] and"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64, device=device)}, r"= \[4, 2, 64\], got \[3, 2, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.reshape_and_cache(**write_arguments(device, **changes))


def test_bad_attention(device: torch.device) -> None:
    batch = Batch(Case(num_splits=2), device)
    query = batch.query
    needed = 2 * 5 * 4 * (64 + 4)  # items of the query tile that reads more than a KV tile, its tokens, heads
    for changes, message in (
        ({"kv_cache": batch.pool[0]}, r"kv_cache must be \[num_blocks, "),
        ({"kv_cache": torch.zeros(4, 2, 2, 2, 16, 512, device=device)}, "head dims up to 256, got 512"),
        ({"kv_cache": batch.pool[..., :32]}, "contiguous, got strides"),
        ({"layer": 2}, "one of the pool's 2, got 2"),
        ({"layer": -1}, "one of the pool's 2, got -1"),
        ({"query": query[:, :3]}, r"a multiple of 2, got \[\d+, 3, 64\]"),
        ({"query": query[..., :32]}, r"\[tokens, num_heads, 64\].* got \[\d+, 4, 32\]"),
        ({"query": query[0]}, r"got \[4, 64\]"),
        ({"scale": 0.0}, "scale must be above 0, .* got 0.0"),
        ({"scale": -0.125}, "scale must be above 0, .* got -0.125"),
        ({"softcap": -1.0}, "softcap and window at least 0 .* -1.0"),
        ({"window": -1}, "softcap and window at least 0 .* -1"),
        ({"bias": torch.zeros(2, 9, device=device)}, r"a bias .* \[4, distances\] in float32, got \[2, 9\]"),
        ({"bias": torch.zeros(4, 0, device=device)}, r"got \[4, 0\]"),
        ({"bias": torch.zeros(4, 9, device=device).half()}, r"got \[4, 9\] in torch.float16"),
        ({"partials": torch.zeros(needed - 1, device=device)}, f"hold {needed} float32 numbers, got {needed - 1}"),
        ({"partials": torch.zeros(needed, device=device).half()}, f"hold {needed} float32 .* of torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            OPS.paged_attention(*attention_arguments(batch, **changes).values())
    exact = attention_arguments(batch, partials=torch.zeros(needed, device=device))
    assert not OPS.paged_attention(*exact.values()).isnan().any()


def test_bad_copies(device: torch.device) -> None:
    pool = torch.zeros(4, 2, 2, 2, 16, 64, device=device).transpose(1, 3)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"blocks must be contiguous .* got strides \("):
        ops.copy_blocks(pool, one, one + 1)


@pytest.mark.parametrize("name", ["sources", "destinations", "slot_mapping", "query_items", "query_split", "sinks"])
def test_small_tensors_of_any_strides(name: str, device: torch.device) -> None:
    """What an op is given is used as it is, or refused: not read from other places in memory."""

    def spread(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor[:1].expand_as(tensor)], dim=-1)[..., 0]

    batch = finite_batch(device, has_sinks=True)
    if name in ("sources", "destinations"):
        op = OPS.copy_blocks
        arguments = dict(zip(("kv_cache", "sources", "destinations"), (batch.pool, *torch.tensor([[0, 1], [3, 4]]))))
    elif name == "slot_mapping":
        op, arguments = OPS.reshape_and_cache, write_arguments(device)
    else:
        op, arguments = OPS.paged_attention, attention_arguments(batch)
    arguments = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in arguments.items()}
    results = []
    for changes in ({}, {name: spread(arguments[name])}):
        pool = arguments["kv_cache"].clone()
        try:
            results.append((op(*(arguments | changes | {"kv_cache": pool}).values()), pool))
        except ValueError:
            assert changes
            return
    (expected, expected_pool), (found, pool) = results
    assert same_bits(pool, expected_pool)
    assert expected is None or torch.equal(found, expected)


# Which backend


def fake_pool(device: str, head_dim: int = 64) -> Any:
    return SimpleNamespace(device=torch.device(device), shape=(4, 2, 2, 2, 16, head_dim), dtype=torch.float16)


HALF = torch.float16
CHOICES = [
    # name, pool, model's dtype, changes to the world, what comes out
    ("torch", fake_pool("cpu"), HALF, {}, "torch"),
    ("torch", fake_pool("cuda"), HALF, {}, "torch"),
    ("torch", fake_pool("cpu", 512), torch.float64, {}, "torch"),
    ("auto", fake_pool("cpu"), HALF, {}, "torch"),
    ("auto", fake_pool("cuda"), HALF, {}, "triton"),
    ("auto", fake_pool("cuda", 256), torch.float32, {}, "triton"),
    ("auto", fake_pool("cuda", 257), HALF, {}, "torch"),
    ("auto", fake_pool("cuda"), torch.float64, {}, "torch"),
    ("auto", fake_pool("cuda"), HALF, {"capability": (7, 5)}, "torch"),
    ("auto", fake_pool("cuda"), HALF, {"installed": False}, "torch"),
    ("auto", fake_pool("mps"), HALF, {}, "torch"),
    ("auto", fake_pool("cuda"), HALF, {"failure": "can't compile"}, "torch"),
    ("triton", fake_pool("cuda"), HALF, {"failure": "can't compile"}, "can't compile"),
    ("triton", fake_pool("cuda"), torch.bfloat16, {}, "triton"),
    ("triton", fake_pool("cuda"), HALF, {"capability": (7, 5), "hip": "6.2"}, "triton"),
    ("triton", fake_pool("cpu"), HALF, {}, "triton"),
    ("triton", fake_pool("cpu", 256), torch.float32, {}, "triton"),
    ("triton", fake_pool("cpu"), HALF, {"interpreting": False}, "needs a CUDA or ROCm device, the model is on cpu"),
    ("triton", fake_pool("mps"), HALF, {}, "needs a CUDA or ROCm device, the model is on mps"),
    (
        "triton",
        fake_pool("cuda"),
        HALF,
        {"installed": False},
        r"needs the triton package \(pip install .* not installed",
    ),
    ("triton", fake_pool("cuda"), HALF, {"capability": (7, 5)}, "needs a GPU of compute capability 8.0 .* Old GPU has"),
    ("triton", fake_pool("cpu"), torch.float64, {}, "float32 and half precision, the model is in torch.float64"),
    ("triton", fake_pool("cpu"), E4M3, {}, "half precision, the model is in torch.float8_e4m3fn"),
    ("triton", fake_pool("cpu", 257), HALF, {}, "head dims up to 256, the model has 257"),
]


@pytest.mark.parametrize(("name", "pool", "dtype", "world", "expected"), CHOICES)
def test_choose(
    name: str, pool: Any, dtype: torch.dtype, world: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "auto" never fails; "triton" is that or an error that says why and what else there is."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: world.get("capability", (8, 0)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    monkeypatch.setattr(torch.version, "hip", world.get("hip"))
    monkeypatch.setattr(launch, "is_interpreting", lambda: world.get("interpreting", True))
    monkeypatch.setattr(triton_backend, "launch_failure", lambda device: world.get("failure"))
    if not world.get("installed", True):
        monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    if expected in ("torch", "triton"):
        found = choose(name, pool, dtype)
        assert found.name == expected
        assert isinstance(found, TritonBackend if expected == "triton" else TorchBackend)
    else:
        with pytest.raises(ValueError, match=f'^attention_backend="triton" .*{expected}.*; use "torch".* or "auto"$'):
            choose(name, pool, dtype)


def test_a_small_kernel_is_tried_first(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks if a GPU without a compiler fails every request or is slow in silence, or for good after one OOM."""
    probe = availability.launch_failure.__wrapped__
    assert probe(device) is None and not caplog.text

    def fail(error: Exception) -> Callable[..., None]:
        def copy_blocks(*args: Any) -> None:
            raise error

        return copy_blocks

    monkeypatch.setattr(ops, "copy_blocks", fail(RuntimeError("no C compiler")))
    assert "no C compiler" in probe(device) and "no C compiler" in caplog.text
    monkeypatch.setattr(ops, "copy_blocks", lambda *args: None)
    assert probe(device) == "copies wrongly on this device"
    monkeypatch.setattr(ops, "copy_blocks", fail(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        probe(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3, E5M2], ids=str)
def test_a_step_of_both_backends(dtype: torch.dtype, device: torch.device) -> None:
    """Breaks if one of them ignores an argument, or rounds to fp8 otherwise."""
    given = torch.float32 if dtype in FP8 else dtype
    batch = Batch(Case(given, pool_dtype=dtype, has_sinks=True), device)
    metadata, length = batch.metadata(), len(batch.query)
    key, value = (random_tensor(length, 2, 64, dtype=given, seed=seed).to(device) for seed in (1, 2))
    results, pools = [], []
    for made in (TorchBackend, TritonBackend):
        pool = torch.where(batch.pool.float().isnan(), 0, batch.pool.float()).to(dtype)
        step = made(pool).step(metadata)
        step.write(key, value, 1)
        pools.append(pool)
        results.append(step.attend(batch.query, AttentionParams(1, 0.1, 33, 20.0, batch.sinks)))
    assert same_bits(*pools)
    assert results[0].dtype == results[1].dtype == given
    expected, found = (result.cpu() for result in results)
    assert batch.error(found, expected.double()) < 2 * TOLERANCE[given] + (given == torch.bfloat16) * 1e-2


def test_autocast(device: torch.device) -> None:
    """The model's own attention would compute in autocast's dtype, and so do the kernels."""
    batch = Batch(Case(), device)
    step = TritonBackend(batch.pool).step(batch.metadata())
    expected = step.attend(batch.query.bfloat16(), AttentionParams(1, batch.scale))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = step.attend(batch.query, AttentionParams(1, batch.scale))
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


# Whole models


@pytest.fixture
def make_triton_pair(make_pair: MakePair, device: torch.device) -> MakePair:
    """A stock model and a copy that runs the kernels."""

    def make(name: str, **settings: Any) -> Pair:
        pair = make_pair(build(name).to(device), **({"num_blocks": 64, "attention_backend": "triton"} | settings))
        assert pair.engine.core.pool.attention.backend.name == "triton"
        return pair

    return make


NEW = {"max_new_tokens": 6, "eos_token_id": None}


def prompts(device: torch.device, *lengths: int) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in ragged_batch(lengths or (11, 7, 2)).items()}


def test_chunked_prefill(make_triton_pair: MakePair, device: torch.device) -> None:
    """Breaks if a chunk does not see the chunks before it, or a step of both kinds mixes its rows up."""
    pair = make_triton_pair("gemma2", max_num_batched_tokens=5)
    pair.generate(**prompts(device), **NEW)
    assert max(pair.seen) <= 5
