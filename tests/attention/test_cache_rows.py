"""Rows of a `PagedCache`: operations that wait until something reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_paged
from helpers.models import random_ids
from helpers.pairs import Pair
from hf_paged import PagedCache
from hf_paged.engine.row_store import RowStore

MakePair = Callable[..., Pair]

READERS: dict[str, Callable[[Pair, PagedCache], Any]] = {
    "forward": lambda pair, cache: None,
    "stats": lambda pair, cache: pair.engine.stats(),
    "snapshot": lambda pair, cache: pair.engine.snapshot(),
    "num_running": lambda pair, cache: pair.engine.num_running,
    "rows": lambda pair, cache: cache.sequences,
    "keys": lambda pair, cache: cache.layers[0].keys,
    "copy": lambda pair, cache: copy.deepcopy(cache),
    "release": lambda pair, cache: pair.engine.release(),
    "another's step": lambda pair, cache: pair.engine.submit([5, 6], max_new_tokens=1).result(20),
}


@pytest.mark.parametrize("reader", READERS)
def test_operations_become_one_change(pair: Pair, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: rows that are forked only to be freed; or a reader that finds the rows of before."""
    ids, more = random_ids(4, 6), random_ids(5, 1, seed=2)
    num_forks = 0
    fork = RowStore.fork_sequence

    def counted(store: RowStore, sequence: Any, apart: bool = False) -> Any:
        nonlocal num_forks
        num_forks += not apart
        return fork(store, sequence, apart)

    def choose(model: Any, cache: Any) -> Any:
        model(ids, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        cache.crop(-1)
        cache.reorder_cache(torch.tensor([3, 3, 3, 0, 1, 2, 6, 6, 6, 9, 10, 11]))
        cache.crop(-1)
        cache.batch_select_indices(torch.tensor([0, 3, 6, 7, 9]))
        return cache

    monkeypatch.setattr(RowStore, "fork_sequence", counted)
    with torch.no_grad():
        expected = pair.stock(more, past_key_values=choose(pair.stock, DynamicCache())).logits
        cache = choose(pair.paged, PagedCache(pair.paged))
        assert (cache.batch_size, cache.get_seq_length(), num_forks) == (5, 4, 0), "nothing has read it yet"
        with pytest.raises(ValueError, match="numbers from 0 to 4"):
            cache.reorder_cache(torch.tensor([5]))
        cache.retire([4])
        READERS[reader](pair, cache)
        assert num_forks == (reader != "forward"), "rows 2 and 3 are equal"
        found = pair.paged(more, past_key_values=cache).logits
    torch.testing.assert_close(found[:4], expected[:4])
    assert not found[4].any() and num_forks == 1
    del cache


def fill(pair: Pair, cache: PagedCache, num_rows: int, num_tokens: int) -> None:
    """With keys that can't be computed again: of tokens behind a hole in the mask."""
    mask = torch.ones(num_rows, num_tokens, dtype=torch.int64)
    mask[:, 1] = 0
    with torch.no_grad():
        pair.paged(random_ids(num_rows, num_tokens), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize(
    "give_back",
    [lambda cache: cache.crop(-10), lambda cache: cache.batch_select_indices(torch.tensor([1])), PagedCache.reset],
    ids=["crop", "select", "reset"],
)
def test_what_an_operation_gives_back_is_free_for_the_next_step(
    make_pair: MakePair, give_back: Callable[[PagedCache], None]
) -> None:
    """Would break: a request that finds no room beside blocks whose cache has given them up."""
    pair = make_pair(block_size=2, num_blocks=16, preemption="recompute")
    cache = PagedCache(pair.paged)
    fill(pair, cache, 2, 14)
    with pytest.raises(hf_paged.OutOfBlocksError):
        pair.engine.submit(random_ids(1, 6), max_new_tokens=3).result(20)
    give_back(cache)
    assert len(pair.engine.submit(random_ids(1, 6), max_new_tokens=3).result(20).token_ids) == 3
    del cache


def test_a_crop_that_turns_out_to_be_impossible_is_told_by_the_cache_alone(make_pair: MakePair) -> None:
    """Would break: keys behind a window that were never there, in silence; or an error that ends all other requests."""
    pair, ids = make_pair("mistral", block_size=2), random_ids(1, 40)
    with torch.no_grad():
        first = PagedCache(pair.paged)
        pair.paged(ids[:, :30], past_key_values=first)
        cache = PagedCache(pair.paged)
        cache.activate_past_recording()
        pair.paged(ids[:, :31], past_key_values=cache, logits_to_keep=1)
        assert pair.engine.stats().prefix_cache_hit_tokens > 20
        next(pair.paged.parameters()).mul_(1.5)  # older weights: it can't be computed again
        pair.paged(ids[:, 31:33], past_key_values=cache)
        cache.crop(-28)
        assert len(pair.engine.submit([5, 6], max_new_tokens=2).result(20).token_ids) == 2
        with pytest.raises(RuntimeError, match=r"reset\(\) the cache"):
            pair.paged(ids[:, 5:], past_key_values=cache)
        cache.reset()
        pair.paged(ids, past_key_values=cache)
    del first, cache


def test_a_dropped_cache_does_not_hold_up_a_move(pair: Pair) -> None:
    """Would break: a model that can't be moved for keys that its user gave up, because they can't be computed again."""
    cache = PagedCache(pair.paged)
    fill(pair, cache, 1, 6)
    del cache
    pair.paged.double()
    with torch.no_grad():
        found = pair.paged(random_ids(1, 6), past_key_values=PagedCache(pair.paged)).logits
        torch.testing.assert_close(found, pair.stock.double()(random_ids(1, 6)).logits)
