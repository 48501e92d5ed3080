"""What a caller's own code may ask for, and where: not from inside a step, but around every forward of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_paged
from helpers.models import ragged_batch, random_ids
from helpers.pairs import MakePair
from helpers.requests import ENDLESS, settle
from helpers.waiting import PATIENCE
from hf_paged import PagedCache

IDS = random_ids(1, 7, seed=7)
PROMPT = IDS[0].tolist()
GIVEN: dict[str, Any] = {"max_new_tokens": 4} | ENDLESS

REFUSED: dict[str, Callable[[Any, list[Any]], Any]] = {
    "generate": lambda model, kept: model.generate(IDS, **GIVEN),
    "beams": lambda model, kept: model.generate(IDS, num_beams=2, **GIVEN),
    "forward": lambda model, kept: model(IDS),
    "forward over a cache": lambda model, kept: model(IDS, past_key_values=PagedCache(model)),
    "result": lambda model, kept: kept[0].result(PATIENCE),
    "iteration": lambda model, kept: list(kept[0]),
    "many": lambda model, kept: model.paged.generate([PROMPT], **GIVEN),
    "many beams": lambda model, kept: model.paged.generate([PROMPT], num_beams=2, **GIVEN),
    "step": lambda model, kept: model.paged.step(),
    "warm_up": lambda model, kept: model.paged.warm_up(),
    "release": lambda model, kept: model.paged.release(),
    "unpatch": lambda model, kept: hf_paged.unpatch(model),
}
LAYOUTS = ["packed", "padded", "falcon_rotary"]


def layer_of(model: Any) -> Any:
    return model.model.layers[1] if hasattr(model, "model") else model.transformer.h[1]


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}], ids=["rows", "beams"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_inner_hook_is_refused_another_step(make_pair: MakePair, layout: str, mode: dict[str, Any]) -> None:
    """Would break: a step that waits for the next one, or an error that spoils the step it came in."""
    pair = make_pair(layout if layout == "falcon_rotary" else "llama", num_blocks=64, block_size=4)
    left, errors, kept = dict(REFUSED), {}, []

    def hook(*_: Any) -> None:
        if not kept:
            kept.append(pair.engine.submit(PROMPT, **GIVEN))  # which waits for nothing
        while left and not errors.get("unexpected"):
            name, ask = left.popitem()
            try:
                ask(pair.paged, kept)
                errors["unexpected"] = name
            except RuntimeError as error:
                errors[name] = str(error)

    handle = layer_of(pair.paged).register_forward_hook(hook if layout == "padded" else hf_paged.packed_hook(hook))
    batch = ragged_batch()
    expected = pair.stock.generate(**batch, **GIVEN, **mode)
    found = pair.paged.generate(**batch, **GIVEN, **mode)
    assert errors.keys() == REFUSED.keys() and all("inside a step" in error for error in errors.values()), errors
    handle.remove()
    assert torch.equal(found, expected)
    assert kept[0].result(PATIENCE).token_ids == pair.stock.generate(IDS, **GIVEN)[0, 7:].tolist()
    settle(pair)


def test_a_hook_of_another_model_is_not_inside(make_pair: MakePair) -> None:
    outer, inner = make_pair(), make_pair("gpt2")
    found: list[Tensor] = []
    hook = hf_paged.packed_hook(lambda *_: found.append(inner.paged.generate(IDS, **GIVEN)))
    layer_of(outer.paged).register_forward_hook(hook)
    assert torch.equal(outer.paged.generate(IDS, **GIVEN), outer.stock.generate(IDS, **GIVEN))
    assert len(found) == 4 and all(torch.equal(ids, inner.stock.generate(IDS, **GIVEN)) for ids in found)


SECOND: dict[str, Callable[[Any, dict[str, Any]], Tensor]] = {
    "forward": lambda model, given: model.forward(given["input_ids"], use_cache=False).logits,
    "forward over a copy of the cache": lambda model, given: (
        model.forward(**given | {"past_key_values": copy.deepcopy(given["past_key_values"])}).logits
    ),
    "generate": lambda model, given: model.base_model_generate(given["input_ids"]),
}


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}], ids=["rows", "beams"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("second", SECOND)
def test_a_hook_of_the_model_itself_runs_it_again(
    make_pair: MakePair, second: str, layout: str, mode: dict[str, Any]
) -> None:
    """As X-LoRA does: a first pass finds how to mix the adapters, layers are hooked, a second pass computes."""
    pair = make_pair(layout if layout == "falcon_rotary" else "llama", num_blocks=64, block_size=4)

    def add_hooks(model: Any) -> None:
        handles: list[Any] = []
        is_first_pass = False

        def before(_: Any, args: Any, given: dict[str, Any]) -> None:
            nonlocal is_first_pass
            if is_first_pass:
                return
            is_first_pass = True
            scale = 1 + 0.1 * SECOND[second](model, given).float().mean().sigmoid()
            is_first_pass = False
            steer = lambda _module, _args, output: output * scale  # noqa: E731
            handles.append(layer_of(model).mlp.register_forward_hook(mark(steer)))

        def after(*_: Any) -> None:
            if handles and not is_first_pass:
                handles.pop().remove()

        mark = hf_paged.packed_hook if layout == "packed" else lambda hook: hook
        model.base_model_generate = lambda ids: model.generate(ids, max_new_tokens=2, **ENDLESS)
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after)

    for model in (pair.stock, pair.paged):
        add_hooks(model)
    batch = ragged_batch()
    assert torch.equal(pair.paged.generate(**batch, **GIVEN, **mode), pair.stock.generate(**batch, **GIVEN, **mode))
    settle(pair)
