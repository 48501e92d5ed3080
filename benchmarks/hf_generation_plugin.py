"""pytest plugin of `hf_generation_tests.py`: transformers' own generation tests, stock or with every model patched.

Loaded with `-p hf_generation_plugin`. It

- keeps the tests that `GenerationTesterMixin` defines, also where a model overrides one;
- runs each of them that asks for attention weights twice more. `_without_attentions`, since a call with them is never
  paged; `_without_layer_outputs`, neither attention weights nor hidden states, since a call with those is paged but
  keeps its padding;
- runs them, with `--generation-prompts`, on other prompts than they are written with: most of them pad on the *right*,
  where padding can't be left out, so the padded batches that people have would hardly be tested;
- seeds every test, the test suite's private generator included, so that both runs see the same weights and inputs;
- with `--paged-settings`, patches every supported model at its first `generate()`, and counts which calls ran through
  the pool: a run that silently stayed stock is noticed;
- writes one JSON line a test to `--generation-out`.

The tests may be older than the installed library, and there is no model hub. What is done about it is done in both
runs, and written down in the results:

- names that the tests import and the library no longer has become functions that raise;
- `cache_implementation="dynamic_full"`, which became the default and was removed, is not passed on;
- the mixin of pipeline tests is left out (none of it is run; its imports need vision and data libraries);
- a test decorated with a bare `@is_flaky`, which made it a no-op, is run as it was written.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import logging
import random
import re
import sys
import textwrap
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import GenerationMixin

MIXIN = "GenerationTesterMixin"
PROMPTS = ("as-written", "left-padded", "unpadded")
WITHOUT_LAYER_OUTPUTS = "_without_layer_outputs"
# Suffix of a second and third run of a test, and what they change in its class.
FEWER_OUTPUTS: dict[str, dict[str, Any]] = {
    "_without_attentions": {"has_attentions": False},
    WITHOUT_LAYER_OUTPUTS: {"has_attentions": False, "_check_hidden_states_for_generate": lambda *_, **__: None},
}
NEEDS_HUB = re.compile(
    r"couldn't connect to|in the cached files|OfflineModeIsEnabled|LocalEntryNotFound|outgoing traffic has been "
    r"disabled|offline mode is enabled|not a valid model identifier|is not a local folder|`transformers-community/",
    re.IGNORECASE,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("generation")
    group.addoption("--generation-out", required=True, help="file for one JSON line a test")
    group.addoption("--generation-seed", type=int, default=0, help="seed of every test")
    group.addoption("--generation-prompts", choices=PROMPTS, default=PROMPTS[0], help="padding of the mixin's prompts")
    group.addoption("--paged-settings", help="settings of hf_paged.patch as JSON; not given: stock")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    settings = config.getoption("--paged-settings")
    calls = CallCounter(None if settings is None else json.loads(settings))
    calls.install()
    files = [Path(argument.partition("::")[0]) for argument in config.args]
    recorder = Recorder(config, calls)
    recorder.write({"replaced_names": sorted(set(_replace_missing_names(files)))})
    config.pluginmanager.register(recorder, "generation-recorder")
    _leave_out_pipelines()


# ------------------------------------------------------------------------------------------------- choosing the tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted: list[pytest.Item] = []
    unwanted: list[pytest.Item] = []
    for item in items:
        mixin = _mixin_of(item)
        test: Any = getattr(getattr(item, "cls", None), item.name, None)
        if not inspect.isfunction(inspect.unwrap(test)):
            unwanted.append(item)  # a mark left where `parameterized.expand` took the test away
        # Multimodal test classes stand beside a family's text-only one, and have prompts of their own.
        elif mixin is None or item.name not in vars(mixin) or "Vision" in item.parent.name:  # type: ignore[union-attr]
            unwanted.append(item)
        else:
            _set_prompts(mixin, config.getoption("--generation-prompts"))
            wanted.append(_undo_bare_is_flaky(item))
            wanted += _with_fewer_outputs(item)
    config.hook.pytest_deselected(items=unwanted)
    items[:] = wanted


def _mixin_of(item: pytest.Item) -> type | None:
    classes: Iterable[type] = getattr(getattr(item, "cls", None), "__mro__", ())
    return next((cls for cls in classes if cls.__name__ == MIXIN), None)


def _undo_bare_is_flaky(item: Any) -> Any:
    """`@is_flaky` without parentheses takes the test for its `max_attempts` and leaves a decorator in its place."""
    function = inspect.unwrap(getattr(item.cls, item.name))
    if function.__qualname__ != "is_flaky.<locals>.decorator":
        return item
    setattr(item.cls, item.name, inspect.getclosurevars(function).nonlocals["max_attempts"])
    return type(item).from_parent(item.parent, name=item.name)


def _with_fewer_outputs(item: Any) -> Iterator[pytest.Item]:
    """The same test without what keeps its calls from being paged, or from running packed, if it asks for that."""
    sources = _test_sources(item.cls)
    source = sources[max((name for name in sources if item.name.startswith(name)), key=len)]  # parameters are appended
    asks = "output_attentions" in source and "has_attentions" in source and item.cls.has_attentions
    if not asks or "use_cache=False" in source:
        return
    function = getattr(item.cls, item.name)
    for suffix, changes in FEWER_OUTPUTS.items():

        @functools.wraps(function)
        def variant(test: Any, changes: dict[str, Any] = changes) -> None:
            with mock.patch.multiple(type(test), **changes):
                function(test)

        name = item.name + suffix
        setattr(item.cls, name, variant)
        yield type(item).from_parent(item.parent, name=name)


@functools.cache
def _set_prompts(mixin: Any, kind: str) -> None:
    """Moves the prompts' padding to the left, or drops it; drops token types, which rule out the packed batch."""
    prepare = mixin.prepare_config_and_inputs_for_generate

    @functools.wraps(prepare)
    def prepare_with_other_mask(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        config, inputs = prepare(*args, **kwargs)
        inputs.pop("token_type_ids", None)
        mask = inputs.get("attention_mask")
        if mask is not None:
            rows, columns = (torch.arange(size, device=mask.device) for size in mask.shape)
            # One column of padding in the first row, two in the second, and so on.
            has_token = columns > rows[:, None]
            inputs["attention_mask"] = (has_token if kind == "left-padded" else torch.ones_like(mask)).to(mask.dtype)
        return config, inputs

    if kind != "as-written":
        mixin.prepare_config_and_inputs_for_generate = prepare_with_other_mask


@functools.cache
def _test_sources(cls: type) -> dict[str, str]:
    """The code of every test of a class, by the name it was defined with."""
    sources: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("tests."):
            text = textwrap.dedent(inspect.getsource(base))
            for node in ast.parse(text).body[0].body:  # type: ignore[attr-defined]
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                    sources[node.name] = ast.unparse(node)
    return sources


# ---------------------------------------------------------------------------------------------------- patching models


class CallCounter:
    """Wraps `GenerationMixin.generate` to patch models on the way in and to count where calls ran."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        """Makes a counter that is not installed yet.

        Args:
            settings: Of `hf_paged.patch`; `None`: everything stays stock, calls are only counted.
        """
        self.settings = settings
        self.counts: Counter[str] = Counter()  # calls of the running test, see `hf_generation_tests.Side`
        self.reasons: Counter[str] = Counter()  # why, of the calls that were not paged
        self.drops_hidden_states = False
        self._fall_back_reason = ""

    def install(self) -> None:
        """From now on every `generate()` of the process is counted and, in a patched run, patched."""
        original = GenerationMixin.generate

        @functools.wraps(original)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("cache_implementation") == "dynamic_full":
                del kwargs["cache_implementation"]
            if self.drops_hidden_states:
                kwargs.pop("output_hidden_states", None)
            refusal = self._patch(model)
            if refusal is not None:
                self._count("stock" if self.settings is None else "unsupported", refusal)
                return original(model, *args, **kwargs)
            before = model.paged.stats()
            self._fall_back_reason = "no forward ran"
            try:
                return original(model, *args, **kwargs)
            finally:
                after = model.paged.stats()
                if after.num_steps > before.num_steps:
                    self._count("paged")
                    # Token ids are only looked up where the engine runs a packed batch of real tokens.
                    if after.prefix_cache_query_tokens > before.prefix_cache_query_tokens:
                        self._count("flat")
                else:
                    self._count("stock", self._fall_back_reason)

        GenerationMixin.generate = generate
        if self.settings is not None:
            self._listen()

    def _count(self, kind: str, reason: str = "") -> None:
        self.counts[kind] += 1
        if reason:
            self.reasons[reason] += 1

    def _patch(self, model: Any) -> str | None:
        """Patches a model unless it is. Returns why it can't be."""
        if self.settings is None:
            return "stock run"
        import hf_paged

        if not isinstance(getattr(model, "paged", None), hf_paged.Engine):
            try:
                hf_paged.patch(model, **self.settings)
            except hf_paged.UnsupportedModelError as error:
                return str(error)
        return None

    def _listen(self) -> None:
        """Hears why calls run stock `generate()`, also the warnings that `warning_once` would swallow."""
        logger: Any = logging.getLogger("hf_paged.api.routing")
        warning_once: Callable[..., None] = logger.warning_once

        def listener(message: str, *args: Any, **kwargs: Any) -> None:
            self._fall_back_reason = message.rpartition("the paged cache: ")[2]
            warning_once(message, *args, **kwargs)

        logger.warning_once = listener


# ------------------------------------------------------------------------------------------------------------ results


class Recorder:
    """Seeds each test and writes its outcome."""

    def __init__(self, config: pytest.Config, calls: CallCounter) -> None:
        self._calls = calls
        self._seed: int = config.getoption("--generation-seed")
        self._out = Path(config.getoption("--generation-out")).open("w", encoding="utf-8")  # noqa: SIM115
        self._tests: dict[str, dict[str, Any]] = {}

    def write(self, record: dict[str, Any]) -> None:
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = str(report.longrepr)
            self.write({"test": report.nodeid, "outcome": "failed", "error": text[-400:], "seconds": 0.0})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self._calls.counts.clear()
        self._calls.reasons.clear()
        self._calls.drops_hidden_states = item.name.endswith(WITHOUT_LAYER_OUTPUTS)
        self._reseed()
        result = yield
        for thread in threading.enumerate():  # streamer tests generate in one
            # An executor's threads (weights are loaded in some) wait for more work; they need not be waited for.
            is_a_test_s = not thread.daemon and not thread.name.startswith("ThreadPoolExecutor")
            if is_a_test_s and thread is not threading.current_thread():
                thread.join(timeout=10)
        record = self._tests.pop(item.nodeid, {"outcome": "failed", "error": "no report", "seconds": 0.0})
        self.write({"test": item.nodeid, **record, "calls": self._calls.counts, "reasons": self._calls.reasons})
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = self._tests.setdefault(report.nodeid, {"outcome": "passed", "error": "", "seconds": 0.0})
        record["seconds"] = round(record["seconds"] + report.duration, 2)
        if report.failed and record["outcome"] != "failed":  # sub-tests report one by one
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr) if crash is None else f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"
            record["outcome"] = "needs hub" if NEEDS_HUB.search(text) else "failed"
            record["error"] = " ".join(text.split())[:400]
            record["traceback"] = str(report.longrepr)[-8000:]
        elif report.skipped and record["outcome"] == "passed":
            record["outcome"] = "skipped"
            record["error"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)

    def pytest_unconfigure(self) -> None:
        self._out.close()

    def _reseed(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)
        for name, module in list(sys.modules.items()):
            if name.endswith("test_modeling_common") and isinstance(getattr(module, "global_rng", None), random.Random):
                module.global_rng.seed(self._seed)


# ----------------------------------------------------------------------------------- older tests, and no network


def _leave_out_pipelines() -> None:
    module: Any = types.ModuleType("tests.test_pipeline_mixin")
    module.PipelineTesterMixin = type("PipelineTesterMixin", (), {})
    sys.modules[module.__name__] = module


def _replace_missing_names(files: list[Path]) -> Iterator[str]:
    """Gives transformers the names that the tests import from it and that it lacks; yields them."""
    tests_dirs = {folder for file in files for folder in file.parents if folder.name == "tests"}
    for file in [*files, *(file for folder in tests_dirs for file in folder.glob("*.py"))]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("transformers"):
                continue
            try:
                module = importlib.import_module(node.module or "")
            except ImportError:
                continue
            for alias in node.names:
                if not _has(module, alias.name):
                    full_name = f"{node.module}.{alias.name}"
                    setattr(module, alias.name, functools.partial(_raise_missing, full_name))
                    yield full_name


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
