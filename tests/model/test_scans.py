"""Mixers whose scans run in C: which are taken, and that they say what transformers' own say."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from helpers.pairs import Pair
from helpers.state_models import STATE_MODELS, build_state_model
from hf_paged.model import scans
from hf_paged.model.adapters import Adapters
from hf_paged.model.mixers import Mixers
from hf_paged.model.scans import SCANS, find_scans

LEFT = ["zaya"]  # convolutions over groups of channels
F32, BF16 = torch.float32, torch.bfloat16


def mixer_of(name: str, dtype: torch.dtype = F32) -> Any:
    """The first module of a family that computes a state with one of the functions."""
    for module in build_state_model(name).to(dtype).modules():
        if SCANS.keys() & inspect.unwrap(type(module).forward).__code__.co_names:
            return module
    return None


def new_cache() -> Cache:
    return Cache(layers=[LinearAttentionLayer()] * 8)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", STATE_MODELS)
def test_families(name: str, dtype: torch.dtype) -> None:
    mixer = mixer_of(name, dtype)
    assert (mixer is None or find_scans(mixer) is None) is (name in LEFT)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "bamba", "mamba", "kimi_linear"])
def test_one_that_computes_something_else(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Would break: a function that is taken for what it is called."""
    mixer = mixer_of(name)
    file = sys.modules[type(mixer).__module__]
    for function in SCANS.keys() & vars(file).keys():
        with monkeypatch.context() as patch:
            own = getattr(file, function)

            def changed(*args: Any, own: Any = own, **kwargs: Any) -> Any:
                result = own(*args, **kwargs)
                if isinstance(result, tuple):
                    return (result[0] + result[0].abs().mean(), *result[1:])
                return result + result.abs().mean()

            patch.setattr(file, function, changed)
            assert find_scans(mixer) is None, function
    assert find_scans(mixer) is not None


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_mixer_in_parts(dtype: torch.dtype) -> None:
    """One without other operations: its bits don't know where a text was cut."""
    mixer = mixer_of("inkling", dtype)
    changed = find_scans(mixer)
    assert changed is not None
    states = torch.randn(2, 19, mixer.conv1d.in_channels).to(dtype)

    def outputs(*cuts: int) -> Tensor:
        cache = new_cache()
        parts = zip((0, *cuts), (*cuts, 19), strict=True)
        return torch.cat([changed.run(mixer, states[:1, start:end], cache) for start, end in parts], dim=1)

    with torch.no_grad():
        expected = changed.run(mixer, states, new_cache())[:1]
        for cuts in ((), (1,), (4, 5, 11), range(1, 19)):
            assert torch.equal(outputs(*cuts), expected)


def test_what_else_is_left_alone() -> None:
    """Would break: gradients that C code doesn't know, float64, hooks that are not called."""
    mixer = mixer_of("qwen3_next")
    changed, states = find_scans(mixer), torch.randn(1, 6, 64)
    assert changed is not None
    with torch.no_grad():
        wide = mixer.double()
        assert torch.equal(changed.run(wide, states.double(), new_cache()), wide(states.double(), new_cache()))
    mixer.float()
    model = nn.Sequential(mixer)
    mixers = Mixers(model, (type(mixer),), Adapters())
    with mixers.scope():
        assert mixer(states, new_cache()).grad_fn is not None
        with torch.no_grad():
            found = mixer(states, new_cache())
            seen: list[Any] = []
            handle = mixer.register_forward_hook(lambda *given: seen.append(given[2]))
            own = mixer(states, new_cache())
            handle.remove()
    assert len(seen) == 1
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    mixer.conv1d.register_forward_hook(lambda *_: None)
    assert find_scans(mixer) is None


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "jamba"])
def test_the_engine_uses_them(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    used = set()

    def noted(key: str) -> Any:
        own = SCANS[key]
        return lambda *args, **kwargs: used.add(key) or own(*args, **kwargs)

    monkeypatch.setattr(scans, "SCANS", {key: noted(key) for key in SCANS})
    pair = Pair(build_state_model(name), num_blocks=200)
    pair.generate(input_ids=torch.randint(3, 90, (2, 9)), max_new_tokens=4, eos_token_id=None)
    pair.engine.close()
    mixer = mixer_of(name)
    assert used == SCANS.keys() & set(inspect.unwrap(type(mixer).forward).__code__.co_names)
