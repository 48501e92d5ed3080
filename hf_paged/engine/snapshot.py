"""`Snapshot`: pool, block tables, queues and events as plain data, to be drawn."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hf_paged.core.event_log import Event, as_dicts
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus
from hf_paged.engine.kv_pool import KVPool

_TAIL = 8  # last tokens of a sequence that are shown


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is where at one moment: taken quickly, with the pool's lock held, and spelled out without it."""

    facts: dict[str, Any]
    cells: list[tuple[int, bytes | None]]
    groups: list[dict[str, Any]]
    events: tuple[int, list[Event]]

    @classmethod
    def take(cls, pool: KVPool, since: int, **facts: Any) -> Snapshot:
        facts |= {"num_blocks": 0, "block_size": pool.config.block_size, "bytes_per_block": 0, "num_swap_blocks": 0}
        with suppress(RuntimeError):  # the model is gone
            facts["bytes_per_block"] = pool.bytes_per_block
        events = pool.log.newer(since)
        if not pool.is_made:
            return cls(facts, [], [], events)
        manager = pool.manager
        facts["num_blocks"] = manager.pool.num_blocks
        facts["num_swap_blocks"] = manager.swap_pool.num_blocks if manager.swap_pool is not None else 0
        groups = [_group(pool, group) for group in pool.scheduler.queues.groups]
        return cls(facts, manager.pool.cells(), groups, events)

    def as_dict(self) -> dict[str, Any]:
        return self.facts | {
            "blocks": [count or (0 if block_hash is None else -1) for count, block_hash in self.cells],
            "hashes": ["" if block_hash is None else block_hash[:4].hex() for _, block_hash in self.cells],
            "groups": self.groups,
            **{
                str(status): [group["id"] for group in self.groups if group["status"] == status]
                for status in SequenceStatus
            },
            "events": as_dicts(*self.events),
        }


def _group(pool: KVPool, group: SequenceGroup) -> dict[str, Any]:
    return {
        "id": group.arrival,
        "request_id": group.request_id,
        "status": str(group.status),
        "is_idle": group.is_idle,
        "priority": group.priority,
        "sequences": [_sequence(pool, sequence) for sequence in group.sequences],
    }


def _sequence(pool: KVPool, sequence: Sequence) -> dict[str, Any]:
    return {
        "id": sequence.seq_id,
        # Those whose ids are known: `tail` is their end.
        "num_tokens": len(sequence.token_ids),
        "num_computed_tokens": sequence.num_computed_tokens,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "num_cached_tokens": min(sequence.num_cached_tokens, sequence.num_prompt_tokens),
        "tail": [token if isinstance(token, int) else -1 for token in sequence.token_ids[-_TAIL:]],
        "block_table": pool.manager.block_table(sequence.seq_id),
        "block_tables": pool.manager.block_tables(sequence.seq_id),
        "source_tokens": 0 if sequence.source is None else sequence.source.num_tokens,
        "source_blocks": pool.manager.get(sequence.seq_id).state.tolist() if sequence.source is not None else [],
    }
