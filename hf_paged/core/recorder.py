"""`RecordingScheduler`: a scheduler that writes down what it is told, and a digest of each step that follows from it.

A recording is JSON, an object a line: `header` first, then one for each call, with what changed in the sequences and
groups that it is about since they were last written. `replay.py` reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import GivenToken, Sequence, SequenceGroup

WARNING = "this file holds prompts and generated tokens"

# The calls that change anything. Those of `DECIDING` look at all groups, the others at their arguments.
COMMANDS = (
    "new_group",
    "new_sequence",
    "fork",
    "free",
    "crop",
    "slide",
    "keep_past",
    "wake",
    "add_placeholder",
    "resolve_token",
    "add_drafts",
    "settle_drafts",
    "renew",
    "reset_prefix_cache",
    "update",
    "settle",
    "undo",
)
DECIDING = ("schedule", "schedule_together", "make_room", "swap_in_now", "preempt_all")

GROUP_FACTS = ("is_idle", "num_pins")
SEQUENCE_FACTS = (
    "num_tokens",
    "num_prompt_tokens",
    "num_at_once",
    "logits_from",
    "is_wanted",
    "position_offset",
    "wanted",
    "given_end",
    "is_stale",
    "spans",
    "num_drafts",
)


def check_place(path: str) -> None:
    """Raises `ValueError` where no recording of this name can be made."""
    try:
        folder = Path(path).expanduser().parent
    except RuntimeError as error:  # of a user that is not there
        raise ValueError(f"record={path!r}: {error}") from error
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"record={path!r}: {str(folder)!r} is no folder that files can be made in; name one that is")


def new_file(path: str) -> TextIO:
    """The file of a recording: never one that is there already, whose name then gets a number.

    Line by line, so that the last step before a crash is there, and a forked child has nothing of it to write again.

    Raises:
        ValueError: It can't be made.
    """
    check_place(path)
    number = 0
    while True:
        try:
            return Path(f"{path}.{number}" if number else path).expanduser().open("x", buffering=1, encoding="utf-8")
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ValueError(f"record={path!r} can't be written: {error}") from error


class RecordingScheduler(Scheduler):
    """See the module. What is within a call of its own is not written: it follows from that call."""

    def __init__(
        self,
        manager: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        prefers_swap: Callable[[SequenceGroup], bool] = lambda group: False,
        *,
        file: TextIO,
    ) -> None:
        """As `Scheduler`, and what it writes to."""

        def noting(group: SequenceGroup) -> bool:
            answer = prefers_swap(group)
            self._answers.append(answer)
            return answer

        super().__init__(manager, max_num_batched_tokens, max_num_seqs, noting)
        self._out = file
        self._process = os.getpid()
        self._is_inside = False
        self._answers: list[bool] = []  # of `prefers_swap`, within the call that is made
        self._names: dict[int, int] = {}  # of the groups, by their `id`: when they arrived at first
        self._owners: dict[int, object] = {}  # of the groups, by the number that they are written as
        self._num_owners = 0
        self._known: dict[int, dict[str, Any]] = {}  # what has been written of a sequence
        self._known_groups: dict[int, dict[str, Any]] = {}
        self._offers: dict[int, int] = {}  # the list that `update` has returned -> its step
        swap_pool = manager.swap_pool
        self._write(
            {
                "header": WARNING,
                "num_blocks": manager.pool.num_blocks,
                "block_size": manager.block_size,
                "enable_prefix_caching": manager.prefix.is_enabled,
                "num_swap_blocks": swap_pool.num_blocks if swap_pool is not None else 0,
                "windows": manager.windows,
                **({"state_blocks": manager.state_blocks} if manager.state_blocks else {}),
                "max_num_batched_tokens": max_num_batched_tokens,
                "max_num_seqs": max_num_seqs,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        if os.getpid() == self._process:  # a forked child has the file, too
            self._out.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _call(self, name: str, method: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._is_inside:
            return method(self, *args, **options)
        line: dict[str, Any] = {"do": name}
        touched = self._touched(name, args, options)
        changes = [change for group in touched for change in self._changes(group)]
        if changes:
            line["changes"] = changes
        if name == "new_group":  # the rest is told as changes
            line["args"] = [args[0] if args else options.get("priority", 0)]
        else:
            line["args"] = [self._encode(name, arg) for arg in args]
            line["options"] = {key: self._encode(key, value) for key, value in options.items()}
        self._is_inside, result = True, None
        try:
            result = method(self, *args, **options)
        except (OutOfBlocksError, ValueError):  # which have changed nothing
            line["raises"] = True
            raise
        finally:
            self._is_inside = False
            if self._answers:
                line["swaps"], self._answers = self._answers, []
            self._note_result(name, args, result, line)
            self._write(line)
            # What the scheduler has changed itself is no news.
            for group in touched:
                if group.sequences:
                    self._remember(group)
        return result

    def _note_result(self, name: str, args: tuple[Any, ...], result: Any, line: dict[str, Any]) -> None:
        if isinstance(result, SequenceGroup):
            self._names[id(result)] = result.arrival
        elif isinstance(result, Sequence):
            self._remember(result.group)
        elif isinstance(result, Batch):
            line["time"] = self._log.now()
            line["digests"] = result.digests()
        elif name == "update":
            self._offers[id(result)] = args[0].number
        elif name == "free":
            sequence = args[0]
            self._known.pop(sequence.seq_id, None)
            if not sequence.group.sequences:
                self._known_groups.pop(self._names.pop(id(sequence.group)), None)

    # What is written

    def _touched(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> list[SequenceGroup]:
        if name in DECIDING:
            return list(self.queues.groups)
        found = [*args, *options.values()]
        found += [item for value in found if isinstance(value, list) for item in value]
        groups = [value.group if isinstance(value, Sequence) else value for value in found]
        return [group for group in groups if isinstance(group, SequenceGroup)]

    def _changes(self, group: SequenceGroup) -> list[list[Any]]:
        changes: list[list[Any]] = []
        facts = self._group_facts(group)
        name = self._name(group)
        known = self._known_groups.get(name, {})
        if facts != known:
            changes.append(["group", name, {key: value for key, value in facts.items() if known.get(key) != value}])
        for sequence in group.sequences:
            old, own = self._known.get(sequence.seq_id, {}), _facts(sequence)
            if own == old:
                continue
            new = {key: value for key, value in own.items() if key not in old or old[key] != value}
            tokens, before = own["token_ids"], old.get("token_ids")
            if "token_ids" in new and tokens and before and tokens[: len(before)] == before:
                new["more"] = _tokens(new.pop("token_ids")[len(before) :])
            elif new.get("token_ids"):
                new["token_ids"] = _tokens(new["token_ids"])
            changes.append(["sequence", sequence.seq_id, new])
        return changes

    def _remember(self, group: SequenceGroup) -> None:
        self._known_groups[self._name(group)] = self._group_facts(group)
        for sequence in group.sequences:
            self._known[sequence.seq_id] = _facts(sequence)

    def _name(self, group: SequenceGroup) -> int:
        return self._names.setdefault(id(group), group.arrival)

    def _group_facts(self, group: SequenceGroup) -> dict[str, Any]:
        facts = {fact: getattr(group, fact) for fact in GROUP_FACTS}
        return facts | {"batch_key": repr(group.batch_key), "owner": self._owner(group.owner)}

    def _owner(self, owner: object) -> int | None:
        if owner is None:
            return None
        for number, known in self._owners.items():
            if known is owner:
                return number
        self._owners = {n: o for n, o in self._owners.items() if any(g.owner is o for g in self.queues.groups)}
        self._num_owners += 1
        self._owners[self._num_owners] = owner
        return self._num_owners

    def _encode(self, name: str, value: Any) -> Any:
        if isinstance(value, Sequence):
            return {"sequence": value.seq_id}
        if isinstance(value, SequenceGroup):
            return {"group": self._name(value)}
        if isinstance(value, Batch):
            return {"step": value.number}
        if name in ("owner", "only"):
            return {"owner": self._owner(value)}
        if name == "settle" and id(value) in self._offers:
            return {"offers": self._offers.pop(id(value))}
        if isinstance(value, Iterable) and not isinstance(value, str):
            return [self._encode(name, item) for item in value]
        return value


def _tokens(tokens: list[int]) -> list[Any]:
    """As they are written: of a `GivenToken` all but its embedding."""
    return [
        [int(token), token.token_id, token.position, token.embeddings is not None, token.digest.hex()]
        if isinstance(token, GivenToken)
        else token
        for token in tokens
    ]


def _facts(sequence: Sequence) -> dict[str, Any]:
    tokens = sequence.token_ids
    facts = {fact: getattr(sequence, fact) for fact in SEQUENCE_FACTS}
    return facts | {"extra_key": repr(sequence.extra_key), "token_ids": None if tokens is None else tokens.copy()}


def _recorded(name: str) -> Callable[..., Any]:
    method = getattr(Scheduler, name)

    @wraps(method)
    def call(self: RecordingScheduler, *args: Any, **options: Any) -> Any:
        return self._call(name, method, args, options)

    return call


for _name in (*COMMANDS, *DECIDING):
    if _name not in vars(RecordingScheduler):
        setattr(RecordingScheduler, _name, _recorded(_name))
