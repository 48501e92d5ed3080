"""`SpreadKVCache`: a pool whose layers lie on several devices, each device holding its layers' share of every block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_paged.core.cache_groups import NOWHERE, CacheGroups
from hf_paged.kernels.transfers import ToHost
from hf_paged.memory.kv_cache import KVCache, KVGeometry

Devices = Sequence[torch.device | None]  # of each layer; `None`: where the model's inputs are


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a pool on one device.

    Attributes:
        geometry: What its part of a page holds.
        groups: As the pool's; layers that are elsewhere have no place.
    """

    device: torch.device
    geometry: KVGeometry
    groups: CacheGroups


def shares(geometry: KVGeometry, groups: CacheGroups, layers: Devices | None, main: torch.device) -> list[Share]:
    """Shares out a pool: `layers` says where each layer's keys and values are, `None` that all are on `main`, with the
    inputs.
    """
    if layers is None:
        return [Share(main, geometry, groups)]
    devices = [device or main for device in layers]
    return [_share(geometry, groups, devices, device) for device in dict.fromkeys(devices)]


def _share(geometry: KVGeometry, groups: CacheGroups, devices: list[torch.device], device: torch.device) -> Share:
    sizes, places = [0] * len(groups.sizes), [NOWHERE] * len(groups.places)
    for layer, (group, _) in enumerate(groups.places):
        if devices[layer] == device:
            places[layer] = group, sizes[group]
            sizes[group] += 1
    pages = tuple(replace(page, num_layers=size) for page, size in zip(geometry.groups, sizes, strict=True))
    elements = max(page.elements for page in pages)
    own = replace(groups, elements=elements, sizes=tuple(sizes), places=tuple(places), is_single=False)
    return Share(device, replace(geometry, groups=pages, elements=elements), own)


class SpreadKVCache(KVCache):
    """A `KVCache` a device. A block has one number on all of them.

    Attributes:
        parts: Of each device, its layers' share.
        part_of: Which of the parts each layer is in.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        block_size: int,
        main: torch.device,
        compute_dtype: torch.dtype,
        groups: CacheGroups,
        layers: Devices,
    ) -> None:
        """Allocates a tensor on each device.

        Raises:
            ValueError: A device cannot hold its share.
        """
        self.geometry, self.groups, self.block_size = geometry, groups, block_size
        self.num_blocks = self.null_block = num_blocks
        self.compute_dtype = compute_dtype
        self.states = None
        self.device, self.layer_devices = main, tuple(layers)
        own = shares(geometry, groups, layers, main)
        self.parts = [
            KVCache(share.geometry, num_blocks, block_size, share.device, compute_dtype, share.groups) for share in own
        ]
        number = {share.device: index for index, share in enumerate(own)}
        self.part_of = [number[device or main] for device in layers]

    def at(self, layer: int) -> tuple[Tensor, int, int]:
        return self.parts[self.part_of[layer]].at(layer)

    def swap_out(self, pairs: Sequence[tuple[int, int]], num_swap_blocks: int) -> None:
        for part in self.parts:
            part.swap_out(pairs, num_swap_blocks)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        for part in self.parts:
            part.swap_in(pairs)

    def finished_swaps(self) -> list[tuple[int, float]]:
        """The swaps of the device with the largest share: the others have ended theirs by then."""
        finished = [part.finished_swaps() for part in self.parts]
        sizes = [part.geometry.elements for part in self.parts]
        return finished[sizes.index(max(sizes))]

    def block_sums(self, blocks: Sequence[int], groups: Sequence[int] | None = None) -> ToHost:
        """As of one device: the sums of a page's last layer, wherever it is."""
        sums = torch.empty(len(blocks), dtype=torch.float32, device=self.device)
        numbers = [0] * len(blocks) if groups is None else list(groups)
        for group in set(numbers):
            own = [place for place, each in enumerate(numbers) if each == group]
            last = max(layer for layer, (each, _) in enumerate(self.groups.places) if each == group)
            part = self.parts[self.part_of[last]]
            found = part._sums(group, [blocks[place] for place in own])
            sums[torch.tensor(own, device="cpu").to(self.device)] = found.to(self.device)
        return ToHost(sums)

    @contextmanager
    def lent_null_block(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.lent_null_block())
            yield

    def touch(self) -> None:
        for part in self.parts:
            part.touch()

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        for part in self.parts:
            part.zero_blocks(blocks)
