"""Runs transformers' own generation tests on stock and on patched models, and prints the two side by side.

    python benchmarks/hf_generation_tests.py --tests PATH/TO/transformers/tests --out benchmarks/results

The tests come from a checkout of transformers, best of the version installed, whose own code and conftest.py are not
used. They need `parameterized` and `httpx` (OPT's also `timeout_decorator`). Each family runs twice, each time in a
process of its own: once as it is, once with every supported model patched on its first `generate()` (see
`hf_generation_plugin.py`). A test that only fails patched deserves another `--seed` before it is believed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import command
import torch
from common import device_facts
from hf_generation_plugin import PROMPTS
from rich.table import Table

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "opt"),
    *("starcoder2", "stablelm", "olmo2", "cohere", "granite", "mixtral", "qwen3_moe", "gpt_oss", "smollm3"),
    *("falcon", "bloom", "gptj"),
)
OUTCOMES = ("passed", "failed", "skipped", "needs hub")
# Small blocks make the tests' short prompts span several; the pool is small enough to be allocated for every model.
SETTINGS: dict[str, Any] = {"num_blocks": 256, "block_size": 4}
Records = dict[str, dict[str, Any]]  # of each test


def run(file: Path, given: argparse.Namespace, settings: dict[str, Any] | None) -> tuple[Records, list[str], float]:
    """Runs a file's tests in a process of their own.

    Args:
        file: Of a family.
        given: The command line.
        settings: Of `hf_paged.patch`; `None`: stock.

    Returns:
        The record of each test by its name; names that the tests import and transformers lacks; the seconds taken.

    Raises:
        RuntimeError: pytest stopped early.
        subprocess.TimeoutExpired: It took too long.
    """
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out, ini = Path(folder, "tests.jsonl"), Path(folder, "pytest.ini")
        ini.write_text("[pytest]\n", encoding="utf-8")  # ours and the checkout's settings are for other tests
        arguments = [
            *("-q", "--tb=short", "--show-capture=no", "--disable-warnings", "-c", ini, "--noconftest"),
            *(f"--rootdir={given.tests.resolve().parent}", "-p", "no:cacheprovider", "-p", "hf_generation_plugin"),
            *(f"--generation-out={out}", f"--generation-seed={given.seed}", f"--generation-prompts={given.prompts}"),
            *([] if settings is None else [f"--paged-settings={json.dumps(settings)}"]),
            *([] if given.select is None else ["-k", given.select]),
            file,
        ]
        start = time.perf_counter()
        process = subprocess.run(
            [sys.executable, "-m", "pytest", *map(str, arguments)],
            env=os.environ | offline | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd=folder,
            timeout=given.timeout,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        seconds = round(time.perf_counter() - start, 1)
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    records = [json.loads(line) for line in lines]
    tests = {record["test"].partition("::")[2]: record for record in records if "test" in record}
    # 0: all passed, 1: some failed; with anything else the process stopped early.
    if process.returncode not in (0, 1) or not tests:
        raise RuntimeError(f"pytest ended with {process.returncode}\n{(process.stdout + process.stderr)[-4000:]}")
    return tests, records[0]["replaced_names"], seconds


def compare(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Runs a family's tests on both sides: outcomes, calls of `generate()`, and tests that differ with their errors."""
    file = given.tests / "models" / name / f"test_modeling_{name}.py"
    if not file.exists():
        raise RuntimeError(f"no such file: {file}")
    stock, names, stock_seconds = run(file.resolve(), given, None)
    patched, _, patched_seconds = run(file.resolve(), given, given.settings)
    missing = {"outcome": "missing", "error": "not run"}
    found: dict[str, Any] = {"name": name, "prompts": given.prompts, "replaced_names": names}
    found |= {"fails_patched": {}, "fails_stock": {}, "fails_both": {}}
    for test in sorted(stock.keys() | patched.keys()):
        before, after = (records.get(test, missing) for records in (stock, patched))
        if before["outcome"] == "passed" != after["outcome"]:
            found["fails_patched"][test] = after["error"] or after["outcome"]
        elif after["outcome"] == "passed" != before["outcome"]:
            found["fails_stock"][test] = before["error"] or before["outcome"]
        elif before["outcome"] == "failed":
            found["fails_both"][test] = before["error"]
    sides = {"stock": summarize(stock, stock_seconds), "patched": summarize(patched, patched_seconds)}
    return found | sides


def summarize(records: Records, seconds: float) -> dict[str, Any]:
    """One side: tests by outcome, calls by where they ran, passed tests with a paged call, why calls weren't paged."""
    calls: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for record in records.values():
        calls.update(record.get("calls", {}))
        reasons.update(record.get("reasons", {}))
    paged = [record for record in records.values() if record.get("calls", {}).get("paged", 0)]
    return {
        "outcomes": dict(Counter(record["outcome"] for record in records.values())),
        "calls": dict(calls),
        "paged_tests": sum(record["outcome"] == "passed" for record in paged),
        "reasons": dict(reasons.most_common()),
        "seconds": seconds,
    }


def print_all(families: list[dict[str, Any]]) -> None:
    """A row a family, and every test that differs."""
    outcomes = " / ".join(OUTCOMES)
    table = Table("family", f"stock: {outcomes}", "patched", "only fail patched", "calls: packed / paged / all", "s")
    for family in families:
        sides = [" / ".join(str(family[k]["outcomes"].get(o, 0)) for o in OUTCOMES) for k in ("stock", "patched")]
        calls = family["patched"]["calls"]
        counts = calls.get("flat", 0), calls.get("paged", 0), sum(calls.values()) - calls.get("flat", 0)
        seconds = f"{family['stock']['seconds'] + family['patched']['seconds']:.0f}"
        differing = str(len(family["fails_patched"]))
        table.add_row(family["name"], *sides, differing, " / ".join(map(str, counts)), seconds)
    command.show(table)
    for kind in ("fails_patched", "fails_stock", "fails_both"):
        for family in families:
            for test, error in family[kind].items():
                print(f"{kind}: {family['name']} {test}\n    {error:.200}")


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--tests", type=Path, required=True, help="the tests folder of a transformers checkout")
    parser.add_argument("--models", nargs="+", default=FAMILIES, help="families")
    parser.add_argument("--prompts", default=PROMPTS[0], choices=PROMPTS)
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, help="settings of hf_paged.patch, as JSON")
    parser.add_argument("--seed", type=int, default=0, help="seed of every test")
    parser.add_argument("--select", help="pytest's -k: only tests whose name matches")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a process may take")
    given = parser.parse_args()
    about = {"machine": device_facts(torch.device("cpu")), "settings": given.settings, "seed": given.seed}
    families: list[dict[str, Any]] = []
    errors: list[str] = []
    for name in given.models:
        try:
            families.append(compare(name, given))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            errors.append(f"{name}: {error}")
            continue
        command.save(given.out / "hf_generation_tests.json", about | {"select": given.select}, families)
    print_all(families)
    errors += [f"{family['name']}: no paged call" for family in families if not family["patched"]["calls"].get("paged")]
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
