"""Tries another way to compute a module before it is used: does it agree with the module's own?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """What a function makes of these arguments; `None` if it is not one for them."""
    try:
        return function(*args)
    except Exception:  # as a norm says that also takes a gate
        return None


def agrees(result: Tensor, truth: Tensor, tolerance: float, dim: int | None = None) -> bool:
    """Whether two tensors are of one dtype and shape, and differ by no more than a share of the truth's size.

    Args:
        result: What was computed another way.
        truth: What it should be.
        tolerance: The share.
        dim: Along it sizes are taken, where rows differ in theirs; `None`: of the whole.
    """
    if result.dtype is not truth.dtype or result.shape != truth.shape:
        return False
    truth = truth.float()
    return bool(((result.float() - truth).norm(dim=dim) <= tolerance * truth.norm(dim=dim)).all())
