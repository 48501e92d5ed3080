"""OpenMP's threads, of which torch keeps some for every thread that ever computed something large; and how many."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import lru_cache

import torch

from hf_paged.core.control_group import allowed_cpus

logger = logging.getLogger(__name__)

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
def warn_of_quota(num_threads: int) -> None:
    """Warns, once for each number of threads, where a control group allows fewer processors than so many threads use.

    torch counts the machine's cores, whatever share of them its container may use. A team of more threads is stopped
    for the rest of each period, in the midst of a product, while its others spin.
    """
    allowed = allowed_cpus()
    if allowed is not None and num_threads > max(1.0, allowed):
        logger.warning(
            "hf_paged: torch computes on %d threads, and the process's control group (container) allows %g processors: "
            "steps stall; call torch.set_num_threads(%d) or set OMP_NUM_THREADS=%d",
            *(num_threads, allowed, max(1, int(allowed)), max(1, int(allowed))),
        )


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
