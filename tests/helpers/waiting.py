"""To wait for what has to come, however slow the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
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
