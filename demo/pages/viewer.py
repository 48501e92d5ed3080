"""`Viewer`: components that follow the engine, and `Ticker`, which updates those that can be seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ..hub import Hub, Picture

TICK_SECONDS = 0.25
EVERYWHERE = ""  # as the tab of a viewer


@dataclass(frozen=True)
class Viewer:
    """Components of one tab.

    Attributes:
        tab: On which tab they are; `EVERYWHERE`: on all.
        outputs: The components.
        values: What they show of a picture, one value each.
        every: Updated on every so-many-th tick.
        is_small: Its values are compared with those sent last, one by one; otherwise all are sent when the picture is
            another one.
    """

    tab: str
    outputs: Sequence[Any]
    values: Callable[[Picture], Sequence[Any]]
    every: int = 1
    is_small: bool = False

    def updates(self, picture: Picture, tick: int, sent: Any) -> tuple[Sequence[Any], Any]:
        """Values for the outputs, or nothing where nothing is new; and what to compare the next ones with."""
        if self.is_small:
            values = self.values(picture)
            return [gr.skip() if sent and value == old else value for value, old in zip(values, sent or values)], values
        version = (picture.version, tick if self.every > 1 else 0)
        if tick % self.every or version == sent:
            return [gr.skip()] * len(self.outputs), sent
        return self.values(picture), version


def quietly(**more: Any) -> dict[str, Any]:
    """Arguments of an event of the page's own: no overlay while it runs, and not among the API's endpoints."""
    return {"show_progress": "hidden", "api_visibility": "private"} | more


def owner_of(request: gr.Request) -> str:
    """Whose request a click, or a call of the API, makes."""
    return request.session_hash or "api"


class Ticker:
    """One timer a browser, whose tick updates the components that are to be seen there, if there is anything new.

    What a browser has seen is its own state; the picture is one for all.
    """

    def __init__(self, hub: Hub, viewers: Sequence[Viewer], tabs: Mapping[str, gr.Tab], app: gr.Blocks) -> None:
        """Sets up the timer. Within the app's `gr.Blocks`.

        Args:
            hub: The engine.
            viewers: What there is to update.
            tabs: By name, the open one first.
            app: The app, whose loading is the first tick.
        """
        self._hub = hub
        self._viewers = viewers
        # Two states: a tick that is under way must not bring the tab back that was open when it began.
        tab = gr.State(next(iter(tabs)))
        seen = gr.State({"tick": 0, "sent": {}})
        outputs = [seen, *(output for viewer in viewers for output in viewer.outputs)]
        # Never behind a reply; a browser that is slow skips ticks.
        gr.Timer(TICK_SECONDS).tick(self._tick, [tab, seen], outputs, **quietly(queue=False, trigger_mode="once"))
        app.load(self._tick, [tab, seen], outputs, **quietly(queue=False))
        for name, component in tabs.items():
            component.select(lambda name=name: name, None, tab, **quietly(queue=False))

    def _tick(self, tab: str, seen: dict[str, Any]) -> list[Any]:
        picture, tick = self._hub.picture(), seen["tick"]
        sent = dict(seen["sent"])
        updates: list[Any] = []
        for number, viewer in enumerate(self._viewers):
            if viewer.tab not in (EVERYWHERE, tab):
                updates += [gr.skip()] * len(viewer.outputs)
                continue
            values, sent[number] = viewer.updates(picture, tick, sent.get(number))
            updates += values
        return [{"tick": tick + 1, "sent": sent}, *updates]
