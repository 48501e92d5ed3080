"""Engine events in plain words, for the event log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any


def describe_event(event: Mapping[str, Any], who: str, has_siblings: bool = False) -> str:
    """One sentence of an event.

    Args:
        event: One of `engine.snapshot()["events"]`.
        who: What to call the request it belongs to; "" if it belongs to none.
        has_siblings: The request has several sequences: say which one it was.
    """
    kind, sequence = event["kind"], event.get("sequence")
    if has_siblings and sequence is not None and kind != "shared":
        who = f"{who}, sequence {sequence},"
    who = who or "a request"
    match kind:
        case "admitted":
            return f"{who} was admitted" + _with_tokens(event)
        case "allocated":
            return f"{who} took {name_blocks(event['blocks'])}"
        case "shared":
            shares = f"shares {count(len(event['blocks']), 'block')} with sequence {event['parent']}"
            return f"{who}, sequence {sequence}, {shares}"
        case "prefix_hit":
            found = count(event["num_tokens"], "token")
            return f"{who} found {found} of its prompt in the cache: {name_blocks(event['blocks'])}"
        case "copied":
            return f"{who} copied on write: block {event['source']} → {event['destination']}"
        case "freed":
            return f"{who} let go of {name_blocks(event['blocks'])}"
        case "evicted":
            return f"cached content dropped for new use: {name_blocks(event['blocks'])}"
        case "preempted":
            return f"{who} was preempted ({event['how']}) to make room"
        case "swapped_out":
            return f"{who} went to CPU memory with {count(event['num_blocks'], 'block')}"
        case "swapped_in":
            return f"{who} came back from CPU memory with {count(event['num_blocks'], 'block')}"
        case "finished":
            reason = event.get("reason")
            return f"{who} finished" + (f" ({reason})" if reason else "")
        case "step":
            return _describe_step(event)
        case "undone":
            return f"a step failed and was undone for {count(event['num_sequences'], 'sequence')}"
    return f"{who}: {kind.replace('_', ' ')}"


def _describe_step(event: Mapping[str, Any]) -> str:
    parts = []
    if event["num_decode"]:
        parts.append(f"{count(event['num_decode'], 'sequence')} decoded")
    if event["num_prefill_tokens"]:
        parts.append(f"{count(event['num_prefill_tokens'], 'prompt token')} computed")
    text = f"{' and '.join(parts) or 'nothing computed'} in {1000 * event['seconds']:.1f} ms"
    queues = [f"{event[f'num_{queue}']} {queue}" for queue in ("waiting", "swapped") if event.get(f"num_{queue}")]
    return f"{text}; {', '.join(queues)}" if queues else text


def _with_tokens(event: Mapping[str, Any]) -> str:
    if "num_tokens" not in event:
        return ""
    tokens = count(event["num_tokens"], "token")
    return f" with {tokens}" + (f" in {event['num_sequences']} sequences" if event["num_sequences"] > 1 else "")


def name_blocks(blocks: Iterable[int], most: int = 6) -> str:
    """ "block 17", "blocks 17 to 19, 40": sorted, runs joined, no more than `most` parts."""
    found = sorted(set(blocks))
    if not found:
        return "no blocks"
    starts = [found[0], *(after for before, after in pairwise(found) if after != before + 1)]
    ends = [*(before for before, after in pairwise(found) if after != before + 1), found[-1]]
    runs = [str(start) if start == end else f"{start} to {end}" for start, end in zip(starts, ends)]
    text = ", ".join(runs[:most])
    if len(runs) > most:
        text = f"{text}, … ({len(found)} in all)"
    return f"{'block' if len(found) == 1 else 'blocks'} {text}"


def count(number: int, noun: str) -> str:
    """ "1 block", "2,000 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
