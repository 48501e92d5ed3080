"""`Replay`: runs that were recorded, two systems side by side over the same arrivals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

OURS = "hf_paged"
SERIES = ("running", "waiting", "done", "tokens")


@dataclass(frozen=True)
class Replay:
    """A recorded run: one list a series and system, all as long as `times`.

    Attributes:
        path: Of the file.
    """

    path: Path = Path(__file__).parent / "replays" / "ramp.json"

    @cached_property
    def _data(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def what(self) -> str:
        """On what it was recorded."""
        return self._data["what"]

    @property
    def times(self) -> list[float]:
        """Seconds."""
        return self._data["times"]

    @property
    def rates(self) -> list[float]:
        """Requests that arrive a second, at each time."""
        return self._data["rates"]

    @property
    def others(self) -> list[str]:
        """The systems beside ours."""
        return [name for name in self._data["systems"] if name != OURS]

    def series(self, system: str, name: str) -> list[float]:
        """One of `SERIES`: requests in the batch, waiting, and done so far, and the pool's share that holds tokens."""
        return self._data["systems"][system][name]

    def saturated_from(self, system: str) -> int | None:
        """From which point on more requests wait than run, until the end; `None`: it is never so."""
        pairs = list(zip(self.series(system, "waiting"), self.series(system, "running"), strict=True))
        calm = next((i for i in reversed(range(len(pairs))) if pairs[i][0] <= pairs[i][1]), -1)
        return calm + 1 if calm + 1 < len(pairs) else None

    def describe(self, other: str, point: int) -> str:
        """What is to be seen at a point, in a sentence."""
        parts = []
        for system in (OURS, other):
            running, waiting, done = (round(self.series(system, name)[point]) for name in SERIES[:3])
            full = self.saturated_from(system)
            state = f", saturated at {self.rates[full]:.1f} requests/s" if full is not None and full <= point else ""
            parts.append(f"{system}: {running} in the batch, {waiting} waiting, {done} done{state}")
        return f"{self.times[point]:.0f} s, {self.rates[point]:.1f} requests/s. {'; '.join(parts)}."
