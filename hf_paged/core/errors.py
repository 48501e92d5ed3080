"""Exceptions of the package. Bad input raises plain `ValueError`; these are for what a caller may want to catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutOfBlocksError(RuntimeError):
    """The block pool has too few free blocks for what was asked.

    Attributes:
        needed: Blocks the operation would have taken.
        free: Blocks that were free.
        group: The sequence group that does not fit, where the scheduler says so.
        swap_outs: Block pairs `(device, CPU)` still to be copied, of groups preempted in vain.
    """

    def __init__(self, needed: int, free: int, message: str | None = None) -> None:
        self.needed = needed
        self.free = free
        self.group: Any = None
        self.swap_outs: list[tuple[int, int]] = []
        super().__init__(message or f"the operation needs {needed} free block(s), the pool has {free}")


class UnsupportedModelError(ValueError):
    """`patch()` was given a model whose attention or cache the paged pool cannot stand behind.

    Attributes:
        reasons: One sentence for each reason, as in `SupportReport.reasons`.
    """

    def __init__(self, model_name: str, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        super().__init__(f"hf_paged does not support {model_name}: " + "; ".join(reasons))


class UnsupportedCallError(ValueError):
    """Under `strict=True`, a `generate()` call that only stock transformers can serve."""


class QueueFullError(RuntimeError):
    """`submit()` found `max_waiting` requests in the queue."""


@contextmanager
def needs(requirement: str) -> Iterator[None]:
    """Within it, an import of a package that isn't there says what to install.

    Args:
        requirement: As pip takes it, such as `hf-paged[server]`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'{error}: pip install "{requirement}"', name=error.name) from None
