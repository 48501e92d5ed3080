"""What an adapter a request costs: a Llama of 125M, LoRA of rank 16 on all linear layers, float32, on CPU.

    python benchmarks/adapters.py --out benchmarks/results
    python benchmarks/adapters.py --cells steps prompts --threads 1

- steps: decode steps of 32 rows that have no adapter, one, four or 32 between them; they alternate.
- prompts: 8 prompts of 256 tokens, likewise.
- generate: a call with 16 rows of 16 adapters, beside PEFT's own `generate(adapter_names=...)`, in turn; and what both
  take for the adapters of one linear layer.
- many: 1,000 adapters on disk (all distinct, bfloat16) and room for 64 in memory. Which one a request has follows
  Zipf's law (s = 1); 32 requests at once, 64 new tokens each; beside the same requests with one adapter.
- loading: decode steps of 32 rows while another thread loads and unloads adapters, and while none does; then what it
  takes to look whether a model has changed, with 1,000 adapters loaded.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from command import parser, quiet, save, show
from common import device_facts
from generate import llama_125m
from rich.table import Table
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import hf_paged
from hf_paged.kernels import cpu_adapters
from hf_paged.kernels.low_rank import LowRank

RANK, ROWS, NUM_ADAPTERS, NUM_RESIDENT = 16, 32, 1000, 64
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
BASE = "__base__"


def ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 32000, (length,), generator=torch.Generator().manual_seed(seed))


def config() -> Any:
    return peft.LoraConfig(r=RANK, target_modules="all-linear", lora_alpha=32)


def save_adapters(folder: Path, count: int) -> list[str]:
    """Adapters that all differ, in bfloat16, as PEFT saves them."""
    peft.get_peft_model(llama_125m(torch.float32), config()).save_pretrained(folder / "first")
    tensors = load_file(folder / "first" / "adapter_model.safetensors")
    settings = (folder / "first" / "adapter_config.json").read_text()
    draw = torch.Generator().manual_seed(0)
    names = [f"adapter {number}" for number in range(count)]
    for name in tqdm(names, desc="adapters"):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(settings)
        own = {key: (torch.randn(x.shape, generator=draw) * 0.02).bfloat16() for key, x in tensors.items()}
        save_file(own, folder / name / "adapter_model.safetensors", {"format": "pt"})
    return names


def loaded(folder: Path, names: Sequence[str], **settings: Any) -> Any:
    model = hf_paged.patch(llama_125m(torch.float32), num_blocks=2048, enable_prefix_caching=False, **settings)
    for name in tqdm(names, desc="loading"):
        model.paged.load_adapter(name, folder / name)
    return model


def step_seconds(engine: Any, adapters: Sequence[str], length: int, steps: int) -> list[float]:
    """Of decode steps in which each row has an adapter; of the prompts' step, if they are to make one token."""
    engine.pause()
    requests = [
        engine.submit(ids(length, row), adapter=name, max_new_tokens=steps + 1, **OPTIONS)
        for row, name in enumerate(adapters)
    ]
    seconds = []
    while any(not request.is_done for request in requests):
        started = time.perf_counter()
        event = engine.step()
        if event is not None and (event["num_prefill_tokens"] == 0 or not steps):
            seconds.append(time.perf_counter() - started)
    engine.resume()
    return [sum(seconds)] if not steps else seconds


def ratios(model: Any, names: Sequence[str], counts: Sequence[int], rows: int, length: int, steps: int) -> list[Any]:
    """Seconds with so many adapters, and how they compare to those with none beside which they were measured."""
    cells: dict[int, list[float]] = {count: [] for count in (0, *counts)}
    for number in tqdm(range(12), desc="alternating"):
        for count in cells if number % 2 else list(cells)[::-1]:
            adapters = [names[row % count] if count else BASE for row in range(rows)]
            found = statistics.median(step_seconds(model.paged, adapters, length, steps))
            if number >= 2:
                cells[count].append(found)
    return [
        {
            "adapters": count,
            "milliseconds": 1000 * statistics.median(own),
            "ratio": statistics.median(with_one / without for with_one, without in zip(own, cells[0], strict=True)),
        }
        for count, own in cells.items()
    ]


def measure_steps(folder: Path, names: list[str]) -> list[Any]:
    return ratios(loaded(folder, names[:ROWS]), names, (1, 4, ROWS), ROWS, 16, 24)


def measure_prompts(folder: Path, names: list[str]) -> list[Any]:
    return ratios(loaded(folder, names[:8]), names, (1, 4, 8), 8, 256, 0)


def measure_generate(folder: Path, names: list[str]) -> list[Any]:
    names = names[:16]
    stock = peft.PeftModel.from_pretrained(llama_125m(torch.float32), folder / names[0], adapter_name=names[0])
    for name in names[1:]:
        stock.load_adapter(folder / name, adapter_name=name)
    stock.eval()
    paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=2048, enable_prefix_caching=False)
    rows = torch.stack([ids(32, row) for row in range(16)])
    call = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "adapter_names": names}
    seconds: dict[str, list[float]] = {"PEFT": [], "hf_paged": []}
    tokens: dict[str, Any] = {}
    for number in tqdm(range(4), desc="generate"):
        for name, model in (("PEFT", stock), ("hf_paged", paged)):
            started = time.perf_counter()
            tokens[name] = model.generate(**call, **OPTIONS, max_new_tokens=32)
            if number:
                seconds[name].append(time.perf_counter() - started)
    equal = (tokens["PEFT"] == tokens["hf_paged"]).all(dim=1).sum().item()
    found = [{"of": f"generate(), {equal} of 16 rows equal", **_beside(seconds)}]
    layer = stock.base_model.model.model.layers[0].mlp.up_proj
    states, result = torch.randn(16, 1, 768), torch.randn(16, 1, 2048)

    def by_peft() -> None:  # the loop of its `_mixed_batch_forward`, without the base layer
        for row, name in enumerate(names):
            added = layer.lora_B[name](layer.lora_A[name](states[row : row + 1])) * layer.scaling[name]
            result[row : row + 1] += added

    kernel = cpu_adapters.load(torch.float32)
    entries = [LowRank(layer.lora_A[n].weight.detach(), layer.lora_B[n].weight.detach(), 2.0) for n in names]
    table, slots = kernel.table(entries), torch.arange(16, dtype=torch.int32)
    with torch.no_grad():
        alone = {"PEFT": _times(by_peft), "hf_paged": _times(lambda: kernel.add(states, result, slots, table))}
    return [*found, {"of": "the adapters of a linear layer, 768 to 2,048", **_beside(alone)}]


def _times(call: Callable[[], None]) -> list[float]:
    seconds = []
    for _ in range(500):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def _beside(seconds: dict[str, list[float]]) -> dict[str, Any]:
    peft_ms, own_ms = (1000 * statistics.median(seconds[name]) for name in ("PEFT", "hf_paged"))
    return {"PEFT ms": peft_ms, "milliseconds": own_ms, "ratio": peft_ms / own_ms}


def measure_many(folder: Path, names: list[str]) -> list[Any]:
    model = loaded(folder, names[:1])
    size = model.paged.core.adapters.store.stats().bytes
    model = loaded(folder, names, adapter_space_gib=NUM_RESIDENT * size / 2**30, max_num_seqs=ROWS)
    engine = model.paged
    chances = 1 / np.arange(1, len(names) + 1)
    drawn = np.random.default_rng(0).choice(len(names), size=8 * ROWS, p=chances / chances.sum())
    rates: dict[str, list[float]] = {"one": [], "all": []}
    stats = engine.core.adapters.store.stats
    before = stats().loads
    for _ in range(2):
        for kind, wanted in (("one", [names[0]] * len(drawn)), ("all", [names[number] for number in drawn])):
            started = time.perf_counter()
            prompts = [ids(32, row) for row in range(len(wanted))]
            engine.generate(prompts, adapters=wanted, max_new_tokens=64, **OPTIONS)
            rates[kind].append(64 * len(wanted) / (time.perf_counter() - started))
    one, every = (statistics.median(rates[kind]) for kind in rates)
    about = {"adapters asked for": len(set(drawn.tolist())), "reads from disk": stats().loads - before}
    rate = f"{len(names):,} adapters, tokens/s"
    return [{"one adapter, tokens/s": one, rate: every, "ratio": every / one, **about}]


def measure_loading(folder: Path, names: list[str]) -> list[Any]:
    model = loaded(folder, names[:4])
    engine = model.paged
    stop, numbers = threading.Event(), itertools.count()

    def load() -> None:
        for name in itertools.cycle(names[4:]):
            if stop.is_set():
                return
            engine.load_adapter(f"{name}, {next(numbers)}", folder / name)
            engine.unload_adapter(f"{name}, {next(numbers) - 1}")

    found: list[Any] = []
    for kind in ("nothing is loaded", "loading"):
        stop.clear()
        thread = threading.Thread(target=load)
        if kind == "loading":
            thread.start()
        started = time.perf_counter()
        seconds = [s for _ in range(6) for s in step_seconds(engine, [names[row % 4] for row in range(ROWS)], 16, 64)]
        stop.set()
        passed = time.perf_counter() - started
        if kind == "loading":
            thread.join()
        p50, p99 = (1000 * float(np.percentile(seconds, q)) for q in (50, 99))
        found.append({"steps while": kind, "p50 ms": p50, "p99 ms": p99, "loads/s": next(numbers) // 2 / passed})
    return [*found, *_looks(folder, names)]


def _looks(folder: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    model = loaded(folder, [])
    engine = model.paged
    for count in (0, len(names)):
        for name in names[:count]:
            engine.load_adapter(name, folder / name)
        with engine.core.pool.lock:
            seconds = _times(engine.core.weights_key)
        yield {"a look at the model, loaded": count, "milliseconds": 1000 * statistics.median(seconds)}


CELLS: dict[str, Callable[[Path, list[str]], list[Any]]] = {
    "steps": measure_steps,
    "prompts": measure_prompts,
    "generate": measure_generate,
    "many": measure_many,
    "loading": measure_loading,
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--adapters", type=int, default=NUM_ADAPTERS, help="on disk, 7 MB each")
    given = arguments.parse_args()
    quiet()
    torch.set_num_threads(given.threads)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        names = save_adapters(Path(folder), given.adapters)
        for cell in given.cells:
            results[cell] = CELLS[cell](Path(folder), names)
            columns = list(dict.fromkeys(column for row in results[cell] for column in row))
            table = Table(*columns, title=cell)
            for row in results[cell]:
                values = [row.get(column, "") for column in columns]
                table.add_row(*[f"{value:.3f}" if isinstance(value, float) else str(value) for value in values])
            show(table)
    facts = device_facts(torch.device("cpu")) | {"threads": given.threads}
    save(given.out / "adapters.json", {"device": facts}, results)


if __name__ == "__main__":
    main()
