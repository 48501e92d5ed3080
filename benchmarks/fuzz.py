"""Random `generate()` calls on random tiny models, each beside stock: the same tokens, or a certified near tie.

    python benchmarks/fuzz.py --count 500                        # seeds 0 to 499, a model and a pool each
    python benchmarks/fuzz.py --start 10000 --count 100000 --seconds 3600 --jobs 4 --out fuzz.jsonl
    python benchmarks/fuzz.py --only 1234                        # one seed again, with all that was drawn for it

A seed is a family with a random geometry, a pool (often one that preempts), and a few records. A record is one call,
or a conversation over one cache: greedy, sampling, samples, beams, drawn beams, prompt lookup, an assistant model; with
chunks, embeddings, odd masks, processors and criteria of a user, per-step outputs, PEFT adapters that are switched
between calls and inside of them; or several requests at once. The oracle is stock's `generate()` with the same seed:

- float32: the same tokens, scores within 2e-3 of their size, the global generator left in the same state. Tokens that
  differ must be certified by `hf_paged.testing.compare_generations`, as in half precision;
- bfloat16 and float16: greedy search, sampling and beam search, without what can't be judged there: routed experts,
  layers with a state, drawn beams, sampled drafts, processors that draw, guidance;
- drafts for several rows, which stock doesn't make: its call without drafts;
- fp8 pools: ours, each prompt alone in a pool of the same type that holds everything. Keys that lie between two
  numbers of 8 bits may round either way, so tokens that differ must be within half a logit by stock's logits.

What stock raises must be raised. After each record the invariants hold, and no block is held. Exit status 1 if any
record is unexplained; each is listed with its seed.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import itertools
import json
import math
import os
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # in every process, before torch is imported

import command
import fuzz_cases
import torch
from fuzz_cases import Record
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import DynamicCache

import hf_paged
from hf_paged.testing import compare_generations

HANGS_AFTER = 240  # seconds of one record
FP8_GAP = 0.5
NOT_RUN = ("refused", "pool too small")
EXPLAINED = ("same", "near tie", "both raise", "stock raises", *NOT_RUN)
Outcome = tuple[str, str]  # and why
Step = tuple[Tensor, Tensor, Any]  # one call's ids and mask, and what it returned


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Result and error of a call."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def code_of(record: Record, model: Any = None) -> dict[str, Any]:
    """A user's processors and criteria, new ones."""
    kinds = record["code"]
    code = {
        "logits_processor": [fuzz_cases.Code(kind) for kind in kinds if not kind.startswith("stop")],
        "stopping_criteria": [fuzz_cases.End(kind) for kind in kinds if kind.startswith("stop")],
    }
    if record["switch"] is not None:
        code["stopping_criteria"].append(fuzz_cases.End("switch", model, *record["switch"]))
    return code


def steps_of(record: Record, model: Any, prompts: tuple[Tensor, Tensor], vocab: int, assistant: Any) -> Iterator[Step]:
    """Makes a record's calls, one after the other. A model without `paged` is stock's."""
    ids, mask = prompts
    is_paged, kwargs = hasattr(model, "paged"), copy.deepcopy(record["kwargs"])
    if assistant is not None and record["mode"] == "assistant":
        kwargs["assistant_model"] = assistant
    if not is_paged and len(ids) > 1:  # stock makes drafts for one row only
        for name in ("prompt_lookup_num_tokens", "assistant_model"):
            kwargs.pop(name, None)
    if record["adapter"] not in (None, "none"):
        model.set_adapter(record["adapter"])
    with model.disable_adapter() if record["adapter"] == "none" else nullcontext():
        given: dict[str, Any] = {} if record["mask"] == "none" else {"attention_mask": mask.clone()}
        given |= {"inputs_embeds": model.get_input_embeddings()(ids).detach()} if record["embeds"] else {}
        cache = None
        if record["mode"] == "turns":
            base = model if record["adapter"] is None else model.get_base_model()
            cache = hf_paged.PagedCache(base) if is_paged else DynamicCache()
        for operation in (*record["operations"], None):
            if operation == "crop":
                cache.activate_past_recording()
            if cache is not None:
                given = {"attention_mask": mask, "past_key_values": cache}
            torch.manual_seed(record["noise"])
            arguments = {} if record["embeds"] else {"input_ids": ids.clone()}
            result = model.generate(**arguments, **given, **kwargs, **code_of(record, model))
            yield ids, mask, result
            if operation is None:
                return
            rows = torch.arange(len(result))
            if operation == "crop" and cache.get_seq_length() > 3:
                cache.crop(-3)
            elif operation == "interleave":
                cache.batch_repeat_interleave(2)
                rows = rows.repeat_interleave(2)
            elif operation == "select":
                rows = rows[::2]
                cache.batch_select_indices(rows)
            elif operation == "reorder":
                rows = rows.flip(0)
                rows[0] = rows[-1]
                cache.reorder_cache(rows)
            elif operation == "deepcopy":
                cache = copy.deepcopy(cache)
            width = cache.get_seq_length() + 1
            new = torch.randint(3, vocab, (len(rows), 3), generator=torch.Generator().manual_seed(record["noise"] + 7))
            ids = torch.cat([result[rows, :width], new], dim=1)
            mask = pad(pad(mask, (0, result.shape[1] - mask.shape[1]), value=1)[rows, :width], (0, 3), value=1)


def at_once(records: list[Record], prompts: list[tuple[Tensor, Tensor]], paged: Any) -> list[Iterator[Step]]:
    """Starts one request a record, to be waited for: what draws by `submit`, the others by `generate()` on threads."""
    results: list[tuple[Any, Exception | None]] = [(None, None)] * len(records)
    threads = []

    def run(place: int, call: Callable[[], Any]) -> None:
        results[place] = attempt(call)

    for place, (record, (ids, mask)) in enumerate(zip(records, prompts, strict=True)):
        kwargs = copy.deepcopy(record["kwargs"])
        if kwargs.get("do_sample"):
            run(place, partial(paged.paged.submit, ids, seed=record["noise"], **kwargs))
        else:
            call = partial(paged.generate, ids, attention_mask=mask, **kwargs)
            threads.append(threading.Thread(target=run, args=(place, call)))
    for thread in threads:
        thread.start()

    def result(place: int) -> Iterator[Step]:
        for thread in threads:
            thread.join()
        (found, error), (ids, mask) = results[place], prompts[place]
        if error is not None:
            raise error
        if isinstance(found, hf_paged.Request):
            found = torch.cat([ids, torch.tensor([found.result(HANGS_AFTER).sequences[0]], dtype=torch.long)], dim=1)
        yield ids, mask, found

    return [result(place) for place in range(len(records))]


def row_by_row(record: Record, model: Any, prompts: tuple[Tensor, Tensor]) -> Iterator[Step]:
    """A greedy call of each prompt by itself, as if it had been one of them all."""
    ids, mask = prompts
    rows = [row[seen.bool()][None] for row, seen in zip(ids, mask, strict=True)]
    new = [model.generate(row, **record["kwargs"])[:, row.shape[1] :] for row in rows]
    width = max(tokens.shape[1] for tokens in new)
    yield ids, mask, torch.cat([ids, torch.cat([pad(tokens, (0, width - tokens.shape[1])) for tokens in new])], dim=1)


def judge(record: Record, model: Any, step: Step, tokens: list[Tensor], threshold: float | None) -> Outcome:
    """Says what tokens are that differ from the expected ones."""
    if (
        record["embeds"]
        or record["switch"] is not None
        or "draw" in record["code"]
        or "guidance_scale" in record["kwargs"]
    ):
        return "differs", "such a call can't be judged"
    mask = None if record["mask"] == "none" else step[1]
    more = (
        record["kwargs"] | code_of(record) | {"attention_mask": mask, "seed": record["noise"], "threshold": threshold}
    )
    report, error = attempt(partial(compare_generations, model, step[0], *tokens, **more))
    return ("near tie" if report else "differs"), str(report if error is None else error)[:400]


def difference(expected: Any, found: Any, where: str) -> str | None:
    """What differs between per-step outputs; `None`: nothing."""
    if isinstance(expected, tuple):
        if len(expected) != len(found):
            return f"{where}: {len(found)} items where stock has {len(expected)}"
        pairs = enumerate(zip(expected, found, strict=True))
        return next((text for i, pair in pairs if (text := difference(*pair, f"{where}[{i}]"))), None)
    if not isinstance(expected, Tensor):
        return None
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{where}: {found.dtype} {list(found.shape)} where stock has {expected.dtype} {list(expected.shape)}"
    if not torch.equal(expected.isfinite(), found.isfinite()):
        return f"{where}: others are finite"
    kept = expected.isfinite()
    apart, size = (expected - found)[kept].abs(), 1 + expected[kept].abs()
    return f"{where}: {float(apart.max()):.2e} apart" if len(apart) and apart.max() > 2e-3 * size.max() else None


def without_padding(output: Any, record: Record, mask: Tensor) -> Record:
    """An output, its hidden states of a last chunk without those of padding.

    A token of padding sees nothing, and attention over nothing depends on its code. Stock's eager attention takes the
    mean of all values in its cache, of a layer with a window those of the last columns, and among them those of padding
    in the chunks before, which a `PagedCache` doesn't store. Its sdpa attention returns something else.
    """
    output, kwargs = dict(output), record["kwargs"]
    hidden = output.get("hidden_states")
    if hidden and "prefill_chunk_size" in kwargs and record["mask"] != "none":
        rows, columns = hidden[0][0].shape[:2]
        is_token = mask.repeat_interleave(rows // len(mask), dim=0)[:, -columns:, None]
        output["hidden_states"] = (tuple(layer * is_token for layer in hidden[0]), *hidden[1:])
    return output


def compare(record: Record, stock: Any, runs: list[Iterator[Step]], threshold: float | None) -> Outcome:
    """Runs a record on both sides, call by call, until they differ."""
    while True:
        sides, draws = [], []
        for run in runs:
            sides.append(attempt(partial(next, run, None)))
            draws.append(torch.rand(2))
        (expected, error), (found, own_error) = sides
        if error is not None or own_error is not None:
            texts = [f"{type(each).__name__}: {each!s:.200}" for each in (error, own_error) if each is not None]
            if isinstance(own_error, ValueError) and "the pool has" in texts[-1]:
                return "pool too small", texts[-1]
            kind = "raises" if error is None else "stock raises" if own_error is None else "both raise"
            return kind, " | ".join(texts)
        if expected is None:
            return "same", ""
        results = [step[2] for step in (expected, found)]
        if isinstance(results[0], Tensor) is not isinstance(results[1], Tensor):
            return "differs", f"a {type(results[1]).__name__} where stock returns a {type(results[0]).__name__}"
        tokens = [each if isinstance(each, Tensor) else each.sequences for each in results]
        if tokens[0].shape != tokens[1].shape or not torch.equal(*tokens):
            return judge(record, stock, expected, tokens, threshold)
        if record["dtype"] != "float32" or record["kind"] != "alone":
            continue
        if record["mode"] not in fuzz_cases.DRAFTS and not torch.equal(*draws):
            return "differs", "the global generator's state"
        if not isinstance(results[0], Tensor):
            one, other = (without_padding(each, record, expected[1]) for each in results)
            if one.keys() != other.keys():
                return "differs", f"{list(other)} where stock returns {list(one)}"
            for name in one.keys() - {"past_key_values", "sequences"}:
                if (text := difference(one[name], other[name], name)) is not None:
                    return "differs", text


def is_held(engine: Any) -> bool:
    """Whether blocks are in use though nothing runs."""
    for collect in (lambda: None, gc.collect):
        collect()
        stats = engine.stats()
        if stats.num_free_blocks == stats.num_blocks or not stats.num_blocks:
            return False
    return True


def run_seed(seed: int) -> list[Record]:
    """All records of a seed, each with its outcome."""
    rng = random.Random(seed)
    dtype = rng.choices(list(fuzz_cases.DTYPES), [0.6, 0.25, 0.15])[0]
    kind = rng.choices(["alone", "together", "fp8"], [0.75, 0.18, 0.07])[0]
    family, config = fuzz_cases.draw_config(rng, dtype)
    attention = rng.choice([None, None, "eager", "sdpa"]) if family in fuzz_cases.DENSE else None
    adapts = kind == "alone" and dtype == "float32" and family in fuzz_cases.DENSE and rng.random() < 0.2
    own = {name: value for name, value in config.items() if fuzz_cases.FAMILIES[family].get(name) != value}
    about = {"seed": seed, "kind": kind, "dtype": dtype, "family": family, "attention": attention, "config": own}
    records = [about | fuzz_cases.draw_record(rng, family, dtype, kind, adapts) for _ in range(rng.choice([6, 7, 8]))]
    settings, prompts = fuzz_cases.draw_settings(rng, kind, family, config, records), []
    for record in records:
        record["repeats"] &= bool(prompts) and record["mask"] == "left" and bool(prompts[-1][1][:, -1].all())
        is_again = record["repeats"] and (kind != "together" or len(prompts[-1][0]) == 1)
        prompts.append(prompts[-1] if is_again else fuzz_cases.draw_prompts(record, config["vocab_size"]))
    stock, error = attempt(partial(fuzz_cases.make_model, family, config, seed, dtype, attention))
    if error is not None:  # it has not this implementation of attention
        return [
            about | {"mode": "-", "settings": settings, "outcome": "refused", "why": f"transformers: {error!s:.300}"}
        ]
    assistant = None
    if any(record["mode"] == "assistant" for record in records):
        assistant = copy.deepcopy(stock)
        with torch.no_grad():
            for parameter in assistant.parameters():
                parameter += 0.02 * parameter.std(correction=0) * torch.randn_like(parameter)
    stock = fuzz_cases.add_adapters(stock, seed) if adapts else stock
    paged, error = attempt(partial(hf_paged.patch, copy.deepcopy(stock), **settings))
    if error is not None:
        outcome = "refused" if isinstance(error, hf_paged.UnsupportedModelError) else "raises"
        return [about | {"mode": "-", "settings": settings, "outcome": outcome, "why": f"{error!s:.300}"}]
    own_assistant = assistant and hf_paged.patch(copy.deepcopy(assistant), num_blocks=512, block_size=8)
    alone = hf_paged.patch(copy.deepcopy(stock), **{**settings, "num_blocks": 4096}) if kind == "fp8" else None
    started = at_once(records, prompts, paged) if kind == "together" else []
    done = []
    for place, (record, given) in enumerate(zip(records, prompts, strict=True)):
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True, file=sys.__stderr__)
        start = time.perf_counter()
        calls = partial(steps_of, record, prompts=given, vocab=config["vocab_size"])
        expected = calls(stock, assistant=assistant) if alone is None else row_by_row(record, alone, given)
        found = started[place] if started else calls(paged, assistant=own_assistant)
        outcome, why = compare(record, stock, [expected, found], None if alone is None else FP8_GAP)
        expected.close()
        found.close()  # which holds the cache
        if (broken := attempt(paged.paged.check_invariants)[1]) is not None:
            outcome, why = "invariant", f"{broken!s:.300} ({outcome} {why})"
        elif (not started or place == len(records) - 1) and is_held(paged.paged):
            outcome, why = "leak", f"blocks are held ({outcome} {why})"
        seconds = round(time.perf_counter() - start, 3)
        done.append(record | {"call": place, "settings": settings, "outcome": outcome, "why": why, "seconds": seconds})
    faulthandler.cancel_dump_traceback_later()
    return done


def tally(records: list[Record]) -> Table:
    """Records, near ties and what is unexplained, by dtype and mode."""
    table = Table("dtype", "mode", "records", "same", "near ties", "raise", "not run", "unexplained", "s a record")
    cells: dict[tuple[bool, str, str], list[Record]] = {}
    for record in records:
        mode = record["mode"] + ("" if record["kind"] == "alone" else f", {record['kind']}")
        for key in ((False, record["dtype"], mode), (True, "all", "")):
            cells.setdefault(key, []).append(record)
    for (_, dtype, mode), group in sorted(cells.items()):
        counts = Counter(record["outcome"] for record in group)
        numbers = [len(group), counts["same"], counts["near tie"], counts["both raise"] + counts["stock raises"]]
        numbers.append(sum(counts[outcome] for outcome in NOT_RUN))
        numbers.append(len(group) - sum(counts[outcome] for outcome in EXPLAINED))
        seconds = sum(record.get("seconds", 0.0) for record in group) / len(group)
        table.add_row(dtype, mode, *(f"{number:,}" for number in numbers), f"{seconds:.2f}")
    return table


def prepare() -> None:
    """Of each process: no threads of torch's, and no word about odd arguments, which are drawn on purpose."""
    command.quiet()
    warnings.simplefilter("ignore")


def fuzz(seeds: range, seconds: float, jobs: int) -> Iterator[list[Record]]:
    """The records of each seed, in the order in which seeds are done; begins none after so many seconds."""
    deadline = time.monotonic() + seconds
    todo = itertools.takewhile(lambda _: time.monotonic() < deadline, seeds)
    if jobs == 1:
        prepare()
        yield from map(run_seed, todo)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare) as processes:
        running = {processes.submit(run_seed, seed) for seed in itertools.islice(todo, jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {processes.submit(run_seed, seed) for seed in itertools.islice(todo, len(done))}
            yield from (future.result() for future in done)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=100, help="seeds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no seed after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="file for all records, a line of JSON each")
    parser.add_argument("--only", type=int, metavar="SEED", help="run this seed alone, and print all its records")
    args = parser.parse_args()
    seeds = range(args.start, args.start + args.count) if args.only is None else range(args.only, args.only + 1)
    records: list[Record] = []
    with (
        open(args.out, "w") if args.out is not None else nullcontext() as file,
        tqdm(total=len(seeds), unit="seed", smoothing=0.05, disable=args.only is not None) as bar,
    ):
        for done in fuzz(seeds, args.seconds, args.jobs):
            records += done
            for record in done:
                line = json.dumps(record)
                if file is not None:
                    print(line, file=file, flush=True)
                if args.only is not None or record["outcome"] not in EXPLAINED:
                    tqdm.write(line)
            bar.update()
            bar.set_postfix(records=len(records), unexplained=sum(r["outcome"] not in EXPLAINED for r in records))
    command.show(tally(records))
    unexplained = sorted({record["seed"] for record in records if record["outcome"] not in EXPLAINED})
    print(f"unexplained: {', '.join(f'--only {seed}' for seed in unexplained)}" if unexplained else "all explained")
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
