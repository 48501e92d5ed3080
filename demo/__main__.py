"""The command line: `hf-paged demo`, and `python -m demo` in a checkout."""

from __future__ import annotations

import logging
import os
from typing import Annotated, NoReturn

# Before gradio is imported: nothing is asked of the network, or told to it.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import typer
from rich.console import Console
from transformers.utils import logging as transformers_logging

from hf_paged import needs

from .hub import Hub
from .limits import Limits
from .loading import load
from .pacing import FULL_SPEED

SLOW_MOTION = 20.0  # steps a second: the embedded model would be done before there was anything to see
DEFAULT_BLOCKS = 512

command = typer.Typer(add_completion=False, rich_markup_mode=None)
console = Console(stderr=True)


@command.command()
def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="NAME_OR_PATH",
            help="A causal language model, by name or folder; default: the story model that comes with the package.",
            show_default=False,
        ),
    ] = "",
    named: Annotated[str, typer.Option("--model", metavar="NAME_OR_PATH", help="The same, as an option.")] = "",
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than 127.0.0.1 can be reached from outside.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port; default: the first free one from 7860 on.")
    ] = None,
    server: Annotated[
        bool,
        typer.Option(
            "--server",
            help="Serve OpenAI's HTTP interface, too, on the same port: /v1; its requests are shown in a tab of their "
            "own. The pool keeps its size, and no key is asked for. Needs hf-paged[server].",
        ),
    ] = False,
    share: Annotated[bool, typer.Option("--share", help="Ask for a public link, through Gradio's servers.")] = False,
    num_blocks: Annotated[int, typer.Option(min=2, max=100_000, help="Blocks in the pool.")] = DEFAULT_BLOCKS,
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens in a block.")] = 16,
    preemption: Annotated[str, typer.Option(help="auto, swap or recompute.")] = "auto",
    speed: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1000,
            help="Model steps a second at the start, 0: no limit. Default: 20 for the story model, else 0.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="Such as cpu or cuda:0; default: cuda where there is one.")] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default: one for the story model, else torch's choice.")
    ] = None,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=16, help="Tokens of a prompt, the conversation included.")
    ] = 1536,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of a reply.")] = 256,
    max_requests: Annotated[int, typer.Option(min=1, max=512, help="Requests running or waiting at once.")] = 64,
    welcome: Annotated[
        bool, typer.Option("--welcome/--no-welcome", help="Have some stories written when the first page is opened.")
    ] = True,
) -> None:
    """Watch the paged cache of hf_paged work, in a browser."""
    transformers_logging.disable_progress_bar()  # of loading weights
    transformers_logging.set_verbosity_error()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        with needs("hf-paged[demo]"):
            from .app import build_app, launch
        if server:
            from .serving import address, make_server
        loaded = load(model or named or None, dtype, device)
        if threads or loaded.is_tiny:
            torch.set_num_threads(threads or 1)  # the small model's threads would only wait for each other
        limits = Limits(max_prompt_tokens, max_new_tokens, max_requests, positions=loaded.positions)
        if server and share:
            raise ValueError("--share is of the demo alone: not with --server")
        pool = {"num_blocks": num_blocks, "block_size": block_size, "preemption": preemption}
        hub = Hub(loaded, pool, limits, is_fixed=server)
    except (ValueError, ModuleNotFoundError) as error:  # of the model, of a setting, or of an extra
        _fail(error)
    except RuntimeError as error:  # no memory for the pool
        _fail(f"cannot run {loaded.name}: {str(error).splitlines()[0]}")
    pace = speed if speed is not None else SLOW_MOTION if loaded.is_tiny else FULL_SPEED
    hub.pacer.set_speed(pace)
    console.print(
        f"{loaded.name}: {num_blocks:,} blocks of {block_size} tokens, {_describe(pace)}", highlight=False, markup=False
    )
    try:
        if server:  # both, until Ctrl-C
            running, listening = make_server(hub, host, port, welcome)
            console.print(f"the demo: {address(listening)}   the interface: {address(listening)}/v1", highlight=False)
            running.run(sockets=[listening])
        else:
            launch(build_app(hub, welcome), host, port, share)
    except OSError as error:
        _fail(f"port {port} is not free: {error}" if port is not None else error)
    finally:
        hub.close()


def _describe(pace: float) -> str:
    return f"{pace:g} steps a second (the page has a switch)" if pace else "at full speed"


def _fail(error: object) -> NoReturn:
    """Ends the command with one sentence in place of a traceback."""
    console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code=2)


if __name__ == "__main__":
    command()
