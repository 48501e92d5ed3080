"""What the host does in a decode step of 256 requests, without a model and without a device: calls and milliseconds.

    python benchmarks/host_turn.py --out benchmarks/results

The requests are greedy, or sample with settings of their own, by the kernel that an NVIDIA GPU would run: here it
computes nothing, as the model does not. A turn is one call of `engine.step()` without callers who wait for tokens: it
schedules, launches, and hands out the tokens of the step before. Calls are those of the package's functions
(`sys.setprofile`, comprehensions left out); launches are kernels and operations on tensors that choose the tokens: on a
device two copies come to them, of what the rows are told, and of the tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from command import parser, quiet, save, show
from kernel_census import record
from kernel_soak import build, pretending
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from hf_paged.engine import executor
from hf_paged.engine.lone_rows import LoneRows
from hf_paged.model.runner import ModelRunner

FOLDER = str(Path(hf_paged.__file__).parent) + "/"
NUM_ROWS, TURNS = 256, 64  # turns of a measurement: four blocks of the cache


def own_settings(row: int) -> dict[str, Any]:
    """Settings that no other request has."""
    own = {"temperature": 0.5 + row / 300, "top_k": 20 + row % 60, "top_p": 0.8 + row / 2000, "min_p": row / 9000}
    return own | ({"repetition_penalty": 1 + row / 900} if row % 4 == 0 else {})


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "greedy": lambda row: {"do_sample": False},
    "own settings": lambda row: {"do_sample": True} | own_settings(row),
}
FREE = ("aten::view", "aten::empty", "aten::detach", "aten::slice", "aten::select", "aten::alias", "aten::as_strided")


class Launches(TorchDispatchMode):
    """Counts operations that launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not name.startswith(FREE):
            self.names[name] += 1
        return func(*args, **kwargs or {})


def measure(model: Any, settings: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    engine = model.paged
    engine.pause()
    requests = [
        engine.submit([1 + row, 2, 3], max_new_tokens=4 * TURNS, eos_token_id=None, seed=row, **settings(row))
        for row in range(NUM_ROWS)
    ]
    seconds, sampling = [], []
    counting: AbstractContextManager[Any] = nullcontext()
    logits = torch.zeros(NUM_ROWS, model.config.vocab_size, dtype=torch.bfloat16)

    def forward(self: ModelRunner, batch: Any, *_: Any) -> Tensor:
        return logits[: len(batch.logit_rows)]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            started = time.perf_counter()
            with counting:
                result = function(*values)
            sampling[-1] += time.perf_counter() - started
            return result

        return run

    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER) and not code.co_name.endswith("comp>"):
            calls[f"{code.co_filename.removeprefix(FOLDER)} {code.co_qualname}"] += 1

    with (
        mock.patch.object(ModelRunner, "run", forward),
        mock.patch.object(LoneRows, "choose", timed(LoneRows.choose)),
        mock.patch.object(executor, "sample_tokens", timed(executor.sample_tokens)),
    ):
        for _ in range(4):
            sampling.append(0.0)
            engine.step()
        sampling.clear()
        for _ in range(TURNS):
            sampling.append(0.0)
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
        sys.setprofile(note)
        for _ in range(TURNS):
            engine.step()
        sys.setprofile(None)
        counting = launches = Launches()  # a step leaves modes that are on around it
        with record() as kernels:
            engine.step()
    for request in requests:
        request.cancel()
    engine.resume()
    for request in requests:
        request.result(timeout=60)
    return {
        "calls": round(calls.total() / TURNS, 1),
        "least_ms": round(min(seconds) * 1e3, 2),
        "median_ms": round(statistics.median(seconds) * 1e3, 2),
        "sampler_least_ms": round(min(sampling) * 1e3, 2),
        "sampler_median_ms": round(statistics.median(sampling) * 1e3, 2),
        "launches": launches.names.total() + sum(kernels.values()),
        "most_called": [[name, round(count / TURNS, 1)] for name, count in calls.most_common(12)],
    }


def main() -> None:
    given = parser(__doc__).parse_args()
    quiet()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for kind, settings in KINDS.items():
        model = build("Qwen3-0.6B")
        with (
            hf_paged.patched(model, num_blocks=NUM_ROWS * 40, use_async_batching=True, attention_backend="triton"),
            pretending("sm_90"),
            record(),
        ):
            rows[kind] = measure(model, settings)
    table = Table("256 requests", "calls a turn", "ms, least", "ms, median", "sampler ms, least", "sampler launches")
    for kind, row in rows.items():
        names = ("calls", "least_ms", "median_ms", "sampler_least_ms", "launches")
        table.add_row(kind, *(str(row[name]) for name in names))
    show(table)
    save(given.out / "host_turn.json", {"rows": NUM_ROWS}, rows)


if __name__ == "__main__":
    main()
