"""A chat reply: one request of the continuous batch, streamed, with what it took."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from .generation import Sampling
from .hub import Hub, Ticket, cancel, find_group
from .limits import RefusedError
from .prompts import render
from .sentences import count
from .streams import TextStream, decode_reply, in_batches, in_thread

SHOW_SECONDS = 0.05  # at least, between two pieces of a reply on the way to the browser
MOST_UPDATES = 60  # a second, of all replies together: each is some milliseconds' work

ENDINGS = {
    "length": "the limit of new tokens",
    "eos": "the model's own end",
    "stop": "a stop string",
    "cancelled": "stopped",
}


@dataclass(frozen=True)
class Reply:
    """A reply so far.

    Attributes:
        label: Of the request.
        text: What the model wrote.
        prompt_tokens: Tokens of the prompt, the conversation so far included.
        cached_tokens: Those of them whose keys and values were found in the pool; `None` before it is known.
        new_tokens: Tokens generated.
        seconds_to_first_token: `None` before the first one.
        tokens_per_second: From the first token on; `None` before the second one.
        finish_reason: `"eos"`, `"length"`, `"stop"` or `"cancelled"`; `None` while it runs.
    """

    label: str
    text: str
    prompt_tokens: int
    cached_tokens: int | None = None
    new_tokens: int = 0
    seconds_to_first_token: float | None = None
    tokens_per_second: float | None = None
    finish_reason: str | None = None


async def reply(hub: Hub, owner: str, messages: list[dict[str, str]], sampling: Sampling) -> AsyncIterator[Reply]:
    """Streams the model's next message.

    Dropping the iterator, or being cancelled, cancels the request.

    Raises:
        RefusedError: It is beyond a limit.
        Exception: What the request raised.
    """
    hub.limits.check_text(messages[-1]["content"])
    if messages[-1]["role"] != "user":
        raise RefusedError("The last message must be the user's.")
    started = time.monotonic()
    text = render(hub.loaded, messages)
    hub.limits.check_text(text)
    ticket = await in_thread(lambda: _submit(hub, owner, text, sampling), cancel)
    try:
        async with aclosing(_follow(hub, ticket, started)) as replies:
            async for current in replies:
                if current.finish_reason is not None:
                    _remember(hub, ticket, text)
                yield current
    finally:
        ticket.request.cancel()


def _submit(hub: Hub, owner: str, text: str, sampling: Sampling) -> Ticket:
    """Encodes and submits: milliseconds that the event loop has no time for."""
    loaded = hub.loaded
    prompt_ids = hub.transcripts.encode(loaded.tokenizer, text, adds_special_tokens=not loaded.has_chat_template)
    return hub.submit("chat", owner, prompt_ids, seed=sampling.seed, **sampling.arguments(hub.loaded))


def _remember(hub: Hub, ticket: Ticket, text: str) -> None:
    """Notes what the conversation consists of now, for its next turn."""
    loaded, tokens = hub.loaded, list(ticket.request.result(0).token_ids)
    if not loaded.has_chat_template and tokens[-1:] and tokens[-1] in loaded.eos_token_ids:
        tokens.pop()  # the text goes on
    prompt_ids = ticket.request.prompt_token_ids
    said = decode_reply(loaded.tokenizer, prompt_ids, tokens, skips_special_tokens=not loaded.has_chat_template)
    hub.transcripts.remember(text + said, [*prompt_ids, *tokens])


async def _follow(hub: Hub, ticket: Ticket, started: float) -> AsyncIterator[Reply]:
    request = ticket.request
    current = Reply(ticket.label, "", len(request.prompt_token_ids))
    yield current
    texts = TextStream(hub.loaded.tokenizer, request.prompt_token_ids)
    first: tuple[float, int] | None = None  # when the first tokens came, and how many
    async with aclosing(in_batches(request, lambda: _seconds_between(hub))) as batches:
        async for tokens in batches:
            now = time.monotonic()
            num_tokens = current.new_tokens + len(tokens)
            if first is None and tokens:
                first = (now, num_tokens)
            current = replace(
                current,
                text=current.text + texts.push(tokens),
                new_tokens=num_tokens,
                cached_tokens=_cached_tokens(hub, ticket) if current.cached_tokens is None else current.cached_tokens,
                seconds_to_first_token=first[0] - started if first else None,
                tokens_per_second=(num_tokens - first[1]) / (now - first[0]) if first and now > first[0] else None,
            )
            yield current
    output = request.result(0)
    metrics = output.metrics
    seconds = metrics.finish_time - metrics.first_token_time if metrics and metrics.first_token_time else 0.0
    yield replace(
        current,
        text=current.text + texts.push([], is_last=True),
        new_tokens=len(output.token_ids),
        seconds_to_first_token=metrics.time_to_first_token if metrics else None,
        tokens_per_second=(len(output.token_ids) - 1) / seconds if seconds else None,
        finish_reason=output.finish_reason,
    )


def _seconds_between(hub: Hub) -> float:
    """Between two pieces of one reply, with so many others beside it."""
    return max(SHOW_SECONDS, len(hub.tickets) / MOST_UPDATES)


def _cached_tokens(hub: Hub, ticket: Ticket) -> int | None:
    """Prompt tokens found in the pool when the request was admitted, as far as the engine's events still tell."""
    snapshot = hub.engine.snapshot()
    group = find_group(snapshot, ticket.label)
    if group is not None and group["sequences"]:
        return None if group["status"] == "waiting" else group["sequences"][0].get("num_cached_tokens")
    events = [event for event in snapshot["events"] if event.get("request_id") == ticket.label]
    if any(event["kind"] == "admitted" for event in events):
        return sum(event["num_tokens"] for event in events if event["kind"] == "prefix_hit")
    return None


def describe(current: Reply, is_slow: bool = False) -> str:
    """What a reply took, in a line."""
    if current.finish_reason is None and not current.new_tokens:
        return f"{current.label}: {current.prompt_tokens:,} prompt tokens, waiting for a step"
    parts = [count(current.new_tokens, "token")]
    if current.tokens_per_second is not None:
        parts.append(f"{current.tokens_per_second:,.0f} tokens/s" + " in slow motion" * is_slow)
    if current.seconds_to_first_token is not None:
        parts.append(f"first after {format_seconds(current.seconds_to_first_token)}")
    if current.cached_tokens is not None:
        parts.append(f"{current.cached_tokens:,} of {current.prompt_tokens:,} prompt tokens from the cache")
    if current.finish_reason is not None:
        parts.append(
            "ended by " + ENDINGS.get(current.finish_reason, current.finish_reason)
            if current.finish_reason != "cancelled"
            else "stopped"
        )
    return f"{current.label}: " + " · ".join(parts)


def format_seconds(seconds: float) -> str:
    """`0.034` as `34 ms`, `2.5` as `2.5 s`."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def as_json(current: Reply) -> dict[str, Any]:
    """For API clients."""
    return {name: getattr(current, name) for name in Reply.__dataclass_fields__ if name != "text"}
