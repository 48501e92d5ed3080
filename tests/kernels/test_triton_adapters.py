"""Adapters in Triton's interpreter, each row its own, against float64 in torch; rows leave each other alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.adapter_cases import BF16, F32, TOLERANCE, entries_for, entry_for, error_of
from helpers.kernel_cases import random_tensor, repaired_interpreter, same_bits

pytest.importorskip("triton")  # an extra, and not on every platform
from hf_paged.kernels import slot_tables, triton_adapters
from hf_paged.kernels.layers import InputError
from hf_paged.kernels.low_rank import LowRank
from hf_paged.kernels.slot_tables import SlotTables

LAYER = 2


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    with repaired_interpreter():
        yield


def placed(entries: Sequence[LowRank | None], dtype: torch.dtype) -> tuple[SlotTables, list[LowRank | None]]:
    """Tables with these, and the entries as they are there: their rows lie side by side."""
    tables = SlotTables(torch.device("cpu"), dtype, 3)
    whole = [
        None if own is None else dataclasses.replace(own, a=own.a.contiguous(), b=own.b.contiguous()) for own in entries
    ]
    for slot, own in enumerate(whole):
        tables.put(slot, LAYER, own)
    tables.send()
    return tables, whole


def added(states: Tensor, output: Tensor, slots: Tensor, tables: SlotTables, bias: Any = None) -> Tensor:
    """The output with what adapters add."""
    changed = output.clone()
    triton_adapters.add(states, changed, slots, tables, LAYER, bias)
    return changed


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "width", "columns", "ranks"),
    [
        (1, 64, 48, [16]),
        (21, 136, 75, [16, 3, 0, 40]),
        (17, 1030, 70, [1, 17, 64, 4]),
        (40, 600, 200, [8, 8, 100]),
        (5, 7, 3, [2]),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_against_the_truth(
    dtype: torch.dtype, tokens: int, width: int, columns: int, ranks: list[int], has_bias: bool
) -> None:
    """Ranks and kinds in one table, of both dtypes; rows without an adapter keep their bits."""
    tables, entries = placed(entries_for(width, columns, ranks, seed=tokens + has_bias), dtype)
    states, output = (random_tensor(tokens, size, dtype=dtype, seed=size) for size in (width, columns))
    bias = random_tensor(columns, dtype=dtype, seed=3) if has_bias else None
    rng = random.Random(tokens)
    slots = torch.tensor([rng.choice([0, *range(-1, len(ranks))]) for _ in range(tokens)], dtype=torch.int32)
    found = added(states, output, slots, tables, bias)
    assert error_of(found, states, output, slots, entries, bias) <= TOLERANCE[dtype]
    is_plain = torch.tensor([slot < 0 or entries[slot] is None for slot in slots.tolist()], dtype=torch.bool)
    assert same_bits(found[is_plain], output[is_plain])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_row_is_the_same_beside_any_others(dtype: torch.dtype) -> None:
    """Bit for bit, in steps of one size: beside any rows, also of numbers that are none, in any order of slots."""
    entries = entries_for(300, 90, [16, 3, 0, 8, 40], seed=6)
    tables, _ = placed(entries, dtype)
    states, output = (random_tensor(20, size, dtype=dtype, seed=size) for size in (300, 90))
    slots = torch.arange(20, dtype=torch.int32) % 6 - 1
    together = added(states, output, slots, tables)
    moved, _ = placed([None, *entries], dtype)
    for row in range(20):
        others = torch.full_like(slots, int(slots[row]))
        strange = torch.full_like(states, float("nan"))
        strange[row] = states[row]
        assert same_bits(added(strange, output, others, tables)[row], together[row])
        assert same_bits(added(states, output, others + (others >= 0).int(), moved)[row], together[row])


def test_tables_that_grow_and_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is what is added, until the next; told is what recorded steps can't read any more."""
    monkeypatch.setattr(slot_tables, "FIRST_SLOTS", 2)
    monkeypatch.setattr(slot_tables, "FIRST_RANK", 4)
    states, output = (random_tensor(3, size, dtype=F32, seed=size) for size in (32, 16))
    tables = SlotTables(torch.device("cpu"), F32, 3)
    first, second = (entry_for(4, 32, 16, F32, seed=seed) for seed in (1, 2))
    zero = torch.zeros(3, dtype=torch.int32)
    tables.put(0, LAYER, first)
    assert same_bits(added(states, output, zero, tables), output)
    tables.send()
    one = added(states, output, zero, tables)
    assert error_of(one, states, output, zero, [first]) < 1e-6
    tables.put(0, LAYER, second)
    assert same_bits(added(states, output, zero, tables), one) and tables.has(0, LAYER)
    address = tables.tensor.data_ptr()
    assert tables.send().data_ptr() == address and tables.num_moves == 0
    assert error_of(added(states, output, zero, tables), states, output, zero, [second]) < 1e-6
    tables.put(5, LAYER, entry_for(40, 32, 16, F32, seed=3))
    tables.put(0, LAYER, None)
    tables.send()
    assert tables.num_moves == 2 and tables.rank == 64 and not tables.has(0, LAYER)
    assert same_bits(added(states, output, zero, tables), output)
    assert error_of(added(states, output, zero + 5, tables), states, output, zero, [tables._held[5, LAYER]]) < 1e-6


def test_what_is_refused() -> None:
    tables, _ = placed([entry_for(4, 32, 16, F32, seed=1)], BF16)
    good = entry_for(4, 32, 16, F32, seed=1)
    for bad in (
        {"a": good.a.double(), "b": good.b.double()},
        {"a": good.a.half(), "b": good.b.half()},
        {"a": good.a.t()},
        {"b": good.b[:, :3].contiguous()},
        {"bias": torch.zeros(15)},
        {"a": random_tensor(129, dtype=F32)[1:].view(4, 32)},
    ):
        with pytest.raises(InputError):
            tables.put(0, LAYER, dataclasses.replace(good, **bad))
    states, output, slots = (torch.zeros(3, 32), torch.zeros(3, 16), torch.zeros(3, dtype=torch.int32))
    for given in (
        (states, output, slots),
        (states.bfloat16(), output.bfloat16(), slots.long()),
        (states.bfloat16(), output.bfloat16(), slots[:2]),
        (states.bfloat16(), output.bfloat16().t().contiguous().t(), slots),
    ):
        with pytest.raises(InputError):
            triton_adapters.add(*given, tables, LAYER)
