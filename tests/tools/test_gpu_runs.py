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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_plugin
import pytest
import torch

from helpers.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
sys.path.append(str(FOLDER))

import children  # noqa: E402
import common  # noqa: E402
import gpu  # noqa: E402
import gpu_tests  # noqa: E402
import roofline  # noqa: E402

PATHS = os.pathsep.join(map(str, (ROOT, FOLDER, ROOT / "tests")))


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 3 * PATIENCE  # Python starts several times, and imports
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """A zombie, whose status was not asked for yet, runs no more."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


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


def test_the_end_of_what_a_child_says_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    ended = children.run(python("import sys; [print(i) for i in range(99)]; sys.stderr.write('x')"), seconds=20)
    assert ended.lines == [*map(str, range(40, 99)), "x"]
    assert capsys.readouterr().out.startswith("0\n1\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_children_end_with_who_started_them(tmp_path: Path) -> None:
    """Else what is left of a killed call has the device when the next one comes."""
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    parent = f"import children, sys; children.run([sys.executable, '-c', {child!r}], seconds=60)"
    process = subprocess.Popen(python(parent), env=os.environ | {"PYTHONPATH": PATHS})
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    assert is_running(pid)
    process.kill()
    process.wait()
    try:
        wait_for(lambda: not is_running(pid))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_code_hash_is_that_of_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = children.code_hash([tmp_path])
    (tmp_path / "notes.md").write_text("1")
    assert children.code_hash([tmp_path]) == first
    (tmp_path / "a.py").write_text("2")
    assert children.code_hash([tmp_path]) != first
    with pytest.raises(FileNotFoundError):
        children.code_hash([tmp_path / "gone"])


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


def test_a_family_goes_on_behind_its_rows(tmp_path: Path) -> None:
    measured: list[int] = []
    clock = iter([float("inf")] * 99)

    def points(_: Any) -> Iterator[common.Point]:
        for number in range(5):
            yield common.Point(str(number), lambda number=number: {"number": measured.append(number) or number})

    family = common.Family("f", points, check=lambda _: next(clock) and 0.0)
    report = new_report(tmp_path, rows=[{"family": "f", "case": "0"}, {"family": "f", "case": "1", "error": "x"}])
    common.run_family(family, None, report, deadline=float("inf"))
    assert measured == [2, 3, 4] and [row["case"] for row in report.data["rows"]] == list("01234")


@pytest.mark.parametrize(
    ("given", "again", "num_rows"),
    [("c", False, 3), ("c", True, 1), ("other", False, 0)],
    ids=["same code", "again", "other code"],
)
def test_a_report_is_resumed(given: str, again: bool, num_rows: int, tmp_path: Path) -> None:
    states = {"good": {"status": "done"}, "bad": {"status": "done"}, "wrong": {"status": "failed: x"}}
    rows = [{"family": "good"}, {"family": "bad", "error": "x"}, {"family": "wrong"}]
    new_report(tmp_path, rows=rows, families=states, limits={"a": 1}).save()
    empty = {"code": given, "families": {}, "rows": [], "limits": {}, "device": "new"}
    report = common.Report.resume(tmp_path / "x.json", empty, again)
    assert len(report.data["rows"]) == num_rows and report.data["device"] == "new"
    assert set(report.data["families"]) == (set() if given != "c" else {"good"} if again else set(states))
    assert (tmp_path / "x.before.json").exists() == (given != "c")


class DeathError(BaseException):
    """A child's end: nothing in it is said or saved any more."""


@pytest.mark.parametrize("how", [children.Ended(9, None, ["last words"]), children.Ended(-9, "silent", ["last words"])])
def test_a_crash_costs_one_point(how: children.Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = new_report(tmp_path)
    points = [common.Point(str(n), lambda n=n: {"n": n} if n != 1 else fail(DeathError())) for n in range(3)]

    def run(command: list[str], **_: Any) -> children.Ended:
        try:
            common.run_family(common.Family("f", lambda _: points), None, common.Report.load(report.path), float("inf"))
        except DeathError:
            return how
        return children.Ended(0, None, [])

    monkeypatch.setattr(children, "run", run)
    common.supervise([], ["f"], report, time.monotonic() + 60)
    rows = report.data["rows"]
    assert [row["case"] for row in rows] == ["0", "1", "2"] and rows[2]["n"] == 2
    assert rows[1]["error"] == f"the process ended in it ({how})"
    assert report.data["families"]["f"]["status"] == "done"
    assert "last words" in (tmp_path / "x.log").read_text()


@pytest.mark.parametrize("state", [None, {"status": "done"}])
def test_what_can_not_begin_or_is_done_is_not_started_again(state: Any, tmp_path: Path) -> None:
    report = new_report(tmp_path, families={"f": state} if state else {})
    child = "import sys; open(sys.argv[1] + '.begun', 'a').write('x'); sys.exit(1)"
    common.supervise([*python(child), str(report.path)], ["f"], report, time.monotonic() + 60)
    begun = Path(f"{report.path}.begun")
    assert (begun.read_text() if begun.exists() else "") == ("" if state else "x")


def test_a_family_that_always_crashes_is_given_up(tmp_path: Path) -> None:
    state: dict[str, Any] = {"status": "running", "at": "x"}
    for _ in range(common.MAX_CRASHES):
        assert not state["status"].startswith("failed")
        common._note_crash(state, "lost")
    assert state["status"] == "failed: lost"


# The roofline


def test_roofline_by_hand() -> None:
    """Three layers of hidden size 8, 4 query and 2 kv heads of 2, 16 in the middle, 32 tokens; 8 sequences of 10."""
    shape = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = SimpleNamespace(**shape, head_dim=2, intermediate_size=16, vocab_size=32)
    operations = {op.name: op for op in roofline.decode_operations(config, batch=8, context=10, itemsize=2)}
    sizes = {"query, key, value": 128, "output": 64, "gate, up": 256, "down": 128, "logits": 256}
    assert {name: op.num_bytes for name, op in operations.items() if name != "attention"} == {
        name: 2 * weights for name, weights in sizes.items()
    }
    assert (operations["attention"].num_bytes, operations["attention"].flops) == (1280, 2560)
    # At 1,000 bytes/s and 4,000 flop/s products are bound by computing, 4 ms a weight, attention by its 1,280 bytes:
    # 3 x (576 x 4 ms + 1,280 ms) + 256 x 4 ms. The maximum of the two sums would be 9,856 ms.
    assert roofline.roofline_ms(operations.values(), 1e3, 4e3) == pytest.approx(11_776)


# Whole calls

generate_gpu = importlib.import_module("generate_gpu")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens and steps than are measured."""
    monkeypatch.setattr(generate_gpu, "CONTEXT", 64)
    monkeypatch.setattr(generate_gpu, "NUM_STEPS", 8)


class Engine:
    """Only its events."""

    def __init__(self, *steps: tuple[int, int]) -> None:
        self._events = [{"kind": "step", "num_decode": n, "num_prefill_tokens": p} for n, p in steps]

    def snapshot(self) -> dict[str, Any]:
        return {"events": [{"kind": "admitted"}, *self._events]}


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([(1, 9), (4, 0), (4, 0)], 4),
        ([(4, 0), (3, 0)], None),
        ([(4, 0), (4, 7)], None),
        ([(4, 0)], None),
    ],
)
def test_the_live_batch_is_that_of_all_steps(steps: list[tuple[int, int]], found: int | None) -> None:
    model = SimpleNamespace(paged=Engine(*steps))
    if found is None:
        with pytest.raises(generate_gpu.WrongBatchError):
            generate_gpu.live_batch(model, 2)
    else:
        assert generate_gpu.live_batch(model, 2) == found


def test_a_step_of_another_batch_is_no_measurement(short: None) -> None:
    """A pool that holds five of eight: three of them wait or are preempted meanwhile."""
    bench = generate_gpu.Bench("tiny", torch.device("cpu"), (8,), 4)
    tokens = generate_gpu.CONTEXT + 6 * generate_gpu.NUM_STEPS
    with generate_gpu.patched(bench.model, num_blocks=5 * tokens // 16) as heard:
        with pytest.raises(generate_gpu.WrongBatchError):
            bench.step(8, heard)
        assert bench.step(3, heard)["live_batch"] == 3


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
    variants = ("sampling", "steps one by one", "nothing fused", "no graphs")
    engines = {"hf_paged", *(f"hf_paged, {variant}" for variant in variants), "stock"}
    rows = report["rows"]
    assert {(row["engine"], row["batch"]) for row in rows} == {(engine, n) for engine in engines for n in (1, 2)}
    assert all(row["live_batch"] == row["batch"] and "of_roofline" in row for row in rows)
    # Stock's is a difference of two calls' seconds, which on a busy machine may be anything.
    assert all(row["step_ms"] > 0 for row in rows if row["engine"] != "stock")
    fused = {row["engine"]: row["fused"] for row in rows if "fused" in row}
    assert fused["hf_paged"] > 0 == fused["hf_paged, nothing fused"]
    assert {row["no_graphs"] for row in rows if "fused" in row} == {"none here", "switched off"}

    monkeypatch.setitem(generate_gpu.PIECES, "stock", lambda bench: fail(ArithmeticError("no")))
    assert generate_gpu.main([*given, "tiny-decode", "tiny-stock", "tiny-start"]) == 1
    report = json.loads((tmp_path / "generate-gpu.json").read_text())
    assert report["rows"][:-1] == rows and 0 < report["rows"][-1]["first_token"] <= report["rows"][-1]["third_token"]
    assert report["families"]["tiny-stock"]["status"] == "failed: ArithmeticError: no"
    assert "of_roofline" in (tmp_path / "generate-gpu.md").read_text()

    monkeypatch.setattr(children, "code_hash", lambda _: "other code")
    assert generate_gpu.main([*given, "tiny-start", "--time-limit", "0"]) == children.UNFINISHED
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


def test_preemption_goes_on(tmp_path: Path) -> None:
    preemption = importlib.import_module("preemption")
    shape = "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --intermediate 16 --vocab 50 --repeats 1 --block-sizes 8"
    given = [*shape.split(), "--lengths", "4", "16", "--out", str(tmp_path)]
    assert preemption.main([*given, "--time-limit", "0"]) == children.UNFINISHED
    path = tmp_path / "preemption-cpu.json"
    assert json.loads(path.read_text())["results"] == {"8": []}
    assert preemption.main(given) == 0
    first = json.loads(path.read_text())["results"]
    assert [row["length"] for row in first["8"]] == [4, 16]
    path.write_text(path.read_text().replace('"length": 4', '"length": 5'))
    assert preemption.main(given) == 0  # 4 tokens again, and they alone
    assert [row["length"] for row in json.loads(path.read_text())["results"]["8"]] == [5, 16, 4]


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

    def __init__(self, folder: Path, has_xdist: bool) -> None:
        (folder / "tests").mkdir()
        (folder / "tests" / "test_fake.py").write_text(TESTS)
        self._folder, self._notes = folder, folder / "ran"
        options = ["--out", str(folder), "--tests", str(folder / "tests"), "--time-limit", "100"]
        main = "import gpu_tests as g; g.MOST_PROCESSES = 1; g.LEAST = 1; "
        if not has_xdist:
            main += "g.importlib.util.find_spec = lambda name: None; "
        self._command = [*python(f"{main}raise SystemExit(g.main())"), *options]

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


@pytest.mark.parametrize("has_xdist", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_broken_device_is_left_and_what_passed_is_not_run_again(has_xdist: bool, tmp_path: Path) -> None:
    if has_xdist:
        pytest.importorskip("xdist")
    runs = Runs(tmp_path, has_xdist)
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


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    runs = Runs(tmp_path, has_xdist=False)
    process = runs.start(HANG="1")
    wait_for(lambda: "slow" in runs.ran)
    process.kill()
    process.communicate()
    assert runs.outcomes("passed") == {"good[0]", "good[1]", "good[2]", "crash", "wrong"}
    status, out = runs.run()
    assert status == 1 and "9 passed so far, 1 failed" in out
    assert runs.ran == ["broken", "slow", "end", "alone", "alone_too"]


def test_what_passed_counts_for_the_same_code_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "run_all", lambda *_: gpu_tests.OUT_OF_TIME)
    (tmp_path / "test_fake.py").write_text("1")
    given = ["--out", str(tmp_path), "--tests", str(tmp_path)]
    record = tmp_path / "gpu-tests.jsonl"
    gpu_tests.main(given)
    gpu_plugin.Record(record, "").add("passed", id="x")
    for change in (lambda: None, lambda: (tmp_path / "test_fake.py").write_text("2")):
        assert gpu_plugin.Record(record, "").done == {"x"}
        change()
        assert gpu_tests.main(given) == children.UNFINISHED
    assert not gpu_plugin.Record(record, "").done


@pytest.mark.parametrize("limit", ["0.1", pytest.param("4", marks=pytest.mark.slow)])
def test_tests_for_which_no_time_is_left_are_said(limit: str, tmp_path: Path) -> None:
    runs = Runs(tmp_path, has_xdist=False)
    (tmp_path / "tests" / "test_fake.py").write_text(TESTS + "\ntime.sleep(5)\n")  # until it is over
    status, out = runs.run("--time-limit", limit)
    assert status == children.UNFINISHED and not runs.ran and "others are left" in out, out


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA kernel errors"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (type("AcceleratorError", (RuntimeError,), {})("gone"), True),
    ],
)
def test_which_errors_are_the_drivers(error: Exception, found: bool) -> None:
    outer = AssertionError("tokens differ")
    outer.__context__ = error
    assert gpu_plugin.is_cuda_error(error) == gpu_plugin.is_cuda_error(outer) == found
    assert not gpu_plugin.is_cuda_error(None)


ABSENT = ("hypothesis", "gradio", "xdist", "pytest_timeout", "peft", "matplotlib", "fastapi", "pandas")


def test_gpu_tests_need_little() -> None:
    """A machine with a GPU has torch, triton, transformers and pytest. A smoke test that is renamed is missed."""
    files = gpu_tests.marked("gpu", ROOT / "tests")
    assert len(files) >= 5 and __file__ not in files
    for file in [*files, *(ROOT / "tests" / f"{name}.py" for name in ("conftest", "models", "kernel_cases"))]:
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
    parsers = {"gpu_tests": "gpu_tests", "gpu_kernels": "gpu_kernels", "generate": "generate_gpu"}
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


def test_what_failed_is_tried_again_after_all_others(tmp_path: Path) -> None:
    call = Call(tmp_path, one="fail", two="stop", three="")
    status, out = call.run()
    assert status == children.UNFINISHED and "three" not in call.rows(), "a step that is out of time is the last"
    assert "it is broken" in (call.state / "logs" / "one.log").read_text()
    status, out = call.run(CALM="1")
    begun = [line.split(":")[0] for line in out.splitlines() if line.startswith("==")]
    assert status == 0 and begun == ["== two", "== three", "== one"]


def test_nothing_is_begun_for_which_no_time_is_left(tmp_path: Path) -> None:
    call = Call(tmp_path, one="")
    status, out = call.run("--seconds", "2")
    assert status == children.UNFINISHED and not call.rows() and "it needs 5" in out


def test_an_archive_is_unpacked_by_a_machine_that_forgot(tmp_path: Path) -> None:
    call = Call(tmp_path, one="", two="stop")
    assert call.run()[0] == children.UNFINISHED
    call.state.rename(tmp_path / "forgotten")
    call.archive.rename(tmp_path / call.archive.name)
    status, out = call.run(CALM="1")
    assert status == 0 and "unpacked" in out and "== one" not in out and "== two: stopped" in out


def test_an_archive_holds_all_results_and_the_newest_kernels(tmp_path: Path) -> None:
    state = tmp_path / "gpu-state"
    for number in range(6):
        folder = state / "triton" / f"k{number}"
        folder.mkdir(parents=True)
        (folder / "kernel.cubin").write_bytes(os.urandom(200_000))
        os.utime(folder, (number, number))
    (state / "results").mkdir()
    (state / "results" / "x.json").write_text("{}")
    gpu.pack(state, tmp_path / "a.tar.gz", most=500_000)
    assert (tmp_path / "a.tar.gz").stat().st_size < 900_000
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        names = tar.getnames()
    assert "gpu-state/results/x.json" in names
    kept = {name.split("/")[2] for name in names if "triton" in name}
    assert kept == {f"k{5 - i}" for i in range(len(kept))} and 2 <= len(kept) < 6
