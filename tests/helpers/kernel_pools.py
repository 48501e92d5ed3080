"""Poisoned pools, and what a kernel writes into one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.kernel_cases import same_bits
from hf_paged.kernels import reference


def as_given(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, with the strides that it has."""
    if 0 in tensor.stride():  # one head for all
        return tensor[:, :1].to(device).expand(tensor.shape)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def nan_pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 1:  # of both kinds of fp8
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype)


def check_written(
    write: Callable[[Tensor, Tensor, Tensor, int, Tensor], None],
    key: Tensor,
    value: Tensor,
    slots: list[int],
    layer: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Every slot that is written, and every other one, and what lies before and behind the pool, bit for bit."""
    num_blocks, around = max([0, *slots]) // block_size + 2, 4
    whole = nan_pool((num_blocks + 2 * around, 2, 2, key.shape[1], block_size, key.shape[2]), dtype)
    expected = whole.clone()
    target = reference.elements(expected)[around:-around]
    for part, states in enumerate((key, value)):
        stored = reference.elements(reference.quantize(states, dtype))
        for token, slot in enumerate(slots):
            if slot >= 0:
                target[slot // block_size, layer, part, :, slot % block_size] = stored[token]
    whole = whole.to(device)
    key, value = (as_given(states, device) for states in (key, value))
    before = key.clone(), value.clone()
    write(key, value, whole[around:-around], layer, torch.tensor(slots, dtype=torch.int64, device=device))
    assert same_bits(whole.cpu(), expected)
    assert same_bits(key, before[0]) and same_bits(value, before[1])
