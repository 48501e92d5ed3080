"""Runs the app under uvicorn, which drains at its end."""

from __future__ import annotations

import ctypes
import gc
import logging
import socket
import sys
from contextlib import suppress
from typing import Any

from hf_paged import needs
from hf_paged.server.app import create_app
from hf_paged.server.heads import limited_protocol
from hf_paged.server.logs import JsonLines
from hf_paged.server.serving import Serving
from hf_paged.server.settings import ServerSettings

with needs("hf-paged[server]"):
    import uvicorn


class DrainingServer(uvicorn.Server):
    """Says that it isn't ready as soon as it is to end."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens, which `--port 0` leaves open."""
        await super().startup(sockets)
        if self.started:
            address = self.servers[0].sockets[0].getsockname()
            name = self._serving.settings.model_name
            logging.getLogger("hf_paged.server").info("serving %s on http://%s:%d", name, self.config.host, address[1])

    async def on_tick(self, counter: int) -> bool:
        """Gives memory of large requests back, every five seconds."""
        if counter % 50 == 0:
            await self._serving.in_thread(_trim)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal: what runs may end by itself, nothing new is taken."""
        self._serving.is_draining = True
        super().handle_exit(sig, frame)


def _trim() -> None:
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def make_server(
    model: Any,
    tokenizer: Any,
    settings: ServerSettings,
    host: str,
    port: int,
    drain_seconds: int,
    processor: Any = None,
) -> DrainingServer:
    """A server that isn't running yet; `run()` runs it until a signal comes, or `should_exit` is set."""
    app = create_app(model, tokenizer, settings, processor=processor)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=limited_protocol(settings),
        h11_max_incomplete_event_size=settings.max_head_bytes,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_seconds,
    )
    return DrainingServer(config, app.state.serving)


def run_server(*given: Any) -> None:
    """Serves until a signal comes; takes what `make_server` does. The log goes to stderr, in lines of JSON."""
    lines = logging.StreamHandler()
    lines.setFormatter(JsonLines())
    logging.basicConfig(handlers=[lines])
    logging.getLogger("hf_paged.server").setLevel(logging.INFO)
    server = make_server(*given)
    sys.setswitchinterval(0.001)  # threads that prepare requests soon give the interpreter back
    gc.collect()
    gc.freeze()  # the model and its libraries are here to stay: collections needn't look at them
    server.run()
