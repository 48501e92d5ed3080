"""What a step's message between the ranks of a tensor-parallel model takes: bytes, and microseconds to the last rank.

    python benchmarks/control_message.py --ranks 2          # starts that many processes, on gloo
    python benchmarks/control_message.py --ranks 4 --out /tmp/results

A message begins with rank 0's `Batch` of a steady decode step and ends when the last rank holds the same one: it is
packed, sent in one frame, received and unpacked. What packing and unpacking take of that stands beside it. The ranks
answer with the moment at which they had it, on the machine's clock. On a quiet machine with a core for each process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from array import array
from typing import Any

import torch
import torch.distributed as dist
from command import parser, save, show
from common import Times, device_facts
from rich.table import Table

from hf_paged.core.batch import Batch, GroupTables
from hf_paged.core.step_message import pack, unpack
from hf_paged.parallel.channel import FRAME_BYTES, Channel, Kind

ROWS, BLOCKS = (1, 16, 64, 256), (4, 16, 64, 256)
GAP_NS = 500_000  # that rank 0 is busy between two messages, as with a step: the others wait for the next one by then


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


def lead(channel: Channel, answers: Any, batch: Batch, rounds: int) -> dict[str, Any]:
    """Rank 0's side: the figures of one shape."""
    packing, there, unpacking = [], [], []
    answer, payload = torch.zeros(2, dtype=torch.int64), b""
    for _ in range(rounds):
        waiting = time.perf_counter_ns() + GAP_NS
        while (started := time.perf_counter_ns()) < waiting:
            pass
        payload = pack(batch, [])
        packing.append(time.perf_counter_ns() - started)
        channel.send(Kind.STEP, payload)
        last = []
        for index in range(1, len(channel.ranks)):
            dist.recv(answer, index, group=answers)
            last.append(answer.tolist())
        there.append(max(moment for moment, _ in last) - started)
        unpacking.append(max(spent for _, spent in last))
    found = {"message": there, "pack": packing, "unpack": unpacking}
    figures = {name: Times.of((ns / 1000 for ns in samples), "clock") for name, samples in found.items()}
    return {
        "rows": batch.num_seqs,
        "blocks": batch.tables[0].counts[0],
        "bytes": len(payload),
        **{f"{name}_us": round(times.us, 1) for name, times in figures.items()},
        "message_p10_us": round(figures["message"].p10_us, 1),
        "message_p90_us": round(figures["message"].p90_us, 1),
    }


def follow(channel: Channel, answers: Any, rounds: int) -> None:
    """Another rank's side."""
    answer = torch.zeros(2, dtype=torch.int64)
    for _ in range(rounds):
        payload = channel.receive()[1]
        started = time.perf_counter_ns()
        unpack(payload)
        moment = time.perf_counter_ns()
        answer[0], answer[1] = moment, moment - started
        dist.send(answer, 0, group=answers)


def main(arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    channel = Channel(list(range(dist.get_world_size())))
    answers: Any = dist.new_group(backend="gloo")
    shapes, found = [(rows, blocks) for rows in ROWS for blocks in BLOCKS], []
    for rows, blocks in [shapes[0], *shapes]:  # the first twice: the first time is a warm-up
        if channel.is_first:
            found.append(lead(channel, answers, decode_step(rows, blocks), arguments.rounds))
        else:
            follow(channel, answers, arguments.rounds)
    if channel.is_first:
        about = {"benchmark": "control_message", "ranks": len(channel.ranks), "rounds": arguments.rounds}
        about |= {"frame_bytes": FRAME_BYTES, "device": device_facts(torch.device("cpu"))}
        save(arguments.out / f"control_message-{len(channel.ranks)}.json", about, found[1:])
        table = Table("rows", "blocks each", "bytes", "message µs", "10 %", "90 %", "of that pack", "unpack")
        for row in found[1:]:
            figures = (row[f"{name}_us"] for name in ("message", "message_p10", "message_p90", "pack", "unpack"))
            table.add_row(str(row["rows"]), str(row["blocks"]), f"{row['bytes']:,}", *(f"{us:.0f}" for us in figures))
        show(f"{len(channel.ranks)} ranks, {arguments.rounds} messages a shape: medians", table)
    dist.barrier(answers)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = parser(__doc__)
    given.add_argument("--ranks", type=int, default=2)
    given.add_argument("--rounds", type=int, default=400, help="messages of each shape")
    if "RANK" in os.environ:
        main(given.parse_args())
    else:
        ranks = str(given.parse_args().ranks)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
        sys.exit(subprocess.run([*launcher, __file__, *sys.argv[1:]], check=False).returncode)
