"""The comparison of `hf-paged run`: the same batches of prompts through a patched model and a stock one."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_paged.engine.kv_pool import KVPool
from hf_paged.tools.report import RunReport, generated_lengths, paged_kv_usage, stock_kv_usage

PROMPT_KEYS = ("prompt", "question", "turns", "text")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file.

    Args:
        path: A text file with one prompt a line (empty lines do not count), or a `.jsonl` file with one object a line
            that has a string under `prompt`, `question` or `text`, or a list whose first item is one under `turns`.

    Raises:
        ValueError: The file cannot be read, there is no prompt in it, or a line is not what it should be.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold other ends of lines
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a UTF-8 text file") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path} has no prompts in it")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_json_prompt(line, f"{path}, line {number}") for number, line in numbered]


def _json_prompt(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f'{where}: expected an object such as {{"prompt": "..."}}, got {line[:60]}')
    key = next((key for key in PROMPT_KEYS if key in record), None)
    if key is None:
        raise ValueError(f"{where}: none of the keys {', '.join(PROMPT_KEYS)}; it has {', '.join(record) or 'none'}")
    prompt = record[key]
    if key == "turns" and isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{where}: {key!r} holds no text, but {json.dumps(record[key])[:60]}")
    return prompt


@dataclass(frozen=True)
class Batch:
    """The prompts of one `generate()` call."""

    input_ids: torch.Tensor  # [rows, longest prompt], padded on the left
    attention_mask: torch.Tensor

    @property
    def prompt_ids(self) -> list[list[int]]:
        """The tokens of each prompt, without padding."""
        return [ids[mask.bool()].tolist() for ids, mask in zip(self.input_ids, self.attention_mask, strict=True)]


@dataclass(frozen=True)
class Work:
    """The work that both sides are given."""

    tokenizer: Any
    batches: Sequence[Batch]
    max_new_tokens: int
    sample: bool
    seed: int
    eos_token_ids: Collection[int]

    def run_paged(self, model: Any, stream: bool = False) -> RunReport:
        """Everything through a patched model.

        Raises:
            ValueError: A prompt and its new tokens could never fit its pool.
        """
        report = RunReport("hf_paged")
        self._check_fits(model.paged.core.pool)
        self._warm_up(model)
        model.paged.reset_prefix_cache()  # the first batch starts cold
        self._run(model, report, stream=stream)
        stats = model.paged.stats()
        report.peak_kv = paged_kv_usage(model.paged)
        report.peak_blocks, report.num_blocks = stats.peak_blocks_in_use, stats.num_blocks
        return report

    def run_stock(self, model: Any) -> RunReport:
        """Everything through an unpatched model, whose caches are measured."""
        report = RunReport("stock")
        self._warm_up(model)
        self._run(model, report, measure_cache=True)
        return report

    def _check_fits(self, pool: KVPool) -> None:
        """In the options' names, and before a warm-up that takes less."""
        longest = max(len(ids) for batch in self.batches for ids in batch.prompt_ids)
        needed = pool.blocks_for(longest + self.max_new_tokens - 1)  # the last token's keys are never needed
        if needed > pool.num_blocks:
            raise ValueError(
                f"a prompt of {longest} tokens and up to {self.max_new_tokens} new ones needs {needed} KV blocks, the "
                f"pool has {pool.num_blocks}: give --num-blocks {needed} or more, or a lower --max-new-tokens"
            )

    def _warm_up(self, model: Any) -> None:
        """Threads, kernels, lazy allocations: what only the first call pays."""
        self._generate(model, self.batches[0], 0, max_new_tokens=min(2, self.max_new_tokens))

    def _run(self, model: Any, report: RunReport, stream: bool = False, measure_cache: bool = False) -> None:
        num_prompts = sum(len(batch.input_ids) for batch in self.batches)
        total = num_prompts * self.max_new_tokens
        # disable=None: no bar where there is no terminal
        with tqdm(total=total, desc=report.name, unit="tok", leave=False, disable=True if stream else None) as bar:
            for index, batch in enumerate(self.batches):
                streamer = _FirstRowStreamer(self.tokenizer) if stream else _ProgressStreamer(bar, self.eos_token_ids)
                start = time.perf_counter()
                output = self._generate(model, batch, index, streamer=streamer, return_dict_in_generate=measure_cache)
                if batch.input_ids.is_cuda:
                    torch.cuda.synchronize(batch.input_ids.device)
                report.seconds += time.perf_counter() - start

                sequences = output.sequences if measure_cache else output
                new_tokens = sequences[:, batch.input_ids.shape[1] :].cpu()
                lengths = generated_lengths(new_tokens, self.eos_token_ids)
                report.token_ids += [row[:length].tolist() for row, length in zip(new_tokens, lengths, strict=True)]
                if measure_cache:
                    cache = output.get("past_key_values", None) or output["cache_params"]  # of pure Mamba models
                    kv = stock_kv_usage(cache, batch.attention_mask, lengths)
                    report.peak_kv = max(report.peak_kv, kv, key=lambda usage: usage.allocated_bytes)
                total -= len(lengths) * self.max_new_tokens - sum(lengths)  # what ended before the limit
                bar.total = total
                bar.refresh()

    def _generate(self, model: Any, batch: Batch, index: int, **kwargs: Any) -> Any:
        torch.manual_seed(self.seed + index)
        settings: dict[str, Any] = {
            "do_sample": self.sample,
            "num_beams": 1,
            "max_new_tokens": self.max_new_tokens,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        return model.generate(batch.input_ids, attention_mask=batch.attention_mask, **(settings | kwargs))


class _ProgressStreamer(BaseStreamer):
    """Moves a progress bar by the tokens of the rows that are not finished."""

    def __init__(self, bar: tqdm[NoReturn], eos_token_ids: Collection[int]) -> None:
        self.bar = bar
        self.eos_token_ids = torch.tensor(sorted(eos_token_ids))
        self.running: torch.Tensor | None = None  # [rows], from the prompt on

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompts `[rows, length]` first, then the next token of each row, `[rows]`."""
        if self.running is None:
            self.running = torch.ones(len(value), dtype=torch.bool)
            return
        self.bar.update(int(self.running.sum()))
        self.running &= ~torch.isin(value.cpu(), self.eos_token_ids)

    def end(self) -> None: ...


class _FirstRowStreamer(TextStreamer):
    """Prints the first row's text, prompt included, while it is generated."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompts `[rows, length]` first, then the next token of each row, `[rows]`."""
        super().put(value[:1])


def make_batches(
    tokenizer: Any, texts: Sequence[str], batch_size: int, room: int, device: torch.device
) -> tuple[list[Batch], int]:
    """The prompts as batches in their order, and how many of them had to be cut to `room` tokens."""
    num_cut = sum(len(ids) > room for ids in tokenizer(list(texts))["input_ids"])
    batches = []
    for start in range(0, len(texts), batch_size):
        rows = list(texts[start : start + batch_size])
        encoded = tokenizer(rows, return_tensors="pt", padding=True, truncation=True, max_length=room).to(device)
        batches.append(Batch(encoded["input_ids"], encoded["attention_mask"]))
    return batches, num_cut


def prompt_room(model: Any, max_new_tokens: int) -> int:
    """Tokens that a prompt may have."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return 1 << 30
    if max_new_tokens >= positions:
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt: the model has {positions} positions"
        )
    return positions - max_new_tokens


def eos_token_ids(model: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
