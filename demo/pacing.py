"""`Pacer`: full speed, slow motion, or paused and one step at a time, over `engine.pause/resume/step`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hf_paged

FULL_SPEED = 0.0
IDLE_SECONDS = 0.05  # between two looks whether there is something to do
SHORTEST_SECONDS = 0.001  # between two steps, in which other threads have their turn

Listener = Callable[[dict[str, Any]], object]


class Pacer:
    """How fast the engine's steps follow each other.

    A small model is done before a person has seen anything. In slow motion the engine is paused, and a thread here has
    it run one step at a time, so many a second. The thread also runs the steps while a listener is to see each of them.
    """

    def __init__(self, engine: Callable[[], hf_paged.Engine], look: Callable[[int], dict[str, Any]]) -> None:
        """Starts at full speed.

        Args:
            engine: Looks the engine up, which may be another one each time.
            look: Takes a snapshot, with the events since one. Called after each step that is run here.
        """
        self._engine = engine
        self._look = look
        self._newest_event = 0
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()  # of any thread that steps, pauses or resumes
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.steps_per_second = FULL_SPEED
        self.is_paused = False

    def set_speed(self, steps_per_second: float) -> None:
        """Slow motion with so many steps a second, or `FULL_SPEED`."""
        with self._lock:
            self.steps_per_second = steps_per_second
            self._apply()

    def pause(self) -> None:
        """No step runs until `resume`, but for `step`."""
        with self._lock:
            self.is_paused = True
            self._apply()

    def resume(self) -> None:
        """Goes on, at the speed that is set."""
        with self._lock:
            self.is_paused = False
            self._apply()

    def step(self) -> dict[str, Any] | None:
        """Runs one step of a paused engine; its event, or `None` if there was nothing to do.

        Raises:
            RuntimeError: It isn't paused.
        """
        with self._lock:
            if not self.is_paused:
                raise RuntimeError("the engine is not paused")
            return self._step()

    def attend(self, listener: Listener) -> None:
        """From now on every step runs here, and `listener` gets the snapshot after it; it must only keep that."""
        with self._lock:
            self._listeners.append(listener)
            try:
                self._apply()
            except BaseException:
                self._listeners.remove(listener)
                raise

    def leave(self, listener: Listener) -> None:
        """Ends `attend`."""
        with self._lock:
            self._listeners.remove(listener)
            self._apply()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it no step is run, and the engine may be replaced; afterwards it is paused, or not, as before."""
        with self._lock:
            try:
                yield
            finally:
                self._apply()

    def wake(self) -> None:
        """There may be something to do."""
        self._woken.set()

    def close(self) -> None:
        """Full speed for ever."""
        with self._lock:
            self._is_closed = True
            self.is_paused, self.steps_per_second = False, FULL_SPEED
            self._apply()
        self._woken.set()

    @property
    def _runs_here(self) -> bool:
        return not self._is_closed and bool(self.steps_per_second or self._listeners)

    def _step(self) -> dict[str, Any] | None:
        event = self._engine().step()
        if event is not None:
            if event["id"] <= self._newest_event:  # another engine, which counts anew
                self._newest_event = 0
            snapshot = self._look(self._newest_event)
            self._newest_event = snapshot["events"][-1]["id"]
            for listener in self._listeners:
                listener(snapshot)
        return event

    def _apply(self) -> None:
        engine = self._engine()
        if self.is_paused or self._runs_here:
            engine.pause()
        else:
            engine.resume()
        if self._runs_here and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="demo-pacer", daemon=True)
            self._thread.start()
        self._woken.set()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._lock:
                if not self._runs_here:
                    self._thread = None
                    return
                has_stepped = not self.is_paused and self._step() is not None
                seconds = 1 / self.steps_per_second if self.steps_per_second else SHORTEST_SECONDS
            if has_stepped:
                # On time on average; after a long step the time lost is not made up for.
                due = max(due + seconds, time.monotonic() + SHORTEST_SECONDS)
                time.sleep(max(0.0, due - time.monotonic()))
            else:
                self._woken.wait(IDLE_SECONDS)
                self._woken.clear()
                due = time.monotonic()
