"""How a step's decoding is shared out: a list of items, each some KV tiles of one sequence, made on the host.

The programs that a device runs at once are to read about as much each. So a sequence is cut into as many items as it
has fair shares, to the nearest: one long sequence among short ones is cut, and the short ones are not. `F` tiles being
the fair share of an item,

    F = max(LEAST_TILES, ceil(tiles of all sequences / slots))        items of t tiles = max(1, round(t / F))

so that no item has more than `1.5 F + 1` tiles, and rounding up costs few: at most `slots - 1` items more than there
are sequences. A sequence that is cut has `1.5 F` tiles or more, so at most `2/3 slots` are, into at most `4/3 slots`
items together. All of these follow from the heads and the device: a launch of as many programs, and scratch for as many
parts, are right for any lengths, which is what a CUDA graph needs.

Layers with a window read other tiles than layers without, and each kind has a list of its own. Items in fractions of
whatever a layer reads would serve all kinds, but not well: where one sequence is much longer than the others, a fair
cut of all tokens leaves the windows of the others whole, and a cut that is fair to both kinds makes parts, which have
to be combined, of sequences that neither would cut.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

LEAST_TILES = 2  # of a fair share: a part with less is not worth its combination


class WorkKind(NamedTuple):
    """What a list of work depends on besides the lengths: layers that agree in it share a list.

    Attributes:
        tile: Tokens of a KV tile.
        slots: Items that the device works on at once.
        window: Tokens that are seen; 0: all.
        num_splits: Items of each sequence that has the tiles for it; 0: as the lengths say.
    """

    tile: int
    slots: int
    window: int = 0
    num_splits: int = 0

    def max_items(self, num_sequences: int) -> int:
        """Items of so many sequences, whatever their lengths."""
        return num_sequences * self.num_splits if self.num_splits else num_sequences + self.slots - 1

    def max_split(self, num_sequences: int) -> int:
        """Sequences among them with several items."""
        return num_sequences if self.num_splits else min(num_sequences, 2 * self.slots // 3)

    def max_parts(self, num_sequences: int) -> int:
        """Items of these."""
        return num_sequences * self.num_splits if self.num_splits else 4 * self.slots // 3


class DecodeWork(NamedTuple):
    """A list on the device.

    Attributes:
        items: `[I, 4]` int32, see `share_out`; a sequence below 0: nothing to do.
        split: `[S, 4]` int32, see `share_out`; 0 items: nothing to do.
        max_parts: The items of split sequences are among the first so many.
    """

    items: Tensor
    split: Tensor
    max_parts: int


def share_out(seq_lens: np.ndarray, kind: WorkKind) -> tuple[np.ndarray, np.ndarray]:
    """The list for sequences with one new token each.

    Args:
        seq_lens: `[S]` tokens of each; one of 0 has one item of no tiles.
        kind: Of the layers.

    Returns:
        `[I, 4]` int32 items: the table group (0, the only one there is), the sequence, its first tile, how many. Those
        of a sequence are next to each other and in order, those of the longest sequence first.
        `[S', 4]` int32, the sequences with several items, which are the longest: the table group, the sequence, its
        first item, how many.
    """
    lens = seq_lens.astype(np.int32)
    first = np.maximum(lens - kind.window, 0) // kind.tile if kind.window else np.zeros_like(lens)
    tiles = -(-lens // kind.tile) - first
    if kind.num_splits:
        counts = np.clip(tiles, 1, kind.num_splits)
    else:
        share = max(LEAST_TILES, -(-int(tiles.sum()) // kind.slots))
        counts = np.maximum((2 * tiles + share) // (2 * share), 1)
    order = np.argsort(-tiles, kind="stable")
    first, tiles, counts = first[order], tiles[order], counts[order]
    starts = np.cumsum(counts) - counts
    row = np.repeat(np.arange(len(lens)), counts)
    part = np.arange(len(row)) - starts[row]
    least, more = np.divmod(tiles, counts)  # the first `more` parts have one tile more than the others
    items = np.zeros((len(row), 4), dtype=np.int32)
    items[:, 1] = order[row]
    items[:, 2] = first[row] + part * least[row] + np.minimum(part, more[row])
    items[:, 3] = least[row] + (part < more[row])
    num_split = int(np.count_nonzero(counts > 1))
    split = np.zeros((num_split, 4), dtype=np.int32)
    split[:, 1], split[:, 2], split[:, 3] = order[:num_split], starts[:num_split], counts[:num_split]
    return items, split
