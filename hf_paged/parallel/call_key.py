"""What a call asks for, as a digest: ranks notice by it that they make different calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_paged.attention.cache import PagedCache

_PLAIN = (str, bytes, int, float, bool, type(None))


def call_key(method: str, arguments: dict[str, Any], config: Any = None, items: Iterable[Any] = ()) -> bytes:
    """16 bytes that calls of the same inputs, settings and kinds of processors and criteria have in common.

    Args:
        method: What is called.
        arguments: What it is given.
        config: A generation config.
        items: Processors and criteria.
    """
    digest = hashlib.blake2b(method.encode(), digest_size=16)
    for name, value in sorted(arguments.items()):
        digest.update(name.encode())
        _add(digest, value)
    settings = {} if config is None else vars(config)
    for name, value in sorted(settings.items()):
        if not name.startswith("_"):
            digest.update(f"{name}={_plain(value)}".encode())
    for item in items:
        digest.update(f"{type(item).__module__}.{type(item).__qualname__}".encode())
    return digest.digest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous()
        digest.update(f"{values.dtype}{tuple(values.shape)}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy() if values.numel() else b"")
    elif isinstance(value, PagedCache):
        digest.update(f"cache {value.batch_size} {value.get_seq_length()}".encode())
    else:
        digest.update(_plain(value).encode())


def _plain(value: Any) -> str:
    """A value in words that are the same in another process; of an object its kind alone."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        return (
            "[" + ",".join(map(_plain, sorted(value, key=repr) if isinstance(value, set | frozenset) else value)) + "]"
        )
    if isinstance(value, dict):
        return "{" + ",".join(f"{_plain(key)}:{_plain(own)}" for key, own in value.items()) + "}"
    if isinstance(value, Tensor):
        return repr(value.tolist())
    return f"{type(value).__module__}.{type(value).__qualname__}"
