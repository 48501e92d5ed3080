"""Everything that needs a GPU, in the order of what it tells, in pieces that survive being killed.

    python benchmarks/gpu.py                      # goes on where the last call stopped
    python benchmarks/gpu.py --only smoke-tests smoke-step
    python benchmarks/gpu.py --seconds 540 --pack /somewhere/gpu-state.tar.gz

All it leaves is in one folder: `results`, `logs`, `triton` (compiled kernels) and `steps.json`. A step is a program
that saves what it has at any moment and goes on there; one that has succeeded is not begun again unless the code has
changed, one that failed is tried again after all others. At the time limit it stops by itself, with status 75 if
something is left. For machines that forget, the folder is packed into one archive every minute, and unpacked where it
is not there.
`benchmarks/GPU.md` says more. Nothing here needs more than Python itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import children

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
CODE = [ROOT / "hf_paged", ROOT / "tests", BENCHMARKS]
TOP = "gpu-state"  # folder in an archive
MOST_PACKED = 15 * 2**20  # bytes of an archive
GRACE = 25.0  # seconds beyond its limit that a step is given
KERNELS_FIRST = ("limits", "decode", "layouts", "splits", "prefill", "tiles")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
CHECKS = ("memcheck", "racecheck")
PREEMPTION = "--shape 8b --dtype bfloat16 --lengths 16 64 256 1024 4096 16384"
FACTS = "import common, torch; print(common.versions() | common.device_facts(torch.device('cuda')))"


@dataclass(frozen=True)
class Step:
    """A program that takes `--time-limit` and ends with 0, `children.UNFINISHED`, or another status if it failed.

    Attributes:
        name: Of the step.
        command: Program and arguments.
        needs: Seconds under which it is not begun.
        takes_limit: Whether it takes `--time-limit`; else it is killed when the time is up.
        env: Variables for it.
    """

    name: str
    command: Sequence[str]
    needs: float = 60.0
    takes_limit: bool = True
    env: tuple[tuple[str, str], ...] = ()


def steps(state: Path) -> list[Step]:
    """All of them, first what tells most."""
    out = ["--out", str(state / "results")]

    def program(name: str, *arguments: str) -> list[str]:
        return [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]

    generate = program("generate_gpu", *out)
    found = [
        Step("smoke-tests", program("gpu_tests", "--smoke", *out), needs=30),
        Step("smoke-step", [*generate, "--only", "8b_4layers-step"]),
        Step("kernels", program("gpu_kernels", *out, "--only", *KERNELS_FIRST)),
        Step("generate", [*generate, "--only", "8b-decode", "8b-sharegpt", "8b-profile"], needs=90),
        Step("tests", program("gpu_tests", *out)),
    ]
    sanitizer = shutil.which("compute-sanitizer", path=PATH)
    for check in CHECKS if sanitizer else ():
        options = ["--tool", check, "--error-exitcode", "9", "--print-limit", "20"]
        own = ["--out", str(state / f"sanitizer-{check}")]
        watched = program("gpu_kernels", "--quick", "--only", "sanitizer", "--in-process", *own)
        # Each tensor an allocation of its own: what reads past it is seen.
        env = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
        found.append(Step(f"sanitizer-{check}", [str(sanitizer), *options, *watched], needs=90, env=env))
    found += [
        Step("generate-all", generate, needs=90),
        Step("kernels-all", program("gpu_kernels", *out)),
        Step("preemption", program("preemption", *out, "--device", "cuda", *PREEMPTION.split()), needs=90),
    ]
    return found


class Book:
    """What became of each step, in a file that is whole at any moment."""

    def __init__(self, path: Path, code: str) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self.steps: dict[str, dict[str, Any]] = known.get("steps", {}) if known.get("code") == code else {}
        self._code = code

    def note(self, name: str, **facts: Any) -> None:
        self.steps[name] = self.steps.get(name, {}) | facts
        write = self._path.with_suffix(".tmp")
        write.write_text(json.dumps({"code": self._code, "steps": self.steps}, indent=1) + "\n")
        write.replace(self._path)

    def status(self, name: str) -> str:
        return str(self.steps.get(name, {}).get("status", "not begun"))


def run_steps(
    todo: Sequence[Step], book: Book, logs: Path, ends: float, env: dict[str, str], save: Callable[[], None]
) -> bool:
    """Runs what is not done; those that failed before come last.

    Args:
        todo: Steps in their order.
        book: Knows what is done.
        logs: Folder for the last lines of each step.
        ends: `time.monotonic()` at which all have to have stopped.
        env: Variables for all of them.
        save: Called every minute, and after each step.

    Returns:
        Whether every step has been run to its end, well or not.
    """
    due = [step for step in todo if book.status(step.name) != "done"]
    due.sort(key=lambda step: book.status(step.name).startswith("failed"))
    for step in due:
        left = ends - time.monotonic()
        if left < step.needs:
            print(f"== {step.name}: {left:.0f} seconds are left, it needs {step.needs:.0f}", flush=True)
            return False
        print(f"== {step.name}: {book.status(step.name)}; {left:.0f} seconds are left", flush=True)
        book.note(step.name, status="begun")
        started = time.monotonic()
        command = [*step.command, *(["--time-limit", f"{left:.0f}"] if step.takes_limit else [])]
        ended = children.run(command, seconds=left + GRACE, env=env | dict(step.env), tick=save)
        is_stopped = ended.status == children.UNFINISHED or ended.reason is not None
        status = "stopped: time limit" if is_stopped else f"failed: {ended}" if ended.status else "done"
        seconds = round(book.steps[step.name].get("seconds", 0) + time.monotonic() - started, 1)
        book.note(step.name, status=status, seconds=seconds)
        with (logs / f"{step.name}.log").open("a") as log:
            print(f"== {status} after {time.monotonic() - started:.0f} s", *ended.lines, sep="\n", file=log)
        save()
        if is_stopped:
            return False
    return True


def pack(state: Path, archive: Path, most: int = MOST_PACKED) -> None:
    """Writes the folder into one archive: compiled kernels last, the newest of them first, as many as fit into it."""
    kernels = state / "triton"
    others = [path for path in sorted(state.rglob("*")) if path.is_file() and not path.is_relative_to(kernels)]
    folders = sorted(kernels.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True) if kernels.exists() else []
    write = archive.with_name(archive.name + ".tmp")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with write.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
        for path in [*others, *folders]:
            if path.is_relative_to(kernels) and file.tell() > most:
                break
            try:
                tar.add(path, arcname=str(Path(TOP) / path.relative_to(state)))
            except OSError:  # was replaced meanwhile; the next archive has it
                continue
    write.replace(archive)


def unpack(archive: Path, state: Path) -> None:
    """What `pack` wrote, where there is none yet."""
    if archive.exists() and not state.exists():
        with tempfile.TemporaryDirectory(dir=state.parent) as folder, tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
            (Path(folder) / TOP).rename(state)
        print(f"unpacked {archive.name}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [step.name for step in steps(Path())] + [f"sanitizer-{check}" for check in CHECKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=ROOT / "gpu-state", help="the folder")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which it stops by itself")
    parser.add_argument("--only", nargs="+", choices=sorted(set(names)), help="these steps")
    parser.add_argument("--again", action="store_true", help="also steps that are done, and what failed in them")
    parser.add_argument("--pack", type=Path, help="archive to write; the repository's gpu-state.tar.gz is read")
    return parser.parse_args(argv)


def main(
    argv: Sequence[str] | None = None, make_steps: Callable[[Path], list[Step]] = steps, facts: str = FACTS
) -> int:
    """Returns 0, 1 if a step failed, or `children.UNFINISHED` if something is left."""
    ends = time.monotonic()
    args = parse(argv)
    ends += args.seconds
    args.state = args.state.resolve()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(children.UNFINISHED)
    )  # children end with us, the archive is written
    unpack(ROOT / "gpu-state.tar.gz", args.state)
    logs = args.state / "logs"
    for folder in (logs, args.state / "results"):
        folder.mkdir(parents=True, exist_ok=True)
    book = Book(args.state / "steps.json", children.code_hash(CODE))
    chosen = [step for step in make_steps(args.state) if not args.only or step.name in args.only]
    if args.again:
        chosen = [replace(step, command=[*step.command, "--again"]) for step in chosen]
        for step in chosen:
            book.steps.pop(step.name, None)
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCHMARKS)]), "HF_HUB_OFFLINE": "1"}
    env |= {"TOKENIZERS_PARALLELISM": "false", "TRITON_CACHE_DIR": str(args.state / "triton")}
    env["TRITON_STORE_BINARY_ONLY"] = "1"  # else five texts of each kernel, too

    def save() -> None:
        if args.pack:
            pack(args.state, args.pack)

    try:
        if children.run([sys.executable, "-c", facts], seconds=120, env=env).status:
            print("no GPU, or not what it takes: see above")
            return 1
        is_over = run_steps(chosen, book, logs, ends, env, save)
    finally:
        save()
    print()
    for step in chosen:
        print(f"{step.name:20} {book.steps.get(step.name, {}).get('seconds', 0):6.0f} s  {book.status(step.name)}")
    if not shutil.which("compute-sanitizer", path=PATH):
        print("compute-sanitizer is not on the PATH: nothing was checked by it")
    if not is_over:
        print("there is more to do: the same command goes on there")
        return children.UNFINISHED
    return int(any(book.status(step.name) != "done" for step in chosen))


if __name__ == "__main__":
    sys.exit(main())
