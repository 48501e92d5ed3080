"""Multimodal models: their text-only calls, pictures, and what of both the prefix cache may share."""

from __future__ import annotations

import copy
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

import hf_paged
from helpers.models import least_blocks, ragged_batch, random_ids
from helpers.modes import EACH_MODEL_SCORED
from helpers.pairs import MakePair, Pair, new_cache
from helpers.waiting import PATIENCE, at_once
from helpers.wrappers import IMAGE, WRAPPERS, asking, build_wrapper
from hf_paged import PagedCache
from hf_paged.api.support import is_architecture_supported
from hf_paged.model.wrapper import token_positions

NEW = 8
OLD = Version(transformers.__version__) < Version("5.18.dev0")

CAUSAL = [name for name, row in WRAPPERS.items() if row.is_causal]

every_wrapper = pytest.mark.parametrize("name", WRAPPERS)
every_causal = pytest.mark.parametrize("name", CAUSAL)
every_mode = pytest.mark.parametrize("mode", EACH_MODEL_SCORED)

SINGLE = ("fuyu", "qwen2_5_omni", "llama4")
"""Whose pictures stock doesn't expand for samples and beams."""

TWO = ((3, 4), (1, 2))
"""Tokens before and behind the pictures of two rows of different lengths."""


@pytest.fixture
def make_wrapper_pair(make_pair: MakePair) -> MakePair:
    def make(name: str, **settings: Any) -> Pair:
        return make_pair(build_wrapper(name), **settings)

    return make


@every_wrapper
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_text_alone(make_wrapper_pair: MakePair, name: str, mode: str) -> None:
    pair = make_wrapper_pair(name)
    prompt = random_ids(1, 9, seed=1)
    request = pair.engine.submit(prompt, max_new_tokens=NEW)
    assert request.result(20).token_ids == pair.stock.generate(prompt, max_new_tokens=NEW)[0, 9:].tolist()
    pair.generate(**ragged_batch(), max_new_tokens=NEW, **EACH_MODEL_SCORED[mode])
    # Stock computes PaliGemma otherwise with padding than without.
    in_one_step = name != "paligemma" and not pair.engine.traits.states
    if in_one_step and (mode != "beams" or pair.stock._supports_logits_to_keep()):
        assert pair.seen[0] == 11 + 7 + 2, "padding was computed"


@every_wrapper
@every_mode
def test_pictures(make_wrapper_pair: MakePair, name: str, mode: str) -> None:
    """Would break: what the language model is given for a picture, on its way to the batch."""
    if name in SINGLE and mode in ("samples", "beams"):
        pytest.skip("stock doesn't expand its pictures")
    pair = make_wrapper_pair(name)
    call = asking(name, (0, 1), TWO)
    pair.generate(**call, max_new_tokens=NEW, **EACH_MODEL_SCORED[mode])
    has_logits_of_last = mode in ("greedy", "sample", "samples") or pair.stock._supports_logits_to_keep()
    is_odd = OLD and name == "mistral3"  # its tower rounds copies otherwise there
    # A prompt whose state is kept at the last block boundary takes two steps.
    is_odd |= bool(pair.engine.traits.states)
    if has_logits_of_last and WRAPPERS[name].is_causal and not is_odd:
        assert pair.seen[0] == int(call["attention_mask"].sum()), "padding or copies were computed"


@every_wrapper
@pytest.mark.parametrize("turns", ["text text", "picture text", "text picture", "picture picture"])
def test_cache_kept_over_two_turns(make_wrapper_pair: MakePair, name: str, turns: str) -> None:
    """Would break: positions behind a picture of an earlier call, and a picture behind tokens in the cache."""
    if turns.endswith("picture") and (
        not WRAPPERS[name].is_causal or (turns == "picture picture" and WRAPPERS[name].types)
    ):
        pytest.skip("stock can't")
    pair = make_wrapper_pair(name)
    first, second = (asking(name, (turn,)) for turn in (0, 1))
    kinds = turns.split()

    def call(model: Any) -> Any:
        cache = new_cache(model)
        given = copy.deepcopy(first) if kinds[0] == "picture" else {"input_ids": random_ids(1, 7)}
        one = model.generate(**given, past_key_values=cache, max_new_tokens=5, eos_token_id=None)
        if kinds[1] == "text":
            ids = torch.cat([one, random_ids(1, 4, seed=1)], dim=1)
            return one, model.generate(ids, past_key_values=cache, max_new_tokens=5, eos_token_id=None)
        given = copy.deepcopy(second)
        given["input_ids"] = torch.cat([one, given["input_ids"]], dim=1)
        del given["attention_mask"]
        types = WRAPPERS[name].types
        if types is not None:
            given[types] = nn.functional.pad(given[types], (one.shape[1], 0))
        return one, model.generate(**given, past_key_values=cache, max_new_tokens=5, eos_token_id=None)

    pair.both(call)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL"])
def test_shares_of_axes_that_the_config_does_not_state(kind: str) -> None:
    """Would break: a narrow copy whose code takes a head of 128 for granted."""
    base, config = (getattr(transformers, f"{kind}{end}") for end in ("ForConditionalGeneration", "Config"))
    assert "mrope_section" not in config().text_config.rope_parameters
    assert is_architecture_supported(base, config()).layout == "packed"


def test_positions_in_floating_point_numbers() -> None:
    """Would break: prefix hits and packed batches of wrappers that count so (Qwen3-Omni)."""
    whole = torch.arange(5.0).expand(4, 1, 5)
    assert torch.equal(token_positions(whole), torch.arange(5)[None])
    assert token_positions(whole + 0.5).is_floating_point()


@every_wrapper
def test_forward(make_wrapper_pair: MakePair, name: str) -> None:
    """Would break: a caller's own forwards, a picture and then tokens whose positions the model has to find."""
    pair = make_wrapper_pair(name)
    given = asking(name)
    del given["attention_mask"]
    kinds = []

    def call(model: Any) -> Any:
        cache = new_cache(model)
        with torch.no_grad():
            output = model(**copy.deepcopy(given), past_key_values=cache)
            kinds.append(type(output))
            first = output.logits
            second = model(input_ids=random_ids(1, 3), past_key_values=cache).logits
            third = model(input_ids=random_ids(1, 1, seed=2), past_key_values=cache).logits
        return first, second, third

    pair.both(call)
    assert kinds[0] is kinds[1]


@every_wrapper
@pytest.mark.parametrize(("mode", "preemption"), [("greedy", "swap"), ("beams", "recompute")])
def test_pool_too_small_for_the_batch(make_wrapper_pair: MakePair, name: str, preemption: str, mode: str) -> None:
    """Would break: pictures that are computed again, or swapped, and cut into chunks."""
    if mode == "beams" and (name in SINGLE or not build_wrapper(name)._supports_logits_to_keep()):
        pytest.skip("stock doesn't expand its pictures, or wants logits of the padding, too")
    call = asking(name, (0, 1), TWO)
    model, prompts = build_wrapper(name), call["attention_mask"].sum(dim=1).tolist()
    both = sum(least_blocks(model, num_tokens, 2, 3) for num_tokens in prompts)
    num_blocks = max(both, least_blocks(model, max(prompts) + 20, 2, 3)) + 2
    pair = make_wrapper_pair(name, block_size=2, num_blocks=num_blocks, max_num_batched_tokens=3, preemption=preemption)
    pair.generate(**call, max_new_tokens=20, eos_token_id=None, **EACH_MODEL_SCORED[mode])
    assert max(pair.seen) <= 3 or not WRAPPERS[name].is_causal
    assert pair.delta["num_preemptions"] > 0


@every_causal
def test_the_same_picture_is_computed_once(make_wrapper_pair: MakePair, name: str) -> None:
    pair = make_wrapper_pair(name, block_size=2)
    num_tokens = asking(name)["input_ids"].shape[1]
    pair.generate(**asking(name), max_new_tokens=2)
    assert pair.delta["prefix_cache_hit_tokens"] == 0
    pair.generate(**asking(name), max_new_tokens=2)
    assert pair.delta["prefix_cache_hit_tokens"] == (num_tokens - 1) // 2 * 2
    pair.generate(**asking(name, seed=1), max_new_tokens=2)
    assert pair.delta["prefix_cache_hit_tokens"] == 0
    pair.generate(**asking(name, pictures=(1,)), max_new_tokens=2)
    words = 3 + WRAPPERS[name].has_start
    assert pair.delta["prefix_cache_hit_tokens"] == words // 2 * 2
    ids = asking(name)["input_ids"]
    pair.generate(input_ids=torch.where(ids == IMAGE, 5, ids), max_new_tokens=2)
    assert pair.delta["prefix_cache_hit_tokens"] <= words // 2 * 2


@pytest.mark.parametrize("name", [name for name, row in WRAPPERS.items() if row.types and row.has_start])
def test_equal_pixels_under_another_grid_are_another_picture(make_wrapper_pair: MakePair, name: str) -> None:
    pair = make_wrapper_pair(name, block_size=2)
    call = asking(name)
    pair.generate(**call, max_new_tokens=2)
    pair.generate(**(call | {"image_grid_thw": torch.tensor([[1, 8, 4]])}), max_new_tokens=2)
    assert pair.delta["prefix_cache_hit_tokens"] <= 4


@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_what_layers_are_told_of_a_token_is_part_of_it(make_wrapper_pair: MakePair, name: str) -> None:
    """Would break: hits for equal embeddings that come with something else for each layer."""
    pair = make_wrapper_pair(name, block_size=2)
    language_model = pair.stock.model.language_model
    ids, others = random_ids(1, 9) % 90, random_ids(1, 9, seed=1) % 90
    given = {"inputs_embeds": language_model.get_input_embeddings()(ids).detach()}
    get = language_model.get_per_layer_inputs
    no_embeddings = [None] * (len(inspect.signature(get).parameters) - 1)  # Gemma 4 in 5.17 asks for both
    for told, hits in ((ids, 0), (others, 0), (ids, 8)):
        given["per_layer_inputs"] = get(told, *no_embeddings).detach()
        try:
            pair.stock(**given)
        except TypeError:  # Gemma 3n in 5.17
            pytest.skip("stock's wrapper gives its language model these inputs twice")
        pair.both(lambda model: model(**given, past_key_values=new_cache(model), logits_to_keep=1).logits)
        assert pair.delta["prefix_cache_hit_tokens"] == hits


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["embed_tokens"], r".*language_model.*\.q_proj"], ids=str)
def test_lora(targets: Any, tmp_path: Path) -> None:
    """Would break: adapters behind a tower, whose rows are no tokens of a step, or of rows that have other ones."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_alpha=64)
    torch.manual_seed(0)
    stock = peft.get_peft_model(build_wrapper("llava"), lora, adapter_name="one")
    stock.add_adapter("two", lora)
    model = hf_paged.patch(copy.deepcopy(stock.eval()), num_blocks=256)
    stock.save_pretrained(tmp_path, selected_adapters=["two"])
    call, engine, texts = asking("llava"), model.get_base_model().paged, {}
    details = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_hidden_states": True}
    for name in ("one", "two"):
        for each in (stock, model):
            each.set_adapter(name)
        for given in (call, {"input_ids": random_ids(1, 6)}):
            found = [each.generate(**given, max_new_tokens=NEW) for each in (stock, model)]
            assert torch.equal(*found)
        texts[name] = stock.generate(**call, max_new_tokens=NEW)[0, call["input_ids"].shape[1] :].tolist()
        if isinstance(targets, list):
            assert torch.equal(*[each.generate(**call, **details).sequences for each in (stock, model)])
    assert texts["one"] != texts["two"], "the adapters change nothing"
    asked = {key: value for key, value in call.items() if key != "input_ids"} | {"max_new_tokens": NEW}
    if isinstance(targets, list):  # not the language model's layers alone
        with pytest.raises(ValueError, match="what reads pictures"):
            engine.submit(call["input_ids"], adapter="one", **asked)
        with pytest.raises(ValueError, match="what reads pictures"):
            engine.load_adapter("loaded", tmp_path / "two")
        with pytest.raises(ValueError, match="token id 1000 is outside"):
            engine.submit([1000])
    else:
        engine.load_adapter("loaded", tmp_path / "two")
        for name, own in (("one", "one"), ("two", "two"), ("loaded", "two")):
            assert engine.submit(call["input_ids"], adapter=name, **asked).result(PATIENCE).token_ids == texts[own]


def test_a_projector_that_an_adapter_has_saved(tmp_path: Path) -> None:
    """Would break: pictures that are read by the base's projector, where a loaded adapter has one of its own."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=r".*language_model.*\.q_proj", modules_to_save=["multi_modal_projector"])
    peft.get_peft_model(build_wrapper("llava"), lora).save_pretrained(tmp_path)
    model = hf_paged.patch(build_wrapper("llava"), num_blocks=64)
    with pytest.raises(ValueError, match="what reads pictures"):
        model.paged.load_adapter("saved", tmp_path)


@pytest.mark.parametrize("name", ["qwen2_audio", "llava"])
def test_logits_to_keep(make_wrapper_pair: MakePair, name: str) -> None:
    """Would break: columns left out by a model whose own forward doesn't know the argument, and gives all."""
    pair, ids = make_wrapper_pair(name), random_ids(2, 9) % 90
    pair.both(lambda model: model(ids, past_key_values=new_cache(model), logits_to_keep=1).logits)


@every_wrapper
def test_threads_with_pictures_of_their_own(name: str) -> None:
    stock = build_wrapper(name)
    paged = hf_paged.patch(copy.deepcopy(stock), block_size=4, num_blocks=512)
    calls = []
    for index in range(10):
        call = asking(name, (index,), ((1 + index % 3, 2 + index % 5),), seed=index)
        if index % 4 == 3:
            call = {"input_ids": random_ids(1, 6 + index, seed=index)}
        calls.append(call)

    def talk(model: Any, call: dict[str, Any]) -> Tensor:
        cache = new_cache(model)
        first = model.generate(**copy.deepcopy(call), past_key_values=cache, max_new_tokens=6, eos_token_id=None)
        ids = torch.cat([first, random_ids(1, 3)], dim=1)
        return model.generate(ids, past_key_values=cache, max_new_tokens=6, eos_token_id=None)

    expected = [talk(stock, call) for call in calls]
    found = at_once(lambda call: talk(paged, call), calls)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    paged.paged.check_invariants()


@every_wrapper
def test_nothing_is_left_on_the_model(name: str) -> None:
    paged = hf_paged.patch(build_wrapper(name), block_size=4, num_blocks=64)
    parts = [paged, paged.base_model]
    before = [dict(vars(part)) for part in parts]
    cache = PagedCache(paged)
    paged.generate(**asking(name), past_key_values=cache, max_new_tokens=3)
    with torch.no_grad():
        paged(input_ids=random_ids(1, 2), past_key_values=cache)
    assert [dict(vars(part)) for part in parts] == before
    hf_paged.unpatch(paged)


@pytest.mark.parametrize("name", [name for name, row in WRAPPERS.items() if not row.is_causal])
def test_tokens_that_see_each_other(make_wrapper_pair: MakePair, name: str) -> None:
    """Would break: a picture computed in two steps, or found in the cache in part."""
    pair = make_wrapper_pair(name, block_size=2, max_num_batched_tokens=2)
    call = asking(name)
    num_tokens, picture = call["input_ids"].shape[1], WRAPPERS[name].num_tokens
    pair.generate(**call, max_new_tokens=4)
    assert pair.seen[-1] == 1 and max(pair.seen) == (num_tokens if name == "paligemma" else picture)
    pair.generate(**call, max_new_tokens=4)
    assert pair.delta["prefix_cache_hit_tokens"] == (num_tokens - 1) // 2 * 2
    other = asking(name, lengths=((3, 5),), seed=1)
    other["input_ids"][:, :-5] = call["input_ids"][:, :-4]
    pair.generate(**other, max_new_tokens=4)
    assert pair.delta["prefix_cache_hit_tokens"] == (0 if name == "paligemma" else 2)


@pytest.mark.parametrize("name", [name for name, row in WRAPPERS.items() if not row.is_causal])
@pytest.mark.parametrize("budget", [1, 3, 6])
def test_no_edge_lies_within_a_picture(make_wrapper_pair: MakePair, name: str, budget: int) -> None:
    pair = make_wrapper_pair(name, block_size=2, max_num_batched_tokens=budget)
    for before in range(4):
        for behind, seed in ((2, 0), (2, 0), (3, 1)):
            call = asking(name, lengths=((before, behind),), seed=seed)
            call["input_ids"][:, :before] = 5
            start, stop = before, before + WRAPPERS[name].num_tokens
            if name == "paligemma":
                start, stop = 0, call["input_ids"].shape[1]
            pair.generate(**call, max_new_tokens=2, eos_token_id=None)
            hits = pair.delta["prefix_cache_hit_tokens"]
            edges = list(itertools.accumulate(pair.seen, initial=hits))
            # What is found of a whole prompt ends before its last token, which has to be computed.
            has_whole = name == "paligemma" and hits == (stop - 1) // 2 * 2
            assert has_whole or not any(start < edge < stop for edge in edges)


HIDDEN_STATES = {"return_dict_in_generate": True, "output_hidden_states": True}
OTHERS: dict[str, dict[str, Any]] = {
    "hidden_states": HIDDEN_STATES,
    "hidden_states_of_samples": HIDDEN_STATES | {"do_sample": True, "num_return_sequences": 2},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunks": {"prefill_chunk_size": 4},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
}


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3"])
@pytest.mark.parametrize("arguments", OTHERS.values(), ids=OTHERS)
def test_other_ways_to_ask(make_wrapper_pair: MakePair, name: str, arguments: dict[str, Any]) -> None:
    """Would break: pictures in forwards by themselves, in the caller's shape, and in loops of transformers'."""
    pair = make_wrapper_pair(name)
    if OLD and "prefill_chunk_size" in arguments:
        pytest.skip("stock gives each chunk all pictures")
    call = asking(name) if "prompt_lookup_num_tokens" in arguments else asking(name, (0, 1), TWO)
    pair.both(lambda model: model.generate(**copy.deepcopy(call), max_new_tokens=6, **arguments))


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3"])
def test_a_hook_that_needs_rows(make_wrapper_pair: MakePair, name: str) -> None:
    """Would break: a picture shown whole to a hook, and stored as any other."""
    pair = make_wrapper_pair(name)
    pair.paged.base_model.language_model.register_forward_hook(lambda *_: None)
    call = asking(name, (0, 1), TWO)
    expected = pair.stock.generate(**copy.deepcopy(call), max_new_tokens=6)
    assert torch.equal(pair.paged.generate(**copy.deepcopy(call), max_new_tokens=6), expected)
