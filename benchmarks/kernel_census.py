"""The census: every specialisation of the Triton kernels that serving launches, a line each in `kernel_census.jsonl`.

`kernel_soak.py` finds them, and writes the file; `compile_kernels.py` compiles what is in it, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernel_keys import Specialisation

WRITTEN = Path(__file__).with_suffix(".jsonl")


@dataclass(frozen=True, order=True)
class Cell:
    """What is soaked at a time: a model on a GPU with a pool of some type."""

    model: str
    gpu: str
    pool: str

    def __str__(self) -> str:
        return f"{self.model} {self.gpu} {self.pool}"


Census = dict[Specialisation, set[Cell]]  # and who launches it


def read() -> Census:
    """What is written down."""
    census: Census = {}
    for line in WRITTEN.read_text().splitlines():
        row = json.loads(line)
        constants = tuple((name, json.dumps(value)) for name, value in row["constants"].items())
        key = Specialisation(row["kernel"], tuple(row["arguments"].items()), constants, tuple(row["options"].items()))
        census[key] = {Cell(model, *place.split()) for model, places in row["cells"].items() for place in places}
    return census


def write(census: Census) -> None:
    """A line a specialisation, in an order that changes little from one census to the next."""
    lines = []
    for key in sorted(census):
        cells: dict[str, list[str]] = {}
        for cell in sorted(census[key]):
            cells.setdefault(cell.model, []).append(f"{cell.gpu} {cell.pool}")
        row = {
            "kernel": key.kernel,
            "constants": {name: json.loads(value) for name, value in key.constants},
            "arguments": dict(key.arguments),
            "options": dict(key.options),
            "cells": cells,
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    WRITTEN.write_text("".join(lines))


def differences(found: Census, written: Census, cells: Iterable[Cell]) -> list[str]:
    """What is launched and not written down, or written down and not launched, for these cells."""
    lines = []
    for sign, some, others in (("launched, not written down", found, written), ("not launched", written, found)):
        for key in sorted(some):
            where = (some[key] & set(cells)) - others.get(key, set())
            if where:
                lines.append(f"{sign}: {', '.join(map(str, sorted(where)))}: {key}")
    return lines
