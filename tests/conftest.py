"""Options and fixtures of all tests; what files of tests import is in `helpers`."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# Fixed when triton is first imported, which transformers or hf_paged may do: without a GPU its kernels run interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

import hf_paged
from helpers.models import build
from helpers.pairs import MakePair, Pair, Trials
from helpers.waiting import what_threads_do
from hf_paged.api import support
from hf_paged.engine.draft_budget import RowBudget

# The models are tiny: a second thread only waits for the first.
torch.set_num_threads(1)

TRIALS = support.probe = Trials()

if find_spec("hypothesis"):  # tests on a GPU do without it
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")

ROOT = Path(__file__).parents[1]
NOT_FOR_THE_DEMO = [name for name in ("gradio", "gradio_client", "pandas", "playwright") if find_spec(name) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="only every Nth case, others with each commit")


def turn() -> int:
    """A number that is another one with each commit, so that all cases have their turn."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(asked.stdout[:8] or "0", 16)


def pytest_report_header(config: pytest.Config) -> str | None:
    every = config.getoption("--every")
    return f"cases: one of {every} of each test, number {turn() % every} (--every 1: all)" if every > 1 else None


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("timeout"):  # a machine with a GPU need not have pytest-timeout
        config.addinivalue_line("markers", "timeout(seconds): not kept here")


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze()


def freeze() -> None:
    """What lives now (imports: a million objects, tests, kept models) lives on: no later collection walks over it."""
    gc.collect()
    gc.freeze()


class Skipped(pytest.Module):
    """A file of tests that need what isn't installed."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f'{", ".join(NOT_FOR_THE_DEMO)} not installed: pip install -e ".[test,dev]"')


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    is_skipped = NOT_FOR_THE_DEMO and module_path.parent.name == "demo" and "CI" not in os.environ
    return Skipped.from_parent(parent, path=module_path) if is_skipped else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("--every")
    if every > 1:
        tests = [item.nodeid.partition("[")[0] for item in items]
        residue, totals, seen = turn(), Counter(tests), Counter[str]()
        kept: list[pytest.Item] = []
        for item, test in zip(items, tests, strict=True):
            first = (len(test) + residue) % min(every, totals[test])  # of each test at least one
            if seen[test] % every == first:
                kept.append(item)
            seen[test] += 1
        config.hook.pytest_deselected(items=[*set(items) - set(kept)])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that takes too long says what the threads do: one that turns in circles slows all others down."""
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    if isinstance(error, pytest.fail.Exception) and str(error).startswith("Timeout"):
        report.sections.append(("Threads", what_threads_do()))
    return report


@pytest.fixture
def own_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's architectures are tried anew, whatever tests before it have found."""
    monkeypatch.setattr(support, "probe", TRIALS.probe)


@pytest.fixture
def full_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have all the drafts that they may, whatever pays."""
    monkeypatch.setattr(RowBudget, "most", lambda self, *_: self.limit)
    monkeypatch.setattr(RowBudget, "note", lambda *_: None)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises `KeyboardInterrupt`, as in a terminal: in the background of a shell it is ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """The tests of a file pay for collections of their own garbage, not for looks at what all files before it keep."""
    yield
    freeze()


@pytest.fixture(autouse=True)
def _transformers_speaks() -> Iterator[None]:
    """The command line silences transformers for its process; the next test must hear its warnings again."""
    yield
    transformers_logging.set_verbosity_warning()


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    """Makes a `Pair` of a model of the table (or of a given one) with these settings; watches over its pool."""
    pairs: list[Pair] = []

    def make(model: str | PreTrainedModel = "llama", **settings: Any) -> Pair:
        stock = build(model) if isinstance(model, str) else model
        pairs.append(Pair(stock, **({"block_size": 4, "num_blocks": 256} | settings)))
        return pairs[-1]

    yield make
    for pair in pairs:
        if not isinstance(getattr(pair.paged, "paged", None), hf_paged.Engine):
            continue  # the test unpatched it
        stats = pair.engine.stats()
        if stats.num_free_blocks < stats.num_blocks:
            gc.collect()  # a cache in a traceback
        pair.engine.check_invariants()
        pair.assert_all_free()


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    """A `Pair` of the tiny Llama with a roomy pool."""
    return make_pair()
