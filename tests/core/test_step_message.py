"""A step as bytes comes out as it went in, whatever is in it."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.core.batch import Batch, GroupTables
from hf_paged.core.step_message import Copy, pack, unpack

_NUMBERS = st.integers(-(2**63), 2**63 - 1)
_BLOCKS = st.integers(-1, 2**31 - 1)
_PAIRS = st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)), max_size=5)


def _arrays(kind: str = "q") -> st.SearchStrategy[array[int]]:
    return st.lists(_BLOCKS if kind == "i" else _NUMBERS, max_size=9).map(lambda values: array(kind, values))


@st.composite
def _batches(draw: Any) -> Batch:
    counts = draw(st.lists(st.integers(0, 4), max_size=4))
    num_groups = draw(st.integers(0, 3))
    tables = [
        GroupTables(array("i", draw(st.lists(_BLOCKS, min_size=sum(counts), max_size=sum(counts)))), array("q", counts))
        for _ in range(num_groups)
    ]
    names = ("seq_ids", "starts", "query_lens", "token_ids", "positions", "embedded", "logit_rows", "logit_starts")
    return Batch(
        number=draw(st.integers(0, 2**40)),
        num_preempted=draw(st.integers(0, 9)),
        is_stalled=draw(st.booleans()),
        placeholders=draw(st.none() | _arrays()),
        axes=draw(st.none() | _arrays()),
        spans=tuple(draw(st.lists(st.tuples(_NUMBERS, _NUMBERS, _NUMBERS), max_size=3))),
        tables=tuple(tables),
        state_blocks=draw(_arrays("i")),
        nums_at_once=draw(_arrays()),
        **{name: draw(_arrays()) for name in names},
    )


_COPIES = st.lists(
    st.tuples(st.sampled_from(["swap_outs", "swap_ins", "block_copies"]), _PAIRS)
    | st.tuples(st.just("new_blocks"), st.lists(st.integers(0, 2**31), max_size=5)),
    max_size=4,
)


@given(batch=_batches(), copies=_COPIES, extra=st.binary(max_size=20))
def test_a_message_comes_out_as_it_went_in(batch: Batch, copies: list[Copy], extra: bytes) -> None:
    found = unpack(pack(batch, copies, extra))
    assert found == (batch, copies, extra)
    assert repr(found.batch) == repr(batch), "of the same types, too"


@given(batch=_batches(), copies=_COPIES, cut=st.integers(1, 8))
def test_a_message_that_was_cut_is_refused(batch: Batch, copies: list[Copy], cut: int) -> None:
    with pytest.raises(ValueError, match="a message"):
        unpack(pack(batch, copies, b"12345678")[:-cut])


def test_what_a_batch_does_to_blocks_is_told_once() -> None:
    batch = Batch(number=3, new_blocks=[7], block_copies=[(1, 2)])
    copies: list[Copy] = [("block_copies", [(1, 2)]), ("new_blocks", [7])]
    assert unpack(pack(batch, copies)) == (replace(batch, new_blocks=[], block_copies=[]), copies, b"")
