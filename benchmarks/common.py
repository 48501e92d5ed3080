"""What GPU benchmarks share: timing on cold memory, a report that is saved as it grows, tables, versions."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from torch import Tensor

import hf_paged

Row = dict[str, Any]


def versions() -> dict[str, str]:
    """Of everything that a number may depend on."""
    return {
        "hf_paged": hf_paged.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name and size of the device."""
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
    }


def rms_ratio(result: Tensor, expected: Tensor) -> float:
    """Size of the error over size of the truth; NaN or infinite where the result is."""
    expected = expected.double()
    return float((result.double() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Times:
    """Microseconds of one call.

    Attributes:
        us: Median.
        p10_us: A tenth of the samples is below.
        p90_us: A tenth of the samples is above.
        timed: How: "graph" (a sample is a CUDA graph of several calls), "events" (the same calls one by one, the host
            may be the slower one), or "clock" (the host's, a sample is a call).
    """

    us: float
    p10_us: float
    p90_us: float
    timed: str

    @staticmethod
    def of(samples: Iterable[float], timed: str) -> Times:
        """Of samples in microseconds."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Times(*(ordered[round(share * last)] for share in (0.5, 0.1, 0.9)), timed)

    def row(self) -> Row:
        return {"us": self.us, "p10_us": self.p10_us, "p90_us": self.p90_us, "timed": self.timed}


class Timer:
    """Times calls that are given a number each; calls with different numbers read different memory.

    On a GPU a sample is one replay of a CUDA graph of many calls in turn, between two events: the host is out of the
    picture, and what the calls of a replay touch together is several times the L2 cache. Replays are queued back to
    back, so the device never waits.
    """

    def __init__(self, device: torch.device, cold_bytes: int, num_samples: int) -> None:
        """Sets up.

        Args:
            device: Where calls run.
            cold_bytes: What the calls of a replay touch together, at least.
            num_samples: Samples of each measurement.
        """
        self._device = device
        self._cold_bytes = cold_bytes
        self._num_samples = num_samples

    def time(self, call: Callable[[int], Any], bytes_a_call: int, sample_us: float = 2000.0) -> Times:
        """Microseconds of a call.

        Args:
            call: Takes 0, 1, 2, ...
            bytes_a_call: What it reads and writes, about.
            sample_us: What a sample takes, about.
        """
        if self._device.type != "cuda":
            return self.wall(lambda: call(0))
        call(0)  # compiles
        estimate = self._events(lambda: [call(i) for i in range(3)], 1)[0] / 3
        by_bytes = math.ceil(self._cold_bytes / max(bytes_a_call, 1))
        num_calls = min(256, max(1, by_bytes, round(sample_us / estimate)))
        for i in range(num_calls):  # whatever is only made at a first call
            call(i)
        graph = self._capture(call, num_calls)
        run = graph.replay if graph else lambda: [call(i) for i in range(num_calls)]
        run()  # so that the host is ahead of the device from the first sample on
        num_samples = max(3, min(self._num_samples, round(4e5 / (estimate * num_calls))))
        samples = self._events(run, num_samples)
        return Times.of((us / num_calls for us in samples), "graph" if graph else "events")

    def wall(self, call: Callable[[], Any]) -> Times:
        """Microseconds by the host's clock until the device is done, for what the host takes part in."""
        call()
        samples = []
        for _ in range(self._num_samples):
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            samples.append((time.perf_counter() - started) * 1e6)
        return Times.of(samples, "clock")

    def host(self, call: Callable[[int], Any], num_calls: int) -> Times:
        """Microseconds that the host needs for a call, without waiting for the device."""
        call(0)
        samples = []
        for _ in range(self._num_samples):
            self.synchronize()
            started = time.perf_counter()
            for i in range(num_calls):
                call(i)
            samples.append((time.perf_counter() - started) * 1e6 / num_calls)
        self.synchronize()
        return Times.of(samples, "host")

    def synchronize(self) -> None:
        """Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _events(self, run: Callable[[], Any], num_samples: int) -> list[float]:
        pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(num_samples)]
        for start, end in pairs:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def _capture(self, call: Callable[[int], Any], num_calls: int) -> torch.cuda.CUDAGraph | None:
        """The calls as a graph; `None` if one of them can't be captured."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for i in range(num_calls):
                    call(i)
        except Exception:  # whatever a library says when it can't
            torch.cuda.synchronize()
            return None
        return graph


class Report:
    """A JSON file that is whole at any moment."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data

    @classmethod
    def load(cls, path: Path) -> Report:
        return cls(path, json.loads(path.read_text()))

    def save(self) -> None:
        """Replaces the file at once: who is killed meanwhile leaves the earlier one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write = self.path.with_suffix(".json.tmp")
        write.write_text(json.dumps(self.data, indent=1) + "\n")
        write.replace(self.path)

    def rows(self, family: str) -> list[Row]:
        """Of one family, those that hold a measurement."""
        return [row for row in self.data["rows"] if row["family"] == family and "error" not in row]


def show(name: str, value: Any) -> str:
    """A table's cell, by the column's name."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if name.endswith("share"):
        return f"{value:.1%}"
    if name.endswith("rms"):
        return f"{value:.1e}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as what is in them, so that it can be read unrendered."""
    lines = [[str(column) for column in columns], *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in lines)
