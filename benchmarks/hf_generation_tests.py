"""Runs transformers' own generation tests on stock and on patched models, and prints the two side by side.

    python benchmarks/hf_generation_tests.py --tests PATH/TO/transformers/tests --json benchmarks/results/hf.json

The tests come from a checkout of transformers, best of the version installed, whose own code and conftest.py are not
used. They need `parameterized` and `httpx` (OPT's also `timeout_decorator`). Each family runs twice, each time in a
process of its own: once as it is, once with every supported model patched on its first `generate()` (see
`hf_generation_plugin.py`). A test that only fails patched is run again on both sides with other seeds before it is
reported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "opt"),
    *("starcoder2", "stablelm", "olmo2", "cohere", "granite", "mixtral", "qwen3_moe", "gpt_oss", "smollm3"),
    *("falcon", "bloom", "gptj"),
)
# Not a family: tests/generation itself, on a few tiny random models.
GENERATION = "generation"
GENERATION_FILES = ("test_utils.py", "test_streamers.py", "test_candidate_generator.py")
OUTCOMES = ("passed", "failed", "skipped", "needs hub")

PROMPTS = ("as-written", "left-padded", "unpadded")

# Small blocks make the tests' short prompts span several; the pool is small enough to be allocated for every model.
SETTINGS: dict[str, Any] = {"num_blocks": 256, "block_size": 4}


@dataclass
class Side:
    """One run of a family's tests.

    Attributes:
        outcomes: How many tests passed, failed, were skipped, and failed for want of the model hub.
        calls: `generate()` calls that ran over the pool ("paged"; of those "flat": a batch of real tokens only, as far
            as that shows: prompts are ids, prefix caching is on), that ran as stock although the model was patched
            ("stock"; in a stock run all), or on a model that can't be patched ("unsupported").
        paged_tests: Passed tests with at least one paged call.
        reasons: Why calls weren't paged.
        seconds: Duration of the process.
    """

    outcomes: dict[str, int]
    calls: dict[str, int]
    paged_tests: int
    reasons: dict[str, int]
    seconds: float


@dataclass
class Difference:
    """A test that one side passes and the other fails.

    Attributes:
        test: Its name, with its class.
        error: One line.
        seeds: Other seeds with which the two sides differ in the same way, of those tried.
    """

    test: str
    error: str
    seeds: str = ""


@dataclass
class Family:
    """Both runs of a family.

    Attributes:
        name: Folder of tests/models, or `generation`.
        prompts: How the prompts were padded: "as-written" (mostly on the right), "left-padded" or "unpadded".
        stock: The stock run.
        patched: The patched run.
        fails_patched: Tests that pass on stock and fail patched.
        fails_stock: Tests that fail on stock and pass patched.
        fails_both: Tests that fail on both sides, with stock's error.
        replaced_names: Names the tests import that the installed transformers lacks.
    """

    name: str
    prompts: str
    stock: Side
    patched: Side
    fails_patched: list[Difference] = field(default_factory=list)
    fails_stock: list[Difference] = field(default_factory=list)
    fails_both: list[Difference] = field(default_factory=list)
    replaced_names: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="the tests folder of a transformers checkout")
    parser.add_argument("--models", default=",".join([*FAMILIES, GENERATION]), help="families, separated by commas")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--prompts", default=PROMPTS[0], help=f"of {', '.join(PROMPTS)}; several give several runs")
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, help="settings of hf_paged.patch, as JSON")
    parser.add_argument("--seed", type=int, default=0, help="seed of every test")
    parser.add_argument("--retries", type=int, default=2, help="further seeds for tests that only fail patched")
    parser.add_argument("--select", help="pytest's -k: only tests whose name matches")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a process may take")
    options = parser.parse_args()

    results: dict[str, Any] = {
        "versions": versions(),
        "machine": machine(),
        "tests": checkout_version(options.tests),
        "settings": options.settings,
        "seed": options.seed,
        "select": options.select,
        "families": [],
    }
    print(", ".join(f"{name} {version}" for name, version in results["versions"].items()))
    print(", ".join(f"{name} {value}" for name, value in results["machine"].items()))
    print(f"tests of transformers {results['tests']}; hf_paged.patch(model, **{options.settings})\n")
    print(table_row(["family", "prompts", "stock", "patched", "patched", "calls", "tests", "seconds"]))
    outcomes = "pass/fail/skip/hub"
    print(table_row(["", "", outcomes, outcomes, "only fails", "flat/paged/all", "paged/pass", "both"]))
    families: list[Family] = []
    errors: list[str] = []
    for name, prompts in itertools.product(options.models.split(","), options.prompts.split(",")):
        if name == GENERATION and prompts != PROMPTS[0]:
            continue  # these bring prompts of their own
        try:
            family = compare(name, Runner(options, prompts))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            errors.append(f"{name}: {error}")
            print(f"{name}: did not run", flush=True)
            continue
        families.append(family)
        results["families"].append(asdict(family))
        print(family_row(family), flush=True)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_differences(families)
    errors += [f"{family.name}: no paged call" for family in families if not family.patched.calls.get("paged")]
    if errors:
        sys.exit("\n" + "\n".join(errors))


# ------------------------------------------------------------------------------------------------------- running tests


@dataclass
class Runner:
    """Runs pytest in processes of its own.

    Attributes:
        options: The command line.
        prompts: How prompts are padded.
    """

    options: argparse.Namespace
    prompts: str

    def run(
        self, files: list[Path], seed: int, select: str | None, settings: dict[str, Any] | None = None
    ) -> tuple[list[str], dict[str, dict[str, Any]], float]:
        """Runs tests on one side.

        Args:
            files: Test files.
            seed: Of every test.
            select: pytest's `-k`.
            settings: Of `hf_paged.patch`; `None`: stock.

        Returns:
            Names that the tests import and transformers lacks; the record of each test by its name; the seconds taken.

        Raises:
            RuntimeError: pytest stopped early.
            subprocess.TimeoutExpired: It took too long.
        """
        here = Path(__file__).resolve().parent
        paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        with tempfile.TemporaryDirectory() as folder:
            out, ini = Path(folder, "tests.jsonl"), Path(folder, "pytest.ini")
            ini.write_text("[pytest]\n", encoding="utf-8")  # ours and the checkout's settings are for other tests
            root = self.options.tests.resolve().parent
            command = [
                *(sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no", "--disable-warnings"),
                *("-c", ini, f"--rootdir={root}", "--noconftest", "-p", "no:cacheprovider"),
                *("-p", "hf_generation_plugin", f"--generation-out={out}", f"--generation-seed={seed}"),
                f"--generation-prompts={self.prompts}",
                *([] if settings is None else [f"--paged-settings={json.dumps(settings)}"]),
                *([] if select is None else ["-k", select]),
                *files,
            ]
            start = time.perf_counter()
            process = subprocess.run(
                [str(part) for part in command],
                env=environment,
                cwd=folder,
                timeout=self.options.timeout,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            seconds = time.perf_counter() - start
            lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        records = [json.loads(line) for line in lines]
        tests = {record["test"].partition("::")[2]: record for record in records if "test" in record}
        # 0: all passed, 1: some failed; with anything else the process stopped early.
        if process.returncode not in (0, 1) or not tests:
            raise RuntimeError(f"pytest ended with {process.returncode}\n{process.stdout[-4000:]}")
        return records[0]["replaced_names"], tests, seconds


def compare(name: str, runner: Runner) -> Family:
    """Runs a family's tests on both sides.

    Args:
        name: Folder of tests/models, or `generation`.
        runner: How.
    """
    options = runner.options
    files = test_files(options.tests, name)
    names, stock, stock_seconds = runner.run(files, options.seed, options.select)
    _, patched, patched_seconds = runner.run(files, options.seed, options.select, options.settings)
    sides = summarize(stock, stock_seconds), summarize(patched, patched_seconds)
    family = Family(name, runner.prompts, *sides, replaced_names=names)
    for test in sorted(stock.keys() | patched.keys()):
        before, after = (records.get(test, {"outcome": "missing", "error": "not run"}) for records in (stock, patched))
        if before["outcome"] == "passed" and after["outcome"] != "passed":
            family.fails_patched.append(Difference(test, after["error"] or after["outcome"]))
        elif after["outcome"] == "passed" and before["outcome"] != "passed":
            family.fails_stock.append(Difference(test, before["error"] or before["outcome"]))
        elif before["outcome"] == "failed":
            family.fails_both.append(Difference(test, before["error"]))
    retry(family.fails_patched, files, runner)
    return family


def retry(differences: list[Difference], files: list[Path], runner: Runner) -> None:
    """Runs tests that only fail patched again with other seeds, on both sides, and notes how often they differ."""
    options = runner.options
    if not differences or not options.retries:
        return
    select = " or ".join(sorted({difference.test.rpartition("::")[2] for difference in differences}))
    counts: Counter[str] = Counter()
    for seed in range(options.seed + 1, options.seed + 1 + options.retries):
        stock = runner.run(files, seed, select)[1]
        patched = runner.run(files, seed, select, options.settings)[1]
        for test in {difference.test for difference in differences}:
            counts[test] += stock[test]["outcome"] == "passed" and patched[test]["outcome"] != "passed"
    for difference in differences:
        difference.seeds = f"{counts[difference.test]} of {options.retries}"


def test_files(tests: Path, name: str) -> list[Path]:
    if name == GENERATION:
        files = [tests / "generation" / file for file in GENERATION_FILES]
    else:
        files = [tests / "models" / name / f"test_modeling_{name}.py"]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise RuntimeError(f"no such file: {', '.join(missing)}")
    return [file.resolve() for file in files]


def summarize(records: dict[str, dict[str, Any]], seconds: float) -> Side:
    calls: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for record in records.values():
        calls.update(record.get("calls", {}))
        reasons.update(record.get("reasons", {}))
    return Side(
        outcomes=dict(Counter(record["outcome"] for record in records.values())),
        calls=dict(calls),
        paged_tests=sum(r["outcome"] == "passed" and r.get("calls", {}).get("paged", 0) > 0 for r in records.values()),
        reasons=dict(reasons.most_common()),
        seconds=round(seconds, 1),
    )


# ------------------------------------------------------------------------------------------------------------ printing


def table_row(cells: list[str]) -> str:
    return "  ".join(
        cell.ljust(width) for cell, width in zip(cells, (11, 11, 18, 18, 10, 14, 10, 7), strict=True)
    ).rstrip()


def family_row(family: Family) -> str:
    sides = ["/".join(str(side.outcomes.get(o, 0)) for o in OUTCOMES) for side in (family.stock, family.patched)]
    calls = family.patched.calls
    return table_row(
        [
            family.name,
            family.prompts,
            *sides,
            str(len(family.fails_patched)),
            f"{calls.get('flat', 0)}/{calls.get('paged', 0)}/{sum(calls.values()) - calls.get('flat', 0)}",
            f"{family.patched.paged_tests}/{family.patched.outcomes.get('passed', 0)}",
            f"{family.stock.seconds + family.patched.seconds:.0f}",
        ]
    )


def print_differences(families: list[Family]) -> None:
    reasons: Counter[str] = Counter()
    for family in families:
        reasons.update(family.patched.reasons)
    print("\ncalls that were not paged, by reason:")
    for reason, count in reasons.most_common():
        print(f"  {count:5}  {reason}")
    for title, attribute in (
        ("pass on stock, fail patched", "fails_patched"),
        ("fail on stock, pass patched", "fails_stock"),
        ("fail on both", "fails_both"),
    ):
        print(f"\n{title}:")
        found = [
            (f"{family.name} ({family.prompts})", difference)
            for family in families
            for difference in getattr(family, attribute)
        ]
        for name, difference in found:
            seeds = f" [so with {difference.seeds} other seeds]" if difference.seeds else ""
            print(f"  {name} {difference.test}{seeds}\n      {difference.error:.200}")
        if not found:
            print("  none")


# --------------------------------------------------------------------------------------------------------- environment


def versions() -> dict[str, str]:
    packages = ("hf-paged", "transformers", "torch", "numpy", "pytest")
    found = {package: importlib.metadata.version(package) for package in packages}
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return found | {"commit": commit, "python": platform.python_version()}


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": model, "cores": str(os.cpu_count()), "threads used": "1", "system": platform.platform()}


def checkout_version(tests: Path) -> str:
    """The version a checkout says it is, and its commit where it is a git work tree."""
    version = "of unknown version"
    setup = tests.resolve().parent / "setup.py"
    if setup.exists() and (match := re.search(r'version="([^"]+)"', setup.read_text(encoding="utf-8"))):
        version = match.group(1)
    git = subprocess.run(["git", "-C", str(tests), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return f"{version} ({git.stdout.strip()})" if git.returncode == 0 else version


if __name__ == "__main__":
    main()
