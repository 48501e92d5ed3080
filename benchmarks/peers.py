"""hf_paged beside other ways to run a small model on a CPU: stock transformers, llama.cpp, OpenVINO GenAI, CTranslate2.

    python benchmarks/peers.py --llama-cpp VENV --openvino VENV --ctranslate2 VENV --out benchmarks/results

A VENV is an environment (its folder) in which the engine is installed; peers_child.py says what each needs:

    llama.cpp     pip install llama-cpp-python gguf safetensors
    OpenVINO      pip install torch "optimum-intel[openvino]" openvino-genai (and no torchvision of another torch)
    CTranslate2   pip install torch transformers ctranslate2

Cells: the embedded model of 2.7M parameters and a random Llama of 125M; 1 and 32 prompts of 16 to 128 random tokens, 64
new tokens each; greedy and 4 beams; float32, bfloat16 and int8 weights, as far as an engine has them. Engines are
processes of their own that run one after another, in turn, repetition by repetition, after one that does not count;
figures are generated tokens a second, medians. Tokens are compared with stock's of the same dtype, prompt by prompt
(in float32 an engine is expected to have the same; int8 rounds otherwise in each of them).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))

from common import Report, device_facts, markdown_table, versions
from generate import llama_125m, tiny_model
from peers_child import MARK

MODELS: dict[str, Any] = {"embedded": tiny_model, "125m": llama_125m}
DTYPES = ("float32", "bfloat16", "int8")
NUM_PROMPTS = (1, 32)
BEAMS = (1, 4)
NEW_TOKENS = 64
ENGINES = ("stock", "hf_paged", "llama.cpp", "openvino", "ctranslate2")


class Child:
    """An engine that has loaded one model in one dtype."""

    def __init__(self, engine: str, python: str, folder: Path, dtype: str, num_threads: int) -> None:
        self.engine = engine
        command = [
            python,
            str(Path(__file__).with_name("peers_child.py")),
            engine,
            str(folder),
            dtype,
            str(num_threads),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        self._said: deque[str] = deque(maxlen=8)
        assert self._process.stderr is not None
        Thread(target=self._said.extend, args=(self._process.stderr,), daemon=True).start()
        self.error: str | None = self._read().get("error")

    def run(self, prompts: list[list[int]], num_beams: int) -> dict[str, Any]:
        """Tokens and seconds, or the error."""
        order = {"prompts": prompts, "new_tokens": NEW_TOKENS, "num_beams": num_beams}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        return {"error": f"ended with status {self._process.wait()}: {' '.join(self._said).strip()[-300:]}"}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def save(name: str, folder: Path) -> None:
    """The model, and a vocabulary of `t0`, `t1`, ... for the engines that want one."""
    model = MODELS[name](torch.float32)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    words = {f"t{token}": token for token in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), unk_token="t0", bos_token="t1", eos_token="t2"
    )
    tokenizer.save_pretrained(folder)


def measure(
    model: str, dtype: str, pythons: dict[str, str], reps: int, num_threads: int, folder: Path
) -> list[dict[str, Any]]:
    """All cells of a model in one dtype: a row for each number of prompts and beams, and each engine."""
    children = [Child(engine, python, folder, dtype, num_threads) for engine, python in pythons.items()]
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for num_prompts in NUM_PROMPTS:
        for num_beams in BEAMS:
            found: dict[str, list[dict[str, Any]]] = {child.engine: [] for child in children}
            for _ in tqdm(range(reps + 1), desc=f"{model} {dtype} {num_prompts} x {num_beams}"):
                prompts = [
                    [draw.randrange(3, vocab_size) for _ in range(draw.randint(16, 128))] for _ in range(num_prompts)
                ]
                for child in children:
                    failed = child.error or (found[child.engine] and found[child.engine][-1].get("error"))
                    found[child.engine].append({"error": failed} if failed else child.run(prompts, num_beams))
            for child in children:
                counted = found[child.engine][1:]
                row = {
                    "model": model,
                    "dtype": dtype,
                    "prompts": num_prompts,
                    "beams": num_beams,
                    "engine": child.engine,
                }
                if error := counted[-1].get("error"):
                    rows.append(row | {"error": error})
                    continue
                seconds = [result["seconds"] for result in counted]
                row["seconds"] = seconds
                row["tokens_per_second"] = num_prompts * NEW_TOKENS / statistics.median(seconds)
                if "tokens" in found["stock"][-1]:
                    pairs = [
                        (own, stock)
                        for result, expected in zip(counted, found["stock"][1:], strict=True)
                        for own, stock in zip(result["tokens"], expected["tokens"], strict=True)
                    ]
                    row["equal"], row["compared"] = sum(own == stock for own, stock in pairs), len(pairs)
                rows.append(row)
    for child in children:
        child.close()
    return rows


def table(rows: list[dict[str, Any]], engines: list[str]) -> str:
    """A line a cell, a column an engine: tokens a second, and of how many prompts they are stock's."""
    cells = {(row["model"], row["dtype"], row["prompts"], row["beams"]): None for row in rows}
    by_engine = {(row["model"], row["dtype"], row["prompts"], row["beams"], row["engine"]): row for row in rows}

    def text(row: dict[str, Any]) -> str:
        if "error" in row:
            return "-"
        equal = f" ({row['equal']}/{row['compared']})" if "equal" in row and row["engine"] != "stock" else ""
        return f"{row['tokens_per_second']:,.0f}{equal}"

    return markdown_table(
        ("model", "weights", "prompts", "beams", *engines),
        [(c[0], c[1], str(c[2]), str(c[3]), *(text(by_engine[*c, engine]) for engine in engines)) for c in cells],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for engine in ENGINES[2:]:
        parser.add_argument("--" + engine.replace(".", "-"), metavar="VENV", help="environment it is installed in")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="folder for peers.json and peers.md")
    given = parser.parse_args()
    pythons = {"stock": sys.executable, "hf_paged": sys.executable}
    for engine in ENGINES[2:]:
        if venv := getattr(given, engine.replace(".", "_").replace("-", "_")):
            pythons[engine] = str(Path(venv, "bin", "python"))
    rows: list[dict[str, Any]] = []
    peers = {
        engine: subprocess.run(
            [python, "-m", "pip", "list", "--format", "freeze"], capture_output=True, text=True, check=False
        ).stdout.split()
        for engine, python in pythons.items()
        if engine not in ("stock", "hf_paged")
    }
    names = ("llama", "openvino", "ctranslate2", "optimum")
    facts: dict[str, Any] = {
        "versions": versions(),
        "peers": {engine: [line for line in lines if line.startswith(names)] for engine, lines in peers.items()},
        "device": device_facts(torch.device("cpu")),
        "threads": given.threads,
        "rows": rows,
    }
    for model in given.models:
        with tempfile.TemporaryDirectory() as name:
            save(model, Path(name))
            for dtype in given.dtypes:
                rows += measure(model, dtype, pythons, given.reps, given.threads, Path(name))
                if given.out is not None:
                    Report(given.out / "peers.json", facts).save()
                    (given.out / "peers.md").write_text(table(rows, list(pythons)) + "\n")
    print(table(rows, list(pythons)))
    for row in rows:
        if "error" in row:
            print(f"{row['engine']}, {row['model']}, {row['dtype']}, {row['beams']} beams: {row['error']}")


if __name__ == "__main__":
    main()
