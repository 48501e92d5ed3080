"""`ToldPast`: modules that work out tokens' places from how much is cached, in a step that tells it token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.attention.cache import Past
from hf_paged.attention.paged_attention import BIAS_TABLE
from hf_paged.model.module_overrides import CALL, has_hooks

_BIAS = "compute_bias"
_LENGTH = "past_key_values_length"


class ToldPast:
    """Modules that count a row's tokens (padding not) to place them, number its columns, or make a bias of distances.

    In a step places are not those of a sequence. Told what a step's cache tells, the first are given each token as a
    row of its own, the second look its place up, and the last return a stand-in, which says what belongs to each
    distance.
    """

    def __init__(self, model: nn.Module) -> None:
        self._methods: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        for module in model.modules():
            if hasattr(module, "create_position_ids_from_input_ids"):
                self._methods.append((module, "forward", _token_by_token))
            elif isinstance(module, nn.Embedding) and _LENGTH in signature(module.forward).parameters:
                self._methods.append((module, "forward", _by_place))
            if hasattr(module, "relative_attention_bias") and hasattr(module, _BIAS):
                self._methods.append((module, _BIAS, _bias_by_distance))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within it, these methods take what steps tell; from other callers, what they always took.

        Modules are called another way rather than given another forward, which other threads would take for a change
        of the model; but where hooks look on.
        """
        names = [CALL if name == "forward" and not has_hooks(module) else name for module, name, _ in self._methods]
        before = [dict(module.__dict__) for module, _, _ in self._methods]
        try:
            for (module, _, changed), name in zip(self._methods, names, strict=True):
                module.__dict__[name] = partial(changed, module, getattr(module, name) or module.forward)
            yield
        finally:
            for (module, _, _), name, own in zip(self._methods, names, before, strict=True):
                module.__dict__.pop(name)
                if name in own:  # a wrapper of the user's
                    module.__dict__[name] = own[name]


def _token_by_token(module: Any, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    past = _told(*args, **kwargs)
    if past is None:
        return stock(*args, **kwargs)
    places = past.places()
    shape = torch.Size([1, len(places)]) if places.ndim == 1 else places.shape
    places = places.reshape(-1, 1)
    if hasattr(module, "make_weights"):  # a table that grows with the longest row: as in stock, the host has to know it
        longest = module.padding_idx + 2 + int(places.max())
        if longest > module.weights.shape[0]:
            module.make_weights(longest + module.offset, module.embedding_dim, module.padding_idx)

    def as_rows(value: Any) -> Any:
        if value is past:
            return places.as_subclass(Past)
        is_row = isinstance(value, Tensor) and value.shape[:2] == shape
        return value.reshape(-1, 1, *value.shape[2:]) if is_row else value

    found = stock(*map(as_rows, args), **{name: as_rows(value) for name, value in kwargs.items()})
    return found.reshape(*shape, -1)


def _by_place(module: Any, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    past = _told(*args, **kwargs)
    if past is None or kwargs.get("position_ids") is not None:
        return stock(*args, **kwargs)
    return nn.Embedding.forward(module, past.places() + getattr(module, "offset", 0))


def _told(*args: Any, **kwargs: Any) -> Past | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Past)), None)


def _bias_by_distance(module: Any, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    past = kwargs.get("past_seen_tokens")
    if not isinstance(past, Past):
        return stock(*args, **kwargs)
    last = module.relative_attention_max_distance  # from which on all are alike
    table = stock(1, last + 1, past_seen_tokens=last)[0, :, 0].flip(-1).float().contiguous()
    stand_in = table.new_zeros(1, 1, 1, 1)
    setattr(stand_in, BIAS_TABLE, table)
    return stand_in
