"""`make_server`: the demo and OpenAI's HTTP interface in one process, over one model and its pool."""

from __future__ import annotations

import socket

import gradio as gr
import uvicorn

from hf_paged.server import create_app, limited_protocol

from .app import APPEARANCE, build_app
from .hub import Hub

PORTS = range(7860, 7960)  # one of them, where none is asked for


def make_server(hub: Hub, host: str, port: int | None, welcome: bool = True) -> tuple[uvicorn.Server, socket.socket]:
    """A server that isn't running yet, and the socket that it is to `run(sockets=[...])` on: `/v1` and the other paths
    of the interface, and the demo on all others.

    Args:
        hub: Of the demo; its pool stays as it is.
        host: Where it listens.
        port: `None`: the first free one from 7860 on.
        welcome: As in `build_app`.

    Raises:
        OSError: The port is not free.
    """
    listening = listen(host, PORTS if port is None else [port])
    api = create_app(
        hub.loaded.model, hub.loaded.tokenizer, model_name="tiny_lm" if hub.loaded.is_tiny else hub.loaded.name
    )
    page = build_app(hub, welcome, (api.state.requests, f"{address(listening)}/v1"))
    app = gr.mount_gradio_app(api, page, path="/", **APPEARANCE)
    http = limited_protocol(api.state.serving.settings)
    config = uvicorn.Config(
        app, http=http, ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=5
    )
    return uvicorn.Server(config), listening


def listen(host: str, ports: range | list[int]) -> socket.socket:
    """A socket that listens on the first of some ports that is free.

    Raises:
        OSError: None is.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen()  # another process may bind the port, too, until it is listened on
        except OSError:
            listening.close()
            if number == ports[-1]:
                raise
        else:
            return listening
    raise OSError("no port was given")


def address(listening: socket.socket) -> str:
    """Where it is to be found."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
