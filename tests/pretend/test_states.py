"""Models that keep states, on the pretended device: stock's tokens, nothing that makes a step wait, decodes replayed.

The essential part runs by default; `-m ""` is the full product.
"""

from __future__ import annotations

import copy
import gc
import logging
from dataclasses import replace
from typing import Any

import pretend_cuda
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hf_paged
from helpers import device_modes
from helpers.device_modes import Mode, prompts, ragged
from helpers.models import random_ids
from helpers.pairs import assert_same
from helpers.state_models import STATE_MODELS, build_state_model
from hf_paged.model import cuda_graph
from hf_paged.model.cache_argument import cache_argument

from .conftest import watched

SETTINGS = {"block_size": 4, "num_blocks": 400, "max_num_seqs": 4, "cuda_graphs": None}
WHOLE_PROMPTS = ("jamba", "mamba", "falcon_mamba", "zamba")  # whose scan takes no state along into several tokens
WRONG_IN_STOCK = (*WHOLE_PROMPTS, "mamba2")  # at a second turn: ours is what stock makes of the whole text
PADDED = ("inkling",)  # whose own attention makes masks, and waits for them


def _turns(model: Any) -> Tensor:
    """Two over one cache."""
    cache: Any = None
    if hasattr(model, "paged"):
        cache = hf_paged.PagedCache(model)
    elif model.config.model_type not in WRONG_IN_STOCK:
        cache = DynamicCache(config=model.config)
    kept = {} if cache is None else {cache_argument(type(model).forward): cache}
    ids = model.generate(prompts(2, 9), max_new_tokens=4, eos_token_id=None, **kept)
    ids = torch.cat([ids, prompts(2, 3)], dim=1)
    found: Tensor = model.generate(ids, max_new_tokens=4, eos_token_id=None, **kept)
    return found


def _beams(model: Any) -> Any:
    return model.generate(**ragged(), max_new_tokens=4, num_beams=2, eos_token_id=None)


GENERAL = ("greedy", "sampling", "prefix_hits", "steps_in_turn", "processors", "threads", "submit")
MODES = {name: device_modes.MODES[name] for name in GENERAL} | {
    "eager": replace(device_modes.MODES["greedy"], settings={"cuda_graphs": False}),
    "samples_in_chunks": replace(device_modes.MODES["samples"], settings={"max_num_batched_tokens": 4}),
    "turns": Mode(_turns, entries=None),
    "swapped_beams": Mode(_beams, {"preemption": "swap"}, entries=None, reached="num_swapped_out"),
    "recomputed_beams": Mode(_beams, {"preemption": "recompute"}, entries=None, reached="num_preemptions"),
}
ESSENTIAL = {
    ("lfm2", "greedy"), ("lfm2", "samples_in_chunks"), ("lfm2", "turns"), ("lfm2", "swapped_beams"),
    ("mamba", "greedy"), ("mamba", "samples_in_chunks"), ("mamba", "swapped_beams"), ("falcon_mamba", "turns"),
    ("mamba2", "sampling"), ("mamba2", "turns"), ("mamba2", "prefix_hits"), ("mamba2", "recomputed_beams"),
    ("qwen3_next", "prefix_hits"), ("nemotron_h", "sampling"), ("kimi_linear", "greedy"), ("inkling", "greedy"),
    ("mamba2", "eager"), ("lfm2", "submit"),
}  # fmt: skip
CASES = [
    pytest.param(name, mode, marks=() if (name, mode) in ESSENTIAL else pytest.mark.slow)
    for name in STATE_MODELS
    for mode in MODES
    if mode != "prefix_hits" or name not in WHOLE_PROMPTS
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_as_stock_and_without_waiting(
    name: str, mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would break: a step that is recorded or replayed without the states of its rows, or leaves them changed."""
    own = MODES[mode]
    monkeypatch.setattr(cuda_graph, "capture_sizes", lambda max_num_seqs: [max_num_seqs])  # to record takes longest
    stock = build_state_model(name).to("cuda")
    stock.set_experts_implementation("batched_mm")  # in float32 the other one waits in every step
    paged = hf_paged.patch(copy.deepcopy(stock), **SETTINGS)
    if "preemption" in own.settings:
        small = {"num_blocks": paged.paged.core.manager.most_blocks(13, 13) + 2, "max_num_batched_tokens": 8}
        paged = hf_paged.patch(copy.deepcopy(stock), **SETTINGS | small | own.settings)
    elif own.settings:
        paged = hf_paged.patch(copy.deepcopy(stock), **SETTINGS | own.settings)
    expected = own.call(stock)
    paged.generate(random_ids(1, 5).to("cuda"), max_new_tokens=2, eos_token_id=None)  # finds out what can be fused
    before = paged.paged.stats()
    with watched() as seen, caplog.at_level(logging.WARNING, logger="hf_paged"):
        found = own.call(paged)
    after = paged.paged.stats()
    assert_same(expected, found)
    assert getattr(after, own.reached) > getattr(before, own.reached)
    assert bool(seen.seen.of("replay")) == (name not in PADDED and mode != "eager")
    assert not [record for record in caplog.records if record.name.startswith("hf_paged")], "nothing to warn of"
    if name not in PADDED:
        seen.assert_clean(own.entries)
    del found
    gc.collect()
    paged.paged.check_invariants()
    assert paged.paged.stats().num_free_blocks == after.num_blocks


@pytest.mark.parametrize("name", ["mamba2", "lfm2"])
def test_warm_up(name: str) -> None:
    """Nothing is compiled afterwards; it changes no table, also beside a request and a kept cache."""
    stock = build_state_model(name).to("cuda")
    small = {"num_blocks": 20, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    model = hf_paged.patch(copy.deepcopy(stock), warm_up=True, **SETTINGS | small)
    ids = prompts(1, 9)
    expected = stock.generate(ids, max_new_tokens=6, eos_token_id=None)
    cache = hf_paged.PagedCache(model)
    with pretend_cuda.watch() as seen:
        model(ids[:, :5], **{cache_argument(type(stock).forward): cache})
        request = model.paged.submit(ids[0].tolist(), max_new_tokens=6, eos_token_id=None, do_sample=False)
        done = model.paged.warm_up()
        assert request.result(100).token_ids == expected[0, 9:].tolist()
    assert not seen.of("compile") and seen.of("replay")
    sizes = model.paged.core.runner.graphs.held.sizes
    assert sizes == [1, 2] and done.num_graphs >= 2 and done.no_graphs is None
    assert not model.paged.core.kv_cache.tensor[-1].any()
    one_by_one = [model(ids[:, place : place + 1], **{cache_argument(type(stock).forward): cache}) for place in (5, 6)]
    torch.testing.assert_close(one_by_one[1].logits, stock(ids[:, :7]).logits[:, -1:], rtol=1e-3, atol=1e-4)
    model.paged.check_invariants()
