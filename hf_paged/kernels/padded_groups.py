"""`PaddedGroup`: sequences of a step, padded to one length, for attention in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class GatherView:
    """The keys one group of sequences attends to, for one attention kind (full, or a window of one width).

    Attributes:
        block_table: `[G, N]` int64, physical blocks to gather; past a sequence's end, the null block.
        mask: `[G, 1, Q, N * block_size]` additive, 0 where a query may attend and -inf elsewhere.
        first: `[G]` int64, places of the first keys.
        block_rows: Row indices of the gather, the same for all layers; filled in by the first.
    """

    block_table: Tensor
    mask: Tensor
    first: Tensor
    block_rows: Tensor | None = None


@dataclass(slots=True, eq=False)
class PaddedGroup:
    """Sequences of similar query and context length, padded to each other inside the attention only.

    Attributes:
        token_index: `[G, Q]` int64, rows of the packed batch; short queries repeat their last token.
        is_real: `[G, Q]` bool, False at those repeats; `None` when there are none.
        block_table: `[G, N]` int64.
        query_positions: `[G, Q]` int64, index of each query token in its sequence.
        seq_lens: `[G]` int64, tokens of each sequence including this step's.
        longest: The largest of `seq_lens`.
        is_whole: Whether the queries are all tokens of their sequences: nothing was computed before.
        block_size: Tokens in a block.
        null_block: Index of a block of zeros that no sequence owns.
        block_rows: As a `GatherView`'s.
    """

    token_index: Tensor
    is_real: Tensor | None
    block_table: Tensor
    query_positions: Tensor
    seq_lens: Tensor
    longest: int
    is_whole: bool
    block_size: int
    null_block: int
    block_rows: Tensor | None = None
    _views: dict[tuple[int | None, torch.dtype], GatherView] = field(default_factory=dict)

    def view(self, window: int | None, dtype: torch.dtype) -> GatherView:
        """The gather of a layer with this `window` (`None`: full attention), built at the first layer that asks."""
        key = (window, dtype)
        if key not in self._views:
            self._views[key] = self._build_view(window, dtype)
        return self._views[key]

    def _build_view(self, window: int | None, dtype: torch.dtype) -> GatherView:
        table, start = self.block_table, torch.zeros_like(self.seq_lens)
        if window is not None:
            # Blocks wholly behind the window of the first query are not gathered.
            start = (self.query_positions[:, 0] - (window - 1)).clamp_min(0) // self.block_size
            num_blocks = (self.seq_lens + self.block_size - 1) // self.block_size - start
            width = int(num_blocks.max())  # one host read per attention kind and step, it sizes the gather
            columns = start[:, None] + torch.arange(width, device=table.device)
            inside = columns < table.shape[1]
            table = table.gather(1, columns.clamp_max(table.shape[1] - 1)).masked_fill(~inside, self.null_block)
        num_keys = table.shape[1] * self.block_size
        first = start * self.block_size
        key_positions = first[:, None] + torch.arange(num_keys, device=table.device)
        distance = self.query_positions[:, :, None] - key_positions[:, None, :]  # [G, Q, S]
        hidden = distance < 0  # the last query's position is the last token's, so this hides the padding too
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(distance.shape, dtype=dtype, device=table.device).masked_fill_(hidden, float("-inf"))
        return GatherView(table, mask[:, None], first)
