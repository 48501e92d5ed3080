"""`RemoteRows`: rows of a `PagedCache` on a rank that decides nothing: counts alone, blocks are rank 0's business."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock

from torch import Tensor

from hf_paged.attention.cache import PagedCache
from hf_paged.attention.source_cache import PagedSourceCache
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.core.sequence import Sequence, SequenceGroup
from hf_paged.model.traits import ModelTraits


class ModelLayers:
    """What a `PagedCache` asks of the layers of its model."""

    def __init__(self, traits: ModelTraits) -> None:
        self._traits = traits

    @property
    def num_layers(self) -> int:
        return self._traits.num_layers

    @property
    def cache_type(self) -> type[PagedCache]:
        return PagedSourceCache if self._traits.cross else PagedCache

    @property
    def places_by_column(self) -> bool:
        return self._traits.places_by_column

    @property
    def num_stored(self) -> int:
        """Places for what is cached, of layers, their indexers, and their cross-attention."""
        return len(self._traits.stored)

    @property
    def num_cross(self) -> int:
        """Layers, if they attend to what an encoder has read."""
        return len(self._traits.cross)

    def windows(self) -> list[int | None]:
        """The last tokens that each layer keeps and a query sees, itself included; `None`: all."""
        return [None if layer is None else layer.window for layer in self._traits.stored]

    def stores(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own; `num_layers + layer`: its indexer."""
        return 0 <= layer < len(self._traits.stored) and self._traits.stored[layer] is not None


class RemoteRows(ModelLayers):
    """What a `PagedCache` asks for (`cache.SequenceStore`): sequences without blocks, changed at once."""

    def __init__(self, traits: ModelTraits) -> None:
        super().__init__(traits)
        self._lock = RLock()
        self._numbers = itertools.count()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock:
            yield

    def post(self, change: Callable[[], None]) -> None:
        with self._lock:
            change()

    def new_sequence(self) -> Sequence:
        number = next(self._numbers)
        return Sequence(number, SequenceGroup(number))

    def fork_sequence(self, sequence: Sequence, apart: bool = False) -> Sequence:
        return self.new_sequence()

    def free_sequences(self, sequences: Iterable[Sequence]) -> None:
        """There is nothing to free."""

    def abandon_sequences(self, sequences: Iterable[Sequence]) -> None:
        """There is nothing to free."""

    def can_crop(self, start: int, end: int) -> bool:
        """Rank 0 says whether it can."""
        return True

    def crop_sequence(self, sequence: Sequence, num_tokens: int) -> None:
        """There is nothing to crop."""

    def keep_past(self, sequence: Sequence) -> None:
        """There is nothing to keep."""

    def read_tokens(
        self, layer: int, sequences: list[Sequence | None], padding: list[int], width: int
    ) -> tuple[Tensor, Tensor]:
        raise unsupported_on_ranks("reading the keys and values of a PagedCache")


def unsupported_on_ranks(what: str) -> UnsupportedCallError:
    """What is not done on several ranks."""
    return UnsupportedCallError(
        f"{what} is not supported over several processes (tp_plan): give a cache of transformers' own as "
        "past_key_values, or load the model on one process"
    )
