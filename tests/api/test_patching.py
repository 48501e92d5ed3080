"""`patch` and `unpatch`: everything around generation stays what it was, and comes back bit for bit."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaForCausalLM, LlamaModel, PreTrainedModel

import hf_paged
from helpers.models import MODELS, build, name_of, ragged_batch, random_ids
from helpers.pairs import MakePair, Pair, assert_same
from helpers.requests import held_step
from helpers.waiting import eventually
from hf_paged.attention.paged_attention import attention_configs
from hf_paged.model.placement import Placement

SETTINGS = {"block_size": 4, "num_blocks": 64}


def test_moved_to_where_no_pool_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_paged.patch(build("llama"), **SETTINGS)
    text_of(model)
    monkeypatch.setattr(Placement, "__call__", lambda self: (torch.float32, torch.device("mps", 0)))
    with pytest.raises(hf_paged.UnsupportedModelError, match="it is on mps:0: the pool"):
        _ = model.paged.core.kv_cache


def patched_llama(**settings: Any) -> Any:
    return hf_paged.patch(build("llama"), **(SETTINGS | settings))


def text_of(model: Any) -> Tensor:
    return model.generate(**ragged_batch(), max_new_tokens=6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_unpatch_brings_everything_back(attention: str) -> None:
    model = build("llama", attention=attention)

    def facts() -> Any:
        return (
            type(model),
            model.forward.__func__,
            model.config._attn_implementation,
            model.config.to_dict(),
            model.generation_config.to_dict(),
            set(model.__dict__),
            {name: id(parameter) for name, parameter in model.named_parameters()},
            [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        )

    before, text = facts(), text_of(model)
    assert hf_paged.patch(model, **SETTINGS) is model
    assert torch.equal(text_of(model), text)
    assert model.paged.stats().num_steps > 0
    assert hf_paged.unpatch(model) is model
    assert facts() == before and not hasattr(model, "paged")
    assert torch.equal(text_of(model), text)
    hf_paged.unpatch(model)
    assert facts() == before


def test_patched_block() -> None:
    """Would break: a `with` block that forgets to unpatch after an exception, or unpatches what others patched."""
    model = build("llama")
    kind = type(model)
    with pytest.raises(RuntimeError, match="inside"), hf_paged.patched(model, **SETTINGS) as same:
        assert same is model and model.paged.config.block_size == 4
        raise RuntimeError("inside")
    assert type(model) is kind
    hf_paged.patch(model, **SETTINGS)
    with hf_paged.patched(model, **SETTINGS):
        pass
    assert model.paged.config.block_size == 4
    with pytest.raises(ValueError, match="already patched"), hf_paged.patched(model, block_size=8):
        pass
    assert model.paged.config.block_size == 4


def test_the_class_looks_like_the_models_own() -> None:
    stock, model = build("llama"), patched_llama()
    kind = type(model)
    assert isinstance(model, LlamaForCausalLM) and issubclass(kind, LlamaForCausalLM)
    assert type(model.model) is LlamaModel and type(stock) is LlamaForCausalLM
    assert "paged" not in vars(LlamaForCausalLM) and not hasattr(stock, "paged")
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(kind, name) == getattr(LlamaForCausalLM, name)
    assert repr(model) == repr(stock)
    for method in ("forward", "generate", "_sample", "_beam_search"):
        assert signature(getattr(kind, method)) == signature(getattr(LlamaForCausalLM, method))
    assert list(model.state_dict()) == list(stock.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in stock.named_modules()]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementation_is_ours_only_inside_our_forwards(attention: str) -> None:
    """Would break: a config that names our attention while others run, save or copy the model."""
    model = hf_paged.patch(build("llama", attention=attention), **SETTINGS)
    seen = []
    note = hf_paged.packed_hook(lambda *_: seen.append(model.config._attn_implementation))
    handle = model.model.layers[0].register_forward_hook(note)
    assert model.config._attn_implementation == attention
    text_of(model)
    assert model.config._attn_implementation == attention
    assert set(seen) == {f"hf_paged_{attention}"}
    seen.clear()
    model(random_ids(2, 5))
    handle.remove()
    assert seen == [attention]


def test_attention_implementation_set_afterwards(make_pair: MakePair) -> None:
    """Would break: `set_attn_implementation` on a patched model: ignored, or lost at `unpatch`."""
    pair = make_pair(build("llama", attention="sdpa"))
    pair.generate(**ragged_batch(), max_new_tokens=4)
    for model in (pair.stock, pair.paged):
        model.set_attn_implementation("eager")
    pair.generate(**ragged_batch(), max_new_tokens=4)
    pair.generate(**ragged_batch(side="right"), max_new_tokens=4)
    assert pair.paged.config._attn_implementation == "eager"
    hf_paged.unpatch(pair.paged)
    assert pair.paged.config._attn_implementation == "eager"


def test_accelerate_hooks_after_patching(pair: Pair) -> None:
    """Would break: models whose `forward` becomes an attribute of the instance, as accelerate's offloading sets it."""
    add_hook_to_module(pair.paged, AlignDevicesHook(execution_device="cpu"))
    for arguments in ({}, {"num_beams": 3}, {"eos_token_id": list(range(2, 30))}):
        pair.generate(**ragged_batch(), max_new_tokens=9, **arguments)
        assert pair.seen[0] <= 20
    hf_paged.unpatch(pair.paged)
    assert_same(text_of(pair.stock), text_of(pair.paged))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def shard_a_weight(model: Any, mesh: DeviceMesh) -> None:
    """What tensor and expert parallelism come down to."""
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))


def shard_fully(model: Any, mesh: DeviceMesh) -> None:
    """FSDP2."""
    fully_shard(model, mesh=mesh)


def wrap_a_layer(model: Any, mesh: DeviceMesh) -> None:
    """FSDP1, as its auto-wrap policies leave a model."""
    layers = model.model.layers
    layers[0] = FullyShardedDataParallel(layers[0], process_group=mesh.get_group(), device_id=torch.device("cpu"))


def share_out_layers(model: Any, mesh: DeviceMesh) -> None:
    """transformers' pipeline: plain weights, of some layers."""
    model._device_mesh = SimpleNamespace(size=lambda: 2)


def mark_as_deepspeed(model: Any, mesh: DeviceMesh) -> None:
    """ZeRO-3."""
    model.lm_head.weight.ds_id = 0


SHARES = [shard_a_weight, shard_fully, wrap_a_layer, share_out_layers, mark_as_deepspeed]


def test_layers_that_scale_by_the_batch_are_named() -> None:
    """Would break: a quantized model of which nobody says that its rows depend on each other."""
    quantize = torch.ao.quantization.quantize_dynamic
    report = hf_paged.is_supported(quantize(build("llama"), {nn.Linear}))
    assert report and "model.layers.0.self_attn.q_proj, " in report.notes[0] and "and 12 more" in report.notes[0]
    assert hf_paged.is_supported(quantize(build("llama"), {nn.Linear}, dtype=torch.float16)).notes == ()


@pytest.mark.parametrize("name", ["PerTensor", "PerRow"])
def test_weights_that_scale_inputs_by_the_batch_are_named(name: str) -> None:
    """The same of torchao's: its weights say how their input is quantized."""
    model = build("llama")
    weight: Any = model.model.layers[1].mlp.up_proj.weight
    weight.act_quant_kwargs = SimpleNamespace(granularity=type(name, (), {})())
    notes = hf_paged.is_supported(model).notes
    assert [note.split(":")[0] for note in notes] == (["model.layers.1.mlp.up_proj"] if name == "PerTensor" else [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", SHARES, ids=lambda share: share.__name__)
def test_a_share_of_a_model_is_refused(share: Callable[[Any, DeviceMesh], None], mesh: DeviceMesh) -> None:
    """Would break: tokens computed from some of the heads, and kernels that read beyond them."""
    model = build("llama")
    share(model, mesh)
    report = hf_paged.is_supported(model)
    assert not report and "processes" in report.reasons[0]
    with pytest.raises(hf_paged.UnsupportedModelError, match="processes"):
        hf_paged.patch(model)


@pytest.mark.parametrize("share", [shard_a_weight, shard_fully], ids=lambda share: share.__name__)
def test_a_model_shared_out_after_patching(share: Callable[[Any, DeviceMesh], None], mesh: DeviceMesh) -> None:
    model = patched_llama()
    text_of(model)
    share(model, mesh)
    with pytest.raises(hf_paged.UnsupportedModelError, match="processes"):
        text_of(model)
    assert model.paged.stats().num_running == 0


@pytest.mark.parametrize("name", MODELS)
def test_scoring_and_training_are_bit_identical(name: str) -> None:
    """Would break: logits, loss or gradients of calls that have nothing to do with the pool, even by rounding."""
    stock = build(name)
    model = hf_paged.patch(build(name), **SETTINGS)
    text_of(model)  # a call over the pool leaves no trace in the others
    results = []
    for each in (stock, model):
        each.train()
        torch.manual_seed(0)
        batch = ragged_batch()
        output = each(**batch, labels=batch["input_ids"], use_cache=False)
        output.loss.backward()
        each.eval()
        scored = each(**batch).logits
        gradients = {key: parameter.grad for key, parameter in each.named_parameters() if parameter.grad is not None}
        results.append({"loss": output.loss, "logits": output.logits, "scored": scored} | gradients)
    expected, found = results
    assert list(expected) == list(found) and len(expected) > 10
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_forward_with_its_own_cache_is_bit_identical(pair: Pair) -> None:
    ids = random_ids(2, 9)

    def call(model: Any) -> list[Tensor]:
        with torch.no_grad():
            first = model(ids, use_cache=True)
            return [first.logits, model(ids[:, :3], past_key_values=first.past_key_values).logits]

    for one, other in zip(*pair.both(call)):
        assert torch.equal(one, other)
    assert pair.delta["num_steps"] == 0


class Graphs:
    """A backend that runs what it is given as it is, and counts."""

    def __init__(self) -> None:
        self.num_nodes: list[int] = []

    def __call__(self, module: Any, _: Any) -> Any:
        self.num_nodes.append(len(module.graph.nodes))
        return module.forward


@pytest.mark.parametrize("what", [pytest.param("forward", marks=pytest.mark.slow), "model"])
def test_compiled_forwards_without_a_paged_cache(what: str) -> None:
    """Would break: a dispatch that the compiler can't see through, or that it sees as more than what stock does."""
    found = []
    for model in (build("llama", layers=1), hf_paged.patch(build("llama", layers=1), **SETTINGS)):
        text_of(model)
        torch.compiler.reset()
        graphs = Graphs()
        compiled = torch.compile(getattr(model, what) if what == "forward" else model, fullgraph=True, backend=graphs)
        ids = random_ids(1, 9)
        logits = [compiled(ids, use_cache=use_cache).logits for use_cache in (False, True)]
        compiled(ids, labels=ids).loss.backward()
        found.append((*logits, model.get_output_embeddings().weight.grad, graphs.num_nodes))
    assert_same(*found)
    torch.compiler.reset()


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=name_of)
def test_compiled_forwards_over_a_paged_cache(mode: dict[str, Any]) -> None:
    """Would break: the compiler in the engine's locks and queues; code of ours that it runs once for all."""
    stock, model = build("llama"), patched_llama()
    graphs = Graphs()
    model.forward = torch.compile(model.forward, backend=graphs)
    given = ragged_batch(lengths=(11,)) | {"max_new_tokens": 6} | mode
    assert torch.equal(model.generate(**given), stock.generate(**given))
    assert not graphs.num_nodes
    assert model.paged.stats().num_steps > 0
    model.paged.check_invariants()
    torch.compiler.reset()
    model.forward = torch.compile(type(model).forward.__get__(model), fullgraph=True, backend=graphs)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="over a PagedCache is no part of a graph"):
        model.generate(**given)
    assert model.paged.stats().num_free_blocks == model.paged.stats().num_blocks
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_saved_files_are_those_of_the_unpatched_model(tmp_path: Path, name: str) -> None:
    stock = build(name)
    model = hf_paged.patch(build(name), **SETTINGS)
    text_of(model)
    stock.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "paged")
    files = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "paged").iterdir()) and "config.json" in files
    for file in files:
        assert (tmp_path / "paged" / file).read_bytes() == (tmp_path / "stock" / file).read_bytes(), file
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "paged").eval()
    assert type(loaded) is type(stock)
    assert torch.equal(text_of(loaded), text_of(model))


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("how", COPIES)
def test_copy_of_a_patched_model(how: str) -> None:
    model = patched_llama()
    cache = hf_paged.PagedCache(model)
    text = model.generate(**ragged_batch(), past_key_values=cache, max_new_tokens=6)
    twin = COPIES[how](model)
    assert type(twin).__name__ == "LlamaForCausalLM" and isinstance(twin, LlamaForCausalLM)
    assert twin.paged is not model.paged and twin.paged.config == model.paged.config
    assert twin.paged.stats().num_steps == 0
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    other = text_of(twin)
    assert not torch.equal(other, text) and torch.equal(text_of(model), text)
    twin.paged.check_invariants()
    dead = weakref.ref(model)
    del model, cache
    gc.collect()
    assert dead() is None
    assert torch.equal(text_of(twin), other)
    hf_paged.unpatch(twin)
    assert type(twin) is LlamaForCausalLM and torch.equal(text_of(twin), other)


SAVERS: dict[str, Callable[[Any, Path], Any]] = {
    **{how: lambda model, _, how=how: COPIES[how](model) for how in COPIES},
    "config": lambda model, _: LlamaForCausalLM(copy.deepcopy(model.config)),
    "pickled config": lambda model, _: LlamaForCausalLM(pickle.loads(pickle.dumps(model.config))),
    "from_config": lambda model, _: AutoModelForCausalLM.from_config(model.config),
    "save_pretrained": lambda model, path: (
        model.save_pretrained(path) or AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ),
}


@pytest.mark.parametrize("how", SAVERS)
def test_copies_made_during_a_step_have_their_own_attention(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would break: a copy that looks for paged attention for good, and files that say so."""
    stock = build("llama", attention="eager")
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS)
    with held_step(model, monkeypatch):
        assert model.config._attn_implementation != "eager", "no step is held in its midst"
        other = SAVERS[how](model, tmp_path)
    hf_paged.unpatch(other)
    own = [config._attn_implementation for config in attention_configs(other)]
    assert own == ["eager"] and type(own[0]) is str
    assert not any("forward" in vars(m) or "_compiled_call_impl" in vars(m) for m in other.modules())
    stock.save_pretrained(tmp_path / "stock")
    other.save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "config.json").read_bytes() == (tmp_path / "stock" / "config.json").read_bytes()
    if "config" not in how:
        assert torch.equal(text_of(other), text_of(stock))


def test_a_copy_of_a_compiled_model_is_not_compiled() -> None:
    """Would break: a copy that runs the original's compiled code, with the original's weights; stock leaves it out."""
    model = patched_llama()
    model.compile(backend="eager")
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None and model._compiled_call_impl is not None


def test_patched_model_inside_a_module() -> None:

    class Wrapper(nn.Module):
        def __init__(self, model: PreTrainedModel) -> None:
            super().__init__()
            self.model = model

    wrapper = Wrapper(patched_llama())
    text = text_of(wrapper.model)
    twin = copy.deepcopy(wrapper)
    assert torch.equal(text_of(twin.model), text) and twin.model.paged is not wrapper.model.paged
    fresh = Wrapper(build("llama", seed=3))
    fresh.load_state_dict(wrapper.state_dict())
    assert torch.equal(text_of(fresh.model), text)


MAKERS: dict[str, Callable[[Any, Path], Any]] = {
    "type(model)(config)": lambda model, _: type(model)(model.config),
    "_from_config": lambda model, _: type(model)._from_config(model.config),
    "from_pretrained": lambda model, path: model.save_pretrained(path) or type(model).from_pretrained(path),
}


@pytest.mark.parametrize("how", MAKERS)
def test_the_patched_class_makes_models_of_the_base_class(how: str, tmp_path: Path) -> None:
    """Would break: a model without an engine whose methods all look for one."""
    model = patched_llama()
    fresh = MAKERS[how](model, tmp_path)
    assert type(fresh) is LlamaForCausalLM and not hasattr(fresh, "paged")
    fresh.load_state_dict(model.state_dict())
    fresh.eval()
    text = text_of(fresh)
    assert torch.equal(text, text_of(model))
    twin = copy.deepcopy(fresh)
    assert type(twin) is LlamaForCausalLM
    assert torch.equal(text_of(hf_paged.patch(fresh, **SETTINGS)), text) and fresh.paged is not model.paged


def test_environment_replaces_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: `HF_PAGED_*` at `patch()`; what wins over what is in `test_config.py`."""
    monkeypatch.setenv("HF_PAGED_BLOCK_SIZE", "8")
    monkeypatch.setenv("HF_PAGED_NUM_BLOCKS", "40")
    model = hf_paged.patch(build("llama"), block_size=2)
    assert (model.paged.config.block_size, model.paged.config.num_blocks) == (2, 40)
    text_of(model)
    assert model.paged.stats().num_blocks == 40


def test_pool_is_sized_from_memory(make_pair: MakePair) -> None:
    """Would break: the default pool: none, one of a single block, or one that takes what the process needs."""
    pair = make_pair(num_blocks=None, max_num_seqs=4)
    assert pair.engine.stats().num_blocks == 0, "memory was taken before the first use"
    pair.generate(**ragged_batch(), max_new_tokens=4)
    assert pair.engine.stats().num_blocks == 4 * 256 // 4  # four sequences of the model's full context


def test_two_models_over_one_config(make_pair: MakePair) -> None:
    config = MODELS["llama"].config()
    first, second = (LlamaForCausalLM(config).eval() for _ in range(2))
    text = text_of(second)
    model = hf_paged.patch(first, **SETTINGS)
    expected = text_of(hf_paged.unpatch(copy.deepcopy(first)))
    inner: list[Tensor] = []
    run_second = hf_paged.packed_hook(lambda *_: inner.append(text_of(second)) if not inner else None)
    handle = model.model.layers[0].register_forward_hook(run_second)
    found = text_of(model)
    handle.remove()
    assert torch.equal(found, expected) and torch.equal(inner[0], text)


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_what_is_dropped_or_unpatched_dies(used: bool) -> None:
    model = patched_llama()
    if used:
        text_of(model)
        first = weakref.ref(model.paged)
        hf_paged.unpatch(model)
        gc.collect()
        assert first() is None
        text_of(hf_paged.patch(model, **SETTINGS))
    dead, engine, pool = weakref.ref(model), weakref.ref(model.paged), weakref.ref(model.paged.core.kv_cache)
    del model

    def is_dead() -> bool:  # the worker's thread may be on its way out of its last step
        gc.collect()
        return dead() is None and engine() is None and pool() is None

    eventually(is_dead, "it stays in memory")


def test_a_call_that_is_unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: an error about the inside of the package, for a call that another thread's `unpatch()` meets."""
    model = hf_paged.patch(build("llama"))
    original = GenerationMixin._get_stopping_criteria

    def unpatched(*args: Any, **kwargs: Any) -> Any:
        hf_paged.unpatch(model)
        return original(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_get_stopping_criteria", unpatched)
    with pytest.raises(RuntimeError, match="was unpatched while this call was running"):
        model.generate(random_ids(1, 5), max_new_tokens=2)
    assert model.generate(random_ids(1, 5), max_new_tokens=2).shape == (1, 7)
