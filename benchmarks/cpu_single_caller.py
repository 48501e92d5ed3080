"""One caller alone: is `model.generate()` never slower for being patched?

    python benchmarks/cpu_single_caller.py --out benchmarks/results
    python benchmarks/cpu_single_caller.py --cells embedded-greedy-1 --pairs 5

A cell is a model (a random Llama of 2 layers and width 64, the embedded one of 2.7M parameters, a random Llama of
125M), a mode (greedy, sampling, 4 beams) and a number of torch threads. Stock and patched calls of the same prompt
alternate, in both orders in turn; each pair has a prompt of its own, so that nothing comes from the prefix cache. A
pair's ratio is stock's seconds over ours: above 1 we are faster. Given are the median of the ratios and the bound above
which it lies with 95 % confidence (an order statistic: the lower end of a two-sided 90 % interval). Tokens are
compared, call by call. A cell runs in a process of its own, for OpenMP's threads outlive a change of their number.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from common import Report, device_facts, markdown_table, versions
from generate import GREEDY, SAMPLING, llama_125m, tiny_model

import hf_paged


def llama_64(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1000}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).to(dtype).eval()


MODELS: dict[str, Any] = {"width64": llama_64, "embedded": tiny_model, "125m": llama_125m}
MODES: dict[str, dict[str, Any]] = {"greedy": GREEDY, "sampling": SAMPLING, "beams": GREEDY | {"num_beams": 4}}
NEW_TOKENS = {"width64": 64, "embedded": 64, "125m": 32}
CELLS = [f"{model}-{mode}-{threads}" for model in MODELS for mode in MODES for threads in (1, 2)]
WARM_UP = 3  # pairs that are not counted


def lower_bound(ratios: list[float], confidence: float = 0.95) -> float:
    """The order statistic below which the median lies with a probability of at most `1 - confidence`."""
    count, below = len(ratios), 0.0
    for rank in range(count):
        below += math.comb(count, rank) / 2**count
        if below > 1 - confidence:
            return sorted(ratios)[max(rank - 1, 0)]
    return max(ratios)


def measure(cell: str, num_pairs: int) -> dict[str, Any]:
    """All pairs of a cell, in this process."""
    name, mode, threads = cell.split("-")
    torch.set_num_threads(int(threads))
    stock = MODELS[name](torch.float32)
    stock.generation_config.eos_token_id = None  # every call generates as many tokens
    paged = hf_paged.patch(copy.deepcopy(stock))
    options = MODES[mode] | {"max_new_tokens": NEW_TOKENS[name], "pad_token_id": 0}
    draw = random.Random(0)
    pairs: list[tuple[float, float]] = []
    num_equal = 0
    for number in tqdm(range(WARM_UP + num_pairs), desc=cell):
        length = draw.randint(16, 128)
        ids = torch.tensor([[draw.randrange(3, stock.config.vocab_size) for _ in range(length)]])
        mask = torch.ones_like(ids)
        seconds: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        for way in ("stock", "paged") if number % 2 else ("paged", "stock"):
            torch.manual_seed(number)
            model = stock if way == "stock" else paged
            started = time.perf_counter()
            result = model.generate(ids, attention_mask=mask, **options)
            seconds[way] = time.perf_counter() - started
            tokens[way] = result[0].tolist()
        if number >= WARM_UP:
            pairs.append((seconds["stock"], seconds["paged"]))
            num_equal += tokens["stock"] == tokens["paged"]
    ratios = [stock / paged for stock, paged in pairs]
    return {
        "cell": cell,
        "pairs": num_pairs,
        "median_ratio": statistics.median(ratios),
        "lower_bound": lower_bound(ratios),
        "stock_seconds": statistics.median(stock for stock, _ in pairs),
        "paged_seconds": statistics.median(paged for _, paged in pairs),
        "equal": num_equal,
        "ratios": ratios,
    }


def table(rows: list[dict[str, Any]]) -> str:
    columns = ("cell (model, mode, threads)", "stock s", "hf_paged s", "median ratio", "lower bound", "equal tokens")
    lines = []
    for row in rows:
        seconds = f"{row['stock_seconds']:.3f}", f"{row['paged_seconds']:.3f}"
        ratios = f"{row['median_ratio']:.2f}", f"{row['lower_bound']:.2f}"
        lines.append((row["cell"], *seconds, *ratios, f"{row['equal']} of {row['pairs']}"))
    return markdown_table(columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS, choices=CELLS, metavar="MODEL-MODE-THREADS")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for single_caller.json and single_caller.md")
    parser.add_argument("--in-process", action="store_true", help="measure the one cell here, print it as JSON")
    given = parser.parse_args()
    if given.in_process:
        print(json.dumps(measure(given.cells[0], given.pairs)))
        return
    rows: list[dict[str, Any]] = []
    facts = {"versions": versions(), "device": device_facts(torch.device("cpu")), "rows": rows}
    for cell in given.cells:
        command = [sys.executable, __file__, "--in-process", "--cells", cell, "--pairs", str(given.pairs)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if given.out is not None:
            Report(given.out / "single_caller.json", facts).save()
            (given.out / "single_caller.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
