"""The attention function the engine's forwards run through, registered with transformers' `AttentionInterface`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.attention.context import MARK, check_not_cut, current_context, encoder_rows
from hf_paged.attention.params import AttentionParams
from hf_paged.attention.source_step import MARK as SOURCE_MARK
from hf_paged.core.process import PROCESS

NAME_PREFIX = "hf_paged_"
BIAS_TABLE = "hf_paged_by_distance"  # the attribute of a step's position bias that holds its content

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


def _make_paged_attention(base_name: str) -> AttentionFunction:
    """Paged attention for forwards of a step, told by their mask; the implementation `base_name` for all others."""

    def paged_attention_forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        block_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        source = getattr(key, SOURCE_MARK, None)
        if source is not None:
            return source[0].attend(module, query, key, value, scale, softcap), None
        if attention_mask is None or not hasattr(attention_mask, MARK):
            check_not_cut(attention_mask)
            optional = {
                "sliding_window": sliding_window,
                "softcap": softcap,
                "s_aux": s_aux,
                "position_bias": position_bias,
                "block_indices": block_indices,
            }
            kwargs |= {name: value for name, value in optional.items() if value is not None}
            function = _base_attention(base_name, module)
            rows = encoder_rows()
            if rows is not None and rows.takes(query, key, attention_mask):
                states, kwargs = (query, key, value), kwargs | {"scaling": scaling, "dropout": dropout}
                return rows.attend(function, module, states, attention_mask, **kwargs)
            return function(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
        if block_indices is not None:
            raise ValueError(f"paged attention has no block_indices; {type(module).__name__} needs it")
        bias = None if position_bias is None else by_distance(module, position_bias)
        if torch.compiler.is_compiling():
            given = scaling, dropout, sliding_window, softcap, s_aux, position_bias
            return uncompiled(module, query, key, value, attention_mask, *given)
        context = current_context(attention_mask)
        step, noting = context.step, context.noting
        layer = module.layer_idx if noting is None else noting.layer
        if not isinstance(layer, int):
            raise ValueError(f"{type(module).__name__} has no integer layer_idx, got {layer!r}")
        # [1, heads, T, head_dim] to [T, heads, head_dim]
        step.write(key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1), layer)
        params = AttentionParams(layer, scale, sliding_window, softcap, s_aux, None, bias)
        return step.attend(query.squeeze(0).transpose(0, 1), params).unsqueeze(0), None

    # What compiles a layer compiles what lies before and behind its attention: launchers are Python on the host.
    uncompiled = torch.compiler.disable(paged_attention_forward)
    return paged_attention_forward


def by_distance(module: nn.Module, position_bias: Tensor) -> Tensor:
    """`[num_heads, distances]`, what is added to the scores of a step's tokens.

    Raises:
        ValueError: The bias is not one that `ToldPast` has put in a module's place.
    """
    table: Tensor | None = getattr(position_bias, BIAS_TABLE, None)
    if table is None:
        raise ValueError(f"paged attention has no position_bias but by distance; {type(module).__name__} needs another")
    return table


def _base_attention(base_name: str, module: nn.Module) -> AttentionFunction:
    if base_name == "eager":
        # Every model file has an eager function of its own; it is not in the registry.
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base_name]


@cache
def paged_name(base_name: str) -> str:
    """Registered name of the paged attention that falls back to `base_name`, registering it if need be.

    transformers treats every name with "flash" in it as Flash Attention, so the name says "fa" instead.
    """
    name = NAME_PREFIX + base_name.replace("flash", "fa")
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, _make_paged_attention(base_name))
        # Without a mask function of that name every mask would silently become None.
        if base_name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base_name])
    return name


def attention_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """The distinct configs that the model's attention modules read their implementation from."""
    configs = {id(c): c for m in model.modules() if isinstance(c := getattr(m, "config", None), PreTrainedConfig)}
    return list(configs.values())


_IMPLEMENTATION = "_attn_implementation_internal"


class _PagedName(str):
    """What a config names its attention within a scope. A copy of the config (deep, or pickled) names the user's."""

    base_name: str | None
    num_scopes: int

    def __new__(cls, base_name: str | None) -> _PagedName:
        self = super().__new__(cls, paged_name(base_name or "eager"))
        self.base_name, self.num_scopes = base_name, 0
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (str, (self.base_name,)) if self.base_name is not None else (type(None), ())


@contextmanager
def paged_attention_scope(configs: Iterable[PreTrainedConfig]) -> Iterator[None]:
    """Within it the model's layers call paged attention. The engine enters it around its own forwards only.

    Outside, the config names the implementation the user chose. Should another thread run the model meanwhile, it finds
    no step and gets exactly that implementation; should it copy the model, the copy has that one.
    """
    # Behind the back of the configs' own attribute access, which looks every name up in several tables.
    attributes = [vars(config) for config in configs]
    entered: list[_PagedName] = []
    with PROCESS.lock:  # models of different threads may share a config
        for own in attributes:
            if not isinstance(own[_IMPLEMENTATION], _PagedName):
                own[_IMPLEMENTATION] = _PagedName(own[_IMPLEMENTATION])
            own[_IMPLEMENTATION].num_scopes += 1
            entered.append(own[_IMPLEMENTATION])
    try:
        yield
    finally:
        with PROCESS.lock:
            for own, name in zip(attributes, entered, strict=True):
                name.num_scopes -= 1
                if not name.num_scopes and own[_IMPLEMENTATION] is name:  # else a user has set another one meanwhile
                    own[_IMPLEMENTATION] = name.base_name


def leave_all_scopes(model: nn.Module) -> None:
    """After a fork: the threads that would do it are not there."""
    for config in attention_configs(model):
        own = vars(config)
        if isinstance(own[_IMPLEMENTATION], _PagedName):
            own[_IMPLEMENTATION] = own[_IMPLEMENTATION].base_name
