"""What it costs to tell pictures apart: the digests of their embeddings, for the prefix cache.

    python benchmarks/digest.py --out benchmarks/results

Of a picture of so many embeddings, on CPU: "told" is to copy what the language model was given of it and to make its
tokens, digests included; "matched" is to hash its blocks and to look for them in an empty prefix cache. Text of as many
ids is given beside it. A figure is the smallest of some rounds. No tower and no model runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import command
import torch
from common import device_facts
from rich.table import Table

from hf_paged.core.block_manager import BlockManager
from hf_paged.model.forward_call import ForwardCall
from hf_paged.model.packed_forward import PackedForward
from hf_paged.model.wrapper import InnerCall

WIDTH = 4096
NUM_EMBEDDINGS = (256, 1024, 4096)
ROUNDS = 7
BLOCK_SIZE = 16


def call(num_tokens: int, dtype: torch.dtype | None) -> ForwardCall:
    """A prompt that is a picture, of embeddings of this dtype; `None`: one of ids."""
    ids = torch.arange(num_tokens)[None] % 1000
    made = ForwardCall(ids, None, None, torch.arange(num_tokens)[None], 1, given={})
    if dtype is not None:
        states = torch.randn(1, num_tokens, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
        made.inner = InnerCall(states, None, None, embedded=[list(range(num_tokens))])
    return made


def microseconds(function: Callable[[], Any]) -> float:
    """The shortest of some runs."""
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        function()
        found.append(time.perf_counter() - started)
    return min(found) * 1e6


def measure(num_tokens: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """A row of the result."""
    given = call(num_tokens, dtype)
    prompts = PackedForward.prompts(given, takes_positions=True)
    assert prompts is not None

    def match() -> None:
        manager = BlockManager(num_tokens // BLOCK_SIZE + 2, BLOCK_SIZE)
        manager.add(0)
        assert manager.prefix.match(0, [*prompts[0].token_ids, 1]) == 0

    num_bytes = 0 if dtype is None else num_tokens * WIDTH * dtype.itemsize
    return {
        "tokens": num_tokens,
        "given as": "ids" if dtype is None else str(dtype).removeprefix("torch."),
        "bytes": num_bytes,
        "told_us": round(microseconds(lambda: PackedForward.prompts(given, takes_positions=True)), 1),
        "matched_us": round(microseconds(match), 1),
    }


def main() -> None:
    """Measures, prints and saves."""
    given = command.parser(__doc__).parse_args()
    command.quiet()
    rows = [measure(number, dtype) for number in NUM_EMBEDDINGS for dtype in (None, torch.bfloat16, torch.float32)]
    table = Table(*rows[0], title=f"embeddings of width {WIDTH}")
    for row in rows:
        table.add_row(*map(str, row.values()))
    command.show(table)
    command.save(given.out / "digest.json", {"benchmark": "digest", "device": device_facts(torch.device("cpu"))}, rows)


if __name__ == "__main__":
    main()
