"""OpenMP's threads, of which torch keeps some for every thread that ever computed something large."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

_SOFT = 1  # omp_pause_soft: what was set stays set


def rest_threads() -> None:
    """Ends the OpenMP threads that serve the calling thread, which is about to wait for another one that computes.

    GNU's runtime counts the threads of all its teams. With more of them than processors it lets each fall asleep at
    once when it has nothing to do, instead of spinning for the next piece of work, and a model's forward consists of
    hundreds of pieces: on two cores, the team that the main thread left behind when it loaded the model costs the
    worker a fifth of its speed. The threads come back with the caller's next large operation, in some 50 microseconds.
    """
    pause = _pause()
    if pause is not None and torch.get_num_threads() > 1:
        pause(_SOFT)


@lru_cache
def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all`, of GNU's runtime alone: there it means the calling thread's own team."""
    try:
        library = ctypes.CDLL(None)
        if hasattr(library, "GOMP_parallel") and not hasattr(library, "__kmpc_fork_call"):
            return library.omp_pause_resource_all
    except (OSError, AttributeError, TypeError):  # another system, another runtime, an old one
        pass
    return None
