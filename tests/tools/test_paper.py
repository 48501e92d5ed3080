"""The paper's evaluation: its allocators and policies keep what they promise, and its figures come out again."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # they import each other by name

from paper import __main__ as program
from paper import costs, figures, measured, policies, simulator
from paper.costs import Work
from paper.policies import Buddy, FirstFit
from workload import Request

from helpers.models import tiny_lm

SMALL = costs.Setup(costs.PAPER.costs, 1600, 256)
OTHERS = (policies.FIRST_FIT, policies.HF, policies.LIMITED, policies.SHORTEST)
EVERYTHING = (*policies.SYSTEMS, *OTHERS, *policies.CAPPED)


class Watched(simulator.Simulation):
    """Looks at every table in every step."""

    def look(self) -> None:
        super().look()
        if isinstance(self.policy, policies.Reserved):
            for sequence in self.running():
                table = self.manager.block_table(sequence.seq_id)
                assert table == list(self.policy.runs[sequence.seq_id][: len(table)])
        parts = [self.columns[name][-1] for name in ("stored", "future", "internal", "external")]
        assert min(parts) >= 0 and sum(parts) == self.capacity


def serve(system: policies.System, requests: list[Request], **settings: Any) -> Watched:
    made = Watched(requests, system, SMALL, simulator.Settings(**settings | {"sample_every": 1, "check_every": 1}))
    made.serve()
    assert len(made.outcomes) == len(requests) and not made.num_failed
    assert not made.prompts and not made.ends and made.manager.pool.num_in_use == 0
    return made


@pytest.mark.parametrize("kind", [Buddy, FirstFit])
def test_runs_never_overlap_and_all_comes_back(kind: Any) -> None:
    num_blocks = 981
    rng = random.Random(num_blocks)
    allocator = kind(num_blocks)
    whole = allocator.holes()
    runs: list[range] = []
    for _ in range(150):
        if runs and rng.random() < 0.45:
            allocator.free(runs.pop(rng.randrange(len(runs))))
        else:
            size = rng.randint(1, num_blocks // 5)
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


@pytest.mark.parametrize(("width", "is_beams"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("system", EVERYTHING, ids=lambda system: system.name)
def test_every_system_serves_all(system: policies.System, width: int, is_beams: bool) -> None:
    """Reserving ones hold what they reserved, where they reserved it, and never preempt."""
    rng = random.Random(0)
    requests = [Request(i / 60, rng.randint(4, 120), rng.randint(1, 120)) for i in range(30)]
    made = serve(system, requests, width=width, is_beams=is_beams)
    assert all(outcome.arrival < outcome.first <= outcome.end for outcome in made.outcomes)
    if not system.shares:
        assert made.scheduler.preemption.num_preemptions == 0
        assert max(made.columns["saved"]) == 0
    elif width == 3 and system.most_branches != 1:
        assert max(made.columns["saved"]) > 0.2
    assert made.num_outputs == width * sum(request.num_output for request in requests) or is_beams
    assert max(made.columns["waiting"]) > 0, "memory binds"


def test_one_request_by_hand() -> None:
    made = serve(policies.PAGED, [Request(2.0, 20, 3)])
    price = SMALL.costs.seconds
    prompt = price(Work(prompt=20, kv=20, pairs=210))
    steps = [price(Work(decodes=1, kv=21)), price(Work(decodes=1, kv=22))]
    [outcome] = made.outcomes
    assert outcome.first == pytest.approx(2 + prompt) and outcome.end == pytest.approx(2 + prompt + sum(steps))
    assert outcome.normalized == (outcome.end - 2) / 3 and list(made.gaps) == pytest.approx(steps)


def test_policies_on_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reserved and not yet used keeps others out; nothing that has a reservation is preempted."""
    monkeypatch.setattr(measured, "llama_125m", lambda dtype: tiny_lm())
    monkeypatch.setattr(measured, "SLOTS", 2 * measured.CONTEXT)
    measured.main(["--requests", "12", "--rounds", "1", "--out", str(tmp_path)])
    saved = json.loads((tmp_path / "measured_125m.json").read_text())["results"]
    paged, oracle, whole = (saved["rounds"][0][system.name] for system in measured.SYSTEMS)
    assert paged["tokens_per_step"] > oracle["tokens_per_step"] > whole["tokens_per_step"]
    assert 1 < whole["tokens_per_step"] <= 2, "a pool of two contexts has room for two"
    assert oracle["preempted"] == whole["preempted"] == 0
    assert saved["times_the_throughput"].keys() == {"Orca (Oracle)", "Orca (Max)"}


@pytest.mark.parametrize("name", ["figure_12", "figure_19"])
def test_a_figure_is_made_drawn_and_resumed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    curves = figures.Curve(policies.PAGED, 40.0), figures.Curve(policies.STATIC, 10.0, label="batches", color="red")
    few = figures.Sweep("few", "alpaca", curves, 400, 3.0, setup=SMALL)
    monkeypatch.setattr(figures, "CEILING", 0.1)
    monkeypatch.setitem(figures.SWEEPS, "figure_12", (few,))
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


@pytest.mark.parametrize("curve", ["Orca (Max)", "FasterTransformer"])
def test_the_saved_figure_12_comes_out_again(curve: str) -> None:
    """To the digit: the first point of a line."""
    saved = json.loads((program.FOLDER / "figure_12.json").read_text())
    point = saved["results"]["Alpaca lengths"]["curves"][curve][0]
    sweep = next(one for one in figures.SWEEPS["figure_12"] if one.title == "Alpaca lengths")
    line = next(one for one in sweep.curves if one.name == curve)
    again = sweep.point(line, line.start, saved["settings"]["times"], saved["settings"]["seed"])
    same = ("rate", "served", "normalized_latency", "seconds", "steps", "batch", "memory")
    assert {key: again[key] for key in same} == {key: point[key] for key in same}


def test_switches_say_what_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every panel has one way with and one without, and its number is there."""
    few = tuple(replace(panel, rates=panel.rates[:1], seconds=8) for panel in figures.SWITCHES)
    monkeypatch.setattr(figures, "SWITCHES", few)
    found = figures.more_switches(1.0, 0)
    assert len(found) == 4
    for panel in found.values():
        assert len(panel["curves"]) >= 2
        for points in panel["curves"].values():
            assert all(point["value"] > 0 and point["normalized_latency"] > 0 for point in points)


def test_the_memory_of_a_13b_model() -> None:
    """The table of docs/paper.md, by the config that the simulation has."""
    page = (Path(__file__).parents[2] / "docs" / "paper.md").read_text()
    model, slots, card = costs.OPT_13B, costs.PAPER.num_slots, 40e9
    token, request, cache = model.kv_bytes, model.kv_bytes * costs.PAPER.context, model.kv_bytes * slots
    rows = {
        f"{2 * 13} GB, {2 * 13e9 / card:.0%}", f"{token:,} bytes, {token // 1024} KB", f"{request / 2**30:.1f} GB",
        f"{slots:,} tokens", f"{cache / 2**30:.0f} GB, {cache / 2**30 * 1e9 / card:.0%}", "5 %",
    }  # fmt: skip
    assert all(row.replace("%", " %").replace("  ", " ") in page for row in rows)
    assert cache // request == 7 and slots // (32 * 16) == 30
