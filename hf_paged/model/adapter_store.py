"""`AdapterStore`: any number of adapters by name, of which some are in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

from hf_paged.model.adapter_files import CONFIG, WEIGHTS, AdapterWeights


@dataclass(eq=False)
class Adapter:
    """One adapter of a store, which alone writes to it.

    Attributes:
        uid: Never that of another, also not of one with the same name.
        path: Its folder; `None`: its weights were given, and stay as long as its name is known.
        stamp: Of its files when it was added.
        weights: There at least while it is pinned.
        loading: Held while its files are read.
    """

    name: str
    uid: int
    path: Path | None
    stamp: tuple[int, ...] = ()
    weights: AdapterWeights | None = None
    num_pins: int = 0
    loading: threading.Lock = field(default_factory=threading.Lock)


class AdapterStats(NamedTuple):
    """How many adapters are known and in memory, the bytes of those, and how often one was read from disk."""

    known: int
    resident: int
    bytes: int
    loads: int


class AdapterStore:
    """Keeps adapters within a budget of memory: of those that are not pinned, the least recently used leave first.

    Any thread may call. Files are read on the thread that needs them, under a lock of the one adapter: a second caller
    of its name waits for the first, callers of others don't. Pinned ones stay, even beyond the budget; then nothing
    else does. A name that isn't known, or is taken, is a ValueError.
    """

    def __init__(self, read: Callable[[Path], AdapterWeights], budget: int) -> None:
        """Makes an empty store for `budget` bytes of weights; `read` is `read_adapter` for one model."""
        if budget < 0:
            raise ValueError(f"the budget of adapters is {budget} bytes; it can't be negative")
        self._read = read
        self._budget = budget
        self._lock = threading.Lock()  # of all below; never held while a file is read
        self._known: dict[str, Adapter] = {}
        self._idle: OrderedDict[int, Adapter] = OrderedDict()  # in memory, and may leave; the last was used last
        self._uids = count(1)
        self._num_resident = self._num_bytes = self._num_loads = 0

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def add(self, name: str, source: str | Path | AdapterWeights) -> Adapter:
        """Makes an adapter known, once its files have been read: what `read` refuses is refused here."""
        if isinstance(source, AdapterWeights):
            adapter, weights = Adapter(name, next(self._uids), None), source
        else:
            adapter = Adapter(name, next(self._uids), Path(source), _stamp(Path(source)))
            weights = self._load(adapter)
        with self._lock:
            if name in self._known:
                raise ValueError(f"there is an adapter {name!r} already; remove it first, or take another name")
            self._known[name] = adapter
            self._enter(adapter, weights)
            self._settle(adapter)
        return adapter

    def remove(self, name: str) -> None:
        """Forgets a name; who has pinned the adapter keeps it."""
        with self._lock:
            adapter = self._find(name)
            del self._known[name]
            self._settle(adapter)

    def pin(self, name: str) -> Adapter:
        """Brings an adapter's weights into memory, where they stay until `unpin` is called as often.

        Raises:
            ValueError: As above, or its files can't be read anymore, or are others than those that were added.
        """
        with self._lock:
            adapter = self._find(name)
            adapter.num_pins += 1
            self._idle.pop(adapter.uid, None)
        try:
            with adapter.loading:
                if adapter.weights is None:
                    weights = self._load(adapter)
                    with self._lock:
                        self._enter(adapter, weights)
        except BaseException:
            self.unpin(adapter)
            raise
        return adapter

    def unpin(self, adapter: Adapter) -> None:
        """Ends one use of what `pin` returned: by now its name may be gone, or another adapter's."""
        with self._lock:
            adapter.num_pins -= 1
            self._settle(adapter)

    def stats(self) -> AdapterStats:
        with self._lock:
            return AdapterStats(len(self._known), self._num_resident, self._num_bytes, self._num_loads)

    def _load(self, adapter: Adapter) -> AdapterWeights:
        """Refuses other files than those by which the prefixes of its `uid` were computed."""
        assert adapter.path is not None
        weights = self._read(adapter.path)
        if _stamp(adapter.path) != adapter.stamp:
            raise ValueError(f"{adapter.path}: it has changed since {adapter.name!r} was added: add it again")
        return weights

    def _enter(self, adapter: Adapter, weights: AdapterWeights) -> None:
        adapter.weights = weights
        self._num_loads += adapter.path is not None
        self._num_resident += 1
        self._num_bytes += weights.num_bytes
        self._make_room()

    def _settle(self, adapter: Adapter) -> None:
        """Lets an adapter that isn't pinned wait for its next use, or go."""
        if adapter.num_pins or adapter.weights is None:
            return
        if self._known.get(adapter.name) is not adapter:
            self._idle.pop(adapter.uid, None)
            self._leave(adapter)
        elif adapter.path is not None:
            self._idle[adapter.uid] = adapter
            self._make_room()

    def _make_room(self) -> None:
        while self._num_bytes > self._budget and self._idle:
            self._leave(self._idle.popitem(last=False)[1])

    def _leave(self, adapter: Adapter) -> None:
        assert adapter.weights is not None
        self._num_resident -= 1
        self._num_bytes -= adapter.weights.num_bytes
        adapter.weights = None

    def _find(self, name: str) -> Adapter:
        if (adapter := self._known.get(name)) is None:
            raise ValueError(f"there is no adapter {name!r} among these {len(self._known)}: {list(self._known)[:8]}")
        return adapter


def _stamp(path: Path) -> tuple[int, ...]:
    """What tells a folder's files from others that take their places."""
    found = [file.stat() for name in (CONFIG, WEIGHTS) if (file := path / name).is_file()]
    return tuple(number for file in found for number in (file.st_ino, file.st_size, file.st_mtime_ns))
