"""Calls with pictures on the pretended device: stock's tokens, and nothing that makes a step wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_paged
from helpers.models import random_ids
from helpers.wrappers import asking, build_wrapper

from .conftest import watched

KINDS = [
    ("llava", {}, True),
    ("llava", {"num_beams": 2}, False),
    ("qwen3_vl", {}, False),  # with more than an embedding: behind the first layers,
    ("gemma4", {}, True),  # and for each layer
    ("gemma3", {}, False),  # under masks
]


@pytest.mark.parametrize(("name", "arguments", "graphs"), KINDS)
def test_pictures(name: str, arguments: dict[str, Any], graphs: bool) -> None:
    """Would break: devices that mix, a step that waits, embeddings gone before a step has read them."""
    stock = build_wrapper(name).to("cuda")
    # Few sizes of graphs: to record one takes the interpreter seconds.
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 2 if graphs else 4, "cuda_graphs": graphs}
    paged = hf_paged.patch(copy.deepcopy(stock), **settings)
    call = asking(name, (0, 1), ((3, 4), (1, 2)))
    call = {key: value.to("cuda") if isinstance(value, Tensor) else value for key, value in call.items()}
    expected = stock.generate(**copy.deepcopy(call), max_new_tokens=5, **arguments)
    # The first steps find out which layers can be fused, and record the graphs.
    paged.generate(random_ids(1, 5).to("cuda"), max_new_tokens=2, eos_token_id=None)
    with watched() as seen:
        found = paged.generate(**copy.deepcopy(call), max_new_tokens=5, **arguments)
    assert torch.equal(expected, found)
    assert bool(seen.seen.of("replay")) == graphs
    seen.assert_clean()
