"""The engine of a patched model, within a call that another thread's `unpatch()` may overtake."""

from __future__ import annotations

from typing import Any

from hf_paged.engine.engine import Engine
from hf_paged.model.base_class import BASE

ENGINE = "_hf_paged_engine"  # of a patched model, in its `__dict__`


def engine_of(model: Any) -> Engine:
    """`model.paged`. Raises `RuntimeError` if the model has been unpatched meanwhile."""
    engine: Engine | None = vars(model).get(ENGINE)
    if engine is None or not hasattr(type(model), BASE):
        raise RuntimeError("the model was unpatched while this call was running")
    return engine
