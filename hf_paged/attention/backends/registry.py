"""The interface of a backend, and the choice of one for a pool among those that modules of this package register."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

import hf_paged.attention.backends as package
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams
from hf_paged.core.config import attention_backends
from hf_paged.kernels.scaled_rows import head_dim_of
from hf_paged.kernels.transfers import to_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """The pool that a backend is asked about.

    Attributes:
        has_two_widths: Whether its values are not as wide as its keys.
        latent_dim: Where rows of one head hold a latent and a rotary key, elements of the latent; `None`: they don't.
    """

    device: torch.device
    dtype: torch.dtype
    compute_dtype: torch.dtype
    head_dim: int
    has_two_widths: bool = False
    latent_dim: int | None = None


class PagedStep(Protocol):
    """One step's packed batch over one pool: what every attention layer of a forward calls."""

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Stores the new tokens' `[T, num_kv_heads, width]` keys and values of one layer."""

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        """`[T, num_heads, width]` of the values for the new tokens' queries, `[T, num_heads, width]` of the keys.

        Where the pool holds latents, these are the keys and values that `params.maps` makes of them.
        """


class Backend(ABC):
    """The operations over one KV tensor, `[blocks, layers, 2, kv_heads, block_size, head_dim]`, or (where keys and
    values differ in width) `[blocks, layers, 1, kv_heads, block_size, key_dim + value_dim]`, or (of int8) as
    `scaled_rows.py` says. What a block holds is contiguous; blocks may have other numbers between them.

    Attributes:
        reads_empty_slots: Whether it reads slots of a block that hold no token (and multiplies them by zero).
        can_record: Whether its decode steps can be recorded in CUDA graphs.
        can_record_all: Whether all others can, too.
    """

    name: ClassVar[str]
    reads_empty_slots: bool = True
    can_record: bool = False
    can_record_all: bool = False

    def __init__(self, kv_cache: Tensor, latent_dim: int | None = None, dtype: torch.dtype | None = None) -> None:
        """`dtype`: the model's; `None`: as the pool's."""
        self._kv_cache = kv_cache

    @classmethod
    @abstractmethod
    def supports(cls, pool: PoolDescription) -> str | None:
        """Says why it can't serve such a pool, as what follows its name in a sentence; `None`: it can."""

    @abstractmethod
    def step(self, metadata: AttentionMetadata) -> PagedStep:
        """The operations of one step."""

    @abstractmethod
    def copy_blocks(self, pool: Tensor, copies: list[tuple[int, int]]) -> None:
        """Copies whole blocks of a pool `[blocks, ...]`, pairs `(source, destination)`; all sources are read before
        anything is written.
        """

    def warm_up(self, pool: Tensor, block: int) -> None:
        """Launches the kernels that no forward does, on a block that stays as it is."""
        return


@dataclass(frozen=True, slots=True)
class _Entry:
    backend: type[Backend]
    device_types: tuple[str, ...] | None
    preference: int


def register(
    name: str, device_types: tuple[str, ...] | None, preference: int
) -> Callable[[type[Backend]], type[Backend]]:
    """Makes a backend known.

    Args:
        name: What `PagedConfig.attention_backend` calls it.
        device_types: Those where "auto" considers it; `None`: everywhere.
        preference: "auto" takes the highest that supports the pool.
    """

    def add(backend: type[Backend]) -> type[Backend]:
        backend.name = name
        attention_backends[name] = _Entry(backend, device_types, preference)
        return backend

    return add


def names() -> list[str]:
    """All registered names, in the order in which "auto" prefers them."""
    return sorted(attention_backends.keys() - {"auto"}, key=lambda name: -attention_backends[name].preference)


def choose(name: str, kv_cache: Tensor, dtype: torch.dtype, latent_dim: int | None = None) -> Backend:
    """The backend for a pool.

    Args:
        name: One of `names()`, or "auto": the first of them that is for this device and supports the pool.

    Raises:
        ValueError: There is none of this name, or it can't serve the pool; the message says why.
    """
    has_two_widths = kv_cache.shape[2] == 1 and latent_dim is None
    pool = PoolDescription(kv_cache.device, kv_cache.dtype, dtype, head_dim_of(kv_cache), has_two_widths, latent_dim)
    known = names()
    if name != "auto":
        if name not in known:
            raise ValueError(f"attention_backend must be one of auto, {', '.join(known)}; got {name!r}")
        reason = _supports(name, pool)
        if reason is not None:
            others = [f'"{own}"' for own in reversed(known) if _is_for(own, pool) and _supports(own, pool) is None]
            raise ValueError(f'attention_backend="{name}" {reason}; use {", ".join(others)} or "auto"')
        return attention_backends[name].backend(kv_cache, latent_dim, dtype)
    for own in known:
        if not _is_for(own, pool):
            continue
        reason = _supports(own, pool)
        if reason is None:
            return attention_backends[own].backend(kv_cache, latent_dim, dtype)
        logger.info("hf_paged: the attention backend %r is not used: it %s", own, reason)
    raise ValueError(f"no attention backend serves a pool of {pool.dtype} on {pool.device}")


def _is_for(name: str, pool: PoolDescription) -> bool:
    device_types = attention_backends[name].device_types
    return device_types is None or pool.device.type in device_types


def _supports(name: str, pool: PoolDescription) -> str | None:
    return attention_backends[name].backend.supports(pool)


def block_pairs(copies: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Copies sources and destinations of block copies to the device, `[P]` int64 each, in one transfer."""
    both = to_device(np.array(copies, dtype=np.int64).T, device)
    return both[0], both[1]


for _module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"{package.__name__}.{_module.name}")
