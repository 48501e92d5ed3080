"""Requests of random lengths, as public traces and the PagedAttention paper give them, and their arrivals."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

QUANTILES = Path(__file__).parent / "length_quantiles.json"
PAPER_MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}  # PagedAttention paper, figure 11
SHORTEST = 4  # tokens of a prompt or an output: what is shorter is left out, as vLLM's own benchmark does
HISTORY = 1024  # tokens that a chat's prompt is cut to, and its answer at most


@dataclass(slots=True)
class Request:
    arrival: float
    num_prompt: int
    num_output: int

    @property
    def num_total(self) -> int:
        return self.num_prompt + self.num_output


def draw(rng: random.Random, probabilities: list[float], values: list[int]) -> int:
    """A length by inverse transform, straight lines between the quantiles."""
    u = rng.random()
    i = next(i for i in range(1, len(values)) if u <= probabilities[i] or i == len(values) - 1)
    share = (u - probabilities[i - 1]) / (probabilities[i] - probabilities[i - 1])
    return max(1, round(values[i - 1] + share * (values[i] - values[i - 1])))


def draw_lengths(name: str, seed: int) -> Iterator[tuple[int, int]]:
    """Endless lengths of a prompt and its output, drawn apart.

    Args:
        name: "sharegpt" or "alpaca" with the paper's means, "chat" (turns of a conversation, history and all),
            "translation", or a table of length_quantiles.json as it is: "table NAME".
        seed: Of what is drawn.
    """
    rng = random.Random(f"{name.removeprefix('table ')} {seed}")
    data = json.loads(QUANTILES.read_text())
    p, tables = data["probabilities"], data["tables"]
    table = tables[name.removeprefix("table ")] if name.startswith("table ") else tables["sharegpt"]
    means = PAPER_MEANS.get(name, (0.0, 0.0))
    while True:
        if name == "translation":
            # Sentences of newstest2016 have some 22 words; taken as 1.35 tokens a word in English and 1.9 in German.
            words = 22 * rng.lognormvariate(-0.125, 0.5)
            yield round(1.35 * words) + 1, round(1.9 * words) + 1
        elif name == "alpaca":
            prompt, output = (1 + math.floor(math.log(1 - rng.random()) / math.log(1 - 1 / mean)) for mean in means)
            yield prompt, output
        else:
            prompt, output = draw(rng, p, table["input"]), draw(rng, p, table["output"])
            if name == "chat":
                prompt, output = min(prompt, HISTORY), min(output, HISTORY)
            elif name == "sharegpt":
                prompt = max(1, round(prompt * means[0] / table["mean_input"]))
                output = max(1, round(output * means[1] / table["mean_output"]))
            yield prompt, output


def poisson(requests: list[Request], rate: float, seed: int) -> None:
    """Gives requests random arrivals at so many a second."""
    rng, now = random.Random(f"arrivals {seed}"), 0.0
    for request in requests:
        request.arrival = now
        now += rng.expovariate(rate)


def draw_requests(
    name: str, rate: float, seconds: float, *, seed: int = 0, prefix: int = 0, context: int = 2048
) -> list[Request]:
    """Those that arrive within so many seconds, at so many a second, by a Poisson process.

    Args:
        name: Of the workload, see `draw_lengths`.
        rate: Requests a second.
        seconds: Of arrivals.
        seed: Of lengths and arrivals; the same lengths at every rate.
        prefix: Tokens before each prompt.
        context: Tokens that a request has at most, prompt and output: the output is cut.
    """
    fitting = (
        (prompt + prefix, min(output, context - prompt - prefix))
        for prompt, output in draw_lengths(name, seed)
        if min(prompt, output) >= SHORTEST and prompt + prefix + SHORTEST <= context
    )
    made = [Request(0.0, *pair) for pair in itertools.islice(fitting, max(1, round(rate * seconds)))]
    poisson(made, rate, seed)
    return made
