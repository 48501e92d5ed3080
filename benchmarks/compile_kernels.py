"""Compiles the census of kernels (`kernel_census.py`) for GPUs that need not be there, all of it and nothing else.

Fails where a kernel does not compile, spills registers inside a loop, or takes more memory than a program can have.
What was compiled lies in Triton's cache: run again, it takes little.

    python benchmarks/compile_kernels.py --target sm_90 --out benchmarks/results
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from kernel_census import Census, read
from kernel_keys import Specialisation
from kernel_resources import MOST, SHARED_MEMORY_LIMIT, measure
from tqdm import tqdm

# By the GPU that it was soaked on: to the launchers sm_100 is sm_90.
TARGETS = {"sm_80": ("sm_80",), "sm_90": ("sm_90", "sm_100")}
ALL_TARGETS = [target for targets in TARGETS.values() for target in targets]


def todo(census: Census, targets: Iterable[str]) -> list[tuple[Specialisation, str]]:
    """What is compiled, and for which target."""
    return [
        (key, target)
        for target in targets
        for key, cells in sorted(census.items())
        if any(target in TARGETS[cell.gpu] for cell in cells)
    ]


def try_to_measure(key: Specialisation, target: str) -> dict[str, Any]:
    """As `measure`, or the error."""
    try:
        return measure(key, target)
    except Exception as error:  # whatever the compiler or the assembler raises: the others are compiled all the same
        return {"error": f"{type(error).__name__}: {error}"}


def fault(result: dict[str, Any], target: str) -> str:
    """What is wrong with a kernel; empty: nothing."""
    if "error" in result:
        return str(result["error"])
    if result["spills_in_loops"]:
        return f"{result['spilled_bytes']} bytes spilled, {result['spills_in_loops']} times in loops"
    if result["shared_memory"] > SHARED_MEMORY_LIMIT[target]:
        return f"{result['shared_memory']} bytes of shared memory"
    return ""


def table(results: list[tuple[Specialisation, str, dict[str, Any]]], targets: list[str]) -> str:
    """The most that any specialisation of a kernel takes."""
    lines = [
        f"Triton {triton.__version__}. Specialisations: registers of a thread / KiB of shared memory of a program /",
        "bytes spilled / spill instructions inside loops, the most of any of them.",
        "",
        "| kernel | " + " | ".join(targets) + " |",
        "|---" * (1 + len(targets)) + "|",
    ]
    for name in sorted({key.name for key, _, _ in results}):
        cells = []
        for target in targets:
            of = [result for key, its, result in results if (key.name, its) == (name, target) and "error" not in result]
            most = [max((one[column] for one in of), default=0) for column in MOST]
            most[1] //= 1024
            cells.append(f"{len(of)}: " + " / ".join(map(str, most)))
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", choices=ALL_TARGETS, default=ALL_TARGETS)
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--out", type=Path, help="folder for the table")
    arguments = parser.parse_args()
    pairs = [
        (key, target)
        for key, target in todo(read(), arguments.target)
        if any(part in key.name for part in arguments.only)
    ]
    results, faults = [], []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        measured = pool.map(try_to_measure, *zip(*pairs), chunksize=2)
        for (key, target), result in zip(pairs, tqdm(measured, total=len(pairs), mininterval=10)):
            results.append((key, target, result))
            if fault(result, target):
                faults.append(f"{target} {fault(result, target)}: {key}")
                tqdm.write(faults[-1])
    text = table(results, arguments.target)
    print(text)
    print(f"Triton {triton.__version__}: {len(results)} kernels compiled, {len(faults)} faults")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        Path(arguments.out, f"compiled_kernels_{triton.__version__}.md").write_text(text)
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
