"""Between attention and attention, a row's bits on CPU depend on that row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

import hf_paged
from helpers.models import MODELS, random_ids
from hf_paged.kernels import cpu_layers, cpu_linear
from hf_paged.kernels.cpu_layers import CPULayers
from hf_paged.model.exact_operations import Activation, ExactModule, ExactOperations
from hf_paged.model.fused_layers import ACTIVATIONS, agrees
from hf_paged.model.fused_rotary import RotaryAttention
from hf_paged.model.module_overrides import ModuleOverride

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
# Widths that leave something over of vectors.
ODD = {"intermediate_size": 104, "moe_intermediate_size": 40, "num_local_experts": 6, "n_routed_experts": 6}
# llama4's rotary embedding multiplies complex numbers, whose bits depend on their places: `is_supported` says so.
MORE: dict[str, dict[str, Any]] = {
    "hrm_text": {"head_dim": 18},
    "gemma3n": {"altup_num_inputs": 4},
    "llama4": {"no_rope_layers": [0, 0, 0, 0]},
}

pytestmark = [pytest.mark.skipif(isinstance(cpu_linear.load(F32), str), reason="there is no kernel here")]


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With it, bfloat16 is left to torch."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    cpu_linear.load.cache_clear()
    yield
    cpu_linear.load.cache_clear()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# Operations


@DTYPES
@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("coefficients", ACTIVATIONS)
def test_an_elements_place(
    dtype: torch.dtype, coefficients: tuple[float, float], multiplies: bool, two_threads: None
) -> None:
    kernels = cpu_layers.load(dtype)
    assert isinstance(kernels, CPULayers)
    states = (3 * torch.randn(40_001)).to(dtype)
    result = kernels.activate(states, *coefficients, multiplies)
    for place in (1, 15, 63):
        shifted = kernels.activate(torch.cat([states[:place], states]), *coefficients, multiplies)
        assert torch.equal(shifted[place:], result)
    some = torch.stack([states[:2], states[100:102]], dim=1)  # strided
    assert torch.equal(kernels.activate(some.t(), *coefficients, multiplies)[1], result[100:102])
    linear, cubic = coefficients
    wide = states.double()
    truth = torch.sigmoid(linear * wide + cubic * wide**3) * (wide if multiplies else 1)
    torch.testing.assert_close(result.double(), truth, rtol={F32: 1e-5, BF16: 2.0**-8}[dtype], atol=1e-6)


WEIGHT, STACK = (torch.randn(shape).to(BF16).float() for shape in ((37, 24), (5, 24, 37)))
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, WEIGHT.to(x.dtype), WEIGHT[:, 0].to(x.dtype)),
    "@": lambda x: x @ WEIGHT.to(x.dtype).t(),
    "matmul": lambda x: torch.matmul(x, WEIGHT.to(x.dtype).t()),
    "small": lambda x: x.unflatten(-1, (6, 4)) @ x[..., :12].unflatten(-1, (4, 3)),
    "bmm": lambda x: torch.bmm(x.expand(5, -1, -1), STACK.to(x.dtype)).transpose(0, 1),
    "sigmoid": torch.sigmoid,
    "method": lambda x: x.sigmoid(),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus,
}


@DTYPES
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation(name: str, dtype: torch.dtype, without_amx: None) -> None:
    states, run = (3 * torch.randn(41, 24)).to(dtype), OPERATIONS[name]
    with torch.no_grad(), ExactOperations():
        result = run(states)
        alone = torch.cat([run(row.clone()) for row in states.split(1)])
    assert torch.equal(alone, result)
    assert agrees(result, run(states.double()).to(dtype), {F32: 1e-6, BF16: 1e-2}[dtype], dim=-1)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: functional.softplus(x, beta=2.0),
        lambda x: torch.sigmoid(x, out=torch.empty_like(x)),
        lambda x: functional.silu(x.half()),
        lambda x: functional.silu(x.clone(), inplace=True),
        lambda x: functional.linear(x.double(), WEIGHT.double()),
        lambda x: x[:, :, None].expand(-1, -1, 40) @ x[:, None].expand(-1, 40, -1),
        lambda x: torch.matmul(x, x[0]),
        lambda x: torch.pow(10.0, x),
        lambda x: functional.gelu(x.double()),
        lambda x: torch.arange(2**30, 2**30 + 6).view(1, 2, 3) @ torch.arange(6).view(1, 3, 2),
    ],
)
def test_other_arguments(run: Callable[[Tensor], Tensor]) -> None:
    """They go to the operation itself."""
    states = torch.randn(4, 24)
    with torch.no_grad(), ExactOperations():
        result = run(states)
    assert torch.equal(result, run(states))


# Models


def odd(name: str, dtype: torch.dtype) -> Any:
    """A model of the table, with widths that leave something over."""
    config = MODELS[name].config()
    widths = {key: value for key, value in ODD.items() if isinstance(getattr(config, key, None), int)}
    for key, value in (widths | MORE.get(name, {})).items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=MODELS[name].attention).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.16)
    return model.to(dtype)


def logprobs(model: Any, prompts: list[list[int]]) -> list[Any]:
    """Of what each prompt is continued by, all in the same steps."""
    engine = model.paged
    engine.pause()
    requests = [engine.submit(p, max_new_tokens=4, do_sample=False, eos_token_id=None, logprobs=3) for p in prompts]
    engine.resume()
    return [request.result().logprobs for request in requests]


# Plain activations; norms of strided heads; gates, routers and experts of other kinds; latents; products by token.
NAMES = ("starcoder2", "gpt_neox", "gemma3", "gpt_oss", "llama4", "hrm_text", "gemma3n")


@DTYPES
@pytest.mark.parametrize("name", NAMES)
def test_a_row_beside_others(name: str, dtype: torch.dtype, without_amx: None, two_threads: None) -> None:
    model = hf_paged.patch(odd(name, dtype), num_blocks=256, block_size=4, enable_prefix_caching=False)
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (5, 40, 90, 3, 61, 33, 17)]
    together = logprobs(model, prompts)
    assert [logprobs(model, [prompt])[0] for prompt in prompts[:3]] == together[:3]


def found(model: Any, kind: type[ModuleOverride]) -> set[str]:
    hf_paged.patch(model, num_blocks=64, block_size=4).generate(random_ids(1, 3), max_new_tokens=1)
    return {type(one.module).__name__ for one in model.paged.core.layers.found if isinstance(one, kind)}


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("llama", ExactModule, set()),
        ("gpt_neox", ExactModule, {"GELUActivation"}),
        ("starcoder2", Activation, {"GELUTanh"}),
        ("deepseek_v3", ExactModule, {"DeepseekV3TopkRouter"}),
        ("gemma3n", ExactModule, {"Gemma3nTextDecoderLayer", "Gemma3nTextAltUp", "Gemma3nRMSNorm"}),
    ],
)
def test_what_is_found(name: str, kind: type[ModuleOverride], expected: set[str]) -> None:
    """No more modules than need it: each call of torch's takes longer there."""
    assert found(odd(name, F32), kind) == expected


def test_a_gate_behind_attention() -> None:
    model = odd("hrm_text", F32)
    assert found(model, RotaryAttention) == {"HrmTextAttention"}
    calls = [one for one in model.paged.core.layers.found if isinstance(one, RotaryAttention)]
    assert all(isinstance(call.operations, ExactOperations) for call in calls)


def test_hooks_see_the_module_as_it_is() -> None:
    stock, model = odd("deepseek_v3", F32), hf_paged.patch(odd("deepseek_v3", F32), num_blocks=64, block_size=4)
    ids, given = random_ids(2, 7), {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    for one in (stock, model):
        routers = [module for module in one.modules() if type(module).__name__ == "DeepseekV3TopkRouter"]
        assert routers
        for router in routers:
            router.register_forward_hook(lambda module, args, output: (output[0].flip(-1), *output[1:]))
    assert torch.equal(model.generate(ids, **given), stock.generate(ids, **given))


def test_activations_that_are_hooked_later() -> None:
    stock, model = odd("starcoder2", F32), hf_paged.patch(odd("starcoder2", F32), num_blocks=64, block_size=4)
    ids, given = random_ids(2, 7), {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    model.generate(ids, **given)
    for one in (stock, model):
        activation: nn.Module = one.model.layers[0].mlp.act
        activation.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(model.generate(ids, **given), stock.generate(ids, **given))
