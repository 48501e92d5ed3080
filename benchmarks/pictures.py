"""Every multimodal family that the installed transformers knows, as a tiny random model: are the tokens stock's?

    python benchmarks/pictures.py --out benchmarks/results
    python benchmarks/pictures.py --families llava qwen3_vl gemma4

Of each family that `AutoModelForImageTextToText` knows, and of some that are asked about sounds, a small model is made
from its default config, and taken or refused by `is_supported`. If taken it is asked about random pictures, in float32,
and what it says is compared with stock `generate()`: greedy, sampling, beams, the same picture again, another one,
none; all of it once more in steps of a few tokens. What of the prompt came from the prefix cache is written down, too:
of the same picture nearly all, of another one no more than the words before it. A mode that stock itself can't run is
left out.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))

from command import parser, quiet, save, show
from families import survey_apart, text_of
from picture_models import Asking, family_names, tiny_model

import hf_paged

WORDS = 4  # before a picture
BLOCK = 2
MODES: dict[str, tuple[int | None, dict[str, Any]]] = {
    "greedy": (0, {}),
    "the same picture": (0, {}),
    "another picture": (1, {}),
    "sampling": (0, {"do_sample": True, "top_p": 0.9}),
    "beams": (0, {"num_beams": 2}),
    "text alone": (None, {}),
}


def generate(model: Any, asking: Asking, mode: str) -> list[list[int]]:
    picture, arguments = MODES[mode]
    torch.manual_seed(5)
    found: list[list[int]] = model.generate(
        **asking.call(picture, before=WORDS), max_new_tokens=8, **arguments
    ).tolist()
    return found


def survey(name: str) -> dict[str, Any]:
    """What became of a family: its `status` is "exact", "differs", "refused", "not made" or "raised"."""
    quiet()
    warnings.simplefilter("ignore")
    try:
        model, asking = tiny_model(name)
    except Exception as error:
        return {"status": "not made", "why": text_of(error)}
    report = hf_paged.is_supported(model)
    if not report:
        return {"status": "refused", "why": "; ".join(report.reasons)[:300]}
    expected, left_out, differs = {}, {}, {}
    for mode in MODES:
        try:
            expected[mode] = generate(copy.deepcopy(model), asking, mode)
        except Exception as error:
            left_out[mode] = text_of(error)
    hits: dict[str, int] = {}
    for settings in ({}, {"max_num_batched_tokens": 3}):
        paged = hf_paged.patch(copy.deepcopy(model), num_blocks=1024, block_size=BLOCK, **settings)
        before = 0
        for mode, tokens in expected.items():
            try:
                if generate(paged, asking, mode) != tokens:
                    differs[f"{mode}, {settings or 'whole'}"] = "other tokens"
            except Exception as error:
                differs[f"{mode}, {settings or 'whole'}"] = text_of(error)
            now = paged.paged.stats().prefix_cache_hit_tokens
            if not settings:
                hits[mode] = now - before
            before = now
    words = (WORDS + asking.has_start) // BLOCK * BLOCK
    if "another picture" in expected and hits["another picture"] > words:
        differs["another picture"] = f"{hits['another picture']} tokens of it came from the prefix cache"
    num_tokens = asking.call(0, before=WORDS)["input_ids"].shape[1]
    found = {"layout": report.layout, "num_tokens": num_tokens, "hits": hits, "differs": differs, "left_out": left_out}
    return {"status": "differs" if differs else "exact" if "greedy" in expected else "not by stock"} | found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--families", nargs="*", help="model types; all if not given")
    given = arguments.parse_args()
    quiet()
    path: Path = given.out / f"pictures-{transformers.__version__}.json"
    known = json.loads(path.read_text())["results"] if given.families and path.exists() else {}
    found: dict[str, dict[str, Any]] = {}
    with tqdm(given.families or list(family_names()), unit="family") as bar:
        for name in bar:
            started = time.perf_counter()
            found[name] = survey_apart(name, survey) | {"seconds": round(time.perf_counter() - started, 1)}
            whole = dict(sorted((known | found).items()))
            counts = Counter(each["status"] for each in whole.values())
            save(path, {"benchmark": "pictures", "counts": counts}, whole)
            bar.set_postfix(counts)
    counts = Counter(each["status"] for each in found.values())
    table = Table("family", "what", "why", title=", ".join(f"{count} {status}" for status, count in counts.items()))
    for name, each in found.items():
        if each["status"] != "exact":
            table.add_row(name, each["status"], str(each.get("why") or each.get("differs")))
    show(table)


if __name__ == "__main__":
    main()
