"""The written census of kernels against what serving launches (`kernel_soak.py`), and what is compiled of it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.processes import ROOT, run_compiled
from hf_paged.attention.backends.triton import TritonBackend
from hf_paged.kernels.triton_layers import TritonLayers

sys.path.insert(0, str(ROOT / "benchmarks"))  # they import each other
compiling, census, soaking = (
    importlib.import_module(name) for name in ("compile_kernels", "kernel_census", "kernel_soak")
)

QUICK = [census.Cell("Qwen3-0.6B", "sm_80", "fp8_e4m3")]  # `tests/pretend` has one a model


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=() if cell in QUICK else pytest.mark.slow, id=str(cell).replace(" ", "-"))
        for cell in soaking.CELLS
    ],
)
def test_serving_launches_what_is_written_down(cell: Any) -> None:
    """Would break: requests that wait while a kernel compiles which the warm-up did not think of, or spills.

    `make kernel-census` writes it anew; what changes there deserves a look.
    """
    assert census.differences({key: {cell} for key in soaking.soak(cell)}, census.read(), [cell]) == []


def test_both_kinds_of_differences_are_found() -> None:
    written = census.read()
    cell = soaking.CELLS[0]
    one, *others = (key for key in written if cell in written[key])
    fewer = {key: {cell} for key in others}
    (line,) = census.differences(fewer, written, [cell])
    assert line.startswith("not launched") and str(one) in line
    (line,) = census.differences(fewer | {replace(one, options=()): {cell}}, written | {one: set()}, [cell])
    assert line.startswith("launched, not written down")


def test_a_model_has_few_kernels() -> None:
    """Would break: a constant that varies from step to step, or an integer that Triton makes one of."""
    written = census.read()
    for cell in soaking.CELLS:
        names = [key.name for key in written if cell in written[key]]
        if cell.model in soaking.STATE_MODELS:  # steps of one token a row, and others
            assert names.count("convolve") == 2 and names.count("scan") <= 1 and len(names) <= 3, cell
            continue
        for name in ("copy_blocks", "combine"):
            assert names.count(name) == 1, cell
        assert names.count("shared_decode") == ("decode" in names), cell  # of layers without a window
        assert names.count("reshape_and_cache") + names.count("write_latents") == 1, cell
        num_kinds = names.count("decode") + names.count("latent_decode")  # of layers: with a window and without
        assert num_kinds in (1, 2) and names.count("prefill") <= 3 * num_kinds, cell  # as many sizes of its tile
        assert names.count("gate") <= 1 and names.count("rms_norm") <= 2, cell
        assert names.count("shrink") == 1 and names.count("expand") <= 2, cell
        assert names.count("sample") == names.count("noise") == 1 and len(names) <= 23, cell


def test_copies_are_one_kernel_whatever_their_number() -> None:
    """Would break: the destinations lie behind the sources, aligned for an even number of pairs alone."""
    pool = torch.zeros(20, 2, 2, 2, 4, 16)
    backend = TritonBackend(pool)
    with census.record() as found:
        for count in (1, 2, 3, 4, 8):
            backend.copy_blocks(pool, [(source, source + 10) for source in range(count)])
    assert list(found.values()) == [5]


def test_every_line_is_compiled_for_its_targets() -> None:
    """Would break: a kernel that is first compiled on the GPU it can't be compiled for."""
    written, targets = census.read(), ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
    jobs = compiling.of_census(written, targets)
    assert {key for _, key, _ in jobs} == set(written)
    count = {target: sum(its == target for _, _, its in jobs) for target in targets}
    assert count["sm_90"] == count["sm_100"] and all(count.values())


def test_every_launch_says_whether_products_are_fused() -> None:
    """Would break: results that change with the release of Triton, whose defaults differ."""
    assert [key for key in census.read() if "enable_fp_fusion" not in dict(key.options)] == []


def test_all_kernels_are_compiled_for_all_targets() -> None:
    names = {key.name for key in census.read()}
    for target in compiling.TARGETS:
        assert {key.name for _, key, _ in compiling.of_cases((case, target) for case in compiling.ONE_EACH)} >= names


def test_faults() -> None:
    fine = {"registers": 255, "shared_memory": 200_000, "spilled_bytes": 8, "spills_in_loops": 0}
    assert compiling.fault(fine, "sm_90") == ""
    assert "shared memory" in compiling.fault(fine, "sm_80")
    spilling = fine | {"spills_in_loops": 2, "shared_memory": 0}
    assert "in loops" in compiling.fault(spilling, "sm_90") and "in loops" in compiling.fault(spilling, "gfx942")
    assert compiling.fault(spilling, "gfx1100") == ""


def test_spills_inside_loops_are_told_from_others() -> None:
    lines = ["spill", "a:", "b:", "spill", "to b", "spill", "to a", "to c", "spill", "c:", "spill"]
    assert compiling.inside_loops(lines, r"(\w):", r"to (\w)", "spill") == 2


def test_a_compiled_part_is_kept(tmp_path: Path) -> None:
    """Would break: a run that was stopped and begins anew; a table of half of it."""
    options = ("--target", "sm_80", "--only", "copy_blocks", "gate", "--jobs", "1", "--out", tmp_path)
    said = [run_compiled(ROOT / "benchmarks/compile_kernels.py", *options) for _ in range(2)]
    rows, table = sorted(tmp_path.iterdir())
    num_rows = len(rows.read_text().splitlines())
    assert said[0] == said[1] and f"{num_rows} kernels compiled, 0 faults" in said[0]
    gates = [key for key, cells in census.read().items() if key.name == "gate" and "sm_80" in {of.gpu for of in cells}]
    assert num_rows > len(gates) and "| copy_blocks | " in table.read_text()


def test_keys_are_as_specific_as_tritons() -> None:
    """An integer that is 1 becomes a constant, a multiple of 16 is known as one, and so is where a pointer points."""

    def key(*strides: int, offset: int = 0) -> Any:
        gate, up = (torch.zeros(4 * stride + 8 + offset)[offset:].as_strided((4, 8), (stride, 1)) for stride in strides)
        with census.record() as found:
            TritonLayers(torch.float32).gate(gate, up, 1.0, 0.0)
        return next(iter(found))

    arguments = dict(key(16, 24).arguments)
    assert (arguments["stride_gate"], arguments["stride_up"]) == ("i32:16", "i32")
    assert (arguments["gate"], arguments["num_rows"]) == ("*fp32:16", "i32")
    assert dict(key(16, 24, offset=1).arguments)["gate"] == "*fp32"
    assert dict(key(16, 24).constants)["DIM"] == "8"
