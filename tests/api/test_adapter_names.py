"""PEFT's `adapter_names`, an adapter for each row: of several threads, beside other calls, and when a call raises."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import hf_paged
from helpers.models import tiny_lm
from helpers.user_code import USER_CODE, Boom
from helpers.waiting import at_once, join
from hf_paged import UnsupportedCallError

peft = pytest.importorskip("peft")

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
FAILING = USER_CODE["processor"](Boom, 0)
IDS = torch.tensor([[5, 9, 14, 23, 8, 11], [7, 44, 3, 2, 19, 6]])


def tuned() -> Any:
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_alpha": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_lm(), peft.LoraConfig(**settings), adapter_name="one")
        model.add_adapter("two", peft.LoraConfig(**settings))
    return model.eval()


def num_hooks(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


class Meeting(LogitsProcessor):
    """At each token waits for the others: their calls take turns, forward by forward."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._barrier.wait(60)
        return scores


def test_calls_of_several_threads() -> None:
    """Also beside those without any, whether they are padded and forward by forward, or packed."""
    stock = tuned()
    model = hf_paged.patch(copy.deepcopy(stock), num_blocks=256)
    given: list[Any] = [["one", "two"], ["two", "__base__"], ["two", "one"], None, ["__base__"], None]
    rows = [IDS, IDS, IDS.flip(0), IDS, IDS[:1], IDS[:1]]
    expected = [
        stock.generate(input_ids=ids, **OPTIONS, **({} if names is None else {"adapter_names": names}))
        for ids, names in zip(rows, given, strict=True)
    ]
    assert len({tuple(each.flatten().tolist()) for each in expected}) == len(expected), "the test is too easy"
    barrier = threading.Barrier(len(given) - 1)

    def call(index: int) -> Tensor:
        own = {} if given[index] is None else {"adapter_names": given[index]}
        if index < len(given) - 1:
            own["logits_processor"] = [Meeting(barrier)]
        return model.generate(input_ids=rows[index], **OPTIONS, **own)

    found = at_once(call, range(len(given)))
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))
    assert not num_hooks(model)
    paged = model.get_base_model().paged
    paged.check_invariants()
    # And nothing of it is another call's prefix.
    for name in ("one", "two"):
        for each in (stock, model):
            each.set_adapter(name)
        ids = expected[0][:1]
        assert torch.equal(model.generate(input_ids=ids, **OPTIONS), stock.generate(input_ids=ids, **OPTIONS))


def test_a_call_that_is_preempted_keeps_its_rows_adapters() -> None:
    """Would break: rows that were dropped, computed again in a step of all callers', under the adapter of that."""
    stock = tuned()
    model = hf_paged.patch(copy.deepcopy(stock), block_size=4, num_blocks=12)
    engine = model.get_base_model().paged
    others: list[Any] = []

    class Crowding(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] == 9:
                others.append(engine.submit(list(range(3, 30)), **OPTIONS).result(60))
            return scores

    names = ["one", "two"]
    found = model.generate(input_ids=IDS, adapter_names=names, logits_processor=[Crowding()], **OPTIONS)
    assert others and engine.stats().num_preemptions
    assert torch.equal(found, stock.generate(input_ids=IDS, adapter_names=names, **OPTIONS))


def test_no_other_thread_is_ever_shown_a_calls_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: hooks that are not yet one thread's when a forward by stock, on another one, meets them."""
    model = hf_paged.patch(tuned(), num_blocks=64)
    other, found = {"use_cache": False, **OPTIONS}, list[Tensor]()
    expected = model.generate(input_ids=IDS, **other)
    register = torch.nn.Module.register_forward_pre_hook

    def registered(module: Any, *hook: Any, **how: Any) -> Any:
        handle = register(module, *hook, **how)
        if not found:  # after the first
            thread = threading.Thread(target=lambda: found.append(model.generate(input_ids=IDS, **other)))
            thread.start()
            join(thread)
        return handle

    monkeypatch.setattr(torch.nn.Module, "register_forward_pre_hook", registered)
    model.generate(input_ids=IDS, adapter_names=["two", "two"], **other)
    assert torch.equal(found[0], expected) and not num_hooks(model)


def test_stock_forwards_beside_requests_and_other_models() -> None:
    """Would break: requests that fail while a stock forward has PEFT's hooks; adapters of a call in another model."""
    stock, plain = tuned(), tiny_lm()
    model, other = hf_paged.patch(copy.deepcopy(stock), num_blocks=64), hf_paged.patch(copy.deepcopy(plain))
    names = {"adapter_names": ["one", "two"]}
    expected = stock.generate(input_ids=IDS, **OPTIONS, **names)
    engine = model.get_base_model().paged
    engine.pause()
    request = engine.submit(IDS[1:], adapter="two", **OPTIONS)
    engine.step(), engine.step()
    with torch.no_grad():
        assert torch.allclose(model(input_ids=IDS, **names).logits, stock(input_ids=IDS, **names).logits, atol=1e-4)
    engine.resume()
    assert request.result(60).token_ids == expected[1, 6:].tolist()
    guided = {"guidance_scale": 1.5} | names
    assert torch.equal(*[each.generate(input_ids=IDS, **OPTIONS, **guided) for each in (stock, model)])
    asked: list[Tensor] = []

    class Ask(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            asked.append(other.generate(input_ids[:, -4:], **OPTIONS))
            other(input_ids)
            assert not num_hooks(model), "they are for stock forwards of the model that has them"
            return scores

    assert torch.equal(model.generate(input_ids=IDS, **OPTIONS, **names, logits_processor=[Ask()]), expected)
    assert torch.equal(asked[0], plain.generate(IDS[:, -4:], **OPTIONS))


def test_a_call_that_raises_leaves_no_hooks() -> None:
    model = hf_paged.patch(tuned(), num_blocks=64)
    expected = model.generate(input_ids=IDS, **OPTIONS)
    with pytest.raises(Boom):
        model.generate(input_ids=IDS, adapter_names=["one", "two"], **FAILING, **OPTIONS)
    assert not num_hooks(model)
    assert torch.equal(model.generate(input_ids=IDS, **OPTIONS), expected)


def test_hooks_that_were_left_are_named() -> None:
    """Of a call before `patch`, which raised; or where PEFT came behind `patch`."""
    model = tuned()
    expected = model.generate(input_ids=IDS, **OPTIONS)
    with pytest.raises(Boom):
        model.generate(input_ids=IDS, adapter_names=["one", "two"], **FAILING, **OPTIONS)
    assert num_hooks(model)
    hf_paged.patch(model, num_blocks=64)
    with pytest.raises(UnsupportedCallError, match=r"modules \(model.layers.0.self_attn.q_proj, .*left by a call"):
        model.generate(input_ids=IDS, **OPTIONS)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    assert torch.equal(model.generate(input_ids=IDS, **OPTIONS), expected)


def test_without_the_peft_model_such_calls_are_refused() -> None:
    """And the rows of others that run beside them, since they may have been computed with the hooks."""
    model = tuned()
    inner = model.get_base_model()
    expected = model.generate(input_ids=IDS, adapter_names=["one", "two"], **OPTIONS)
    hf_paged.patch(inner, num_blocks=64)
    inner.paged.pause()
    request = inner.paged.submit(IDS[0].tolist(), **OPTIONS)
    inner.paged.step()
    with pytest.raises(UnsupportedCallError, match=r"Give hf_paged.patch\(\) the PeftModel"):
        model.generate(input_ids=IDS, adapter_names=["one", "two"], **OPTIONS)
    inner.paged.resume()
    with pytest.raises(UnsupportedCallError, match="adapter_names"):
        request.result(60)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    hf_paged.patch(model, num_blocks=64)
    assert torch.equal(model.generate(input_ids=IDS, adapter_names=["one", "two"], **OPTIONS), expected)


def test_unpatching_and_copies() -> None:
    model = tuned()
    kind = type(model.base_model)
    hf_paged.patch(model, num_blocks=64)
    assert type(model.base_model) is not kind and isinstance(model.base_model, kind)
    other = copy.deepcopy(model)
    with pytest.raises(Boom):
        other.generate(input_ids=IDS, adapter_names=["one", "two"], **FAILING, **OPTIONS)
    assert not num_hooks(other)
    hf_paged.unpatch(model)
    assert type(model.base_model) is kind
