"""The tab of the pool: block tables, queues and events, beside the blocks that every tab shows."""

from __future__ import annotations

import gradio as gr

from ..views import BlockTables, EventLog, events_value, tables_value
from .viewer import Viewer


def pool_page(tab: str) -> Viewer:
    """Builds the tab of this name."""
    gr.Markdown(
        "Every request has a **block table**: it says in which physical block of the pool its first tokens lie, in "
        "which the next ones, and so on. Click a request to see its blocks alone."
    )
    tables = BlockTables(elem_id="tables")
    events = EventLog(elem_id="events")
    return Viewer(
        tab,
        [tables, events],
        lambda picture: [
            tables_value(picture.snapshot, picture.names),
            events_value(picture.snapshot, picture.names),
        ],
    )
