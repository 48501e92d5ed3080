"""What choosing tokens of a vocabulary of 151,936 words costs on CPU, by settings, with hf_paged and without.

    python benchmarks/sampling.py --out benchmarks/results

A random Llama of one layer and width 64, so that the head and the choice are nearly all there is; float32. Milliseconds
a step of `generate()`: a call of 24 tokens less one of 4, by 20. Ways alternate, repetition by repetition; figures are
medians. `choice`: what the settings add to a greedy step. All tokens are compared.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from command import parser, quiet, save, show_rows
from common import device_facts
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "all words": {"do_sample": True, "top_k": 0},
    "top_k 50": {"do_sample": True, "top_k": 50},
    "top_k 20, top_p 0.95": {"do_sample": True, "top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "top_p 0.9": {"do_sample": True, "top_k": 0, "top_p": 0.9},
}


def model_of_many_words() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=151_936, num_hidden_layers=1, **sizes)).eval()
    model.lm_head.weight.data *= 25  # the hundred likeliest words have most of the probability, as in a trained model
    return model


def step(model: Any, ids: torch.Tensor, given: dict[str, Any]) -> tuple[float, list[Any]]:
    """Milliseconds of a step, and the tokens."""
    seconds, tokens = [], []
    for length in (4, 24):
        torch.manual_seed(1)
        started = time.perf_counter()
        found = model.generate(ids, max_new_tokens=length, eos_token_id=None, pad_token_id=0, **given)
        seconds.append(time.perf_counter() - started)
        tokens.append(found.tolist())
    return (seconds[1] - seconds[0]) / 20 * 1e3, tokens


def measure(rows: int, reps: int) -> list[dict[str, Any]]:
    stock = model_of_many_words()
    ways = {"stock": stock, "hf_paged": hf_paged.patch(copy.deepcopy(stock), num_blocks=256)}
    ids = torch.randint(3, 1000, (rows, 8), generator=torch.Generator().manual_seed(2))
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in SETTINGS}
    num_equal = dict.fromkeys(SETTINGS, 0)
    for number in tqdm(range(reps + 1), desc=f"{rows} rows"):
        for name, given in SETTINGS.items():
            told = []
            for way in list(ways)[:: 1 if number % 2 else -1]:
                milliseconds, tokens = step(ways[way], ids, given)
                told.append(tokens)
                if number:  # the first one does not count
                    found[name][way].append(milliseconds)
            num_equal[name] += told[0] == told[1]
    medians = {name: {way: statistics.median(own) for way, own in each.items()} for name, each in found.items()}
    return [
        {"rows": rows, "settings": name, "equal": f"{num_equal[name]} of {reps + 1}"}
        | {f"{way} ms": medians[name][way] for way in ways}
        | {f"{way}, choice": medians[name][way] - medians["greedy"][way] for way in ways}
        for name in SETTINGS
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    arguments.add_argument("--reps", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=2)
    given = arguments.parse_args()
    quiet()
    torch.set_num_threads(given.threads)
    results = [row for rows in given.rows for row in measure(rows, given.reps)]
    about = {"device": device_facts(torch.device("cpu")) | {"threads": given.threads}}
    save(given.out / "sampling.json", about, results)
    show_rows("milliseconds a step, 151,936 words", results)


if __name__ == "__main__":
    main()
