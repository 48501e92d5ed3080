"""Three of the twelve points with a model of 125M, on the real engine: `python -m paper.measured`, on a quiet machine.

    python -m paper.measured                        hf_paged, Orca (Oracle) and Orca (Max); some minutes
    python -m paper.measured --requests 24 --rounds 1

A random Llama in float32 on CPU, one torch thread. As for the embedded model's points, requests have ShareGPT's lengths
over 8 and the pool 15.7K slots over 8. All requests are there at once. The policies are those of the simulator, given
to `patch(policy=...)`. The systems are served in turn, round by round; a ratio is of two runs of one round. Seconds are
those of the process on the CPU, which other processes change less than those of the clock.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import command
import torch
from common import device_facts
from generate import llama_125m
from workload import draw_lengths

import hf_paged
from hf_paged.core.sequence import SequenceGroup
from paper import policies
from paper.simulator import rounded

SCALE = 8  # by which lengths, context and pool are smaller than the paper's
SLOTS, CONTEXT, BLOCK_SIZE = 15_700 // SCALE, 2048 // SCALE, 4
SYSTEMS = policies.PAGED, policies.ORACLE, policies.MAX


class OnEngine(hf_paged.FCFS):
    """A system's policy for `patch`. What it needs, tables and lengths, is there when a group is to be let in."""

    def __init__(self, model: Any, system: policies.System) -> None:
        self._model, self._system = model, system
        self._made: hf_paged.FCFS | None = None
        self._lengths: dict[int, tuple[int, int]] = {}

    def spare(self, group: SequenceGroup, num_blocks: int, is_alone: bool, is_forced: bool) -> int | None:
        if self._made is None:
            self._made = self._system.policy(self._model.paged.core.manager, self._lengths.__getitem__, CONTEXT)
        for sequence in group.sequences:
            prompt = sequence.num_prompt_tokens
            self._lengths.setdefault(sequence.seq_id, (prompt, group.max_tokens - prompt))
        return self._made.spare(group, num_blocks, is_alone, is_forced)

    def blocks(self, requests: Sequence[tuple[int, int]]) -> list[int] | None:
        return self._made.blocks(requests) if self._made else None


def draw(count: int, vocabulary: int) -> Iterator[tuple[list[int], int]]:
    """Prompts, and how many tokens each of them wants."""
    rng, lengths = random.Random(0), draw_lengths("sharegpt", 2)
    while count:
        prompt, output = (max(1, round(length / SCALE)) for length in next(lengths))
        if prompt + 2 <= CONTEXT:
            yield [rng.randrange(3, vocabulary) for _ in range(prompt)], max(2, min(output, CONTEXT - prompt))
            count -= 1


def serve(model: Any, system: policies.System, requests: list[tuple[list[int], int]]) -> dict[str, float]:
    """All requests at once: how many are served a second, and rows a step."""
    pool = {"block_size": BLOCK_SIZE, "num_blocks": SLOTS // BLOCK_SIZE, "enable_prefix_caching": False}
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with hf_paged.patched(model, **pool, preemption="recompute", policy=OnEngine(model, system)):
        model.paged.warm_up()
        model.paged.pause()
        handles = [model.paged.submit(ids, max_new_tokens=output, **options) for ids, output in requests]
        started = time.process_time()
        model.paged.resume()
        num_tokens = sum(len(handle.result().token_ids) for handle in handles)
        seconds, stats = time.process_time() - started, model.paged.stats()
        model.paged.check_invariants()
    assert num_tokens == sum(output for _, output in requests)
    figures = {"requests_per_second": len(requests) / seconds, "tokens_per_step": num_tokens / stats.num_steps}
    return {name: rounded(value) for name, value in figures.items()} | {"preempted": stats.num_preemptions}


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.set_defaults(out=Path(__file__).parents[1] / "results" / "paper")
    args = parser.parse_args(argv)
    command.quiet()
    model = llama_125m(torch.float32)
    requests = list(draw(args.requests, model.config.vocab_size))
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        order = SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]
        rounds.append({system.name: serve(model, system, requests) for system in order})
        print(rounds[-1], flush=True)
    times: dict[str, dict[str, float]] = {}
    for other in SYSTEMS[1:]:
        speeds = [[one[system.name]["requests_per_second"] for system in (policies.PAGED, other)] for one in rounds]
        ratios = [rounded(ours / theirs) for ours, theirs in speeds]
        times[other.name] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    print(times)
    about = {"what": __doc__.splitlines()[0], "machine": device_facts(torch.device("cpu")), "requests": args.requests}
    command.save(args.out / "measured_125m.json", about, {"times_the_throughput": times, "rounds": rounds})


if __name__ == "__main__":
    main()
