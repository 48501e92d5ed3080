"""A model on the second of two pretended devices, while its callers' current one is the first."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import pytest
import torch

import hf_paged
from helpers import device_modes
from helpers.device_modes import MODES
from helpers.models import build, random_ids
from helpers.pairs import assert_same
from helpers.state_models import build_state_model
from hf_paged.model import cuda_graph

from .conftest import watched

SECOND = "cuda:1"
ESSENTIAL = ("sampling", "swap", "user_processor")
CASES = [
    *(
        pytest.param("llama", mode, False, marks=() if mode in ESSENTIAL else pytest.mark.slow)
        for mode in MODES
        if MODES[mode].is_exact
    ),
    ("llama", "greedy", True),
    ("lfm2", "greedy", False),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("gpt2", "sampling", True),
            ("gemma2", "sampling", False),
            ("mixtral", "greedy", False),
            ("deepseek_v2", "greedy", False),
            ("mamba2", "greedy", False),
        )
    ),
]


@pytest.mark.parametrize(("name", "mode", "graphs"), CASES)
def test_as_stock(name: str, mode: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a kernel, a tensor, an event or a generator of whichever device happens to be the current one."""
    monkeypatch.setattr(device_modes, "place", SECOND)
    monkeypatch.setattr(cuda_graph, "capture_sizes", lambda max_num_seqs: [max_num_seqs])
    own = replace(MODES[mode], entries=None)
    stock = (build_state_model(name) if name in ("lfm2", "mamba2") else build(name)).to(SECOND)
    settings = {"block_size": 4, "num_blocks": 400, "max_num_seqs": 4, "cuda_graphs": graphs} | own.settings
    paged = hf_paged.patch(copy.deepcopy(stock), **settings)
    expected = own.call(stock)
    paged.generate(random_ids(1, 5).to(SECOND), max_new_tokens=2, eos_token_id=None)
    gc.collect()  # what other tests left
    before, taken = paged.paged.stats(), torch.cuda.memory_allocated(0)
    with watched() as seen:
        found = own.call(paged)
    assert_same(expected, found)
    assert getattr(paged.paged.stats(), own.reached) > getattr(before, own.reached)
    assert paged.paged.core.pool.attention.backend.name == "triton" and torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == taken, "something is left on the other device"
    assert bool(seen.seen.of("replay")) == graphs
    seen.assert_clean()
    paged.paged.check_invariants()
