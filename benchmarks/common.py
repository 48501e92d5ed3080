"""What benchmarks share: timing on cold memory, a report that is saved as it grows, families of points, tables."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import children
import torch
from torch import Tensor

Row = dict[str, Any]


def versions() -> dict[str, str]:
    """Versions of everything that a number may depend on."""
    import hf_paged

    return {
        "hf_paged": hf_paged.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        **{name: _version(name) for name in ("triton", "transformers")},
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name and size of the device; of a processor, whose name may be no more than "AMD EPYC", its instructions, too."""
    if device.type != "cuda":
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else []
        name = names[0] if names else platform.processor() or platform.machine()
        instructions = torch.backends.cpu.get_cpu_capability() + " AMX" * torch.cpu._is_amx_tile_supported()
        return {"name": name, "instructions": instructions, "cores": os.cpu_count()}
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
        """From samples in microseconds."""
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
        _each(call, 3)  # compiles
        estimate = self._events(lambda: _each(call, 3), 1)[0] / 3
        by_bytes = math.ceil(self._cold_bytes / max(bytes_a_call, 1))
        num_calls = min(256, max(1, by_bytes, round(sample_us / max(estimate, 0.1))))
        _each(call, num_calls)  # whatever is only made at a first call
        graph = self._capture(call, num_calls)
        run = graph.replay if graph else lambda: _each(call, num_calls)
        run()  # so that the host is ahead of the device from the first sample on
        num_samples = max(3, min(self._num_samples, round(4e5 / max(estimate * num_calls, 1.0))))
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

    def _capture(self, call: Callable[[int], Any], num_calls: int) -> Any:
        """The calls as a graph; `None` if one of them can't be captured."""
        from hf_paged.model.graph_capture import CUDARecording, capture_stream

        torch.cuda.synchronize()
        try:
            return CUDARecording(lambda: _each(call, num_calls), capture_stream(self._device))
        except Exception:  # whatever a library says when it can't
            return None
        finally:
            torch.cuda.synchronize()


def _each(call: Callable[[int], Any], num_calls: int) -> None:
    for i in range(num_calls):
        call(i)  # no result is kept: all of them may be one piece of memory


class Report:
    """A JSON file that is whole at any moment."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data

    @classmethod
    def load(cls, path: Path) -> Report:
        return cls(path, json.loads(path.read_text()))

    @classmethod
    def resume(cls, path: Path, empty: dict[str, Any], again: bool = False) -> Report:
        """The file's, if the same code wrote it, else an empty one; a file of other code is kept beside it.

        Args:
            path: The file.
            empty: What a new one holds, with its `code` hash; what the two have besides `families` and `rows` is taken
                from it.
            again: Families that failed, or have a row that did, are measured anew.
        """
        if not path.exists():
            return cls(path, empty)
        report = cls.load(path)
        if report.data.get("code") != empty["code"]:
            path.replace(path.with_suffix(".before.json"))
            return cls(path, empty)
        report.data = report.data | {key: value for key, value in empty.items() if value or key not in report.data}
        if again:
            families, rows = report.data["families"], report.data["rows"]
            bad = {row["family"] for row in rows if "error" in row}
            bad |= {name for name, state in families.items() if state["status"].startswith("failed")}
            report.data["families"] = {name: state for name, state in families.items() if name not in bad}
            report.data["rows"] = [row for row in rows if row["family"] not in bad]
        return report

    def save(self) -> None:
        """Replaces the file at once: who is killed meanwhile leaves the earlier one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write = self.path.with_suffix(".json.tmp")
        write.write_text(json.dumps(self.data, indent=1) + "\n")
        write.replace(self.path)

    def log(self, what: str, lines: Sequence[str]) -> None:
        """Appends to a file beside it, named `.log`, what is too long for a row: a traceback, last words."""
        with self.path.with_suffix(".log").open("a") as file:
            print(f"== {what}", *lines[-children.NUM_LINES :], sep="\n", file=file)

    def rows(self, family: str) -> list[Row]:
        """The rows of one family that hold a measurement."""
        return [row for row in self.data["rows"] if row["family"] == family and "error" not in row]

    def is_due(self, family: str) -> bool:
        """Whether something of it is still to be measured."""
        status = self.data["families"].get(family, {}).get("status", "")
        return status != "done" and not status.startswith("failed")

    def exit_status(self, families: Sequence[str]) -> int:
        """The exit status of a program that had to measure these: 0, 1 if something failed, `children.UNFINISHED` if
        some are due.
        """
        if any(map(self.is_due, families)):
            return children.UNFINISHED
        return int(any(self.data["families"][name]["status"] != "done" for name in families))


# ----------------------------------------------------------------------------------------------------------- families


@dataclass(frozen=True)
class Point:
    """One row to be: its name, what measures it, and what else it is called, also if that fails."""

    case: str
    measure: Callable[[], Row]
    labels: Row = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """Points that are compared with a reference together, before any is measured.

    Attributes:
        name: Of the rows in the report.
        points: Given the benchmark's own object, which `check` gets as well.
        check: The error, as an RMS ratio; raises if it is too large.
        pivot: Two columns, for a table of microseconds over them instead of one of all columns.
        is_default: Whether it is measured if it is not named.
    """

    name: str
    points: Callable[[Any], Iterable[Point]]
    check: Callable[[Any], float] | None = None
    pivot: tuple[str, str] | None = None
    is_default: bool = True


class DeviceLostError(Exception):
    """Nothing more can be measured in this process."""


class OutOfTimeError(Exception):
    """The rest is for the next run."""


MAX_CRASHES = 3  # of a family, after which it is given up
GRACE = 12.0  # seconds that a child is given to stop by itself
LEAST = 20.0  # seconds under which none is started


def run_family(family: Family, bench: Any, report: Report, deadline: float) -> bool:
    """Measures what the report does not have of a family, whatever happens in it; every row is saved at once.

    Args:
        family: What to measure.
        bench: For its points.
        report: Where rows go. A point is a row: as many as there are of this family are done.
        deadline: `time.monotonic()` after which the rest is left for the next run.

    Returns:
        Whether the device still answers.
    """
    started = time.monotonic()
    state = report.data["families"].setdefault(family.name, {})
    state |= {"status": "running", "at": "check"}
    report.save()
    is_alive = True
    try:
        if started > deadline:
            raise OutOfTimeError
        if family.check and "rms" not in state:
            state["rms"] = family.check(bench)
        _run_points(family, bench, report, deadline)
        state["status"] = "done"
    except OutOfTimeError:
        state["status"] = "stopped: time limit"
    except DeviceLostError as error:
        _note_crash(state, describe(error))
        is_alive = False
    except Exception as error:  # the other families go on
        report.log(f"{family.name}: {state['at']}", traceback.format_exc().splitlines())
        state["status"] = f"failed: {describe(error)}"
    is_alive = is_alive and _answers()
    state["seconds"] = round(state.get("seconds", 0) + time.monotonic() - started, 1)
    report.save()
    print(f"{family.name}: {state['status']}, {state['seconds']} s", flush=True)
    return is_alive


def _run_points(family: Family, bench: Any, report: Report, deadline: float) -> None:
    rows = report.data["rows"]
    num_done = sum(row["family"] == family.name for row in rows)
    has_device = torch.cuda.is_available()
    for number, point in enumerate(family.points(bench)):
        if number < num_done:
            continue
        if time.monotonic() > deadline:
            raise OutOfTimeError
        report.data["families"][family.name]["at"] = point.case
        report.save()  # should it end the process, or hang
        row = {"family": family.name, "case": point.case} | point.labels
        if has_device:
            torch.cuda.reset_peak_memory_stats()
        try:
            row |= point.measure()
            if has_device:
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        except Exception as error:  # too little shared memory, or a library's
            report.log(f"{family.name}: {point.case}", traceback.format_exc().splitlines())
            row["error"] = describe(error)
        rows.append(row)
        report.save()
        print(f"{family.name}: {', '.join(f'{k} {_cell(k, v)}' for k, v in row.items() if k != 'family')}", flush=True)
        if "error" in row and not _answers():
            raise DeviceLostError(f"the device stopped answering at {point.case}: {row['error']}")


def _note_crash(state: dict[str, Any], reason: str) -> None:
    """The next process goes on behind the point; a family in which that happens again and again is given up."""
    state["crashes"] = state.get("crashes", 0) + 1
    is_over = state["crashes"] >= MAX_CRASHES or state.get("at") == "check"
    state["status"] = f"{'failed' if is_over else 'stopped'}: {reason}"


def _answers() -> bool:
    """Whether the device is still there. What memory of it is not in use is given back."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.rand(1, device="cuda")  # raises after a failed capture that torch did not get over
            torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def describe(error: BaseException) -> str:
    """One line: the first of its message, and of those of its causes, the last of which often says most."""
    found: list[str] = []
    following: BaseException | None = error
    while following is not None and len(found) < 5:
        lines = str(following).strip().splitlines() or [repr(following)]
        found.append(f"{type(following).__name__}: {lines[0][:300]}")
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return "; caused by ".join(found)


def supervise(
    command: Sequence[str], families: Sequence[str], report: Report, deadline: float, quiet: float | None = 240.0
) -> None:
    """Measures in child processes: one that crashes or hangs costs a point, and the next one goes on behind it.

    Args:
        command: Measures what the report's file does not have yet, given `--time-limit`.
        families: That it measures.
        report: Loaded again from its file after each child.
        deadline: `time.monotonic()` at which children have to end.
        quiet: Seconds without a line of output after which a child is taken for hung.
    """
    report.save()
    while any(map(report.is_due, families)) and (left := deadline - time.monotonic()) > LEAST:
        before = json.dumps(report.data)
        limit = ["--time-limit", str(left)]
        ended = children.run([*command, *limit], seconds=left + GRACE, quiet=quiet)
        report.data = Report.load(report.path).data
        is_same = json.dumps(report.data) == before
        for name, state in report.data["families"].items():
            if state["status"] == "running":
                _note_crash(state, f"the process ended in it ({ended})")
                if state["at"] != "check":
                    row = {"family": name, "case": state["at"], "error": f"the process ended in it ({ended})"}
                    report.data["rows"].append(row)
        report.save()
        if ended.status == 0:
            return
        report.log(f"{' '.join(families)}: {ended}; its last lines", ended.lines)
        if is_same:
            print(f"the measuring process can't begin: {ended}", flush=True)
            return
        print(f"the measuring process ended: {ended}; going on with what is left", flush=True)


# ------------------------------------------------------------------------------------------------------------- tables


def table(rows: Sequence[Row]) -> str:
    """All columns that some row has, in the order they appear; no nested ones."""
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict)))
    columns = [name for name in columns if name != "family"]
    return markdown_table(columns, [[_cell(name, row.get(name)) for name in columns] for row in rows])


def pivot_table(rows: Sequence[Row], down: str, across: str) -> str:
    """Microseconds over two columns: the least of each column bold, what is chosen by itself with an asterisk."""
    rows = [row for row in rows if down in row and across in row]
    names, heads = (list(dict.fromkeys(row[key] for row in rows)) for key in (down, across))
    cells = {(row[down], row[across]): row for row in rows if "us" in row}
    least = {head: min((row["us"] for (_, h), row in cells.items() if h == head), default=None) for head in heads}

    def cell(name: Any, head: Any) -> str:
        row = cells.get((name, head))
        if row is None:
            return "-"
        text = f"**{row['us']:.1f}**" if row["us"] == least[head] else f"{row['us']:.1f}"
        return text + ("*" if row.get("is_chosen") else "")

    return markdown_table([down, *heads], [[str(name), *(cell(name, head) for head in heads)] for name in names])


def render_families(families: Iterable[Family], report: Report) -> str:
    """A section of markdown for each."""
    parts = []
    for family in families:
        state = report.data["families"].get(family.name)
        if state is None:
            continue
        rms = f"; RMS error {state['rms']:.1e}" if "rms" in state else ""
        parts.append(f"## {family.name}\n\n{state['status']}, {state.get('seconds', '?')} s{rms}")
        rows = [row for row in report.data["rows"] if row["family"] == family.name]
        if good := report.rows(family.name):
            parts.append(pivot_table(rows, *family.pivot) if family.pivot else table(good))
        errors = [
            f"- {', '.join(map(str, [v for k, v in row.items() if k not in ('family', 'error')]))}: {row['error']}"
            for row in rows
            if "error" in row
        ]
        if errors:
            parts.append("\n".join(errors[:8] + ["- ..."] * (len(errors) > 8)))
    return "\n\n".join(parts)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return f"{len(value)} of them"
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if name.endswith("share"):
        return f"{value:.1%}"
    if name.endswith("rms"):
        return f"{value:.1e}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as what is in them, so that it can be read unrendered."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in lines)
