"""`WantedTokens`: a step's tokens whose logits are wanted, for a last layer that computes no others."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.lazy import lazy


class WantedTokens:
    """Of a prompt's tokens only the last one's logits are wanted: the others end with the last layer's keys and values.

    Attributes:
        rows: `[K]` int64, their places in the step.
        layer: The number of the last layer.
    """

    def __init__(self, rows: Tensor, layer: int, make_step: Callable[[], PagedStep]) -> None:
        """`make_step` makes what attention of these tokens alone calls, once the layer's keys and values are stored."""
        self.rows, self.layer = rows, layer
        self._make_step = make_step

    @lazy
    def step(self) -> PagedStep:
        return self._make_step()
