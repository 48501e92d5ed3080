"""The paper's evaluation: its allocators and policies keep what they promise, and its figures mean what they say."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # they import each other by name

from paper import __main__ as program
from paper import costs, measured, policies, simulator, sweeps
from paper.allocators import Buddy, FirstFit
from paper.fitted import Fitted
from paper.requests import requests as draw_requests
from simulation import Work
from workload import Request

SMALL = costs.Setup(costs.PAPER.costs, 1600, 256)
EVERYTHING = (*policies.SYSTEMS, policies.FIRST_FIT, policies.SHORTEST)
RESERVING = [system for system in EVERYTHING if not system.shares]


def some_requests(n: int = 30, seed: int = 0, rate: float = 60.0) -> list[Request]:
    rng = random.Random(seed)
    return [Request(i / rate, rng.randint(4, 120), rng.randint(1, 120)) for i in range(n)]


class Watched(simulator.PaperSimulation):
    """Looks at every table in every step."""

    def look(self, batch: Any) -> None:
        super().look(batch)
        if isinstance(self.policy, policies.Reserved):
            for sequence in self.running():
                table = self.manager.block_table(sequence.seq_id)
                assert table == list(self.policy.runs[sequence.seq_id][: len(table)])
        columns = self.samples.columns
        parts = [columns[name][-1] for name in ("stored", "future", "internal", "external")]
        assert min(parts) >= 0 and sum(parts) == self.capacity


def serve(system: policies.System, requests: list[Request], setup: costs.Setup = SMALL, **settings: Any) -> Watched:
    made = Watched(requests, system, setup, simulator.Settings(**settings | {"sample_every": 1, "check_every": 1}))
    made.serve()
    assert len(made.outcomes) == len(requests) and not made.num_failed
    assert not made.prompts and not made.ends and made.manager.pool.num_in_use == 0
    return made


@pytest.mark.parametrize("kind", [Buddy, FirstFit])
@pytest.mark.parametrize("num_blocks", [1, 13, 64, 981])
def test_runs_never_overlap_and_all_comes_back(kind: Any, num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    allocator = kind(num_blocks)
    whole = allocator.holes()
    runs: list[range] = []
    for _ in range(150):
        if runs and rng.random() < 0.45:
            allocator.free(runs.pop(rng.randrange(len(runs))))
        else:
            size = rng.randint(1, max(1, num_blocks // 5))
            rounded = 1 << (size - 1).bit_length() if kind is Buddy else size
            run = allocator.allocate(size)
            if run is None:
                assert all(len(hole) < rounded for hole in allocator.holes())
            else:
                assert len(run) == rounded and (kind is FirstFit or run.start % rounded == 0)
                runs.append(run)
        pieces = [*runs, *allocator.holes()]
        assert sorted(block for piece in pieces for block in piece) == list(range(num_blocks))
    for run in runs:
        allocator.free(run)
    assert allocator.holes() == whole


def test_first_fit_takes_the_lowest_hole() -> None:
    allocator = FirstFit(20)
    runs = [allocator.allocate(5) for _ in range(4)]
    for run in (runs[0], runs[2]):
        assert run is not None
        allocator.free(run)
    assert allocator.allocate(6) is None, "ten are free, but not side by side"
    assert allocator.allocate(2) == range(0, 2) and allocator.allocate(4) == range(10, 14)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("is_beams", [False, True])
@pytest.mark.parametrize("system", EVERYTHING, ids=lambda system: system.name)
def test_every_system_serves_all(system: policies.System, width: int, is_beams: bool) -> None:
    """Reserving ones hold what they reserved, where they reserved it, and never preempt."""
    made = serve(system, some_requests(), width=width, is_beams=is_beams)
    for outcome in made.outcomes:
        assert outcome.arrival < outcome.first <= outcome.end
    if not system.shares:
        assert made.scheduler.preemption.num_preemptions == 0
        assert max(made.samples.columns["saved"]) == 0
    elif width == 3:
        assert max(made.samples.columns["saved"]) > 0.2
    assert max(made.samples.columns["waiting"]) > 0, "memory binds"


def test_the_order_of_memory() -> None:
    """The less is reserved, the more run together."""
    requests = some_requests(120, rate=1000.0)
    systems = policies.PAGED, policies.FIRST_FIT, policies.POW2, policies.MAX
    batches = [simulator.run(requests, system, SMALL).figures["batch"] for system in systems]
    assert batches == sorted(batches, reverse=True) and batches[0] > 1.3 * batches[1] > 1.3 * batches[3]
    # 1600 slots in blocks of 16: pieces of 64, 32 and 4 blocks, and a run of the context takes 16.
    full = simulator.run(requests, policies.MAX, SMALL).figures["memory"]
    assert full["stored"] + full["future"] + full["internal"] == pytest.approx(6 * 256 / 1600, abs=0.01)


def test_a_static_batch_ends_together_and_is_padded() -> None:
    requests = [Request(0.0, 10, 3), Request(0.0, 50, 9), Request(0.001, 20, 2)]
    made = serve(policies.STATIC, requests)
    first = next(o for o in made.outcomes if o.num_output == 3)
    second, third = (next(o for o in made.outcomes if o.num_output == n) for n in (9, 2))
    assert first.end == second.end < third.first
    price = SMALL.costs.seconds
    prompts = price(Work(prompt=100, kv=100, pairs=2 * 50 * 51 // 2))
    decodes = sum(price(Work(decodes=2, kv=2 * (50 + i))) for i in range(1, 9))
    assert second.end == pytest.approx(prompts + decodes)


def test_one_request_by_hand() -> None:
    made = serve(policies.PAGED, [Request(2.0, 20, 3)])
    price = SMALL.costs.seconds
    prompt = price(Work(prompt=20, kv=20, pairs=210))
    [outcome] = made.outcomes
    assert outcome.first == pytest.approx(2 + prompt)
    assert outcome.end == pytest.approx(2 + prompt + price(Work(decodes=1, kv=21)) + price(Work(decodes=1, kv=22)))
    assert outcome.normalized == (outcome.end - 2) / 3


def test_the_roofline() -> None:
    """A decode step reads all weights; the paper's own figures of OPT-13B."""
    model, card = costs.OPT_13B, costs.A100
    assert 2 * model.weights == pytest.approx(26e9, rel=0.02) and model.kv_bytes == 800 * 1024
    reads = 2 * model.weights / (0.8 * card.bandwidth)
    empty = costs.Roofline(model, card, step=0.0, row=0.0)
    assert empty.seconds(Work(decodes=1)) == pytest.approx(reads)
    assert empty.seconds(Work(prompt=2000)) == pytest.approx(2 * model.weights * 2000 / (0.5 * card.flops))


def test_same_seed_same_figures() -> None:
    for system in (policies.PAGED, policies.ORACLE):
        one, other = (
            simulator.run(draw_requests("alpaca", 40.0, 1, seed=5), system, costs.PAPER, simulator.Settings(width=2))
            for _ in range(2)
        )
        assert one == other
    assert draw_requests("alpaca", 60.0, 3, seed=6) != draw_requests("alpaca", 60.0, 3, seed=5)


def test_a_common_prefix_is_computed_once() -> None:
    requests = [Request(0.1 * i, 80 + 20, 4) for i in range(10)]
    made = serve(policies.PAGED, requests, prefix=80, caches_prefixes=True)
    assert made.manager.prefix.hit_tokens == 9 * 80
    assert serve(policies.ORACLE, requests, prefix=80, caches_prefixes=True).manager.prefix.hit_tokens == 0


@pytest.mark.parametrize("name", ["sharegpt", "alpaca", "chat", "translation"])
def test_workloads_fit_the_context(name: str) -> None:
    made = draw_requests(name, 50.0, 10, prefix=80)
    assert len(made) == 500 and all(request.num_total <= 2048 and request.num_prompt > 80 for request in made)
    assert made[-1].arrival == pytest.approx(10, rel=0.2)
    lengths = [(r.num_prompt, r.num_output) for r in draw_requests(name, 5.0, 10, prefix=80)]
    assert lengths == [(r.num_prompt, r.num_output) for r in made[:50]]


def test_a_sustained_rate_lies_between_two_points() -> None:
    points = [{"rate": rate, "normalized_latency": latency} for rate, latency in ((1, 0.01), (2, 0.1), (3, 1.0))]
    assert sweeps.sustained(points, 0.1) == 2 and sweeps.sustained(points, 10**-0.5) == 2.5
    assert sweeps.sustained(points, 0.001) is None and sweeps.sustained(points, 2.0) is None
    half = [point | {"rate": point["rate"] / 2} for point in points]
    table = sweeps.ratios({"ours": points, "other": half}, "ours")
    assert table["0.1"] == table["0.2"] == {"other": 2.0} and table["1.0"] == {"other": None}


@pytest.mark.parametrize("name", ["figure_12", "figure_19"])
def test_a_figure_is_made_drawn_and_resumed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    curves = sweeps.Curve(policies.PAGED, 40.0), sweeps.Curve(policies.STATIC, 10.0, label="in batches", color="red")
    few = sweeps.Sweep("few", "alpaca", curves, 400, 6.0, setup=SMALL)
    monkeypatch.setitem(sweeps.SWEEPS, "figure_12", (few,))
    quick = [name, "--times", "0.005", "--out", str(tmp_path)]
    program.main(quick)
    assert (name == "figure_12") == (tmp_path / "figure_13.png").exists()
    written = (tmp_path / f"{name}.json").read_text()
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert str(tmp_path) not in written and name in capsys.readouterr().out
    program.main([*quick, "--resume"])
    assert name not in capsys.readouterr().out, "nothing was left to do"
    program.main(quick)
    assert (tmp_path / f"{name}.json").read_text() == written, "the same to the digit"
    with pytest.raises(SystemExit):
        program.main(["figure_99"])


def test_costs_are_fitted() -> None:
    rng = random.Random(0)
    truth = Fitted(4e-3, 1e-4, 2e-4, 3e-7, 0.0)
    works = [
        Work(decodes=rng.randint(0, 40), prompt=rng.randint(0, 90), kv=rng.randint(0, 5000), pairs=rng.randint(0, 99))
        for _ in range(60)
    ]
    found = Fitted.to([(work, truth.seconds(work)) for work in works])
    assert found.row() == pytest.approx(truth.row(), abs=1e-3)
    noisy = Fitted.to([(work, 1e-3 * rng.uniform(0.5, 2)) for work in works])
    assert min(noisy.row().values()) >= 0


@pytest.mark.parametrize("system", [policies.PAGED, policies.MAX, policies.POW2], ids=lambda system: system.name)
def test_a_system_serves_on_the_real_engine(system: policies.System) -> None:
    """The engine's scheduler takes the policy: as many rows run together as the simulator says."""
    _, model = measured.command.embedded_model()
    requests = [Request(0.0, 30, 10 + i % 3) for i in range(24)]
    found = measured.serve(model, requests, system)
    assert [o.num_output for o in found.outcomes] == [r.num_output for r in requests]
    assert all(0 < o.first <= o.end <= found.seconds for o in found.outcomes)
    rows = max(work.decodes for work, _ in found.steps)
    slots = measured.SLOTS // measured.BLOCK_SIZE * measured.BLOCK_SIZE
    assert rows == (7 if system is policies.MAX else 24) and slots >= 24 * 43
    assert sum(work.prompt for work, _ in found.steps) == 24 * 30
