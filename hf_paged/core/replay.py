"""Replays a recording: the same calls to a scheduler of its own, and whether the same steps follow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.block_table import Offer
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.event_log import EventLog
from hf_paged.core.recorder import WARNING
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import GivenToken, Sequence, SequenceGroup
from hf_paged.core.state_blocks import StateBlockManager


class Key(str):
    """What stood for a key that a caller had made; it looks the same."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay leaves its recording.

    Attributes:
        line: Of the file, from 1.
        call: The scheduler's method.
        message: What differs.
    """

    line: int
    call: str
    message: str


class Replay:
    """A recording in the making, call by call.

    Attributes:
        num_steps: Steps that were the same.
        scheduler: Where it has got to.
    """

    def __init__(self, header: dict[str, Any]) -> None:
        """Begins with what the first line says."""
        self._now = 0.0
        self._answers: list[bool] = []
        sizes = {name: header[name] for name in ("num_blocks", "block_size", "enable_prefix_caching")}
        log = EventLog(now=lambda: self._now)
        others = {"num_swap_blocks": header["num_swap_blocks"], "log": log, "windows": header["windows"]}
        state_blocks = header.get("state_blocks")
        manager = (
            BlockManager(**sizes, **others)
            if state_blocks is None
            else StateBlockManager(**sizes, **others, state_blocks=state_blocks)
        )
        limits = header["max_num_batched_tokens"], header["max_num_seqs"]
        # A call that asks more often than it did takes another way, which its step will show.
        self.scheduler = Scheduler(manager, *limits, lambda group: bool(self._answers) and self._answers.pop(0))
        self.num_steps = 0
        self._sequences: dict[int, Sequence] = {}
        self._groups: dict[int, SequenceGroup] = {}
        self._owners: dict[int, object] = {}
        self._batches: dict[int, Batch] = {}
        self._offers: dict[int, list[Offer]] = {}

    def call(self, line: dict[str, Any]) -> str | None:
        """Makes one call; returns what differs, if anything."""
        name = line["do"]
        for kind, number, values in line.get("changes", ()):
            self._change(kind, number, values)
        self._answers = line.get("swaps", [])
        self._now = line.get("time", self._now)
        args = [self._decode(arg) for arg in line["args"]]
        options = {key: self._decode(value) for key, value in line.get("options", {}).items()}
        try:
            result = getattr(self.scheduler, name)(*args, **options)
        except (OutOfBlocksError, ValueError) as error:
            return None if line.get("raises") else f"it raises: {error}"
        if line.get("raises"):
            return "it raised an error, and now does not"
        if isinstance(result, SequenceGroup):
            self._groups[result.arrival] = result
        elif isinstance(result, Sequence):
            self._sequences[result.seq_id] = result
            self._groups.setdefault(result.group.arrival, result.group)
        elif name == "update":
            self._offers[args[0].number] = result
        elif name == "free":
            del self._sequences[args[0].seq_id]
        if not isinstance(result, Batch):
            return None
        if result.num_seqs:
            self._batches[result.number] = result
        self.num_steps += 1
        return _compare(line["digests"], result)

    def _change(self, kind: str, number: int, values: dict[str, Any]) -> None:
        if kind == "group":
            group = self._groups[number]
            for name, value in values.items():
                setattr(group, name, self._owner(value) if name == "owner" else _key(name, value))
            return
        sequence = self._sequences[number]
        for name, value in values.items():
            if name == "more":
                assert sequence.token_ids is not None
                sequence.token_ids += _tokens(value)
            else:
                setattr(sequence, name, _key(name, value))

    def _owner(self, number: int | None) -> object:
        return None if number is None else self._owners.setdefault(number, object())

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, number),) = value.items()
        if kind == "owner":
            return self._owner(number)
        if kind == "step":
            return self._batches.pop(number, Batch())
        known: dict[str, dict[int, Any]] = {
            "sequence": self._sequences,
            "group": self._groups,
            "offers": self._offers,
        }
        return known[kind].pop(number) if kind == "offers" else known[kind][number]


def _key(name: str, value: Any) -> Any:
    if name == "batch_key":
        return Key(value)
    if name == "token_ids" and value is not None:
        return _tokens(value)
    return (Key(value),) if name == "extra_key" else value


def _tokens(written: list[Any]) -> list[int]:
    """As the recorder writes them."""
    tokens: list[int] = []
    for token in written:
        if isinstance(token, int):
            tokens.append(token)
        else:
            number, token_id, position, is_embedded, digest = token
            place = tuple(position) if isinstance(position, list) else position
            given = () if is_embedded else None
            tokens.append(GivenToken.make(-number, token_id, place, given, 0, bytes.fromhex(digest)))
    return tokens


def _compare(expected: dict[str, str], batch: Batch) -> str | None:
    found = batch.digests()
    names = [name for name in found | expected if found.get(name) != expected.get(name)]
    if not names:
        return None
    return f"step {batch.number}: {', '.join(names)} differ; now it is {batch.chunks} (sequence, start, tokens)"


def replay(lines: Iterable[str]) -> tuple[int, Difference | None]:
    """Feeds a recording to a scheduler.

    Args:
        lines: Of the file.

    Returns:
        Steps that came out the same, and where the first one did not.

    Raises:
        ValueError: It is no recording.
    """
    numbered = enumerate(lines, 1)
    header = None
    with suppress(ValueError):  # no JSON, or no text
        header = json.loads(next(numbered, (0, ""))[1])
    if not isinstance(header, dict) or header.get("header") != WARNING:
        raise ValueError(
            "this is no recording: one is what patch(model, record=file), or HF_PAGED_RECORD=file, has written"
        )
    made = Replay(header)
    for number, text in numbered:
        line = json.loads(text)
        try:
            message = made.call(line)
        except (KeyError, ValueError, AssertionError) as error:
            message = f"{type(error).__name__}: {error}"
        if message is not None:
            return made.num_steps - 1, Difference(number, line["do"], message)
    return made.num_steps, None
