"""The tests that need a GPU, in pieces: those that have passed with the same code are not run again.

    python benchmarks/gpu_tests.py --out gpu-state/results [--smoke] [--time-limit 540]

Runs under xdist where it is installed, else one by one; a process that meets a CUDA error ends and another one goes on
(`tests/gpu_plugin.py`). Then the tests marked `own_process`, each in a process of its own. What passed, failed and why
is in gpu-tests.jsonl at any moment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import children

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
import gpu_plugin  # noqa: E402

MOST_PROCESSES = 12
LEAST = 25.0  # seconds: importing and collecting takes most of that
GRACE = 12.0  # seconds that pytest is given to stop by itself
OUT_OF_TIME = "out of time"

# One of each kernel, then whole calls, recorded in CUDA graphs and replayed: greedy and sampling, a hybrid, steps that
# mix prompts with decoding rows, prompt lookup, LoRA.
SMOKE = {
    "tests/kernels/test_kernels_triton.py": (
        "test_reshape_and_cache_is_one_launch",
        "test_each_feature_matters",
        "test_copy_blocks_of_an_odd_number_of_bytes",
        "test_a_step_of_both_backends",
    ),
    "tests/kernels/test_triton_scan.py": ("test_scans", "test_convolutions"),
    "tests/model/test_fused_layers.py": ("test_rms_norm_of_what_is_no_number", "test_gate_at_the_ends"),
    "tests/model/test_cuda_graph.py": ("test_inputs", "test_logits_are_the_callers_to_keep"),
    "tests/engine/test_gpu.py": ("test_nothing_takes_a_detour", "test_each_kind_of_step"),
    "tests/kernels/test_row_sampling.py": ("test_a_gpu_draws_them",),
}


def marked(name: str, tests: Path) -> list[str]:
    """Files with such a mark: collecting all the others would take their imports, which need more than is there."""
    files = sorted(tests.rglob("test_*.py"))
    return [str(file) for file in files if re.search(rf"\bmark\.{name}\b", file.read_text())]


def run_all(command: Sequence[str], record: Path, run_id: str, ends: float, env: dict[str, str]) -> str | None:
    """Starts pytest until a session comes to its end.

    Args:
        command: pytest with its arguments, but for the plugin's.
        record: The plugin's file.
        run_id: Of this run.
        ends: `time.monotonic()` at which it has to have stopped.
        env: Variables for it.

    Returns:
        `None`, or why no session came to its end: `OUT_OF_TIME`, or what is wrong.
    """
    while (left := ends - time.monotonic()) > LEAST:
        num_known = len(gpu_plugin.read_lines(record))
        stop_at = str(time.time() + left)
        own = ["-p", "gpu_plugin", "--record", str(record), "--run-id", run_id, "--stop-at", stop_at]
        ended = children.run([*command, *own], seconds=left + GRACE, env=env)
        new = gpu_plugin.read_lines(record)[num_known:]
        finished = [line for line in new if line["event"] == "finished"]
        if finished and finished[-1]["status"] in (0, 1, 5):  # 1: some failed, 5: nothing was left to run
            return None
        if ended.reason is not None:
            return OUT_OF_TIME
        if not any(line["event"] == "begun" for line in new):
            return f"pytest can't begin: {ended}"
        print(f"the process ended ({ended}); another one goes on", flush=True)
    return OUT_OF_TIME


def summarize(record: Path, run_id: str, trouble: Sequence[str]) -> int:
    """Prints, writes gpu-tests.txt, and returns the exit status."""
    lines = gpu_plugin.read_lines(record)
    passed = {line["id"] for line in lines if line["event"] == "passed"}
    own: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        if line["run"] == run_id and "id" in line:
            own.setdefault(line["event"], {})[line["id"]] = line
    failed = {test: line for test, line in own.get("failed", {}).items() if test not in passed}
    for test, line in failed.items():
        print(f"\n== {test}", *line["text"][-20:], sep="\n")
    is_left = bool(own.get("left") or trouble)
    skipped = own.get("skipped", {}).keys() - passed
    if not passed and not is_left:
        trouble = ["nothing passed"]
    counts = (
        f"{len(passed)} passed so far, {len(failed)} failed, {len(skipped)} skipped" + ", others are left" * is_left
    )
    text = "\n".join([counts, *(f"failed: {test}" for test in failed), *trouble])
    print(f"\n{text}")
    record.with_suffix(".txt").write_text(text + "\n")
    if any(reason != OUT_OF_TIME for reason in trouble):
        return 1
    return children.UNFINISHED if is_left else int(bool(failed))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu-tests.jsonl")
    parser.add_argument("--smoke", action="store_true", help="only some tests, one of each kernel among them")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds; the other tests stay to do")
    parser.add_argument("--marks", default="gpu", help="which tests, as pytest's -m")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="folder of the tests")
    parser.add_argument("--again", action="store_true", help="those as well that passed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if a test failed, or `children.UNFINISHED` if the time was up."""
    ends = time.monotonic()
    args = parse(argv)
    ends += args.time_limit
    record, run_id = args.out / "gpu-tests.jsonl", f"{time.time():.0f}-{os.getpid()}"
    code = children.code_hash([ROOT / "hf_paged", args.tests])
    known = gpu_plugin.read_lines(record)
    if known and (known[0].get("code") != code or args.again):
        record.replace(record.with_suffix(".before.jsonl"))
    args.out.mkdir(parents=True, exist_ok=True)
    gpu_plugin.Record(record, run_id).add("started", code=code)

    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(args.tests), os.environ.get("PYTHONPATH", "")])
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--tb=short",
    ]
    workers = []
    if importlib.util.find_spec("xdist") is not None:
        workers = ["-n", str(min(MOST_PROCESSES, os.cpu_count() or 1)), "--max-worker-restart", "500"]
    if args.smoke:
        tests = [f"{ROOT / file}::{name}" for file, names in SMOKE.items() for name in names]
        runs = [[*workers, "-m", f"({args.marks}) and not own_process", *tests]]
    else:
        files = marked("gpu", args.tests)
        runs = [[*workers, "-m", f"({args.marks}) and not own_process", *files]]
        if alone := marked("own_process", args.tests):
            runs.append(["-p", "no:xdist", "-m", f"({args.marks}) and own_process", *alone])
    trouble = [run_all([*pytest, *run], record, run_id, ends, env) for run in runs]
    return summarize(record, run_id, [reason for reason in trouble if reason])


if __name__ == "__main__":
    sys.exit(main())
