"""Recording CUDA graphs so that the process stays as it was, also where that fails.

While a thread records, other threads may launch, copy and allocate. What raises on them: to wait for the whole device
(`torch.cuda.synchronize()`) and, on torch 2.11, to draw from the default generator. The engine does neither.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hf_paged.core.process import PROCESS

logger = logging.getLogger(__name__)

_WAITED = "called a synchronizing CUDA operation"  # torch's words
_TORCH = str(Path(torch.__file__).parent)

Pool: TypeAlias = Any  # torch's handle of memory that only graphs allocate from


class CUDARecording:
    """A CUDA graph.

    Attributes:
        output: What the function returned; every replay writes to it.
    """

    def __init__(
        self, function: Callable[[], Any], stream: torch.cuda.Stream, other: CUDARecording | None = None
    ) -> None:
        """Records what the function launches, when no other thread records.

        Args:
            function: Launches kernels only, and reads nothing back from the device.
            stream: Where it is recorded: the same for all recordings, since cuBLAS keeps memory for each stream.
            other: Whose memory it uses, too: they never run at once. Not a handle of that memory: torch refuses one for
                ever once the last recording with it is gone.

        Raises:
            Exception: What the function raised, or that something it did can't be recorded. Later work on the device
                is none the worse for it.
        """
        self._graph = torch.cuda.CUDAGraph()
        self._pool: Pool = torch.cuda.graph_pool_handle() if other is None else other._pool
        with PROCESS.recording:  # all models of a device are recorded on one stream
            if other is None:  # what torch keeps of freed memory it can't use, or give back, for what is recorded
                torch.cuda.empty_cache()
            self._record(function, stream)

    def _record(self, function: Callable[[], Any], stream: torch.cuda.Stream) -> None:
        outer = torch.cuda.current_stream()
        before = torch.cuda.memory_reserved()
        stream.wait_stream(outer)
        # Not `torch.cuda.graph`, which collects garbage and waits for the whole device before each recording.
        with torch.cuda.stream(stream):
            try:
                self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                self.output: Any = function()
                self._graph.capture_end()
            except BaseException:
                _recover(self._graph, self._pool)
                raise
        outer.wait_stream(stream)
        self.num_bytes = max(0, torch.cuda.memory_reserved() - before)

    def replay(self) -> None:
        """Replays on the current stream."""
        self._graph.replay()


@lru_cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device that everything is recorded on."""
    return torch.cuda.Stream(device)


def _recover(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    """Ends a recording that failed, and what torch leaves begun behind it. Raises nothing: there is an error already.

    `capture_end` raises for a recording in which something was refused, before this thread's allocations leave the
    pool and (on torch 2.11) before the default generator draws again. The latter ends with the next recording.
    """
    try:
        graph.capture_end()
        return  # only the function raised
    except RuntimeError:
        # Newer torch asks a function that holds the graph's address where pinned memory is to come from while one is
        # recorded, and takes that function away only at the end of a recording that succeeds: with the graph gone, the
        # next pinned allocation would call it.
        PROCESS.kept.append(graph)
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # it may have come further than that
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    try:
        with torch.inference_mode(False), torch.cuda.stream(torch.cuda.Stream()):
            scratch = torch.empty(1, device=f"cuda:{device}")
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            scratch.zero_()  # torch warns of graphs without any work
            empty.capture_end()
    except Exception:
        logger.warning("hf_paged: torch may refuse to draw on this device from here on", exc_info=True)


def first_wait(function: Callable[[], Any]) -> str | None:
    """Runs a function; where in it the host first waited for the device, as far as torch tells.

    A step that does can't be recorded, and trying it is what a process should be spared. Torch tells by warnings, of
    all threads: those of this one are taken, and those of the others dropped, unless they were wanted before.

    Returns:
        "file:line, in function", or `None`.
    """
    own, places = threading.get_ident(), list[str]()
    with PROCESS.recording, warnings.catch_warnings():
        mode = torch.cuda.get_sync_debug_mode()
        show_other = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, *args: Any, **kwargs: Any) -> None:
            is_ours = _WAITED in str(message)
            if is_ours and threading.get_ident() == own:
                places.append(_place(filename, lineno))
            elif not is_ours or mode:
                show_other(message, category, filename, lineno, *args, **kwargs)

        warnings.showwarning = show  # type: ignore[assignment]
        warnings.filterwarnings("always", message=_WAITED)
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return places[0] if places else None


def _place(filename: str, lineno: int) -> str:
    """The innermost code that isn't torch's own, of what led to a line of this thread."""
    frame: Any = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (filename, lineno):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None:
        return f"{filename}:{lineno}"
    return describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def raised_at(error: BaseException) -> str | None:
    """The innermost code that isn't torch's own in the traceback of an error."""
    place = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_TORCH):
            place = describe(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return place


def describe(filename: str, lineno: int, function: str) -> str:
    """Describes a line of code in words, without the folder that packages are installed in."""
    for name in ("site-packages/", "dist-packages/"):
        filename = filename.rpartition(name)[2]
    return f"{filename}:{lineno}, in {function}"
