"""`build_app`: the whole app as one `gr.Blocks`, around a hub; `launch` serves it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr

from .endpoints import add_endpoints
from .generation import Sampling
from .hub import WELCOME, Hub, Picture, names_of
from .limits import RefusedError
from .pacing import FULL_SPEED
from .pages.chat import chat_page
from .pages.guide import guide_events, guide_panel
from .pages.memory import memory_page
from .pages.plots import plots_page
from .pages.pool import pool_page
from .pages.pressure import pressure_page
from .pages.requests import requests_page
from .pages.samples import samples_page
from .pages.step import step_page
from .pages.viewer import EVERYWHERE, Ticker, Viewer, quietly
from .panels import Gauges, gauges_value
from .prompts import encode, openings
from .theme import CSS, make_theme
from .told import told
from .views import PoolView, past_value, pool_value

if TYPE_CHECKING:  # an extra of its own
    from hf_paged.server import RequestTable

SPEEDS = {"Full speed": FULL_SPEED, "20 steps/s": 20.0, "5 steps/s": 5.0}
WELCOME_TOKENS = 160


# Also: nothing is kept of what people do here, and no files are taken.
APPEARANCE: dict[str, Any] = {
    "theme": make_theme(),
    "css": CSS,
    "ssr_mode": False,
    "footer_links": ["api", "settings"],
    "show_error": True,
    "run_history": False,
    "mcp_server": False,
    "pwa": False,
    "max_file_size": "1kb",
}


def build_app(hub: Hub, welcome: bool = True, server: tuple[RequestTable, str] | None = None) -> gr.Blocks:
    """Builds the app.

    Args:
        hub: The engine and all about it.
        welcome: Whether the first page that is opened finds some stories being written, so that there is something to
            see.
        server: The requests of a server over the same engine, and its address.
    """
    with gr.Blocks(title="hf_paged: watch the paged cache work", analytics_enabled=False, fill_width=True) as app:
        last_run = gr.State(None)
        header = _header(hub)
        guide = guide_panel()
        with gr.Row():
            with gr.Column(scale=7, min_width=330), gr.Tabs(elem_id="tabs", overflow_behavior="wrap"):
                tabs: dict[str, gr.Tab] = {}
                with gr.Tab("Chat", elem_id="tab-chat") as tabs["chat"]:
                    guide_events(hub, guide, chat_page(hub))
                served = []
                if server is not None:
                    with gr.Tab("Requests", elem_id="tab-requests") as tabs["requests"]:
                        served.append(requests_page(*server, "requests"))
                with gr.Tab("Samples & beams", elem_id="tab-samples") as tabs["samples"]:
                    samples_page(hub, last_run)
                with gr.Tab("Pool", elem_id="tab-pool") as tabs["pool"]:
                    tables = pool_page("pool")
                with gr.Tab("Pressure", elem_id="tab-pressure") as tabs["pressure"]:
                    pressure_page(hub, last_run)
                with gr.Tab("Memory", elem_id="tab-memory") as tabs["memory"]:
                    memory_page(hub, last_run)
                with gr.Tab("Plots", elem_id="tab-plots") as tabs["plots"]:
                    plots = plots_page(hub, "plots")
                with gr.Tab("Step", elem_id="tab-step") as tabs["step"]:
                    step_page(hub)
            with gr.Column(scale=6, min_width=330, elem_id="pool-panel"):
                pool_view = PoolView(past_of(hub), elem_id="pool")
        pool = Viewer(
            EVERYWHERE, [pool_view], lambda picture: [pool_value(picture.snapshot, picture.names, picture.steps)]
        )
        Ticker(hub, [header, pool, tables, plots, *served], tabs, app)
        if welcome:
            greeter = Greeter(hub)
            app.load(greeter.greet, **quietly(queue=False))
        app.unload(_cancel_all_of(hub))
        add_endpoints(hub)
    app.queue(default_concurrency_limit=hub.limits.requests)
    return app


def _header(hub: Hub) -> Viewer:
    """The title, the speed, the gauges, and the banner of a paused engine."""
    first = hub.pacer.steps_per_second
    speeds = SPEEDS if first in SPEEDS.values() else {f"{first:g} steps/s": first} | SPEEDS
    with gr.Row(equal_height=True):
        gr.HTML(
            "<h1>hf_paged</h1><p>Keys and values in blocks behind <code>model.generate()</code>: every reply below is "
            "a request in one continuous batch; the blocks that it takes, shares and gives back are drawn as they "
            "are.</p>",
            elem_id="title",
        )
        speed = gr.Radio(
            list(speeds),
            label="Speed of the engine, for all visitors",
            elem_id="speed",
            scale=0,
            min_width=460,
        )
    gauges = Gauges(elem_id="gauges")
    with gr.Row(visible=False, elem_id="paused") as banner:
        gr.Markdown("The engine is paused: nothing is computed, for any visitor, until it is resumed or makes a step.")
        resume = gr.Button("Resume", variant="primary", elem_id="banner-resume", scale=0, min_width=120)

    @told
    async def on_speed(name: str) -> None:
        await asyncio.to_thread(hub.pacer.set_speed, speeds[name])

    @told
    async def on_resume() -> Any:
        await asyncio.to_thread(hub.pacer.resume)
        return gr.Row(visible=False)

    speed.input(on_speed, speed, None, **quietly())
    resume.click(on_resume, None, banner, **quietly(trigger_mode="once"))

    def values(picture: Picture) -> list[Any]:
        name = next((name for name, value in speeds.items() if value == hub.pacer.steps_per_second), None)
        return [gauges_value(picture), gr.update(visible=hub.pacer.is_paused), name]

    return Viewer(EVERYWHERE, [gauges, banner, speed], values, is_small=True)


def past_of(hub: Hub) -> Callable[[int], dict[str, Any] | None]:
    """What the pool's scrubber asks for."""

    def past(step: int) -> dict[str, Any] | None:
        frame = hub.frames.frame(step) if isinstance(step, int) else None
        return None if frame is None else past_value(frame, names_of(frame))

    return past


def _cancel_all_of(hub: Hub) -> Any:
    def on_unload(request: gr.Request) -> None:
        """The tab was closed: whatever it had running gives its blocks back."""
        if request.session_hash:
            hub.cancel(request.session_hash)

    return on_unload


@dataclass
class Greeter:
    """Has some stories written when the first page is opened, once."""

    hub: Hub
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_done: bool = False

    def greet(self) -> None:
        with self._lock:
            if self._is_done:
                return
            self._is_done = True
        hub = self.hub
        sampling = Sampling(max_new_tokens=min(WELCOME_TOKENS, hub.limits.new_tokens))
        try:
            for text in openings(hub.loaded)[:3]:
                hub.submit(WELCOME, "demo", encode(hub.loaded, text), **sampling.arguments(hub.loaded))
        except RefusedError:
            pass  # a pool too small for it: then there is nothing to see yet


def launch(app: gr.Blocks, host: str, port: int | None, share: bool = False, wait: bool = True) -> str:
    """Serves the app and returns its address.

    Args:
        app: Made by `build_app`.
        host: Where it listens.
        port: `None`: the first free one from 7860 on.
        share: Ask for a public link, through Gradio's servers.
        wait: Do not return before Ctrl-C.

    Raises:
        OSError: The port is not free.
    """
    _, url, _ = app.launch(
        server_name=host,
        server_port=port,
        share=share,
        **APPEARANCE,
        prevent_thread_lock=not wait,
        quiet=not wait,
    )
    return url
