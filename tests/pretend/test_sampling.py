"""Tokens of all kinds of requests in one kernel a step, as stock `generate()` draws them on the same device."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest import mock

import pretend_cuda
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from helpers.models import build, random_ids
from hf_paged.engine import executor
from hf_paged.engine.lone_rows import LoneRows

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5, "temperature": 0.7},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "both": {"top_p": 0.9, "top_k": 20, "temperature": 1.4},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "penalty": {"repetition_penalty": 1.3, "top_k": 10},
    "greedy": {"do_sample": False},
    "greedy_penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "not_known": {"typical_p": 0.9, "top_k": 0},
}
# Views and memory; copies, which are events; and how Triton's interpreter is given the tensors.
FREE = (
    *("aten::view", "aten::empty", "aten::new_empty", "aten::detach", "aten::slice", "aten::alias", "aten::pin_memory"),
    *("aten::copy_", "aten::to", "aten::_to_copy", "aten::set_", "aten::lift_fresh", "pretend_cuda::"),
)
LENGTH = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    stock = build("llama").to("cuda")
    paged = hf_paged.patch(copy.deepcopy(stock), block_size=4, num_blocks=256, max_num_seqs=32, cuda_graphs=False)
    paged.paged.submit([1, 2], do_sample=True, max_new_tokens=1).result(100)  # compiles
    paged.paged.submit([1, 2], do_sample=True, typical_p=0.9, max_new_tokens=1).result(100)
    return stock, paged


def stocks(stock: Any, ids: torch.Tensor, seed: int, **arguments: Any) -> list[list[int]]:
    torch.manual_seed(seed)
    tokens: list[list[int]] = stock.generate(ids, **{"do_sample": True} | LENGTH | arguments)[
        :, ids.shape[1] :
    ].tolist()
    return tokens


def test_requests_of_all_kinds_share_a_kernel(models: tuple[Any, Any]) -> None:
    """Would break: a request whose tokens depend on the others', or aren't its seed's; a kernel that is not used."""
    stock, paged = models
    ids = random_ids(2 * len(SETTINGS), 7).to("cuda")
    given = [*SETTINGS.values()] * 2
    expected = [stocks(stock, ids[row : row + 1], row, **own) for row, own in enumerate(given)]
    paged.paged.pause()
    requests = [
        paged.paged.submit(ids[row], seed=row, **{"do_sample": True} | LENGTH | own) for row, own in enumerate(given)
    ]
    num_steps = paged.paged.stats().num_steps
    with pretend_cuda.watch() as seen:
        paged.paged.resume()
        assert [request.result(200).sequences for request in requests] == expected
    num_steps = paged.paged.stats().num_steps - num_steps
    launches = [event.detail for event in seen.of("launch")]
    assert launches.count("_sample_kernel") == num_steps == 6
    assert launches.count("_noise_kernel") == num_steps  # of those whose processor the kernel doesn't know
    assert not [event for event in seen.of("compile") if event.detail == "_sample_kernel"]
    assert len(seen.waits) <= 1, seen.where("sync", "pageable")  # the worker's thread may end a turn by a wait


def test_rows_with_settings_of_their_own_take_few_launches(models: tuple[Any, Any]) -> None:
    """Would break: operations for each request, and sorts of a vocabulary."""
    _, paged = models
    names: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names[func._schema.name] += 1
            return func(*args, **kwargs or {})

    def counted(function: Any) -> Any:
        def run(*values: Any) -> Any:
            with Counting():
                return function(*values)

        return run

    paged.paged.pause()
    settings = [
        {"temperature": 0.5 + row, "top_k": 3 + row, "top_p": 0.9, "repetition_penalty": 1.1} for row in range(6)
    ]
    requests = [paged.paged.submit([1 + row], do_sample=True, **LENGTH | own) for row, own in enumerate(settings)]
    num_steps = paged.paged.stats().num_steps
    with (
        mock.patch.object(LoneRows, "choose", counted(LoneRows.choose)),
        mock.patch.object(executor, "sample_tokens", counted(executor.sample_tokens)),
        pretend_cuda.watch() as seen,
    ):
        paged.paged.resume()
        for request in requests:
            request.result(100)
    num_steps = paged.paged.stats().num_steps - num_steps
    launched = [event for event in seen.of("launch") if event.detail in ("_sample_kernel", "_noise_kernel")]
    operations = Counter({name: count for name, count in names.items() if not name.startswith(FREE)})
    copies = [event for event in seen.of("copy") if "sampl" in event.site]
    assert len(launched) == num_steps and copies
    assert operations.total() + len(launched) + len(copies) <= 12 * num_steps, (operations, copies)
    assert not any("sort" in name or "topk" in name for name in names)


@pytest.mark.parametrize("name", ["plain", "both", "penalty"])
def test_a_batch_and_samples_of_a_prompt(models: tuple[Any, Any], name: str) -> None:
    """Rows of one draw, some of which end before others; and the generator stands where stock's does at the end."""
    stock, paged = models
    ids = random_ids(3, 5).to("cuda")
    arguments = LENGTH | {"do_sample": True, "num_return_sequences": 2, "eos_token_id": [*range(0, 60, 3)]}
    found = []
    for model in (stock, paged):
        torch.manual_seed(5)
        found.append((model.generate(ids, **arguments | SETTINGS[name]), torch.cuda.get_rng_state()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "controls",
    [{"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"logit_bias": {3: 4.0, 7: 4.0, 11: -9.0}}, {"logprobs": 2}],
)
def test_controls(models: tuple[Any, Any], controls: dict[str, Any]) -> None:
    """What `submit()` has and `generate()` has not, by the kernel and by torch."""
    _, paged = models
    arguments = {"do_sample": True, "seed": 4, "top_k": 12} | LENGTH | controls
    with pretend_cuda.watch() as seen:
        own = paged.paged.submit([5, 6, 7], **arguments).result(100)
    assert "_sample_kernel" in [event.detail for event in seen.of("launch")]
    # By torch: a processor that the kernel does not know, and that keeps all tokens.
    others = paged.paged.submit([5, 6, 7], **arguments, typical_p=0.9999999).result(100)
    assert own.token_ids == others.token_ids
    if own.logprobs is not None and others.logprobs is not None:
        assert [one.token_id for one in own.logprobs[0]] == [one.token_id for one in others.logprobs[0]]


def test_a_device_that_draws_otherwise(
    models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would break: a torch to come that draws in another order, in silence."""
    from hf_paged.kernels import availability, philox, row_sampling

    device = torch.device("cuda:0")
    grid = philox.DrawGrid.of(device)
    assert row_sampling.draws_agree(grid, device)
    assert not row_sampling.draws_agree(philox.DrawGrid(grid.most_threads // 2), device)
    monkeypatch.setattr(row_sampling, "draws_agree", lambda *_: False)
    assert "draws otherwise" in str(availability.draw_grid.__wrapped__(device))
    assert "which is slower" in caplog.text
