"""`SlotTables`: where the parts of adapters lie on a GPU, by slot and layer, as `triton_adapters.py` reads it."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from hf_paged.kernels.layers import InputError
from hf_paged.kernels.low_rank import LowRank

FIELDS = 8  # of an entry, int64: addresses of a, b, bias and output_scale; rank, whether a is of half precision, scale
FIRST_SLOTS, FIRST_RANK = 64, 64
MAX_RANK = 1024


class SlotTables:
    """The tables of one model on one device. Entries change on the host; steps see changes after `send` alone.

    Attributes:
        device: The device.
        half: The dtype of adapters that are not in float32.
        tensor: `[slots, layers, FIELDS]` int64 on the device, at one address until `num_moves` grows.
        rank: The most that an entry there may have.
        num_moves: How often `tensor` was put elsewhere or `rank` has grown: recorded graphs notice neither.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, num_layers: int) -> None:
        """For states of a dtype, and at most so many layers."""
        self.device, self.dtype = device, dtype
        self.half = torch.bfloat16 if dtype is torch.float32 else dtype
        self.num_layers = num_layers
        self._lock = threading.Lock()
        self._host = np.zeros((FIRST_SLOTS, num_layers, FIELDS), np.int64)
        self._held: dict[tuple[int, int], LowRank] = {}
        self._changed: set[int] = set()  # slots
        self._replaced: list[LowRank] = []  # which the device may read until it has their successors
        self._left: list[LowRank] = []  # until the last transfer is done
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._most = self.rank = FIRST_RANK
        self.num_moves = 0
        self._allocate()

    def _allocate(self) -> None:
        with torch.inference_mode(False):
            self._staged = torch.zeros(self._host.shape, dtype=torch.int64, pin_memory=self._sent is not None)
            self.tensor = torch.zeros(self._host.shape, dtype=torch.int64, device=self.device)

    def has(self, slot: int, layer: int) -> bool:
        return (slot, layer) in self._held

    def put(self, slot: int, layer: int, entry: LowRank | None) -> None:
        """Sets what an adapter adds behind a layer, from the next `send` on; `None`: nothing.

        Raises:
            InputError: Tensors of other shapes, dtypes, strides or devices than the kernels take.
        """
        row = np.zeros(FIELDS, np.int64)
        if entry is not None:
            self._check(entry)
            parts = (entry.a, entry.b, entry.bias, entry.output_scale)
            row[:4] = [0 if part is None else part.data_ptr() for part in parts]
            row[4], row[5] = len(entry.a), entry.a.dtype is self.half
            row[6] = np.float32(entry.scale).view(np.int32)
        with self._lock:
            if slot >= len(self._host):
                more = max(slot + 1, 2 * len(self._host)) - len(self._host)
                self._host = np.concatenate([self._host, np.zeros((more, *self._host.shape[1:]), np.int64)])
            self._host[slot, layer] = row
            self._most = max(self._most, 1 << (int(row[4]) - 1).bit_length() if row[4] else 0)
            self._changed.add(slot)
            if (before := self._held.pop((slot, layer), None)) is not None:
                self._replaced.append(before)
            if entry is not None:
                self._held[slot, layer] = entry

    def _check(self, entry: LowRank) -> None:
        a, b = entry.a, entry.b
        columns = b.shape[0] if b.ndim == 2 else -1
        vectors = ((entry.bias, a.dtype), (entry.output_scale, torch.float32))
        tensors = [a, b, *(own for own, _ in vectors if own is not None)]
        if not (
            a.ndim == 2
            and a.dtype in (torch.float32, self.half)
            and b.dtype is a.dtype
            and b.shape[1:] == a.shape[:1]
            and 1 <= len(a) <= MAX_RANK
            and all(own is None or (own.shape == (columns,) and own.dtype is dtype) for own, dtype in vectors)
            and all(own.device == self.device and own.is_contiguous() for own in tensors)
            and not any(own.data_ptr() % 16 for own in tensors)
        ):
            expected = f"[rank, in] and [out, rank], contiguous, float32 or {self.half}, on {self.device}"
            raise InputError("a table of adapters", expected, a=a, b=b)

    def send(self) -> Tensor:
        """Gives `tensor`, in which the current stream's work from here on finds the entries as they are now."""
        with self._lock:
            if self._host.shape != self.tensor.shape:
                self._wait()
                self._allocate()
                self._changed = set(range(len(self._host)))
                self.num_moves += 1
            if self._most > self.rank:
                self.rank = self._most
                self.num_moves += 1
            if self._changed:
                self._wait()
                self._left, self._replaced = self._replaced, []
                slots = sorted(self._changed)
                self._staged.numpy()[slots] = self._host[slots]
                for slot in slots:
                    self.tensor[slot].copy_(self._staged[slot], non_blocking=True)
                if self._sent is not None:
                    self._sent.record()
                self._changed.clear()
            return self.tensor

    def _wait(self) -> None:
        """Waits for the last transfer, which may still read what is written now."""
        if self._sent is not None:
            self._sent.synchronize()


class LayerTable:
    """One layer's place in the tables, as a `cpu_adapters.Table` is used."""

    def __init__(self, tables: SlotTables, layer: int) -> None:
        self.tables, self.layer = tables, layer

    def __len__(self) -> int:
        return len(self.tables._host)

    def has(self, slot: int) -> bool:
        """Whether something is added for a slot."""
        return self.tables.has(slot, self.layer)

    def grown(self, num_slots: int) -> LayerTable:
        """Steps under way read what was sent before them: this one."""
        return self

    def put(self, slot: int, entry: LowRank | None) -> None:
        """As `SlotTables.put`."""
        self.tables.put(slot, self.layer, entry)
