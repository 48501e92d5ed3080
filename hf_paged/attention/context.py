"""How a step, or an encoder's batch, reaches the attention layers of the one forward that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.cache import LayerNotingCache
from hf_paged.attention.encoder_rows import EncoderRows

MARK = "is_hf_paged_sentinel"  # the attribute of a mask that says what it is


@dataclass(frozen=True, slots=True, eq=False)
class WantedTokens:
    """Of a prompt's tokens only the last one's logits are wanted: the others end with the last layer's keys and values.

    Attributes:
        rows: `[K]` int64, their places in the step.
        layer: The number of the last layer.
        make_step: Makes what attention of these tokens alone calls, once the layer's keys and values are stored.
    """

    rows: Tensor
    layer: int
    make_step: Callable[[], PagedStep]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """What the layers of one forward share.

    Attributes:
        sentinel: The `attention_mask` that this forward, and no other, was given.
        wanted: The tokens whose logits are wanted, where they are few and nothing but those can be seen behind the
            last layer.
        noting: Where layers share attention modules, the cache, which knows the layer that such a module computes.
        is_plain: Whether nothing but known code runs in it.
    """

    step: PagedStep
    sentinel: Tensor
    wanted: WantedTokens | None = None
    noting: LayerNotingCache | None = None
    is_plain: bool = False


_CURRENT: ContextVar[ForwardContext | EncoderRows | None] = ContextVar("hf_paged_forward", default=None)


class _Staying(Tensor):
    """A tensor without content, which stays what it is where it is said to be moved, or cut to the number of keys."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> _Staying:
        return self

    def __getitem__(self, index: Any) -> Tensor:
        is_of_keys = isinstance(index, tuple) and len(index) == 4 and index[:3] == (slice(None),) * 3
        return self if is_of_keys else super().__getitem__(index)


@contextmanager
def forward_context(
    step: PagedStep,
    device: torch.device,
    is_moved: bool = False,
    wanted: WantedTokens | None = None,
    noting: LayerNotingCache | None = None,
    is_plain: bool = False,
) -> Iterator[Tensor]:
    """Within it, attention called with the mask that it yields runs over this step; on this thread only.

    The mask has no content. It is the one argument that every model hands down to its attention (some drop extra
    keyword arguments on the way), and the mask builders of transformers return a 4-D mask as it is, so none is built. A
    forward inside this one (a hook's, of another model) has a mask of its own, by which its attention is none of ours.

    Args:
        is_moved: Whether inputs are moved from device to device on their way, or cut to the number of keys.
    """
    sentinel = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=device)
    if is_moved:
        sentinel = sentinel.as_subclass(_Staying)
    setattr(sentinel, MARK, True)
    token = _CURRENT.set(ForwardContext(step, sentinel, wanted, noting, is_plain))
    try:
        yield sentinel
    finally:
        _CURRENT.reset(token)


@contextmanager
def with_step(mask: Tensor, step: PagedStep) -> Iterator[None]:
    """Within it, attention called with the sentinel of this thread's forward runs over another step."""
    token = _CURRENT.set(ForwardContext(step, mask))
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def encoding(rows: EncoderRows) -> Iterator[None]:
    """Within it, attention of this thread is that of an encoder's rows, where it is of their shape."""
    token = _CURRENT.set(rows)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def encoder_rows() -> EncoderRows | None:
    """Those that this thread's attention is of."""
    rows = _CURRENT.get()
    return rows if isinstance(rows, EncoderRows) else None


def is_sentinel(mask: Any) -> bool:
    """Whether a mask is one that `forward_context` made, on whichever thread."""
    return hasattr(mask, MARK)


def check_not_cut(mask: Any) -> None:
    """Refuses a part of the sentinel of this thread's forward, which says nothing any more.

    Raises:
        RuntimeError: The model has cut its mask, and with it tokens of the step.
    """
    context = _CURRENT.get()
    if not isinstance(context, ForwardContext) or not isinstance(mask, Tensor):
        return
    if mask.untyped_storage().data_ptr() == context.sentinel.untyped_storage().data_ptr():
        raise RuntimeError("the model has cut the mask of a packed step: paged attention needs all tokens of it")


def current_context(mask: Tensor) -> ForwardContext:
    """What the layers of the forward that was given this sentinel share.

    Raises:
        RuntimeError: It runs on another thread, or is over.
    """
    context = _CURRENT.get()
    if not isinstance(context, ForwardContext) or context.sentinel is not mask:
        raise RuntimeError("paged attention was called with the mask of another forward, or on another thread")
    return context
