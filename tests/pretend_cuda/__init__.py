"""Two CUDA devices that aren't there: `install()`, and all that says `cuda` runs on the CPU and is watched.

Tensors, dispatch, memory, pinned copies, streams, events, generators and graphs are `device.cpp`'s; here is what torch
does in Python (`torch.cuda`), how Triton's interpreter is given device tensors, and the ledger of what was seen:

    with watch() as seen:
        model.generate(ids.to("cuda"))
    assert not seen.waits

It is a process's own: install it before anything asks whether there is a GPU, and in no process that tests the CPU.
Of a real device it lacks arithmetic (the CPU's instead), time, a limit of memory but `memory_limit`'s, and order: what
streams do concurrently there, happens here in the order of the calls. Of races it sees copies read or overwritten
before they were waited for (on their device), and graphs that read what an earlier replay left or memory that has been
freed. A kernel of Triton's that is launched while another device than its tensors' is the current one raises.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("device.cpp")
BLOCKING = frozenset({"sync", "pageable"})


# ------------------------------------------------------------------------------------------------------ what was seen


@dataclass(frozen=True, slots=True)
class Event:
    """Something the device was asked.

    Attributes:
        kind: As in `device.cpp`: "sync", "wait", "pageable", "copy", "draw", "race", "record_stream"; and "launch" and
            "compile" of Triton kernels, "capture" and "replay" of graphs.
        detail: The operation.
        stream: Number of the stream whose work is meant; -1: of all.
        thread: Name of the thread.
        site: `file:line` of the innermost frames of this project and of transformers.
    """

    kind: str
    detail: str
    stream: int
    thread: str
    site: str


@dataclass(slots=True)
class Seen:
    """What was seen within `watch()`.

    Attributes:
        events: In order.
        notify: Called with each, on its thread.
    """

    events: list[Event] = field(default_factory=list)
    notify: Callable[[Event], None] = lambda event: None

    def of(self, *kinds: str) -> list[Event]:
        """Those of some kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def waits(self) -> list[Event]:
        """Where the host waited for the device, or might have."""
        return self.of(*BLOCKING)

    def where(self, *kinds: str) -> Counter[str]:
        """How often at which place."""
        return Counter(f"{event.kind} {event.detail} at {event.site}" for event in self.of(*kinds))


_watchers: list[Seen] = []
_sync_debug = threading.local()


@contextmanager
def watch() -> Iterator[Seen]:
    """Within it, what happens on any thread is written down."""
    seen = Seen()
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.remove(seen)


def _site() -> str:
    places = []
    frame = sys._getframe(2)
    while frame is not None and len(places) < 2:
        name = frame.f_code.co_filename
        for package in ("/hf_paged/", "/transformers/", "/tests/"):
            if package in name and not name.startswith(str(SOURCE.parent)):
                places.append(f"{name[name.rindex(package) + 1 :]}:{frame.f_lineno}")
                break
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(places)


def note(kind: str, detail: str = "", stream: int | None = None) -> None:
    """Writes an event down."""
    if _watchers:
        number = torch.cuda.current_stream().stream_id if stream is None else stream
        event = Event(kind, detail, number, threading.current_thread().name, _site())
        for seen in _watchers:
            seen.events.append(event)
            seen.notify(event)


def _told(kind: bytes, detail: bytes, stream: int) -> int:
    note(kind.decode(), detail.decode(), stream)
    mode = torch.cuda.get_sync_debug_mode()
    if mode and kind == b"sync":  # of copies that are not said to block, torch tells nothing
        if mode == 2:
            return 1
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    return 0


_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)(_told)


# ------------------------------------------------------------------------------------------------------------- library


def _library() -> Path:
    """The compiled `device.cpp`, made once for each text and torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_paged"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"pretend_cuda-{key}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        from torch.utils import cpp_extension

        with tempfile.TemporaryDirectory(dir=folder) as build:
            made = Path(build, path.name)
            subprocess.run(
                [
                    *("g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w"),
                    *(f"-I{include}" for include in cpp_extension.include_paths()),
                    *(str(SOURCE), "-o", str(made)),
                    *(f"-L{folder}" for folder in cpp_extension.library_paths()),
                    *("-ltorch_cpu", "-lc10"),
                ],
                check=True,
            )
            made.replace(path)
    return path


# -------------------------------------------------------------------------------------------------------------- memory


@dataclass
class Memory:
    """What `torch.cuda` says of the device's memory, in bytes. What allocations are held to is `memory_limit`'s.

    Attributes:
        total: Of the device.
        free: Now.
    """

    total: int = 2**31
    free: int = 2**30


memory = Memory()


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Within it `cuda:0` runs out of memory where it would use more than so many bytes beyond those in use now."""
    torch.ops.pretend_cuda.set_limit(torch.ops.pretend_cuda.allocated(0) + num_bytes, 0)
    try:
        yield
    finally:
        torch.ops.pretend_cuda.set_limit(0, 0)


# -------------------------------------------------------------------------------------------------------------- graphs


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._number: int | None = None
        self._launches: list[tuple[int, Callable[[], None]]] = []  # of Triton kernels, and how many operations before
        self._names: list[str] = []
        self._pool: Any = None
        self._stream = 0
        self._is_ended = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        stream = torch.cuda.current_stream().stream_id
        if stream == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        pool = pool or torch.cuda.graph_pool_handle()
        if _uses_of_pool.get(pool) == 0:  # a handle whose last graph is gone is of no use any more
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")
        _uses_of_pool[pool] = _uses_of_pool.get(pool, 0) + 1
        _open_pools.add(pool)
        if stream in _capturing_streams:
            raise RuntimeError("CUDA error: operation not permitted: another thread captures this stream")
        self._number = torch.ops.pretend_cuda.capture_begin()
        self._pool, self._stream = pool, stream
        _capturing_streams.add(stream)
        _graphs_by_pool.setdefault(pool, set()).add(self._number)
        _captured.graph = self
        note("capture", capture_error_mode)

    def capture_end(self) -> None:
        if _captured.graph is self:
            _capturing_streams.discard(self._stream)
        _captured.graph = None
        torch.ops.pretend_cuda.capture_end()
        _open_pools.discard(self._pool)  # which torch does not come to where that raises
        self._is_ended = True

    def replay(self) -> None:
        note("replay")
        if torch.ops.pretend_cuda.is_capturing():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing: a replay")
        own = torch.ops.pretend_cuda
        own.graph_check(self._number)
        for number in _graphs_by_pool[self._pool]:
            own.graph_poison(number)
        begin = 0
        for end, launch in self._launches:
            own.graph_replay(self._number, begin, end)
            launch()
            begin = end
        own.graph_replay(self._number, begin, own.graph_size(self._number))

    def add_launch(self, name: str, launch: Callable[[], None]) -> None:
        """Has a Triton kernel launched again behind what was recorded so far."""
        self._launches.append((torch.ops.pretend_cuda.graph_size(self._number), launch))
        self._names.append(name)

    @property
    def names(self) -> list[str]:
        """What it launches: Triton kernels, then torch's operations, each of which is at least one kernel."""
        return [*self._names, *torch.ops.pretend_cuda.graph_operations(self._number)]

    def reset(self) -> None:
        if self._number is not None:
            _graphs_by_pool[self._pool].discard(self._number)
            torch.ops.pretend_cuda.graph_drop(self._number)
            self._number = None
            if self._is_ended:
                _release_pool(0, self._pool)

    def pool(self) -> Any:
        return self._pool

    def __del__(self) -> None:
        if self._number is not None and not self._is_ended:
            _destroyed_in_capture.append(self._number)
        self.reset()


class _Captured(threading.local):
    graph: Graph | None = None


_captured = _Captured()
_graphs_by_pool: dict[Any, set[int]] = {}
_uses_of_pool: dict[Any, int] = {}  # by graphs, and by captures that failed until it is released
_capturing_streams: set[int] = set()
_destroyed_in_capture: list[int] = []  # graphs whose capture failed: newer torch asks them at each pinned allocation
_open_pools: set[Any] = set()  # to which a thread allocates, also after a capture that failed


def _end_allocate_to_pool(device: int, pool: Any) -> None:
    if pool not in _open_pools:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    _open_pools.discard(pool)


def _release_pool(device: int, pool: Any) -> None:
    assert _uses_of_pool[pool] > 0, "released more often than used"
    _uses_of_pool[pool] -= 1


def num_pools() -> int:
    """Pools of which some graph, or a capture that failed, keeps the memory."""
    return sum(uses > 0 for uses in _uses_of_pool.values())


def num_destroyed_in_capture() -> int:
    """Graphs whose capture failed and that are gone."""
    return len(_destroyed_in_capture)


def is_allocating_to_a_pool() -> bool:
    """Whether a failed capture has left its thread's memory going to a graph's pool."""
    return bool(_open_pools)


# -------------------------------------------------------------------------------------------------------------- Triton

_compiled: set[Any] = set()


def _take_device_tensors() -> None:
    """Has Triton's interpreter take tensors of this device, and no others."""
    import triton
    from triton.runtime import interpreter

    own_call = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **named: Any) -> None:
        given = [*args, *named.values()]
        tensors = [value for value in given if isinstance(value, Tensor)]
        if not any(tensor.is_cuda for tensor in tensors):
            return own_call(self, *args, **named)
        if not all(tensor.is_cuda for tensor in tensors):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        name, device = self.fn.__name__, torch.cuda.current_device()
        if any(tensor.device.index != device for tensor in tensors):
            places = sorted({str(tensor.device) for tensor in tensors})
            raise RuntimeError(f"{name} of {', '.join(places)} is launched on cuda:{device}")
        key = (name, *(value.dtype if isinstance(value, Tensor) else type(value) for value in args), *_constants(named))
        if key not in _compiled:
            note("compile", name)
            if torch.ops.pretend_cuda.capture_fails():
                raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {name} is compiled")
            _compiled.add(key)
            triton.knobs.runtime.kernel_load_end_hook(None, None, name, {}, "")
        note("launch", name)
        host = torch.ops.pretend_cuda.host
        own_args = [host(value) if isinstance(value, Tensor) else value for value in args]
        own_named = {key: host(value) if isinstance(value, Tensor) else value for key, value in named.items()}

        def launch() -> None:
            own_call(self, *own_args, **own_named)

        launch()
        if _captured.graph is not None:
            _captured.graph.add_launch(name, launch)

    interpreter.GridExecutor.__call__ = call


def _constants(named: dict[str, Any]) -> Iterator[Any]:
    for name, value in sorted(named.items()):
        yield name, value.dtype if isinstance(value, Tensor) else value


# ---------------------------------------------------------------------------------------------------------- torch.cuda


class Stream(torch.Stream):
    """In the place of `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=f"cuda:{_index(device)}")

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


def _stream(stream: Any) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=1)


def _index(device: Any = None) -> int:
    """The number of a device, as `torch.cuda` takes one; `None`: the current one's."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.ops.pretend_cuda.current_device() if index is None else index


class _StreamContext:
    """A stream's device is the current one within it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._device = torch.cuda.current_device()
            self._before = torch.cuda.current_stream(self._stream.device)
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *exc: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)
            torch.cuda.set_device(self._device)


def _event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    return torch.Event(device="cuda:0", enable_timing=enable_timing, blocking=blocking)


class _OnDevice:
    """In the place of `torch.cuda.device`. A number below 0 is none."""

    def __init__(self, device: Any = None) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.cuda.current_device()
        if self._index >= 0:
            torch.cuda.set_device(self._index)

    def __exit__(self, *exc: object) -> None:
        torch.cuda.set_device(self._before)


class _OnDeviceOf(_OnDevice):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.device if tensor.is_cuda else -1)


_installed = False


def install() -> None:
    """Makes this process one with two CUDA devices. It stays so.

    Raises:
        RuntimeError: Torch has CUDA of its own here.
    """
    global _installed
    if _installed:
        return
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise RuntimeError("this build of torch has a device of its own; the pretended one needs a build for CPU")
    torch.ops.load_library(str(_library()))
    torch.ops.pretend_cuda.watch(ctypes.cast(_callback, ctypes.c_void_p).value)
    own = torch.ops.pretend_cuda
    generators = own.default_generator(0), own.default_generator(1)
    properties = SimpleNamespace(
        warp_size=32,
        name="pretended",
        major=9,
        minor=0,
        multi_processor_count=8,  # of which kernels start a program each, at least
        max_threads_per_multi_processor=2048,  # by which draws are shared out, in device.cpp, too
        total_memory=memory.total,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
    )
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: len(generators),
        "current_device": lambda: own.current_device(),
        "set_device": lambda device: own.set_device(_index(device)),
        "device": _OnDevice,
        "device_of": _OnDeviceOf,
        "default_generators": generators,
        "Stream": Stream,
        "Event": _event,
        "stream": _StreamContext,
        "StreamContext": _StreamContext,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": lambda device=None: _stream(torch.accelerator.current_stream(_index(device))),
        "default_stream": lambda device=None: Stream(stream_id=0, device_index=_index(device), device_type=1),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, next(_pools)),
        "is_current_stream_capturing": lambda: torch.ops.pretend_cuda.is_capturing(),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretended",
        "mem_get_info": lambda device=None: (memory.free, memory.total),
        "memory_allocated": lambda device=None: own.allocated(_index(device)),
        "memory_reserved": lambda device=None: own.allocated(_index(device)),
        "max_memory_allocated": lambda device=None: own.peak_allocated(_index(device)),
        "reset_peak_memory_stats": lambda device=None: own.reset_peak(_index(device)),
        "empty_cache": lambda: None,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "get_sync_debug_mode": lambda: _sync_mode[0],
        "get_rng_state": lambda device="cuda": generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[_index(device)].set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": lambda states: [
            each.set_state(state) for each, state in zip(generators, states, strict=True)
        ],
    }
    for module in (torch.cuda, torch.cuda.random):  # which has imported some
        for name, value in replaced.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    own_clone = torch.UntypedStorage.clone
    torch.UntypedStorage.clone = lambda storage: _clone(storage) if storage.is_cuda else own_clone(storage)  # type: ignore
    torch._C._cuda_endAllocateToPool = _end_allocate_to_pool  # type: ignore[attr-defined]
    torch._C._cuda_releasePool = _release_pool  # type: ignore[attr-defined]
    _take_device_tensors()
    _installed = True


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A CPU build can't make a CUDA storage but through a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


_pools = iter(range(1, 2**31))
_sync_mode = [0]


def _set_sync_debug_mode(mode: int | str) -> None:
    _sync_mode[0] = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore[assignment,arg-type]
