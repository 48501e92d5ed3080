"""`RunRecord`: requests that have run, and the KV memory they held when they held most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_paged import RequestOutput

from .hub import Hub, Ticket
from .sharing import held_blocks


@dataclass(frozen=True)
class Row:
    """A piece of KV memory: of a sequence, and what of it holds a token.

    Attributes:
        label: Whose.
        reserved: Tokens that it has room for.
        used: Tokens that are in it.
    """

    label: str
    reserved: int
    used: int


@dataclass
class RunRecord:
    """Requests that ran together.

    Attributes:
        labels: Of each request.
        prompts: Token ids of each.
        max_new_tokens: What each was allowed to generate.
        block_size: Of the pool they ran in.
        num_blocks: Of that pool.
        bytes_per_token: Keys and values of a token in all layers.
        sequences: Generated token ids of each request: a list a sequence. Filled at the end.
        held: Rows of the snapshot in which they held most blocks, a shared block counted once.
        num_snapshots: Looked at while they ran.
    """

    labels: list[str]
    prompts: list[list[int]]
    max_new_tokens: int
    block_size: int
    num_blocks: int
    bytes_per_token: int
    sequences: list[list[list[int]]] = field(default_factory=list)
    held: list[Row] = field(default_factory=list)
    num_snapshots: int = 0

    @classmethod
    def begin(cls, hub: Hub, tickets: Sequence[Ticket], max_new_tokens: int) -> RunRecord:
        """For requests that were just submitted."""
        block_size = hub.settings["block_size"]
        return cls(
            labels=[ticket.label for ticket in tickets],
            prompts=[list(ticket.request.prompt_token_ids) for ticket in tickets],
            max_new_tokens=max_new_tokens,
            block_size=block_size,
            num_blocks=hub.settings["num_blocks"],
            bytes_per_token=hub.engine.bytes_per_block // block_size,
        )

    def see(self, snapshot: dict[str, Any]) -> None:
        """Takes a snapshot while they run."""
        rows = held_rows(snapshot, set(self.labels))
        self.num_snapshots += 1
        if sum(row.reserved for row in rows) > sum(row.reserved for row in self.held):
            self.held = rows

    def end(self, outputs: Sequence[RequestOutput]) -> None:
        """Takes what they generated."""
        self.sequences = [[list(sequence) for sequence in output.sequences] for output in outputs]

    @property
    def title(self) -> str:
        """What ran, in words."""
        count = sum(map(len, self.sequences))
        if len(self.labels) == 1:
            return f"{self.labels[0]}, {count} sequences of one prompt"
        return f"{len(self.labels)} requests, {self.labels[0]} to {self.labels[-1]}"


def held_rows(snapshot: dict[str, Any], labels: set[str]) -> list[Row]:
    """What requests hold in the pool: a row each sequence, with those of its blocks that no row before it has.

    A sequence's newest token has no keys and values before the next step; while that step runs, it is counted as room
    that is empty, one token a sequence at most.
    """
    block_size = snapshot["block_size"]
    rows, seen = [], set()
    for group in snapshot["groups"]:
        if group.get("request_id") not in labels or group["status"] == "swapped":
            continue
        for number, sequence in enumerate(group["sequences"], start=1):
            held = held_blocks(sequence)
            room = block_size * max((index + 1 for index, _ in held), default=0)
            stored = min(max(sequence["num_computed_tokens"], sequence["num_tokens"] - 1), room)
            own = [index for index, block in held if block not in seen]
            seen.update(block for _, block in held)
            used = sum(min(block_size, max(0, stored - index * block_size)) for index in own)
            if own:
                name = group["request_id"] + (f" · {number}" if len(group["sequences"]) > 1 else "")
                rows.append(Row(name, len(own) * block_size, used))
    return rows
