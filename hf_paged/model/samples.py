"""Elements of matrices by which writes that leave no other trace are noticed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes of an element


def samples(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Of matrices on CPU, elements along diagonals, as bits: of each row and of each column at least one."""
    found: list[Tensor] = []
    for tensor in tensors:
        if type(tensor) is not nn.Parameter or not tensor.is_cpu or not tensor.numel():
            continue
        if (integer := _INTEGERS.get(tensor.element_size())) is None:
            continue
        (rows, columns), (down, right) = tensor.shape, tensor.stride()
        (side, length), along = sorted((rows, columns)), down if rows > columns else right
        bits = tensor.detach().view(integer)
        found.append(bits.as_strided((length // side, side), (side * along, down + right)))
        if length % side:
            found.append(bits.as_strided((side,), (down + right,), bits.storage_offset() + (length - side) * along))
    return found
