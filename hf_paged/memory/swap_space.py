"""`SwapSpace`: CPU memory for the blocks of preempted sequences, and the copies there and back."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**26  # of CPU memory that is taken at once: to pin it takes some 20 ms, in which no step begins


class SwapSpace:
    """Blocks in CPU memory, beside a pool. A block is contiguous, and neighbours are moved as one.

    The memory is taken in pieces, each when something is first swapped there. A piece holds as many blocks as fit into
    `PIECE_BYTES`, a power of two, since torch rounds pinned memory up to one.

    On a GPU the copies go through pinned memory on a stream of their own, between what was queued before and what is
    queued next: the blocks were written there, and are used again there. The calls themselves don't wait.
    """

    def __init__(self, pool: Tensor, num_blocks: int, piece_bytes: int = PIECE_BYTES) -> None:
        """For `num_blocks` blocks beside a pool `[blocks, ...]`, which is contiguous. Takes no memory yet."""
        self._pool = pool
        self._is_cuda = pool.device.type == "cuda"
        self._num_blocks = num_blocks
        self._piece_blocks = max(1, piece_bytes // max(1, pool[0].nbytes))
        self._pieces: dict[int, Tensor] = {}
        self._stream = torch.cuda.Stream(pool.device) if self._is_cuda else None
        self._unread: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._finished: list[tuple[int, float]] = []

    @property
    def num_bytes(self) -> int:
        """The CPU memory taken so far."""
        return sum(piece.nbytes for piece in self._pieces.values())

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks here, pairs `(pool, here)`."""
        with self._copying(len(pairs)):
            for start, to, length in runs(pairs):
                for place, own in self._parts(to, length):
                    first = start + place - to
                    own.copy_(self._pool[first : first + len(own)], non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks back, pairs `(here, pool)`."""
        with self._copying(len(pairs)):
            for start, to, length in runs(pairs):
                for place, own in self._parts(start, length):
                    first = to + place - start
                    self._pool[first : first + len(own)].copy_(own, non_blocking=True)

    def _parts(self, start: int, length: int) -> Iterator[tuple[int, Tensor]]:
        """The memory of blocks that are neighbours here, and the number of the first, piece by piece."""
        end = start + length
        while start < end:
            index, offset = divmod(start, self._piece_blocks)
            size = min(self._piece_blocks, self._num_blocks - start + offset)
            if (piece := self._pieces.get(index)) is None:
                shape = (size, *self._pool.shape[1:])
                piece = self._pieces[index] = _allocate(shape, self._pool.dtype, is_pinned=self._is_cuda)
            yield start, (own := piece[offset : offset + end - start])
            start += len(own)

    def finished(self) -> list[tuple[int, float]]:
        """Blocks and seconds of the copies that have ended since this was last asked. Waits for none."""
        while self._unread and self._unread[0][2].query():
            num_blocks, start, end = self._unread.popleft()
            self._finished.append((num_blocks, start.elapsed_time(end) / 1000))
        result, self._finished = self._finished, []
        return result

    @contextmanager
    def _copying(self, num_blocks: int) -> Iterator[None]:
        if self._stream is None:
            started = time.perf_counter()
            yield
            self._finished.append((num_blocks, time.perf_counter() - started))
            return
        current = torch.cuda.current_stream(self._pool.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                start.record()
                yield
                end.record()
        finally:
            current.wait_stream(self._stream)
        self._unread.append((num_blocks, start, end))


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Pairs `(source, destination)` as few pieces `(source, destination, length)`: neighbours that stay neighbours."""
    start, to, length = -1, -1, 0
    for source, destination in sorted(pairs):
        if length and (source, destination) == (start + length, to + length):
            length += 1
            continue
        if length:
            yield start, to, length
        start, to, length = source, destination, 1
    if length:
        yield start, to, length


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, is_pinned: bool) -> Tensor:
    """Allocates CPU memory: pinned if asked for and the system grants it, else ordinary, only slower."""
    with torch.inference_mode(False):
        if is_pinned:
            try:
                return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                # By now the block tables say that the blocks are there: a refusal must not lose them.
                logger.warning("hf_paged: no pinned memory for swapped blocks, swapping will be slower: %s", error)
        return torch.empty(shape, dtype=dtype, device="cpu")
