"""`packed_weights="replace"`: weights whose only memory is the packed copy, until something asks for their elements."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_packed_linears import (
    CHANGES,
    GREEDY,
    IDS,
    _Always,
    change_by,
    compare,
    gradients,
    held_step,
    logits,
    make,
    patch,
)
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from transformers import LlamaForCausalLM

import hf_paged
from hf_paged.model import linear_ways, packed_linears
from hf_paged.model.packed_parameter import PackedParameter


@pytest.fixture(autouse=True)
def replaced_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured: it is said to be slower."""
    monkeypatch.setattr(packed_linears, "TRIALS", _Always(False))


def replaced(name: str = "llama", **settings: Any) -> Any:
    """A model that has run: its weights are packed."""
    model = patch(make(name), packed_weights="replace", **settings)
    model.generate(IDS, **GREEDY)
    return model


def num_packed(model: Any) -> int:
    return sum(isinstance(parameter, PackedParameter) for parameter in model.parameters())


def bytes_held() -> int:
    """By all tensors of this process that hold something."""
    gc.collect()
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in [each for each in gc.get_objects() if isinstance(each, Tensor)]:
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and not isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def assert_equal(model: nn.Module, stock: nn.Module) -> None:
    """Asserts the same weights, bit for bit, and ordinary ones."""
    for (name, found), expected in zip(model.state_dict().items(), stock.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tokens_memory_and_weights(name: str, dtype: torch.dtype) -> None:
    """Packed after the first call and after many, in the place of the weights; given back bit for bit."""
    stock = make(name).to(dtype)
    before = bytes_held()
    model = make(name).to(dtype)
    size = bytes_held() - before
    parameters = list(model.parameters())
    patch(model, packed_weights="replace")
    for _ in range(3):
        if dtype is torch.float32:
            compare(stock, model)
        else:
            expected, found = logits(stock).float(), logits(model).float()
            assert float((found - expected).norm() / expected.norm()) < 2e-2
        assert num_packed(model) == (15 if name == "llama" else 9)
    others = [model.paged.core.kv_cache.tensor]
    others += [layer.scratch._memory for layer in model.paged.core.decoder_layers._layers[:1]]  # for 256 rows
    assert bytes_held() - before - sum(t.untyped_storage().nbytes() for t in others) < 1.25 * size
    epoch = model.paged.core.weights_version.key()
    model.generate(IDS, **GREEDY)
    assert model.paged.core.weights_version.key() == epoch
    hf_paged.unpatch(model)
    assert_equal(model, stock)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


def saved(model: Any) -> None:
    torch.save(model.state_dict(keep_vars=True), io.BytesIO())


def scored(model: Any) -> None:
    with torch.no_grad():
        model(IDS)


def read_as_data(model: Any) -> None:
    assert not any(parameter.data.isnan().any() for parameter in model.parameters())


READS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "torch.save": saved,
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "scoring": scored,
    "training": lambda model: gradients(model),
    "data": read_as_data,
    "to": lambda model: model.to("cpu", torch.float32),
    "numpy": lambda model: [parameter.detach().numpy() for parameter in model.parameters()],
    "release": lambda model: model.paged.release(),
    "a list": lambda model: torch._foreach_norm(list(model.parameters())),
}


@pytest.mark.parametrize("name", READS)
def test_what_reads_weights(name: str) -> None:
    """It finds them, and the engine goes on; its prefixes are still those of these weights."""
    stock, model = make(), replaced()
    key = model.paged.core.weights_version.key()
    assert num_packed(model) == 15
    READS[name](model)
    assert num_packed(model) == 0
    compare(stock, model)
    if name != "release":
        assert model.paged.core.weights_version.key() == key
    assert_equal(model, stock)


def test_what_reads_no_elements() -> None:
    model = replaced()
    with torch.no_grad():
        for parameter, expected in zip(model.parameters(), make().parameters(), strict=True):
            assert parameter.shape == expected.shape and parameter.dtype == expected.dtype
            assert parameter.numel() == expected.numel() and parameter.requires_grad and parameter.is_leaf
    assert model.num_parameters() and model.dtype is torch.float32 and model.device.type == "cpu"
    torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    model.requires_grad_(False)
    assert num_packed(model) == 15


def test_save_pretrained(tmp_path: Any) -> None:
    model = replaced()
    model.save_pretrained(tmp_path)
    assert_equal(LlamaForCausalLM.from_pretrained(tmp_path), make())


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_change(name: str) -> None:
    """They are packed anew, in the place of the new ones."""
    stock, model = make(), replaced()
    for one in (stock, model):
        CHANGES[name](one)
    compare(stock, model)
    assert num_packed(model) >= 13
    hf_paged.unpatch(model)
    assert_equal(model, stock)


def test_an_optimizer_from_before() -> None:
    """It holds the parameters, which stay the same objects: turns of training and generating."""
    stock, model = make(), make()
    steps = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (stock, model)]
    patch(model, packed_weights="replace")
    for _ in range(3):
        compare(stock, model)
        assert num_packed(model) == 15
        for one, optimizer in zip((stock, model), steps, strict=True):
            change_by(lambda _, optimizer=optimizer: optimizer)(one)
    compare(stock, model)
    for one, other in zip(model.state_dict().values(), stock.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_tied_head_stays_a_copy() -> None:
    def tied() -> Any:
        model = make()
        model.lm_head.weight = model.model.embed_tokens.weight
        return model

    model = patch(tied(), packed_weights="replace")
    compare(tied(), model)
    assert num_packed(model) == 14 and type(model.lm_head.weight) is nn.Parameter


def test_threads_that_read_at_once() -> None:
    model, found = replaced(), []
    weight, expected = model.lm_head.weight, make().lm_head.weight.detach()
    threads = [threading.Thread(target=lambda: found.append(weight.detach().clone())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(torch.equal(each, expected) for each in found)


def test_scoring_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the step, which may be about to take the weights away."""
    stock, model = make(), replaced()
    found: list[Tensor] = []
    with torch.no_grad():
        expected = stock(IDS).logits

    def score() -> None:
        with torch.no_grad():
            found.append(model(IDS).logits)

    thread = threading.Thread(target=score)
    with held_step(model, monkeypatch):
        thread.start()
        thread.join(0.5)
        assert not found
    thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_backward_pass_that_is_yet_to_come(name: str) -> None:
    """A graph holds weights themselves: these are not packed before it is gone."""
    stock, model = make(name), patch(make(name), packed_weights="replace")
    loss = model(IDS, labels=IDS).loss
    model.generate(IDS, **GREEDY)
    loss.backward()
    stock(IDS, labels=IDS).loss.backward()
    for found, expected in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    del loss
    model.paged.reset_prefix_cache()
    model.generate(IDS, **GREEDY)
    assert num_packed(model) == (15 if name == "llama" else 9)


def test_memory_that_two_parameters_share() -> None:
    """What is written to one of them is the other's, too."""
    stock, model = make(), make()
    for one in (stock, model):
        one.lm_head.weight.data = one.model.embed_tokens.weight.data
    patch(model, packed_weights="replace")
    for _ in range(2):
        compare(stock, model)
        with torch.no_grad():
            for one in (stock, model):
                one.model.embed_tokens.weight[3:90].mul_(-2)
    compare(stock, model)


def test_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match='packed_weights="replace" is not for this LlamaForCausalLM: none of its linear'
    ):
        patch(make().double(), packed_weights="replace")
    with pytest.raises(ValueError, match="float16"):
        patch(make().half(), packed_weights="replace")
    monkeypatch.setattr(linear_ways.cpu_linear, "load", lambda dtype: "can't be compiled here")
    model = make()
    with pytest.raises(ValueError, match="the kernel can't be compiled here"):
        patch(model, packed_weights="replace")
    assert type(model).__module__.startswith("transformers")


FORK = """
import os, threading
from hf_paged.model import packed_parameter

has_it, is_over = threading.Event(), threading.Event()

def hold():
    with packed_parameter._LOCK:
        has_it.set()
        is_over.wait(0.3)

threading.Thread(target=hold, daemon=True).start()
has_it.wait()
pid = os.fork()
if pid == 0:
    os._exit(0 if packed_parameter._LOCK.acquire(timeout=5) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_while_a_weight_is_read() -> None:
    """Would break: a child that waits for ever for a lock of a thread that it doesn't have."""
    result = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert result.stdout == "0\n", result.stderr
