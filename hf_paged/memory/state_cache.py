"""`StateCache`: the states of sequences in the pool's pages, read and written layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_paged.kernels.paged_state import PagedState, StateRows
from hf_paged.memory.spec import UNIT, StateSpec, StateTensor


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the states of a model's layers lie in the pages of one sequence.

    A layer's state lies within one page, or begins with a page of its own: so it is read without those around it.

    Attributes:
        page_units: Numbers of eight bytes in a page.
        places: Of each layer with a state, the number at which it begins and how many it has.
        tensors: Of each, what it is made of, the number of each one's begin in the state, and its element type.
    """

    page_units: int
    num_pages: int
    places: dict[int, tuple[int, int]]
    tensors: dict[int, list[tuple[StateTensor, int, torch.dtype]]]

    @classmethod
    def of(cls, specs: Mapping[int, StateSpec], page_bytes: int, dtype: torch.dtype) -> StateLayout:
        """The layout for pages of so many bytes, in a model of this dtype.

        Raises:
            ValueError: Pages are not multiples of eight bytes.
        """
        if page_bytes % UNIT:
            raise ValueError(
                f"a block of {page_bytes} bytes can't hold a recurrent state, which needs multiples of {UNIT}: "
                "patch with a larger block_size"
            )
        page = page_bytes // UNIT
        end = 0
        places: dict[int, tuple[int, int]] = {}
        tensors: dict[int, list[tuple[StateTensor, int, torch.dtype]]] = {}
        for layer, spec in specs.items():
            size, own = 0, []
            for tensor in spec.tensors:
                own.append((tensor, size, tensor.dtype or dtype))
                size += tensor.num_units(dtype)
            if end % page + size > page:
                end = -(-end // page) * page
            places[layer], tensors[layer] = (end, size), own
            end += size
        return cls(page, -(-end // page), places, tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of a sequence's pages."""
        return self.num_pages * self.page_units * UNIT


class LayerStates:
    """The states of some sequences in one layer, to be changed in place.

    Attributes:
        buffer: `[B, numbers]`, all of it.
        tensors: What it is made of, each `[B, *shape]`, views of the buffer.
    """

    def __init__(self, layout: StateLayout, layer: int, buffer: Tensor) -> None:
        self.buffer = buffer
        self.tensors: list[tuple[StateTensor, Tensor]] = []
        for tensor, start, dtype in layout.tensors[layer]:
            flat = buffer[:, start:].view(dtype)[:, : math.prod(tensor.shape)]
            self.tensors.append((tensor, flat.unflatten(1, tensor.shape)))


class StateCache:
    """States in the pages of a pool: a sequence has so many pages, wherever they are."""

    def __init__(self, layout: StateLayout, pool: Tensor) -> None:
        """Takes a pool's pages, `[pages, ...]`, contiguous."""
        self.layout = layout
        self.num_pages = layout.num_pages  # of a sequence
        self._pages = pool.view(torch.uint8).view(pool.shape[0], -1).view(torch.int64)

    def empty(self, layer: int, num_sequences: int) -> LayerStates:
        """Makes room for the states of so many sequences, not initialized."""
        size = self.layout.places[layer][1]
        buffer = torch.empty(num_sequences, size, dtype=torch.int64, device=self._pages.device)
        return LayerStates(self.layout, layer, buffer)

    def read(self, layer: int, pages: Tensor) -> LayerStates:
        """Copies the states of sequences with these pages, `[B, pages]` int64."""
        parts = [
            self._pages[:, part].index_select(0, pages[:, own].reshape(-1)).view(len(pages), -1)
            for _, own, part in self._parts(layer)
        ]
        return LayerStates(self.layout, layer, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def write(self, layer: int, pages: Tensor, states: LayerStates) -> None:
        for numbers, own, part in self._parts(layer):
            index = pages[:, own].reshape(-1)
            self._pages[:, part].index_copy_(0, index, states.buffer[:, numbers].reshape(len(index), -1))

    def in_place(self, layer: int, rows: StateRows) -> list[tuple[StateTensor, PagedState]]:
        """The states of a step's rows, for kernels that read and write them where they are."""
        found: list[tuple[StateTensor, PagedState]] = []
        first = self.layout.places[layer][0]
        for tensor, start, dtype in self.layout.tensors[layer]:
            pool = self._pages.view(dtype)
            strides = tuple(math.prod(tensor.shape[place + 1 :]) for place in range(len(tensor.shape)))
            offset = (first + start) * UNIT // dtype.itemsize
            found.append((tensor, PagedState(rows, pool, offset, (len(rows.pages), *tensor.shape), strides)))
        return found

    def save(self, pages: Tensor) -> Tensor:
        """Copies whole states of sequences with these pages, `[B, pages]` int64."""
        return self._pages.index_select(0, pages.reshape(-1))

    def restore(self, pages: Tensor, saved: Tensor) -> None:
        """Writes back what `save` has returned for the same sequences."""
        self._pages.index_copy_(0, pages.reshape(-1), saved)

    def clear(self, page: int) -> None:
        self._pages[page].zero_()

    def _parts(self, layer: int) -> list[tuple[slice, slice, slice]]:
        """A layer's state in one or two parts: its numbers, which of the sequence's pages they fill, where in each."""
        first, size = self.layout.places[layer]
        unit = self.layout.page_units
        page, offset = divmod(first, unit)
        if offset + size <= unit:
            return [(slice(0, size), slice(page, page + 1), slice(offset, offset + size))]
        full, rest = divmod(size, unit)  # it begins with a page
        parts = [(slice(0, full * unit), slice(page, page + full), slice(0, unit))]
        if rest:
            parts.append((slice(full * unit, size), slice(page + full, page + full + 1), slice(0, rest)))
        return parts
