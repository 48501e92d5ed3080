"""`Hub`: the one engine that all visitors share, what they run on it, and pictures of it for all who look."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import hf_paged
from hf_paged import EngineStats, Request

from .frames import Frames
from .history import History, Sample
from .limits import Limits, RefusedError, check_whole_number
from .loading import LoadedModel
from .pacing import Pacer
from .stepping import Explanation, explain
from .transcripts import Transcripts

SHOWN_EVENTS = 600  # before the last picture's newest
STEP_EVENTS = 1500  # among which all those of a step are
ALWAYS_ALLOWED_BLOCKS = 4096
PICTURE_SECONDS = 0.2  # a picture this old is shown to the next viewer too
CANCEL_SECONDS = 10.0
WELCOME = "welcome"  # as a kind of requests: the demo's own, which no visitor waits for
PREEMPTIONS = ("auto", "swap", "recompute")


@dataclass(frozen=True)
class Ticket:
    """A request that runs or waits.

    Attributes:
        label: What it is called in every view, and its request id.
        owner: The browser session, or API client, that asked for it.
        kind: What it is for, such as `"chat"`.
        request: The engine's handle.
    """

    label: str
    owner: str
    kind: str
    request: Request


@dataclass(frozen=True)
class Picture:
    """The engine at one moment, the same for all viewers.

    Attributes:
        snapshot: `engine.snapshot()`.
        stats: `engine.stats()`.
        last: The newest sample of the history.
        names: What to call each sequence group.
        steps: Of which there are frames.
        version: Rises when something has changed.
        taken: When, by `time.monotonic`.
    """

    snapshot: dict[str, Any]
    stats: EngineStats
    last: Sample | None
    names: dict[int, str]
    steps: list[int]
    version: int
    taken: float


@dataclass
class Hub:
    """Owns model, tokenizer and engine of one app.

    Nothing else in the app touches the engine's life: it is patched here, sized here, slowed down and paused here.

    Attributes:
        loaded: The model.
        settings: Of the pool as it is: `num_blocks`, `block_size`, `preemption`.
        limits: What may be asked for.
        tickets: What runs or waits, by label.
        transcripts: Of the conversations.
        pacer: How fast it goes.
        history: The last minutes.
        frames: The last steps of the engine as it is.
        is_fixed: The pool stays as it is: a server is on it, too.
        max_blocks: What the pool may grow to: its size at the start, or what is comfortable to look at.
    """

    loaded: LoadedModel
    settings: dict[str, Any]
    limits: Limits
    is_fixed: bool = False
    tickets: dict[str, Ticket] = field(default_factory=dict)
    transcripts: Transcripts = field(default_factory=Transcripts)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _counters: Counter[str] = field(default_factory=Counter)
    _picture: Picture | None = None
    _seen: Any = None  # what its version stands for
    _versions: Any = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.max_blocks = max(ALWAYS_ALLOWED_BLOCKS, int(self.settings["num_blocks"]))
        self._patch(self.settings)
        self.pacer = Pacer(lambda: self.engine, self.snapshot)
        self.history = History(self.stats)
        self._warm_up()

    @property
    def engine(self) -> hf_paged.Engine:
        """The engine as of now. Looked up each time: another pool is another engine."""
        return self._engine

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return int(self.settings["num_blocks"] * self.settings["block_size"])

    # Requests

    def submit(
        self, kind: str, owner: str, prompt_ids: list[int], *, seed: int | None = None, **arguments: Any
    ) -> Ticket:
        """Queues a prompt.

        Args:
            kind: What it is for; the first part of its label.
            owner: Who asks.
            prompt_ids: The prompt.
            seed: Of its draws; `None`: others each time.
            **arguments: Of `generate()`.

        Raises:
            RefusedError: It is beyond a limit, or the engine refuses it.
        """
        self.limits.check_tokens(len(prompt_ids), arguments["max_new_tokens"], self.pool_tokens)
        with self._lock:
            self.limits.check_requests(len(self.tickets))
            self._counters[kind] += 1
            label = f"{kind}-{self._counters[kind]}"
            # A request draws from where torch's generator stands when it is submitted.
            torch.manual_seed(seed) if seed is not None else torch.seed()
            try:
                request = self.engine.submit(prompt_ids, request_id=label, **arguments)
            except (ValueError, hf_paged.QueueFullError) as error:
                raise RefusedError(f"The engine refused the request: {error}") from error
            ticket = Ticket(label, owner, kind, request)
            self.tickets[label] = ticket
        request.on_done(lambda: self.tickets.pop(label, None))  # on the worker, which must not wait: no lock
        self.pacer.wake()
        return ticket

    def submit_all(self, kind: str, owner: str, requests: Iterable[dict[str, Any]]) -> list[Ticket]:
        """Queues several requests, each with arguments of `submit`: all, or none. Raises as `submit` does."""
        tickets: list[Ticket] = []
        try:
            for each in requests:
                tickets.append(self.submit(kind, owner, **each))
        except BaseException:
            cancel(*tickets)
            raise
        return tickets

    def cancel(self, owner: str | None = None, kind: str | None = None) -> int:
        """Cancels requests, of one owner or of all, and returns how many."""
        tickets = [
            ticket
            for ticket in list(self.tickets.values())
            if owner in (None, ticket.owner) and kind in (None, ticket.kind)
        ]
        cancel(*tickets)
        self.pacer.wake()
        return len(tickets)

    def of(self, owner: str, kind: str | None = None) -> list[Ticket]:
        """What an owner has running or waiting."""
        return [t for t in list(self.tickets.values()) if t.owner == owner and kind in (None, t.kind)]

    # Pictures

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        return self.engine.stats()

    def snapshot(self, since: int = 0) -> dict[str, Any]:
        """The engine's snapshot as of now; slow motion, which steps a paused engine, does not count as paused."""
        frames, engine = self.frames, self.engine  # in the other order, the frames might be of a newer engine
        state = {"is_paused": self.pacer.is_paused, "steps_per_second": self.pacer.steps_per_second}
        snapshot = engine.snapshot(max(0, since)) | state
        frames.see(snapshot)
        return snapshot

    def picture(self) -> Picture:
        """A recent picture: viewers within a tick share one."""
        with self._lock:
            last, now = self._picture, time.monotonic()
            if last is not None and now - last.taken < PICTURE_SECONDS:
                return last
            newest = _newest_event(last.snapshot) if last is not None else 0
            snapshot, stats, sample = self.snapshot(newest - SHOWN_EVENTS), self.stats(), self.history.last
            # Events are compared by the newest: what is kept of the older ones does not matter.
            seen = (_without_events(snapshot), _newest_event(snapshot), stats, sample and sample.tokens_per_second)
            version = next(self._versions) if seen != self._seen else last.version if last else 0
            self._seen = seen
            self._picture = Picture(snapshot, stats, sample, names_of(snapshot), self.frames.steps, version, now)
            return self._picture

    def step(self) -> Explanation | None:
        """Has the paused engine make one step, and explains it; `None` if there was nothing to do.

        Raises:
            RuntimeError: It isn't paused.
        """
        with self.pacer.held():
            event = self.pacer.step()
            if event is None:
                return None
            snapshot = self.snapshot(event["id"] - STEP_EVENTS)
        return explain(event, snapshot, names_of(snapshot), self.loaded.tokenizer.decode)

    # The pool

    def resize(self, num_blocks: Any, preemption: Any, cancel_running: bool = False) -> str:
        """Another pool: unpatches the model and patches it again. Returns what it is now, in a sentence.

        Raises:
            RefusedError: A value is out of range; requests run, and were not to be cancelled; or the pool is fixed.
        """
        num_blocks = check_whole_number("The number of blocks", num_blocks, 2, self.max_blocks)
        if preemption not in PREEMPTIONS:
            raise RefusedError(f"Preemption must be one of {', '.join(PREEMPTIONS)}, not {preemption!r:.40}.")
        settings = self.settings | {"num_blocks": num_blocks, "preemption": preemption}
        with self._lock:
            if settings == self.settings:
                return f"The pool already had {num_blocks:,} blocks; preemption: {preemption}."
            if self.is_fixed:
                raise RefusedError(
                    f"The pool stays at {self.settings['num_blocks']:,} blocks, preemption "
                    f"{self.settings['preemption']}: a server is on it, too. Without --server it can be changed."
                )
            count = sum(ticket.kind != WELCOME for ticket in list(self.tickets.values()))
            if count and not cancel_running:
                raise RefusedError(
                    f"{count} request{'s are' if count > 1 else ' is'} running or waiting in this pool. Wait for the "
                    "end, or say that what runs is to be cancelled."
                )
            self._cancel_and_wait()
            with self.pacer.held():
                hf_paged.unpatch(self.loaded.model)
                try:
                    self._patch(settings)
                except ValueError as error:
                    self._patch(self.settings)
                    raise RefusedError(f"The pool stays as it was: {error}") from error
                self.settings = settings
            self._picture = None
            return f"The pool has {num_blocks:,} blocks now; preemption: {preemption}."

    def _patch(self, settings: dict[str, Any]) -> None:
        self._engine: hf_paged.Engine = hf_paged.patch(self.loaded.model, **settings).paged
        self.frames = Frames()

    def _cancel_and_wait(self) -> None:
        tickets = list(self.tickets.values())
        self.cancel()
        deadline = time.monotonic() + CANCEL_SECONDS
        for ticket in tickets:
            try:
                ticket.request.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise RefusedError(f"{ticket.label} did not end within {CANCEL_SECONDS:.0f} s. Try again.") from None
            except Exception:  # its own handler tells
                continue

    def _warm_up(self) -> None:
        """What only the first request pays: compiled kernels, the pool itself."""
        prompt = self.loaded.tokenizer("Once").input_ids
        self.engine.submit(prompt, max_new_tokens=2, do_sample=False, pad_token_id=self.loaded.pad_token_id).result()
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Ends everything: threads, requests, and the patch."""
        self.history.close()
        self.pacer.close()
        with self._lock:
            hf_paged.unpatch(self.loaded.model)


def cancel(*tickets: Ticket) -> None:
    """Cancels requests; those that are finished stay so."""
    for ticket in tickets:
        ticket.request.cancel()


class Watch:
    """Looks at the engine again and again; each snapshot has the events since the last one."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._since = 0

    def look(self) -> dict[str, Any]:
        """The next snapshot."""
        snapshot = self._hub.snapshot(self._since)
        self._since = _newest_event(snapshot) or self._since
        return snapshot


def names_of(snapshot: dict[str, Any]) -> dict[int, str]:
    """What to call each sequence group of a snapshot and of its events: its request's label."""
    named = [(event.get("group"), event.get("request_id")) for event in snapshot["events"]]
    named += [(group["id"], group["request_id"]) for group in snapshot["groups"]]
    return {group: label or f"call-{group}" for group, label in named if group is not None}


def find_group(snapshot: dict[str, Any], label: str | None) -> dict[str, Any] | None:
    """The sequence group of a request, while it has one; of a call without a label, the first such group."""
    return next((group for group in snapshot["groups"] if group.get("request_id") == label), None)


def _without_events(snapshot: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in snapshot.items() if name != "events"}


def _newest_event(snapshot: dict[str, Any]) -> int:
    return int(snapshot["events"][-1]["id"]) if snapshot["events"] else 0
