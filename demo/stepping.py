"""`explain`: what the scheduler did in one step, in words. Pure: from the step's events and the snapshot after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .sentences import count as _count
from .sentences import name_blocks as _blocks

MOST_NAMED = 8  # requests that are told of one by one; the others are counted
Event = dict[str, Any]


@dataclass(frozen=True)
class Explanation:
    """One step.

    Attributes:
        step: Its number.
        headline: What was computed, in a sentence.
        details: A sentence a request: what it computed and chose, which blocks it took or gave back, and why.
    """

    step: int
    headline: str
    details: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return " ".join([self.headline, *self.details])


def explain(
    step: Event, snapshot: dict[str, Any], names: dict[int, str], decode: Callable[[list[int]], str]
) -> Explanation:
    """Explains a step.

    Args:
        step: Its "step" event.
        snapshot: The engine right after it, whose events include its siblings.
        names: What to call each sequence group.
        decode: From token ids to text.
    """
    events = [event for event in snapshot["events"] if event["step"] == step["step"] and event["kind"] != "step"]
    groups = {group["id"]: group for group in snapshot["groups"]}
    chunks: dict[int, list[list[int]]] = {}
    for group, sequence, start, count in step["chunks"]:
        chunks.setdefault(group, []).append([sequence, start, count])
    touched = list(dict.fromkeys([*chunks, *(e["group"] for e in events if e.get("group") is not None)]))
    stories = [
        _Story(names.get(group, f"call-{group}"), groups.get(group), chunks.get(group, []), _of(events, group), decode)
        for group in touched
    ]
    details = [sentence for story in stories[:MOST_NAMED] if (sentence := story.tell())]
    if len(stories) > MOST_NAMED:
        details.append(f"And {len(stories) - MOST_NAMED} other requests took part.")
    details += _evictions(events)
    details += _waiting(step, snapshot, names)
    return Explanation(step["step"], _headline(step), details)


def _headline(step: Event) -> str:
    sequences, tokens = step["num_seqs"], step["num_tokens"]
    if not tokens:
        return f"Step {step['step']} computed nothing: it only moved blocks."
    parts = []
    if step["num_prefill_tokens"]:
        parts.append(f"{_count(step['num_prefill_tokens'], 'token')} of prompts")
    if step["num_decode"]:
        parts.append(f"{_count(step['num_decode'], 'sequence')} decoding")
    what = f" ({', '.join(parts)})" if parts else ""
    return (
        f"Step {step['step']}: one forward of {_count(tokens, 'token')} for {_count(sequences, 'sequence')}{what} "
        f"in {step['seconds'] * 1000:.1f} ms."
    )


def _evictions(events: Sequence[Event]) -> list[str]:
    blocks = [block for event in events if event["kind"] == "evicted" for block in event["blocks"]]
    if not blocks:
        return []
    verb = "was" if len(blocks) == 1 else "were"
    return [f"{_blocks(blocks).capitalize()} {verb} cached and held by none: the content was dropped for new use."]


def _waiting(step: Event, snapshot: dict[str, Any], names: dict[int, str]) -> list[str]:
    if not step.get("is_stalled") or not snapshot["waiting"]:
        return []
    first = snapshot["waiting"][0]
    free, others = step["num_free_blocks"], len(snapshot["waiting"]) - 1
    behind = f", and {_count(others, 'request')} behind it" if others else ""
    return [
        f"{names.get(first, f'call-{first}')} waits{behind}: it does not fit into the {_count(free, 'free block')}."
    ]


@dataclass
class _Story:
    """What happened to one request in a step."""

    name: str
    group: dict[str, Any] | None
    chunks: list[list[int]]
    events: list[Event]
    decode: Callable[[list[int]], str]

    def tell(self) -> str:
        parts = [*self._came(), *self._computed(), *self._took(), *self._chose(), *self._left()]
        return f"{self.name} {_join(parts)}." if parts else ""

    def _came(self) -> list[str]:
        """Into the pool, or back into it."""
        parts = []
        hits = sum(event["num_tokens"] for event in self._all("prefix_hit"))
        if self._all("admitted"):
            parts.append("was admitted")
        if hits:
            blocks = [block for event in self._all("prefix_hit") for block in event["blocks"]]
            parts.append(f"found {_count(hits, 'token')} of its prompt in the cache ({_blocks(blocks)})")
        for event in self._all("swapped_in"):
            parts.append(f"came back from CPU memory with {_count(event['num_blocks'], 'block')}")
        return parts

    def _computed(self) -> list[str]:
        prompt = [chunk for chunk in self.chunks if self._is_prompt(chunk)]
        if not prompt:
            return []
        tokens = sum(count for _, _, count in prompt)
        return [
            f"computed {_count(tokens, 'token')}" + (" of its prompt" if not self._is_recomputed(prompt) else " again")
        ]

    def _took(self) -> list[str]:
        parts = []
        shared = {event["sequence"] for event in self._all("shared")}
        if shared:
            parts.append(f"split into {len(shared) + 1} sequences that share its blocks")
        prompt = {sequence for sequence, start, count in self.chunks if self._is_prompt([sequence, start, count])}
        for_prompt = self._blocks_of("allocated", lambda event: event["sequence"] in prompt)
        if for_prompt:
            parts.append(f"took {_blocks(for_prompt)} for them")
        full = self._blocks_of("allocated", lambda event: event["sequence"] not in prompt)
        if len(full) == 1:
            parts.append(f"had filled its last block, so it got {_blocks(full)}")
        elif full:
            parts.append(f"had filled {len(full)} of its last blocks, so it got {_blocks(full)}")
        for event in self._all("copied"):
            copied = f"block {event['source']} was copied to block {event['destination']}"
            parts.append(f"wrote into a block that others share, so {copied}")
        return parts

    def _chose(self) -> list[str]:
        if self.group is None:
            return ["chose its last token"] if self.chunks and self._all("finished") else []
        known = {sequence["id"]: sequence for sequence in self.group["sequences"]}
        texts, is_choosing = [], False
        for sequence_id, start, count in self.chunks:
            sequence = known.get(sequence_id)
            if sequence is None or sequence["num_tokens"] < start + count:
                continue
            if sequence["num_tokens"] > start + count:
                if sequence["tail"] and sequence["num_tokens"] == start + count + 1:
                    texts.append(self.decode(sequence["tail"][-1:]))
            else:
                is_choosing = True
        if texts:
            shown = ", ".join(quote(text) for text in texts[:4]) + (", …" if len(texts) > 4 else "")
            return [f"chose {shown}"]
        if is_choosing:
            return ["handed its logits to the loop that chooses its tokens"]
        return ["has more of its prompt to compute"] if self.chunks else []

    def _left(self) -> list[str]:
        parts = []
        freed = [block for event in self._all("freed") for block in event["blocks"]]
        for event in self._all("preempted"):
            if event["how"] == "swap":
                moved = sum(out["num_blocks"] for out in self._all("swapped_out"))
                parts.append(f"was preempted to make room: its {_count(moved, 'block')} moved to CPU memory")
            else:
                parts.append(f"was preempted to make room: it gave back {_blocks(freed)}, to be computed again")
        if self._all("finished"):
            parts.append("is finished")
        if freed and not self._all("preempted"):
            parts.append(f"gave back {_blocks(freed)}")
        return parts

    def _all(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]

    def _blocks_of(self, kind: str, which: Callable[[Event], bool]) -> list[int]:
        return [block for event in self._all(kind) if which(event) for block in event["blocks"]]

    def _is_prompt(self, chunk: list[int]) -> bool:
        """Whether a chunk is more than the one token of a decoding sequence."""
        sequence, start, count = chunk
        prompt_tokens = self._prompt_tokens(sequence)
        return count > 1 or (prompt_tokens is not None and start < prompt_tokens)

    def _is_recomputed(self, chunks: Iterable[list[int]]) -> bool:
        """Whether chunks go beyond the prompt, which only tokens do that were there before."""
        return any(
            (known := self._prompt_tokens(sequence)) is not None and start + count > known
            for sequence, start, count in chunks
        )

    def _prompt_tokens(self, sequence: int) -> int | None:
        sequences = self.group["sequences"] if self.group is not None else []
        return next((known["num_prompt_tokens"] for known in sequences if known["id"] == sequence), None)


def _of(events: Iterable[Event], group: int) -> list[Event]:
    return [event for event in events if event.get("group") == group]


def quote(text: str) -> str:
    """A token's text in quotation marks, its line breaks visible."""
    return "“" + text.replace("\n", "⏎").replace("\t", "⇥") + "”"


def _join(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1]
