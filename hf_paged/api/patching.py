"""`patch`, `unpatch`, `patched`: turning a model's `generate()` paged, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from hf_paged.api.adapter_names import guard_tuner, release_tuner
from hf_paged.api.generation import PagedGenerationMixin
from hf_paged.api.patched_class import attach, detach
from hf_paged.api.support import look_at, unwrap
from hf_paged.core.config import PagedConfig
from hf_paged.core.errors import UnsupportedModelError
from hf_paged.engine.engine import Engine
from hf_paged.model.sharding import ranks_of
from hf_paged.model.traits import ModelTraits
from hf_paged.parallel.channel import Channel

ModelT = TypeVar("ModelT", bound=nn.Module)


def patch(model: ModelT, config: PagedConfig | None = None, **settings: Any) -> ModelT:
    """Puts a paged KV block pool behind a model's `generate()`.

    The model stays the same object with the same weights; calls without a `PagedCache` (training, scoring) run exactly
    the code they ran before. Memory is taken at the first `generate()`, not here (but under `warm_up=True`).

    Args:
        model: A Hugging Face model that generates text, or a PEFT model around one.
        config: All settings at once.
        **settings: Or single fields of `PagedConfig`.

    Returns:
        The same object. Its engine is `model.paged`.

    Raises:
        UnsupportedModelError: The model can't be paged; the message says why.
        ValueError: Not a model, a bad or unknown setting, or patched before with other settings.
    """
    inner = unwrap(model)
    wanted = PagedConfig.from_settings(config, **settings)
    engine = getattr(inner, "paged", None)
    if isinstance(engine, Engine):
        if engine.config != wanted:
            now, then = engine.config.differences(wanted)
            raise ValueError(f"the model is already patched with {now}; unpatch it first to patch it with {then}")
        guard_tuner(model)
        return model
    report = look_at(inner)
    if report.traits is None:
        raise UnsupportedModelError(type(inner).__name__, report.reasons)
    attach(inner, wanted, report.traits, _channel(inner, wanted, report.traits))
    if wanted.warm_up:
        try:
            engine = getattr(inner, "paged", None)
            assert isinstance(engine, Engine)
            engine.warm_up()
        except BaseException:
            detach(inner)
            raise
    guard_tuner(model)
    return model


def _channel(model: nn.Module, config: PagedConfig, traits: ModelTraits) -> Channel | None:
    """To the other processes that hold a share of the model, all of which are patching it now; `None`: it is whole.

    Raises:
        ValueError: They are about to patch it otherwise.
    """
    ranks = ranks_of(model)
    if ranks is None:
        return None
    if config.warm_up:
        raise ValueError("warm_up=True is not supported over several processes (tp_plan)")
    if config.cuda_graphs and (device := next(model.parameters()).device).type != "cuda":
        raise ValueError(f"cuda_graphs=True needs CUDA devices, this process's share of the model is on {device}")
    channel = Channel(ranks)
    found = channel.gather((replace(config, policy="fcfs"), repr(traits)))  # rank 0 schedules
    if any(other != found[0] for other in found):
        raise ValueError(f"all processes must patch the model with the same settings; theirs are {found}")
    return channel


def unpatch(model: ModelT) -> ModelT:
    """Undoes `patch`: restores the model's own class, attention and generation, and frees the pool.

    Args:
        model: A patched model; one that isn't patched is left as it is.

    Returns:
        The same object.
    """
    inner = unwrap(model)
    if is_patched(inner):
        detach(inner)
        release_tuner(model)
    return model


@contextmanager
def patched(model: ModelT, config: PagedConfig | None = None, **settings: Any) -> Iterator[ModelT]:
    """`patch` for the length of a `with` block. A model that was patched before stays so afterwards."""
    was_patched = is_patched(unwrap(model))
    patch(model, config, **settings)
    try:
        yield model
    finally:
        if not was_patched:
            unpatch(model)


def is_patched(model: nn.Module) -> bool:
    """Whether the model (not a wrapper around it) is patched."""
    return isinstance(model, PagedGenerationMixin)
