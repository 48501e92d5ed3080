"""Small panels that the browser draws as text: gauges, texts side by side, tables that change, notes.

As the views of `views.py`: a `gr.HTML` whose value is plain data, and nothing in it is ever markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gradio as gr

from .hub import Picture
from .views import clean_text, view

MAX_TEXT = 8000  # characters of a text


def Gauges(**kwargs: Any) -> gr.HTML:
    """The header's gauges. Its value is made by `gauges_value`."""
    return view("gauges", [], kwargs)


def Cards(**kwargs: Any) -> gr.HTML:
    """Texts side by side. Its value is made by `cards_value`."""
    return view("cards", [], kwargs)


def Table(**kwargs: Any) -> gr.HTML:
    """A table that changes. Its value is made by `table_value`."""
    return view("table", [], kwargs)


def Notes(**kwargs: Any) -> gr.HTML:
    """Notes, one below the other. Its value is made by `notes_value`."""
    return view("notes", [], kwargs)


def gauges_value(picture: Picture) -> dict[str, Any]:
    """What `Gauges` draws: blocks held and cached of how many, and gauges `[name, text, meaning]`."""
    blocks, stats, last = picture.snapshot["blocks"], picture.stats, picture.last
    hit_rate, new_blocks = (last.hit_rate, last.blocks_per_token) if last is not None else (None, None)
    alone = 1 / picture.snapshot["block_size"]
    return {
        "num_blocks": len(blocks) or stats.num_blocks,
        "held": sum(count > 0 for count in blocks),
        "cached": sum(count < 0 for count in blocks),
        "gauges": [
            ["running", f"{stats.num_running:,}", "Sequences with keys and values in the pool."],
            ["waiting", f"{stats.num_waiting:,}", "Requests that hold no block: not started, or to be computed again."],
            ["swapped", f"{stats.num_swapped:,}", "Sequences whose blocks are in CPU memory."],
            ["tokens/s", f"{last.tokens_per_second:,.0f}" if last is not None else "0", "Of all requests together."],
            [
                "blocks/token",
                "–" if new_blocks is None else f"{new_blocks:.3f}",
                f"New blocks for each new token, over ten seconds: how well sharing works. A lone reply takes "
                f"{alone:.3f} and its prompt's blocks; samples, beams and prompts that share blocks take less.",
            ],
            ["prefix hits", "–" if hit_rate is None else f"{hit_rate:.0%}", "Prompt tokens found in the cache."],
            ["preemptions", f"{stats.num_preemptions:,}", "Sequences that lost their blocks to others."],
        ],
    }


def cards_value(cards: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """What `Cards` draws, from a title, a text and a note of each."""
    return {
        "cards": [[clean_text(title), clean_text(text, MAX_TEXT), clean_text(note, 200)] for title, text, note in cards]
    }


def table_value(
    columns: Sequence[str] = (), rows: Iterable[Sequence[Any]] = (), numbers: Iterable[int] = (), empty: str = ""
) -> dict[str, Any]:
    """What `Table` draws.

    Args:
        columns: Their names.
        rows: A key first, that no other row has, and then a cell for each column.
        numbers: Columns that are numbers, counted from 0.
        empty: What to type into a shell, where there is no row yet.
    """
    return {
        "columns": list(columns),
        "rows": [[clean_text(str(cell), 400) for cell in row] for row in rows],
        "numbers": list(numbers),
        "empty": empty,
    }


def notes_value(notes: Iterable[tuple[Any, str, Sequence[str]]], empty: str = "") -> dict[str, Any]:
    """What `Notes` draws, from a key, a headline and details of each; or else what to say when there are none."""
    return {
        "notes": [
            [str(key), clean_text(head, 600), [clean_text(d, 600) for d in details]] for key, head, details in notes
        ],
        "empty": empty,
    }
