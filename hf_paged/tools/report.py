"""What a generation run took: tokens, seconds and KV memory, measured the same way for stock `generate()` and hf_paged.

The command line, the benchmarks and the demo share these functions. Memory is counted in bytes of keys and values:

* **allocated**: what the cache held at its peak. Stock: the tensors of the `DynamicCache` that `generate()` built.
  hf_paged: the blocks that live sequences held; the free rest of the pool is capacity, not use.
* **filled**: the part that holds the K/V of a real token. Padding holds none, nor do the pad tokens that a finished row
  is fed until the last row of its batch is done, nor the empty end of a sequence's last block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.table import Table

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class KVUsage:
    """KV memory at one moment.

    Attributes:
        allocated_bytes: Keys and values that the cache had room for.
        filled_bytes: Of these, the ones that belong to a real token; `None` where states are among them, which belong
            to all tokens together.
    """

    allocated_bytes: int = 0
    filled_bytes: int | None = 0

    @property
    def waste(self) -> float | None:
        """The share of the allocated bytes that holds no real token, 0 for an empty cache; `None`: no such thing."""
        if self.filled_bytes is None:
            return None
        return 1 - self.filled_bytes / self.allocated_bytes if self.allocated_bytes else 0.0


@dataclass
class RunReport:
    """One way to generate for a list of prompts, and what it took.

    Attributes:
        name: What to call it in a table.
        token_ids: The generated ids of each prompt, in the order of the prompts, without padding.
        seconds: Wall-clock time of all `generate()` calls.
        peak_kv: KV memory of the moment when most was allocated.
        peak_blocks: Blocks in use at that moment, `None` for a cache without blocks.
        num_blocks: Blocks in the pool, `None` for a cache without blocks.
    """

    name: str
    token_ids: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    peak_kv: KVUsage = field(default_factory=KVUsage)
    peak_blocks: int | None = None
    num_blocks: int | None = None

    @property
    def num_tokens(self) -> int:
        """Generated tokens, padding not counted."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def generated_lengths(new_tokens: torch.Tensor, eos_token_ids: Collection[int]) -> list[int]:
    """How many tokens of each row are real: all up to the first end-of-sequence token and with it.

    Args:
        new_tokens: `[rows, steps]`, the part of `generate()`'s output behind the prompt.
        eos_token_ids: The ids that end a sequence; the tokens behind the first one are padding.
    """
    steps = new_tokens.shape[1]
    if not eos_token_ids or not steps:
        return [steps] * new_tokens.shape[0]
    is_eos = torch.isin(new_tokens, torch.tensor(sorted(eos_token_ids), device=new_tokens.device))
    lengths = torch.where(is_eos.any(dim=1), is_eos.int().argmax(dim=1) + 1, steps)
    return [int(length) for length in lengths]


def stock_kv_usage(cache: Any, attention_mask: torch.Tensor, lengths: Sequence[int]) -> KVUsage:
    """The KV memory of a `DynamicCache` at the end of the `generate()` call that built it.

    A layer may hold fewer slots than the sequence has tokens (a sliding window keeps the last ones); what is measured
    is what the layer's tensors hold.

    Args:
        cache: The call's `past_key_values` (`return_dict_in_generate=True`).
        attention_mask: `[rows, prompt]`, the prompts' mask.
        lengths: Real generated tokens of each row, as `generated_lengths` counts them.
    """
    states = sum(state.nbytes for layer in cache.layers for state in _states(layer))
    if states:
        return KVUsage(states + sum(keys.nbytes + values.nbytes for keys, values in _cache_tensors(cache)), None)
    is_real = _real_slots(attention_mask, lengths, int(cache.get_seq_length()))
    allocated = filled = 0.0
    for keys, values in _cache_tensors(cache):
        layer_bytes = keys.nbytes + values.nbytes
        allocated += layer_bytes
        filled += layer_bytes * is_real[:, -keys.shape[-2] :].float().mean().item()
    return KVUsage(round(allocated), round(filled))


def paged_kv_usage(engine: Any) -> KVUsage:
    """The KV memory of a patched model's engine (`model.paged`) at the moment when most blocks were in use."""
    stats = engine.stats()
    allocated = stats.peak_blocks_in_use * engine.bytes_per_block
    if engine.core.traits.states:
        return KVUsage(allocated, None)
    slots = stats.peak_kv_slots_allocated
    return KVUsage(allocated, round(allocated * stats.peak_kv_tokens_stored / slots) if slots else 0)


def first_divergence(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Prompt index and position of the first generated token that differs; `None` if none does."""
    if len(ours) != len(theirs):
        raise ValueError(f"cannot compare the texts of {len(ours)} prompts with those of {len(theirs)}")
    for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        for position, (a, b) in enumerate(zip(left, right, strict=False)):
            if a != b:
                return index, position
        if len(left) != len(right):
            return index, min(len(left), len(right))
    return None


def comparison_table(stock: RunReport, paged: RunReport, caption: str | None = None) -> Table:
    """The small table that ends `hf-paged run`."""
    divergence = first_divergence(paged.token_ids, stock.token_ids)
    if divergence is None:
        identical = "yes"
    else:
        identical = f"no: prompt {divergence[0]}, token {divergence[1]}"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", caption_style="dim")
    table.add_column("")
    table.add_column(stock.name, justify="right")
    table.add_column(paged.name, justify="right", style="bold")
    table.add_row("tokens identical", "", identical, style="green" if divergence is None else "red")
    table.add_row("tokens generated", f"{stock.num_tokens:,}", f"{paged.num_tokens:,}")
    table.add_row("seconds", f"{stock.seconds:.2f}", f"{paged.seconds:.2f}")
    table.add_row("tokens / second", f"{stock.tokens_per_second:,.0f}", f"{paged.tokens_per_second:,.0f}")
    table.add_row("peak KV memory", *(format_bytes(run.peak_kv.allocated_bytes) for run in (stock, paged)))
    table.add_row("of it wasted", *(_share(run.peak_kv.waste) for run in (stock, paged)))
    table.add_row("blocks used / total", *(_blocks(run) for run in (stock, paged)))
    return table


def format_bytes(count: float) -> str:
    """`1536` as `1.5 KiB`."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {UNITS[unit]}"


def _blocks(run: RunReport) -> str:
    return "–" if run.num_blocks is None else f"{run.peak_blocks:,} / {run.num_blocks:,}"


def _cache_tensors(cache: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer that has stored some."""
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.numel():
            yield keys, values


def _states(layer: Any) -> Iterator[torch.Tensor]:
    """The states of a recurrent layer."""
    for name in ("conv_states", "recurrent_states"):
        found = getattr(layer, name, None)
        each = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else [found]
        yield from (state for state in each if isinstance(state, torch.Tensor))


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _real_slots(attention_mask: torch.Tensor, lengths: Sequence[int], slots: int) -> torch.Tensor:
    """`[rows, slots]`, True where the slot holds a real token of the prompt or of the generated text."""
    prompt = attention_mask.bool().cpu()
    steps = torch.arange(slots - prompt.shape[1])  # the last token generated has no K/V yet, so this is one step short
    return torch.cat([prompt, steps[None, :] < torch.tensor(lengths)[:, None]], dim=1)
