"""The forward of a patched class: over a `PagedCache` the engine runs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from hf_paged.api.encodings import decodes_again, encoded
from hf_paged.api.engine_of import ENGINE, engine_of
from hf_paged.api.given_call import forward_call
from hf_paged.api.own_forward import TriedCall
from hf_paged.api.rank_calls import forward_on_ranks, run_in_turn
from hf_paged.api.routing import run_stock
from hf_paged.attention.cache import PagedCache
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.engine.call_context import call_context
from hf_paged.engine.engine import Engine
from hf_paged.model.cache_argument import cache_argument


def paged_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a patched class: over a `PagedCache` the engine runs it, everything else is the original's."""
    signature = inspect.signature(original)
    name = cache_argument(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        given = dict(bound.arguments)
        cache = given.get(name)
        if type(cache) is TriedCall:
            return TriedCall.arrive(cache, self, _by_name(signature, given))
        # What wraps a forward (accelerate) may call it when the model is not patched any more.
        engine = None if torch.compiler.is_compiling() else self.__dict__.get(ENGINE)
        if engine is not None:
            engine.core.check_outside()
        if not isinstance(cache, PagedCache) or given.get("use_cache") is False:
            if engine is not None and engine.exact_forwards is not None and engine.exact_forwards.takes(given):
                return _exactly(self, engine.exact_forwards, _by_name(signature, given))
            if engine is not None:
                run_stock(engine)
                kwargs |= {} if args else _encoded_before(self, given)
            if engine is None or engine.ranks is None:
                with nullcontext() if engine is None else engine.core.undisturbed():
                    return original(self, *args, **kwargs)
            return run_in_turn(engine, given, functools.partial(original, self, *args, **kwargs))
        # What compiles the model compiles its forward, not the engine: locks, queues, steps of other calls' rows.
        run = _uncompiled_paged if torch.compiler.is_compiling() else _forward_paged
        return run(self, cache, signature, given)

    return forward


def _forward_paged(self: Any, cache: PagedCache, signature: inspect.Signature, given: dict[str, Any]) -> Any:
    """A forward over a `PagedCache`, by the engine; `given`: the arguments as bound to the original's signature."""
    given = _by_name(signature, given)
    return_dict = given.pop("return_dict", None)
    engine = engine_of(self)
    output = forward_on_ranks(engine, cache, given, functools.partial(_run_paged, self, engine, cache, dict(given)))
    wants_tuple = return_dict is False or (return_dict is None and not self.config.return_dict)
    return output.to_tuple() if wants_tuple else output


def _exactly(self: Any, forwards: Any, given: dict[str, Any]) -> Any:
    output = forwards.forward({name: value for name, value in given.items() if name != "return_dict"})
    return_dict = given.get("return_dict")
    return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


def _encoded_before(self: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What a forward is to be given as well that Whisper's `generate()` makes, by name, to look at its audio."""
    features = given.get("input_features")
    is_whispers = decodes_again(self) and call_context().encodings is not None
    if (
        not is_whispers
        or features is None
        or given.get("encoder_outputs")
        or any(name.startswith("output_") for name in given)
    ):
        return {}
    return {"encoder_outputs": encoded(self, features, lambda: self.get_encoder()(features))}


def _by_name(signature: inspect.Signature, given: dict[str, Any]) -> dict[str, Any]:
    """Bound arguments but for the first, `self`, with those of `**kwargs` among them."""
    _, *names = given
    variable = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    named = {name: given[name] for name in names if name not in variable}
    return named | {name: value for table in variable for name, value in given.get(table, {}).items()}


def _run_paged(self: Any, engine: Engine, cache: PagedCache, given: dict[str, Any]) -> Any:
    call = forward_call(self, cache, given)
    if engine.traits.one_by_one and call.tokens.shape[1] > 1:
        raise UnsupportedCallError("this model's decoder is given its tokens one by one over a PagedCache")
    output = engine.forwards.forward(cache, call)
    if call.twin is not None:
        cache.state = call.twin.state()
    return output


_uncompiled_paged = torch.compiler.disable(
    _forward_paged,
    reason="a forward over a PagedCache is no part of a graph: compile the model without fullgraph=True",
)
