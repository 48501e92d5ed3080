"""Whole calls on a GPU: decode steps beside the roofline, offline throughput beside transformers' own.

    python benchmarks/generate_gpu.py --out benchmarks/results          # every piece that is not there yet
    python benchmarks/generate_gpu.py --only 8b-decode 8b-profile --out benchmarks/results

The models have the shapes of Llama-3.1-8B and Qwen3-0.6B, and random bfloat16 weights made on the device. A piece is
one model and one of:

- decode: milliseconds of a decode step at 1,024 tokens of context, batches of 1, 32, 128 and 256; as it is, with every
  row sampling by parameters of its own, without CUDA graphs or overlapping steps, and stock `generate()`.
- compiled: the same with `compile_decode`, batches of 1 and the most; its first call compiles.
- sharegpt: seconds for requests whose lengths are drawn from the trace's quantiles, submitted at once.
- stock, generate_batch: the same ShareGPT-like requests by stock `generate()` in padded batches of some sizes, as they
  come and sorted by length (the first quarter of the requests); and by transformers' `generate_batch`.
- profile: where the time of decode steps goes, by kernel.
- step: one decode step of the largest batch, to see that all of it runs (`8b_4layers-step`: an eighth of the 8B model's
  layers, whose weights and graphs are made in seconds).

Each piece is a process of its own. Each row is saved as it is measured, and not measured again unless the code of the
package or of this program has changed since; a row says what `warm_up()` did, and of decode steps how many sequences
really were in them. The roofline is what this card takes, as measured here, operation by operation (`roofline.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import children
import common
import torch
from common import Family, Point, Report, Row
from generate import QUANTILES, GenerateBatch, Request, Workload, _in_batches, _without_end
from roofline import decode_operations, roofline_ms
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import hf_paged

ROOT = Path(__file__).parent.parent
# What figures depend on
CODE = [ROOT / "hf_paged"]
CODE += [ROOT / "benchmarks" / name for name in ("generate_gpu.py", "generate.py", "roofline.py", "common.py")]
Points = Iterator[Point]


_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
_8B |= {"vocab_size": 128256, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
_06B = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
_06B |= {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True}
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_TINY |= {"intermediate_size": 96, "vocab_size": 100}
MODELS: dict[str, tuple[Any, Any]] = {
    "8b": (LlamaForCausalLM, LlamaConfig(**_8B, num_hidden_layers=32, max_position_embeddings=16384)),
    "8b_4layers": (LlamaForCausalLM, LlamaConfig(**_8B, num_hidden_layers=4, max_position_embeddings=16384)),
    "0.6b": (Qwen3ForCausalLM, Qwen3Config(**_06B, max_position_embeddings=16384)),
    # For a look at this program without a GPU
    "tiny": (LlamaForCausalLM, LlamaConfig(**_TINY, max_position_embeddings=16384)),
}
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
        "flops_per_second": 2 * side**3 / best(lambda: torch.mm(a, b)),
    }


class WrongBatchError(Exception):
    """Other sequences were in the steps than were to be measured."""


def live_batch(model: Any, num_steps: int) -> int:
    """Sequences that each of the last steps decoded.

    Raises:
        WrongBatchError: Not all steps had as many, or one had part of a prompt.
    """
    steps = [event for event in model.paged.snapshot()["events"] if event["kind"] == "step"][-num_steps:]
    found = {(event["num_decode"], event["num_prefill_tokens"]) for event in steps}
    if len(steps) < num_steps or len(found) != 1 or next(iter(found))[1]:
        raise WrongBatchError(
            f"the last {len(steps)} steps had (decoding sequences, tokens of prompts) {sorted(found)}"
        )
    return next(iter(found))[0]


def paged_step(model: Any, batch: int, samples: bool = False) -> Row:
    """Median milliseconds between a request's tokens while `batch` of them decode, and how many really did.

    Raises:
        WrongBatchError: Not in every step that was timed.
    """
    draw = random.Random(batch)
    vocab = model.config.vocab_size
    prompts = [[draw.randrange(3, vocab) for _ in range(CONTEXT - NUM_STEPS // 2)] for _ in range(batch)]
    requests = []
    model.paged.pause()  # else the first ones end before the last are there
    try:
        for index, prompt in enumerate(prompts):
            own: dict[str, Any] = GREEDY
            if samples:
                own = {
                    "do_sample": True,
                    "temperature": 0.5 + index / 500,
                    "top_p": 0.8 + index / 2000,
                    "top_k": 50 + index,
                }
            requests.append(model.paged.submit(prompt, max_new_tokens=6 * NUM_STEPS, **own))
    finally:
        model.paged.resume()
    for request in requests:
        next(iter(request))  # all have been prefilled
    stamps = []
    for _ in requests[-1]:
        stamps.append(time.perf_counter())
        if len(stamps) > 2 * NUM_STEPS:
            break
    model.paged.pause()
    found = live_batch(model, NUM_STEPS)
    for request in requests:
        request.cancel()
    model.paged.resume()
    if found != batch:
        raise WrongBatchError(f"{found} sequences decoded, not {batch}")
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    return {"step_ms": 1e3 * statistics.median(gaps[-NUM_STEPS:]), "live_batch": found}


def stock_step_ms(model: Any, batch: int, device: torch.device, **options: Any) -> float:
    """Time of a call's second half of tokens: the prompt costs the same with half as many."""
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
def patched(model: Any, **settings: Any) -> Iterator[Row]:
    """Gives what `warm_up()` did: kernels compiled, graphs recorded, or why there are none."""
    hf_paged.patch(model, **SETTINGS | settings)
    try:
        try:
            how = asdict(model.paged.warm_up())
            how["warm_up_seconds"] = how.pop("seconds")
        except Exception as error:  # steps may run all the same
            how = {"warm_up_error": common.describe(error)}
        yield how
    finally:
        model.paged.release()
        hf_paged.unpatch(model)


class Bench:
    """A model, and what is asked of it."""

    def __init__(self, name: str, device: torch.device, batches: tuple[int, ...], limit: int) -> None:
        self.name, self.device, self.batches, self.limit = name, device, batches, limit

    @cached_property
    def model(self) -> Any:
        return make_model(self.name, self.device)

    @cached_property
    def card(self) -> dict[str, float]:
        return measure_card(self.device)

    @cached_property
    def vocab(self) -> int:
        return self.model.config.vocab_size

    def beside_roofline(self, batch: int, milliseconds: float) -> Row:
        operations = decode_operations(self.model.config, batch, CONTEXT, self.model.dtype.itemsize)
        floor = roofline_ms(operations, **self.card)
        return {"roofline_ms": floor, "of_roofline": floor / milliseconds} | {
            "tokens_per_second": 1e3 * batch / milliseconds
        }

    def step(self, batch: int, how: Row, samples: bool = False) -> Row:
        row = paged_step(self.model, batch, samples)
        row["detours"] = "; ".join(map(str, self.model.paged.explain()))
        return row | self.beside_roofline(batch, row["step_ms"]) | how

    def stock_step(self, batch: int) -> Row:
        milliseconds = stock_step_ms(self.model, batch, self.device)
        return {"step_ms": milliseconds, "live_batch": batch} | self.beside_roofline(batch, milliseconds)

    def steps(self, variant: str, samples: bool = False, **settings: Any) -> Points:
        with patched(self.model, **settings) as how:
            for batch in self.batches:
                labels = {"engine": variant, "batch": batch}
                yield Point(f"{variant}, {batch}", partial(self.step, batch, how, samples), labels)


def decode_points(bench: Bench) -> Points:
    yield from bench.steps("hf_paged")
    for batch in bench.batches:
        yield Point(f"stock, {batch}", partial(bench.stock_step, batch), {"engine": "stock", "batch": batch})
    yield from bench.steps("hf_paged, sampling", samples=True)
    yield from bench.steps("hf_paged, steps one by one", use_async_batching=False)
    yield from bench.steps("hf_paged, no graphs", cuda_graphs=False)


def step_points(bench: Bench) -> Points:
    bench.batches = bench.batches[-1:]
    yield from bench.steps("hf_paged")


def compiled_points(bench: Bench) -> Points:
    """On CPU, where there are no graphs to compile for, as it is."""
    batches = sorted({bench.batches[0], bench.batches[-1]})
    is_compiled = bench.device.type == "cuda"
    try:
        hf_paged.PagedConfig(compile_decode=is_compiled)
    except ValueError as error:  # of torch
        refused = {"refused": str(error)}
        yield Point("compiled", lambda: refused)
        return
    with patched(bench.model, compile_decode=is_compiled) as how:
        for batch in batches:
            yield Point(f"compiled, {batch}", partial(bench.step, batch, how), {"batch": batch})


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


def sharegpt_points(bench: Bench) -> Points:
    def measure() -> Row:
        model = bench.model
        requests = draw_requests("sharegpt", bench.limit, bench.vocab)
        with patched(model) as how:
            started = time.perf_counter()
            handles = [model.paged.submit(prompt, max_new_tokens=count, **GREEDY) for prompt, count in requests]
            submitted = time.perf_counter() - started
            outputs = [handle.result() for handle in handles]
            seconds = time.perf_counter() - started
            stats = model.paged.stats()
        assert [len(output.token_ids) for output in outputs] == [count for _, count in requests]
        more = {
            "seconds_to_submit": submitted,
            "first_token_median": statistics.median(output.metrics.time_to_first_token for output in outputs),
            "num_preemptions": stats.num_preemptions,
            "peak_blocks_in_use": stats.peak_blocks_in_use,
            "num_blocks": stats.num_blocks,
        }
        return throughput(requests, seconds) | more | how

    yield Point("sharegpt", measure)


def stock_points(bench: Bench) -> Points:
    """Every size on the first requests; the larger ones may not fit."""
    requests = draw_requests("sharegpt", bench.limit, bench.vocab)[: max(4, bench.limit // 4)]

    def measure(size: int, is_sorted: bool) -> Row:
        started = time.perf_counter()
        _in_batches(bench.model, requests, dict(GREEDY), size, is_sorted)
        return throughput(requests, time.perf_counter() - started)

    for is_sorted in (True, False):
        for size in (16, 32, 64):
            labels = {"batch_size": size, "is_sorted": is_sorted}
            case = f"batches of {size}" + ", sorted" * is_sorted
            yield Point(case, partial(measure, size, is_sorted), labels)


def generate_batch_points(bench: Bench) -> Points:
    def measure() -> Row:
        requests = draw_requests("sharegpt", bench.limit, bench.vocab)
        engine = GenerateBatch(Workload("G", lambda: bench.model, requests, dict(GREEDY), (64,), 128))
        engine.run(requests[:8])
        started = time.perf_counter()
        engine.run(requests)
        return throughput(requests, time.perf_counter() - started)

    yield Point("generate_batch", measure)


# ------------------------------------------------------------------------------------------------------------- profile


def profile_points(bench: Bench) -> Points:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    is_cuda = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    key = "self_device_time_total" if is_cuda else "self_cpu_time_total"

    def measure(batch: int, how: Row) -> Row:
        paged_step(bench.model, batch)
        with torch_profile(activities=activities) as found:
            row = paged_step(bench.model, batch)
        events = sorted(found.key_averages(), key=lambda event: -getattr(event, key))[:25]
        names = {event.key[:100]: {"calls": event.count, "ms": getattr(event, key) / 1e3} for event in events}
        return row | how | {"by_kernel": names}

    with patched(bench.model) as how:
        for batch in (bench.batches[0], bench.batches[-1]):
            yield Point(f"whole runs of {batch}", partial(measure, batch, how), {"batch": batch})


# ------------------------------------------------------------------------------------------------------------- program

PIECES: dict[str, Callable[[Bench], Points]] = {
    "decode": decode_points,
    "profile": profile_points,
    "sharegpt": sharegpt_points,
    "stock": stock_points,
    "generate_batch": generate_batch_points,
    "compiled": compiled_points,
    "step": step_points,
}
# What says most first
DEFAULT = ["8b-decode", "8b-sharegpt", "8b-profile", "0.6b-decode"]
DEFAULT += [
    name
    for model in ("8b", "0.6b")
    for piece in PIECES
    if piece != "step" and (name := f"{model}-{piece}") not in DEFAULT
]


def piece_family(piece: str) -> Family:
    """A piece's points; the bench is its model's."""
    return Family(piece, PIECES[piece.partition("-")[2]])


def summary(report: Report) -> str:
    """What was measured, as tables."""
    facts = ", ".join(f"{name} {value}" for name, value in (report.data["device"] | report.data["versions"]).items())
    parts = ["# Whole calls on a GPU", facts]
    parts.append(common.render_families(map(piece_family, report.data["families"]), report))
    for row in report.data["rows"]:
        if "by_kernel" in row:
            lines = [[name, str(own["calls"]), f"{own['ms']:.2f}"] for name, own in row["by_kernel"].items()]
            parts.append(f"### {row['family']}, batch {row['batch']}, of all steps and prompts")
            parts.append(common.markdown_table(["kernel", "calls", "ms"], lines))
    return "\n\n".join(parts) + "\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--only", nargs="+", default=DEFAULT, help="pieces, MODEL-PIECE, in this order")
    parser.add_argument("--limit", type=int, default=256, help="requests of the offline pieces")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--time-limit", type=float, default=540, help="seconds for all pieces; the others stay to do")
    parser.add_argument("--again", action="store_true", help="measure pieces anew that failed or have a row that did")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True, help="folder for generate-gpu.json and .md")
    args = parser.parse_args(argv)
    for piece in args.only:
        model, _, what = piece.partition("-")
        if model not in MODELS or what not in PIECES:
            parser.error(f"{piece} is not MODEL-PIECE, of {', '.join(MODELS)} and {', '.join(PIECES)}")
    return args


def measure(piece: str, args: argparse.Namespace, report: Report) -> bool:
    """Measures what the report does not have of a piece; False if the device is gone."""
    deadline = time.monotonic() + args.time_limit
    warnings.simplefilter("ignore")
    bench = Bench(piece.partition("-")[0], args.device, tuple(args.batches), args.limit)
    return common.run_family(piece_family(piece), bench, report, deadline)


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 if something failed, or `children.UNFINISHED` if the time was up."""
    ends = time.monotonic()
    args = parse(argv)
    ends += args.time_limit
    path = args.out / "generate-gpu.json"
    if args.child:
        is_alive = measure(args.child, args, Report.load(path))
        sys.stdout.flush()
        os._exit(not is_alive)
    data: dict[str, Any] = {
        "code": children.code_hash(CODE),
        "device": common.device_facts(args.device),
        "versions": common.versions(),
        "context": CONTEXT,
    } | {"families": {}, "rows": []}
    report = Report.resume(path, data, args.again)
    passed_on = [argument for argument in argv if argument != "--again"]
    for piece in args.only:
        command = [sys.executable, __file__, *passed_on, "--child", piece]
        common.supervise(command, [piece], report, ends)
    text = summary(report)
    path.with_suffix(".md").write_text(text)
    print(text)
    todo = [piece for piece in args.only if report.is_due(piece)]
    if todo:
        print(f"still to do: {' '.join(todo)}; the same command goes on there")
    return report.exit_status(args.only)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
