"""One `model(...)` call over a `PagedCache`, in the caller's padded shape, and results put back into that shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput


@dataclass(slots=True)
class ForwardCall:
    """One `model(...)` call over a `PagedCache`, in the caller's padded shape.

    Attributes:
        input_ids: `[B, q]`, or `None`.
        inputs_embeds: `[B, q, hidden_size]`, or `None`.
        attention_mask: `[B, columns so far + q]`, 0 at padding; `None`: no padding. A mask of another form rules out
            the flat batch.
        position_ids: `[B or 1, q]`, or `None`.
        logits_to_keep: As in transformers: the last so many columns (0: all), or a tensor of column indices.
        others: Every other argument that was given. Any of them rules out the flat batch.
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Any
    position_ids: Tensor | None
    logits_to_keep: int | Tensor
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> Tensor:
        """`input_ids` or `inputs_embeds`, whichever was given."""
        if (self.input_ids is None) == (self.inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        tokens = self.input_ids if self.input_ids is not None else self.inputs_embeds
        assert tokens is not None
        return tokens

    def select(self, rows: Any) -> ForwardCall:
        """The call for some rows of the batch (an index or a slice); tensors of one row serve all rows."""
        batch = self.tokens.shape[0]

        def pick(value: Any) -> Any:
            return value[rows] if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == batch else value

        return ForwardCall(
            pick(self.input_ids),
            pick(self.inputs_embeds),
            pick(self.attention_mask),
            pick(self.position_ids),
            self.logits_to_keep,
            {name: pick(value) for name, value in self.others.items()},
        )

    def repeats_rows(self, fan_out: int) -> bool:
        """Whether the batch is runs of `fan_out` equal rows, with position ids for each of them or for all."""
        positions = self.position_ids
        if positions is not None and positions.shape[:-1] not in ((1,), self.tokens.shape[:1]):
            return False  # of fewer rows, they might be as many as there are runs
        for value in (self.tokens, self.attention_mask, self.position_ids, *self.others.values()):
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == self.tokens.shape[0]:
                if value.shape[0] % fan_out:
                    return False
                runs = value.unflatten(0, (-1, fan_out))
                if not bool((runs == runs[:, :1]).all()):  # a host read, at most one a forward of a fresh cache
                    return False
        return True


def map_batch(output: ModelOutput, batch: int, function: Callable[[Tensor], Tensor]) -> ModelOutput:
    """Applies a function to every tensor of a model output whose first dimension is the batch."""

    def apply(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value) if value.ndim > 1 and value.shape[0] == batch else value
        return type(value)(apply(item) for item in value) if isinstance(value, tuple | list) else value

    return type(output)(**{name: apply(value) for name, value in output.items() if name != "past_key_values"})


def spread_rows(output: ModelOutput, active: list[int], num_rows: int) -> ModelOutput:
    """Puts the active rows' results at their rows; the others are zeros."""

    def spread(value: Tensor) -> Tensor:
        full = value.new_zeros(num_rows, *value.shape[1:])
        full[torch.tensor(active, device=value.device)] = value
        return full

    return map_batch(output, len(active), spread)
