"""`take_snapshot`: pool, block tables and queues as plain data, for somebody to draw."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_paged.kv_pool import KVPool


def take_snapshot(pool: KVPool, events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What is where at this moment. The pool's lock is held.

    Args:
        pool: The pool.
        events: Recent steps.

    Returns:
        `num_blocks` (0 before the pool's first use), `block_size`, `num_swap_blocks`; `blocks`: ref count of each one,
        -1 for a free one that is cached; `groups`: of each live sequence group its `id`, `status` ("waiting",
        "running", "swapped"), `is_idle`, `priority`, and its `sequences` with `id`, `num_tokens`,
        `num_computed_tokens` and `block_table` (indices of CPU blocks while swapped); `waiting`, `running` and
        `swapped`: ids of groups; `events`: recent steps, oldest first.
    """
    if not pool.is_made:
        empty: dict[str, Any] = {name: [] for name in ("blocks", "groups", "waiting", "running", "swapped", "events")}
        return {"num_blocks": 0, "block_size": pool.config.block_size, "num_swap_blocks": 0} | empty
    manager, blocks = pool.manager, pool.manager.pool
    counts = [blocks.ref_count(block) for block in range(blocks.num_blocks)]
    groups = [
        {
            "id": group.arrival,
            "status": str(group.status),
            "is_idle": group.is_idle,
            "priority": group.priority,
            "sequences": [
                {
                    "id": sequence.seq_id,
                    "num_tokens": sequence.num_tokens,
                    "num_computed_tokens": sequence.num_computed_tokens,
                    "block_table": list(manager.block_table(sequence.seq_id)),
                }
                for sequence in group.sequences
            ],
        }
        for group in pool.scheduler.groups
    ]
    return {
        "num_blocks": blocks.num_blocks,
        "block_size": manager.block_size,
        "num_swap_blocks": manager.swap_pool.num_blocks if manager.swap_pool is not None else 0,
        "blocks": [
            count if count else -1 if blocks.block_hash(block) is not None else 0 for block, count in enumerate(counts)
        ],
        "groups": groups,
        **{
            status: [group["id"] for group in groups if group["status"] == status]
            for status in ("waiting", "running", "swapped")
        },
        "events": list(events),
    }
