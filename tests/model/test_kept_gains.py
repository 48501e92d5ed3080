"""Measurements that later processes read: as many as it takes, of this machine, whatever is in the file."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_paged.kernels import c_compiler
from hf_paged.model import kept_gains, trial
from hf_paged.model.kept_gains import KeptGains
from hf_paged.model.trial import Pair, Trials

KIND = ("Linear", 48, torch.float32, "panels", 2)
TOLERANCE = {torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(c_compiler, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the next measurements say of a pair's own way; the other takes one second."""
    coming: list[float] = []

    def measure(*series: list[tuple[Any, Any]]) -> list[dict[Any, float]]:
        return [{kind: coming.pop(0) for kind, _ in series[0]}, {kind: 1.0 for kind, _ in series[1]}]

    monkeypatch.setattr(trial, "_seconds", measure)
    return coming


def gain(other: float = 1.0) -> float:
    """Of a process that has just started."""
    pair = Pair(KIND, lambda: torch.ones(3), lambda: torch.full((3,), other))
    return Trials(KeptGains()).gains([pair], TOLERANCE)[0]


def test_three_processes_measure(seconds: list[float]) -> None:
    """The first one's machine was busy."""
    seconds.extend([0.5, 3.0, 2.0])
    assert [gain(), gain(), gain()] == [1.0, 1.75, 2.0]
    assert gain() == gain() == 2.0 and not seconds


def test_what_is_known_still_has_to_agree(seconds: list[float]) -> None:
    seconds.extend([2.0, 2.0, 2.0])
    for _ in range(3):
        gain()
    with pytest.raises(RuntimeError, match="wrongly"):
        gain(other=1.01)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"3", b'{"x": 3}', b"\xff\x00", b"{}", b'{"%s": ["a"]}', b'{"%s": [-1, 0, NaN]}'),
        *(b"[" * 100_000, b'{"%s": [1' + 400 * b"0" + b"]}"),
    ],
    ids=lambda content: content[:12].decode(errors="replace"),
)
def test_a_file_that_is_no_such_file(content: bytes, folder: Path, seconds: list[float]) -> None:
    seconds.extend([2.0, 2.0])
    gain()
    (path,) = folder.iterdir()
    path.write_bytes(content.replace(b"%s", repr(KIND).encode()))
    assert gain() == 2.0 and not seconds
    assert json.loads(path.read_bytes())[repr(KIND)] == [2.0]


@pytest.mark.parametrize("what", ["processor", "torch", "kernels"])
def test_another_machine(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        KeptGains().add({KIND: 2.0})
    assert KeptGains().get(KIND) == 2.0
    if what == "processor":
        monkeypatch.setattr(kept_gains, "_processor", lambda: "another")
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99")
    else:
        monkeypatch.setattr(c_compiler, "__file__", str(folder / "c_compiler.py"))
    assert KeptGains().get(KIND) is None


def test_processes_that_write_at_once(folder: Path) -> None:
    """Whole at any moment: a reader finds what some writer wrote."""
    KeptGains().add({KIND: 2.0})

    def write(number: int) -> None:
        for _ in range(20):
            KeptGains().add({KIND: 2.0, number: 3.0})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert KeptGains()._read()[repr(KIND)]
    for thread in threads:
        thread.join()
    assert KeptGains().get(KIND) == 2.0
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_can_t_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    monkeypatch.setattr(c_compiler, "cache_folder", lambda: folder / "not there")
    seconds.extend([2.0, 2.0])
    assert gain() == gain() == 2.0


def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What three processes measured of a model's layers is all that the fourth needs."""
    from test_packed_linears import GREEDY, IDS, make, patch

    from hf_paged.model import packed_linears

    measured: list[int] = []
    original = trial._seconds

    def counting(*series: list[tuple[Any, Any]]) -> list[dict[Any, float]]:
        measured.append(len(series[0]))
        return original(*series)

    monkeypatch.setattr(trial, "_seconds", counting)
    found: list[list[Tensor]] = []
    for _ in range(4):
        monkeypatch.setattr(packed_linears, "TRIALS", Trials(KeptGains()))
        measured.clear()
        found.append(patch(make()).generate(IDS, **GREEDY))
        assert (sum(measured) > 0) == (len(found) < 4)
    assert all(torch.equal(each, found[0]) for each in found)
