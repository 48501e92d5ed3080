"""The named endpoints for `gradio_client`: what the tabs do, for programs.

Gradio reads the types of an endpoint from its signature, and of a stream those of one item: the return annotations here
are those of what is yielded. (For the same reason this module does not postpone annotations.)
"""

import asyncio
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import gradio as gr

from .chat import as_json, reply
from .compare import memory_maps
from .generation import Sampling
from .hub import Hub
from .limits import RefusedError, check_number, check_whole_number
from .pages.step import queue_requests, take_steps
from .pages.viewer import owner_of
from .pressure import burst
from .prompts import check_messages
from .samples import beams, samples
from .told import raised


def add_endpoints(hub: Hub) -> None:
    """Adds them to the app that is being built."""
    limits = hub.limits

    def add(function: Any, name: str, concurrency_limit: int | None = limits.requests) -> None:
        gr.api(raised(function), api_name=name, concurrency_limit=concurrency_limit, concurrency_id=f"api-{name}")

    async def chat(
        request: gr.Request,
        message: str,
        history: list[dict[str, Any]] = [],  # noqa: B006 - Gradio shows the default, which is never changed
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 0,
        repetition_penalty: float = 1.1,
        seed: int | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Streams the reply to a message: its text and what it took, so far. `finish_reason` is set at the end."""
        sampling = Sampling.checked(limits, max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
        messages = [*check_messages(history), {"role": "user", "content": message}]
        async with aclosing(reply(hub, owner_of(request), messages, sampling)) as replies:
            async for current in replies:
                yield current.text, as_json(current)

    async def draw_samples(
        request: gr.Request,
        prompt: str,
        count: int = 4,
        max_new_tokens: int = 48,
        temperature: float = 0.9,
        seed: int | None = None,
    ) -> tuple[list[dict[str, str]], str, dict[str, Any]]:
        """Streams samples of one prompt: title, text and note of each; what sharing saved, in words and figures."""
        sampling = Sampling.checked(limits, max_new_tokens, temperature, seed=seed)
        async with aclosing(samples(hub, owner_of(request), prompt, _count(count), sampling)) as states:
            async for state in states:
                yield [asdict(branch) for branch in state.branches], state.sharing, state.figures

    async def search_beams(
        request: gr.Request, prompt: str, count: int = 4, max_new_tokens: int = 32
    ) -> tuple[list[dict[str, str]], list[dict[str, Any]], str, dict[str, Any]]:
        """Streams a beam search: its beams, the tree of all that were alive, and what sharing saved.

        A node of the tree has an id, a parent, a token, the sum of its log-probabilities, a step and, if the beam was
        returned, its rank.
        """
        sampling = Sampling.checked(limits, max_new_tokens, 0.0)
        async with aclosing(beams(hub, owner_of(request), prompt, _count(count), sampling)) as states:
            async for state in states:
                yield [asdict(branch) for branch in state.branches], state.nodes, state.sharing, state.figures

    async def fire_burst(
        request: gr.Request,
        count: int = 24,
        max_new_tokens: int = 64,
        longest_prompt: int = 120,
        ends_at_paragraph: bool = True,
        seed: int | None = None,
    ) -> tuple[str, list[dict[str, Any]]]:
        """Streams a burst of the package's prompts: how it stands in a sentence, and each request's row."""
        sampling = Sampling.checked(limits, max_new_tokens, 0.8, 0.95, seed=seed)
        longest = check_whole_number("The longest prompt", longest_prompt, 2, limits.prompt_tokens)
        states = burst(hub, owner_of(request), _count(count), sampling, longest, ends_at_paragraph)
        async with aclosing(states):
            async for state in states:
                yield state.describe(), [asdict(row) for row in state.rows]

    async def compare_memory(
        request: gr.Request, count: int = 12, max_new_tokens: int = 64, longest_prompt: int = 200
    ) -> list[dict[str, Any]]:
        """Runs a burst, then the same requests on stock transformers: three memory maps with rows and waste."""
        sampling = Sampling.checked(limits, max_new_tokens, 0.8, 0.95)
        longest = check_whole_number("The longest prompt", longest_prompt, 2, limits.prompt_tokens)
        record = None
        async with aclosing(burst(hub, owner_of(request), _count(count), sampling, longest)) as states:
            async for state in states:
                record = state.record
        if record is None:
            raise RefusedError("The run was stopped: there is nothing to compare.")
        return [each.as_json() for each in await asyncio.to_thread(memory_maps, hub.loaded, record)]

    async def cancel(request: gr.Request) -> int:
        """Cancels all requests of this client's session, and returns how many."""
        return hub.cancel(owner_of(request))

    async def stats() -> dict[str, Any]:
        """The engine's gauges and counters."""
        return asdict(await asyncio.to_thread(hub.stats))

    async def snapshot() -> dict[str, Any]:
        """The pool, the block tables, the queues and recent events."""
        return (await asyncio.to_thread(hub.picture)).snapshot

    async def set_pool(num_blocks: int, preemption: str = "auto", cancel_running: bool = False) -> str:
        """Changes the pool, for all visitors. Refused while requests run, unless they are to be cancelled."""
        return await asyncio.to_thread(hub.resize, num_blocks, preemption, cancel_running)

    async def set_speed(steps_per_second: float = 0.0) -> None:
        """Slow motion of so many model steps a second; 0: full speed."""
        speed = check_number("Steps a second", steps_per_second, 0.0, 1000.0)
        await asyncio.to_thread(hub.pacer.set_speed, speed)

    async def pause() -> None:
        """Holds the engine, for all visitors."""
        await asyncio.to_thread(hub.pacer.pause)

    async def resume() -> None:
        """Lets it run again."""
        await asyncio.to_thread(hub.pacer.resume)

    async def step(count: int = 1) -> list[str]:
        """Has the paused engine make up to so many steps, and explains each."""
        steps = check_whole_number("The number of steps", count, 1, 100)
        return [explanation.text for explanation in await asyncio.to_thread(take_steps, hub, steps)]

    async def queue_three(request: gr.Request) -> list[str]:
        """Submits three short requests and returns their labels: something for the step mode to do."""
        return await asyncio.to_thread(queue_requests, hub, owner_of(request))

    add(chat, "chat")
    add(draw_samples, "samples")
    add(search_beams, "beams")
    add(fire_burst, "burst")
    add(compare_memory, "memory_maps", 4)
    add(cancel, "cancel")
    add(stats, "stats")
    add(snapshot, "snapshot")
    add(set_pool, "set_pool", 1)
    add(set_speed, "set_speed")
    add(pause, "pause")
    add(resume, "resume")
    add(step, "step")
    add(queue_three, "queue_three")


def _count(value: Any) -> int:
    """A number of requests or sequences: more than is allowed is refused where it is known what that is."""
    return check_whole_number("The number", value, 1, 10_000)
