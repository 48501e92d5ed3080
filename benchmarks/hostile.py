"""One hostile client beside one of good will: how long the server is held, and what memory stays.

    python benchmarks/hostile.py [--only NAME ...] [--seconds 6] [--out DIR]

Each attack is repeated without a pause by a process of its own, at the full size that the server's defaults let
through or beyond it. Meanwhile `/health` is asked every 10 ms and another user sends requests of one token. Their own
time is measured beside a process that does nothing but keep a core busy; for attacks by what is generated, beside the
same rows without what the attack asks for. Run it alone on a quiet machine.

A row holds if `/health` waits 0.5 s at most, the median of the other user's requests is at most twice its own, and the
server's memory (its processes together) is back within 100 MiB after it. The exit status is 1 if one doesn't.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

COMPLETION, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MOST_HEALTH, MOST_RATIO, MOST_MIB, NUM_REQUESTS = 0.5, 2.0, 100, 20
SAID = {"role": "user", "content": "a"}
# What makes of an attack the same rows in the engine, whose steps everybody shares, without the work on their answer.
PLAIN = {
    "usage": {"stream": None, "stream_options": None},
    "logprobs": {"logprobs": None, "top_logprobs": None},
    "echo": {"echo": None, "logprobs": None},
}


def fields(count: int, value: Any) -> dict[str, Any]:
    return {f"field{number}": value for number in range(count)}


def grammar(length: int) -> str:
    return "start: a0\n" + "\n".join(f'a{n}: "x" a{n + 1} | "y"' for n in range(length)) + f'\na{length}: "z"'


Body = Callable[[], tuple[str, dict[str, Any] | bytes]]
# Large bodies, answers, prompts and grammars.
BODIES: dict[str, Body] = {
    "content": lambda: (CHAT, {"messages": [{"role": "user", "content": [{}] * 1_000_000}]}),
    "content within": lambda: (CHAT, {"messages": [{"role": "user", "content": [{}] * 1000}] * 10}),
    "tool_calls": lambda: (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * 1_000_000}]}),
    "choice": lambda: (COMPLETION, {"prompt": "a", "structured_outputs": {"choice": [""] * 250_000}}),
    "unknown fields": lambda: (COMPLETION, {"prompt": "a", **fields(50_000, 1)}),
    "logit_bias": lambda: (COMPLETION, {"prompt": "a", "logit_bias": fields(50_000, 1)}),
    "messages": lambda: (CHAT, {"messages": [SAID] * 2048, "max_tokens": 1}),
    "token ids": lambda: (COMPLETION, {"prompt": [5] * 260_000, "max_tokens": 1}),
    "nested": lambda: (COMPLETION, b'{"prompt": "a", "logit_bias": ' + b"[" * 4_000_000),
    "4 MiB of text": lambda: (COMPLETION, {"prompt": "word, " * 650_000, "max_tokens": 1}),
    "usage": lambda: (
        COMPLETION,
        {"prompt": [f"The door {n}" for n in range(64)], "n": 128, "max_tokens": 4, "ignore_eos": True, "stream": True,
         "stream_options": {"continuous_usage_stats": True}},
    ),
    "logprobs": lambda: (
        CHAT, {"messages": [SAID], "n": 128, "max_tokens": 230, "logprobs": True, "top_logprobs": 20,
               "ignore_eos": True},
    ),
    "echo": lambda: (
        COMPLETION, {"prompt": "The door is open and " * 300, "n": 16, "max_tokens": 1, "echo": True, "logprobs": 20},
    ),
    "prompt": lambda: (COMPLETION, {"prompt": "word " * 12_000, "max_tokens": 1}),
    "prompts": lambda: (COMPLETION, {"prompt": ["word " * 500] * 512, "max_tokens": 1}),
    "prompts beyond": lambda: (COMPLETION, {"prompt": ["word " * 100] * 4000, "max_tokens": 1}),
    "choices": lambda: (
        COMPLETION,
        {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": [f"c{n}" for n in range(150_000)]}},
    ),
    "choices within": lambda: (
        COMPLETION,
        {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": [f"c{n}" for n in range(5_000)]}},
    ),
    "deep grammar": lambda: (
        COMPLETION, {"prompt": "a", "max_tokens": 1, "structured_outputs": {"grammar": grammar(2000)}},
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the attacker


def send_bodies(port: int, path: str, data: bytes) -> Iterator[int]:
    """Sends one body again and again; gives the status of each answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    while True:
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            while reply.read(1 << 20):
                pass
            yield reply.status
        except (OSError, http.client.HTTPException):
            connection.close()
            yield 0


def send_heads(port: int) -> Iterator[int]:
    """Sends heads of 32 MiB."""
    part = b"X-Field: " + b"a" * 65_000 + b"\r\n"
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
            for _ in range(512):
                connection.sendall(part)
            connection.recv(1000)
        yield 0


def hold_heads(port: int) -> Iterator[int]:
    """Holds 150 connections whose heads never end, and opens each again that is closed."""
    held: list[socket.socket] = []
    while True:
        for connection in list(held):
            try:
                connection.sendall(b"X-More: a\r\n")
            except OSError:
                held.remove(connection)
                connection.close()
        while len(held) < 150:
            held.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            held[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
        time.sleep(0.2)
        yield 0


HEADS = {"long heads": send_heads, "unfinished heads": hold_heads}


def attack(name: str, port: int) -> None:
    """Runs until it is killed; says what it has done."""
    if name == "nothing":
        while True:
            pass
    if name in HEADS:
        work = HEADS[name](port)
    else:
        path, body = BODIES[name.removeprefix("plain ")]()
        if name.startswith("plain "):
            body |= PLAIN[name.removeprefix("plain ")]  # type: ignore[operator]
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        work = send_bodies(port, path, data)
    for status in work:
        print(status, flush=True)


# ------------------------------------------------------------------------------------------------------- the server


class Server:
    """A server in a process of its own."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "hf_paged", "serve", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self.is_up():
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended: {' '.join(command)}")
            time.sleep(0.2)

    def is_up(self) -> bool:
        with suppress(OSError):
            return self.get("/health") == 200
        return False

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status

    def memory(self) -> float:
        """MiB of all its processes."""
        own = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in [own, *own.children(recursive=True)]) / (1 << 20)

    def one_token(self) -> list[float]:
        """Seconds of a user's requests of one token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        seconds = []
        for number in range(NUM_REQUESTS):
            body = json.dumps({"prompt": f"The door {number}", "max_tokens": 1})
            start = time.perf_counter()
            connection.request("POST", COMPLETION, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            assert reply.status == 200, reply.status
            seconds.append(time.perf_counter() - start)
        return seconds

    @contextmanager
    def watched(self) -> Iterator[list[float]]:
        """Asks `/health` meanwhile; the list gets what it waits."""
        waits: list[float] = []
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.01):
                start = time.perf_counter()
                assert self.get("/health") == 200
                waits.append(time.perf_counter() - start)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield waits
        finally:
            is_over.set()
            thread.join()


def measure(server: Server, name: str, seconds: float) -> dict[str, Any]:
    """What an attack does to a server."""
    command = [sys.executable, __file__, "--attack", name, "--port", str(server.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker, server.watched() as waits:
        assert attacker.stdout is not None
        time.sleep(1.0)  # it has begun
        start = time.perf_counter()
        took = server.one_token()
        while time.perf_counter() - start < seconds:
            took += server.one_token()
        attacker.kill()
        statuses = attacker.stdout.read().split()
    return {
        "health_longest_s": max(waits),
        "one_token_median_s": statistics.median(took),
        "statuses": {int(status): statuses.count(status) for status in sorted(set(statuses))},
    }


def settled(server: Server, most: float) -> float:
    """The server's memory, once it is below a limit, or after some seconds."""
    for _ in range(20):
        if server.memory() <= most:
            break
        time.sleep(0.5)
    return server.memory()


def run(names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Measures attacks, each on a server of its own that has served before."""
    rows = []
    print(f"{'attack':18} {'health':>7} {'one token':>10} {'own':>7} {'ratio':>6} {'memory':>8}  answers")
    for name in names:
        server = Server()
        try:
            server.one_token()
            beside = f"plain {name}" if name in PLAIN else "nothing"
            own = measure(server, beside, seconds / 2)["one_token_median_s"]
            before = server.memory()
            row = {"attack": name, **measure(server, name, seconds), "own_median_s": own}
            row["ratio"] = row["one_token_median_s"] / own
            row["memory_mib"] = settled(server, before + MOST_MIB) - before
        finally:
            server.process.kill()
            server.process.wait()
        row["holds"] = (
            row["health_longest_s"] <= MOST_HEALTH and row["ratio"] <= MOST_RATIO and row["memory_mib"] <= MOST_MIB
        )
        rows.append(row)
        print(
            f"{name:18} {row['health_longest_s']:6.3f}s {row['one_token_median_s'] * 1e3:8.1f}ms "
            f"{own * 1e3:5.1f}ms {row['ratio']:6.2f} {row['memory_mib']:+7.0f}M  {row['statuses']} "
            f"{'' if row['holds'] else 'DOES NOT HOLD'}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*BODIES, *HEADS], default=[*BODIES, *HEADS])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each attack, at least")
    parser.add_argument("--out", type=Path, help="a folder for hostile.json")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.attack:
        return attack(arguments.attack, arguments.port)
    rows = run(arguments.only, arguments.seconds)
    if arguments.out is not None:
        import torch
        from common import Report, device_facts, versions

        about = {"machine": device_facts(torch.device("cpu")), "versions": versions()}
        Report(arguments.out / "hostile.json", about | {"rows": rows}).save()
    sys.exit(not all(row["holds"] for row in rows))


if __name__ == "__main__":
    main()
