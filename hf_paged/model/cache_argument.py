"""Properties of a model's forward: the name of its cache argument, and the class of its output."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
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
    """

    logits: Tensor | None = None
    cache_params: Any = None


def output_type(forward: Callable[..., Any]) -> type[ModelOutput]:
    stated = inspect.signature(forward).return_annotation
    for kind in get_args(stated) or (stated,):
        if (
            isinstance(kind, type)
            and issubclass(kind, ModelOutput)
            and "logits" in getattr(kind, "__dataclass_fields__", ())
        ):
            return kind
    return CausalLMOutputWithPast
