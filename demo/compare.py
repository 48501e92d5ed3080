"""Contiguous and paged: the very same requests as three memory maps, with what each leaves empty."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_paged.tools.report import KVUsage, format_bytes, stock_kv_usage

from .limits import RefusedError
from .loading import LoadedModel
from .run_record import Row, RunRecord

MOST_STOCK_TOKENS = 200_000  # rows times width of a stock batch that a visitor is made to wait for


@dataclass(frozen=True)
class MemoryMap:
    """KV memory of all requests, laid out in one way.

    Attributes:
        name: The way.
        note: How the numbers came about.
        bytes_per_token: Keys and values of a token in all layers.
        rows: A row each sequence.
    """

    name: str
    note: str
    bytes_per_token: int
    rows: list[Row]

    @property
    def reserved(self) -> int:
        """Tokens that there is room for."""
        return sum(row.reserved for row in self.rows)

    @property
    def used(self) -> int:
        """Tokens that are there."""
        return sum(row.used for row in self.rows)

    @property
    def waste(self) -> float:
        """The share of the room that holds no token."""
        return 1 - self.used / self.reserved if self.reserved else 0.0

    def as_json(self) -> dict[str, Any]:
        """For the view, and for API clients."""
        return {
            "name": self.name,
            "note": self.note,
            "bytes_per_token": self.bytes_per_token,
            "rows": [asdict(row) for row in self.rows],
            "waste": self.waste,
        }


def memory_maps(loaded: LoadedModel, record: RunRecord) -> list[MemoryMap]:
    """Three maps of a finished run. Runs stock `generate()` on its prompts, which takes a moment.

    Raises:
        RefusedError: The run is too large for that, or holds nothing, or its model keeps states.
    """
    if not record.held or not record.sequences:
        raise RefusedError("There is no finished run to map: run some requests first.")
    return [reserved_map(record), stock_map(loaded, record), paged_map(record)]


def reserved_map(record: RunRecord) -> MemoryMap:
    """Each row gets room for its prompt and all that it may generate, before it starts."""
    rows = [
        Row(label, len(prompt) + record.max_new_tokens, len(prompt) + len(tokens) - 1)
        for label, prompt, tokens in _flat(record)
    ]
    note = (
        f"What a server without paging sets aside before the first token: prompt + {record.max_new_tokens} new tokens "
        "for every row, each sample or beam with its prompt. Used: the tokens that were there in the end."
    )
    return MemoryMap("Reserved for the longest reply", note, record.bytes_per_token, rows)


def stock_map(loaded: LoadedModel, record: RunRecord) -> MemoryMap:
    """What stock transformers holds at the end of one padded batch of them: measured on its own cache."""
    usage, rows = _run_stock(loaded, record)
    if usage.waste is None:
        raise RefusedError("The maps count keys and values token by token; this model keeps states, which have none.")
    note = (
        f"Stock generate() was run just now on the same prompts as one left-padded batch and made to choose the same "
        f"tokens; its DynamicCache held {format_bytes(usage.allocated_bytes)}, {usage.waste:.1%} of it padding and "
        "rows that wait for the longest."
    )
    copies = sum(
        (len(sequences) - 1) * len(prompt) for prompt, sequences in zip(record.prompts, record.sequences, strict=True)
    )
    if copies > 0:
        note += (
            f" Every sample or beam stores the prompt anew: {format_bytes(copies * record.bytes_per_token)} are copies."
        )
    return MemoryMap("Stock transformers", note, record.bytes_per_token, rows)


def paged_map(record: RunRecord) -> MemoryMap:
    """The blocks they held in the snapshot in which they held most."""
    blocks = sum(row.reserved for row in record.held) // record.block_size
    note = (
        f"The blocks of {record.block_size} tokens that these requests held at their fullest: {blocks} of a pool of "
        f"{record.num_blocks}, the largest of {record.num_snapshots} snapshots taken while they ran. A shared block "
        "counts once; a request that waits, is swapped out or has ended holds none."
    )
    return MemoryMap("Paged", note, record.bytes_per_token, record.held)


def _flat(record: RunRecord) -> list[tuple[str, list[int], list[int]]]:
    """Label, prompt and generated tokens of each sequence."""
    rows = []
    for label, prompt, sequences in zip(record.labels, record.prompts, record.sequences, strict=True):
        for number, tokens in enumerate(sequences, start=1):
            rows.append((f"{label} · {number}" if len(sequences) > 1 else label, prompt, tokens))
    return [row for row in rows if row[2]]


def _run_stock(loaded: LoadedModel, record: RunRecord) -> tuple[KVUsage, list[Row]]:
    rows = _flat(record)
    width = max(len(prompt) for _, prompt, _ in rows)
    steps = max(len(tokens) for _, _, tokens in rows)
    if len(rows) * (width + steps) > MOST_STOCK_TOKENS:
        raise RefusedError(
            f"As one padded batch this run is {len(rows)} rows of {width + steps:,} tokens; stock transformers would "
            "need too long for it here. Run fewer requests, or shorter ones."
        )
    device = next(loaded.twin.parameters()).device
    ids = torch.full((len(rows), width), loaded.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (_, prompt, _) in enumerate(rows):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    replies = [tokens for _, _, tokens in rows]
    with torch.no_grad():
        output = loaded.twin.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=steps,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            num_beams=1,
            pad_token_id=loaded.pad_token_id,
            return_dict_in_generate=True,
            logits_processor=LogitsProcessorList([_Replay(replies, width, loaded.pad_token_id)]),
            stopping_criteria=StoppingCriteriaList([_ReplyEnd(replies, width)]),
        )
    cache = output.past_key_values
    num_steps = int(cache.get_seq_length()) - width  # the last token chosen has no keys and values
    usage = stock_kv_usage(cache, mask, [len(tokens) for tokens in replies])
    # What its tensors hold: layers with a sliding window keep no more than that.
    room = round(usage.allocated_bytes / record.bytes_per_token / len(rows))
    return usage, [
        Row(label, room, min(room, len(prompt) + min(len(tokens), num_steps))) for label, prompt, tokens in rows
    ]


class _Replay(LogitsProcessor):
    """Has each row choose the tokens of a reply that is known."""

    def __init__(self, replies: list[list[int]], width: int, pad_token_id: int) -> None:
        self._replies = replies
        self._width = width
        self._pad_token_id = pad_token_id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self._width
        tokens = [tokens[step] if step < len(tokens) else self._pad_token_id for tokens in self._replies]
        forced = torch.full_like(scores, -torch.inf)
        forced[torch.arange(len(tokens)), tokens] = 0.0
        return forced


class _ReplyEnd(StoppingCriteria):
    """Ends each row where its reply ended."""

    def __init__(self, replies: list[list[int]], width: int) -> None:
        self._lengths = torch.tensor([len(tokens) for tokens in replies])
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (self._lengths <= input_ids.shape[1] - self._width).to(input_ids.device)
