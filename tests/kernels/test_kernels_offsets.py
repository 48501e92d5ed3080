"""Addresses over pools far beyond 2^31 elements (`helpers/kernel_offsets.py` says how)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import ROOT, run_compiled

pytestmark = pytest.mark.ci

OVER_THE_POOL = ("_decode_kernel", "_prefill_kernel", "_reshape_and_cache_kernel", "_copy_blocks_kernel")
OVER_THE_POOL += ("_latent_decode_kernel", "_write_latents_kernel", "_shared_decode_kernel")
OVER_THE_POOL += ("_convolve_kernel", "_scan_kernel")


def offsets(root: Path = ROOT, *arguments: str) -> dict[str, Any]:
    """What the program finds."""
    found: dict[str, Any] = json.loads(
        run_compiled(ROOT / "tests/helpers/kernel_offsets.py", *arguments, python_path=root)
    )
    return found


def test_no_address_overflows() -> None:
    """Would break: keys written into another request's blocks, or outside of the pool, on GPUs with much memory."""
    found = offsets()
    assert {name.split()[0] for name in found} >= set(OVER_THE_POOL)
    for name, launch in found.items():
        assert launch["faults"] == [], name
        if name.startswith(OVER_THE_POOL):
            assert launch["furthest"] > 2**36, name  # it has seen the far end of the pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "wide", "narrow", "kernels"),
    [
        (
            "online_softmax.py",
            "blocks.to(tl.int64)",
            "blocks",
            {"_decode_kernel", "_prefill_kernel", "_shared_decode_kernel"},
        ),
        ("reshape_and_cache.py", "other=-1)", "other=-1).to(tl.int32)", {"_reshape_and_cache_kernel"}),
        (
            "triton_scan.py",
            "+ tl.load(pages + page)",
            "+ tl.load(pages + page).to(tl.int32)",
            {"_convolve_kernel", "_scan_kernel"},
        ),
        ("latent_attention.py", "blocks.to(tl.int64)", "blocks", {"_latent_decode_kernel"}),
        ("copy_blocks.py", "(sources + pair)", "(sources + pair).to(tl.int32)", {"_copy_blocks_kernel"}),
        ("copy_blocks.py", "(destinations + pair)", "(destinations + pair).to(tl.int32)", {"_copy_blocks_kernel"}),
    ],
)
def test_a_narrow_product_is_found(tmp_path: Path, file: str, wide: str, narrow: str, kernels: set[str]) -> None:
    """Would break: the test above, which would pass whatever the kernels do."""
    shutil.copytree(ROOT / "hf_paged", tmp_path / "hf_paged", ignore=shutil.ignore_patterns("assets", "__pycache__"))
    path = tmp_path / "hf_paged/kernels" / file
    text = path.read_text()
    assert wide in text
    path.write_text(text.replace(wide, narrow))
    found = offsets(tmp_path, "--quick")
    assert {name.split()[0] for name, launch in found.items() if launch["faults"]} == kernels
