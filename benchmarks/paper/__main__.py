"""All figures: `python -m paper` from `benchmarks/`, or `make paper`.

    python -m paper                              all, in some minutes of one core
    python -m paper figure_12 --times 6          one, with an hour of arrivals instead of ten minutes

Each figure is a JSON file and a picture, written when it is done. With `--resume` those that are there with the same
settings are left as they are.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from paper import plots
from paper.figures import FIGURES

FOLDER = Path(__file__).parents[1] / "results" / "paper"
WHAT = "a simulation: real scheduler and tables, step times by a roofline (benchmarks/paper/costs.py)"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--times", type=float, default=1.0, help="arrivals go on for so many times as long")
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
        settings = {"times": args.times, "seed": args.seed, "trace": None}
        known = json.loads(path.read_text()) if path.exists() else None
        if not (args.plot or (args.resume and known and known["settings"] == settings)):
            started = time.perf_counter()
            results = FIGURES[name](args.times, args.seed)
            path.write_text(dumps({"what": WHAT, "settings": settings, "results": results}) + "\n")
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        plots.draw(name, json.loads(path.read_text())["results"], path.with_suffix(".png"))


def dumps(value: Any, indent: int = 0) -> str:
    """JSON in which a point of a curve is a line."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    is_flat = not any(isinstance(v, list) or (isinstance(v, dict) and len(json.dumps(v)) > 200) for v in inner)
    if is_flat and not (isinstance(value, list) and value):
        return json.dumps(value)
    pad, end = " " * (indent + 1), " " * indent
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + json.dumps(each) for each in inner) + f"\n{end}]"
    return "{\n" + ",\n".join(f"{pad}{json.dumps(k)}: {dumps(v, indent + 1)}" for k, v in value.items()) + f"\n{end}}}"


if __name__ == "__main__":
    main()
