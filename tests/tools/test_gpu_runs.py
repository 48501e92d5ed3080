"""What `make gpu` does with the minutes it is given: it goes on where it was killed, and nothing is measured twice."""

from __future__ import annotations

import ast
import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_plugin
import pytest

from helpers.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
sys.path.append(str(FOLDER))

import children  # noqa: E402
import common  # noqa: E402
import gpu  # noqa: E402
import gpu_tests  # noqa: E402

pytestmark = pytest.mark.ci

PATHS = os.pathsep.join(map(str, (ROOT, FOLDER, ROOT / "tests")))


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 3 * PATIENCE  # Python starts several times, and imports
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# Children


@pytest.mark.parametrize(
    ("code", "limits", "status", "reason"),
    [
        ("print(1); raise SystemExit(5)", {"seconds": 20}, 5, None),
        ("import os; print(1, flush=True); os.kill(os.getpid(), 11)", {"seconds": 20}, -11, None),
        ("print(1); import time; time.sleep(60)", {"seconds": 0.5}, -9, "not done after 0 seconds"),
        ("print(1); import time; time.sleep(60)", {"seconds": 50, "quiet": 0.5}, -9, "silent for 0 seconds"),
    ],
)
def test_how_a_child_ends(code: str, limits: dict[str, float], status: int, reason: str | None) -> None:
    ended = children.run(python(code), **limits)
    assert (ended.status, ended.reason) == (status, reason)
    assert "1" in ended.lines


# Families of points


def new_report(path: Path, **more: Any) -> common.Report:
    return common.Report(path / "x.json", {"code": "c", "families": {}, "rows": []} | more)


def fail(error: BaseException) -> Any:
    raise error


def test_errors_are_rows_with_their_causes_and_the_time_limit_is_kept(tmp_path: Path) -> None:
    def measure() -> dict[str, Any]:
        try:
            raise MemoryError("too little\nof it")
        except MemoryError as error:
            raise RuntimeError("no capture") from error

    report = new_report(tmp_path)
    points = [common.Point("one", lambda: {"us": 2.0}, {"n": 1}), common.Point("two", measure, {"n": 1})]
    family = common.Family("f", lambda _: points, pivot=("n", "case"))
    assert common.run_family(family, None, report, deadline=float("inf"))
    assert common.run_family(common.Family("late", lambda _: points), None, report, deadline=0.0)
    saved = json.loads(report.path.read_text())
    cause = "RuntimeError: no capture; caused by MemoryError: too little"
    assert [row.get("error") for row in saved["rows"]] == [None, cause]
    assert saved["families"]["late"]["status"] == "stopped: time limit"
    assert report.exit_status(["f", "late"]) == children.UNFINISHED and report.exit_status(["f"]) == 0
    assert "raise MemoryError" in (tmp_path / "x.log").read_text()
    text = common.render_families([family], report)
    assert "| 1 | **2.0** | -   |" in text and f"- two, 1: {cause}" in text


# Whole calls

generate_gpu = importlib.import_module("generate_gpu")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens and steps than are measured."""
    monkeypatch.setattr(generate_gpu, "CONTEXT", 64)
    monkeypatch.setattr(generate_gpu, "NUM_STEPS", 8)


@pytest.fixture
def in_process(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children in this process: torch is imported already."""

    def run(command: list[str], **_: Any) -> children.Ended:
        try:
            return children.Ended(generate_gpu.main(command[2:]), None, [])
        except SystemExit as error:
            return children.Ended(int(error.code or 0), None, ["last words"])

    monkeypatch.setattr(children, "run", run)
    monkeypatch.setattr(generate_gpu.os, "_exit", sys.exit)


def test_pieces_are_saved_row_by_row_and_not_measured_again(
    in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU, with a tiny model."""
    given = ["--device", "cpu", "--batches", "1", "2", "--out", str(tmp_path), "--only"]
    assert generate_gpu.main([*given, "tiny-decode"]) == 0
    report = json.loads((tmp_path / "generate-gpu.json").read_text())
    variants = ("sampling", "steps one by one", "no graphs")
    engines = {"hf_paged", *(f"hf_paged, {variant}" for variant in variants), "stock"}
    rows = report["rows"]
    assert {(row["engine"], row["batch"]) for row in rows} == {(engine, n) for engine in engines for n in (1, 2)}
    assert all(row["live_batch"] == row["batch"] and "of_roofline" in row for row in rows)
    # Stock's is a difference of two calls' seconds, which on a busy machine may be anything.
    assert all(row["step_ms"] > 0 for row in rows if row["engine"] != "stock")
    assert all(row["num_graphs"] == 0 and row["no_graphs"] for row in rows if row["engine"] != "stock")

    monkeypatch.setitem(generate_gpu.PIECES, "stock", lambda bench: fail(ArithmeticError("no")))
    assert generate_gpu.main([*given, "tiny-decode", "tiny-stock", "tiny-compiled"]) == 1
    report = json.loads((tmp_path / "generate-gpu.json").read_text())
    assert report["rows"][:-2] == rows and report["rows"][-1]["case"] == "compiled, 2"
    assert report["families"]["tiny-stock"]["status"] == "failed: ArithmeticError: no"
    assert "of_roofline" in (tmp_path / "generate-gpu.md").read_text()

    monkeypatch.setattr(children, "code_hash", lambda _: "other code")
    assert generate_gpu.main([*given, "tiny-step", "--time-limit", "0"]) == children.UNFINISHED
    assert json.loads((tmp_path / "generate-gpu.json").read_text())["rows"] == []


@pytest.mark.parametrize("piece", ["sharegpt", "generate_batch", "stock", "profile", "step"])
def test_pieces(piece: str, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [([5 + i] * (4 + i), 3 + i) for i in range(4)]
    monkeypatch.setattr(generate_gpu, "draw_requests", lambda *_: requests)
    given = ["--device", "cpu", "--batches", "1", "2", "--limit", "4", "--out", str(tmp_path)]
    assert generate_gpu.main([*given, "--only", f"tiny-{piece}"]) == 0
    rows = json.loads((tmp_path / "generate-gpu.json").read_text())["rows"]
    assert rows and not any("error" in row for row in rows)
    assert len(rows) == {"stock": 6, "profile": 2}.get(piece, 1)
    assert ("### tiny-profile" in (tmp_path / "generate-gpu.md").read_text()) == (piece == "profile")


# Tests, in pieces

TESTS = """
import os, time, pytest
pytestmark = pytest.mark.MARK
def note(name):
    open(os.environ["RAN"], "a").write(f"{name} {os.getpid()}\\n")
@pytest.mark.parametrize("n", range(3))
def test_good(n):
    note(f"good{n}")
def test_broken():
    note("broken")
    try:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    except RuntimeError as error:
        raise AssertionError("tokens differ") from error
def test_crash():
    note("crash")
    if os.environ.get("CRASH"):
        os._exit(3)
def test_wrong():
    note("wrong")
    assert os.environ.get("CRASH") is None
def test_slow():
    note("slow")
    if "HANG" in os.environ:
        time.sleep(60)
@pytest.mark.own_process
def test_alone():
    note("alone")
@pytest.mark.own_process
def test_alone_too():
    note("alone_too")
def test_end():
    note("end")
""".replace("MARK", "gpu")


class Runs:
    """A folder of tests, and what ran of it."""

    def __init__(self, folder: Path) -> None:
        (folder / "tests").mkdir()
        (folder / "tests" / "test_fake.py").write_text(TESTS)
        self._folder, self._notes = folder, folder / "ran"
        options = ["--out", str(folder), "--tests", str(folder / "tests"), "--time-limit", "100"]
        main = "import gpu_tests as g; g.MOST_PROCESSES = 1; g.LEAST = 1; raise SystemExit(g.main())"
        self._command = [*python(main), *options]

    def start(self, *options: str, **env: str) -> subprocess.Popen[str]:
        self._notes.write_text("")
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env = own | {"PYTHONPATH": PATHS, "RAN": str(self._notes)} | env
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*self._command, *options], env=env, preexec_fn=children.die_with_parent, **pipes)

    def run(self, *options: str, **env: str) -> tuple[int, str]:
        process = self.start(*options, **env)
        out, _ = process.communicate(timeout=110)
        return process.returncode, out

    @property
    def ran(self) -> list[str]:
        return [line.split()[0] for line in self._notes.read_text().splitlines()]

    @property
    def processes(self) -> dict[str, str]:
        """In which each of them ran."""
        return dict(line.split() for line in self._notes.read_text().splitlines())  # type: ignore[misc]

    def outcomes(self, event: str) -> set[str]:
        lines = gpu_plugin.read_lines(self._folder / "gpu-tests.jsonl")
        return {line["id"].split("::")[1].removeprefix("test_") for line in lines if line["event"] == event}


def test_a_broken_device_is_left(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    runs = Runs(tmp_path)
    status, out = runs.run(CRASH="1")
    assert status == 1, out
    names = ["good0", "good1", "good2", "broken", "crash", "wrong", "slow", "end", "alone", "alone_too"]
    assert sorted(runs.ran) == sorted(names), "each once"
    pids = runs.processes
    assert pids["good0"] == pids["good2"] == pids["broken"]
    assert {pids[name] for name in ("alone", "alone_too")}.isdisjoint(pids[name] for name in names[:-2])
    assert pids["alone"] != pids["alone_too"]
    assert pids["broken"] not in (pids[name] for name in names[4:]), "nothing runs on a broken device"
    good = {"good[0]", "good[1]", "good[2]", "slow", "end", "alone", "alone_too"}
    assert runs.outcomes("passed") == good
    assert runs.outcomes("failed") == {"broken", "crash", "wrong"}
    assert "tokens differ" in out and "illegal memory access" in out and "7 passed so far, 3 failed" in out


ABSENT = ("hypothesis", "gradio", "xdist", "pytest_timeout", "peft", "matplotlib", "fastapi", "pandas")


def test_gpu_tests_need_little() -> None:
    """A machine with a GPU has torch, triton, transformers and pytest. A smoke test that is renamed is missed."""
    files = gpu_tests.marked("gpu", ROOT / "tests")
    assert len(files) >= 5 and __file__ not in files
    for file in [
        *files,
        *(
            ROOT / "tests" / f"{name}.py"
            for name in ("conftest", *(f"helpers/{own}" for own in ("pairs", "models", "kernel_cases", "kernel_pools")))
        ),
    ]:
        found = [
            node for node in ast.parse(Path(file).read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = {name.name for node in found for name in node.names} | {getattr(node, "module", "") for node in found}
        assert not {name.split(".")[0] for name in names if name} & set(ABSENT), file
    for file, names in gpu_tests.SMOKE.items():
        assert str(ROOT / file) in files
        assert all(f"def {name}(" in (ROOT / file).read_text() for name in names)


# All of it


def test_every_step_is_a_command_that_its_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda *_, **__: "/x/compute-sanitizer")
    parsers = {"gpu_tests": "gpu_tests", "gpu_kernels": "gpu_kernels", "generate_gpu": "generate_gpu"}
    steps = gpu.steps(Path("/state"))
    assert [step.name for step in steps][:4] == ["smoke-tests", "smoke-step", "kernels", "generate"]
    for step in steps:
        program = next(Path(part) for part in step.command if part.endswith(".py"))
        arguments = list(step.command[step.command.index(str(program)) + 1 :])
        assert program.exists()
        if program.stem in parsers:
            importlib.import_module(parsers[program.stem]).parse([*arguments, "--time-limit", "9", "--again"])


STEP = """
import os, sys, time, pathlib
out, name, then = sys.argv[1:4]
done = pathlib.Path(out) / "results" / name
rows = done.read_text() if done.exists() else ""
for row in "ab"[len(rows):]:
    if row == "b" and then == "hang" and not os.environ.get("CALM"):
        time.sleep(60)
    with done.open("a") as file: file.write(row)
if then == "fail" and not os.environ.get("CALM"): sys.exit("it is broken")
if then == "stop" and not os.environ.get("CALM"): sys.exit(75)
"""


class Call:
    """`gpu.py` with steps of ours, in a process that can be killed."""

    def __init__(self, folder: Path, **steps: str) -> None:
        self.state, self.archive = folder / "gpu-state", folder / "out" / "gpu-state.tar.gz"
        made = ", ".join(
            f"gpu.Step({name!r}, [sys.executable, '-c', {STEP!r}, str(s), {name!r}, {then!r}], needs=5)"
            for name, then in steps.items()
        )
        code = f"import sys, gpu; gpu.ROOT = gpu.Path({str(folder)!r})\n"
        code += f"sys.exit(gpu.main(make_steps=lambda s: [{made}] if s.name else [], facts='print(12)'))"
        self._command = [*python(code), "--state", str(self.state), "--pack", str(self.archive)]

    def start(self, *options: str, **env: str) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONPATH": PATHS} | env
        return subprocess.Popen([*self._command, *options], env=env, stdout=subprocess.PIPE, text=True)

    def run(self, *options: str, **env: str) -> tuple[int, str]:
        process = self.start(*options, **env)
        out, _ = process.communicate(timeout=110)
        return process.returncode, out

    def rows(self) -> dict[str, str]:
        return {file.name: file.read_text() for file in sorted((self.state / "results").glob("*"))}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_that_is_killed_leaves_what_it_had(how: signal.Signals, tmp_path: Path) -> None:
    call = Call(tmp_path, one="", two="hang", three="")
    process = call.start()
    wait_for(lambda: call.rows().get("two") == "a")
    process.send_signal(how)
    process.communicate()
    assert call.rows() == {"one": "ab", "two": "a"}
    if how == signal.SIGTERM:
        assert process.returncode == children.UNFINISHED
        with tarfile.open(call.archive) as tar:
            assert "gpu-state/results/two" in tar.getnames()
    status, out = call.run(CALM="1")
    assert status == 0 and call.rows() == {"one": "ab", "two": "ab", "three": "ab"}
    assert "== one" not in out and "== two: begun" in out
