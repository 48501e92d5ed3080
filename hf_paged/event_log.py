"""`EventLog`: what happened to blocks, queues and requests lately, for somebody to watch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

from hf_paged.sequence import SequenceGroup

NUM_EVENTS = 2048  # that are kept
NUM_CHUNKS = 32_768  # that the step events among them name together

# What an event of each kind says besides when it was and whose. Ref counts follow from these alone: "allocated",
# "shared", "prefix_hit" and "swapped_in" raise those of their `blocks` by one for each mention, "freed" and
# "swapped_out" lower them; "copied" raises `destination` and lowers `source`.
_FIELDS = {
    "admitted": ("num_sequences", "num_tokens"),
    "allocated": ("blocks",),
    "shared": ("blocks", "parent"),
    "prefix_hit": ("blocks", "num_tokens"),
    "copied": ("source", "destination"),
    "freed": ("blocks",),
    "evicted": ("blocks",),
    "preempted": ("how", "num_sequences"),
    "swapped_out": ("num_blocks", "blocks"),
    "swapped_in": ("num_blocks", "blocks"),
    "undone": ("num_sequences",),
    "finished": ("reason",),
}


class Event(NamedTuple):
    """One event, as cheap as it can be noted."""

    id: int
    time: float
    step: int
    kind: str
    group: int | None
    sequence: int | None
    request_id: str | None
    values: tuple[Any, ...] | dict[str, Any]  # of `_FIELDS`; those of a step by name

    def as_dict(self) -> dict[str, Any]:
        """As plain data that shares nothing with the log; without what doesn't apply."""
        values = self.values if isinstance(self.values, dict) else zip(_FIELDS[self.kind], self.values, strict=True)
        result: dict[str, Any] = {"id": self.id, "time": self.time, "step": self.step, "kind": self.kind}
        whose = (("group", self.group), ("sequence", self.sequence), ("request_id", self.request_id))
        result |= {name: value for name, value in whose if value is not None}
        result |= {name: list(value) if isinstance(value, list) else value for name, value in dict(values).items()}
        if "chunks" in result:
            result["chunks"] = [list(chunk) for chunk in result["chunks"]]
        return result


class EventLog:
    """The newest events. Everybody who writes or reads it holds the pool's lock.

    Numbers and names only: an event keeps no sequence alive.

    Attributes:
        step: Number of the step that is being made, or of the last one: events from now on belong to it.
        last_step: The newest "step" event.
    """

    def __init__(self, num_events: int = NUM_EVENTS) -> None:
        self.step = 0
        self.last_step: Event | None = None
        self._num_recorded = 0
        self._events: deque[Event] = deque(maxlen=num_events)
        self._groups: dict[int, SequenceGroup] = {}  # of the live sequences
        self._with_chunks: deque[list[Any]] = deque()
        self._num_chunks = 0

    def enter(self, sequence: int, group: SequenceGroup) -> None:
        """From now on, events of this sequence are this group's."""
        self._groups[sequence] = group

    def leave(self, sequence: int) -> None:
        """The sequence has ended."""
        self._groups.pop(sequence, None)

    def add(self, kind: str, sequence: int | None, *values: Any) -> None:
        """Notes an event of a sequence.

        Args:
            kind: One of `_FIELDS`.
            sequence: Whose it is, if anybody's.
            *values: In the order of `_FIELDS`. A list among them belongs to the log from here on.
        """
        group = None if sequence is None else self._groups.get(sequence)
        self._append(kind, group, sequence, values)

    def add_for_group(self, kind: str, group: SequenceGroup | None, *values: Any) -> None:
        """Notes an event of a whole group."""
        self._append(kind, group, None, values)

    def group_of(self, sequence: int) -> SequenceGroup | None:
        """The live sequence's group, if anybody told."""
        return self._groups.get(sequence)

    def add_step(self, values: dict[str, Any]) -> None:
        """Notes a step that was run. Its `chunks` are forgotten when many later steps have had theirs."""
        self._append("step", None, None, values)
        self.last_step = self._events[-1]
        chunks = values["chunks"]
        self._with_chunks.append(chunks)
        self._num_chunks += len(chunks)
        while self._num_chunks > NUM_CHUNKS and len(self._with_chunks) > 1:
            oldest = self._with_chunks.popleft()
            self._num_chunks -= len(oldest)
            oldest.clear()

    def _append(
        self, kind: str, group: SequenceGroup | None, sequence: int | None, values: tuple[Any, ...] | dict[str, Any]
    ) -> None:
        self._num_recorded += 1
        arrival, request_id = (None, None) if group is None else (group.arrival, group.request_id)
        self._events.append(
            Event(self._num_recorded, time.time(), self.step, kind, arrival, sequence, request_id, values)
        )

    def newer(self, since: int = 0) -> list[Event]:
        """The events that are kept and whose id is above `since`, oldest first."""
        count = max(0, min(len(self._events), self._num_recorded - since))
        return list(islice(reversed(self._events), count))[::-1]


def as_dicts(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events as plain data."""
    return [event.as_dict() for event in events]
