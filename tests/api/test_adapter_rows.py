"""An adapter a row: whatever runs beside it, its tokens are those of stock PEFT with that adapter set, alone."""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor

import hf_paged
from helpers.library_code import as_library_code
from helpers.models import build, random_ids
from helpers.requests import ENDLESS
from helpers.state_models import STATE_MODELS, build_state_model
from helpers.waiting import at_once
from hf_paged.model.adapter import Adapter

peft = pytest.importorskip("peft")

OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **ENDLESS}
BASE = "__base__"
SMALL = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 12}
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

# Adapters by name, each a LoraConfig's arguments; all of a kind go into one model.
KINDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "mixed": (
        "llama",
        {
            "one": {"r": 4, "target_modules": ATTENTION, "lora_alpha": 64},
            "two": {"r": 8, "target_modules": "all-linear", "lora_alpha": 24, "use_rslora": True},
            "three": {"r": 2, "target_modules": ["down_proj"], "rank_pattern": {"layers.1.mlp.down_proj": 5}},
        },
    ),
    "dora": (
        "llama",
        {"one": {"target_modules": "all-linear", "use_dora": True}, "two": {"target_modules": ATTENTION}},
    ),
    "bias": ("qwen2", {n: {"target_modules": "all-linear", "lora_bias": True, "r": 3} for n in ("one", "two")}),
    "ends": (
        "llama",
        {n: {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": r} for n, r in (("one", 3), ("two", 6))},
    ),
    "saved": (
        "llama",
        {n: {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]} for n in ("one", "two")},
    ),
    "conv1d": ("gpt2", {n: {"target_modules": ["c_attn", "c_fc"], "r": r} for n, r in (("one", 4), ("two", 8))}),
    "experts": ("qwen3_moe", {n: {"target_modules": ATTENTION, "r": r} for n, r in (("one", 4), ("two", 8))}),
    "windows": ("gemma3", {n: {"target_modules": "all-linear", "r": 4} for n in ("one", "two")}),
    "padded": ("falcon_rotary", {n: {"target_modules": "all-linear", "r": 4} for n in ("one", "two")}),
    "states": (
        "lfm2",
        {n: {"target_modules": ["in_proj", "out_proj", "q_proj", "w1"], "r": 4} for n in ("one", "two")},
    ),
}


def randomize(model: Any) -> None:
    """Adapters, biases, magnitudes and saved modules that matter, as if trained."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_", "modules_to_save")):
            scale = 0.1 if "magnitude" in name else 0.3 if "lora_" in name else 0.05
            parameter.data += torch.randn(parameter.shape, generator=draw) * scale


@cache
def stock_of(kind: str) -> Any:
    family, adapters = KINDS[kind]
    model: Any = build_state_model(family) if family in STATE_MODELS else build(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, settings in adapters.items():
            config = peft.LoraConfig(**settings)
            if not isinstance(model, peft.PeftModel):
                model = peft.get_peft_model(model, config, adapter_name=name)
            else:
                model.add_adapter(name, config)
    randomize(model)
    return model.eval()


def names_of(kind: str) -> list[str]:
    return [*KINDS[kind][1], BASE]


@cache
def expected(kind: str, name: str, seed: int, **options: Any) -> Tensor:
    """What stock PEFT says with this adapter set, of one prompt."""
    stock = stock_of(kind)
    if options.get("do_sample"):
        torch.manual_seed(7)
    with stock.disable_adapter() if name == BASE else set_to(stock, name):
        return stock.generate(input_ids=prompt(seed), **OPTIONS | options)


class set_to:
    def __init__(self, model: Any, name: str) -> None:
        model.set_adapter(name)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def prompt(seed: int) -> Tensor:
    ids = random_ids(1, 7, seed=seed)
    return torch.cat([ids, ids], dim=1)  # repeats itself: drafts are found


def patched(kind: str, **settings: Any) -> Any:
    return hf_paged.patch(copy.deepcopy(stock_of(kind)), **{"num_blocks": 256, "block_size": 8, **settings})


def ended(model: Any) -> None:
    engine = model.get_base_model().paged
    engine.check_invariants()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch(kind: str) -> None:
    """In one call: prompts of each adapter, and of none."""
    model, names = patched(kind), names_of(kind)
    ids = torch.cat([prompt(seed) for seed in (1, 2) for _ in names])
    found = model.generate(input_ids=ids, adapter_names=names * 2, **OPTIONS)
    truth = torch.cat([expected(kind, name, seed) for seed in (1, 2) for name in names])
    assert torch.equal(found, truth)
    assert len({tuple(row) for row in truth.tolist()}) == len(truth), "the test is too easy"
    ended(model)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_a_small_pool(kind: str, preemption: str) -> None:
    """All modes at once, so small that rows are preempted: in parts, and each prompt twice."""
    model, names = patched(kind, **SMALL, preemption=preemption), names_of(kind)
    engine = model.get_base_model().paged
    modes = ["greedy", "beams"] if kind == "states" else list(MODES)
    asked = [(name, mode, seed) for seed in (1, 2) for mode in modes for name in names]
    requests = [engine.submit(prompt(s)[0], adapter=n, **OPTIONS | MODES[mode]) for n, mode, s in asked]
    for (name, mode, seed), request in zip(asked, requests, strict=True):
        truth = expected(kind, name, seed, **MODES[mode])[:, prompt(seed).shape[1] :]
        assert request.result(120).sequences == truth.tolist(), (name, mode, seed)
    assert engine.stats().num_preemptions
    ended(model)


def test_samples_and_their_seeds() -> None:
    model = patched("mixed")
    engine = model.get_base_model().paged
    settings = {"do_sample": True, "num_return_sequences": 3}
    names = names_of("mixed")
    requests = [engine.submit(prompt(1)[0], adapter=name, seed=7, **OPTIONS | settings) for name in names]
    for name, request in zip(names, requests, strict=True):
        assert request.result(60).sequences == expected("mixed", name, 1, **settings)[:, 14:].tolist()


def test_the_batch_api(saved: Callable[[str], dict[str, str]]) -> None:
    """PEFT's adapters and loaded ones."""
    model = patched("mixed")
    inner = model.get_base_model()
    inner.paged.load_adapter("more", saved("mixed")["one"])
    asked = [(name, seed) for seed in (1, 2) for name in ("one", "more", BASE, "two")]
    config = GenerationConfig(**{**OPTIONS, "eos_token_id": -1})
    given = {"generation_config": config, "adapter_names": [name for name, _ in asked]}
    results = inner.generate_batch([prompt(seed)[0].tolist() for _, seed in asked], **given)
    for (name, seed), output in zip(asked, results.values(), strict=True):
        truth = expected("mixed", "one" if name == "more" else name, seed)[0, 14:].tolist()
        assert output.generated_tokens == truth, (name, seed)
    for names, message in (
        ([], "give one for each"),
        (["one"], "give one for each"),
        (["one", "none"], "non-existing adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            inner.generate_batch([[5], [6]], **given | {"adapter_names": names})
    with inner.continuous_batching_context_manager(config) as manager:
        with pytest.raises(ValueError, match="non-existing adapter"):
            manager.add_request([5], adapter="none")
        name = manager.add_request(prompt(1)[0].tolist(), adapter="two")
        assert manager.get_result(name).generated_tokens == expected("mixed", "two", 1)[0, 14:].tolist()
    ended(model)


class Same(LogitsProcessor):
    """A caller's own code: transformers' loop runs on its thread."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "engine's rows": dict,
    "own loop": lambda: {"logits_processor": [Same()]},
    "hidden states": lambda: {"output_hidden_states": True, "return_dict_in_generate": True},
    "stock": lambda: {"use_cache": False},
}


@pytest.mark.parametrize("how", CALLS)
def test_many_threads(how: str) -> None:
    """Each with names of its own, beside calls that name none and follow `set_adapter`."""
    model = patched("mixed")
    model.set_adapter("two")
    names = [["one", "two"], [BASE, "three"], None, ["two", "two"], ["three", "one"], None, [BASE, BASE], ["two", BASE]]

    def call(index: int) -> Tensor:
        own = {} if names[index] is None else {"adapter_names": names[index]}
        ids = torch.cat([prompt(index), prompt(index + 1)])
        result = model.generate(input_ids=ids, **OPTIONS, **own, **CALLS[how]())
        return getattr(result, "sequences", result)

    for index, found in enumerate(at_once(call, range(len(names)))):
        own = names[index] or ["two", "two"]
        assert torch.equal(found, torch.cat([expected("mixed", n, index + i) for i, n in enumerate(own)])), own
    assert not sum(len(module._forward_pre_hooks) for module in model.modules())
    ended(model)


def test_what_the_model_is_set_to() -> None:
    """One adapter, several, none; also while requests run."""
    stock, model = stock_of("mixed"), patched("mixed")
    for names in ("one", ["one", "two"], ["two", "three"], "three"):
        for each in (stock, model):
            each.base_model.set_adapter(names)
        assert torch.equal(*(each.generate(input_ids=prompt(3), **OPTIONS) for each in (stock, model)))
    with model.disable_adapter():
        assert torch.equal(model.generate(input_ids=prompt(3), **OPTIONS), expected("mixed", BASE, 3))
    engine = model.get_base_model().paged
    engine.pause()
    requests = []
    for name in ("one", "two", "three"):
        model.set_adapter(name)
        requests.append((name, engine.submit(prompt(4)[0], **OPTIONS)))
        engine.step()
    engine.resume()
    for name, request in requests:
        assert request.result(60).sequences == expected("mixed", name, 4)[:, 14:].tolist()


def test_prefixes_of_one_adapter_are_no_others() -> None:
    """Equal prompts never meet; what has nothing to do with an adapter stays when it is trained."""
    model = patched("mixed")
    engine = model.get_base_model().paged

    def hits(name: str) -> int:
        before = engine.stats().prefix_cache_hit_tokens
        assert engine.submit(prompt(5)[0], adapter=name, **OPTIONS).result(60).sequences
        return engine.stats().prefix_cache_hit_tokens - before

    names = names_of("mixed")
    assert [hits(name) for name in names] == [0] * 4
    assert [hits(name) for name in names] == [8] * 4
    trained = [p for n, p in model.named_parameters() if ".one." in n]
    for parameter in trained:
        parameter.requires_grad_(True)
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(trained, lr=0.05).step()
    assert [hits(name) for name in names] == [0, 8, 8, 8]
    trained[0].data.mul_(1.5)  # which leaves no trace but the elements
    assert [hits(name) for name in names] == [0, 8, 8, 8]
    model.delete_adapter("three")
    model.add_adapter("four", peft.LoraConfig(target_modules=ATTENTION))
    assert [hits(name) for name in ("two", BASE)] == [8, 8]


def test_an_adapter_that_is_trained_while_requests_run() -> None:
    """As stock: what is computed stays, new tokens are computed as the adapter is now."""
    model, stock = patched("mixed"), copy.deepcopy(stock_of("mixed"))
    engine = model.get_base_model().paged
    stock.set_adapter("one")
    engine.pause()
    request = engine.submit(prompt(6)[0], adapter="one", **OPTIONS)
    engine.step()
    engine.step()

    class Training(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] == 15:
                train(stock)
            return scores

    def train(each: Any) -> None:
        for name, parameter in each.named_parameters():
            if ".one." in name:
                parameter.data.mul_(-2)
                parameter.data = parameter.data.clone()

    truth = stock.generate(input_ids=prompt(6), logits_processor=[Training()], **OPTIONS)
    train(model)
    engine.resume()
    assert request.result(60).sequences == truth[:, 14:].tolist()
    assert engine.submit(prompt(6)[0], adapter="one", **OPTIONS).result(60).sequences == (
        stock.generate(input_ids=prompt(6), **OPTIONS)[:, 14:].tolist()
    )


@pytest.mark.parametrize("kind", ["mixed", "saved"])
def test_parameters_that_are_replaced_or_deleted(kind: str) -> None:
    """Would break: an adapter known by its tensors, of which a module may have others now, or none."""
    model, stock = patched(kind), copy.deepcopy(stock_of(kind))
    engine = model.get_base_model().paged
    before = engine.submit(prompt(6)[0], adapter="one", **OPTIONS).result(60)
    others = {name: -2 * x for name, x in stock.state_dict().items() if ".one." in name}
    for each in (model, stock):
        assert not each.load_state_dict(others, strict=False, assign=True).unexpected_keys
    stock.set_adapter("one")
    truth = stock.generate(input_ids=prompt(6), **OPTIONS)[:, 14:].tolist()
    assert engine.submit(prompt(6)[0], adapter="one", **OPTIONS).result(60).sequences == truth != before.sequences
    engine.pause()
    request = engine.submit(prompt(6)[0], adapter="one", **OPTIONS)
    engine.step()
    model.set_adapter("two")
    model.delete_adapter("one")
    engine.resume()
    more = engine.submit(prompt(1)[0], **OPTIONS)
    assert request.result(60).sequences == truth
    assert more.result(60).sequences == expected(kind, "two", 1)[:, 14:].tolist()
    ended(model)


def test_an_adapter_made_again_under_its_name() -> None:
    """Would break: the deleted one's weights, because the new one has more tensors."""
    stock = copy.deepcopy(stock_of("mixed"))
    model, found = patched("mixed"), []
    for each in (stock, model):
        each.set_adapter("one")
        each.generate(input_ids=prompt(1), **OPTIONS)
        each.delete_adapter("one")
        torch.manual_seed(1)
        each.add_adapter("one", peft.LoraConfig(**KINDS["mixed"][1]["one"], use_dora=True, init_lora_weights=False))
        each.eval().set_adapter("one")
        found.append(each.generate(input_ids=prompt(1), **OPTIONS))
    assert torch.equal(*found) and not torch.equal(found[0], expected("mixed", "one", 1))


def test_kept_caches_and_scores() -> None:
    stock, model = stock_of("mixed"), patched("mixed", **SMALL)
    inner = model.get_base_model()
    for name in ("one", "two"):
        for each in (stock, model):
            each.set_adapter(name)
        kept = hf_paged.PagedCache(inner)
        first = model.generate(input_ids=prompt(1), past_key_values=kept, **OPTIONS)
        more = torch.cat([first, prompt(2)], dim=1)
        assert inner.paged.generate([prompt(s)[0] for s in range(6)], **OPTIONS)  # takes its blocks
        whole = {"input_ids": more, "attention_mask": torch.ones_like(more)}  # else pad tokens of the answer are hidden
        found = model.generate(**whole, past_key_values=kept, **OPTIONS)
        assert torch.equal(found, stock.generate(**whole, **OPTIONS))
        with torch.no_grad():
            logits = stock(input_ids=found).logits[0].log_softmax(-1)
        own = logits[:-1].gather(1, found[0, 1:, None])[:, 0]
        other = BASE if name == "one" else "one"
        said = [inner.paged.submit_score(found[0], adapter=each).result(60) for each in (name, other)]
        scores = [torch.tensor([token.logprob for token in each.prompt_logprobs]) for each in said]
        assert torch.allclose(scores[0], own, atol=1e-4) and not torch.allclose(scores[1], own, atol=1e-2)
        del kept
    outputs = inner.paged.generate([prompt(1)[0], prompt(2)[0]], adapters=["one", None], **OPTIONS)
    assert outputs[0].sequences == expected("mixed", "one", 1)[:, 14:].tolist()
    assert outputs[1].sequences == expected("mixed", "two", 2)[:, 14:].tolist()
    ended(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Folders of a kind's adapters, as PEFT saves them, by name."""

    @cache
    def save(kind: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(kind)
        stock_of(kind).save_pretrained(folder)
        return {name: str(folder / name) for name in KINDS[kind][1]}

    return save


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "padded"])
def test_loaded_ones(kind: str, saved: Callable[[str], dict[str, str]]) -> None:
    """Into a model without PEFT's layers, with room for none in memory, while requests run."""
    family = KINDS[kind][0]
    model: Any = build_state_model(family) if family in STATE_MODELS else build(family)
    hf_paged.patch(model, **SMALL, adapter_space_gib=0)
    engine = model.paged
    running = engine.submit(prompt(1)[0], **OPTIONS)
    for name, path in saved(kind).items():
        engine.load_adapter(name, path)
    names = names_of(kind)
    asked = [(name, seed) for seed in (1, 2) for name in names]
    outputs = engine.generate([prompt(s)[0] for _, s in asked], adapters=[name for name, _ in asked], **OPTIONS)
    for (name, seed), output in zip(asked, outputs, strict=True):
        assert output.sequences == expected(kind, name, seed)[:, 14:].tolist(), (name, seed)
    assert running.result(60).sequences == expected(kind, BASE, 1)[:, 14:].tolist()
    before = engine.stats().prefix_cache_hit_tokens
    request = engine.submit(prompt(2)[0], adapter="one", **OPTIONS)
    engine.unload_adapter("one")
    assert request.result(60).sequences == expected(kind, "one", 2)[:, 14:].tolist()
    with pytest.raises(ValueError, match="non-existing adapter"):
        engine.submit(prompt(2)[0], adapter="one", **OPTIONS)
    engine.load_adapter("one", saved(kind)["two"])
    assert (
        engine.submit(prompt(2)[0], adapter="one", **OPTIONS).result(60).sequences
        == outputs[asked.index(("two", 2))].sequences
    )
    assert engine.stats().prefix_cache_hit_tokens >= before
    with pytest.raises(ValueError, match="already"):
        engine.load_adapter("one", saved(kind)["two"])
    engine.check_invariants()
    hf_paged.unpatch(model)


class Quantised(nn.Linear):
    """Stands in for a layer of bitsandbytes or torchao: a weight of integers, of which its forward makes numbers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.register_buffer("scale", linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127)
        levels = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(levels, requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight.to(states.dtype) * self.scale)


def quantised() -> Any:
    model: Any = build("llama")
    for layer in model.model.layers:
        for owner, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            setattr(owner, name, Quantised(getattr(owner, name)))
    return model


@pytest.mark.parametrize("package", ["bitsandbytes.nn.modules", "a_user"])
def test_quantised_bases(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their module runs, and the adapter is added: PEFT's and loaded ones, beside layers that are not quantised."""
    monkeypatch.setattr(Quantised, "__module__", package)
    monkeypatch.setattr(Quantised, "forward", as_library_code(Quantised.forward, package))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stock = peft.get_peft_model(quantised(), peft.LoraConfig(target_modules="all-linear"), adapter_name="one")
        stock.add_adapter("two", peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_bias=True))
    randomize(stock.eval())
    stock.save_pretrained(tmp_path)
    truth = []
    for name in ("one", "two", BASE):
        with stock.disable_adapter() if name == BASE else set_to(stock, name):
            truth.append(stock.generate(input_ids=prompt(1), **OPTIONS))
    assert len({str(tokens) for tokens in truth}) == 3, "the test is too easy"
    model: Any = hf_paged.patch(copy.deepcopy(stock), num_blocks=64, block_size=4)
    names = ["one", "two", BASE]
    found = model.generate(input_ids=prompt(1).repeat(3, 1), adapter_names=names, **OPTIONS)
    assert torch.equal(found, torch.cat(truth)) and not hf_paged.is_supported(model).notes
    plain = hf_paged.patch(quantised(), num_blocks=64, block_size=4)
    engine = plain.paged
    for name in names[:2]:
        engine.load_adapter(name, tmp_path / name)
    outputs = engine.generate([prompt(1)[0]] * 3, adapters=names, **OPTIONS)
    assert [output.sequences for output in outputs] == [tokens[:, 14:].tolist() for tokens in truth]
    engine.check_invariants()


@pytest.mark.parametrize("targets", ["all-linear", ["embed_tokens", "q_proj"]], ids=str)
def test_loaded_dora_follows_the_base(targets: Any, tmp_path: Path) -> None:
    """Would break: norms of weights that were trained since the files were read, seen by a counter or by elements."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stock = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=targets, use_dora=True)).eval()
    randomize(stock)
    stock.save_pretrained(tmp_path, save_embedding_layers=False)
    model: Any = hf_paged.patch(build("llama"), num_blocks=64, block_size=4)
    engine = model.paged
    engine.load_adapter("one", tmp_path)

    def truth() -> Any:
        return stock.generate(input_ids=prompt(1), **OPTIONS)[:, 14:].tolist()

    held = engine.submit(prompt(1)[0], adapter="one", **OPTIONS)
    assert held.result(60).sequences == truth()
    changes: list[Callable[[Tensor, Tensor], Any]] = [
        lambda weight, change: weight.mul_(change),
        lambda weight, change: weight.data.mul_(change),
    ]
    for seed, change in enumerate(changes):
        before = truth()
        for each in (model, stock):
            draw = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for name, weight in each.named_parameters():
                    if weight.ndim == 2 and "lora" not in name:
                        change(weight, torch.rand(len(weight), 1, generator=draw) + 0.5)
        assert truth() != before
        assert engine.submit(prompt(1)[0], adapter="one", **OPTIONS).result(60).sequences == truth()
        engine.load_adapter(f"more {seed}", tmp_path)
        assert engine.submit(prompt(1)[0], adapter=f"more {seed}", **OPTIONS).result(60).sequences == truth()


def test_loads_leave_nothing(saved: Callable[[str], dict[str, str]]) -> None:
    model = hf_paged.patch(build("llama"), num_blocks=64, block_size=4)
    engine, adapters = model.paged, model.paged.core.adapters
    for turn in range(40):
        name = f"adapter {turn}"
        engine.load_adapter(name, saved("mixed")["two"])
        assert engine.submit(prompt(1)[0], adapter=name, max_new_tokens=2).result(60).sequences
        engine.unload_adapter(name)
    for _ in range(2):  # what is gone is cleared at the next call
        engine.submit(prompt(1)[0], max_new_tokens=1).result(60)
    assert adapters.store is not None and adapters.store.stats()[:3] == (0, 0, 0)
    assert adapters._num_slots <= 2 and not list(adapters._live)


def test_a_layer_that_is_replaced_keeps_what_loaded_adapters_add(saved: Callable[[str], dict[str, str]]) -> None:
    """Would break: layers found once, when an adapter was loaded, by their identity."""
    model: Any = build("llama")
    engine = hf_paged.patch(model, num_blocks=64, block_size=4).paged
    engine.load_adapter("one", saved("mixed")["one"])
    engine.load_adapter("two", saved("mixed")["two"])

    def check() -> None:
        outputs = engine.generate([prompt(1)[0]] * 3, adapters=["one", "two", BASE], **OPTIONS)
        truth = [expected("mixed", name, 1)[0, 14:].tolist() for name in ("one", "two", BASE)]
        assert [output.sequences[0] for output in outputs] == truth

    check()
    attention = model.model.layers[0].self_attn
    attention.v_proj = copy.deepcopy(attention.v_proj)
    check()
    # PEFT's layers around those that are named, and away again.
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj", "up_proj"]))
    check()
    wrapped.unload()
    check()
    engine.check_invariants()


def test_a_file_that_is_gone_leaves_the_others_unpinned(saved: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    model = hf_paged.patch(build("llama"), num_blocks=64, block_size=4, adapter_space_gib=0)
    engine, adapters = model.paged, model.paged.core.adapters
    paths = {name: shutil.copytree(saved("mixed")["one"], tmp_path / name) for name in ("one", "two")}
    for name, path in paths.items():
        engine.load_adapter(name, path)
    shutil.rmtree(paths["two"])
    for names in (("one", "two"), ("two", "one")):
        with pytest.raises(ValueError, match="no such file"):
            engine.core.adapters_named(names)
    assert adapters.store is not None and adapters.store.stats().resident == 0


def test_many_adapters_cost_a_call_no_more_than_its_own() -> None:
    """Would break: each call looks at the weights of all adapters that any call has ever had."""
    model: Any = copy.deepcopy(stock_of("mixed"))
    for number in range(30):
        model.add_adapter(f"other {number}", peft.LoraConfig(target_modules=ATTENTION, r=2))
    hf_paged.patch(model, num_blocks=64, block_size=4)
    engine = model.get_base_model().paged
    looked: list[str] = []
    refresh = Adapter.refresh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adapter, "refresh", lambda self: (looked.append(self.name), refresh(self))[1])
        for number in range(30):
            engine.submit(prompt(1)[0], adapter=f"other {number}", max_new_tokens=1).result(60)
        looked.clear()
        found = engine.submit(prompt(1)[0], adapter="one", **OPTIONS).result(60)
    assert found.sequences == expected("mixed", "one", 1)[:, 14:].tolist()
    assert set(looked) <= {"one", "other 29"}  # that of the last request, if it has just ended


def test_refusals() -> None:
    model = patched("mixed")
    engine = model.get_base_model().paged
    ids = torch.cat([prompt(1), prompt(2)])
    with pytest.raises(ValueError, match=r"non-existing adapter\(s\): four"):
        model.generate(input_ids=ids, adapter_names=["one", "four"], **OPTIONS)
    with pytest.raises(ValueError, match=r"non-existing adapter\(s\): four"):
        engine.submit([1, 2, 3], adapter="four")
    with pytest.raises(ValueError, match="got 3 and 2 respectively"):
        model.generate(input_ids=ids, adapter_names=["one", "two", "one"], **OPTIONS)
    with pytest.raises(ValueError, match="got 1 adapters for 2 prompts"):
        engine.generate([[1, 2], [3, 4]], adapters=["one"])
    for names in ("one", 1):
        with pytest.raises(ValueError, match=f"adapters must be a list of names, one for each prompt, got {names!r}"):
            engine.generate([[1, 2], [3, 4]], adapters=names)
    for name, path in ((1, "folder"), ("three", None)):
        with pytest.raises(ValueError, match="takes a name and a path"):
            engine.load_adapter(name, path)
    model.merge_adapter(["one"])
    with pytest.raises(ValueError, match="unmerge_adapter"):
        model.generate(input_ids=ids, adapter_names=["one", "two"], **OPTIONS)
    model.unmerge_adapter()
    found = model.generate(input_ids=ids[:1], adapter_names=["two"], **OPTIONS)
    assert torch.equal(found, expected("mixed", "two", 1))
    ended(model)


def test_bits_do_not_depend_on_neighbours() -> None:
    """Logits of a row beside others of any adapters are those of the row alone."""
    model = patched("mixed", enable_prefix_caching=False)
    engine = model.get_base_model().paged
    alone = {
        name: engine.submit(prompt(1)[0], adapter=name, logprobs=3, **OPTIONS).result(60).logprobs
        for name in names_of("mixed")
    }
    requests = [
        (name, engine.submit(prompt(seed)[0], adapter=name, logprobs=3, **OPTIONS))
        for seed in (2, 1, 3)
        for name in names_of("mixed")
    ]
    found = [(name, request.result(60)) for name, request in requests]
    for name, output in found[4:8]:
        assert output.logprobs == alone[name]


@pytest.mark.slow
def test_two_thousand_calls() -> None:
    model = patched("mixed", **SMALL)
    names = names_of("mixed")
    truth = {name: expected("mixed", name, 1, max_new_tokens=3) for name in names}
    stop = threading.Event()

    def load() -> None:
        while not stop.wait(0.05):  # without a pause, calls would hardly get a turn
            with model.get_base_model().paged.exclusive():
                model.add_adapter("other", peft.LoraConfig(target_modules=ATTENTION, r=3))
            with model.get_base_model().paged.exclusive():
                model.delete_adapter("other")

    loader = threading.Thread(target=load)
    loader.start()

    def call(index: int) -> int:
        wrong = 0
        for turn in range(125):
            own = [names[(index + turn) % 4], names[(index * turn) % 4]]
            options = OPTIONS | {"max_new_tokens": 3, "adapter_names": own}
            found = model.generate(input_ids=prompt(1).repeat(2, 1), **options)
            wrong += not torch.equal(found, torch.cat([truth[name] for name in own]))
        return wrong

    try:
        assert sum(at_once(call, range(16), seconds=900)) == 0
    finally:
        stop.set()
        loader.join()
    ended(model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]), "ia3"),
        (lambda: peft.OFTConfig(target_modules=["q_proj"], r=0, oft_block_size=8), "oft"),
        (lambda: peft.LoraConfig(r=4, target_modules=[], target_parameters=EXPERTS), "ParamWrapper"),
        (lambda: peft.LoraConfig(r=4, lora_alpha=32, target_modules=["kv_b_proj", "o_proj"]), "kv_b_proj"),
    ],
    ids=["ia3", "oft", "experts' parameters", "latents"],
)
def test_other_kinds_run_their_own_code(config: Callable[[], Any], reason: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = build({"ParamWrapper": "qwen3_moe", "kv_b_proj": "deepseek_v2"}.get(reason, "llama"))
        stock = peft.get_peft_model(base, config(), adapter_name="one").eval()
    for name, parameter in stock.named_parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
    model = hf_paged.patch(copy.deepcopy(stock), num_blocks=64, block_size=8)
    found = model.generate(input_ids=prompt(1), **OPTIONS)
    assert torch.equal(found, stock.generate(input_ids=prompt(1), **OPTIONS))
    with model.disable_adapter():
        assert not torch.equal(model.generate(input_ids=prompt(1), **OPTIONS), found)
    with pytest.raises(ValueError, match=f"of their own .*{reason}.*use set_adapter"):
        model.get_base_model().paged.submit(prompt(1)[0], adapter="__base__")
    for each in (stock, model):
        for parameter in filter(lambda own: own.requires_grad, each.parameters()):
            parameter.data.mul_(-1.3)
    found = model.generate(input_ids=prompt(1), **OPTIONS)
    assert torch.equal(found, stock.generate(input_ids=prompt(1), **OPTIONS))
    (note,) = hf_paged.is_supported(model).notes
    assert reason in note and not hf_paged.is_supported(patched("mixed")).notes
