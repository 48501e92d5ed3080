"""`Viewer`: components that follow the engine, and `Ticker`, which updates those that somebody can see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from demo.hub import Hub, Picture

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
    """

    tab: str
    outputs: Sequence[Any]
    values: Callable[[Picture], Sequence[Any]]
    every: int = 1


def quietly(**more: Any) -> dict[str, Any]:
    """Arguments of an event of the page's own: no overlay while it runs, and not among the API's endpoints."""
    return {"show_progress": "hidden", "api_visibility": "private"} | more


class Ticker:
    """One timer a browser, whose tick updates the components that are to be seen there, if there is anything new.

    What a browser has seen is its own state; the picture is everybody's.

    Attributes:
        seen: What this browser shows: the open tab, ticks since it was opened, and the version of each viewer.
        outputs: What `tick` returns: that, and all viewers' components.
    """

    def __init__(self, hub: Hub, viewers: Sequence[Viewer], first_tab: str) -> None:
        """Sets up the timer. Within the app's `gr.Blocks`."""
        self._hub = hub
        self._viewers = viewers
        self.seen = gr.State({"tab": first_tab, "tick": 0, "versions": {}})
        self.outputs = [self.seen, *(output for viewer in viewers for output in viewer.outputs)]
        gr.Timer(TICK_SECONDS).tick(
            self.tick,
            self.seen,
            self.outputs,
            # Never behind somebody's reply; a browser that is slow skips ticks.
            **quietly(queue=False, trigger_mode="once"),
        )

    def follow(self, tabs: Sequence[tuple[str, gr.Tab]]) -> None:
        """Notes which tab is open."""
        for name, tab in tabs:
            tab.select(
                lambda seen, name=name: seen | {"tab": name, "tick": 0},
                self.seen,
                self.seen,
                **quietly(queue=False),
            )

    def tick(self, seen: dict[str, Any]) -> list[Any]:
        """Updates for `outputs`."""
        picture = self._hub.picture()
        updates: list[Any] = []
        shown = dict(seen["versions"])
        for number, viewer in enumerate(self._viewers):
            is_due = viewer.tab in (EVERYWHERE, seen["tab"]) and seen["tick"] % viewer.every == 0
            version = (picture.version, viewer.every > 1 and seen["tick"])
            if not is_due or shown.get(number) == version:
                updates += [gr.skip()] * len(viewer.outputs)
                continue
            shown[number] = version
            updates += viewer.values(picture)
        return [seen | {"tick": seen["tick"] + 1, "versions": shown}, *updates]
