"""What a control group leaves to its processes of a machine's processors and memory: containers run in one (Linux)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 2**60  # bytes; what version 1 says where there is no limit is more


def allowed_cpus(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Seconds of processor time a second that this process may use; `None`: no control group limits it."""
    found = []
    for folder in _folders("cpu", root, own):
        if (text := _read(folder / "cpu.max")) is not None:  # version 2: "150000 100000", or "max 100000"
            quota, _, period = text.partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):  # version 1 says -1 for no limit
            found.append(int(quota) / int(period))
    return min(found, default=None)


def available_memory(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes that this process may yet take; `None`: no control group limits it. What files' pages take counts as free,
    as far as they have not been used lately.
    """
    found = []
    for folder in _folders("memory", root, own):
        is_second = (text := _read(folder / "memory.max")) is not None
        limit = text if is_second else _read(folder / "memory.limit_in_bytes")
        used = _read(folder / ("memory.current" if is_second else "memory.usage_in_bytes"))
        if limit is None or used is None or not limit.isdigit() or not used.isdigit() or int(limit) >= UNLIMITED:
            continue
        lines = (line.partition(" ") for line in (_read(folder / "memory.stat") or "").splitlines())
        numbers = {name: int(number) for name, _, number in lines if number.isdigit()}
        unused = numbers.get("inactive_file" if is_second else "total_inactive_file", 0)
        found.append(max(0, int(limit) - int(used) + unused))
    return min(found, default=None)


def _folders(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Of the process's group and all those around it, whose limits hold as well.

    Where a container sees its own group as the root, only that one is there of all that its path names.
    """
    for line in (_read(own) or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        place = root / names if names else root
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            yield place.joinpath(*parts[:count])
            if names and names != controller:  # "cpu,cpuacct" also has the single names
                yield (root / controller).joinpath(*parts[:count])


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None
