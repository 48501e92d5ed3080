"""Results of transformers' batch API: each waits until it is asked for, or goes to its caller's event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from transformers.generation.continuous_batching.requests import GenerationOutput

OutputHandler = Callable[[GenerationOutput], None]
CHILD = "__child#"  # in the id of a request's further sequences, behind its own


def request_of(name: str) -> str:
    """The id of the request that an output of this name belongs to."""
    return name.partition(CHILD)[0]


class BatchResults:
    """Keeps outputs in the order in which they came, until they are taken."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._outputs: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[OutputHandler, asyncio.AbstractEventLoop]] = {}

    def deliver(self, output: GenerationOutput, is_wanted: Callable[[], bool]) -> None:
        """Hands on an output that is still wanted, on any thread; calls none of the user's code."""
        with self._condition:
            if not is_wanted():
                return
            handler = self._handlers.get(output.request_id)
            if handler is None:
                self._outputs.append(output)
                self._condition.notify_all()
            else:
                self._call(handler, output)

    def wake(self) -> None:
        """Makes the threads that wait check whether anything may still come."""
        with self._condition:
            self._condition.notify_all()

    def take(
        self, request_id: str | None, timeout: float | None, may_come: Callable[[], bool]
    ) -> GenerationOutput | None:
        """The next output, of one request or of any.

        Args:
            request_id: Of which request; `None`: of any.
            timeout: Seconds to wait at most; `None`: as long as it takes.

        Returns:
            `None` when the time is over, or none can come.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while True:
                for output in self._outputs:
                    if request_id is None or output.request_id == request_id:
                        self._outputs.remove(output)
                        return output
                rest = None if deadline is None else deadline - time.monotonic()
                if (rest is not None and rest <= 0) or not may_come():
                    return None
                self._condition.wait(rest)

    def register(self, request_id: str, handler: OutputHandler) -> None:
        """From now on a request's outputs are given to `handler` in the running event loop; also those there already.

        Raises:
            RuntimeError: No event loop runs on this thread.
        """
        own = handler, asyncio.get_running_loop()
        with self._condition:
            self._handlers[request_id] = own
            waiting = [output for output in self._outputs if output.request_id == request_id]
            for output in waiting:
                self._outputs.remove(output)
                self._call(own, output)

    def forget(self, request_id: str) -> None:
        """Drops the handlers of a request, and its outputs that nothing has taken."""
        with self._condition:
            self._handlers = {name: own for name, own in self._handlers.items() if request_of(name) != request_id}
            self._outputs = deque(output for output in self._outputs if request_of(output.request_id) != request_id)

    def holds(self, request_id: str) -> bool:
        with self._condition:
            return any(request_of(output.request_id) == request_id for output in self._outputs)

    def _call(self, handler: tuple[OutputHandler, asyncio.AbstractEventLoop], output: GenerationOutput) -> None:
        callback, loop = handler
        with suppress(RuntimeError):  # the loop was closed: its program no longer waits
            loop.call_soon_threadsafe(callback, output)
        if output.is_finished():
            self._handlers.pop(output.request_id, None)
