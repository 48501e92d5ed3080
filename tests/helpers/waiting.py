"""To wait for what has to come, however slow the machine is."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

PATIENCE = 100.0  # seconds after which a thread, a process or a request that doesn't end is taken for hung


def join(*threads: threading.Thread, seconds: float = PATIENCE) -> None:
    """Waits for threads, which have to end. They should be daemons: others would keep the suite from ending."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} hangs"


def eventually(is_true: Callable[[], bool], what: str) -> None:
    """Asserts that something becomes true, soon."""
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def in_background(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Calls on a daemon thread; the future has the result, or raises what the call raised."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def at_once(function: Callable[[Any], Any], items: Iterable[Any], seconds: float = PATIENCE) -> list[Any]:
    """What `map()` gives, with a thread for each item; they have to end."""
    return [future.result(seconds) for future in [in_background(function, item) for item in items]]


def _seconds_computed(thread: threading.Thread) -> float:
    """Processor time of a thread so far, where the system tells (Linux)."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def what_threads_do(seconds: float = 0.5) -> str:
    """Where each thread of the process is, and how much of so many seconds from now on it computes."""
    threads = threading.enumerate()
    before = [_seconds_computed(thread) for thread in threads]
    time.sleep(seconds)
    computed = [max(0.0, _seconds_computed(thread) - own) for thread, own in zip(threads, before, strict=True)]
    frames, told = sys._current_frames(), []
    for thread, own in sorted(zip(threads, computed, strict=True), key=lambda pair: -pair[1]):
        stack = traceback.format_stack(frames[thread.ident]) if thread.ident in frames else ["  it has ended\n"]
        told.append(f"{thread.name} computed for {own:.2f} s of {seconds} s:\n{''.join(stack[-8:])}")
    return "\n".join(told)
