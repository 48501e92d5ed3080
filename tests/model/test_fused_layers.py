"""Norms, gates and rotary embeddings as one kernel each: right, found by what they compute, seen by no other code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import hf_paged
from helpers.kernel_cases import repaired_interpreter, same_bits
from helpers.library_code import as_library_code
from helpers.models import MODELS, build, random_ids
from hf_paged.kernels import cpu_layers, reference
from hf_paged.kernels.layers import InputError, NormWeight, Place
from hf_paged.model import fused_layers, fused_rotary, layers
from hf_paged.model.decoder_layers import find_decoder_layer
from hf_paged.model.fused_layers import ACTIVATIONS, GatedMLP, Norm
from hf_paged.model.fused_rotary import RotaryAttention
from hf_paged.model.layers import KINDS, Layers
from hf_paged.model.module_overrides import ModuleOverride

F32, BF16 = torch.float32, torch.bfloat16
F16 = torch.float16
DTYPES = (F32, BF16)
# Each of the kernels with its dtypes
KERNELS = [
    *(("c", dtype) for dtype in DTYPES),
    *(("triton", dtype) for dtype in (*DTYPES, F16)),
    *(pytest.param("gpu", dtype, marks=pytest.mark.gpu) for dtype in (*DTYPES, F16)),
]
TRITON = KERNELS[len(DTYPES) :]
CPU = torch.device("cpu")
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
IDS = random_ids(2, 7)
OTHER_ROTARIES = ("gpt_oss", "gptj", "codegen", "gemma4", "gemma4_sharing", "gemma3n")  # half a cosine; one by one


@contextmanager
def kernels(dtype: torch.dtype, kind: str = "c") -> Iterator[tuple[Any, Callable[[Tensor], Tensor]]]:
    """The kernels in C, or Triton's, interpreted or on a GPU; and how tensors get there."""
    if kind == "c":
        loaded = cpu_layers.load(dtype)
        assert isinstance(loaded, cpu_layers.CPULayers), loaded
        yield loaded, lambda tensor: tensor
        return
    from hf_paged.kernels.triton_layers import TritonLayers

    with nullcontext() if kind == "gpu" else repaired_interpreter():
        yield TritonLayers(dtype), lambda tensor: tensor.to("cuda" if kind == "gpu" else "cpu")


def assert_close(result: Tensor, truth: Tensor) -> None:
    """As near as rounding once or twice to the result's dtype allows, element by element; NaN where it is the truth."""
    relative = {F32: 4e-6, BF16: 2.0**-7, F16: 2.0**-10}[result.dtype]
    absolute = 1e-6 if result.dtype is F16 else 1e-7
    torch.testing.assert_close(result.cpu().double(), truth.double(), rtol=relative, atol=absolute, equal_nan=True)


# Numbers


@pytest.mark.parametrize(("kind", "dtype"), KERNELS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 16), (1, 64, 768), (0, 8)], ids=str)
@pytest.mark.parametrize(("offset", "rounds_first"), fused_layers.NORMS)
def test_rms_norm(kind: str, dtype: torch.dtype, shape: tuple[int, ...], offset: float, rounds_first: bool) -> None:
    states = (torch.randn(shape) * torch.logspace(-3, 2, shape[-2])[:, None]).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    with kernels(dtype, kind) as (layers, there):
        result = layers.rms_norm(there(states), there(weight), 1e-5, offset, rounds_first)
    wide = states.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert result.shape == shape and result.dtype is dtype
    assert_close(result, normed * (weight.double() + offset))


@pytest.mark.parametrize(("kind", "dtype"), KERNELS)
def test_rms_norm_of_what_is_no_number(kind: str, dtype: torch.dtype) -> None:
    states = torch.ones(4, 24, dtype=dtype)
    states[0] = 0
    states[1, 3] = torch.nan
    states[2, 5] = torch.inf
    with kernels(dtype, kind) as (layers, there):
        result = layers.rms_norm(there(states), there(torch.ones(24, dtype=dtype)), 1e-5, 0.0, True)
    assert (result[0] == 0).all() and result[1].isnan().all() and result[2, 5].isnan()
    assert_close(result[3], torch.ones(24) * (1 + 1e-5) ** -0.5)


@pytest.mark.parametrize(("kind", "dtype"), KERNELS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 7), (1, 5, 160), (1, 33, 1100)], ids=str)
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(approximate="tanh"), lambda x: x * torch.sigmoid(1.702 * x)])
@pytest.mark.parametrize("is_joined", [False, True])
def test_gate(
    kind: str, dtype: torch.dtype, shape: tuple[int, ...], activation: Callable[[Tensor], Tensor], is_joined: bool
) -> None:
    joined = (8 * torch.randn(*shape[:-1], 2 * shape[-1])).to(dtype)
    coefficients = next(c for c in ACTIVATIONS if fused_layers.computes(activation, c))
    with kernels(dtype, kind) as (layers, there):
        parts = there(joined).chunk(2, dim=-1)
        result = layers.gate(*(parts if is_joined else (part.contiguous() for part in parts)), *coefficients)
    assert result.is_contiguous()
    gate, up = joined.double().chunk(2, dim=-1)
    # float16 has no number for exp(-20)
    torch.testing.assert_close(
        result.cpu().double(), activation(gate) * up, rtol={F32: 1e-5, BF16: 2.0**-7, F16: 2.0**-9}[dtype], atol=1e-6
    )


@pytest.mark.parametrize("kind", ["c", "triton", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
def test_gate_at_the_ends(kind: str) -> None:
    gate = torch.tensor([[0.0, -0.0, 100.0, -100.0, 1e30, -1e30, torch.inf, torch.nan, 20.0, -20.0]])
    up = torch.full_like(gate, 2.0)
    with kernels(F32, kind) as (layers, there):
        result = layers.gate(there(gate), there(up), 1.0, 0.0)
    assert_close(result, nn.functional.silu(gate) * up)


@pytest.mark.parametrize(("kind", "dtype"), KERNELS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [24, 8, 2])
@pytest.mark.parametrize("tokens", [1, 7])
def test_rotary(kind: str, dtype: torch.dtype, interleaved: bool, rotary_dim: int, tokens: int) -> None:
    query = torch.randn(1, tokens, 7, 24).to(dtype).transpose(1, 2)  # strided as a layer hands them over
    key = torch.randn(1, 2, tokens, 24).to(dtype)
    cos, sin = torch.randn(1, tokens, rotary_dim).to(dtype), torch.randn(1, tokens, rotary_dim).to(dtype)
    with kernels(dtype, kind) as (layers, there):
        results = layers.rotary(there(query), there(key), there(cos), there(sin), interleaved, False)
    for result, states in zip(results, (query, key), strict=True):
        wide, rest = states.double()[..., :rotary_dim], states.double()[..., rotary_dim:]
        if interleaved:
            turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), dim=-1).flatten(-2)
        else:
            turned = torch.cat((-wide[..., rotary_dim // 2 :], wide[..., : rotary_dim // 2]), dim=-1)
        truth = torch.cat((wide * cos.double() + turned * sin.double(), rest), dim=-1)
        relative = {F32: 1e-5, BF16: 2.0**-7, F16: 2.0**-9}[dtype]
        torch.testing.assert_close(result.cpu().double(), truth, rtol=relative, atol=1e-6)
        assert result.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("kind", "dtype"), KERNELS)
def test_rotary_as_the_library_rounds(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, product by product: that is how the trial tells which of the ways a model has."""
    query, key = torch.randn(1, 7, 5, 32).to(dtype), torch.randn(1, 2, 5, 32).to(dtype)
    cos, sin = torch.randn(1, 5, 32).to(dtype), torch.randn(1, 5, 32).to(dtype)
    with kernels(dtype, kind) as (layers, there):
        given = [there(each) for each in (query, key, cos, sin)]
        results = layers.rotary(*given, False, True)
        expected = modeling_llama.apply_rotary_pos_emb(*given)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize(("kind", "dtype"), TRITON)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (1, 5, 80), (1, 40, 768), (0, 8)], ids=str)
@pytest.mark.parametrize(("offset", "rounds_first"), fused_layers.NORMS)
def test_add_norm(kind: str, dtype: torch.dtype, shape: tuple[int, ...], offset: float, rounds_first: bool) -> None:
    """Bit for bit what two operations give."""
    with kernels(dtype, kind) as (layers, there):
        first, second = (there(torch.randn(shape).to(dtype)) for _ in range(2))
        weight = there(torch.randn(shape[-1]).to(dtype))
        total, normed = layers.add_norm(first, second, NormWeight(weight, 1e-5, offset, rounds_first))
        expected = layers.rms_norm(first + second, weight, 1e-5, offset, rounds_first)
        with pytest.raises(InputError, match="add_norm takes"):
            layers.add_norm(first, second[..., :-1], NormWeight(weight, 1e-5, offset, rounds_first))
    assert torch.equal(total, first + second) and torch.equal(normed, expected)


def heads_of(dtype: torch.dtype, counts: tuple[int, int], dim: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as parts of one product."""
    heads, keys = counts
    product = torch.randn(tokens, (heads + 2 * keys) * dim).to(dtype)
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in product.split([heads * dim, *[keys * dim] * 2], -1))
    return query, key, value


def pool_of(dtype: torch.dtype, heads: int, dim: int) -> Tensor:
    """Two layers of four blocks of five tokens, with other numbers between the blocks."""
    return torch.zeros(4, 3, 2, heads, 5, dim).to(dtype)[:, :2]


ODD_SIZES = [((7, 1), 24, 24), ((4, 2), 80, 80), ((6, 3), 40, 8), ((1, 1), 2, 2)]  # heads, their dim, rotated


@pytest.mark.parametrize(("kind", "dtype"), TRITON)
@pytest.mark.parametrize(("counts", "dim", "rotary_dim"), ODD_SIZES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pool_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rotary_write(
    kind: str,
    dtype: torch.dtype,
    counts: tuple[int, int],
    dim: int,
    rotary_dim: int,
    interleaved: bool,
    pool_dtype: torch.dtype | None,
) -> None:
    """Bit for bit what rotating and then writing gives, padding skipped, and nothing else is written."""
    slots = torch.tensor([19, 3, -1, 0, 12])
    pools = [pool_of(pool_dtype or dtype, counts[1], dim) for _ in range(2)]
    with kernels(dtype, kind) as (layers, there):
        heads = tuple(map(there, heads_of(dtype, counts, dim, len(slots))))
        angles = tuple(there(torch.randn(1, len(slots), rotary_dim).to(dtype)) for _ in range(2))
        own = there(pools[0])
        found = layers.rotary_write(heads, angles, (interleaved, True), None, Place(own, 1, there(slots)))
        turned = (each.transpose(0, 1)[None] for each in heads[:2])
        query, key = (each[0].transpose(0, 1).cpu() for each in layers.rotary(*turned, *angles, interleaved, True))
        with pytest.raises(InputError, match="rotary_write takes"):
            layers.rotary_write(heads, angles, (interleaved, True), None, Place(own, 2, there(slots)))
    reference.reshape_and_cache(key, heads[2].cpu(), pools[1], 1, slots)
    assert torch.equal(found.cpu(), query) and found.is_contiguous()
    assert same_bits(own.cpu(), pools[1])


@pytest.mark.parametrize(("kind", "dtype"), TRITON)
@pytest.mark.parametrize(("counts", "dim", "rotary_dim"), [own for own in ODD_SIZES if own[1] == own[2]])
@pytest.mark.parametrize(("offset", "rounds_first"), fused_layers.NORMS)
def test_rotary_write_of_normed_heads(
    kind: str,
    dtype: torch.dtype,
    counts: tuple[int, int],
    dim: int,
    rotary_dim: int,
    offset: float,
    rounds_first: bool,
) -> None:
    slots, pool = torch.tensor([7, 2, 11]), pool_of(dtype, counts[1], dim)
    with kernels(dtype, kind) as (layers, there):
        query, key, value = map(there, heads_of(dtype, counts, dim, len(slots)))
        cos, sin = (there(torch.randn(1, len(slots), rotary_dim).to(dtype)) for _ in range(2))
        one, other = (NormWeight(there(torch.randn(dim).to(dtype)), eps, offset, rounds_first) for eps in (1e-5, 1e-2))
        place = Place(there(pool), 0, there(slots))
        found = layers.rotary_write((query, key, value), (cos, sin), (False, False), (one, other), place)
        normed = [
            layers.rms_norm(each.contiguous(), norm.weight, norm.eps, offset, rounds_first).transpose(0, 1)[None]
            for each, norm in ((query, one), (key, other))
        ]
        expected = [each[0].transpose(0, 1).cpu().double() for each in layers.rotary(*normed, cos, sin, False, False)]
        unlike = NormWeight(other.weight, 1e-5, offset + 1, rounds_first)
        with pytest.raises(InputError, match="norms of one kind"):
            layers.rotary_write((query, key, value), (cos, sin), (False, False), (one, unlike), place)
    blocks = place.kv_cache.cpu()[slots // 5, 0, :, :, slots % 5]
    tolerance = {
        "rtol": {F32: 1e-5, BF16: 2.0**-6, F16: 2.0**-8}[dtype],
        "atol": {F32: 1e-5, BF16: 0.1, F16: 0.01}[dtype],
    }
    torch.testing.assert_close(found.cpu().double(), expected[0], **tolerance)
    torch.testing.assert_close(blocks[:, 0].double(), expected[1], **tolerance)
    assert torch.equal(blocks[:, 1], value.cpu())


@pytest.mark.parametrize(("kind", "dtype"), [("triton", F32), ("triton", BF16)])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "phi3"])
def test_triton_rounds_where_the_models_do(kind: str, dtype: torch.dtype, name: str) -> None:
    """What is found on CPU with the kernels in C is found with Triton's, too."""
    model = build(name).to(dtype)
    expected = [(type(call), call.module) for call in found_in(model, dtype)]
    with kernels(dtype, kind) as (layers, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged.model.layers.layer_kernels", lambda dtype, device: layers)
        assert [(type(call), call.module) for call in found_in(model, dtype)] == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    states, weight = torch.randn(96, 512).to(dtype), torch.randn(512).to(dtype)
    heads = states.view(1, 96, 8, 64).transpose(1, 2)
    cos, sin = states[None, :, :64].contiguous(), states[None, :, 64:128].contiguous()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with kernels(dtype) as (layers, _):
                norm, gate = layers.rms_norm(states, weight, 1e-5, 0.0, True), layers.gate(states, states, 1.0, 0.0)
                results.append((norm, gate, *layers.rotary(heads, heads, cos, sin, False, True)))
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


# What is found

FUSED = (Norm, GatedMLP, RotaryAttention)


def found_in(model: nn.Module, dtype: torch.dtype = F32) -> list[ModuleOverride]:
    return [one for one in layers._survey(model, (dtype, CPU), False).found.values() if isinstance(one, FUSED)]


def kinds(model: nn.Module, dtype: torch.dtype = F32) -> dict[type, set[str]]:
    """The names of the classes that each kind of call stands in for."""
    found: dict[type, set[str]] = {Norm: set(), GatedMLP: set(), RotaryAttention: set()}
    for call in found_in(model, dtype):
        found[type(call)].add(type(call.module).__name__)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, dtype: torch.dtype) -> None:
    """All norms without a mean, all gated MLPs and all rotary embeddings of every tested model, and nothing else."""
    model = build(name).to(dtype)
    calls = found_in(model, dtype)
    found = {call.module for call in calls}
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            has_scale = getattr(module, "with_scale", True) and any(True for _ in module.parameters())
            assert (module in found) == has_scale, kind
        elif kind.endswith("MLP"):
            is_gated = (hasattr(module, "gate_proj") or hasattr(module, "gate_up_proj")) and name != "gpt_oss"
            is_gated &= not getattr(module, "activation_sparsity", 0)
            assert (module in found) == is_gated, kind
        elif kind.endswith("Attention"):
            is_rotary = "apply_rotary_pos_emb" in type(module).forward.__code__.co_names
            assert (module in found) == (is_rotary and name not in OTHER_ROTARIES), kind
        else:
            assert module not in found, kind


class _Clamped(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.05) * self.up_proj(x))


class _Bounded(LlamaMLP):
    """As DeepSeek V4 and GLM 5 do it: nothing that a normal input reaches."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x).clamp(-7.0, 7.0))


class _Scaled(LlamaMLP):
    """As Inkling does it, by a factor that is 1 before training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class _Multiplied(LlamaMLP):
    multiplier = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.multiplier


class _Centred(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class _Reversed(Phi3MLP):
    def forward(self, hidden_states: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


def pass_for_library_code(monkeypatch: pytest.MonkeyPatch, *classes: type) -> None:
    for kind in classes:
        monkeypatch.setattr(kind, "__module__", "transformers.models")
        monkeypatch.setattr(kind, "forward", as_library_code(kind.forward))


@pytest.mark.parametrize("kind", [_Clamped, _Bounded, _Scaled, _Centred, _Reversed])
def test_what_only_looks_alike(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of a known name, with the layers of a known one, that computes something else."""
    pass_for_library_code(monkeypatch, kind)
    model = build("phi3" if kind is _Reversed else "llama")
    original = kind.__mro__[1]
    for module in model.modules():
        if type(module) is original:
            module.__class__ = kind
            if kind is _Scaled:
                module.factor = nn.Parameter(torch.ones(1))
    assert not any(isinstance(call.module, kind) for call in found_in(model))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.Tanh(), nn.Identity(), torch.exp, lambda x: None])
def test_other_activations(activation: Any) -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = activation if isinstance(activation, nn.Module) else None
        if not isinstance(activation, nn.Module):
            vars(layer.mlp)["act_fn"] = activation
    assert not kinds(model)[GatedMLP]


def test_a_users_modules_are_never_tried() -> None:
    """Calling them might do anything."""
    tried = []

    class Norm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            tried.append(self)
            return super().forward(hidden_states)

    model = build("llama")
    model.model.norm.__class__ = Norm
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj, Norm(32))
    found = {call.module for call in found_in(model)}
    assert not tried and model.model.norm not in found and model.model.layers[0].mlp not in found
    assert model.model.layers[1].mlp in found


# In a model


def fused(model: Any) -> list[Any]:
    calls = [call for call in model.paged.core.layers.found if isinstance(call, FUSED)]
    assert calls, "nothing is fused"
    return calls


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels in C that are called, one after another; decoder layers, which call them from C, are not taken."""
    monkeypatch.setattr(layers, "KINDS", [find for find in KINDS if find is not find_decoder_layer])
    names: list[str] = []
    for name in ("rms_norm", "gate", "rotary"):
        original = getattr(cpu_layers.CPULayers, name)

        def noted(self: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            names.append(name)
            return original(self, *args)

        monkeypatch.setattr(cpu_layers.CPULayers, name, noted)
    return names


def test_it_is_used_in_the_engines_forwards_only(used: list[str]) -> None:
    stock, model = build("llama"), hf_paged.patch(build("llama"), num_blocks=64)
    expected = stock.generate(IDS, **GREEDY)
    used.clear()
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    layers = len(model.model.layers)
    # the first forward also tries them out
    assert used[-(4 * layers + 1) :].count("rms_norm") == 2 * layers + 1
    assert used.count("gate") >= 6 * layers and used.count("rotary") >= 6 * layers
    used.clear()
    model(IDS, labels=IDS).loss.backward()  # training
    with torch.no_grad():
        model(IDS)  # scoring
    assert not used
    with torch.autocast("cpu", dtype=BF16):
        model.generate(IDS, **GREEDY)
    assert not used
    for module in model.modules():
        assert "_compiled_call_impl" not in vars(module) and "forward" not in vars(module)


def test_under_autocast_inside_of_what_is_not(used: list[str]) -> None:
    """A hook's own step under autocast, inside one without: the kernels would read half as many bytes as twice."""
    model = hf_paged.patch(build("llama"), num_blocks=64)
    model.generate(IDS, **GREEDY)
    used.clear()
    engine, layer = model.paged, model.model.layers[0]
    states = torch.randn(1, 3, model.config.hidden_size)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=BF16):
            expected = layer.mlp(layer.input_layernorm(states))
        with engine.core.layers.scope():
            with torch.autocast("cpu", dtype=BF16), engine.core.layers.scope():
                found = layer.mlp(layer.input_layernorm(states))
                with torch.autocast("cpu", enabled=False), engine.core.layers.scope():
                    layer.mlp(layer.input_layernorm(states))
            assert not used
            layer.mlp(layer.input_layernorm(states))
            assert used == ["rms_norm", "gate"]
    assert found.dtype == expected.dtype == BF16 and torch.equal(found, expected)


def add_one(module: Any, args: Any, output: Any) -> Any:
    return output + 1.0


@pytest.mark.parametrize("path", ["model.norm", "model.layers.1.mlp.act_fn", "model.layers.0.mlp"])
def test_hooks_are_obeyed(path: str) -> None:
    """Registered when the layers are fused already, and taken away again."""
    stock, model = build("llama"), hf_paged.patch(build("llama"), num_blocks=64)
    plain = model.generate(IDS, **GREEDY)
    for one in (stock, model):
        one.hook = one.get_submodule(path).register_forward_hook(add_one)
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
    for one in (stock, model):
        one.hook.remove()
    assert torch.equal(model.generate(IDS, **GREEDY), plain)
    assert fused(model)


def test_a_number_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_for_library_code(monkeypatch, _Multiplied)
    stock, model = build("llama"), build("llama")
    for one in (stock, model):
        for layer in one.model.layers:
            layer.mlp.__class__, layer.mlp.multiplier = _Multiplied, 1.0
    hf_paged.patch(model, num_blocks=64)
    for multiplier in (1.0, -3.0):
        for one in (stock, model):
            one.model.layers[0].mlp.multiplier = multiplier
        assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
        assert any(isinstance(call.module, _Multiplied) for call in fused(model))


def test_a_class_that_is_patched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = build("llama"), hf_paged.patch(build("llama"), num_blocks=64)
    model.generate(IDS, **GREEDY)
    original = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, states: 1.5 * original(self, states).flip(-1))
    model.paged.reset_prefix_cache()
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))


def test_what_attention_looks_up_is_the_modules_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are those of the module's file when the step began."""
    model = hf_paged.patch(build("llama"), num_blocks=64)
    expected = model.generate(IDS, **GREEDY)
    assert any(isinstance(call, RotaryAttention) for call in fused(model))
    asked: list[str] = []

    class Functions:
        def get_interface(self, *args: Any) -> Any:
            asked.append(args[0])
            return original.get_interface(*args)

    original = modeling_llama.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Functions())
    model.paged.reset_prefix_cache()
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    assert asked


@pytest.mark.parametrize(
    "arguments",
    [{"unsqueeze_dim": 2}, {"batch": 2}, {"dtype": torch.float64}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_rotary_calls_of_another_kind(arguments: dict[str, Any]) -> None:
    """They go to the function itself."""
    own = modeling_llama.apply_rotary_pos_emb
    rotary = fused_rotary._Rotary(vars(modeling_llama), cpu_layers.load(F32), False, True, takes_part=False)
    batch, dtype = arguments.pop("batch", 1), arguments.pop("dtype", F32)
    shape = (batch, 5, 3, 16) if arguments else (batch, 3, 5, 16)
    q, k = torch.randn(shape), torch.randn(shape)
    cos, sin = torch.randn(batch, 5, 16, dtype=dtype), torch.randn(batch, 5, 16, dtype=dtype)
    for result, expected in zip(rotary(q, k, cos, sin, **arguments), own(q, k, cos, sin, **arguments), strict=True):
        assert torch.equal(result, expected)


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "layer_kernels", lambda dtype, device: "can't be compiled here")
    model = hf_paged.patch(build("llama"), num_blocks=64)
    assert torch.equal(model.generate(IDS, **GREEDY), build("llama").generate(IDS, **GREEDY))
    assert not any(isinstance(call, FUSED) for call in model.paged.core.layers.found)


def test_a_model_that_is_gone() -> None:
    own = Layers(build("llama"))
    with torch.no_grad(), own.scope():
        assert own.found == []


def test_nothing_is_made_in_inference_mode() -> None:
    model: LlamaForCausalLM = build("llama")
    with torch.inference_mode():
        calls = found_in(model)
    assert calls and torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_compiled_layer() -> None:
    """Would break: what torch.compile made of a function's code, looked for among another function's names."""
    torch.compiler.reset()
    stock, model = build("llama"), hf_paged.patch(build("llama"), num_blocks=64)
    for own in (stock, model):
        own.model.layers[1].compile(backend="eager")
    for seed in range(3):
        ids = random_ids(2, 9, seed=seed)
        expected = stock.generate(ids, **GREEDY)
        assert torch.equal(model.generate(ids, **GREEDY), expected)
