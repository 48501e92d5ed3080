"""The views that the browser draws: the pool, block tables and queues, events, the beam tree, memory maps.

Each is a `gr.HTML` whose value is plain data, made here by a pure function and drawn by the scripts in `static/`. The
data is compact, because the pool is sent several times a second: blocks are written as text, `"17+3 5"` for 17, 18, 19,
20 and 5, and what is nested as JSON inside the JSON, because Gradio's frontend wraps and compares every number that it
sees. No text is escaped here: the scripts put it into the page as text nodes only.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from .sentences import describe_event

STATIC = Path(__file__).parent / "static"
MAX_EVENTS = 300  # sent at once; the browser picks those it hasn't shown
MAX_STEPS = 60  # among the events: the most frequent kind, and the least telling
MAX_HAPPENED = 40  # events of one step
MAX_LABEL = 60  # characters
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

# ---------------------------------------------------------------------------------------------------------- components


def PoolView(past: Callable[[int], dict[str, Any] | None], **kwargs: Any) -> gr.HTML:
    """Every block a cell, and a scrubber over the last steps. Its value is made by `pool_value`; the browser calls
    `past` for the `past_value` after a step.
    """
    return view("pool", ["cells.js", "grid.js"], {"server_functions": [past]} | kwargs)


def BlockTables(**kwargs: Any) -> gr.HTML:
    """Each request's logical and physical blocks, and the queues. Its value is made by `tables_value`."""
    return view("tables", [], kwargs)


def EventLog(**kwargs: Any) -> gr.HTML:
    """What happened, newest first. Its value is made by `events_value`."""
    return view("events", [], kwargs)


def BeamTree(**kwargs: Any) -> gr.HTML:
    """A beam search from left to right. Its value is made by `beam_tree_value`."""
    return view("beams", ["tree.js"], kwargs)


def SourceView(**kwargs: Any) -> gr.HTML:
    """A source and the beams that read it, block by block. Its value is made by `source_value`."""
    return view("source", [], kwargs)


def MemoryMaps(**kwargs: Any) -> gr.HTML:
    """Reserved and used memory of several runs, to one scale. Its value is made by `memory_maps_value`."""
    return view("memory", [], kwargs)


def view(name: str, scripts: Sequence[str], kwargs: Mapping[str, Any]) -> gr.HTML:
    """A component whose markup doesn't depend on its value: Gradio never builds it anew, the script updates it.

    Args:
        name: Of its script and its style.
        scripts: Others that come before.
        kwargs: Of the component.
    """
    script = "\n".join(map(_read, ("shared.js", *scripts, f"{name}.js")))
    style = "\n".join(map(_read, ("shared.css", f"{name}.css")))
    return gr.HTML(
        **{"elem_classes": ["kv-html"], "show_label": False} | kwargs,
        html_template=f'<div class="kv-view kv-view-{name}"></div>',
        css_template=style,
        js_on_load=script,
        apply_default_css=False,
    )


def _read(file: str) -> str:
    return (STATIC / file).read_text(encoding="utf-8")


# -------------------------------------------------------------------------------------------------------------- values


def pool_value(snapshot: Mapping[str, Any], names: Mapping[int, str], steps: Sequence[int] = ()) -> dict[str, Any]:
    """What `PoolView` draws.

    Args:
        snapshot: `engine.snapshot()`.
        names: What to call each sequence group, by id.
        steps: Those that can be gone back to, oldest first.

    Returns:
        Sizes; `refs`: a character a block, "." free, "," free and cached, the ref count in base 36, "+" for more;
        `hashes`: 4 bytes a block, zeros without a hash, in base64; `groups` (JSON) with their `sequences`, each
        `[id, num_tokens, num_computed_tokens, blocks]`, the tables of several groups of layers apart by "|".
    """
    return {
        "num_blocks": snapshot["num_blocks"],
        "block_size": snapshot["block_size"],
        "num_swap_blocks": snapshot["num_swap_blocks"],
        "bytes_per_block": snapshot.get("bytes_per_block", 0),
        "num_steps": snapshot.get("num_steps", 0),
        "is_paused": snapshot.get("is_paused", False),
        "steps": encode_blocks(steps),
        "refs": "".join(map(_ref_character, snapshot["blocks"])),
        "hashes": _encode_hashes(snapshot.get("hashes", [])),
        "groups": _dump(
            {
                "id": group["id"],
                "label": _label(group["id"], names, group.get("request_id")),
                "status": group["status"],
                "sequences": [
                    [
                        each["id"],
                        each["num_tokens"],
                        each["num_computed_tokens"],
                        "|".join(map(encode_blocks, each["block_tables"])),
                    ]
                    for each in group["sequences"]
                ],
            }
            for group in snapshot["groups"]
        ),
    }


def past_value(snapshot: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """What `PoolView` draws of a step that is over: the pool after it, and what happened, a sentence an event."""
    tell = _teller(snapshot, names)
    events = [event for event in snapshot["events"] if event["kind"] != "step"][:MAX_HAPPENED]
    return pool_value(snapshot, names) | {"happened": [tell(event) for event in events]}


def tables_value(snapshot: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """What `BlockTables` draws: groups (JSON) with sequences `[id, num_tokens, num_computed_tokens, num_prompt_tokens,
    num_cached_tokens, blocks]`, the queues as ids of groups, and the blocks that several tables hold.
    """
    return {
        "block_size": snapshot["block_size"],
        "shared": encode_blocks([block for block, refs in enumerate(snapshot["blocks"]) if refs > 1]),
        "waiting": list(snapshot["waiting"]),
        "running": list(snapshot["running"]),
        "swapped": list(snapshot["swapped"]),
        "groups": _dump(
            {
                "id": group["id"],
                "label": _label(group["id"], names, group.get("request_id")),
                "status": group["status"],
                "idle": group["is_idle"],
                "priority": group["priority"],
                "sequences": [
                    [
                        each["id"],
                        each["num_tokens"],
                        each["num_computed_tokens"],
                        each.get("num_prompt_tokens", 0),
                        each.get("num_cached_tokens", 0),
                        encode_blocks(each["block_table"]),
                    ]
                    for each in group["sequences"]
                ],
            }
            for group in snapshot["groups"]
        ),
    }


def events_value(snapshot: Mapping[str, Any], names: Mapping[int, str], limit: int = MAX_EVENTS) -> dict[str, Any]:
    """What `EventLog` draws: the newest events, oldest first, as JSON: `[id, kind, group, step, time, sentence]`."""
    tell = _teller(snapshot, names)
    chosen: list[list[Any]] = []
    num_steps = 0
    for event in reversed(snapshot["events"]):
        if event["kind"] == "step":
            num_steps += 1
            if num_steps > MAX_STEPS:
                continue
        if len(chosen) == limit:
            break
        when = [event["step"], round(event["time"], 1)]
        chosen.append([event["id"], event["kind"], event.get("group"), *when, tell(event)])
    return {"events": _dump(chosen[::-1])}


def _teller(snapshot: Mapping[str, Any], names: Mapping[int, str]) -> Callable[[Mapping[str, Any]], str]:
    """What makes a sentence of an event of a snapshot."""
    num_sequences = {group["id"]: len(group["sequences"]) for group in snapshot["groups"]}

    def tell(event: Mapping[str, Any]) -> str:
        group = event.get("group")
        who = "" if group is None else _label(group, names, event.get("request_id"))
        return describe_event(event, who, num_sequences.get(group, 1) > 1)

    return tell


def beam_tree_value(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What `BeamTree` draws: nodes as `[id, parent, token, score, step, rank]`.

    Args:
        nodes: Of each hypothesis `id`, `parent` (an id or `None`), `token` (text), `score` (sum of log-probabilities;
            `None`: not known yet), `step`, and `rank` (from 1, of a returned beam's last token; else `None`).

    Raises:
        ValueError: A parent doesn't exist, or an id exists twice.
    """
    rows = [
        [node["id"], node["parent"], clean_text(node["token"]), _finite(node["score"]), node["step"], node["rank"]]
        for node in nodes
    ]
    ids = {row[0] for row in rows}
    if len(ids) != len(rows):
        raise ValueError("two nodes of the beam tree have the same id")
    for node_id, parent, *_ in rows:
        if parent is not None and parent not in ids:
            raise ValueError(f"node {node_id} of the beam tree has a parent {parent} that is not in it")
    return {"nodes": rows}


def source_value(
    source: Iterable[tuple[int, str, int]] = (), beams: Iterable[Iterable[tuple[int, str, int]]] = ()
) -> dict[str, Any]:
    """What `SourceView` draws: blocks of the source and of each beam; a number, words, and how many have it."""

    def rows(pieces: Iterable[tuple[int, str, int]]) -> list[list[Any]]:
        return [[block, clean_text(words), readers] for block, words, readers in pieces]

    return {"source": rows(source), "beams": [rows(beam) for beam in beams]}


def memory_maps_value(maps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What `MemoryMaps` draws.

    Args:
        maps: Of each run `name`, `note`, `bytes_per_token`, `waste` (0 to 1) and `rows`, each with a `label` and its
            `reserved` and `used` tokens.

    Raises:
        ValueError: A row uses more tokens than it has, or a waste is not between 0 and 1.
    """
    result = []
    for each in maps:
        rows = [[clean_text(row["label"]), int(row["reserved"]), int(row["used"])] for row in each["rows"]]
        for label, reserved, used in rows:
            if not 0 <= used <= reserved:
                raise ValueError(f"row {label!r} of {each['name']!r} uses {used} of {reserved} tokens")
        if not 0 <= each["waste"] <= 1:
            raise ValueError(f"the waste of {each['name']!r} must be between 0 and 1, got {each['waste']}")
        result.append(
            {
                "name": clean_text(each["name"]),
                "note": clean_text(each["note"], limit=400),
                "bytes_per_token": int(each["bytes_per_token"]),
                "waste": float(each["waste"]),
                "reserved": sum(row[1] for row in rows),
                "used": sum(row[2] for row in rows),
                "rows": rows,
            }
        )
    return {"maps": result}


# ------------------------------------------------------------------------------------------------------------- encoding


def encode_blocks(blocks: Iterable[int]) -> str:
    """Blocks as text: `[17, 18, 19, 20, 5]` is `"17+3 5"`. Their order is kept, and -1 (given back) is a block, too."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1] + 1:
            runs[-1][1] += 1
        else:
            runs.append([block, 0])
    return " ".join(f"{first}+{more}" if more else str(first) for first, more in runs)


def clean_text(text: str, limit: int = MAX_LABEL) -> str:
    """A text that JSON can carry (no lone surrogates), cut to `limit` characters."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _dump(items: Iterable[Any]) -> str:
    return json.dumps(list(items), ensure_ascii=False, separators=(",", ":"))


def _ref_character(count: int) -> str:
    if count <= 0:
        return "," if count else "."
    return _DIGITS[count] if count < len(_DIGITS) else "+"


def _encode_hashes(hashes: Sequence[str]) -> str:
    return base64.b64encode(b"".join(bytes.fromhex(each or "00000000") for each in hashes)).decode("ascii")


def _label(group: int, names: Mapping[int, str], request_id: str | None) -> str:
    """What a group is called: by the app, else by the request's own id, else by its number."""
    return clean_text(names.get(group) or request_id or f"request {group}")


def _finite(score: float | None) -> float | None:
    return float(score) if score is not None and math.isfinite(score) else None
