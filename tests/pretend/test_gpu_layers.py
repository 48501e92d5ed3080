"""Decoder layers in ten launches, on weights that lie side by side: counted, right whatever becomes of the weights."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

import hf_paged
from helpers.library_code import as_library_code
from helpers.models import build, random_ids
from hf_paged.model import fused_rotary, gpu_layers, joined_linears
from hf_paged.model.gpu_layers import GPULayer
from hf_paged.model.joined_linears import ATTENTION, MLP, are_joined

CUDA = torch.device("cuda", 0)
GREEDY = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
SETTINGS = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 2}
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen2_windows", "qwen3", "gemma")


def pair(name: str = "llama", **settings: Any) -> tuple[Any, Any]:
    """Stock and patched, without graphs: each step is computed."""
    stock = build(name).to(CUDA)
    return stock, hf_paged.patch(copy.deepcopy(stock), **SETTINGS | {"cuda_graphs": False} | settings)


def assert_same_tokens(stock: Any, model: Any) -> None:
    ids = random_ids(2, 7).to(CUDA)
    assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))


def groups(model: nn.Module) -> list[list[nn.Module]]:
    """Layers that get one input."""
    return [
        [getattr(module, name) for name in names]
        for module in model.modules()
        for names in (ATTENTION, MLP)
        if all(hasattr(module, name) for name in names)
    ]


def num_joined(model: nn.Module) -> int:
    return sum(map(are_joined, groups(model)))


def whole(model: Any) -> list[GPULayer]:
    """The decoder layers that are computed as such."""
    return [one for one in model.paged.core.layers.found if isinstance(one, GPULayer) and one.is_same]


# Launches


def graph_of(name: str, layers: int) -> Counter[str]:
    """What the graph of a decode step of two rows launches."""
    model = hf_paged.patch(build(name, layers=layers).to(CUDA), **SETTINGS)
    model.generate(random_ids(2, 7).to(CUDA), **GREEDY)
    graphs = model.paged.core.runner.graphs.held
    (recording,) = [own for shape, own in graphs._recordings.items() if shape.is_decode and shape.rows == 2]
    return Counter(recording._graph.names)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma"])
def test_launches_of_a_layer(name: str) -> None:
    """Of models with biases, norms of heads, norms with an offset, too. It was 16, and 18 with norms of heads."""
    one, two = graph_of(name, 1), graph_of(name, 2)
    layer = two - one
    assert layer.total() == 10, layer
    assert layer["aten::mm"] + layer["aten::addmm"] == 4
    assert layer["_add_norm_kernel"] == 2 and layer["_rotary_write_kernel"] == 1
    assert one.total() + 31 * layer.total() <= 340


# Which layers


@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_what_is_computed_whole(name: str) -> None:
    stock, model = pair(name)
    for _ in range(2):
        assert_same_tokens(stock, model)
    layers = whole(model)
    assert len(layers) == model.config.num_hidden_layers and all(layer.is_whole for layer in layers)
    assert all(layer.next is not None for layer in layers)
    assert num_joined(model) == 2 * len(layers) and not model.paged.core.layers.unjoined


@pytest.mark.parametrize("name", ["gpt_neox", "stablelm", "cohere", "olmo2", "gemma2"])
def test_what_is_not(name: str) -> None:
    """LayerNorm, attention and MLP side by side, norms behind them; what is left to its modules is said."""
    stock, model = pair(name)
    assert_same_tokens(stock, model)
    assert not whole(model)
    assert any("module by module" in str(detour) for detour in model.paged.explain()) == (name != "gpt_neox")


def test_rotary_embeddings_that_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel that rounds where the library doesn't: all is right, and what is slow is said."""
    monkeypatch.setattr(fused_rotary, "ROTARIES", ())
    stock, model = pair()
    assert_same_tokens(stock, model)
    assert not whole(model)
    assert [str(one) for one in model.paged.explain() if "not fused in LlamaAttention.forward" in one.why]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    stock = build("qwen3").to(CUDA, dtype)
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS, cuda_graphs=False)
    ids = random_ids(2, 7).to(CUDA)
    model.generate(ids, **GREEDY)
    assert len(whole(model)) == 2
    assert "linear layers" not in [detour.what for detour in model.paged.explain()], "a kernel for CPUs"
    model.generate(ids, **GREEDY | {"max_new_tokens": 1})
    step = {"past_key_values": hf_paged.PagedCache(model), "use_cache": True}
    with torch.no_grad():
        found, expected = model(ids, **step).logits, stock(ids).logits
    error = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert error.max() < (2e-2 if dtype is torch.bfloat16 else 3e-3)


class _Writes(LlamaModel):
    """As models with visual features in their first layers might do it."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        states = self.embed_tokens(input_ids)
        angles = self.rotary_emb(states, position_ids=position_ids)
        for layer in self.layers:
            states = layer(states, attention_mask=attention_mask, position_embeddings=angles, **kwargs)
            states = self._between(states)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states))

    def _between(self, states: Tensor) -> Tensor:
        states[..., 0] += 0.5
        return states


def test_what_may_write_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a norm of what the states were before."""
    assert not gpu_layers._writes_in_place(LlamaModel) and gpu_layers._writes_in_place(_Writes)
    monkeypatch.setattr(_Writes, "__module__", "transformers.models")
    for name in ("forward", "_between"):
        monkeypatch.setattr(_Writes, name, as_library_code(getattr(_Writes, name)))
    stock, model = pair()
    for one in (stock, model):
        one.model.__class__ = _Writes
    for _ in range(2):
        assert_same_tokens(stock, model)
    assert len(whole(model)) == 2


def test_a_layer_in_another_place() -> None:
    """Would break: states normed for the layer that came behind before."""
    stock, model = pair()
    assert_same_tokens(stock, model)
    for one in (stock, model):
        one.model.layers = nn.ModuleList(reversed(one.model.layers))
        for index, layer in enumerate(one.model.layers):
            layer.self_attn.layer_idx = index
    model.paged.reset_prefix_cache()
    for _ in range(2):
        assert_same_tokens(stock, model)


@pytest.mark.parametrize("path", ["model.norm", "model.layers.1.input_layernorm", "model.layers.0.self_attn.k_proj"])
def test_hooks_are_obeyed(path: str) -> None:
    """Registered when layers are known, and joined, already; and taken away again."""
    stock, model = pair()
    assert_same_tokens(stock, model)
    for one in (stock, model):
        one.hook = one.get_submodule(path).register_forward_hook(lambda module, args, output: output + 1.0)
    assert_same_tokens(stock, model)
    for one in (stock, model):
        one.hook.remove()
    for _ in range(2):
        assert_same_tokens(stock, model)
    assert all(layer.is_whole for layer in whole(model))


# Weights


def test_weights_are_held_once() -> None:
    """The same objects, the same bytes; while they are moved, those of one set more."""
    model = build("llama", layers=4).to(CUDA)
    before = dict(model.named_parameters())
    values = {name: own.detach().cpu() for name, own in before.items()}
    size = sum(own.nbytes for own in before.values())
    largest = max(sum(layer.weight.nbytes for layer in own) for own in groups(model))
    hf_paged.patch(model, **SETTINGS, cuda_graphs=False)
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)  # garbage goes at once: when it would else is chance, and adds to the peak
    try:
        with torch.no_grad():
            model.paged.core.bound.find_layers()
    finally:
        gc.set_threshold(*thresholds)
    assert num_joined(model) == 8
    gc.collect()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.max_memory_allocated() - allocated < largest + 2**13  # and what modules are tried with
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is own for name, own in before.items())
    assert all(torch.equal(own.cpu(), values[name]) for name, own in model.state_dict().items())
    storages = {own.untyped_storage().data_ptr(): own.untyped_storage().nbytes() for own in after.values()}
    assert sum(storages.values()) == size
    hf_paged.unpatch(model)
    assert all(own.untyped_storage().nbytes() == own.nbytes for own in model.parameters())
    assert all(after[name] is own for name, own in model.named_parameters())
    assert all(torch.equal(own.cpu(), values[name]) for name, own in model.state_dict().items())


def test_nothing_that_was_cached_is_lost() -> None:
    """Would break: weights that were only put elsewhere taken for others."""
    _, model = pair()
    key = model.paged.core.weights_version.key()
    ids = random_ids(1, 12).to(CUDA)
    model.generate(ids, **GREEDY)
    assert num_joined(model) == 4 and model.paged.core.weights_version.key() == key
    model.generate(ids, **GREEDY)
    assert model.paged.stats().prefix_cache_hit_tokens == 8


def _train(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(random_ids(2, 7).to(CUDA), labels=random_ids(2, 7).to(CUDA)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def _scale(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.mul_(-2.0)


def _load(model: Any) -> None:
    model.load_state_dict({name: own.flip(0) for name, own in model.state_dict().items()})


def _assign(model: Any) -> None:
    model.load_state_dict({name: own.flip(0).contiguous() for name, own in model.state_dict().items()}, assign=True)


def _replace(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach() * -2.0)


def _swap(model: Any) -> None:
    layer = model.model.layers[0].self_attn.v_proj
    layer.weight.data = layer.weight.data * -2.0


def _there_and_back(model: Any) -> None:
    model.cpu()
    model.to(CUDA)


def _double(model: Any) -> None:
    model.to(torch.bfloat16)
    model.to(torch.float32)


@pytest.mark.parametrize(
    ("change", "graphs"),
    [
        *((change, False) for change in (_train, _scale, _load, _assign, _replace, _there_and_back, _double)),
        (_swap, True),
    ],
)
def test_a_change_of_the_weights(change: Any, graphs: bool) -> None:
    """Would break: results of older weights; weights that stay apart for good."""
    stock, model = pair(cuda_graphs=graphs)
    assert_same_tokens(stock, model)
    for one in (stock, model):
        change(one)
    for _ in range(2):
        assert_same_tokens(stock, model)
    assert num_joined(model) == 4 and len(whole(model)) == 2


def test_saved_and_copied(tmp_path: Path) -> None:
    """As any other model: files of the same size, copies that share nothing."""
    stock, model = pair()
    assert_same_tokens(stock, model)
    assert num_joined(model) == 4
    model.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    sizes = [(tmp_path / own / "model.safetensors").stat().st_size for own in ("ours", "stock")]
    assert sizes[0] == sizes[1]
    assert_same_tokens(stock, AutoModelForCausalLM.from_pretrained(tmp_path / "ours").to(CUDA))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "state.safetensors")
    file = io.BytesIO()
    torch.save({name: own.cpu() for name, own in model.state_dict().items()}, file)
    copied = copy.deepcopy(model)
    assert num_joined(copied) == 0
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    assert_same_tokens(stock, copied)
    assert num_joined(copied) == 4
    loaded = build("llama").to(CUDA)
    file.seek(0)
    for state in (safetensors.torch.load_file(tmp_path / "state.safetensors"), torch.load(file)):
        loaded.load_state_dict(state)
        assert_same_tokens(stock, loaded)
    assert_same_tokens(stock, pickle.loads(pickle.dumps(copied.cpu())).to(CUDA))


# What stays apart


def _tie(model: Any) -> object:
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight = layer.self_attn.v_proj.weight
    return None


def _look(model: Any) -> object:
    return model.state_dict()


def _mix(model: Any) -> object:
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias = nn.Parameter(torch.zeros(len(layer.self_attn.k_proj.weight), device=CUDA))
    return None


def _quantise(model: Any) -> object:
    class Quantised(nn.Linear):
        """In the place of a layer of another package."""

    Quantised.__module__ = "bitsandbytes.nn"
    for layer in model.model.layers:
        layer.self_attn.k_proj.__class__ = Quantised
    return None


def _adapt(model: Any) -> object:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    inject_adapter_in_model(config, model)
    return None


@pytest.mark.parametrize(
    ("prepare", "num_left", "why"),
    [
        (_tie, 2, "tied"),
        (_look, 4, "share their memory"),
        (_mix, 2, "bias"),
        (_quantise, 2, "bitsandbytes.Quantised"),
        (_adapt, 4, "peft.Linear"),
    ],
)
def test_what_stays_apart(prepare: Any, num_left: int, why: str) -> None:
    """Right all the same, and said."""
    stock, model = pair()
    held = [prepare(one) for one in (stock, model)]
    for _ in range(2):
        assert_same_tokens(stock, model)
    left = model.paged.core.layers.unjoined
    assert sum(count for reason, count in left.items() if why in reason) == num_left, left
    assert num_joined(model) == 4 - num_left
    assert any(why in str(detour) for detour in model.paged.explain())
    del held


def test_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device too full for one set's weights twice."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(joined_linears, "_move", full)
    stock, model = pair()
    assert_same_tokens(stock, model)
    assert sum(model.paged.core.layers.unjoined.values()) == 4 and num_joined(model) == 0
    assert any("no memory" in str(detour) for detour in model.paged.explain())
