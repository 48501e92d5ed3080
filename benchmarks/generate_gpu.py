"""Whole calls on a GPU: decode steps beside the roofline, offline throughput beside transformers' own, start-up.

    python benchmarks/generate.py --device cuda --out benchmarks/results          # every piece that is not there yet
    python benchmarks/generate.py --device cuda --only 8b-decode 8b-profile --out benchmarks/results

The models have the shapes of Llama-3.1-8B and Qwen3-0.6B, and random bfloat16 weights made on the device. A piece is
one model and one of:

- decode: milliseconds of a decode step at 1,024 tokens of context, batches of 1, 32, 128 and 256; as it is, with every
  row sampling by parameters of its own, without CUDA graphs, fused layers or overlapping steps, and stock `generate()`
  (dynamic cache). The roofline is what this card takes, as measured here, to read the weights and the keys and values
  once, or for the matrix products, whichever is more.
- compiled: the same with `compile_decode`, batches of 1 and the most; its first call compiles.
- static: stock `generate()` with a static cache, which transformers compiles.
- sharegpt, azure, bwb: seconds for requests whose lengths are drawn from the traces' quantiles, submitted at once.
- stock, generate_batch: the same ShareGPT-like requests by stock `generate()` in padded batches of some sizes, as they
  come and sorted by length (the first quarter of the requests); and by transformers' `generate_batch`.
- start: seconds from `patch()` to the first tokens; before the second one, graphs are recorded.
- profile: where the time of decode steps goes, by kernel.

Each piece is a process of its own, saved as soon as it is done; what is saved is not measured again, unless the
package's code has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import Report, describe, device_facts, markdown_table, versions
from generate import QUANTILES, GenerateBatch, Request, Workload, _in_batches, _without_end
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import hf_paged
from hf_paged import fused_layers

MODELS: dict[str, tuple[Any, Any]] = {
    "8b": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
            max_position_embeddings=16384,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
        ),
    ),
    "0.6b": (
        Qwen3ForCausalLM,
        Qwen3Config(
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            vocab_size=151936,
            max_position_embeddings=16384,
            tie_word_embeddings=True,
        ),
    ),
    # For a look at this program without a GPU
    "tiny": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=96,
            vocab_size=100,
            max_position_embeddings=16384,
        ),
    ),
}
PIECES = (
    *("decode", "sharegpt", "stock", "generate_batch", "start", "profile", "compiled"),
    *("azure", "bwb", "static"),
)
DEFAULT = [f"{model}-{piece}" for model in ("8b", "0.6b") for piece in PIECES]
BATCHES = (1, 32, 128, 256)
CONTEXT = 1024
NUM_STEPS = 32
GREEDY = {"do_sample": False}
SETTINGS = {"memory_fraction": 0.9, "max_num_seqs": 256, "max_num_batched_tokens": 8192}


def make_model(name: str, device: torch.device) -> Any:
    """Random weights, made where they stay."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    return _without_end(model.eval())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -------------------------------------------------------------------------------------------------------------- decode


def measure_card(device: torch.device) -> dict[str, float]:
    """Bytes a second that a large copy moves, and floating point operations a second of a large matrix product."""
    is_cuda = device.type == "cuda"
    dtype, size, side = (torch.bfloat16, 2**30, 8192) if is_cuda else (torch.float32, 2**24, 512)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def best(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(8):
            synchronize(device)
            started = time.perf_counter()
            for _ in range(5):
                call()
            synchronize(device)
            times.append((time.perf_counter() - started) / 5)
        return min(times)

    return {
        "bytes_per_second": 2 * size / best(lambda: target.copy_(source)),
        "flops": 2 * side**3 / best(lambda: torch.mm(a, b)),
    }


def roofline_ms(model: Any, batch: int, card: dict[str, float]) -> float:
    """Of a decode step: every weight but the embedding's is read once, and so are all keys and values."""
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    if config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    num_bytes = (weights + batch * CONTEXT * token) * model.dtype.itemsize
    return 1e3 * max(num_bytes / card["bytes_per_second"], 2 * weights * batch / card["flops"])


def paged_step_ms(model: Any, batch: int, samples: bool = False) -> float:
    """Median time between a request's tokens while `batch` of them decode."""
    draw = random.Random(batch)
    vocab = model.config.vocab_size
    prompts = [[draw.randrange(3, vocab) for _ in range(CONTEXT - NUM_STEPS // 2)] for _ in range(batch)]
    requests = []
    for index, prompt in enumerate(prompts):
        own: dict[str, Any] = GREEDY
        if samples:
            own = {
                "do_sample": True,
                "temperature": 0.5 + index / 500,
                "top_p": 0.8 + index / 2000,
                "top_k": 50 + index,
            }
        requests.append(model.paged.submit(prompt, max_new_tokens=4 * NUM_STEPS, **own))
    for request in requests:
        next(iter(request))  # all have been prefilled
    stamps = []
    for _ in requests[-1]:
        stamps.append(time.perf_counter())
        if len(stamps) > 2 * NUM_STEPS:
            break
    for request in requests:
        request.cancel()
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    return 1e3 * statistics.median(gaps[NUM_STEPS // 2 :])


def stock_step_ms(model: Any, batch: int, device: torch.device, **options: Any) -> float:
    """Of a call, its second half of tokens: the prompt costs the same with half as many."""
    ids = torch.randint(3, model.config.vocab_size, (batch, CONTEXT - NUM_STEPS // 2), device=device)
    seconds = []
    for count in (NUM_STEPS, NUM_STEPS, 2 * NUM_STEPS):  # the first one warms up
        synchronize(device)
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **GREEDY, **options)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 1e3 * (seconds[2] - seconds[1]) / NUM_STEPS


@contextmanager
def unfused() -> Iterator[None]:
    original = fused_layers.layer_kernels
    fused_layers.layer_kernels = lambda dtype, device: "are switched off"
    try:
        yield
    finally:
        fused_layers.layer_kernels = original


@contextmanager
def patched(model: Any, **settings: Any) -> Iterator[Any]:
    hf_paged.patch(model, **SETTINGS | settings)
    try:
        yield model
    finally:
        model.paged.release()
        hf_paged.unpatch(model)


def decode(name: str, device: torch.device, batches: tuple[int, ...]) -> dict[str, Any]:
    model = make_model(name, device)
    card = measure_card(device)
    rows: list[dict[str, Any]] = []

    def measure(variant: str, of_batch: Callable[[int], float]) -> None:
        for batch in batches:
            try:
                milliseconds = of_batch(batch)
            except torch.OutOfMemoryError as error:
                rows.append({"engine": variant, "batch": batch, "error": describe(error)})
                continue
            floor = roofline_ms(model, batch, card)
            rows.append(
                {"engine": variant, "batch": batch, "step_ms": milliseconds, "roofline_ms": floor}
                | {"of_roofline": floor / milliseconds, "tokens_per_second": 1e3 * batch / milliseconds}
            )
            print(rows[-1], flush=True)

    with patched(model):
        measure("hf_paged", lambda batch: paged_step_ms(model, batch))
        measure("hf_paged, sampling", lambda batch: paged_step_ms(model, batch, samples=True))
    with patched(model, use_async_batching=False):
        measure("hf_paged, steps one by one", lambda batch: paged_step_ms(model, batch))
    with unfused(), patched(model):
        measure("hf_paged, nothing fused", lambda batch: paged_step_ms(model, batch))
    with patched(model, cuda_graphs=False):
        measure("hf_paged, no graphs", lambda batch: paged_step_ms(model, batch))
    measure("stock", lambda batch: stock_step_ms(model, batch, device))
    return {"card": card, "context": CONTEXT, "rows": rows}


def compiled(name: str, device: torch.device, batches: tuple[int, ...]) -> dict[str, Any]:
    """On CPU, where there are no graphs to compile for, as it is."""
    model = make_model(name, device)
    card = measure_card(device)
    rows = []
    with patched(model, compile_decode=device.type == "cuda"):
        started = time.perf_counter()
        model.paged.submit(list(range(5, 69)), max_new_tokens=4, **GREEDY).result()
        seconds = time.perf_counter() - started
        for batch in sorted({batches[0], batches[-1]}):
            milliseconds = paged_step_ms(model, batch)
            rows.append(
                {"batch": batch, "step_ms": milliseconds, "of_roofline": roofline_ms(model, batch, card) / milliseconds}
                | {"first_call_seconds": seconds}
            )
    return {"rows": rows}


def static(name: str, device: torch.device, batches: tuple[int, ...]) -> dict[str, Any]:
    model = make_model(name, device)
    rows = []
    for batch in batches[:2]:
        started = time.perf_counter()
        milliseconds = stock_step_ms(model, batch, device, cache_implementation="static")
        rows.append(
            {"batch": batch, "step_ms": milliseconds, "seconds_with_compilation": time.perf_counter() - started}
        )
    return {"rows": rows}


# ------------------------------------------------------------------------------------------------------------- offline


def draw_requests(trace: str, limit: int, vocab: int, longest: int = 8192) -> list[Request]:
    """Random ids of the trace's lengths."""
    table = json.loads(QUANTILES.read_text())["tables"][trace]
    draw = random.Random(0)
    requests = []
    for _ in range(limit):
        tokens, new = (max(2, draw.choice(table[kind][1:-1])) for kind in ("input", "output"))
        requests.append(([draw.randrange(3, vocab) for _ in range(min(tokens, longest))], new))
    return requests


def throughput(requests: list[Request], seconds: float) -> dict[str, float]:
    new, prompt = (sum(counts) for counts in zip(*((n, len(p)) for p, n in requests), strict=True))
    return {"seconds": seconds, "tokens_per_second": new / seconds, "prompt_tokens_per_second": prompt / seconds} | {
        "num_requests": len(requests),
        "num_new_tokens": new,
        "num_prompt_tokens": prompt,
    }


def offline(trace: str, name: str, device: torch.device, limit: int) -> dict[str, Any]:
    model = make_model(name, device)
    requests = draw_requests(trace, limit, model.config.vocab_size)
    with patched(model):
        for repetition in range(2):  # the first one warms up
            started = time.perf_counter()
            handles = [model.paged.submit(p, max_new_tokens=n, cache_salt=repetition, **GREEDY) for p, n in requests]
            outputs = [handle.result() for handle in handles]
            seconds = time.perf_counter() - started
        stats = model.paged.stats()
    assert [len(output.token_ids) for output in outputs] == [count for _, count in requests]
    return throughput(requests, seconds) | {
        "first_token_median": statistics.median(output.metrics.time_to_first_token for output in outputs),
        "num_preemptions": stats.num_preemptions,
        "peak_blocks_in_use": stats.peak_blocks_in_use,
        "num_blocks": stats.num_blocks,
    }


def stock(name: str, device: torch.device, limit: int) -> dict[str, Any]:
    """Of the first requests, every size; the larger ones may not fit."""
    model = make_model(name, device)
    requests = draw_requests("sharegpt", limit, model.config.vocab_size)[: max(4, limit // 4)]
    rows = []
    for is_sorted in (True, False):
        for size in (16, 32, 64):
            started = time.perf_counter()
            try:
                _in_batches(model, requests, dict(GREEDY), size, is_sorted)
            except torch.OutOfMemoryError as error:
                rows.append({"batch_size": size, "is_sorted": is_sorted, "error": describe(error)})
                torch.cuda.empty_cache()
                continue
            rows.append(
                {"batch_size": size, "is_sorted": is_sorted} | throughput(requests, time.perf_counter() - started)
            )
            print(rows[-1], flush=True)
    return {"rows": rows}


def generate_batch(name: str, device: torch.device, limit: int) -> dict[str, Any]:
    model = make_model(name, device)
    requests = draw_requests("sharegpt", limit, model.config.vocab_size)
    engine = GenerateBatch(Workload("G", lambda: model, requests, dict(GREEDY), (64,), 128))
    engine.run(requests[:8])
    started = time.perf_counter()
    engine.run(requests)
    return throughput(requests, time.perf_counter() - started)


# -------------------------------------------------------------------------------------------------- start-up, profile


def start(name: str, device: torch.device) -> dict[str, Any]:
    """A first call of one prompt, in a process that has run nothing yet."""
    model = make_model(name, device)
    synchronize(device)
    started = time.perf_counter()
    hf_paged.patch(model, **SETTINGS)
    after_patch = time.perf_counter() - started
    stamps = []
    for _ in model.paged.submit(list(range(5, 69)), max_new_tokens=4, **GREEDY):
        stamps.append(time.perf_counter() - started)
    return {"patch": after_patch, "first_token": stamps[0], "second_token": stamps[1], "third_token": stamps[2]}


def profile(name: str, device: torch.device, batches: tuple[int, ...]) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    model = make_model(name, device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    tables: dict[str, list[dict[str, Any]]] = {}
    for batch in (batches[0], batches[-2]):
        with patched(model):
            paged_step_ms(model, batch)
            with torch_profile(activities=activities) as found:
                paged_step_ms(model, batch)
        events = sorted(found.key_averages(), key=lambda event: -getattr(event, key))[:25]
        tables[str(batch)] = [
            {"name": event.key[:100], "calls": event.count, "ms": getattr(event, key) / 1e3} for event in events
        ]
    return {"whole_runs_by_batch": tables}


# ------------------------------------------------------------------------------------------------------------- program


def run_piece(piece: str, device: torch.device, limit: int, batches: tuple[int, ...]) -> dict[str, Any]:
    name, _, what = piece.partition("-")
    if what in ("sharegpt", "azure", "bwb"):
        return offline(what, name, device, limit)
    if what in ("stock", "generate_batch"):
        return (stock if what == "stock" else generate_batch)(name, device, limit)
    if what == "start":
        return start(name, device)
    return {"decode": decode, "compiled": compiled, "static": static, "profile": profile}[what](name, device, batches)


def summary(pieces: dict[str, Any]) -> str:
    """What was measured, as tables."""
    parts = []
    for piece, result in pieces.items():
        rows = result.get("rows") or [result]
        flat = [{k: v for k, v in row.items() if isinstance(v, int | float | str | bool)} for row in rows]
        columns = list(dict.fromkeys(name for row in flat for name in row))
        cells = [[f"{v:.4g}" if isinstance(v := row.get(c, ""), float) else str(v) for c in columns] for row in flat]
        if columns:
            parts.append(f"### {piece}\n\n{markdown_table(columns, cells)}")
    return "\n\n".join(parts) + "\n"


def code_hash() -> str:
    """Of the package's sources: figures of other code don't stand beside each other."""
    folder = Path(hf_paged.__file__).parent
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--only", nargs="+", default=DEFAULT, help="pieces, MODEL-PIECE")
    parser.add_argument("--limit", type=int, default=256, help="requests of the offline pieces")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--time-limit", type=float, default=560, help="seconds for all pieces; the others stay to do")
    parser.add_argument("--piece-limit", type=float, default=400, help="seconds for one piece")
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True, help="folder for generate-gpu.json and .md")
    arguments = parser.parse_args(given)
    batches = tuple(arguments.batches)
    if arguments.in_process:
        result = run_piece(arguments.in_process, arguments.device, arguments.limit, batches)
        Report(arguments.out, result).save()
        return
    path = arguments.out / "generate-gpu.json"
    report = Report.load(path) if path.exists() else Report(path, {"pieces": {}})
    if report.data.get("code") != code_hash():
        report.data["pieces"] = {}
    report.data |= {"device": device_facts(arguments.device), "versions": versions(), "code": code_hash()}
    ends = time.monotonic() + arguments.time_limit
    for piece in arguments.only:
        known = report.data["pieces"].get(piece)
        left = min(arguments.piece_limit, ends - time.monotonic())
        if (known and "error" not in known) or left < 30:
            continue
        print(f"== {piece}", flush=True)
        file = arguments.out / f"generate-gpu-{piece}.part.json"
        command = [sys.executable, __file__, *given, "--in-process", piece, "--out", str(file)]
        try:
            started = time.monotonic()
            done = subprocess.run(command, timeout=left, stderr=subprocess.PIPE, text=True)
            error = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            error = [f"not done after {left:.0f} seconds"]
        result = {"error": error[0] if error else "no result"} if not file.exists() else json.loads(file.read_text())
        file.unlink(missing_ok=True)
        report.data["pieces"][piece] = result | {"took": time.monotonic() - started}
        report.save()
    text = summary(report.data["pieces"])
    path.with_suffix(".md").write_text(text)
    print(text)
    todo = [piece for piece in arguments.only if "error" in report.data["pieces"].get(piece, {"error": ""})]
    if todo:
        sys.exit(f"still to do: {' '.join(todo)}; the same command goes on there")


if __name__ == "__main__":
    main(sys.argv[1:])
