"""`CacheRows`: the rows of a `PagedCache`, as sequences of the pool, and operations on them that wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from hf_paged.core.sequence import Sequence


class SequenceStore(Protocol):
    """What a cache needs of the engine that owns the pool. What changes a sequence is called with its lock held."""

    @property
    def num_layers(self) -> int: ...
    @property
    def cache_type(self) -> Any: ...
    @property
    def places_by_column(self) -> bool: ...
    @property
    def num_stored(self) -> int: ...
    @property
    def num_cross(self) -> int: ...
    def windows(self) -> list[int | None]: ...
    def stores(self, layer: int) -> bool: ...
    def transaction(self) -> AbstractContextManager[None]: ...
    def post(self, change: Callable[[], None]) -> None: ...
    def new_sequence(self) -> Sequence: ...
    def fork_sequence(self, sequence: Sequence, apart: bool = False) -> Sequence: ...
    def free_sequences(self, sequences: Iterable[Sequence]) -> None: ...
    def can_crop(self, start: int, end: int) -> bool: ...
    def crop_sequence(self, sequence: Sequence, num_tokens: int) -> None: ...
    def keep_past(self, sequence: Sequence) -> None: ...
    def abandon_sequences(self, sequences: Iterable[Sequence]) -> None: ...
    def read_tokens(
        self, layer: int, sequences: list[Sequence | None], padding: list[int], width: int
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Row:
    """What a row is to become.

    Attributes:
        sequence: The sequence that it goes on with; `None`: it is finished.
        num_tokens: What that is cut to; `None`: nothing.
        keeps_past: See `PagedCache.activate_past_recording`.
    """

    sequence: Sequence | None
    num_tokens: int | None = None
    keeps_past: bool = False


Change = Callable[[list[_Row]], list[_Row]]


class CacheRows:
    """A batch of rows, each a sequence or finished, its blocks given back.

    What its caller does to rows between two forwards is queued here, and becomes one change of the tables: made by the
    engine's loop before its next step, or before that by what reads the sequences. Errors are raised at the operation,
    from the counts of this object.

    Attributes:
        padding: Left columns of each row that hold no token.
        fan_out: Equal rows of the batch that each row stands for.
    """

    def __init__(self, store: SequenceStore) -> None:
        """No rows yet."""
        self.padding: list[int] = []
        self.fan_out = 1
        self._store = store
        self._is_live: list[bool] = []  # as the padding, what will be when all changes are made
        self._keeps_from: int | None = None  # the column since which nothing behind a window is given back
        self._stored: list[Sequence | None] = []  # `None`: finished. Changed with the engine's lock held
        self._changes: list[Change] = []  # the caller's thread adds to the end, `settle` takes from the beginning
        self._error: RuntimeError | None = None
        # The list, and not the rows, or they would live for ever.
        weakref.finalize(self, _abandon, store, self._stored).atexit = False

    def __len__(self) -> int:
        return len(self.padding)

    @property
    def sequences(self) -> list[Sequence | None]:
        """All of them, as they are now. Raises the error of a change that could not be made."""
        if self._changes:
            with self._store.transaction():
                pass  # it begins with what was posted
        if self._error is not None:
            raise self._error
        return self._stored

    # The engine's side

    def settle(self) -> None:
        """Makes the changes that wait. The engine's lock is held."""
        changes = self._changes[:]
        if not changes:
            return
        rows = [_Row(sequence) for sequence in self._stored]
        for change in changes:
            rows = change(rows)
        kept = {row.sequence.seq_id: row for row in rows if row.sequence is not None}
        self._store.free_sequences(s for s in self._stored if s is not None and s.seq_id not in kept)
        for row in kept.values():
            self._change(row)
        taken: set[int] = set()
        self._stored[:] = [self._take(row.sequence, taken) for row in rows]
        del self._changes[: len(changes)]  # only now: as long as one is there, readers wait for the lock

    def _change(self, row: _Row) -> None:
        assert row.sequence is not None
        if row.num_tokens is not None:
            try:
                self._store.crop_sequence(row.sequence, row.num_tokens)
            except RuntimeError as error:
                self._error = error
        if row.keeps_past:
            self._store.keep_past(row.sequence)

    def _take(self, sequence: Sequence | None, taken: set[int]) -> Sequence | None:
        if sequence is None:
            return None
        if sequence.seq_id in taken:
            return self._store.fork_sequence(sequence)
        taken.add(sequence.seq_id)
        return sequence

    # The caller's side

    def _post(self, change: Change) -> None:
        self._changes.append(change)
        self._store.post(partial(_settle, weakref.ref(self)))

    def open(self, num_rows: int) -> None:
        """Makes the (empty) rows of a first forward."""
        with self._store.transaction():
            self._stored += [self._store.new_sequence() for _ in range(num_rows)]
            self.padding += [0] * num_rows
            self._is_live += [True] * num_rows

    def split(self) -> None:
        """Gives every row of the batch a sequence of its own, sharing all blocks, where one stood for several."""
        if self.fan_out > 1:
            fan_out, self.fan_out = self.fan_out, 1
            self.select([row for row in range(len(self)) for _ in range(fan_out)])

    def retire(self, rows: Iterable[int]) -> None:
        """Ends rows of the batch."""
        rows = set(rows)
        if rows:
            self.split()
        finished = {row for row in rows if self._is_live[row]}
        if finished:
            self._is_live = [is_live and row not in finished for row, is_live in enumerate(self._is_live)]
            self._post(lambda old: [_Row(None) if index in finished else row for index, row in enumerate(old)])

    def select(self, indices: list[int]) -> None:
        """Row `i` of the batch becomes what row `indices[i]` was."""
        self.split()
        if indices != list(range(len(self))):
            self.padding[:] = [self.padding[index] for index in indices]
            self._is_live = [self._is_live[index] for index in indices]
            self._post(lambda old: [old[index] for index in indices])

    def crop(self, width: int, new_width: int) -> None:
        """Cuts all rows from `width` columns to the first `new_width`, or none.

        Raises:
            RuntimeError: What is behind the windows of so few tokens has been given back.
        """
        kept = width if self._keeps_from is None else min(width, self._keeps_from)
        padding = [min(pad, new_width) for pad in self.padding]
        for old, new, is_live in zip(self.padding, padding, self._is_live, strict=True):
            if is_live and not self._store.can_crop(max(kept - old, 0), new_width - new):
                raise RuntimeError(
                    f"the cache can't be cropped to {new_width - new} tokens: layers with a sliding window or a "
                    "state have freed what they would need; call activate_past_recording() before forwards that you "
                    "want to undo"
                )
        lengths = [new_width - pad for pad in padding]
        self.padding[:] = padding
        if self._keeps_from is not None:
            self._keeps_from = new_width
        if self._stored or self._changes:
            self._post(lambda old: [replace(row, num_tokens=n) for row, n in zip(old, lengths, strict=True)])

    def keep_past(self, width: int) -> None:
        """From `width` columns on, layers with a window keep what lies behind it, until the next crop."""
        self._keeps_from = width
        self._post(lambda old: [replace(row, keeps_past=True) for row in old])

    def clear(self) -> None:
        """Frees all rows."""
        self._error, self._keeps_from, self._is_live = None, None, []
        self.padding.clear()
        self._post(lambda old: [])

    def copy_from(self, other: CacheRows) -> None:
        """Becomes equal to another one's rows, by forks of them that are scheduled by themselves."""
        with self._store.transaction():
            forks = [None if row is None else self._store.fork_sequence(row, apart=True) for row in other.sequences]
            self._stored += forks
        self.padding += other.padding
        self.fan_out, self._is_live, self._keeps_from = other.fan_out, other._is_live.copy(), other._keeps_from


def _settle(reference: weakref.ref[CacheRows]) -> None:
    rows = reference()
    if rows is not None:
        rows.settle()


def _abandon(store: Any, rows: list[Sequence | None]) -> None:
    # Runs wherever the garbage collector does: it only hands the blocks over, without any lock.
    store.abandon_sequences([row for row in rows if row is not None])
