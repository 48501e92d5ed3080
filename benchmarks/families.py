"""Every family of decoders that the installed transformers knows, as a tiny random model: are the tokens stock's?

    python benchmarks/families.py --out benchmarks/results
    python benchmarks/families.py --families llama gemma2 qwen3_next

Of each family that `AutoModelForCausalLM` knows a small model is made from its default config, and taken or refused by
`is_supported`. If taken it generates in float32 in six modes (greedy, sampling, samples, beams over a ragged batch, one
prompt, two turns over a kept cache) and from six threads at once, in a pool with room and in one so small that rows are
preempted; what it says is compared with stock `generate()`. Text only. A mode that stock itself can't run is left out.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parent))

from command import parser, quiet, save, show

import hf_paged
from hf_paged.api.shrinking import shrink
from hf_paged.tools.families import family_names

SECONDS = 240  # for a family
POOLS = (256, 56)  # blocks of 4 tokens: with room, and with less than the batch needs
NEW = {"max_new_tokens": 14}
Batch = dict[str, Tensor]
Survey = Callable[[str], dict[str, Any]]


def tiny_model(name: str) -> Any:
    """A model of the family with random weights. Raises what its default config raises."""
    base, config = getattr(transformers, family_names()[name]), AutoConfig.for_model(name)
    if base.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    failure: Exception | None = None
    for heads, is_beginning in itertools.product((2, 4, None), (False, True)):
        try:
            small = shrink(config, heads, is_beginning)
            with torch.device("meta"):
                num_elements = sum(parameter.numel() for parameter in base._from_config(small).parameters())
            if num_elements > 3e8:
                raise ValueError(f"it would have {num_elements:,} parameters")
            torch.manual_seed(0)
            model = base._from_config(small, dtype=torch.float32).eval()
            model(input_ids=torch.tensor([[5, 6, 7]]))
            break
        except Exception as error:
            failure = failure or error
    else:
        raise failure or ValueError(name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_matrix = parameter.ndim > 1
            parameter.copy_(noise * 2 / parameter.shape[-1] ** 0.5 if is_matrix else parameter.round() + 0.1 * noise)
    settings = model.generation_config
    settings.eos_token_id, settings.bos_token_id, settings.pad_token_id = 3, 1, 0
    settings.forced_eos_token_id = settings.forced_bos_token_id = settings.cache_implementation = None
    return model


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
    cache = hf_paged.PagedCache(model) if hasattr(model, "paged") else DynamicCache(config=model.config)
    first = model.generate(**row_of(batch, 0), **NEW, past_key_values=cache)
    text = torch.cat([first, torch.tensor([[7, 8, 9]])], dim=1)
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
    "beams": lambda model, batch: generate(model, batch, num_beams=3, num_return_sequences=2),
    "one": lambda model, batch: generate(model, row_of(batch, 1)),
    "two turns": two_turns,
    "threads": threads,
}


def text_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def survey(name: str) -> dict[str, Any]:
    """What became of a family: its `status` is "exact", "differs", "refused", "not made" or "raised"."""
    quiet()
    warnings.simplefilter("ignore")
    try:
        model = tiny_model(name)
    except Exception as error:
        return {"status": "not made", "why": text_of(error)}
    report = hf_paged.is_supported(model)
    if not report:
        return {"status": "refused", "why": "; ".join(report.reasons)[:300]}
    stock, batch = copy.deepcopy(model), ragged_batch()
    expected, left_out, differs = {}, {}, {}
    for mode, run in MODES.items():
        try:
            expected[mode] = run(stock, batch)
        except Exception as error:
            left_out[mode] = text_of(error)
    num_preemptions = 0
    for num_blocks in POOLS:
        paged = hf_paged.patch(copy.deepcopy(model), num_blocks=num_blocks, block_size=2 if "llama4" in name else 4)
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


def _survey_into(one: Survey, name: str, results: Any) -> None:
    try:
        results.put(one(name))
    except BaseException as error:
        results.put({"status": "raised", "why": text_of(error)})


def survey_apart(name: str, one: Survey = survey) -> dict[str, Any]:
    """What a survey says of a family, in a process of its own, which may take so long."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_survey_into, args=(one, name, results))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        return {"status": "raised", "why": f"not done in {SECONDS} s"}
    return results.get() if not results.empty() else {"status": "raised", "why": f"exit code {process.exitcode}"}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--families", nargs="*", help="model types; all if not given")
    given = arguments.parse_args()
    quiet()
    names = given.families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: dict[str, dict[str, Any]] = {}
    with tqdm(names, unit="family") as bar:
        for name in bar:
            started = time.perf_counter()
            found[name] = survey_apart(name) | {"seconds": round(time.perf_counter() - started, 1)}
            bar.set_postfix(Counter(each["status"] for each in found.values()))
    counts = Counter(each["status"] for each in found.values())
    table = Table("family", "what", "why", title=", ".join(f"{count} {status}" for status, count in counts.items()))
    for name, each in found.items():
        if each["status"] != "exact":
            table.add_row(name, each["status"], str(each.get("why") or each.get("differs")))
    show(table)
    if not given.families:
        path = given.out / f"families-{transformers.__version__}.json"
        save(path, {"benchmark": "families", "counts": counts}, found)


if __name__ == "__main__":
    main()
