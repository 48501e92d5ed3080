"""To wait for what has to come, however slow the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
