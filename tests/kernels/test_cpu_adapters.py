"""Adapters in C, each row its own, against float64 in torch, on each instruction set; and their bits."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.adapter_cases import BF16, F32, NAN, TOLERANCE, entries_for, entry_for, error_of
from helpers.kernel_cases import INSTRUCTIONS_HERE, random_tensor, same_bits
from hf_paged.kernels import cpu_adapters
from hf_paged.kernels.cpu_adapters import MAX_RANK, CPUAdapters
from hf_paged.kernels.cpu_decoder import PIECE
from hf_paged.kernels.layers import InputError
from hf_paged.kernels.low_rank import LowRank

RANKS = (1, 2, 3, 4, 7, 8, 12, 16, 17, 64)
KERNELS = [
    pytest.param((dtype, name), id=f"{str(dtype).removeprefix('torch.')}-{name}")
    for dtype in (F32, BF16)
    for name in INSTRUCTIONS_HERE
    if name != "AVX512_BF16"  # has nothing for it
]


@pytest.fixture(params=KERNELS, scope="module")
def kernel(request: pytest.FixtureRequest) -> CPUAdapters:
    loaded = cpu_adapters.load(*request.param)
    assert isinstance(loaded, CPUAdapters), loaded
    return loaded


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def added(kernel: CPUAdapters, states: Tensor, output: Tensor, slots: Tensor, table: Any, bias: Any = None) -> Tensor:
    """The output with what adapters add."""
    changed = output.clone()
    kernel.add(states, changed, slots, table, bias)
    return changed


@settings(max_examples=40, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 40), st.sampled_from([PIECE - 1, PIECE + 1, 2 * PIECE + 9])),
    width=st.one_of(st.integers(1, 80), st.sampled_from([1024, 1025, 2051])),
    columns=st.one_of(st.integers(1, 100), st.just(259)),
    ranks=st.lists(st.sampled_from((0, *RANKS)), min_size=1, max_size=6),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_against_the_truth(
    kernel: CPUAdapters, rows: int, width: int, columns: int, ranks: list[int], has_bias: bool, seed: int
) -> None:
    """Any sizes, ranks and kinds in one table; rows without an adapter, or with an empty one, keep their bits."""
    entries = entries_for(width, columns, ranks, seed)
    states = random_tensor(rows, width, dtype=kernel.dtype, seed=seed)
    output = random_tensor(rows, columns, dtype=kernel.dtype, seed=seed + 1)
    bias = random_tensor(columns, dtype=kernel.dtype, seed=seed + 2) if has_bias else None
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, len(ranks), (rows,), generator=generator, dtype=torch.int32)
    found = added(kernel, states, output, slots, kernel.table(entries), bias)
    assert error_of(found, states, output, slots, entries, bias) <= TOLERANCE[kernel.dtype]
    is_plain = torch.tensor([slot < 0 or entries[slot] is None for slot in slots.tolist()], dtype=torch.bool)
    assert same_bits(found[is_plain], output[is_plain])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rank", [*RANKS, 100, MAX_RANK])
def test_every_rank_and_tile(kernel: CPUAdapters, dtype: torch.dtype, rank: int) -> None:
    """Each number of rows that a tile may have, of adapters of each type."""
    entry = entry_for(rank, 133, 75, dtype, seed=rank + 1)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11):
        states, output = (random_tensor(rows, n, dtype=kernel.dtype, seed=rows) for n in (133, 75))
        slots = torch.zeros(rows, dtype=torch.int32)
        found = added(kernel, states, output, slots, kernel.table([entry]))
        assert error_of(found, states, output, slots, [entry]) <= TOLERANCE[kernel.dtype]


@pytest.mark.parametrize(("width", "columns"), [(768, 2048), (33, 17), (1100, 97), (5, 1)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_is_the_same_beside_any_others(kernel: CPUAdapters, width: int, columns: int, threads: int) -> None:
    """Bit for bit: alone, in any order, beside any rows, under another number, shared out among threads."""
    rng = random.Random(width)
    entries = entries_for(width, columns, [16, 3, 0, 8, 64, 1, 16], seed=width)
    rows = 90
    states = random_tensor(rows, width, dtype=kernel.dtype, seed=1)
    output = random_tensor(rows, columns, dtype=kernel.dtype, seed=2)
    bias = random_tensor(columns, dtype=kernel.dtype, seed=3)
    slots = torch.tensor([rng.choice([0, 0, 0, *range(-1, len(entries))]) for _ in range(rows)], dtype=torch.int32)
    table = kernel.table(entries)
    alone = torch.cat(
        [added(kernel, *(x[i : i + 1] for x in (states, output, slots)), table, bias) for i in range(rows)]
    )
    torch.set_num_threads(threads)
    for _ in range(4):
        chosen = torch.tensor(rng.sample(range(rows), rng.choice([2, 9, 40, rows])))
        order = rng.sample(range(len(entries)), len(entries))
        moved = kernel.table([None, *(entries[place] for place in order)])
        renamed = torch.tensor([order.index(s) + 1 if s >= 0 else -7 for s in slots.tolist()], dtype=torch.int32)
        found = added(kernel, states[chosen], output[chosen], renamed[chosen], moved, bias)
        assert same_bits(found, alone[chosen])


def test_numbers_that_are_none(kernel: CPUAdapters) -> None:
    """They stay in their row: an adapter's in its own rows, and of its columns in that column."""
    entries = [entry_for(5, 37, 41, F32, seed=4), entry_for(5, 37, 41, F32, seed=8)]
    states, output = (random_tensor(12, n, dtype=kernel.dtype, seed=n) for n in (37, 41))
    slots = torch.arange(12, dtype=torch.int32) % 2
    clean = added(kernel, states, output, slots, kernel.table(entries))
    states[2, 36], entries[1].b[40, 3] = NAN, float("inf")
    found = added(kernel, states, output, slots, kernel.table(entries))
    is_touched = torch.zeros(12, 41, dtype=torch.bool)
    is_touched[2], is_touched[1::2, 40] = True, True
    assert torch.equal(found.isfinite(), ~is_touched) and torch.equal(found[~is_touched], clean[~is_touched])


def test_a_call_in_a_chain(kernel: CPUAdapters) -> None:
    """What a decoder layer's calls are given: nothing without slots or a table, else what `add` gives."""
    entries = entries_for(40, 50, [4, 16], seed=1)
    table = kernel.table(entries)
    states, output = (random_tensor(9, n, dtype=kernel.dtype, seed=n) for n in (40, 50))
    bias = random_tensor(50, dtype=kernel.dtype, seed=5)
    slots = torch.tensor([0, 1, -1, 1, 0, 0, 0, 1, -1], dtype=torch.int32)
    changed = output.clone()
    call = kernel.call(40, 50, states.data_ptr(), changed.data_ptr(), bias)
    call.rows, call.num_threads = 9, 1
    kernel.function(ctypes.addressof(call))
    call.slots = slots.data_ptr()
    kernel.function(ctypes.addressof(call))
    assert same_bits(changed, output)
    call.table, call.num_slots = table.address, len(table)
    kernel.function(ctypes.addressof(call))
    assert same_bits(changed, added(kernel, states, output, slots, table, bias))


def test_a_table_that_changes(kernel: CPUAdapters) -> None:
    """A slot is emptied and filled; one that has never held anything takes any shape, and adds nothing."""
    states, output = (random_tensor(3, n, dtype=kernel.dtype, seed=n) for n in (6, 10))
    slots, one, other = torch.zeros(3, dtype=torch.int32), *(entry_for(4, 6, 10, F32, seed) for seed in (1, 2))
    table = kernel.table([None])
    assert same_bits(added(kernel, states, output, slots, table), output)
    for entry in (one, other, None):
        table.put(0, entry)
        expected = added(kernel, states, output, slots, kernel.table([entry]))
        assert same_bits(added(kernel, states, output, slots, table), expected)
    with pytest.raises(InputError, match="an adapter's table takes"):
        table.put(0, entry_for(4, 7, 10, F32, 1))


def test_strides_and_shapes_of_states(kernel: CPUAdapters) -> None:
    """Leading dimensions, and rows that don't lie side by side."""
    table = kernel.table([entry_for(4, 6, 10, F32, 1)])
    states, output = random_tensor(2, 3, 6, dtype=kernel.dtype), random_tensor(2, 3, 10, dtype=kernel.dtype, seed=1)
    slots = torch.zeros(6, dtype=torch.int32)
    expected = added(kernel, states.view(6, 6), output.view(6, 10), slots, table)
    for given_states in (states, states.repeat_interleave(2, dim=-1)[..., ::2]):
        assert same_bits(added(kernel, given_states, output, slots, table).view(6, 10), expected)


@pytest.mark.parametrize(
    "bad",
    [
        {"states": torch.zeros(2, 31)},
        {"states": torch.zeros(3, 32)},
        {"states": torch.zeros(2, 32, dtype=BF16)},
        {"states": torch.zeros(2, 32, device="meta")},
        {"output": torch.zeros(2, 49)},
        {"output": torch.zeros(50, 2).t()},
        {"output": torch.zeros(2, 50, dtype=BF16)},
        {"slots": torch.zeros(3, dtype=torch.int32)},
        {"slots": torch.zeros(2, dtype=torch.int64)},
        {"slots": torch.zeros(4, dtype=torch.int32)[::2]},
        {"slots": torch.zeros(2, 1, dtype=torch.int32)},
        {"slots": torch.tensor([0, 1], dtype=torch.int32)},
        {"base_bias": torch.zeros(49)},
        {"base_bias": torch.zeros(50, dtype=BF16)},
    ],
    ids=str,
)
def test_what_add_is_not_made_for(bad: dict[str, Tensor]) -> None:
    kernel = cpu_adapters.load(F32)
    assert isinstance(kernel, CPUAdapters)
    ones, slots = torch.ones(2, 32), torch.zeros(2, dtype=torch.int32)
    table = kernel.table([LowRank(torch.ones(4, 32), torch.ones(50, 4), 0.5)])
    arguments: dict[str, Any] = {"states": ones, "output": torch.ones(2, 50), "slots": slots}
    kernel.add(**arguments, table=table)
    assert (arguments["output"] == 65).all()
    arguments |= bad
    before = arguments["output"].clone()
    with pytest.raises(InputError, match="adapters takes"):
        kernel.add(**arguments, table=table)
    assert same_bits(arguments["output"], before)


@pytest.mark.parametrize(
    "bad",
    [
        {"a": torch.zeros(5, 32)},
        {"a": torch.zeros(32)},
        {"a": torch.zeros(4, 0)},
        {"a": torch.zeros(4, 32, dtype=BF16)},
        {"a": torch.zeros(32, 4).t()},
        {"a": torch.zeros(4, 32, device="meta")},
        {"a": torch.zeros(4, 32).to_sparse()},
        {"a": torch.zeros(0, 32), "b": torch.zeros(50, 0)},
        {"a": torch.zeros(MAX_RANK + 1, 32), "b": torch.zeros(50, MAX_RANK + 1)},
        {"a": torch.zeros(4, 32).half(), "b": torch.zeros(50, 4).half()},
        {"b": torch.zeros(50, 5)},
        {"b": torch.zeros(4, 50).t()},
        {"bias": torch.zeros(49)},
        {"bias": torch.zeros(50, dtype=BF16)},
        {"output_scale": torch.zeros(50, dtype=BF16)},
        {"output_scale": torch.zeros(100)[::2]},
    ],
    ids=str,
)
def test_adapters_it_is_not_made_for(bad: dict[str, Tensor]) -> None:
    kernel = cpu_adapters.load(F32)
    assert isinstance(kernel, CPUAdapters)
    given_entry = {"a": torch.zeros(4, 32), "b": torch.zeros(50, 4), "scale": 1.0}
    assert kernel.table([LowRank(**given_entry)]).shape == (32, 50)
    with pytest.raises(InputError, match="an adapter's table takes"):
        kernel.table([LowRank(**(given_entry | bad))])


def test_what_is_left_to_torch() -> None:
    assert "float16" in str(cpu_adapters.load(torch.float16))
