"""`Frames`: the engine as it was after each of the last steps, so that nothing is gone before one looks."""

from __future__ import annotations

import json
import threading
import zlib
from typing import Any

MOST_STEPS = 200
MOST_BYTES = 32 << 20  # of all frames, compressed: of a large pool fewer are kept


class Frames:
    """The last snapshots of one engine, one a step, each with the events since the one before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames: dict[int, bytes] = {}  # by step, oldest first
        self._size = 0
        self._newest_event = 0

    def see(self, snapshot: dict[str, Any]) -> None:
        """Takes any snapshot. Of two after the same step the later one is kept, with the events of both."""
        step = snapshot["num_steps"]
        with self._lock:
            events = [event for event in snapshot["events"] if event["id"] > self._newest_event]
            newest = next(reversed(self._frames), -1)
            if step < newest or (step == newest and not events):
                return
            self._newest_event = events[-1]["id"] if events else self._newest_event
            if step == newest:
                events = _unpacked(self._frames[step])["events"] + events
                self._size -= len(self._frames[step])
            frame = zlib.compress(json.dumps(snapshot | {"events": events}).encode(), level=1)
            self._frames[step] = frame
            self._size += len(frame)
            while len(self._frames) > MOST_STEPS or (self._size > MOST_BYTES and len(self._frames) > 1):
                self._size -= len(self._frames.pop(next(iter(self._frames))))

    @property
    def steps(self) -> list[int]:
        """The steps after which there is a frame, oldest first. In slow motion these are all of the last ones."""
        with self._lock:
            return list(self._frames)

    def frame(self, step: int) -> dict[str, Any] | None:
        """The snapshot after a step; `None`: it is too long ago, or none was taken."""
        with self._lock:
            data = self._frames.get(step)
        return None if data is None else _unpacked(data)


def _unpacked(data: bytes) -> dict[str, Any]:
    snapshot: dict[str, Any] = json.loads(zlib.decompress(data))
    return snapshot
