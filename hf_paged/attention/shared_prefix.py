"""Which sequences of a step begin with the same blocks: these may be read once for all of them.

The block tables show them, whatever the reason: samples and beams of one prompt, or prompts with the same beginning.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST_TOKENS = 64  # that are worth being read together


class SharedPrefixes(NamedTuple):
    """A step's sequences, in runs that share their first tokens; most runs are one sequence.

    Attributes:
        order: `[S]` int64, the sequences, run after run.
        starts: `[R]` int64, the first of each run in `order`.
        counts: `[R]` int64, its sequences.
        tokens: `[R]` int64, the tokens that they share; of one sequence 0.
    """

    order: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray

    def items(self, least: int, most: int) -> np.ndarray | None:
        """Runs that are worth it, cut into parts of about the same size; all others sequence by sequence.

        Args:
            least: Sequences that are worth being read together.

        Returns:
            `[I, 3]` int32: the first of some sequences in `order`, how many, the tokens that they share. `None`: none
            of them has several.
        """
        is_together = self.counts >= max(least, 2)
        if not is_together.any():
            return None
        num_parts = np.where(is_together, -(-self.counts // most), self.counts)
        run = np.repeat(np.arange(len(num_parts)), num_parts)
        part = np.arange(len(run)) - (np.cumsum(num_parts) - num_parts)[run]
        size, more = self.counts // num_parts, self.counts % num_parts  # the first `more` parts have one more
        first = self.starts[run] + part * size[run] + np.minimum(part, more[run])
        count = size[run] + (part < more[run])
        return np.stack([first, count, np.where(count > 1, self.tokens[run], 0)], axis=1).astype(np.int32)


def shared_prefixes(
    tables: np.ndarray, seq_lens: np.ndarray, block_size: int, null_block: int
) -> SharedPrefixes | None:
    """The runs of sequences; `None`: each is by itself.

    A run ends where the next two sequences share less than half of what their neighbours do.

    Args:
        tables: `[S, N]` block tables, padded with the null block, which also stands for blocks that were given back.
    """
    firsts = np.sort(tables[:, 0])
    if not (firsts[1:] == firsts[:-1]).any():
        return None
    order = np.argsort(tables[:, 0], kind="stable")
    tables, lens = tables[order], seq_lens[order]
    least = np.minimum(lens[1:], lens[:-1])
    is_same = tables[1:] == tables[:-1]
    num_blocks = np.where(is_same.all(axis=1), tables.shape[1], is_same.argmin(axis=1))
    num_blocks = np.minimum(num_blocks, -(-least // block_size))
    # What was given back belongs to no sequence: a run of null blocks alone is none.
    is_real = tables[np.arange(len(least)), num_blocks - 1] != null_block
    tokens = np.where(is_real, np.minimum(num_blocks * block_size, least), 0)  # of each and the next
    is_cut = tokens < LEAST_TOKENS
    if is_cut.all():
        return None
    is_cut[1:] |= 2 * tokens[1:] < tokens[:-1]
    is_cut[:-1] |= 2 * tokens[:-1] < tokens[1:]
    ends = np.flatnonzero(is_cut) + 1
    starts, ends = np.concatenate(([0], ends)), np.concatenate((ends, [len(order)]))
    counts = ends - starts
    inside = np.full(len(order), np.iinfo(np.int64).max)
    np.copyto(inside[:-1], tokens, where=~is_cut)
    shared = np.where(counts > 1, np.minimum.reduceat(inside, starts), 0)
    return SharedPrefixes(order, starts, counts, shared)


def one_run(seq_lens: np.ndarray) -> SharedPrefixes:
    """Makes one run of all sequences, which share all tokens of the shortest of `[S]`."""
    num = len(seq_lens)
    tokens = np.array([seq_lens.min() if num > 1 else 0])
    return SharedPrefixes(np.arange(num), np.array([0]), np.array([num]), tokens)
