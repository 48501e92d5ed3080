"""How a model whose layers keep states is run over the pool, found out by trying a tiny one of its architecture."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_paged.api.patched_class import attach, detach
from hf_paged.api.shrinking import SPECIAL
from hf_paged.api.stored_states import StateNotes, StateNotingCache
from hf_paged.attention.cache import PagedCache
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.core.config import PagedConfig
from hf_paged.memory.spec import AttentionSpec
from hf_paged.memory.state_cache import StateLayout
from hf_paged.model.cache_argument import cache_argument
from hf_paged.model.traits import ModelTraits

_TOLERANCE = 1e-3  # of the largest logit
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
        layers, notes, _ = _stored(base, config)
    except Exception as error:
        return f"what its layers store could not be found out ({type(error).__name__}: {error!s:.200})"
    if isinstance(layers, str):
        return layers
    failure = ""
    for make in shrunken:
        try:
            small = make()
            tiny = build(small)
            expected, carries, forms_differ = _expected(tiny)
            tiny_layers, tiny_notes, shares = _stored(base, small)
            break
        except Exception as error:
            failure = failure or f"{type(error).__name__}: {error}"
    else:
        return f"a shrunken copy of it could not be built and run to try ({failure:.200})"
    if isinstance(tiny_layers, str):
        return tiny_layers
    traits = ModelTraits(
        tiny_layers,
        runs_packed=True,
        rows_independent=True,
        states=tiny_notes.specs(torch.bfloat16),
        mixers=tuple(sorted(tiny_notes.mixers, key=lambda kind: kind.__name__)),
        carries_state=carries,
        forms_differ=forms_differ,
        shares_attention=shares,
    )
    for may_infer in (True, False):
        failure = _difference(tiny, replace(traits, allows_inference_mode=may_infer), expected)
        if not failure:
            states = notes.specs(torch.bfloat16)
            return replace(traits, allows_inference_mode=may_infer, layers=layers, states=states)
    return f"its layers don't compute over states in the pool what they do over a cache of their own ({failure:.200})"


class _NotingCache(StateNotingCache):
    """Also of keys and values."""

    def __init__(self, config: PreTrainedConfig, notes: StateNotes) -> None:
        super().__init__(config, notes)
        self.attention: dict[int, AttentionSpec] = {}
        self.is_shared = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        (_, heads, _, key_dim), value_dim = key_states.shape, value_states.shape[-1]
        self.attention[layer_idx] = AttentionSpec(heads, key_dim, value_dim)
        self.is_shared |= getattr(self._notes.running[-1], "layer_idx", None) != layer_idx
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states


@torch.no_grad()
def _stored(
    base: type[PreTrainedModel], config: PreTrainedConfig
) -> tuple[tuple[AttentionSpec | None, ...] | str, StateNotes, bool]:
    """What each layer stores, seen in a forward without numbers: keys and values, and states.

    And whether one stores keys under another number than its module's.
    """
    notes = StateNotes()
    with torch.device("meta"):
        whole = base._from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()
        cache = _NotingCache(whole.config, notes)
        with notes.of(whole):
            whole(
                input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=True, **{cache_argument(base.forward): cache}
            )
    shapes = set(cache.attention.values())
    if len(shapes) > 1 or any(shape.key_dim != shape.value_dim for shape in shapes):
        return f"its layers don't store keys and values of one shape, but {sorted(map(str, shapes))}", notes, False
    if not notes.tensors:
        return "its layers keep states elsewhere than in the layers of a cache", notes, False
    return tuple(cache.attention.get(layer) for layer in range(len(cache.layers))), notes, cache.is_shared


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


def _difference(tiny: PreTrainedModel, traits: ModelTraits, expected: Tensor) -> str:
    """What is wrong with the tiny model's logits over the pool; empty if they are as expected."""
    longest = max(_LENGTHS)
    try:
        num_blocks = 64 + 4 * len(_LENGTHS) * _pages(traits)
        attach(tiny, PagedConfig(num_blocks=num_blocks, block_size=4, cuda_graphs=False), traits)
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
def _logits(model: PreTrainedModel, past: Cache, edges: list[int]) -> Tensor:
    """Last logits of forwards over these columns of a ragged left-padded batch: `[rows, forwards, vocab]`."""
    parameters = inspect.signature(model.forward).parameters
    with torch.device("cpu"):
        longest, rows = max(_LENGTHS), len(_LENGTHS)
        num_plain = min(SPECIAL, model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type,type-var]
        ids = torch.randint(0, num_plain, (rows, longest + 4), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        for row, length in enumerate(_LENGTHS):
            mask[row, : longest - length] = 0
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
