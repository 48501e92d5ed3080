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

NOWHERE = (-1, -1)  # the place of a layer that caches no tokens
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
        places: of each layer, its group and its index within that group's pages; `NOWHERE`: it caches no tokens. A
            group's last layer is never empty.
    """

    layers_per_page: int
    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def is_plain(self) -> bool:
        """Whether there is one group, which keeps everything, and whose layers are all of the model's."""
        return self.windows == (None,) and self.layers_per_page == len(self.places)

    @classmethod
    def single(cls, num_layers: int) -> CacheGroups:
        """All layers in one group that sees all tokens."""
        return cls(num_layers, (None,), tuple((0, index) for index in range(num_layers)))

    @classmethod
    def of(cls, layers: Sequence[LayerKind | None]) -> CacheGroups:
        """The fewest groups with at most `MAX_PADDING` of empty layers; layers that are all alike are one group.

        Args:
            layers: Of each layer, in the model's order; `None`: it caches no tokens. If all are, there is no group.

        Raises:
            ValueError: There are none.
        """
        if not layers:
            raise ValueError("a model without layers caches nothing")
        kinds: dict[LayerKind, list[int]] = {}
        for index, kind in enumerate(layers):
            if kind is not None:
                kinds.setdefault(kind, []).append(index)
        windows: list[int | None] = []
        places = [NOWHERE] * len(layers)
        if not kinds:
            return cls(0, (), tuple(places))
        size = _layers_per_page([len(members) for members in kinds.values()])
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
