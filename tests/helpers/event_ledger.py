"""`Ledger`: ref counts of all blocks, kept from the engine's events alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.event_log import as_dicts

RAISING = {"allocated", "shared", "prefix_hit", "swapped_in"}
LOWERING = {"freed", "swapped_out"}


class Ledger:
    """Reads every event once, in order, and knows from them how often each block is held.

    Attributes:
        counts: Of each block that is held.
        kinds: How often each kind of event was seen; preemptions also by how.
        last_id: Of the newest event read.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.last_id = 0
        self._last = (0.0, 0)

    def read(self, events: Iterable[dict[str, Any]]) -> None:
        """The events after the last one read, none left out."""
        for event in events:
            assert event["id"] == self.last_id + 1, f"event {event['id']} after {self.last_id}: some are missing"
            self.last_id = event["id"]
            moment = event["time"], event["step"]
            assert moment[1] >= self._last[1], f"step goes back: {event}"
            self._last = moment
            kind = event["kind"]
            self.kinds[kind] += 1
            if kind == "preempted":
                self.kinds[event["how"]] += 1
            if kind in RAISING:
                if kind == "allocated":
                    assert not any(self.counts[block] for block in event["blocks"]), f"a sequence holds them: {event}"
                self.counts.update(event["blocks"])
            elif kind in LOWERING:
                self.counts.subtract(event["blocks"])
            elif kind == "copied":
                self.counts.update([event["destination"]])
                self.counts.subtract([event["source"]])
            elif kind == "evicted":
                assert not any(self.counts[block] for block in event["blocks"]), f"a sequence holds them: {event}"
            assert min(self.counts.values(), default=0) >= 0, f"a block is given back once too often: {event}"

    def check(self, picture: dict[str, Any]) -> None:
        """Reads a snapshot's events, and compares with its ref counts."""
        self.read(event for event in picture["events"] if event["id"] > self.last_id)
        expected = {block: count for block, count in enumerate(picture["blocks"]) if count > 0}
        assert +self.counts == expected

    def follow(self, manager: BlockManager) -> None:
        """Reads what a manager's log has that is new, and compares with the manager's pool."""
        self.read(as_dicts(*manager.log.newer(self.last_id)))
        # What an empty sequence was only lent is no event before it grows.
        lent = Counter(
            block for table in manager.by_id.values() if table.borrowed_from is not None for block in table.everything()
        )
        pool = manager.pool
        expected = {block: count for block in range(pool.num_blocks) if (count := pool.ref_count(block))}
        assert self.counts + lent == expected
