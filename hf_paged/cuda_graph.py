"""`DecodeGraphs`: the decode step as CUDA graphs, one a batch size, recorded once and replayed at every step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from hf_paged.attention_metadata import DecodeMetadata
from hf_paged.block_manager import BlockManager
from hf_paged.decode_work import DecodeWork, WorkKind, share_out
from hf_paged.kv_cache import KVCache
from hf_paged.scheduler import ScheduledChunk

logger = logging.getLogger(__name__)

# Of a replay's logits beside those of the same step run eagerly: the same kernels in the same order.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}

# Ids, positions and metadata of a step at fixed addresses -> logits [rows, vocab_size]
Forward = Callable[[Tensor, Tensor, DecodeMetadata], Tensor]


class Recording(Protocol):
    """A function that was run once and can be run again over the same memory.

    Attributes:
        output: What it returned, and what every replay writes to.
    """

    output: Tensor

    def replay(self) -> None:
        """Runs it again."""


class CUDARecording:
    """A CUDA graph."""

    def __init__(self, function: Callable[[], Tensor], memory: Any) -> None:
        """Records; other threads may use the device meanwhile.

        Args:
            function: Launches kernels only, and reads nothing back from the device.
            memory: The pool that all graphs allocate from: they never run at once.
        """
        self._graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage and empties the allocator's cache before each recording.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._graph.capture_begin(pool=memory, capture_error_mode="thread_local")
            try:
                self.output = function()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> None:
        """On the current stream."""
        self._graph.replay()


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that are recorded: with few padding rows where rows cost most."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def fill_in(ids: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
    """`[N]` ids, of which those with a place of 0 or above are the `chosen` token there (0 for one that is none)."""
    return torch.where(places >= 0, chosen[places.clamp(min=0)].clamp(min=0), ids)


class DecodeInputs:
    """What a decode step reads, at fixed addresses on the device; one transfer a step, and one more for changed tables.

    A padding row is a sequence of one token in the null block, whose keys are written nowhere (slot -1).
    """

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, null_block: int, device: torch.device) -> None:
        """Allocates for `max_rows` sequences of up to `max_blocks` blocks."""
        self.block_size, self.null_block = block_size, null_block
        self.max_rows, self.max_blocks = max_rows, max_blocks
        is_pinned = device.type == "cuda"
        self._staged_tables = torch.empty(max_rows * max_blocks, dtype=torch.int32, pin_memory=is_pinned)
        self._tables = torch.full((max_rows, max_blocks), null_block, dtype=torch.int32, device=device)
        self._last_tables: np.ndarray | None = None
        self._sent = torch.cuda.Event() if is_pinned else None
        self.hold([])

    def hold(self, kinds: list[WorkKind]) -> None:
        """From now on, steps come with work of these kinds; what `views` returned before is void."""
        # Rows [., 4] of int32 for each list of work, then five of int64: ids, positions, slots, places of ids among
        # chosen tokens; the lengths as int32 in the last one.
        rows, device = self.max_rows, self._tables.device
        lens = [kind.max_items(rows) + kind.max_split(rows) for kind in kinds]
        num_work = 2 * sum(lens)  # numbers of int64
        self._staged = torch.zeros(num_work + 5 * rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sendable = torch.zeros_like(self._staged, device=device)

        def parts(tensor: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            work = tensor[:num_work].view(torch.int32).view(-1, 4).split(lens) if kinds else ()
            return tensor[num_work:].view(5, rows), work

        staged, staged_work = parts(self._staged)
        self._host = staged.numpy()
        self._host_lens = self._host[4].view(np.int32)[:rows]
        self._host_work = {kind: part.numpy() for kind, part in zip(kinds, staged_work, strict=True)}
        self._numbers, work = parts(self._sendable)
        self._seq_lens = self._numbers[4].view(torch.int32)[:rows]
        self._work = dict(zip(kinds, work, strict=True))
        self.clear(rows)

    def trial(self) -> tuple[Tensor, Tensor, DecodeMetadata]:
        """A step of padding rows, all that there can be, which notes the kinds of work that its layers ask for."""
        return self._views(self.max_rows, None)

    def views(self, rows: int) -> tuple[Tensor, Tensor, DecodeMetadata]:
        """Ids `[rows]`, positions `[rows]` and metadata of a step of so many rows."""
        work = {}
        for kind, part in self._work.items():
            split = part[kind.max_items(self.max_rows) :][: kind.max_split(rows)]
            work[kind] = DecodeWork(part[: kind.max_items(rows)], split, kind.max_parts(rows))
        return self._views(rows, work)

    def _views(self, rows: int, work: dict[WorkKind, DecodeWork] | None) -> tuple[Tensor, Tensor, DecodeMetadata]:
        ids, positions, slots = (self._numbers[index, :rows] for index in range(3))
        longest, tables = self.max_blocks * self.block_size, self._tables[:rows]
        metadata = DecodeMetadata(slots, tables, self._seq_lens[:rows], self.block_size, self.null_block, longest, work)
        return ids, positions, metadata

    def clear(self, size: int) -> None:
        """Makes the next step one of `size` rows of padding."""
        self._wait()
        self._fill_rest(0, size)
        self._send()

    def fill(
        self,
        size: int,
        ids: np.ndarray,
        positions: np.ndarray,
        lens: np.ndarray,
        tables: np.ndarray,
        chosen: tuple[Tensor, np.ndarray] | None = None,
    ) -> None:
        """Sets the next step's rows; all others become padding.

        Args:
            size: Rows of the step, padding included: only `views` of so many are right for it.
            ids: `[B]` token ids.
            positions: `[B]` position ids.
            lens: `[B]` tokens of each sequence, the new one included.
            tables: `[B, N]` int32 block tables.
            chosen: Ids that only the device knows, as in `TokenInputs`.
        """
        rows = len(ids)
        self._wait()
        last = lens - 1
        self._host[0, :rows] = ids
        self._host[1, :rows] = positions
        self._host[2, :rows] = tables[np.arange(rows), last // self.block_size].astype(np.int64) * self.block_size
        self._host[2, :rows] += last % self.block_size
        self._host_lens[:rows] = lens
        self._fill_rest(rows, size)
        if chosen is not None:
            self._host[3, :rows] = chosen[1]
        self._send_tables(tables)
        self._send()
        if chosen is not None:
            own = self._numbers[0, :rows]
            own.copy_(fill_in(own, chosen[0], self._numbers[3, :rows]))

    def _fill_rest(self, first: int, size: int) -> None:
        """Padding from row `first` on, and how a step of `size` rows is shared out."""
        self._host[:2, first:] = 0
        self._host[2, first:] = -1
        self._host_lens[first:] = 1
        for kind, host in self._host_work.items():
            items, split = share_out(self._host_lens[:size], kind)
            num_items = kind.max_items(self.max_rows)
            host[: len(items)] = items
            host[len(items) : num_items, 1] = -1
            host[num_items : num_items + len(split)] = split
            host[num_items + len(split) :, 3] = 0

    def _wait(self) -> None:
        """The last step's transfer may still read what is written now; it never does."""
        if self._sent is not None:
            self._sent.synchronize()

    def _send(self) -> None:
        self._sendable.copy_(self._staged, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _send_tables(self, tables: np.ndarray) -> None:
        """Most steps fill a slot of a block that they have."""
        if self._last_tables is not None and np.array_equal(self._last_tables, tables):
            return
        rows, width = tables.shape
        staged = self._staged_tables[: rows * width].view(rows, width)
        staged.numpy()[:] = tables
        on_device = staged.to(self._tables.device, non_blocking=True)
        self._tables[:rows, :width].copy_(on_device)
        if self._last_tables is None or len(self._last_tables) > rows:
            self._tables[rows:, :1] = self.null_block  # the only block that a padding row reads
        self._last_tables = tables


class DecodeGraphs:
    """Decode steps over one KV tensor, replayed.

    A step's rows are padded to the next recorded batch size. The recordings share their memory and their inputs, and
    the lists that share out the work of attention are among these: any lengths are right for them.
    """

    def __init__(
        self,
        forward: Forward,
        kv_cache: KVCache,
        max_num_seqs: int,
        max_blocks: int,
        record: Callable[[Callable[[], Tensor]], Recording],
    ) -> None:
        """Allocates the inputs; nothing is recorded before the first step.

        Args:
            forward: Runs the model.
            kv_cache: The pool.
            max_num_seqs: Sequences in the largest step.
            max_blocks: Blocks of the longest sequence that is taken.
            record: Makes a recording.
        """
        self._forward = forward
        self._kv_cache = weakref.ref(kv_cache)
        self._sizes = capture_sizes(max_num_seqs)
        self._record = record
        device = kv_cache.tensor.device
        with torch.inference_mode(False):
            self._inputs = DecodeInputs(max_num_seqs, max_blocks, kv_cache.block_size, kv_cache.null_block, device)
        self._recordings: dict[int, Recording] | None = None
        self._logits: Tensor | None = None  # of all sizes: each with its own would hold half a gigabyte

    def is_of(self, kv_cache: KVCache) -> bool:
        """Whether it was made for this pool."""
        return self._kv_cache() is kv_cache

    def run(
        self,
        chunks: list[ScheduledChunk],
        manager: BlockManager,
        ids: np.ndarray,
        positions: np.ndarray,
        chosen: tuple[Tensor, np.ndarray] | None = None,
    ) -> Tensor | None:
        """A step of one new token each.

        Args:
            chunks: What runs.
            manager: Holds the block tables.
            ids: `[B]` the new tokens' ids.
            positions: `[B]` their positions.
            chosen: Ids that only the device knows, as in `TokenInputs`.

        Returns:
            `[B, vocab_size]`, which the next replay writes over; `None`: it can't be replayed, run it eagerly.
        """
        rows = len(chunks)
        if rows > self._sizes[-1]:
            return None
        tables = [manager.block_table(chunk.sequence.seq_id) for chunk in chunks]
        width = max(map(len, tables))
        if width > self._inputs.max_blocks:
            return None
        if self._recordings is None:
            self._recordings = self._record_all()
        size = next(size for size in self._sizes if size >= rows)
        recording = self._recordings.get(size)
        if recording is None:
            return None
        padded = np.full((rows, width), self._inputs.null_block, dtype=np.int32)
        for row, table in enumerate(tables):  # lists become one array, as in AttentionMetadata.build
            padded[row, : len(table)] = table
        lens = np.fromiter((chunk.start + 1 for chunk in chunks), np.int64, rows)
        self._inputs.fill(size, ids, positions, lens, padded, chosen)
        recording.replay()
        return recording.output[:rows]

    def _record_all(self) -> dict[int, Recording]:
        """All sizes, the largest first, whose memory the others use; none, if one can't be recorded or is wrong."""
        recordings: dict[int, Recording] = {}
        sizes = tqdm(self._sizes[::-1], desc="hf_paged: recording CUDA graphs", delay=1, leave=False, disable=None)
        try:
            ids, positions, metadata = self._inputs.trial()
            self._forward(ids, positions, metadata)
            with torch.inference_mode(False):
                self._inputs.hold(metadata.work_kinds)
            for size in sizes:
                self._inputs.clear(size)
                ids, positions, metadata = self._inputs.views(size)

                def step(
                    ids: Tensor = ids, positions: Tensor = positions, metadata: DecodeMetadata = metadata
                ) -> Tensor:
                    logits = self._forward(ids, positions, metadata)
                    if self._logits is None:
                        self._logits = torch.empty_like(logits)
                    return self._logits[: len(logits)].copy_(logits)

                expected = step().clone()  # also compiles what is not compiled yet, which can't be recorded
                recordings[size] = self._record(step)
                recordings[size].replay()
                if not _agree(recordings[size].output, expected):
                    raise RuntimeError(f"a replay of {size} rows computes other logits than the step itself")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that reads something back, makes tensors on the host, ...
            logger.warning(
                "hf_paged: decode steps run without CUDA graphs, since this model's can't be recorded (%s: %s); "
                "cuda_graphs=False keeps this from being tried",
                type(error).__name__,
                str(error).split("\n", 1)[0],
            )
            return {}
        return recordings


def _agree(result: Tensor, expected: Tensor) -> bool:
    """Or there is nothing to compare: weights that are no numbers."""
    truth = expected.float()
    size = truth.norm()
    error = (result.float() - truth).norm()
    return not bool(size.isfinite()) or bool(error <= TOLERANCE.get(expected.dtype, 3e-2) * size + 1e-6)


def recorder(kv_cache: KVCache) -> Callable[[Callable[[], Tensor]], Recording] | str:
    """What records steps over this pool, or why nothing can."""
    device = kv_cache.tensor.device
    if device.type != "cuda":
        return f"need a CUDA device, the model is on {device}"
    if kv_cache.backend.name != "triton":
        return f"need the Triton kernels, this pool is served by {kv_cache.backend.name!r}"
    memory = torch.cuda.graph_pool_handle()
    return lambda function: CUDARecording(function, memory)
