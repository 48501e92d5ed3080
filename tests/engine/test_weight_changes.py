"""Weights and adapters that change while requests run, under each setting of `on_weight_change`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged
from helpers.models import build
from helpers.requests import ENDLESS
from helpers.waiting import PATIENCE

peft = pytest.importorskip("peft", reason="of the extra dev")

GREEDY: dict[str, Any] = ENDLESS | {"do_sample": False}
PROMPTS = [[5, 6, 7], list(range(10, 31)), [9], list(range(40, 57))]
Change = Callable[[Any], None]


def tuned(**settings: Any) -> tuple[Any, Any]:
    """A small model with a LoRA adapter, patched, and the same unpatched."""
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    write(model, "lora_B", 0)
    plain = copy.deepcopy(model)
    return hf_paged.patch(model, num_blocks=64, block_size=4, **settings), plain


def stock(model: Any, ids: Tensor, num_tokens: int) -> Tensor:
    found: Tensor = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **GREEDY
    )
    return found


def check_later(model: Any, plain: Any) -> None:
    """Whether requests that come later find nothing of what was computed before."""
    for prompt in PROMPTS:
        output = model.paged.submit(prompt, max_new_tokens=6, **GREEDY).result(PATIENCE)
        assert prompt + output.token_ids == stock(plain, torch.tensor([prompt]), 6)[0].tolist()
        assert output.weight_versions == [[model.paged.weight_version] * 6]
    model.paged.check_invariants()


def write(model: Any, name: str, seed: int) -> None:
    """Adds noise to the parameters whose names have this in them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, own in model.named_parameters():
            if name in key:
                own.add_(torch.randn(own.shape, generator=generator) * 0.2)


def step(model: Any, name: str, seed: int) -> None:
    """The same by an optimizer."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [own for key, own in model.named_parameters() if name in key]
    for own in parameters:
        own.grad = torch.randn(own.shape, generator=generator)
    torch.optim.SGD(parameters, lr=0.2).step()
    model.zero_grad()


def changes(seed: int, number: int) -> list[tuple[int, Change]]:
    """Random changes, each with the number of steps before it."""
    draws = random.Random(seed)

    def one() -> Change:
        how, name, own = draws.choice((write, step)), draws.choice(("lora_B", "mlp", "k_proj")), draws.randrange(10**6)
        return lambda model: how(model, name, own)

    return [(draws.randrange(1, 5), one()) for _ in range(number)]


def stocks(model: Any, prompt: list[int], versions: list[int], changes: dict[int, Change]) -> list[int]:
    """Tokens of these versions by stock `generate()`, each with the weights of its version over all before it."""
    model, ids = copy.deepcopy(model), torch.tensor([prompt])
    for before, version in zip([min(changes) - 1, *versions], versions, strict=False):
        for number in range(before + 1, version + 1):
            changes[number](model)
        ids = stock(model, ids, 1)
    return ids[0, len(prompt) :].tolist()


def run(model: Any, made: list[tuple[int, Change]], **settings: Any) -> tuple[list[Any], dict[int, Change]]:
    """Requests during which these changes are made; and the changes, by the version that each makes."""
    engine: hf_paged.Engine = model.paged
    first = engine.weight_version
    engine.pause()
    total = sum(steps for steps, _ in made)
    requests = [engine.submit(p, max_new_tokens=total + n + 1, **GREEDY | settings) for n, p in enumerate(PROMPTS)]
    by_version: dict[int, Change] = {}
    for steps, change in made:
        for _ in range(steps):
            engine.step()
        change(model)
        assert engine.weight_version == first + len(by_version) + 1
        by_version[engine.weight_version] = change
    engine.resume()
    return requests, by_version


@pytest.mark.parametrize("seed", range(3))
def test_computed_again(seed: int) -> None:
    """Would break: a token chosen over keys of old weights; a version that is not that of the step it was chosen in."""
    made = changes(seed, 5)
    model, plain = tuned(on_weight_change="recompute", preemption=("swap", "recompute", "auto")[seed % 3])
    requests, by_version = run(model, made)
    outputs = [request.result(PATIENCE) for request in requests]
    for output in outputs:
        (versions,) = output.weight_versions or []
        assert len(versions) == len(output.token_ids) and versions == sorted(versions)
        assert set(by_version) < {*versions} and versions[made[0][0] - 1] < min(by_version) == versions[made[0][0]]
        assert output.token_ids == stocks(plain, output.prompt_token_ids, versions, by_version)
    for _, change in made:
        change(plain)
    check_later(model, plain)


@pytest.mark.parametrize("setting", ["continue", "error"])
def test_going_on_and_ending(setting: str) -> None:
    """Would break: the settings taken for each other; keys of old weights that a later request finds."""
    made = changes(7, 3)
    model, plain = tuned(on_weight_change=setting)
    requests, by_version = run(model, made)
    for request in requests:
        if setting == "error":
            with pytest.raises(RuntimeError, match='on_weight_change is "error"'):
                request.result(PATIENCE)
            continue
        output = request.result(PATIENCE)
        (versions,) = output.weight_versions or []
        assert set(by_version) < {*versions} and versions == sorted(versions)
        # Up to the first change they are stock's; what follows is chosen over keys that stock would have kept.
        count = sum(version < min(by_version) for version in versions)
        expected = stocks(plain, output.prompt_token_ids, versions[:count], by_version)
        assert output.token_ids[:count] == expected and count == made[0][0]
    for _, change in made:
        change(plain)
    check_later(model, plain)


class At(LogitsProcessor):
    """Changes the model behind its third forward, in transformers' own loop."""

    def __init__(self, change: Callable[[], None]) -> None:
        self.change, self.number = change, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.number += 1
        if self.number == 3:
            self.change()
        return scores


def test_beams_that_are_cancelled_behind_a_change() -> None:
    """Would break: an error of what is said of beams without rows, which fails all others, and leaves them waiting."""
    model, plain = tuned()
    engine = model.get_base_model().paged
    engine.pause()
    beams = engine.submit([5, 6, 7], num_beams=3, max_new_tokens=60, **GREEDY)
    other = engine.submit([8, 9], max_new_tokens=9, **GREEDY)
    for _ in range(3):
        engine.step()
    write(model, "lora_B", 1)
    engine.step()
    beams.cancel()
    engine.resume()
    assert len(other.result(PATIENCE).token_ids) == 9 and beams.result(PATIENCE).finish_reason == "cancelled"
    write(plain, "lora_B", 1)
    check_later(model, plain)


@pytest.mark.parametrize("setting", ["recompute", "error"])
@pytest.mark.parametrize("kind", ["loop", "samples", "beams"])
def test_calls_of_several_rows(kind: str, setting: str) -> None:
    """Would break: rows of a loop of transformers' own, samples or beams that are forgotten when others are renewed."""
    model, plain = tuned(on_weight_change=setting)
    engine: hf_paged.Engine = model.paged
    if kind == "loop":
        ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
        own = LogitsProcessorList([At(lambda: write(model, "mlp", 3))])
        if setting == "error":
            with pytest.raises(RuntimeError, match="on_weight_change"):
                model.generate(input_ids=ids, max_new_tokens=9, logits_processor=own, **GREEDY)
        else:
            found = model.generate(input_ids=ids, max_new_tokens=9, logits_processor=own, **GREEDY)
            begun = stock(plain, ids, 3)
            write(plain, "mlp", 3)
            assert torch.equal(found, stock(plain, begun, 6))
    else:
        settings: dict[str, Any] = {"num_return_sequences": 3}
        settings |= {"do_sample": True, "seed": 4} if kind == "samples" else {"num_beams": 3}
        engine.pause()
        request = engine.submit(PROMPTS[1], max_new_tokens=9, **GREEDY | settings)
        for _ in range(3):
            engine.step()
        write(model, "mlp", 3)
        engine.resume()
        if setting == "error":
            with pytest.raises(RuntimeError, match="on_weight_change"):
                request.result(PATIENCE)
        else:
            output = request.result(PATIENCE)
            assert [len(own) for own in output.sequences] == [9] * 3
            assert (output.weight_versions is None) == (kind == "beams")
            if kind == "samples":
                assert all(own[0] < own[-1] for own in output.weight_versions or ())
    if setting == "recompute" and kind != "loop":
        write(plain, "mlp", 3)
        check_later(model, plain)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    engine.check_invariants()
