"""`generate_all`: many prompts as requests of one continuous batch, submitted a little ahead of what can run."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from hf_paged.core.errors import QueueFullError
from hf_paged.core.interrupts import allowed_interrupt
from hf_paged.engine.core import EngineCore
from hf_paged.engine.request import Request, RequestOutput
from hf_paged.engine.room import Room


def generate_all(
    core: EngineCore,
    room: Room,
    prompts: Iterable[Any],
    submit: Callable[[Any], Request],
    while_waiting: Callable[[], AbstractContextManager[None]],
    progress_bar: bool,
) -> list[RequestOutput]:
    """Submits all prompts and waits for them; see `Engine.generate`."""
    if isinstance(prompts, str | Tensor) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of prompts, each of token ids, got a {type(prompts).__name__}")
    prompts = list(prompts)
    # In order, and ahead: memory for requests in flight, not for all of them.
    ahead = 2 * core.config.max_num_seqs
    if core.config.max_waiting is not None:
        ahead = min(ahead, core.config.max_waiting)
    results: dict[int, RequestOutput] = {}
    running: dict[int, Request] = {}
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    remaining = deque(enumerate(prompts))

    def finished(seconds: float) -> Iterator[int]:
        with suppress(queue.Empty):
            with while_waiting(), allowed_interrupt():
                first = done.get(timeout=seconds) if seconds else done.get_nowait()
            yield first
            while True:
                yield done.get_nowait()

    with tqdm(total=len(prompts), disable=not progress_bar, unit="prompt", desc="generate") as bar:
        try:
            while remaining or running:
                seconds = 1.0 if running else 0.01
                if remaining and len(running) < ahead and room.is_free:
                    with suppress(QueueFullError):  # another caller was faster
                        index, prompt = remaining[0]
                        running[index] = submit(prompt)
                        remaining.popleft()
                        running[index].on_done(partial(done.put, index))
                        seconds = 0.0
                for index in finished(seconds):
                    results[index] = running.pop(index).result()
                    bar.set_postfix(running=core.num_running, refresh=False)
                    bar.update()
        except BaseException:
            for request in running.values():
                request.cancel()
            raise
    return [results[index] for index in range(len(prompts))]
