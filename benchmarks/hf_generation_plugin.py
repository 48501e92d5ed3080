"""pytest plugin of `hf_generation_tests.py`: transformers' own generation tests, stock or with every model patched.

Loaded with `-p hf_generation_plugin`. It

- keeps the tests that `GenerationTesterMixin` defines (also where a model overrides one), and all tests of the other
  classes of `tests/generation`;
- seeds every test, the test suite's private generator included, so that both runs see the same weights and inputs;
- with `--paged-settings`, patches every supported model at its first `generate()`, and counts which calls ran through
  the pool: a run that silently stayed stock is noticed;
- writes one JSON line a test to `--generation-out`.

The tests may be older than the installed library. Names they import from it that no longer exist are replaced by
functions that raise, which is recorded, and the mixin of pipeline tests is left out; nothing else is touched.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import logging
import random
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin

_MIXIN = "GenerationTesterMixin"
_NEEDS_HUB = re.compile(
    r"couldn't connect to|couldn't find (it|them) in the cached files|OfflineModeIsEnabled|LocalEntryNotFound|"
    r"outgoing traffic has been disabled|offline mode is enabled|not a valid model identifier|Can't load|"
    r"is not a local folder",
    re.IGNORECASE,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("generation")
    group.addoption("--generation-out", required=True, help="file for one JSON line a test")
    group.addoption("--generation-seed", type=int, default=0, help="seed of every test")
    group.addoption("--paged-settings", help="settings of hf_paged.patch as JSON; not given: stock")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    settings = config.getoption("--paged-settings")
    calls = CallCounter(None if settings is None else json.loads(settings))
    calls.install()
    _leave_out_pipelines()
    config.pluginmanager.register(Recorder(config, calls), "generation-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if _is_wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted


def _is_wanted(item: pytest.Item) -> bool:
    cls: type | None = getattr(item, "cls", None)
    if cls is None:
        return False
    mixin = next((base for base in cls.__mro__ if base.__name__ == _MIXIN), None)
    if mixin is None:
        return item.path.parent.name == "generation"
    # Multimodal test classes stand beside a family's text-only one; hf_paged refuses those models.
    return item.name in vars(mixin) and "Vision" not in cls.__name__


class CallCounter:
    """Wraps `GenerationMixin.generate` to patch models on the way in and to count where calls ran."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        """Makes a counter that is not installed yet.

        Args:
            settings: Of `hf_paged.patch`; `None`: everything stays stock, calls are only counted.
        """
        self.settings = settings
        self.counts: Counter[str] = Counter()  # "paged", "stock", "unsupported" calls of the running test
        self.reasons: Counter[str] = Counter()  # why, of the calls that were not paged
        self._fall_back_reason = ""

    def install(self) -> None:
        original = GenerationMixin.generate

        @functools.wraps(original)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            refusal = self._patch(model)
            if refusal is not None:
                self.counts["unsupported" if self.settings is not None else "stock"] += 1
                if self.settings is not None:
                    self.reasons[f"{type(model).__name__}: {refusal}"] += 1
                return original(model, *args, **kwargs)
            steps = model.paged.stats().num_steps
            self._fall_back_reason = "no forward ran"
            try:
                return original(model, *args, **kwargs)
            finally:
                is_paged = model.paged.stats().num_steps > steps
                self.counts["paged" if is_paged else "stock"] += 1
                if not is_paged:
                    self.reasons[self._fall_back_reason] += 1

        GenerationMixin.generate = generate
        if self.settings is not None:
            self._listen()

    def _patch(self, model: Any) -> str | None:
        """Patches a model unless it is. Returns why it can't be."""
        if self.settings is None:
            return "stock run"
        if hasattr(model, "paged"):
            return None
        import hf_paged

        try:
            hf_paged.patch(model, **self.settings)
        except hf_paged.UnsupportedModelError as error:
            return str(error)
        return None

    def _listen(self) -> None:
        """Hears every fall-back to stock `generate()`, also those that `warning_once` would swallow."""
        import hf_paged.generation

        logger: Any = logging.getLogger(hf_paged.generation.__name__)
        warning_once = logger.warning_once

        def listener(message: str, *args: Any, **kwargs: Any) -> None:
            self._fall_back_reason = message.rpartition("the paged cache: ")[2]
            warning_once(message, *args, **kwargs)

        logger.warning_once = listener


class Recorder:
    """Seeds each test and writes its outcome."""

    def __init__(self, config: pytest.Config, calls: CallCounter) -> None:
        self._calls = calls
        self._seed: int = config.getoption("--generation-seed")
        self._out = Path(config.getoption("--generation-out")).open("w", encoding="utf-8")  # noqa: SIM115
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> None:
        tests_dir = next((folder for folder in file_path.parents if folder.name == "tests"), None)
        if file_path.suffix == ".py" and tests_dir is not None:
            stubbed = sorted(set(_stub_missing_names([file_path, *sorted(tests_dir.glob("*.py"))])))
            self._write({"stubbed": stubbed})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "collection error", "error": str(report.longrepr)[-600:]})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._calls.counts.clear()
        self._calls.reasons.clear()
        self._reseed()
        result = yield
        record = self._tests.pop(item.nodeid, {"outcome": "crashed", "error": "", "seconds": 0.0})
        self._write(
            {"test": item.nodeid, **record, "calls": dict(self._calls.counts), "reasons": dict(self._calls.reasons)}
        )
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = self._tests.setdefault(report.nodeid, {"outcome": "passed", "error": "", "seconds": 0.0})
        record["seconds"] = round(record["seconds"] + report.duration, 2)
        if report.failed and record["outcome"] != "failed":  # sub-tests report one by one
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr) if crash is None else f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"
            needs_hub = _NEEDS_HUB.search(text) is not None
            record["outcome"] = "needs hub" if needs_hub else "failed"
            record["error"] = " ".join(text.split())[:400]
            record["traceback"] = str(report.longrepr)[-6000:]
        elif report.skipped and record["outcome"] == "passed":
            record["outcome"] = "skipped"
            record["error"] = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)

    def pytest_unconfigure(self) -> None:
        self._out.close()

    def _reseed(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)
        for name, module in list(sys.modules.items()):
            if name.endswith("test_modeling_common") and isinstance(getattr(module, "global_rng", None), random.Random):
                module.global_rng.seed(self._seed)

    def _write(self, record: dict[str, Any]) -> None:
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()


def _leave_out_pipelines() -> None:
    """Stands in for the mixin of pipeline tests, none of which we run: its imports need vision and data libraries."""
    module: Any = types.ModuleType("tests.test_pipeline_mixin")
    module.PipelineTesterMixin = type("PipelineTesterMixin", (), {})
    sys.modules[module.__name__] = module


def _stub_missing_names(files: list[Path]) -> Iterator[str]:
    """Gives the installed transformers the names that these files import from it and that it lacks."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("transformers"):
                continue
            try:
                module = importlib.import_module(node.module or "")
            except ImportError:
                continue
            for alias in node.names:
                if not _has(module, alias.name):
                    setattr(module, alias.name, functools.partial(_raise_missing, f"{node.module}.{alias.name}"))
                    yield f"{node.module}.{alias.name}"


def _has(module: types.ModuleType, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")
    except ImportError:
        return False
    return True


def _raise_missing(name: str, *args: Any, **kwargs: Any) -> None:
    raise ImportError(f"{name} does not exist in the installed transformers")
