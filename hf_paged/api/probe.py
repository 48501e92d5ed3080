"""The trial: does a tiny model of the same architecture compute over the pool what it does over a stock cache?"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from hf_paged.api.patched_class import attach, detach
from hf_paged.api.shrinking import SPECIAL, shrink
from hf_paged.api.state_probe import keeps_states, state_traits, with_failure
from hf_paged.api.stored_layers import (
    Layers,
    NotingCache,
    as_their_modules_say,
    noted_on_meta,
    on_meta,
    specs,
    with_latents,
    with_windows,
)
from hf_paged.attention.cache import PagedCache
from hf_paged.core.config import PagedConfig
from hf_paged.model.traits import ModelTraits
from hf_paged.model.weights_version import is_batch_dependent
from hf_paged.model.wrapper import Wrapper

_TOLERANCE = 1e-3  # of the largest logit; float32 rounding is 1e-6, a wrongly placed key is 1e-1
_LENGTHS = (11, 3, 1, 6)
_MAX_ELEMENTS = 5 * 10**8  # of a shrunken copy


def probe(base: type[PreTrainedModel], config: PreTrainedConfig) -> ModelTraits | str:
    """How a model of this class and config can be run over the pool, or why not.

    Args:
        base: The model's class, unpatched.
        config: Its own; not changed.
    """
    if keeps_states(config):
        beginnings = (False, True)
        shrunken = [partial(shrink, config, heads, start) for heads in (2, 4, None) for start in beginnings]
        return state_traits(base, config, partial(_build, base), shrunken)
    tried = _tiny(base, config)
    if isinstance(tried, str):
        return tried
    tiny, expected, stock = tried
    tiny_stored = specs(stock)
    try:
        whole = on_meta(base, config)
        found = specs(noted_on_meta(whole, NotingCache))
    except Exception as error:  # its forward needs numbers
        found = _as_wide(base, config) or f"what its layers store could not be found out ({_text(error)})"
    if isinstance(found, str) or isinstance(tiny_stored, str):
        return found if isinstance(found, str) else str(tiny_stored)
    layers, indexers = found
    failure, alone = "", None
    text = config.get_text_config(decoder=True)
    # Of a wrapper the calls themselves say what they see.
    is_causal = Wrapper.of(tiny) is not None or not _sees_ahead(tiny)
    why_padded = _why_padded(base, text, indexers) if is_causal else "a token's keys follow from those behind it"
    for traits, has_windows in _ways(text, tiny, *tiny_stored, stock.is_asked, is_causal, not why_padded):
        if traits.tells_positions and alone is None:  # stock tells a padded row's layers its columns
            rows = range(len(_LENGTHS))
            alone = torch.cat([_logits(tiny, NotingCache(tiny.config), row) for row in rows])
        failure = _difference(tiny, traits, expected if alone is None or not traits.tells_positions else alone)
        if not failure:
            if traits.has_latents:
                layers = with_latents(layers)
            layers = _windowed(layers, whole) if has_windows else layers
            why_padded = "" if traits.runs_packed else why_padded
            return replace(traits, layers=layers, indexers=indexers, why_padded=why_padded)
        if traits.runs_packed:
            why_padded = with_failure(why_padded, failure, traits.has_latents)
        if _keeps_inference_tensors(tiny):
            tiny = _build(base, tiny.config)
    return f"its attention doesn't work on keys and values as it stores them in the cache ({failure:.200})"


def _why_padded(base: type[PreTrainedModel], config: PreTrainedConfig, indexers: Layers) -> str:
    """What rules the packed layout out before it is tried; empty if nothing does."""
    if not _rows_independent(config):
        return "its rotary embedding depends on the longest row of a batch"
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return "it takes no position_ids: it places tokens by their column, which a packed batch doesn't have"
    if any(layer is not None for layer in indexers):
        return "which tokens a layer attends to is chosen by an indexer"
    return ""


def _tiny(base: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[PreTrainedModel, Tensor, NotingCache] | str:
    """A tiny model, its logits over a stock cache, and that; or why there is none."""
    failure = ""
    for heads in (2, 4, None):  # CodeGen's come in fours
        try:
            tiny = _build(base, shrink(config, heads))
            stock = NotingCache(tiny.config)
            return tiny, _logits(tiny, stock), stock
        except Exception as error:
            failure = failure or _text(error)
    return f"a shrunken copy of it could not be built and run to try ({failure:.200})"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def _as_wide(base: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[Layers, Layers] | None:
    """What each layer stores, from a copy with few layers of full width; `None` where these don't store alike."""
    try:
        few = _build(base, shrink(config, None))
        cache = NotingCache(few.config)
        _logits(few, cache)
    except Exception:
        return None
    found = specs(cache)
    if isinstance(found, str) or len(set(found[0])) > 1 or found[1]:
        return None
    return found[0][:1] * config.get_text_config(decoder=True).num_hidden_layers, ()


def _ways(
    config: PreTrainedConfig,
    tiny: PreTrainedModel,
    layers: Layers,
    indexers: Layers,
    is_asked: bool,
    is_causal: bool,
    may_pack: bool,
) -> Iterator[tuple[ModelTraits, bool]]:
    """What may be tried, the best first, and whether it is with the windows that the config states."""
    rows_independent = _rows_independent(config)
    # Modules that are run through again store keys under other numbers than theirs.
    numbers = {getattr(module, "layer_idx", None) for module in tiny.modules()}
    shares = any(layer is not None and index not in numbers for index, layer in enumerate(layers))
    own = ModelTraits(
        layers,
        runs_packed=False,
        rows_independent=rows_independent,
        indexers=indexers,
        shares_attention=shares and len(numbers) > 1,
    )
    if not is_causal:  # keys of a token follow from those behind it in its forward: none can be computed again
        yield own, False
        return
    if may_pack:
        # The windows that the config states, unless a layer turns out to attend to more than that.
        windowed = _windowed(layers, tiny)
        for has_windows in (True, False) if windowed != layers else (False,):
            packed = replace(own, layers=windowed if has_windows else layers, runs_packed=True)
            for is_told, may_infer in itertools.product((False, True) if is_asked else (False,), (True, False)):
                yield replace(packed, allows_inference_mode=may_infer, tells_positions=is_told), has_windows
        latent = with_latents(layers)
        for may_infer in (True, False) if latent != layers else ():
            yield replace(own, layers=latent, runs_packed=True, allows_inference_mode=may_infer), False
    if rows_independent:
        for may_infer in (True, False):
            yield replace(own, runs_padded=True, allows_inference_mode=may_infer), False
    else:
        yield replace(own, regime_length=_regime_length(config)), False
    yield own, False


def _windowed(layers: Layers, model: PreTrainedModel) -> Layers:
    return as_their_modules_say(with_windows(layers, model.config.get_text_config(decoder=True)), model)


def _difference(tiny: PreTrainedModel, traits: ModelTraits, expected: Tensor) -> str:
    """What is wrong with the tiny model's logits over the pool; empty if they are as expected."""
    keeps_tokens = traits.is_batched or traits.regime_length is not None
    try:
        backend = "torch" if traits.has_latents else "auto"  # kernels may have to be compiled, for other widths
        config = PagedConfig(num_blocks=128, block_size=2, cuda_graphs=False, attention_backend=backend)
        attach(tiny, config, traits)
        cache = PagedCache(tiny)
        found = _logits(tiny, cache)
        error_size = float((found - expected).abs().max() / expected.abs().max())
        if error_size < _TOLERANCE and cache.is_padded is not keeps_tokens and not _keeps_inference_tensors(tiny):
            return ""
        return f"logits differ by {error_size:.1%}"
    except Exception as error:
        return _text(error)
    finally:
        detach(tiny)


def _keeps_inference_tensors(model: PreTrainedModel) -> bool:
    """Whether a module keeps something that a forward in inference mode made, in whatever it holds."""
    seen: set[int] = set()

    def finds(value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.is_inference()
        if id(value) in seen or isinstance(value, str | int | float | type | PreTrainedConfig):
            return False
        seen.add(id(value))
        if isinstance(value, dict):
            return any(map(finds, list(value.values())))
        if isinstance(value, list | tuple | set):
            return any(map(finds, list(value)))
        return finds(vars(value)) if hasattr(value, "__dict__") and not callable(value) else False

    return any(finds(vars(module)) for module in model.modules())


def _rows_independent(config: PreTrainedConfig) -> bool:
    """Whether a row's rotary embedding does not depend on the rows beside it."""
    return not any(map(is_batch_dependent, _rope_types(getattr(config, "rope_parameters", None))))


def _rope_types(parameters: Any) -> set[str]:
    """All kinds of rotary scaling in a config's `rope_parameters`, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return set()
    own = {parameters["rope_type"]} if isinstance(parameters.get("rope_type"), str) else set()
    return own.union(*(_rope_types(value) for value in parameters.values()))


def _regime_length(config: PreTrainedConfig) -> int:
    """Tokens below which a rotary embedding that depends on the longest row is as of its first day."""

    def lengths(parameters: Any) -> Iterator[int]:
        if isinstance(parameters, dict):
            own = parameters.get("original_max_position_embeddings")
            if isinstance(own, int):
                yield own
            for value in parameters.values():
                yield from lengths(value)

    return min([config.max_position_embeddings, *lengths(config.rope_parameters)])


def _build(base: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
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


def _num_plain(model: PreTrainedModel) -> int:
    """Ids below the special ones."""
    return min(SPECIAL, model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type,type-var]


@torch.no_grad()
def _sees_ahead(model: PreTrainedModel) -> bool:
    """Whether what the model computes of a token depends on what comes behind it (BERT's, if not made a decoder)."""
    with torch.device("cpu"):
        high = _num_plain(model)
        ids = torch.randint(0, high, (1, 6), generator=torch.Generator().manual_seed(2))
        other = ids.clone()
        other[0, -1] = (ids[0, -1] + 1) % high
        before, after = (
            model(input_ids=each, attention_mask=torch.ones_like(each)).logits[0, :-1].float() for each in (ids, other)
        )
    return bool((before - after).abs().max() > _TOLERANCE * before.abs().max())


@torch.no_grad()
def _logits(model: PreTrainedModel, past: Cache, row: int | None = None) -> Tensor:
    """Last logits of a ragged left-padded prefill, a chunk of two tokens and two decode steps: `[rows, 4, vocab]`.

    Args:
        model: Any.
        past: An empty cache.
        row: One row alone, without its padding; `None`: all.
    """
    with torch.device("cpu"):
        longest, rows = max(_LENGTHS), len(_LENGTHS)
        ids = torch.randint(0, _num_plain(model), (rows, longest + 4), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        for index, length in enumerate(_LENGTHS):
            mask[index, : longest - length] = 0
        if row is not None:
            ids, mask = (each[row : row + 1, longest - _LENGTHS[row] :] for each in (ids, mask))
            longest = _LENGTHS[row]
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        edges = [0, longest, longest + 2, longest + 3, longest + 4]
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        collected = []
        for start, end in itertools.pairwise(edges):
            extra: dict[str, Any] = {"position_ids": positions[:, start:end]} if takes_positions else {}
            if model._supports_logits_to_keep():
                extra["logits_to_keep"] = 1
            output = model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                past_key_values=past,
                use_cache=True,
                **extra,
            )
            collected.append(output.logits[:, -1:].float())
        return torch.cat(collected, dim=1)
