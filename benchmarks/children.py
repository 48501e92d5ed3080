"""Child processes that are watched: their output is shown and its end kept, they end in time, and never outlive us.

Nothing here needs more than Python itself.
"""

from __future__ import annotations

import ctypes
import hashlib
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

UNFINISHED = 75  # exit status of a program that stopped by itself at its time limit: the same command goes on there
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # between fork and exec nothing may be loaded
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
        _kill(process)
    reader.join(5.0)
    return Ended(process.returncode, reason, list(lines))


def _kill(process: subprocess.Popen[str]) -> None:
    """The child, and what it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
