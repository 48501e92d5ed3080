"""`StepInputs`: what a recorded step reads, at fixed addresses on the device, and how a step is padded to its shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.decode_work import DecodeWork, WorkKind, share_out
from hf_paged.attention.metadata import AttentionMetadata, RecordedMetadata, WorkLists, padded_tables
from hf_paged.core.batch import Batch
from hf_paged.memory.kv_cache import KVCache
from hf_paged.model.token_inputs import TokenInputs, fill_in

SHORT_QUERY = 16  # new tokens: sequences with drafts have no more, and share a tile shape


class Shape(NamedTuple):
    """The shape of a recorded step.

    A decode step has as many tokens as rows and wants all of their logits: padding is rows of one token in the null
    block. In all others padding is tokens of no row, and rows without a token.

    Attributes:
        rows: Sequences.
        tokens: Their new tokens.
        wanted: Tokens whose logits are computed.
        longest: The most new tokens of a sequence; 1: a decode step.
    """

    rows: int
    tokens: int
    wanted: int
    longest: int = 1

    @property
    def is_decode(self) -> bool:
        return self.longest == 1


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step before anything of it is on the device.

    Attributes:
        tokens: On the CPU.
        metadata: Of each group of layers.
        wanted: `[K]` int64, the tokens whose logits are wanted.
        pages: `[S, pages]` int64, of each sequence's state; `None`: there are no states.
        nums_at_once: `[S]` int64, of each sequence the index behind the last token that came together with others;
            `None`: there are no states.
        is_begun: Whether each sequence has tokens before the step.
        adapters: `[T]` int32, of each token its adapter's slot, below 0 without one; `None`: there are none.
    """

    tokens: TokenInputs
    metadata: Sequence[AttentionMetadata]
    wanted: np.ndarray
    pages: np.ndarray | None = None
    nums_at_once: np.ndarray | None = None
    is_begun: bool = True
    adapters: np.ndarray | None = None

    @classmethod
    def of(
        cls, batch: Batch, kv_cache: KVCache, embeddings: Tensor | None = None, chosen: Tensor | None = None
    ) -> HostStep:
        """The step of a batch; arguments as of `ModelRunner.run`."""
        starts, query_lens = np.frombuffer(batch.starts, np.int64), np.frombuffer(batch.query_lens, np.int64)
        tables = padded_tables(batch.tables, kv_cache.groups.own_windows, kv_cache.null_block, np.int64)
        lens = query_lens, starts + query_lens
        metadata = AttentionMetadata.of_groups(tables, *lens, kv_cache.block_size, kv_cache.null_block, kv_cache.device)
        wanted, tokens = np.asarray(batch.logit_rows, dtype=np.int64), TokenInputs.of(batch, embeddings, chosen)
        adapters = slots_of(batch) if batch.adapters else None
        if not batch.state_blocks:
            return cls(tokens, metadata, wanted, adapters=adapters)
        pages = np.frombuffer(batch.state_blocks, np.int32).reshape(batch.num_seqs, -1).astype(np.int64)
        at_once = np.frombuffer(batch.nums_at_once, np.int64)
        return cls(tokens, metadata, wanted, pages, at_once, bool(starts.all()), adapters)

    @property
    def num_rows(self) -> int:
        return len(self.metadata[0].host_seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.input_ids)

    @property
    def is_decode(self) -> bool:
        return self.metadata[0].max_query_len == 1

    def of_rows(self, rows: np.ndarray) -> HostStep:
        """A step of some of its rows, which are side by side."""
        if len(rows) == self.num_rows:
            return self
        first, end = self.metadata[0].host_start_loc[[rows[0], rows[-1] + 1]]
        tokens, own = self.tokens, slice(int(first), int(end))
        chosen = None if tokens.chosen is None else (tokens.chosen[0], tokens.chosen[1][own])
        return HostStep(
            TokenInputs(tokens.input_ids[own], tokens.position_ids[own], chosen),
            [each.of(rows) for each in self.metadata],
            self.wanted[(self.wanted >= first) & (self.wanted < end)] - first,
            None if self.pages is None else self.pages[rows],
            None if self.nums_at_once is None else self.nums_at_once[rows],
            self.is_begun,
            None if self.adapters is None else self.adapters[own],
        )


def slots_of(batch: Batch) -> np.ndarray:
    """`[T]` int32, the slot of each of a batch's tokens."""
    slots = np.frombuffer(batch.adapters, np.int64).astype(np.int32)
    return np.repeat(slots, np.frombuffer(batch.query_lens, np.int64))


class _Mirror:
    """Arrays on the host and their copies on the device, sent in one transfer."""

    def __init__(self, arrays: dict[Any, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        """Allocates arrays of these shapes. All begin at multiples of 16 bytes: else they are another kernel's."""
        places, end = {}, 0
        for name, (shape, dtype) in arrays.items():
            places[name] = end, math.prod(shape) * dtype.itemsize
            end = -(-(end + places[name][1]) // 16) * 16
        is_pinned = device.type == "cuda"
        self._staged = torch.zeros(end, dtype=torch.uint8, pin_memory=is_pinned)
        self._sent_to = torch.zeros_like(self._staged, device=device)
        self._sent = torch.cuda.Event() if is_pinned else None

        def views(buffer: Tensor) -> dict[Any, Tensor]:
            return {
                name: buffer[start : start + size].view(arrays[name][1]).view(arrays[name][0])
                for name, (start, size) in places.items()
            }

        self.host = {name: view.numpy() for name, view in views(self._staged).items()}
        self.device = views(self._sent_to)

    def wait(self) -> None:
        """Waits for the last transfer, which may still read what is written now (it hardly ever does)."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        self._sent_to.copy_(self._staged, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class FixedTables:
    """The block tables of the step that runs, which recorded steps of all shapes read. A transfer where they change."""

    def __init__(self, max_rows: int, max_blocks: int, kv_cache: KVCache) -> None:
        """Allocates for `max_rows` sequences of up to `max_blocks` blocks in each group of layers."""
        self.block_size, self.null_block = kv_cache.block_size, kv_cache.null_block
        is_pinned, self.num_groups = kv_cache.device.type == "cuda", len(kv_cache.groups.windows)
        shape = max(1, self.num_groups), max_rows, max_blocks  # where there are none, none is read
        self._staged = torch.empty(math.prod(shape), dtype=torch.int32, pin_memory=is_pinned)
        self.tensor = torch.full(shape, self.null_block, dtype=torch.int32, device=kv_cache.device)
        self._last: np.ndarray | None = None
        self._sent = torch.cuda.Event() if is_pinned else None

    def send(self, tables: np.ndarray) -> None:
        """Sends `[G, S, N]` tables, if they have changed: most steps fill a slot of a block that they have."""
        if self._last is not None and np.array_equal(self._last, tables):
            return
        if self._sent is not None:
            self._sent.synchronize()
        _, rows, width = tables.shape
        staged = self._staged[: tables.size].view(tables.shape)
        staged.numpy()[:] = tables
        on_device = staged.to(self.tensor.device, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        self.tensor[:, :rows, :width].copy_(on_device)
        if self._last is None or self._last.shape[1] > rows:
            self.tensor[:, rows:, :1] = self.null_block  # the only block that a padding row reads
        self._last = tables


class StepInputs:
    """What recorded steps of one shape read, but for the tables.

    A padding token is written nowhere (slot -1). A padding row's state is the null block's.
    """

    def __init__(
        self,
        shape: Shape,
        tables: FixedTables,
        num_pages: int = 0,
        work: Sequence[WorkKind] = (),
        queries: Sequence[WorkKind] = (),
        by_token: Sequence[WorkKind] = (),
    ) -> None:
        """Allocates.

        Args:
            num_pages: Pages of a sequence's state; 0: there are no states.
            work: Kinds of lists that steps come with, of decoding sequences.
            queries: Of all others.
            by_token: Of new tokens, each as a sequence.
        """
        self.shape, self._tables = shape, tables
        self._work, self._queries, self._by_token = list(work), list(queries), list(by_token)
        rows, tokens, wanted, _ = shape
        lines = {"ids": tokens, "positions": tokens, "places": tokens, "wanted": wanted, "token_rows": tokens}
        arrays: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((size,), torch.int64) for name, size in lines.items()
        }
        groups = tables.tensor.shape[0]
        # Each group's slots begin at a multiple of 16 bytes, too.
        arrays |= {("slots", group): ((tokens,), torch.int64) for group in range(groups)}
        arrays |= {"pages": ((rows, num_pages), torch.int64)}
        arrays |= {
            "adapters": ((tokens,), torch.int32),
            "lens": ((rows,), torch.int32),
            "nums_at_once": ((rows,), torch.int32),
            "token_lens": ((tokens,), torch.int32),
            "starts": ((rows + 1,), torch.int32),
        }
        for kind in self._work:
            arrays["items", kind] = (kind.max_items(rows), 4), torch.int32
            arrays["split", kind] = (kind.max_split(rows), 4), torch.int32
        for kind in self._by_token:
            arrays["token_items", kind] = (kind.max_items(tokens), 4), torch.int32
            arrays["token_split", kind] = (kind.max_split(tokens), 4), torch.int32
        for kind in self._queries:
            num_tiles = (tokens + rows * (kind.queries - 1)) // kind.queries
            arrays["query_items", kind] = (kind.max_items(num_tiles), 8), torch.int32
            arrays["query_split", kind] = (kind.max_split(num_tiles), 4), torch.int32
        self._mirror = _Mirror(arrays, tables.tensor.device)
        self._mirror.host["starts"][:] = np.arange(rows + 1)  # of a decode step

    def views(self, live: AttentionMetadata | None = None) -> tuple[Tensor, Tensor, list[RecordedMetadata]]:
        """Ids `[T]`, positions `[T]` and each group's metadata of these steps.

        Args:
            live: The step that they are now, to find out what lists of work its layers ask for.
        """
        own, (rows, _, _, longest), tables = self._mirror.device, self.shape, self._tables
        work, queries, by_token = (
            {kind: DecodeWork(own[items, kind], own[split, kind], kind.max_parts) for kind in kinds}
            for kinds, items, split in (
                (self._work, "items", "split"),
                (self._queries, "query_items", "query_split"),
                (self._by_token, "token_items", "token_split"),
            )
        )
        lists = WorkLists(work, queries, by_token, live)
        slots = [own["slots", group] for group in range(len(tables.tensor))]
        first = RecordedMetadata(
            slots[0],
            tables.tensor[0, :rows],
            own["lens"],
            own["starts"],
            tables.block_size,
            tables.null_block,
            longest,
            lists,
        )
        if not self.shape.is_decode:
            first.each_token = own["token_rows"], own["token_lens"]
        others = map(first.of_group, slots[1:], tables.tensor[1:, :rows])
        return own["ids"], own["positions"], [first, *others]

    @property
    def wanted(self) -> Tensor:
        """`[K]` int64, the tokens whose logits are wanted."""
        return self._mirror.device["wanted"]

    @property
    def pages(self) -> Tensor:
        """`[S, pages]` int64, of the rows' states."""
        return self._mirror.device["pages"]

    @property
    def nums_at_once(self) -> Tensor:
        """`[S]` int32, of the rows; see `HostStep`."""
        return self._mirror.device["nums_at_once"]

    @property
    def adapters(self) -> Tensor:
        """`[T]` int32, slots of the tokens' adapters."""
        return self._mirror.device["adapters"]

    def fill(self, step: HostStep) -> None:
        """Sets the next step, which fits into the shape."""
        host, first, chosen = self._mirror.host, step.metadata[0], step.tokens.chosen
        rows, tokens = step.num_rows, step.num_tokens
        self._mirror.wait()
        for name, values in (("ids", step.tokens.input_ids), ("positions", step.tokens.position_ids)):
            host[name][:tokens], host[name][tokens:] = values.numpy(), 0
        host["adapters"][:] = -1
        if step.adapters is not None:
            host["adapters"][:tokens] = step.adapters
        metadata_of_groups = step.metadata[: self._tables.num_groups]
        for group, metadata in enumerate(metadata_of_groups):
            host["slots", group][:tokens], host["slots", group][tokens:] = metadata.host_slots, -1
        host["lens"][:rows], host["lens"][rows:] = first.host_seq_lens, 1
        host["pages"][:rows] = 0 if step.pages is None else step.pages
        host["pages"][rows:] = self._tables.null_block
        host["nums_at_once"][:rows] = 0 if step.nums_at_once is None else step.nums_at_once
        host["nums_at_once"][rows:] = 0
        decoding = host["lens"]
        if not self.shape.is_decode:
            host["starts"][: rows + 1], host["starts"][rows + 1 :] = first.host_start_loc, tokens
            host["wanted"][: len(step.wanted)], host["wanted"][len(step.wanted) :] = step.wanted, 0
            decoding = decoding[: first.num_decodes]
            host["token_rows"][:tokens], host["token_lens"][:tokens] = first.host_tokens
            host["token_rows"][tokens:], host["token_lens"][tokens:] = 0, 1
        for kind in self._work:
            self._fill_list("items", "split", kind, *share_out(decoding, kind))
        for kind in self._by_token:
            self._fill_list("token_items", "token_split", kind, *share_out(first.host_tokens[1], kind))
        for kind in self._queries:
            self._fill_list("query_items", "query_split", kind, *first.host_query_work(kind))
        if chosen is not None:
            host["places"][:tokens], host["places"][tokens:] = chosen[1], -1
        if metadata_of_groups:
            self._tables.send(np.stack([metadata.host_tables for metadata in metadata_of_groups]))
        self._mirror.send()
        if chosen is not None:
            own_ids, places = self._mirror.device["ids"], self._mirror.device["places"]
            own_ids.copy_(fill_in(own_ids, chosen[0], places))

    def _fill_list(self, items: str, split: str, kind: WorkKind, own_items: np.ndarray, own_split: np.ndarray) -> None:
        host = self._mirror.host[items, kind]
        host[: len(own_items)], host[len(own_items) :, 1] = own_items, -1
        host = self._mirror.host[split, kind]
        host[: len(own_split)], host[len(own_split) :, 3] = own_split, 0
