"""Users who stream over HTTP, beside the same requests through `model.paged.generate` in process.

    python benchmarks/serve.py --out /tmp/results
    python benchmarks/serve.py --random --users 64 --new-tokens 64 --reps 5      # a random Llama of 125M parameters
    python benchmarks/serve.py --model NAME_OR_PATH --users 64 --new-tokens 128 --reps 5

The server runs in this process, its users in one of their own, so the cores are shared. Both ways generate greedily,
all users equally many tokens, each from a prompt of its own behind an empty prefix cache; the ways alternate, figures
are medians. `first token` is how long the median user waits for it from the common start. Then, if they are installed,
`vllm bench serve` and `guidellm` are run against the server; what they print is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import torch
from common import versions
from threads import make_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import hf_paged
from hf_paged.server.run import make_server
from hf_paged.server.settings import ServerSettings

NAME = "model"
Figures = dict[str, Any]


def users(url: str, prompts: list[list[int]], new_tokens: int, sender: Any) -> None:
    """All users, in a process of their own; sends seconds to each first token, seconds in all, and tokens."""

    async def user(client: httpx.AsyncClient, prompt: list[int]) -> tuple[float, int]:
        first, count = 0.0, 0
        body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - started
                    count = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", count)
        return first, count

    async def run() -> list[tuple[float, int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
            return await asyncio.gather(*(user(client, prompt) for prompt in prompts))

    started = time.perf_counter()
    found = asyncio.run(run())
    sender.send(([first for first, _ in found], time.perf_counter() - started, sum(count for _, count in found)))


def over_http(engine: hf_paged.Engine, url: str, prompts: list[list[int]], new_tokens: int) -> Figures:
    """One run of all users."""
    engine.reset_prefix_cache()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=users, args=(url, prompts, new_tokens, sender))
    process.start()
    firsts, seconds, count = receiver.recv()
    process.join()
    return {"tokens_per_second": count / seconds, "first_token_seconds": statistics.median(firsts)}


def in_process(engine: hf_paged.Engine, prompts: list[list[int]], new_tokens: int, vocab_size: int) -> Figures:
    """The same requests through `engine.generate`."""
    engine.reset_prefix_cache()
    started = time.perf_counter()
    outputs = engine.generate(prompts, max_new_tokens=new_tokens, do_sample=False, eos_token_id=vocab_size)
    count = sum(len(output.token_ids) for output in outputs)
    return {"tokens_per_second": count / (time.perf_counter() - started)}


def other_clients(url: str, model: str, num_users: int, new_tokens: int) -> dict[str, str]:
    """What the benchmark clients that are installed print."""
    commands = {
        "vllm": ["vllm", "bench", "serve", "--base-url", url, "--model", NAME, "--tokenizer", model, "--dataset-name",
                 "random", "--random-input-len", "32", "--random-output-len", str(new_tokens), "--ignore-eos",
                 "--num-prompts", str(num_users), "--max-concurrency", str(num_users)],
        "guidellm": ["guidellm", "run", "--backend", f"kind=openai_http,target={url},model={NAME}",
                     "--profile", f"kind=concurrent,streams={num_users}",
                     "--constraint", f"kind=max_requests,count={2 * num_users}",
                     "--tokenizer", f"kind=huggingface_auto,model={model}",
                     "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={new_tokens}",
                     "--output", "kind=console", "--disable-progress"],
    }  # fmt: skip
    found = {}
    for name, command in commands.items():
        if shutil.which(name):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            found[name] = result.stdout[-8000:] + (result.stderr[-2000:] if result.returncode else "")
    return found


def random_llama() -> Any:
    """About 125M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50304, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def main() -> None:
    tiny = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(tiny), help="name or folder; default: the embedded one")
    parser.add_argument("--random", action="store_true", help="random weights: a Llama of 125M, with that tokenizer")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--out", type=Path, help="folder for serve.json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = hf_paged.patch(random_llama() if given.random else AutoModelForCausalLM.from_pretrained(given.model).eval())
    prompts = [prompt[0].tolist() for prompt in make_prompts(tokenizer, given.users)]
    server = make_server(model, tokenizer, ServerSettings(model_name=NAME), "127.0.0.1", 0, 10)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    vocab_size = model.get_input_embeddings().num_embeddings
    runs: dict[str, list[Figures]] = {"server": [], "in process": []}
    for rep in range(given.reps + 1):  # the first warms up
        for way in list(runs) if rep % 2 else list(runs)[::-1]:
            if way == "server":
                runs[way].append(over_http(model.paged, url, prompts, given.new_tokens))
            else:
                runs[way].append(in_process(model.paged, prompts, given.new_tokens, vocab_size))
    figures: Figures = {
        way: {name: statistics.median(run[name] for run in own[1:]) for name in own[0]} for way, own in runs.items()
    }
    share = figures["server"]["tokens_per_second"] / figures["in process"]["tokens_per_second"]
    others = other_clients(url, given.model, given.users, given.new_tokens)
    server.should_exit = True
    thread.join()
    report = figures | {
        "server_share": share,
        "random": given.random,
        "users": given.users,
        "new_tokens": given.new_tokens,
        "others": others,
    }
    for way in runs:
        print(f"{way}: {figures[way]['tokens_per_second']:,.0f} tokens/s")
    print(f"server / in process: {share:.2f}; first token {figures['server']['first_token_seconds']:.3f} s")
    for name, text in others.items():
        print(f"\n{name}:\n{text}")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "serve.json").write_text(json.dumps(report | {"versions": versions()}, indent=1))


if __name__ == "__main__":
    main()
