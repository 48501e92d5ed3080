"""The class of a model before it was patched."""

from __future__ import annotations

from typing import Any

BASE = "_hf_paged_base"  # of a patched class, the class that it was made from


def base_class(model: Any) -> Any:
    """The model's class without what `patch()` put in front."""
    return getattr(type(model), BASE, type(model))
