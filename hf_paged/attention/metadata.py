"""What every attention layer of one step needs to know about the packed batch, computed once a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.decode_work import (
    LEAST_SAVED,
    DecodeWork,
    Together,
    WorkKind,
    read_together,
    share_out,
    share_out_queries,
    spread,
)
from hf_paged.attention.lazy import lazy
from hf_paged.attention.shared_prefix import SharedPrefixes, shared_prefixes
from hf_paged.core.batch import GroupTables
from hf_paged.kernels.padded_groups import PaddedGroup
from hf_paged.kernels.transfers import to_device

_OF_TABLES = ("host_slots", "slot_mapping", "block_tables", "groups", "prefill_groups", "shared_prefixes")


class AttentionMetadata:
    """One step's packed batch: `T` tokens of `S` sequences, sequence after sequence.

    Attributes:
        slot_mapping: `[T]` int64, where each token's key and value go: `block * block_size + offset`; below 0 is
            padding and is not written.
        block_tables: `[S, N]` int32, padded with the null block.
        seq_lens: `[S]` int32, tokens of each sequence including this step's.
        query_start_loc: `[S + 1]` int32, first token of each sequence in the packed batch.
        null_block: Index of a block of zeros that no sequence owns.
        num_decodes: Sequences with one new token each that the batch begins with.
        max_decode_len: Tokens of the longest of them; 0 if there is none.
        max_query_len: New tokens of the sequence that has most.
        num_queries: New tokens of all sequences; layers that attend to sources write other numbers of slots.
        host_tables: `[S, N]` block tables on the host; `host_query_lens` and `host_seq_lens`: `[S]` int64, new tokens
            and tokens of each sequence; `host_start_loc`: `[S + 1]` int64.
        is_recorded: Whether its tensors are those of later steps, too.
        least_saved: Bytes of a layer that are worth reading shared tokens by another launch.
    """

    is_recorded = False
    least_saved: float = LEAST_SAVED

    def __init__(
        self,
        tables: np.ndarray,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_size: int,
        null_block: int,
        device: torch.device,
    ) -> None:
        """Lays out a step.

        Args:
            tables: `[S, N]` int64 block tables, padded with the null block.
            query_lens: `[S]` int64, new tokens of each sequence.
            seq_lens: `[S]` int64, tokens of each sequence including the new ones.
        """
        self.host_tables, self.host_query_lens, self.host_seq_lens = tables, query_lens, seq_lens
        self.device = device
        self.block_size = block_size
        self.null_block = null_block
        self.max_query_len = int(query_lens.max())
        if self.max_query_len == 1 and query_lens.all():  # the usual step
            self.num_decodes = len(query_lens)
            self._token_rows, self._positions = np.arange(len(query_lens)), seq_lens - 1
        else:
            self.num_decodes = int((query_lens > 1).argmax())
            self._token_rows = rows = np.repeat(np.arange(len(query_lens)), query_lens)
            self._positions = (seq_lens - query_lens)[rows] + np.arange(len(rows)) - self.host_start_loc[rows]
        self.num_queries = len(self._token_rows)
        self._query_tiles: dict[tuple[int, int, int | None], Tensor] = {}
        self._decode_work: dict[WorkKind, DecodeWork] = {}
        self._query_work: dict[WorkKind, DecodeWork] = {}
        self._shared_work: dict[tuple[WorkKind, Together], DecodeWork | None] = {}
        self._same_lens: AttentionMetadata | None = None

    def with_tables(self, tables: np.ndarray) -> AttentionMetadata:
        """The same step over the block tables of another group of layers; what follows from lengths is shared."""
        other = copy.copy(self)
        for own in _OF_TABLES:
            vars(other).pop(own, None)
        other.host_tables, other._same_lens, other._shared_work = tables, self, {}
        return other

    def on(self, device: torch.device) -> AttentionMetadata:
        """The same step for layers on another device."""
        if device == self.device:
            return self
        other = copy.copy(self)
        for own in (*_OF_TABLES, "seq_lens", "query_start_loc"):
            vars(other).pop(own, None)
        other.device, other._same_lens, other._query_tiles = device, None, {}
        other._query_work, other._decode_work, other._shared_work = {}, {}, {}
        return other

    def in_chunks(self, tables: np.ndarray, chunk: int) -> AttentionMetadata:
        """The same step for layers of another group, with tables of their own, which cut sequences into chunks: a
        sequence for each chunk, whose length is a multiple of the block size.
        """
        size, starts, ends = self.block_size, self.host_seq_lens - self.host_query_lens, self.host_seq_lens
        counts = (ends - 1) // chunk - starts // chunk + 1
        row = np.repeat(np.arange(len(counts)), counts)
        first = (np.arange(len(row)) - (np.cumsum(counts) - counts)[row] + (starts // chunk)[row]) * chunk
        lens = np.minimum(ends[row], first + chunk) - first
        query_lens = np.minimum(lens, first + lens - starts[row])
        columns = (first // size)[:, None] + np.arange(-(-lens.max() // size))
        own = np.take_along_axis(tables[row], np.minimum(columns, tables.shape[1] - 1), axis=1)
        own = np.where(columns < tables.shape[1], own, self.null_block)
        return AttentionMetadata(own, query_lens, lens, size, self.null_block, self.device)

    @classmethod
    def of_groups(
        cls,
        tables: Sequence[np.ndarray],
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_size: int,
        null_block: int,
        device: torch.device,
    ) -> list[AttentionMetadata]:
        """Metadata of a step for each group of layers, one where there is none; arguments as of one."""
        if not tables:
            tables = [np.full((len(seq_lens), 1), null_block)]
        first = cls(tables[0], query_lens, seq_lens, block_size, null_block, device)
        return [first, *map(first.with_tables, tables[1:])]

    # Each backend reads its own part of what follows; the rest is never made.

    @lazy
    def host_slots(self) -> np.ndarray:
        """`slot_mapping` on the host."""
        size, positions = self.block_size, self._positions
        return self.host_tables[self._token_rows, positions // size] * size + positions % size

    @property
    def host_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """`[T]` int64 each: the row of each new token, and how many tokens its sequence has up to it."""
        return self._token_rows, self._positions + 1

    @lazy
    def slot_mapping(self) -> Tensor:
        return to_device(self.host_slots, self.device)

    @lazy
    def host_start_loc(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.host_query_lens)))

    @lazy
    def max_decode_len(self) -> int:
        return int(self.host_seq_lens[: self.num_decodes].max(initial=0))

    @lazy
    def shared_prefixes(self) -> SharedPrefixes | None:
        """Which of the first `num_decodes` sequences begin with the same blocks; `None`: each is by itself."""
        num = self.num_decodes
        return shared_prefixes(self.host_tables[:num], self.host_seq_lens[:num], self.block_size, self.null_block)

    @lazy
    def block_tables(self) -> Tensor:
        return to_device(self.host_tables.astype(np.int32), self.device)

    @lazy
    def seq_lens(self) -> Tensor:
        if self._same_lens is not None:
            return self._same_lens.seq_lens
        return to_device(self.host_seq_lens.astype(np.int32), self.device)

    @lazy
    def query_start_loc(self) -> Tensor:
        if self._same_lens is not None:
            return self._same_lens.query_start_loc
        return to_device(self.host_start_loc.astype(np.int32), self.device)

    def decode_work(self, kind: WorkKind, together: Together | None = None) -> DecodeWork:
        """How the first `num_decodes` sequences are shared out, for layers of this kind; made at the first of them.

        Args:
            together: How they can read what sequences share, where they can and sequences do.
        """
        if together is not None and (work := self._work_together(kind, together)) is not None:
            return work
        if kind not in self._decode_work:
            items, split = share_out(self.host_seq_lens[: self.num_decodes], kind)
            both = to_device(np.concatenate([items, split]), self.device)  # one transfer
            self._decode_work[kind] = DecodeWork(both[: len(items)], both[len(items) :], int(split[:, 3].sum()))
        return self._decode_work[kind]

    def _work_together(self, kind: WorkKind, together: Together) -> DecodeWork | None:
        """Returns `None` where each sequence is better read by itself."""
        key = kind, together
        if key not in self._shared_work:
            assert self.shared_prefixes is not None
            shared = read_together(self.shared_prefixes, kind, together, self.least_saved)
            self._shared_work[key] = None
            if shared is not None:
                items, split = share_out(self.host_seq_lens[: self.num_decodes], kind, shared)
                lists = items, split, shared.items, shared.members(split)
                parts = to_device(np.concatenate(lists), self.device).split([len(own) for own in lists])
                self._shared_work[key] = DecodeWork(parts[0], parts[1], int(split[:, 3].sum()), *parts[2:])
        return self._shared_work[key]

    def query_tiles(self, tile: int, first: int | None = None, end: int | None = None) -> Tensor:
        """The new tokens of some sequences, by default of all behind the first `num_decodes`, cut into tiles.

        Returns:
            `[tiles, 2]` int32: a sequence, and its tile's first new token; longest sequences and last tiles first.
        """
        first = self.num_decodes if first is None else first
        key = tile, first, end
        if key not in self._query_tiles:
            self._query_tiles[key] = to_device(self._host_tiles(tile, first, end), self.device)
        return self._query_tiles[key]

    def _host_tiles(self, tile: int, first: int, end: int | None) -> np.ndarray:
        if self.max_query_len == 1:  # the usual step
            rows = np.arange(first, len(self.host_seq_lens) if end is None else end, dtype=np.int32)
            return np.stack([rows, np.zeros_like(rows)], axis=1)
        sequence, start = spread(-(-self.host_query_lens[first:end] // tile))
        sequence, start = sequence + first, start * tile
        order = np.lexsort((-start, sequence, -self.host_seq_lens[sequence]))
        return np.stack([sequence, start], axis=1)[order].astype(np.int32)

    def query_work(self, kind: WorkKind) -> DecodeWork:
        """How the sequences behind the first `num_decodes` are shared out; all, where `kind.part` says how."""
        if kind not in self._query_work:
            items, split = self.host_query_work(kind)
            both = to_device(np.concatenate([items.reshape(-1, 4), split]), self.device)  # one transfer
            num_lines = 2 * len(items)
            work = DecodeWork(both[:num_lines].view(-1, 8), both[num_lines:], int(split[:, 3].sum()))
            self._query_work[kind] = work
        return self._query_work[kind]

    def host_query_work(self, kind: WorkKind) -> tuple[np.ndarray, np.ndarray]:
        """The lists of `query_work` on the host."""
        rows = np.arange(0 if kind.part else self.num_decodes, len(self.host_seq_lens))
        lens = self.host_query_lens[rows], self.host_seq_lens[rows]
        return share_out_queries(*lens, self.host_start_loc[rows], rows, kind)

    @lazy
    def groups(self) -> list[PaddedGroup]:
        return self.padded(np.arange(len(self.host_seq_lens)))

    @lazy
    def prefill_groups(self) -> list[PaddedGroup]:
        return self.padded(np.arange(self.num_decodes, len(self.host_seq_lens)))

    def padded(self, rows: np.ndarray) -> list[PaddedGroup]:
        return [self._padded(own) for own in self.alike(rows)]

    def by_token(self, rows: np.ndarray) -> tuple[AttentionMetadata, np.ndarray]:
        """Each new token of some of the sequences as a sequence that ends with it; and where these are in the batch."""
        tokens = np.nonzero(np.isin(self._token_rows, rows))[0]
        return self.of_tokens(tokens), tokens

    def of_tokens(self, tokens: np.ndarray) -> AttentionMetadata:
        """Some of the new tokens, by their place in the batch, each as a sequence that ends with it."""
        tables, lens = self.host_tables[self._token_rows[tokens]], self._positions[tokens] + 1
        return AttentionMetadata(tables, np.ones_like(lens), lens, self.block_size, self.null_block, self.device)

    def alike(self, rows: np.ndarray, exactly: bool = False) -> list[np.ndarray]:
        """Some of the sequences in lists of similar query and context length, which padding costs little.

        Each has one power of two above its query lengths, and one above its counts of blocks: padding costs at most a
        factor; `exactly`: of the same lengths, without padding.
        """
        query_lens, seq_lens = self.host_query_lens[rows], self.host_seq_lens[rows]
        if exactly:
            key = query_lens * (1 + seq_lens.max()) + seq_lens
            return [rows[key == value] for value in np.unique(key)]
        num_blocks = -(-seq_lens // self.block_size)
        key = np.ceil(np.log2(query_lens)).astype(np.int64) * 64 + np.ceil(np.log2(num_blocks)).astype(np.int64)
        return [rows[key == value] for value in np.unique(key)]

    def of(self, rows: np.ndarray) -> AttentionMetadata:
        """The same for some of the sequences only: their new tokens, in this order, are the batch."""
        tables, lens = self.host_tables[rows], (self.host_query_lens[rows], self.host_seq_lens[rows])
        return AttentionMetadata(tables, *lens, self.block_size, self.null_block, self.device)

    def _padded(self, rows: np.ndarray) -> PaddedGroup:
        query_lens, seq_lens = self.host_query_lens[rows], self.host_seq_lens[rows]
        columns = np.arange(query_lens.max())
        clamped = np.minimum(columns, query_lens[:, None] - 1)  # [G, Q]
        is_real = columns < query_lens[:, None]
        longest = int(seq_lens.max())
        return PaddedGroup(
            token_index=to_device(self.host_start_loc[rows][:, None] + clamped, self.device),
            is_real=None if is_real.all() else to_device(is_real, self.device),
            block_table=to_device(self.host_tables[rows, : -(-longest // self.block_size)], self.device),
            query_positions=to_device((seq_lens - query_lens)[:, None] + clamped, self.device),
            seq_lens=to_device(seq_lens, self.device),
            longest=longest,
            is_whole=bool((seq_lens == query_lens).all()),
            block_size=self.block_size,
            null_block=self.null_block,
        )


def pad_tables(blocks: np.ndarray, num_blocks: np.ndarray, null_block: int, dtype: type[np.integer]) -> np.ndarray:
    """`[S, N]` block tables, padded with the null block, of tables that lie one after another."""
    columns = np.arange(num_blocks.max())
    tables = np.full((len(num_blocks), len(columns)), null_block, dtype=dtype)
    tables[columns < num_blocks[:, None]] = blocks
    return tables


def padded_tables(
    groups: Sequence[GroupTables], windows: Sequence[int | None], null_block: int, dtype: type[np.integer]
) -> list[np.ndarray]:
    """`[S, N]` block tables of each group of layers, with the null block where blocks were given back, too.

    Args:
        windows: Of each of them, the tokens that a query sees; `None`: all.
    """
    tables = []
    for group, window in zip(groups, windows, strict=True):
        blocks = np.frombuffer(group.blocks, np.int32)
        if window is not None:
            blocks = np.where(blocks < 0, null_block, blocks)
        tables.append(pad_tables(blocks, np.frombuffer(group.counts, np.int64), null_block, dtype))
    return tables


class RecordedMetadata(AttentionMetadata):
    """Metadata of recorded steps of one shape: what is written into its tensors is the next step.

    Of such a step any number of sequences decode: `num_decodes` says only whether all do.

    Attributes:
        each_token: `[T]` int64 and `[T]` int32: the row of each new token, and its sequence's tokens up to it;
            `None`: all sequences decode.
    """

    is_recorded = True
    each_token: tuple[Tensor, Tensor] | None = None
    shared_prefixes = None  # the tables of steps to come are not known

    def __init__(
        self,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        block_size: int,
        null_block: int,
        max_query_len: int,
        lists: WorkLists,
    ) -> None:
        """Takes tensors as `AttentionMetadata` has them.

        Args:
            max_query_len: Of any of these steps.
            lists: All that the layers ask for.
        """
        rows = len(seq_lens)
        self.slot_mapping = slot_mapping
        self.block_tables = block_tables
        self.seq_lens = seq_lens
        self.query_start_loc = query_start_loc
        self.block_size = block_size
        self.null_block = null_block
        self.max_query_len = max_query_len
        self.num_queries = len(slot_mapping)
        self.num_decodes = rows if max_query_len == 1 else rows - 1
        self.max_decode_len = block_tables.shape[1] * block_size
        self.host_seq_lens = np.ones(rows, dtype=np.int64)
        self.device = seq_lens.device
        self._query_tiles = {}
        self._lists = lists

    def of_group(self, slot_mapping: Tensor, block_tables: Tensor) -> RecordedMetadata:
        """The same steps over the block tables of another group of layers; lengths and work are shared."""
        other = copy.copy(self)
        other.slot_mapping, other.block_tables = slot_mapping, block_tables
        return other

    def of_all_tokens(self) -> RecordedMetadata:
        """Each new token as a sequence that ends with it. Gathers their tables, so each step has to ask anew."""
        if self.each_token is None:
            return self
        other, (rows, lens) = copy.copy(self), self.each_token
        other.block_tables, other.seq_lens, other.num_decodes = self.block_tables[rows], lens, len(lens)
        other._lists = self._lists.of_tokens()
        return other

    @property
    def kinds(self) -> tuple[list[WorkKind], list[WorkKind], list[WorkKind]]:
        """Of the lists that steps come with: of decoding sequences, of all others, and of tokens by themselves."""
        return list(self._lists.work), list(self._lists.queries), list(self._lists.tokens)

    def decode_work(self, kind: WorkKind, together: Together | None = None) -> DecodeWork:
        """As for any step; nothing is read together. Raises `RuntimeError` for a kind that steps don't come with."""
        return self._lists.of(kind, self._lists.work, AttentionMetadata.decode_work)

    def query_work(self, kind: WorkKind) -> DecodeWork:
        """As `decode_work`, for sequences with several new tokens."""
        return self._lists.of(kind, self._lists.queries, AttentionMetadata.query_work)


class WorkLists:
    """The lists of work that recorded steps come with: those that layers asked for in a step before.

    Attributes:
        work: Of decoding sequences, by their kind.
        queries: Of all others.
        tokens: Of new tokens, each as a sequence.
        live: The step that is run to find out what layers ask for.
    """

    def __init__(
        self,
        work: dict[WorkKind, DecodeWork],
        queries: dict[WorkKind, DecodeWork],
        tokens: dict[WorkKind, DecodeWork],
        live: AttentionMetadata | None = None,
    ) -> None:
        self.work, self.queries, self.tokens, self.live = work, queries, tokens, live

    def of_tokens(self) -> WorkLists:
        live = self.live and self.live.of_tokens(np.arange(self.live.num_queries))
        return WorkLists(self.tokens, {}, {}, live)

    def of(self, kind: WorkKind, lists: dict[WorkKind, DecodeWork], make: Callable[..., DecodeWork]) -> DecodeWork:
        if kind not in lists:
            if self.live is None:
                raise RuntimeError(f"a layer attends in another way than in the first step: {kind}")
            # Of as much scratch as any step may need, which all of them share.
            lists[kind] = make(self.live, kind)._replace(max_parts=kind.max_parts)
        return lists[kind]
