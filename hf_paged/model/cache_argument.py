"""Under which name a model's forward takes its cache."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


@cache
def cache_argument(kind: type[Any]) -> str:
    """`past_key_values`, or `cache_params` where the forward of this class takes that."""
    parameters = inspect.signature(kind.forward).parameters
    return "cache_params" if "cache_params" in parameters and "past_key_values" not in parameters else "past_key_values"
