"""For pytest, on a machine that is lent for minutes: what passed is kept and not run again; a broken device is left.

    pytest -p gpu_plugin --record FILE --run-id ID --stop-at SECONDS

`benchmarks/gpu_tests.py` starts it so, alone or under xdist. A line of JSON is appended to the file for each test that
begins or ends: a kill at any moment costs the tests that were running. Those that passed are left out next time, those
that failed in the run of the same id as well.

After most CUDA errors every later call of the process fails: the test is named, and its process ends. xdist starts
another one; without it, the program that started pytest does. A test marked `own_process` is the last of its
process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

LEFT = "no time is left"
EXIT_STATUS = 76  # of a process that leaves a broken device
MOST_SECONDS = 300.0  # of a test, after which its process ends: nothing else stops one that waits for the device


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu")
    group.addoption("--record", type=Path, help="file of what passed and failed")
    group.addoption("--run-id", default="", help="the same for all processes of one run")
    group.addoption("--stop-at", type=float, default=float("inf"), help="time.time() after which no test begins")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record is None:
        return
    workerinput = getattr(config, "workerinput", None)
    if workerinput is None:
        record = Record(config.option.record, config.option.run_id)
        config.pluginmanager.register(Recorder(record))
        done = record.done
    else:
        done = set(workerinput["done"])
    config.pluginmanager.register(Guard(done, config.option.stop_at))


class Record:
    """The file, read once: under xdist all processes have to leave out the same tests, also later ones.

    Attributes:
        done: Ids of the tests that are not to be run.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        lines = read_lines(path)
        self.done = {line["id"] for line in lines if line["event"] == "passed"}
        own = [line for line in lines if line["run"] == run_id and "id" in line]
        begun = {line["id"] for line in own if line["event"] == "begun"}
        ended = {line["id"] for line in own if line["event"] in ("passed", "failed", "left")}
        for test in begun - ended:
            self.add("failed", id=test, text=["the process ended in it"])
        self.done |= begun - {line["id"] for line in own if line["event"] == "left"}

    def add(self, event: str, **values: Any) -> None:
        """One write: a process killed meanwhile leaves at most a torn last line."""
        line = json.dumps({"event": event, "run": self._run_id} | values)
        with self._path.open("a") as file:
            file.write(line + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What the file says; a line that was torn by a kill says nothing."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Recorder:
    """In the process that sees all results."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._failed: set[str] = set()
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["done"] = sorted(self._record.done)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._record.add("begun", id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.add(report.nodeid)
            self._record.add("failed", id=report.nodeid, when=report.when, text=report.longreprtext.splitlines()[-60:])
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._record.add("left" if LEFT in reason else "skipped", id=report.nodeid, text=[reason])
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            self._record.add("passed", id=report.nodeid, seconds=round(self._seconds[report.nodeid], 2))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._record.add("finished", status=int(exitstatus))


class Guard:
    """In the processes that run tests."""

    def __init__(self, done: set[str], stop_at: float) -> None:
        self._done, self._stop_at = done, stop_at
        self._leaves = False
        self._stderr = os.fdopen(os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2), "w")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self._done]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self._done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > self._stop_at:
            pytest.skip(LEFT)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        if call.excinfo is not None and is_cuda_error(call.excinfo.value):
            self._leaves = True
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        if item.get_closest_marker("own_process"):
            self._leaves = True
        else:
            ask_device()  # what it raises is this test's, not the next one's
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After all other plugins have been told."""
        if report.when == "teardown" and self._leaves:
            sys.stdout.flush()
            os._exit(EXIT_STATUS)


def is_cuda_error(error: BaseException | None) -> bool:
    """Whether it, or what it comes from, is the driver's; too little memory is not, and leaves the device as it was."""
    while error is not None:
        if type(error).__name__ == "OutOfMemoryError":
            return False
        if type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def ask_device() -> None:
    """Raises if the device, or torch's random numbers on it, can't be used any more.

    Raises:
        RuntimeError: "CUDA error", with what torch said.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.rand(1, device="cuda")  # raises for ever after a failed capture
        torch.cuda.synchronize()
    except Exception as error:
        raise RuntimeError(f"CUDA error left behind: {error}") from error
