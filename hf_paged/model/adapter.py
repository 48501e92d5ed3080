"""`Adapter`: one thing that is added to the model for some rows, and whether its weights have changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_paged.kernels.low_rank import LowRank
from hf_paged.model.samples import samples


class Weights(NamedTuple):
    """What an adapter is, by the ids of the layers without adapters.

    Attributes:
        added: Behind them.
        whole: In their place.
        tensors: All that both are made of, where they may change.
    """

    added: dict[int, LowRank]
    whole: dict[int, nn.Module]
    tensors: list[Tensor]


class Adapter:
    """What is added to the model for some rows: an adapter, or several that are active together.

    Its slot is its own until nothing refers to it any more; rows that are generated do.

    Attributes:
        name: In messages.
        slot: Its number in steps.
        uid: Of no other one in the process, and
        version: how often its weights have changed.
        follows_base: Whether what it reads depends on the model's own weights, beside `tensors`.
        is_gone: Whether it was found to be deleted.
        is_stepped: Whether an optimizer has changed them since they were read.
        places: Where its tensors lie.
    """

    __slots__ = (
        "__weakref__",
        "_counting",
        "_find",
        "_read",
        "_samples",
        "_versions",
        "follows_base",
        "is_gone",
        "is_stepped",
        "name",
        "places",
        "slot",
        "uid",
        "version",
        "weights",
    )

    _uids = count(1)

    def __init__(
        self,
        name: str,
        read: Callable[[], Weights],
        find: Callable[[], list[Tensor]] = list,
        uid: Hashable = None,
    ) -> None:
        """`read` makes its weights, `find` finds the tensors that they are made of, where they may change."""
        self.name, self.slot, self._read, self._find = name, -1, read, find
        self.uid = next(self._uids) if uid is None else uid
        self.version, self.is_gone, self.is_stepped, self.follows_base = 0, False, False, False
        self.weights = read()
        self._look()

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Part of the prefix-cache key of its rows."""
        return ("adapter", self.uid, self.version)

    def has_moved(self) -> bool:
        """Whether its tensors were written to, as far as they count that, or put elsewhere: asked for at each step."""
        return (
            self.is_stepped
            or [tensor._version for tensor in self._counting] != self._versions
            or [tensor.data_ptr() for tensor in self.weights.tensors] != self.places
        )

    def refresh(self) -> bool:
        """Reads its weights anew if they changed since it was last asked; whether they did."""
        tensors, found = self.weights.tensors, self._find()
        if len(found) != len(tensors):  # it was deleted: the rows that have it keep it
            self.is_gone = True
            return False
        are_same = all(map(operator.is_, found, tensors)) and not self.has_moved()
        if are_same and all(map(torch.equal, _samples(tensors), self._samples)):
            return False
        self.read_again()
        return True

    def read_again(self) -> None:
        """Reads its weights anew: they are others now."""
        self.is_stepped = False
        self.weights = self._read()
        self._look()
        self.version += 1

    def _look(self) -> None:
        tensors = self.weights.tensors
        self._counting = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._counting]
        self.places = [tensor.data_ptr() for tensor in tensors]
        self._samples = [own.clone() for own in _samples(tensors)]


def _samples(tensors: list[Tensor]) -> list[Tensor]:
    return samples([tensor for tensor in tensors if tensor.ndim == 2])
