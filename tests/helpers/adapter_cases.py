"""Adapters of all kinds behind a linear layer, for the kernels that add them, and how far these are from the truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.kernel_cases import random_tensor
from hf_paged.kernels.low_rank import LowRank, add_low_rank

F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 1e-6, BF16: 4e-3}  # of an error over the sum of all that is added up; bfloat16 rounds its results
NAN = float("nan")


def entry_for(rank: int, width: int, columns: int, dtype: torch.dtype, seed: int) -> LowRank:
    """One of any kind by its seed: with a bias, an output scale, both or none; rows side by side or apart."""
    a = random_tensor(rank, width, dtype=dtype, seed=seed)
    b = random_tensor(columns, rank, dtype=dtype, seed=seed + 1)
    if seed % 5 == 0:
        a, b = (torch.cat([each, each[:, :1] * NAN], dim=1)[:, :-1] for each in (a, b))
    bias = random_tensor(columns, dtype=dtype, seed=seed + 2) if seed % 2 else None
    output_scale = random_tensor(columns, dtype=F32, seed=seed + 3) if seed % 3 == 0 else None
    return LowRank(a, b, 2.0 ** (seed % 4 - 1) * 0.7, bias, output_scale)


def entries_for(width: int, columns: int, ranks: Sequence[int], seed: int) -> list[LowRank | None]:
    """Of both dtypes; of rank 0: none."""
    return [
        entry_for(rank, width, columns, (F32, BF16)[(seed + place) % 2], seed + 7 * place) if rank else None
        for place, rank in enumerate(ranks)
    ]


def truth(states: Tensor, output: Tensor, slots: Tensor, entries: Sequence[LowRank | None], bias: Any = None) -> Tensor:
    expected = output.double()
    add_low_rank(states.double(), expected, slots, entries, bias)
    return expected


def without_signs(own: LowRank) -> LowRank:
    values = (getattr(own, field.name) for field in dataclasses.fields(own))
    return LowRank(*(value.abs() if isinstance(value, Tensor) else value for value in values))


def error_of(
    found: Tensor, states: Tensor, output: Tensor, slots: Tensor, entries: Sequence[LowRank | None], bias: Any = None
) -> float:
    """The largest error of an element, over the sum without signs that it comes from."""
    unsigned = [None if own is None else without_signs(own) for own in entries]
    sizes = truth(states.abs(), output.abs(), slots, unsigned, None if bias is None else -bias.abs())
    sizes += 0 if bias is None else 2 * bias.double().abs()
    error = (found.double() - truth(states, output, slots, entries, bias)).abs() / sizes.clamp_min(1e-300)
    return float(error.max()) if error.numel() else 0.0
