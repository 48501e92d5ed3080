"""`ModelState`: what keys and values depend on in the model itself, as a key for the prefix cache."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any, cast

from torch import nn


class ModelState:
    """Notices that a model's weights or active adapters changed since it was last asked.

    In-place writes (an optimizer step, `load_state_dict`) move a tensor's version counter, replaced parameters have
    another identity. Writes through `.data` move neither: call `engine.reset_prefix_cache()` after them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._seen: int | None = None
        self._epoch = 0

    def key(self) -> tuple[Hashable, ...]:
        """The current state: an epoch number that never returns to an earlier value, and the active adapters."""
        model = self._model()
        if model is None:
            raise RuntimeError("the patched model no longer exists")
        tensors = chain(model.parameters(), model.buffers())
        fingerprint = hash(tuple((id(t), 0 if t.is_inference() else t._version) for t in tensors))
        if fingerprint != self._seen:
            self._seen = fingerprint
            self._epoch += 1
        return (self._epoch, _active_adapters(model))


def _active_adapters(model: nn.Module) -> Hashable:
    """Of PEFT's tuner layers, by their documented attributes: which adapters are active, merged or disabled."""
    return tuple(
        (tuple(module.active_adapters), tuple(module.merged_adapters), bool(module.disable_adapters))
        for module in cast("Iterable[Any]", model.modules())
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters")
    )
