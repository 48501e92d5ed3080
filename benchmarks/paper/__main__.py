"""All figures: `python -m paper` from `benchmarks/`, or `make paper`.

    python -m paper                              all, in some minutes of one core
    python -m paper figure_12 --times 6          one, with an hour of arrivals instead of ten minutes
    python -m paper --trace lengths.csv          ShareGPT's lengths from a trace that replay.py reads

Each figure is a JSON file and a picture, written when it is done. With `--resume` those that are there with the same
settings are left as they are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paper import blocks, memory, plots, switches
from paper.sweeps import OURS, SWEEPS, ratios

FOLDER = Path(__file__).parents[1] / "results" / "paper"
WHAT = "a simulation: real scheduler and tables, step times by a roofline (benchmarks/paper/costs.py)"


def sweep(name: str) -> Callable[[float, Path | None, int], dict[str, Any]]:
    """A figure of `SWEEPS`."""

    def made(times: float, trace: Path | None, seed: int) -> dict[str, Any]:
        panels: dict[str, Any] = {}
        for one in SWEEPS[name]:
            curves: dict[str, list[dict[str, Any]]] = {}
            for curve, point in one.run(times, trace, seed):
                curves.setdefault(curve, []).append(point)
            panels[one.title] = {"curves": curves, "times_the_rate": ratios(curves, OURS)}
        return panels

    return made


FIGURES: dict[str, Callable[[float, Path | None, int], dict[str, Any]]] = {
    "figure_2": memory.figure_2,
    "figure_15": memory.figure_15,
    "figure_18": blocks.figure_18,
    "figure_19": blocks.figure_19,
    "more_switches": switches.more_switches,
    **{name: sweep(name) for name in SWEEPS},
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--times", type=float, default=1.0, help="arrivals go on for so many times as long")
    parser.add_argument("--trace", type=Path, help="of ShareGPT's lengths; default: quantiles, scaled to the paper's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="only what is not there yet")
    parser.add_argument("--plot", action="store_true", help="only draw what is there")
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    unknown = set(args.figures) - FIGURES.keys()
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.figures or FIGURES:
        path = args.out / f"{name}.json"
        settings = {"times": args.times, "seed": args.seed, "trace": args.trace.name if args.trace else None}
        known = json.loads(path.read_text()) if path.exists() else None
        if not (args.plot or (args.resume and known and known["settings"] == settings)):
            started = time.perf_counter()
            results = FIGURES[name](args.times, args.trace, args.seed)
            path.write_text(dumps({"what": WHAT, "settings": settings, "results": results}))
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        report = json.loads(path.read_text())
        plots.draw(name, report["results"], path.with_suffix(".png"))


def dumps(report: dict[str, Any]) -> str:
    """JSON in which a point of a curve is a line."""
    lines: list[str] = []

    def write(value: Any, indent: int) -> str:
        is_flat = not isinstance(value, dict | list) or not any(
            isinstance(inner, list) or (isinstance(inner, dict) and len(json.dumps(inner)) > 200)
            for inner in (value.values() if isinstance(value, dict) else value)
        )
        if is_flat and not (isinstance(value, list) and value):
            return json.dumps(value)
        pad = " " * (indent + 1)
        if isinstance(value, list):
            return "[\n" + ",\n".join(pad + json.dumps(inner) for inner in value) + "\n" + " " * indent + "]"
        items = (f"{pad}{json.dumps(key)}: {write(inner, indent + 1)}" for key, inner in value.items())
        return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"

    lines.append(write(report, 0))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
