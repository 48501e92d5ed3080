"""Mixers that run once a step, for rows of any lengths, over states in the pool's pages."""

from __future__ import annotations

import copy
import inspect
import sys
from contextlib import nullcontext
from typing import Any

import pretend_cuda
import pytest
import torch

import hf_paged
from helpers.models import random_ids
from helpers.state_models import STATE_MODELS, build_state_model
from hf_paged.memory.spec import StateSpec
from hf_paged.model import mixers
from hf_paged.model.cuda_graph import StepGraphs
from hf_paged.model.mixers import StateStep
from hf_paged.model.scans import SCANS, PackedScans, find_packed_scans
from hf_paged.model.step_inputs import HostStep, Shape

LEFT = ["zaya", "zamba"]  # convolutions over groups of channels; a scan a head, of a state that it is cut from
SETTINGS = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 12}
LENS = [1, 1, 7, 5]


def mixer_and_spec(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, StateSpec]:
    """The first module of a family that computes a state with one of the functions; on the device."""
    model = hf_paged.patch(build_state_model(name).to("cuda", dtype), **SETTINGS)
    for module in model.modules():
        if SCANS.keys() & inspect.unwrap(type(module).forward).__code__.co_names:
            return module, model.paged.core.traits.states[module.layer_idx]
    raise LookupError(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in STATE_MODELS if name not in LEFT])
def test_families(name: str, dtype: torch.dtype) -> None:
    assert isinstance(find_packed_scans(*mixer_and_spec(name, dtype), 4096), PackedScans)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "bamba", "mamba"])
def test_one_that_computes_something_else(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Would break: a function that is taken for what it is called."""
    mixer, spec = mixer_and_spec(name)
    file = sys.modules[type(mixer).__module__]
    for function in SCANS.keys() & vars(file).keys() & set(inspect.unwrap(type(mixer).forward).__code__.co_names):
        with monkeypatch.context() as patch:
            own = getattr(file, function)

            def changed(*args: Any, own: Any = own, **kwargs: Any) -> Any:
                result = own(*args, **kwargs)
                return (result[0] * 1.1, *result[1:]) if isinstance(result, tuple) else result * 1.1

            patch.setattr(file, function, changed)
            assert "doesn't match" in find_packed_scans(mixer, spec, 4096), function


@pytest.mark.parametrize("name", ["zamba", "mamba2"])
def test_explained(name: str) -> None:
    model = hf_paged.patch(build_state_model(name).to("cuda"), **SETTINGS)
    model.paged.generate(prompts(), max_new_tokens=2, do_sample=False)
    said = [detour.why for detour in model.paged.explain() if "one length after the other" in detour.why]
    assert [why.split()[0] for why in said] == (["ZambaMambaMixer"] if name == "zamba" else [])


def prompts() -> list[list[int]]:
    return [random_ids(1, length, seed=length)[0].tolist() for length in LENS]


def expected(stock: Any) -> list[list[int]]:
    return [
        stock.generate(torch.tensor([ids], device="cuda"), max_new_tokens=5, eos_token_id=None, do_sample=False)[
            0, len(ids) :
        ].tolist()
        for ids in prompts()
    ]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen3_next", "recorded"),
        ("mamba", "eager"),
        ("mamba2", "pages"),
        ("lfm2", "hooked"),
        ("mamba2", "autocast"),
        ("mamba2", "long prompts"),
    ],
)
def test_steps_of_any_rows(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths, cut by the steps, beside rows that decode: stock's tokens, one call a mixer and step.

    Where others' kernels take long prompts, where hooks look on, and under autocast, mixers run part by part.
    """
    stock = build_state_model(name).to("cuda")
    stock.set_experts_implementation("batched_mm")  # in float32 the other one waits in every step
    wanted = expected(stock)
    settings = SETTINGS | ({"cuda_graphs": False} if how != "recorded" else {"enable_prefix_caching": False})
    settings |= {"block_size": 1, "num_blocks": 240} if how == "pages" else {}  # a layer's state is in several
    model = hf_paged.patch(copy.deepcopy(stock), **settings)
    if how == "long prompts":
        monkeypatch.setattr(mixers, "has_chunked_kernels", lambda package: package == "mamba_ssm")
        monkeypatch.setattr(mixers, "MOST_SCANNED", 4)
    if how == "hooked":
        for module in model.modules():
            if type(module) in model.paged.core.traits.mixers:
                module.register_forward_hook(hf_paged.packed_hook(lambda *_: None))
    calls = {"packed": 0, "part": 0}
    packed, part = PackedScans.run, StateStep._run_part

    def counted(kind: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[kind] += 1
            return function(*args, **kwargs)

        return run

    prepared: set[tuple[bool, bool]] = set()
    prepare = StepGraphs._prepare

    def noted(self: StepGraphs, shape: Shape, step: HostStep, again: Any) -> Any:
        prepared.add((shape.is_decode, step.is_decode))
        return prepare(self, shape, step, again)

    monkeypatch.setattr(StepGraphs, "_prepare", noted)
    monkeypatch.setattr(PackedScans, "run", counted("packed", packed))
    monkeypatch.setattr(StateStep, "_run_part", counted("part", part))
    with torch.autocast("cuda", dtype=torch.float32) if how == "autocast" else nullcontext():
        found = model.paged.generate(prompts(), max_new_tokens=5, eos_token_id=None, do_sample=False)
    assert [output.token_ids for output in found] == wanted
    assert bool(calls["part"]) == (how in ("hooked", "autocast", "long prompts"))
    assert bool(calls["packed"]) == (how not in ("hooked", "autocast"))
    steps = model.paged.stats().num_steps
    if how == "recorded":
        for _ in range(2):  # mixed steps are recorded behind decode steps, each shape when it first comes
            before = model.paged.stats().num_steps
            model.paged.pause()  # so that the first step begins with rows of one token
            config = {"max_new_tokens": 5, "eos_token_id": None, "do_sample": False}
            requests = [model.paged.submit(ids, **config) for ids in prompts()]
            with pretend_cuda.watch() as seen:
                model.paged.resume()
                again = [request.result(100) for request in requests]
            assert [output.token_ids for output in again] == wanted
        assert len(seen.of("replay")) == model.paged.stats().num_steps - before
        assert {shape.is_decode for shape in model.paged.core.runner.graphs.held.shapes} == {True, False}
        assert prepared == {(True, True), (False, False)}, "a shape is checked with rows of its kind"
    elif how in ("eager", "pages"):
        own = [type(module) for module in model.modules() if type(module) in model.paged.core.traits.mixers]
        assert calls["packed"] == len(own) * steps + 3 * len(set(own)), "once a step, and in the steps of a trial"
    model.paged.check_invariants()


@pytest.mark.parametrize("hooked", [("mlp_sconv",), ("k_sconv", "attn_sconv")], ids="-".join)
def test_layers_of_both_kinds(hooked: tuple[str, ...]) -> None:
    """Would break: a mixer that runs part by part, and writes back what others of its layer had before."""
    stock = build_state_model("inkling").to("cuda")
    wanted = expected(stock)
    model = hf_paged.patch(copy.deepcopy(stock), **SETTINGS)
    for name, module in model.named_modules():
        if name.endswith(hooked):
            module.register_forward_hook(hf_paged.packed_hook(lambda *_: None))
    for _ in range(2):
        found = model.paged.generate(prompts(), max_new_tokens=5, eos_token_id=None, do_sample=False)
        assert [output.token_ids for output in found] == wanted
