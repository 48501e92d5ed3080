"""Models whose layers keep a state of all tokens together, beside stock: every family, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache

import hf_paged
from helpers.models import build, name_of, ragged_batch, random_ids
from helpers.modes import EACH_MODEL
from helpers.pairs import MakePair, Pair, assert_same
from helpers.state_models import STATE_MODELS, build_state_model
from helpers.waiting import PATIENCE, at_once, in_background
from hf_paged.model.cache_argument import cache_argument

OLD = Version(transformers.__version__) < Version("5.18.dev0")
NEW = 12
WHOLE_PROMPTS = ["jamba", "mamba", "falcon_mamba", "zamba"]  # whose scan takes no state along into several tokens
PURE = ["mamba", "falcon_mamba", "mamba2"]  # whose `generate()` gives a kept cache its tokens again
PADDED = ["inkling"]  # whose attention over gathered keys is the model's own
KINDS = ["qwen3_next", "lfm2", "nemotron_h", "falcon_h1", "zamba2", "jamba", "mamba2", "zaya", "kimi_linear", *PADDED]
"""One of each kind: gated delta rule, convolution, two formulas, both on a layer, shared attention, no way on, pure,
queries and keys from a state, latents beside states, several states on a layer."""

MODES: dict[str, dict[str, Any]] = {
    **EACH_MODEL,
    "eos_often": {"eos_token_id": list(range(2, 30))},
    "hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
}

every_family = pytest.mark.parametrize("name", STATE_MODELS)
every_kind = pytest.mark.parametrize("name", KINDS)
every_family_kinds_quick = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow]) for name in STATE_MODELS]
)


@pytest.fixture
def make(make_pair: MakePair) -> MakePair:

    def make(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Pair:
        return make_pair(build_state_model(name).to(dtype), **({"num_blocks": 600} | settings))

    return make


def least_blocks(pair: Pair, num_tokens: int) -> int:
    return pair.engine.core.manager.most_blocks(num_tokens, num_tokens)


@every_family
@pytest.mark.parametrize("mode", MODES)
def test_mode(make: MakePair, name: str, mode: str) -> None:
    # A scan amplifies the rounding of float32, by processor, to what a fault could look like.
    pair = make(name, dtype=torch.float64 if (name, mode) == ("mamba", "hidden_states") else torch.float32)
    arguments = ragged_batch() | {"max_new_tokens": NEW} | MODES[mode]
    if mode == "hidden_states":

        def call(model: Any) -> Any:  # without the cache: one of states alone has no length in transformers
            output = model.generate(**arguments)
            return output.sequences, output.hidden_states

        pair.both(call)
    else:
        pair.generate(**arguments)
    assert pair.delta["num_steps"] > 0 and pair.engine.traits.runs_packed is (name not in PADDED)
    if mode in ("samples", "beams"):
        assert pair.delta["num_cow_copies"] > 0
        prompts = pair.delta["num_prefill_tokens"] - pair.delta["num_generated_tokens"]
        assert prompts < 3 * 20, "a prompt was computed for every copy"


@every_family_kinds_quick
def test_a_token_a_step(make: MakePair, name: str) -> None:
    """Would break: prompts that never begin, since two of their tokens are the least that a step computes of them."""
    make(name, max_num_batched_tokens=1).generate(**ragged_batch((5, 3)), max_new_tokens=3)


@every_family
@pytest.mark.parametrize("chunk", [2, 3])
def test_rows_that_begin_in_a_later_chunk(make: MakePair, name: str, chunk: int) -> None:
    """Would break: a row that is padding in the chunks before, and goes on from what another one left in its blocks."""
    pair = make(name, num_blocks=400, enable_prefix_caching=False)
    if not pair.engine.traits.carries_state or pair.engine.core.bound.cache_argument != "past_key_values":
        pytest.skip("stock's own chunks lose the state, or it has none")
    arguments = {"max_new_tokens": 2, "prefill_chunk_size": chunk, "output_logits": True}
    for seed in range(2):
        pair.generate(**ragged_batch((13, 6, 2), seed=seed), **arguments, return_dict_in_generate=True)


@every_family_kinds_quick
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_pool_too_small_for_the_batch(make: MakePair, name: str, preemption: str) -> None:
    """Would break: states that are lost when their sequence makes room, or computed again by another formula."""
    roomy = make(name)
    num_blocks = least_blocks(roomy, 11 + NEW) + 2
    pair = make(name, num_blocks=num_blocks, preemption=preemption, max_num_batched_tokens=8)
    roomy.engine.close()
    for arguments in ({}, {"num_beams": 2}):
        pair.generate(**ragged_batch(), max_new_tokens=NEW, eos_token_id=None, **arguments)
    stats = pair.engine.stats()
    assert stats.num_preemptions > 0
    if preemption == "swap":
        assert stats.num_swapped_out > 0


@every_family
def test_prefix_hits(make: MakePair, name: str) -> None:
    pair = make(name)
    ids = random_ids(1, 26)
    hits = []
    for length in (14, 14, 26, 21, 13):
        pair.generate(input_ids=ids[:, :length], max_new_tokens=5)
        hits.append(pair.delta["prefix_cache_hit_tokens"])
    # The last block boundary that leaves two tokens, where one came by before.
    assert hits == ([0] * 5 if name in WHOLE_PROMPTS else [0, 12, 12, 12, 0])


@pytest.mark.parametrize(
    ("name", "lengths"), [(name, (11, 7, 2)) for name in STATE_MODELS] + [(name, (11, 11)) for name in (*PURE, "lfm2")]
)
def test_cache_kept_over_two_turns(make: MakePair, name: str, lengths: tuple[int, ...]) -> None:
    """Would break: a prompt that continues a state; rows without padding, of which transformers drops the mask."""
    pair = make(name)
    argument = cache_argument(type(pair.stock).forward)

    def turn(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=6, eos_token_id=None, **{argument: cache})
        assert isinstance(tokens, Tensor)
        return tokens

    batch = ragged_batch(lengths)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = hf_paged.PagedCache(pair.paged)
    first = turn(pair.paged, cache, ids, mask)
    ids = torch.cat([first, random_ids(len(ids), 4, seed=1)], dim=1)
    mask = nn.functional.pad(mask, (0, ids.shape[1] - 11), value=1)
    second = turn(pair.paged, cache, ids, mask)
    # Where transformers' own second turn goes wrong, what it makes of the whole text.
    stock = DynamicCache(config=pair.stock.config)
    if name not in (*WHOLE_PROMPTS, *PURE):
        turn(pair.stock, stock, batch["input_ids"], batch["attention_mask"])
    assert torch.equal(second, turn(pair.stock, stock, ids, mask))
    assert cache.get_seq_length() == second.shape[1] - 1
    del cache
    pair.engine.check_invariants()


@every_family_kinds_quick
def test_threads_and_submitted_requests(make: MakePair, name: str) -> None:
    pair = make(name)
    prompts = [random_ids(1, 3 + index, seed=index) for index in range(16)]
    expected = [pair.stock.generate(ids, max_new_tokens=NEW, do_sample=False) for ids in prompts]
    requests = [pair.engine.submit(ids, max_new_tokens=NEW, do_sample=False) for ids in prompts]
    found = at_once(lambda ids: pair.paged.generate(ids, max_new_tokens=NEW, do_sample=False), prompts)
    for index, tokens in enumerate(expected):
        assert torch.equal(found[index], tokens)
        assert requests[index].result().token_ids == tokens[0, prompts[index].shape[1] :].tolist()


@every_kind
@pytest.mark.parametrize("arguments", [{}, {"do_sample": True}], ids=name_of)
def test_prompts_in_chunks(make: MakePair, name: str, arguments: dict[str, Any]) -> None:
    pair = make(name, max_num_batched_tokens=5, enable_prefix_caching=False)
    pair.generate(**ragged_batch((23, 9, 2)), max_new_tokens=6, **arguments)
    assert max(pair.seen) <= 5


@pytest.mark.parametrize(("name", "count"), [("lfm2", 7), ("qwen3_next", 15)])
def test_steps_with_one_token_left(make: MakePair, name: str, count: int) -> None:
    """Would break: a prompt that goes on with two tokens at least, beside decodes that leave one, and never does."""
    pair = make(name, num_blocks=2000, max_num_batched_tokens=count + 1)
    given = ragged_batch((40, 2)) | {"do_sample": True, "num_return_sequences": count, "max_new_tokens": 30}
    torch.manual_seed(0)
    future = in_background(pair.paged.generate, **given, eos_token_id=None, pad_token_id=0)
    found = future.result(PATIENCE)
    torch.manual_seed(0)
    assert torch.equal(found, pair.stock.generate(**given, eos_token_id=None, pad_token_id=0))


def test_a_failed_step_is_computed_again(make: MakePair) -> None:
    """Would break: states that the layers before the one that failed have changed already."""
    pair = make("qwen3_next")
    expected = pair.stock.generate(**ragged_batch(), max_new_tokens=NEW)
    failures = iter([False] * 6 + [True] + [False] * 999)
    layer = pair.paged.model.layers[-1].mlp

    @hf_paged.packed_hook
    def fail(*_: Any) -> None:
        if next(failures):
            raise RuntimeError("once")

    cache = hf_paged.PagedCache(pair.paged)
    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="once"):
        pair.paged.generate(**ragged_batch(), max_new_tokens=NEW, past_key_values=cache)
    assert cache.get_seq_length() > 0
    pair.engine.check_invariants()
    rest = pair.paged.generate(**ragged_batch(), max_new_tokens=NEW)
    assert torch.equal(rest, expected)
    handle.remove()
    del cache


def test_cropped_caches(make: MakePair) -> None:
    """Would break: a state taken for that of fewer tokens; the way back by computing all of them again."""
    pair = make("bamba")
    ids = random_ids(2, 9)
    cache = hf_paged.PagedCache(pair.paged)
    with torch.no_grad():
        pair.paged(ids, past_key_values=cache, logits_to_keep=1)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-2)
        cache.activate_past_recording()
        more = pair.paged(random_ids(2, 3, seed=1), past_key_values=cache, logits_to_keep=1)
        assert more.logits.shape[1] == 1
        cache.crop(-3)
        found = pair.paged(random_ids(2, 2, seed=2), past_key_values=cache, logits_to_keep=1).logits
        expected = pair.stock(torch.cat([ids, random_ids(2, 2, seed=2)], dim=1)).logits[:, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert [layer.keys is None for layer in cache.layers] == [True, False, True, True]
    del cache


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "jamba"])
def test_a_patched_assistant_drafts_as_stock(make: MakePair, name: str) -> None:
    """Would break: drafts that a state can't be taken back behind."""
    pair, helper = make(name), build_state_model(name)
    main = build("llama")
    given = {"max_new_tokens": 16, "eos_token_id": None}
    for seed in range(2):
        ids = random_ids(1, 12, seed)
        expected = main.generate(ids, assistant_model=helper, **given)
        assert torch.equal(main.generate(ids, assistant_model=pair.paged, **given), expected)
    pair.assert_all_free()


def drafts(kind: str, model: Any) -> dict[str, Any]:
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": 3}
    is_patched = kind == "patched assistant" and hasattr(model, "paged")
    assistant = build("llama")
    return {"assistant_model": hf_paged.patch(assistant, num_blocks=64) if is_patched else assistant}


@pytest.mark.parametrize("kind", ["lookup", "assistant", "patched assistant"])
@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe", "inkling"])
def test_drafts_of_a_prompt(make: MakePair, name: str, kind: str) -> None:
    """Would break: drafts for families whose states stock takes back; in a cache of the caller's, over two turns."""
    pair = make(name)
    settings = {"max_new_tokens": 8, "eos_token_id": None}
    for do_sample in (False, True):
        given = {"input_ids": random_ids(1, 12, seed=1), "do_sample": do_sample} | settings
        pair.generate(make=lambda model: drafts(kind, model), **given, falls_back=True)
        if OLD:  # a kept cache with drafts is refused there, for the masks of its forwards
            continue

        texts = []
        for model, cache in (
            (pair.stock, DynamicCache(config=pair.stock.config)),
            (pair.paged, hf_paged.PagedCache(pair.paged)),
        ):
            own = drafts(kind, model) | {"past_key_values": cache}
            torch.manual_seed(1)
            first = model.generate(**given, **own)
            given_next = given | {"input_ids": torch.cat([first, random_ids(1, 3)], dim=1)}
            texts.append((model.generate(**given_next, **own), torch.get_rng_state()))
        del cache, own
        assert_same(*texts)
        pair.assert_all_free()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["lookup", "patched assistant"])
def test_drafts_of_a_batch_are_left_out(make: MakePair, kind: str, do_sample: bool) -> None:
    pair = make("lfm2")

    def call(model: Any) -> Any:
        own = drafts(kind, model) if hasattr(model, "paged") else {}
        return model.generate(**ragged_batch(), max_new_tokens=8, eos_token_id=None, do_sample=do_sample, **own)

    pair.both(call, falls_back=True)
    pair.assert_all_free()


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_other_padding_runs_stock(make: MakePair, name: str) -> None:
    pair = make(name)
    pair.generate(**ragged_batch(side="right"), max_new_tokens=5, falls_back=True)
    cache, batch = hf_paged.PagedCache(pair.paged), ragged_batch(side="right")
    with pytest.raises(hf_paged.UnsupportedCallError, match="padded on the left"), torch.no_grad():
        pair.paged(**batch, **{cache_argument(type(pair.stock).forward): cache})


def test_states_are_counted_and_typed(make: MakePair) -> None:
    """Would break: statistics that forget states; a recurrent state rounded to the model's dtype."""
    pair = make("qwen3_next")
    cache = hf_paged.PagedCache(pair.paged)
    pair.paged.generate(**ragged_batch(), max_new_tokens=2, past_key_values=cache)
    stats = pair.engine.stats()
    size = pair.engine.core.manager.state_blocks
    assert (stats.num_states, stats.state_blocks) == (3, 3 * size)
    in_use = stats.num_blocks - stats.num_free_blocks
    assert stats.kv_slots_allocated == (in_use - 3 * size) * 4
    del cache
    kinds = {tensor.kind: tensor.dtype for tensor in pair.engine.traits.states[0].tensors}
    assert kinds == {"conv": None, "recurrent": torch.float32}
    half = hf_paged.patch(build_state_model("qwen3_next").to(torch.bfloat16), num_blocks=600, block_size=4)
    half.generate(**ragged_batch(), max_new_tokens=4)
    states = half.paged.core.kv_cache.states.empty(0, 1)
    assert [state.dtype for _, state in states.tensors] == [torch.bfloat16, torch.float32]


def test_layers_decide_not_the_class() -> None:
    config = {
        name: value for name, value in STATE_MODELS["granitemoehybrid"]().to_dict().items() if "layer" not in name
    }
    kind = type(build_state_model("granitemoehybrid"))
    model = kind(kind.config_class(**config, num_hidden_layers=2, layer_types=["attention"] * 2)).eval()
    report = hf_paged.is_supported(model)
    assert report.traits is not None and not report.traits.states and None not in report.traits.layers
