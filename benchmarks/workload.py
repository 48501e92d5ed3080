"""Requests as the replays and the sharing benchmark draw or read them: lengths, traces, arrivals."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

QUANTILES = Path(__file__).parent / "length_quantiles.json"
TRACE_BLOCK = 512  # tokens that one of Mooncake's hash ids stands for
PAPER_MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}  # PagedAttention paper, figure 11


@dataclass(slots=True)
class Request:
    """One line of a trace; `hash_ids` says which of its tokens it shares, if anything is known about that."""

    arrival: float
    num_prompt: int
    num_output: int
    hash_ids: list[int] | None = None

    @property
    def num_total(self) -> int:
        return self.num_prompt + self.num_output


def load_trace(path: Path, num_requests: int | None = None) -> tuple[list[Request], bool]:
    """A trace's first requests, in order of arrival, and whether it has arrivals (in seconds, the first at 0)."""
    requests: list[Request] = []
    with path.open(newline="") as lines:
        if path.suffix in (".jsonl", ".json"):
            for row in map(json.loads, itertools.islice(lines, num_requests)):
                ids, length = row.get("hash_ids"), row["input_length"]
                if ids is not None and len(ids) != -(-length // TRACE_BLOCK):
                    raise ValueError(f"{path.name}: {len(ids)} hash ids for {length} tokens")
                requests.append(Request(row["timestamp"] / 1000, length, row["output_length"], ids))
            has_arrivals = True
        else:
            reader = csv.DictReader(lines)
            columns = set(reader.fieldnames or ())
            has_arrivals = "TIMESTAMP" in columns
            if has_arrivals and {"ContextTokens", "GeneratedTokens"} <= columns:
                names = ("ContextTokens", "GeneratedTokens")
            elif {"num_prefill_tokens", "num_decode_tokens"} <= columns:
                names = ("num_prefill_tokens", "num_decode_tokens")
            else:
                raise ValueError(f"{path.name}: no format has the columns {sorted(columns)}")
            for row in itertools.islice(reader, num_requests):
                # Seven digits of a second: datetime takes six.
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() if has_arrivals else 0.0
                requests.append(Request(at, int(float(row[names[0]])), int(float(row[names[1]]))))
    requests = [request for request in requests if request.num_prompt > 0 and request.num_output > 0]
    if not requests:
        raise ValueError(f"{path.name}: no requests")
    if has_arrivals:
        requests.sort(key=lambda request: request.arrival)
        first = requests[0].arrival
        for request in requests:
            request.arrival -= first
    return requests, has_arrivals


def quantiles(values: list[int], probabilities: list[float]) -> list[int]:
    """Order statistics, the nearest of each probability."""
    ordered = sorted(values)
    return [ordered[round(p * (len(ordered) - 1))] for p in probabilities]


def draw(rng: random.Random, probabilities: list[float], values: list[int]) -> int:
    """A length by inverse transform, straight lines between the quantiles."""
    u = rng.random()
    i = next(i for i in range(1, len(values)) if u <= probabilities[i] or i == len(values) - 1)
    share = (u - probabilities[i - 1]) / (probabilities[i] - probabilities[i - 1])
    return max(1, round(values[i - 1] + share * (values[i] - values[i - 1])))


def draw_requests(name: str, num_requests: int, seed: int) -> list[Request]:
    """Requests with the lengths of a table. Input and output are drawn apart: what ties them is not in the tables."""
    tables = json.loads(QUANTILES.read_text())
    p, table, rng = tables["probabilities"], tables["tables"][name], random.Random(f"{name} {seed}")
    return [Request(0.0, draw(rng, p, table["input"]), draw(rng, p, table["output"])) for _ in range(num_requests)]


def poisson(requests: list[Request], rate: float, seed: int) -> None:
    """Gives requests random arrivals at so many a second."""
    rng, now = random.Random(f"arrivals {seed}"), 0.0
    for request in requests:
        request.arrival = now
        now += rng.expovariate(rate)


def draw_lengths(name: str, seed: int) -> Iterator[tuple[int, int]]:
    """Endless `(prompt, output)` lengths in tokens, of "sharegpt" or "alpaca" with the paper's means."""
    rng = random.Random(f"{name} {seed}")
    tables = json.loads(QUANTILES.read_text())
    probabilities, table = tables["probabilities"], tables["tables"]["sharegpt"]
    means = PAPER_MEANS["alpaca" if name == "alpaca" else "sharegpt"]
    while True:
        if name == "alpaca":
            prompt, output = (1 + math.floor(math.log(1 - rng.random()) / math.log(1 - 1 / mean)) for mean in means)
        else:
            prompt = round(draw(rng, probabilities, table["input"]) * means[0] / table["mean_input"])
            output = round(draw(rng, probabilities, table["output"]) * means[1] / table["mean_output"])
        yield max(prompt, 1), max(output, 1)
