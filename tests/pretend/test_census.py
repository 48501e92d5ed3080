"""The written census of kernels against what the models launch on a device, steps overlapping and recorded."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # they import each other
census, soaking = (importlib.import_module(name) for name in ("kernel_census", "kernel_soak"))


@pytest.mark.parametrize("name", soaking.MODELS)
def test_serving_launches_what_is_written_down(name: str) -> None:
    """Would break: requests that wait while a kernel compiles that no warm-up thought of."""
    cell = census.Cell(name, "sm_90", "auto")
    assert census.differences({key: {cell} for key in soaking.soak(cell, "cuda:0")}, census.read(), [cell]) == []
