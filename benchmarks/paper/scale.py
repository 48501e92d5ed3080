"""What the real scheduler costs against scale: `python -m paper.scale`, `core/` alone.

Microseconds of `schedule()` and `update()` a step: of 16 to 4,096 running sequences with none waiting, and of 256
running ones with 10^2 to 10^6 in the queue. Cases are those of benchmarks/scheduler.py, and so is how they are timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import command
import scheduler
import torch
from common import device_facts

from paper import page, plots

RUNNING = (16, 64, 256, 1024, 4096)
QUEUED = (100, 1_000, 10_000, 100_000, 1_000_000)
BESIDE = 256  # running sequences beside the queued ones


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING)
    parser.add_argument("--queued", type=int, nargs="+", default=QUEUED)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--out", type=Path, default=page.FOLDER)
    args = parser.parse_args(argv)
    results: dict[str, dict[str, Any]] = {"running": {}, "queued": {}}
    shapes = [("running", n, n, 0) for n in args.running] + [("queued", n, BESIDE, n) for n in args.queued]
    for kind, key, running, queued in shapes:
        found = scheduler.measure({"case": scheduler.Case(running, queued)}, args.rounds, args.steps)["case"]
        results[kind][str(key)] = found
        print(f"{running:,} running, {queued:,} queued: {found['us_per_step']:,.0f} us a step", flush=True)
    about = {"what": "microseconds of schedule() + update() a step", "machine": device_facts(torch.device("cpu"))}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "more_scale.json"
    command.save(path, about, results)
    plots.more_scale(results, path.with_suffix(".png"))
    page.publish("scale", page.scale_section(results), args.out)


if __name__ == "__main__":
    main()
