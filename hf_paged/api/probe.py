"""How a model is run over the pool: found out by trying whether a tiny one of its architecture computes there what it
does over a stock cache.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from hf_paged.api.shrinking import shrink
from hf_paged.api.stored_layers import (
    Layers,
    NotingCache,
    Stored,
    Zeros,
    as_their_modules_say,
    keeps_states,
    listed,
    noted_on_meta,
    noting,
    on_meta,
    with_latents,
    with_windows,
)
from hf_paged.api.tiny_model import (
    DIFFERENCE,
    EQUAL,
    FALLING,
    LENGTHS,
    LONGEST,
    build,
    decoded_one_by_one,
    differ,
    difference,
    error_text,
    keeps_inference_tensors,
    logits,
    sees_ahead,
    sees_padding,
)
from hf_paged.model.sources import StandIn, source_width
from hf_paged.model.traits import ModelTraits
from hf_paged.model.weights_version import is_batch_dependent
from hf_paged.model.wrapper import Wrapper

_ROUNDING = 1e-4  # of the largest logit, for what is to agree but for the order of sums
_AS_LATENTS = "; as latents: "


@dataclass(frozen=True, slots=True)
class Trial:
    """How a model can be run over the pool.

    Attributes:
        traits: The findings.
        tiny: The shrunken copy that has run so, and its own traits; `None`: none has.
    """

    traits: ModelTraits
    tiny: tuple[PreTrainedModel, ModelTraits] | None = None


def probe_decoder(base: type[PreTrainedModel], config: PreTrainedConfig) -> Trial | str:
    """How the decoder of an encoder-decoder can be run over the pool, or why not: packed, padded, or by stock."""
    failure = why_stock = ""
    for heads in (4, None):
        try:
            model = build(base, shrink(config, heads))
            tiny, expected = _noted_decoder(model, logits)
            break
        except Exception as error:
            failure = failure or error_text(error)
    else:
        return f"a shrunken copy of it could not be built and run to try ({failure:.200})"
    whole = on_meta(base, config)
    found, _ = _noted_decoder(whole, _decode_on_meta)
    windowed = _windowed(tiny[0], model)
    for has_windows in (True, False) if windowed != tiny[0] else (False,):
        for is_told, may_infer in itertools.product((False, True), (True, False)):
            layers = windowed if has_windows else tiny[0]
            traits = ModelTraits(
                layers, True, True, may_infer, tells_positions=is_told, tells_all=is_told, cross=tiny[1]
            )
            why_not = difference(model, traits, expected)
            if not why_not:
                layers = _windowed(found[0], whole) if has_windows else found[0]
                return Trial(replace(traits, layers=layers, cross=found[1]), (model, traits))
            if not why_stock or (why_not.startswith(DIFFERENCE) and not why_stock.startswith(DIFFERENCE)):
                why_stock = why_not  # what it computes says more than what it was not made for
            if keeps_inference_tensors(model):
                model = build(base, model.config)
    stock = ModelTraits(found[0], False, rows_independent=False, why_padded=why_stock, cross=found[1])
    drawn = torch.get_rng_state()
    own = ModelTraits(tiny[0], False, True, runs_padded=True, why_padded=why_stock, cross=tiny[1])
    for padded, lengths in (
        (replace(own, tells_positions=True, tells_all=True), FALLING),
        (replace(own, tells_positions=True, tells_all=True, needs_alike=True), EQUAL),
        (replace(own, needs_alike=True, one_by_one=True), EQUAL),
    ):
        expected = decoded_one_by_one(model, lengths)
        if not torch.equal(drawn, torch.get_rng_state()):
            return Trial(replace(stock, why_padded="its forwards draw random numbers, between those of sampling"))
        for may_infer in (True, False):
            traits = replace(padded, allows_inference_mode=may_infer)
            failure = difference(model, traits, expected, lengths)
            if not failure:
                return Trial(replace(traits, layers=found[0], cross=found[1]), (model, traits))
            if keeps_inference_tensors(model):
                model = build(base, model.config)
    return Trial(stock)


def _noted_decoder(
    model: PreTrainedModel, run: Callable[[PreTrainedModel, EncoderDecoderCache], Tensor]
) -> tuple[tuple[Layers, Layers], Tensor]:
    """What a decoder's layers store of its own tokens, and of what an encoder has read; and what `run` returns."""
    with noting(model) as own, noting(model, is_cross=True) as cross:
        result = run(model, EncoderDecoderCache(own, cross))
    num_layers = 1 + max(own.noted)
    crossing = (None if spec is None else replace(spec, is_cross=True) for spec in listed(cross.noted, num_layers))
    return (listed(own.noted, num_layers), tuple(crossing)), result


@torch.no_grad()
def _decode_on_meta(model: PreTrainedModel, past: EncoderDecoderCache) -> Tensor:
    with torch.device("meta"), Zeros():
        states = torch.zeros(1, 3, source_width(model), dtype=model.dtype)
        ids = torch.zeros(1, 2, dtype=torch.int64)
        given = StandIn(last_hidden_state=states)
        return model(decoder_input_ids=ids, encoder_outputs=given, past_key_values=past, use_cache=True).logits  # type: ignore[no-any-return]


def probe(base: type[PreTrainedModel], config: PreTrainedConfig) -> Trial | str:
    """How a model of this class and config can be run over the pool, or why not."""
    if config.is_encoder_decoder:
        return probe_decoder(base, config)
    tiny = _tiny(base, config)
    if isinstance(tiny, str):
        return tiny
    model = tiny.model
    tiny_stored = Stored.of(tiny.noted, torch.float32)
    try:
        whole = on_meta(base, config)
        found = Stored.of(noted_on_meta(whole), torch.bfloat16)
    except Exception as error:  # its forward needs numbers
        found = _as_wide(base, config) or f"what its layers store could not be found out ({error_text(error)})"
    if isinstance(found, str) or isinstance(tiny_stored, str):
        return found if isinstance(found, str) else str(tiny_stored)
    if keeps_states(config) and not found.states:
        return "its layers keep states elsewhere than in the layers of a cache"
    failure, alone = "", None
    # Of a wrapper the calls themselves say what they see.
    is_causal = bool(found.states) or Wrapper.of(model) is not None or not sees_ahead(model)
    why_padded = _why_padded(config, found) if is_causal else "a token's keys follow from those behind it"
    may_pack, takes_positions = not why_padded, "position_ids" in inspect.signature(base.forward).parameters
    if may_pack and not takes_positions and not found.states:
        why_padded = "it takes no position_ids: it places tokens by their column, which a packed batch doesn't have"
    for traits, has_windows in _ways(config, tiny, tiny_stored, is_causal, may_pack, takes_positions):
        if (
            traits.tells_positions and takes_positions and alone is None
        ):  # stock tells a padded row's layers its columns
            rows = range(len(LENGTHS))
            alone = torch.cat([logits(model, DynamicCache(config=model.config), row=row) for row in rows])
        failure = difference(model, traits, tiny.expected if alone is None or not traits.tells_positions else alone)
        if not failure:
            layers = with_latents(found.layers) if traits.has_latents else found.layers
            layers = _windowed(layers, whole) if has_windows else layers
            why_padded = "" if traits.runs_packed else why_padded
            own = replace(traits, layers=layers, indexers=found.indexers, states=found.states, why_padded=why_padded)
            return Trial(own, (model, traits))
        if traits.runs_packed and not traits.has_latents:
            why_padded = why_padded or failure
        elif traits.runs_packed:
            why_padded = f"{why_padded.partition(_AS_LATENTS)[0]}{_AS_LATENTS}{failure}"
        if keeps_inference_tensors(model):
            model = build(base, model.config)
    return Trial(ModelTraits(found.layers, False, rows_independent=False, why_padded=why_padded or failure))


@dataclass(frozen=True, slots=True)
class _Tiny:
    """A tiny model, and what it does over a stock cache.

    Attributes:
        expected: Its last logits; where the cache does not carry states into several tokens, not stock's, but those of
            prompts that were computed whole.
    """

    model: PreTrainedModel
    noted: NotingCache
    expected: Tensor
    carries_state: bool = True
    forms_differ: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Tiny:
        with noting(model) as noted:
            by_chunks = logits(model, noted)
        if not noted.states:
            return cls(model, noted, by_chunks)

        def by(*edges: int) -> Tensor:
            return logits(model, DynamicCache(config=model.config), (0, *edges))

        whole = by(LONGEST + 2, LONGEST + 3, LONGEST + 4)
        if differ(by_chunks[:, 1:], whole):
            return cls(model, noted, torch.cat([by_chunks[:, :1], whole], dim=1), carries_state=False)
        one_by_one = by(*range(LONGEST, LONGEST + 5))[:, 2:]
        return cls(model, noted, by_chunks, forms_differ=differ(one_by_one, by_chunks[:, 1:], _ROUNDING))


def _why_padded(config: PreTrainedConfig, found: Stored) -> str:
    """What rules the packed layout out before it is tried; empty if nothing does."""
    if found.states:
        return ""
    if not _rows_independent(config.get_text_config(decoder=True)):
        return "its rotary embedding depends on the longest row of a batch"
    if any(layer is not None for layer in found.indexers):
        return "which tokens a layer attends to is chosen by an indexer"
    return ""


def _tiny(base: type[PreTrainedModel], config: PreTrainedConfig) -> _Tiny | str:
    failure = ""
    beginnings = (False, True) if keeps_states(config) else (False,)
    for heads, is_beginning in itertools.product((2, 4, None), beginnings):  # CodeGen's come in fours
        try:
            return _Tiny.of(build(base, shrink(config, heads, is_beginning)))
        except Exception as error:
            failure = failure or error_text(error)
    return f"a shrunken copy of it could not be built and run to try ({failure:.200})"


def _as_wide(base: type[PreTrainedModel], config: PreTrainedConfig) -> Stored | None:
    """What each layer stores, from a copy with few layers of full width; `None` where these don't store alike."""
    try:
        few = build(base, shrink(config, None))
        with noting(few) as cache:
            logits(few, cache)
    except Exception:
        return None
    found = Stored.of(cache, torch.float32)
    if isinstance(found, str) or len(set(found.layers)) > 1 or found.indexers or found.states:
        return None
    return Stored(found.layers[:1] * config.get_text_config(decoder=True).num_hidden_layers, (), {})


def _ways(
    config: PreTrainedConfig, tiny: _Tiny, stored: Stored, is_causal: bool, may_pack: bool, takes_positions: bool
) -> Iterator[tuple[ModelTraits, bool]]:
    """What may be tried, the best first, and whether it is with the windows that the config states."""
    text = config.get_text_config(decoder=True)
    rows_independent = bool(stored.states) or _rows_independent(text)
    own = ModelTraits(
        stored.layers,
        runs_packed=False,
        rows_independent=rows_independent,
        states=stored.states,
        mixers=tuple(sorted(tiny.noted.mixers, key=lambda kind: kind.__name__)),
        carries_state=tiny.carries_state,
        forms_differ=tiny.forms_differ,
        indexers=stored.indexers,
        shares_attention=tiny.noted.is_shared,
    )
    if not is_causal:  # keys of a token follow from those behind it in its forward: none can be computed again
        return
    if may_pack:
        # The windows that the config states, unless a layer turns out to attend to more than that.
        windowed = stored.layers if stored.states else _windowed(stored.layers, tiny.model)
        for has_windows in (True, False) if windowed != stored.layers else (False,):
            packed = replace(own, layers=windowed if has_windows else stored.layers, runs_packed=True)
            may_tell = (False, True) if tiny.noted.is_asked and not stored.states else (False,)
            may_tell = may_tell if takes_positions or stored.states else (True,)  # its cache tells it
            for is_told, may_infer in itertools.product(may_tell, (True, False)):
                told = replace(packed, tells_positions=is_told, tells_all=is_told and not takes_positions)
                yield replace(told, allows_inference_mode=may_infer), has_windows
        latent = with_latents(stored.layers)
        for may_infer in (True, False) if latent != stored.layers else ():
            yield replace(own, layers=latent, runs_packed=True, allows_inference_mode=may_infer), False
    if stored.states and sees_padding(tiny.model):
        return
    if rows_independent:
        for may_infer in (True, False):
            yield replace(own, runs_padded=True, allows_inference_mode=may_infer), False
    else:
        yield replace(own, regime_length=_regime_length(text)), False


def _windowed(layers: Layers, model: PreTrainedModel) -> Layers:
    return as_their_modules_say(with_windows(layers, model.config.get_text_config(decoder=True)), model)


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
