"""The same arrivals through others: padded `generate()`, transformers' `generate_batch`, and vLLM for CPU.

Each has the memory of the twelve points: padded batches have as many rows as the pool holds whole contexts, the others
a pool of as many slots. Times are those of tokens where an engine tells them; a padded call tells none before its end.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from generate import GREEDY, VLLM, Workload
from transformers import ContinuousBatchingConfig, GenerationConfig
from workload import Request

from paper.serving import CONTEXT, SETTINGS, SLOTS, Measured, prompts, static_batch
from paper.simulator import Outcome

PAGE, VLLM_PAGE = 16, 32  # tokens a page of generate_batch, and of vLLM, whose smallest this is on CPU


def generate(model: Any, requests: list[Request]) -> Measured:
    """Stock `generate()` of padded batches: whatever waits when the one before is done."""
    given = prompts(requests, SETTINGS, model.config.vocab_size)
    waiting: deque[int] = deque()
    measured, arrived, started = Measured([]), 0, time.monotonic()
    while len(measured.outcomes) < len(requests):
        now = time.monotonic() - started
        while arrived < len(requests) and requests[arrived].arrival <= now:
            waiting.append(arrived)
            arrived += 1
        if not waiting:
            time.sleep(max(0.0, requests[arrived].arrival - now))
            continue
        batch, width, longest = static_batch(requests, waiting)
        ids = torch.tensor([[3] * (width - len(given[index])) + given[index] for index in batch])
        mask = torch.tensor([[0] * (width - len(given[index])) + [1] * len(given[index]) for index in batch])
        model.generate(
            ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=longest, min_new_tokens=longest
        )
        end = time.monotonic() - started
        measured.outcomes += [_outcome(requests[index], [end]) for index in batch]
    return measured


def generate_batch(model: Any, requests: list[Request]) -> Measured:
    """transformers' continuous batching."""
    given = prompts(requests, SETTINGS, model.config.vocab_size)
    config = GenerationConfig(do_sample=False, max_new_tokens=CONTEXT, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=SLOTS // PAGE, max_batch_tokens=1024, allow_block_sharing=False
    )
    measured = Measured([])
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings
    ) as manager:
        manager.add_request(given[0], request_id="first", max_new_tokens=2)  # what is only made once
        while manager.get_result(timeout=1) is None:
            pass
        submitted, started = 0, time.perf_counter()
        while len(measured.outcomes) < len(requests):
            now = time.perf_counter() - started
            while submitted < len(requests) and requests[submitted].arrival <= now:
                count = requests[submitted].num_output
                manager.add_request(
                    given[submitted], request_id=str(submitted), max_new_tokens=count, record_timestamps=True
                )
                submitted += 1
            until = requests[submitted].arrival - now if submitted < len(requests) else 1.0
            output = manager.get_result(timeout=max(0.001, until))
            if output is not None and output.is_finished():
                # A request that was begun anew for lack of room has lost the times of its tokens before that.
                times = [at - started for at in output.timestamps]
                request = requests[int(output.request_id)]
                _add(measured, request, [times[0]] * (request.num_output - len(times)) + times)
            elif output is None and not manager.is_running():
                raise RuntimeError(f"generate_batch stopped after {len(measured.outcomes)} of {len(requests)} requests")
    return measured


def vllm(model: Any, requests: list[Request], venv: Path) -> Measured:
    """vLLM for CPU, in an environment of its own."""
    given = prompts(requests, SETTINGS, model.config.vocab_size)
    workload = Workload("arrivals", lambda: model, [], GREEDY, (1,), SETTINGS.max_num_seqs)
    engine = VLLM(
        workload, venv, "float32", 1, False, max_model_len=CONTEXT, num_blocks=SLOTS // VLLM_PAGE, block_size=VLLM_PAGE
    )
    try:
        engine.ask({"arrivals": [0.0], "requests": [(given[0], 2)], "options": dict(GREEDY)})
        order = {
            "arrivals": [request.arrival for request in requests],
            "requests": [(prompt, request.num_output) for prompt, request in zip(given, requests)],
            "options": dict(GREEDY),
        }
        times = engine.ask(order)["times"]
    finally:
        engine.close()
    measured = Measured([])
    for request, row in zip(requests, times):
        _add(measured, request, row)
    return measured


def _add(measured: Measured, request: Request, times: list[float]) -> None:
    assert len(times) == request.num_output, (len(times), request)
    measured.outcomes.append(_outcome(request, times))
    measured.gaps += [after - before for before, after in pairwise(times)]


def _outcome(request: Request, times: list[float]) -> Outcome:
    return Outcome(request.arrival, times[0], times[-1], request.num_output, request.num_prompt)
