"""Code that runs in a process of its own."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from helpers.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def run_compiled(*command: Any, python_path: Path = ROOT, seconds: float = 350) -> str:
    """What a Python program prints, in a process in which Triton compiles: in this one it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(python_path)
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def in_child(check: Callable[[], None]) -> None:
    """Forks; the child must come back from `check` soon, and without an error."""
    pid = os.fork()
    if pid == 0:
        try:
            check()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    assert wait_for(pid, PATIENCE - 5) == 0, "the child failed"


def wait_for(pid: int, seconds: float) -> int | None:
    """The exit code of a child; `None`: it had to be killed, and has printed where it was."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGABRT)  # it says where its threads are
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def run_processes(processes: Iterable[Callable[[], None]]) -> None:
    """Runs each of them in a fork of this process, which has imported everything and done nothing."""
    results = {}
    for process in processes:
        with tempfile.TemporaryFile() as file:
            pid = os.fork()
            if pid == 0:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                faulthandler.enable()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                # torch makes its pool of threads anew in the first call of each child, and not safely: threads that
                # call it at once fail now and then ("Invalid thread pool!").
                torch.set_num_threads(1)
                process()
                return  # to the end of the script, and of this interpreter
            code = wait_for(pid, PATIENCE + 5)
            file.seek(0)
            text = file.read().decode()
        results[process.__name__] = {"code": code, "text": text}
    print(json.dumps(results))


def ends_of_processes(script: str) -> dict[str, Any]:
    """How those ended that a script runs by `run_processes`: exit code, and what was printed."""
    result = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=350,
        cwd=os.path.dirname(script) + "/../..",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # what it imports is in other folders
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found
