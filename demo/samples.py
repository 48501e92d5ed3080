"""Samples and beams of one prompt: one request with several sequences, watched while it runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from hf_paged import Request

from .beams import BeamTree
from .generation import Sampling
from .hub import Hub, Ticket, cancel
from .limits import RefusedError
from .prompts import encode
from .run_record import RunRecord
from .sharing import SharingMeter
from .streams import decode_reply, in_thread

SHOW_SECONDS = 0.2  # between two updates of the page


@dataclass(frozen=True)
class Branch:
    """One of the sequences.

    Attributes:
        title: What to call it.
        text: What was generated so far.
        note: What else there is to say.
    """

    title: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class Branches:
    """All sequences of a prompt.

    Attributes:
        label: Of the request.
        branches: One each, best first where they have scores.
        sharing: What sharing saved, in a sentence.
        nodes: Beams: the tree of all beams that were alive at some step.
        record: The finished run, for the memory maps.
        is_done: Whether it has ended.
        figures: The numbers of `sharing`.
    """

    label: str
    branches: list[Branch] = field(default_factory=list)
    sharing: str = ""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    record: RunRecord | None = None
    is_done: bool = False
    figures: dict[str, Any] = field(default_factory=dict)


async def samples(hub: Hub, owner: str, prompt: str, count: int, sampling: Sampling) -> AsyncIterator[Branches]:
    """`count` samples of one prompt, in one request whose sequences share the prompt's blocks.

    Raises:
        RefusedError: It is beyond a limit.
    """
    hub.limits.check_sequences(count)
    if not sampling.temperature:
        raise RefusedError("At temperature 0 all samples are the same: choose one above 0.")
    arguments = sampling.arguments(hub.loaded) | {"num_return_sequences": count}
    async for branches in _run(hub, owner, "samples", prompt, sampling, arguments):
        yield branches


async def beams(hub: Hub, owner: str, prompt: str, count: int, sampling: Sampling) -> AsyncIterator[Branches]:
    """A beam search of the engine's with `count` beams, all of which are returned.

    Raises:
        RefusedError: It is beyond a limit.
    """
    hub.limits.check_sequences(count)
    if count < 2:
        raise RefusedError("A beam search needs at least 2 beams.")
    counts = {"num_beams": count, "num_return_sequences": count}
    arguments = replace(sampling, temperature=0.0).arguments(hub.loaded) | counts
    async for branches in _run(hub, owner, "beams", prompt, sampling, arguments):
        yield branches


async def _run(
    hub: Hub, owner: str, kind: str, prompt: str, sampling: Sampling, arguments: dict[str, Any]
) -> AsyncIterator[Branches]:
    hub.limits.check_text(prompt)
    prompt_ids = await asyncio.to_thread(encode, hub.loaded, prompt)
    steps: deque[dict[str, Any]] = deque()  # snapshots that were not looked at yet
    await in_thread(lambda: hub.pacer.attend(steps.append), lambda _: hub.pacer.leave(steps.append))
    try:
        ticket = await in_thread(lambda: hub.submit(kind, owner, prompt_ids, seed=sampling.seed, **arguments), cancel)
        view = _View(hub, ticket, arguments, RunRecord.begin(hub, [ticket], sampling.max_new_tokens))
        result = asyncio.gather(ticket.request, return_exceptions=True)
        try:
            while not result.done():
                view.see(steps)
                yield view.running()
                await asyncio.wait([result], timeout=SHOW_SECONDS)
        finally:
            ticket.request.cancel()
    finally:
        await asyncio.to_thread(hub.pacer.leave, steps.append)
    view.see(steps)
    output = ticket.request.result(0)
    if view.tree is not None and output.finish_reason != "cancelled":
        await _score(hub, prompt_ids, view.tree, output.sequences)
    yield view.finished(output)


async def _score(hub: Hub, prompt_ids: list[int], tree: BeamTree, returned: list[list[int]]) -> None:
    """Asks the engine how likely the tokens of a finished search are: it keeps no scores of beams on the host."""
    tree.add(returned)
    branches = tree.branches()

    def submit() -> list[Request]:
        return [
            hub.engine.submit_score(
                [*prompt_ids, *path], first=len(prompt_ids) + shared, request_id=f"{tree.label}-score-{number}"
            )
            for number, (path, shared) in enumerate(branches, start=1)
        ]

    try:
        requests = await asyncio.to_thread(submit)
        hub.pacer.wake()
        outputs = await asyncio.gather(*requests)
    except (ValueError, RuntimeError):  # the pool has been replaced, or its queue is full: a tree without scores
        return
    tree.score(branches, ([token.logprob for token in output.prompt_logprobs or []] for output in outputs))


class _View:
    """A request with several sequences as `Branches`."""

    def __init__(self, hub: Hub, ticket: Ticket, arguments: dict[str, Any], record: RunRecord) -> None:
        self._hub = hub
        self._ticket = ticket
        self._count = arguments["num_return_sequences"]
        self._meter = SharingMeter(ticket.label)
        self._record = record
        self._bytes_per_block = hub.engine.bytes_per_block
        self.tree = BeamTree(ticket.label) if arguments["num_beams"] > 1 else None

    def see(self, steps: deque[dict[str, Any]]) -> None:
        """Takes the snapshots after the next steps, out of their queue."""
        while steps:
            snapshot = steps.popleft()
            self._meter.see(snapshot)
            self._record.see(snapshot)
            if self.tree is not None:
                self.tree.see(snapshot)

    def running(self) -> Branches:
        """As far as it is."""
        if self.tree is not None:
            branches = [
                Branch(f"sequence {number}", self._text(list(path)), "one of the beams")
                for number, path in self.tree.alive.items()
            ]
        else:
            samples: list[list[int]] = [[] for _ in range(self._count)]
            for event in self._ticket.request.events_since():
                samples[event.sequence].append(event.token_id)
            branches = [
                Branch(f"sample {number}", self._text(tokens), f"{len(tokens)} tokens")
                for number, tokens in enumerate(samples, start=1)
            ]
        return Branches(self._ticket.label, branches, self._sharing(), self._nodes())

    def finished(self, output: Any) -> Branches:
        """What it returned."""
        self._record.end([output])
        record = None if output.finish_reason == "cancelled" else self._record
        reasons = output.finish_reasons or [output.finish_reason] * len(output.sequences)
        branches = []
        for number, (tokens, reason) in enumerate(zip(output.sequences, reasons, strict=True)):
            note = f"{len(tokens)} tokens · {reason}"
            if output.scores is not None:
                note += f" · score {output.scores[number]:.3f}"
            title = f"{'sample' if self.tree is None else 'beam'} {number + 1}"
            branches.append(Branch(title, self._text(tokens), note))
        nodes = self._nodes(output.sequences if output.scores is not None else ())
        return Branches(self._ticket.label, branches, self._sharing(), nodes, record, True, self._figures())

    def _text(self, tokens: list[int]) -> str:
        return decode_reply(self._hub.loaded.tokenizer, self._ticket.request.prompt_token_ids, tokens)

    def _nodes(self, returned: Any = ()) -> list[dict[str, Any]]:
        return [] if self.tree is None else self.tree.nodes(self._hub.loaded.tokenizer.decode, returned)

    def _sharing(self) -> str:
        return self._meter.describe(self._bytes_per_block)

    def _figures(self) -> dict[str, Any]:
        peak = self._meter.most_saved
        return {
            "blocks_held": peak.held,
            "blocks_without_sharing": peak.tables,
            "blocks_saved": peak.saved,
            "bytes_saved": peak.saved * self._bytes_per_block,
            "blocks_copied_on_write": self._meter.num_copies,
        }
