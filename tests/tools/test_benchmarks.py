"""The benchmarks of the bookkeeping on tiny inputs: that they run, and that their numbers mean what they say."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.benchmark_files import FOLDER, load

common, replay, scheduler = load("common"), load("replay"), load("scheduler")
Request = replay.Request


def serve(requests: list[Any], **settings: Any) -> dict[str, Any]:
    """A replay that looks and checks in every step. Whatever happened, nothing is left in the pools."""
    settings = {"num_blocks": 4096, "sample_every": 1, "check_every": 1} | settings
    run = replay.Replay(requests, **settings)
    results: dict[str, Any] = run.run(progress=False)
    assert results["pool"]["blocks_in_use_at_end"] == results["pool"]["swapped_blocks_at_end"] == 0
    assert run.manager.sequences() == [] and list(run.scheduler.queues.groups) == [] and not run.jobs and not run.ends
    assert not run.scheduler.queues.has_work
    return results


def some_requests(n: int, seed: int = 0, prompt: int = 60, output: int = 40) -> list[Any]:
    rng = random.Random(seed)
    return [Request(0.01 * i, rng.randint(1, prompt), rng.randint(1, output)) for i in range(n)]


@pytest.fixture
def traces(tmp_path: Path) -> dict[str, Path]:
    """Three requests in each format."""
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,40,3\r\n"
    azure += "2023-11-16 18:15:47.1805900,50,1\r\n2023-11-16 18:15:48.6805900,60,20\r\n"
    lengths = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n40,3,43,13\n50,1,51,50\n60,20,80,3\n"
    mooncake = [
        {"timestamp": 500, "input_length": 1025, "output_length": 4, "hash_ids": [7, 8, 9]},
        {"timestamp": 1000, "input_length": 1300, "output_length": 3, "hash_ids": [7, 8, 10]},
        {"timestamp": 3500, "input_length": 600, "output_length": 2, "hash_ids": [7, 11]},
    ]
    texts = {"azure.csv": azure, "lengths.csv": lengths, "mooncake.jsonl": "\n".join(map(json.dumps, mooncake))}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    return {name.split(".")[0]: tmp_path / name for name in texts}


class TestTraces:
    def test_formats(self, traces: dict[str, Path]) -> None:
        lengths = [(40, 3), (50, 1), (60, 20)]
        requests, has_arrivals = replay.load_trace(traces["azure"])
        assert has_arrivals and [(r.num_prompt, r.num_output) for r in requests] == lengths
        assert [r.arrival for r in requests] == pytest.approx([0, 0.5, 2.0])
        requests, has_arrivals = replay.load_trace(traces["lengths"])
        assert not has_arrivals and [(r.num_prompt, r.num_output) for r in requests] == lengths
        requests, has_arrivals = replay.load_trace(traces["mooncake"], num_requests=2)
        assert has_arrivals and [r.hash_ids for r in requests] == [[7, 8, 9], [7, 8, 10]]
        assert [r.arrival for r in requests] == [0, 0.5]

    def test_unknown_columns_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "x.csv").write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match="'a', 'b'"):
            replay.load_trace(tmp_path / "x.csv")

    def test_infinite_cache(self, traces: dict[str, Path]) -> None:
        requests, _ = replay.load_trace(traces["mooncake"])
        by_blocks, by_tokens = replay.infinite_cache(requests, 16)
        assert by_blocks == 3 / 8  # 7 and 8, then 7
        assert by_tokens == pytest.approx((1024 + 512) / (1025 + 1300 + 600))
        # The last token is always computed: of a prompt served before, its last block is not found.
        assert replay.infinite_cache([Request(0, 1024, 1, [1, 2])] * 2, 16)[1] == pytest.approx(1008 / 2048)

    def test_length_tables(self) -> None:
        tables = json.loads(replay.QUANTILES.read_text())
        p = tables["probabilities"]
        assert p[0] == 0 and p[-1] == 1 and p == sorted(set(p))
        for name, table in tables["tables"].items():
            assert {"repository", "commit", "path", "licence", "rows"} <= table.keys()
            for side in ("input", "output"):
                assert len(table[side]) == len(p) and table[side] == sorted(table[side])
            requests = replay.draw_requests(name, 4000, seed=0)
            assert sum(r.num_prompt for r in requests) / 4000 == pytest.approx(table["mean_input"], rel=0.06)
            assert sum(r.num_output for r in requests) / 4000 == pytest.approx(table["mean_output"], rel=0.06)
            assert all(table["input"][0] <= r.num_prompt <= table["input"][-1] for r in requests)


class TestReplay:
    def test_one_request_by_hand(self) -> None:
        costs = replay.CostModel(1.0, 0.1, 0.01, 0, 0, 0, 0)
        results = serve([Request(2.0, 20, 3)], costs=costs)
        # Prefill 20 tokens, decode two: 20, 21 and 22 slots of 32. The last token is never written.
        assert results["bookkeeping"]["steps"] == 3
        assert results["kv_waste"]["max"] == pytest.approx(12 / 32)
        assert results["kv_waste"]["mean"] == pytest.approx((3 * 12 + 1.01 * 11 + 1.01 * 10) / 32 / 5.02, abs=1e-5)
        speed = results["modelled_speed"]
        assert speed["time_to_first_token"]["p50"] == pytest.approx(3.0)
        assert speed["time_per_output_token"]["p50"] == pytest.approx(1.01)
        assert speed["seconds"] == pytest.approx(2 + 3 + 2 * 1.01, abs=0.05)
        contiguous = results["contiguous"]
        assert [contiguous[name]["peak_tokens"] for name in ("oracle", "pow2", "max")] == [23, 24, 23]

    def test_one_token_outputs_need_no_decode(self) -> None:
        results = serve([Request(0, 5, 1)])
        assert results["bookkeeping"]["steps"] == 1 and results["kv_waste"]["max"] == pytest.approx(11 / 16)

    def test_prefix_hits_are_those_of_an_infinite_cache(self) -> None:
        rng = random.Random(0)
        chains = [[100 * tree + i for i in range(6)] for tree in range(4)]
        requests = []
        for i in range(60):
            tree, depth = rng.randrange(4), rng.randint(0, 5)
            own = [10_000 + 10 * i + j for j in range(rng.randint(1, 2))]
            hash_ids = chains[tree][:depth] + own
            length = 512 * (len(hash_ids) - 1) + rng.randint(1, 512)
            requests.append(Request(0.05 * i, length, rng.randint(1, 5), hash_ids))
        cache = serve(requests, check_every=50)["prefix_cache"]
        assert cache["hit_rate"] == cache["infinite_cache_hit_rate"] > 0.3
        small = serve(requests, num_blocks=220, check_every=50)["prefix_cache"]
        assert small["hit_rate"] < cache["hit_rate"]

    def test_nothing_is_shared_by_accident(self) -> None:
        results = serve([Request(0, 64, 20) for _ in range(20)])
        assert results["prefix_cache"]["hit_rate"] == 0 == results["sharing"]["max_share_saved"]

    @pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
    @pytest.mark.parametrize("num_samples", [1, 3])
    def test_pressure(self, preemption: str, num_samples: int) -> None:
        requests = some_requests(60)
        results = serve(requests, num_blocks=24, block_size=4, num_samples=num_samples, preemption=preemption)
        assert results["requests"]["served"] == 60 and results["requests"]["failed"] == 0
        assert results["preemptions"]["swap" if preemption == "auto" else preemption] > 0
        if preemption == "recompute":
            assert results["preemptions"]["swap"] == 0
        assert results["pool"]["peak_use"] > 0.9
        assert 0 <= results["kv_waste"]["mean"] <= results["kv_waste"]["max"] < 1
        assert sum(results["series"]["waiting"]) > 0

    def test_samples_share_their_prompt(self) -> None:
        # Four samples of 10 blocks of prompt, and a block of output each: 14 blocks instead of 44.
        results = serve([Request(0, 160, 10)], num_samples=4)
        assert results["sharing"]["max_share_saved"] == pytest.approx(30 / 44, abs=1e-4)
        assert results["contiguous"]["oracle"]["peak_tokens"] == 4 * 170
        assert serve([Request(0, 170, 5)], num_samples=4)["pool"]["copy_on_write"] == 3

    def test_what_can_never_fit_is_refused(self) -> None:
        results = serve([Request(0, 100, 30), Request(0, 10, 5)], num_blocks=8)
        assert (results["requests"]["served"], results["requests"]["refused"]) == (1, 1)

    def test_same_seed_same_result(self) -> None:
        requests = replay.draw_requests("azure", 40, seed=3)
        replay.poisson(requests, 20.0, seed=3)
        one, other = (serve(requests, seed=3, check_every=0) for _ in range(2))
        assert {k: v for k, v in one.items() if k != "bookkeeping"} == {
            k: v for k, v in other.items() if k != "bookkeeping"
        }
        assert one["kv_waste"]["mean"] < 0.04 < one["contiguous"]["max"]["mean_waste"]

    @pytest.mark.parametrize("name", ["azure", "lengths", "mooncake", None])
    def test_command(
        self, name: str | None, traces: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trace = ["--trace", str(traces[name])] if name else ["--lengths", "bwb", "--num-requests", "3"]
        replay.main([*trace, "--out", str(tmp_path), "--name", "x", "--num-blocks", "512", "--sample-every", "2"])
        report = json.loads((tmp_path / "replay-x.json").read_text())
        results = report["results"]
        assert results["requests"]["served"] == 3 and results["pool"]["blocks_in_use_at_end"] == 0
        assert 0 <= results["kv_waste"]["mean"] <= results["kv_waste"]["max"] < 1
        assert len({len(values) for values in results["series"].values()}) == 1
        assert results["contiguous"]["max"]["times_paged"] >= results["contiguous"]["oracle"]["times_paged"]
        assert report["settings"]["arrivals"] == ("trace" if name in ("azure", "mooncake") else "poisson")
        assert str(tmp_path) not in (tmp_path / "replay-x.json").read_text()
        assert "3 served, 0 refused, 0 failed" in capsys.readouterr().out

    def test_plot(self, traces: dict[str, Path], tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        replay.main(["--trace", str(traces["lengths"]), "--out", str(tmp_path), "--num-blocks", "64"])
        assert (tmp_path / "replay-lengths.png").read_bytes()[:4] == b"\x89PNG"


class TestScheduler:
    def test_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["--decodes", "5", "--waiting", "40", "--steps", "40", "--rounds", "1"]
        scheduler.main([*arguments, "--out", str(tmp_path)])
        report = json.loads((tmp_path / "scheduler.json").read_text())
        assert list(report["results"]) == ["5"] and report["machine"]["cores"] >= 1
        for row in report["results"].values():
            assert list(row) == ["none waiting", "one waiting", "many waiting", "prefill"]
            assert all(0 < case["us_per_step"] <= case["us_p95"] for case in row.values())
        assert "microseconds" in capsys.readouterr().out

    def test_the_waiting_ones_are_tried_and_do_not_fit(self) -> None:
        case = scheduler.Case(16, 30)
        case.round(50)
        assert case.scheduler.queues.num_waiting == 30 and case.scheduler.preemption.num_preemptions == 0
        assert case.scheduler.admission.num_stalls >= 50  # each step tried the first one

    def test_a_mixed_step_is_decodes_and_a_chunk(self) -> None:
        case = scheduler.Case(16, 0, mixed=True)
        case.round(2)
        case.advance()
        output = case.scheduler.schedule()
        assert [n for _, _, n in output.chunks[:16]] == [1] * 16
        assert output.query_lens[-1] > 900 and len(output.chunks) == 17
        case.manager.check_invariants()


class TestGpuKernels:
    def test_command(self, tmp_path: Path) -> None:
        """All families in Triton's interpreter: what only a GPU runs is the timing itself."""
        if importlib.util.find_spec("triton") is None:
            pytest.skip("needs triton")
        command = [sys.executable, str(FOLDER / "gpu_kernels.py"), "--quick", "--device", "cpu", "--in-process"]
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(FOLDER.parent)}
        run = subprocess.run([*command, "--out", str(tmp_path)], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        report = json.loads((tmp_path / "gpu_kernels-quick.json").read_text())
        assert {"torch", "triton", "transformers", "hf_paged"} <= report["versions"].keys()
        assert len(report["families"]) == 15 and {s["status"] for s in report["families"].values()} == {"done"}
        assert {row["family"] for row in report["rows"]} == set(report["families"])
        assert all(row.get("us", 0) > 0 and "error" not in row for row in report["rows"])
        assert 0 < report["families"]["decode"]["rms"] < 1e-2 and report["limits"]["copy_gb_s"] > 0
        assert all("decode_tile" in row for row in report["rows"] if row["family"] == "decode")
        assert len(report["bars"]) == 7 and all(bar["passed"] is None for bar in report["bars"])
        assert (tmp_path / "gpu_kernels-quick.md").read_text() in run.stdout
        assert str(tmp_path) not in run.stdout


# ------------------------------------------------------------------------------------------------------- whole calls

generate = load("generate")


def test_workloads_are_the_same_each_time_and_of_the_sizes_they_say() -> None:
    given = {"dtype": torch.float32, "prompts": None, "limit": 12}
    a, b, c, d = (generate.WORKLOADS[name](**given) for name in "ABCD")
    assert len(a.requests) == 32
    assert all(16 <= len(prompt) <= 256 and 16 <= count <= 128 for prompt, count in a.requests)
    assert len(b.requests) == len(c.requests) == 12 and all(1 <= count <= 256 for _, count in b.requests)
    shared = c.requests[0][0][:512]
    assert [prompt for prompt, _ in c.requests] == [shared + prompt for prompt, _ in b.requests]
    assert {count for _, count in d.requests} == {64} and d.options["num_beams"] == 4
    assert generate.WORKLOADS["B"](**given).requests == b.requests


def test_batches_hold_every_request_once_and_sorted_ones_are_alike() -> None:
    requests = [([1] * length, count) for length, count in [(3, 9), (8, 2), (5, 9), (1, 2), (2, 5)]]
    plain = generate._batches(requests, 2, is_sorted=False)
    by_length = generate._batches(requests, 2, is_sorted=True)
    assert [indices for indices, _ in plain] == [[0, 1], [2, 3], [4]]
    assert [indices for indices, _ in by_length] == [[3, 1], [4, 0], [2]]
    for indices, batch in (*plain, *by_length):
        assert batch == [requests[index] for index in indices]


def test_whole_calls_are_measured_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = generate.WORKLOADS["D"]

    def small(**given: Any) -> Any:
        workload = full(**given)
        requests = [(prompt[: 4 + 3 * index], 3 + index) for index, (prompt, _) in enumerate(workload.requests)]
        return dataclasses.replace(workload, requests=requests, batch_sizes=(2,), options={"do_sample": False})

    monkeypatch.setitem(generate.WORKLOADS, "D", small)
    command = [
        "generate.py",
        "--workload",
        "D",
        "--limit",
        "4",
        "--reps",
        "1",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", [*command, "--engines", "hf_paged", "stock"])
    generate.main()
    written = json.loads((tmp_path / "generate-D-float32.json").read_text())
    result = written["results"]["D"]
    assert (tmp_path / "generate-D-float32.png").stat().st_size > 1000
    assert result["num_new_tokens"] == 3 + 4 + 5 + 6 and written["versions"]["torch"] == torch.__version__
    assert {name: row["identical_requests"] for name, row in result["engines"].items()} == {
        "hf_paged": 4,
        "stock": 4,
    }
    assert all(row["seconds"] > 0 for row in result["engines"].values())
    assert result["engines"]["hf_paged"]["peak_kv_bytes"] > 0


class TestSingleCaller:
    single = load("cpu_single_caller")

    @pytest.mark.parametrize("count", [5, 8, 20, 61])
    def test_bound(self, count: int) -> None:
        """The number of ratios below the bound is one that a fair coin throws, or less, in at most 5 % of all cases."""
        ratios = random.Random(count).sample(range(1000), count)
        below = sum(ratio < self.single.lower_bound(ratios) for ratio in ratios)
        chances = [math.comb(count, heads) / 2**count for heads in range(count + 1)]
        assert sum(chances[: below + 1]) <= 0.05 < sum(chances[: below + 2])

    def test_a_cell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tokens are compared, and a pair is a call of each."""
        monkeypatch.setattr(self.single, "WARM_UP", 0)
        monkeypatch.setitem(self.single.NEW_TOKENS, "embedded", 3)
        threads = torch.get_num_threads()
        try:
            row = self.single.measure("embedded-sampling-1", 4)
        finally:
            torch.set_num_threads(threads)
        assert row["equal"] == row["pairs"] == len(row["ratios"]) == 4 and min(row["ratios"]) > 0
        assert row["cell"] in self.single.table([row])
