"""How a step's attention is shared out: a list of items, each some KV tiles of one run, made on the host.

A run is what some new tokens of a sequence read: its only one, or those of a query tile. The programs that a device
runs at once are to read about as much each. So a run is cut into as many items as it has fair shares, to the nearest:
one long sequence among short ones is cut, and the short ones are not. `F` tiles being the fair share of an item,

    F = max(least tiles, tiles of all runs / slots)        items of t tiles = max(1, round(t / F))

so that no item has more than `1.5 F + 1` tiles, and rounding up costs few: at most `slots - 1` items more than there
are runs. A run that is cut has `1.5 F` tiles or more, so at most `2/3 slots` are, into at most `4/3 slots` items
together. All of these follow from the heads and the
device: a launch of as many programs, and scratch for as many parts, are right for any lengths, which is what a CUDA
graph needs.

Decoding is bound by bandwidth, and a part costs some. Query tiles are bound by the program that has most to do: as
soon as this saves it `LEAST_SAVED_TILES`, which take about as long as a combination, each slot is worth a part. Where
rounding down leaves some, runs that have more than their items' fair shares get one item more each, while there are
slots: no more than `slots` items, so that `slots / 2` runs are cut at most.

Layers with a window read other tiles than layers without, and each kind has a list of its own. Items in fractions of
whatever a layer reads would serve all kinds, but not well: where one sequence is much longer than the others, a fair
cut of all tokens leaves the windows of the others whole, and a cut that is fair to both kinds makes parts, which have
to be combined, of sequences that neither would cut.

Tokens that sequences share may be read once for as many of them as a tile has room for: a list of its own, cut in the
same way, of tiles in front of those that each sequence reads by itself. It pays by bytes. Of `n` sequences, each reads
`tokens` fewer, but for one of them; each leaves two partial results instead of none, which are written and read again:

    saved = (n - 1) * tokens * token_bytes - 4 * n * part_bytes

More cuts cost more partial results, but each of them has tiles enough to be worth it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from hf_paged.attention.shared_prefix import SharedPrefixes

LEAST_TILES = 2  # of a fair share of decoding: a part with less is not worth its combination
LEAST_SAVED_TILES = 16  # for the program that has most query tiles and KV tiles to multiply
LEAST_SAVED = 32 << 20  # bytes: what a fast GPU reads in the ten microseconds that the host may take for a launch


class WorkKind(NamedTuple):
    """What a list of work depends on besides the lengths: layers that agree in it share a list.

    Attributes:
        tile: Tokens of a KV tile.
        slots: Items that the device works on at once.
        window: How many tokens are seen; 0: all.
        queries: New tokens of a run: 1, or those of a query tile.
        part: Runs are not cut into fair shares but at multiples of so many tokens of their sequence, a multiple of
            `tile`; 0: they are. What follows bounds fair shares alone.
    """

    tile: int
    slots: int
    window: int = 0
    queries: int = 1
    part: int = 0

    def max_items(self, num_runs: int) -> int:
        """Items of so many runs, whatever their lengths."""
        return num_runs + self.slots - 1

    def max_split(self, num_runs: int) -> int:
        """New tokens among them whose run has several items."""
        return min(num_runs, 2 * self.slots // 3) * self.queries

    @property
    def max_parts(self) -> int:
        """The most parts of these: an item makes one for each of its tokens."""
        return 4 * self.slots // 3 * self.queries


class Together(NamedTuple):
    """What reading shared tokens once for several sequences depends on, besides lengths and tables.

    Attributes:
        tile: Tokens of a KV tile, a power of two as `WorkKind`'s.
        most: Sequences of an item.
        token_bytes: The bytes of a token's keys and values in the layer.
        part_bytes: The bytes of a sequence's partial result.
    """

    tile: int
    slots: int
    most: int
    token_bytes: int
    part_bytes: int


class DecodeWork(NamedTuple):
    """A list on the device.

    Attributes:
        items: `[I, 4]` int32, see `share_out`, or `[I, 8]`, see `share_out_queries`; a sequence below 0: nothing to do.
        split: `[S, 4]` int32, see there; 0 parts: nothing to do.
        max_parts: All parts are among the first so many.
        shared_items: `[J, 4]` int32, see `SharedTiles`; `None`: nothing is read together.
        members: `[S, 4]` int32, see `SharedTiles`.
    """

    items: Tensor
    split: Tensor
    max_parts: int
    shared_items: Tensor | None = None
    members: Tensor | None = None


class SharedTiles(NamedTuple):
    """What is read once for several sequences, and what of each this leaves.

    Attributes:
        items: `[J, 4]` int32: the first of some members, how many, their first tile, how many of `Together.tile`. Those
            of the same members are next to each other.
        order: `[S]` int64, sequences; members are numbered in this order.
        first_items: `[S]` int64, in this order: the first of the items that a member is in, if it is in any.
        tokens: `[S]` int64 by sequence, read by these items; a multiple of both kinds of tile.
        parts: `[S]` int64 by sequence, how many items it is in, each of which makes a part.
    """

    items: np.ndarray
    order: np.ndarray
    first_items: np.ndarray
    tokens: np.ndarray
    parts: np.ndarray

    def members(self, split: np.ndarray) -> np.ndarray:
        """`[S, 4]` int32: a member's sequence, and the part that item 0 would make for it; the items count on."""
        first_parts = np.zeros(len(self.order), dtype=np.int64)
        first_parts[split[:, 1]] = split[:, 2]
        members = np.zeros((len(self.order), 4), dtype=np.int32)
        members[:, 0], members[:, 1] = self.order, first_parts[self.order] - self.first_items
        return members


def read_together(
    prefixes: SharedPrefixes, kind: WorkKind, together: Together, least_saved: float = LEAST_SAVED
) -> SharedTiles | None:
    """The list for shared tokens; `None`: each sequence had better read by itself.

    Args:
        kind: Of the layers, which have no window.
        least_saved: Bytes of a layer that are worth another launch.
    """
    runs = prefixes.items(2, together.most)
    if runs is None:
        return None
    first, count = runs[:, 0].astype(np.int64), runs[:, 1].astype(np.int64)
    unit = max(kind.tile, together.tile)
    tokens = runs[:, 2].astype(np.int64) // unit * unit
    saved = (count - 1) * tokens * together.token_bytes - 4 * count * together.part_bytes
    kept = np.flatnonzero((tokens > 0) & (saved > min(least_saved, 0)))
    if not len(kept) or saved[kept].sum() < least_saved:
        return None
    tiles = tokens[kept] // together.tile
    cuts = _cuts(tiles, together.slots)
    starts = np.cumsum(cuts) - cuts
    run, _, start, size = _cut(np.zeros_like(tiles), tiles, cuts)
    items = np.stack([first[kept][run], count[kept][run], start, size], axis=1).astype(np.int32)
    of_runs = np.zeros((3, len(runs)), dtype=np.int64)
    of_runs[:, kept] = tokens[kept], cuts, starts
    of_members = np.repeat(of_runs, count, axis=1)
    of_sequences = np.empty_like(of_members[:2])
    of_sequences[:, prefixes.order] = of_members[:2]
    return SharedTiles(items, prefixes.order, of_members[2], *of_sequences)


def share_out(seq_lens: np.ndarray, kind: WorkKind, shared: SharedTiles | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The list for sequences with one new token each.

    Args:
        seq_lens: `[S]` tokens of each; one of 0 has one item of no tiles.
        shared: What is read by another list.

    Returns:
        `[I, 4]` int32 items: the part that it makes, if it is not all of the sequence; the sequence, its first tile,
        how many. Those of a sequence are next to each other and in order, those with most to read first.
        `[S', 4]` int32, the sequences of several parts: 0, the sequence, its first part, how many. First come those of
        shared tiles.
    """
    lens = seq_lens.astype(np.int32)
    first = np.maximum(lens - kind.window, 0) // kind.tile if kind.window else np.zeros_like(lens)
    if shared is not None:
        first = (shared.tokens // kind.tile).astype(np.int32)
    tiles = -(-lens // kind.tile) - first
    counts = _cuts(tiles, kind.slots)
    order = np.argsort(-tiles, kind="stable")
    first, tiles, counts = first[order], tiles[order], counts[order]
    starts = np.cumsum(counts) - counts
    row, place, start, size = _cut(first, tiles, counts)
    is_split: slice | np.ndarray
    if shared is None:  # the first ones are split, and their items are the parts
        numbers, first_parts, parts = np.arange(len(row)), starts, counts
        is_split = slice(np.count_nonzero(counts > 1))
    else:
        others = shared.parts[order]
        parts = np.where((counts > 1) | (others > 0), counts + others, 0)
        first_parts, is_split = np.cumsum(parts) - parts, parts > 0
        numbers = (first_parts + others)[row] + place
    items = np.empty((len(row), 4), dtype=np.int32)
    items[:, 0], items[:, 1], items[:, 2], items[:, 3] = numbers, order[row], start, size
    parts = parts[is_split]
    split = np.zeros((len(parts), 4), dtype=np.int32)
    split[:, 1], split[:, 2], split[:, 3] = order[is_split], first_parts[is_split], parts
    return items, split


def share_out_queries(
    query_lens: np.ndarray, seq_lens: np.ndarray, starts: np.ndarray, rows: np.ndarray, kind: WorkKind
) -> tuple[np.ndarray, np.ndarray]:
    """The list for sequences with any number of new tokens each, which are cut into tiles of `kind.queries`.

    Args:
        query_lens: `[S]` new tokens of each.
        seq_lens: `[S]` tokens of each including them.
        starts: `[S]` where in the batch they begin.
        rows: `[S]` which sequences of the batch these are.

    Returns:
        `[I, 8]` int32 items: the part that it makes for the first of its new tokens, if it is not all of the run; the
        sequence, the first KV tile, how many; the first new token, of how many items its run is, 0, 0. The parts of a
        token are next to each other. Those with most to read first.
        `[N, 4]` int32, tokens with several parts: 0, the token in the batch, its first part, how many.
    """
    own, place = spread(-(-query_lens // kind.queries))
    begin = place * kind.queries
    position = (seq_lens - query_lens)[own] + begin
    num_tokens = np.minimum(kind.queries, query_lens[own] - begin)
    first = np.maximum(position - kind.window + 1, 0) // kind.tile if kind.window else np.zeros_like(position)
    tiles = (position + num_tokens - 1) // kind.tile + 1 - first
    order = np.argsort(-tiles, kind="stable")
    own, begin, num_tokens, first, tiles = own[order], begin[order], num_tokens[order], first[order], tiles[order]
    if kind.part:
        unit = kind.part // kind.tile
        counts = (first + tiles - 1) // unit + 1 - first // unit
        run, place = spread(counts)
        start = np.maximum(first[run], (first[run] // unit + place) * unit)
        size = np.minimum((first + tiles)[run], (first[run] // unit + place + 1) * unit) - start
    else:
        counts = _cuts(tiles, kind.slots, 1, LEAST_SAVED_TILES)
        run, place, start, size = _cut(first, tiles, counts)
    num_split = np.where(counts > 1, num_tokens, 0)
    parts = np.cumsum(num_split * counts) - num_split * counts
    items = np.zeros((len(run), 8), dtype=np.int32)
    items[:, 0], items[:, 1], items[:, 2], items[:, 3] = parts[run] + place, rows[own[run]], start, size
    items[:, 4], items[:, 5] = begin[run], counts[run]
    run, place = spread(num_split)
    split = np.zeros((len(run), 4), dtype=np.int32)
    split[:, 1], split[:, 3] = (starts[own] + begin)[run] + place, counts[run]
    split[:, 2] = parts[run] + place * counts[run]
    return items, split


def _cuts(tiles: np.ndarray, slots: int, least: int = LEAST_TILES, least_saved: int = 0) -> np.ndarray:
    """Items that so many tiles make, at least one each.

    Args:
        least: Tiles of a fair share.
        least_saved: How many fewer the longest item must have than the longest run, or none is cut; and runs that are
            cut fill all slots. 0: what matters is the sum alone.
    """
    tiles = tiles.astype(np.int64)
    share = max(least * slots, int(tiles.sum()))  # of all slots
    if least_saved and (int(tiles.max()) - least_saved) * slots < share:
        return np.ones_like(tiles)
    counts = np.maximum((2 * tiles * slots + share) // (2 * share), 1)
    if least_saved:
        rounded_down = np.flatnonzero(tiles * slots > counts * share)
        counts[rounded_down[: max(slots - int(counts.sum()), 0)]] += 1
    return counts


def spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each of so many of each kind: its kind, and its place among those."""
    kind = np.repeat(np.arange(len(counts)), counts)
    return kind, np.arange(len(kind)) - (np.cumsum(counts) - counts)[kind]


def _cut(
    first: np.ndarray, tiles: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cuts runs of tiles into so many items each, which differ by a tile at most.

    Returns:
        Of each item its run, its place in the run, its first tile and how many.
    """
    run, place = spread(counts)
    least, more = np.divmod(tiles, counts)  # the first `more` have one tile more than the others
    return run, place, first[run] + place * least[run] + np.minimum(place, more[run]), least[run] + (place < more[run])
