"""`KVCache`: the one tensor behind all block tables, its size, and what moves its blocks in and out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor

from hf_paged.core.cache_groups import CacheGroups
from hf_paged.core.control_group import available_memory
from hf_paged.kernels.reference import block_sums, elements
from hf_paged.kernels.transfers import ToHost, to_device
from hf_paged.memory.state_cache import StateCache, StateLayout
from hf_paged.memory.swap_space import SwapSpace

PAGE_BYTES = 4096  # of the system's memory, or a part of a page
BOOKKEEPING = 160  # bytes of a block's entry in a `BlockPool`


@dataclass(frozen=True, slots=True)
class PageShape:
    """Keys and values of one token in the layers of a group's page."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    is_latent: bool = False

    @property
    def elements(self) -> int:
        """The numbers that a token takes."""
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim)

    def tensor_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """A block is `[num_layers, 2, num_kv_heads, block_size, head_dim]`, keys before values; where these differ in
        width, or are latents, they lie side by side, `[num_layers, 1, num_kv_heads, block_size, key_dim + value_dim]`.
        """
        if self.key_dim == self.value_dim and not self.is_latent:
            return self.num_layers, 2, self.num_kv_heads, block_size, self.key_dim
        return self.num_layers, 1, self.num_kv_heads, block_size, self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The contents of a pool's pages.

    Attributes:
        groups: The shape of each group's pages.
        elements: Numbers that a token takes in any page.
    """

    groups: tuple[PageShape, ...]
    elements: int
    dtype: torch.dtype

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVGeometry:
        """One group of layers that are all alike."""
        page = PageShape(num_layers, num_kv_heads, head_dim, head_dim)
        return cls((page,), page.elements, dtype)

    @property
    def is_uniform(self) -> bool:
        """Whether all pages are of one shape and full."""
        return len(set(self.groups)) == 1 and self.groups[0].elements == self.elements

    def bytes_per_block(self, block_size: int) -> int:
        return self.elements * block_size * self.dtype.itemsize


def num_blocks_for_memory(
    geometry: KVGeometry,
    block_size: int,
    memory_fraction: float,
    max_tokens: int,
    device: torch.device,
    reserved: int = 0,
) -> int:
    """Blocks that fit into a fraction of the device's free memory, at least 1 and at most enough for `max_tokens`.

    Args:
        memory_fraction: Of what is free less `reserved`.
        max_tokens: No more are of use.
        reserved: Bytes of the free memory that must stay free (what steps hold).
    """
    usable = max(0, free_memory(device) - reserved)
    affordable = int(usable * memory_fraction) // geometry.bytes_per_block(block_size)
    return max(1, min(affordable, -(-max_tokens // block_size)))


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now; on a GPU also what torch keeps and does not use; on CPU no more than what the
    control group leaves.
    """
    if device.type != "cuda":
        left, free = available_memory(), int(psutil.virtual_memory().available)
        return free if left is None else min(left, free)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def check_size(geometry: KVGeometry, num_blocks: int, block_size: int, device: torch.device) -> None:
    """Refuses a pool that is larger than all memory, before anything is made of that size.

    Raises:
        ValueError: With both sizes, and what would fit.
    """
    each, host = geometry.bytes_per_block(block_size), psutil.virtual_memory().total
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host
    fitting = min(total // each - 1, host // BOOKKEEPING)  # one block stays empty
    if num_blocks > fitting:
        advice = f"{fitting:,} blocks would fit" if fitting > 0 else "patch with a smaller block_size"
        raise ValueError(
            f"num_blocks={num_blocks} of block_size={block_size} tokens need {(num_blocks + 1) * each:,} bytes, and "
            f"{num_blocks * BOOKKEEPING:,} for their bookkeeping; {device} has {total:,} bytes in all: {advice}"
        )


class KVCache:
    """Keys and values of all layers and blocks.

    A block is one contiguous piece across the layers of its page, so copying or moving it is one operation. The extra
    block at index `null_block` stays zero and pads block tables.

    Attributes:
        tensor: All blocks, `[num_blocks + 1, ...]`: each as its page's shape says where all pages are of one shape,
            else as plain numbers.
        views: Of each group, all blocks as its own page's shape says.
        groups: Where a layer's keys and values are: in the blocks of its group's tables, at its index of a page.
        states: What layers keep of all of a sequence's tokens together.
        device: The device that the model's inputs are wanted on.
        layer_devices: That of each layer; `None`: the same.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        groups: CacheGroups | None = None,
        state_layout: StateLayout | None = None,
    ) -> None:
        """Allocates the tensor, zeroed. On CPU the pages are mapped at first write, not now.

        Args:
            compute_dtype: The dtype of the model; `None`: the geometry's.
            groups: Of the model's layers; `None`: one of as many as a page has.
            state_layout: Where the states of its layers are in pages of their own; `None`: they have none.

        Raises:
            ValueError: The device cannot hold it; the message names both sizes.
        """
        self.geometry = geometry
        self.groups = groups or CacheGroups.single(geometry.groups[0].num_layers)
        self.block_size = block_size
        self._swap_space: SwapSpace | None = None
        self.num_blocks = self.null_block = num_blocks  # the one behind those that sequences own
        page = geometry.groups[0].tensor_shape(block_size) if geometry.is_uniform else (geometry.elements * block_size,)
        try:
            self.tensor = _zeros((num_blocks + 1, *page), geometry.dtype, device)
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            size = (num_blocks + 1) * geometry.bytes_per_block(block_size)
            raise ValueError(
                f"a pool of {num_blocks} blocks needs {size:,} bytes, which {device} does not have free; "
                "lower num_blocks (or memory_fraction)"
            ) from error
        self.device = self.tensor.device
        self.layer_devices: tuple[torch.device | None, ...] | None = None
        self.compute_dtype = compute_dtype or geometry.dtype
        if geometry.is_uniform:
            self.views = [self.tensor] * len(geometry.groups)
        else:
            shapes = {own: own.tensor_shape(block_size) for own in geometry.groups}
            views = {own: self.tensor[:, : math.prod(shape)].unflatten(1, shape) for own, shape in shapes.items()}
            self.views = [views[own] for own in geometry.groups]
        self.states = None if state_layout is None else StateCache(state_layout, self.tensor)

    def at(self, layer: int) -> tuple[Tensor, int, int]:
        """The place of a layer's keys and values: the view of its group, its index there, and the width of a key."""
        group, index = self.groups.places[layer]
        return self.views[group], index, self.geometry.groups[group].key_dim

    def swap_out(self, pairs: Sequence[tuple[int, int]], num_swap_blocks: int) -> None:
        """Copies blocks to CPU memory, pairs `(device, CPU)`."""
        if self._swap_space is None:
            self._swap_space = SwapSpace(self.tensor, num_swap_blocks)
        self._swap_space.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks back, pairs `(CPU, device)`."""
        assert self._swap_space is not None
        self._swap_space.swap_in(pairs)

    def finished_swaps(self) -> list[tuple[int, float]]:
        """Blocks and seconds of the copies one way that have ended since this was last asked."""
        return self._swap_space.finished() if self._swap_space is not None else []

    def block_sums(self, blocks: Sequence[int], groups: Sequence[int] | None = None) -> ToHost:
        """`[len(blocks)]` float32, on its way to the host: of a block whose tokens met NaN or infinity, not finite.

        Args:
            groups: The group that each belongs to; `None`: the first.

        Only of the values of a page's last layer (which is one of each group): what attention brings to a token from
        a bad one beside it is NaN, which stays in the token's hidden state, and so is in all that later layers
        compute.
        """
        if groups is None or self.geometry.is_uniform:
            return ToHost(self._sums(0, list(blocks)))
        sums = torch.empty(len(blocks), dtype=torch.float32, device=self.tensor.device)
        for group in set(groups):
            own = [place for place, each in enumerate(groups) if each == group]
            sums[to_device(own, sums.device)] = self._sums(group, [blocks[place] for place in own])
        return ToHost(sums)

    def _sums(self, group: int, blocks: list[int]) -> Tensor:
        return block_sums(self.views[group], to_device(blocks, self.tensor.device))

    @contextmanager
    def lent_null_block(self) -> Iterator[None]:
        """Within it tokens may be written into the null block, which holds zeros afterwards. No step may run."""
        try:
            yield
        finally:
            elements(self.tensor[self.null_block]).zero_()

    def touch(self) -> None:
        """Has the system give all of its memory now: on CPU it gives a page when the page is first written to."""
        if self.tensor.is_cpu:
            pages = self.tensor.view(torch.uint8).view(-1)[::PAGE_BYTES]
            pages.copy_(pages.clone())  # the same bytes: what blocks hold stays

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        elements(self.tensor).index_fill_(0, to_device(list(blocks), self.tensor.device), 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Outside inference mode, whatever the caller is in: an inference tensor could not be written by later calls.
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy's zeros come from calloc: gigabytes cost nothing until written. torch.zeros on CPU writes them all.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
