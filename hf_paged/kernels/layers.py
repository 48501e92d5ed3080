"""`LayerKernels`: what lies between a model's matrix products, in one kernel each, and what these can be given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

plainly = torch._C.DisableTorchFunction  # within it, what a tensor is asked for takes no detour by a mode in Python


class InputError(ValueError):
    """Tensors that a kernel is not made for: it would read or write beyond them, or take them for what they are not.

    Raised before anything is computed, so the model's own code can take over.
    """

    def __init__(self, operation: str, expected: str, **given: Tensor) -> None:
        super().__init__(operation, expected, given)

    def __reduce__(self) -> tuple[type[ValueError], tuple[str]]:  # to another process go the words, not the tensors
        return ValueError, (str(self),)

    def __str__(self) -> str:  # put together when it is read: most are caught
        operation, expected, given = self.args
        tensors = (f"{name} {tuple(x.shape)} {x.dtype} {x.device} {x.stride()}" for name, x in given.items())
        return f"{operation} takes {expected}; got {', '.join(tensors)}"


@dataclass(frozen=True, slots=True)
class NormWeight:
    """The parameters of `LayerKernels.rms_norm`."""

    weight: Tensor
    eps: float
    offset: float
    rounds_first: bool


class Place(NamedTuple):
    """Where to write one layer's keys and values in a step: pool, index in it, and slots, as `reshape_and_cache`."""

    kv_cache: Tensor
    layer: int
    slots: Tensor


class LayerKernels(ABC):
    """The operations for one element type. Each method says what it takes and checks it; nothing below it does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def rms_norm(self, states: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        """`states / sqrt(mean(states²) + eps) * (weight + offset)` over the last dimension, computed in float32.

        Args:
            states: `[..., dim]`, contiguous.
            weight: `[dim]`, contiguous.
            eps: Added to the mean.
            offset: Added to the weight.
            rounds_first: Whether the normed states are rounded to their dtype before they are multiplied.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices.
        """
        if not (
            weight.ndim == 1
            and weight.shape[0] > 0
            and states.shape[-1:] == weight.shape
            and states.is_contiguous()
            and weight.is_contiguous()
            and self._are_here(states, weight)
        ):
            raise InputError("rms_norm", "[..., dim] and [dim], contiguous", states=states, weight=weight)
        return self._rms_norm(states, weight, eps, offset, rounds_first)

    def gate(self, gate: Tensor, up: Tensor, linear: float, cubic: float) -> Tensor:
        """`gate * sigmoid(linear * gate + cubic * gate³) * up`: SiLU and GELU's approximations, gated.

        Args:
            gate: `[..., dim]`, each row contiguous and the next at the same distance.
            up: Like `gate`.
            linear: 1 for SiLU.
            cubic: 0 for SiLU.

        Returns:
            `[..., dim]`, contiguous; rounded to the dtype between activation and product, as two operations would.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices.
        """
        strides = _row_stride(gate), _row_stride(up)
        if strides[0] is None or strides[1] is None or gate.shape != up.shape or not self._are_here(gate, up):
            raise InputError("gate", "two times [..., dim], rows evenly spaced", gate=gate, up=up)
        return self._gate(gate, up, strides[0], strides[1], linear, cubic)

    def rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounds: bool
    ) -> tuple[Tensor, Tensor]:
        """Rotates pairs of the first `rotary_dim` elements of each head: `x * cos - y * sin`, `y * cos + x * sin`.

        Args:
            query: `[1, heads, tokens, dim]`, the last dimension contiguous.
            key: Like `query`, of any number of heads.
            cos: `[1, tokens, rotary_dim]`, contiguous; an even number, at most `dim`.
            sin: Like `cos`.
            interleaved: Whether pairs are neighbours, or half a `rotary_dim` apart.
            rounds: Whether both products are rounded to the dtype before they are added.

        Returns:
            Rotated query and key, as if transposed from a contiguous `[1, tokens, heads, dim]`.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices.
        """
        if not (
            query.ndim == key.ndim == 4
            and cos.ndim == 3
            and (shape := cos.shape) == sin.shape
            and query.shape[0] == key.shape[0] == shape[0] == 1
            and query.shape[2] == key.shape[2] == shape[1]
            and (dim := query.shape[3]) == key.shape[3]
            and shape[2] <= dim
            and shape[2] % 2 == 0
            and query.stride(3) == key.stride(3) == 1
            and cos.is_contiguous()
            and sin.is_contiguous()
            and self._are_here(query, key, cos, sin)
        ):
            expected = "twice [1, heads, tokens, dim], twice [1, tokens, an even number up to dim], rows contiguous"
            raise InputError("rotary", expected, query=query, key=key, cos=cos, sin=sin)
        return self._rotary(query, key, cos, sin, interleaved, rounds)

    @abstractmethod
    def _are_here(self, *tensors: Tensor) -> bool:
        """Whether all are of the kernels' dtype, and where these can reach them together."""

    @abstractmethod
    def _rms_norm(self, states: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor: ...

    @abstractmethod
    def _gate(self, gate: Tensor, up: Tensor, gate_row: int, up_row: int, linear: float, cubic: float) -> Tensor: ...

    @abstractmethod
    def _rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounds: bool
    ) -> tuple[Tensor, Tensor]: ...


def _row_stride(states: Tensor) -> int | None:
    """Elements from one row of `[..., dim]` to the next, if that is the same everywhere and each row is contiguous."""
    if states.ndim == 0 or states.shape[-1] == 0:
        return None
    if states.is_contiguous():
        return states.shape[-1]
    *sizes, _ = states.shape
    *strides, last = states.stride()
    if last != 1:
        return None
    step = following = None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if step is None:
            step = stride
        elif stride != following:
            return None
        following = size * stride
    return states.shape[-1] if step is None else step
