"""Models whose weights accelerate has spread: offloaded to CPU memory or disk, or hooked to move their inputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_paged
from helpers.models import build, decoder_layers, ragged_batch, random_ids
from helpers.modes import EACH_MODEL
from helpers.pairs import MakePair, Pair, assert_same, assert_same_cache, new_cache
from helpers.waiting import PATIENCE, in_background


def to_cpu(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def to_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def partly_to_disk(model: Any, folder: Path) -> Any:
    """As `device_map="auto"` does it: blocks that fit stay, the last ones are read for each forward."""
    name = next(name for name, module in model.named_modules() if module is decoder_layers(model))
    last = f"{name}.{len(decoder_layers(model)) - 1}"
    device_map = {name: "cpu" for name, module in model.named_modules() if not list(module.children())}
    device_map = {name: where for name, where in device_map.items() if not name.startswith(f"{last}.")}
    return accelerate.dispatch_model(model, device_map | {last: "disk"}, offload_dir=str(folder))


def hooked(model: Any, folder: Path) -> Any:
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def loaded(model: Any, folder: Path) -> Any:
    """By `from_pretrained`, into less memory than it needs: what is left stays in files."""
    model.save_pretrained(folder / "model")
    memory = {"cpu": sum(4 * parameter.numel() for parameter in model.parameters()) * 3 // 4}
    found = AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map="auto", max_memory=memory, offload_folder=folder / "offloaded"
    )
    assert {"cpu", "disk"} == set(found.hf_device_map.values())
    return found.eval()


WAYS = {way.__name__: way for way in (to_cpu, to_disk, partly_to_disk, hooked, loaded)}
SETTINGS = {"block_size": 4, "num_blocks": 256}

every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def make_spread(make_pair: MakePair, tmp_path: Path) -> MakePair:
    def make(name: str = "llama", way: str = "to_cpu", **settings: Any) -> Pair:
        return make_pair(WAYS[way](copy.deepcopy(build(name)), tmp_path), **settings)

    return make


MODES: dict[str, dict[str, Any]] = {
    **EACH_MODEL,
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "penalty": {"repetition_penalty": 1.4, "do_sample": True},
    "hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "right_padded": ragged_batch(side="right"),
}


@every_way
@pytest.mark.parametrize("mode", MODES)
def test_mode(make_spread: MakePair, way: str, mode: str) -> None:
    pair = make_spread(way=way)
    pair.generate(**(ragged_batch() | {"max_new_tokens": 10} | MODES[mode]))
    assert pair.delta["num_steps"] > 0


@pytest.mark.parametrize("name", ["gpt2", "gemma3n", "gpt_oss", "deepseek_v3", "deepseek_v32", "bloom", "hrm_text"])
def test_model(make_spread: MakePair, name: str) -> None:
    """Would break: experts, sinks, latents, layers with a state or padded rows, over weights that come late."""
    pair = make_spread(name)
    pair.generate(**ragged_batch(), max_new_tokens=8)
    pair.generate(**ragged_batch(), max_new_tokens=8, do_sample=True, num_return_sequences=2)


def test_prefix_hits_and_kept_cache(make_spread: MakePair) -> None:
    """Would break: weights that are other objects after each forward are taken for changed ones."""
    pair = make_spread()
    ids, caches = random_ids(2, 13), []

    def two_turns(model: Any) -> Any:
        cache = new_cache(model)
        first = model.generate(ids, past_key_values=cache, max_new_tokens=6, eos_token_id=None)
        second = model.generate(
            torch.cat([first, ids], dim=1), past_key_values=cache, max_new_tokens=6, eos_token_id=None
        )
        caches.append(cache)
        return first, second

    pair.both(two_turns)
    assert_same_cache(*caches)
    caches.clear()
    pair.both(lambda model: model.generate(ids, max_new_tokens=4))
    assert pair.delta["prefix_cache_hit_tokens"] == 24


@every_way
def test_changed_weights_are_seen(make_spread: MakePair, way: str) -> None:
    """Would break: keys of older weights are found again. Of what lies on disk, nothing is seen."""
    pair = make_spread(way=way)
    ids = random_ids(1, 13)
    pair.both(lambda model: model.generate(ids, max_new_tokens=4))
    for model in (pair.stock, pair.paged):
        with torch.no_grad():
            weight(model, "model.layers.0.self_attn.q_proj").mul_(-1.5)
    if way in ("to_disk", "loaded"):
        return
    pair.both(lambda model: model.generate(ids, max_new_tokens=4))
    assert pair.delta["prefix_cache_hit_tokens"] == 0


def weight(model: Any, name: str) -> Tensor:
    own: Tensor = model.get_submodule(name).weight
    if own.device.type != "meta":
        return own
    mapping = model.get_submodule(name)._hf_hook.weights_map
    found: Tensor = mapping["weight"]
    return found


def test_preemption(make_spread: MakePair) -> None:
    pair = make_spread(num_blocks=14)
    ids = random_ids(4, 9)
    for num_beams in (1, 2):
        pair.generate(input_ids=ids, max_new_tokens=12, eos_token_id=None, num_beams=num_beams)
        assert pair.delta["num_preemptions"] > 0


def test_threads_beside_plain_forwards(make_spread: MakePair) -> None:
    """Would break: a forward that is no step, and a step, take each other's weights away."""
    pair = make_spread()
    prompts = [random_ids(1, 5 + number, seed=number) for number in range(6)]
    expected = [pair.stock.generate(ids, max_new_tokens=8) for ids in prompts]
    logits = pair.stock(prompts[0]).logits
    futures = [in_background(pair.paged.generate, ids, max_new_tokens=8) for ids in prompts]
    for _ in range(20):
        assert_same(logits, pair.paged(prompts[0]).logits)
    for future, tokens in zip(futures, expected, strict=True):
        assert torch.equal(future.result(PATIENCE), tokens)


def test_submit_and_logprobs(make_spread: MakePair) -> None:
    pair = make_spread()
    prompt = random_ids(1, 7)
    expected = pair.stock.generate(prompt, max_new_tokens=8, min_new_tokens=8)[0, 7:].tolist()
    requests = [pair.engine.submit(prompt[0].tolist(), max_new_tokens=8, min_new_tokens=8) for _ in range(3)]
    assert [request.result(20).token_ids for request in requests] == [expected] * 3
    said = pair.engine.submit(prompt[0].tolist(), max_new_tokens=3, logprobs=1).result(20)
    assert said.logprobs is not None and len(said.logprobs[0]) == 3
    assert [len(text) for text in pair.engine.score([prompt], top=1)] == [6]


def test_own_loop(make_spread: MakePair) -> None:
    pair = make_spread()

    def loop(model: Any) -> list[int]:
        cache, ids, tokens = new_cache(model), random_ids(1, 6), []
        for _ in range(5):
            output = model(ids, past_key_values=cache, use_cache=True)
            ids = output.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
        return tokens

    pair.both(loop)
    assert pair.delta["num_steps"] == 5


@pytest.mark.parametrize("is_patched_first", [False, True])
def test_hooks_come_and_go(tmp_path: Path, is_patched_first: bool) -> None:
    stock = build("llama")
    expected = stock.generate(**ragged_batch(), max_new_tokens=8)
    model: Any = copy.deepcopy(stock)
    steps = [lambda: hf_paged.patch(model, **SETTINGS), lambda: to_cpu(model, tmp_path)]
    for step in steps if is_patched_first else reversed(steps):
        step()
        assert_same(expected, model.generate(**ragged_batch(), max_new_tokens=8))
    assert model.paged.stats().num_steps >= 8
    hf_paged.unpatch(model)
    assert_same(expected, model.generate(**ragged_batch(), max_new_tokens=8))
    hf_paged.patch(model, **SETTINGS)
    remove_hook_from_module(model, recurse=True)
    assert_same(expected, model.generate(**ragged_batch(), max_new_tokens=8))
    assert model.paged.stats().num_steps == 8
    hf_paged.unpatch(model)
    assert_same(expected, model.generate(**ragged_batch(), max_new_tokens=8))
    hf_paged.patch(model, **SETTINGS)
    assert_same(expected, model.generate(**ragged_batch(), max_new_tokens=8))


def test_layers_in_other_memory_are_not_taken(make_spread: MakePair) -> None:
    """Would break: a product with a weight that is not there, or held beside the one that is fetched."""
    pair = make_spread()
    pair.generate(**ragged_batch(), max_new_tokens=3)
    assert not pair.engine.core.layers.found
    assert all(parameter.device.type == "meta" for parameter in pair.paged.parameters())
    pair.paged.model.layers[0].mlp.requires_grad_(False)
    assert not any(parameter.is_inference() for parameter in pair.paged.parameters())


def test_refused(tmp_path: Path) -> None:
    model: Any = add_hook_to_module(build("llama"), type("OwnHook", (ModelHook,), {})())
    assert "forward was replaced on the instance" in hf_paged.is_supported(model).reasons[0]
    model = build("llama")
    model.model.layers[0].to("meta")
    assert "several devices" in hf_paged.is_supported(model).reasons[0]
    model = build("llama")
    model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    model.model.layers[0].to("meta")
    assert "nothing fetches them" in hf_paged.is_supported(model).reasons[0]


def test_no_graphs(tmp_path: Path) -> None:
    model = hf_paged.patch(to_cpu(copy.deepcopy(build("llama")), tmp_path), cuda_graphs=True, **SETTINGS)
    with pytest.raises(ValueError, match="accelerate offloads"):
        model.paged.warm_up()
