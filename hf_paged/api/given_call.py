"""What a call of the model is given: as its caller says it, and as a multimodal model tells its language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_paged.attention.cache import PagedCache
from hf_paged.model.cache_argument import CACHE_ARGUMENTS
from hf_paged.model.forward_call import ForwardCall
from hf_paged.model.wrapper import token_positions

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


def forward_call(self: Any, cache: PagedCache, given: dict[str, Any]) -> ForwardCall:
    """What a forward of the model over a `PagedCache` is given (by name; taken out of the dict), to be looked at."""
    call = ForwardCall(
        input_ids=given.pop("input_ids", None),
        inputs_embeds=given.pop("inputs_embeds", None),
        attention_mask=given.pop("attention_mask", None),
        position_ids=given.pop("position_ids", None),
        logits_to_keep=given.pop("logits_to_keep", 0),
    )
    check_tokens(call.tokens)
    if not self.paged.core.bound.chooses_logits:  # its forward ignores it
        call.logits_to_keep = 0
    for name in (*CACHE_ARGUMENTS, "use_cache", *IGNORED_BY_FORWARD):
        given.pop(name, None)
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if given.get(name) is None and getattr(self.config, name, False):
            given[name] = True  # asked for by the config
    # Arguments at their neutral value ask for nothing; the rest needs the model's own forward.
    call.others = {name: value for name, value in given.items() if is_given(value)}
    if self.paged.core.bound.cache_argument != "past_key_values":
        call = call.behind(cache.get_seq_length())
    if self.paged.core.bound.wrapper is not None:
        _look_inside(self, cache, call)
    call.on_host()  # before anything is locked
    return call


@torch.no_grad()
def _look_inside(self: Any, cache: PagedCache, call: ForwardCall) -> None:
    """Finds out what a wrapper hands to its language model, unless that is the ids of the call and nothing else."""
    bound = self.paged.core.bound
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
