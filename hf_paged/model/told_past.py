"""`ToldPast`: modules that work out tokens' places from how much is cached, in a step that tells it token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.attention.cache import Past
from hf_paged.attention.paged_attention import BIAS_TABLE

_POSITIONS, _BIAS = "create_position_ids_from_input_ids", "compute_bias"


class ToldPast:
    """Methods of a model's modules that add the cached length to places in a row, or make a bias of distances.

    In a packed row places are not those of a sequence. Called with what a `StepCache` tells, the former see each token
    as a row of its own, and the latter returns a stand-in, which says what belongs to each distance.
    """

    def __init__(self, model: nn.Module) -> None:
        self._methods: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        for module in model.modules():
            if hasattr(module, _POSITIONS):
                self._methods.append((module, _POSITIONS, _positions_token_by_token))
            if hasattr(module, "relative_attention_bias") and hasattr(module, _BIAS):
                self._methods.append((module, _BIAS, partial(_bias_by_distance, module)))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within it, these methods take what steps tell; from other callers, what they always took."""
        try:
            for module, name, changed in self._methods:
                module.__dict__[name] = partial(changed, getattr(type(module), name).__get__(module))
            yield
        finally:
            for module, name, _ in self._methods:
                module.__dict__.pop(name, None)


def _positions_token_by_token(stock: Callable[..., Tensor], ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    past = next((value for value in (*args, *kwargs.values()) if isinstance(value, Past)), None)
    if past is None:
        return stock(ids, *args, **kwargs)
    column = past.as_subclass(Tensor)
    column = (column + torch.arange(len(column), device=column.device))[:, None]
    args = tuple(column if value is past else value for value in args)
    kwargs = {name: column if value is past else value for name, value in kwargs.items()}
    return stock(ids.reshape(-1, 1), *args, **kwargs).reshape(ids.shape)


def _bias_by_distance(module: Any, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    past = kwargs.get("past_seen_tokens")
    if not isinstance(past, Past):
        return stock(*args, **kwargs)
    last = module.relative_attention_max_distance  # from which on all are alike
    table = stock(1, last + 1, past_seen_tokens=last)[0, :, 0].flip(-1).float().contiguous()
    stand_in = table.new_zeros(1, 1, 1, 1)
    setattr(stand_in, BIAS_TABLE, table)
    return stand_in
