"""Thousands of random calls of an app over the ranks of a tensor-parallel model: nothing may differ from stock.

    python benchmarks/soak_ranks.py --requests 10000                    # two ranks on gloo, started here
    python benchmarks/soak_ranks.py --requests 10000 --first 4000       # goes on behind the first 4,000
    python benchmarks/soak_ranks.py --ranks 4 --seconds 600             # as many as that takes

Requests come in rounds. Each is drawn from its number, so it is the same on every rank: greedy, several rows, beams,
penalties, a processor of the caller's own, prompt lookup, a forward that is no step, `submit` with a seed, a request
that is read token by token. A round's calls run first on the model as it is, one after the other. Then the model is
patched: the forwards run on all ranks, late by random times on each, and all other calls on rank 0, a thread for each,
over a pool that preempts, while the other ranks follow.

A violation (exit code 1): another result than stock's, a call that has not ended in `--patience` seconds, a
broken invariant. A line a round says how far it is; with `--out`, a JSON file how it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command import save
from common import device_facts
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.distributed import DistributedConfig

import hf_paged

VOCAB, ROUND = 97, 50
KINDS = ("greedy", "rows", "beams", "penalty", "own_processor", "lookup", "forward", "seeded", "streamed")
SETTINGS = {"num_blocks": 32, "block_size": 4, "rank_timeout": 120}


class Sharpen(LogitsProcessor):
    """A caller's own."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores * 1.5


def call(model: Any, number: int) -> Any:
    """The request of this number, as lists."""
    draw = random.Random(number)
    kind = draw.choice(KINDS)
    ids = torch.tensor([[draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 24))]])
    length = draw.randrange(2, 14)
    options: dict[str, Any] = {"max_new_tokens": length, "min_new_tokens": draw.choice((0, length))}
    if kind == "forward":
        return model(ids).logits.argmax(-1).tolist()
    if kind == "rows":
        ids = ids.repeat(draw.randrange(2, 4), 1)
    if kind == "beams":
        options |= {"num_beams": draw.randrange(2, 4)}
    if kind == "penalty":
        options |= {"repetition_penalty": 1.3}
    if kind == "own_processor":
        options |= {"logits_processor": LogitsProcessorList([Sharpen()])}
    if kind == "lookup":
        ids = ids.repeat(1, 2)
        options |= {"prompt_lookup_num_tokens": 2}
    if kind in ("seeded", "streamed"):
        options |= {"do_sample": kind == "seeded"}
        if hasattr(model, "paged"):
            seed = {"seed": number} if kind == "seeded" else {}
            request = model.paged.submit(ids[0].tolist(), **options, **seed)
            return list(request) if kind == "streamed" else request.result().token_ids
        torch.manual_seed(number)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()


def is_forward(number: int) -> bool:
    return random.Random(number).choice(KINDS) == "forward"


def run_round(model: Any, numbers: list[int], draw: random.Random, longest: float, patience: float) -> dict[int, Any]:
    """What the calls return; what has not ended in time is missing."""
    found: dict[int, Any] = {}

    def serve(number: int, delay: float) -> None:
        time.sleep(delay)
        try:
            found[number] = call(model, number)
        except BaseException as error:
            found[number] = repr(error)

    for number in numbers:
        if is_forward(number):  # no step, and so made on all ranks in one order
            serve(number, draw.random() * longest / 10)
    if dist.get_rank():
        model.paged.follow()
        return found
    beside = [number for number in numbers if not is_forward(number)]
    draw.shuffle(beside)
    threads = [threading.Thread(target=serve, args=(number, draw.random() * longest), daemon=True) for number in beside]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return found


def load(folder: str) -> Any:
    config = DistributedConfig(tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    model.generation_config.pad_token_id = 0
    return model


def main(arguments: argparse.Namespace, folder: str) -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = load(folder)
    draw = random.Random(1000 * arguments.first + rank)
    started, done, violations, num_preemptions, num_steps = time.monotonic(), 0, 0, 0, 0
    for first in range(arguments.first, arguments.requests, ROUND):
        numbers = list(range(first, min(first + ROUND, arguments.requests)))
        expected = {number: call(model, number) for number in numbers}
        hf_paged.patch(model, **SETTINGS)
        found = run_round(model, numbers, draw, arguments.delay, arguments.patience)
        hung = [number for number in numbers if number not in found and rank == 0]
        differing = [number for number in numbers if number in found and found[number] != expected[number]]
        for number in differing:
            said = json.dumps({"rank": rank, "number": number, "stock": expected[number], "found": found[number]})
            print(said, flush=True)
        if hung:
            print(f"rank {rank}: calls {hung} hang", flush=True)
            os._exit(1)  # the other ranks' follow() ends with an error, and so do they
        model.paged.check_invariants()
        if rank == 0:
            stats = model.paged.stats()
            num_preemptions, num_steps = num_preemptions + stats.num_preemptions, num_steps + stats.num_steps
        hf_paged.unpatch(model)
        done += len(numbers)
        violation = torch.tensor([len(differing)])
        dist.all_reduce(violation)
        violations += int(violation)
        late = torch.tensor([time.monotonic() - started])
        dist.broadcast(late, 0)
        if rank == 0:
            print(
                f"{first + len(numbers)} requests, {violations} differences on {dist.get_world_size()} ranks, "
                f"{num_preemptions} preemptions, {num_steps} steps, {float(late):.0f} s",
                flush=True,
            )
        if arguments.seconds is not None and float(late) > arguments.seconds:
            break
    if rank == 0:
        print(f"{done} requests on {dist.get_world_size()} ranks: 0 hang, {violations} differ")
        if arguments.out is not None:
            about = {"benchmark": "soak_ranks", "ranks": dist.get_world_size(), "settings": SETTINGS}
            found = {"first": arguments.first, "requests": done, "hang": 0, "differ": violations}
            found |= {"preemptions": num_preemptions, "steps": num_steps}
            save(arguments.out / "soak_ranks.json", about | {"device": device_facts(torch.device("cpu"))}, [found])
    dist.barrier()
    return 1 if violations else 0


def make_model(folder: str) -> None:
    """Random weights, of which no two logits are close."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1000, help="number of the last one, plus 1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=None, help="no round begins after so many")
    parser.add_argument("--delay", type=float, default=0.2, help="seconds that a call is late at most")
    parser.add_argument("--out", type=Path, default=None, help="folder of the result")
    parser.add_argument("--patience", type=float, default=120.0)
    return parser.parse_args()


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(main(parse(), os.environ["SOAK_MODEL"]))
    with tempfile.TemporaryDirectory() as made:
        make_model(made)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(parse().ranks)]
        command = [*launcher, str(Path(__file__).resolve()), *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False, env=os.environ | {"SOAK_MODEL": made}).returncode)
