"""What the bookkeeping of a step costs: microseconds of `schedule()` + `update()`, without any model.

    python benchmarks/scheduler.py --out benchmarks/results

Each row is a number of running decodes: with none waiting, with one request waiting that does not fit (it is tried
and refused in every step), with 100,000 of them, and with prompts coming in by chunks beside the decodes. The setting
is the dearer one where there is a choice: prefix caching is on, the step has room for more sequences, so that admission
is tried, and a sixteenth of the decodes begins a block in every step.

Handing each sequence its next token and `wake` are the engine's part and are not timed. Rounds of the cases of a row
alternate, so that what else the machine does falls on all of them; a figure is the smallest of the rounds' medians,
and `p95` belongs to that round.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import dataclass

import command
import torch
from common import device_facts
from rich.table import Table
from tqdm import tqdm

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence

BLOCK_SIZE = 16
CONTEXT = 512  # tokens of a running decode at the start
CHUNK_TOKENS = 1024  # tokens a mixed step prefills
PROMPT_TOKENS = 3000  # of the prompts that a mixed step takes chunks of


def random_tokens(rng: random.Random, n: int) -> list[int]:
    """Token ids below 256: a block of sixteen has 128 random bits, and small ints cost no memory of their own."""
    return list(rng.randbytes(n))


@dataclass
class Case:
    """One row's setting: `num_decodes` decodes that never end, `num_waiting` requests too long for the pool."""

    num_decodes: int
    num_waiting: int
    mixed: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(0)
        n = self.num_decodes
        # What the decodes take in a step, and what they start with. A `ballast` outside all tables holds the rest of
        # the pool and shrinks by what each step takes: the pool stays as full as it was.
        self.grow = -(-n // BLOCK_SIZE)
        start = n * (CONTEXT // BLOCK_SIZE + 1)
        self.free = self.grow + 8
        num_blocks = start + self.free + 400 * self.grow + 4 * PROMPT_TOKENS // BLOCK_SIZE
        self.manager = BlockManager(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.manager, n + (CHUNK_TOKENS if self.mixed else 2048), 2 * n + 16)
        self.decodes = [self.submit(random_tokens(self.rng, CONTEXT + i % BLOCK_SIZE)) for i in range(n)]
        while self.scheduler.queues.has_work:
            self.scheduler.update(self.scheduler.schedule())
        num_spare = 0 if self.mixed else self.manager.pool.num_free - self.free
        self.ballast = self.manager.pool.allocate(num_spare)
        # One list for all of them: none of these requests ever runs.
        too_long = random_tokens(self.rng, (num_blocks // 100 + self.free + 64) * BLOCK_SIZE)
        for _ in range(self.num_waiting):
            self.submit(too_long)
        self.prompt: Sequence | None = None

    def submit(self, token_ids: list[int]) -> Sequence:
        sequence = self.scheduler.new_sequence()
        sequence.token_ids, sequence.num_tokens, sequence.is_wanted = token_ids, len(token_ids), True
        sequence.logits_from = len(token_ids) - 1
        self.scheduler.queues.wake(sequence.group)
        return sequence

    def advance(self) -> None:
        """What the engine does between two steps: every decode has its next token; a new prompt follows the last."""
        token = self.rng.randrange(256)
        for sequence in self.decodes:
            assert sequence.token_ids is not None
            sequence.token_ids.append(token)
            sequence.logits_from = sequence.num_tokens
            sequence.num_tokens += 1
            self.scheduler.queues.wake(sequence.group)
        if self.mixed and (self.prompt is None or not self.prompt.num_uncomputed_tokens):
            if self.prompt is not None:
                self.scheduler.free(self.prompt)
            self.prompt = self.submit(random_tokens(self.rng, PROMPT_TOKENS))
        if not self.mixed:
            missing = self.free - self.manager.pool.num_free
            self.manager.pool.free(self.ballast[len(self.ballast) - missing :])
            del self.ballast[len(self.ballast) - missing :]

    def rewind(self) -> None:
        """Back to the contexts at the start, so that the cost of a step does not depend on how many came before."""
        for i, sequence in enumerate(self.decodes):
            self.scheduler.crop(sequence, CONTEXT + i % BLOCK_SIZE)
        num_spare = self.manager.pool.num_free - self.free
        if not self.mixed and num_spare > 0:
            self.ballast += self.manager.pool.allocate(num_spare)

    def round(self, num_steps: int) -> list[float]:
        """Microseconds of each of so many steps."""
        scheduler = self.scheduler
        times = []
        self.rewind()
        for _ in range(num_steps):
            self.advance()
            start = time.perf_counter()
            output = scheduler.schedule()
            scheduler.update(output)
            times.append(1e6 * (time.perf_counter() - start))
            expected = self.num_decodes + self.mixed
            assert output.num_seqs == expected, f"{output.num_seqs} rows in a step of {expected}"
        return times


def measure(cases: dict[str, Case], num_rounds: int, num_steps: int) -> dict[str, dict[str, float]]:
    """For each case: microseconds per step (the best round's median), that round's 95th percentile, the cost a row."""
    medians: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for case in cases.values():
        case.round(3)  # warm-up
    for _ in range(num_rounds):
        for name, case in cases.items():
            gc.collect()  # what building the cases owes is not the steps' to pay
            times = case.round(num_steps)
            medians[name].append((statistics.median(times), statistics.quantiles(times, n=20)[-1]))
    results = {}
    for name, case in cases.items():
        median, p95 = min(medians[name])
        results[name] = {
            "us_per_step": round(median, 1),
            "us_p95": round(p95, 1),
            "us_per_sequence": round(median / case.num_decodes, 3),
        }
    return results


def main(argv: list[str] | None = None) -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--decodes", type=int, nargs="+", default=[16, 256, 4096], help="running decodes, one row each")
    parser.add_argument("--waiting", type=int, default=100_000, help="waiting requests of the second case")
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    if args.steps > 300:
        parser.error("the pool has room for 300 steps of a round")

    results: dict[str, dict[str, dict[str, float]]] = {}
    for n in tqdm(args.decodes, leave=False):
        cases = {
            "none waiting": Case(n, 0),
            "one waiting": Case(n, 1),
            "many waiting": Case(n, args.waiting),
            "prefill": Case(n, 0, mixed=True),
        }
        # Fewer steps where one costs much: the whole run stays below a minute or two.
        results[str(n)] = measure(cases, args.rounds, max(20, args.steps // (4 if n > 1000 else 1)))

    table = Table("decodes", "0 waiting", "1 waiting", f"{args.waiting:,} waiting", f"prefill of {CHUNK_TOKENS}")
    for n, row in results.items():
        cells = [f"{case['us_per_step']:,.0f} ({case['us_p95']:,.0f})" for case in row.values()]
        table.add_row(f"{int(n):,}", *cells)
    print("schedule() + update(), microseconds a step: median (95th percentile)")
    command.show(table)
    about = {
        "what": "microseconds of schedule() + update() a step: the smallest of the rounds' medians, and its p95",
        "settings": {
            "block_size": BLOCK_SIZE,
            "context": CONTEXT,
            "mixed_chunk_tokens": CHUNK_TOKENS,
            "waiting": args.waiting,
            "steps": args.steps,
            "rounds": args.rounds,
        },
        "machine": device_facts(torch.device("cpu")),
    }
    command.save(args.out / "scheduler.json", about, results)


if __name__ == "__main__":
    main()
