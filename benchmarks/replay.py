"""Replays request traces through the real scheduler and block tables, against a model of what a step costs.

    python benchmarks/replay.py                                              # lengths drawn from length_quantiles.json
    python benchmarks/replay.py --trace AzureLLMInferenceTrace_conv.csv      # a trace, at its own arrivals
    python benchmarks/replay.py --trace lengths.csv --rate 4 --num-samples 4 --out benchmarks/results

Nothing is computed: the clock is virtual, a step lasts what the cost model says. Scheduling, block tables, prefix
hashes, sharing, copy-on-write and preemption are those of the package. Formats of a trace, told apart by their columns:

- csv `TIMESTAMP,ContextTokens,GeneratedTokens` (AzurePublicDataset),
- csv `num_prefill_tokens,num_decode_tokens` (etalon's processed traces; no arrivals: Poisson at `--rate`),
- jsonl `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (Mooncake): one id for each 512 tokens of a
  prompt, the same id for the same tokens behind the same prefix. Token ids are made from them, so that what the trace
  shares is shared here.

Token ids are bytes: a block of sixteen has 128 random bits, so nothing is shared by accident.

The cost model is Llama-3.1-8B in bfloat16 on an H100 SXM (3.35 TB/s, 989 TFLOP/s), of which a step is taken to reach
80 % of the bandwidth (2.68 TB/s) and half of the arithmetic (495 TFLOP/s; attention of long prompts 400). Terms are
added as if nothing overlapped::

    step         7.0 ms    read 16.06 GB of weights: 6.0 ms; launches and host work: 1 ms
    prompt token 28 us     2 FLOP for each of 7.0e9 weights (embedding and head left out), 14 GFLOP at 495 TFLOP/s
    decode token 5 us      its products hide under the weights; logits (0.5 MB, four passes): 1 us; host: 4 us
    KV token     49 ns     2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB at 2.68 TB/s, once for each decode or chunk
    prompt pair  1.3 ns    a prompt token that attends to one token: 4 x 4096 x 32 = 524,288 FLOP at 400 TFLOP/s
    swap         2.6 us    for each token's 128 KiB, one way over PCIe 5 at 50 GB/s
    copy         0.1 us    for each token of a copied block, read and written at 2.68 TB/s

The pool's default, 24,576 blocks of 16 tokens, is 48 GiB: what such a card of 80 GB has left beside the weights.

Contiguous allocation is what the same running sequences would hold at the same moment, as in the PagedAttention paper:
`max` reserves the longest request of the trace for each, `pow2` the prompt and the next power of two of the output,
`oracle` the prompt and the output to come; a sample has its own copy of the prompt in each.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import command
from common import versions
from simulation import Job, Simulation, Work
from workload import QUANTILES, TRACE_BLOCK, Request, draw_requests, load_trace, poisson

from hf_paged.core.batch import Batch
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import needs
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence, SequenceGroup

KV_BYTES = 131_072  # of a token
NUM_POINTS = 200  # of a time series in the result
POLICIES = ("oracle", "pow2", "max")


@dataclass(frozen=True)
class CostModel:
    """Seconds; where they come from stands at the top of the file."""

    step: float = 7.0e-3
    prompt_token: float = 28e-6
    decode_token: float = 5e-6
    kv_token: float = 49e-9
    prompt_pair: float = 1.3e-9
    swap_token: float = 2.6e-6
    copy_token: float = 0.1e-6

    def seconds(self, output: Batch, block_size: int) -> float:
        """How long the step takes."""
        work = Work.of(output, block_size)
        return (
            self.step
            + work.prompt * self.prompt_token
            + work.decodes * self.decode_token
            + work.kv * self.kv_token
            + work.pairs * self.prompt_pair
            + work.swapped * self.swap_token
            + work.copied * self.copy_token
        )

    def prefers_swap(self, group: SequenceGroup) -> bool:
        """Whether out and in again is cheaper than computing again, which also means one step more."""
        tokens = sum(sequence.num_computed_tokens for sequence in group.sequences)
        pairs = sum(sequence.num_computed_tokens**2 // 2 for sequence in group.sequences)
        return 2 * self.swap_token * tokens < self.prompt_token * tokens + self.prompt_pair * pairs


# --------------------------------------------------------------------------------------------------------------- replay


def infinite_cache(requests: list[Request], block_size: int) -> tuple[float, float]:
    """Hit rates of a cache without limits, each request served when those before it are done.

    Returns:
        Of the trace's own blocks, and of prompt tokens in full blocks of `block_size` (the last token never counts).
    """
    seen: dict[int, int] = {}  # id -> how many of its tokens were seen before
    hit_blocks = num_blocks = hit_tokens = num_tokens = 0
    for request in requests:
        found, is_whole = 0, True
        sizes = [TRACE_BLOCK] * (request.num_prompt // TRACE_BLOCK) + [request.num_prompt % TRACE_BLOCK]
        for hash_id, size in zip(request.hash_ids or (), sizes):
            if is_whole and hash_id in seen:
                hit_blocks += 1
                found += min(size, seen[hash_id])
            is_whole = is_whole and seen.get(hash_id, 0) >= size
            seen[hash_id] = max(seen.get(hash_id, 0), size)
        hit_tokens += min(found, request.num_prompt - 1) // block_size * block_size
        num_blocks += len(request.hash_ids or ())
        num_tokens += request.num_prompt
    return hit_blocks / max(1, num_blocks), hit_tokens / num_tokens


class Replay(Simulation):
    """Requests through `Scheduler` and `BlockManager` on a virtual clock.

    Args:
        requests: In order of arrival.
        num_blocks: Blocks of the pool.
        block_size: Tokens a block.
        num_samples: Sequences that each prompt branches into; those after the first get other requests' output lengths.
        preemption: "recompute", "swap", or "auto": what the cost model finds cheaper.
        num_swap_blocks: Blocks in CPU memory; `None`: as many as in the pool, or none if nothing is swapped.
        sample_every: Steps from one look at the tables to the next.
        check_every: Steps from one check of all invariants to the next; 0: none but at the end.
    """

    def __init__(
        self,
        requests: list[Request],
        num_blocks: int = 24_576,
        block_size: int = 16,
        num_samples: int = 1,
        preemption: str = "auto",
        num_swap_blocks: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 256,
        seed: int = 0,
        sample_every: int = 32,
        check_every: int = 0,
        costs: CostModel | None = None,
    ) -> None:
        self.costs = costs or CostModel()
        prefers: dict[str, Callable[[SequenceGroup], bool]] = {
            "recompute": lambda group: False,
            "swap": lambda group: True,
            "auto": self.costs.prefers_swap,
        }
        if num_swap_blocks is None:
            num_swap_blocks = 0 if preemption == "recompute" else num_blocks
        manager = BlockManager(num_blocks, block_size, num_swap_blocks=num_swap_blocks)
        scheduler = Scheduler(manager, max_num_batched_tokens, max_num_seqs, prefers[preemption])
        super().__init__(requests, manager, scheduler, num_samples, seed, sample_every, check_every)
        self.longest = max((request.num_total for request in requests), default=0)
        self.unstarted: set[int] = set()  # sequences without a first chunk
        self.first_hit_tokens = self.first_query_tokens = 0
        self.times_to_first: list[float] = []
        self.times_a_token: list[float] = []

    def run(self, progress: bool = True) -> dict[str, Any]:
        """Serves all requests; returns `report()`."""
        self.serve(progress)
        return self.report()

    def seconds(self, batch: Batch) -> float:
        return self.costs.seconds(batch, self.block_size)

    def add(self, sequence: Sequence, request: Request, token_ids: list[int]) -> None:
        super().add(sequence, request, token_ids)
        self.unstarted.add(sequence.seq_id)

    def note_chunk(self, sequence: Sequence, first: int) -> None:
        if self.unstarted and sequence.seq_id in self.unstarted:
            self.unstarted.discard(sequence.seq_id)
            self.first_hit_tokens += first
            self.first_query_tokens += sequence.num_tokens

    def sample_output(self, job: Job) -> int:
        return self.rng.choice(self.requests).num_output

    def finished(self, job: Job) -> None:
        self.times_to_first.append(job.first_token_at - job.request.arrival)
        if job.request.num_output > 1:
            seconds = self.now - job.first_token_at
            self.times_a_token.append(seconds / (job.request.num_output - 1))

    def look(self, batch: Batch) -> None:
        """Notes the state of the pool and the queues during this step."""
        manager, scheduler, running = self.manager, self.scheduler, self.running()
        own = blocks = oracle = pow2 = 0
        for sequence in running:
            own += manager.num_tokens(sequence.seq_id)
            blocks += len(manager.blocks(sequence.seq_id))
            end = self.ends[sequence.seq_id]
            num_prompt = self.jobs[sequence.group.arrival].request.num_prompt
            oracle += end
            pow2 += num_prompt + (1 << (end - num_prompt - 1).bit_length())
        stored, allocated = manager.num_stored_tokens, manager.num_allocated_slots
        reserved = {"oracle": oracle, "pow2": pow2, "max": len(running) * self.longest}
        self.samples.add(
            time=self.now,
            seconds=self.unseen,
            stored=stored,
            allocated=allocated,
            waste=1 - stored / allocated,
            sharing=1 - manager.pool.num_in_use / blocks,
            shared_blocks=blocks - manager.pool.num_in_use,
            batch=batch.num_seqs,
            prompt_tokens=sum(n for n in batch.query_lens if n > 1),
            running=len(running),
            waiting=scheduler.queues.num_waiting,
            swapped=scheduler.queues.num_swapped,
            **{f"{name}_tokens": tokens for name, tokens in reserved.items()},
            **{f"{name}_waste": 1 - own / tokens for name, tokens in reserved.items()},
        )

    def report(self) -> dict[str, Any]:
        """The numbers, and the time series behind the plot."""
        samples, scheduler, manager = self.samples, self.scheduler, self.manager
        trace_rate, token_rate = infinite_cache(self.requests, self.block_size)
        contiguous = {}
        for name in POLICIES:
            per_sequence = samples.mean(f"{name}_tokens") / samples.mean("running")
            contiguous[name] = {
                "mean_tokens": round(samples.mean(f"{name}_tokens")),
                "peak_tokens": max(samples.columns[f"{name}_tokens"]),
                "mean_waste": round(samples.mean(f"{name}_waste"), 4),
                "times_paged": round(samples.mean(f"{name}_tokens") / samples.mean("allocated"), 2),
                "sequences_that_fit": int(self.capacity / per_sequence),
            }
        return {
            "requests": {
                "served": self.num_done,
                "refused": self.num_refused,
                "failed": self.num_failed,
                "mean_prompt_tokens": round(mean([r.num_prompt for r in self.requests]), 1),
                "mean_output_tokens": round(mean([r.num_output for r in self.requests]), 1),
            },
            "kv_waste": {
                "mean": round(samples.mean("waste"), 5),
                "max": round(max(samples.columns["waste"]), 5),
                "max_from_8_sequences": round(
                    max((w for w, n in zip(samples.columns["waste"], samples.columns["running"]) if n >= 8), default=0),
                    5,
                ),
                "at_peak": round(max(zip(samples.columns["allocated"], samples.columns["waste"]))[1], 5),
            },
            "pool": {
                "mean_use": round(samples.mean("allocated") / self.capacity, 4),
                "peak_use": round(manager.pool.peak_in_use / manager.pool.num_blocks, 4),
                "blocks_in_use_at_end": manager.pool.num_in_use,
                "swapped_blocks_at_end": manager.swap.num_in_use,
                "copy_on_write": manager.num_cow_copies,
                "evictions": manager.pool.num_evictions,
            },
            "sharing": {
                "mean_blocks_saved": round(samples.mean("shared_blocks")),
                "mean_share_saved": round(samples.mean("sharing"), 4),
                "max_share_saved": round(max(samples.columns["sharing"]), 4),
            },
            "prefix_cache": {
                "hit_rate": round(self.first_hit_tokens / max(1, self.first_query_tokens), 4),
                "infinite_cache_hit_rate": round(token_rate, 4),
                "infinite_cache_hit_rate_of_trace_blocks": round(trace_rate, 4),
                "hit_rate_with_preempted": round(manager.prefix.hit_tokens / max(1, manager.prefix.query_tokens), 4),
            },
            "preemptions": {
                "recompute": scheduler.preemption.num_preemptions - scheduler.preemption.num_swapped_out,
                "swap": scheduler.preemption.num_swapped_out,
                "admission_stalls": scheduler.admission.num_stalls,
            },
            "batch": {
                "mean_sequences": round(samples.mean("batch"), 1),
                "max_sequences": max(samples.columns["batch"]),
                "mean_waiting": round(samples.mean("waiting"), 1),
                "max_waiting": max(samples.columns["waiting"]),
                "mean_swapped": round(samples.mean("swapped"), 1),
            },
            "contiguous": contiguous,
            "modelled_speed": {
                "seconds": round(self.now, 1),
                "requests_per_second": round(self.num_done / self.now, 3),
                "output_tokens_per_second": round(self.num_outputs / self.now, 1),
                "time_to_first_token": spread(self.times_to_first),
                "time_per_output_token": spread(self.times_a_token),
            },
            "bookkeeping": {
                "steps": self.num_steps,
                "schedule_and_update_us_per_step": round(1e6 * self.scheduler_seconds / self.num_steps, 1),
                "schedule_and_update_us_per_sequence": round(1e6 * self.scheduler_seconds / self.num_batched, 2),
                "share_of_modelled_time": round(self.scheduler_seconds / self.now, 4),
                "replay_seconds": round(self.wall_seconds, 1),
                "peak_memory_mib": peak_memory_mib(),
            },
            "series": samples.thinned(NUM_POINTS),
        }


def mean(values: list[int]) -> float:
    return sum(values) / max(1, len(values))


def spread(values: list[float]) -> dict[str, float]:
    """Quantiles, in seconds."""
    ordered = sorted(values) or [math.nan]
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 4) for p in (50, 90, 99)}


def peak_memory_mib() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 1024))


# --------------------------------------------------------------------------------------------------------------- output


def plot(report: dict[str, Any], path: Path) -> None:
    """One figure of four panels; needs matplotlib."""
    with needs("hf-paged[bench]"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from PIL import Image

    results, settings, series = report["results"], report["settings"], report["results"]["series"]
    hours = series["time"][-1] > 7200
    t = [x / (3600 if hours else 60) for x in series["time"]]
    gib = KV_BYTES / 2**30
    colors = {"paged": "#0b6e4f", "oracle": "#4c78a8", "pow2": "#e0913a", "max": "#c44e52"}
    names = {"oracle": "contiguous, oracle", "pow2": "contiguous, power of two", "max": "contiguous, longest request"}
    style = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "axes.axisbelow": True,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.facecolor": "white",
        "legend.edgecolor": "none",
        "legend.framealpha": 0.85,
        "legend.fontsize": 8,
    }
    with pyplot.rc_context(style):
        figure, ((memory, batch), (queues, waste)) = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True)
        requests, waste_numbers = results["requests"], results["kv_waste"]
        samples = f", {settings['num_samples']} samples each" if settings["num_samples"] > 1 else ""
        figure.suptitle(
            f"{report['trace']['name']}: {requests['served']:,} requests{samples}, mean prompt"
            f" {requests['mean_prompt_tokens']:,.0f} and output {requests['mean_output_tokens']:,.0f} tokens,"
            f" {settings['num_blocks']:,} blocks of {settings['block_size']}",
            x=0.01,
            ha="left",
            fontsize=11,
        )
        memory.set_title("KV memory held, GiB (Llama-3.1-8B)")
        for name in reversed(POLICIES):
            values = [gib * v for v in series[f"{name}_tokens"]]
            memory.plot(t, values, color=colors[name], linewidth=1.1, label=names[name])
        memory.plot(t, [gib * v for v in series["allocated"]], color=colors["paged"], linewidth=1.6, label="paged")
        pool = settings["num_blocks"] * settings["block_size"] * gib
        memory.axhline(pool, color="#555555", linewidth=0.9, linestyle="--", label="the pool")
        memory.set_yscale("log")

        batch.set_title("Sequences in a step")
        batch.fill_between(t, series["batch"], color=colors["paged"], alpha=0.25, linewidth=0)
        batch.plot(t, series["batch"], color=colors["paged"], linewidth=1.2, label="in the step")
        batch.axhline(settings["max_num_seqs"], color="#555555", linewidth=0.9, linestyle="--", label="limit")
        batch.set_ylim(0, 1.25 * settings["max_num_seqs"])

        queues.set_title("Waiting and swapped")
        queues.plot(t, series["waiting"], color=colors["oracle"], linewidth=1.2, label="requests waiting")
        queues.plot(t, series["swapped"], color=colors["pow2"], linewidth=1.2, label="sequences in CPU memory")
        queues.set_ylim(0, max(10, 1.05 * max(series["waiting"] + series["swapped"])))

        waste.set_title("KV memory wasted, % of what is held")
        for name in ("max", "pow2", "oracle", "paged"):
            column = "waste" if name == "paged" else f"{name}_waste"
            mean_waste = waste_numbers["mean"] if name == "paged" else results["contiguous"][name]["mean_waste"]
            waste.plot(
                t,
                [100 * v for v in series[column]],
                color=colors[name],
                linewidth=1.6 if name == "paged" else 1.1,
                label=f"{name}: {100 * mean_waste:.2g} % on average",
            )
        waste.axhline(4, color="#555555", linewidth=0.9, linestyle=":", label="4 %")
        waste.set_yscale("log")
        waste.set_ylim(0.01, 100)

        for axes in (memory, waste):
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for axes in (queues, waste):
            axes.set_xlabel("hours (modelled)" if hours else "minutes (modelled)")
        for axes in (memory, batch, queues, waste):
            axes.margins(x=0.01)
        for axes in (batch, queues):
            axes.legend(loc="best")
        figure.legend(*memory.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.005, 0.965), ncols=5)
        waste.legend(loc="lower center", ncols=3)
        figure.tight_layout(rect=(0, 0, 1, 0.96))
        figure.savefig(path, dpi=100)
        pyplot.close(figure)
    with Image.open(path) as image:  # a palette takes a third of the bytes
        small = image.convert("RGB").quantize(200)
    small.save(path, optimize=True)


def print_summary(report: dict[str, Any]) -> None:
    results = report["results"]
    requests, waste, cache = results["requests"], results["kv_waste"], results["prefix_cache"]
    preemptions, batch, speed = results["preemptions"], results["batch"], results["modelled_speed"]
    first = speed["time_to_first_token"]
    lines = {
        "requests": f"{requests['served']:,} served, {requests['refused']} refused, {requests['failed']} failed",
        "KV waste": f"mean {waste['mean']:.2%}, max {waste['max']:.2%}, at the fullest {waste['at_peak']:.2%}",
        "contiguous": ", ".join(
            f"{name} {row['mean_waste']:.0%} waste ({row['times_paged']:.1f} x the memory)"
            for name, row in results["contiguous"].items()
        ),
        "prefix hits": f"{cache['hit_rate']:.2%} of prompt tokens; a cache without limits: "
        f"{cache['infinite_cache_hit_rate']:.2%}, {cache['infinite_cache_hit_rate_of_trace_blocks']:.2%} of its blocks",
        "sharing": f"{results['sharing']['mean_share_saved']:.1%} of blocks saved on average",
        "preempted": f"{preemptions['recompute']:,} recomputed, {preemptions['swap']:,} swapped",
        "batch": f"mean {batch['mean_sequences']:.0f} sequences; waiting: mean {batch['mean_waiting']:.0f}, "
        f"max {batch['max_waiting']:,}",
        "pool": f"mean {results['pool']['mean_use']:.0%} in use, peak {results['pool']['peak_use']:.0%}, "
        f"{results['pool']['blocks_in_use_at_end']} blocks left in use",
        "modelled": f"{speed['output_tokens_per_second']:,.0f} output tokens/s,"
        f" {speed['requests_per_second']} requests/s; first token p50 {first['p50']:.2f} s, p99 {first['p99']:.2f} s",
        "bookkeeping": f"{results['bookkeeping']['schedule_and_update_us_per_step']:.0f} us a step,"
        f" {results['bookkeeping']['schedule_and_update_us_per_sequence']:.2f} us a sequence,"
        f" {results['bookkeeping']['steps']:,} steps in {results['bookkeeping']['replay_seconds']:.0f} s",
    }
    print(report["trace"]["name"])
    for name, text in lines.items():
        print(f"  {name:12} {text}")


def main(argv: list[str] | None = None) -> None:
    tables = json.loads(QUANTILES.read_text())["tables"]
    parser = command.parser(__doc__)
    parser.add_argument("--name", help="of the result, replay-NAME; default: the trace's")
    parser.add_argument("--trace", type=Path, help="csv or jsonl, its format is told by its columns")
    parser.add_argument("--lengths", choices=sorted(tables), default="sharegpt", help="drawn without a trace")
    parser.add_argument("--num-requests", type=int, help="the trace's first; default: all, 1000 without a trace")
    parser.add_argument("--rate", type=float, help="Poisson arrivals, requests/s; default: the trace's own, or 4")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than in the trace they arrive")
    parser.add_argument("--num-blocks", type=int, default=24_576)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-swap-blocks", type=int, help="default: as many as in the pool")
    parser.add_argument("--num-samples", type=int, default=1, help="sequences that each prompt branches into")
    parser.add_argument("--preemption", choices=("recompute", "swap", "auto"), default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--sample-every", type=int, default=32, help="steps between two looks at the tables")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    if args.trace is None:
        requests, has_arrivals = draw_requests(args.lengths, args.num_requests or 1000, args.seed), False
        source, name = f"quantiles of {tables[args.lengths]['source']}", args.lengths
    else:
        requests, has_arrivals = load_trace(args.trace, args.num_requests)
        source, name = args.trace.name, args.trace.stem
    if args.rate or not has_arrivals:
        poisson(requests, args.rate or 4.0, args.seed)
    for request in requests:
        request.arrival /= args.speed

    replay = Replay(
        requests,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        num_samples=args.num_samples,
        preemption=args.preemption,
        num_swap_blocks=args.num_swap_blocks,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        seed=args.seed,
        sample_every=args.sample_every,
    )
    results = replay.run()
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "name", "trace", "lengths")}
    report = {
        "what": "a trace replayed through the scheduler and the block tables, against a model of what a step costs",
        "trace": {"name": args.name or name, "source": source},
        "settings": settings | {"arrivals": "trace" if has_arrivals and not args.rate else "poisson"},
        "cost_model": asdict(replay.costs),
        "versions": versions(),
        "results": results,
    }
    print_summary(report)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"replay-{args.name or name}.json"
    # A time series on one line each: a person reads the rest.
    series = {name: json.dumps(values) for name, values in results["series"].items()}
    text = json.dumps(report | {"results": results | {"series": {name: f"@{name}@" for name in series}}}, indent=2)
    for name, values in series.items():
        text = text.replace(f'"@{name}@"', values)
    path.write_text(text + "\n")
    try:
        plot(report, path.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"no plot: {error}")


if __name__ == "__main__":
    main()
