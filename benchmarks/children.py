"""Child processes that are watched: their output is shown and its end kept, they end in time, and never outlive us.

A `Worker` is one that is given orders, as lines of JSON, and answers them: an engine in an environment of its own.
Nothing here needs more than Python itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNFINISHED = 75  # exit status of a program that stopped by itself at its time limit: the same command goes on there
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # between fork and exec nothing may be loaded
MARK = "RESULT "  # before what a worker answers, among what libraries print
NUM_LINES = 60  # of a child's output that are kept


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        status: Its exit status, negative for a signal.
        reason: Why it was killed; `None`: it ended by itself.
        lines: The last of its output.
    """

    status: int
    reason: str | None
    lines: list[str]

    def __str__(self) -> str:
        if self.reason is not None:
            return self.reason
        return f"signal {signal.Signals(-self.status).name}" if self.status < 0 else f"status {self.status}"


def run(
    command: Sequence[str],
    *,
    seconds: float,
    quiet: float | None = None,
    env: Mapping[str, str] | None = None,
    tick: Callable[[], None] = lambda: None,
    tick_seconds: float = 60.0,
) -> Ended:
    """Runs a command; both of its streams go to ours.

    Args:
        command: Program and arguments.
        seconds: After which it is killed, with all processes that it started.
        quiet: As `seconds`, since the last line it wrote.
        env: Variables besides ours.
        tick: Called now and then while it runs.
        tick_seconds: Between two of these calls.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(env or {}),
        process_group=0,
        preexec_fn=die_with_parent,
    )
    lines: deque[str] = deque(maxlen=NUM_LINES)
    started = heard = ticked = time.monotonic()

    def read() -> None:
        nonlocal heard
        assert process.stdout is not None
        for line in process.stdout:
            heard = time.monotonic()
            lines.append(line.rstrip("\n"))
            print(line, end="", flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reason = None
    try:
        while reason is None:
            try:
                process.wait(0.2)
                break
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if now > started + seconds:
                reason = f"not done after {seconds:.0f} seconds"
            elif quiet is not None and now > heard + quiet:
                reason = f"silent for {quiet:.0f} seconds"
            elif now > ticked + tick_seconds:
                ticked = now
                tick()
    finally:
        kill(process)
    reader.join(5.0)
    return Ended(process.returncode, reason, list(lines))


def kill(process: subprocess.Popen[str]) -> None:
    """The child, and what it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Worker:
    """A process that calls `answer_orders`."""

    def __init__(self, engine: str, command: Sequence[str], env: Mapping[str, str], seconds: float = 3600.0) -> None:
        """Waits until it is ready.

        Args:
            engine: What it is called in messages.
            command: Program and arguments.
            env: Variables besides ours.
            seconds: That it may take to begin, and to answer, before it is killed.

        Raises:
            RuntimeError: It has died, with its last words.
        """
        self.engine = engine
        self._seconds = seconds
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=os.environ | dict(env),
            process_group=0,
            preexec_fn=die_with_parent,
        )
        self._said: deque[str] = deque(maxlen=20)
        assert self._process.stderr is not None
        self._listener = threading.Thread(target=self._said.extend, args=(self._process.stderr,), daemon=True)
        self._listener.start()
        self._read()

    def run(self, **order: Any) -> dict[str, Any]:
        """What it answers.

        Raises:
            RuntimeError: It has died or took too long, with its last words.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        started = time.monotonic()
        timer = threading.Timer(self._seconds, self.close)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return answer
        finally:
            timer.cancel()
        if time.monotonic() > started + self._seconds:
            raise RuntimeError(f"{self.engine}: not done after {self._seconds:.0f} seconds")
        status = self._process.wait()
        self._listener.join(5.0)
        raise RuntimeError(f"{self.engine} ended with status {status}:\n{''.join(self._said)}")

    def close(self) -> None:
        kill(self._process)


def answer_orders(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """In a `Worker`'s process: answers one order after the other until there are no more."""
    print(MARK + json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(answer(json.loads(line))), flush=True)


def die_with_parent() -> None:
    """Called in a child: else what is left of a killed call has the device when the next one comes."""
    if LIBC is not None:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def code_hash(paths: Iterable[Path]) -> str:
    """A digest of files, and of the sources in folders: what was measured or tested with other code doesn't count.

    Raises:
        FileNotFoundError: One of the paths does not exist.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(path)
        found = path.rglob("*") if path.is_dir() else [path]
        files += sorted(file for file in found if file.suffix in (".py", ".c", ".h"))
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()[:16]
