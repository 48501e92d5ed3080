"""Linear layers of engine forwards, multiplied another way, and inference mode: no other code may see any of it.

The models' weights are large enough to be packed, and whether that is faster is not asked of the machine.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import cycle
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.utils import ModelOutput

import hf_paged
from helpers.library_code import as_library_code
from helpers.models import random_ids
from helpers.pairs import assert_same
from hf_paged import PagedCache
from hf_paged.attention.context import is_sentinel
from hf_paged.model import linear_ways, packed_linears, trial
from hf_paged.model.linear_ways import Multiply, Way
from hf_paged.model.trial import Pair, Trials

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"),
]

BOTH_WAYS = pytest.mark.parametrize("calls", ["panels", "onednn"], indirect=True)
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


class _Always(Trials):
    """Says the same of every layer, for few rows and for many."""

    def __init__(self, *answers: bool) -> None:
        self._answers = cycle(answers)

    def gains(self, pairs: Sequence[Pair], tolerances: Any) -> list[float]:
        return [2.0 if next(self._answers) else 1.0] * len(pairs)


@pytest.fixture(autouse=True)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All layers are taken for faster by one way; each multiplication adds its number of rows to the list."""
    name: str = getattr(request, "param", "panels")
    rows: list[int] = []

    def counted(way: Way) -> Way:
        @wraps(way)
        def hold(weight: Tensor) -> Multiply | None:
            multiply = way(weight)
            assert multiply is not None

            def counting(states: Tensor, bias: Tensor | None) -> Tensor:
                rows.append(states.numel() // states.shape[-1])
                return multiply(states, bias)

            return counting

        return hold

    monkeypatch.setattr(linear_ways, "WITH_COPY", (counted(getattr(linear_ways, name)),))
    monkeypatch.setattr(linear_ways, "WITHOUT_COPY", (counted(linear_ways.onednn_in_place),))
    monkeypatch.setattr(packed_linears, "TRIALS", _Always(True))
    monkeypatch.setattr(packed_linears, "MIN_ELEMENTS", 2**17)  # keys' and values' layers are below
    return rows


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
            assert type(owner).__module__ != packed_linears.__name__, name


@contextmanager
def held_step(
    model: Any, monkeypatch: pytest.MonkeyPatch, block: type[nn.Module] = LlamaRMSNorm
) -> Iterator[threading.Thread]:
    """Within it a request of the model is in the midst of a forward, on the engine's thread."""
    is_inside, may_go_on = threading.Event(), threading.Event()
    original = block.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "hf_paged":
            is_inside.set()
            may_go_on.wait(30)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(block, "forward", forward)
        request = model.paged.submit(IDS[0], **GREEDY)
        try:
            assert is_inside.wait(30)
            yield threading.current_thread()
        finally:
            may_go_on.set()
            request.result(30)


# The same tokens


@BOTH_WAYS
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tokens(name: str, calls: list[int]) -> None:
    stock = make(name)
    model = patch(make(name))
    compare(stock, model)
    layers = model.paged.core.linears._layers
    assert len(layers) == (2 * 5 + 1 if name == "llama" else 2 * 4 + 1)
    calls.clear()
    for arguments in (
        {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6},
        {"num_beams": 3, "max_new_tokens": 6, "do_sample": False},
    ):
        torch.manual_seed(0)
        expected = stock.generate(IDS, **arguments)
        torch.manual_seed(0)
        assert torch.equal(model.generate(IDS, **arguments), expected)
    assert len(calls) % len(layers) == 0 and len(calls) >= 12 * len(layers)
    assert_clean(model)


@BOTH_WAYS
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16(name: str, calls: list[int]) -> None:
    stock, model = make(name).bfloat16(), patch(make(name).bfloat16())
    expected, found = logits(stock).float(), logits(model).float()
    assert calls
    assert float((found - expected).norm() / expected.norm()) < 2e-2


@BOTH_WAYS
def test_shapes(calls: list[int]) -> None:
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
                with model.paged.core.linears.scope():
                    found = layer(states)
            assert len(calls) == 1
            assert found.shape == expected.shape and found.is_contiguous() == expected.is_contiguous()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        calls.clear()
        for own in (torch.float64, torch.bfloat16):  # refused by torch, in torch's words
            with torch.no_grad(), model.paged.core.linears.scope(), pytest.raises(RuntimeError, match="dtype"):
                layer(torch.randn(2, width, dtype=own))
        assert not calls


def test_an_argument_by_its_name() -> None:
    """Some models' own code writes `self.dense(input=...)`."""
    model = patch(make("gpt2"))
    model.generate(IDS, **GREEDY)
    states = torch.randn(2, 384)
    with torch.no_grad(), model.paged.core.linears.scope():
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
    model.lm_head.weight.data[17] *= -9


def a_column_of_data(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj.weight.data[:, 201] = 3.0


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
            a_new_parameter,
            a_new_storage,
            another_view,
            a_part_of_the_storage,
            a_new_layer,
            in_place,
        )
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_change_between_calls(name: str, calls: list[int]) -> None:
    stock, model = make(), patch(make())
    before = compare(stock, model)
    for one in (stock, model):
        CHANGES[name](one)
    calls.clear()
    after = compare(stock, model)
    assert before.shape != after.shape or not torch.allclose(before, after, rtol=1e-2, atol=1e-2)
    assert calls, "packed no more"
    assert_clean(model)


def test_an_adapter_that_is_merged_and_disabled(calls: list[int]) -> None:
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
    layer = model.paged.core.linears._layers[-1]
    assert layer.module is model.lm_head
    sampled = torch.zeros(400 * 384, dtype=torch.bool)
    sampled[layer.sample_index] = True
    free = (~sampled).nonzero()[:: 400 * 384 // 2000, 0]
    for one in (stock, model):
        one.lm_head.weight.data.view(-1)[free] += 2.0
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
def test_training_while_another_thread_generates(name: str, monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
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


def test_autocast(calls: list[int]) -> None:
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
def test_a_forward_of_the_instance(when: str, calls: list[int]) -> None:
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
        assert all(layer.thread_id is None for layer in model.paged.core.linears._layers)
    compare(stock, model)


def test_a_step_inside_a_step(calls: list[int]) -> None:
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


# Memory and speed


def test_no_room_for_copies(calls: list[int]) -> None:
    stock, model = make(), patch(make(), memory_fraction=1e-9)
    compare(stock, model)
    assert calls
    for layer in model.paged.core.linears._layers:
        assert layer.sample is None and layer.source is None
    for one in (stock, model):
        one.lm_head.weight.data[3, 4] += 50
    model.paged.reset_prefix_cache()
    compare(stock, model)
    for name in ("SGD", "a_new_parameter", "a_new_storage"):
        for one in (stock, model):
            CHANGES[name](one)
        compare(stock, model)


def test_release() -> None:
    stock, model = make(), patch(make())
    compare(stock, model)
    copies = [weakref.ref(layer.multiply) for layer in model.paged.core.linears._layers]
    assert any(ref() is not None for ref in copies)
    model.paged.release()
    gc.collect()
    assert not any(ref() is not None for ref in copies)
    compare(stock, model)
    copies = [weakref.ref(layer.multiply) for layer in model.paged.core.linears._layers]
    hf_paged.unpatch(model)
    gc.collect()
    assert not any(ref() is not None for ref in copies)


def test_what_is_not_faster_is_left_alone(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setattr(packed_linears, "TRIALS", _Always(False))
    stock, model = make(), patch(make())
    compare(stock, model)
    assert model.paged.core.linears._layers == [] and not calls


@pytest.mark.parametrize("gains", [(False, True), (True, False)], ids=["many rows", "few rows"])
def test_what_is_faster_for_some_numbers_of_rows(
    gains: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    """Would break: a single user's rows multiplied in the way that is best for many users', or the reverse."""
    monkeypatch.setattr(packed_linears, "TRIALS", _Always(*gains))
    stock, model = make(), patch(make())
    compare(stock, model)
    assert calls and {rows >= packed_linears.MANY_ROWS for rows in calls} == {gains[1]}


@pytest.mark.parametrize("gains", [(1.0, 1.0), (1.04, 1.04), (1.0, 1.06), (1.06, 1.0), (3.0, 3.0)])
def test_measuring(gains: tuple[float, float], monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """Once a process for each kind of layer, few rows and many, and nothing for a few percent."""
    trials = Trials()
    measured: list[int] = []

    def seconds(*series: list[tuple[Any, Callable[[], Tensor]]]) -> list[dict[Any, float]]:
        own, other = series
        assert len(own) == len(other)
        gain = gains[len(measured) % 2]
        measured.append(len(own))
        return [{kind: gain for kind, _ in own}, {kind: 1.0 for kind, _ in other}]

    monkeypatch.setattr(packed_linears, "TRIALS", trials)
    monkeypatch.setattr(trial, "_seconds", seconds)
    model = patch(make("gpt2"))
    model.generate(IDS, **GREEDY)
    few, many = (gain > trial.MIN_GAIN for gain in gains)
    assert [gain > 1 for gain in trials._gains.values()] == [few] * 5 + [many] * 5
    assert bool(model.paged.core.linears._layers) == (few or many)
    num_measured = sum(measured)
    compare(make("gpt2"), patch(make("gpt2")))
    assert sum(measured) == num_measured > 0 and len(trials._gains) == 10


def test_real_measurements() -> None:
    """Whatever they say, tokens are the same."""
    with pytest.MonkeyPatch.context() as patched:
        trials = Trials()
        patched.setattr(packed_linears, "TRIALS", trials)
        for name in ("llama", "gpt2"):
            compare(make(name), patch(make(name)))
        assert trials._gains


@BOTH_WAYS
@pytest.mark.parametrize("how", ["wrong", "missing", "not here", "not for this weight"])
def test_a_way_that_is_wrong_or_not_there(how: str, monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """Operations of oneDNN, private ones, may change with torch; ours may be missing, where there is no compiler."""
    (right,) = linear_ways.WITH_COPY
    tried = []

    def way(weight: Tensor) -> Multiply | None:
        tried.append(1)
        if how == "wrong":
            multiply = right(weight)
            assert multiply is not None
            return lambda states, bias: multiply(states, bias) * 1.01
        if how == "not for this weight":
            return None
        raise {"missing": AttributeError, "not here": RuntimeError}[how]("no such operation")

    class Checked(Trials):
        """Whatever agrees is faster."""

        def gains(self, pairs: Sequence[Pair], tolerances: Any) -> list[float]:
            super().gains(pairs, tolerances)
            return [2.0] * len(pairs)

    for ways in ((way,), (way, right), (right, way)):
        monkeypatch.setattr(linear_ways, "WITH_COPY", ways)
        monkeypatch.setattr(packed_linears, "TRIALS", Checked())
        stock, model = make(), patch(make())
        compare(stock, model)
        assert tried and bool(model.paged.core.linears._layers) == (right in ways)
        tried.clear()
        calls.clear()


@pytest.mark.parametrize("has_onednn", [False, True])
def test_a_torch_without_onednn(has_onednn: bool, monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """The kernel in C doesn't need it."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    compare(make(), patch(make()))
    assert calls


def test_no_memory_for_a_copy_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial's copies fit, and the last layers' don't: no step fails for it."""
    num_copies = []

    def way(weight: Tensor) -> Multiply:
        num_copies.append(1)
        if len(num_copies) > 16:
            raise RuntimeError("can't allocate memory")
        return linear_ways.onednn_in_place(weight)

    monkeypatch.setattr(linear_ways, "WITH_COPY", (way,))
    stock, model = make(), patch(make())
    compare(stock, model)
    assert len(num_copies) == 17 and 0 < len(model.paged.core.linears._layers) < 11


def test_the_way_that_gains_most(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """By few rows and many together; a layer has one copy."""
    used: list[str] = []

    def way_of(name: str) -> Way:
        def way(weight: Tensor) -> Multiply:
            def multiply(states: Tensor, bias: Tensor | None) -> Tensor:
                used.append(name)
                return torch.nn.functional.linear(states, weight, bias)

            return multiply

        way.__name__ = name
        return way

    class Given(Trials):
        def gains(self, pairs: Sequence[Pair], tolerances: Any) -> list[float]:
            gains = {"a": (3.0, 1.0), "b": (2.0, 2.0), "c": (1.0, 2.5)}
            kinds = [cast(tuple[Any, ...], pair.kind) for pair in pairs]
            return [gains[way][rows > 1] for *_, rows, way, _ in kinds]

    monkeypatch.setattr(linear_ways, "WITH_COPY", tuple(way_of(name) for name in "abc"))
    monkeypatch.setattr(packed_linears, "TRIALS", Given())
    compare(make(), patch(make()))
    assert set(used) == {"b"}


def test_layers_that_are_not_taken() -> None:
    class Mine(nn.Linear):
        pass

    model = make()
    model.lm_head = Mine(384, 400, bias=False)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        model.model.layers[0].mlp.up_proj.weight.detach().t().contiguous().t()
    )
    model.model.layers[1].self_attn.o_proj.weight.data = model.model.layers[1].self_attn.o_proj.weight.data.double()
    taken = {name for name, module in model.named_modules() if packed_linears.can_take(module)}
    assert "lm_head" not in taken and "model.layers.0.mlp.up_proj" not in taken
    assert "model.layers.1.self_attn.o_proj" not in taken and "model.layers.0.self_attn.k_proj" not in taken
    assert {"model.layers.0.mlp.gate_proj", "model.layers.1.self_attn.q_proj"} <= taken


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
    backend: str, modes: set[tuple[bool, bool]], calls: list[int]
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
    monkeypatch.setattr("hf_paged.model.weights_version.is_library_code", lambda module: True)
    report = hf_paged.is_supported(make_llama(cls))
    assert report.traits is not None, report.reasons
    assert report.traits.runs_packed
    assert not report.traits.allows_inference_mode


def test_an_architecture_that_keeps_none() -> None:
    report = hf_paged.is_supported(make_llama())
    assert report.traits is not None and report.traits.allows_inference_mode
