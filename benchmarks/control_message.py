"""What a step's message between the ranks of a tensor-parallel model takes: bytes, and microseconds to the last rank.

python benchmarks/control_message.py --ranks 2          # starts that many processes, on gloo

A round is: rank 0 packs and sends a decode step, the others receive and unpack it and answer with one alert's worth of
bytes. On a quiet machine with a core for each process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from array import array

import torch.distributed as dist

from hf_paged.core.batch import Batch, GroupTables
from hf_paged.core.step_message import pack, unpack
from hf_paged.parallel.channel import Channel, Kind

SHAPES = [(1, 4), (1, 64), (32, 64), (256, 4), (256, 64), (256, 256)]
ROUNDS = 400


def decode_step(rows: int, blocks: int) -> Batch:
    """A step of so many rows, each with so many blocks."""
    numbers = array("q", range(rows))
    return Batch(
        number=1,
        seq_ids=numbers,
        starts=numbers,
        query_lens=array("q", [1] * rows),
        token_ids=numbers,
        positions=numbers,
        logit_rows=numbers,
        logit_starts=array("q", range(rows + 1)),
        tables=(GroupTables(array("i", range(rows * blocks)), array("q", [blocks] * rows)),),
    )


def main() -> None:
    dist.init_process_group("gloo")
    channel = Channel(list(range(dist.get_world_size())))
    group = dist.new_group(backend="gloo")
    if channel.is_first:
        print(f"{dist.get_world_size()} ranks, {ROUNDS} rounds: medians, and 90th percentiles, in microseconds")
        print(f"{'rows':>5} {'blocks':>6} {'bytes':>8} {'pack':>6} {'round':>6} {'90 %':>6}")
    for rows, blocks in SHAPES:
        batch, packing, rounds = decode_step(rows, blocks), [], []
        payload = b""
        for _ in range(ROUNDS):
            if channel.is_first:
                started = time.perf_counter()
                payload = pack(batch, [])
                packing.append(time.perf_counter() - started)
                channel.send(Kind.STEP, payload)
            else:
                unpack(channel.receive()[1])
            dist.barrier(group)
            if channel.is_first:
                rounds.append(time.perf_counter() - started)
        if channel.is_first:
            packed, whole = (1e6 * statistics.median(times) for times in (packing, rounds))
            late = 1e6 * statistics.quantiles(rounds, n=10)[-1]
            print(f"{rows:>5} {blocks:>6} {len(payload):>8} {packed:>6.0f} {whole:>6.0f} {late:>6.0f}", flush=True)
    dist.barrier(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        main()
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks)]
        sys.exit(subprocess.run([*launcher, __file__], check=False).returncode)
