"""`EncoderRows`: the tokens of a padded batch that an encoder reads. Its layers on CPU compute no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.attention.lazy import lazy


class EncoderRows:
    """Rows of one run of tokens each, with padding on either side.

    A row attends to its own tokens, by the model's own attention function, as it would alone: its bits do not depend on
    the rows beside it.

    Attributes:
        shape: `(rows, columns)` of the batch.
        runs: The columns of each row that are no padding.
    """

    def __init__(self, shown: Tensor, runs: list[slice]) -> None:
        """See `of`; `shown`: `[rows, columns]` bool."""
        self.shape = tuple(shown.shape)
        self.runs = runs
        self._shown = shown
        self._num_tokens = sum(run.stop - run.start for run in runs)
        self._masks: dict[int, tuple[Tensor, list[Tensor | None]]] = {}
        self._packed: tuple[Tensor, int, Tensor] | None = None  # states, their version, and the same without padding

    @classmethod
    def of(cls, mask: Tensor) -> EncoderRows | None:
        """Those of a mask `[rows, columns]` on CPU; `None`: a row of it is empty, or has a gap."""
        shown = mask != 0
        counts, first = shown.sum(dim=1), shown.int().argmax(dim=1)
        starts, stops = first.tolist(), (first + counts).tolist()
        runs = [slice(*run) for run in zip(starts, stops, strict=True)]
        columns = torch.arange(mask.shape[1], device="cpu")
        is_run = (columns >= first[:, None]) & (columns < (first + counts)[:, None])
        return cls(shown, runs) if bool((counts > 0).all()) and torch.equal(is_run, shown) else None

    @lazy
    def _places(self) -> tuple[Tensor, Tensor] | None:
        """`[tokens]` and `[columns without one]`, where they lie in the batch; `None`: it has no padding."""
        shown = self._shown.flatten()
        return None if bool(shown.all()) else (shown.nonzero()[:, 0], (~shown).nonzero()[:, 0])

    @property
    def has_padding(self) -> bool:
        return self._places is not None

    def pack(self, states: Tensor) -> Tensor:
        """`[1, tokens, width]` of `[rows, columns, width]`: the same object for the same states."""
        assert self._places is not None
        if self._packed is None or self._packed[0] is not states or not self._packed[1] == _version(states) >= 0:
            self._packed = states, _version(states), states.flatten(0, 1)[self._places[0]][None]
        return self._packed[2]

    def unpack(self, states: Tensor) -> Tensor:
        """The reverse of `pack`; padding is zero."""
        assert self._places is not None
        tokens, padding = self._places
        padded = states.new_empty(*self.shape, states.shape[-1])
        flat = padded.flatten(0, 1)
        flat[tokens], flat[padding] = states[0], 0
        self._packed = padded, _version(padded), states
        return padded

    def takes(self, query: Tensor, key: Tensor, mask: Any) -> bool:
        """Whether attention is that of the batch's tokens to each other, `[rows, heads, columns, head_dim]`, or packed
        `[1, heads, tokens, head_dim]`.
        """
        if query.ndim != 4 or key.ndim != 4 or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 4)):
            return False
        shapes = {(each.shape[0], each.shape[2]) for each in (query, key)}
        return shapes in ({self.shape}, {(1, self._num_tokens)})

    def attend(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        states: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention by one of transformers' functions, row by row, of what it would be given of all rows."""
        query, _, value = states
        batch, heads, columns, _ = query.shape
        is_packed, first = (batch, columns) != self.shape, 0
        output = query.new_zeros(batch, columns, heads, value.shape[-1])
        for row, (run, seen) in enumerate(zip(self.runs, self._seen(mask), strict=True)):
            place, own = row, run
            if is_packed:
                place, own = 0, slice(first, first + run.stop - run.start)
                first = own.stop
            if position_bias is not None:
                kwargs["position_bias"] = _of_row(position_bias, row, run)
            if seen is None:
                kwargs["is_causal"] = False  # which without a mask some functions ask the module for
            given = [each[place : place + 1, :, own] for each in states]
            output[place, own] = function(module, *given, seen, **kwargs)[0][0]
        return output, None

    def _seen(self, mask: Tensor | None) -> list[Tensor | None]:
        """Of each row the mask among its own tokens; `None`: each sees all of them."""
        if mask is None:
            return [None] * len(self.runs)
        if id(mask) not in self._masks:  # the same one for all layers of a kind
            parts = [_of_row(mask, row, run) for row, run in enumerate(self.runs)]
            shows_all = [bool((part if part.dtype is torch.bool else part == 0).all()) for part in parts]
            found = [None if all_of_it else part for part, all_of_it in zip(parts, shows_all, strict=True)]
            self._masks[id(mask)] = mask, found
        return self._masks[id(mask)][1]


def _of_row(table: Tensor, row: int, run: slice) -> Tensor:
    """Of a table for queries and keys of all rows, `[.., .., columns, columns]`, that of a row; axes of 1 stay."""
    own = table[row : row + 1] if table.shape[0] > 1 else table
    own = own[:, :, run] if own.shape[2] > 1 else own
    return own[..., run] if own.shape[3] > 1 else own


def _version(states: Tensor) -> int:
    """How often it was written to; -1: under inference mode no tensor knows."""
    return -1 if states.is_inference() else states._version
