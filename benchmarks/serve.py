"""Users who stream over HTTP, beside the same requests through `model.paged.generate` in process.

    python benchmarks/serve.py --out /tmp/results
    python benchmarks/serve.py --random --users 64 --new-tokens 64 --reps 5      # a random Llama of 125M parameters
    python benchmarks/serve.py --model NAME_OR_PATH --users 64 --new-tokens 128 --reps 5

The server runs in this process, its users in one of their own, so the cores are shared. Both ways generate greedily,
all users equally many tokens, each from a prompt of its own behind an empty prefix cache; the ways alternate, figures
are medians. `first token` is how long the median user waits for it from the common start. The users are a bare asyncio
protocol that reads what came when all has come: what a client library and its parsing cost is not the server's. A third
way, `nothing`, sends events of the same size from an app that does nothing else, as fast as it can: what the web server
and the client take by themselves. CPU time is said beside, which other programs on the machine hardly change: of the
thread with the event loop, of this whole process (the model's steps, too) and of the users.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import versions
from threads import make_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import hf_paged
from hf_paged.server.run import make_server
from hf_paged.server.settings import ServerSettings

with hf_paged.needs("hf-paged[server]"):
    import uvicorn

NAME, HOST = "model", "127.0.0.1"
Figures = dict[str, Any]


class User(asyncio.Protocol):
    """One connection, one stream: takes bytes as they come, and reads them when all are there."""

    def __init__(self, request: bytes, started: float) -> None:
        self._request = request
        self._started = started
        self._parts: list[bytes] = []
        self.first = 0.0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: {" in data:
            self.first = time.perf_counter() - self._started
        self._parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)

    @property
    def num_tokens(self) -> int:
        """What the server says that there were."""
        reply = b"".join(self._parts)
        found = re.findall(rb'"completion_tokens":(\d+)', reply)
        if not reply.startswith(b"HTTP/1.1 200") or not found:
            raise RuntimeError(f"no stream: {reply[:500]!r}")
        return int(found[-1])


def users(port: int, prompts: list[list[int]], new_tokens: int, sender: Any) -> None:
    """All users, in a process of their own: sends what they saw."""

    def request(prompt: list[int]) -> bytes:
        body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps(body | {"stream_options": {"include_usage": True}})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: {len(content)}"
        return f"{head}\r\n\r\n{content}".encode()

    def same(user: User) -> User:
        return user

    async def run() -> tuple[list[User], float, float]:
        loop, requests = asyncio.get_running_loop(), [request(prompt) for prompt in prompts]
        started, cpu = time.perf_counter(), time.process_time()
        own = [User(each, started) for each in requests]
        await asyncio.gather(*(loop.create_connection(partial(same, user), HOST, port) for user in own))
        await asyncio.gather(*(user.ended for user in own))
        return own, time.perf_counter() - started, time.process_time() - cpu

    found, seconds, cpu = asyncio.run(run())
    count = sum(user.num_tokens for user in found)
    sender.send(
        {
            "tokens_per_second": count / seconds,
            "first_token_seconds": statistics.median(user.first for user in found),
            "client_cpu_us_per_token": cpu / count * 1e6,
        }
    )


def over_http(thread: threading.Thread, port: int, prompts: list[list[int]], new_tokens: int) -> Figures:
    """One run of all users against a server that runs on a thread of this process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=users, args=(port, prompts, new_tokens, sender))
    clocks = {"event_loop": time.pthread_getcpuclockid(thread.ident or 0), "process": time.CLOCK_PROCESS_CPUTIME_ID}
    before = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
    process.start()
    figures: Figures = receiver.recv()
    process.join()
    for name, clock in clocks.items():
        spent = time.clock_gettime(clock) - before[name]
        figures[f"{name}_cpu_us_per_token"] = spent / (len(prompts) * new_tokens) * 1e6
    return figures


def nothing(new_tokens: int) -> Any:
    """An app that sends as many events of the same size as a stream of ours, and does nothing else."""
    data = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": NAME}
    event = b"data: %s\n\n" % json.dumps(data | {"choices": [{"index": 0, "text": " word", "logprobs": None}]}).encode()
    usage = b'data: {"completion_tokens":%d}\n\n' % new_tokens

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(new_tokens):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": usage, "more_body": False})

    return app


@contextmanager
def running(server: uvicorn.Server) -> Iterator[tuple[threading.Thread, int]]:
    """A server on a thread, and its port."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield thread, server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def in_process(engine: hf_paged.Engine, prompts: list[list[int]], new_tokens: int, vocab_size: int) -> Figures:
    """The same requests through `engine.generate`."""
    started, cpu = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompts, max_new_tokens=new_tokens, do_sample=False, eos_token_id=vocab_size)
    count = sum(len(output.token_ids) for output in outputs)
    return {
        "tokens_per_second": count / (time.perf_counter() - started),
        "process_cpu_us_per_token": (time.process_time() - cpu) / count * 1e6,
    }


def random_llama(vocab_size: int) -> Any:
    """About 125M parameters, and no token that the tokenizer has no text for: a stream of those would be silent."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=768, intermediate_size=2048, num_hidden_layers=19, num_attention_heads=12,
        num_key_value_heads=4,
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
    model = hf_paged.patch(
        random_llama(len(tokenizer)) if given.random else AutoModelForCausalLM.from_pretrained(given.model).eval()
    )
    prompts = [prompt[0].tolist() for prompt in make_prompts(tokenizer, given.users)]
    vocab_size = model.get_input_embeddings().num_embeddings
    engine, new_tokens = model.paged, given.new_tokens
    runs: dict[str, list[Figures]] = {"server": [], "in process": [], "nothing": []}
    bare = uvicorn.Server(uvicorn.Config(nothing(new_tokens), host=HOST, port=0, log_level="warning", lifespan="off"))
    server = make_server(model, tokenizer, ServerSettings(model_name=NAME), HOST, 0, 10)
    with running(server) as at, running(bare) as at_bare:
        for rep in range(given.reps + 1):  # the first warms up
            for way in list(runs) if rep % 2 else list(runs)[::-1]:
                engine.reset_prefix_cache()
                if way == "in process":
                    runs[way].append(in_process(engine, prompts, new_tokens, vocab_size))
                else:
                    runs[way].append(over_http(*(at if way == "server" else at_bare), prompts, new_tokens))
        figures: Figures = {
            way: {name: statistics.median(run[name] for run in own[1:]) for name in own[0]} for way, own in runs.items()
        }
        share = figures["server"]["tokens_per_second"] / figures["in process"]["tokens_per_second"]
    report = figures | {
        "server_share": share,
        "random": given.random,
        "users": given.users,
        "new_tokens": given.new_tokens,
    }
    for way, own in figures.items():
        cpu = {name.partition("_cpu_")[0]: value for name, value in own.items() if "_cpu_" in name}
        words = ", ".join(f"{name} {value:,.0f}" for name, value in cpu.items())
        print(f"{way}: {own['tokens_per_second']:,.0f} tokens/s; microseconds of CPU a token: {words}")
    print(f"server / in process: {share:.2f}; first token {figures['server']['first_token_seconds']:.3f} s")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "serve.json").write_text(json.dumps(report | {"versions": versions()}, indent=1))


if __name__ == "__main__":
    main()
