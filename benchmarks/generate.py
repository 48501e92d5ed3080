"""Whole calls, side by side: hf_paged, stock `generate()`, transformers' `generate_batch` and vLLM on CPU.

    python benchmarks/generate.py --workload A --out benchmarks/results
    python benchmarks/generate.py --workload B C D --prompts DIR --out benchmarks/results
    python benchmarks/generate.py --workload A --dtype bfloat16 --vllm VENV

- A: a random Llama of 125M parameters, 32 requests of 16 to 256 tokens that want 16 to 128 more, greedy.
- B: the embedded model, 500 prompts, output lengths drawn from ShareGPT's quantiles (a quarter of them), sampling with
  temperature 0.8, top_k 50, top_p 0.95.
- C: B behind a common system prompt of 512 tokens.
- D: 64 of B's prompts, 4 beams, 64 new tokens.

`--prompts` names a folder with gsm8k_test.jsonl, mt_bench_question.jsonl and humaneval_prompts.jsonl; without it the
package's own prompts are used, cut and repeated.

Every request gets exactly the number of tokens it wants: the end-of-sequence token is unset. Stock `generate()` takes
left-padded batches that run until their longest request is done, in the given order and sorted by length, of the batch
size that was fastest for the first 128 requests. Engines alternate, repetition by repetition, after a warm-up; figures
are medians. Tokens are compared with hf_paged's, request by request; what was sampled is compared by 16 further calls,
one by one from the same seed. vLLM runs in an environment of its own (`--vllm`, see generate_vllm.py).

"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

sys.path.insert(0, str(Path(__file__).parent))

from common import Report, device_facts, markdown_table, versions

import hf_paged
from hf_paged.tools.report import first_divergence, paged_kv_usage

TINY = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
PROMPTS = Path(hf_paged.__file__).parent / "assets" / "prompts.jsonl"
QUANTILES = Path(__file__).parent / "length_quantiles.json"
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
GREEDY: dict[str, Any] = {"do_sample": False}
ENGINES = ("hf_paged", "stock", "stock, sorted", "generate_batch", "vllm")
SYSTEM_TOKENS = 512
PAGE_SIZE = 256  # of generate_batch, its default
NUM_CHECKED = 16
NUM_SEARCHED = 128  # requests that the best batch size is found with

Request = tuple[list[int], int]  # prompt, new tokens


@dataclass(frozen=True)
class Workload:
    """What is to be generated.

    Attributes:
        name: A letter.
        make_model: Makes the model.
        requests: Prompts and how many tokens each wants.
        options: Of `generate()`.
        batch_sizes: To be tried with stock `generate()`.
        max_num_seqs: Sequences in a step of the engines that batch continuously.
    """

    name: str
    make_model: Callable[[], Any]
    requests: list[Request]
    options: dict[str, Any]
    batch_sizes: tuple[int, ...]
    max_num_seqs: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.requests)

    @property
    def num_new_tokens(self) -> int:
        return sum(num_new for _, num_new in self.requests)


@dataclass
class Run:
    """One pass over a workload.

    Attributes:
        tokens: Of each request.
        seconds: For all of them.
        kv_bytes: Of keys and values at the moment with most; `None` if unknown.
    """

    tokens: list[list[int]]
    seconds: float
    kv_bytes: int | None = None


# ------------------------------------------------------------------------------------------------------------ workloads


def llama_125m(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def workload_a(dtype: torch.dtype, **_: Any) -> Workload:
    draw = random.Random(0)
    requests = [
        ([draw.randrange(3, 32000) for _ in range(draw.randint(16, 256))], draw.randint(16, 128)) for _ in range(32)
    ]
    return Workload("A", lambda: llama_125m(dtype), requests, GREEDY, (16, 32), 32)


def workload_b(dtype: torch.dtype, prompts: Path | None, limit: int, **_: Any) -> Workload:
    draw = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = [tokenizer(text)["input_ids"][:1024] for text in read_texts(prompts, limit, draw)]
    lengths = [max(2, length // 4) for length in draw_output_lengths(len(ids), draw)]
    return Workload("B", lambda: tiny_model(dtype), list(zip(ids, lengths, strict=True)), SAMPLING, (64, 128), 64)


def workload_c(**given: Any) -> Workload:
    from hf_paged.tools.cli import read_prompts  # needs what a GPU machine's python may not have

    base = workload_b(**given)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    system = tokenizer("\n\n".join(sorted(read_prompts(PROMPTS), key=len, reverse=True)))["input_ids"][:SYSTEM_TOKENS]
    requests = [(system + prompt, num_new) for prompt, num_new in base.requests]
    return Workload("C", base.make_model, requests, SAMPLING, base.batch_sizes, base.max_num_seqs)


def workload_d(**given: Any) -> Workload:
    base = workload_b(**given)
    requests = [(prompt, 64) for prompt, _ in base.requests[:64]]
    return Workload("D", base.make_model, requests, GREEDY | {"num_beams": 4}, (16, 32), 256)


WORKLOADS: dict[str, Callable[..., Workload]] = {"A": workload_a, "B": workload_b, "C": workload_c, "D": workload_d}


def tiny_model(dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype).eval()


def read_texts(folder: Path | None, limit: int, draw: random.Random) -> list[str]:
    """Real prompts, shuffled; without a folder, pieces of the package's own."""
    from hf_paged.tools.cli import read_prompts

    texts: list[str] = []
    if folder is not None:
        for name, read in (
            ("gsm8k_test.jsonl", lambda row: row["question"]),
            ("mt_bench_question.jsonl", lambda row: row["turns"][0]),
            ("humaneval_prompts.jsonl", lambda row: row["prompt"]),
        ):
            rows = [json.loads(line) for line in (folder / name).read_text().splitlines() if line.strip()]
            texts += [read(row) for row in rows]
    else:
        own = read_prompts(PROMPTS)
        texts = [text[start : start + 400] for start in range(0, 4000, 250) for text in own if len(text) > start]
    draw.shuffle(texts)
    return (texts * (limit // len(texts) + 1))[:limit]


def draw_output_lengths(count: int, draw: random.Random) -> list[int]:
    """Lengths of ShareGPT's answers."""
    tables = json.loads(QUANTILES.read_text())
    lengths: list[int] = tables["tables"]["sharegpt"]["output"]
    return [lengths[draw.randrange(1, len(lengths) - 1)] for _ in range(count)]


# -------------------------------------------------------------------------------------------------------------- engines


class Paged:
    """One `submit()` a request; with beams the batch size that is fastest, if a padded call is faster than that."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.model = hf_paged.patch(_without_end(workload.make_model()), max_num_seqs=workload.max_num_seqs)
        self.batch_size = 0
        self._salt = 0

    def sizes(self) -> tuple[int, ...]:
        return (0, *self._workload.batch_sizes) if "num_beams" in self._workload.options else (0,)

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        options = self._workload.options
        if self.batch_size:
            self.model.paged.reset_prefix_cache()
            return _in_batches(self.model, requests, options, self.batch_size, is_sorted=True)
        self._salt += 1  # nothing is shared with an earlier pass
        handles = [
            self.model.paged.submit(prompt, max_new_tokens=count, cache_salt=self._salt, **options)
            for prompt, count in requests
        ]
        return [handle.result().token_ids for handle in handles]

    def kv_bytes(self, requests: Sequence[Request]) -> int:
        return paged_kv_usage(self.model.paged).allocated_bytes

    def close(self) -> None:
        hf_paged.unpatch(self.model)


class Stock:
    """Padded batches of `generate()`."""

    def __init__(self, workload: Workload, is_sorted: bool) -> None:
        self._workload, self._is_sorted = workload, is_sorted
        self.model = _without_end(workload.make_model())
        self.batch_size = workload.batch_sizes[-1]

    def sizes(self) -> tuple[int, ...]:
        return self._workload.batch_sizes

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        return _in_batches(self.model, requests, self._workload.options, self.batch_size, self._is_sorted)

    def kv_bytes(self, requests: Sequence[Request]) -> int:
        """Every row of a `DynamicCache` is as long as the longest; the last token is never stored."""
        config = self.model.config
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * self.model.dtype.itemsize
        rows = self._workload.options.get("num_beams", 1)
        return max(
            len(batch) * rows * (max(len(prompt) for prompt, _ in batch) + max(count for _, count in batch) - 1) * token
            for _, batch in _batches(requests, self.batch_size, self._is_sorted)
        )

    def close(self) -> None:
        pass


class GenerateBatch:
    """transformers' continuous batching, requests added one by one with their own lengths.

    Of the settings tried (steps of 256, 1,024 and 2,048 tokens, pages of 64 and 256) the fastest.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.model = _without_end(workload.make_model())

    def sizes(self) -> tuple[int, ...]:
        return (0,)

    batch_size = 0

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        config = GenerationConfig(
            **self._workload.options,
            max_new_tokens=max(count for _, count in requests),
            eos_token_id=-1,
            pad_token_id=0,
        )
        # Left alone it takes half of the machine's memory and writes zeros to all of it, at every start.
        longest = max(len(prompt) + count for prompt, count in requests)
        settings = ContinuousBatchingConfig(
            num_blocks=self._workload.max_num_seqs * -(-longest // PAGE_SIZE) + 8, max_batch_tokens=1024
        )
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings
        ) as manager:
            for index, (prompt, count) in enumerate(requests):
                manager.add_request(list(prompt), request_id=str(index), max_new_tokens=count)
            results: dict[str, list[int]] = {}
            while len(results) < len(requests):
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    results[output.request_id] = list(output.generated_tokens)
                elif output is None and not manager.is_running():
                    raise RuntimeError(f"generate_batch stopped after {len(results)} of {len(requests)} requests")
        return [results[str(index)] for index in range(len(requests))]

    def kv_bytes(self, requests: Sequence[Request]) -> None:
        return None

    def close(self) -> None:
        pass


class VLLM:
    """vLLM for CPU, in a process of its own environment that waits between the runs."""

    def __init__(self, workload: Workload, venv: Path, dtype: str, threads: int, keeps_prefixes: bool) -> None:
        self._workload = workload
        self._folder = tempfile.TemporaryDirectory()
        workload.make_model().save_pretrained(self._folder.name)
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "LD_PRELOAD": str(venv / "lib" / "libiomp5.so"),
        }
        command = [str(venv / "bin" / "python"), str(Path(__file__).with_name("generate_vllm.py")), self._folder.name]
        command += [dtype, str(workload.max_num_seqs), "2048", str(int(keeps_prefixes))]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._read()

    def sizes(self) -> tuple[int, ...]:
        return (0,)

    batch_size = 0
    last: dict[str, Any]

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"requests": requests, "options": self._workload.options}) + "\n")
        self._process.stdin.flush()
        self.last = self._read()
        return self.last["tokens"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        status = self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(f"vLLM ended with status {status}:\n{self._errors.read()[-4000:]}")

    def kv_bytes(self, requests: Sequence[Request]) -> None:
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _without_end(model: Any) -> Any:
    """No token ends a sequence."""
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model


def _batches(requests: Sequence[Request], size: int, is_sorted: bool) -> list[tuple[list[int], list[Request]]]:
    order = list(range(len(requests)))
    if is_sorted:
        order.sort(key=lambda index: (requests[index][1], len(requests[index][0])))
    chunks = [order[start : start + size] for start in range(0, len(order), size)]
    return [(chunk, [requests[index] for index in chunk]) for chunk in chunks]


def _in_batches(
    model: Any, requests: Sequence[Request], options: dict[str, Any], size: int, is_sorted: bool
) -> list[list[int]]:
    """Left-padded calls, each as long as its longest request; cut to what each wanted."""
    results: list[list[int]] = [[]] * len(requests)
    for indices, batch in _batches(requests, size, is_sorted):
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        longest = max(count for _, count in batch)
        output: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=longest, **options)
        for index, row in zip(indices, output[:, width:].tolist(), strict=True):
            results[index] = row[: requests[index][1]]
    return results


# ---------------------------------------------------------------------------------------------------------- measurement


def timed(engine: Any, requests: Sequence[Request]) -> Run:
    """One pass, from the same seed every time."""
    torch.manual_seed(0)
    started = time.perf_counter()
    tokens = engine.run(requests)
    run = Run(tokens, time.perf_counter() - started)
    if isinstance(engine, VLLM):
        run.seconds = engine.last["seconds"]
    run.kv_bytes = engine.kv_bytes(requests)
    return run


def measure(workload: Workload, engines: dict[str, Any], num_reps: int) -> dict[str, Any]:
    """All engines in alternation, each at its best batch size."""
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    searched: dict[str, dict[int, float]] = {}
    num_runs = sum(len(engine.sizes()) for engine in engines.values()) + num_reps * len(engines)
    with tqdm(total=num_runs, desc=workload.name, disable=not sys.stderr.isatty()) as bar:
        for name, engine in engines.items():
            found: dict[int, float] = {}
            for size in engine.sizes():  # with one size, the warm-up
                engine.batch_size = size
                found[size] = timed(engine, workload.requests[:NUM_SEARCHED]).seconds
                bar.update()
            engine.batch_size = min(found, key=found.__getitem__)
            searched[name] = found
        for _ in range(num_reps):
            for name, engine in engines.items():
                runs[name].append(timed(engine, workload.requests))
                bar.update()
    num_tokens = workload.num_new_tokens
    rows = {}
    ours = runs["hf_paged"][-1].tokens
    for name, own in runs.items():
        seconds = statistics.median(run.seconds for run in own)
        tokens = own[-1].tokens
        assert [len(row) for row in tokens] == [count for _, count in workload.requests], name
        rows[name] = {
            "seconds": seconds,
            "all_seconds": [run.seconds for run in own],
            "tokens_per_second": num_tokens / seconds,
            "prompt_tokens_per_second": workload.num_prompt_tokens / seconds,
            "batch_size": engines[name].batch_size,
            "searched": searched[name],
            "peak_kv_bytes": own[-1].kv_bytes,
            "identical_requests": sum(a == b for a, b in zip(ours, tokens, strict=True)),
            "first_difference": first_divergence(ours, tokens),
        }
    return {
        "num_requests": len(workload.requests),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_new_tokens": num_tokens,
        "options": workload.options,
        "engines": rows,
    }


def check_sampled(workload: Workload, paged: Paged, stock: Stock) -> int:
    """How many of some requests, sampled one by one from the same seed, have the same tokens."""
    equal = 0
    for index, (prompt, count) in enumerate(workload.requests[:NUM_CHECKED]):
        results = []
        for model in (paged.model, stock.model):
            torch.manual_seed(index)
            ids = torch.tensor([prompt])
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **workload.options)
            results.append(output.tolist())
        equal += results[0] == results[1]
    return equal


# -------------------------------------------------------------------------------------------------------------- results


def table(name: str, result: dict[str, Any]) -> str:
    """The table of one workload."""
    rows = result["engines"]
    best = rows["hf_paged"]["tokens_per_second"]

    def mib(count: int | None) -> str:
        return "" if count is None else f"{count / 2**20:.0f} MiB"

    lines = [
        [
            engine + (f", batches of {row['batch_size']}" if row["batch_size"] else ""),
            f"{row['tokens_per_second']:.0f}",
            f"{best / row['tokens_per_second']:.2f}x",
            mib(row["peak_kv_bytes"]),
            "" if result["options"].get("do_sample") else f"{row['identical_requests']} of {result['num_requests']}",
        ]
        for engine, row in rows.items()
    ]
    columns = [name, "tokens/s", "hf_paged is", "KV at its peak", "same tokens"]
    text = markdown_table(columns, lines)
    if "sampled_identical" in result:
        text += f"\n\nsampled one by one from the same seed: {result['sampled_identical']} of {NUM_CHECKED} as stock"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=Path, help="folder of prompt files")
    parser.add_argument("--limit", type=int, default=500, help="prompts of B and C")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--vllm", type=Path, help="virtual environment with vllm-cpu")
    parser.add_argument("--out", type=Path, help="folder for generate-NAME.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    results: dict[str, Any] = {}
    for name in arguments.workload:
        workload = WORKLOADS[name](dtype=dtype, prompts=arguments.prompts, limit=arguments.limit)
        makers: dict[str, Callable[[], Any]] = {
            "hf_paged": lambda w=workload: Paged(w),  # type: ignore[misc]
            "stock": lambda w=workload: Stock(w, is_sorted=False),  # type: ignore[misc]
            "stock, sorted": lambda w=workload: Stock(w, is_sorted=True),  # type: ignore[misc]
            "generate_batch": lambda w=workload: GenerateBatch(w),  # type: ignore[misc]
            "vllm": lambda w=workload, n=name: VLLM(  # type: ignore[misc]
                w, arguments.vllm, arguments.dtype, arguments.threads, keeps_prefixes=n == "C"
            ),
        }
        has_beams = "num_beams" in workload.options
        chosen = [
            engine
            for engine in arguments.engines
            if not (engine == "vllm" and (arguments.vllm is None or has_beams))
            and not (engine == "generate_batch" and has_beams)  # it ignores num_beams
        ]
        engines = {engine: makers[engine]() for engine in ("hf_paged", *(e for e in chosen if e != "hf_paged"))}
        try:
            results[name] = measure(workload, engines, arguments.reps)
            if workload.options.get("do_sample") and "stock" in engines:
                results[name]["sampled_identical"] = check_sampled(workload, engines["hf_paged"], engines["stock"])
        finally:
            for engine in engines.values():
                engine.close()
        print("\n" + table(name, results[name]) + "\n", flush=True)
        if name == "C" and "B" in results:
            rates = [results[n]["engines"]["hf_paged"]["prompt_tokens_per_second"] for n in ("C", "B")]
            print(f"prompt throughput of C over B: {rates[0] / rates[1]:.2f}x\n", flush=True)
    if arguments.out:
        facts = {"command": " ".join(sys.argv), "threads": arguments.threads, "dtype": arguments.dtype}
        facts |= {"device": device_facts(torch.device("cpu")), "versions": versions()}
        stem = f"generate-{''.join(arguments.workload)}-{arguments.dtype}"
        Report(arguments.out / f"{stem}.json", facts | {"results": results}).save()


if __name__ == "__main__":
    main()
