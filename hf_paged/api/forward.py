"""The forward of a patched class: over a `PagedCache` the engine runs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hf_paged.api.routing import ENGINE, IGNORED_BY_FORWARD, is_given
from hf_paged.attention.cache import PagedCache
from hf_paged.model.cache_argument import CACHE_ARGUMENTS, cache_argument
from hf_paged.model.forward_call import ForwardCall
from hf_paged.model.wrapper import token_positions


def paged_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a patched class: over a `PagedCache` the engine runs it, everything else is the original's."""
    signature = inspect.signature(original)
    name = cache_argument(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        given = dict(bound.arguments)
        cache = given.get(name)
        # What wraps a forward (accelerate) may call it when the model is not patched any more.
        engine = None if torch.compiler.is_compiling() else self.__dict__.get(ENGINE)
        if engine is not None:
            engine.core.check_outside()
        if not isinstance(cache, PagedCache) or given.get("use_cache") is False:
            return original(self, *args, **kwargs)
        # What compiles the model compiles its forward, not the engine: locks, queues, steps of other calls' rows.
        run = _uncompiled_paged if torch.compiler.is_compiling() else _forward_paged
        return run(self, cache, signature, given)

    return forward


def _forward_paged(self: Any, cache: PagedCache, signature: inspect.Signature, given: dict[str, Any]) -> Any:
    """A forward over a `PagedCache`, by the engine; `given`: the arguments as bound to the original's signature."""
    del given[next(iter(given))]  # self
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    return_dict = given.pop("return_dict", None)
    call = ForwardCall(
        input_ids=given.pop("input_ids", None),
        inputs_embeds=given.pop("inputs_embeds", None),
        attention_mask=given.pop("attention_mask", None),
        position_ids=given.pop("position_ids", None),
        logits_to_keep=given.pop("logits_to_keep", 0),
    )
    for name in (*CACHE_ARGUMENTS, "use_cache", *IGNORED_BY_FORWARD):
        given.pop(name, None)
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if given.get(name) is None and getattr(self.config, name, False):
            given[name] = True  # asked for by the config
    # Arguments at their neutral value ask for nothing; the rest needs the model's own forward.
    call.others = {name: value for name, value in given.items() if is_given(value)}
    if self.paged.core.runner.cache_argument != "past_key_values":
        call = call.behind(cache.get_seq_length())
    if self.paged.core.runner.wrapper is not None:
        _look_inside(self, cache, call)
    call.on_host()  # before anything is locked
    output = self.paged.forwards.forward(cache, call)
    if call.twin is not None:
        cache.state = call.twin.state()
    wants_tuple = return_dict is False or (return_dict is None and not self.config.return_dict)
    return output.to_tuple() if wants_tuple else output


@torch.no_grad()
def _look_inside(self: Any, cache: PagedCache, call: ForwardCall) -> None:
    """Finds out what a wrapper hands to its language model, unless that is the ids of the call and nothing else."""
    runner = self.paged.core.runner
    wrapper = runner.wrapper
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
    inner = runner.reach(twin, given | {"past_key_values": cache, "use_cache": True, "return_dict": True})
    call.others = {name: call.others[name] for name in asked} | inner.others
    has_same_shape = inner.inputs_embeds.shape[:2] == call.tokens.shape[:2]
    call.is_known = not inner.others and has_same_shape and inner.find_spans(wrapper.is_causal, wrapper.window)
    if call.is_known:
        inner.compare(call.input_ids, self.get_input_embeddings())
        call.inner = inner
        call.position_ids = None if inner.position_ids is None else token_positions(inner.position_ids)


_uncompiled_paged = torch.compiler.disable(
    _forward_paged,
    reason="a forward over a PagedCache is no part of a graph: compile the model without fullgraph=True",
)
