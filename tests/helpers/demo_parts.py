"""The demo with its interface, and a pool for its views."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from demo.hub import Hub
from demo.limits import Limits
from demo.loading import load
from demo.serving import address, make_server


@pytest.fixture(scope="module")
def both() -> Iterator[Any]:
    """The demo and the interface; their address, the hub, and the table of requests."""
    hub = Hub(load(), {"num_blocks": 64, "block_size": 16, "preemption": "auto"}, Limits(), is_fixed=True)
    server, listening = make_server(hub, "127.0.0.1", None, welcome=False)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    requests = server.config.app.state.requests  # type: ignore[union-attr]
    yield SimpleNamespace(url=address(listening), hub=hub, requests=requests)
    server.should_exit = True
    thread.join(20)
    hub.close()


EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def make_snapshot(num_blocks: int = 5000, num_requests: int = 200, seed: int = 0) -> dict[str, Any]:
    """A pool in its worst state for a compact picture: full, scattered, every block hashed."""
    choose = random.Random(seed)
    free = choose.sample(range(num_blocks), num_blocks)
    groups = []
    for number in range(num_requests):
        table = [free.pop() for _ in range(num_blocks // num_requests)]
        sequence = {
            "id": 1000 + number,
            "num_tokens": 16 * len(table),
            "num_computed_tokens": 16 * len(table) - 1,
            "num_prompt_tokens": 100,
            "num_cached_tokens": 32,
            "tail": [1, 2, 3],
            "block_table": table,
            "block_tables": [table],
        }
        group = {"id": 500 + number, "request_id": None, "status": "running", "is_idle": False, "priority": 0}
        groups.append(group | {"sequences": [sequence]})
    events = [
        {
            "id": each,
            "time": 1.7e9,
            "step": each // 9,
            "kind": "allocated",
            "group": 500,
            "sequence": 1000,
            "blocks": [7],
        }
        for each in range(2000)
    ]
    return {
        "num_blocks": num_blocks,
        "block_size": 16,
        "num_swap_blocks": num_blocks,
        "bytes_per_block": 36864,
        "is_paused": False,
        "num_steps": 7,
        "blocks": [0 if block in free else 1 for block in range(num_blocks)],
        "hashes": [f"{choose.getrandbits(32):08x}" for _ in range(num_blocks)],
        "groups": groups,
        "waiting": [],
        "running": [group["id"] for group in groups],
        "swapped": [],
        "events": events,
    }
