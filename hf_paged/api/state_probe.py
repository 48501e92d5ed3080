"""How a model whose layers keep states is run over the pool, found out by trying a tiny one of its architecture."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_paged.api.patched_class import attach, detach
from hf_paged.api.shrinking import SPECIAL
from hf_paged.api.stored_layers import Layers, noted_on_meta, on_meta, specs, with_latents
from hf_paged.api.stored_states import StateNotes, StateNotingCache
from hf_paged.attention.cache import PagedCache
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.core.config import PagedConfig
from hf_paged.memory.state_cache import StateLayout
from hf_paged.model.cache_argument import cache_argument
from hf_paged.model.traits import ModelTraits

_TOLERANCE = 1e-3  # of the largest logit
_AS_LATENTS = "; as latents: "
_ROUNDING = 1e-4  # the same, for what is to agree but for the order of sums
_LENGTHS = (11, 3, 1, 6)


def keeps_states(config: PreTrainedConfig) -> bool:
    """Whether a stock cache of a model with this config has layers that keep states."""
    return any(hasattr(layer, "recurrent_states") for layer in DynamicCache(config=config).layers)


def state_traits(
    base: type[PreTrainedModel],
    config: PreTrainedConfig,
    build: Callable[[PreTrainedConfig], PreTrainedModel],
    shrunken: Sequence[Callable[[], PreTrainedConfig]],
) -> ModelTraits | str:
    """How such a model runs, or why it can't.

    Args:
        base: Its class, unpatched.
        config: Its config; not changed.
        build: Makes a tiny model.
        shrunken: Make the config of one, in the order in which they are to be tried.
    """
    try:
        found = _stored(base, config)
    except Exception as error:
        return f"what its layers store could not be found out ({type(error).__name__}: {error!s:.200})"
    if isinstance(found, str):
        return found
    failure = ""
    for make in shrunken:
        try:
            small = make()
            tiny = build(small)
            expected, carries, forms_differ = _expected(tiny)
            tiny_found = _stored(base, small)
            break
        except Exception as error:
            failure = failure or f"{type(error).__name__}: {error}"
    else:
        return f"a shrunken copy of it could not be built and run to try ({failure:.200})"
    if isinstance(tiny_found, str):
        return tiny_found
    (stored, notes), (tiny_stored, tiny_notes) = found, tiny_found
    traits = ModelTraits(
        tiny_stored.layers,
        runs_packed=True,
        rows_independent=True,
        states=tiny_notes.specs(torch.bfloat16),
        mixers=tuple(sorted(tiny_notes.mixers, key=lambda kind: kind.__name__)),
        carries_state=carries,
        forms_differ=forms_differ,
        shares_attention=tiny_stored.is_shared,
        indexers=tiny_stored.indexers,
    )
    why_padded, tiny_latent = "", with_latents(tiny_stored.layers)
    layouts = [(True, False), *([(True, True)] if tiny_latent != tiny_stored.layers else []), (False, False)]
    for (packed, latent), may_infer in itertools.product(layouts, (True, False)):
        if not packed and may_infer and _sees_padding(tiny):
            return f"a row depends on the padding beside it, and it doesn't run without ({failure:.200})"
        way: dict[str, Any] = {"runs_packed": packed, "runs_padded": not packed, "allows_inference_mode": may_infer}
        own = tiny_latent if latent else tiny_stored.layers
        failure = _difference(tiny, replace(traits, **way, layers=own), expected)
        if not failure:
            layers = with_latents(stored.layers) if latent else stored.layers
            way |= {"layers": layers, "indexers": stored.indexers, "states": notes.specs(torch.bfloat16)}
            return replace(traits, **way, why_padded="" if packed else why_padded)
        if packed:
            why_padded = with_failure(why_padded, failure, latent)
    return f"its layers don't compute over states in the pool what they do over a cache of their own ({failure:.200})"


def with_failure(before: str, failure: str, is_latent: bool) -> str:
    """Why a model doesn't run packed, after one more trial: what went wrong in the first, and then with latents."""
    if not is_latent:
        return before or failure
    return f"{before.partition(_AS_LATENTS)[0]}{_AS_LATENTS}{failure}"


@dataclass(frozen=True, slots=True)
class Stored:
    """What the layers of a model cache of each token.

    Attributes:
        layers: Of each; `None`: nothing.
        indexers: See `ModelTraits`.
        is_shared: Whether one stores keys under another number than its module's.
    """

    layers: Layers
    indexers: Layers
    is_shared: bool


def _stored(base: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[Stored, StateNotes] | str:
    """What each layer stores, seen in a forward without numbers, or why that can't be in the pool."""
    notes, whole = StateNotes(), on_meta(base, config)
    with notes.of(whole):
        cache = noted_on_meta(whole, lambda own: StateNotingCache(own, notes))
    if not notes.tensors:
        return "its layers keep states elsewhere than in the layers of a cache"
    if not cache.noted:
        return Stored((None,) * len(cache.layers), (), False), notes
    found = specs(cache)
    return found if isinstance(found, str) else (Stored(*found, cache.is_shared), notes)


def _expected(tiny: PreTrainedModel) -> tuple[Tensor, bool, bool]:
    """Last logits of the trial, whether a stock cache carries states into several tokens, and whether forms differ.

    If they are not carried, those logits are not stock's, but of prompts that were computed whole.
    """
    longest = max(_LENGTHS)

    def stock() -> Cache:
        return DynamicCache(config=tiny.config)

    by_chunks = _logits(tiny, stock(), [0, longest, longest + 2, longest + 3, longest + 4])
    whole = _logits(tiny, stock(), [0, longest + 2, longest + 3, longest + 4])
    one_by_one = _logits(tiny, stock(), [0, *range(longest, longest + 5)])[:, 2:]

    def differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
        return float((one - other).abs().max() / other.abs().max()) > tolerance

    if differ(by_chunks[:, 1:], whole, _TOLERANCE):
        return torch.cat([by_chunks[:, :1], whole], dim=1), False, False
    return by_chunks, True, differ(one_by_one, by_chunks[:, 1:], _ROUNDING)


def _sees_padding(tiny: PreTrainedModel) -> bool:
    """Whether what stock computes of a row depends on the columns of padding before it."""
    edges = [0, max(_LENGTHS), max(_LENGTHS) + 1]
    together, alone = (_logits(tiny, DynamicCache(config=tiny.config), edges, row) for row in (None, 1))
    return bool((alone[0] - together[1]).abs().max() > _TOLERANCE * together.abs().max())


def _difference(tiny: PreTrainedModel, traits: ModelTraits, expected: Tensor) -> str:
    """What is wrong with the tiny model's logits over the pool; empty if they are as expected."""
    longest = max(_LENGTHS)
    try:
        num_blocks = 64 + 4 * len(_LENGTHS) * _pages(traits)
        backend = "torch" if traits.has_latents else "auto"  # kernels may have to be compiled, for other widths
        config = PagedConfig(num_blocks=num_blocks, block_size=4, cuda_graphs=False, attention_backend=backend)
        attach(tiny, config, traits)
        found = _logits(tiny, PagedCache(tiny), [0, longest, longest + 2, longest + 3, longest + 4])
        error_size = float((found - expected).abs().max() / expected.abs().max())
        return "" if error_size < _TOLERANCE else f"logits differ by {error_size:.1%}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        detach(tiny)


def _pages(traits: ModelTraits) -> int:
    """Blocks of a float32 pool that a sequence's state takes, at most."""
    page = traits.geometry(CacheGroups.of(traits.stored), torch.float32, 4).bytes_per_block(4)
    return StateLayout.of(traits.states, page, torch.float32).num_pages


@torch.no_grad()
def _logits(model: PreTrainedModel, past: Cache, edges: list[int], row: int | None = None) -> Tensor:
    """Last logits of forwards over these columns of a ragged left-padded batch: `[rows, forwards, vocab]`.

    With `row` of that one alone, without its padding.
    """
    parameters = inspect.signature(model.forward).parameters
    with torch.device("cpu"):
        longest, rows = max(_LENGTHS), len(_LENGTHS)
        num_plain = min(SPECIAL, model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type,type-var]
        ids = torch.randint(0, num_plain, (rows, longest + 4), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        for index, length in enumerate(_LENGTHS):
            mask[index, : longest - length] = 0
        if row is not None:
            padding = longest - _LENGTHS[row]
            ids, mask = (each[row : row + 1, padding:] for each in (ids, mask))
            edges = [max(0, edge - padding) for edge in edges]
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        collected = []
        for start, end in itertools.pairwise(edges):
            extra: dict[str, Any] = {cache_argument(type(model).forward): past}
            if "position_ids" in parameters:
                extra["position_ids"] = positions[:, start:end]
            if "position_ids" in parameters or start == 0:  # else nothing looks back to the padding
                extra["attention_mask"] = mask[:, :end]
            if model._supports_logits_to_keep():
                extra["logits_to_keep"] = 1
            output = model(input_ids=ids[:, start:end], use_cache=True, **extra)
            collected.append(output.logits[:, -1:].float())
        return torch.cat(collected, dim=1)
