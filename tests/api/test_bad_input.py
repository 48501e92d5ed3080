"""What can't work is refused at the call with the value in the message, and leaves the pool as it was."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    LogitsProcessorList,
    StaticCache,
)

import hf_paged
from helpers.models import BOS, EOS, PAD, VOCAB, build, name_of, ragged_batch, random_ids
from helpers.pairs import MakePair, Pair, assert_same_cache, logged_messages, new_cache
from helpers.user_code import USER_CODE, Boom, Fuse, FusedProcessor, NextToken
from hf_paged import PagedCache, PagedConfig


@contextmanager
def raises_and_recovers(pair: Pair, error: type[BaseException], match: str) -> Iterator[None]:
    """The block must raise; afterwards nothing is held that was free before, and the next calls work."""
    free = pair.engine.stats().num_free_blocks
    with pytest.raises(error, match=match):
        yield
    pair.engine.check_invariants()
    stats = pair.engine.stats()
    assert stats.num_free_blocks == (free or stats.num_blocks), "the failed call kept blocks"
    pair.both(lambda model: model.generate(**ragged_batch(), max_new_tokens=3, num_beams=2))
    assert pair.engine.stats().num_free_blocks == (free or stats.num_blocks)


@pytest.mark.parametrize("num_blocks", [10**12, 10**30])
def test_a_pool_that_no_machine_holds(num_blocks: int) -> None:
    model = hf_paged.patch(build("llama"), num_blocks=num_blocks)
    message = rf"num_blocks={num_blocks} .*need [\d,]+ bytes.*has [\d,]+ bytes in all: [\d,]+ blocks would fit"
    for call in (model.generate, model.paged.submit):
        with pytest.raises(ValueError, match=message):
            call(torch.tensor([[5, 6]]), max_new_tokens=2)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_waiting"])
@pytest.mark.parametrize("value", [sys.maxsize, 10**30])
def test_a_limit_may_be_as_high_as_one_likes(make_pair: MakePair, name: str, value: int) -> None:
    pair = make_pair(**{name: value})
    pair.generate(**ragged_batch(), max_new_tokens=3)
    assert pair.engine.generate([[5, 6], [7]], max_new_tokens=2)[1].token_ids


def test_patching_again(pair: Pair) -> None:
    """Would break: settings that silently stay, or change under live caches."""
    engine = pair.engine
    assert hf_paged.patch(pair.paged, block_size=4, num_blocks=256) is pair.paged
    assert hf_paged.patch(pair.paged, PagedConfig(block_size=4, num_blocks=256)) is pair.paged
    with pytest.raises(ValueError, match=r"patched with block_size=4; unpatch it first .* with block_size=8$"):
        hf_paged.patch(pair.paged, block_size=8, num_blocks=256)
    assert pair.engine is engine
    pair.generate(**ragged_batch(), max_new_tokens=4)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 2}],
    ids=name_of,
)
def test_prompt_that_can_never_fit(make_pair: MakePair, arguments: dict[str, Any]) -> None:
    """Would break: a call that runs for a while and then fails, or waits for ever."""
    pair = make_pair(block_size=4, num_blocks=8)
    with raises_and_recovers(pair, ValueError, r"30 tokens and up to \d+ new .* blocks of 4 tokens, the pool has 8"):
        pair.paged.generate(random_ids(1, 30), max_new_tokens=9, **arguments)


def test_length_that_just_fits(make_pair: MakePair) -> None:
    """Would break: refusing what fits by a token, or accepting what doesn't."""
    pair = make_pair(block_size=4, num_blocks=8)
    # 32 keys: the last token needs none.
    pair.generate(input_ids=random_ids(1, 30), max_new_tokens=3, eos_token_id=None)
    with raises_and_recovers(pair, ValueError, "num_blocks=9"):
        pair.paged.generate(random_ids(1, 30), max_new_tokens=4)
    padded = ragged_batch((24, 3))  # padding takes no slot
    padded = {name: torch.nn.functional.pad(value, (10, 0)) for name, value in padded.items()}
    pair.generate(**padded, max_new_tokens=3)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=name_of)
def test_empty_prompt(pair: Pair, arguments: dict[str, Any]) -> None:
    with raises_and_recovers(pair, ValueError, "empty"):
        pair.paged.generate(torch.empty((1, 0), dtype=torch.long), max_new_tokens=4, **arguments)


NO_ROWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "masked": {"attention_mask": torch.ones(0, 4, dtype=torch.long)},
    "details": {"return_dict_in_generate": True},
    "processor": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores])},
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_batch_of_no_rows(pair: Pair, name: str) -> None:
    with raises_and_recovers(pair, ValueError, r"batch is empty.* at least one row, got shape \(0, 4\)"):
        pair.paged.generate(torch.empty((0, 4), dtype=torch.long), max_new_tokens=4, **NO_ROWS[name])
    with raises_and_recovers(pair, ValueError, "batch is empty"):
        pair.paged.generate(inputs_embeds=torch.empty(0, 4, 64), max_new_tokens=4, **NO_ROWS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}, {"return_dict_in_generate": True}], ids=name_of)
def test_ids_that_are_no_integers(pair: Pair, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    ids = random_ids(2, 4).to(dtype)
    with raises_and_recovers(pair, ValueError, f"input_ids must be integers .*{dtype}"):
        pair.paged.generate(ids, max_new_tokens=4, **arguments)
    with raises_and_recovers(pair, ValueError, f"input_ids must be integers .*{dtype}"):
        pair.paged(ids, past_key_values=PagedCache(pair.paged))


@pytest.mark.parametrize("bad", [-1, 5000])
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}, {"logits_processor": [NextToken()]}], ids=name_of)
def test_ids_outside_the_vocabulary(pair: Pair, bad: int, arguments: dict[str, Any]) -> None:
    ids = random_ids(2, 4)
    ids[1, 2] = bad
    with raises_and_recovers(pair, ValueError, f"token id {bad} is outside the model's vocabulary of"):
        pair.paged.generate(ids, max_new_tokens=4, **arguments)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [("some/model", "load it first"), (SimpleNamespace(model=torch.nn.Linear(2, 2)), "give the model inside")],
)
def test_what_is_no_model(given: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"expected a Hugging Face model, got .*{remedy}"):
        hf_paged.patch(given)
    assert not hf_paged.is_supported(given)


BAD_GENERATION: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 0}, "num_beams must be an integer of at least 1, got 0"),
    ({"num_beams": -1}, "num_beams .* got -1"),
    ({"num_beams": 1.5}, "num_beams .* got 1.5"),
    ({"num_return_sequences": 0}, "num_return_sequences must be an integer of at least 1, got 0"),
    ({"num_return_sequences": -1, "do_sample": True}, "num_return_sequences .* got -1"),
    ({"num_beams": 2, "num_return_sequences": 0}, "num_return_sequences .* got 0"),
    ({"generation_config": 5}, "generation_config must be a GenerationConfig or None, got 5"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_GENERATION, ids=str)
def test_bad_generation_setting(pair: Pair, arguments: dict[str, Any], message: str) -> None:
    """Would break: another number of rows than was asked for, or none that ever ends."""
    with raises_and_recovers(pair, ValueError, message):
        pair.paged.generate(**ragged_batch(), **arguments)
    with raises_and_recovers(pair, ValueError, message):
        pair.engine.submit([5, 6, 7], **arguments)


def test_empty_forward(pair: Pair) -> None:
    cache = PagedCache(pair.paged)
    with raises_and_recovers(pair, ValueError, "batch is empty"):
        pair.paged(torch.empty((0, 4), dtype=torch.long), past_key_values=cache)
    with raises_and_recovers(pair, ValueError, "empty"):
        pair.paged(torch.empty((1, 0), dtype=torch.long), past_key_values=cache)
    with raises_and_recovers(pair, ValueError, "input_ids and inputs_embeds"):
        pair.paged(past_key_values=cache)


def test_cache_of_another_model(make_pair: MakePair) -> None:
    pair, other = make_pair(), make_pair()
    cache = PagedCache(other.paged)
    with raises_and_recovers(pair, ValueError, "belongs to another model"):
        pair.paged.generate(**ragged_batch(), past_key_values=cache, max_new_tokens=4)
    with raises_and_recovers(pair, ValueError, "belongs to another model"):
        pair.paged(random_ids(1, 3), past_key_values=cache)
    assert other.engine.stats().num_steps == 0


def test_cache_needs_a_patched_model(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"patched model.*got LlamaForCausalLM$"):
        PagedCache(pair.stock)
    cache = PagedCache(pair.paged)
    hf_paged.unpatch(pair.paged)
    with pytest.raises(ValueError, match="belongs to another model"):
        hf_paged.patch(pair.paged, num_blocks=16).generate(random_ids(1, 3), past_key_values=cache, max_new_tokens=2)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}], ids=name_of)
def test_a_layer_added_after_patching(pair: Pair, arguments: dict[str, Any]) -> None:
    layers = pair.paged.model.layers
    added = copy.deepcopy(layers[-1])
    added.self_attn.layer_idx = 2
    layers.append(added)
    pair.paged.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match=r"layer 2 .* patched with 2 layers: unpatch it, and patch it again"):
        pair.paged.generate(**ragged_batch(), max_new_tokens=3, **arguments)
    pair.assert_all_free()
    hf_paged.patch(hf_paged.unpatch(pair.paged), num_blocks=16).generate(**ragged_batch(), max_new_tokens=3)


BAD_ROWS: dict[str, Callable[[PagedCache], Any]] = {
    "no repeats": lambda cache: cache.batch_repeat_interleave(0),
    "repeats below 0": lambda cache: cache.batch_repeat_interleave(-1),
    "repeats in part": lambda cache: cache.batch_repeat_interleave(1.5),  # type: ignore[arg-type]
    "beyond": lambda cache: cache.reorder_cache(torch.tensor([0, 1, 3])),
    "below 0": lambda cache: cache.reorder_cache(torch.tensor([0, -1, 1])),
    "no integers": lambda cache: cache.reorder_cache(torch.tensor([0.0, 1.0, 2.0])),
    "a mask": lambda cache: cache.reorder_cache(torch.tensor([True, True, False])),
    "a number": lambda cache: cache.reorder_cache(torch.tensor(1)),
    "a matrix": lambda cache: cache.reorder_cache(torch.tensor([[0, 1]])),
    "none": lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.int64)),
    "selected beyond": lambda cache: cache.batch_select_indices(torch.tensor([2, 3])),
    "selected below": lambda cache: cache.batch_select_indices(torch.tensor([-4])),
    "short mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False])),
    "empty mask": lambda cache: cache.batch_select_indices(torch.tensor([False] * 3)),
    "crop in part": lambda cache: cache.crop(-1.5),  # type: ignore[arg-type]
    "crop of NaN": lambda cache: cache.crop(float("nan")),  # type: ignore[arg-type]
    "crop of a list": lambda cache: cache.crop([-1]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_of_a_cache(pair: Pair, name: str) -> None:
    """Would break: a cache of no rows and some columns, or one that lost rows when it found that another is missing."""
    caches, ids = [new_cache(model) for model in (pair.stock, pair.paged)], random_ids(3, 9)
    pair.both(lambda model: model(ids, past_key_values=caches[model is pair.paged]).logits)
    with pytest.raises(ValueError):
        BAD_ROWS[name](caches[1])  # type: ignore[arg-type]
    pair.engine.check_invariants()
    assert_same_cache(*caches)


def test_rows_of_an_empty_cache(pair: Pair) -> None:
    """As over a `DynamicCache` that holds nothing; `test_operation_on_the_cache` has those that hold something."""
    for call in (
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([-1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
        lambda cache: cache.batch_repeat_interleave(2),
    ):
        caches = [new_cache(model) for model in (pair.stock, pair.paged)]
        for cache in caches:
            call(cache)
        assert caches[0].get_seq_length() == caches[1].get_seq_length()


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_other_batch_size_over_a_kept_cache(pair: Pair, rows: int) -> None:
    cache = PagedCache(pair.paged)
    first = pair.paged.generate(random_ids(3, 5), past_key_values=cache, max_new_tokens=4)
    length = cache.get_seq_length()
    following = torch.cat([first[:1].repeat(rows, 1), random_ids(rows, 2)], dim=1)
    with raises_and_recovers(pair, ValueError, f"{rows} rows .* 3 rows"):
        pair.paged.generate(following, past_key_values=cache, max_new_tokens=4)
    assert cache.get_seq_length() == length and cache.batch_size == 3


@pytest.mark.parametrize(
    ("columns", "other", "message"),
    [
        (9, None, "prompt has 9 tokens a row, and the PagedCache already holds 15: .*crop"),
        (15, None, "prompt has 15 tokens a row, and the PagedCache already holds 15"),
        (20, 12, r"holds 15 tokens a row: row 0 differs in column 12, 0 where the cache has \d+"),
    ],
    ids=["shorter", "as_long", "other"],
)
def test_prompt_that_does_not_continue_its_cache(pair: Pair, columns: int, other: int | None, message: str) -> None:
    """Would break: a text behind the keys of another one, without a word."""
    batch, cache = ragged_batch(), PagedCache(pair.paged)
    kept: dict[str, Any] = {"past_key_values": cache, "max_new_tokens": 5, "eos_token_id": None}
    ids = torch.cat([pair.paged.generate(**batch, **kept), random_ids(3, 4)], dim=1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 9), value=1)
    told = ids[:, :columns].clone()
    if other is not None:
        told[:, other] = PAD
    held = pair.engine.stats().num_free_blocks
    for given in ({"input_ids": told}, {"inputs_embeds": pair.paged.get_input_embeddings()(told)}):
        if other is None or "input_ids" in given:
            with pytest.raises(ValueError, match=message):
                pair.paged.generate(**given, attention_mask=mask[:, :columns], **kept)
    pair.engine.check_invariants()
    assert pair.engine.stats().num_free_blocks == held and cache.get_seq_length() == 15
    ids[batch["attention_mask"].logical_not().nonzero(as_tuple=True)] = EOS  # what fills the padding doesn't matter
    pair.paged.generate(ids, attention_mask=mask, **kept)
    cache.crop(-4)
    assert cache.get_seq_length() == 20
    cache.reset()


def test_cache_implementation_beside_a_cache(pair: Pair) -> None:
    cache = PagedCache(pair.paged)
    with raises_and_recovers(pair, ValueError, "cache_implementation"):
        pair.paged.generate(random_ids(1, 3), past_key_values=cache, cache_implementation="static", max_new_tokens=2)


CALLS: dict[str, dict[str, Any]] = {
    "greedy": ragged_batch(),
    "samples": ragged_batch() | {"do_sample": True, "num_return_sequences": 2},
    "beams": ragged_batch() | {"num_beams": 2},
    "candidates": {"input_ids": random_ids(1, 4).repeat(1, 3), "prompt_lookup_num_tokens": 3},
    "details": ragged_batch() | {"return_dict_in_generate": True, "output_hidden_states": True},
}


@pytest.mark.parametrize(
    ("code", "call", "error"),
    [
        (code, call, error)
        for code in USER_CODE
        for call in CALLS
        for error in (Boom, KeyboardInterrupt)
        if (code, call) != ("streamer", "beams")  # stock refuses it
        and (error is Boom or call == "greedy")
    ],
)
def test_user_code_that_raises(pair: Pair, code: str, call: str, error: type[BaseException]) -> None:
    """Would break: an exception that is swallowed or wrapped, or blocks that the call keeps."""
    for calls in (0, 2):
        with raises_and_recovers(pair, error, "^burnt$"):
            pair.paged.generate(**CALLS[call], max_new_tokens=8, **USER_CODE[code](error, calls))


def test_user_code_that_raises_over_a_kept_cache(pair: Pair) -> None:
    """Would break: a conversation after a turn that failed: the cache holds the same columns as stock's would."""
    caches = {id(model): new_cache(model) for model in (pair.stock, pair.paged)}

    def turn(model: Any, ids: Tensor, **more: Any) -> Any:
        try:
            return model.generate(ids, past_key_values=caches[id(model)], max_new_tokens=5, eos_token_id=None, **more)
        except Boom:
            return caches[id(model)].get_seq_length()

    first, _ = pair.both(lambda model: turn(model, random_ids(2, 6)))
    second = torch.cat([first, random_ids(2, 2)], dim=1)
    length, _ = pair.both(lambda model: turn(model, second, logits_processor=[FusedProcessor(Boom, 2)]))
    known = pair.stock.generate(second, max_new_tokens=5, eos_token_id=None)[:, :length]
    ids = torch.cat([known, random_ids(2, 1, seed=1)], dim=1)
    pair.both(lambda model: turn(model, ids))
    caches.clear()
    pair.assert_all_free()


@pytest.mark.parametrize("where", ["model", "layer", "attention"])
@pytest.mark.parametrize("call", ["greedy", "beams", "candidates", "details"])
def test_forward_that_fails(pair: Pair, where: str, call: str) -> None:
    """Would break: blocks, tokens or an attention implementation left behind by a forward that didn't finish."""
    layer = pair.paged.model.layers[1]
    module = {"model": pair.paged, "layer": layer, "attention": layer.self_attn}[where]
    for calls in (0, 2):
        fuse = Fuse(Boom, calls)
        handle = module.register_forward_hook(hf_paged.packed_hook(lambda *_, fuse=fuse: fuse.burn()))
        with raises_and_recovers(pair, Boom, "^burnt$"):
            try:
                pair.paged.generate(**CALLS[call], max_new_tokens=8)
            finally:
                handle.remove()
        assert pair.paged.config._attn_implementation == pair.stock.config._attn_implementation


@pytest.mark.parametrize("where", ["first layer", "last layer"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("calls", [0, 1])
def test_forward_that_fails_over_a_kept_cache(make_pair: MakePair, where: str, is_padded: bool, calls: int) -> None:
    """Would break: a conversation that can't go on, or goes on over tokens of the forward that failed (in chunks)."""
    pair = make_pair(block_size=3, max_num_batched_tokens=4)
    caches = {id(model): new_cache(model) for model in (pair.stock, pair.paged)}

    def turn(model: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return model(ids, past_key_values=caches[id(model)], output_hidden_states=is_padded).logits

    pair.both(lambda model: turn(model, random_ids(2, 5)))
    layer = pair.paged.model.layers[0 if where == "first layer" else 1]
    fuse = Fuse(Boom, 0 if is_padded else calls)
    handle = layer.register_forward_hook(hf_paged.packed_hook(lambda *_: fuse.burn()))
    with pytest.raises(Boom):
        turn(pair.paged, random_ids(2, 4, seed=1))
    handle.remove()
    pair.engine.check_invariants()
    assert_same_cache(*caches.values())
    for seed in (2, 3):
        pair.both(lambda model, seed=seed: turn(model, random_ids(2, 4, seed=seed)))
    assert_same_cache(*caches.values())


def trained_with_dropout(model: Any) -> dict[str, Any]:
    model.train()
    model.config.attention_dropout = 0.3
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    return {}


def trained_with_jitter(model: Any) -> dict[str, Any]:
    model.train()
    model.config.router_jitter_noise = 0.1  # by which a mixture of experts draws, without a module for it
    return {}


FALLBACKS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "attentions": (lambda model: {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "no_cache": (lambda model: {"use_cache": False}, "use_cache=False"),
    "static": (lambda model: {"cache_implementation": "static"}, "cache_implementation='static'"),
    "given_dynamic": (lambda model: {"past_key_values": DynamicCache(config=model.config)}, "DynamicCache"),
    "offloaded": (lambda model: {"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    "given_static": (
        lambda model: {"past_key_values": StaticCache(config=model.config, max_cache_len=32)},
        "StaticCache",
    ),
    "dropout": (trained_with_dropout, "training mode"),
    "jitter": (trained_with_jitter, "training mode"),
}


@pytest.mark.parametrize("name", [name for name in FALLBACKS if name != "offloaded"])  # that one needs a GPU
def test_fallback_to_stock(make_pair: MakePair, name: str) -> None:
    """Would break: what the pool can't serve must give stock's result and say so once, not silently."""
    make, reason = FALLBACKS[name]
    pair = make_pair(build("llama", attention="eager"))
    # `falls_back` asserts the one warning, and comparing the results includes dropout's random numbers.
    pair.generate(make=make, **ragged_batch(), max_new_tokens=6, falls_back=True)
    assert pair.engine.stats().num_steps == 0
    with logged_messages() as messages:
        for _ in range(2):
            pair.paged.generate(**ragged_batch(), max_new_tokens=2, **make(pair.paged))
    (message,) = (text for logger, text in messages if logger == "hf_paged")
    assert reason in message and "stock" in message


@pytest.mark.parametrize("name", FALLBACKS)
def test_strict_forbids_the_fallback(make_pair: MakePair, name: str) -> None:
    make, reason = FALLBACKS[name]
    pair = make_pair(build("llama", attention="eager"), strict=True)
    arguments = make(pair.paged)
    with pytest.raises(hf_paged.UnsupportedCallError, match=reason):
        pair.paged.generate(**ragged_batch(), max_new_tokens=6, **arguments)
    assert issubclass(hf_paged.UnsupportedCallError, ValueError)
    pair.paged.eval()
    pair.generate(**ragged_batch(), max_new_tokens=4)


def _bert() -> Any:
    common = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": BOS}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    return BertLMHeadModel(BertConfig(**common, **sizes, eos_token_id=EOS)).eval()


def test_a_model_that_the_pool_is_not_for_runs_stock(make_pair: MakePair) -> None:
    """Would break: an encoder over a pool that computes something else, or without a word."""
    model = _bert()
    pair = make_pair(model)
    report = hf_paged.is_supported(model)
    assert report and report.layout == "stock" and report.why_padded and not report.bytes_per_token(torch.float32)
    pair.generate(**ragged_batch(), max_new_tokens=6, falls_back=True)
    pair.generate(**ragged_batch(), max_new_tokens=6, num_beams=2, falls_back=True)
    submitted = pair.engine.submit([5, 6, 7], max_new_tokens=4, do_sample=False).result(20).token_ids
    assert submitted == pair.stock.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)[0, 3:].tolist()
    reason = re.escape(report.why_padded)
    with pytest.raises(ValueError, match=reason):
        hf_paged.PagedCache(pair.paged)
    with pytest.raises(ValueError, match=reason):
        pair.engine.score([[5, 6, 7]])
    assert pair.engine.stats().num_steps == 0
    hf_paged.unpatch(pair.paged)
    hf_paged.patch(pair.paged, strict=True, warm_up=True)
    with pytest.raises(hf_paged.UnsupportedCallError, match=reason):
        pair.paged.generate(**ragged_batch(), max_new_tokens=6)


def test_training_mode_without_dropout_needs_no_fallback(make_pair: MakePair) -> None:
    pair = make_pair(strict=True)
    for model in (pair.stock, pair.paged):
        model.train()
    pair.generate(**ragged_batch(), max_new_tokens=4)
    assert pair.delta["num_steps"] == 4


def test_gradient_checkpointing_falls_back(make_pair: MakePair) -> None:
    """Would break: a model in training whose checkpointing drops every cache."""
    pair = make_pair(build("llama"))
    for model in (pair.stock, pair.paged):
        model.train()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    pair.generate(**ragged_batch(), max_new_tokens=4, falls_back=True)
