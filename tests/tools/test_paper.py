"""The paper's evaluation: its allocators and policies keep what they promise, and its figures mean what they say."""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # they import each other by name

from paper import __main__ as program
from paper import costs, measured, policies, serving, simulator, swapping, sweeps, switches
from paper.allocators import Buddy, FirstFit
from paper.fitted import Fitted
from paper.requests import requests as draw_requests
from simulation import Work
from workload import Request

from hf_paged.core.sequence import SequenceGroup

SMALL = costs.Setup(costs.PAPER.costs, 1600, 256)
EVERYTHING = (*policies.SYSTEMS, policies.FIRST_FIT, policies.SHORTEST, *policies.CAPPED)
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
    elif width == 3 and system.most_branches != 1:
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
    few = sweeps.Sweep("few", "alpaca", curves, 400, 3.0, setup=SMALL)
    monkeypatch.setattr(sweeps, "CEILING", 0.1)
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
    held_up = [(work, truth.seconds(work) * (4 if n % 10 == 0 else 1)) for n, work in enumerate(works * 10)]
    found = Fitted.to(held_up)
    sums = sum(found.seconds(work) for work, _ in held_up), sum(took for _, took in held_up)
    assert sums[0] == pytest.approx(sums[1], rel=0.05), "not below, for all that few steps are far above the others"


@pytest.mark.parametrize(
    "system", [policies.PAGED, policies.MAX, policies.POW2, policies.STATIC], ids=lambda system: system.name
)
def test_a_system_serves_on_the_real_engine(system: policies.System) -> None:
    """The engine's scheduler takes the policy: as many rows run together as the simulator says."""
    _, model = measured.command.embedded_model()
    requests = [Request(0.0, 30 + i % 2, 10 + i % 3) for i in range(24)]
    found = serving.serve(model, requests, system)
    assert sorted(o.num_output for o in found.outcomes) == sorted(r.num_output for r in requests)
    assert all(0 < o.first <= o.end <= found.seconds for o in found.outcomes)
    rows = max(work.decodes for work, _ in found.steps)
    slots = serving.SLOTS // serving.BLOCK_SIZE * serving.BLOCK_SIZE
    assert rows == (7 if system in (policies.MAX, policies.STATIC) else 24) and slots >= 24 * 43
    prompts = sum(work.prompt for work, _ in found.steps)
    if system.is_static:  # padded, each batch as long as its longest, and it ends together
        assert prompts == 24 * 31 and len({o.end for o in found.outcomes}) == 4 and not found.gaps
        assert sum(work.decodes for work, _ in found.steps) == 24 * 11
    else:
        assert prompts == sum(r.num_prompt for r in requests)
        assert len(found.gaps) == sum(r.num_output - 1 for r in requests)


class Kept:
    """Tables of sequences that share nothing lie in their runs, in every step, and outputs are there to be compared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handles: dict[int, Any] = {}
        self.most_rows = self.num_copies = 0
        schedule, submit = serving.ScheduledApart.schedule, serving._Run.submit

        def checked(scheduler: Any, **options: Any) -> Any:
            batch = schedule(scheduler, **options)
            manager, runs = scheduler._manager, scheduler.queues.policy.runs
            for seq_id in batch.seq_ids:
                table = manager.block_table(seq_id)
                assert table == list(runs[seq_id][: len(table)])
            assert all(manager.pool.ref_count(block) == 1 for block in batch.tables[0].blocks)
            manager.check_invariants()
            self.most_rows = max(self.most_rows, batch.num_seqs)
            self.num_copies += len(batch.block_copies)
            return batch

        def kept(run: Any, index: int, *given: Any) -> None:
            submit(run, index, *given)
            self.handles[index] = run.handles[index]

        monkeypatch.setattr(serving.ScheduledApart, "schedule", checked)
        monkeypatch.setattr(serving._Run, "submit", kept)


@pytest.mark.parametrize("is_beams", [False, True], ids=["samples", "beams"])
def test_samples_and_beams_that_share_nothing_are_stock_s(is_beams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real engine: a run for each from the start, copies where they fork, and the same tokens."""
    tokenizer, model = measured.command.embedded_model()
    requests = [Request(0.0, 9 + 7 * i, 12 + i) for i in range(6)]
    settings = replace(serving.SETTINGS, width=3, is_beams=is_beams)
    given = serving.texts(requests, tokenizer)
    watch = Kept(monkeypatch)
    apart = serving.serve(model, requests, policies.ORACLE, settings, given)
    outputs = {index: handle.result() for index, handle in watch.handles.items()}
    assert len(apart.outcomes) == 6 and watch.most_rows == 18 and not apart.preempted
    assert apart.held == apart.distinct and watch.num_copies > sum(2 * (r.num_prompt // 4) for r in requests)
    shared = serving.serve(model, requests, policies.PAGED, settings, given)
    assert 1 - shared.distinct / shared.held > (0.4 if is_beams else 0.25)
    for index, (prompt, request) in enumerate(zip(given, requests)):
        options = serving.decoding(settings, index)
        torch.manual_seed(options.pop("seed", 0))
        length = request.num_output
        ids = torch.tensor([prompt])
        stock = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length, **options
        )
        new = stock[:, len(prompt) :].tolist()
        assert outputs[index].sequences == new == watch.handles[index].result().sequences


def test_preempted_sequences_are_swapped_on_the_real_engine() -> None:
    _, model = measured.command.embedded_model()
    requests = [Request(0.0, 60, 60) for _ in range(24)]
    for way in ("recompute", "swap", "auto"):
        settings = replace(serving.SETTINGS, block_size=16, preemption=way)
        found = serving.serve(model, requests, policies.PAGED, settings)
        assert len(found.outcomes) == 24 and found.preempted > 0
        if way != "auto":
            assert found.swapped == (found.preempted if way == "swap" else 0)
        assert (sum(work.swapped for work, _ in found.steps) > 0) == (found.swapped > 0)


def test_a_fitted_model_swaps_what_is_cheaper_to_swap() -> None:
    fitted = Fitted(1e-3, 1e-4, 1e-4, 0.0, 0.0)
    group = SequenceGroup(1)
    assert [replace(fitted, swap=x).prefers_swap(group) for x in (0.0, 1e-5, 6e-5)] == [False, True, False]
    assert replace(fitted, swap=1e-5).seconds(Work(swapped=3)) == pytest.approx(1e-3 + 3e-5)
    row = {"swap_ms": 1e3 * (fitted.seconds(Work(decodes=1)) + 2 * 256 * 1e-5)}
    assert swapping.seconds_per_token(row, fitted) == pytest.approx(1e-5)


def test_a_static_batch_fits_the_context() -> None:
    requests = [Request(0.0, 100, 100), Request(0.0, 20, 156), Request(0.0, 101, 2)]
    waiting = deque(range(3))
    assert serving.static_batch(requests, waiting) == ([0, 1], 100, 156)
    assert serving.static_batch(requests, waiting) == ([2], 101, 2) and not waiting
    many = [Request(0.0, 1, 1)] * 20
    assert len(serving.static_batch(many, deque(range(20)))[0]) == serving.ROWS == 7


@pytest.mark.timeout(300)
def test_points_are_files_and_what_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One point each of the twelve and of the rest; a second run measures nothing, another setting everything."""
    monkeypatch.setattr(measured, "POINTS", measured.POINTS[:1])
    more = "beams_4-hf_paged", "beams_4-oracle", "prefix_cache-on", "swap-blocks_of_16"
    monkeypatch.setattr(measured, "MORE", [point for point in measured.MORE if point.name in more])
    monkeypatch.setattr(measured, "SWAP_SIZES", (4, 16))
    monkeypatch.setattr(measured, "PEERS", ("generate", "vllm"))
    monkeypatch.setattr(measured, "SHARES", (0.5,))
    fitted = asdict(Fitted(2e-3, 1e-4, 1e-4, 0.0, 0.0))
    monkeypatch.setattr(measured.Bench, "fit", lambda bench: fitted)
    quick = ["--seconds", "0.05", "--burst", "20", "--out", str(tmp_path)]
    measured.main(quick)
    measured.main(["more", *quick])
    files = sorted((tmp_path / "measured").iterdir())
    ratio = "beams_4-hf_paged-over-beams_4-oracle"
    assert {path.stem for path in files} == {*more, ratio, "bring_back", "costs", "generate-0.5", "hf_paged-0.5"}
    times = [path.stat().st_mtime_ns for path in files]
    measured.main(["--resume", *quick])
    measured.main(["more", "--resume", *quick])
    assert [path.stat().st_mtime_ns for path in files] == times
    report = json.loads((tmp_path / "measured.json").read_text())
    point = report["results"]["hf_paged-0.5"]
    assert point["requests"] == 20 and report["summary"]["points"] == 1
    errors = point["step_time_errors"]
    assert len(errors) == 3 and point["step_time_error"] == sorted(errors)[1]
    assert point["is_within"] == report["summary"]["is_valid"]
    assert report["results"]["generate-0.5"]["measured"]["inter_token"] is None
    section = measured.page.measured_section(report)
    assert "of 1 points are within 15%" in section and section.count("\n| ") == 15
    [found] = report["times_the_throughput"]
    assert found["what"] == "4 beams, Orca (Oracle)" and found["saved"]["measured"] > 0
    assert len(found["rounds"]) == 3 and 0 < found["measured"] == sorted(found["rounds"])[1]
    assert f"{found['measured']:.3g} ({min(found['rounds']):.3g} to " in section
    swapped = report["bring_back"]["16"]
    assert swapped["bytes"] == 256 * 2 * 6 * 2 * 32 * 4 and min(swapped.values()) > 0
    assert set(report["results"]["swap-blocks_of_16"]["simulated"]) >= {"swapped", "preempted", "saved"}
    measured.main(["--resume", "--seconds", "0.06", *quick[2:]])
    assert [path.stat().st_mtime_ns for path in files] != times


def test_every_comparison_is_between_two_points_and_in_a_figure() -> None:
    names = {point.name: point for point in (*measured.POINTS, *measured.MORE)}
    assert len(names) == len(measured.POINTS) + len(measured.MORE)
    for one in measured.COMPARISONS:
        ours, other = names[one.ours], names[one.other]
        assert (ours.system, ours.share, other.share) == (policies.PAGED, None, None) and ours.lasts == other.lasts
        assert (ours.settings, ours.workload) == (other.settings, other.workload)
        panel = json.loads((program.FOLDER / f"{one.figure}.json").read_text())["results"][one.panel]
        assert panel["times_the_rate"][measured.LATENCY][other.system.name] > 1


def test_a_summary_says_how_far_off_the_simulator_is(tmp_path: Path) -> None:
    def row(system: policies.System, share: float | None, step: float, served: float) -> dict[str, Any]:
        errors = {"step_time_error": step, "throughput_error": -0.1, "latency_error": 0.5}
        found: dict[str, Any] = {name: {"requests_per_second": served} for name in ("measured", "simulated")}
        found |= {"speed": 2.0 if system is policies.MAX else 1.0}
        return {"system": system.name, "share": share, "is_within": abs(step) < 0.15} | errors | found

    rows = {
        "hf_paged-0.5": row(policies.PAGED, 0.5, 0.1, 5.0),
        "oracle-0.75": row(policies.ORACLE, 0.75, -0.2, 3.0),
        "hf_paged-burst": row(policies.PAGED, None, 0.9, 8.0),
        "max-burst": row(policies.MAX, None, 0.0, 2.0),
    }
    found = measured.summary(rows)
    assert (found["points"], found["within"], found["is_valid"]) == (2, 1, False), "of those below saturation"
    assert found["worst"] == {"step_time_error": 0.2, "throughput_error": 0.1, "latency_error": 0.5}
    ratios = {"hf_paged-burst-over-max-burst": {"rounds": [3.0, 5.0, 6.0], "times": 5.0}}
    [ratio] = measured.comparisons(rows, ratios, tmp_path)
    assert (ratio["what"], ratio["bar"], ratio["measured"], ratio["simulated"]) == ("Orca (Max)", 2.7, 5.0, 8.0)
    assert measured.summary({"oracle-0.5": row(policies.ORACLE, 0.5, 0.1, 1.0)})["is_valid"]


def test_a_section_of_the_page_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("a\n<!-- x: written by a program -->\nold\n<!-- end of x -->\nb\n")
    for text in ("new \\1", "newer"):
        measured.page.put("x", text, path)
        assert path.read_text() == f"a\n<!-- x: written by a program -->\n\n{text}\n\n<!-- end of x -->\nb\n"
    with pytest.raises(ValueError, match="no section 'y'"):
        measured.page.put("y", "", path)
    assert measured.page.README.read_text().count("<!-- measured: written by a program -->") == 1


def test_urgent_requests_go_first() -> None:
    """Beyond saturation the marked ones wait, unless they go first; all are served either way."""
    drawn = some_requests(120, rate=1000.0)
    found = {
        favoured: simulator.run(
            drawn, policies.PAGED, SMALL, simulator.Settings(marked_every=5, favours_marked=favoured)
        ).figures
        for favoured in (False, True)
    }
    waits = {favoured: figures["marked"]["ttft"]["p50"] for favoured, figures in found.items()}
    assert waits[True] < 0.5 * waits[False] and waits[True] < 0.5 * found[True]["others"]["ttft"]["p50"]
    assert found[True]["served"] == found[False]["served"] == 120


@pytest.mark.parametrize("system", policies.CAPPED, ids=lambda system: system.name)
def test_a_cap_on_branches(system: policies.System) -> None:
    """Never more branches of a request at once, and in the end all of them."""
    seen: set[int] = set()

    class Branches(Watched):
        def look(self, batch: Any) -> None:
            super().look(batch)
            seen.update(len(group.sequences) for group in self.scheduler.queues.groups)

    drawn = some_requests(20)
    settings = simulator.Settings(width=6, marked_every=2, sample_every=1, check_every=1)
    made = Branches(drawn, system, SMALL, settings)
    made.serve()
    outputs = sum(r.num_output * (6 if i % 2 == 0 else 1) for i, r in enumerate(drawn))
    assert max(seen) == system.most_branches and made.num_outputs == outputs
    assert sorted(o.arrival for o in made.outcomes) == [r.arrival for r in drawn]
    assert [o.is_marked for o in sorted(made.outcomes, key=lambda o: o.arrival)] == [i % 2 == 0 for i in range(20)]


def test_seconds_from_token_to_token() -> None:
    made = serve(policies.PAGED, [Request(0.0, 20, 3)])
    price = SMALL.costs.seconds
    steps = [price(Work(decodes=1, kv=21)), price(Work(decodes=1, kv=22))]
    assert list(made.gaps) == pytest.approx(steps)
    assert simulator.run([Request(0.0, 20, 3)], policies.STATIC, SMALL).figures["inter_token"] is None


@pytest.mark.parametrize(
    ("panel", "curve"), [("Alpaca lengths", "Orca (Max)"), ("Alpaca lengths", "FasterTransformer")]
)
def test_the_saved_figure_12_comes_out_again(panel: str, curve: str) -> None:
    """To the digit: the first point of a line."""
    saved = json.loads((program.FOLDER / "figure_12.json").read_text())
    point = saved["results"][panel]["curves"][curve][0]
    sweep = next(one for one in sweeps.SWEEPS["figure_12"] if one.title == panel)
    line = next(one for one in sweep.curves if one.name == curve)
    name, again = next(replace(sweep, curves=(line,)).run(saved["settings"]["times"], None, saved["settings"]["seed"]))
    assert name == curve
    same = ("rate", "served", "normalized_latency", "seconds", "steps", "batch", "memory")
    assert {key: again[key] for key in same} == {key: point[key] for key in same}


def test_switches_say_what_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every panel has one way with and one without, and its number is there."""
    few = tuple(replace(panel, rates=panel.rates[:1], seconds=8) for panel in switches.PANELS)
    monkeypatch.setattr(switches, "PANELS", few)
    found = switches.more_switches(1.0, None, 0)
    assert len(found) == 4
    for panel in found.values():
        assert len(panel["curves"]) >= 2
        for points in panel["curves"].values():
            assert all(point["value"] > 0 and point["normalized_latency"] > 0 for point in points)
