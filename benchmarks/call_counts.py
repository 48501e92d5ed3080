"""Calls of the package's own functions: what a `generate()` makes before its first token, and for each later one.

    python benchmarks/call_counts.py --out benchmarks/results
    python benchmarks/call_counts.py --functions 40

One greedy call on the embedded model, after others have warmed it up. Counted are functions and generators that are
entered, on all threads (`sys.setprofile`), not comprehensions. A later token is the mean of those of a block of the
cache, so that a block's own work is in it. The stack's depth is in frames of the package.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from command import embedded_model, parser, quiet, save, show
from rich.table import Table

import hf_paged

FOLDER = str(Path(hf_paged.__file__).parent) + "/"
FIRST, LATER = 17, 64  # tokens before those that are compared, and these
RECORDS = "take_tokens"  # the function that a step's tokens are given to


class Calls:
    """What is called, by code object, while it is on."""

    def __init__(self) -> None:
        self.counts: Counter[CodeType] = Counter()
        self.before_first: Counter[CodeType] = Counter()
        self.depth = 0

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)  # of threads that begin now; the package's own end when there is no work
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType | None, event: str, _: Any) -> None:
        assert frame is not None
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(FOLDER) or code.co_name.endswith("comp>"):
            return
        if code.co_name == RECORDS and not self.before_first:
            self.before_first = self.counts.copy()
        self.counts[code] += 1
        depth = 0
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(FOLDER)
            frame = frame.f_back
        self.depth = max(self.depth, depth)


def profile(model: Any, ids: torch.Tensor, num_tokens: int) -> Calls:
    with Calls() as calls:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return calls


def package_of(code: CodeType) -> str:
    return code.co_filename.removeprefix(FOLDER).split("/")[0].removesuffix(".py")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--functions", type=int, default=0, help="list so many of the most called ones, too")
    given = arguments.parse_args()
    quiet()
    torch.set_num_threads(2)
    _, model = embedded_model()
    model.generation_config.eos_token_id = None
    hf_paged.patch(model)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 2000, (1, 24), generator=draw) for _ in range(4)]
    for ids in prompts[:2]:
        profile(model, ids, FIRST + LATER)
    short, long = (profile(model, ids, num) for ids, num in zip(prompts[2:], (FIRST, FIRST + LATER), strict=True))
    later = {code: (count - short.counts[code]) / LATER for code, count in long.counts.items()}
    first: Counter[str] = Counter()
    per_token: Counter[str] = Counter()
    for code, count in long.before_first.items():
        first[package_of(code)] += count
    for code, mean in later.items():
        per_token[package_of(code)] += mean
    table = Table("package", "before the first token", "a later token")
    for package in sorted(first | per_token, key=lambda name: -per_token[name]):
        table.add_row(package, str(first[package]), f"{per_token[package]:.1f}")
    table.add_row("all", str(first.total()), f"{per_token.total():.1f}")
    show(table, f"deepest stack: {long.depth} frames of the package")
    functions = [
        {"file": code.co_filename.removeprefix(FOLDER), "function": code.co_qualname, "line": code.co_firstlineno}
        | {"first": long.before_first[code], "later": round(mean, 3)}
        for code, mean in later.items()
    ]
    functions.sort(key=lambda row: (-row["later"], -row["first"]))
    if given.functions:
        most = Table("function", "before the first token", "a later token")
        for row in functions[: given.functions]:
            most.add_row(f"{row['file']}:{row['line']} {row['function']}", str(row["first"]), f"{row['later']:.2f}")
        show(most)
    results = {"first": dict(first), "later": {name: round(mean, 1) for name, mean in per_token.items()}}
    save(given.out / "call_counts.json", {"depth": long.depth}, results | {"functions": functions})


if __name__ == "__main__":
    main()
