"""States of a packed step's rows where they lie in the pool, as kernels read and write them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """The rows of a packed step, and where their states are.

    Attributes:
        pages: `[S, pages]` int64, of each row.
        seq_lens: `[S]` int32, tokens of each row including the step's: one with no others begins without a state.
        start_loc: `[S + 1]` int32, the first token of each row.
        nums_at_once: `[S]` int32, of each row the index behind the last token that came together with others.
        is_decode: Whether each row has one token.
        is_long: Whether some have so many that a scan of one after the other may not be the fastest.
        has_padding: Whether tokens may belong to no row.
    """

    pages: Tensor
    seq_lens: Tensor
    start_loc: Tensor
    nums_at_once: Tensor
    is_decode: bool
    is_long: bool
    has_padding: bool


@dataclass(frozen=True, slots=True, eq=False)
class PagedState:
    """One tensor of all rows' states, where it is in the pool. As far as mixers see, it has a tensor's shape.

    Attributes:
        pool: `[num_pages, page]` of its dtype, contiguous.
        offset: Index of its first number, counting through the row's pages in order.
        shape: `(S, ...)`.
        strides: Within a row's pages, of all dimensions but the first.
    """

    rows: StateRows
    pool: Tensor
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def mT(self) -> PagedState:
        """The last two dimensions in the other order."""
        (*first, one, other), (*strides, own, next_one) = self.shape, self.strides
        return replace(self, shape=(*first, other, one), strides=(*strides, next_one, own))

    def to(self, *_: object) -> PagedState:
        """As it is: what a mixer hands on as the new state is that of the pool."""
        return self

    def unsqueeze(self, dim: int) -> PagedState:
        """With a dimension of one at this place, behind that of the rows."""
        shape, strides = self.shape, self.strides
        return replace(
            self, shape=(*shape[:dim], 1, *shape[dim:]), strides=(*strides[: dim - 1], 0, *strides[dim - 1 :])
        )

    @property
    def is_in_one_page(self) -> bool:
        page = self.pool.shape[1]
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape[1:], self.strides, strict=True))
        return self.offset // page == last // page
