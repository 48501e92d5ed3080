"""Requests of the paper's workloads: lengths as it gives them, arrivals at random."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from workload import QUANTILES, Request, draw, draw_lengths, load_trace, poisson

SHORTEST = 4  # tokens of a prompt or an output: what is shorter is left out, as vLLM's own benchmark does
HISTORY = 1024  # tokens that a chat's prompt is cut to, and its answer at most


def lengths(name: str, seed: int, trace: Path | None = None) -> Iterator[tuple[int, int]]:
    """Endless lengths of a prompt and its output.

    Args:
        name: "sharegpt", "alpaca", "chat" (turns of a conversation, history and all) or "translation".
        seed: Of what is drawn.
        trace: Instead of "sharegpt": a file that `replay.py` reads.
    """
    rng = random.Random(f"{name} {seed}")
    if name == "chat":
        data = json.loads(QUANTILES.read_text())
        p, table = data["probabilities"], data["tables"]["sharegpt"]
        while True:
            prompt, output = draw(rng, p, table["input"]), draw(rng, p, table["output"])
            yield min(prompt, HISTORY), min(output, HISTORY)
    elif name == "translation":
        # Sentences of newstest2016 have some 22 words; taken as 1.35 tokens a word in English and 1.9 in German.
        while True:
            words = 22 * rng.lognormvariate(-0.125, 0.5)
            yield round(1.35 * words) + 1, round(1.9 * words) + 1
    elif trace is not None:
        read, _ = load_trace(trace)
        rng.shuffle(read)
        yield from itertools.cycle([(request.num_prompt, request.num_output) for request in read])
    else:
        yield from draw_lengths(name, seed)


def requests(
    name: str,
    rate: float,
    seconds: float,
    *,
    seed: int = 0,
    prefix: int = 0,
    context: int = 2048,
    trace: Path | None = None,
) -> list[Request]:
    """Those that arrive within so many seconds, at so many a second, by a Poisson process.

    Args:
        name: Of the workload, see `lengths`.
        rate: Requests a second.
        seconds: Of arrivals.
        seed: Of lengths and arrivals; the same lengths at every rate.
        prefix: Tokens before each prompt.
        context: Tokens that a request has at most, prompt and output: the output is cut.
        trace: See `lengths`.
    """
    fitting = (
        (prompt + prefix, min(output, context - prompt - prefix))
        for prompt, output in lengths(name, seed, trace)
        if min(prompt, output) >= SHORTEST and prompt + prefix + SHORTEST <= context
    )
    made = [Request(0.0, *pair) for pair in itertools.islice(fitting, max(1, round(rate * seconds)))]
    poisson(made, rate, seed)
    return made
