"""Products of a 125M model's linear layers on CPU: torch's own, and the kernel in C.

    python benchmarks/linears.py --out benchmarks/results
    python benchmarks/linears.py --threads 1 --dtypes bfloat16

For each number of rows (tokens of a step), all layers of each shape one after the other, as a model goes through them:
so many that their weights don't stay in the processor's caches. The ways take turns; the figure is the best round's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from command import parser, save, show
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear
from tqdm import tqdm

from hf_paged.kernels import cpu_linear

SHAPES = ((768, 768), (2048, 768), (768, 2048))  # [out, in]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
NUM_LAYERS = 24
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def ways_of(weights: list[Tensor]) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """For each way that is there, its product with each of these weights."""
    ways: dict[str, list[Callable[[Tensor], Tensor]]] = {"torch": [partial(_torch, weight) for weight in weights]}
    kernel = cpu_linear.load(weights[0].dtype)
    if not isinstance(kernel, str):
        ways["C"] = [partial(_in_c, kernel, weight) for weight in weights]
    return ways


def _torch(weight: Tensor, states: Tensor) -> Tensor:
    return linear(states, weight)


def _in_c(kernel: cpu_linear.CPULinear, weight: Tensor, states: Tensor) -> Tensor:
    return kernel.multiply(states, weight, None)


def measure(dtype: torch.dtype, shape: tuple[int, int], reps: int) -> list[dict[str, Any]]:
    """A row of figures for each number of rows: GFLOP/s of each way."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*shape, generator=generator).to(dtype) for _ in range(NUM_LAYERS)]
    ways = ways_of(weights)
    found = []
    for rows in ROWS:
        states = torch.randn(rows, shape[1], generator=generator).to(dtype)
        truth = states.double() @ weights[0].double().t()
        for name, products in ways.items():
            error = float((products[0](states).double() - truth).norm() / truth.norm())
            if error > TOLERANCE[dtype]:
                raise ArithmeticError(f"{name} is off by {error:.1e} for {rows} rows of {shape}")
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(reps):
            for name, products in ways.items():
                started = time.perf_counter()
                for product in products:
                    product(states)
                best[name] = min(best[name], time.perf_counter() - started)
        work = 2 * rows * shape[0] * shape[1] * NUM_LAYERS / 1e9
        found.append({"rows": rows, "gflops": {name: round(work / seconds, 1) for name, seconds in best.items()}})
    return found


@torch.inference_mode()
def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch threads")
    arguments.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    arguments.add_argument("--reps", type=int, default=7, help="rounds")
    given = arguments.parse_args()
    tables, results = [], []
    cases = [(dtype, threads, shape) for dtype in given.dtypes for threads in given.threads for shape in SHAPES]
    for dtype, threads, shape in tqdm(cases, unit="shape"):
        torch.set_num_threads(threads)
        rows = measure(getattr(torch, dtype), shape, given.reps)
        results.append({"dtype": dtype, "threads": threads, "out_in": list(shape), "rows": rows})
        names = list(rows[0]["gflops"])
        table = Table("rows", *names, title=f"{dtype}, {threads} threads, {shape[1]} to {shape[0]}: GFLOP/s")
        for row in rows:
            table.add_row(str(row["rows"]), *(f"{row['gflops'][name]:.0f}" for name in names))
        tables.append(table)
    save(given.out / "linears.json", {"benchmark": "linears"}, results)
    show(*tables)


if __name__ == "__main__":
    main()
