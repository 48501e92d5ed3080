"""Ways to multiply by a weight on CPU, each from a copy that lies as the way reads it, or from the weight itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hf_paged.kernels import cpu_linear

# From states `[..., in]` and a bias or none to `[..., out]`.
Multiply = Callable[[Tensor, Tensor | None], Tensor]
# From a weight `[out, in]` to what multiplies by it; `None`: not by one like this.
Way = Callable[[Tensor], Multiply | None]

_NUM_ROWS = 32  # that oneDNN is to pack for


def panels(weight: Tensor) -> Multiply | None:
    """Our kernel in C: at the speed of memory for few rows, near the processor's limit for many; no half of AMX."""
    kernel = cpu_linear.load(weight.dtype)
    if isinstance(kernel, str) or weight.shape[1] % cpu_linear.DEPTHS[weight.dtype]:
        return None
    return Panels(kernel, kernel.pack(weight))


class Panels:
    """What multiplies by a weight that was copied into our kernel's layout.

    Attributes:
        kernel: That of its dtype.
        weight: The copy.
    """

    __slots__ = ("__weakref__", "kernel", "weight")

    def __init__(self, kernel: cpu_linear.CPULinear, weight: cpu_linear.PanelWeight) -> None:
        self.kernel, self.weight = kernel, weight

    def __call__(self, states: Tensor, bias: Tensor | None) -> Tensor:
        return self.kernel.multiply(states, self.weight, bias)


def onednn(weight: Tensor) -> Multiply:
    """By oneDNN, whose matrix units (AMX) half precision gains by.

    In float32 torch multiplies by another library, which is slow on AMD; in half precision it packs the weight anew
    in every call. This is what torch's own compiler emits: a private operation.

    Raises:
        RuntimeError, AttributeError, NotImplementedError: It is not in this build of torch, or not on this machine.
    """
    return onednn_in_place(torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), _NUM_ROWS))


def onednn_in_place(weight: Tensor) -> Multiply:
    """The same without a copy."""
    return partial(_onednn, weight)


def _onednn(weight: Tensor, states: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(states, weight, bias, "none", [], "")


WITH_COPY: tuple[Way, ...] = (panels, onednn)
WITHOUT_COPY: tuple[Way, ...] = (onednn_in_place,)
