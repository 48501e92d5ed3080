"""`SpanMasks`: masks in which runs of tokens see each other, whichever comes first: read, and drawn."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

SLIDING = "sliding_attention"
Spans = list[list[tuple[int, int]]]
"""The first column, and that behind the last, of runs of new columns that see each other; for each row."""


@dataclass(frozen=True)
class MaskForm:
    """How layers of a kind see such runs.

    Attributes:
        sees_ahead: Whether tokens of a run see those behind them; if not, layers are causal.
        keeps_window: Whether a token sees of its run only what its window reaches, too.
    """

    sees_ahead: bool
    keeps_window: bool


FORMS = [MaskForm(*each) for each in itertools.product((True, False), repeat=2)]


class SpanMasks:
    """What is known of a model's masks: each that is read may rule out forms."""

    def __init__(self, window: int | None) -> None:
        """Draws for layers of one kind, which may have a window."""
        self._window = window
        self._forms: dict[str, set[MaskForm]] = {}

    def read(self, masks: dict[str, Tensor | None]) -> Spans | None:
        """The runs of new columns that see each other.

        Args:
            masks: By kind of layers `[B, new, columns]` bool, what each new column sees; `None`: what is before it. At
                least one is a tensor.

        Returns:
            `None`: the masks are not understood. They are if all kinds see the same runs, or none, and nothing else
            that lies ahead, and in each the same as ever.
        """
        drawn = {kind: mask for kind, mask in masks.items() if mask is not None}
        seen = [[_spans(row[:, -mask.shape[1] :]) for row in mask] for mask in drawn.values()]
        spans = next((own for own in seen if any(own)), seen[0])
        fitting: dict[str, set[MaskForm]] = {}
        for kind, mask in masks.items():
            known = self._forms.setdefault(kind, set(FORMS)).copy()  # which other threads may make smaller
            if mask is None:
                fitting[kind] = {form for form in known if not (any(spans) and form.sees_ahead)}
            else:
                fitting[kind] = {form for form in known if self._fits(kind, form, mask, spans)}
            if not fitting[kind]:
                return None
        for kind, forms in fitting.items():
            self._forms[kind].intersection_update(forms)
        return spans

    def draw(
        self,
        kind: str,
        attention_mask: Tensor,
        query_width: int,
        spans: list[tuple[int, int, int]],
        dtype: torch.dtype,
    ) -> Tensor:
        """`[B, 1, Q, W]`, what is added to the scores of the last `Q` columns.

        Args:
            attention_mask: `[B, W]`, 0 at padding.
            query_width: `Q`.
            spans: Rows, and columns of theirs.
        """
        known = self._forms.get(kind, FORMS)
        form = next(form for form in FORMS if form in known)
        width, device = attention_mask.shape[1], attention_mask.device
        rows: Spans = [[] for _ in attention_mask]
        for row, start, stop in spans:
            rows[row].append((start, stop))
        drawn = [self._visible(kind, form, query_width, width, own, device) for own in rows]
        visible = torch.stack(drawn) & attention_mask[:, None].bool()
        masks = torch.zeros(visible.shape, dtype=dtype, device=device)
        return masks.masked_fill(~visible, torch.finfo(dtype).min)[:, None]

    def _visible(
        self, kind: str, form: MaskForm, length: int, width: int, spans: list[tuple[int, int]], device: torch.device
    ) -> Tensor:
        """`[length, width]`, what the last columns of a row see whose runs are at these columns."""
        query = torch.arange(width - length, width, device=device)[:, None]
        key = torch.arange(width, device=device)
        visible = key <= query
        within = key > query - self._window if kind == SLIDING and self._window is not None else None
        if within is not None:
            visible &= within
        if form.sees_ahead:
            for start, stop in spans:
                first = max(start - width + length, 0)
                visible[first : stop - width + length, start:stop] = True
        return visible & within if within is not None and form.keeps_window else visible

    def _fits(self, kind: str, form: MaskForm, mask: Tensor, spans: Spans) -> bool:
        """Whether masks are of this form, but for left padding."""
        _, length, width = mask.shape
        past = width - length
        query = torch.arange(past, width)
        for visible, own in zip(mask, spans, strict=True):
            columns = [(start + past, stop + past) for start, stop in own]
            expected = self._visible(kind, form, length, width, columns, mask.device)
            seen = visible.any(dim=0)
            first = int(seen.int().argmax()) if bool(seen.any()) else width  # what nothing sees is padding
            expected[:, :first] = False
            if not bool((expected == visible)[query >= first].all()):
                return False
        return True


def _spans(visible: Tensor) -> list[tuple[int, int]]:
    """Runs of columns that see each other.

    Args:
        visible: `[n, n]`, which of the new columns each of them sees.
    """
    length = visible.shape[0]
    columns = torch.arange(length)
    last = torch.where(visible, columns, -1).amax(dim=1).tolist()  # that each one sees
    spans: list[tuple[int, int]] = []
    column = 0
    while column < length:
        if last[column] > column:
            spans.append((column, last[column] + 1))
            column = last[column]
        column += 1
    return spans
