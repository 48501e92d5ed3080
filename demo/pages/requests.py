"""The tab of a server's requests: what its clients have running, and the last that ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import gradio as gr

from ..panels import Table, table_value
from .viewer import Viewer

if TYPE_CHECKING:  # an extra of its own
    from hf_paged.server import RequestTable, ServedRequest

SHOWN = 40
COLUMNS = ("Request", "Of", "State", "Texts", "Prompt", "New", "First token", "Seconds", "Ended by")
NUMBERS = (3, 4, 5, 6, 7)


def requests_page(table: RequestTable, address: str, tab: str) -> Viewer:
    """Builds the tab of this name.

    Args:
        table: The server's.
        address: Where its interface is, to be shown.
        tab: Its name.
    """
    gr.Markdown(
        f"OpenAI's interface is at `{address}`, over the model and the pool of this page: its requests share steps and "
        "blocks with those made here. Neither prompts nor texts are shown."
    )
    rows = Table(elem_id="requests-table", value=requests_value([], address))
    return Viewer(tab, [rows], lambda _: [requests_value(table.rows()[:SHOWN], address)], is_small=True)


def requests_value(rows: Iterable[ServedRequest], address: str) -> dict[str, Any]:
    """What the table shows; without requests, how to send one."""
    body = '{"prompt": "The old king of", "max_tokens": 100, "stream": true}'
    line = f"curl -N {address}/completions -H 'Content-Type: application/json' -d '{body}'"
    return table_value(COLUMNS, (_cells(row) for row in rows), NUMBERS, empty=line)


def _cells(row: ServedRequest) -> list[Any]:
    first = row.first_token_seconds
    return [
        row.label,
        row.label,
        row.path.removeprefix("/v1/") + (", streamed" if row.is_streamed else ""),
        row.state,
        f"{row.num_texts:,}",
        f"{row.num_prompt_tokens:,}",
        f"{row.num_tokens:,}",
        "–" if first is None else f"{first:.2f} s",
        f"{row.seconds:.1f}",
        ", ".join(sorted({reason for reason in row.finish_reasons if reason is not None})),
    ]
