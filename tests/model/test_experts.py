"""Experts of engine forwards on CPU, multiplied where their weights lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_paged
from helpers.library_code import as_library_code
from helpers.models import build, random_ids
from hf_paged.kernels import cpu_linear
from hf_paged.model.experts import Experts

pytestmark = [pytest.mark.skipif(isinstance(cpu_linear.load(torch.float32), str), reason="there is no kernel here")]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was computed by experts of ours, and by which."""
    noted: list[tuple[Any, ...]] = []
    compute = Experts.compute_rows

    def compute_rows(self: Experts, *args: Tensor) -> Tensor:
        result = compute(self, *args)
        noted.append((self, args, result))
        return result

    monkeypatch.setattr(Experts, "compute_rows", compute_rows)
    return noted


def patch(model: nn.Module) -> Any:
    return hf_paged.patch(model, num_blocks=64, block_size=4)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])  # gpt_oss: biases, transposed
def test_tokens(name: str, calls: list[tuple[Any, ...]]) -> None:
    stock, model, ids = build(name), patch(build(name)), random_ids(3, 7)
    assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))
    assert {args[0].shape[0] for _, args, _ in calls} >= {21, 3}, "steps of a prompt and of single tokens"


def test_a_row_is_the_same_bits_alone(calls: list[tuple[Any, ...]]) -> None:
    patch(build("qwen3_moe")).generate(random_ids(3, 7), **GREEDY)
    experts, args, result = next(call for call in calls if len(call[2]) == 21)
    with torch.no_grad():
        for row in range(21):
            alone = experts.compute_rows(*(arg[row : row + 1] for arg in args))
            assert torch.equal(alone, result[row : row + 1])


def test_a_weight_that_changes_between_calls(calls: list[tuple[Any, ...]]) -> None:
    stock, model, ids = build("mixtral"), patch(build("mixtral")), random_ids(2, 7)
    for step in range(2):
        calls.clear()
        assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY)) and calls
        for changed in (stock, model) if step == 0 else ():
            experts = changed.model.layers[0].mlp.experts
            experts.down_proj = nn.Parameter(experts.down_proj.detach().flip(0))


def test_experts_that_compute_something_else(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(build("mixtral").model.layers[0].mlp.experts)
    own = kind.forward

    def doubled(self: Any, *args: Any) -> Tensor:
        return own(self, *args) * 2

    monkeypatch.setattr(kind, "forward", as_library_code(doubled))
    stock, model, ids = build("mixtral"), patch(build("mixtral")), random_ids(2, 7)
    assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))
    assert not [found for found in model.paged.core.layers.found if isinstance(found, Experts)]
