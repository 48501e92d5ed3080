"""What the demo's Plots tab replays: `python -m paper.ramp` writes `demo/replays/ramp.json`.

The same requests through each system, simulated, while the rate rises steadily: each of them saturates at its own
moment. Figures are those of the paper's set-up; see README.md.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from pathlib import Path
from typing import Any

from workload import Request

from paper import policies
from paper.costs import PAPER, Setup
from paper.policies import System
from paper.requests import requests
from paper.simulator import PaperSimulation, Settings, rounded

PATH = Path(__file__).parents[2] / "demo" / "replays" / "ramp.json"
SECONDS, RATE = 480.0, 3.0  # of arrivals, and requests a second at the end, from none at the start
POINTS = 120
SYSTEMS = (policies.PAGED, policies.ORACLE, policies.POW2, policies.MAX, policies.STATIC)


def rising(seconds: float, rate: float, seed: int) -> list[Request]:
    """ShareGPT's lengths; arrivals by a Poisson process whose rate rises from 0."""
    made = requests("sharegpt", rate / 2, seconds, seed=seed)
    rng, events = random.Random(f"ramp {seed}"), 0.0
    for request in made:
        events += rng.expovariate(1.0)
        request.arrival = math.sqrt(2 * events * seconds / rate)
    return made


def record(made: list[Request], system: System, times: list[float], setup: Setup = PAPER) -> dict[str, list[Any]]:
    """What a run looks like at these times: requests in the batch, waiting and done, and the pool's share of tokens."""
    simulation = PaperSimulation(made, system, setup, Settings())
    simulation.serve()
    columns = simulation.samples.columns
    rows = [bisect_right(columns["time"], at) - 1 for at in times]
    ends = sorted(outcome.end for outcome in simulation.outcomes)
    done = [bisect_right(ends, at) for at in times]
    arrivals = [request.arrival for request in made]
    arrived = [bisect_right(arrivals, at) for at in times]
    running = [int(columns["batch"][row]) if row >= 0 else 0 for row in rows]
    stored = [columns["stored"][row] / simulation.capacity if row >= 0 else 0.0 for row in rows]
    waiting = [max(0, a - d - r) for a, d, r in zip(arrived, done, running)]
    return {"running": running, "waiting": waiting, "done": done, "tokens": [round(share, 3) for share in stored]}


def main() -> None:
    made = rising(SECONDS, RATE, seed=0)
    times = [rounded((i + 1) * SECONDS / POINTS) for i in range(POINTS)]
    report = {
        "what": "simulated: OPT-13B on an A100-40GB, 15,700 slots, ShareGPT's lengths (benchmarks/paper)",
        "seed": 0,
        "times": times,
        "rates": [rounded(RATE * at / SECONDS) for at in times],
        "systems": {system.name: record(made, system, times) for system in SYSTEMS},
    }
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(
        json.dumps(report, separators=(",", ":")).replace('"what"', '\n"what"').replace("],", "],\n") + "\n"
    )
    print(f"{PATH.name}: {len(made)} requests")


if __name__ == "__main__":
    main()
