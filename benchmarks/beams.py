"""Beam search on CPU beside stock `generate()`: many callers with few beams, one caller, callers of all kinds.

    python benchmarks/beams.py --out benchmarks/results

The embedded model, float32, one torch thread, nothing ends early. Ours and stock alternate, repetition by repetition;
figures are medians. Stock serves callers one after another, which is what a lock around it comes to. All tokens are
compared with stock's.
"""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from command import embedded_model, parser, quiet, save, show
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

import hf_paged

ENDLESS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
MIXED: list[dict[str, Any]] = [
    {},
    {"num_beams": 3},
    {"repetition_penalty": 1.2},
    {"num_beams": 2, "length_penalty": 0.5},
]


def prompt(length: int, seed: int) -> Tensor:
    """Random ids, the same for the same seed."""
    return torch.randint(5, 2000, (1, length), generator=torch.Generator().manual_seed(seed))


# Of each row: of a caller's number its settings, and how many callers there are.
ROWS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "24 callers, 2 beams each": (lambda index: {"num_beams": 2, "max_new_tokens": 20}, 24),
    "1 caller, 4 beams": (lambda index: {"num_beams": 4, "max_new_tokens": 64}, 1),
    "16 callers: greedy, penalties, 2 and 3 beams": (lambda index: MIXED[index % 4] | {"max_new_tokens": 32}, 16),
}


def serve(model: Any, name: str, on_threads: bool) -> list[list[list[int]]]:
    """What all callers of a row get."""
    settings, count = ROWS[name]
    found: list[list[list[int]]] = [[]] * count

    def work(index: int) -> None:
        found[index] = model.generate(prompt(20 + index, index), **ENDLESS, **settings(index)).tolist()

    if not on_threads:
        for index in range(count):
            work(index)
        return found
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--reps", type=int, default=5, help="repetitions")
    given = arguments.parse_args()
    quiet()
    _, stock = embedded_model()
    paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=4096)
    table = Table("", "hf_paged, s", "stock one by one, s", "times", "tokens identical")
    results = []
    for name in tqdm(ROWS, unit="row"):
        is_same = serve(paged, name, True) == serve(stock, name, False)
        seconds: dict[str, list[float]] = {"hf_paged": [], "stock": []}
        for _ in range(given.reps):
            for way, model in (("hf_paged", paged), ("stock", stock)):
                started = time.perf_counter()
                serve(model, name, on_threads=model is paged)
                seconds[way].append(round(time.perf_counter() - started, 4))
        ours, theirs = (statistics.median(seconds[way]) for way in ("hf_paged", "stock"))
        times = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
        results.append({"row": name, "seconds": seconds, "times": round(times, 2), "tokens_identical": is_same})
        table.add_row(name, f"{ours:.2f}", f"{theirs:.2f}", f"{times:.2f}", "yes" if is_same else "NO")
    save(given.out / "beams.json", {"benchmark": "beams"}, results)
    show(table)


if __name__ == "__main__":
    main()
