"""`Int8Linears`: linear layers of the engine's forwards on CPU, multiplied in 8-bit integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.model.packed_linears import ALWAYS, Layer, PackedLinears, can_take, out_in
from hf_paged.model.sharding import ranks_of

_LARGEST = 127  # of an integer: the same on both sides of 0


class Int8Linears(PackedLinears):
    """Every linear layer but the head, whatever is faster: other tokens than the model's own, the same everywhere.

    The head, which decides between tokens, is multiplied as `PackedLinears` does it.
    """

    def _choose(self, model: nn.Module, modules: list[Any]) -> list[Layer]:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
        layers = super()._choose(model, [module for module in modules if module is head])
        for module in modules:
            if module is not head:
                layers.append(Layer(module, Int8(out_in(module)), ALWAYS))
                self._watch(layers[-1])
        return layers


class Int8:
    """A weight in integers, with a scale for each output; inputs are rounded with a scale for each row.

    A row's result doesn't depend on the rows beside it: sums of integers are exact.
    """

    __slots__ = ("_scales", "_weight")

    def __init__(self, weight: Tensor) -> None:
        """`weight`: `[out, in]`, of floating point."""
        values, scales = _rounded(weight.float())
        self._weight, self._scales = values.t(), scales[:, 0].contiguous()  # as the product reads it: [in, out]

    def __call__(self, states: Tensor, bias: Tensor | None) -> Tensor:
        values, scales = _rounded(states.reshape(-1, states.shape[-1]).float())
        result = torch._int_mm(values, self._weight) * scales
        result *= self._scales
        if bias is not None:
            result += bias
        return result.to(states.dtype).view(*states.shape[:-1], -1 if len(result) else self._scales.shape[0])


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[N, width]` as int8, and what each row is to be multiplied by, `[N, 1]`."""
    scales = rows.abs().amax(-1, keepdim=True).div_(_LARGEST)
    # A row of zeros has no scale; one that is no number has none either, and its scale makes its results none.
    return rows.div(scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().nan_to_num_(0.0).to(torch.int8), scales


def why_not_int8(model: nn.Module) -> str | None:
    """Why this model's linear layers can't be multiplied in integers, if they can't."""
    if ranks_of(model) is not None:
        return "its weights are shared out between processes"
    if not any(can_take(module) for module in model.modules()):
        return "none of its linear layers has a large plain weight on CPU"
    largest = torch.full((32, 64), _LARGEST, dtype=torch.int8, device="cpu")
    try:
        product = torch._int_mm(largest, largest.t())
    except (AttributeError, RuntimeError) as error:
        return f"this build of torch has no product of integers ({error})"
    if not bool((product == 64 * _LARGEST**2).all()):  # oneDNN's sums in 16 bits, where there is no VNNI
        return "torch's product of integers is not exact on this processor"
    return None
