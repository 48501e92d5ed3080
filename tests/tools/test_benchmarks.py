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
from hf_paged.kernels import cpu_linear

scheduler = load("scheduler")


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
        assert len(report["families"]) == 11 and {s["status"] for s in report["families"].values()} == {"done"}
        assert {row["family"] for row in report["rows"]} == set(report["families"])
        assert all(row.get("us", 0) > 0 and "error" not in row for row in report["rows"])
        assert 0 < report["families"]["decode"]["rms"] < 1e-2 and report["limits"]["copy_gb_s"] > 0
        assert all("decode_tile" in row for row in report["rows"] if row["family"] == "decode")
        assert len(report["bars"]) == 7 and all(bar["passed"] is None for bar in report["bars"])
        assert (tmp_path / "gpu_kernels-quick.md").read_text() in run.stdout
        assert str(tmp_path) not in run.stdout


@pytest.mark.skipif(isinstance(cpu_linear.load(torch.float32), str), reason="counted is the way through the C kernels")
def test_calls_of_functions(tmp_path: Path) -> None:
    """A little above what is measured: a change that does more in Python is to say so."""
    command = [sys.executable, str(FOLDER / "call_counts.py"), "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "call_counts.json").read_text())
    assert 0 < sum(report["results"]["first"].values()) <= 820
    assert 0 < sum(report["results"]["later"].values()) <= 270
    assert 0 < report["depth"] <= 25


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
    options = "--workload D --limit 4 --reps 1 --threads 1 --engines hf_paged stock --out"
    monkeypatch.setattr(sys, "argv", ["generate.py", *options.split(), str(tmp_path)])
    generate.main()
    written = json.loads((tmp_path / "generate-D-float32.json").read_text())
    result = written["results"]["D"]
    assert result["num_new_tokens"] == 3 + 4 + 5 + 6 and written["versions"]["torch"] == torch.__version__
    assert {name: row["identical_requests"] for name, row in result["engines"].items()} == {"hf_paged": 4, "stock": 4}
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


# ------------------------------------------------------------------------------------------- transformers' own tests

MIXIN = """
import torch
class GenerationTesterMixin:
    has_attentions = False
    def prepare_config_and_inputs_for_generate(self, batch_size=2):
        from transformers import LlamaConfig
        sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
        ids = torch.full((batch_size, 5), 7)
        return LlamaConfig(**sizes), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    def test_same(self):
        from transformers import LlamaForCausalLM
        config, inputs = self.prepare_config_and_inputs_for_generate()
        model = LlamaForCausalLM(config).eval()
        assert torch.equal(*(model.generate(**inputs, max_new_tokens=3, do_sample=False) for _ in range(2)))
    def test_stock_only(self):
        from transformers import LlamaForCausalLM
        config, inputs = self.prepare_config_and_inputs_for_generate()
        model = LlamaForCausalLM(config)
        model.generate(**inputs, max_new_tokens=1)
        assert not hasattr(model, "paged"), "it is patched"
"""
FAMILY = """
import unittest
from tests.generation.test_utils import GenerationTesterMixin
from transformers import no_longer_there
class LlamaModelTest(GenerationTesterMixin, unittest.TestCase):
    def test_of_its_own(self):
        raise AssertionError
"""


def test_transformers_own_tests_run_on_both_sides(tmp_path: Path) -> None:
    """Of a checkout that has one family with two tests, one of which fails patched."""
    texts = {"generation/test_utils": MIXIN, "models/llama/test_modeling_llama": FAMILY}
    texts |= dict.fromkeys(("__init__", "generation/__init__", "models/__init__", "models/llama/__init__"), "")
    for name, text in texts.items():
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    given = ["--tests", str(tmp_path / "tests"), "--models", "llama", "--prompts", "left-padded"]
    command = [sys.executable, str(FOLDER / "hf_generation_tests.py"), *given, "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (family,) = json.loads((tmp_path / "hf_generation_tests.json").read_text())["results"]
    assert family["stock"]["outcomes"] == {"passed": 2} and family["patched"]["calls"]["paged"] == 3
    assert list(family["fails_patched"]) == ["LlamaModelTest::test_stock_only"] and not family["fails_both"]
    assert family["replaced_names"] == ["transformers.no_longer_there"]


def test_real_sizes_beside_stock(tmp_path: Path) -> None:
    """A prompt of which all is computed, and some whose keys the benchmark puts into the pool."""
    wanted = ["llama3.2-1b float32 256", "qwen3-0.6b bfloat16 8 x 4k decode"]
    given = ["--quick", "--reps", "1", "--threads", "1", "--only", *wanted, "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    run = subprocess.run(
        [sys.executable, str(FOLDER / "real_sizes.py"), *given], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((tmp_path / "real_sizes.json").read_text())["results"]
    assert sorted(results) == sorted(wanted)
    for rows in results.values():
        assert all(row[figure] > 0 for row in rows for figure in ("first s", "tokens/s", "GiB beside")), rows
    assert [row["equal"] for row in results[wanted[0]]] == ["1 of 1", "1 of 1"]
    assert results[wanted[0]][1]["judged"] == "identical: 8 tokens"
    assert all(results[cell][1]["of a read"] > 0 for cell in wanted)
    engines = [[row["engine"] for row in results[cell]] for cell in wanted]
    assert engines == [["stock", "hf_paged"], ["stock", "hf_paged", "hf_paged, int8 cache"]]
