"""Twelve points on the real engine, and the simulator beside them: `python -m paper.measured`, on a quiet machine.

The embedded model runs on CPU (float32, one torch thread), its requests ShareGPT's lengths over 8 and its pool 15.7K
slots over 8, so that memory binds as it does in the paper. The policies are those of the simulator, given to the
engine's own scheduler. First a burst of requests is served, and a cost model is fitted to its steps; with it, the rate
at which each system saturates is simulated. Then come the twelve points, fixed before anything is measured: four
systems, each at 0.4, 0.6 and 0.8 of that rate. Arrivals are at their times on the wall clock.

What is compared: the time of steps (those of the points, which the fit has not seen), throughput, and latency. The
simulator is taken to be valid where steps and throughput are within 15 %.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import command
from common import device_facts, versions
from simulation import Work
from workload import Request, poisson

import hf_paged
from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.scheduler import Scheduler
from paper import policies
from paper.costs import Setup
from paper.fitted import Fitted
from paper.policies import System
from paper.requests import lengths
from paper.simulator import Outcome, Settings, rounded, run

SCALE = 8  # by which lengths, context and pool are smaller than the paper's
SLOTS, CONTEXT, BLOCK_SIZE = 15_700 // SCALE, 2048 // SCALE, 4
SYSTEMS = policies.PAGED, policies.ORACLE, policies.POW2, policies.MAX
SHARES = 0.4, 0.6, 0.8  # of the rate at which a system saturates in the simulator
LIMIT = 0.15
SETTINGS = Settings(block_size=BLOCK_SIZE, preemption="recompute")


class WatchedScheduler(Scheduler):
    """Remembers the step that it has scheduled last."""

    last: Batch | None = None

    def schedule(self, **options: Any) -> Batch:
        self.last = super().schedule(**options)
        return self.last


@dataclass
class Measured:
    """A run on the engine: what its requests and steps took."""

    outcomes: list[Outcome]
    steps: list[tuple[Work, float]]
    seconds: float


def draw(num_requests: int, seed: int) -> list[Request]:
    """ShareGPT's lengths, scaled."""
    source = lengths("sharegpt", seed)
    made: list[Request] = []
    while len(made) < num_requests:
        prompt, output = (max(1, round(length / SCALE)) for length in next(source))
        if prompt + 2 <= CONTEXT:
            made.append(Request(0.0, prompt, max(2, min(output, CONTEXT - prompt))))
    return made


def serve(model: Any, requests: list[Request], system: System, seed: int = 0) -> Measured:
    """Serves requests at their arrivals, on the engine with a system's policy."""
    rng = random.Random(seed)
    by_id = {str(index): request for index, request in enumerate(requests)}
    with hf_paged.patched(
        model,
        block_size=BLOCK_SIZE,
        num_blocks=SLOTS // BLOCK_SIZE,
        max_num_seqs=SETTINGS.max_num_seqs,
        max_num_batched_tokens=SETTINGS.chunk,
        enable_prefix_caching=False,
        preemption="recompute",
    ):
        engine = model.paged

        def make_scheduler(manager: BlockManager) -> Scheduler:
            def find(seq_id: int) -> tuple[int, int]:
                group = next(g for g in scheduler.queues.groups if any(s.seq_id == seq_id for s in g.sequences))
                request = by_id[group.request_id or ""]
                return request.num_prompt, request.num_output

            policy = system.policy(manager, find, CONTEXT)
            limits = SETTINGS.chunk, SETTINGS.max_num_seqs
            scheduler = WatchedScheduler(manager, *limits, policy=policy)
            return scheduler

        engine.core.pool._make_scheduler = make_scheduler
        engine.pause()
        handles: list[Any] = []
        steps: list[tuple[Work, float]] = []
        vocabulary = model.config.vocab_size
        started, began = time.monotonic(), 0.0
        while len(handles) < len(requests) or not all(handle.is_done for handle in handles[-400:]):
            now = time.monotonic() - started
            while len(handles) < len(requests) and requests[len(handles)].arrival <= now:
                request = requests[len(handles)]
                handles.append(
                    engine.submit(
                        [rng.randrange(3, vocabulary) for _ in range(request.num_prompt)],
                        request_id=str(len(handles)),
                        max_new_tokens=request.num_output,
                        min_new_tokens=request.num_output,
                        do_sample=False,
                    )
                )
            began = time.perf_counter()
            if engine.step() is None:
                if len(handles) < len(requests):
                    time.sleep(max(0.0, requests[len(handles)].arrival - (time.monotonic() - started)))
                continue
            took = time.perf_counter() - began
            batch = engine.core.scheduler.last
            assert batch is not None
            steps.append((Work.of(batch, BLOCK_SIZE), took))
        outputs = [handle.result(timeout=60) for handle in handles]
        engine.resume()
    outcomes = []
    for request, output in zip(requests, outputs):
        times = output.metrics
        assert len(output.token_ids) == request.num_output
        first, end = (t - started for t in (times.first_token_time or times.finish_time, times.finish_time))
        outcomes.append(Outcome(request.arrival, first, end, request.num_output, request.num_prompt))
    return Measured(outcomes, steps, max(outcome.end for outcome in outcomes))


def error(found: float, truth: float) -> float:
    return round(found / truth - 1, 4)


def point(model: Any, system: System, share: float, rate: float, seconds: float, costs: Fitted) -> dict[str, Any]:
    """One of the twelve: measured and simulated."""
    requests = draw(max(20, round(rate * seconds)), seed=2)
    poisson(requests, rate, seed=2)
    measured = serve(model, requests, system)
    simulated = run(requests, system, Setup(costs, SLOTS, CONTEXT), SETTINGS).figures
    step_seconds = sum(took for _, took in measured.steps)
    predicted = [costs.seconds(work) for work, _ in measured.steps]
    throughput = len(requests) / measured.seconds
    latency = statistics.fmean(outcome.normalized for outcome in measured.outcomes)
    each = sorted(abs(p / took - 1) for p, (_, took) in zip(predicted, measured.steps))
    row = {
        "system": system.name,
        "share_of_saturation": share,
        "rate": rounded(rate),
        "requests": len(requests),
        "steps": len(measured.steps),
        "step_ms": rounded(1e3 * step_seconds / len(measured.steps)),
        "step_time_error": error(sum(predicted), step_seconds),
        "median_error_of_a_step": round(each[len(each) // 2], 4),
        "throughput": rounded(throughput),
        "throughput_error": error(simulated["requests_per_second"], throughput),
        "normalized_ms": rounded(1e3 * latency),
        "normalized_error": error(simulated["normalized_latency"], latency),
        "mean_rows": rounded(statistics.fmean(work.decodes for work, _ in measured.steps)),
    }
    row["valid"] = max(abs(row["step_time_error"]), abs(row["throughput_error"])) <= LIMIT
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals at each point")
    parser.add_argument("--burst", type=int, default=600, help="requests that the costs are fitted to")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "paper")
    args = parser.parse_args(argv)
    command.quiet()
    _, model = command.embedded_model()
    # Fitted to a burst at once and to the same requests at leisure: full batches and small ones.
    burst, slow = draw(args.burst, seed=1), draw(args.burst // 4, seed=3)
    serve(model, draw(30, seed=4), policies.PAGED)  # a first run makes what is only made once
    steps = serve(model, burst, policies.PAGED).steps
    rate = len(burst) / sum(took for _, took in steps)
    poisson(slow, 0.4 * rate, seed=3)
    steps += serve(model, slow, policies.PAGED).steps
    costs = Fitted.to(steps)
    print(f"costs in us: {costs.row()}", flush=True)
    saturated = [replace(request, arrival=0.0) for request in burst]
    rows: list[dict[str, Any]] = []
    for system in SYSTEMS:
        limit = run(saturated, system, Setup(costs, SLOTS, CONTEXT), SETTINGS).figures["requests_per_second"]
        for share in SHARES:
            rows.append(point(model, system, share, share * limit, args.seconds, costs))
            print(json.dumps(rows[-1]), flush=True)
    report = {
        "what": "the paper's systems on the real engine, and simulated with costs fitted on the same machine",
        "settings": {"scale": SCALE, "slots": SLOTS, "block_size": BLOCK_SIZE, "seconds": args.seconds},
        "limit": LIMIT,
        "machine": device_facts(model.device),
        "versions": versions(),
        "costs_us": costs.row(),
        "results": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "measured.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{sum(row['valid'] for row in rows)} of {len(rows)} points are within {LIMIT:.0%}")


if __name__ == "__main__":
    main()
