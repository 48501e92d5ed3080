"""What control groups of both versions say, in folders that look like theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_paged.core.control_group import allowed_cpus, available_memory


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


OWN = {
    "second": "0::/kube/pod",
    "first": "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:cpuset:/\n0::/docker/abc",
}
CPUS = {
    "second: two cores": ("second", {"kube/pod/cpu.max": "200000 100000"}, 2.0),
    "second: a share of one": ("second", {"cpu.max": "max 100000", "kube/pod/cpu.max": "25000 50000"}, 0.5),
    "second: the group around it": ("second", {"kube/cpu.max": "150000 100000", "kube/pod/cpu.max": "max 100000"}, 1.5),
    "second: its own is the root": ("second", {"cpu.max": "100000 100000"}, 1.0),
    "second: none": ("second", {"kube/pod/cpu.max": "max 100000"}, None),
    "first": (
        "first",
        {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"},
        3.0,
    ),
    "first: by the single name": ("first", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    "first: none": ("first", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    "nonsense": ("second", {"kube/pod/cpu.max": "many"}, None),
    "nothing": ("second", {}, None),
}


@pytest.mark.parametrize("name", CPUS)
def test_allowed_cpus(name: str, tmp_path: Path) -> None:
    version, files, expected = CPUS[name]
    write(tmp_path, files | {"own": OWN[version]})
    assert allowed_cpus(tmp_path, tmp_path / "own") == expected


MEMORY = {
    "second": (
        "second",
        {
            "kube/pod/memory.max": "1000",
            "kube/pod/memory.current": "700",
            "kube/pod/memory.stat": "anon 5\ninactive_file 200",
        },
        500,
    ),
    "second: less is left around it": (
        "second",
        {
            "kube/pod/memory.max": "1000",
            "kube/pod/memory.current": "100",
            "kube/memory.max": "5000",
            "kube/memory.current": "4900",
        },
        100,
    ),
    "second: none": ("second", {"kube/pod/memory.max": "max", "kube/pod/memory.current": "700"}, None),
    "second: full": ("second", {"memory.max": "1000", "memory.current": "1100"}, 0),
    "first": (
        "first",
        {
            "memory/docker/abc/memory.limit_in_bytes": "1000",
            "memory/docker/abc/memory.usage_in_bytes": "600",
            "memory/docker/abc/memory.stat": "inactive_file 7\ntotal_inactive_file 50",
        },
        450,
    ),
    "first: none": (
        "first",
        {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "600"},
        None,
    ),
    "nothing": ("first", {}, None),
}


@pytest.mark.parametrize("name", MEMORY)
def test_available_memory(name: str, tmp_path: Path) -> None:
    version, files, expected = MEMORY[name]
    write(tmp_path, files | {"own": OWN[version]})
    assert available_memory(tmp_path, tmp_path / "own") == expected


def test_here() -> None:
    """Whatever this machine says is understood, or there is no limit."""
    cpus, memory = allowed_cpus(), available_memory()
    assert (cpus is None or cpus > 0) and (memory is None or memory > 0)
    assert allowed_cpus(own=Path("/nowhere")) is None or cpus is not None
