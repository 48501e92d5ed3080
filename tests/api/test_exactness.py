"""What `is_supported` says of exact rows, and `check_exact`, which tries it on the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

import hf_paged
from helpers.models import build, decoder_layers
from helpers.state_models import build_state_model
from hf_paged.api import exactness, support
from hf_paged.api.support import is_architecture_supported
from hf_paged.kernels import cpu, cpu_layers, cpu_linear
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.testing import ExactnessReport, check_exact
from hf_paged.testing import exactness as checker

PROMPTS = [[5, 6, 7], list(range(3, 43))]
BITS = "a row's logits are other bits"

# Of each kind of layer one: windows, experts, norms of heads, softcaps, sinks, GELU and LayerNorm, no weights in norms.
EXACT: dict[str, Callable[[str], Any]] = dict.fromkeys(
    ("mistral", "gemma2", "gemma4", "qwen3", "gpt2", "opt", "starcoder2", "mixtral", "qwen3_moe", "gpt_oss"), build
) | dict.fromkeys(("qwen3_next", "olmo_hybrid", "granitemoehybrid", "lfm2", "jamba", "mamba2"), build_state_model)


class OwnMLP(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states


def with_own_mlp(model: Any) -> None:
    decoder_layers(model)[0].mlp = OwnMLP()


def with_own_forward(model: Any) -> None:
    layer = decoder_layers(model)[1]
    layer.mlp.forward = lambda states: states


def quantize(model: Any) -> None:
    decoder_layers(model)[0].mlp.up_proj = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(64, 96)), {nn.Linear}
    )[0]


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (lambda model: model.lm_head.register_forward_hook(lambda *_: None), "hooks look at some modules.*lm_head"),
    "module": (with_own_mlp, r"not of torch or transformers.*test_exactness\.OwnMLP"),
    "forward": (with_own_forward, "not of torch or transformers.*LlamaMLP"),
    "compiled": (lambda model: model.lm_head.compile(), "or are compiled or wrapped.*Linear"),
    "quantized": (quantize, r"not of torch or transformers.*torch\.ao\."),
    "two types": (lambda model: model.lm_head.to(torch.float64), r"not in torch.float32.*lm_head.weight"),
    "half": (lambda model: model.half(), "takes torch.float32 and torch.bfloat16, the weight is in torch.float16"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_reasons_of_one_model(change: str) -> None:
    """Would break: a model that runs other code, said to be exact because its architecture is."""
    model = build("llama")
    make, reason = CHANGES[change]
    make(model)
    report = hf_paged.is_supported(model)
    assert report and not report.exact
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError("\n".join(report.why_not_exact))
    assert not any(reason in each for each in hf_paged.is_supported(build("llama")).why_not_exact)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "its forwards don't run packed"),
        ("llama_dynamic_rope", "its rotary embedding depends on the longest row"),
        ("deepseek_v3", "a prompt's keys are made of its latents"),
        ("deepseek_v32", "chosen by an indexer"),
        ("mimo_v2_flash", "its keys and values differ in width"),
    ],
)
def test_reasons_of_an_architecture(name: str, reason: str) -> None:
    report = hf_paged.is_supported(build(name))
    assert not report.exact and any(reason in each for each in report.why_not_exact), report.why_not_exact


@pytest.mark.parametrize("name", EXACT)
def test_exact_families(name: str) -> None:
    """Would break: a formula of a prompt's tokens and another one of generated ones, a sum of torch's over rows."""
    assert hf_paged.is_supported(EXACT[name](name)).why_not_exact == ()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_certificates(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    cpu_linear.load.cache_clear()  # other tests have asked with it
    try:
        report = check(EXACT[name](name).to(dtype))
    finally:
        cpu_linear.load.cache_clear()
    assert report, str(report)


def test_reasons_of_states_and_towers() -> None:
    states = hf_paged.is_supported(build_state_model("nemotron_h")).why_not_exact
    assert any("limits the time steps of a prompt's tokens" in reason for reason in states)
    base, config = hf.Qwen2VLForConditionalGeneration, hf.Qwen2VLConfig()
    assert any("its towers for pictures" in reason for reason in is_architecture_supported(base, config).why_not_exact)


def test_reasons_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a promise that rests on kernels which are not there."""
    model = build("llama")
    traits = hf_paged.is_supported(model).traits
    assert traits is not None
    (reason,) = exactness._of_steps(traits, torch.float32, torch.device("cuda"))
    assert "fixed order of sums" in reason
    with torch.autocast("cpu", torch.bfloat16):
        assert any("autocast" in reason for reason in hf_paged.is_supported(model).why_not_exact)
    for module in (cpu, cpu_layers, cpu_linear):
        with monkeypatch.context() as patch:
            patch.setattr(module, "load", lambda *_: "can't be compiled here (no compiler)")
            report = hf_paged.is_supported(model)
        assert report and any("which can't be compiled here" in reason for reason in report.why_not_exact)


def test_sums_over_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (2, 3):
        monkeypatch.setattr(exactness, "ranks_of", lambda _: list(range(size)))  # noqa: B023
        (reason,) = exactness._of_modules(build("llama"), torch.float32)
        assert f"split between {size} processes" in reason and ("more than two numbers" in reason) == (size > 2)


@pytest.mark.parametrize(
    ("function", "unknown"),
    [
        (functional.silu, {"silu"}),
        (functional.gelu, {"gelu"}),
        (lambda x: functional.gelu(x, approximate="tanh"), {"gelu"}),
        (lambda x: x.pow(2).mean(dim=-1, keepdim=True).rsqrt() * x, set()),
        (lambda x: x.bfloat16().rsqrt(), {"rsqrt"}),
        (lambda x: x.abs().pow(1.5), {"pow"}),
        (lambda x: x.pow(x), {"pow"}),
        (lambda x: x.add(x, alpha=2), set()),
        (lambda x: x.bfloat16().add(x.bfloat16(), alpha=2), {"add"}),
        (lambda x: torch.rsub(x.bfloat16(), 1, alpha=2), {"rsub"}),
        (lambda x: functional.linear(x, x), {"mm"}),
        (lambda x: x[None, :, :1] @ x[None, :1], set()),
        (lambda x: functional.layer_norm(x, (4,)).softmax(dim=-1).topk(2).values, set()),
        (lambda x: x.repeat(1, 9000).sum(dim=-1), {"sum"}),
        (lambda x: x.softmax(dim=0), {"softmax"}),
        (lambda x: x.mean(dim=0), {"mean"}),
        (lambda x: x.t().norm(dim=-1), {"linalg_vector_norm"}),
        (lambda x: x.repeat(1, 8).view(3, 1, 32).sum(dim=(0, 1)), set()),
        (lambda x: torch.zeros(3, 4).index_put((torch.tensor([0, 0, 1]),), x, accumulate=True), {"index_put"}),
    ],
)
def test_operations(function: Callable[[Tensor], Tensor], unknown: set[str]) -> None:
    """Would break: an operation of torch's that rounds by place, or sums in its own order, taken for exact."""
    operations = exactness._Operations()
    with torch.inference_mode(), operations:
        function(torch.arange(1.0, 13.0).view(3, 4))
    assert operations.unknown == unknown


def test_the_trial_names_operations() -> None:
    config = build("llama").config
    config.hidden_act = "mish"
    report = hf_paged.is_supported(hf.LlamaForCausalLM(config))
    assert any(reason.startswith("aten.mish: ") for reason in report.why_not_exact), report.why_not_exact


def test_the_trial_compares_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: rows that depend on each other in code that torch's operations don't show."""
    depend_on_neighbours(monkeypatch)
    assert any(reason.startswith(BITS) for reason in hf_paged.is_supported(build("llama")).why_not_exact)


def test_never_raises_and_patch_does_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(exactness, "_of_modules", fail)
        report = hf_paged.is_supported(build("llama"))
    assert report and not report.exact and "raised RuntimeError: no" in report.why_not_exact[0]
    assert not hf_paged.is_supported(3).exact
    monkeypatch.setattr(support, "why_not_exact", fail)
    assert hf_paged.patch(build("llama")).paged


def depend_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks a kernel: each row of its result has something of all rows."""
    multiply_all = CPULinear.multiply_all

    def broken(self: CPULinear, states: Tensor, weights: Any) -> list[Tensor]:
        return [result * (1 + 1e-6 * states.sum()) for result in multiply_all(self, states, weights)]

    monkeypatch.setattr(CPULinear, "multiply_all", broken)


def check(model: Any, **settings: Any) -> ExactnessReport:
    return check_exact(model, PROMPTS, max_new_tokens=9, progress=False, block_size=4, **settings)


def test_check_exact() -> None:
    """Would break: a check that says other than the report, a case that exercises nothing, a model left patched."""
    model = build("llama")
    kind, num_threads = type(model), torch.get_num_threads()
    report = check(model)
    assert type(model) is kind and torch.get_num_threads() == num_threads
    assert bool(report) == hf_paged.is_supported(model).exact
    found = {case.name: case for case in report.cases}
    assert len(found) == len(report.cases) == 18
    assert all(case.num_compared >= 2 and case.difference < 1e-5 for case in report.cases), str(report)
    assert found["alone again"].num_equal == 2
    for name, what in {
        "preemption: recompute": "preemptions",
        "preemption: swap": "swapped out",
        "from the prefix cache": "tokens found",
        "beside nine of the same prefix": "tokens found",
        "drafts of prompt lookup": "drafts",
    }.items():
        assert what in found[name].exercised and " 0 preemptions" not in found[name].exercised
    assert found["samples"].num_compared == 6 and found["beams"].num_compared == 8
    lines = str(report).splitlines()
    assert len(lines) == 19 and lines[0].startswith("case") and lines[1].startswith("alone again")


def test_check_exact_of_rows_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a check that can't fail."""
    depend_on_neighbours(monkeypatch)
    report = check(build("llama"))
    assert not report
    assert any(case.difference > 2e-5 for case in report.cases), str(report)


def test_check_exact_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.testing.exactness._CASES", hf_paged.testing.exactness._CASES[12:14])
    report = check(build("bloom"))
    assert [case.num_compared > 0 for case in report.cases] == [False, True]
    assert "left out" in str(report) and "it takes no drafts" in str(report)


def test_check_exact_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    for prompts in ([], [[]], [[3], []]):
        with pytest.raises(ValueError, match="prompts of one token or more"):
            check_exact(model, prompts)
    with pytest.raises(ValueError, match="no_such"):
        check(model, no_such=1)
    with pytest.raises(ValueError, match="unpatch it first"):
        check(hf_paged.patch(copy.deepcopy(model)))
    monkeypatch.setattr("hf_paged.testing.exactness._Check.run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check(model)
    assert not hasattr(model, "paged")


def test_models_that_take_no_drafts() -> None:
    """Would break: no certificate for models with states, whose `generate()` refuses drafts."""
    check = checker._Check(build_state_model("mamba2"), PROMPTS, 2, {})
    (case,) = (case for case in checker._CASES if case.own)
    assert check.run(case).num_compared == 0
