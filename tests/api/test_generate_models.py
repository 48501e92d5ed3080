"""Every architecture of the table through the essential modes; what is refused, and that asking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaForCausalLM, pipeline

import hf_paged
from helpers.models import (
    MODELS,
    REFUSED,
    build,
    least_blocks,
    name_of,
    ragged_batch,
    random_ids,
    tiny_lm,
    tiny_tokenizer,
)
from helpers.modes import EACH_MODEL_SCORED
from helpers.pairs import MakePair, assert_same_cache, new_cache

NEW = 14
"""With prompts of up to 11 tokens: beyond the windows (5, 6) and the original contexts (16) of the table."""

MODES: dict[str, dict[str, Any]] = {
    **{name: mode for name, mode in EACH_MODEL_SCORED.items() if name != "greedy"},
    "eos_often": {"eos_token_id": list(range(2, 30))},
    "positions": {"position_ids": (ragged_batch()["attention_mask"].cumsum(dim=1) - 1).clamp_min(0) + 3},
    "prefill_chunks": {"prefill_chunk_size": 5},
    "right_padded": ragged_batch(side="right"),
}

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_greedy_ragged_batch(make_pair: MakePair, name: str) -> None:
    pair = make_pair(name)
    traits, row = pair.engine.traits, MODELS[name]
    assert (traits.runs_packed, traits.is_batched) == (row.runs_packed, row.is_batched)
    assert any(layer and layer.window and not layer.chunk for layer in traits.layers) == row.has_windows
    expected, _ = pair.generate(**ragged_batch(), max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True)
    del _
    assert pair.delta["num_steps"] >= NEW or not row.is_batched
    # The row of the table is worth something: diverse text, decided by gaps that rounding can't close.
    best = torch.stack(expected.logits, dim=1).topk(2, dim=-1).values
    assert float((best[..., 0] - best[..., 1]).min()) > 1e-3 * float(best.abs().max())
    assert min(len(set(row[11:].tolist())) for row in expected.sequences) >= 5
    pair.generate(**ragged_batch(), max_new_tokens=NEW)


@every_model
@pytest.mark.parametrize("mode", MODES)
def test_mode(make_pair: MakePair, name: str, mode: str) -> None:
    pair = make_pair(name, block_size=3)
    pair.generate(**(ragged_batch() | {"max_new_tokens": NEW} | MODES[mode]))
    assert pair.delta["num_steps"] > 0
    if mode in ("samples", "beams") and MODELS[name].is_batched:
        # Padded, rows of other lengths are apart
        prompts = pair.seen[:1] if MODELS[name].runs_packed else pair.seen[:3]
        assert sum(prompts) == 11 + 7 + 2, "a prompt was computed for every copy"


@every_model
def test_cache_kept_over_two_turns(make_pair: MakePair, name: str) -> None:
    """Would break: a prompt that continues tokens in the cache (masks, windows, positions beyond them)."""
    pair = make_pair(name)
    caches = []

    def call(model: Any) -> Any:
        cache, batch = new_cache(model), ragged_batch()
        first = model.generate(**batch, past_key_values=cache, max_new_tokens=6, eos_token_id=None)
        ids = torch.cat([first, random_ids(3, 4, seed=1)], dim=1)
        mask = nn.functional.pad(batch["attention_mask"], (0, ids.shape[1] - 11), value=1)
        second = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, eos_token_id=None)
        caches.append((cache, mask))
        return first, second

    pair.both(call)
    (stock, mask), (paged, _) = caches
    if stock.get_seq_length() == paged.get_seq_length() > 0:
        assert_same_cache(stock, paged, nn.functional.pad(mask, (0, 5), value=1))
    caches.clear()
    del stock, paged
    pair.assert_all_free()


@every_model
@pytest.mark.usefixtures("full_budget")
def test_prompt_lookup(make_pair: MakePair, name: str) -> None:
    pair = make_pair(name, block_size=2)
    ids = random_ids(1, 4).repeat(1, 3)
    pair.generate(input_ids=ids, max_new_tokens=NEW, prompt_lookup_num_tokens=3, repetition_penalty=0.6)
    assert max(pair.seen[1:]) > 1, "no candidates: the test is too easy"


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row.is_batched])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_pool_too_small_for_the_batch(make_pair: MakePair, name: str, preemption: str) -> None:
    """Would break: rows evicted and computed again in chunks of three tokens, or swapped as if all pages were alike."""
    settings = {"block_size": 2, "max_num_batched_tokens": 3, "preemption": preemption}
    pair = make_pair(name, num_blocks=least_blocks(name, 19, 2, 3) + 1, **settings)
    arguments = {"num_beams": 2} if preemption == "swap" else {"do_sample": True}
    pair.generate(**ragged_batch(), max_new_tokens=8, **arguments)
    assert pair.delta["num_preemptions"] > 0 and (pair.delta["num_swapped_out"] > 0) == (preemption == "swap")
    assert max(pair.seen) <= 3


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if not row.is_batched])
def test_pool_too_small_for_the_batch_of_a_model_that_cannot_wait(make_pair: MakePair, name: str) -> None:
    """Would break: a model whose rows all need their keys at once: refused with the numbers, and nothing is left."""
    pair = make_pair(name, block_size=2, num_blocks=13)
    with pytest.raises(hf_paged.OutOfBlocksError, match="at once, the pool has 13"):
        pair.paged.generate(**ragged_batch(), max_new_tokens=NEW)
    pair.engine.check_invariants()
    pair.assert_all_free()
    pair.generate(**ragged_batch((3, 2)), max_new_tokens=4)


@every_model
def test_prompts_of_growing_length_with_one_beginning(make_pair: MakePair, name: str) -> None:
    """Would break: prefix hits and chunks where keys depend on how long the prompt is (dynamic and long rope)."""
    pair = make_pair(name, block_size=2, max_num_batched_tokens=5)
    for length in (12, 16, 26):
        pair.generate(input_ids=random_ids(1, 26)[:, :length], max_new_tokens=5)
        if MODELS[name].is_batched:
            assert (pair.delta["prefix_cache_hit_tokens"] > 0) == (length > 12)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    model = make()
    kind = type(model)
    report = hf_paged.is_supported(model)
    assert not report and reason in " ".join(report.reasons)
    with pytest.raises(hf_paged.UnsupportedModelError, match=reason) as caught:
        hf_paged.patch(model)
    assert caught.value.reasons == report.reasons and kind.__name__ in str(caught.value)
    assert type(model) is kind and not hasattr(model, "paged")


def _raises(*_: Any) -> Any:
    raise RuntimeError("it varies from layer to layer")


def with_config(**attributes: Any) -> Any:
    model = build("llama")
    vars(model.config).update(attributes)
    return model


def with_a_config_that_raises() -> Any:
    """As Gemma 4's does, whose heads differ in width from layer to layer."""
    model = build("llama")
    model.config.__class__ = type("Config", (type(model.config),), {"head_dim": property(_raises)})
    return model


def elsewhere(device: str) -> Any:
    """A model whose parameters say that they are on a device there needn't be."""
    model = build("llama")
    with FakeTensorMode():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, device=device))
    return model


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    **{str(thing): (lambda thing=thing: thing, type(thing).__name__) for thing in ("gpt2", None, 3, nn.Linear)},
    "raises in getattr": (lambda: type("Thing", (), {"__getattr__": _raises})(), "raised RuntimeError"),
    "not constructed": (lambda: LlamaForCausalLM.__new__(LlamaForCausalLM), "raised AttributeError"),
    **{f"on {name}": (lambda name=name: elsewhere(name), f"it is on {name}:0") for name in ("mps", "xpu")},
    "hooks to mps": (lambda: add_hook_to_module(build("llama"), AlignDevicesHook(torch.device("mps"))), "it is on mps"),
    "on meta": (lambda: build("llama").to("meta"), "meta device"),
    "config raises": (with_a_config_that_raises, "could not be built and run to try"),
    "no heads": (lambda: with_config(num_attention_heads=0, num_key_value_heads=0), "could not be"),
    "nonsense": (lambda: with_config(num_hidden_layers="many"), "TypeError"),
    "other nonsense": (lambda: with_config(layer_types=7), "raised TypeError"),
    "a config": (lambda: build("llama").config, "LlamaConfig, not a Hugging Face model"),
    "compiled": (lambda: torch.compile(build("llama")), "patch the one inside of it, its ._orig_mod"),
    "wrapped": (lambda: nn.DataParallel(build("llama")), "patch the one inside of it, its .module"),
    "pipeline": (lambda: pipeline("text-generation", tiny_lm(), tokenizer=tiny_tokenizer()), "patch its .model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_asking_never_raises(name: str) -> None:
    """Would break: an answer that is an exception from deep inside, or a way out that is none."""
    make, reason = WRONG[name]
    thing = make()
    report = hf_paged.is_supported(thing)
    assert not report and reason in report.reasons[0]
    with pytest.raises(ValueError, match=type(thing).__name__):
        hf_paged.patch(thing)


@pytest.mark.usefixtures("own_trial")
def test_a_copy_that_would_take_gigabytes_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: memory and minutes, for an architecture that can't be made narrow."""
    monkeypatch.setattr("hf_paged.api.tiny_model._MAX_ELEMENTS", 1000)
    report = hf_paged.is_supported(build("llama"))
    assert not report and "parameters" in report.reasons[0]


@pytest.mark.parametrize("vocab_size", [3, 50])
@pytest.mark.parametrize("name", ["llama", "gemma3n"])
def test_a_small_vocabulary_with_a_pad_token(name: str, vocab_size: int) -> None:
    config = MODELS[name].config()
    small = {own: vocab_size for own in ("vocab_size", "vocab_size_per_layer_input") if hasattr(config, own)}
    config = type(config)(**(config.to_dict() | small | {"pad_token_id": vocab_size - 1}))
    report = hf_paged.is_supported(AutoModelForCausalLM.from_config(config))
    assert report, report.reasons


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}], ids=name_of)
def test_config_that_asks_for_router_logits(make_pair: MakePair, name: str, when: str, mode: dict[str, Any]) -> None:
    """Would break: a loss over experts that reckons with the mask of a packed batch, in patch() or in a step."""
    model = build(name)
    model.config.output_router_logits = when == "before"
    pair = make_pair(model)
    pair.paged.config.output_router_logits = True
    pair.stock.config.output_router_logits = False  # transformers 5.17 can't generate with them
    pair.generate(input_ids=random_ids(2, 9), max_new_tokens=4, **mode)


@pytest.mark.usefixtures("own_trial")
@pytest.mark.parametrize("name", ["llama", "gemma2", "mpt", "phi3_longrope", "mixtral"])
def test_asking_changes_nothing(name: str) -> None:
    model = build(name)
    forwards: list[Any] = []
    model.register_forward_pre_hook(lambda *args: forwards.append(args))
    config, generation = deepcopy(model.config.to_dict()), deepcopy(model.generation_config.to_dict())
    attributes, kind = set(model.__dict__), type(model)
    tensors = {key: (value, value._version, value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    implementation, training = model.config._attn_implementation, model.training
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert hf_paged.is_supported(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not forwards
    assert model.config.to_dict() == config and model.generation_config.to_dict() == generation
    assert (set(model.__dict__), type(model), model.training) == (attributes, kind, training)
    assert model.config._attn_implementation == implementation
    for key, value in model.state_dict(keep_vars=True).items():
        tensor, version, content = tensors[key]
        assert value is tensor and value._version == version and torch.equal(value, content)
