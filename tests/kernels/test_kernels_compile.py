"""The kernels compiled for GPUs that are not here (all of them: `make kernel-table`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.processes import ROOT, run_compiled

pytestmark = pytest.mark.ci

TARGETS = ("sm_80", "sm_90", "gfx942")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What some specialisations take."""
    out = tmp_path_factory.mktemp("kernels")
    options = ("--table", "--out", out, "--jobs", "1", "--target", *TARGETS)
    only = (
        "decode bf16 bf16 d128 b32 g4",
        "decode bf16 bf16 d128 b16 g4 m16 window+",
        "shared bf16 bf16 d128",
        "prefill bf16 e4m3 d128 b16 g1",
        "prefill bf16 bf16 d64 b16 g1 m128 bias",
        "decode bf16 bf16 d64 b16 g1 m16 bias",
        "write bf16 e4m3 d80",
        "decode bf16 int8 d128 b16 g4 m16 window+",
        "write bf16 int8 d128",
        "layers bf16 bf16 d128",
        "layers fp16 fp16 d128",
        "sampling bf16",
        "latents bf16 bf16 d512 b16 g128",
        "copy",
        "adapters bf16",
    )
    run_compiled(ROOT / "benchmarks/compile_kernels.py", *options, "--only", *only, seconds=240)
    rows: list[dict[str, Any]] = json.loads((out / "kernel_resources.json").read_text())["kernels"]
    return rows


def test_compiled_kernels_are_found_again_in_any_order() -> None:
    """Would break: a kernel that is compiled anew in each process that launches another one first."""
    program = """
import itertools, os
from hf_paged.kernels import paged_decode, paged_prefill, reshape_and_cache
kernels = paged_decode._decode_kernel, paged_prefill._prefill_kernel, reshape_and_cache._reshape_and_cache_kernel
for order in itertools.permutations(range(3)):
    if os.fork() == 0:
        keys = {place: kernels[place].cache_key for place in order}
        print(sorted(keys.items()), flush=True)
        os._exit(0)
    os.wait()
"""
    said = run_compiled("-c", program).splitlines()
    assert len(said) == 6 and len(set(said)) == 1


def test_all_kernels_compile_for_all_targets(kernels: list[dict[str, Any]]) -> None:
    """Would break: a kernel that only the interpreter understands."""
    names = {"decode", "combine", "prefill", "reshape_and_cache", "copy_blocks"}
    names |= {"rms_norm", "gate", "rotary", "latent_decode", "write_latents", "shared_decode"}
    names |= {"add_norm", "rotary_write", "sample", "noise", "shrink", "expand"}
    assert {(row["kernel"], row["target"]) for row in kernels} == {(n, t) for n in names for t in TARGETS}


def test_nothing_spills_and_everything_fits(kernels: list[dict[str, Any]]) -> None:
    """Would break: speed, by an order of magnitude, on the devices that a tile is too large for."""
    assert [row for row in kernels if row["fault"]] == []


def test_loads_are_wide_and_products_are_the_matrix_units(kernels: list[dict[str, Any]]) -> None:
    """Would break: addresses that the compiler can't see to be aligned or contiguous; tiles too small for `wgmma`."""
    # A bias, and the scales of int8, are numbers of four bytes.
    kernels = [row for row in kernels if not row["features"] and row["pool"] != "int8"]
    on_h100 = {row["kernel"]: row["instructions"] for row in kernels if row["target"] == "sm_90"}
    assert on_h100["decode"]["copies of 16 bytes"] >= 32 and "narrower copies" not in on_h100["decode"]
    assert on_h100["decode"]["mma"] >= 32
    assert on_h100["shared_decode"]["wgmma"] >= 16 and "narrower copies" not in on_h100["shared_decode"]
    assert on_h100["prefill"]["wgmma"] >= 16 and on_h100["prefill"]["copies of 16 bytes"] >= 16
    assert "loads of 16 bytes" in on_h100["copy_blocks"] and "loads of 16 bytes" in on_h100["reshape_and_cache"]
    assert on_h100["latent_decode"]["wgmma"] >= 16 and on_h100["latent_decode"]["copies of 16 bytes"] >= 16
    assert "narrower copies" not in on_h100["shrink"] and on_h100["shrink"]["mma"] > 0
    on_a100 = {row["kernel"]: row["instructions"] for row in kernels if row["target"] == "sm_80"}
    assert on_a100["decode"]["copies of 16 bytes"] >= 32 and on_a100["prefill"]["mma"] >= 64
    on_mi300 = {row["kernel"]: row["instructions"] for row in kernels if row["target"] == "gfx942"}
    assert on_mi300["decode"]["mfma"] > 0 and on_mi300["prefill"]["mfma"] > 0


def test_products_are_rounded_before_they_are_added(kernels: list[dict[str, Any]]) -> None:
    """Would break: rotary embeddings that are not the library's bit for bit, and are then left to it."""
    rotary = [row for row in kernels if row["kernel"] in ("rotary", "rotary_write") and row["target"] == "sm_90"]
    assert len({row["dtype"] for row in rotary}) == 2
    assert not [row for row in rotary if "fused in half precision" in row["instructions"]]


def test_draws_take_the_processors_logarithm(kernels: list[dict[str, Any]]) -> None:
    """Would break: other draws than torch's, in their last bits, so that torch is left to choose all tokens."""
    own = {(row["kernel"], row["target"]) for row in kernels if "processor's own log2" in row["instructions"]}
    assert own == {(kernel, target) for kernel in ("sample", "noise") for target in ("sm_80", "sm_90")}
