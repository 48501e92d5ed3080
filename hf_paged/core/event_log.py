"""`EventLog`: recent events of blocks, queues and requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

from hf_paged.core.batch import Chunk
from hf_paged.core.sequence import SequenceGroup

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
    "step": (
        "num_seqs",
        "num_tokens",
        "num_decode",
        "num_prefill_tokens",
        "seconds",
        "chunks",
        "num_waiting",
        "num_swapped",
        "is_stalled",
        "num_free_blocks",
    ),
}
_COMMON = ("kind", "time", "step", "group", "sequence", "request_id")

Event = tuple[Any, ...]
"""An event as it is noted: values of `_COMMON`, then those of its kind."""


class StepRows(NamedTuple):
    """What a step computed, column by column: no object for each row.

    Attributes:
        columns: Groups, sequences, starts and numbers of tokens.
        num_tokens: Of all rows.
        num_decode: Rows of one token behind their prompt.
    """

    columns: list[Any]
    num_tokens: int
    num_decode: int

    @classmethod
    def of(cls, chunks: list[Chunk]) -> StepRows:
        """The rows of a step, made while their sequences exist."""
        sequences, starts, counts = zip(*chunks, strict=True) if chunks else ((), (), ())
        num_decode = sum([n == 1 and start >= s.num_prompt_tokens for s, start, n in chunks])
        columns = [[s.group.arrival for s in sequences], [s.seq_id for s in sequences], starts, counts]
        return cls(columns, sum(counts), num_decode)


class EventLog:
    """The newest events. The pool's lock is held wherever it is written or read.

    Numbers and names only, each event one flat tuple: it keeps no sequence alive, and costs less than a microsecond,
    garbage collection included. They become dicts when they are read.

    Attributes:
        now: The time, in seconds: what is noted happens then. Here no clock is read.
        step: Number of the step that is being made, or of the last one: events from now on belong to it.
        last_step: The newest "step" event and its id.
    """

    def __init__(self, num_events: int = NUM_EVENTS, now: Callable[[], float] = lambda: 0.0) -> None:
        self.now = now
        self.step = 0
        self.last_step: tuple[int, Event] | None = None
        self._num_events = 0
        self._events: deque[Event] = deque(maxlen=num_events)
        self._groups: dict[int, SequenceGroup] = {}  # of the live sequences
        self._chunks: deque[list[Any]] = deque()  # of the step events, each as its four columns
        self._num_chunks = 0

    def enter(self, sequence: int, group: SequenceGroup) -> None:
        """From now on, events of this sequence are this group's."""
        self._groups[sequence] = group

    def leave(self, sequence: int) -> None:
        self._groups.pop(sequence, None)

    def group_of(self, sequence: int) -> SequenceGroup | None:
        """The live sequence's group, if it is known."""
        return self._groups.get(sequence)

    def add(self, kind: str, sequence: int, *values: Any) -> None:
        """Notes an event of a sequence.

        Args:
            kind: One of `_FIELDS`.
            sequence: Whose it is.
            *values: In the order of `_FIELDS`. A list among them belongs to the log from here on; a single block need
                not be put into one.
        """
        group = self._groups.get(sequence)
        self._num_events += 1
        if group is None:
            self._events.append((kind, self.now(), self.step, None, sequence, None, *values))
        else:
            self._events.append((kind, self.now(), self.step, group.arrival, sequence, group.request_id, *values))

    def add_for_group(self, kind: str, group: SequenceGroup | None, *values: Any) -> None:
        """Notes an event of a whole group, or one that belongs to no group."""
        self._num_events += 1
        arrival, request_id = (None, None) if group is None else (group.arrival, group.request_id)
        self._events.append((kind, self.now(), self.step, arrival, None, request_id, *values))

    def add_step(self, number: int, **values: Any) -> None:
        """Notes a step that was run.

        Args:
            number: The step's; the next one may have begun.
            **values: By the names in `_FIELDS`; `chunks` as columns (groups, sequences, starts, numbers of tokens),
                which are forgotten when many later steps have had theirs.
        """
        self._num_events += 1
        self._events.append(("step", self.now(), number, None, None, None, *map(values.__getitem__, _FIELDS["step"])))
        self.last_step = self._num_events, self._events[-1]
        self._chunks.append(values["chunks"])
        self._num_chunks += len(values["chunks"][0])
        while self._num_chunks > NUM_CHUNKS and len(self._chunks) > 1:
            oldest = self._chunks.popleft()
            self._num_chunks -= len(oldest[0])
            oldest.clear()

    def newer(self, since: int = 0) -> tuple[int, list[Event]]:
        """The events that are kept and whose id is above `since`, oldest first, and the id of the first of them."""
        count = max(0, min(len(self._events), self._num_events - since))
        return self._num_events - count + 1, list(islice(reversed(self._events), count))[::-1]


def as_dicts(first_id: int, events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events as plain data that shares nothing with the log; without what doesn't apply to one."""
    result = []
    for number, event in enumerate(events, first_id):
        common = zip(_COMMON, event[: len(_COMMON)], strict=True)
        values = zip(_FIELDS[event[0]], event[len(_COMMON) :], strict=True)
        said = {"id": number} | {name: value for name, value in common if value is not None}
        said |= {name: value.copy() if isinstance(value, list) else value for name, value in values}
        if "chunks" in said:
            said["chunks"] = [list(chunk) for chunk in zip(*said["chunks"], strict=True)]
        if isinstance(said.get("blocks"), int):
            said["blocks"] = [said["blocks"]]
        result.append(said)
    return result
