"""A burst of real prompts against a small pool: who waits, who is preempted and how, and that all are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_paged import Request, RequestOutput

from .generation import Sampling
from .hub import Hub, Ticket, Watch, cancel, find_group
from .limits import RefusedError
from .prompts import choose_prompts, embedded_prompts, encode
from .run_record import RunRecord
from .streams import decode_reply, in_thread

WATCH_SECONDS = 0.04  # between two snapshots
SHOW_SECONDS = 0.25  # between two updates of the page
PARAGRAPH = "\n\n"  # where a reply ends, if replies are to end by themselves


@dataclass
class BurstRow:
    """A request of a burst.

    Attributes:
        label: Of the request.
        prompt_tokens: Tokens of its prompt.
        state: `"waiting"`, `"running"`, `"swapped"`, or how it ended.
        new_tokens: Generated so far.
        swapped: How often its blocks were moved to CPU memory.
        recomputed: How often they were dropped, to be computed again.
        reply: Its text, at the end.
    """

    label: str
    prompt_tokens: int
    state: str = "waiting"
    new_tokens: int = 0
    swapped: int = 0
    recomputed: int = 0
    reply: str = ""


@dataclass
class Burst:
    """A burst so far."""

    rows: list[BurstRow] = field(default_factory=list)
    seconds: float = 0.0
    record: RunRecord | None = None
    is_done: bool = False

    @property
    def completed(self) -> int:
        """Requests that were answered."""
        return sum(row.state == "done" for row in self.rows)

    @property
    def swapped(self) -> int:
        """Preemptions by swapping."""
        return sum(row.swapped for row in self.rows)

    @property
    def recomputed(self) -> int:
        """Preemptions by recomputation."""
        return sum(row.recomputed for row in self.rows)

    def describe(self) -> str:
        """In a sentence."""
        preemptions = self.swapped + self.recomputed
        sentence = f"{self.completed} of {len(self.rows)} completed"
        sentence += f", {preemptions} preemption{'s' * (preemptions != 1)}"
        if preemptions:
            sentence += f" ({self.swapped} swapped, {self.recomputed} recomputed)"
        tokens = sum(row.new_tokens for row in self.rows)
        if self.is_done and self.completed < len(self.rows):
            sentence += f", {len(self.rows) - self.completed} ended early"
        return f"{sentence}; {tokens:,} tokens in {self.seconds:.1f} s"


async def burst(
    hub: Hub, owner: str, count: int, sampling: Sampling, longest_prompt: int, ends_at_paragraph: bool = True
) -> AsyncIterator[Burst]:
    """Submits `count` of the package's prompts at once and follows them to their ends.

    Raises:
        RefusedError: It is beyond a limit.
    """
    hub.limits.check_requests(len(hub.tickets), count)
    room = min(longest_prompt, hub.pool_tokens - sampling.max_new_tokens, hub.limits.prompt_tokens)
    if hub.limits.positions is not None:
        room = min(room, hub.limits.positions - sampling.max_new_tokens)
    if room < 1:
        raise RefusedError(
            f"With {sampling.max_new_tokens} new tokens there is no room for a prompt: the pool holds "
            f"{hub.pool_tokens:,} tokens in all. Make it larger, or ask for fewer tokens."
        )
    prompts = await asyncio.to_thread(_prompts, hub, count, room)
    arguments = sampling.arguments(hub.loaded)
    if ends_at_paragraph:
        arguments |= {"stop_strings": [PARAGRAPH], "tokenizer": hub.loaded.tokenizer}
    tickets: list[Ticket] = []
    try:
        tickets = await in_thread(
            lambda: hub.submit_all("burst", owner, _requests(prompts, sampling, arguments)),
            lambda found: cancel(*found),
        )
        async for state in _follow(hub, tickets, sampling):
            yield state
    finally:
        cancel(*tickets)


def _prompts(hub: Hub, count: int, room: int) -> list[list[int]]:
    return choose_prompts([encode(hub.loaded, text) for text in embedded_prompts()], count, room)


def _requests(prompts: Sequence[list[int]], sampling: Sampling, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number, prompt in enumerate(prompts):
        seed = None if sampling.seed is None else sampling.seed + number
        yield {"prompt_ids": prompt, "seed": seed, **arguments}


async def _follow(hub: Hub, tickets: list[Ticket], sampling: Sampling) -> AsyncIterator[Burst]:
    loop = asyncio.get_running_loop()
    started = shown = loop.time()
    record = RunRecord.begin(hub, tickets, sampling.max_new_tokens)
    watch = BurstWatch(tickets, hub.loaded.tokenizer)
    look = Watch(hub).look
    results = asyncio.gather(*(ticket.request for ticket in tickets), return_exceptions=True)
    try:
        while True:
            is_over = results.done()  # then the next snapshot has their last events
            snapshot = look()
            record.see(snapshot)
            watch.see(snapshot)
            if is_over:
                break
            if loop.time() - shown >= SHOW_SECONDS:
                shown = loop.time()
                yield Burst(watch.rows, shown - started)
            await asyncio.wait([results], timeout=WATCH_SECONDS)
    finally:
        results.cancel()
    state = Burst(watch.rows, loop.time() - started, is_done=True)
    if state.completed == len(tickets):
        record.end([output for output in results.result() if isinstance(output, RequestOutput)])
        state.record = record
    yield state


class BurstWatch:
    """Keeps the rows of a burst up to date: by snapshots and their events, and by the requests themselves."""

    def __init__(self, tickets: Sequence[Ticket], tokenizer: Any) -> None:
        """For requests that were just submitted."""
        self.rows = [BurstRow(ticket.label, len(ticket.request.prompt_token_ids)) for ticket in tickets]
        self._by_label = {row.label: row for row in self.rows}
        self._running = {ticket.label: ticket.request for ticket in tickets}
        self._tokenizer = tokenizer

    def see(self, snapshot: dict[str, Any]) -> None:
        """Takes the next snapshot, with the events since the last one."""
        for event in snapshot["events"]:
            row = self._by_label.get(event.get("request_id", ""))
            if row is not None and event["kind"] == "preempted":
                row.swapped += event["num_sequences"] * (event["how"] == "swap")
                row.recomputed += event["num_sequences"] * (event["how"] != "swap")
        for label, request in list(self._running.items()):
            row, group = self._by_label[label], find_group(snapshot, label)
            if group is not None:
                row.state = group["status"]
            row.new_tokens = len(request.events_since())
            if request.is_done:
                del self._running[label]
                self._end(row, request)

    def _end(self, row: BurstRow, request: Request) -> None:
        try:
            output = request.result()
        except Exception as error:
            row.state = f"failed: {error}"
            return
        row.new_tokens = len(output.token_ids)
        row.reply = decode_reply(self._tokenizer, output.prompt_token_ids, output.token_ids)
        row.state = "done" if output.finish_reason != "cancelled" else "cancelled"
