"""`SharingMeter`: how many blocks the sequences of one prompt share, while they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_paged.tools.report import format_bytes

from .hub import find_group


@dataclass(frozen=True)
class Sharing:
    """Blocks of one sequence group at one moment.

    Attributes:
        held: Blocks, a shared one counted once.
        tables: Blocks without sharing: each of its sequences with copies of its own.
        sequences: Sequences that hold blocks.
    """

    held: int = 0
    tables: int = 0
    sequences: int = 0

    @property
    def saved(self) -> int:
        """Blocks that sharing saves."""
        return self.tables - self.held


def held_blocks(sequence: dict[str, Any]) -> list[tuple[int, int]]:
    """The blocks of a sequence in a snapshot, each behind its position in its table; of all groups of layers."""
    return [(index, block) for table in sequence["block_tables"] for index, block in enumerate(table) if block >= 0]


def group_sharing(group: dict[str, Any]) -> Sharing:
    """What the sequences of a group hold and share."""
    tables = [held_blocks(sequence) for sequence in group["sequences"]]
    held = {block for table in tables for _, block in table}
    return Sharing(len(held), sum(map(len, tables)), sum(map(bool, tables)))


class SharingMeter:
    """Watches one request over snapshots."""

    def __init__(self, label: str) -> None:
        """Watches the request with this label."""
        self.label = label
        self.now = Sharing()
        self.most_saved = Sharing()  # when sharing saved most
        self.most_held = 0
        self.num_copies = 0  # blocks copied on write
        self.num_snapshots = 0  # with the request in them

    def see(self, snapshot: dict[str, Any]) -> None:
        """Takes the next snapshot, with the events since the last one."""
        for event in snapshot["events"]:
            self.num_copies += event["kind"] == "copied" and event.get("request_id") == self.label
        group = find_group(snapshot, self.label)
        if group is None or group["status"] == "swapped":
            return
        self.now = group_sharing(group)
        self.num_snapshots += self.now.held > 0
        self.most_held = max(self.most_held, self.now.held)
        if self.now.saved > self.most_saved.saved:
            self.most_saved = self.now

    def describe(self, bytes_per_block: int) -> str:
        """In a sentence or two, with what copying would have cost."""
        peak = self.most_saved
        copied = f"{self.num_copies} block{'s were' if self.num_copies != 1 else ' was'} copied on write"
        if not peak.saved:
            return f"At most {self.most_held} blocks held, none of them shared; {copied}." if self.most_held else ""
        return (
            f"{peak.held} blocks held at the moment when sharing saved most; with copies of their own the "
            f"{peak.sequences} sequences would hold {peak.tables}: {peak.saved} blocks more, "
            f"{format_bytes(peak.saved * bytes_per_block)} ({peak.saved / peak.tables:.0%} saved). "
            f"{copied.capitalize()}."
        )
