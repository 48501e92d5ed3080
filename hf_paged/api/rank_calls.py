"""Calls of a model over several processes: rank 0 runs them, and the other ranks return its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.utils import logging

from hf_paged.attention.cache import PagedCache
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.engine.call_context import call_context, within
from hf_paged.engine.engine import Engine
from hf_paged.engine.follower import Follower
from hf_paged.engine.leader import Leader, sendable
from hf_paged.engine.prepared_call import PreparedCall
from hf_paged.model.sharding import ranks_of
from hf_paged.parallel.call_key import call_key
from hf_paged.parallel.channel import RankError
from hf_paged.sampling.random import DRAWS

logger = logging.get_logger(__name__)


def run_on_ranks(engine: Engine, method: str, call: PreparedCall, device: torch.device, run: Callable[[], Any]) -> Any:
    """Runs one of transformers' loops, or what stands for it, on one rank, or on rank 0 for all."""
    if engine.ranks is None or call.cache is None or call_context().is_known_to_ranks:
        return run()
    assistant = call.others.get("assistant_model")
    if assistant is not None and ranks_of(assistant) is not None and getattr(assistant, "paged", None) is None:
        raise UnsupportedCallError(
            "the assistant model is split between processes and not patched: patch it, too, or load it whole"
        )
    others = {name: value for name, value in call.others.items() if name not in ("streamer", "assistant_model")}
    digest = call_key(
        method, {"input_ids": call.input_ids, **others}, call.generation_config, (*call.processors, *call.criteria)
    )
    rows, width = call.input_ids.shape
    text = (
        f"generate() of {rows} prompt(s) of {width} tokens, max_length {call.generation_config.max_length} ({method})"
    )
    if isinstance(engine.ranks, Leader):
        return _lead(engine.ranks, digest, text, call.cache, run)
    return _follow(engine.ranks, digest, text, call.cache, device, call.others.get("streamer"), width)


def forward_on_ranks(engine: Engine, cache: PagedCache, given: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Runs a caller's forward over a `PagedCache` on one rank, or on rank 0 for all."""
    if engine.ranks is None or call_context().is_known_to_ranks:
        return run()
    ids = given.get("input_ids")
    text = f"forward of {'embeddings' if ids is None else f'ids {list(ids.shape)}'} over a PagedCache"
    digest = call_key("forward", given)
    if isinstance(engine.ranks, Leader):
        return _lead(engine.ranks, digest, text, cache, run)
    return _follow(engine.ranks, digest, text, cache, engine.core.bound.placement[1], None, 0)


def run_in_turn(engine: Engine, given: dict[str, Any], run: Callable[[], Any]) -> Any:
    """A forward outside of steps: all ranks run it at the same place among the steps, which rank 0 decides."""
    ranks = engine.ranks
    if ranks is None:
        return run()
    if call_context().is_known_to_ranks:
        raise UnsupportedCallError(
            "a forward without a PagedCache inside a call (a processor that runs the model, guidance_scale) is not "
            "supported over several processes (tp_plan): the other ranks don't run that code"
        )
    digest = call_key("forward", {name: value for name, value in given.items() if isinstance(value, Tensor)})
    if isinstance(ranks, Leader):
        with engine.exclusive():
            ranks.forward(digest, "a forward of the model")
            return run()
    with ranks.forwarding(digest, "a forward of the model"):
        return run()


def _lead(leader: Leader, digest: bytes, text: str, cache: PagedCache, run: Callable[[], Any]) -> Any:
    number, entry = leader.begin(digest, text), call_context().states
    try:
        with within(is_known_to_ranks=True):
            result = run()
    except BaseException as error:
        if not isinstance(error, RankError):
            leader.end(number, (sendable(error), None, None, None))
        raise
    ends = {
        device.type: state for device, state in DRAWS.states(entry).items() if not torch.equal(state, entry[device])
    }
    leader.end(number, (None, tree_map(_on_host, result), ends, cache.shape()))
    return result


def _follow(
    follower: Follower, digest: bytes, text: str, cache: PagedCache, device: torch.device, streamer: Any, width: int
) -> Any:
    error, result, ends, shape = follower.outcome(follower.make(digest, text))
    if error is not None:
        raise error
    DRAWS.write({own: ends[own.type] for own in call_context().states if own.type in ends})
    cache.take_shape(shape)
    cache.owned_by_call = False
    result = tree_map(
        lambda value: cache if isinstance(value, _Here) else value.to(device) if isinstance(value, Tensor) else value,
        result,
    )
    if streamer is not None:
        sequences = result if isinstance(result, Tensor) else result.sequences
        for tokens in sequences[:, width:].cpu().unbind(dim=1):
            streamer.put(tokens)
        streamer.end()
    return result


class _Here:
    """Marks the place of the call's own cache in what is sent."""


def _on_host(value: Any) -> Any:
    if isinstance(value, PagedCache):
        return _Here()
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
