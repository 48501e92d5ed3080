"""Every family of decoders that the installed transformers knows, as a tiny random model: are the tokens stock's?

    python benchmarks/families.py --out benchmarks/results
    python benchmarks/families.py --resume
    python benchmarks/families.py --families llama gemma2 qwen3_next --resume

The last goes over these only, and takes their lines of the result in place of those it had.

Of each family that `AutoModelForCausalLM` knows a small model is made from its default config, and taken or refused by
`is_supported`. If taken it generates in float32 in six modes (greedy, sampling, samples, beams over a ragged batch, one
prompt, two turns over a kept cache) and from six threads at once, in a pool with room and in one so small that rows are
preempted; what it says is compared with stock `generate()`. Text only. A mode that stock itself can't run is left out;
a family that it can't generate with at all is counted apart.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parent))

from command import parser, quiet, save, show
from family_models import tiny_model

import hf_paged

SECONDS = 600  # for a family
NEW = {"max_new_tokens": 14}
LONGEST = 13 + 14 + 3 + 14  # tokens of a kept cache's second turn
BEAMS = 3
Batch = dict[str, Tensor]


def ragged_batch() -> Batch:
    """Three left-padded prompts."""
    ids = torch.randint(5, 56, (3, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 8, 5)):
        ids[row, :padding] = mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def row_of(batch: Batch, row: int) -> Batch:
    """One prompt without its padding."""
    padding = int((batch["attention_mask"][row] == 0).sum())
    return {name: value[row : row + 1, padding:] for name, value in batch.items()}


def generate(model: Any, batch: Batch, **more: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**batch, **NEW, **more).tolist()


def two_turns(model: Any, batch: Batch) -> Any:
    is_paged = hasattr(model, "paged") and not model.paged.traits.runs_stock
    cache = hf_paged.PagedCache(model) if is_paged else DynamicCache(config=model.config)
    first = model.generate(**row_of(batch, 0), **NEW, past_key_values=cache)
    text = torch.cat([first, torch.tensor([[7, 8, 9]])], dim=1)
    if not is_paged and not hf_paged.is_supported(model).traits.carries_state:
        cache = None  # stock would begin anew with the second turn: what it makes of the whole text
    return generate(model, {"input_ids": text, "attention_mask": torch.ones_like(text)}, past_key_values=cache)


def threads(model: Any, batch: Batch) -> Any:
    """Six callers; of stock, one after the other."""
    found: list[Any] = [None] * 6

    def work(index: int) -> None:
        try:
            found[index] = model.generate(**row_of(batch, index % 3), **NEW).tolist()
        except Exception as error:
            found[index] = f"{type(error).__name__}: {error}"

    callers = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for caller in callers:
        caller.start()
        if not hasattr(model, "paged"):
            caller.join()
    for caller in callers:
        caller.join()
    return found


MODES: dict[str, Any] = {
    "greedy": lambda model, batch: generate(model, batch),
    "sampling": lambda model, batch: generate(model, batch, do_sample=True, top_p=0.9),
    "samples": lambda model, batch: generate(model, batch, do_sample=True, num_return_sequences=2),
    "beams": lambda model, batch: generate(model, batch, num_beams=BEAMS, num_return_sequences=2),
    "one": lambda model, batch: generate(model, row_of(batch, 1)),
    "two turns": two_turns,
    "threads": threads,
}


def text_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def survey(name: str) -> dict[str, Any]:
    """What became of a family: its `status` is "exact", "differs", "refused", "not by stock" or "raised"."""
    quiet()
    warnings.simplefilter("ignore")
    try:
        stock = tiny_model(name)
    except Exception as error:
        return {"status": "not by stock", "why": text_of(error)}
    report = hf_paged.is_supported(stock)
    batch = ragged_batch()
    expected, left_out = {}, {}
    for mode, run in MODES.items() if report else [("one", MODES["one"])]:
        try:
            expected[mode] = run(stock, batch)
        except Exception as error:
            left_out[mode] = text_of(error)
    if not expected:
        return {"status": "not by stock", "why": next(iter(left_out.values()))}
    if not report:
        return {"status": "refused", "why": "; ".join(report.reasons)[:300]}
    differs, num_preemptions = {}, 0
    block_size = 4 if all(layer is None or (layer.chunk or 4) % 4 == 0 for layer in report.traits.layers) else 2
    for num_blocks in pools(stock, block_size, report.layout):
        paged = hf_paged.patch(copy.deepcopy(stock), num_blocks=num_blocks, block_size=block_size)
        for mode, tokens in expected.items():
            try:
                if MODES[mode](paged, batch) != tokens:
                    differs[f"{mode}, {num_blocks} blocks"] = "other tokens"
            except Exception as error:
                differs[f"{mode}, {num_blocks} blocks"] = text_of(error)
        num_preemptions += paged.paged.stats().num_preemptions
    status = "differs" if differs else "exact"
    found = {"layout": report.layout, "differs": differs, "left_out": left_out, "num_preemptions": num_preemptions}
    return {"status": status} | found


def pools(model: Any, block_size: int, layout: str) -> tuple[int, int]:
    """Blocks of a pool with room, and of one with less than a batch needs, but for what must be in it together."""
    measured = hf_paged.patch(copy.deepcopy(model), num_blocks=8, block_size=block_size)
    manager, chunk = measured.paged.core.manager, measured.paged.config.max_num_batched_tokens
    for_turns, for_row = manager.most_blocks(LONGEST, chunk), manager.most_blocks(LONGEST // 2 + 5, chunk)
    with_room = 12 * for_turns + 64
    return with_room, with_room if layout == "alone" else max(for_turns, BEAMS * for_row) + 2


def _survey_into(name: str, results: Any) -> None:
    try:
        results.put(survey(name))
    except BaseException as error:
        results.put({"status": "raised", "why": text_of(error)})


def survey_apart(name: str) -> dict[str, Any]:
    """What a survey says of a family, in a process of its own, which may take so long."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_survey_into, args=(name, results))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        return {"status": "raised", "why": f"not done in {SECONDS} s"}
    return results.get() if not results.empty() else {"status": "raised", "why": f"exit code {process.exitcode}"}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--families", nargs="*", help="model types; all if not given")
    arguments.add_argument("--resume", action="store_true", help="go on with the result that the folder has")
    given = arguments.parse_args()
    quiet()
    path: Path = given.out / f"families-{transformers.__version__}.json"
    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: dict[str, dict[str, Any]] = {}
    if given.resume and path.exists():
        found = json.loads(path.read_text())["results"]
    names = given.families or [name for name in known if name not in found]
    with tqdm(names, unit="family") as bar:
        for name in bar:
            started = time.perf_counter()
            found[name] = survey_apart(name) | {"seconds": round(time.perf_counter() - started, 1)}
            if given.resume or not given.families:
                found = {each: found[each] for each in sorted(found)}
                save(path, {"benchmark": "families", "counts": counts(found)}, found)
            bar.set_postfix(counts(found))
    table = Table("family", "what", "why", title=", ".join(f"{count} {kind}" for kind, count in counts(found).items()))
    for name, each in found.items():
        if each["status"] != "exact":
            table.add_row(name, each["status"], str(each.get("why") or each.get("differs")))
    show(table)


def counts(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many families have which status."""
    return dict(Counter(each["status"] for each in found.values()))


if __name__ == "__main__":
    main()
