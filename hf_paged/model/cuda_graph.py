"""`DecodeGraphs`: the decode step as CUDA graphs, one for each batch size, recorded once and replayed at each step."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from hf_paged.attention.decode_work import DecodeWork, WorkKind, share_out
from hf_paged.attention.metadata import DecodeMetadata, padded_tables
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.core.batch import Batch
from hf_paged.memory.kv_cache import KVCache
from hf_paged.model.graph_capture import CUDARecording, capture_stream, first_wait, raised_at

logger = logging.getLogger(__name__)

# Of a replay's logits beside those of the same step run eagerly: the same kernels in the same order.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}

# Ids, positions and (of each group of layers) metadata of a step at fixed addresses -> logits [rows, vocab_size]
Forward = Callable[[Tensor, Tensor, Sequence[DecodeMetadata]], Tensor]


class Recording(Protocol):
    """A function that was run once and can be run again over the same memory.

    Attributes:
        output: What it returned, and what every replay writes to.
        num_bytes: The device memory that it took.
    """

    output: Tensor
    num_bytes: int

    def replay(self) -> None:
        """Runs it again."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that are recorded: with few padding rows where rows cost most."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def fill_in(ids: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
    """`[N]` ids, of which those with a place of 0 or above are the `chosen` token there (0 for one that is none)."""
    return torch.where(places >= 0, chosen[places.clamp(min=0)].clamp(min=0), ids)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Rows of one new token each.

    Attributes:
        ids: `[B]` token ids.
        positions: `[B]` position ids.
        lens: `[B]` int64, tokens of each sequence, the new one included.
        tables: `[G, B, N]` int32 block tables of each group.
        chosen: Ids that only the device knows, as in `TokenInputs`.
    """

    ids: np.ndarray
    positions: np.ndarray
    lens: np.ndarray
    tables: np.ndarray
    chosen: tuple[Tensor, np.ndarray] | None = None

    def first(self, rows: int) -> DecodeBatch:
        """Its first rows, at most so many."""
        chosen = None if self.chosen is None else (self.chosen[0], self.chosen[1][:rows])
        return DecodeBatch(self.ids[:rows], self.positions[:rows], self.lens[:rows], self.tables[:, :rows], chosen)


class DecodeInputs:
    """What a decode step reads, at fixed addresses on the device; one transfer a step, and one more for changed tables.

    A padding row is a sequence of one token in the null block, whose keys are written nowhere (slot -1).
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        null_block: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        """Allocates for `max_rows` sequences of up to `max_blocks` blocks in each of `num_groups` groups of layers."""
        self.block_size, self.null_block = block_size, null_block
        self.max_rows, self.max_blocks, self.num_groups = max_rows, max_blocks, num_groups
        self._line = -(-max_rows // 4) * 4  # all lines begin at multiples of 16 bytes: else they are another kernel's
        is_pinned, shape = device.type == "cuda", (num_groups, self._line, max_blocks)
        self._staged_tables = torch.empty(math.prod(shape), dtype=torch.int32, pin_memory=is_pinned)
        self._tables = torch.full(shape, null_block, dtype=torch.int32, device=device)
        self._last_tables: np.ndarray | None = None
        self._sent = torch.cuda.Event() if is_pinned else None
        self.hold([])

    def hold(self, kinds: list[WorkKind]) -> None:
        """Makes steps come with work of these kinds; what `views` returned before is void."""
        # Rows [., 4] of int32 for each list of work, then of int64: ids, positions, places of ids among chosen tokens,
        # the lengths (as int32); and the slots of each group.
        rows, device, num_lines = self.max_rows, self._tables.device, 4 + self.num_groups
        lens = [kind.max_items(rows) + kind.max_split(rows) for kind in kinds]
        num_work = 2 * sum(lens)  # numbers of int64
        self._staged = torch.zeros(
            num_work + num_lines * self._line, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._sendable = torch.zeros_like(self._staged, device=device)

        def parts(tensor: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            work = tensor[:num_work].view(torch.int32).view(-1, 4).split(lens) if kinds else ()
            return tensor[num_work:].view(num_lines, self._line), work

        staged, staged_work = parts(self._staged)
        self._host = staged.numpy()
        self._host_lens = self._host[3].view(np.int32)[:rows]
        self._host_work = {kind: part.numpy() for kind, part in zip(kinds, staged_work, strict=True)}
        self._numbers, work = parts(self._sendable)
        self._seq_lens = self._numbers[3].view(torch.int32)[:rows]
        self._work = dict(zip(kinds, work, strict=True))
        self._wait()
        self._fill_rest(0, rows)  # a step of padding
        self._send()

    def trial(self) -> tuple[Tensor, Tensor, list[DecodeMetadata]]:
        """A step of a padding row, which notes the kinds of work that its layers ask for."""
        return self._views(1, None)

    def views(self, rows: int) -> tuple[Tensor, Tensor, list[DecodeMetadata]]:
        """Ids `[rows]`, positions `[rows]` and each group's metadata of a step of so many rows."""
        work = {}
        for kind, part in self._work.items():
            split = part[kind.max_items(self.max_rows) :][: kind.max_split(rows)]
            work[kind] = DecodeWork(part[: kind.max_items(rows)], split, kind.max_parts)
        return self._views(rows, work)

    def _views(self, rows: int, work: dict[WorkKind, DecodeWork] | None) -> tuple[Tensor, Tensor, list[DecodeMetadata]]:
        ids, positions, slots, tables = *self._numbers[:2, :rows], self._numbers[4:, :rows], self._tables[:, :rows]
        longest, lens = self.max_blocks * self.block_size, self._seq_lens[:rows]
        first = DecodeMetadata(slots[0], tables[0], lens, self.block_size, self.null_block, longest, work)
        return ids, positions, [first, *map(first.of_group, slots[1:], tables[1:])]

    def fill(self, size: int, batch: DecodeBatch) -> None:
        """Sets the next step's rows; all others become padding.

        Args:
            size: Rows of the step, padding included: only `views` of so many are right for it.
        """
        rows, chosen = len(batch.ids), batch.chosen
        self._wait()
        last = batch.lens - 1
        self._host[0, :rows] = batch.ids
        self._host[1, :rows] = batch.positions
        slots = self._host[4:, :rows]
        slots[:] = batch.tables[:, np.arange(rows), last // self.block_size]
        slots *= self.block_size
        slots += last % self.block_size
        self._host_lens[:rows] = batch.lens
        self._fill_rest(rows, size)
        if chosen is not None:
            self._host[2, :rows] = chosen[1]
        self._send_tables(batch.tables)
        self._send()
        if chosen is not None:
            own = self._numbers[0, :rows]
            own.copy_(fill_in(own, chosen[0], self._numbers[2, :rows]))

    def _fill_rest(self, first: int, size: int) -> None:
        """Fills padding from row `first` on, and how a step of `size` rows is shared out."""
        self._host[:2, first:] = 0
        self._host[4:, first:] = -1
        self._host_lens[first:] = 1
        for kind, host in self._host_work.items():
            items, split = share_out(self._host_lens[:size], kind)
            num_items = kind.max_items(self.max_rows)
            host[: len(items)] = items
            host[len(items) : num_items, 1] = -1
            host[num_items : num_items + len(split)] = split
            host[num_items + len(split) :, 3] = 0

    def _wait(self) -> None:
        """Waits for the last step's transfer, which may still read what is written now (it never does)."""
        if self._sent is not None:
            self._sent.synchronize()

    def _send(self) -> None:
        self._sendable.copy_(self._staged, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _send_tables(self, tables: np.ndarray) -> None:
        """Sends tables that have changed; most steps fill a slot of a block that they have."""
        if self._last_tables is not None and np.array_equal(self._last_tables, tables):
            return
        _, rows, width = tables.shape
        staged = self._staged_tables[: tables.size].view(tables.shape)
        staged.numpy()[:] = tables
        on_device = staged.to(self._tables.device, non_blocking=True)
        self._tables[:, :rows, :width].copy_(on_device)
        if self._last_tables is None or self._last_tables.shape[1] > rows:
            self._tables[:, rows:, :1] = self.null_block  # the only block that a padding row reads
        self._last_tables = tables


class DecodeGraphs:
    """Decode steps over one KV tensor, replayed.

    A step's rows are padded to the next recorded batch size. The recordings share their memory and their inputs, and
    the lists that share out the work of attention are among these: any lengths are right for them.

    Attributes:
        reason: Why there are none, once that has turned out.
    """

    def __init__(
        self,
        forward: Forward,
        kv_cache: KVCache,
        max_num_seqs: int,
        max_blocks: int,
        record: Callable[[Callable[[], Tensor]], Recording],
    ) -> None:
        """Takes no memory: all of it is, and everything recorded, at the first step."""
        self._forward = forward
        self._kv_cache = weakref.ref(kv_cache)
        self._sizes = capture_sizes(max_num_seqs)
        self._record = record
        self._device = kv_cache.device
        self._block_size, self._null_block, self.max_blocks = kv_cache.block_size, kv_cache.null_block, max_blocks
        self._windows = kv_cache.groups.windows
        self._inputs: DecodeInputs | None = None
        self._recordings: dict[int, Recording] | None = None
        self._logits: Tensor | None = None  # of all sizes: each with its own would hold half a gigabyte
        self.reason: str | None = None

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that can be replayed, the smallest first; [] before anything is recorded."""
        return sorted(self._recordings or ())

    @property
    def num_bytes(self) -> int:
        """Device memory of the recordings and the logits."""
        logits = 0 if self._logits is None else self._logits.nbytes
        return logits + sum(recording.num_bytes for recording in (self._recordings or {}).values())

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def is_of(self, kv_cache: KVCache) -> bool:
        return self._kv_cache() is kv_cache

    def run(self, step: Batch, chosen: Tensor | None = None) -> Tensor | None:
        """A step of one new token each.

        Args:
            step: The step; the host knows all ids but those that were chosen.
            chosen: Tokens that the step before has chosen, for its placeholders.

        Returns:
            `[B, vocab_size]`, which the next replay writes over; `None`: it can't be replayed, run it eagerly.
        """
        if step.num_seqs > self.max_rows or self.reason is not None:
            return None
        if max(step.tables[0].counts) > self.max_blocks:
            return None
        padded = np.stack(padded_tables(step.tables, self._windows, self._null_block, np.int32))
        ids, positions, starts = (np.frombuffer(a, np.int64) for a in (step.token_ids, step.positions, step.starts))
        places = None
        if step.placeholders is not None:
            assert chosen is not None
            places = chosen, np.frombuffer(step.placeholders, np.int64)
        return self.replay(DecodeBatch(ids, positions, starts + 1, padded, places))

    def replay(self, batch: DecodeBatch) -> Tensor | None:
        """A step; see `run`. All sizes are recorded at the first one, and checked against what it computes."""
        if self._recordings is None:
            self.record(batch)
            assert self._recordings is not None
        rows = len(batch.ids)
        recording = next((own for size in self._sizes if size >= rows and (own := self._recordings.get(size))), None)
        if recording is None:
            return None
        self._fill(len(recording.output), batch)
        recording.replay()
        return recording.output[:rows]

    def _fill(self, size: int, batch: DecodeBatch) -> DecodeInputs:
        """Makes the next step one of `size` rows, those of the batch and padding."""
        if self._inputs is None:
            with torch.inference_mode(False):
                sizes = self.max_rows, self.max_blocks, self._block_size
                inputs = DecodeInputs(*sizes, self._null_block, self._device, len(self._windows))
            ids, positions, metadata = inputs.trial()
            self._forward(ids, positions, metadata)
            with torch.inference_mode(False):
                inputs.hold(metadata[0].work_kinds)
            self._inputs = inputs
        self._inputs.fill(size, batch)
        return self._inputs

    @torch.no_grad()
    def record(self, batch: DecodeBatch) -> None:
        """Records all sizes, the largest first, whose memory the others use.

        A size for which there is no memory is left out. If a step can't be recorded, or a replay is wrong, there are
        none at all, and `reason` says why. Both are logged, once.

        Args:
            batch: Of the pool: what a replay computes for its rows must be what the step itself does.
        """
        recordings: dict[int, Recording] = {}
        too_large: list[int] = []
        sizes = tqdm(self._sizes[::-1], desc="hf_paged: recording CUDA graphs", delay=1, leave=False, disable=None)
        try:
            for size in sizes:
                with suppress(torch.OutOfMemoryError):
                    recordings[size] = self._record_size(size, batch.first(size), is_first=not recordings)
                    continue
                too_large.append(size)
                if not recordings:
                    self._logits = None  # of this size
        except Exception as error:  # a model that reads something back, makes tensors on the host, ...
            recordings.clear()
            self._logits = None
            self.reason = str(error) if isinstance(error, _UnrecordableError) else _in_words(error)
            logger.warning(
                "hf_paged: decode steps run without CUDA graphs, since this model's can't be recorded (%s); "
                "cuda_graphs=False keeps this from being tried",
                self.reason,
            )
            logger.info("hf_paged: what kept CUDA graphs from being recorded:", exc_info=error)
        self._recordings = recordings
        if too_large and self.reason is None:
            left = f"batches of more than {max(recordings)} rows" if recordings else "decode steps"
            logger.warning(
                "hf_paged: %s run without CUDA graphs, since the device has no memory left to record them; patch with "
                "a lower memory_fraction, num_blocks or max_num_seqs",
                left,
            )
            if not recordings:
                self.reason = "out of memory"

    def _record_size(self, size: int, batch: DecodeBatch, is_first: bool) -> Recording:
        ids, positions, metadata = self._fill(size, batch).views(size)

        def step() -> Tensor:
            logits = self._forward(ids, positions, metadata)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            return self._logits[: len(logits)].copy_(logits)

        expected = step().clone()  # also compiles what is not compiled yet, which can't be recorded
        if is_first and self._device.type == "cuda":
            place = first_wait(step)
            if place is not None:
                raise _UnrecordableError(f"each step waits for the device, at {place}")
        recording = self._record(step)
        recording.output.fill_(float("nan"))  # or a replay that writes nothing would be right
        recording.replay()
        if not _agree(recording.output, expected):
            raise _UnrecordableError(f"a replay of {size} rows computes other logits than the step itself")
        return recording


class _UnrecordableError(Exception):
    """A step is not one that can be replayed."""


def _in_words(error: Exception) -> str:
    first_line, place = str(error).split("\n", 1)[0], raised_at(error)
    return f"{type(error).__name__}: {first_line}" + (f" ({place})" if place else "")


def _agree(result: Tensor, expected: Tensor) -> bool:
    """Row by row; of a row that is no numbers (weights that are none) nothing is asked."""
    truth = expected.float()
    size = truth.norm(dim=-1)
    error = (result.float() - truth).norm(dim=-1)
    return bool((~size.isfinite() | (error <= TOLERANCE.get(expected.dtype, 3e-2) * size + 1e-6)).all())


def recorder(attention: PoolAttention) -> Callable[[Callable[[], Tensor]], Recording] | str:
    """Finds what records steps over this pool, or says why nothing can."""
    kv_cache = attention.kv_cache
    device = kv_cache.device
    if device.type != "cuda":
        return f"need a CUDA device, the model is on {device}"
    if any(kv_cache.groups.chunks):
        return "need layers that see a sequence as it is, some of this model cut it into chunks"
    for backend in attention.backends:
        if not backend.can_record:
            return f"need a backend that can be recorded, this pool is served by {backend.name!r}"
    stream, made = capture_stream(device), weakref.WeakSet[CUDARecording]()

    def record(function: Callable[[], Tensor]) -> CUDARecording:
        recording = CUDARecording(function, stream, next(iter(made), None))
        made.add(recording)
        return recording

    return record
