"""Encoder-decoders with beams: BART-base's and Whisper-base's shapes, random weights, float32, on CPU.

    python benchmarks/encoder_decoders.py --ctranslate2 VENV --out benchmarks/results
    python benchmarks/encoder_decoders.py --quick --out /tmp/results      # tiny shapes: does it run?

VENV is an environment (its folder) with `pip install torch transformers ctranslate2`; without it CTranslate2 is left
out. Engines are processes of their own, in turn, repetition by repetition, after one that does not count; figures are
medians. All make as many tokens as they are told to, from sources that no engine has seen before, and run the encoder.

- batch: 8 sources (BART: 150 to 512 tokens; Whisper: half a minute) with 5 beams and 32 new tokens each: stock one
  after the other, stock as a padded batch, hf_paged's and CTranslate2's batch. `equal`: rows that have stock's tokens.
- arrivals: 32 sources of 16 to 512 tokens, whose arrivals follow a Poisson process of 70 % of what CTranslate2 does in
  batches of 8. hf_paged gets each from a thread of its own; CTranslate2 runs whatever waits as its next batch. Seconds
  from arrival to the last token.
- memory: keys and values of the batch, beside stock's batch; source blocks beside the sum of `ceil(E / 16)`.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import Worker
from command import parser, quiet, save, show_rows
from common import device_facts
from encoder_decoders_child import FRAMES, MELS, TEXT_TOKENS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tqdm import tqdm
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

KINDS = ("bart", "whisper")
CELLS = ("memory", "arrivals")
SOURCES, BEAMS, NEW_TOKENS = 8, 5, 32
USERS, SHARE = 32, 0.7
SHORTEST, SHORT, LONGEST = 16, 150, 512
BART_TOKENS, WHISPER_TOKENS = 50265, 51865


def sides(layers: int, heads: int, width: int) -> dict[str, int]:
    """Sizes of an encoder and a decoder that are alike."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}
    return {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()} | {
        "d_model": width
    }


def save_bart(folder: Path, is_quick: bool) -> None:
    """The model, and a vocabulary of `t0`, `t1`, ... for CTranslate2's converter."""
    sizes = sides(2, 2, 32) if is_quick else sides(6, 12, 768)
    config = BartConfig(vocab_size=BART_TOKENS, **sizes, normalize_before=False, normalize_embedding=True)
    model = BartForConditionalGeneration(config)
    # None of a model's usual ends: all make as many tokens as they are told to.
    model.generation_config = GenerationConfig(decoder_start_token_id=2, bos_token_id=0, pad_token_id=1)
    model.save_pretrained(folder)
    special = {"bos_token": 0, "pad_token": 1, "eos_token": 2, "unk_token": 3}
    _save_tokenizer(folder, [f"t{token}" for token in range(BART_TOKENS)], special)


def save_whisper(folder: Path, is_quick: bool) -> None:
    """The model with a whole generation config, and a made vocabulary with all of Whisper's special tokens."""
    words = [f"t{token}" for token in range(50257)] + ["<|endoftext|>", "<|startoftranscript|>"]
    words += [f"<|{language}|>" for language in itertools.islice(LANGUAGES, 99)]
    words += [f"<|{name}|>" for name in ("translate", "transcribe", "startoflm", "startofprev", "nocaptions")]
    words += ["<|notimestamps|>"]
    ids = {word: number for number, word in enumerate(words)}
    words += [f"<|{0.02 * tick:.2f}|>" for tick in range(WHISPER_TOKENS - len(words))]
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    sizes = sides(2, 2, 32) if is_quick else sides(6, 8, 512)
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    none = {"suppress_tokens": [], "begin_suppress_tokens": []}
    lengths = {"max_source_positions": FRAMES // 2, "num_mel_bins": MELS}
    model = WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=WHISPER_TOKENS, **sizes, **special, **none, **lengths)
    )
    model.generation_config = GenerationConfig(
        is_multilingual=True,
        lang_to_id={word: number for word, number in ids.items() if start < number < ids["<|translate|>"]},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        max_length=448,
        **special,
        **none,
    )
    model.save_pretrained(folder)
    _save_tokenizer(folder, words, {"bos_token": end, "eos_token": end, "pad_token": end, "unk_token": end})


def _save_tokenizer(folder: Path, words: list[str], special: dict[str, int]) -> None:
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[special["unk_token"]])
    names = {name: words[number] for name, number in special.items()}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **names).save_pretrained(folder)


def start(engine: str, python: str, folder: Path, kind: str, num_threads: int) -> Worker:
    script = str(Path(__file__).with_name("encoder_decoders_child.py"))
    environment = {"OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1"}
    return Worker(engine, [python, script, engine, str(folder), kind, str(num_threads)], environment)


def lengths(count: int, shortest: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(shortest, LONGEST + 1, count).tolist()


def measure_batch(children: list[Worker], reps: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {child.engine: [] for child in children}
    equal = dict.fromkeys(seconds, 0)
    for number in tqdm(range(reps + 1), desc="batch"):
        order = {"do": "batch", "lengths": lengths(SOURCES, SHORT, number), "seed": number, **options}
        expected: Any = None
        for child in children if number % 2 else children[:1] + children[:0:-1]:
            found = child.run(**order)
            wrong = [len(row) for row in found["tokens"] if len(row) != options["new_tokens"]]
            if wrong:
                raise RuntimeError(f"{child.engine} made {wrong} tokens, {options['new_tokens']} were wanted")
            expected = expected or found["tokens"]
            if number:
                seconds[child.engine].append(found["seconds"])
                equal[child.engine] += sum(own == other for own, other in zip(found["tokens"], expected, strict=True))
    medians = {engine: statistics.median(each) for engine, each in seconds.items()}
    return [
        {
            "engine": engine,
            "seconds": medians[engine],
            "tokens/s": SOURCES * options["new_tokens"] / medians[engine],
            "ours is faster": medians[engine] / medians["hf_paged"],
            "equal": f"{equal[engine]} of {SOURCES * reps}",
            "all": seconds[engine],
        }
        for engine in medians
    ]


def measure_arrivals(
    children: list[Worker], batch: list[dict[str, Any]], reps: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """At 70 % of CTranslate2's rate in batches, or of ours where it is missing."""
    peers = [child for child in children if child.engine in ("hf_paged", "ctranslate2")]
    capacity = {row["engine"]: SOURCES / row["seconds"] for row in batch}
    rate = SHARE * capacity.get("ctranslate2", capacity["hf_paged"])
    rows: dict[str, list[dict[str, float]]] = {child.engine: [] for child in peers}
    for number in tqdm(range(reps), desc="arrivals"):
        draw = np.random.default_rng(1000 + number)
        arrivals = np.cumsum(draw.exponential(1 / rate, USERS)).tolist()
        order = {"do": "arrivals", "lengths": lengths(USERS, SHORTEST, 1000 + number), "seed": 1000 + number}
        for child in peers if number % 2 else peers[::-1]:
            waits = child.run(**order, **options, arrivals=arrivals)["waits"]
            rows[child.engine].append({f"p{q}": float(np.percentile(waits, q)) for q in (50, 95)})
    return [
        {
            "engine": engine,
            "arrivals/s": rate,
            **{name: statistics.median(row[name] for row in found) for name in ("p50", "p95")},
            "all": found,
        }
        for engine, found in rows.items()
    ]


def measure_memory(children: list[Worker], options: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for child in children:
        if child.engine in ("stock, batched", "hf_paged"):
            found = child.run(do="memory", lengths=lengths(SOURCES, SHORT, 0), seed=0, **options)
            total = found["own"] + found["source"]
            rows.append({"engine": child.engine, **found, "MiB": total / 2**20, "of stock": 0.0})
    for row in rows:
        row["of stock"] = row["MiB"] / rows[0]["MiB"]
    return rows


def measure(kind: str, given: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The rows of each cell, as soon as there are some."""
    pythons = {"stock": sys.executable, "stock, batched": sys.executable, "hf_paged": sys.executable}
    if given.ctranslate2 is not None:
        pythons["ctranslate2"] = str(given.ctranslate2 / "bin" / "python")
    options = {"beams": BEAMS, "new_tokens": 8 if given.quick else NEW_TOKENS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        (save_bart if kind == "bart" else save_whisper)(folder, given.quick)
        children = [start(engine, python, folder, kind, given.threads) for engine, python in pythons.items()]
        batch = measure_batch(children, given.reps, options)
        yield "batch", batch
        if "memory" in given.cells:
            yield "memory", measure_memory(children, options)
        if "arrivals" in given.cells:
            yield "arrivals", measure_arrivals(children, batch, given.reps, options)
        for child in children:
            child.close()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ctranslate2", type=Path, metavar="VENV", help="environment it is installed in")
    arguments.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments.add_argument("--cells", nargs="*", choices=CELLS, default=list(CELLS), help="besides the batch")
    arguments.add_argument("--reps", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--quick", action="store_true", help="tiny shapes and 8 new tokens: figures mean nothing")
    given = arguments.parse_args()
    quiet()
    assert TEXT_TOKENS < BART_TOKENS
    facts = device_facts(torch.device("cpu")) | {"threads": given.threads}
    about: dict[str, Any] = {"device": facts, "beams": BEAMS, "sources": SOURCES, "is_quick": given.quick}
    if given.ctranslate2 is not None:
        command = [given.ctranslate2 / "bin" / "python", "-c", "import ctranslate2; print(ctranslate2.__version__)"]
        about["ctranslate2"] = subprocess.check_output(command, text=True).strip()
    results: dict[str, Any] = {kind: {} for kind in given.kinds}
    for kind in given.kinds:
        for cell, rows in measure(kind, given):
            results[kind][cell] = rows
            show_rows(f"{kind}: {cell}", rows)
            save(given.out / "encoder_decoders.json", about, results)


if __name__ == "__main__":
    main()
