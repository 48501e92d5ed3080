"""Ways to call a model on the pretended device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from helpers.models import VOCAB, ragged_batch, random_ids
from helpers.waiting import join

NEW = 6
place = "cuda:0"  # where the models are


def ragged() -> dict[str, Tensor]:
    return _ragged(place)


def prompts(rows: int, length: int) -> Tensor:
    return _prompts(rows, length, place)


# Made once, by the stock model's call: to bring them to the device waits.
@cache
def _ragged(device: str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in ragged_batch((9, 6, 2)).items()}


@cache
def _prompts(rows: int, length: int, device: str) -> Tensor:
    return random_ids(rows, length, seed=length).to(device)


class Shift(LogitsProcessor):
    """A user's own: what it adds depends on the tokens so far."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, dims=-1) + (input_ids[:, -1:] % 5) * torch.arange(VOCAB, device=scores.device) / VOCAB


def _generate(model: Any, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**ragged(), max_new_tokens=NEW, **arguments)


def _one(model: Any, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(prompts(1, 9), max_new_tokens=NEW, **arguments)


def _user_processor(model: Any) -> Any:
    return _generate(model, logits_processor=LogitsProcessorList([Shift()]))


def _twice(model: Any) -> Any:
    return [model.generate(prompts(2, 9), max_new_tokens=NEW, eos_token_id=None) for _ in range(2)]


def _crowd(model: Any) -> Any:
    return model.generate(prompts(4, 9), max_new_tokens=10, eos_token_id=None)


def _threads(model: Any) -> Any:
    results: list[Any] = [None] * 3

    def call(index: int) -> None:
        results[index] = model.generate(prompts(1, 5 + index), max_new_tokens=NEW)

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(3)]
    for thread in threads:
        thread.start()
    join(*threads, seconds=100)
    return results


def _submit(model: Any) -> Any:
    given = [prompts(1, 5 + index) for index in range(3)]
    if not hasattr(model, "paged"):
        return [model.generate(ids, max_new_tokens=NEW)[0, ids.shape[1] :].tolist() for ids in given]
    asked = zip(given, (None, 0, 3), strict=True)
    requests = [model.paged.submit(ids[0], max_new_tokens=NEW, logprobs=num_top) for ids, num_top in asked]
    outputs = [request.result(100) for request in requests]
    for output in outputs[1:]:  # greedy: the likeliest of all
        assert [each.token_id for each in output.logprobs[0]] == output.token_ids
    assert all(each.top[0] == (each.token_id, each.logprob) for each in outputs[2].logprobs[0])
    return [output.token_ids for output in outputs]


@dataclass(frozen=True)
class Mode:
    """A way to call a model.

    Attributes:
        call: Calls a stock or a patched model.
        settings: Of the patched one.
        entries: Calls of `generate()` and `submit()` in it; each may wait for the device once. `None`: transformers'
            own loop runs, and waits as it does.
        reached: A counter of `stats()` that must have moved.
        is_exact: Whether stock's tokens are expected.
    """

    call: Callable[[Any], Any]
    settings: dict[str, Any] = field(default_factory=dict)
    entries: int | None = 1
    reached: str = "num_steps"
    is_exact: bool = True


FEW = {"num_blocks": 12, "enable_prefix_caching": False}
SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
MODES = {
    "greedy": Mode(_generate),
    "steps_in_turn": Mode(_generate, {"use_async_batching": False}),
    "sampling": Mode(lambda model: _generate(model, do_sample=True, top_k=20, top_p=0.9, temperature=1.3)),
    "samples": Mode(lambda model: _one(model, do_sample=True, num_return_sequences=3)),
    "beams": Mode(lambda model: _generate(model, num_beams=3, num_return_sequences=2), entries=None),
    "processors": Mode(lambda model: _generate(model, repetition_penalty=1.3, no_repeat_ngram_size=2), entries=None),
    "user_processor": Mode(_user_processor, entries=None),
    "scores": Mode(lambda model: _generate(model, **SCORES), entries=None),
    "prompt_lookup": Mode(lambda model: _one(model, prompt_lookup_num_tokens=3), entries=None),
    "int8_pool": Mode(_generate, {"kv_cache_dtype": "int8"}, is_exact=False),
    "fp8_pool": Mode(_generate, {"kv_cache_dtype": "fp8_e5m2"}, is_exact=False),
    "swap": Mode(_crowd, FEW | {"preemption": "swap", "swap_space_gib": 0.01}, reached="num_preemptions"),
    "recompute": Mode(_crowd, FEW | {"preemption": "recompute"}, reached="num_preemptions"),
    "prefix_hits": Mode(_twice, entries=2, reached="prefix_cache_hit_tokens"),
    "threads": Mode(_threads, entries=3),
    "submit": Mode(_submit, entries=3),
}
