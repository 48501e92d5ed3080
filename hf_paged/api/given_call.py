"""The arguments of a model's call: as its caller gives them, and as a multimodal model hands them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_paged.api.engine_of import engine_of
from hf_paged.attention.cache import PagedCache
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.core.sequence import Source
from hf_paged.kernels.transfers import to_host
from hf_paged.model.cache_argument import CACHE_ARGUMENTS
from hf_paged.model.forward_call import ForwardCall
from hf_paged.model.sources import sources_of
from hf_paged.model.wrapper import token_positions

DECODER_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")  # behind "decoder_"
OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")  # that a config may ask for, too
# What `generate()` needs for stop strings and hands on to every forward, where no model looks at it.
IGNORED_BY_FORWARD = {"tokenizer"}


def is_given(value: Any) -> bool:
    """Whether an argument asks for anything: it is neither `None` nor `False`, nor a table of nothing."""
    return value is not None and value is not False and not (isinstance(value, dict) and not value)


def check_tokens(tokens: Any) -> None:
    """Raises `ValueError` for tokens (ids or embeddings, `[rows, columns, ...]`) that are no prompts."""
    if not isinstance(tokens, Tensor):
        return
    if tokens.shape[0] == 0:
        raise ValueError(f"the batch is empty: give at least one row, got shape {tuple(tokens.shape)}")
    kind = tokens.dtype
    if tokens.ndim == 2 and (kind.is_floating_point or kind.is_complex or kind is torch.bool):
        raise ValueError(f"input_ids must be integers (torch.long), got a tensor of {kind}")


def check_continuation(cache: PagedCache, tokens: Tensor, mask: Tensor | None) -> None:
    """Raises `ValueError` if a prompt's first columns differ from what the cache holds; `generate()` takes it as equal.

    Columns that the mask hides may differ. What was given as embeddings, or is not known to the cache, isn't compared.

    Args:
        cache: Not empty.
        tokens: `[rows, columns]`, the prompt's ids, or its embeddings.
        mask: Of the call, if it gave one.
    """
    width, columns = cache.get_seq_length(), tokens.shape[1]
    remedy = (
        "give what it holds and new tokens behind it, or the new tokens alone to the model's forward() (to generate() "
        "with an attention_mask over both), crop() the cache to what the prompt begins with, or make a new one"
    )
    if columns <= width:
        raise ValueError(f"the prompt has {columns} tokens a row, and the PagedCache already holds {width}: {remedy}")
    is_known = tokens.ndim == 2 and len(tokens) == cache.batch_size and (mask is None or mask.ndim == 2)
    if not is_known:
        return
    ids, *masks = (table.tolist() for table in to_host([tokens] if mask is None else [tokens, mask]))
    for row, given in enumerate(ids):
        sequence, padding = cache.sequences[row // cache.fan_out], cache.padding[row // cache.fan_out]
        held = () if sequence is None else sequence.token_ids or ()
        if held == given[padding:width]:
            continue
        for column, token in enumerate(held, padding):
            is_embedded = getattr(token, "embeddings", None) is not None
            own, is_seen = getattr(token, "token_id", token), not masks or masks[0][row][column]
            if is_seen and not is_embedded and own != given[column]:
                raise ValueError(
                    f"the prompt doesn't continue the PagedCache, which holds {width} tokens a row: row {row} differs "
                    f"in column {column}, {given[column]} where the cache has {own}: {remedy}"
                )


def why_not_embedded(model: Any, embeddings: Tensor | None) -> str | None:
    """Why these can't stand in the place of ids in a step that has ids, too, or `None`."""
    bound = engine_of(model).core.bound
    looks_up_more = bound.wrapper is None and bound.text_config.model_type == "gemma3n_text"
    given = looks_up_more and embeddings is not None
    return "inputs_embeds of a model whose layers look up token ids, too" if given else None


def forward_call(self: Any, cache: PagedCache, given: dict[str, Any]) -> ForwardCall:
    """The arguments of a forward over a `PagedCache` (by name; taken out of the dict), to be looked at."""
    bound = engine_of(self).core.bound
    sources = _take_sources(bound, cache, given) if bound.source_tap is not None else None
    call = ForwardCall(
        input_ids=given.pop("input_ids", None),
        inputs_embeds=given.pop("inputs_embeds", None),
        attention_mask=given.pop("attention_mask", None),
        position_ids=given.pop("position_ids", None),
        logits_to_keep=given.pop("logits_to_keep", 0),
        sources=sources,
    )
    check_tokens(call.tokens)
    if (reason := why_not_embedded(self, call.inputs_embeds)) is not None:
        raise UnsupportedCallError(f"{reason}, over a PagedCache: give input_ids, or no cache")
    if not bound.chooses_logits:  # its forward ignores it
        call.logits_to_keep = 0
    for name in (*CACHE_ARGUMENTS, "use_cache", *IGNORED_BY_FORWARD):
        given.pop(name, None)
    for name in OUTPUTS:
        if given.get(name) is None and getattr(self.config, name, False):
            given[name] = True  # asked for by the config
    # Arguments at their neutral value ask for nothing; the rest needs the model's own forward.
    call.others = {name: value for name, value in given.items() if is_given(value)}
    if bound.cache_argument != "past_key_values":
        call = call.behind(cache.get_seq_length())
    if bound.wrapper is not None:
        _look_inside(self, bound, cache, call)
    call.on_host()  # before anything is locked
    return call


@torch.no_grad()
def _take_sources(bound: Any, cache: PagedCache, given: dict[str, Any]) -> list[Source] | None:
    """What the rows' encoder has read, at their first forward; what is left in the dict is told to the decoder."""
    sources = None
    if cache.get_seq_length() == 0:
        told = {name: value for name, value in given.items() if not name.startswith("output_") and name != "labels"}
        sources = sources_of(*bound.reach_decoder({**told, "past_key_values": None, "use_cache": False}))
    kept = {name: given[name] for name in given if name == "labels" or name.startswith("output_")}
    kept |= {name: given[name] for name in (*CACHE_ARGUMENTS, "use_cache", "logits_to_keep") if name in given}
    for name in DECODER_ARGUMENTS:
        if given.get(f"decoder_{name}") is not None:
            kept[name] = given[f"decoder_{name}"]
    given.clear()
    given.update(kept)
    return sources


@torch.no_grad()
def _look_inside(self: Any, bound: Any, cache: PagedCache, call: ForwardCall) -> None:
    """Finds out what a wrapper hands to its language model, unless that is the ids of the call and nothing else."""
    wrapper = bound.wrapper
    asked = {name for name in call.others if name == "labels" or name.startswith("output_")}
    is_text = not call.others.keys() - asked and call.position_ids is not None
    is_text &= wrapper.is_causal or call.tokens.shape[1] == 1
    call.given = call.arguments()
    if call.position_ids is not None:
        call.position_ids = token_positions(call.position_ids)
    if is_text:
        return
    call.twin = twin = wrapper.twin(self, cache.state)
    given = {name: value for name, value in call.given.items() if name not in asked}
    inner = bound.reach(twin, given | {"past_key_values": cache, "use_cache": True, "return_dict": True})
    call.others = {name: call.others[name] for name in asked} | inner.others
    has_same_shape = inner.inputs_embeds.shape[:2] == call.tokens.shape[:2]
    call.is_known = not inner.others and has_same_shape and wrapper.find_spans(inner)
    if call.is_known:
        inner.compare(call.input_ids, self.get_input_embeddings())
        call.inner = inner
        call.position_ids = None if inner.position_ids is None else token_positions(inner.position_ids)
