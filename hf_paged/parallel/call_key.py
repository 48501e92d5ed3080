"""What a call asks for, as a digest: ranks notice by it that they make different calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_paged.attention.cache import PagedCache


def call_key(method: str, arguments: dict[str, Any], config: Any = None, items: Iterable[Any] = ()) -> bytes:
    """16 bytes that calls of the same inputs, settings and kinds of processors and criteria have in common.

    Args:
        method: What is called.
        arguments: What it is given.
        config: A generation config.
        items: Processors and criteria.
    """
    tensors = {name: value.detach().cpu() for name, value in arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in arguments.items() if name not in tensors}
    settings = {} if config is None else {name: own for name, own in vars(config).items() if not name.startswith("_")}
    said = [method, others, settings, list(items), {name: f"{own.dtype}{own.shape}" for name, own in tensors.items()}]
    digest = hashlib.blake2b(json.dumps(said, skipkeys=True, default=_kind).encode(), digest_size=16)
    for _, tensor in sorted(tensors.items()):
        if tensor.numel():
            digest.update(bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()))
    return digest.digest()


def _kind(value: Any) -> str:
    """Names an object by what is the same in another process."""
    if isinstance(value, PagedCache):
        return f"cache {value.batch_size} {value.get_seq_length()}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
