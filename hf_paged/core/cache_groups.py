"""`CacheGroups`: which layers share pages and a block table, so that all pages are of one size.

A page is one block of tokens in the layers of one group. Layers that cache alike (a *kind*) form one group, or several
where there are more of them than go into a page: a page has as many places for layers of a kind as fit, some of them
empty if need be. So any group's page fits any place of the pool, and a group whose layers look back over a window only
gives back what lies behind it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

# What fewer groups may leave empty, as a share of what is filled: by all layers, and by those of any kind.
MAX_PADDING, MAX_PADDING_OF_A_KIND = 0.1, 0.125
# By layers that see all tokens, beside others with windows: they hold nearly all of a long text. Unless that takes more
# groups, each of which costs a step time, than so many.
MAX_PADDING_BESIDE_WINDOWS, MANY_GROUPS = 0.05, 16
NOWHERE = (-1, -1)  # the place of a layer that stores nothing


class LayerKind(Hashable, Protocol):
    """What a layer caches of a token, as far as grouping goes: layers whose kinds are equal may share pages."""

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; `None`: all before it."""

    @property
    def chunk(self) -> int | None:
        """Pieces that a sequence is cut into, of which a query sees its own; `None`: it is not."""

    @property
    def is_cross(self) -> bool:
        """Whether it caches what an encoder has read, and not the sequence's own tokens."""

    @property
    def elements_per_token(self) -> int: ...

    @property
    def row_elements(self) -> int:
        """How many of these lie side by side."""


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model's layers; those that see all tokens come first, those of cross-attention last.

    Attributes:
        elements: Numbers that a token takes in a page, the same for all groups.
        sizes: Of each group, for how many layers a page has places.
        windows: Of each group, the tokens that its layers see; `None`: all.
        chunks: Of each group, the pieces that its layers cut a sequence into; `None`: they don't.
        places: Of each layer, its group and its index within that group's pages; `NOWHERE` if it stores nothing. A
            group's last place is never empty.
        is_single: Whether there is one group that sees all tokens, with each layer at its own index.
        num_cross: How many groups, the last ones, hold what an encoder has read.
    """

    elements: int
    sizes: tuple[int, ...]
    windows: tuple[int | None, ...]
    chunks: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    is_single: bool
    num_cross: int = 0

    @property
    def own_windows(self) -> tuple[int | None, ...]:
        """`windows` of the groups that hold a sequence's own tokens."""
        return self.windows[: len(self.windows) - self.num_cross]

    @classmethod
    def single(cls, num_layers: int, elements: int = 0) -> CacheGroups:
        """All layers in one group that sees all tokens."""
        places = tuple((0, index) for index in range(num_layers))
        return cls(elements, (num_layers,), (None,), (None,), places, True)

    @classmethod
    def of(cls, layers: Sequence[LayerKind | None]) -> CacheGroups:
        """The fewest groups with at most `MAX_PADDING` of empty places; layers that are all alike are one group.

        Where some layers have windows, up to `MANY_GROUPS` that leave little empty in those that have none. Where the
        kinds' sizes have no page in common that keeps to that, the one that leaves least empty.

        Args:
            layers: Of each layer, in the model's order; `None`: it stores nothing. If none does, there are no groups.
        """
        kinds: dict[LayerKind, list[int]] = {}
        for index, kind in enumerate(layers):
            if kind is not None:
                kinds.setdefault(kind, []).append(index)
        if not kinds:
            return cls(0, (), (), (), (NOWHERE,) * len(layers), False)
        elements = _elements_per_page({kind: len(members) for kind, members in kinds.items()})
        sizes: list[int] = []
        windows: list[int | None] = []
        chunks: list[int | None] = []
        places = [NOWHERE] * len(layers)
        num_cross = 0
        for kind, members in sorted(kinds.items(), key=lambda item: (item[0].is_cross, item[0].window is not None)):
            size = elements // kind.elements_per_token
            for start in range(0, len(members), size):
                own = members[start : start + size]
                for index, layer in enumerate(own, size - len(own)):
                    places[layer] = len(windows), index
                sizes.append(size)
                windows.append(kind.window)
                chunks.append(kind.chunk)
                num_cross += kind.is_cross
        is_single = windows == [None] and NOWHERE not in places
        return cls(elements, tuple(sizes), tuple(windows), tuple(chunks), tuple(places), is_single, num_cross)

    def padding(self, layers: Sequence[LayerKind | None]) -> float:
        """The empty part of one token's pages, as a share of the part that these layers fill."""
        filled = sum(kind.elements_per_token for kind in layers if kind is not None)
        return self.elements * len(self.sizes) / filled - 1


def _elements_per_page(counts: dict[LayerKind, int]) -> int:
    """Numbers of a token in a page, for so many layers of each kind."""
    rows = math.lcm(*(kind.row_elements for kind in counts))
    filled = {kind: count * kind.elements_per_token for kind, count in counts.items()}

    def padding(elements: int, kind: LayerKind, count: int) -> tuple[int, int]:
        """Returns how many groups this kind takes, and how many elements they leave empty."""
        num_groups = -(-count // (elements // kind.elements_per_token))
        return num_groups, num_groups * elements - filled[kind]

    are_mixed = len({kind.window is None for kind in counts}) > 1

    def cost(elements: int) -> tuple[bool, bool, int, int, int]:
        found = {kind: padding(elements, kind, count) for kind, count in counts.items()}
        num_groups, empty = (sum(numbers) for numbers in zip(*found.values(), strict=True))
        is_wide = empty > MAX_PADDING * sum(filled.values()) or any(
            own > MAX_PADDING_OF_A_KIND * filled[kind] for kind, (_, own) in found.items()
        )
        is_costly = are_mixed and (
            num_groups > MANY_GROUPS
            or any(
                own > MAX_PADDING_BESIDE_WINDOWS * filled[kind]
                for kind, (_, own) in found.items()
                if kind.window is None
            )
        )
        first, second = (empty, num_groups) if is_wide else (num_groups, empty)
        return is_wide, is_costly and not is_wide, first, second, elements

    least = max(kind.elements_per_token for kind in counts)
    sizes = {
        -(-max(least, number * kind.elements_per_token) // rows) * rows
        for kind, count in counts.items()
        for number in range(1, count + 1)
    }
    return min(sizes, key=cost)
