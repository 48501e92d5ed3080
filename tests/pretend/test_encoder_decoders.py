"""Encoder-decoders on the pretended device: stock's tokens by Triton's kernels, and no step that waits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hf_paged
from helpers.encoder_decoders import build, sources
from helpers.pairs import assert_same

from .conftest import watched

BLOCK_SIZE, NEW, BEAMS, LENGTHS = 4, 6, 3, (9, 4)


@pytest.mark.parametrize("beams", [1, BEAMS])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_as_stock_and_without_waiting(name: str, beams: int) -> None:
    """Would break: an encoder that reads what lies on the host, metadata or keys of sources on another device than the
    layers, a bias that a kernel leaves out; a source for each beam."""
    model = build(name)
    if name == "t5":  # so that other tokens come out without it
        weight = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        torch.nn.init.normal_(weight, std=6, generator=torch.Generator().manual_seed(1))
    stock = model.to("cuda")
    paged = hf_paged.patch(copy.deepcopy(stock), block_size=BLOCK_SIZE, num_blocks=64)
    given: dict[str, Any] = {key: value.to("cuda") for key, value in sources(name, LENGTHS).items()}
    given |= {"max_new_tokens": NEW, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    expected = stock.generate(**given)
    with watched() as seen:
        found = paged.generate(**given)
    assert_same(expected, found)
    seen.assert_clean()
    waits = [event.site for event in seen.seen.of("wait", "sync", "pageable") if "model/sources.py" in event.site]
    assert len(waits) == 1, waits  # for all rows
    assert paged.paged.core.pool.attention.backend.name == "triton"
    stats, own = paged.paged.stats(), len(LENGTHS) * beams * -(-NEW // BLOCK_SIZE)
    assert stats.num_steps >= NEW and stats.peak_blocks_in_use <= own + sum(-(-n // BLOCK_SIZE) for n in LENGTHS)
    paged.paged.check_invariants()
    assert stats.num_free_blocks == stats.num_blocks
