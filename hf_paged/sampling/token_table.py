"""`TokenTable`: the tokens so far of the rows whose logits processors or stopping criteria look at them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hf_paged.kernels.transfers import to_device


class TokenTable:
    """Rows of token ids on a device, written there as they are chosen: the host need not know them.

    Not thread-safe: the pool's lock is held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[int] = []
        self._ids = self._zeros(0, 0)

    @property
    def num_rows(self) -> int:
        return len(self._ids) - len(self._free)

    def add(self, input_ids: Tensor) -> list[int]:
        """Takes rows for `[rows, width]` prompts, padding and all; returns their numbers. `remove` gives them back."""
        count, width = input_ids.shape
        capacity, room = self._ids.shape
        if count > len(self._free) or width >= room:  # by half at least, so that growing costs little in the long run
            rows = capacity if count <= len(self._free) else max(capacity + count, capacity * 3 // 2)
            self._grow(rows, max(room, width + 64))
        numbers = [self._free.pop() for _ in range(count)]
        with torch.inference_mode(False):
            self._ids[to_device(numbers, self._device), :width] = to_device(input_ids, self._device).to(torch.int64)
        return numbers

    def remove(self, rows: list[int]) -> None:
        self._free += rows

    def with_room(self, longest: int) -> Tensor:
        """`[rows, more than longest]`, all rows: a kernel writes to them by itself."""
        if longest >= self._ids.shape[1]:
            self._grow(len(self._ids), longest * 3 // 2 + 64)
        return self._ids

    def write(self, rows: list[int], lengths: list[int], tokens: Tensor) -> None:
        ids = self.with_room(max(lengths))
        ids[to_device(rows, self._device), to_device(lengths, self._device)] = tokens

    def reorder(self, rows: Tensor, parents: Tensor, length: int, tokens: Tensor) -> None:
        """Gives rows the first `length` tokens of others, and one more; all tensors are `[B, K]`, on the device."""
        ids = self.with_room(length)
        ids[rows] = ids[parents]
        ids[rows, length] = tokens

    def read(self, rows: list[int], lengths: list[int], marks_ends: bool = False) -> Tensor:
        """`[rows, max(lengths)]`, the first tokens of rows.

        Behind a shorter row's end its last token is repeated, or -1, if that `marks_ends`.
        """
        width = max(lengths)
        index = to_device(rows, self._device)
        if min(lengths) == width:
            return self._ids[index, :width]
        columns = np.minimum(np.arange(width), np.array(lengths)[:, None] - 1)
        ids = self._ids[index[:, None], to_device(columns, self._device)]
        if not marks_ends:
            return ids
        ends = to_device(np.array(lengths)[:, None], self._device)
        return ids.masked_fill(torch.arange(width, device=self._device) >= ends, -1)

    def _grow(self, rows: int, width: int) -> None:
        ids = self._zeros(rows, width)
        capacity, room = self._ids.shape
        ids[:capacity, :room] = self._ids
        self._free += range(capacity, rows)
        self._ids = ids

    def _zeros(self, rows: int, width: int) -> Tensor:
        with torch.inference_mode(False):  # whatever the caller is in: later calls must be able to write
            return torch.zeros(rows, width, dtype=torch.int64, device=self._device)
