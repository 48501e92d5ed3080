"""Encoder-decoders on the pretended device: stock's tokens by Triton's kernels, and nothing that makes a step wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hf_paged
from helpers.encoder_decoders import build, sources
from helpers.pairs import assert_same
from hf_paged.attention.metadata import AttentionMetadata

from .conftest import watched

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_as_stock_and_without_waiting(name: str, mode: str) -> None:
    stock = build(name).to("cuda")
    paged = hf_paged.patch(copy.deepcopy(stock), block_size=4, num_blocks=96)
    given = {key: value.to("cuda") for key, value in sources(name).items()}
    given |= {"max_new_tokens": 12, "do_sample": False} | MODES[mode]

    def run(model: Any) -> Any:
        torch.manual_seed(3)
        return model.generate(**given)

    expected = run(stock)
    paged.generate(given["input_ids"], max_new_tokens=2)
    with watched() as seen:
        found = run(paged)
    assert_same(expected, found)
    assert paged.paged.core.pool.attention.backend.name == "triton"
    print([(e.kind, e.detail, e.site) for e in seen.in_launch])
    print(seen.seen.where("sync", "pageable"))
    seen.assert_clean(1)
    paged.paged.check_invariants()
    assert paged.paged.stats().num_free_blocks == paged.paged.stats().num_blocks
