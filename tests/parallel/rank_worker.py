"""One rank of a tensor-parallel model, a process of its own: it runs what comes on its standard input, by name.

A line of input is JSON: `{"case": name, ...}`; a line of output `RESULT ` and JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.distributed import DistributedConfig
from transformers.generation.streamers import BaseStreamer

import hf_paged
from helpers.graphs import Again
from helpers.models import MODELS, VOCAB, build
from helpers.state_models import STATE_MODELS, build_state_model
from hf_paged.model import bound_model, cuda_graph
from parallel.training_cases import TrainingCases

RECORDER, RANKS_OF = cuda_graph.recorder, bound_model.ranks_of
RANK = int(os.environ["RANK"])
PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 8]])
MASK = (PROMPTS != 0).long()


class Sharpen(LogitsProcessor):
    """A caller's own."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores * 1.5


class Fails(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        raise LookupError("a processor's own error")


class RunsModel(LogitsProcessor):
    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + self._model(input_ids).logits[:, -1]


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Any) -> None:
        self.seen.extend(value.flatten().tolist())  # the other ranks get each token by itself

    def end(self) -> None:
        self.seen.append("end")


def load(name: str, directory: str) -> Any:
    """A model of the suite's, shared out between the ranks; `name+experts`: its experts one by one."""
    name, _, experts = name.partition("+")
    path = Path(directory) / name.replace("/", "_of_")
    if RANK == 0:
        _make(name).save_pretrained(path)
    dist.barrier()
    size = dist.get_world_size()
    config = DistributedConfig(tp_size=size, ep_size=size if experts else None)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config).eval()
    model.generation_config.pad_token_id = 0
    return model


def _make(name: str) -> Any:
    """A row of the suite's table; `row/4`: with four key/value heads."""
    row, _, kv_heads = name.partition("/")
    if not kv_heads:
        return build_state_model(row) if row in STATE_MODELS else build(row)
    config = MODELS[row].config()
    config.num_key_value_heads = int(kv_heads)
    torch.manual_seed(MODELS[row].seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # weights that make its text diverse
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def _plain(model: Any, **options: Any) -> Any:
    return model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=10, **options).tolist()


def _alone(model: Any, **options: Any) -> Any:
    return model.generate(PROMPTS[1:], max_new_tokens=10, **options).tolist()


def _streamed(model: Any, **options: Any) -> Any:
    collect = Collect()
    return [_alone(model, streamer=collect, **options), collect.seen]


def _detailed(model: Any) -> Any:
    output = model.generate(
        PROMPTS, attention_mask=MASK, max_new_tokens=6, return_dict_in_generate=True, output_scores=True
    )
    return [output.sequences.tolist(), len(output.scores), [list(score.shape) for score in output.scores]]


def _kept(model: Any) -> Any:
    """Two turns of a chat over one cache, and a forward, behind a cut where nothing has a window or a state."""
    cache = hf_paged.PagedCache(model) if hasattr(model, "paged") else None
    first = model.generate(
        PROMPTS[1:], max_new_tokens=6, past_key_values=cache, return_dict_in_generate=True, do_sample=False
    )
    cache = first.past_key_values
    ids = torch.cat([first.sequences, torch.tensor([[9, 10, 11]])], dim=1)
    seen = torch.ones_like(ids)  # an answer may have padding's number in it
    second = model.generate(
        ids, attention_mask=seen, max_new_tokens=6, past_key_values=cache, return_dict_in_generate=True
    )
    width = cache.get_seq_length()
    if not getattr(model.config, "sliding_window", None) and not model._is_stateful:
        cache.crop(-2)
    last = second.sequences[:, cache.get_seq_length() : width + 1]
    logits = model(last, past_key_values=cache, use_cache=True).logits
    return [first.sequences.tolist(), second.sequences.tolist(), width, logits.argmax(-1).tolist()]


def _own_loop(model: Any) -> Any:
    cache = hf_paged.PagedCache(model) if hasattr(model, "paged") else None
    ids, tokens = PROMPTS[1:], []
    for _ in range(5):
        output = model(ids, past_key_values=cache, use_cache=True)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


MODES: dict[str, Callable[[Any], Any]] = {
    "greedy": _plain,
    "sampling": lambda model: _plain(model, do_sample=True, temperature=1.3, top_k=20),
    "samples": lambda model: _plain(model, do_sample=True, num_return_sequences=3),
    "beams": lambda model: _plain(model, num_beams=3, num_return_sequences=2),
    "penalty": lambda model: _plain(model, repetition_penalty=1.4, do_sample=True),
    "own_processor": lambda model: _plain(model, logits_processor=LogitsProcessorList([Sharpen()]), do_sample=True),
    "prompt_lookup": lambda model: _alone(model, prompt_lookup_num_tokens=2),
    "streamer": _streamed,
    "streamer_own_processor": lambda model: _streamed(model, logits_processor=LogitsProcessorList([Sharpen()])),
    "streamer_prompt_lookup": lambda model: _streamed(model, prompt_lookup_num_tokens=2),
    "detailed": _detailed,
    "kept_cache": _kept,
    "own_loop": _own_loop,
    "plain_forward": lambda model: model(PROMPTS, attention_mask=MASK).logits.argmax(-1).tolist(),
    "without_cache": lambda model: _alone(model, use_cache=False),
    "guidance": lambda model: _alone(model, guidance_scale=1.5),
    "hidden_states": lambda model: model.generate(
        PROMPTS[1:], output_hidden_states=True, return_dict_in_generate=True, max_new_tokens=3
    ).sequences.tolist(),
    "static_cache": lambda model: _alone(model, cache_implementation="static"),
}


def _until_it_fails(model: Any) -> None:
    while True:
        model.paged.ranks.check()
        time.sleep(0.01)


def _in_step(model: Any, number: int, action: Callable[[], object]) -> None:
    """Has something happen before one of the steps to come."""
    runner = model.paged.core.runner
    run, steps = runner.run, iter(range(1, 10_000))

    def counted(*args: Any) -> Any:
        if next(steps) == number:
            action()
        return run(*args)

    runner.run = counted


def _prompt(number: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 24))]


def _request(model: Any, number: int) -> Any:
    """A call of any kind, the same on every rank."""
    kind = number % 6
    ids = torch.tensor([_prompt(number)])
    length = 4 + number % 9
    options: dict[str, Any] = {"max_new_tokens": length, "min_new_tokens": length}
    if kind == 1:
        options |= {"num_beams": 2}
    if kind == 2:
        options |= {"logits_processor": LogitsProcessorList([Sharpen()])}
    if kind == 3:
        ids = ids.repeat(2, 1)
    if kind == 4:
        options |= {"repetition_penalty": 1.3}
    if kind == 5 and hasattr(model, "paged"):
        return [ids[0].tolist() + model.paged.submit(ids, **options).result(60).token_ids]
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()


def _record(function: Callable[[], torch.Tensor], how: str) -> Again:
    made = Again(function)
    if RANK == 1 and how == "no_memory" and len(made.output) == 2:
        raise torch.OutOfMemoryError("none for two rows")
    if RANK == 1 and how == "fails":
        raise RuntimeError("this rank can't")
    return made


class Worker(TrainingCases):
    """The cases, and what is kept between them."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._models: dict[str, Any] = {}

    def model(self, name: str) -> Any:
        if name not in self._models:
            self._models[name] = load(name, self._directory)
        return self._models[name]

    def modes(self, model: str, modes: list[str], settings: dict[str, Any], recorded: str = "") -> Any:
        """For each mode whether patched and stock agree, in tokens and in where the generator ends.

        Args:
            recorded: How recording goes: "by_all" ranks; with "no_memory" on rank 1 for steps of two rows; "fails" on
                rank 1. Empty: nothing is recorded.
        """
        own = self.model(model)
        stock = {mode: self._run(own, mode) for mode in modes}
        hf_paged.patch(own, **settings)
        if recorded:
            bound_model.ranks_of = lambda model: None  # as on GPUs, with cuda_graphs=True
            cuda_graph.recorder = lambda attention: partial(_record, how=recorded)
        runner, num_placeholders = own.paged.core.runner, 0
        run = runner.run

        def counted(batch: Any, *args: Any) -> Any:
            nonlocal num_placeholders
            num_placeholders += batch.placeholders is not None
            return run(batch, *args)

        runner.run = counted
        try:
            found = {}
            for number, mode in enumerate(modes):
                if recorded and RANK == 0 and number == len(modes) // 2:
                    own.paged.reset_prefix_cache()  # also forgets what is recorded: the others hear of it
                found[mode] = self._run(own, mode)
            stats = None
            if RANK == 0:
                stats = own.paged.stats().num_preemptions
            own.paged.check_invariants()
            graphs = runner.graphs
            held = [] if graphs.held is None else [graphs.held.sizes, graphs.held.reason]
        finally:
            cuda_graph.recorder, bound_model.ranks_of = RECORDER, RANKS_OF
            hf_paged.unpatch(own)
        differences = {mode: [stock[mode], found[mode]] for mode in modes if stock[mode] != found[mode]}
        counts = {"preemptions": stats, "placeholders": num_placeholders, "replays": graphs.num_replays}
        return {"differences": differences, "held": held} | counts

    def _run(self, model: Any, mode: str) -> Any:
        torch.manual_seed(7)
        try:
            result = MODES[mode](model)
        except ValueError as error:  # stock's own: drafts for a model with states
            result = str(error)
        return [result, int(torch.get_rng_state().long().sum())]

    def submit(self, model: str, settings: dict[str, Any]) -> Any:
        """Requests, and a list of prompts."""
        own = self.model(model)
        prompts = [_prompt(number) for number in range(6)]
        options = {"max_new_tokens": 6, "min_new_tokens": 6}
        stock = [own.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
        beams = own.generate(torch.tensor([prompts[0]]), num_beams=2, **options)[0, len(prompts[0]) :].tolist()
        hf_paged.patch(own, **settings)
        requests = [own.paged.submit(prompt, **options) for prompt in prompts]
        found = [request.result(60).token_ids for request in requests]
        streamed = list(own.paged.submit(prompts[1], **options))
        of_beams = own.paged.submit(prompts[0], num_beams=2, **options).result(60).token_ids
        listed = [output.token_ids for output in own.paged.generate(prompts, **options)]
        said = own.paged.submit(prompts[2], logprobs=2, **options).result(60).logprobs
        scored = own.paged.score(prompts[:2], first=2)
        hf_paged.unpatch(own)
        return {
            "same": [found == stock, streamed == stock[1], of_beams == beams, listed == stock],
            "logprobs": len(said[0]),
            "scored": [[each.token_id for each in text] for text in scored] == [prompt[2:] for prompt in prompts[:2]],
        }

    def adapters(self, model: str, settings: dict[str, Any]) -> Any:
        """PEFT's layers, shared out as the plan says: for each way to choose, whether patched and stock agree."""
        import peft

        own: Any = load(model, self._directory)
        for name, targets in (("one", ["q_proj", "o_proj"]), ("two", "all-linear")):
            config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=targets)
            if isinstance(own, peft.PeftModel):
                own.add_adapter(name, config)
            else:
                own = peft.get_peft_model(own, config, adapter_name=name)
        for number, (name, parameter) in enumerate(own.named_parameters()):
            if "lora_" in name:
                draw = torch.Generator().manual_seed(number)
                share = getattr(parameter, "_local_tensor", parameter).data
                start = RANK * len(share) if len(share) < len(parameter) else 0  # of its rows; columns are alike
                share.copy_(torch.randn(len(parameter), *share.shape[1:], generator=draw)[start:][: len(share)] * 0.3)
        own.eval()

        def call(adapter: str | None, **options: Any) -> Any:
            with own.disable_adapter() if adapter is None else nullcontext(own.set_adapter(adapter)):
                given = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False} | options
                return own.generate(input_ids=PROMPTS, **given).tolist()

        calls = [("one", {}), ("two", {"num_beams": 2}), (None, {}), ("one", {"adapter_names": ["two", "__base__"]})]
        stock = [call(adapter, **options) for adapter, options in calls]
        hf_paged.patch(own, **settings)
        found = [call(adapter, **options) for adapter, options in calls]
        raised = []
        engine = own.get_base_model().paged
        for ask in (lambda: engine.submit([3, 4], adapter="one"), lambda: engine.load_adapter("more", "nowhere")):
            try:
                ask()
            except ValueError as error:
                raised.append(str(error))
        notes = hf_paged.is_supported(own).notes
        hf_paged.unpatch(own)
        return {"stock": stock, "found": found, "raised": raised, "notes": notes}

    def errors(self, model: str, settings: dict[str, Any]) -> Any:
        """What is raised on this rank where a call goes wrong on rank 0, on another, or is another one there."""
        own = self.model(model)
        hf_paged.patch(own, **settings)
        calls: dict[str, Callable[[], Any]] = {
            "processor": lambda: _plain(own, logits_processor=LogitsProcessorList([Fails()])),
            "too_long": lambda: own.generate(PROMPTS, attention_mask=MASK, max_new_tokens=5000),
            "runs_model": lambda: _alone(own, logits_processor=LogitsProcessorList([RunsModel(own)])),
            "hidden_states": lambda: own(
                PROMPTS, past_key_values=hf_paged.PagedCache(own), use_cache=True, output_hidden_states=True
            ),
            "stats": lambda: own.paged.stats() and None,
            "follow": lambda: RANK == 0 and own.paged.follow(),
            "update": lambda: own.model(PROMPTS, past_key_values=hf_paged.PagedCache(own), use_cache=True),
        }
        raised = {}
        for name, call in calls.items():
            try:
                call()
                raised[name] = ""
            except Exception as error:
                raised[name] = f"{type(error).__name__}: {error}"
        after = _plain(own)
        hf_paged.unpatch(own)
        return {"raised": raised, "is_well": after == _plain(own)}

    def cancels(self, model: str, settings: dict[str, Any]) -> Any:
        """All ranks cancel a request, rank 1 before rank 0."""
        own = self.model(model)
        hf_paged.patch(own, **settings)
        options = {"max_new_tokens": 200, "min_new_tokens": 200}
        request = own.paged.submit(_prompt(3), **options)
        if RANK > 0:
            request.cancel()
        dist.barrier()
        request.cancel()
        output = request.result(60)
        after = _plain(own)
        hf_paged.unpatch(own)
        return {"reason": output.finish_reason, "length": len(output.token_ids), "is_well": after == _plain(own)}

    def interrupts(self, model: str, victim: int, settings: dict[str, Any]) -> Any:
        """Ctrl-C on one rank, whose main thread this is."""
        own = self.model(model)
        hf_paged.patch(own, **settings)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        raised, main = "", threading.main_thread().ident
        assert main is not None
        if victim == RANK:
            _in_step(own, 10, lambda: signal.pthread_kill(main, signal.SIGINT))
        try:
            own.generate(PROMPTS[1:], max_new_tokens=240, min_new_tokens=240)
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"
        after = _plain(own)
        hf_paged.unpatch(own)
        return {"raised": raised, "is_well": after == _plain(own)}

    def unlike_seeds(self, model: str, settings: dict[str, Any]) -> Any:
        """The ranks' generators stand elsewhere."""
        own = self.model(model)
        hf_paged.patch(own, **settings)
        torch.manual_seed(RANK)
        found = [_plain(own, do_sample=True), int(torch.get_rng_state().long().sum())]
        hf_paged.unpatch(own)
        return found

    def messages(self, model: str, settings: dict[str, Any]) -> Any:
        """What rank 0 sends while a call runs, and while none does."""
        own = self.model(model)
        hf_paged.patch(own, **settings)
        _alone(own)
        channel, sent = own.paged.core.ranks.channel, []
        send, alert = channel.send, channel.alert
        channel.send = lambda kind, payload=b"": sent.append(kind.name) or send(kind, payload)
        channel.alert = lambda *given, **more: sent.append("ALERT") or alert(*given, **more)
        time.sleep(0.5)
        idle = list(sent)
        steps = own.paged.stats().num_steps if RANK == 0 else 0
        own.generate(PROMPTS, attention_mask=MASK, max_new_tokens=10, min_new_tokens=10)
        steps = own.paged.stats().num_steps - steps if RANK == 0 else 0
        during = list(sent)  # without the farewell
        dist.barrier()
        hf_paged.unpatch(own)
        return {"idle": idle, "sent": during, "steps": steps}

    def app(self, model: str, num_calls: int, settings: dict[str, Any]) -> Any:
        """Rank 0 runs an app of many threads, with calls of all kinds; the others follow."""
        own, numbers = self.model(model), list(range(num_calls))
        stock = {number: _request(own, number) for number in numbers}
        hf_paged.patch(own, **settings)
        if RANK > 0:
            own.paged.follow()
            hf_paged.unpatch(own)
            return {}
        found: dict[int, Any] = {}

        def serve(number: int) -> None:
            try:
                found[number] = _request(own, number)
            except BaseException as error:
                found[number] = repr(error)

        threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        preemptions = own.paged.stats().num_preemptions
        own.paged.check_invariants()
        while not own.paged.ranks.is_followed:
            time.sleep(0.01)
        try:
            raised = str(own(PROMPTS))
        except hf_paged.UnsupportedCallError as error:
            raised = str(error)
        hf_paged.unpatch(own)
        return {
            "raised": raised,
            "differences": {n: [stock[n], found.get(n)] for n in numbers if stock[n] != found.get(n)},
            "preemptions": preemptions,
        }

    def unlike(self, model: str, kind: str, settings: dict[str, Any]) -> Any:
        """Rank 1 makes another call than rank 0 does, or one more, or one on another thread."""
        own = self.model(model)
        expected = _plain(own)
        hf_paged.patch(own, **settings)
        calls: dict[str, Callable[[], Any]] = {
            "another": lambda: _plain(own, top_k=3 + RANK),
            "one_more": lambda: _plain(own) if RANK > 0 else _until_it_fails(own),
            "thread": lambda: self._on_two_threads(own),
        }
        raised = ""
        try:
            calls[kind]()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        try:
            goes_on = _plain(own) == expected
        except Exception as error:
            goes_on = f"{type(error).__name__}: {error}"
        hf_paged.unpatch(own)
        hf_paged.patch(own, **settings)
        is_well = _plain(own) == expected
        hf_paged.unpatch(own)
        return {"raised": raised, "goes_on": goes_on, "is_well": is_well}

    def _on_two_threads(self, own: Any) -> None:
        _plain(own)
        if RANK > 0:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(_plain, own).result()

    def bytes_a_block(self, model: str, settings: dict[str, Any]) -> Any:
        own, refused = self.model(model), ""
        try:
            hf_paged.patch(own, cuda_graphs=True)
        except ValueError as error:
            refused = str(error)
        hf_paged.patch(own, **settings)
        own.generate(PROMPTS[1:], max_new_tokens=2)
        held = own.paged.core.pool.kv_cache.tensor
        found = {"bytes": own.paged.bytes_per_block, "tensor": held.numel() * held.element_size()}
        found |= {"refused": refused, "no_graphs": own.paged.core.bound.why_unrecorded}
        hf_paged.unpatch(own)
        return found

    def supported(self, model: str) -> Any:
        report = hf_paged.is_supported(self.model(model))
        return {"supported": bool(report), "reasons": list(report.reasons)}

    def dies(self, model: str, victim: int, settings: dict[str, Any]) -> Any:
        """One rank is killed in the midst of calls; how the calls of this one end."""
        own = self.model(model)
        hf_paged.patch(own, **settings)
        if victim == RANK:
            _in_step(own, 10, lambda: os.kill(os.getpid(), 9))
        options = {"max_new_tokens": 230, "min_new_tokens": 230}
        requests = [own.paged.submit(prompt, **options) for prompt in PROMPTS[1:].repeat(2, 1)]
        calls = [lambda: own.generate(PROMPTS[1:], **options), *(request.result for request in requests)]
        ends = list[str]()
        for call in calls:
            try:
                call()
                ends.append("")
            except Exception as error:
                ends.append(f"{type(error).__name__}: {error}")
        return {"ends": ends}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    worker = Worker(sys.argv[1])
    print("RESULT {}", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            result = getattr(worker, task.pop("case"))(**task)
        except BaseException:
            result = {"error": traceback.format_exc()}
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
