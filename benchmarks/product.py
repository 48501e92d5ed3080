"""Products with weights of a model's linear layers on CPU: our kernel beside torch, and an older checkout's.

    python benchmarks/product.py --out benchmarks/results
    python benchmarks/product.py --rows 1 8 --shapes 768x2048 --dtype float32 --threads 1 --before ../old

Weights of one shape are multiplied one after the other, as a model goes through its layers: so many that they don't
stay in the processor's own caches, and for each way its own, since the last-level cache may hold what another one has
just read. The ways take turns, every second time backwards, and each figure is the median of its rounds. One way is
there twice: what lies between its two figures is the noise of the others.
`--before` takes a checkout whose kernel still had copies of the weights in a layout of its own (`pack`).
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from command import parser, save, show
from common import device_facts
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from hf_paged.kernels import cpu_linear
from hf_paged.kernels.cpu_linear import CPULinear

Product = Callable[[Tensor], Tensor]

SHAPES = ("768x2048", "2048x768", "768x32000", "1024x3072")  # inputs x results
ROWS = (1, 4, 8, 16, 32, 64, 256)
WEIGHT_BYTES = 96e6  # of all weights of a shape, about
MAX_WORK = 8e9  # multiplications and additions of a round, about
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def kernel_for(dtype: torch.dtype) -> CPULinear:
    """Ours, also where AMX makes torch the faster one."""
    has_pairs = dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    kernel = cpu_linear.load(dtype, "AVX512_BF16" if has_pairs else torch.backends.cpu.get_cpu_capability())
    if isinstance(kernel, str):
        raise SystemExit(f"there is no kernel for {dtype}: {kernel}")
    return kernel


def module_of(checkout: Path) -> ModuleType:
    """Its `hf_paged.kernels.cpu_linear`, beside this one's."""
    spec = importlib.util.spec_from_file_location("before", checkout / "hf_paged/kernels/cpu_linear.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ways_of(weights: Sequence[Tensor], before: ModuleType | None) -> dict[str, list[Product]]:
    """For each way, its product with each of these weights: with its own, as others would bring them to the caches."""
    kernel = kernel_for(weights[0].dtype)
    ways: dict[str, list[Product]] = {
        "ours": [partial(_multiply, kernel, weight) for weight in weights],
        "again": [partial(_multiply, kernel, weight.clone()) for weight in weights],
        "torch": [partial(linear, weight=weight.clone()) for weight in weights],
    }
    if before is not None:
        old = before.load(weights[0].dtype)
        ways["before"] = [partial(_multiply, old, old.pack(weight)) for weight in weights]
    return ways


def _multiply(kernel: Any, weight: Any, states: Tensor) -> Tensor:
    return kernel.multiply(states, weight, None)  # type: ignore[no-any-return]


def measure(weights: Sequence[Tensor], ways: dict[str, list[Product]], rows: int, reps: int) -> dict[str, float]:
    """GFLOP/s of each way."""
    columns, width = weights[0].shape
    states = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(weights[0].dtype)
    truth = states.double() @ weights[0].double().t()
    for name, products in ways.items():
        error = float((products[0](states).double() - truth).norm() / truth.norm())
        if error > TOLERANCE[states.dtype]:
            raise ArithmeticError(f"{name} is off by {error:.1e} for {rows} rows of {width}x{columns}")
    work = 2 * rows * columns * width
    num_weights = max(2, min(len(weights), math.ceil(MAX_WORK / work)))
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter  # other processes count less
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for rep in range(reps):
        order = list(ways) if rep % 2 else list(ways)[::-1]
        for name, products in ((name, ways[name]) for name in order):
            started = clock()
            for product in products[:num_weights]:
                product(states)
            seconds[name].append(clock() - started)
    return {name: work * num_weights / statistics.median(each) / 1e9 for name, each in seconds.items()}


@torch.inference_mode()
def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, nargs="+", default=ROWS)
    arguments.add_argument("--shapes", nargs="+", default=SHAPES, help="inputs x results")
    arguments.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch threads")
    arguments.add_argument("--reps", type=int, default=7, help="rounds")
    arguments.add_argument("--before", type=Path, help="an older checkout, to be compared with")
    given = arguments.parse_args()
    before = module_of(given.before) if given.before else None
    results: list[dict[str, Any]] = []
    for dtype in given.dtype:
        for shape in given.shapes:
            width, columns = map(int, shape.split("x"))
            size = width * columns * getattr(torch, dtype).itemsize
            num_weights = max(2, int(WEIGHT_BYTES / size))
            weights = [torch.randn(columns, width).to(getattr(torch, dtype)) for _ in range(num_weights)]
            ways = ways_of(weights, before)
            for threads in given.threads:
                torch.set_num_threads(threads)
                others = [name for name in ways if name != "ours"]
                table = Table(
                    "rows", *ways, *(f"/ {name}" for name in others), title=f"{dtype} {shape}, {threads} threads"
                )
                for rows in given.rows:
                    gflops = measure(weights, ways, rows, given.reps)
                    ratios = (f"{gflops['ours'] / gflops[name]:.2f}" for name in others)
                    table.add_row(str(rows), *(f"{gflops[name]:.0f}" for name in ways), *ratios)
                    result = {"dtype": dtype, "shape": shape, "threads": threads, "rows": rows}
                    results.append(result | {"gflops": {name: round(value, 1) for name, value in gflops.items()}})
                show(table)
    about = {"benchmark": "product", "machine": device_facts(torch.device("cpu"))}
    save(given.out / "product.json", about, results)
    for rows in given.rows:
        same = [one["gflops"] for one in results if one["rows"] == rows]
        means = {name: statistics.geometric_mean(one["ours"] / one[name] for one in same) for name in same[0]}
        print(rows, "rows, ours /", ", ".join(f"{name}: {mean:.2f}" for name, mean in means.items() if name != "ours"))


if __name__ == "__main__":
    main()
