"""Exceptions of the package. Bad input raises plain `ValueError`; these are for what a caller may want to catch."""


class OutOfBlocksError(RuntimeError):
    """The block pool has too few free blocks for what was asked.

    Attributes:
        needed: Blocks the operation would have taken.
        free: Blocks that were free.
    """

    def __init__(self, needed: int, free: int, message: str | None = None) -> None:
        self.needed = needed
        self.free = free
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
