"""Models that accelerate has spread over the CPU and a pretended device, or over two of these; or has offloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_paged
from helpers.device_modes import NEW, _crowd, _generate, _one, _submit, _threads, _twice, _user_processor, prompts
from helpers.models import build, decoder_layers, random_ids
from helpers.pairs import assert_same, assert_same_cache, new_cache

SETTINGS = {"block_size": 4, "num_blocks": 64}


def alternating(model: Any, other: str = "cpu") -> Any:
    """Every second layer on the CPU, which computes there; inputs are wanted on the device."""
    layers = decoder_layers(model)
    name = next(name for name, module in model.named_modules() if module is layers)
    names = {f"{name}.{index}": other if index % 2 else "cuda:0" for index in range(len(layers))}
    rest = [name for name, module in model.named_modules() if not list(module.children())]
    names |= {own: "cuda:0" for own in rest if not own.startswith(f"{name}.")}
    return dispatched(model, names)


def over_both(model: Any) -> Any:
    """Every second layer on the other GPU."""
    return alternating(model, "cuda:1")


def inputs_elsewhere(model: Any) -> Any:
    """Layers on the device, all else on the CPU."""
    layers = decoder_layers(model)
    name = next(name for name, module in model.named_modules() if module is layers)
    rest = [own for own, module in model.named_modules() if not list(module.children())]
    names = {own: "cpu" for own in rest if not own.startswith(f"{name}.")} | {name: "cuda:0"}
    return dispatched(model, names, main="cpu")


def dispatched(model: Any, names: dict[str, str], main: str = "cuda:0") -> Any:
    """As `dispatch_model` does it; that one takes the CPU, beside a GPU, for a place to offload to."""
    from accelerate.hooks import attach_align_device_hook_on_blocks

    devices = {name: torch.device(where) for name, where in names.items()} | {"": torch.device(main)}
    attach_align_device_hook_on_blocks(
        model,
        execution_device=devices,
        offload=dict.fromkeys(names, False),
        skip_keys=model._skip_keys_device_placement,
    )
    return model


def offloaded(model: Any) -> Any:
    return accelerate.cpu_offload(model, execution_device=torch.device("cuda:0"))


WAYS = {way.__name__: way for way in (alternating, over_both, inputs_elsewhere, offloaded)}
MODES: dict[str, Callable[[Any], Any]] = {
    "greedy": _generate,
    "sampling": lambda model: _generate(model, do_sample=True, top_k=20),
    "samples": lambda model: _generate(model, do_sample=True, num_return_sequences=2),
    "beams": lambda model: _generate(model, num_beams=2),
    "own_processor": _user_processor,
    "lookup": lambda model: _one(model, prompt_lookup_num_tokens=2),
    "hidden_states": lambda model: _generate(model, output_hidden_states=True, return_dict_in_generate=True),
    "hole": lambda model: _one(model, attention_mask=torch.tensor([[1, 0, *[1] * 7]], device="cuda")),
    "twice": _twice,
    "threads": _threads,
    "submit": _submit,
}


def spread(name: str, way: str, **settings: Any) -> tuple[Any, Any]:
    """A stock model, and a patched one."""
    stock = WAYS[way](copy.deepcopy(build(name)).to("cuda"))
    return stock, hf_paged.patch(WAYS[way](copy.deepcopy(build(name)).to("cuda")), **(SETTINGS | settings))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_mode(way: str, mode: str) -> None:
    """Would break: keys, tables or masks on another device than a layer's."""
    stock, paged = spread("llama", way)
    if mode == "lookup" and way not in ("alternating", "over_both"):
        pytest.skip("stock moves candidates to where the first weight is, which is not where the tokens are")
    if mode == "threads":  # stock's take each other's weights away
        stock = copy.deepcopy(build("llama")).to("cuda")
    assert_same(MODES[mode](stock), MODES[mode](paged))
    assert paged.paged.stats().num_steps > 0
    paged.paged.check_invariants()


@pytest.mark.parametrize("way", ["alternating", "over_both"])
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mixtral", "bloom", "deepseek_v3"])
def test_model(name: str, way: str) -> None:
    """Would break: groups of layers with windows, which differ from device to device; the padded layout."""
    stock, paged = spread(name, way, block_size=3)
    for mode in (_generate, _twice):
        assert_same(mode(stock), mode(paged))


@pytest.mark.parametrize("way", ["alternating", "over_both"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption(preemption: str, way: str) -> None:
    """Would break: blocks that are swapped, or copied, on one of the devices only."""
    stock, paged = spread("gemma2", way, num_blocks=18, preemption=preemption)
    assert_same(_crowd(stock), _crowd(paged))
    assert paged.paged.stats().num_preemptions > 0
    stock, paged = spread("llama", way, num_blocks=11, preemption=preemption)
    assert_same(_crowd(stock), _crowd(paged))
    assert paged.paged.stats().num_preemptions > 0


def test_shares() -> None:
    """Would break: a device that holds more than its layers' keys and values."""
    _, paged = spread("llama", "alternating")
    _generate(paged)
    whole = hf_paged.patch(copy.deepcopy(build("llama")), **SETTINGS)
    whole.generate(random_ids(1, 5), max_new_tokens=2)
    parts = [part.tensor for part in paged.paged.core.kv_cache.parts]
    assert {part.device.type for part in parts} == {"cpu", "cuda"}
    assert sum(part.numel() for part in parts) == whole.paged.core.kv_cache.tensor.numel()


def test_kept_cache() -> None:
    stock, paged = spread("llama", "alternating")
    caches = []
    for model in (stock, paged):
        cache = new_cache(model)
        first = model.generate(prompts(2, 9), past_key_values=cache, max_new_tokens=NEW, eos_token_id=None)
        ids = torch.cat([first, prompts(2, 4)], dim=1)
        caches.append((cache, model.generate(ids, past_key_values=cache, max_new_tokens=NEW, eos_token_id=None)))
    (stock_cache, expected), (cache, found) = caches
    assert torch.equal(expected.cpu(), found.cpu())
    assert_same_cache(stock_cache, cache)


@pytest.mark.parametrize(("cpu_share", "rest"), [(0.0, "disk"), (1.0, "cpu")])
def test_loaded_into_less_memory_than_it_needs(tmp_path: Path, cpu_share: float, rest: str) -> None:
    """`device_map="auto"`: what has no room on the device lies in CPU memory, or in files."""
    model: Any = build("llama")
    model.save_pretrained(tmp_path / "model")
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    loaded = [
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "model",
            device_map="auto",
            max_memory={0: size * 6 // 10, "cpu": int(cpu_share * size)},
            offload_folder=tmp_path / f"offloaded_{number}",
        ).eval()
        for number in range(2)
    ]
    assert set(loaded[0].hf_device_map.values()) == {0, rest}
    stock, paged = loaded[0], hf_paged.patch(loaded[1], **SETTINGS)
    for mode in ("greedy", "sampling", "beams", "own_processor", "submit"):
        assert_same(MODES[mode](stock), MODES[mode](paged))
    assert paged.paged.stats().num_steps > 0
    paged.paged.check_invariants()


def test_no_graphs_and_what_is_refused() -> None:
    _, paged = spread("llama", "alternating", cuda_graphs=True)
    core = paged.paged.core
    with pytest.raises(ValueError, match="spread over several"):
        core.runner.graphs.record(core.pool.attention)
    _, paged = spread("llama", "alternating")
    core = paged.paged.core
    assert "several" in str(core.runner.graphs.record(core.pool.attention))
    sharing = alternating(copy.deepcopy(build("gemma3n")).to("cuda"))
    assert "not taken over several devices" in hf_paged.is_supported(sharing).reasons[0]


def test_size_from_free_memory() -> None:
    """Would break: a pool that fits one device, and not the other."""
    _, paged = spread("llama", "alternating", num_blocks=None)
    found: Tensor = _generate(paged)
    assert found.is_cuda and paged.paged.stats().num_blocks > 0
