"""The same bits in any process, on any number of threads, in any order, and what makes them so: no sums of torch's that
go over several rows, or in an order that depends on these.

What is digested in processes of its own is this file run as a script.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from helpers.models import build, random_ids
from helpers.requests import ENDLESS
from helpers.waiting import PATIENCE, at_once
from hf_paged.kernels import cpu_linear
from hf_paged.model.runner import ModelRunner

FAMILIES = ["llama", "gpt2", "mistral", "qwen3", "qwen3_moe", "gemma2", "phi3", "gpt_neox", "opt", "olmo2"]
DTYPES = [torch.float32, torch.bfloat16]
NUM_PROMPTS = 11  # no width of a model
PROMPTS = [random_ids(1, 45 + seed, seed=seed)[0].tolist() for seed in range(NUM_PROMPTS)]
NUM_TOKENS = sum(map(len, PROMPTS))  # enough for torch to share them out to threads

Said = list[list[hf_paged.TokenLogprobs]]


def leave_amx(setattr: Callable[..., None] = setattr) -> None:
    """With it, bfloat16 is left to torch, which is not exact."""
    setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.fixture(autouse=True)
def _without_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    leave_amx(monkeypatch.setattr)
    cpu_linear.load.cache_clear()  # other tests have asked with it
    yield
    cpu_linear.load.cache_clear()


def said(model: Any, prompts: Iterable[list[int]] = PROMPTS) -> Said:
    """What greedy requests that begin together give."""
    model.paged.pause()
    requests = [model.paged.submit(prompt, max_new_tokens=6, logprobs=5, **ENDLESS) for prompt in prompts]
    model.paged.resume()
    return [(request.result(PATIENCE).logprobs or [])[0] for request in requests]


def patched(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return hf_paged.patch(build(family, dtype=dtype), num_blocks=256, enable_prefix_caching=False)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_order_and_threads(family: str, dtype: torch.dtype) -> None:
    """Would break: a row's place in a tensor, or its share of a thread, decides how it is computed."""
    model = patched(family, dtype)
    expected = said(model)
    for number in (1, 2):
        with threads(number):
            assert said(model) == expected, f"{number} threads"
            assert said(model, PROMPTS[::-1])[::-1] == expected, f"reversed, {number} threads"


def digest(families: Iterable[str]) -> str:
    found = [said(patched(family, dtype)) for family in families for dtype in DTYPES]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def spin() -> None:
    """Keeps a processor busy, without Python's lock."""
    while True:
        hashlib.sha256(bytes(1 << 24))


def test_processes() -> None:
    """Would break: an order of sums that is chosen by what the machine is doing, or by what a process did before."""
    families = ["llama", "gpt2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def run(busy: list[str]) -> str:
        command = [sys.executable, __file__, *busy, *families]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert at_once(run, [[], ["busy"]]) == [digest(families)] * 2


# What a product sums is the last dimension of the argument of this index.
PRODUCTS = {"mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}
OTHERS = ("scaled_dot_product", "_scaled_dot_product", "conv", "mkldnn", "_flash", "_efficient", "einsum")
REDUCTIONS = {"sum", "mean", "amax", "amin", "prod", "var", "std", "var_mean", "cumsum", "norm", "linalg_vector_norm"}
REDUCTIONS |= {"logsumexp", "_softmax", "_log_softmax", "_safe_softmax"}


class Sums(TorchDispatchMode):
    """Notes operations of torch whose sums have an order that depends on the rows of the batch, or go over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.num_seen = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.num_seen += 1
        if (place := PRODUCTS.get(name)) is not None:
            if args[place].shape[-1] > 1:  # else nothing is added
                self.found.add(f"{name} over {args[place].shape[-1]}")
        elif name.startswith(OTHERS):
            self.found.add(name)
        elif name in REDUCTIONS and args[0].is_floating_point():
            dims = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
            dims = range(args[0].ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
            if {args[0].shape[dim] for dim in dims} & {NUM_PROMPTS, NUM_TOKENS}:
                self.found.add(f"{name} over rows of {list(args[0].shape)}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_sums_of_torchs(monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype) -> None:
    model, sums, sizes = patched(family, dtype), Sums(), []
    expected, run = said(model), ModelRunner.run

    def watched(self: ModelRunner, batch: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(batch.num_tokens)
        with sums:
            return run(self, batch, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "run", watched)
    assert said(model) == expected, "watched, it computes in another way"
    assert sizes == [NUM_TOKENS, *[NUM_PROMPTS] * 5] and sums.num_seen > 0
    assert not sums.found


def test_sums_of_torchs_are_found() -> None:
    model, ids = build("gpt2"), random_ids(NUM_PROMPTS, 4)
    with torch.no_grad(), Sums() as sums:
        states = model(ids).logits
        states.softmax(0), states.mean((0, 1)), states.sum(), states.mean(-1), states[..., :1] @ states[..., :1].mT
    assert {name.split()[0] for name in sums.found} >= {"addmm", "mean", "sum", "_softmax"}
    assert any("scaled_dot" in name or "_flash" in name for name in sums.found)
    assert not any(name.startswith("bmm over 1") for name in sums.found)


if __name__ == "__main__":
    leave_amx()
    names = sys.argv[1:]
    if names[0] == "busy":
        threading.Thread(target=spin, daemon=True).start()
        del names[0]
    print(digest(names))
