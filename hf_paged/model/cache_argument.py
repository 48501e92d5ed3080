"""Under which name a model's forward takes its cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

CACHE_ARGUMENTS = ("past_key_values", "cache_params")


@cache
def cache_argument(forward: Callable[..., Any]) -> str:
    """`past_key_values`, or `cache_params` where this forward of a class takes that."""
    parameters = inspect.signature(forward).parameters
    return "cache_params" if "cache_params" in parameters and "past_key_values" not in parameters else "past_key_values"


@dataclass
class StateOutput(ModelOutput):
    """What a model returns whose cache is its `cache_params`.

    Attributes:
        logits: `[B, columns, vocab_size]`.
        cache_params: The cache.
    """

    logits: Tensor | None = None
    cache_params: Any = None
