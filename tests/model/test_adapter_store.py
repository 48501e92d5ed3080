"""`AdapterStore`: what is in memory and what leaves, loads beside each other, names that come again."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from hf_paged.kernels.low_rank import LowRank
from hf_paged.model.adapter_files import CONFIG, WEIGHTS, AdapterWeights
from hf_paged.model.adapter_store import Adapter, AdapterStore

UNIT = 64  # bytes


def weights_of(size: int) -> AdapterWeights:
    low = LowRank(a=torch.zeros(size, 8), b=torch.zeros(8, size), scale=1.0)
    return AdapterWeights({"layer": low}, {}, {}, {})


def get(store: AdapterStore, name: str) -> AdapterWeights:
    """An adapter's weights, which are held no longer."""
    adapter = store.pin(name)
    try:
        assert adapter.weights is not None
        return adapter.weights
    finally:
        store.unpin(adapter)


class Disk:
    """Reads folders `sNN...`, whose names say how large they are in units, and counts."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.living: weakref.WeakSet[AdapterWeights] = weakref.WeakSet()

    def read(self, path: Path) -> AdapterWeights:
        self.reads[path.name] += 1
        if "bad" in path.name:
            raise ValueError(f"{path}: bad")
        weights = weights_of(int(path.name[1:3]))
        self.living.add(weights)
        return weights


def make(budget: int) -> tuple[AdapterStore, Disk]:
    disk = Disk()
    return AdapterStore(disk.read, budget * UNIT), disk


class StoreMachine(RuleBasedStateMachine):
    """Against a model that keeps a list in the order of uses."""

    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.store, self.disk = make(5)
        self.known: dict[str, Adapter] = {}
        self.sizes: dict[int, int] = {}
        self.counts: Counter[int] = Counter()
        self.resident: list[int] = []  # by uid, the last was used last
        self.held: set[int] = set()
        self.seen: list[int] = []
        self.loads = 0

    def use(self, uid: int) -> None:
        self.loads += uid not in self.resident
        self.resident = [x for x in self.resident if x != uid] + [uid]
        self.shrink()

    def shrink(self) -> None:
        known = {x.uid for x in self.known.values()}
        self.resident = [x for x in self.resident if x in known or self.counts[x]]
        for uid in list(self.resident):
            if sum(self.sizes[x] for x in self.resident) > 5 and not self.counts[uid] and uid not in self.held:
                self.resident.remove(uid)

    @rule(name=st.sampled_from("abcdefgh"), size=st.integers(0, 7), is_held=st.sampled_from([False, False, True]))
    def add(self, name: str, size: int, is_held: bool) -> None:
        if name in self.known:
            with pytest.raises(ValueError, match="already"):
                self.store.add(name, Path(f"s{size:02}"))
            return
        adapter = self.store.add(name, weights_of(size) if is_held else Path(f"s{size:02}"))
        assert adapter.name == name and adapter.uid not in self.seen
        self.seen.append(adapter.uid)
        self.known[name], self.sizes[adapter.uid] = adapter, size
        self.loads -= is_held
        self.held |= {adapter.uid} if is_held else set()
        self.counts[adapter.uid] += 1  # as it comes, others leave
        self.use(adapter.uid)
        self.counts[adapter.uid] -= 1
        self.shrink()

    @rule(name=st.sampled_from("abcdefgh"))
    def get(self, name: str) -> None:
        if name not in self.known:
            with pytest.raises(ValueError, match="there is no adapter"):
                get(self.store, name)
            return
        uid = self.known[name].uid
        assert get(self.store, name).linears["layer"].a.shape[0] == self.sizes[uid]
        self.counts[uid] += 1
        self.use(uid)
        self.counts[uid] -= 1
        self.shrink()

    @rule(target=pins, name=st.sampled_from("abcdefgh"))
    def pin(self, name: str) -> Any:
        if name not in self.known:
            return multiple()
        adapter = self.store.pin(name)
        assert adapter is self.known[name]
        self.counts[adapter.uid] += 1
        self.use(adapter.uid)
        return adapter

    @rule(adapter=consumes(pins))
    def unpin(self, adapter: Adapter) -> None:
        assert adapter.weights is not None
        self.store.unpin(adapter)
        self.counts[adapter.uid] -= 1
        if not self.counts[adapter.uid] and adapter.uid in self.resident:  # used until now
            self.resident.append(self.resident.pop(self.resident.index(adapter.uid)))
        self.shrink()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.store.remove(name)
        del self.known[name]
        self.shrink()
        with pytest.raises(ValueError, match="there is no adapter"):
            self.store.pin(name)

    @invariant()
    def is_as_expected(self) -> None:
        sizes = [self.sizes[uid] for uid in self.resident]
        assert self.store.stats() == (len(self.known), len(sizes), UNIT * sum(sizes), self.loads)
        assert {x.uid for x in self.known.values() if x.weights is not None} == {
            uid for uid in self.resident if uid in {x.uid for x in self.known.values()}
        }
        assert len(self.disk.living) == len([uid for uid in self.resident if uid not in self.held])


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestStore = StoreMachine.TestCase


def test_pinned_adapters_may_exceed_the_budget_and_then_nothing_else_stays() -> None:
    store, _ = make(4)
    for name in "abcd":
        store.add(name, Path(f"s03{name}"))
    pinned = [store.pin(name) for name in "abc"]
    assert store.stats() == (4, 3, 9 * UNIT, 7)
    weights = get(store, "d")
    assert weights.num_bytes == 3 * UNIT and store.stats() == (4, 3, 9 * UNIT, 8)
    for adapter in pinned:
        assert adapter.weights is not None
        store.unpin(adapter)
    assert store.stats() == (4, 1, 3 * UNIT, 8) and pinned[2].weights is not None  # the one that was used last


def test_a_removed_name_is_free_at_once_and_its_weights_live_until_the_last_unpin() -> None:
    store, disk = make(9)
    store.add("a", Path("s02"))
    first, again = store.pin("a"), store.pin("a")
    assert first is again
    store.remove("a")
    second = store.add("a", Path("s03"))
    assert second.uid != first.uid and store.pin("a") is second
    store.unpin(first)
    assert first.weights is not None and store.stats() == (1, 2, 5 * UNIT, 2)
    store.unpin(first)
    assert first.weights is None and store.stats() == (1, 1, 3 * UNIT, 2)
    with pytest.raises(ValueError, match=r"no adapter 'b' among these 1: \['a'\]"):
        store.remove("b")


def test_a_bad_file_is_refused_as_it_is_added_and_costs_nothing() -> None:
    store, disk = make(9)
    with pytest.raises(ValueError, match="bad"):
        store.add("a", Path("bad"))
    assert store.stats() == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="negative"):
        AdapterStore(disk.read, -1)


def test_a_load_that_fails_leaves_the_adapter_as_it_was() -> None:
    is_broken = False

    def read(path: Path) -> AdapterWeights:
        if is_broken:
            raise ValueError(f"{path}: gone")
        return weights_of(3)

    store = AdapterStore(read, UNIT)  # too small for it: nothing stays
    store.add("a", Path("x"))
    is_broken = True
    for _ in range(3):
        with pytest.raises(ValueError, match="gone"):
            store.pin("a")
    is_broken = False
    adapter = store.pin("a")
    assert store.stats() == (1, 1, 3 * UNIT, 2)
    store.unpin(adapter)
    assert store.stats() == (1, 0, 0, 2)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_files_that_changed_are_not_taken_for_the_ones_that_were_added(name: str, tmp_path: Path) -> None:
    for file in (CONFIG, WEIGHTS):
        (tmp_path / file).write_bytes(b"1234")
    store = AdapterStore(lambda path: weights_of(3), 0)
    adapter = store.add("a", tmp_path)
    get(store, "a")
    (tmp_path / "new").write_bytes(b"1235")
    os.replace(tmp_path / "new", tmp_path / name)
    with pytest.raises(ValueError, match="has changed since 'a' was added"):
        get(store, "a")
    store.remove("a")
    assert store.add("a", tmp_path).uid > adapter.uid
    assert get(store, "a").num_bytes == 3 * UNIT


class Gate:
    """Lets reads through one by one, and tells who is there."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.arrived = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)
        self.is_open = True

    def read(self, path: Path) -> AdapterWeights:
        self.reads.append(path.name)
        if not self.is_open:
            self.arrived.release()
            assert self.passes.acquire(timeout=60)
        return weights_of(1)


def test_loads_run_side_by_side_and_one_name_loads_once() -> None:
    gate = Gate()
    store = AdapterStore(gate.read, 0)
    for name in "ab":
        store.add(name, Path(name))
    gate.is_open, gate.reads = False, []
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(store.pin, name) for name in "aaabbb"]
        for _ in range(2):
            assert gate.arrived.acquire(timeout=60)  # both are being read, neither has returned
        assert sorted(gate.reads) == ["a", "b"] and not any(future.done() for future in futures)
        assert store.stats().resident == 0  # nor is the lock held
        store.remove("a")
        gate.passes.release(2)
        pinned = [future.result(timeout=60) for future in futures]
    assert sorted(gate.reads) == ["a", "b"]
    assert len({id(x.weights) for x in pinned}) == 2 and all(x.weights is not None for x in pinned)
    for adapter in pinned:
        store.unpin(adapter)
    assert store.stats()[:3] == (1, 0, 0) and all(x.weights is None for x in pinned)


def test_two_adds_of_one_name_make_one_adapter() -> None:
    gate = Gate()
    gate.is_open = False
    store = AdapterStore(gate.read, 9 * UNIT)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(store.add, "a", Path("a")) for _ in range(2)]
        for _ in range(2):
            assert gate.arrived.acquire(timeout=60)
        gate.passes.release(2)
        errors = [future.exception(timeout=60) for future in futures]
    assert sorted(map(type, errors), key=str) == sorted([type(None), ValueError], key=str)
    assert store.stats()[:3] == (1, 1, UNIT)


def test_many_threads_find_their_own_weights() -> None:
    store, disk = make(6)
    names = [f"s{size:02}" for size in range(1, 9)]
    for name in names:
        store.add(name, Path(name))

    def work(seed: int) -> None:
        for i in range(200):
            name = names[(i * (2 * seed + 1) + seed) % len(names)]
            try:
                adapter = store.pin(name)
            except ValueError:  # another thread has just removed it
                continue
            assert adapter.weights is not None and adapter.weights.num_bytes == int(name[1:]) * UNIT
            if i % 17 == 0:
                with suppress(ValueError):  # another thread may be faster
                    store.remove(name)
                    store.add(name, Path(name))
            assert adapter.weights is not None
            store.unpin(adapter)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    gc.collect()
    stats = store.stats()
    assert stats.bytes <= 6 * UNIT and stats.resident == len(disk.living) and 0 < stats.known <= len(names)
    for name in names:
        with suppress(ValueError):  # removed by one thread while another was about to add it
            store.remove(name)
    assert store.stats()[:3] == (0, 0, 0)


def test_a_thousand_loads_and_unloads_leak_nothing() -> None:
    store, disk = make(4)
    adapters: weakref.WeakSet[Adapter] = weakref.WeakSet()

    def cycle(rounds: int) -> None:
        for i in range(rounds):
            adapters.add(store.add(f"a{i % 7}", Path("s03")))
            store.unpin(store.pin(f"a{i % 7}"))
            if i >= 6:
                store.remove(f"a{(i - 6) % 7}")
        for i in range(rounds - 6, rounds):
            store.remove(f"a{i % 7}")

    cycle(50)
    tracemalloc.start()
    try:
        cycle(50)
        before = tracemalloc.take_snapshot()
        cycle(1000)
        gc.collect()
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    found = {x.traceback[0].filename: x.size_diff for x in after.compare_to(before, "filename") if x.size_diff > 0}
    grown = {name: size for name, size in found.items() if "hf_paged" in name}
    assert sum(grown.values()) < 5_000, grown
    assert store.stats()[:3] == (0, 0, 0) and not disk.living and not adapters
