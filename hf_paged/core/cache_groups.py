"""`CacheGroups`: which layers share pages and a block table, so that all pages are of one size.

A page is one block of tokens in the layers of one group. Layers that cache alike (a *kind*) form one group, or several
where there are more of them than of another kind: a group has as many layers as every other one, some of them empty if
need be. So any group's page fits any place of the pool, and a group whose layers look back over a window only gives
back what lies behind it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_PADDING = 0.1  # empty layers that fewer groups may cost, as a share of the layers of their kind


class LayerKind(Hashable, Protocol):
    """What a layer caches of a token, as far as grouping goes: layers whose kinds are equal may share pages."""

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; `None`: all before it."""


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model's layers; those that see all tokens come first.

    Attributes:
        layers_per_page: layers of every group, empty ones included.
        windows: of each group, the tokens that its layers see; `None`: all.
        places: of each layer, its group and its index within that group's pages. A group's last layer is never empty.
    """

    layers_per_page: int
    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def single(cls, num_layers: int) -> CacheGroups:
        """All layers in one group that sees all tokens."""
        return cls(num_layers, (None,), tuple((0, index) for index in range(num_layers)))

    @classmethod
    def of(cls, layers: Sequence[LayerKind]) -> CacheGroups:
        """The fewest groups with at most `MAX_PADDING` of empty layers; layers that are all alike are one group.

        Args:
            layers: Of each layer, in the model's order.

        Raises:
            ValueError: There are none.
        """
        if not layers:
            raise ValueError("a model without layers caches nothing")
        kinds: dict[LayerKind, list[int]] = {}
        for index, kind in enumerate(layers):
            kinds.setdefault(kind, []).append(index)
        size = _layers_per_page([len(members) for members in kinds.values()])
        windows: list[int | None] = []
        places = [(0, 0)] * len(layers)
        for kind, members in sorted(kinds.items(), key=lambda item: item[0].window is not None):
            for start in range(0, len(members), size):
                own = members[start : start + size]
                for index, layer in enumerate(own, size - len(own)):
                    places[layer] = len(windows), index
                windows.append(kind.window)
        return cls(size, tuple(windows), tuple(places))


def _layers_per_page(counts: Sequence[int]) -> int:
    """Layers of a page, for kinds of so many layers each."""

    def cost(size: int) -> tuple[int, int]:
        return sum(-(-count // size) for count in counts), sum(-count % size for count in counts)

    sizes = range(1, max(counts) + 1)
    return min((size for size in sizes if all(-n % size <= MAX_PADDING * n for n in counts)), key=cost)
