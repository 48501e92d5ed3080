"""`PagedCache` in the caller's hands: kept, copied, cropped, reordered, returned; and what prefix hits may serve."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

import hf_paged
from helpers.models import build, name_of, ragged_batch, random_ids
from helpers.pairs import Pair, assert_same, assert_same_cache, new_cache
from hf_paged import PagedCache

MakePair = Callable[..., Pair]

DETAILS = {"return_dict_in_generate": True, "output_scores": True}
EOS_OFTEN = list(range(2, 30))


def even_batch() -> dict[str, Tensor]:
    """Three prompts of one length, without a mask."""
    return {"input_ids": random_ids(3, 9)}


def one_prompt() -> dict[str, Tensor]:
    """A batch of one with repetitions."""
    return {"input_ids": random_ids(1, 4).repeat(1, 3)}


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {"ragged": ragged_batch, "even": even_batch, "one": one_prompt}


def talk(
    model: Any, cache: Cache, batch: dict[str, Tensor], *, turns: int = 3, only_new: bool = False, **arguments: Any
) -> list[Tensor]:
    """A conversation: each turn appends four random tokens of the user's and generates five.

    Args:
        model: Stock or patched.
        cache: Kept over the turns.
        batch: The first prompt.
        turns: How many.
        only_new: Give `generate()` the tokens that the cache doesn't hold, in place of all.
        **arguments: Of `generate()`.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    results = []
    for turn in range(turns):
        given = ids[:, cache.get_seq_length() :] if only_new else ids
        result = model.generate(
            given,
            attention_mask=mask,
            past_key_values=cache,
            **({"max_new_tokens": 5, "eos_token_id": None} | arguments),
        )
        results.append(result)
        ids = torch.cat([ids, result[:, given.shape[1] :], random_ids(len(ids), 4, seed=turn + 1)], dim=1)
        mask = nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return results


def full_mask(batch: dict[str, Tensor], cache: Cache) -> Tensor | None:
    """The batch's mask, widened by ones to all columns of the cache."""
    mask = batch.get("attention_mask")
    return None if mask is None else nn.functional.pad(mask, (0, cache.get_seq_length() - mask.shape[1]), value=1)


# Kept over turns


@pytest.mark.parametrize("only_new", [False, True], ids=["full_prompt", "only_new_tokens"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("arguments", [{}, {"do_sample": True}, {"prefill_chunk_size": 2}], ids=name_of)
def test_conversation(pair: Pair, batch: str, only_new: bool, arguments: dict[str, Any]) -> None:
    """Would break: a chat that keeps its cache, in tokens or in what the cache holds."""
    caches: list[Cache] = []

    def call(model: Any) -> list[Tensor]:
        caches.append(new_cache(model))
        return talk(model, caches[-1], BATCHES[batch](), only_new=only_new, **arguments)

    pair.both(call)
    stock, paged = caches
    assert_same_cache(stock, paged, full_mask(BATCHES[batch](), stock))
    rows = paged.batch_size
    if "prefill_chunk_size" not in arguments:
        assert sum(pair.seen[:6]) < rows * 11 + rows * 5 + rows * 5 + 1, "a later turn computed the earlier ones again"


@pytest.mark.parametrize("only_new", [False, True], ids=["full_prompt", "only_new_tokens"])
@pytest.mark.usefixtures("full_budget")
def test_conversation_with_candidates(pair: Pair, only_new: bool) -> None:
    """Would break: assisted turns over a kept cache, which crop it."""
    arguments = {"prompt_lookup_num_tokens": 3, "repetition_penalty": 0.5}  # it repeats itself: candidates are accepted
    pair.both(lambda model: talk(model, new_cache(model), one_prompt(), only_new=only_new, **arguments))
    assert max(pair.seen[1:4]) > 1, "no candidates: the test is too easy"


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bloom"])
@pytest.mark.parametrize("is_evicted", [False, True], ids=["kept", "evicted"])
def test_conversation_with_holes(make_pair: MakePair, name: str, is_evicted: bool) -> None:
    """Would break: later turns of different lengths, and answers that ended early, padded in the middle of a row."""
    scarce = 18 if name == "mistral" else 26  # its windows hold less
    pair = make_pair(name, block_size=2, num_blocks=scarce if is_evicted else 64)
    with both_caches(pair) as caches:
        ids, mask = ragged_batch().values()
        for seed in range(2):
            ids = turn_of(pair, caches, ids, mask)
            answered = torch.ones(3, ids.shape[1] - mask.shape[1], dtype=torch.long)
            answered[2, 1:] = 0
            asked = torch.ones(3, 4, dtype=torch.long)
            asked[1, :2] = asked[0, :1] = 0
            ids = torch.cat([ids, random_ids(3, 4, seed=seed) * asked], dim=1)
            mask = torch.cat([mask, answered, asked], dim=1)
            if is_evicted and seed == 0:
                pair.both(lambda model: model.generate(random_ids(1, 20, seed=9), max_new_tokens=9, eos_token_id=None))
                assert pair.delta["num_preemptions"] > 0
        assert_same_cache(*caches.values(), mask)


def test_crop_into_the_padding(pair: Pair) -> None:
    """Would break: rows of which nothing is left, and that go on with new tokens."""
    with both_caches(pair) as caches:
        ids, mask = ragged_batch().values()
        turn_of(pair, caches, ids, mask)
        for cache in caches.values():
            cache.crop(3 - cache.get_seq_length())
        ids = torch.cat([ids[:, :3], random_ids(3, 6)], dim=1)
        mask = nn.functional.pad(mask[:, :3], (0, 6), value=1)
        turn_of(pair, caches, ids, mask)
        assert_same_cache(*caches.values(), nn.functional.pad(mask, (0, 2), value=1))


def test_copy_of_a_cache_that_stands_for_copies(pair: Pair) -> None:
    """Would break: `copy.deepcopy` while one stored row still stands for all samples of a prompt."""
    with both_caches(pair) as caches:
        arguments = ragged_batch() | {"max_new_tokens": 1, "do_sample": True, "num_return_sequences": 3}
        ids, _ = pair.generate(make=lambda model: {"past_key_values": caches[id(model)]}, **arguments)
        mask = nn.functional.pad(ragged_batch()["attention_mask"].repeat_interleave(3, dim=0), (0, 1), value=1)
        for each in (copy.deepcopy(caches[id(pair.stock)]), copy.deepcopy(caches[id(pair.paged)])), caches.values():
            turn_of(pair, dict(zip(caches, each)), ids, mask)
            assert_same_cache(*each, nn.functional.pad(mask, (0, 2), value=1))


def test_one_cache_in_several_grad_modes(pair: Pair) -> None:
    """Would break: a cache filled under inference mode and used outside."""
    with both_caches(pair) as caches:
        ids = random_ids(2, 6)
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                ids = turn_of(pair, caches, ids)
            ids = torch.cat([ids, random_ids(2, 2)], dim=1)


@pytest.mark.parametrize(
    "arguments", [{}, {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}], ids=name_of
)
def test_copies_of_a_template(make_pair: MakePair, arguments: dict[str, Any]) -> None:
    """Would break: a system prompt computed once, whose deep copies share its blocks and must not write into them."""
    pair = make_pair(block_size=4)
    template_ids = random_ids(1, 22)
    fan_out = max(arguments.get("num_beams", 1), arguments.get("num_return_sequences", 1))
    caches: list[Cache] = []

    def call(model: Any) -> list[Tensor]:
        template = new_cache(model)
        with torch.no_grad():
            model(template_ids, past_key_values=template)
        if fan_out > 1:
            template.batch_repeat_interleave(fan_out)
        caches.append(template)
        results = []
        for question in range(4):
            ids = torch.cat([template_ids, random_ids(1, 3, seed=question)], dim=1)
            cache = copy.deepcopy(template)
            results.append(model.generate(ids, past_key_values=cache, max_new_tokens=6, **arguments))
            assert template.get_seq_length() == 22 and cache.get_seq_length() == results[-1].shape[1] - 1
        return results

    pair.both(call)
    assert_same_cache(*caches)
    assert pair.seen.count(22) == 1 and max(pair.seen[1:]) <= 3 * fan_out, "the template was computed again"
    assert pair.delta["num_cow_copies"] >= 4 * fan_out
    stats = pair.engine.stats()
    assert stats.num_blocks - stats.num_free_blocks == 6, "copies that are gone hold blocks"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"eos_token_id": EOS_OFTEN},
        {"do_sample": True, "num_return_sequences": 2, "eos_token_id": EOS_OFTEN},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "output_hidden_states": True},
        {"prefill_chunk_size": 4},
    ],
    ids=name_of,
)
def test_returned_cache(pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: the cache of `return_dict_in_generate`, which must hold what stock's holds, and go on."""
    batch = ragged_batch()
    copies = max(arguments.get("num_beams", 1), arguments.get("num_return_sequences", 1))
    mask = batch["attention_mask"].repeat_interleave(copies, dim=0)
    expected, found = pair.generate(**batch, max_new_tokens=8, **DETAILS, **arguments)
    assert isinstance(found.past_key_values, PagedCache) and isinstance(expected.past_key_values, DynamicCache)
    columns = expected.past_key_values.get_seq_length()
    assert_same_cache(
        expected.past_key_values, found.past_key_values, nn.functional.pad(mask, (0, columns - 11), value=1)
    )
    returned = {id(pair.stock): expected.past_key_values, id(pair.paged): found.past_key_values}
    mask = nn.functional.pad(mask, (0, columns + 3 - 11), value=1)
    pair.generate(
        make=lambda model: {"past_key_values": returned[id(model)]},
        input_ids=random_ids(len(mask), 3, seed=2),  # which beams the cache holds isn't told
        attention_mask=mask,
        max_new_tokens=4,
    )


@pytest.mark.parametrize("arguments", [{"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}], ids=name_of)
def test_given_cache_of_copies(pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: samples and beams in a cache that the caller made: one prefill for all, and the contents."""
    with both_caches(pair) as caches:
        mask = ragged_batch()["attention_mask"]
        pair.generate(
            make=lambda model: {"past_key_values": caches[id(model)]}, **ragged_batch(), max_new_tokens=6, **arguments
        )
        assert pair.seen[0] == 20
        mask = nn.functional.pad(mask.repeat_interleave(3, dim=0), (0, pair.seen.count(9)), value=1)
        assert_same_cache(*caches.values(), mask)
        turn_of(pair, caches, random_ids(9, 3), nn.functional.pad(mask, (0, 3), value=1))
        assert pair.seen[0] == 27


def test_returned_cache_of_candidates(pair: Pair) -> None:
    """Would break: candidates that were rejected and stay in the returned cache."""
    expected, found = pair.generate(**one_prompt(), max_new_tokens=9, prompt_lookup_num_tokens=3, **DETAILS)
    assert_same_cache(expected.past_key_values, found.past_key_values)


# In the user's own loop


@contextmanager
def both_caches(pair: Pair) -> Iterator[dict[int, Cache]]:
    """A new cache for each model of the pair, by the model's id."""
    yield {id(pair.stock): new_cache(pair.stock), id(pair.paged): new_cache(pair.paged)}
    pair.engine.check_invariants()


FORWARDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "last_logits": {"logits_to_keep": 1},
    "two_logits": {"logits_to_keep": 2},
    "chosen_logits": {"logits_to_keep": torch.tensor([0, 2])},
    "hidden_states": {"output_hidden_states": True},
    "tuple": {"return_dict": False},
    "loss": {"labels": random_ids(3, 4, seed=9)},
}


@pytest.mark.parametrize("with_mask", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("name", FORWARDS)
def test_own_loop_over_the_model(pair: Pair, name: str, with_mask: bool) -> None:
    """Would break: `model(ids, past_key_values=PagedCache(model))`, prefill in two chunks and decode."""
    batch, arguments = ragged_batch((8, 5, 1)), FORWARDS[name]
    ids, mask = torch.cat([batch["input_ids"], random_ids(3, 4, seed=4)], dim=1), batch["attention_mask"]
    mask = nn.functional.pad(mask, (0, 4), value=1)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)

    def call(model: Any) -> list[Any]:
        cache, outputs = new_cache(model), []
        for start, end in ((0, 4), (4, 8), (8, 12)):
            if with_mask:
                padding = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            else:
                padding = {}
            with torch.no_grad():
                outputs.append(model(ids[:, start:end], past_key_values=cache, use_cache=True, **padding, **arguments))
        return outputs

    expected, found = pair.both(call)
    assert type(found[0]) is type(expected[0])
    assert pair.delta["num_steps"] == 3


@pytest.mark.parametrize(("name", "flag"), [("llama", "output_hidden_states"), ("mixtral", "output_router_logits")])
def test_outputs_asked_for_in_the_config(make_pair: MakePair, name: str, flag: str) -> None:
    """Would break: outputs that the config, not the call, asks for."""
    pair = make_pair(name)
    for model in (pair.stock, pair.paged):
        setattr(model.config, flag, True)

    def call(model: Any) -> Any:
        with torch.no_grad():
            return model(random_ids(2, 5), past_key_values=new_cache(model))

    pair.both(call)
    if flag == "output_hidden_states":  # stock itself can't generate with the other one in transformers 5.17
        pair.generate(input_ids=random_ids(2, 5), max_new_tokens=4)


@pytest.mark.parametrize("width", [8, 12])
def test_mask_of_another_form(pair: Pair, width: int) -> None:
    """Would break: 4-D masks, which the user built and only the model's own attention understands."""
    ids = random_ids(2, width)
    hidden = torch.zeros(2, 1, width, width).masked_fill_(
        torch.rand(width, width, generator=torch.Generator().manual_seed(0)) < 0.3, -1e9
    )
    hidden[:, :, torch.arange(width), torch.arange(width)] = 0
    hidden += torch.full((width, width), -1e9).triu(1)

    def call(model: Any) -> list[Tensor]:
        cache = new_cache(model)
        with torch.no_grad():
            first = model(ids, attention_mask=hidden, past_key_values=cache).logits
            return [first, model(ids[:, :1], past_key_values=cache).logits]

    pair.both(call)


def test_inner_model_over_the_cache(pair: Pair) -> None:
    """Would break: `model.model(...)`, whose forward isn't ours, refused only when some of it is stored."""
    ids = random_ids(2, 12)

    def call(model: Any) -> list[Tensor]:
        cache = new_cache(model)
        with torch.no_grad():
            first = model(ids[:, :5], past_key_values=cache).logits
            if model is pair.paged:
                with pytest.raises(ValueError, match="only forwards of the patched model itself"):
                    model.model(ids[:, 5:9], past_key_values=cache)
            return [first, model(ids[:, 5:], past_key_values=cache).logits]

    pair.both(call)
    pair.assert_all_free()


def test_keys_behind_a_hole_are_of_one_call_alone(pair: Pair) -> None:
    """Would break: blocks of a plain prompt found for one with a hole in its mask, or the other way round."""
    ids, mask = random_ids(1, 40), torch.ones(1, 40, dtype=torch.int64)
    mask[0, 1] = 0

    def call(model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [
                model(ids, attention_mask=given, past_key_values=new_cache(model)).logits
                for given in (None, mask, None)
            ]

    pair.both(call)
    assert pair.delta["num_steps"] == 3
    pair.assert_all_free()


OPERATIONS: dict[str, Callable[[Cache], Any]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "reorder_same": lambda cache: cache.reorder_cache(torch.tensor([0, 1, 2])),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 2])),
    "select_from_the_end": lambda cache: cache.batch_select_indices(torch.tensor([-1, 0])),
    "select_by_mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "crop": lambda cache: cache.crop(-5),
    "crop_by_a_tensor": lambda cache: cache.crop(-torch.tensor(3)),  # transformers 5.17 does
    "crop_nothing": lambda cache: cache.crop(0),
    "crop_and_reorder": lambda cache: (cache.crop(-2), cache.reorder_cache(torch.tensor([1, 1, 0]))),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("is_padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_on_the_cache(pair: Pair, name: str, is_padded: bool) -> None:
    """Would break: what beam search, assisted decoding and users do to a cache, seen by the next forward."""
    ids = random_ids(3, 10)

    def call(model: Any) -> list[Tensor]:
        cache = new_cache(model)
        outputs = []
        for length in (1, 6):
            with torch.no_grad():
                model(ids, past_key_values=cache, output_hidden_states=is_padded)
            result = OPERATIONS[name](cache)
            cache = result if isinstance(result, Cache) else cache
            rows = cache.layers[0].keys.shape[0]
            with torch.no_grad():
                outputs.append(model(random_ids(rows, length, seed=7), past_key_values=cache).logits)
            outputs += [value for layer in cache.layers for value in (layer.keys, layer.values)]
            cache.batch_select_indices(torch.tensor([0, rows - 1, 0]))
        return outputs

    pair.both(call)
    pair.assert_all_free()


def test_what_can_be_read_off_a_cache(pair: Pair) -> None:
    """Would break: code that looks into a cache as it would into a `DynamicCache`."""

    def call(model: Any) -> list[Any]:
        cache = new_cache(model)
        facts: list[Any] = [cache.get_seq_length(), len(cache), cache.is_compileable]
        model.generate(**ragged_batch(), past_key_values=cache, max_new_tokens=3, eos_token_id=None)
        facts += [cache.get_seq_length(), cache.get_seq_length(1), len(cache), cache.get_mask_sizes(2, 0)]
        facts += [cache.is_compileable, cache.is_sliding, cache.is_initialized]
        facts += [tuple(layer.keys.shape) for layer in cache.layers]
        facts += [[tensor.shape for tensor in layer[:2]] for layer in cache]
        return facts

    pair.both(call)
    pair.assert_all_free()


@pytest.mark.skipif(
    "ValueError" not in inspect.getsource(DynamicLayer.crop),
    reason="this transformers reads a positive number as the length to keep",
)
def test_crop_to_a_length_is_refused(pair: Pair) -> None:
    """Would break: a cache that is silently shorter or longer than stock's."""
    with both_caches(pair) as caches:
        for model in (pair.stock, pair.paged):
            cache = caches[id(model)]
            model.generate(**one_prompt(), past_key_values=cache, max_new_tokens=3)
            with pytest.raises(ValueError, match="3"):
                cache.crop(3)
            assert cache.get_seq_length() == 14


# Lifetimes


def test_dropped_cache_frees_its_blocks_at_once(pair: Pair) -> None:
    """Would break: blocks that wait for the garbage collector, or are never freed."""
    gc.disable()
    try:
        cache = PagedCache(pair.paged)
        pair.paged.generate(**ragged_batch(), past_key_values=cache, max_new_tokens=4)
        dead = weakref.ref(cache)
        stats = pair.engine.stats()
        assert stats.num_free_blocks < stats.num_blocks and stats.num_running == 0, "it is at rest"
        del cache
        assert dead() is None
        pair.assert_all_free()
        result = pair.paged.generate(**ragged_batch(), max_new_tokens=4, **DETAILS)
        assert pair.engine.stats().num_free_blocks < stats.num_blocks
        del result
        pair.assert_all_free()
    finally:
        gc.enable()


def test_a_dropped_cache_whose_forward_failed_frees_its_blocks(pair: Pair) -> None:
    """Would break: a sequence that leads to its failed forward, whose error's traceback leads to the cache."""
    model, has_failed = pair.paged, []

    @hf_paged.packed_hook
    def fail(*_: Any) -> None:
        if not has_failed:
            has_failed.append(True)
            raise LookupError("injected")

    cache = PagedCache(model)
    model(random_ids(1, 9), past_key_values=cache)
    handle = model.get_input_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(LookupError):
        model(random_ids(1, 5), past_key_values=cache)
    handle.remove()
    seen = weakref.ref(cache)
    del cache
    gc.collect()
    assert seen() is None
    pair.assert_all_free()


def test_reset_cache_is_as_new(pair: Pair) -> None:
    """Would break: a cache used for another conversation after `reset()`."""
    with both_caches(pair) as caches:
        pair.generate(make=lambda model: {"past_key_values": caches[id(model)]}, **ragged_batch(), max_new_tokens=4)
        caches[id(pair.paged)].reset()
        pair.assert_all_free()
        caches[id(pair.stock)] = new_cache(pair.stock)  # stock's reset() zeroes the contents and keeps the length
        pair.both(lambda model: talk(model, caches[id(model)], one_prompt()))


def test_released_pool_comes_back(pair: Pair) -> None:
    """Would break: `release()` with a live cache, which must be computed again from its tokens."""
    with both_caches(pair) as caches:

        def turn(model: Any, ids: Tensor) -> Tensor:
            return model.generate(ids, past_key_values=caches[id(model)], max_new_tokens=4, eos_token_id=None)

        first, _ = pair.both(lambda model: turn(model, one_prompt()["input_ids"]))
        pair.engine.release()
        pair.assert_all_free()
        pair.both(lambda model: turn(model, torch.cat([first, random_ids(1, 3)], dim=1)))
        assert pair.delta["num_prefill_tokens"] >= 12
    caches.clear()
    pair.assert_all_free()


def test_cache_outlives_its_model() -> None:
    """Would break: a cache that keeps the model alive, or crashes without it."""
    model = hf_paged.patch(build("llama"), num_blocks=16)
    cache = PagedCache(model)
    model.generate(**one_prompt(), past_key_values=cache, max_new_tokens=3)
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    assert cache.get_seq_length() == 14
    cache.reset()


# Preempted while kept

EVICTORS: dict[str, dict[str, Any]] = {
    "greedy": ragged_batch(),
    "beams": ragged_batch() | {"num_beams": 3},
    "candidates": one_prompt() | {"prompt_lookup_num_tokens": 3},
    "embeds": {"inputs_embeds": torch.randn(1, 14, 64, generator=torch.Generator().manual_seed(0))},
    "padded": ragged_batch(side="right"),
}


# With a hole in its mask: what the pool holds of it is no function of tokens and positions.
UNKNOWN = {"input_ids": random_ids(1, 14), "attention_mask": torch.tensor([[1, 1, 0] + 11 * [1]])}


def turn_of(pair: Pair, caches: dict[int, Cache], ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """One turn of a conversation over both caches; returns the tokens so far."""
    return pair.both(
        lambda model: model.generate(
            ids, attention_mask=mask, past_key_values=caches[id(model)], max_new_tokens=3, eos_token_id=None
        )
    )[0]


@pytest.mark.parametrize("evictor", EVICTORS)
@pytest.mark.parametrize(("batch", "num_blocks"), [("one", 15), ("ragged", 15), ("ragged", 30)])
def test_preempted_conversation(make_pair: MakePair, batch: str, num_blocks: int, evictor: str) -> None:
    """Would break: a kept cache whose blocks other calls took between the turns (or its own other rows: 15)."""
    pair = make_pair(block_size=2, num_blocks=30 if evictor == "padded" else num_blocks)
    with both_caches(pair) as caches:
        ids = BATCHES[batch]()["input_ids"]
        mask = BATCHES[batch]().get("attention_mask", torch.ones_like(ids))
        num_preemptions = 0
        for seed in range(3):
            before = turn_of(pair, caches, ids, mask)
            ids = torch.cat([before, random_ids(len(ids), 1, seed=seed)], dim=1)
            mask = nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            pair.both(lambda model: model.generate(**EVICTORS[evictor], max_new_tokens=8, eos_token_id=None))
            num_preemptions += pair.delta["num_preemptions"]
        assert num_preemptions > 0, "everything fitted: the test is too easy"
        stock, paged = caches.values()
        if pair.engine.config.num_blocks == 30:
            assert_same_cache(stock, paged, mask)
            pair.both(lambda model: model(ids[:, -2:], attention_mask=mask, past_key_values=caches[id(model)]).logits)


def test_preempted_after_a_crop(make_pair: MakePair) -> None:
    """Would break: computing again, or offering for prefix hits, what was taken back."""
    pair = make_pair(block_size=2, num_blocks=15)
    with both_caches(pair) as caches:
        ids = turn_of(pair, caches, one_prompt()["input_ids"])
        taken_back = ids[:, :-3]
        for cache in caches.values():
            cache.crop(-4)
        ids = turn_of(pair, caches, torch.cat([taken_back, random_ids(1, 4, seed=7)], dim=1))
        pair.both(lambda model: model.generate(**ragged_batch(), max_new_tokens=8))
        assert pair.delta["num_preemptions"] > 0
        ids = turn_of(pair, caches, torch.cat([ids, random_ids(1, 1)], dim=1))
        assert_same_cache(*caches.values())
        pair.both(lambda model: model.generate(ids, max_new_tokens=2))
        assert pair.delta["prefix_cache_hit_tokens"] >= 20


def test_whole_cache_wanted_that_the_pool_cannot_hold(make_pair: MakePair) -> None:
    """Would break: rows read from blocks that were just given to other rows; and the cache after the refusal."""
    pair = make_pair(block_size=2, num_blocks=15)
    with both_caches(pair) as caches:
        ids = turn_of(pair, caches, even_batch()["input_ids"])
        stock, paged = caches.values()
        try:
            assert_same_cache(stock, paged)
        except hf_paged.OutOfBlocksError as error:
            assert "15" in str(error)
        ids = torch.cat([ids, random_ids(3, 1)], dim=1)
        with pytest.raises(hf_paged.OutOfBlocksError, match="of 15 are free"):
            pair.paged(ids[:, 11:], past_key_values=paged, output_hidden_states=True)
        turn_of(pair, caches, ids)


@pytest.mark.parametrize("name", ["llama", "falcon_rotary"])
def test_a_call_whose_padding_is_seen_is_stored_like_any_other(make_pair: MakePair, name: str) -> None:
    """Would break: its padding takes slots, and its rows are neither found by others nor computed again."""
    pair = make_pair(name, block_size=2, num_blocks=26, preemption="recompute")
    details = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 3, "eos_token_id": None}
    with both_caches(pair) as caches:
        ids, mask = ragged_batch().values()
        first, _ = pair.both(
            lambda model: model.generate(ids, attention_mask=mask, past_key_values=caches[id(model)], **details)
        )
        assert pair.engine.stats().kv_tokens_stored == 11 + 7 + 2 + 3 * 2
        pair.both(lambda model: model.generate(**ragged_batch(), max_new_tokens=2))
        assert pair.delta["prefix_cache_hit_tokens"] == 10 + 6
        pair.both(lambda model: model.generate(random_ids(1, 44), max_new_tokens=3))
        assert pair.delta["num_preemptions"] > 0
        ids = torch.cat([first.sequences, random_ids(3, 2)], dim=1)
        turn_of(pair, caches, ids, nn.functional.pad(mask, (0, 5), value=1))


@pytest.mark.parametrize("name", ["llama_dynamic_rope", "gemma3_dynamic_rope"])
def test_rows_that_depend_on_others_are_computed_again_below_the_original_length(
    make_pair: MakePair, name: str
) -> None:
    """Would break: keys of one frequency computed again at another, or a short conversation that can't be preempted."""
    pair = make_pair(name, block_size=2, num_blocks=16, preemption="recompute")
    with both_caches(pair) as caches:
        ids = turn_of(pair, caches, random_ids(1, 8))
        pair.both(lambda model: model.generate(random_ids(1, 26, seed=1), max_new_tokens=2))
        assert pair.delta["num_preemptions"] == 1
        ids = turn_of(pair, caches, torch.cat([ids, random_ids(1, 8)], dim=1))
        with pytest.raises(hf_paged.OutOfBlocksError, match="can't be computed again"):
            pair.paged.generate(random_ids(1, 26, seed=1), max_new_tokens=2)
        turn_of(pair, caches, torch.cat([ids, random_ids(1, 2)], dim=1))


@pytest.mark.parametrize("preemption", ["recompute", "auto", "swap"])
def test_conversation_of_unknown_tokens(make_pair: MakePair, preemption: str) -> None:
    """Would break: evicting what can't be computed again. With CPU memory, it leaves, and comes back as it was."""
    pair = make_pair(block_size=2, num_blocks=15, preemption=preemption)
    with both_caches(pair) as caches:
        pair.both(
            lambda model: model.generate(
                **UNKNOWN, past_key_values=caches[id(model)], max_new_tokens=4, eos_token_id=None
            )
        )
        if preemption == "recompute":
            with pytest.raises(hf_paged.OutOfBlocksError, match="of 15 are free"):
                pair.paged.generate(**ragged_batch(), max_new_tokens=8)
            pair.engine.check_invariants()
            assert pair.engine.stats().num_free_blocks == 6
        else:
            pair.both(lambda model: model.generate(**ragged_batch(), max_new_tokens=8))
            assert pair.delta["num_swapped_out"] > 0 and pair.engine.stats().num_swapped == 1
        assert_same_cache(*caches.values())
        assert pair.engine.stats().num_swapped == 0


# What prefix hits may serve


def load_other_weights(model: Any) -> None:
    """`load_state_dict` of another model."""
    model.load_state_dict(build("llama", seed=5).state_dict())


def write_through_data(model: Any) -> None:
    """A write that leaves no trace, and the documented call after it."""
    model.model.embed_tokens.weight.data.mul_(-1)
    if hasattr(model, "paged"):
        assert model.paged.reset_prefix_cache() > 0


def hook_an_attention(model: Any) -> None:
    """A forward hook that changes what a layer computes."""
    scale = hf_paged.packed_hook(lambda module, args, output: (output[0] * 1.5, *output[1:]))
    model.model.layers[0].self_attn.register_forward_hook(scale)


CHANGES = [hook_an_attention, load_other_weights, write_through_data]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_hits_from_before_the_weights_changed(pair: Pair, change: Callable[[Any], None]) -> None:
    """Would break: keys and values of older weights served as if they were today's."""
    batch = ragged_batch((20, 13, 9))
    pair.generate(**batch, max_new_tokens=5)
    before, _ = pair.generate(**batch, max_new_tokens=5)
    assert pair.delta["prefix_cache_hit_tokens"] > 30, "no hits even without a change"
    for model in (pair.stock, pair.paged):
        change(model)
    after, _ = pair.generate(**batch, max_new_tokens=5)
    assert pair.delta["prefix_cache_hit_tokens"] == 0
    assert not torch.equal(before, after), "the change changed nothing: the test is too easy"
    pair.generate(**batch, max_new_tokens=5)
    assert pair.delta["prefix_cache_hit_tokens"] > 30


def multiply(model: Any, name: str, factor: float) -> None:
    """Changes this number of all modules that have it."""
    for module in model.modules():
        if isinstance(vars(module).get(name), int | float):
            setattr(module, name, type(vars(module)[name])(vars(module)[name] * factor))


@pytest.mark.parametrize(
    ("model", "name", "factor"),
    [
        ("llama", "variance_epsilon", 1e5),
        ("llama", "scaling", 3.0),
        ("llama", "attention_scaling", 2.0),
        ("granite", "residual_multiplier", 0.3),
        ("granite", "embedding_multiplier", 3.0),
        ("mixtral", "top_k", 0.5),
        ("gpt2", "eps", 1e5),
    ],
)
def test_no_hits_from_before_a_number_changed(make_pair: MakePair, model: str, name: str, factor: float) -> None:
    """Would break: numbers that a layer's fused copy, or a block in the pool, still has as they were."""
    pair = make_pair(model)
    batch = ragged_batch((20, 13, 9))
    before, _ = pair.generate(**batch, max_new_tokens=5)
    for each in (pair.stock, pair.paged):
        multiply(each, name, factor)
    after, _ = pair.generate(**batch, max_new_tokens=5)
    assert pair.delta["prefix_cache_hit_tokens"] == 0
    assert not torch.equal(before, after), "the change changed nothing: the test is too easy"
    pair.generate(**batch, max_new_tokens=5)
    assert pair.delta["prefix_cache_hit_tokens"] > 30


@pytest.mark.parametrize("helps", ["reset_prefix_cache", "release"])
def test_changes_that_leave_no_trace(pair: Pair, helps: str) -> None:
    """Would break: the way out that is documented."""
    factor = torch.ones(1)
    batch = ragged_batch((20, 13, 9))
    for model in (pair.stock, pair.paged):
        scale = hf_paged.packed_hook(lambda module, args, output: factor * output)
        model.model.layers[0].mlp.register_forward_hook(scale)
    before, _ = pair.generate(**batch, max_new_tokens=5)
    factor *= -2.0
    getattr(pair.engine, helps)()
    after, _ = pair.generate(**batch, max_new_tokens=5)
    assert not torch.equal(before, after)


def no_change(model: Any) -> None:
    """What touches a model and leaves its weights: training mode and back, gradients, a look at them."""
    model.train()
    ids = random_ids(2, 8)
    model(ids, labels=ids).loss.backward()
    model.eval()
    model.zero_grad()
    model.state_dict()
    model.requires_grad_(False)
    model.requires_grad_(True)
    with torch.no_grad():
        model(ids, output_hidden_states=True)


def test_conversation_over_a_change_of_weights(make_pair: MakePair) -> None:
    """Would break: earlier turns, which stay as the older weights wrote them, as in stock; never recomputed."""
    pair = make_pair(block_size=2, num_blocks=15, preemption="recompute")
    with both_caches(pair) as caches:
        ids = turn_of(pair, caches, one_prompt()["input_ids"])
        for model in (pair.stock, pair.paged):
            load_other_weights(model)
        turn_of(pair, caches, torch.cat([ids, random_ids(1, 2)], dim=1))
        with pytest.raises(hf_paged.OutOfBlocksError):
            pair.paged.generate(**ragged_batch(), max_new_tokens=8)
        assert_same_cache(*caches.values())


def test_conversation_evicted_before_a_look_at_the_model(make_pair: MakePair) -> None:
    """Would break: a conversation, because a caller meanwhile did what leaves the weights as they are."""
    pair = make_pair(block_size=2, num_blocks=15)
    with both_caches(pair) as caches:
        ids = turn_of(pair, caches, one_prompt()["input_ids"])
        pair.both(lambda model: model.generate(**ragged_batch(), max_new_tokens=8))
        assert pair.delta["num_preemptions"] > 0
        no_change(pair.paged)
        turn_of(pair, caches, torch.cat([ids, random_ids(1, 2)], dim=1))


def test_conversation_evicted_before_the_weights_changed(make_pair: MakePair) -> None:
    """Would break: today's weights computing again what older ones wrote, without a word."""
    pair = make_pair(block_size=2, num_blocks=15)
    with both_caches(pair) as caches:
        ids = turn_of(pair, caches, one_prompt()["input_ids"])
        pair.both(lambda model: model.generate(**ragged_batch(), max_new_tokens=8))
        assert pair.delta["num_preemptions"] > 0
        for model in (pair.stock, pair.paged):
            load_other_weights(model)
        with pytest.raises((ValueError, RuntimeError), match="weights"):
            turn_of(pair, caches, torch.cat([ids, random_ids(1, 2)], dim=1))
        pair.engine.check_invariants()
        caches[id(pair.paged)].reset()
        caches[id(pair.stock)] = new_cache(pair.stock)
        turn_of(pair, caches, ids)


def test_no_hits_at_other_positions(make_pair: MakePair) -> None:
    """Would break: keys with other positions in them (GPT-2's are absolute) served for the same tokens."""
    pair = make_pair("gpt2")
    batch = ragged_batch((20, 13, 9))
    positions = (batch["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
    results = []
    for shift in (0, 7, 0):
        results.append(pair.generate(**batch, position_ids=positions + shift, max_new_tokens=4)[0])
        assert (pair.delta["prefix_cache_hit_tokens"] > 0) == (len(results) == 3)
    assert not torch.equal(results[0], results[1])


def test_hits_whatever_the_padding(pair: Pair) -> None:
    """Would break: blocks hashed with their padding, which would never be found again in another batch."""
    batch = ragged_batch((20, 13, 9))
    pair.generate(input_ids=batch["input_ids"][1:2, 7:], max_new_tokens=4)
    pair.generate(**batch, max_new_tokens=4)
    assert pair.delta["prefix_cache_hit_tokens"] == 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_pool_follows_the_models_dtype(pair: Pair, dtype: torch.dtype) -> None:
    """Would break: a pool in the type that the model had at its first call."""
    pair.generate(**ragged_batch(), max_new_tokens=4)
    for model in (pair.stock, pair.paged):
        model.to(dtype)
    pair.generate(**ragged_batch(), max_new_tokens=4)
    assert pair.delta["prefix_cache_hit_tokens"] == 0


# Adapters


@pytest.fixture
def adapted(make_pair: MakePair) -> Pair:
    """A `Pair` of a Llama in a PEFT wrapper with two LoRA adapters."""
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(build("llama"), peft.LoraConfig(**settings), adapter_name="one")
        model.add_adapter("two", peft.LoraConfig(**settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.5)
    return make_pair(model.eval())


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "one": lambda model: model.set_adapter("one"),
    "two": lambda model: model.set_adapter("two"),
    "disabled": lambda model: model.disable_adapter(),
    "merged": lambda model: model.merge_adapter(),
    "unmerged": lambda model: model.unmerge_adapter(),
    "rescaled": lambda model: importlib.import_module("peft.helpers").rescale_adapter_scale(model, 9.0),
}


@pytest.mark.parametrize(
    "order", ["one two one", "one disabled one", "two merged unmerged two", "disabled two disabled", "one rescaled one"]
)
def test_adapters_switched_between_calls(adapted: Pair, order: str) -> None:
    """Would break: keys and values of another adapter, or of none, served as this one's."""
    batch = ragged_batch((20, 13, 9))
    results: dict[str, Tensor] = {}
    for name in order.split():

        def call(model: Any, name: str = name) -> Tensor:
            scope = SWITCHES[name](model)
            with scope if scope is not None else nullcontext():
                return model.generate(**batch, max_new_tokens=6)

        first_time = name not in results
        results[name], _ = adapted.both(call)
        assert adapted.delta["num_steps"] > 0
        if first_time and name != "unmerged":
            assert adapted.delta["prefix_cache_hit_tokens"] == 0
        adapted.both(call)
        assert adapted.delta["prefix_cache_hit_tokens"] > 30, "no hits within one adapter"
    texts = [tuple(result.flatten().tolist()) for name, result in results.items() if name not in ("merged", "unmerged")]
    assert len(set(texts)) == len(texts), "the adapters change nothing: the test is too easy"


@pytest.mark.parametrize("arguments", [{}, {"eos_token_id": EOS_OFTEN}], ids=name_of)
def test_an_adapter_for_each_row(adapted: Pair, arguments: dict[str, Any]) -> None:
    """Would break: PEFT's mixed batches, whose rows can't be laid into one, or blocks of one row's adapter reused."""
    for names in (["one", "two", "__base__"], ["two", "one", "one"]):
        expected, found = (
            model.generate(**ragged_batch((20, 13, 9)), max_new_tokens=9, adapter_names=names, **arguments)
            for model in (adapted.stock, adapted.paged)
        )
        assert torch.equal(expected, found)
        adapted.assert_all_free()
    adapted.both(lambda model: model.generate(**ragged_batch((20, 13, 9)), max_new_tokens=5))
    for name in ("two", "one"):
        adapted.both(lambda model, name=name: model.generate(random_ids(1, 13), max_new_tokens=5, adapter_names=[name]))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_prompts(make_pair: MakePair, kind: str) -> None:
    """Would break: PEFT methods that put a learned prompt (or its keys and values) before the user's."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = peft.get_peft_model(build("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
        for parameter in model.prompt_encoder.parameters():
            parameter.normal_(std=0.5)
    pair = make_pair(model.eval())
    for arguments in ({}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}):
        torch.manual_seed(0)
        expected = pair.stock.generate(**ragged_batch(), max_new_tokens=5, **arguments)
        torch.manual_seed(0)
        assert torch.equal(pair.paged.generate(**ragged_batch(), max_new_tokens=5, **arguments), expected)
        pair.assert_all_free()


def test_adapters_leave_with_the_wrapper(adapted: Pair) -> None:
    """Would break: a patched model in a PEFT wrapper that can't be unpatched or trained."""
    hf_paged.unpatch(adapted.paged)
    ids = random_ids(2, 9)
    losses = []
    for model in (adapted.stock, adapted.paged):
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses += [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    half = len(losses) // 2
    assert half > 1
    assert_same(losses[:half], losses[half:])
