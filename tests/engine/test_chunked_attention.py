"""Layers that cut a sequence into chunks: what they see, what they hold, and what stock does at their edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import hf_paged
from helpers.models import build, random_ids
from helpers.pairs import MakePair
from hf_paged.attention.metadata import AttentionMetadata

CHUNK = 12  # of the table's Llama 4
NULL = 99


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=5), st.sampled_from([1, 2, 4]))
def test_a_sequence_for_each_chunk(lens: list[tuple[int, int]], size: int) -> None:
    """Each new token sees, through its chunk's table, the slots of its chunk's tokens up to its own."""
    query_lens = np.array([new for new, _ in lens])
    seq_lens = np.array([new + past for new, past in lens])
    tables = np.arange(len(lens) * 80).reshape(len(lens), 80)
    plain = AttentionMetadata(tables, query_lens, seq_lens, size, NULL, torch.device("cpu"))
    cut = plain.in_chunks(tables, CHUNK)
    assert torch.equal(cut.slot_mapping, plain.slot_mapping), "a token is written somewhere else"
    rows = np.repeat(np.arange(len(cut.host_query_lens)), cut.host_query_lens)
    places = np.arange(len(rows)) - cut.host_start_loc[rows]
    expected = [(row, past + n) for row, (new, past) in enumerate(lens) for n in range(new)]
    for token, (row, position) in enumerate(expected):
        own = rows[token]
        last = cut.host_seq_lens[own] - cut.host_query_lens[own] + places[token]
        seen = [int(cut.host_tables[own][n // size]) * size + n % size for n in range(last + 1)]
        first = position // CHUNK * CHUNK
        assert seen == [int(tables[row][n // size]) * size + n % size for n in range(first, position + 1)]


def test_found_out(make_pair: MakePair) -> None:
    report = hf_paged.is_supported(build("llama4"))
    assert [(layer.window, layer.chunk) for layer in report.traits.layers] == [(CHUNK, CHUNK), (None, None)] * 2
    assert report.traits.runs_packed and report.traits.tells_positions
    with pytest.raises(ValueError, match="chunks of 12 tokens, which blocks of 5 don't divide"):
        make_pair("llama4", block_size=5)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"attention_backend": "torch"}], ids=str)
def test_blocks_go_back(make_pair: MakePair, settings: dict[str, Any]) -> None:
    """Would break: chunks kept for good, or keys given back that are still seen."""
    pair = make_pair("llama4", block_size=4, **settings)
    ids = random_ids(1, 31)
    pair.engine.pause()
    request = pair.engine.submit(ids[0], max_new_tokens=20, do_sample=False, eos_token_id=None)
    while pair.engine.step() is not None:
        for group in pair.engine.snapshot()["groups"]:
            for sequence in group["sequences"]:
                full, chunked = (sum(block >= 0 for block in table) for table in sequence["block_tables"])
                assert sequence["num_tokens"] < 40 or chunked <= CHUNK // 4 + 2 < full
    pair.engine.resume()
    expected = pair.stock.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert request.result().token_ids == expected[0, 31:].tolist()


def test_scales_by_position(make_pair: MakePair) -> None:
    """Would break: layers that reckon with the length of what is cached, once it is long (here: 4 tokens)."""
    config = build("llama4").config
    config.floor_scale, config.attn_scale = 4, 2.0
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(build("llama4").state_dict())
    pair = make_pair(model, max_num_batched_tokens=6)
    prompts = [random_ids(1, length, seed=length) for length in (19, 5, 11)]
    alone = [pair.stock.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None) for ids in prompts]
    requests = [pair.engine.submit(ids[0], max_new_tokens=9, do_sample=False, eos_token_id=None) for ids in prompts]
    for ids, expected, request in zip(prompts, alone, requests, strict=True):
        assert request.result().token_ids == expected[0, ids.shape[1] :].tolist()
