"""A tiny model of an architecture, and what it computes: over a stock cache, and over the pool."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from hf_paged.api.given_call import forward_call
from hf_paged.api.patched_class import attach, detach
from hf_paged.api.shrinking import SPECIAL
from hf_paged.api.stored_layers import on_meta
from hf_paged.attention.cache import PagedCache
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.core.config import PagedConfig
from hf_paged.memory.state_cache import StateLayout
from hf_paged.model.cache_argument import cache_argument
from hf_paged.model.sources import StandIn, source_width
from hf_paged.model.traits import ModelTraits

LENGTHS = (11, 3, 1, 6)
LONGEST = max(LENGTHS)
# Of a decoder's rows that are padded: of one forward, in an order that shows whose padding is taken for others'; and of
# such that are not, enough to show that they get in each other's way.
FALLING, EQUAL = (6, 5, 4, 3), (5,) * 8
_EDGES = (0, LONGEST, LONGEST + 2, LONGEST + 3, LONGEST + 4)  # a prefill, a chunk of two tokens, two decode steps
_BLOCK_SIZE = 2
_TOLERANCE = 1e-3  # of the largest logit; float32 rounding is 1e-6, a wrongly placed key is 1e-1
DIFFERENCE = "logits differ"
_MAX_ELEMENTS = 5 * 10**8  # of a shrunken copy


def build(base: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A float32 CPU model whose weights are large enough for a wrong key to show. Seeds the CPU's global RNG.

    Raises:
        ValueError: It would take gigabytes.
    """
    num_elements = sum(parameter.numel() for parameter in on_meta(base, config).parameters())
    if num_elements > _MAX_ELEMENTS:
        raise ValueError(f"it would have {num_elements:,} parameters")
    with torch.device("cpu"), torch.inference_mode(False):
        torch.default_generator.manual_seed(0)  # no other device's
        model = base._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                if parameter.ndim > 1:
                    parameter.copy_(noise * 2 / math.sqrt(parameter.shape[-1]))
                else:
                    parameter.add_(0.1 * noise)
    return model.eval()


@torch.no_grad()
def logits(
    model: PreTrainedModel,
    past: Cache,
    edges: Sequence[int] = _EDGES,
    row: int | None = None,
    lengths: Sequence[int] = (),
) -> Tensor:
    """Last logits of forwards over these columns of a ragged left-padded batch: `[rows, forwards, vocab]`.

    Args:
        edges: Where forwards begin and end.
        row: One row alone, without its padding; `None`: all.
        lengths: Of an encoder-decoder's rows over a `PagedCache`, which are then padded, as all others' are.
    """
    parameters = inspect.signature(model.forward).parameters
    argument = cache_argument(type(model).forward)
    if model.config.is_encoder_decoder:
        return _decoder_logits(model, past, edges, slice(None) if row is None else slice(row, row + 1), lengths)
    with torch.device("cpu"):
        shape, generator = (len(LENGTHS), max(LONGEST + 4, edges[-1])), torch.Generator().manual_seed(1)
        ids = torch.randint(0, _num_plain(model), shape, generator=generator)
        mask = torch.ones_like(ids)
        for index, length in enumerate(LENGTHS):
            mask[index, : LONGEST - length] = 0
        if row is not None and getattr(past, "places_by_column", False):  # padding is part of the row
            ids, mask, edges = ids[row : row + 1], mask[row : row + 1], (0, *edges[1:])
        elif row is not None:
            padding = LONGEST - LENGTHS[row]
            ids, mask = (each[row : row + 1, padding:] for each in (ids, mask))
            edges = [max(0, edge - padding) for edge in edges]
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        collected = []
        for start, end in itertools.pairwise(edges):
            extra: dict[str, Any] = {argument: past}
            if "position_ids" in parameters:
                extra["position_ids"] = positions[:, start:end]
            if argument == "past_key_values" or start == 0:  # a state doesn't look back to the padding
                extra["attention_mask"] = mask[:, :end]
            if model._supports_logits_to_keep():
                extra["logits_to_keep"] = 1
            output = model(input_ids=ids[:, start:end], use_cache=True, **extra)
            collected.append(output.logits[:, -1:].float())
        return torch.cat(collected, dim=1)


def _decoder_inputs(model: PreTrainedModel, num_rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids `[rows, width]`, what encoders have made `[rows, LONGEST, hidden_size]`, and which of it is shown."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, _num_plain(model), (num_rows, width), generator=generator)
    states = torch.randn(num_rows, LONGEST, source_width(model), generator=generator)
    shown = torch.arange(LONGEST) < torch.tensor(LENGTHS).repeat(2)[:num_rows, None]
    return ids, states.to(model.dtype), shown.long()


def _decoder_logits(
    model: PreTrainedModel, past: Cache, edges: Sequence[int], rows: slice, lengths: Sequence[int]
) -> Tensor:
    """The same of an encoder-decoder, whose encoders have read texts of several lengths."""
    edges = (0, *edges[1:])
    with torch.device("cpu"):
        inputs = _decoder_inputs(model, len(lengths or LENGTHS), max(LONGEST + 4, edges[-1]))
        ids, states, mask = (each[rows] for each in inputs)
        own = (torch.arange(ids.shape[1]) >= LONGEST - torch.tensor(lengths)[:, None]).long()
        collected = []
        for start, end in itertools.pairwise(edges):
            given = {
                "decoder_input_ids": ids[:, start:end],
                "encoder_outputs": StandIn(last_hidden_state=states),
                "attention_mask": mask,
                "past_key_values": past,
                "use_cache": True,
            }
            if lengths:
                call = forward_call(model, past, given | {"decoder_attention_mask": own[:, :end]})  # type: ignore[arg-type]
                call.logits_to_keep = 1  # of real tokens, which most decoders can't be told
                output = model.paged.forwards.forward(past, call)  # type: ignore[union-attr,operator]
            else:
                output = model(**given)
            collected.append(output.logits[:, -1:].float())
        return torch.cat(collected, dim=1)


@torch.no_grad()
def decoded_one_by_one(model: PreTrainedModel, lengths: Sequence[int]) -> Tensor:
    """What `logits` of rows of these lengths are to be: stock's of each row alone, token by token."""
    rows: list[Tensor] = []
    with torch.device("cpu"):
        ids, states, mask = _decoder_inputs(model, len(lengths), LONGEST + 4)
        for row, length in enumerate(lengths):
            past, outputs = EncoderDecoderCache(DynamicCache(), DynamicCache()), []
            for column in range(LONGEST - length, LONGEST + 4):
                output = model(
                    decoder_input_ids=ids[row : row + 1, column : column + 1],
                    encoder_outputs=StandIn(last_hidden_state=states[row : row + 1]),
                    attention_mask=mask[row : row + 1],
                    past_key_values=past,
                    use_cache=True,
                )
                outputs.append(output.logits[:, -1].float())
            rows.append(torch.stack([outputs[end - _EDGES[-1] - 1] for end in _EDGES[1:]], dim=1))
    return torch.cat(rows)


def differ(one: Tensor, other: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Whether logits differ by more than this share of the largest of `other`."""
    return bool((one - other).abs().max() > tolerance * other.abs().max())


def difference(tiny: PreTrainedModel, traits: ModelTraits, expected: Tensor, lengths: Sequence[int] = ()) -> str:
    """Says how the tiny model's logits over the pool differ from those expected; empty if they don't.

    Args:
        lengths: See `logits`.
    """
    try:
        backend = "torch" if traits.has_latents else "auto"  # kernels may have to be compiled, for other widths
        num_blocks = 128 + 4 * len(LENGTHS) * _state_pages(traits)
        config = PagedConfig(
            num_blocks=num_blocks, block_size=_BLOCK_SIZE, cuda_graphs=False, attention_backend=backend
        )
        attach(tiny, config, traits)
        cache = PagedCache(tiny)
        found = logits(tiny, cache, lengths=lengths)
        error_size = float((found - expected).abs().max() / expected.abs().max())
        if error_size < _TOLERANCE and not keeps_inference_tensors(tiny):
            return ""
        return f"{DIFFERENCE} by {error_size:.1%}"
    except Exception as error:
        return error_text(error)
    finally:
        detach(tiny)


def _state_pages(traits: ModelTraits) -> int:
    """Blocks of a float32 pool that the states of a sequence take, at most."""
    geometry = traits.geometry(CacheGroups.of(traits.stored), torch.float32, _BLOCK_SIZE)
    return StateLayout.of(traits.states, geometry.bytes_per_block(_BLOCK_SIZE), torch.float32).num_pages


def error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def keeps_inference_tensors(model: PreTrainedModel) -> bool:
    """Whether a module keeps something that a forward in inference mode made, in whatever it holds."""
    seen: set[int] = set()

    def finds(value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.is_inference()
        is_ours = type(value).__module__.startswith("hf_paged.")
        if is_ours or id(value) in seen or isinstance(value, str | int | float | type | PreTrainedConfig):
            return False
        seen.add(id(value))
        if isinstance(value, dict):
            return any(map(finds, list(value.values())))
        if isinstance(value, list | tuple | set):
            return any(map(finds, list(value)))
        return finds(vars(value)) if hasattr(value, "__dict__") and not callable(value) else False

    return any(finds(vars(module)) for module in model.modules())


@torch.no_grad()
def sees_ahead(model: PreTrainedModel) -> bool:
    """Whether what the model computes of a token depends on what comes behind it (BERT's, if not made a decoder)."""
    with torch.device("cpu"):
        high = _num_plain(model)
        ids = torch.randint(0, high, (1, 6), generator=torch.Generator().manual_seed(2))
        other = ids.clone()
        other[0, -1] = (ids[0, -1] + 1) % high
        before, after = (
            model(input_ids=each, attention_mask=torch.ones_like(each)).logits[0, :-1].float() for each in (ids, other)
        )
    return differ(after, before)


def sees_padding(model: PreTrainedModel) -> bool:
    """Whether what stock computes of a row depends on the columns of padding before it."""
    edges = [0, LONGEST, LONGEST + 1]
    together, alone = (logits(model, DynamicCache(config=model.config), edges, row) for row in (None, 1))
    return bool((alone[0] - together[1]).abs().max() > _TOLERANCE * together.abs().max())


def _num_plain(model: PreTrainedModel) -> int:
    """The number of ids below the special ones."""
    return min(SPECIAL, model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type,type-var]
