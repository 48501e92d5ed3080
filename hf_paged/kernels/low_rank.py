"""`LowRank`: what an adapter adds behind a linear layer; and that sum in plain torch, each row its own adapter's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """`scale * (b @ (a @ x) + bias)`, behind a linear layer with a weight `[out, in]`.

    Attributes:
        a: `[rank, in]`.
        b: `[out, rank]`, of its dtype.
        bias: `[out]`, of their dtype; `None`: zero.
        output_scale: `[out]`, float32. With one (DoRA) the layer's own product is scaled, too, but not its bias:
            `output_scale * (weight @ x + scale * (b @ (a @ x) + bias)) + base_bias`.
    """

    a: Tensor
    b: Tensor
    scale: float
    bias: Tensor | None = None
    output_scale: Tensor | None = None

    def to(self, device: torch.device) -> LowRank:
        """The same on a device."""
        if self.a.device == device:
            return self
        parts = (self.a, self.b, self.bias, self.output_scale)
        a, b, bias, output_scale = (None if part is None else part.to(device) for part in parts)
        assert a is not None and b is not None
        return LowRank(a, b, self.scale, bias, output_scale)


def add_low_rank(
    states: Tensor,
    output: Tensor,
    slots: Tensor,
    entries: Sequence[LowRank | None],
    base_bias: Tensor | None = None,
) -> None:
    """Adds to each row of a linear layer's output what its adapter does, computed in float32, or float64 of float64.

    Args:
        states: `[..., in]`, what the layer was given.
        output: `[..., out]`, contiguous, what it made of them; changed in place.
        slots: `[rows]`, which of the entries is a row's; below 0: none, the row stays as it is.
        entries: By slot; `None`: that adapter leaves the layer alone.
        base_bias: `[out]`, the layer's own, which `output_scale` leaves out; `None`: zero.
    """
    dtype = torch.promote_types(output.dtype, torch.float32)
    states, output = states.reshape(-1, states.shape[-1]), output.view(-1, output.shape[-1])
    base = torch.zeros((), dtype=dtype) if base_bias is None else base_bias.to(dtype)
    for slot in slots.unique().tolist():
        if slot < 0 or (own := entries[slot]) is None:
            continue
        rows = (slots == slot).nonzero().squeeze(1)
        added = states[rows].to(dtype) @ own.a.to(dtype).t() @ own.b.to(dtype).t()
        added = own.scale * (added if own.bias is None else added + own.bias.to(dtype))
        result = output[rows].to(dtype)
        if own.output_scale is None:
            result = result + added
        else:
            result = own.output_scale.to(dtype) * (result - base + added) + base
        output[rows] = result.to(output.dtype)
