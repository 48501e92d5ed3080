"""`Batch`: one step as data, the same whoever reads it and whatever happens to its sequences later."""

from __future__ import annotations

import pickle
from array import array
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from hf_paged.core.batch import Batch, BlockMoves, Chunk, lay_out
from hf_paged.core.sequence import Sequence, SequenceGroup


def sequence(seq_id: int, tokens: list[int] | None, num_tokens: int | None = None, **facts: Any) -> Sequence:
    num_tokens = len(tokens or ()) if num_tokens is None else num_tokens
    return Sequence(seq_id, SequenceGroup(seq_id), tokens, num_tokens, **facts)


def batch_of(*chunks: Chunk, tables: list[list[int]] | None = None, **facts: Any) -> Batch:
    tables = tables or [[row] for row, _ in enumerate(chunks)]
    facts = {"number": 1, "batch_key": None, "num_preempted": 0, "is_stalled": False} | facts
    return lay_out(list(chunks), [[array("i", table) for table in tables]], BlockMoves(new_blocks=[3]), **facts)


def test_rows_lie_side_by_side() -> None:
    batch = batch_of(
        (sequence(7, [10, 11, 12], position_offset=2), 2, 1),
        (sequence(8, [20, 21, 22, 23, 24]), 1, 3),
        tables=[[4, 5], [9]],
    )
    assert batch.chunks == [(7, 2, 1), (8, 1, 3)]
    assert (batch.num_seqs, batch.num_tokens, batch.is_decode) == (2, 4, False)
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([12, 21, 22, 23], [4, 1, 2, 3])
    (tables,) = batch.tables
    assert (tables.blocks.tolist(), tables.counts.tolist()) == ([4, 5, 9], [2, 1])
    assert memoryview(tables.blocks).itemsize == 4 and memoryview(batch.token_ids).itemsize == 8
    assert (batch.logit_rows.tolist(), batch.logit_starts.tolist()) == ([0], [0, 1, 1]), "the prompt goes on"
    assert batch.placeholders is None and batch.given == ()


@pytest.mark.parametrize("has_prompt", [False, True])
def test_tokens_that_only_the_device_knows(has_prompt: bool) -> None:
    rows = [(sequence(1, [5, 6]), 1, 1), (sequence(2, [7, 8], 3, placeholder=4), 2, 1)]
    batch = batch_of(*rows, *([(sequence(3, [1, 2, 3]), 0, 2)] if has_prompt else []))
    rest = [1, 2] if has_prompt else []
    assert batch.token_ids.tolist() == [6, 0, *rest]
    assert batch.placeholders is not None and batch.placeholders.tolist() == [-1, 4, *(-1 for _ in rest)]
    assert batch.is_decode is not has_prompt


@pytest.mark.parametrize("facts", [{"tokens": None}, {"tokens": [1, 2], "position_offset": None}])
def test_rows_that_only_their_caller_knows(facts: dict[str, Any]) -> None:
    batch = batch_of((sequence(1, [5]), 0, 1), (sequence(2, num_tokens=2, **facts), 0, 2), (sequence(3, [9]), 0, 1))
    assert batch.given == (1,) and batch.token_ids.tolist() == [5, 0, 0, 9] and batch.positions.tolist() == [0] * 4
    assert batch.logit_rows.tolist() == [0, 2, 3]


def test_which_logits_are_wanted() -> None:
    """In the caller's order, as far as the chunk holds them; without a wish the last token's."""
    first = sequence(1, [1, 2, 3, 4], wanted=[3, 1, 1, 0])
    batch = batch_of((sequence(0, [9], wanted=[]), 0, 1), (first, 1, 3), (sequence(2, [1, 2]), 0, 2))
    assert batch.logit_rows.tolist() == [3, 1, 1, 5]
    assert batch.logit_starts.tolist() == [0, 0, 3, 4]


def test_it_stays_what_it_was() -> None:
    own, table = sequence(1, [1, 2]), array("i", [5])
    batch = lay_out([(own, 1, 1)], [[table]], BlockMoves(), number=1, batch_key="k", num_preempted=0, is_stalled=False)
    digest = batch.digest()
    assert own.token_ids is not None
    own.token_ids[1], table[0] = 70, 71
    assert batch.token_ids.tolist() == [2] and batch.tables[0].blocks.tolist() == [5] and batch.digest() == digest
    with pytest.raises(FrozenInstanceError):
        batch.number = 2  # type: ignore[misc]


def test_it_travels_whole() -> None:
    rows = [(sequence(i, list(range(300)), 300), 299, 1) for i in range(64)]
    batch = batch_of(*rows, batch_key=("cpu", False), num_preempted=2)
    packed = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
    assert pickle.loads(packed) == batch and pickle.loads(packed).digests() == batch.digests()
    assert len(packed) < 64 * 8 * 10 + 1500, "numbers, no objects"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tables": [[6]]}, "tables"),
        ({"number": 2}, "number"),
        ({"is_stalled": True}, "is_stalled"),
        ({"batch_key": "other"}, None),
    ],
)
def test_digests_say_what_differs(change: dict[str, Any], field: str | None) -> None:
    own = (sequence(1, [1, 2]), 1, 1)
    one, other = batch_of(own), batch_of(own, **change)
    names = {*one.digests(), *other.digests()}
    differing = {name for name in names if one.digests().get(name) != other.digests().get(name)}
    assert differing == ({field} if field else set())
    assert (one.digest() == other.digest()) is (field is None)
