"""Linear layers of engine forwards, multiplied where their weights lie, and inference mode: no other code sees any."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.utils import ModelOutput

import hf_paged
from helpers.library_code import as_library_code
from helpers.models import random_ids
from helpers.pairs import assert_same
from helpers.requests import held_step
from hf_paged import PagedCache
from hf_paged.attention.context import is_sentinel
from hf_paged.kernels import cpu_linear
from hf_paged.kernels.cpu_decoder import Scratch
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.model import layers, linears
from hf_paged.model.decoder_layers import DecoderLayer, find_decoder_layer
from hf_paged.model.layer_stacks import LayerStacks
from hf_paged.model.layers import KINDS, Layers
from hf_paged.model.linears import Linear, Runs
from hf_paged.model.module_overrides import ModuleOverride
from hf_paged.model.samples import samples as samples_of

pytestmark = [pytest.mark.skipif(isinstance(cpu_linear.load(torch.float32), str), reason="there is no kernel here")]

SPECIAL = {"vocab_size": 400, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
GREEDY = {"max_new_tokens": 6, "do_sample": False}
IDS = random_ids(2, 7)


def make_llama(cls: Any = LlamaForCausalLM) -> Any:
    config = LlamaConfig(
        **SPECIAL,
        hidden_size=384,
        intermediate_size=400,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,  # two layers that are too small
    )
    return cls(config)


def make_gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(**SPECIAL, n_embd=384, n_layer=2, n_head=6, n_positions=64))


def make(name: str = "llama") -> Any:
    """A fresh stock model, always the same."""
    with torch.random.fork_rng(devices=[]):
        model = {"llama": make_llama, "gpt2": make_gpt2}[name]().eval()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(0.1 * noise) if parameter.ndim > 1 else parameter.add_(0.1 * noise)
    return model


class Calls(list[int]):
    """How many weights each call of the kernel multiplied by, but for those from C."""


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Decoder layers are computed in Python, unless a test asks for them."""
    numbers = Calls()
    own = CPULinear.multiply_all

    def counting(self: CPULinear, states: Tensor, weights: Any) -> list[Tensor]:
        results = own(self, states, weights)
        numbers.append(len(weights))
        return results

    monkeypatch.setattr(CPULinear, "multiply_all", counting)
    monkeypatch.setattr(layers, "KINDS", [find for find in KINDS if find is not find_decoder_layer])
    return numbers


def patch(model: Any, **settings: Any) -> Any:
    return hf_paged.patch(model, **({"num_blocks": 64, "block_size": 4} | settings))


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    """The logits of a prompt and one token, over a cache."""
    cache = {"past_key_values": PagedCache(model)} if hasattr(model, "paged") else {}
    with torch.no_grad():
        return model(ids, **cache).logits


def compare(stock: Any, model: Any) -> Tensor:
    """Asserts that both say the same; returns what."""
    expected = logits(stock)
    assert_same(expected, logits(model))
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
    return expected


def assert_clean(model: nn.Module) -> None:
    """Asserts that nothing of ours is left on any module."""
    for name, module in model.named_modules():
        assert "forward" not in module.__dict__, name
        for value in vars(module).values():
            owner = getattr(value, "__self__", value)
            assert not isinstance(owner, ModuleOverride), name


def linears_of(model: Any) -> list[Linear]:
    return [layer for layer in model.paged.core.layers.found if isinstance(layer, Linear)]


# The same tokens


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tokens(name: str, calls: Calls) -> None:
    stock = make(name)
    model = patch(make(name))
    compare(stock, model)
    assert len(linears_of(model)) == (2 * 7 + 1 if name == "llama" else 2 * 4 + 1)
    calls.clear()
    for arguments in (
        {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6},
        {"num_beams": 3, "max_new_tokens": 6, "do_sample": False},
    ):
        torch.manual_seed(0)
        expected = stock.generate(IDS, **arguments)
        torch.manual_seed(0)
        assert torch.equal(model.generate(IDS, **arguments), expected)
    assert len(calls) >= 12 * 9
    assert_clean(model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16(name: str, calls: Calls) -> None:
    """By our kernel, or by torch where the processor has units for it that ours doesn't use."""
    stock, model = make(name).bfloat16(), patch(make(name).bfloat16())
    calls.clear()
    expected, found = logits(stock).float(), logits(model).float()
    assert bool(calls) == (not isinstance(cpu_linear.load(torch.bfloat16), str))
    assert float((found - expected).norm() / expected.norm()) < 2e-2


def test_shapes(calls: Calls) -> None:
    """Whatever a model's code hands to a layer."""
    model = patch(make("gpt2"))
    model.generate(IDS, **GREEDY)
    layers = [model.lm_head, model.transformer.h[0].attn.c_attn]
    for layer in layers:
        width = layer.weight.shape[1 if isinstance(layer, nn.Linear) else 0]
        inputs = [
            torch.randn(2, width),
            torch.randn(1, 1, width),
            torch.randn(2, 3, 4, width),
            torch.randn(1, 0, width),
            torch.randn(width, 5).t(),
            torch.randn(1, width).expand(6, width),
            torch.randn(3, 2 * width)[:, ::2],
            *([torch.randn(width)] if isinstance(layer, nn.Linear) else []),
        ]
        for states in inputs:
            with torch.no_grad():
                expected = layer(states)
                calls.clear()
                with model.paged.core.layers.scope():
                    found = layer(states)
            assert calls == [1]
            assert found.shape == expected.shape and found.is_contiguous() == expected.is_contiguous()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        calls.clear()
        for own in (torch.float64, torch.bfloat16):  # refused by torch, in torch's words
            with torch.no_grad(), model.paged.core.layers.scope(), pytest.raises(RuntimeError, match="dtype"):
                layer(torch.randn(2, width, dtype=own))
        assert not calls


def test_an_argument_by_its_name() -> None:
    """Some models' own code writes `self.dense(input=...)`."""
    model = patch(make("gpt2"))
    model.generate(IDS, **GREEDY)
    states = torch.randn(2, 384)
    with torch.no_grad(), model.paged.core.layers.scope():
        torch.testing.assert_close(model.lm_head(input=states), states @ model.lm_head.weight.t())
        model.transformer.h[0].attn.c_attn(x=states)


# Weights that change


def change_by(optimizer: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            made = optimizer(model.parameters())
            model(IDS, labels=IDS).loss.backward()
            made.step()
            model.zero_grad()

    return change


def load_state_dict(model: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model.load_state_dict({name: t + 0.05 * torch.randn_like(t) for name, t in model.state_dict().items()})


def a_row_of_data(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data[17] *= -9


def a_column_of_data(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj.weight.data[:, 201] = 3.0


def an_average_of_data(model: Any) -> None:
    """As of weights that are averaged by hand; a small layer's and a wide one's."""
    for layer in (model.model.layers[1].self_attn.k_proj, model.model.layers[0].mlp.down_proj):
        layer.weight.data.mul_(0.5).add_(layer.weight.data.flip(0), alpha=0.5)


def a_new_parameter(model: Any) -> None:
    layer = model.model.layers[0].self_attn.o_proj
    layer.weight = nn.Parameter(layer.weight.detach().flip(0).contiguous())


def a_new_storage(model: Any) -> None:
    layer = model.model.layers[0].self_attn.o_proj
    layer.weight.data = layer.weight.data.flip(0).contiguous()


def another_view(model: Any) -> None:
    """The same memory, square, read the other way."""
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight.data = layer.weight.data.t()


def a_part_of_the_storage(model: Any) -> None:
    """A smaller vocabulary."""
    model.lm_head.weight.data = model.lm_head.weight.data[:360]
    model.config.vocab_size = 360


def a_new_layer(model: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model.lm_head = nn.Linear(384, 400, bias=True)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-2)


CHANGES: dict[str, Callable[[Any], None]] = {
    "SGD": change_by(lambda p: torch.optim.SGD(p, lr=0.5)),
    "fused AdamW": change_by(lambda p: torch.optim.AdamW(p, lr=0.05, fused=True)),
    **{
        change.__name__: change
        for change in (
            load_state_dict,
            a_row_of_data,
            a_column_of_data,
            an_average_of_data,
            a_new_parameter,
            a_new_storage,
            another_view,
            a_part_of_the_storage,
            a_new_layer,
            in_place,
        )
    },
}


@pytest.mark.parametrize("is_in_c", [False, True], ids=["called one by one", "called from C"])
@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_change_between_calls(
    name: str, is_in_c: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would break: blocks that the weights of before have filled, an address that is no weight's any more."""
    if is_in_c:
        monkeypatch.undo()
    stock, model = make(), patch(make())
    before = compare(stock, model)
    hits = model.paged.stats().prefix_cache_hit_tokens
    for one in (stock, model):
        CHANGES[name](one)
    calls.clear()
    after = logits(stock)
    assert_same(after, logits(model))
    assert model.paged.stats().prefix_cache_hit_tokens == hits
    compare(stock, model)
    assert before.shape != after.shape or not torch.allclose(before, after, rtol=1e-2, atol=1e-2)
    assert is_in_c or calls, "multiplied by torch"
    assert_clean(model)
    assert 3 in of_a_step(model, calls) or is_in_c


def test_an_adapter_that_is_merged_and_disabled(calls: Calls) -> None:
    """Would break: PEFT takes it out when its layer is called, and the copy of the weight still has it in."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stock, model = (peft.get_peft_model(make(), settings) for _ in range(2))
        model.load_state_dict(stock.state_dict())
    patch(model)
    texts = []
    for is_disabled in (False, True, True, False):
        for one in (stock, model):
            if not is_disabled:
                one.merge_adapter()
        found = []
        for one in (stock, model):
            with one.disable_adapter() if is_disabled else nullcontext():
                found.append(one.generate(input_ids=IDS, **GREEDY, attention_mask=torch.ones_like(IDS)))
        assert torch.equal(*found)
        texts.append(found[0].tolist())
    assert texts[0] == texts[3] != texts[1], "the adapter changes nothing: the test is too easy"
    assert len(calls) > 10


def test_a_bias_that_changes_through_data() -> None:
    """It is not copied."""
    stock, model = make("gpt2"), patch(make("gpt2"))
    compare(stock, model)
    for one in (stock, model):
        one.transformer.h[0].mlp.c_fc.bias.data[3] += 40
    model.paged.reset_prefix_cache()
    compare(stock, model)


def test_data_that_no_sample_shows() -> None:
    """`reset_prefix_cache()` is what the documentation says to call after writes to `.data`."""
    stock, model = make(), patch(make())
    compare(stock, model)
    key = model.paged.core.weights_version.key()
    for one in (stock, model):
        weight = one.model.layers[0].self_attn.v_proj.weight
        samples = samples_of([nn.Parameter(weight.data)])
        kept = [sample.clone() for sample in samples]
        weight.data += 2.0
        for sample, elements in zip(samples, kept, strict=True):
            sample.copy_(elements)
    assert model.paged.core.weights_version.key() == key
    model.paged.reset_prefix_cache()
    compare(stock, model)


def test_a_model_that_dies_in_an_optimizer_step() -> None:
    """Any moment may be the garbage collector's, and no training step is to fail for it."""

    def collect(*_: Any) -> None:
        gc.collect()

    handle = register_optimizer_step_post_hook(collect)
    try:
        kept, dead = patch(make()), patch(make())
        gc.collect()
        dead.itself = [dead]  # garbage that only the collector finds
        alive = weakref.ref(dead)
        del dead
        kept(IDS, labels=IDS).loss.backward()
        torch.optim.SGD(kept.parameters(), lr=0.1).step()
        assert alive() is None
    finally:
        handle.remove()


def test_another_dtype() -> None:
    stock, model = make(), patch(make())
    compare(stock, model)
    for one in (stock, model):
        one.to(torch.bfloat16)
    expected, found = logits(stock), logits(model)
    assert found.dtype == torch.bfloat16
    assert float((found - expected).float().norm() / expected.float().norm()) < 2e-2
    for one in (stock, model):
        one.to(torch.float32)
    compare(stock, model)


# No other code sees it


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    output = model(IDS, labels=IDS)
    output.loss.backward()
    found = [output.logits.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_training_while_another_thread_generates(name: str, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """Bit for bit what it is without us, in the midst of an engine's step and behind it."""
    stock, model = make(name), patch(make(name))
    expected, scores = gradients(stock), logits(stock)
    model.generate(IDS, **GREEDY)
    assert calls
    with held_step(model, monkeypatch, LlamaRMSNorm if name == "llama" else GPT2Block):
        calls.clear()
        for found, wanted in zip(gradients(model), expected, strict=True):
            assert torch.equal(found, wanted)
        with torch.inference_mode():
            assert torch.equal(model(IDS).logits, scores)
        assert not calls
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert torch.equal(found, wanted)
    assert_clean(model)


def test_autocast(calls: Calls) -> None:
    stock, model = make(), patch(make())
    model.generate(IDS, **GREEDY)
    calls.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = logits(stock), logits(model)
        model.generate(IDS, **GREEDY)
    assert not calls
    assert float((found - expected).float().norm() / expected.float().norm()) < 2e-2
    compare(make(), model)
    assert calls


class Wrapped:
    """A forward put on the instance, as accelerate's hooks are."""

    def __init__(self, module: nn.Module) -> None:
        self.original, self.num_calls = module.forward, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self.original(*args, **kwargs) * 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_of_the_instance(when: str, calls: Calls) -> None:
    stock, model = make(), patch(make())
    if when == "after":
        compare(stock, model)
    wrappers = []
    for one in (stock, model):
        layer = one.model.layers[0].mlp.down_proj
        layer.forward = Wrapped(layer)
        wrappers.append(layer.forward)
    model.paged.reset_prefix_cache()
    calls.clear()
    compare(stock, model)
    assert calls
    assert wrappers[1].num_calls > 0
    assert model.model.layers[0].mlp.down_proj.forward is wrappers[1]
    for one in (stock, model):
        del one.model.layers[0].mlp.down_proj.forward
    model.paged.reset_prefix_cache()
    compare(stock, model)
    assert_clean(model)


def test_a_forward_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = make(), patch(make())
    compare(stock, model)

    for error in (KeyError("broken"), SystemExit(1)):

        def forward(self: Any, states: Tensor, error: BaseException = error) -> Tensor:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(LlamaRMSNorm, "forward", forward)
            with pytest.raises(type(error)):
                model.generate(IDS, **GREEDY)
        assert_clean(model)
        assert all(layer.thread_id is None for layer in model.paged.core.layers.found)
    compare(stock, model)


def test_a_step_inside_a_step(calls: Calls) -> None:
    """A hook that generates: refused, and the layers are as they were."""
    stock, model = make(), patch(make())

    def hook(*_: Any) -> None:
        model.generate(IDS[:1], **GREEDY)

    handle = model.model.layers[0].register_forward_hook(hf_paged.packed_hook(hook))
    with pytest.raises(RuntimeError, match="inside a step"):
        model.generate(IDS, **GREEDY)
    handle.remove()
    assert_clean(model)
    calls.clear()
    compare(stock, model)
    assert calls


def test_two_models_that_share_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with an engine and a thread of its own."""
    stock, one, other = make(), make(), make()
    other.lm_head, other.model.layers[0].mlp = one.lm_head, one.model.layers[0].mlp
    patch(one), patch(other)
    for _ in range(2):
        with held_step(one, monkeypatch):
            pass
        requests = [model.paged.submit(IDS[0], **GREEDY) for model in (one, other) for _ in range(3)]
        expected = stock.generate(IDS[:1], **GREEDY)[:, IDS.shape[1] :].tolist()
        assert all(request.result(30).sequences == expected for request in requests)
    assert_clean(one), assert_clean(other)
    compare(stock, other)


# Memory


def bytes_held() -> int:
    """By all tensors of this process that hold something."""
    gc.collect()
    storages: dict[int, int] = {}
    for tensor in [each for each in gc.get_objects() if isinstance(each, Tensor)]:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and not isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_takes_no_more_memory_than_stock_and_its_pool(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    compare(make(name), patch(make(name)))  # what is made once in a process
    before = bytes_held()
    model = make(name)
    size = bytes_held() - before
    patch(model)
    for _ in range(2):
        model.generate(IDS, **GREEDY)
    core = model.paged.core
    others = [core.kv_cache.tensor]
    for survey in [one.survey for one in core.layers.found if isinstance(one, DecoderLayer)][:1]:
        others += [survey.shared(Scratch)._memory, *survey.shared(LayerStacks).buffers]
    others += core.weights_version._samples
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in others)
    assert bytes_held() - before - num_bytes < 1.01 * size + 2**16


@pytest.mark.parametrize("leave", [lambda model: model.to(torch.bfloat16), lambda model: model.to("meta")])
def test_weights_that_go_are_let_go(leave: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: memory of weights that a layer of ours still holds, until the next call or for good."""
    monkeypatch.undo()
    model = patch(make())
    compare(make(), model)
    held = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    leave(model)
    assert not any(storage() for storage in held)


def test_what_reads_weights(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    stock, model = make(), patch(make())
    compare(stock, model)
    model.save_pretrained(tmp_path)
    found = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), LlamaForCausalLM.from_pretrained(tmp_path)]
    for one in (*found, hf_paged.unpatch(model)):
        for other, expected in zip(one.parameters(), stock.parameters(), strict=True):
            assert torch.equal(other, expected) and type(other) is nn.Parameter
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))


def test_no_kernel(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """Where there is no compiler, say."""
    monkeypatch.setattr(cpu_linear, "load", lambda dtype: "can't be compiled here")
    stock, model = make(), patch(make())
    compare(stock, model)
    assert not calls


def test_layers_that_are_not_taken() -> None:
    class Mine(nn.Linear):
        pass

    model = make()
    model.lm_head = Mine(384, 400, bias=False)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        model.model.layers[0].mlp.up_proj.weight.detach().t().contiguous().t()
    )
    model.model.layers[1].self_attn.o_proj.weight.data = model.model.layers[1].self_attn.o_proj.weight.data.double()
    survey = layers._survey(model, (torch.float32, torch.device("cpu")), False)
    taken = {id(layer.module) for layer in survey.found.values()}
    names = {name for name, module in model.named_modules() if id(module) in taken}
    assert "lm_head" not in names and "model.layers.1.self_attn.o_proj" not in names
    assert {"model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"} <= names


# Several of one input


def of_a_step(model: Any, calls: Calls) -> list[int]:
    """How many weights each product of a step has, in the order of the step."""
    model.paged.reset_prefix_cache()
    model.generate(IDS[:, :1], max_new_tokens=1, do_sample=False)  # is watched
    calls.clear()
    model.generate(IDS[:, :1], max_new_tokens=1, do_sample=False)
    return list(calls)


LLAMA = [3, 1, 2, 1] * 2 + [1]  # queries, keys and values; the output; gate and up; down; and the head


def test_bit_for_bit(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """What layers compute alone, with biases of their own."""
    model = make()
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.up_proj):
            part.bias = nn.Parameter(torch.randn(part.out_features))
    patch(model)
    logits(model)
    calls.clear()
    joined = [logits(model, random_ids(2, length)) for length in (1, 5, 40)]
    assert 3 in calls
    monkeypatch.setattr(linears.Runs, "note", lambda *_: None)
    model.paged.release()
    calls.clear()
    alone = [logits(model, random_ids(2, length)) for length in (1, 5, 40)]
    assert set(calls) == {1}
    for found, expected in zip(joined, alone, strict=True):
        assert torch.equal(found, expected)


def test_a_hook_on_one_of_them(calls: Calls) -> None:
    """It is called by itself, with what its hook makes of the input; the others stay joined or go alone."""
    stock, model = make(), patch(make())
    compare(stock, model)
    handles = []
    for one in (stock, model):
        layer = one.model.layers[0].self_attn.k_proj
        handles.append(layer.register_forward_pre_hook(hf_paged.packed_hook(lambda _, args: (args[0] * 2,))))
    model.paged.reset_prefix_cache()
    compare(stock, model)
    assert of_a_step(model, calls)[0] < 3
    for handle in handles:
        handle.remove()
    model.paged.reset_prefix_cache()
    compare(stock, model)
    assert of_a_step(model, calls) == LLAMA


class Three(nn.Module):
    """Three layers, called in ways that models' code might."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor, way: str) -> list[Tensor]:
        if way == "one input":
            return [self.a(x), self.b(x), self.c(x)]
        if way == "in between":
            first = self.a(x)
            y = torch.empty_like(x).copy_(x)
            return [first, self.b(x), self.c(y)]
        if way == "written":
            first = self.a(x)
            x.mul_(2)
            return [first, self.b(x), self.c(x)]
        if way == "first only":
            return [self.a(x)]
        if way == "last alone":
            return [self.c(x), self.b(x)]
        if way == "twice":
            return [self.a(x), self.a(x), self.b(x), self.c(x), self.b(x)]
        raise KeyError(way)


JOINED = {"one input": 3, "in between": 2, "written": 2, "first only": 1, "last alone": 2, "twice": 1}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("first", JOINED)
def test_code_that_calls_them_otherwise(first: str, mode: Any, calls: Calls) -> None:
    """Would break: the result of another input, of an input that was written to, of another layer."""
    model = Three()
    own = Layers(model)
    largest = []
    torch.manual_seed(0)
    with mode():
        for way in (first, first, *JOINED, first):
            if way == "written" and mode is torch.inference_mode and first != "written":
                continue  # there no tensor knows: code that writes is seen where it is watched
            x = torch.randn(5, 256)
            expected = model(x.clone(), way)
            calls.clear()
            with own.scope():
                found = model(x.clone(), way)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            largest += [max(calls)] if way == first else []
    assert largest[1] == JOINED[first]


def test_results_that_are_not_taken(calls: Calls) -> None:
    """Computed for nothing once, and held by nothing behind the forward."""
    model = Three()
    own = Layers(model)
    with torch.no_grad():
        for way in ("one input", "first only", "one input"):
            calls.clear()
            x = torch.randn(5, 256)
            with own.scope():
                model(x, way)
            alive = weakref.ref(x)
            del x
            assert alive() is None
    assert calls == [1, 1, 1]


# Inference mode


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, ModelOutput | dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, PagedCache):
        for layer in value.layers:
            yield from (layer.keys, layer.values)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> set[tuple[bool, bool]]:
    """Inference mode and grad mode of all forwards of steps."""
    found: set[tuple[bool, bool]] = set()
    original = LlamaDecoderLayer.forward

    @as_library_code
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_sentinel(kwargs.get("attention_mask")):
            found.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    return found


def trains(stock: Any, model: Any) -> None:
    """Asserts that both learn the same."""
    for one in (stock, model):
        one.train()
    for found, expected in zip(gradients(model), gradients(stock), strict=True):
        assert torch.equal(found, expected)
    for one in (stock, model):
        one.eval()
        change_by(lambda p: torch.optim.SGD(p, lr=0.1))(one)
    compare(stock, model)


DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False},
        {"do_sample": False, "return_dict_in_generate": True},
        {"do_sample": False, **DETAILS},
        {"do_sample": True, "num_return_sequences": 2, **DETAILS},
        {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.2},
        {"num_beams": 2, "do_sample": False, **DETAILS},
        {"do_sample": False, "output_hidden_states": True, "return_dict_in_generate": True},
        {"do_sample": False, "prompt_lookup_num_tokens": 2},
    ],
    ids=lambda arguments: "+".join(arguments),
)
def test_results_are_ordinary_tensors(arguments: dict[str, Any], modes: set[tuple[bool, bool]]) -> None:
    stock, model = make(), patch(make())
    modes.clear()  # patching tries a small copy
    batch = IDS[:1] if "prompt_lookup_num_tokens" in arguments else IDS
    result = model.generate(batch, max_new_tokens=4, **arguments)
    found = list(tensors_of(result))
    assert found and not any(tensor.is_inference() for tensor in found)
    if "output_hidden_states" not in arguments:
        assert (True, False) in modes, "it did not run in inference mode"
    trains(stock, model)


def test_logits_and_caches_are_ordinary_tensors(modes: set[tuple[bool, bool]]) -> None:
    stock, model = make(), patch(make())
    modes.clear()
    cache = PagedCache(model)
    for ids in (IDS, IDS[:, :1], IDS[:, :3]):
        output = model(ids, past_key_values=cache)
        assert not any(tensor.is_inference() for tensor in tensors_of(dict(output)))
        output.logits.add_(1)  # theirs to write to
        torch.nn.functional.linear(output.logits, torch.ones(2, 400, requires_grad=True)).sum().backward()
    assert modes == {(True, False)}
    assert not any(tensor.is_inference() for tensor in tensors_of(cache))
    result = model.generate(IDS, past_key_values=PagedCache(model), **GREEDY, return_dict_in_generate=True)
    assert not any(tensor.is_inference() for tensor in tensors_of(result))
    trains(stock, model)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_with_hooks_there_is_neither_inference_mode_nor_autograd(
    backend: str, modes: set[tuple[bool, bool]], calls: Calls
) -> None:
    """What hooks see is theirs to keep; a graph that was not asked for would grow from step to step."""
    stock, model = make(), patch(make(), attention_backend=backend)
    modes.clear()
    seen: list[Tensor] = []
    look = hf_paged.packed_hook(lambda module, args, output: seen.append(output))
    handle = model.model.layers[0].mlp.register_forward_hook(look)
    compare(stock, model)
    assert seen and not any(tensor.is_inference() for tensor in seen)
    assert modes == {(False, False)}
    assert not any(tensor.requires_grad for tensor in seen)
    assert not model.paged.core.kv_cache.tensor.requires_grad
    assert calls, "with hooks, layers are multiplied as they are"
    handle.remove()
    trains(stock, model)


def test_a_global_hook() -> None:
    stock, model = make(), patch(make())
    model.generate(IDS, **GREEDY)
    seen: list[Any] = []
    look = hf_paged.packed_hook(lambda module, args, output: seen.append(output))
    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        model.generate(IDS, **GREEDY)
    finally:
        handle.remove()
    assert len(seen) > 50 and not any(tensor.is_inference() for tensor in tensors_of(seen))
    trains(stock, model)


def test_a_hook_that_comes_while_a_request_runs() -> None:
    model = patch(make())
    seen: list[Tensor] = []
    request = model.paged.submit(IDS[0], max_new_tokens=60, do_sample=False)
    tokens = iter(request)
    next(tokens)
    with model.paged.core.worker.loop.exclusive():
        handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    request.result(30)
    handle.remove()
    assert seen and not any(tensor.is_inference() for tensor in seen)


def test_a_forward_of_an_instance_sees_ordinary_tensors() -> None:
    """The other way of looking at activations."""
    model = patch(make())
    module = model.model.layers[0].mlp
    original, seen = module.forward, []

    def forward(states: Tensor) -> Tensor:
        seen.append(original(states))
        return seen[-1]

    module.forward = forward
    model.generate(IDS, **GREEDY)
    assert seen and not any(tensor.is_inference() for tensor in seen)


class Scaled(nn.Module):
    """Makes what it multiplies by at its first forward, and keeps it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale: Tensor | None = None

    def forward(self, states: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((states.shape[-1],), 0.5)
        return self.inner(states) * self.scale


def test_a_module_of_the_users_that_keeps_tensors() -> None:
    """Not part of the architecture that was tried, like an adapter."""
    stock, model = make(), patch(make())
    for one in (stock, model):
        one.model.layers[0].mlp = Scaled(one.model.layers[0].mlp)
    model.generate(IDS, **GREEDY)
    assert not model.model.layers[0].mlp.scale.is_inference()
    trains(stock, model)


class Box:
    value: Tensor


class Keeps(LlamaForCausalLM):
    keep: Callable[[Any, Tensor], None]

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        logits_to_keep: Any = 0,
        **kwargs: Any,
    ) -> Any:
        output = super().forward(
            input_ids, attention_mask, position_ids, past_key_values, logits_to_keep=logits_to_keep, **kwargs
        )
        self.keep(output.logits)
        return output


KEEP: dict[str, Callable[[Any, Tensor], Any]] = {
    "attribute": lambda model, made: setattr(model, "kept", made),
    "buffer": lambda model, made: model.register_buffer("kept", made, persistent=False),
    "dict": lambda model, made: vars(model).setdefault("kept", {}).update(last=made),
    "list": lambda model, made: vars(model).setdefault("kept", []).append((made, 1)),
    "object": lambda model, made: setattr(vars(model).setdefault("kept", Box()), "value", made),
}


@pytest.mark.parametrize("how", KEEP)
def test_architectures_that_keep_tensors(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type("Keeps", (Keeps,), {"keep": KEEP[how]})
    # as if they were transformers' own
    monkeypatch.setattr("hf_paged.model.weights_version.is_library_code", lambda *_: True)
    report = hf_paged.is_supported(make_llama(cls))
    assert report.traits is not None, report.reasons
    assert report.traits.runs_packed
    assert not report.traits.allows_inference_mode


def test_an_architecture_that_keeps_none() -> None:
    report = hf_paged.is_supported(make_llama())
    assert report.traits is not None and report.traits.allows_inference_mode


def test_a_mode_sees_nothing_of_it() -> None:
    """Would break: within `ExactOperations`, a call that takes four times as long."""
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    module, states, runs = nn.Linear(8, 5), torch.randn(3, 8), Runs()
    kernel = cpu_linear.load(torch.float32)
    assert isinstance(kernel, CPULinear)
    layer = Linear(module, kernel, runs)
    runs.note(layer, states)
    runs.end()
    with torch.no_grad(), Mode():
        result = layer.compute(states)
    assert not seen
    torch.testing.assert_close(result, module(states))
